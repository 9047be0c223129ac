// Rows as int8 with a scale for each row, for products of many rows in integers, and the sums of such products.
#include "activation.h"
#include "int8_rows.h"
#include "mma.h"

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

// GROUP products from a column on, both addresses multiples of 16 bytes.
LUCE_FN void load(const i32* __restrict__ sums, const float* __restrict__ features, int column, float row,
                  float (&v)[GROUP]) {
#pragma unroll
    for (int i = 0; i < GROUP; i += 4) {
        const int4 own = *reinterpret_cast<const int4*>(sums + column + i);
        const float4 by = *reinterpret_cast<const float4*>(features + column + i);
        v[i] = int8_product(own.x, row, by.x), v[i + 1] = int8_product(own.y, row, by.y);
        v[i + 2] = int8_product(own.z, row, by.z), v[i + 3] = int8_product(own.w, row, by.w);
    }
}

#define GATED_THREADS 768
// Groups of columns that a thread keeps in registers; it reads others again.
#define HELD 3

// The columns' act(gate) * up of a row of products whose sums have `cols` columns of gates, then as many of up.
LUCE_FN void gated(const i32* __restrict__ sums, const float* __restrict__ features, int column, int cols, float row,
                   int activation, float (&v)[GROUP]) {
    float up[GROUP];
    load(sums, features, column, row, v);
    load(sums + cols, features + cols, column, row, up);
#pragma unroll
    for (int i = 0; i < GROUP; i++) v[i] = gated(activation, v[i], up[i]);
}

// The rows act(gate) * up as Int8Row makes them, `padded` columns with zeros from column `cols` on, a multiple of 8, with the
// activation's number in `Activation`. Sums [n, 2 cols] are those of `rows` and `features`. Grid: one block of up to
// GATED_THREADS per row.
extern "C" __global__ void __launch_bounds__(GATED_THREADS)
    gated_to_int8(const i32* __restrict__ sums, const float* __restrict__ rows, const float* __restrict__ features,
                  u8* __restrict__ to, float* __restrict__ scale, int activation, int cols, int padded) {
    luce_await();
    const int r = (int)blockIdx.x, first = luce_thread() * GROUP, step = luce_threads() * GROUP;
    sums += (i64)r * 2 * cols;
    const float row = rows[r];
    float held[HELD][GROUP];
#pragma unroll
    for (int n = 0; n < HELD; n++)
        if (first + n * step < cols) gated(sums, features, first + n * step, cols, row, activation, held[n]);
    Int8Row made(to + (i64)r * padded, scale + r);
    do {
#pragma unroll
        for (int n = 0; n < HELD; n++)
            if (first + n * step < cols) made.put(first + n * step, held[n]);
        for (int column = first + HELD * step; column < cols; column += step) {
            float v[GROUP];
            gated(sums, features, column, cols, row, activation, v);
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
