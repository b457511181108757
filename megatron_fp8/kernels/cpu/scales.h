/* The scales of a product's sides for gemm.c: how far they reach, and what blocks of k add to exponents. */

#pragma once

#include "pack.h"
#include "scale_range.h"

#if defined(__AVX512BF16__)

INLINE __m512i exponents_at(const Side *side, int64_t at, __mmask16 in) {
    if (side->e8m0) return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(in, (const uint8_t *)side->scale + at));
    __m512i bits = _mm512_maskz_loadu_epi32(in, (const float *)side->scale + at);
    return _mm512_and_si512(_mm512_srli_epi32(bits, 23), _mm512_set1_epi32(0xFF));
}

/* How many k one line of shifts is for, as a power of two: a block's, or those of a square. */
INLINE int32_t depth_bits_of(const Side *side) {
    int64_t depth = side->block_k & (side->block_k - 1) ? 32 : side->block_k;
    return depth ? __builtin_ctzll((uint64_t)depth) : 0;
}

/* What `with_scale` takes for a scale of 2^exponent. */
INLINE uint32_t shift_of(const Side *side, int32_t exponent) {
    uint32_t shift = (uint32_t)((side->finite ? LIFT - exponent : exponent) * 128) & 0xFFFF;
    return shift | shift << 16;
}

/* take_scales for blocks of one row, whose scales are dense in either direction: 16 rows of 16 blocks at a time. */
static Range take_scales_of_rows(const Side *side, int64_t rows, int64_t k, uint32_t *shifts, int64_t step,
                                 int32_t threads) {
    int32_t smallest = 128, largest = -128;
    int64_t depth = side->block_k, blocks = (k + depth - 1) / depth;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(min : smallest) reduction(max : largest)
    for (int64_t row = 0; row < rows; row += SIDE) {
        const __m512i one = _mm512_set1_epi32(127);
        __mmask16 there = (__mmask16)first_of(rows - row);
        __m512i low = one, high = one, x[SIDE];
        for (int64_t block = 0; block < blocks; block += SIDE) {
            __mmask16 in = (__mmask16)first_of(blocks - block);
            if (side->scale_row_step == 1)
                for (int i = 0; i < SIDE; i++)
                    x[i] = exponents_at(side, row + (block + i) * side->scale_k_step, in >> i & 1 ? there : 0);
            else {
                for (int i = 0; i < SIDE; i++)
                    x[i] = exponents_at(side, (row + i) * side->scale_row_step + block, there >> i & 1 ? in : 0);
                transpose(x);
            }
            for (int i = 0; i < SIDE && block + i < blocks; i++) {
                uint32_t zero = side->e8m0 ? _mm512_mask_testn_epi32_mask(there, x[i], x[i]) : 0;
                for (; zero; zero &= zero - 1) {
                    int lane = __builtin_ctz(zero);
                    int64_t at = (block + i) * depth;
                    if (is_zero(side, row + lane, 1, at, least(depth, k - at)))
                        x[i] = _mm512_mask_mov_epi32(x[i], (__mmask16)(1 << lane), one);
                }
                low = _mm512_mask_min_epi32(low, there, low, x[i]);
                high = _mm512_mask_max_epi32(high, there, high, x[i]);
                __m512i exponent = _mm512_sub_epi32(x[i], one);
                if (side->finite) exponent = _mm512_sub_epi32(_mm512_set1_epi32(LIFT), exponent);
                __m512i shift = _mm512_slli_epi32(exponent, 7);
                shift = _mm512_mask_blend_epi16(0xAAAAAAAA, shift, _mm512_slli_epi32(shift, 16));
                _mm512_storeu_si512(shifts + (block + i) * step + row, shift);
            }
        }
        int32_t least_here = _mm512_reduce_min_epi32(low) - 127, most_here = _mm512_reduce_max_epi32(high) - 127;
        smallest = least_here < smallest ? least_here : smallest;
        largest = most_here > largest ? most_here : largest;
    }
    return (Range){smallest, largest};
}

/* The range of one side's scales; of blocks, what they add to bfloat16's bits, to shifts [k blocks][step] too.
   A block of zeros under the smallest E8M0, 2^-127, does not count: scaled or not, it is zeros. */
static Range take_scales(const Side *side, int64_t rows, int64_t k, uint32_t *shifts, int64_t step, int32_t threads) {
    int32_t smallest = 128, largest = -128;
    if (side->scale == NULL) return (Range){0, 0};
    int64_t height = side->block_rows ? side->block_rows : rows, depth = side->block_k ? side->block_k : k;
    if (rows * ((k + depth - 1) / depth) < 1 << 15) threads = 1; /* to wait for others would take longer */
    int64_t line = (int64_t)1 << depth_bits_of(side);
    if (shifts && side->block_rows == 1 && depth == line && (side->scale_row_step == 1 || side->scale_k_step == 1))
        return take_scales_of_rows(side, rows, k, shifts, step, threads);
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(min : smallest) reduction(max : largest)
    for (int64_t block = 0; block < (k + depth - 1) / depth; block++)
        for (int64_t row = 0; row < rows; row += height) {
            int64_t high = least(height, rows - row), at = block * depth;
            int32_t exponent = exponent_of(side, row / height, block);
            if (exponent == -127 && side->e8m0 && is_zero(side, row, high, at, least(depth, k - at))) exponent = 0;
            smallest = exponent < smallest ? exponent : smallest;
            largest = exponent > largest ? exponent : largest;
            for (int64_t of = at; shifts && of < least(k, at + depth); of += line)
                for (int64_t r = 0; r < high; r++) shifts[of / line * step + row + r] = shift_of(side, exponent);
        }
    return (Range){smallest, largest};
}

#endif
