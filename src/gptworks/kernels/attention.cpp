// Causal attention for training on a CPU: forward and backward, in memory linear in the length. Called by attention.py.
//
// A piece of work is one key/value head of one text with the query heads that it serves: one thread computes it from
// beginning to end, in one order, so the bits of the result do not depend on the number of threads.
//
// The forward pass computes 16 queries at a time: scores, a softmax with a running maximum, weighted values. It stores
// each query's log-sum-exp. The backward pass takes 64 keys at a time: it computes the scores again, and from them and
// the log-sum-exp the weights.
//
// Products read units of four bytes: one float32, or two bf16 elements that are neighbours along the sum.
// The left factor is laid out in rows of units, the right factor in panels of 64 columns.

#include <algorithm>
#include <limits>

#include "amx.h"
#include "functions.h"
#include "threads.h"
#include "tile.h"

using namespace kernels;

namespace {

// ------------------------------------------------------------------------------------------------- what is computed

struct View { // [batch, heads, length, width]; elements of a row are contiguous
    char *data = nullptr;
    int64_t batch = 0, head = 0, row = 0; // strides, in bytes

    template<class T> T *at(int64_t b, int64_t h, int64_t r) const {
        return (T *)(data + b * batch + h * head + r * row);
    }
};

struct Attention {
    int64_t batch, heads, groups, n_queries, n_keys, width, window;
    bool is_bf16;
    float scale, softcap, dropout; // softcap 0: none
    const uint64_t *seed;
    View q, k, v, out;
    View bias;                 // [batch, 1, n_queries, n_keys]; data null: none
    float *sums;               // [batch, heads, n_queries], log2 Σ 2^score; +inf: the query sees no key
    View d_out, d_q, d_k, d_v; // of the backward pass
};

// ------------------------------------------------------------------------------------------------------ products

constexpr int64_t PANEL = 64, TALL = 4, STRIP = 16;
constexpr int AT_ONCE = MANY_REGISTERS ? 4 : 1; // vectors of a panel's row whose accumulators stay in registers

int64_t rounded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Policies of products (tile.h). P::Left is a unit of P::ELEMENTS elements.
typedef Widened<float> Wide;
#ifdef BF16_PRODUCTS
typedef Pairs Narrow;
#else
typedef Wide Narrow;
#endif

#ifdef AMX
// Computes the `product` below on tiles. The rows must fill whole tiles; of the k units, only whole tiles are read.
void product_on_tiles(int64_t rows, int64_t columns, int64_t k, const uint32_t *a, int64_t stride, const uint32_t *b,
                      int64_t panel, float *c, int64_t c_stride, bool add) {
    constexpr int64_t SIDE = amx::SIDE, LINE = PANEL * sizeof(uint32_t);
    for (int64_t n = 0; n < columns; b += panel)
        for (int64_t end = std::min(n + PANEL, columns), at = 0, step; n < end; n += step, at += step) {
            step = std::min(2 * SIDE, end - n);
            const char *const right[] = {(const char *)(b + at), (const char *)(b + at + SIDE)};
            for (int64_t m = 0, height; m < rows; m += height) {
                height = std::min(2 * SIDE, rows - m);
                const int64_t tall = height > SIDE ? 2 : 1, wide = step > SIDE ? 2 : 1;
                const char *const left[] = {(const char *)(a + m * stride), (const char *)(a + (m + SIDE) * stride)};
                char *sums[4];
                for (int64_t i = 0; i < tall * wide; i++)
                    sums[i] = (char *)(c + (m + i / wide * SIDE) * c_stride + n + i % wide * SIDE);
                amx::product<false>(tall, wide, left, 4 * stride, right, LINE, SIDE * LINE, k / SIDE, sums,
                                    4 * c_stride, add, nullptr);
            }
        }
}
#endif

template<class P, int N>
INLINE void tile(const typename P::Left *a, int64_t stride, const typename P::Left *b, int64_t k, float *c,
                 int64_t c_stride, bool add) {
    Tile<P, TALL, N * PARTS> tile;
    const auto each_vector = [&](const auto &f)
                                 EACH { repeat<TALL>([&](auto r) EACH { repeat<N>([&](auto j) EACH { f(r, j); }); }); };
    if (add) each_vector([&](auto r, auto j) EACH { tile.set(r, j, load(c + r * c_stride + j * LANES)); });
    tile.add([&](int r, int64_t i, int) EACH { return a[r * stride + i]; }, (const uint32_t *)b, k, PANEL);
    each_vector([&](auto r, auto j) EACH { store(c + r * c_stride + j * LANES, tile.at(r, j)); });
}

// c[m][n] = Σ a[m][i] · b[i][n] over k units, added to the previous c[m][n] if `add`. `rows` is a multiple of 4,
// `columns` of 16. Panels of b are `panel` units apart.
template<class P>
void product(int64_t rows, int64_t columns, int64_t k, const typename P::Left *a, int64_t stride,
             const typename P::Left *b, int64_t panel, float *c, int64_t c_stride, bool add) {
#ifdef AMX
    if constexpr (P::ELEMENTS == 2)
        if (amx::granted && rows % amx::SIDE == 0 && k >= amx::SIDE) {
            product_on_tiles(rows, columns, k, a, stride, b, panel, c, c_stride, add);
            const int64_t done = k / amx::SIDE * amx::SIDE;
            if (done == k) return;
            a += done, b += done * PANEL, k -= done, add = true;
        }
#endif
    for (int64_t n = 0; n < columns; b += panel)
        for (int64_t end = std::min(n + PANEL, columns), at = 0, step; n < end; n += step, at += step) {
            const int64_t count = std::min<int64_t>(AT_ONCE, (end - n) / LANES);
            step = count * LANES;
            for (int64_t m = 0; m < rows; m += TALL) {
                const auto run = [&](auto width) EACH {
                    tile<P, width>(a + m * stride, stride, b + at, k, c + m * c_stride + n, c_stride, add);
                };
                switch (count) {
                case 1:
                    run(std::integral_constant<int, 1>{});
                    break;
                case 2:
                    run(std::integral_constant<int, std::min(2, AT_ONCE)>{});
                    break;
                case 3:
                    run(std::integral_constant<int, std::min(3, AT_ONCE)>{});
                    break;
                default:
                    run(std::integral_constant<int, AT_ONCE>{});
                }
            }
        }
}

// ------------------------------------------------------------------------------------------------------- layouts

// A matrix [rows, width] of one head, which is written in the layouts of the products, padded with zeros.
template<class P, class T> struct Source {
    typedef typename P::Left Unit;
    static constexpr int64_t EACH_UNIT = P::ELEMENTS;
    const View &view;
    int64_t batch, head, rows, width, padded; // padded: the width, rounded up to a multiple of 16

    // Writes row r in units along the width.
    INLINE void line(int64_t r, Unit *out) const {
        if (r >= rows) return (void)std::memset(out, 0, padded / EACH_UNIT * sizeof(Unit));
        const T *from = view.at<T>(batch, head, r);
        if constexpr (sizeof(T) * EACH_UNIT == sizeof(Unit)) {
            std::memcpy(out, from, width * sizeof(T));
            std::memset((char *)out + width * sizeof(T), 0, (padded - width) * sizeof(T));
        } else {
            int64_t i = 0;
            for (; i + LANES <= width; i += LANES) store((float *)out + i, load(from + i));
            for (; i < padded; i++) out[i] = i < width ? (float)from[i] : 0;
        }
    }

    // Writes the j-th unit along the rows for each element of the width. spare: room for 2 lines.
    INLINE void pair(int64_t j, Unit *out, Unit *spare) const {
        if constexpr (EACH_UNIT == 1)
            line(j, out);
        else {
            char *const first = (char *)spare, *const second = first + padded * sizeof(T);
            line(2 * j, (Unit *)first);
            line(2 * j + 1, (Unit *)second);
            for (int64_t i = 0; i < padded; i++) {
                uint16_t pair[2];
                std::memcpy(&pair[0], first + i * sizeof(T), sizeof(T));
                std::memcpy(&pair[1], second + i * sizeof(T), sizeof(T));
                out[i] = pair[0] | (uint32_t)pair[1] << 16;
            }
        }
    }

    // [rows][width / unit]
    void in_rows(int64_t n, Unit *out) const {
        for (int64_t r = 0; r < n; r++) line(r, out + r * (padded / EACH_UNIT));
    }

    // panels of 64 rows, [width / unit][64] each: the right factor of a sum over the width
    void across(int64_t n, Unit *out, Unit *lines) const {
        const int64_t units = padded / EACH_UNIT, stride = rounded(units, LANES);
        for (int64_t r = 0; r < n; r += LANES) {
            for (int64_t i = 0; i < LANES; i++) line(r + i, lines + i * stride);
            Unit *to = out + r / PANEL * units * PANEL + r % PANEL;
            for (int64_t u = 0; u < units; u += LANES)
                if (u + LANES <= units)
                    transpose(lines + u, stride, to + u * PANEL, PANEL);
                else
                    for (int64_t i = 0; i < LANES; i++)
                        for (int64_t rest = u; rest < units; rest++) to[rest * PANEL + i] = lines[i * stride + rest];
        }
    }

    // panels of 64 of the width, [rows / unit][64] each: the right factor of a sum over the rows
    void along(int64_t n, Unit *out, Unit *lines) const {
        for (int64_t j = 0; j < n / EACH_UNIT; j++) {
            pair(j, lines, lines + padded);
            for (int64_t i = 0; i < padded; i += LANES)
                std::memcpy(out + i / PANEL * (n / EACH_UNIT) * PANEL + j * PANEL + i % PANEL, lines + i,
                            LANES * sizeof(Unit));
        }
    }

    // [width][rows / unit]: the left factor of a sum over the rows
    void turned(int64_t n, Unit *out, int64_t stride, Unit *lines) const {
        for (int64_t j = 0; j < n / EACH_UNIT; j += LANES) {
            for (int64_t i = 0; i < LANES; i++) pair(j + i, lines + i * padded, lines + LANES * padded);
            for (int64_t i = 0; i < padded; i += LANES) transpose(lines + i, padded, out + i * stride + j, stride);
        }
    }
};

// Writes a row of float32, times a factor, to a row of the result.
template<class T> INLINE void put(const float *from, float factor, T *to, int64_t width) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(to + i, load(from + i) * factor);
    if (i == width) return;
    T rest[LANES];
    store(rest, load(from + i) * factor);
    std::copy_n(rest, width - i, to + i);
}

// ------------------------------------------------------------------------------------------------------- weights

constexpr float NEVER = -std::numeric_limits<float>::infinity();

// The keys that each query sees, and the changes of its scores before the softmax.
template<class T> struct Rules {
    const Attention &a;
    int64_t batch, n;               // n: queries, rounded up to a multiple of 16
    std::vector<int64_t> from, to;  // of each query; equal if it sees no key
    std::vector<int64_t> low, high; // of each strip of 16
    float factor, cap;              // a score is q·k · factor, or cap · tanh(q·k · factor), as an exponent of 2

    Rules(const Attention &a, int64_t batch)
        : a(a), batch(batch), n(rounded(a.n_queries, STRIP)), from(n), to(n), low(n / STRIP), high(n / STRIP),
          factor(a.softcap ? a.scale / a.softcap : a.scale * LOG2_E), cap(a.softcap * LOG2_E) {
        for (int64_t q = 0; q < a.n_queries; q++) {
            to[q] = q + 1 + a.n_keys - a.n_queries;
            from[q] = std::max<int64_t>(0, to[q] - a.window);
            if (!a.bias.data) continue;
            const T *row = bias(q);
            while (from[q] < to[q] && (float)row[to[q] - 1] == NEVER) to[q]--;
            while (from[q] < to[q] && (float)row[from[q]] == NEVER) from[q]++;
        }
        for (int64_t strip = 0; strip < n / STRIP; strip++) {
            low[strip] = a.n_keys;
            for (int64_t q = strip * STRIP; q < (strip + 1) * STRIP; q++)
                if (from[q] < to[q]) {
                    low[strip] = std::min(low[strip], from[q]);
                    high[strip] = std::max(high[strip], to[q]);
                }
        }
    }

    static constexpr float LOG2_E = 1.44269504f;
    const T *bias(int64_t q) const { return a.bias.at<T>(batch, 0, q); }
    bool plain() const { return !a.bias.data && !a.softcap && !a.dropout; }

    // Returns the scores of query q with 16 keys from s on. tangent: receives the softcap's tanh.
    template<bool PLAIN> INLINE Lanes score(Lanes product, int64_t q, int64_t s, Lanes *tangent = nullptr) const {
        Lanes score = product * factor;
        if (!PLAIN && a.softcap) {
            const Lanes t = hyperbolic_tangent(score);
            if (tangent) *tangent = t;
            score = t * cap;
        }
        if (!PLAIN && a.bias.data && q < a.n_queries && s < a.n_keys) {
            const T *row = bias(q) + s;
            if (s + LANES <= a.n_keys)
                score += load(row) * LOG2_E;
            else {
                T some[LANES] = {};
                std::copy(row, row + (a.n_keys - s), some);
                score += load(some) * LOG2_E;
            }
        }
        if (s < from[q] || s + LANES > to[q]) {
            const Lanes key = lane_numbers() + (float)s;
            score = choose(key < (float)from[q], all(NEVER), choose(key < (float)to[q], score, all(NEVER)));
        }
        return score;
    }

    static INLINE Lanes lane_numbers() {
        static const float numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        return load(numbers);
    }

    // Writes the factors of the weights of query q of a head and n keys from s on: 0 if dropout drops the weight, else
    // 1 / (1 − dropout). They depend only on seed and position, so that the backward pass computes the same factors.
    void kept(int64_t head, int64_t q, int64_t s, int64_t n, float *out) const {
        uint64_t z = *a.seed + 0x9e3779b97f4a7c15 * (uint64_t)((batch * a.heads + head) * a.n_queries + q + 1);
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        const uint32_t first = (uint32_t)z, second = (uint32_t)(z >> 32);
        const int32_t limit = (int32_t)std::lrint(a.dropout * 0x1p24);
        const float factor = 1 / (1 - a.dropout);
        for (int64_t i = 0; i < n; i++) {
            uint32_t x = (uint32_t)(s + i) ^ first;
            x = (x ^ x >> 16) * 0x7feb352d + second;
            x = (x ^ x >> 15) * 0x846ca68b;
            out[i] = (int32_t)((x ^ x >> 16) >> 8) < limit ? 0 : factor;
        }
    }
};

// Memory of this thread, 64-byte aligned, kept for the next call.
struct Room {
    char *at;

    explicit Room(int64_t n_bytes) {
        thread_local Buffer buffer;
        if ((int64_t)(buffer.size() * sizeof(Lanes)) < n_bytes) {
            buffer = Buffer();
            buffer = Buffer(n_bytes / sizeof(Lanes) + 1);
        }
        at = (char *)buffer.data();
    }
    template<class T> T *take(int64_t n) { return (T *)std::exchange(at, at + rounded(n * sizeof(T), 64)); }
};

// Writes 32 weights of a row, from index s on, as units along the keys.
template<class P> INLINE void put_weights(typename P::Left *row, int64_t s, Lanes first, Lanes second) {
#ifdef BF16_PRODUCTS
    if constexpr (P::ELEMENTS == 2)
        return (void)_mm512_storeu_si512((uint16_t *)row + s,
                                         (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#endif
    store((float *)row + s, first);
    store((float *)row + s + LANES, second);
}

// ------------------------------------------------------------------------------------------------------- forward

constexpr int64_t KEYS = 256; // keys whose scores are in memory together

template<class P, class T> struct Forward {
    typedef typename P::Left Unit;
    static constexpr int64_t EACH_UNIT = P::ELEMENTS;
    const Attention &a;

    void run(int64_t batch, int64_t group) const {
        const bool plain = !a.bias.data && !a.softcap && !a.dropout;
        plain ? run<true>(batch, group) : run<false>(batch, group);
    }

    template<bool PLAIN> void run(int64_t batch, int64_t group) const {
        const Rules<T> rules(a, batch);
        const int64_t width = rounded(a.width, LANES), keys = rounded(a.n_keys, PANEL), panels = rounded(width, PANEL);
        const int64_t units = width / EACH_UNIT, value_panel = keys / EACH_UNIT * PANEL;
        Room room(4 * (keys * (units + panels) + (3 * STRIP + 8) * width + 3 * STRIP * KEYS) + 1024);
        Unit *k = room.take<Unit>(keys * units), *v = room.take<Unit>(keys * panels / EACH_UNIT);
        Unit *lines = room.take<Unit>((LANES + 4) * width), *q = room.take<Unit>(STRIP * units);
        float *out = room.take<float>(STRIP * width), *scores = room.take<float>(STRIP * KEYS);
        Unit *weights = room.take<Unit>(STRIP * KEYS / EACH_UNIT);
        float *kept = room.take<float>(KEYS);
        Source<P, T>{a.k, batch, group, a.n_keys, a.width, width}.across(keys, k, lines);
        Source<P, T>{a.v, batch, group, a.n_keys, a.width, width}.along(keys, v, lines);
        const int64_t shared = a.heads / a.groups;
        for (int64_t head = group * shared; head < (group + 1) * shared; head++)
            for (int64_t first = 0; first < a.n_queries; first += STRIP) {
                const Source<P, T> queries{a.q, batch, head, a.n_queries, a.width, width};
                for (int64_t r = 0; r < STRIP; r++) queries.line(first + r, q + r * units);
                float top[STRIP], total[STRIP] = {};
                std::fill(top, top + STRIP, NEVER);
                const int64_t strip = first / STRIP, begin = rules.low[strip] / PANEL * PANEL, end = rules.high[strip];
                for (int64_t s = begin; s < end; s += KEYS) {
                    const int64_t n = std::min(rounded(end - s, EACH_UNIT * LANES), KEYS);
                    product<P>(STRIP, n, units, q, units, k + s * units, units * PANEL, scores, KEYS, false);
                    for (int64_t r = 0; r < STRIP; r++) {
                        if (!PLAIN && a.dropout) rules.kept(head, first + r, s, n, kept);
                        const float before =
                            std::exchange(top[r], softmax<PLAIN>(rules, first + r, s, n, scores + r * KEYS, kept,
                                                                 weights + r * KEYS / EACH_UNIT, top[r], total[r]));
                        if (s == begin || before == top[r]) continue;
                        for (int64_t i = 0; i < width; i += LANES)
                            store(out + r * width + i, load(out + r * width + i) * shrinking(before, top[r]));
                    }
                    product<P>(STRIP, width, n / EACH_UNIT, weights, KEYS / EACH_UNIT, v + s / EACH_UNIT * PANEL,
                               value_panel, out, width, s > begin);
                }
                if (begin >= end) std::fill(out, out + STRIP * width, 0.0f);
                for (int64_t r = 0; r < std::min(STRIP, a.n_queries - first); r++) {
                    const bool sees = total[r] != 0;
                    a.sums[(batch * a.heads + head) * a.n_queries + first + r] =
                        sees ? top[r] + std::log2(total[r]) : -NEVER;
                    put(out + r * width, sees ? 1 / total[r] : 0.0f, a.out.at<T>(batch, head, first + r), a.width);
                }
            }
    }

    static Lanes shrinking(float before, float now) { return power_of_two(all(before) - now); }

    // Writes the weights of a row, not yet divided by their sum, and adds them to `total`, which is first rescaled;
    // returns the row's largest score so far.
    template<bool PLAIN>
    INLINE float softmax(const Rules<T> &rules, int64_t q, int64_t s, int64_t n, float *scores, const float *kept,
                         Unit *weights, float before, float &total) const {
        Lanes most = all(before);
        for (int64_t i = 0; i < n; i += LANES) {
            const Lanes score = rules.template score<PLAIN>(load(scores + i), q, s + i);
            most = larger(most, score);
            store(scores + i, score);
        }
        float top = before, each[LANES];
        store(each, most);
        for (int i = 0; i < LANES; i++) top = std::max(top, each[i]);
        const float reference = top == NEVER ? 0 : top;
        Lanes sums = {};
        for (int64_t i = 0; i < n; i += 2 * LANES) {
            Lanes e[2] = {};
            for (int j = 0; j < 2 && i + j * LANES < n; j++) {
                e[j] = power_of_two(load(scores + i + j * LANES) - reference);
                sums += e[j];
                if (!PLAIN && a.dropout) e[j] = e[j] * load(kept + i + j * LANES);
            }
            put_weights<P>(weights, i, e[0], e[1]);
        }
        total = total * shrinking(before, reference)[0] + sum(sums);
        return top;
    }
};

// ------------------------------------------------------------------------------------------------------ backward

constexpr int64_t QUERIES = 64; // most queries at once; they see equally many keys of a panel

template<class P, class T> struct Backward {
    typedef typename P::Left Unit;
    static constexpr int64_t EACH_UNIT = P::ELEMENTS;
    const Attention &a;

    struct Block { // values of up to QUERIES × PANEL pairs
        float *scores, *d_weights, *kept;
        Unit *weights, *d_scores, *d_scores_in_rows; // two in units along the queries, the last along the keys
    };

    void run(int64_t batch, int64_t group) const {
        const Rules<T> rules(a, batch);
        const int64_t width = rounded(a.width, LANES), panels = rounded(width, PANEL), units = width / EACH_UNIT;
        const int64_t keys = rounded(a.n_keys, PANEL), n = rounded(a.n_queries, EACH_UNIT * LANES);
        const int64_t n_units = n / EACH_UNIT + LANES; // not a power of two, so that rows do not share cache sets
        Room room(4 * (keys * (2 * units + panels + 2 * width) + n * (2 * units + width + 2) + 2 * n_units * width +
                       (LANES + 4) * width + 6 * QUERIES * PANEL) +
                  2048);
        Unit *k = room.take<Unit>(keys * units), *v = room.take<Unit>(keys * units);
        Unit *k_along = room.take<Unit>(keys * panels / EACH_UNIT), *lines = room.take<Unit>((LANES + 4) * width);
        Unit *q = room.take<Unit>(n * units), *d_out = room.take<Unit>(n * units);
        Unit *q_turned = room.take<Unit>(n_units * width), *d_out_turned = room.take<Unit>(n_units * width);
        float *d_k = room.take<float>(keys * width), *d_v = room.take<float>(keys * width); // panels [width][64]
        float *d_q = room.take<float>(n * width), *sums = room.take<float>(n), *delta = room.take<float>(n);
        const int64_t size = QUERIES * PANEL;
        Block block;
        block.scores = room.take<float>(size), block.d_weights = room.take<float>(size);
        block.kept = room.take<float>(2 * PANEL);
        block.weights = room.take<Unit>(size / EACH_UNIT), block.d_scores = room.take<Unit>(size / EACH_UNIT);
        block.d_scores_in_rows = EACH_UNIT == 1 ? block.d_scores : room.take<Unit>(size / EACH_UNIT);
        const Source<P, T> key{a.k, batch, group, a.n_keys, a.width, width};
        key.across(keys, k, lines);
        key.along(keys, k_along, lines);
        Source<P, T>{a.v, batch, group, a.n_keys, a.width, width}.across(keys, v, lines);
        std::fill(d_k, d_k + keys * width, 0.0f);
        std::fill(d_v, d_v + keys * width, 0.0f);
        const int64_t shared = a.heads / a.groups;
        for (int64_t head = group * shared; head < (group + 1) * shared; head++) {
            const Source<P, T> query{a.q, batch, head, a.n_queries, a.width, width};
            const Source<P, T> gradient{a.d_out, batch, head, a.n_queries, a.width, width};
            query.in_rows(n, q), query.turned(n, q_turned, n_units, lines);
            gradient.in_rows(n, d_out), gradient.turned(n, d_out_turned, n_units, lines);
            std::fill(d_q, d_q + n * width, 0.0f);
            prepare(batch, head, n, sums, delta);
            for (int64_t s = 0; s < keys; s += PANEL)
                for (int64_t first = 0, rows; first < a.n_queries; first += rows) {
                    rows = STRIP;
                    const int64_t columns = columns_seen(rules, first, s);
                    if (!columns) continue;
                    while (rows < QUERIES && first + rows < a.n_queries &&
                           columns_seen(rules, first + rows, s) == columns)
                        rows += STRIP;
                    product<P>(rows, columns, units, q + first * units, units, k + s * units, 0, block.scores, PANEL,
                               false);
                    product<P>(rows, columns, units, d_out + first * units, units, v + s * units, 0, block.d_weights,
                               PANEL, false);
                    rules.plain() ? differentiate<true>(rules, head, first, rows, s, columns, sums, delta, block)
                                  : differentiate<false>(rules, head, first, rows, s, columns, sums, delta, block);
                    float *d_values = d_v + s * width, *d_keys = d_k + s * width;
                    product<P>(width, columns, rows / EACH_UNIT, d_out_turned + first / EACH_UNIT, n_units,
                               block.weights, 0, d_values, PANEL, true);
                    product<P>(width, columns, rows / EACH_UNIT, q_turned + first / EACH_UNIT, n_units, block.d_scores,
                               0, d_keys, PANEL, true);
                    product<P>(rows, width, columns / EACH_UNIT, block.d_scores_in_rows, PANEL / EACH_UNIT,
                               k_along + s / EACH_UNIT * PANEL, keys / EACH_UNIT * PANEL, d_q + first * width, width,
                               true);
                }
            for (int64_t r = 0; r < a.n_queries; r++)
                put(d_q + r * width, a.scale, a.d_q.at<T>(batch, head, r), a.width);
        }
        write(d_k, a.scale, a.d_k, batch, group, width, (float *)lines);
        write(d_v, 1, a.d_v, batch, group, width, (float *)lines);
    }

    // Number of columns, rounded up to a multiple of 16, that the strip of queries at `first` sees of the panel at key
    // s.
    static int64_t columns_seen(const Rules<T> &rules, int64_t first, int64_t s) {
        const int64_t strip = first / STRIP, end = std::min(rules.high[strip], s + PANEL);
        return rules.low[strip] < end && s < end ? rounded(end - s, LANES) : 0;
    }

    // Writes, for each query, log2 Σ 2^score as the forward pass stored it, and Σ d_out · out.
    void prepare(int64_t batch, int64_t head, int64_t n, float *sums, float *delta) const {
        for (int64_t r = 0; r < n; r++) {
            sums[r] = -NEVER, delta[r] = 0;
            if (r >= a.n_queries) continue;
            sums[r] = a.sums[(batch * a.heads + head) * a.n_queries + r];
            const T *out = a.out.at<T>(batch, head, r), *gradient = a.d_out.at<T>(batch, head, r);
            Lanes total = {};
            int64_t i = 0;
            for (; i + LANES <= a.width; i += LANES) total += load(out + i) * load(gradient + i);
            float rest = 0;
            for (; i < a.width; i++) rest += (float)out[i] * (float)gradient[i];
            delta[r] = sum(total) + rest;
        }
    }

    // Computes the weights, and the gradients of the scores, of a block's rows.
    template<bool PLAIN>
    [[gnu::noinline]] void differentiate(const Rules<T> &rules, int64_t head, int64_t first, int64_t rows, int64_t s,
                                         int64_t columns, const float *sums, const float *delta,
                                         const Block &block) const {
        for (int64_t r = 0; r < rows; r += EACH_UNIT)
            differentiate_unit<PLAIN>(rules, head, first, r, s, columns, sums, delta, block);
    }

    // Does the same for one unit of queries, from row r of the block on.
    template<bool PLAIN>
    INLINE void differentiate_unit(const Rules<T> &rules, int64_t head, int64_t first, int64_t r, int64_t s,
                                   int64_t columns, const float *sums, const float *delta, const Block &block) const {
        if (!PLAIN && a.dropout)
            for (int64_t j = 0; j < EACH_UNIT; j++) rules.kept(head, first + r + j, s, columns, block.kept + j * PANEL);
        for (int64_t i = 0; i < columns; i += LANES) {
            Lanes weight[EACH_UNIT], gradient[EACH_UNIT];
            repeat<EACH_UNIT>([&](auto j) EACH {
                const int64_t row = first + r + j, at = (r + j) * PANEL + i;
                Lanes tangent = {}, arrives = load(block.d_weights + at);
                const Lanes score = rules.template score<PLAIN>(load(block.scores + at), row, s + i, &tangent);
                const Lanes own = power_of_two(score - sums[row]);
                weight[j] = own;
                if (!PLAIN && a.dropout) {
                    const Lanes kept = load(block.kept + j * PANEL + i);
                    weight[j] = own * kept;
                    arrives = arrives * kept;
                }
                gradient[j] = own * (arrives - delta[row]);
                if (!PLAIN && a.softcap) gradient[j] = gradient[j] * (1.0f - tangent * tangent);
            });
            const int64_t at = r / EACH_UNIT * PANEL + i;
#ifdef BF16_PRODUCTS
            if constexpr (EACH_UNIT == 2) {
                const auto both = [](const Lanes *x)
                                      EACH { return (__m512i)_mm512_cvtne2ps_pbh((__m512)x[1], (__m512)x[0]); };
                const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23,
                                                       7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
                const __m512i d_scores = both(gradient);
                _mm512_storeu_si512(block.weights + at, _mm512_permutexvar_epi16(order, both(weight)));
                _mm512_storeu_si512(block.d_scores + at, _mm512_permutexvar_epi16(order, d_scores));
                uint16_t *rows = (uint16_t *)block.d_scores_in_rows + r * PANEL + i;
                _mm256_storeu_si256((__m256i *)rows, _mm512_castsi512_si256(d_scores));
                _mm256_storeu_si256((__m256i *)(rows + PANEL), _mm512_extracti64x4_epi64(d_scores, 1));
                continue;
            }
#endif
            store((float *)block.weights + at, weight[0]);
            store((float *)block.d_scores + at, gradient[0]);
        }
    }

    // Writes panels [width][64], times a factor, as rows.
    void write(const float *from, float factor, const View &to, int64_t batch, int64_t group, int64_t width,
               float *lines) const {
        for (int64_t s = 0; s < a.n_keys; s += LANES) {
            const float *panel = from + s / PANEL * PANEL * width + s % PANEL;
            for (int64_t i = 0; i < width; i += LANES) transpose(panel + i * PANEL, PANEL, lines + i, width);
            for (int64_t r = 0; r < std::min(LANES, a.n_keys - s); r++)
                put(lines + r * width, factor, to.at<T>(batch, group, s + r), a.width);
        }
    }
};

template<template<class, class> class Pass> void run(const Attention &a, int64_t n_threads) {
    std::atomic<int64_t> next{0};
    parallel(std::max<int64_t>(1, std::min(n_threads, a.batch * a.groups)), [&](const Team &) {
#ifdef AMX
        const amx::Registers registers;
#endif
        for (int64_t i; (i = next++) < a.batch * a.groups;) {
            const int64_t batch = i / a.groups, group = i % a.groups;
            if (!a.is_bf16)
                Pass<Wide, float>{a}.run(batch, group);
            else
                Pass<Narrow, BFloat>{a}.run(batch, group);
        }
    });
}

} // namespace

static View view(const char *name, const Tensor *x, int64_t kind, std::initializer_list<int64_t> sizes) {
    contiguous(name, shaped(name, x, kind, sizes), 3);
    const int64_t each = bytes_of(kind);
    return {x->data, x->strides[0] * each, x->strides[1] * each, x->strides[2] * each};
}

static View output(const char *name, const Tensor *x, int64_t kind, std::initializer_list<int64_t> sizes) {
    const View found = view(name, x, kind, sizes);
    apart(name, *x);
    return found;
}

// q, out [B, H, T, D], k, v [B, G, S, D], bias [B, 1, T, S] or null, all float32 or bf16; sums float32 [B, H, T], seed
// int64 [1]. A query sees its own key, which has the same distance from the end, and the window − 1 keys before it.
// softcap 0: none.
static Attention attention_of(const Tensor *q, const Tensor *k, const Tensor *v, const Tensor *out, const Tensor *bias,
                              const Tensor *sums, const Tensor *seed, int64_t window, float scale, float softcap,
                              float dropout) {
    if (sound("q", q).n_dimensions != 4 || sound("k", k).n_dimensions != 4)
        fail(REFUSED, "q %s and k %s must be [batch, heads, length, width]", Text::of(*q).text, Text::of(*k).text);
    if (q->kind != FP32 && q->kind != BF16) fail(REFUSED, "q is %s and must be float32 or bfloat16", KINDS[q->kind]);
    const int64_t batch = q->sizes[0], heads = q->sizes[1], n_queries = q->sizes[2], width = q->sizes[3];
    const int64_t groups = k->sizes[1], n_keys = k->sizes[2];
    if (width < 1 || groups < 1 || heads % groups || n_queries > n_keys)
        fail(REFUSED, "q %s does not go with k %s", Text::of(*q).text, Text::of(*k).text);
    Attention a;
    a.batch = batch, a.heads = heads, a.groups = groups, a.n_queries = n_queries, a.n_keys = n_keys, a.width = width;
    a.window = within("window", window, 1, MOST), a.is_bf16 = q->kind == BF16;
    if (!(dropout >= 0 && dropout < 1))
        fail(REFUSED, "dropout is %g and must be from 0 to less than 1", (double)dropout);
    if (!(softcap >= 0)) fail(REFUSED, "softcap is %g and must be 0, which is none, or more", (double)softcap);
    a.scale = scale, a.softcap = softcap, a.dropout = dropout;
    a.seed = laid_out("seed", seed, INT64, {1}).as<const uint64_t>();
    a.q = view("q", q, q->kind, {batch, heads, n_queries, width});
    a.k = view("k", k, q->kind, {batch, groups, n_keys, width});
    a.v = view("v", v, q->kind, {batch, groups, n_keys, width});
    a.out = output("out", out, q->kind, {batch, heads, n_queries, width});
    if (bias) a.bias = view("bias", bias, q->kind, {batch, 1, n_queries, n_keys});
    a.sums = laid_out("sums", sums, FP32, {batch, heads, n_queries}).as<float>();
    return a;
}

extern "C" int gptworks_attention(const Tensor *q, const Tensor *k, const Tensor *v, const Tensor *out,
                                  const Tensor *bias, const Tensor *sums, const Tensor *seed, int64_t window,
                                  float scale, float softcap, float dropout, int64_t n_threads) noexcept {
    return guarded([=] {
        run<Forward>(attention_of(q, k, v, out, bias, sums, seed, window, scale, softcap, dropout), threads(n_threads));
    });
}

// d_out, d_q, d_k and d_v are the gradients of out, q, k and v, with the same shapes and dtype.
extern "C" int gptworks_attention_backward(const Tensor *q, const Tensor *k, const Tensor *v, const Tensor *out,
                                           const Tensor *bias, const Tensor *sums, const Tensor *seed,
                                           const Tensor *d_out, const Tensor *d_q, const Tensor *d_k, const Tensor *d_v,
                                           int64_t window, float scale, float softcap, float dropout,
                                           int64_t n_threads) noexcept {
    return guarded([=] {
        Attention a = attention_of(q, k, v, out, bias, sums, seed, window, scale, softcap, dropout);
        a.d_out = view("d_out", d_out, q->kind, {a.batch, a.heads, a.n_queries, a.width});
        a.d_q = output("d_q", d_q, q->kind, {a.batch, a.heads, a.n_queries, a.width});
        a.d_k = output("d_k", d_k, q->kind, {a.batch, a.groups, a.n_keys, a.width});
        a.d_v = output("d_v", d_v, q->kind, {a.batch, a.groups, a.n_keys, a.width});
        run<Backward>(a, threads(n_threads));
    });
}
