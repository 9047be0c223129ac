// A row of x as signed bytes: each block of 32 columns has the scale s = largest |x| / 127 and the values round(x / s).
#pragma once
#include "reduce.h"

// COUNT neighbouring columns of row `row`, from `column` on, into values int8 [cols / 32, stride, 32] and scales
// float32 [cols / 32, stride, 2]: s, and s times the sum of the block's values. 32 / COUNT neighbouring lanes hold a
// block; all lanes of the wave must call it, and those that are not `inside` write nothing. A block with an infinity or
// a NaN has that for its scale, and makes NaN of every product; one whose numbers are below 1e-30 becomes zeros.
template <int COUNT>
LUCE_FN void quantise_columns(const float (&x)[COUNT], bool inside, int column, int row, int stride,
                              i8* __restrict__ values, float* __restrict__ scales) {
    // The bits of magnitudes are in the order of the magnitudes, and NaN comes last.
    i32 bits = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) bits = luce_max(bits, (i32)(__float_as_uint(x[i]) & 0x7fffffffu));
    const float most = __uint_as_float((u32)luce_lane_max<32 / COUNT>(bits));
    const float factor = most > 1e-30f && most <= LUCE_FLT_MAX ? 127.0f / most : 0.0f;
    i32 quotients[COUNT], sum = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        quotients[i] = factor > 0.0f ? (i32)rintf(x[i] * factor) : 0;
        sum += quotients[i];
    }
    sum = luce_lane_sum<32 / COUNT>(sum);
    if (!inside) return;
    const i64 place = (i64)(column / 32) * stride + row;
    i8* to = values + place * 32 + column % 32;
    if (COUNT == 4) {
        *reinterpret_cast<u32*>(to) = (u32)(quotients[0] & 255) | (u32)(quotients[1 % COUNT] & 255) << 8 |
                                      (u32)(quotients[2 % COUNT] & 255) << 16 | (u32)quotients[3 % COUNT] << 24;
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; i++) to[i] = (i8)quotients[i];
    }
    if (column % 32 == 0) {
        const float scale = most <= 1e-30f ? 0.0f : most / 127.0f;
        scales[place * 2] = scale;
        scales[place * 2 + 1] = scale * (float)sum;
    }
}

// Row `row`, one beyond the last, of `count` columns from `column` on, both multiples of 32: zeros, by `threads` threads.
LUCE_FN void quantise_nothing(int column, int count, int row, int stride, i8* __restrict__ values,
                              float* __restrict__ scales, int thread, int threads) {
    for (int i = column + thread * 4; i < column + count; i += threads * 4) {
        const i64 place = (i64)(i / 32) * stride + row;
        *reinterpret_cast<u32*>(values + place * 32 + i % 32) = 0;
        if (i % 32 < 8) scales[place * 2 + i % 32 / 4] = 0.0f;
    }
}
