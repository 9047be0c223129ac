// variants for cuda: HEAD=64,128
//
// The gated delta rule of long spans, chunk by chunk, as delta_chunks of deltanet_chunk.cu, which has the formulas and what
// prepares the chunks. Only for targets on which four waves multiply together.
//
// All products are of transposed matrices: four waves have 64 columns of the state, S^T [64, HEAD], in registers, and each
// result is the left factor of the next product as the registers hold it. Four other waves meanwhile bring the next
// chunk's matrices, the right factors, to shared memory.
//
// Each factor is the sum of two fp16 numbers, 22 bits, times a power of two: right factors as deltanet_halves.h has them,
// left factors with a power for each column, by its largest element. Their products, without that of the two lower parts,
// have the accuracy of floats.
#include "deltanet.h"
#include "deltanet_halves.h"
#include "wgmma.h"

#define CHUNK 64
#define GROUP 128
#define THREADS (2 * GROUP)
#define COLUMNS 64
static_assert(HEAD % COLUMNS == 0, "a head is whole blocks");
#define TILES (CHUNK / 8)
#define KEY_TILES (HEAD / 8)

// What a block reads of a chunk.
struct Chunk {
    alignas(1024) u8 keys[Images::VECTOR_BYTES];
    u8 queries[Images::VECTOR_BYTES], solve[Images::SQUARE_BYTES], mix[Images::SQUARE_BYTES];
    // The block's columns of V; column x of row r lies in the place x ^ r / 2 % 4 * 8.
    float values[CHUNK * COLUMNS];
    // beta_i, e^G_i, e^(G_last - G_i), e^G_last of each row
    float gates[CHUNK][4];
};

#if LUCE_WGMMA

// The power of two that takes a column's largest element to 2^13 and on, but one of 2^-50 to 2^40: sums of products with it
// stay floats, and elements below 2^-27 lose bits only where all of a column are, far below what the output's norm sees.
LUCE_FN float scale_to_fp16(float top) {
    const int exponent = 267 - (int)(__float_as_uint(top) >> 23);
    return __uint_as_float((u32)luce_min(luce_max(exponent, 127 - 50), 127 + 40) << 23);
}

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
    // sum += left right^T, `right` 16 columns of an image's square.
    __device__ __forceinline__ void add_transposed(float (*sum)[4], const u8* right, int at, int lower) const {
        luce_wgmma_transposed<f16_t>(sum, low, right, at);
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

// Copies `bytes` to shared memory in the background, by the second group of waves.
template <int BYTES> LUCE_FN void copy_image(u8* to, const u8* from) {
#pragma unroll
    for (int n = 0; n < BYTES / 16 / GROUP; n++) {
        const int at = (luce_thread() % GROUP + n * GROUP) * 16;
        luce_copy16(to + at, from + at, true);
    }
}

#endif

// Grid (HEAD / COLUMNS, value heads, spans), THREADS threads, two Chunks of dynamic shared memory. out gets O.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    delta_chunks_wgmma(const float* __restrict__ c, float* __restrict__ memory, const i32* __restrict__ spans,
                       const float* __restrict__ gates, const u8* __restrict__ vectors,
                       const u8* __restrict__ squares, float* __restrict__ out, int key_heads) {
    luce_await();
#if LUCE_WGMMA
    LUCE_DYNAMIC_SHARED(Chunk, chunks);
    const Span span = span_at(spans, blockIdx.z);
    if (span.rows <= STEPS) return;
    const int head = (int)blockIdx.y, heads = (int)gridDim.y;
    const Layout layout = {key_heads, heads};
    const i64 channels = layout.channels();
    const Images images = {key_heads, heads};

    const auto bring = [&](Chunk& to, int first) {
        const int rows = luce_min(CHUNK, span.rows - first), thread = luce_thread() % GROUP;
        const int image = Images::first(span.start, (int)blockIdx.z) + first / CHUNK;
        const i64 start = span.start + first;
        copy_image<2 * Images::VECTOR_BYTES>(to.keys, vectors + images.vectors(image, head % key_heads));
        copy_image<2 * Images::SQUARE_BYTES>(to.solve, squares + images.squares(image, head));
        const float* values = c + start * channels + layout.vector(VALUE, head) + (int)blockIdx.x * COLUMNS;
#pragma unroll
        for (int n = 0; n < CHUNK * COLUMNS / 4 / GROUP; n++) {
            const int i = thread + n * GROUP, row = i / (COLUMNS / 4), column = i % (COLUMNS / 4) * 4;
            luce_copy16(to.values + row * COLUMNS + (column ^ row / 2 % 4 * 8),
                        values + (row < rows ? row : 0) * channels + column, row < rows);
        }
        const bool there = thread < rows;
        if (thread < CHUNK)
            luce_copy16(to.gates[thread], gates + ((start + (there ? thread : 0)) * heads + head) * 4, there);
        luce_copy_close();
        luce_copy_wait<0>();
    };
    // The same for all lanes, as the compiler sees by the shuffle: it does not let waves of a branch that may diverge
    // multiply in the background.
    const bool brings = luce_shfl(luce_wave(), 0) >= GROUP / LUCE_LANES;

    const int g = luce_lane() / 4, t = luce_lane() % 4, first_column = (int)blockIdx.x * COLUMNS + luce_wave() * 16;
    memory += (((i64)span.slot * heads + head) * HEAD + first_column + g) * HEAD + 2 * t;
    // The state is s times `unit` of the lane's two columns, a power of two.
    float s[KEY_TILES][4], unit[2] = {1.0f, 1.0f};
#pragma unroll
    for (int i = 0; i < KEY_TILES; i++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[i][e] = span.position && !brings ? memory[e / 2 * 8 * HEAD + i * 8 + e % 2] : 0.0f;

    if (brings) bring(chunks[0], 0);
    for (int first = 0, turn = 0; first < span.rows; first += CHUNK, turn ^= 1) {
        luce_wgmma_share();
        luce_sync();  // this chunk is there, and the one before it has been read
        if (brings) {
            if (first + CHUNK < span.rows) bring(chunks[turn ^ 1], first + CHUNK);
            continue;
        }
        const int rows = luce_min(CHUNK, span.rows - first);
        const i64 start = span.start + first;
        const Chunk& own = chunks[turn];
        float top[2], scale[2], back[2];
        column_tops(top, s);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const float to_fp16 = scale_to_fp16(top[n] * unit[n]);
            scale[n] = to_fp16 * unit[n], back[n] = 1.0f / (to_fp16 * IMAGE_SCALE);
        }
        // (K S)^T and (Q S)^T
        float ks[TILES][4] = {}, o[TILES][4] = {};
        luce_wgmma_hold(o);
        {
            Left left[KEY_TILES / 2];
#pragma unroll
            for (int k = 0; k < KEY_TILES / 2; k++) left[k].take(s + 2 * k, scale);
            luce_wgmma_fence();
#pragma unroll
            for (int k = 0; k < KEY_TILES / 2; k++)
                left[k].add_transposed(ks, own.keys, k / 4 * SQUARE + k % 4 * 32, HEAD / 64 * SQUARE);
            luce_wgmma_close();
#pragma unroll
            for (int k = 0; k < KEY_TILES / 2; k++)
                left[k].add_transposed(o, own.queries, k / 4 * SQUARE + k % 4 * 32, HEAD / 64 * SQUARE);
            luce_wgmma_close();
        }
        luce_wgmma_wait<1>();
        luce_wgmma_hold(ks);
        // (beta (V - e^G (K S)))^T
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = i * 8 + 2 * t + e % 2;
                const float value = own.values[row * COLUMNS + ((luce_wave() * 16 + e / 2 * 8 + g) ^ t * 8)];
                ks[i][e] = own.gates[row][0] * fmaf(-back[e / 2] * own.gates[row][1], ks[i][e], value);
            }
        column_tops(top, ks);
#pragma unroll
        for (int n = 0; n < 2; n++) scale[n] = scale_to_fp16(top[n]);
        // V'^T
        float fresh[TILES][4] = {};
        {
            Left left[TILES / 2];
#pragma unroll
            for (int k = 0; k < TILES / 2; k++) left[k].take(ks + 2 * k, scale);
            luce_wgmma_fence();
#pragma unroll
            for (int k = 0; k < TILES / 2; k++) left[k].add_transposed(fresh, own.solve, k * 32, SQUARE);
            luce_wgmma_close();
        }
        // Meanwhile the state gets the scale of what will be added. No element of T exceeds 1, so V' is at most 64 times as
        // large as what T multiplies, and at least 1 / 64.
        float keep[2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            scale[n] *= 1.0f / CHUNK * IMAGE_SCALE;
            keep[n] = own.gates[0][3] * (unit[n] * scale[n]);
            unit[n] = 1.0f / scale[n];
        }
#pragma unroll
        for (int i = 0; i < KEY_TILES; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[i][e] *= keep[e / 2];
        luce_wgmma_wait<0>();
        luce_wgmma_hold(fresh);
        luce_wgmma_hold(o);
        // M V'^T, and S^T <- e^G_last S^T + (e^(G_last - G) V')^T K
        const float to_fp16[2] = {1.0f / CHUNK / IMAGE_SCALE, 1.0f / CHUNK / IMAGE_SCALE};
        Left left[TILES / 2], rest[TILES / 2];
        float mixed[TILES][4] = {};
#pragma unroll
        for (int k = 0; k < TILES / 2; k++) left[k].take(fresh + 2 * k, to_fp16);
        luce_wgmma_fence();
#pragma unroll
        for (int k = 0; k < TILES / 2; k++) left[k].add_transposed(mixed, own.mix, k * 32, SQUARE);
        luce_wgmma_close();
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) fresh[i][e] *= own.gates[i * 8 + 2 * t + e % 2][2];
#pragma unroll
        for (int k = 0; k < TILES / 2; k++) rest[k].take(fresh + 2 * k, to_fp16);
        luce_wgmma_fence();
#pragma unroll
        for (int k = 0; k < TILES / 2; k++)
#pragma unroll
            for (int n = 0; n < HEAD / 64; n++)
                rest[k].add(s + n * 8, own.keys, n * SQUARE + k * 16 * 128, HEAD / 64 * SQUARE);
        luce_wgmma_close();
        luce_wgmma_wait<1>();
        luce_wgmma_hold(mixed);
        float* to = out + (start * heads + head) * HEAD + first_column + g;
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = i * 8 + 2 * t + e % 2;
                const float before = own.gates[row][1] * back[e / 2] * o[i][e];
                if (row < rows) to[(i64)row * heads * HEAD + e / 2 * 8] = fmaf(mixed[i][e], unit[e / 2], before);
            }
        luce_wgmma_wait<0>();
        luce_wgmma_hold(s);
    }
    if (brings) return;
#pragma unroll
    for (int i = 0; i < KEY_TILES; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) memory[e / 2 * 8 * HEAD + i * 8 + e % 2] = s[i][e] * unit[e / 2];
#endif
}
