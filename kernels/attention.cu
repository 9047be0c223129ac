// variants: HEAD=32,64,128,256,512 QUERIES=4,16 SPLIT=4 KTYPE=F16 VTYPE=F16
// variants: HEAD=576 QUERIES=4,16 SPLIT=4 KTYPE=F16 VTYPE=F16
// variants: HEAD=128,256 QUERIES=4,16 SPLIT=4 KTYPE=BF16 VTYPE=BF16
// variants: HEAD=128 QUERIES=16 SPLIT=4 KTYPE=F16 VTYPE=F16 SEEN=1
// variants: HEAD=128,256 QUERIES=4,16 SPLIT=4 KTYPE=F16 VTYPE=F16 SOFTCAP=1
// variants for hip: HEAD=512 QUERIES=4,16 SPLIT=4 KTYPE=BF16 VTYPE=BF16
// variants for hip: HEAD=32,64,128,256,512 QUERIES=4,16 SPLIT=4 KTYPE=Q8_0 VTYPE=Q8_0
// variants for hip: HEAD=128,256,512 QUERIES=4,16 SPLIT=4 KTYPE=Q4_0 VTYPE=Q4_0
// variants for hip: HEAD=128,256 QUERIES=4,16 SPLIT=4 KTYPE=Q8_0 VTYPE=Q4_0
// variants for hip: HEAD=128 QUERIES=4,16 SPLIT=4 KTYPE=F16 VTYPE=Q8_0
// The portable attention, for GPUs without products of 16-bit tiles (attention_mma.cu), or with too little shared
// memory for these.
//
// Causal attention over KV pages. HEAD is the head dimension rounded up to a variant; the true one is an argument.
// KTYPE and VTYPE are the types of K and V (kv.h); pairs of types that are not listed compile too.
//
// The order of a query's sums depends only on the pages that its span sees, so a row has the same bits alone, in a
// chunk and in a batch:
//   - Pages are taken in the order of the table, in splits of SPLIT pages anchored at position 0, each split in blocks
//     of KEYS keys with an online softmax that starts afresh.
//   - The splits' results (maximum, sum, weighted values) are folded from left to right.
//   - Keys that a row does not see have no effect: they have the weight 0, and factors of exp(0) = 1.
// `attention` computes all splits of a tile in one block, for steps with many tiles; `attention_split` computes one
// split per block, and `attention_fold` folds the results. Both ways, and all values of QUERIES, run the same
// arithmetic: products that feed a sum call fmaf, because the products that a compiler fuses by itself may differ
// between kernels.
//
// With SOFTCAP, scores are bent to cap tanh(score / cap). `sinks`, if not null, holds a number for each query head, of
// which the power joins the sum of the weights.
//
// A tile is QUERIES queries of one span that share a KV head: query q of a span belongs to row q / group and to query
// head q % group of the KV head. Threads have two roles. For the scores, thread t has key t % KEYS and the queries
// t / KEYS, + SCORE_GROUPS, ...; for the values it has two columns and the queries t / PAIRS, + VALUE_GROUPS, ...
#include "attention.h"

#define KEYS 32
// Whole waves and whole groups of PAIRS.
#define THREADS (HEAD == 576 ? 576 : HEAD == 512 ? 256 : 128)
// Columns of K in shared memory at once, two to a word of kv.h. The padding moves the keys of neighbouring threads to
// different banks.
#define CHUNK (HEAD < 128 ? HEAD : HEAD % 128 ? 64 : 128)
#define K_WORDS (CHUNK / 2 + 1)
#define PAIRS (HEAD / 2)
#define SCORE_GROUPS (THREADS / KEYS)
#define VALUE_GROUPS (THREADS / PAIRS)
#define SCORE_QUERIES ((QUERIES + SCORE_GROUPS - 1) / SCORE_GROUPS)
#define VALUE_QUERIES ((QUERIES + VALUE_GROUPS - 1) / VALUE_GROUPS)

struct alignas(16) Shared {
    float q[QUERIES][HEAD];
    u32 k[KEYS][K_WORDS];
    float weight[QUERIES][KEYS];
    // Factors of a query's earlier sums, and of its newest ones.
    float keep[QUERIES];
    float take[QUERIES];
    int position[QUERIES];
#ifdef SEEN
    u64 seen[QUERIES];
#endif
};

// With SEEN, the view lists the rows of a span that each row sees: a tile reads the keys that the span's last row would
// see with a window that reaches as far back as the first row's.
struct Tile {
    const KTYPE::Element* k_pool;
    const VTYPE::Element* v_pool;
    i64 row;      // values from one pool row to the next
    i64 column;   // of this KV head in a pool row
    const int* pages;
    const int* first;
    int count;
    int skew;     // pages of split 0 that lie before the table
    int low, high;  // positions of the tile's first and last row
    int window;
#ifdef SEEN
    int own, own_window;  // where the span's rows begin
#endif
#ifdef SOFTCAP
    float cap;
#endif
    int d;
    int queries;  // of QUERIES, those that exist
    i64 out;      // row * heads + head of query 0
    int offset;   // query 0's place in its row's group
};

#ifdef SEEN
#define SEEN_ARGUMENTS , const int *__restrict__ seen
#define SEEN_PASSED , seen
#else
#define SEEN_ARGUMENTS
#define SEEN_PASSED
#endif

LUCE_FN int split_skew(const int* first) { return first[0] / PAGE % SPLIT; }

LUCE_FN void fold(float& top, float& sum, float next_top, float next_sum, float& keep, float& take) {
    float both = fmaxf(top, next_top);
    float base = softmax_base(both);
    keep = expf(top - base);
    take = expf(next_top - base);
    sum = fmaf(sum, keep, next_sum * take);
    top = both;
}

// The sum that divides a query's values, after all its keys: with the sink of its head.
LUCE_FN float with_sink(float sum, float top, const float* sinks, int head) {
    return sinks ? sum + expf(sinks[head] - softmax_base(top)) : sum;
}

LUCE_FN float fold_value(float value, float next, float keep, float take) { return fmaf(value, keep, next * take); }

// The index row * heads + head of query `q` of the tile.
LUCE_FN i64 query_index(const Tile& tile, int q, int group, int heads) {
    int at = tile.offset + q;
    return tile.out + (i64)(at / group) * heads + at % group;
}

// Finds the tile of this block and loads its queries. Returns false if the block has none.
LUCE_FN bool find_tile(Tile& tile, Shared& shared, const float* q, i64 q_row, i64 q_head,
                       const KTYPE::Element* k_pool, const VTYPE::Element* v_pool, const int* spans, int span_count,
                       const int* table, const int* first, const int* counts, int width, const int* positions,
                       int heads, int kv_heads, int d, float scale, int window SEEN_ARGUMENTS CAP_ARGUMENTS) {
    int group = heads / kv_heads;
    int span = tile_span(spans, span_count, group, QUERIES, blockIdx.x);
    int start = spans[span * 4 + 1], rows = spans[span * 4 + 2];
    int query = (blockIdx.x - first_tile(spans, span, group, QUERIES)) * QUERIES;
    if (query >= rows * group) return false;

    int row = start + query / group;
    tile.k_pool = k_pool;
    tile.v_pool = v_pool;
    tile.row = (i64)kv_heads * d;
    tile.column = (i64)blockIdx.y * d;
    tile.pages = table + (i64)span * width;
    tile.first = first + (i64)span * width;
    tile.count = counts[span];
    tile.skew = split_skew(tile.first);
    tile.window = window;
#ifdef SOFTCAP
    tile.cap = cap;
#endif
    tile.d = d;
    tile.queries = luce_min(QUERIES, rows * group - query);
    tile.out = (i64)row * heads + (i64)blockIdx.y * group;
    tile.offset = query % group;
#ifdef SEEN
    tile.own = spans[span * 4 + 3];
    tile.own_window = window;
    tile.low = tile.high = tile.own + rows - 1;
    tile.window += rows - 1;
    for (int i = threadIdx.x; i < QUERIES; i += THREADS)
        shared.seen[i] = i < tile.queries ? seen_rows(seen, row + (tile.offset + i) / group) : 0;
#else
    tile.low = positions[row];
    tile.high = positions[row + (tile.offset + tile.queries - 1) / group];
#endif

    for (int i = threadIdx.x; i < QUERIES; i += THREADS)
        shared.position[i] = i < tile.queries ? positions[row + (tile.offset + i) / group] : -1;
    for (int i = threadIdx.x; i < QUERIES * HEAD; i += THREADS) {
        int n = i / HEAD, column = i % HEAD;
        float value = 0.0f;
        if (n < tile.queries && column < d) {
            int at = tile.offset + n;
            i64 head = blockIdx.y * group + at % group;
            value = q[(row + at / group) * q_row + head * q_head + column] * scale;
        }
        shared.q[n][column] = value;
    }
    luce_sync();
    return true;
}

// Adds the KEYS keys at pool row `from`, of which the first stands at position `at`, to a split's sums.
LUCE_FN void add_keys(const Tile& tile, Shared& shared, i64 from, int at, float* top, float* sum, float (*value)[2]) {
    int thread = threadIdx.x, key = thread % KEYS, score_group = thread / KEYS;
    float even[SCORE_QUERIES], odd[SCORE_QUERIES];
#pragma unroll
    for (int i = 0; i < SCORE_QUERIES; i++) even[i] = odd[i] = 0.0f;
    const KTYPE::Element* keys = tile.k_pool + KTYPE::offset(from * tile.row + tile.column);
    for (int chunk = 0; chunk < HEAD; chunk += CHUNK) {
        if (chunk >= tile.d) break;
        luce_sync();  // the previous chunk, and the previous keys' weights, have been read
        for (int i = thread; i < KEYS * (CHUNK / 8); i += THREADS) {
            int n = i / (CHUNK / 8), column = i % (CHUNK / 8) * 8;
            u32 words[4] = {0, 0, 0, 0};
            if (chunk + column < tile.d)
                KTYPE::load(keys + KTYPE::offset(n * tile.row + chunk + column), column, words);
#pragma unroll
            for (int j = 0; j < 4; j++) shared.k[n][column / 2 + j] = words[j];
        }
        luce_sync();
#pragma unroll 8
        for (int pair = 0; pair < CHUNK / 2; pair++) {
            float k_even, k_odd;
            KTYPE::split(shared.k[key][pair], k_even, k_odd);
#pragma unroll
            for (int i = 0; i < SCORE_QUERIES; i++) {
                // After the last query (only with more groups than queries) the product is discarded.
                int n = luce_min(score_group + i * SCORE_GROUPS, QUERIES - 1);
                float2 q = *reinterpret_cast<const float2*>(&shared.q[n][chunk + 2 * pair]);
                even[i] = fmaf(q.x, k_even, even[i]);
                odd[i] = fmaf(q.y, k_odd, odd[i]);
            }
        }
    }
    at += key;
#pragma unroll
    for (int i = 0; i < SCORE_QUERIES; i++) {
        int n = score_group + i * SCORE_GROUPS;
        int position = shared.position[luce_min(n, QUERIES - 1)];
#ifdef SEEN
        bool seen = at < tile.own ? at > position - tile.own_window
                                  : at - tile.own < 64 && shared.seen[luce_min(n, QUERIES - 1)] >> (at - tile.own) & 1;
#else
        bool seen = at <= position && at > position - tile.window;
#endif
#ifdef SOFTCAP
        float score = seen ? capped(even[i] + odd[i], tile.cap) : -LUCE_INF;
#else
        float score = seen ? even[i] + odd[i] : -LUCE_INF;
#endif
        float next = fmaxf(top[i], luce_lane_max<KEYS>(score));
        float base = softmax_base(next);
        // The shuffle from the own lane hides expf's last product, which could be fused with the sum's first addition.
        float weight = luce_shfl(expf(score - base), luce_lane());
        float keep = expf(top[i] - base);
        sum[i] = fmaf(sum[i], keep, luce_lane_sum<KEYS>(weight));
        top[i] = next;
        if (n < QUERIES) {
            shared.weight[n][key] = weight;
            if (key == 0) shared.keep[n] = keep;
        }
    }
    luce_sync();
    int column = thread % PAIRS * 2, value_group = thread / PAIRS;
    if (column >= tile.d || value_group >= tile.queries) return;
#pragma unroll
    for (int i = 0; i < VALUE_QUERIES; i++) {
        int n = luce_min(value_group + i * VALUE_GROUPS, QUERIES - 1);
        value[i][0] *= shared.keep[n];
        value[i][1] *= shared.keep[n];
    }
    // Rows of the page beyond the tile's last position may hold any bits, also values whose product with 0 is NaN.
    int count = luce_min(KEYS, tile.high - (at - key) + 1);
    const VTYPE::Element* values = tile.v_pool + VTYPE::offset(from * tile.row + tile.column + column);
#pragma unroll 8
    for (int j = 0; j < KEYS; j++) {
        u32 word = j < count ? VTYPE::load(values + VTYPE::offset(j * tile.row), column) : 0;
        float v_even, v_odd;
        VTYPE::split(word, v_even, v_odd);
#pragma unroll
        for (int i = 0; i < VALUE_QUERIES; i++) {
            float weight = shared.weight[luce_min(value_group + i * VALUE_GROUPS, QUERIES - 1)][j];
            value[i][0] = fmaf(weight, v_even, value[i][0]);
            value[i][1] = fmaf(weight, v_odd, value[i][1]);
        }
    }
}

// The sums of one split from zero: maximum and sum in the score role, values in the value role.
LUCE_FN void run_split(const Tile& tile, Shared& shared, int split, float* top, float* sum, float (*value)[2]) {
#pragma unroll
    for (int i = 0; i < SCORE_QUERIES; i++) {
        top[i] = -LUCE_INF;
        sum[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < VALUE_QUERIES; i++) value[i][0] = value[i][1] = 0.0f;
    int end = luce_min(tile.count, (split + 1) * SPLIT - tile.skew);
    for (int entry = luce_max(0, split * SPLIT - tile.skew); entry < end; entry++) {
        for (int half = 0; half < PAGE; half += KEYS) {
            int at = tile.first[entry] + half;
            if (at > tile.high || at + KEYS - 1 <= tile.low - tile.window) continue;
            add_keys(tile, shared, (i64)tile.pages[entry] * PAGE + half, at, top, sum, value);
        }
    }
}

LUCE_FN int split_count(int count, int skew) { return (count + skew + SPLIT - 1) / SPLIT; }

#define ARGUMENTS                                                                                                    \
    const float *__restrict__ q, const i64 q_row, const i64 q_head, const KTYPE::Element *__restrict__ k_pool,       \
        const VTYPE::Element *__restrict__ v_pool, const int *__restrict__ spans, const int span_count,              \
        const int *__restrict__ table, const int *__restrict__ first, const int *__restrict__ counts,                \
        const int width, const int *__restrict__ positions, const int heads, const int kv_heads, const int d,        \
        const float scale, const int window SEEN_ARGUMENTS CAP_ARGUMENTS
#define PASSED                                                                                                       \
    q, q_row, q_head, k_pool, v_pool, spans, span_count, table, first, counts, width, positions, heads, kv_heads, d, \
        scale, window SEEN_PASSED CAP_PASSED

// Grid: tiles, KV heads.
extern "C" __global__ void __launch_bounds__(THREADS) attention(float* __restrict__ out, const float* __restrict__ sinks, ARGUMENTS) {
    luce_await();
    __shared__ Shared shared;
    Tile tile;
    if (!find_tile(tile, shared, PASSED)) return;
    int key = threadIdx.x % KEYS, score_group = threadIdx.x / KEYS;
    int column = threadIdx.x % PAIRS * 2, value_group = threadIdx.x / PAIRS;
    float top[SCORE_QUERIES], sum[SCORE_QUERIES], value[VALUE_QUERIES][2];
    float all_top[SCORE_QUERIES], all_sum[SCORE_QUERIES], all_value[VALUE_QUERIES][2];
#pragma unroll
    for (int i = 0; i < SCORE_QUERIES; i++) {
        all_top[i] = -LUCE_INF;
        all_sum[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < VALUE_QUERIES; i++) all_value[i][0] = all_value[i][1] = 0.0f;
    int splits = split_count(tile.count, tile.skew);
    for (int split = 0; split < splits; split++) {
        // A split that the tile does not see would have no effect.
        if (tile.first[luce_max(0, split * SPLIT - tile.skew)] > tile.high) break;
        int last = luce_min(tile.count, (split + 1) * SPLIT - tile.skew) - 1;
        if (tile.first[last] + PAGE - 1 <= tile.low - tile.window) continue;
        run_split(tile, shared, split, top, sum, value);
        luce_sync();  // the last keys' factors have been read
#pragma unroll
        for (int i = 0; i < SCORE_QUERIES; i++) {
            float keep, take;
            fold(all_top[i], all_sum[i], top[i], sum[i], keep, take);
            int n = score_group + i * SCORE_GROUPS;
            if (key == 0 && n < QUERIES) {
                shared.keep[n] = keep;
                shared.take[n] = take;
            }
        }
        luce_sync();
#pragma unroll
        for (int i = 0; i < VALUE_QUERIES; i++) {
            int n = luce_min(value_group + i * VALUE_GROUPS, QUERIES - 1);
            float keep = shared.keep[n], take = shared.take[n];
            all_value[i][0] = fold_value(all_value[i][0], value[i][0], keep, take);
            all_value[i][1] = fold_value(all_value[i][1], value[i][1], keep, take);
        }
    }
    luce_sync();
#pragma unroll
    for (int i = 0; i < SCORE_QUERIES; i++) {
        int n = score_group + i * SCORE_GROUPS;
        if (key == 0 && n < tile.queries) {
            int head = (int)(query_index(tile, n, heads / kv_heads, heads) % heads);
            shared.keep[n] = with_sink(all_sum[i], all_top[i], sinks, head);
        }
    }
    luce_sync();
    if (column >= d) return;
#pragma unroll
    for (int i = 0; i < VALUE_QUERIES; i++) {
        int n = value_group + i * VALUE_GROUPS;
        if (n >= tile.queries) continue;
        float* to = out + query_index(tile, n, heads / kv_heads, heads) * d + column;
        to[0] = all_value[i][0] / shared.keep[n];
        to[1] = all_value[i][1] / shared.keep[n];
    }
}

// Grid: tiles, KV heads, splits from `base` on. For query i = row * heads + head and split s = base + z it writes
// values [i, z, d] and state [i, z] = (maximum, sum), the sum 0 where the query sees no key of the split.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_split(float* __restrict__ values, float2* __restrict__ state, const int base, ARGUMENTS) {
    luce_await();
    __shared__ Shared shared;
    Tile tile;
    if (!find_tile(tile, shared, PASSED)) return;
    int split = base + blockIdx.z, group = heads / kv_heads;
    if (split >= split_count(tile.count, tile.skew)) return;
    int key = threadIdx.x % KEYS, score_group = threadIdx.x / KEYS;
    int column = threadIdx.x % PAIRS * 2, value_group = threadIdx.x / PAIRS;
    float top[SCORE_QUERIES], sum[SCORE_QUERIES], value[VALUE_QUERIES][2];
    run_split(tile, shared, split, top, sum, value);
#pragma unroll
    for (int i = 0; i < SCORE_QUERIES; i++) {
        int n = score_group + i * SCORE_GROUPS;
        if (key != 0 || n >= tile.queries) continue;
        float2* to = state + query_index(tile, n, group, heads) * gridDim.z + blockIdx.z;
        to->x = top[i];
        to->y = sum[i];
    }
    if (column >= d) return;
#pragma unroll
    for (int i = 0; i < VALUE_QUERIES; i++) {
        int n = value_group + i * VALUE_GROUPS;
        if (n >= tile.queries) continue;
        float* to = values + (query_index(tile, n, group, heads) * gridDim.z + blockIdx.z) * d + column;
        to[0] = value[i][0];
        to[1] = value[i][1];
    }
}

// Grid: rows, heads; a thread has two columns. Folds splits base .. base + splits - 1 into `out` [row, head, d] and
// `total` [row, head] = (maximum, sum), which hold the splits before `base`; divides by the sum after the last.
extern "C" __global__ void __launch_bounds__(PAIRS)
    attention_fold(float* __restrict__ out, float2* __restrict__ total, const float* __restrict__ values,
                   const float2* __restrict__ state, const int base, const int splits, const int last,
                   const int* __restrict__ row_span, const int* __restrict__ first, const int* __restrict__ counts,
                   const int width, const int d, const float* __restrict__ sinks) {
    luce_await();
    int column = threadIdx.x * 2;
    int span = row_span[blockIdx.x];
    int end = luce_min(splits, split_count(counts[span], split_skew(first + (i64)span * width)) - base);
    i64 query = (i64)blockIdx.x * gridDim.y + blockIdx.y;
    float* to = out + query * d + column;
    float top = -LUCE_INF, sum = 0.0f, even = 0.0f, odd = 0.0f;
    if (base) {
        top = total[query].x;
        sum = total[query].y;
        // total is read by all threads and written by one.
        luce_sync();
        if (column < d) {
            even = to[0];
            odd = to[1];
        }
    }
    for (int split = 0; split < end; split++) {
        float2 next = state[query * splits + split];
        if (next.y == 0.0f) continue;
        float keep, take;
        fold(top, sum, next.x, next.y, keep, take);
        if (column >= d) continue;
        const float* from = values + (query * splits + split) * d + column;
        even = fold_value(even, from[0], keep, take);
        odd = fold_value(odd, from[1], keep, take);
    }
    if (!last && threadIdx.x == 0) {
        total[query].x = top;
        total[query].y = sum;
    }
    if (column >= d) return;
    if (last) sum = with_sink(sum, top, sinks, blockIdx.y);
    to[0] = last ? even / sum : even;
    to[1] = last ? odd / sum : odd;
}
