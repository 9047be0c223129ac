// variants: ROWS=1,2,4,8,16 QTYPE=F32,F16,BF16,Q4_0,Q4_1,Q5_0,Q5_1,Q8_0,Q2_K,Q3_K,Q4_K,Q5_K,Q6_K,IQ4_NL,IQ4_XS
//
// Products of a weight matrix with up to ROWS rows: decoding and verification. A wave owns a few of the weight's rows;
// each of their units is read and unpacked once and serves all rows of x.
//
// Row invariance: lane l sums the units l, l + lanes, ... of a weight row, each element by one fmaf in the order of the
// unit, and luce_lane_sum adds the lanes. Neither ROWS, n, the row's number nor FEATURES has a part in that, so a row
// has the same bits whatever its company.
#include "quants.h"
#include "reduce.h"

#define WAVES 4
// Weight rows per wave. More of them need more registers, fewer load x more often: at 16 rows of x its loads, from the
// first-level cache, are the limit.
#define FEATURES (ROWS >= 8 ? 4 : 2)

// Between rows of x: else AMD's scheduler loads all rows at once, and runs out of registers at 16 (clang 19, gfx1100: 256
// and spills, instead of 192).
LUCE_FN void keep_order() {
#if defined(__HIP_DEVICE_COMPILE__)
#if __has_builtin(__builtin_amdgcn_sched_barrier)
    __builtin_amdgcn_sched_barrier(0);
#endif
#endif
}

// The products of COUNT rows of x, of which `n` exist. WHOLE: every unit is a full one and x may be loaded 16 bytes at a
// time; else x is loaded singly, with zeros beyond the last column.
template <int COUNT, bool WHOLE>
LUCE_FN void products(const u8* __restrict__ weight, const float* __restrict__ x, float* __restrict__ out, int n, int rows,
                      int cols, int x_stride, int out_stride, int feature) {
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

// out[r, first + j] = sum over k of x[r, k] * weight[j, k], for r < n <= ROWS and j < rows.
// weight [rows, cols] in blocks of QTYPE; x and out float32 with x_stride and out_stride elements from row to row.
// Grid: ceil(rows / (WAVES * FEATURES)) blocks of WAVES waves.
extern "C" __global__ void __launch_bounds__(WAVES * LUCE_LANES)
    matmul_vec(const u8* __restrict__ weight, const float* __restrict__ x, float* __restrict__ out, int n, int rows,
               int cols, int x_stride, int out_stride, int first) {
    const int feature = ((int)blockIdx.x * WAVES + luce_wave()) * FEATURES;
    if (feature >= rows) return;
    if ((u64)x % 16 == 0 && x_stride % 4 == 0 && cols % UNIT == 0) {
        products<ROWS, true>(weight, x, out + first, n, rows, cols, x_stride, out_stride, feature);
    } else {
        // Odd slices and row lengths: one row after the other. ROWS at once would double the code for a rare case.
        for (int r = 0; r < n; r++) {
            products<1, false>(weight, x + (i64)r * x_stride, out + (i64)r * out_stride + first, 1, rows, cols, 0, 0,
                               feature);
        }
    }
}
