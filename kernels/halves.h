// Floats as sums of two fp16 numbers: the first is the float to nearest, the second the remainder to nearest. Where the
// second is at least 2^-14 it leaves an error of at most 2^-22 of the float, by its size 2^-24 on average.
#pragma once
#include "mma.h"

// a and b as sums of two fp16 numbers, in pairs.
LUCE_FN void split_pair(u32& high, u32& low, float a, float b) {
    high = luce_f16_pair(a, b);
    low = luce_f16_pair(a - luce_f32(f16_t{(u16)high}), b - luce_f32(f16_t{(u16)(high >> 16)}));
}
