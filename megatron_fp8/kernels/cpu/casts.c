/* Casts of whole matrices, one or many in one call: amaxes, scales, and codes of one or two cuts.

   Scales of blocks are made a tile at a time (blocks.c). Those of whole rows or columns, and of the matrix, need amaxes
   of it all first, which is a pass of its own (emulation.c); then one pass makes the codes of all cuts. A scale that was there
   before its matrix needs no amaxes (emulation.c).

   Of many matrices a large one, which a thread alone would be busy with while the others have nothing left to do, is cast
   by all threads; the others are then dealt out whole, the largest first. Codes and scales are those of a call for each. */

#include <math.h>
#include <stdlib.h>

#include "blocks.h"
#include "deal.h"
#include "numbers.h"

typedef struct {
    const void *x;      /* [rows, cols], neither of them 0 */
    const float *given; /* its scale, that was there before it; NULL: scales are made of amaxes */
    float *amax;        /* to be made: the matrix's; 0 where those of its blocks were found before */
    float *running;     /* the matrix's is put there too, if it is larger; may be NULL */
    int64_t rows, cols;
    Cut cuts[2];        /* rows or cols 0: the whole extent; given: one cut */
    Rule rule;
    int32_t count;      /* of cuts */
    int32_t from, to;   /* x's dtype and the codes' format */
    int32_t finite;     /* where amaxes were found before: whether x has no NaN and no Inf */
    int64_t special;    /* to be told: how many elements are NaN or Inf; -1 without memory */
} Cast;

/* --------------------------------------------------------------------------------- emulation.c and blocks.c, by dtype */

enum { FLOAT32, BFLOAT16, FLOAT16 };

typedef struct { int64_t rows, cols; void *largest; } Largest; /* emulation.c's Cut */

#define AMAX(NAME, BITS)                                                                                             \
    int64_t NAME(const BITS *x, int64_t rows, int64_t cols, BITS inf, const Largest *cuts, int32_t count,            \
                 int64_t unit, int32_t threads)
#define CASTS(TYPES, FROM, BITS)                                                                                     \
    int64_t quantize_##TYPES(const FROM *x, uint8_t *to, int64_t n, BITS inf, const float *scale, float *inverse,    \
                             float *amax, float *running, int32_t threads);                                          \
    int64_t blocks_##TYPES(const FROM *x, int64_t rows, int64_t cols, BITS inf, const Cut *cuts, int32_t count,      \
                           const Rule *rule, int32_t all_finite, float *amax, int32_t threads)
AMAX(amax16, uint16_t);
AMAX(amax32, uint32_t);
CASTS(e4m3_float32, float, uint32_t);
CASTS(e4m3_bfloat16, uint16_t, uint16_t);
CASTS(e4m3_float16, uint16_t, uint16_t);
CASTS(e5m2_float32, float, uint32_t);
CASTS(e5m2_bfloat16, uint16_t, uint16_t);
CASTS(e5m2_float16, uint16_t, uint16_t);

#define BY_DTYPE(NAME, OF, ...)                                                                                      \
    ((OF)->from == FLOAT32 ? NAME##_float32(__VA_ARGS__)                                                             \
                           : (OF)->from == BFLOAT16 ? NAME##_bfloat16(__VA_ARGS__) : NAME##_float16(__VA_ARGS__))
#define BY_TYPES(NAME, OF, ...)                                                                                      \
    ((OF)->to ? BY_DTYPE(NAME##_e5m2, OF, __VA_ARGS__) : BY_DTYPE(NAME##_e4m3, OF, __VA_ARGS__))

INLINE uint32_t inf_of(const Cast *of) {
    return of->from == FLOAT32 ? 0x7F800000 : of->from == BFLOAT16 ? 0x7F80 : 0x7C00;
}

/* ------------------------------------------------------------------------------------------------------- one matrix */

/* Of rows of magnitudes [rows, n] the largest of each column, as a number. */
#define NUMBERS(NAME, BITS, LOAD)                                                                                    \
    static void NAME(void *magnitudes, int64_t rows, int64_t n, float *restrict amax) {                              \
        BITS *restrict found = magnitudes;                                                                           \
        for (int64_t row = 1; row < rows; row++)                                                                     \
            for (int64_t i = 0; i < n; i++) found[i] = found[row * n + i] > found[i] ? found[row * n + i] : found[i];\
        for (int64_t i = 0; i < n; i++) amax[i] = LOAD(found[i]);                                                    \
    }

NUMBERS(numbers_float32, uint32_t, float_of)
NUMBERS(numbers_bfloat16, uint16_t, load_bfloat16)
NUMBERS(numbers_float16, uint16_t, load_float16)

INLINE int64_t across_of(const Cast *of, const Cut *cut) {
    return cut->cols ? (of->cols + cut->cols - 1) / cut->cols : 1;
}

INLINE int64_t blocks_of(const Cast *of, const Cut *cut) {
    return (cut->rows ? (of->rows + cut->rows - 1) / cut->rows : 1) * across_of(of, cut);
}

/* What amax16 and amax32 find of a cut; of whole columns each thread has its own. */
INLINE int64_t magnitudes_of(const Cast *of, const Cut *cut, int32_t threads) {
    return cut->rows ? blocks_of(of, cut) : threads * across_of(of, cut);
}

/* amaxes: of each cut where they are to be; magnitudes: zeros. Returns how many elements are NaN or Inf. */
static int64_t find_amaxes(const Cast *of, uint32_t *magnitudes, float *const amaxes[2], int32_t threads) {
    Largest cuts[2];
    for (int32_t c = 0; c < of->count; c++) {
        cuts[c] = (Largest){of->cuts[c].rows, of->cuts[c].cols ? of->cuts[c].cols : of->cols, magnitudes};
        magnitudes += magnitudes_of(of, of->cuts + c, threads);
    }
    /* Blocks of rows are one row high: any row of them may be another thread's. */
    int64_t special = of->from == FLOAT32
                          ? amax32(of->x, of->rows, of->cols, inf_of(of), cuts, of->count, 1, threads)
                          : amax16(of->x, of->rows, of->cols, (uint16_t)inf_of(of), cuts, of->count, 1, threads);
    for (int32_t c = 0; c < of->count; c++) {
        int64_t n = blocks_of(of, of->cuts + c);
        BY_DTYPE(numbers, of, cuts[c].largest, of->cuts[c].rows ? 1 : threads, n, amaxes[c]);
    }
    return special;
}

/* Of scales that need amaxes of whole rows, columns or the matrix. */
static int64_t cast_whole(const Cast *of, int32_t threads) {
    int64_t blocks = 0, magnitudes = 0, special = 0;
    for (int32_t c = 0; c < of->count; c++) {
        blocks += blocks_of(of, of->cuts + c);
        magnitudes += magnitudes_of(of, of->cuts + c, threads);
    }
    float *found = malloc((size_t)(2 * blocks + magnitudes) * sizeof(float)), *made = found + blocks;
    if (found == NULL) return -1;
    float *amaxes[2] = {found, found + blocks_of(of, of->cuts)}, unused;
    int32_t finite = of->finite;
    if (of->cuts->amax == NULL) {
        memset(made + blocks, 0, (size_t)magnitudes * sizeof(float));
        special = find_amaxes(of, (uint32_t *)(made + blocks), amaxes, threads);
        finite = special == 0;
        for (int64_t i = 0; i < blocks_of(of, of->cuts); i++) *of->amax = fmaxf(*of->amax, amaxes[0][i]);
    }
    Cut cuts[2];
    for (int32_t c = 0; c < of->count; c++) {
        const Cut *cut = of->cuts + c;
        const float *from = cut->amax ? cut->amax : amaxes[c];
        int64_t n = blocks_of(of, cut);
        scales_of_amaxes(from, n, &of->rule, made, cut->scale_inv);
        /* An Inf of another rank makes a scale of 1, under which what is finite here may saturate. */
        for (int64_t i = 0; i < n; i++) finite &= from[i] != INFINITY;
        cuts[c] = (Cut){cut->rows ? cut->rows : of->rows, cut->cols ? cut->cols : of->cols, cut->codes, NULL, made, NULL};
        made += n;
    }
    if (special >= 0 && BY_TYPES(blocks, of, of->x, of->rows, of->cols, inf_of(of), cuts, of->count, &of->rule, finite,
                                 &unused, threads) < 0)
        special = -1;
    free(found);
    return special;
}

static void cast_matrix(Cast *of, int32_t threads) {
    uint64_t before = use_ieee();
    const Cut *cut = of->cuts;
    *of->amax = 0;
    if (of->given)
        of->special = BY_TYPES(quantize, of, of->x, cut->codes, of->rows * of->cols, inf_of(of), of->given,
                               cut->scale_inv, of->amax, of->running, threads);
    else if (cut->rows && cut->cols)
        of->special = BY_TYPES(blocks, of, of->x, of->rows, of->cols, inf_of(of), cut, of->count, &of->rule, 1,
                               of->amax, threads);
    else
        of->special = cast_whole(of, threads);
    if (of->special >= 0 && of->running && *of->amax > *of->running) *of->running = *of->amax;
    use_again(before);
}

/* ----------------------------------------------------------------------------------------------------- many of them */

INLINE int64_t work(const Cast *of) { return of->rows * of->cols * of->count; }

static int larger_first(const void *left, const void *right) {
    int64_t a = work(*(Cast *const *)left), b = work(*(Cast *const *)right);
    return (a < b) - (a > b);
}

/* Makes each; their `special` says how it went. Returns 0; -1 without memory. */
int32_t cast_each(Cast *casts, int64_t count, int32_t threads) {
    if (count == 1) {
        cast_matrix(casts, threads);
        return 0;
    }
    Cast **order = malloc((size_t)(count + 1) * (sizeof(Cast *) + sizeof(int64_t)));
    if (order == NULL) return -1;
    int64_t *works = (int64_t *)(order + count);
    for (int64_t i = 0; i < count; i++) order[i] = casts + i;
    qsort(order, (size_t)count, sizeof(Cast *), larger_first);
    for (int64_t i = 0; i < count; i++) works[i] = work(order[i]);
    int64_t large = by_all_threads(works, count, threads);
    for (int64_t i = 0; i < large; i++) cast_matrix(order[i], threads);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = large; i < count; i++) cast_matrix(order[i], 1);
    free(order);
    return 0;
}
