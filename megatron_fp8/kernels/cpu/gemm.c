/* Products of FP8 codes, or of bfloat16 numbers, with float32 sums: out [m, n] = a [m, k] b [n, k]^T * scales + bias.

   For processors with AVX512-BF16, and for AMX. As in any fast GEMM both operands are first packed into panels that the
   inner loop reads from end to end (pack.h), and codes are decoded on that way: no matrix of decoded numbers is written.
   a is packed once, for all threads; each thread then packs strips of b, and multiplies them by all of a, in slices of k
   that stay in its caches.

   Two inner loops compute 32 x 32 sums over panels that lie alike: AVX512-BF16 keeps 8 x 32 of them in registers, AMX all
   of them in four tiles. Sums go on from slice to slice as they are, so an element of out depends on its row and column
   alone: it is summed over k in one order for any m, n and number of threads. The two differ in that order. Subnormal
   numbers and products count as zero, as the instructions have it; out is scaled and rounded in IEEE arithmetic. */

#if defined(__linux__)
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include <omp.h>
#include <stdlib.h>

#include "gemm.h"
#include "pack.h"

#if defined(__AVX512BF16__)

#define BLOCK 32                /* rows and columns of out at a time */
#define SLICE 8                 /* squares of k: slices of four panels then stay in the first cache */
#define TALL 8                  /* blocks of rows: their slice of a stays in the second */
#define STRIP 256               /* columns of out that a thread takes at a time, at most */

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(SYS_arch_prctl)
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif

/* The inner loops this processor has; AMX after asking the system for its registers, for the whole process. */
int32_t has_gemm(void) {
    int32_t found = WITH_AVX512;
#if HAS_AMX
    const long ask_for = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM */
    if (syscall(SYS_arch_prctl, ask_for, tile_data) == 0) found |= WITH_AMX;
#endif
    return found;
}

/* sums [32, 32] of two panels of a and two of b, each `apart` words from the first, over squares of k. */
static void multiply_avx512(const uint32_t *a, int64_t a_apart, const uint32_t *b, int64_t b_apart, int64_t squares,
                            float *sums, int32_t more) {
    for (int part = 0; part < 4; part++) {
        const uint32_t *left = a + part / 2 * a_apart + part % 2 * 8 * SIDE;
        float *to = sums + part * 8 * BLOCK;
        __m512 sum[8][2];
#pragma GCC unroll 8
        for (int r = 0; r < 8; r++) {
            sum[r][0] = more ? _mm512_load_ps(to + r * BLOCK) : _mm512_setzero_ps();
            sum[r][1] = more ? _mm512_load_ps(to + r * BLOCK + 16) : _mm512_setzero_ps();
        }
        const uint32_t *right = b;
        for (int64_t s = 0; s < squares; s++, left += SQUARE, right += SQUARE) {
#pragma GCC unroll 4
            for (int pair = 0; pair < SIDE; pair++) {
                __m512bh first = (__m512bh)_mm512_load_si512(right + pair * SIDE);
                __m512bh second = (__m512bh)_mm512_load_si512(right + b_apart + pair * SIDE);
#pragma GCC unroll 8
                for (int r = 0; r < 8; r++) {
                    __m512bh value = (__m512bh)_mm512_set1_epi32((int32_t)left[r * SIDE + pair]);
                    sum[r][0] = _mm512_dpbf16_ps(sum[r][0], value, first);
                    sum[r][1] = _mm512_dpbf16_ps(sum[r][1], value, second);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < 8; r++) {
            _mm512_store_ps(to + r * BLOCK, sum[r][0]);
            _mm512_store_ps(to + r * BLOCK + 16, sum[r][1]);
        }
    }
}

#if HAS_AMX
static void use_tiles(void) {
    struct { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; } config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) config.bytes[tile] = 64, config.rows[tile] = SIDE;
    _tile_loadconfig(&config);
}

static void multiply_amx(const uint32_t *a, int64_t a_apart, const uint32_t *b, int64_t b_apart, int64_t squares,
                         float *sums, int32_t more) {
    const int step = BLOCK * sizeof(float), line = SIDE * sizeof(uint32_t);
    if (more) {
        _tile_loadd(0, sums, step);
        _tile_loadd(1, sums + SIDE, step);
        _tile_loadd(2, sums + SIDE * BLOCK, step);
        _tile_loadd(3, sums + SIDE * BLOCK + SIDE, step);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t s = 0; s < squares; s++, a += SQUARE, b += SQUARE) {
        _tile_loadd(4, a, line);
        _tile_loadd(6, b, line);
        _tile_loadd(7, b + b_apart, line);
        _tile_loadd(5, a + a_apart, line);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, step);
    _tile_stored(1, sums + SIDE, step);
    _tile_stored(2, sums + SIDE * BLOCK, step);
    _tile_stored(3, sums + SIDE * BLOCK + SIDE, step);
}
#endif

/* ---------------------------------------------------------------------------------------------------------- scales */

/* Exponents of the smallest and of the largest scale. */
typedef struct { int32_t smallest, largest; } Range;

INLINE int32_t exponent_of(const Side *side, int64_t row_block, int64_t k_block) {
    int64_t at = row_block * side->scale_row_step + k_block * side->scale_k_step;
    if (side->e8m0) return ((const uint8_t *)side->scale)[at] - 127;
    return (int32_t)(bits_of(((const float *)side->scale)[at]) >> 23 & 0xFF) - 127;
}

static int is_zero(const Side *side, int64_t row, int64_t rows, int64_t k, int64_t depth) {
    for (int64_t r = row; r < row + rows; r++)
        for (int64_t i = k; i < k + depth; i++)
            if (((const uint8_t *)side->at)[r * side->row_step + i * side->k_step] & 0x7F) return 0;
    return 1;
}

INLINE __m512i exponents_at(const Side *side, int64_t at, __mmask16 in) {
    if (side->e8m0) return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(in, (const uint8_t *)side->scale + at));
    __m512i bits = _mm512_maskz_loadu_epi32(in, (const float *)side->scale + at);
    return _mm512_and_si512(_mm512_srli_epi32(bits, 23), _mm512_set1_epi32(0xFF));
}

/* take_scales for blocks of one row, whose scales are dense in either direction: 16 rows of 16 blocks at a time. */
static Range take_scales_of_rows(const Side *side, int64_t rows, int64_t k, uint32_t *shifts, int64_t step,
                                 int32_t threads) {
    int32_t smallest = 128, largest = -128;
    int64_t depth = side->block_k, blocks = (k + depth - 1) / depth;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(min : smallest) reduction(max : largest)
    for (int64_t row = 0; row < rows; row += SIDE) {
        const __m512i one = _mm512_set1_epi32(127);
        __mmask16 there = (__mmask16)first_of(rows - row);
        __m512i low = one, high = one, x[SIDE];
        for (int64_t block = 0; block < blocks; block += SIDE) {
            __mmask16 in = (__mmask16)first_of(blocks - block);
            if (side->scale_row_step == 1)
                for (int i = 0; i < SIDE; i++)
                    x[i] = exponents_at(side, row + (block + i) * side->scale_k_step, in >> i & 1 ? there : 0);
            else {
                for (int i = 0; i < SIDE; i++)
                    x[i] = exponents_at(side, (row + i) * side->scale_row_step + block, there >> i & 1 ? in : 0);
                transpose(x);
            }
            for (int i = 0; i < SIDE && block + i < blocks; i++) {
                uint32_t zero = side->e8m0 ? _mm512_mask_testn_epi32_mask(there, x[i], x[i]) : 0;
                for (; zero; zero &= zero - 1) {
                    int lane = __builtin_ctz(zero);
                    int64_t at = (block + i) * depth;
                    if (is_zero(side, row + lane, 1, at, least(depth, k - at)))
                        x[i] = _mm512_mask_mov_epi32(x[i], (__mmask16)(1 << lane), one);
                }
                low = _mm512_mask_min_epi32(low, there, low, x[i]);
                high = _mm512_mask_max_epi32(high, there, high, x[i]);
                __m512i shift = _mm512_slli_epi32(_mm512_sub_epi32(x[i], one), 7);
                shift = _mm512_mask_blend_epi16(0xAAAAAAAA, shift, _mm512_slli_epi32(shift, 16));
                _mm512_storeu_si512(shifts + (block + i) * step + row, shift);
            }
        }
        int32_t least_here = _mm512_reduce_min_epi32(low) - 127, most_here = _mm512_reduce_max_epi32(high) - 127;
        smallest = least_here < smallest ? least_here : smallest;
        largest = most_here > largest ? most_here : largest;
    }
    return (Range){smallest, largest};
}

/* The range of one side's scales; of blocks, what they add to bfloat16's bits, to shifts [k blocks][step] too.
   A block of zeros under the smallest E8M0, 2^-127, does not count: scaled or not, it is zeros. */
static Range take_scales(const Side *side, int64_t rows, int64_t k, uint32_t *shifts, int64_t step, int32_t threads) {
    int32_t smallest = 128, largest = -128;
    if (side->scale == NULL) return (Range){0, 0};
    if (shifts && side->block_rows == 1 && (side->scale_row_step == 1 || side->scale_k_step == 1))
        return take_scales_of_rows(side, rows, k, shifts, step, threads);
    int64_t height = side->block_rows ? side->block_rows : rows, depth = side->block_k ? side->block_k : k;
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(min : smallest) reduction(max : largest)
    for (int64_t block = 0; block < (k + depth - 1) / depth; block++)
        for (int64_t row = 0; row < rows; row += height) {
            int64_t high = least(height, rows - row), at = block * depth;
            int32_t exponent = exponent_of(side, row / height, block);
            if (exponent == -127 && side->e8m0 && is_zero(side, row, high, at, least(depth, k - at))) exponent = 0;
            smallest = exponent < smallest ? exponent : smallest;
            largest = exponent > largest ? exponent : largest;
            uint32_t shift = (uint32_t)(exponent * 128) & 0xFFFF;
            if (shifts)
                for (int64_t r = 0; r < high; r++) shifts[block * step + row + r] = shift | shift << 16;
        }
    return (Range){smallest, largest};
}

/* The float32 that multiplies row (or column) r of the sums. */
INLINE float factor_of(const Side *side, int64_t r) {
    if (side->scale == NULL || side->block_k) return 1;
    int64_t at = side->block_rows ? r / side->block_rows * side->scale_row_step : 0;
    if (!side->e8m0) return ((const float *)side->scale)[at];
    return float_of((uint32_t)((const uint8_t *)side->scale)[at] << 23); /* never 2^-127 or NaN: see Range */
}

/* ---------------------------------------------------------------------------------------------------------- result */

/* Bits whose upper halves are v in bfloat16; NaN is the canonical one. */
INLINE __m512i rounded_up(__m512 v) {
    __m512i u = _mm512_castps_si512(v), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    u = _mm512_add_epi32(_mm512_add_epi32(u, odd), _mm512_set1_epi32(0x7FFF));
    return _mm512_mask_mov_epi32(u, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC00000));
}

/* 32 floats in bfloat16. The instruction for it makes zeros of subnormal numbers, and keeps what a NaN carries. */
INLINE __m512i rounded(__m512 first, __m512 second) {
    const int nan_or_subnormal = 0x01 | 0x20 | 0x80;
    uint32_t other = _mm512_fpclass_ps_mask(first, nan_or_subnormal) | _mm512_fpclass_ps_mask(second, nan_or_subnormal);
    if (__builtin_expect(other == 0, 1)) return (__m512i)_mm512_cvtne2ps_pbh(second, first);
    union { uint16_t at[32]; __m512i vector; } upper;
    for (int i = 0; i < 32; i++) upper.at[i] = (uint16_t)(2 * i + 1);
    return _mm512_permutex2var_epi16(rounded_up(first), upper.vector, rounded_up(second));
}

/* sums [32, 32] to out from row and column on. */
static void finish_block(const float *sums, const Out *out, const float *by_row, const float *by_col, int64_t row,
                         int64_t col, int64_t m, int64_t n) {
    int64_t rows = least(BLOCK, m - row), cols = least(BLOCK, n - col);
    __mmask16 in[2] = {(__mmask16)first_of(cols), (__mmask16)first_of(cols - SIDE)};
    __m512 factor[2], bias[2];
    for (int half = 0; half < 2; half++) {
        factor[half] = _mm512_loadu_ps(by_col + col + half * SIDE);
        bias[half] = out->bias ? _mm512_maskz_loadu_ps(in[half], out->bias + col + half * SIDE) : _mm512_setzero_ps();
    }
    for (int64_t r = 0; r < rows; r++) {
        __m512 by = _mm512_set1_ps(by_row[row + r]), v[2];
        int64_t at = (row + r) * n + col;
        for (int half = 0; half < 2; half++) {
            v[half] = _mm512_mul_ps(_mm512_load_ps(sums + r * BLOCK + half * SIDE), _mm512_mul_ps(by, factor[half]));
            if (out->bias) v[half] = _mm512_add_ps(v[half], bias[half]);
        }
        if (out->bfloat16) {
            __mmask32 inside = (__mmask32)first_of(cols);
            _mm512_mask_storeu_epi16((uint16_t *)out->at + at, inside, rounded(v[0], v[1]));
            continue;
        }
        for (int half = 0; half < 2; half++) {
            float *to = (float *)out->at + at + half * SIDE;
            if (out->add) v[half] = _mm512_add_ps(_mm512_maskz_loadu_ps(in[half], to), v[half]);
            _mm512_mask_storeu_ps(to, in[half], v[half]);
        }
    }
}

/* --------------------------------------------------------------------------------------------------------- product */

INLINE int64_t whole(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/* Up to AT_ONCE panels from panel number `panel` on, none from number `end` on: there is no memory for those. */
static void pack(const Operand *of, const Numbers *numbers, int64_t panel, int64_t end, int paired, uint32_t *to,
                 int64_t words) {
    int64_t panels = least(AT_ONCE, end - panel);
    if (of->format == BFLOAT16) pack_bfloat16(of, numbers, panel, panels, paired, to, words);
    else pack_codes(of, numbers, panel, panels, paired, to, words);
}

/* Strip number `strip` of out; own: memory for its panels of b, then for sums between slices of k. */
static void multiply_strip(int64_t strip, int64_t width, const uint32_t *packed_a, const Operand *b,
                           const Numbers *numbers, const Out *out, const float *by_row, const float *by_col, int64_t m,
                           int64_t n, int64_t k, int32_t kernel, uint32_t *own) {
    int64_t squares = (k + 31) / 32, words = squares * SQUARE, from = strip * width, to = least(n, from + width);
    for (int64_t col = from; col < to; col += AT_ONCE * SIDE)
        pack(b, numbers, col / SIDE, whole(to, BLOCK) / SIDE, 1, own + (col - from) / SIDE * words, words);
    float *kept = (float *)(own + width / SIDE * words);
    for (int64_t top = 0; top < m; top += TALL * BLOCK)
        for (int64_t s = 0; s < squares; s += SLICE)
            for (int64_t col = from; col < to; col += BLOCK)
                for (int64_t row = top; row < least(m, top + TALL * BLOCK); row += BLOCK) {
                    const uint32_t *left = packed_a + row / SIDE * words + s * SQUARE;
                    const uint32_t *right = own + (col - from) / SIDE * words + s * SQUARE;
                    float *sums = kept + ((col - from) / BLOCK * TALL + (row - top) / BLOCK) * BLOCK * BLOCK;
                    int64_t these = least(SLICE, squares - s);
#if HAS_AMX
                    if (kernel == WITH_AMX) multiply_amx(left, words, right, words, these, sums, s > 0);
                    else
#endif
                        multiply_avx512(left, words, right, words, these, sums, s > 0);
                    if (s + SLICE >= squares) finish_block(sums, out, by_row, by_col, row, col, m, n);
                }
    (void)kernel;
}

INLINE Operand operand(const Side *side, int64_t rows, int64_t k, const uint32_t *shifts, int64_t step) {
    return (Operand){side->at, rows, k, side->row_step, side->k_step, side->format, side->block_k ? shifts : NULL,
                     side->block_k, step};
}

INLINE int64_t shift_words(const Side *side, int64_t rows, int64_t k) {
    return side->scale && side->block_k ? (k + side->block_k - 1) / side->block_k * (whole(rows, 64) + 64) : 0;
}

int32_t gemm(const Side *a, const Side *b, const Out *out, int64_t m, int64_t n, int64_t k, int32_t kernel,
             int32_t threads) {
    int64_t words = (k + 31) / 32 * SQUARE, tall = whole(m, BLOCK), wide = whole(n, BLOCK);
    int64_t strips = threads * ((n + STRIP * threads - 1) / (STRIP * threads));
    int64_t width = whole((n + strips - 1) / strips, BLOCK);
    strips = (n + width - 1) / width;
    int64_t own = width / SIDE * words + width * TALL * BLOCK;
    int64_t shifts_a = shift_words(a, m, k), shifts_b = shift_words(b, n, k);
    int64_t total = tall / SIDE * words + threads * own + whole(shifts_a + shifts_b, SIDE) + tall + wide;
    uint32_t *memory = aligned_alloc(64, (size_t)whole(total, SIDE) * sizeof(uint32_t));
    if (memory == NULL) return -1;
    uint32_t *packed_a = memory, *owned = packed_a + tall / SIDE * words, *shifts = owned + threads * own;
    float *by_row = (float *)(shifts + whole(shifts_a + shifts_b, SIDE)), *by_col = by_row + tall;
    Range of_a = take_scales(a, m, k, shifts_a ? shifts : NULL, whole(m, 64) + 64, threads);
    Range of_b = take_scales(b, n, k, shifts_b ? shifts + shifts_a : NULL, whole(n, 64) + 64, threads);
    int32_t low = of_a.smallest + of_b.smallest, high = of_a.largest + of_b.largest + 2;
    if (least(low, least(of_a.smallest, of_b.smallest)) < -100 || high > 80 || of_a.largest > 78 || of_b.largest > 78) {
        free(memory);
        return 1;
    }
    for (int64_t r = 0; r < m; r++) by_row[r] = factor_of(a, r);
    for (int64_t c = 0; c < wide; c++) by_col[c] = c < n ? factor_of(b, c) : 0;
    Operand left = operand(a, m, k, shifts, whole(m, 64) + 64);
    Operand right = operand(b, n, k, shifts + shifts_a, whole(n, 64) + 64);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        uint64_t before = use_ieee();
        Numbers numbers_a = numbers_of(a->format), numbers_b = numbers_of(b->format);
#pragma omp for
        for (int64_t panel = 0; panel < tall / SIDE; panel += AT_ONCE)
            pack(&left, &numbers_a, panel, tall / SIDE, 0, packed_a + panel * words, words);
#if HAS_AMX
        if (kernel == WITH_AMX) use_tiles();
#endif
#pragma omp for schedule(dynamic)
        for (int64_t strip = 0; strip < strips; strip++)
            multiply_strip(strip, width, packed_a, &right, &numbers_b, out, by_row, by_col, m, n, k, kernel,
                           owned + omp_get_thread_num() * own);
#if HAS_AMX
        if (kernel == WITH_AMX) _tile_release();
#endif
        use_again(before);
    }
    free(memory);
    return 0;
}

#else

int32_t has_gemm(void) { return 0; }

int32_t gemm(const Side *a, const Side *b, const Out *out, int64_t m, int64_t n, int64_t k, int32_t kernel,
             int32_t threads) {
    (void)a, (void)b, (void)out, (void)m, (void)n, (void)k, (void)kernel, (void)threads;
    return 1;
}

#endif
