/* Sums and extremes of a matrix, and of the codes that were made of it, for telemetry on CPUs.

   Elements come in three dtypes and two kinds of codes. Only the loops that read them know it: those write RUN floats
   at a time, and everything after that is of floats. (GCC 12 counts wrongly in one loop that reads 16 bit integers and
   sums comparisons of 32 bit ones.) Everything is summed in float64, in pieces whose borders depend on the matrix alone,
   added in order: no sum depends on the number of threads. Elements that are NaN or Inf are counted, and zeros for all
   else. They are rare: extremes are taken as if there were none, and again without them where the largest shows one. */

/* Sums of float64 are bound by the width of vectors; compilers of today choose half of it by themselves. */
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#include <math.h>
#include <stdlib.h>

#include "numbers.h"

#define RUN 1024                /* elements that are read at a time; they stay in the first cache */
#define INFINITE 0x7F800000     /* magnitudes, as integers, from here on are Inf and NaN */
#define BEYOND (1 + 0x1p-21)    /* what a scale's rounding can put beyond the largest code */
#define NONE 0xFFFFFFFF         /* above every magnitude */

/* a * b + c, with one rounding where that is one instruction. */
#if defined(FP_FAST_FMA)
INLINE double plus(double a, double b, double c) { return fma(a, b, c); }
#else
INLINE double plus(double a, double b, double c) { return a * b + c; }
#endif
INLINE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
INLINE uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* --------------------------------------------------------------------------------------------------------- reading */

typedef void Read(const void *x, int64_t at, int64_t n, float *to);

#define READ(DTYPE, FROM)                                                                                            \
    static void read_##DTYPE(const void *x, int64_t at, int64_t n, float *restrict to) {                             \
        const FROM *restrict from = (const FROM *)x + at;                                                            \
        for (int64_t i = 0; i < n; i++) to[i] = load_##DTYPE(from[i]);                                               \
    }

#define READ_CODES(FMT)                                                                                              \
    static void read_##FMT(const void *codes, int64_t at, int64_t n, float *restrict to) {                           \
        const uint8_t *restrict from = (const uint8_t *)codes + at;                                                  \
        for (int64_t i = 0; i < n; i++) to[i] = decode_##FMT(from[i]);                                               \
    }

READ(float32, float)
READ(bfloat16, uint16_t)
READ(float16, uint16_t)
READ_CODES(e4m3)
READ_CODES(e5m2)

/* ---------------------------------------------------------------------------------------------------------- values */

/* Of the finite elements: how many, sums of x, |x|, x^2, x^3, x^4; then the largest and the smallest as integers that
   sort like them, and the smallest magnitude that is not zero, less one: that makes NONE of zero. */
typedef struct {
    double finite, sum, magnitudes, squares, cubes, fourths;
    int32_t largest, smallest;
    uint32_t least;
} Values;

/* Integers that sort like the floats whose bits they are made of, and back. */
INLINE int32_t key_of(uint32_t u) { return (int32_t)(u ^ ((uint32_t)((int32_t)u >> 31) & 0x7FFFFFFF)); }
INLINE double of_key(int32_t key) { return float_of((uint32_t)key ^ ((uint32_t)(key >> 31) & 0x7FFFFFFF)); }

INLINE void widen(Values *v, int32_t largest, int32_t smallest, uint32_t magnitude) {
    v->largest = largest > v->largest ? largest : v->largest;
    v->smallest = smallest < v->smallest ? smallest : v->smallest;
    v->least = smaller(magnitude, v->least);
}

/* Counts and extremes of n floats; those that are NaN or Inf become zeros. */
static void clean(float *restrict x, int64_t n, Values *v) {
    int32_t largest = INT32_MIN, smallest = INT32_MAX, finite = 0;
    uint32_t magnitude = NONE;
#pragma omp simd reduction(+ : finite) reduction(max : largest) reduction(min : smallest, magnitude)
    for (int64_t i = 0; i < n; i++) {
        uint32_t u = bits_of(x[i]), m = u & 0x7FFFFFFF;
        int32_t ok = m < INFINITE, high = ok ? key_of(u) : INT32_MIN, low = ok ? key_of(u) : INT32_MAX;
        uint32_t some = (ok ? m : 0) - 1;
        finite += ok;
        largest = high > largest ? high : largest;
        smallest = low < smallest ? low : smallest;
        magnitude = some < magnitude ? some : magnitude;
        x[i] = float_of(ok ? u : 0);
    }
    v->finite += finite;
    widen(v, largest, smallest, magnitude);
}

/* Counts and extremes of n floats, if all of them are finite; 0 if they are not, and nothing was counted. */
static int32_t extremes(const float *restrict x, int64_t n, Values *v) {
    int32_t largest = INT32_MIN, smallest = INT32_MAX;
    uint32_t magnitude = NONE;
#pragma omp simd reduction(max : largest) reduction(min : smallest, magnitude)
    for (int64_t i = 0; i < n; i++) {
        uint32_t u = bits_of(x[i]), some = (u & 0x7FFFFFFF) - 1;
        int32_t key = key_of(u);
        largest = key > largest ? key : largest;
        smallest = key < smallest ? key : smallest;
        magnitude = some < magnitude ? some : magnitude;
    }
    if (largest >= INFINITE || smallest <= ~INFINITE) return 0;
    v->finite += (double)n;
    widen(v, largest, smallest, magnitude);
    return 1;
}

static void add_powers(const float *restrict x, int64_t n, Values *v) {
    double s = 0, a = 0, q = 0, c = 0, f = 0;
#pragma omp simd reduction(+ : s, a, q, c, f)
    for (int64_t i = 0; i < n; i++) {
        double d = x[i], square = d * d;
        s += d;
        a += fabs(d);
        q += square;
        c = plus(square, d, c);
        f = plus(square, square, f);
    }
    v->sum += s, v->magnitudes += a, v->squares += q, v->cubes += c, v->fourths += f;
}

static void add_values(Values *all, const Values *v) {
    all->finite += v->finite, all->sum += v->sum, all->magnitudes += v->magnitudes;
    all->squares += v->squares, all->cubes += v->cubes, all->fourths += v->fourths;
    widen(all, v->largest, v->smallest, v->least);
}

/* out: the six sums, then the maxima of x, of -x, and of -|x| where x is not zero; -Inf is that of nothing. */
static void tell_values(const Values *v, double *out) {
    const double told[9] = {
        v->finite, v->sum, v->magnitudes, v->squares, v->cubes, v->fourths,
        v->finite > 0 ? of_key(v->largest) : -INFINITY,
        v->finite > 0 ? -of_key(v->smallest) : -INFINITY,
        v->least < NONE ? -(double)float_of(v->least + 1) : -INFINITY,
    };
    memcpy(out, told, sizeof told);
}

/* ----------------------------------------------------------------------------------------------------------- codes */

/* One side of codes [rows, cols]: of E4M3 or E5M2, with a scale for each block of height x width, row-major. */
typedef struct {
    const void *made;
    const float *scale;
    int64_t height, width, scales;
    int32_t e5m2;
    double largest;
} Side;

/* The sum of squared errors, how many values vanished, how many lie beyond the largest code. */
typedef struct {
    double error, underflows, overflows;
} Codes;

/* The largest magnitude, as an integer, that is not beyond `top` in the codes of this scale. */
INLINE uint32_t limit_of(float scale, double top) {
    double limit = scale * top;
    float below = (float)limit;
    return bits_of(below) - (below > limit);
}

/* Adds up n values and what their codes stand for before the scale.
   step: 0 where one scale and limit serve all n, 1 where each has its own. */
INLINE void add_errors(const float *restrict x, const float *restrict meant, int64_t n, const float *restrict scale,
                       const uint32_t *restrict limit, int64_t step, Codes *found) {
    double error = 0;
    int32_t underflows = 0, overflows = 0;
#pragma omp simd reduction(+ : error, underflows, overflows)
    for (int64_t i = 0; i < n; i++) {
        uint32_t m = bits_of(x[i]) & 0x7FFFFFFF, code = bits_of(meant[i]) & 0x7FFFFFFF;
        double lost = plus(-(double)meant[i], (double)scale[i * step], x[i]);
        underflows += (m > 0) & (code == 0);
        overflows += m > limit[i * step];
        error = plus(lost, lost, error);
    }
    found->error += error, found->underflows += underflows, found->overflows += overflows;
}

/* Zeros for codes whose value is NaN or Inf. */
static void drop(const float *restrict x, float *restrict meant, int64_t n) {
    for (int64_t i = 0; i < n; i++) meant[i] = (bits_of(x[i]) & 0x7FFFFFFF) < INFINITE ? meant[i] : 0;
}

/* Scales and limits of n elements from column `col` on, with one scale for each `width` columns. */
static void spread(const float *restrict from, int64_t col, int64_t n, int64_t width, double top, float *restrict scale,
                   uint32_t *restrict limit) {
    if (width == 1) {
        for (int64_t i = 0; i < n; i++) scale[i] = from[col + i], limit[i] = limit_of(from[col + i], top);
        return;
    }
    for (int64_t i = 0; i < n;) {
        int64_t block = (col + i) / width, end = least(n, (block + 1) * width - col);
        float one = from[block];
        uint32_t most = limit_of(one, top);
        for (; i < end; i++) scale[i] = one, limit[i] = most;
    }
}

/* Adds up n elements of a row from column `col` on; of several rows where one scale serves all. `raw`: the values as
   they are, if some are NaN or Inf; x has zeros for those. */
static void compare(const Side *side, int64_t at, const float *raw, const float *x, int64_t n, int64_t cols,
                    Codes *found) {
    float meant[RUN], scale[RUN];
    uint32_t limit[RUN];
    int64_t width = side->width, row = at / cols, col = at % cols;
    const float *from = side->scale + row / side->height * ((cols + width - 1) / width);
    double top = side->largest * BEYOND;
    (side->e5m2 ? read_e5m2 : read_e4m3)(side->made, at, n, meant);
    if (raw) drop(raw, meant, n);
    if (width >= cols) {
        *limit = limit_of(*from, top);
        add_errors(x, meant, n, from, limit, 0, found);
    } else {
        spread(from, col, n, width, top, scale, limit);
        add_errors(x, meant, n, scale, limit, 1, found);
    }
}

/* out: the sums of one side's pieces, the largest scale, and the negative of the smallest; NaN if one is. */
static void tell_codes(const Side *side, const Codes *found, int64_t step, int64_t pieces, double *out) {
    Codes all = {0, 0, 0};
    for (int64_t piece = 0; piece < pieces; piece++, found += step)
        all.error += found->error, all.underflows += found->underflows, all.overflows += found->overflows;
    float largest = -INFINITY, smallest = INFINITY;
    for (int64_t i = 0; i < side->scales; i++) {
        float s = side->scale[i];
        largest = s > largest || s != s ? s : largest;
        smallest = s < smallest || s != s ? s : smallest;
    }
    const double told[5] = {all.error, all.underflows, all.overflows, largest, -smallest};
    memcpy(out, told, sizeof told);
}

/* ------------------------------------------------------------------------------------------------ both in one pass */

/* Fetches what comes next while this run is computed: a quarter of the time where a matrix is not in the caches. */
INLINE void ahead(const char *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

/* Of x [rows, cols] and of what was made of it.
   size: of an element; by_rows: some side has several scales; values: for each piece; codes: for each piece and side;
   out: 9 numbers of tell_values, 5 of tell_codes for each side. */
static void measure(const void *x, int64_t rows, int64_t cols, Read *read, int64_t size, const Side *sides,
                    int64_t n_sides, int32_t by_rows, int64_t piece_length, Values *values, Codes *codes, double *out,
                    int32_t threads) {
    int64_t total = rows * cols, line = by_rows ? cols : total, pieces = (total + piece_length - 1) / piece_length;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t piece = 0; piece < pieces; piece++) {
        uint64_t before = use_ieee();
        Values v = {.largest = INT32_MIN, .smallest = INT32_MAX, .least = NONE};
        Codes *of_piece = codes + piece * n_sides;
        memset(of_piece, 0, (size_t)n_sides * sizeof(Codes));
        float run[RUN], raw[RUN];
        int64_t end = least(total, (piece + 1) * piece_length), n;
        for (int64_t at = piece * piece_length; at < end; at += n) {
            n = least(least(RUN, end - at), line - at % line);
            read(x, at, n, run);
            int64_t next = least(RUN, total - at - n);
            ahead((const char *)x + (at + n) * size, next * size);
            for (int64_t side = 0; side < n_sides; side++) ahead((const char *)sides[side].made + at + n, next);
            int32_t finite = extremes(run, n, &v);
            if (!finite) {
                memcpy(raw, run, (size_t)n * sizeof(float));
                clean(run, n, &v);
            }
            add_powers(run, n, &v);
            for (int64_t side = 0; side < n_sides; side++)
                compare(sides + side, at, finite ? NULL : raw, run, n, cols, of_piece + side);
        }
        values[piece] = v;
        use_again(before);
    }
    uint64_t before = use_ieee(); /* converting a subnormal float is arithmetic too */
    Values all = {.largest = INT32_MIN, .smallest = INT32_MAX, .least = NONE};
    for (int64_t piece = 0; piece < pieces; piece++) add_values(&all, values + piece);
    tell_values(&all, out);
    for (int64_t side = 0; side < n_sides; side++)
        tell_codes(sides + side, codes + side, n_sides, pieces, out + 9 + 5 * side);
    use_again(before);
}

/* ------------------------------------------------------------------------------------------------ blockwise ranges */

/* The largest and the smallest magnitude but zero of every column, over n elements of one row more. */
static void stretch(const float *restrict x, int64_t n, uint32_t *restrict high, uint32_t *restrict low) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t m = bits_of(x[i]) & 0x7FFFFFFF, some = m < INFINITE ? m : 0;
        high[i] = larger(some, high[i]);
        low[i] = smaller(some ? some : NONE, low[i]);
    }
}

INLINE double ratio(const uint32_t *restrict high, const uint32_t *restrict low, int64_t n) {
    uint32_t most = 0, few = NONE;
#pragma omp simd reduction(max : most) reduction(min : few)
    for (int64_t i = 0; i < n; i++) {
        most = high[i] > most ? high[i] : most;
        few = low[i] < few ? low[i] : few;
    }
    return most ? (double)float_of(most) / (double)float_of(few) : 1;
}

/* *out: the largest ratio of the greatest to the least magnitude but zero of a block; 1 where it is all zeros.
   found: a number for each row of blocks. Returns -1 without memory, else 0. */
static int32_t ranges(const void *x, int64_t rows, int64_t cols, int64_t height, int64_t width, Read *read,
                      double *found, double *out, int32_t threads) {
    int64_t bands = (rows + height - 1) / height;
    int32_t failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(+ : failed)
    {
        uint64_t before = use_ieee();
        uint32_t *high = malloc((size_t)cols * 8), *low = high + cols;
        failed += high == NULL;
#pragma omp for
        for (int64_t band = 0; band < bands; band++) {
            if (!high) continue;
            memset(high, 0, (size_t)cols * 4);
            memset(low, 0xFF, (size_t)cols * 4);
            for (int64_t row = band * height; row < least(rows, (band + 1) * height); row++)
                for (int64_t at = 0; at < cols; at += RUN) {
                    float run[RUN];
                    read(x, row * cols + at, least(RUN, cols - at), run);
                    stretch(run, least(RUN, cols - at), high + at, low + at);
                }
            double most = 1;
            for (int64_t at = 0; at < cols; at += width) {
                int64_t n = least(width, cols - at);
                double one = n == 32 ? ratio(high + at, low + at, 32) : ratio(high + at, low + at, n);
                most = one > most ? one : most;
            }
            found[band] = most;
        }
        free(high);
        use_again(before);
    }
    for (int64_t band = 0; !failed && band < bands; band++) *out = found[band] > *out ? found[band] : *out;
    return failed ? -1 : 0;
}

/* ---------------------------------------------------------------------------------------------- what Python calls */

#define FIGURES(DTYPE, SIZE)                                                                                         \
    void measure_##DTYPE(const void *x, int64_t rows, int64_t cols, const Side *sides, int64_t n_sides,              \
                         int32_t by_rows, int64_t piece, Values *values, Codes *codes, double *out,                  \
                         int32_t threads) {                                                                          \
        measure(x, rows, cols, read_##DTYPE, SIZE, sides, n_sides, by_rows, piece, values, codes, out, threads);     \
    }                                                                                                                \
    int32_t ranges_##DTYPE(const void *x, int64_t rows, int64_t cols, int64_t height, int64_t width, double *found,  \
                           double *out, int32_t threads) {                                                           \
        return ranges(x, rows, cols, height, width, read_##DTYPE, found, out, threads);                              \
    }

FIGURES(float32, 4)
FIGURES(bfloat16, 2)
FIGURES(float16, 2)
