/* What the loops of few_rows.c share: exponents of b's blocks, and what becomes of a panel's sums. */

#pragma once

#include "few_rows.h"
#include "pack.h"

#if defined(__AVX512BF16__)

#define STEP 32   /* columns of b that share an exponent at least */
#define STEPS 16  /* steps whose exponents are read at a time */

/* Where the exponents of a row of b begin; beyond the last row those of the last. */
INLINE const uint8_t *exponents_of(const Product *p, int64_t row) {
    return p->exponents + least(row, p->n - 1) / p->block_rows * ((p->k + p->block_cols - 1) / p->block_cols);
}

/* Of a row's, those of 512 columns from `at` on, a byte for each step. */
INLINE __m128i exponents_at(const Product *p, const uint8_t *from, int64_t at) {
    int64_t steps = least(STEPS, (p->k - at + STEP - 1) / STEP);
    uint8_t bytes[STEPS] = {0};
    if (p->block_cols == STEP && steps == STEPS) return _mm_loadu_si128((const __m128i *)(from + at / STEP)); /* see load_codes */
    if (p->block_cols == STEP) return _mm_maskz_loadu_epi8((__mmask16)first_of(steps), from + at / STEP);
    for (int64_t i = 0; i < steps; i++) bytes[i] = from[(at + STEP * i) / p->block_cols];
    return _mm_loadu_si128((const __m128i *)bytes);
}

/* Exponents of 512 columns of b from `at` on, as they lie in two bfloat16 numbers: [row][step], of so many rows. */
INLINE void read_exponents(const Product *p, int64_t first, int64_t rows, int64_t at, uint32_t (*to)[STEPS]) {
    for (int64_t r = 0; r < rows; r++) {
        __m128i bytes = exponents_at(p, exponents_of(p, first + r), at);
        __m512i high = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(127)), 23);
        _mm512_storeu_si512(to[r], _mm512_or_si512(high, _mm512_srli_epi32(high, 16)));
    }
}

/* Numbers times 2^exponent, which lies at that of each (mod 2^9); zeros stay zeros, NaN and Inf there are none. */
INLINE __m512i scaled_by(__m512i exponent, __m512i v) {
    return _mm512_mask_add_epi16(v, _mm512_test_epi16_mask(v, _mm512_set1_epi16(0x7FFF)), v, exponent);
}

/* Where each of so many rows of b from `first` on begins; rows beyond the last are the last one again, and their sums
   nobody's. */
INLINE void begin_rows(const Product *p, int64_t first, int64_t rows, const uint8_t **row) {
    for (int64_t r = 0; r < rows; r++) row[r] = p->b + least(first + r, p->n - 1) * p->k;
}

/* sums [m] of so many rows of b from `first` on, each m `apart` numbers from the last: scales, bias, one rounding. */
static void finish(const Product *p, float *sums, int64_t apart, int64_t first, int64_t rows) {
    int64_t n = least(rows, p->n - first);
    for (int64_t m = 0; m < p->m; m++) {
        float scale = p->scale_a[p->each_a ? m : 0], *sum = sums + m * apart;
        if (p->each_b) for (int64_t i = 0; i < n; i++) sum[i] *= scale * p->scale_b[first + i];
        else for (int64_t i = 0; i < n; i++) sum[i] *= scale * *p->scale_b;
        if (p->bias) for (int64_t i = 0; i < n; i++) sum[i] += p->bias[first + i];
        if (p->to_bfloat16) {
            uint16_t *to = (uint16_t *)p->to + m * p->n + first;
            for (int64_t i = 0; i < n; i++) to[i] = store_sum(sum[i]);
        } else memcpy((float *)p->to + m * p->n + first, sum, (size_t)n * sizeof(float));
    }
}

#endif
