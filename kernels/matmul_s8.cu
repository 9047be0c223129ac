// variants: ROWS=1,2,8,16 QTYPE=Q4_0,Q8_0,Q4_K,Q5_K,Q6_K
//
// Products of a quantised weight matrix with up to ROWS quantised rows of x: decoding and verification.
#include "gated_s8.h"

// out[r, first + j] = sum over k of x[r, k] * weight[j, k], for r < n <= ROWS and j < rows.
// values, scales: ROWS quantised rows. out float32, rows out_stride apart.
// Grid: ceil(rows / 16) blocks of 32 << chain_bits threads, chain_bits at most 3.
extern "C" __global__ void __launch_bounds__(256)
    matmul_s8(const u8* __restrict__ weight, const i8* __restrict__ values, const float* __restrict__ scales,
              float* __restrict__ out, const int n, const int rows, const int cols, const int chain_bits, const int out_stride,
              const int first) {
    LUCE_DYNAMIC_SHARED(u8, shared);
    const int feature0 = (int)blockIdx.x * 16;
    const Rows8 x = rows8(values, scales, ROWS);
    const u8* end = weight + rows * row_bytes(cols);
    const auto meet = [&](int feature) {
        return Meeting{weight + luce_min(feature0 + feature, rows - 1) * row_bytes(cols), end, x};
    };
    const float* partial = block_sums<ROWS, 2>(meet, 1, chain_bits, cols, shared);
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < 16 * n; i += (int)blockDim.x) {
        const int feature = i % 16, r = i / 16;
        const float sum = chain_sum(partial + r * PARTIAL_STRIDE(16) + feature, chain_bits, ROWS * PARTIAL_STRIDE(16));
        if (feature0 + feature < rows) out[(i64)r * out_stride + first + feature0 + feature] = sum;
    }
}

// act(gate x) * up x as ROWS quantised rows of `half` columns: weight holds `half` rows of gates, then as many of ups;
// half is a multiple of 32. act is silu, or gelu.
// Grid: half / 32 blocks of 128 << chain_bits threads, chain_bits at most 1.
extern "C" __global__ void __launch_bounds__(256)
    gated_s8(const u8* __restrict__ weight, const i8* __restrict__ values, const float* __restrict__ scales,
             i8* __restrict__ out_values, float* __restrict__ out_scales, const int half, const int cols, const int chain_bits,
             const int gelu_gate) {
    LUCE_DYNAMIC_SHARED(u8, shared);
    const int feature0 = (int)blockIdx.x * 32;
    const Rows8 x = rows8(values, scales, ROWS);
    const u8* end = weight + 2 * half * row_bytes(cols);
    const auto meet = [&](int feature) {
        return Meeting{weight + (feature0 + feature % 32 + feature / 32 * half) * row_bytes(cols), end, x};
    };
    const float* partial = block_sums<ROWS, 2>(meet, 4, chain_bits, cols, shared);
    gate_and_quantise<ROWS>(partial, chain_bits, gelu_gate, feature0, 0, ROWS, out_values, out_scales);
}
