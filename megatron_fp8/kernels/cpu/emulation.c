/* The passes of emulated FP8 that touch every element, for CPUs: cast, block amax, decode; scaling and rounding of sums.

   Matrices are row-major and contiguous, [rows, cols]. One float32 scale serves each block of block_rows x block_cols
   elements; the last block of a row or column may be partial. Loops are free of branches, so that the compiler turns
   them into vector code; no intrinsics. Every result equals the torch operations of cast.py and scaling.py in all bits:
   the product is formed in float32, rounding is to nearest even, nothing is flushed, contracted or reordered. */

/* Compilers of today choose half the width of vectors by themselves. */
#if defined(__AVX512BW__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#include <stdlib.h>

#include "encode.h"

/* ------------------------------------------------------------------------------------- elementwise under a scale */

/* NAME(from, to, rows, cols, scale, block_rows, block_cols, threads): to = OUT(from, scale of its block), NULL being 1.
   Loops over whole blocks of 32 and 128 have constant lengths: those are worth unrolling. */
#define ELEMENTWISE(NAME, FROM, TO, OUT)                                                                             \
    INLINE void NAME##_run(const FROM *restrict from, TO *restrict to, int64_t n, float s) {                         \
        for (int64_t i = 0; i < n; i++) to[i] = OUT(from[i], s);                                                     \
    }                                                                                                                \
    static void NAME##_each(const FROM *restrict from, TO *restrict to, int64_t n, const float *restrict s) {        \
        for (int64_t i = 0; i < n; i++) to[i] = OUT(from[i], s[i]);                                                  \
    }                                                                                                                \
    INLINE void NAME##_blocks(const FROM *from, TO *to, int64_t cols, const float *s, int64_t width) {               \
        int64_t whole = cols / width, left = cols % width;                                                           \
        for (int64_t b = 0; b < whole; b++) NAME##_run(from + b * width, to + b * width, width, s[b]);               \
        if (left) NAME##_run(from + whole * width, to + whole * width, left, s[whole]);                              \
    }                                                                                                                \
    void NAME(const FROM *from, TO *to, int64_t rows, int64_t cols, const float *scale, int64_t block_rows,          \
              int64_t block_cols, int32_t threads) {                                                                 \
        const float one = 1;                                                                                         \
        int64_t total = rows * cols, across = (cols + block_cols - 1) / block_cols;                                  \
        int32_t whole = !scale || (block_rows >= rows && block_cols >= cols);                                        \
        scale = scale ? scale : &one;                                                                                \
        _Pragma("omp parallel num_threads(threads) if (threads > 1)") {                                              \
            uint64_t before = use_ieee();                                                                            \
            if (whole) {                                                                                             \
                _Pragma("omp for")                                                                                   \
                for (int64_t i = 0; i < total; i += PIECE)                                                           \
                    NAME##_run(from + i, to + i, least(PIECE, total - i), *scale);                                   \
            } else {                                                                                                 \
                _Pragma("omp for")                                                                                   \
                for (int64_t row = 0; row < rows; row++) {                                                           \
                    const float *s = scale + row / block_rows * across;                                              \
                    const FROM *f = from + row * cols;                                                               \
                    TO *t = to + row * cols;                                                                         \
                    if (block_cols == 1) NAME##_each(f, t, cols, s);                                                 \
                    else if (block_cols == 32) NAME##_blocks(f, t, cols, s, 32);                                     \
                    else if (block_cols == 128) NAME##_blocks(f, t, cols, s, 128);                                   \
                    else NAME##_blocks(f, t, cols, s, block_cols);                                                   \
                }                                                                                                    \
            }                                                                                                        \
            use_again(before);                                                                                       \
        }                                                                                                            \
    }

#define CAST(FMT, DTYPE, FROM)                                                                                       \
    INLINE uint8_t FMT##_of_##DTYPE(FROM x, float s) { return encode_##FMT(load_##DTYPE(x) * s); }                   \
    ELEMENTWISE(cast_##FMT##_##DTYPE, FROM, uint8_t, FMT##_of_##DTYPE)

#define DECODE(FMT, DTYPE, TO)                                                                                       \
    INLINE TO DTYPE##_of_##FMT(uint8_t code, float s) { return store_##DTYPE(decode_##FMT(code) * s); }              \
    ELEMENTWISE(decode_##FMT##_##DTYPE, uint8_t, TO, DTYPE##_of_##FMT)

CAST(e4m3, float32, float)
CAST(e4m3, bfloat16, uint16_t)
CAST(e4m3, float16, uint16_t)
CAST(e5m2, float32, float)
CAST(e5m2, bfloat16, uint16_t)
CAST(e5m2, float16, uint16_t)
DECODE(e4m3, float32, float)
DECODE(e4m3, bfloat16, uint16_t)
DECODE(e5m2, float32, float)
DECODE(e5m2, bfloat16, uint16_t)

/* ----------------------------------------------------------------------------------------- under a scale that is known */

/* NAME(from, to, n, inf, scale, inverse, amax, running, threads): codes of a tensor under one scale that was there before it,
   the largest magnitude that is no NaN, which goes to *running too if it is larger (running may be NULL), and the scale's
   inverse, all in one pass over memory; returns how many elements are NaN or Inf. */
#define QUANTIZE(NAME, FROM, BITS, MAGNITUDE, LOAD, OUT)                                                             \
    static int64_t NAME##_special(const FROM *from, int64_t n, BITS inf, BITS *top) {                                \
        int64_t count = 0;                                                                                           \
        *top = 0;                                                                                                    \
        for (int64_t i = 0; i < n; i++) {                                                                            \
            BITS m = MAGNITUDE(from[i]);                                                                             \
            count += m >= inf;                                                                                       \
            if (m <= inf && m > *top) *top = m;                                                                      \
        }                                                                                                            \
        return count;                                                                                                \
    }                                                                                                                \
    int64_t NAME(const FROM *from, uint8_t *to, int64_t n, BITS inf, const float *scale, float *inverse,             \
                 float *amax, float *running, int32_t threads) {                                                     \
        int64_t nonfinite = 0;                                                                                       \
        BITS largest = 0;                                                                                            \
        _Pragma("omp parallel num_threads(threads) if (threads > 1) reduction(+ : nonfinite) reduction(max : largest)") { \
            uint64_t before = use_ieee();                                                                            \
            _Pragma("omp for")                                                                                       \
            for (int64_t at = 0; at < n; at += CACHED) {                                                             \
                const FROM *f = from + at;                                                                           \
                int64_t size = least(CACHED, n - at);                                                                \
                BITS top = 0;                                                                                        \
                for (int64_t i = 0; i < size; i++) {                                                                 \
                    BITS m = MAGNITUDE(f[i]);                                                                        \
                    top = m > top ? m : top;                                                                         \
                }                                                                                                    \
                if (top >= inf) nonfinite += NAME##_special(f, size, inf, &top);                                     \
                largest = top > largest ? top : largest;                                                             \
                OUT##_run(f, to + at, size, *scale);                                                                 \
            }                                                                                                        \
            use_again(before);                                                                                       \
        }                                                                                                            \
        uint64_t before = use_ieee();                                                                                \
        *inverse = 1 / *scale;                                                                                       \
        *amax = LOAD(largest);                                                                                       \
        if (running && *amax > *running) *running = *amax;                                                           \
        use_again(before);                                                                                           \
        return nonfinite;                                                                                            \
    }

#define CACHED 4096 /* elements that are still in the first cache when they are read again */

INLINE uint16_t magnitude_16(uint16_t x) { return x & 0x7FFF; }
INLINE uint32_t magnitude_32(float x) { return bits_of(x) & 0x7FFFFFFF; }

QUANTIZE(quantize_e4m3_float32, float, uint32_t, magnitude_32, float_of, cast_e4m3_float32)
QUANTIZE(quantize_e4m3_bfloat16, uint16_t, uint16_t, magnitude_16, load_bfloat16, cast_e4m3_bfloat16)
QUANTIZE(quantize_e4m3_float16, uint16_t, uint16_t, magnitude_16, load_float16, cast_e4m3_float16)
QUANTIZE(quantize_e5m2_float32, float, uint32_t, magnitude_32, float_of, cast_e5m2_float32)
QUANTIZE(quantize_e5m2_bfloat16, uint16_t, uint16_t, magnitude_16, load_bfloat16, cast_e5m2_bfloat16)
QUANTIZE(quantize_e5m2_float16, uint16_t, uint16_t, magnitude_16, load_float16, cast_e5m2_float16)

/* ---------------------------------------------------------------------------------------------------------- amax */

/* One way to cut a matrix into blocks. rows == 0 means all rows: then each thread has a row of `largest` of its own. */
typedef struct {
    int64_t rows, cols;
    void *largest; /* magnitudes, [row blocks or threads, column blocks], zeroed by the caller */
} Cut;

/* NAME(x, rows, cols, inf, cuts, n_cuts, unit, threads): the largest magnitude that is no NaN of every block of every
   cut, in one pass over memory; returns how many elements are NaN or Inf, -1 without memory for a row. Magnitudes are
   integers, which sort like the numbers; those above `inf` are NaN. Threads take whole multiples of `unit` rows. */
#define AMAX(NAME, BITS)                                                                                             \
    INLINE BITS NAME##_run(const BITS *x, int64_t n) {                                                               \
        BITS found = 0;                                                                                              \
        for (int64_t i = 0; i < n; i++) {                                                                            \
            BITS m = x[i] & (BITS)((BITS)~(BITS)0 >> 1);                                                             \
            found = m > found ? m : found;                                                                           \
        }                                                                                                            \
        return found;                                                                                                \
    }                                                                                                                \
    static void NAME##_each(const BITS *restrict x, BITS *restrict largest, int64_t n) {                             \
        for (int64_t i = 0; i < n; i++) {                                                                            \
            BITS m = x[i] & (BITS)((BITS)~(BITS)0 >> 1);                                                             \
            largest[i] = m > largest[i] ? m : largest[i];                                                            \
        }                                                                                                            \
    }                                                                                                                \
    INLINE void NAME##_blocks(const BITS *x, BITS *largest, int64_t cols, int64_t width) {                           \
        for (int64_t b = 0; b * width < cols; b++) {                                                                 \
            int64_t n = cols - b * width;                                                                            \
            BITS m = n >= width ? NAME##_run(x + b * width, width) : NAME##_run(x + b * width, n);                   \
            largest[b] = m > largest[b] ? m : largest[b];                                                            \
        }                                                                                                            \
    }                                                                                                                \
    static int64_t NAME##_no_nan(const BITS *restrict x, BITS *restrict clean, int64_t n, BITS inf) {                \
        int64_t count = 0;                                                                                           \
        for (int64_t i = 0; i < n; i++) {                                                                            \
            BITS m = x[i] & (BITS)((BITS)~(BITS)0 >> 1);                                                             \
            count += m >= inf;                                                                                       \
            clean[i] = m > inf ? 0 : m;                                                                              \
        }                                                                                                            \
        return count;                                                                                                \
    }                                                                                                                \
    int64_t NAME(const BITS *x, int64_t rows, int64_t cols, BITS inf, const Cut *cuts, int32_t n_cuts, int64_t unit, \
                 int32_t threads) {                                                                                  \
        int64_t nonfinite = 0, units = (rows + unit - 1) / unit, share = (units + threads - 1) / threads * unit;     \
        int32_t failed = 0;                                                                                          \
        _Pragma("omp parallel for num_threads(threads) if (threads > 1) reduction(+ : nonfinite, failed)")           \
        for (int32_t thread = 0; thread < threads; thread++) {                                                       \
            BITS *clean = malloc((size_t)cols * sizeof(BITS));                                                       \
            failed += clean == NULL;                                                                                 \
            for (int64_t row = thread * share; clean && row < least(rows, (thread + 1) * share); row++) {            \
                const BITS *from = x + row * cols;                                                                   \
                BITS top = NAME##_run(from, cols);                                                                   \
                if (top >= inf) {                                                                                    \
                    nonfinite += NAME##_no_nan(from, clean, cols, inf);                                              \
                    from = clean;                                                                                    \
                    top = NAME##_run(from, cols);                                                                    \
                }                                                                                                    \
                for (int32_t c = 0; c < n_cuts; c++) {                                                               \
                    int64_t width = cuts[c].cols, across = (cols + width - 1) / width;                               \
                    int64_t at = cuts[c].rows ? row / cuts[c].rows : thread;                                         \
                    BITS *largest = (BITS *)cuts[c].largest + at * across;                                           \
                    if (across == 1) *largest = top > *largest ? top : *largest;                                     \
                    else if (width == 1) NAME##_each(from, largest, cols);                                           \
                    else if (width == 32) NAME##_blocks(from, largest, cols, 32);                                    \
                    else if (width == 128) NAME##_blocks(from, largest, cols, 128);                                  \
                    else NAME##_blocks(from, largest, cols, width);                                                  \
                }                                                                                                    \
            }                                                                                                        \
            free(clean);                                                                                             \
        }                                                                                                            \
        return failed ? -1 : nonfinite;                                                                              \
    }

AMAX(amax16, uint16_t)
AMAX(amax32, uint32_t)

/* --------------------------------------------------------------------------------------------------- MX's scales */

/* Mantissas above that of both formats' maxima, 1.75, carry into the exponent; Inf takes the largest scale. */
void e8m0_of_amax(const uint32_t *restrict amax, uint8_t *restrict e8m0, int64_t n, int32_t max_exponent) {
    for (int64_t i = 0; i < n; i++) {
        int32_t exponent = (int32_t)((amax[i] + 0x1FFFFF) >> 23) - max_exponent;
        exponent = exponent < 0 ? 0 : exponent;
        e8m0[i] = (uint8_t)(amax[i] == 0x7F800000 ? 254 : exponent);
    }
}

/* 2^(e8m0 - 127), or its inverse; 2^-127 is float32's subnormal 0x00400000, and 0xFF is NaN. */
void power_of_e8m0(const uint8_t *restrict e8m0, uint32_t *restrict power, int64_t n, int32_t inverse) {
    for (int64_t i = 0; i < n; i++) {
        int32_t biased = inverse ? 254 - e8m0[i] : e8m0[i];
        uint32_t number = biased > 0 ? (uint32_t)biased << 23 : 0x00400000;
        power[i] = e8m0[i] == 0xFF ? 0x7FC00000 : number;
    }
}
