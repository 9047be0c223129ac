// variants: QTYPE=F32,F16,BF16,Q4_0,Q4_1,Q5_0,Q5_1,Q8_0,Q2_K,Q3_K,Q4_K,Q5_K,Q6_K,IQ4_NL,IQ4_XS
//
// Products of a weight matrix with many rows: prefill. A block makes TILE_ROWS x TILE_FEATURES results, DEPTH columns of
// x and weight at a time, which its threads unpack into shared memory.
//
// A result is one thread's sum over the units in their order, so it does not depend on the other rows either; but
// matmul_vec adds in another order, and the last bits of the two differ.
#include "quants.h"

#define THREADS 256
#define TILE_ROWS 64
#define TILE_FEATURES 128
#define DEPTH 32
#define SLICE (DEPTH / UNIT)  // units of a weight row in a tile
#define MY_ROWS 4
#define MY_FEATURES 8

static_assert(TILE_ROWS / MY_ROWS * (TILE_FEATURES / MY_FEATURES) == THREADS, "each thread makes 4 x 8 results");

// out[r, first + j] = sum over k of x[r, k] * weight[j, k], for r < n and j < rows.
// weight [rows, cols] in blocks of QTYPE; x and out float32 with x_stride and out_stride elements from row to row.
// Grid: (ceil(n / TILE_ROWS), ceil(rows / TILE_FEATURES)) blocks of THREADS.
extern "C" __global__ void __launch_bounds__(THREADS)
    matmul_tile(const u8* __restrict__ weight, const float* __restrict__ x, float* __restrict__ out, int n, int rows,
                int cols, int x_stride, int out_stride, int first) {
    // Columns first, so that neighbouring threads store and load neighbouring words.
    __shared__ __align__(16) float xs[DEPTH][TILE_ROWS];
    __shared__ __align__(16) float ws[DEPTH][TILE_FEATURES];

    const int thread = (int)threadIdx.x;
    const int row0 = (int)blockIdx.x * TILE_ROWS;
    const int feature0 = (int)blockIdx.y * TILE_FEATURES;
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
        for (int task = thread; task < TILE_FEATURES * SLICE; task += THREADS) {
            const int feature = task % TILE_FEATURES;
            const int slice = task / TILE_FEATURES;
            const int unit = unit0 + slice;
            float w[UNIT];
            if (feature0 + feature < rows && unit < units) {
                unpack(weight + (feature0 + feature) * row_bytes(cols), unit, cols - unit_column(unit), w);
            } else {
#pragma unroll
                for (int e = 0; e < UNIT; e++) w[e] = 0.0f;
            }
#pragma unroll
            for (int e = 0; e < UNIT; e++) ws[slice * UNIT + e][feature] = w[e];
        }
        for (int task = thread; task < TILE_ROWS * (DEPTH / 4); task += THREADS) {
            const int row = task % TILE_ROWS;
            const int at = task / TILE_ROWS * 4;
            const int unit = unit0 + at / UNIT;
            const int column = unit_column(unit) + at % UNIT / RUN * STEP + at % RUN;
            const float* from = x + (i64)(row0 + row) * x_stride + column;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                xs[at + i][row] = row0 + row < n && unit < units && column + i < cols ? from[i] : 0.0f;
            }
        }
        luce_sync();
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
        luce_sync();
    }

#pragma unroll
    for (int r = 0; r < MY_ROWS; r++) {
        const int row = row0 + my_row + r;
#pragma unroll
        for (int f = 0; f < MY_FEATURES; f++) {
            const int feature = feature0 + my_feature + f % 4 + f / 4 * (TILE_FEATURES / 2);
            if (row < n && feature < rows) out[(i64)row * out_stride + first + feature] = sum[r][f];
        }
    }
}
