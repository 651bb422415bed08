// Causal attention of one tile of queries over paged K/V, with a running softmax (Milakov and
// Gimelshein, 2018) over chunks of keys that start at multiples of their length. A query's chunks and the
// order within them follow from its position alone, so prefill, decode and resume give the same bits.
#pragma once

#include <cfloat>
#include <cmath>

#include "amx.h"

namespace bb {

template <class E>
constexpr int KEY_CHUNK = (sizeof(E) == 2 ? 4 : 2) * LANES;  // the matrix unit gains from longer sums
constexpr int MAX_QUERIES = 96;  // rows of a tile: positions x query heads of one K/V head
constexpr int MAX_HEAD_DIM = 256;

// One request's positions first .. first + positions - 1, one K/V head.
struct QueryTile {
    const float* queries;  // of the first position, [group][head_dim], already scaled
    long query_step;       // floats from one position to the next
    int first, positions, group, head_dim;
    int window;            // positions a query sees, itself included; 0 for all before it
    const int32_t* table;  // block ids of the request
    int block_size;
};

template <class E>
struct AttentionScratch {  // keys and values are panels as in matmul.h
    alignas(64) E q[MAX_QUERIES * MAX_HEAD_DIM];
    alignas(64) E k[KEY_CHUNK<E> * MAX_HEAD_DIM];  // a panel per 16 keys: an output per key, summed over head_dim
    alignas(64) E v[KEY_CHUNK<E> * MAX_HEAD_DIM];  // [head_dim / 16 panels]: an output per dimension, summed over keys
    alignas(64) float scores[MAX_QUERIES * KEY_CHUNK<E>];
    alignas(64) E weights[MAX_QUERIES * KEY_CHUNK<E>];
    alignas(64) float out[MAX_QUERIES * MAX_HEAD_DIM];
    float top[MAX_QUERIES], total[MAX_QUERIES];
};

// Keys to panels: an output per key.
inline void pack_keys(const float* const (&at)[KEY_CHUNK<float>], int count, int head_dim, float* to) {
    for (int panel = 0; panel < KEY_CHUNK<float> / LANES; ++panel)
        for (int d = 0; d < head_dim; d += LANES) {
            Lanes square[LANES];
            for (int j = 0; j < LANES; ++j) {
                const int key = panel * LANES + j;
                square[j] = key < count ? load_part(at[key] + d, head_dim - d) : Lanes{};
            }
            transpose(square);
            float* tile = to + (panel * head_dim + d) * LANES;
            for (int i = 0; i < LANES && d + i < head_dim; ++i) store(tile + i * LANES, square[i]);
        }
}

inline void pack_keys(const bf16* const (&at)[KEY_CHUNK<bf16>], int count, int head_dim, bf16* to) {  // pairs, as floats
    const int k = padded_k(head_dim);
    for (int panel = 0; panel < KEY_CHUNK<bf16> / LANES; ++panel)
        for (int d = 0; d < k; d += 2 * LANES) {
            Lanes square[LANES] = {};
            for (int j = 0; j < LANES; ++j) {
                const int key = panel * LANES + j, left = head_dim - d;
                if (key < count) std::memcpy(&square[j], at[key] + d, sizeof(bf16) * (left < 2 * LANES ? left : 2 * LANES));
            }
            transpose(square);
            std::memcpy(to + (panel * k + d) * LANES, square, sizeof square);
        }
}

// Values to panels: an output per dimension.
inline void pack_values(const float* const (&at)[KEY_CHUNK<float>], int head_dim, float* to) {
    for (int j = 0; j < KEY_CHUNK<float>; ++j)
        for (int d = 0; d < head_dim; d += LANES)
            store(to + d * KEY_CHUNK<float> + j * LANES, at[j] ? load_part(at[j] + d, head_dim - d) : Lanes{});
}

inline void pack_values(const bf16* const (&at)[KEY_CHUNK<bf16>], int head_dim, bf16* to) {
    static constexpr bf16 nothing[MAX_HEAD_DIM] = {};
    for (int j = 0; j < KEY_CHUNK<bf16>; j += 2)
        for (int d = 0; d < head_dim; d += LANES)
            store_pairs(to + d * KEY_CHUNK<bf16> + j * LANES, (at[j] ? at[j] : nothing) + d, (at[j + 1] ? at[j + 1] : nothing) + d,
                        head_dim - d);
}

// Brings one chunk of keys and values into panels. Keys beyond `count` and dimensions beyond head_dim are zero.
template <class E>
inline void fetch_chunk(const QueryTile& t, const E* keys, const E* values, int from, int count, AttentionScratch<E>& s) {
    const E *key_at[KEY_CHUNK<E>] = {}, *value_at[KEY_CHUNK<E>] = {};
    int block = from / t.block_size, offset = from % t.block_size;
    for (int j = 0; j < count; ++j) {
        const long cell = (long)t.table[block] * t.block_size + offset;
        key_at[j] = keys + cell * t.head_dim;
        value_at[j] = values + cell * t.head_dim;
        if (++offset == t.block_size) offset = 0, ++block;
    }
    pack_keys(key_at, count, t.head_dim, s.k);
    pack_values(value_at, t.head_dim, s.v);
}

// Folds a row's scores into its running softmax and stores its weights. Returns the factor by which
// everything summed before shrinks.
template <class E>
inline float fold(const float* scores, E* weights, float& top, float& total) {
    constexpr int PARTS = KEY_CHUNK<E> / LANES;
    Lanes part[PARTS], highest = load(scores);
    for (int i = 0; i < PARTS; ++i) part[i] = load(scores + i * LANES);
    for (int i = 1; i < PARTS; ++i) highest = larger(highest, part[i]);
    const float chunk_top = largest(highest);
    float shrink = 1;
    if (chunk_top > top) {
        shrink = exponential(all(top - chunk_top)).r[0][0];
        top = chunk_top;
    }
    Lanes sums{};
    for (int i = 0; i < PARTS; ++i) {
        const Lanes weight = exponential(part[i] - all(top));
        store(weights + i * LANES, weight);
        sums = i ? sums + weight : weight;
    }
    total = total * shrink + sum(sums);
    return shrink;
}

// Hides what the query at `position` must not see among `count` keys from `from` on.
inline void mask(float* scores, int from, int count, int position, int window) {
    if (from + count - 1 <= position && (!window || from > position - window)) return;
    for (int j = 0; j < count; ++j) {
        const int key = from + j;
        if (key > position || (window && key <= position - window)) scores[j] = -INFINITY;
    }
}

// Writes [positions][group][head_dim] to `to`, rows `to_step` apart.
template <class E, class Out>
void attend(const QueryTile& t, const E* keys, const E* values, Out* to, long to_step, AttentionScratch<E>& s) {
    constexpr int CHUNK = KEY_CHUNK<E>;
    const int rows = t.positions * t.group, d = t.head_dim, last = t.first + t.positions - 1, k = stride<E>(d);
    const int padded = round_up(d, LANES), panels = padded / LANES;
    std::memset(s.q, 0, sizeof(E) * rows * k);
    for (int r = 0; r < rows; ++r) {
        const float* query = t.queries + r / t.group * t.query_step + r % t.group * d;
        for (int i = 0; i < d; i += LANES) store_part(s.q + r * k + i, load_part(query + i, d - i), d - i);
        s.top[r] = -FLT_MAX, s.total[r] = 0;  // finite: inf - inf is not a number
    }
    std::memset(s.out, 0, sizeof(float) * rows * padded);

    const int lowest = t.window && t.first >= t.window ? t.first - t.window + 1 : 0;
    for (int from = lowest / CHUNK * CHUNK; from <= last; from += CHUNK) {
        const int count = last - from + 1 < CHUNK ? last - from + 1 : CHUNK;
        fetch_chunk(t, keys, values, from, count, s);
        multiply<false>(rows, CHUNK / LANES, s.q, k, s.k, (long)k * LANES, s.scores, CHUNK);
        for (int r = 0; r < rows; ++r) {
            float* scores = s.scores + r * CHUNK;
            mask(scores, from, CHUNK, t.first + r / t.group, t.window);
            const float shrink = fold(scores, s.weights + r * CHUNK, s.top[r], s.total[r]);
            if (shrink != 1)
                for (int i = 0; i < padded; i += LANES)
                    store(s.out + r * padded + i, load(s.out + r * padded + i) * shrink);
        }
        multiply<true>(rows, panels, s.weights, CHUNK, s.v, CHUNK * LANES, s.out, padded);
    }
    for (int r = 0; r < rows; ++r) {
        Out* row = to + (r / t.group) * to_step + (r % t.group) * d;
        for (int i = 0; i < d; i += LANES) store_part(row + i, load(s.out + r * padded + i) / s.total[r], d - i);
    }
}

}  // namespace bb
