// variants: CHAINS=1,2 QTYPE=Q4_0,Q8_0,Q4_K,Q5_K,Q6_K
//
// Experts on few quantised rows: the gated half of each chosen one, then the other half and the weighted sum. A row has
// k slots for its experts and, if `slots` is k + 1, one more for an expert that all rows share. A pair is a row and a
// slot: pair = row * slots + slot. Each is computed by itself, so a row's bits do not depend on the others.
#include "activation.h"
#include "dot_int8.h"

// Of a block of expert_gated_int8, whose tile has as many gates as ups. Few, so that the blocks of one row fill large
// GPUs evenly.
#define GATED_FEATURES 8
// Units of a chain in flight or in use there. H200, 35B A3B in Q4_K, 1, 4 and 16 rows: 6.4, 20.8 and 54.8 us; with five,
// which ask for all of a row of 2048 columns at once, 6.9, 20.7 and 59.8.
#define GATED_STAGES 3

// act(gate x) * up x of every pair: out float32 [pairs, half]. gates, ups: `half` rows for each of `experts`,
// expert_rows apart, and shared_gates, shared_ups [half, cols], all in blocks of QTYPE; half is a multiple of 8.
// x_int8: x as `padded` quantised rows; ids [n, k].
// Grid: (half / 8, slots, n) blocks of 32 * CHAINS threads.
extern "C" __global__ void __launch_bounds__(64)
    expert_gated_int8(const u8* __restrict__ gates, const u8* __restrict__ ups, const u8* __restrict__ shared_gates,
                    const u8* __restrict__ shared_ups, const i32* __restrict__ ids, const u8* __restrict__ x_int8,
                    float* __restrict__ out, const int padded, const int experts, const int expert_rows, const int k,
                    const int half, const int cols, const int gelu_gate) {
    LUCE_DYNAMIC_SHARED(u8, shared);
    const int feature0 = (int)blockIdx.x * GATED_FEATURES;
    const int slot = (int)blockIdx.y, row = (int)blockIdx.z, slots = (int)gridDim.y;
    const Rows8 x = {x_int8, padded, row};
    const bool chosen = slot < k;
    if (chosen) luce_await();  // for the ids; the shared expert's weights are fetched before
    const u8* gate = chosen ? gates : shared_gates;
    const u8* up = chosen ? ups : shared_ups;
    const i64 first = (chosen ? (i64)luce_read_now(ids + row * k + slot) * expert_rows : 0) + feature0;
    const i64 all = (chosen ? (i64)(experts - 1) * expert_rows + half : half) * row_bytes(cols);
    const auto operands = [&](int feature) {
        const u8* matrix = feature < GATED_FEATURES ? gate : up;
        return Operands{matrix + (first + feature % GATED_FEATURES) * row_bytes(cols), matrix + all, x};
    };
    const auto prepare = [&] {
        // Of one row, all blocks run at once, and those of the downs too: these ask for weights of the same ids meanwhile. They
        // read the ids before they wait, so not earlier.
        if (gridDim.z == 1) luce_release();
    };
    const float* partial = block_sums<1, GATED_STAGES>(operands, 2 * GATED_FEATURES, cols, shared, prepare);
    const int feature = luce_thread();
    if (feature >= GATED_FEATURES) return;
    const float own = chain_sum(partial + feature, PARTIAL_STRIDE(2 * GATED_FEATURES));
    const float other = chain_sum(partial + feature + GATED_FEATURES, PARTIAL_STRIDE(2 * GATED_FEATURES));
    out[(i64)(row * slots + slot) * half + feature0 + feature] = (gelu_gate ? gelu(own) : silu(own)) * other;
}

// Loads of a thread in flight there; types with more scales have no registers for two.
#define ALONE_LOADS (INTEGER_SCALES ? 2 : 1)

// `count` rows x float32 [count, cols] so, for all threads of the block; cols is a multiple of 32. x is not __restrict__,
// or it might be read before luce_await.
LUCE_FN void quantise_alone(const float* x, u8* to, int count, int cols) {
    const int lanes = luce_ceil_div(cols, SECTION) * (SECTION / 4);  // of a row, each with four columns
#pragma unroll 1
    for (int first = 0; first < count * lanes; first += ALONE_LOADS * luce_threads()) {
        float own[ALONE_LOADS][4] = {};
        int rows[ALONE_LOADS], columns[ALONE_LOADS];
#pragma unroll
        for (int i = 0; i < ALONE_LOADS; i++) {
            const int at = first + i * luce_threads() + luce_thread();
            rows[i] = at / lanes, columns[i] = at % lanes * 4;
            if (rows[i] >= count || columns[i] >= cols) continue;
            const float4 four = *reinterpret_cast<const float4*>(x + rows[i] * cols + columns[i]);
            own[i][0] = four.x, own[i][1] = four.y, own[i][2] = four.z, own[i][3] = four.w;
        }
#pragma unroll
        for (int i = 0; i < ALONE_LOADS; i++) {
            const Bytes bytes = {to + rows[i] * alone_bytes(cols), 1, INTEGER_SCALES};
            quantise_columns(own[i], rows[i] < count, columns[i], 0, bytes);
        }
    }
    luce_sync();
}

// out[r, j] = sum over the slots s < k, ascending, of weights[r, s] * (down of its expert times pair (r, s))[j], and
// with one slot more, plus the shared expert's result, times sigmoid(shared_gate[r]) if `gated`; with `adds`, out += that.
// downs [experts, rows, cols] and shared_down [rows, cols] in blocks of QTYPE; inner: a quantised row per pair, or, if
// `quantises`, values float32 [pairs, cols], all slots of a row at a time; weights [n, k]; shared_gate elements gate_stride
// apart; out float32 [n, rows]. The kernels before are quantise, unless `quantises`, expert_gated_int8, and then those that wrote
// ids, weights and shared_gate.
// Grid: (ceil(rows / 16), n) blocks of 32 * CHAINS threads for each of `at_once` slots at a time.
// Dynamic shared memory: `sums_bytes`, a multiple of 16, for block_sums; if `quantises`, alone_bytes per slot; 18 words
// per slot.
extern "C" __global__ void __launch_bounds__(640)
    expert_down_int8(const u8* __restrict__ downs, const u8* __restrict__ shared_down, const i32* __restrict__ ids,
                   const float* __restrict__ weights, const float* __restrict__ shared_gate,
                   const u8* __restrict__ inner, const float* values, float* __restrict__ out, const int experts,
                   const int k, const int slots, const int at_once, const int rows, const int cols, const int gated,
                   const int gate_stride, const int sums_bytes, const int quantises, const int adds) {
    LUCE_DYNAMIC_SHARED(u8, shared);
    u8* const quantised = shared + sums_bytes;
    float* const results = reinterpret_cast<float*>(quantised + (quantises ? slots * alone_bytes(cols) : 0));
    float* const shares = results + 16 * slots;
    i32* const experts_of = reinterpret_cast<i32*>(shares + slots);
    const int feature0 = (int)blockIdx.x * 16, row = (int)blockIdx.y, pairs = (int)gridDim.y * slots;
    if (gridDim.y == 1) luce_release();  // all blocks run at once: the next kernel's ask for weights meanwhile
    if (luce_thread() < slots) {
        const int slot = luce_thread();
        const bool chosen = slot < k;
        experts_of[slot] = chosen ? luce_read_now(ids + row * k + slot) : 0;
        // The share of a slot's result; the shared expert's is what divides it.
        float share = 0.0f;
        if (chosen) share = luce_read_now(weights + row * k + slot);
        if (!chosen && gated) share = luce_read_now(shared_gate + (i64)row * gate_stride);
        shares[slot] = chosen ? share : gated ? 1.0f + expf(-share) : 1.0f;
    }
    luce_sync();
    const int own = luce_thread();
    float* const to = out + (i64)row * rows + feature0 + own;
    float before = 0.0f;
    for (int slot0 = 0; slot0 < slots; slot0 += at_once) {
        const auto operands = [&](int feature) {
            const int slot = luce_min(slot0 + feature / 16, slots - 1);
            const bool chosen = slot < k;
            const u8* matrix = chosen ? downs : shared_down;
            const i64 first = (i64)experts_of[slot] * rows;
            const i64 all = (chosen ? (i64)experts * rows : rows) * row_bytes(cols);
            const i64 own = first + luce_min(feature0 + feature % 16, rows - 1);
            const Rows8 x = quantises ? Rows8{quantised + slot * alone_bytes(cols), 1, 0}
                                      : Rows8{inner, pairs, row * slots + slot};
            return Operands{matrix + own * row_bytes(cols), matrix + all, x};
        };
        const auto prepare = [&] {
            if (adds && own < 16 && feature0 + own < rows) before = *to;
            if (quantises) quantise_alone(values + (i64)row * slots * cols, quantised, slots, cols);
        };
        const float* partial = block_sums<1, 2>(operands, 16 * at_once, cols, shared, prepare);
        const int feature = luce_thread();
        if (feature < 16 * luce_min(at_once, slots - slot0)) {
            results[slot0 * 16 + feature] = chain_sum(partial + feature, PARTIAL_STRIDE(16 * at_once));
        }
        luce_sync();  // the next slots' units overwrite the partial sums
    }
    if (own < 16 && feature0 + own < rows) {
        float sum = 0.0f;
        for (int slot = 0; slot < k; slot++) sum = fmaf(shares[slot], results[slot * 16 + own], sum);
        if (slots > k) sum += results[k * 16 + own] / shares[k];
        *to = adds ? before + sum : sum;
    }
}
