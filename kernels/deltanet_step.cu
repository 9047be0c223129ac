// variants for cuda: HEAD=128 SPLIT=2,4
//
// delta_step of deltanet.cu where there are fewer heads than multiprocessors, to the same bits: SPLIT blocks, a cluster,
// share a value head. Columns of the state never mix, so each block has a part of them, and computes query and key anew.
// The last one, the leader, has the output gates, collects the answers and makes the output.
//
// Beside the waves that have elements and columns, two compute what a row has one of: the first fade and rate, the
// second the sums for unit vectors, while the others ask the state, and the output while they write it.
#include "cluster.h"
#include "deltanet_rows.h"

#if LUCE_WGMMA

// The row's numbers in Rows::factor; SCALE is that of unit keys.
enum { ROW_FADE, ROW_RATE, ROW_SCALE, ROW_OVERLAP };

// The grid is SPLIT * value heads, spans; THREADS + 2 LUCE_LANES threads. The other arguments are those of `steps` in
// deltanet.cu.
extern "C" __global__ void __launch_bounds__(THREADS + 2 * LUCE_LANES, 2) LUCE_CLUSTER(SPLIT)
    delta_step(const float* __restrict__ x, const float* __restrict__ filter, const float* __restrict__ decay,
               const float* __restrict__ dt_bias, const float* __restrict__ norm, float* __restrict__ past,
               float* __restrict__ memory, const i32* __restrict__ spans, float* __restrict__ out, i64 stride,
               int key_heads, int heads, int taps, float eps, int n, u8* __restrict__ to_int8, int padded, int wide) {
    __shared__ Rows<1> r;
    const int thread = (int)threadIdx.x, wave = thread / LUCE_LANES, lane = thread % LUCE_LANES;
    const int head = (int)blockIdx.x / SPLIT, rank = (int)blockIdx.x % SPLIT;
    __shared__ Bulk arrived;
    if (rank == LEADER && thread == THREADS) luce_cluster_begin(&arrived, HEAD * sizeof(float));
    luce_cluster_arrive();
    // A thread's columns are `own ^ c`, among those of its block.
    const int part = thread % PARTS, own = thread / GROUP;
    const Span span = span_at(spans, blockIdx.y);
    const Layout layout = {key_heads, heads};
    const Bytes bytes = {to_int8, padded, wide};
    const i64 slot_head = (i64)span.slot * heads + head;
    x += span.start * stride;
    memory += slot_head * HEAD * HEAD + rank * VALUES * HEAD;
    past += slot_head * (taps - 1) * VECTORS * HEAD;

    // Key elements 4 part ... 4 part + 3, and the same HEAD / 2 later; the lanes of a group read together.
    const auto place = [&](int c, int half) { return memory + (own ^ c) * HEAD + half * (HEAD / 2) + part * 4; };
    float s[COLUMNS][2][4] = {};
    Element elements[OWN];
    float head_decay = 0.0f, head_bias = 0.0f;
    if (wave == WAVES) {
        head_decay = decay[head], head_bias = dt_bias[head];
    } else if (wave < WAVES) {
        if (span.position) {
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
#pragma unroll
                for (int half = 0; half < 2; half++) get4(s[c][half], place(c, half));
        }
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            elements[i].index = element_at(thread + i * THREADS, rank);
            if (elements[i].index < 0) continue;
            elements[i].begin(x, stride, {nullptr, 0, span.start}, filter, norm, layout, head, taps, elements[i].index);
            elements[i].remember(taps, span.position,
                                 [&](int tap) { return past + (tap - (TAPS - taps)) * VECTORS * HEAD; });
        }
    }
    luce_cluster_wait<SPLIT>();
    luce_await();  // until here: reads of spans, and of data that kernels of earlier steps wrote
    luce_release();
    float alpha = 0.0f, beta = 0.0f;
    if (wave == WAVES) {
        alpha = x[layout.alpha(head)], beta = x[layout.beta(head)];
    } else if (wave < WAVES) {
#pragma unroll
        for (int i = 0; i < OWN; i++)
            if (elements[i].index >= 0) elements[i].fetch();
#pragma unroll
        for (int i = 0; i < OWN; i++)
            if (elements[i].index >= 0) convolve(r, 1, elements[i], nullptr, 0);
    }
    luce_sync();
    const int column = rank * VALUES + own;
    float value = 0.0f, seen = 0.0f, asked = 0.0f;
    if (wave == WAVES) {
        const float fade = expf(log_fade(alpha, head_decay, head_bias)), rate = sigmoid(beta);
        if (lane == 0) r.factor[0][ROW_FADE] = fade, r.factor[0][ROW_RATE] = rate;
    } else if (wave > WAVES) {
        const Sums sums = vector_sums(r, 0, lane);
        if (lane == 0) {
            r.factor[0][ROW_SCALE] = unit_scale(KEY, sums.keys), r.factor[0][ROW_OVERLAP] = sums.overlap;
            r.scale[0] = unit_scale(QUERY, sums.queries);
        }
    } else {
        float key[2][4], query[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            get4(key[half], &r.vectors[0][KEY * HEAD + half * (HEAD / 2) + part * 4]);
            get4(query[half], &r.vectors[0][QUERY * HEAD + half * (HEAD / 2) + part * 4]);
        }
        value = r.vectors[0][VALUE * HEAD + column];
        ask(s, key, query, seen, asked);
    }
    luce_sync();
    if (wave < WAVES) {
        float row[FACTORS], key[2][4];
        get4(row, r.factor[0]);
#pragma unroll
        for (int half = 0; half < 2; half++) get4(key[half], &r.vectors[0][KEY * HEAD + half * (HEAD / 2) + part * 4]);
        const float u = row[ROW_RATE] * row[ROW_SCALE] * fmaf(-(row[ROW_FADE] * row[ROW_SCALE]), seen, value);
        const float o = fmaf(row[ROW_OVERLAP], u, row[ROW_FADE] * asked);
        if (thread % GROUP == 0) luce_cluster_send<SPLIT>(&r.answer[0][column], o, &arrived);
        update(s, key, row[ROW_FADE], u);
    }
    if (wave < WAVES) {
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
            for (int half = 0; half < 2; half++) put4(place(c, half), s[c][half]);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            if (elements[i].index < 0 || (elements[i].kind != VALUE && rank != LEADER)) continue;
            // The inputs of query and key that the other blocks' answers are made of have been read.
            if (elements[i].kind < VALUE) luce_cluster_receive<SPLIT>(&arrived);
            elements[i].leave(past, taps);
        }
    } else if (wave > WAVES && rank == LEADER) {
        luce_cluster_receive<SPLIT>(&arrived);
        put_answer(r, 0, span.start, head, heads, eps, out, bytes);
        for (int row = n; row < padded && blockIdx.y == 0; row++)
            quantise_nothing(head * HEAD, HEAD, row, bytes, lane, LUCE_LANES);
    }
}

#endif
