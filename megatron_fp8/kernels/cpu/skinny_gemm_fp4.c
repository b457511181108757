/* Products of few rows by NVFP4 weights in 16 x 16 blocks, as in decoding: codes are read once, as they lie.

   For processors with AVX512-BF16. Lanes are rows of b, so that an element's sum has gemm.c's order. Words of 8 codes, of
   16 rows, are transposed; then one permutation looks up 32 numbers, in a table of the 16 numbers times the block's
   scale. */

#include <stdlib.h>

#include "pack.h"

typedef struct {
    const uint16_t *a;    /* bfloat16 [m, k] */
    const uint8_t *b;     /* codes [n, k / 2] */
    const uint8_t *scale; /* E4M3 [ceil(n / 16), k / 16] */
    const float *factor;  /* of all sums */
    const float *bias;    /* [n] or NULL */
    void *to;             /* [m, n] */
    int64_t m, n, k;      /* m: 1 to 16; k: a multiple of 16 */
    int32_t to_bfloat16;
} Fp4Product;

#if defined(__AVX512BF16__)

#define STEP 128    /* of k: codes of a cache line */
#define GROUPS 4    /* of 16 rows of b, at most */

/* Lines of 16 rows of b from `row` on, as words of 8 codes: to[word] has one of each row. Beyond the last row it is read
   again, and beyond k are zeros. */
INLINE void load_words(const Fp4Product *p, int64_t row, int64_t k, __m512i to[SIDE]) {
    __mmask64 in = first_of((p->k - k) / 2);
#pragma GCC unroll 16
    for (int64_t r = 0; r < SIDE; r++) {
        const uint8_t *at = p->b + least(row + r, p->n - 1) * (p->k / 2) + k / 2;
        to[r] = load_codes(in, at);
    }
    transpose(to);
}

/* The 16 numbers of E2M1 times a scale, exact; twice, since a permutation looks at five bits. */
INLINE __m512i scaled_numbers(uint8_t scale) {
    const __m512 numbers = _mm512_setr_ps(0.0f, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    __m512 scaled = _mm512_mul_ps(numbers, _mm512_set1_ps(decode_e4m3(scale)));
    return _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(scaled));
}

/* Sums of `rows` rows of a, as pairs [k / 2][rows], by `groups` groups of 16 rows of b from `first` on. */
INLINE void multiply_panel(const Fp4Product *p, const uint32_t *a, int64_t first, const int64_t rows, const int64_t groups,
                           float sums[SIDE][GROUPS * SIDE]) {
    const int64_t blocks = p->k / 16, last = (p->n - 1) / 16;
    const __m512i low = _mm512_set1_epi32(0xFFFF);
    __m512 sum[16][GROUPS];
#pragma GCC unroll 16
    for (int64_t r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int64_t g = 0; g < groups; g++) sum[r][g] = _mm512_setzero_ps();
    for (int64_t k = 0; k < p->k; k += STEP) {
        __m512i word[GROUPS][SIDE];
        for (int64_t g = 0; g < groups; g++) load_words(p, first + g * SIDE, k, word[g]);
        for (int64_t w = 0; w < SIDE && k + w * 8 < p->k; w += 2) {
            __m512i table[GROUPS];
#pragma GCC unroll 4
            for (int64_t g = 0; g < groups; g++)
                table[g] = scaled_numbers(p->scale[least(first / 16 + g, last) * blocks + k / 16 + w / 2]);
#pragma GCC unroll 8
            for (int64_t pair = 0; pair < 8; pair++, a += rows) {
                __m512bh numbers[GROUPS];
                /* A line of the next panel's rows, which the processor does not foresee. */
                uintptr_t row = (uintptr_t)(first + groups * SIDE + w * groups + pair);
                if (pair < 2 * groups)
                    _mm_prefetch((const char *)((uintptr_t)p->b + row * (uintptr_t)(p->k / 2) + (uintptr_t)(k / 2)), _MM_HINT_T1);
#pragma GCC unroll 4
                for (int64_t g = 0; g < groups; g++) {
                    __m512i x = _mm512_srli_epi32(word[g][w + pair / 4], (unsigned)(pair % 4 * 8));
                    x = _mm512_ternarylogic_epi32(x, _mm512_slli_epi32(x, 12), low, 0xE4); /* low ? x : x << 12 */
                    numbers[g] = (__m512bh)_mm512_permutexvar_epi16(x, table[g]);
                }
#pragma GCC unroll 16
                for (int64_t r = 0; r < rows; r++) {
                    __m512bh of_a = (__m512bh)_mm512_set1_epi32((int32_t)a[r]);
#pragma GCC unroll 4
                    for (int64_t g = 0; g < groups; g++) sum[r][g] = _mm512_dpbf16_ps(sum[r][g], of_a, numbers[g]);
                }
            }
        }
    }
#pragma GCC unroll 16
    for (int64_t r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int64_t g = 0; g < groups; g++) _mm512_storeu_ps(sums[r] + g * SIDE, sum[r][g]);
}

#define MULTIPLY(ROWS, OF_B)                                                                                         \
    static __attribute__((noinline)) void multiply_##ROWS(const Fp4Product *p, const uint32_t *a, int64_t first,     \
                                                          float sums[SIDE][GROUPS * SIDE]) {                         \
        multiply_panel(p, a, first, ROWS, OF_B, sums);                                                               \
    }

MULTIPLY(1, 4)
MULTIPLY(2, 4)
MULTIPLY(4, 4)
MULTIPLY(8, 2)
MULTIPLY(16, 1)

static void finish_panel(const Fp4Product *p, float sums[SIDE][GROUPS * SIDE], int64_t first, int64_t cols) {
    for (int64_t r = 0; r < p->m; r++)
        for (int64_t c = 0; c < least(cols, p->n - first); c++) {
            int64_t at = r * p->n + first + c;
            float v = sums[r][c] * *p->factor;
            if (p->bias) v += p->bias[first + c];
            if (p->to_bfloat16) ((uint16_t *)p->to)[at] = store_sum(v);
            else ((float *)p->to)[at] = v;
        }
}

/* 0; -1 without memory; 1, with nothing done, where the factor is outside of gemm.c's range. */
int32_t few_rows_fp4(const Fp4Product *p, int32_t threads) {
    int32_t exponent = (int32_t)(bits_of(*p->factor) >> 23 & 0xFF) - 127;
    if (exponent < -100 || exponent > 78) return 1;
    int64_t rows = p->m <= 2 ? p->m : p->m <= 4 ? 4 : p->m <= 8 ? 8 : 16, pairs = p->k / 2;
    int64_t high = rows <= 4 ? 4 * SIDE : rows == 8 ? 2 * SIDE : SIDE;
    uint32_t *a = calloc((size_t)(pairs * rows), sizeof *a);
    if (a == NULL) return -1;
    for (int64_t r = 0; r < p->m; r++)
        for (int64_t i = 0; i < pairs; i++) memcpy(a + i * rows + r, p->a + r * p->k + 2 * i, sizeof *a);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t first = 0; first < p->n; first += high) {
        float sums[SIDE][GROUPS * SIDE];
        uint64_t before = use_ieee();
        if (rows == 1) multiply_1(p, a, first, sums);
        else if (rows == 2) multiply_2(p, a, first, sums);
        else if (rows == 4) multiply_4(p, a, first, sums);
        else if (rows == 8) multiply_8(p, a, first, sums);
        else multiply_16(p, a, first, sums);
        finish_panel(p, sums, first, high);
        use_again(before);
    }
    free(a);
    return 0;
}

#else

int32_t few_rows_fp4(const Fp4Product *p, int32_t threads) {
    (void)p, (void)threads;
    return 1;
}

#endif
