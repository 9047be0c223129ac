// The sums of dot_s8.h for 8 or 16 rows of x on tensor cores: the same operations in the same order, so the same bits.
//
// A block has TILES tiles of 16 weight rows, and a wave for each of CHAINS chains, which takes its chain of all tiles.
// One tile: x comes out of the caches, and two blocks or more share a multiprocessor. Several: x comes to shared memory
// once for all, which pays where x is too long for the first-level cache and a multiprocessor has few tiles to do.
#ifndef MMA_S8_H
#define MMA_S8_H
#include "dot_s8.h"

#ifndef TILES
#define TILES 1
#endif
// Units of each row and chain in flight or at work (H200, Q6_K 5120 x 17408: 16 rows 62.8 us with two and 56.2 with
// three, 8 rows 44.1 and 75.8).
#define TILE_STAGES (QTYPE == Q6_K && CHAINS == 8 && ROWS == 16 ? 3 : 2)

// From one row's units to the next row's in shared memory: four rows of a load of 8 bytes lie in different banks.
#define TILE_RUN ((CHAINS * UNIT_BYTES + (ODD_UNITS ? 18 : 0) + 15) / 16 * 16)
#define TILE_STRIDE (ODD_UNITS ? TILE_RUN : (TILE_RUN - 32 + 63) / 64 * 64 + 32)
// Bytes of a unit of x: values, then scales.
#define UNIT_X (ROWS * UNIT_COLS)
#define UNIT_X_SCALES (ROWS * BLOCKS32 * 8)
#define WEIGHT_STAGE (16 * TILES * TILE_STRIDE)
#define TILE_STAGE (WEIGHT_STAGE + (TILES > 1 ? CHAINS * (UNIT_X + UNIT_X_SCALES) : 0))
// Threads that copy a row of weights.
#define SHARE (2 * CHAINS)
#define STEP_BYTES (CHAINS * UNIT_BYTES)

#if LUCE_MMA_S8

// What is left to copy of a row, from this thread's first 16 bytes on.
struct TileCopy {
    const u8* from;
    int left;
};

// Copies the next STEP_BYTES of a row to `to` + (their address % 16). `thread`: which one of SHARE.
LUCE_FN void copy_step(u8* to, TileCopy& copy, int thread, const u8* end) {
    const int skew = ODD_UNITS ? (int)((u64)copy.from & 15) : 0;
    const u8* from = copy.from - skew;
    const int left = luce_min(copy.left, STEP_BYTES - thread * 16) + skew + (ODD_UNITS ? 4 : 0);
    copy.from += STEP_BYTES;
    copy.left -= STEP_BYTES;
#if ODD_UNITS
    if (from + (left + 15 & ~15) > end) {
        // The last row's last units: what follows them is not ours to read.
#pragma unroll 1
        for (int i = 0; i / 16 * 16 * SHARE < left; i += 2) {
            const int place = i / 16 * 16 * SHARE + i % 16;
            *reinterpret_cast<u16*>(to + place) = from + place < end ? *reinterpret_cast<const u16*>(from + place) : 0;
        }
        return;
    }
#endif
#pragma unroll
    for (int i = 0; i < STEP_BYTES + (ODD_UNITS ? 18 : 0); i += 16 * SHARE) {
        if (i < left) luce_copy16(to + i, from + i, true);
    }
}

// Adds to sum[c][e][set] the products of a unit of 16 rows, the first `left` columns of it, with the 8 * EIGHTS rows of
// x that meet it. Element e is where luce_mma_s8_32 has it; `in` are rows lane / 4 and 8 more.
template <int EIGHTS>
LUCE_FN void add_tile_unit(const Unit (&in)[2], const Rows8& x, int left, float (&sum)[EIGHTS][4][4]) {
    const int g = luce_lane() / 4, t = luce_lane() % 4;
    const UnitScales scales[2] = {unit_scales(in[0]), unit_scales(in[1])};
    const i8* values = x.values + g * 32 + t * (APART ? 4 : 8);
    const float2* factors = x.scales + 2 * t;
#pragma unroll
    for (int span = 0; span < BLOCKS32 / SPAN32; span++) {
        if (BLOCK == 32 && span * 32 >= left) break;
        u32 w[2][SPAN32][2];
        span_pairs(in[0], span, t, w[0]);
        span_pairs(in[1], span, t, w[1]);
#pragma unroll
        for (int j = 0; j < SPAN32; j++) {
            const int block = span * SPAN32 + j;
            u32 b[EIGHTS][2];
            float4 factor[EIGHTS];
#pragma unroll
            for (int c = 0; c < EIGHTS; c++) {
                const int at = block * x.stride + c * 8;
#if APART
                b[c][0] = luce_u32_at4(values + at * 32), b[c][1] = luce_u32_at4(values + at * 32 + 16);
#else
                const uint2 pair = *reinterpret_cast<const uint2*>(values + at * 32);
                b[c][0] = pair.x, b[c][1] = pair.y;
#endif
                factor[c] = *reinterpret_cast<const float4*>(factors + at);
            }
#pragma unroll
            for (int half = 0; half < GROUPS32; half++) {
                const int group = block * GROUPS32 + half;
                float scale[2], minimum[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    scale[i] = group_scale(scales[i], group);
                    minimum[i] = group_minimum(scales[i], group);
                }
#pragma unroll
                for (int c = 0; c < EIGHTS; c++) {
                    i32 products[4];
#if GROUP == 32
                    const u32 a[4] = {w[0][j][0], w[1][j][0], w[0][j][1], w[1][j][1]};
                    luce_mma_s8_32(products, a, b[c], MAGIC_BITS);
#else
                    const u32 a[2] = {w[0][j][half], w[1][j][half]};
                    luce_mma_s8_16(products, a, b[c][half], MAGIC_BITS);
#endif
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const float2 own =
                            e % 2 ? make_float2(factor[c].z, factor[c].w) : make_float2(factor[c].x, factor[c].y);
                        add_group(products[e], scale[e / 2], minimum[e / 2], own, sum[c][e][set_of(block, half)]);
                    }
                }
            }
        }
    }
}

// The products of weight rows feature0 .. feature0 + 16 * TILES - 1, of which those from `rows` on stand for the last
// one, with ROWS rows of x, by 32 * CHAINS threads. Shared memory: TILE_STAGES * TILE_STAGE bytes or what the result
// takes. Returns, complete for all threads, partial[(chain * ROWS + r) * PARTIAL_STRIDE(16 * TILES) + feature].
LUCE_FN const float* tile_sums(const u8* weight, const i8* values, const float* scales, int feature0, int rows,
                               int cols, u8* shared) {
    const int units = whole_units(cols);
    const int thread = luce_thread(), chain = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const u8* const end = weight + rows * row_bytes(cols);
    const auto row = [&](int feature) { return weight + luce_min(feature0 + feature, rows - 1) * row_bytes(cols); };

    TileCopy mine[TILES];
#pragma unroll
    for (int i = 0; i < TILES; i++)
        mine[i] = {row(thread / SHARE + i * 16) + thread % SHARE * 16, (int)row_bytes(cols) - thread % SHARE * 16};
    u8* const to = shared + thread / SHARE * TILE_STRIDE + thread % SHARE * 16;
    const auto copy_weights = [&](int stage) {
#pragma unroll
        for (int i = 0; i < TILES; i++) copy_step(to + stage + i * 16 * TILE_STRIDE, mine[i], thread % SHARE, end);
    };
    // The x of a step's units lies together.
    const auto copy_x = [&](int unit, int stage) {
        if (TILES == 1 || unit >= units) return;
        const auto part = [&](int at, const void* from, int size, int per_column) {
            const int left = (cols - unit * UNIT_COLS) * per_column;
#pragma unroll
            for (int i = 0; i < CHAINS * size; i += 512 * CHAINS) {
                const int own = i + thread * 16;
                if (own < luce_min(CHAINS * size, left)) {
                    luce_copy16(shared + stage + WEIGHT_STAGE + at + own, static_cast<const u8*>(from) + own, true);
                }
            }
        };
        part(0, values + (i64)unit * UNIT_X, UNIT_X, ROWS);
        part(CHAINS * UNIT_X, scales + (i64)unit * (UNIT_X_SCALES / 4), UNIT_X_SCALES, ROWS / 4);
    };
    int put = 0, take = 0;  // offsets of the stages that are filled and read next
    const auto next = [](int stage) { return stage == (TILE_STAGES - 1) * TILE_STAGE ? 0 : stage + TILE_STAGE; };

    // This chain's x of this step; in shared memory counted from the stage's place.
    const i8* met = (TILES > 1 ? reinterpret_cast<const i8*>(shared + WEIGHT_STAGE) : values) + chain * UNIT_X;
    const float* met_scales =
        (TILES > 1 ? reinterpret_cast<const float*>(shared + WEIGHT_STAGE + CHAINS * UNIT_X) : scales) +
        chain * (UNIT_X_SCALES / 4);
    const u8* const own = shared + g * TILE_STRIDE + (ODD_UNITS ? 0 : chain * UNIT_BYTES);
    u32 low[TILES][2];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int i = 0; i < 2; i++) low[tile][i] = (u32)(u64)row(tile * 16 + i * 8 + g);
    }
    float sum[TILES][ROWS / 8][4][4] = {};

#pragma unroll
    for (int stage = 0; stage < TILE_STAGES - 1; stage++) copy_weights(stage * TILE_STAGE);
    luce_await();  // weights alone were fetched so far
#pragma unroll
    for (int stage = 0; stage < TILE_STAGES - 1; stage++) {
        copy_x(stage * CHAINS, put);
        luce_copy_close();
        put = next(put);
    }
#pragma unroll 1
    for (int unit0 = 0; unit0 < units; unit0 += CHAINS) {
        luce_copy_wait<TILE_STAGES - 2>();
        luce_sync();  // this step's units are there, and nobody reads any more what is overwritten now
        copy_weights(put);
        copy_x(unit0 + (TILE_STAGES - 1) * CHAINS, put);
        luce_copy_close();
        put = next(put);
        Unit in[TILES][2];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int skew =
                    ODD_UNITS ? (int)(low[tile][i] + (u32)unit0 * UNIT_BYTES & 15) + chain * UNIT_BYTES : 0;
                in[tile][i] = {own + take + (tile * 16 + i * 8) * TILE_STRIDE + (skew & ~3), (u32)(skew & 2) * 8};
            }
        }
        const int now = TILES > 1 ? take : 0;
        take = next(take);
        const Rows8 x = {met + now, reinterpret_cast<const float2*>(met_scales + now / 4), ROWS};
        if (unit0 + chain < units) {
#pragma unroll
            for (int tile = 0; tile < TILES; tile++)
                add_tile_unit<ROWS / 8>(in[tile], x, cols - (unit0 + chain) * UNIT_COLS, sum[tile]);
        }
        if (TILES == 1) met += CHAINS * UNIT_X, met_scales += CHAINS * (UNIT_X_SCALES / 4);
    }
    luce_release();
    luce_sync();  // the partial sums take the units' place

    float* const partial = reinterpret_cast<float*>(shared);
    float* const to_sum = partial + chain * ROWS * PARTIAL_STRIDE(16 * TILES) + g;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) {
            const int r = i / 4 * 8 + t * 2 + i % 2;
            const float(&sets)[4] = sum[tile][i / 4][i % 4];
            const float total = (sets[0] + sets[2]) + (sets[1] + sets[3]);
            to_sum[r * PARTIAL_STRIDE(16 * TILES) + tile * 16 + i % 4 / 2 * 8] = total;
        }
    }
    luce_sync();
    return partial;
}

#endif
#endif
