// The same product on the processor's matrix unit (AMX), for bf16: 16 rows x 16 columns at a time.
// The unit multiplies whole tiles; rows beyond the last are computed from whatever follows in memory
// and ignored, so `a` and `c` must extend to a multiple of 16 rows.
#pragma once

#include <type_traits>

#include "matmul.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#define BB_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace bb {

#if defined(BB_AMX)

inline bool amx_granted() {  // Linux hands out the tile registers on request, once per process
    constexpr int request_permission = 0x1023, tile_data = 18;
    static const bool granted = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    return granted;
}

inline void amx_begin() {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    _tile_loadconfig(&config);
}

inline void amx_end() { _tile_release(); }

inline void fetch_ahead(const bf16* b) {  // the tile after the next
    for (int line = 0; line < 16; ++line) __builtin_prefetch(b + (64 + 2 * line) * PANEL);
}

// c[16 * M][V * 16] = a * b, or += if `add`; accumulators are tiles 0-3, a is in 4 and 5, b in 6 and 7.
template <int M, int V, bool add>
inline void amx_tile(const bf16* a, long lda, const bf16* b, long panel, int k, float* c, long ldc) {
    const long a_step = lda * 2, c_step = ldc * 4;
    if constexpr (add) {
        _tile_loadd(0, c, c_step);
        if constexpr (V > 1) _tile_loadd(1, c + PANEL, c_step);
        if constexpr (M > 1) _tile_loadd(2, c + 16 * ldc, c_step);
        if constexpr (M > 1 && V > 1) _tile_loadd(3, c + 16 * ldc + PANEL, c_step);
    } else {
        _tile_zero(0);
        if constexpr (V > 1) _tile_zero(1);
        if constexpr (M > 1) _tile_zero(2);
        if constexpr (M > 1 && V > 1) _tile_zero(3);
    }
    for (int i = 0; i < k; i += 32) {
        _tile_loadd(4, a + i, a_step);
        if constexpr (M == 1) {  // few rows: bound by reading weights
            fetch_ahead(b + i * PANEL);
            if constexpr (V > 1) fetch_ahead(b + panel + i * PANEL);
        }
        _tile_loadd(6, b + i * PANEL, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (V > 1) {
            _tile_loadd(7, b + panel + i * PANEL, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (M > 1) {
            _tile_loadd(5, a + 16 * lda + i, a_step);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (V > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_step);
    if constexpr (V > 1) _tile_stored(1, c + PANEL, c_step);
    if constexpr (M > 1) _tile_stored(2, c + 16 * ldc, c_step);
    if constexpr (M > 1 && V > 1) _tile_stored(3, c + 16 * ldc + PANEL, c_step);
}

template <bool add>
inline void amx_rows_by_panels(int rows, int panels, const bf16* a, long lda, const bf16* b, long panel, int k,
                               float* c, long ldc) {
    for (int p = 0; p < panels; p += 2) {
        const bf16* at = b + p * panel;
        const bool two = p + 1 < panels;
        int row = 0;
        for (; row + 16 < rows; row += 32) {
            float* out = c + row * ldc + p * PANEL;
            if (two) amx_tile<2, 2, add>(a + row * lda, lda, at, panel, k, out, ldc);
            else amx_tile<2, 1, add>(a + row * lda, lda, at, panel, k, out, ldc);
        }
        if (row < rows) {
            float* out = c + row * ldc + p * PANEL;
            if (two) amx_tile<1, 2, add>(a + row * lda, lda, at, panel, k, out, ldc);
            else amx_tile<1, 1, add>(a + row * lda, lda, at, panel, k, out, ldc);
        }
    }
}

#else

inline bool amx_granted() { return false; }
inline void amx_begin() {}
inline void amx_end() {}
template <bool add>
inline void amx_rows_by_panels(int, int, const bf16*, long, const bf16*, long, int, float*, long) {}

#endif

// c[rows][panels * 16] = a[rows][k] * b, or += if `add`, on the best unit there is; `panel` elements from one panel of b
// to the next. Rows of c have room for whole tiles: a multiple of 16.
template <bool add, class E>
inline void multiply(int rows, int panels, const E* a, int k, const E* b, long panel, float* c, long ldc) {
    if constexpr (std::is_same_v<E, bf16>)
        if (amx_granted()) return amx_rows_by_panels<add>(rows, panels, a, k, b, panel, k, c, ldc);
    if constexpr (!add)
        for (int r = 0; r < rows; ++r) std::memset(c + r * ldc, 0, sizeof(float) * panels * PANEL);
    rows_by_panels(rows, panels, a, k, b, panel, k, c, ldc);
}

}  // namespace bb
