/* FP8 codes to bfloat16 numbers, 64 at a time, for processors with AVX512. Every code is one exactly, subnormal ones too.

   A code's magnitude has seven bits, so the two bytes of its number are looked up in two tables of 128 bytes, which is
   one instruction each (VBMI); the sign is added to the upper one. Arithmetic on 16-bit words (shift, add the difference
   of biases, mend subnormals and NaN) takes half as long again. */

#pragma once

#include "numbers.h"

enum { BFLOAT16, E4M3, E5M2, E2M1 }; /* what an operand holds */

#if defined(__AVX512BW__)

#include <immintrin.h>

/* The lower and the upper bytes of the numbers that magnitudes 0 to 127 stand for. */
typedef struct {
    union { uint8_t bytes[128]; __m512i vectors[2]; } low, high;
    float scale[128]; /* of E2M1: E4M3's numbers */
} Numbers;

INLINE Numbers numbers_of(int32_t format) {
    Numbers of;
    for (int i = 0; i < 128; i++) {
        uint32_t u = bits_of(format == E5M2 ? decode_e5m2((uint8_t)i) : decode_e4m3((uint8_t)i));
        of.low.bytes[i] = (uint8_t)(u >> 16);
        of.high.bytes[i] = (uint8_t)(u >> 24);
        of.scale[i] = float_of(u);
    }
    return of;
}

#define LIFT 80

/* numbers_of a format times 2^LIFT, and zero as the negative one: a power of two up to 2^LIFT is then one subtraction that
   saturates (lowered), and zeros stay zeros, of which products and sums do not see the sign. Not for NaN and Inf. */
INLINE Numbers lifted_numbers_of(int32_t format) {
    Numbers of = numbers_of(format);
    for (int i = 1; i < 128; i++) of.high.bytes[i] = (uint8_t)(of.high.bytes[i] + LIFT / 2);
    of.high.bytes[0] = 0x80;
    return of;
}

/* Lifted numbers by powers of two; each word of `by`: (LIFT - exponent) * 128. */
INLINE __m512i lowered(__m512i v, __m512i by) { return _mm512_subs_epi16(v, by); }

INLINE __m512i look_up(const __m512i *table, __m512i index) {
#if defined(__AVX512VBMI__)
    return _mm512_permutex2var_epi8(table[0], index, table[1]);
#else
    union { uint8_t bytes[64]; __m512i vector; } at = {.vector = index}, found;
    for (int i = 0; i < 64; i++) found.bytes[i] = ((const uint8_t *)table)[at.bytes[i] & 0x7F];
    return found.vector;
#endif
}

/* The numbers of 64 codes. In each quarter of 16 bytes, `first` has those of its first eight, `second` of the others. */
INLINE void decode_quarters(const Numbers *of, __m512i codes, __m512i *first, __m512i *second) {
    __m512i low = look_up(of->low.vectors, codes), high = look_up(of->high.vectors, codes);
    high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8((char)0x80), 0xF8); /* high | (codes & sign) */
    *first = _mm512_unpacklo_epi8(low, high);
    *second = _mm512_unpackhi_epi8(low, high);
}

/* The numbers of 64 codes in their order. */
INLINE void decode_64(const Numbers *of, __m512i codes, __m512i *first, __m512i *second) {
    codes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes);
    decode_quarters(of, codes, first, second);
}

#endif
