// Sums of products of quantised weight rows with quantised rows of x: the inner loop of matmul_s8.cu and moe_s8.cu.
//
// A weight row's units are dealt to chains, unit u to chain u % chains, and a unit's groups to four sets. Each set of
// each chain is one sum, over its units and their groups in order; then sets are added as (0 + 2) + (1 + 3), and chains
// in order. The columns alone decide how many chains there are. The sum of a group's integer products is exact, and
// both paths do the same float operations with it: so a row's result has the same bits for every count of rows, on
// tensor cores and without, on every target.
//
// 32 neighbouring threads, a worker, take one chain of 16 weight rows, a tile; a thread has two rows and one set. Where
// the target has tensor cores, many rows of x go to these (mma_s8.h).
#ifndef DOT_S8_H
#define DOT_S8_H
#include "mma.h"
#include "quants_s8.h"
#include "reduce.h"

// Rows of x that are loaded before the wait for weights.
#define MOST_AHEAD 2

// Float bits of 1.5 * 2^23: an int32 that starts from here, and moves by less than 2^22, is a float of that much more.
#define MAGIC_BITS 0x4b400000
#define MAGIC 12582912.0f

// Quantised rows of x (see quantise.h): row r of block b lies at b * stride + r.
struct Rows8 {
    const i8* values;
    const float2* scales;
    int stride;
};

LUCE_FN Rows8 rows8(const i8* values, const float* scales, int stride, int first = 0) {
    return {values + (i64)first * 32, reinterpret_cast<const float2*>(scales) + first, stride};
}

// A row of a weight, the end of the memory that it lies in, and the rows of x that it meets, which a tile shares.
struct Meeting {
    const u8* row;
    const u8* end;
    Rows8 x;
};

// A group's integer products, counted from MAGIC_BITS, into a set's sum.
LUCE_FN void add_group(i32 products, float scale, float minimum, float2 x, float& sum) {
    const float scaled = fmaf(__uint_as_float((u32)products), scale, -MAGIC * scale);
    sum = fmaf(x.x, scaled, sum);
#if HAS_MINIMUM
    sum = fmaf(-minimum, x.y, sum);
#endif
}

// What a thread copies of a row's units, of all chains at a time: every `1 << bits`-th 16 bytes from its own on.
struct RowCopy {
    const u8* from;  // the row's first byte
    const u8* end;   // of the memory that it lies in
    int lane, bits;
    int bytes;       // of the row
};

// Copies the next `run` bytes of a row from byte `at` on to `to` + (their address % 16).
LUCE_FN void copy_run(u8* to, const RowCopy& copy, int at, int run) {
    const u8* from = copy.from + at;
    const int skew = ODD_UNITS ? (int)((u64)from & 15) : 0;
    const int limit = luce_min(run, copy.bytes - at) + skew + (ODD_UNITS ? 4 : 0);
    from += copy.lane * 16 - skew;
    to += copy.lane * 16;
    const int left = limit - copy.lane * 16;
#if ODD_UNITS
    if (from + (left + 15 & ~15) > copy.end) {
        // The last row's last units: what follows them is not ours to read.
#pragma unroll 1
        for (int i = 0; i / 16 * 16 << copy.bits < left; i += 2) {
            const int place = (i / 16 * 16 << copy.bits) + i % 16;
            const u8* own = from + place;
            *reinterpret_cast<u16*>(to + place) = own < copy.end ? *reinterpret_cast<const u16*>(own) : 0;
        }
        return;
    }
#endif
#pragma unroll
    for (int i = 0; i < (UNIT_BYTES + (ODD_UNITS ? 18 : 0) + 31) / 32; i++) {
        const int piece = i * 16 << copy.bits;
        if (piece < left) luce_copy16(to + piece, from + piece, true);
    }
}

// From one row's units to the next row's in shared memory. Four rows of a load of 16 bytes lie in different banks.
LUCE_FN int run_stride(int chains) {
    const int run = luce_ceil_div(chains * UNIT_BYTES + (ODD_UNITS ? 18 : 0), 16) * 16;
    return ODD_UNITS ? run : luce_ceil_div(run - 16, 32) * 32 + 16;
}

// How many groups of a set there are in a row of `cols` columns: fewer than all only where a unit may be cut short.
LUCE_FN int live_groups(int unit, int cols, int set) {
    return BLOCK == 32 ? luce_min(SET_GROUPS, cols / 32 - unit * BLOCKS32 - set_block(set, 0)) : SET_GROUPS;
}

// The values and scales of a row of x that meet one set of a unit.
struct SetRow {
    u32 words[SET_GROUPS][GROUP_WORDS];
    float2 scales[SET_GROUPS];
};

LUCE_FN SetRow load_row(const Rows8& x, int r, int unit, int cols, int set) {
    const i64 place = (i64)(unit * BLOCKS32 + set_block(set, 0)) * x.stride + r;
    const i8* values = x.values + place * 32 + set_word(set) * 4;
    const int groups = live_groups(unit, cols, set);
    SetRow row;
#pragma unroll
    for (int k = 0; k < SET_GROUPS; k++) {
        if (k >= groups) break;
#pragma unroll
        for (int word = 0; word < GROUP_WORDS; word += 4) {
            const uint4 four = *reinterpret_cast<const uint4*>(values + k * x.stride * 32 + word * 4);
            row.words[k][word] = four.x, row.words[k][word + 1] = four.y;
            row.words[k][word + 2] = four.z, row.words[k][word + 3] = four.w;
        }
        row.scales[k] = x.scales[place + k * x.stride];
    }
    return row;
}

// Adds to sum[i][r] the products of one set of a unit of row i of two with row r of x. `rows` are at hand already, if
// there are at most MOST_AHEAD.
template <int COUNT>
LUCE_FN void add_set(const Unit (&in)[2], const Rows8& x, const SetRow* rows, int unit, int cols, int set,
                     float (&sum)[2][COUNT]) {
    const int groups = live_groups(unit, cols, set);
    if (groups <= 0) return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 w[SET_GROUPS][GROUP_WORDS];
        float scale[SET_GROUPS], minimum[SET_GROUPS];
        set_words(in[i], set, groups, w);
        set_scales(in[i], set, groups, scale, minimum);
#pragma unroll
        for (int r = 0; r < COUNT; r++) {
            const SetRow row = COUNT <= MOST_AHEAD ? rows[r] : load_row(x, r, unit, cols, set);
#pragma unroll
            for (int k = 0; k < SET_GROUPS; k++) {
                if (k >= groups) break;
                i32 products = MAGIC_BITS;
#pragma unroll
                for (int word = 0; word < GROUP_WORDS; word++) {
                    products = luce_dot4((i32)w[k][word], (i32)row.words[k][word], products);
                }
                add_group(products, scale[k], minimum[k], row.scales[k], sum[i][r]);
            }
        }
    }
}

// From row to row of x in what block_sums returns: neither its writers nor its readers meet in a bank.
#define PARTIAL_STRIDE(features) ((features) + 4)

// The products of `tiles` times 16 weight rows with COUNT rows of x each, by 32 * tiles << bits threads; any more idle.
// Rows have 1 << bits chains. `meet(feature)` gives a Meeting. STAGES units of every row and chain are in flight or at
// work. Shared memory: STAGES * 16 * tiles * run_stride bytes or what the result takes. Returns, complete for all
// threads, partial[(chain * COUNT + r) * PARTIAL_STRIDE(16 * tiles) + feature].
template <int COUNT, int STAGES, typename Meet>
LUCE_FN float* block_sums(const Meet& meet, int tiles, int bits, int cols, u8* shared) {
    const int chains = 1 << bits, run = UNIT_BYTES << bits, units = whole_units(cols);
    const int worker = luce_thread() / 32, lane = luce_thread() % 32, g = lane / 4, t = lane % 4;
    const bool live = worker < tiles << bits;
    const int tile = luce_min(worker >> bits, tiles - 1) * 16, chain = worker & (chains - 1);
    const int stride = run_stride(chains), stage_bytes = 16 * tiles * stride;

    // Two threads per chain share a row.
    const int copied = luce_thread() >> (bits + 1);
    const Meeting source = meet(luce_min(copied, 16 * tiles - 1));
    const RowCopy mine = {source.row, source.end, luce_thread() & (2 * chains - 1), bits + 1, (int)row_bytes(cols)};
    u8* const to = shared + copied * stride;
    int put = 0, take = 0;  // offsets of the stages that are filled and read next
    const auto copy = [&](int unit) {
        if (unit < units && copied < 16 * tiles) copy_run(to + put, mine, unit * UNIT_BYTES, run);
        luce_copy_close();
        put = put == (STAGES - 1) * stage_bytes ? 0 : put + stage_bytes;
    };

    const Meeting upper = meet(tile + g), lower = meet(tile + g + 8);
    const Rows8 x = upper.x;
    const u8* const own = shared + (tile + g) * stride + (ODD_UNITS ? 0 : chain * UNIT_BYTES);
    const u32 low[2] = {(u32)(u64)upper.row, (u32)(u64)lower.row};
    float sum[2][COUNT] = {};

#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) copy(stage << bits);
    luce_await();  // weights alone were fetched so far
    for (int unit0 = 0; unit0 < units; unit0 += chains) {
        const int unit = unit0 + chain;
        SetRow rows[MOST_AHEAD];
        if (COUNT <= MOST_AHEAD && unit < units) {
            // Before the wait: these loads take as long.
#pragma unroll
            for (int r = 0; r < COUNT; r++) rows[r] = load_row(x, r, unit, cols, t);
        }
        luce_copy_wait<STAGES - 2>();
        luce_sync();  // this step's units are there, and nobody reads any more what is overwritten now
        copy(unit0 + (STAGES - 1 << bits));
        Unit in[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int skew = ODD_UNITS ? (int)(low[i] + (u32)unit0 * UNIT_BYTES & 15) + chain * UNIT_BYTES : 0;
            in[i] = {own + take + i * 8 * stride + (skew & ~3), (u32)(skew & 2) * 8};
        }
        take = take == (STAGES - 1) * stage_bytes ? 0 : take + stage_bytes;
        if (unit < units) add_set(in, x, rows, unit, cols, t, sum);
    }
    luce_release();
    luce_sync();  // the partial sums take the units' place

    float* const partial = reinterpret_cast<float*>(shared);
    float* const to_sum = partial + chain * COUNT * PARTIAL_STRIDE(16 * tiles) + tile + g;
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int r = 0; r < COUNT; r++) {
            const float total = luce_lane_sum<4>(sum[i][r]);
            if (live && t == 0) to_sum[r * PARTIAL_STRIDE(16 * tiles) + i * 8] = total;
        }
    }
    luce_sync();
    return partial;
}

// The sum of the chains of one result; `partial` points to the first one's, `step` is from chain to chain.
LUCE_FN float chain_sum(const float* partial, int bits, int step) {
    float sum = partial[0];
    for (int chain = 1; chain < 1 << bits; chain++) sum += partial[chain * step];
    return sum;
}

#endif
