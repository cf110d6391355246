// Products of activation rows with weight rows in panels.
//
// products.h multiplies rows of weights as they lie: a vector holds 16 words of one weight row, and at the end its
// lanes are added. In a panel a vector holds one word of each of 16 weight rows, and each word of an activation row is
// multiplied with all of them: fewer loads, no sum across lanes, and memory is read in one stream.
//
// Matrices in bf16, and those in int8 and int4 where integers are multiplied, lie in panels from the start
// (quantize/panels.py). Of others, as of float32, which may be in training, some weight rows are laid out for the
// moment where many activation rows meet them.

#pragma once

#include "result.h"
#include "tile.h"

using namespace kernels;

namespace {

// ----------------------------------------------------------------------------------- matrices that lie in panels

constexpr int64_t PANEL_STEP = 4; // words that are multiplied before memory is asked for more
constexpr int64_t PANEL_FAR =
    8192; // bytes ahead that it is asked for where activations take one pass, not a panel ahead

// Each kind multiplies a panel of 16 · VECTORS weight rows, the first one `first`, with the activation rows from … to,
// ROWS or fewer. ahead: weights that come later.

// Products that are summed to the end of a row: of bf16, and of int8 with activations of two planes of bytes. `Kind`
// has the policy, the activations and what a sum of each plane makes.
template<class Kind> struct OfWords {
    static constexpr int64_t AT_ONCE = Kind::ROWS, MOST_VECTORS = Kind::VECTORS;

    template<int ROWS, int VECTORS>
    static INLINE void multiply(const Matrix &m, int64_t first, const Rows &x, int64_t from, int64_t to,
                                const Columns *columns, const Result &out, Ahead &ahead) {
        typedef typename Kind::Policy Policy;
        constexpr int ALL = ROWS * Kind::PLANES;
        const typename Policy::Left *in[ALL];
        for (int64_t r = 0; r < ALL; r++) in[r] = Kind::row(x, std::min(from + r % ROWS, to - 1), r / ROWS);
        Tile<Policy, ALL, VECTORS * PARTS> tile;
        tile.template add<PANEL_STEP>([&](int r, int64_t word, int e) EACH { return in[r][word * Policy::UNITS + e]; },
                                      m.panel_from(first), m.n_words(), VECTORS * LANES, LANES, &ahead);
        repeat<ROWS>([&](auto r) EACH {
            if (from + r < to)
                repeat<VECTORS>([&](auto v) EACH {
                    columns[v].put(Kind::joined(tile.at(r, v), tile.at(ALL - ROWS + r, v), x, from + r), from + r, out);
                });
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
    static INLINE Lanes joined(Lanes sum, Lanes, const Rows &, int64_t) { return sum; }
};

#ifdef INTEGER_PRODUCTS
// Sums are exact. Of weights that are to come without sign, the 128 of each adds 128 · the sum of the row's
// activations.
struct Integers {
    static constexpr int64_t PLANES = 2, ROWS = MANY_REGISTERS ? 4 : 2, VECTORS = MANY_REGISTERS ? 3 : 1;
    typedef Quads Policy;
    static const uint32_t *row(const Rows &x, int64_t row, int64_t plane) { return x.plane(row, plane); }
    static INLINE Lanes joined(Lanes low, Lanes high, const Rows &x, int64_t row) {
        const int64_t offset = UNSIGNED_BYTES ? -128 * x.rounded().total[row] : 0;
        return kernels::joined(bits_of(low), bits_of(high), offset) * x.scale(row);
    }
};

// int4. Each 32 elements of a weight row have a scale: their sums are exact, and are added in float32. A word has the
// low nibbles of four elements and the high ones of those 16 further.
struct OfNibbles {
    static constexpr int64_t AT_ONCE = MANY_REGISTERS ? 4 : 2, MOST_VECTORS = MANY_REGISTERS ? 2 : 1;

    template<int ROWS, int VECTORS>
    static INLINE void multiply(const Matrix &m, int64_t first, const Rows &x, int64_t from, int64_t to,
                                const Columns *columns, const Result &out, Ahead &ahead) {
        constexpr int64_t WORDS = GROUPED / 4; // of a group's activations
        const uint32_t *in[2 * ROWS], *panel = m.panel_from(first);
        const int32_t *offset[ROWS];
        for (int64_t r = 0; r < ROWS; r++) {
            const int64_t row = std::min(from + r, to - 1);
            in[2 * r] = x.plane(row, 0), in[2 * r + 1] = x.plane(row, 1), offset[r] = x.offsets(row);
        }
        Lanes total[ROWS][VECTORS] = {};
        const Half *scales = m.scales_from(first);
        for (int64_t group = 0; group < m.k / GROUPED; group++) {
            ahead.fetch();
            Tile<Nibbles, 2 * ROWS, VECTORS * PARTS> tile; // a row of sums for each plane
            repeat<ROWS>([&](auto r) EACH {
                repeat<VECTORS * PARTS>([&](auto part) EACH { tile.sum[2 * r][part] += offset[r][group]; });
            });
            tile.template add<WORDS / 2>([&](int r, int64_t word, int half)
                                             EACH { return in[r][group * WORDS + half * WORDS / 2 + word]; },
                                         panel, WORDS / 2, VECTORS * LANES);
            repeat<VECTORS>([&](auto v) EACH {
                const Lanes scale = load(scales + v * LANES);
                repeat<ROWS>([&](auto r) EACH {
                    const IntLanes low = bits_of(tile.at(2 * r, v)), high = bits_of(tile.at(2 * r + 1, v));
                    total[r][v] += to_floats(low + (high << 8)) * scale;
                });
            });
            panel += WORDS / 2 * VECTORS * LANES, scales += VECTORS * LANES;
        }
        repeat<ROWS>([&](auto r) EACH {
            if (from + r < to)
                repeat<VECTORS>([&](auto v) EACH { columns[v].put(total[r][v] * x.scale(from + r), from + r, out); });
        });
    }
};
#endif

#ifdef WIDE_INTEGER_PRODUCTS
// int8 and int4 as integers of 16 bits: of a word's bytes, or its nibbles, the first and third and then the second and
// fourth.
template<bool NIBBLES> struct OfWide {
    static constexpr int64_t AT_ONCE = 4, MOST_VECTORS = 1;
    static constexpr int64_t TOGETHER =
        NIBBLES ? GROUPED / 8 : 64; // words whose sums are exact; of int4 they share a scale

    template<int ROWS, int VECTORS>
    static INLINE void multiply(const Matrix &m, int64_t first, const Rows &x, int64_t from, int64_t to,
                                const Columns *columns, const Result &out, Ahead &ahead) {
        constexpr int PARTS = 2 * VECTORS, EACH_WORD = NIBBLES ? 4 : 2;
        const int32_t *in[ROWS], *offset[ROWS];
        for (int64_t r = 0; r < ROWS; r++) {
            const int64_t row = std::min(from + r, to - 1);
            in[r] = (const int32_t *)x.wide(row), offset[r] = x.offsets(row);
        }
        const uint32_t *panel = m.panel_from(first);
        const Half *scales = m.scales_from(first);
        __m256 total[ROWS][PARTS];
        const auto every = [](const auto &f) EACH {
            repeat<ROWS>([&](auto r) EACH { repeat<PARTS>([&](auto part) EACH { f(r, part); }); });
        };
        every([&](auto r, auto part) EACH { total[r][part] = _mm256_setzero_ps(); });
        for (int64_t begin = 0; begin < m.n_words(); begin += TOGETHER) {
            __m256i sum[ROWS][PARTS];
            every([&](auto r, auto part)
                      EACH { sum[r][part] = _mm256_set1_epi32(NIBBLES ? offset[r][begin / TOGETHER] : 0); });
            for (int64_t word = begin; word < std::min(begin + TOGETHER, m.n_words()); word += PANEL_STEP) {
                ahead.fetch();
                repeat<PANEL_STEP>([&](auto step) EACH {
                    repeat<EACH_WORD>([&](auto i) EACH {
                        const int64_t pair = NIBBLES ? 4 * word + i / 2 * 8 + 2 * step + i % 2 : 2 * (word + step) + i;
                        repeat<PARTS>([&](auto part) EACH {
                            const __m256i words = _mm256_loadu_si256((const __m256i *)(panel + part * 8));
                            __m256i weights;
                            if (NIBBLES)
                                weights = _mm256_and_si256(_mm256_srli_epi32(words, i % 2 * 8 + i / 2 * 4),
                                                           _mm256_set1_epi32(0x000f000f));
                            else
                                weights = _mm256_srai_epi16(i ? words : _mm256_slli_epi16(words, 8), 8);
                            repeat<ROWS>([&](auto r) EACH {
                                const __m256i product = _mm256_madd_epi16(weights, _mm256_set1_epi32(in[r][pair]));
                                sum[r][part] = _mm256_add_epi32(sum[r][part], product);
                                asm("" : "+x"(sum[r][part])); // GCC adds in another order, and has too few registers
                            });
                        });
                    });
                    panel += VECTORS * LANES;
                });
            }
            repeat<PARTS>([&](auto part) EACH {
                __m256 scale = _mm256_set1_ps(1); // of int8 the row's comes last
                if (NIBBLES) scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(scales + part * 8)));
                repeat<ROWS>([&](auto r) EACH {
                    total[r][part] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][part]), scale, total[r][part]);
                });
            });
            scales += VECTORS * LANES;
        }
        repeat<ROWS>([&](auto r) EACH {
            if (from + r < to)
                repeat<VECTORS>([&](auto v) EACH {
                    columns[v].put(load((const float *)&total[r][2 * v]) * x.scale(from + r), from + r, out);
                });
        });
    }
};
#endif

// This thread's share of a matrix in panels with all activations; see product.
template<class Kind> void panels(const Matrix &m, const Rows &x, const Result &to, const Team &team) {
    constexpr int64_t AT_ONCE = Kind::AT_ONCE;
    const auto [first_panel, last_panel] = team.share((m.n + m.panel - 1) / m.panel);
    const int64_t end = std::min(last_panel * m.panel, m.n), passes = (x.n + AT_ONCE - 1) / AT_ONCE;
    const auto run = [&](int64_t first, auto vectors) {
        constexpr int VECTORS = vectors;
        const int64_t last = std::min(first + VECTORS * LANES, end), bytes = VECTORS * LANES * 4 * m.n_words();
        const char *const panel = (const char *)m.panel_from(first), *const next = panel + bytes;
        Ahead ahead{next, last < end ? next + bytes : next, (PANEL_STEP * VECTORS + passes - 1) / passes};
        if (passes == 1) ahead = {panel + PANEL_FAR, next + PANEL_FAR, PANEL_STEP * VECTORS};
        const Columns columns[] = {
            {m, first, end}, {m, std::min(first + LANES, end), end}, {m, std::min(first + 2 * LANES, end), end}};
        for (int64_t row = 0; row < x.n; row += AT_ONCE) {
            const int64_t rows_end = std::min(row + AT_ONCE, x.n), rows = rows_end - row;
            const auto multiply = [&](auto rows) {
                Kind::template multiply<rows, VECTORS>(m, first, x, row, rows_end, columns, to, ahead);
            };
            if (rows == 1)
                multiply(std::integral_constant<int, 1>{});
            else if (rows <= 4)
                multiply(std::integral_constant<int, std::min<int64_t>(4, AT_ONCE)>{});
            else
                multiply(std::integral_constant<int, AT_ONCE>{});
        }
        to.finish(0, x.n, first, last);
    };
    for (int64_t first = first_panel * m.panel; first < end; first += m.panel) {
        const int64_t vectors = m.vectors_from(first);
        if (vectors == 1)
            run(first, std::integral_constant<int, 1>{});
        else if (vectors == 2)
            run(first, std::integral_constant<int, std::min<int64_t>(2, Kind::MOST_VECTORS)>{});
        else
            run(first, std::integral_constant<int, Kind::MOST_VECTORS>{});
    }
}

// ------------------------------------------------------------------------- panels laid out for the moment, in float32

constexpr int64_t PANEL_VECTORS =
    REGISTER == 64 ? 3 : 1;                // of 16 weight rows each, whose accumulators stay in registers
constexpr int64_t PANEL_BYTES = 512 << 10; // of weights that a core's second cache keeps while activations pass

// The bits are those of products.h: words are taken in the order in which the lanes there take them and are added.
// First the words of one lane, 0, 16, 32, …; then those of the lane that it is added to, and so on in pairs.
//
// The sums of 16 · VECTORS weight rows, laid out, with PANEL_ROWS rows. x: the first ones' and the others' first word;
// those of the next lane are `apart` words on.
template<int VECTORS> using LaidOut = Tile<Widened<float>, PANEL_ROWS, VECTORS * PARTS>;

template<int VECTORS>
INLINE void multiply_laid_out(const float *panel, int64_t panel_apart, int64_t steps, const float *const (&x)[2],
                              int64_t apart, LaidOut<VECTORS> &sums, Ahead &ahead) {
    Floats waiting[4][PANEL_ROWS][VECTORS * PARTS]; // sums of 1, 2, 4 and 8 lanes for the other half of their pair
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

// Rows from … end of the matrix with all activations; see product.
template<class Weights>
void momentary_panels(const Weights &weights, const Matrix &m, const Rows &x, int64_t from, int64_t end,
                      const Result &to) {
    const int64_t steps = m.k / LANES, apart = x.stride / LANES * GROUP;
    const int64_t most = std::clamp<int64_t>(PANEL_BYTES / (LANES * m.k * 4), 1, PANEL_VECTORS);
    thread_local Buffer room;
    room.resize(most * m.k + LANES);
    float *const panel = (float *)room.data();
    const auto run = [&](int64_t first, auto vectors) {
        constexpr int VECTORS = vectors;
        const int64_t last = first + VECTORS * LANES;
        const int64_t panel_apart =
            (steps * VECTORS + 1) * LANES; // never a power of two: caches would keep few of them
        for (int64_t i = 0; i < m.k; i += LANES)
            for (int v = 0; v < VECTORS; v++) {
                alignas(64) float square[LANES][LANES];
                for (int64_t row = 0; row < LANES; row++)
                    store(square[row], weights.lanes(std::min(first + v * LANES + row, end - 1), i));
                transpose(square[0], LANES, panel + (i / LANES * VECTORS + v) * LANES, panel_apart);
            }
        const int64_t lines = std::max<int64_t>(0, std::min(VECTORS * LANES, end - last)) * m.row_bytes() / 64;
        const char *const after = (const char *)m.weight + last * m.row_bytes();
        Ahead ahead{after, after + 64 * lines, lines * PANEL_ROWS / (x.n * LANES) + 1};
        const Columns columns[] = {
            {m, first, end}, {m, std::min(first + LANES, end), end}, {m, std::min(first + 2 * LANES, end), end}};
        for (int64_t row = 0; row < x.n; row += PANEL_ROWS) {
            const float *const group = x.group(row / GROUP * GROUP) + row % GROUP;
            LaidOut<VECTORS> sums;
            multiply_laid_out<VECTORS>(panel, panel_apart, steps, {group, group + PANEL_ROWS / 2}, apart, sums, ahead);
            for (int64_t r = 0; r < std::min(PANEL_ROWS, x.n - row); r++)
                for (int v = 0; v < VECTORS; v++) columns[v].put(sums.at(r, v), row + r, to);
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

} // namespace
