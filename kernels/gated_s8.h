// Gated feed-forward parts: act(gate x) * up x, made of the sums of a block and quantised for the next product.
#pragma once
#include "activation.h"
#include "dot_s8.h"
#include "quantise.h"

// The block's features are 32 gates and the 32 ups that belong to them. Of COUNT rows of x, row r's results go to the
// block of columns from column0 on, a multiple of 32, of quantised row first + r.
template <int COUNT>
LUCE_FN void gate_and_quantise(const float* partial, int chain_bits, int gelu_gate, int column0, int first, int stride,
                               i8* __restrict__ values, float* __restrict__ scales) {
    const int lane = luce_thread() % 32, workers = luce_threads() / 32;
    for (int r0 = 0; r0 < COUNT; r0 += workers) {
        const int worker = r0 + luce_thread() / 32, r = luce_min(worker, COUNT - 1);
        const float* from = partial + r * PARTIAL_STRIDE(64) + lane;
        const float gate = chain_sum(from, chain_bits, COUNT * PARTIAL_STRIDE(64));
        const float up = chain_sum(from + 32, chain_bits, COUNT * PARTIAL_STRIDE(64));
        const float result[1] = {(gelu_gate ? gelu(gate) : silu(gate)) * up};
        quantise_columns(result, worker == r, column0 + lane, first + r, stride, values, scales);
    }
}
