// variants: UNIT=16,4,2
// Copies of KV rows from page to page, UNIT bytes at a time.
#include "gpu.h"

#if UNIT == 16
typedef uint4 Unit;
#elif UNIT == 4
typedef u32 Unit;
#else
typedef u16 Unit;
#endif

// pool[to] = pool[from] for each pair of copies int32 [grid x, 2]; from is -1 for no copy. Rows of `units` units; grid
// y: blocks along a row. No row is both source and target.
extern "C" __global__ void kv_copy(u8* pool, const i32* __restrict__ copies, int units) {
    const i32 from = copies[2 * blockIdx.x], to = copies[2 * blockIdx.x + 1];
    const int i = (int)(blockIdx.y * blockDim.x + threadIdx.x);
    Unit* rows = reinterpret_cast<Unit*>(pool);
    luce_release();
    luce_await();
    if (from >= 0 && i < units) rows[(i64)to * units + i] = rows[(i64)from * units + i];
}
