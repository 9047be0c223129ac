// Quant blocks as fp16 without an error: a number of the file times its group's scale, an integer of at most 11 bits. Sums
// of products with int8 values of x are integers too, exact in the float sums of wgmma_rows.h below 2^24.
//
// A span of weights is 64 columns of 16 features, in the words of four products. A section of 128 columns has SPANS:
//   Q4_K  its halves, with one exact sum: 15 * 63 * 127 * 128 < 2^24
//   Q5_K  its halves, with a sum each: 31 * 63 * 127 * 64 < 2^24
//   Q6_K  its halves twice, as a number is n - 8 + 16 (h - 3 / 2), with four bits n and two bits h. First the n - 8, with
//         one sum: 8 * 128 * 127 * 128 < 2^24. Then the h - 3 / 2, with another: 3 * 128 * 127 * 128 < 2^24 halves
// One addition, or one fma, rounds two sums as the conversion of the section's integer would.
#pragma once
#include "quants_int8.h"
#include "wgmma.h"

#if LUCE_WGMMA

#define SPANS (QTYPE == Q6_K ? 4 : 2)
#define TWO_SUMS (QTYPE != Q4_K)
// Weights are subnormal numbers q, or q << 4, times a scale and a power of two: 2^-14 times integers, so that they are
// normal numbers. Scales of Q6_K are too large for that, and its weights 2^-19 times integers. x is 2^-9 times integers.
#define UP (QTYPE == Q6_K ? 268435456.0f : 8388608.0f)

// The product of two pairs of fp16 numbers, and its sum with a third, rounded once.
LUCE_FN u32 pair_product(u32 a, u32 b) {
#if defined(__CUDA_ARCH__)
    u32 pair;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
#else
    const auto half = [](u32 word) { return luce_f32(f16_t{(u16)word}); };
    return luce_f16_pair(half(a) * half(b), half(a >> 16) * half(b >> 16));
#endif
}
LUCE_FN u32 pair_fma(u32 a, u32 b, u32 c) {
#if defined(__CUDA_ARCH__)
    u32 pair;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
    return pair;
#else
    const auto half = [](u32 word) { return luce_f32(f16_t{(u16)word}); };
    return luce_f16_pair(half(a) * half(b) + half(c), half(a >> 16) * half(b >> 16) + half(c >> 16));
#endif
}

#if HAS_MINIMUM

// 2^6 times the scale `k` of four, which come times 4, as fp16, twice.
LUCE_FN u32 scale_pair(u32 fours, int k) {
#if defined(__CUDA_ARCH__)
    u32 pair = __byte_perm(fours, 0x74747474u, 0x4040u | (u32)k * 0x101u);  // 2^14 + 16 * byte
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(pair), "r"(0x74007400u));
    return pair;
#else
    return (u32)luce_f16((float)((fours >> k * 8 & 255) * 16)).bits * 0x10001u;
#endif
}

// Words t and t + 4 of rows g and g + 8 of span `span` of a unit (two blocks) times their scales.
LUCE_FN void unpack_span(const u32 (&bits)[4], const u32 (&fifths)[4], int span, const u32 (&fours)[2],
                         u32 (&words)[4][4]) {
    u32 low[2], high[2];
#pragma unroll
    for (int row = 0; row < 2; row++) {
        low[row] = pair_product(scale_pair(fours[row], span % 2 * 2), 0x4c004c00u);  // times 16
        high[row] = scale_pair(fours[row], span % 2 * 2 + 1);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const u32 word = odd ? bits[i] >> 8 : bits[i];
            u32 first = word & 0x000f000fu, second = word & 0x00f000f0u;
            if (QTYPE == Q5_K) {
                // Bits 2 span and 2 span + 1 of a byte.
                const int up = 4 - 2 * span - 8 * odd;
                first |= (up < 0 ? fifths[i] >> -up : fifths[i] << up) & 0x00100010u;
                second |= (up + 3 < 0 ? fifths[i] >> -(up + 3) : fifths[i] << (up + 3)) & 0x01000100u;
            }
            words[i / 2][i % 2 + 2 * odd] = pair_product(first, low[i % 2]);
            words[i / 2 + 2][i % 2 + 2 * odd] = pair_product(second, high[i % 2]);
        }
    }
}

#else

// What a lane has of a section of rows g and g + 8: group t of each half, so that it needs few scales. The words of both
// halves' n, or of both halves' h; scales[half] as scale_pair has them.
struct SectionPart {
    u32 words[2][4], scales[2][2];
};

// 2^5 times a scale as fp16, twice; for a second half, whose bits are four places higher, 2 times.
LUCE_FN u32 scale_pair(int scale, int half) {
#if defined(__CUDA_ARCH__)
    // 2^15 + 2^5 (128 + scale), or 2^11 + 2 (128 + scale)
    u32 pair = (u32)scale * 0x10001u + (half ? 0x68806880u : 0x78807880u);
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(pair), "r"(half ? 0x68806880u : 0x78807880u));
    return pair;
#else
    return (u32)luce_f16((float)scale * (half ? 2.0f : 32.0f)).bits * 0x10001u;
#endif
}

// Loads what a unit's span `span` needs beyond the span before it.
LUCE_FN void load_part(const Unit (&units)[2], int span, int t, SectionPart& part) {
    const int section = span / 4, half = span % 2;
#pragma unroll
    for (int row = 0; row < 2; row++) {
        const Unit& unit = units[row];
        if (span % 4 < 2)
            part.scales[half][row] = scale_pair(unit_byte(unit, 192 + section * 8 + half * 4 + t), half);
        if (span % 4 == 0) unit_words(unit, section * 64, t * 16, part.words[row]);
        // Blocks 0 and 1 of a section have bits 0 and 1, 2 and 3 of the same bytes, blocks 2 and 3 those four further.
        if (span % 4 == 2)
            unit_words(Unit{unit.at, unit.shift + t / 2 * 2}, 128 + section * 32, t % 2 * 16, part.words[row]);
    }
}

// The words of a span: product i has word i of each lane's group, bytes 0 and 2, then 1 and 3.
LUCE_FN void unpack_span(const SectionPart& part, int span, u32 (&words)[4][4]) {
    const int half = span % 2;
    const u32 mask = (span % 4 < 2 ? 0x000f000fu : 0x00030003u) << 4 * half;
#pragma unroll
    for (int row = 0; row < 2; row++) {
        const u32 scale = part.scales[half][row];
        u32 offset = pair_product(scale, half ? 0x80808080u : 0x80088008u);  // for -8
        if (span % 4 >= 2) offset = pair_product(offset, 0x32003200u);       // for -3 / 2
#pragma unroll
        for (int i = 0; i < 4; i++) {
            words[i][row] = pair_fma(part.words[row][i] & mask, scale, offset);
            words[i][row + 2] = pair_fma(part.words[row][i] >> 8 & mask, scale, offset);
        }
    }
}

#endif

#endif
