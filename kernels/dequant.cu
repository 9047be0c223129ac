// variants: QTYPE=F16,BF16,Q4_0,Q4_1,Q5_0,Q5_1,Q8_0,Q2_K,Q3_K,Q4_K,Q5_K,Q6_K,IQ4_NL,IQ4_XS
//
// Rows of a weight matrix as halves, for a library's product.
#include "mma.h"
#include "quants.h"

#define THREADS 128

// half[j, c] = weight[j, c], to nearest; weight in blocks of QTYPE, `cols` a multiple of 8.
// Grid: one block of THREADS per row.
extern "C" __global__ void __launch_bounds__(THREADS)
    dequant(const u8* __restrict__ weight, f16_t* __restrict__ half, int cols) {
    const u8* row = weight + blockIdx.x * row_bytes(cols);
    f16_t* to = half + (i64)blockIdx.x * cols;
    for (int unit = luce_thread(); unit < row_units(cols); unit += THREADS) {
        const int column = unit_column(unit);
        float w[UNIT];
        unpack(row, unit, cols - column, w);
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
            const float* v = w + run * RUN;
            f16_t* run_to = to + column + run * STEP;
#if RUN == 8
            uint4 packed;
            packed.x = luce_f16_pair(v[0], v[1]);
            packed.y = luce_f16_pair(v[2], v[3]);
            packed.z = luce_f16_pair(v[4], v[5]);
            packed.w = luce_f16_pair(v[6], v[7]);
            *reinterpret_cast<uint4*>(run_to) = packed;
#else
            uint2 packed;
            packed.x = luce_f16_pair(v[0], v[1]);
            packed.y = luce_f16_pair(v[2], v[3]);
            *reinterpret_cast<uint2*>(run_to) = packed;
#endif
        }
    }
}
