/* From a matrix to the codes of its blocks in one pass over memory: amaxes, scales, and codes of one or two cuts.

   Rows, and columns of whole blocks, are taken a tile at a time, which stays in the second cache: its amaxes are found,
   the scales made of them, and the tile is read again for its codes. Both directions of 1-wide blocks are two cuts of one
   tile. Bits are those of numerics/scaling.py and cast.py.

   Scales that span more than a tile (of a tensor, of whole rows or columns) are made before, of amaxes that took a pass of
   their own; then the tile is read for its codes only.

   Amaxes and codes of bfloat16 numbers are made in their own 16 bits where scales are powers of two (sixteen.h); a tile
   with NaN or Inf is left to float32. */

#if defined(__AVX512BW__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "blocks.h"
#include "encode.h"
#include "sixteen.h"

static void scales_e8m0(const float *restrict amax, int64_t n, int32_t max_exponent, float *restrict scale,
                        uint8_t *restrict inverse) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t u = bits_of(amax[i]);
        int32_t exponent = (int32_t)((u + 0x1FFFFF) >> 23) - max_exponent;
        exponent = u == 0x7F800000 ? 254 : exponent < 0 ? 0 : exponent;
        inverse[i] = (uint8_t)exponent;
        scale[i] = float_of(exponent < 254 ? (uint32_t)(254 - exponent) << 23 : 0x00400000);
    }
}

static void scales_float(const float *restrict amax, int64_t n, const Rule *rule, float *restrict scale,
                         float *restrict inverse) {
    uint32_t kept = rule->kind == POW2 ? 0x7F800000 : 0xFFFFFFFF;
    float largest = rule->largest, epsilon = rule->epsilon;
    for (int64_t i = 0; i < n; i++) {
        float from = amax[i] < epsilon ? epsilon : amax[i], s = largest / from;
        s = s < FLT_MIN ? FLT_MIN : s;
        s = s > FLT_MAX ? FLT_MAX : s;
        s = float_of(bits_of(s) & kept);
        scale[i] = from == 0 ? 1 : from == INFINITY ? 1 : s;
        inverse[i] = 1 / scale[i];
    }
}

/* Scales of n amaxes, and from number `at` on their inverses. */
static void make_scales(const float *amax, int64_t n, const Rule *rule, float *scale, void *inverse, int64_t at) {
    if (rule->kind == E8M0) scales_e8m0(amax, n, rule->max_exponent, scale, (uint8_t *)inverse + at);
    else scales_float(amax, n, rule, scale, (float *)inverse + at);
}

void scales_of_amaxes(const float *amax, int64_t n, const Rule *rule, float *scale, float *inverse) {
    uint64_t before = use_ieee();
    make_scales(amax, n, rule, scale, inverse, 0);
    use_again(before);
}

/* ------------------------------------------------------------------------------------------- in 16 bits of bfloat16 */

/* What scales are in encode_row, and whether it takes them all: powers of two, not too large or small. Zeros, whose
   amax is 0, can have any scale. */
static int32_t offsets_of(const float *restrict scale, const float *restrict amax, int64_t n, int32_t kind, int32_t bias,
                          int16_t *restrict offset) {
    int32_t out = kind == FP32;
    if (out) return 0;
    for (int64_t b = 0; b < n; b++) {
        int32_t exponent = (int32_t)(bits_of(scale[b]) >> 23) - 127, some = bits_of(amax[b]) != 0;
        out |= ((exponent < -100) | (exponent > 100)) & some;
        offset[b] = (int16_t)((exponent - 127 + bias) * 128);
    }
    return !out;
}

/* ------------------------------------------------------------------------------------------------------------ tiles */

/* NAME(x, rows, cols, inf, cuts, n_cuts, rule, all_finite, amax, threads): returns how many elements are NaN or Inf; -1
   without memory. Of cuts whose scales were made before: 0, an amax of 0, and all_finite says whether there are any.
   What is found of a tile is 700 KB: more than the stack of a thread may be (OMP_STACKSIZE, musl). */
#define BLOCKS(NAME, FROM, BITS, LOAD, ENCODE, SHORT, DROP, BIAS)                                                    \
    INLINE BITS NAME##_magnitude(FROM x) {                                                                           \
        BITS u;                                                                                                      \
        memcpy(&u, &x, sizeof u);                                                                                    \
        return u & (BITS)((BITS)~(BITS)0 >> 1);                                                                      \
    }                                                                                                                \
    INLINE FROM NAME##_of(BITS magnitude) {                                                                          \
        FROM x;                                                                                                      \
        memcpy(&x, &magnitude, sizeof x);                                                                            \
        return x;                                                                                                    \
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
    INLINE void NAME##_long(const FROM *restrict x, uint8_t *restrict to, int64_t n, const float *scale,             \
                            int64_t step) {                                                                          \
        for (int64_t i = 0; i < n; i++) to[i] = ENCODE(LOAD(x[i]) * scale[i * step]);                                \
    }                                                                                                                \
    /* One row of a tile; `offset`: NULL where 16 bits do not do. width: of a block, where that is a constant. */    \
    INLINE void NAME##_row(const FROM *x, uint8_t *to, int64_t cols, int64_t width, const float *scale,              \
                           const int16_t *offset, int32_t finite) {                                                  \
        const int16_t biases = (BIAS - 127) * 128;                                                                   \
        if (SHORT && offset && encode_row((const void *)x, to, cols, width, offset, DROP)) return;                   \
        if (SHORT && finite && encode_row_scaled((const void *)x, to, cols, width, scale, biases, DROP)) return;     \
        if (width == 1) NAME##_long(x, to, cols, scale, 1);                                                          \
        else                                                                                                         \
            for (int64_t b = 0, at = 0; at < cols; b++, at += width)                                                 \
                if (cols - at >= width) NAME##_long(x + at, to + at, width, scale + b, 0);                           \
                else NAME##_long(x + at, to + at, cols - at, scale + b, 0);                                          \
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
        if (sizeof(BITS) == 4 ||                                                                                     \
            !amaxes_16((const void *)from, step, rows, cols, cut->rows, cut->cols, (void *)largest)) {               \
            memset(largest, 0, (size_t)(down * across) * sizeof(BITS));                                              \
            for (int64_t r = 0; r < rows; r++) {                                                                     \
                const FROM *x = from + r * step;                                                                     \
                BITS *to = largest + r / cut->rows * across;                                                         \
                if (cut->cols == 1) NAME##_most_each(x, to, cols);                                                   \
                else                                                                                                 \
                    for (int64_t b = 0; b < across; b++) {                                                           \
                        int64_t n = least(cut->cols, cols - b * cut->cols);                                          \
                        const FROM *at = x + b * cut->cols;                                                          \
                        BITS m = n == 128 ? NAME##_most(at, 128) : n == 32 ? NAME##_most(at, 32) : NAME##_most(at, n);\
                        to[b] = m > to[b] ? m : to[b];                                                               \
                    }                                                                                                \
            }                                                                                                        \
        }                                                                                                            \
        for (int64_t i = 0; i < down * across; i++) top = largest[i] > top ? largest[i] : top;                       \
        return top;                                                                                                  \
    }                                                                                                                \
    typedef struct {                                                                                                 \
        float scale[TALL * WIDE + SPARE], amax[TALL * WIDE], inverse[TALL * WIDE];                                   \
        int16_t offset[TALL * WIDE + SPARE];                                                                         \
        BITS largest[TALL * WIDE + SPARE];                                                                           \
        FROM clean[TALL * WIDE];                                                                                     \
    } NAME##_Found;                                                                                                  \
    /* Scales of all of a tile's blocks first, then its codes, row by row; ahead: a tile to be fetched meanwhile. */ \
    static void NAME##_codes(const FROM *x, int64_t step, int64_t rows, int64_t cols, const Cut *cut,                \
                             NAME##_Found *of, const Rule *rule, int64_t row, int64_t col, int32_t finite,           \
                             const FROM *ahead) {                                                                    \
        float *scale = of->scale, *amax = of->amax, *inverse = of->inverse;                                          \
        int16_t *offset = of->offset;                                                                                \
        int64_t across = (cols + cut->cols - 1) / cut->cols, whole = (step + cut->cols - 1) / cut->cols;             \
        int64_t first = row / cut->rows, down = (row + rows - 1) / cut->rows - first + 1, n = down * across;         \
        int64_t size = rule->kind == E8M0 ? 1 : sizeof(float), at = first * whole + col / cut->cols;                 \
        if (cut->scale)                                                                                              \
            for (int64_t i = 0; i < down; i++)                                                                       \
                memcpy(scale + i * across, cut->scale + at + i * whole, (size_t)across * sizeof(float));             \
        else {                                                                                                       \
            for (int64_t b = 0; b < n; b++) amax[b] = LOAD(NAME##_of(of->largest[b]));                               \
            make_scales(amax, n, rule, scale, inverse, 0);                                                           \
            for (int64_t i = 0; i < down; i++)                                                                       \
                memcpy((uint8_t *)cut->scale_inv + (at + i * whole) * size, (uint8_t *)inverse + i * across * size,  \
                       (size_t)(across * size));                                                                     \
        }                                                                                                            \
        int32_t all = SHORT && finite && offsets_of(scale, cut->scale ? scale : amax, n, rule->kind, BIAS, offset);  \
        for (int64_t r = 0; r < rows; r++) {                                                                         \
            int64_t block = ((row + r) / cut->rows - first) * across;                                                \
            const FROM *from = x + r * step;                                                                         \
            uint8_t *to = cut->codes + (row + r) * step + col;                                                       \
            const float *by = scale + block;                                                                         \
            const int16_t *offsets = all ? offset + block : NULL;                                                    \
            for (int64_t i = 0; ahead && i < WIDE; i += 64 / (int64_t)sizeof(FROM))                                  \
                __builtin_prefetch((const void *)((uintptr_t)ahead + (uintptr_t)(r * step + i) * sizeof(FROM)), 0, 2);\
            if (cut->cols == 1) NAME##_row(from, to, cols, 1, by, offsets, finite);                                  \
            else if (cut->cols == 32) NAME##_row(from, to, cols, 32, by, offsets, finite);                           \
            else if (cut->cols == 128) NAME##_row(from, to, cols, 128, by, offsets, finite);                         \
            else if (cut->cols >= WIDE && cols == WIDE) NAME##_row(from, to, WIDE, WIDE, by, offsets, finite);       \
            else NAME##_row(from, to, cols, cut->cols, by, offsets, finite);                                         \
        }                                                                                                            \
    }                                                                                                                \
    int64_t NAME(const FROM *x, int64_t rows, int64_t cols, BITS inf, const Cut *cuts, int32_t n_cuts,               \
                 const Rule *rule, int32_t all_finite, float *amax, int32_t threads) {                               \
        int64_t nonfinite = 0, down = (rows + TALL - 1) / TALL, across = (cols + WIDE - 1) / WIDE;                   \
        int32_t lost = 0; /* threads without memory */                                                               \
        BITS most = 0;                                                                                               \
        _Pragma("omp parallel num_threads(threads) if (threads > 1) reduction(+ : nonfinite, lost) reduction(max : most)")\
        {                                                                                                            \
            uint64_t before = use_ieee();                                                                            \
            NAME##_Found *of = malloc(sizeof *of);                                                                   \
            lost += of == NULL;                                                                                      \
            _Pragma("omp for")                                                                                       \
            for (int64_t tile = 0; tile < down * across; tile++) {                                                   \
                if (!of) continue;                                                                                   \
                int64_t row = tile / across * TALL, col = tile % across * WIDE;                                      \
                int64_t high = least(TALL, rows - row), wide = least(WIDE, cols - col);                              \
                const FROM *from = x + row * cols + col;                                                             \
                int32_t finite = all_finite;                                                                         \
                for (int32_t c = 0; c < n_cuts; c++) {                                                               \
                    BITS top = cuts[c].scale ? 0 : NAME##_amaxes(from, cols, high, wide, cuts + c, of->largest);     \
                    if (top >= inf) {                                                                                \
                        int64_t found = NAME##_clean(from, cols, high, wide, inf, of->clean);                        \
                        nonfinite += c == 0 ? found : 0;                                                             \
                        top = NAME##_amaxes(of->clean, WIDE, high, wide, cuts + c, of->largest);                     \
                        finite = 0;                                                                                  \
                    }                                                                                                \
                    most = top > most ? top : most;                                                                  \
                    const FROM *next = c + 1 < n_cuts || tile + 1 == down * across ? NULL :                          \
                                       x + (tile + 1) / across * TALL * cols + (tile + 1) % across * WIDE;           \
                    NAME##_codes(from, cols, high, wide, cuts + c, of, rule, row, col, finite, next);                \
                }                                                                                                    \
            }                                                                                                        \
            free(of);                                                                                                \
            use_again(before);                                                                                       \
        }                                                                                                            \
        uint64_t before = use_ieee();                                                                                \
        *amax = LOAD(NAME##_of(most));                                                                               \
        use_again(before);                                                                                           \
        return lost ? -1 : nonfinite;                                                                                \
    }

BLOCKS(blocks_e4m3_float32, float, uint32_t, load_float32, encode_e4m3, 0, 4, 7)
BLOCKS(blocks_e4m3_bfloat16, uint16_t, uint16_t, load_bfloat16, encode_e4m3, 1, 4, 7)
BLOCKS(blocks_e4m3_float16, uint16_t, uint16_t, load_float16, encode_e4m3, 0, 4, 7)
BLOCKS(blocks_e5m2_float32, float, uint32_t, load_float32, encode_e5m2, 0, 5, 15)
BLOCKS(blocks_e5m2_bfloat16, uint16_t, uint16_t, load_bfloat16, encode_e5m2, 1, 5, 15)
BLOCKS(blocks_e5m2_float16, uint16_t, uint16_t, load_float16, encode_e5m2, 0, 5, 15)
