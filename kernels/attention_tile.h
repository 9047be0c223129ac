// A tile of queries for the kernels that multiply 16-bit tiles, the pages that its span sees, and the copies of both to
// shared memory. A tile is QUERIES queries of one span that share a KV head: query q of a span belongs to row q / group
// and to query head q % group of the KV head.
#pragma once
#include "attention.h"
#include "mma.h"

// The softmax is taken to the base 2: queries are multiplied by the scale and by this.
#define LOG2_E 1.44269504f
// Weights are multiplied by 2^15, so that weights of 2^-29 and more are normal fp16 numbers; so is the sum that divides
// them.
#define WEIGHT_SHIFT 15.0f

// The 16-bit type in which a pool's values are multiplied: fp16, or bfloat16 for values that may exceed its range.
struct Halves {
    typedef f16_t Element;
    KV_FN void multiply(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) { luce_mma_f16(c, a, b); }
    KV_FN u32 pair(float low, float high) { return luce_f16_pair(low, high); }
};
struct BrainHalves {
    typedef bf16_t Element;
    KV_FN void multiply(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) { luce_mma_bf16(c, a, b); }
    KV_FN u32 pair(float low, float high) { return luce_bf16_pair(low, high); }
};
template <typename T> struct Product {
    typedef Halves Type;
};
template <> struct Product<BF16> {
    typedef BrainHalves Type;
};
typedef Product<KTYPE>::Type Scores;
typedef Product<VTYPE>::Type Values;

// A matrix of 16-bit numbers in shared memory is panels of 64 columns, rows of 128 bytes one after the other. The eight
// chunks of a row are permuted by its number: what a matrix load reads at once, the same chunk of eight rows, lies in
// different banks.
LUCE_FN int chunk_at(int rows, int row, int chunk) { return ((chunk / 8 * rows + row) * 8 + ((chunk ^ row) & 7)) * 16; }

// With SEEN, the view lists the rows of a span that each row sees: a tile reads the keys that the span's last row would
// see with a window that reaches as far back as the first row's, and `mask` hides the keys that a row does not see.
struct Tile {
    const KTYPE::Element* k_pool;  // at the KV head's columns
    const VTYPE::Element* v_pool;
    i64 row;  // values from one pool row to the next
#if MAPPED
    const TensorMap *k_map, *v_map;
#endif
    const int* pages;
    const int* first;
    int count;
    int low, high;  // positions of the tile's first and last row
    int window;
    int d;
    int group;
    int start, position;  // of the span: its first row in the step, and that row's position
    int query;            // of the span, query 0
    int queries;          // of QUERIES, those that exist
#ifdef SEEN
    int own_window;
    const int* positions;  // of the step's rows, and the rows of their span that they see
    const int* seen;
#endif
#ifdef SOFTCAP
    float cap;  // of scores to the base 2
#endif
};

// The first of a span's pages whose position is at least `position`, a multiple of PAGE.
LUCE_FN int entry_at(const Tile& tile, int position) {
    // If no page is missing it is this one, else an earlier one.
    int high = luce_min(tile.count, luce_max(0, position - tile.first[0]) / PAGE), low = 0;
    if (high == 0 || tile.first[high - 1] < position) return high;
    while (low < high) {
        int middle = (low + high) / 2;
        if (tile.first[middle] < position)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// Eight values of a pool to be copied to shared memory. The hardware copies floats; quantised values are loaded, some
// at a time, and converted to fp16.
template <typename T> LUCE_FN void load_chunk(KVFloat<T>, u32 (&)[4], const T*, int, bool) {}
template <typename T> LUCE_FN void store_chunk(KVFloat<T>, u8* to, const u32 (&)[4], const T* from, bool there) {
    luce_copy16(to, from, there);
}

template <typename T> LUCE_FN void load_chunk(T, u32 (&words)[4], const u8* from, int column, bool there) {
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = 0;
    if (there) T::load(from, column, words);
}
LUCE_FN u32 halves(Q8_0, u32 word) { return luce_f16_scaled(word ^ 0x80800000u, 128); }
LUCE_FN u32 halves(Q4_0, u32 word) { return luce_f16_scaled(word, 8); }
template <typename T> LUCE_FN void store_chunk(T, u8* to, const u32 (&words)[4], const u8*, bool) {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(halves(T(), words[0]), halves(T(), words[1]), halves(T(), words[2]), halves(T(), words[3]));
}

#ifdef SEEN
#define SEEN_ARGUMENTS , const int *__restrict__ positions, const int *__restrict__ seen
#define SEEN_PASSED , positions, seen
#else
#define SEEN_ARGUMENTS
#define SEEN_PASSED
#endif
#define ARGUMENTS                                                                                                    \
    const float *__restrict__ q, const i64 q_row, const i64 q_head, const KTYPE::Element *__restrict__ k_pool,       \
        const VTYPE::Element *__restrict__ v_pool, const int *__restrict__ spans, const int span_count,              \
        const int *__restrict__ table, const int *__restrict__ first, const int *__restrict__ counts,                \
        const int width, const int heads, const int kv_heads, const int d,        \
        const float scale, const int window, const int few SEEN_ARGUMENTS CAP_ARGUMENTS
#define PASSED                                                                                                        \
    q, q_row, q_head, k_pool, v_pool, spans, span_count, table, first, counts, width, heads, kv_heads, d, \
        scale, window, few SEEN_PASSED CAP_PASSED

// The tile of the queries from `query` on of a span, whose slot, start, rows and position are `place`.
LUCE_FN Tile make_tile(ARGUMENTS, const int span, const int4 place, const int query) {
    Tile tile;
    tile.k_pool = k_pool + KTYPE::offset((i64)blockIdx.y * d);
    tile.v_pool = v_pool + VTYPE::offset((i64)blockIdx.y * d);
    tile.row = (i64)kv_heads * d;
    tile.pages = table + (i64)span * width;
    tile.first = first + (i64)span * width;
    tile.count = counts[span];
    tile.window = window;
    tile.d = d;
    tile.group = heads / kv_heads;
#ifdef SOFTCAP
    tile.cap = cap * LOG2_E;
#endif
    tile.start = place.y;
    tile.position = place.w;
    tile.query = query;
    tile.queries = luce_min(QUERIES, place.z * tile.group - query);
#ifdef SEEN
    tile.low = tile.high = place.w + place.z - 1;
    tile.window += place.z - 1;
    tile.own_window = window;
    tile.positions = positions + place.y;
    tile.seen = seen + place.y * 2;
#else
    tile.low = place.w + query / tile.group;
    tile.high = place.w + (query + tile.queries - 1) / tile.group;
#endif
    return tile;
}

// The row in the span, its position and the head of query `q`, which may lie beyond the tile's queries.
LUCE_FN int query_row(const Tile& tile, int q) { return (tile.query + q) / tile.group; }
#ifdef SEEN
LUCE_FN int position(const Tile& tile, int q) { return tile.high; }
#else
LUCE_FN int position(const Tile& tile, int q) { return tile.position + query_row(tile, q); }
#endif
LUCE_FN int query_head(const Tile& tile, int q) { return blockIdx.y * tile.group + (tile.query + q) % tile.group; }

// Whether every row sees every key of the page whose first key stands at `at`.
LUCE_FN bool all_seen(const Tile& tile, int at) {
#ifdef SEEN
    return at + PAGE <= tile.position && at > tile.high - tile.own_window;
#else
    return at + PAGE - 1 <= tile.low && at > tile.high - tile.window;
#endif
}

// Eight numbers of a query; `wide`: all addresses are multiples of 16 bytes.
LUCE_FN void load_query(float (&to)[8], const float* from, bool wide) {
    if (wide) {
#pragma unroll
        for (int j = 0; j < 8; j += 4) {
            const float4 four = *reinterpret_cast<const float4*>(from + j);
            to[j] = four.x, to[j + 1] = four.y, to[j + 2] = four.z, to[j + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) to[j] = from[j];
    }
}

// Where the step's queries are, and their factor.
struct Queries {
    const float* q;
    i64 row, head;  // floats from one to the next
    float scale;
};

// By the block's first LOADING threads.
LUCE_FN void load_queries(const Tile& tile, u8* to, const Queries& queries) {
    // Loads that start before the first wait.
    const int BATCH = QUERIES * HEAD / 8 / LOADING < 4 ? QUERIES * HEAD / 8 / LOADING : 4;
    static_assert(QUERIES * HEAD / 8 % (BATCH * LOADING) == 0, "whole batches");
    const bool wide = (reinterpret_cast<u64>(queries.q) | (u64)(queries.row | queries.head) * 4) % 16 == 0;
#pragma unroll 1
    for (int first = threadIdx.x; first < QUERIES * HEAD / 8; first += BATCH * LOADING) {
        float own[BATCH][8] = {};
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            int i = first + b * LOADING, n = i / (HEAD / 8), chunk = i % (HEAD / 8);
            if (n >= tile.queries || chunk * 8 >= tile.d) continue;
            i64 row = tile.start + query_row(tile, n);
            load_query(own[b], queries.q + row * queries.row + query_head(tile, n) * queries.head + chunk * 8, wide);
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            int i = first + b * LOADING, n = i / (HEAD / 8), chunk = i % (HEAD / 8);
            u32 words[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                words[j] = Scores::pair(own[b][2 * j] * queries.scale, own[b][2 * j + 1] * queries.scale);
            *reinterpret_cast<uint4*>(to + chunk_at(QUERIES, n, chunk)) =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}
