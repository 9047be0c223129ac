// The largest logit of a row, in two steps: many blocks each take a part of the row, then one joins their results.
//
// "Better" is a total order (a number before NaN, the larger number, the lower index), so the result depends neither on
// the parts nor on the order in which candidates are compared.
#include "reduce.h"

struct Candidate {
    float value;
    i32 index;
};

LUCE_FN Candidate better(Candidate a, Candidate b) {
    const bool a_nan = isnan(a.value), b_nan = isnan(b.value);
    if (a_nan != b_nan) return b_nan ? a : b;
    if (a_nan || a.value == b.value) return a.index < b.index ? a : b;
    return a.value > b.value ? a : b;
}

LUCE_FN Candidate none() { return {LUCE_NAN, 0x7fffffff}; }

// The block's best; the same in all threads.
LUCE_FN Candidate block_best(Candidate mine) {
    __shared__ Candidate partial[1024 / LUCE_LANES];
    for (int mask = LUCE_LANES / 2; mask > 0; mask /= 2) {
        const Candidate other = {luce_shfl_xor(mine.value, mask), luce_shfl_xor(mine.index, mask)};
        mine = better(mine, other);
    }
    if (luce_lane() == 0) partial[luce_wave()] = mine;
    luce_sync();
    mine = partial[0];
    for (int wave = 1; wave < luce_threads() / LUCE_LANES; wave++) mine = better(mine, partial[wave]);
    return mine;
}

// values, indices [rows, gridDim.x]: the best of part blockIdx.x (`part` columns) of row blockIdx.y of logits
// float32 [rows, vocab], rows `stride` elements apart.
extern "C" __global__ void argmax_parts(const float* __restrict__ logits, float* __restrict__ values,
                                        i32* __restrict__ indices, int vocab, int stride, int part) {
    luce_release();
    luce_await();
    const float* row = logits + (i64)blockIdx.y * stride;
    const int begin = (int)blockIdx.x * part;
    const int end = luce_min(begin + part, vocab);
    Candidate best = none();
    for (int i = begin + luce_thread(); i < end; i += luce_threads()) best = better(best, {row[i], i});
    best = block_best(best);
    if (luce_thread() == 0) {
        const i64 at = (i64)blockIdx.y * (int)gridDim.x + (int)blockIdx.x;
        values[at] = best.value;
        indices[at] = best.index;
    }
}

// out[row] = the index of the best of the row's `parts` candidates; one block per row.
extern "C" __global__ void argmax_join(const float* __restrict__ values, const i32* __restrict__ indices,
                                       i32* __restrict__ out, int parts) {
    luce_release();
    luce_await();
    const i64 row = (i64)blockIdx.x * parts;
    Candidate best = none();
    for (int i = luce_thread(); i < parts; i += luce_threads()) best = better(best, {values[row + i], indices[row + i]});
    best = block_best(best);
    if (luce_thread() == 0) out[blockIdx.x] = best.index;
}
