// Matrix products of a wave, and copies to shared memory that run beside the arithmetic.
//
// LUCE_MMA_F16 is 1 if the target multiplies tiles of fp16 in hardware: CUDA from sm_75 on, and the host at 32 lanes,
// which emulates it by shuffles. LUCE_MMA_TF32 is 1 if it does so for floats cut to 11 significant bits: CUDA from
// sm_80 on, and the host at 32 lanes; LUCE_MMA_S8 for int8, on the same targets. Elsewhere they are 0, and kernels take
// their portable path.
#pragma once
#include "gpu.h"

#if defined(LUCE_HOST)
#define LUCE_MMA_F16 (LUCE_LANES == 32)
#define LUCE_MMA_TF32 (LUCE_LANES == 32)
#elif defined(__HIP__) || defined(__HIPCC__) || defined(__HIPCC_RTC__)
#define LUCE_MMA_F16 0
#define LUCE_MMA_TF32 0
#else
#define LUCE_MMA_F16 1
#define LUCE_MMA_TF32 (__CUDA_ARCH__ >= 800)
#endif
#define LUCE_MMA_S8 LUCE_MMA_TF32

// Two floats as fp16 in one word, `low` in its lower bits; to nearest, ties to even, beyond 65504 to infinity.
LUCE_FN u32 luce_f16_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return (u32)luce_f16(low).bits | (u32)luce_f16(high).bits << 16;
#endif
}

// The fp16 number in the lower 16 bits of `word` times its bytes 2 and 3, each less `zero` (at most 255): a pair of
// fp16 numbers, each product rounded to nearest.
LUCE_FN u32 luce_f16_scaled(u32 word, int zero) {
#if defined(__CUDA_ARCH__)
    // A byte below the high byte of 1024 is the fp16 number 1024 + byte; its difference to 1024 + zero is exact.
    u32 pair = __byte_perm(word, 0x64646464u, 0x4342), offset = 0x64006400u + (u32)zero * 0x10001u;
    u32 scale = __byte_perm(word, 0, 0x1010);
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(pair), "r"(offset));
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(pair), "r"(scale));
    return pair;
#else
    const float scale = luce_f32(f16_t{(u16)word});
    return luce_f16_pair(scale * (float)((int)(word >> 16 & 255) - zero), scale * (float)((int)(word >> 24) - zero));
#endif
}

// Byte `i` of `word` as fp16, twice.
LUCE_FN u32 luce_f16_twice(u32 word, int i) {
#if defined(__CUDA_ARCH__)
    u32 pair = __byte_perm(word, 0x64646464u, 0x4040u | (u32)i * 0x101u);  // 1024 + byte
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(pair), "r"(0x64006400u));
    return pair;
#else
    return (u32)luce_f16((float)(word >> i * 8 & 255)).bits * 0x10001u;
#endif
}

// Two floats as bfloat16 of one word, as luce_f16_pair.
LUCE_FN u32 luce_bf16_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return (u32)luce_bf16(low).bits | (u32)luce_bf16(high).bits << 16;
#endif
}

// 2^x within two units in the last place, 0 below 2^-126.
LUCE_FN float luce_exp2(float x) {
#if defined(__CUDA_ARCH__)
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return exp2f(x);
#endif
}

// 1 / x within one unit in the last place, 0 below 2^-126.
LUCE_FN float luce_reciprocal(float x) {
#if defined(__CUDA_ARCH__)
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return 1.0f / x;
#endif
}

#if LUCE_MMA_F16

// c += a b: a [16, 16] and b [16, 8] in fp16, c [16, 8] in float. The wave's 32 lanes share them: with g = lane / 4 and
// t = lane % 4, a lane holds
//   a[0] = rows g,     columns 2t, 2t + 1      b[0] = rows 2t, 2t + 1,         column g
//   a[1] = rows g + 8, columns 2t, 2t + 1      b[1] = rows 2t + 8, 2t + 9,     column g
//   a[2] = rows g,     columns 2t + 8, 2t + 9
//   a[3] = rows g + 8, columns 2t + 8, 2t + 9
//   c[0], c[1] = row g, columns 2t, 2t + 1     c[2], c[3] = row g + 8, the same columns
// The lower half of a word comes first. The hardware chooses the order in which an element's 16 products are added; it
// does not depend on the other elements.
#if defined(LUCE_HOST) || __CUDA_ARCH__ < 800

// By shuffles: for tests, and for bfloat16 before sm_80, where it only has to compile.
#if defined(LUCE_HOST)
template <typename T> LUCE_FN void luce_mma_shuffled(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#else
template <typename T>
static __device__ __noinline__ void luce_mma_shuffled(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#endif
    const int g = luce_lane() / 4, t = luce_lane() % 4;
    const u64 upper = (u64)a[0] | (u64)a[2] << 32, lower = (u64)a[1] | (u64)a[3] << 32;
    const u64 columns = (u64)b[0] | (u64)b[1] << 32;
    u64 x[2][4], y[2][4];
    for (int i = 0; i < 4; i++) {
        x[0][i] = luce_shfl(upper, g * 4 + i);
        x[1][i] = luce_shfl(lower, g * 4 + i);
        y[0][i] = luce_shfl(columns, t * 8 + i);
        y[1][i] = luce_shfl(columns, t * 8 + 4 + i);
    }
    for (int e = 0; e < 4; e++) {
        for (int k = 0; k < 16; k++) {
            const int at = k / 8 * 32 + k % 2 * 16;
            const float left = luce_f32(T{(u16)(x[e / 2][k % 8 / 2] >> at)});
            const float right = luce_f32(T{(u16)(y[e % 2][k % 8 / 2] >> at)});
            c[e] = fmaf(left, right, c[e]);
        }
    }
}

#endif

#if defined(LUCE_HOST)

LUCE_FN void luce_mma_f16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) { luce_mma_shuffled<f16_t>(c, a, b); }

#else

LUCE_FN void luce_mma_f16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#pragma unroll
    for (int half = 0; half < 2; half++) {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[half * 2]), "r"(a[half * 2 + 1]), "r"(b[half]));
    }
#endif
}

#endif

// The first eight columns of a, and rows of b, alone: c += a b with a [16, 8] in a[0], a[1] and b [8, 8] in b.
LUCE_FN void luce_mma_f16_8(float (&c)[4], const u32 (&a)[2], u32 b) {
#if defined(LUCE_HOST)
    const u32 left[4] = {a[0], a[1], 0, 0}, right[2] = {b, 0};
    luce_mma_shuffled<f16_t>(c, left, right);
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
#endif
}

// The same of bfloat16.
LUCE_FN void luce_mma_bf16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    luce_mma_shuffled<bf16_t>(c, a, b);
#endif
}

// Four matrices of 8 rows of 16 bytes in shared memory: lane 8i + j passes the address of row j of matrix i. In to[i] a
// lane gets the words t of row g of matrix i; transposed, the 16-bit numbers g of rows 2t and 2t + 1.
LUCE_FN void luce_ldmatrix(u32 (&to)[4], const void* row) {
#if defined(LUCE_HOST)
    const int g = luce_lane() / 4, t = luce_lane() % 4;
    for (int i = 0; i < 4; i++) to[i] = reinterpret_cast<const u32*>(luce_shfl((u64)row, i * 8 + g))[t];
#else
    const u32 at = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at));
#endif
}
LUCE_FN void luce_ldmatrix_transposed(u32 (&to)[4], const void* row) {
#if defined(LUCE_HOST)
    const int g = luce_lane() / 4, t = luce_lane() % 4;
    for (int i = 0; i < 4; i++) {
        const u16* low = reinterpret_cast<const u16*>(luce_shfl((u64)row, i * 8 + 2 * t));
        const u16* high = reinterpret_cast<const u16*>(luce_shfl((u64)row, i * 8 + 2 * t + 1));
        to[i] = (u32)low[g] | (u32)high[g] << 16;
    }
#else
    const u32 at = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at));
#endif
}

#endif

#if LUCE_MMA_TF32

// c += a b: a [16, 8] and b [8, 8] in floats whose lower 13 bits do not count, c [16, 8] in float. With g and t as
// above, a lane holds
//   a[0] = row g,     column t        b[0] = row t,     column g
//   a[1] = row g + 8, column t        b[1] = row t + 4, column g
//   a[2] = row g,     column t + 4
//   a[3] = row g + 8, column t + 4
// and of c the same as above.
#if defined(LUCE_HOST)

LUCE_FN void luce_mma_tf32(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
    // Two floats as a shuffle takes them, without the bits that do not count.
    const auto pair = [](float low, float high) {
        return (u64)(__float_as_uint(low) & 0xffffe000u) | (u64)(__float_as_uint(high) & 0xffffe000u) << 32;
    };
    const int g = luce_lane() / 4, t = luce_lane() % 4;
    float x[2][8], y[2][8];
    for (int half = 0; half < 2; half++) {
        const u64 row = pair(a[half], a[half + 2]), column = pair(b[0], b[1]);
        for (int i = 0; i < 4; i++) {
            const u64 left = luce_shfl(row, g * 4 + i), right = luce_shfl(column, (t * 2 + half) * 4 + i);
            x[half][i] = __uint_as_float((u32)left), x[half][i + 4] = __uint_as_float((u32)(left >> 32));
            y[half][i] = __uint_as_float((u32)right), y[half][i + 4] = __uint_as_float((u32)(right >> 32));
        }
    }
    for (int e = 0; e < 4; e++)
        for (int k = 0; k < 8; k++) c[e] = fmaf(x[e / 2][k], y[e % 2][k], c[e]);
}

#else

LUCE_FN void luce_mma_tf32(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

#endif
#endif

#if LUCE_MMA_S8

// c = a b + start in int32: a [16, 32] and b [32, 8] signed bytes, c [16, 8], `start` added to every element. The
// wave's 32 lanes share them: with g = lane / 4 and t = lane % 4, a lane holds
//   a[0] = row g,     columns 4t .. 4t + 3           b[0] = rows 4t .. 4t + 3,           column g
//   a[1] = row g + 8, columns 4t .. 4t + 3           b[1] = rows 4t + 16 .. 4t + 19,     column g
//   a[2] = row g,     columns 4t + 16 .. 4t + 19
//   a[3] = row g + 8, columns 4t + 16 .. 4t + 19
//   c[0], c[1] = row g, columns 2t, 2t + 1           c[2], c[3] = row g + 8, the same columns
// Integer sums are exact in any order: results have the same bits as a portable path's. The lowest byte of a word comes
// first. luce_mma_s8_16 is half of it: a [16, 16] in a[0], a[1], b [16, 8] in b.
#if defined(LUCE_HOST)

LUCE_FN void luce_mma_s8_16(i32 (&c)[4], const u32 (&a)[2], u32 b, i32 start) {
    const int g = luce_lane() / 4, t = luce_lane() % 4;
    const u64 rows = (u64)a[0] | (u64)a[1] << 32;
    for (int i = 0; i < 4; i++) c[i] = start;
    for (int i = 0; i < 4; i++) {
        const u64 x = luce_shfl(rows, g * 4 + i);
        const i32 even = (i32)luce_shfl(b, t * 8 + i), odd = (i32)luce_shfl(b, t * 8 + 4 + i);
        c[0] = luce_dot4((i32)x, even, c[0]);
        c[1] = luce_dot4((i32)x, odd, c[1]);
        c[2] = luce_dot4((i32)(x >> 32), even, c[2]);
        c[3] = luce_dot4((i32)(x >> 32), odd, c[3]);
    }
}

LUCE_FN void luce_mma_s8_32(i32 (&c)[4], const u32 (&a)[4], const u32 (&b)[2], i32 start) {
    const u32 first[2] = {a[0], a[1]}, second[2] = {a[2], a[3]};
    i32 more[4];
    luce_mma_s8_16(c, first, b[0], start);
    luce_mma_s8_16(more, second, b[1], 0);
    for (int i = 0; i < 4; i++) c[i] += more[i];
}

#else

LUCE_FN void luce_mma_s8_16(i32 (&c)[4], const u32 (&a)[2], u32 b, i32 start) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b), "r"(start));
}

LUCE_FN void luce_mma_s8_32(i32 (&c)[4], const u32 (&a)[4], const u32 (&b)[2], i32 start) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %10, %10, %10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(start));
}

#endif
#endif

// An address in shared memory that the compiler keeps in a register, where it would make it again before each copy.
LUCE_FN u8* luce_held(u8* shared) {
#if defined(__CUDA_ARCH__)
    u32 at = (u32)__cvta_generic_to_shared(shared);
    asm volatile("" : "+r"(at));
    return (u8*)__cvta_shared_to_generic(at);
#else
    return shared;
#endif
}

// Copies 16 bytes to shared memory, or zeros if not `valid`; both addresses are multiples of 16. The copy is visible
// to the thread that asked for it after luce_copy_wait<N>, to the others after a further barrier.
LUCE_FN void luce_copy16(void* to, const void* from, bool valid) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    const u32 at = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(valid ? 16 : 0) : "memory");
#elif defined(LUCE_HOST)
    luce_host_copy16(to, from, valid);
#else
    *reinterpret_cast<uint4*>(to) = valid ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
#endif
}

// The same of 4 bytes, whose addresses are multiples of 4.
LUCE_FN void luce_copy4(void* to, const void* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    const u32 at = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(from) : "memory");
#elif defined(LUCE_HOST)
    luce_host_copy4(to, from);
#else
    *reinterpret_cast<u32*>(to) = *reinterpret_cast<const u32*>(from);
#endif
}

// Closes the group of the copies that this thread asked for since the last call.
LUCE_FN void luce_copy_close() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#elif defined(LUCE_HOST)
    luce_host_copy_close();
#endif
}

// Waits until at most the N newest groups of this thread are in flight.
template <int N> LUCE_FN void luce_copy_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#elif defined(LUCE_HOST)
    luce_host_copy_wait(N);
#endif
}
