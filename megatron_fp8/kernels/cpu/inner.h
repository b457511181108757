/* The inner loops of products: 32 x 32 sums over panels (pack.h) that lie alike for both.

   AVX512-BF16 keeps 8 x 32 sums in registers, AMX all of them in four tiles. With each square of k that is multiplied,
   work_beside does a part of what others need: tile products leave most of the processor idle, and what is done between
   them costs little. */

#pragma once

#include "pack.h"

#if defined(__AVX512BF16__)

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(SYS_arch_prctl)
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif

#define BLOCK 32 /* rows and columns of out at a time */

typedef struct Beside Beside;
INLINE void work_beside(Beside *beside);
INLINE void fetch_beside(Beside *beside);

/* sums [32, 32] of two panels of a and two of b, each `apart` words from the first, over squares of k. */
static void multiply_avx512(const uint32_t *a, int64_t a_apart, const uint32_t *b, int64_t b_apart, int64_t squares,
                            float *sums, int32_t more, Beside *beside) {
    for (int64_t s = 0; s < squares; s++) work_beside(beside);
    for (int part = 0; part < 4; part++) {
        const uint32_t *left = a + part / 2 * a_apart + part % 2 * 8 * SIDE;
        float *to = sums + part * 8 * BLOCK;
        __m512 sum[8][2];
#pragma GCC unroll 8
        for (int r = 0; r < 8; r++) {
            sum[r][0] = more ? _mm512_load_ps(to + r * BLOCK) : _mm512_setzero_ps();
            sum[r][1] = more ? _mm512_load_ps(to + r * BLOCK + 16) : _mm512_setzero_ps();
        }
        const uint32_t *right = b;
        for (int64_t s = 0; s < squares; s++, left += SQUARE, right += SQUARE) {
            fetch_beside(beside);
#pragma GCC unroll 4
            for (int pair = 0; pair < SIDE; pair++) {
                __m512bh first = (__m512bh)_mm512_load_si512(right + pair * SIDE);
                __m512bh second = (__m512bh)_mm512_load_si512(right + b_apart + pair * SIDE);
#pragma GCC unroll 8
                for (int r = 0; r < 8; r++) {
                    __m512bh value = (__m512bh)_mm512_set1_epi32((int32_t)left[r * SIDE + pair]);
                    sum[r][0] = _mm512_dpbf16_ps(sum[r][0], value, first);
                    sum[r][1] = _mm512_dpbf16_ps(sum[r][1], value, second);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < 8; r++) {
            _mm512_store_ps(to + r * BLOCK, sum[r][0]);
            _mm512_store_ps(to + r * BLOCK + 16, sum[r][1]);
        }
    }
}

#if HAS_AMX
static void use_tiles(void) {
    struct { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; } config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) config.bytes[tile] = 64, config.rows[tile] = SIDE;
    _tile_loadconfig(&config);
}

static void multiply_amx(const uint32_t *a, int64_t a_apart, const uint32_t *b, int64_t b_apart, int64_t squares,
                         float *sums, int32_t more, Beside *beside) {
    const int step = BLOCK * sizeof(float), line = SIDE * sizeof(uint32_t);
    if (more) {
        _tile_loadd(0, sums, step);
        _tile_loadd(1, sums + SIDE, step);
        _tile_loadd(2, sums + SIDE * BLOCK, step);
        _tile_loadd(3, sums + SIDE * BLOCK + SIDE, step);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t s = 0; s < squares; s++, a += SQUARE, b += SQUARE) {
        work_beside(beside);
        for (int quarter = 0; quarter < 4; quarter++) fetch_beside(beside);
        _tile_loadd(4, a, line);
        _tile_loadd(6, b, line);
        _tile_loadd(7, b + b_apart, line);
        _tile_loadd(5, a + a_apart, line);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, step);
    _tile_stored(1, sums + SIDE, step);
    _tile_stored(2, sums + SIDE * BLOCK, step);
    _tile_stored(3, sums + SIDE * BLOCK + SIDE, step);
}
#endif

#endif
