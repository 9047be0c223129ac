// log sum exp of rows of logits, in two steps: many blocks each take a part of a row, then one joins what they found.
#include "reduce.h"

// exp is of differences from the largest value so far, which is 0 where nothing is.
LUCE_FN float base(float top) { return top == -LUCE_INF ? 0.0f : top; }

// state [rows, gridDim.x, 2]: of part blockIdx.x (`part` columns) of row blockIdx.y of logits float32 [rows, vocab], rows
// `stride` elements apart, the largest f, and the sum of exp(f - that). f = scale * logit, softcap * tanh(f / softcap) if
// softcap is not 0.
extern "C" __global__ void norm_parts(const float* __restrict__ logits, float* __restrict__ state, int vocab, int stride,
                                      int part, float scale, float softcap) {
    luce_release();
    luce_await();
    const float* row = logits + (i64)blockIdx.y * stride;
    const int begin = (int)blockIdx.x * part, end = luce_min(begin + part, vocab);
    const auto value = [&](int i) {
        const float x = scale * row[i];
        return softcap != 0.0f ? softcap * tanhf(x / softcap) : x;
    };
    float top = -LUCE_INF, sum = 0.0f;
    for (int i = begin + luce_thread(); i < end; i += luce_threads()) top = fmaxf(top, value(i));
    top = luce_block_max(top);
    for (int i = begin + luce_thread(); i < end; i += luce_threads()) sum += expf(value(i) - base(top));
    sum = luce_block_sum(sum);
    if (luce_thread() == 0) {
        float* to = state + ((i64)blockIdx.y * (int)gridDim.x + (int)blockIdx.x) * 2;
        to[0] = top;
        to[1] = sum;
    }
}

// out[row] = log sum exp of the row's `parts` parts; one block per row.
extern "C" __global__ void norm_join(const float* __restrict__ state, float* __restrict__ out, int parts) {
    luce_release();
    luce_await();
    const float* row = state + (i64)blockIdx.x * parts * 2;
    float top = -LUCE_INF, sum = 0.0f;
    for (int i = luce_thread(); i < parts; i += luce_threads()) top = fmaxf(top, row[2 * i]);
    top = luce_block_max(top);
    for (int i = luce_thread(); i < parts; i += luce_threads()) sum += row[2 * i + 1] * expf(row[2 * i] - base(top));
    sum = luce_block_sum(sum);
    if (luce_thread() == 0) out[blockIdx.x] = logf(sum) + base(top);
}
