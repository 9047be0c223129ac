// variants for cuda: HEAD=64,128
//
// What the chunks of long spans need and the state does not change, as delta_prepare of deltanet_chunk.cu, which has the
// formulas: T, M and the gates, as deltanet_wgmma.cu reads them. Only for targets on which four waves multiply together.
//
// K K^T and Q K^T are products of the images that delta_vectors left. T, the inverse of a triangle with ones on its diagonal,
// is made by blocks, for HEADS value heads at once: those of 16 rows on the diagonal by a thread for each column, then
// [[P, 0], [A, R]]^-1 = [[P^-1, 0], [-R^-1 A P^-1, R^-1]] for blocks of 32 and of 64.
#include "deltanet.h"
#include "deltanet_halves.h"
#include "bulk.h"
#include "products.h"

#define CHUNK 64
#define THREADS 256
// Value heads at once.
#define HEADS (THREADS / CHUNK)
#define PITCH (CHUNK + 4)
#define BLOCK 16
// Pairs of a row and a later block; those of block n are this one and on.
#define FAR (BLOCK * FIRST_FAR(CHUNK / BLOCK))
#define FIRST_FAR(n) ((n) * ((n) - 1) / 2)

// G as a sum of two floats: after rows of strong decay it reaches hundreds, where the steps between floats are as large as the
// differences between later rows that D needs.
struct Sum {
    float high, low;
};

LUCE_FN Sum operator+(const Sum& a, const Sum& b) {
    const float high = a.high + b.high, added = high - a.high;
    return {high, a.low + b.low + ((a.high - (high - added)) + (b.high - added))};
}

LUCE_FN Sum lane_of(const Sum& sum, int lane) { return {luce_shfl(sum.high, lane), luce_shfl(sum.low, lane)}; }

// e^(a - b)
LUCE_FN float fade_between(const Sum& a, const Sum& b) { return expf((a.high - b.high) + (a.low - b.low)); }

struct Shared {
    // The images of keys and queries, then A and T of each value head.
    union {
        alignas(1024) u8 vectors[2 * Images::VECTOR_BYTES];
        float squares[HEADS][CHUNK * PITCH];
    };
    Sum total[HEADS][CHUNK];
    float rate[HEADS][CHUNK];
    // D_ij = near_i far_j where i's block of BLOCK rows is behind j's: e^(G_i - G_b) and e^(G_b - G_j), b the block's first row.
    float near[HEADS][CHUNK], far[HEADS][FAR];
    u64 arrived;
};

// sum += left right of the summed elements from `first` up to `end`, ROWS x COLS sums of a lane, rows STEP apart.
template <int STEP = 1, int ROWS, int COLS>
LUCE_FN void add_product(float (&sum)[ROWS][COLS], const float* left, const float* right, int first, int end) {
#pragma unroll 2
    for (int k = first; k < end; k += 4) {
        float a[ROWS][4];
#pragma unroll
        for (int r = 0; r < ROWS; r++) get4(a[r], left + r * STEP * PITCH + k);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int c = 0; c < COLS; c += 4) {
                float b[4];
                get4(b, right + (k + i) * PITCH + c);
#pragma unroll
                for (int r = 0; r < ROWS; r++)
#pragma unroll
                    for (int n = 0; n < 4; n++) sum[r][c + n] = fmaf(a[r][i], b[n], sum[r][c + n]);
            }
    }
}

template <int STEP = 1, int ROWS, int COLS>
LUCE_FN void put_product(float* to, const float (&sum)[ROWS][COLS], float sign) {
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int c = 0; c < COLS; c += 4) {
            const float four[4] = {sign * sum[r][c], sign * sum[r][c + 1], sign * sum[r][c + 2], sign * sum[r][c + 3]};
            put4(to + r * STEP * PITCH + c, four);
        }
}

// squares: for each chunk and value head the images of T and M, and gates [CHUNK, 4] (beta_i, e^G_i, e^(G_last - G_i),
// e^G_last); of rows behind the span's too, which have no effect. Grid (chunks of the longest span, key heads by groups of HEADS
// of their value heads, spans), THREADS threads, a Shared of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    delta_prepare_wgmma(const float* __restrict__ x, const float* __restrict__ scales,
                        const float* __restrict__ sum_features, const float* __restrict__ decay,
                        const float* __restrict__ dt_bias, const i32* __restrict__ spans,
                        const u8* __restrict__ vectors, u8* __restrict__ squares, i64 stride, int key_heads, int heads) {
    luce_await();
#if LUCE_WGMMA
    LUCE_DYNAMIC_SHARED(Shared, shared);
    const Span span = span_at(spans, blockIdx.z);
    const int first = (int)blockIdx.x * CHUNK;
    if (span.rows <= STEPS || first >= span.rows) return;
    const int rows = luce_min(CHUNK, span.rows - first), thread = luce_thread(), lane = luce_lane();
    const i64 start = span.start + first;
    // The same for all lanes, as the compiler sees by the shuffle.
    const int wave = luce_shfl(luce_wave(), 0), key_head = (int)blockIdx.y % key_heads;
    const Layout layout = {key_heads, heads};
    const Images images = {key_heads, heads};
    const int image = Images::first(span.start, (int)blockIdx.z) + (int)blockIdx.x;
    const int reader = (int)blockIdx.y / key_heads * HEADS, count = luce_min(HEADS, heads / key_heads - reader);
    const auto head_of = [&](int own) { return key_head + (reader + own) * key_heads; };

    if (thread == 0) {
        luce_bulk_begin(&shared->arrived);
        luce_bulk_ready();
        luce_bulk_load(shared->vectors, vectors + images.vectors(image, key_head), 2 * Images::VECTOR_BYTES,
                       &shared->arrived);
    }
    // G and beta of HEADS value heads, a wave for each. A row behind the span has beta = g = 0, and no effect.
    if (const int own = wave % HEADS; own < count) {
        const int head = head_of(own);
        const bool fades = wave < HEADS;
        float value[CHUNK / LUCE_LANES];
#pragma unroll
        for (int n = 0; n < CHUNK / LUCE_LANES; n++) {
            const int row = lane + n * LUCE_LANES, feature = fades ? layout.alpha(head) : layout.beta(head);
            value[n] = row < rows ? product_at(x, scales, sum_features, start + row, stride, feature) : 0.0f;
        }
        if (!fades) {
#pragma unroll
            for (int n = 0; n < CHUNK / LUCE_LANES; n++) {
                const int row = lane + n * LUCE_LANES;
                shared->rate[own][row] = row < rows ? sigmoid(value[n]) : 0.0f;
            }
        }
        Sum before = {};
#pragma unroll
        for (int n = 0; n < CHUNK / LUCE_LANES && fades; n++) {
            const int row = lane + n * LUCE_LANES;
            Sum sum = {row < rows ? log_fade(value[n], decay[head], dt_bias[head]) : 0.0f, 0.0f};
#pragma unroll
            for (int step = 1; step < LUCE_LANES; step *= 2) {
                const Sum other = lane_of(sum, luce_max(lane - step, 0));
                if (lane >= step) sum = other + sum;
            }
            sum = before + sum;
            shared->total[own][row] = sum;
            before = lane_of(sum, LUCE_LANES - 1);
        }
    }
    if (wave == 0) {
        luce_sync_lanes();
        luce_bulk_wait(&shared->arrived, 0);
    }
    luce_sync();

    // K K^T by the first four waves, Q K^T by the others.
    const bool mixes = wave >= 4;
    float product[CHUNK / 8][4] = {};
    {
        const u8 *keys = shared->vectors, *own = keys + (mixes ? Images::VECTOR_BYTES : 0);
        constexpr int lower = Images::HALVES * SQUARE;
        luce_wgmma_hold(product);
        luce_wgmma_fence();
#pragma unroll
        for (int k = 0; k < HEAD / 16; k++) {
            const int at = k / 4 * SQUARE + k % 4 * 32;
            luce_wgmma<f16_t>(product, own + lower + at, keys + at);
            luce_wgmma<f16_t>(product, own + at, keys + lower + at);
            luce_wgmma<f16_t>(product, own + at, keys + at);
        }
        luce_wgmma_close();
    }
    const int own = thread / CHUNK, own_row = thread % CHUNK;
    if (own < count) {
        const Sum* const total = shared->total[own];
        const Sum sum = total[own_row], last = total[CHUNK - 1];
        const float gates[4] = {shared->rate[own][own_row], expf(sum.high + sum.low), fade_between(last, sum),
                                expf(last.high + last.low)};
        u8* to = squares + images.squares(image, head_of(own)) + 2 * Images::SQUARE_BYTES;
        put4(reinterpret_cast<float*>(to) + own_row * 4, gates);
        const int own_block = own_row / BLOCK;
        shared->near[own][own_row] = fade_between(sum, total[own_block * BLOCK]);
#pragma unroll
        for (int block = 1; block < CHUNK / BLOCK; block++)
            if (block > own_block)
                shared->far[own][FIRST_FAR(block) * BLOCK + own_row] = fade_between(total[block * BLOCK], sum);
    }
    luce_wgmma_wait<0>();
    luce_wgmma_hold(product);
    luce_sync();  // the images have been read
    // A to shared memory and M to its image.
    constexpr float back = 1.0f / (IMAGE_SCALE * IMAGE_SCALE);
    const int block = wave % 4, row0 = block * BLOCK + lane / 4, t = lane % 4 * 2;
#pragma unroll 1
    for (int other = 0; other < count; other++) {
        const float* const far = shared->far[other] + FIRST_FAR(block) * BLOCK + t;
        const Sum* const total = shared->total[other];
        float near[2], rate[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            near[r] = back * shared->near[other][row0 + r * 8];
            rate[r] = mixes ? 1.0f : shared->rate[other][row0 + r * 8];
        }
        float* const a = shared->squares[other] + row0 * PITCH + t;
        u8* const mix = squares + images.squares(image, head_of(other)) + Images::SQUARE_BYTES;
        const u32 at = in_square(row0, t);
#pragma unroll
        for (int i = 0; i < CHUNK / 8; i++) {
            float pair[2][2] = {};
            if (i < block * 2) {
#pragma unroll
                for (int r = 0; r < 2; r++)
#pragma unroll
                    for (int e = 0; e < 2; e++) pair[r][e] = near[r] * far[i * 8 + e];
            } else if (i < block * 2 + 2) {
#pragma unroll
                for (int r = 0; r < 2; r++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const int row = row0 + r * 8, column = i * 8 + t + e;
                        const float fade = fade_between(total[row], total[column]);
                        pair[r][e] = column < row + (int)mixes ? back * fade : 0.0f;
                    }
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
#pragma unroll
                for (int e = 0; e < 2; e++) pair[r][e] *= rate[r] * product[i][2 * r + e];
                if (mixes)
                    put_parts(mix + (at ^ i * 16) + r * 1024, SQUARE, pair[r]);
                else
                    *reinterpret_cast<float2*>(a + r * 8 * PITCH + i * 8) = {pair[r][0], pair[r][1]};
            }
        }
    }
    luce_sync();
    float* const square = shared->squares[own];
    // No entry of T exceeds 1: up to beta, it is k_i P k_j with P a product of contractions I - beta k k^T.
    if (own < count) {
        // A wave has two blocks of the diagonal, and a thread a column of one.
        const int column = own_row % BLOCK, block = own_row / BLOCK * BLOCK;
        float* const diagonal = square + block * (PITCH + 1);
        float solved[BLOCK];
#pragma unroll
        for (int r = 0; r < BLOCK; r++) {
            solved[r] = r == column ? 1.0f : 0.0f;
#pragma unroll
            for (int l = 0; l < r; l += 4) {
                float a[4];
                get4(a, diagonal + r * PITCH + l);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (l + i < r) solved[r] = fmaf(-a[i], solved[l + i], solved[r]);
            }
        }
        luce_sync_lanes();
#pragma unroll
        for (int r = 0; r < BLOCK; r++) diagonal[r * PITCH + column] = solved[r];
        luce_sync_lanes();
        // The 16 x 16 below them.
        float* const upper = square + (block / (2 * BLOCK) * 2 * BLOCK) * (PITCH + 1);
        float *const corner = upper + BLOCK * PITCH, *const lower = corner + BLOCK;
        const int at_row = lane / 2 * PITCH, at_column = lane % 2 * 8;
        float sum[1][8] = {};
        add_product(sum, corner + at_row, upper + at_column, 0, BLOCK);
        luce_sync_lanes();
        put_product(corner + at_row + at_column, sum, 1.0f);
        luce_sync_lanes();
        float next[1][8] = {};
        add_product(next, lower + at_row, corner + at_column, 0, BLOCK);
        luce_sync_lanes();
        put_product(corner + at_row + at_column, next, -1.0f);
    }
    luce_sync();
    // The 32 x 32 below them; A P^-1 takes the place above the diagonal. Of each triangle a wave leaves out 16 x 16 zeros.
    const bool second = own_row >= LUCE_LANES;
    float* const corner = square + 2 * BLOCK * PITCH;
    if (own < count) {
        const int at_row = own_row % 8 * PITCH, at_column = own_row / 8 * 4;
        float sum[4][4] = {};
        add_product<8>(sum, corner + at_row, square + at_column, second ? BLOCK : 0, 2 * BLOCK);
        put_product<8>(square + 2 * BLOCK + at_row + at_column, sum, 1.0f);
    }
    luce_sync();
    if (own < count) {
        const int at_row = own_row / 8 * 4 * PITCH, at_column = own_row % 8 * 4;
        float sum[4][4] = {};
        add_product(sum, corner + 2 * BLOCK + at_row, square + 2 * BLOCK + at_column, 0, second ? 2 * BLOCK : BLOCK);
        put_product(corner + at_row + at_column, sum, -1.0f);
    }
    luce_release();
    luce_sync();
#pragma unroll 1
    for (int i = thread; i < count * (CHUNK * CHUNK / 8); i += THREADS) {
        const int other = i / (CHUNK * CHUNK / 8), row = i / (CHUNK / 8) % CHUNK, column = i % (CHUNK / 8) * 8;
        float v[8];
        const float* from = shared->squares[other] + row * PITCH + column;
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] = column + e <= row ? from[e] : 0.0f;
        put_parts(squares + images.squares(image, head_of(other)) + in_square(row, column), SQUARE, v);
    }
#endif
}
