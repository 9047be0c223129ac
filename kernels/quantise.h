// Rows of x as int8. For columns that share a scale s, s = largest |x| / 127 and the values are round(x / s). A section
// of 128 columns shares a scale for weights with integer scales, whose products with a section can be summed exactly
// (the K types: x is `wide`); otherwise a block of 32 columns does.
//
// The `padded` rows are in the order in which products read them (dot_int8.h, mma_int8.h). The last section may be
// shorter in x; zeros fill it up. A section has section_bytes:
//   values  int8 [2, padded, 64]
//   scales  [padded], of each row 16 bytes: where x is wide, s and the sums of the values of the four blocks, each as
//           32 * high + low, 0 <= low < 32: four lows, four highs (signed), s and a zero; else s of each block
// For 8, 16 and 32 padded rows, which tensor cores may multiply, instead
//   values  int8 [2, padded, 4, 2, 2, 4]: of the eight words (four columns) of both blocks, [w, b, i] is word w + 4 i of
//           block b, so that a lane reads 16 bytes
//   scales  wide:
//             bytes [padded, 2, 4]            of a row four lows, four highs
//             fp16   [8, 4, padded / 8, 2]    [g, b, c] is 32 * high and low of block b of row 8 c + g
//             floats [4, padded / 8, 2]       [t, c, i] is s of row 8 c + 2 t + i
//           else such floats of each block
#pragma once
#include "reduce.h"

#define SECTION 128

// Float bits of 1.5 * 2^23: an int32 that starts here, and changes by less than 2^22, is the float changed by as much.
#define MAGIC_BITS 0x4b400000
#define MAGIC 12582912.0f

LUCE_FN bool in_eights(int padded) { return padded == 8 || padded == 16 || padded == 32; }
LUCE_FN int section_bytes(int padded, bool wide) { return padded * (SECTION + (wide && in_eights(padded) ? 28 : 16)); }
// In a section: 64 columns of a row; wide, its sums, the halves of one of its blocks, its scale; else a block's scale.
LUCE_FN int values_place(int half, int row, int padded) { return (half * padded + row) * 64; }
LUCE_FN int sums_place(int row, int padded) { return padded * SECTION + row * (in_eights(padded) ? 8 : 16); }
LUCE_FN int halves_place(int row, int block, int padded) {
    return padded * (SECTION + 8) + ((row % 8 * 4 + block) * (padded / 8) + row / 8) * 4;
}
LUCE_FN int eights_place(int row, int padded) { return ((row % 8 / 2 * (padded / 8) + row / 8) * 2 + row % 2) * 4; }
LUCE_FN int scale_place(int row, int padded) {
    return in_eights(padded) ? padded * (SECTION + 24) + eights_place(row, padded) : sums_place(row, padded) + 8;
}
LUCE_FN int block_scale_place(int row, int block, int padded) {
    return padded * SECTION + (in_eights(padded) ? block * padded * 4 + eights_place(row, padded) : row * 16 + block * 4);
}

// The quantised rows to write; without any, `padded` is 0.
struct Bytes {
    u8* to;
    int padded, wide;
};

// Four columns from `column` on, a multiple of 4: their values, from the first in the lowest byte. Where a block begins
// the sum of its values too, and its scale.
LUCE_FN void put_columns(u32 word, i32 sum, float scale, int column, int row, const Bytes& bytes) {
    const int padded = bytes.padded;
    u8* const to = bytes.to + (i64)(column / SECTION) * section_bytes(padded, bytes.wide);
    const int place =
        in_eights(padded) ? column % 16 / 4 * 16 + column % 64 / 32 * 8 + column % 32 / 16 * 4 : column % 64;
    *reinterpret_cast<u32*>(to + values_place(column % SECTION / 64, row, padded) + place) = word;
    if (column % 32) return;
    const int block = column % SECTION / 32;
    if (!bytes.wide) {
        *reinterpret_cast<float*>(to + block_scale_place(row, block, padded)) = scale;
        return;
    }
    const i32 low = sum & 31;
    u8* const sums = to + sums_place(row, padded);
    sums[block] = (u8)low;
    sums[block + 4] = (u8)(sum >> 5);
    if (in_eights(padded)) {
        *reinterpret_cast<u32*>(to + halves_place(row, block, padded)) =
            (u32)luce_f16((float)(sum - low)).bits | (u32)luce_f16((float)low).bits << 16;
    } else if (block == 0) {
        *reinterpret_cast<u32*>(sums + 12) = 0;
    }
    if (block == 0) *reinterpret_cast<float*>(to + scale_place(row, padded)) = scale;
}

// Whether `column` belongs to a section of a row of `cols` columns; beyond cols its value is zero.
LUCE_FN bool in_section(int column, int cols) { return column < luce_ceil_div(cols, SECTION) * SECTION; }

// Four neighbouring columns of row `row`, from `column` on, of which 32 neighbouring lanes hold a section. All lanes
// of the wave must call it, and those that are not `inside` write nothing. With an infinity or a NaN among the
// columns of a scale that is the scale, and makes NaN of every product; where all numbers are below 1e-30 they
// become zeros.
LUCE_FN void quantise_columns(const float (&x)[4], bool inside, int column, int row, const Bytes& bytes) {
    // The bits of magnitudes are in the order of the magnitudes, and NaN comes last.
    i32 bits = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) bits = luce_max(bits, (i32)(__float_as_uint(x[i]) & 0x7fffffffu));
    const float most = __uint_as_float((u32)(bytes.wide ? luce_lane_max<32>(bits) : luce_lane_max<8>(bits)));
    const float factor = most > 1e-30f && most <= LUCE_FLT_MAX ? 127.0f / most : 0.0f;
    // The sum with MAGIC rounds as rintf does, and the integer is in its lowest bits: a third of the instructions.
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) word |= (__float_as_uint(x[i] * factor + MAGIC) & 255) << 8 * i;
    if (factor == 0.0f) word = 0;
    i32 sum = luce_dot4((i32)word, 0x01010101, 0);
    if (bytes.wide) sum = luce_lane_sum<8>(sum);
    if (inside) put_columns(word, sum, most <= 1e-30f ? 0.0f : most / 127.0f, column, row, bytes);
}

// Row `row`, one beyond the last, of `count` columns from `column` on, which begins a section: zeros, by `threads`
// threads.
LUCE_FN void quantise_nothing(int column, int count, int row, const Bytes& bytes, int thread, int threads) {
    for (int i = thread * 4; in_section(i, count); i += threads * 4) put_columns(0, 0, 0.0f, column + i, row, bytes);
}
