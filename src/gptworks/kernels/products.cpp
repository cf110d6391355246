// Products of activation rows with a weight matrix of any kind, the weights read once and in order.

#include "products.h"

#include "panels.h"
#include "tiles.h"

using namespace kernels;

namespace {

constexpr int64_t TILE = 4;           // weight rows multiplied at once: enough chains to hide an FMA's latency
constexpr int64_t UNIT = 16;          // weight rows that one thread takes at once: a cache line of results
constexpr int64_t FAR = 20480;        // bytes ahead that memory is asked for the second cache,
constexpr int64_t NEAR = 2048;        // and this one for the first
constexpr int64_t CACHED = 512 << 10; // bytes of activations that a core's second cache keeps while weights pass

// A tile is contiguous, and memory is fastest when asked for in order: so it is prefetched in order, though its four
// rows are read side by side. Without, this ran at a third of the memory's speed; with the far one alone, 10% slower.
// The first cache is for one row's weights; many rows' activations need it themselves.
template<int N> INLINE void prefetch(const void *at, int64_t line) {
    __builtin_prefetch((const char *)at + 64 * line + FAR, 0, 2);
    if (N == 1) __builtin_prefetch((const char *)at + 64 * line + NEAR, 0, 3);
}

// Each kind of weights has a Tile: sums<N>(first, step, row, out) multiplies four weight rows, first, first + step …,
// with N activation rows from `row` on; out[r][j] is the sum for weight row j.
// Some can be `widened`: as a tile of `count` of its weight rows from n on, laid out in `room` for many activation
// rows.
template<class Floats, class Tile> Floats as_floats(const Tile &tile, int64_t n, int64_t count, Buffer &room) {
    for (int64_t i = 0; i < count * tile.k; i += LANES) room[i / LANES] = tile.lanes(n + i / tile.k, i % tile.k);
    return {(const float *)room.data(), tile.k, tile.x};
}

template<class Weight> struct FloatTile {
    static constexpr bool WIDENS = !std::is_same_v<Weight, float>, IN_FLOATS = true;
    // Activation rows whose accumulators stay in registers. Other weights are made float32 first where rows are short.
    static constexpr int64_t AT_ONCE = WIDENS && !MANY_REGISTERS ? 1 : REGISTERS >= 32 ? 6 : 3;
    const Weight *weight;
    int64_t k;
    const Rows &x;

    INLINE Lanes lanes(int64_t row, int64_t i) const { return load(weight + row * k + i); }
    FloatTile<float> widened(int64_t n, int64_t count, Buffer &room) const {
        return as_floats<FloatTile<float>>(*this, n, count, room);
    }

    template<int N> INLINE void sums_of(int64_t first, int64_t step, int64_t row, Quad *out) const {
        Lanes total[N][TILE] = {};
        const Weight *w = weight + first * k;
        const float *in = x.x + row * x.stride;
#ifndef __AVX512F__
        if constexpr (N > 1) { // one register of each 16 lanes at a time, so that the accumulators fit
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

#if !defined(INTEGER_PRODUCTS) && !defined(WIDE_INTEGER_PRODUCTS)
typedef FloatTile<int8_t> Int8Tile;

struct Int4Tile { // in float32
    static constexpr int64_t AT_ONCE = MANY_REGISTERS ? 3 : 1;
    static constexpr bool WIDENS = true, IN_FLOATS = true;
    const uint8_t *weight;
    const Half *scale;
    int64_t k;
    const Rows &x;

    template<int N> INLINE void sums_of(int64_t first, int64_t step, int64_t row, Quad *out) const {
        Lanes total[N][TILE] = {};
        const float *in = x.x + row * x.stride;
        for (int64_t i = 0; i < k; i += 32)
            repeat<TILE>([&](auto j) EACH {
                if (i % CHUNK == 0) prefetch<N>(weight + (first * k + TILE * i) / 2, j);
                repeat<2>([&](auto half) EACH {
                    const Lanes weights = lanes(first + j * step, i + half * LANES);
                    repeat<N>([&](auto r)
                                  EACH { total[r][j] += weights * load(in + r * x.stride + i + half * LANES); });
                });
            });
        repeat<N>([&](auto r) EACH { out[r] = sums(total[r]); });
    }

    INLINE Lanes lanes(int64_t row, int64_t i) const { // of each group of 32, low nibbles come first
        typedef uint8_t Pairs __attribute__((vector_size(16)));
        const int64_t group = (row * k + i) / 32;
        Pairs pairs;
        std::memcpy(&pairs, weight + 16 * group, sizeof pairs);
        return widen((Bytes)(i % 32 ? pairs >> 4 : pairs & 15) - 8) * (float)scale[group];
    }
    FloatTile<float> widened(int64_t n, int64_t count, Buffer &room) const {
        return as_floats<FloatTile<float>>(*this, n, count, room);
    }
};
#endif

// Rows from … end of the matrix with activations first_row … last_row; see product.
template<class Tile>
void tiles(const Tile &tile, const Matrix &m, int64_t first_row, int64_t last_row, int64_t from, int64_t end,
           const Result &to) {
    thread_local Buffer wide; // four weight rows, widened once where many activation rows meet them
    const bool widens = Tile::WIDENS && last_row - first_row > Tile::AT_ONCE;
    if (widens) wide.resize(TILE * m.k / LANES);
    for (int64_t n = from, count; n < end; n += count) {
        count = end - n < TILE ? 1 : TILE; // the last few one by one, as a tile of the same row
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
                    float *at = to.out + (row + r) * to.stride + n;
                    Quad before = {};
                    if (to.add) copy(&before, at);
                    const Quad value = (four[r] * scale + bias) * to.times + before;
                    copy(at, &value);
                }
            }
        };
        if constexpr (Tile::WIDENS)
            if (widens) {
                multiply(tile.widened(n, count, wide), 0);
                continue;
            }
        multiply(tile, n);
    }
}

} // namespace

void kernels::product(const Matrix &m, Rows &x, const Result &to, const Team &team) {
    x.prepare(m.kind, team);
    const auto [first, last] = team.share((m.n + UNIT - 1) / UNIT);
    const int64_t from = first * UNIT, end = std::min(last * UNIT, m.n);
    // Calls f with some activation rows after others, so many that they stay in the second cache.
    const auto in_parts = [&](int64_t bytes, int64_t unit, const auto &f) {
        const int64_t at_once = std::max<int64_t>(bytes / x.row_bytes() / unit, 1) * unit;
        for (int64_t row = 0; row < x.n; row += at_once) f(row, std::min(row + at_once, x.n));
    };
#ifdef AMX
    if (x.on_tiles())
        return m.kind == INT8 ? panels_on_tiles<true>(m, x, to, team) : panels_on_tiles<false>(m, x, to, team);
#endif
    if (m.kind == BF16) return panels<OfWords<BFloats>>(m, x, to, team);
#ifdef INTEGER_PRODUCTS
    if (m.kind == INT8) return panels<OfWords<Integers>>(m, x, to, team);
    if (m.kind == INT4) return panels<OfNibbles>(m, x, to, team);
#elif defined(WIDE_INTEGER_PRODUCTS)
    if (m.kind == INT8) return panels<OfWide<false>>(m, x, to, team);
    if (m.kind == INT4) return panels<OfWide<true>>(m, x, to, team);
#endif
    const auto run = [&, from = from, end = end](const auto &tile) {
        typedef std::decay_t<decltype(tile)> Tile;
        if constexpr (Tile::IN_FLOATS)
            if (x.in_panels()) return momentary_panels(tile, m, x, from, end, to);
        in_parts(CACHED, Tile::AT_ONCE, [&](int64_t row_from, int64_t row_to) {
            tiles(tile, m, row_from, row_to, from, end, to);
            to.finish(row_from, row_to, from, end);
        });
    };
    switch (m.kind) {
    case FP32:
        run(FloatTile<float>{(const float *)m.weight, m.k, x});
        break;
    case FP16:
        run(FloatTile<Half>{(const Half *)m.weight, m.k, x});
        break;
#if !defined(INTEGER_PRODUCTS) && !defined(WIDE_INTEGER_PRODUCTS)
    case INT8:
        run(Int8Tile{(const int8_t *)m.weight, m.k, x});
        break;
    case INT4:
        run(Int4Tile{(const uint8_t *)m.weight, (const Half *)m.scale, m.k, x});
        break;
#endif
    }
}

int64_t kernels::widest_panel(int64_t kind) {
#ifdef AMX
    if (amx::granted && (kind == BF16 || kind == INT8)) return 2 * amx::SIDE;
#endif
    if (kind == BF16) return BFloats::VECTORS * LANES;
#ifdef INTEGER_PRODUCTS
    if (kind == INT8) return Integers::VECTORS * LANES;
    if (kind == INT4) return OfNibbles::MOST_VECTORS * LANES;
#elif defined(WIDE_INTEGER_PRODUCTS)
    if (kind == INT8 || kind == INT4) return OfWide<true>::MOST_VECTORS * LANES;
#endif
    return 0;
}
