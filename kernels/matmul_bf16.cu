// variants for cuda: ROWS=8,16 TILES=1,2,4
//
// Products of a bfloat16 weight matrix with up to ROWS rows of x, by tiles of 16-bit numbers: decoding and
// verification.
//
// A row of x is two bfloat16 numbers for each of its values, which together have 16 of its 24 bits; products and sums
// are float32. A wave has 16 * TILES of the weight's rows, of which each of the block's waves takes every WAVES-th step
// of 32 columns; their sums are added in the order of the waves. So a row's bits do not depend on the other rows.
//
// The order of a step's columns in a product is free if both factors share it, so a lane loads eight adjacent columns
// of either: of row g of a tile those from 8t on, where g is the lane / 4 and t the lane % 4.
#include "mma.h"

#define WAVES 8
#define THREADS (WAVES * 32)
#define STEP 32
#define COLUMN_TILES (ROWS / 8)  // rows of x are columns of the product
#define SPLIT_THREADS 256

// The remainders of two values, whose bfloat16 roundings are `high`.
LUCE_FN u32 rest(float a, float b, u32 high) {
    float x = luce_f32(bf16_t{(u16)high}), y = luce_f32(bf16_t{(u16)(high >> 16)});
    // Infinities have no remainder.
    return luce_bf16_pair(isinf(x) ? 0.0f : a - x, isinf(y) ? 0.0f : b - y);
}

// Grid: steps * ROWS / 8 * 32 lanes. split [steps, ROWS / 8, lanes]: each lane's values of x float32 [n, cols]; rows
// beyond n are zeros.
extern "C" __global__ void __launch_bounds__(SPLIT_THREADS)
    split_rows(const float* __restrict__ x, uint4* __restrict__ split, const int n, const int cols, const int x_stride) {
    luce_release();
    luce_await();
    const int i = (int)(blockIdx.x * SPLIT_THREADS + threadIdx.x);
    const int lane = i % 32, tile = i / 32 % COLUMN_TILES, step = i / 32 / COLUMN_TILES;
    if (step >= cols / STEP) return;
    const int row = tile * 8 + lane / 4;
    float value[8];
#pragma unroll
    for (int j = 0; j < 8; j++) value[j] = row < n ? x[(i64)row * x_stride + step * STEP + lane % 4 * 8 + j] : 0.0f;
    u32 high[4], low[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        high[j] = luce_bf16_pair(value[2 * j], value[2 * j + 1]);
        low[j] = rest(value[2 * j], value[2 * j + 1], high[j]);
    }
    split[(i64)i * 2] = make_uint4(high[0], high[1], high[2], high[3]);
    split[(i64)i * 2 + 1] = make_uint4(low[0], low[1], low[2], low[3]);
}

// out[r, first + j] = sum over k of x[r, k] * weight[j, k], for r < n <= ROWS and j < rows; cols in whole steps.
// weight [rows, cols]; split as split_rows writes it; out float32, rows out_stride apart.
// Grid: ceil(rows / (16 * TILES)).
extern "C" __global__ void __launch_bounds__(THREADS)
    matmul_bf16(const u8* __restrict__ weight, const uint4* __restrict__ split, float* __restrict__ out, const int n,
                const int rows, const int cols, const int out_stride, const int first) {
    __shared__ float partial[WAVES][ROWS][16 * TILES];
    const int lane = luce_lane(), wave = luce_wave(), g = lane / 4, t = lane % 4;
    const int feature0 = (int)blockIdx.x * (16 * TILES);
    const uint4* from[TILES][2];
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const i64 row = luce_min(feature0 + m * 16 + half * 8 + g, rows - 1);
            from[m][half] = reinterpret_cast<const uint4*>(weight + (row * cols + t * 8) * 2);
        }
    float sum[TILES][COLUMN_TILES][4];
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; c++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum[m][c][e] = 0.0f;
    luce_await();
#pragma unroll(TILES == 4 ? 2 : 4)
    for (int step = wave; step < cols / STEP; step += WAVES) {
        uint4 w[TILES][2], x[COLUMN_TILES][2];
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) w[m][half] = from[m][half][step * (STEP / 8)];
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; c++)
#pragma unroll
            for (int part = 0; part < 2; part++)
                x[c][part] = split[((i64)(step * COLUMN_TILES + c) * 32 + lane) * 2 + part];
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            const u32 upper[4] = {w[m][0].x, w[m][1].x, w[m][0].y, w[m][1].y};
            const u32 lower[4] = {w[m][0].z, w[m][1].z, w[m][0].w, w[m][1].w};
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; c++)
#pragma unroll
                for (int part = 0; part < 2; part++) {
                    const u32 one[2] = {x[c][part].x, x[c][part].y}, other[2] = {x[c][part].z, x[c][part].w};
                    luce_mma_bf16(sum[m][c], upper, one);
                    luce_mma_bf16(sum[m][c], lower, other);
                }
        }
    }
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; c++)
#pragma unroll
            for (int e = 0; e < 4; e++) partial[wave][c * 8 + t * 2 + e % 2][m * 16 + e / 2 * 8 + g] = sum[m][c][e];
    luce_release();
    luce_sync();
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < 16 * TILES * n; i += THREADS) {
        const int feature = i % (16 * TILES), r = i / (16 * TILES);
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < WAVES; w++) total += partial[w][r][feature];
        if (feature0 + feature < rows) out[(i64)r * out_stride + first + feature0 + feature] = total;
    }
}
