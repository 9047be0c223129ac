// The layouts of K and V rows in the page pools: -DKTYPE=Q8_0 and -DVTYPE=F16 name two of the structs below.
//
//   offset(values)             elements from a pool's start to the value that many values precede, or to its block
//   store(row, i, value, own)  value i of a pool row (of all heads: their rows are side by side). Threads that call it
//                              come in groups of 32 neighbours for 32 neighbouring i; `own` is false past the row's end
//   load(at, column, words)    4 words with a head's 8 values from `column` on, a multiple of 8; `at` lies there
//   load(at, column)           one word with the values of `column`, an even one, and the next; `at` lies there
//   split(word, even, odd)     the two values of a word, exactly: a scale times an integer has at most 19 bits
//
// A word of zeros holds two zeros. Quant blocks of 32 values as in GGUF, with the scales and integers that the gguf
// package computes, each product rounded before the sum. Values must be finite.
#pragma once
#include "reduce.h"

#define KV_BLOCK 32
#define KV_FN static __device__ __forceinline__

// The words of a page's 16-bit floats, unchanged from memory.
template <typename T> struct KVFloat {
    typedef T Element;
    KV_FN i64 offset(i64 values) { return values; }
    KV_FN void store(T* row, int i, float value, bool own) {
        if (own) luce_store(row[i], value);
    }
    KV_FN void load(const T* at, int column, u32* words) {
        const uint4 all = *reinterpret_cast<const uint4*>(at);
        words[0] = all.x;
        words[1] = all.y;
        words[2] = all.z;
        words[3] = all.w;
    }
    KV_FN u32 load(const T* at, int column) { return *reinterpret_cast<const u32*>(at); }
    KV_FN void split(u32 word, float& even, float& odd) {
        even = luce_f32(T{(u16)word});
        odd = luce_f32(T{(u16)(word >> 16)});
    }
};
typedef KVFloat<f16_t> F16;
typedef KVFloat<bf16_t> BF16;

// Words of quantised rows: the block's scale as it is in the low half, the two integers in the high half's bytes.
LUCE_FN float kv_scale(u32 word) { return luce_f32(f16_t{(u16)word}); }

struct Q8_0 {
    typedef u8 Element;
    KV_FN i64 offset(i64 values) { return values / KV_BLOCK * 34; }
    KV_FN void store(u8* row, int i, float value, bool own) {
        float scale = luce_lane_max<KV_BLOCK>(fabsf(value)) / 127.0f;
        float scaled = value * (scale == 0.0f ? 0.0f : 1.0f / scale);
        // To nearest, halves away from zero, and without the last bit that adding 0.5 could round up.
        float size = fabsf(scaled), below = floorf(size);
        int rounded = (int)(below + floorf(2.0f * (size - below)));
        if (!own) return;
        u8* block = row + i / KV_BLOCK * 34;
        if (i % KV_BLOCK == 0) *reinterpret_cast<f16_t*>(block) = luce_f16(scale);
        block[2 + i % KV_BLOCK] = (u8)(scaled < 0.0f ? -rounded : rounded);
    }
    KV_FN void load(const u8* block, int column, u32* words) {
        u32 scale = luce_u16_at2(block);
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = scale | luce_u16_at2(block + 2 + column % KV_BLOCK + 2 * i) << 16;
    }
    KV_FN u32 load(const u8* block, int column) {
        return luce_u16_at2(block) | luce_u16_at2(block + 2 + column % KV_BLOCK) << 16;
    }
    KV_FN void split(u32 word, float& even, float& odd) {
        float scale = kv_scale(word);
        even = scale * (float)(i8)(word >> 16);
        odd = scale * (float)(i8)(word >> 24);
    }
};

struct Q4_0 {
    typedef u8 Element;
    KV_FN i64 offset(i64 values) { return values / KV_BLOCK * 18; }
    KV_FN void store(u8* row, int i, float value, bool own) {
        int lane = luce_lane() % KV_BLOCK;
        float top = luce_lane_max<KV_BLOCK>(fabsf(value));
        // Of several values with the largest magnitude, the first one's sign counts.
        int first = -luce_lane_max<KV_BLOCK>(fabsf(value) == top ? -lane : -KV_BLOCK + 1);
        float scale = luce_shfl(value, luce_lane() - lane + first) / -8.0f;
        float scaled = value * (scale == 0.0f ? 0.0f : 1.0f / scale);
        int level = luce_min((int)(scaled + 8.5f), 15);
        // Byte i of 16 holds values i (low bits) and i + 16 (high bits).
        int other = luce_shfl_xor(level, KV_BLOCK / 2);
        if (!own) return;
        u8* block = row + i / KV_BLOCK * 18;
        if (i % KV_BLOCK == 0) *reinterpret_cast<f16_t*>(block) = luce_f16(scale);
        if (i % KV_BLOCK < KV_BLOCK / 2) block[2 + i % KV_BLOCK] = (u8)(level | other << 4);
    }
    // The values of `column` and the next: both in the low bits of two bytes, or in the high ones.
    KV_FN u32 word(u32 scale, u32 bytes, int column) {
        return scale | (bytes >> (column % KV_BLOCK / (KV_BLOCK / 2) * 4) & 0x0f0fu) << 16;
    }
    KV_FN void load(const u8* block, int column, u32* words) {
        u32 scale = luce_u16_at2(block);
        const u8* from = block + 2 + column % (KV_BLOCK / 2);
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = word(scale, luce_u16_at2(from + 2 * i), column);
    }
    KV_FN u32 load(const u8* block, int column) {
        return word(luce_u16_at2(block), luce_u16_at2(block + 2 + column % (KV_BLOCK / 2)), column);
    }
    KV_FN void split(u32 word, float& even, float& odd) {
        float scale = kv_scale(word);
        even = scale * (float)((int)(word >> 16 & 15) - 8);
        odd = scale * (float)((int)(word >> 24) - 8);
    }
};
