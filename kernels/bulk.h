// Copies of contiguous pieces between global and shared memory by the hardware's copy engine: the threads neither wait for
// them nor hold them in registers. For targets with LUCE_WGMMA (wgmma.h). Addresses and sizes are multiples of 16.
//
// A wave's first lanes ask for copies, as many times each; the first one waits for what it stored. A Bulk in shared memory tells
// the wave that a load has arrived.
//
//   luce_bulk_begin(bulk, pieces = 1)     before its first load, of so many copies; then, behind the last one of these calls,
//   luce_bulk_ready()                     before the first load, and a barrier before the first wait
//   luce_bulk_load(to, from, bytes, bulk) a piece to shared memory; `bytes` may be 0. Every load of a Bulk is waited for before
//                                         the next one
//   luce_bulk_wait(bulk, turn)            all lanes: until its load number `turn` % 2 has arrived
//   luce_bulk_prefetch(from, bytes)       to the second-level cache alone; nothing waits for it
//   luce_bulk_share()                     lanes that wrote what is to be stored, before a luce_sync_lanes
//   luce_bulk_store(to, from, bytes)      from shared memory
//   luce_bulk_wait_read<N>()              until shared memory has been read for all but the N newest stores; before a block
//                                         ends, for all
#pragma once
#include "wgmma.h"

#if LUCE_WGMMA

typedef u64 Bulk;

#if defined(LUCE_HOST)

LUCE_FN void luce_bulk_begin(Bulk* bulk, u32 pieces = 1) { luce_host_bulk_begin(bulk, pieces); }
LUCE_FN void luce_bulk_ready() {}
LUCE_FN void luce_bulk_load(void* to, const void* from, u32 bytes, Bulk* bulk) {
    for (u32 i = 0; i < bytes; i += 16) luce_host_bulk_copy16((u8*)to + i, (const u8*)from + i, bulk);
    luce_host_bulk_close(bulk);
}
LUCE_FN void luce_bulk_wait(Bulk* bulk, int turn) {
    luce_host_bulk_wait(bulk, turn);
    luce_sync_lanes();
}
LUCE_FN void luce_bulk_prefetch(const void*, u32) {}
LUCE_FN void luce_bulk_share() {}
LUCE_FN void luce_bulk_store(void* to, const void* from, u32 bytes) {
    for (u32 i = 0; i < bytes; i += 16) luce_host_store16((u8*)to + i, (const u8*)from + i);
    luce_host_store_close();
}
template <int N> LUCE_FN void luce_bulk_wait_read() { luce_host_store_wait(N); }

#else

LUCE_FN u32 luce_bulk_at(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }
LUCE_FN void luce_bulk_begin(Bulk* bulk, u32 pieces = 1) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(luce_bulk_at(bulk)), "r"(pieces) : "memory");
}
LUCE_FN void luce_bulk_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
LUCE_FN void luce_bulk_load(void* to, const void* from, u32 bytes, Bulk* bulk) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(luce_bulk_at(bulk)), "r"(bytes) : "memory");
    if (bytes == 0) return;
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     luce_bulk_at(to)),
                 "l"(from), "r"(bytes), "r"(luce_bulk_at(bulk))
                 : "memory");
}
LUCE_FN void luce_bulk_wait(Bulk* bulk, int turn) {
    u32 arrived;
    do {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(arrived)
                     : "r"(luce_bulk_at(bulk)), "r"(turn & 1)
                     : "memory");
    } while (!arrived);
}
LUCE_FN void luce_bulk_prefetch(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
LUCE_FN void luce_bulk_share() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
LUCE_FN void luce_bulk_store(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2; cp.async.bulk.commit_group;" ::"l"(to),
                 "r"(luce_bulk_at(from)), "r"(bytes)
                 : "memory");
}
template <int N> LUCE_FN void luce_bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory"); }

#endif
#endif
