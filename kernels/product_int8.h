// One block of a product of few quantised rows: for matmul_int8.cu, and for matmul_int8_pair.cu, which includes this
// once for each of two types. With CHAINS, tensor cores multiply on targets that have them; the bits are the same.
#ifdef CHAINS
#include "mma_int8.h"
#else
#include "dot_int8.h"
#endif

// Features of a block; its threads, and the blocks that a multiprocessor should hold: BLOCKS of 256 threads.
// Registers limit these. Trials on an H200 with two, three and four, us: 16 rows of Q4_K 34816 x 5120 38.4, 44.7 and
// 60.4, 8 rows 33.5, 31.0 and 36.2, of 5120 x 17408 24.7, 17.3 and 23.8.
#if defined(CHAINS) && LUCE_MMA_S8
#define FEATURES (16 * TILES)
#define BLOCKS (TILES > 1 ? 1 : ROWS == 8 ? 3 : 2)
#define BOUNDS 32 * CHAINS, BLOCKS * 8 / CHAINS
#elif LUCE_MMA_S8
#define FEATURES 16
#define BOUNDS 256, ROWS >= 16 ? 2 : ROWS >= 2 ? 3 : 4
#else
#define FEATURES 16
#define BOUNDS 256
#endif

// out[r, first + j] = sum over k of x[r, k] * weight[j, k], for r < n <= ROWS and the FEATURES features j from
// FEATURES * block on that are below `rows`; x: ROWS quantised rows.
LUCE_FN void product_int8(int block, const u8* __restrict__ weight, const u8* __restrict__ x, float* __restrict__ out,
                        int n, int rows, int cols, int chain_bits, int out_stride, int first, u8* shared) {
    const int feature0 = block * FEATURES;
    const u8* end = weight + rows * row_bytes(cols);
    const auto row = [&](int feature) { return weight + luce_min(feature0 + feature, rows - 1) * row_bytes(cols); };
#if defined(CHAINS) && LUCE_MMA_S8
    const float* partial = tile_sums([&](int feature) { return TileRow{row(feature), end}; }, x, cols, shared);
    const int bits = CHAINS == 8 ? 3 : 2;
#else
    const auto operands = [&](int feature) { return Operands{row(feature), end, {x, ROWS, 0}}; };
    const float* partial = block_sums<ROWS, 2>(operands, 1, chain_bits, cols, shared);
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
