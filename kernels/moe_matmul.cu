// variants: QTYPE=F32,F16,BF16,Q4_0,Q4_1,Q5_0,Q5_1,Q8_0,Q2_K,Q3_K,Q4_K,Q5_K,Q6_K,IQ4_NL,IQ4_XS
//
// Products of rows of x with the weights of the experts chosen for them. A pair is a row and one of its k slots:
// pair = row * k + slot. The weights of all experts are one matrix [experts * rows, cols], read in place.
//
// Row invariance: each result is one sum in an order that the columns alone decide (as in matmul_vec.cu for
// expert_vec, as in matmul_tile.cu for expert_tile). Which pairs share a tile, and where in it they stand, has no part.
#include "quants.h"
#include "reduce.h"

// --- few rows: a wave owns FEATURES rows of one pair's expert

#define WAVES 4
#define FEATURES 2

// WHOLE: every unit is a full one and x may be loaded 16 bytes at a time; else x is loaded singly, with zeros beyond the
// last column.
template <bool WHOLE>
LUCE_FN void products(const u8* __restrict__ weight, const float* __restrict__ x, float* __restrict__ out, int rows,
                      int cols, int feature) {
    const u8* row[FEATURES];
    float sum[FEATURES];
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
        // Features beyond the last repeat it, and are not written.
        row[f] = weight + luce_min(feature + f, rows - 1) * row_bytes(cols);
        sum[f] = 0.0f;
    }

    for (int unit = luce_lane(); unit < row_units(cols); unit += LUCE_LANES) {
        const int column = unit_column(unit);
        const int left = WHOLE ? UNIT : cols - column;
        float w[FEATURES][UNIT];
#pragma unroll
        for (int f = 0; f < FEATURES; f++) unpack(row[f], unit, left, w[f]);
#pragma unroll
        for (int e = 0; e < UNIT; e += 4) {
            const int at = e / RUN * STEP + e % RUN;
            float v[4];
            if (WHOLE) {
                const float4 all = *reinterpret_cast<const float4*>(x + column + at);
                v[0] = all.x, v[1] = all.y, v[2] = all.z, v[3] = all.w;
            } else {
#pragma unroll
                for (int i = 0; i < 4; i++) v[i] = at + i < left ? x[column + at + i] : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int f = 0; f < FEATURES; f++) sum[f] = fmaf(w[f][e + i], v[i], sum[f]);
            }
        }
    }

#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
        const float total = luce_lane_sum(sum[f]);
        if (luce_lane() == 0 && feature + f < rows) out[feature + f] = total;
    }
}

// out[pair, first + j] = sum over c of x[pair, c] * weight[ids[pair], j, c], for j < rows.
// weight [experts, rows, cols] in blocks of QTYPE; x float32 with x_row elements from row to row and x_slot from slot to
// slot (0: the slots share the row); out float32 with out_stride elements from pair to pair.
// Grid: (ceil(rows / (WAVES * FEATURES)), pairs) blocks of WAVES waves.
extern "C" __global__ void __launch_bounds__(WAVES * LUCE_LANES)
    expert_vec(const u8* __restrict__ weight, const float* __restrict__ x, const i32* __restrict__ ids,
               float* __restrict__ out, int slots, int rows, int cols, int x_row, int x_slot, int out_stride, int first) {
    const int feature = ((int)blockIdx.x * WAVES + luce_wave()) * FEATURES;
    if (feature >= rows) return;
    const int pair = (int)blockIdx.y;
    const u8* expert = weight + (i64)ids[pair] * rows * row_bytes(cols);
    const float* from = x + (i64)(pair / slots) * x_row + (i64)(pair % slots) * x_slot;
    float* to = out + (i64)pair * out_stride + first;
    if ((u64)from % 16 == 0 && cols % UNIT == 0) {
        products<true>(expert, from, to, rows, cols, feature);
    } else {
        products<false>(expert, from, to, rows, cols, feature);
    }
}

// --- many rows: a block makes TILE_ROWS pairs x TILE_FEATURES results of one expert, DEPTH columns at a time

#define THREADS 128
// An expert's share of 512 rows is 16 to 32 pairs for 8 of 256 or of 128 experts: larger tiles would be mostly empty.
#define TILE_ROWS 32
#define TILE_FEATURES 128
#define DEPTH 32
#define SLICE (DEPTH / UNIT)  // units of a weight row in a tile
#define MY_ROWS 4
#define MY_FEATURES 8

static_assert(TILE_ROWS / MY_ROWS * (TILE_FEATURES / MY_FEATURES) == THREADS, "each thread makes 4 x 8 results");
static_assert(THREADS == TILE_FEATURES && THREADS % TILE_ROWS == 0, "each thread unpacks one feature, loads of one row");

// As expert_vec, for pairs sorted by moe.cu's group_pairs: tiles [*, 3] holds a tile's expert, first place in `order`,
// and count of pairs.
// Grid: (tiles, ceil(rows / TILE_FEATURES)) blocks of THREADS; tiles of no pairs are left out.
extern "C" __global__ void __launch_bounds__(THREADS)
    expert_tile(const u8* __restrict__ weight, const float* __restrict__ x, const i32* __restrict__ order,
                const i32* __restrict__ tiles, float* __restrict__ out, int slots, int rows, int cols, int x_row,
                int x_slot, int out_stride, int first) {
    // Columns first, so that neighbouring threads store and load neighbouring words.
    __shared__ __align__(16) float xs[DEPTH][TILE_ROWS];
    __shared__ __align__(16) float ws[DEPTH][TILE_FEATURES];
    __shared__ i32 pairs[TILE_ROWS];

    const int count = tiles[blockIdx.x * 3 + 2];
    if (count == 0) return;
    const u8* expert = weight + (i64)tiles[blockIdx.x * 3] * rows * row_bytes(cols);
    const int thread = (int)threadIdx.x;
    const int feature0 = (int)blockIdx.y * TILE_FEATURES;
    if (thread < count) pairs[thread] = order[tiles[blockIdx.x * 3 + 1] + thread];
    luce_sync();

    const u8* feature_from = expert + (feature0 + thread) * row_bytes(cols);
    const int row = thread % TILE_ROWS;
    const int pair = row < count ? pairs[row] : 0;
    const float* row_from = x + (i64)(pair / slots) * x_row + (i64)(pair % slots) * x_slot;

    // A thread's features are two groups of four, half a tile apart: its lanes' 16-byte loads then lie side by side.
    const int my_row = thread / (TILE_FEATURES / MY_FEATURES) * MY_ROWS;
    const int my_feature = thread % (TILE_FEATURES / MY_FEATURES) * 4;
    float sum[MY_ROWS][MY_FEATURES];
#pragma unroll
    for (int r = 0; r < MY_ROWS; r++) {
#pragma unroll
        for (int f = 0; f < MY_FEATURES; f++) sum[r][f] = 0.0f;
    }

    const int units = row_units(cols);
    for (int unit0 = 0; unit0 < units; unit0 += SLICE) {
        // Rows, features and columns beyond the end become zeros: they add nothing.
        for (int slice = 0; slice < SLICE; slice++) {
            const int unit = unit0 + slice;
            float w[UNIT];
            if (feature0 + thread < rows && unit < units) {
                unpack(feature_from, unit, cols - unit_column(unit), w);
            } else {
#pragma unroll
                for (int e = 0; e < UNIT; e++) w[e] = 0.0f;
            }
#pragma unroll
            for (int e = 0; e < UNIT; e++) ws[slice * UNIT + e][thread] = w[e];
        }
        for (int at = thread / TILE_ROWS * 4; at < DEPTH; at += THREADS / TILE_ROWS * 4) {
            const int unit = unit0 + at / UNIT;
            const int column = unit_column(unit) + at % UNIT / RUN * STEP + at % RUN;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                xs[at + i][row] = row < count && column + i < cols ? row_from[column + i] : 0.0f;
            }
        }
        luce_sync();
        // Whole waves skip what a tile lacks: half of the tiles' rows do not exist in the case above.
        if (my_row < count) {
#pragma unroll 4
            for (int k = 0; k < DEPTH; k++) {
                float a[MY_ROWS], b[MY_FEATURES];
                const float4 rows4 = *reinterpret_cast<const float4*>(&xs[k][my_row]);
                const float4 left4 = *reinterpret_cast<const float4*>(&ws[k][my_feature]);
                const float4 right4 = *reinterpret_cast<const float4*>(&ws[k][my_feature + TILE_FEATURES / 2]);
                a[0] = rows4.x, a[1] = rows4.y, a[2] = rows4.z, a[3] = rows4.w;
                b[0] = left4.x, b[1] = left4.y, b[2] = left4.z, b[3] = left4.w;
                b[4] = right4.x, b[5] = right4.y, b[6] = right4.z, b[7] = right4.w;
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
        if (my_row + r < count) {
            float* to = out + (i64)pairs[my_row + r] * out_stride + first;
#pragma unroll
            for (int f = 0; f < MY_FEATURES; f++) {
                const int feature = feature0 + my_feature + f % 4 + f / 4 * (TILE_FEATURES / 2);
                if (feature < rows) to[feature] = sum[r][f];
            }
        }
    }
}
