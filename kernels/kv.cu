// Writing of K and V rows into the page pools. Grid: x rows, y blocks along a row.
#include "gpu.h"

extern "C" __global__ void write_kv(f16_t* __restrict__ k_pool, f16_t* __restrict__ v_pool, const float* __restrict__ k,
                                    const i64 k_row, const i64 k_head, const float* __restrict__ v, const i64 v_row,
                                    const i64 v_head, const int* __restrict__ dest, const int kv_heads, const int d) {
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= kv_heads * d) return;
    int head = i / d, column = i % d;
    i64 to = (i64)dest[blockIdx.x] * kv_heads * d + i;
    k_pool[to] = luce_f16(k[blockIdx.x * k_row + head * k_head + column]);
    v_pool[to] = luce_f16(v[blockIdx.x * v_row + head * v_head + column]);
}
