/* Products of FP8 codes, or of bfloat16 numbers, with float32 sums: out [m, n] = a [m, k] b [n, k]^T * scales + bias.

   For processors with AVX512-BF16, and for AMX. As in any fast GEMM both operands are first packed into panels that the
   inner loops read from end to end (inner.h), and codes are decoded on that way (pack.h): no matrix of decoded numbers is
   written. What is packed never leaves a core's second cache, since the way to the third takes as long as to multiply:

   * of one operand a strip is held, up to 512 rows of it and all of k, or a layer of k. It is the one with far fewer rows,
     where there is one: a prompt's tokens and not the weight, which is then decoded once;
   * the other one is streamed by it in slices of 128 rows and 256 of k (128 without AMX). A slice is packed anew for each
     strip, between the tile products of the slice before it, so that a strip's sums cost little more than their products;
   * sums that are complete go to out in whole rows of the strip, between the tile products of the next ones.

   Rejected: to pack one operand once, for all strips and threads: to write it to the third cache, and to read it from there
   for each strip, takes longer than to decode it. Rejected: to write out in blocks of 32 columns, a line here and a line
   there, which memory takes at a fraction of its speed.

   Sums go on from slice to slice as they are, so an element of out depends on its row and column alone: it is summed over
   k in one order for any m, n and number of threads. AVX512-BF16 and AMX differ in that order. Subnormal numbers and
   products count as zero, as the instructions have it; out is scaled and rounded in IEEE arithmetic. */

#if defined(__linux__)
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include <omp.h>
#include <stdlib.h>

#include "gemm.h"
#include "inner.h"
#include "pack.h"
#include "scales.h"

#if defined(__AVX512BF16__)

#define SLICE (HAS_AMX ? 8 : 4) /* squares of k: those of four panels then stay in a first cache of 48 KB, or of 32 */
#define TALL 4                  /* blocks of 32 rows of a slice */
#define HIGH 32                 /* blocks of rows whose sums are kept where k is too long for one layer */

/* The inner loops this processor has; AMX after asking the system for its registers, for the whole process. */
int32_t has_gemm(void) {
    int32_t found = WITH_AVX512 + has_gemm_float32();
#if HAS_AMX
    const long ask_for = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM */
    if (syscall(SYS_arch_prctl, ask_for, tile_data) == 0) found |= WITH_AMX;
#endif
    return found;
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
    enum { nan_or_subnormal = 0x01 | 0x20 | 0x80 }; /* an immediate without optimisation, too */
    uint32_t other = _mm512_fpclass_ps_mask(first, nan_or_subnormal) | _mm512_fpclass_ps_mask(second, nan_or_subnormal);
    if (__builtin_expect(other == 0, 1)) return (__m512i)_mm512_cvtne2ps_pbh(second, first);
    union { uint16_t at[32]; __m512i vector; } upper;
    for (int i = 0; i < 32; i++) upper.at[i] = (uint16_t)(2 * i + 1);
    return _mm512_permutex2var_epi16(rounded_up(first), upper.vector, rounded_up(second));
}

/* 32 sums of a row to out at row and column, times by[row] and the columns' factors. */
INLINE void finish_32(const float *sums, const Out *out, float by_row, const float *by_col, int64_t row, int64_t col,
                      int64_t n) {
    __mmask32 inside = (__mmask32)first_of(n - col);
    __mmask16 in[2] = {(__mmask16)inside, (__mmask16)(inside >> SIDE)};
    __m512 by = _mm512_set1_ps(by_row), v[2];
    int64_t at = row * n + col;
    for (int half = 0; half < 2; half++) {
        __m512 factor = _mm512_mul_ps(by, _mm512_loadu_ps(by_col + col + half * SIDE));
        v[half] = _mm512_mul_ps(_mm512_load_ps(sums + half * SIDE), factor);
        if (out->bias) v[half] = _mm512_add_ps(v[half], _mm512_maskz_loadu_ps(in[half], out->bias + col + half * SIDE));
    }
    if (out->bfloat16) {
        _mm512_mask_storeu_epi16((uint16_t *)out->at + at, inside, rounded(v[0], v[1]));
        return;
    }
    for (int half = 0; half < 2; half++) {
        float *to = (float *)out->at + at + half * SIDE;
        if (out->add) v[half] = _mm512_add_ps(_mm512_maskz_loadu_ps(in[half], to), v[half]);
        _mm512_mask_storeu_ps(to, in[half], v[half]);
    }
}

/* --------------------------------------------------------------------------------------------------------- product */

INLINE int64_t whole(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/* Up to AT_ONCE panels from panel number `panel` on, none from number `end` on: there is no memory for those. */
static void pack(const Operand *of, const Numbers *numbers, int64_t panel, int64_t end, int paired, uint32_t *to,
                 int64_t words) {
    int64_t panels = least(AT_ONCE, end - panel);
    if (of->format == BFLOAT16) pack_bfloat16(of, numbers, panel, panels, paired, to, words);
    else if (of->format == E2M1) pack_fp4(of, numbers, panel, panels, paired, to, words);
    else pack_codes(of, numbers, panel, panels, paired, to, words);
}

/* A product under way. Its operands are held and streamed, one of them a and the other one b. The streamed one comes in
   pieces, for which it lies as its squares do; the held one's squares are the others. So where a's are those of pairs the
   sums of a block are turned, [b][a], until they are complete. */
typedef struct {
    Operand held, streamed;
    Numbers numbers_held, numbers_streamed;
    const Out *out;
    const float *by_row, *by_col;
    int64_t m, n, squares, layer, width; /* layer: squares of k that are held at once; width: rows of the held, at most */
    int32_t kernel, holds_a, turned;
} Job;

/* A part of out, which one thread makes: rows of the streamed operand, and of the held one; `high` of the former meet a
   layer of k before the next layer is held. */
typedef struct { int64_t rows_from, rows_to, from, to, high; } Part;

/* A slice: rows from `top` on, squares from s on, in the layer that begins with `first`, of the rows from `high` on. */
typedef struct { int64_t high, first, top, s; } Place;

/* Complete sums on their way to out: `blocks` of 32 x 32 side by side, of which `next` rows are there. */
typedef struct { const float *sums; int64_t row, col, blocks, next; } Done;

/* Rows of out that a block's sums are going to, to be fetched from memory while they are made. */
typedef struct { const char *at; int64_t step, rows; } Fetch;

/* What is done with each square that is multiplied, and how much of it. */
struct Beside {
    const Job *job;
    Pieces pieces; /* of the next slice */
    Done done;     /* sums: NULL where there are none */
    Fetch fetch;
    int64_t pieces_each, rows_each, fetched_each;
};

/* So many rows more of complete sums to out, each from end to end: memory is written in its order. */
INLINE void finish_rows(const Job *job, Done *done, int64_t rows) {
    int64_t all = least(BLOCK, job->m - done->row);
    for (int64_t end = least(all, done->next + rows); done->next < end; done->next++)
        for (int64_t i = 0; i < done->blocks; i++)
            finish_32(done->sums + (i * BLOCK + done->next) * BLOCK, job->out, job->by_row[done->row + done->next],
                      job->by_col, done->row + done->next, done->col + i * BLOCK, job->n);
    if (done->next == all) done->sums = NULL;
}

static __attribute__((noinline)) void work_beside(Beside *beside) {
    Pieces *pieces = &beside->pieces;
    for (int64_t i = 0; i < beside->pieces_each && pieces->next < pieces->count; i++) pack_piece(pieces);
    if (beside->done.sums) finish_rows(beside->job, &beside->done, beside->rows_each);
}

/* A part of a block's rows of out, four times a square: fetched all at once they would wait for each other. */
INLINE void fetch_beside(Beside *beside) {
    Fetch *fetch = &beside->fetch;
    for (int64_t i = 0; i < beside->fetched_each && fetch->rows > 0; i++, fetch->rows--, fetch->at += fetch->step) {
        __builtin_prefetch(fetch->at, 1);
        __builtin_prefetch(fetch->at + 64, 1);
    }
}

INLINE Fetch fetch_of(const Job *job, int64_t row, int64_t col) {
    int64_t size = job->out->bfloat16 ? 2 : 4;
    return (Fetch){(const char *)job->out->at + (row * job->n + col) * size, job->n * size, least(BLOCK, job->m - row)};
}

INLINE int64_t blocks_of(int64_t n) { return (n + BLOCK - 1) / BLOCK; }
INLINE int64_t end_of_layer(const Job *job, const Place *at) { return least(job->squares, at->first + job->layer); }
INLINE int64_t end_of_high(const Part *part, const Place *at) { return least(part->rows_to, at->high + part->high); }
INLINE int64_t end_of(const Part *part, const Place *at) { return least(end_of_high(part, at), at->top + TALL * BLOCK); }

/* To the next slice; whether there is one. */
static int advance(const Job *job, const Part *part, Place *at) {
    at->s += SLICE;
    if (at->s < end_of_layer(job, at)) return 1;
    at->s = at->first;
    at->top += TALL * BLOCK;
    if (at->top < end_of_high(part, at)) return 1;
    at->s = at->first += job->layer;
    at->top = at->high;
    if (at->first < job->squares) return 1;
    at->s = at->first = 0;
    at->top = at->high += part->high;
    return at->high < part->rows_to;
}

/* Squares first to last of rows from to end, packed: panels of so many words. */
static void pack_part(Operand of, const Numbers *numbers, int64_t from, int64_t end, int64_t first, int64_t last,
                      int paired, uint32_t *to, int64_t words) {
    of.from = first * 32;
    of.k = least(of.k, last * 32);
    for (int64_t row = from; row < end; row += AT_ONCE * SIDE)
        pack(&of, numbers, row / SIDE, whole(end, BLOCK) / SIDE, paired, to + (row - from) / SIDE * words, words);
}

/* The pieces of a slice, which fetch what the slice after it reads. */
static Pieces begin_slice(const Job *job, const Part *part, const Place *at, uint32_t *slice) {
    const Operand *of = &job->streamed;
    int64_t squares = least(SLICE, end_of_layer(job, at) - at->s), rows = whole(end_of(part, at) - at->top, BLOCK);
    Place next = *at;
    if (!advance(job, part, &next)) next = *at;
    return pieces_of(of, &job->numbers_streamed, at->top, rows, at->s * 32, squares, next.top - at->top,
                     (next.s - at->s) * 32, slice, SLICE * SQUARE);
}

/* sums [32, 32], in place. */
static void turn_block(float *sums) {
    __m512i x[SIDE], y[SIDE];
    for (int i = 0; i < 2; i++)
        for (int j = 0; j <= i; j++) {
            float *one = sums + (i * BLOCK + j) * SIDE, *other = sums + (j * BLOCK + i) * SIDE;
            for (int r = 0; r < SIDE; r++) x[r] = _mm512_load_si512(one + r * BLOCK);
            for (int r = 0; r < SIDE; r++) y[r] = _mm512_load_si512(other + r * BLOCK);
            transpose(x);
            transpose(y);
            for (int r = 0; r < SIDE; r++) _mm512_store_si512(other + r * BLOCK, x[r]);
            for (int r = 0; r < SIDE; r++) _mm512_store_si512(one + r * BLOCK, y[r]);
        }
}

/* A slice by all that is held; kept: sums of these rows, [blocks of rows of out][blocks of columns][32, 32]; after: what
   the slice after it reads first of what is held, or NULL. */
static void multiply_slice(Beside *beside, const Part *part, const Place *at, const uint32_t *slice, const uint32_t *held,
                           const uint32_t *after, float *kept) {
    const Job *job = beside->job;
    int64_t words = least(job->layer, job->squares) * SQUARE, apart = SLICE * SQUARE, end = end_of(part, at);
    int64_t squares = least(SLICE, end_of_layer(job, at) - at->s), there = (at->s - at->first) * SQUARE;
    int64_t moving = blocks_of(end - at->top), still = blocks_of(part->to - part->from);
    int64_t down = job->holds_a ? still : moving, across = job->holds_a ? moving : still;
    int64_t out_row = job->holds_a ? part->from : at->top, out_col = job->holds_a ? at->top : part->from;
    int32_t last = at->s + squares == job->squares, more = at->s > 0, held_left = job->holds_a != job->turned;
    beside->pieces_each = (beside->pieces.count + down * across * squares - 1) / (down * across * squares);
    beside->rows_each = (BLOCK + across * squares - 1) / (across * squares);
    beside->fetched_each = (BLOCK / 4 + squares - 1) / squares;
    for (int64_t row = 0; row < down; row++) {
        float *sums = kept + row * across * BLOCK * BLOCK;
        if (beside->done.sums == sums) finish_rows(job, &beside->done, BLOCK); /* before they become others */
        for (int64_t col = 0; col < across; col++) {
            Panels of_slice = {slice + (job->holds_a ? col : row) * 2 * apart, apart};
            Panels of_held = {held + (job->holds_a ? row : col) * 2 * words + there, words};
            Panels a = held_left ? of_held : of_slice, b = held_left ? of_slice : of_held;
            const uint32_t *then = job->holds_a || row + 1 == down ? after : held + there; /* behind the last one */
            if ((job->holds_a ? row : col) + 1 < still) then = of_held.at + 2 * words;
            Panels next = {job->holds_a && col + 1 < across ? NULL : then, words}; /* NULL: the same again */
            if (last) beside->fetch = fetch_of(job, out_row + row * BLOCK, out_col + col * BLOCK);
#if HAS_AMX
            if (job->kernel == WITH_AMX)
                multiply_amx(a, b, squares, sums + col * BLOCK * BLOCK, more, beside);
            else
#endif
                multiply_avx512(a, b, squares, sums + col * BLOCK * BLOCK, more, next, beside);
            if (last && job->turned) turn_block(sums + col * BLOCK * BLOCK);
        }
        if (last) beside->done = (Done){sums, out_row + row * BLOCK, out_col, across, 0};
    }
    while (beside->pieces.next < beside->pieces.count) pack_piece(&beside->pieces);
}

/* own: memory for what is held, two slices and sums. */
static void multiply_part(const Job *job, Part part, uint32_t *own) {
    int64_t words = least(job->layer, job->squares) * SQUARE, size = TALL * 2 * SLICE * SQUARE;
    uint32_t *slices = own + job->width / SIDE * words;
    float *kept = (float *)(slices + 2 * size);
    int32_t one_layer = job->layer >= job->squares;
    part.high = one_layer ? part.rows_to - part.rows_from : HIGH * BLOCK;
    Place at = {part.rows_from, 0, part.rows_from, 0};
    Beside beside = {.job = job, .pieces = begin_slice(job, &part, &at, slices)};
    while (beside.pieces.next < beside.pieces.count) pack_piece(&beside.pieces);
    for (int turn = 0, more = 1; more; turn = !turn) {
        if (at.s == at.first && at.top == at.high)
            pack_part(job->held, &job->numbers_held, part.from, part.to, at.first, end_of_layer(job, &at),
                      job->holds_a == job->turned, own, words);
        Place next = at;
        more = advance(job, &part, &next);
        if (more) beside.pieces = begin_slice(job, &part, &next, slices + !turn * size);
        const uint32_t *after = more && next.first == at.first ? own + (next.s - next.first) * SQUARE : NULL;
        float *sums = kept + (one_layer ? 0 : at.top - at.high) * job->width;
        multiply_slice(&beside, &part, &at, slices + turn * size, own, after, sums);
        at = next;
    }
    if (beside.done.sums) finish_rows(job, &beside.done, BLOCK);
}

/* ------------------------------------------------------------------------------------------------------------ parts */

/* The parts of out: `down` by `across` of them, of `rows` streamed rows; a job's strips and layers; words of memory that a
   thread needs; the time of it all, in products of 32 numbers by all of k. */
typedef struct { int64_t down, across, rows, layer, width, own, time; } Cut;

/* A strip takes up to a megabyte, which may be half of the second cache, and 256 to 512 rows. */
static Cut cut_of(const Job *job, int32_t threads) {
    int64_t cache = 2 << 20, square = 2 * SQUARE * sizeof(uint32_t); /* bytes */
    int64_t held = blocks_of(job->held.rows), streamed = blocks_of(job->streamed.rows);
    int64_t fit = cache / 2 / (job->squares * square), most = fit < 8 ? 8 : fit > 16 ? 16 : fit;
    int64_t layer = cache / 4 * 3 / (most * square), layers = (job->squares + layer - 1) / layer;
    /* as many products take as long as to pack a number that is held, one in a piece, and to turn a sum */
    int64_t by_strip = job->kernel == WITH_AMX ? 200 : 24, by_piece = job->kernel == WITH_AMX ? 130 : 8;
    int64_t by_sum = !job->turned ? 0 : job->kernel == WITH_AMX ? 110 : 12;
    Cut best = {.layer = whole((job->squares + layers - 1) / layers, SLICE)};
    for (int64_t down = 1; down <= threads && down <= streamed; down++) {
        int64_t across = (held + most - 1) / most, high = (streamed + down - 1) / down;
        while (across * down % threads && across * down < 4 * threads) across++;
        int64_t wide = (held + across - 1) / across;
        int64_t time = wide * high * BLOCK + by_strip * wide + by_piece * high + by_sum * wide * high / job->squares;
        time *= (across * down + threads - 1) / threads;
        if (best.down && time >= best.time) continue;
        best = (Cut){(streamed + high - 1) / high, (held + wide - 1) / wide, high * BLOCK, best.layer, wide * BLOCK, 0, time};
    }
    int64_t kept = best.layer >= job->squares ? TALL : HIGH;
    best.own = best.width / SIDE * least(best.layer, job->squares) * SQUARE + 2 * TALL * 2 * SLICE * SQUARE +
               best.width * BLOCK * kept;
    return best;
}

/* The job that holds a, or b. */
static Job job_of(const Operand *a, const Operand *b, int32_t holds_a, int32_t kernel) {
    const Operand *held = holds_a ? a : b, *streamed = holds_a ? b : a;
    int32_t streams_pairs = streamed->k_step != 1;
    return (Job){.held = *held, .streamed = *streamed, .m = a->rows, .n = b->rows, .squares = (a->k + 31) / 32,
                 .kernel = kernel, .holds_a = holds_a, .turned = holds_a != streams_pairs};
}

INLINE Operand operand(const Side *side, int64_t rows, int64_t k) {
    return (Operand){side->at, rows, k, 0, side->row_step, side->k_step, side->format, NULL, whole(rows, 64) + 64,
                     depth_bits_of(side), side->finite && side->scale && side->block_k, side->block_scale,
                     side->block_scale_rows};
}

INLINE Numbers numbers_in(const Operand *of) {
    return of->lifted ? lifted_numbers_of(of->format) : numbers_of(of->format);
}

INLINE int64_t shift_words(const Side *side, int64_t rows, int64_t k) {
    int64_t line = (int64_t)1 << depth_bits_of(side);
    return side->scale && side->block_k ? (k + line - 1) / line * (whole(rows, 64) + 64) : 0;
}

int32_t gemm(const Side *a, const Side *b, const Out *out, int64_t m, int64_t n, int64_t k, int32_t kernel,
             int32_t threads) {
    if (kernel == WITH_FLOAT32) return gemm_float32(a, b, out, m, n, k, 0, threads);
    Operand left = operand(a, m, k), right = operand(b, n, k);
    /* the other one, which turns sums or writes to out in shorter runs, is to save an eighth, or a twentieth */
    int32_t usual = a->k_step != 1 && b->k_step != 1, saves = kernel == WITH_AMX ? 8 : 20;
    Job job = job_of(&left, &right, usual, kernel), other = job_of(&left, &right, !usual, kernel);
    Cut cut = cut_of(&job, threads), other_cut = cut_of(&other, threads);
    if (other_cut.time + cut.time / saves < cut.time) job = other, cut = other_cut;
    job.out = out, job.layer = cut.layer, job.width = cut.width;
    int64_t tall = whole(m, BLOCK), wide = whole(n, BLOCK);
    int64_t shifts_a = shift_words(a, m, k), shifts_b = shift_words(b, n, k);
    int64_t total = threads * cut.own + whole(shifts_a + shifts_b, SIDE) + tall + wide;
    uint32_t *memory = aligned_alloc(64, (size_t)whole(total, SIDE) * sizeof(uint32_t));
    if (memory == NULL) return -1;
    uint32_t *shifts = memory + threads * cut.own;
    float *by_row = (float *)(shifts + whole(shifts_a + shifts_b, SIDE)), *by_col = by_row + tall;
    Range of_a = take_scales(a, m, k, shifts_a ? shifts : NULL, whole(m, 64) + 64, threads);
    Range of_b = take_scales(b, n, k, shifts_b ? shifts + shifts_a : NULL, whole(n, 64) + 64, threads);
    if (!stays_normal(of_a, of_b)) {
        free(memory);
        return 1;
    }
    for (int64_t r = 0; r < m; r++) by_row[r] = factor_of(a, r);
    for (int64_t c = 0; c < wide; c++) by_col[c] = c < n ? factor_of(b, c) : 0;
    const uint32_t *of_left = shifts_a ? shifts : NULL, *of_right = shifts_b ? shifts + shifts_a : NULL;
    job.held.shifts = job.holds_a ? of_left : of_right;
    job.streamed.shifts = job.holds_a ? of_right : of_left;
    job.numbers_held = numbers_in(&job.held);
    job.numbers_streamed = numbers_in(&job.streamed);
    job.by_row = by_row;
    job.by_col = by_col;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        uint64_t before = use_ieee();
#if HAS_AMX
        if (kernel == WITH_AMX) use_tiles();
#endif
#pragma omp for schedule(dynamic)
        for (int64_t part = 0; part < cut.down * cut.across; part++) {
            int64_t row = part / cut.across * cut.rows, other = part % cut.across * job.width;
            Part of = {row, least(job.streamed.rows, row + cut.rows), other, least(job.held.rows, other + job.width), 0};
            multiply_part(&job, of, memory + omp_get_thread_num() * cut.own);
        }
#if HAS_AMX
        if (kernel == WITH_AMX) _tile_release();
#endif
        use_again(before);
    }
    free(memory);
    return 0;
}

#else

int32_t has_gemm(void) { return has_gemm_float32(); }

int32_t gemm(const Side *a, const Side *b, const Out *out, int64_t m, int64_t n, int64_t k, int32_t kernel,
             int32_t threads) {
    (void)kernel;
    return gemm_float32(a, b, out, m, n, k, 0, threads);
}

#endif
