// What one block of a product of few quantised rows does: for matmul_s8.cu, and for matmul_s8_pair.cu, which includes
// this once for each of two formats. With CHAINS on tensor cores, where the target has them; no bit depends on it.
#ifdef CHAINS
#include "mma_s8.h"
#else
#include "dot_s8.h"
#endif

// Features of a block, and its threads with the blocks that a multiprocessor is to hold. Registers limit these; what
// many rows of x need beyond them costs more in waiting than it saves (H200, Q4_K: 8 rows, 34816 x 5120: 41.7 us with
// three blocks of 256 and 42.3 without a limit, 5120 x 17408: 25.3 and 40.1; 16 rows with two: 58.5 and 65.3, 43.2 and
// 70.0).
#if defined(CHAINS) && LUCE_MMA_S8
#define FEATURES (16 * TILES)
#define BOUNDS 32 * CHAINS, TILES > 1 ? 1 : (ROWS >= 16 ? 2 : 3) * 8 / CHAINS
#elif LUCE_MMA_S8
#define FEATURES 16
#define BOUNDS 256, ROWS >= 16 ? 2 : ROWS >= 2 ? 3 : 4
#else
#define FEATURES 16
#define BOUNDS 256
#endif

// out[r, first + j] = sum over k of x[r, k] * weight[j, k], for r < n <= ROWS and the FEATURES features j from
// FEATURES * block on that are below `rows`; values, scales: ROWS quantised rows.
LUCE_FN void product_s8(int block, const u8* __restrict__ weight, const i8* __restrict__ values,
                        const float* __restrict__ scales, float* __restrict__ out, int n, int rows, int cols,
                        int chain_bits, int out_stride, int first, u8* shared) {
    const int feature0 = block * FEATURES;
#if defined(CHAINS) && LUCE_MMA_S8
    const float* partial = tile_sums(weight, values, scales, feature0, rows, cols, shared);
    const int bits = CHAINS == 8 ? 3 : 2;
#else
    const Rows8 x = rows8(values, scales, ROWS);
    const u8* end = weight + rows * row_bytes(cols);
    const auto meet = [&](int feature) {
        return Meeting{weight + luce_min(feature0 + feature, rows - 1) * row_bytes(cols), end, x};
    };
    const float* partial = block_sums<ROWS, 2>(meet, 1, chain_bits, cols, shared);
    const int bits = chain_bits;
#endif
    const int stride = PARTIAL_STRIDE(FEATURES);
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < FEATURES * n; i += (int)blockDim.x) {
        const int feature = i % FEATURES, r = i / FEATURES;
        const float sum = chain_sum(partial + r * stride + feature, bits, ROWS * stride);
        if (feature0 + feature < rows) out[(i64)r * out_stride + first + feature0 + feature] = sum;
    }
}
