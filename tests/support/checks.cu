// Kernels that do right and wrong on purpose, for tests/unit/test_emulated.py. A line that must be named in a report
// carries its name behind `//!`.

#include "reduce.h"
#include "tensor_map.h"

extern "C" __global__ void block_sums(const float* __restrict__ x, float* __restrict__ out, const int cols) {
    luce_await();
    float sum = 0;
    for (int i = luce_thread(); i < cols; i += luce_threads()) sum += x[(i64)blockIdx.x * cols + i];
    sum = luce_block_sum(sum);
    if (luce_thread() == 0) out[blockIdx.x] = sum;
}

extern "C" __global__ void lanes(const int* x, int* xor1, int* first, u64* votes, double* rotated) {
    luce_await();
    int t = luce_thread();
    xor1[t] = luce_shfl_xor(x[t], 1);
    first[t] = luce_shfl(x[t], 0);
    votes[t] = luce_ballot(x[t] % 3 == 0);
    rotated[t] = luce_shfl((double)x[t] / 3, (luce_lane() + 5) % LUCE_LANES);
}

extern "C" __global__ void indices(int* out) {
    luce_await();
    int thread = luce_thread();
    int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    int* mine = out + (block * luce_threads() + thread) * 4;
    mine[0] = threadIdx.x, mine[1] = threadIdx.y, mine[2] = threadIdx.z, mine[3] = block;
}

// The order of the threads is turned round in dynamic shared memory; the block's size need not be whole waves.
extern "C" __global__ void reverse(const float* x, float* out) {
    luce_await();
    LUCE_DYNAMIC_SHARED(float, tile);
    int t = luce_thread(), n = luce_threads();
    tile[t] = x[blockIdx.x * n + t];
    luce_sync();
    out[blockIdx.x * n + t] = tile[n - 1 - t];
}

extern "C" __global__ void count(const int* x, int* bins, u32* largest, int n) {
    luce_await();
    __shared__ int local[4];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (luce_thread() < 4) local[luce_thread()] = 0;
    luce_sync();
    if (i < n) {
        atomicAdd(&local[x[i] % 4], 1);
        atomicMax(largest, (u32)x[i]);
    }
    luce_sync();
    if (luce_thread() < 4) atomicAdd(&bins[luce_thread()], local[luce_thread()]);
}

extern "C" __global__ void from_halves(const f16_t* x, float* out) {
    luce_await();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = luce_f32(x[i]);
}

extern "C" __global__ void to_halves(const float* x, f16_t* half, bf16_t* brain, int n) {
    luce_await();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    half[i] = luce_f16(x[i]);
    brain[i] = luce_bf16(x[i]);
}

__constant__ int primes[4] = {2, 3, 5, 7};
extern "C" __global__ void defined(int* out) {
    luce_await();
    float4 v = make_float4(1, 2, 3, FACTOR);
    int packed = luce_dot4(0x7f80ff01, 0x02030405, 100);
    out[threadIdx.x] = primes[threadIdx.x] * (int)v.w + packed;
}

// Twice the same memory, once through each lane-level and block-level order that there is: no race.
extern "C" __global__ void ordered(float* x) {
    luce_await();
    __shared__ float s[1024];
    int t = luce_thread(), wave = t - luce_lane();
    s[t] = t;
    luce_sync_lanes();
    float neighbour = s[wave + (luce_lane() + 1) % LUCE_LANES];
    luce_sync_lanes();
    s[t] = neighbour + s[t];
    luce_sync();
    x[luce_threads() - 1 - t] = s[luce_threads() - 1 - t] + s[t];
    luce_sync();
    x[t] += 1;
}

// --- faults

// Half of the block ends early; the other half reads and writes before and after it waited, as asked.
extern "C" __global__ void awaits(const float* x, float* out, int read_early, int write_early, int stay) {
    int i = luce_thread();
    float value = 0;
    if (read_early) value = x[i];         //! early_read
    if (write_early) out[i] = 1;          //! early_write
    if (i >= stay) return;
    luce_await();
    out[i] = value + x[i];
}

extern "C" __global__ void reads_at(const float* x, float* out, i64 at) {
    luce_await();
    out[threadIdx.x] = x[at];  //! reads_at
}

extern "C" __global__ void writes_at(float* x, int at) {
    luce_await();
    if (blockIdx.x == 1 && threadIdx.x == 2) x[at] = 1;  //! writes_at
}

extern "C" __global__ void writes_const(const float* x) {
    luce_await();
    const_cast<float*>(x)[threadIdx.x] = 1;  //! writes_const
}

extern "C" __global__ void misaligned(const float* x, float* out) {
    luce_await();
    float2 pair = *reinterpret_cast<const float2*>(x + 1);  //! misaligned
    out[0] = pair.x + pair.y;
}

extern "C" __global__ void unwritten_shared(float* out, int skip) {
    luce_await();
    __shared__ float s[64];
    if (blockIdx.x == 0 || threadIdx.x != skip) s[threadIdx.x] = 1;
    luce_sync();
    out[blockIdx.x * 64 + threadIdx.x] = s[63 - threadIdx.x];  //! unwritten_shared
}

extern "C" __global__ void shared_past_end(float* out) {
    luce_await();
    LUCE_DYNAMIC_SHARED(float, s);
    s[threadIdx.x] = out[threadIdx.x];  //! shared_past_end
}

#define MISSING(n) if (BARRIERS & (1 << n)) luce_sync();
extern "C" __global__ void missing_barrier(const float* x, float* out) {
    luce_await();
    __shared__ float s[256];
    int t = luce_thread();
    for (int round = 0; round < 2; round++) {
        s[t] = x[t] + round;
        MISSING(0)
        out[t + 256 * round] = s[t / 2];  //! read_after_write
        MISSING(1)
    }
}

// One wave writes, another one reads, in turns.
extern "C" __global__ void gates(const float* x, float* out) {
    luce_await();
    __shared__ float place[LUCE_LANES];
    __shared__ u64 written, read;
    int lane = luce_lane();
    if (luce_thread() == 0) luce_host_gate_begin(&written, LUCE_LANES), luce_host_gate_begin(&read, LUCE_LANES);
    luce_sync();
    for (int turn = 0; turn < 3; turn++)
        if (luce_wave() == 0) {
            if (BARRIERS & 1) luce_host_gate_wait(&read, turn - 1);
            place[lane] = x[lane] + turn;
            if (BARRIERS & 16) luce_host_share();
            if (BARRIERS & 2) luce_host_gate_arrive(&written);  //! gate_arrival
        } else {
            if (BARRIERS & 4) luce_host_gate_wait(&written, turn);
            out[turn * LUCE_LANES + lane] = place[lane];  //! gate_read
            if (BARRIERS & 8) luce_host_gate_arrive(&read);
        }
}

#if LUCE_WGMMA
// One wave asks for a box of 8 rows, another one waits for it and reads it.
extern "C" __global__ void boxes(LUCE_BY_VALUE const TensorMap map, const u16* x, u16* out, int column, int head, int row,
                                 int expected) {
    luce_await();
    LUCE_DYNAMIC_SHARED(u8, box);
    __shared__ Gate full;
    int lane = luce_lane();
    if (luce_thread() == 32) luce_gate_begin(&full, 1), luce_gate_ready();
    luce_sync();
    if (luce_thread() == 0) {
        if (BARRIERS & 1) luce_gate_expect(&full, expected);
        luce_box_load(box, &map, column, head, row, &full);  //! box_load
    }
    if (luce_wave() == 1) {
        if (BARRIERS & 2) luce_gate_wait(&full, 0);
        for (int i = lane; i < 8 * 64 && (BARRIERS & 4); i += LUCE_LANES) {
            const int chunk = (i / 8 ^ i / 64) % 8;
            out[i] = *reinterpret_cast<u16*>(box + i / 64 * 128 + chunk * 16 + i % 8 * 2);  //! box_read
        }
    }
}
#endif

extern "C" __global__ void all_read_one_writes(float* out) {
    luce_await();
    __shared__ float s;
    if (luce_thread() == 0) s = 1;
    luce_sync();
    out[luce_thread()] = s;
    if (luce_thread() == luce_threads() - 1) s = 2;  //! one_writes
}

extern "C" __global__ void lanes_race(float* out) {
    luce_await();
    __shared__ float s[LUCE_LANES];
    s[luce_lane()] = luce_lane();
    out[luce_lane()] = s[LUCE_LANES - 1 - luce_lane()];  //! lanes_race
}

extern "C" __global__ void atomic_race(int* out) {
    luce_await();
    atomicAdd(out, 1);
    if (threadIdx.x == 3) out[0] = 7;  //! atomic_race
}

extern "C" __global__ void in_place(float* x) {
    luce_await();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    x[i] += i ? x[i - 1] : 0;  //! in_place
}

extern "C" __global__ void shift_blocks(float* x) {
    luce_await();
    float old = x[luce_min(blockIdx.x + 1, gridDim.x - 1)];
    x[blockIdx.x] = old;  //! shift_blocks
}

extern "C" __global__ void some_leave(float* out, int stay) {
    luce_await();
    if (threadIdx.x >= stay) return;
    luce_sync();  //! some_leave
    out[threadIdx.x] = 1;
}

extern "C" __global__ void two_barriers(float* out) {
    luce_await();
    if (threadIdx.x < 8) {
        luce_sync();  //! first_barrier
        out[threadIdx.x] = 1;
    } else {
        luce_sync();  //! second_barrier
        out[threadIdx.x] = 2;
    }
}

extern "C" __global__ void half_shuffles(float* out) {
    luce_await();
    float v = threadIdx.x;
    if (luce_lane() < 8) v = luce_lane_sum(v);  //! half_shuffles
    luce_sync();  //! half_waits
    out[threadIdx.x] = v;
}

extern "C" __global__ void __launch_bounds__((8 + 8) * 2, 1) bounded(int* out) { luce_await(); out[luce_thread()] = 1; }

extern "C" __global__ void fixed_width(float* out) {
    luce_await();
    out[threadIdx.x] = luce_shfl_xor(1.0f, LUCE_LANES);  //! fixed_width
}
