// GGUF quant blocks as int8 times scales, for integer products: -DQTYPE=Q4_K (any name below) picks one.
//
// A row is cut into units of UNIT_COLS columns (the last one may be shorter where a block has 32), a unit into groups
// of GROUP columns with one scale. With q the signed bytes that set_words gives,
//   w[c] = scale * q[c] - minimum
// with a scale and a minimum per group, exactly as quants.h has it: where q is the file's number times a power of two,
// the scale has the inverse. With INTEGER_SCALES these are integers times one float, and another for minimums, of the
// whole unit.
#ifndef QUANTS_INT8_H
#define QUANTS_INT8_H
#include "quants.h"

#define UNIT_COLS 256
#define UNIT_BYTES (UNIT_COLS / BLOCK * BLOCK_BYTES)
#define ODD_UNITS (BLOCK_BYTES % 16 != 0)

// Blocks of 32 columns that span_pairs makes at once, as they share bytes.
#if QTYPE == Q6_K
#define GROUP 16
#define SPAN32 4
#else
#define GROUP 32
#define SPAN32 1
#endif
#define GROUPS32 (32 / GROUP)
#define HAS_MINIMUM (QTYPE == Q4_K || QTYPE == Q5_K)
#define INTEGER_SCALES (HAS_MINIMUM || QTYPE == Q6_K)

// The groups of a unit fall into four sets, each made of bytes that lie together; two have a half of the unit, which
// is a section of x. Group k of set s are in Q6_K words 4 (s % 2) to 4 (s % 2) + 3 of block s / 2 * 4 + k, else it is
// block 2 s + k.
#if QTYPE == Q6_K
#define SET_GROUPS 4
#else
#define SET_GROUPS 2
#endif
#define GROUP_WORDS (GROUP / 4)

LUCE_FN int whole_units(int cols) { return luce_ceil_div(cols, UNIT_COLS); }

// A unit in shared memory: it begins at `at`, a multiple of 16, or where blocks have odd sizes at `at` + `shift` / 8,
// with `at` a multiple of 4 and `shift` 0 or 16; then 4 bytes behind it can be read.
struct Unit {
    const u8* at;
    u32 shift;
};

// COUNT words of a unit from byte `offset` + `more` on. `offset` is a constant, and `more` a multiple of 4; where units
// begin at multiples of 16, the sum is a multiple of COUNT words (of four, if more).
template <int COUNT> LUCE_FN void unit_words(const Unit& unit, int offset, int more, u32 (&words)[COUNT]) {
#if ODD_UNITS
    // Each word joins the halves of two neighbours, or is one of them.
    const u32* from;
    u32 shift = unit.shift;
    if (offset % 4 == 0) {
        from = reinterpret_cast<const u32*>(unit.at + offset + more);
    } else {
        from = reinterpret_cast<const u32*>(unit.at + (offset - 2) + more + shift / 4);
        shift = 16 - shift;
    }
    u32 next = from[0];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const u32 low = next;
        next = from[i + 1];
        words[i] = (u32)(((u64)next << 32 | low) >> shift);
    }
#else
    const u8* from = unit.at + offset + more;
    if constexpr (COUNT % 4 == 0) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) {
            const uint4 four = *reinterpret_cast<const uint4*>(from + i * 4);
            words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
        }
    } else {
        const uint2 two = *reinterpret_cast<const uint2*>(from);
        words[0] = two.x, words[1] = two.y;
    }
#endif
}

// A half, and a signed byte, of a unit.
LUCE_FN float unit_half(const Unit& unit, int offset) { return luce_f16_at2(unit.at + unit.shift / 8 + offset); }
LUCE_FN int unit_byte(const Unit& unit, int offset) { return (int)(i8)unit.at[unit.shift / 8 + offset]; }

#if QTYPE == Q4_0
// (q - 8) << 4: the four bits at the top of the byte, the highest one flipped. Byte i of 16 holds columns i and i + 16.
LUCE_FN u32 low_bytes(u32 bits) { return (bits << 4 & 0xf0f0f0f0u) ^ 0x80808080u; }
LUCE_FN u32 high_bytes(u32 bits) { return (bits & 0xf0f0f0f0u) ^ 0x80808080u; }
#elif QTYPE == Q6_K
// (q - 32) << 2: the six bits at the top of the byte, the highest one flipped. Block j of a half takes the low or the
// high four bits of one of two bytes, and bits 2j, 2j + 1 of a third, `high`, that comes flipped.
LUCE_FN u32 flipped(u32 high) {
    high ^= 0xaaaaaaaau;
#if defined(__CUDA_ARCH__)
    // Otherwise the compiler does it again for each block, with a constant that takes one more instruction.
    asm("" : "+r"(high));
#endif
    return high;
}
LUCE_FN u32 six_bits(u32 low, u32 high, int j) {
    return ((j < 2 ? low << 2 : low >> 2) & 0x3c3c3c3cu) | (high << (6 - 2 * j) & 0xc0c0c0c0u);
}
#elif HAS_MINIMUM
// The low four bits of a byte; in Q5_K bit `bit` of another above them.
LUCE_FN u32 low_bits(u32 four, u32 fifths, int bit) {
    return (four & 0x0f0f0f0fu) | (QTYPE == Q5_K ? fifths >> bit << 4 & 0x10101010u : 0);
}
#endif

#if !INTEGER_SCALES
// The scale of block `block` of a unit.
LUCE_FN float block_scale(const Unit& unit, int block) {
    return QTYPE == Q8_0 ? unit_half(unit, block * 34) : 0.0625f * unit_half(unit, block * 18);
}
#endif

// Whether the words of group 1 of a set are 16 times the numbers, as unsigned bytes: that takes no shift.
#define HIGH_NIBBLES (QTYPE == Q4_K)

// The words of the first `groups` groups of a set: fewer than all only if a unit may be cut short.
LUCE_FN void set_words(const Unit& unit, int set, int groups, u32 (&w)[SET_GROUPS][GROUP_WORDS]) {
#if QTYPE == Q6_K
    u32 low[2][4], high[4];
    unit_words(unit, 0, set / 2 * 64 + set % 2 * 16, low[0]);
    unit_words(unit, 32, set / 2 * 64 + set % 2 * 16, low[1]);
    unit_words(unit, 128, set / 2 * 32 + set % 2 * 16, high);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        high[i] = flipped(high[i]);
#pragma unroll
        for (int k = 0; k < 4; k++) w[k][i] = six_bits(low[k % 2][i], high[i], k);
    }
#elif QTYPE == Q8_0
    unit_words(unit, 2, set * 68, w[0]);
    if (groups > 1) unit_words(unit, 36, set * 68, w[1]);
#elif QTYPE == Q4_0
    u32 bits[2][4];
    unit_words(unit, 2, set * 36, bits[0]);
    if (groups > 1) unit_words(unit, 20, set * 36, bits[1]);
#pragma unroll
    for (int k = 0; k < 2; k++) {
        if (k >= groups) break;
#pragma unroll
        for (int i = 0; i < 4; i++) w[k][i] = low_bytes(bits[k][i]), w[k][i + 4] = high_bytes(bits[k][i]);
    }
#else
    u32 bits[8], fifths[8] = {};
    unit_words(unit, BLOCK_BYTES - 128, set * 32, bits);
    if (QTYPE == Q5_K) unit_words(unit, 16, 0, fifths);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 own = fifths[i] >> (2 * set);
        w[0][i] = low_bits(bits[i], own, 0);
        w[1][i] = HIGH_NIBBLES ? bits[i] & 0xf0f0f0f0u : low_bits(bits[i] >> 4, own, 1);
    }
#endif
}

#if INTEGER_SCALES

// The scales of a set's groups.
struct SetScales {
    float scale, minimum;  // of the unit
    i32 groups[SET_GROUPS];
    u32 minimums;  // a byte for each of the half's four blocks
};

LUCE_FN SetScales set_scales(const Unit& unit, int set) {
    SetScales s = {};
#if HAS_MINIMUM
    // Six bits each in 12 bytes: see scale_min in quants.h.
    const uint4 head = *reinterpret_cast<const uint4*>(unit.at);
    s.scale = luce_f32(f16_t{(u16)head.x}), s.minimum = luce_f32(f16_t{(u16)(head.x >> 16)});
    const bool late = set / 2;
    const u32 scales = late ? (head.w & 0x0f0f0f0fu) | (head.y >> 2 & 0x30303030u) : head.y & 0x3f3f3f3fu;
    s.minimums = late ? (head.w >> 4 & 0x0f0f0f0fu) | (head.z >> 2 & 0x30303030u) : head.z & 0x3f3f3f3fu;
    const u32 own = scales >> (set % 2 * 16);
    s.groups[0] = (i32)(own & 255), s.groups[1] = (i32)(own >> 8 & 255);
#else
    s.scale = 0.25f * unit_half(unit, 208);
#pragma unroll
    for (int k = 0; k < 4; k++) s.groups[k] = unit_byte(unit, 192 + set / 2 * 8 + k * 2 + set % 2);
#endif
    return s;
}

// The scales of a unit, for lanes that need them all.
struct UnitScales {
    float scale, minimum;
#if HAS_MINIMUM
    u32 groups[2], minimums[2];  // a byte each
#else
    u32 groups[4];  // a signed byte each
#endif
};

LUCE_FN UnitScales unit_scales(const Unit& unit) {
    UnitScales s = {};
#if HAS_MINIMUM
    const uint4 head = *reinterpret_cast<const uint4*>(unit.at);
    s.scale = luce_f32(f16_t{(u16)head.x}), s.minimum = luce_f32(f16_t{(u16)(head.x >> 16)});
    s.groups[0] = head.y & 0x3f3f3f3fu, s.groups[1] = (head.w & 0x0f0f0f0fu) | (head.y >> 2 & 0x30303030u);
    s.minimums[0] = head.z & 0x3f3f3f3fu, s.minimums[1] = (head.w >> 4 & 0x0f0f0f0fu) | (head.z >> 2 & 0x30303030u);
#else
    unit_words(unit, 192, 0, s.groups);
    s.scale = 0.25f * unit_half(unit, 208);
#endif
    return s;
}

LUCE_FN i32 group_scale(const UnitScales& s, int group) {
#if HAS_MINIMUM && defined(__CUDA_ARCH__)
    return (i32)__byte_perm(s.groups[group / 4], 0, 0x4440 + group % 4);
#elif HAS_MINIMUM
    return (i32)(s.groups[group / 4] >> (group % 4 * 8) & 255);
#else
    return (i32)(i8)(s.groups[group / 4] >> (group % 4 * 8));
#endif
}

#endif

#if !HAS_MINIMUM
// Words t and t + 4 of each block of a span.
LUCE_FN void span_pairs(const Unit& unit, int span, int t, u32 (&w)[SPAN32][2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
#if QTYPE == Q6_K
        u32 low[2][1], high[1];
        unit_words(unit, span * 64, i * 16 + t * 4, low[0]);
        unit_words(unit, span * 64 + 32, i * 16 + t * 4, low[1]);
        unit_words(unit, span * 32 + 128, i * 16 + t * 4, high);
#pragma unroll
        for (int j = 0; j < 4; j++) w[j][i] = six_bits(low[j % 2][0], flipped(high[0]), j);
#elif QTYPE == Q8_0
        u32 own[1];
        unit_words(unit, span * 34 + 2, i * 16 + t * 4, own);
        w[0][i] = own[0];
#else
        if (i) break;
        u32 bits[1];
        unit_words(unit, span * 18 + 2, t * 4, bits);
        w[0][0] = low_bytes(bits[0]), w[0][1] = high_bytes(bits[0]);
#endif
    }
}
#endif

#endif
