// Element-wise gates and the residual addition. Grid: x rows, y blocks along a row. A thread takes EACH elements in the
// gates over whole rows, else one.
#include "activation.h"

// Elements per thread of the gates: loads that run at once hide the memory's latency.
#define EACH 4

LUCE_FN int element(int e) { return (int)((blockIdx.y * EACH + e) * blockDim.x + threadIdx.x); }

template <Activation ACTIVATION>
LUCE_FN void gated_rows(float* out, const float* gate, const i64 gate_stride, const float* up, const i64 up_stride,
                        const int f) {
    float g[EACH], u[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        int i = element(e);
        g[e] = i < f ? gate[blockIdx.x * gate_stride + i] : 0.0f;
        u[e] = i < f ? up[blockIdx.x * up_stride + i] : 0.0f;
    }
#pragma unroll
    for (int e = 0; e < EACH; e++)
        if (element(e) < f) out[(i64)blockIdx.x * f + element(e)] = gated(ACTIVATION, g[e], u[e]);
}

extern "C" __global__ void gated_silu(float* __restrict__ out, const float* __restrict__ gate,
                                      const i64 gate_stride, const float* __restrict__ up, const i64 up_stride,
                                      const int f) {
    luce_await();
    gated_rows<SILU>(out, gate, gate_stride, up, up_stride, f);
}

extern "C" __global__ void gated_gelu(float* __restrict__ out, const float* __restrict__ gate,
                                      const i64 gate_stride, const float* __restrict__ up, const i64 up_stride,
                                      const int f) {
    luce_await();
    gated_rows<GELU>(out, gate, gate_stride, up, up_stride, f);
}

extern "C" __global__ void gated_clamped_swiglu(float* __restrict__ out, const float* __restrict__ gate,
                                                const i64 gate_stride, const float* __restrict__ up,
                                                const i64 up_stride, const int f) {
    luce_await();
    gated_rows<CLAMPED_SWIGLU>(out, gate, gate_stride, up, up_stride, f);
}

extern "C" __global__ void plain_gelu(float* __restrict__ x, const int f) {
    luce_await();
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i < f) x[(i64)blockIdx.x * f + i] = gelu(x[(i64)blockIdx.x * f + i]);
}

extern "C" __global__ void sigmoid_gate(float* __restrict__ out, const float* __restrict__ x,
                                        const float* __restrict__ gate, const i64 row_stride, const i64 head_stride,
                                        const int heads, const int d) {
    luce_await();
    float z[EACH], value[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        int i = element(e);
        z[e] = i < heads * d ? gate[blockIdx.x * row_stride + i / d * head_stride + i % d] : 0.0f;
        value[e] = i < heads * d ? x[(i64)blockIdx.x * heads * d + i] : 0.0f;
    }
#pragma unroll
    for (int e = 0; e < EACH; e++)
        if (element(e) < heads * d) out[(i64)blockIdx.x * heads * d + element(e)] = value[e] / (1.0f + expf(-z[e]));
}

extern "C" __global__ void softplus_gate(float* __restrict__ out, const float* __restrict__ x,
                                         const float* __restrict__ gate, const i64 row_stride, const i64 head_stride,
                                         const int each, const int heads, const int d) {
    luce_await();
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= heads * d) return;
    int element = each == 1 ? 0 : i % d;
    float z = gate[blockIdx.x * row_stride + i / d * head_stride + element];
    i64 at = (i64)blockIdx.x * heads * d + i;
    out[at] = x[at] * softplus(z);
}

extern "C" __global__ void add_gated(float* __restrict__ x, const float* __restrict__ delta,
                                     const float* __restrict__ gate, const i64 gate_stride, const int d) {
    luce_await();
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= d) return;
    i64 at = (i64)blockIdx.x * d + i;
    x[at] += delta[at] / (1.0f + expf(-gate[blockIdx.x * gate_stride]));
}

extern "C" __global__ void scale(float* __restrict__ x, const float factor, const int d) {
    luce_await();
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i < d) x[(i64)blockIdx.x * d + i] *= factor;
}

extern "C" __global__ void softcap(float* __restrict__ x, const float cap, const int d) {
    luce_await();
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= d) return;
    i64 at = (i64)blockIdx.x * d + i;
    x[at] = cap * tanhf(x[at] / cap);
}

extern "C" __global__ void add(float* __restrict__ x, const i64 x_stride, const float* __restrict__ delta,
                               const i64 delta_stride, const int d) {
    luce_await();
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i < d) x[blockIdx.x * x_stride + i] += delta[blockIdx.x * delta_stride + i];
}
