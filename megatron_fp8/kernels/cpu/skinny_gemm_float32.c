/* skinny_gemm.c for processors without bfloat16 instructions: one row to four go through b in one pass, with nothing packed.

   32 rows of codes are turned in registers, decoded and multiplied on the way; gemm_float32.c, which packs panels of numbers
   for rows that share them, spends four fifths of one row's time on packing. Each element is the same chain of fused
   multiply-adds over k as there, of the same numbers, so a row has the same bits alone as among many.

   Half of the turning is done for 64 k of 32 rows before the other half: rows whose length is a power of two share few places
   in the first cache, so each line of memory is used up at once. Rejected: sums along k in the lanes of a vector, which need
   no turning. No product with many rows sums like that. */

#include <math.h>
#include <stdlib.h>

#include "skinny_gemm_ends.h"
#include "gemm_float32.h"

#if HAS_FLOAT32

#define COLUMNS 32 /* rows of b at a time: two lines of codes */
#define LINE 64    /* k at a time: of a row, one line of memory */
#define AHEAD 512  /* k from what is read to what is fetched: 32 rows of it stay in the second cache, however long rows are */
#define PIECES (2 * PARTS)

/* What a thread has of its 32 columns. by: powers of two for STEPS steps of k. */
typedef struct {
    float sums[FEW][COLUMNS], by[STEPS][COLUMNS];
    uint8_t edge[COLUMNS][LINE];
} Own;

/* Powers of two of b's blocks, from k on, for the rows from `first` on; beyond the last row those of the last. */
static void read_exponents(const Product *p, int64_t first, int64_t k, float by[STEPS][COLUMNS]) {
    int64_t steps = steps_from(p, k);
    int64_t block[STEPS];
    for (int64_t s = 0; s < steps; s++) block[s] = (k + s * STEP) / p->block_cols;
    uint8_t bytes[COLUMNS][STEPS] = {{0}};
    for (int64_t r = 0; r < COLUMNS; r++) {
        const uint8_t *from = exponents_of(p, first + r);
        if (p->block_cols == STEP && steps == STEPS) memcpy(bytes[r], from + block[0], STEPS);
        else for (int64_t s = 0; s < steps; s++) bytes[r][s] = from[block[s]];
    }
    Lines x[TILE];
    for (int i = 0; i < TILE; i++) x[i] = lines_of(bytes[i], bytes[i + TILE]);
    turn(x, 1);
    for (int s = 0; s < STEPS; s++) {
        uint8_t of_step[COLUMNS];
        memcpy(of_step, &x[s], sizeof of_step);
        for (int c = 0; c < COLUMNS; c++) by[s][c] = float_of((uint32_t)of_step[c] << 23);
    }
}

/* sums of `rows` rows += a [rows][.., apart numbers] b of 64 k; b: COLUMNS rows, `step` codes apart; by: of its two steps. */
INLINE void multiply_line(const float *a, int64_t apart, const uint8_t *b, int64_t step, float by[2][COLUMNS],
                          float sums[FEW][COLUMNS], const int rows, const int32_t format, const int32_t finite,
                          const int32_t scaled) {
    Lines half[LINE / TILE][TILE];
#pragma GCC unroll 4
    for (int i = 0; i < TILE / 4; i++)
#pragma GCC unroll 4
        for (int part = 0; part < LINE / TILE; part++) {
            Lines x[TILE];
#pragma GCC unroll 4
            for (int j = 0; j < TILE; j += 4) {
                const uint8_t *from = b + (i + j) * step + part * TILE;
                x[j] = lines_of(from, from + TILE * step);
            }
            turn_four(x, half[part] + 4 * i, 1);
        }
    Piece sum[FEW][PIECES];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < PIECES; v++) sum[r][v] = load_part(sums[r] + v * COLUMNS / PIECES);
    for (int four = 0; four < LINE / 4; four++, a += 4) {
        const float *factors = by[four * 4 / STEP];
        Lines codes[4];
        turn_four(half[four / 4] + four % 4, codes, 1);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            Piece numbers[2][PARTS];
            numbers_of_lines(codes[k], format, finite, numbers);
#pragma GCC unroll 8
            for (int v = 0; v < PIECES; v++) {
                Piece number = numbers[v / PARTS][v % PARTS];
                if (scaled) number = times(number, factors + v * COLUMNS / PIECES);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) sum[r][v] = add_product(sum[r][v], a[r * apart + k], number);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < PIECES; v++) store_part(sums[r] + v * COLUMNS / PIECES, sum[r][v]);
}

typedef void Multiply(const float *a, int64_t apart, const uint8_t *b, int64_t step, float by[2][COLUMNS],
                      float sums[FEW][COLUMNS]);

#define OF_CODES(ROWS, NAME, FORMAT, FINITE, SCALED)                                                                  \
    static void multiply_##ROWS##_##NAME(const float *a, int64_t apart, const uint8_t *b, int64_t step,               \
                                         float by[2][COLUMNS], float sums[FEW][COLUMNS]) {                            \
        multiply_line(a, apart, b, step, by, sums, ROWS, FORMAT, FINITE, SCALED);                                     \
    }
#define OF_ROWS(ROWS)                                                                                                 \
    OF_CODES(ROWS, e5m2, E5M2, 1, 0) OF_CODES(ROWS, e5m2_scaled, E5M2, 1, 1) OF_CODES(ROWS, e4m3, E4M3, 0, 0)         \
    OF_CODES(ROWS, e4m3_scaled, E4M3, 0, 1) OF_CODES(ROWS, finite, E4M3, 1, 0) OF_CODES(ROWS, finite_scaled, E4M3, 1, 1)
OF_ROWS(1) OF_ROWS(2) OF_ROWS(3) OF_ROWS(4)

#define NAMES(ROWS)                                                                                                   \
    {{multiply_##ROWS##_e4m3, multiply_##ROWS##_e4m3_scaled},                                                         \
     {multiply_##ROWS##_finite, multiply_##ROWS##_finite_scaled},                                                     \
     {multiply_##ROWS##_e5m2, multiply_##ROWS##_e5m2_scaled}}
static Multiply *const MULTIPLY[FEW][3][2] = {NAMES(1), NAMES(2), NAMES(3), NAMES(4)};

/* The k of b that fill no line, a code at a time. */
static void multiply_rest(const Product *p, const float *a, int64_t apart, const uint8_t *b, int64_t step, int64_t depth,
                          float by[2][COLUMNS], float sums[FEW][COLUMNS]) {
    for (int64_t k = 0; k < depth; k++)
        for (int64_t c = 0; c < COLUMNS; c++) {
            uint8_t code = b[c * step + k];
            float number = (p->e5m2 ? decode_e5m2(code) : decode_e4m3(code) * 0x1p-8f) * (p->exponents ? by[k / STEP][c] : 1);
            for (int64_t r = 0; r < p->m; r++) sums[r][c] = fmaf(a[r * apart + k], number, sums[r][c]);
        }
}

/* 32 columns of out; a [m][apart]. */
static void multiply_columns(const Product *p, const float *a, int64_t apart, int64_t first, Own *own) {
    int64_t cols = least(COLUMNS, p->n - first);
    Multiply *multiply = MULTIPLY[p->m - 1][p->e5m2 ? 2 : p->finite ? 1 : 0][p->exponents != NULL];
    memset(own->sums, 0, sizeof own->sums);
    for (int64_t k = 0; k < p->k; k += LINE) {
        const uint8_t *from = p->b + first * p->k + k;
        int64_t next = k + AHEAD < p->k ? first * p->k : least(first + COLUMNS, p->n) * p->k - p->k;
        const uintptr_t ahead = (uintptr_t)p->b + (uintptr_t)(next + k + AHEAD);
        int64_t depth = least(LINE, p->k - k), step = p->k, at = k / STEP % STEPS;
        if (p->exponents && at == 0) read_exponents(p, first, k, own->by);
        for (int row = 0; row < COLUMNS; row++) __builtin_prefetch((const void *)(ahead + (uintptr_t)(row * p->k)), 0, 2);
        if (cols < COLUMNS) {
            for (int64_t r = 0; r < cols; r++) memcpy(own->edge[r], from + r * step, (size_t)depth);
            from = own->edge[0], step = LINE;
        }
        if (depth == LINE) multiply(a + k, apart, from, step, own->by + at, own->sums);
        else multiply_rest(p, a + k, apart, from, step, depth, own->by + at, own->sums);
    }
    finish(p, own->sums[0], COLUMNS, first, COLUMNS, p->e5m2 ? 1 : 0x1p8f);
}

int32_t few_rows_float32(const Product *p, int32_t threads) {
    float *a = malloc((size_t)(p->m * p->k) * sizeof(float));
    if (a == NULL) return -1;
    for (int64_t i = 0; i < p->m * p->k; i++) a[i] = load_bfloat16(p->a[i]);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        uint64_t before = use_ieee();
        Own own = {0};
#pragma omp for schedule(static)
        for (int64_t first = 0; first < p->n; first += COLUMNS) multiply_columns(p, a, p->k, first, &own);
        use_again(before);
    }
    free(a);
    return 0;
}

#else

int32_t few_rows_float32(const Product *p, int32_t threads) {
    (void)p, (void)threads;
    return -1;
}

#endif
