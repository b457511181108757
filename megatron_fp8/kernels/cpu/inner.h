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
static void work_beside(Beside *beside);
INLINE void fetch_beside(Beside *beside);

/* Two panels, the second one `apart` words behind the first. */
typedef struct { const uint32_t *at; int64_t apart; } Panels;

/* 8 rows of sums [.., 32] by so many squares of 8 rows of a panel and of two panels of pairs. Of what is read next, 8 lines
   are fetched with each square. A function of its own: in a larger one GCC keeps addresses in vector registers, where they
   wait for the products. */
static __attribute__((noinline)) void multiply_8(const uint32_t *left, Panels pairs, int64_t squares, float *sums,
                                                 int32_t more, const char *next, Beside *beside) {
    const uint32_t *right = pairs.at;
    __m512 sum[8][2];
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++) {
        sum[r][0] = more ? _mm512_load_ps(sums + r * BLOCK) : _mm512_setzero_ps();
        sum[r][1] = more ? _mm512_load_ps(sums + r * BLOCK + 16) : _mm512_setzero_ps();
    }
    for (int64_t s = 0; s < squares; s++, left += SQUARE, right += SQUARE) {
        fetch_beside(beside);
        for (int line = 0; next && line < 8; line++, next += 64) _mm_prefetch(next, _MM_HINT_T0);
#pragma GCC unroll 4
        for (int pair = 0; pair < SIDE; pair++) {
            __m512bh first = (__m512bh)_mm512_load_si512(right + pair * SIDE);
            __m512bh second = (__m512bh)_mm512_load_si512(right + pairs.apart + pair * SIDE);
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
        _mm512_store_ps(sums + r * BLOCK, sum[r][0]);
        _mm512_store_ps(sums + r * BLOCK + 16, sum[r][1]);
    }
}

/* sums [32, 32] over squares of k; next: panels to be fetched, where `at` is not NULL. */
static void multiply_avx512(Panels a, Panels b, int64_t squares, float *sums, int32_t more, Panels next, Beside *beside) {
    for (int part = 0; part < 4; part++) {
        const uint32_t *left = a.at + part / 2 * a.apart + part % 2 * 8 * SIDE;
        const uint32_t *half = next.at ? next.at + part / 2 * next.apart + part % 2 * (squares * SQUARE / 2) : NULL;
        for (int64_t s = part; s < squares; s += 4) work_beside(beside);
        multiply_8(left, b, squares, sums + part * 8 * BLOCK, more, (const char *)half, beside);
    }
}

#if HAS_AMX
static void use_tiles(void) {
    struct { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; } config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) config.bytes[tile] = 64, config.rows[tile] = SIDE;
    _tile_loadconfig(&config);
}

static void multiply_amx(Panels left, Panels right, int64_t squares, float *sums, int32_t more, Beside *beside) {
    const uint32_t *a = left.at, *b = right.at;
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
        _tile_loadd(7, b + right.apart, line);
        _tile_loadd(5, a + left.apart, line);
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
