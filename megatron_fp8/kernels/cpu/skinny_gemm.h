/* What skinny_gemm.c is asked. */

#pragma once

#include <stdint.h>

#define MOST 16 /* rows of a */
#define FEW 4   /* of which few_rows_float32 takes */

typedef struct {
    const uint16_t *a;        /* bfloat16 [m, k] */
    const uint8_t *b;         /* codes [n, k] */
    const uint8_t *exponents; /* scales 2^(byte - 127) of b's blocks [block rows, block cols]; NULL: none */
    const float *scale_a;     /* of each row of a, or of all */
    const float *scale_b;     /* of each row of b, or of all */
    const float *bias;        /* [n]; NULL: none */
    void *to;                 /* [m, n]: bfloat16 or float32 */
    int64_t m, n, k;
    int64_t block_rows, block_cols; /* block_cols: a multiple of 32 */
    int32_t each_a, each_b;         /* whether each row has a scale of its own */
    int32_t e5m2, finite, to_bfloat16;
} Product;

#define DOT 1   /* gemm.c's WITH_AVX512 */
#define TILES 2 /* and WITH_AMX */

int32_t few_rows(const Product *p, int32_t loop, int32_t threads);

/* few_rows with up to FEW rows, by gemm_float32's loop: the same bits. */
int32_t few_rows_float32(const Product *p, int32_t threads);
