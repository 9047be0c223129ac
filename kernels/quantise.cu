// Rows of x as int8, for the integer products of dot_int8.h.
#include "activation.h"
#include "quantise.h"

// Columns column ... column + 3 of a row, zeros from `cols` on.
LUCE_FN void load4(const float* __restrict__ row, int column, int cols, float (&x)[4]) {
    if (column + 4 <= cols && (u64)row % 16 == 0) {
        const float4 four = *reinterpret_cast<const float4*>(row + column);
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) x[i] = column + i < cols ? row[column + i] : 0.0f;
    }
}

// The group of `padded` quantised rows that row blockIdx.x belongs to: groups lie one after the other.
LUCE_FN Bytes group_bytes(u8* to, int cols, int padded, int wide) {
    const i64 bytes = (i64)luce_ceil_div(cols, SECTION) * section_bytes(padded, wide);
    return {to + (int)blockIdx.x / padded * bytes, padded, wide};
}

// x float32 [n, cols], rows x_stride apart, as groups of `padded` quantised rows (quantise.h); rows n, n + 1, ... become
// zeros. cols is a multiple of 32.
// Grid: (padded for each group, ceil(cols / 4 / the block's threads)).
extern "C" __global__ void __launch_bounds__(256)
    quantise(const float* __restrict__ x, u8* __restrict__ to, const i64 x_stride, const int n, const int cols,
             const int padded, const int wide) {
    luce_release();
    luce_await();
    const int row = (int)blockIdx.x, column = (int)(blockIdx.y * blockDim.x + threadIdx.x) * 4;
    float own[4] = {};
    if (row < n) load4(x + row * x_stride, column, cols, own);
    quantise_columns(own, in_section(column, cols), column, row % padded, group_bytes(to, cols, padded, wide));
}

// The same of act(gate) * up: gate and up float32 [n, cols], act silu or gelu.
extern "C" __global__ void __launch_bounds__(256)
    quantise_gated(const float* __restrict__ gate, const i64 gate_stride, const float* __restrict__ up,
                   const i64 up_stride, u8* __restrict__ to, const int n, const int cols, const int gelu_gate,
                   const int wide) {
    luce_release();
    luce_await();
    const int row = (int)blockIdx.x, column = (int)(blockIdx.y * blockDim.x + threadIdx.x) * 4;
    float own[4] = {}, other[4] = {};
    if (row < n) {
        load4(gate + row * gate_stride, column, cols, own);
        load4(up + row * up_stride, column, cols, other);
#pragma unroll
        for (int i = 0; i < 4; i++) own[i] = (gelu_gate ? gelu(own[i]) : silu(own[i])) * other[i];
    }
    quantise_columns(own, in_section(column, cols), column, row, {to, (int)gridDim.x, wide});
}
