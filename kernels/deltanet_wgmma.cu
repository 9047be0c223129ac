// variants for cuda: HEAD=64,128
//
// The gated delta rule of long spans, chunk by chunk, as delta_chunks of deltanet_chunk.cu, which has the formulas and what
// prepares the chunks. Only for targets on which four waves multiply together.
//
// All products are of transposed matrices: four waves have 64 columns of the state, S^T [64, HEAD], in registers, and each
// result is the left factor of the next product as the registers hold it. A fifth wave has the copy engine bring the next
// chunk's matrices, the right factors, to shared memory.
//
// Each factor is the sum of two fp16 numbers, 22 bits, times a power of two: right factors as deltanet_halves.h has them,
// left factors with a power for each column, by its largest element. Their products, without that of the two lower parts,
// have the accuracy of floats.
#include "deltanet.h"
#include "deltanet_halves.h"
#include "bulk.h"

#define CHUNK 64
#define GROUP 128
#define THREADS (GROUP + 32)
#define COLUMNS 64
static_assert(HEAD % COLUMNS == 0, "a head is whole blocks");
#define TILES (CHUNK / 8)
#define KEY_TILES (HEAD / 8)

// What a block reads of a chunk, in three pieces.
struct Chunk {
    alignas(1024) u8 keys[Images::VECTOR_BYTES];
    u8 queries[Images::VECTOR_BYTES];
    u8 solve[Images::SQUARE_BYTES], mix[Images::SQUARE_BYTES];
    // beta_i, e^G_i, e^(G_last - G_i), e^G_last of each row
    float gates[CHUNK][4];
    // The block's columns of V, in their places (Images).
    float values[CHUNK * COLUMNS];
};

struct Shared {
    Chunk chunks[2];
    u64 arrived[2];
};

#if LUCE_WGMMA

// The power of two that takes a column's largest element to 2^13 and on, but one of 2^-50 to 2^40: sums of products with it
// stay floats, and elements below 2^-27 lose bits only where all of a column are, far below what the output's norm sees.
LUCE_FN float scale_to_fp16(float top) {
    const int exponent = 267 - (int)(__float_as_uint(top) >> 23);
    return __uint_as_float((u32)luce_min(luce_max(exponent, 127 - 50), 127 + 40) << 23);
}

// Of a power of two.
LUCE_FN float inverse(float power) { return __uint_as_float(0x7f000000u - __float_as_uint(power)); }

// The columns' largest magnitudes of a result [64, 8 COUNT]: a lane's two columns are g and g + 8 of its wave's.
template <int COUNT> LUCE_FN void column_tops(float (&top)[2], const float (&tile)[COUNT][4]) {
    float part[4] = {};
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) part[e] = fmaxf(part[e], fabsf(tile[i][e]));
#pragma unroll
    for (int n = 0; n < 2; n++) top[n] = luce_lane_max<4>(fmaxf(part[2 * n], part[2 * n + 1]));
}

// 16 summed places of a result times its columns' scales, as a left factor.
struct Left {
    u32 high[4], low[4];

    __device__ __forceinline__ void take(const float (*two_tiles)[4], const float (&scale)[2]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float* pair = &two_tiles[i / 2][i % 2 * 2];
            split_pair(high[i], low[i], pair[0] * scale[i % 2], pair[1] * scale[i % 2]);
        }
    }
    // sum += left right^T, or without `add` sum = left right^T, `right` 16 columns of an image's square.
    __device__ __forceinline__ void add_transposed(float (*sum)[4], const u8* right, int at, int lower, bool add) const {
        luce_wgmma_transposed<f16_t>(sum, low, right, at, add);
        luce_wgmma_transposed<f16_t>(sum, high, right, at + lower);
        luce_wgmma_transposed<f16_t>(sum, high, right, at);
    }
    // sum += left right, `right` 16 rows of an image's square.
    __device__ __forceinline__ void add(float (*sum)[4], const u8* right, int at, int lower) const {
        luce_wgmma<f16_t>(sum, low, right, at);
        luce_wgmma<f16_t>(sum, high, right, at + lower);
        luce_wgmma<f16_t>(sum, high, right, at);
    }
};

#endif

// Grid (HEAD / COLUMNS, value heads, spans), THREADS threads, a Shared of dynamic shared memory. out gets O.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    delta_chunks_wgmma(float* __restrict__ memory, const i32* __restrict__ spans, const u8* __restrict__ vectors,
                       const u8* __restrict__ squares, const float* __restrict__ values, float* __restrict__ out,
                       int key_heads) {
    luce_await();
#if LUCE_WGMMA
    LUCE_DYNAMIC_SHARED(Shared, shared);
    const Span span = span_at(spans, blockIdx.z);
    if (span.rows <= STEPS) return;
    const int head = (int)blockIdx.y, heads = (int)gridDim.y;
    // The same for all lanes, as the compiler sees by the shuffle: it does not let waves of a branch that may diverge
    // multiply in the background.
    if (luce_shfl(luce_wave(), 0) >= GROUP / LUCE_LANES) {
        const Images images = {key_heads, heads};
        const int image = Images::first(span.start, (int)blockIdx.z);
        const auto bring = [&](int chunk) {
            if (luce_lane() != 0 || chunk * CHUNK >= span.rows) return;
            Chunk& to = shared->chunks[chunk % 2];
            Bulk* arrived = &shared->arrived[chunk % 2];
            luce_bulk_load(to.keys, vectors + images.vectors(image + chunk, head % key_heads), sizeof to.keys + sizeof to.queries,
                           arrived);
            luce_bulk_load(to.solve, squares + images.squares(image + chunk, head), Images::HEAD_BYTES, arrived);
            luce_bulk_load(to.values, values + images.values(image + chunk, head, (int)blockIdx.x), sizeof to.values, arrived);
        };
        if (luce_lane() == 0) {
            for (Bulk& arrived : shared->arrived) luce_bulk_begin(&arrived, 3);
            luce_bulk_ready();
        }
        bring(0);
        for (int chunk = 0; chunk * CHUNK < span.rows; chunk++) {
            luce_sync_lanes();
            luce_bulk_wait(&shared->arrived[chunk % 2], chunk / 2);
            luce_sync_waves();  // this chunk is there, and the one before it has been read
            bring(chunk + 1);
        }
        luce_release();
        return;
    }

    const int g = luce_lane() / 4, t = luce_lane() % 4, first_column = (int)blockIdx.x * COLUMNS + luce_wave() * 16;
    const i64 own_memory = (((i64)span.slot * heads + head) * HEAD + first_column + g) * HEAD + 2 * t;
    out += ((i64)span.start * heads + head) * HEAD + first_column + g;
    const int row_size = heads * HEAD;
    int places[2];  // of V in rows 2t and, as these differ by less than 2 and by eights, in all others of the lane
#pragma unroll
    for (int n = 0; n < 2; n++)
        places[n] = 2 * t * COLUMNS + Images::value_place(2 * t, luce_wave() * 16 + n * 8 + g);
    // The state is s times `unit` of the lane's two columns, a power of two. As a left factor it gets a scale; results get what
    // takes them back.
    float s[KEY_TILES][4], unit[2] = {1.0f, 1.0f}, top[2], back[2];
    Left state[KEY_TILES / 2];
    const auto split_state = [&]() {
        float scale[2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const float to_fp16 = scale_to_fp16(top[n]);
            scale[n] = to_fp16 * unit[n], back[n] = inverse(to_fp16 * IMAGE_SCALE);
        }
#pragma unroll
        for (int k = 0; k < KEY_TILES / 2; k++) state[k].take(s + 2 * k, scale);
    };
#pragma unroll
    for (int i = 0; i < KEY_TILES; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[i][e] = span.position ? memory[own_memory + e / 2 * 8 * HEAD + i * 8 + e % 2] : 0.0f;
    column_tops(top, s);
    split_state();

    float o[TILES][4];
    // The output of the chunk before a row, in units of the state.
    const auto put_output = [&](int end, int rows) {
        float* to = out + (i64)(end - CHUNK + 2 * t) * row_size;
#pragma unroll
        for (int i = 0; i < TILES; i++, to += 8 * row_size)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (rows == CHUNK || i * 8 + 2 * t + e % 2 < rows)
                    to[e % 2 * row_size + e / 2 * 8] = o[i][e] * unit[e / 2];
    };
    int first = 0;
    for (int turn = 0; first < span.rows; first += CHUNK, turn ^= 1) {
        const Chunk& own = shared->chunks[turn];
        luce_wgmma_wait<0>();
        luce_wgmma_hold(o);
        luce_sync_waves();
        // (K S)^T, and (Q S)^T behind it
        float ks[TILES][4];
        luce_wgmma_fence();
#pragma unroll
        for (int k = 0; k < KEY_TILES / 2; k++)
            state[k].add_transposed(ks, own.keys, k / 4 * SQUARE + k % 4 * 32, HEAD / 64 * SQUARE, k > 0);
        luce_wgmma_close();
        column_tops(top, s);
        if (first) put_output(first, CHUNK);
        luce_wgmma_fence();
#pragma unroll
        for (int k = 0; k < KEY_TILES / 2; k++)
            state[k].add_transposed(o, own.queries, k / 4 * SQUARE + k % 4 * 32, HEAD / 64 * SQUARE, k > 0);
        luce_wgmma_close();
        luce_wgmma_wait<1>();
        luce_wgmma_hold(ks);
        // (beta (V - e^G (K S)))^T
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = i * 8 + 2 * t + e % 2;
                const float value = own.values[places[e / 2] + (i * 8 + e % 2) * COLUMNS];
                ks[i][e] = own.gates[row][0] * fmaf(-back[e / 2] * own.gates[row][1], ks[i][e], value);
            }
        float fresh_top[2], scale[2];
        column_tops(fresh_top, ks);
#pragma unroll
        for (int n = 0; n < 2; n++) scale[n] = scale_to_fp16(fresh_top[n]);
        Left left[TILES / 2];
#pragma unroll
        for (int k = 0; k < TILES / 2; k++) left[k].take(ks + 2 * k, scale);
        // V'^T
        float fresh[TILES][4];
        luce_wgmma_fence();
#pragma unroll
        for (int k = 0; k < TILES / 2; k++) left[k].add_transposed(fresh, own.solve, k * 32, SQUARE, k > 0);
        luce_wgmma_close();
        // Meanwhile the state and Q S get the scale of what will be added. No element of T exceeds 1, so V' is at most 64
        // times as large as what T multiplies, and at least 1 / 64.
        const float whole = own.gates[0][3];
        float keep[2], keep_output[2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            top[n] *= unit[n] * whole;
            scale[n] *= 1.0f / CHUNK * IMAGE_SCALE;
            keep[n] = whole * (unit[n] * scale[n]), keep_output[n] = back[n] * scale[n];
            unit[n] = inverse(scale[n]);
        }
#pragma unroll
        for (int i = 0; i < KEY_TILES; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[i][e] *= keep[e / 2];
        luce_wgmma_wait<1>();
        luce_wgmma_hold(o);
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) o[i][e] *= own.gates[i * 8 + 2 * t + e % 2][1] * keep_output[e / 2];
        luce_wgmma_wait<0>();
        luce_wgmma_hold(fresh);
        // S^T <- e^G_last S^T + (e^(G_last - G) V')^T K, and O^T + V'^T M^T behind it
        constexpr float to_fp16 = 1.0f / CHUNK / IMAGE_SCALE;
        Left rest[TILES / 2];
        float fading[TILES][4];
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) fading[i][e] = fresh[i][e] * (to_fp16 * own.gates[i * 8 + 2 * t + e % 2][2]);
#pragma unroll
        for (int k = 0; k < TILES / 2; k++) rest[k].take(fading + 2 * k, {1.0f, 1.0f});
        luce_wgmma_fence();
#pragma unroll
        for (int k = 0; k < TILES / 2; k++)
#pragma unroll
            for (int n = 0; n < HEAD / 64; n++)
                rest[k].add(s + n * 8, own.keys, n * SQUARE + k * 16 * 128, HEAD / 64 * SQUARE);
        luce_wgmma_close();
#pragma unroll
        for (int k = 0; k < TILES / 2; k++) left[k].take(fresh + 2 * k, {to_fp16, to_fp16});
        luce_wgmma_hold(o);
        luce_wgmma_fence();
#pragma unroll
        for (int k = 0; k < TILES / 2; k++) left[k].add_transposed(o, own.mix, k * 32, SQUARE, true);
        luce_wgmma_close();
        // A bound of the next state, by unit keys: CHUNK times the largest of what they multiply. Where it is far above, bits
        // are lost that are below the rounding errors of this sum.
        column_tops(fresh_top, fading);
#pragma unroll
        for (int n = 0; n < 2; n++) top[n] = fmaf(CHUNK * IMAGE_SCALE * unit[n], fresh_top[n], top[n]);
        luce_wgmma_wait<1>();
        luce_wgmma_hold(s);
        split_state();
    }
    luce_release();
    luce_wgmma_wait<0>();
    luce_wgmma_hold(o);
    put_output(first, span.rows - (first - CHUNK));
#pragma unroll
    for (int i = 0; i < KEY_TILES; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) memory[own_memory + e / 2 * 8 * HEAD + i * 8 + e % 2] = s[i][e] * unit[e / 2];
#endif
}
