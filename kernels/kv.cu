// variants: KTYPE=F16 VTYPE=F16,Q8_0
// variants: KTYPE=BF16 VTYPE=BF16
// variants: KTYPE=Q8_0 VTYPE=Q8_0,Q4_0
// variants: KTYPE=Q4_0 VTYPE=Q4_0
// Writing of K and V rows into the page pools, quantised on the way. Grid: x rows, y blocks along a row.
#include "kv.h"

extern "C" __global__ void write_kv(KTYPE::Element* __restrict__ k_pool, VTYPE::Element* __restrict__ v_pool,
                                    const float* __restrict__ k, const i64 k_row, const i64 k_head,
                                    const float* __restrict__ v, const i64 v_row, const i64 v_head,
                                    const int* __restrict__ dest, const int kv_heads, const int d) {
    luce_await();
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    int head = i / d, column = i % d;
    bool own = i < kv_heads * d;
    float key = own ? k[blockIdx.x * k_row + head * k_head + column] : 0.0f;
    float value = own ? v[blockIdx.x * v_row + head * v_head + column] : 0.0f;
    i64 to = (i64)dest[blockIdx.x] * kv_heads * d;
    KTYPE::store(k_pool + KTYPE::offset(to), i, key, own);
    VTYPE::store(v_pool + VTYPE::offset(to), i, value, own);
}
