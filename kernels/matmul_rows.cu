// variants for cuda: PHASES=1,2 QTYPE=Q4_K,Q5_K,Q6_K
//
// Products of a quantised weight matrix with more than 16 quantised rows of x: many sequences, and short prompts. The
// sums are those of dot_int8.h, so a row has the bits that it has alone. Only for targets with tensor cores.
//
// A tile is of FEATURES weight rows and up to 32 rows of x; a block takes tiles one after the other. It takes SLOTS units of
// each row at a time, and a wave one of these, of 16 weight rows. Rows have PHASES * SLOTS chains: with two phases, a block
// goes through the units of the first four chains, then through those of the others. A step's units are copied while those
// of the step before it, maybe of another tile, are multiplied.
#define ROWS 32
#define SLOTS 4
// A step's units, by which mma_int8.h has its strides.
#define CHAINS SLOTS
#define SHARED_X 1
#include "mma_int8.h"

// Halves of the features.
#define SIDES 2
#define FEATURES (SIDES * 16)
#define THREADS (SIDES * SLOTS * 32)
// Rows of weights that all threads copy at a time.
#define COPIED (THREADS / SHARE)
#define STEP_X (SLOTS * UNIT_X)
#define WEIGHTS (FEATURES * TILE_STRIDE)
#define STAGE (WEIGHTS + STEP_X)
#define PARTIAL_ROW PARTIAL_STRIDE(FEATURES)

#if LUCE_MMA_S8

// What a launch multiplies. `groups`: of 32 rows of x; neighbouring tiles share their weights.
struct Product {
    const u8* weight;
    const u8* x;
    int rows, units, sections, groups, row_size;

    __device__ __forceinline__ const u8* row(int tile, int feature) const {
        return weight + (i64)luce_min(tile / groups * FEATURES + feature, rows - 1) * row_size;
    }
};

// The step to copy next: its tile and first unit, and where this thread's shares of weights and of x are.
struct Copying {
    int tile, unit;
    const u8* weights;
    const u8* x;

    __device__ __forceinline__ void begin(const Product& all, int next) {
        const int thread = luce_thread();
        tile = next, unit = 0;
        weights = all.row(tile, thread / SHARE) + thread % SHARE * 16;
        x = all.x + (i64)(tile % all.groups) * all.sections * (UNIT_X / 2) + thread * 16;
    }
    __device__ __forceinline__ void next(const Product& all, int phase) {
        if (unit + SLOTS * PHASES < all.units)
            unit += SLOTS * PHASES;
        else if (phase + 1 < PHASES)
            unit = (phase + 1) * SLOTS;
        else
            begin(all, tile + (int)gridDim.x);
    }
    __device__ __forceinline__ void copy_weights(const Product& all, u8* stage) const {
        const int thread = luce_thread(), at = unit * UNIT_BYTES;
        TileCopy copy = {weights + at, all.row_size - thread % SHARE * 16 - at};
        copy_step(stage + thread / SHARE * TILE_STRIDE + thread % SHARE * 16, copy, thread % SHARE,
                  all.weight + (i64)all.rows * all.row_size);
    }
    __device__ __forceinline__ void copy_x(const Product& all, u8* stage) const {
        const int thread = luce_thread(), size = (all.sections - unit * 2) * (UNIT_X / 2) - thread * 16;
        const u8* const from = x + unit * UNIT_X;
#pragma unroll
        for (int i = 0; i < STEP_X; i += THREADS * 16)
            if (i < luce_min(size, STEP_X - thread * 16)) luce_copy16(stage + WEIGHTS + thread * 16 + i, from + i, true);
    }
};

LUCE_FN void product_rows(const Product& all, float* __restrict__ out, int n, int out_stride, int first, u8* shared) {
    static_assert(COPIED == FEATURES, "a thread copies its share of one row");
    const int thread = luce_thread(), lane = thread % 32, g = lane / 4, t = lane % 4;
    const int slot = thread / 32 % SLOTS, side = thread / 32 / SLOTS * 16;
    const int tiles = luce_ceil_div(all.rows, FEATURES) * all.groups;
    const u8* const own = shared + (side + g) * TILE_STRIDE + (ODD_UNITS ? 0 : slot * UNIT_BYTES);
    const u8* const line = shared + (side + lane % 16) * TILE_STRIDE + slot * UNIT_BYTES + lane / 16 * 16;
    float* const partial = reinterpret_cast<float*>(shared + 2 * STAGE);

    Copying copying;
    copying.begin(all, (int)blockIdx.x);
    copying.copy_weights(all, shared);
    luce_await();  // until here, only weights were fetched
    copying.copy_x(all, shared);
    luce_copy_close();
    int take = 0;
#pragma unroll 1
    for (int tile = (int)blockIdx.x; tile < tiles; tile += (int)gridDim.x) {
        const u32 low[2] = {(u32)(u64)all.row(tile, side + g), (u32)(u64)all.row(tile, side + g + 8)};
#pragma unroll 1
        for (int phase = 0; phase < PHASES; phase++) {
            float sum[SUMS][1][EIGHTS][4] = {};
#pragma unroll 1
            for (int step = phase * SLOTS; step < all.units; step += SLOTS * PHASES) {
                copying.next(all, phase);
                luce_copy_wait<0>();
                luce_sync();  // this step's units have arrived, and those that are overwritten next have been read
                if (copying.tile < tiles) {
                    copying.copy_weights(all, shared + STAGE - take);
                    copying.copy_x(all, shared + STAGE - take);
                }
                luce_copy_close();
                TileUnit unit[1];
                unit[0].line = line + take;
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int skew = ODD_UNITS ? (int)(low[i] + (u32)step * UNIT_BYTES & 15) + slot * UNIT_BYTES : 0;
                    unit[0].in[i] = {own + take + i * 8 * TILE_STRIDE + (skew & ~3), (u32)(skew & 2) * 8};
                }
                SectionX ahead[2];
                const int left = (all.units - step - slot) * UNIT_COLS;
                if (left > 0) add_tile_unit(unit, shared + take + WEIGHTS + slot * UNIT_X, ahead, left, sum);
                take = STAGE - take;
            }
            if (copying.tile >= tiles) luce_release();
            float* const to_sum = partial + slot * ROWS * PARTIAL_ROW + side + g;
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) {
                const auto of = [&](int k) { return sum[k][0][i / 4][i % 4]; };
                const float total = INTEGER_SCALES ? of(0) + of(1) : (of(0) + of(2 % SUMS)) + (of(1) + of(3 % SUMS));
                to_sum[(i / 4 * 8 + t * 2 + i % 2) * PARTIAL_ROW + i % 4 / 2 * 8] = total;
            }
            luce_sync();
            const int row0 = tile % all.groups * ROWS, feature0 = tile / all.groups * FEATURES;
#pragma unroll 1
            for (int i = thread; i < FEATURES * luce_min(n - row0, ROWS); i += THREADS) {
                const int feature = i % FEATURES, r = i / FEATURES;
                if (feature0 + feature >= all.rows) continue;
                float* const result = out + (i64)(row0 + r) * out_stride + first + feature0 + feature;
                const float* const chains = partial + r * PARTIAL_ROW + feature;
                float total = phase ? *result + chains[0] : chains[0];
#pragma unroll
                for (int chain = 1; chain < SLOTS; chain++) total += chains[chain * ROWS * PARTIAL_ROW];
                *result = total;
            }
            // The next sums are written behind the barrier of a step.
        }
    }
}

#endif

// out[r, first + j] = sum over k of x[r, k] * weight[j, k], for r < n and j < rows. x: groups of 32 quantised rows, one
// after the other. out float32, rows out_stride apart. Shared memory: 2 * STAGE bytes and the chains' sums.
// Grid: up to ceil(n / 32) * ceil(rows / FEATURES) blocks of 256 threads.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    matmul_rows(const u8* __restrict__ weight, const u8* __restrict__ x, float* __restrict__ out, const int n,
                const int rows, const int cols, const int out_stride, const int first) {
#if LUCE_MMA_S8
    LUCE_DYNAMIC_SHARED(u8, shared);
    const Product all = {weight, x, rows, whole_units(cols), luce_ceil_div(cols, SECTION), luce_ceil_div(n, ROWS),
                         (int)row_bytes(cols)};
    product_rows(all, out, n, out_stride, first, shared);
#else
    luce_await();
#endif
}
