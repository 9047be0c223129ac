// variants: KTYPE=F16 VTYPE=F16,Q8_0 HEAD=0,128,256
// variants: KTYPE=BF16 VTYPE=BF16 HEAD=0,128,256
// variants: KTYPE=Q8_0 VTYPE=Q8_0,Q4_0 HEAD=0,128,256
// variants: KTYPE=Q4_0 VTYPE=Q4_0 HEAD=0,128,256
//
// Query, key and value heads between their product and attention: norms, rotation, and writing keys and values to the
// page pools, rounded to their types. One kernel, as each of these takes less time than a launch.
#include "kv.h"

#define WAVES 4
// Most elements of a head, and of these a lane's. With HEAD a head has so many.
#define MOST (HEAD ? HEAD : 512)
#define EACH (MOST / LUCE_LANES)

// A wave's head to a pool's row, from element `first` on.
template <typename Type>
LUCE_FN void write(typename Type::Element* pool, i64 row, int first, const float (&value)[EACH], int d) {
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        if (e * LUCE_LANES >= d) break;
        const int i = luce_lane() + e * LUCE_LANES;
        Type::store(pool + Type::offset(row), first + i, value[e], i < d);
    }
}

// Rows of `heads` query heads and `kv_heads` key and value heads of d = `size` elements, each at its row and head stride.
// `norms`: if bits 0, 1 and 2 are set, queries, keys and values are divided by their root mean square and multiplied by
// q_norm, k_norm and v_norm [d]. Then pair i < half of queries and keys, elements (i * step, i * step + gap), is turned
// by table [rows, half]. Queries stay in place; keys and values go to row dest[row] of the pools, and with `keep` stay
// in place as well. Rows of halves have `scales`; their queries go to q_to [rows, heads, d], and nothing stays in place. Grid:
// rows, ceil((heads + 2 kv_heads) / WAVES) blocks of WAVES waves; a wave has a head.
template <typename Number>
LUCE_FN void prepare(Number* q, const i64 q_row, const i64 q_head, const float* __restrict__ q_norm, Number* k,
                     const i64 k_row, const i64 k_head, const float* __restrict__ k_norm, Number* v, const i64 v_row,
                     const i64 v_head, const float* __restrict__ v_norm, const int norms,
                     const float2* __restrict__ table, const int half, const int step, const int gap,
                     KTYPE::Element* __restrict__ k_pool, VTYPE::Element* __restrict__ v_pool,
                     const int* __restrict__ dest, const int keep, const int heads, const int kv_heads, const int size,
                     const float eps, const float* __restrict__ scales, float* __restrict__ q_to) {
    const int d = HEAD ? HEAD : size;
    __shared__ float pairs[WAVES][MOST];
    const int lane = luce_lane(), index = (int)blockIdx.y * WAVES + luce_wave();
    // 0: queries, 1: keys, 2: values.
    const int kind = index < heads ? 0 : index < heads + kv_heads ? 1 : 2;
    const int head = index - (kind ? heads + (kind - 1) * kv_heads : 0);
    const bool live = kind == 0 || (head < kv_heads && (kind == 1 || v)), normed = live && norms >> kind & 1;
    const float* norm = kind == 0 ? q_norm : kind == 1 ? k_norm : v_norm;
    float factor[EACH] = {}, value[EACH] = {};
    if (normed) {
#pragma unroll
        for (int e = 0; e < EACH; e++)
            if (lane + e * LUCE_LANES < d) factor[e] = norm[lane + e * LUCE_LANES];
    }
    luce_release();
    luce_await();
    if (!live) return;  // whole waves

    Number* at = kind == 0   ? q + blockIdx.x * q_row + head * q_head
                 : kind == 1 ? k + blockIdx.x * k_row + head * k_head
                             : v + blockIdx.x * v_row + head * v_head;
    const float rescale = scales ? scales[blockIdx.x] : 1.0f;
    const i64 row = kind ? (i64)dest[blockIdx.x] * kv_heads * d : 0;
    const int turned = kind == 2 ? 0 : half;
    const float2* angles = table + (i64)blockIdx.x * half;
    float2 turn[EACH / 2] = {};
#pragma unroll
    for (int e = 0; e < EACH; e++)
        if (lane + e * LUCE_LANES < d) value[e] = luce_f32(at[lane + e * LUCE_LANES]) * rescale;
#pragma unroll
    for (int e = 0; e < EACH / 2; e++) {
        if (e * LUCE_LANES >= turned) break;
        if (lane + e * LUCE_LANES < turned) turn[e] = angles[lane + e * LUCE_LANES];
    }

    if (normed) {
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < EACH; e++) sum = fmaf(value[e], value[e], sum);
        const float scale = 1.0f / sqrtf(luce_lane_sum(sum) / (float)d + eps);
#pragma unroll
        for (int e = 0; e < EACH; e++) value[e] = value[e] * scale * factor[e];
    }
    if (turned) {
        float* own = pairs[luce_wave()];
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            if (e * LUCE_LANES >= 2 * turned) break;
            if (lane + e * LUCE_LANES < 2 * turned) own[lane + e * LUCE_LANES] = value[e];
        }
        luce_sync_lanes();
#pragma unroll
        for (int e = 0; e < EACH / 2; e++) {
            if (e * LUCE_LANES >= turned) break;
            const int pair = lane + e * LUCE_LANES;
            if (pair < turned) {
                float* first = own + pair * step;
                const float a = first[0], b = first[gap];
                first[0] = a * turn[e].x - b * turn[e].y;
                first[gap] = b * turn[e].x + a * turn[e].y;
            }
        }
        luce_sync_lanes();
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            if (e * LUCE_LANES >= 2 * turned) break;
            if (lane + e * LUCE_LANES < 2 * turned) value[e] = own[lane + e * LUCE_LANES];
        }
    }
    // A loop for each place: in one for all, branches and addresses took more time than memory.
    float* floats = nullptr;
    if (q_to) {
        if (kind == 0) floats = q_to + ((i64)blockIdx.x * heads + head) * d;
    } else if constexpr (sizeof(Number) == sizeof(float)) {
        if (kind == 0 || keep) floats = at;
    }
    if (floats) {
        floats += lane;
#pragma unroll
        for (int e = 0; e < EACH; e++)
            if (lane + e * LUCE_LANES < d) floats[e * LUCE_LANES] = value[e];
    }
    if (kind == 1) write<KTYPE>(k_pool, row, head * d, value, d);
    if (kind == 2) write<VTYPE>(v_pool, row, head * d, value, d);
}

extern "C" __global__ void __launch_bounds__(WAVES* LUCE_LANES)
    prepare_heads(float* q, const i64 q_row, const i64 q_head, const float* __restrict__ q_norm, float* k, const i64 k_row,
                  const i64 k_head, const float* __restrict__ k_norm, float* v, const i64 v_row, const i64 v_head,
                  const float* __restrict__ v_norm, const int norms, const float2* __restrict__ table, const int half,
                  const int step, const int gap, KTYPE::Element* __restrict__ k_pool,
                  VTYPE::Element* __restrict__ v_pool, const int* __restrict__ dest, const int keep, const int heads,
                  const int kv_heads, const int size, const float eps) {
    prepare(q, q_row, q_head, q_norm, k, k_row, k_head, k_norm, v, v_row, v_head, v_norm, norms, table, half, step, gap,
            k_pool, v_pool, dest, keep, heads, kv_heads, size, eps, nullptr, nullptr);
}

extern "C" __global__ void __launch_bounds__(WAVES* LUCE_LANES)
    prepare_halves(const f16_t* q, const i64 q_row, const i64 q_head, const float* __restrict__ q_norm, const f16_t* k,
                   const i64 k_row, const i64 k_head, const float* __restrict__ k_norm, const f16_t* v, const i64 v_row,
                   const i64 v_head, const float* __restrict__ v_norm, const int norms,
                   const float2* __restrict__ table, const int half, const int step, const int gap,
                   KTYPE::Element* __restrict__ k_pool, VTYPE::Element* __restrict__ v_pool,
                   const int* __restrict__ dest, const int keep, const int heads, const int kv_heads, const int size,
                   const float eps, const float* __restrict__ scales, float* __restrict__ q_to) {
    prepare(q, q_row, q_head, q_norm, k, k_row, k_head, k_norm, v, v_row, v_head, v_norm, norms, table, half, step, gap,
            k_pool, v_pool, dest, keep, heads, kv_heads, size, eps, scales, q_to);
}
