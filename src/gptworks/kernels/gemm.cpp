// Matrix products in float32: out [M, N] = a [M, K] · b [K, N] + bias [N]. Called by gemm.py.
//
// A tile of the results, AT_ONCE rows of WIDTH columns, stays in registers during the loop over K. Each step of K reads
// WIDTH elements of b and multiplies them with one element of each row of a. So a part of b that a core's second cache
// holds is first laid out in panels of WIDTH columns. If a's columns are contiguous, a is laid out in panels of AT_ONCE
// rows. (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008, sections 4, 5.)
//
// K is summed in order, in parts that depend only on K. So the bits of a result depend neither on the number of threads
// nor on the numbers of rows and columns.

#include <algorithm>

#include "threads.h"
#include "tile.h"

using namespace kernels;

namespace {

constexpr int64_t WIDTH = 2 * IN_REGISTER;            // columns of a tile
constexpr int64_t AT_ONCE = REGISTERS >= 32 ? 12 : 6; // rows of a tile: its sums take three quarters of the registers
constexpr int64_t DEPTH = 768, COLUMNS = 384, ROWS = 96; // most of K, N and M that are laid out at once
constexpr int64_t COST_OF_LAYING_OUT = 16;               // cost of an element, in multiplications

// Returns the length of a part, a multiple of `unit`, if n is cut into the fewest equal parts of at most `most`.
int64_t part_of(int64_t n, int64_t most, int64_t unit) {
    const int64_t n_parts = std::max<int64_t>((n + most - 1) / most, 1);
    return ((n + n_parts - 1) / n_parts + unit - 1) / unit * unit;
}

// A matrix, with the strides of its rows and of its columns. One of the strides is 1.
struct Factor {
    const float *at;
    int64_t row, column;

    Factor from(int64_t i, int64_t j) const { return {at + i * row + j * column, row, column}; }
};

// Rows of a as tiles read them: element k of row i is at[i · row + k · step].
struct Left {
    const float *at;
    int64_t row, step;
};

// Computes N rows of a tile of the results.
template<int N>
void tile(int64_t depth, const Left &left, const float *b, bool adds, const float *bias, float *out, int64_t out_row,
          int64_t n_columns) {
    Tile<Widened<float>, N, 2> tile;
    const float *const a = left.at;
    const int64_t row = left.row, step = left.step;
    tile.add([&](int r, int64_t i, int) EACH { return a[r * row + i * step]; }, (const uint32_t *)b, depth, WIDTH);
    const float *const more = adds ? out : bias; // what is added to the first row
    const int64_t more_row = adds ? out_row : 0;
    if (n_columns >= WIDTH)
        return repeat<N>([&](auto r) EACH {
            repeat<2>([&](auto half) EACH {
                Floats sum = tile.sum[r][half], there;
                if (more) std::memcpy(&there, more + r * more_row + half * IN_REGISTER, sizeof there), sum += there;
                std::memcpy(out + r * out_row + half * IN_REGISTER, &sum, sizeof sum);
            });
        });
    float sums[N][WIDTH];
    repeat<N>([&](auto r) EACH { std::memcpy(sums[r], tile.sum[r], sizeof sums[r]); });
    for (int64_t r = 0; r < N; r++)
        for (int64_t i = 0; i < n_columns; i++)
            out[r * out_row + i] = more ? sums[r][i] + more[r * more_row + i] : sums[r][i];
}

typedef decltype(&tile<1>) TileFunction;
template<int... I> TileFunction tile_of(int64_t n_rows, std::integer_sequence<int, I...>) {
    static constexpr TileFunction OF[] = {tile<I + 1>...};
    return OF[n_rows - 1];
}

// Lays out `depth` rows of b and some columns as panels [columns / WIDTH, depth, WIDTH]; the last one is padded with
// zeros.
void lay_out_columns(const Factor &b, int64_t depth, int64_t n_columns, float *out) {
    constexpr int64_t TURNED = std::min(WIDTH, LANES);
    for (int64_t j = 0; j < n_columns; j += WIDTH, out += depth * WIDTH) {
        const int64_t width = std::min(WIDTH, n_columns - j);
        const float *from = b.at + j * b.column;
        if (width < WIDTH) std::fill_n(out, depth * WIDTH, 0.0f);
        if (b.column == 1) {
            for (int64_t i = 0; i < depth; i++)
                if (width == WIDTH)
                    std::memcpy(out + i * WIDTH, from + i * b.row, WIDTH * sizeof(float));
                else
                    std::memcpy(out + i * WIDTH, from + i * b.row, width * sizeof(float));
            continue;
        }
        const int64_t whole = depth / LANES * LANES;
        for (int64_t n = 0, count; n < width; n += count) {
            count = width - n < TURNED ? 1 : TURNED;
            const int64_t turned = count == TURNED ? whole : 0;
            for (int64_t i = 0; i < turned; i += LANES)
                transpose<TURNED>(from + n * b.column + i, b.column, out + i * WIDTH + n, WIDTH);
            for (int64_t i = turned; i < depth; i++)
                for (int64_t c = n; c < n + count; c++) out[i * WIDTH + c] = from[i * b.row + c * b.column];
        }
    }
}

// Whether a tile's rows with this stride evict one another from the first cache. Lines a multiple of 4 KiB apart share
// a set of the cache, which has 8 lines in many processors.
constexpr bool collide(int64_t row) { return AT_ONCE > 8 && row % 1024 == 0; }

// Returns some rows and `depth` columns of a: in place, or copied to `room`. The copy is in panels [rows / AT_ONCE,
// depth, AT_ONCE], or in rows that are closer together.
Left lay_out_rows(const Factor &a, int64_t depth, int64_t n_rows, float *room) {
    if (a.column == 1) {
        if (!collide(a.row)) return {a.at, a.row, 1};
        const int64_t row = depth + LANES;
        for (int64_t i = 0; i < n_rows; i++) std::memcpy(room + i * row, a.at + i * a.row, depth * sizeof(float));
        return {room, row, 1};
    }
    constexpr int64_t FEW = 8; // columns at a time: the first cache keeps each line of them until all of it is read
    for (int64_t first = 0; first < depth; first += FEW)
        for (int64_t i = 0; i < n_rows; i += AT_ONCE) {
            const int64_t count = std::min(AT_ONCE, n_rows - i), end = std::min(first + FEW, depth);
            for (int64_t k = first; k < end; k++) {
                const float *from = a.at + k * a.column + i * a.row;
                float *to = room + i * depth + k * AT_ONCE;
                if (count == AT_ONCE)
                    std::memcpy(to, from, AT_ONCE * sizeof(float));
                else
                    std::memcpy(to, from, count * sizeof(float));
            }
        }
    return {room, 1, AT_ONCE};
}

// Returns the numbers of parts of rows and of columns with which the threads end soonest; each thread gets a pair.
std::pair<int64_t, int64_t> grid(int64_t m, int64_t n, int64_t n_threads) {
    std::pair<int64_t, int64_t> best{1, n_threads};
    int64_t least = INT64_MAX;
    for (int64_t down = 1; down <= n_threads; down++) {
        if (n_threads % down) continue;
        const int64_t across = n_threads / down;
        const int64_t rows = (m + down * AT_ONCE - 1) / (down * AT_ONCE) * AT_ONCE;
        const int64_t columns = (n + across * WIDTH - 1) / (across * WIDTH) * WIDTH;
        const int64_t cost = rows * columns + COST_OF_LAYING_OUT * (rows + columns);
        if (cost < least) least = cost, best = {down, across};
    }
    return best;
}

// Computes some rows and columns of the results, on one thread.
void multiply(int64_t m, int64_t n, int64_t k, const Factor &a, const Factor &b, const float *bias, float *out,
              int64_t out_row) {
    thread_local Buffer of_a, of_b;
    const int64_t depth = part_of(k, DEPTH, 1), columns = part_of(n, COLUMNS, WIDTH), rows = part_of(m, ROWS, AT_ONCE);
    of_a.resize(std::max<int64_t>(of_a.size(), (depth + LANES) * rows / LANES + 1));
    of_b.resize(std::max<int64_t>(of_b.size(), depth * columns / LANES + 1));
    float *right = (float *)of_b.data();
    for (int64_t j = 0; j < n; j += columns)
        for (int64_t i = 0; i < k; i += depth) {
            const int64_t some = std::min(depth, k - i), width = std::min(columns, n - j);
            lay_out_columns(b.from(i, j), some, width, right);
            for (int64_t r = 0; r < m; r += rows) {
                const int64_t height = std::min(rows, m - r);
                const Left left = lay_out_rows(a.from(r, i), some, height, (float *)of_a.data());
                for (int64_t c = 0; c < width; c += WIDTH)
                    for (int64_t t = 0; t < height; t += AT_ONCE) {
                        const Left of_tile{left.at + t * (left.step == 1 ? left.row : some), left.row, left.step};
                        tile_of(std::min(AT_ONCE, height - t), std::make_integer_sequence<int, AT_ONCE>())(
                            some, of_tile, right + c * some, i > 0, bias && !i ? bias + j + c : nullptr,
                            out + (r + t) * out_row + j + c, out_row, width - c);
                    }
            }
        }
}

// Computes all results, divided among threads.
void product(int64_t m, int64_t n, int64_t k, int64_t n_threads, const Factor &left, const Factor &right,
             const float *bias, float *out, int64_t out_row) {
    const int64_t row_units = (m + AT_ONCE - 1) / AT_ONCE, column_units = (n + WIDTH - 1) / WIDTH;
    parallel(n_threads, [&](const Team &team) {
        const auto [down, across] = grid(m, n, team.n_threads);
        const Team of_rows{team.thread / across, down, nullptr, nullptr},
            of_columns{team.thread % across, across, nullptr, nullptr};
        const auto [first_row, last_row] = of_rows.share(row_units);
        const auto [first_column, last_column] = of_columns.share(column_units);
        const int64_t r = first_row * AT_ONCE, r_end = std::min(last_row * AT_ONCE, m);
        const int64_t c = first_column * WIDTH, c_end = std::min(last_column * WIDTH, n);
        if (r < r_end && c < c_end)
            multiply(r_end - r, c_end - c, k, left.from(r, 0), right.from(0, c), bias ? bias + c : nullptr,
                     out + r * out_row + c, out_row);
    });
}

} // namespace

// Returns a matrix [rows, columns]. Refuses a matrix of which neither rows nor columns are contiguous.
static Factor factor(const char *name, const Tensor *x, int64_t rows, int64_t columns) {
    shaped(name, x, FP32, {rows, columns});
    int64_t row = x->strides[0], column = x->strides[1];
    if (columns == 1 && row != 1) column = 1; // with one column, its stride is not used
    if (rows == 1 && column != 1) row = 1;
    if (row != 1 && column != 1)
        fail(REFUSED, "%s %s: neither rows nor columns are contiguous", name, Text::of(*x).text);
    return {x->as<const float>(), row, column};
}

// a [M, K]; b [K, N]; bias [N], or null; out [M, N], whose rows are contiguous. K is at least 1.
extern "C" int gptworks_gemm(const Tensor *a, const Tensor *b, const Tensor *bias, const Tensor *out,
                             int64_t n_threads) noexcept {
    return guarded([=] {
        if (sound("out", out).n_dimensions != 2 || sound("a", a).n_dimensions != 2)
            fail(REFUSED, "a %s times b gives no out %s", Text::of(*a).text, Text::of(*out).text);
        const int64_t m = out->sizes[0], n = out->sizes[1], k = a->sizes[1];
        if (k < 1) fail(REFUSED, "a %s has no columns", Text::of(*a).text);
        const Factor left = factor("a", a, m, k), right = factor("b", b, k, n);
        apart("out", contiguous("out", shaped("out", out, FP32, {m, n}), 1));
        if (bias) laid_out("bias", bias, FP32, {n});
        product(m, n, k, threads(n_threads), left, right, bias ? bias->as<const float>() : nullptr, out->as<float>(),
                out->strides[0]);
    });
}
