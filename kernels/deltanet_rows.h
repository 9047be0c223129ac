// A row of gated DeltaNet by the block of a value head: for deltanet.cu, for deltanet_step.cu, where SPLIT blocks share a
// head's columns, and for deltanet_many.cu, whose blocks stay for many heads.
//
// A thread has COLUMNS columns of the state, of which PARTS adjacent lanes have 8 key elements each.
#pragma once
#include "deltanet.h"
#include "mma.h"
#include "quantise.h"

#if !defined(SPLIT)
#define SPLIT 1
#endif
#if !defined(COLUMNS)
#define COLUMNS (4 / SPLIT)
#endif
#define PARTS (HEAD / 8)
#define THREADS (HEAD / 4 * PARTS)
#define WAVES (THREADS / LUCE_LANES)
// Lanes that have the same column for their first one. A thread's column c is the first one of the lanes c groups away
// (in the sense of xor), so no lane has to select the sums that it passes on.
#define GROUP (PARTS / COLUMNS)
static_assert(THREADS % LUCE_LANES == 0, "whole waves");

// Sums of columns over PARTS lanes; each lane gets that of its first column, the lanes of a group the same bits.
LUCE_FN float column_sum(const float (&value)[4]) {
    const float first = value[0] + luce_shfl_xor(value[2], 2 * GROUP);
    const float second = value[1] + luce_shfl_xor(value[3], 2 * GROUP);
    return luce_lane_sum<GROUP>(first + luce_shfl_xor(second, GROUP));
}
// The same order of sums for fewer columns of a thread.
LUCE_FN float column_sum(const float (&value)[2]) {
    return luce_lane_sum<GROUP>(value[0] + luce_shfl_xor(value[1], GROUP));
}
LUCE_FN float column_sum(const float (&value)[1]) { return luce_lane_sum<GROUP>(value[0]); }

// What a thread's first column has along a key, and along a query.
LUCE_FN void ask(const float (&s)[COLUMNS][2][4], const float (&key)[2][4], const float (&query)[2][4], float& seen,
                 float& asked) {
    float along_key[COLUMNS] = {}, along_query[COLUMNS] = {};
#pragma unroll
    for (int e = 0; e < 8; e++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            along_key[c] = fmaf(s[c][e / 4][e % 4], key[e / 4][e % 4], along_key[c]);
            along_query[c] = fmaf(s[c][e / 4][e % 4], query[e / 4][e % 4], along_query[c]);
        }
    seen = column_sum(along_key), asked = column_sum(along_query);
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

// An element of vectors and gates that belongs to one thread: no other thread reads or writes its inputs.
struct Element {
    const float* row;  // of the span's first row
    int stride;
    Way way;
    int kind, index;  // among a row's VECTORS + 1 vectors
    // The last weight multiplies the row itself; a gate's is the norm's.
    float weight[TAPS];
    // The inputs before the next row, and a sole row's own.
    float before[TAPS - 1], sole;

    // Of the span whose first row is at `x`.
    __device__ __forceinline__ void begin(const float* x, i64 stride, const Way& way, const float* __restrict__ filter,
                                          const float* __restrict__ norm, const Layout& layout, int head, int taps,
                                          int index) {
        this->index = index;
        kind = index / HEAD;
        const bool gate = kind == VECTORS;
        const int channel = (gate ? layout.gate(head) : layout.vector(kind, head)) + index % HEAD;
        row = x + channel, this->stride = (int)stride, this->way = way;
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++) {
            const int own_tap = tap - (TAPS - taps);
            weight[tap] = 0.0f;
            if (gate && tap == TAPS - 1) weight[tap] = norm[index % HEAD];
            if (!gate && own_tap >= 0) weight[tap] = filter[(i64)channel * taps + own_tap];
        }
    }
    // Fetches the inputs before the span's first row, of which inputs(tap) are those of the tap; zeros if there are none.
    template <typename Inputs> __device__ __forceinline__ void remember(int taps, bool any, const Inputs& inputs) {
#pragma unroll
        for (int tap = 0; tap < TAPS - 1; tap++)
            before[tap] = kind < VECTORS && tap >= TAPS - taps && any ? inputs(tap)[index] : 0.0f;
    }
    __device__ __forceinline__ const float* input(int number) const { return row + way.at(number) * stride; }
    __device__ __forceinline__ void fetch() { sole = *input(0); }
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

// Columns of a block, and which one of a head's blocks has the gates and makes the output.
#define VALUES (HEAD / SPLIT)
#define LEADER (SPLIT - 1)

// Element i of those of a block, among VECTORS + 1 vectors: all of query and key, its own values, in the leader the gates.
// -1 behind the last one.
LUCE_FN int element_at(int i, int rank) {
    if (SPLIT == 1 || i < VALUE * HEAD) return i;
    i -= VALUE * HEAD;
    if (i < VALUES) return VALUE * HEAD + rank * VALUES + i;
    i -= VALUES;
    return rank == LEADER && i < HEAD ? VECTORS * HEAD + i : -1;
}

// The data of the rows that a block computes: queries and keys before they become unit vectors, values, gates times the
// norm's weight; the factors of the recurrence; the outputs of the state, and the factors that make them those of unit
// queries.
enum { FADE, SEEN, CHANGE, OVERLAP, FACTORS };
template <int MOST> struct Rows {
    __align__(16) float vectors[MOST][(VECTORS + 1) * HEAD];
    __align__(16) float factor[MOST][FACTORS];
    float answer[MOST][HEAD], scale[MOST];
};

// Asks for an element's inputs of `rows` rows: each lies where its result will, but a sole row's is the element's own.
template <int MOST> LUCE_FN void fetch(Rows<MOST>& r, int rows, Element& own) {
    if (MOST == 1) return own.fetch();
#pragma unroll 4
    for (int row = 0; row < rows; row++) luce_copy4(&r.vectors[row][own.index], own.input(row));
    luce_copy_close();
}

// Computes an element of `rows` rows, whose inputs have arrived. Rows from `first` on store their inputs, and the keys
// made of them, from `kept` on if it is not null.
template <int MOST> LUCE_FN void convolve(Rows<MOST>& r, int rows, Element& own, float* kept, int first) {
    const bool gate = own.kind == VECTORS;
    for (int row = 0; row < rows; row++) {
        const float input = MOST == 1 ? own.sole : r.vectors[row][own.index];
        float sum = 0.0f;
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++)
            sum = fmaf(tap < TAPS - 1 ? own.before[tap] : input, own.weight[tap], sum);
        const float value = silu(gate ? input : sum) * (gate ? own.weight[TAPS - 1] : 1.0f);
        r.vectors[row][own.index] = value;
        if (kept && row >= first) {
            float* to = kept + (row - first) * KEPT * HEAD;
            *to = input;
            if (own.kind == KEY) to[(KEPT_KEY - KEY) * HEAD] = value;
        }
#pragma unroll
        for (int tap = 0; tap < TAPS - 1; tap++) own.before[tap] = tap < TAPS - 2 ? own.before[tap + 1] : input;
    }
}

// Of a row's query and key, by a wave: the sums of squares, and of products of both.
struct Sums {
    float queries, keys, overlap;
};
template <int MOST> LUCE_FN Sums vector_sums(const Rows<MOST>& r, int row, int lane) {
    float queries = 0.0f, keys = 0.0f, overlap = 0.0f;
#pragma unroll
    for (int e = 0; e < ELEMENTS; e++) {
        const int i = e * LUCE_LANES + lane;
        const float query = r.vectors[row][QUERY * HEAD + i], key = r.vectors[row][KEY * HEAD + i];
        queries = fmaf(query, query, queries);
        keys = fmaf(key, key, keys);
        overlap = fmaf(query, key, overlap);
    }
    return {luce_lane_sum(queries), luce_lane_sum(keys), luce_lane_sum(overlap)};
}

// Of a row's raw values: what it multiplies the state by, and the rate of what it adds.
struct Rates {
    float fade, rate;
};
enum { ALPHA, DECAY, BETA, BIAS };
LUCE_FN Rates rates_of(const float (&raw)[FACTORS]) {
    return {expf(log_fade(raw[ALPHA], raw[DECAY], raw[BIAS])), sigmoid(raw[BETA])};
}

// Computes scales, and factors in the places of the raw values, or of rates where RATED. One thread calls
// keep(row, fade) for each row.
template <bool RATED, int MOST, typename Keep>
LUCE_FN void scale(Rows<MOST>& r, int rows, int thread, const Keep& keep) {
    const int lane = thread % LUCE_LANES;
    for (int row = thread / LUCE_LANES; row < rows; row += WAVES) {
        float raw[FACTORS];
        get4(raw, r.factor[row]);
        const Sums sums = vector_sums(r, row, lane);
        const Rates rates = RATED ? Rates{raw[0], raw[1]} : rates_of(raw);
        const float unit = unit_scale(KEY, sums.keys);
        const float factor[FACTORS] = {rates.fade, rates.fade * unit, rates.rate * unit, sums.overlap};
        luce_sync_lanes();  // all have read
        if (lane == 0) {
            put4(r.factor[row], factor);
            r.scale[row] = unit_scale(QUERY, sums.queries);
            keep(row, rates.fade);
        }
    }
}

// Takes the state's columns through `rows` rows; `column` is the thread's first one. One lane for each column calls
// put(row, output of the state, what the row adds along its key).
//
// With k and q before they become unit vectors: S' = fade S + k u^T, and the output of S' follows from that of S,
// q^T S' = fade q^T S + (q^T k) u^T. So a row waits for one sum over lanes, not for two.
template <int MOST, typename Put>
LUCE_FN void advance(const Rows<MOST>& r, int rows, float (&s)[COLUMNS][2][4], int thread, int column, const Put& put) {
    const int part = thread % PARTS;
    for (int row = 0; row < rows; row++) {
        float key[2][4], query[2][4], seen, asked, factor[FACTORS];
        get4(factor, r.factor[row]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            get4(key[half], &r.vectors[row][KEY * HEAD + half * (HEAD / 2) + part * 4]);
            get4(query[half], &r.vectors[row][QUERY * HEAD + half * (HEAD / 2) + part * 4]);
        }
        ask(s, key, query, seen, asked);
        const float u = factor[CHANGE] * fmaf(-factor[SEEN], seen, r.vectors[row][VALUE * HEAD + column]);
        const float o = fmaf(factor[OVERLAP], u, factor[FADE] * asked);
        update(s, key, factor[FADE], u);
        if (thread % GROUP == 0) put(row, o, u);
    }
}

// A row's output norm and gate by a wave, to row `step_row` of out or of bytes, as `steps` of deltanet.cu describes them.
template <int MOST>
LUCE_FN void put_answer(const Rows<MOST>& r, int row, int step_row, int head, int heads, float eps, float* out,
                        const Bytes& bytes) {
    const int lane = (int)threadIdx.x % LUCE_LANES;
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
