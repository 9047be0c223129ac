// Rows as fp16 for products of many rows, each row scaled by a power of two into the range of fp16.
#include "activation.h"
#include "fp16_rows.h"

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
    Fp16Row to(half + (i64)r * padded, scale + r);
    do {
        for (int column = luce_thread() * GROUP; column < padded; column += luce_threads() * GROUP) {
            float v[GROUP];
            load(row, column, cols, v);
            to.put(column, v);
        }
    } while (to.again());
}

// The rows act(gate) * up as rows_to_fp16 has them, with the activation's number in `Activation`: gate and up with `cols`
// columns, and rows gate_row and up_row elements apart. Grid: one block per row.
extern "C" __global__ void __launch_bounds__(256)
    gated_to_fp16(const float* __restrict__ gate, const float* __restrict__ up, f16_t* __restrict__ half,
                  float* __restrict__ scale, int activation, int cols, int padded, i64 gate_row, i64 up_row) {
    luce_await();
    const int r = (int)blockIdx.x;
    gate += r * gate_row, up += r * up_row;
    Fp16Row to(half + (i64)r * padded, scale + r);
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

// Rows of heads x[r, head, i] * sigmoid(gate[r, head, i]) as rows_to_fp16 has them: x contiguous, d a multiple of 8 or
// not, gate's rows and heads row_stride and head_stride elements apart. Grid: one block per row.
extern "C" __global__ void __launch_bounds__(256)
    sigmoid_gate_to_fp16(const float* __restrict__ x, const float* __restrict__ gate, f16_t* __restrict__ half,
                         float* __restrict__ scale, int heads, int d, int padded, i64 row_stride, i64 head_stride) {
    luce_await();
    const int r = (int)blockIdx.x, cols = heads * d;
    x += (i64)r * cols, gate += r * row_stride;
    Fp16Row to(half + (i64)r * padded, scale + r);
    do {
        for (int column = luce_thread() * GROUP; column < padded; column += luce_threads() * GROUP) {
            float v[GROUP];
            load(x, column, cols, v);
#pragma unroll
            for (int i = 0; i < GROUP; i++) {
                const int at = column + i;
                const float z = at < cols ? gate[at / d * head_stride + at % d] : 0.0f;
                v[i] = v[i] / (1.0f + expf(-z));
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
