/* What all loops of skinny_gemm.c share: where exponents of b's blocks are, and what becomes of a panel's sums. */

#pragma once

#include "skinny_gemm.h"
#include "numbers.h"

#define STEP 32   /* columns of b that share an exponent at least */
#define STEPS 16  /* steps whose exponents are read at a time */

/* Where the exponents of a row of b begin; beyond the last row those of the last. */
INLINE const uint8_t *exponents_of(const Product *p, int64_t row) {
    return p->exponents + least(row, p->n - 1) / p->block_rows * ((p->k + p->block_cols - 1) / p->block_cols);
}

/* How many steps there are from column `at` on, of STEPS. */
INLINE int64_t steps_from(const Product *p, int64_t at) { return least(STEPS, (p->k - at + STEP - 1) / STEP); }

/* sums [m] of so many rows of b from `first` on, each m `apart` numbers from the last: scales, bias, one rounding. lift: a
   power of two that the sums lack; it joins the scales, since sums may leave float32's range by it. */
static inline void finish(const Product *p, float *sums, int64_t apart, int64_t first, int64_t rows, float lift) {
    int64_t n = least(rows, p->n - first);
    for (int64_t m = 0; m < p->m; m++) {
        float scale = p->scale_a[p->each_a ? m : 0] * lift, *sum = sums + m * apart;
        if (p->each_b) for (int64_t i = 0; i < n; i++) sum[i] *= scale * p->scale_b[first + i];
        else for (int64_t i = 0; i < n; i++) sum[i] *= scale * *p->scale_b;
        if (p->bias) for (int64_t i = 0; i < n; i++) sum[i] += p->bias[first + i];
        if (p->to_bfloat16) {
            uint16_t *to = (uint16_t *)p->to + m * p->n + first;
            for (int64_t i = 0; i < n; i++) to[i] = store_sum(sum[i]);
        } else memcpy((float *)p->to + m * p->n + first, sum, (size_t)n * sizeof(float));
    }
}
