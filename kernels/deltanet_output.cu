// variants: HEAD=64,128
//
// The output norm of gated DeltaNet for long spans, behind deltanet_chunk.cu: rms(out) * norm * silu(gate) per head.
#include "deltanet.h"
#include "fp16_rows.h"
#include "products.h"

// Rows whose inputs are loaded at once, to hide the latency.
#define BATCH 4

// The wave's head of one row, from its values: rms(value) * norm * silu(z).
template <bool FP16 = false>
LUCE_FN void gated_norm(float (&value)[ELEMENTS], const float (&norm)[ELEMENTS], const float (&z)[ELEMENTS], float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++) squares = fmaf(value[e], value[e], squares);
    const float scale = 1.0f / sqrtf(luce_lane_sum(squares) / (float)HEAD + eps);
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++) value[e] = value[e] * scale * norm[e] * (FP16 ? silu_of_halves(z[e]) : silu(z[e]));
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
// Of a wave, whose inputs are loaded at once.
#define HEADS_AT_ONCE 3

// One row. A lane has neighbours of a head where they are halves, by wide loads; rows of floats may begin anywhere.
template <bool FP16>
LUCE_FN void write_row(Fp16Row& to, const Products<FP16>& inputs, const float* __restrict__ out,
                       const float* __restrict__ norm, i64 stride, const Layout& layout, float eps) {
    const i64 r = blockIdx.x;
    const int first = luce_lane() * (FP16 ? ELEMENTS : 1), step = FP16 ? 1 : LUCE_LANES;
    float factor[ELEMENTS], scale = 0.0f;
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++) factor[e] = norm[first + e * step];
    if (FP16) scale = inputs.rows[r];
    constexpr int WAVES = FP16_THREADS / LUCE_LANES;
    do {
        for (int own = luce_wave(); own < layout.heads; own += HEADS_AT_ONCE * WAVES) {
            float value[HEADS_AT_ONCE][ELEMENTS] = {}, z[HEADS_AT_ONCE][ELEMENTS] = {};
#pragma unroll
            for (int n = 0; n < HEADS_AT_ONCE; n++) {
                const int head = own + n * WAVES, column = head * HEAD + first;
                if (head >= layout.heads) break;
                if constexpr (FP16) {
                    const auto own_value = *reinterpret_cast<const Neighbours<float>*>(out + column);
                    const auto gates =
                        *reinterpret_cast<const Neighbours<f16_t>*>(inputs.half(r, stride, layout.gate(head) + first));
#pragma unroll
                    for (int e = 0; e < ELEMENTS; e++)
                        value[n][e] = own_value.at[e], z[n][e] = luce_f32(gates.at[e]) * scale;
                } else {
#pragma unroll
                    for (int e = 0; e < ELEMENTS; e++) {
                        value[n][e] = out[column + e * LUCE_LANES];
                        z[n][e] = inputs.at(r, stride, layout.gate(head) + first + e * LUCE_LANES);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < HEADS_AT_ONCE; n++) {
                const int head = own + n * WAVES, column = head * HEAD + first;
                if (head >= layout.heads) break;
                gated_norm<FP16>(value[n], factor, z[n], eps);
                if constexpr (FP16 && ELEMENTS == 4) {
                    to.put(column, value[n]);
                } else {
#pragma unroll
                    for (int e = 0; e < ELEMENTS; e++) {
                        const float result[1] = {value[n][e]};
                        to.put(column + e * step, result);
                    }
                }
            }
        }
    } while (to.again());
}

// The same for the n rows of one span, as fp16 with a scale for each row (fp16_rows.h); half has rows of `padded`
// columns. Grid: n blocks of FP16_THREADS threads, whose waves have a head at a time.
extern "C" __global__ void __launch_bounds__(FP16_THREADS)
    delta_output_fp16(const float* __restrict__ out, const float* __restrict__ x, const float* __restrict__ rows,
                      const float* __restrict__ sum_features, const float* __restrict__ norm, f16_t* __restrict__ half,
                      float* __restrict__ scales, int padded, i64 stride, int key_heads, int heads, float eps, int top) {
    luce_await();
    const Layout layout = {key_heads, heads};
    const i64 r = blockIdx.x;
    out += r * heads * HEAD;
    Fp16Row to(half + r * padded, scales + r, top);
    if (are_halves(rows, sum_features))
        write_row(to, Products<true>{x, rows}, out, norm, stride, layout, eps);
    else
        write_row(to, Products<false>{x, rows, sum_features}, out, norm, stride, layout, eps);
    to.pad(heads * HEAD, padded);
}
