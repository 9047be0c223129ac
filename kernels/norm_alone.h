// The RMS norm of one row by each block that reads it, with the bits of norm.cu: a launch for one row is almost all latency.
//
// Threads take the places of norm.cu's, in turns if they are fewer, whole waves at a time, and the waves' sums are added in the
// same order. d is a multiple of 32; the row and its weight, float32 [d], lie at multiples of 16 bytes.
#pragma once
#include "quantise.h"

// Columns that a thread of norm.cu holds (HELD there), by accesses of four.
#define ALONE_COLUMNS 8

// The weight of a norm, in a block of THREADS threads; d is at most MOST, which is at most 8192. Construct it before
// luce_await, so that its loads are under way while earlier kernels run.
template <int MOST, int THREADS> struct NormAlone {
    static constexpr int WAVES = (MOST + ALONE_COLUMNS * 64 - 1) / (ALONE_COLUMNS * 64) * 64 / LUCE_LANES;
    static constexpr int TURNS = (WAVES * LUCE_LANES + THREADS - 1) / THREADS;

    float4 factors[TURNS][ALONE_COLUMNS / 4];
    int d, threads;  // of norm.cu's block

    __device__ __forceinline__ NormAlone(const float* __restrict__ weight, int d)
        : d(d), threads(luce_ceil_div(d, ALONE_COLUMNS * 64) * 64) {
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
#pragma unroll
            for (int n = 0; n < ALONE_COLUMNS / 4; n++) factors[turn][n] = load(weight, turn, n);
        }
    }

    // In norm.cu's block, of a turn of this thread; a whole wave has one there or none.
    __device__ __forceinline__ int place(int turn) const { return turn * THREADS + luce_thread(); }
    __device__ __forceinline__ bool live(int turn) const { return place(turn) < threads; }
    __device__ __forceinline__ int column(int turn, int n) const { return (place(turn) + n * threads) * 4; }

    __device__ __forceinline__ float4 load(const float* from, int turn, int n) const {
        float4 four = {0.0f, 0.0f, 0.0f, 0.0f};
        if (live(turn) && column(turn, n) < d) four = *reinterpret_cast<const float4*>(from + column(turn, n));
        return four;
    }

    // Every thread of the block calls it, behind luce_await. x is not `const __restrict__` in the kernel, or it might be read
    // before that. Whole waves call `put` with four values and the first one's column, which may be d or beyond.
    template <typename Put> __device__ __forceinline__ void operator()(const float* x, float eps, const Put& put) const {
        __shared__ float partial[TURNS * THREADS / LUCE_LANES];
        float held[TURNS][ALONE_COLUMNS / 4][4];
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
#pragma unroll
            for (int n = 0; n < ALONE_COLUMNS / 4; n++) {
                const float4 four = load(x, turn, n);
                held[turn][n][0] = four.x, held[turn][n][1] = four.y;
                held[turn][n][2] = four.z, held[turn][n][3] = four.w;
            }
        }
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < ALONE_COLUMNS / 4; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) sum = fmaf(held[turn][n][e], held[turn][n][e], sum);
            }
            sum = luce_lane_sum(sum);
            if (luce_lane() == 0) partial[place(turn) / LUCE_LANES] = sum;
        }
        luce_sync();
        float sum = partial[0];
#pragma unroll
        for (int wave = 1; wave < WAVES; wave++) sum += partial[wave];  // those that norm.cu's block lacks are zero
        const float scale = 1.0f / sqrtf(sum / (float)d + eps);
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            if (!live(turn)) continue;
#pragma unroll
            for (int n = 0; n < ALONE_COLUMNS / 4; n++) {
                const float4 factor = factors[turn][n];
                const float(&own)[4] = held[turn][n];
                const float result[4] = {own[0] * scale * factor.x, own[1] * scale * factor.y, own[2] * scale * factor.z,
                                         own[3] * scale * factor.w};
                put(result, column(turn, n));
            }
        }
    }
};

// The norm of x as the only quantised row at `to` in shared memory (quantise.h), complete for all threads of the block.
template <int MOST, int THREADS>
LUCE_FN void norm_alone(const NormAlone<MOST, THREADS>& norm, const float* x, float eps, u8* to, bool wide) {
    const Bytes bytes = {to, 1, wide};
    norm(x, eps, [&](const float(&values)[4], int column) {
        quantise_columns(values, in_section(column, norm.d), column, 0, bytes);
    });
    luce_sync();
}
