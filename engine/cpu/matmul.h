// Products of activations with packed weights. Every element is a sum over chunks of k, each a chain of
// fused multiply-adds, all in ascending order: its bits depend on its row and its column alone, not on
// how many rows there are, how they are cut into tiles, or which thread computes them.
//
// Packed weights are panels of 16 outputs: float [panel][k][16], bf16 [panel][k / 2][16][2] (pairs
// of k side by side, as the processor's dot products of bf16 pairs take them), k padded to a multiple of 32.
#pragma once

#include "lanes.h"

namespace bb {

// Rows of a tile of that many panels: as many accumulators as leave registers for the operands.
#if defined(__AVX512F__)
constexpr int MAX_PANELS = 4;
constexpr int rows_of(int panels) { return panels == 4 ? 6 : panels == 3 ? 8 : 12; }
#elif defined(__aarch64__)
constexpr int MAX_PANELS = 2;
constexpr int rows_of(int panels) { return panels == 2 ? 3 : 6; }
#else
constexpr int MAX_PANELS = 2;
constexpr int rows_of(int panels) { return panels == 2 ? 2 : 4; }
#endif

// Panels side by side that suit so many rows: few rows pass over the weights once, all of them at a time.
inline int panels_of(int rows, int panels) {
    int count = MAX_PANELS;
    while (count > 2 && rows > rows_of(count) && rows <= rows_of(2)) --count;
    return count == 4 && panels % 4 && panels % 3 == 0 ? 3 : count;
}

constexpr int PANEL = LANES, K_CHUNK = 128;
constexpr int AHEAD = 16;  // steps of k that weights are fetched ahead

template <class Int>
inline Int round_up(Int n, int to) { return (n + to - 1) / to * to; }
template <class Int>
inline Int padded_k(Int k) { return round_up(k, 32); }
template <class E>
inline int stride(int k) { return sizeof(E) == 2 ? padded_k(k) : k; }  // of a row that panels of that k multiply

template <int M, int V>
inline void add_tile(const Lanes (&acc)[M][V], float* c, long ldc) {
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) store(c + m * ldc + v * PANEL, load(c + m * ldc + v * PANEL) + acc[m][v]);
}

// c[m][v * 16 ..] += a[m][..k] * b[v][..k][16], summed from zero and then added.
template <int M, int V>
inline void tile(const float* a, long lda, const float* b, long panel, int k, float* c, long ldc) {
    Lanes acc[M][V] = {};
    for (int i = 0; i < k; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) __builtin_prefetch(b + v * panel + (i + AHEAD) * PANEL);
        Lanes w[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) w[v] = load(b + v * panel + i * PANEL);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
            const Lanes x = all(a[m * lda + i]);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) acc[m][v] = fma(x, w[v], acc[m][v]);
        }
    }
    add_tile(acc, c, ldc);
}

#if defined(__AVX512BF16__)
inline Lanes dot_pairs(Lanes acc, uint32_t x, const bf16* w) {
    return {(Reg)_mm512_dpbf16_ps((__m512)acc.r[0], (__m512bh)_mm512_set1_epi32((int)x),
                                  (__m512bh)_mm512_loadu_si512(w))};
}
#else
inline Lanes dot_pairs(Lanes acc, uint32_t x, const bf16* w) {
    const IntReg both = IntReg{} + (int32_t)x;
    return each([&](int i) {
        IntReg pairs;
        std::memcpy(&pairs, w + 2 * i * WIDTH, sizeof pairs);
        const Reg first = fma((Reg)(both << 16), (Reg)(pairs << 16), acc.r[i]);
        return fma((Reg)(both & (int32_t)0xffff0000u), (Reg)(pairs & (int32_t)0xffff0000u), first);
    });
}
#endif

template <int M, int V>
inline void tile(const bf16* a, long lda, const bf16* b, long panel, int k, float* c, long ldc) {
    Lanes acc[M][V] = {};
    for (int i = 0; i < k; i += 2)
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
            uint32_t x;
            std::memcpy(&x, a + m * lda + i, 4);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) acc[m][v] = dot_pairs(acc[m][v], x, b + v * panel + i * PANEL);
        }
    add_tile(acc, c, ldc);
}

template <int V, int M = rows_of(V), class E>
inline void tile_of(int rows, const E* a, long lda, const E* b, long panel, int k, float* c, long ldc) {
    if constexpr (M > 1)
        if (rows < M) return tile_of<V, M - 1>(rows, a, lda, b, panel, k, c, ldc);
    tile<M, V>(a, lda, b, panel, k, c, ldc);
}

// c[rows][V * 16] += a * b. k goes in chunks of one fixed length: their panels stay in the first cache,
// and short chains round less than one long one.
template <int V, class E>
inline void rows_by(int rows, const E* a, long lda, const E* b, long panel, int k, float* c, long ldc) {
    const int tiles = (rows + rows_of(V) - 1) / rows_of(V);
    for (int from = 0; from < k; from += K_CHUNK) {
        const int width = k - from < K_CHUNK ? k - from : K_CHUNK;
        for (int t = 0, row = 0; t < tiles; ++t) {  // of nearly equal height
            const int height = rows / tiles + (t < rows % tiles);
            tile_of<V>(height, a + row * lda + from, lda, b + (long)from * PANEL, panel, width, c + row * ldc, ldc);
            row += height;
        }
    }
}

// c[rows][panels * 16] += a * b, any number of panels.
template <int V = MAX_PANELS, class E>
inline void rows_by_panels(int rows, int panels, const E* a, long lda, const E* b, long panel, int k, float* c, long ldc) {
    for (; panels >= V; panels -= V, b += V * panel, c += V * PANEL) rows_by<V>(rows, a, lda, b, panel, k, c, ldc);
    if constexpr (V > 1)
        if (panels) rows_by_panels<V - 1>(rows, panels, a, lda, b, panel, k, c, ldc);
}

}  // namespace bb
