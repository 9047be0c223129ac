// variants for cuda: HEAD=64,128 QUERIES=16,64,128 KTYPE=F16 VTYPE=F16
// variants for cuda: HEAD=256 QUERIES=16,32,64,128 KTYPE=F16 VTYPE=F16
// variants for cuda: HEAD=128,256 QUERIES=16,64 KTYPE=F16 VTYPE=F16 SEEN=1
// variants for cuda: HEAD=128 QUERIES=16,64,128 KTYPE=F16 VTYPE=F16 SOFTCAP=1
// variants for cuda: HEAD=256 QUERIES=16,32,64,128 KTYPE=F16 VTYPE=F16 SOFTCAP=1
// variants for cuda: HEAD=512 QUERIES=16,64 KTYPE=F16 VTYPE=F16
// variants for cuda: HEAD=128,256 QUERIES=16,128 KTYPE=Q8_0 VTYPE=Q8_0
// variants for cuda: HEAD=256 QUERIES=16,128 KTYPE=BF16 VTYPE=BF16
// variants for cuda: HEAD=128 QUERIES=16,64 KTYPE=Q4_0 VTYPE=Q4_0
// variants for cuda: HEAD=256 QUERIES=128 KTYPE=Q8_0 VTYPE=Q4_0
// variants for cuda: HEAD=128 QUERIES=16 KTYPE=F16 VTYPE=Q8_0
// Causal attention over KV pages by products of 16-bit tiles. HEAD is the head dimension rounded up to a variant; the
// true one is an argument. Pairs of types that are not listed compile too.
//
// Queries and the weights of the softmax are rounded to fp16; with bfloat16 pools everything is bfloat16. Keys and
// values have the types of their pools. Sums are in float32. A tile of QUERIES queries of one span takes its pages in
// the order of the table, one at a time, with an online softmax. Spans of at most `few` rows are split: `attention_few`
// computes one split of a tile per block, `attention_fold` adds the splits. `attention_many` computes longer spans, a
// tile with all of its pages per block.
//
// With SOFTCAP, scores are bent to cap tanh(score / cap). `sinks`, if not null, holds a number for each query head, of
// which the power joins the sum of the weights.
//
// Rows of short spans have the same bits alone, in a span and in a batch:
//   - A row's splits follow from its own position and the window, and so do the places of their results, which
//     `attention_fold` adds in an order that follows from the places.
//   - QUERIES changes no order within a row, and an element of a product depends only on its row and its column, also
//     when four waves multiply together (attention_wgmma.h) instead of one (attention_sync.h): observed on an H200, and
//     tests/ops/test_attention.py checks it on every GPU.
//   - Keys that a row does not see have no effect: they have the weight 0, and factors of exp(0) = 1.
//
// Waves of a block: WAVES_M share the rows of queries, WAVES_N the keys of the scores and the columns of the values. A
// wave's values take ROW_TILES * COLUMN_TILES * 4 registers of each lane, at most 128. The block's first LOADING threads
// are theirs.
#include "activation.h"
#include "quantise.h"
#include "tensor_map.h"

#define GROUPED (LUCE_WGMMA && QUERIES == 128 && HEAD <= 256)
// Whether the copy engine brings the pages: it cannot convert.
#define JOINED(a, b) a##b
#define COPIED(type) JOINED(COPIED_, type)
#define COPIED_F16 1
#define COPIED_BF16 1
#define MAPPED (GROUPED && COPIED(KTYPE) && COPIED(VTYPE))
#if MAPPED
#define MAPS , LUCE_BY_VALUE const TensorMap k_map, LUCE_BY_VALUE const TensorMap v_map
#else
#define MAPS
#endif
#if GROUPED
#define WAVES_N 1
#define WAVES_M (QUERIES / 16)
#define FETCHING 128  // more threads, which bring the pages
#else
#define WAVES_N 4
#define WAVES_M (QUERIES * HEAD > 64 * 256 ? 2 : 1)
#define FETCHING 0
#endif
#define LOADING (LUCE_LANES * WAVES_N * WAVES_M)
#define THREADS (LOADING + FETCHING)
#define ROW_TILES (QUERIES / 16 / WAVES_M)
#define KEY_TILES (PAGE / 8 / WAVES_N)
#define COLUMN_TILES (HEAD / 8 / WAVES_N)
#include "attention_tile.h"

// Blocks of a multiprocessor that get registers: as many as fit into shared memory.
#define BLOCKS (QUERIES == 16 && HEAD <= 256 ? 3 : 1)
// Most splits of a row. A launch may have fewer places for them, if no page number of its rows is as large.
#define SPLITS 64
#define FOLD_THREADS 256

// A lane's part of a wave's part of a tile: rows g and g + 8 of each of its row tiles, in the layout of products.
struct Sums {
    float top[ROW_TILES][2];
    float total[ROW_TILES][2];  // of the weights: until join_totals of those that the lane has
    float value[ROW_TILES][COLUMN_TILES][4];
};

// Of the block's keys and columns the wave's part, and its first row.
LUCE_FN int wave_n() { return luce_wave() % WAVES_N; }
LUCE_FN int wave_row() { return luce_wave() / WAVES_N * (ROW_TILES * 16); }

LUCE_FN void clear(Sums& sums) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
        sums.top[m][0] = sums.top[m][1] = -LUCE_INF;
        sums.total[m][0] = sums.total[m][1] = 0.0f;
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums.value[m][n][e] = 0.0f;
    }
}

// Hides the keys that row `n_row` of the tile does not see, of a page whose first key stands at `at`; `key` is the
// lane's first.
LUCE_FN void mask(const Tile& tile, float (&score)[KEY_TILES][4], int half, int n_row, int at, int key) {
#ifdef SEEN
    int row = n_row < tile.queries ? query_row(tile, n_row) : 0;
    int oldest = tile.positions[row] - tile.own_window - at, own = tile.position - at;
    u64 seen = seen_rows(tile.seen, row);
#else
    int newest = position(tile, n_row) - at;
#endif
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            int j = key + n * 8 + e;
#ifdef SEEN
            bool hidden = j < own ? j <= oldest : j - own > 63 || !(seen >> (j - own) & 1);
#else
            bool hidden = j > newest || j <= newest - tile.window;
#endif
            if (hidden) score[n][half * 2 + e] = -LUCE_INF;
        }
}

// Bends a lane's scores.
LUCE_FN void bend(const Tile& tile, float (&score)[KEY_TILES][4]) {
#ifdef SOFTCAP
#pragma unroll
    for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) score[n][e] = capped(score[n][e], tile.cap);
#endif
}

// The sum that divides a query's values, after all its keys: with the sink of its head.
LUCE_FN float with_sink(float total, float top, const float* sinks, int head) {
    return sinks ? total + luce_exp2(sinks[head] * LOG2_E - softmax_base(top) + WEIGHT_SHIFT) : total;
}

// Adds the weights of 16 rows and 16 keys to the lane's part of the rows' sums: in one order for all tiles.
LUCE_FN void add_weights(float (&total)[2], const u32 (&weight)[4]) {
    typedef Values::Element Element;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        total[i % 2] += luce_f32(Element{(u16)weight[i]});
        total[i % 2] += luce_f32(Element{(u16)(weight[i] >> 16)});
    }
}

// Behind the last weights: the sums of rows.
LUCE_FN void join_totals(Sums& sums) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) sums.total[m][half] = luce_lane_sum<4>(sums.total[m][half]);
}

#if GROUPED
#include "attention_wgmma.h"
#else
#include "attention_sync.h"
#endif

// Pages of a row's splits: the fewest with which it has no more than SPLITS of them. They are counted from position 0;
// with a window, splits may not align with the keys that the row sees, which takes one more.
LUCE_FN int split_pages(int position, int window) {
    int all = position / PAGE + 1, most = (window - 1) / PAGE + 2;
    return all <= most ? luce_ceil_div(all, SPLITS) : luce_ceil_div(most, SPLITS - 1);
}

LUCE_FN int oldest_page(int position, int window) { return luce_max(0, position - window + 1) / PAGE; }

// Of the splits from page `low` on, the one that has place `slot` of a row's SPLITS.
LUCE_FN int split_in(int slot, int low, int pages) {
    int split = low / pages;
    return split + (slot - split % SPLITS + SPLITS) % SPLITS;
}

// Whether the row has a split in that place: `first` is its oldest one, `count` their number.
LUCE_FN bool has_split(int slot, int first, int count) { return ((slot - first) & (SPLITS - 1)) < count; }
static_assert((SPLITS & (SPLITS - 1)) == 0, "a power of two");

// All pages of a tile, in one run.
struct WholeRun {
    const Tile& tile;
    template <typename Run> __device__ __forceinline__ void operator()(const Run& run) const {
        run(entry_at(tile, oldest_page(tile.low, tile.window) * PAGE), entry_at(tile, (tile.high / PAGE + 1) * PAGE), 0);
    }
};

// The runs of pages of a tile's splits, one after the other; where the first one is, is known before.
struct SplitRuns {
    const Tile& tile;
    int oldest, newest, begin, end;
    __device__ __forceinline__ bool find(int pages, int& begin, int& end) const {
        const int split = split_in(blockIdx.z, oldest, pages);
        if (split * pages > newest) return false;
        begin = entry_at(tile, luce_max(split * pages, oldest) * PAGE);
        end = entry_at(tile, luce_min((split + 1) * pages, newest + 1) * PAGE);
        return true;
    }
    template <typename Run> __device__ __forceinline__ void operator()(const Run& run) const {
        const int most = split_pages(tile.high, tile.window);
        int pages = split_pages(tile.low, tile.window), from = begin, to = end;
        bool found = begin >= 0;
        for (;;) {
            if (found) run(from, to, pages);
            if (++pages > most) return;
            found = find(pages, from, to);
        }
    }
};

LUCE_FN SplitRuns split_runs(const Tile& tile) {
    SplitRuns runs = {tile, oldest_page(tile.low, tile.window), tile.high / PAGE, -1, -1};
    runs.find(split_pages(tile.low, tile.window), runs.begin, runs.end);
    return runs;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attention_few(float* __restrict__ values, float2* __restrict__ state, const int base, const int rows_apart,
                  ARGUMENTS MAPS) {
    LUCE_DYNAMIC_SHARED(Shared, all);
    Shared& shared = *all;
    int tiles = (rows_apart * (heads / kv_heads) + QUERIES - 1) / QUERIES;
    int span = base + blockIdx.x / tiles, query = blockIdx.x % tiles * QUERIES;
    int4 place = reinterpret_cast<const int4*>(spans)[span];
    if (place.z > few || query >= place.z * (heads / kv_heads)) return luce_await();
    Tile tile = make_tile(PASSED, span, place, query);
#if MAPPED
    tile.k_map = &k_map, tile.v_map = &v_map;
#endif
    const SplitRuns runs = split_runs(tile);
    luce_await();  // until here: the step's own arrays
    luce_release();
    // Rows of one tile may have splits of two lengths: these run one after the other.
    const auto write = [&](const Sums& sums, int pages) {
        int g = luce_lane() / 4, t = luce_lane() % 4;
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int n = wave_row() + m * 16 + half * 8 + g;
                if (n >= tile.queries || split_pages(position(tile, n), tile.window) != pages) continue;
                int row = (span - base) * rows_apart + query_row(tile, n);
                i64 to = ((i64)row * heads + query_head(tile, n)) * gridDim.z + blockIdx.z;
                if (t == 0 && wave_n() == 0) {
                    state[to].x = sums.top[m][half];
                    state[to].y = sums.total[m][half];
                }
#pragma unroll
                for (int c = 0; c < COLUMN_TILES; c++) {
                    int column = (wave_n() * COLUMN_TILES + c) * 8 + t * 2;
                    if (column >= d) continue;
                    *reinterpret_cast<float2*>(values + to * d + column) =
                        make_float2(sums.value[m][c][half * 2], sums.value[m][c][half * 2 + 1]);
                }
            }
    };
    attend_runs(tile, shared, {q, q_row, q_head, scale * LOG2_E}, runs, write);
}

// The splits' sums added and divided, times sigmoid or softplus (gating 1 or 2, 0: no gate) of gate, one of a head
// (gate_each 1) or one of each of its values (d). The result goes to out or, if `padded` is not 0, only to
// `padded` quantised rows, of which n are the step's (quantise.h; d is a multiple of 128). `places` splits of each row
// and head lie in values and state: gridDim.z of attention_few.
extern "C" __global__ void __launch_bounds__(FOLD_THREADS)
    attention_fold(float* __restrict__ out, const float* __restrict__ values, const float2* __restrict__ state,
                   const int base, const int rows_apart, const int* __restrict__ spans, const int places, const int d,
                   const int window, const int few, const float* __restrict__ gate, const i64 gate_row,
                   const i64 gate_head, const int gating, const int gate_each, const int n, u8* __restrict__ to_int8,
                   const int padded, const int wide, const float* __restrict__ sinks) {
    __shared__ float4 part[FOLD_THREADS];
    int span = base + blockIdx.x / rows_apart, row = blockIdx.x % rows_apart, thread = threadIdx.x;
    // Not later than here, as the compiler would have it.
    const int* own_span = spans + span * 4;
    const int start = luce_read_now(own_span + 1), rows = luce_read_now(own_span + 2), at = luce_read_now(own_span + 3);
#ifdef SEEN
    int position = at + rows - 1, width = window + rows - 1;
#else
    int position = at + row, width = window;
#endif
    int pages = split_pages(position, width);
    int first = oldest_page(position, width) / pages, count = position / PAGE / pages + 1 - first;
    i64 query = ((i64)blockIdx.x * gridDim.y + blockIdx.y) * places;
    luce_await();
    luce_release();  // behind the wait: attention_few lets this kernel start at once
    if (row >= rows || rows > few) return;
    // A thread has four columns, and of the splits every LAYERS-th; a lane has the weights of OWN splits, and each wave
    // all. All loads start before the first wait.
    const int QUADS = HEAD / 4, LAYERS = FOLD_THREADS / QUADS, OWN = SPLITS / LUCE_LANES;
    int quad = thread % QUADS, layer = thread / QUADS;
    float2 own[OWN];
    float4 value[SPLITS / LAYERS];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int split = luce_lane() + i * LUCE_LANES;
        own[i] = make_float2(-LUCE_INF, 0.0f);
        if (has_split(split, first, count)) own[i] = state[query + split];
    }
#pragma unroll
    for (int i = 0; i < SPLITS / LAYERS; i++) {
        int split = layer + i * LAYERS;
        value[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (quad * 4 < d && has_split(split, first, count))
            value[i] = reinterpret_cast<const float4*>(values + (query + split) * d)[quad];
    }
    float top = own[0].x, total = 0.0f, weight[OWN];
#pragma unroll
    for (int i = 1; i < OWN; i++) top = fmaxf(top, own[i].x);
    float lowest = softmax_base(luce_lane_max(top));
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        weight[i] = luce_exp2(own[i].x - lowest);
        total = fmaf(own[i].y, weight[i], total);
    }
    total = with_sink(luce_lane_sum(total), lowest, sinks, blockIdx.y);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < SPLITS / LAYERS; i++) {
        int split = layer + i * LAYERS;
        float factor = 0.0f;
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            // The split follows from i alone, unless there are many layers.
            if (LAYERS * (i + 1) <= LUCE_LANES * j || LAYERS * i >= LUCE_LANES * (j + 1)) continue;
            float there = luce_shfl(weight[j], split % LUCE_LANES);
            if (split / LUCE_LANES == j) factor = there;
        }
        sum.x = fmaf(factor, value[i].x, sum.x);
        sum.y = fmaf(factor, value[i].y, sum.y);
        sum.z = fmaf(factor, value[i].z, sum.z);
        sum.w = fmaf(factor, value[i].w, sum.w);
    }
    part[thread] = sum;
    luce_sync();
    if (thread >= luce_max(QUADS, LUCE_LANES)) return;  // whole waves
    const bool inside = thread < QUADS && quad * 4 < d;
    const int head = blockIdx.y, column = quad * 4;
    row += start;
#pragma unroll
    for (int i = 1; i < LAYERS; i++) {
        float4 more = part[i * QUADS + quad];
        sum.x += more.x;
        sum.y += more.y;
        sum.z += more.z;
        sum.w += more.w;
    }
    float result[4] = {sum.x / total, sum.y / total, sum.z / total, sum.w / total};
    if (gating && inside) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float z = gate[row * gate_row + head * gate_head + (gate_each == 1 ? 0 : column + e)];
            result[e] = gating == 1 ? result[e] / (1.0f + expf(-z)) : result[e] * softplus(z);
        }
    }
    const Bytes bytes = {to_int8, padded, wide};
    if (padded) {
        quantise_columns(result, inside, head * d + column, row, bytes);
        for (int r = n; r < padded && blockIdx.x == 0; r++)
            quantise_nothing(head * d, d, r, bytes, thread, luce_max(QUADS, LUCE_LANES));
    } else if (inside) {
        float4* to = reinterpret_cast<float4*>(out + ((i64)row * gridDim.y + head) * d) + quad;
        *to = make_float4(result[0], result[1], result[2], result[3]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attention_many(float* __restrict__ out, const float* __restrict__ sinks, ARGUMENTS MAPS) {
    luce_await();
    LUCE_DYNAMIC_SHARED(Shared, all);
    Shared& shared = *all;
    int group = heads / kv_heads, block = gridDim.x - 1 - blockIdx.x;  // late rows see most keys: they start first
    int span = tile_span(spans, span_count, group, QUERIES, block);
    int4 place = reinterpret_cast<const int4*>(spans)[span];
    int query = (block - first_tile(spans, span, group, QUERIES)) * QUERIES;
    if (place.z <= few || query >= place.z * group) return;
    Tile tile = make_tile(PASSED, span, place, query);
#if MAPPED
    tile.k_map = &k_map, tile.v_map = &v_map;
#endif
    const WholeRun runs = {tile};
    const auto write = [&](const Sums& sums, int) {
        int g = luce_lane() / 4, t = luce_lane() % 4;
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int n = wave_row() + m * 16 + half * 8 + g;
                if (n >= tile.queries) continue;
                float* to = out + ((i64)(tile.start + query_row(tile, n)) * heads + query_head(tile, n)) * d;
                float factor = 1.0f / with_sink(sums.total[m][half], sums.top[m][half], sinks, query_head(tile, n));
#pragma unroll
                for (int c = 0; c < COLUMN_TILES; c++) {
                    int column = (wave_n() * COLUMN_TILES + c) * 8 + t * 2;
                    if (column >= d) continue;
                    *reinterpret_cast<float2*>(to + column) =
                        make_float2(sums.value[m][c][half * 2] * factor, sums.value[m][c][half * 2 + 1] * factor);
                }
            }
    };
    attend_runs(tile, shared, {q, q_row, q_head, scale * LOG2_E}, runs, write);
}
