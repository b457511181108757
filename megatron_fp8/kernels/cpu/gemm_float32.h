/* What gemm_float32.c multiplies with: float32 vectors, tiles of codes that become numbers, and the inner loop. */

#pragma once

#include "decode.h"
#include "gemm.h"

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
#include <immintrin.h>
#define HAS_FLOAT32 1
#elif defined(__aarch64__)
#include <arm_neon.h>
#define HAS_FLOAT32 1
#endif

#if HAS_FLOAT32

#if defined(__AVX512F__)
#define LANES 16
#define GROUP 12 /* rows whose sums are made together */
#define VECTORS 2
typedef __m512 Vector;
INLINE Vector fused(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Vector all_of(float v) { return _mm512_set1_ps(v); }
INLINE Vector load(const float *at) { return _mm512_loadu_ps(at); }
INLINE void store(float *at, Vector v) { _mm512_storeu_ps(at, v); }
#elif defined(__AVX2__)
#define LANES 8
#define GROUP 6
#define VECTORS 2
typedef __m256 Vector;
INLINE Vector fused(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Vector all_of(float v) { return _mm256_set1_ps(v); }
INLINE Vector load(const float *at) { return _mm256_loadu_ps(at); }
INLINE void store(float *at, Vector v) { _mm256_storeu_ps(at, v); }
#else
#define LANES 4
#define GROUP 6
#define VECTORS 4
typedef float32x4_t Vector;
INLINE Vector fused(Vector a, Vector b, Vector c) { return vfmaq_f32(c, a, b); }
INLINE Vector all_of(float v) { return vdupq_n_f32(v); }
INLINE Vector load(const float *at) { return vld1q_f32(at); }
INLINE void store(float *at, Vector v) { vst1q_f32(at, v); }
#endif

#define PANEL (LANES * VECTORS) /* columns whose sums are made together: 16 or 32 */
#define TILE 16                 /* codes are decoded by tiles of so many rows, and of twice as many k */
#define DEPTH 256               /* k of a slice; a slice of a panel stays in the first cache */

/* ------------------------------------------------------------------------------------------------------ inner loop */

/* sums [rows][panels, PANEL], `apart` numbers between rows, += a [rows][DEPTH] b [panels][DEPTH / panels][PANEL] of so
   many k, from first to last; they begin at zero unless `more`. */
INLINE void multiply_rows(const float *a, const float *b, int64_t depth, float *sums, int64_t apart, int32_t more,
                          const int rows, const int panels) {
    Vector sum[GROUP][8];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS * panels; v++) sum[r][v] = more ? load(sums + r * apart + v * LANES) : all_of(0);
    for (int64_t k = 0; k < depth; k++) {
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            Vector of_b[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) of_b[v] = load(b + (p * (DEPTH / panels) + k) * PANEL + v * LANES);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                Vector of_a = all_of(a[r * DEPTH + k]), *to = sum[r] + p * VECTORS;
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) to[v] = fused(of_a, of_b[v], to[v]);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS * panels; v++) store(sums + r * apart + v * LANES, sum[r][v]);
}

/* ----------------------------------------------------------------------------------------------------------- tiles */

/* Two lines of sixteen codes. */
#if defined(__aarch64__)
typedef struct { uint8x16_t line[2]; } Lines;
INLINE Lines lines_of(const void *first, const void *second) { return (Lines){{vld1q_u8(first), vld1q_u8(second)}}; }
INLINE Lines two_lines(const uint8_t *at) { return lines_of(at, at + TILE); }
INLINE Lines lower_of(Lines x, Lines y) {
    return (Lines){{vzip1q_u8(x.line[0], y.line[0]), vzip1q_u8(x.line[1], y.line[1])}};
}
INLINE Lines upper_of(Lines x, Lines y) {
    return (Lines){{vzip2q_u8(x.line[0], y.line[0]), vzip2q_u8(x.line[1], y.line[1])}};
}
INLINE Lines lower_pairs(Lines x, Lines y) {
    Lines to;
    for (int i = 0; i < 2; i++)
        to.line[i] = vreinterpretq_u8_u16(vzip1q_u16(vreinterpretq_u16_u8(x.line[i]), vreinterpretq_u16_u8(y.line[i])));
    return to;
}
INLINE Lines upper_pairs(Lines x, Lines y) {
    Lines to;
    for (int i = 0; i < 2; i++)
        to.line[i] = vreinterpretq_u8_u16(vzip2q_u16(vreinterpretq_u16_u8(x.line[i]), vreinterpretq_u16_u8(y.line[i])));
    return to;
}
#else
typedef __m256i Lines;
INLINE Lines lines_of(const void *first, const void *second) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(first)), _mm_loadu_si128(second), 1);
}
INLINE Lines two_lines(const uint8_t *at) { return _mm256_loadu_si256((const __m256i *)at); }
INLINE Lines lower_of(Lines x, Lines y) { return _mm256_unpacklo_epi8(x, y); }
INLINE Lines upper_of(Lines x, Lines y) { return _mm256_unpackhi_epi8(x, y); }
INLINE Lines lower_pairs(Lines x, Lines y) { return _mm256_unpacklo_epi16(x, y); }
INLINE Lines upper_pairs(Lines x, Lines y) { return _mm256_unpackhi_epi16(x, y); }
#endif

INLINE Lines lower(Lines x, Lines y, const int32_t bytes) { return bytes == 1 ? lower_of(x, y) : lower_pairs(x, y); }
INLINE Lines upper(Lines x, Lines y, const int32_t bytes) { return bytes == 1 ? upper_of(x, y) : upper_pairs(x, y); }

/* Half of turning sixteen lines, for the four of x that lie four apart: more do not fit into the registers of AVX2. */
INLINE void turn_four(const Lines *x, Lines to[4], const int32_t bytes) {
    Lines low = lower(x[0], x[8], bytes), high = upper(x[0], x[8], bytes);
    Lines low_too = lower(x[4], x[12], bytes), high_too = upper(x[4], x[12], bytes);
    to[0] = lower(low, low_too, bytes), to[1] = upper(low, low_too, bytes);
    to[2] = lower(high, high_too, bytes), to[3] = upper(high, high_too, bytes);
}

/* Sixteen lines become columns. Of codes: the first lines do, and so do the second ones. Of numbers of two bytes: x[2 c + h]
   has those of lines 8 h to 8 h + 7 in column c, and in its second line those in column c + 8. */
INLINE void turn(Lines x[TILE], const int32_t bytes) {
    Lines y[TILE];
#pragma GCC unroll 4
    for (int i = 0; i < TILE / 4; i++) turn_four(x + i, y + 4 * i, bytes);
#pragma GCC unroll 4
    for (int i = 0; i < TILE / 4; i++) turn_four(y + i, x + 4 * i, bytes);
}

/* The numbers of two lines by way of float16: E5M2 is its upper half, E4M3 has its fields a bit lower, and the numbers are
   then 2^-8 of what they stand for. NaN stays NaN unless there is known to be none. */
#if defined(__aarch64__)
INLINE void numbers_of_lines(Lines codes, const int32_t format, const int32_t finite, float32x4_t to[2][4]) {
    for (int i = 0; i < 4; i++) {
        uint8x16_t zero = vdupq_n_u8(0), line = codes.line[i / 2];
        uint16x8_t half = vreinterpretq_u16_u8(i % 2 ? vzip2q_u8(zero, line) : vzip1q_u8(zero, line));
        if (format == E4M3) {
            half = vandq_u16(vreinterpretq_u16_s16(vshrq_n_s16(vreinterpretq_s16_u16(half), 1)), vdupq_n_u16(0xBF80));
            uint16x8_t nan = vceqq_u16(vandq_u16(half, vdupq_n_u16(0x3F80)), vdupq_n_u16(0x3F80));
            if (!finite) half = vorrq_u16(half, vandq_u16(nan, vdupq_n_u16(0x7E00)));
        }
        to[i / 2][i % 2 * 2] = vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(half)));
        to[i / 2][i % 2 * 2 + 1] = vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(half)));
    }
}
#define PARTS 4 /* vectors of a line */
typedef float32x4_t Piece;
INLINE Piece part_of_pairs(Lines x, int line, int part) { /* bfloat16 */
    uint16x8_t pairs = vreinterpretq_u16_u8(x.line[line]);
    return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(part ? vget_high_u16(pairs) : vget_low_u16(pairs)), 16));
}
INLINE Piece times(Piece v, const float *by) { return vmulq_f32(v, vld1q_f32(by)); }
INLINE Piece times_all(Piece v, float by) { return vmulq_n_f32(v, by); }
INLINE void store_part(float *at, Piece v) { vst1q_f32(at, v); }
INLINE Piece load_part(const float *at) { return vld1q_f32(at); }
INLINE Piece add_product(Piece sum, float a, Piece b) { return vfmaq_n_f32(sum, b, a); }
#else
INLINE void numbers_of_lines(Lines codes, const int32_t format, const int32_t finite, __m256 to[2][2]) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        __m256i zero = _mm256_setzero_si256();
        __m256i half = i ? _mm256_unpackhi_epi8(zero, codes) : _mm256_unpacklo_epi8(zero, codes);
        if (format == E4M3) {
            const __m256i all = _mm256_set1_epi16(0x3F80);
            half = _mm256_and_si256(_mm256_srai_epi16(half, 1), _mm256_set1_epi16((short)0xBF80));
            __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(half, all), all);
            if (!finite) half = _mm256_or_si256(half, _mm256_and_si256(nan, _mm256_set1_epi16(0x7E00)));
        }
        to[0][i] = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
        to[1][i] = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
    }
}
#define PARTS 2
typedef __m256 Piece;
INLINE Piece part_of_pairs(Lines x, int line, int part) {
    (void)part; /* there is one */
    __m128i pairs = line ? _mm256_extracti128_si256(x, 1) : _mm256_castsi256_si128(x);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(pairs), 16));
}
INLINE Piece times(Piece v, const float *by) { return _mm256_mul_ps(v, _mm256_loadu_ps(by)); }
INLINE Piece times_all(Piece v, float by) { return _mm256_mul_ps(v, _mm256_set1_ps(by)); }
INLINE void store_part(float *at, Piece v) { _mm256_storeu_ps(at, v); }
INLINE Piece load_part(const float *at) { return _mm256_loadu_ps(at); }
INLINE Piece add_product(Piece sum, float a, Piece b) { return _mm256_fmadd_ps(_mm256_set1_ps(a), b, sum); }
#endif

#endif
