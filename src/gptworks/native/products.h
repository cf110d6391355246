// Products of a few activation rows with a weight matrix of any kind, the weights read once and in order.

#pragma once

#include <algorithm>
#include <type_traits>

#include "lanes.h"
#include "threads.h"

namespace {

enum Kind : int64_t { FP32, BF16, FP16, INT8, INT4 };

struct Matrix {  // [n, k], row by row; see quantize/formats.py for the kinds
    const void *weight, *scale;
    const float *bias;
    int64_t n, k, kind;
};

constexpr int64_t TILE = 4;            // weight rows multiplied at once: enough chains to hide an FMA's latency
constexpr int64_t UNIT = 16;           // weight rows that one thread takes at once: a cache line of results
constexpr int64_t CHUNK = 128;         // activations are padded with zeros to a multiple of this
constexpr int64_t FAR = 20480;         // bytes ahead that memory is asked for the second cache,
constexpr int64_t NEAR = 2048;         // and this one for the first
constexpr int64_t CACHED = 512 << 10;  // bytes of activations that a core's second cache keeps while weights pass

int64_t padded(int64_t n) { return (n + CHUNK - 1) / CHUNK * CHUNK; }

// Activations [n, stride], and what they are made into for a kind of weights, where the processor multiplies it:
// * bf16 for bf16 (AVX512_BF16);
// * for int8 and int4 (AVX512_VNNI) fixed point of 16 bits with one scale a row, as two planes of signed bytes,
//   x ≈ scale · (256 · high + low): finer than bf16, and sums of products are exact.
struct Rows {
    int64_t n, stride;
    float *x;
    int64_t prepared = FP32;
    Buffer bytes;                   // [n, 2 · stride]: bf16; or low, then high
    std::vector<IntLanes> offsets;  // int4: for each 128 activations, what its weights' offset of 8 adds
    std::vector<float> scale;
    std::vector<int64_t> total;     // int8: sum of a row

    Rows(int64_t n, int64_t stride, float *x) : n(n), stride(stride), x(x) {}
    const int8_t *low(int64_t row) const { return (const int8_t *)bytes.data() + 2 * row * stride; }
    const int8_t *high(int64_t row) const { return low(row) + stride; }
    int64_t row_bytes() const { return (bytes.empty() ? 4 : 2) * stride; }

    void prepare(int64_t kind) {
        if (kind == prepared) return;
        prepared = kind;
#ifdef BF16_PRODUCTS
        if (kind == BF16) {
            bytes.resize(2 * n * stride / sizeof(Lanes));
            for (int64_t i = 0; i < n * stride; i += LANES) store((BFloat *)bytes.data() + i, load(x + i));
        }
#endif
#ifdef INTEGER_PRODUCTS
        if (kind == INT8 || kind == INT4) {
            bytes.resize(2 * n * stride / sizeof(Lanes));
            offsets.resize(n * stride / CHUNK);
            scale.resize(n);
            total.resize(n);
            for (int64_t row = 0; row < n; row++) round(row);
        }
#endif
    }

#ifdef INTEGER_PRODUCTS
    void round(int64_t row) {
        const float *from = x + row * stride;
        __m512i top = _mm512_setzero_si512();  // compared as integers: what is no number lies above all that are
        for (int64_t i = 0; i < stride; i += LANES)
            top = _mm512_max_epi32(top, (__m512i)magnitude(load(from + i)));
        const int32_t top_bits = _mm512_reduce_max_epi32(top);
        float largest;
        std::memcpy(&largest, &top_bits, sizeof largest);
        largest = std::max(largest, 1e-30f);
        scale[row] = top_bits < 0x7f800000 ? largest / 32639 : NAN;  // 127 · 256 + 127: high stays a signed byte
        const __m512 factor = _mm512_set1_ps(32639 / largest);
        __m512i running = _mm512_setzero_si512();
        int8_t *const lows = (int8_t *)low(row), *const highs = lows + stride;
        for (int64_t i = 0; i < stride; i += LANES) {
            const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(from + i), factor));
            const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(whole, 24), 24);
            const __m512i high = _mm512_srai_epi32(_mm512_sub_epi32(whole, low), 8);
            running = _mm512_add_epi32(running, whole);
            const int64_t to = prepared == INT4 ? place(i) : i;
            _mm_storeu_si128((__m128i *)(lows + to), _mm512_cvtepi32_epi8(low));
            _mm_storeu_si128((__m128i *)(highs + to), _mm512_cvtepi32_epi8(high));
        }
        total[row] = _mm512_reduce_add_epi32(running);
        if (prepared != INT4) return;
        const __m512i eight = _mm512_set1_epi8(8);
        for (int64_t i = 0; i < stride; i += CHUNK) {
            const IntLanes low = dot(dot(IntLanes{}, eight, lows + i), eight, lows + i + CHUNK / 2);
            const IntLanes high = dot(dot(IntLanes{}, eight, highs + i), eight, highs + i + CHUNK / 2);
            offsets[(row * stride + i) / CHUNK] = -(low + (high << 8));
        }
    }

    // Where the 16 activations from i on stand for int4: of 128, first those that meet low nibbles, then the others.
    static int64_t place(int64_t i) { return i / CHUNK * CHUNK + i % 32 / 16 * (CHUNK / 2) + i % CHUNK / 32 * 16; }

    static IntLanes dot(IntLanes sum, __m512i unsigned_bytes, const int8_t *signed_bytes) {
        return (IntLanes)_mm512_dpbusd_epi32((__m512i)sum, unsigned_bytes, _mm512_loadu_si512(signed_bytes));
    }
#endif
};

// A tile is contiguous, and memory is fastest when asked for in order: so it is prefetched in order, though its four rows
// are read side by side. Without, this ran at a third of the memory's speed; with the far one alone, 10% slower.
// The first cache is for one row's weights; many rows' activations need it themselves.
template <int N> INLINE void prefetch(const void *at, int64_t line) {
    __builtin_prefetch((const char *)at + 64 * line + FAR, 0, 2);
    if (N == 1) __builtin_prefetch((const char *)at + 64 * line + NEAR, 0, 3);
}

// Each kind of weights has a Tile: sums<N>(first, step, row, out) multiplies four weight rows, first, first + step …,
// with N activation rows from `row` on; out[r][j] is the sum for weight row j.
template <class Weight> struct FloatTile {
    static constexpr bool WIDENS = !std::is_same_v<Weight, float>;
    // Activation rows whose accumulators stay in registers. Other weights are made float32 first where rows are short.
    static constexpr int64_t AT_ONCE = WIDENS && !MANY_REGISTERS ? 1 : REGISTERS >= 32 ? 6 : 3;
    const Weight *weight;
    int64_t k;
    const Rows &x;

    void widen_row(int64_t row, float *out) const {
        for (int64_t i = 0; i < k; i += LANES) store(out + i, load(weight + row * k + i));
    }

    template <int N> INLINE void sums_of(int64_t first, int64_t step, int64_t row, Quad *out) const {
        Lanes total[N][TILE] = {};
        const Weight *w = weight + first * k;
        const float *in = x.x + row * x.stride;
#ifndef __AVX512F__
        if constexpr (N > 1) {  // one register of each 16 lanes at a time, so that the accumulators fit
            static_assert(!WIDENS);
            typedef Lanes::Part Part;
            repeat<PARTS>([&](auto part) EACH {
                const auto at = [&](const float *p) EACH {
                    Part x;
                    std::memcpy(&x, p + part * (REGISTER / 4), sizeof x);
                    return x;
                };
                Part sum[N][TILE] = {};
                for (int64_t i = 0; i < k; i += LANES) {
                    Part activation[N];
                    repeat<N>([&](auto r) EACH { activation[r] = at(in + r * x.stride + i); });
                    repeat<TILE>([&](auto j) EACH {
                        const Part weights = at(w + j * step * k + i);
                        repeat<N>([&](auto r) EACH { sum[r][j] += weights * activation[r]; });
                    });
                }
                repeat<N>([&](auto r) EACH { repeat<TILE>([&](auto j) EACH { total[r][j].part[part] = sum[r][j]; }); });
            });
            repeat<N>([&](auto r) EACH { out[r] = sums(total[r]); });
            return;
        }
#endif
        for (int64_t i = 0; i < k; i += LANES) {
            Lanes activation[N];
            repeat<N>([&](auto r) EACH { activation[r] = load(in + r * x.stride + i); });
            repeat<TILE>([&](auto j) EACH {
                if (i * sizeof(Weight) % 64 == 0) prefetch<N>(w + TILE * i, j);
                const Lanes row_of_weights = load(w + j * step * k + i);
                repeat<N>([&](auto r) EACH { total[r][j] += row_of_weights * activation[r]; });
            });
        }
        repeat<N>([&](auto r) EACH { out[r] = sums(total[r]); });
    }
};

#ifdef BF16_PRODUCTS
struct BFloatTile {
    static constexpr int64_t AT_ONCE = 4;
    static constexpr bool WIDENS = false;
    const BFloat *weight;
    int64_t k;
    const Rows &x;

    template <int N> INLINE void sums_of(int64_t first, int64_t step, int64_t row, Quad *out) const {
        Lanes total[N][TILE] = {};
        const BFloat *w = weight + first * k;
        const int8_t *in = x.low(row);
        for (int64_t i = 0; i < k; i += 2 * LANES) {
            __m512bh row_of_weights[TILE];
            repeat<TILE>([&](auto j) EACH {
                prefetch<N>(w + TILE * i, j);
                row_of_weights[j] = (__m512bh)_mm512_loadu_si512(w + j * step * k + i);
            });
            repeat<N>([&](auto r) EACH {
                const __m512bh activation = (__m512bh)_mm512_loadu_si512(in + 2 * (r * x.stride + i));
                repeat<TILE>([&](auto j) EACH {
                    total[r][j] = (Lanes)_mm512_dpbf16_ps((__m512)total[r][j], row_of_weights[j], activation);
                });
            });
        }
        repeat<N>([&](auto r) EACH { out[r] = sums(total[r]); });
    }
};
#else
typedef FloatTile<BFloat> BFloatTile;
#endif

#ifdef INTEGER_PRODUCTS
INLINE __m256i whole_sums(const IntLanes (&v)[TILE]) {
    const __m512i a = (__m512i)v[0], b = (__m512i)v[1], c = (__m512i)v[2], d = (__m512i)v[3];
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    const __m512i abcd = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m256i two = _mm256_add_epi32(_mm512_castsi512_si256(abcd), _mm512_extracti64x4_epi64(abcd, 1));
    return _mm256_cvtepi32_epi64(_mm_add_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1)));
}

// The product wants one side unsigned: weights + 128, whose share is 128 · the sum of the row's activations.
struct Int8Tile {
    static constexpr int64_t AT_ONCE = 3;
    static constexpr bool WIDENS = false;
    const int8_t *weight;
    int64_t k;
    const Rows &x;

    template <int N> INLINE void sums_of(int64_t first, int64_t step, int64_t row, Quad *out) const {
        IntLanes low[N][TILE] = {}, high[N][TILE] = {};
        const int8_t *w = weight + first * k;
        const __m512i flip = _mm512_set1_epi8(-128);
        for (int64_t i = 0; i < k; i += 64)
            repeat<TILE>([&](auto j) EACH {
                prefetch<N>(w + TILE * i, j);
                const __m512i row_of_weights = _mm512_xor_si512(_mm512_loadu_si512(w + j * step * k + i), flip);
                repeat<N>([&](auto r) EACH {
                    low[r][j] = Rows::dot(low[r][j], row_of_weights, x.low(row + r) + i);
                    high[r][j] = Rows::dot(high[r][j], row_of_weights, x.high(row + r) + i);
                });
            });
        repeat<N>([&](auto r) EACH {
            const __m256i both = _mm256_add_epi64(whole_sums(low[r]), _mm256_slli_epi64(whole_sums(high[r]), 8));
            const __m256i exact = _mm256_sub_epi64(both, _mm256_set1_epi64x(128 * x.total[row + r]));
            out[r] = (Quad)_mm256_cvtepi64_ps(exact) * x.scale[row + r];
        });
    }
};

// 128 weights at a time, four groups: the lanes of a quarter belong to one group and take its scale.
struct Int4Tile {
    static constexpr int64_t AT_ONCE = 4;
    static constexpr bool WIDENS = false;
    const uint8_t *weight;
    const Half *scale;
    int64_t k;
    const Rows &x;

    template <int N> INLINE void sums_of(int64_t first, int64_t step, int64_t row, Quad *out) const {
        Lanes total[N][TILE] = {};
        const uint8_t *w = weight + first * k / 2;
        const Half *s = scale + first * k / 32;
        const __m512i nibble = _mm512_set1_epi8(15);
        const __m512i spread = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
        for (int64_t i = 0; i < k; i += CHUNK)
            repeat<TILE>([&](auto j) EACH {
                prefetch<N>(w + TILE * i / 2, j);
                const __m512i pairs = _mm512_loadu_si512(w + j * step * k / 2 + i / 2);
                const __m512i first_ones = _mm512_and_si512(pairs, nibble);
                const __m512i second_ones = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), nibble);
                const __m128 four = _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)(s + j * step * k / 32 + i / 32)));
                const Lanes scales = (Lanes)_mm512_permutexvar_ps(spread, _mm512_castps128_ps512(four));
                repeat<N>([&](auto r) EACH {
                    const int8_t *lows = x.low(row + r) + i, *highs = x.high(row + r) + i;
                    const IntLanes offset = x.offsets[((row + r) * x.stride + i) / CHUNK];
                    const IntLanes low = Rows::dot(Rows::dot(offset, first_ones, lows), second_ones, lows + CHUNK / 2);
                    const IntLanes high =
                        Rows::dot(Rows::dot(IntLanes{}, first_ones, highs), second_ones, highs + CHUNK / 2);
                    total[r][j] += __builtin_convertvector(low + (high << 8), Lanes) * scales;
                });
            });
        repeat<N>([&](auto r) EACH { out[r] = sums(total[r]) * x.scale[row + r]; });
    }
};
#else
typedef FloatTile<int8_t> Int8Tile;

struct Int4Tile {  // in float32
    static constexpr int64_t AT_ONCE = MANY_REGISTERS ? 3 : 1;
    static constexpr bool WIDENS = true;
    const uint8_t *weight;
    const Half *scale;
    int64_t k;
    const Rows &x;

    template <int N> INLINE void sums_of(int64_t first, int64_t step, int64_t row, Quad *out) const {
        Lanes total[N][TILE] = {};
        const float *in = x.x + row * x.stride;
        for (int64_t i = 0; i < k; i += 32)
            repeat<TILE>([&](auto j) EACH {
                if (i % CHUNK == 0) prefetch<N>(weight + (first * k + TILE * i) / 2, j);
                const auto [low, high] = group(((first + j * step) * k + i) / 32);
                const Lanes both[2] = {low, high};
                repeat<2>([&](auto half) EACH {
                    repeat<N>([&](auto r) EACH {
                        total[r][j] += both[half] * load(in + r * x.stride + i + half * LANES);
                    });
                });
            });
        repeat<N>([&](auto r) EACH { out[r] = sums(total[r]); });
    }

    // The 32 values of a group.
    INLINE std::pair<Lanes, Lanes> group(int64_t at) const {
        typedef uint8_t Pairs __attribute__((vector_size(16)));
        Pairs pairs;
        std::memcpy(&pairs, weight + 16 * at, sizeof pairs);
        const float factor = scale[at];
        return {widen((Bytes)(pairs & 15) - 8) * factor, widen((Bytes)(pairs >> 4) - 8) * factor};
    }

    void widen_row(int64_t row, float *out) const {
        for (int64_t i = 0; i < k; i += 32) {
            const auto [low, high] = group((row * k + i) / 32);
            store(out + i, low);
            store(out + i + LANES, high);
        }
    }
};
#endif

// Rows from … end of the matrix with activations first_row … last_row; see product.
template <class Tile>
void tiles(const Tile &tile, const Matrix &m, int64_t first_row, int64_t last_row, int64_t from, int64_t end, float *out,
           int64_t stride, float times, bool add) {
    thread_local Buffer wide;  // four weight rows, made float32 once where many activation rows meet them
    const bool widens = Tile::WIDENS && last_row - first_row > Tile::AT_ONCE;
    if (widens) wide.resize(TILE * m.k / LANES);
    for (int64_t n = from, count; n < end; n += count) {
        count = end - n < TILE ? 1 : TILE;  // the last few one by one, as a tile of the same row
        const int64_t step = count / TILE;
        const auto copy = [&](void *to, const void *from) EACH {
            if (step)
                std::memcpy(to, from, sizeof(Quad));
            else
                std::memcpy(to, from, sizeof(float));
        };
        Quad scale = Quad{} + 1.0f, bias = {};
        if (m.kind == INT8) copy(&scale, (const float *)m.scale + n);
        if (m.bias) copy(&bias, m.bias + n);
        const auto multiply = [&](const auto &tile, int64_t first) {
            constexpr int64_t AT_ONCE = std::decay_t<decltype(tile)>::AT_ONCE;
            for (int64_t row = first_row, rows; row < last_row; row += rows) {
                Quad four[AT_ONCE];
                rows = std::min(AT_ONCE, last_row - row);
                if (rows == AT_ONCE)
                    tile.template sums_of<AT_ONCE>(first, step, row, four);
                else if (rows == 1)
                    tile.template sums_of<1>(first, step, row, four);
                else if (rows == 2)
                    tile.template sums_of<std::min<int64_t>(2, AT_ONCE)>(first, step, row, four);
                else
                    tile.template sums_of<std::min<int64_t>(3, AT_ONCE)>(first, step, row, four), rows = 3;
                for (int64_t r = 0; r < rows; r++) {
                    float *to = out + (row + r) * stride + n;
                    Quad before = {};
                    if (add) copy(&before, to);
                    const Quad value = (four[r] * scale + bias) * times + before;
                    copy(to, &value);
                }
            }
        };
        if constexpr (Tile::WIDENS)
            if (widens) {
                for (int64_t j = 0; j < count; j++) tile.widen_row(n + j, (float *)wide.data() + j * m.k);
                multiply(FloatTile<float>{(const float *)wide.data(), m.k, tile.x}, 0);
                continue;
            }
        multiply(tile, n);
    }
}

// out[r][n] = (x[r] · weight[n] + bias[n]) · times, added to what is there if `add`; this thread's share of the n, which
// it returns. Prepares x for this kind of weights.
std::pair<int64_t, int64_t> product(const Matrix &m, Rows &x, float *out, int64_t stride, float times, bool add,
                                    const Team &team) {
    x.prepare(m.kind);
    const auto [first, last] = team.share((m.n + UNIT - 1) / UNIT);
    const int64_t from = first * UNIT, end = std::min(last * UNIT, m.n);
    const auto run = [&, from = from, end = end](const auto &tile) {
        const int64_t at_once = std::max<int64_t>(CACHED / x.row_bytes() / tile.AT_ONCE, 1) * tile.AT_ONCE;
        for (int64_t row = 0; row < x.n; row += at_once)
            tiles(tile, m, row, std::min(row + at_once, x.n), from, end, out, stride, times, add);
    };
    switch (m.kind) {
    case FP32: run(FloatTile<float>{(const float *)m.weight, m.k, x}); break;
    case BF16: run(BFloatTile{(const BFloat *)m.weight, m.k, x}); break;
    case FP16: run(FloatTile<Half>{(const Half *)m.weight, m.k, x}); break;
    case INT8: run(Int8Tile{(const int8_t *)m.weight, m.k, x}); break;
    case INT4: run(Int4Tile{(const uint8_t *)m.weight, (const Half *)m.scale, m.k, x}); break;
    }
    return {from, end};
}

}  // namespace
