// variants for cuda: QTYPE=F16,BF16,Q4_0,Q4_1,Q5_0,Q5_1,Q8_0,Q2_K,Q3_K,Q4_K,Q5_K,Q6_K,IQ4_NL,IQ4_XS,MXFP4 GATED=0,1,2
// variants for cuda: QTYPE=IQ1_S,IQ1_M,IQ2_XXS,IQ2_XS,IQ2_S,IQ3_XXS,IQ3_S,NVFP4,TQ1_0,TQ2_0 GATED=0,1,2
//
// Products of a prompt's rows with the weights of the experts chosen for them, by groups of four waves (wgmma_rows.h). A
// pair is a row and one of its k slots, as in moe_matmul.cu. With GATED, a gate and an up become act(gate) * up, of the
// activation with the number GATED - 1.
//
// As in tile.h, weights go from memory to the registers of the multiplication: a lane dequantises whole units of its
// weight rows. wgmma takes columns of x as they lie in shared memory, so x is arranged to suit these units. Sums have
// the order of tile.h, and on an H100 the same bits.
#define NUMBERS_AS_HALVES 1
#include "activation.h"
#include "fp16_rows.h"
#include "quants.h"
#include "wgmma_rows.h"

#if LUCE_WGMMA

// One block of a multiprocessor (H100, experts of 35B A3B, 2048 rows: gates and ups 379 us, downs in Q6_K 268). Two, of
// half the features each, took 412 and 340: each copies the tile's rows, and the weights' cache gets less memory.
#define GROUPS 4                               // of four waves
#define STAGES 4                               // slices in shared memory
#define THREADS (GROUPS * 128)
#define MOST_ROWS 96                           // of a tile
#define FEATURES (GROUPS * (GATED ? 32 : 64))  // that the block multiplies at a time
#define SLICE 128                              // columns in shared memory at a time; any format's unit lies in one slice
#define CHUNKS (SLICE / 8)                     // 16-byte pieces of a row of a slice
#define PANEL (MOST_ROWS * 128)                // bytes of 64 columns of the tile's rows
#define LANE_UNITS (SLICE / 4 / UNIT)          // units of a weight row that a lane has of a slice
#define COPY_ROWS (THREADS / CHUNKS)           // rows that the block copies at a time
// Slices from the one whose weights a lane loads to that whose weights it brings to the second-level cache. H200, 256
// experts of 35B A3B with 64 rows each: gates and ups 283, 272, 282 us with 1, 2, 3, and 294 without.
#define PREFETCHED 2

static_assert(LANE_UNITS * RUNS % 2 == 0, "runs take turns with two sets of words");
static_assert(SLICE % SPAN == 0 && SLICE % (4 * UNIT) == 0, "units do not cross slices");

// The columns of x in the places from `at` on, a multiple of 8, of its arrangement: two neighbours for each of four
// units. A product of 16 places takes four from each lane of a weight row, 2t, 2t + 1, 2t + 8 and 2t + 9, and places
// 2t and 2t + 1 have the columns arranged(at) + unit_column(t) and the next one.
LUCE_FN int arranged(int at) {
    const u32 place = (u32)at, e = place % SLICE / 16 * 4 + place % 16 / 8 * 2;
    const u32 unit = place / SLICE * (SLICE / UNIT) + e / UNIT * 4;
    return unit_column((int)unit) + (int)(e % UNIT / RUN * STEP + e % RUN);
}
static_assert(4 * UNIT % SPAN == 0 && RUN % 2 == 0, "four units begin a span, and a run has whole pairs of columns");

// What stands in the eight places from `at` on; zeros beyond the last column.
LUCE_FN void load_arranged(const float* __restrict__ row, int at, int cols, float (&v)[8]) {
    const int first = arranged(at);
    row += first, cols -= first;
    if (unit_column(3) + 1 < cols && (u64)row % 8 == 0) {
#pragma unroll
        for (int t = 0; t < 4; t++) {
            const float2 two = *reinterpret_cast<const float2*>(row + unit_column(t));
            v[t * 2] = two.x, v[t * 2 + 1] = two.y;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int column = unit_column(i / 2) + i % 2;
            v[i] = column < cols ? row[column] : 0.0f;
        }
    }
}

// Rows as rows_to_fp16 of fp16.cu has them, but arranged. Grid: ceil(n / FP16_ROWS) blocks of FP16_ROWS waves.
extern "C" __global__ void __launch_bounds__(FP16_ROWS * LUCE_LANES)
    arrange_rows(const float* __restrict__ x, f16_t* __restrict__ half, float* __restrict__ scale, int n, int slots,
                 int cols, int padded, i64 x_row, i64 x_slot) {
    luce_await();
    const int r = (int)blockIdx.x * FP16_ROWS + luce_wave();
    if (r >= n) return;
    const float* row = x + r / slots * x_row + r % slots * x_slot;
    write_fp16_row(Fp16Row(half + (i64)r * padded, scale + r), padded,
                   [&](int at, float (&v)[8]) { load_arranged(row, at, cols, v); });
}

// Where a row's results begin, and its scale.
struct Row {
    u32 place;
    float scale;
};

struct Shared {
    alignas(1024) u8 x[STAGES][2 * PANEL];
    u32 source[MOST_ROWS];  // where the row's pieces begin
    alignas(16) Row rows[MOST_ROWS];
};

struct Tile {
    const u8 *low, *high;  // weights of a lane's two rows
    const uint4* x;
    float* out;
    int count, feature0, blocks, rows, cols, out_stride;
};

// The lane's features of the block's `block`-th FEATURES: with GATED one, whose gate and up are its two weight rows.
LUCE_FN int lane_feature(const Tile& tile, int block, int side) {
    const int wave = (int)(threadIdx.x / LUCE_LANES), g = (int)(threadIdx.x % LUCE_LANES / 4);
    return tile.feature0 + block * FEATURES + (GATED ? wave * 8 + g : wave * 16 + g * 2 + side);
}

LUCE_FN void lane_rows(const Tile& tile, int block, const u8* (&row)[2]) {
#pragma unroll
    for (int side = 0; side < 2; side++) {
        // Features beyond the last repeat it, and their results are not written.
        const int feature = luce_min(lane_feature(tile, block, side), tile.rows - 1);
        row[side] = (side ? tile.high : tile.low) + feature * row_bytes(tile.cols);
    }
}

// Which unit of a weight row is the lane's `part`-th of a slice. The mask tells the compiler that it is not negative.
LUCE_FN int lane_unit(int slice, int part) {
    return (slice * (SLICE / UNIT) + part * 4 + (int)(threadIdx.x % 4)) & 0xffffff;
}

LUCE_FN void fetch_slice(const u8* const (&row)[2], int slice, int cols, Packed (&packed)[2][LANE_UNITS]) {
#pragma unroll
    for (int part = 0; part < LANE_UNITS; part++) {
        // Beyond the last unit x holds zeros: any unit will do.
        const int unit = luce_min(lane_unit(slice, part), row_units(cols) - 1) & 0xffffff;
#pragma unroll
        for (int side = 0; side < 2; side++) fetch(row[side], unit, cols - unit_column(unit), packed[side][part]);
    }
}

// Brings the 32-byte sectors that begin in a slice to the second-level cache: each of a row's four lanes another one.
LUCE_FN void prefetch_slice(const u8* const (&row)[2], int slice, int cols) {
    constexpr int BYTES = SLICE / 8 * BLOCK_BYTES / (BLOCK / 8);
    const int last = (int)row_bytes(cols) - 1;
#pragma unroll
    for (int side = 0; side < 2; side++) {
#pragma unroll
        for (int i = 0; i < BYTES; i += 128) {
            const int at = luce_min(slice * BYTES + i + (int)(threadIdx.x % 4) * 32, last);
#if defined(__CUDA_ARCH__)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(row[side] + at));
#else
            (void)at;
#endif
        }
    }
}

// The results of a lane's features j (and j + 1, but with GATED).
template <int N> LUCE_FN void write_results(const Tile& tile, const Shared& shared, int j, const float (&sum)[N / 8][4]) {
    if (j >= tile.rows) return;
    const int t = (int)(threadIdx.x % 4);
    float* const out = tile.out + j;
    const auto write = [&](const bool both) {
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            const uint4 two = *reinterpret_cast<const uint4*>(&shared.rows[i * 8 + t * 2]);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (i * 8 + t * 2 + e >= tile.count) continue;
                const float scale = __uint_as_float(e ? two.w : two.y);
                const float low = sum[i][e] * scale, high = sum[i][e + 2] * scale;
                float* const to = out + (e ? two.z : two.x);
                if (GATED) {
                    *to = gated(GATED ? GATED - 1 : 0, low, high);
                } else if (both) {
                    *reinterpret_cast<float2*>(to) = make_float2(low, high);
                } else {
                    to[0] = low;
                    if (j + 1 < tile.rows) to[1] = high;
                }
            }
        }
    };
    if (GATED || (j + 1 < tile.rows && ((u64)out | (u64)tile.out_stride * 4) % 8 == 0))
        write(true);
    else
        write(false);
}

// N: rows of the tile, padded.
template <int N> LUCE_FN void multiply(const Tile& tile, const u8* (&row)[2], Shared& shared) {
    const int slices = luce_ceil_div(tile.cols, SLICE), blocks = GATED ? 1 : tile.blocks;
    // The thread copies one piece of every COPY_ROWS-th row. Of several blocks, slices of x stay in shared memory.
    const int first = (int)(threadIdx.x / CHUNKS), chunk = (int)(threadIdx.x % CHUNKS);
    u8* const to = shared.x[0] + chunk / 8 * PANEL + first * 128 + (chunk ^ first) % 8 * 16;
    constexpr int COPIES = (N + COPY_ROWS - 1) / COPY_ROWS;
    u32 from[COPIES];
#pragma unroll
    for (int i = 0; i < COPIES; i++) from[i] = shared.source[luce_min(first + i * COPY_ROWS, MOST_ROWS - 1)] + chunk;
    const auto copy = [&](int slice) {
        if (slice < slices) {
            const uint4* x = tile.x + slice * CHUNKS;
            u8* slot = to + slice % STAGES * (2 * PANEL);
#pragma unroll
            for (int i = 0; i < COPIES; i++) luce_copy16(slot + i * (COPY_ROWS * 128), x + from[i], true);
        }
        luce_copy_close();
    };
    const luce_rows_t x0 = luce_wgmma_rows_at(shared.x[0]);
    for (int i = 0; i < STAGES - 2; i++) copy(i);
    Packed packed[2][LANE_UNITS];
    fetch_slice(row, 0, tile.cols, packed);
#pragma unroll 1
    for (int block = 0; block < blocks; block++) {
        float sum[N / 8][4];
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) sum[i][e] = 0.0f;
        }
        u32 words[2][RUN / 4][4];
#pragma unroll 1
        for (int slice = 0; slice < slices; slice++) {
            const bool last = slice + 1 == slices;
            if (block == 0) {
                // A slot is written again two slices after its own: its products have ended, as at most those of one
                // slice's last run are in flight.
                luce_copy_wait<STAGES - 3>();
                luce_wgmma_share();
                luce_sync();
                copy(slice + STAGES - 2);
            }
            const luce_rows_t x = luce_wgmma_rows_further(x0, slice % STAGES * (2 * PANEL));
#pragma unroll
            for (int part = 0; part < LANE_UNITS; part++) {
#pragma unroll
                for (int run = 0; run < RUNS; run++) {
                    // Those of the run before are being read.
                    u32(&now)[RUN / 4][4] = words[(part * RUNS + run) % 2];
#pragma unroll
                    for (int side = 0; side < 2; side++) {
                        float w[RUN];
                        unpack_run(packed[side][part], lane_unit(slice, part), run, w);
#pragma unroll
                        for (int e = 0; e < RUN; e += 2) now[e / 4][e % 4 + side] = luce_f16_pair(w[e], w[e + 1]);
                    }
                    luce_wgmma_fence();
#pragma unroll
                    for (int q = 0; q < RUN / 4; q++) {
                        const int step = (part * UNIT + run * RUN) / 4 + q;
                        luce_wgmma_rows<N>(sum, now[q], luce_wgmma_rows_further(x, step / 4 * PANEL + step % 4 * 32));
                    }
                    luce_wgmma_close();
                    if (run == RUNS - 1 && part == LANE_UNITS - 1) {
                        if (last && !GATED) lane_rows(tile, luce_min(block + 1, blocks - 1), row);
                        fetch_slice(row, last ? 0 : slice + 1, tile.cols, packed);
                        const int further = (last ? 0 : slice + 1) + PREFETCHED;
                        if (further < slices) {
                            prefetch_slice(row, further, tile.cols);
                        } else if (block + 1 + last < blocks) {
                            const u8* next[2];
                            lane_rows(tile, block + 1 + last, next);
                            prefetch_slice(next, further - slices, tile.cols);
                        }
                    }
                    luce_wgmma_wait<1>();
                }
            }
        }
        luce_wgmma_wait<0>();
        luce_wgmma_hold(sum);
        write_results<N>(tile, shared, lane_feature(tile, block, 0), sum);
    }
}

// out[pair, j] = act(gate) * up, or without GATED the sum over c of x[pair / share, c] * weight[j, c] alone, for j <
// rows. An expert's matrices in blocks of QTYPE begin expert_rows rows apart, gates or weights at `weight`, ups at
// `ups`. x arranged, rows x_stride elements apart; out float32 with out_stride elements from pair to pair. Tiles of at
// most MOST_ROWS pairs as group_pairs of moe.cu makes them.
// Grid: (tiles, ceil(rows / (FEATURES * blocks))) blocks of THREADS; tiles of no pairs are left out. `blocks` is 1 with
// GATED, and for more than STAGES slices.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    expert_rows(const u8* __restrict__ weight, const u8* __restrict__ ups, const f16_t* __restrict__ x,
                const float* __restrict__ scale, const i32* __restrict__ order, const i32* __restrict__ tiles,
                float* __restrict__ out, int share, int rows, int expert_rows, int blocks, int cols, int x_stride,
                int out_stride) {
    luce_await();
    LUCE_DYNAMIC_SHARED(Shared, all);
    const int count = tiles[blockIdx.x * 3 + 2];
    if (count == 0) return;
    const int place = tiles[blockIdx.x * 3 + 1];
    Tile tile;
    const i64 expert = (i64)tiles[blockIdx.x * 3] * expert_rows * row_bytes(cols);
    tile.low = weight + expert;
    tile.high = (GATED ? ups : weight) + expert;
    tile.x = reinterpret_cast<const uint4*>(x);
    tile.out = out;
    tile.count = count;
    tile.feature0 = (int)blockIdx.y * blocks * FEATURES;
    tile.blocks = luce_min(blocks, luce_ceil_div(rows - tile.feature0, FEATURES));
    tile.rows = rows;
    tile.cols = cols;
    tile.out_stride = out_stride;
    // The first weights come while the rows' places are loaded, one from the other.
    const u8* row[2];
    lane_rows(tile, 0, row);
#pragma unroll 1
    for (int i = 0; i <= PREFETCHED; i++) prefetch_slice(row, i, cols);
    static_assert(MOST_ROWS <= THREADS, "a thread has a row");
    if (const int r = (int)threadIdx.x; r < MOST_ROWS) {
        // Rows beyond the last repeat it, and their results are not written.
        const int pair = order[place + luce_min(r, count - 1)], source = pair / share;
        all->rows[r] = Row{(u32)pair * (u32)out_stride, scale[source]};
        all->source[r] = (u32)source * (u32)(x_stride / 8);
    }
    luce_sync();
    switch (luce_ceil_div(count, 16)) {
    case 1: multiply<16>(tile, row, *all); break;
    case 2: multiply<32>(tile, row, *all); break;
    case 3: multiply<48>(tile, row, *all); break;
    case 4: multiply<64>(tile, row, *all); break;
    case 5: multiply<80>(tile, row, *all); break;
    default: multiply<96>(tile, row, *all);
    }
}

#endif
