/* Attention of one query to many keys, head by head: a token that is decoded, and the keys and values that a cache holds.

   A cache has its tokens side by side, [tokens, sequences, groups, width], and each row is read once, as it lies, for all
   heads of its group. What is added to what does not depend on the number of sequences or threads. */

#include <string.h>

#include "numbers.h"

#define LANES 16   /* of sums that are added up beside each other */
#define CHUNK 32   /* tokens that a thread takes at a time */
#define TOGETHER 4 /* heads that share what was read; values that are added to a sum before it is put down */
#define AHEAD 8    /* tokens that are fetched ahead */

typedef float Lanes __attribute__((vector_size(LANES * 4)));
typedef float Eights __attribute__((vector_size(32)));
typedef float Fours __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

typedef struct {
    const void *rows; /* keys or values [tokens, sequences, groups, width], the numbers of each row dense */
    int64_t token_step, sequence_step, group_step;
    int64_t tokens, sequences, groups, heads, width; /* heads: of a group */
} Cache;

INLINE Lanes lanes_float32(const float *at) {
    Lanes v;
    memcpy(&v, at, sizeof v);
    return v;
}

INLINE Lanes lanes_bfloat16(const uint16_t *at) {
    Halves v;
    memcpy(&v, at, sizeof v);
    return (Lanes)(__builtin_convertvector(v, Words) << 16);
}

/* Its sixteen sums in four. */
INLINE Fours folded(Lanes v) {
    Eights half[2];
    memcpy(half, &v, sizeof v);
    half[0] += half[1];
    Fours quarter[2];
    memcpy(quarter, half, sizeof half[0]);
    return quarter[0] + quarter[1];
}

INLINE void fetch(const void *at, int64_t size) {
    for (int64_t i = 0; i < size; i += 64) __builtin_prefetch((const char *)at + i);
}

/* NAME_scores(cache, query, scores, threads): scores [sequences, groups * heads, tokens] = keys by queries [sequences,
   groups * heads, width].
   NAME_values(cache, weights, to, threads): to [sequences, groups * heads, width] = the sum of values by their weights
   [sequences, groups * heads, tokens]. */
#define ONE_QUERY(NAME, T, LOAD)                                                                                     \
    INLINE const T *NAME##_row(const Cache *of, int64_t token, int64_t sequence, int64_t group) {                    \
        return (const T *)of->rows + token * of->token_step + sequence * of->sequence_step + group * of->group_step; \
    }                                                                                                                \
    /* A key by `heads` queries, each product in four sums: parts [heads][CHUNK]. */                                 \
    INLINE void NAME##_multiply(const T *key, const float *query, int64_t heads, int64_t width, Fours *parts) {      \
        Lanes sum[TOGETHER] = {{0}};                                                                                 \
        int64_t i = 0;                                                                                               \
        for (; i + LANES <= width; i += LANES) {                                                                     \
            Lanes x = lanes_##NAME(key + i);                                                                         \
            for (int64_t h = 0; h < heads; h++) sum[h] += x * lanes_float32(query + h * width + i);                  \
        }                                                                                                            \
        for (int64_t h = 0; h < heads; h++) {                                                                        \
            Fours four = folded(sum[h]);                                                                             \
            for (int64_t rest = i; rest < width; rest++) four[0] += LOAD(key[rest]) * query[h * width + rest];       \
            parts[h * CHUNK] = four;                                                                                 \
        }                                                                                                            \
    }                                                                                                                \
    void NAME##_scores(const Cache *of, const float *query, float *scores, int32_t threads) {                        \
        int64_t chunks = (of->tokens + CHUNK - 1) / CHUNK, pairs = of->sequences * of->groups;                       \
        _Pragma("omp parallel for num_threads(threads) if (threads > 1)")                                            \
        for (int64_t part = 0; part < pairs * chunks; part++) {                                                      \
            Fours parts[TOGETHER][CHUNK];                                                                            \
            int64_t from = part / pairs * CHUNK, pair = part % pairs, n = least(CHUNK, of->tokens - from);           \
            uint64_t before = use_ieee();                                                                            \
            for (int64_t first = 0; first < of->heads; first += TOGETHER) {                                          \
                int64_t head = pair * of->heads + first, heads = least(TOGETHER, of->heads - first);                 \
                const float *queries = query + head * of->width;                                                     \
                for (int64_t t = 0; t < n; t++) {                                                                    \
                    const T *key = NAME##_row(of, from + t, pair / of->groups, pair % of->groups);                   \
                    if (first == 0 && from + t + AHEAD < of->tokens)                                                 \
                        fetch(key + AHEAD * of->token_step, of->width * (int64_t)sizeof(T));                         \
                    if (heads == TOGETHER) NAME##_multiply(key, queries, TOGETHER, of->width, parts[0] + t);         \
                    else NAME##_multiply(key, queries, heads, of->width, parts[0] + t);                              \
                }                                                                                                    \
                for (int64_t h = 0; h < heads; h++) {                                                                \
                    float *to = scores + (head + h) * of->tokens + from;                                             \
                    for (int64_t t = 0; t < n; t++) {                                                                \
                        const float *four = (const float *)(parts[h] + t);                                           \
                        to[t] = (four[0] + four[2]) + (four[1] + four[3]);                                           \
                    }                                                                                                \
                }                                                                                                    \
            }                                                                                                        \
            use_again(before);                                                                                       \
        }                                                                                                            \
    }                                                                                                                \
    /* sums [heads][width] += `tokens` values by their weights [heads][weight_step]. */                              \
    INLINE void NAME##_add(const T *value, int64_t step, int64_t tokens, const float *weight, int64_t weight_step,   \
                           float *sums, int64_t heads, int64_t width) {                                              \
        int64_t i = 0;                                                                                               \
        for (; i + LANES <= width; i += LANES) {                                                                     \
            Lanes x[TOGETHER];                                                                                       \
            for (int64_t t = 0; t < tokens; t++) x[t] = lanes_##NAME(value + t * step + i);                          \
            for (int64_t h = 0; h < heads; h++) {                                                                    \
                Lanes sum = lanes_float32(sums + h * width + i);                                                     \
                for (int64_t t = 0; t < tokens; t++) sum += weight[h * weight_step + t] * x[t];                      \
                memcpy(sums + h * width + i, &sum, sizeof sum);                                                      \
            }                                                                                                        \
        }                                                                                                            \
        for (; i < width; i++)                                                                                       \
            for (int64_t h = 0; h < heads; h++)                                                                      \
                for (int64_t t = 0; t < tokens; t++)                                                                 \
                    sums[h * width + i] += weight[h * weight_step + t] * LOAD(value[t * step + i]);                  \
    }                                                                                                                \
    void NAME##_values(const Cache *of, const float *weights, float *to, int32_t threads) {                          \
        _Pragma("omp parallel for num_threads(threads) if (threads > 1)")                                            \
        for (int64_t pair = 0; pair < of->sequences * of->groups; pair++) {                                          \
            int64_t size = of->heads * of->width, step = of->token_step;                                             \
            float *sums = to + pair * size;                                                                          \
            uint64_t before = use_ieee();                                                                            \
            memset(sums, 0, (size_t)size * sizeof(float));                                                           \
            for (int64_t token = 0; token < of->tokens; token += TOGETHER) {                                         \
                const T *value = NAME##_row(of, token, pair / of->groups, pair % of->groups);                        \
                const float *weight = weights + pair * of->heads * of->tokens + token;                               \
                int64_t n = least(TOGETHER, of->tokens - token);                                                     \
                for (int64_t t = AHEAD; t < AHEAD + n && token + t < of->tokens; t++)                                \
                    fetch(value + t * step, of->width * (int64_t)sizeof(T));                                         \
                for (int64_t h = 0; h < of->heads; h += TOGETHER) {                                                  \
                    int64_t heads = least(TOGETHER, of->heads - h);                                                  \
                    const float *by = weight + h * of->tokens;                                                       \
                    float *at = sums + h * of->width;                                                                \
                    if (n == TOGETHER && heads == TOGETHER)                                                          \
                        NAME##_add(value, step, TOGETHER, by, of->tokens, at, TOGETHER, of->width);                  \
                    else NAME##_add(value, step, n, by, of->tokens, at, heads, of->width);                           \
                }                                                                                                    \
            }                                                                                                        \
            use_again(before);                                                                                       \
        }                                                                                                            \
    }

ONE_QUERY(float32, float, load_float32)
ONE_QUERY(bfloat16, uint16_t, load_bfloat16)
