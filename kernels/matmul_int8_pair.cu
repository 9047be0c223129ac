// variants: ROWS=1,2,8,16 CHAINS=1,2,4,8 FIRST=Q5_K SECOND=Q4_K
// variants: ROWS=1,2,8,16 CHAINS=1,2,4,8 FIRST=Q4_K SECOND=Q6_K
//
// Products of two weight matrices of different types with the same quantised rows of x, in one launch: the blocks of
// the second use multiprocessors that the first leaves idle.
#include "bulk.h"
#include "norm_alone.h"

#define QTYPE FIRST
namespace first_of_pair {
#include "product_int8.h"
}

// Macros that depend on the type, and the guards of headers that do.
#undef BLOCK
#undef BLOCK_BYTES
#undef DOT_INT8_H
#undef GROUP
#undef MMA_INT8_H
#undef PLAIN
#undef QTYPE
#undef QUANTS_H
#undef QUANTS_INT8_H
#undef RUN
#undef RUNS
#undef SET_GROUPS
#undef SPAN32
#undef STEP

#define QTYPE SECOND
namespace second_of_pair {
#include "product_int8.h"
}

// Arguments as of matmul_int8; both parts have as many chains. Grid: ceil(rows / FEATURES) blocks for each of both.
extern "C" __global__ void __launch_bounds__(BOUNDS(BLOCKS_HELD))
    matmul_int8_pair(const u8* __restrict__ weight, const u8* __restrict__ second, const u8* __restrict__ x,
                   float* __restrict__ out, const int n, const int rows, const int second_rows, const int cols,
                   const int out_stride, const int first, const int second_first, const int adds) {
    LUCE_DYNAMIC_SHARED(u8, shared);
    const int block = (int)blockIdx.x, blocks = luce_ceil_div(rows, FEATURES);
    if (block < blocks) {
        first_of_pair::product_int8(block, weight, x, out, n, rows, cols, out_stride, first, adds, shared);
    } else {
        second_of_pair::product_int8(block - blocks, second, x, out, n, second_rows, cols, out_stride, second_first,
                                     adds, shared);
    }
}

#if NORMS
// The same of the norm of one row, with arguments as of norm_matmul_int8. Grid: ceil(rows / NORM_FEATURES) blocks of both.
extern "C" __global__ void __launch_bounds__(NORM_BOUNDS)
    norm_matmul_int8_pair(const u8* __restrict__ weight, const u8* __restrict__ second, const float* x,
                        const float* __restrict__ factors, const float eps, float* __restrict__ out, const int rows,
                        const int second_rows, const int cols, const int first, const int second_first) {
    LUCE_DYNAMIC_SHARED(u8, shared);
    const int block = (int)blockIdx.x, blocks = luce_ceil_div(rows, NORM_FEATURES);
    if (block < blocks) {
        first_of_pair::norm_product_int8(block, weight, x, factors, eps, out, rows, cols, first, shared);
    } else {
        second_of_pair::norm_product_int8(block - blocks, second, x, factors, eps, out, second_rows, cols, second_first,
                                          shared);
    }
}
#endif
