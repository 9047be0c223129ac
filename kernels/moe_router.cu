// variants for cuda: EXPERTS=256,512
//
// The norm of one row, its product with a router, and the choice of its experts in one launch, with the bits of norm.cu,
// matmul_vec.cu and moe.cu: launches of so little work are almost all latency.
//
// Every block norms the row itself, and posts the products with a few of the router's rows. A wave of the last block chooses
// among up to EXPERTS experts. The first block writes the row as int8.
#include "norm_alone.h"
#include "posts.h"
#include "route.h"

#if LUCE_WGMMA

// Of matmul_vec.cu for one row: threads, and the router's rows of a block. Thread t sums the units t, t + THREADS, ... of four
// columns there, and a launch takes up to MOST_COLUMNS.
#define WAVES 4
#define THREADS (WAVES * LUCE_LANES)
#define FEATURES 2
#define MOST_COLUMNS 2048
#define UNITS (MOST_COLUMNS / 4 / THREADS)
#define OWN (EXPERTS / LUCE_LANES)  // experts of a lane of the wave that chooses

// ids, weights [top_k]: as `route` of moe.cu chooses by the products of y with the first `experts` of `rows` rows of weight
// float32 [rows, cols], with arguments as there; gate: those with the others. y is the norm of x float32 [cols], as rms_norm of
// norm.cu makes it, and to_int8 y as the only quantised row (quantise.h). cols is a multiple of 32; x, factors [cols] and weight
// lie at multiples of 16 bytes. slots [experts] (posts.h). Grid: ceil(rows / FEATURES) blocks of THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS)
    norm_route(const float* __restrict__ weight, const float* x, const float* __restrict__ factors, const float eps, i32* slots,
               float* __restrict__ gate, u8* __restrict__ to_int8, const int wide, const float* __restrict__ bias,
               const float* __restrict__ expert_scale, i32* __restrict__ ids, float* __restrict__ weights, const int rows,
               const int cols, const int experts, const int top_k, const int sigmoid, const int biased, const int normalise,
               const int scaled, const float scale, const int groups, const int groups_used, const int two_best) {
    __shared__ float4 row[MOST_COLUMNS / 4];
    __shared__ float partial[WAVES][FEATURES];
    __shared__ float kept[EXPERTS];
    const int thread = luce_thread(), first = (int)blockIdx.x * FEATURES;
    const NormAlone<MOST_COLUMNS, THREADS> norm(factors, cols);
    float4 w[UNITS][FEATURES];
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int column = (thread + u * THREADS) * 4;
#pragma unroll
        for (int f = 0; f < FEATURES; f++) {
            // Features beyond the last repeat it, and their results are not written.
            const float* from = weight + (i64)luce_min(first + f, rows - 1) * cols;
            if (column < cols) w[u][f] = *reinterpret_cast<const float4*>(from + column);
        }
    }
    luce_await();  // until here, only weights were fetched
    luce_release();
    norm(x, eps, [&](const float(&values)[4], int column) {
        if (column < cols) row[column / 4] = make_float4(values[0], values[1], values[2], values[3]);
    });
    luce_sync();
    float sum[FEATURES] = {};
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int column = (thread + u * THREADS) * 4;
        if (column >= cols) break;
        const float4 v = row[column / 4];
#pragma unroll
        for (int f = 0; f < FEATURES; f++) {
            sum[f] = fmaf(w[u][f].x, v.x, sum[f]);
            sum[f] = fmaf(w[u][f].y, v.y, sum[f]);
            sum[f] = fmaf(w[u][f].z, v.z, sum[f]);
            sum[f] = fmaf(w[u][f].w, v.w, sum[f]);
        }
    }
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
        sum[f] = luce_lane_sum(sum[f]);
        if (luce_lane() == 0) partial[luce_wave()][f] = sum[f];
    }
    luce_sync();
    const int feature = first + thread;
    if (thread < FEATURES && feature < rows) {
        float total = partial[0][thread];
#pragma unroll
        for (int wave = 1; wave < WAVES; wave++) total += partial[wave][thread];
        if (feature < experts)
            luce_post(slots + feature, total);
        else
            gate[feature - experts] = total;
    }
    if (blockIdx.x == 0) {
        const Bytes bytes = {to_int8, 1, wide};
        for (int column = thread * 4; in_section(column, cols); column += THREADS * 4) {
            float own[4] = {};
            if (column < cols) {
                const float4 v = row[column / 4];
                own[0] = v.x, own[1] = v.y, own[2] = v.z, own[3] = v.w;
            }
            quantise_columns(own, true, column, 0, bytes);
        }
    }
    if (blockIdx.x == gridDim.x - 1 && luce_wave() == 0) {
        float p[OWN];
#pragma unroll
        for (int i = 0; i < OWN; i++) p[i] = -LUCE_INF;
        luce_take(slots, experts, p);
        route_row(p, bias, expert_scale, ids, weights, experts, top_k, sigmoid, biased, normalise, scaled, scale, groups,
                  groups_used, two_best, kept);
    }
}

#endif
