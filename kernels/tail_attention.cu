// variants: KTYPE=F16,BF16,Q8_0,Q4_0
// How much attention the last rows of a text give to each of its tokens: the scores of speculative prefill (arXiv
// 2502.02789). Three kernels for some heads at a time: logits, their maximum and sum, and the largest weight.
#include "kv.h"

// Keys of a block of tail_logits.
#define KEYS 16

// A pair of a head before its rotary embedding: turn holds cos and sin, which have a common factor with YaRN.
LUCE_FN float2 unrotated(const float a, const float b, const float2 turn) {
    const float length = fmaf(turn.x, turn.x, turn.y * turn.y);
    float2 pair;
    pair.x = fmaf(a, turn.x, b * turn.y) / length;
    pair.y = fmaf(b, turn.x, -(a * turn.y)) / length;
    return pair;
}

// logits[head - first, t, j] = q[t, head] . k[j, head / group] for `count` heads from `first` on, keys before their
// rotary embedding. q float32 [rows, heads, d]; table [n, half], half = 0: keys as they are. Pair i of a head is
// elements i and i + half, or 2 i and 2 i + 1 with `adjacent`. Grid: tiles of KEYS keys, KV heads from first / group on.
extern "C" __global__ void tail_logits(const float* __restrict__ q, const KTYPE::Element* __restrict__ k_pool,
                                       const float2* __restrict__ table, float* __restrict__ logits, const int rows,
                                       const int n, const int heads, const int kv_heads, const int d, const int first,
                                       const int count, const int half, const int adjacent) {
    // [KEYS, d + 1]: the padding puts the same element of neighbouring keys into different banks.
    LUCE_DYNAMIC_SHARED(float, keys);
    const int group = heads / kv_heads, kv_head = first / group + (int)blockIdx.y;
    const int begin = (int)blockIdx.x * KEYS, own = luce_min(KEYS, n - begin), stride = d + 1;
    luce_release();
    luce_await();
    for (int i = luce_thread(); i < own * (d / 2); i += luce_threads()) {
        const int key = i / (d / 2), column = i % (d / 2) * 2;
        const i64 at = ((i64)(begin + key) * kv_heads + kv_head) * d + column;
        float* to = keys + key * stride + column;
        KTYPE::split(KTYPE::load(k_pool + KTYPE::offset(at), column), to[0], to[1]);
    }
    luce_sync();
    for (int i = luce_thread(); i < own * half; i += luce_threads()) {
        const int key = i / half, pair = i % half;
        float* a = keys + key * stride + (adjacent ? 2 * pair : pair);
        float* b = a + (adjacent ? 1 : half);
        const float2 turned = unrotated(*a, *b, table[(i64)(begin + key) * half + pair]);
        *a = turned.x;
        *b = turned.y;
    }
    luce_sync();
    const int low = luce_max(first, kv_head * group), high = luce_min(first + count, (kv_head + 1) * group);
    for (int i = luce_thread(); i < KEYS * rows * (high - low); i += luce_threads()) {
        const int key = i % KEYS, row = i / KEYS % rows, head = low + i / KEYS / rows;
        if (key >= own) continue;
        const float *from = q + ((i64)row * heads + head) * d, *other = keys + key * stride;
        float sum = 0.0f;
        for (int column = 0; column < d; column++) sum = fmaf(from[column], other[column], sum);
        logits[((i64)(head - first) * rows + row) * n + begin + key] = sum;
    }
}

// totals[head, t] = the largest of the logits that row t sees, and the sum of exp(logit - largest). Row t sees keys up
// to n - rows + t. Grid: rows, heads.
extern "C" __global__ void tail_totals(const float* __restrict__ logits, float2* __restrict__ totals, const int rows,
                                       const int n) {
    const i64 at = (i64)blockIdx.y * rows + blockIdx.x;
    const int seen = n - rows + (int)blockIdx.x + 1;
    luce_release();
    luce_await();
    float top = -LUCE_INF, sum = 0.0f;
    for (int j = luce_thread(); j < seen; j += luce_threads()) top = fmaxf(top, logits[at * n + j]);
    top = luce_block_max(top);
    for (int j = luce_thread(); j < seen; j += luce_threads()) sum += expf(logits[at * n + j] - top);
    sum = luce_block_sum(sum);
    if (luce_thread() == 0) {
        float2 total;
        total.x = top;
        total.y = sum;
        totals[at] = total;
    }
}

// best[t, j] = max(best[t, j], the softmax weight of key j in row t by each of `count` heads). Grid: blocks along the
// keys, rows.
extern "C" __global__ void tail_best(const float* __restrict__ logits, const float2* __restrict__ totals,
                                     float* __restrict__ best, const int rows, const int n, const int count) {
    const int j = (int)(blockIdx.x * blockDim.x + threadIdx.x), row = (int)blockIdx.y;
    luce_release();
    luce_await();
    if (j > n - rows + row) return;
    float top = best[(i64)row * n + j];
    for (int head = 0; head < count; head++) {
        const i64 at = (i64)head * rows + row;
        top = fmaxf(top, expf(logits[at * n + j] - totals[at].x) / totals[at].y);
    }
    best[(i64)row * n + j] = top;
}
