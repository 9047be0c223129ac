// Sums of products of weight rows in any format with float32 rows of x, for formats that have no integer path
// (dot_s8.h): the inner loop of matmul_vec.cu and of expert_vec.
//
// Row invariance: lane l sums the units l, l + lanes, ... of a weight row, each element by one fmaf in the order of the
// unit, and luce_lane_sum adds the lanes. Neither the number of rows, nor which of them it is, nor FEATURES has a part
// in that, so a row has the same bits whatever its company.
#pragma once
#include "quants.h"
#include "reduce.h"

// Between rows of x: else AMD's scheduler loads all rows at once, and runs out of registers at 16 (clang 19, gfx1100:
// 256 and spills, instead of 192).
LUCE_FN void keep_order() {
#if defined(__HIP_DEVICE_COMPILE__)
#if __has_builtin(__builtin_amdgcn_sched_barrier)
    __builtin_amdgcn_sched_barrier(0);
#endif
#endif
}

// The products of COUNT rows of x, of which `n` exist. WHOLE: every unit is a full one and x may be loaded 16 bytes at
// a time; else x is loaded singly, with zeros beyond the last column.
template <int FEATURES, int COUNT, bool WHOLE>
LUCE_FN void products(const u8* __restrict__ weight, const float* __restrict__ x, float* __restrict__ out, int n,
                      int rows, int cols, int x_stride, int out_stride, int feature) {
    const u8* row[FEATURES];
    float sum[FEATURES][COUNT];
#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
        // Features beyond the last repeat it, and are not written.
        row[f] = weight + luce_min(feature + f, rows - 1) * row_bytes(cols);
#pragma unroll
        for (int r = 0; r < COUNT; r++) sum[f][r] = 0.0f;
    }

    for (int unit = luce_lane(); unit < row_units(cols); unit += LUCE_LANES) {
        const int column = unit_column(unit);
        const int left = WHOLE ? UNIT : cols - column;
        Packed packed[FEATURES];
#pragma unroll
        for (int f = 0; f < FEATURES; f++) fetch(row[f], unit, left, packed[f]);
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
            float w[FEATURES][RUN];
#pragma unroll
            for (int f = 0; f < FEATURES; f++) unpack_run(packed[f], unit, run, w[f]);
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

#pragma unroll
    for (int f = 0; f < FEATURES; f++) {
#pragma unroll
        for (int r = 0; r < COUNT; r++) {
            const float total = luce_lane_sum(sum[f][r]);
            if (luce_lane() == 0 && r < n && feature + f < rows) out[(i64)r * out_stride + feature + f] = total;
        }
    }
}
