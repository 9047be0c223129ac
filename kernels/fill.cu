// variants: TYPE=float,i32,f16_t
// Fills an array: the smallest kernel, with which `luce doctor` and the device tests check that launches work.
#include "gpu.h"

LUCE_FN void put(float& to, float value) { to = value; }
LUCE_FN void put(i32& to, float value) { to = (i32)value; }
LUCE_FN void put(f16_t& to, float value) { to = luce_f16(value); }

extern "C" __global__ void fill(TYPE* __restrict__ out, const i64 n, const float value) {
    luce_await();
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) put(out[i], value);
}
