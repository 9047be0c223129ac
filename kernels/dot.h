// Sums of products of weight rows in any format with float32 rows of x, for formats that have no integer path
// (dot_int8.h): the inner loop of matmul_vec.cu and of expert_vec.
//
// A block takes a few weight rows, and its threads share the columns: the time of a short row is latency, so as many
// loads as possible run at once.
//
// Row invariance: thread t sums the units t, t + threads, ... of a weight row, each element by one fmaf in the order of
// the unit, luce_lane_sum adds the lanes, and the waves follow in order. Neither the number of rows, nor the
// place of the row, nor FEATURES affects that order, so a row has the same bits alone and among others.
#pragma once
#include "quants.h"
#include "reduce.h"

// Between rows of x: otherwise AMD's scheduler loads all rows at once, and runs out of registers at 16 (clang 19,
// gfx1100: 256 and spills, instead of 192).
LUCE_FN void keep_order() {
#if defined(__HIP_DEVICE_COMPILE__)
#if __has_builtin(__builtin_amdgcn_sched_barrier)
    __builtin_amdgcn_sched_barrier(0);
#endif
#endif
}

// The products of COUNT rows of x, of which `n` exist, with FEATURES weight rows, by WAVES waves. WHOLE: every unit is
// full and x may be loaded 16 bytes at a time; otherwise x is loaded value by value, with zeros beyond the last column.
template <int WAVES, int FEATURES, int COUNT, bool WHOLE>
LUCE_FN void products(const u8* __restrict__ weight, const float* __restrict__ x, float* __restrict__ out, int n,
                      int rows, int cols, int x_stride, int out_stride, int feature) {
    __shared__ float partial[WAVES][FEATURES][COUNT];
    // Units of a row that a thread fetches before it uses the first.
    constexpr int DEPTH = PLAIN && COUNT <= 2 ? 4 : 1, THREADS = WAVES * LUCE_LANES;
    const int units = row_units(cols);
    const u8* row[FEATURES];
    float sum[FEATURES][COUNT];
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
        // Features beyond the last repeat it, and their results are not written.
        row[f] = weight + luce_min(feature + f, rows - 1) * row_bytes(cols);
#pragma unroll
        for (int r = 0; r < COUNT; r++) sum[f][r] = 0.0f;
    }

    for (int unit0 = luce_thread(); unit0 - luce_thread() < units; unit0 += DEPTH * THREADS) {
        Packed packed[DEPTH][FEATURES];
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const int unit = unit0 + d * THREADS, left = WHOLE ? UNIT : cols - unit_column(unit);
#pragma unroll
            for (int f = 0; f < FEATURES; f++)
                if (unit < units) fetch(row[f], unit, left, packed[d][f]);
        }
        luce_await();  // until here, only weights were fetched
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const int unit = unit0 + d * THREADS, column = unit_column(unit), left = WHOLE ? UNIT : cols - column;
            if (unit >= units) break;
#pragma unroll
            for (int run = 0; run < RUNS; run++) {
                float w[FEATURES][RUN];
#pragma unroll
                for (int f = 0; f < FEATURES; f++) unpack_run(packed[d][f], unit, run, w[f]);
#pragma unroll
                for (int r = 0; r < COUNT; r++) {
                    keep_order();
                    const float* from = x + (i64)luce_min(r, n - 1) * x_stride + column;
#pragma unroll
                    for (int e = 0; e < RUN; e += 4) {
                        const int at = run * STEP + e;
                        float v[4];
                        if (WHOLE) {
                            const float4 all = *reinterpret_cast<const float4*>(from + at);
                            v[0] = all.x, v[1] = all.y, v[2] = all.z, v[3] = all.w;
                        } else {
#pragma unroll
                            for (int i = 0; i < 4; i++) v[i] = at + i < left ? from[at + i] : 0.0f;
                        }
#pragma unroll
                        for (int i = 0; i < 4; i++) {
#pragma unroll
                            for (int f = 0; f < FEATURES; f++) sum[f][r] = fmaf(w[f][e + i], v[i], sum[f][r]);
                        }
                    }
                }
            }
        }
    }
    luce_release();

#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
#pragma unroll
        for (int r = 0; r < COUNT; r++) {
            const float total = luce_lane_sum(sum[f][r]);
            if (luce_lane() == 0) partial[luce_wave()][f][r] = total;
        }
    }
    luce_sync();
    for (int i = luce_thread(); i < FEATURES * COUNT; i += THREADS) {
        const int f = i % FEATURES, r = i / FEATURES;
        float total = partial[0][f][r];
#pragma unroll
        for (int wave = 1; wave < WAVES; wave++) total += partial[wave][f][r];
        if (r < n && feature + f < rows) out[(i64)r * out_stride + feature + f] = total;
    }
}
