// What a position does to heads: the angles of the rotary position embedding, and the temperature of queries. Grid: x
// rows, y blocks along a row.
#include "gpu.h"

// cos and sin of position * frequency. In double: a float product is off by 0.016 at position 262144. That is
// fast enough on GPUs that are slow in double: `half` angles per row and step. Positions from `stretched` on count from
// there and take the second `half` frequencies.
extern "C" __global__ void rope_table(float2* __restrict__ table, const int* __restrict__ positions,
                                      const int position_stride, const double* __restrict__ frequencies,
                                      const int* __restrict__ axes, const int half, const int stretched,
                                      const float magnitude) {
    luce_await();
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= half) return;
    // One position per row serves all axes.
    int axis = position_stride == 1 ? 0 : axes[i];
    int position = positions[(i64)blockIdx.x * position_stride + axis];
    double angle = position < stretched ? (double)position * frequencies[i]
                                        : (double)(position - stretched) * frequencies[half + i];
    double s, c;
    sincos(angle, &s, &c);
    float2 turn;
    turn.x = (float)(c * magnitude);
    turn.y = (float)(s * magnitude);
    table[(i64)blockIdx.x * half + i] = turn;
}

// q [rows, heads, d] *= 1 + scale log(1 + floor(position / length)), in double like the angles.
extern "C" __global__ void temper(float* __restrict__ q, const i64 row_stride, const i64 head_stride, const int heads,
                                  const int d, const int* __restrict__ positions, const int position_stride,
                                  const float scale, const int length) {
    luce_await();
    int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= heads * d) return;
    int steps = positions[(i64)blockIdx.x * position_stride] / length;
    q[blockIdx.x * row_stride + i / d * head_stride + i % d] *= (float)(1.0 + (double)scale * log(1.0 + (double)steps));
}
