// Muon's updates for matrices of one shape: Nesterov's direction, orthogonalized by Newton–Schulz iterations.
//
// Two of the three products of an iteration are symmetric: half of each is computed. Each thread has its own matrix,
// which stays in the core's second cache; if there are few matrices, several threads share one. An element is summed in
// one order, so its bits do not depend on the number of threads.

#include <algorithm>

#include "threads.h"
#include "tile.h"

using namespace kernels;

namespace {

#ifdef BF16_PRODUCTS
typedef BFloat Element;
typedef Pairs Policy;
#else
typedef float Element; // also rounded to bf16
typedef Widened<float> Policy;
#endif
typedef Policy::Left Unit;                        // what one instruction multiplies
constexpr int64_t DEPTH = Policy::ELEMENTS;       // elements of a unit
constexpr int64_t BLOCK = 32;                     // rows and columns are padded with zeros to a multiple of this
constexpr int64_t WIDTH = MANY_REGISTERS ? 2 : 1; // vectors of columns that are computed together
constexpr int64_t PANEL = WIDTH * LANES;
constexpr int TALLEST = MANY_REGISTERS ? 12 : 4; // most rows computed together, whose sums stay in registers

int64_t in_blocks(int64_t n) { return (n + BLOCK - 1) / BLOCK * BLOCK; }

inline BFloat narrowed(float x) { // to the nearest bf16, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return {(uint16_t)(x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0)};
}
[[maybe_unused]] inline BFloat narrowed(BFloat x) { return x; }

INLINE void keep(Element *p, Lanes x) {
#ifdef BF16_PRODUCTS
    store(p, x);
#else
    const IntLanes bits = bits_of(x), odd = (bits >> 16) & 1;
    store(p, choose(x == x, lanes_of(((bits + 0x7fff + odd) >> 16) << 16), all(NAN)));
#endif
}

// `transpose_block` writes the transpose of a block of BLOCK rows and columns.
#ifdef BF16_PRODUCTS
INLINE __m512i pairs(const Element *above, const Element *below) { // of 16 columns
    const auto wide = [](const Element *p)
                          EACH { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); };
    return _mm512_or_si512(wide(above), _mm512_slli_epi32(wide(below), 16));
}
void transpose_block(const Element *from, int64_t from_stride, Element *to, int64_t to_stride) {
    for (int64_t j = 0; j < BLOCK; j += LANES) {
        __m512i x[16];
        repeat<16>([&](auto i)
                       EACH { x[i] = pairs(from + 2 * i * from_stride + j, from + (2 * i + 1) * from_stride + j); });
        transpose(x);
        repeat<16>([&](auto i) EACH { _mm512_storeu_si512(to + (j + i) * to_stride, x[i]); });
    }
}
#else
void transpose_block(const Element *from, int64_t from_stride, Element *to, int64_t to_stride) {
    for (int64_t j = 0; j < BLOCK; j += LANES)
        for (int64_t i = 0; i < BLOCK; i += LANES)
            transpose(from + i * from_stride + j, from_stride, to + j * to_stride + i, to_stride);
}
#endif

// A matrix stored row by row. Rows are an odd number of BLOCKs apart: with a power of two, the elements of a column
// would share few sets of the cache.
struct Table {
    Element *at;
    int64_t stride;

    static int64_t stride_of(int64_t columns) { return in_blocks(columns) | BLOCK; }
    Element *row(int64_t i) const { return at + i * stride; }
};

// The right factor of a product, [depth, columns], laid out as it is read: [columns / PANEL, depth / DEPTH, PANEL,
// DEPTH].
struct Right {
    Element *at;
    int64_t depth;

    Element *panel(int64_t column) const { return at + column * depth; }

    void take(const Table &x, int64_t column) const {
        Element *to = panel(column);
        for (int64_t k = 0; k < depth; k += DEPTH)
            for (int64_t j = column; j < column + PANEL; j += LANES, to += LANES * DEPTH)
#ifdef BF16_PRODUCTS
                _mm512_storeu_si512(to, pairs(x.row(k) + j, x.row(k + 1) + j));
#else
                store(to, load(x.row(k) + j));
#endif
    }
    void take_transposed(const Table &x, int64_t column) const {
        for (int64_t k = 0; k < depth; k += LANES * DEPTH)
            for (int64_t j = 0; j < PANEL; j += LANES)
                transpose((const Unit *)(x.row(column + j) + k), x.stride / DEPTH,
                          (Unit *)(panel(column) + k * PANEL + j * DEPTH), PANEL);
    }
};

// Computes rows [row, row + N) of left · right in a panel's columns. out(i, j, sums) gets 16 sums of row i from column
// j on.
template<int N, class F>
INLINE void tile(const Table &left, int64_t row, const Right &right, int64_t column, const F &out) {
    Tile<Policy, N, WIDTH * PARTS> tile;
    const Unit *const a = (const Unit *)left.row(row);
    const int64_t stride = left.stride / DEPTH;
    tile.add([&](int r, int64_t i, int) EACH { return a[r * stride + i]; }, (const uint32_t *)right.panel(column),
             right.depth / DEPTH, PANEL);
    repeat<N>([&](auto r)
                  EACH { repeat<WIDTH>([&](auto v) EACH { out(row + r, column + v * LANES, tile.at(r, v)); }); });
}

template<class F> void block(const Table &left, int64_t row, const Right &right, int64_t column, const F &out) {
    for (int64_t panel = column; panel < column + BLOCK; panel += PANEL) {
        int64_t i = row;
        for (; row + BLOCK - i >= TALLEST; i += TALLEST) tile<TALLEST>(left, i, right, panel, out);
        if (i < row + BLOCK) tile<BLOCK % TALLEST + TALLEST * !(BLOCK % TALLEST)>(left, i, right, panel, out);
    }
}

struct Matrix { // [rows, columns]
    const float *gradient, *momentum;
    BFloat *update;
};

struct Polynomial { // a x + b x³ + c x⁵
    float a, b, c;
};

struct Settings {
    int64_t rows, columns, n_iterations;
    const Polynomial *polynomials; // of each iteration
    float momentum, eps;
};

INLINE Lanes between(Lanes from, Lanes to, float where) { // as torch.lerp
    return where < 0.5f ? from + where * (to - from) : to - (to - from) * (1 - where);
}

// Orthogonalizes one matrix at a time, with a team of threads.
struct Orthogonalizer {
    const Settings &s;
    bool tall;
    int64_t rows, columns; // of x, padded; x is never taller than wide
    Buffer memory;
    std::vector<float> squares;
    Table x, gram, polynomial;
    Element *packed;

    explicit Orthogonalizer(const Settings &s)
        : s(s), tall(s.rows > s.columns), rows(in_blocks(std::min(s.rows, s.columns))),
          columns(in_blocks(std::max(s.rows, s.columns))),
          memory(rows * (Table::stride_of(columns) + 2 * Table::stride_of(rows) + columns) * sizeof(Element) / 64),
          squares(rows) {
        x = {(Element *)memory.data(), Table::stride_of(columns)};
        gram = {x.row(rows), Table::stride_of(rows)};
        polynomial = {gram.row(rows), gram.stride};
        packed = polynomial.row(rows);
    }

    // Calls f(i, j, height, width) for this thread's share of the blocks of the matrix in its original layout.
    template<class F> void each_block(const Team &team, const F &f) const {
        const auto [first, end] = team.share(in_blocks(s.rows) / BLOCK);
        for (int64_t i = first * BLOCK; i < std::min(s.rows, end * BLOCK); i += BLOCK)
            for (int64_t j = 0; j < s.columns; j += BLOCK)
                f(i, j, std::min(BLOCK, s.rows - i), std::min(BLOCK, s.columns - j));
    }

    void begin(const Matrix &m, const Team &team) {
        each_block(team, [&](int64_t row, int64_t column, int64_t height, int64_t width) {
            Element turned[BLOCK * BLOCK] = {};
            Element *const to = tall ? turned : x.row(row) + column;
            for (int64_t i = 0; i < height; i++)
                for (int64_t j = 0; j < width; j += LANES) {
                    const int64_t at = (row + i) * s.columns + column + j, n = width - j;
                    const Lanes gradient = read(m.gradient + at, n);
                    const Lanes direction = between(gradient, read(m.momentum + at, n), s.momentum);
                    keep(to + i * (tall ? BLOCK : x.stride) + j, direction);
                }
            if (tall) transpose_block(turned, BLOCK, x.row(column) + row, x.stride);
        });
        team.wait();
        const auto [first, end] = team.share(rows);
        for (int64_t i = first; i < end; i++) {
            Lanes squared = {};
            for (int64_t j = 0; j < columns; j += LANES) {
                const Lanes v = load(x.row(i) + j);
                squared += v * v;
            }
            squares[i] = sum(squared);
        }
        team.wait();
        float total = 0;
        for (float square : squares) total += square;
        const float norm = narrowed(std::sqrt(total)), divisor = norm < s.eps ? s.eps : norm;
        for (int64_t i = first; i < end; i++)
            for (int64_t j = 0; j < columns; j += LANES) keep(x.row(i) + j, load(x.row(i) + j) / all(divisor));
        team.wait();
    }

    template<class F> static void pack(int64_t width, const Team &team, const F &take) {
        for (int64_t panel = team.thread; panel < width / PANEL; panel += team.n_threads) take(panel * PANEL);
        team.wait();
    }

    // to = f(left · right), which is symmetric.
    template<class F>
    void symmetric(const Table &left, const Right &right, const Table &to, const Team &team, const F &f) const {
        int64_t turn = 0;
        for (int64_t j = 0; j < rows; j += BLOCK)
            for (int64_t i = 0; i <= j; i += BLOCK) {
                if (turn++ % team.n_threads != team.thread) continue;
                block(left, i, right, j, [&](int64_t row, int64_t column, Lanes sums) EACH {
                    keep(to.row(row) + column, f(row, column, sums));
                });
                if (i < j) transpose_block(to.row(i) + j, to.stride, to.row(j) + i, to.stride);
            }
        team.wait();
    }

    // x becomes a x + (b x xᵀ + c (x xᵀ)²) x.
    void iterate(const Polynomial &p, const Team &team) const {
        const Right wide{packed, columns}, square{packed, rows};
        pack(rows, team, [&](int64_t j) { wide.take_transposed(x, j); });
        symmetric(x, wide, gram, team, [](int64_t, int64_t, Lanes sums) EACH { return sums; });
        pack(rows, team, [&](int64_t j) { square.take(gram, j); });
        symmetric(gram, square, polynomial, team, [&](int64_t row, int64_t column, Lanes sums) EACH {
            return all(p.b) * load(gram.row(row) + column) + all(p.c) * sums;
        });
        pack(columns, team, [&](int64_t j) { square.take(x, j); });
        int64_t turn = 0;
        for (int64_t j = 0; j < columns; j += BLOCK)
            for (int64_t i = 0; i < rows; i += BLOCK)
                if (turn++ % team.n_threads == team.thread)
                    block(polynomial, i, square, j, [&](int64_t row, int64_t column, Lanes sums) EACH {
                        Element *const here = x.row(row) + column;
                        keep(here, all(p.a) * load(here) + sums);
                    });
        team.wait();
    }

    void finish(const Matrix &m, const Team &team) const {
        each_block(team, [&](int64_t row, int64_t column, int64_t height, int64_t width) {
            Element turned[BLOCK * BLOCK];
            if (tall) transpose_block(x.row(column) + row, x.stride, turned, BLOCK);
            const Element *const from = tall ? turned : x.row(row) + column;
            for (int64_t i = 0; i < height; i++) {
                const Element *const made = from + i * (tall ? BLOCK : x.stride);
                BFloat *const update = m.update + (row + i) * s.columns + column;
                for (int64_t j = 0; j < width; j++) update[j] = narrowed(made[j]);
            }
        });
        team.wait();
    }
};

void updates(const std::vector<Matrix> &matrices, const Settings &settings, int64_t n_threads) {
    // With fewer than two matrices per thread, threads form teams, so that no thread waits long for the last matrix.
    const int64_t n = matrices.size();
    const auto n_teams = [&](int64_t threads) { return std::clamp<int64_t>(n / 2, 1, threads); };
    std::vector<Orthogonalizer> workers;
    workers.reserve(n_teams(n_threads));
    for (int64_t i = 0; i < n_teams(n_threads); i++) workers.emplace_back(settings);
    std::vector<Barrier> barriers(n_threads);
    parallel(n_threads, [&](const Team &everyone) {
        const int64_t teams = n_teams(everyone.n_threads);
        int64_t mine = 0;
        const auto first = [&](int64_t team) { return everyone.n_threads * team / teams; };
        while (first(mine + 1) <= everyone.thread) mine++;
        const Team team{everyone.thread - first(mine), first(mine + 1) - first(mine), &barriers[mine], everyone.alarm};
        for (int64_t i = mine; i < n; i += teams) {
            workers[mine].begin(matrices[i], team);
            for (int64_t k = 0; k < settings.n_iterations; k++) workers[mine].iterate(settings.polynomials[k], team);
            workers[mine].finish(matrices[i], team);
        }
    });
}

} // namespace

// gradients, momenta: n float32 matrices each, all of one shape; updates: bf16 [n, rows, columns]; polynomials: float32
// [iterations, 3].
extern "C" int gptworks_muon_updates(const Tensor *gradients, const Tensor *momenta, const Tensor *update,
                                     const Tensor *polynomials, int64_t n, float momentum, float eps,
                                     int64_t n_threads) noexcept {
    return guarded([=] {
        if (sound("updates", update).n_dimensions != 3)
            fail(REFUSED, "updates %s are no matrices", Text::of(*update).text);
        const int64_t rows = update->sizes[1], columns = update->sizes[2];
        laid_out("updates", update, BF16, {within("n", n, 0, MOST), rows, columns});
        if (rows < 1 || columns < 1) fail(REFUSED, "updates %s have no elements", Text::of(*update).text);
        const int64_t n_iterations = sound("polynomials", polynomials).n_dimensions ? polynomials->sizes[0] : 0;
        laid_out("polynomials", polynomials, FP32, {n_iterations, 3});
        std::vector<Matrix> matrices;
        for (int64_t i = 0; i < n; i++)
            matrices.push_back({laid_out("a gradient", gradients + i, FP32, {rows, columns}).as<const float>(),
                                laid_out("a momentum", momenta + i, FP32, {rows, columns}).as<const float>(),
                                update->as<BFloat>() + i * rows * columns});
        updates(matrices, {rows, columns, n_iterations, polynomials->as<const Polynomial>(), momentum, eps},
                threads(n_threads));
    });
}
