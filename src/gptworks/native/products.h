// Products of a few activation rows with a weight matrix of any kind, the weights read once and in order.

#pragma once

#include <algorithm>
#include <type_traits>

#include "amx.h"
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
constexpr int64_t GROUP = 16;          // activation rows that are rounded and laid out together
constexpr int64_t DIVIDED = 32;        // from so many rows on, threads divide norms and rounding among them
constexpr int64_t FEW = 3;             // so many rows are multiplied with int8 by vectors, more by AMX: the same to the bit

int64_t padded(int64_t n) { return (n + CHUNK - 1) / CHUNK * CHUNK; }

// What activations [n, stride] are made into for a kind of weights, where the processor multiplies it:
// * bf16 for bf16 (AVX512_BF16);
// * for int8 and int4 (AVX512_VNNI) fixed point of 16 bits with one scale a row, as two planes of signed bytes,
//   x ≈ scale · (256 · high + low): finer than bf16, and sums of products are exact.
struct Rounded {
    Buffer bytes;                   // [n, 2 · stride]: bf16; or low, then high
    std::vector<IntLanes> offsets;  // int4: for each 128 activations, what its weights' offset of 8 adds
    std::vector<float> scale;
    std::vector<int64_t> total;     // int8: sum of a row
    Buffer turned;                  // AMX: of 16 rows at a time, [4-byte words][16]; of int8 all of low, then of high

    void make_room(int64_t n, int64_t stride) {
        bytes.resize(2 * n * stride / sizeof(Lanes));
        offsets.resize(n * stride / CHUNK);
        scale.resize(n);
        total.resize(n);
#ifdef AMX
        if (amx::granted) turned.resize((n + GROUP - 1) / GROUP * GROUP * 2 * stride / sizeof(Lanes));
#endif
    }
};

// Activations [n, stride] as floats, and rounded. Each thread has rows of its own; or where they are many, all threads have
// the same floats and the same room for what they are rounded to (`common`), and each prepares a share.
struct Rows {
    static constexpr int64_t NEW = -1;  // this thread has written its share of the floats, and did not wait for the others
    int64_t n, stride;
    float *x;
    int64_t prepared = FP32;
    bool is_rounded = false;
    Rounded own, *common;
    const int8_t *bytes = nullptr;  // of the rounded rows: loops over them look for nothing else

    Rows(int64_t n, int64_t stride, float *x, Rounded *common = nullptr) : n(n), stride(stride), x(x), common(common) {}
    Rounded &rounded() { return common ? *common : own; }
    const Rounded &rounded() const { return common ? *common : own; }
    const int8_t *low(int64_t row) const { return bytes + 2 * row * stride; }
    const int8_t *high(int64_t row) const { return low(row) + stride; }
    float scale(int64_t row) const { return rounded().scale[row]; }
    int64_t row_bytes() const { return (is_rounded ? 2 : 4) * stride; }

    // The rows that this thread writes.
    std::pair<int64_t, int64_t> share(const Team &team) const {
        if (!common) return {0, n};
        const auto [first, last] = team.share((n + GROUP - 1) / GROUP);
        return {first * GROUP, std::min(last * GROUP, n)};
    }

    void prepare(int64_t kind, const Team &team) {
        if (kind == prepared) return;
        if (common && prepared != NEW && prepared != FP32) team.wait();  // until nobody reads what was rounded before
        prepared = kind;
        const auto [from, to] = share(team);
        round(from, to);
        if (common) team.wait();
    }

    void make_room() {
        if (!common) own.make_room(n, stride);
        bytes = (const int8_t *)rounded().bytes.data();
        is_rounded = true;
    }

    void round(int64_t from, int64_t to) {
        is_rounded = false;
#ifdef BF16_PRODUCTS
        if (prepared == BF16) {
            make_room();
            for (int64_t i = from * stride; i < to * stride; i += LANES) store((BFloat *)bytes + i, load(x + i));
        }
#endif
#ifdef INTEGER_PRODUCTS
        if (prepared == INT8 || prepared == INT4) {
            make_room();
            for (int64_t row = from; row < to; row++) round(row);
        }
#endif
#ifdef AMX
        if (on_tiles())
            for (int64_t row = from; row < to; row += GROUP) turn(row);
#endif
    }

#ifdef AMX
    bool on_tiles() const { return amx::granted && (prepared == BF16 || (prepared == INT8 && n > FEW)); }

    // The words of 16 rows for tiles: of bf16, or of a plane of bytes.
    const char *tiles(int64_t row, int64_t plane = 0) const {
        return (const char *)rounded().turned.data() + row * 2 * stride + plane * GROUP * stride;
    }

    void turn(int64_t row) {
        const int64_t n_planes = prepared == INT8 ? 2 : 1, words = stride / (2 * n_planes);
        alignas(64) uint32_t square[GROUP][LANES] = {};  // what lies behind the last row counts as 0
        for (int64_t plane = 0; plane < n_planes; plane++) {
            uint32_t *to = (uint32_t *)tiles(row, plane);
            const uint32_t *from = (const uint32_t *)(low(row) + plane * stride);
            for (int64_t i = 0; i < words; i += LANES)
                if (row + GROUP <= n) {
                    ::turn(from + i, stride / 2, to + i * GROUP, GROUP);
                } else {
                    for (int64_t r = 0; r < n - row; r++) std::memcpy(square[r], from + r * stride / 2 + i, sizeof square[r]);
                    ::turn(square[0], LANES, to + i * GROUP, GROUP);
                }
        }
    }
#endif

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
        Rounded &out = rounded();
        out.scale[row] = top_bits < 0x7f800000 ? largest / 32639 : NAN;  // 127 · 256 + 127: high stays a signed byte
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
        out.total[row] = _mm512_reduce_add_epi32(running);
        if (prepared != INT4) return;
        const __m512i eight = _mm512_set1_epi8(8);
        for (int64_t i = 0; i < stride; i += CHUNK) {
            const IntLanes low = dot(dot(IntLanes{}, eight, lows + i), eight, lows + i + CHUNK / 2);
            const IntLanes high = dot(dot(IntLanes{}, eight, highs + i), eight, highs + i + CHUNK / 2);
            out.offsets[(row * stride + i) / CHUNK] = -(low + (high << 8));
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
            const __m256i exact = _mm256_sub_epi64(both, _mm256_set1_epi64x(128 * x.rounded().total[row + r]));
            out[r] = (Quad)_mm256_cvtepi64_ps(exact) * x.scale(row + r);
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
                    const IntLanes offset = x.rounded().offsets[((row + r) * x.stride + i) / CHUNK];
                    const IntLanes low = Rows::dot(Rows::dot(offset, first_ones, lows), second_ones, lows + CHUNK / 2);
                    const IntLanes high =
                        Rows::dot(Rows::dot(IntLanes{}, first_ones, highs), second_ones, highs + CHUNK / 2);
                    total[r][j] += __builtin_convertvector(low + (high << 8), Lanes) * scales;
                });
            });
        repeat<N>([&](auto r) EACH { out[r] = sums(total[r]) * x.scale(row + r); });
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

#ifdef AMX
INLINE void add_planes(int32_t *low, const int32_t *high) {  // low + 256 · high, as floats in low's place
    for (int64_t i = 0; i < amx::SIDE * amx::SIDE; i += 8) {
        const auto wide = [](const int32_t *at) EACH { return _mm512_cvtepi32_epi64(_mm256_loadu_si256((const __m256i *)at)); };
        const __m512i both = _mm512_add_epi64(wide(low + i), _mm512_slli_epi64(wide(high + i), 8));
        _mm256_storeu_ps((float *)low + i, _mm512_cvtepi64_ps(both));
    }
}

// Rows from … end of the matrix with all activations; see product. Weights are read as they lie: 16 rows are a column of
// tiles, and what comes after them is asked for in order meanwhile.
template <bool INTEGERS>
void tiles_of_amx(const Matrix &m, const Rows &x, int64_t from, int64_t end, float *out, int64_t stride, float times, bool add) {
    constexpr int64_t SIDE = amx::SIDE;
    const int64_t row_bytes = m.k * (INTEGERS ? 1 : 2), steps = row_bytes / amx::ROW;
    const int64_t at_once = INTEGERS ? SIDE : 2 * SIDE;  // activation rows: two tiles, or the two planes of one
    const int64_t n_passes = (x.n + at_once - 1) / at_once;
    thread_local Buffer last_rows;  // followed by zeros
    alignas(64) float results[4][SIDE][SIDE], turned[SIDE][SIDE];
    char *const c[] = {(char *)results[0], (char *)results[1], (char *)results[2], (char *)results[3]};
    for (int64_t n = from, count; n < end; n += count) {
        count = end - n >= 2 * SIDE ? 2 * SIDE : std::min(SIDE, end - n);
        const bool two = count > SIDE;
        const char *weights = (const char *)m.weight + n * row_bytes, *const after = weights + count * row_bytes;
        if (count < SIDE) {
            last_rows.assign(SIDE * row_bytes / sizeof(Lanes), Lanes{});
            std::memcpy(last_rows.data(), weights, count * row_bytes);
            weights = (const char *)last_rows.data();
        }
        const int64_t lines = std::min(2 * SIDE, end - n - count) * row_bytes / 64, n_steps = n_passes * steps;
        amx::Ahead ahead{after, after + 64 * lines, (lines + n_steps - 1) / n_steps};
        for (int64_t row = 0; row < x.n; row += at_once) {
            const bool one = !INTEGERS && x.n - row <= SIDE;
            const char *const b[] = {x.tiles(row), INTEGERS ? x.tiles(row, 1) : one ? nullptr : x.tiles(row + SIDE)};
            const auto run = [&](auto rows, auto columns) EACH {
                amx::product<INTEGERS, rows, columns>(weights, row_bytes, b, amx::ROW, amx::TILE, steps, c, amx::ROW, false, &ahead);
            };
            typedef std::integral_constant<int, 1> One;
            typedef std::integral_constant<int, 2> Two;
            if (two)
                one ? run(Two{}, One{}) : run(Two{}, Two{});
            else
                one ? run(One{}, One{}) : run(One{}, Two{});
            for (int64_t i = 0; i < (two ? 2 : 1); i++) {
                const int64_t first = n + i * SIDE, width = std::min(SIDE, end - first) * sizeof(float);
                const auto copy = [&](void *to, const void *from) EACH {
                    if (width == sizeof(Lanes))
                        std::memcpy(to, from, sizeof(Lanes));
                    else
                        std::memcpy(to, from, width);
                };
                Lanes scale = all(1), bias = {};
                if (INTEGERS) copy(&scale, (const float *)m.scale + first);
                if (m.bias) copy(&bias, m.bias + first);
                for (int64_t j = 0; j < (INTEGERS || one ? 1 : 2); j++) {
                    float(*sums)[SIDE] = results[i * (one ? 1 : 2) + j];
                    if (INTEGERS) add_planes((int32_t *)sums, (const int32_t *)results[2 * i + 1]);
                    turn((const uint32_t *)sums, SIDE, (uint32_t *)turned, SIDE);
                    for (int64_t r = row + j * SIDE; r < std::min(x.n, row + (j + 1) * SIDE); r++) {
                        float *to = out + r * stride + first;
                        Lanes sum = load(turned[r % SIDE]), before = {};
                        if (INTEGERS) sum = sum * x.scale(r);
                        if (add) copy(&before, to);
                        const Lanes value = (sum * scale + bias) * times + before;
                        copy(to, &value);
                    }
                }
            }
        }
    }
}
#endif

// out[r][n] = (x[r] · weight[n] + bias[n]) · times, added to what is there if `add`; this thread's share of the n, which
// it returns. Prepares x for this kind of weights.
std::pair<int64_t, int64_t> product(const Matrix &m, Rows &x, float *out, int64_t stride, float times, bool add,
                                    const Team &team) {
    x.prepare(m.kind, team);
    const auto [first, last] = team.share((m.n + UNIT - 1) / UNIT);
    const int64_t from = first * UNIT, end = std::min(last * UNIT, m.n);
#ifdef AMX
    if (x.on_tiles()) {
        (m.kind == INT8 ? tiles_of_amx<true> : tiles_of_amx<false>)(m, x, from, end, out, stride, times, add);
        return {from, end};
    }
#endif
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
