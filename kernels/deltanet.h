// Shared by the two forms of gated DeltaNet: deltanet.cu computes short spans row by row, deltanet_chunk.cu long ones
// in chunks. Each skips the other's spans; only the span's own length matters, so no span's bits depend on the rest of
// the step. HEAD: elements of a query, a key and a value. All is in float32.
#pragma once
#include "reduce.h"

// The longest span that is computed row by row (RECURRENT_ROWS of luce/ops/deltanet.py).
#define STEPS 16
// Most taps of the convolution.
#define TAPS 4
// A vector's elements per lane.
#define ELEMENTS (HEAD / LUCE_LANES)
static_assert(HEAD % LUCE_LANES == 0, "all lanes have a part of a vector");
// Neighbouring elements of a vector that a lane has.
template <typename T, int COUNT = ELEMENTS> struct alignas(sizeof(T) * COUNT) Neighbours {
    T at[COUNT];
};

// A span is four int32: slot, first row, rows, position of its first row.
struct Span {
    i32 slot, start, rows, position;
};

LUCE_FN Span span_at(const i32* __restrict__ spans, int index) {
    const i32* span = spans + 4 * (i64)index;
    return {span[0], span[1], span[2], span[3]};
}

// The three vectors of a head that the convolution makes.
enum { QUERY, KEY, VALUE, VECTORS };

// Offsets in a row of the projections: vectors of all heads (q, k, v), the output gates, alpha and beta. The
// convolution's results and weights have the vectors alone, in the same places.
struct Layout {
    int key_heads, heads;

    __device__ __forceinline__ int vector(int kind, int head) const {
        return (kind == VALUE ? 2 * key_heads + head : kind * key_heads + head % key_heads) * HEAD;
    }
    __device__ __forceinline__ int channels() const { return (2 * key_heads + heads) * HEAD; }
    __device__ __forceinline__ int gate(int head) const { return channels() + head * HEAD; }
    __device__ __forceinline__ int alpha(int head) const { return channels() + heads * HEAD + head; }
    __device__ __forceinline__ int beta(int head) const { return alpha(head) + heads; }
};

LUCE_FN float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
LUCE_FN float silu(float x) { return x / (1.0f + expf(-x)); }

// ln of the factor by which a row multiplies the state.
LUCE_FN float log_fade(float alpha, float decay, float dt_bias) {
    const float x = alpha + dt_bias;
    return decay * (x > 20.0f ? x : log1pf(expf(x)));
}

// The factor that makes a query or a key a unit vector, and scales the query: 1 / sqrt(sum x^2 + 1e-6), for queries /
// sqrt(HEAD).
LUCE_FN float unit_scale(int kind, float sum_of_squares) {
    return 1.0f / sqrtf(sum_of_squares + 1e-6f) * (kind == QUERY ? 1.0f / sqrtf((float)HEAD) : 1.0f);
}

LUCE_FN void get4(float (&to)[4], const float* from) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

LUCE_FN void put4(float* to, const float (&from)[4]) {
    *reinterpret_cast<float4*>(to) = {from[0], from[1], from[2], from[3]};
}
