// Masks of tokens: logits of tokens that may not come next become -inf.
#include "gpu.h"

// Block x, y: columns [x * part, (x + 1) * part) of row rows[y] of logits float32 [.., vocab], rows `stride` elements
// apart. masks [gridDim.y, words]: bit i % 32 of word i / 32 says whether token i may come; tokens behind the last word
// may not. The rows differ.
extern "C" __global__ void mask_logits(float* __restrict__ logits, const i32* __restrict__ rows,
                                       const u32* __restrict__ masks, int vocab, int stride, int words, int part) {
    luce_release();
    luce_await();
    float* row = logits + (i64)rows[blockIdx.y] * stride;
    const u32* mask = masks + (i64)blockIdx.y * words;
    const int begin = (int)blockIdx.x * part;
    const int end = luce_min(begin + part, vocab);
    for (int i = begin + luce_thread(); i < end; i += luce_threads())
        if (i / 32 >= words || !(mask[i / 32] >> (i % 32) & 1)) row[i] = -LUCE_INF;
}
