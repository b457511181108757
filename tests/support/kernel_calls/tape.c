/* Makes calls that a file describes (tape.py), and writes what they gave: compiled together with the kernels, for any
   processor, it runs them where no Python is. Each buffer lies against a page that nobody may touch. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MOST 32 /* arguments, and buffers, of a call */
#define PAGE 65536 /* a multiple of any system's */

typedef int64_t Any(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                    int64_t);

typedef struct {
    char *at, *memory;
    int64_t size, length, kept;
} Buffer;

static char now[128]; /* the call that is being made */

static void tell(int number) {
    fprintf(stderr, "signal %d in %s\n", number, now);
    _exit(3);
}

static void take(void *to, int64_t size) {
    if (size && fread(to, (size_t)size, 1, stdin) != 1) {
        fprintf(stderr, "the tape ends in %s\n", now);
        exit(2);
    }
}

static int64_t number(void) {
    int64_t n;
    take(&n, sizeof n);
    return n;
}

/* front: it begins behind an untouchable page; else it ends before one. */
static Buffer buffer(int64_t size, int64_t front) {
    Buffer b = {.size = size, .length = (size + PAGE - 1) / PAGE * PAGE + 2 * PAGE};
    b.memory = mmap(NULL, (size_t)b.length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (b.memory == MAP_FAILED) abort();
    mprotect(b.memory, PAGE, PROT_NONE);
    mprotect(b.memory + b.length - PAGE, PAGE, PROT_NONE);
    b.at = front ? b.memory + PAGE : b.memory + b.length - PAGE - size;
    return b;
}

int main(void) {
    signal(SIGSEGV, tell);
    signal(SIGBUS, tell);
    signal(SIGILL, tell);
    for (int64_t calls = number(), call = 0; call < calls; call++) {
        char name[64] = {0};
        take(name, number());
        snprintf(now, sizeof now, "call %lld, %s", (long long)call, name);
        Any *function;
        *(void **)&function = dlsym(NULL, name);
        if (!function) {
            fprintf(stderr, "there is no %s\n", name);
            return 2;
        }
        Buffer of[MOST];
        int64_t front = number(), buffers = number(), argument[MOST] = {0};
        for (int64_t i = 0; i < buffers; i++) {
            of[i] = buffer(number(), front);
            of[i].kept = number();
            take(of[i].at, of[i].size);
        }
        for (int64_t pointers = number(); pointers > 0; pointers--) {
            int64_t in = number(), offset = number(), to = number();
            memcpy(of[in].at + offset, &of[to].at, sizeof(void *));
        }
        int64_t arguments = number();
        for (int64_t i = 0; i < arguments; i++) {
            int64_t is_buffer = number(), value = number();
            argument[i] = is_buffer ? (int64_t)(intptr_t)of[value].at : value;
        }
        int64_t *a = argument;
        int64_t given = function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
        fwrite(&given, sizeof given, 1, stdout);
        for (int64_t i = 0; i < buffers; i++) {
            if (of[i].kept) fwrite(of[i].at, (size_t)of[i].size, 1, stdout);
            munmap(of[i].memory, (size_t)of[i].length);
        }
    }
    return fflush(stdout) ? 1 : 0;
}
