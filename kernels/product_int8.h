// One block of a product of few quantised rows: for matmul_int8.cu, and for matmul_int8_pair.cu, which includes this
// once for each of two types. Tensor cores multiply many rows where targets have them, with the same bits.
#include "mma.h"
#include "norm_alone.h"
#define ADDS_EARLY 2
#define BY_TILES (LUCE_MMA_S8 && ROWS >= 8 && CHAINS >= 4)
#if BY_TILES
#include "mma_int8.h"
#else
#include "dot_int8.h"
#endif

// Features of a block; its threads, and the blocks that a multiprocessor should hold: BLOCKS of 256 threads.
// Registers limit these. Trials on an H200 with two, three and four, us: 16 rows of Q4_K 34816 x 5120 38.4, 44.7 and
// 60.4, 8 rows 33.5, 31.0 and 36.2, of 5120 x 17408 24.7, 17.3 and 23.8. Without tiles a block has up to four workers.
#if BY_TILES
#define FEATURES (16 * TILES)
#define BLOCK_THREADS (32 * CHAINS)
#define BLOCKS (TILES > 1 ? 1 : ROWS == 8 ? 3 : 2)
#else
#define FEATURES (CHAINS == 8 ? 8 : 16)
#define BLOCK_THREADS (32 * FEATURES / WORKER_ROWS)
#define BLOCKS (ROWS >= 16 ? 2 : ROWS >= 2 ? 3 : 4)
#endif
#define BLOCKS_HELD (BLOCKS * 256 / BLOCK_THREADS)
#if LUCE_MMA_S8
#define BOUNDS(held) BLOCK_THREADS, held
#else
#define BOUNDS(held) (BLOCK_THREADS < LUCE_LANES ? LUCE_LANES : BLOCK_THREADS)
#endif

// out[r, first + j] = sum over k of x[r, k] * weight[j, k], for r < n <= ROWS and the FEATURES features j from
// FEATURES * block on that are below `rows`; x: ROWS quantised rows. With `adds`, where ROWS is 1, out += that; if it is
// ADDS_EARLY, the next kernel has few small blocks, which begin with a long wait for weights, and may start at once.
LUCE_FN void product_int8(int block, const u8* __restrict__ weight, const u8* __restrict__ x, float* __restrict__ out,
                        int n, int rows, int cols, int out_stride, int first, int adds, u8* shared) {
    if (ROWS == 1 && adds == ADDS_EARLY) luce_release();
    const int feature0 = block * FEATURES;
    const u8* end = weight + rows * row_bytes(cols);
    const auto row = [&](int feature) { return weight + luce_min(feature0 + feature, rows - 1) * row_bytes(cols); };
    float* const to = out + first + feature0;
    // What is added to. Behind the sums it is one more wait for memory, but types with more scales have no register for it.
    const bool early = ROWS == 1 && INTEGER_SCALES;
    float before = 0.0f;
#if BY_TILES
    const float* partial = tile_sums([&](int feature) { return TileRow{row(feature), end}; }, x, cols, shared);
#else
    const auto operands = [&](int feature) { return Operands{row(feature), end, {x, ROWS, 0}}; };
    const auto prepare = [&] {
        const int feature = (int)threadIdx.x;
        if (early && adds && feature < luce_min(FEATURES, rows - feature0)) before = to[feature];
    };
    const float* partial = block_sums<ROWS, 2>(operands, FEATURES, cols, shared, prepare);
#endif
    const int stride = PARTIAL_STRIDE(FEATURES);
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < FEATURES * n; i += (int)blockDim.x) {
        const int feature = i % FEATURES, r = i / FEATURES;
        float sum = chain_sum(partial + r * stride + feature, ROWS * stride);
        if (feature0 + feature >= rows) continue;
        if (ROWS == 1 && adds) sum += early ? before : to[feature];
        to[(i64)r * out_stride + feature] = sum;
    }
}

#define NORMS (ROWS == 1 && CHAINS == 4)
#if NORMS
// Of a product that norms its row: tiles of a block. H200, experts and DeltaNet's inputs of 12352 x 2048 of a 35B A3B, us: a norm
// launched by itself 21.84, three tiles 21.16, one, whose blocks together norm longer, 23.50; three with a chain's second unit
// under way before luce_await too 22.24, with eight chains 27.5 instead of 26.0.
#define NORM_TILES 3
#define NORM_FEATURES (16 * NORM_TILES)
#define NORM_THREADS (32 * CHAINS * NORM_TILES)
#if LUCE_MMA_S8
#define NORM_BOUNDS NORM_THREADS, (INTEGER_SCALES ? 1024 : 768) / NORM_THREADS
#else
#define NORM_BOUNDS NORM_THREADS
#endif

// out[first + j] = sum over k of y[k] * weight[j, k] with y the norm of x float32 [cols], as rms_norm of norm.cu quantises
// it; factors float32 [cols], and cols is at most 512 * CHAINS. In shared memory that row lies in front of the units.
LUCE_FN void norm_product_int8(int block, const u8* __restrict__ weight, const float* x, const float* __restrict__ factors,
                             float eps, float* __restrict__ out, int rows, int cols, int first, u8* shared) {
    luce_release();  // the next kernel's blocks ask for weights, or recurrent states, meanwhile
    const int feature0 = block * NORM_FEATURES, feature = (int)threadIdx.x;
    const NormAlone<512 * CHAINS, NORM_THREADS> norm(factors, cols);
    const u8* end = weight + rows * row_bytes(cols);
    const auto operands = [&](int of) {
        return Operands{weight + luce_min(feature0 + of, rows - 1) * row_bytes(cols), end, {shared, 1, 0}};
    };
    const auto prepare = [&] { norm_alone(norm, x, eps, shared, INTEGER_SCALES); };
    const float* partial = block_sums<1, 2>(operands, NORM_FEATURES, cols, shared + alone_bytes(cols), prepare);
    if (feature < luce_min(NORM_FEATURES, rows - feature0))
        out[first + feature0 + feature] = chain_sum(partial + feature, PARTIAL_STRIDE(NORM_FEATURES));
}
#endif
