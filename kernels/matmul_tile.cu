// variants: QTYPE=F32,F16,BF16,Q4_0,Q4_1,Q5_0,Q5_1,Q8_0,Q2_K,Q3_K,Q4_K,Q5_K,Q6_K,IQ4_NL,IQ4_XS,MXFP4
// variants: QTYPE=IQ1_S,IQ1_M,IQ2_XXS,IQ2_XS,IQ2_S,IQ3_XXS,IQ3_S,NVFP4,TQ1_0,TQ2_0
//
// Products of a weight matrix with many rows: prefill, and large batches.
#include "tile.h"

// out[part, r, j] = scale[r] * sum over the part's k of x[r, k] * weight[j, k], for r < n and j < rows. A part is
// `part_cols` columns, a multiple of 128.
// weight [rows, cols] in blocks of QTYPE; x and scale as tile.h takes them, x_stride elements from row to row; out
// float32 with out_stride elements from row to row, n * out_stride from part to part.
// Grid: (ceil(n / TILE_ROWS), ceil(rows / TILE_FEATURES), parts) blocks of TILE_THREADS. Blocks that run side by side
// share their weights.
extern "C" __global__ void TILE_BOUNDS
    matmul_tile(const u8* __restrict__ weight, const tile_x* __restrict__ x, const float* __restrict__ scale,
                float* __restrict__ out, int n, int rows, int cols, int x_stride, int out_stride, int part_cols) {
    luce_await();
    __shared__ i32 numbers[TILE_ROWS];
    const int row0 = (int)blockIdx.x * TILE_ROWS;
    if (luce_thread() < TILE_ROWS) numbers[luce_thread()] = luce_min(row0 + luce_thread(), n - 1);
    luce_sync();

    Tile tile;
    tile.weight = weight;
    tile.x = x;
    tile.scale = scale;
    tile.out = out + (i64)blockIdx.z * n * out_stride;
    tile.pairs = tile.sources = numbers;
    tile.count = luce_min(n - row0, TILE_ROWS);
    tile.feature0 = (int)blockIdx.y * TILE_FEATURES;
    tile.rows = rows;
    tile.cols = cols;
    tile.begin = (int)blockIdx.z * part_cols;
    tile.end = luce_min(tile.begin + part_cols, cols);
    tile.x_stride = x_stride;
    tile.out_stride = out_stride;
    tile_products(tile);
}
