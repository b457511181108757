/* A linear with few tokens in one call: x is quantised as blocks.c does it, becomes bfloat16 as emulation.c does it, and is
   multiplied by codes (skinny_gemm.c). With one token the steps between are longer than the work, if each is a call of its
   own: a tensor for each result, and looks at each.

   Nothing is computed here that is not computed there: the bits are those of the steps. */

#include <math.h>
#include <stdlib.h>

#include "blocks.h"
#include "skinny_gemm.h"
#include "numbers.h"

typedef struct {
    Product product;      /* without a, scale_a and exponents; scale_b: of rows or of the whole, NULL where b has blocks */
    const void *x;        /* [m, k] */
    const float *given;   /* the scale of x that was there before; NULL: x's own are made */
    const void *blocks_b; /* float32 or E8M0 scales of b's blocks; NULL: b has none */
    double smallest_b, largest_b; /* of b's scales */
    double smallest, largest;     /* what scales and their products may be: emulated.py's _foldable */
    int64_t block;                /* columns of x that share a scale; 0: all */
    Rule rule;                    /* how x's scales are made */
    int32_t bfloat16, e5m2, each, e8m0_b; /* x's dtype; its codes' format; whether each row has a scale; blocks_b's dtype */
} Linear;

/* emulation.c and blocks.c. */
#define BLOCKS(NAME, FROM, BITS)                                                                                     \
    int64_t NAME(const FROM *x, int64_t rows, int64_t cols, BITS inf, const Cut *cuts, int32_t n_cuts,               \
                 const Rule *rule, int32_t all_finite, float *amax, int32_t threads)
BLOCKS(blocks_e4m3_float32, float, uint32_t);
BLOCKS(blocks_e4m3_bfloat16, uint16_t, uint16_t);
BLOCKS(blocks_e5m2_float32, float, uint32_t);
BLOCKS(blocks_e5m2_bfloat16, uint16_t, uint16_t);
#define DECODE(NAME)                                                                                                 \
    void NAME(const uint8_t *from, uint16_t *to, int64_t rows, int64_t cols, const float *scale, int64_t block_rows, \
              int64_t block_cols, int32_t threads)
DECODE(decode_e4m3_bfloat16);
DECODE(decode_e5m2_bfloat16);
void power_of_e8m0(const uint8_t *e8m0, uint32_t *power, int64_t n, int32_t inverse);

/* The largest magnitude that is no NaN, of n numbers; *finite becomes 0 where one is NaN or Inf. */
#define LARGEST(NAME, FROM, BITS, MAGNITUDE, OF, INF)                                                                \
    static float NAME(const FROM *x, int64_t n, int32_t *finite) {                                                   \
        BITS top = 0;                                                                                                \
        for (int64_t i = 0; i < n; i++) {                                                                            \
            BITS m = MAGNITUDE(x[i]);                                                                                \
            top = m > top ? m : top;                                                                                 \
        }                                                                                                            \
        if (top < INF) return OF(top);                                                                               \
        *finite = 0;                                                                                                 \
        top = 0;                                                                                                     \
        for (int64_t i = 0; i < n; i++) {                                                                            \
            BITS m = MAGNITUDE(x[i]);                                                                                \
            if (m <= INF && m > top) top = m;                                                                        \
        }                                                                                                            \
        return OF(top);                                                                                              \
    }

INLINE uint16_t magnitude_16(uint16_t x) { return x & 0x7FFF; }
INLINE uint32_t magnitude_32(float x) { return bits_of(x) & 0x7FFFFFFF; }

LARGEST(largest_16, uint16_t, uint16_t, magnitude_16, load_bfloat16, 0x7F80)
LARGEST(largest_32, float, uint32_t, magnitude_32, float_of, 0x7F800000)

/* Scales of whole rows, or of all of x, and their inverses; whether x is known to be finite. */
static int32_t whole_scales(const Linear *of, float *scale, float *inverse) {
    int64_t m = of->product.m, k = of->product.k, n = of->each ? m : 1;
    int32_t finite = 1;
    float amax[MOST];
    if (of->given) {
        *scale = *of->given;
        *inverse = 1 / *scale;
        return 0;
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t at = i * k, size = of->each ? k : m * k;
        amax[i] = of->bfloat16 ? largest_16((const uint16_t *)of->x + at, size, &finite)
                               : largest_32((const float *)of->x + at, size, &finite);
    }
    scales_of_amaxes(amax, n, &of->rule, scale, inverse);
    return finite;
}

/* Whether there was memory for it. */
static int quantise(const Linear *of, const Cut *cut, int32_t finite) {
    int64_t m = of->product.m, k = of->product.k;
    Rule rule = of->rule;
    float amax;
    if (of->given) rule.kind = FP32; /* whatever number it is */
    if (of->bfloat16)
        return (of->e5m2 ? blocks_e5m2_bfloat16 : blocks_e4m3_bfloat16)(of->x, m, k, 0x7F80, cut, 1, &rule, finite, &amax,
                                                                        1) >= 0;
    return (of->e5m2 ? blocks_e5m2_float32 : blocks_e4m3_float32)(of->x, m, k, 0x7F800000, cut, 1, &rule, finite, &amax,
                                                                  1) >= 0;
}

/* Smallest and largest of x's scales; a block of zeros under MX's smallest scale does not count for the smallest. */
static void range_of(const Linear *of, const float *inverse, const uint8_t *e8m0, const uint8_t *codes, int64_t n,
                     double *smallest, double *largest) {
    int64_t k = of->product.k, across = of->block ? (k + of->block - 1) / of->block : 1;
    *smallest = INFINITY, *largest = 0;
    for (int64_t i = 0; i < n; i++) {
        double low = inverse[i], high = inverse[i];
        if (e8m0 && e8m0[i] == 0) {
            int64_t from = i % across * of->block, to = least(k, from + of->block);
            uint8_t any = 0;
            for (int64_t c = from; c < to; c++) any |= codes[i / across * k + c] & 0x7F;
            if (!any) low = 1;
        }
        *smallest = low < *smallest ? low : *smallest;
        *largest = high > *largest ? high : *largest;
    }
}

static int32_t foldable(const Linear *of, double smallest, double largest) {
    double least_of = fmin(fmin(smallest, of->smallest_b), smallest * of->smallest_b);
    double most_of = fmax(fmax(largest, of->largest_b), largest * of->largest_b);
    return least_of >= of->smallest && most_of <= of->largest;
}

/* Returns 0; 1 where scales do not fold into bfloat16 numbers: nothing was computed; -1 without memory. */
int32_t few_tokens(const Linear *of, int32_t loop, int32_t threads) {
    const float one = 1;
    Product p = of->product;
    int64_t across = of->block ? (p.k + of->block - 1) / of->block : 1, size = p.m * p.k;
    int64_t n = of->block ? p.m * across : of->each ? p.m : 1;
    int64_t n_b = of->blocks_b ? (p.n + p.block_rows - 1) / p.block_rows * ((p.k + p.block_cols - 1) / p.block_cols) : 0;
    int32_t with_e8m0 = of->rule.kind == E8M0, failed = 1, quantised;
    float *scale = malloc((size_t)(n * 9 + size * 3 + n_b));
    if (scale == NULL) return -1;
    float *inverse = scale + n;
    uint16_t *values = (uint16_t *)(inverse + n);
    uint8_t *codes = (uint8_t *)(values + size), *e8m0 = codes + size, *exponents = e8m0 + n;
    uint64_t before = use_ieee();
    double smallest, largest;
    if (of->block) {
        Cut cut = {1, of->block, codes, with_e8m0 ? (void *)e8m0 : (void *)inverse, NULL};
        quantised = quantise(of, &cut, 1);
        if (with_e8m0) power_of_e8m0(e8m0, (uint32_t *)inverse, n, 0);
    } else {
        Cut cut = {of->each ? 1 : p.m, p.k, codes, NULL, scale};
        quantised = quantise(of, &cut, whole_scales(of, scale, inverse));
    }
    if (quantised) range_of(of, inverse, of->block && with_e8m0 ? e8m0 : NULL, codes, n, &smallest, &largest);
    else failed = -1;
    if (quantised && foldable(of, smallest, largest)) {
        (of->e5m2 ? decode_e5m2_bfloat16 : decode_e4m3_bfloat16)(codes, values, p.m, p.k, of->block ? inverse : NULL, 1,
                                                                 of->block ? of->block : p.k, 1);
        p.a = values;
        p.scale_a = of->block ? &one : inverse;
        p.each_a = !of->block && of->each;
        if (of->blocks_b && of->e8m0_b) p.exponents = of->blocks_b;
        else if (of->blocks_b) {
            for (int64_t i = 0; i < n_b; i++) exponents[i] = (uint8_t)(bits_of(((const float *)of->blocks_b)[i]) >> 23);
            p.exponents = exponents;
        }
        if (of->blocks_b) p.scale_b = &one;
        failed = few_rows(&p, loop, threads);
    }
    use_again(before);
    free(scale);
    return failed;
}
