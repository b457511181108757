/* What the loops over elements share: 16 and 32 bit floats and 8 bit codes as bits, and the thread's arithmetic. */

#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define PIECE 16384 /* elements that one thread takes at a time, where rows do not matter */

INLINE uint32_t bits_of(float v) { uint32_t u; memcpy(&u, &v, 4); return u; }
INLINE float float_of(uint32_t u) { float v; memcpy(&v, &u, 4); return v; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* ------------------------------------------------------------------------------------ the thread's arithmetic */

/* IEEE arithmetic for the calling thread: rounding to nearest, subnormals kept, whatever it had. Returns what it had. */
INLINE uint64_t use_ieee(void) {
    uint64_t before = 0;
#if defined(__SSE__)
    before = _mm_getcsr();
    _mm_setcsr((uint32_t)before & ~0xE040u); /* rounding control, flush to zero, subnormals are zeros */
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before & ~(uint64_t)0x5C80003) : "memory"); /* the same, and FZ16, FIZ, AH, AHP */
#endif
    return before;
}

INLINE void use_again(uint64_t before) {
#if defined(__SSE__)
    _mm_setcsr((uint32_t)before);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(before) : "memory");
#endif
    (void)before;
}

/* ------------------------------------------------------------------------------------------ 16 and 32 bit floats */

INLINE float load_float32(float v) { return v; }
INLINE float load_bfloat16(uint16_t h) { return float_of((uint32_t)h << 16); }

INLINE float load_float16(uint16_t h) {
    uint32_t magnitude = h & 0x7FFF;
    uint32_t normal = (magnitude << 13) + (magnitude >= 0x7C00 ? 224u << 23 : 112u << 23);
    uint32_t subnormal = bits_of((float)(int32_t)magnitude * 0x1p-24f);
    return float_of((magnitude < 0x400 ? subnormal : normal) | (uint32_t)(h & 0x8000) << 16);
}

INLINE float store_float32(float v) { return v; }

/* NaN needs no care: that of codes has no lower payload bits, so nothing is rounded. */
INLINE uint16_t store_bfloat16(float v) {
    uint32_t u = bits_of(v);
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

/* Sums may be any NaN. */
INLINE uint16_t store_sum(float v) { return v == v ? store_bfloat16(v) : 0x7FC0; }

/* ------------------------------------------------------------------------------------------------- 8 bit formats */

/* NaN codes, of either sign, give the one quiet NaN that has no sign and no payload: 0x7FC00000. */
INLINE float decode_e4m3(uint8_t code) {
    uint32_t magnitude = code & 0x7F, sign = (uint32_t)(code & 0x80) << 24;
    uint32_t normal = (magnitude << 20) + (120u << 23);
    uint32_t subnormal = bits_of((float)(int32_t)magnitude * 0x1p-9f);
    uint32_t number = (magnitude < 8 ? subnormal : normal) | sign;
    return float_of(magnitude == 0x7F ? 0x7FC00000 : number);
}

INLINE float decode_e5m2(uint8_t code) {
    uint32_t magnitude = code & 0x7F, sign = (uint32_t)(code & 0x80) << 24;
    uint32_t normal = (magnitude << 21) + (magnitude == 0x7C ? 224u << 23 : 112u << 23);
    uint32_t subnormal = bits_of((float)(int32_t)magnitude * 0x1p-16f);
    uint32_t number = (magnitude < 4 ? subnormal : normal) | sign;
    return float_of(magnitude > 0x7C ? 0x7FC00000 : number);
}
