// Gates in shared memory, by which some waves of a block wait for others. For targets with LUCE_WGMMA (wgmma.h).
//
// A gate's turn ends when as many arrivals as luce_gate_begin named have come; the next turn begins at once. What a thread
// did before its arrival is done for all that waited for the end of that turn. Products (wgmma) read shared memory past that
// order: who wrote there calls luce_wgmma_share before it arrives.
//
//   luce_gate_begin(gate, count)  one thread; then, behind the last one of these calls,
//   luce_gate_ready()             and a barrier before the first use
//   luce_gate_arrive(gate)
//   luce_gate_wait(gate, turn)    until turn number `turn`, of which the lowest bit counts, has ended; the one before it must
//                                 have. The turn before the first one, -1, has
#pragma once
#include "bulk.h"

#if LUCE_WGMMA

typedef u64 Gate;

#if defined(LUCE_HOST)

LUCE_FN void luce_gate_begin(Gate* gate, int count) { luce_host_gate_begin(gate, count); }
LUCE_FN void luce_gate_ready() {}
LUCE_FN void luce_gate_arrive(Gate* gate) { luce_host_gate_arrive(gate); }
LUCE_FN void luce_gate_wait(Gate* gate, int turn) { luce_host_gate_wait(gate, turn); }

#else

LUCE_FN void luce_gate_begin(Gate* gate, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(luce_bulk_at(gate)), "r"(count) : "memory");
}
LUCE_FN void luce_gate_ready() { luce_bulk_ready(); }
LUCE_FN void luce_gate_arrive(Gate* gate) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(luce_bulk_at(gate)) : "memory");
}
LUCE_FN void luce_gate_wait(Gate* gate, int turn) { luce_bulk_wait(gate, turn); }

#endif
#endif
