// variants: HEAD=64,128
// variants for cuda: HEAD=128 SPLIT=2,4
//
// Gated DeltaNet for short spans, row by row: convolution, gated delta rule and output norm in one kernel. A row's
// arithmetic is the same in any span of up to STEPS rows, so its bits do not depend on the number of rows in a step.
//
// A block has a value head: it reads the state once, keeps it in registers over the span's rows and writes it back.
// Columns of the state (one per value element) never mix, so the rows need no barriers between them: a thread has
// COLUMNS columns, of which PARTS adjacent lanes have 8 key elements each. All loads start before the first wait, as
// latency is most of the time of a single row; the time of many rows is that of their instructions. So where blocks
// share a head, half of the threads have the columns: more columns for each element of key and query that they read.
//
// SPLIT blocks, a cluster, share the head of a span whose rows may be speculative, as deltanet_step.cu describes. What
// blocks read in common, the leader writes, behind the cluster's barrier.
#if defined(SPLIT)
#define COLUMNS (8 / SPLIT)
#endif
#include "cluster.h"
#include "deltanet_rows.h"

// The threads that have the state's columns are the first ones.
#define HOLDERS (HEAD / SPLIT / COLUMNS * PARTS)

#if SPLIT == 1 || LUCE_WGMMA

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

#if SPLIT == 1
#define BLOCKS_OF_A_HEAD
#else
#define BLOCKS_OF_A_HEAD LUCE_CLUSTER(SPLIT)
#endif

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
    const int head = (int)blockIdx.x / SPLIT, rank = (int)blockIdx.x % SPLIT, heads = (int)gridDim.x / SPLIT;
    const Layout layout = {key_heads, heads};
    // A holder's columns are `own ^ c`, among those of its block.
    const int thread = (int)threadIdx.x, part = thread % PARTS, own = thread / GROUP;
    const bool holds = HOLDERS == THREADS || luce_ballot(thread < HOLDERS);
#if SPLIT > 1
    __shared__ Bulk arrived;
    if (rank == LEADER && thread == 0) luce_cluster_begin(&arrived, rows * HEAD * sizeof(float));
#endif
    const i64 slot_head = (i64)span.slot * heads + head;
    x += span.start * stride;
    memory += slot_head * HEAD * HEAD + rank * VALUES * HEAD;
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
    if (span.position && holds) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int half = 0; half < 2; half++) get4(s[c][half], place(c, half));
    }
    const float head_decay = decay[head], head_bias = dt_bias[head];
    // Rows after the first one that the slot has stored.
    const auto kept_at = [&](int row) { return path ? path[row] : row; };
    if (PENDING && accepted) {
        // Kept keys, and of the changes behind them the block's own, to the places of keys and values.
        for (int i = 4 * thread; i < accepted * (HEAD + VALUES); i += 4 * THREADS) {
            const int row = i / (HEAD + VALUES), of_row = i % (HEAD + VALUES);
            const int at = of_row < HEAD ? of_row : of_row + rank * VALUES;
            luce_copy16(&r.vectors[row][KEY * HEAD + at], kept + (kept_at(row) * KEPT + KEPT_KEY) * HEAD + at, true);
        }
        luce_copy_close();
        if (thread < accepted) r.factor[thread][FADE] = fades[kept_at(thread)];
    }
    Element elements[OWN];
#pragma unroll
    for (int n = 0; n < OWN; n++) {
        elements[n].index = element_at(thread + n * THREADS, rank);
        if (SPLIT > 1 && elements[n].index < 0) continue;
        elements[n].begin(x, stride, way, filter, norm, layout, head, taps, elements[n].index);
        elements[n].remember(taps, span.position, [&](int tap) {
            const int row = accepted + tap - (TAPS - 1);
            return row < 0 ? past + (row + taps - 1) * VECTORS * HEAD : kept + kept_at(row) * KEPT * HEAD;
        });
    }
    const int column = rank * VALUES + own;
    if (PENDING && accepted) {
        luce_copy_wait<0>();
        luce_sync();
        // The sums of `advance`, without its costly part.
        for (int row = 0; holds && row < accepted; row++) {
            float key[2][4];
#pragma unroll
            for (int half = 0; half < 2; half++) get4(key[half], &r.vectors[row][KEY * HEAD + half * (HEAD / 2) + part * 4]);
            update(s, key, r.factor[row][FADE], r.vectors[row][VALUE * HEAD + column]);
        }
    }
#if SPLIT > 1
    luce_cluster_arrive_behind_reads();
    luce_cluster_wait<SPLIT>();
#endif
    if (TREE != BRANCHES) luce_await();  // until here: reads of spans, and of data that kernels of earlier steps wrote
    if (PENDING && accepted) {
        if (holds && (tentative || !rows)) write();
        // Before a row is overwritten, or a fade, here and in `kept`.
        luce_sync();
    }
#pragma unroll
    for (int n = 0; n < OWN; n++)
        if (SPLIT == 1 || elements[n].index >= 0) fetch(r, rows, elements[n]);
    // In a cluster's blocks the last threads have no elements.
    const int rated = SPLIT == 1 ? thread : thread - (THREADS - STEPS);
    if (0 <= rated && rated < rows) {
        const float* row = x + way.at(rated) * stride;
        const float raw[FACTORS] = {row[layout.alpha(head)], head_decay, row[layout.beta(head)], head_bias};
        if (MOST == 1) {
            put4(r.factor[0], raw);
        } else {
            const Rates rates = rates_of(raw);
            put4(r.factor[rated], {rates.fade, rates.rate, 0.0f, 0.0f});
        }
    }
    if (MOST > 1) luce_copy_wait<0>();
#pragma unroll
    for (int n = 0; n < OWN; n++) {
        Element& e = elements[n];
        if (SPLIT > 1 && (e.index < 0 || e.kind == VECTORS)) continue;
        const bool writes = rank == LEADER || e.kind == VALUE;
        // Other blocks may still read the state before the tree, which must not change.
        if (TREE != BRANCHES && tentative && writes) e.leave(past, taps);
        const bool keep = tentative && writes && e.kind < VECTORS;
        convolve(r, rows, e, keep ? kept + way.kept(way.before) * KEPT * HEAD + e.index : nullptr, way.before);
        if (!tentative && writes) e.leave(past, taps);
    }
    luce_sync();
    scale<(MOST > 1)>(r, rows, thread, [&](int row, float fade) {
        if (tentative && rank == LEADER && row >= way.before) fades[way.kept(row)] = fade;
    });
    luce_sync();
    float* changes = tentative ? kept + (way.kept(way.before) * KEPT + KEPT_CHANGE) * HEAD : nullptr;
    if (holds) {
#if SPLIT > 1
        // Or the loop would make the address again for each row.
        Bulk* const bulk = reinterpret_cast<Bulk*>(luce_held(reinterpret_cast<u8*>(&arrived)));
#endif
        advance(r, rows, s, thread, column, [&](int row, float o, float u) {
#if SPLIT == 1
            r.answer[row][column] = o;
#else
            luce_cluster_send<SPLIT>(&r.answer[row][column], o, bulk);
#endif
            if (changes && row >= way.before) changes[(row - way.before) * KEPT * HEAD + column] = u;
        });
        luce_release();
        if (!tentative && rows) write();
    } else {
        // Nothing before the output needs the gates.
#pragma unroll
        for (int n = 0; n < OWN; n++)
            if (elements[n].index >= 0 && elements[n].kind == VECTORS) convolve(r, rows, elements[n], nullptr, 0);
    }
    if (rank != LEADER) return;
    luce_sync();
#if SPLIT > 1
    luce_cluster_receive<SPLIT>(&arrived);
#endif

    for (int row = way.before + thread / LUCE_LANES; row < rows; row += WAVES)
        put_answer(r, row, span.start + row - way.before, head, heads, eps, out, bytes);
    for (int row = n; row < bytes.padded && blockIdx.y == 0; row++)
        quantise_nothing(head * HEAD, HEAD, row, bytes, thread, THREADS);
}

#if SPLIT == 1
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

#endif

// Without a limit of registers: with one, before all rows' inputs were asked for at once, 16 speculative rows of one sequence took
// 17.3 us instead of 15.7 (H200), eight sequences of two 32.7 instead of 29.0, four of four 20.3 instead of 21.8.
extern "C" __global__ void __launch_bounds__(THREADS, SPLIT == 4 ? 2 : 1) BLOCKS_OF_A_HEAD
    delta_verify(const float* __restrict__ x, const float* __restrict__ filter, const float* __restrict__ decay,
                 const float* __restrict__ dt_bias, const float* __restrict__ norm, float* __restrict__ past,
                 float* __restrict__ memory, float* __restrict__ kept, float* __restrict__ fades,
                 const i32* __restrict__ spans, const i32* __restrict__ pending, float* __restrict__ out, i64 stride,
                 int key_heads, int taps, int most, float eps, int n, u8* __restrict__ to_int8, int padded,
                 int wide) {
    steps<STEPS, true>(x, filter, decay, dt_bias, norm, past, memory, kept, fades, spans, pending, nullptr, out, stride,
                     key_heads, taps, most, eps, n, {to_int8, padded, wide});
}

#if SPLIT == 1
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
#endif

#endif
