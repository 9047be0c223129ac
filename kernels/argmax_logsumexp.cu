// The largest of a row of logits and log sum exp of all, in two steps: many blocks each take a part of a row, then one
// block joins their results. "Largest" is the total order of sample.cu.
#include "reduce.h"

#define NONE 0x7fffffff

// The value to subtract before exp: the largest value, or 0 if there is none.
LUCE_FN float base(float top) { return top == -LUCE_INF ? 0.0f : top; }

// scale * logit, and then softcap * tanh(that / softcap) if softcap is not 0.
LUCE_FN float value_of(float logit, float scale, float softcap) {
    const float x = scale * logit;
    return softcap != 0.0f ? softcap * tanhf(x / softcap) : x;
}

// The lowest index that any thread of the block brings.
LUCE_FN int block_first(int index) { return -luce_block_max(-index); }

// state [rows, gridDim.x, 2] and indices [rows, gridDim.x]: of part blockIdx.x (`part` columns) of row blockIdx.y of
// logits float32 [rows, vocab], rows `stride` elements apart: the largest logit, the sum of exp(value - its value), and
// the lowest index of that logit, NONE if there is no number.
extern "C" __global__ void argmax_logsumexp_parts(const float* __restrict__ logits, float* __restrict__ state,
                                           i32* __restrict__ indices, int vocab, int stride, int part, float scale,
                                           float softcap) {
    luce_release();
    luce_await();
    const float* row = logits + (i64)blockIdx.y * stride;
    const int begin = (int)blockIdx.x * part, end = luce_min(begin + part, vocab);
    float top = -LUCE_INF, sum = 0.0f;
    for (int i = begin + luce_thread(); i < end; i += luce_threads()) top = fmaxf(top, row[i]);
    top = luce_block_max(top);
    const float from = base(value_of(top, scale, softcap));
    int first = NONE;
    for (int i = begin + luce_thread(); i < end; i += luce_threads()) {
        const float logit = row[i];
        sum += expf(value_of(logit, scale, softcap) - from);
        if (logit == top) first = luce_min(first, i);
    }
    sum = luce_block_sum(sum);
    first = block_first(first);
    if (luce_thread() == 0) {
        const i64 at = (i64)blockIdx.y * (int)gridDim.x + (int)blockIdx.x;
        state[2 * at] = top;
        state[2 * at + 1] = sum;
        indices[at] = first;
    }
}

// out [3, rows]: of the row's `parts` parts the index, 0 if there is no number; then, as the bits of float32, that
// logit and log sum exp. One block per row.
extern "C" __global__ void argmax_logsumexp_join(const float* __restrict__ state, const i32* __restrict__ indices,
                                          i32* __restrict__ out, int parts, float scale, float softcap) {
    luce_release();
    luce_await();
    const i64 row = (i64)blockIdx.x * parts;
    const int rows = (int)gridDim.x;
    float top = -LUCE_INF, sum = 0.0f;
    for (int i = luce_thread(); i < parts; i += luce_threads()) top = fmaxf(top, state[2 * (row + i)]);
    top = luce_block_max(top);
    const float to = base(value_of(top, scale, softcap));
    int first = NONE;
    for (int i = luce_thread(); i < parts; i += luce_threads()) {
        const float own = state[2 * (row + i)];
        sum += state[2 * (row + i) + 1] * expf(base(value_of(own, scale, softcap)) - to);
        if (own == top) first = luce_min(first, indices[row + i]);
    }
    sum = luce_block_sum(sum);
    first = block_first(first);
    if (luce_thread() == 0) {
        out[blockIdx.x] = first == NONE ? 0 : first;
        out[rows + blockIdx.x] = (i32)__float_as_uint(first == NONE ? LUCE_NAN : top);
        out[2 * rows + blockIdx.x] = (i32)__float_as_uint(logf(sum) + to);
    }
}
