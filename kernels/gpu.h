// The functions and types for Luce's kernels on every target: CUDA (NVRTC), HIP (hiprtc, clang) and the host
// (gpu_host.h, for tests).
//
// Include nothing but headers of this folder: NVRTC and hiprtc run without the vendors' toolkit headers. From the
// language itself use: extern "C" __global__, __launch_bounds__, __shared__, __restrict__, __constant__, threadIdx,
// blockIdx, blockDim, gridDim, #pragma unroll, atomicAdd and atomicMax on 32-bit integers, the vector types
// float2 float4 int2 int4 uint2 uint4, and the C functions
//   float   fabsf fmaf fminf fmaxf sqrtf rsqrtf expf exp2f expm1f logf log1pf tanhf powf floorf rintf isnan isinf
//   double  fabs fma sqrt exp log pow floor sincos sin cos
//   bits    __float_as_uint __uint_as_float __popc __ffs __clz
// which are the accurate versions: no fast-math option is ever passed.
#pragma once

typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

// fp16 and bfloat16 numbers in memory; arithmetic is in float.
struct f16_t {
    u16 bits;
};
struct bf16_t {
    u16 bits;
};

#if defined(LUCE_HOST)
#include "gpu_host.h"  // defines all of the names of the two branches below
#elif defined(__HIP__) || defined(__HIPCC__) || defined(__HIPCC_RTC__)

#if !defined(__HIPCC_RTC__)
#include <hip/hip_runtime.h>
#endif

// Lanes of a wavefront. Device.launch always passes it; the default is the compiler's for the architecture.
#if !defined(LUCE_LANES)
#if defined(__GFX9__)
#define LUCE_LANES 64
#else
#define LUCE_LANES 32
#endif
#endif

#define LUCE_FN __device__ __forceinline__

// The value of `value` in lane (own lane ^ mask), and in lane `lane`; 32-bit types and double.
// These three and luce_ballot need every lane of the wave to arrive.
template <typename T> LUCE_FN T luce_shfl_xor(T value, int mask) { return __shfl_xor(value, mask, LUCE_LANES); }
template <typename T> LUCE_FN T luce_shfl(T value, int lane) { return __shfl(value, lane, LUCE_LANES); }

// Bit i is set if lane i passed true.
LUCE_FN u64 luce_ballot(bool predicate) { return __ballot(predicate); }

// All threads of the block have arrived, and see each other's shared and global writes.
LUCE_FN void luce_sync() { __syncthreads(); }

// The same among the lanes of one wave. They run in step; only the compiler must not move accesses across.
LUCE_FN void luce_sync_lanes() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

// Every thread of a kernel calls luce_await before it writes to global memory, and before it reads there what another
// kernel of the step wrote. On CUDA from sm_90 on, a kernel's blocks may start when all blocks of the one before have
// called luce_release or ended; luce_await returns when that kernel, and so every earlier one, has ended and its writes
// are visible. Weights that are fetched before the call are fetched while earlier kernels run. A small kernel releases
// the next one at once; a large kernel late, or the next one's blocks would settle on unevenly filled multiprocessors.
// On other targets kernels run one after another anyway.
LUCE_FN void luce_await() {}
LUCE_FN void luce_release() {}

// Loads where it stands: a compiler may load what `const __restrict__` points to before luce_await, and first-level
// caches are not asked for older values. So what a kernel of the step wrote may be read before luce_await if a kernel
// between that one and this one calls luce_release behind luce_await alone: its blocks have all done so when this one's
// start, and so that kernel had ended.
template <typename T> LUCE_FN T luce_read_now(const T* from) { return *(const volatile T*)from; }

LUCE_FN float luce_f32(f16_t value) { return (float)__builtin_bit_cast(_Float16, value.bits); }
// To nearest, ties to even; beyond 65504 to infinity.
LUCE_FN f16_t luce_f16(float value) { return {__builtin_bit_cast(u16, (_Float16)value)}; }

// c + sum of the four products of signed bytes, as int32.
LUCE_FN i32 luce_dot4(i32 a, i32 b, i32 c) {
#if defined(__gfx906__) || defined(__gfx908__) || defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__) || \
    defined(__gfx1030__) || defined(__gfx1031__) || defined(__gfx1032__) || defined(__gfx1034__) || defined(__gfx1035__)
    return __builtin_amdgcn_sdot4(a, b, c, false);
#elif defined(__GFX11__) || defined(__GFX12__)
    return __builtin_amdgcn_sudot4(true, a, true, b, c, false);
#else
#pragma unroll
    for (int shift = 0; shift < 32; shift += 8) c += (i32)(i8)(a >> shift) * (i32)(i8)(b >> shift);
    return c;
#endif
}

// The same of unsigned bytes of a that are multiples of 16 and signed ones of b.
LUCE_FN i32 luce_dot4_high(u32 a, i32 b, i32 c) {
#if defined(__GFX11__) || defined(__GFX12__)
    return __builtin_amdgcn_sudot4(false, (i32)a, true, b, c, false);
#else
    return luce_dot4((i32)(a >> 4), b, 0) * 16 + c;
#endif
}

#define LUCE_INF __builtin_inff()
#define LUCE_NAN __builtin_nanf("")

// `name` points to the launch's dynamic shared memory, 16-byte aligned. All uses in one kernel are the same memory.
#define LUCE_DYNAMIC_SHARED(type, name)                            \
    extern __shared__ __attribute__((aligned(16))) u8 luce_dynamic[]; \
    type* name = reinterpret_cast<type*>(luce_dynamic)

#else  // CUDA; the comments above describe the functions

#if !defined(LUCE_LANES)
#define LUCE_LANES 32
#endif

#define LUCE_FN __device__ __forceinline__

template <typename T> LUCE_FN T luce_shfl_xor(T value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
template <typename T> LUCE_FN T luce_shfl(T value, int lane) { return __shfl_sync(0xffffffffu, value, lane); }
LUCE_FN u64 luce_ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }
LUCE_FN void luce_sync() { __syncthreads(); }
LUCE_FN void luce_sync_lanes() { __syncwarp(); }
LUCE_FN void luce_await() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
LUCE_FN void luce_release() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
template <typename T> LUCE_FN T luce_read_now(const T* from) { return *(const volatile T*)from; }

LUCE_FN float luce_f32(f16_t value) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
    return result;
}
LUCE_FN f16_t luce_f16(float value) {
    f16_t result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}

LUCE_FN i32 luce_dot4(i32 a, i32 b, i32 c) { return __dp4a(a, b, c); }
LUCE_FN i32 luce_dot4_high(u32 a, i32 b, i32 c) {
    i32 result;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
    return result;
}

#define LUCE_INF __uint_as_float(0x7f800000u)
#define LUCE_NAN __uint_as_float(0x7fffffffu)

#define LUCE_DYNAMIC_SHARED(type, name)                \
    extern __shared__ __align__(16) u8 luce_dynamic[]; \
    type* name = reinterpret_cast<type*>(luce_dynamic)

#endif

// --- the same on all targets

static_assert(LUCE_LANES == 32 || LUCE_LANES == 64, "LUCE_LANES must be 32 or 64");

#define LUCE_FLT_MAX 3.402823466e+38f
#define LUCE_PI 3.14159265358979323846

template <typename T> LUCE_FN T luce_min(T a, T b) { return b < a ? b : a; }
template <typename T> LUCE_FN T luce_max(T a, T b) { return a < b ? b : a; }
template <typename T> LUCE_FN T luce_ceil_div(T a, T b) { return (a + b - 1) / b; }

// The thread's index in its block (x fastest), its lane and its wave.
LUCE_FN int luce_thread() { return (int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)); }
LUCE_FN int luce_lane() { return luce_thread() % LUCE_LANES; }
LUCE_FN int luce_wave() { return luce_thread() / LUCE_LANES; }
LUCE_FN int luce_threads() { return (int)(blockDim.x * blockDim.y * blockDim.z); }

LUCE_FN float luce_f32(float value) { return value; }
LUCE_FN float luce_f32(bf16_t value) { return __uint_as_float((u32)value.bits << 16); }

// To nearest, ties to even; a NaN stays one (its payload's low bits are lost, so the quiet bit is set).
LUCE_FN bf16_t luce_bf16(float value) {
    u32 bits = __float_as_uint(value);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return {(u16)(nan ? bits >> 16 | 0x40u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

// Store in the destination's type: luce_store(out[i], value).
LUCE_FN void luce_store(float& to, float value) { to = value; }
LUCE_FN void luce_store(f16_t& to, float value) { to = luce_f16(value); }
LUCE_FN void luce_store(bf16_t& to, float value) { to = luce_bf16(value); }

// Reads from GGUF blocks. Blocks of 18, 34, 110 or 210 bytes leave their fields aligned to 2 bytes only, where a wider
// load faults or tears; _at2 is for these, _at4 for fields that are known to be aligned.
LUCE_FN u32 luce_u16_at2(const void* from) { return *reinterpret_cast<const u16*>(from); }
LUCE_FN u32 luce_u32_at2(const void* from) {
    const u16* half = reinterpret_cast<const u16*>(from);
    return (u32)half[0] | (u32)half[1] << 16;
}
LUCE_FN u32 luce_u32_at4(const void* from) { return *reinterpret_cast<const u32*>(from); }
LUCE_FN float luce_f16_at2(const void* from) { return luce_f32(*reinterpret_cast<const f16_t*>(from)); }
