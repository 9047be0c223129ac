// Matrices of gated DeltaNet's chunks whose elements are sums of two fp16 numbers, 22 bits: delta_prepare writes them, and
// deltanet_wgmma.cu multiplies them as they are.
//
// A square [64, 64] of fp16 numbers is laid out as wgmma.h has it. An image is squares of upper parts, then those of lower
// ones. Elements are at most 1, and multiplied by 2^12, so that lower parts lie in fp16's range.
#pragma once
#include "halves.h"

#define SQUARE (64 * 128)
#define IMAGE_SCALE 0x1p12f

// Bytes from a square's start to its elements (row, column) and on, column even.
LUCE_FN int in_square(int row, int column) { return row * 128 + ((column / 8 ^ row % 8) * 8 + column % 8) * 2; }

// Sets elements (row, column) and (row, column + 1) of an image whose lower parts begin `lower` bytes behind the upper.
LUCE_FN void put_pair(u8* image, int lower, int row, int column, float a, float b) {
    u32 high, low;
    split_pair(high, low, a * IMAGE_SCALE, b * IMAGE_SCALE);
    u32* to = reinterpret_cast<u32*>(image + in_square(row, column));
    to[0] = high, to[lower / 4] = low;
}

// Sets eight elements of a row, from a multiple of eight on.
LUCE_FN void put_eight(u8* image, int lower, int row, int column, const float* from) {
    uint4 high, low;
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = from[i] * IMAGE_SCALE;
    split_pair(high.x, low.x, v[0], v[1]);
    split_pair(high.y, low.y, v[2], v[3]);
    split_pair(high.z, low.z, v[4], v[5]);
    split_pair(high.w, low.w, v[6], v[7]);
    uint4* to = reinterpret_cast<uint4*>(image + in_square(row, column));
    to[0] = high, to[lower / 16] = low;
}

// Where the images of chunks lie: those of its keys and queries for each key head, of T and M for each value head.
struct Images {
    // Of keys or queries, and of T or M.
    static constexpr int VECTOR_BYTES = 2 * (HEAD / 64) * SQUARE, SQUARE_BYTES = 2 * SQUARE;
    int key_heads, heads;

    // A span's chunks are this one and on. Spans, whose rows follow each other, share none.
    static __device__ __forceinline__ int first(int start, int span) { return start / 64 + span; }
    // Offset of the keys, which the queries follow.
    __device__ __forceinline__ i64 vectors(int chunk, int key_head) const {
        return ((i64)chunk * key_heads + key_head) * 2 * VECTOR_BYTES;
    }
    // Offset of T, which M follows.
    __device__ __forceinline__ i64 squares(int chunk, int head) const {
        return ((i64)chunk * heads + head) * 2 * SQUARE_BYTES;
    }
};
