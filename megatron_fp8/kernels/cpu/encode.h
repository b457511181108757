/* Casts of float32 numbers to 8 bit codes. */

#pragma once

#include "numbers.h"

/* Saturating round-to-nearest-even. Adding 2^(exponent + 23 - kept) leaves a sum whose last bit weighs one step of the
   format's grid at v, so the float unit rounds; below the smallest normal (exponent field `low`) the grid is fixed. */
INLINE uint8_t encode(float v, uint32_t kept, uint32_t low, uint32_t top) {
    uint32_t u = bits_of(v), magnitude = u & 0x7FFFFFFF;
    uint32_t inside = magnitude < top ? magnitude : top;
    uint32_t exponent = inside & 0x7F800000;
    exponent = exponent > low ? exponent : low;
    uint32_t magic = exponent + ((23 - kept) << 23);
    uint32_t steps = bits_of(float_of(inside) + float_of(magic)) - magic;
    uint32_t code = steps + ((exponent - low) >> (23 - kept)) + (u >> 24 & 0x80);
    return (uint8_t)(magnitude > 0x7F800000 ? 0x7F : code);
}

INLINE uint8_t encode_e4m3(float v) { return encode(v, 3, 121u << 23, 0x43E00000 /* 448 */); }
INLINE uint8_t encode_e5m2(float v) { return encode(v, 2, 113u << 23, 0x47600000 /* 57344 */); }
