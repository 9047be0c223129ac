// variants: HEAD=16,32,64,128
//
// Gated DeltaNet for short spans, row by row: convolution, gated delta rule and output norm in one kernel. A row's
// arithmetic is the same in any span of up to STEPS rows, so its bits do not depend on how many rows are given at a time.
//
// A block has a value head: it reads the state once, keeps it in registers over the span's rows and writes it back.
// Columns of the state (one per value element) never mix, so the rows need no barriers between them: PARTS adjacent
// lanes share a column, and of every 4 * PARTS key elements each has 4 neighbouring ones.
#include "deltanet.h"

#define PARTS 4
#define THREADS (PARTS * HEAD)
#define QUADS (HEAD / (4 * PARTS))
#define WAVES (THREADS / LUCE_LANES)
static_assert(HEAD % (4 * PARTS) == 0 && THREADS % LUCE_LANES == 0, "whole waves, whole quads");

// The inputs of one vector's convolution over a span: rows of the span, before them the rows that the state kept.
struct Window {
    const float* row;   // row 0 of the span
    const float* kept;  // the oldest of the taps - 1 rows before; null if there was none
    i64 stride;
    int taps;

    __device__ __forceinline__ float at(int index, int element) const {
        if (index >= 0) return row[index * stride + element];
        return kept ? kept[(index + taps - 1) * VECTORS * HEAD + element] : 0.0f;
    }
};

// Grid (value heads, spans), THREADS threads. x float32 [rows, `stride`] as Layout says; filter [channels, taps]; norm
// [HEAD]; past [slots, value heads, taps - 1, VECTORS, HEAD]: each head has the past of its own vectors, so that no block
// reads what another one overwrites; memory [slots, value heads, HEAD values, HEAD keys]; out [rows, value heads * HEAD].
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    delta_steps(const float* __restrict__ x, const float* __restrict__ filter, const float* __restrict__ decay,
                const float* __restrict__ dt_bias, const float* __restrict__ norm, float* __restrict__ past,
                float* __restrict__ memory, const i32* __restrict__ spans, float* __restrict__ out, i64 stride,
                int key_heads, int taps, float eps) {
    __shared__ __align__(16) float vectors[STEPS][VECTORS][HEAD];
    __shared__ float gate[STEPS][HEAD], answer[STEPS][HEAD];
    __shared__ float fade[STEPS], rate[STEPS];
    const Span span = span_at(spans, blockIdx.y);
    if (span.rows > STEPS) return;
    const int head = (int)blockIdx.x, heads = (int)gridDim.x;
    const Layout layout = {key_heads, heads};
    const int thread = luce_thread(), lane = luce_lane();
    const int column = thread / PARTS, part = thread % PARTS;
    const i64 slot_head = (i64)span.slot * heads + head;
    x += span.start * stride;
    memory += (slot_head * HEAD + column) * HEAD + part * 4;
    past += slot_head * (taps - 1) * VECTORS * HEAD;

    float s[QUADS][4] = {};
    if (span.position) {
#pragma unroll
        for (int r = 0; r < QUADS; r++) get4(s[r], memory + r * 4 * PARTS);
    }

    // A wave has a row's query, key, value or gate.
    for (int item = luce_wave(); item < (VECTORS + 1) * span.rows; item += WAVES) {
        const int row = item / (VECTORS + 1), kind = item % (VECTORS + 1);
        if (kind == VECTORS) {
            for (int i = lane; i < HEAD; i += LUCE_LANES)
                gate[row][i] = norm[i] * silu(x[row * stride + layout.gate(head) + i]);
            continue;
        }
        const int channel = layout.vector(kind, head);
        const Window window = {x + channel, span.position ? past + kind * HEAD : nullptr, stride, taps};
        float value[ELEMENTS], squares = 0.0f;
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
            const int i = lane + e * LUCE_LANES;
            float sum = 0.0f;
#pragma unroll
            for (int tap = 0; tap < TAPS; tap++)
                if (tap < taps && i < HEAD)
                    sum = fmaf(window.at(row - (taps - 1) + tap, i), filter[(i64)(channel + i) * taps + tap], sum);
            value[e] = silu(sum);
            squares = fmaf(value[e], value[e], squares);
        }
        const float scale = kind == VALUE ? 1.0f : unit_scale(kind, luce_lane_sum(squares));
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
            const int i = lane + e * LUCE_LANES;
            if (i < HEAD) vectors[row][kind][i] = value[e] * scale;
        }
    }
    if (thread < span.rows) {
        const float* row = x + thread * stride;
        fade[thread] = expf(log_fade(row[layout.alpha(head)], decay[head], dt_bias[head]));
        rate[thread] = sigmoid(row[layout.beta(head)]);
    }
    luce_sync();

    // The inputs before the next span's first row; upwards, so that a kept row is read before it is overwritten.
    for (int i = thread; i < VECTORS * HEAD; i += THREADS) {
        const int kind = i / HEAD;
        const Window window = {x + layout.vector(kind, head), span.position ? past + kind * HEAD : nullptr, stride, taps};
        for (int tap = 0; tap < taps - 1; tap++)
            past[tap * VECTORS * HEAD + i] = window.at(span.rows - (taps - 1) + tap, i % HEAD);
    }

    for (int row = 0; row < span.rows; row++) {
        float sum[4] = {};
#pragma unroll
        for (int r = 0; r < QUADS; r++) {
            float key[4];
            get4(key, &vectors[row][KEY][(r * PARTS + part) * 4]);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[r][e] *= fade[row];
                sum[e] = fmaf(s[r][e], key[e], sum[e]);
            }
        }
        const float seen = luce_lane_sum<PARTS>((sum[0] + sum[1]) + (sum[2] + sum[3]));
        const float u = rate[row] * (vectors[row][VALUE][column] - seen);
        float product[4] = {};
#pragma unroll
        for (int r = 0; r < QUADS; r++) {
            float key[4], query[4];
            get4(key, &vectors[row][KEY][(r * PARTS + part) * 4]);
            get4(query, &vectors[row][QUERY][(r * PARTS + part) * 4]);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[r][e] = fmaf(key[e], u, s[r][e]);
                product[e] = fmaf(s[r][e], query[e], product[e]);
            }
        }
        const float o = luce_lane_sum<PARTS>((product[0] + product[1]) + (product[2] + product[3]));
        if (part == 0) answer[row][column] = o;
    }
#pragma unroll
    for (int r = 0; r < QUADS; r++) put4(memory + r * 4 * PARTS, s[r]);
    luce_sync();

    for (int row = luce_wave(); row < span.rows; row += WAVES) {
        float squares = 0.0f;
        for (int i = lane; i < HEAD; i += LUCE_LANES) squares = fmaf(answer[row][i], answer[row][i], squares);
        const float scale = 1.0f / sqrtf(luce_lane_sum(squares) / (float)HEAD + eps);
        float* to = out + ((i64)(span.start + row) * heads + head) * HEAD;
        for (int i = lane; i < HEAD; i += LUCE_LANES) to[i] = answer[row][i] * scale * gate[row][i];
    }
}
