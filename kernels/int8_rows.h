// Rows as int8 with a scale for each row, for int8_rows.cu and for kernels that make such rows of what they compute. A block
// has a row, or a wave has one.
#pragma once
#include "reduce.h"

// value = round(x / s), to even, with s = the row's largest |x| / 127. A row of zeros has the scale 0, and one with an
// infinity or NaN zeros and an infinite scale, whose products are NaN. A kernel puts its row and asks `again`, and puts it
// again: the first pass finds the largest, the second writes.
struct Int8Row {
    u8* to;
    float* scale;
    float most = 0.0f, inverse = 0.0f;
    bool writes = false;

    __device__ __forceinline__ Int8Row(u8* to, float* scale) : to(to), scale(scale) {}

    // COUNT neighbouring values at a column, both multiples of 8 or both of 4; or one value.
    template <int COUNT> __device__ __forceinline__ void put(int column, const float (&v)[COUNT]) {
        static_assert(COUNT == 1 || COUNT == 4 || COUNT == 8, "as many values as a thread stores at once");
        if (!writes) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const float size = fabsf(v[i]);
                most = fmaxf(most, size <= LUCE_FLT_MAX ? size : LUCE_INF);
            }
            return;
        }
        u32 words[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (inverse > 0.0f) words[i / 4] |= ((u32)(i32)rintf(v[i] * inverse) & 0xff) << (i % 4 * 8);
        if constexpr (COUNT == 1)
            to[column] = (u8)words[0];
        else if constexpr (COUNT == 4)
            *reinterpret_cast<u32*>(to + column) = words[0];
        else
            *reinterpret_cast<uint2*>(to + column) = make_uint2(words[0], words[1]);
    }

    // Zeros from column `cols` to `padded`.
    __device__ __forceinline__ void pad(int cols, int padded) {
        for (int column = cols + luce_thread(); column < padded; column += luce_threads()) to[column] = 0;
    }

    // Whether the row has to be put again; every thread of the block asks. scale = s factor.
    __device__ __forceinline__ bool again(float factor = 1.0f) {
        return !writes && again(luce_block_max(most), luce_thread() == 0, factor);
    }

    // The same for a row whose threads have found its largest |x|; one of them, `first`, stores the scale.
    __device__ __forceinline__ bool again(float largest, bool first, float factor = 1.0f) {
        if (writes) return false;
        writes = true;
        inverse = largest > 0.0f && largest <= LUCE_FLT_MAX ? 127.0f / largest : 0.0f;
        if (first) *scale = largest / 127.0f * factor;
        return true;
    }
};
