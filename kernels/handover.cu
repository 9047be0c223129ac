// Rows on their way to a GPU of another process: through pinned host memory that both map, with a flag in it, a counter
// that says when they are there. No host and no copy engine stands between the two kernels.
#include "flag.h"

#define THREADS 1024
// Words of a thread that are under way at a time: host memory is about a microsecond away.
#define FLIGHT 8

// to[i] = from[i] for i of `words`, which the blocks of the grid share. Every word is loaded where it stands: the memory
// on the other side may be in this GPU's caches with the values of an earlier step.
LUCE_FN void copy_words(const u32* from, u32* to, i64 words) {
    const i64 step = (i64)gridDim.x * THREADS;
    for (i64 first = (i64)blockIdx.x * THREADS + threadIdx.x; first < words; first += step * FLIGHT) {
        u32 held[FLIGHT];
#pragma unroll
        for (int k = 0; k < FLIGHT; k++)
            if (first + k * step < words) held[k] = *(const volatile u32*)(from + first + k * step);
#pragma unroll
        for (int k = 0; k < FLIGHT; k++)
            if (first + k * step < words) to[first + k * step] = held[k];
    }
}

// place = rows, in one block, and then flag = value, if there is a flag. `place` and `flag` are host memory.
extern "C" __global__ void __launch_bounds__(THREADS)
    hand_over(const u32* rows, u32* place, u32* flag, const i64 words, const i32 value) {
    luce_release();
    luce_await();
    copy_words(rows, place, words);
    // Each thread's words arrive before the flag does.
    luce_fence_system();
    luce_sync();
    if (flag && threadIdx.x == 0) luce_set_flag(flag, (u32)value);
}

// rows = place, once the flag has reached the value (as Flag.done says, cyclically). Whoever does not want to wait any
// longer for rows that do not come raises the flag.
extern "C" __global__ void __launch_bounds__(THREADS)
    take_over(const u32* place, const u32* flag, u32* rows, const i64 words, const i32 value) {
    luce_release();
    luce_await();
    if (threadIdx.x == 0)
        while ((i32)(luce_flag(flag) - (u32)value) < 0) {}
    luce_sync();
    copy_words(place, rows, words);
}
