/* From a matrix to the codes of its blocks in one pass over memory: amaxes, scales, and codes of one or two cuts.

   Rows, and columns of whole blocks, are taken a tile at a time, which stays in the second cache: its amaxes are found,
   the scales made of them, and the tile is read again for its codes. Both directions of 1-wide blocks are two cuts of one
   tile. Bits are those of numerics/scaling.py and cast.py.

   A bfloat16 number under a power of two is a sum of exponents and a rounding in its own 16 bits, at twice the speed of
   float32's. Codes below the normal range, which few runs have, are left to float32, and so is a tile with NaN or Inf. */

#if defined(__AVX512BW__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#include <float.h>
#include <math.h>

#include "encode.h"

#define WIDE 256 /* columns of a tile, at most */
#define TALL 128 /* rows of a tile, at most */

/* One way to cut the matrix, as it lies. rows divides TALL, cols divides WIDE. */
typedef struct {
    int64_t rows, cols;
    uint8_t *codes;  /* of the matrix */
    void *scale_inv; /* float32 or E8M0, [row blocks, column blocks] */
} Cut;

/* How scales are made of amaxes. */
typedef struct {
    float largest, epsilon; /* what an amax is scaled to, and at least taken for */
    int32_t kind, max_exponent;
} Rule;

enum { FP32, POW2, E8M0 };

/* A scale, and its inverse where it belongs. */
INLINE float scale_of(float amax, const Rule *rule, void *inverse, int64_t at) {
    if (rule->kind == E8M0) {
        uint32_t u = bits_of(amax);
        int32_t exponent = (int32_t)((u + 0x1FFFFF) >> 23) - rule->max_exponent;
        exponent = u == 0x7F800000 ? 254 : exponent < 0 ? 0 : exponent;
        ((uint8_t *)inverse)[at] = (uint8_t)exponent;
        return float_of(exponent < 254 ? (uint32_t)(254 - exponent) << 23 : 0x00400000);
    }
    float from = amax < rule->epsilon ? rule->epsilon : amax, scale = rule->largest / from;
    scale = scale < FLT_MIN ? FLT_MIN : scale > FLT_MAX ? FLT_MAX : scale;
    if (rule->kind == POW2) scale = float_of(bits_of(scale) & 0x7F800000);
    scale = from == 0 || from == INFINITY ? 1 : scale;
    ((float *)inverse)[at] = 1 / scale;
    return scale;
}

/* ------------------------------------------------------------------------------------------- in 16 bits of bfloat16 */

/* The code of a normal result: `offset` is what the exponent grows by, and what the formats' biases differ by, times 128;
   `drop` mantissa bits are rounded off. Zero stays; what is below the normal range is told in *small. */
INLINE uint8_t encode_16(uint16_t u, int16_t offset, int drop, uint16_t *small) {
    uint16_t magnitude = u & 0x7FFF, code = (uint16_t)(magnitude + (uint16_t)offset);
    *small |= (uint16_t)(((int16_t)code < 128) & (magnitude != 0));
    code = (uint16_t)(code + (uint16_t)((code >> drop & 1) + (1 << (drop - 1)) - 1)) >> drop;
    code = magnitude ? code : 0;
    return (uint8_t)(code | (u >> 8 & 0x80));
}

/* What a scale is in encode_16; 0 where that is out of its range, and for no power of two. */
INLINE int16_t offset_of(float scale, int32_t kind, int32_t bias) {
    int32_t exponent = (int32_t)(bits_of(scale) >> 23) - 127;
    return kind == FP32 || exponent < -100 || exponent > 100 ? 0 : (int16_t)((exponent - 127 + bias) * 128);
}

/* ------------------------------------------------------------------------------------------------------------ tiles */

/* NAME(x, rows, cols, inf, cuts, n_cuts, rule, amax, threads): returns how many elements are NaN or Inf. */
#define BLOCKS(NAME, FROM, BITS, LOAD, ENCODE, SHORT, DROP, BIAS)                                                    \
    INLINE BITS NAME##_magnitude(FROM x) {                                                                           \
        BITS u;                                                                                                      \
        memcpy(&u, &x, sizeof u);                                                                                    \
        return u & (BITS)((BITS)~(BITS)0 >> 1);                                                                      \
    }                                                                                                                \
    INLINE BITS NAME##_most(const FROM *x, int64_t n) {                                                              \
        BITS found = 0;                                                                                              \
        for (int64_t i = 0; i < n; i++) {                                                                            \
            BITS m = NAME##_magnitude(x[i]);                                                                         \
            found = m > found ? m : found;                                                                           \
        }                                                                                                            \
        return found;                                                                                                \
    }                                                                                                                \
    static void NAME##_most_each(const FROM *restrict x, BITS *restrict found, int64_t n) {                          \
        for (int64_t i = 0; i < n; i++) {                                                                            \
            BITS m = NAME##_magnitude(x[i]);                                                                         \
            found[i] = m > found[i] ? m : found[i];                                                                  \
        }                                                                                                            \
    }                                                                                                                \
    INLINE void NAME##_run(const FROM *restrict x, uint8_t *restrict to, int64_t n, float scale, int16_t offset) {   \
        if (SHORT && offset) {                                                                                       \
            uint16_t small = 0;                                                                                      \
            for (int64_t i = 0; i < n; i++) to[i] = encode_16((uint16_t)x[i], offset, DROP, &small);                 \
            if (!small) return;                                                                                      \
        }                                                                                                            \
        for (int64_t i = 0; i < n; i++) to[i] = ENCODE(LOAD(x[i]) * scale);                                          \
    }                                                                                                                \
    static void NAME##_each(const FROM *restrict x, uint8_t *restrict to, int64_t n, const float *restrict scale,    \
                            const int16_t *restrict offset) {                                                        \
        if (SHORT && offset) {                                                                                       \
            uint16_t small = 0;                                                                                      \
            for (int64_t i = 0; i < n; i++) to[i] = encode_16((uint16_t)x[i], offset[i], DROP, &small);              \
            if (!small) return;                                                                                      \
        }                                                                                                            \
        for (int64_t i = 0; i < n; i++) to[i] = ENCODE(LOAD(x[i]) * scale[i]);                                       \
    }                                                                                                                \
    /* Magnitudes of a tile that has some, with zeros for NaN; counts NaN and Inf. */                                \
    static int64_t NAME##_clean(const FROM *x, int64_t step, int64_t rows, int64_t cols, BITS inf, FROM *clean) {    \
        int64_t count = 0;                                                                                           \
        for (int64_t r = 0; r < rows; r++)                                                                           \
            for (int64_t i = 0; i < cols; i++) {                                                                     \
                BITS m = NAME##_magnitude(x[r * step + i]);                                                          \
                count += m >= inf;                                                                                   \
                m = m > inf ? 0 : m;                                                                                 \
                memcpy(clean + r * WIDE + i, &m, sizeof m);                                                          \
            }                                                                                                        \
        return count;                                                                                                \
    }                                                                                                                \
    /* Codes and scales of one cut of a tile; the largest magnitude. from: x, or what NAME_clean made of it. */      \
    static BITS NAME##_amaxes(const FROM *from, int64_t step, int64_t rows, int64_t cols, const Cut *cut,            \
                              BITS *largest) {                                                                       \
        int64_t across = (cols + cut->cols - 1) / cut->cols, down = (rows + cut->rows - 1) / cut->rows;              \
        BITS top = 0;                                                                                                \
        memset(largest, 0, (size_t)(down * across) * sizeof(BITS));                                                  \
        for (int64_t r = 0; r < rows; r++) {                                                                         \
            const FROM *x = from + r * step;                                                                         \
            BITS *to = largest + r / cut->rows * across;                                                             \
            if (cut->cols == 1) NAME##_most_each(x, to, cols);                                                       \
            else                                                                                                     \
                for (int64_t b = 0; b < across; b++) {                                                               \
                    int64_t n = least(cut->cols, cols - b * cut->cols);                                              \
                    const FROM *at = x + b * cut->cols;                                                              \
                    BITS m = n == 128 ? NAME##_most(at, 128) : n == 32 ? NAME##_most(at, 32) : NAME##_most(at, n);   \
                    to[b] = m > to[b] ? m : to[b];                                                                   \
                }                                                                                                    \
        }                                                                                                            \
        for (int64_t i = 0; i < down * across; i++) top = largest[i] > top ? largest[i] : top;                       \
        return top;                                                                                                  \
    }                                                                                                                \
    static void NAME##_codes(const FROM *x, int64_t step, int64_t rows, int64_t cols, const Cut *cut,                \
                             const BITS *largest, const Rule *rule, int64_t row, int64_t col, int32_t finite) {      \
        int64_t across = (cols + cut->cols - 1) / cut->cols, whole = (step + cut->cols - 1) / cut->cols;             \
        float scale[WIDE];                                                                                           \
        int16_t offset[WIDE];                                                                                        \
        int32_t all = 1;                                                                                             \
        for (int64_t r = 0; r < rows; r++) {                                                                         \
            if (r % cut->rows == 0) {                                                                                \
                int64_t at = (row + r) / cut->rows * whole + col / cut->cols;                                        \
                all = 1;                                                                                             \
                for (int64_t b = 0; b < across; b++) {                                                               \
                    BITS m = largest[r / cut->rows * across + b];                                                    \
                    FROM amax;                                                                                       \
                    memcpy(&amax, &m, sizeof m);                                                                     \
                    scale[b] = scale_of(LOAD(amax), rule, cut->scale_inv, at + b);                                   \
                    offset[b] = !finite ? 0 : m ? offset_of(scale[b], rule->kind, BIAS) : 128; /* zeros: any */      \
                    all &= offset[b] != 0;                                                                           \
                }                                                                                                    \
            }                                                                                                        \
            const FROM *from = x + r * step;                                                                         \
            uint8_t *to = cut->codes + (row + r) * step + col;                                                       \
            if (cut->cols == 1) NAME##_each(from, to, cols, scale, all ? offset : NULL);                             \
            else                                                                                                     \
                for (int64_t b = 0; b < across; b++) {                                                               \
                    int64_t n = least(cut->cols, cols - b * cut->cols);                                              \
                    const FROM *f = from + b * cut->cols;                                                            \
                    uint8_t *t = to + b * cut->cols;                                                                 \
                    if (n == 128) NAME##_run(f, t, 128, scale[b], offset[b]);                                        \
                    else if (n == 32) NAME##_run(f, t, 32, scale[b], offset[b]);                                     \
                    else NAME##_run(f, t, n, scale[b], offset[b]);                                                   \
                }                                                                                                    \
        }                                                                                                            \
    }                                                                                                                \
    int64_t NAME(const FROM *x, int64_t rows, int64_t cols, BITS inf, const Cut *cuts, int32_t n_cuts,               \
                 const Rule *rule, float *amax, int32_t threads) {                                                   \
        int64_t nonfinite = 0, down = (rows + TALL - 1) / TALL, across = (cols + WIDE - 1) / WIDE;                   \
        BITS most = 0;                                                                                               \
        _Pragma("omp parallel num_threads(threads) if (threads > 1) reduction(+ : nonfinite) reduction(max : most)") \
        {                                                                                                            \
            uint64_t before = use_ieee();                                                                            \
            BITS largest[TALL * WIDE];                                                                               \
            FROM clean[TALL * WIDE];                                                                                 \
            _Pragma("omp for")                                                                                       \
            for (int64_t tile = 0; tile < down * across; tile++) {                                                   \
                int64_t row = tile / across * TALL, col = tile % across * WIDE;                                      \
                int64_t high = least(TALL, rows - row), wide = least(WIDE, cols - col);                              \
                const FROM *from = x + row * cols + col;                                                             \
                int32_t finite = 1;                                                                                  \
                for (int32_t c = 0; c < n_cuts; c++) {                                                               \
                    BITS top = NAME##_amaxes(from, cols, high, wide, cuts + c, largest);                             \
                    if (top >= inf) {                                                                                \
                        int64_t found = NAME##_clean(from, cols, high, wide, inf, clean);                            \
                        nonfinite += c == 0 ? found : 0;                                                             \
                        top = NAME##_amaxes(clean, WIDE, high, wide, cuts + c, largest);                             \
                        finite = 0;                                                                                  \
                    }                                                                                                \
                    most = top > most ? top : most;                                                                  \
                    NAME##_codes(from, cols, high, wide, cuts + c, largest, rule, row, col, finite);                 \
                }                                                                                                    \
            }                                                                                                        \
            use_again(before);                                                                                       \
        }                                                                                                            \
        uint64_t before = use_ieee();                                                                                \
        FROM of;                                                                                                     \
        memcpy(&of, &most, sizeof most);                                                                             \
        *amax = LOAD(of);                                                                                            \
        use_again(before);                                                                                           \
        return nonfinite;                                                                                            \
    }

BLOCKS(blocks_e4m3_float32, float, uint32_t, load_float32, encode_e4m3, 0, 4, 7)
BLOCKS(blocks_e4m3_bfloat16, uint16_t, uint16_t, load_bfloat16, encode_e4m3, 1, 4, 7)
BLOCKS(blocks_e4m3_float16, uint16_t, uint16_t, load_float16, encode_e4m3, 0, 4, 7)
BLOCKS(blocks_e5m2_float32, float, uint32_t, load_float32, encode_e5m2, 0, 5, 15)
BLOCKS(blocks_e5m2_bfloat16, uint16_t, uint16_t, load_bfloat16, encode_e5m2, 1, 5, 15)
BLOCKS(blocks_e5m2_float16, uint16_t, uint16_t, load_float16, encode_e5m2, 0, 5, 15)
