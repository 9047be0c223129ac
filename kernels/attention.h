// Shared by attention.cu and attention_mma.cu.
#pragma once
#include "kv.h"

#define PAGE 64

// The value to subtract from scores whose maximum is `top`: 0 if no key was seen, as inf - inf is NaN.
LUCE_FN float softmax_base(float top) { return top == -LUCE_INF ? 0.0f : top; }

// The first tile, of `queries` queries, of span i: it leaves earlier spans at least the tiles that they need, without a
// sum over them. `spans` has the columns slot, start, rows, position.
LUCE_FN int first_tile(const int* spans, int i, int group, int queries) {
    return spans[i * 4 + 1] * group / queries + i;
}

// The span of a tile: the last one that begins at or before it.
LUCE_FN int tile_span(const int* spans, int count, int group, int queries, int tile) {
    int low = 0, high = count - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (first_tile(spans, middle, group, queries) <= tile)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// The rows of its span that a row sees, one bit each: PageView.seen of luce/runtime/step.py.
LUCE_FN u64 seen_rows(const int* seen, i64 row) { return (u32)seen[row * 2] | (u64)(u32)seen[row * 2 + 1] << 32; }

#ifdef SOFTCAP
#define CAP_ARGUMENTS , const float cap
#define CAP_PASSED , cap
LUCE_FN float capped(float score, float cap) { return cap * tanhf(score / cap); }
#else
#define CAP_ARGUMENTS
#define CAP_PASSED
#endif
