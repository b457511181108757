/* How unlike pieces of work are shared out: the largest each by all threads, the others whole, to whoever is free.

   A piece by all threads costs more, for threads wait for each other at its end, and what its parts share each of them
   makes. So pieces are dealt out whole unless threads would be idle for long. */

#pragma once

#include <stdint.h>

#define MOST_THREADS 1024

/* How many of `count` pieces, the largest first, are for all threads: so few that dealing out the others, in their order,
   to whichever thread has least, takes at most a tenth longer than if all threads ended together. */
static inline int64_t by_all_threads(const int64_t *work, int64_t count, int32_t threads) {
    if (threads <= 1 || threads > MOST_THREADS) return 0;
    for (int64_t first = 0; first < count; first++) {
        int64_t busy[MOST_THREADS] = {0}, total = 0, longest = 0;
        for (int64_t i = first; i < count; i++) {
            int32_t least_busy = 0;
            for (int32_t t = 1; t < threads; t++) least_busy = busy[t] < busy[least_busy] ? t : least_busy;
            busy[least_busy] += work[i];
            total += work[i];
            longest = busy[least_busy] > longest ? busy[least_busy] : longest;
        }
        if (longest * threads <= total + total / 10) return first;
    }
    return count;
}
