/* Products of many pairs of matrices in one call: a layer's experts, each with tokens of its own.

   Experts differ in size, and most are too small to be worth all threads. A large one, which a thread alone would be busy
   with while the others have nothing left to do, is multiplied by all threads; the others are then dealt out whole,
   the largest first, to whichever thread is free (deal.h). An element's sum has one order whoever computes it (gemm.c), so
   the result is that of one call for each pair. */

#include <stdlib.h>

#include "deal.h"
#include "gemm.h"

/* One product; done: as gemm returns. */
typedef struct {
    Side a, b;
    Out out;
    int64_t m, n, k;
    int32_t done;
} Product;

static int64_t work(const Product *p) { return p->m * p->n * p->k; }

static int larger_first(const void *left, const void *right) {
    int64_t a = work(*(Product *const *)left), b = work(*(Product *const *)right);
    return (a < b) - (a > b);
}

/* gemm of each, whose `done` says how it went. Returns 0; -1 without memory. */
int32_t gemm_each(Product *products, int64_t count, int32_t kernel, int32_t threads) {
    Product **order = malloc((size_t)(count + 1) * (sizeof(Product *) + sizeof(int64_t)));
    if (order == NULL) return -1;
    int64_t *works = (int64_t *)(order + count);
    for (int64_t i = 0; i < count; i++) order[i] = products + i;
    qsort(order, (size_t)count, sizeof(Product *), larger_first);
    for (int64_t i = 0; i < count; i++) works[i] = work(order[i]);
    int64_t large = by_all_threads(works, count, threads);
    for (int64_t i = 0; i < large; i++) {
        Product *p = order[i];
        p->done = gemm(&p->a, &p->b, &p->out, p->m, p->n, p->k, kernel, threads);
    }
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = large; i < count; i++) {
        Product *p = order[i];
        p->done = gemm(&p->a, &p->b, &p->out, p->m, p->n, p->k, kernel, 1);
    }
    free(order);
    return 0;
}
