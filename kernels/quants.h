// GGUF block formats: -DQTYPE=Q4_K (any name below) picks one, and this header then defines how a row is read.
//
// A row is cut into units of UNIT elements, the piece that one thread unpacks at a time: as many as 16 neighbouring
// bytes hold. A unit's elements are RUNS runs of RUN neighbours, STEP columns apart, because the low and the high bits
// of one byte belong to distant columns. Element e of unit u stands in column unit_column(u) + e / RUN * STEP + e %
// RUN.
//
// `fetch` loads a unit as it is in memory, `unpack_run` dequantises a run of it, `unpack` does both. A kernel that
// fetches early computes while the loads are in flight.
//
// Formats as in the gguf package, and exactly its float32 values for finite scales: each scale times its integers has
// at most 24 significant bits, so these products are exact, and fused with an addition they give the same value.
#ifndef QUANTS_H
#define QUANTS_H
#include "quants_scaled.h"

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
#define IQ2_XXS 16
#define IQ2_XS 17
#define IQ3_XXS 18
#define IQ1_S 19
#define IQ4_NL 20
#define IQ3_S 21
#define IQ2_S 22
#define IQ4_XS 23
#define IQ1_M 29
#define BF16 30
#define TQ1_0 34
#define TQ2_0 35
#define MXFP4 39
#define NVFP4 40

#if QTYPE == F32
#define BLOCK 4  // not a block of the file: the values that a thread reads at once
#define BLOCK_BYTES 16
#elif QTYPE == F16 || QTYPE == BF16
#define BLOCK 8
#define BLOCK_BYTES 16
#elif QTYPE == Q4_0 || QTYPE == IQ4_NL
#define BLOCK 32
#define BLOCK_BYTES 18
#elif QTYPE == MXFP4
#define BLOCK 32
#define BLOCK_BYTES 17
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
#elif QTYPE == IQ1_S
#define BLOCK 256
#define BLOCK_BYTES 50
#elif QTYPE == IQ1_M
#define BLOCK 256
#define BLOCK_BYTES 56
#elif QTYPE == IQ2_XXS
#define BLOCK 256
#define BLOCK_BYTES 66
#elif QTYPE == IQ2_XS
#define BLOCK 256
#define BLOCK_BYTES 74
#elif QTYPE == IQ2_S
#define BLOCK 256
#define BLOCK_BYTES 82
#elif QTYPE == IQ3_XXS
#define BLOCK 256
#define BLOCK_BYTES 98
#elif QTYPE == IQ3_S
#define BLOCK 256
#define BLOCK_BYTES 110
#elif QTYPE == TQ1_0
#define BLOCK 256
#define BLOCK_BYTES 54
#elif QTYPE == TQ2_0
#define BLOCK 256
#define BLOCK_BYTES 66
#elif QTYPE == NVFP4
#define BLOCK 64
#define BLOCK_BYTES 36
#else
#error "QTYPE names no format"
#endif

#if BLOCK < 32
#define PLAIN 1  // elements are plain numbers: a row may have any length, and its last unit may be cut short
#define RUNS 1
#define RUN BLOCK
#define STEP 0
#elif QTYPE == Q2_K || QTYPE == Q3_K || QTYPE == Q6_K || QTYPE == TQ2_0
#define PLAIN 0
#define RUNS 4
#define RUN 8
#define STEP 32
#elif QTYPE == NVFP4
#define PLAIN 0
#define RUNS 4
#define RUN 8
#define STEP 8
#else
#define PLAIN 0
#define RUNS 2
#define RUN 16
#define STEP (QTYPE == Q4_K || QTYPE == Q5_K ? 32 : 16)
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

// COUNT words from `from` on, which lies in a block where a field is as aligned as the block itself: blocks are
// multiples of 2, 4, 8 or 16 bytes, but for MXFP4. The widest loads are the fewest, and a lane's load costs what a
// wave's costs that meets as many lines: blocks of 17, 18, 34, 110 or 210 bytes are read as the aligned words that they
// lie across, never beyond the field.
template <int COUNT> LUCE_FN void read_words(const u8* from, u32* to) {
#if BLOCK_BYTES % 16 == 0
    if (COUNT % 4 == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            const uint4 four = *reinterpret_cast<const uint4*>(from + i * 4);
            to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
        }
        return;
    }
#endif
#if BLOCK_BYTES % 8 == 0
    if (COUNT % 2 == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) {
            const uint2 two = *reinterpret_cast<const uint2*>(from + i * 4);
            to[i] = two.x, to[i + 1] = two.y;
        }
        return;
    }
#endif
#if BLOCK_BYTES % 4 == 0
#pragma unroll
    for (int i = 0; i < COUNT; i++) to[i] = luce_u32_at4(from + i * 4);
#elif BLOCK_BYTES % 2
    const u32 odd = (u32)(u64)from & 3;
#pragma unroll
    for (int i = 0; i < COUNT; i++) to[i] = luce_u32_at4(from - odd + i * 4);
    u32 last = 0;
#pragma unroll
    for (u32 i = 0; i < 3; i++)
        if (i < odd) last |= (u32)from[COUNT * 4 - odd + i] << (i * 8);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const u64 both = (u64)(i + 1 < COUNT ? to[i + 1] : last) << 32 | to[i];
        to[i] = (u32)(both >> (odd * 8));
    }
#else
    const u32 odd = (u32)(u64)from & 2;
#pragma unroll
    for (int i = 0; i < COUNT; i++) to[i] = luce_u32_at4(from - odd + i * 4);
    const u32 last = odd ? luce_u16_at2(from + COUNT * 4 - 2) : 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const u64 both = (u64)(i + 1 < COUNT ? to[i + 1] : last) << 32 | to[i];
        to[i] = (u32)(both >> (odd * 8));
    }
#endif
}

// The lower halves of two words, or the upper ones.
LUCE_FN u32 luce_u16_pair(u32 low, u32 high, int upper) {
#if defined(__CUDA_ARCH__)
    return __byte_perm(low, high, upper ? 0x7632u : 0x5410u);
#else
    return (low >> upper * 16 & 0xffff) | high >> upper * 16 << 16;
#endif
}

LUCE_FN float half_of(u32 word, int side) { return luce_f32(f16_t{(u16)(word >> (side * 16))}); }

#if (QTYPE >= IQ2_XXS && QTYPE <= IQ1_S) || QTYPE == IQ3_S || QTYPE == IQ2_S || QTYPE == IQ1_M
#include "quants_grid.h"
#else

// A unit as in memory. `words` are the elements' bits, `upper` their further bits, `scales` the bits of the block's
// scales.
struct Packed {
#if PLAIN
    u32 words[4];
#elif QTYPE == Q8_0
    u32 words[8], scales[1];
#elif QTYPE == Q4_0 || QTYPE == IQ4_NL || QTYPE == MXFP4 || QTYPE == Q4_1
    u32 words[4], scales[1];
#elif QTYPE == Q5_0 || QTYPE == Q5_1
    u32 words[4], upper[1], scales[1];
#elif QTYPE == NVFP4
    u32 words[4], scales[1];
#elif QTYPE == IQ4_XS
    u32 words[4], scales[2];
#elif QTYPE == Q4_K
    u32 words[4], scales[4];
#elif QTYPE == Q5_K
    u32 words[4], upper[4], scales[4];
#elif QTYPE == Q2_K
    u32 words[2], scales[3];
#elif QTYPE == Q3_K
    u32 words[2], upper[2], scales[4];
#elif QTYPE == TQ1_0
    u32 words[8], scales[1];
#elif QTYPE == TQ2_0
    u32 words[2], scales[1];
#else
    u32 words[4], upper[2], scales[3];
#endif
};

// Unit `unit` of the row at `row`. `left` is the number of columns from the unit's first one to the row's end: beyond
// it plain formats give zeros and read nothing.
LUCE_FN void fetch(const u8* __restrict__ row, int unit, int left, Packed& packed) {
    const u8* block = row + (i64)(unit / UNITS) * BLOCK_BYTES;
#if PLAIN
    // Rows of odd length start where a 16-byte load would fault.
    if (left >= UNIT && (u64)block % 16 == 0) {
        const uint4 all = *reinterpret_cast<const uint4*>(block);
        packed.words[0] = all.x, packed.words[1] = all.y, packed.words[2] = all.z, packed.words[3] = all.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) packed.words[i] = 0;
#pragma unroll
        for (int e = 0; e < UNIT; e++) {
#if QTYPE == F32
            if (e < left) packed.words[e] = luce_u32_at4(block + e * 4);
#else
            if (e < left) packed.words[e / 2] |= luce_u16_at2(block + e * 2) << (e % 2 * 16);
#endif
        }
    }
#elif BLOCK == 32
    read_words<UNIT / (QTYPE == Q8_0 ? 4 : 8)>(block + (BLOCK_BYTES - UNIT / (QTYPE == Q8_0 ? 1 : 2)), packed.words);
#if QTYPE == MXFP4
    packed.scales[0] = *block;
#elif QTYPE == Q4_1 || QTYPE == Q5_1
    packed.scales[0] = luce_u32_at4(block);
#else
    packed.scales[0] = luce_u16_at2(block);
#endif
#if QTYPE == Q5_0 || QTYPE == Q5_1
    read_words<1>(block + (BLOCK_BYTES - 20), packed.upper);
#endif
#elif QTYPE == NVFP4
    read_words<4>(block + 4 + unit % UNITS * 16, packed.words);
    read_words<1>(block, packed.scales);
#elif QTYPE == IQ4_XS
    read_words<4>(block + 8 + unit % UNITS * 16, packed.words);
    read_words<2>(block, packed.scales);
#elif QTYPE == Q4_K || QTYPE == Q5_K
    const int part = unit % UNITS;
    read_words<4>(block + (BLOCK_BYTES - 128) + part * 16, packed.words);
    read_words<4>(block, packed.scales);
#if QTYPE == Q5_K
    read_words<4>(block + 16 + part % 2 * 16, packed.upper);
#endif
#elif QTYPE == TQ1_0
    // Of 32 bytes, 16 and 4, each holds five or four columns.
    if (unit % UNITS < 5) {
        read_words<8>(block, packed.words);
    } else {
        read_words<5>(block + 32, packed.words);
    }
    packed.scales[0] = luce_u16_at2(block + 52);
#else  // halves of 128 columns
    const int half = unit % UNITS / 4;
    const int at = unit % 4 * 8;
#if QTYPE == TQ2_0
    read_words<2>(block + half * 32 + at, packed.words);
    packed.scales[0] = luce_u16_at2(block + 64);
#else
#if QTYPE == Q2_K
    read_words<2>(block + 16 + half * 32 + at, packed.words);
    read_words<2>(block + half * 8, packed.scales);
    packed.scales[2] = luce_u32_at4(block + 80);
#elif QTYPE == Q3_K
    read_words<2>(block + 32 + half * 32 + at, packed.words);
    read_words<2>(block + at, packed.upper);
    read_words<3>(block + 96, packed.scales);
    packed.scales[3] = luce_u16_at2(block + 108);
#else
    read_words<2>(block + half * 64 + at, packed.words);
    read_words<2>(block + half * 64 + 32 + at, packed.words + 2);
    read_words<2>(block + 128 + half * 32 + at, packed.upper);
    read_words<2>(block + 192 + half * 8, packed.scales);
    packed.scales[2] = luce_u16_at2(block + 208);
#endif
#endif
#endif
}

#if QTYPE == IQ4_NL || QTYPE == IQ4_XS || QTYPE == MXFP4 || QTYPE == NVFP4
// The 16 levels as bytes of two words: a table in memory would need a load per element.
LUCE_FN float level(u32 index) {
#if QTYPE == MXFP4 || QTYPE == NVFP4
    const u64 low = 0x0c08060403020100ull;   // twice the magnitudes of E2M1
    const u64 high = 0xf4f8fafcfdfeff00ull;  // 0 -1 -2 -3 -4 -6 -8 -12
#else
    const u64 low = 0xf6eaddcfbfad9881ull;   // -127 -104 -83 -65 -49 -35 -22 -10
    const u64 high = 0x7159453526190d01ull;  // 1 13 25 38 53 69 89 113
#endif
    return (float)(i8)((index < 8 ? low : high) >> (index % 8 * 8));
}
#endif

// Run `run` of unit `unit` into w[RUN].
LUCE_FN void unpack_run(const Packed& packed, int unit, int run, float* __restrict__ w) {
#if PLAIN
#pragma unroll
    for (int e = 0; e < UNIT; e++) {
#if QTYPE == F32
        w[e] = __uint_as_float(packed.words[e]);
#elif QTYPE == F16
        w[e] = half_of(packed.words[e / 2], e % 2);
#else
        w[e] = luce_f32(bf16_t{(u16)(packed.words[e / 2] >> (e % 2 * 16))});
#endif
    }

#elif QTYPE == Q8_0
    const float d = half_of(packed.scales[0], 0);
#pragma unroll
    for (int i = 0; i < 4; i++) scaled(packed.words[run * 4 + i] ^ 0x80808080, 255, 0, d, -128.0f * d, w + i * 4);

#elif QTYPE == Q4_0 || QTYPE == Q4_1
    // Byte i of 16 holds columns i (low bits) and i + 16 (high bits); so do the next formats' bytes.
    const float d = half_of(packed.scales[0], 0);
    const float offset = QTYPE == Q4_0 ? -8.0f * d : half_of(packed.scales[0], 1);
#pragma unroll
    for (int i = 0; i < 4; i++) scaled(packed.words[i], 15, run * 4, d, offset, w + i * 4);

#elif QTYPE == Q5_0 || QTYPE == Q5_1
    const float d = half_of(packed.scales[0], 0);
    const float offset = QTYPE == Q5_0 ? -16.0f * d : half_of(packed.scales[0], 1);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        // Four neighbouring bits, each to bit 4 of a byte.
        const u32 fifth = (packed.upper[0] >> (run * 16 + i * 4) & 15) * 0x02040810 & 0x10101010;
        scaled((packed.words[i] >> (run * 4) & 0x0f0f0f0f) | fifth, 31, 0, d, offset, w + i * 4);
    }

#elif QTYPE == IQ4_NL || QTYPE == IQ4_XS || QTYPE == MXFP4
#if QTYPE == MXFP4
    // 2^(exponent - 128), of which the two smallest are subnormal.
    const u32 exponent = packed.scales[0];
    const float d = __uint_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
#else
    float d = half_of(packed.scales[0], 0);
#endif
#if QTYPE == IQ4_XS
    const int group = unit % UNITS;
    const u32 low_bits = packed.scales[1] >> (group * 4) & 15;
    const u32 high_bits = packed.scales[0] >> (16 + group * 2) & 3;
    d *= (float)((int)(low_bits | high_bits << 4) - 32);
#endif
#pragma unroll
    for (int e = 0; e < RUN; e++) w[e] = d * level(packed.words[e / 4] >> (e % 4 * 8 + run * 4) & 15);

#elif QTYPE == NVFP4
    // 16 columns in eight bytes share a scale: a float of four bits of exponent, of bias 7, and three of mantissa. As bits
    // of a half it has 2^-8 of its value; half the value is wanted, as the levels are doubled. 0x7f is no number, and 0.
    const u32 bits = packed.scales[0] >> (unit % UNITS * 16 + run / 2 * 8) & 255;
    const float d = bits == 0x7f ? 0.0f : 128.0f * half_of((bits & 0x7f) << 7, 0);
#pragma unroll
    for (int e = 0; e < RUN; e++)
        w[e] = d * level(packed.words[run / 2 * 2 + e / 4] >> (e % 4 * 8 + run % 2 * 4) & 15);

#elif QTYPE == Q4_K || QTYPE == Q5_K
    // The group of 64 columns has two scales and two minima, 6 bits each. Of groups 0 and 1 they lie whole in 16 bits
    // each, of groups 2 and 3 the upper two bits of each are in what the former leave free.
    const int group = unit % UNITS / 2;
#if NUMBERS_AS_HALVES
    // Both runs' scales and minima at once, as bytes; those of a run are subnormal fp16 numbers, 2^-24 of their values.
    const u32 sixes = luce_u16_pair(packed.scales[1], packed.scales[2], group % 2);
    const u32 fours = luce_u16_pair(packed.scales[3], packed.scales[3] >> 4, group % 2);
    const u32 bits = group < 2 ? sixes & 0x3f3f3f3f : (fours & 0x0f0f0f0f) | (sixes >> 2 & 0x30303030);
    const u32 own = masked(bits >> (run * 8), 0x00ff00ff);
    const float scale = half_of(packed.scales[0], 0) * 0x1p24f * half_of(own, 0);
    const float minimum = half_of(packed.scales[0], 1) * 0x1p24f * half_of(own, 1);
#else
    const int side = group % 2 * 16 + run * 8;
    const u32 first = packed.scales[1] >> side, second = packed.scales[2] >> side, third = packed.scales[3] >> side;
    const u32 scale_bits = group < 2 ? first & 63 : (third & 15) | (first >> 2 & 48);
    const u32 minimum_bits = group < 2 ? second & 63 : (third >> 4 & 15) | (second >> 2 & 48);
    const float scale = half_of(packed.scales[0], 0) * (float)scale_bits;
    const float minimum = half_of(packed.scales[0], 1) * (float)minimum_bits;
#endif
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if QTYPE == Q4_K
        scaled(packed.words[i], 15, run * 4, scale, -minimum, w + i * 4);
#else
        const u32 fifth = (packed.upper[i] >> (group * 2 + run) & 0x01010101) << 4;
        scaled((packed.words[i] >> (run * 4) & 0x0f0f0f0f) | fifth, 31, 0, scale, -minimum, w + i * 4);
#endif
    }

#elif QTYPE == TQ2_0
    const float d = half_of(packed.scales[0], 0);
#pragma unroll
    for (int i = 0; i < 2; i++) scaled(packed.words[i], 3, run * 2, d, -d, w + i * 4);

#elif QTYPE == TQ1_0
    // A byte b is a fraction b / 256 in base 3, rounded up; its digit after `place` others is the next carry of 3 b.
    const float d = half_of(packed.scales[0], 0);
    const int group = unit % UNITS;
#pragma unroll
    for (int e = 0; e < RUN; e++) {
        const bool last = group == 7 && run == 1;
        const int byte = group < 5 ? run * 16 + e : last ? 16 + e % 4 : e;
        const int place = group < 5 ? group : last ? e / 4 : (group - 5) * 2 + run;
        const u32 power = place == 0 ? 1 : place == 1 ? 3 : place == 2 ? 9 : place == 3 ? 27 : 81;
        const u32 rest = (packed.words[byte / 4] >> (byte % 4 * 8) & 255) * power & 255;
        w[e] = d * (float)((int)(rest * 3 >> 8) - 1);
    }

#else  // Q2_K, Q3_K, Q6_K: a byte serves columns 32 apart
    const int half = unit % UNITS / 4;
    // Of the half's 8 scales the one numbered 2 run, or the next.
    const int at = run % 2 * 16 + unit % 4 / 2 * 8;
    const u32 scale_bits = packed.scales[run / 2] >> at & 255;
#if QTYPE == Q2_K
    const float scale = half_of(packed.scales[2], 0) * (float)(scale_bits & 15);
    const float offset = -half_of(packed.scales[2], 1) * (float)(scale_bits >> 4);
#elif QTYPE == Q3_K
    const u32 low_bits = scale_bits >> (half * 4) & 15;
    const u32 high_bits = packed.scales[2] >> (at + half * 4 + run / 2 * 2) & 3;
    const float scale = half_of(packed.scales[3], 0) * (float)((int)(low_bits | high_bits << 4) - 32);
#else
    const float scale = half_of(packed.scales[2], 0) * (float)(i8)scale_bits;
#endif
#pragma unroll
    for (int i = 0; i < 2; i++) {
#if QTYPE == Q2_K
        scaled(packed.words[i], 3, run * 2, scale, offset, w + i * 4);
#elif QTYPE == Q3_K
        const u32 third = (packed.upper[i] >> (half * 4 + run) & 0x01010101) << 2;
        scaled((packed.words[i] >> (run * 2) & 0x03030303) | third, 7, 0, scale, -4.0f * scale, w + i * 4);
#else
        const u32 upper = (packed.upper[i] >> (run * 2) & 0x03030303) << 4;
        const u32 lower = packed.words[run % 2 * 2 + i] >> (run / 2 * 4) & 0x0f0f0f0f;
        scaled(lower | upper, 63, 0, scale, -32.0f * scale, w + i * 4);
#endif
    }
#endif
}
#endif

// Unit `unit` of the row at `row` into w[UNIT]; `left` as fetch takes it.
LUCE_FN void unpack(const u8* __restrict__ row, int unit, int left, float* __restrict__ w) {
    Packed packed;
    fetch(row, unit, left, packed);
#pragma unroll
    for (int run = 0; run < RUNS; run++) unpack_run(packed, unit, run, w + run * RUN);
}

#endif
