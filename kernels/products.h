// Products of many rows as what multiplies leaves them, for kernels that read them.
#pragma once
#include "mma.h"

// A product of int8 rows as a float: its exact sum times the scales of its row and its feature.
LUCE_FN float int8_product(i32 sum, float row, float feature) { return (float)sum * row * feature; }

// Where products are read from. With FP16 `values` are fp16 numbers, of rows with the scales `rows`; without, they are floats,
// or if there are `features` the sums in int32 of rows with the scales `rows`.
template <bool FP16> struct Products {
    const float* values;
    const float* rows;
    const float* features;

    __device__ __forceinline__ const f16_t* half(i64 row, i64 stride, int feature) const {
        return reinterpret_cast<const f16_t*>(values) + row * stride + feature;
    }
    __device__ __forceinline__ float at(i64 row, i64 stride, int feature) const {
        if constexpr (FP16) {
            return luce_f32(*half(row, stride, feature)) * rows[row];
        } else {
            const float value = values[row * stride + feature];
            return features ? int8_product((i32)__float_as_uint(value), rows[row], features[feature]) : value;
        }
    }
};

// Four neighbouring halves, at a column that is a multiple of four.
struct alignas(8) FourHalves {
    f16_t at[4];
};

// Whether a kernel with these arguments reads halves.
LUCE_FN bool are_halves(const float* rows, const float* features) { return rows && !features; }

// One product, in any form.
LUCE_FN float product_at(const float* values, const float* rows, const float* features, i64 row, i64 stride, int feature) {
    const i64 at = row * stride + feature;
    if (are_halves(rows, features)) return luce_f32(reinterpret_cast<const f16_t*>(values)[at]) * rows[row];
    return features ? int8_product((i32)__float_as_uint(values[at]), rows[row], features[feature]) : values[at];
}

// silu with a relative error of 2^-17, for products in fp16, which have 2^-12. With the accurate function, whose division has
// a branch, gates of halves were bound by 42 instructions an element and not by memory.
LUCE_FN float silu_of_halves(float x) { return x * luce_reciprocal(1.0f + luce_exp2(-1.4426950408889634f * x)); }
