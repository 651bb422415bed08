// Sixteen float lanes, in as many registers as the processor needs for them. A lane never sees
// another lane's value except in the reductions, whose order is fixed, and every fused multiply-add
// is written out, so results do not depend on the width of the registers or on the compiler's taste.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace bb {

constexpr int LANES = 16;

#if defined(__AVX512F__)
constexpr int REGISTER_BYTES = 64;
#elif defined(__AVX__)
constexpr int REGISTER_BYTES = 32;
#else
constexpr int REGISTER_BYTES = 16;
#endif
constexpr int WIDTH = REGISTER_BYTES / 4, REGISTERS = LANES / WIDTH;

typedef float Reg __attribute__((vector_size(REGISTER_BYTES)));
typedef int32_t IntReg __attribute__((vector_size(REGISTER_BYTES)));
typedef uint16_t HalfReg __attribute__((vector_size(REGISTER_BYTES / 2)));

struct Lanes {
    Reg r[REGISTERS];
};

struct bf16 {  // the upper half of a float
    uint16_t bits;
};

inline Reg splat(float value) { return value - Reg{}; }

inline Reg fma(Reg a, Reg b, Reg c) {
#if defined(__AVX512F__)
    return (Reg)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Reg)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Reg)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

template <class Function>
inline Lanes each(Function function) {
    Lanes out;
#pragma GCC unroll 4
    for (int i = 0; i < REGISTERS; ++i) out.r[i] = function(i);
    return out;
}

inline Lanes all(float value) { return each([&](int) { return splat(value); }); }
inline Lanes operator+(Lanes a, Lanes b) { return each([&](int i) { return a.r[i] + b.r[i]; }); }
inline Lanes operator-(Lanes a, Lanes b) { return each([&](int i) { return a.r[i] - b.r[i]; }); }
inline Lanes operator*(Lanes a, Lanes b) { return each([&](int i) { return a.r[i] * b.r[i]; }); }
inline Lanes operator/(Lanes a, Lanes b) { return each([&](int i) { return a.r[i] / b.r[i]; }); }
inline Lanes operator*(Lanes a, float b) { return a * all(b); }
inline Lanes operator/(Lanes a, float b) { return a / all(b); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return each([&](int i) { return fma(a.r[i], b.r[i], c.r[i]); }); }
inline Lanes larger(Lanes a, Lanes b) { return each([&](int i) { return a.r[i] > b.r[i] ? a.r[i] : b.r[i]; }); }

inline Lanes load(const float* from) {
    return each([&](int i) {
        Reg part;
        std::memcpy(&part, from + i * WIDTH, sizeof part);
        return part;
    });
}

inline void store(float* to, Lanes x) {
#pragma GCC unroll 4
    for (int i = 0; i < REGISTERS; ++i) std::memcpy(to + i * WIDTH, &x.r[i], sizeof(Reg));
}

inline Lanes load(const bf16* from) {
    return each([&](int i) {
        HalfReg half;
        std::memcpy(&half, from + i * WIDTH, sizeof half);
        return (Reg)(__builtin_convertvector(half, IntReg) << 16);
    });
}

inline void store(bf16* to, Lanes x) {  // to the nearest, ties to even
    for (int i = 0; i < REGISTERS; ++i) {
        const IntReg bits = (IntReg)x.r[i], rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        const HalfReg half = __builtin_convertvector(rounded, HalfReg);
        std::memcpy(to + i * WIDTH, &half, sizeof half);
    }
}

template <class E>
inline Lanes load_part(const E* from, int count) {  // the rest is zero
    if (count >= LANES) return load(from);
    E part[LANES] = {};
    std::memcpy(part, from, sizeof(E) * count);
    return load(part);
}

template <class E>
inline void store_part(E* to, Lanes x, int count) {
    if (count >= LANES) return store(to, x);
    E part[LANES];
    store(part, x);
    std::memcpy(to, part, sizeof(E) * count);
}

// Two rows of bf16, element by element side by side: 16 pairs.
inline void store_pairs(bf16* to, const bf16* first, const bf16* second, int count) {
    bf16 part[2][LANES] = {};
    if (count < LANES) {
        std::memcpy(part[0], first, sizeof(bf16) * count);
        std::memcpy(part[1], second, sizeof(bf16) * count);
        first = part[0], second = part[1];
    }
    for (int i = 0; i < REGISTERS; ++i) {
        HalfReg a, b;
        std::memcpy(&a, first + i * WIDTH, sizeof a);
        std::memcpy(&b, second + i * WIDTH, sizeof b);
        const IntReg pairs = __builtin_convertvector(a, IntReg) | (__builtin_convertvector(b, IntReg) << 16);
        std::memcpy(to + 2 * i * WIDTH, &pairs, sizeof pairs);
    }
}

// Lane i joins lane i + 8, then i + 4, and so on.
template <class Join>
inline float reduce(Lanes x, Join join) {
    typedef float Eight __attribute__((vector_size(32)));
    typedef float Four __attribute__((vector_size(16)));
    Eight eight[2];
    std::memcpy(eight, &x, sizeof eight);
    const Eight joined = join(eight[0], eight[1]);
    Four four[2];
    std::memcpy(four, &joined, sizeof four);
    const Four last = join(four[0], four[1]);
    return join(join(last[0], last[2]), join(last[1], last[3]));
}

inline float sum(Lanes x) {
    return reduce(x, [](auto a, auto b) { return a + b; });
}

inline float largest(Lanes x) {
    return reduce(x, [](auto a, auto b) { return a > b ? a : b; });
}

// e**x within 2 units of the last place; exactly 1 at 0 and exactly 0 below -87. Range reduction and
// minimax coefficients as in Moshier's Cephes, expf.c.
inline Reg exponential(Reg x) {
    const Reg one = splat(1.f), round = splat(12582912.f);  // 1.5 * 2**23: adding it rounds to an integer
    const Reg lowest = splat(-87.f), highest = splat(88.f);
    Reg clamped = x > lowest ? x : lowest;
    clamped = clamped < highest ? clamped : highest;
    const Reg shifted = fma(clamped, splat(1.44269504f), round), n = shifted - round;
    const Reg r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), clamped));
    Reg p = splat(1.9875691500e-4f);
    for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fma(p, r, splat(c));
    p = fma(p, r * r, r) + one;
    const IntReg exponent = ((IntReg)shifted - (IntReg)round) << 23;
    const Reg power = (Reg)((IntReg)p + exponent);
    return x < lowest ? Reg{} : power;
}

inline Lanes exponential(Lanes x) {
    return each([&](int i) { return exponential(x.r[i]); });
}

// x * sigmoid(x)
inline Lanes silu(Lanes x) {
    return each([&](int i) { return x.r[i] / (1.f + exponential(-x.r[i])); });
}

#if defined(__AVX512F__)

// Swaps the blocks off the diagonal, `half` wide, within every square of twice that width.
template <int half>
inline void transpose_step(Lanes (&m)[LANES]) {
    constexpr auto from = [](int lane, bool upper) {
        return upper ? (lane & half ? LANES + lane : lane + half) : (lane & half ? LANES + lane - half : lane);
    };
#define BB_MASK(u) IntReg{from(0, u), from(1, u), from(2, u), from(3, u), from(4, u), from(5, u), from(6, u), \
    from(7, u), from(8, u), from(9, u), from(10, u), from(11, u), from(12, u), from(13, u), from(14, u), from(15, u)}
    const __m512i low = (__m512i)BB_MASK(false), high = (__m512i)BB_MASK(true);
#undef BB_MASK
    for (int i = 0; i < LANES; ++i) {
        if (i & half) continue;
        const __m512 a = (__m512)m[i].r[0], b = (__m512)m[i + half].r[0];
        m[i].r[0] = (Reg)_mm512_permutex2var_ps(a, low, b);
        m[i + half].r[0] = (Reg)_mm512_permutex2var_ps(a, high, b);
    }
}

// In place, rows become columns.
inline void transpose(Lanes (&m)[LANES]) {
    transpose_step<8>(m);
    transpose_step<4>(m);
    transpose_step<2>(m);
    transpose_step<1>(m);
}

#else

inline void transpose(Lanes (&m)[LANES]) {
    float rows[LANES][LANES], columns[LANES][LANES];
    std::memcpy(rows, m, sizeof rows);
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < LANES; ++j) columns[j][i] = rows[i][j];
    std::memcpy(m, columns, sizeof columns);
}

#endif

}  // namespace bb
