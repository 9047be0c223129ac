// variants: KTYPE=F16,BF16,Q8_0,Q4_0
// The statistics by which KVFlash ranks pages: moments of each page's keys, and the newest queries of each sequence.
#include "kv.h"

#define PAGE 64
// Queries stored per slot: any row of a speculative span may become the newest.
#define NEWEST_QUERIES 16

// Consecutive keys that share their moments.
#define GROUP 16

// out[i, g, head, 0] and out[i, g, head, 1], float32 [d] each: mean and variance of every channel over keys [GROUP * g,
// GROUP * (g + 1)) of page pages[i] of k_pool. Grid: pages, KV heads, groups; threads have pairs of channels.
extern "C" __global__ void page_moments(const KTYPE::Element* __restrict__ k_pool, const int* __restrict__ pages,
                                        float* __restrict__ out, const int kv_heads, const int d) {
    const int head = (int)blockIdx.y;
    luce_release();
    luce_await();
    const i64 first = (i64)pages[blockIdx.x] * PAGE + blockIdx.z * GROUP;
    for (int column = 2 * luce_thread(); column < d; column += 2 * luce_threads()) {
        float even[GROUP], odd[GROUP], sums[2] = {}, squares[2] = {};
#pragma unroll
        for (int row = 0; row < GROUP; row++) {
            const i64 at = ((first + row) * kv_heads + head) * d + column;
            KTYPE::split(KTYPE::load(k_pool + KTYPE::offset(at), column), even[row], odd[row]);
            sums[0] += even[row];
            sums[1] += odd[row];
        }
        const float means[2] = {sums[0] / GROUP, sums[1] / GROUP};
#pragma unroll
        for (int row = 0; row < GROUP; row++) {
            squares[0] = fmaf(even[row] - means[0], even[row] - means[0], squares[0]);
            squares[1] = fmaf(odd[row] - means[1], odd[row] - means[1], squares[1]);
        }
        float* to = out + (((i64)blockIdx.x * (PAGE / GROUP) + blockIdx.z) * kv_heads + head) * 2 * d + column;
        for (int i = 0; i < 2; i++) {
            to[i] = means[i];
            to[d + i] = squares[i] / GROUP;
        }
    }
}

// kept[slot, place % NEWEST_QUERIES] = q[row], [heads, d] each, for the last NEWEST_QUERIES rows of every span; place
// is the row's number in its sequence. `spans` has the columns slot, start, rows, position. Grid: spans,
// NEWEST_QUERIES, blocks along heads * d.
extern "C" __global__ void store_queries(const float* __restrict__ q, const i64 q_row, const i64 q_head,
                                        const int* __restrict__ spans, float* __restrict__ kept, const int heads,
                                        const int d) {
    const int i = (int)(blockIdx.z * blockDim.x + threadIdx.x);
    const int* span = spans + blockIdx.x * 4;
    luce_release();
    luce_await();
    const int row = span[2] - 1 - (int)blockIdx.y;
    if (row < 0 || i >= heads * d) return;
    const i64 to = ((i64)span[0] * NEWEST_QUERIES + (span[3] + row) % NEWEST_QUERIES) * heads * d + i;
    kept[to] = q[(span[1] + row) * q_row + i / d * q_head + i % d];
}
