// variants: QTYPE=F32,F16,BF16,Q4_0,Q4_1,Q5_0,Q5_1,Q8_0,Q2_K,Q3_K,Q4_K,Q5_K,Q6_K,IQ4_NL,IQ4_XS,MXFP4
// variants: QTYPE=IQ1_S,IQ1_M,IQ2_XXS,IQ2_XS,IQ2_S,IQ3_XXS,IQ3_S,NVFP4,TQ1_0,TQ2_0
//
// Products of rows of x with the weights of the experts chosen for them. A pair is a row and one of its k slots:
// pair = row * k + slot. The weights of all experts are one matrix [experts * rows, cols], read in place.
//
// Row invariance: each result is one sum in an order that the columns alone determine (dot.h for expert_vec, tile.h for
// expert_tile). The other pairs of a tile, and the places in it, have no effect.
#include "dot.h"
#include "tile.h"

// --- few rows: a block owns FEATURES rows of one pair's expert

#define WAVES 4
#define FEATURES 2

// out[pair, first + j] = sum over c of x[pair, c] * weight[ids[pair], j, c], for j < rows.
// weight [experts, rows, cols] in blocks of QTYPE; x float32 with x_row elements from row to row and x_slot from slot
// to slot (0: the slots share the row); out float32 with out_stride elements from pair to pair.
// Grid: (ceil(rows / FEATURES), pairs) blocks of WAVES waves.
extern "C" __global__ void __launch_bounds__(WAVES * LUCE_LANES)
    expert_vec(const u8* __restrict__ weight, const float* __restrict__ x, const i32* __restrict__ ids,
               float* __restrict__ out, int slots, int rows, int cols, int x_row, int x_slot, int out_stride, int first) {
    luce_await();
    const int feature = (int)blockIdx.x * FEATURES;
    const int pair = (int)blockIdx.y;
    const u8* expert = weight + (i64)ids[pair] * rows * row_bytes(cols);
    const float* from = x + (i64)(pair / slots) * x_row + (i64)(pair % slots) * x_slot;
    float* to = out + (i64)pair * out_stride + first;
    if ((u64)from % 16 == 0 && cols % UNIT == 0) {
        products<WAVES, FEATURES, 1, true>(expert, from, to, 1, rows, cols, 0, 0, feature);
    } else {
        products<WAVES, FEATURES, 1, false>(expert, from, to, 1, rows, cols, 0, 0, feature);
    }
}

// --- many rows

// As expert_vec, for pairs sorted by moe.cu's group_pairs: tiles [*, 3] holds a tile's expert, first place in `order`,
// and count of at most TILE_ROWS pairs. x and scale are as tile.h takes them: a row per pair, or with share = slots one
// for all slots of a row.
// Grid: (tiles, ceil(rows / TILE_FEATURES)) blocks of TILE_THREADS; tiles of no pairs are left out.
extern "C" __global__ void TILE_BOUNDS
    expert_tile(const u8* __restrict__ weight, const tile_x* __restrict__ x, const float* __restrict__ scale,
                const i32* __restrict__ order, const i32* __restrict__ tiles, float* __restrict__ out, int share,
                int rows, int cols, int x_stride, int out_stride, int first) {
    luce_await();
    __shared__ i32 pairs[TILE_ROWS], sources[TILE_ROWS];
    const int count = tiles[blockIdx.x * 3 + 2];
    if (count == 0) return;
    const int place = tiles[blockIdx.x * 3 + 1];
    if (luce_thread() < TILE_ROWS) {
        pairs[luce_thread()] = order[place + luce_min(luce_thread(), count - 1)];
        sources[luce_thread()] = pairs[luce_thread()] / share;
    }
    luce_sync();

    Tile tile;
    tile.weight = weight + (i64)tiles[blockIdx.x * 3] * rows * row_bytes(cols);
    tile.x = x;
    tile.scale = scale;
    tile.out = out + first;
    tile.pairs = pairs;
    tile.sources = sources;
    tile.count = count;
    tile.feature0 = (int)blockIdx.y * TILE_FEATURES;
    tile.rows = rows;
    tile.cols = cols;
    tile.begin = 0;
    tile.end = cols;
    tile.x_stride = x_stride;
    tile.out_stride = out_stride;
    tile_products(tile);
}
