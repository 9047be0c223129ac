// Clusters: a few neighbouring blocks in x that run at the same time, and of which all send numbers to the last one, the
// leader. For targets with LUCE_WGMMA (wgmma.h).
//
//   LUCE_CLUSTER(blocks)                  beside __launch_bounds__; the grid's x is a multiple of `blocks`
//   luce_cluster_begin(arrived, bytes)    one thread of the leader, before the next call: so many bytes will be sent
//   luce_cluster_arrive()                 every thread of the cluster, once; or luce_cluster_arrive_behind_reads(), where
//                                         what others read before may be overwritten behind the next call
//   luce_cluster_wait<blocks>()           every thread, later, before a luce_cluster_send: all have arrived
//   luce_cluster_send(to, value, arrived) to the leader's shared memory, addresses in the sender's own; from any block
//   luce_cluster_receive<blocks>(arrived) lanes of the leader: until all bytes have arrived. So all that the senders
//                                         needed for them has been read
#pragma once
#include "bulk.h"

#if LUCE_WGMMA

#if defined(LUCE_HOST)

#define LUCE_CLUSTER(blocks)
LUCE_FN void luce_cluster_begin(Bulk*, u32 bytes) { luce_host_cluster_begin(bytes); }
LUCE_FN void luce_cluster_arrive() { luce_host_cluster_arrive(false); }
LUCE_FN void luce_cluster_arrive_behind_reads() { luce_host_cluster_arrive(true); }
template <int BLOCKS> LUCE_FN void luce_cluster_wait() { luce_host_cluster_wait(BLOCKS); }
template <int BLOCKS> LUCE_FN void luce_cluster_send(float* to, float value, Bulk*) {
    luce_host_cluster_send(to, __float_as_uint(value));
}
template <int BLOCKS> LUCE_FN void luce_cluster_receive(Bulk*) { luce_host_cluster_receive(BLOCKS); }

#else

#define LUCE_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
LUCE_FN void luce_cluster_begin(Bulk* arrived, u32 bytes) {
    luce_bulk_begin(arrived);
    luce_bulk_ready();
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(luce_bulk_at(arrived)), "r"(bytes) : "memory");
}
LUCE_FN void luce_cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
LUCE_FN void luce_cluster_arrive_behind_reads() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
template <int BLOCKS> LUCE_FN void luce_cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
template <int BLOCKS> LUCE_FN void luce_cluster_send(float* to, float value, Bulk* arrived) {
    asm volatile(
        "{.reg .b32 a, b; mapa.shared::cluster.u32 a, %0, %3; mapa.shared::cluster.u32 b, %1, %3;"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [a], %2, [b];}" ::"r"(luce_bulk_at(to)),
        "r"(luce_bulk_at(arrived)), "r"(__float_as_uint(value)), "n"(BLOCKS - 1)
        : "memory");
}
template <int BLOCKS> LUCE_FN void luce_cluster_receive(Bulk* arrived) { luce_bulk_wait(arrived, 0); }

#endif
#endif
