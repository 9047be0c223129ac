// Products of many rows with a weight matrix: one tile of results, TILE_ROWS x TILE_FEATURES, by one block.
// matmul_tile.cu and moe_matmul.cu differ in the rows that form a tile.
//
// x is fp16 with a scale per row (fp16.cu), for weights in F32 float32. A result is a sum over the columns in an order
// that the type and the number of columns alone determine.
//
// With tensor cores (LUCE_MMA_F16) a wave owns 32 features and all rows of the tile. Its weights go from memory to the
// registers of the multiplication: the products of a sum may have any order, so a lane dequantises whole units of its
// rows of weights, and reads x, from shared memory, at the columns of these units.
#pragma once
#include "mma.h"
#include "quants.h"

#define TILE_THREADS 128
#define TILE_ROWS 64
#define TILE_FEATURES 128

// A third block on a multiprocessor hides more latency than registers for early loads would: 9% less time for experts
// of 8192 rows (H200).
#if LUCE_MMA_F16 && QTYPE != F32
#define TENSOR_CORES 1
#define TILE_BOUNDS __launch_bounds__(TILE_THREADS, 3)
#else
#define TENSOR_CORES 0
#define TILE_BOUNDS __launch_bounds__(TILE_THREADS)
#endif

#if QTYPE == F32
typedef float tile_x;
#else
typedef f16_t tile_x;  // rows are a multiple of 128 columns, with zeros beyond the last
#endif

// One tile of results: out[pairs[r] * out_stride + j] = scale[row] * sum over k of x[row, k] * weight[j, k], with row =
// sources[r], for r < count and feature0 <= j < rows; k from column `begin` to `end`, multiples of 128 or the end.
struct Tile {
    const u8* weight;
    const tile_x* x;
    const float* scale;
    float* out;
    const i32 *pairs, *sources;  // TILE_ROWS in shared memory, all of them valid
    int count, feature0, rows, cols, begin, end, x_stride, out_stride;
};

#if TENSOR_CORES

#define LANE_FEATURES 4             // of a lane: two rows of each of two 16 x 16 tiles of weights
#define WAVE_FEATURES (LANE_FEATURES * 8)
#define SLICE 128                   // columns in shared memory at a time; any format's unit lies in one slice
#define CHUNKS (SLICE / 8)          // 16-byte pieces of a row of a slice
#define LANE_UNITS (SLICE / 4 / UNIT)  // units of a row of weights that a lane has of a slice

static_assert(TILE_FEATURES == TILE_THREADS / 32 * WAVE_FEATURES, "a wave owns its features alone");
static_assert(SLICE % SPAN == 0 && SLICE % (4 * UNIT) == 0, "units do not cross slices");

// Rows lie 256 bytes apart. Exchanging a row's chunks lets the eight lanes that load of two rows at a time meet all
// banks: the chunks that the four lanes of a row want differ in two of the lowest four bits of their numbers, which two
// depends on STEP. The fourth bit goes to the first, which chooses a bank, and the row's parity to the one that is
// left.
LUCE_FN int place(int row, int chunk) {
    return row * CHUNKS + (chunk ^ (chunk >> 3 & 1) ^ (row & 1) << (STEP == 16 ? 1 : 2));
}

// Columns from `column` on of the tile's rows to shared memory.
template <int BLOCKS> LUCE_FN void stage(const Tile& tile, uint4* xs, int column) {
    if (column < tile.end) {
#pragma unroll
        for (int i = luce_thread(); i < BLOCKS * 8 * CHUNKS; i += TILE_THREADS) {
            const int row = i / CHUNKS, chunk = i % CHUNKS;
            const tile_x* from = tile.x + (i64)tile.sources[row] * tile.x_stride + column + chunk * 8;
            luce_copy16(&xs[place(row, chunk)], from, row < tile.count);
        }
    }
    luce_copy_close();
}

// Which unit of a row of weights is the lane's `part`-th of the slice that begins at `column`.
LUCE_FN int lane_unit(int column, int part) { return column / UNIT + part * 4 + luce_lane() % 4; }

LUCE_FN void fetch_slice(const u8* const (&feature)[LANE_FEATURES], int column, int cols,
                         Packed (&packed)[LANE_FEATURES][LANE_UNITS]) {
#pragma unroll
    for (int f = 0; f < LANE_FEATURES; f++) {
#pragma unroll
        for (int part = 0; part < LANE_UNITS; part++) {
            // Beyond the last unit x holds zeros: any unit will do.
            const int unit = luce_min(lane_unit(column, part), row_units(cols) - 1);
            fetch(feature[f], unit, cols - unit_column(unit), packed[f][part]);
        }
    }
}

// BLOCKS: rows of the tile in use, divided by 8.
template <int BLOCKS> LUCE_FN void multiply(const Tile& tile, uint4 (*xs)[TILE_ROWS * CHUNKS]) {
    const int g = luce_lane() / 4, t = luce_lane() % 4;
    const int own = tile.feature0 + luce_wave() * WAVE_FEATURES + g;
    const u8* feature[LANE_FEATURES];
#pragma unroll
    for (int f = 0; f < LANE_FEATURES; f++) {
        // Features beyond the last repeat it, and their results are not written.
        feature[f] = tile.weight + luce_min(own + f * 8, tile.rows - 1) * row_bytes(tile.cols);
    }
    float sum[LANE_FEATURES / 2][BLOCKS][4];
#pragma unroll
    for (int m = 0; m < LANE_FEATURES / 2; m++) {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
#pragma unroll
            for (int e = 0; e < 4; e++) sum[m][b][e] = 0.0f;
        }
    }

    Packed packed[LANE_FEATURES][LANE_UNITS];
    stage<BLOCKS>(tile, xs[0], tile.begin);
    fetch_slice(feature, tile.begin, tile.cols, packed);
    int now = 0;
    for (int column = tile.begin; column < tile.end; column += SLICE) {
        luce_copy_wait<0>();
        // This slice has arrived for all threads, and all have read the previous one.
        luce_sync();
        stage<BLOCKS>(tile, xs[now ^ 1], column + SLICE);
#pragma unroll
        for (int part = 0; part < LANE_UNITS; part++) {
            const int unit = lane_unit(column, part);
#pragma unroll
            for (int run = 0; run < RUNS; run++) {
                u32 weights[LANE_FEATURES][RUN / 2];
#pragma unroll
                for (int f = 0; f < LANE_FEATURES; f++) {
                    float w[RUN];
                    unpack_run(packed[f][part], unit, run, w);
#pragma unroll
                    for (int e = 0; e < RUN; e += 2) weights[f][e / 2] = luce_f16_pair(w[e], w[e + 1]);
                }
                const int first = (unit_column(lane_unit(0, part)) + run * STEP) / 8;
#pragma unroll
                for (int b = 0; b < BLOCKS; b++) {
#pragma unroll
                    for (int chunk = 0; chunk < RUN / 8; chunk++) {
                        const uint4 v = xs[now][place(b * 8 + g, first + chunk)];
                        const u32 columns[2][2] = {{v.x, v.y}, {v.z, v.w}};
#pragma unroll
                        for (int four = 0; four < 2; four++) {
                            const int at = chunk * 4 + four * 2;
#pragma unroll
                            for (int m = 0; m < LANE_FEATURES; m += 2) {
                                const u32 a[4] = {weights[m][at], weights[m + 1][at], weights[m][at + 1],
                                                  weights[m + 1][at + 1]};
                                luce_mma_f16(sum[m / 2][b], a, columns[four]);
                            }
                        }
                    }
                }
            }
        }
        fetch_slice(feature, column + SLICE, tile.cols, packed);
        now ^= 1;
    }

#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const int r = b * 8 + t * 2 + side;
            if (r < tile.count) {
                const float scale = tile.scale[tile.sources[r]];
                float* to = tile.out + (i64)tile.pairs[r] * tile.out_stride;
#pragma unroll
                for (int f = 0; f < LANE_FEATURES; f++) {
                    const int j = own + f * 8;
                    if (j < tile.rows) to[j] = sum[f / 2][b][f % 2 * 2 + side] * scale;
                }
            }
        }
    }
}

LUCE_FN void tile_products(const Tile& tile) {
    __shared__ __align__(16) uint4 xs[2][TILE_ROWS * CHUNKS];
    if (tile.count <= TILE_ROWS / 2) {
        multiply<TILE_ROWS / 16>(tile, xs);
    } else {
        multiply<TILE_ROWS / 8>(tile, xs);
    }
}

#else

#define DEPTH 32
#define SLICE (DEPTH / UNIT)  // units of a weight row in a step
#define MY_ROWS 8
#define MY_FEATURES 8

static_assert(TILE_ROWS / MY_ROWS * (TILE_FEATURES / MY_FEATURES) == TILE_THREADS, "each thread makes 8 x 8 results");
static_assert(TILE_THREADS == TILE_FEATURES && TILE_THREADS % TILE_ROWS == 0, "a thread unpacks one feature");

LUCE_FN void tile_products(const Tile& tile) {
    // Columns first, so that neighbouring threads store and load neighbouring words.
    __shared__ __align__(16) float xs[DEPTH][TILE_ROWS];
    __shared__ __align__(16) float ws[DEPTH][TILE_FEATURES];

    const int thread = luce_thread();
    // Features beyond the last repeat it, and are not written.
    const u8* feature = tile.weight + luce_min(tile.feature0 + thread, tile.rows - 1) * row_bytes(tile.cols);
    const int row = thread % TILE_ROWS;
    const tile_x* row_from = tile.x + (i64)tile.sources[row] * tile.x_stride;

    // A thread's rows and features are two groups of four, half a tile apart: its lanes' 16-byte loads then lie side by
    // side.
    const int my_row = thread / (TILE_FEATURES / MY_FEATURES) * 4;
    const int my_feature = thread % (TILE_FEATURES / MY_FEATURES) * 4;
    float sum[MY_ROWS][MY_FEATURES];
#pragma unroll
    for (int r = 0; r < MY_ROWS; r++) {
#pragma unroll
        for (int f = 0; f < MY_FEATURES; f++) sum[r][f] = 0.0f;
    }

    const int units = row_units(tile.end);
    for (int unit0 = row_units(tile.begin); unit0 < units; unit0 += SLICE) {
        // Rows and columns beyond the end become zeros: they add nothing.
        for (int slice = 0; slice < SLICE; slice++) {
            const int unit = unit0 + slice;
            float w[UNIT];
            if (unit < units) {
                unpack(feature, unit, tile.cols - unit_column(unit), w);
            } else {
#pragma unroll
                for (int e = 0; e < UNIT; e++) w[e] = 0.0f;
            }
#pragma unroll
            for (int e = 0; e < UNIT; e++) ws[slice * UNIT + e][thread] = w[e];
        }
        for (int at = thread / TILE_ROWS * 4; at < DEPTH; at += TILE_THREADS / TILE_ROWS * 4) {
            const int unit = unit0 + at / UNIT;
            const int column = unit_column(unit) + at % UNIT / RUN * STEP + at % RUN;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                xs[at + i][row] = row < tile.count && column + i < tile.cols ? luce_f32(row_from[column + i]) : 0.0f;
            }
        }
        luce_sync();
        // Whole waves skip the rows and features that a tile lacks.
        if (my_row < tile.count) {
#pragma unroll 4
            for (int k = 0; k < DEPTH; k++) {
                float a[MY_ROWS], b[MY_FEATURES];
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const float4 x4 = *reinterpret_cast<const float4*>(&xs[k][my_row + half * (TILE_ROWS / 2)]);
                    const float4 w4 = *reinterpret_cast<const float4*>(&ws[k][my_feature + half * (TILE_FEATURES / 2)]);
                    a[half * 4] = x4.x, a[half * 4 + 1] = x4.y, a[half * 4 + 2] = x4.z, a[half * 4 + 3] = x4.w;
                    b[half * 4] = w4.x, b[half * 4 + 1] = w4.y, b[half * 4 + 2] = w4.z, b[half * 4 + 3] = w4.w;
                }
#pragma unroll
                for (int r = 0; r < MY_ROWS; r++) {
#pragma unroll
                    for (int f = 0; f < MY_FEATURES; f++) sum[r][f] = fmaf(b[f], a[r], sum[r][f]);
                }
            }
        }
        luce_sync();
    }

#pragma unroll
    for (int r = 0; r < MY_ROWS; r++) {
        const int at = my_row + r % 4 + r / 4 * (TILE_ROWS / 2);
        if (at < tile.count) {
            float* to = tile.out + (i64)tile.pairs[at] * tile.out_stride;
#if QTYPE == F32
            const float scale = 1.0f;
#else
            const float scale = tile.scale[tile.sources[at]];
#endif
#pragma unroll
            for (int f = 0; f < MY_FEATURES; f++) {
                const int j = tile.feature0 + my_feature + f % 4 + f / 4 * (TILE_FEATURES / 2);
                if (j < tile.rows) to[j] = sum[r][f] * scale;
            }
        }
    }
}

#endif
