/* Memory that the kernels ask for ends before a page that nobody may touch, too (-include guarded.h). It is full of NaN. */

#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define GUARD 65536

static inline void *guarded_alloc(size_t unit, size_t size) {
    size_t bytes = (size + unit - 1) / unit * unit, whole = (bytes + GUARD - 1) / GUARD * GUARD, length = whole + 2 * GUARD;
    char *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    mprotect(memory + length - GUARD, GUARD, PROT_NONE);
    char *at = memory + length - GUARD - bytes;
    size_t told[2] = {(size_t)(uintptr_t)memory, length};
    memset(at, 0xFF, bytes);
    memcpy(at - sizeof told, told, sizeof told);
    return at;
}

static inline void *guarded_calloc(size_t n, size_t size) {
    void *at = guarded_alloc(16, n * size);
    return at ? memset(at, 0, n * size) : NULL;
}

static inline void guarded_free(void *at) {
    if (!at) return;
    size_t told[2];
    memcpy(told, (char *)at - sizeof told, sizeof told);
    munmap((void *)(uintptr_t)told[0], told[1]);
}

#define aligned_alloc(unit, size) guarded_alloc(unit, size)
#define malloc(size) guarded_alloc(16, size)
#define calloc(n, size) guarded_calloc(n, size)
#define free(at) guarded_free(at)
