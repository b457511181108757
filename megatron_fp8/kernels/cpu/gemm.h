/* What gemm.c is asked. */

#pragma once

#include <stdint.h>

/* Bits of what gemm takes as `kernel`, and has_gemm gives. */
enum { WITH_AVX512 = 1, WITH_AMX = 2, WITH_FLOAT32 = 4 };

/* One operand as the caller has it, and its scales. */
typedef struct {
    const void *at;
    int64_t row_step, k_step;
    int32_t format;
    int32_t e8m0, finite;                   /* whether scales are E8M0, else float32; whether no code is NaN or Inf */
    const void *scale;                      /* NULL: 1 */
    int64_t block_rows, block_k;            /* that share a scale; block_k 0: all of k, and the scale waits for the end */
    int64_t scale_row_step, scale_k_step;
    const uint8_t *block_scale;             /* of E2M1, in bytes of two codes: E4M3 [rows in blocks, k / 16]; k is in blocks */
    int64_t block_scale_rows;               /* rows that share one */
} Side;

/* What becomes of the sums. */
typedef struct {
    void *at;                   /* [m, n], contiguous: float32, or bfloat16 */
    int32_t bfloat16, add;      /* add: to the float32 that is there */
    const float *bias;          /* [n] or NULL */
} Out;

/* The inner loops of this processor; asks the system for AMX's registers, for the whole process. */
int32_t has_gemm(void);

/* One step of each side is 1; block_k is a multiple of 32; m, n and k are 1 or more.
   Returns 0; -1 without memory; 1, with nothing written, where a scale, or a product of two, is outside 2^-100 to 2^80:
   then numbers or sums could leave the normal range. */
int32_t gemm(const Side *a, const Side *b, const Out *out, int64_t m, int64_t n, int64_t k, int32_t kernel,
             int32_t threads);

/* WITH_FLOAT32, where the processor has what it needs, else 0. */
int32_t has_gemm_float32(void);

/* gemm by WITH_FLOAT32; checked: scales are known to be within their range. */
int32_t gemm_float32(const Side *a, const Side *b, const Out *out, int64_t m, int64_t n, int64_t k, int32_t checked,
                     int32_t threads);
