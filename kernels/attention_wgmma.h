// Softmax over pages by products of four waves (wgmma). A wave has 16 rows with all keys and columns, so that only
// pages and queries are shared.
#pragma once

struct Shared {
    alignas(1024) u8 q[QUERIES * HEAD * 2];
    alignas(1024) u8 k[2][PAGE * HEAD * 2];
    alignas(1024) u8 v[2][PAGE * HEAD * 2];
};

// Starts to fetch an entry, if it lies before `end`.
LUCE_FN void start_page(const Tile& tile, Shared& shared, int entry, int end, int stage) {
    if (entry < end) {
        fetch<KTYPE>(shared.k[stage], tile.k_pool, tile, entry);
        fetch<VTYPE>(shared.v[stage], tile.v_pool, tile, entry);
    }
    luce_copy_close();
}

LUCE_FN void start_pages(const Tile& tile, Shared& shared, int begin, int end) {
    start_page(tile, shared, begin, end, 0);
}

// Softmax over the pages [begin, end) of the tile's span, from zero. The copy of the first page has started.
LUCE_FN void attend(const Tile& tile, Shared& shared, int begin, int end, Sums& sums) {
    typedef Scores::Element KElement;
    typedef Values::Element VElement;
    int g = luce_lane() / 4, t = luce_lane() % 4, row = wave_row() + g, group = luce_wave() / 4;
    float(*value)[4] = sums.value[0];
    clear(sums);
    for (int entry = begin; entry < end; entry++) {
        int stage = (entry - begin) % 2;
        luce_copy_wait<0>();
        luce_wgmma_share();
        luce_sync();  // the page has arrived, and the previous one has been read
        start_page(tile, shared, entry + 1, end, 1 - stage);
        float score[KEY_TILES][4];
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) score[n][e] = 0.0f;
        luce_wgmma_fence();
#pragma unroll
        for (int step = 0; step < HEAD / 16; step++) {
            const u8* q = shared.q + (step / 4 * QUERIES + group * 64) * 128 + step % 4 * 32;
            luce_wgmma<KElement>(score, q, shared.k[stage] + step / 4 * PAGE * 128 + step % 4 * 32);
        }
        luce_wgmma_wait();
        bend(tile, score);
        int at = tile.first[entry];
        bool whole = all_seen(tile, at);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (!whole) mask(tile, score, half, row + half * 8, at, t * 2);
            float top = sums.top[0][half];
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++) top = fmaxf(top, fmaxf(score[n][half * 2], score[n][half * 2 + 1]));
            top = luce_lane_max<4>(top);
            float base = softmax_base(top), keep = luce_exp2(sums.top[0][half] - base);
            sums.top[0][half] = top;
            base -= WEIGHT_SHIFT;
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
                for (int e = half * 2; e < half * 2 + 2; e++) score[n][e] = luce_exp2(score[n][e] - base);
            sums.total[0][half] *= keep;
            if (luce_ballot(keep != 1.0f) == 0) continue;  // maxima seldom change far on
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n++) {
                value[n][half * 2] *= keep;
                value[n][half * 2 + 1] *= keep;
            }
        }
        u32 weight[PAGE / 16][4];
#pragma unroll
        for (int step = 0; step < PAGE / 16; step++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* pair = &score[step * 2 + i / 2][i % 2 * 2];
                weight[step][i] = Values::pair(pair[0], pair[1]);
            }
            add_weights(sums.total[0], weight[step]);
        }
        luce_wgmma_fence();
#pragma unroll
        for (int step = 0; step < PAGE / 16; step++)
#pragma unroll
            for (int panel = 0; panel < HEAD / 64; panel++)
                luce_wgmma<VElement>(value + panel * 8, weight[step],
                                     shared.v[stage] + (panel * PAGE + step * 16) * 128);
        luce_wgmma_wait();
    }
}
