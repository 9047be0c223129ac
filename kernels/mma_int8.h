// The sums of dot_int8.h for 8 or 16 rows of x on tensor cores: the same operations in the same order, so the same
// bits.
//
// A block has TILES tiles of 16 weight rows, and a wave for each of CHAINS chains, which takes its chain of all tiles.
// With SHARED_X, x is copied to shared memory once for all waves; otherwise it is read through the caches.
#ifndef MMA_INT8_H
#define MMA_INT8_H
#include "dot_int8.h"

#ifndef TILES
#define TILES 1
#endif
#ifndef SHARED_X
#define SHARED_X 0
#endif
// Units of each row and chain in flight or in use.
#define TILE_STAGES 2

// Bytes of a unit of x.
#define UNIT_X (2 * section_bytes(ROWS, INTEGER_SCALES))
#define WEIGHT_STAGE (16 * TILES * TILE_STRIDE)
#define TILE_STAGE (WEIGHT_STAGE + (SHARED_X ? CHAINS * UNIT_X : 0))
// Times eight rows of x, and the sums of a chain's result.
#define EIGHTS (ROWS / 8)
#define SUMS (INTEGER_SCALES ? 2 : 4)
// Sections of a unit's x that a lane loads before it waits for the weights: as many as it has registers for. On an
// H200, us with none, one and two: 16 rows Q4_K 34816 x 5120 38.4, 37.5, 36.5, 5120 x 17408 31.6, 27.4, 27.1, Q6_K
// 5120 x 17408 48.5, 52.9, 38.8, 248320 x 5120 371, 369, 361; 8 rows Q4_K 31.0, 31.6 and 17.3, 17.6, Q6_K 31.9, 30.9
// and 315, 305.
#define AHEAD (!INTEGER_SCALES || SHARED_X ? 0 : ROWS == 16 ? 2 : HAS_MINIMUM ? 0 : 1)

// Whether rows of weights come by bulk copies. H200, 16 rows, us with and without: Q6_K 5120 x 17408 35.7 and 37.6, 62080 x
// 5120 91 and 102, Q4_K 5120 x 17408 22.3 and 23.1, 5120 x 6144 9.1 and 9.4, but Q4_K 34816 x 5120 37.3 and 36.5, Q8_0 5120 x
// 5120 15.4 and 13.7.
#define TILES_BY_BULK (BY_BULK && INTEGER_SCALES && (CHAINS == 8 || QTYPE == Q6_K))

#if LUCE_MMA_S8

// A unit of a tile's 16 rows: `in` are rows lane / 4 and 8 more, `line` is row lane % 16 at byte lane / 16 * 16.
struct TileUnit {
    Unit in[2];
    const u8* line;
};

#if HAS_MINIMUM
// Words t and t + 4 of rows lane / 4 and 8 more of both blocks of span `span`, as luce_mma_s8_32 takes them; `fifths`
// are of the unit.
LUCE_FN void tile_words(const u8* line, const u32 (&fifths)[4], int span, u32 (&a)[2][4]) {
    u32 bits[4];
    luce_ldmatrix(bits, line + BLOCK_BYTES - 128 + span * 32);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a[0][i] = low_bits(bits[i], fifths[i], span * 2), a[1][i] = low_bits(bits[i] >> 4, fifths[i], span * 2 + 1);
    }
}
#endif

// The scales of COUNT rows of x for a lane's results, from those of the first two rows on.
template <int COUNT> LUCE_FN void row_floats(const u8* from, float (&to)[COUNT / 8][2]) {
    if constexpr (COUNT >= 16) {
#pragma unroll
        for (int i = 0; i < COUNT / 8; i += 2) {
            const float4 four = *reinterpret_cast<const float4*>(from + i * 8);
            to[i][0] = four.x, to[i][1] = four.y, to[i + 1][0] = four.z, to[i + 1][1] = four.w;
        }
    } else {
        const float2 two = *reinterpret_cast<const float2*>(from);
        to[0][0] = two.x, to[0][1] = two.y;
    }
}

// The sums of a block's values in rows g, g + 8, ..., as fp16.
template <int COUNT> LUCE_FN void row_totals(const u8* from, u32 (&to)[COUNT / 8]) {
    if constexpr (COUNT == 32) {
        const uint4 four = *reinterpret_cast<const uint4*>(from);
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else if constexpr (COUNT == 16) {
        const uint2 two = *reinterpret_cast<const uint2*>(from);
        to[0] = two.x, to[1] = two.y;
    } else {
        to[0] = luce_u32_at4(from);
    }
}

// A lane's words of 64 columns of ROWS rows of x: x and y are of the first block, z and w of the second.
LUCE_FN void row_words(const u8* from, uint4 (&b)[EIGHTS]) {
#pragma unroll
    for (int c = 0; c < EIGHTS; c++) b[c] = *reinterpret_cast<const uint4*>(from + values_place(0, c * 8, ROWS));
}

// A lane's values of a section of ROWS rows of x that share a scale in it.
struct SectionX {
    uint4 words[2][EIGHTS];
    float factor[EIGHTS][2];
    u32 totals[EIGHTS];
};

LUCE_FN void load_section(const u8* section, SectionX& to) {
    const int g = luce_lane() / 4, t = luce_lane() % 4;
#pragma unroll
    for (int pair = 0; pair < 2; pair++) row_words(section + values_place(pair, g, ROWS) + t * 16, to.words[pair]);
    row_floats<ROWS>(section + scale_place(2 * t, ROWS), to.factor);
#if HAS_MINIMUM
    row_totals<ROWS>(section + halves_place(g, t, ROWS), to.totals);
#endif
}

// Adds to sum[i][tile][c][e] the products of a unit of TILES times 16 rows, the first `left` columns of it, with ROWS
// rows of x; i is the half, or the set. Element e is where luce_mma_s8_32 has it. x: of the unit, of which AHEAD
// sections are loaded.
#if INTEGER_SCALES
LUCE_FN void add_tile_unit(const TileUnit (&unit)[TILES], const u8* x, SectionX (&sections)[2], int left,
                           float (&sum)[SUMS][TILES][EIGHTS][4]) {
    const int t = luce_lane() % 4;
    UnitScales own[TILES][2];
    u32 fifths[TILES][4] = {};
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
        own[tile][0] = unit_scales(unit[tile].in[0]), own[tile][1] = unit_scales(unit[tile].in[1]);
        if (QTYPE == Q5_K) luce_ldmatrix(fifths[tile], unit[tile].line + 16);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        SectionX& section = sections[half];
        if (half >= AHEAD) load_section(x + half * section_bytes(ROWS, true), section);
        i32 products[TILES][EIGHTS][4] = {};
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            const uint4 (&b)[EIGHTS] = section.words[pair];
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
#if HAS_MINIMUM
                u32 a[2][4];
                tile_words(unit[tile].line, fifths[tile], half * 2 + pair, a);
#else
                // For all of the half, whose blocks share bytes.
                u32 w[2][SPAN32][2];
                span_pairs(unit[tile].in[0], half, t, w[0]);
                span_pairs(unit[tile].in[1], half, t, w[1]);
#endif
#pragma unroll
                for (int k = 0; k < 2; k++) {
#pragma unroll
                    for (int part = 0; part < GROUPS32; part++) {
                        const int group = (half * 4 + pair * 2 + k) * GROUPS32 + part;
                        const i32 scale[2] = {group_scale(own[tile][0], group), group_scale(own[tile][1], group)};
#pragma unroll
                        for (int c = 0; c < EIGHTS; c++) {
                            const u32 words[2] = {k ? b[c].z : b[c].x, k ? b[c].w : b[c].y};
                            i32 found[4];
#if HAS_MINIMUM
                            luce_mma_s8_32(found, a[k], words, 0);
#else
                            const u32 rows[2] = {w[0][pair * 2 + k][part], w[1][pair * 2 + k][part]};
                            luce_mma_s8_16(found, rows, words[part], 0);
#endif
#pragma unroll
                            for (int e = 0; e < 4; e++) products[tile][c][e] += found[e] * scale[e / 2];
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
#if HAS_MINIMUM
            const u32 least[2] = {luce_f16_twice(own[tile][0].minimums[half], t),
                                  luce_f16_twice(own[tile][1].minimums[half], t)};
#endif
#pragma unroll
            for (int c = 0; c < EIGHTS; c++) {
                float minimums[4] = {};
#if HAS_MINIMUM
                luce_mma_f16_8(minimums, least, section.totals[c]);
#endif
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const UnitScales& s = own[tile][e / 2];
                    const float value = section_value(products[tile][c][e], minimums[e], s.scale, s.minimum);
                    sum[half][tile][c][e] = fmaf(section.factor[c][e % 2], value, sum[half][tile][c][e]);
                }
            }
        }
    }
}
#else
LUCE_FN void add_tile_unit(const TileUnit (&unit)[TILES], const u8* x, SectionX (&sections)[2], int left,
                           float (&sum)[SUMS][TILES][EIGHTS][4]) {
    const int g = luce_lane() / 4, t = luce_lane() % 4;
    const u8* const values = x + values_place(0, g, ROWS) + t * 16;
#pragma unroll
    for (int set = 0; set < 4; set++) {
        if (set * 64 >= left) break;
        const u8* const section = x + set / 2 * section_bytes(ROWS, false);
        uint4 b[EIGHTS];
        row_words(values + set / 2 * section_bytes(ROWS, false) + values_place(set % 2, 0, ROWS), b);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int block = set * 2 + k;
            if (block * 32 >= left) break;
            float factor[EIGHTS][2];
            row_floats<ROWS>(section + block_scale_place(2 * t, block % 4, ROWS), factor);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                u32 w[2][1][2];
                span_pairs(unit[tile].in[0], block, t, w[0]);
                span_pairs(unit[tile].in[1], block, t, w[1]);
                const u32 a[4] = {w[0][0][0], w[1][0][0], w[0][0][1], w[1][0][1]};
                const float scale[2] = {block_scale(unit[tile].in[0], block), block_scale(unit[tile].in[1], block)};
#pragma unroll
                for (int c = 0; c < EIGHTS; c++) {
                    const u32 words[2] = {k ? b[c].z : b[c].x, k ? b[c].w : b[c].y};
                    i32 found[4];
                    luce_mma_s8_32(found, a, words, MAGIC_BITS);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        float& to = sum[set][tile][c][e];
                        to = add_block(found[e], scale[e / 2], factor[c][e % 2], to);
                    }
                }
            }
        }
    }
}
#endif

// A row of a weight, and the end of its memory.
struct TileRow {
    const u8 *from, *end;
};

// The products of 16 * TILES weight rows of `cols` columns with ROWS rows of x, by 32 * CHAINS threads. `row(feature)`
// returns TileRow; the rows of a tile are of one memory. Shared memory: TILE_STAGES * TILE_STAGE bytes, or as many
// stages as there are steps of CHAINS units, or what the result takes. Returns, complete for all threads,
// partial[(chain * ROWS + r) * PARTIAL_STRIDE(16 * TILES) + feature].
template <typename Source> LUCE_FN const float* tile_sums(const Source& row, const u8* x, int cols, u8* shared) {
    const int units = whole_units(cols);
    const int thread = luce_thread(), chain = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;

#if TILES_BY_BULK
    // A lane has one of the rows that its wave copies for all.
    const RowCopies<TILE_STAGES> arrived(WORKER_ROWS * TILES);
    const int copied = lane / WORKER_ROWS * 16 + chain * WORKER_ROWS + lane % WORKER_ROWS;
    const TileRow source = row(luce_min(copied, 16 * TILES - 1));
    TileCopy mine = {source.from, (int)row_bytes(cols)};
    const auto copy_weights = [&](int unit, int stage) {
        if (unit < units) arrived.copy(shared + copied * TILE_STRIDE + stage, mine, source.end, stage / TILE_STAGE);
    };
#else
    TileCopy mine[TILES];
#pragma unroll
    for (int i = 0; i < TILES; i++)
        mine[i] = {row(thread / SHARE + i * 16).from + thread % SHARE * 16, (int)row_bytes(cols) - thread % SHARE * 16};
    u8* const to = shared + thread / SHARE * TILE_STRIDE + thread % SHARE * 16;
    const auto copy_weights = [&](int unit, int stage) {
        // Rows that may begin at any byte are copied with the bytes around them. For a step after the last one only
        // those bytes would be copied, and no wait would cover them: they could overwrite the partial sums.
        if (ODD_UNITS && unit >= units) return;
#pragma unroll
        for (int i = 0; i < TILES; i++)
            copy_step(to + stage + i * 16 * TILE_STRIDE, mine[i], thread % SHARE, row(i * 16).end);
    };
#endif
    // The x of a step's units lies together.
    const auto copy_x = [&](int unit, int stage) {
        if (!SHARED_X || unit >= units) return;
        const int size = luce_min(CHAINS * 2, luce_ceil_div(cols, SECTION) - unit * 2) * (UNIT_X / 2);
        const u8* from = x + (i64)unit * UNIT_X + thread * 16;
#pragma unroll
        for (int i = 0; i < CHAINS * UNIT_X; i += 512 * CHAINS) {
            if (i + thread * 16 < size) luce_copy16(shared + stage + WEIGHT_STAGE + i + thread * 16, from + i, true);
        }
    };
    int put = 0, take = 0;  // offsets of the stages that are filled and read next
#if TILES_BY_BULK
    int turn = 0;  // how often all stages have been read
#endif
    const auto next = [](int stage) { return stage == (TILE_STAGES - 1) * TILE_STAGE ? 0 : stage + TILE_STAGE; };

    // This chain's x of this step; in shared memory counted from the stage's place.
    const u8* met = (SHARED_X ? shared + WEIGHT_STAGE : x) + chain * UNIT_X;
    const u8* const own = shared + g * TILE_STRIDE + (ODD_UNITS ? 0 : chain * UNIT_BYTES);
    const u8* const line = shared + lane % 16 * TILE_STRIDE + chain * UNIT_BYTES + lane / 16 * 16;
    u32 low[TILES][2];
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            low[tile][i] = (u32)(u64)row(tile * 16 + i * 8 + g).from;
#if defined(__CUDA_ARCH__) && !INTEGER_SCALES
            asm("" : "+r"(low[tile][i]));  // as in copy_step; Q6_K has no registers for it
#endif
        }
    }
    float sum[SUMS][TILES][EIGHTS][4] = {};

#pragma unroll
    for (int stage = 0; stage < TILE_STAGES - 1; stage++) copy_weights(stage * CHAINS, stage * TILE_STAGE);
    luce_await();  // until here, only weights were fetched
#pragma unroll
    for (int stage = 0; stage < TILE_STAGES - 1; stage++) {
        copy_x(stage * CHAINS, put);
        luce_copy_close();
        put = next(put);
    }
#pragma unroll 1
    for (int unit0 = 0; unit0 < units; unit0 += CHAINS) {
        SectionX sections[2];
        if (AHEAD > 0 && unit0 + chain < units) {
#pragma unroll
            for (int i = 0; i < AHEAD; i++) load_section(met + i * section_bytes(ROWS, true), sections[i]);
        }
#if TILES_BY_BULK
        arrived.wait(take / TILE_STAGE, turn);
        turn += next(take) == 0;
#endif
        luce_copy_wait<TILE_STAGES - 2>();
        luce_sync();  // this step's units have arrived, and the units overwritten next have been read
        copy_weights(unit0 + (TILE_STAGES - 1) * CHAINS, put);
        copy_x(unit0 + (TILE_STAGES - 1) * CHAINS, put);
        luce_copy_close();
        put = next(put);
        TileUnit unit[TILES];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            unit[tile].line = line + take + tile * 16 * TILE_STRIDE;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int skew =
                    ODD_UNITS ? (int)(low[tile][i] + (u32)unit0 * UNIT_BYTES & 15) + chain * UNIT_BYTES : 0;
                unit[tile].in[i] = {own + take + (tile * 16 + i * 8) * TILE_STRIDE + (skew & ~3), (u32)(skew & 2) * 8};
            }
        }
        const u8* const now = met + (SHARED_X ? take : 0);
        take = next(take);
        if (unit0 + chain < units) add_tile_unit(unit, now, sections, cols - (unit0 + chain) * UNIT_COLS, sum);
        if (!SHARED_X) met += CHAINS * UNIT_X;
    }
    luce_release();
    luce_sync();  // the partial sums take the units' place

    float* const partial = reinterpret_cast<float*>(shared);
    float* const to_sum = partial + chain * ROWS * PARTIAL_STRIDE(16 * TILES) + g;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++) {
            const int r = i / 4 * 8 + t * 2 + i % 2;
            const auto of = [&](int k) { return sum[k][tile][i / 4][i % 4]; };
            const float total = INTEGER_SCALES ? of(0) + of(1) : (of(0) + of(2 % SUMS)) + (of(1) + of(3 % SUMS));
            to_sum[r * PARTIAL_STRIDE(16 * TILES) + tile * 16 + i % 4 / 2 * 8] = total;
        }
    }
    luce_sync();
    return partial;
}

#endif
#endif
