// Grouped dynamic causal convolution over the rows of each span. Grid: x rows, y blocks along the channels.
#include "gpu.h"

// out = the sum over taps t of (base[t, i] + coefficients[row, t, i / group]) * x[row - t, i]; a row before the span's
// first is zero. spans int [n, 4]: its second column is a span's first row.
extern "C" __global__ void dynamic_conv(float* __restrict__ out, const float* __restrict__ x, const i64 x_stride,
                                        const float* __restrict__ base, const float* __restrict__ coefficients,
                                        const i64 coefficient_stride, const int* __restrict__ row_span,
                                        const int* __restrict__ spans, const int h, const int taps, const int group) {
    luce_await();
    const int i = (int)(blockIdx.y * blockDim.x + threadIdx.x), row = (int)blockIdx.x;
    if (i >= h) return;
    const int before = row - spans[4 * row_span[row] + 1], groups = h / group;
    const float* own = coefficients + row * coefficient_stride + i / group;
    float sum = 0.0f;
    for (int tap = 0; tap < taps && tap <= before; tap++)
        sum = fmaf(base[tap * h + i] + own[tap * groups], x[(row - tap) * x_stride + i], sum);
    out[(i64)row * h + i] = sum;
}
