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

#define PANEL 32  /* rows of b that are multiplied together */
#define STEPS 16  /* steps of 32 columns whose exponents are read at a time */

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

/* Exponents of 512 columns of a panel of b, as they lie in two bfloat16 numbers: [row][step of 32 columns]; one row where
   the panel's rows share blocks. */
static void read_exponents(const Product *p, int64_t first, int64_t at, uint32_t (*to)[STEPS]) {
    int64_t across = (p->k + p->block_cols - 1) / p->block_cols, steps = least(STEPS, (p->k - at + 31) / 32);
    for (int64_t r = 0; r < (p->block_rows % PANEL ? PANEL : 1); r++) {
        const uint8_t *from = p->exponents + least(first + r, p->n - 1) / p->block_rows * across;
        uint8_t biased[STEPS] = {0};
        if (p->block_cols == 32) memcpy(biased, from + at / 32, (size_t)steps);
        else for (int64_t i = 0; i < steps; i++) biased[i] = from[(at + 32 * i) / p->block_cols];
        for (int64_t i = 0; i < STEPS; i++) to[r][i] = ((uint32_t)(biased[i] - 127) << 7 & 0xFFFF) * 0x10001;
    }
}

INLINE __m512i codes_at(const uint8_t *row, int64_t at, int64_t k) {
    if (at + 64 <= k) return _mm512_loadu_si512(row + at);
    return _mm512_maskz_loadu_epi8(first_of(k - at), row + at);
}

/* Fetches what the next panel reads where this one is now. */
INLINE void fetch(const Product *p, int64_t first, int64_t at, int64_t r) {
    _mm_prefetch((const char *)p->b + (first + PANEL + r) * p->k + at, _MM_HINT_T1);
}

/* Where each row of a panel of b begins; rows beyond the last are the last one again, and their sums nobody's. */
INLINE void begin_rows(const Product *p, int64_t first, const uint8_t **row) {
    for (int64_t r = 0; r < PANEL; r++) row[r] = p->b + least(first + r, p->n - 1) * p->k;
}

/* a, two values of k side by side: [pairs, a multiple of 32][m], zeros beyond k. */
static uint32_t *pairs_of(const Product *p) {
    int64_t pairs = (p->k + 63) / 64 * 32;
    uint32_t *packed = calloc((size_t)(pairs * p->m), sizeof(uint32_t));
    if (packed == NULL) return NULL;
    for (int64_t m = 0; m < p->m; m++) {
        const uint16_t *from = p->a + m * p->k;
        for (int64_t i = 0; i < p->k / 2; i++) packed[i * p->m + m] = from[2 * i] | (uint32_t)from[2 * i + 1] << 16;
        if (p->k % 2) packed[p->k / 2 * p->m + m] = from[p->k - 1];
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

/* 64 columns of a panel of b: values [pair][left and right half of the panel], from column `at` on. */
INLINE void turned_values(const Product *p, const uint8_t **row, int64_t first, int64_t at, Decoder *d,
                          uint32_t (*exponents)[STEPS], __m512i values[32][2]) {
    /* words of one row hold four values of k: the first pairs of all words, then the second ones */
    const __m512i pairs = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    for (int half = 0; half < 2; half++) {
        __m512i word[16], exponent[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        for (int r = 0; r < 16; r++) {
            word[r] = codes_at(row[half * 16 + r], at, p->k);
            fetch(p, first, at, half * 16 + r);
        }
        transpose(word);
        if (p->exponents) {
            uint32_t lanes[2][16];
            for (int r = 0; r < 16; r++)
                for (int i = 0; i < 2; i++)
                    lanes[i][r] = exponents[p->block_rows % PANEL ? half * 16 + r : 0][at / 32 % STEPS + i];
            for (int i = 0; i < 2; i++) exponent[i] = _mm512_loadu_si512(lanes[i]);
        }
        for (int i = 0; i < 16; i++)
            decode_scaled(_mm512_shuffle_epi8(word[i], pairs), d, p->exponents != NULL, exponent[i / 8], exponent[i / 8],
                          &values[2 * i][half], &values[2 * i + 1][half]);
    }
}

/* sums [rows][PANEL] += a times values over 32 pairs of k. */
#define ADD_PAIRS(ROWS)                                                                                              \
    static void add_pairs_##ROWS(const uint32_t *a, int64_t step, __m512i values[32][2], float (*sums)[PANEL]) {     \
        __m512 sum[ROWS][2];                                                                                         \
        for (int r = 0; r < ROWS; r++)                                                                               \
            for (int half = 0; half < 2; half++) sum[r][half] = _mm512_loadu_ps(sums[r] + 16 * half);                \
        for (int i = 0; i < 32; i++, a += step) {                                                                    \
            __m512bh left = (__m512bh)values[i][0], right = (__m512bh)values[i][1];                                  \
            for (int r = 0; r < ROWS; r++) {                                                                         \
                __m512bh value = (__m512bh)_mm512_set1_epi32((int32_t)a[r]);                                         \
                sum[r][0] = _mm512_dpbf16_ps(sum[r][0], value, left);                                                \
                sum[r][1] = _mm512_dpbf16_ps(sum[r][1], value, right);                                               \
            }                                                                                                        \
        }                                                                                                            \
        for (int r = 0; r < ROWS; r++)                                                                               \
            for (int half = 0; half < 2; half++) _mm512_storeu_ps(sums[r] + 16 * half, sum[r][half]);                \
    }

ADD_PAIRS(1)
ADD_PAIRS(2)
ADD_PAIRS(4)
ADD_PAIRS(8)

/* Branches, no conditional calls: of those GCC 12 makes one of add_pairs_2 where one row is left. */
static void add_pairs(const uint32_t *a, int64_t m, __m512i values[32][2], float (*sums)[PANEL]) {
    int64_t r = 0;
    for (; m - r >= 8; r += 8) add_pairs_8(a + r, m, values, sums + r);
    if (m - r >= 4) add_pairs_4(a + r, m, values, sums + r), r += 4;
    if (m - r >= 2) add_pairs_2(a + r, m, values, sums + r), r += 2;
    if (m - r >= 1) add_pairs_1(a + r, m, values, sums + r);
}

static void panel_by_dot(const Product *p, const uint32_t *a, Decoder *d, int64_t first) {
    const uint8_t *row[PANEL];
    __m512i values[32][2];
    float sums[MOST][PANEL] = {0};
    uint32_t exponents[PANEL][STEPS];
    begin_rows(p, first, row);
    for (int64_t at = 0; at < p->k; at += 64) {
        if (p->exponents && at % (32 * STEPS) == 0) read_exponents(p, first, at, exponents);
        turned_values(p, row, first, at, d, exponents, values);
        add_pairs(a + at / 2 * p->m, p->m, values, sums);
    }
    finish(p, sums, first);
}

/* -------------------------------------------------------------------------------------------------------------- AMX */

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)

/* Linux gives a process the tiles' registers once it asks for them. */
static int32_t may_use_tiles(void) { return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0; }

/* Tiles 0, 1: sums [16 rows of b][m]; 2, 3: a [16 pairs][m]; 4 to 7: b [16 rows][32 values]. */
static void shape_tiles(int64_t m) {
    struct {
        uint8_t palette, start, zeros[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.rows[i] = 16, shapes.bytes[i] = (uint16_t)(i < 4 ? 4 * m : 64);
    _tile_loadconfig(&shapes);
}

static void panel_by_tiles(const Product *p, const uint32_t *a, Decoder *d, int64_t first) {
    const __m512i in_order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const uint8_t *row[PANEL];
    __m512i values[2][2][PANEL]; /* by turns, so that one step's tiles are read while the next one's are decoded */
    float found[PANEL][MOST], sums[MOST][PANEL];
    uint32_t exponents[PANEL][STEPS];
    int64_t step = p->m * (int64_t)sizeof(uint32_t), each = p->block_rows % PANEL ? 1 : 0;
    begin_rows(p, first, row);
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t at = 0; at < p->k; at += 64) {
        __m512i *low = values[at / 64 % 2][0], *high = values[at / 64 % 2][1];
        if (p->exponents && at % (32 * STEPS) == 0) read_exponents(p, first, at, exponents);
        for (int r = 0; r < PANEL; r++) {
            __m512i codes = _mm512_permutexvar_epi64(in_order, codes_at(row[r], at, p->k)), one = codes, two = codes;
            fetch(p, first, at, r);
            if (p->exponents) {
                const uint32_t *exponent = exponents[r * each] + at / 32 % STEPS;
                one = _mm512_set1_epi32((int32_t)exponent[0]), two = _mm512_set1_epi32((int32_t)exponent[1]);
            }
            decode_scaled(codes, d, p->exponents != NULL, one, two, low + r, high + r);
        }
        const uint32_t *pairs = a + at / 2 * p->m;
        _tile_loadd(2, pairs, step);
        _tile_loadd(4, low, 64);
        _tile_dpbf16ps(0, 4, 2);
        _tile_loadd(5, low + 16, 64);
        _tile_dpbf16ps(1, 5, 2);
        _tile_loadd(3, pairs + 16 * p->m, step);
        _tile_loadd(6, high, 64);
        _tile_dpbf16ps(0, 6, 3);
        _tile_loadd(7, high + 16, 64);
        _tile_dpbf16ps(1, 7, 3);
    }
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
    uint32_t *a = pairs_of(p);
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
