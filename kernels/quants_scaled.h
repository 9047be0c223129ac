// Integers in the bytes of a word as floats, times a scale and plus an offset: a part of quants.h.
#include "gpu.h"

// word & mask, of which the compiler does not make one mask for each half.
LUCE_FN u32 masked(u32 word, u32 mask) {
#if defined(__CUDA_ARCH__)
    u32 result;
    asm("and.b32 %0, %1, %2;" : "=r"(result) : "r"(word), "r"(mask));
    return result;
#else
    return word & mask;
#endif
}

// w[i] = scale * q[i] + offset, for the four numbers q that lie `shift` bits up in the bytes of `word`, under `mask` in
// the lowest. They are not shifted down: the scale makes up for that, exactly, which saves one instruction of four.
//
// Conversions of integers share a pipeline with the masks. A source that is bound by it sets NUMBERS_AS_HALVES: a byte is
// the lowest bits of a subnormal fp16 number, so that a mask prepares two numbers, and another pipeline makes floats of
// them, exactly.
LUCE_FN void scaled(u32 word, u32 mask, int shift, float scale, float offset, float* __restrict__ w) {
#if NUMBERS_AS_HALVES
    const u32 twice = (mask << shift) * 0x10001u, even = masked(word, twice), odd = masked(word >> 8, twice);
    const float up = scale * __uint_as_float((u32)(127 + 24 - shift) << 23);
#pragma unroll
    for (int i = 0; i < 4; i++)
        w[i] = fmaf(up, luce_f32(f16_t{(u16)((i % 2 ? odd : even) >> (i / 2 * 16))}), offset);
#else
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int up = shift + 8 * i;
        const float down = __uint_as_float((u32)(127 - up) << 23);
        w[i] = fmaf(scale * down, (float)(word & mask << up), offset);
    }
#endif
}
