// variants: KTYPE=F16
// Which blocks of keys the rows of a long text read: FlashPrefill (arXiv 2603.06199). A block is BLOCK keys, or BLOCK
// rows. The attention itself is that of attention_mma.cu or attention.cu, over the pages that are listed here.
#include "kv.h"
#include "mma.h"

#define BLOCK 128
#define PAGE 64
// Key blocks of a thread block of block_scores, and threads.
#define KEYS 32
#define THREADS 256
// Columns of a head in shared memory at a time.
#if LUCE_MMA_F16
#define CHUNK 64
#else
#define CHUNK 32
#endif

// to[row, head] = from[row, head], `words` of 16 bits each; strides in such words. Grid: rows, heads, parts of a head.
extern "C" __global__ void copy_heads(u8* __restrict__ to, const i64 to_row, const i64 to_head,
                                      const u8* __restrict__ from, const i64 from_row, const i64 from_head,
                                      const int words) {
    const int i = (int)(blockIdx.z * blockDim.x + threadIdx.x);
    const i64 at = blockIdx.x * from_row + blockIdx.y * from_head + i;
    const i64 place = blockIdx.x * to_row + blockIdx.y * to_head + i;
    luce_release();
    luce_await();
    if (i < words) reinterpret_cast<u16*>(to)[place] = reinterpret_cast<const u16*>(from)[at];
}

// means[head, n], float32 [d]: the mean of the keys of block n, for the blocks from `first` on. keys [heads, rows, d],
// `rows` a multiple of BLOCK, means [heads, rows / BLOCK, d]. Grid: blocks, heads; threads have pairs of columns.
extern "C" __global__ void block_means(const KTYPE::Element* __restrict__ keys, float* __restrict__ means,
                                       const int first, const int rows, const int d) {
    const int n = first + (int)blockIdx.x;
    const i64 head = blockIdx.y;
    luce_release();
    luce_await();
    for (int column = 2 * luce_thread(); column < d; column += 2 * luce_threads()) {
        float sums[2] = {};
        for (int row = 0; row < BLOCK; row++) {
            float even, odd;
            const i64 at = (head * rows + n * BLOCK + row) * d + column;
            KTYPE::split(KTYPE::load(keys + KTYPE::offset(at), column), even, odd);
            sums[0] += even;
            sums[1] += odd;
        }
        float* to = means + (head * (rows / BLOCK) + n) * d + column;
        to[0] = sums[0] / BLOCK;
        to[1] = sums[1] / BLOCK;
    }
}

#if LUCE_MMA_F16

// A wave has 16 rows and all keys of the block; products of fp16 tiles.
#define GROUPS (THREADS / LUCE_LANES)
static_assert(GROUPS * 16 == BLOCK, "a wave has 16 rows");
// Rows of 16-bit numbers, padded so that the rows of a matrix lie in different banks.
#define STRIDE (CHUNK + 8)

struct Shared {
    alignas(16) u16 q[BLOCK][STRIDE];
    alignas(16) u16 mean[KEYS][STRIDE];
    float part[GROUPS][KEYS];
    float top[KEYS];
};

struct Sums {
    float value[KEYS / 8][4];
};

LUCE_FN void put(u16 (&row)[STRIDE], int column, float value) { row[column] = luce_f16(value).bits; }

LUCE_FN void multiply(const Shared& shared, Sums& sums) {
    const int lane = luce_lane(), row = luce_wave() * 16 + lane % 16;
#pragma unroll
    for (int step = 0; step < CHUNK / 16; step++) {
        u32 q[4];
        luce_ldmatrix(q, &shared.q[row][step * 16 + lane / 16 * 8]);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n += 2) {
            u32 k[4];
            luce_ldmatrix(k, &shared.mean[n * 8 + lane % 8 + lane / 16 * 8][step * 16 + lane / 8 % 2 * 8]);
            const u32 columns[2][2] = {{k[0], k[1]}, {k[2], k[3]}};
            luce_mma_f16(sums.value[n], q, columns[0]);
            luce_mma_f16(sums.value[n + 1], q, columns[1]);
        }
    }
}

// The largest value of each key in the wave's rows, to part; then the sum of exp(value - top).
LUCE_FN void reduce_rows(Shared& shared, const Sums& sums, bool exponentials) {
    const int lane = luce_lane();
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int key = n * 8 + lane % 4 * 2 + e;
            const float a = sums.value[n][e], b = sums.value[n][e + 2];
            float value;
            if (exponentials) {
                value = expf(a - shared.top[key]) + expf(b - shared.top[key]);
                for (int mask = 4; mask < 32; mask *= 2) value += luce_shfl_xor(value, mask);
            } else {
                value = fmaxf(a, b);
                for (int mask = 4; mask < 32; mask *= 2) value = fmaxf(value, luce_shfl_xor(value, mask));
            }
            if (lane < 4) shared.part[luce_wave()][key] = value;
        }
}

#else

// A thread has ROWS rows and COLUMNS keys: key thread % 8 + 8 j, row thread / 8 + 32 i.
#define GROUPS (THREADS / 8)
#define ROWS (BLOCK / GROUPS)
#define COLUMNS (KEYS / 8)
#define STRIDE (CHUNK + 1)

struct Shared {
    float q[BLOCK][STRIDE];
    float mean[KEYS][STRIDE];
    float part[GROUPS][KEYS];
    float top[KEYS];
};

struct Sums {
    float value[ROWS][COLUMNS];
};

LUCE_FN void put(float (&row)[STRIDE], int column, float value) { row[column] = value; }

LUCE_FN void multiply(const Shared& shared, Sums& sums) {
    const int key = luce_thread() % 8, row = luce_thread() / 8;
    for (int column = 0; column < CHUNK; column++) {
        float q[ROWS], mean[COLUMNS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) q[i] = shared.q[row + i * GROUPS][column];
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) mean[j] = shared.mean[key + j * 8][column];
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) sums.value[i][j] = fmaf(q[i], mean[j], sums.value[i][j]);
    }
}

LUCE_FN void reduce_rows(Shared& shared, const Sums& sums, bool exponentials) {
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) {
        const int key = luce_thread() % 8 + j * 8;
        float value = exponentials ? 0.0f : -LUCE_INF;
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            value = exponentials ? value + expf(sums.value[i][j] - shared.top[key]) : fmaxf(value, sums.value[i][j]);
        shared.part[luce_thread() / 8][key] = value;
    }
}

#endif

// scores[head, m, n] = log sum over the rows r of query block m of exp(scale q_r . mean_n), for key blocks n <
// first + m, float32 [heads, blocks, width]. q float32 [heads, blocks * BLOCK, d], means [kv_heads, width, d]. Grid:
// tiles of KEYS key blocks, query blocks, heads.
extern "C" __global__ void __launch_bounds__(THREADS)
    block_scores(const float* __restrict__ q, const float* __restrict__ means, float* __restrict__ scores,
                 const int first, const int width, const int group, const int d, const float scale) {
    __shared__ Shared shared;
    const int begin = (int)blockIdx.x * KEYS, own = luce_min(KEYS, first + (int)blockIdx.y - begin);
    const i64 head = blockIdx.z, query = head * gridDim.y + blockIdx.y;
    luce_await();
    if (own <= 0) return;
    const float *rows = q + query * BLOCK * d, *keys = means + (head / group * width + begin) * d;
    Sums sums = {};
    for (int chunk = 0; chunk < d; chunk += CHUNK) {
        luce_sync();
        for (int i = luce_thread(); i < BLOCK * CHUNK; i += THREADS) {
            const int row = i / CHUNK, column = i % CHUNK;
            put(shared.q[row], column, chunk + column < d ? rows[(i64)row * d + chunk + column] * scale : 0.0f);
        }
        for (int i = luce_thread(); i < KEYS * CHUNK; i += THREADS) {
            const int key = i / CHUNK, column = i % CHUNK;
            const bool there = key < own && chunk + column < d;
            put(shared.mean[key], column, there ? keys[(i64)key * d + chunk + column] : 0.0f);
        }
        luce_sync();
        multiply(shared, sums);
    }
    luce_release();
    const int key = luce_thread();
    reduce_rows(shared, sums, false);
    luce_sync();
    if (key < KEYS) {
        float top = shared.part[0][key];
        for (int i = 1; i < GROUPS; i++) top = fmaxf(top, shared.part[i][key]);
        shared.top[key] = top;
    }
    luce_sync();
    reduce_rows(shared, sums, true);
    luce_sync();
    if (key < own) {
        float sum = 0.0f;
        for (int i = 0; i < GROUPS; i++) sum += shared.part[i][key];
        scores[query * width + begin + key] = shared.top[key] + logf(sum);
    }
}

// The set bits of a ballot.
LUCE_FN int ones(u64 mask) { return __popc((u32)mask) + __popc((u32)(mask >> 32)); }

// The pages that each query block reads by each head: table and first (position) int32 [heads, blocks, width], count
// [heads, blocks]. Key block n <= m, m = `begin` + blockIdx.x, is read if n < sink, m - n < window, m >= dense, or
// exp(score - largest score of m) >= alpha. scores [heads, blocks, columns]; the pages of KV head g are numbers
// g * apart, ... of which `pages` hold the text so far. Grid: query blocks, heads; a wave.
extern "C" __global__ void list_pages(const float* __restrict__ scores, int* __restrict__ table, int* __restrict__ at,
                                      int* __restrict__ count, const int begin, const int columns, const int width,
                                      const int group, const int apart, const int pages, const int sink,
                                      const int window, const int dense, const float alpha) {
    const int m = begin + (int)blockIdx.x, lane = luce_lane(), base = (int)blockIdx.y / group * apart;
    const i64 query = (i64)blockIdx.y * gridDim.x + blockIdx.x;
    const float* own = scores + query * columns;
    luce_release();
    luce_await();
    float top = -LUCE_INF;
    if (m < dense)
        for (int n = lane; n < m; n += LUCE_LANES) top = fmaxf(top, own[n]);
    top = luce_lane_max(top);
    int *to = table + query * width, *places = at + query * width, listed = 0;
    for (int low = 0; low <= m; low += LUCE_LANES) {
        const int n = low + lane;
        bool kept = n <= m && (n < sink || m - n < window || m >= dense);
        if (n < m && !kept) kept = expf(own[n] - top) >= alpha;
        const u64 all = luce_ballot(kept);
        int i = listed + ones(all & ((1ull << lane) - 1)) * (BLOCK / PAGE);
        for (int page = n * (BLOCK / PAGE); kept && page < luce_min(pages, (n + 1) * (BLOCK / PAGE)); page++, i++) {
            to[i] = base + page;
            places[i] = page * PAGE;
        }
        listed += ones(all) * (BLOCK / PAGE);
    }
    // Only the last block may have fewer pages.
    if (lane == 0) count[query] = listed - luce_max(0, (m + 1) * (BLOCK / PAGE) - pages);
}
