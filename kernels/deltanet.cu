// variants: TAPS=2,3,4
// variants: HEAD=16,32,64,80,128,192,256
//
// The causal convolution (TAPS: its kernel's width) and the gated delta rule (HEAD: elements of a key and of a value),
// float32 throughout. A span is four int32: slot, first row, rows, position of its first row.
//
// The rule's state S [HEAD, HEAD] of a value head has a column per value element, and columns never mix: each is
// handled by one block alone, which reads it once, keeps it on the chip over the span's rows and writes it back.
//   - delta_recurrent takes the spans of up to STEPS rows, row by row. A row's arithmetic is the same in any of them,
//     so its bits do not depend on how many rows are given at a time.
//   - delta_prepare and delta_chunks take the longer spans in chunks of CHUNK rows, counted from the span's first row.
// Both choose by the span's own length, so no span's bits depend on what else is in the step.
#include "reduce.h"

struct Span {
    i32 slot, start, rows, position;
};

LUCE_FN Span span_at(const i32* __restrict__ spans, int index) {
    const i32* span = spans + 4 * (i64)index;
    return {span[0], span[1], span[2], span[3]};
}

#if defined(TAPS)

// Rows that one thread takes; at least TAPS - 1, so that only a span's first tile reaches back into the state.
#define TILE 16

// out[row] = silu(sum over tap of weight[tap] * m[row - (TAPS - 1) + tap]), one thread per channel and tile of a span;
// grid (channels / block, tiles of the longest span, spans). m float32 [rows, channels] with `stride` elements from row
// to row, weight [channels, TAPS], state [slots, TAPS - 1, channels], out [rows, channels].
extern "C" __global__ void conv_silu(const float* __restrict__ m, const float* __restrict__ weight, float* state,
                                     const i32* __restrict__ spans, float* __restrict__ out, i64 stride, int channels) {
    const Span span = span_at(spans, blockIdx.z);
    const int first = (int)blockIdx.y * TILE;
    const int channel = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (first >= span.rows || channel >= channels) return;
    float* past = state + (i64)span.slot * (TAPS - 1) * channels + channel;
    m += span.start * stride + channel;
    out += (i64)span.start * channels + channel;

    float taps[TAPS], window[TAPS];
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) taps[tap] = weight[(i64)channel * TAPS + tap];
#pragma unroll
    for (int tap = 0; tap < TAPS - 1; tap++) {
        if (first)
            window[tap] = m[(first - (TAPS - 1) + tap) * stride];
        else
            window[tap] = span.position ? past[(i64)tap * channels] : 0.0f;
    }
    // The thread that read the state writes the new one, from m itself: the span's last tile may run at any time. A
    // span shorter than the state keeps its end; upwards, so that a kept row is read before it is overwritten.
    if (!first) {
        for (int tap = 0; tap < TAPS - 1; tap++) {
            const int row = span.rows - (TAPS - 1) + tap;
            float kept = 0.0f;
            if (row >= 0)
                kept = m[row * stride];
            else if (span.position)
                kept = past[(i64)(tap + span.rows) * channels];
            past[(i64)tap * channels] = kept;
        }
    }
    const int end = luce_min(first + TILE, span.rows);
    for (int row = first; row < end; row++) {
        window[TAPS - 1] = m[row * stride];
        float sum = 0.0f;
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++) sum = fmaf(window[tap], taps[tap], sum);
        out[(i64)row * channels] = sum / (1.0f + expf(-sum));
#pragma unroll
        for (int tap = 0; tap < TAPS - 1; tap++) window[tap] = window[tap + 1];
    }
}

#endif
#if defined(HEAD)

// The longest span that goes row by row (RECURRENT_ROWS of luce/ops/deltanet.py).
#define STEPS 16
#define CHUNK 64

// Adjacent lanes that share a column of the state; of every 4 * PARTS rows, a part has 4 neighbouring ones.
#define PARTS 4
#define STEP_COLUMNS 32
#define STEP_ROWS ((HEAD + 15) / 16 * 16)

// Columns of a block of delta_chunks: with them, its slice of the state takes at most 16 KiB of shared memory.
#define COLUMNS (HEAD > 128 ? 16 : 32)
#define STATE_ROWS ((HEAD + CHUNK - 1) / CHUNK * CHUNK)
// Elements of q and k that are in shared memory at once, transposed. PITCH: 16-byte aligned, and writes from 8 elements
// times 4 rows meet 32 different banks.
#define SLICE 32
#define SLICES ((HEAD + SLICE - 1) / SLICE)
#define PITCH (CHUNK + 4)

// What delta_prepare leaves for each row and value head, beside its matrices.
enum { Q_SCALE, K_SCALE, RATE, FADE, REST, WHOLE, SCALARS };

LUCE_FN float4 load4(const float* from) { return *reinterpret_cast<const float4*>(from); }
LUCE_FN void store4(float* to, const float (&value)[4]) {
    *reinterpret_cast<float4*>(to) = {value[0], value[1], value[2], value[3]};
}
LUCE_FN void get4(float (&to)[4], const float* from) {
    const float4 four = load4(from);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

// sum[r][c] += a[r] * b[c]
LUCE_FN void outer(float (&sum)[4][4], const float (&a)[4], const float (&b)[4]) {
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) sum[r][c] = fmaf(a[r], b[c], sum[r][c]);
}

// ln of what a row multiplies the state by.
LUCE_FN float log_fade(float alpha, float decay, float dt_bias) {
    const float x = alpha + dt_bias;
    return decay * (x > 20.0f ? x : log1pf(expf(x)));
}
LUCE_FN float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// 1 / sqrt(sum x^2 + 1e-6), in all lanes of the wave.
LUCE_FN float inverse_norm(const float* __restrict__ x) {
    float sum = 0.0f;
    for (int i = luce_lane(); i < HEAD; i += LUCE_LANES) sum = fmaf(x[i], x[i], sum);
    return 1.0f / sqrtf(luce_lane_sum(sum) + 1e-6f);
}

#define SOFT_SCALE (1.0f / sqrtf((float)HEAD))

// Spans of up to STEPS rows; grid (HEAD / STEP_COLUMNS, value heads, spans), PARTS * STEP_COLUMNS threads.
// c [rows, (2 key_heads + value_heads) HEAD]; alpha, beta [rows, value_heads] with strides; state [slots, value_heads,
// HEAD, HEAD]; out [rows, value_heads, HEAD].
extern "C" __global__ void __launch_bounds__(PARTS* STEP_COLUMNS)
    delta_recurrent(const float* __restrict__ c, const float* __restrict__ alpha, const float* __restrict__ beta,
                    const float* __restrict__ decay, const float* __restrict__ dt_bias, float* __restrict__ state,
                    const i32* __restrict__ spans, float* __restrict__ out, i64 alpha_stride, i64 beta_stride,
                    int key_heads) {
    __shared__ __align__(16) float q[STEPS][STEP_ROWS];
    __shared__ __align__(16) float k[STEPS][STEP_ROWS];
    __shared__ float v[STEPS][STEP_COLUMNS];
    __shared__ float fade[STEPS], rate[STEPS];
    const Span span = span_at(spans, blockIdx.z);
    if (span.rows > STEPS) return;
    const int head = (int)blockIdx.y, heads = (int)gridDim.y, key_head = head % key_heads;
    const int thread = luce_thread(), first_column = (int)blockIdx.x * STEP_COLUMNS;
    const i64 width = (i64)(2 * key_heads + heads) * HEAD;
    c += span.start * width;

    const int part = thread % PARTS, column = first_column + thread / PARTS;
    const bool live = column < HEAD;
    float* memory = state + ((i64)span.slot * heads + head) * HEAD * HEAD + column;
    float s[STEP_ROWS / (4 * PARTS)][4];
#pragma unroll
    for (int r = 0; r < STEP_ROWS / (4 * PARTS); r++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int row = (r * PARTS + part) * 4 + e;
            s[r][e] = live && row < HEAD && span.position ? memory[row * HEAD] : 0.0f;
        }

    for (int vector = luce_wave(); vector < 2 * span.rows; vector += PARTS * STEP_COLUMNS / LUCE_LANES) {
        const int row = vector / 2;
        const bool key = vector % 2;
        const float* from = c + row * width + (i64)(key ? key_heads + key_head : key_head) * HEAD;
        float* to = key ? k[row] : q[row];
        const float scale = inverse_norm(from) * (key ? 1.0f : SOFT_SCALE);
        for (int i = luce_lane(); i < STEP_ROWS; i += LUCE_LANES) to[i] = i < HEAD ? from[i] * scale : 0.0f;
    }
    for (int i = thread; i < span.rows * STEP_COLUMNS; i += PARTS * STEP_COLUMNS) {
        const int row = i / STEP_COLUMNS, at = first_column + i % STEP_COLUMNS;
        v[row][i % STEP_COLUMNS] = at < HEAD ? c[row * width + (i64)(2 * key_heads + head) * HEAD + at] : 0.0f;
    }
    if (thread < span.rows) {
        const i64 row = span.start + thread;
        fade[thread] = expf(log_fade(alpha[row * alpha_stride + head], decay[head], dt_bias[head]));
        rate[thread] = sigmoid(beta[row * beta_stride + head]);
    }
    luce_sync();

    for (int row = 0; row < span.rows; row++) {
        float sum[4] = {};
#pragma unroll
        for (int r = 0; r < STEP_ROWS / (4 * PARTS); r++) {
            float key[4];
            get4(key, &k[row][(r * PARTS + part) * 4]);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[r][e] *= fade[row];
                sum[e] = fmaf(s[r][e], key[e], sum[e]);
            }
        }
        const float seen = luce_lane_sum<PARTS>((sum[0] + sum[1]) + (sum[2] + sum[3]));
        const float u = rate[row] * (v[row][thread / PARTS] - seen);
        float answer[4] = {};
#pragma unroll
        for (int r = 0; r < STEP_ROWS / (4 * PARTS); r++) {
            float key[4], query[4];
            get4(key, &k[row][(r * PARTS + part) * 4]);
            get4(query, &q[row][(r * PARTS + part) * 4]);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[r][e] = fmaf(key[e], u, s[r][e]);
                answer[e] = fmaf(s[r][e], query[e], answer[e]);
            }
        }
        const float o = luce_lane_sum<PARTS>((answer[0] + answer[1]) + (answer[2] + answer[3]));
        if (live && part == 0) out[((i64)(span.start + row) * heads + head) * HEAD + column] = o;
    }
#pragma unroll
    for (int r = 0; r < STEP_ROWS / (4 * PARTS); r++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int row = (r * PARTS + part) * 4 + e;
            if (live && row < HEAD) memory[row * HEAD] = s[r][e];
        }
}

// to[element][row] = from[row][slice + element] * scale[row], zeros outside of the chunk and of the head; from has
// `width` elements from row to row. All threads of the block, THREADS of them.
template <int THREADS>
LUCE_FN void load_transposed(float* to, const float* __restrict__ from, i64 width, const float* scale, int rows,
                             int slice) {
    for (int i = luce_thread(); i < CHUNK * SLICE; i += THREADS) {
        // 32 neighbours are 8 elements of 4 rows: whole 32-byte sectors to read, and different banks to write.
        const int element = i % 8 + i / 32 % 4 * 8;
        const int row = i / 8 % 4 + i / 128 * 4;
        const bool there = row < rows && slice + element < HEAD;
        to[element * PITCH + row] = there ? from[row * width + slice + element] * scale[row] : 0.0f;
    }
}

#define PREPARE_THREADS 256

// For each chunk and value head of the spans of more than STEPS rows, with unit keys k and scaled unit queries q,
// G_i = sum of g up to row i and D_ij = e^(G_i - G_j):
//   solve[j][i] = T_ij, T = (I + A)^-1, A_ij = beta_i (k_i . k_j) D_ij for j < i
//   mix[j][i]   = (q_i . k_j) D_ij for j <= i, else 0
// (rows j of the chunk, transposed for delta_chunks) and the rows' scalars. Grid (chunks of the longest span, value
// heads, spans), PREPARE_THREADS threads. scalars [rows, value_heads, SCALARS]; solve, mix [rows, value_heads, CHUNK].
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS)
    delta_prepare(const float* __restrict__ c, const float* __restrict__ alpha, const float* __restrict__ beta,
                  const float* __restrict__ decay, const float* __restrict__ dt_bias, const i32* __restrict__ spans,
                  float* __restrict__ scalars, float* __restrict__ solve, float* __restrict__ mix, i64 alpha_stride,
                  i64 beta_stride, int key_heads) {
    // Slices of k and q, then A.
    __shared__ __align__(16) float tile[2 * SLICE * PITCH];
    __shared__ __align__(16) float inverse[CHUNK * PITCH];
    __shared__ float q_scale[CHUNK], k_scale[CHUNK], rate[CHUNK], g[CHUNK], total[CHUNK], error[CHUNK];
    const Span span = span_at(spans, blockIdx.z);
    const int first = (int)blockIdx.x * CHUNK;
    if (span.rows <= STEPS || first >= span.rows) return;
    const int rows = luce_min(CHUNK, span.rows - first);
    const i64 start = span.start + first;
    const int head = (int)blockIdx.y, heads = (int)gridDim.y, key_head = head % key_heads, thread = luce_thread();
    const i64 width = (i64)(2 * key_heads + heads) * HEAD;
    const float* q = c + start * width + (i64)key_head * HEAD;
    const float* k = q + (i64)key_heads * HEAD;

    // A row past the chunk's end has beta = g = 0: it changes nothing.
    if (thread < CHUNK) {
        const i64 row = start + thread;
        const bool there = thread < rows;
        g[thread] = there ? log_fade(alpha[row * alpha_stride + head], decay[head], dt_bias[head]) : 0.0f;
        rate[thread] = there ? sigmoid(beta[row * beta_stride + head]) : 0.0f;
    }
    for (int vector = luce_wave(); vector < 2 * rows; vector += PREPARE_THREADS / LUCE_LANES) {
        const int row = vector / 2;
        const bool key = vector % 2;
        const float scale = inverse_norm((key ? k : q) + row * width);
        if (luce_lane() == 0) (key ? k_scale : q_scale)[row] = key ? scale : scale * SOFT_SCALE;
    }
    luce_sync();
    // G as a sum of two floats: after rows of strong decay it is in the hundreds, where the steps between floats are as
    // large as the differences between later rows that D is made of.
    if (thread < CHUNK) {
        float sum = 0.0f, rest = 0.0f;
        for (int row = 0; row <= thread; row++) {
            const float next = sum + g[row], added = next - sum;
            rest += (sum - (next - added)) + (g[row] - added);
            sum = next;
        }
        total[thread] = sum;
        error[thread] = rest;
    }
    luce_sync();
    if (thread < rows) {
        float* to = scalars + ((start + thread) * heads + head) * SCALARS;
        to[Q_SCALE] = q_scale[thread];
        to[K_SCALE] = k_scale[thread];
        to[RATE] = rate[thread];
        to[FADE] = expf(total[thread] + error[thread]);
        to[REST] = expf((total[CHUNK - 1] - total[thread]) + (error[CHUNK - 1] - error[thread]));
        to[WHOLE] = expf(total[CHUNK - 1] + error[CHUNK - 1]);
    }

    const int row0 = thread % 16 * 4, column0 = thread / 16 * 4;
    float kk[4][4] = {}, qk[4][4] = {};
    for (int slice = 0; slice < HEAD; slice += SLICE) {
        load_transposed<PREPARE_THREADS>(tile, k, width, k_scale, rows, slice);
        load_transposed<PREPARE_THREADS>(tile + SLICE * PITCH, q, width, q_scale, rows, slice);
        luce_sync();
        if (column0 <= row0) {
#pragma unroll 8
            for (int i = 0; i < SLICE; i++) {
                float key[4], query[4], other[4];
                get4(key, tile + i * PITCH + row0);
                get4(query, tile + (SLICE + i) * PITCH + row0);
                get4(other, tile + i * PITCH + column0);
                outer(kk, key, other);
                outer(qk, query, other);
            }
        }
        luce_sync();
    }
    float* a = tile;
#pragma unroll
    for (int x = 0; x < 4; x++) {
        const int column = column0 + x;
        float mixed[4];
#pragma unroll
        for (int y = 0; y < 4; y++) {
            const int row = row0 + y;
            float between = 0.0f;
            if (column <= row) between = expf((total[row] - total[column]) + (error[row] - error[column]));
            mixed[y] = qk[y][x] * between;
            a[row * PITCH + column] = column < row ? rate[row] * kk[y][x] * between : 0.0f;
        }
        if (column < rows) store4(mix + ((start + column) * heads + head) * CHUNK + row0, mixed);
    }
    luce_sync();

    // Forward substitution, a column of T by PARTS adjacent lanes: T_ij = -sum over j <= l < i of A_il T_lj. No entry
    // of T exceeds 1: up to beta, it is k_i P k_j with P a product of contractions I - beta k k^T.
    static_assert(PREPARE_THREADS == PARTS * CHUNK, "a thread has one part of one column");
    const int column = thread / PARTS, part = thread % PARTS;
    float* solved = inverse + column * PITCH;
    for (int row = 0; row < CHUNK; row++) {
        float sum = 0.0f;
        for (int l = column / PARTS * PARTS + part; l < row; l += PARTS) sum = fmaf(a[row * PITCH + l], solved[l], sum);
        sum = luce_lane_sum<PARTS>(sum);
        if (part == 0) solved[row] = row == column ? 1.0f : row > column ? -sum : 0.0f;
        luce_sync_lanes();
    }
    luce_sync();
    for (int i = thread; i < rows * CHUNK; i += PREPARE_THREADS)
        solve[((start + i / CHUNK) * heads + head) * CHUNK + i % CHUNK] = inverse[i / CHUNK * PITCH + i % CHUNK];
}

#define CHUNK_THREADS (CHUNK / 4 * COLUMNS / 4)

// to[row][0..63] = from[row][0..63] of a chunk's solve or mix, zeros past the chunk's end.
LUCE_FN void load_square(float* to, const float* __restrict__ from, i64 stride, int rows) {
    for (int i = luce_thread(); i < CHUNK * CHUNK; i += CHUNK_THREADS)
        to[i / CHUNK * PITCH + i % CHUNK] = i / CHUNK < rows ? from[i / CHUNK * stride + i % CHUNK] : 0.0f;
}

// sum[r][c] += sum over j <= row0 + r of square[j][row0 + r] * columns[j][c]: what is above the diagonal is zero.
LUCE_FN void triangle(float (&sum)[4][4], const float* square, const float* columns, int row0) {
    for (int j0 = 0; j0 <= row0; j0 += 4)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float a[4], b[4];
            get4(a, square + (j0 + j) * PITCH + row0);
            get4(b, columns + (j0 + j) * COLUMNS);
            outer(sum, a, b);
        }
}

// The spans of more than STEPS rows, after delta_prepare. With the state S before a chunk, k, q, T as there, M = mix:
//   V' = T (beta (V - e^G (K S))),   O = e^G (Q S) + M V',   S <- e^G_last S + (e^(G_last - G) K)^T V'
// Grid (HEAD / COLUMNS, value heads, spans), CHUNK_THREADS threads, each with 4 rows times 4 columns of every product.
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS)
    delta_chunks(const float* __restrict__ c, float* __restrict__ state, const i32* __restrict__ spans,
                 const float* __restrict__ scalars, const float* __restrict__ solve, const float* __restrict__ mix,
                 float* __restrict__ out, int key_heads) {
    __shared__ __align__(16) float s[STATE_ROWS][COLUMNS];
    __shared__ __align__(16) float fresh[CHUNK][COLUMNS];
    // Slices of k and q, a square of solve or mix, rows of k: one after the other.
    __shared__ __align__(16) float tile[CHUNK * PITCH];
    __shared__ float scalar[SCALARS][CHUNK];
    const Span span = span_at(spans, blockIdx.z);
    if (span.rows <= STEPS) return;
    const int head = (int)blockIdx.y, heads = (int)gridDim.y, key_head = head % key_heads, thread = luce_thread();
    const int first_column = (int)blockIdx.x * COLUMNS;
    const i64 width = (i64)(2 * key_heads + heads) * HEAD;
    float* memory = state + ((i64)span.slot * heads + head) * HEAD * HEAD + first_column;
    for (int i = thread; i < STATE_ROWS * COLUMNS; i += CHUNK_THREADS) {
        const int row = i / COLUMNS, column = i % COLUMNS;
        const bool there = row < HEAD && first_column + column < HEAD && span.position;
        s[row][column] = there ? memory[row * HEAD + column] : 0.0f;
    }

    const int row0 = thread / (COLUMNS / 4) * 4, column0 = thread % (COLUMNS / 4) * 4;
    for (int first = 0; first < span.rows; first += CHUNK) {
        const int rows = luce_min(CHUNK, span.rows - first);
        const i64 start = span.start + first;
        const float* q = c + start * width + (i64)key_head * HEAD;
        const float* k = q + (i64)key_heads * HEAD;
        const float* v = c + start * width + (i64)(2 * key_heads + head) * HEAD + first_column;
        for (int i = thread; i < CHUNK * SCALARS; i += CHUNK_THREADS)
            scalar[i % SCALARS][i / SCALARS] =
                i / SCALARS < rows ? scalars[((start + i / SCALARS) * heads + head) * SCALARS + i % SCALARS] : 0.0f;
        luce_sync();

        float ks[4][4] = {}, o[4][4] = {};
        for (int slice = 0; slice < HEAD; slice += SLICE) {
            load_transposed<CHUNK_THREADS>(tile, k, width, scalar[K_SCALE], rows, slice);
            load_transposed<CHUNK_THREADS>(tile + SLICE * PITCH, q, width, scalar[Q_SCALE], rows, slice);
            luce_sync();
#pragma unroll 8
            for (int i = 0; i < SLICE; i++) {
                float key[4], query[4], column[4];
                get4(key, tile + i * PITCH + row0);
                get4(query, tile + (SLICE + i) * PITCH + row0);
                get4(column, &s[slice + i][column0]);
                outer(ks, key, column);
                outer(o, query, column);
            }
            luce_sync();
        }
#pragma unroll
        for (int y = 0; y < 4; y++) {
            const int row = row0 + y;
            float target[4];
#pragma unroll
            for (int x = 0; x < 4; x++) {
                const bool there = row < rows && first_column + column0 + x < HEAD;
                const float value = there ? v[row * width + column0 + x] : 0.0f;
                target[x] = scalar[RATE][row] * (value - scalar[FADE][row] * ks[y][x]);
                o[y][x] *= scalar[FADE][row];
            }
            store4(&fresh[row][column0], target);
        }
        load_square(tile, solve + (start * heads + head) * CHUNK, (i64)heads * CHUNK, rows);
        luce_sync();
        float solved[4][4] = {};
        triangle(solved, tile, &fresh[0][column0], row0);
        luce_sync();
#pragma unroll
        for (int y = 0; y < 4; y++) store4(&fresh[row0 + y][column0], solved[y]);
        load_square(tile, mix + (start * heads + head) * CHUNK, (i64)heads * CHUNK, rows);
        luce_sync();
        triangle(o, tile, &fresh[0][column0], row0);
#pragma unroll
        for (int y = 0; y < 4; y++)
#pragma unroll
            for (int x = 0; x < 4; x++)
                if (row0 + y < rows && first_column + column0 + x < HEAD)
                    out[((start + row0 + y) * heads + head) * HEAD + first_column + column0 + x] = o[y][x];

        const float whole = scalar[WHOLE][0];
        for (int slice = 0; slice < STATE_ROWS; slice += CHUNK) {
            luce_sync();
            for (int i = thread; i < CHUNK * CHUNK; i += CHUNK_THREADS) {
                const int row = i / CHUNK, element = i % CHUNK;
                const bool there = row < rows && slice + element < HEAD;
                tile[row * PITCH + element] =
                    there ? k[row * width + slice + element] * scalar[K_SCALE][row] * scalar[REST][row] : 0.0f;
            }
            luce_sync();
            float next[4][4];
#pragma unroll
            for (int y = 0; y < 4; y++) {
                get4(next[y], &s[slice + row0 + y][column0]);
#pragma unroll
                for (int x = 0; x < 4; x++) next[y][x] *= whole;
            }
#pragma unroll 8
            for (int j = 0; j < CHUNK; j++) {
                float key[4], value[4];
                get4(key, tile + j * PITCH + row0);
                get4(value, &fresh[j][column0]);
                outer(next, key, value);
            }
#pragma unroll
            for (int y = 0; y < 4; y++) store4(&s[slice + row0 + y][column0], next[y]);
        }
        luce_sync();
    }
    for (int i = thread; i < STATE_ROWS * COLUMNS; i += CHUNK_THREADS) {
        const int row = i / COLUMNS, column = i % COLUMNS;
        if (row < HEAD && first_column + column < HEAD) memory[row * HEAD + column] = s[row][column];
    }
}

#endif
