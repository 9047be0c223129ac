// variants: ROWS=1,2,8,16 CHAINS=1,2,4,8 QTYPE=Q4_0,Q8_0,Q4_K,Q5_K,Q6_K
// variants for cuda: ROWS=8,16 CHAINS=4,8 SHARED_X=1 QTYPE=Q4_0,Q8_0
// variants for cuda: ROWS=16 CHAINS=8 SHARED_X=1 TILES=3 QTYPE=Q4_K,Q5_K
//
// Products of a quantised weight matrix with up to ROWS quantised rows of x: decoding and verification.
#include "product_int8.h"

// Of one row of four chains seven blocks: eight would leave 64 of the 2176 of 34816 features for a round of their own. H200, us
// of Q4_K 34816 x 5120 with six, seven and eight: 28.2, 26.5, 27.6.
#if ROWS == 1 && CHAINS == 4
#define HELD 7
#else
#define HELD BLOCKS_HELD
#endif

// out[r, first + j] = sum over k of x[r, k] * weight[j, k], for r < n <= ROWS and j < rows; with `adds`, where ROWS is 1,
// out += that, as product_int8 says. x: ROWS quantised rows. out float32, rows out_stride apart.
// Grid: ceil(rows / FEATURES) blocks of BLOCK_THREADS threads.
extern "C" __global__ void __launch_bounds__(BOUNDS(HELD))
    matmul_int8(const u8* __restrict__ weight, const u8* __restrict__ x, float* __restrict__ out,
              const int n, const int rows, const int cols, const int out_stride, const int first, const int adds) {
    LUCE_DYNAMIC_SHARED(u8, shared);
    product_int8((int)blockIdx.x, weight, x, out, n, rows, cols, out_stride, first, adds, shared);
}

#if NORMS
// norm_product_int8. Grid: ceil(rows / NORM_FEATURES) blocks of NORM_THREADS threads. Dynamic shared memory: alone_bytes, and
// that of block_sums.
extern "C" __global__ void __launch_bounds__(NORM_BOUNDS)
    norm_matmul_int8(const u8* __restrict__ weight, const float* x, const float* __restrict__ factors, const float eps,
                   float* __restrict__ out, const int rows, const int cols, const int first) {
    LUCE_DYNAMIC_SHARED(u8, shared);
    norm_product_int8((int)blockIdx.x, weight, x, factors, eps, out, rows, cols, first, shared);
}
#endif
