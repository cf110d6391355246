// Elementwise functions of vectors that a GPT needs.

#pragma once

#include "lanes.h"

namespace [[gnu::visibility("hidden")]] kernels {

// e^x by x = n·ln 2 + r and the first terms of the series in r, |r| ≤ 0.35; within 2 units in the last place.
INLINE Lanes exponential(Lanes x) {
    x = smaller(larger(x, all(-87.0f)), all(88.0f));
    const float magic = 0x1.8p23f; // adding this rounds to a whole number, in the low bits
    const Lanes shifted = x * 1.44269504f + magic, n = shifted - magic;
    const Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f; // ln 2 in two parts
    Lanes y = r * (1 / 5040.0f) + 1 / 720.0f;
    y = y * r + 1 / 120.0f;
    y = y * r + 1 / 24.0f;
    y = y * r + 1 / 6.0f;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    const IntLanes power = (bits_of(shifted) - 0x4b400000 + 127) << 23;
    return y * lanes_of(power);
}

INLINE Lanes sigmoid(Lanes x) { return 1.0f / (1.0f + exponential(-x)); }

// Returns 2^x for x ≤ 126. A result below the smallest normal number is 0, or subnormal with AVX-512. NaN stays NaN.
INLINE Lanes power_of_two(Lanes x) {
#ifdef __AVX512F__
    x = (Lanes)_mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);
    const Lanes whole = (Lanes)_mm512_roundscale_ps((__m512)x, 8), r = x - whole;
#else
    const IntLanes vanishes = x < -126.0f;
    x = larger(x, all(-126.0f));
    const Lanes shifted = x + 0x1.8p23f, whole = shifted - 0x1.8p23f, r = x - whole;
#endif
    Lanes y = r * 1.5403530e-4f + 1.3333558e-3f; // (ln 2)^n / n!
    y = y * r + 9.6181291e-3f;
    y = y * r + 5.5504109e-2f;
    y = y * r + 2.4022651e-1f;
    y = y * r + 6.9314718e-1f;
    y = y * r + 1.0f;
#ifdef __AVX512F__
    return (Lanes)_mm512_scalef_ps((__m512)y, (__m512)whole);
#else
    return choose(vanishes, Lanes{}, y * lanes_of((bits_of(shifted) - 0x4b400000 + 127) << 23));
#endif
}

INLINE Lanes hyperbolic_tangent(Lanes x) {
    return 1.0f - 2.0f / (1.0f + power_of_two(smaller(x, all(40.0f)) * 2.8853901f));
}

// Returns the factor that scales a row's mean squared distance from `mean` to 1. row(i): elements i to i + 15.
template<class F> INLINE float scale_to_one(const F &row, float mean, int64_t width, float eps) {
    Lanes square = {};
    for (int64_t i = 0; i < width; i += LANES) {
        const Lanes centred = first(row(i) - mean, width - i);
        square += centred * centred;
    }
    return 1 / std::sqrt(sum(square) / width + eps);
}

enum Function : int64_t { NO_FUNCTION = -1, GELU, GELU_TANH, RELU2, SILU }; // activations, also of gates
constexpr const char *FUNCTIONS[] = {"gelu", "gelu_tanh", "relu2", "silu"};
constexpr int64_t N_FUNCTIONS = sizeof FUNCTIONS / sizeof *FUNCTIONS;

// An activation's value and its derivative.
struct Point {
    Lanes value, slope;
};

template<int64_t FUNCTION> INLINE Point point(Lanes x) {
    if constexpr (FUNCTION == RELU2) {
        const Lanes positive = larger(x, Lanes{});
        return {positive * positive, positive + positive};
    }
    if constexpr (FUNCTION == GELU) { // erf by Abramowitz & Stegun 7.1.26, within 1.5e-7
        const Lanes z = magnitude(x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * z), e = exponential(-z * z);
        Lanes y = 1.061405429f * t - 1.453152027f;
        y = y * t + 1.421413741f;
        y = y * t - 0.284496736f;
        y = y * t + 0.254829592f;
        const Lanes tail = 0.5f * y * t * e; // the normal distribution's probability beyond |x|
        const Lanes share = choose(x < 0.0f, tail, 1.0f - tail);
        return {x * share, share + smaller(larger(x, all(-20.0f)), all(20.0f)) * 0.39894228f * e};
    }
    // Beyond these bounds the derivative is 0 or 1 in float32, but the terms of its formula would overflow.
    const float bound = FUNCTION == SILU ? 80.0f : 10.0f;
    const Lanes near = smaller(larger(x, all(-bound)), all(bound));
    if constexpr (FUNCTION == GELU_TANH) {
        const Lanes square = near * near, share = sigmoid(near * (1.59576912f + 0.07135481f * square));
        return {x * share, share + near * share * (1.0f - share) * (1.59576912f + 0.21406444f * square)};
    }
    const Lanes share = sigmoid(near);
    return {x * share, share + near * share * (1.0f - share)};
}

INLINE Lanes activate(Lanes x, int64_t function) {
    switch (function) {
    case GELU_TANH:
        return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x)); // (1 + tanh u) / 2 = σ(2u)
    case RELU2:
        return point<RELU2>(x).value;
    case SILU:
        return x * sigmoid(x);
    default:
        return point<GELU>(x).value;
    }
}

} // namespace kernels
