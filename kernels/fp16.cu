// Rows of float as fp16 for products of many rows, each row scaled by a power of two into the range of fp16.
#include "mma.h"
#include "reduce.h"

#define GROUP 8  // columns that a thread converts at a time

// Columns beyond the last give zeros.
LUCE_FN void load(const float* __restrict__ row, int column, int cols, float (&v)[GROUP]) {
    if (column + GROUP <= cols && (u64)row % 16 == 0) {
        const float4 low = *reinterpret_cast<const float4*>(row + column);
        const float4 high = *reinterpret_cast<const float4*>(row + column + 4);
        v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
        v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    } else {
#pragma unroll
        for (int i = 0; i < GROUP; i++) v[i] = column + i < cols ? row[column + i] : 0.0f;
    }
}

// Writes factor * row as fp16, and returns the largest finite magnitude of the thread's columns of the row.
LUCE_FN float convert(const float* __restrict__ row, f16_t* __restrict__ half, int cols, int padded, float factor) {
    float most = 0.0f;
    for (int column = luce_thread() * GROUP; column < padded; column += luce_threads() * GROUP) {
        float v[GROUP];
        load(row, column, cols, v);
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            const float size = fabsf(v[i]);
            most = fmaxf(most, size <= LUCE_FLT_MAX ? size : 0.0f);
        }
        uint4 packed;
        packed.x = luce_f16_pair(v[0] * factor, v[1] * factor);
        packed.y = luce_f16_pair(v[2] * factor, v[3] * factor);
        packed.z = luce_f16_pair(v[4] * factor, v[5] * factor);
        packed.w = luce_f16_pair(v[6] * factor, v[7] * factor);
        *reinterpret_cast<uint4*>(half + column) = packed;
    }
    return most;
}

// half[r] = x[r] / scale[r], to nearest, and zeros from column `cols` on. Rows of x are those of (r / slots, r %
// slots), x_row and x_slot elements apart; half has rows of `padded` columns, a multiple of 8. scale[r] is 1 if the
// row's largest finite magnitude is 0 or from 2^-7 to 2^15; else it is the power of two that makes this 2^14 or more
// but less than 2^15. Infinities and NaN do not change.
// fp16 has 11 bits from 2^-14 on: values of 2^-28 and less of a scaled row's largest lose some of them.
// Grid: one block per row.
extern "C" __global__ void __launch_bounds__(256)
    rows_to_fp16(const float* __restrict__ x, f16_t* __restrict__ half, float* __restrict__ scale, int slots, int cols,
              int padded, i64 x_row, i64 x_slot) {
    luce_await();
    const int r = (int)blockIdx.x;
    const float* row = x + r / slots * x_row + r % slots * x_slot;
    half += (i64)r * padded;
    // Almost every row needs no scale, and is read only once.
    const float most = luce_block_max(convert(row, half, cols, padded, 1.0f));
    const int exponent = (int)(__float_as_uint(most) >> 23) - 127;
    // The smallest rows would need more than a float's largest power of two.
    const int shift = most == 0.0f || (exponent >= -7 && exponent <= 14) ? 0 : luce_min(14 - exponent, 126);
    if (luce_thread() == 0) scale[r] = __uint_as_float((u32)(127 - shift) << 23);
    if (shift != 0) convert(row, half, cols, padded, __uint_as_float((u32)(127 + shift) << 23));
}

// out[r, j] *= scale[r] for j < rows, after a product without scales. Almost every row's scale is 1.
// Grid: one block per row.
extern "C" __global__ void rescale_rows(float* __restrict__ out, const float* __restrict__ scale, int rows, i64 stride) {
    luce_await();
    const float factor = scale[blockIdx.x];
    if (factor == 1.0f) return;
    float* row = out + (i64)blockIdx.x * stride;
    for (int j = luce_thread(); j < rows; j += luce_threads()) row[j] *= factor;
}

// out[r, j] = sum over the parts p, ascending, of partial[p, r, j], for j < rows; partial [parts, n, rows].
// Grid: (n, ceil(rows / the block's threads)).
extern "C" __global__ void add_parts(const float* __restrict__ partial, float* __restrict__ out, int parts, int rows,
                                     i64 stride) {
    luce_await();
    const int j = (int)(blockIdx.y * blockDim.x + threadIdx.x);
    if (j >= rows) return;
    const i64 size = (i64)gridDim.x * rows;
    const float* from = partial + (i64)blockIdx.x * rows + j;
    float sum = from[0];
    for (int p = 1; p < parts; p++) sum += from[p * size];
    out[(i64)blockIdx.x * stride + j] = sum;
}
