// Rows of floats as fp16 with a scale for each row, as products of many rows read them: for fp16.cu, and for kernels
// that make such rows of what they compute. A block has a row, or a wave.
#pragma once
#include "mma.h"
#include "reduce.h"

// Almost every row needs no scale, and is written once. A kernel writes its row and asks `again`; if so, the row's
// largest finite magnitude is 0 < m < 2^-7 or m >= 2^top, and the kernel writes the row again, now times `factor`. `top` is
// 15, or less where products of the row are fp16 too (luce.ops.half_products).
struct Fp16Row {
    f16_t* to;
    float* scale;
    int top;
    float factor = 1.0f, most = 0.0f;

    __device__ __forceinline__ Fp16Row(f16_t* to, float* scale, int top = 15) : to(to), scale(scale), top(top) {}

    // COUNT neighbouring values at a column, both multiples of 8 or both of 4; or one value.
    template <int COUNT> __device__ __forceinline__ void put(int column, const float (&v)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float size = fabsf(v[i]);
            most = fmaxf(most, size <= LUCE_FLT_MAX ? size : 0.0f);
        }
        if constexpr (COUNT == 1) {
            to[column] = luce_f16(v[0] * factor);
        } else if constexpr (COUNT == 4) {
            *reinterpret_cast<uint2*>(to + column) =
                make_uint2(luce_f16_pair(v[0] * factor, v[1] * factor), luce_f16_pair(v[2] * factor, v[3] * factor));
        } else {
            static_assert(COUNT == 8, "as many values as a thread stores at once");
            *reinterpret_cast<uint4*>(to + column) =
                make_uint4(luce_f16_pair(v[0] * factor, v[1] * factor), luce_f16_pair(v[2] * factor, v[3] * factor),
                           luce_f16_pair(v[4] * factor, v[5] * factor), luce_f16_pair(v[6] * factor, v[7] * factor));
        }
    }

    // Zeros from column `cols` to `padded`.
    __device__ __forceinline__ void pad(int cols, int padded) {
        for (int column = cols + luce_thread(); column < padded; column += luce_threads()) to[column] = luce_f16(0.0f);
    }

    // Whether the row has to be written again; every thread of the block asks. The scale is 1, or the power of two that
    // brings the row's largest finite magnitude to 2^(top - 1) or more but less than 2^top.
    __device__ __forceinline__ bool again() {
        return factor == 1.0f && again(luce_block_max(most), luce_thread() == 0);
    }

    // The same for a row whose threads have found its largest finite magnitude; one of them, `first`, stores the scale.
    __device__ __forceinline__ bool again(float largest, bool first) {
        if (factor != 1.0f) return false;
        const int exponent = (int)(__float_as_uint(largest) >> 23) - 127;
        // The smallest rows would need more than a float's largest power of two.
        const int shift =
            largest == 0.0f || (exponent >= -7 && exponent < top) ? 0 : luce_min(top - 1 - exponent, 126);
        if (first) *scale = __uint_as_float((u32)(127 - shift) << 23);
        factor = __uint_as_float((u32)(127 + shift) << 23);
        return shift != 0;
    }
};

#define FP16_ROWS 4    // of a block whose waves have a row each
#define FP16_PIECES 4  // of eight columns that a lane loads at once

// Writes a wave's row: load(column, v) sets the eight values from a column on, up to `padded`.
template <typename Load> LUCE_FN void write_fp16_row(Fp16Row to, int padded, const Load& load) {
    const int lane = luce_lane();
    do {
        for (int first = lane * 8; first < padded; first += FP16_PIECES * LUCE_LANES * 8) {
            float v[FP16_PIECES][8];
#pragma unroll
            for (int p = 0; p < FP16_PIECES; p++) {
                const int at = first + p * (LUCE_LANES * 8);
                if (at < padded) load(at, v[p]);
            }
#pragma unroll
            for (int p = 0; p < FP16_PIECES; p++) {
                const int at = first + p * (LUCE_LANES * 8);
                if (at < padded) to.put(at, v[p]);
            }
        }
    } while (to.again(luce_lane_max(to.most), lane == 0));
}
