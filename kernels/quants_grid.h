// The formats whose blocks index a grid (IQ1_S to IQ3_S), for quants.h: a unit is a group of 32 columns, of which each
// index names eight neighbours (IQ3: four). The grid comes from memory: 512 to 4096 bytes, which stay in the cache of a
// multiprocessor.
#pragma once
#include "grids.h"

// A unit as in memory. `words` are the lower bits of its indices, `upper` their further bits, `signs` a bit for each
// column or the number of such a byte, `scales` the bits of its scales and of the block's.
struct Packed {
#if QTYPE == IQ2_XXS
    u32 words[1], signs, scales[1];
#elif QTYPE == IQ2_XS
    u32 words[2], scales[2];
#elif QTYPE == IQ3_XXS
    u32 words[2], signs, scales[1];
#elif QTYPE == IQ2_S
    u32 words[1], upper, signs, scales[2];
#elif QTYPE == IQ3_S
    u32 words[2], upper, signs, scales[2];
#elif QTYPE == IQ1_S
    u32 words[1], upper, scales[1];
#else
    u32 words[1], upper, scales[2];
#endif
};

// As for the other formats: unit `unit` of the row at `row`.
LUCE_FN void fetch(const u8* __restrict__ row, int unit, int left, Packed& packed) {
    const u8* block = row + (i64)(unit / UNITS) * BLOCK_BYTES;
    const int group = unit % UNITS;
#if QTYPE == IQ1_M
    read_words<1>(block + group * 4, packed.words);
    packed.upper = luce_u16_at2(block + 32 + group * 2);
    read_words<2>(block + 48, packed.scales);
#else
    packed.scales[0] = luce_u16_at2(block);
#if QTYPE == IQ2_XXS
    read_words<1>(block + 2 + group * 8, packed.words);
    read_words<1>(block + 6 + group * 8, &packed.signs);
#elif QTYPE == IQ2_XS
    read_words<2>(block + 2 + group * 8, packed.words);
    packed.scales[1] = block[66 + group];
#elif QTYPE == IQ2_S
    read_words<1>(block + 2 + group * 4, packed.words);
    read_words<1>(block + 34 + group * 4, &packed.signs);
    packed.upper = block[66 + group];
    packed.scales[1] = block[74 + group];
#elif QTYPE == IQ3_XXS
    read_words<2>(block + 2 + group * 8, packed.words);
    read_words<1>(block + 66 + group * 4, &packed.signs);
#elif QTYPE == IQ3_S
    read_words<2>(block + 2 + group * 8, packed.words);
    read_words<1>(block + 74 + group * 4, &packed.signs);
    packed.upper = block[66 + group];
    packed.scales[1] = block[106 + group / 2];
#else
    read_words<1>(block + 2 + group * 4, packed.words);
    packed.upper = luce_u16_at2(block + 34 + group * 2);
#endif
#endif
}

#if QTYPE == IQ1_S || QTYPE == IQ1_M
// The run's scale, an eighth of which the elements are multiples of.
LUCE_FN float run_scale(const Packed& packed, int unit, int run) {
#if QTYPE == IQ1_S
    return half_of(packed.scales[0], 0) * (0.125f * (float)((packed.upper >> 12 & 7) * 2 + 1));
#else
    // The highest four bits of four halves are the block's scale; below them are those of two groups each.
    const u32 low = packed.scales[0], high = packed.scales[1], group = unit % UNITS;
    const u32 scale = (low >> 12 & 0x000f) | (low >> 24 & 0x00f0) | (high >> 4 & 0x0f00) | (high >> 16 & 0xf000);
    const u32 own = (group < 4 ? low : high) >> (group / 2 % 2 * 16 + group % 2 * 6 + run * 3) & 7;
    return half_of(scale, 0) * (0.125f * (float)(own * 2 + 1));
#endif
}

// Run `run` of unit `unit` into w[RUN]: a scale times -1, 0 or 1, all raised or lowered by an eighth.
LUCE_FN void unpack_run(const Packed& packed, int unit, int run, float* __restrict__ w) {
    const float d = run_scale(packed, unit, run);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int at = run * 2 + i;
        const u32 index = packed.words[0] >> (at * 8) & 255;
#if QTYPE == IQ1_S
        const u32 codes = grid[index | (packed.upper >> (at * 3) & 7) << 8];
        const float offset = packed.upper & 0x8000 ? -9.0f : -7.0f;
#else
        const u32 bits = packed.upper >> (at * 4);
        const u32 codes = grid[index | (bits & 7) << 8];
        const float offset = bits & 8 ? -9.0f : -7.0f;
#endif
#pragma unroll
        for (int e = 0; e < 8; e++) w[i * 8 + e] = d * ((float)((codes >> (e * 2) & 3) * 8) + offset);
    }
}

#else
#if QTYPE == IQ2_XXS || QTYPE == IQ2_XS || QTYPE == IQ3_XXS
// Seven bits of signs and the eighth that makes their number even.
LUCE_FN u32 even_signs(u32 seven) { return seven | (u32)(__popc(seven) & 1) << 7; }
#endif

// The run's scale: a half of the block's, or a fourth or eighth, times an odd number.
LUCE_FN float run_scale(const Packed& packed, int unit, int run) {
    const float d = half_of(packed.scales[0], 0);
#if QTYPE == IQ2_XXS
    return d * (0.125f * (float)((packed.signs >> 28) * 2 + 1));
#elif QTYPE == IQ3_XXS
    return d * (0.25f * (float)((packed.signs >> 28) * 2 + 1));
#elif QTYPE == IQ3_S
    return d * (float)((packed.scales[1] >> (unit % 2 * 4) & 15) * 2 + 1);
#else
    return d * (0.125f * (float)((packed.scales[1] >> (run * 4) & 15) * 2 + 1));
#endif
}

// The magnitude of a code.
LUCE_FN float magnitude(u32 code) {
#if QTYPE == IQ3_XXS
    return (float)(code * 8 + (code == 7 ? 6 : 4));
#elif QTYPE == IQ3_S
    return (float)(code * 2 + 1);
#else
    return (float)(0x2b1908u >> (code * 8) & 255);
#endif
}

// Run `run` of unit `unit` into w[RUN].
LUCE_FN void unpack_run(const Packed& packed, int unit, int run, float* __restrict__ w) {
    const float d = run_scale(packed, unit, run);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int at = run * 2 + i;  // eight columns
#if QTYPE == IQ2_XS
        const u32 own = packed.words[run] >> (i * 16);
        const u32 signs = even_signs(own >> 9 & 127);
#elif QTYPE == IQ2_S || QTYPE == IQ3_S
        const u32 signs = packed.signs >> (at * 8);
#else
        const u32 signs = even_signs(packed.signs >> (at * 7) & 127);
#endif
#if QTYPE == IQ2_XXS
        const u32 codes = grid[packed.words[0] >> (at * 8) & 255];
#elif QTYPE == IQ2_XS
        const u32 codes = grid[own & 511];
#elif QTYPE == IQ2_S
        const u32 codes = grid[(packed.words[0] >> (at * 8) & 255) | (packed.upper >> (at * 2) & 3) << 8];
#elif QTYPE == IQ3_XXS
        const u32 pair = packed.words[run] >> (i * 16);
        const u32 codes = grid[pair & 255] | grid[pair >> 8 & 255] << 12;
#else
        const u32 pair = packed.words[run] >> (i * 16), ninths = packed.upper >> (at * 2);
        const u32 codes = grid[(pair & 255) | (ninths & 1) << 8] | grid[(pair >> 8 & 255) | (ninths & 2) << 7] << 12;
#endif
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const u32 code = QTYPE == IQ3_XXS || QTYPE == IQ3_S ? codes >> (e * 3) & 7 : codes >> (e * 2) & 3;
            w[i * 8 + e] = __uint_as_float(__float_as_uint(d * magnitude(code)) ^ (signs >> e & 1) << 31);
        }
    }
}
#endif
