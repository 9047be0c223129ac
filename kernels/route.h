// Choosing the experts of one row, by one wave.
#pragma once
#include "reduce.h"

#define MOST_EXPERTS 512
#define UNUSED ((i32)0x80000000)

// Integers in the order of the scores; NaN is below every number, UNUSED below NaN. No score is -0.0: it begins as a
// probability, which is +0.0 at least, and that plus -0.0 is +0.0.
LUCE_FN i32 rank(float score) {
    if (isnan(score)) return UNUSED + 1;
    const i32 bits = (i32)__float_as_uint(score);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

// Of `groups` equal runs of experts the `used` with the best scores, one bit each; ties go to the lowest number. A
// group's score is that of its best expert or, if `two_best`, the sum of its two best ones; NaN counts as the lowest.
// scores: of the lane's experts, -inf beyond their number. groups is at most LUCE_LANES.
template <int OWN> LUCE_FN u64 best_groups(const float (&scores)[OWN], int experts, int groups, int used, int two_best) {
    const int lane = luce_lane(), size = experts / groups;
    i32 mine = UNUSED;  // of group number `lane`
    for (int group = 0; group < groups; group++) {
        float first = -LUCE_INF, second = -LUCE_INF;
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            if (i * LUCE_LANES >= experts) break;
            if ((lane + i * LUCE_LANES) / size != group || isnan(scores[i])) continue;
            second = fmaxf(second, fminf(first, scores[i]));
            first = fmaxf(first, scores[i]);
        }
        const float best = luce_lane_max(first);
        const int owner = -luce_lane_max(first == best ? -lane : -LUCE_LANES);
        const float next = luce_lane_max(lane == owner ? second : first);
        if (lane == group) mine = rank(two_best ? best + next : best);
    }
    u64 chosen = 0;
    for (int n = 0; n < used; n++) {
        const i32 top = luce_lane_max(mine);
        const int winner = -luce_lane_max(mine == top ? -lane : -LUCE_LANES);
        if (lane == winner) mine = UNUSED;
        chosen |= (u64)1 << winner;
    }
    return chosen;
}

// The float of a rank that is not NaN's.
LUCE_FN float ranked(i32 bits) { return __uint_as_float((u32)(bits < 0 ? bits ^ 0x7fffffff : bits)); }

// Chooses the experts of a row whose logits are p, of the lane's experts, -inf beyond their number: `route` of moe.cu. kept: OWN
// floats of shared memory for each lane. OWN is known when this is compiled, and nothing branches at the end of the experts: a
// branch takes longer than what it leaves out. Beyond the experts p becomes 0, or with `sigmoid` is not read.
template <int OWN>
LUCE_FN void route_row(float (&p)[OWN], const float* __restrict__ bias, const float* __restrict__ expert_scale,
                       i32* __restrict__ ids, float* __restrict__ weights, int experts, int top_k, int sigmoid, int biased,
                       int normalise, int scaled, float scale, int groups, int groups_used, int two_best, float* kept) {
    const int lane = luce_lane();
    if (sigmoid) {
#pragma unroll
        for (int i = 0; i < OWN; i++) p[i] = 1.0f / (1.0f + expf(-p[i]));
    } else {
        float most = -LUCE_INF, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < OWN; i++) most = fmaxf(most, p[i]);
        most = ranked(luce_lane_max(rank(most)));
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            p[i] = expf(p[i] - most);
            sum += p[i];
        }
        sum = luce_lane_sum(sum);
        bool plain = true;
#pragma unroll
        for (int i = 0; i < OWN; i++) plain = plain && (p[i] == 0.0f || p[i] >= 1e-27f);
        if (luce_ballot(!plain) == 0) {
            // The quotients as divisions round them, without their branches. A remainder is exact; the first makes a
            // quotient one of the two floats beside the true one, and the second the nearer of these (Markstein).
            const float inverse = 1.0f / sum;
#pragma unroll
            for (int i = 0; i < OWN; i++) {
                float quotient = p[i] * inverse;
                quotient = fmaf(fmaf(-sum, quotient, p[i]), inverse, quotient);
                p[i] = fmaf(fmaf(-sum, quotient, p[i]), inverse, quotient);
            }
        } else {
#pragma unroll
            for (int i = 0; i < OWN; i++) p[i] /= sum;
        }
    }

    float scores[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int expert = lane + i * LUCE_LANES;
        kept[expert] = p[i];
        scores[i] = expert < experts ? biased ? p[i] + bias[expert] : p[i] : -LUCE_INF;
    }
    luce_sync_lanes();
    u64 open = ~(u64)0;
    const int size = groups ? experts / groups : experts;
    if (groups) open = best_groups(scores, experts, groups, groups_used, two_best);
    i32 ranks[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int expert = lane + i * LUCE_LANES;
        const bool used = expert < experts && (!groups || open >> (expert / size) & 1);
        ranks[i] = used ? rank(scores[i]) : UNUSED;
    }
    i32 id = 0;
    float weight = 0.0f, total = 0.0f;
    for (int slot = 0; slot < top_k; slot++) {
        i32 best = ranks[0];
#pragma unroll
        for (int i = 1; i < OWN; i++) best = luce_max(best, ranks[i]);
        const i32 top = luce_lane_max(best);
        int first = MOST_EXPERTS;
#pragma unroll
        for (int i = OWN - 1; i >= 0; i--) first = ranks[i] == top ? lane + i * LUCE_LANES : first;
        const int winner = -luce_lane_max(-first);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            if (lane + i * LUCE_LANES == winner) ranks[i] = UNUSED;
        }
        const float value = kept[winner];
        total += value;
        if (lane == slot) id = winner, weight = value;
    }

    if (lane < top_k) {
        if (normalise) weight /= total;
        weight *= scale;
        ids[lane] = id;
        weights[lane] = scaled ? weight * expert_scale[id] : weight;
    }
}
