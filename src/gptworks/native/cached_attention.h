// Attention of new tokens over the keys and values that are kept: in float32, in bf16, or in int8 with a scale a vector.
//
// A query's result never depends on the queries that are computed with it: it has a row of scores of its own, weighted values
// are added in the order of their positions, and a key that it does not see is not multiplied, for it may be no number.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "lanes.h"

namespace {

constexpr int64_t QUERIES = MANY_REGISTERS ? 4 : 1;  // that read keys and values together: by vectors,
constexpr int64_t MOST_QUERIES = 32;                 // or by tiles
constexpr int64_t AT_ONCE = 4;                       // keys that are multiplied together
constexpr int64_t PAIRS = 2 * LANES;                 // elements, or keys, of a row of a tile

// Asks memory for n vectors of keys or values; none where there is nothing to ask for.
template <class Cache> INLINE void fetch(const Cache *at, int64_t n, int64_t width) {
    if (!at) return;
    for (int64_t i = 0; i < n * width * (int64_t)sizeof(Cache); i += 64) __builtin_prefetch((const char *)at + i, 0, 2);
}

// A query of one head, the first and the last + 1 key that it sees, and where its output goes.
struct Query {
    float *q, *out;
    int64_t from, to;
};

// Σ weight[s] · values[s] over the keys that each of N queries sees, WIDE vectors from element i on; scores begin at key
// `first`. A key that a query does not see is not multiplied: it may be no number, and 0 times that is none either.
template <int N, int WIDE, class Cache>
void weigh(const Query *queries, const Lanes *factor, const float *scores, int64_t room, const Cache *values,
           int64_t first, int64_t width, int64_t i, const Cache *next) {
    Lanes total[N][WIDE] = {};
    const auto add = [&](int64_t from, int64_t to, const auto &sees) EACH {
        for (int64_t s = from; s < to; s++) {
            fetch(next ? next + s * width : next, 1, width);
            repeat<WIDE>([&](auto v) EACH {
                const Lanes value = load(values + s * width + i + v * LANES);
                repeat<N>([&](auto r) EACH {
                    if (sees(queries[r], s)) total[r][v] += scores[r * room + s - first] * value;
                });
            });
        }
    };
    const auto all_see = [](const Query &, int64_t) EACH { return true; };
    const int64_t from = queries[0].from, to = queries[N - 1].to;
    if constexpr (N == 1) {
        add(from, to, all_see);
    } else {
        const auto sees = [](const Query &query, int64_t s) EACH { return s >= query.from && s < query.to; };
        const int64_t all_from = queries[N - 1].from, all_to = std::max(queries[0].to, all_from);
        add(from, all_from, sees);
        add(all_from, all_to, all_see);
        add(all_to, to, sees);
    }
    repeat<N>([&](auto r) EACH {
        repeat<WIDE>([&](auto v) EACH { store(queries[r].out + i + v * LANES, total[r][v] * factor[r]); });
    });
}

// Four keys times N queries: lanes that are yet to be added up.
template <int N, class Cache>
INLINE void score(const Query *queries, const Cache *const (&key)[AT_ONCE], int64_t width, Lanes (&total)[N][AT_ONCE]) {
    for (int64_t i = 0; i < width; i += LANES) {
        Lanes q[N];
        repeat<N>([&](auto r) EACH { q[r] = load(queries[r].q + i); });
        repeat<AT_ONCE>([&](auto j) EACH {
            const Lanes elements = load(key[j] + i);
            repeat<N>([&](auto r) EACH { total[r][j] += q[r] * elements; });
        });
    }
}

#ifdef BF16_PRODUCTS
// A cache in bf16 is multiplied as it is, two numbers at once, by queries and weights that are rounded to bf16 as well.
INLINE Lanes add_pairs(Lanes sum, __m512i a, __m512i b) {
    return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

template <int N>
INLINE void score(const Query *queries, const BFloat *const (&key)[AT_ONCE], int64_t width, Lanes (&total)[N][AT_ONCE]) {
    const auto add = [&](int64_t i, const auto &load_pairs) EACH {
        __m512i q[N];
        repeat<N>([&](auto r) EACH { q[r] = load_pairs((const BFloat *)queries[r].q + i); });
        repeat<AT_ONCE>([&](auto j) EACH {
            const __m512i elements = load_pairs(key[j] + i);
            repeat<N>([&](auto r) EACH { total[r][j] = add_pairs(total[r][j], elements, q[r]); });
        });
    };
    int64_t i = 0;
    for (; i + 2 * LANES <= width; i += 2 * LANES) add(i, [](const BFloat *p) EACH { return _mm512_loadu_si512(p); });
    if (i < width) add(i, [](const BFloat *p) EACH { return _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *)p)); });
}

// 32 elements, of which one vector has each first four of eight and the other one the others.
INLINE void put_in_order(Lanes first, Lanes others, float *out) {
    const __m512i lower = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i upper = _mm512_add_epi32(lower, _mm512_set1_epi32(8));
    store(out, (Lanes)_mm512_permutex2var_ps((__m512)first, lower, (__m512)others));
    store(out + LANES, (Lanes)_mm512_permutex2var_ps((__m512)first, upper, (__m512)others));
}

// Values are taken in pairs of positions, the first one even. Of four vectors, each two come in another order.
template <int N, int WIDE>
void weigh(const Query *queries, const Lanes *factor, const float *scores, int64_t room, const BFloat *values,
           int64_t first, int64_t width, int64_t i, const BFloat *next) {
    static_assert(WIDE == 4 || WIDE == 1);
    Lanes total[N][WIDE] = {};
    const auto pair_up = [&](int64_t one, int64_t two, __m512i (&pairs)[WIDE]) EACH {
        const BFloat *a = values + one * width + i, *b = values + two * width + i;
        if constexpr (WIDE == 4) {
            repeat<2>([&](auto half) EACH {
                const __m512i of_a = _mm512_loadu_si512(a + 2 * LANES * half), of_b = _mm512_loadu_si512(b + 2 * LANES * half);
                pairs[2 * half] = _mm512_unpacklo_epi16(of_a, of_b);
                pairs[2 * half + 1] = _mm512_unpackhi_epi16(of_a, of_b);
            });
        } else {
            const auto wide = [](const BFloat *p) EACH { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); };
            pairs[0] = _mm512_or_si512(wide(a), _mm512_slli_epi32(wide(b), 16));
        }
    };
    const auto weights = [&](int64_t r, int64_t s) EACH {
        int32_t both;
        std::memcpy(&both, (const BFloat *)(scores + r * room) + s - first, sizeof both);
        return _mm512_set1_epi32(both);
    };
    const int64_t all_from = (queries[N - 1].from + 1) / 2 * 2, all_to = std::max(queries[0].to / 2 * 2, all_from);
    const auto alone = [&](auto r, int64_t from, int64_t to) EACH {  // pairs of which this query may see one, or none
        for (int64_t s = from; s < to; s += 2) {
            const bool one = s >= queries[r].from && s < queries[r].to;
            const bool two = s + 1 >= queries[r].from && s + 1 < queries[r].to;
            if (!one && !two) continue;
            const __m512i seen = _mm512_set1_epi32((one ? 0xffff : 0) | (two ? 0xffff0000 : 0));
            __m512i pairs[WIDE];
            pair_up(s, two ? s + 1 : s, pairs);
            repeat<WIDE>([&](auto v) EACH { total[r][v] = add_pairs(total[r][v], pairs[v] & seen, weights(r, s)); });
        }
    };
    repeat<N>([&](auto r) EACH { alone(r, queries[r].from / 2 * 2, all_from); });
    for (int64_t s = all_from; s < all_to; s += 2) {
        fetch(next ? next + s * width : next, 2, width);
        __m512i pairs[WIDE];
        pair_up(s, s + 1, pairs);
        repeat<N>([&](auto r) EACH {
            const __m512i both = weights(r, s);
            repeat<WIDE>([&](auto v) EACH { total[r][v] = add_pairs(total[r][v], pairs[v], both); });
        });
    }
    repeat<N>([&](auto r) EACH {
        alone(r, all_to, queries[r].to);
        float *out = queries[r].out + i;
        if constexpr (WIDE == 4) {
            repeat<2>([&](auto half) EACH {
                put_in_order(total[r][2 * half] * factor[r], total[r][2 * half + 1] * factor[r], out + 2 * LANES * half);
            });
        } else {
            store(out, total[r][0] * factor[r]);
        }
    });
}
template <class Cache> constexpr bool ROUNDED = std::is_same_v<Cache, BFloat>;
#else
template <class Cache> constexpr bool ROUNDED = false;
#endif

// What is kept of a key/value head of one text.
template <class Cache> struct HeadCache {
    static constexpr bool SCALED = std::is_same_v<Cache, int8_t>;  // a value is = integer · scale of its vector
    int64_t width;                                         // d_head
    Cache *keys, *values;                                  // [capacity, width]
    float *key_scales = nullptr, *value_scales = nullptr;  // [capacity]

    void keep(int64_t position, const float *key, const float *value) const {
        keep(key, keys + position * width, key_scales + (SCALED ? position : 0));
        keep(value, values + position * width, value_scales + (SCALED ? position : 0));
    }

    void keep(const float *from, Cache *to, float *scale) const {
        if constexpr (SCALED) {
            float largest = 0;
            bool finite = true;
            for (int64_t i = 0; i < width; i++) {
                largest = std::max(largest, std::abs(from[i]));
                finite &= std::isfinite(from[i]);
            }
            *scale = finite ? largest / 127 : NAN;  // so that all values of the vector are none
            for (int64_t i = 0; i < width; i++)
                to[i] = finite && largest ? (Cache)std::lrint(from[i] / *scale) : (Cache)!finite;
        } else {
            for (int64_t i = 0; i < width; i += LANES) store(to + i, load(from + i));
        }
    }
};

// Of the scores of keys [from, end) makes weights; what their sums are still to be multiplied by. Weights of a cache in bf16
// are rounded to bf16, in the first half of the row.
template <class Cache>
Lanes softmax(const Query &query, const HeadCache<Cache> &cache, float *scores, int64_t from, int64_t end) {
    std::fill(scores, scores + query.from - from, -INFINITY);
    std::fill(scores + query.to - from, scores + end - from, -INFINITY);
    Lanes top = load(scores), total = {};
    for (int64_t s = LANES; s < end - from; s += LANES) top = larger(top, load(scores + s));
    float largest = -INFINITY;
    for (int i = 0; i < LANES; i++) largest = std::max(largest, top[i]);
    for (int64_t s = 0; s < end - from; s += LANES) {
        const Lanes score = load(scores + s), e = choose(score == -INFINITY, Lanes{}, exponential(score - largest));
        total += e;
        if constexpr (HeadCache<Cache>::SCALED)
            store(scores + s, e * load(cache.value_scales + from + s));
        else if constexpr (ROUNDED<Cache>)
            store((BFloat *)scores + s, e);
        else
            store(scores + s, e);
    }
    return all(1 / sum(total));
}

// N queries by vectors. scores: [N, room].
template <int N, class Cache>
void attend_by_vectors(const Query *queries, float scale, const HeadCache<Cache> &cache, float *scores, int64_t room,
            const Cache *next) {
    const int64_t width = cache.width, to = queries[N - 1].to;
    const int64_t from = queries[0].from / LANES * LANES;  // so that a key's lane follows from its position alone
    const int64_t end = from + (to - from + LANES - 1) / LANES * LANES;
    if constexpr (ROUNDED<Cache>)
        for (int r = 0; r < N; r++)
            for (int64_t i = 0; i < width; i += LANES) store((BFloat *)queries[r].q + i, load(queries[r].q + i));
    for (int64_t s = from; s < end; s += AT_ONCE) {
        Lanes total[N][AT_ONCE] = {};
        const Cache *key[AT_ONCE];
        repeat<AT_ONCE>([&](auto j) EACH { key[j] = cache.keys + std::min(s + j, to - 1) * width; });
        fetch(next ? cache.values + s * width : next, AT_ONCE, width);
        score<N>(queries, key, width, total);
        repeat<N>([&](auto r) EACH {
            Quad four = sums(total[r]) * scale, of_keys;
            if constexpr (HeadCache<Cache>::SCALED) {
                std::memcpy(&of_keys, cache.key_scales + s, sizeof of_keys);
                four *= of_keys;
            }
            std::memcpy(scores + r * room + s - from, &four, sizeof four);
        });
    }
    Lanes factor[N];
    for (int r = 0; r < N; r++) factor[r] = softmax(queries[r], cache, scores + r * room, from, end);
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES, next = nullptr)
        weigh<N, 4>(queries, factor, scores, room, cache.values, from, width, i, next);
    for (; i < width; i += LANES, next = nullptr)
        weigh<N, 1>(queries, factor, scores, room, cache.values, from, width, i, next);
}

#ifdef AMX
// By tiles. Scores are keys times queries, because keys lie in memory as a left factor has to; they are turned into rows of the
// queries. Their weights are the left factor of the values, which are laid out in pairs of positions.

constexpr int64_t FEW_QUERIES = 4;       // that are picked out of a tile one by one
constexpr int64_t VALUES_AT_ONCE = 512;  // positions that are laid out together

struct alignas(64) Tile {
    float at[LANES][LANES];
};

struct TileRoom {
    std::vector<uint32_t> rows;  // of 16 queries, in bf16
    std::vector<Tile> queries;   // of each 16 queries [width / 32], in words of two elements
    std::vector<BFloat> keys;    // the last ones, and zeros behind them: [32, width]
    std::vector<Tile> values;    // [positions / 32][2], see pair_up
    Tile sums[4];

    void reserve(int64_t width) {
        if (!rows.empty()) return;
        rows.resize(LANES * width / 2);
        queries.resize(2 * width / PAIRS);
        keys.resize(PAIRS * width);
        values.resize(2 * VALUES_AT_ONCE / PAIRS);
    }
};

// 32 elements of the values of positions [first, end) as words of two positions: of each 32 positions two tiles, one with
// each first four of eight elements and one with the others. What is not in [from, to) counts as 0. Whether all are numbers.
inline bool pair_up(const BFloat *values, int64_t width, int64_t first, int64_t end, int64_t from, int64_t to, Tile *out,
                    const BFloat *next) {
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 not_numbers = 0;
    const auto value = [&](int64_t s) EACH {
        if (s < from || s >= to) return _mm512_setzero_si512();
        const __m512i x = _mm512_loadu_si512(values + s * width);
        not_numbers |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
        return x;
    };
    for (int64_t s = first; s < end; s += 2) {
        fetch(next ? next + s * width : next, 2, width);
        const __m512i a = value(s), b = value(s + 1);
        Tile *const two = out + (s - first) / PAIRS * 2;
        const int64_t row = (s - first) % PAIRS / 2;
        _mm512_store_si512(two[0].at[row], _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(two[1].at[row], _mm512_unpackhi_epi16(a, b));
    }
    return !not_numbers;
}

// n queries over the keys [from, end).
struct OnTiles {
    const HeadCache<BFloat> &cache;
    TileRoom &room;
    int64_t from, end;
    char *sums[4] = {(char *)&room.sums[0], (char *)&room.sums[1], (char *)&room.sums[2], (char *)&room.sums[3]};

    void lay_out(const Query *queries, int64_t n) const {
        const int64_t words = cache.width / 2;
        for (int64_t first = 0; first < n; first += LANES) {
            std::fill(room.rows.begin(), room.rows.end(), 0);
            for (int64_t r = 0; r < std::min(LANES, n - first); r++)
                for (int64_t i = 0; i < cache.width; i += LANES)
                    store((BFloat *)&room.rows[r * words] + i, load(queries[first + r].q + i));
            Tile *to = &room.queries[first / LANES * (words / LANES)];
            for (int64_t i = 0; i < words; i += LANES, to++) turn(&room.rows[i], words, (uint32_t *)to, LANES);
        }
    }

    // Products of queries and keys, times `scale`. scores: [n, stride].
    void score(int64_t n, int64_t to, float scale, float *scores, int64_t stride, const BFloat *next) const {
        const int64_t width = cache.width, wide = (n + LANES - 1) / LANES;
        const char *const right[] = {(char *)&room.queries[0], (char *)(&room.queries[0] + width / PAIRS)};
        for (int64_t s = from; s < end; s += PAIRS) {
            const BFloat *keys = cache.keys + s * width;
            if (s + PAIRS > to) {
                std::fill(std::copy(keys, keys + (to - s) * width, room.keys.begin()), room.keys.end(), BFloat());
                keys = room.keys.data();
            }
            fetch(next ? cache.values + s * width : next, std::min(PAIRS, to - s), width);
            const char *const left[] = {(const char *)keys, (const char *)(keys + amx::SIDE * width)};
            amx::product<false>(2, wide, left, 2 * width, right, amx::ROW, amx::TILE, width / PAIRS, sums, amx::ROW,
                           false, nullptr);
            for (int64_t tile = 0; tile < 2 * wide; tile++) {
                const int64_t first = tile % wide * LANES, some = std::min(LANES, n - first);
                const Tile &sum = room.sums[tile];
                float *to = scores + first * stride + s - from + tile / wide * LANES;
                if (some <= FEW_QUERIES) {
                    for (int64_t r = 0; r < some; r++)
                        for (int64_t key = 0; key < LANES; key++) to[r * stride + key] = sum.at[key][r] * scale;
                } else {
                    Tile turned;
                    turn(sum.at[0], LANES, turned.at[0], LANES);
                    for (int64_t r = 0; r < some; r++) store(to + r * stride, load(turned.at[r]) * scale);
                }
            }
        }
    }

    // Σ weight · value over the keys [first, last); weights: [n, stride] floats, in bf16 in the first half of each row.
    // False: not computed, because some values are no numbers, and a query may not see them.
    bool weigh(const Query *queries, int64_t n, const Lanes *factor, const float *weights, int64_t stride, int64_t first,
               int64_t last, const BFloat *next) const {
        const int64_t tall = (n + LANES - 1) / LANES;
        const char *const right[] = {(char *)&room.values[0], (char *)&room.values[1]};
        for (int64_t i = 0; i < cache.width; i += PAIRS, next = nullptr) {
            for (int64_t s = from, many; s < end; s += many) {
                many = std::min(VALUES_AT_ONCE, end - s);
                const bool numbers = pair_up(cache.values + i, cache.width, s, s + many, first, last, room.values.data(), next);
                if (!numbers && n > 1) return false;
                const BFloat *const of_first = (const BFloat *)weights + s - from;
                const char *const left[] = {(const char *)of_first, (const char *)(of_first + 2 * amx::SIDE * stride)};
                amx::product<false>(tall, 2, left, n > 1 ? 4 * stride : 0, right, amx::ROW,
                               2 * amx::TILE, many / PAIRS, sums, amx::ROW, s > from, nullptr);
            }
            for (int64_t r = 0; r < n; r++) {
                const Tile *two = &room.sums[r / LANES * 2];
                put_in_order(load(two[0].at[r % LANES]) * factor[r], load(two[1].at[r % LANES]) * factor[r],
                             queries[r].out + i);
            }
        }
        return true;
    }
};
#endif

// What a thread computes attention in, over keys of up to so many positions.
struct AttentionRoom {
    int64_t n_scores;  // of a query
    Buffer scores;
#ifdef AMX
    TileRoom tiles;
#endif

    explicit AttentionRoom(int64_t n_positions)
        : n_scores(((n_positions / LANES + 3) | 1) * LANES) {}  // odd: rows do not share cache sets

    float *rows(int64_t n) {
        if ((int64_t)scores.size() < n * n_scores / LANES) scores.resize(n * n_scores / LANES);
        return (float *)scores.data();
    }
};

// How many queries are best computed together.
template <class Cache> int64_t queries_at_once([[maybe_unused]] int64_t width) {
#ifdef AMX
    if (std::is_same_v<Cache, BFloat> && amx::granted && width % PAIRS == 0) return MOST_QUERIES;
#endif
    return QUERIES;
}

#ifdef AMX
inline void attend_by_tiles(const Query *queries, int64_t n, float scale, const HeadCache<BFloat> &cache, AttentionRoom &room,
                            const BFloat *next) {
    const int64_t from = queries[0].from / PAIRS * PAIRS, to = queries[n - 1].to, stride = room.n_scores;
    room.tiles.reserve(cache.width);
    const OnTiles on_tiles{cache, room.tiles, from, from + (to - from + PAIRS - 1) / PAIRS * PAIRS};
    float *scores = room.rows(n == 1 ? 1 : (n + LANES - 1) / LANES * LANES);
    on_tiles.lay_out(queries, n);
    on_tiles.score(n, to, scale, scores, stride, next);
    Lanes factor[MOST_QUERIES];
    for (int64_t r = 0; r < n; r++) factor[r] = softmax(queries[r], cache, scores + r * stride, from, on_tiles.end);
    if (on_tiles.weigh(queries, n, factor, scores, stride, queries[0].from, to, next)) return;
    for (int64_t r = 0; r < n; r++)
        on_tiles.weigh(queries + r, 1, factor + r, scores + r * stride, stride, queries[r].from, queries[r].to, nullptr);
}
#endif

// Up to `queries_at_once` queries of one text, in the order of their positions, over the keys and values that are kept. next:
// keys that come after these; null: nothing is far.
template <class Cache>
void attend(const Query *queries, int64_t n, float scale, const HeadCache<Cache> &cache, AttentionRoom &room,
            const Cache *next) {
#ifdef AMX
    if constexpr (std::is_same_v<Cache, BFloat>)
        if (queries_at_once<Cache>(cache.width) == MOST_QUERIES) return attend_by_tiles(queries, n, scale, cache, room, next);
#endif
    float *scores = room.rows(n);
    switch (n) {
    case 1: return attend_by_vectors<1>(queries, scale, cache, scores, room.n_scores, next);
    case 2: return attend_by_vectors<2>(queries, scale, cache, scores, room.n_scores, next);
    case 3: return attend_by_vectors<3>(queries, scale, cache, scores, room.n_scores, next);
    default: return attend_by_vectors<4>(queries, scale, cache, scores, room.n_scores, next);
    }
}

}  // namespace
