/* Products with few rows by AMX: steps of 32 columns, from first to last. See skinny_gemm.c. */

#pragma once

#include "skinny_gemm_panel.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512VBMI__) && defined(__GFNI__) && defined(__linux__)

#include <sys/syscall.h>
#include <unistd.h>

#define FEW_ROWS_BY_TILES 1
#define PANEL 32            /* rows of b that are multiplied together */
#define LINES 2             /* cache lines of each row that are decoded at a time */
#define CHUNK (LINES * 64)  /* their columns */

/* Matrices that make the bytes of a number from the bits of its code (see decode_scaled). */
#define LOW_BITS 0x0000000001020408
#define HIGH_BITS 0x1020404040404080

/* ------------------------------------------------------------------------------------------------ codes to bfloat16 */

/* How codes become bfloat16: by tables; whether normal codes go by bit matrices; how many times 64 codes did not, though
   they might have. */
typedef struct {
    Numbers numbers;
    int32_t by_bits;
    int64_t rare;
} Decoder;

/* 64 codes, in each quarter of 16 the first eight as numbers of `first`, the others of `second`; times 2^exponent, which
   lies at that of each number (mod 2^9) and is for numbers alone, no NaN and no Inf.

   The exponent of an E4M3 code with the bits bxxx, 120 less than the number's, becomes b, four times its opposite, and
   xxx: one bit matrix gives the high byte of all normal codes, another the low one. Where one of the 64 is zero or
   subnormal, which is rare, all of them are looked up in tables; where it is not rare, all codes are from then on (a
   branch that goes now this way and now that takes longer than the tables). */
INLINE void decode_scaled(__m512i codes, Decoder *d, int32_t scaled, __m512i one, __m512i two, __m512i *first,
                   __m512i *second) {
    if (d->by_bits && !_mm512_testn_epi8_mask(codes, _mm512_set1_epi8(0x78))) {
        __m512i low = _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(LOW_BITS), 0);
        __m512i high = _mm512_gf2p8affine_epi64_epi8(codes, _mm512_set1_epi64(HIGH_BITS), 0x3C);
        *first = _mm512_unpacklo_epi8(low, high);
        *second = _mm512_unpackhi_epi8(low, high);
        if (scaled) *first = _mm512_add_epi16(*first, one), *second = _mm512_add_epi16(*second, two);
        return;
    }
    d->rare++;
    decode_quarters(&d->numbers, codes, first, second);
    if (scaled) { /* zeros stay zeros */
        *first = scaled_by(one, *first);
        *second = scaled_by(two, *second);
    }
}

INLINE __m512i codes_at(const uint8_t *row, int64_t at, int64_t k) {
    if (at + 64 <= k) return _mm512_loadu_si512(row + at);
    return _mm512_maskz_loadu_epi8(first_of(k - at), row + at);
}

/* Fetches what the next panel reads where this one is now: the same columns of a row PANEL further on. */
INLINE void fetch(const Product *p, const uint8_t *row, int64_t at) {
    _mm_prefetch((const char *)row + PANEL * p->k + at, _MM_HINT_T1);
}

/* --------------------------------------------------------------------------------------------------------- products */

/* Linux gives a process the tiles' registers once it asks for them. */
static int32_t may_use_tiles(void) { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0; }

/* Tiles 0, 1: sums [16 rows of b][m]; 2: a [16 pairs][m]; 4, 5: b [16 rows][32 values]. */
static void shape_tiles(int64_t m) {
    struct {
        uint8_t palette, start, zeros[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.rows[i] = 16, shapes.bytes[i] = (uint16_t)(i < 4 ? 4 * m : 64);
    _tile_loadconfig(&shapes);
}

/* Values of a chunk as tiles: [step][row of the panel]. */
typedef __m512i Tiles[CHUNK / STEP][PANEL];

/* One step of the tile product: pairs [16][m] of a by both halves of a panel. */
INLINE void multiply_step(const uint32_t *pairs, int64_t bytes, const __m512i *values) {
    _tile_loadd(2, pairs, bytes);
    _tile_loadd(4, values, 64);
    _tile_dpbf16ps(0, 4, 2);
    _tile_loadd(5, values + 16, 64);
    _tile_dpbf16ps(1, 5, 2);
}

/* Decodes the chunk at column `at`; meanwhile multiplies the one before it, whose values are in `before`, if there is one:
   a tile product takes longer than the processor looks ahead, so products and decoding go by turns. `whole`: all of the
   chunk's columns exist. */
INLINE void decode_and_multiply(const Product *p, const uint32_t *a, Decoder *d, const uint8_t **row, int64_t at,
                                uint32_t (*exponents)[STEPS], int32_t scaled, int32_t whole, Tiles to, Tiles before) {
    const __m512i in_order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const int64_t each = p->block_rows % PANEL ? 1 : 0;
    for (int64_t step = 0; step < CHUNK / STEP; step++) {
        for (int64_t r = step * (PANEL * STEP / CHUNK); r < (step + 1) * (PANEL * STEP / CHUNK); r++)
#pragma GCC unroll 2
            for (int64_t line = 0; line < LINES; line++) {
                int64_t column = at + 64 * line;
                __m512i codes = whole ? _mm512_loadu_si512(row[r] + column) : codes_at(row[r], column, p->k);
                __m512i one = codes, two = codes;
                codes = _mm512_permutexvar_epi64(in_order, codes);
                fetch(p, row[r], column);
                if (scaled) {
                    const uint32_t *exponent = exponents[r * each] + column / STEP % STEPS;
                    one = _mm512_set1_epi32((int32_t)exponent[0]), two = _mm512_set1_epi32((int32_t)exponent[1]);
                }
                decode_scaled(codes, d, scaled, one, two, to[2 * line] + r, to[2 * line + 1] + r);
            }
        if (before)
            multiply_step(a + ((at - CHUNK) / 2 + step * 16) * p->m, p->m * (int64_t)sizeof(uint32_t), before[step]);
    }
}

INLINE void sum_by_tiles(const Product *p, const uint32_t *a, Decoder *d, int64_t first, int32_t scaled) {
    const uint8_t *row[PANEL];
    Tiles values[2]; /* by turns */
    uint32_t exponents[PANEL][STEPS];
    int64_t at = 0, chunk = 0;
    begin_rows(p, first, PANEL, row);
    for (; at < p->k; at += CHUNK, chunk++) {
        __m512i(*to)[PANEL] = values[chunk % 2], (*before)[PANEL] = chunk ? values[1 - chunk % 2] : NULL;
        if (scaled && at % (STEP * STEPS) == 0)
            read_exponents(p, first, p->block_rows % PANEL ? PANEL : 1, at, exponents);
        if (at + CHUNK <= p->k) decode_and_multiply(p, a, d, row, at, exponents, scaled, 1, to, before);
        else decode_and_multiply(p, a, d, row, at, exponents, scaled, 0, to, before);
    }
    for (int64_t step = 0; step < CHUNK / STEP; step++)
        multiply_step(a + ((at - CHUNK) / 2 + step * 16) * p->m, p->m * (int64_t)sizeof(uint32_t),
                      values[(chunk - 1) % 2][step]);
}

static void panel_by_tiles(const Product *p, const uint32_t *a, Decoder *d, int64_t first) {
    float found[PANEL][MOST], sums[MOST][PANEL];
    _tile_zero(0);
    _tile_zero(1);
    if (p->exponents) sum_by_tiles(p, a, d, first, 1);
    else sum_by_tiles(p, a, d, first, 0);
    _tile_stored(0, found, sizeof found[0]);
    _tile_stored(1, found + 16, sizeof found[0]);
    for (int64_t i = 0; i < PANEL; i++)
        for (int64_t m = 0; m < p->m; m++) sums[m][i] = found[i][m];
    finish(p, sums[0], PANEL, first, PANEL, 1);
}

#else

#define FEW_ROWS_BY_TILES 0

#endif
