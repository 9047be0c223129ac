// variants for cuda: GATED=0,1,2
//
// Products of a prompt's rows with the weights of the experts chosen for them, both as int8 rows (int8_rows.h), by groups of
// four waves (wgmma_rows.h). Pairs and tiles as in moe_prefill.cu. With GATED, a gate and an up become act(gate) * up, of
// the activation with the number GATED - 1. Sums are exact.
//
// Weights lie as wgmma reads them: for each expert pieces of FEATURES weight rows and SLICE columns, those of the same
// rows one after the other, each as it stands in shared memory. A lane has the products of rows g and g + 8 of a wave's 16:
// these are a gate and the up that belongs to it, or two neighbouring features.
#include "activation.h"
#include "bulk.h"
#include "int8_rows.h"
#include "products.h"
#include "wgmma_rows.h"

#if LUCE_WGMMA

#define GROUPS 2      // of four waves; two blocks of a multiprocessor, so that one multiplies while the other writes
#define BLOCKS 2      // of a multiprocessor
#define MOST_ROWS 128 // of a tile
#define STAGES 3      // slices of weights in shared memory
#define X_STAGES 4    // of rows, which stay for all turns
// Slices whose products run while the next one's are asked for: none, as the other block multiplies meanwhile, and so one
// more slice can be on its way.
#define RUNNING 0
#define AHEAD (STAGES - 1 - RUNNING)  // slices that are copied beside that
#define PREFETCHED 4  // slices from the one that is multiplied to that whose weights are brought to the second-level cache
#define THREADS (GROUPS * 128)
#define FEATURES 64             // weight rows of a group
#define SLICE 128               // columns, and bytes, of a row in shared memory
#define CHUNKS (SLICE / 16)     // 16-byte pieces of them
#define PIECE (FEATURES * SLICE)
#define COPY_ROWS (THREADS / CHUNKS)  // rows that the block copies at a time
#define GATES (FEATURES / 2)

static_assert(X_STAGES >= STAGES, "rows are there as long as their weights");
static_assert(MOST_ROWS <= THREADS && COPY_ROWS % 8 == 0, "a thread has a row, and the same chunk of each it copies");

// Where a weight row of an expert stands among its rows: `half` gates before as many ups with GATED.
LUCE_FN int place_of(int feature, int half) {
    if (GATED) {
        const int own = feature % half;
        return own / 8 * 16 + feature / half * 8 + own % 8;
    }
    return feature / 16 * 16 + feature % 2 * 8 + feature % 16 / 2;
}

// Weight rows as int8, `count` of them, each of `slices` slices, to their places; the first is row number `first` of
// matrices [experts, features] whose rows are `from` and on among an expert's `all`. `pieces`: of an expert.
// Grid: (count, ceil(slices / 16)) blocks of 128.
extern "C" __global__ void __launch_bounds__(128)
    place_rows(const u8* __restrict__ rows, const float* __restrict__ row_scale, u8* __restrict__ to,
               float* __restrict__ scale, int first, int features, int from, int all, int pieces, int slices) {
    luce_await();
    const int row = first + (int)blockIdx.x;
    const int place = place_of(from + row % features, all / 2);
    const i64 piece = (i64)(row / features) * pieces + place / FEATURES;
    const int r = place % FEATURES;
    if (luce_thread() == 0 && blockIdx.y == 0) scale[piece * FEATURES + r] = row_scale[blockIdx.x];
    const int slice = (int)blockIdx.y * 16 + luce_thread() / CHUNKS, chunk = luce_thread() % CHUNKS;
    if (slice >= slices) return;
    u8* const at = to + (piece * slices + slice) * PIECE + r * SLICE + (chunk ^ r % 8) * 16;
    *reinterpret_cast<uint4*>(at) =
        *reinterpret_cast<const uint4*>(rows + (i64)blockIdx.x * slices * SLICE + slice * SLICE + chunk * 16);
}

#define NOWHERE 0xffffffffu

// Where a row's results begin, NOWHERE for one that the tile lacks, and its scale.
struct Row {
    u32 place;
    float scale;
};

// Two blocks fill the shared memory of a multiprocessor to the last byte.
struct Shared {
    alignas(1024) u8 x[X_STAGES][MOST_ROWS * SLICE];
    alignas(1024) u8 weight[STAGES][GROUPS * PIECE];
    alignas(16) Row rows[MOST_ROWS];
};

struct Tile {
    const u8* weight;    // of the expert
    const float* scale;  // of its weight rows
    const u8* x;
    const i32* order;  // the pairs
    bf16_t* out;
    int count, share, piece0, turns, pieces, slices, features;
};

LUCE_FN int group_of() { return (int)(threadIdx.x / 128); }

// The group's piece in a turn. Beyond the expert's pieces it repeats the last one, and its results are not written.
LUCE_FN int piece_of(const Tile& tile, int turn) {
    return luce_min(tile.piece0 + turn * GROUPS + group_of(), tile.pieces - 1);
}

template <int N>
LUCE_FN void write_results(const Tile& tile, const Shared& shared, int turn, const i32 (&sum)[N / 8][4]) {
    const int piece = tile.piece0 + turn * GROUPS + group_of();
    const int wave = luce_wave() % 4, g = luce_lane() / 4, t = luce_lane() % 4;
    const int feature = GATED ? piece * GATES + wave * 8 + g : piece * FEATURES + wave * 16 + g * 2;
    if (feature >= tile.features) return;
    const float* const scale = tile.scale + piece * FEATURES + wave * 16 + g;
    const float low = scale[0], high = scale[8];
    bf16_t* const out = tile.out + feature;
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
        const uint4 two = *reinterpret_cast<const uint4*>(&shared.rows[i * 8 + t * 2]);
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const u32 place = e ? two.z : two.x;
            if (place == NOWHERE) continue;
            const float row = __uint_as_float(e ? two.w : two.y);
            const float a = int8_product(sum[i][e], row, low), b = int8_product(sum[i][e + 2], row, high);
            bf16_t* const to = out + place;
            if (GATED)
                *to = bf16_t{(u16)luce_bf16_pair(gated(GATED ? GATED - 1 : 0, a, b), 0.0f)};
            else
                *reinterpret_cast<u32*>(to) = luce_bf16_pair(a, b);
        }
    }
}

// N: rows of the tile, padded.
template <int N> LUCE_FN void multiply(const Tile& tile, Shared& shared) {
    const int slices = tile.slices, thread = (int)threadIdx.x;
    // The thread copies one piece of every COPY_ROWS-th row; rows beyond the last repeat it, and their results are not
    // written.
    const int first = thread / CHUNKS, chunk = thread % CHUNKS;
    u8* const x_to = shared.x[0] + first * SLICE + (chunk ^ first % 8) * 16;
    constexpr int COPIES = (N + COPY_ROWS - 1) / COPY_ROWS;
    u32 from[COPIES];
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        const int pair = tile.order[luce_min(first + i * COPY_ROWS, tile.count - 1)];
        from[i] = (u32)(pair / tile.share) * (u32)(slices * CHUNKS) + chunk;
    }
    u8* const weight_to = shared.weight[0] + group_of() * PIECE + thread % 128 * 16;
    // The group's weights in slice number `slice` of a turn, and on through the turns behind it; null beyond the last.
    const auto weight_at = [&](int turn, int slice) -> const u8* {
        while (slice >= slices) slice -= slices, turn++;
        return turn < tile.turns ? tile.weight + ((i64)piece_of(tile, turn) * slices + slice) * PIECE : nullptr;
    };
    const auto copy = [&](int turn, int slice) {
        if (const u8* weight = weight_at(turn, slice)) {
            u8* const to = weight_to + (turn * slices + slice) % STAGES * (GROUPS * PIECE);
#pragma unroll
            for (int i = 0; i < PIECE; i += 128 * 16) luce_copy16(to + i, weight + thread % 128 * 16 + i, true);
            if (turn == 0 && slice < slices) {
                const uint4* x = reinterpret_cast<const uint4*>(tile.x) + slice * CHUNKS;
                u8* const slot = x_to + slice % X_STAGES * (MOST_ROWS * SLICE);
#pragma unroll
                for (int i = 0; i < COPIES; i++) luce_copy16(slot + i * (COPY_ROWS * SLICE), x + from[i], true);
            }
        }
        luce_copy_close();
    };
#pragma unroll
    for (int i = 0; i < AHEAD; i++) copy(0, i);
    const luce_rows_t x0 = luce_wgmma_rows_at(shared.x[0]);
    const luce_rows_t weight0 = luce_wgmma_rows_further(luce_wgmma_rows_at(shared.weight[0]), group_of() * PIECE);
#pragma unroll 1
    for (int turn = 0; turn < tile.turns; turn++) {
        i32 sum[N / 8][4];
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) sum[i][e] = 0;
        }
        luce_wgmma_hold(sum);  // with RUNNING, ptxas would else put products one after the other
#pragma unroll 1
        for (int slice = 0; slice < slices; slice++) {
            const int step = turn * slices + slice;
            luce_copy_wait<AHEAD - 1>();
            luce_wgmma_share();
            luce_sync();
            const luce_rows_t x = luce_wgmma_rows_further(x0, slice % X_STAGES * (MOST_ROWS * SLICE));
            const luce_rows_t weight = luce_wgmma_rows_further(weight0, step % STAGES * (GROUPS * PIECE));
            luce_wgmma_fence();
#pragma unroll
            for (int k = 0; k < SLICE; k += 32)
                luce_wgmma_bytes<N>(sum, luce_wgmma_rows_further(weight, k), luce_wgmma_rows_further(x, k));
            luce_wgmma_close();
            // All waves have waited for the products of step - 1 - RUNNING, whose place this copy takes.
            copy(turn, slice + AHEAD);
            if (thread % 128 == 0) {
                if (const u8* further = weight_at(turn, slice + PREFETCHED)) luce_bulk_prefetch(further, PIECE);
            }
            luce_wgmma_wait<RUNNING>();
        }
        luce_wgmma_wait<0>();
        luce_wgmma_hold(sum);
        write_results<N>(tile, shared, turn, sum);
    }
}

// out[pair, j] = act(gate) * up, or without GATED the product of row pair / share of x with weight row j of the pair's
// expert, for j < features, to bfloat16, pairs out_stride apart; without GATED features and out_stride are even. weight and
// weight_scale as place_rows has them, `pieces` for each expert; x [rows, slices * SLICE] with the rows' scales. Tiles of
// at most MOST_ROWS pairs as group_pairs of moe.cu makes them; those of no pairs are left out.
// Grid: (tiles, ceil(pieces / (GROUPS * turns))) blocks of THREADS; turns is 1 for more than X_STAGES slices.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    expert_rows_int8(const u8* __restrict__ weight, const float* __restrict__ weight_scale, const u8* __restrict__ x,
                     const float* __restrict__ scale, const i32* __restrict__ order, const i32* __restrict__ tiles,
                     bf16_t* __restrict__ out, int share, int turns, int pieces, int slices, int features, int out_stride) {
    luce_await();
    LUCE_DYNAMIC_SHARED(Shared, all);
    const int count = tiles[blockIdx.x * 3 + 2];
    if (count == 0) return;
    const i64 piece = (i64)tiles[blockIdx.x * 3] * pieces;
    Tile tile;
    tile.weight = weight + piece * slices * PIECE;
    tile.scale = weight_scale + piece * FEATURES;
    tile.x = x;
    tile.order = order + tiles[blockIdx.x * 3 + 1];
    tile.out = out;
    tile.count = count;
    tile.share = share;
    tile.piece0 = (int)blockIdx.y * turns * GROUPS;
    tile.turns = luce_min(turns, luce_ceil_div(pieces - tile.piece0, GROUPS));
    tile.pieces = pieces;
    tile.slices = slices;
    tile.features = features;
    if (const int r = (int)threadIdx.x; r < MOST_ROWS) {
        const int pair = tile.order[luce_min(r, count - 1)];
        all->rows[r] = Row{r < count ? (u32)pair * (u32)out_stride : NOWHERE, scale[pair / share]};
    }
    switch (luce_ceil_div(count, 16)) {
    case 1: multiply<16>(tile, *all); break;
    case 2: multiply<32>(tile, *all); break;
    case 3: multiply<48>(tile, *all); break;
    case 4: multiply<64>(tile, *all); break;
    case 5: multiply<80>(tile, *all); break;
    case 6: multiply<96>(tile, *all); break;
    case 7: multiply<112>(tile, *all); break;
    default: multiply<128>(tile, *all);
    }
}

#endif
