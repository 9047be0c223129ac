// variants: ROWS=1,2,4,8,16 QTYPE=F32,F16,BF16,Q4_1,Q5_0,Q5_1,Q2_K,Q3_K,IQ4_NL,IQ4_XS,MXFP4
// variants: ROWS=1,2,4,8,16 QTYPE=IQ1_S,IQ1_M,IQ2_XXS,IQ2_XS,IQ2_S,IQ3_XXS,IQ3_S,NVFP4,TQ1_0,TQ2_0
//
// Products of a weight matrix with rows in float32: decoding and verification. A block owns a few of the weight's rows;
// each of their units is read and dequantised once for up to ROWS rows of x.
#include "dot.h"

#define WAVES 4
// Weight rows per block. More need more registers, fewer load x more often: at 16 rows the loads of x, from the
// first-level cache, are the limit.
#define FEATURES (ROWS >= 8 ? 4 : 2)

// out[r, first + j] = sum over k of x[r, k] * weight[j, k], for r < n and j < rows.
// weight [rows, cols] in blocks of QTYPE; x and out float32 with x_stride and out_stride elements from row to row.
// Grid: (ceil(rows / FEATURES), ceil(n / ROWS)) blocks of WAVES waves.
extern "C" __global__ void __launch_bounds__(WAVES * LUCE_LANES)
    matmul_vec(const u8* __restrict__ weight, const float* __restrict__ x, float* __restrict__ out, int n, int rows,
               int cols, int x_stride, int out_stride, int first) {
    const int feature = (int)blockIdx.x * FEATURES, row0 = (int)blockIdx.y * ROWS;
    x += (i64)row0 * x_stride;
    out += (i64)row0 * out_stride;
    n = luce_min(n - row0, ROWS);
    if ((u64)x % 16 == 0 && x_stride % 4 == 0 && cols % UNIT == 0) {
        products<WAVES, FEATURES, ROWS, true>(weight, x, out + first, n, rows, cols, x_stride, out_stride, feature);
    } else {
        // Unaligned slices and row lengths: row by row. ROWS at once would double the code for a rare case.
        for (int r = 0; r < n; r++) {
            const float* from = x + (i64)r * x_stride;
            float* to = out + (i64)r * out_stride + first;
            products<WAVES, FEATURES, 1, false>(weight, from, to, 1, rows, cols, 0, 0, feature);
            luce_sync();  // the sums of the previous row have been read
        }
    }
}
