// Mixture of experts without its products: choosing the experts of a row, sorting the pairs of a row and one of its
// slots by expert, and adding the experts' biases and results.
#include "route.h"

// route_row of a row in memory that has at most OWN experts for each lane.
template <int OWN>
LUCE_FN void route_loaded(const float* __restrict__ row, const float* __restrict__ bias,
                          const float* __restrict__ expert_scale, i32* __restrict__ ids, float* __restrict__ weights,
                          int experts, int top_k, int sigmoid, int biased, int normalise, int scaled, float scale,
                          int groups, int groups_used, int two_best, float* kept) {
    float p[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int expert = luce_lane() + i * LUCE_LANES;
        p[i] = expert < experts ? row[expert] : -LUCE_INF;
    }
    route_row(p, bias, expert_scale, ids, weights, experts, top_k, sigmoid, biased, normalise, scaled, scale, groups,
              groups_used, two_best, kept);
}

// ids, weights [rows, top_k]: the experts of a row with the largest p (+ bias, if `biased`), best first, the lowest
// number on ties, and their p, divided by the sum of the row's if `normalise`, times `scale` (times expert_scale[id],
// if `scaled`). p is the softmax, or with `sigmoid` the sigmoid, of logits float32 [rows, experts], rows `stride`
// apart. With `groups`, only experts of the best groups are chosen. Grid: one wave per row. top_k is at most the number
// of experts, and at most LUCE_LANES.
extern "C" __global__ void __launch_bounds__(LUCE_LANES)
    route(const float* __restrict__ logits, const float* __restrict__ bias, const float* __restrict__ expert_scale,
          i32* __restrict__ ids, float* __restrict__ weights, int stride, int experts, int top_k, int sigmoid, int biased,
          int normalise, int scaled, float scale, int groups, int groups_used, int two_best) {
    __shared__ float kept[MOST_EXPERTS];
    luce_release();
    luce_await();
    logits += (i64)blockIdx.x * stride;
    ids += (i64)blockIdx.x * top_k;
    weights += (i64)blockIdx.x * top_k;
    if (experts <= 8 * LUCE_LANES) {
        route_loaded<8>(logits, bias, expert_scale, ids, weights, experts, top_k, sigmoid, biased, normalise, scaled,
                        scale, groups, groups_used, two_best, kept);
    } else {
        route_loaded<MOST_EXPERTS / LUCE_LANES>(logits, bias, expert_scale, ids, weights, experts, top_k, sigmoid, biased,
                                                normalise, scaled, scale, groups, groups_used, two_best, kept);
    }
}

// Two blocks fit on a multiprocessor, so that those of 256 experts run at once on a large GPU.
#define GROUP_THREADS 512
#define GROUP_WAVES (GROUP_THREADS / LUCE_LANES)
#define GROUP_IDS 4                          // that a lane loads at a time
#define GROUP_STEP (GROUP_IDS * LUCE_LANES)  // ids of a wave
#define GROUP_LOADS 4                        // of a lane in flight at a time

LUCE_FN int ones(u64 mask) { return __popc((u32)mask) + __popc((u32)(mask >> 32)); }

// The ids of the pairs from i on, a multiple of GROUP_IDS; -1 from `end` on. `whole`: one load reads all of them, as
// `ids` is aligned to it and `end` a multiple of GROUP_IDS.
LUCE_FN void load_ids(const i32* __restrict__ ids, bool whole, int i, int end, i32 (&own)[GROUP_IDS]) {
    if (whole) {
        const int4 four = i < end ? *reinterpret_cast<const int4*>(ids + i) : make_int4(-1, -1, -1, -1);
        own[0] = four.x, own[1] = four.y, own[2] = four.z, own[3] = four.w;
    } else {
#pragma unroll
        for (int e = 0; e < GROUP_IDS; e++) own[e] = i + e < end ? ids[i + e] : -1;
    }
}

// A counting sort. order [pairs]: the numbers of the pairs, by expert, those of one expert ascending. tiles [most, 3]:
// expert, first place in `order`, and count of at most tile_rows pairs of one expert; the count is 0 (and the rest
// unwritten) beyond the last tile. ids [pairs]: each pair's expert.
// Grid: one block of GROUP_THREADS per expert, with an i32 per expert of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS)
    group_pairs(const i32* __restrict__ ids, i32* __restrict__ order, i32* __restrict__ tiles, int pairs, int tile_rows,
                int most) {
    luce_await();
    LUCE_DYNAMIC_SHARED(i32, count);
    __shared__ i32 found[GROUP_WAVES];
    const int experts = (int)gridDim.x;
    const int expert = (int)blockIdx.x;
    const int lane = luce_lane(), wave = luce_wave();

    // Every block counts the experts up to its own itself: 16 KB of ids at 512 rows take less time than another launch.
    for (int e = luce_thread(); e <= expert; e += GROUP_THREADS) count[e] = 0;
    luce_sync();
    // Each wave takes a run of neighbouring pairs.
    const int run = luce_ceil_div(pairs, GROUP_WAVES * GROUP_STEP) * GROUP_STEP;
    const int begin = wave * run, end = luce_min(begin + run, pairs);
    const bool whole = (u64)ids % 16 == 0 && pairs % GROUP_IDS == 0;
    int seen = 0;
    for (int i = begin + lane * GROUP_IDS; i < end; i += GROUP_LOADS * GROUP_STEP) {
        i32 own[GROUP_LOADS][GROUP_IDS];
#pragma unroll
        for (int load = 0; load < GROUP_LOADS; load++) load_ids(ids, whole, i + load * GROUP_STEP, end, own[load]);
#pragma unroll
        for (int load = 0; load < GROUP_LOADS; load++) {
#pragma unroll
            for (int e = 0; e < GROUP_IDS; e++) {
                const i32 id = own[load][e];
                if ((u32)id <= (u32)expert) atomicAdd(&count[id], 1);
                seen += id == expert;
            }
        }
    }
    seen = luce_lane_sum(seen);
    if (lane == 0) found[wave] = seen;
    luce_sync();

    int first = 0;  // the expert's place in `order`
    for (int e = lane; e < expert; e += LUCE_LANES) first += count[e];
    first = luce_lane_sum(first);
    if (wave == 0) {
        int tile = 0;
        for (int e = lane; e < expert; e += LUCE_LANES) tile += luce_ceil_div(count[e], tile_rows);
        tile = luce_lane_sum(tile);
        const int total = count[expert];
        const int end_tile = tile + luce_ceil_div(total, tile_rows);
        for (int t = tile + lane; t < end_tile; t += LUCE_LANES) {
            const int done = (t - tile) * tile_rows;
            tiles[t * 3] = expert;
            tiles[t * 3 + 1] = first + done;
            tiles[t * 3 + 2] = luce_min(tile_rows, total - done);
        }
        if (expert == experts - 1) {
            for (int t = end_tile + lane; t < most; t += LUCE_LANES) tiles[t * 3 + 2] = 0;
        }
    }

    if (seen == 0) return;
    for (int w = 0; w < wave; w++) first += found[w];
    for (int i = begin + lane * GROUP_IDS; i - lane * GROUP_IDS < end; i += GROUP_STEP) {
        i32 own[GROUP_IDS];
        load_ids(ids, whole, i, end, own);
        bool any = false;
#pragma unroll
        for (int e = 0; e < GROUP_IDS; e++) any |= own[e] == expert;
        if (luce_ballot(any) == 0) continue;
        // Lower lanes have earlier pairs.
        int at = first;
#pragma unroll
        for (int e = 0; e < GROUP_IDS; e++) {
            const u64 mask = luce_ballot(own[e] == expert);
            at += ones(mask & (((u64)1 << lane) - 1));
            first += ones(mask);
        }
#pragma unroll
        for (int e = 0; e < GROUP_IDS; e++) {
            if (own[e] == expert) order[at++] = i + e;
        }
    }
}

#define COMBINE_THREADS 256
#define COMBINE_EACH 4   // elements of a thread
#define COMBINE_SLOTS 4  // whose loads are in flight at a time

// The thread's element number e of a block's: floats lie COMBINE_THREADS apart, and of bfloat16 two neighbours are a word.
LUCE_FN int element_of(const float*, int e) { return e * COMBINE_THREADS + (int)threadIdx.x; }
LUCE_FN int element_of(const bf16_t*, int e) { return (e / 2 * COMBINE_THREADS + (int)threadIdx.x) * 2 + e % 2; }

// A row's elements of the thread from number `first` on, zeros beyond `rows`; rows of bfloat16 are even.
LUCE_FN void load_elements(const float* __restrict__ from, int first, int rows, float (&v)[COMBINE_EACH]) {
#pragma unroll
    for (int e = 0; e < COMBINE_EACH; e++) {
        const int j = first + element_of(from, e);
        v[e] = j < rows ? from[j] : 0.0f;
    }
}
LUCE_FN void load_elements(const bf16_t* __restrict__ from, int first, int rows, float (&v)[COMBINE_EACH]) {
#pragma unroll
    for (int e = 0; e < COMBINE_EACH; e += 2) {
        const int j = first + element_of(from, e);
        const u32 two = j < rows ? *reinterpret_cast<const u32*>(from + j) : 0;
        v[e] = luce_f32(bf16_t{(u16)two}), v[e + 1] = luce_f32(bf16_t{(u16)(two >> 16)});
    }
}

template <typename T>
LUCE_FN void combine_row(const T* __restrict__ y, const float* __restrict__ weights, const float* __restrict__ shared,
                         const float* __restrict__ gate, float* __restrict__ out, int slots, int rows, int adds, int gated,
                         i64 gate_stride) {
    luce_await();
    const int first_element = (int)blockIdx.y * (COMBINE_EACH * COMBINE_THREADS);
    y += (i64)blockIdx.x * slots * rows;
    weights += (i64)blockIdx.x * slots;
    shared += (i64)blockIdx.x * rows;
    out += (i64)blockIdx.x * rows;
    const float score = gated ? gate[blockIdx.x * gate_stride] : 0.0f;
    float addend[COMBINE_EACH], sum[COMBINE_EACH];
#pragma unroll
    for (int e = 0; e < COMBINE_EACH; e++) {
        const int j = first_element + element_of(y, e);
        addend[e] = adds && j < rows ? shared[j] : 0.0f;
        sum[e] = 0.0f;
    }
    for (int first = 0; first < slots; first += COMBINE_SLOTS) {
        float own[COMBINE_SLOTS][COMBINE_EACH], weight[COMBINE_SLOTS];
#pragma unroll
        for (int i = 0; i < COMBINE_SLOTS; i++) {
            const bool used = first + i < slots;
            weight[i] = used ? weights[first + i] : 0.0f;
            load_elements(y + (i64)(first + i) * rows, first_element, used ? rows : 0, own[i]);
        }
#pragma unroll
        for (int i = 0; i < COMBINE_SLOTS; i++) {
            if (first + i >= slots) break;
#pragma unroll
            for (int e = 0; e < COMBINE_EACH; e++) sum[e] = fmaf(weight[i], own[i][e], sum[e]);
        }
    }
#pragma unroll
    for (int e = 0; e < COMBINE_EACH; e++) {
        const int j = first_element + element_of(y, e);
        if (j >= rows) break;
        if (adds) sum[e] += gated ? addend[e] / (1.0f + expf(-score)) : addend[e];
        out[j] = sum[e];
    }
}

// out[r, j] = sum over the slots s, ascending, of weights[r, s] * y[r, s, j]; y float32 [n, slots, rows]. If `adds`,
// plus shared[r, j], times the sigmoid of the row's gate if `gated`; gates are gate_stride elements apart.
// Grid: (n, ceil(rows / (COMBINE_EACH * COMBINE_THREADS))) blocks of COMBINE_THREADS.
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
    combine(const float* __restrict__ y, const float* __restrict__ weights, const float* __restrict__ shared,
            const float* __restrict__ gate, float* __restrict__ out, int slots, int rows, int adds, int gated,
            i64 gate_stride) {
    combine_row(y, weights, shared, gate, out, slots, rows, adds, gated, gate_stride);
}

// The same of y in bfloat16, rows even.
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
    combine_bf16(const bf16_t* __restrict__ y, const float* __restrict__ weights, const float* __restrict__ shared,
                 const float* __restrict__ gate, float* __restrict__ out, int slots, int rows, int adds, int gated,
                 i64 gate_stride) {
    combine_row(y, weights, shared, gate, out, slots, rows, adds, gated, gate_stride);
}

// y[pair, j] += bias[ids[pair], j]: y float32 [pairs, rows], bias [experts, rows]. Grid: (pairs, ceil(rows / the
// block's threads)).
extern "C" __global__ void add_expert_bias(float* __restrict__ y, const float* __restrict__ bias,
                                           const i32* __restrict__ ids, int rows) {
    luce_await();
    const int j = (int)(blockIdx.y * blockDim.x + threadIdx.x);
    if (j < rows) y[(i64)blockIdx.x * rows + j] += bias[(i64)ids[blockIdx.x] * rows + j];
}
