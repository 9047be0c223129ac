// variants: HEAD=64,128
//
// Gated DeltaNet for short spans, row by row: convolution, gated delta rule and output norm in one kernel. A row's
// arithmetic is the same in any span of up to STEPS rows, so its bits do not depend on how many rows are given at a time.
//
// A block has a value head: it reads the state once, keeps it in registers over the span's rows and writes it back.
// Columns of the state (one per value element) never mix, so the rows need no barriers between them: a thread has
// COLUMNS columns, of which PARTS adjacent lanes have 8 key elements each. Loads are made before anything waits for one,
// as latency is most of the time that a single row takes.
#include "deltanet.h"
#include "quantise.h"

#define COLUMNS 4
#define PARTS (HEAD / 8)
#define THREADS (HEAD / COLUMNS * PARTS)
#define WAVES (THREADS / LUCE_LANES)
static_assert(THREADS % LUCE_LANES == 0, "whole waves");

// Sums of COLUMNS values each over PARTS lanes; lane `part` gets that of column part % COLUMNS. Every level adds the same
// two values in both lanes.
LUCE_FN float column_sum(const float (&value)[COLUMNS], int part) {
    const bool odd = part & 1, upper = part & 2;
    const float first = (odd ? value[1] : value[0]) + luce_shfl_xor(odd ? value[0] : value[1], 1);
    const float second = (odd ? value[3] : value[2]) + luce_shfl_xor(odd ? value[2] : value[3], 1);
    float sum = (upper ? second : first) + luce_shfl_xor(upper ? first : second, 2);
#pragma unroll
    for (int mask = 4; mask < PARTS; mask *= 2) sum += luce_shfl_xor(sum, mask);
    return sum;
}

// A vector's input `index` rows after a span's first one; before it, what the state kept. Null where there is nothing.
struct Window {
    const float* row;   // of the span's first row
    const float* kept;  // the oldest of the taps - 1 inputs before; null if there were none
    i64 stride;
    int taps;

    __device__ __forceinline__ const float* at(int index) const {
        const float* before = kept ? kept + (index + taps - 1) * VECTORS * HEAD : nullptr;
        return index >= 0 ? row + index * stride : before;
    }
};

// Spans of up to MOST rows; grid (value heads, spans), THREADS threads. x float32 [rows, `stride`] as Layout says; filter
// [channels, taps]; norm [HEAD]; past [slots, value heads, taps - 1, VECTORS, HEAD]: each head has the past of its own
// vectors, so that no block reads what another one overwrites; memory [slots, value heads, HEAD values, HEAD keys]; out
// [rows, value heads * HEAD]. With room for `room` quantised rows, of which n are those of x, the result goes there alone
// (quantise.h).
template <int MOST>
LUCE_FN void steps(const float* __restrict__ x, const float* __restrict__ filter, const float* __restrict__ decay,
                   const float* __restrict__ dt_bias, const float* __restrict__ norm, float* __restrict__ past,
                   float* __restrict__ memory, const i32* __restrict__ spans, float* __restrict__ out, i64 stride,
                   int key_heads, int taps, float eps, int n, i8* __restrict__ values, float* __restrict__ scales,
                   int room) {
    // Rows whose inputs are loaded at once.
    constexpr int BATCH = MOST < 4 ? MOST : 4;
    // Queries and keys before they become unit vectors, and the scales that make them so.
    __shared__ __align__(16) float vectors[MOST][VECTORS][HEAD];
    __shared__ float squares[MOST][VECTORS][ELEMENTS], scale[MOST][VECTORS];
    __shared__ float gate[MOST][HEAD], answer[MOST][HEAD], fade[MOST], rate[MOST];
    const Span span = span_at(spans, blockIdx.y);
    if (span.rows > MOST) return luce_await();
    const int rows = MOST == 1 ? 1 : span.rows;
    const int head = (int)blockIdx.x, heads = (int)gridDim.x;
    const Layout layout = {key_heads, heads};
    const int thread = luce_thread(), lane = luce_lane();
    const int part = thread % PARTS, column = thread / PARTS * COLUMNS, own = column + part % COLUMNS;
    const i64 slot_head = (i64)span.slot * heads + head;
    x += span.start * stride;
    memory += (slot_head * HEAD + column) * HEAD + part * 4;
    past += slot_head * (taps - 1) * VECTORS * HEAD;
    const float* before = span.position ? past : nullptr;

    // Key elements 4 part ... 4 part + 3, and the same HEAD / 2 later.
    float s[COLUMNS][2][4] = {};
    if (span.position) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int half = 0; half < 2; half++) get4(s[c][half], memory + c * HEAD + half * (HEAD / 2));
    }
    luce_await();  // until here the spans were read, and the state, which kernels of earlier steps wrote
    if (thread < rows) {
        const float* row = x + thread * stride;
        fade[thread] = expf(log_fade(row[layout.alpha(head)], decay[head], dt_bias[head]));
        rate[thread] = sigmoid(row[layout.beta(head)]);
    }
    // A wave has as many elements of the queries, keys, values or gates as it has lanes, from the first row to the last.
    for (int item = luce_wave(); item < (VECTORS + 1) * ELEMENTS; item += WAVES) {
        const int kind = item / ELEMENTS, own_part = item % ELEMENTS, i = own_part * LUCE_LANES + lane;
        const int channel = kind == VECTORS ? layout.gate(head) : layout.vector(kind, head);
        const Window window = {x + channel, before ? before + kind * HEAD : nullptr, stride, taps};
        float input[TAPS - 1 + BATCH] = {}, weight[TAPS] = {};
        if (kind == VECTORS) {
            weight[0] = norm[i];
        } else {
            // The last tap meets the row itself.
#pragma unroll
            for (int tap = 0; tap < TAPS; tap++)
                if (tap >= TAPS - taps) weight[tap] = filter[(i64)(channel + i) * taps + tap - (TAPS - taps)];
#pragma unroll
            for (int tap = 0; tap < TAPS - 1; tap++)
                if (tap >= TAPS - taps && before) input[tap] = window.at(tap - (TAPS - 1))[i];
        }
        for (int first = 0; first < rows; first += BATCH) {
#pragma unroll
            for (int b = 0; b < BATCH; b++)
                if (first + b < rows) input[TAPS - 1 + b] = window.at(first + b)[i];
#pragma unroll
            for (int b = 0; b < BATCH; b++) {
                const int row = first + b;
                if (row >= rows) break;
                if (kind == VECTORS) {
                    gate[row][i] = weight[0] * silu(input[TAPS - 1 + b]);
                    continue;
                }
                float sum = 0.0f;
#pragma unroll
                for (int tap = 0; tap < TAPS; tap++) sum = fmaf(input[b + tap], weight[tap], sum);
                const float value = silu(sum);
                vectors[row][kind][i] = value;
                const float part_squares = luce_lane_sum(value * value);
                if (lane == 0) squares[row][kind][own_part] = part_squares;
            }
#pragma unroll
            for (int tap = 0; tap < TAPS - 1; tap++) input[tap] = input[BATCH + tap];
        }
    }
    luce_sync();
    if (thread < 2 * rows) {
        const int row = thread / 2, kind = thread % 2;
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) sum += squares[row][kind][e];
        scale[row][kind] = unit_scale(kind, sum);
    }
    luce_sync();

    for (int row = 0; row < rows; row++) {
        float key[2][4], query[2][4], sum[COLUMNS] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            get4(key[half], &vectors[row][KEY][half * (HEAD / 2) + part * 4]);
            get4(query[half], &vectors[row][QUERY][half * (HEAD / 2) + part * 4]);
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int e = 0; e < 8; e++) {
                s[c][e / 4][e % 4] *= fade[row];
                sum[c] = fmaf(s[c][e / 4][e % 4], key[e / 4][e % 4], sum[c]);
            }
        const float seen = column_sum(sum, part) * scale[row][KEY];
        const float u = rate[row] * (vectors[row][VALUE][own] - seen) * scale[row][KEY];
        float product[COLUMNS] = {};
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const float column_u = luce_shfl(u, lane / COLUMNS * COLUMNS + c);
#pragma unroll
            for (int e = 0; e < 8; e++) {
                s[c][e / 4][e % 4] = fmaf(key[e / 4][e % 4], column_u, s[c][e / 4][e % 4]);
                product[c] = fmaf(s[c][e / 4][e % 4], query[e / 4][e % 4], product[c]);
            }
        }
        const float o = column_sum(product, part) * scale[row][QUERY];
        if (part < COLUMNS) answer[row][own] = o;
    }
    luce_release();
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
        for (int half = 0; half < 2; half++) put4(memory + c * HEAD + half * (HEAD / 2), s[c][half]);

    // The inputs before the next span's first row; all are read before one is overwritten.
    for (int i = thread; i < VECTORS * HEAD; i += THREADS) {
        const int kind = i / HEAD;
        const Window window = {x + layout.vector(kind, head), before ? before + kind * HEAD : nullptr, stride, taps};
        float input[TAPS - 1] = {};
#pragma unroll
        for (int tap = 0; tap < TAPS - 1; tap++) {
            const float* from = window.at(rows - (taps - 1) + tap);
            if (tap < taps - 1 && from) input[tap] = from[i % HEAD];
        }
#pragma unroll
        for (int tap = 0; tap < TAPS - 1; tap++)
            if (tap < taps - 1) past[tap * VECTORS * HEAD + i] = input[tap];
    }
    luce_sync();

    for (int row = luce_wave(); row < rows; row += WAVES) {
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
            const float value = answer[row][lane + e * LUCE_LANES];
            sum = fmaf(value, value, sum);
        }
        const float inverse = 1.0f / sqrtf(luce_lane_sum(sum) / (float)HEAD + eps);
        float* to = out + ((i64)(span.start + row) * heads + head) * HEAD;
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
            const int i = lane + e * LUCE_LANES;
            const float result[1] = {answer[row][i] * inverse * gate[row][i]};
            if (room)
                quantise_columns(result, true, head * HEAD + i, span.start + row, room, values, scales);
            else
                to[i] = result[0];
        }
    }
    for (int row = n; row < room && blockIdx.y == 0; row++)
        quantise_nothing(head * HEAD, HEAD, row, room, values, scales, thread, THREADS);
}

// Where all spans have one row: the same arithmetic with fewer registers and less shared memory.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    delta_step(const float* __restrict__ x, const float* __restrict__ filter, const float* __restrict__ decay,
               const float* __restrict__ dt_bias, const float* __restrict__ norm, float* __restrict__ past,
               float* __restrict__ memory, const i32* __restrict__ spans, float* __restrict__ out, i64 stride,
               int key_heads, int taps, float eps, int n, u8* __restrict__ values,
               float* __restrict__ scales, int room) {
    steps<1>(x, filter, decay, dt_bias, norm, past, memory, spans, out, stride, key_heads, taps, eps, n,
             reinterpret_cast<i8*>(values), scales, room);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    delta_steps(const float* __restrict__ x, const float* __restrict__ filter, const float* __restrict__ decay,
                const float* __restrict__ dt_bias, const float* __restrict__ norm, float* __restrict__ past,
                float* __restrict__ memory, const i32* __restrict__ spans, float* __restrict__ out, i64 stride,
                int key_heads, int taps, float eps, int n, u8* __restrict__ values,
                float* __restrict__ scales, int room) {
    steps<STEPS>(x, filter, decay, dt_bias, norm, past, memory, spans, out, stride, key_heads, taps, eps, n,
             reinterpret_cast<i8*>(values), scales, room);
}
