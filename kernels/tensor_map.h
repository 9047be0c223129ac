// Boxes of an array in global memory that the hardware's copy engine brings to shared memory. The host describes array and box
// (TensorMap of luce/runtime/device.py). For targets with LUCE_WGMMA (wgmma.h).
//
// The array is [rows, heads, columns] of 16-bit numbers, a box so many rows of one head as the map says, and 64 columns. In
// shared memory it lies from a multiple of 1024 on, as products read it (wgmma.h), which need no luce_wgmma_share for it.
// Columns beyond the array's are zeros.
//
//   LUCE_BY_VALUE const TensorMap map              a kernel's parameter
//   luce_gate_expect(gate, bytes)                  one thread arrives at a gate (gate.h), and its turn does not end before so
//                                                  many bytes of boxes have come
//   luce_box_load(to, map, column, head, row, gate)  then it brings a box, the first element of which is named
#pragma once
#include "gate.h"

#if LUCE_WGMMA

#if defined(LUCE_HOST)

extern "C" {
void luce_host_gate_expect(u64* gate, u32 bytes);
void luce_host_box_copy16(void* to, const void* from, bool valid, u64* gate);
}
#define LUCE_BY_VALUE
struct alignas(64) TensorMap {
    const u8* array;
    i64 row, head;  // bytes from one to the next
    int heads, columns;
    int rows;  // of a box
    u8 rest[88];
};
LUCE_FN void luce_gate_expect(Gate* gate, u32 bytes) { luce_host_gate_expect(gate, bytes); }
LUCE_FN void luce_box_load(void* to, const TensorMap* map, int column, int head, int row, Gate* gate) {
    for (int i = 0; i < map->rows; i++) {
        const u8* from = map->array + (row + i) * map->row + head * map->head;
        for (int chunk = 0; chunk < 8; chunk++) {
            const int first = column + chunk * 8;
            u8* const place = (u8*)to + i * 128 + ((chunk ^ i) & 7) * 16;
            luce_host_box_copy16(place, from + first * 2, first < map->columns, gate);
        }
    }
}

#else

#define LUCE_BY_VALUE __grid_constant__
struct alignas(64) TensorMap {
    u8 bytes[128];  // CUtensorMap
};
LUCE_FN void luce_gate_expect(Gate* gate, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(luce_bulk_at(gate)), "r"(bytes) : "memory");
}
LUCE_FN void luce_box_load(void* to, const TensorMap* map, int column, int head, int row, Gate* gate) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
            luce_bulk_at(to)),
        "l"(map), "r"(luce_bulk_at(gate)), "r"(column), "r"(head), "r"(row)
        : "memory");
}

#endif
#endif
