// variants for cuda: HEAD=64,128
//
// delta_step of deltanet.cu for many spans of one row, to the same bits: there reading and writing the states is most of
// the time. A block stays for many heads, and their states travel by bulk copies: while threads compute on one, the next
// ones arrive and those before are written.
//
// A wave has neighbouring columns of the state, which lie together: it fetches, waits for, computes and stores its own
// piece, and meets the other waves only for the vectors of a head, and for the output norm.
#include "bulk.h"
#include "deltanet_rows.h"

// States in shared memory (_MANY_STATES of luce/ops/deltanet.py): one is computed, one arrives while one is written.
#define STATES 3
// Floats of a wave's columns.
#define PIECE (LUCE_LANES / GROUP * HEAD)

#if LUCE_WGMMA

// A row of one value head: number `index` of `count` spans.
struct Item {
    int head, index;
    Span span;
};

LUCE_FN Item item_at(int head, int index, const i32* __restrict__ spans) {
    return {head, index, span_at(spans, index)};
}
// The rows of a head follow each other, so that its weights stay in the block's cache.
LUCE_FN Item item_behind(const Item& item, int count, const i32* __restrict__ spans) {
    const bool last = item.index + 1 == count;
    return item_at(item.head + last, last ? 0 : item.index + 1, spans);
}

// The grid is the blocks that stay, of THREADS threads; `count` spans, each of one row. The other arguments are those of
// `steps` in deltanet.cu. STATES states of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS)
    delta_many(const float* __restrict__ x, const float* __restrict__ filter, const float* __restrict__ decay,
               const float* __restrict__ dt_bias, const float* __restrict__ norm, float* __restrict__ past,
               float* __restrict__ memory, const i32* __restrict__ spans, float* __restrict__ out, i64 stride, int count,
               int key_heads, int heads, int taps, float eps, int n, u8* __restrict__ to_int8, int padded, int wide) {
    LUCE_DYNAMIC_SHARED(float, states);
    __shared__ Rows<1> rows[2];  // of an item and of the one before
    __shared__ Bulk arrived[WAVES][STATES];
    const Layout layout = {key_heads, heads};
    const Bytes bytes = {to_int8, padded, wide};
    // A thread's columns are `own ^ c`, among those of its wave.
    const int thread = (int)threadIdx.x, part = thread % PARTS, own = thread / GROUP;
    const int wave = thread / LUCE_LANES, lane = thread % LUCE_LANES;
    const i64 all = (i64)count * heads;
    const int first = (int)(all * blockIdx.x / gridDim.x), turns = (int)(all * (blockIdx.x + 1) / gridDim.x) - first;
    const auto slot_head = [&](const Item& item) { return (i64)item.span.slot * heads + item.head; };
    const auto past_of = [&](const Item& item) { return past + slot_head(item) * (taps - 1) * VECTORS * HEAD; };
    // The wave's piece of an item's state, and where it is in shared memory.
    const auto piece_of = [&](const Item& item) { return memory + slot_head(item) * HEAD * HEAD + wave * PIECE; };
    const auto place_at = [&](int turn) { return states + turn % STATES * (HEAD * HEAD) + wave * PIECE; };
    const auto fetch = [&](const Item& item, int turn) {
        luce_bulk_load(place_at(turn), piece_of(item), item.span.position ? PIECE * sizeof(float) : 0,
                       &arrived[wave][turn % STATES]);
    };
    Item items[STATES];  // of this turn and of the next ones
#pragma unroll
    for (int i = 0; i < STATES; i++)
        items[i] = i ? item_behind(items[i - 1], count, spans) : item_at(first / count, first % count, spans);
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < STATES; i++) luce_bulk_begin(&arrived[wave][i]);
        luce_bulk_ready();
#pragma unroll
        for (int i = 0; i < STATES; i++)
            if (i < turns) fetch(items[i], i);
    }

    Element elements[OWN];
    float raw[FACTORS];
    // Fetches what does not come from earlier kernels of the step, and what does.
    const auto begin = [&](const Item& item) {
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            elements[i].begin(x + item.span.start * stride, stride, {nullptr, 0, item.span.start}, filter, norm, layout,
                              item.head, taps, thread + i * THREADS);
            elements[i].remember(taps, item.span.position,
                                 [&](int tap) { return past_of(item) + (tap - (TAPS - taps)) * VECTORS * HEAD; });
        }
        raw[DECAY] = decay[item.head], raw[BIAS] = dt_bias[item.head];
    };
    const auto follow = [&](const Item& item) {
#pragma unroll
        for (int i = 0; i < OWN; i++) elements[i].fetch();
        const float* row = x + item.span.start * stride;
        raw[ALPHA] = row[layout.alpha(item.head)], raw[BETA] = row[layout.beta(item.head)];
    };
    // By the last wave, while the first one makes the next item's factors.
    const auto put = [&](const Rows<1>& r, const Item& item) {
        if (wave != WAVES - 1) return;
        put_answer(r, 0, item.span.start, item.head, heads, eps, out, bytes);
        for (int row = n; row < padded && item.index == 0; row++)
            quantise_nothing(item.head * HEAD, HEAD, row, bytes, lane, LUCE_LANES);
    };
    begin(items[0]);
    luce_await();  // until here: reads of spans, and of data that kernels of earlier steps wrote
    follow(items[0]);
    Item before = items[0];
    for (int turn = 0; turn < turns; turn++) {
        Rows<1>& r = rows[turn % 2];
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            convolve(r, 1, elements[i], nullptr, 0);
            elements[i].leave(past_of(items[0]), taps);
        }
        if (thread == 0) put4(r.factor[0], raw);
        if (turn + 1 < turns) begin(items[1]), follow(items[1]);
        luce_sync();
        scale<false>(r, 1, thread, [](int, float) {});
        if (turn) put(rows[1 - turn % 2], before);
        luce_sync();

        luce_bulk_wait(&arrived[wave][turn % STATES], turn / STATES);
        float* const state = place_at(turn) - wave * PIECE;
        const auto place = [&](int c, int half) { return state + (own ^ c) * HEAD + half * (HEAD / 2) + part * 4; };
        float s[COLUMNS][2][4] = {};
        if (items[0].span.position) {
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
#pragma unroll
                for (int half = 0; half < 2; half++) get4(s[c][half], place(c, half));
        }
        advance(r, 1, s, thread, own, [&](int row, float o, float) { r.answer[row][own] = o; });
        // A thread overwrites what it has read itself.
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int half = 0; half < 2; half++) put4(place(c, half), s[c][half]);
        luce_bulk_share();
        luce_sync_lanes();
        if (lane == 0) {
            luce_bulk_store(piece_of(items[0]), place_at(turn), PIECE * sizeof(float));
            if (turn && turn - 1 + STATES < turns) {
                luce_bulk_wait_read<1>();  // the state before this one has left its place
                fetch(items[STATES - 1], turn - 1 + STATES);
            }
        }
        before = items[0];
#pragma unroll
        for (int i = 0; i < STATES - 1; i++) items[i] = items[i + 1];
        items[STATES - 1] = item_behind(items[STATES - 1], count, spans);
    }
    luce_release();
    luce_sync();
    put(rows[(turns - 1) % 2], before);
    if (lane == 0) luce_bulk_wait_read<0>();
}

#endif
