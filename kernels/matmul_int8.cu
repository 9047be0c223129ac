// variants: ROWS=1,2,8,16 CHAINS=1,2,4,8 QTYPE=Q4_0,Q8_0,Q4_K,Q5_K,Q6_K
// variants for cuda: ROWS=8,16 CHAINS=4,8 SHARED_X=1 QTYPE=Q4_0,Q8_0
// variants for cuda: ROWS=16 CHAINS=8 SHARED_X=1 TILES=3 QTYPE=Q4_K,Q5_K
//
// Products of a quantised weight matrix with up to ROWS quantised rows of x: decoding and verification.
#include "product_int8.h"

// out[r, first + j] = sum over k of x[r, k] * weight[j, k], for r < n <= ROWS and j < rows.
// x: ROWS quantised rows. out float32, rows out_stride apart.
// Grid: ceil(rows / FEATURES) blocks of 32 * CHAINS threads.
extern "C" __global__ void __launch_bounds__(BOUNDS)
    matmul_int8(const u8* __restrict__ weight, const u8* __restrict__ x, float* __restrict__ out,
              const int n, const int rows, const int cols, const int out_stride, const int first) {
    LUCE_DYNAMIC_SHARED(u8, shared);
    product_int8((int)blockIdx.x, weight, x, out, n, rows, cols, out_stride, first, shared);
}
