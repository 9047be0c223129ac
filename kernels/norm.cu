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

// What is added to a row before its norm, to WIDTH neighbouring elements from a column on, a multiple of WIDTH. Nothing,
struct NothingAdded {
    static constexpr bool ADDS = false;

    template <int WIDTH> __device__ __forceinline__ void add(float (&)[WIDTH], int) const {}
};

// floats,
struct FloatsAdded {
    static constexpr bool ADDS = true;
    const float* from;

    template <int WIDTH> __device__ __forceinline__ void add(float (&to)[WIDTH], int column) const {
        const auto unit = *reinterpret_cast<const Floats<WIDTH, WIDTH * 4>*>(from + column);
#pragma unroll
        for (int e = 0; e < WIDTH; e++) to[e] += unit.at[e];
    }
};

// halves times the scale of their row (products.h),
template <int WIDTH> struct alignas(WIDTH * 2) HalfUnit {
    f16_t at[WIDTH];
};
struct HalvesAdded {
    static constexpr bool ADDS = true;
    const f16_t* from;
    float scale;

    template <int WIDTH> __device__ __forceinline__ void add(float (&to)[WIDTH], int column) const {
        const auto unit = *reinterpret_cast<const HalfUnit<WIDTH>*>(from + column);
#pragma unroll
        for (int e = 0; e < WIDTH; e++) to[e] += luce_f32(unit.at[e]) * scale;
    }
};

// or the exact sums of int8 products of a row with this scale (products.h).
struct SumsAdded {
    static constexpr bool ADDS = true;
    const float* from;
    const float* features;
    float scale;

    template <int WIDTH> __device__ __forceinline__ void add(float (&to)[WIDTH], int column) const {
        const auto unit = *reinterpret_cast<const Floats<WIDTH, WIDTH * 4>*>(from + column);
#pragma unroll
        for (int e = 0; e < WIDTH; e++)
            to[e] += int8_product((i32)__float_as_uint(unit.at[e]), scale, features[column + e]);
    }
};

// luce_block_reduce of numbers that are not negative, for a kernel that calls it once for an operation: without the barrier
// behind it, and with four waves' numbers in a load.
template <typename Op> LUCE_FN float reduce_once(float value, Op op) {
    constexpr int MOST = 1024 / LUCE_LANES;
    __shared__ Floats<4, 16> partial[MOST / 4];
    const int waves = luce_threads() / LUCE_LANES, t = luce_thread();
    value = luce_lane_reduce(value, op);
    if (luce_lane() == 0) partial[luce_wave() / 4].at[luce_wave() % 4] = value;
    if (t >= waves && t < MOST) partial[t / 4].at[t % 4] = 0.0f;
    luce_sync();
    value = 0.0f;
#pragma unroll 1
    for (int w = 0; w < waves; w += 4) {
        const Floats<4, 16> four = partial[w / 4];
#pragma unroll
        for (int e = 0; e < 4; e++) value = op(value, four.at[e]);
    }
    return value;
}

// One of many rows of at most HELD elements a thread, as fp16 or int8 with a scale: the sums of norm_row, element by element in
// its order. Its time is that of memory: all of a thread's loads start before its first store, which the compiler cannot know to
// be elsewhere, and there are two barriers. Other blocks of the multiprocessor have loads under way meanwhile: of 640 threads
// two run with 40 registers. So weights are loaded behind the sum, from the first-level cache.
template <typename Row, typename Added>
LUCE_FN void norm_held(Row& to, float* row, const Added& added, const float* __restrict__ weight, int d, float eps) {
    using Unit = Floats<4, 16>;
    const int step = (int)blockDim.x * 4, first = (int)threadIdx.x * 4;
    Unit held[HELD / 4];
#pragma unroll
    for (int n = 0; n < HELD / 4; n++) {
        const int i = first + n * step;
        held[n] = {};
        if (i < d) held[n] = *reinterpret_cast<const Unit*>(row + i);
        if (i < d) added.add(held[n].at, i);
    }
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < HELD / 4; n++) {
        const int i = first + n * step;
        if (Added::ADDS && i < d) *reinterpret_cast<Unit*>(row + i) = held[n];
#pragma unroll
        for (int e = 0; e < 4; e++) sum = fmaf(held[n].at[e], held[n].at[e], sum);
    }
    const float scale = 1.0f / sqrtf(reduce_once(sum, luce_add()) / (float)d + eps);
    const auto put = [&] {
#pragma unroll
        for (int n = 0; n < HELD / 4; n++) {
            if (first + n * step < d) to.put(first + n * step, held[n].at);
        }
    };
#pragma unroll
    for (int n = 0; n < HELD / 4; n++) {
        if (first + n * step >= d) continue;
        const Unit factor = *reinterpret_cast<const Unit*>(weight + first + n * step);
#pragma unroll
        for (int e = 0; e < 4; e++) held[n].at[e] = held[n].at[e] * scale * factor.at[e];
    }
    put();
    if (to.again(reduce_once(to.most, luce_maximum()), luce_thread() == 0)) put();
}

// The same of rows that are longer, or lie anywhere, element by element; each thread reads back only its own writes. A thread
// has WIDTH neighbouring elements, 4 where norm_row has.
template <int WIDTH, typename Row, typename Added>
LUCE_FN void norm_read_again(Row& to, float* row, const Added& added, const float* __restrict__ weight, int d, float eps) {
    const int step = (int)blockDim.x * WIDTH, first = (int)threadIdx.x * WIDTH;
    float sum = 0.0f;
#pragma unroll 1
    for (int i = first; i < d; i += step) {
#pragma unroll
        for (int e = 0; e < WIDTH; e++) {
            float value[1] = {row[i + e]};
            added.add(value, i + e);
            if (Added::ADDS) row[i + e] = value[0];
            sum = fmaf(value[0], value[0], sum);
        }
    }
    const float scale = 1.0f / sqrtf(luce_block_sum(sum) / (float)d + eps);
    do {
#pragma unroll 1
        for (int i = first; i < d; i += step) {
            float result[WIDTH];
#pragma unroll
            for (int e = 0; e < WIDTH; e++) result[e] = row[i + e] * scale * weight[i + e];
            to.put(i, result);
        }
    } while (to.again());
}

// `whole`: all addresses allow accesses of 16 bytes; FOURS: d is always a multiple of 4.
template <bool FOURS, typename Row, typename Added>
LUCE_FN void norm_many(Row& to, bool whole, float* row, const Added& added, const float* __restrict__ weight, int d, float eps) {
    if (!FOURS && d % 4)
        norm_read_again<1>(to, row, added, weight, d, eps);
    else if (!whole || d > (int)blockDim.x * HELD)
        norm_read_again<4>(to, row, added, weight, d, eps);
    else
        norm_held(to, row, added, weight, d, eps);
}

// Without the 1, NVRTC takes 32 registers and spills.
#define MANY_BOUNDS __launch_bounds__(1024, 1)

// The norms of rows as fp16 alone, with a scale for each (fp16_rows.h): half has rows of `padded` columns, with zeros
// from d on. If `added`, x += delta first, where with delta_rows delta are halves with these scales; rows are
// delta_stride floats apart. Grid: n blocks.
extern "C" __global__ void MANY_BOUNDS
    rms_norm_to_fp16(f16_t* __restrict__ half, float* __restrict__ scale, float* x, const i64 x_stride,
                     const float* __restrict__ delta, const i64 delta_stride, const int added,
                     const float* __restrict__ delta_rows, const float* __restrict__ weight, const int d,
                     const int padded, const float eps, const int top) {
    luce_release();
    luce_await();
    float* row = x + blockIdx.x * x_stride;
    const float* more = delta + blockIdx.x * delta_stride;
    const bool whole = aligned(x, x_stride);
    Fp16Row to(half + (i64)blockIdx.x * padded, scale + blockIdx.x, top);
    if (!added) {
        norm_many<false>(to, whole, row, NothingAdded(), weight, d, eps);
    } else if (delta_rows) {
        const HalvesAdded halves = {reinterpret_cast<const f16_t*>(more), delta_rows[blockIdx.x]};
        norm_many<false>(to, whole, row, halves, weight, d, eps);
    } else {
        norm_many<false>(to, whole && aligned(delta, delta_stride), row, FloatsAdded{more}, weight, d, eps);
    }
    to.pad(d, padded);
}

// The same as int8 (int8_rows.h), where with `features` delta are the sums of int8 rows with the scales delta_rows.
extern "C" __global__ void MANY_BOUNDS
    rms_norm_to_int8(u8* __restrict__ values, float* __restrict__ scale, float* x, const i64 x_stride,
                     const float* __restrict__ delta, const i64 delta_stride, const int added,
                     const float* __restrict__ delta_rows, const float* __restrict__ features,
                     const float* __restrict__ weight, const int d, const int padded, const float eps) {
    luce_release();
    luce_await();
    float* row = x + blockIdx.x * x_stride;
    const float* more = delta + blockIdx.x * delta_stride;
    const bool whole = aligned(x, x_stride), both = whole && aligned(delta, delta_stride);
    Int8Row to(values + (i64)blockIdx.x * padded, scale + blockIdx.x);
    if (!added)
        norm_many<true>(to, whole, row, NothingAdded(), weight, d, eps);
    else if (features)
        norm_many<true>(to, both, row, SumsAdded{more, features, delta_rows[blockIdx.x]}, weight, d, eps);
    else
        norm_many<true>(to, both, row, FloatsAdded{more}, weight, d, eps);
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
