// Sums of products of quantised weight rows with quantised rows of x: the inner loop of matmul_int8.cu and moe_int8.cu.
//
// A weight row's units are dealt to chains, unit u to chain u % chains. The sums of products of integers are exact:
// with INTEGER_SCALES those of 128 columns, a half of a unit and a section of x, as
//   scale * I - minimum * M  with I = sum over groups of the group's scale times the sum of q * x, and
//                            M = sum over blocks of the block's minimum times the sum of x,
// which times the section's scale is added to one of two sums of the chain, one for its units' first and one for their
// second halves. Else they are those of a block of 32, which has scales of its own in the weight and in x; each chain
// has a sum for each of the four sets that a unit's blocks fall into, over its units and their blocks in order. Then
// halves are added, or sets as (0 + 2) + (1 + 3), and chains in order. The columns alone determine the number of
// chains, and both paths do the same float operations: so a row's result has the same bits for every count of rows, on
// tensor cores and without, on every target.
//
// 32 neighbouring threads (a worker) have WORKER_ROWS weight rows with all CHAINS chains; a thread has two rows, one chain and
// one set. A worker copies what it multiplies, and waits for no other. On targets with tensor cores, these multiply many rows
// of x (mma_int8.h).
#ifndef DOT_INT8_H
#define DOT_INT8_H
#include "bulk.h"
#include "quantise.h"
#include "quants_int8.h"

// Most rows of x that are loaded before the wait for weights.
#define MOST_AHEAD 2

#if INTEGER_SCALES
// The integer results of a section.
LUCE_FN float section_value(i32 products, float minimums, float scale, float minimum) {
    const float value = scale * (float)products;
    return HAS_MINIMUM ? fmaf(-minimum, minimums, value) : value;
}
#else
// A block's integer products, counted from MAGIC_BITS, into a sum: times the weight's scale and x's.
LUCE_FN float add_block(i32 products, float scale, float x_scale, float sum) {
    return fmaf(x_scale, fmaf(__uint_as_float((u32)products), scale, -MAGIC * scale), sum);
}
#endif

// Quantised rows of x (see quantise.h): those from `first` of `padded` on.
struct Rows8 {
    const u8* data;
    int padded, first;
};

// Bytes of a row that a block quantises into its shared memory, as if it were the only one.
LUCE_FN int alone_bytes(int cols) { return luce_ceil_div(cols, SECTION) * section_bytes(1, INTEGER_SCALES); }

// A row of a weight, the end of its memory, and the rows of x that it is multiplied with, which a worker's rows share.
struct Operands {
    const u8* row;
    const u8* end;
    Rows8 x;
};

// From one row's units of a step to the next row's in shared memory: an odd number of 16 bytes, so that eight rows of 16
// bytes lie in different banks.
#define TILE_STRIDE ((CHAINS * UNIT_BYTES + (ODD_UNITS ? 18 : 0) + 15) / 16 * 16 | 16)
// Bytes of a row's next units, one for each chain, and the threads that copy them.
#define STEP_BYTES (CHAINS * UNIT_BYTES)
#define SHARE (2 * CHAINS)
// Rows of a worker.
#define WORKER_ROWS (16 / CHAINS)

// Of a thread's `left` bytes, whose pieces of 16 lie `step` bytes apart, a power of two: how many can be copied by whole
// pieces, as the memory behind a matrix may not be read. Copies a piece that crosses its `end` by halves, with zeros behind
// the end: one piece alone, as each half waits for the one before.
LUCE_FN int copy_end(u8* to, const u8* from, int left, const u8* end, int step) {
    if (from + (left + 15 & ~15) <= end) return left;
    const int whole = (int)(end - from) & ~15;
    if ((whole & step - 1) == 0) {
#pragma unroll 1
        for (int i = whole; i < left; i += 2)
            *reinterpret_cast<u16*>(to + i) = from + i < end ? *reinterpret_cast<const u16*>(from + i) : 0;
    }
    return whole;
}

// The rest of a row to copy, from this thread's first 16 bytes on.
struct TileCopy {
    const u8* from;
    int left;
};

// Copies the next STEP_BYTES of a row to `to` + (their address % 16). `thread`: which one of SHARE.
LUCE_FN void copy_step(u8* to, TileCopy& copy, int thread, const u8* end) {
    const int skew = ODD_UNITS ? (int)((u64)copy.from & 15) : 0;
    const u8* from = copy.from - skew;
    int left = luce_min(copy.left, STEP_BYTES - thread * 16) + skew + (ODD_UNITS ? 4 : 0);
    copy.from += STEP_BYTES;
    copy.left -= STEP_BYTES;
#if defined(__CUDA_ARCH__)
    // Otherwise the compiler derives both from the loop's counter again for each copy: 30 of 350 instructions.
    asm volatile("" : "+l"(copy.from), "+r"(copy.left));
#endif
    if (ODD_UNITS) left = copy_end(to, from, left, end, 16 * SHARE);
#pragma unroll
    for (int i = 0; i < STEP_BYTES + (ODD_UNITS ? 18 : 0); i += 16 * SHARE) {
        if (i < left) luce_copy16(to + i, from + i, true);
    }
}

// The groups of a set in a row of `cols` columns: fewer than all only if a unit may be cut short.
LUCE_FN int live_groups(int unit, int cols, int set) {
    return BLOCK == 32 ? luce_max(0, luce_min(SET_GROUPS, cols / 32 - (unit * 4 + set) * 2)) : SET_GROUPS;
}

// The values of a row of x for one set of a section, and their scales; the sums' lows and highs of the section.
struct SetRow {
    u32 words[SET_GROUPS][GROUP_WORDS];
    u32 low, high;
    float scale[INTEGER_SCALES ? 1 : SET_GROUPS];
};

LUCE_FN SetRow load_row(const u8* section, int row, int padded, int set) {
    SetRow own;
    const auto four = [](const u8* from, u32* to) {
        const uint4 all = *reinterpret_cast<const uint4*>(from);
        to[0] = all.x, to[1] = all.y, to[2] = all.z, to[3] = all.w;
    };
#if QTYPE == Q6_K
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const u8* values = section + values_place(k / 2, row, padded);
        if (in_eights(padded)) {
#pragma unroll
            for (int i = 0; i < 4; i++) own.words[k][i] = luce_u32_at4(values + i * 16 + k % 2 * 8 + set % 2 * 4);
        } else {
            four(values + k % 2 * 32 + set % 2 * 16, own.words[k]);
        }
    }
#else
    const u8* values = section + values_place(set % 2, row, padded);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (in_eights(padded)) {
            u32 words[4];
            four(values + i * 16, words);
            own.words[0][i] = words[0], own.words[0][i + 4] = words[1];
            own.words[1][i] = words[2], own.words[1][i + 4] = words[3];
        } else {
            four(values + i * 16, own.words[i / 2] + i % 2 * 4);
        }
    }
#endif
#if !INTEGER_SCALES
    const auto scale = [&](int k) { return section + block_scale_place(row, set % 2 * 2 + k, padded); };
    if (in_eights(padded)) {
        own.scale[0] = *reinterpret_cast<const float*>(scale(0));
        own.scale[1] = *reinterpret_cast<const float*>(scale(1));
    } else {
        const float2 two = *reinterpret_cast<const float2*>(scale(0));
        own.scale[0] = two.x, own.scale[1] = two.y;
    }
#else
    if (in_eights(padded)) {
        const uint2 sums = *reinterpret_cast<const uint2*>(section + sums_place(row, padded));
        own.low = sums.x, own.high = sums.y;
        own.scale[0] = *reinterpret_cast<const float*>(section + scale_place(row, padded));
    } else {
        const uint4 all = *reinterpret_cast<const uint4*>(section + sums_place(row, padded));
        own.low = all.x, own.high = all.y, own.scale[0] = __uint_as_float(all.z);
    }
#endif
    return own;
}

// One set of a unit of a weight row, of which the first `groups` groups count.
struct SetWeights {
    u32 words[SET_GROUPS][GROUP_WORDS];
#if INTEGER_SCALES
    SetScales scales;
#else
    float scales[SET_GROUPS];
#endif
};

LUCE_FN SetWeights load_set(const Unit& unit, int set, int groups) {
    SetWeights own;
    set_words(unit, set, groups, own.words);
#if INTEGER_SCALES
    own.scales = set_scales(unit, set);
#else
#pragma unroll
    for (int k = 0; k < SET_GROUPS; k++)
        if (k < groups) own.scales[k] = block_scale(unit, set * SET_GROUPS + k);
#endif
    return own;
}

// Adds to `sum` the products of the first `groups` groups of a set, with INTEGER_SCALES those of a section, half of
// which is the neighbouring lane's. All lanes of the wave must call it.
LUCE_FN void add_row(const SetWeights& w, const SetRow& row, int groups, float& sum) {
#if INTEGER_SCALES
    i32 products = 0, minimums = 0;
#pragma unroll
    for (int k = 0; k < SET_GROUPS; k++) {
        i32 group = 0;
#pragma unroll
        for (int word = 0; word < GROUP_WORDS; word++) {
            const u32 numbers = w.words[k][word];
            const i32 values = (i32)row.words[k][word];
            group = HIGH_NIBBLES && k ? luce_dot4_high(numbers, values, group) : luce_dot4((i32)numbers, values, group);
        }
        products += (HIGH_NIBBLES && k ? group >> 4 : group) * w.scales.groups[k];
    }
#if HAS_MINIMUM
    minimums = luce_dot4((i32)w.scales.minimums, (i32)row.high, 0) * 32;
    minimums = luce_dot4((i32)w.scales.minimums, (i32)row.low, minimums);
#endif
    products += luce_shfl_xor(products, 1);
    const float next = fmaf(row.scale[0], section_value(products, (float)minimums, w.scales.scale, w.scales.minimum), sum);
    if (groups > 0) sum = next;
#else
#pragma unroll
    for (int k = 0; k < SET_GROUPS; k++) {
        if (k >= groups) break;
        i32 products = MAGIC_BITS;
#pragma unroll
        for (int word = 0; word < GROUP_WORDS; word++)
            products = luce_dot4((i32)w.words[k][word], (i32)row.words[k][word], products);
        sum = add_block(products, w.scales[k], row.scale[k], sum);
    }
#endif
}

// The same for two weight rows and COUNT rows of `x`, which are loaded in `rows` already if there are at most MOST_AHEAD.
template <int COUNT>
LUCE_FN void add_set(const Unit (&in)[2], const Rows8& x, const u8* section, const SetRow* rows, int groups, int set,
                     float (&sum)[2][COUNT]) {
    if (!INTEGER_SCALES && groups <= 0) return;
    if constexpr (COUNT <= MOST_AHEAD) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const SetWeights w = load_set(in[i], set, groups);
#pragma unroll
            for (int r = 0; r < COUNT; r++) add_row(w, rows[r], groups, sum[i][r]);
        }
    } else {
        const SetWeights w[2] = {load_set(in[0], set, groups), load_set(in[1], set, groups)};
#pragma unroll
        for (int r = 0; r < COUNT; r++) {
            const SetRow row = load_row(section, x.first + r, x.padded, set);
#pragma unroll
            for (int i = 0; i < 2; i++) add_row(w[i], row, groups, sum[i][r]);
        }
    }
}

// Stride between rows of x in the result of block_sums: neither its writers nor its readers share a bank.
#define PARTIAL_STRIDE(features) ((features) + 4)

// Whether each row of a worker comes by one bulk copy a step, or by many small ones; the most workers of a block then.
#define BY_BULK (LUCE_WGMMA && CHAINS >= 4)
#define BULK_WORKERS 16

#if BY_BULK
// A worker's copies of rows, one row a lane, for STAGES steps in flight.
template <int STAGES> struct RowCopies {
    Bulk* arrived;
    int rows;

    // Before luce_await; `rows`: the worker's, 0 if it has none.
    __device__ __forceinline__ RowCopies(int rows) : rows(rows) {
        // Dynamic shared memory lies behind it: 64 bytes off, three tiles of 16 rows take 24.5 us instead of 22.3.
        __shared__ Bulk all[BULK_WORKERS][STAGES];
        static_assert(sizeof(all) % 128 == 0, "the units begin at a multiple of 128");
        arrived = all[luce_thread() / 32];
        if (rows > 0 && luce_lane() == 0) {
#pragma unroll
            for (int stage = 0; stage < STAGES; stage++) luce_bulk_begin(&arrived[stage], rows);
            luce_bulk_ready();
        }
        luce_sync_lanes();
    }
    // Copies a row's next STEP_BYTES, or what is left of them, to `to` + (their address % 16).
    __device__ __forceinline__ void copy(u8* to, TileCopy& copy, const u8* end, int stage) const {
        if (luce_lane() >= rows) return;
        const int skew = ODD_UNITS ? (int)((u64)copy.from & 15) : 0;
        const u8* from = copy.from - skew;
        int size = luce_min(copy.left, STEP_BYTES) + skew + (ODD_UNITS ? 4 : 0);
        copy.from += STEP_BYTES;
        copy.left -= STEP_BYTES;
        if (ODD_UNITS) size = copy_end(to, from, size, end, 16) + 15 & ~15;
        luce_bulk_load(to, from, size, &arrived[stage]);
    }
    // Until those to `stage` have arrived, the `turn`-th time.
    __device__ __forceinline__ void wait(int stage, int turn) const {
        if (rows > 0) luce_bulk_wait(&arrived[stage], turn);
    }
};
#endif

// The products of `features` weight rows, a multiple of WORKER_ROWS, with COUNT rows of x each, by as many workers; the rest of
// the last wave idles. `operands(feature)` returns Operands. STAGES units of every row and chain are in flight or in use. Every thread
// calls `prepare` when earlier kernels' results can be read, before x is. Shared memory: STAGES * features * TILE_STRIDE bytes
// or what the result takes. Returns, complete for all threads, partial[(chain * COUNT + r) * PARTIAL_STRIDE(features) + feature].
template <int COUNT, int STAGES, typename Source, typename Prepare>
LUCE_FN float* block_sums(const Source& operands, int features, int cols, u8* shared, const Prepare& prepare) {
    const int units = whole_units(cols), workers = features / WORKER_ROWS, stage_bytes = features * TILE_STRIDE;
    const int worker = luce_thread() / 32, lane = luce_thread() % 32, g = lane / 4, t = lane % 4;
    const bool live = worker < workers;
    shared = luce_held(shared);
    const int chain = g % CHAINS, feature = luce_min(worker, workers - 1) * WORKER_ROWS + g / CHAINS;

#if BY_BULK
    const RowCopies<STAGES> arrived(live ? WORKER_ROWS : 0);
    const int copied = worker * WORKER_ROWS + lane % WORKER_ROWS, share = 0;
#else
    const int copied = luce_thread() / SHARE, share = luce_thread() % SHARE;
#endif
    const Operands source = operands(luce_min(copied, features - 1));
    TileCopy mine = {source.row + share * 16, (int)row_bytes(cols) - share * 16};
    u8* const to = shared + copied * TILE_STRIDE + share * 16;
    const auto copy = [&](int unit, int stage) {
#if BY_BULK
        if (unit < units) arrived.copy(to + stage * stage_bytes, mine, source.end, stage);
#else
        if (unit < units && live) copy_step(to + stage * stage_bytes, mine, share, source.end);
        luce_copy_close();
#endif
    };

    const Operands upper = operands(feature), lower = operands(feature + 8 / CHAINS);
    const Rows8 x = upper.x;
    const int section = section_bytes(x.padded, INTEGER_SCALES);
    int met = (chain * 2 + t / 2) * section;  // where this step has its section of x
    const u8* const own = shared + feature * TILE_STRIDE;
    u32 skew[2] = {(u32)(u64)upper.row % 16, (u32)(u64)lower.row % 16};
    float sum[2][COUNT] = {};

#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) copy(stage * CHAINS, stage);
    luce_await();  // until here, only weights were fetched
    prepare();
    int take = 0, turn = 0;  // the stage that is read next, and how often it has been
#pragma unroll 1
    for (int unit0 = 0; unit0 < units; unit0 += CHAINS) {
        const int unit = unit0 + chain;
        SetRow rows[MOST_AHEAD];
        const int groups = unit < units ? live_groups(unit, cols, t) : 0;
        // Lanes without a unit take part with the first chain's, and add nothing.
        const u8* const at = x.data + (groups > 0 ? met : 0);
        const int begin = groups > 0 ? chain * UNIT_BYTES : 0;
        if (COUNT <= MOST_AHEAD) {
            // Before the wait: these loads have the same latency.
#pragma unroll
            for (int r = 0; r < COUNT; r++) rows[r] = load_row(at, x.first + r, x.padded, t);
        }
#if BY_BULK
        arrived.wait(take, turn);
#else
        luce_copy_wait<STAGES - 2>();
#endif
        luce_sync_lanes();  // this step's units have arrived, and the units overwritten next have been read
        copy(unit0 + (STAGES - 1) * CHAINS, take == 0 ? STAGES - 1 : take - 1);
        Unit in[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int from = begin + (ODD_UNITS ? (int)skew[i] : 0);
            in[i].at = own + take * stage_bytes + i * (8 / CHAINS) * TILE_STRIDE + (from & ~3);
            in[i].shift = (u32)(from & 2) * 8;
            if (STEP_BYTES % 16) skew[i] = (skew[i] + STEP_BYTES) % 16;
        }
        turn += take == STAGES - 1;
        take = take == STAGES - 1 ? 0 : take + 1;
        add_set(in, x, at, rows, groups, t, sum);
        met += 2 * CHAINS * section;
    }
    luce_release();
    luce_sync();  // the partial sums take the units' place

    float* const partial = reinterpret_cast<float*>(shared);
    float* const to_sum = partial + chain * COUNT * PARTIAL_STRIDE(features) + feature;
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int r = 0; r < COUNT; r++) {
            const float total = INTEGER_SCALES ? sum[i][r] + luce_shfl_xor(sum[i][r], 2) : luce_lane_sum<4>(sum[i][r]);
            if (live && t == 0) to_sum[r * PARTIAL_STRIDE(features) + i * (8 / CHAINS)] = total;
        }
    }
    luce_sync();
    return partial;
}

// The sum of the chains of one result; `partial` points to the first one's, `step` is from chain to chain.
LUCE_FN float chain_sum(const float* partial, int step) {
    float sum = partial[0];
#pragma unroll
    for (int chain = 1; chain < CHAINS; chain++) sum += partial[chain * step];
    return sum;
}

#endif
