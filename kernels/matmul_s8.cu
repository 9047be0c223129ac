// variants: ROWS=1,2,8,16 QTYPE=Q4_0,Q8_0,Q4_K,Q5_K,Q6_K
//
// Products of a quantised weight matrix with up to ROWS quantised rows of x: decoding and verification.
#include "dot_s8.h"

// Registers limit how many blocks a multiprocessor holds; what many rows of x need beyond these counts costs more in
// waiting than it saves (H200, Q4_K: 8 rows, 34816 x 5120: 41.7 us with three blocks and 42.3 without a limit, 5120 x
// 17408: 25.3 and 40.1; 16 rows with two: 58.5 and 65.3, 43.2 and 70.0).
#if LUCE_MMA_S8
#define BOUNDS 256, ROWS >= 16 ? 2 : ROWS >= 2 ? 3 : 4
#else
#define BOUNDS 256
#endif

// out[r, first + j] = sum over k of x[r, k] * weight[j, k], for r < n <= ROWS and j < rows.
// values, scales: ROWS quantised rows. out float32, rows out_stride apart.
// Grid: ceil(rows / 16) blocks of 32 << chain_bits threads, chain_bits at most 3.
extern "C" __global__ void __launch_bounds__(BOUNDS)
    matmul_s8(const u8* __restrict__ weight, const i8* __restrict__ values, const float* __restrict__ scales,
              float* __restrict__ out, const int n, const int rows, const int cols, const int chain_bits,
              const int out_stride, const int first) {
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
