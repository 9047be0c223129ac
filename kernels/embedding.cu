// variants: QTYPE=F32,F16,BF16,Q4_0,Q4_1,Q5_0,Q5_1,Q8_0,Q2_K,Q3_K,Q4_K,Q5_K,Q6_K,IQ4_NL,IQ4_XS,MXFP4
// variants: QTYPE=IQ1_S,IQ1_M,IQ2_XXS,IQ2_XS,IQ2_S,IQ3_XXS,IQ3_S,NVFP4,TQ1_0,TQ2_0
//
// Rows of a table by their numbers. One block writes one row.
#include "quants.h"

// out[i, :] = the dequantised row rows[i]; table [*, cols] in blocks of QTYPE, out float32 [grid, cols], at a
// multiple of 16 bytes.
extern "C" __global__ void embed(const u8* __restrict__ table, const i32* __restrict__ rows, float* __restrict__ out,
                                 int cols) {
    luce_release();
    luce_await();
    const u8* row = table + rows[blockIdx.x] * row_bytes(cols);
    float* to = out + (i64)blockIdx.x * cols;
    for (int unit = luce_thread(); unit < row_units(cols); unit += luce_threads()) {
        const int column = unit_column(unit);
        float w[UNIT];
        unpack(row, unit, cols - column, w);
#if PLAIN
#pragma unroll
        for (int e = 0; e < UNIT; e++) {
            if (column + e < cols) to[column + e] = w[e];
        }
#else
        // A thread's runs are apart from those of others: single floats would each take a sector of the second-level cache.
#pragma unroll
        for (int e = 0; e < UNIT; e += 4) {
            *reinterpret_cast<float4*>(to + column + e / RUN * STEP + e % RUN) =
                make_float4(w[e], w[e + 1], w[e + 2], w[e + 3]);
        }
#endif
    }
}

// out[i, :] = x[rows[i], :]; x float32 with `stride` elements from row to row, out float32 [grid, cols].
extern "C" __global__ void take_rows(const float* __restrict__ x, const i32* __restrict__ rows, float* __restrict__ out,
                                     int cols, int stride) {
    luce_release();
    luce_await();
    const float* row = x + (i64)rows[blockIdx.x] * stride;
    float* to = out + (i64)blockIdx.x * cols;
    for (int i = luce_thread(); i < cols; i += luce_threads()) to[i] = row[i];
}
