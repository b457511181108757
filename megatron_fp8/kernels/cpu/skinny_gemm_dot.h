/* Products with few rows by AVX512-BF16: pairs of k, from first to last. See skinny_gemm.c.

   A vector holds one pair of sixteen rows of b, so codes are turned in registers: TALL rows by 64 columns at a time, in
   eight pieces of 16 by 32. Pieces of the next columns are turned between the sums of these, since a processor that
   looks some hundred instructions ahead leaves the units for sums idle while it turns more, and the other way round.
   With one row of a a sum waits for the one before it, so four vectors of rows take turns.

   Codes are decoded by tables: bit matrices (skinny_gemm.c) take the same units as sums do on Zen 4, and nothing is faster
   by them there. Memory is fetched a stretch of columns ahead, row by row as it lies. */

#pragma once

#include "skinny_gemm_panel.h"

#if defined(__AVX512BF16__)

#define GROUPS 4            /* of 16 rows of b */
#define TALL (GROUPS * 16)  /* rows of b that are multiplied together */
#define WIDTH 64            /* their columns at a time */
#define PIECES (GROUPS * 2) /* of TALL x WIDTH codes */
#define LONG 8              /* rows of a at a time: as many sums of two groups as registers hold */
#define RUN 8               /* lines of memory that are fetched with each piece */
#define STRETCH (RUN * 64)  /* columns that are fetched together, TALL rows of them */

/* Codes by words of two pairs: of sixteen bytes the first eight have a pair of four rows, the others the next one. */
typedef __m512i Words[GROUPS][WIDTH / 4];
/* What lowers numbers (decode.h) to blocks' powers of two, once for each row. */
typedef uint32_t Lanes[GROUPS][STEPS][16];

/* What is fetched while others are turned, a stretch ahead of them: of the panel that begins at `panel` the columns from
   `col` on, of k, which are `lines` of each row. Next is `line` of the row at `at`; `rows` with it are left. */
typedef struct {
    uintptr_t panel, at;
    int64_t k, next_panel, col, lines, line, rows;
} Ahead;

/* TALL rows from column `at` on, to be turned; NULL: none. */
typedef struct {
    const uint8_t *const *row;
    int64_t at;
    Ahead *ahead;
    __m512i (*to)[WIDTH / 4];
} Turned;

INLINE void begin_stretch(Ahead *ahead, int64_t col) {
    if (col >= ahead->k) col = 0, ahead->panel += (uintptr_t)ahead->next_panel;
    ahead->col = col, ahead->at = ahead->panel + (uintptr_t)col;
    ahead->lines = least(RUN, (ahead->k - col + 63) / 64), ahead->line = 0, ahead->rows = TALL;
}

/* Whether its stretch goes on. */
INLINE int next_row(Ahead *ahead) {
    ahead->at += (uintptr_t)ahead->k, ahead->line = 0;
    if (--ahead->rows) return 1;
    begin_stretch(ahead, ahead->col + STRETCH);
    return 0;
}

INLINE void fetch_run(Ahead *ahead) {
    if (ahead->lines == RUN) {
#pragma GCC unroll 8
        for (int i = 0; i < RUN; i++) _mm_prefetch((const char *)ahead->at + i * 64, _MM_HINT_T1);
        next_row(ahead);
        return;
    }
    for (int i = 0; i < RUN; i++) { /* the last columns: more rows of fewer lines */
        _mm_prefetch((const char *)ahead->at + ahead->line * 64, _MM_HINT_T1);
        if (++ahead->line == ahead->lines && !next_row(ahead)) return;
    }
}

/* 32 codes of two rows. */
INLINE __m512i both(const uint8_t *low, const uint8_t *high) {
    __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)low));
    return _mm512_inserti64x4(first, _mm256_loadu_si256((const __m256i *)high), 1);
}

/* 16 rows, 32 columns. */
INLINE void turn(const uint8_t *const *row, int64_t at, __m512i *to) {
    __m512i quads[2][4]; /* words of four rows, and of the four behind them: columns 0-15 and 16-31 of both */
#pragma GCC unroll 2
    for (int q = 0; q < 2; q++, row += 8) {
        __m512i x0 = both(row[0] + at, row[4] + at), x1 = both(row[1] + at, row[5] + at);
        __m512i x2 = both(row[2] + at, row[6] + at), x3 = both(row[3] + at, row[7] + at);
        __m512i t0 = _mm512_unpacklo_epi16(x0, x1), t1 = _mm512_unpackhi_epi16(x0, x1);
        __m512i t2 = _mm512_unpacklo_epi16(x2, x3), t3 = _mm512_unpackhi_epi16(x2, x3);
        quads[q][0] = _mm512_unpacklo_epi32(t0, t2);
        quads[q][1] = _mm512_unpackhi_epi32(t0, t2);
        quads[q][2] = _mm512_unpacklo_epi32(t1, t3);
        quads[q][3] = _mm512_unpackhi_epi32(t1, t3);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        to[i] = _mm512_shuffle_i32x4(quads[0][i], quads[1][i], 0x88);
        to[i + 4] = _mm512_shuffle_i32x4(quads[0][i], quads[1][i], 0xDD);
    }
}

INLINE void turn_piece(const Turned *next, int64_t piece) {
    if (next->row == NULL) return;
    fetch_run(next->ahead);
    turn(next->row + piece / 2 * 16, next->at + piece % 2 * 32, next->to[piece / 2] + piece % 2 * 8);
}

/* sums [rows][TALL] += a times WIDTH columns; turns the next ones meanwhile. a: [pair][rows]. */
INLINE void add_words(const uint32_t *a, const int64_t rows, const Numbers *numbers, const __m512i (*word)[WIDTH / 4],
                      const Lanes lanes, int64_t step, const int32_t scaled, float (*sums)[TALL],
                      const Turned *next) {
    const int64_t some = least(rows, LONG), groups = rows < LONG ? GROUPS : 2;
    const int64_t each = WIDTH / 4 / (PIECES / (GROUPS / groups) / (rows / some)); /* words for each piece */
    int64_t piece = 0;
    for (int64_t first = 0; first < GROUPS; first += groups)
        for (int64_t m = 0; m < rows; m += some) {
            const uint32_t *pairs = a + m;
            __m512 sum[LONG][GROUPS];
#pragma GCC unroll 8
            for (int64_t r = 0; r < some; r++)
#pragma GCC unroll 4
                for (int64_t g = 0; g < groups; g++) sum[r][g] = _mm512_loadu_ps(sums[m + r] + (first + g) * 16);
#pragma GCC unroll 1
            for (int64_t i = 0; i < WIDTH / 4; i++) {
                __m512i values[GROUPS][2];
                if (i % each == 0) turn_piece(next, piece++);
#pragma GCC unroll 4
                for (int64_t g = 0; g < groups; g++) {
                    __m512i codes = word[first + g][i];
                    __asm__("" : "+v"(codes)); /* GCC 12 loads it for each of three uses */
                    decode_quarters(numbers, codes, values[g], values[g] + 1);
                    if (!scaled) continue;
                    __m512i by = _mm512_loadu_si512(lanes[first + g][step + i / 8]);
                    values[g][0] = lowered(values[g][0], by);
                    values[g][1] = lowered(values[g][1], by);
                }
#pragma GCC unroll 2
                for (int64_t j = 0; j < 2; j++, pairs += rows)
#pragma GCC unroll 8
                    for (int64_t r = 0; r < some; r++) {
                        __m512bh pair = (__m512bh)_mm512_set1_epi32((int32_t)pairs[r]);
#pragma GCC unroll 4
                        for (int64_t g = 0; g < groups; g++)
                            sum[r][g] = _mm512_dpbf16_ps(sum[r][g], (__m512bh)values[g][j], pair);
                    }
            }
#pragma GCC unroll 8
            for (int64_t r = 0; r < some; r++)
#pragma GCC unroll 4
                for (int64_t g = 0; g < groups; g++) _mm512_storeu_ps(sums[m + r] + (first + g) * 16, sum[r][g]);
        }
}

/* One for each number of rows, which are registers; a is padded to it. */
#define ADD_WORDS(ROWS)                                                                                              \
    static void add_words_##ROWS(const uint32_t *a, const Numbers *numbers, const __m512i (*word)[WIDTH / 4],        \
                                 const Lanes lanes, int64_t step, int32_t scaled, float (*sums)[TALL],           \
                                 const Turned *next) {                                                               \
        if (scaled) add_words(a, ROWS, numbers, word, lanes, step, 1, sums, next);                               \
        else add_words(a, ROWS, numbers, word, lanes, step, 0, sums, next);                                      \
    }

ADD_WORDS(1)
ADD_WORDS(2)
ADD_WORDS(4)
ADD_WORDS(8)
ADD_WORDS(16)

/* How many rows of a a panel takes. */
INLINE int64_t padded_rows(int64_t m) { return m <= 2 ? m : m <= 4 ? 4 : m <= 8 ? 8 : 16; }

/* Of rows whose exponents begin there, the ones of 512 columns from `at` on; what the next panel reads is fetched. */
static void lanes_of(const Product *p, const uint8_t *const *row, int64_t ahead, int64_t at, Lanes to) {
    for (int64_t g = 0; g < GROUPS; g++, row += 16) {
        __m128i x[16], y[16];
#pragma GCC unroll 16
        for (int r = 0; r < 16; r++) {
            x[r] = exponents_at(p, row[r], at);
            _mm_prefetch((const char *)row[r] + ahead + at / p->block_cols, _MM_HINT_T1);
        }
        for (int round = 0; round < 2; round++) { /* transposes: four times rows of both halves by turns */
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                y[2 * i] = _mm_unpacklo_epi8(x[i], x[i + 8]);
                y[2 * i + 1] = _mm_unpackhi_epi8(x[i], x[i + 8]);
            }
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                x[2 * i] = _mm_unpacklo_epi8(y[i], y[i + 8]);
                x[2 * i + 1] = _mm_unpackhi_epi8(y[i], y[i + 8]);
            }
        }
#pragma GCC unroll 16
        for (int step = 0; step < STEPS; step++) {
            __m512i by = _mm512_sub_epi32(_mm512_set1_epi32(127 + LIFT), _mm512_cvtepu8_epi32(x[step]));
            by = _mm512_or_si512(_mm512_slli_epi32(by, 7), _mm512_slli_epi32(by, 23));
            _mm512_storeu_si512(to[g][step], by);
        }
    }
}

/* WIDTH columns of a from column `at` on, [pair][rows], times the powers of two that all TALL rows of b from `first` on
   share: the products are the same numbers, and fewer of them have to be scaled. Exponents are added without a look at
   what comes out: skinny_gemm.py says what its callers see to. */
static void scale_pairs(const Product *p, const uint32_t *a, int64_t rows, int64_t first, int64_t at, uint32_t *to) {
    int64_t size = STEP / 2 * rows;
    const uint8_t *from = p->exponents + first / p->block_rows * ((p->k + p->block_cols - 1) / p->block_cols);
    for (int64_t end = at + WIDTH; at < end; at += STEP, a += size, to += size) {
        int32_t byte = from[least(at, p->k - 1) / p->block_cols], exponent = byte ? byte - 127 : 0; /* 0: of zeros */
        __m512i shift = _mm512_set1_epi16((short)(exponent * 128));
        for (int64_t i = 0; i < size; i += 16)
            _mm512_storeu_si512(to + i, shifted(_mm512_loadu_si512(a + i), shift));
    }
}

/* Whether exponents go into b's numbers, which are then lifted: rows of a panel have their own. */
INLINE int32_t scales_b(const Product *p) { return p->exponents && p->block_rows % TALL; }

/* TALL rows of b from `first` on. a: [pairs, whole words][padded rows]. */
static void panel_by_dot(const Product *p, const uint32_t *a, const Numbers *numbers, int64_t first) {
    const uint8_t *row[TALL], *last[TALL];
    uint8_t rest[TALL][WIDTH]; /* the last columns, where they are fewer than WIDTH, and zeros */
    float sums[MOST][TALL] = {0};
    uint32_t scaled_a[WIDTH / 2 * MOST];
    Words words[2]; /* by turns */
    const uint8_t *exponents[TALL];
    Lanes lanes;
    int64_t rows = padded_rows(p->m), whole = p->k / WIDTH * WIDTH;
    int64_t further = 0; /* from a row's exponents to those of the next panel's */
    int32_t scaled = scales_b(p), scales_a = p->exponents && !scaled;
    begin_rows(p, first, TALL, row);
    for (int64_t r = 0; scaled && r < TALL; r++) exponents[r] = exponents_of(p, first + r);
    if (whole < p->k) {
        memset(rest, 0, sizeof rest);
        for (int64_t r = 0; r < TALL; r++) last[r] = memcpy(rest[r], row[r] + whole, (size_t)(p->k - whole));
    }
    Ahead ahead = {.panel = (uintptr_t)row[0], .k = p->k, .next_panel = first + TALL < p->n ? TALL * p->k : 0};
    begin_stretch(&ahead, STRETCH);
    if (scaled) further = exponents_of(p, first + TALL) - exponents[0];
    for (int64_t at = -WIDTH; at < p->k; at += WIDTH) {
        int64_t then = at + WIDTH, here = at / WIDTH & 1;
        Turned next = {then < whole ? row : then < p->k ? last : NULL, then < whole ? then : 0, &ahead, words[1 - here]};
        if (at < 0) {
            for (int64_t piece = 0; piece < PIECES; piece++) turn_piece(&next, piece);
            continue;
        }
        int64_t step = at / STEP % STEPS;
        if (scaled && step == 0) lanes_of(p, exponents, further, at, lanes);
        if (scales_a) scale_pairs(p, a, rows, first, at, scaled_a);
        const uint32_t *by = scales_a ? scaled_a : a;
        const __m512i(*word)[WIDTH / 4] = (const __m512i(*)[WIDTH / 4])words[here];
        /* branches, no conditional calls: GCC 12 has merged such calls wrongly */
        if (rows == 1) add_words_1(by, numbers, word, lanes, step, scaled, sums, &next);
        else if (rows == 2) add_words_2(by, numbers, word, lanes, step, scaled, sums, &next);
        else if (rows == 4) add_words_4(by, numbers, word, lanes, step, scaled, sums, &next);
        else if (rows == 8) add_words_8(by, numbers, word, lanes, step, scaled, sums, &next);
        else add_words_16(by, numbers, word, lanes, step, scaled, sums, &next);
        a += WIDTH / 2 * rows;
    }
    finish(p, sums[0], TALL, first, TALL, 1);
}

#endif
