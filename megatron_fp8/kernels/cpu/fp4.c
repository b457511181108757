/* NVFP4 casts and decoding: E2M1 codes, E4M3 block scales, the Hadamard transform, stochastic rounding.

   The tensor's scale needs the amaxes of all blocks, so a matrix is read twice: fp4_amaxes finds amaxes, fp4_codes makes
   scales and codes. In between, ranks may reduce the tensor's amaxes. Both compute the transform, which takes an eighth of
   the time.

   The unit of work is a square of 16 x 16 elements as float32: 16 rowwise and 16 columnwise blocks, or one block of a
   weight. Bits are those of numerics/nvfp4.py. */

#if defined(__AVX512BW__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("prefer-vector-width=512")
#endif

#include "fp4.h"

#define TALL 128  /* rows of a tile: a column's codes of a tile fill a cache line */
#define WIDE 256  /* columns of a tile: 16 Philox blocks */

enum { FLOAT32, BFLOAT16, FLOAT16 };

typedef struct {
    const void *x;            /* [rows, cols], neither of them 0 */
    int64_t rows, cols;
    int32_t dtype;
    int32_t square;           /* one block is 16 x 16, else 1 x 16 along the contraction */
    int32_t hadamard;         /* the columnwise side is transformed */
    int32_t stochastic;
    uint8_t *codes[2];        /* rowwise [rows, cols / 2], columnwise [cols, rows / 2], in whole blocks; NULL: not wanted */
    uint8_t *scales[2];       /* E4M3 of each block: [rows, cols / 16] and [cols, rows / 16]; square: [rows / 16, cols / 16] */
    float *block_amax[2];     /* [squares, 16], square: [0] [squares]; columnwise NULL: not wanted */
    float *amax;              /* [2]: the tensor's, rowwise and columnwise */
    int64_t first, step;      /* logical element index of x's first element; from one row to the next */
    uint32_t key[2][2];       /* Philox key of each side, seed first */
    uint32_t counter[2];      /* upper words of Philox's counter */
} Fp4Cast;

INLINE int64_t blocks_in(int64_t n) { return (n + N - 1) / N; }
INLINE uint32_t most(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* ---------------------------------------------------------------------------------------------------------- squares */

#define LOAD(NAME, FROM, OF)                                                                                         \
    INLINE void NAME(const FROM *x, int64_t step, int64_t rows, int64_t cols, Square v) {                            \
        if (rows >= N && cols >= N) {                                                                                \
            for (int r = 0; r < N; r++)                                                                              \
                for (int c = 0; c < N; c++) v[r][c] = OF(x[r * step + c]);                                           \
            return;                                                                                                  \
        }                                                                                                            \
        memset(v, 0, sizeof(Square));                                                                                \
        for (int64_t r = 0; r < least(rows, N); r++)                                                                 \
            for (int64_t c = 0; c < least(cols, N); c++) v[r][c] = OF(x[r * step + c]);                              \
    }

LOAD(load_square_float32, float, load_float32)
LOAD(load_square_bfloat16, uint16_t, load_bfloat16)
LOAD(load_square_float16, uint16_t, load_float16)

/* The square at a row and a column; zeros outside the matrix. */
static void load_square(const Fp4Cast *of, int64_t row, int64_t col, Square v) {
    int64_t at = row * of->cols + col, rows = of->rows - row, cols = of->cols - col;
    if (of->dtype == FLOAT32) load_square_float32((const float *)of->x + at, of->cols, rows, cols, v);
    else if (of->dtype == BFLOAT16) load_square_bfloat16((const uint16_t *)of->x + at, of->cols, rows, cols, v);
    else load_square_float16((const uint16_t *)of->x + at, of->cols, rows, cols, v);
}

/* ----------------------------------------------------------------------------------------------------------- amaxes */

/* Amaxes of a square's first rows, NaN ignored, and zeros; returns how many elements are NaN or Inf. */
INLINE int64_t amaxes_of_rows(const Square x, int64_t rows, float amax[N]) {
    uint32_t count = 0;
    memset(amax, 0, N * sizeof *amax);
    for (int64_t r = 0; r < rows; r++) {
        uint32_t found = 0;
        for (int c = 0; c < N; c++) {
            uint32_t magnitude = bits_of(x[r][c]) & 0x7FFFFFFF;
            count += magnitude >= INF;
            found = most(found, magnitude > INF ? 0 : magnitude);
        }
        amax[r] = float_of(found);
    }
    return count;
}

INLINE void amaxes_of_columns(const Square x, float amax[N]) {
    for (int c = 0; c < N; c += LANES) {
        Words found = words(0);
#pragma GCC unroll 16
        for (int r = 0; r < N; r++) {
            Words magnitude = (Words)floats_at(x[r] + c) & 0x7FFFFFFF;
            found = larger(found, magnitude & (Words)(magnitude <= INF));
        }
        memcpy(amax + c, &found, sizeof found);
    }
}

INLINE uint32_t largest_of(const float amax[N]) {
    uint32_t found = 0;
    for (int i = 0; i < N; i++) found = most(found, bits_of(amax[i]));
    return found;
}

/* Amaxes of blocks, and of the tensor in both directions (the rowwise one where only that is wanted). Returns how many
   elements of x are NaN or Inf. */
int64_t fp4_amaxes(const Fp4Cast *of, int32_t threads) {
    int64_t nonfinite = 0, down = blocks_in(of->rows), across = blocks_in(of->cols);
    uint32_t found[2] = {0, 0};
#pragma omp parallel num_threads(threads) if (threads > 1) reduction(+ : nonfinite) reduction(max : found[:2])
    {
        uint64_t before = use_ieee();
#pragma omp for
        for (int64_t i = 0; i < down * across; i++) {
            _Alignas(64) Square x;
            _Alignas(64) float amax[N];
            load_square(of, i / across * N, i % across * N, x);
            nonfinite += amaxes_of_rows(x, least(of->rows - i / across * N, N), amax);
            uint32_t largest = largest_of(amax);
            found[0] = most(found[0], largest);
            if (of->square) of->block_amax[0][i] = float_of(largest);
            else memcpy(of->block_amax[0] + i * N, amax, sizeof amax);
            if (!of->block_amax[1]) continue;
            if (of->hadamard) transform(x);
            amaxes_of_columns(x, amax);
            found[1] = most(found[1], largest_of(amax));
            memcpy(of->block_amax[1] + i * N, amax, sizeof amax);
        }
        use_again(before);
    }
    of->amax[0] = float_of(found[0]);
    of->amax[1] = float_of(of->block_amax[1] ? found[1] : found[0]);
    return nonfinite;
}

/* ------------------------------------------------------------------------------------------------------------ codes */

/* The random bytes of 16 rows of a tile, for one side: byte `at[r] + c` of row r is column c's. */
typedef struct {
    uint8_t bytes[N][WIDE + N * N]; /* what whole vectors of Philox blocks may fill, and more */
    int64_t at[N];
} Random;

static void draw(const Fp4Cast *of, int side, int64_t row, int64_t col, Random *random) {
    int64_t cols = least(WIDE, of->cols - col);
    for (int64_t r = 0; r < N; r++) {
        int64_t index = of->first + (row + r) * of->step + col;
        random->at[r] = index % N;
        philox((uint64_t)(index / N), blocks_in(random->at[r] + cols), of->key[side], of->counter, random->bytes[r]);
    }
}

/* A square's columns c to c + LANES of row r, as codes; random: NULL rounds to nearest. */
INLINE Words encode_part(const Square x, int r, int c, Floats factor, const Random *random, int64_t col,
                         const int32_t stochastic) {
    const uint8_t *drawn = stochastic ? random->bytes[r] + random->at[r] + col + c : NULL;
    return encode_e2m1(floats_at(x[r] + c) * factor, drawn, stochastic);
}

/* Codes of a square's first rows under their factors, two a byte: to[r * step], 8 bytes each. */
INLINE void codes_of_rows(const Square x, const float factor[N], const Random *random, int64_t col,
                          const int32_t stochastic, const int64_t rows, uint8_t *to, int64_t step) {
    uint8_t code[N][N], packed[N * N / 2];
    uint16_t pair[N * N / 2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < N; c += LANES)
            store_bytes(code[r] + c, encode_part(x, r, c, (Floats){0} + factor[r], random, col, stochastic));
    memcpy(pair, code, (size_t)rows * N);
    for (int i = 0; i < rows * (N / 2); i++) packed[i] = (uint8_t)(pair[i] | pair[i] >> 4);
    for (int64_t r = 0; r < rows; r++) memcpy(to + r * step, packed + r * (N / 2), N / 2);
}

/* Codes of a square's columns under their factors, eight a word: to[c * step], two words each. */
INLINE void codes_of_columns(const Square x, const float factor[N], const Random *random, int64_t col,
                             const int32_t stochastic, uint32_t *to, int64_t step) {
    for (int c = 0; c < N; c += LANES)
        for (int half = 0; half < 2; half++) {
            Words word = words(0);
#pragma GCC unroll 8
            for (int r = 0; r < N / 2; r++)
                word |= encode_part(x, half * N / 2 + r, c, floats_at(factor + c), random, col, stochastic) << 4 * r;
            for (int i = 0; i < LANES; i++) to[(c + i) * step + half] = word[i];
        }
}

/* Codes and scales of a tile. */
static void code_tile(const Fp4Cast *of, int64_t row, int64_t col, const TensorScale by[2]) {
    _Alignas(64) Square x;
    uint32_t words[WIDE][TALL / 8]; /* of columns */
    uint8_t scales[WIDE][TALL / N];
    Random random[2];
    int64_t across = blocks_in(of->cols), down = blocks_in(of->rows);
    int64_t rows = least(TALL, of->rows - row), cols = least(WIDE, of->cols - col), strips = blocks_in(rows);
    for (int64_t strip = 0; strip < strips; strip++) {
        int64_t top = row + strip * N, left_rows = of->rows - top;
        for (int side = 0; of->stochastic && side < 2; side++)
            if (of->codes[side]) draw(of, side, top, col, random + side);
        for (int64_t c = 0; c < cols; c += N) {
            int64_t square = top / N * across + (col + c) / N;
            float amax[N], factor[N];
            uint8_t scale[N];
            load_square(of, top, col + c, x);
            if (of->square) {
                for (int i = 0; i < N; i++) amax[i] = of->block_amax[0][square];
                scale_blocks(amax, by[0], scale, factor);
                of->scales[0][square] = scale[0];
                if (of->codes[1]) of->scales[1][(col + c) / N * down + top / N] = scale[0];
            }
            if (of->codes[0]) {
                uint8_t *to = of->codes[0] + top * across * (N / 2) + (col + c) / 2;
                if (!of->square) {
                    scale_blocks(of->block_amax[0] + square * N, by[0], scale, factor);
                    for (int64_t r = 0; r < least(left_rows, N); r++)
                        of->scales[0][(top + r) * across + (col + c) / N] = scale[r];
                }
                if (of->stochastic) codes_of_rows(x, factor, random, c, 1, least(left_rows, N), to, across * (N / 2));
                else if (left_rows >= N) codes_of_rows(x, factor, NULL, c, 0, N, to, across * (N / 2));
                else codes_of_rows(x, factor, NULL, c, 0, left_rows, to, across * (N / 2));
            }
            if (!of->codes[1]) continue;
            if (!of->square) {
                scale_blocks(of->block_amax[1] + square * N, by[1], scale, factor);
                for (int i = 0; i < N; i++) scales[c + i][strip] = scale[i];
            }
            if (of->hadamard) transform(x);
            if (of->stochastic) codes_of_columns(x, factor, random + !of->square, c, 1, words[c] + strip * 2, TALL / 8);
            else codes_of_columns(x, factor, NULL, c, 0, words[c] + strip * 2, TALL / 8);
        }
    }
    for (int64_t c = 0; of->codes[1] && c < cols; c++) {
        memcpy(of->codes[1] + (col + c) * down * (N / 2) + row / 2, words[c], (size_t)strips * (N / 2));
        if (!of->square) memcpy(of->scales[1] + (col + c) * down + row / N, scales[c], (size_t)strips);
    }
}

/* Codes and scales under the amaxes that are there. The tensor's of Inf becomes 2688, which has the same scale: the product
   then saturates as the codes do. */
void fp4_codes(const Fp4Cast *of, int32_t threads) {
    int64_t down = (of->rows + TALL - 1) / TALL, across = (of->cols + WIDE - 1) / WIDE;
    for (int side = 0; side < 2; side++)
        if (of->amax[side] > FLT_MAX) of->amax[side] = 2688;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        uint64_t before = use_ieee();
        TensorScale by[2] = {tensor_scale(of->amax[0]), tensor_scale(of->amax[1])};
#pragma omp for
        for (int64_t tile = 0; tile < down * across; tile++)
            code_tile(of, tile / across * TALL, tile % across * WIDE, by);
        use_again(before);
    }
}

/* --------------------------------------------------------------------------------------------------------- decoding */

/* 16 bytes of codes, of two blocks, times half their scales, in bfloat16. */
INLINE void decode_two(const uint8_t codes[N], float first, float second, uint16_t to[2 * N]) {
    static const uint32_t of_second[N] = {0, 0, 0, 0, 0, 0, 0, 0, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};
    const Words doubled = words(0xC8643210); /* twice each magnitude, four bits each */
    for (int i = 0; i < N; i += LANES) {
        Words byte = bytes_at(codes + i), is_second;
        memcpy(&is_second, of_second + i, sizeof is_second);
        Floats by = (Floats)choose(is_second, words(bits_of(second)), words(bits_of(first)));
        Floats low = __builtin_convertvector(doubled >> (byte << 2 & 28) & 15, Floats) * by;
        Floats high = __builtin_convertvector(doubled >> (byte >> 2 & 28) & 15, Floats) * by;
        Words both = (Words)low >> 16 | ((Words)high & 0xFFFF0000) | (byte & 8) << 12 | (byte & 128) << 24;
        memcpy(to + 2 * i, &both, sizeof both);
    }
}

/* Codes [rows, blocks * 8 bytes] times E4M3 scales [rows / block_rows, blocks], in bfloat16: exact. */
void fp4_decode(const uint8_t *codes, const uint8_t *scales, int64_t rows, int64_t blocks, int64_t block_rows, uint16_t *to,
                int32_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < rows; row++) {
        const uint8_t *scale = scales + row / block_rows * blocks, *from = codes + row * blocks * (N / 2);
        uint16_t *out = to + row * blocks * N;
        for (int64_t b = 0; b + 1 < blocks; b += 2)
            decode_two(from + b * (N / 2), decode_e4m3(scale[b]) * 0.5f, decode_e4m3(scale[b + 1]) * 0.5f, out + b * N);
        if (blocks % 2) {
            uint8_t bytes[N] = {0};
            uint16_t numbers[2 * N];
            memcpy(bytes, from + (blocks - 1) * (N / 2), N / 2);
            decode_two(bytes, decode_e4m3(scale[blocks - 1]) * 0.5f, 0, numbers);
            memcpy(out + (blocks - 1) * N, numbers, 2 * N);
        }
    }
}
