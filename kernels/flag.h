// Flags in memory that the host and other devices see. What a thread has written there before luce_fence_system, or
// before it sets a flag itself, they find there once they see what is written behind it; what is read behind luce_flag
// was written before the flag was set.
#pragma once
#include "gpu.h"

#if defined(LUCE_HOST)

// One kernel runs at a time: only the compiler must not move accesses.
LUCE_FN void luce_fence_system() { asm volatile("" ::: "memory"); }
LUCE_FN u32 luce_flag(const u32* from) {
    u32 value = *(const volatile u32*)from;
    luce_fence_system();
    return value;
}
LUCE_FN void luce_set_flag(u32* to, u32 value) {
    luce_fence_system();
    *(volatile u32*)to = value;
}

#elif defined(__HIP__) || defined(__HIPCC__) || defined(__HIPCC_RTC__)

LUCE_FN void luce_fence_system() { __threadfence_system(); }
LUCE_FN u32 luce_flag(const u32* from) {
    return __hip_atomic_load(from, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}
LUCE_FN void luce_set_flag(u32* to, u32 value) {
    __hip_atomic_store(to, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}

#else  // CUDA

LUCE_FN void luce_fence_system() { __threadfence_system(); }
LUCE_FN u32 luce_flag(const u32* from) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
LUCE_FN void luce_set_flag(u32* to, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

#endif
