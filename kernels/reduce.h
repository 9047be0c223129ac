// Sums and maxima over the lanes of a wave and over the threads of a block, in a fixed order.
//
// The order depends on LUCE_LANES and on the block's size alone: neither on the grid nor on the block's place in it. So
// a row that one block reduces has the same bits whatever other rows the launch has (row invariance). Results differ in
// the last bits between 32 and 64 lanes and between block sizes: choose a block size from the row's length, never from
// the number of rows. Each thread passes its own partial result, summed over elements thread, thread + threads, ...
#pragma once
#include "gpu.h"

struct luce_add {
    template <typename T> __device__ __forceinline__ T operator()(T a, T b) const { return a + b; }
};

// Of numbers and NaN, the number (as fmaxf). Pass -LUCE_INF for threads without an element.
struct luce_maximum {
    __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
    __device__ __forceinline__ i32 operator()(i32 a, i32 b) const { return a < b ? b : a; }
};

// All lanes get the result, bit for bit the same: at every level both partners combine the same two values, and the
// operations are commutative. Every lane of the wave must call it. WIDTH, a power of two, reduces within groups of that
// many neighbouring lanes.
template <int WIDTH = LUCE_LANES, typename T, typename Op> LUCE_FN T luce_lane_reduce(T value, Op op) {
#pragma unroll
    for (int mask = WIDTH / 2; mask > 0; mask /= 2) value = op(value, luce_shfl_xor(value, mask));
    return value;
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
// Integers of a whole wave in one instruction: their order has no effect.
template <int WIDTH> LUCE_FN i32 luce_lane_reduce(i32 value, luce_add op) {
    if (WIDTH == LUCE_LANES) return __reduce_add_sync(0xffffffffu, value);
    return luce_lane_reduce<WIDTH, i32, luce_add>(value, op);
}
template <int WIDTH> LUCE_FN i32 luce_lane_reduce(i32 value, luce_maximum op) {
    if (WIDTH == LUCE_LANES) return __reduce_max_sync(0xffffffffu, value);
    return luce_lane_reduce<WIDTH, i32, luce_maximum>(value, op);
}
#endif
template <int WIDTH = LUCE_LANES, typename T> LUCE_FN T luce_lane_sum(T value) {
    return luce_lane_reduce<WIDTH>(value, luce_add());
}
template <int WIDTH = LUCE_LANES, typename T> LUCE_FN T luce_lane_max(T value) {
    return luce_lane_reduce<WIDTH>(value, luce_maximum());
}

// All threads get the result: lanes first, then the waves' results in the order of the waves. Every thread of the block
// must call it, and the block must be a whole number of waves.
template <typename T, typename Op> LUCE_FN T luce_block_reduce(T value, Op op) {
    __shared__ T partial[1024 / LUCE_LANES];
    value = luce_lane_reduce(value, op);
    int waves = luce_threads() / LUCE_LANES;
    if (waves == 1) return value;
    if (luce_lane() == 0) partial[luce_wave()] = value;
    luce_sync();
    value = partial[0];
    for (int wave = 1; wave < waves; wave++) value = op(value, partial[wave]);
    luce_sync();  // otherwise the next call would overwrite values that a slower wave still reads
    return value;
}
template <typename T> LUCE_FN T luce_block_sum(T value) { return luce_block_reduce(value, luce_add()); }
template <typename T> LUCE_FN T luce_block_max(T value) { return luce_block_reduce(value, luce_maximum()); }
