/* Vectors of NVFP4: E2M1 codes, E4M3 block scales, the Hadamard transform, Philox's random bytes.

   Vector types of GCC and Clang, LANES wide, serve all processors. Plain loops, as in the other files, became scalar code:
   GCC does not vectorise loops that mix lanes of 8, 32 and 64 bits. */

#pragma once

#include <float.h>

#include "numbers.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi" /* all functions with vectors are inlined */
#endif

#if defined(__AVX512BW__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define LANES 8
#else
#define LANES 4
#endif

#define N 16 /* elements of a block; rows and columns of a square */
#define INF 0x7F800000u

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint64_t Longs __attribute__((vector_size(4 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

INLINE Words words(uint32_t all) { return (Words){0} + all; }
INLINE Floats floats_at(const float *at) { Floats v; memcpy(&v, at, sizeof v); return v; }
INLINE void store_bytes(uint8_t *at, Words v) { Bytes b = __builtin_convertvector(v, Bytes); memcpy(at, &b, sizeof b); }
INLINE Words choose(Words mask, Words yes, Words no) { return (mask & yes) | (~mask & no); }

/* Minima and maxima are of numbers below 2^31. GCC 12 widens bytes one by one. */
#if LANES == 16
INLINE Words smaller(Words a, Words b) { return (Words)_mm512_min_epu32((__m512i)a, (__m512i)b); }
INLINE Words larger(Words a, Words b) { return (Words)_mm512_max_epu32((__m512i)a, (__m512i)b); }
INLINE Words bytes_at(const uint8_t *at) { return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)at)); }
INLINE Longs product(Longs a, uint32_t b) { return (Longs)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b)); }
#elif LANES == 8
INLINE Words smaller(Words a, Words b) { return (Words)_mm256_min_epu32((__m256i)a, (__m256i)b); }
INLINE Words larger(Words a, Words b) { return (Words)_mm256_max_epu32((__m256i)a, (__m256i)b); }
INLINE Words bytes_at(const uint8_t *at) { return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)at)); }
INLINE Longs product(Longs a, uint32_t b) { return (Longs)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b)); }
#else
INLINE Words smaller(Words a, Words b) { return choose((Words)(a < b), a, b); }
INLINE Words larger(Words a, Words b) { return choose((Words)(a > b), a, b); }
INLINE Words bytes_at(const uint8_t *at) { Bytes v; memcpy(&v, at, sizeof v); return __builtin_convertvector(v, Words); }
INLINE Longs product(Longs a, uint32_t b) { return a * b; } /* of the lower half of each lane, as the others */
#endif

/* ------------------------------------------------------------------------------------------------------------ codes */

/* Round-to-nearest-even to a format's grid, saturating: encode.h's. Sums of `inside` and `magic` round. */
INLINE Words encode_magnitudes(Words inside, uint32_t kept, uint32_t low, Floats *rounded) {
    Words exponent = larger(inside & INF, words(low)), magic = exponent + ((23 - kept) << 23);
    Floats sum = (Floats)inside + (Floats)magic;
    *rounded = sum - (Floats)magic;
    return (Words)sum - magic + ((exponent - low) >> (23 - kept));
}

/* E2M1 codes of v; NaN, which the format has not, is 0. random: bytes, 256ths of a step to add before rounding down. */
INLINE Words encode_e2m1(Floats v, const uint8_t *random, const int32_t stochastic) {
    Words u = (Words)v, six = words(0x40C00000), inside = smaller(u & 0x7FFFFFFF, six), code;
    if (stochastic) {
        Words one = words(127u << 23), exponent = larger(inside & INF, one);
        Floats step_256th = (Floats)(exponent - (9u << 23));
        Floats sum = (Floats)inside + __builtin_convertvector(bytes_at(random), Floats) * step_256th;
        Words moved = smaller((Words)sum, six), half = words(126u << 23);
        code = larger((larger(moved, half) >> 22) - 252, (Words)(moved >= half) & 1);
    } else {
        Floats rounded;
        code = encode_magnitudes(inside, 1, 127u << 23, &rounded);
    }
    return (code | (u >> 28 & 8)) & (Words)(v == v);
}

/* What a tensor's amax gives: S_enc / 6 and S_dec. */
typedef struct { float sixth, inverse; } TensorScale;

static TensorScale tensor_scale(float amax) {
    float scale = 2688 / amax;
    scale = scale > FLT_MAX ? FLT_MAX : scale == 0 ? 1 : scale;
    return (TensorScale){scale * (float)(1.0 / 6), 1 / scale};
}

/* E4M3 scales of blocks, and the factors that their codes are rounded under. */
INLINE void scale_blocks(const float amax[N], TensorScale by, uint8_t scale[N], float factor[N]) {
    for (int c = 0; c < N; c += LANES) {
        Floats s, wanted = floats_at(amax + c) * by.sixth;
        store_bytes(scale + c, encode_magnitudes(smaller((Words)wanted, words(0x43E00000 /* 448 */)), 3, 121u << 23, &s));
        Floats inverse = 1 / (s * by.inverse);
        inverse = (Floats)smaller((Words)inverse, words(INF - 1)); /* FLT_MAX */
        memcpy(factor + c, &inverse, sizeof inverse);
    }
}

/* -------------------------------------------------------------------------------------------------------- transform */

typedef float Square[N][N];

/* Each column of x by diag(signs) H / 4, H Sylvester's, rounded to bfloat16, in place. */
static void transform(Square x) {
    const uint32_t negative = 0xD7E8; /* bit r: the sign of row r */
    for (int c = 0; c < N; c += LANES) {
        Floats v[N];
#pragma GCC unroll 16
        for (int r = 0; r < N; r++) v[r] = (Floats)((Words)floats_at(x[r] + c) ^ (negative >> r & 1) << 31);
#pragma GCC unroll 4
        for (int stride = 8; stride; stride /= 2)
#pragma GCC unroll 16
            for (int r = 0; r < N; r++)
                if (!(r & stride)) {
                    Floats first = v[r], second = v[r + stride];
                    v[r] = first + second;
                    v[r + stride] = first - second;
                }
#pragma GCC unroll 16
        for (int r = 0; r < N; r++) {
            v[r] *= 0.25f;
            Words u = (Words)v[r], rounded = (u + 0x7FFF + (u >> 16 & 1)) & 0xFFFF0000;
            u = choose((Words)(v[r] == v[r]), rounded, u);
            memcpy(x[r] + c, &u, sizeof u);
        }
    }
}

/* ----------------------------------------------------------------------------------------------------- random bytes */

/* So many Philox4x32-10 blocks from `block` on, 16 bytes each: whole vectors of them. Words are in lanes of 64 bits. */
static void philox(uint64_t block, int64_t blocks, const uint32_t key[2], const uint32_t counter[2], uint8_t *to) {
    enum { AT_ONCE = LANES / 2 };
    static const uint64_t count[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    Longs index;
    memcpy(&index, count, sizeof index);
    index += block;
    for (int64_t b = 0; b < blocks; b += AT_ONCE, index += AT_ONCE, to += AT_ONCE * N) {
        Longs c0 = index & 0xFFFFFFFF, c1 = index >> 32, c2 = (Longs){0} + counter[0], c3 = (Longs){0} + counter[1];
        uint32_t k0 = key[0], k1 = key[1];
        for (int round = 0; round < 10; round++, k0 += 0x9E3779B9, k1 += 0xBB67AE85) {
            Longs product_0 = product(c0, 0xD2511F53), product_1 = product(c2, 0xCD9E8D57);
            c0 = (product_1 >> 32) ^ c1 ^ k0;
            c1 = product_1 & 0xFFFFFFFF;
            c2 = (product_0 >> 32) ^ c3 ^ k1;
            c3 = product_0 & 0xFFFFFFFF;
        }
        Longs first = c0 | c1 << 32, second = c2 | c3 << 32;
        for (int i = 0; i < AT_ONCE; i++) {
            uint64_t bytes[2] = {first[i], second[i]};
            memcpy(to + i * N, bytes, sizeof bytes);
        }
    }
}
