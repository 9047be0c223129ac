// GGUF block formats: -DQTYPE=Q4_K (any name below) picks one, and this header then defines how a row is read.
//
// A row is cut into units of UNIT elements, the piece that one thread unpacks at a time. A unit's elements are RUNS runs
// of RUN neighbours, STEP columns apart, because the low and the high bits of one byte belong to distant columns.
// Element e of unit u stands in column unit_column(u) + e / RUN * STEP + e % RUN.
//
// Formats as in the gguf package, and exactly its float32 values: each scale times its integers has at most 24
// significant bits, so these products are exact and it does not matter which of them a compiler fuses with an addition.
#pragma once
#include "gpu.h"

// The numbers are GGUF's.
#define F32 0
#define F16 1
#define Q4_0 2
#define Q4_1 3
#define Q5_0 6
#define Q5_1 7
#define Q8_0 8
#define Q2_K 10
#define Q3_K 11
#define Q4_K 12
#define Q5_K 13
#define Q6_K 14
#define IQ4_NL 20
#define IQ4_XS 23
#define BF16 30

#if QTYPE == F32
#define BLOCK 4  // not a block of the file: what a thread reads at once
#define BLOCK_BYTES 16
#elif QTYPE == F16 || QTYPE == BF16
#define BLOCK 8
#define BLOCK_BYTES 16
#elif QTYPE == Q4_0 || QTYPE == IQ4_NL
#define BLOCK 32
#define BLOCK_BYTES 18
#elif QTYPE == Q4_1
#define BLOCK 32
#define BLOCK_BYTES 20
#elif QTYPE == Q5_0
#define BLOCK 32
#define BLOCK_BYTES 22
#elif QTYPE == Q5_1
#define BLOCK 32
#define BLOCK_BYTES 24
#elif QTYPE == Q8_0
#define BLOCK 32
#define BLOCK_BYTES 34
#elif QTYPE == Q2_K
#define BLOCK 256
#define BLOCK_BYTES 84
#elif QTYPE == Q3_K
#define BLOCK 256
#define BLOCK_BYTES 110
#elif QTYPE == Q4_K
#define BLOCK 256
#define BLOCK_BYTES 144
#elif QTYPE == Q5_K
#define BLOCK 256
#define BLOCK_BYTES 176
#elif QTYPE == Q6_K
#define BLOCK 256
#define BLOCK_BYTES 210
#elif QTYPE == IQ4_XS
#define BLOCK 256
#define BLOCK_BYTES 136
#else
#error "QTYPE names no format"
#endif

#if BLOCK < 32
#define PLAIN 1  // elements are numbers of their own: a row may have any length, and its last unit may be cut short
#define RUNS 1
#define RUN BLOCK
#define STEP 0
#elif QTYPE == Q2_K || QTYPE == Q3_K || QTYPE == Q6_K
#define PLAIN 0
#define RUNS 4
#define RUN 4
#define STEP 32
#elif QTYPE == Q4_K || QTYPE == Q5_K
#define PLAIN 0
#define RUNS 2
#define RUN 8
#define STEP 32
#else
#define PLAIN 0
#define RUNS 2
#define RUN 8
#define STEP 16
#endif

#define UNIT (RUNS * RUN)
#define UNITS (BLOCK / UNIT)  // in a block; a power of two
#define SPAN (RUNS > 1 ? RUNS * STEP : UNIT)  // columns within which a unit's runs lie, shared by SPAN / UNIT units

LUCE_FN int row_units(int cols) { return luce_ceil_div(cols, UNIT); }

LUCE_FN i64 row_bytes(int cols) {
#if PLAIN
    return (i64)cols * (BLOCK_BYTES / BLOCK);
#else
    return (i64)(cols / BLOCK) * BLOCK_BYTES;
#endif
}

LUCE_FN int unit_column(int unit) {
    const int inner = SPAN / UNIT;
    return unit / inner * SPAN + unit % inner * RUN;
}

// Fields of blocks whose size is a multiple of 4 lie on multiples of 4 where they are read as 32 bits.
LUCE_FN u32 block_u32(const u8* from) {
#if BLOCK_BYTES % 4 == 0
    return luce_u32_at4(from);
#else
    return luce_u32_at2(from);
#endif
}

#if QTYPE == IQ4_NL || QTYPE == IQ4_XS
// The 16 levels as bytes of two words: a table in memory would cost a load per element.
LUCE_FN float level(u32 index) {
    const u64 low = 0xf6eaddcfbfad9881ull;   // -127 -104 -83 -65 -49 -35 -22 -10
    const u64 high = 0x7159453526190d01ull;  // 1 13 25 38 53 69 89 113
    return (float)(i8)((index < 8 ? low : high) >> (index % 8 * 8));
}
#endif

#if QTYPE == Q4_K || QTYPE == Q5_K
// Scale and minimum of 32 columns, 6 bits each in 12 bytes: the first four pairs whole, the upper two bits of the last
// four in what the first four leave free.
LUCE_FN void scale_min(const u8* scales, int index, float& scale, float& minimum) {
    if (index < 4) {
        scale = (float)(scales[index] & 63);
        minimum = (float)(scales[index + 4] & 63);
    } else {
        scale = (float)((scales[index + 4] & 15) | (scales[index - 4] >> 6) << 4);
        minimum = (float)((scales[index + 4] >> 4) | (scales[index] >> 6) << 4);
    }
}
#endif

// Unit `unit` of the row at `row` into w[UNIT]. `left` is the number of columns from the unit's first one to the row's
// end: beyond it plain formats give zeros and read nothing.
LUCE_FN void unpack(const u8* __restrict__ row, int unit, int left, float* __restrict__ w) {
    const u8* block = row + (i64)(unit / UNITS) * BLOCK_BYTES;
#if !PLAIN
    const int part = unit % UNITS;
#endif

#if PLAIN
    u32 words[4] = {0, 0, 0, 0};
    // Rows of odd length start where a 16-byte load would fault.
    if (left >= UNIT && (u64)block % 16 == 0) {
        const uint4 all = *reinterpret_cast<const uint4*>(block);
        words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
    } else {
#pragma unroll
        for (int e = 0; e < UNIT; e++) {
#if QTYPE == F32
            if (e < left) words[e] = luce_u32_at4(block + e * 4);
#else
            if (e < left) words[e / 2] |= luce_u16_at2(block + e * 2) << (e % 2 * 16);
#endif
        }
    }
#pragma unroll
    for (int e = 0; e < UNIT; e++) {
#if QTYPE == F32
        w[e] = __uint_as_float(words[e]);
#elif QTYPE == F16
        w[e] = luce_f32(f16_t{(u16)(words[e / 2] >> (e % 2 * 16))});
#else
        w[e] = luce_f32(bf16_t{(u16)(words[e / 2] >> (e % 2 * 16))});
#endif
    }

#elif QTYPE == Q8_0
    const float d = luce_f16_at2(block);
#pragma unroll
    for (int word = 0; word < UNIT / 4; word++) {
        const u32 bits = block_u32(block + 2 + word / 2 * 16 + part * 8 + word % 2 * 4);
#pragma unroll
        for (int i = 0; i < 4; i++) w[word * 4 + i] = d * (float)(i8)(bits >> 8 * i);
    }

#elif BLOCK == 32 || QTYPE == IQ4_XS
    // Byte i of 16 holds columns i (low bits) and i + 16 (high bits).
#if QTYPE == IQ4_XS
    const int group = part / 2;
    const u32 low_bits = block[4 + group / 2] >> (group % 2 * 4) & 15;
    const u32 high_bits = luce_u16_at2(block + 2) >> (group * 2) & 3;
    const float d = luce_f16_at2(block) * (float)((int)(low_bits | high_bits << 4) - 32);
    const u8* quants = block + 8 + group * 16 + part % 2 * 8;
#else
    const float d = luce_f16_at2(block);
    const u8* quants = block + (BLOCK_BYTES - 16) + part * 8;
#endif
#if QTYPE == Q4_1 || QTYPE == Q5_1
    const float m = luce_f16_at2(block + 2);
#endif
#if QTYPE == Q5_0 || QTYPE == Q5_1
    const u32 fifth = block_u32(block + (BLOCK_BYTES - 20)) >> (part * 8);
#endif
#pragma unroll
    for (int word = 0; word < 2; word++) {
        const u32 bits = block_u32(quants + word * 4);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int e = word * 4 + i;
            u32 low = bits >> 8 * i & 15;
            u32 high = bits >> (8 * i + 4) & 15;
#if QTYPE == Q5_0 || QTYPE == Q5_1
            low |= (fifth >> e & 1) << 4;
            high |= (fifth >> (e + 16) & 1) << 4;
#endif
#if QTYPE == Q4_0
            w[e] = d * (float)((int)low - 8);
            w[e + 8] = d * (float)((int)high - 8);
#elif QTYPE == Q5_0
            w[e] = d * (float)((int)low - 16);
            w[e + 8] = d * (float)((int)high - 16);
#elif QTYPE == Q4_1 || QTYPE == Q5_1
            w[e] = d * (float)low + m;
            w[e + 8] = d * (float)high + m;
#else
            w[e] = d * level(low);
            w[e + 8] = d * level(high);
#endif
        }
    }

#elif QTYPE == Q4_K || QTYPE == Q5_K
    const int group = part / 4;  // of 64 columns: low bits are the first 32
    const int at = part % 4 * 8;
    const float d = luce_f16_at2(block);
    const float dmin = luce_f16_at2(block + 2);
    float scale[2], minimum[2];
#pragma unroll
    for (int run = 0; run < 2; run++) {
        scale_min(block + 4, group * 2 + run, scale[run], minimum[run]);
        scale[run] *= d;
        minimum[run] *= dmin;
    }
#pragma unroll
    for (int word = 0; word < 2; word++) {
        const u32 bits = block_u32(block + (BLOCK_BYTES - 128) + group * 32 + at + word * 4);
#if QTYPE == Q5_K
        const u32 fifth = block_u32(block + 16 + at + word * 4) >> (group * 2);
#endif
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 low = bits >> 8 * i & 15;
            u32 high = bits >> (8 * i + 4) & 15;
#if QTYPE == Q5_K
            low |= (fifth >> 8 * i & 1) << 4;
            high |= (fifth >> (8 * i + 1) & 1) << 4;
#endif
            w[word * 4 + i] = scale[0] * (float)low - minimum[0];
            w[8 + word * 4 + i] = scale[1] * (float)high - minimum[1];
        }
    }

#else  // Q2_K, Q3_K, Q6_K: halves of 128 columns; a byte serves columns 32 apart
    const int half = part / 8;
    const int at = part % 8 * 4;
    const int first_scale = half * 8 + at / 16;  // run r has scale first_scale + 2 r
#if QTYPE == Q2_K
    const float d = luce_f16_at2(block + 80);
    const float dmin = luce_f16_at2(block + 82);
    const u32 bits = block_u32(block + 16 + half * 32 + at);
#elif QTYPE == Q3_K
    const float d = luce_f16_at2(block + 108);
    const u32 bits = block_u32(block + 32 + half * 32 + at);
    const u32 third = block_u32(block + at) >> (half * 4);
#else
    const float d = luce_f16_at2(block + 208);
    const u32 first = block_u32(block + half * 64 + at);
    const u32 second = block_u32(block + half * 64 + 32 + at);
    const u32 upper = block_u32(block + 128 + half * 32 + at);
#endif
#pragma unroll
    for (int run = 0; run < 4; run++) {
        const int index = first_scale + run * 2;
#if QTYPE == Q2_K
        const float scale = d * (float)(block[index] & 15);
        const float minimum = dmin * (float)(block[index] >> 4);
#elif QTYPE == Q3_K
        const u32 low_bits = block[96 + index % 8] >> (index / 8 * 4) & 15;
        const u32 high_bits = block[104 + index % 4] >> (index / 4 * 2) & 3;
        const float scale = d * (float)((int)(low_bits | high_bits << 4) - 32);
#else
        const float scale = d * (float)(i8)block[192 + index];
#endif
#pragma unroll
        for (int i = 0; i < 4; i++) {
#if QTYPE == Q2_K
            w[run * 4 + i] = scale * (float)(bits >> (8 * i + 2 * run) & 3) - minimum;
#elif QTYPE == Q3_K
            const int q = (int)(bits >> (8 * i + 2 * run) & 3) - (third >> (8 * i + run) & 1 ? 0 : 4);
            w[run * 4 + i] = scale * (float)q;
#else
            const u32 low_bits = (run % 2 ? second : first) >> (8 * i + run / 2 * 4) & 15;
            const u32 high_bits = upper >> (8 * i + 2 * run) & 3;
            w[run * 4 + i] = scale * (float)((int)(low_bits | high_bits << 4) - 32);
#endif
        }
    }
#endif
}
