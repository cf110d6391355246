// Products of activation rows with weight rows in panels.
//
// products.cpp multiplies weights stored row by row: a vector holds 16 words of one weight row, and at the end its
// lanes are added. In a panel a vector holds one word of each of 16 weight rows, and each word of an activation row is
// multiplied with all of them: fewer loads, no sum across lanes, and memory is read in one stream.
//
// bf16 matrices are stored in panels (quantize/panels.py), and so are int8 and int4 matrices where integers are
// multiplied. Other matrices, such as float32 ones in training, are copied into panels some rows at a time, if they are
// multiplied by many activation rows.

#pragma once

#include "result.h"
#include "tile.h"

using namespace kernels;

namespace {

// ----------------------------------------------------------------------------------- matrices that lie in panels

constexpr int64_t PANEL_STEP = 4;   // words that are multiplied between two prefetches
constexpr int64_t PANEL_FAR = 8192; // bytes ahead that are prefetched if activations take one pass

// Each kind has a function `multiply` for up to ROWS activation rows [from, to) and a panel of up to 16 · VECTORS
// weight rows [first, last). It computes sums [ROWS][VECTORS] for each plane of the activations; `result` combines the
// planes' sums. ahead: later weights, to be prefetched.

// The planes of ROWS activation rows. Rows beyond the last repeat the last.
template<int ROWS, class Kind> struct Planes {
    const typename Kind::Policy::Left *in[ROWS * Kind::PLANES];

    Planes(const Rows &x, int64_t from, int64_t to) {
        for (int64_t r = 0; r < ROWS * Kind::PLANES; r++)
            in[r] = Kind::row(x, std::min(from + r % ROWS, to - 1), r / ROWS);
    }
};

// Products that are summed over a whole row: of bf16, and of int8 with activations in two planes of bytes. `Kind` has
// the policy, the activations, and the result of the planes' sums.
template<class Kind> struct OfWords : Kind {
    template<int ROWS, int VECTORS>
    static void multiply(const Matrix &m, int64_t first, int64_t last, const Rows &x, int64_t from, int64_t to,
                         const Result &out, Ahead &ahead) {
        typedef typename Kind::Policy Policy;
        const Planes<ROWS, Kind> left(x, from, to);
        Tile<Policy, ROWS * Kind::PLANES, VECTORS * PARTS> tile;
        Ahead lines = ahead; // in registers
        tile.template add<PANEL_STEP>([&](int r, int64_t word, int e)
                                          EACH { return left.in[r][word * Policy::UNITS + e]; },
                                      m.panel_from(first), m.n_words(), VECTORS * LANES, LANES, &lines);
        ahead = lines;
        put_each<ROWS, VECTORS>(m, out, first, last, from, to, [&](auto r, auto v) EACH {
            return Kind::result(tile.at(r, v), tile.at((Kind::PLANES - 1) * ROWS + r, v), x, from + r);
        });
    }
};

struct BFloats {
    static constexpr int64_t PLANES = 1;
#ifdef BF16_PRODUCTS
    static constexpr int64_t ROWS = 8, VECTORS = 3;
    typedef Pairs Policy;
    static const uint32_t *row(const Rows &x, int64_t row, int64_t) { return x.plane(row, 0); }
#else // in float32
    static constexpr int64_t ROWS = REGISTER == 64 ? 8 : REGISTER == 32 ? 3 : REGISTERS / 8;
    static constexpr int64_t VECTORS = REGISTER == 64 ? 3 : REGISTER == 32 ? 2 : 1;
    typedef Widened<BFloat> Policy;
    static const float *row(const Rows &x, int64_t row, int64_t) { return x.x + row * x.stride; }
#endif
    static INLINE Lanes result(Lanes sum, Lanes, const Rows &, int64_t) { return sum; }
};

// Products that are summed in groups. In int4, each 32 elements of a weight row have a scale; their sum is exact, and
// such sums are added in float32. In int8 with 16-bit products, sums of some elements are exact, and the row's scale is
// applied last.
template<class Kind> struct InGroups : Kind {
    template<int ROWS, int VECTORS>
    static void multiply(const Matrix &m, int64_t first, int64_t last, const Rows &x, int64_t from, int64_t to,
                         const Result &out, Ahead &ahead) {
        constexpr int ALL = ROWS * Kind::PLANES;
        const Planes<ROWS, Kind> left(x, from, to);
        const uint32_t *panel = m.panel_from(first);
        const int32_t *offset[ROWS];
        for (int64_t r = 0; r < ROWS; r++) offset[r] = x.offsets(std::min(from + r, to - 1));
        Lanes total[ROWS][VECTORS] = {};
        const Half *scales = m.scales_from(first);
        Ahead lines = ahead; // in registers
        for (int64_t begin = 0; begin < m.n_words(); begin += Kind::WORDS) {
            Tile<typename Kind::Policy, ALL, VECTORS * PARTS> tile;
            if constexpr (Kind::GROUPS)
                repeat<ROWS>([&](auto r) EACH {
                    const int32_t of_group = offset[r][begin / Kind::WORDS];
                    repeat<VECTORS * PARTS>([&](auto part) EACH { tile.sum[r][part] += of_group; });
                });
            const int64_t n = Kind::GROUPS ? Kind::WORDS : std::min(Kind::WORDS, m.n_words() - begin);
            tile.template add<PANEL_STEP>([&](int r, int64_t word, int e)
                                              EACH { return Kind::left(left.in[r], begin, word, e); },
                                          panel, n, VECTORS * LANES, LANES, &lines);
            repeat<VECTORS>([&](auto v) EACH {
                const Lanes scale = Kind::GROUPS ? load(scales + v * LANES) : all(1);
                repeat<ROWS>([&](auto r) EACH {
                    IntLanes sum = bits_of(tile.at(r, v));
                    if constexpr (Kind::PLANES == 2) sum = sum + (bits_of(tile.at(ROWS + r, v)) << 8);
                    total[r][v] += to_floats(sum) * scale;
                });
            });
            panel += n * VECTORS * LANES, scales += VECTORS * LANES;
        }
        ahead = lines;
        put_each<ROWS, VECTORS>(m, out, first, last, from, to,
                                [&](auto r, auto v) EACH { return total[r][v] * x.scale(from + r); });
    }
};

#ifdef INTEGER_PRODUCTS
// Sums are exact. If 128 is added to each weight to make it unsigned, `result` subtracts 128 · the sum of the row's
// activations.
struct Integers {
    static constexpr int64_t PLANES = 2, ROWS = MANY_REGISTERS ? 4 : 2, VECTORS = MANY_REGISTERS ? 3 : 1;
    typedef Quads Policy;
    static const uint32_t *row(const Rows &x, int64_t row, int64_t plane) { return x.plane(row, plane); }
    static INLINE Lanes result(Lanes low, Lanes high, const Rows &x, int64_t row) {
        const int64_t offset = UNSIGNED_BYTES ? -128 * x.rounded().total[row] : 0;
        return joined(bits_of(low), bits_of(high), offset) * x.scale(row);
    }
};

// A word has four elements in its low nibbles, and the four elements 16 places later in its high nibbles.
struct FourBits {
    static constexpr int64_t PLANES = 2, ROWS = MANY_REGISTERS ? 4 : 2, VECTORS = MANY_REGISTERS ? 2 : 1;
    static constexpr int64_t WORDS = GROUPED / 8;
    static constexpr bool GROUPS = true;
    typedef Nibbles Policy;
    static const uint32_t *row(const Rows &x, int64_t row, int64_t plane) { return x.plane(row, plane); }
    static INLINE uint32_t left(const uint32_t *in, int64_t begin, int64_t word, int half) {
        return in[2 * begin + half * WORDS + word];
    }
};
#endif

#ifdef WIDE_INTEGER_PRODUCTS
// int8, or with NIBBLES int4, as 16-bit integers.
template<bool NIBBLES> struct Sixteens {
    static constexpr int64_t PLANES = 1, ROWS = 4, VECTORS = 1;
    static constexpr int64_t WORDS = NIBBLES ? GROUPED / 8 : 64; // words whose sums are exact
    static constexpr bool GROUPS = NIBBLES;
    typedef Wide<NIBBLES> Policy;
    static const int32_t *row(const Rows &x, int64_t row, int64_t) { return (const int32_t *)x.wide(row); }
    static INLINE int32_t left(const int32_t *in, int64_t begin, int64_t word, int e) {
        return NIBBLES ? in[4 * begin + e / 2 * 8 + 2 * word + e % 2] : in[2 * (begin + word) + e];
    }
};
#endif

typedef void (*Multiply)(const Matrix &, int64_t, int64_t, const Rows &, int64_t, int64_t, const Result &, Ahead &);

template<class Kind, int VECTORS>
constexpr Multiply OF_ROWS[] = {Kind::template multiply<1, VECTORS>,
                                Kind::template multiply<std::min<int64_t>(4, Kind::ROWS), VECTORS>,
                                Kind::template multiply<Kind::ROWS, VECTORS>};

// Multiplies this thread's share of a matrix in panels by all activation rows; see `product`.
template<class Kind> void panels(const Matrix &m, const Rows &x, const Result &to, const Team &team) {
    const auto [first_panel, last_panel] = team.share((m.n + m.panel - 1) / m.panel);
    const int64_t end = std::min(last_panel * m.panel, m.n), passes = (x.n + Kind::ROWS - 1) / Kind::ROWS;
    for (int64_t first = first_panel * m.panel; first < end; first += m.panel) {
        const int64_t vectors = m.vectors_from(first), last = std::min(first + vectors * LANES, end);
        const int64_t bytes = vectors * LANES * 4 * m.n_words();
        const char *const panel = (const char *)m.panel_from(first), *const next = panel + bytes;
        Ahead ahead{next, last < end ? next + bytes : next, (PANEL_STEP * vectors + passes - 1) / passes};
        if (passes == 1) ahead = {panel + PANEL_FAR, next + PANEL_FAR, PANEL_STEP * vectors};
        const Multiply *const of_rows = vectors == 1   ? OF_ROWS<Kind, 1>
                                        : vectors == 2 ? OF_ROWS<Kind, std::min<int64_t>(2, Kind::VECTORS)>
                                                       : OF_ROWS<Kind, Kind::VECTORS>;
        for (int64_t row = 0; row < x.n; row += Kind::ROWS) {
            const int64_t rows_end = std::min(row + Kind::ROWS, x.n), rows = rows_end - row;
            of_rows[rows == 1 ? 0 : rows <= 4 ? 1 : 2](m, first, last, x, row, rows_end, to, ahead);
        }
        to.finish(0, x.n, first, last);
    }
}

// ------------------------------------------------------------------------- panels laid out for the moment, in float32

// Vectors of 16 weight rows whose accumulators stay in registers.
constexpr int64_t PANEL_VECTORS = REGISTER == 64 ? 3 : 1;
constexpr int64_t PANEL_BYTES = 512 << 10; // bytes of weights that stay in a core's second cache

// The results equal those of products.cpp to the bit, because words are added in the same order: first the words of one
// lane, 0, 16, 32, …; then those of the lane that it is paired with; and so on, in pairs of pairs.
//
// The sums of 16 · VECTORS weight rows with PANEL_ROWS activation rows, both laid out. x: the first word of the first
// half of the activation rows, and of the second half. The words of the next lane are `apart` words later.
template<int VECTORS> using LaidOut = Tile<Widened<float>, PANEL_ROWS, VECTORS * PARTS>;

template<int VECTORS>
INLINE void multiply_laid_out(const float *panel, int64_t panel_apart, int64_t steps, const float *const (&x)[2],
                              int64_t apart, LaidOut<VECTORS> &sums, Ahead &ahead) {
    Floats waiting[4][PANEL_ROWS][VECTORS * PARTS]; // sums of 1, 2, 4 and 8 lanes, until their pair's other half
    for (int n = 0; n < LANES; n++) {
        const float *const first = x[0] + PAIRED[n] * apart, *const second = x[1] + PAIRED[n] * apart;
        LaidOut<VECTORS> tile;
        tile.add(
            [&](auto r, int64_t step, int) EACH {
                return r < PANEL_ROWS / 2 ? first[step * GROUP + r] : second[step * GROUP + r - PANEL_ROWS / 2];
            },
            (const uint32_t *)(panel + PAIRED[n] * panel_apart), steps, VECTORS * LANES);
        const auto every = [](const auto &f) EACH {
            repeat<PANEL_ROWS>([&](auto r) EACH { repeat<VECTORS * PARTS>([&](auto part) EACH { f(r, part); }); });
        };
        int pair = 0;
        for (; n >> pair & 1; pair++)
            every([&](auto r, auto part) EACH { tile.sum[r][part] = waiting[pair][r][part] + tile.sum[r][part]; });
        auto &to = pair < 4 ? waiting[pair] : sums.sum;
        every([&](auto r, auto part) EACH { to[r][part] = tile.sum[r][part]; });
        ahead.fetch();
    }
}

// Multiplies `panel`, which has 16 · VECTORS rows of the matrix from `first` on, with all activations.
template<int VECTORS>
void multiply_panel(const Matrix &m, const float *panel, int64_t panel_apart, const Rows &x, int64_t first, int64_t end,
                    const Result &to) {
    const int64_t last = first + VECTORS * LANES;
    const int64_t lines = std::max<int64_t>(0, std::min(VECTORS * LANES, end - last)) * m.row_bytes() / 64;
    const char *const after = (const char *)m.weight + last * m.row_bytes();
    Ahead ahead{after, after + 64 * lines, lines * PANEL_ROWS / (x.n * LANES) + 1};
    for (int64_t row = 0; row < x.n; row += PANEL_ROWS) {
        const float *const group = x.group(row / GROUP * GROUP) + row % GROUP;
        LaidOut<VECTORS> sums;
        multiply_laid_out<VECTORS>(panel, panel_apart, m.k / LANES, {group, group + PANEL_ROWS / 2},
                                   x.stride / LANES * GROUP, sums, ahead);
        put(m, to, first, std::min(last, end), row, std::min(row + PANEL_ROWS, x.n),
            [&](int64_t r, int64_t v) EACH { return sums.at(r, v); });
    }
    to.finish(0, x.n, first, std::min(last, end));
}

// Multiplies rows [from, end) of the matrix by all activation rows. lanes(row, i): a weight row's elements i to i + 15.
template<class F>
void momentary_panels(const F &lanes, const Matrix &m, const Rows &x, int64_t from, int64_t end, const Result &to) {
    const int64_t most = std::clamp<int64_t>(PANEL_BYTES / (LANES * m.k * 4), 1, PANEL_VECTORS);
    thread_local Buffer room;
    room.resize(most * m.k + LANES);
    float *const panel = (float *)room.data();
    for (int64_t first = from, vectors; first < end; first += vectors * LANES) {
        vectors = std::min(most, (end - first + LANES - 1) / LANES);
        // Never a power of two: caches would keep few of them.
        const int64_t panel_apart = (m.k / LANES * vectors + 1) * LANES;
        for (int64_t i = 0; i < m.k; i += LANES)
            for (int64_t v = 0; v < vectors; v++) {
                alignas(64) float square[LANES][LANES];
                for (int64_t row = 0; row < LANES; row++)
                    store(square[row], lanes(std::min(first + v * LANES + row, end - 1), i));
                transpose(square[0], LANES, panel + (i / LANES * vectors + v) * LANES, panel_apart);
            }
        const auto multiply = vectors == 1               ? multiply_panel<1>
                              : vectors == PANEL_VECTORS ? multiply_panel<PANEL_VECTORS>
                                                         : multiply_panel<std::min<int64_t>(2, PANEL_VECTORS)>;
        multiply(m, panel, panel_apart, x, first, end, to);
    }
}

} // namespace
