// The K largest logits of a row in order, in rounds: many blocks each take a part of the row, then fewer blocks
// take their results, until one block has taken all.
//
// A logit and its index make one 64-bit key, so that the order is total: the larger logit, then the lower index; NaN is
// above everything. The result depends neither on the parts nor on the order of comparisons.
#include "gpu.h"

#define K 64
#define PART 4096
#define THREADS 256

// Descending keys are descending values. 0 is below the key of every logit.
LUCE_FN u64 key_of(float value, int index) {
    // + 0 makes the two zeros equal.
    const u32 bits = __float_as_uint(value + 0.0f);
    const u32 ordered = isnan(value) ? 0xffffffffu : bits >> 31 ? ~bits : bits | 0x80000000u;
    return (u64)ordered << 32 | (0xffffffffu - (u32)index);
}

// Leave the K largest of `keys` [PART], in descending order, in its first K places.
LUCE_FN void select(u64* keys) {
    // Bitonic sort of runs of K, descending and ascending in turn.
    for (int run = 2; run <= K; run *= 2) {
        for (int step = run / 2; step > 0; step /= 2) {
            for (int i = luce_thread(); i < PART / 2; i += THREADS) {
                const int low = 2 * i - (i & (step - 1)), high = low + step;
                const u64 a = keys[low], b = keys[high];
                if ((a < b) == ((low & run) == 0)) {
                    keys[low] = b;
                    keys[high] = a;
                }
            }
            luce_sync();
        }
    }
    // Of two runs, one each way, the larger of the two keys at each place are the K largest, and bitonic: runs that lie
    // `apart` keys from each other become half as many, sorted again.
    for (int apart = K; apart < PART; apart *= 2) {
        const int count = PART / (2 * apart) * K;
        for (int i = luce_thread(); i < count; i += THREADS) {
            const int at = i / K * 2 * apart + i % K;
            keys[at] = luce_max(keys[at], keys[at + apart]);
        }
        luce_sync();
        for (int step = K / 2; step > 0; step /= 2) {
            for (int i = luce_thread(); i < count / 2; i += THREADS) {
                const int run = i / (K / 2), j = i % (K / 2);
                const int low = run * 2 * apart + 2 * j - (j & (step - 1)), high = low + step;
                const u64 a = keys[low], b = keys[high];
                if ((a < b) == (run % 2 == 0)) {
                    keys[low] = b;
                    keys[high] = a;
                }
            }
            luce_sync();
        }
    }
}

// Block x of row y: the K largest of its PART columns of `logits` float32 [rows, vocab], rows `stride` elements apart;
// out [rows, gridDim.x, K].
extern "C" __global__ void __launch_bounds__(THREADS) top_k_of_logits(const float* __restrict__ logits,
                                                                    u64* __restrict__ out, int vocab, int stride) {
    luce_await();
    __shared__ u64 keys[PART];
    const float* row = logits + (i64)blockIdx.y * stride;
    for (int i = luce_thread(); i < PART; i += THREADS) {
        const int column = (int)blockIdx.x * PART + i;
        keys[i] = column < vocab ? key_of(row[column], column) : 0;
    }
    luce_sync();
    select(keys);
    u64* to = out + ((i64)blockIdx.y * (int)gridDim.x + (int)blockIdx.x) * K;
    for (int i = luce_thread(); i < K; i += THREADS) to[i] = keys[i];
}

// The same of keys [rows, count].
extern "C" __global__ void __launch_bounds__(THREADS) top_k_of_keys(const u64* __restrict__ in, u64* __restrict__ out,
                                                                  int count) {
    luce_await();
    __shared__ u64 keys[PART];
    const u64* row = in + (i64)blockIdx.y * count;
    for (int i = luce_thread(); i < PART; i += THREADS) {
        const int at = (int)blockIdx.x * PART + i;
        keys[i] = at < count ? row[at] : 0;
    }
    luce_sync();
    select(keys);
    u64* to = out + ((i64)blockIdx.y * (int)gridDim.x + (int)blockIdx.x) * K;
    for (int i = luce_thread(); i < K; i += THREADS) to[i] = keys[i];
}
