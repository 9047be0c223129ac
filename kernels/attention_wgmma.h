// Softmax over pages by products of four waves (wgmma).
//
// Two groups of four waves have 64 rows each, with all keys and columns, so that they share only pages. Four more waves
// bring the pages, TOGETHER of them at a time, in units of at most UNIT bytes: panels of 64 columns of the keys of these
// pages, then rows of the values of the first page and of the second one. Units lie in a ring of SLOTS slots. A gate says of
// each slot that it is full, another one that both groups have read it. So no group waits for the other one, unless it is a
// whole ring ahead, and one's softmax runs beside the other's products.
//
// Where pages are what products multiply (MAPPED), one lane asks the copy engine for them. Otherwise the four waves convert
// them, and fence for the products (luce_wgmma_share). The groups fence nothing while they multiply.
#pragma once
#include "gate.h"
#include "wgmma_wide.h"

#if defined(SOFTCAP) && HEAD == 256
#define TOGETHER 1  // pages whose scores are made at a time; tanh needs the other one's registers
#else
#define TOGETHER 2
#endif
#define UNIT 16384
#define SLOTS (HEAD == 256 ? 10 : 12)
#define KEY_UNITS (HEAD / 64)              // of the pages together
#define VALUE_UNITS (HEAD == 256 ? 2 : 1)  // of a page
#define UNIT_ROWS (PAGE / VALUE_UNITS)     // of values
// Waves that bring units.
#if MAPPED
#define FETCHING_WAVES 1
#else
#define FETCHING_WAVES (FETCHING / LUCE_LANES)
#endif
// A wave brings unit n when unit n - SLOTS has been read. Groups say that they have read a unit when they have all units of its
// pages' keys, or of its page's values: so these fit into the ring.
static_assert(SLOTS >= KEY_UNITS && SLOTS >= VALUE_UNITS, "units that are read together");
static_assert(SLOTS >= FETCHING_WAVES, "n - FETCHING_WAVES - SLOTS is n - 2 SLOTS or later");
// That n - 2 SLOTS has been read, which the wait for n - SLOTS takes for granted (gate.h), follows from the wave's last unit: for
// it n - FETCHING_WAVES - SLOTS was read.

// Registers of the threads that fetch, and of those that multiply. Together they take at most what the block begins with:
// more would never come.
#define FETCHING_REGISTERS 56
#define MULTIPLYING_REGISTERS 224
static_assert(FETCHING_REGISTERS * FETCHING + MULTIPLYING_REGISTERS * LOADING <= 65536 / THREADS / 8 * 8 * THREADS,
              "registers of a block");

struct Shared {
    alignas(1024) u8 q[QUERIES * HEAD * 2];
    alignas(1024) u8 unit[SLOTS][UNIT];
    Gate full[SLOTS], read[SLOTS];
    Gate queries;
};

// Where the next unit of the ring is, for the waves that multiply.
struct Place {
    int slot = 0, turn = 0;
    __device__ __forceinline__ void next() {
        if (++slot == SLOTS) slot = 0, turn ^= 1;
    }
};

// Chunks that a lane asks for before it writes the first: as many as it has registers for.
template <typename T> struct Ahead {
    static constexpr int chunks = 2;
};
template <typename T> struct Ahead<KVFloat<T>> {
    static constexpr int chunks = 4;
};
template <> struct Ahead<Q4_0> {
    static constexpr int chunks = 1;
};

// Writes COLUMNS columns, from `column` on, of `count` rows from `key` on of an entry's page: row i of the unit's panels of `rows`
// rows is the page's row key + i. Rows beyond the tile's last position may hold any bits, also values whose product with 0 is
// NaN: they become zeros.
template <typename T, int COLUMNS>
LUCE_FN void fetch_rows(u8* to, int rows, const typename T::Element* pool, const Tile& tile, int entry, int key, int count,
                        int column) {
    constexpr int CHUNKS = COLUMNS / 8, STEP = LUCE_LANES / CHUNKS, BATCH = Ahead<T>::chunks;
    const int own = luce_lane() / CHUNKS, chunk = luce_lane() % CHUNKS;
    column += chunk * 8;
    const int keys = column < tile.d ? tile.high - tile.first[entry] + 1 - key : 0;
    const i64 row = (i64)tile.pages[entry] * PAGE + key + own;
    const int step = (int)T::offset(STEP * tile.row);
    const typename T::Element* from = pool + T::offset(row * tile.row) + T::offset(column);
    to += chunk / 8 * rows * 128;
#pragma unroll 1
    for (int i = own; i < count; i += BATCH * STEP) {
        u32 words[BATCH][4];
#pragma unroll
        for (int j = 0; j < BATCH; j++) load_chunk(T(), words[j], from + j * step, column, i + j * STEP < keys);
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            const int at = i + j * STEP;
            store_chunk(T(), to + at * 128 + ((chunk ^ at) & 7) * 16, words[j], from + j * step, at < keys);
        }
        from += BATCH * step;
    }
}

// The wave has written the unit of a slot.
LUCE_FN void fill(Shared& shared, int slot) {
    luce_copy_close();
    luce_copy_wait<0>();
    luce_wgmma_share();
    luce_sync_lanes();
    if (luce_lane() == 0) luce_gate_arrive(&shared.full[slot]);
}

// The wave writes unit n: part `part` of an entry's values.
LUCE_FN void fetch_values(const Tile& tile, Shared& shared, int n, int entry, int part) {
    fetch_rows<VTYPE, HEAD>(shared.unit[n % SLOTS], UNIT_ROWS, tile.v_pool, tile, entry, part * UNIT_ROWS, UNIT_ROWS, 0);
    fill(shared, n % SLOTS);
}

// Until unit n may be written.
LUCE_FN void wait_for_slot(Shared& shared, int n) { luce_gate_wait(&shared.read[n % SLOTS], n / SLOTS - 1); }

// fetch_pages(tile, shared, begin, end, unit) brings the units of the pages [begin, end), number `unit` of the ring and on, and
// returns the number behind them.
#if MAPPED
// A lane asks the copy engine for unit n: `count` boxes of `size` bytes, by load(i, place, gate).
template <typename Load> LUCE_FN void fetch_boxes(Shared& shared, int n, int count, int size, const Load& load) {
    const int slot = n % SLOTS;
    wait_for_slot(shared, n);
    luce_gate_expect(&shared.full[slot], count * size);
#pragma unroll
    for (int i = 0; i < count; i++) load(i, shared.unit[slot] + i * size, &shared.full[slot]);
}

// A lane asks for the units of some pages, but not for those from number `end` on. Rows of keys beyond the tile's last position
// may hold any bits: their scores are hidden.
template <int PAGES> LUCE_FN void ask_for_pages(const Tile& tile, Shared& shared, int entry, int unit, int end) {
    int rows[PAGES];
#pragma unroll
    for (int page = 0; page < PAGES; page++) rows[page] = tile.pages[entry + page] * PAGE;
#pragma unroll 1
    for (int panel = 0; panel < KEY_UNITS; panel++)
        fetch_boxes(shared, unit + panel, PAGES, PAGE * 128, [&](int page, u8* to, Gate* gate) {
            luce_box_load(to, tile.k_map, panel * 64, blockIdx.y, rows[page], gate);
        });
#pragma unroll
    for (int i = 0; i < PAGES * VALUE_UNITS; i++) {
        if (unit + KEY_UNITS + i >= end) return;
        const int row = rows[i / VALUE_UNITS] + i % VALUE_UNITS * UNIT_ROWS;
        fetch_boxes(shared, unit + KEY_UNITS + i, HEAD / 64, UNIT_ROWS * 128, [&](int panel, u8* to, Gate* gate) {
            luce_box_load(to, tile.v_map, panel * 64, blockIdx.y, row, gate);
        });
    }
}

// The wave itself writes the last units if their values lie in part beyond the tile's last position.
LUCE_FN int fetch_pages(const Tile& tile, Shared& shared, int begin, int end, int unit) {
    const int last = unit + luce_ceil_div(end - begin, TOGETHER) * KEY_UNITS + (end - begin) * VALUE_UNITS;
    const int seen = begin < end ? tile.high + 1 - tile.first[end - 1] : PAGE;
    const int whole = last - VALUE_UNITS + luce_min(seen / UNIT_ROWS, VALUE_UNITS);
    if (luce_lane() == 0) {
        int entry = begin;
#pragma unroll 1
        for (; entry + TOGETHER <= end; entry += TOGETHER, unit += KEY_UNITS + TOGETHER * VALUE_UNITS)
            ask_for_pages<TOGETHER>(tile, shared, entry, unit, whole);
        if (TOGETHER == 2 && entry < end) ask_for_pages<1>(tile, shared, entry, unit, whole);
    }
    luce_sync_lanes();
#pragma unroll 1
    for (int n = whole; n < last; n++) {
        wait_for_slot(shared, n);
        fetch_values(tile, shared, n, end - 1, n - (last - VALUE_UNITS));
    }
    return last;
}
#else
LUCE_FN int fetch_pages(const Tile& tile, Shared& shared, int begin, int end, int unit) {
    const int wave = luce_wave() % FETCHING_WAVES;
#pragma unroll 1
    for (int entry = begin; entry < end; entry += TOGETHER) {
        const int pages = luce_min(TOGETHER, end - entry), units = KEY_UNITS + VALUE_UNITS * pages;
        // Every FETCHING_WAVES-th unit is the wave's, whatever the pages.
#pragma unroll 1
        for (int i = (wave - unit) & FETCHING_WAVES - 1; i < units; i += FETCHING_WAVES) {
            const int slot = (unit + i) % SLOTS, values = i - KEY_UNITS;
            wait_for_slot(shared, unit + i);
            if (values < 0) {
                for (int page = 0; page < pages; page++)
                    fetch_rows<KTYPE, 64>(shared.unit[slot] + page * PAGE * 128, TOGETHER * PAGE, tile.k_pool, tile,
                                          entry + page, 0, PAGE, i * 64);
                fill(shared, slot);
            } else {
                fetch_values(tile, shared, unit + i, entry + values / VALUE_UNITS, values % VALUE_UNITS);
            }
        }
        unit += units;
    }
    return unit;
}
#endif

// Scores of a page to weights: `keep` is the factor of the earlier pages' sums.
LUCE_FN void weigh(const Tile& tile, float (&score)[KEY_TILES][4], int at, Sums& sums, float (&keep)[2],
                   u32 (&weight)[PAGE / 16][4]) {
    const int t = luce_lane() % 4, row = wave_row() + luce_lane() / 4;
    bend(tile, score);
    const bool whole = all_seen(tile, at);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (!whole) mask(tile, score, half, row + half * 8, at, t * 2);
        float top = sums.top[0][half];
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++) top = fmaxf(top, fmaxf(score[n][half * 2], score[n][half * 2 + 1]));
        top = luce_lane_max<4>(top);
        float base = softmax_base(top);
        keep[half] = luce_exp2(sums.top[0][half] - base);
        sums.top[0][half] = top;
        base -= WEIGHT_SHIFT;
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
            for (int e = half * 2; e < half * 2 + 2; e++) score[n][e] = luce_exp2(score[n][e] - base);
    }
#pragma unroll
    for (int step = 0; step < PAGE / 16; step++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float* pair = &score[step * 2 + i / 2][i % 2 * 2];
            weight[step][i] = Values::pair(pair[0], pair[1]);
        }
}

LUCE_FN void add_all_weights(float (&total)[2], const float (&keep)[2], const u32 (&weight)[PAGE / 16][4]) {
    total[0] *= keep[0];
    total[1] *= keep[1];
#pragma unroll
    for (int step = 0; step < PAGE / 16; step++) add_weights(total, weight[step]);
}

// Multiplies the sums of earlier pages.
LUCE_FN void keep_values(float (*value)[4], const float (&keep)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (luce_ballot(keep[half] != 1.0f) == 0) continue;  // maxima seldom change far on
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) {
            value[n][half * 2] *= keep[half];
            value[n][half * 2 + 1] *= keep[half];
        }
    }
}

// The wave has read the slot's unit. Groups have when all their waves say so.
LUCE_FN void release(Shared& shared, Place& place) {
    if (luce_lane() == 0) luce_gate_arrive(&shared.read[place.slot]);
    place.next();
}

// Waits for the next unit.
LUCE_FN luce_rows_t arrived(Shared& shared, Place& place) {
    luce_gate_wait(&shared.full[place.slot], place.turn);
    const luce_rows_t unit = luce_wgmma_rows_further(luce_wgmma_rows_at(shared.unit), place.slot * UNIT);
    place.next();
    return unit;
}

// Starts score = q k^T of PAGES pages.
template <int PAGES> LUCE_FN void multiply_keys(Shared& shared, Place& place, float (*score)[4]) {
    // Of all lanes the same, which the compiler does not see by itself.
    const int group = luce_shfl(luce_wave() / 4, 0);
    const luce_rows_t q = luce_wgmma_rows_further(luce_wgmma_rows_at(shared.q), group * 64 * 128);
#pragma unroll
    for (int panel = 0; panel < KEY_UNITS; panel++) {
        const luce_rows_t k = arrived(shared, place);
        luce_wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; step++)
            luce_wgmma_wide<Scores::Element, PAGES * PAGE>(
                score, luce_wgmma_rows_further(q, panel * QUERIES * 128 + step * 32),
                luce_wgmma_rows_further(k, step * 32), panel + step > 0);
    }
    luce_wgmma_close();
}

// Starts value += weight v of a page.
LUCE_FN void multiply_values(Shared& shared, Place& place, float (*value)[4], const u32 (&weight)[PAGE / 16][4]) {
    typedef Values::Element Element;
#pragma unroll
    for (int part = 0; part < VALUE_UNITS; part++) {
        const luce_rows_t v = arrived(shared, place);
        luce_wgmma_fence();
#pragma unroll
        for (int step = 0; step < UNIT_ROWS / 16; step++)
            luce_wgmma_wide<Element, HEAD>(value, weight[part * (UNIT_ROWS / 16) + step],
                                           luce_wgmma_rows_further(v, step * 16 * 128), UNIT_ROWS * 128);
    }
    luce_wgmma_close();
}

LUCE_FN void release_values(Shared& shared, Place& read) {
#pragma unroll
    for (int part = 0; part < VALUE_UNITS; part++) release(shared, read);
}

// Adds the next PAGES pages, one or two, from `entry` on. `place` is the next unit, `read` the first one that was not
// released.
template <int PAGES>
LUCE_FN void add_pages(const Tile& tile, Shared& shared, int entry, Place& place, Place& read, Sums& sums) {
    float(&value)[COLUMN_TILES][4] = sums.value[0];
    const int at = tile.first[entry], second = PAGES == 2 ? tile.first[entry + 1] : 0;
    float score[PAGES][KEY_TILES][4];
    multiply_keys<PAGES>(shared, place, score[0]);
    luce_wgmma_wait<0>();
    luce_wgmma_hold(score[0]);
    luce_wgmma_hold(score[PAGES - 1]);
#pragma unroll
    for (int panel = 0; panel < KEY_UNITS; panel++) release(shared, read);

    float keep[2];
    u32 weight[PAGE / 16][4];
    weigh(tile, score[0], at, sums, keep, weight);
    add_all_weights(sums.total[0], keep, weight);
    keep_values(value, keep);
    multiply_values(shared, place, value, weight);
    if (PAGES == 2) {
        u32 more[PAGE / 16][4];
        weigh(tile, score[PAGES - 1], second, sums, keep, more);
        add_all_weights(sums.total[0], keep, more);
        luce_wgmma_wait<0>();
        luce_wgmma_hold(value);
        release_values(shared, read);
        keep_values(value, keep);
        multiply_values(shared, place, value, more);
    }
    luce_wgmma_wait<0>();
    luce_wgmma_hold(value);
    release_values(shared, read);
}

// The sums of each of the runs of pages of a tile: `runs` calls its argument with the pages [begin, end) of each run, and
// with what `done` gets beside the sums.
template <typename Runs, typename Done>
LUCE_FN void attend_runs(const Tile& tile, Shared& shared, const Queries& queries, Runs runs, Done done) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < SLOTS; i++) {
            luce_gate_begin(&shared.full[i], 1);
            luce_gate_begin(&shared.read[i], LOADING / LUCE_LANES);
        }
        luce_gate_begin(&shared.queries, LOADING);
        luce_gate_ready();
    }
    luce_sync();
    if (threadIdx.x >= LOADING) {
        luce_wgmma_fewer_registers<FETCHING_REGISTERS>();
        if (luce_wave() - LOADING / LUCE_LANES >= FETCHING_WAVES) return;
        int unit = 0;
        runs([&](int begin, int end, int) { unit = fetch_pages(tile, shared, begin, end, unit); });
    } else {
        luce_wgmma_more_registers<MULTIPLYING_REGISTERS>();
        load_queries(tile, shared.q, queries);
        luce_wgmma_share();
        luce_gate_arrive(&shared.queries);
        luce_gate_wait(&shared.queries, 0);
        Place place, read;
        runs([&](int begin, int end, int pages) {
            Sums sums;
            clear(sums);
            int entry = begin;
#pragma unroll 1
            for (; entry + TOGETHER <= end; entry += TOGETHER) add_pages<TOGETHER>(tile, shared, entry, place, read, sums);
            if (TOGETHER == 2 && entry < end) add_pages<1>(tile, shared, entry, place, read, sums);
            join_totals(sums);
            done(sums, pages);
        });
    }
}
