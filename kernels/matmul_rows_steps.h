// The steps of a block of matmul_rows_wgmma.cu, which defines FEATURES, ROWS, GROUP_ROWS and GROUPS: which unit of which chain
// of which tile it multiplies next.
#pragma once
#include "quantise.h"

// What a launch multiplies. Rows have 1 << bits chains. `turns`: tiles that share weights, neighbours. Items are `whole`
// tiles; then the first `together` chains of the `split` others; then the other chains of these, `together` at a time, each
// of which is an own result.
struct Product {
    const u8* weight;
    const u8* x;
    float* out;
    float* chains;
    int n, rows, units, bits, turns, whole, split, together, items, out_stride, first;
    // Chains of a split tile that are results of their own.
    __device__ __forceinline__ int own_chains() const { return (1 << bits) - together; }
};

// A unit of an item. `begun`: the first of the chains that are added up, `end`: behind the last; `turn`: which ROWS rows of
// x. `own`: the number among the chains that are own results, `own_end`: behind the item's last.
struct Step {
    int item, begun, chain, end, unit, turn, feature0, own, own_end;

    __device__ __forceinline__ void place(const Product& all, int tile, int from, int to) {
        begun = chain = unit = from, end = to;
        turn = tile % all.turns, feature0 = tile / all.turns * FEATURES;
    }
    __device__ __forceinline__ void place_own(const Product& all) {
        const int from = all.together + own % all.own_chains();
        place(all, all.whole + own / all.own_chains(), from, from + 1);
    }
    __device__ __forceinline__ void begin(const Product& all, int next) {
        const int part = next - all.whole - all.split;
        item = next, own = own_end = 0;
        if (part < 0) return place(all, next, 0, next < all.whole ? 1 << all.bits : all.together);
        if (!exists(all)) return;
        own = part * all.together, own_end = luce_min(own + all.together, all.split * all.own_chains());
        place_own(all);
    }
    __device__ __forceinline__ bool exists(const Product& all) const { return item < all.items; }
    __device__ __forceinline__ bool ends_chain(const Product& all) const { return unit + (1 << all.bits) >= all.units; }
    __device__ __forceinline__ void next(const Product& all) {
        const bool last = ends_chain(all);
        unit += 1 << all.bits;
        if (!last) return;
        unit = ++chain;
        if (chain < end) return;
        if (++own < own_end)
            place_own(all);
        else
            begin(all, item + (int)gridDim.x);
    }
    // A section of 32 rows of x, the step's first.
    __device__ __forceinline__ const u8* section(const Product& all, int group) const {
        // Rows beyond the last group repeat it, and their results are not written.
        const int at = luce_min(turn * GROUPS + group, (all.n - 1) / GROUP_ROWS);
        return all.x + (i64)(at * all.units + unit) * (2 * section_bytes(GROUP_ROWS, true));
    }
};

// What the waves that multiply know of a step. `sum`: which of a split tile's results its chain is added to.
struct alignas(16) Told {
    int exists, ends_chain, unit, whole, follows, ends, sum, row0, feature0;
    __device__ __forceinline__ void tell(const Product& all, const Step& step) {
        exists = step.exists(all), ends_chain = step.ends_chain(all), unit = step.unit;
        whole = step.item < all.whole, follows = step.chain > step.begun, ends = step.chain + 1 == step.end;
        sum = luce_max(step.chain - all.together + 1, 0), row0 = step.turn * ROWS, feature0 = step.feature0;
    }
};
