// variants for cuda:
//
// Products of a float weight matrix with many rows, where four waves multiply together: as exact as sums of floats, on
// tensor cores.
//
// A row's floats of a slice of columns, times a power of two, are sums of two fp16 numbers (halves.h). Of the four products
// of two such sums that of the lower parts is left out, 2^-22 of the whole at most. wgmma cuts bits off where it adds, so
// its sums are of one slice, the small products first, and floats add up the slices.
//
// Two groups of four waves take turns: one multiplies its 64 rows of x, while the other adds up its last slice and splits the
// floats of its next one, and half of the weights for both.
//
// A row's bits depend on no other row, and on no number of rows. A weight that is infinite makes NaN.
//
// One feature beyond whole tiles, such as the gate of a shared expert behind a router's 256 experts, has no tile: the blocks of
// the first tile multiply it in floats.
#include "halves.h"
#include "reduce.h"
#include "wgmma_rows.h"

#if LUCE_WGMMA

#define THREADS 256
#define ROWS 128      // of x that a block multiplies: a wave has 16 of them
#define FEATURES 128  // of the weight's rows that it multiplies with, and of these a wave splits 16
#define SLICE 64      // columns in shared memory at a time
#define STEPS (SLICE / 16)
#define STAGES 2
#define FACTORS 4  // a group writes those two slices ahead while its waves read
#define PANEL (FEATURES * SLICE * 2)
#define INFINITE 0x1p114f  // the factor of a slice with an infinity

struct Shared {
    alignas(1024) u8 weights[STAGES][2][PANEL];  // higher and lower parts, as wgmma.h has rows
    // Floats as they arrive: each thread's of two rows of x and of two features, which no other thread reads.
    float4 arrived[STAGES][4 * STEPS][THREADS];
    float factor[FACTORS][FEATURES];  // by which sums of a feature's numbers are multiplied
};

// A lane's 16 columns of two rows: words of higher and of lower parts as a product takes them, four for each step, and
// what their sums are multiplied by. Of the 16 columns of a step the lane t has the four from 4t on, and a product's places
// 2t, 2t + 1, 2t + 8 and 2t + 9.
struct Halves {
    u32 high[STEPS][4], low[STEPS][4];
    float factor[2];
};

// Four lanes split a row's slice. Its largest magnitude becomes 2^14 or more but less than 2^15, where a power of two up to
// 2^126 does that: a lower part of 2^-24 is 2^-38 of it.
LUCE_FN void split(const float4 (&from)[4 * STEPS][THREADS], int first, Halves& to) {
#pragma unroll
    for (int side = 0; side < 2; side++) {
        float4 v[STEPS];
        float most = 0.0f;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            v[step] = from[first + side * STEPS + step][threadIdx.x];
            most = fmaxf(most, fmaxf(fmaxf(fabsf(v[step].x), fabsf(v[step].y)), fmaxf(fabsf(v[step].z), fabsf(v[step].w))));
        }
        most = luce_lane_max<4>(most);
        const int shift = luce_min(14 + 127 - (int)(__float_as_uint(most) >> 23), 126);
        const float by = __uint_as_float((u32)(127 + shift) << 23);
        to.factor[side] = __uint_as_float((u32)(127 - shift) << 23);
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            split_pair(to.high[step][side], to.low[step][side], v[step].x * by, v[step].y * by);
            split_pair(to.high[step][side + 2], to.low[step][side + 2], v[step].z * by, v[step].w * by);
        }
    }
}

// Four floats of a row from `column` on, zeros beyond the last. `whole`: they lie at multiples of 16 bytes.
LUCE_FN float4 load(const float* __restrict__ row, int column, int cols, bool whole) {
    if (whole) return column < cols ? *reinterpret_cast<const float4*>(row + column) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = column + i < cols ? row[column + i] : 0.0f;
    return make_float4(v[0], v[1], v[2], v[3]);
}

// out[part, r, j] = sum over the part's k of x[r, k] * weight[j, k], for r < n and j < rows. A part is `part_cols` columns,
// a multiple of SLICE. x and weight float32 [.., cols], rows x_stride and cols elements apart; out float32 with out_stride
// elements from row to row, n * out_stride from part to part.
// Grid: (ceil(n / ROWS), tiles, parts) blocks of THREADS, of ceil(rows / FEATURES) tiles, or one less if that one would have
// one feature.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    matmul_halves(const float* __restrict__ x, const float* __restrict__ weight, float* __restrict__ out, int n, int rows,
                  int cols, int x_stride, int out_stride, int part_cols) {
    LUCE_DYNAMIC_SHARED(Shared, all);
    const int thread = (int)threadIdx.x, g = thread % 32 / 4, t = thread % 4, own = thread / 32 * 16 + g;
    const int feature0 = (int)blockIdx.y * FEATURES;
    const int begin = (int)blockIdx.z * part_cols, slices = luce_ceil_div(luce_min(part_cols, cols - begin), SLICE);
    // The thread's rows of x (0, 1) and of the weight (2, 3). Those beyond the last repeat it, and their results are not
    // written.
    const auto row = [&](int side) {
        const int at = own + side % 2 * 8;
        return side < 2 ? x + (i64)luce_min((int)blockIdx.x * ROWS + at, n - 1) * x_stride
                        : weight + (i64)luce_min(feature0 + at, rows - 1) * cols;
    };
    const float* const from[4] = {row(0), row(1), row(2), row(3)};
    const bool whole = ((u64)x | (u64)weight | (u64)x_stride * 4 | (u64)cols * 4) % 16 == 0;
    // Two rows' pieces of a slice, to places from `first` on of a stage.
    const auto copy_rows = [&](int side, int slice, int stage, int first) {
        if (slice >= slices) return;
        const int at = begin + slice * SLICE + t * 4;
        if (whole) {
#pragma unroll
            for (int i = 0; i < 2 * STEPS; i++) {
                const int column = at + i % STEPS * 16;
                luce_copy16(&all->arrived[stage][first + i][thread], from[side + i / STEPS] + column, column < cols);
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < 2 * STEPS; i++)
                all->arrived[stage][first + i][thread] = load(row(side + i / STEPS), at + i % STEPS * 16, cols, false);
        }
    };
    // The waves of the second group bring and split weights a slice earlier.
    const int group = luce_shfl(thread / 128, 0);
    const auto copy = [&](int slice) {
        copy_rows(0, slice, slice % STAGES, 0);
        copy_rows(2, slice + group, slice % STAGES, 2 * STEPS);
        luce_copy_close();
    };
    Halves now;
    const auto split_weights = [&](int slice, int stage, int first) {
        if (slice >= slices) return;
        Halves made;
        split(all->arrived[stage], first, made);
#pragma unroll
        for (int side = 0; side < 2; side++) {
            const int feature = own + side * 8;
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int at = feature * 128 + ((step * 2 + half) ^ feature % 8) * 16 + t * 4;
                    *reinterpret_cast<u32*>(all->weights[slice % STAGES][0] + at) = made.high[step][side + half * 2];
                    *reinterpret_cast<u32*>(all->weights[slice % STAGES][1] + at) = made.low[step][side + half * 2];
                }
            }
            if (t == 0) all->factor[slice % FACTORS][feature] = made.factor[side];
        }
    };
    const bool more = blockIdx.y == 0 && rows > (int)gridDim.y * FEATURES;
    float dot[2] = {0.0f, 0.0f};
    const auto add_last = [&](int slice) {
        const float* const last = weight + (i64)(rows - 1) * cols;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int column = begin + slice * SLICE + step * 16 + t * 4;
            const float4 w = load(last, column, cols, whole);
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const float4 v = all->arrived[slice % STAGES][side * STEPS + step][thread];
                dot[side] = fmaf(v.x, w.x, fmaf(v.y, w.y, fmaf(v.z, w.z, fmaf(v.w, w.w, dot[side]))));
            }
        }
    };
    // Whether the thread's rows of x have an infinity, of which a product of its parts would make NaN.
    bool infinite[2] = {false, false};
    const auto split_slice = [&](int slice) {
        split(all->arrived[slice % STAGES], 0, now);
#pragma unroll
        for (int side = 0; side < 2; side++) infinite[side] |= now.factor[side] == INFINITE;
        if (more) add_last(slice);
        split_weights(slice + group, slice % STAGES, 2 * STEPS);
    };
    float total[FEATURES / 8][4], sum[FEATURES / 8][4];
#pragma unroll
    for (int i = 0; i < FEATURES / 8; i++) {
#pragma unroll
        for (int e = 0; e < 4; e++) total[i][e] = 0.0f;
    }
    const auto multiply = [&](int slice) {
        const luce_rows_t high = luce_wgmma_rows_at(all->weights[slice % STAGES][0]);
        const luce_rows_t low = luce_wgmma_rows_further(high, PANEL);
        luce_wgmma_fence();
#pragma unroll
        for (int step = 0; step < STEPS; step++)
            luce_wgmma_rows<FEATURES>(sum, now.low[step], luce_wgmma_rows_further(high, step * 32), step > 0);
#pragma unroll
        for (int step = 0; step < STEPS; step++)
            luce_wgmma_rows<FEATURES>(sum, now.high[step], luce_wgmma_rows_further(low, step * 32));
#pragma unroll
        for (int step = 0; step < STEPS; step++)
            luce_wgmma_rows<FEATURES>(sum, now.high[step], luce_wgmma_rows_further(high, step * 32));
        luce_wgmma_close();
    };
    // Adds up a slice, and prepares the next one.
    const auto add = [&](int slice) {
        luce_wgmma_wait<0>();
        luce_wgmma_hold(sum);
#pragma unroll
        for (int i = 0; i < FEATURES / 8; i++) {
            const float2 factor = *reinterpret_cast<const float2*>(&all->factor[slice % FACTORS][i * 8 + t * 2]);
#pragma unroll
            for (int e = 0; e < 4; e++)
                total[i][e] = fmaf(sum[i][e] * (e % 2 ? factor.y : factor.x), now.factor[e / 2], total[i][e]);
        }
        if (slice + 1 == slices) return;
        luce_copy_wait<1>();
        split_slice(slice + 1);
        luce_wgmma_share();
        copy(slice + 1 + STAGES);
    };

    luce_await();
    if (group) copy_rows(2, 0, 1, 0);
    luce_copy_close();
    copy(0);
    luce_copy_wait<1>();
    if (group) split_weights(0, 1, 0);
    copy(1);
    luce_copy_wait<1>();
    split_slice(0);
    luce_wgmma_share();
    copy(2);
    if (group == 0) {
#pragma unroll 1
        for (int slice = 0; slice < slices; slice++) {
            luce_sync_waves();
            multiply(slice);
            luce_sync_waves();
            add(slice);
        }
    } else {
#pragma unroll 1
        for (int slice = 0; slice < slices; slice++) {
            luce_sync_waves();
            if (slice > 0) add(slice - 1);
            luce_sync_waves();
            multiply(slice);
        }
        add(slices - 1);
    }
    luce_release();
    if (more) {
#pragma unroll
        for (int side = 0; side < 2; side++) dot[side] = luce_lane_sum<4>(dot[side]);
    }
#pragma unroll
    for (int side = 0; side < 2; side++) {
        const int r = (int)blockIdx.x * ROWS + own + side * 8;
        if (r >= n) break;
        float* const to = out + ((i64)blockIdx.z * n + r) * out_stride;
        if (more && t == 0) to[rows - 1] = dot[side];
#pragma unroll
        for (int i = 0; i < FEATURES / 8; i++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                if (const int j = feature0 + i * 8 + t * 2 + e; j < rows) to[j] = total[i][side * 2 + e];
            }
        }
        if (!infinite[side]) continue;
#pragma unroll 1
        for (int i = 0; i < FEATURES / 4; i++) {
            const int j = feature0 + i / 2 * 8 + t * 2 + i % 2;
            if (j >= rows) break;
            const float* const left = x + (i64)r * x_stride;
            const float* const right = weight + (i64)j * cols;
            float product = 0.0f;
#pragma unroll 1
            for (int k = begin; k < luce_min(begin + part_cols, cols); k++) product = fmaf(left[k], right[k], product);
            to[j] = product;
        }
    }
}

#endif
