// Causal attention of one tile of queries over paged K/V, with a running softmax (Milakov and
// Gimelshein, 2018) over chunks of 32 keys that start at multiples of 32. A query's chunks and the
// order within them follow from its position alone, so prefill, decode and resume give the same bits.
#pragma once

#include <cfloat>
#include <cmath>

#include "matmul.h"

namespace bb {

constexpr int KEY_CHUNK = 2 * LANES;
constexpr int MAX_QUERIES = 48;  // rows of a tile: positions x query heads of one K/V head
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

struct AttentionScratch {
    alignas(64) float q[MAX_QUERIES * MAX_HEAD_DIM];
    alignas(64) float k[KEY_CHUNK * MAX_HEAD_DIM];  // [2][head_dim][16]: a column per key
    alignas(64) float v[KEY_CHUNK * MAX_HEAD_DIM];  // [head_dim / 16][32][16]: a row per key
    alignas(64) float scores[MAX_QUERIES * KEY_CHUNK];
    alignas(64) float out[MAX_QUERIES * MAX_HEAD_DIM];
    float top[MAX_QUERIES], total[MAX_QUERIES];
};

// Brings one chunk of keys and values into panels. Dimensions beyond head_dim are zero.
template <class E>
inline void fetch_chunk(const QueryTile& t, const E* keys, const E* values, int from, int count, AttentionScratch& s) {
    const E* at[KEY_CHUNK];
    for (int j = 0; j < count; ++j) {
        const int position = from + j;
        const long cell = (long)t.table[position / t.block_size] * t.block_size + position % t.block_size;
        at[j] = keys + cell * t.head_dim;
        const E* value = values + cell * t.head_dim;
        for (int d = 0; d < t.head_dim; d += LANES) store(s.v + (d * KEY_CHUNK + j * LANES), load_part(value + d, t.head_dim - d));
    }
    for (int panel = 0; panel < KEY_CHUNK / LANES; ++panel)
        for (int d = 0; d < t.head_dim; d += LANES) {
            Lanes square[LANES];
            for (int j = 0; j < LANES; ++j) {
                const int key = panel * LANES + j;
                square[j] = key < count ? load_part(at[key] + d, t.head_dim - d) : Lanes{};
            }
            transpose(square);
            float* to = s.k + (panel * t.head_dim + d) * LANES;
            for (int i = 0; i < LANES && d + i < t.head_dim; ++i) store(to + i * LANES, square[i]);
        }
    for (int j = count; j < KEY_CHUNK; ++j)
        for (int d = 0; d < t.head_dim; d += LANES) store(s.v + (d * KEY_CHUNK + j * LANES), Lanes{});
}

// Folds a row's scores into its running softmax; they become weights. Returns the factor by which
// everything summed before shrinks.
inline float fold(float* scores, float& top, float& total) {
    const Lanes a = load(scores), b = load(scores + LANES);
    const float chunk_top = largest(larger(a, b));
    const float new_top = chunk_top > top ? chunk_top : top;
    const Lanes wa = exponential(a - all(new_top)), wb = exponential(b - all(new_top));
    store(scores, wa);
    store(scores + LANES, wb);
    float shrink[LANES];
    store(shrink, exponential(all(top - new_top)));
    total = total * shrink[0] + sum(wa + wb);
    top = new_top;
    return shrink[0];
}

// Hides what the query at `position` must not see among keys from .. from + 31.
inline void mask(float* scores, int from, int position, int window) {
    if (from + KEY_CHUNK - 1 <= position && (!window || from > position - window)) return;
    for (int j = 0; j < KEY_CHUNK; ++j) {
        const int key = from + j;
        if (key > position || (window && key <= position - window)) scores[j] = -INFINITY;
    }
}

// Writes [positions][group][head_dim] to `to`, rows `to_step` apart.
template <class E, class Out>
void attend(const QueryTile& t, const E* keys, const E* values, Out* to, long to_step, AttentionScratch& s) {
    const int rows = t.positions * t.group, d = t.head_dim, last = t.first + t.positions - 1;
    const int padded = (d + LANES - 1) / LANES * LANES, panels = padded / LANES;
    for (int p = 0; p < t.positions; ++p)
        std::memcpy(s.q + p * t.group * d, t.queries + p * t.query_step, sizeof(float) * t.group * d);
    for (int r = 0; r < rows; ++r) s.top[r] = -FLT_MAX, s.total[r] = 0;  // finite: inf - inf is not a number
    std::memset(s.out, 0, sizeof(float) * rows * padded);

    const int lowest = t.window && t.first >= t.window ? t.first - t.window + 1 : 0;
    for (int from = lowest / KEY_CHUNK * KEY_CHUNK; from <= last; from += KEY_CHUNK) {
        const int count = last - from + 1 < KEY_CHUNK ? last - from + 1 : KEY_CHUNK;
        fetch_chunk(t, keys, values, from, count, s);
        std::memset(s.scores, 0, sizeof(float) * rows * KEY_CHUNK);
        rows_by_panels(rows, KEY_CHUNK / LANES, s.q, d, s.k, d * LANES, d, s.scores, KEY_CHUNK);
        for (int r = 0; r < rows; ++r) {
            float* scores = s.scores + r * KEY_CHUNK;
            mask(scores, from, t.first + r / t.group, t.window);
            const float shrink = fold(scores, s.top[r], s.total[r]);
            for (int i = 0; i < padded; i += LANES) store(s.out + r * padded + i, load(s.out + r * padded + i) * shrink);
        }
        rows_by_panels(rows, panels, s.scores, KEY_CHUNK, s.v, KEY_CHUNK * LANES, KEY_CHUNK, s.out, padded);
    }
    for (int r = 0; r < rows; ++r) {
        Out* row = to + (r / t.group) * to_step + (r % t.group) * d;
        for (int i = 0; i < d; i += LANES) store_part(row + i, load(s.out + r * padded + i) / s.total[r], d - i);
    }
}

}  // namespace bb
