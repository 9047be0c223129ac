// Tokens drawn from a row's candidates: the largest of mass / noise among those that top-k, top-p and min-p keep, with
// mass = exp((logit - the largest) / temperature) and noise = -log(uniform). That is a draw by the masses (an exponential
// race); luce/ops/draw.py has the same in NumPy.
//
// A reply's tokens do not depend on where they are drawn: all of this is double, and IEEE 754 fixes the result of each of
// its operations (+ - * / floor), where libraries' exp and log differ in the last bit.
#include "gpu.h"

#define K 64  // as in top_k.cu
// Least of logarithms of masses: no noise makes up for exp of it.
#define LEAST -700.0

#define LN2_HIGH 0.6931471803691238  // of 32 bits, so that its products with small integers are exact
#define LN2_LOW 1.9082149292705877e-10

LUCE_FN double double_of(u64 bits) {
    union {
        u64 bits;
        double value;
    } both = {bits};
    return both.value;
}

LUCE_FN u64 bits_of(double value) {
    union {
        double value;
        u64 bits;
    } both = {value};
    return both.bits;
}

// exp(x) for LEAST <= x <= 0, to 1e-11: 2^n times the Taylor series of the rest.
LUCE_FN double draw_exp(double x) {
    const double n = floor(x * 1.4426950408889634 + 0.5), r = (x - n * LN2_HIGH) - n * LN2_LOW;
    double sum = 2.7557319223985893e-06;  // 1 / 9!
    sum = sum * r + 2.48015873015873e-05;
    sum = sum * r + 0.0001984126984126984;
    sum = sum * r + 0.001388888888888889;
    sum = sum * r + 0.008333333333333333;
    sum = sum * r + 0.041666666666666664;
    sum = sum * r + 0.16666666666666666;
    sum = sum * r + 0.5;
    sum = sum * r + 1.0;
    sum = sum * r + 1.0;
    return sum * double_of((u64)((i64)n + 1023) << 52);
}

// log(x) of a normal number x, to 1e-11: with x = 2^e m, sqrt(1 / 2) <= m < sqrt(2) and s = (m - 1) / (m + 1),
// e log 2 + 2 (s + s^3 / 3 + s^5 / 5 ...).
LUCE_FN double draw_log(double x) {
    const i64 bits = (i64)bits_of(x), from_root = bits - 0x3fe6a09e667f3bcdll;
    const double m = double_of((u64)(bits - (from_root & ~0xfffffffffffffll))), e = (double)(from_root >> 52);
    const double s = (m - 1.0) / (m + 1.0), z = s * s;
    double sum = 0.06666666666666667;  // 1 / 15
    sum = sum * z + 0.07692307692307693;
    sum = sum * z + 0.09090909090909091;
    sum = sum * z + 0.1111111111111111;
    sum = sum * z + 0.14285714285714285;
    sum = sum * z + 0.2;
    sum = sum * z + 0.3333333333333333;
    sum = sum * z + 1.0;
    return e * LN2_HIGH + ((s + s) * sum + e * LN2_LOW);
}

// The output function of SplitMix64.
LUCE_FN u64 mixed(u64 bits) {
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9ull;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111ebull;
    return bits ^ bits >> 31;
}

// A number in (0, 1) of a token at a position.
LUCE_FN double uniform(u64 seed, u64 position, u32 id) {
    const u64 golden = 0x9e3779b97f4a7c15ull, begin = mixed(mixed(seed) + position * golden);
    return ((double)(mixed(begin + ((u64)id + 1) * golden) >> 12) + 0.5) * 2.220446049250313e-16;
}

// How a row's token is drawn.
struct RowDraw {
    u64 row;  // its place in `ids`
    u64 seed, position, top_k;
    double temperature, top_p, min_p;
};

// A token for each row of keys [rows, stride], of which the first `count` are candidates as top_k.cu leaves them: drawn [rows],
// -1 where the largest logit is not finite, and otherwise ids[row] too, from which the next step reads it. One block a row.
extern "C" __global__ void __launch_bounds__(K)
    draw(const u64* __restrict__ keys, const RowDraw* __restrict__ draws, i32* __restrict__ ids, i32* __restrict__ drawn,
         const int count, const int stride) {
    __shared__ double mass[K], value[K];
    __shared__ int place[K];
    luce_await();
    const RowDraw own = draws[blockIdx.x];
    const u64* const row = keys + (i64)blockIdx.x * stride;
    const auto logit = [&](int i) {
        const u32 ordered = (u32)(row[i] >> 32);
        return __uint_as_float(ordered >> 31 ? (ordered == 0xffffffffu ? ordered : ordered ^ 0x80000000u) : ~ordered);
    };
    const auto id = [&](int i) { return 0xffffffffu - (u32)row[i]; };
    const int i = luce_thread();
    const float top = logit(0);
    const bool finite = fabsf(top) < LUCE_INF;
    const bool counts = finite && i < count && (u64)i < own.top_k;
    mass[i] = counts ? draw_exp(luce_max(((double)logit(i) - (double)top) / own.temperature, LEAST)) : 0.0;
    luce_sync();
    // One thread adds, in order: sums in another order have other bits.
    if (i == 0) {
        double sum = 0.0;
#pragma unroll 1
        for (int k = 0; k < K; k++) value[k] = sum += mass[k];
    }
    luce_sync();
    const bool in_share = i == 0 || value[luce_max(i, 1) - 1] < own.top_p * value[K - 1];
    const bool kept = in_share && mass[i] >= own.min_p;
    luce_sync();
    // A token's noise is -log.
    value[i] = kept && counts ? mass[i] / draw_log(uniform(own.seed, own.position, id(i))) : 0.0;
    place[i] = i;
    luce_sync();
    for (int half = K / 2; half > 0; half /= 2) {
        // Among equals the first one.
        if (i < half && (value[i + half] < value[i] || (value[i + half] == value[i] && place[i + half] < place[i]))) {
            value[i] = value[i + half];
            place[i] = place[i + half];
        }
        luce_sync();
    }
    if (i == 0) {
        const i32 token = finite ? (i32)id(place[0]) : -1;
        drawn[blockIdx.x] = token;
        if (finite) ids[own.row] = token;
    }
}
