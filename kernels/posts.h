// Numbers from blocks of a launch to one wave of its last block, through the second-level cache: in less time than from a launch
// to the next. For targets with LUCE_WGMMA (wgmma.h).
//
// Slots are words of global memory that hold EMPTY_SLOT before a launch, and again behind it: whoever takes a number leaves that.
// Every slot gets one number. As the wave waits in its place, the other blocks wait for nothing but earlier launches, and they
// come first.
//
//   luce_post(slot, value)          one thread of any block, behind luce_await
//   luce_take(slots, count, values) all lanes of the wave: waits for `count` slots; values[i] becomes that of number
//                                   luce_lane() + i * LUCE_LANES, and stays what it is from `count` on
//
// Neither orders other accesses.
#pragma once
#include "wgmma.h"

#if LUCE_WGMMA

#define EMPTY_SLOT 0xffffffffu  // a NaN that no operation makes; were one copied from an argument, luce_post would send another

#if defined(LUCE_HOST)

LUCE_FN void luce_send_slot(i32* slot, u32 bits) { luce_host_post(slot, bits); }
LUCE_FN u32 luce_ask_slot(i32* slot) { return luce_host_take(slot); }
LUCE_FN void luce_empty_slot(i32*) {}

#else

LUCE_FN void luce_send_slot(i32* slot, u32 bits) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(slot), "r"(bits) : "memory");
}
LUCE_FN u32 luce_ask_slot(i32* slot) {
    u32 bits;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(bits) : "l"(slot) : "memory");
    return bits;
}
LUCE_FN void luce_empty_slot(i32* slot) { luce_send_slot(slot, EMPTY_SLOT); }

#endif

LUCE_FN void luce_post(i32* slot, float value) {
    const u32 bits = __float_as_uint(value);
    luce_send_slot(slot, bits == EMPTY_SLOT ? 0x7fffffffu : bits);
}

template <int OWN> LUCE_FN void luce_take(i32* slots, int count, float (&values)[OWN]) {
    const int lane = luce_lane();
    u32 bits[OWN];
    bool missing;
    do {
        missing = false;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            if (lane + i * LUCE_LANES >= count) continue;
            bits[i] = luce_ask_slot(slots + lane + i * LUCE_LANES);
            missing = missing || bits[i] == EMPTY_SLOT;
        }
    } while (missing);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        if (lane + i * LUCE_LANES >= count) continue;
        luce_empty_slot(slots + lane + i * LUCE_LANES);
        values[i] = __uint_as_float(bits[i]);
    }
}

#endif
