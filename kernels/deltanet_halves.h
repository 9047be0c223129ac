// Matrices of gated DeltaNet's chunks whose elements are sums of two fp16 numbers, 22 bits: delta_vectors and
// deltanet_prepare.cu write them, and deltanet_wgmma.cu multiplies them as they are.
//
// A square [64, 64] of fp16 numbers is laid out as wgmma.h has it. An image is squares of upper parts, then those of lower
// ones. Elements are at most 1, and multiplied by 2^12, so that lower parts lie in fp16's range.
#pragma once
#include "halves.h"

#define SQUARE (64 * 128)
#define IMAGE_SCALE 0x1p12f

// Bytes from a square's start to its elements (row, column) and on. Those to column + 8 i, for columns below 8, are ^ 16 i.
LUCE_FN u32 in_square(u32 row, u32 column) { return row * 128 + ((column / 8 ^ row % 8) * 8 + column % 8) * 2; }

template <typename T, int COUNT> struct alignas(COUNT * sizeof(T)) Parts {
    T at[COUNT];
};

// Sets COUNT elements of a row of an image, from a column on that is a multiple of COUNT; lower parts begin `lower` bytes behind
// the upper ones.
template <int COUNT> LUCE_FN void put_parts(u8* to, int lower, const float (&v)[COUNT]) {
    if constexpr (COUNT == 1) {
        u32 high, low;
        split_pair(high, low, v[0] * IMAGE_SCALE, 0.0f);
        *reinterpret_cast<u16*>(to) = (u16)high;
        *reinterpret_cast<u16*>(to + lower) = (u16)low;
    } else {
        Parts<u32, COUNT / 2> high, low;
#pragma unroll
        for (int i = 0; i < COUNT / 2; i++)
            split_pair(high.at[i], low.at[i], v[2 * i] * IMAGE_SCALE, v[2 * i + 1] * IMAGE_SCALE);
        *reinterpret_cast<Parts<u32, COUNT / 2>*>(to) = high;
        *reinterpret_cast<Parts<u32, COUNT / 2>*>(to + lower) = low;
    }
}

// Where what delta_chunks_wgmma reads lies, in pieces as it copies them: the images of keys and queries for each key head; for
// each value head those of T and M and the rows' gates, and V.
struct Images {
    static constexpr int CHUNK_ROWS = 64, HALVES = HEAD / 64;
    // Of keys or queries, and of T or M.
    static constexpr int VECTOR_BYTES = 2 * HALVES * SQUARE, SQUARE_BYTES = 2 * SQUARE;
    static constexpr int GATE_BYTES = CHUNK_ROWS * 16, HEAD_BYTES = 2 * SQUARE_BYTES + GATE_BYTES;
    int key_heads, heads;

    // A span's chunks are this one and on. Spans, whose rows follow each other, share none.
    static __device__ __forceinline__ int first(int start, int span) { return start / CHUNK_ROWS + span; }
    // Offset of the keys, which the queries follow.
    __device__ __forceinline__ i64 vectors(int chunk, int key_head) const {
        return ((i64)chunk * key_heads + key_head) * 2 * VECTOR_BYTES;
    }
    // Offset of T, which M follows, and M the gates.
    __device__ __forceinline__ i64 squares(int chunk, int head) const {
        return ((i64)chunk * heads + head) * HEAD_BYTES;
    }
    // Offset in floats of 64 columns of V, a row after the other.
    __device__ __forceinline__ i64 values(int chunk, int head, int half) const {
        return (((i64)chunk * heads + head) * HALVES + half) * (CHUNK_ROWS * 64);
    }
    // Where column x of a row of V lies: lanes that read two neighbouring rows' columns meet in no bank.
    static __device__ __forceinline__ u32 value_place(u32 row, u32 column) { return column ^ row / 2 % 4 * 8; }
};
