// Root mean square norms, x / sqrt(mean(x^2) + eps) * weight, and LayerNorm, in float32.
//
// Whole rows (rms_norm, add_rms_norm) take one block each, heads (head_rms_norm) one wave each. The row's
// length alone determines the block's size, so the order of a row's sum does not depend on the number of rows.
#include "fp16_rows.h"
#include "int8_rows.h"
#include "products.h"
#include "quantise.h"

// Elements of a row that a thread holds in registers between the sum and the result; in longer rows it reads the others
// again.
#define HELD 8

// WIDTH neighbouring elements, whose address is a multiple of ALIGN bytes.
template <int WIDTH, int ALIGN> struct alignas(ALIGN) Floats {
    float at[WIDTH];
};

LUCE_FN bool aligned(const float* first, i64 stride) {
    return (reinterpret_cast<u64>(first) | (u64)stride * 4) % 16 == 0;
}

// Where a row's norm goes as floats, and as int8 too if there are quantised rows: row blockIdx.x. Elements beyond a row's d
// become zeros.
struct FloatRow {
    float* to;
    Bytes bytes;

    // WIDTH elements at a column below d, or at one beyond, if a lane of the wave has one below.
    template <int WIDTH, int ALIGN>
    __device__ __forceinline__ void put(const Floats<WIDTH, ALIGN>& result, int column, int d) {
        if (column < d) *reinterpret_cast<Floats<WIDTH, ALIGN>*>(to + column) = result;
        if constexpr (WIDTH == 4) {
            if (bytes.padded) quantise_columns(result.at, in_section(column, d), column, (int)blockIdx.x, bytes);
        }
    }
};

// One row, by accesses of WIDTH elements; with `more`, row += more first. All loads start before the first wait: the
// time of a single row is latency.
template <int WIDTH, int ALIGN>
LUCE_FN void norm_row(FloatRow to, const float* row, float* sums, const float* more, const float* __restrict__ weight, int d,
                      float eps) {
    using Unit = Floats<WIDTH, ALIGN>;
    const int step = (int)blockDim.x * WIDTH, first = (int)threadIdx.x * WIDTH;
    Unit held[HELD / WIDTH], factor[HELD / WIDTH], added[HELD / WIDTH];
#pragma unroll
    for (int n = 0; n < HELD / WIDTH; n++) {
        factor[n] = {};
        if (first + n * step < d) factor[n] = *reinterpret_cast<const Unit*>(weight + first + n * step);
    }
    luce_release();
    luce_await();
#pragma unroll
    for (int n = 0; n < HELD / WIDTH; n++) {
        held[n] = added[n] = {};
        const int i = first + n * step;
        if (i >= d) continue;
        held[n] = *reinterpret_cast<const Unit*>(row + i);
        if (more) added[n] = *reinterpret_cast<const Unit*>(more + i);
    }
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < HELD / WIDTH; n++) {
#pragma unroll
        for (int e = 0; e < WIDTH; e++) {
            if (more) held[n].at[e] += added[n].at[e];
            sum = fmaf(held[n].at[e], held[n].at[e], sum);
        }
        if (more && first + n * step < d) *reinterpret_cast<Unit*>(sums + first + n * step) = held[n];
    }
    for (int i = first + HELD / WIDTH * step; i < d; i += step) {
#pragma unroll
        for (int e = 0; e < WIDTH; e++) {
            float value = row[i + e];
            if (more) sums[i + e] = value += more[i + e];
            sum = fmaf(value, value, sum);
        }
    }
    const float scale = 1.0f / sqrtf(luce_block_sum(sum) / (float)d + eps);
#pragma unroll
    for (int n = 0; n < HELD / WIDTH; n++) {
        Unit result = {};
        if (first + n * step < d) {
#pragma unroll
            for (int e = 0; e < WIDTH; e++) result.at[e] = held[n].at[e] * scale * factor[n].at[e];
        }
        to.put(result, first + n * step, d);
    }
    // Each thread reads back only its own writes. Lanes stay together for quantised rows.
    for (int i = first + HELD / WIDTH * step; i - first < d; i += step) {
        Unit result = {};
        if (i < d) {
#pragma unroll
            for (int e = 0; e < WIDTH; e++) result.at[e] = row[i + e] * scale * weight[i + e];
        }
        to.put(result, i, d);
    }
}

// norm_row by the widest accesses that the addresses allow.
LUCE_FN void norm_any(const FloatRow& to, bool whole, const float* row, float* sums, const float* more,
                      const float* __restrict__ weight, int d, float eps) {
    if (d % 4)
        norm_row<1, 4>(to, row, sums, more, weight, d, eps);
    else if (whole)
        norm_row<4, 16>(to, row, sums, more, weight, d, eps);
    else
        norm_row<4, 4>(to, row, sums, more, weight, d, eps);
}

// A padded row, after the last of x, as int8.
LUCE_FN void beyond(const Bytes& bytes, int d) {
    luce_release();
    luce_await();
    quantise_nothing(0, d, (int)blockIdx.x, bytes, (int)threadIdx.x, (int)blockDim.x);
}

// The norm of n rows of x [n, d]; if `padded` is not 0, also as `padded` quantised rows, and then d is a multiple of
// 32. Grid: `padded` blocks, or n without quantised rows.
extern "C" __global__ void __launch_bounds__(1024)
    rms_norm(float* __restrict__ out, const float* __restrict__ x, const i64 x_stride, const float* __restrict__ weight,
             const int n, const int d, const float eps, const int padded, const int wide, u8* __restrict__ to_int8) {
    const Bytes bytes = {to_int8, padded, wide};
    if ((int)blockIdx.x >= n) return beyond(bytes, d);
    const float* row = x + blockIdx.x * x_stride;
    norm_any(FloatRow{out + (i64)blockIdx.x * d, bytes}, aligned(x, x_stride), row, nullptr, nullptr, weight, d, eps);
}

// x += delta, and the norm of the sums as above.
extern "C" __global__ void __launch_bounds__(1024)
    add_rms_norm(float* __restrict__ out, float* x, const i64 x_stride, const float* __restrict__ delta,
                 const i64 delta_stride, const float* __restrict__ weight, const int n, const int d, const float eps,
                 const int padded, const int wide, u8* __restrict__ to_int8) {
    const Bytes bytes = {to_int8, padded, wide};
    if ((int)blockIdx.x >= n) return beyond(bytes, d);
    float* row = x + blockIdx.x * x_stride;
    const float* more = delta + blockIdx.x * delta_stride;
    const bool whole = aligned(x, x_stride) && aligned(delta, delta_stride);
    norm_any(FloatRow{out + (i64)blockIdx.x * d, bytes}, whole, row, row, more, weight, d, eps);
}

// What is added to a row before its norm, if anything: floats, or with `features` the exact sums of int8 products of one row
// with this scale (products.h).
struct SumsDelta {
    const float* values;
    const float* features;
    float scale;

    __device__ __forceinline__ explicit operator bool() const { return values; }
    template <int WIDTH, int ALIGN> __device__ __forceinline__ Floats<WIDTH, ALIGN> at(int column) const {
        Floats<WIDTH, ALIGN> unit = *reinterpret_cast<const Floats<WIDTH, ALIGN>*>(values + column);
        if (features)
#pragma unroll
            for (int e = 0; e < WIDTH; e++)
                unit.at[e] = int8_product((i32)__float_as_uint(unit.at[e]), scale, features[column + e]);
        return unit;
    }
};

// The same of floats, or of halves if `halves` says so.
struct HalvesDelta {
    const float* values;
    bool halves;
    float scale;

    __device__ __forceinline__ explicit operator bool() const { return values; }
    template <int WIDTH, int ALIGN> __device__ __forceinline__ Floats<WIDTH, ALIGN> at(int column) const {
        if (!halves) return *reinterpret_cast<const Floats<WIDTH, ALIGN>*>(values + column);
        const f16_t* from = reinterpret_cast<const f16_t*>(values) + column;
        Floats<WIDTH, ALIGN> unit;
        if constexpr (WIDTH == 4) {
            const FourHalves four = *reinterpret_cast<const FourHalves*>(from);
#pragma unroll
            for (int e = 0; e < WIDTH; e++) unit.at[e] = luce_f32(four.at[e]) * scale;
        } else {
            unit.at[0] = luce_f32(*from) * scale;
        }
        return unit;
    }
};

// One of many rows, as fp16 or int8 with a scale: the sums of norm_row, element by element in its order. Its time is that of
// memory, so other blocks of the multiprocessor have loads under way while one waits. Of 640 threads three blocks run with 32
// registers; with 64 it was one, at 44 % of an H200's bandwidth. So weights are loaded behind the sum, from the first-level
// cache, loops are not unrolled, and only rows of HELD elements a thread are KEPT until the result; longer ones are read again.
template <int WIDTH, int ALIGN, bool KEPT, typename Row, typename Delta>
LUCE_FN void norm_many(Row& to, float* row, const Delta& more, const float* __restrict__ weight, int d, float eps) {
    using Unit = Floats<WIDTH, ALIGN>;
    const int step = (int)blockDim.x * WIDTH, first = (int)threadIdx.x * WIDTH;
    float sum = 0.0f;
    const auto summed = [&](int i) {
        Unit unit = *reinterpret_cast<const Unit*>(row + i);
        if (more) {
            const Unit added = more.template at<WIDTH, ALIGN>(i);
#pragma unroll
            for (int e = 0; e < WIDTH; e++) unit.at[e] += added.at[e];
            *reinterpret_cast<Unit*>(row + i) = unit;
        }
#pragma unroll
        for (int e = 0; e < WIDTH; e++) sum = fmaf(unit.at[e], unit.at[e], sum);
        return unit;
    };
    Unit held[HELD / WIDTH];
    if constexpr (KEPT) {
#pragma unroll
        for (int n = 0; n < HELD / WIDTH; n++) {
            if (first + n * step < d) held[n] = summed(first + n * step);
        }
    } else {
#pragma unroll 1
        for (int i = first; i < d; i += step) summed(i);
    }
    const float scale = 1.0f / sqrtf(luce_block_sum(sum) / (float)d + eps);
    const auto times = [&](Unit& unit, int i) {
        const Unit factor = *reinterpret_cast<const Unit*>(weight + i);
#pragma unroll
        for (int e = 0; e < WIDTH; e++) unit.at[e] = unit.at[e] * scale * factor.at[e];
    };
    if constexpr (KEPT) {
#pragma unroll
        for (int n = 0; n < HELD / WIDTH; n++) {
            if (first + n * step < d) times(held[n], first + n * step);
        }
    }
    do {
        if constexpr (KEPT) {
#pragma unroll
            for (int n = 0; n < HELD / WIDTH; n++) {
                if (first + n * step < d) to.put(first + n * step, held[n].at);
            }
        } else {
            // Each thread reads back only its own writes.
#pragma unroll 1
            for (int i = first; i < d; i += step) {
                Unit unit = *reinterpret_cast<const Unit*>(row + i);
                times(unit, i);
                to.put(i, unit.at);
            }
        }
    } while (to.again());
}

// norm_many by the widest accesses that the addresses allow, if they are `whole`; FOURS: d is always a multiple of 4. A
// delta's scale is that of row blockIdx.x of delta_rows, if there are such.
template <bool FOURS, typename Row, typename Delta>
LUCE_FN void norm_scaled(Row& to, bool whole, float* row, Delta more, const float* __restrict__ delta_rows,
                         const float* __restrict__ weight, int d, float eps) {
    luce_release();
    luce_await();
    if (delta_rows) more.scale = delta_rows[blockIdx.x];
    if (!FOURS && d % 4)
        norm_many<1, 4, false>(to, row, more, weight, d, eps);
    else if (!whole || d > (int)blockDim.x * HELD)
        norm_many<4, 4, false>(to, row, more, weight, d, eps);
    else
        norm_many<4, 16, true>(to, row, more, weight, d, eps);
}

// The norms of rows as fp16 alone, with a scale for each (fp16_rows.h): half has rows of `padded` columns, with zeros
// from d on. If `added`, x += delta first, where with delta_rows delta are halves with these scales; rows are
// delta_stride floats apart. Grid: n blocks.
extern "C" __global__ void __launch_bounds__(1024, 2)
    rms_norm_to_fp16(f16_t* __restrict__ half, float* __restrict__ scale, float* x, const i64 x_stride,
                     const float* __restrict__ delta, const i64 delta_stride, const int added,
                     const float* __restrict__ delta_rows, const float* __restrict__ weight, const int d,
                     const int padded, const float eps, const int top) {
    float* row = x + blockIdx.x * x_stride;
    const HalvesDelta more = {added ? delta + blockIdx.x * delta_stride : nullptr, delta_rows != nullptr};
    const bool whole = aligned(x, x_stride) && (!added || delta_rows || aligned(delta, delta_stride));
    Fp16Row to(half + (i64)blockIdx.x * padded, scale + blockIdx.x, top);
    norm_scaled<false>(to, whole, row, more, delta_rows, weight, d, eps);
    to.pad(d, padded);
}

// The same as int8 (int8_rows.h), where with `features` delta are the sums of int8 rows with the scales delta_rows.
extern "C" __global__ void __launch_bounds__(1024, 2)
    rms_norm_to_int8(u8* __restrict__ values, float* __restrict__ scale, float* x, const i64 x_stride,
                     const float* __restrict__ delta, const i64 delta_stride, const int added,
                     const float* __restrict__ delta_rows, const float* __restrict__ features,
                     const float* __restrict__ weight, const int d, const int padded, const float eps) {
    float* row = x + blockIdx.x * x_stride;
    const SumsDelta more = {added ? delta + blockIdx.x * delta_stride : nullptr, features};
    const bool whole = aligned(x, x_stride) && (!added || aligned(delta, delta_stride));
    Int8Row to(values + (i64)blockIdx.x * padded, scale + blockIdx.x);
    norm_scaled<true>(to, whole, row, more, delta_rows, weight, d, eps);
    to.pad(d, padded);
}

// LayerNorm of n rows of x [n, d], (x - mean) / sqrt(var + eps) * weight, plus the bias if `biased`. Grid: n blocks.
extern "C" __global__ void __launch_bounds__(1024)
    layer_norm(float* __restrict__ out, const float* __restrict__ x, const i64 x_stride,
               const float* __restrict__ weight, const float* __restrict__ bias, const int biased, const int d,
               const float eps) {
    luce_release();
    luce_await();
    const float* row = x + blockIdx.x * x_stride;
    float sum = 0.0f;
    for (int i = (int)threadIdx.x; i < d; i += (int)blockDim.x) sum += row[i];
    const float mean = luce_block_sum(sum) / (float)d;
    float squares = 0.0f;
    for (int i = (int)threadIdx.x; i < d; i += (int)blockDim.x) squares = fmaf(row[i] - mean, row[i] - mean, squares);
    const float scale = 1.0f / sqrtf(luce_block_sum(squares) / (float)d + eps);
    for (int i = (int)threadIdx.x; i < d; i += (int)blockDim.x) {
        const float value = (row[i] - mean) * scale * weight[i];
        out[(i64)blockIdx.x * d + i] = biased ? value + bias[i] : value;
    }
}

extern "C" __global__ void head_rms_norm(float* __restrict__ x, const i64 row_stride, const i64 head_stride,
                                         const int heads, const float* __restrict__ weight, const int d,
                                         const float eps) {
    luce_release();
    luce_await();
    int head = blockIdx.y * (blockDim.x / LUCE_LANES) + luce_wave();
    if (head >= heads) return;  // whole waves
    float* from = x + blockIdx.x * row_stride + head * head_stride;
    float sum = 0.0f;
    for (int i = luce_lane(); i < d; i += LUCE_LANES) sum = fmaf(from[i], from[i], sum);
    float scale = 1.0f / sqrtf(luce_lane_sum(sum) / (float)d + eps);
    for (int i = luce_lane(); i < d; i += LUCE_LANES) from[i] = from[i] * scale * weight[i];
}
