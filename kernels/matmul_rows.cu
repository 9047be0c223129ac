// variants for cuda: PHASES=1 TILES=2 QTYPE=Q4_K,Q5_K,Q6_K
// variants for cuda: PHASES=1,2 TILES=1 QTYPE=Q4_K,Q5_K,Q6_K
//
// Products of a quantised weight matrix with more than 16 quantised rows of x: many sequences, and short prompts. The
// sums are those of dot_int8.h, so a row has the bits that it has alone. Only for targets with tensor cores.
//
// A block multiplies FEATURES weight rows with up to 32 rows of x, in two groups of 16. It takes SLOTS units of each row
// at a time; a wave takes one of these units, of half of the weight rows. Rows have PHASES * SLOTS chains, and a wave
// takes turns with PHASES of them.
#define ROWS 16
#define SLOTS 4
// A step's units, by which mma_int8.h has its strides.
#define CHAINS SLOTS
#define SHARED_X 1
#include "mma_int8.h"

#define SIDES 2
#define GROUPS 2
#define FEATURES (SIDES * 16 * TILES)
#define THREADS (SIDES * SLOTS * 32)
// Rows of weights that all threads copy at a time.
#define COPIED (THREADS / SHARE)
#define GROUP_X (SLOTS * UNIT_X)
#define WEIGHTS (FEATURES * TILE_STRIDE)
#define STAGE (WEIGHTS + GROUPS * GROUP_X)

#if LUCE_MMA_S8

// Adds the units of one step to the sums of a wave's chain.
LUCE_FN void add_step(const TileUnit (&unit)[TILES], const u8* x, int groups, int left,
                      float (&sum)[GROUPS][SUMS][TILES][EIGHTS][4]) {
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        if (group >= groups) break;
        SectionX sections[2];
        add_tile_unit(unit, x + group * GROUP_X, sections, left, sum[group]);
    }
}

LUCE_FN void product_rows(const u8* __restrict__ weight, const u8* __restrict__ x, float* __restrict__ out, int n,
                          int rows, int cols, int out_stride, int first, u8* shared) {
    const int row0 = (int)blockIdx.x * 16 * GROUPS, feature0 = (int)blockIdx.y * FEATURES;
    const int live = luce_min(n - row0, 16 * GROUPS), groups = luce_ceil_div(live, 16);
    const int units = whole_units(cols), sections = luce_ceil_div(cols, SECTION);
    const int thread = luce_thread(), lane = thread % 32, g = lane / 4, t = lane % 4;
    const int slot = thread / 32 % SLOTS, side = thread / 32 / SLOTS;
    const u8* const end = weight + rows * row_bytes(cols);
    const auto row = [&](int feature) { return weight + luce_min(feature0 + feature, rows - 1) * row_bytes(cols); };

    TileCopy mine[FEATURES / COPIED];
#pragma unroll
    for (int i = 0; i < FEATURES / COPIED; i++)
        mine[i] = {row(thread / SHARE + i * COPIED) + thread % SHARE * 16, (int)row_bytes(cols) - thread % SHARE * 16};
    u8* const to = shared + thread / SHARE * TILE_STRIDE + thread % SHARE * 16;
    const auto copy_weights = [&](int unit, int stage) {
        if (unit >= units) return;
#pragma unroll
        for (int i = 0; i < FEATURES / COPIED; i++)
            copy_step(to + stage + i * COPIED * TILE_STRIDE, mine[i], thread % SHARE, end);
    };
    const auto copy_x = [&](int unit, int stage) {
        if (unit >= units) return;
        const int size = luce_min(SLOTS * 2, sections - unit * 2) * (UNIT_X / 2);
#pragma unroll 1
        for (int group = 0; group < groups; group++) {
            const u8* from = x + (i64)(row0 / 16 + group) * sections * (UNIT_X / 2) + (i64)unit * UNIT_X;
            u8* const place = shared + stage + WEIGHTS + group * GROUP_X;
            for (int i = thread * 16; i < size; i += THREADS * 16) luce_copy16(place + i, from + i, true);
        }
    };

    copy_weights(0, 0);
    luce_await();  // until here, only weights were fetched
    copy_x(0, 0);
    luce_copy_close();

    const int tile0 = side * 16 * TILES;
    const u8* const own = shared + (tile0 + g) * TILE_STRIDE + (ODD_UNITS ? 0 : slot * UNIT_BYTES);
    const u8* const line = shared + (tile0 + lane % 16) * TILE_STRIDE + slot * UNIT_BYTES + lane / 16 * 16;
    u32 low[TILES][2];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int i = 0; i < 2; i++) low[tile][i] = (u32)(u64)row(tile0 + tile * 16 + i * 8 + g);

    float sum[PHASES][GROUPS][SUMS][TILES][EIGHTS][4] = {};
    int take = 0;
#pragma unroll 1
    for (int unit0 = 0; unit0 < units; unit0 += SLOTS * PHASES) {
#pragma unroll
        for (int phase = 0; phase < PHASES; phase++) {
            const int step = unit0 + phase * SLOTS;
            if (step >= units) break;
            luce_copy_wait<0>();
            luce_sync();  // this step's units have arrived, and those that are overwritten next have been read
            copy_weights(step + SLOTS, STAGE - take);
            copy_x(step + SLOTS, STAGE - take);
            luce_copy_close();
            TileUnit unit[TILES];
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                unit[tile].line = line + take + tile * 16 * TILE_STRIDE;
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int skew =
                        ODD_UNITS ? (int)(low[tile][i] + (u32)step * UNIT_BYTES & 15) + slot * UNIT_BYTES : 0;
                    unit[tile].in[i] = {own + take + (tile * 16 + i * 8) * TILE_STRIDE + (skew & ~3),
                                        (u32)(skew & 2) * 8};
                }
            }
            const int left = cols - (step + slot) * UNIT_COLS;
            if (left > 0) add_step(unit, shared + take + WEIGHTS + slot * UNIT_X, groups, left, sum[phase]);
            take = STAGE - take;
        }
    }
    luce_release();
    luce_sync();  // the chains' sums take the units' place

    float* const partial = reinterpret_cast<float*>(shared);
    const int stride = PARTIAL_STRIDE(FEATURES), chain_step = 16 * GROUPS * stride;
#pragma unroll
    for (int phase = 0; phase < PHASES; phase++) {
        float* const to_sum = partial + (phase * SLOTS + slot) * chain_step + tile0 + g;
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
                for (int i = 0; i < ROWS / 2; i++) {
                    const int r = group * 16 + i / 4 * 8 + t * 2 + i % 2;
                    const auto of = [&](int k) { return sum[phase][group][k][tile][i / 4][i % 4]; };
                    const float total =
                        INTEGER_SCALES ? of(0) + of(1) : (of(0) + of(2 % SUMS)) + (of(1) + of(3 % SUMS));
                    to_sum[r * stride + tile * 16 + i % 4 / 2 * 8] = total;
                }
            }
        }
    }
    luce_sync();
    for (int i = thread; i < FEATURES * live; i += THREADS) {
        const int feature = i % FEATURES, r = i / FEATURES;
        const float sum_of_chains = chain_sum(partial + r * stride + feature, PHASES == 2 ? 3 : 2, chain_step);
        if (feature0 + feature < rows) out[(i64)(row0 + r) * out_stride + first + feature0 + feature] = sum_of_chains;
    }
}

#endif

// out[r, first + j] = sum over k of x[r, k] * weight[j, k], for r < n and j < rows. x: groups of 16 quantised rows, one
// after the other. out float32, rows out_stride apart. Shared memory: 2 * STAGE bytes.
// Grid: (ceil(n / 32), ceil(rows / FEATURES)) blocks of 256 threads; neighbours share their weights.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    matmul_rows(const u8* __restrict__ weight, const u8* __restrict__ x, float* __restrict__ out, const int n,
                const int rows, const int cols, const int out_stride, const int first) {
#if LUCE_MMA_S8
    LUCE_DYNAMIC_SHARED(u8, shared);
    product_rows(weight, x, out, n, rows, cols, out_stride, first, shared);
#else
    luce_await();
#endif
}
