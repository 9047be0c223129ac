// Rows of x as signed bytes with a scale for every 32 columns, for the integer products of dot_s8.h.
#include "activation.h"
#include "quantise.h"

// x float32 [n, cols], rows x_stride apart, into values int8 [cols / 32, stride, 32] and scales float32 [cols / 32,
// stride, 2]; rows n, n + 1, ... become zeros. cols is a multiple of 32.
// Grid: (stride, ceil(cols / the block's threads)).
extern "C" __global__ void __launch_bounds__(256)
    quantise(const float* __restrict__ x, i8* __restrict__ values, float* __restrict__ scales, const i64 x_stride,
             const int n, const int cols) {
    luce_release();
    luce_await();
    const int row = (int)blockIdx.x, column = (int)(blockIdx.y * blockDim.x + threadIdx.x);
    const bool inside = column < cols;
    const float own[1] = {inside && row < n ? x[row * x_stride + column] : 0.0f};
    quantise_columns(own, inside, column, row, (int)gridDim.x, values, scales);
}

// The same of act(gate) * up: gate and up float32 [n, cols], act silu or gelu.
extern "C" __global__ void __launch_bounds__(256)
    quantise_gated(const float* __restrict__ gate, const i64 gate_stride, const float* __restrict__ up,
                   const i64 up_stride, i8* __restrict__ values, float* __restrict__ scales, const int n,
                   const int cols, const int gelu_gate) {
    luce_release();
    luce_await();
    const int row = (int)blockIdx.x, column = (int)(blockIdx.y * blockDim.x + threadIdx.x);
    const bool inside = column < cols;
    float own[1] = {0.0f};
    if (inside && row < n) {
        const float g = gate[row * gate_stride + column];
        own[0] = (gelu_gate ? gelu(g) : silu(g)) * up[row * up_stride + column];
    }
    quantise_columns(own, inside, column, row, (int)gridDim.x, values, scales);
}
