// What one block of a product of few quantised rows does: for matmul_s8.cu, and for matmul_s8_pair.cu, which includes
// this once for each of two formats.
#include "dot_s8.h"

// Registers limit how many blocks a multiprocessor holds; what many rows of x need beyond these counts costs more in
// waiting than it saves (H200, Q4_K: 8 rows, 34816 x 5120: 41.7 us with three blocks and 42.3 without a limit, 5120 x
// 17408: 25.3 and 40.1; 16 rows with two: 58.5 and 65.3, 43.2 and 70.0).
#if LUCE_MMA_S8
#define BOUNDS 256, ROWS >= 16 ? 2 : ROWS >= 2 ? 3 : 4
#else
#define BOUNDS 256
#endif

// out[r, first + j] = sum over k of x[r, k] * weight[j, k], for r < n <= ROWS and the 16 features j from 16 * block on
// that are below `rows`; values, scales: ROWS quantised rows.
LUCE_FN void product_s8(int block, const u8* __restrict__ weight, const i8* __restrict__ values,
                        const float* __restrict__ scales, float* __restrict__ out, int n, int rows, int cols,
                        int chain_bits, int out_stride, int first, u8* shared) {
    const int feature0 = block * 16;
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
