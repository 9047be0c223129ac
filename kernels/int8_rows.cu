// Rows as int8 with a scale for each row, for products of many rows in integers, and the sums of such products.
#include "activation.h"
#include "int8_rows.h"
#include "products.h"

#define THREADS 256
#define GATED_THREADS 512
#define GROUP 8  // columns that a thread reads at a time
#define PART 4   // the same of sums

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

// Rows of x as Int8Row makes them, to rows of `padded` columns with zeros from column `cols` on, with scale[r] = s factor[r],
// or s with `plain`. Rows of x lie `stride` apart, a multiple of 8. Grid: one block of THREADS per row.
extern "C" __global__ void __launch_bounds__(THREADS)
    rows_to_int8(const f16_t* __restrict__ x, const float* __restrict__ factor, u8* __restrict__ to,
                 float* __restrict__ scale, int plain, int cols, int padded, i64 stride) {
    luce_await();
    const int r = (int)blockIdx.x;
    const f16_t* row = x + r * stride;
    Int8Row made(to + (i64)r * padded, scale + r);
    do {
        for (int column = luce_thread() * GROUP; column < padded; column += THREADS * GROUP) {
            float v[GROUP];
            load(row, column, cols, v);
            made.put(column, v);
        }
    } while (made.again(plain ? 1.0f : factor[r]));
}

LUCE_FN void load(const float* __restrict__ row, int column, int cols, float (&v)[GROUP]) {
    if (column + GROUP <= cols && (u64)row % 16 == 0) {
#pragma unroll
        for (int i = 0; i < GROUP; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(row + column + i);
            v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < GROUP; i++) v[i] = column + i < cols ? row[column + i] : 0.0f;
}

// Of a row that begins at a multiple of 16 bytes, with a multiple of GROUP columns.
LUCE_FN void load(const bf16_t* __restrict__ row, int column, int cols, float (&v)[GROUP]) {
    const uint4 words = column < cols ? *reinterpret_cast<const uint4*>(row + column) : make_uint4(0, 0, 0, 0);
    const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < GROUP; i++) v[i] = luce_f32(bf16_t{(u16)(pairs[i / 2] >> (i % 2 * 16))});
}

#define WAVES 4  // of a block whose waves have a row each

// n rows of x as Int8Row makes them, to rows of `padded` columns with zeros from column `cols` on. Rows of x lie `stride`
// apart. A wave has a row: of experts' inner values there are many short ones.
template <typename T>
LUCE_FN void wave_to_int8(const T* __restrict__ x, u8* __restrict__ to, float* __restrict__ scale, int n, int cols, int padded,
                          i64 stride) {
    luce_await();
    const int r = (int)blockIdx.x * WAVES + luce_wave(), lane = luce_lane();
    if (r >= n) return;
    const T* row = x + r * stride;
    Int8Row made(to + (i64)r * padded, scale + r);
    do {
#pragma unroll 2
        for (int column = lane * GROUP; column < padded; column += LUCE_LANES * GROUP) {
            float v[GROUP];
            load(row, column, cols, v);
            made.put(column, v);
        }
    } while (made.again(made.writes ? 0.0f : luce_lane_max(made.most), lane == 0));
}

// Grid of both: ceil(n / WAVES) blocks of WAVES waves.
extern "C" __global__ void __launch_bounds__(WAVES * LUCE_LANES)
    floats_to_int8(const float* __restrict__ x, u8* __restrict__ to, float* __restrict__ scale, int n, int cols, int padded,
                   i64 stride) {
    wave_to_int8(x, to, scale, n, cols, padded, stride);
}
extern "C" __global__ void __launch_bounds__(WAVES * LUCE_LANES)
    bf16_to_int8(const bf16_t* __restrict__ x, u8* __restrict__ to, float* __restrict__ scale, int n, int cols, int padded,
                 i64 stride) {
    wave_to_int8(x, to, scale, n, cols, padded, stride);
}

// PART products from a column on, both addresses multiples of 16 bytes.
LUCE_FN void load(const i32* __restrict__ sums, const float* __restrict__ features, int column, float row, float (&v)[PART]) {
    const int4 own = *reinterpret_cast<const int4*>(sums + column);
    const float4 by = *reinterpret_cast<const float4*>(features + column);
    v[0] = int8_product(own.x, row, by.x), v[1] = int8_product(own.y, row, by.y);
    v[2] = int8_product(own.z, row, by.z), v[3] = int8_product(own.w, row, by.w);
}

// The rows act(gate) * up as Int8Row makes them, `padded` columns with zeros from column `cols` on, a multiple of PART, with
// the activation's number in `Activation`. Sums [n, 2 cols] of `rows` and `features` have cols columns of gates, then as many
// of up. With `keeps` a row's floats stay in shared memory, 4 cols bytes, between the passes; else the second one reads the
// sums again. Grid: one block of up to GATED_THREADS per row.
extern "C" __global__ void __launch_bounds__(GATED_THREADS)
    gated_to_int8(const i32* __restrict__ sums, const float* __restrict__ rows, const float* __restrict__ features,
                  u8* __restrict__ to, float* __restrict__ scale, int activation, int cols, int padded, int keeps) {
    luce_await();
    LUCE_DYNAMIC_SHARED(float4, kept);
    const int r = (int)blockIdx.x, first = luce_thread() * PART, step = luce_threads() * PART;
    sums += (i64)r * 2 * cols;
    const float row = rows[r];
    Int8Row made(to + (i64)r * padded, scale + r);
    do {
#pragma unroll 3
        for (int column = first; column < cols; column += step) {
            float v[PART], up[PART];
            if (made.writes && keeps) {
                const float4 own = kept[column / PART];
                v[0] = own.x, v[1] = own.y, v[2] = own.z, v[3] = own.w;
            } else {
                load(sums, features, column, row, v);
                load(sums + cols, features + cols, column, row, up);
#pragma unroll
                for (int i = 0; i < PART; i++) v[i] = gated(activation, v[i], up[i]);
                // Each thread reads back only its own.
                if (keeps) kept[column / PART] = make_float4(v[0], v[1], v[2], v[3]);
            }
            made.put(column, v);
        }
    } while (made.again());
    made.pad(cols, padded);
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
        *reinterpret_cast<float4*>(row + first) = make_float4(
            int8_product((i32)__float_as_uint(sums.x), factor, own.x), int8_product((i32)__float_as_uint(sums.y), factor, own.y),
            int8_product((i32)__float_as_uint(sums.z), factor, own.z), int8_product((i32)__float_as_uint(sums.w), factor, own.w));
        return;
    }
    for (int j = first; j < luce_min(first + 4, count); j++)
        row[j] = int8_product((i32)__float_as_uint(row[j]), factor, features[j]);
}
