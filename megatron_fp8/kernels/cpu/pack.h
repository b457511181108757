/* Operands of a product on their way into its panels: codes become bfloat16 numbers there, under the scale of their block.

   A panel has 16 rows of an operand [rows, k], all of k, in squares of 16 rows x 32 k: the size of an AMX tile. Products
   read one operand row by row, so its squares are [16 rows][32 k], and pairs of k of the other one for 16 rows at once, so
   its squares are [16 pairs][16 rows][2]. As words of two k, one is the other transposed. What is missing of the last
   panel and of the last square is zero: a NaN in the next row of memory gets nowhere.

   Scales of blocks are powers of two, and are added to exponents: exact, since the caller has seen to it that no number
   leaves bfloat16's normal range. Zeros, NaN and Inf stay; where there is no NaN and no Inf one instruction does it. */

#pragma once

#include "decode.h"

#if defined(__AVX512BF16__)

#define SIDE 16               /* rows of a panel, and pairs of k of a square */
#define SQUARE (SIDE * SIDE)  /* words of two numbers */

/* [rows, k]: element r, k at at[r * row_step + k * k_step]; one of the steps is 1. What is packed of it begins with k at
   `from`, a multiple of 64, and ends before `k`. */
typedef struct {
    const void *at;
    int64_t rows, k, from, row_step, k_step;
    int32_t format;
    const uint32_t *shifts; /* twice in each word: what `with_scale` takes; [k >> depth_bits][shift_step]; NULL: nothing */
    int64_t shift_step;
    int32_t depth_bits, lifted; /* lifted: numbers are those of lifted_numbers_of */
    const uint8_t *block_scale; /* of E2M1, whose rows are dense: as in gemm.h */
    int64_t block_scale_rows;
} Operand;

/* Those of 64 codes, or of 32 numbers, that are inside. All of them are read without a mask: it would reach its register
   behind the products that wait in the same queue, and the processor would stand still until then. */
INLINE __m512i load_codes(__mmask64 inside, const uint8_t *at) {
    return inside == ~(__mmask64)0 ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi8(inside, at);
}
INLINE __m512i load_numbers(__mmask32 inside, const uint16_t *at) {
    return inside == ~(__mmask32)0 ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi16(inside, at);
}

INLINE __mmask64 first_of(int64_t n) { return n >= 64 ? ~(__mmask64)0 : n <= 0 ? 0 : ((__mmask64)1 << n) - 1; }

/* v, its numbers times 2^(shift / 128), but for zeros, NaN and Inf; it has no subnormal ones. An exponent of zeros becomes
   1 by adding one to it, one of ones 0 or 256: those are the exponents of which all bits but the last are then zero. */
INLINE __m512i shifted(__m512i v, __m512i shift) {
    __m512i next = _mm512_add_epi16(v, _mm512_set1_epi16(0x80));
    return _mm512_mask_add_epi16(v, _mm512_test_epi16_mask(next, _mm512_set1_epi16(0x7F00)), v, shift);
}

/* Numbers by the powers of two of their scales. */
INLINE __m512i with_scale(const Operand *of, __m512i v, __m512i shift) {
    return of->lifted ? lowered(v, shift) : shifted(v, shift);
}

#if defined(__AVX512BF16__)
/* 64 E2M1 codes of a row, of which those before of->k count, times their blocks' scales: exact. */
INLINE void decode_fp4(const Operand *of, const Numbers *numbers, int64_t row, int64_t k, __m512i *first, __m512i *second) {
    const __m512 of_code = _mm512_setr_ps(0.0f, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    const __m512i code = _mm512_set1_epi32(0x000F000F), of_next = _mm512_set_epi32(
        0x100010, 0x100010, 0x100010, 0x100010, 0x100010, 0x100010, 0x100010, 0x100010, 0, 0, 0, 0, 0, 0, 0, 0);
    const uint8_t *at = (const uint8_t *)of->at + (row * of->row_step + k) / 2;
    int64_t blocks = of->row_step / 16, block = k / 16;
    const uint8_t *scale = of->block_scale + row / of->block_scale_rows * blocks + block;
    __m256i bytes = _mm256_maskz_loadu_epi8((__mmask32)first_of((of->k - k) / 2), at);
    for (int half = 0; half < 2; half++) { /* two blocks: the table has the numbers of each */
        int64_t one = least(2 * half, blocks - 1 - block), two = least(2 * half + 1, blocks - 1 - block);
        __m512 low = _mm512_mul_ps(of_code, _mm512_set1_ps(numbers->scale[scale[one]]));
        __m512 high = _mm512_mul_ps(of_code, _mm512_set1_ps(numbers->scale[scale[two]]));
        __m512i x = _mm512_cvtepu8_epi32(half ? _mm256_extracti128_si256(bytes, 1) : _mm256_castsi256_si128(bytes));
        x = _mm512_ternarylogic_epi32(x, _mm512_slli_epi32(x, 12), code, 0xA8); /* (x | x << 12) & code */
        x = _mm512_permutexvar_epi16(_mm512_or_si512(x, of_next), (__m512i)_mm512_cvtne2ps_pbh(high, low));
        if (half) *second = x;
        else *first = x;
    }
}
#endif

/* 16 x 16 words, in place. */
INLINE void transpose(__m512i x[SIDE]) {
    __m512i t[SIDE];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        x[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        x[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        x[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        x[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xDD);
        t[i + 8] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xDD);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        x[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        x[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
    }
}

INLINE void store(__m512i x[SIDE], int transposed, uint32_t *to) {
    if (transposed) transpose(x);
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; i++) _mm512_store_si512(to + i * SIDE, x[i]);
}

/* One panel of an operand whose rows are dense, from row `row` on. */
INLINE void pack_rows(const Operand *of, const Numbers *numbers, int32_t format, int64_t row, int transposed,
                      uint32_t *to) {
    int64_t rows = least(SIDE, of->rows - row), width = format == BFLOAT16 ? 32 : 64;
    for (int64_t k = of->from; k < of->k; k += width, to += width / 32 * SQUARE) {
        __mmask64 inside = first_of(of->k - k);
        __m512i first[SIDE], second[SIDE];
#pragma GCC unroll 16
        for (int r = 0; r < SIDE; r++) {
            first[r] = second[r] = _mm512_setzero_si512();
            if (r >= rows) continue;
            int64_t at = (row + r) * of->row_step + k;
            if (format == BFLOAT16) {
                first[r] = load_numbers((__mmask32)inside, (const uint16_t *)of->at + at);
            } else if (format == E2M1) {
                decode_fp4(of, numbers, row + r, k, first + r, second + r);
            } else {
                decode_64(numbers, load_codes(inside, (const uint8_t *)of->at + at), first + r, second + r);
                if (of->shifts) {
                    const uint32_t *shift = of->shifts + row + r;
                    int64_t block = k >> of->depth_bits, next = (k + 32) >> of->depth_bits;
                    first[r] = with_scale(of, first[r], _mm512_set1_epi32((int)shift[block * of->shift_step]));
                    if (k + 32 < of->k)
                        second[r] = with_scale(of, second[r], _mm512_set1_epi32((int)shift[next * of->shift_step]));
                }
            }
        }
        store(first, transposed, to);
        if (format != BFLOAT16 && k + 32 < of->k) store(second, transposed, to + SQUARE);
    }
}

/* Four panels of an operand whose columns are dense, from row `row` on; of bfloat16 numbers two. */
INLINE void pack_columns(const Operand *of, const Numbers *numbers, int32_t format, int64_t row, int transposed,
                         uint32_t *to, int64_t panel_words, int64_t panels) {
    __mmask64 inside = first_of(of->rows - row);
    for (int64_t k = of->from; k < of->k; k += 32, to += SQUARE) {
        __m512i x[4][SIDE];
#pragma GCC unroll 16
        for (int pair = 0; pair < SIDE; pair++) {
            int64_t at = k + 2 * pair, low = at * of->k_step + row, high = low + of->k_step;
            __mmask64 in_low = at < of->k ? inside : 0, in_high = at + 1 < of->k ? inside : 0;
            if (format == BFLOAT16) {
                const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
                const uint16_t *from = of->at;
                __m512i l = _mm512_permutexvar_epi64(order, load_numbers((__mmask32)in_low, from + low));
                __m512i h = _mm512_permutexvar_epi64(order, load_numbers((__mmask32)in_high, from + high));
                x[0][pair] = _mm512_unpacklo_epi16(l, h);
                x[1][pair] = _mm512_unpackhi_epi16(l, h);
            } else {
                const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
                const uint8_t *from = of->at;
                __m512i l = _mm512_permutexvar_epi32(order, load_codes(in_low, from + low));
                __m512i h = _mm512_permutexvar_epi32(order, load_codes(in_high, from + high));
                __m512i l1, l2, h1, h2;
                decode_quarters(numbers, l, &l1, &l2);
                decode_quarters(numbers, h, &h1, &h2);
                x[0][pair] = _mm512_unpacklo_epi16(l1, h1);
                x[1][pair] = _mm512_unpackhi_epi16(l1, h1);
                x[2][pair] = _mm512_unpacklo_epi16(l2, h2);
                x[3][pair] = _mm512_unpackhi_epi16(l2, h2);
            }
        }
        for (int64_t panel = 0; panel < panels; panel++) {
            if (of->shifts) {
                __m512i shift = _mm512_loadu_si512(of->shifts + (k >> of->depth_bits) * of->shift_step + row + panel * SIDE);
#pragma GCC unroll 16
                for (int pair = 0; pair < SIDE; pair++) x[panel][pair] = with_scale(of, x[panel][pair], shift);
            }
            store(x[panel], transposed, to + panel * panel_words);
        }
    }
}

#define AT_ONCE 4 /* panels */

/* Up to four panels from panel number `panel` on, each of panel_words; `paired`: squares of pairs, not of rows. */
#define PACK(NAME, FORMAT)                                                                                           \
    static void NAME(const Operand *of, const Numbers *numbers, int64_t panel, int64_t panels, int paired,           \
                     uint32_t *to, int64_t panel_words) {                                                            \
        int64_t row = panel * SIDE;                                                                                  \
        if (of->k_step == 1) {                                                                                       \
            for (int64_t i = 0; i < panels; i++)                                                                     \
                if (paired) pack_rows(of, numbers, FORMAT, row + i * SIDE, 1, to + i * panel_words);                 \
                else pack_rows(of, numbers, FORMAT, row + i * SIDE, 0, to + i * panel_words);                        \
            return;                                                                                                  \
        }                                                                                                            \
        int64_t most = FORMAT == BFLOAT16 ? 2 : 4;                                                                   \
        for (int64_t i = 0; i < panels; i += most)                                                                   \
            if (paired)                                                                                              \
                pack_columns(of, numbers, FORMAT, row + i * SIDE, 0, to + i * panel_words, panel_words,              \
                             least(most, panels - i));                                                               \
            else                                                                                                     \
                pack_columns(of, numbers, FORMAT, row + i * SIDE, 1, to + i * panel_words, panel_words,              \
                             least(most, panels - i));                                                               \
    }

PACK(pack_bfloat16, BFLOAT16)
PACK(pack_codes, E4M3) /* of either format: the tables know which */

/* Rows of E2M1 are dense. */
static void pack_fp4(const Operand *of, const Numbers *numbers, int64_t panel, int64_t panels, int paired, uint32_t *to,
                     int64_t panel_words) {
    for (int64_t i = 0; i < panels; i++)
        if (paired) pack_rows(of, numbers, E2M1, (panel + i) * SIDE, 1, to + i * panel_words);
        else pack_rows(of, numbers, E2M1, (panel + i) * SIDE, 0, to + i * panel_words);
}

/* ---------------------------------------------------------------------------------------------------------- pieces */

/* Panels in the making, those of an operand that lies as its squares do: rows dense, or columns dense and squares of pairs.
   A piece has 128 numbers, so that panels are made between the tile products of others, which leave the rest of the
   processor idle. */
typedef struct {
    const Operand *of;
    const Numbers *numbers;
    int64_t row, k, next, count; /* first row, first k; pieces that are made, of how many */
    int64_t across, down, right; /* pieces of a row, or, where columns are dense, of 64 rows, before the next ones; place */
    int64_t ahead, shifts_ahead; /* from a number, or its shift, to that of the next slice, which is fetched meanwhile */
    uint32_t *to;
    int64_t panel_words;
} Pieces;

/* Those of `rows` rows, a multiple of 32, and of squares from k on. */
INLINE Pieces pieces_of(const Operand *of, const Numbers *numbers, int64_t row, int64_t rows, int64_t k, int64_t squares,
                        int64_t rows_ahead, int64_t k_ahead, uint32_t *to, int64_t panel_words) {
    int64_t across = of->k_step == 1 ? (squares + 3) / 4 : (rows + 63) / 64;
    int64_t count = across * (of->k_step == 1 ? rows : squares * SIDE);
    int64_t ahead = rows_ahead * of->row_step + k_ahead * of->k_step;
    int64_t shifts_ahead = rows_ahead + (((k + k_ahead) >> of->depth_bits) - (k >> of->depth_bits)) * of->shift_step;
    return (Pieces){of, numbers, row, k, 0, count, across, 0, 0, ahead, shifts_ahead, to, panel_words};
}

INLINE void fetch_shift(const uint32_t *shift, int64_t ahead) {
    _mm_prefetch((const char *)((uintptr_t)shift + (uintptr_t)ahead * sizeof *shift), _MM_HINT_T1);
}

/* A row's next 128 numbers, whose 32s go into squares one behind the other. */
INLINE void pack_piece_of_row(const Operand *of, const Numbers *numbers, int64_t row, int64_t k, int64_t ahead,
                              int64_t shifts_ahead, uint32_t *to) {
    for (int part = 0; part < 2; part++, k += 64, to += 2 * SQUARE) {
        __mmask64 inside = row < of->rows ? first_of(of->k - k) : 0;
        int64_t at = row * of->row_step + k;
        __m512i first, second;
        if (of->format == BFLOAT16) {
            first = load_numbers((__mmask32)inside, (const uint16_t *)of->at + at);
            second = load_numbers((__mmask32)(inside >> 32), (const uint16_t *)of->at + at + 32);
        } else if (of->format == E2M1) {
            first = second = _mm512_setzero_si512();
            if (inside) decode_fp4(of, numbers, row, k, &first, &second);
            _mm_prefetch((const char *)of->at + (at + ahead) / 2, _MM_HINT_T1);
        } else {
            _mm_prefetch((const char *)of->at + at + ahead, _MM_HINT_T1);
            decode_64(numbers, load_codes(inside, (const uint8_t *)of->at + at), &first, &second);
            if (of->shifts && inside) {
                const uint32_t *shift = of->shifts + row;
                int64_t block = k >> of->depth_bits, next = inside >> 32 ? (k + 32) >> of->depth_bits : block;
                first = with_scale(of, first, _mm512_set1_epi32((int)shift[block * of->shift_step]));
                second = with_scale(of, second, _mm512_set1_epi32((int)shift[next * of->shift_step]));
                fetch_shift(shift + block * of->shift_step, shifts_ahead);
                fetch_shift(shift + next * of->shift_step, shifts_ahead);
            }
        }
        _mm512_store_si512(to, first);
        _mm512_store_si512(to + SQUARE, second);
    }
}

/* 64 rows' numbers at k and k + 1, for four panels. */
INLINE void pack_piece_of_columns(const Operand *of, const Numbers *numbers, int64_t row, int64_t k, int64_t ahead,
                                  int64_t shifts_ahead, uint32_t *to, int64_t panel_words) {
    __mmask64 inside = first_of(of->rows - row), in_low = k < of->k ? inside : 0, in_high = k + 1 < of->k ? inside : 0;
    int64_t low = k * of->k_step + row, high = low + of->k_step;
    __m512i x[4];
    if (of->format == BFLOAT16) {
        const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
        const uint16_t *from = of->at;
        for (int half = 0; half < 2; half++) {
            __mmask32 mask_low = (__mmask32)(in_low >> 32 * half), mask_high = (__mmask32)(in_high >> 32 * half);
            __m512i l = load_numbers(mask_low, from + low + 32 * half);
            __m512i h = load_numbers(mask_high, from + high + 32 * half);
            l = _mm512_permutexvar_epi64(order, l), h = _mm512_permutexvar_epi64(order, h);
            x[2 * half] = _mm512_unpacklo_epi16(l, h);
            x[2 * half + 1] = _mm512_unpackhi_epi16(l, h);
        }
    } else {
        const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const uint8_t *from = of->at;
        __m512i l1, l2, h1, h2;
        _mm_prefetch((const char *)from + low + ahead, _MM_HINT_T1);
        _mm_prefetch((const char *)from + high + ahead, _MM_HINT_T1);
        decode_quarters(numbers, _mm512_permutexvar_epi32(order, load_codes(in_low, from + low)), &l1, &l2);
        decode_quarters(numbers, _mm512_permutexvar_epi32(order, load_codes(in_high, from + high)), &h1, &h2);
        x[0] = _mm512_unpacklo_epi16(l1, h1);
        x[1] = _mm512_unpackhi_epi16(l1, h1);
        x[2] = _mm512_unpacklo_epi16(l2, h2);
        x[3] = _mm512_unpackhi_epi16(l2, h2);
    }
#pragma GCC unroll 4
    for (int panel = 0; panel < 4; panel++) {
        if (of->shifts && in_low) {
            const uint32_t *shift = of->shifts + (k >> of->depth_bits) * of->shift_step + row + panel * SIDE;
            x[panel] = with_scale(of, x[panel], _mm512_loadu_si512(shift));
            fetch_shift(shift, shifts_ahead);
        }
        _mm512_store_si512(to + panel * panel_words, x[panel]);
    }
}

INLINE void pack_piece(Pieces *p) {
    int64_t first = p->down, second = p->right;
    p->next++;
    if (++p->right == p->across) p->right = 0, p->down++;
    if (p->of->k_step == 1) {
        uint32_t *to = p->to + first / SIDE * p->panel_words + first % SIDE * SIDE + second * 4 * SQUARE;
        pack_piece_of_row(p->of, p->numbers, p->row + first, p->k + second * 128, p->ahead, p->shifts_ahead, to);
    } else {
        uint32_t *to = p->to + second * 4 * p->panel_words + first / SIDE * SQUARE + first % SIDE * SIDE;
        pack_piece_of_columns(p->of, p->numbers, p->row + second * 64, p->k + first * 2, p->ahead, p->shifts_ahead, to,
                              p->panel_words);
    }
}

#endif
