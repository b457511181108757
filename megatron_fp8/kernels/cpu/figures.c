/* Sums and extremes of a matrix, and of the codes that were made of it, for telemetry on CPUs.

   Elements come in three dtypes and two kinds of codes. Only the loops that read them know it: those write RUN floats at
   a time, and everything after that is of floats. (GCC 12 counts wrongly in one loop that reads 16 bit integers and sums
   comparisons of 32 bit ones.) Everything is summed in float64, in pieces whose borders depend on the matrix alone, added
   in order: no sum depends on the number of threads. Elements that are NaN or Inf are counted, and zeros for all else. */

#include <math.h>
#include <stdlib.h>

#include "numbers.h"

#define RUN 1024                /* elements that are read at a time; they stay in the first cache */
#define INFINITE 0x7F800000     /* magnitudes, as integers, from here on are Inf and NaN */
#define BEYOND (1 + 0x1p-21)    /* what a scale's rounding can put beyond the largest code */
#define NONE 0xFFFFFFFF         /* above every magnitude */

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
   sort like them, and the smallest magnitude that is not zero. */
typedef struct {
    double finite, sum, magnitudes, squares, cubes, fourths;
    int32_t largest, smallest;
    uint32_t least;
} Values;

/* Integers that sort like the floats whose bits they are made of, and back. */
INLINE int32_t key_of(uint32_t u) { return (int32_t)(u ^ ((uint32_t)((int32_t)u >> 31) & 0x7FFFFFFF)); }
INLINE double of_key(int32_t key) { return float_of((uint32_t)key ^ ((uint32_t)(key >> 31) & 0x7FFFFFFF)); }

/* Counts and extremes of n floats; those that are NaN or Inf become zeros. */
static void clean(float *restrict x, int64_t n, Values *v) {
    int32_t largest = INT32_MIN, smallest = INT32_MAX, finite = 0;
    uint32_t magnitude = NONE;
#pragma omp simd reduction(+ : finite) reduction(max : largest) reduction(min : smallest, magnitude)
    for (int64_t i = 0; i < n; i++) {
        uint32_t u = bits_of(x[i]), m = u & 0x7FFFFFFF;
        int32_t ok = m < INFINITE, high = ok ? key_of(u) : INT32_MIN, low = ok ? key_of(u) : INT32_MAX;
        uint32_t some = ok & (m > 0) ? m : NONE;
        finite += ok;
        largest = high > largest ? high : largest;
        smallest = low < smallest ? low : smallest;
        magnitude = some < magnitude ? some : magnitude;
        x[i] = float_of(ok ? u : 0);
    }
    v->finite += finite;
    v->largest = largest > v->largest ? largest : v->largest;
    v->smallest = smallest < v->smallest ? smallest : v->smallest;
    v->least = smaller(magnitude, v->least);
}

static void add_powers(const float *restrict x, int64_t n, Values *v) {
    double s = 0, a = 0, q = 0, c = 0, f = 0;
#pragma omp simd reduction(+ : s, a, q, c, f)
    for (int64_t i = 0; i < n; i++) {
        double d = x[i], square = d * d;
        s += d;
        a += fabs(d);
        q += square;
        c += square * d;
        f += square * square;
    }
    v->sum += s, v->magnitudes += a, v->squares += q, v->cubes += c, v->fourths += f;
}

/* out: the six sums, then the maxima of x, of -x, and of -|x| where x is not zero; -Inf is that of nothing. */
static void values(const void *x, int64_t n, Read *read, Values *found, double *out, int32_t threads) {
    int64_t pieces = (n + PIECE - 1) / PIECE;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t piece = 0; piece < pieces; piece++) {
        uint64_t before = use_ieee();
        Values v = {.largest = INT32_MIN, .smallest = INT32_MAX, .least = NONE};
        float run[RUN];
        int64_t end = least(n, (piece + 1) * PIECE);
        for (int64_t at = piece * PIECE; at < end; at += RUN) {
            int64_t many = least(RUN, end - at);
            read(x, at, many, run);
            clean(run, many, &v);
            add_powers(run, many, &v);
        }
        found[piece] = v;
        use_again(before);
    }
    Values all = {.largest = INT32_MIN, .smallest = INT32_MAX, .least = NONE};
    for (const Values *v = found; v < found + pieces; v++) {
        all.finite += v->finite, all.sum += v->sum, all.magnitudes += v->magnitudes;
        all.squares += v->squares, all.cubes += v->cubes, all.fourths += v->fourths;
        all.largest = v->largest > all.largest ? v->largest : all.largest;
        all.smallest = v->smallest < all.smallest ? v->smallest : all.smallest;
        all.least = smaller(v->least, all.least);
    }
    uint64_t before = use_ieee(); /* converting a subnormal float is arithmetic too */
    const double told[9] = {
        all.finite, all.sum, all.magnitudes, all.squares, all.cubes, all.fourths,
        all.finite > 0 ? of_key(all.largest) : -INFINITY,
        all.finite > 0 ? -of_key(all.smallest) : -INFINITY,
        all.least < NONE ? -(double)float_of(all.least) : -INFINITY,
    };
    memcpy(out, told, sizeof told);
    use_again(before);
}

/* ------------------------------------------------------------------------------------------------ blockwise ranges */

/* The largest and the smallest magnitude but zero of every column, over n elements of one row more. */
static void widen(const float *restrict x, int64_t n, uint32_t *restrict high, uint32_t *restrict low) {
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
                    widen(run, least(RUN, cols - at), high + at, low + at);
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

/* ----------------------------------------------------------------------------------------------------------- codes */

/* The sum of squared errors, how many values vanished, how many lie beyond the largest code. */
typedef struct {
    double error, underflows, overflows;
} Codes;

/* Values and what their codes stand for before the scale, of finite values; returns how many vanished. */
static int32_t vanished(float *restrict x, float *restrict meant, int64_t n) {
    int32_t found = 0;
#pragma omp simd reduction(+ : found)
    for (int64_t i = 0; i < n; i++) {
        uint32_t u = bits_of(x[i]), m = u & 0x7FFFFFFF, code = bits_of(meant[i]);
        int32_t ok = m < INFINITE;
        found += ok & (m > 0) & ((code & 0x7FFFFFFF) == 0);
        x[i] = float_of(ok ? u : 0);
        meant[i] = float_of(ok ? code : 0);
    }
    return found;
}

/* step: 0 where one scale serves all n, 1 where each has its own. */
INLINE void add_errors(const float *restrict x, const float *restrict meant, int64_t n, const float *restrict scale,
                       int64_t step, double top, Codes *found) {
    double error = 0, overflows = 0;
#pragma omp simd reduction(+ : error, overflows)
    for (int64_t i = 0; i < n; i++) {
        double v = x[i], s = scale[i * step], lost = v - meant[i] * s;
        error += lost * lost;
        overflows += fabs(v) > s * top ? 1 : 0;
    }
    found->error += error, found->overflows += overflows;
}

/* n elements from column `col` on, with one scale for each `width` columns; constant lengths are worth unrolling. */
static void add_row(const float *x, const float *meant, int64_t col, int64_t n, const float *scale, int64_t width,
                    double top, Codes *found) {
    if (width == 1) {
        add_errors(x, meant, n, scale + col, 1, top, found);
        return;
    }
    for (int64_t i = 0; i < n;) {
        int64_t block = (col + i) / width, many = least(n - i, (block + 1) * width - col - i);
        if (many == 32) add_errors(x + i, meant + i, 32, scale + block, 0, top, found);
        else add_errors(x + i, meant + i, many, scale + block, 0, top, found);
        i += many;
    }
}

/* found: Codes of each row, or of each PIECE where one scale serves all; out: their sum. */
static void codes(const void *x, const void *made, int64_t rows, int64_t cols, const float *scale, int64_t height,
                  int64_t width, Read *read, Read *read_codes, double top, Codes *found, Codes *out, int32_t threads) {
    int32_t whole = height >= rows && width >= cols;
    int64_t total = rows * cols, across = whole ? 0 : (cols + width - 1) / width;
    int64_t length = whole ? PIECE : cols, pieces = (total + length - 1) / length;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t piece = 0; piece < pieces; piece++) {
        uint64_t before = use_ieee();
        float run[RUN], meant[RUN];
        int64_t n = least(length, total - piece * length);
        Codes c = {0, 0, 0};
        for (int64_t at = 0; at < n; at += RUN) {
            int64_t many = least(RUN, n - at);
            read(x, piece * length + at, many, run);
            read_codes(made, piece * length + at, many, meant);
            c.underflows += vanished(run, meant, many);
            add_row(run, meant, at, many, scale + piece / height * across, whole ? length : width, top, &c);
        }
        found[piece] = c;
        use_again(before);
    }
    *out = (Codes){0, 0, 0};
    for (const Codes *c = found; c < found + pieces; c++)
        out->error += c->error, out->underflows += c->underflows, out->overflows += c->overflows;
}

/* ---------------------------------------------------------------------------------------------- what Python calls */

#define CODES(FMT, TOP, DTYPE)                                                                                       \
    void codes_##FMT##_##DTYPE(const void *x, const void *made, int64_t rows, int64_t cols, const float *scale,      \
                               int64_t height, int64_t width, Codes *found, Codes *out, int32_t threads) {           \
        codes(x, made, rows, cols, scale, height, width, read_##DTYPE, read_##FMT, TOP * BEYOND, found, out, threads); \
    }

#define FIGURES(DTYPE)                                                                                               \
    void values_##DTYPE(const void *x, int64_t n, Values *found, double *out, int32_t threads) {                     \
        values(x, n, read_##DTYPE, found, out, threads);                                                             \
    }                                                                                                                \
    int32_t ranges_##DTYPE(const void *x, int64_t rows, int64_t cols, int64_t height, int64_t width, double *found,  \
                           double *out, int32_t threads) {                                                           \
        return ranges(x, rows, cols, height, width, read_##DTYPE, found, out, threads);                              \
    }                                                                                                                \
    CODES(e4m3, 448, DTYPE)                                                                                          \
    CODES(e5m2, 57344, DTYPE)

FIGURES(float32)
FIGURES(bfloat16)
FIGURES(float16)
