// Products of activation rows with a weight matrix of any kind. The weights are read once, in order.

#include "products.h"

#include "panels.h"
#include "tiles.h"

using namespace kernels;

namespace {

constexpr int64_t TILE = 4;           // weight rows multiplied at once: enough chains to hide an FMA's latency
constexpr int64_t UNIT = 16;          // weight rows that one thread takes at once: a cache line of results
constexpr int64_t FAR = 20480;        // bytes ahead that are prefetched into the second cache
constexpr int64_t NEAR = 2048;        // bytes ahead that are prefetched into the first cache
constexpr int64_t CACHED = 512 << 10; // bytes of activations that a core's second cache keeps while weights pass

// Prefetches a line of a tile in memory order, which is fastest, although the tile's four rows are read side by side.
// Without prefetches, products ran at a third of the memory's speed; with only the far prefetch, 10% slower. With
// several activation rows, the activations need the first cache.
template<int N> INLINE void prefetch(const void *at, int64_t line) {
    __builtin_prefetch((const char *)at + 64 * line + FAR, 0, 2);
    if (N == 1) __builtin_prefetch((const char *)at + 64 * line + NEAR, 0, 3);
}

struct Nibble {}; // weights in int4, two in a byte

// Weights stored row by row. sums_of<N>(first, step, row, out) multiplies four weight rows (first, first + step, …) by
// N activation rows from `row` on, or by fewer at the end. out[r][j] is the sum for the j-th of these weight rows.
template<class Weight> struct RowTile {
    static constexpr bool IS_FLOAT = std::is_same_v<Weight, float>, IN_PAIRS = std::is_same_v<Weight, Nibble>;
    // Activation rows whose accumulators stay in registers. For more rows, `tiles` widens other weights to float32
    // first.
    static constexpr int64_t AT_ONCE = !IS_FLOAT && !MANY_REGISTERS ? 1 : REGISTERS >= 32 ? 6 : 3;
    const void *weight;
    const Half *scale; // of int4
    int64_t k;
    const Rows &x;

    static INLINE int64_t bytes(int64_t i) { return IN_PAIRS ? i / 2 : i * sizeof(Weight); }
    INLINE Lanes lanes(int64_t row, int64_t i) const {
        if constexpr (IN_PAIRS) { // in each group of 32, low nibbles come first
            typedef uint8_t Pairs __attribute__((vector_size(16)));
            const int64_t group = (row * k + i) / GROUPED;
            Pairs pairs;
            std::memcpy(&pairs, (const char *)weight + 16 * group, sizeof pairs);
            return widen((Bytes)(i % GROUPED ? pairs >> 4 : pairs & 15) - 8) * (float)scale[group];
        } else
            return load((const Weight *)weight + row * k + i);
    }

    template<int N> INLINE void sums_of(int64_t first, int64_t step, int64_t row, Quad *out) const {
        Lanes total[N][TILE] = {};
        const float *in[N];
        for (int64_t r = 0; r < N; r++) in[r] = x.x + std::min(row + r, x.n - 1) * x.stride;
#ifndef __AVX512F__
        if constexpr (N > 1) { // one register of 16 lanes at a time, so that the accumulators fit
            static_assert(IS_FLOAT);
            typedef Lanes::Part Part;
            const float *const w = (const float *)weight + first * k;
            repeat<PARTS>([&](auto part) EACH {
                const auto at = [&](const float *p) EACH {
                    Part x;
                    std::memcpy(&x, p + part * (REGISTER / 4), sizeof x);
                    return x;
                };
                Part sum[N][TILE] = {};
                for (int64_t i = 0; i < k; i += LANES) {
                    Part activation[N];
                    repeat<N>([&](auto r) EACH { activation[r] = at(in[r] + i); });
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
        constexpr int TOGETHER = IN_PAIRS ? 2 : 1; // vectors of 16 that lie in the same bytes
        for (int64_t i = 0; i < k; i += TOGETHER * LANES)
            repeat<TOGETHER>([&](auto half) EACH {
                const int64_t at = i + half * LANES;
                Lanes activation[N];
                repeat<N>([&](auto r) EACH { activation[r] = load(in[r] + at); });
                repeat<TILE>([&](auto j) EACH {
                    if (!half && bytes(i) % 64 == 0) prefetch<N>((const char *)weight + bytes(first * k + TILE * i), j);
                    const Lanes weights = lanes(first + j * step, at);
                    repeat<N>([&](auto r) EACH { total[r][j] += weights * activation[r]; });
                });
            });
        repeat<N>([&](auto r) EACH { out[r] = sums(total[r]); });
    }
};

// Multiplies `count` rows of the matrix from n on (TILE rows or one) by activation rows [first_row, last_row). first:
// the index of row n in the tile.
template<class Weight>
[[gnu::noinline]] void multiply(const RowTile<Weight> &tile, int64_t first, const Matrix &m, int64_t n, int64_t count,
                                int64_t first_row, int64_t last_row, const Result &to) {
    constexpr int64_t AT_ONCE = RowTile<Weight>::AT_ONCE, FEW = std::min<int64_t>(3, AT_ONCE);
    const int64_t step = count / TILE; // a single row is multiplied four times
    const auto copy = [&](void *to, const void *from) EACH {
        if (step)
            std::memcpy(to, from, sizeof(Quad));
        else
            std::memcpy(to, from, sizeof(float));
    };
    Quad scale = Quad{} + 1.0f, bias = {};
    if (m.kind == INT8) copy(&scale, (const float *)m.scale + n);
    if (m.bias) copy(&bias, m.bias + n);
    for (int64_t row = first_row; row < last_row; row += AT_ONCE) {
        Quad four[AT_ONCE];
        const int64_t rows = std::min(AT_ONCE, last_row - row);
        if (rows == 1)
            tile.template sums_of<1>(first, step, row, four);
        else if (rows <= FEW)
            tile.template sums_of<FEW>(first, step, row, four);
        else
            tile.template sums_of<AT_ONCE>(first, step, row, four);
        for (int64_t r = 0; r < rows; r++) {
            float *at = to.out + (row + r) * to.stride + n;
            Quad before = {};
            if (to.add) copy(&before, at);
            const Quad value = (four[r] * scale + bias) * to.times + before;
            copy(at, &value);
        }
    }
}

// Multiplies rows [from, end) of the matrix by activation rows [first_row, last_row). With many activation rows, four
// weight rows at a time are first widened to float32.
template<class Weight>
void tiles(const RowTile<Weight> &tile, const Matrix &m, int64_t first_row, int64_t last_row, int64_t from, int64_t end,
           const Result &to) {
    for (int64_t n = from, count; n < end; n += count) {
        count = end - n < TILE ? 1 : TILE;
        if constexpr (!RowTile<Weight>::IS_FLOAT)
            if (last_row - first_row > tile.AT_ONCE) {
                thread_local Buffer wide;
                wide.resize(TILE * m.k / LANES);
                for (int64_t i = 0; i < count * m.k; i += LANES) wide[i / LANES] = tile.lanes(n + i / m.k, i % m.k);
                multiply(RowTile<float>{wide.data(), nullptr, m.k, tile.x}, 0, m, n, count, first_row, last_row, to);
                continue;
            }
        multiply(tile, n, m, n, count, first_row, last_row, to);
    }
}

} // namespace

void kernels::product(const Matrix &m, Rows &x, const Result &to, const Team &team) {
    x.prepare(m.kind, team);
    const auto [first, last] = team.share((m.n + UNIT - 1) / UNIT);
    const int64_t from = first * UNIT, end = std::min(last * UNIT, m.n);
#ifdef AMX
    if (x.on_tiles())
        return m.kind == INT8 ? panels_on_tiles<true>(m, x, to, team) : panels_on_tiles<false>(m, x, to, team);
#endif
    if (m.kind == BF16) return panels<OfWords<BFloats>>(m, x, to, team);
#ifdef INTEGER_PRODUCTS
    if (m.kind == INT8) return panels<OfWords<Integers>>(m, x, to, team);
    if (m.kind == INT4) return panels<InGroups<FourBits>>(m, x, to, team);
#elif defined(WIDE_INTEGER_PRODUCTS)
    if (m.kind == INT8) return panels<InGroups<Sixteens<false>>>(m, x, to, team);
    if (m.kind == INT4) return panels<InGroups<Sixteens<true>>>(m, x, to, team);
#endif
    const auto run = [&, from = from, end = end](auto weight) {
        typedef decltype(weight) Weight;
        const RowTile<Weight> tile{m.weight, (const Half *)m.scale, m.k, x};
        if (x.in_panels()) {
            const auto lanes = [&](int64_t row, int64_t i) EACH { return tile.lanes(row, i); };
            return momentary_panels(lanes, m, x, from, end, to);
        }
        // As many activation rows at a time as stay in the second cache.
        const int64_t at_once = std::max<int64_t>(CACHED / x.row_bytes() / tile.AT_ONCE, 1) * tile.AT_ONCE;
        for (int64_t row = 0; row < x.n; row += at_once) {
            tiles(tile, m, row, std::min(row + at_once, x.n), from, end, to);
            to.finish(row, std::min(row + at_once, x.n), from, end);
        }
    };
    switch (m.kind) {
    case FP32:
        run(float());
        break;
    case FP16:
        run(Half());
        break;
#if !defined(INTEGER_PRODUCTS) && !defined(WIDE_INTEGER_PRODUCTS)
    case INT8:
        run(int8_t());
        break;
    case INT4:
        run(Nibble());
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
    if (kind == INT4) return FourBits::VECTORS * LANES;
#elif defined(WIDE_INTEGER_PRODUCTS)
    if (kind == INT8 || kind == INT4) return Sixteens<true>::VECTORS * LANES;
#endif
    return 0;
}
