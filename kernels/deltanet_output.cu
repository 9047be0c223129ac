// variants: HEAD=64,128
//
// The output norm of gated DeltaNet for long spans, behind deltanet_chunk.cu: rms(out) * norm * silu(gate) per head.
#include "deltanet.h"
#include "fp16_rows.h"
#include "int8_rows.h"

// Rows whose inputs are loaded at once, to hide the latency.
#define BATCH 4

// The wave's head of one row, from its values: rms(value) * norm * silu(z).
LUCE_FN void gated_norm(float (&value)[ELEMENTS], const float (&norm)[ELEMENTS], const float (&z)[ELEMENTS], float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++) squares = fmaf(value[e], value[e], squares);
    const float scale = 1.0f / sqrtf(luce_lane_sum(squares) / (float)HEAD + eps);
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++) value[e] = value[e] * scale * norm[e] * silu(z[e]);
}

#define OUTPUT_THREADS 128

// out = rms(out) * norm * silu(gate) per head, of the long spans' rows. A wave has a head of BATCH rows; grid
// (rows of the longest span / BATCH, value heads / waves, spans), OUTPUT_THREADS threads.
extern "C" __global__ void __launch_bounds__(OUTPUT_THREADS)
    delta_output(float* __restrict__ out, const float* __restrict__ x, const float* __restrict__ norm,
                 const i32* __restrict__ spans, i64 stride, int key_heads, int heads, float eps) {
    luce_await();
    const Span span = span_at(spans, blockIdx.z);
    const int first = (int)blockIdx.x * BATCH, head = (int)blockIdx.y * (OUTPUT_THREADS / LUCE_LANES) + luce_wave();
    if (span.rows <= STEPS || first >= span.rows || head >= heads) return;  // whole waves
    const float* gate = x + (span.start + first) * stride + Layout{key_heads, heads}.gate(head) + luce_lane();
    out += ((i64)(span.start + first) * heads + head) * HEAD + luce_lane();
    float value[BATCH][ELEMENTS], z[BATCH][ELEMENTS], factor[ELEMENTS];
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++) factor[e] = norm[luce_lane() + e * LUCE_LANES];
#pragma unroll
    for (int b = 0; b < BATCH; b++)
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
            const bool there = first + b < span.rows;
            value[b][e] = there ? out[(i64)b * heads * HEAD + e * LUCE_LANES] : 0.0f;
            z[b][e] = there ? gate[b * stride + e * LUCE_LANES] : 0.0f;
        }
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
        gated_norm(value[b], factor, z[b], eps);
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++)
            if (first + b < span.rows) out[(i64)b * heads * HEAD + e * LUCE_LANES] = value[b][e];
    }
}

#define FP16_THREADS 256

// The same for the n rows of one span, as fp16 with a scale for each row (fp16_rows.h); half has rows of `padded`
// columns. Grid: n blocks of FP16_THREADS threads, whose waves have a head at a time.
extern "C" __global__ void __launch_bounds__(FP16_THREADS)
    delta_output_fp16(const float* __restrict__ out, const float* __restrict__ x, const float* __restrict__ sum_rows,
                      const float* __restrict__ sum_features, const float* __restrict__ norm, f16_t* __restrict__ half,
                      float* __restrict__ scales, int padded, i64 stride, int key_heads, int heads, float eps) {
    luce_await();
    const Layout layout = {key_heads, heads};
    const i64 r = blockIdx.x;
    const Products inputs = {x, sum_rows, sum_features};
    out += r * heads * HEAD;
    float factor[ELEMENTS];
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++) factor[e] = norm[luce_lane() + e * LUCE_LANES];
    Fp16Row to(half + r * padded, scales + r);
    do {
#pragma unroll 3
        for (int head = luce_wave(); head < heads; head += FP16_THREADS / LUCE_LANES) {
            float value[ELEMENTS], z[ELEMENTS];
#pragma unroll
            for (int e = 0; e < ELEMENTS; e++) {
                const int i = luce_lane() + e * LUCE_LANES;
                value[e] = out[head * HEAD + i];
                z[e] = inputs.at(r, stride, layout.gate(head) + i);
            }
            gated_norm(value, factor, z, eps);
#pragma unroll
            for (int e = 0; e < ELEMENTS; e++) {
                const float result[1] = {value[e]};
                to.put(head * HEAD + luce_lane() + e * LUCE_LANES, result);
            }
        }
    } while (to.again());
    to.pad(heads * HEAD, padded);
}
