// Reads memory and keeps next to nothing of it: the bandwidth of reads, which bounds decoding (luce/bench/limits.py).
#include "gpu.h"

// Loads of 16 bytes that a thread has in flight.
#define FLIGHT 8

// out[i]: of all words that thread i of the grid reads, the exclusive or. `from` has `count` times 16 bytes.
extern "C" __global__ void __launch_bounds__(256)
    read_words(const uint4* __restrict__ from, const i64 count, u32* __restrict__ out) {
    luce_await();
    const i64 threads = (i64)gridDim.x * blockDim.x, own = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    u32 found = 0;
    for (i64 i = own; i < count; i += threads * FLIGHT) {
        uint4 four[FLIGHT];
#pragma unroll
        for (int k = 0; k < FLIGHT; k++)
            four[k] = i + k * threads < count ? from[i + k * threads] : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < FLIGHT; k++) found ^= four[k].x ^ four[k].y ^ four[k].z ^ four[k].w;
    }
    out[own] = found;
}
