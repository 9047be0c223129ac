// One block of a product of few quantised rows: for matmul_int8.cu, and for matmul_int8_pair.cu, which includes this
// once for each of two types. Tensor cores multiply many rows where targets have them, with the same bits.
#include "mma.h"
#define BY_TILES (LUCE_MMA_S8 && ROWS >= 8 && CHAINS >= 4)
#if BY_TILES
#include "mma_int8.h"
#else
#include "dot_int8.h"
#endif

// Features of a block; its threads, and the blocks that a multiprocessor should hold: BLOCKS of 256 threads.
// Registers limit these. Trials on an H200 with two, three and four, us: 16 rows of Q4_K 34816 x 5120 38.4, 44.7 and
// 60.4, 8 rows 33.5, 31.0 and 36.2, of 5120 x 17408 24.7, 17.3 and 23.8. One row of four chains has nine blocks of 128
// threads where registers suffice: with eight, 132 multiprocessors have room for 1056 of the 2176 blocks of 34816 features,
// and the last 64 ran alone.
#if BY_TILES
#define FEATURES (16 * TILES)
#define BLOCKS (TILES > 1 ? 1 : ROWS == 8 ? 3 : 2)
#else
#define FEATURES 16
#define BLOCKS (ROWS >= 16 ? 2 : ROWS >= 2 ? 3 : 4)
#endif
#if LUCE_MMA_S8
#define BOUNDS 32 * CHAINS, (ROWS == 1 && CHAINS == 4 && HAS_MINIMUM ? 9 : BLOCKS * 8 / CHAINS)
#else
#define BOUNDS (CHAINS > 1 ? 32 * CHAINS : LUCE_LANES)
#endif

// out[r, first + j] = sum over k of x[r, k] * weight[j, k], for r < n <= ROWS and the FEATURES features j from
// FEATURES * block on that are below `rows`; x: ROWS quantised rows.
LUCE_FN void product_int8(int block, const u8* __restrict__ weight, const u8* __restrict__ x, float* __restrict__ out,
                        int n, int rows, int cols, int out_stride, int first, u8* shared) {
    const int feature0 = block * FEATURES;
    const u8* end = weight + rows * row_bytes(cols);
    const auto row = [&](int feature) { return weight + luce_min(feature0 + feature, rows - 1) * row_bytes(cols); };
#if BY_TILES
    const float* partial = tile_sums([&](int feature) { return TileRow{row(feature), end}; }, x, cols, shared);
#else
    const auto operands = [&](int feature) { return Operands{row(feature), end, {x, ROWS, 0}}; };
    const float* partial = block_sums<ROWS, 2>(operands, 1, cols, shared);
#endif
    const int stride = PARTIAL_STRIDE(FEATURES);
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < FEATURES * n; i += (int)blockDim.x) {
        const int feature = i % FEATURES, r = i / FEATURES;
        const float sum = chain_sum(partial + r * stride + feature, ROWS * stride);
        if (feature0 + feature < rows) out[(i64)r * out_stride + first + feature0 + feature] = sum;
    }
}
