// variants: QTYPE=F16,BF16,Q4_0,Q4_1,Q5_0,Q5_1,Q8_0,Q2_K,Q3_K,Q4_K,Q5_K,Q6_K,IQ4_NL,IQ4_XS,MXFP4
// variants: QTYPE=IQ1_S,IQ1_M,IQ2_XXS,IQ2_XS,IQ2_S,IQ3_XXS,IQ3_S,NVFP4,TQ1_0,TQ2_0
//
// Rows of a weight matrix as fp16, for products by a BLAS library.
#include "mma.h"
#include "quants.h"

#define THREADS 128

#define EIGHTS (RUN / 8)  // 16-byte pieces of a run as fp16

// half[j, c] = weight[j, c], to nearest; weight in blocks of QTYPE, `cols` a multiple of 8.
// Grid: one block of THREADS per row.
extern "C" __global__ void __launch_bounds__(THREADS)
    dequant(const u8* __restrict__ weight, f16_t* __restrict__ half, int cols) {
    luce_await();
    const u8* row = weight + blockIdx.x * row_bytes(cols);
    f16_t* to = half + (i64)blockIdx.x * cols;
    for (int i = luce_thread(); i < row_units(cols) * EIGHTS; i += THREADS) {
        // If runs are longer than 8, neighbouring threads share a unit: a wave's stores then fill whole sectors. With
        // two stores per run instead, the kernel took 1.9 times as long (Q4_K, H200).
        const int unit = i / EIGHTS, eighth = i % EIGHTS;
        const int column = unit_column(unit);
        float w[UNIT];
        unpack(row, unit, cols - column, w);
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
            u32 words[4];
#pragma unroll
            for (int word = 0; word < 4; word++) {
                const float* v = w + run * RUN + word * 2;
                words[word] = luce_f16_pair(v[0], v[1]);
                if (EIGHTS == 2 && eighth == 1) words[word] = luce_f16_pair(v[RUN / 2], v[RUN / 2 + 1]);
            }
            *reinterpret_cast<uint4*>(to + column + run * STEP + eighth * 8) =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}
