/* Tiles of bfloat16 numbers in their own 16 bits: amaxes of blocks, and codes under powers of two.

   A bfloat16 number times a power of two is a sum of exponents, and its code a rounding of those bits, so that a vector
   takes twice as many as of float32. Written out for AVX512, since compilers make half of it: 64 codes at a time, and an
   amax of 32 numbers in a row, which is a whole vector, is found for 32 vectors at once by turning them as a matrix is
   transposed. Other processors get the plain loop, which leaves rows with codes below the normal range to float32. */

#pragma once

#include "numbers.h"

#define WIDE 256 /* columns of a tile, at most */
#define TALL 128 /* rows of a tile, at most */
#define SPARE 64 /* numbers behind an array that may be read, or written, and mean nothing */

#if defined(__AVX512BW__)

#include <immintrin.h>

#define VECTORS (WIDE / 32)

/* ------------------------------------------------------------------------------------------------------------ codes */

/* The codes of numbers below the normal range: `code` is what their exponents and mantissas would be there. */
static __attribute__((noinline)) __m512i below_normal(__m512i magnitude, __m512i code, int drop) {
    const __m512i one = _mm512_set1_epi16(1);
    __m512i mantissa = _mm512_or_si512(_mm512_and_si512(magnitude, _mm512_set1_epi16(0x7F)), _mm512_set1_epi16(0x80));
    __m512i off = _mm512_sub_epi16(_mm512_set1_epi16((short)(drop + 1)), _mm512_srai_epi16(code, 7));
    off = _mm512_min_epi16(off, _mm512_set1_epi16(15)); /* all is rounded to zero there */
    __m512i half = _mm512_sub_epi16(_mm512_sllv_epi16(one, _mm512_sub_epi16(off, one)), one);
    __m512i odd = _mm512_and_si512(_mm512_srlv_epi16(mantissa, off), one);
    return _mm512_srlv_epi16(_mm512_add_epi16(mantissa, _mm512_add_epi16(half, odd)), off);
}

/* Magnitudes to codes in 16 bits; zero stays. */
INLINE __m512i encode_32(__m512i x, __m512i offset, int drop) {
    __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7FFF)), code = _mm512_add_epi16(magnitude, offset);
    __mmask32 some = _mm512_test_epi16_mask(magnitude, magnitude);
    __mmask32 small = _mm512_mask_cmplt_epi16_mask(some, code, _mm512_set1_epi16(128));
    __m512i odd = _mm512_and_si512(_mm512_srli_epi16(code, (unsigned)drop), _mm512_set1_epi16(1));
    __m512i sum = _mm512_add_epi16(_mm512_add_epi16(code, _mm512_set1_epi16((short)((1 << (drop - 1)) - 1))), odd);
    __m512i out = _mm512_maskz_srli_epi16(some, sum, (unsigned)drop);
    if (__builtin_expect(small != 0, 0)) out = _mm512_mask_mov_epi16(out, small, below_normal(magnitude, code, drop));
    return out;
}

/* The lower or the upper bytes of 64 words. */
INLINE __m512i bytes_of(__m512i first, __m512i second, int upper) {
#if defined(__AVX512VBMI__)
    union { uint8_t at[64]; __m512i vector; } index;
    for (int i = 0; i < 64; i++) index.at[i] = (uint8_t)(2 * i + upper);
    return _mm512_permutex2var_epi8(first, index.vector, second);
#else
    const __m512i byte = _mm512_set1_epi16(0xFF), order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    first = upper ? _mm512_srli_epi16(first, 8) : _mm512_and_si512(first, byte);
    second = upper ? _mm512_srli_epi16(second, 8) : _mm512_and_si512(second, byte);
    return _mm512_permutexvar_epi64(order, _mm512_packus_epi16(first, second));
#endif
}

INLINE __m512i encode_64(__m512i first, __m512i second, __m512i offset, __m512i offset_2, int drop) {
    __m512i codes = bytes_of(encode_32(first, offset, drop), encode_32(second, offset_2, drop), 0);
    return _mm512_ternarylogic_epi32(codes, bytes_of(first, second, 1), _mm512_set1_epi8((char)0x80), 0xF8);
}

INLINE __m512i offset_at(const int16_t *offset, int64_t at, int64_t width) {
    return width == 1 ? _mm512_loadu_si512(offset + at) : _mm512_set1_epi16(offset[at / width]);
}

/* Codes of n numbers in a row, which blocks of `width` share an offset: what an exponent grows by, and what the formats'
   biases differ by, times 128. `drop` mantissa bits are rounded off. Nothing saturates; NaN and Inf are not taken.
   Returns whether it was done; else float32 has to do it. */
INLINE int encode_row(const uint16_t *x, uint8_t *to, int64_t n, int64_t width, const int16_t *offset, int drop) {
    int64_t at = 0;
    if (width != 1 && width % 32 && width < n) return 0;
    for (; at + 64 <= n; at += 64) {
        __m512i first = _mm512_loadu_si512(x + at), second = _mm512_loadu_si512(x + at + 32);
        __m512i codes = encode_64(first, second, offset_at(offset, at, width), offset_at(offset, at + 32, width), drop);
        _mm512_storeu_si512(to + at, codes);
    }
    if (at < n) {
        __mmask64 in = ((__mmask64)1 << (n - at)) - 1;
        __m512i first = _mm512_maskz_loadu_epi16((__mmask32)in, x + at);
        __m512i second = _mm512_maskz_loadu_epi16((__mmask32)(in >> 32), x + at + 32);
        int64_t next = at + 32 < n ? at + 32 : at;
        __m512i codes = encode_64(first, second, offset_at(offset, at, width), offset_at(offset, next, width), drop);
        _mm512_mask_storeu_epi8(to + at, in, codes);
    }
    return 1;
}

/* 16 numbers of the lower or upper half of x, in float32, by their scales. */
INLINE __m512 scaled_16(__m512i x, int upper, const float *scale, int64_t at, int64_t width) {
    __m256i half = upper ? _mm512_extracti64x4_epi64(x, 1) : _mm512_castsi512_si256(x);
    __m512 v = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    return _mm512_mul_ps(v, width == 1 ? _mm512_loadu_ps(scale + at) : _mm512_set1_ps(scale[at / width]));
}

/* 32 numbers by their scales, cut to 16 bits. The last one also tells of bits that were cut off, so that a product is
   neither taken for a tie nor for less than one when it is rounded from there. */
INLINE __m512i scaled_32(__m512i x, const float *scale, int64_t at, int64_t width) {
    union { uint16_t at[32]; __m512i vector; } upper, lower;
    for (int i = 0; i < 32; i++) upper.at[i] = (uint16_t)(2 * i + 1), lower.at[i] = (uint16_t)(2 * i);
    __m512i low = _mm512_castps_si512(scaled_16(x, 0, scale, at, width));
    __m512i high = _mm512_castps_si512(scaled_16(x, 1, scale, width == 1 ? at + 16 : at, width));
    __m512i out = _mm512_permutex2var_epi16(low, upper.vector, high);
    __m512i rest = _mm512_permutex2var_epi16(low, lower.vector, high);
    const __m512i one = _mm512_set1_epi16(1);
    return _mm512_or_si512(out, _mm512_min_epu16(rest, one));
}

/* encode_row under any float32 scales; offset: what the formats' biases differ by, times 128. */
INLINE int encode_row_scaled(const uint16_t *x, uint8_t *to, int64_t n, int64_t width, const float *scale,
                             int16_t offset, int drop) {
    const __m512i same = _mm512_set1_epi16(offset);
    if (width != 1 && width % 32 && width < n) return 0;
    for (int64_t at = 0; at < n; at += 64) {
        __mmask64 in = n - at >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << (n - at)) - 1;
        int64_t next = at + 32 < n ? at + 32 : at;
        __m512i first = _mm512_maskz_loadu_epi16((__mmask32)in, x + at);
        __m512i second = _mm512_maskz_loadu_epi16((__mmask32)(in >> 32), x + at + 32);
        first = scaled_32(first, scale, at, width);
        second = scaled_32(second, scale, next, width);
        _mm512_mask_storeu_epi8(to + at, in, encode_64(first, second, same, same, drop));
    }
    return 1;
}

/* ----------------------------------------------------------------------------------------------------------- amaxes */

INLINE void load_row(const uint16_t *x, int64_t cols, __m512i v[VECTORS]) {
#pragma GCC unroll 8
    for (int i = 0; i < VECTORS; i++) {
        int64_t left = cols - 32 * i;
        __mmask32 in = left >= 32 ? 0xFFFFFFFF : left > 0 ? ((__mmask32)1 << left) - 1 : 0;
        v[i] = _mm512_and_si512(_mm512_maskz_loadu_epi16(in, x + 32 * i), _mm512_set1_epi16(0x7FFF));
    }
}

#define MAX_OF(A, B) _mm512_max_epu16(A, B)

/* Of eight vectors the maxima of each, one behind the other, in each quarter that of a quarter of their numbers. */
INLINE __m512i reduce_8(const __m512i v[8]) {
    __m512i two[4], four[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        two[i] = MAX_OF(_mm512_unpacklo_epi16(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_epi16(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        four[i] = MAX_OF(_mm512_unpacklo_epi32(two[2 * i], two[2 * i + 1]),
                         _mm512_unpackhi_epi32(two[2 * i], two[2 * i + 1]));
    return MAX_OF(_mm512_unpacklo_epi64(four[0], four[1]), _mm512_unpackhi_epi64(four[0], four[1]));
}

/* Of four such the maxima of their quarters, one behind the other. */
INLINE __m512i reduce_quarters(const __m512i v[4]) {
    __m512i low = MAX_OF(_mm512_shuffle_i32x4(v[0], v[1], 0x44), _mm512_shuffle_i32x4(v[0], v[1], 0xEE));
    __m512i high = MAX_OF(_mm512_shuffle_i32x4(v[2], v[3], 0x44), _mm512_shuffle_i32x4(v[2], v[3], 0xEE));
    return MAX_OF(_mm512_shuffle_i32x4(low, high, 0x88), _mm512_shuffle_i32x4(low, high, 0xDD));
}

/* Largest magnitudes of 1 x `width` blocks, 32 or 128, of a tile; to [rows][across]. */
INLINE void amaxes_across(const uint16_t *x, int64_t step, int64_t rows, int64_t cols, int width, uint16_t *to) {
    int64_t across = (cols + width - 1) / width, each = width / 32 * 4; /* rows at once, of 32 amaxes */
    for (int64_t r = 0; r < rows; r += each) {
        __m512i parts[4];
        uint16_t found[32];
        for (int i = 0; i < 4; i++) {
            __m512i v[VECTORS], of[8];
#pragma GCC unroll 4
            for (int j = 0; j < width / 32; j++) {
                int64_t row = r + i * (width / 32) + j;
                load_row(x + row * step, row < rows ? cols : 0, v);
                if (width == 32)
                    memcpy(of, v, sizeof of);
                else
                    for (int half = 0; half < 2; half++)
                        of[2 * j + half] = MAX_OF(MAX_OF(v[4 * half], v[4 * half + 1]),
                                                  MAX_OF(v[4 * half + 2], v[4 * half + 3]));
            }
            parts[i] = reduce_8(of);
        }
        _mm512_storeu_si512(found, reduce_quarters(parts));
        for (int64_t i = 0; i < each && r + i < rows; i++)
            memcpy(to + (r + i) * across, found + i * (32 / each), (size_t)across * sizeof *to);
    }
}

/* Largest magnitudes of `height` x 1 blocks of a tile; to [row blocks][cols], and up to SPARE numbers behind. */
static void amaxes_down(const uint16_t *x, int64_t step, int64_t rows, int64_t cols, int64_t height, uint16_t *to) {
    for (int64_t r = 0; r < rows; r += height, to += cols) {
        __m512i most[VECTORS], v[VECTORS];
        for (int i = 0; i < VECTORS; i++) most[i] = _mm512_setzero_si512();
        for (int64_t j = r; j < rows && j < r + height; j++) {
            load_row(x + j * step, cols, v);
#pragma GCC unroll 8
            for (int i = 0; i < VECTORS; i++) most[i] = MAX_OF(most[i], v[i]);
        }
        for (int i = 0; i < VECTORS && 32 * i < cols; i++) _mm512_storeu_si512(to + 32 * i, most[i]);
    }
}

/* Largest magnitudes of blocks of a tile, as they lie, if it is one of those above: whether it was done. */
static int amaxes_16(const uint16_t *x, int64_t step, int64_t rows, int64_t cols, int64_t high, int64_t wide,
                     uint16_t *to) {
    if (wide == 1) amaxes_down(x, step, rows, cols, high, to);
    else if (high == 1 && wide == 32) amaxes_across(x, step, rows, cols, 32, to);
    else if (high == 1 && wide == 128) amaxes_across(x, step, rows, cols, 128, to);
    else return 0;
    return 1;
}

#else

#define LANES 32 /* numbers of a vector */

/* The code of a normal result; zero stays; what is below the normal range is told in *small. */
INLINE uint8_t encode_16(uint16_t u, int16_t offset, int drop, uint16_t *small) {
    uint16_t magnitude = u & 0x7FFF, code = (uint16_t)(magnitude + (uint16_t)offset);
    *small |= (uint16_t)(((int16_t)code < 128) & (magnitude != 0));
    code = (uint16_t)(code + (uint16_t)((code >> drop & 1) + (1 << (drop - 1)) - 1)) >> drop;
    code = magnitude ? code : 0;
    return (uint8_t)(code | (u >> 8 & 0x80));
}

/* `small` has a word for each lane, so that nothing is added up across a vector before the end. */
INLINE void encode_block(const uint16_t *restrict x, uint8_t *restrict to, int64_t n, const int16_t *offset,
                         int64_t step, int drop, uint16_t *restrict small) {
    for (; n >= LANES; n -= LANES, x += LANES, to += LANES, offset += LANES * step)
        for (int i = 0; i < LANES; i++) to[i] = encode_16(x[i], offset[i * step], drop, small + i);
    for (int i = 0; i < n; i++) to[i] = encode_16(x[i], offset[i * step], drop, small + i);
}

INLINE int encode_row(const uint16_t *x, uint8_t *to, int64_t n, int64_t width, const int16_t *offset, int drop) {
    uint16_t small[LANES] = {0}, any = 0;
    if (width == 1) encode_block(x, to, n, offset, 1, drop, small);
    else
        for (int64_t b = 0, at = 0; at < n; b++, at += width)
            if (n - at >= width) encode_block(x + at, to + at, width, offset + b, 0, drop, small);
            else encode_block(x + at, to + at, n - at, offset + b, 0, drop, small);
    for (int i = 0; i < LANES; i++) any |= small[i];
    return !any;
}

INLINE int encode_row_scaled(const uint16_t *x, uint8_t *to, int64_t n, int64_t width, const float *scale,
                             int16_t offset, int drop) {
    (void)x, (void)to, (void)n, (void)width, (void)scale, (void)offset, (void)drop;
    return 0;
}

INLINE int amaxes_16(const uint16_t *x, int64_t step, int64_t rows, int64_t cols, int64_t high, int64_t wide,
                     uint16_t *to) {
    (void)x, (void)step, (void)rows, (void)cols, (void)high, (void)wide, (void)to;
    return 0;
}

#endif
