/* How blocks.c is told to cut a matrix and to scale what it cut. */

#pragma once

#include <stdint.h>

/* One way to cut the matrix, as it lies. Where scales are made here, rows divides TALL and cols divides WIDE. */
typedef struct {
    int64_t rows, cols;
    uint8_t *codes;     /* of the matrix */
    void *scale_inv;    /* to be made, float32 or E8M0, [row blocks, column blocks] */
    const float *scale; /* that were made before, as scale_inv lies; NULL: none */
    const float *amax;  /* for casts.c: amaxes that were found before; NULL: none */
} Cut;

/* How scales are made of amaxes. */
typedef struct {
    float largest, epsilon; /* what an amax is scaled to, and at least taken for */
    int32_t kind, max_exponent;
} Rule;

enum { FP32, POW2, E8M0 };

void scales_of_amaxes(const float *amax, int64_t n, const Rule *rule, float *scale, float *inverse);
