// Rows as fp16 for products of many rows, each row scaled by a power of two into the range of fp16.
#include "activation.h"
#include "fp16_rows.h"
#include "products.h"

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

// half[r] = x[r] / scale[r], to nearest, and zeros from column `cols` on. Rows of x are those of (r / slots, r %
// slots), x_row and x_slot elements apart; half has rows of `padded` columns, a multiple of 8. scale[r] is 1 if the
// row's largest finite magnitude is 0 or from 2^-7 to 2^top; else it is the power of two that makes this 2^(top - 1) or more
// but less than 2^top. Infinities and NaN do not change.
// fp16 has 11 bits from 2^-14 on: values of 2^-(13 + top) and less of a scaled row's largest lose some of them.
// Grid: ceil(n / FP16_ROWS) blocks of FP16_ROWS waves.
extern "C" __global__ void __launch_bounds__(FP16_ROWS * LUCE_LANES)
    rows_to_fp16(const float* __restrict__ x, f16_t* __restrict__ half, float* __restrict__ scale, int n, int slots,
                 int cols, int padded, i64 x_row, i64 x_slot, int top) {
    luce_await();
    const int r = (int)blockIdx.x * FP16_ROWS + luce_wave();
    if (r >= n) return;
    const float* row = x + r / slots * x_row + r % slots * x_slot;
    write_fp16_row(Fp16Row(half + (i64)r * padded, scale + r, top), padded,
                   [&](int column, float (&v)[GROUP]) { load(row, column, cols, v); });
}

// The rows act(gate) * up as rows_to_fp16 has them, with the activation's number in `Activation`: gate and up with `cols`
// columns, and rows gate_row and up_row elements apart. Grid: one block per row.
extern "C" __global__ void __launch_bounds__(256)
    gated_to_fp16(const float* __restrict__ gate, const float* __restrict__ up, f16_t* __restrict__ half,
                  float* __restrict__ scale, int activation, int cols, int padded, i64 gate_row, i64 up_row, int top) {
    luce_await();
    const int r = (int)blockIdx.x;
    gate += r * gate_row, up += r * up_row;
    Fp16Row to(half + (i64)r * padded, scale + r, top);
    do {
        for (int column = luce_thread() * GROUP; column < padded; column += luce_threads() * GROUP) {
            float g[GROUP], u[GROUP];
            load(gate, column, cols, g);
            load(up, column, cols, u);
#pragma unroll
            for (int i = 0; i < GROUP; i++) g[i] = gated(activation, g[i], u[i]);
            to.put(column, g);
        }
    } while (to.again());
}

// The same of products in fp16, whose rows have scales: gates and ups are the halves of gate_up, rows of 2 * cols times
// rows[r], cols a multiple of 8. Grid: one block per row.
extern "C" __global__ void __launch_bounds__(256)
    gated_halves_to_fp16(const f16_t* __restrict__ gate_up, const float* __restrict__ rows, f16_t* __restrict__ half,
                         float* __restrict__ scale, int activation, int cols, int padded, int top) {
    luce_await();
    const int r = (int)blockIdx.x;
    gate_up += (i64)r * 2 * cols;
    const float factor = rows[r];
    Fp16Row to(half + (i64)r * padded, scale + r, top);
    do {
        for (int column = luce_thread() * GROUP; column < padded; column += luce_threads() * GROUP) {
            float v[GROUP] = {};
            if (column < cols) {
                const uint4 gates = *reinterpret_cast<const uint4*>(gate_up + column);
                const uint4 ups = *reinterpret_cast<const uint4*>(gate_up + cols + column);
                const u32 g[] = {gates.x, gates.y, gates.z, gates.w}, u[] = {ups.x, ups.y, ups.z, ups.w};
#pragma unroll
                for (int i = 0; i < GROUP; i++) {
                    const f16_t gate = {(u16)(g[i / 2] >> i % 2 * 16)}, up = {(u16)(u[i / 2] >> i % 2 * 16)};
                    const float z = luce_f32(gate) * factor, w = luce_f32(up) * factor;
                    v[i] = activation == SILU ? silu_of_halves(z) * w : gated(activation, z, w);
                }
            }
            to.put(column, v);
        }
    } while (to.again());
}

// Rows of heads x[r, head, i] * sigmoid(gate[r, head, i]) as rows_to_fp16 has them: x contiguous, d a multiple of 8 or
// not, gate's rows and heads row_stride and head_stride elements apart. Grid: one block per row.
extern "C" __global__ void __launch_bounds__(256)
    sigmoid_gate_to_fp16(const float* __restrict__ x, const float* __restrict__ gate, f16_t* __restrict__ half,
                         float* __restrict__ scale, int heads, int d, int padded, i64 row_stride, i64 head_stride,
                         int top) {
    luce_await();
    const int r = (int)blockIdx.x, cols = heads * d;
    x += (i64)r * cols, gate += r * row_stride;
    Fp16Row to(half + (i64)r * padded, scale + r, top);
    do {
        for (int column = luce_thread() * GROUP; column < padded; column += luce_threads() * GROUP) {
            float v[GROUP], z[GROUP];
            load(x, column, cols, v);
            if (d % GROUP == 0) {
                // All of one head, or padding.
                const int head = column / d;
                load(gate + head * head_stride, column % d, column < cols ? d : 0, z);
            } else {
#pragma unroll
                for (int i = 0; i < GROUP; i++) {
                    const int at = column + i;
                    z[i] = at < cols ? gate[at / d * head_stride + at % d] : 0.0f;
                }
            }
#pragma unroll
            for (int i = 0; i < GROUP; i++) v[i] = v[i] / (1.0f + expf(-z[i]));
            to.put(column, v);
        }
    } while (to.again());
}

// The same of gates in fp16, whose rows are halves times rows[r]; d and strides are multiples of GROUP.
extern "C" __global__ void __launch_bounds__(256)
    sigmoid_halves_to_fp16(const float* __restrict__ x, const f16_t* __restrict__ gate, const float* __restrict__ rows,
                           f16_t* __restrict__ half, float* __restrict__ scale, int heads, int d, int padded,
                           i64 row_stride, i64 head_stride, int top) {
    luce_await();
    const int r = (int)blockIdx.x, cols = heads * d;
    x += (i64)r * cols, gate += r * row_stride;
    const float factor = -1.4426950408889634f * rows[r];
    Fp16Row to(half + (i64)r * padded, scale + r, top);
    do {
        for (int column = luce_thread() * GROUP; column < padded; column += luce_threads() * GROUP) {
            float v[GROUP];
            load(x, column, cols, v);
            if (column < cols) {
                const uint4 gates = *reinterpret_cast<const uint4*>(gate + column / d * head_stride + column % d);
                const u32 g[] = {gates.x, gates.y, gates.z, gates.w};
#pragma unroll
                for (int i = 0; i < GROUP; i++) {
                    const f16_t own = {(u16)(g[i / 2] >> i % 2 * 16)};
                    v[i] *= luce_reciprocal(1.0f + luce_exp2(luce_f32(own) * factor));
                }
            }
            to.put(column, v);
        }
    } while (to.again());
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

// out[r, j] = half[r, j] * rows[r], of products in fp16: both [n, cols], cols a multiple of GROUP.
// Grid: (n, ceil(cols / GROUP / the block's threads)).
extern "C" __global__ void __launch_bounds__(256)
    halves_to_float(const f16_t* __restrict__ half, const float* __restrict__ rows, float* __restrict__ out, int cols) {
    luce_await();
    const int column = ((int)(blockIdx.y * blockDim.x) + luce_thread()) * GROUP;
    if (column >= cols) return;
    const i64 at = (i64)blockIdx.x * cols + column;
    const float factor = rows[blockIdx.x];
    float4* to = reinterpret_cast<float4*>(out + at);
#pragma unroll
    for (int i = 0; i < GROUP / 4; i++) {
        const FourHalves four = *reinterpret_cast<const FourHalves*>(half + at + i * 4);
        to[i] = {luce_f32(four.at[0]) * factor, luce_f32(four.at[1]) * factor, luce_f32(four.at[2]) * factor,
                 luce_f32(four.at[3]) * factor};
    }
}

// most = the largest sum of squares of a row of half [gridDim.x, cols], or NaN or infinity if a row has one; `most` is such a
// sum of other rows, or 0. Grid: one block per row.
extern "C" __global__ void __launch_bounds__(256) largest_square(const f16_t* __restrict__ half, i32* most, int cols) {
    luce_await();
    const f16_t* row = half + (i64)blockIdx.x * cols;
    float sum = 0.0f;
    for (int j = luce_thread(); j < cols; j += luce_threads()) sum = fmaf(luce_f32(row[j]), luce_f32(row[j]), sum);
    sum = luce_block_sum(sum);
    // Numbers from 0 on are in the order of their bits, and a NaN without a sign is above them.
    if (luce_thread() == 0) atomicMax(most, (i32)(__float_as_uint(sum) & 0x7fffffffu));
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
