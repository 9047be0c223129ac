// Alternating updates (AltUp, Baykal et al., NeurIPS 2023) of the copies of the residual stream, and gates of which only
// the largest values count. Row r of the first copy is x[r, hidden], the others lie side by side in beside[r, 3, hidden].
#include "reduce.h"

#define STREAMS 4

// coefficients[count] = weights [count, STREAMS] times tanh(router), in shared memory.
LUCE_FN void make_coefficients(float* coefficients, const float* __restrict__ weights, const float* __restrict__ router,
                               const int count) {
    const int i = (int)threadIdx.x;
    if (i < count) {
        float sum = 0.0f;
        for (int m = 0; m < STREAMS; m++) sum = fmaf(weights[i * STREAMS + m], tanhf(router[m]), sum);
        coefficients[i] = sum;
    }
    luce_sync();
}

// Each copy j += sum over the copies i of c[j, i] * copy i. Grid: x rows, y blocks along a row.
extern "C" __global__ void altup_predict(float* __restrict__ x, float* __restrict__ beside,
                                         const float* __restrict__ router, const float* __restrict__ weights,
                                         const int hidden) {
    __shared__ float c[STREAMS * STREAMS];
    luce_await();
    const i64 row = blockIdx.x;
    make_coefficients(c, weights, router + row * STREAMS, STREAMS * STREAMS);
    const int i = (int)(blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= hidden) return;
    float* others = beside + row * (STREAMS - 1) * hidden + i;
    float value[STREAMS];
    value[0] = x[row * hidden + i];
    for (int j = 1; j < STREAMS; j++) value[j] = others[(i64)(j - 1) * hidden];
    for (int j = 0; j < STREAMS; j++) {
        float sum = value[j];
        for (int k = 0; k < STREAMS; k++) sum = fmaf(c[j * STREAMS + k], value[k], sum);
        if (j)
            others[(i64)(j - 1) * hidden] = sum;
        else
            x[row * hidden + i] = sum;
    }
}

// Each copy j += (1 + d[j]) * (result - copy 0); out = the new copy 0 times `scale`. Grid as altup_predict.
extern "C" __global__ void altup_correct(float* __restrict__ out, float* __restrict__ x, float* __restrict__ beside,
                                         const float* __restrict__ result, const float* __restrict__ router,
                                         const float* __restrict__ weights, const float* __restrict__ scale,
                                         const int hidden) {
    __shared__ float d[STREAMS];
    luce_await();
    const i64 row = blockIdx.x;
    make_coefficients(d, weights, router + row * STREAMS, STREAMS);
    const int i = (int)(blockIdx.y * blockDim.x + threadIdx.x);
    if (i >= hidden) return;
    float* others = beside + row * (STREAMS - 1) * hidden + i;
    const float first = x[row * hidden + i], more = result[row * hidden + i] - first;
    for (int j = 1; j < STREAMS; j++) others[(i64)(j - 1) * hidden] = fmaf(1.0f + d[j], more, others[(i64)(j - 1) * hidden]);
    const float corrected = fmaf(1.0f + d[0], more, first);
    x[row * hidden + i] = corrected;
    out[row * hidden + i] = corrected * scale[i];
}

LUCE_FN float mean_square(const float* row, const int d) {
    float sum = 0.0f;
    for (int i = (int)threadIdx.x; i < d; i += (int)blockDim.x) sum = fmaf(row[i], row[i], sum);
    return luce_block_sum(sum) / (float)d;
}

// y[r, j] *= |x[r]| / |y[r, j]|, by their root mean squares. Grid: x rows, y vectors of a row.
extern "C" __global__ void match_magnitude(float* __restrict__ y, const float* __restrict__ x, const int d,
                                           const float least) {
    luce_await();
    float* own = y + ((i64)blockIdx.x * gridDim.y + blockIdx.y) * d;
    const float target = sqrtf(mean_square(x + (i64)blockIdx.x * d, d));
    const float magnitude = sqrtf(fmaxf(mean_square(own, d), least));
    for (int i = (int)threadIdx.x; i < d; i += (int)blockDim.x) own[i] = own[i] * target / magnitude;
}

// x = max(0, x - mean - deviations * std) over a row, std with divisor d. Grid: x rows.
extern "C" __global__ void keep_largest(float* __restrict__ x, const i64 row_stride, const int d,
                                        const float deviations) {
    luce_await();
    float* row = x + blockIdx.x * row_stride;
    float sum = 0.0f;
    for (int i = (int)threadIdx.x; i < d; i += (int)blockDim.x) sum += row[i];
    const float mean = luce_block_sum(sum) / (float)d;
    sum = 0.0f;
    for (int i = (int)threadIdx.x; i < d; i += (int)blockDim.x) sum = fmaf(row[i] - mean, row[i] - mean, sum);
    const float cutoff = fmaf(deviations, sqrtf(luce_block_sum(sum) / (float)d), mean);
    for (int i = (int)threadIdx.x; i < d; i += (int)blockDim.x) row[i] = fmaxf(0.0f, row[i] - cutoff);
}
