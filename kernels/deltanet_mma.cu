// variants for cuda: HEAD=64,128
//
// The gated delta rule of long spans, chunk by chunk, as delta_chunks of deltanet_chunk.cu, which has the formulas and what
// prepares the chunks. Only for targets with tensor cores and shared memory for two chunks.
//
// All products are of transposed matrices: a wave has 16 columns of the state, S^T [16, HEAD], in registers, and each
// result is the left factor of the next product as the registers hold it. So waves share the chunk's matrices alone, which
// are the right factors, and wait for each other once a chunk.
#include "deltanet.h"
#include "mma.h"

#define CHUNK 64
#define WAVES 4
#define THREADS (WAVES * 32)
#define COLUMNS (WAVES * 16)
static_assert(HEAD % COLUMNS == 0, "a head is whole blocks");
// Row strides in shared memory: pairs of neighbours, eight rows at a time, lie in different banks.
#define KEY_PITCH (HEAD + 8)
#define PITCH (CHUNK + 8)
#define TILES (CHUNK / 8)
#define KEY_TILES (HEAD / 8)

// A chunk's matrices.
struct Chunk {
    float keys[CHUNK * KEY_PITCH], queries[CHUNK * KEY_PITCH], solve[CHUNK * PITCH], mix[CHUNK * PITCH];
    // beta_i, e^G_i, e^(G_last - G_i), e^G_last of each row
    float gates[CHUNK * 4];
};

#if LUCE_MMA_TF32

// high + low = value, high of 11 significant bits.
LUCE_FN void split(float& high, float& low, float value) {
    high = __uint_as_float((__float_as_uint(value) + 0x1000u) & 0xffffe000u);
    low = value - high;
}

// A result's tile [16, 8] as a left factor, whose eight summed places t and t + 4 are the tile's columns 2t and 2t + 1.
struct Left {
    float high[4], low[4];

    __device__ __forceinline__ explicit Left(const float (&tile)[4]) {
#pragma unroll
        for (int i = 0; i < 4; i++) split(high[i], low[i], tile[i % 2 * 2 + i / 2]);
    }
};

// sum[i] += left * right of COUNT tiles, right[i] the values in a lane's two summed places. Three products of 11 bits have
// the accuracy of float without low * low, which is less than the rounding error of float.
template <int COUNT> LUCE_FN void add(float (*sum)[4], const Left& left, const float (&right)[COUNT][2]) {
    float high[COUNT][2], low[COUNT][2];
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int n = 0; n < 2; n++) split(high[i][n], low[i][n], right[i][n]);
#pragma unroll
    for (int i = 0; i < COUNT; i++) luce_mma_tf32(sum[i], left.low, high[i]);
#pragma unroll
    for (int i = 0; i < COUNT; i++) luce_mma_tf32(sum[i], left.high, low[i]);
#pragma unroll
    for (int i = 0; i < COUNT; i++) luce_mma_tf32(sum[i], left.high, high[i]);
}

// Two neighbours of a row.
LUCE_FN void pair(float (&to)[2], const float* from) {
    const float2 two = *reinterpret_cast<const float2*>(from);
    to[0] = two.x, to[1] = two.y;
}

// Rows of a matrix to shared memory in the background, zeros from row `rows` on.
template <int COLS, int TO_PITCH> LUCE_FN void copy_rows(float* to, const float* from, i64 stride, int rows) {
#pragma unroll 4
    for (int i = luce_thread(); i < CHUNK * COLS / 4; i += THREADS) {
        const int row = i / (COLS / 4), column = i % (COLS / 4) * 4;
        luce_copy16(to + row * TO_PITCH + column, from + (row < rows ? row : 0) * stride + column, row < rows);
    }
}

#endif

// Grid (HEAD / COLUMNS, value heads, spans), THREADS threads, two Chunks of dynamic shared memory. out gets O.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    delta_chunks_mma(const float* __restrict__ c, float* __restrict__ memory, const i32* __restrict__ spans,
                     const float* __restrict__ gates, const float* __restrict__ solve, const float* __restrict__ mix,
                     float* __restrict__ out, int key_heads) {
    luce_await();
#if LUCE_MMA_TF32
    LUCE_DYNAMIC_SHARED(Chunk, chunks);
    const Span span = span_at(spans, blockIdx.z);
    if (span.rows <= STEPS) return;
    const int head = (int)blockIdx.y, heads = (int)gridDim.y, g = luce_lane() / 4, t = luce_lane() % 4;
    const int first_column = (int)blockIdx.x * COLUMNS + luce_wave() * 16;
    const Layout layout = {key_heads, heads};
    const i64 channels = layout.channels();
    // The lane's two columns are g and g + 8 of the wave's.
    memory += (((i64)span.slot * heads + head) * HEAD + first_column + g) * HEAD + 2 * t;

    const auto fetch = [&](Chunk& to, int first) {
        const int rows = luce_min(CHUNK, span.rows - first);
        const i64 start = span.start + first, square = (start * heads + head) * CHUNK;
        copy_rows<HEAD, KEY_PITCH>(to.keys, c + start * channels + layout.vector(KEY, head), channels, rows);
        copy_rows<HEAD, KEY_PITCH>(to.queries, c + start * channels + layout.vector(QUERY, head), channels, rows);
        copy_rows<CHUNK, PITCH>(to.solve, solve + square, (i64)heads * CHUNK, rows);
        copy_rows<CHUNK, PITCH>(to.mix, mix + square, (i64)heads * CHUNK, rows);
        copy_rows<4, 4>(to.gates, gates + (start * heads + head) * 4, (i64)heads * 4, rows);
        luce_copy_close();
    };

    float s[KEY_TILES][4];
#pragma unroll
    for (int i = 0; i < KEY_TILES; i++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[i][e] = span.position ? memory[e / 2 * 8 * HEAD + i * 8 + e % 2] : 0.0f;

    fetch(chunks[0], 0);
    for (int first = 0, turn = 0; first < span.rows; first += CHUNK, turn ^= 1) {
        const int rows = luce_min(CHUNK, span.rows - first);
        const i64 start = span.start + first;
        // The wave's columns of V^T, and of O^T.
        const float* v = c + start * channels + layout.vector(VALUE, head) + first_column + g;
        float value[TILES][4];
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = i * 8 + 2 * t + e % 2;
                value[i][e] = row < rows ? v[row * channels + e / 2 * 8] : 0.0f;
            }
        luce_copy_wait<0>();
        luce_sync();  // this chunk is there, and no wave reads the one before it
        if (first + CHUNK < span.rows) fetch(chunks[turn ^ 1], first + CHUNK);
        const Chunk& own = chunks[turn];

        // (K S)^T and (Q S)^T
        float ks[TILES][4] = {}, o[TILES][4] = {};
#pragma unroll
        for (int k = 0; k < KEY_TILES; k++) {
            const Left left(s[k]);
            const float *keys = own.keys + g * KEY_PITCH + k * 8 + 2 * t, *queries = own.queries + (keys - own.keys);
#pragma unroll
            for (int i = 0; i < TILES; i += 4) {
                float right[4][2];
#pragma unroll
                for (int n = 0; n < 4; n++) pair(right[n], keys + (i + n) * 8 * KEY_PITCH);
                add(ks + i, left, right);
#pragma unroll
                for (int n = 0; n < 4; n++) pair(right[n], queries + (i + n) * 8 * KEY_PITCH);
                add(o + i, left, right);
            }
        }
        // (beta (V - e^G (K S)))^T, and (e^G (Q S))^T
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float* gate = own.gates + (i * 8 + 2 * t + e % 2) * 4;
                ks[i][e] = gate[0] * (value[i][e] - gate[1] * ks[i][e]);
                o[i][e] *= gate[1];
            }
        // V'^T; T and M are 0 above their diagonals.
        float fresh[TILES][4] = {};
#pragma unroll
        for (int k = 0; k < TILES; k++) {
            const Left left(ks[k]);
#pragma unroll
            for (int i = k; i < TILES; i++) {
                float right[1][2];
                pair(right[0], own.solve + (i * 8 + g) * PITCH + k * 8 + 2 * t);
                add(fresh + i, left, right);
            }
        }
#pragma unroll
        for (int k = 0; k < TILES; k++) {
            const Left left(fresh[k]);
#pragma unroll
            for (int i = k; i < TILES; i++) {
                float right[1][2];
                pair(right[0], own.mix + (i * 8 + g) * PITCH + k * 8 + 2 * t);
                add(o + i, left, right);
            }
        }
        float* to = out + (start * heads + head) * HEAD + first_column + g;
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = i * 8 + 2 * t + e % 2;
                if (row < rows) to[(i64)row * heads * HEAD + e / 2 * 8] = o[i][e];
            }
        // S^T <- e^G_last S^T + (e^(G_last - G) V')^T K
        const float whole = own.gates[3];
#pragma unroll
        for (int i = 0; i < KEY_TILES; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[i][e] *= whole;
#pragma unroll
        for (int k = 0; k < TILES; k++) {
#pragma unroll
            for (int e = 0; e < 4; e++) fresh[k][e] *= own.gates[(k * 8 + 2 * t + e % 2) * 4 + 2];
            const Left left(fresh[k]);
            const float* keys = own.keys + (k * 8 + 2 * t) * KEY_PITCH + g;
#pragma unroll
            for (int i = 0; i < KEY_TILES; i += 4) {
                float right[4][2];
#pragma unroll
                for (int n = 0; n < 4; n++)
                    right[n][0] = keys[(i + n) * 8], right[n][1] = keys[(i + n) * 8 + KEY_PITCH];
                add(s + i, left, right);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < KEY_TILES; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) memory[e / 2 * 8 * HEAD + i * 8 + e % 2] = s[i][e];
#endif
}
