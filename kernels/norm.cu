// Root mean square norms: x / sqrt(mean(x^2) + eps) * weight, in float32.
//
// Whole rows (rms_norm, add_rms_norm) take one block each, heads (head_rms_norm) one wave each. The
// block's size comes from the row's length alone, so a row's sum has one order however many rows there are.
#include "reduce.h"

extern "C" __global__ void __launch_bounds__(1024)
    rms_norm(float* __restrict__ out, const float* __restrict__ x, const i64 x_stride, const float* __restrict__ weight,
             const int d, const float eps) {
    const float* row = x + blockIdx.x * x_stride;
    float* to = out + (i64)blockIdx.x * d;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < d; i += blockDim.x) sum = fmaf(row[i], row[i], sum);
    float scale = 1.0f / sqrtf(luce_block_sum(sum) / (float)d + eps);
    for (int i = threadIdx.x; i < d; i += blockDim.x) to[i] = row[i] * scale * weight[i];
}

extern "C" __global__ void __launch_bounds__(1024)
    add_rms_norm(float* __restrict__ out, float* __restrict__ x, const i64 x_stride, const float* __restrict__ delta,
                 const i64 delta_stride, const float* __restrict__ weight, const int d, const float eps) {
    float* row = x + blockIdx.x * x_stride;
    const float* more = delta + blockIdx.x * delta_stride;
    float* to = out + (i64)blockIdx.x * d;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        float value = row[i] + more[i];
        row[i] = value;
        sum = fmaf(value, value, sum);
    }
    float scale = 1.0f / sqrtf(luce_block_sum(sum) / (float)d + eps);
    // Each thread reads back only what it wrote itself.
    for (int i = threadIdx.x; i < d; i += blockDim.x) to[i] = row[i] * scale * weight[i];
}

LUCE_FN float head_scale(const float* head, int d, float eps) {
    float sum = 0.0f;
    for (int i = luce_lane(); i < d; i += LUCE_LANES) sum = fmaf(head[i], head[i], sum);
    return 1.0f / sqrtf(luce_lane_sum(sum) / (float)d + eps);
}

extern "C" __global__ void head_rms_norm(float* __restrict__ x, const i64 row_stride, const i64 head_stride,
                                         const int heads, const float* __restrict__ weight, const int d,
                                         const float eps) {
    int head = blockIdx.y * (blockDim.x / LUCE_LANES) + luce_wave();
    if (head >= heads) return;  // whole waves
    float* from = x + blockIdx.x * row_stride + head * head_stride;
    float scale = head_scale(from, d, eps);
    for (int i = luce_lane(); i < d; i += LUCE_LANES) from[i] = from[i] * scale * weight[i];
}
