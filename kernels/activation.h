// The activations of gated feed-forward parts, and of the gates of attention.
#pragma once
#include "gpu.h"

LUCE_FN float silu(float x) { return x / (1.0f + expf(-x)); }

LUCE_FN float gelu(float x) {
    const float root = 0.7978845608028654f;  // sqrt(2 / pi)
    return 0.5f * x * (1.0f + tanhf(root * (x + 0.044715f * x * x * x)));
}

// log(1 + e^x); x itself where the 1 is lost beside e^x.
LUCE_FN float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
