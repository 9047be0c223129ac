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

// gpt-oss: (u + 1) g sigmoid(1.702 g) of the gate g, at most 7, and u between -7 and 7.
LUCE_FN float clamped_swiglu(float gate, float up) {
    const float limit = 7.0f, steepness = 1.702f;
    const float g = fminf(gate, limit), u = fminf(fmaxf(up, -limit), limit);
    return (u + 1.0f) * (g / (1.0f + expf(-steepness * g)));
}

// The numbers that Python gives kernels (ACTIVATIONS of luce/ops/fp16.py).
enum Activation { SILU, GELU, CLAMPED_SWIGLU };

// act(gate) * up
LUCE_FN float gated(int activation, float gate, float up) {
    return activation == SILU   ? silu(gate) * up
           : activation == GELU ? gelu(gate) * up
                                : clamped_swiglu(gate, up);
}
