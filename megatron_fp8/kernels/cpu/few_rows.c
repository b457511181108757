/* Products with few rows, c [m, n] = a [m, k] b [n, k]^T with m <= 16: one token decoded, or the sequences of a batch.

   Nothing but reading b costs time there, so b is read as FP8 codes, one byte a value, once, and becomes bfloat16 in
   registers: two table look-ups give the high and the low byte of 64 values, exactly, subnormal codes and NaN too. A
   thread takes PANEL rows of b from end to end; a stays in the caches.

   The order of sums is that of the products with many rows on the same processor, so a row's result does not depend on
   how many rows are beside it, nor on the number of threads:

   * AMX: steps of 32 values of k, one tile product each, from first to last. The codes are the tile product's left
     operand, which lies row by row as they do: nothing is transposed;
   * AVX512-BF16: pairs of k, from first to last. Sixteen rows of codes are turned in registers, so that a vector holds
     sixteen rows' values of one pair.

   Rejected: codes packed for this kernel beforehand. Reading rows as they lie is as fast, and all else that reads a
   weight (state dicts, copies, exports) finds it where it was. Rejected: sums along k in the lanes of a vector. It needs
   no turning, but no product with many rows sums like that. */

#include <stdint.h>

#include "few_rows.h"
#include "pack.h"

#define PANEL 32            /* rows of b that are multiplied together */
#define STEP 32             /* columns of a tile product, and of one exponent */
#define LINES 2             /* cache lines of each row that are decoded at a time */
#define CHUNK (LINES * 64)  /* their columns */
#define STEPS 16            /* steps whose exponents are read at a time: a multiple of a chunk's */

/* Matrices that make the bytes of a number from the bits of its code (see decode_scaled). */
#define LOW_BITS 0x0000000001020408
#define HIGH_BITS 0x1020404040404080

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__GFNI__)

#include <stdlib.h>

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
   subnormal, which is rare, all of them are looked up in tables; where it is not rare, all codes are from then on (a branch that goes now this
   way and now that takes longer than the tables). */
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
        const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
        *first = _mm512_mask_add_epi16(*first, _mm512_test_epi16_mask(*first, magnitude), *first, one);
        *second = _mm512_mask_add_epi16(*second, _mm512_test_epi16_mask(*second, magnitude), *second, two);
    }
}

/* Exponents of 512 columns of a panel of b, as they lie in two bfloat16 numbers: [row][step]; one row where the panel's
   rows share blocks. */
static void read_exponents(const Product *p, int64_t first, int64_t at, uint32_t (*to)[STEPS]) {
    int64_t across = (p->k + p->block_cols - 1) / p->block_cols, steps = least(STEPS, (p->k - at + STEP - 1) / STEP);
    for (int64_t r = 0; r < (p->block_rows % PANEL ? PANEL : 1); r++) {
        const uint8_t *from = p->exponents + least(first + r, p->n - 1) / p->block_rows * across;
        uint8_t biased[STEPS] = {0};
        __m128i bytes;
        if (p->block_cols == STEP)
            bytes = _mm_maskz_loadu_epi8((__mmask16)first_of(steps), from + at / STEP);
        else {
            for (int64_t i = 0; i < steps; i++) biased[i] = from[(at + STEP * i) / p->block_cols];
            bytes = _mm_loadu_si128((const __m128i *)biased);
        }
        __m512i high = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(127)), 23);
        _mm512_storeu_si512(to[r], _mm512_or_si512(high, _mm512_srli_epi32(high, 16)));
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

/* Where each row of a panel of b begins; rows beyond the last are the last one again, and their sums nobody's. */
INLINE void begin_rows(const Product *p, int64_t first, const uint8_t **row) {
    for (int64_t r = 0; r < PANEL; r++) row[r] = p->b + least(first + r, p->n - 1) * p->k;
}

/* How many rows of a `panel_by_dot` takes. */
INLINE int64_t padded_rows(int64_t m) { return m <= 2 ? m : m <= 4 ? 4 : m <= 8 ? 8 : 16; }

/* a, two values of k side by side: [pairs, whole chunks][rows], zeros beyond k and m. */
static uint32_t *pairs_of(const Product *p, int64_t rows) {
    int64_t pairs = (p->k + CHUNK - 1) / CHUNK * (CHUNK / 2);
    uint32_t *packed = calloc((size_t)(pairs * rows), sizeof(uint32_t));
    if (packed == NULL) return NULL;
    for (int64_t m = 0; m < p->m; m++) {
        const uint16_t *from = p->a + m * p->k;
        for (int64_t i = 0; i < p->k / 2; i++) packed[i * rows + m] = from[2 * i] | (uint32_t)from[2 * i + 1] << 16;
        if (p->k % 2) packed[p->k / 2 * rows + m] = from[p->k - 1];
    }
    return packed;
}

/* sums [m][PANEL] of the rows of b from `first` on: scales, bias and one rounding. */
static void finish(const Product *p, float sums[MOST][PANEL], int64_t first) {
    int64_t n = least(PANEL, p->n - first);
    float scale_b[PANEL], bias[PANEL];
    for (int64_t i = 0; i < n; i++) {
        scale_b[i] = p->scale_b[p->each_b ? first + i : 0];
        bias[i] = p->bias ? p->bias[first + i] : 0;
    }
    for (int64_t m = 0; m < p->m; m++) {
        float scale = p->scale_a[p->each_a ? m : 0], *sum = sums[m];
        for (int64_t i = 0; i < n; i++) sum[i] *= scale * scale_b[i];
        if (p->bias) for (int64_t i = 0; i < n; i++) sum[i] += bias[i];
        if (p->to_bfloat16) {
            uint16_t *to = (uint16_t *)p->to + m * p->n + first;
            for (int64_t i = 0; i < n; i++) to[i] = sum[i] == sum[i] ? store_bfloat16(sum[i]) : 0x7FC0;
        } else memcpy((float *)p->to + m * p->n + first, sum, (size_t)n * sizeof(float));
    }
}

/* ------------------------------------------------------------------------------------------------------ AVX512-BF16 */

/* sums [rows][PANEL], of the panel's rows from `half` on, += a times 64 columns of them. Each vector of values is summed
   as soon as it is made: written to memory first, decoding and sums take turns and not the same time. a: [pair][rows]. */
INLINE void add_turned(const Product *p, const uint32_t *a, int64_t rows, const uint8_t **row, int64_t half, int64_t at,
                       Decoder *d, uint32_t (*exponents)[STEPS], int32_t scaled, int32_t whole, float (*sums)[PANEL]) {
    /* words of one row hold four values of k: the first pairs of all words, then the second ones */
    const __m512i pairs = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    __m512i word[16], exponent[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    __m512 sum[MOST];
#pragma GCC unroll 16
    for (int64_t r = 0; r < 16; r++) {
        word[r] = whole ? _mm512_loadu_si512(row[half + r] + at) : codes_at(row[half + r], at, p->k);
        fetch(p, row[half + r], at);
    }
    transpose(word);
    if (scaled) {
        uint32_t lanes[2][16];
        for (int64_t r = 0; r < 16; r++)
            for (int64_t i = 0; i < 2; i++)
                lanes[i][r] = exponents[p->block_rows % PANEL ? half + r : 0][at / STEP % STEPS + i];
        for (int64_t i = 0; i < 2; i++) exponent[i] = _mm512_loadu_si512(lanes[i]);
    }
#pragma GCC unroll 16
    for (int64_t m = 0; m < rows; m++) sum[m] = _mm512_loadu_ps(sums[m] + half);
#pragma GCC unroll 16
    for (int64_t i = 0; i < 16; i++) {
        __m512i values[2];
        decode_scaled(_mm512_shuffle_epi8(word[i], pairs), d, scaled, exponent[i / 8], exponent[i / 8], values, values + 1);
#pragma GCC unroll 2
        for (int64_t j = 0; j < 2; j++, a += rows)
#pragma GCC unroll 16
            for (int64_t m = 0; m < rows; m++)
                sum[m] = _mm512_dpbf16_ps(sum[m], (__m512bh)values[j], (__m512bh)_mm512_set1_epi32((int32_t)a[m]));
    }
#pragma GCC unroll 16
    for (int64_t m = 0; m < rows; m++) _mm512_storeu_ps(sums[m] + half, sum[m]);
}

INLINE void sum_by_dot(const Product *p, const uint32_t *a, int64_t rows, Decoder *d, int64_t first, int32_t scaled,
                       float (*sums)[PANEL]) {
    const uint8_t *row[PANEL];
    uint32_t exponents[PANEL][STEPS];
    begin_rows(p, first, row);
    for (int64_t at = 0; at < p->k; at += CHUNK) {
        if (scaled && at % (STEP * STEPS) == 0) read_exponents(p, first, at, exponents);
        for (int64_t half = 0; half < PANEL; half += 16)
            for (int64_t column = at; column < least(p->k, at + CHUNK); column += 64) {
                const uint32_t *pairs = a + column / 2 * rows;
                if (column + 64 <= p->k)
                    add_turned(p, pairs, rows, row, half, column, d, exponents, scaled, 1, sums);
                else add_turned(p, pairs, rows, row, half, column, d, exponents, scaled, 0, sums);
            }
    }
}

/* One for each number of rows, which are registers; a is padded to it. */
#define BY_DOT(ROWS)                                                                                                 \
    static void by_dot_##ROWS(const Product *p, const uint32_t *a, Decoder *d, int64_t first, float (*sums)[PANEL]) { \
        if (p->exponents) sum_by_dot(p, a, ROWS, d, first, 1, sums);                                                 \
        else sum_by_dot(p, a, ROWS, d, first, 0, sums);                                                              \
    }

BY_DOT(1)
BY_DOT(2)
BY_DOT(4)
BY_DOT(8)
BY_DOT(16)

static void panel_by_dot(const Product *p, const uint32_t *a, Decoder *d, int64_t first) {
    float sums[MOST][PANEL] = {0};
    int64_t rows = padded_rows(p->m); /* branches, no conditional calls: GCC 12 has merged such calls wrongly */
    if (rows == 1) by_dot_1(p, a, d, first, sums);
    else if (rows == 2) by_dot_2(p, a, d, first, sums);
    else if (rows == 4) by_dot_4(p, a, d, first, sums);
    else if (rows == 8) by_dot_8(p, a, d, first, sums);
    else by_dot_16(p, a, d, first, sums);
    finish(p, sums, first);
}

/* -------------------------------------------------------------------------------------------------------------- AMX */

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)

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
    begin_rows(p, first, row);
    for (; at < p->k; at += CHUNK, chunk++) {
        __m512i(*to)[PANEL] = values[chunk % 2], (*before)[PANEL] = chunk ? values[1 - chunk % 2] : NULL;
        if (scaled && at % (STEP * STEPS) == 0) read_exponents(p, first, at, exponents);
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
    finish(p, sums, first);
}

static void release_tiles(void) { _tile_release(); }

#else

static int32_t may_use_tiles(void) { return 0; }
static void shape_tiles(int64_t m) { (void)m; }
static void release_tiles(void) {}
static void panel_by_tiles(const Product *p, const uint32_t *a, Decoder *d, int64_t first) {
    panel_by_dot(p, a, d, first);
}

#endif

/* ------------------------------------------------------------------------------------------------------------ the door */

/* The inner loops that this processor has: the sum of DOT and TILES. */
int32_t has_few_rows(void) { return DOT + (may_use_tiles() ? TILES : 0); }

/* loop: DOT or TILES, one that the processor has. Returns -1 without memory for a copy of a. */
int32_t few_rows(const Product *p, int32_t loop, int32_t threads) {
    uint32_t *a = pairs_of(p, loop == TILES ? p->m : padded_rows(p->m));
    if (a == NULL) return -1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        uint64_t before = use_ieee();
        Decoder decoder = {numbers_of(p->e5m2 ? E5M2 : E4M3), !p->e5m2 && p->finite, 0};
        if (loop == TILES) shape_tiles(p->m);
#pragma omp for schedule(static)
        for (int64_t first = 0; first < p->n; first += PANEL) {
            decoder.rare = 0;
            (loop == TILES ? panel_by_tiles : panel_by_dot)(p, a, &decoder, first);
            if (decoder.rare * 64 * 16 > PANEL * p->k) decoder.by_bits = 0;
        }
        if (loop == TILES) release_tiles();
        use_again(before);
    }
    free(a);
    return 0;
}

#else

int32_t has_few_rows(void) { return 0; }

int32_t few_rows(const Product *p, int32_t loop, int32_t threads) {
    (void)p, (void)loop, (void)threads;
    return -1;
}

#endif
