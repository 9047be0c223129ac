// variants for cuda: QTYPE=Q4_K,Q5_K,Q6_K ROWS=32,64
//
// Products of a quantised weight matrix with more than 16 quantised rows of x, as matmul_rows.cu, by groups of four waves
// (wgmma_rows.h): the sums of dot_int8.h, so a row has the bits that it has alone.
//
// A section's sum of integers comes from fp16 products without an error (quants_fp16_exact.h). So group scales cost one
// product for two weights, and no integer becomes a float.
//
// A tile is of FEATURES weight rows and ROWS rows of x; a block takes one item after the other, a tile or one of its chains.
// It goes through the units of one chain, then through those of the next, so that only two sums of a result are in
// registers. While eight waves multiply a step's unit, eight others make fp16 of the next one's x, and bring the weights of
// the one behind it.
#include "quantise.h"
#include "quants_fp16_exact.h"
#include "wgmma_rows.h"

#define GROUP_ROWS 32                     // rows of x that lie together
#define GROUPS (ROWS / GROUP_ROWS)        // of a tile
#define FEATURES 128                      // two groups of four waves, 64 each
#define MULTIPLYING 256                   // threads of these groups
#define FETCHING 256                      // threads behind them, which bring the operands
#define THREADS (MULTIPLYING + FETCHING)
// Registers of either. Together they may take what a block of THREADS threads begins with.
#define MULTIPLYING_REGISTERS (QTYPE == Q4_K ? 200 : 208)
#define FETCHING_REGISTERS (QTYPE == Q4_K ? 56 : 48)
#define EIGHTS (ROWS / 8)
#define PANEL (ROWS * 128)                // bytes of 64 columns of a tile's x
// 16-byte pieces around a unit, which may begin at any even byte with Q6_K; and from one row to the next in shared memory: an
// odd number of 16 bytes, so that eight rows of 16 bytes lie in different banks.
#define PIECES ((UNIT_BYTES + (ODD_UNITS ? 14 : 0) + 15) / 16)
#define STRIDE (PIECES * 16 | 16)
// 16-byte pieces of a unit's x that a thread makes fp16, and threads that share 64 columns of a row.
#define X_PIECES (ROWS * 16 / FETCHING)
#define X_SHARE (4 / X_PIECES)
// What follows a section's values: the sums as fp16, where there are minimums, and the scales (quantise.h).
#define FACTS (GROUP_ROWS * (HAS_MINIMUM ? 20 : 4))
#define FACTS_PLACE (section_bytes(GROUP_ROWS, true) - FACTS)

#if LUCE_WGMMA
#include "matmul_rows_steps.h"

// Of the threads that multiply; the remainders tell the compiler how large these are. And of those that fetch.
LUCE_FN int own_thread() { return (int)(threadIdx.x % MULTIPLYING); }
LUCE_FN int own_fetching() { return (int)(threadIdx.x % FETCHING); }
LUCE_FN int own_wave() { return own_thread() / 32; }
LUCE_FN int own_lane() { return own_thread() % 32; }

struct Shared {
    // Panels of a step. Three: a wave may still multiply those of the step before while those of the next are filled.
    alignas(1024) u8 x[3][4][PANEL];
    u8 weights[3][FEATURES * STRIDE];
    // Four, as those of a step's second section are read in the step behind it.
    u8 facts[4][2][GROUPS][FACTS];
    float totals[ROWS / 2][MULTIPLYING];  // of the chains so far; each thread has its own
    Told told[4];
};

// A unit of each row, to its address % 16. Neighbouring threads copy neighbouring pieces, as a unit's bytes cross sectors.
LUCE_FN void copy_weights(const Product& all, const Step& step, u8* to) {
    constexpr int COPIED = FETCHING / PIECES;  // rows at a time
    const int thread = own_fetching(), row = thread / PIECES, row_size = all.units * UNIT_BYTES;
    if (thread >= COPIED * PIECES) return;
    const u8* const first = all.weight + (i64)step.feature0 * row_size;
    const int skew = ODD_UNITS ? (int)((u64)first & 15) : 0;
    const u8* const from = first - skew;
    const u32 at = (u32)(step.unit * UNIT_BYTES + skew), piece = (u32)(thread % PIECES * 16);
    // Features beyond the last repeat it, and their results are not written.
    const auto place = [&](int i) {
        const int feature = luce_min(row + i, all.rows - 1 - step.feature0);
        const u32 own = at + (u32)(feature * row_size);
        return (ODD_UNITS ? own & ~15u : own) + piece;
    };
    to += row * STRIDE + (int)piece;
#if ODD_UNITS
    if (step.unit + 1 == all.units && step.feature0 + FEATURES >= all.rows) {
        // The memory behind the last row's last unit may not be read: a piece that crosses its end comes by halves.
        const u32 size = (u32)((all.rows - step.feature0) * row_size + skew);
#pragma unroll 1
        for (int i = 0; i < FEATURES - row; i += COPIED) {
            const u32 own = place(i);
            if (own + 16 <= size) {
                luce_copy16(to + i * STRIDE, from + own, true);
                continue;
            }
#pragma unroll 1
            for (u32 k = 0; k < 16; k += 2)
                *reinterpret_cast<u16*>(to + i * STRIDE + k) =
                    own + k < size ? *reinterpret_cast<const u16*>(from + own + k) : 0;
        }
        return;
    }
#endif
#pragma unroll
    for (int i = 0; i < FEATURES; i += COPIED)
        if (row + i < FEATURES) luce_copy16(to + i * STRIDE, from + place(i), true);
}

LUCE_FN void copy_facts(const Product& all, const Step& step, u8* to) {
#pragma unroll
    for (int i = 0; i < 2 * GROUPS * (FACTS / 16); i += FETCHING) {
        const int piece = own_fetching() + i;
        const int group = piece / (FACTS / 16) % GROUPS, section = piece / (FACTS / 16) / GROUPS;
        if (section >= 2) break;
        luce_copy16(to + piece * 16,
                    step.section(all, group) +
                        (section * section_bytes(GROUP_ROWS, true) + FACTS_PLACE + piece % (FACTS / 16) * 16),
                    true);
    }
}

// Where a thread's part of a unit's x is: 64 columns of a row, or half of the words of each 16 of them.
struct XPart {
    int row, panel, half;
    __device__ __forceinline__ XPart()
        : row(own_fetching() / X_SHARE % ROWS), panel(own_fetching() / X_SHARE / ROWS), half(own_fetching() % X_SHARE) {}
};

LUCE_FN void load_x(const Product& all, const Step& step, uint4 (&raw)[X_PIECES]) {
    const XPart own;
    const u8* const from = step.section(all, own.row / GROUP_ROWS) + own.panel / 2 * section_bytes(GROUP_ROWS, true) +
                           values_place(own.panel % 2, own.row % GROUP_ROWS, GROUP_ROWS) + own.half * (X_PIECES * 16);
#pragma unroll
    for (int i = 0; i < X_PIECES; i++) raw[i] = *reinterpret_cast<const uint4*>(from + i * 16);
}

// The signed bytes 0 and 2 of a word as fp16, or 1 and 3, times 2^-9; their highest bits come flipped. As bits of a subnormal
// number a byte takes one instruction less than below the high byte of 1024.
LUCE_FN u32 byte_pair(u32 flipped, int odd) {
#if defined(__CUDA_ARCH__)
    u32 pair = __byte_perm(flipped, 0, odd ? 0x4341u : 0x4240u);
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(pair), "r"(0x78007800u), "r"(0xb400b400u));  // 2^15, -1 / 4
    return pair;
#else
    const auto byte = [&](int i) { return (float)((int)(flipped >> (i + odd) * 8 & 255) - 128) * 0x1p-9f; };
    return luce_f16_pair(byte(0), byte(2));
#endif
}

// A thread's part of a unit's x as fp16. A product of 16 places takes from each of the words of 16 columns, in the place of a
// lane, bytes 0 and 2 first, then 1 and 3: so a word of weights is two pairs. With Q6_K the place of a lane has words of 16
// columns of its own, one in each product.
LUCE_FN void store_x(const uint4 (&raw)[X_PIECES], u8 (&panels)[4][PANEL]) {
    const XPart own;
    // Chunk c of the row is at ^ 16 c.
    const int row = own.panel * PANEL + own.row * 128 + own.row % 8 * 16;
    const int at = HAS_MINIMUM ? row + own.half * (X_PIECES * 4) : row ^ own.half * (X_PIECES * 32);
    const auto word = [&](int piece, int k) {
        return (k == 0 ? raw[piece].x : k == 1 ? raw[piece].y : k == 2 ? raw[piece].z : raw[piece].w) ^ 0x80808080u;
    };
    constexpr int STEPS = HAS_MINIMUM ? 4 : X_PIECES, WORDS = HAS_MINIMUM ? X_PIECES : 4;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        u32 flipped[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; i++) flipped[i] = HAS_MINIMUM ? word(i, step) : word(step, i);
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            u32 pairs[WORDS];
#pragma unroll
            for (int i = 0; i < WORDS; i++) pairs[i] = byte_pair(flipped[i], odd);
            u8* const to = panels[0] + (at ^ (step * 2 + odd) * 16);
            if constexpr (WORDS == 4)
                *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            else
                *reinterpret_cast<uint2*>(to) = make_uint2(pairs[0], pairs[1]);
        }
    }
}

// Brings the operands of all steps.
LUCE_FN void fetch_rows(const Product& all, Shared& shared) {
    const bool tells = own_fetching() == 0;
    Step ahead;
    ahead.begin(all, (int)blockIdx.x);
    if (tells) shared.told[0].tell(all, ahead);
    copy_weights(all, ahead, shared.weights[0]);
    const Step first = ahead;
    ahead.next(all);
    if (tells) shared.told[1].tell(all, ahead);
    if (ahead.exists(all)) copy_weights(all, ahead, shared.weights[1]);
    luce_await();  // until here, only weights were fetched
    uint4 raw[X_PIECES];
    load_x(all, first, raw);
    copy_facts(all, first, shared.facts[0][0][0]);
    luce_copy_close();
    if (ahead.exists(all)) copy_facts(all, ahead, shared.facts[1][0][0]);
    luce_copy_close();
    store_x(raw, shared.x[0]);

    // Turn `count` ends when all operands of that step are there.
    int slot = 0;
#pragma unroll 1
    for (int count = 0;; count++) {
        luce_wgmma_share();  // before the loads, for which it would wait
        const bool more = ahead.exists(all);
        if (more) load_x(all, ahead, raw);
        luce_copy_wait<1>();
        luce_sync_waves();
        if (!more) break;
        // While that step is multiplied.
        slot = slot == 2 ? 0 : slot + 1;
        ahead.next(all);
        if (ahead.exists(all)) {
            copy_weights(all, ahead, shared.weights[slot == 2 ? 0 : slot + 1]);
            copy_facts(all, ahead, shared.facts[count + 2 & 3][0][0]);
        } else {
            luce_release();
        }
        luce_copy_close();
        if (tells) shared.told[count + 2 & 3].tell(all, ahead);
        store_x(raw, shared.x[slot]);
    }
    luce_sync_waves();
}

// Starts the products of a span's 64 columns, added to `sum` or to nothing.
LUCE_FN void multiply_span(float (&sum)[EIGHTS][4], const u32 (&words)[4][4], luce_rows_t panel, bool adds) {
    luce_wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++)
        luce_wgmma_rows<ROWS>(sum, words[step], luce_wgmma_rows_further(panel, step * 32), adds || step > 0);
    luce_wgmma_close();
}

// Adds a section's second sum to its first.
LUCE_FN void add_second(float (&sum)[EIGHTS][4], const float (&second)[EIGHTS][4]) {
#pragma unroll
    for (int i = 0; i < EIGHTS * 4; i++) {
        float& to = sum[i / 4][i % 4];
        to = QTYPE == Q6_K ? fmaf(16.0f, second[i / 4][i % 4], to) : to + second[i / 4][i % 4];
    }
}

// What a section's sums of a lane's two features are multiplied with.
struct Factors {
    float scale[2], minimum[2];  // of the unit
    u32 least[2];                // the minimums of block t, as fp16, twice
};

// What a lane needs of 32 rows of x beside the products: their sums and scales.
struct RowFacts {
    u32 totals[4];
    float scales[8];
};

LUCE_FN RowFacts load_facts(const u8 (&facts)[FACTS]) {
    const int t = own_lane() % 4;
    RowFacts own = {};
    if (HAS_MINIMUM) {
        const uint4 four = *reinterpret_cast<const uint4*>(facts + own_lane() * 16);
        own.totals[0] = four.x, own.totals[1] = four.y, own.totals[2] = four.z, own.totals[3] = four.w;
    }
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        const float4 part = *reinterpret_cast<const float4*>(facts + (FACTS - GROUP_ROWS * 4) + t * 32 + i * 4);
        own.scales[i] = part.x, own.scales[i + 1] = part.y, own.scales[i + 2] = part.z, own.scales[i + 3] = part.w;
    }
    return own;
}

// sum += the section's x scale times its value, as section_value of dot_int8.h has it. `first`: the facts of group 0.
LUCE_FN void add_section(const float (&products)[EIGHTS][4], const Factors& factors, const RowFacts& first,
                         const u8 (&facts)[GROUPS][FACTS], float (&sum)[EIGHTS][4]) {
    RowFacts own = first;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        RowFacts next = {};
        if (group + 1 < GROUPS) next = load_facts(facts[group + 1]);
        float minimums[4][4] = {};
        if (HAS_MINIMUM) {
#pragma unroll
            for (int c = 0; c < 4; c++) luce_mma_f16_8(minimums[c], factors.least, own.totals[c]);
        }
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int i = group * 4 + c;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float value = factors.scale[e / 2] * products[i][e];
                if (HAS_MINIMUM) value = fmaf(-factors.minimum[e / 2], minimums[c][e], value);
                sum[i][e] = fmaf(own.scales[c * 2 + e % 2], value, sum[i][e]);
            }
        }
        own = next;
    }
}

// Adds a chain's two sums, which begin again, to those of the chains before it; writes what is complete.
LUCE_FN void end_chain(const Product& all, const Told& told, float (&totals)[ROWS / 2][MULTIPLYING],
                       float (&sum)[2][EIGHTS][4]) {
    const int thread = own_thread(), g = own_lane() / 4, t = own_lane() % 4;
    float value[EIGHTS * 4];
#pragma unroll
    for (int i = 0; i < EIGHTS * 4; i++) {
        value[i] = sum[0][i / 4][i % 4] + sum[1][i / 4][i % 4];
        sum[0][i / 4][i % 4] = sum[1][i / 4][i % 4] = 0.0f;
    }
    if (told.follows) {
#pragma unroll
        for (int i = 0; i < EIGHTS * 4; i++) value[i] = totals[i][thread] + value[i];
    }
    if (!told.ends) {
#pragma unroll
        for (int i = 0; i < EIGHTS * 4; i++) totals[i][thread] = value[i];
        return;
    }
    const int feature = told.feature0 + own_wave() * 16 + g, row0 = told.row0 + 2 * t;
    const int split0 = all.whole / all.turns * FEATURES, stride = told.whole ? all.out_stride : all.rows - split0;
    float* const to = (told.whole ? all.out + all.first : all.chains + (i64)told.sum * all.n * stride - split0) +
                      (i64)row0 * stride + feature;
#pragma unroll
    for (int i = 0; i < EIGHTS * 4; i++) {
        const int r = i / 4 * 8 + i % 2, beside = i % 4 / 2 * 8;
        if (row0 + r < all.n && feature + beside < all.rows) to[(i64)r * stride + beside] = value[i];
    }
}

// Multiplies what fetch_rows brings.
LUCE_FN void multiply_rows(const Product& all, Shared& shared) {
    const int lane = own_lane(), t = lane % 4;
    // A lane's own row, and the rows whose addresses it passes to luce_ldmatrix.
    const int own = (own_wave() * 16 + lane / 4) * STRIDE;
    const int line = (own_wave() * 16 + lane % 16) * STRIDE + lane / 16 * 16;

    // Where the lane's rows begin in 16 bytes, in all waves and tiles; the unit to unpack.
    const u32 low = (u32)(u64)all.weight + (u32)(lane / 4 * all.units * UNIT_BYTES);
    int current = 0;
    luce_await();  // before the results are written

    // A section's sums are added while the next one is multiplied: for the first one, sums of nothing.
    for (int i = own_thread(); i < GROUPS * FACTS / 4; i += MULTIPLYING)
        reinterpret_cast<u32*>(shared.facts[3][1])[i] = 0;
    // Products of the steps' first and second sections; a section's second sum is where the other section's was.
    float products[2][EIGHTS][4] = {}, sum[2][EIGHTS][4] = {};
    u32 words[2][4][4];
    // A unit of row g or g + 8, which begin at the same byte of 16.
    const auto unit_of = [&](int slot, int row) {
        const int skew = ODD_UNITS ? (int)(low + (u32)(current * UNIT_BYTES) & 15) : 0;
        return Unit{shared.weights[slot] + own + row * 8 * STRIDE + (skew & ~3), (u32)(skew & 2) * 8};
    };
    // Loads what a span of the unit in a slot needs, and unpacks what was loaded.
#if HAS_MINIMUM
    u32 bits[4], fifths[4] = {}, fours[2];
    const auto load = [&](int slot, int span) {
        fours[0] = unit_scales(unit_of(slot, 0)).groups[span / 2] << 2;
        fours[1] = unit_scales(unit_of(slot, 1)).groups[span / 2] << 2;
        const u8* const unit = shared.weights[slot] + line;
        luce_ldmatrix(bits, unit + BLOCK_BYTES - 128 + span * 32);
        if (QTYPE == Q5_K) luce_ldmatrix(fifths, unit + 16);
    };
    const auto unpack = [&](int span) { unpack_span(bits, fifths, span, fours, words[span % 2]); };
#else
    SectionPart part = {};
    const auto load = [&](int slot, int span) {
        const Unit units[2] = {unit_of(slot, 0), unit_of(slot, 1)};
        load_part(units, span, t, part);
    };
    const auto unpack = [&](int span) { unpack_span(part, span, words[span % 2]); };
#endif
    const auto factors_of = [&](int slot, int section) {
        Factors own_factors = {};
#pragma unroll
        for (int row = 0; row < 2; row++) {
#if HAS_MINIMUM
            const UnitScales scales = unit_scales(unit_of(slot, row));
            own_factors.scale[row] = scales.scale * UP, own_factors.minimum[row] = scales.minimum;
            own_factors.least[row] = luce_f16_twice(scales.minimums[section], t);
#else
            own_factors.scale[row] = unit_half(unit_of(slot, row), 208) * UP;
#endif
        }
        return own_factors;
    };
    int count = 0, slot = 0;
    Factors late = {};
    luce_sync_waves();
    if (ODD_UNITS) current = shared.told[0].unit;
    bool ends_chain = false;
    load(0, 0);
    unpack(0);
    load(0, 1);
    bool more;
#pragma unroll 1
    do {
        const luce_rows_t x = luce_wgmma_rows_at(shared.x[slot]);
        const int next = slot == 2 ? 0 : slot + 1;
        // Of the next step, which is known since the last barrier.
        const Told& told = shared.told[count + 1 & 3];
        const int next_unit = ODD_UNITS ? told.unit : 0;
        more = told.exists;
        Factors factors;
#pragma unroll
        for (int section = 0; section < 2; section++) {
            float(&mine)[EIGHTS][4] = products[section], (&other)[EIGHTS][4] = products[1 - section];
            const luce_rows_t panels = luce_wgmma_rows_further(x, section * 2 * PANEL);
            const u8(&facts)[GROUPS][FACTS] = section ? shared.facts[count & 3][0] : shared.facts[count + 3 & 3][1];
            const RowFacts first = load_facts(facts[0]);
            multiply_span(mine, words[0], panels, false);
            luce_wgmma_wait<1>();
            luce_wgmma_hold(other);
            unpack(section * SPANS + 1);
            if (QTYPE != Q5_K) multiply_span(mine, words[1], luce_wgmma_rows_further(panels, PANEL), true);
            if (HAS_MINIMUM && section == 0) load(slot, SPANS);
            if (QTYPE == Q6_K) load(slot, section * SPANS + 2);
            if (section) {
                add_section(other, factors, first, facts, sum[0]);
            } else {
                add_section(other, late, first, facts, sum[1]);
                if (ends_chain) end_chain(all, shared.told[count + 3 & 3], shared.totals, sum);
                ends_chain = shared.told[count & 3].ends_chain;
            }
            if (QTYPE == Q5_K) multiply_span(other, words[1], luce_wgmma_rows_further(panels, PANEL), false);
            if (QTYPE == Q6_K) {
                luce_wgmma_wait<1>();  // words[0] have been read
                unpack(section * SPANS + 2);
                multiply_span(other, words[0], panels, false);
                load(slot, section * SPANS + 3);
                luce_wgmma_wait<1>();  // words[1] have been read
                unpack(section * SPANS + 3);
                multiply_span(other, words[1], luce_wgmma_rows_further(panels, PANEL), true);
            }
            if (HAS_MINIMUM || section == 0) (section ? late : factors) = factors_of(slot, section);
            if (!HAS_MINIMUM) late = factors;  // of the whole unit
            if (section == 0) {
                if (QTYPE == Q6_K) load(slot, SPANS);
                luce_wgmma_wait<1>();  // words[0] have been read
                unpack(SPANS);
                load(slot, SPANS + 1);
            } else {
                count++;
                // Waits for the operands of that step; then those that are overwritten next have been read.
                luce_sync_waves();
                current = next_unit;
                // Behind the last step, its unit once more, for nothing.
                const int unpacked = more ? next : slot;
                load(unpacked, 0);
                luce_wgmma_wait<1>();  // words[0] have been read
                unpack(0);
                load(unpacked, 1);
                // The compiler lets products run in the background only within a turn of the loop.
                luce_wgmma_wait<0>();
                luce_wgmma_hold(products[0]);
                luce_wgmma_hold(products[1]);
                if (TWO_SUMS) add_second(products[1], products[0]);
                slot = next;
            }
            if (TWO_SUMS && section == 0) {
                luce_wgmma_wait<0>();
                luce_wgmma_hold(products[0]);
                luce_wgmma_hold(products[1]);
                add_second(products[0], products[1]);
            }
        }
        // The same for all lanes, as the compiler sees by the shuffle: else each product takes two more instructions.
    } while (luce_shfl((int)more, 0));
    const u8(&facts)[GROUPS][FACTS] = shared.facts[count + 3 & 3][1];
    add_section(products[1], late, load_facts(facts[0]), facts, sum[1]);
    end_chain(all, shared.told[count + 3 & 3], shared.totals, sum);
}

// out[r, first + j] = sum over k of x[r, k] * weight[j, k], for r < n and j < rows. x: groups of 32 quantised rows, one
// after the other. out float32, rows out_stride apart. Tiles from `whole` on, a multiple of the tiles that share weights,
// have the sum of their first `together` of 1 << bits chains and then each other chain in chains
// [(1 << bits) - together + 1, n, rows - their first], which add_chains adds.
// Grid: up to the number of items, blocks of THREADS threads.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    matmul_rows_wgmma(const u8* __restrict__ weight, const u8* __restrict__ x, float* __restrict__ out,
                      float* __restrict__ chains, const int n, const int rows, const int cols, const int out_stride,
                      const int first, const int bits, const int whole, const int together) {
    LUCE_DYNAMIC_SHARED(Shared, shared);
    const int turns = luce_ceil_div(n, ROWS), split = luce_ceil_div(rows, FEATURES) * turns - whole;
    const int items = whole + split + luce_ceil_div(split * ((1 << bits) - together), together);
    const Product all = {weight, x,     out,      chains, n,          rows, cols / UNIT_COLS, bits,
                         turns,  whole, split, together, items, out_stride, first};
    if (threadIdx.x >= MULTIPLYING) {
        luce_wgmma_fewer_registers<FETCHING_REGISTERS>();
        fetch_rows(all, *shared);
    } else {
        luce_wgmma_more_registers<MULTIPLYING_REGISTERS>();
        multiply_rows(all, *shared);
    }
}

// out[r, first + j] = sum of chains[.., r, j] in order, for r < n and j < width. Grid: (ceil(width / threads), n).
extern "C" __global__ void __launch_bounds__(MULTIPLYING)
    add_chains(const float* __restrict__ chains, float* __restrict__ out, const int n, const int width,
               const int out_stride, const int first, const int count) {
    luce_await();
    luce_release();
    const int j = (int)blockIdx.x * MULTIPLYING + own_thread(), r = (int)blockIdx.y;
    if (j >= width) return;
    const float* const from = chains + (i64)r * width + j;
    float total = from[0];
    for (int chain = 1; chain < count; chain++) total += from[(i64)chain * n * width];
    out[(i64)r * out_stride + first + j] = total;
}

#endif
