// Products of a group of four waves.
//
// LUCE_WGMMA is 1 if such groups multiply matrices in shared memory: on sm_90a, and on the host on request.
#pragma once
#include "mma.h"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define LUCE_WGMMA 1
#elif !defined(LUCE_WGMMA)
#define LUCE_WGMMA 0
#endif

#if LUCE_WGMMA

// Products of a group of four waves that begins at a multiple of four. Its matrices are rows of 64 16-bit numbers, 128
// bytes, one after the other from a multiple of 1024 on; chunk c of 16 bytes of row r lies in the place c ^ r % 8. Of c
// [64, 64] the group's wave w has rows 16w and on, in the layout of luce_mma_f16 with c[i] columns 8i and on.
//
//   luce_wgmma_fence()                  first: registers and shared memory are ready for the products
//   luce_wgmma(c, a, b)                 c += a b^T, 16 columns of 64 rows each at the addresses a and b
//   luce_wgmma(c, words, b)             c += a b, a [16w.., 16] as luce_mma_f16 has it, 16 rows of 64 columns at b
//   luce_wgmma_transposed(c, words, b)  c += a b^T, 16 columns of 64 rows at b
//   luce_wgmma_wait()                   last: c holds the results
//
// or, to compute beside them, luce_wgmma_close() behind the products of a group, luce_wgmma_wait<N>() until at most the N
// newest groups run, and luce_wgmma_hold(c) before the first use of their results; also before the fence, where c gets the
// zeros that later groups begin with. Forms with words take an offset in bytes, a multiple of 16, from b on, and then whether
// c is added to or begins anew: the compiler lets nobody set zeros while other products run.
//
// Threads that wrote to shared memory, or waited for copies there, call luce_wgmma_share before the barrier.
//
// Groups of a block may run different code:
//   luce_sync_waves()                 luce_sync, though waves call it at different places
//   luce_wgmma_fewer_registers<N>()   a group gives back registers until its threads have N, a multiple of 8,
//   luce_wgmma_more_registers<N>()    and another group waits for them, and takes them
#if defined(LUCE_HOST)

__attribute__((noinline)) inline void luce_sync_waves() { luce_host_sync(); }  // for all callers one place
template <int N> LUCE_FN void luce_wgmma_fewer_registers() {}
template <int N> LUCE_FN void luce_wgmma_more_registers() {}
LUCE_FN void luce_wgmma_share() { luce_host_share(); }
LUCE_FN void luce_wgmma_fence() {}
LUCE_FN void luce_wgmma_close() {}
template <int N> LUCE_FN void luce_wgmma_wait() {}
LUCE_FN void luce_wgmma_wait() {}
template <typename T, int COUNT> LUCE_FN void luce_wgmma_hold(T (&)[COUNT][4]) {}
template <typename T> LUCE_FN float luce_wgmma_element(const void* from, int row, int column) {
    u64 at = (u64)from + row * 128 + column * 2;
    at ^= (at / 128 & 7) * 16;
    return luce_f32(*reinterpret_cast<const T*>(at));
}
template <typename T>
LUCE_FN void luce_wgmma_column(float (*c)[4], float upper, float lower, const void* b, int k, bool rows) {
    const int t = luce_lane() % 4 * 2;
    for (int i = 0; i < 16; i++) {
        const int n = i / 2 * 8 + t + i % 2;
        const float right = rows ? luce_wgmma_element<T>(b, k, n) : luce_wgmma_element<T>(b, n, k);
        c[i / 2][i % 2] = fmaf(upper, right, c[i / 2][i % 2]);
        c[i / 2][i % 2 + 2] = fmaf(lower, right, c[i / 2][i % 2 + 2]);
    }
}
template <typename T> LUCE_FN void luce_wgmma(float (*c)[4], const void* a, const void* b) {
    const int g = luce_wave() % 4 * 16 + luce_lane() / 4;
    for (int k = 0; k < 16; k++)
        luce_wgmma_column<T>(c, luce_wgmma_element<T>(a, g, k), luce_wgmma_element<T>(a, g + 8, k), b, k, false);
}
template <typename T>
LUCE_FN void luce_wgmma_words(float (*c)[4], const u32 (&a)[4], const u8* b, bool add, bool rows) {
    for (int i = 0; i < 32 && !add; i++) c[i / 4][i % 4] = 0.0f;
    for (int k = 0; k < 16; k++) {
        const int word = k / 8 * 2, lane = luce_lane() / 4 * 4 + k % 8 / 2, shift = k % 2 * 16;
        const float upper = luce_f32(T{(u16)(luce_shfl(a[word], lane) >> shift)});
        const float lower = luce_f32(T{(u16)(luce_shfl(a[word + 1], lane) >> shift)});
        luce_wgmma_column<T>(c, upper, lower, b, k, rows);
    }
}
template <typename T>
LUCE_FN void luce_wgmma(float (*c)[4], const u32 (&a)[4], const u8* b, int bytes = 0, bool add = true) {
    luce_wgmma_words<T>(c, a, b + bytes, add, true);
}
template <typename T>
LUCE_FN void luce_wgmma_transposed(float (*c)[4], const u32 (&a)[4], const u8* b, int bytes = 0, bool add = true) {
    luce_wgmma_words<T>(c, a, b + bytes, add, false);
}

#else

LUCE_FN void luce_sync_waves() { asm volatile("bar.sync 0;" ::: "memory"); }
template <int N> LUCE_FN void luce_wgmma_fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> LUCE_FN void luce_wgmma_more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
LUCE_FN void luce_wgmma_share() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
LUCE_FN void luce_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
LUCE_FN void luce_wgmma_close() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> LUCE_FN void luce_wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
LUCE_FN void luce_wgmma_wait() {
    luce_wgmma_close();
    luce_wgmma_wait<0>();
}
// Keeps the compiler from using c earlier.
template <int COUNT> LUCE_FN void luce_wgmma_hold(float (&c)[COUNT][4]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])::"memory");
}
template <int COUNT> LUCE_FN void luce_wgmma_hold(i32 (&c)[COUNT][4]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        asm volatile("" : "+r"(c[i][0]), "+r"(c[i][1]), "+r"(c[i][2]), "+r"(c[i][3])::"memory");
}
// The matrix's descriptor: 1024 bytes from eight rows to the next, chunks permuted within 128 bytes.
LUCE_FN u64 luce_wgmma_matrix(const void* at) {
    return (u64)((u32)__cvta_generic_to_shared(at) >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
#define LUCE_WGMMA_C                                                                                                 \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
    "%24, %25, %26, %27, %28, %29, %30, %31}"
#define LUCE_WGMMA_ROW(c) "+f"((c)[0]), "+f"((c)[1]), "+f"((c)[2]), "+f"((c)[3])
#define LUCE_WGMMA_ALL(c)                                                                                     \
    LUCE_WGMMA_ROW(c[0]), LUCE_WGMMA_ROW(c[1]), LUCE_WGMMA_ROW(c[2]), LUCE_WGMMA_ROW(c[3]), LUCE_WGMMA_ROW(c[4]), \
        LUCE_WGMMA_ROW(c[5]), LUCE_WGMMA_ROW(c[6]), LUCE_WGMMA_ROW(c[7])
template <typename T> LUCE_FN void luce_wgmma(float (*c)[4], const void* a, const void* b);
template <typename T>
LUCE_FN void luce_wgmma(float (*c)[4], const u32 (&a)[4], const u8* b, int bytes = 0, bool add = true);
template <typename T>
LUCE_FN void luce_wgmma_transposed(float (*c)[4], const u32 (&a)[4], const u8* b, int bytes = 0, bool add = true);
#define LUCE_WGMMA_WORDS(function, T, name, rows)                                                                   \
    template <> LUCE_FN void function<T>(float (*c)[4], const u32 (&a)[4], const u8* b, int bytes, bool add) {      \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." name       \
                     "." name " " LUCE_WGMMA_C ", {%32, %33, %34, %35}, %36, p, 1, 1, " rows ";}"                   \
                     : LUCE_WGMMA_ALL(c)                                                                            \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(luce_wgmma_matrix(b) + bytes / 16),          \
                       "r"((int)add));                                                                              \
    }
#define LUCE_WGMMA_TYPE(T, name)                                                                                    \
    template <> LUCE_FN void luce_wgmma<T>(float (*c)[4], const void* a, const void* b) {                           \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." name       \
                     "." name " " LUCE_WGMMA_C ", %32, %33, p, 1, 1, 0, 0;}"                                        \
                     : LUCE_WGMMA_ALL(c)                                                                            \
                     : "l"(luce_wgmma_matrix(a)), "l"(luce_wgmma_matrix(b)), "r"(1));                               \
    }                                                                                                               \
    LUCE_WGMMA_WORDS(luce_wgmma, T, name, "1")                                                                      \
    LUCE_WGMMA_WORDS(luce_wgmma_transposed, T, name, "0")
LUCE_WGMMA_TYPE(f16_t, "f16")
LUCE_WGMMA_TYPE(bf16_t, "bf16")

#endif

#endif
