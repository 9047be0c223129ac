// variants for cuda: ROWS=8,16 CHAINS=1,2 GATED=0,1 QTYPE=Q4_0,Q8_0,Q4_K,Q5_K,Q6_K
//
// Experts on more than 16 quantised rows: the gated halves of all chosen ones, then the other halves. The sums are those
// of moe_int8.cu, so a row has the bits that it has alone. Only for targets with tensor cores.
//
// Pairs of a row and one of its k slots are sorted by expert (group_pairs of moe.cu), and a tile is up to ROWS of one
// expert. Behind the tiles of the chosen experts are those of an expert that all rows share, if there is one: ROWS rows
// each. Between the kernels, rows of a tile lie together, and those that it lacks are zeros.
#define SHARED_X 1
// Of 16 weight rows: a gate's and an up's, or two of a down. H200, 64 rows of 35B A3B, us: downs in Q6_K 90.7, 87.4, 92.2
// with one, two and four, in Q4_K 62.3, 57.3, 57.7.
#define TILES 2
#include "activation.h"
#include "mma_int8.h"

#if LUCE_MMA_S8

#define THREADS (32 * CHAINS)
// Blocks that a multiprocessor should hold. As above, gates and ups in Q4_K take 94 to 95 us with 6, 8 and 10; with four
// stages instead of two, and so five blocks, 112.
#define BLOCKS ((ROWS == 8 ? 16 : 12) / CHAINS)
// Of the products of a feature with a row of the tile.
#define STRIDE PARTIAL_STRIDE(16 * TILES)

#if GATED

// out[tile * ROWS + r] = act(gate x) * up x: out float32 [tiles * ROWS, half]. gates, ups: `half` rows for each of
// `experts`, expert_rows apart, and shared_gates, shared_ups [half, cols], all in blocks of QTYPE; half is a multiple
// of 32. x: ROWS quantised rows for each tile; tiles [chosen, 3] as group_pairs writes it.
// Grid: (half / 16, tiles) blocks of THREADS.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    expert_gated_rows(const u8* __restrict__ gates, const u8* __restrict__ ups, const u8* __restrict__ shared_gates,
                      const u8* __restrict__ shared_ups, const i32* __restrict__ tiles, const u8* __restrict__ x,
                      float* __restrict__ out, const int chosen, const int experts, const int expert_rows,
                      const int half, const int cols, const int gelu_gate) {
    luce_await();
    LUCE_DYNAMIC_SHARED(u8, shared);
    const int feature0 = (int)blockIdx.x * 16, tile = (int)blockIdx.y;
    const bool own = tile < chosen;
    if (own && tiles[tile * 3 + 2] == 0) return;
    const u8* const gate = own ? gates : shared_gates;
    const u8* const up = own ? ups : shared_ups;
    const i64 first = (own ? (i64)tiles[tile * 3] * expert_rows : 0) + feature0;
    const i64 all = (own ? (i64)(experts - 1) * expert_rows + half : half) * row_bytes(cols);
    const auto row = [&](int feature) {
        const u8* matrix = feature < 16 ? gate : up;
        return TileRow{matrix + (first + feature % 16) * row_bytes(cols), matrix + all};
    };
    const u8* const rows = x + (i64)tile * luce_ceil_div(cols, SECTION) * (UNIT_X / 2);
    const float* partial = tile_sums(row, rows, cols, shared);
#pragma unroll
    for (int i = luce_thread(); i < 16 * ROWS; i += THREADS) {
        const int feature = i % 16, r = i / 16;
        const float* from = partial + r * STRIDE + feature;
        const float left = chain_sum(from, ROWS * STRIDE), right = chain_sum(from + 16, ROWS * STRIDE);
        const float act = gelu_gate ? gelu(left) : silu(left);
        out[(i64)(tile * ROWS + r) * half + feature0 + feature] = act * right;
    }
}

#else

// out[pair, j] = row j of the down of the pair's expert times the pair's inner row, and shared_out[row, j] likewise of
// the shared expert. downs [experts, rows, cols] and shared_down [rows, cols] in blocks of QTYPE; inner: ROWS quantised
// rows for each tile; order, tiles [chosen, 3] as group_pairs writes them. out float32 [pairs, rows]; shared_out float32
// [n, rows].
// Grid: (ceil(rows / (16 * TILES)), tiles) blocks of THREADS.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    expert_down_rows(const u8* __restrict__ downs, const u8* __restrict__ shared_down, const i32* __restrict__ order,
                     const i32* __restrict__ tiles, const u8* __restrict__ inner, float* __restrict__ out,
                     float* __restrict__ shared_out, const int chosen, const int experts, const int n, const int rows,
                     const int cols) {
    luce_await();
    LUCE_DYNAMIC_SHARED(u8, shared);
    const int feature0 = (int)blockIdx.x * (16 * TILES), tile = (int)blockIdx.y;
    const bool own = tile < chosen;
    const int count = own ? tiles[tile * 3 + 2] : luce_min(ROWS, n - (tile - chosen) * ROWS);
    if (count == 0) return;
    const int first = own ? tiles[tile * 3 + 1] : (tile - chosen) * ROWS;
    const u8* const down = own ? downs + (i64)tiles[tile * 3] * rows * row_bytes(cols) : shared_down;
    const u8* const end = own ? downs + (i64)experts * rows * row_bytes(cols) : shared_down + rows * row_bytes(cols);
    const auto row = [&](int feature) {
        return TileRow{down + luce_min(feature0 + feature, rows - 1) * row_bytes(cols), end};
    };
    const u8* const x = inner + (i64)tile * luce_ceil_div(cols, SECTION) * (UNIT_X / 2);
    const float* partial = tile_sums(row, x, cols, shared);
    for (int i = luce_thread(); i < 16 * TILES * count; i += THREADS) {
        const int feature = i % (16 * TILES), r = i / (16 * TILES);
        const float sum = chain_sum(partial + r * STRIDE + feature, ROWS * STRIDE);
        float* to = own ? out + (i64)order[first + r] * rows : shared_out + (i64)(first + r) * rows;
        if (feature0 + feature < rows) to[feature0 + feature] = sum;
    }
}

#endif
#endif
