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

// What is kept of a row of a tentative span, as vectors of a value head: the convolution's inputs, the key that it made
// of them, and what the row adds to the state along that key. Its fade is kept apart.
enum { KEPT_KEY = VECTORS, KEPT_CHANGE, KEPT };

// The rows that a block goes through: those that the span is behind, `before` of the step's rows, and its own.
struct Way {
    const i32* behind;
    int before, start;

    // Of a row of the way the number, counted from the span's first row.
    __device__ __forceinline__ int at(int row) const { return row < before ? behind[row] - start : row - before; }
    // Of one of the span's own rows the number among those that its slot keeps.
    __device__ __forceinline__ int kept(int row) const { return row - before + (before ? start - behind[0] : 0); }
};

// A vector's input `index` rows after the first one of the way; before it, what the state kept. Null where there is
// nothing.
struct Window {
    const float* row;   // of the span's first row
    const float* past;  // the oldest of the taps - 1 inputs before all that is pending; null if there were none
    const float* kept;  // of the first row that the slot kept
    const i32* path;    // which of these count, null: the first ones
    i64 stride;
    int taps, accepted;
    Way way;

    __device__ __forceinline__ const float* at(int index) const {
        if (index >= 0) return row + way.at(index) * stride;
        if (index + accepted >= 0)
            return kept + (path ? path[index + accepted] : index + accepted) * KEPT * HEAD;
        return past ? past + (index + accepted + taps - 1) * VECTORS * HEAD : nullptr;
    }
};

// What a block knows of the rows that it works on: queries and keys before they become unit vectors, the scales that make
// them so, values, gates times the norm's weight, the state's answers, and what a row multiplies the state and adds by.
template <int MOST> struct Rows {
    __align__(16) float vectors[MOST][VECTORS][HEAD];
    float squares[MOST][VECTORS][ELEMENTS], scale[MOST][VECTORS];
    float gate[MOST][HEAD], answer[MOST][HEAD], fade[MOST], rate[MOST];
};

// Fills vectors, squares, gates and scales of `rows` rows: a wave has as many elements of the queries, keys, values or
// gates as it has lanes, from the first row to the last. `source(kind)` is a Window of the inputs.
template <int MOST, typename Source>
LUCE_FN void convolve(Rows<MOST>& r, int rows, const Layout& layout, int head, const float* __restrict__ filter,
                      const float* __restrict__ norm, int taps, const Source& source) {
    // Rows whose inputs are loaded at once.
    constexpr int BATCH = MOST < 4 ? MOST : 4;
    const int lane = luce_lane();
    for (int item = luce_wave(); item < (VECTORS + 1) * ELEMENTS; item += WAVES) {
        const int kind = item / ELEMENTS, own_part = item % ELEMENTS, i = own_part * LUCE_LANES + lane;
        const Window window = source(kind);
        float input[TAPS - 1 + BATCH] = {}, weight[TAPS] = {};
        if (kind == VECTORS) {
            weight[0] = norm[i];
        } else {
            // The last tap meets the row itself.
            const int channel = layout.vector(kind, head);
#pragma unroll
            for (int tap = 0; tap < TAPS; tap++)
                if (tap >= TAPS - taps) weight[tap] = filter[(i64)(channel + i) * taps + tap - (TAPS - taps)];
#pragma unroll
            for (int tap = 0; tap < TAPS - 1; tap++)
                if (tap >= TAPS - taps && window.past) input[tap] = window.at(tap - (TAPS - 1))[i];
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
                    r.gate[row][i] = weight[0] * silu(input[TAPS - 1 + b]);
                    continue;
                }
                float sum = 0.0f;
#pragma unroll
                for (int tap = 0; tap < TAPS; tap++) sum = fmaf(input[b + tap], weight[tap], sum);
                const float value = silu(sum);
                r.vectors[row][kind][i] = value;
                const float part_squares = luce_lane_sum(value * value);
                if (lane == 0) r.squares[row][kind][own_part] = part_squares;
            }
#pragma unroll
            for (int tap = 0; tap < TAPS - 1; tap++) input[tap] = input[BATCH + tap];
        }
    }
    luce_sync();
    const int thread = luce_thread();
    if (thread < 2 * rows) {
        const int row = thread / 2, kind = thread % 2;
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) sum += r.squares[row][kind][e];
        r.scale[row][kind] = unit_scale(kind, sum);
    }
    luce_sync();
}

// Takes the state's columns through `rows` rows. `changes`, if there is any, gets what rows from `first` on add along
// their keys.
template <int MOST>
LUCE_FN void advance(Rows<MOST>& r, int rows, float (&s)[COLUMNS][2][4], int part, int own, float* changes, int first) {
    const int lane = luce_lane();
    for (int row = 0; row < rows; row++) {
        float key[2][4], query[2][4], sum[COLUMNS] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            get4(key[half], &r.vectors[row][KEY][half * (HEAD / 2) + part * 4]);
            get4(query[half], &r.vectors[row][QUERY][half * (HEAD / 2) + part * 4]);
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int e = 0; e < 8; e++) {
                s[c][e / 4][e % 4] *= r.fade[row];
                sum[c] = fmaf(s[c][e / 4][e % 4], key[e / 4][e % 4], sum[c]);
            }
        const float seen = column_sum(sum, part) * r.scale[row][KEY];
        const float u = r.rate[row] * (r.vectors[row][VALUE][own] - seen) * r.scale[row][KEY];
        if (changes && row >= first && part < COLUMNS) changes[(row - first) * KEPT * HEAD + own] = u;
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
        const float o = column_sum(product, part) * r.scale[row][QUERY];
        if (part < COLUMNS) r.answer[row][own] = o;
    }
}

// Spans of up to MOST rows; grid (value heads, spans), THREADS threads. x float32 [rows, `stride`] as Layout says; filter
// [channels, taps]; norm [HEAD]; past [slots, value heads, taps - 1, VECTORS, HEAD]: each head has the past of its own
// vectors, so that no block reads what another one overwrites; memory [slots, value heads, HEAD values, HEAD keys]; out
// [rows, value heads * HEAD]. With room for quantised rows, of which n are those of x, the result goes there alone
// (quantise.h; HEAD is a multiple of 128).
//
// PENDING: spans may be tentative or accept rows, as `pending` [spans, 2] says, and those of more than MOST rows only
// do that. Rows of tentative spans are in kept [slots, value heads, most, KEPT, HEAD], their fades in fades [slots, value
// heads, most].
//
// Where there are trees, one launch accepts rows (ACCEPT), and the next one does all the rest (BRANCHES): all spans of a
// slot begin with the same state, which neither they nor the inputs before them change. `branches` [spans, 2, 1 + STEPS]
// has for each span how many rows are accepted and which, and how many rows it is behind and which.
enum { CHAINS, ACCEPT, BRANCHES };

template <int MOST, bool PENDING, int TREE = CHAINS>
LUCE_FN void steps(const float* __restrict__ x, const float* __restrict__ filter, const float* __restrict__ decay,
                   const float* __restrict__ dt_bias, const float* __restrict__ norm, float* __restrict__ past,
                   float* __restrict__ memory, float* __restrict__ kept, float* __restrict__ fades,
                   const i32* __restrict__ spans, const i32* __restrict__ pending, const i32* __restrict__ branches,
                   float* __restrict__ out, i64 stride, int key_heads, int taps, int most, float eps, int n,
                   const Bytes& bytes) {
    __shared__ Rows<MOST> r;
    const Span span = span_at(spans, blockIdx.y);
    const i32* own_branches = TREE ? branches + blockIdx.y * 2 * (1 + STEPS) : nullptr;
    const i32* path = TREE == ACCEPT ? own_branches + 1 : nullptr;
    const Way way = {TREE == BRANCHES ? own_branches + 2 + STEPS : nullptr,
                     TREE == BRANCHES ? own_branches[1 + STEPS] : 0, span.start};
    const int accepted = PENDING && TREE != BRANCHES ? pending[2 * blockIdx.y] : 0;
    const bool tentative = PENDING && TREE != ACCEPT && pending[2 * blockIdx.y + 1];
    if ((span.rows > MOST || TREE == ACCEPT) && !accepted) return luce_await();
    const int rows = MOST == 1 ? 1 : TREE == ACCEPT || (PENDING && span.rows > MOST) ? 0 : way.before + span.rows;
    const int head = (int)blockIdx.x, heads = (int)gridDim.x;
    const Layout layout = {key_heads, heads};
    const int thread = luce_thread(), lane = luce_lane();
    const int part = thread % PARTS, column = thread / PARTS * COLUMNS, own = column + part % COLUMNS;
    const i64 slot_head = (i64)span.slot * heads + head;
    x += span.start * stride;
    memory += (slot_head * HEAD + column) * HEAD + part * 4;
    past += slot_head * (taps - 1) * VECTORS * HEAD;
    if (PENDING) kept += slot_head * most * KEPT * HEAD, fades += slot_head * most;
    const float* before = span.position ? past : nullptr;

    // Key elements 4 part ... 4 part + 3, and the same HEAD / 2 later.
    if (TREE == BRANCHES) luce_await();  // what the launch before this one accepted
    float s[COLUMNS][2][4] = {};
    const auto write = [&] {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int half = 0; half < 2; half++) put4(memory + c * HEAD + half * (HEAD / 2), s[c][half]);
    };
    if (span.position) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int half = 0; half < 2; half++) get4(s[c][half], memory + c * HEAD + half * (HEAD / 2));
    }
    if (PENDING && accepted) {
        // The sums of `advance`, whose hard part is done.
#pragma unroll 4
        for (int row = 0; row < accepted; row++) {
            const int kept_row = TREE ? path[row] : row;
            const float* from = kept + kept_row * KEPT * HEAD;
            const float fade = fades[kept_row];
            float key[2][4], change[COLUMNS];
#pragma unroll
            for (int half = 0; half < 2; half++) get4(key[half], from + KEPT_KEY * HEAD + half * (HEAD / 2) + part * 4);
            get4(change, from + KEPT_CHANGE * HEAD + column);
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
#pragma unroll
                for (int e = 0; e < 8; e++)
                    s[c][e / 4][e % 4] = fmaf(key[e / 4][e % 4], change[c], s[c][e / 4][e % 4] * fade);
        }
    }
    if (TREE != BRANCHES) luce_await();  // until here spans were read, and what kernels of earlier steps wrote
    if (PENDING && accepted) {
        if (tentative || !rows) write();
        // Before a row is overwritten, or a fade.
        luce_sync();
    }
    if (thread < rows) {
        const float* row = x + way.at(thread) * stride;
        r.fade[thread] = expf(log_fade(row[layout.alpha(head)], decay[head], dt_bias[head]));
        r.rate[thread] = sigmoid(row[layout.beta(head)]);
        if (tentative && thread >= way.before) fades[way.kept(thread)] = r.fade[thread];
    }
    const auto inputs = [&](int kind) {
        const int channel = kind == VECTORS ? layout.gate(head) : layout.vector(kind, head);
        return Window{x + channel, before ? before + kind * HEAD : nullptr, kept + kind * HEAD, path, stride, taps,
                      accepted, way};
    };
    convolve(r, rows, layout, head, filter, norm, taps, inputs);
    float* changes = tentative ? kept + (way.kept(way.before) * KEPT + KEPT_CHANGE) * HEAD : nullptr;
    advance(r, rows, s, part, own, changes, way.before);
    luce_release();
    if (!tentative && rows) write();

    // The inputs before the next span's first row; all are read before one is overwritten.
    const int passed = tentative ? 0 : rows;
    for (int i = thread; i < VECTORS * HEAD; i += THREADS) {
        const Window window = inputs(i / HEAD);
        // Other blocks may still read what a tree begins with, and nothing of it changes.
        if (TREE != BRANCHES || !tentative) {
            float input[TAPS - 1] = {};
#pragma unroll
            for (int tap = 0; tap < TAPS - 1; tap++) {
                const float* from = window.at(passed - (taps - 1) + tap);
                if (tap < taps - 1 && from) input[tap] = from[i % HEAD];
            }
#pragma unroll
            for (int tap = 0; tap < TAPS - 1; tap++)
                if (tap < taps - 1) past[tap * VECTORS * HEAD + i] = input[tap];
        }
        if (tentative)
            for (int row = way.before; row < rows; row++) {
                float* to = kept + way.kept(row) * KEPT * HEAD;
                to[i] = window.at(row)[i % HEAD];
                if (i < HEAD) to[KEPT_KEY * HEAD + i] = r.vectors[row][KEY][i];
            }
    }
    luce_sync();

    for (int row = way.before + luce_wave(); row < rows; row += WAVES) {
        const int step_row = span.start + row - way.before;
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
            const float value = r.answer[row][lane + e * LUCE_LANES];
            sum = fmaf(value, value, sum);
        }
        const float inverse = 1.0f / sqrtf(luce_lane_sum(sum) / (float)HEAD + eps);
        float* to = out + ((i64)step_row * heads + head) * HEAD;
        if (!bytes.room) {
#pragma unroll
            for (int e = 0; e < ELEMENTS; e++) {
                const int i = lane + e * LUCE_LANES;
                to[i] = r.answer[row][i] * inverse * r.gate[row][i];
            }
        } else if (HEAD % SECTION == 0) {
            const int i = lane % (HEAD / 4) * 4;
            float result[4];
#pragma unroll
            for (int e = 0; e < 4; e++) result[e] = r.answer[row][i + e] * inverse * r.gate[row][i + e];
            quantise_columns(result, lane < HEAD / 4, head * HEAD + i, step_row, bytes);
        }
    }
    for (int row = n; row < bytes.room && blockIdx.y == 0; row++)
        quantise_nothing(head * HEAD, HEAD, row, bytes, thread, THREADS);
}

// Where all spans have one row: the same arithmetic with fewer registers and less shared memory.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    delta_step(const float* __restrict__ x, const float* __restrict__ filter, const float* __restrict__ decay,
               const float* __restrict__ dt_bias, const float* __restrict__ norm, float* __restrict__ past,
               float* __restrict__ memory, float* __restrict__ kept, float* __restrict__ fades,
               const i32* __restrict__ spans, const i32* __restrict__ pending, float* __restrict__ out, i64 stride,
               int key_heads, int taps, int most, float eps, int n, u8* __restrict__ to_bytes, int room,
               int wide) {
    steps<1, false>(x, filter, decay, dt_bias, norm, past, memory, kept, fades, spans, pending, nullptr, out, stride,
                     key_heads, taps, most, eps, n, {to_bytes, room, wide});
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    delta_steps(const float* __restrict__ x, const float* __restrict__ filter, const float* __restrict__ decay,
                const float* __restrict__ dt_bias, const float* __restrict__ norm, float* __restrict__ past,
                float* __restrict__ memory, float* __restrict__ kept, float* __restrict__ fades,
                const i32* __restrict__ spans, const i32* __restrict__ pending, float* __restrict__ out, i64 stride,
                int key_heads, int taps, int most, float eps, int n, u8* __restrict__ to_bytes, int room,
                int wide) {
    steps<STEPS, false>(x, filter, decay, dt_bias, norm, past, memory, kept, fades, spans, pending, nullptr, out, stride,
                     key_heads, taps, most, eps, n, {to_bytes, room, wide});
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    delta_verify(const float* __restrict__ x, const float* __restrict__ filter, const float* __restrict__ decay,
                 const float* __restrict__ dt_bias, const float* __restrict__ norm, float* __restrict__ past,
                 float* __restrict__ memory, float* __restrict__ kept, float* __restrict__ fades,
                 const i32* __restrict__ spans, const i32* __restrict__ pending, float* __restrict__ out, i64 stride,
                 int key_heads, int taps, int most, float eps, int n, u8* __restrict__ to_bytes, int room,
                 int wide) {
    steps<STEPS, true>(x, filter, decay, dt_bias, norm, past, memory, kept, fades, spans, pending, nullptr, out, stride,
                     key_heads, taps, most, eps, n, {to_bytes, room, wide});
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    delta_accept(const float* __restrict__ x, const float* __restrict__ filter, const float* __restrict__ decay,
                 const float* __restrict__ dt_bias, const float* __restrict__ norm, float* __restrict__ past,
                 float* __restrict__ memory, float* __restrict__ kept, float* __restrict__ fades,
                 const i32* __restrict__ spans, const i32* __restrict__ pending, const i32* __restrict__ branches,
                 float* __restrict__ out, i64 stride, int key_heads, int taps, int most, float eps, int n,
                 u8* __restrict__ to_bytes, int room, int wide) {
    steps<STEPS, true, ACCEPT>(x, filter, decay, dt_bias, norm, past, memory, kept, fades, spans, pending, branches, out,
                               stride, key_heads, taps, most, eps, n, {to_bytes, room, wide});
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    delta_branches(const float* __restrict__ x, const float* __restrict__ filter, const float* __restrict__ decay,
                   const float* __restrict__ dt_bias, const float* __restrict__ norm, float* __restrict__ past,
                   float* __restrict__ memory, float* __restrict__ kept, float* __restrict__ fades,
                   const i32* __restrict__ spans, const i32* __restrict__ pending, const i32* __restrict__ branches,
                   float* __restrict__ out, i64 stride, int key_heads, int taps, int most, float eps, int n,
                   u8* __restrict__ to_bytes, int room, int wide) {
    steps<STEPS, true, BRANCHES>(x, filter, decay, dt_bias, norm, past, memory, kept, fades, spans, pending, branches, out,
                                 stride, key_heads, taps, most, eps, n, {to_bytes, room, wide});
}
