// The K largest logits of a row in order, in rounds: many blocks each take a part of the row, then fewer blocks
// take their results, until one block has taken all.
//
// A logit and its index make one 64-bit key, so that the order is total: the larger logit, then the lower index; NaN is
// above everything. The result depends neither on the parts nor on the order of comparisons.
#include "gpu.h"

#define K 64
#define THREADS 256
// Keys of a thread, which it holds in registers.
#define OWN 16
#define PART (THREADS * OWN)

// Descending keys are descending values. 0 is below the key of every logit.
LUCE_FN u64 key_of(float value, int index) {
    // + 0 makes the two zeros equal.
    const u32 bits = __float_as_uint(value + 0.0f);
    const u32 ordered = isnan(value) ? 0xffffffffu : bits >> 31 ? ~bits : bits | 0x80000000u;
    return (u64)ordered << 32 | (0xffffffffu - (u32)index);
}

// How many of `count` keys, all different, are larger than one.
LUCE_FN int rank_of(u64 key, const u64* keys, int count) {
    int rank = 0;
#pragma unroll 8
    for (int i = 0; i < count; i++) rank += keys[i] > key;
    return rank;
}

// out[i]: the number i of the K largest keys of a block, of which this thread has `own`; 0 where there are fewer. Keys but 0 are
// different. `keys` [PART] is shared memory.
//
// K threads have a key that is not below the one on rank K - 1 of the threads' largest keys. So the K largest keys are
// among those that are not below it, a hundred mostly, and each of these counts those above it.
LUCE_FN void select(const u64 (&own)[OWN], u64* keys, u64* __restrict__ out) {
    __shared__ u64 least;
    __shared__ int found;
    const int thread = luce_thread();
    u64 largest = 0;
#pragma unroll
    for (int i = 0; i < OWN; i++) largest = luce_max(largest, own[i]);
    keys[thread] = largest;
    if (thread == 0) least = 1, found = 0;
    luce_sync();
    // Threads without keys have equal ranks, of which none is asked for before all others.
    if (largest > 0 && rank_of(largest, keys, THREADS) == K - 1) least = largest;
    luce_sync();
#pragma unroll
    for (int i = 0; i < OWN; i++)
        if (own[i] >= least) keys[atomicAdd(&found, 1)] = own[i];
    luce_sync();
    const int count = found;
    for (int i = thread; i < count; i += THREADS) {
        const int rank = rank_of(keys[i], keys, count);
        if (rank < K) out[rank] = keys[i];
    }
    if (thread >= count && thread < K) out[thread] = 0;
}

// Block x of row y: the K largest of its PART columns of `logits` float32 [rows, vocab], rows `stride` elements apart;
// out [rows, gridDim.x, K].
extern "C" __global__ void __launch_bounds__(THREADS) top_k_of_logits(const float* __restrict__ logits,
                                                                    u64* __restrict__ out, int vocab, int stride) {
    luce_await();
    __shared__ u64 keys[PART];
    const float* row = logits + (i64)blockIdx.y * stride;
    u64 own[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int column = (int)blockIdx.x * PART + i * THREADS + luce_thread();
        own[i] = column < vocab ? key_of(row[column], column) : 0;
    }
    select(own, keys, out + ((i64)blockIdx.y * (int)gridDim.x + (int)blockIdx.x) * K);
}

// The same of keys [rows, count].
extern "C" __global__ void __launch_bounds__(THREADS) top_k_of_keys(const u64* __restrict__ in, u64* __restrict__ out,
                                                                  int count) {
    luce_await();
    __shared__ u64 keys[PART];
    const u64* row = in + (i64)blockIdx.y * count;
    u64 own[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int at = (int)blockIdx.x * PART + i * THREADS + luce_thread();
        own[i] = at < count ? row[at] : 0;
    }
    select(own, keys, out + ((i64)blockIdx.y * (int)gridDim.x + (int)blockIdx.x) * K);
}
