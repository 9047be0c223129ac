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

// The same of the rows of tiles of pairs (moe_rows.cu), a group for each: of `chosen` tiles [chosen, 3] with `order`, as
// group_pairs of moe.cu writes them, x's row of the pair, a row's k slots sharing it; and behind these, x's rows in order.
// If k is 0, x has the rows of all tiles one after the other. Tiles of no pairs are left out.
// Grid: (padded for each tile, ceil(cols / 4 / the block's threads)).
extern "C" __global__ void __launch_bounds__(256)
    quantise_pairs(const float* __restrict__ x, const i32* __restrict__ order, const i32* __restrict__ tiles,
                   u8* __restrict__ to, const i64 x_stride, const int n, const int cols, const int padded, const int wide,
                   const int chosen, const int k) {
    luce_release();
    luce_await();
    const int tile = (int)blockIdx.x / padded, place = (int)blockIdx.x % padded;
    const int column = (int)(blockIdx.y * blockDim.x + threadIdx.x) * 4;
    const int count = tile < chosen ? tiles[tile * 3 + 2] : padded;
    if (count == 0) return;
    int row = (int)blockIdx.x;
    if (k > 0 && tile >= chosen) {
        row -= chosen * padded;
    } else if (k > 0) {
        row = place < count ? order[tiles[tile * 3 + 1] + place] / k : n;
    }
    float own[4] = {};
    if (row < n) load4(x + row * x_stride, column, cols, own);
    quantise_columns(own, in_section(column, cols), column, place, group_bytes(to, cols, padded, wide));
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
