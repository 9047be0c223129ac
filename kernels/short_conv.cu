// Gated short convolution over inputs that are kept in pages. A row of `fused` is b, c and x of h channels each. Grid: x
// rows, y blocks along the channels.
#include "gpu.h"

#define PAGE 64

// pool[dest[row]] = b * x.
extern "C" __global__ void write_inputs(float* __restrict__ pool, const float* __restrict__ fused,
                                        const i64 row_stride, const int* __restrict__ dest, const int h) {
    luce_await();
    const int i = (int)(blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= h) return;
    const float* row = fused + blockIdx.x * row_stride;
    pool[(i64)dest[blockIdx.x] * h + i] = row[i] * row[2 * h + i];
}

// out = c * (the taps' sum of the inputs at the row's newest `kernel` positions, the oldest first; 0 before position 0).
// The pages of a span lie in its row of `table`, their first positions in `first`, without a gap.
extern "C" __global__ void short_conv(float* __restrict__ out, const float* __restrict__ fused,
                                      const float* __restrict__ taps, const float* __restrict__ pool,
                                      const int* __restrict__ row_span, const int* __restrict__ table,
                                      const int* __restrict__ first, const int width,
                                      const int* __restrict__ positions, const i64 row_stride, const int h,
                                      const int kernel) {
    luce_await();
    const int i = (int)(blockIdx.y * blockDim.x + threadIdx.x), row = (int)blockIdx.x;
    if (i >= h) return;
    const i64 span = (i64)row_span[row] * width;
    const int newest = positions[row], begin = first[span];
    float sum = 0.0f;
    for (int tap = 0; tap < kernel; tap++) {
        const int at = newest - kernel + 1 + tap;
        if (at < 0) continue;
        const i64 from = (i64)table[span + (at - begin) / PAGE] * PAGE + at % PAGE;
        sum = fmaf(taps[i * kernel + tap], pool[from * h + i], sum);
    }
    out[(i64)row * h + i] = fused[row * row_stride + h + i] * sum;
}
