/* gemm.c's products for processors without bfloat16 instructions: AVX2, AVX512 without BF16, Arm. Float32 throughout.

   Codes become float32 numbers as they are packed, and no matrix of them is written: of a, up to TALL rows are held; of b a
   panel of some columns and DEPTH of k is packed into the first cache right before the inner loop reads it, for all rows
   that are held. Powers of two that blocks of k share are multiplied in on that way, exactly. Float16 is the way from a
   code to float32, for which there are instructions, and which has all numbers of both formats: E4M3's come out as 2^-8 of
   themselves, and a is multiplied by what b's numbers and its own lack.

   Each element of out is one chain of fused multiply-adds over k, from first to last, whatever m, n, the number of threads,
   and the processor: AVX2, AVX512 and Arm give the same bits. So products with few rows (skinny_gemm.c) are these.

   Rejected: torch's float32 product of decoded matrices: the way through memory takes half as long as the product, MKL's
   order of sums depends on threads, and torch's bfloat16 product, for results in bfloat16, is six times slower than
   float32 without such instructions. Rejected: sums of a slice in panels of both operands, as gemm.c has them: b's slices
   then leave the first cache, and nothing is gained without tiles. */

#include <omp.h>
#include <stdlib.h>

#include "gemm_float32.h"
#include "scale_range.h"

#if HAS_FLOAT32

#define TALL 264        /* rows of a that are held, at most: a multiple of GROUP */
#define WIDE 512        /* columns whose sums wait together */
#define LAYER 2048      /* of k that is held; a multiple of DEPTH */

int32_t has_gemm_float32(void) { return WITH_FLOAT32; }

INLINE int64_t whole(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/* One operand, and what its numbers are multiplied by besides scales. */
typedef struct { const Side *side; int64_t rows, k; float lift; } Operand;

typedef struct {
    Operand a, b;
    const Out *out;
    const float *by_row, *by_col;
} Job;

/* --------------------------------------------------------------------------------------------------------- packing */

/* Where the scales of sixteen rows are, for the first block of k. */
typedef struct { int64_t at[TILE]; } Rows;

INLINE Rows rows_of(const Operand *of, int64_t row) {
    Rows rows = {{0}};
    const Side *side = of->side;
    if (side->scale == NULL || side->block_k == 0 || side->block_rows == 0) return rows;
    int64_t block = row / side->block_rows, left = side->block_rows - row % side->block_rows; /* rows of this block */
    for (int i = 0; i < TILE; i++) {
        rows.at[i] = block * side->scale_row_step;
        if (--left == 0 && row + i + 1 < of->rows) block++, left = side->block_rows;
    }
    return rows;
}

/* What the numbers of sixteen rows are multiplied by, in the block that k lies in. */
INLINE void factors_at(const Operand *of, const Rows *rows, int64_t k, float by[TILE]) {
    const Side *side = of->side;
    for (int i = 0; i < TILE; i++) by[i] = of->lift;
    if (side->scale == NULL || side->block_k == 0) return;
    int64_t block = k / side->block_k * side->scale_k_step;
    if (side->e8m0) { /* the smallest one belongs to a block of zeros: see Range */
        const uint8_t *scale = (const uint8_t *)side->scale + block;
        for (int i = 0; i < TILE; i++) by[i] *= float_of((uint32_t)scale[rows->at[i]] << 23);
    } else {
        const float *scale = (const float *)side->scale + block;
        for (int i = 0; i < TILE; i++) by[i] *= scale[rows->at[i]];
    }
}

/* Codes of sixteen rows and 32 k, zeros where there are none. Lines of k: the two of each row; or of rows (across): those
   of k and of k + 16. */
INLINE void fetch_codes(const Operand *of, int64_t row, int64_t k, int32_t across, Lines to[TILE]) {
    const Side *side = of->side;
    int32_t along = side->k_step == 1; /* how they lie in memory */
    int64_t rows = of->rows - row, depth = of->k - k;
    const uint8_t *from = (const uint8_t *)side->at + row * side->row_step + k * side->k_step;
    if (rows >= TILE && depth >= 2 * TILE) {
        int64_t step = along ? side->row_step : side->k_step;
        const uint8_t *ahead = from + least(depth - 2 * TILE, 4 * TILE) * step; /* lines that are far apart are fetched */
#pragma GCC unroll 16
        for (int i = 0; i < TILE; i++) {
            to[i] = along ? two_lines(from + i * step) : lines_of(from + i * step, from + (i + TILE) * step);
            if (!along) __builtin_prefetch(ahead + i * step), __builtin_prefetch(ahead + (i + TILE) * step);
        }
    } else {
        uint8_t there[TILE][2][TILE] = {0};
        for (int64_t r = 0; r < least(TILE, rows); r++)
            for (int64_t c = 0; c < least(2 * TILE, depth); c++)
                there[along ? r : c % TILE][c / TILE][along ? c % TILE : r] = from[r * side->row_step + c * side->k_step];
        for (int i = 0; i < TILE; i++) to[i] = lines_of(there[i][0], there[i][1]);
    }
    if (along == across) turn(to, 1);
}

/* Numbers of sixteen rows and 32 k, zeros where there are none, times by[row] if they are scaled: a row's k in a line of
   `apart` numbers, or (across) a k's rows. */
INLINE void pack_codes(const Operand *of, int64_t row, int64_t k, const int32_t format, const int32_t finite,
                       const int32_t across, const int32_t scaled, const float by[TILE], float *to, const int64_t apart) {
    Lines codes[TILE];
    fetch_codes(of, row, k, across, codes);
#pragma GCC unroll 16
    for (int i = 0; i < TILE; i++) {
        Piece numbers[2][PARTS];
        numbers_of_lines(codes[i], format, finite, numbers);
#pragma GCC unroll 8
        for (int part = 0; part < 2 * PARTS; part++) {
            int line = part / PARTS, at = part % PARTS * (TILE / PARTS);
            Piece v = numbers[line][part % PARTS];
            if (scaled) v = across ? times(v, by + at) : times_all(v, by[i]);
            store_part(to + (across ? (i + line * TILE) * apart : i * apart + line * TILE) + at, v);
        }
    }
}

/* Sixteen lines of sixteen numbers become columns: to[c][line], times by[line], or (each) by[c]. */
INLINE void turn_bfloat16(const uint16_t *from, int64_t step, const float by[TILE], const int32_t by_line, float *to,
                          const int64_t apart) {
    Lines x[TILE];
#pragma GCC unroll 16
    for (int i = 0; i < TILE; i++) {
        x[i] = two_lines((const uint8_t *)(from + i * step));
        __builtin_prefetch((const void *)((uintptr_t)(from + i * step) + 128)); /* lines are far apart */
    }
    turn(x, 2);
#pragma GCC unroll 16
    for (int i = 0; i < TILE; i++)
#pragma GCC unroll 4
        for (int at = 0; at < PARTS; at++) { /* PARTS of a half line, both lines */
            int line = at / (PARTS / 2), part = at % (PARTS / 2), c = i / 2 + line * 8, row = i % 2 * 8 + part * 4;
            Piece v = part_of_pairs(x[i], line, part);
            store_part(to + c * apart + row, by_line ? times(v, by + row) : times_all(v, by[c]));
        }
}

INLINE void pack_bfloat16(const Operand *of, int64_t row, int64_t k, const int32_t across, const float by[TILE], float *to,
                          const int64_t apart) {
    const Side *side = of->side;
    const int64_t down = side->row_step, right = side->k_step;
    const uint16_t *from = (const uint16_t *)side->at + row * down + k * right;
    int64_t rows = least(TILE, of->rows - row), depth = least(2 * TILE, of->k - k);
    if (rows == TILE && depth == 2 * TILE && (across ? down : right) == 1) { /* as they lie, whole vectors at a time */
        if (across)
            for (int c = 0; c < 2 * TILE; c++)
                for (int r = 0; r < TILE; r++) to[c * apart + r] = load_bfloat16(from[c * right + r]) * by[r];
        else
            for (int r = 0; r < TILE; r++)
                for (int c = 0; c < 2 * TILE; c++) to[r * apart + c] = load_bfloat16(from[r * down + c]) * by[r];
        return;
    }
    if (rows == TILE && depth == 2 * TILE && (across ? right : down) == 1) { /* they lie the other way */
        for (int64_t half = 0; half < 2; half++) {
            if (across) turn_bfloat16(from + half * TILE, down, by, 1, to + half * TILE * apart, apart);
            else turn_bfloat16(from + half * TILE * right, right, by, 0, to + half * TILE, apart);
        }
        return;
    }
    for (int64_t r = 0; r < TILE; r++)
        for (int64_t c = 0; c < 2 * TILE; c++) {
            float *at = to + (across ? c * apart + r : r * apart + c);
            *at = r < rows && c < depth ? load_bfloat16(from[r * down + c * right]) * by[r] : 0;
        }
}

/* So many k of sixteen rows, tile by tile; as many bytes from `ahead` on are fetched meanwhile. */
INLINE void pack_rows(const Operand *of, int64_t row, int64_t from, int64_t depth, const int32_t across,
                      const uint8_t *ahead, float *to, const int64_t apart) {
    const Side *side = of->side;
    const int64_t block = side->scale ? side->block_k : 0;
    const int32_t scaled = block || of->lift != 1;
    int64_t next = block ? (from / block + 1) * block : INT64_MAX;
    Rows rows = rows_of(of, row);
    float by[TILE];
    factors_at(of, &rows, from, by);
    for (int64_t k = from; k < from + depth; k += 2 * TILE, to += across ? 2 * TILE * apart : 2 * TILE) {
        if (k >= next) factors_at(of, &rows, k, by), next += block;
        if (ahead)
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        if (side->format == BFLOAT16) pack_bfloat16(of, row, k, across, by, to, apart);
        else if (side->format == E5M2 && scaled) pack_codes(of, row, k, E5M2, 1, across, 1, by, to, apart);
        else if (side->format == E5M2) pack_codes(of, row, k, E5M2, 1, across, 0, by, to, apart);
        else if (side->finite && scaled) pack_codes(of, row, k, E4M3, 1, across, 1, by, to, apart);
        else if (side->finite) pack_codes(of, row, k, E4M3, 1, across, 0, by, to, apart);
        else if (scaled) pack_codes(of, row, k, E4M3, 0, across, 1, by, to, apart);
        else pack_codes(of, row, k, E4M3, 0, across, 0, by, to, apart);
    }
}

/* Of a: rows from `row` on, as slices [rows, whole tiles][DEPTH] of k. */
static void pack_a(const Operand *of, int64_t row, int64_t rows, int64_t from, int64_t depth, float *to) {
    int64_t tall = whole(rows, TILE);
    for (int64_t k = 0; k < depth; k += DEPTH, to += tall * DEPTH)
        for (int64_t r = 0; r < rows; r += TILE)
            pack_rows(of, row + r, from + k, least(DEPTH, depth - k), 0, NULL, to + r * DEPTH, DEPTH);
}

/* Of b: a panel of columns, [depth, whole tiles][PANEL]; as many bytes from `ahead` on are fetched meanwhile. */
static void pack_b(const Operand *of, int64_t col, int64_t from, int64_t depth, const uint8_t *ahead, float *to) {
    for (int64_t c = 0; c < PANEL; c += TILE) {
        if (col + c < of->rows) pack_rows(of, col + c, from, depth, 1, ahead ? ahead + c * depth : NULL, to + c, PANEL);
        else for (int64_t k = 0; k < depth; k++) memset(to + k * PANEL + c, 0, TILE * sizeof(float));
    }
}

/* --------------------------------------------------------------------------------------------------------- product */

/* One or two rows are multiplied by several panels together, so that sums need not wait for those of the k before. */
#if VECTORS == 2
#define PANELS_OF_ONE 4
#define OF_ONE multiply_1_4
#else
#define PANELS_OF_ONE 2
#define OF_ONE multiply_1_2
#endif

typedef void Multiply(const float *a, const float *b, int64_t depth, float *sums, int64_t apart, int32_t more);

#define ROWS(N, PANELS) ROWS_(N, PANELS)
#define ROWS_(N, PANELS)                                                                                            \
    static void multiply_##N##_##PANELS(const float *a, const float *b, int64_t depth, float *sums, int64_t apart,  \
                                        int32_t more) {                                                             \
        multiply_rows(a, b, depth, sums, apart, more, N, PANELS);                                                   \
    }
#if GROUP > 6
ROWS(7, 1) ROWS(8, 1) ROWS(9, 1) ROWS(10, 1) ROWS(11, 1) ROWS(12, 1)
#endif
ROWS(1, 1) ROWS(2, 1) ROWS(3, 1) ROWS(4, 1) ROWS(5, 1) ROWS(6, 1)
ROWS(1, PANELS_OF_ONE) ROWS(2, 2)

static Multiply *const OF_ROWS[] = {
    NULL, multiply_1_1, multiply_2_1, multiply_3_1, multiply_4_1, multiply_5_1, multiply_6_1,
#if GROUP > 6
    multiply_7_1, multiply_8_1, multiply_9_1, multiply_10_1, multiply_11_1, multiply_12_1,
#endif
};

/* Complete sums of a row to out, `cols` of them. */
static void finish_row(const Job *job, const float *sums, int64_t row, int64_t col, int64_t cols) {
    const Out *out = job->out;
    const float by = job->by_row[row], *by_col = job->by_col + col, *bias = out->bias ? out->bias + col : NULL;
    int64_t at = row * job->b.rows + col;
    float done[WIDE];
    for (int64_t i = 0; i < cols; i++) done[i] = sums[i] * (by * by_col[i]);
    if (bias) for (int64_t i = 0; i < cols; i++) done[i] += bias[i];
    float *to = (float *)out->at + at;
    if (out->bfloat16) for (int64_t i = 0; i < cols; i++) ((uint16_t *)out->at)[at + i] = store_sum(done[i]);
    else if (out->add) for (int64_t i = 0; i < cols; i++) to[i] += done[i];
    else memcpy(to, done, (size_t)cols * sizeof(float));
}

/* Where codes of b's rows from `row` on begin, which are read next: memory is fetched as it lies. NULL: not in one piece. */
INLINE const uint8_t *ahead_of(const Operand *b, int64_t row) {
    int32_t dense = b->side->k_step == 1 && b->side->row_step == b->k && b->side->format != BFLOAT16;
    return dense ? (const uint8_t *)b->side->at + least(row, b->rows) * b->k : NULL;
}

/* Rows and columns of out, which one thread makes. */
typedef struct { int64_t row, rows, col, cols; } Part;

INLINE int64_t held_by(int64_t rows, int64_t k) { return whole(least(TALL, rows), TILE) * whole(least(LAYER, k), DEPTH); }
INLINE int64_t sums_of(int64_t rows) { return whole(least(TALL, rows), GROUP) * WIDE; }

/* own: memory for what is held of a, a slice of a panel of b, and sums. */
static void multiply_part(const Job *job, Part part, float *own) {
    int64_t k = job->a.k;
    float *slice = own + held_by(part.rows, k), *sums = slice + DEPTH * PANEL;
    int64_t strips = (part.rows + TALL - 1) / TALL, rows = whole((part.rows + strips - 1) / strips, GROUP);
    for (int64_t row = part.row; row < part.row + part.rows; row += rows) {
        int64_t high = least(rows, part.row + part.rows - row), tall = whole(high, TILE);
        int64_t panels = high == 1 ? PANELS_OF_ONE : high == 2 ? 2 : 1, deep = DEPTH / panels;
        for (int64_t col = part.col; col < part.col + part.cols; col += WIDE) {
            int64_t wide = least(WIDE, part.col + part.cols - col);
            for (int64_t first = 0; first < k; first += LAYER) {
                int64_t layer = least(LAYER, k - first);
                if (col == part.col || k > LAYER) pack_a(&job->a, row, high, first, layer, own);
                for (int64_t c = 0; c < wide; c += panels * PANEL) {
                    const uint8_t *ahead = ahead_of(&job->b, col + c + panels * PANEL);
                    for (int64_t s = 0; s < layer; s += deep) {
                        const float *held = own + s / DEPTH * tall * DEPTH + s % DEPTH;
                        int64_t depth = least(deep, layer - s);
                        for (int64_t p = 0; p < panels; p++)
                            pack_b(&job->b, col + c + p * PANEL, first + s, depth,
                                   ahead ? ahead + (s * panels + p * depth) * PANEL : NULL, slice + p * deep * PANEL);
                        for (int64_t r = 0; r < high; r += GROUP) {
                            Multiply *multiply = panels == 1 ? OF_ROWS[least(GROUP, high - r)] : high == 1 ? OF_ONE : multiply_2_2;
                            multiply(held + r * DEPTH, slice, depth, sums + r * WIDE + c, WIDE, first + s > 0);
                        }
                    }
                }
            }
            for (int64_t r = 0; r < high; r++) finish_row(job, sums + r * WIDE, row + r, col, wide);
        }
    }
}

static Range range_of(const Side *side, int64_t rows, int64_t k, int32_t threads) {
    int32_t smallest = 128, largest = -128;
    if (side->scale == NULL) return (Range){0, 0};
    int64_t height = side->block_rows ? side->block_rows : rows, depth = side->block_k ? side->block_k : k;
    int64_t blocks = (k + depth - 1) / depth;
    if ((rows + height - 1) / height * blocks < 1 << 15) threads = 1; /* to wait for others would take longer */
#pragma omp parallel for num_threads(threads) if (threads > 1) reduction(min : smallest) reduction(max : largest)
    for (int64_t row = 0; row < rows; row += height)
        for (int64_t block = 0; block < blocks; block++) {
            int32_t exponent = exponent_of(side, row / height, block);
            if (exponent == -127 && side->e8m0) {
                int64_t high = least(height, rows - row), at = block * depth;
                if (is_zero(side, row, high, at, least(depth, k - at))) exponent = 0;
            }
            smallest = exponent < smallest ? exponent : smallest;
            largest = exponent > largest ? exponent : largest;
        }
    return (Range){smallest, largest};
}

/* How many strips of rows, so that threads have equal parts of out that are as square as they can be: each thread packs
   its rows of a and columns of b. */
static int64_t strips_of(int64_t m, int64_t n, int32_t threads) {
    int64_t best = 1, best_sides = INT64_MAX;
    for (int64_t down = 1; down <= threads; down++) {
        if (threads % down) continue;
        int64_t sides = whole((m + down - 1) / down, GROUP) + whole((n + threads / down - 1) / (threads / down), PANEL);
        if (sides < best_sides) best = down, best_sides = sides;
    }
    return best;
}

int32_t gemm_float32(const Side *a, const Side *b, const Out *out, int64_t m, int64_t n, int64_t k, int32_t checked,
                     int32_t threads) {
    if (!checked && !stays_normal(range_of(a, m, k, threads), range_of(b, n, k, threads))) return 1;
    int64_t down = strips_of(m, n, threads), across = threads / down;
    int64_t high = whole((m + down - 1) / down, GROUP), wide = whole((n + across - 1) / across, PANEL);
    int64_t each = whole(held_by(least(high, m), k) + DEPTH * PANEL + sums_of(least(high, m)), PANEL);
    float *memory = aligned_alloc(64, (size_t)whole(each * threads + m + n, PANEL) * sizeof(float));
    if (memory == NULL) return -1;
    float *by_row = memory + each * threads, *by_col = by_row + m;
    float lift = (a->format == E4M3 ? 0x1p8f : 1) * (b->format == E4M3 ? 0x1p8f : 1);
    const float late = a->format == BFLOAT16 ? lift : 1; /* bfloat16 numbers may leave float32's range by it: sums take it */
    for (int64_t r = 0; r < m; r++) by_row[r] = factor_of(a, r) * late;
    for (int64_t c = 0; c < n; c++) by_col[c] = factor_of(b, c);
    Job job = {{a, m, k, lift / late}, {b, n, k, 1}, out, by_row, by_col};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        uint64_t before = use_ieee();
#pragma omp for schedule(static)
        for (int64_t i = 0; i < down * across; i++) {
            int64_t row = i / across * high, col = i % across * wide;
            Part part = {row, least(high, m - row), col, least(wide, n - col)};
            if (part.rows > 0 && part.cols > 0) multiply_part(&job, part, memory + omp_get_thread_num() * each);
        }
        use_again(before);
    }
    free(memory);
    return 0;
}

#else

int32_t has_gemm_float32(void) { return 0; }

int32_t gemm_float32(const Side *a, const Side *b, const Out *out, int64_t m, int64_t n, int64_t k, int32_t checked,
                     int32_t threads) {
    (void)a, (void)b, (void)out, (void)m, (void)n, (void)k, (void)checked, (void)threads;
    return 1;
}

#endif
