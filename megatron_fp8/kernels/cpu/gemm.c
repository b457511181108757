/* BF16 x BF16 -> float32 GEMM for processors with AVX512-BF16: c [m, n] = a [m, k] b [n, k]^T.

   Emulated FP8 needs products of bfloat16 numbers with a float32 result, and CPU libraries give them a bfloat16 one. As
   in any fast GEMM the operands are first packed into panels that the inner loop reads from end to end: 14 rows of a and
   32 of b, two values of k side by side in one 32-bit word. The inner loop keeps 14 x 32 sums in registers.

   An element of c depends on its row and column alone: its sums run over k in one fixed order, in slices of DEPTH, for
   any m, n and number of threads. Subnormal operands and products count as zero, as the instruction has it. */

#include <stdint.h>
#include <stdlib.h>

#if defined(__AVX512BF16__)

#include <immintrin.h>

#define ROWS 14
#define COLS 32
#define DEPTH 256 /* pairs of k at a time: a panel of b then stays in the first cache */
#define TALL 8    /* panels of a at a time: they stay in the second */

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

int32_t has_gemm(void) { return 1; }

/* Panel number `panel` of x [rows, depth] (element r, k at x[r * row_step + k * k_step]): to [pairs][width]. */
static void pack(const uint16_t *x, int64_t rows, int64_t depth, int64_t row_step, int64_t k_step, int64_t width,
                 int64_t panel, uint32_t *to) {
    int64_t pairs = (depth + 1) / 2, n = least(width, rows - panel * width);
    x += panel * width * row_step;
    to += panel * width * pairs;
    for (int64_t p = 0; p < pairs; p++, to += width) {
        const uint16_t *low = x + 2 * p * k_step, *high = low + k_step;
        if (2 * p + 1 == depth) for (int64_t r = 0; r < n; r++) to[r] = low[r * row_step];
        else if (row_step == 1) for (int64_t r = 0; r < n; r++) to[r] = low[r] | (uint32_t)high[r] << 16;
        else for (int64_t r = 0; r < n; r++) to[r] = low[r * row_step] | (uint32_t)high[r * row_step] << 16;
        for (int64_t r = n; r < width; r++) to[r] = 0;
    }
}

/* c [rows, cols] (+)= a panel times b panel over `pairs` pairs of k; rows and cols may be less than the panels'. */
static void multiply(const uint32_t *restrict a, const uint32_t *restrict b, int64_t pairs, float *c, int64_t c_step,
                     int64_t rows, int64_t cols, int add) {
    __m512 sum[ROWS][2];
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; p++, a += ROWS, b += COLS) {
        __m512bh left = (__m512bh)_mm512_loadu_si512(b), right = (__m512bh)_mm512_loadu_si512(b + 16);
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; r++) {
            __m512bh value = (__m512bh)_mm512_set1_epi32((int32_t)a[r]);
            sum[r][0] = _mm512_dpbf16_ps(sum[r][0], value, left);
            sum[r][1] = _mm512_dpbf16_ps(sum[r][1], value, right);
        }
    }
    uint32_t inside = cols >= COLS ? 0xFFFFFFFF : ((uint32_t)1 << cols) - 1;
    __mmask16 in_left = (__mmask16)inside, in_right = (__mmask16)(inside >> 16);
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; r++) {
        if (r >= rows) break;
        float *to = c + r * c_step;
        if (add) {
            sum[r][0] = _mm512_add_ps(sum[r][0], _mm512_maskz_loadu_ps(in_left, to));
            sum[r][1] = _mm512_add_ps(sum[r][1], _mm512_maskz_loadu_ps(in_right, to + 16));
        }
        _mm512_mask_storeu_ps(to, in_left, sum[r][0]);
        _mm512_mask_storeu_ps(to + 16, in_right, sum[r][1]);
    }
}

/* Steps are in elements; c is contiguous and need not be set. Returns -1 without memory for the packed operands. */
int32_t gemm(const uint16_t *a, int64_t a_row, int64_t a_k, const uint16_t *b, int64_t b_row, int64_t b_k, float *c,
             int64_t m, int64_t n, int64_t k, int32_t threads) {
    int64_t pairs = (k + 1) / 2, tall = (m + ROWS - 1) / ROWS, wide = (n + COLS - 1) / COLS;
    uint32_t *packed = malloc((size_t)(tall * ROWS + wide * COLS) * (size_t)pairs * sizeof(uint32_t));
    if (packed == NULL) return -1;
    uint32_t *packed_a = packed, *packed_b = packed + tall * ROWS * pairs;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t panel = 0; panel < tall + wide; panel++) {
        if (panel < tall) pack(a, m, k, a_row, a_k, ROWS, panel, packed_a);
        else pack(b, n, k, b_row, b_k, COLS, panel - tall, packed_b);
    }
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
    for (int64_t block = 0; block < tall; block += TALL)
        for (int64_t p = 0; p < pairs; p += DEPTH)
            for (int64_t j = 0; j < wide; j++)
                for (int64_t i = block; i < least(tall, block + TALL); i++)
                    multiply(packed_a + (i * pairs + p) * ROWS, packed_b + (j * pairs + p) * COLS,
                             least(DEPTH, pairs - p), c + i * ROWS * n + j * COLS, n, m - i * ROWS, n - j * COLS, p > 0);
    free(packed);
    return 0;
}

#else

int32_t has_gemm(void) { return 0; }

int32_t gemm(const uint16_t *a, int64_t a_row, int64_t a_k, const uint16_t *b, int64_t b_row, int64_t b_k, float *c,
             int64_t m, int64_t n, int64_t k, int32_t threads) {
    (void)a, (void)a_row, (void)a_k, (void)b, (void)b_row, (void)b_k, (void)c, (void)m, (void)n, (void)k, (void)threads;
    return -1;
}

#endif
