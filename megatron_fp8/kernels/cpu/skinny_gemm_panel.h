/* What the loops of skinny_gemm.c with bfloat16 instructions share: exponents of b's blocks, and where its rows begin. */

#pragma once

#include "skinny_gemm_ends.h"
#include "pack.h"

#if defined(__AVX512BF16__)

/* Of a row's, those of 512 columns from `at` on, a byte for each step. */
INLINE __m128i exponents_at(const Product *p, const uint8_t *from, int64_t at) {
    int64_t steps = steps_from(p, at);
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

#endif
