// Hidden states of some layers (features), stored for a drafter: rounded to bfloat16 at once, copied to a ring later.
#include "gpu.h"

// out[r, j] = x[r, j], or x[r, j] + delta[r, j] with ADD; rows of `cols` columns, `out_stride` elements apart in out.
// Grid: x rows, y blocks along a row.
template <bool ADD>
LUCE_FN void capture(const float* __restrict__ x, const float* __restrict__ delta, bf16_t* __restrict__ out, int cols,
                     i64 out_stride) {
    const int j = (int)(blockIdx.y * blockDim.x + threadIdx.x);
    luce_release();
    luce_await();
    if (j >= cols) return;
    const i64 from = (i64)blockIdx.x * cols + j;
    out[blockIdx.x * out_stride + j] = luce_bf16(ADD ? x[from] + delta[from] : x[from]);
}

extern "C" __global__ void capture_rows(const float* __restrict__ x, bf16_t* __restrict__ out, int cols,
                                        i64 out_stride) {
    capture<false>(x, nullptr, out, cols, out_stride);
}

extern "C" __global__ void capture_sums(const float* __restrict__ x, const float* __restrict__ delta,
                                        bf16_t* __restrict__ out, int cols, i64 out_stride) {
    capture<true>(x, delta, out, cols, out_stride);
}

// ring[dest[r], first + j] = rows[r, j] where dest[r] >= 0, in words of two values: `words` in a row, `ring_words` in
// one of the ring; dest has no duplicates. Grid: x rows, y blocks along a row.
extern "C" __global__ void put_rows(const u32* __restrict__ rows, u32* __restrict__ ring, const i32* __restrict__ dest,
                                    int words, int ring_words, int first) {
    const int j = (int)(blockIdx.y * blockDim.x + threadIdx.x), to = dest[blockIdx.x];
    luce_release();
    luce_await();
    if (j < words && to >= 0) ring[(i64)to * ring_words + first + j] = rows[(i64)blockIdx.x * words + j];
}
