// variants: HEAD=64,128
//
// Gated DeltaNet for short spans, row by row: convolution, gated delta rule and output norm in one kernel. A row's
// arithmetic is the same in any span of up to STEPS rows, so its bits do not depend on the number of rows in a step.
//
// A block has a value head: it reads the state once, keeps it in registers over the span's rows and writes it back.
// Columns of the state (one per value element) never mix, so the rows need no barriers between them: a thread has
// COLUMNS columns, of which PARTS adjacent lanes have 8 key elements each. All loads start before the first wait, as
// latency is most of the time of a single row; the time of many rows is that of their instructions.
#include "deltanet.h"
#include "quantise.h"

#define COLUMNS 4
#define PARTS (HEAD / 8)
#define THREADS (HEAD / COLUMNS * PARTS)
#define WAVES (THREADS / LUCE_LANES)
// Lanes that have the same column for their first one. A thread's column c is the first one of the lanes c groups away
// (in the sense of xor), so no lane has to select the sums that it passes on.
#define GROUP (PARTS / COLUMNS)
static_assert(THREADS % LUCE_LANES == 0, "whole waves");

// Sums of columns over PARTS lanes; each lane gets that of its first column, the lanes of a group the same bits.
LUCE_FN float column_sum(const float (&value)[COLUMNS]) {
    const float first = value[0] + luce_shfl_xor(value[2], 2 * GROUP);
    const float second = value[1] + luce_shfl_xor(value[3], 2 * GROUP);
    return luce_lane_sum<GROUP>(first + luce_shfl_xor(second, GROUP));
}

// s <- fade s + key change; each lane passes the change of its first column.
LUCE_FN void update(float (&s)[COLUMNS][2][4], const float (&key)[2][4], float fade, float change) {
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
        const float own = c ? luce_shfl_xor(change, c * GROUP) : change;
#pragma unroll
        for (int e = 0; e < 8; e++) s[c][e / 4][e % 4] = fmaf(key[e / 4][e % 4], own, s[c][e / 4][e % 4] * fade);
    }
}

// The stored vectors of a speculative row, per value head (RecurrentState.speculative_rows of luce/ops/deltanet.py):
// the inputs of the convolution, the key made of them, and the change along that key that the row adds to the state.
// The fade (speculative_decays) has an array of its own.
enum { KEPT_KEY = VECTORS, KEPT_CHANGE, KEPT };

// The rows that a block computes: the `before` rows of the step that the span continues, and the span's own.
struct Way {
    const i32* behind;
    int before, start;

    // The number of a row of the way, counted from the span's first row.
    __device__ __forceinline__ int at(int row) const { return row < before ? behind[row] - start : row - before; }
    // The place of one of the span's own rows among the speculative rows of its slot.
    __device__ __forceinline__ int kept(int row) const { return row - before + (before ? start - behind[0] : 0); }
};

// An element of vectors and gates that belongs to one thread: no other thread reads or writes its inputs. BATCH: rows
// whose inputs are loaded at once, while the previous rows are computed.
template <int BATCH> struct Element {
    const float* row;  // of the span's first row
    int stride;
    Way way;
    int kind, index;  // among a row's VECTORS + 1 vectors
    // The last weight multiplies the row itself; a gate's is the norm's.
    float weight[TAPS];
    // The inputs before the next row, and the next ones.
    float before[TAPS - 1], next[BATCH];

    __device__ __forceinline__ void fetch(int first, int rows) {
#pragma unroll
        for (int b = 0; b < BATCH; b++)
            if (first + b < rows) next[b] = row[way.at(first + b) * stride];
    }
    // For the next span, `taps` - 1 inputs.
    __device__ __forceinline__ void leave(float* past, int taps) const {
        if (kind == VECTORS) return;
#pragma unroll
        for (int tap = 0; tap < TAPS - 1; tap++) {
            const int own_tap = tap - (TAPS - taps);
            if (own_tap >= 0) past[own_tap * VECTORS * HEAD + index] = before[tap];
        }
    }
};
#define OWN ((VECTORS + 1) * HEAD / THREADS)
static_assert(OWN * THREADS == (VECTORS + 1) * HEAD, "all threads have as many elements");

// The data of the rows that a block computes: queries and keys before they become unit vectors, values, gates times the
// norm's weight; the factors of the recurrence; the outputs of the state, and the factors that make them those of unit
// queries.
enum { FADE, SEEN, CHANGE, OVERLAP, FACTORS };
template <int MOST> struct Rows {
    __align__(16) float vectors[MOST][(VECTORS + 1) * HEAD];
    __align__(16) float factor[MOST][FACTORS];
    float answer[MOST][HEAD], scale[MOST];
};

// Computes an element of `rows` rows, whose first inputs have been fetched. Rows from `first` on store their inputs,
// and the keys made of them, from `kept` on if it is not null.
template <int MOST, int BATCH>
LUCE_FN void convolve(Rows<MOST>& r, int rows, Element<BATCH>& own, float* kept, int first) {
    const bool gate = own.kind == VECTORS;
    for (int from = 0; from < rows; from += BATCH) {
        float input[TAPS - 1 + BATCH];
#pragma unroll
        for (int i = 0; i < TAPS - 1 + BATCH; i++) input[i] = i < TAPS - 1 ? own.before[i] : own.next[i - (TAPS - 1)];
        own.fetch(from + BATCH, rows);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int row = from + b;
            if (row >= rows) break;
            float sum = 0.0f;
#pragma unroll
            for (int tap = 0; tap < TAPS; tap++) sum = fmaf(input[b + tap], own.weight[tap], sum);
            const float value = silu(gate ? input[TAPS - 1 + b] : sum) * (gate ? own.weight[TAPS - 1] : 1.0f);
            r.vectors[row][own.index] = value;
            if (kept && row >= first) {
                float* to = kept + (row - first) * KEPT * HEAD;
                *to = input[TAPS - 1 + b];
                if (own.kind == KEY) to[(KEPT_KEY - KEY) * HEAD] = value;
            }
#pragma unroll
            for (int tap = 0; tap < TAPS - 1; tap++) own.before[tap] = input[b + 1 + tap];
        }
    }
}

// Computes scales, and factors in the places of the raw values. One thread calls keep(row, fade) for each row.
enum { ALPHA, DECAY, BETA, BIAS };
template <int MOST, typename Keep> LUCE_FN void scale(Rows<MOST>& r, int rows, int thread, const Keep& keep) {
    const int lane = thread % LUCE_LANES;
    for (int row = thread / LUCE_LANES; row < rows; row += WAVES) {
        float raw[FACTORS], queries = 0.0f, keys = 0.0f, overlap = 0.0f;
        get4(raw, r.factor[row]);
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
            const int i = e * LUCE_LANES + lane;
            const float query = r.vectors[row][QUERY * HEAD + i], key = r.vectors[row][KEY * HEAD + i];
            queries = fmaf(query, query, queries);
            keys = fmaf(key, key, keys);
            overlap = fmaf(query, key, overlap);
        }
        queries = luce_lane_sum(queries), keys = luce_lane_sum(keys), overlap = luce_lane_sum(overlap);
        const float fade = expf(log_fade(raw[ALPHA], raw[DECAY], raw[BIAS])), unit = unit_scale(KEY, keys);
        const float factor[FACTORS] = {fade, fade * unit, sigmoid(raw[BETA]) * unit, overlap};
        luce_sync_lanes();  // all have read
        if (lane == 0) {
            put4(r.factor[row], factor);
            r.scale[row] = unit_scale(QUERY, queries);
            keep(row, fade);
        }
    }
}

// Takes the state's columns through `rows` rows. `changes`, if not null, gets the changes that rows from `first` on add
// along their keys.
//
// With k and q before they become unit vectors: S' = fade S + k u^T, and the output of S' follows from that of S,
// q^T S' = fade q^T S + (q^T k) u^T. So a row waits for one sum over lanes, not for two.
template <int MOST>
LUCE_FN void advance(Rows<MOST>& r, int rows, float (&s)[COLUMNS][2][4], int thread, float* changes, int first) {
    const int part = thread % PARTS, own = thread / GROUP;
    for (int row = 0; row < rows; row++) {
        float key[2][4], query[2][4], seen[COLUMNS] = {}, asked[COLUMNS] = {}, factor[FACTORS];
        get4(factor, r.factor[row]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            get4(key[half], &r.vectors[row][KEY * HEAD + half * (HEAD / 2) + part * 4]);
            get4(query[half], &r.vectors[row][QUERY * HEAD + half * (HEAD / 2) + part * 4]);
        }
#pragma unroll
        for (int e = 0; e < 8; e++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                seen[c] = fmaf(s[c][e / 4][e % 4], key[e / 4][e % 4], seen[c]);
                asked[c] = fmaf(s[c][e / 4][e % 4], query[e / 4][e % 4], asked[c]);
            }
        const float u = factor[CHANGE] * fmaf(-factor[SEEN], column_sum(seen), r.vectors[row][VALUE * HEAD + own]);
        const float o = fmaf(factor[OVERLAP], u, factor[FADE] * column_sum(asked));
        update(s, key, factor[FADE], u);
        if (thread % GROUP == 0) {
            r.answer[row][own] = o;
            if (changes && row >= first) changes[(row - first) * KEPT * HEAD + own] = u;
        }
    }
}

// Spans of up to MOST rows; grid (value heads, spans), THREADS threads. x float32 [rows, `stride`] as Layout says;
// filter [channels, taps]; norm [HEAD]; past [slots, value heads, taps - 1, VECTORS, HEAD]: each head has the past of
// its own vectors, so that no block reads what another one overwrites; memory [slots, value heads, HEAD values, HEAD
// keys]; out [rows, value heads * HEAD]. If `padded` is not 0, the result goes only to `padded` quantised rows, of
// which n are those of x (quantise.h; HEAD is a multiple of 128).
//
// PENDING: spans may be speculative or accept rows, according to `pending` [spans, 2]; spans of more than MOST rows
// only accept rows here. The rows of speculative spans are in kept [slots, value heads, most, KEPT, HEAD], their fades
// in fades [slots, value heads, most].
//
// With draft trees, one launch accepts rows (ACCEPT), and the next one does the rest (BRANCHES): all spans of a slot
// begin with the same state, which neither they nor the inputs before them change. `branches` [spans, 2, 1 + STEPS] has
// for each span the number of accepted rows and these rows, then the number of rows that it continues and these rows.
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
    // A thread's columns are `own ^ c`.
    const int thread = (int)threadIdx.x, part = thread % PARTS, own = thread / GROUP;
    const i64 slot_head = (i64)span.slot * heads + head;
    x += span.start * stride;
    memory += slot_head * HEAD * HEAD;
    past += slot_head * (taps - 1) * VECTORS * HEAD;
    if (PENDING) kept += slot_head * most * KEPT * HEAD, fades += slot_head * most;

    if (TREE == BRANCHES) luce_await();  // the launch before this one accepts rows
    // Key elements 4 part ... 4 part + 3, and the same HEAD / 2 later; the lanes of a group read together.
    const auto place = [&](int c, int half) { return memory + (own ^ c) * HEAD + half * (HEAD / 2) + part * 4; };
    float s[COLUMNS][2][4] = {};
    const auto write = [&] {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int half = 0; half < 2; half++) put4(place(c, half), s[c][half]);
    };
    if (span.position) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int half = 0; half < 2; half++) get4(s[c][half], place(c, half));
    }
    const float head_decay = decay[head], head_bias = dt_bias[head];
    if (PENDING && accepted) {
        // The sums of `advance`, without its costly part.
#pragma unroll 4
        for (int row = 0; row < accepted; row++) {
            const int kept_row = TREE ? path[row] : row;
            const float* from = kept + kept_row * KEPT * HEAD;
            float key[2][4];
#pragma unroll
            for (int half = 0; half < 2; half++) get4(key[half], from + KEPT_KEY * HEAD + half * (HEAD / 2) + part * 4);
            update(s, key, fades[kept_row], from[KEPT_CHANGE * HEAD + own]);
        }
    }
    constexpr int BATCH = MOST < 2 ? MOST : 2;
    Element<BATCH> elements[OWN];
#pragma unroll
    for (int n = 0; n < OWN; n++) {
        Element<BATCH>& e = elements[n];
        e.index = thread + n * THREADS;
        e.kind = e.index / HEAD;
        const bool gate = e.kind == VECTORS;
        const int channel = (gate ? layout.gate(head) : layout.vector(e.kind, head)) + thread % HEAD;
        e.row = x + channel, e.stride = (int)stride, e.way = way;
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++) {
            const int own_tap = tap - (TAPS - taps);
            e.weight[tap] = 0.0f;
            if (gate && tap == TAPS - 1) e.weight[tap] = norm[thread % HEAD];
            if (!gate && own_tap >= 0) e.weight[tap] = filter[(i64)channel * taps + own_tap];
            if (tap == TAPS - 1) continue;
            e.before[tap] = 0.0f;
            if (gate || own_tap < 0 || !span.position) continue;
            // Rows after the first one that the slot has stored.
            const int row = accepted + tap - (TAPS - 1);
            e.before[tap] = row < 0 ? past[(row + taps - 1) * VECTORS * HEAD + e.index]
                                    : kept[(path ? path[row] : row) * KEPT * HEAD + e.index];
        }
    }
    if (TREE != BRANCHES) luce_await();  // until here: reads of spans, and of data that kernels of earlier steps wrote
    if (PENDING && accepted) {
        if (tentative || !rows) write();
        // Before a row is overwritten, or a fade.
        luce_sync();
    }
#pragma unroll
    for (int n = 0; n < OWN; n++) elements[n].fetch(0, rows);
    if (thread < rows) {
        const float* row = x + way.at(thread) * stride;
        const float raw[FACTORS] = {row[layout.alpha(head)], head_decay, row[layout.beta(head)], head_bias};
        put4(r.factor[thread], raw);
    }
#pragma unroll
    for (int n = 0; n < OWN; n++) {
        Element<BATCH>& e = elements[n];
        // Other blocks may still read the state before the tree, which must not change.
        if (TREE != BRANCHES && tentative) e.leave(past, taps);
        const bool keep = tentative && e.kind < VECTORS;
        convolve(r, rows, e, keep ? kept + way.kept(way.before) * KEPT * HEAD + e.index : nullptr, way.before);
        if (!tentative) e.leave(past, taps);
    }
    luce_sync();
    scale(r, rows, thread, [&](int row, float fade) {
        if (tentative && row >= way.before) fades[way.kept(row)] = fade;
    });
    luce_sync();
    float* changes = tentative ? kept + (way.kept(way.before) * KEPT + KEPT_CHANGE) * HEAD : nullptr;
    advance(r, rows, s, thread, changes, way.before);
    luce_release();
    if (!tentative && rows) write();
    luce_sync();

    const int lane = thread % LUCE_LANES;
    for (int row = way.before + thread / LUCE_LANES; row < rows; row += WAVES) {
        const int step_row = span.start + row - way.before;
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
            const float value = r.answer[row][lane + e * LUCE_LANES] * r.scale[row];
            sum = fmaf(value, value, sum);
        }
        const float inverse = r.scale[row] / sqrtf(luce_lane_sum(sum) / (float)HEAD + eps);
        float* to = out + ((i64)step_row * heads + head) * HEAD;
        if (!bytes.padded) {
#pragma unroll
            for (int e = 0; e < ELEMENTS; e++) {
                const int i = lane + e * LUCE_LANES;
                to[i] = r.answer[row][i] * inverse * r.vectors[row][VECTORS * HEAD + i];
            }
        } else if (HEAD % SECTION == 0) {
            const int i = lane % (HEAD / 4) * 4;
            float result[4];
#pragma unroll
            for (int e = 0; e < 4; e++)
                result[e] = r.answer[row][i + e] * inverse * r.vectors[row][VECTORS * HEAD + i + e];
            quantise_columns(result, lane < HEAD / 4, head * HEAD + i, step_row, bytes);
        }
    }
    for (int row = n; row < bytes.padded && blockIdx.y == 0; row++)
        quantise_nothing(head * HEAD, HEAD, row, bytes, thread, THREADS);
}

// For steps whose spans all have one row: the same arithmetic with fewer registers and less shared memory.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    delta_step(const float* __restrict__ x, const float* __restrict__ filter, const float* __restrict__ decay,
               const float* __restrict__ dt_bias, const float* __restrict__ norm, float* __restrict__ past,
               float* __restrict__ memory, float* __restrict__ kept, float* __restrict__ fades,
               const i32* __restrict__ spans, const i32* __restrict__ pending, float* __restrict__ out, i64 stride,
               int key_heads, int taps, int most, float eps, int n, u8* __restrict__ to_int8, int padded,
               int wide) {
    steps<1, false>(x, filter, decay, dt_bias, norm, past, memory, kept, fades, spans, pending, nullptr, out, stride,
                     key_heads, taps, most, eps, n, {to_int8, padded, wide});
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    delta_steps(const float* __restrict__ x, const float* __restrict__ filter, const float* __restrict__ decay,
                const float* __restrict__ dt_bias, const float* __restrict__ norm, float* __restrict__ past,
                float* __restrict__ memory, float* __restrict__ kept, float* __restrict__ fades,
                const i32* __restrict__ spans, const i32* __restrict__ pending, float* __restrict__ out, i64 stride,
                int key_heads, int taps, int most, float eps, int n, u8* __restrict__ to_int8, int padded,
                int wide) {
    steps<STEPS, false>(x, filter, decay, dt_bias, norm, past, memory, kept, fades, spans, pending, nullptr, out, stride,
                     key_heads, taps, most, eps, n, {to_int8, padded, wide});
}

// Without a limit of registers: 16 speculative rows of one sequence 15.7 us instead of 17.3 (H200), eight sequences of
// two 29.0 instead of 32.7, four of four 21.8 and 20.3.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    delta_verify(const float* __restrict__ x, const float* __restrict__ filter, const float* __restrict__ decay,
                 const float* __restrict__ dt_bias, const float* __restrict__ norm, float* __restrict__ past,
                 float* __restrict__ memory, float* __restrict__ kept, float* __restrict__ fades,
                 const i32* __restrict__ spans, const i32* __restrict__ pending, float* __restrict__ out, i64 stride,
                 int key_heads, int taps, int most, float eps, int n, u8* __restrict__ to_int8, int padded,
                 int wide) {
    steps<STEPS, true>(x, filter, decay, dt_bias, norm, past, memory, kept, fades, spans, pending, nullptr, out, stride,
                     key_heads, taps, most, eps, n, {to_int8, padded, wide});
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    delta_accept(const float* __restrict__ x, const float* __restrict__ filter, const float* __restrict__ decay,
                 const float* __restrict__ dt_bias, const float* __restrict__ norm, float* __restrict__ past,
                 float* __restrict__ memory, float* __restrict__ kept, float* __restrict__ fades,
                 const i32* __restrict__ spans, const i32* __restrict__ pending, const i32* __restrict__ branches,
                 float* __restrict__ out, i64 stride, int key_heads, int taps, int most, float eps, int n,
                 u8* __restrict__ to_int8, int padded, int wide) {
    steps<STEPS, true, ACCEPT>(x, filter, decay, dt_bias, norm, past, memory, kept, fades, spans, pending, branches, out,
                               stride, key_heads, taps, most, eps, n, {to_int8, padded, wide});
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    delta_branches(const float* __restrict__ x, const float* __restrict__ filter, const float* __restrict__ decay,
                   const float* __restrict__ dt_bias, const float* __restrict__ norm, float* __restrict__ past,
                   float* __restrict__ memory, float* __restrict__ kept, float* __restrict__ fades,
                   const i32* __restrict__ spans, const i32* __restrict__ pending, const i32* __restrict__ branches,
                   float* __restrict__ out, i64 stride, int key_heads, int taps, int most, float eps, int n,
                   u8* __restrict__ to_int8, int padded, int wide) {
    steps<STEPS, true, BRANCHES>(x, filter, decay, dt_bias, norm, past, memory, kept, fades, spans, pending, branches, out,
                                 stride, key_heads, taps, most, eps, n, {to_int8, padded, wide});
}
