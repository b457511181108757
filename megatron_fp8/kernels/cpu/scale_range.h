/* How far the scales of a product's side reach, and what waits for the sums. */

#pragma once

#include "gemm.h"
#include "numbers.h"

/* Exponents of the smallest and of the largest scale. */
typedef struct { int32_t smallest, largest; } Range;

INLINE int32_t exponent_of(const Side *side, int64_t row_block, int64_t k_block) {
    int64_t at = row_block * side->scale_row_step + k_block * side->scale_k_step;
    if (side->e8m0) return ((const uint8_t *)side->scale)[at] - 127;
    return (int32_t)(bits_of(((const float *)side->scale)[at]) >> 23 & 0xFF) - 127;
}

static inline int is_zero(const Side *side, int64_t row, int64_t rows, int64_t k, int64_t depth) {
    for (int64_t r = row; r < row + rows; r++)
        for (int64_t i = k; i < k + depth; i++)
            if (((const uint8_t *)side->at)[r * side->row_step + i * side->k_step] & 0x7F) return 0;
    return 1;
}

/* Whether numbers and sums stay in bfloat16's normal range: a, b and products of the two are within 2^-100 to 2^80. */
INLINE int stays_normal(Range a, Range b) {
    int32_t low = a.smallest + b.smallest, high = a.largest + b.largest + 2;
    return least(low, least(a.smallest, b.smallest)) >= -100 && high <= 80 && a.largest <= 78 && b.largest <= 78;
}

/* The float32 that multiplies row (or column) r of the sums. */
INLINE float factor_of(const Side *side, int64_t r) {
    if (side->scale == NULL || side->block_k) return 1;
    int64_t block = side->block_rows == 1 ? r : side->block_rows ? r / side->block_rows : 0;
    int64_t at = block * side->scale_row_step;
    if (!side->e8m0) return ((const float *)side->scale)[at];
    return float_of((uint32_t)((const uint8_t *)side->scale)[at] << 23); /* never 2^-127 or NaN: see Range */
}
