// Rows as int8 with a scale for each row, for products of many rows in integers, and the sums of such products as floats.
#include "mma.h"
#include "reduce.h"

#define THREADS 256
#define GROUP 8  // columns that a thread reads at a time

LUCE_FN void load(const f16_t* __restrict__ row, int column, int cols, float (&v)[GROUP]) {
#pragma unroll
    for (int i = 0; i < GROUP; i++) v[i] = 0.0f;
    if (column >= cols) return;
    const uint4 words = *reinterpret_cast<const uint4*>(row + column);
    const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        const u16 bits = (u16)(pairs[i / 2] >> (i % 2 * 16));
        v[i] = column + i < cols ? luce_f32(f16_t{bits}) : 0.0f;
    }
}

// to[r, c] = round(x[r, c] / s), to even, s = the row's largest |x| / 127, and scale[r] = s factor[r], or s with `plain`;
// zeros from column `cols` to `padded`, both in steps of 8 columns of x. A row of zeros has the scale 0, and one with an
// infinity or NaN zeros and an infinite scale, whose products are NaN. Rows of x lie `stride` apart, a multiple of 8.
// Grid: one block of THREADS per row.
extern "C" __global__ void __launch_bounds__(THREADS)
    rows_to_int8(const f16_t* __restrict__ x, const float* __restrict__ factor, u8* __restrict__ to,
                 float* __restrict__ scale, int plain, int cols, int padded, i64 stride) {
    luce_await();
    const int r = (int)blockIdx.x;
    const f16_t* row = x + r * stride;
    float most = 0.0f;
    for (int column = luce_thread() * GROUP; column < cols; column += THREADS * GROUP) {
        float v[GROUP];
        load(row, column, cols, v);
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            const float size = fabsf(v[i]);
            most = fmaxf(most, size <= LUCE_FLT_MAX ? size : LUCE_INF);
        }
    }
    const float largest = luce_block_max(most);
    const bool finite = largest <= LUCE_FLT_MAX;
    const float inverse = finite && largest > 0.0f ? 127.0f / largest : 0.0f;
    if (luce_thread() == 0) scale[r] = largest / 127.0f * (plain ? 1.0f : factor[r]);
    for (int column = luce_thread() * GROUP; column < padded; column += THREADS * GROUP) {
        float v[GROUP];
        load(row, column, finite ? cols : 0, v);
        u32 words[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < GROUP; i++) words[i / 4] |= ((u32)(i32)rintf(v[i] * inverse) & 0xff) << (i % 4 * 8);
        *reinterpret_cast<uint2*>(to + (i64)r * padded + column) = make_uint2(words[0], words[1]);
    }
}

// The sums int32 [r, j] in `out` become floats, in place: out[r, j] = sum rows[r] features[j] for j < count.
// Grid: (rows, ceil(count / (4 THREADS))) blocks of THREADS.
extern "C" __global__ void __launch_bounds__(THREADS)
    sums_to_float(float* __restrict__ out, const float* __restrict__ rows, const float* __restrict__ features, int count,
                  i64 stride) {
    luce_await();
    float* row = out + (i64)blockIdx.x * stride;
    const float factor = rows[blockIdx.x];
    const int first = ((int)blockIdx.y * THREADS + luce_thread()) * 4;
    if (first + 4 <= count && (u64)row % 16 == 0 && (u64)features % 16 == 0) {
        const float4 sums = *reinterpret_cast<const float4*>(row + first);
        const float4 own = *reinterpret_cast<const float4*>(features + first);
        *reinterpret_cast<float4*>(row + first) =
            make_float4((float)(i32)__float_as_uint(sums.x) * factor * own.x,
                        (float)(i32)__float_as_uint(sums.y) * factor * own.y,
                        (float)(i32)__float_as_uint(sums.z) * factor * own.z,
                        (float)(i32)__float_as_uint(sums.w) * factor * own.w);
        return;
    }
    for (int j = first; j < luce_min(first + 4, count); j++)
        row[j] = (float)(i32)__float_as_uint(row[j]) * factor * features[j];
}
