/* Products with few rows, c [m, n] = a [m, k] b [n, k]^T with m <= 16: one token decoded, or the sequences of a batch.

   Reading b is what costs time there, so b is read as FP8 codes, one byte a value, once, and becomes bfloat16 in
   registers: two table look-ups give the high and the low byte of 64 values, exactly, subnormal codes and NaN too. A
   thread takes a panel of rows of b from end to end; a stays in the caches.

   The order of sums is that of the products with many rows on the same processor, so a row's result does not depend on
   how many rows are beside it, nor on the number of threads:

   * AMX (skinny_gemm_tiles.h): steps of 32 values of k, one tile product each, from first to last. The codes are the tile
     product's left operand, which lies row by row as they do: nothing is transposed;
   * AVX512-BF16 (skinny_gemm_dot.h): pairs of k, from first to last. Sixteen rows of codes are turned in registers, so that
     a vector holds one pair of each;
   * float32: k from first to last. Up to four rows have skinny_gemm_float32.c, more the function of many (gemm_float32.c).

   Rejected: codes packed for this kernel beforehand. Reading rows as they lie is as fast, and all else that reads a
   weight (state dicts, copies, exports) finds it where it was. Rejected: sums along k in the lanes of a vector. It needs
   no turning, but no product with many rows sums like that. */

#include <stdint.h>
#include <stdlib.h>

#include "skinny_gemm_dot.h"
#include "gemm.h"
#include "skinny_gemm_tiles.h"

static int32_t by_float32(const Product *p, int32_t threads) {
    if (p->m <= FEW) return few_rows_float32(p, threads);
    int64_t across = (p->k + p->block_cols - 1) / p->block_cols;
    Side a = {p->a, p->k, 1, BFLOAT16, 0, 0, p->scale_a, p->each_a, 0, 1, 0};
    Side b = {p->b, p->k, 1, p->e5m2 ? E5M2 : E4M3, 0, p->finite, p->scale_b, p->each_b, 0, 1, 0};
    if (p->exponents) {
        b.e8m0 = 1, b.scale = p->exponents, b.block_rows = p->block_rows, b.block_k = p->block_cols;
        b.scale_row_step = across, b.scale_k_step = 1;
    }
    Out out = {p->to, p->to_bfloat16, 0, p->bias};
    return gemm_float32(&a, &b, &out, p->m, p->n, p->k, 1, threads);
}

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__GFNI__)

/* a, two values of k side by side: [pairs, whole chunks of 128 columns][rows], zeros beyond k and m. */
static uint32_t *pairs_of(const Product *p, int64_t rows) {
    int64_t pairs = (p->k + 127) / 128 * 64;
    uint32_t *packed = calloc((size_t)(pairs * rows), sizeof(uint32_t));
    if (packed == NULL) return NULL;
    for (int64_t m = 0; m < p->m; m++) {
        const uint16_t *from = p->a + m * p->k;
        for (int64_t i = 0; i < p->k / 2; i++) packed[i * rows + m] = from[2 * i] | (uint32_t)from[2 * i + 1] << 16;
        if (p->k % 2) packed[p->k / 2 * rows + m] = from[p->k - 1];
    }
    return packed;
}

/* The inner loops that this processor has: the sum of what gemm.h calls them. */
int32_t has_few_rows(void) {
#if FEW_ROWS_BY_TILES
    if (may_use_tiles()) return DOT + TILES + has_gemm_float32();
#endif
    return DOT + has_gemm_float32();
}

/* A thread's share of the panels. */
#if FEW_ROWS_BY_TILES
static void share_by_tiles(const Product *p, const uint32_t *a) {
    Decoder decoder = {numbers_of(p->e5m2 ? E5M2 : E4M3), !p->e5m2 && p->finite, 0};
    shape_tiles(p->m);
#pragma omp for schedule(static)
    for (int64_t first = 0; first < p->n; first += PANEL) {
        decoder.rare = 0;
        panel_by_tiles(p, a, &decoder, first);
        if (decoder.rare * 64 * 16 > PANEL * p->k) decoder.by_bits = 0;
    }
    _tile_release();
}
#endif

static void share_by_dot(const Product *p, const uint32_t *a) {
    int32_t format = p->e5m2 ? E5M2 : E4M3;
    Numbers numbers = scales_b(p) ? lifted_numbers_of(format) : numbers_of(format);
#pragma omp for schedule(static)
    for (int64_t first = 0; first < p->n; first += TALL) panel_by_dot(p, a, &numbers, first);
}

/* loop: one that the processor has. Returns -1 without memory for a copy of a. */
int32_t few_rows(const Product *p, int32_t loop, int32_t threads) {
    if (loop == WITH_FLOAT32) return by_float32(p, threads);
    uint32_t *a = pairs_of(p, loop == TILES ? p->m : padded_rows(p->m));
    if (a == NULL) return -1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        uint64_t before = use_ieee();
#if FEW_ROWS_BY_TILES
        if (loop == TILES) share_by_tiles(p, a);
        else
#endif
            share_by_dot(p, a);
        use_again(before);
    }
    free(a);
    return 0;
}

#else

int32_t has_few_rows(void) { return has_gemm_float32(); }

int32_t few_rows(const Product *p, int32_t loop, int32_t threads) {
    (void)loop;
    return by_float32(p, threads);
}

#endif
