// Integers in the bytes of a word as floats, times a scale and plus an offset: a part of quants.h.
#include "gpu.h"

// word & mask | more: one instruction, of which NVIDIA's compiler makes two where both are constants.
LUCE_FN u32 masked(u32 word, u32 mask, u32 more) {
#if defined(__CUDA_ARCH__)
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(word), "r"(mask), "r"(more));
    return result;
#else
    return (word & mask) | more;
#endif
}

// w[i] = scale * q[i] + offset, for the four numbers q that lie `shift` bits up in the bytes of `word`, under `mask` in
// the lowest. They are not shifted down: the scale makes up for that, exactly, which saves one instruction of four.
//
// Conversions to float share a pipeline with the masks. A source that is bound by it sets WHOLE_BY_BITS: the float 2^23
// + n has the bits of n as its lowest, and an addition, in another pipeline, takes 2^23 away, exactly.
LUCE_FN void scaled(u32 word, u32 mask, int shift, float scale, float offset, float* __restrict__ w) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int up = shift + 8 * i;
        const float down = __uint_as_float((u32)(127 - up) << 23);
#if WHOLE_BY_BITS
        if (up < 23 && mask << up < 1u << 23) {
            const float whole = __uint_as_float(masked(word, mask << up, 0x4b000000u)) - 8388608.0f;
            w[i] = fmaf(scale * down, whole, offset);
            continue;
        }
#endif
        w[i] = fmaf(scale * down, (float)(word & mask << up), offset);
    }
}
