// Softmax over pages by products of single waves (mma.sync). Waves share a tile's rows, the keys of the scores and the
// columns of the values; a row's maximum, and its weights, go through shared memory.
#pragma once

struct Shared {
    alignas(128) u8 q[QUERIES * HEAD * 2];
    alignas(128) u8 k[PAGE * HEAD * 2];
    alignas(128) u8 v[PAGE * HEAD * 2];
    u8 weight[QUERIES * PAGE * 2];
    float top[WAVES_N][QUERIES];
};

// Starts to fetch the page of an entry. Rows beyond the tile's last position may hold any bits, also values whose
// product with 0 is NaN: they become zeros.
template <typename T> LUCE_FN void fetch(u8* to, const typename T::Element* pool, const Tile& tile, int entry) {
    const int CHUNKS = HEAD / 8, STEP = THREADS / CHUNKS, BATCH = PAGE / STEP < 4 ? PAGE / STEP : 4;
    int chunk = threadIdx.x % CHUNKS, key = threadIdx.x / CHUNKS;
    int keys = chunk * 8 < tile.d ? tile.high - tile.first[entry] + 1 : 0;
    i64 row = (i64)tile.pages[entry] * PAGE + key, step = T::offset(STEP * tile.row);
    const typename T::Element* from = pool + T::offset(row * tile.row) + T::offset(chunk * 8);
#pragma unroll 1
    for (int i = 0; i < PAGE / STEP; i += BATCH) {
        u32 words[BATCH][4];
#pragma unroll
        for (int j = 0; j < BATCH; j++) load_chunk(T(), words[j], from + j * step, chunk * 8, key + j * STEP < keys);
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
            int row = key + j * STEP;
            store_chunk(T(), to + chunk_at(PAGE, row, chunk), words[j], from + j * step, row < keys);
        }
        from += BATCH * step;
        key += BATCH * STEP;
    }
}

// score = q k^T of the wave's rows and keys.
LUCE_FN void multiply_keys(const Shared& shared, float (&score)[ROW_TILES][KEY_TILES][4]) {
    int lane = luce_lane(), row = wave_row() + lane % 16, key = wave_n() * (KEY_TILES * 8) + lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) score[m][n][e] = 0.0f;
#pragma unroll 4
    for (int step = 0; step < HEAD / 16; step++) {
        u32 k[4], q[4];
        luce_ldmatrix(k, shared.k + chunk_at(PAGE, key, step * 2 + lane / 8 % 2));
        const u32 columns[2][2] = {{k[0], k[1]}, {k[2], k[3]}};
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
            luce_ldmatrix(q, shared.q + chunk_at(QUERIES, row + m * 16, step * 2 + lane / 16));
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++) Scores::multiply(score[m][n], q, columns[n]);
        }
    }
}

// total += weight 1, value += weight v.
LUCE_FN void multiply_values(const Shared& shared, Sums& sums) {
    int lane = luce_lane(), row = wave_row() + lane % 16;
#pragma unroll 1
    for (int step = 0; step < PAGE / 16; step++) {
        u32 weight[ROW_TILES][4];
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
            luce_ldmatrix(weight[m], shared.weight + chunk_at(QUERIES, row + m * 16, step * 2 + lane / 16));
            add_weights(sums.total[m], weight[m]);
        }
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n += 2) {
            u32 v[4];
            int chunk = wave_n() * COLUMN_TILES + n + lane / 16;
            luce_ldmatrix_transposed(v, shared.v + chunk_at(PAGE, step * 16 + lane % 16, chunk));
            const u32 rows[2][2] = {{v[0], v[1]}, {v[2], v[3]}};
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                Values::multiply(sums.value[m][n], weight[m], rows[0]);
                Values::multiply(sums.value[m][n + 1], weight[m], rows[1]);
            }
        }
    }
}

// Starts to fetch the keys of the first of the pages [begin, end), if there is one.
LUCE_FN void start_keys(const Tile& tile, Shared& shared, int begin, int end) {
    if (begin < end) fetch<KTYPE>(shared.k, tile.k_pool, tile, begin);
    luce_copy_close();
}

// The same, and its values: of a short context each split is one page. In larger tiles the compiler spills for that.
#define VALUES_FIRST (QUERIES == 16)
LUCE_FN void start_pages(const Tile& tile, Shared& shared, int begin, int end) {
    start_keys(tile, shared, begin, end);
    if (!VALUES_FIRST) return;
    if (begin < end) fetch<VTYPE>(shared.v, tile.v_pool, tile, begin);
    luce_copy_close();
}

// Softmax over the pages [begin, end) of the tile's span, from zero. start_pages has started the copies of the first one.
LUCE_FN void attend(const Tile& tile, Shared& shared, int begin, int end, Sums& sums) {
    int g = luce_lane() / 4, t = luce_lane() % 4, row = wave_row() + g, key = wave_n() * (KEY_TILES * 8) + t * 2;
    clear(sums);
    for (int entry = begin; entry < end; entry++) {
        if (entry == begin && VALUES_FIRST)
            luce_copy_wait<1>();
        else
            luce_copy_wait<0>();
        luce_sync();  // the keys have arrived, and the previous values have been read
        if (entry != begin || !VALUES_FIRST) {
            fetch<VTYPE>(shared.v, tile.v_pool, tile, entry);
            luce_copy_close();
        }
        float score[ROW_TILES][KEY_TILES][4];
        multiply_keys(shared, score);
        int at = tile.first[entry];
        bool whole = all_seen(tile, at);
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) bend(tile, score[m]);
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int n_row = row + m * 16 + half * 8;
                float top = -LUCE_INF;
                if (!whole) mask(tile, score[m], half, n_row, at, key);
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++)
                    top = fmaxf(top, fmaxf(score[m][n][half * 2], score[m][n][half * 2 + 1]));
                top = luce_lane_max<4>(top);
                if (t == 0) shared.top[wave_n()][n_row] = top;
            }
        luce_sync();  // the keys have been read, the waves' maxima are written
        start_keys(tile, shared, entry + 1, end);
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int n_row = row + m * 16 + half * 8;
                float top = sums.top[m][half];
#pragma unroll
                for (int i = 0; i < WAVES_N; i++) top = fmaxf(top, shared.top[i][n_row]);
                float base = softmax_base(top), keep = luce_exp2(sums.top[m][half] - base);
                sums.top[m][half] = top;
                base -= WEIGHT_SHIFT;
#pragma unroll
                for (int n = 0; n < KEY_TILES; n++) {
                    float* s = &score[m][n][half * 2];
                    int place = chunk_at(QUERIES, n_row, wave_n() * KEY_TILES + n) + t * 4;
                    *reinterpret_cast<u32*>(shared.weight + place) =
                        Values::pair(luce_exp2(s[0] - base), luce_exp2(s[1] - base));
                }
                sums.total[m][half] *= keep;
#pragma unroll
                for (int n = 0; n < COLUMN_TILES; n++) {
                    sums.value[m][n][half * 2] *= keep;
                    sums.value[m][n][half * 2 + 1] *= keep;
                }
            }
        luce_copy_wait<1>();
        luce_sync();  // weights and values have arrived
        multiply_values(shared, sums);
    }
}

// attend for each of the runs of pages of a tile, and what is done with its sums: `runs` calls its argument with the pages
// [begin, end) of each run and with what `done` gets beside the sums.
template <typename Runs, typename Done>
LUCE_FN void attend_runs(const Tile& tile, Shared& shared, const Queries& queries, Runs runs, Done done) {
    runs([&](int begin, int end, int pages) {
        luce_sync();  // the previous run has read shared memory
        start_pages(tile, shared, begin, end);
        load_queries(tile, shared.q, queries);
        Sums sums;
        attend(tile, shared, begin, end, sums);
        join_totals(sums);
        done(sums, pages);
    });
}
