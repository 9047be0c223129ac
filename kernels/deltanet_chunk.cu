// variants: HEAD=64,128
//
// Gated DeltaNet for long spans: the convolution, then the gated delta rule in chunks of CHUNK rows, counted from the
// span's first row, as products of matrices (arXiv 2412.06464, section 3.3); deltanet_output.cu follows. With unit keys K and
// scaled unit queries Q of a chunk, G_i the sum of g up to row i and D_ij = e^(G_i - G_j):
//   T  = (I + A)^-1 with A_ij = beta_i (k_i . k_j) D_ij for j < i,    M_ij = (q_i . k_j) D_ij for j <= i
//   V' = T (beta (V - e^G (K S))),   O = e^G (Q S) + M V',   S <- e^G_last S + (e^(G_last - G) K)^T V'
// delta_prepare computes everything that does not need the state S for all chunks at once. Columns of S never mix, so a
// block of delta_chunks takes COLUMNS of a head from the first chunk to the last. deltanet_mma.cu takes its place where tensor
// cores and shared memory allow it, and deltanet_prepare.cu and deltanet_wgmma.cu the place of both on sm_90a.
#include "deltanet.h"
#include "deltanet_halves.h"
#include "products.h"

#define CHUNK 64
#define COLUMNS 32
#define HALVES (HEAD / CHUNK)
static_assert(HEAD % CHUNK == 0 && HEAD % COLUMNS == 0, "a head is whole squares");
// Row strides of matrices in shared memory: of those read along their rows, down their columns, and of the state.
#define PITCH (CHUNK + 4)
#define DOWN_PITCH (CHUNK + 8)
#define STATE_PITCH (HEAD + 4)
// --- convolution

#define CONV_THREADS 128
// Rows of a wave; at least TAPS - 1, so that only a span's first tile reaches back into the state.
#define TILE 16

// The elements of a row that a lane reads, as they are loaded, and how many rows' are loaded at once, to hide the latency. Of
// halves the lane has neighbours: a fourth of the loads.
template <bool FP16> struct Input {
    static constexpr int BATCH = 4;
    float values[ELEMENTS];

    static __device__ __forceinline__ int place(int e) { return luce_lane() + e * LUCE_LANES; }
    __device__ __forceinline__ void load(const Products<FP16>& from, i64 row, i64 stride, int feature) {
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) values[e] = from.at(row, stride, feature + place(e));
    }
    __device__ __forceinline__ float at(int e) const { return values[e]; }
};

template <> struct Input<true> {
    static constexpr int BATCH = 8;
    Neighbours<f16_t> values;
    float scale;

    static __device__ __forceinline__ int place(int e) { return luce_lane() * ELEMENTS + e; }
    __device__ __forceinline__ void load(const Products<true>& from, i64 row, i64 stride, int feature) {
        values = *reinterpret_cast<const Neighbours<f16_t>*>(from.half(row, stride, feature + place(0)));
        scale = from.rows[row];
    }
    __device__ __forceinline__ float at(int e) const { return luce_f32(values.at[e]) * scale; }
};

// Sums of COUNT values over a wave; a lane gets that of value lane / (LUCE_LANES / COUNT), to the bits of luce_lane_sum.
template <int COUNT> LUCE_FN float spread_sums(float (&v)[COUNT]) {
    int mask = LUCE_LANES / 2;
#pragma unroll
    for (int count = COUNT / 2; count > 0; count /= 2, mask /= 2) {
        const bool upper = luce_lane() & mask;
#pragma unroll
        for (int i = 0; i < count; i++) {
            const float other = luce_shfl_xor(upper ? v[i] : v[i + count], mask);
            v[i] = (upper ? v[i + count] : v[i]) + other;
        }
    }
    for (; mask > 0; mask /= 2) v[0] += luce_shfl_xor(v[0], mask);
    return v[0];
}

// Where the convolution's results go: rows of c, or where there are `vectors`, images of keys and queries, and V's pieces.
struct Results {
    float* c;
    u8* vectors;
    float* values;
};

template <bool FP16, bool IMAGES>
LUCE_FN void convolve(const Products<FP16>& inputs, const float* __restrict__ filter, float* __restrict__ past,
                      const i32* __restrict__ spans, const Results& to, i64 stride, int key_heads, int heads, int taps) {
    using Row = Input<FP16>;
    const Span span = span_at(spans, blockIdx.z);
    // The same for all lanes, as the compiler sees by the shuffle.
    const int wave = luce_shfl(luce_wave(), 0);
    const int vector = (int)blockIdx.x * (CONV_THREADS / LUCE_LANES) + wave, first = (int)blockIdx.y * TILE;
    // A chunk's images have whole tiles: rows behind the span's have an effect on none, but are numbers.
    const int end = IMAGES ? (span.rows + CHUNK - 1) / CHUNK * CHUNK : span.rows;
    if (span.rows <= STEPS || first >= end || vector >= 2 * key_heads + heads) return;  // whole waves
    const int kind = luce_min(vector / key_heads, (int)VALUE), head = vector - kind * key_heads;
    const int channel = vector * HEAD, channels = Layout{key_heads, heads}.channels();
    float* const c = IMAGES ? nullptr : to.c + (i64)span.start * channels + channel;
    u8* piece = nullptr;
    if (IMAGES) {
        const Images images = {key_heads, heads};
        const int image = Images::first(span.start, (int)blockIdx.z) + (int)(blockIdx.y / (CHUNK / TILE));
        if (kind == VALUE)
            piece = reinterpret_cast<u8*>(to.values + images.values(image, head, 0));
        else
            piece = to.vectors + images.vectors(image, head) + (kind == QUERY ? Images::VECTOR_BYTES : 0);
    }
    // The place of this vector in a head's past; key heads' vectors are in the past of all heads that read them.
    const auto past_at = [&](int reader, int tap, int i) -> float& {
        return past[(((i64)span.slot * heads + reader) * (taps - 1) + tap) * VECTORS * HEAD + kind * HEAD + i];
    };

    float weight[ELEMENTS][TAPS], window[ELEMENTS][TAPS];
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) {
        // The last tap multiplies the row itself.
        const int from = tap - (TAPS - taps), row = first - (TAPS - 1) + tap;
        Row before = {};
        const bool there = from >= 0 && tap < TAPS - 1 && row >= 0 && row < span.rows;
        if (there) before.load(inputs, span.start + row, stride, channel);
#pragma unroll
        for (int e = 0; e < ELEMENTS; e++) {
            const int i = Row::place(e);
            weight[e][tap] = from < 0 ? 0.0f : filter[(i64)(channel + i) * taps + from];
            window[e][tap] = there ? before.at(e) : 0.0f;
            if (from >= 0 && tap < TAPS - 1 && row < 0 && span.position)
                window[e][tap] = past_at(head, from, i);
        }
    }
#pragma unroll 1
    for (u32 tile = 0; tile < TILE; tile += Row::BATCH) {
        Row input[Row::BATCH] = {};
#pragma unroll
        for (int b = 0; b < Row::BATCH; b++) {
            const int row = first + tile + b;
            if (row < span.rows) input[b].load(inputs, span.start + row, stride, channel);
        }
        float value[Row::BATCH][ELEMENTS], squares[Row::BATCH] = {};
#pragma unroll
        for (int b = 0; b < Row::BATCH; b++)
#pragma unroll
            for (int e = 0; e < ELEMENTS; e++) {
                window[e][TAPS - 1] = input[b].at(e);
                float sum = 0.0f;
#pragma unroll
                for (int tap = 0; tap < TAPS; tap++) sum = fmaf(window[e][tap], weight[e][tap], sum);
                value[b][e] = FP16 ? silu_of_halves(sum) : silu(sum);
                squares[b] = fmaf(value[b][e], value[b][e], squares[b]);
#pragma unroll
                for (int tap = 0; tap < TAPS - 1; tap++) window[e][tap] = window[e][tap + 1];
            }
        if (kind != VALUE) {
            // Unit vectors; a lane computes the factor of one row.
            const float factor = unit_scale(kind, spread_sums(squares));
#pragma unroll
            for (int b = 0; b < Row::BATCH; b++) {
                const float own = luce_shfl(factor, b * (LUCE_LANES / Row::BATCH));
#pragma unroll
                for (int e = 0; e < ELEMENTS; e++) value[b][e] *= own;
            }
        }
        // A lane's elements go as WIDE neighbours, or one at a time.
        constexpr int WIDE = FP16 ? ELEMENTS : 1;
        const u32 in_chunk = blockIdx.y % (CHUNK / TILE) * TILE;
#pragma unroll
        for (int b = 0; b < Row::BATCH; b++)
#pragma unroll
            for (int e = 0; e < ELEMENTS; e += WIDE) {
                Neighbours<float, WIDE> unit;
#pragma unroll
                for (int i = 0; i < WIDE; i++) unit.at[i] = value[b][e + i];
                const u32 row = tile + b, column = Row::place(e);
                if (!IMAGES) {
                    if (first + (int)row < span.rows)
                        *reinterpret_cast<Neighbours<float, WIDE>*>(c + (i64)(first + row) * channels + column) = unit;
                } else if (kind == VALUE) {
                    float* to = reinterpret_cast<float*>(piece) + (column / 64 * CHUNK + in_chunk + row) * 64;
                    *reinterpret_cast<Neighbours<float, WIDE>*>(to + Images::value_place(in_chunk + row, column % 64)) = unit;
                } else {
                    u8* to = piece + column / 64 * SQUARE + in_square(in_chunk + row, column % 64);
                    put_parts(to, HALVES * SQUARE, unit.at);
                }
            }
    }
    luce_release();
    // The lane that read the past writes the new one, from x itself: the span's last tile may run at any time.
    if (first) return;
    for (int reader = head; reader < heads; reader += kind == VALUE ? heads : key_heads)
        for (int tap = 0; tap < taps - 1; tap++)
            for (int e = 0; e < ELEMENTS; e++)
                past_at(reader, tap, Row::place(e)) =
                    inputs.at(span.start + span.rows - (taps - 1) + tap, stride, channel + Row::place(e));
}

// c [rows, channels] = silu(convolution), queries and keys as unit vectors; or, where there are `vectors`, these and `values`
// as deltanet_halves.h has them. A wave has a vector of TILE rows; grid (vectors / waves, tiles of the longest span's chunks,
// spans), CONV_THREADS threads. x, filter and past as in deltanet.cu; x may be
// Products with scales, here and below.
extern "C" __global__ void __launch_bounds__(CONV_THREADS, 5)
    delta_vectors(const float* __restrict__ x, const float* __restrict__ scales, const float* __restrict__ sum_features,
                  const float* __restrict__ filter, float* __restrict__ past, const i32* __restrict__ spans,
                  float* __restrict__ c, u8* __restrict__ vectors, float* __restrict__ values, i64 stride, int key_heads,
                  int heads, int taps) {
    luce_await();
    const Results to = {c, vectors, values};
    const Products<true> halves = {x, scales};
    const Products<false> floats = {x, scales, sum_features};
    if (vectors && are_halves(scales, sum_features))
        convolve<true, true>(halves, filter, past, spans, to, stride, key_heads, heads, taps);
    else if (vectors)
        convolve<false, true>(floats, filter, past, spans, to, stride, key_heads, heads, taps);
    else if (are_halves(scales, sum_features))
        convolve<true, false>(halves, filter, past, spans, to, stride, key_heads, heads, taps);
    else
        convolve<false, false>(floats, filter, past, spans, to, stride, key_heads, heads, taps);
}

// --- squares of CHUNK x CHUNK elements from global memory by registers to shared memory, beside the arithmetic

template <int THREADS> struct Square {
    float held[CHUNK * CHUNK / 4 / THREADS][4];

    // The first `rows` rows, zeros elsewhere.
    __device__ __forceinline__ void fetch(const float* __restrict__ from, i64 stride, int rows) {
#pragma unroll
        for (int n = 0; n < CHUNK * CHUNK / 4 / THREADS; n++) {
            const int row = (luce_thread() + n * THREADS) / (CHUNK / 4);
            const int column = (luce_thread() + n * THREADS) % (CHUNK / 4) * 4;
            if (row < rows)
                get4(held[n], from + row * stride + column);
            else
                held[n][0] = held[n][1] = held[n][2] = held[n][3] = 0.0f;
        }
    }
    // Writes the square to `to`, rows times their `scale`.
    template <int TO_PITCH = PITCH> __device__ __forceinline__ void put(float* to, const float* scale = nullptr) {
        luce_sync();
#pragma unroll
        for (int n = 0; n < CHUNK * CHUNK / 4 / THREADS; n++) {
            const int row = (luce_thread() + n * THREADS) / (CHUNK / 4);
            const int column = (luce_thread() + n * THREADS) % (CHUNK / 4) * 4;
            if (scale)
                for (float& value : held[n]) value *= scale[row];
            put4(to + row * TO_PITCH + column, held[n]);
        }
        luce_sync();
    }
};

// --- products of matrices in shared memory

// M x N sums by a block of M * N / (4 * TILES) threads, 4 * TILES of them each: [e] is the one at (row(e), column(e)).
// Both factors have the summed dimension along their rows, or (DOWN) the second one has it down its columns.
template <int M, int N, int TILES, bool DOWN = false> struct Product {
    float sum[TILES][4];

    __device__ __forceinline__ float& operator[](int e) { return sum[e / 4][e % 4]; }

#if LUCE_MMA_TF32
    // A wave has 16 rows and TILES tiles of 8 columns.
    static __device__ __forceinline__ int row(int e) {
        return luce_wave() % (M / 16) * 16 + luce_lane() / 4 + e / 2 % 2 * 8;
    }
    static __device__ __forceinline__ int column(int e) {
        return luce_wave() / (M / 16) * TILES * 8 + e / 4 * 8 + luce_lane() % 4 * 2 + e % 2;
    }

    // high + low = value, high of 11 significant bits.
    static __device__ __forceinline__ void split(float& high, float& low, float value) {
        high = __uint_as_float((__float_as_uint(value) + 0x1000u) & 0xffffe000u);
        low = value - high;
    }

    // sum += a b^T (DOWN: a b) over CHUNK elements of the summed dimension. Three products of 11 bits have the accuracy
    // of float without low * low, which is less than the rounding error of float.
    template <int A_PITCH, int B_PITCH> __device__ __forceinline__ void add(const float* a, const float* b) {
        const int g = luce_lane() / 4, t = luce_lane() % 4;
        a += (luce_wave() % (M / 16) * 16 + g) * A_PITCH + t;
        b += (luce_wave() / (M / 16) * TILES * 8 + g) * (DOWN ? 1 : B_PITCH) + t * (DOWN ? B_PITCH : 1);
#pragma unroll 4
        for (int k = 0; k < CHUNK; k += 8) {
            float a_high[4], a_low[4], b_high[TILES][2], b_low[TILES][2];
#pragma unroll
            for (int i = 0; i < 4; i++) split(a_high[i], a_low[i], a[i % 2 * 8 * A_PITCH + k + i / 2 * 4]);
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int at = k + half * 4;
                    split(b_high[i][half], b_low[i][half], DOWN ? b[at * B_PITCH + i * 8] : b[i * 8 * B_PITCH + at]);
                }
#pragma unroll
            for (int i = 0; i < TILES; i++) luce_mma_tf32(sum[i], a_low, b_high[i]);
#pragma unroll
            for (int i = 0; i < TILES; i++) luce_mma_tf32(sum[i], a_high, b_low[i]);
#pragma unroll
            for (int i = 0; i < TILES; i++) luce_mma_tf32(sum[i], a_high, b_high[i]);
        }
    }
#else
    static __device__ __forceinline__ int row(int e) { return luce_thread() / (N / TILES) + e / TILES * (M / 4); }
    static __device__ __forceinline__ int column(int e) {
        return luce_thread() % (N / TILES) + e % TILES * (N / TILES);
    }

    template <int A_PITCH, int B_PITCH> __device__ __forceinline__ void add(const float* a, const float* b) {
        a += row(0) * A_PITCH;
        b += column(0) * (DOWN ? 1 : B_PITCH);
#pragma unroll 2
        for (int k = 0; k < CHUNK; k += 4) {
            float left[4][4], right[TILES][4];
#pragma unroll
            for (int i = 0; i < 4; i++) get4(left[i], a + i * (M / 4) * A_PITCH + k);
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                if (DOWN) {
#pragma unroll
                    for (int n = 0; n < 4; n++) right[i][n] = b[(k + n) * B_PITCH + i * (N / TILES)];
                } else {
                    get4(right[i], b + i * (N / TILES) * B_PITCH + k);
                }
            }
#pragma unroll
            for (int n = 0; n < 4; n++)
#pragma unroll
                for (int e = 0; e < 4 * TILES; e++)
                    sum[e / 4][e % 4] = fmaf(left[e / TILES][n], right[e % TILES][n], sum[e / 4][e % 4]);
        }
    }
#endif
};

// --- the gated delta rule

#define PREPARE_THREADS 256
#define GROUPS (PREPARE_THREADS / CHUNK)
#define BLOCK 16

// T, M and gates [rows, value heads, 4] (beta_i, e^G_i, e^(G_last - G_i), e^G_last) of each chunk and value head; solve
// and mix [rows, value heads, CHUNK]. Grid (chunks of the longest span, key heads, spans), PREPARE_THREADS threads.
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS)
    delta_prepare(const float* __restrict__ c, const float* __restrict__ x, const float* __restrict__ scales,
                  const float* __restrict__ sum_features, const float* __restrict__ decay,
                  const float* __restrict__ dt_bias, const i32* __restrict__ spans, float* __restrict__ gates,
                  float* __restrict__ solve, float* __restrict__ mix, i64 stride, int heads) {
    luce_await();
    // Keys and queries, then T and A.
    __shared__ __align__(16) float tile[2][CHUNK * DOWN_PITCH];
    __shared__ float g[GROUPS][CHUNK], rate[GROUPS][CHUNK], total[GROUPS][CHUNK], error[GROUPS][CHUNK];
    const Span span = span_at(spans, blockIdx.z);
    const int first = (int)blockIdx.x * CHUNK;
    if (span.rows <= STEPS || first >= span.rows) return;
    const int rows = luce_min(CHUNK, span.rows - first), thread = luce_thread();
    const i64 start = span.start + first;
    const int key_head = (int)blockIdx.y;
    const Layout layout = {(int)gridDim.y, heads};
    const int channels = layout.channels();

    Product<CHUNK, CHUNK, 4> kk = {}, qk = {};
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        Square<PREPARE_THREADS> keys, queries;
        const float* from = c + start * channels + half * CHUNK;
        keys.fetch(from + layout.vector(KEY, key_head), channels, rows);
        queries.fetch(from + layout.vector(QUERY, key_head), channels, rows);
        keys.put(tile[0]);
        queries.put(tile[1]);
        kk.add<PITCH, PITCH>(tile[0], tile[0]);
        qk.add<PITCH, PITCH>(tile[1], tile[0]);
    }

    // The gates of as many of the key head's value heads as there are threads for.
    const int readers = heads / layout.key_heads;
    for (int reader = 0; reader < readers; reader++) {
        const int head = key_head + reader * layout.key_heads, group = reader % GROUPS;
        if (group == 0) {
            const int own = thread / CHUNK, row = thread % CHUNK, own_head = head + own * layout.key_heads;
            const bool there = row < rows && own_head < heads;
            // A row past the chunk's end has beta = g = 0, and no effect.
            g[own][row] = rate[own][row] = 0.0f;
            if (there) {
#pragma unroll 1
                for (int kind = 0; kind < 2; kind++) {
                    const int feature = kind ? layout.beta(own_head) : layout.alpha(own_head);
                    (kind ? rate : g)[own][row] = product_at(x, scales, sum_features, start + row, stride, feature);
                }
                g[own][row] = log_fade(g[own][row], decay[own_head], dt_bias[own_head]);
                rate[own][row] = sigmoid(rate[own][row]);
            }
            luce_sync();
            // G as a sum of two floats: after rows of strong decay it reaches hundreds, where the steps between floats
            // are as large as the differences between later rows that D needs.
            float sum = 0.0f, rest = 0.0f;
            for (int r = 0; r <= row; r++) {
                const float next = sum + g[own][r], added = next - sum;
                rest += (sum - (next - added)) + (g[own][r] - added);
                sum = next;
            }
            total[own][row] = sum;
            error[own][row] = rest;
            luce_sync();
            if (there) {
                const float last = total[own][CHUNK - 1], last_error = error[own][CHUNK - 1];
                const float factors[4] = {rate[own][row], expf(sum + rest), expf((last - sum) + (last_error - rest)),
                                          expf(last + last_error)};
                put4(gates + ((start + row) * heads + own_head) * 4, factors);
            }
        }

        float *t = tile[0], *a = tile[1];
#pragma unroll
        for (int e = 0; e < 16; e++) {
            const int row = kk.row(e), column = kk.column(e);
            float between = 0.0f;
            if (column <= row) {
                const float sum = total[group][row] - total[group][column];
                between = expf(sum + (error[group][row] - error[group][column]));
            }
            a[row * PITCH + column] = column < row ? rate[group][row] * kk[e] * between : 0.0f;
            if (row < rows) mix[((start + row) * heads + head) * CHUNK + column] = qk[e] * between;
        }
        luce_sync();  // the last head's T has been copied
        // Forward substitution by BLOCK rows of T: -A T of the rows above by all threads, then a thread per column. No
        // entry of T exceeds 1: up to beta, it is k_i P k_j with P a product of contractions I - beta k k^T.
        const int column = thread % CHUNK, row0 = thread / CHUNK * 4;
        for (int block = 0; block < CHUNK; block += BLOCK) {
            float sum[4] = {};
            const float* above = a + (block + row0) * PITCH;
            for (int l = 0; l < block; l += 4) {
                float left[4][4];
#pragma unroll
                for (int r = 0; r < 4; r++) get4(left[r], above + r * PITCH + l);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float right = t[(l + i) * DOWN_PITCH + column];
#pragma unroll
                    for (int r = 0; r < 4; r++) sum[r] = fmaf(left[r][i], right, sum[r]);
                }
            }
#pragma unroll
            for (int r = 0; r < 4; r++)
                t[(block + row0 + r) * DOWN_PITCH + column] = (block + row0 + r == column ? 1.0f : 0.0f) - sum[r];
            luce_sync();
            if (thread < CHUNK) {
                float solved[BLOCK];
#pragma unroll
                for (int r = 0; r < BLOCK; r++) {
                    solved[r] = t[(block + r) * DOWN_PITCH + thread];
#pragma unroll
                    for (int l = 0; l < r; l++)
                        solved[r] = fmaf(-a[(block + r) * PITCH + block + l], solved[l], solved[r]);
                    t[(block + r) * DOWN_PITCH + thread] = solved[r];
                }
            }
            luce_sync();
        }
        for (int i = thread; i < rows * CHUNK; i += PREPARE_THREADS)
            solve[((start + i / CHUNK) * heads + head) * CHUNK + i % CHUNK] = t[i / CHUNK * DOWN_PITCH + i % CHUNK];
    }
}

#define CHUNK_THREADS 256
// Elements of a product per thread.
#define SUMS (CHUNK * COLUMNS / CHUNK_THREADS)

// The chunks of a span one after the other; out gets O. Grid (HEAD / COLUMNS, value heads, spans), CHUNK_THREADS
// threads. The state is kept with a row per column: memory [slots, value heads, HEAD values, HEAD keys].
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS, 2)
    delta_chunks(const float* __restrict__ c, float* __restrict__ memory, const i32* __restrict__ spans,
                 const float* __restrict__ gates, const float* __restrict__ solve, const float* __restrict__ mix,
                 float* __restrict__ out, int key_heads) {
    luce_await();
    __shared__ __align__(16) float tile[CHUNK * DOWN_PITCH];
    __shared__ __align__(16) float state[COLUMNS * STATE_PITCH];
    __shared__ __align__(16) float fresh[COLUMNS * PITCH];  // by columns: beta (V - e^G (K S)), then V'
    __shared__ float rate[CHUNK], fade[CHUNK], rest[CHUNK];
    const Span span = span_at(spans, blockIdx.z);
    if (span.rows <= STEPS) return;
    const int head = (int)blockIdx.y, heads = (int)gridDim.y, thread = luce_thread();
    const int first_column = (int)blockIdx.x * COLUMNS;
    const Layout layout = {key_heads, heads};
    const i64 channels = layout.channels();
    memory += (((i64)span.slot * heads + head) * HEAD + first_column) * HEAD;

    using Rows = Product<CHUNK, COLUMNS, SUMS / 4>;
    using State = Product<COLUMNS, CHUNK, SUMS / 4, true>;
    State s[HALVES];
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
        for (int e = 0; e < SUMS; e++) {
            const int column = State::row(e), key = half * CHUNK + State::column(e);
            s[half][e] = span.position ? memory[column * HEAD + key] : 0.0f;
        }

    Square<CHUNK_THREADS> square;
    const float* k = c + span.start * channels + layout.vector(KEY, head);
    square.fetch(k, channels, luce_min(CHUNK, span.rows));
    for (int first = 0; first < span.rows; first += CHUNK) {
        const int rows = luce_min(CHUNK, span.rows - first);
        const i64 start = span.start + first;
        const float* q = c + start * channels + layout.vector(QUERY, head);
        const float* v = c + start * channels + layout.vector(VALUE, head) + first_column;
        k = c + start * channels + layout.vector(KEY, head);
        if (thread < CHUNK) {
            float row[4] = {};
            if (thread < rows) get4(row, gates + ((start + thread) * heads + head) * 4);
            rate[thread] = row[0], fade[thread] = row[1], rest[thread] = row[2];
        }
        const float whole = gates[(start * heads + head) * 4 + 3];
        float value[SUMS];
#pragma unroll
        for (int e = 0; e < SUMS; e++) {
            const int row = Rows::row(e), column = Rows::column(e);
            value[e] = row < rows ? v[row * channels + column] : 0.0f;
        }
#pragma unroll
        for (int half = 0; half < HALVES; half++)
#pragma unroll
            for (int e = 0; e < SUMS; e++)
                state[State::row(e) * STATE_PITCH + half * CHUNK + State::column(e)] = s[half][e];

        // Each square is fetched during the product with the one before it.
        Rows ks = {}, o = {}, solved = {};
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            square.put(tile);
            const int next = (half + 1) * CHUNK;
            square.fetch(next < HEAD ? k + next : q, channels, rows);
            ks.add<PITCH, STATE_PITCH>(tile, state + half * CHUNK);
        }
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            square.put(tile);
            const int next = (half + 1) * CHUNK;
            if (next < HEAD)
                square.fetch(q + next, channels, rows);
            else
                square.fetch(solve + (start * heads + head) * CHUNK, (i64)heads * CHUNK, rows);
            o.add<PITCH, STATE_PITCH>(tile, state + half * CHUNK);
        }
#pragma unroll
        for (int e = 0; e < SUMS; e++) {
            const int row = Rows::row(e);
            fresh[Rows::column(e) * PITCH + row] = rate[row] * (value[e] - fade[row] * ks[e]);
            o[e] *= fade[row];
        }
        square.put(tile);
        square.fetch(mix + (start * heads + head) * CHUNK, (i64)heads * CHUNK, rows);
        solved.add<PITCH, PITCH>(tile, fresh);
        luce_sync();
#pragma unroll
        for (int e = 0; e < SUMS; e++) fresh[Rows::column(e) * PITCH + Rows::row(e)] = solved[e];
        square.put(tile);
        square.fetch(k, channels, rows);
        o.add<PITCH, PITCH>(tile, fresh);
#pragma unroll
        for (int e = 0; e < SUMS; e++) {
            const int row = Rows::row(e), column = Rows::column(e);
            if (row < rows)
                out[((start + row) * heads + head) * HEAD + first_column + column] = o[e];
        }
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            square.put<DOWN_PITCH>(tile, rest);
            const int next = (half + 1) * CHUNK;
            if (next < HEAD)
                square.fetch(k + next, channels, rows);
            else
                square.fetch(k + CHUNK * channels, channels, luce_min(CHUNK, span.rows - first - CHUNK));
#pragma unroll
            for (int e = 0; e < SUMS; e++) s[half][e] *= whole;
            s[half].template add<PITCH, DOWN_PITCH>(fresh, tile);
        }
    }
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
        for (int e = 0; e < SUMS; e++) {
            const int column = State::row(e), key = half * CHUNK + State::column(e);
            memory[column * HEAD + key] = s[half][e];
        }
}
