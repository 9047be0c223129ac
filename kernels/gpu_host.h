// The third target of gpu.h: the host compiler (g++), for tests and tools without a GPU; never used for serving.
//
// A kernel becomes an ordinary function that a fiber per thread runs (tests/support/emulator.cpp defines what is only
// declared here). `__global__` flattens the kernel, so that every barrier, shuffle and access has a return address of
// its own: two lanes at one address are at one place of the program, and debug information turns the address into a
// source line through all inlined helpers.
#pragma once

#if !defined(LUCE_LANES)
#error "LUCE_LANES must be passed"
#endif

#if defined(LUCE_LIST_KERNELS)
// For the launcher's first pass, with the preprocessor alone: the names of the kernels, and their bounds.
#define __global__ luce_global
#define __launch_bounds__(...) luce_bounds<__VA_ARGS__>
#else
#define __global__ __attribute__((flatten))
#define __launch_bounds__(...)
#endif
#define __device__
#define __forceinline__ inline __attribute__((always_inline, unused))
#define __constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
// One copy serves all blocks: they run one after another. Nothing else in a kernel's library is zero-initialised data,
// so its .bss is the shared memory (a section of its own does not work: g++ forgets the attribute in templates).
#define __shared__ static
#define LUCE_FN static __device__ __forceinline__

struct luce_dim3 {
    u32 x, y, z;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};

extern "C" {
// Constant for one thread, and each thread has a stack and registers of its own: so the compiler may keep them there.
extern const luce_dim3 threadIdx, blockIdx, blockDim, gridDim;
extern u8 luce_dynamic[];

u64 luce_host_shuffle(u64 bits, int lane);
u64 luce_host_shuffle_xor(u64 bits, int mask);
u64 luce_host_ballot(bool predicate);
void luce_host_sync();
void luce_host_sync_lanes();
void luce_host_await();
int luce_host_read_now(const i32* from);
void luce_host_copy16(void* to, const void* from, bool valid);
void luce_host_copy4(void* to, const void* from);
void luce_host_copy_close();
void luce_host_copy_wait(int groups);
void luce_host_bulk_begin(u64* bulk, u32 pieces);
void luce_host_bulk_copy16(void* to, const void* from, const u64* bulk);
void luce_host_bulk_close(u64* bulk);
void luce_host_bulk_wait(u64* bulk, int turn);
void luce_host_gate_begin(u64* gate, int count);
void luce_host_gate_arrive(u64* gate);
void luce_host_gate_wait(u64* gate, int turn);
void luce_host_share();
void luce_host_store16(void* to, const void* from);
void luce_host_store_close();
void luce_host_store_wait(int groups);
void luce_host_cluster_begin(u32 bytes);
void luce_host_cluster_arrive(bool behind_reads);
void luce_host_cluster_wait(u32 blocks);
void luce_host_cluster_send(void* to, u32 bits);
void luce_host_cluster_receive(u32 blocks);
void luce_host_post(i32* slot, u32 bits);
u32 luce_host_take(i32* slot);

float fabsf(float);
float fmaf(float, float, float);
float fminf(float, float);
float fmaxf(float, float);
float sqrtf(float);
float expf(float);
float exp2f(float);
float expm1f(float);
float logf(float);
float log1pf(float);
float tanhf(float);
float powf(float, float);
float floorf(float);
float rintf(float);
double fabs(double);
double fma(double, double, double);
double sqrt(double);
double exp(double);
double log(double);
double pow(double, double);
double floor(double);
double sin(double);
double cos(double);
}

i32 atomicAdd(i32* to, i32 value);
u32 atomicAdd(u32* to, u32 value);
i32 atomicMax(i32* to, i32 value);
u32 atomicMax(u32* to, u32 value);

#define isnan(x) __builtin_isnan(x)
#define isinf(x) __builtin_isinf_sign(x)

LUCE_FN float rsqrtf(float x) { return 1.0f / sqrtf(x); }
LUCE_FN void sincos(double x, double* s, double* c) {
    *s = sin(x);
    *c = cos(x);
}

LUCE_FN u32 __float_as_uint(float value) {
    u32 bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
}
LUCE_FN float __uint_as_float(u32 bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}
LUCE_FN int __popc(u32 value) { return __builtin_popcount(value); }
LUCE_FN int __ffs(int value) { return __builtin_ffs(value); }
LUCE_FN int __clz(int value) { return value ? __builtin_clz((u32)value) : 32; }

LUCE_FN float2 make_float2(float x, float y) { return {x, y}; }
LUCE_FN float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
LUCE_FN int2 make_int2(int x, int y) { return {x, y}; }
LUCE_FN int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
LUCE_FN uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
LUCE_FN uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

template <typename T> LUCE_FN T luce_shfl_xor(T value, int mask) {
    u64 bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    bits = luce_host_shuffle_xor(bits, mask);
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}
template <typename T> LUCE_FN T luce_shfl(T value, int lane) {
    u64 bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    bits = luce_host_shuffle(bits, lane);
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}
LUCE_FN u64 luce_ballot(bool predicate) { return luce_host_ballot(predicate); }
LUCE_FN void luce_sync() { luce_host_sync(); }
LUCE_FN void luce_sync_lanes() { luce_host_sync_lanes(); }
LUCE_FN void luce_await() { luce_host_await(); }
LUCE_FN void luce_release() {}
LUCE_FN i32 luce_read_now(const i32* from) { return luce_host_read_now(from); }
LUCE_FN float luce_read_now(const float* from) {
    return __uint_as_float((u32)luce_host_read_now(reinterpret_cast<const i32*>(from)));
}

LUCE_FN float luce_f32(f16_t value) {
    u32 magnitude = (value.bits & 0x7fffu) << 13, sign = (u32)(value.bits & 0x8000u) << 16;
    if (magnitude >= 0x7c00u << 13) return __uint_as_float(sign | 0x7f800000u | magnitude);
    // The exponent field is 112 too small; the product is exact, and right for subnormal halves too.
    return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude) * 0x1p112f));
}
LUCE_FN f16_t luce_f16(float value) {
    u32 bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, half;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u)
        half = 0x7fffu;
    else if (bits >= 0x477ff000u)  // 65520 and more round to infinity
        half = 0x7c00u;
    else if (bits < 0x38800000u)  // below 2^-14: the sum with 0.5 rounds to the subnormal halves' spacing of 2^-24
        half = __float_as_uint(__uint_as_float(bits) + 0.5f) - 0x3f000000u;
    else
        half = (bits - 0x38000000u + 0xfffu + (bits >> 13 & 1u)) >> 13;
    return {(u16)(sign | half)};
}

LUCE_FN i32 luce_dot4(i32 a, i32 b, i32 c) {
    for (int shift = 0; shift < 32; shift += 8) c += (i32)(i8)(a >> shift) * (i32)(i8)(b >> shift);
    return c;
}

LUCE_FN i32 luce_dot4_high(u32 a, i32 b, i32 c) {
    for (int shift = 0; shift < 32; shift += 8) c += (i32)(u8)(a >> shift) * (i32)(i8)(b >> shift);
    return c;
}

#define LUCE_INF __builtin_inff()
#define LUCE_NAN __builtin_nanf("")
#define LUCE_DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(luce_dynamic)

// --- for the launcher: a kernel's parameter types, and a call with pointers to its arguments

// kind: f i u (numbers), h (f16_t), g (bf16_t), b (bool), v (void), x (anything else); size in bytes, of the pointee.
struct luce_parameter {
    char kind;
    bool pointer, constant;
    u32 size;
};
struct luce_kernel {
    const luce_parameter* parameters;
    u32 count;
    u32 bound;  // most threads of a block
    void (*call)(void** arguments);
    u8 *shared, *shared_end;
};

template <typename T> struct luce_kind {
    static constexpr char value = __is_class(T) || __is_union(T) ? 'x' : '?';
};
#define LUCE_KIND(type, letter) \
    template <> struct luce_kind<type> { static constexpr char value = letter; }
LUCE_KIND(float, 'f');
LUCE_KIND(double, 'f');
LUCE_KIND(bool, 'b');
LUCE_KIND(void, 'v');
LUCE_KIND(f16_t, 'h');
LUCE_KIND(bf16_t, 'g');
LUCE_KIND(char, 'i');
LUCE_KIND(i8, 'i');
LUCE_KIND(i16, 'i');
LUCE_KIND(i32, 'i');
LUCE_KIND(long, 'i');
LUCE_KIND(i64, 'i');
LUCE_KIND(u8, 'u');
LUCE_KIND(u16, 'u');
LUCE_KIND(u32, 'u');
LUCE_KIND(unsigned long, 'u');
LUCE_KIND(u64, 'u');

template <typename T> struct luce_size {
    static constexpr u32 value = sizeof(T);
};
template <> struct luce_size<void> {
    static constexpr u32 value = 1;
};
template <typename T> struct luce_describe {
    static constexpr luce_parameter value = {luce_kind<T>::value, false, false, sizeof(T)};
};
template <typename T> struct luce_describe<T*> {
    static constexpr luce_parameter value = {luce_kind<T>::value, true, false, luce_size<T>::value};
};
template <typename T> struct luce_describe<const T*> {
    static constexpr luce_parameter value = {luce_kind<T>::value, true, true, luce_size<T>::value};
};

template <auto kernel> struct luce_launch;
template <typename... T, void (*kernel)(T...)> struct luce_launch<kernel> {
    static constexpr luce_parameter parameters[sizeof...(T) + 1] = {luce_describe<T>::value...};
    template <unsigned... I> struct indices {
        __attribute__((no_sanitize("thread"))) static void call(void** arguments) {
            kernel(*static_cast<T*>(arguments[I])...);
        }
    };
    static constexpr u32 count = sizeof...(T);
    static constexpr auto call = &indices<__integer_pack(sizeof...(T))...>::call;
};

extern "C" __attribute__((visibility("hidden"))) u8 __bss_start[], _end[];  // from the linker

#define LUCE_FIRST(first, ...) first
#define LUCE_HOST_KERNEL(name, ...)                                                                        \
    extern "C" luce_kernel luce_kernel_##name() {                                                          \
        using launch = luce_launch<name>;                                                                  \
        return {launch::parameters, launch::count, LUCE_FIRST(__VA_ARGS__, 0), launch::call, __bss_start, _end}; \
    }
