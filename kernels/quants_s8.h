// GGUF block formats as signed bytes times scales, for integer products: -DQTYPE=Q4_K (any name below) picks one.
//
// A row is cut into units of UNIT_COLS columns (the last one may be shorter where a block has 32), a unit into groups
// of GROUP columns with one scale. With q the signed bytes that set_words gives,
//   w[c] = scale * q[c] - minimum
// with a scale and a minimum per group, exactly as quants.h has it: where q is the file's number times a power of two,
// the scale has the inverse.
#ifndef QUANTS_S8_H
#define QUANTS_S8_H
#include "quants.h"

#define UNIT_COLS 256
#define UNIT_BYTES (UNIT_COLS / BLOCK * BLOCK_BYTES)
#define BLOCKS32 8  // blocks of 32 columns in a unit
#define ODD_UNITS (BLOCK_BYTES % 16 != 0)

// Blocks of 32 columns that share bytes: a span.
#if QTYPE == Q6_K
#define GROUP 16
#define SPAN32 4
#elif QTYPE == Q4_K || QTYPE == Q5_K
#define GROUP 32
#define SPAN32 2
#else
#define GROUP 32
#define SPAN32 1
#endif
#define GROUPS32 (32 / GROUP)
#define HAS_MINIMUM (QTYPE == Q4_K || QTYPE == Q5_K)
// Which words of a block's eight the four lanes of a row take for the tensor core: t and t + 4, else 2t and 2t + 1.
#define APART (QTYPE == Q6_K || QTYPE == Q4_0)

// The groups of a unit fall into four sets, each made of bytes that lie together. Group k of set s has the columns from
// 32 * set_block(s, k) + 4 * set_word(s) on.
#if QTYPE == Q6_K
#define SET_GROUPS 4
LUCE_FN int set_block(int set, int k) { return set / 2 * 4 + k; }
LUCE_FN int set_word(int set) { return set % 2 * 4; }
LUCE_FN int set_of(int block, int half) { return block / 4 * 2 + half; }
#else
#define SET_GROUPS 2
LUCE_FN int set_block(int set, int k) { return set * 2 + k; }
LUCE_FN int set_word(int set) { return 0; }
LUCE_FN int set_of(int block, int half) { return block / 2; }
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
    // Each word is made of the halves of two neighbours, or is one of them.
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
// high four bits of one of two bytes, and bits 2j, 2j + 1 of a third.
LUCE_FN u32 six_bits(u32 low, u32 high, int j) {
    return (((j < 2 ? low << 2 : low >> 2) & 0x3c3c3c3cu) ^ 0x80808080u) ^ (high << (6 - 2 * j) & 0xc0c0c0c0u);
}
#elif QTYPE == Q5_K
// Bit `bit` of a third byte above the low or the high four bits of another.
LUCE_FN u32 five_bits(u32 four, u32 fifths, int bit) {
    return (four & 0x0f0f0f0fu) | (fifths >> bit << 4 & 0x10101010u);
}
#endif

// The words of the first `groups` groups of a set: fewer than all only where a unit may be cut short.
LUCE_FN void set_words(const Unit& unit, int set, int groups, u32 (&w)[SET_GROUPS][GROUP_WORDS]) {
#if QTYPE == Q6_K
    u32 low[2][4], high[4];
    unit_words(unit, 0, set / 2 * 64 + set % 2 * 16, low[0]);
    unit_words(unit, 32, set / 2 * 64 + set % 2 * 16, low[1]);
    unit_words(unit, 128, set / 2 * 32 + set % 2 * 16, high);
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
        for (int i = 0; i < 4; i++) w[k][i] = six_bits(low[k % 2][i], high[i], k);
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
    u32 bits[8];
    unit_words(unit, BLOCK_BYTES - 128, set * 32, bits);
#if QTYPE == Q5_K
    u32 fifths[8];
    unit_words(unit, 16, 0, fifths);
#endif
#pragma unroll
    for (int i = 0; i < 8; i++) {
#if QTYPE == Q5_K
        const u32 own = fifths[i] >> (2 * set);
        w[0][i] = five_bits(bits[i], own, 0), w[1][i] = five_bits(bits[i] >> 4, own, 1);
#else
        w[0][i] = bits[i] & 0x0f0f0f0fu, w[1][i] = bits[i] >> 4 & 0x0f0f0f0fu;
#endif
    }
#endif
}

// The two words of each block of a span that lane t of a row's four takes for the tensor core.
LUCE_FN void span_pairs(const Unit& unit, int span, int t, u32 (&w)[SPAN32][2]) {
#if QTYPE == Q6_K
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 low[2][1], high[1];
        unit_words(unit, span * 64, i * 16 + t * 4, low[0]);
        unit_words(unit, span * 64 + 32, i * 16 + t * 4, low[1]);
        unit_words(unit, span * 32 + 128, i * 16 + t * 4, high);
#pragma unroll
        for (int j = 0; j < 4; j++) w[j][i] = six_bits(low[j % 2][0], high[0], j);
    }
#elif QTYPE == Q8_0
    unit_words(unit, span * 34 + 2, t * 8, w[0]);
#elif QTYPE == Q4_0
    u32 bits[1];
    unit_words(unit, span * 18 + 2, t * 4, bits);
    w[0][0] = low_bytes(bits[0]), w[0][1] = high_bytes(bits[0]);
#else
    u32 bits[2];
    unit_words(unit, BLOCK_BYTES - 128 + span * 32, t * 8, bits);
#if QTYPE == Q5_K
    u32 fifths[2];
    unit_words(unit, 16, t * 8, fifths);
#endif
#pragma unroll
    for (int i = 0; i < 2; i++) {
#if QTYPE == Q5_K
        const u32 own = fifths[i] >> (2 * span);
        w[0][i] = five_bits(bits[i], own, 0), w[1][i] = five_bits(bits[i] >> 4, own, 1);
#else
        w[0][i] = bits[i] & 0x0f0f0f0fu, w[1][i] = bits[i] >> 4 & 0x0f0f0f0fu;
#endif
    }
#endif
}

#if HAS_MINIMUM
// Scale and minimum of groups first and first + 1 in the two low bytes of each; first is even. Six bits each in 12
// bytes: see scale_min in quants.h.
LUCE_FN void two_scales(const Unit& unit, int first, u32& scales, u32& minimums) {
    const u8* from = unit.at + 4 + first % 4;
    const u32 a = luce_u16_at2(from), b = luce_u16_at2(from + 4), c = luce_u16_at2(from + 8);
    scales = first < 4 ? a & 0x3f3fu : (c & 0x0f0fu) | (a >> 2 & 0x3030u);
    minimums = first < 4 ? b & 0x3f3fu : (c >> 4 & 0x0f0fu) | (b >> 2 & 0x3030u);
}
#endif

// Scale and minimum of the first `groups` groups of a set. The products here are exact.
LUCE_FN void set_scales(const Unit& unit, int set, int groups, float (&scale)[SET_GROUPS],
                        float (&minimum)[SET_GROUPS]) {
#if HAS_MINIMUM
    const u32 both = luce_u32_at4(unit.at);
    const float d = luce_f32(f16_t{(u16)both}), dmin = luce_f32(f16_t{(u16)(both >> 16)});
    u32 scales, minimums;
    two_scales(unit, set * 2, scales, minimums);
#endif
#pragma unroll
    for (int k = 0; k < SET_GROUPS; k++) {
        if (k >= groups) break;
        minimum[k] = 0.0f;
#if HAS_MINIMUM
        scale[k] = d * (float)(scales >> 8 * k & 255);
        minimum[k] = dmin * (float)(minimums >> 8 * k & 255);
#elif QTYPE == Q6_K
        scale[k] = 0.25f * unit_half(unit, 208) * (float)unit_byte(unit, 192 + set / 2 * 8 + k * 2 + set % 2);
#elif QTYPE == Q8_0
        scale[k] = unit_half(unit, (set * 2 + k) * 34);
#else
        scale[k] = 0.0625f * unit_half(unit, (set * 2 + k) * 18);
#endif
    }
}

// The scales of a unit, for lanes that need them all.
struct UnitScales {
#if HAS_MINIMUM
    u32 scales[2], minimums[2];  // a byte each
    float scale, minimum;
#elif QTYPE == Q6_K
    u32 scales[4];  // a signed byte each
    float scale;
#else
    Unit unit;
#endif
};

LUCE_FN UnitScales unit_scales(const Unit& unit) {
    UnitScales s;
#if HAS_MINIMUM
    const uint4 head = *reinterpret_cast<const uint4*>(unit.at);
    s.scale = luce_f32(f16_t{(u16)head.x}), s.minimum = luce_f32(f16_t{(u16)(head.x >> 16)});
    s.scales[0] = head.y & 0x3f3f3f3fu, s.scales[1] = (head.w & 0x0f0f0f0fu) | (head.y >> 2 & 0x30303030u);
    s.minimums[0] = head.z & 0x3f3f3f3fu, s.minimums[1] = (head.w >> 4 & 0x0f0f0f0fu) | (head.z >> 2 & 0x30303030u);
#elif QTYPE == Q6_K
    unit_words(unit, 192, 0, s.scales);
    s.scale = 0.25f * unit_half(unit, 208);
#else
    s.unit = unit;
#endif
    return s;
}

LUCE_FN float group_scale(const UnitScales& s, int group) {
#if HAS_MINIMUM
    return s.scale * (float)(s.scales[group / 4] >> (group % 4 * 8) & 255);
#elif QTYPE == Q6_K
    return s.scale * (float)(i8)(s.scales[group / 4] >> (group % 4 * 8));
#elif QTYPE == Q8_0
    return unit_half(s.unit, group * 34);
#else
    return 0.0625f * unit_half(s.unit, group * 18);
#endif
}

LUCE_FN float group_minimum(const UnitScales& s, int group) {
#if HAS_MINIMUM
    return s.minimum * (float)(s.minimums[group / 4] >> (group % 4 * 8) & 255);
#else
    return 0.0f;
#endif
}

#endif
