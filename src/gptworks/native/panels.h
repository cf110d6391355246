// Products of many activation rows with a weight matrix: in panels of weights by vectors, or on AMX tiles.
//
// products.h multiplies a few rows with the weights as they lie: a vector holds 16 words of one weight row, and at the end its
// lanes are added. Here a panel of weight rows is laid out first, so that a vector holds one word of 16 weight rows, and each
// word of an activation row is multiplied with all of them. Fewer loads, and no sum across lanes.
//
// The bits are the same: words are taken in the order in which the other product's lanes take them and are added. First the
// words of one lane, 0, 16, 32, …; then those of the lane that it is added to, and so on in pairs.

#pragma once

#include "matrix.h"

namespace {

constexpr int64_t PANEL_VECTORS = REGISTER == 64 ? 3 : 1;  // of 16 weight rows each, whose accumulators stay in registers
constexpr int64_t PANEL_BYTES = 512 << 10;                 // of weights that a core's second cache keeps while activations pass
constexpr int64_t TILES_BYTES = 1 << 20;                   // of activations, while weights pass: AMX is of larger caches

// Where sums go, and what they become: out = (sum · scale + bias) · times, added to what is there if `add`; then of an
// activation, out = activation(out), or with a gate, out = activation(gate) · out.
struct Result {
    float *out;
    int64_t stride;
    float times = 1;
    bool add = false;
    int64_t activation = NO_ACTIVATION;
    const float *gate = nullptr;

    // Rows and columns are complete, and in a cache still.
    void finish(int64_t row_from, int64_t row_to, int64_t from, int64_t end) const {
        if (activation == NO_ACTIVATION) return;
        for (int64_t row = row_from; row < row_to; row++)
            for (int64_t i = row * stride + from; i < row * stride + end; i += LANES) {
                const Lanes x = load(out + i);
                store(out + i, gate ? activate(load(gate + i), activation) * x : activate(x, activation));
            }
    }
};

// 16 columns of a result.
struct Columns {
    int64_t first, width;
    Lanes scale = all(1), bias = {};

    Columns(const Matrix &m, int64_t first, int64_t end) : first(first), width(std::min(LANES, end - first)) {
        if (m.kind == INT8) copy(&scale, (const float *)m.scale + first);
        if (m.bias) copy(&bias, m.bias + first);
    }
    INLINE void put(Lanes sum, int64_t row, const Result &to) const {
        float *at = to.out + row * to.stride + first;
        Lanes before = {};
        if (to.add) copy(&before, at);
        const Lanes value = (sum * scale + bias) * to.times + before;
        copy(at, &value);
    }
    INLINE void copy(void *to, const void *from) const {
        if (width == LANES)
            std::memcpy(to, from, sizeof(Lanes));
        else
            std::memcpy(to, from, width * sizeof(float));
    }
};

// Words of four bytes: one of 16 weight rows, one of an activation row, and what they add to sums.
struct Floats {
    typedef Lanes Sum;
    static INLINE Lanes weights(const uint32_t *at) { return load((const float *)at); }
    static INLINE float activation(const uint32_t *at) { return *(const float *)at; }
    static INLINE Sum add(Sum sum, Lanes weights, float activation) { return sum + weights * activation; }
};
#ifdef BF16_PRODUCTS
struct BFloats {
    typedef Lanes Sum;
    static INLINE __m512bh weights(const uint32_t *at) { return (__m512bh)_mm512_loadu_si512(at); }
    static INLINE __m512bh activation(const uint32_t *at) { return (__m512bh)_mm512_set1_epi32(*at); }
    static INLINE Sum add(Sum sum, __m512bh weights, __m512bh activation) {
        return (Sum)_mm512_dpbf16_ps((__m512)sum, weights, activation);
    }
};
#endif
#ifdef INTEGER_PRODUCTS
struct Integers {  // bytes, of weights without sign; their sums are exact in any order
    typedef IntLanes Sum;
    static INLINE __m512i weights(const uint32_t *at) { return _mm512_loadu_si512(at); }
    static INLINE __m512i activation(const uint32_t *at) { return _mm512_set1_epi32(*at); }
    static INLINE Sum add(Sum sum, __m512i weights, __m512i activation) {
        return (Sum)_mm512_dpbusd_epi32((__m512i)sum, weights, activation);
    }
};

// low + 256 · high + offset
INLINE Lanes joined(IntLanes low, IntLanes high, int64_t offset) {
    const auto half = [&](auto i) EACH {
        const auto wide = [&](IntLanes x) EACH { return _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64((__m512i)x, i)); };
        const __m512i both = _mm512_add_epi64(wide(low), _mm512_slli_epi64(wide(high), 8));
        return _mm256_castps_pd(_mm512_cvtepi64_ps(_mm512_add_epi64(both, _mm512_set1_epi64(offset))));
    };
    typedef std::integral_constant<int, 0> Lower;
    typedef std::integral_constant<int, 1> Upper;
    return (Lanes)_mm512_insertf64x4(_mm512_castpd256_pd512(half(Lower{})), half(Upper{}), 1);
}
#endif

// The sums of 16 · VECTORS weight rows, laid out, with PANEL_ROWS rows of words. x: the first ones' and the others' first word;
// those of the next lane are `apart` words on.
template <class Words, int VECTORS>
INLINE void multiply(const uint32_t *panel, int64_t panel_apart, int64_t steps, const uint32_t *const (&x)[2], int64_t apart,
                     typename Words::Sum (&sums)[PANEL_ROWS][VECTORS], Ahead &ahead) {
    typedef typename Words::Sum Sum;
    constexpr bool IN_ORDER = std::is_same_v<Sum, Lanes>;
    Sum waiting[4][PANEL_ROWS][VECTORS];  // sums of 1, 2, 4 and 8 lanes for the other half of their pair
    for (int n = 0; n < LANES; n++) {
        const uint32_t *weights = panel + PAIRED[n] * panel_apart;
        const uint32_t *first = x[0] + PAIRED[n] * apart, *second = x[1] + PAIRED[n] * apart;
        Sum sum[PANEL_ROWS][VECTORS] = {};
        const auto every = [](const auto &f) EACH {
            repeat<PANEL_ROWS>([&](auto r) EACH { repeat<VECTORS>([&](auto v) EACH { f(r, v); }); });
        };
        if (!IN_ORDER && n) every([&](auto r, auto v) EACH { sum[r][v] = sums[r][v]; });
        for (int64_t step = 0; step < steps; step++, weights += VECTORS * LANES, first += GROUP, second += GROUP) {
            decltype(Words::weights(weights)) w[VECTORS];
            repeat<VECTORS>([&](auto v) EACH { w[v] = Words::weights(weights + v * LANES); });
            repeat<PANEL_ROWS>([&](auto r) EACH {
                const auto activation = Words::activation(r < PANEL_ROWS / 2 ? first + r : second + r - PANEL_ROWS / 2);
                repeat<VECTORS>([&](auto v) EACH { sum[r][v] = Words::add(sum[r][v], w[v], activation); });
            });
        }
        int pair = 0;
        if (IN_ORDER)
            for (; n >> pair & 1; pair++) every([&](auto r, auto v) EACH { sum[r][v] = waiting[pair][r][v] + sum[r][v]; });
        auto &to = IN_ORDER && pair < 4 ? waiting[pair] : sums;
        every([&](auto r, auto v) EACH { to[r][v] = sum[r][v]; });
        ahead.fetch();
    }
}

// Rows from … end of the matrix with all activations; see product.
template <class Tile> void panels(const Tile &tile, const Matrix &m, const Rows &x, int64_t from, int64_t end, const Result &to) {
    typedef typename Tile::Words Words;
    constexpr bool PLANES = !std::is_same_v<typename Words::Sum, Lanes>;
    constexpr int64_t ROWS = PLANES ? PANEL_ROWS / 2 : PANEL_ROWS;
    const int64_t n_words = m.k * x.n_words() / x.stride, steps = n_words / LANES, apart = x.n_words() / LANES * GROUP;
    const int64_t most = std::clamp<int64_t>(PANEL_BYTES / (LANES * n_words * 4), 1, PANEL_VECTORS);
    thread_local Buffer room;
    room.resize(most * n_words + LANES);
    uint32_t *const panel = (uint32_t *)room.data();
    const auto run = [&](int64_t first, auto vectors) {
        constexpr int VECTORS = vectors;
        const int64_t last = first + VECTORS * LANES;
        const int64_t panel_apart = (steps * VECTORS + 1) * LANES;  // never a power of two: caches would keep few of them
        for (int64_t i = 0; i < n_words; i += LANES)
            for (int v = 0; v < VECTORS; v++) {
                alignas(64) uint32_t square[LANES][LANES];
                for (int64_t row = 0; row < LANES; row++)
                    tile.words(std::min(first + v * LANES + row, end - 1), i, square[row]);
                turn(square[0], LANES, panel + (i / LANES * VECTORS + v) * LANES, panel_apart);
            }
        const int64_t lines = std::max<int64_t>(0, std::min(VECTORS * LANES, end - last)) * m.row_bytes() / 64;
        const char *const after = (const char *)m.weight + last * m.row_bytes();
        Ahead ahead{after, after + 64 * lines, lines * ROWS / (x.n * LANES) + 1};
        const Columns columns[] = {{m, first, end}, {m, std::min(first + LANES, end), end}, {m, std::min(first + 2 * LANES, end), end}};
        for (int64_t row = 0; row < x.n; row += ROWS) {
            const uint32_t *const group = x.words(row / GROUP * GROUP) + row % GROUP;
            const uint32_t *const starts[] = {group, PLANES ? group + GROUP * x.n_words() : group + PANEL_ROWS / 2};
            typename Words::Sum sums[PANEL_ROWS][VECTORS];
            multiply<Words, VECTORS>(panel, panel_apart, steps, starts, apart, sums, ahead);
            for (int64_t r = 0; r < std::min(ROWS, x.n - row); r++)
                for (int v = 0; v < VECTORS; v++)
                    if constexpr (PLANES)
                        columns[v].put(tile.joined(sums[r][v], sums[ROWS + r][v], row + r), row + r, to);
                    else
                        columns[v].put(sums[r][v], row + r, to);
        }
        to.finish(0, x.n, first, std::min(last, end));
    };
    for (int64_t first = from, vectors; first < end; first += vectors * LANES) {
        vectors = std::min(most, (end - first + LANES - 1) / LANES);
        if (vectors == PANEL_VECTORS)
            run(first, std::integral_constant<int, PANEL_VECTORS>{});
        else if (vectors == 1)
            run(first, std::integral_constant<int, 1>{});
        else
            run(first, std::integral_constant<int, std::min<int64_t>(2, PANEL_VECTORS)>{});
    }
}

#ifdef AMX
// Activation rows from … to with weight rows first … end; see product. Weights are read as they lie: 16 rows are a column of
// tiles, and what comes after them is asked for in order meanwhile.
template <bool INTEGERS>
void tiles_of_amx(const Matrix &m, const Rows &x, int64_t row_from, int64_t row_to, int64_t from, int64_t end, const Result &to) {
    constexpr int64_t SIDE = amx::SIDE;
    const int64_t row_bytes = m.row_bytes(), steps = row_bytes / amx::ROW;
    const int64_t at_once = INTEGERS ? SIDE : 2 * SIDE;  // activation rows: two tiles, or the two planes of one
    const int64_t n_steps = (row_to - row_from + at_once - 1) / at_once * steps;
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
        const Columns columns[] = {{m, n, end}, {m, std::min(n + SIDE, end), end}};
        const int64_t lines = std::min(2 * SIDE, end - n - count) * row_bytes / 64;
        Ahead ahead{after, after + 64 * lines, (lines + n_steps - 1) / n_steps};
        for (int64_t row = row_from; row < row_to; row += at_once) {
            const bool one = !INTEGERS && row_to - row <= SIDE;
            const char *const b[] = {(char *)x.words(row), one ? nullptr : (char *)(INTEGERS ? x.words(row, 1) : x.words(row + SIDE))};
            const auto run = [&](auto rows, auto columns) EACH {
                amx::product<INTEGERS, rows, columns>(weights, row_bytes, b, amx::ROW, amx::TILE, steps, c, amx::ROW, false, &ahead);
            };
            typedef std::integral_constant<int, 1> One;
            typedef std::integral_constant<int, 2> Two;
            if (two)
                one ? run(Two{}, One{}) : run(Two{}, Two{});
            else
                one ? run(One{}, One{}) : run(One{}, Two{});
            for (int64_t i = 0; i < (two ? 2 : 1); i++)
                for (int64_t j = 0; j < (INTEGERS || one ? 1 : 2); j++) {
                    float(*sums)[SIDE] = results[i * (one ? 1 : 2) + j];
                    if (INTEGERS)
                        for (int64_t r = 0; r < SIDE; r++)
                            store(sums[r], joined(bits_of(load(sums[r])), bits_of(load(results[2 * i + 1][r])), 0));
                    turn(sums[0], SIDE, turned[0], SIDE);
                    for (int64_t r = row + j * SIDE; r < std::min(row_to, row + (j + 1) * SIDE); r++) {
                        const Lanes sum = load(turned[r % SIDE]);
                        columns[i].put(INTEGERS ? sum * x.scale(r) : sum, r, to);
                    }
                }
        }
        to.finish(row_from, row_to, n, n + count);
    }
}
#endif

}  // namespace
