// Attention of new tokens over the keys and values that are kept: in float32, in bf16, or in int8 with a scale a
// vector.
//
// Both its products have the keys or values as their right factor, in words of four bytes whose elements are summed
// over:
//
//     scores[query][key]  = Σ query[word] · keys[word][key]          a word: elements of a key beside each other
//     out[query][element] = Σ weight[word] · values[word][element]   a word: an element of values beside each other
//
// A query's result never depends on the queries that are computed with it: each has sums of its own, which are added in
// the order of words, and a value that it does not see is not multiplied, for it may be no number.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "lanes.h"

namespace {

constexpr int64_t BLOCK = LANES; // positions whose keys lie together
// Queries that read keys and values together: by vectors, and by tiles.
constexpr int64_t QUERIES = MANY_REGISTERS ? 8 : FEW_REGISTERS ? 2 : 4, MOST_QUERIES = 32;

// The lines of vectors [from, to) of keys or values; none where there are no vectors.
template<class Cache> Ahead lines_of(const Cache *vectors, int64_t from, int64_t to, int64_t width, int64_t at_once) {
    if (!vectors) return {};
    return {(const char *)(vectors + from * width), (const char *)(vectors + to * width), at_once};
}

// A query of one head, the first and the last + 1 key that it sees, and where its output goes.
struct Query {
    float *q, *out;
    int64_t from, to;
};

// ------------------------------------------------------------------------------------------------ what is kept

// A key/value head of one text, in blocks of 16 positions. Keys: of a block the first words of its 16 keys, then the
// second ones, and so on. Values: for each element a word of as many positions as it has numbers.
template<class Cache> struct HeadCache {
    static constexpr bool SCALED = std::is_same_v<Cache, int8_t>; // a value is = integer · scale of its vector
    static constexpr int64_t OF_WORD = 4 / sizeof(Cache);
    int64_t width;                                        // d_head
    Cache *keys;                                          // [blocks, width / OF_WORD, 16, OF_WORD]
    Cache *values;                                        // [positions / OF_WORD, width, OF_WORD]
    float *key_scales = nullptr, *value_scales = nullptr; // [positions]

    // The words of a block's keys, and those of the values from a position on that is a multiple of OF_WORD.
    const uint32_t *keys_from(int64_t block) const { return (const uint32_t *)(keys + block * BLOCK * width); }
    const uint32_t *values_from(int64_t position) const { return (const uint32_t *)(values + position * width); }

    void keep(int64_t position, const float *key, const float *value) const {
        const auto [of_key, of_value] = std::pair(scale_of(key), scale_of(value));
        if (SCALED) key_scales[position] = of_key, value_scales[position] = of_value;
        Cache *to_key = keys + position / BLOCK * BLOCK * width + position % BLOCK * OF_WORD;
        Cache *to_value = values + position / OF_WORD * OF_WORD * width + position % OF_WORD;
        for (int64_t i = 0; i < width; i += LANES) {
            alignas(64) Cache sixteen[LANES];
            narrow(key + i, of_key, sixteen);
            for (int64_t word = 0; word < LANES / OF_WORD; word++)
                std::memcpy(to_key + (i / OF_WORD + word) * BLOCK * OF_WORD, sixteen + word * OF_WORD, 4);
            narrow(value + i, of_value, sixteen);
            for (int64_t n = 0; n < LANES; n++) to_value[(i + n) * OF_WORD] = sixteen[n];
        }
    }

    // What integers are to be multiplied by; no number if a number is none, so that all of the vector are.
    float scale_of(const float *x) const {
        if (!SCALED) return 1;
        float largest = 0;
        bool finite = true;
        for (int64_t i = 0; i < width; i++) {
            largest = std::max(largest, std::abs(x[i]));
            finite &= std::isfinite(x[i]);
        }
        return finite ? largest / 127 : NAN;
    }

    static void narrow(const float *from, float scale, Cache *to) {
        if constexpr (SCALED)
            for (int64_t n = 0; n < LANES; n++)
                to[n] = scale > 0 ? (Cache)std::lrint(from[n] / scale) : (Cache)std::isnan(scale);
        else
            store(to, load(from));
    }
};

#ifdef BF16_PRODUCTS
// A cache in bf16 is multiplied as it is, two numbers at once, by queries and weights that are rounded to bf16 as well.
template<class Cache> constexpr bool ROUNDED = std::is_same_v<Cache, BFloat>;
#else
template<class Cache> constexpr bool ROUNDED = false;
#endif

// ---------------------------------------------------------------------------------------------------- by vectors

template<class Cache, int E> INLINE Floats element(Words words) { // the E-th of each word
    if constexpr (sizeof(Cache) == 4)
        return (Floats)words;
    else if constexpr (sizeof(Cache) == 2)
        return (Floats)(E ? words & 0xffff0000 : words << 16);
    else
        return __builtin_convertvector((Ints)(words << (24 - 8 * E)) >> 24, Floats);
}

// Sums of N rows of the left factor and 16 · VECTORS columns of the right one.
template<int N, int VECTORS, class Cache> struct Sums {
    static constexpr int OF_WORD = HeadCache<Cache>::OF_WORD;
    typedef std::conditional_t<ROUNDED<Cache>, uint32_t, float> Left; // a word; or an element
    static constexpr int64_t LEFT_OF_WORD = ROUNDED<Cache> ? 1 : OF_WORD;
    Floats sum[N][VECTORS * PARTS] = {};

    // n words of each row. Those of the right factor lie `apart` words after one another, its vectors so many.
    INLINE void add(const Left *const (&left)[N], const uint32_t *right, int64_t n, int64_t apart,
                    int64_t vectors_apart, Ahead &ahead) {
        for (int64_t word = 0; word < n; word++, right += apart) {
            ahead.fetch();
#ifdef BF16_PRODUCTS
            if constexpr (ROUNDED<Cache>) {
                __m512i words[VECTORS];
                repeat<VECTORS>([&](auto v) EACH { words[v] = _mm512_loadu_si512(right + v * vectors_apart); });
                repeat<N>([&](auto r) EACH {
                    const __m512i all = _mm512_set1_epi32(left[r][word]);
                    repeat<VECTORS>([&](auto v) EACH { add_pairs(sum[r][v], words[v], all); });
                });
                continue;
            }
#endif
            repeat<OF_WORD>([&](auto e) EACH {
                repeat<VECTORS * PARTS>([&](auto part) EACH {
                    const Floats elements = part_of(right, vectors_apart, part, e);
                    repeat<N>([&](auto r) EACH { sum[r][part] += elements * (float)left[r][word * OF_WORD + e]; });
                });
            });
        }
    }

    // Of words [first, end) of the R-th row the elements in [from, to) alone.
    template<int R>
    INLINE void add_some(const Left *left, const uint32_t *right, int64_t first, int64_t end, int64_t apart,
                         int64_t from, int64_t to) {
        for (int64_t word = first; word < end; word++) {
            const auto sees = [&](int64_t e) EACH { return word * OF_WORD + e >= from && word * OF_WORD + e < to; };
#ifdef BF16_PRODUCTS
            if constexpr (ROUNDED<Cache>) {
                const __m512i seen = _mm512_set1_epi32((sees(0) ? 0xffff : 0) | (sees(1) ? 0xffff0000 : 0));
                if (!sees(0) && !sees(1)) continue;
                repeat<VECTORS>([&](auto v) EACH {
                    const __m512i words = _mm512_loadu_si512(right + word * apart + v * LANES);
                    add_pairs(sum[R][v], _mm512_and_si512(words, seen), _mm512_set1_epi32(left[word]));
                });
                continue;
            }
#endif
            repeat<OF_WORD>([&](auto e) EACH {
                if (!sees(e)) return;
                repeat<VECTORS * PARTS>([&](auto part) EACH {
                    sum[R][part] += part_of(right + word * apart, LANES, part, e) * (float)left[word * OF_WORD + e];
                });
            });
        }
    }

    INLINE Lanes at(int r, int v) const { return load((const float *)&sum[r][v * PARTS]); }

private:
    template<class Part, class E>
    static INLINE Floats part_of(const uint32_t *right, int64_t vectors_apart, Part part, E) {
        Words words;
        std::memcpy(&words, right + part / PARTS * vectors_apart + part % PARTS * (REGISTER / 4), sizeof words);
        return element<Cache, E::value>(words);
    }
#ifdef BF16_PRODUCTS
    static INLINE void add_pairs(Floats &sum, __m512i a, __m512i b) {
        sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
#endif
};

// Calls run(i, V) for V vectors of 16 columns from column i on, until all n columns are done. Sums of N rows and V
// vectors stay in registers.
template<int N, class F> INLINE void by_columns(int64_t n, const F &run) {
    constexpr int SUMS = REGISTERS / 2 / (N * PARTS), MOST = SUMS > 4 ? 4 : SUMS > 1 ? SUMS : 1;
    int64_t i = 0;
    for (; i + MOST * LANES <= n; i += MOST * LANES) run(i, std::integral_constant<int, MOST>{});
    if constexpr (MOST > 2)
        if (i + 2 * LANES <= n) run(i, std::integral_constant<int, 2>{}), i += 2 * LANES;
    if constexpr (MOST > 1)
        if (i < n) run(i, std::integral_constant<int, 1>{});
}

// Of products of a query with keys [from, end) makes weights; what their sums are still to be multiplied by. Weights of
// a cache in bf16 are rounded to bf16, in the first half of the row.
template<class Cache>
Lanes softmax(const Query &query, float scale, const HeadCache<Cache> &cache, float *scores, int64_t from,
              int64_t end) {
    std::fill(scores, scores + query.from - from, -INFINITY);
    std::fill(scores + query.to - from, scores + end - from, -INFINITY);
    const auto score = [&](int64_t s) EACH {
        const Lanes product = load(scores + s);
        if constexpr (HeadCache<Cache>::SCALED) // of keys that are not seen they may be anything
            return choose(product == -INFINITY, product, product * load(cache.key_scales + from + s) * scale);
        else
            return product * scale;
    };
    Lanes top = score(0), total = {};
    for (int64_t s = LANES; s < end - from; s += LANES) top = larger(top, score(s));
    float largest = -INFINITY;
    for (int i = 0; i < LANES; i++) largest = std::max(largest, top[i]);
    for (int64_t s = 0; s < end - from; s += LANES) {
        const Lanes x = score(s), e = choose(x == -INFINITY, Lanes{}, exponential(x - largest));
        total += e;
        if constexpr (HeadCache<Cache>::SCALED)
            store(scores + s, choose(x == -INFINITY, Lanes{}, e * load(cache.value_scales + from + s)));
        else if constexpr (ROUNDED<Cache>)
            store((BFloat *)scores + s, e);
        else
            store(scores + s, e);
    }
    return all(1 / sum(total));
}

// scores: [N, room]. next: keys that come after these, or null.
template<int N, class Cache>
void attend_by_vectors(const Query *queries, float scale, const HeadCache<Cache> &cache, float *scores, int64_t room,
                       const Cache *next) {
    constexpr int64_t OF_WORD = HeadCache<Cache>::OF_WORD;
    typedef typename Sums<N, 1, Cache>::Left Left;
    constexpr int64_t LEFT_OF_WORD = Sums<N, 1, Cache>::LEFT_OF_WORD;
    const int64_t width = cache.width, n_words = width / OF_WORD, to = queries[N - 1].to;
    const int64_t from = queries[0].from / BLOCK * BLOCK, end = (to + BLOCK - 1) / BLOCK * BLOCK;
    if constexpr (ROUNDED<Cache>)
        for (int r = 0; r < N; r++)
            for (int64_t i = 0; i < width; i += LANES) store((BFloat *)queries[r].q + i, load(queries[r].q + i));
    const Left *left[N];
    repeat<N>([&](auto r) EACH { left[r] = (const Left *)queries[r].q; });
    Ahead values = lines_of(next ? cache.values : nullptr, from, to, width, 4);
    Ahead keys = lines_of(next, from, to, width, width / LANES);
    by_columns<N>(end - from, [&](int64_t i, auto vectors) EACH {
        Sums<N, vectors, Cache> sums;
        sums.add(left, cache.keys_from((from + i) / BLOCK), n_words, BLOCK, n_words * BLOCK, values);
        repeat<N>([&](auto r) EACH {
            repeat<vectors>([&](auto v) EACH { store(scores + r * room + i + v * LANES, sums.at(r, v)); });
        });
    });
    Lanes factor[N];
    for (int r = 0; r < N; r++) factor[r] = softmax(queries[r], scale, cache, scores + r * room, from, end);

    // Words in which each query sees all positions, and those before and behind.
    const auto word_of = [&](int64_t position) EACH { return (position - from) / OF_WORD; };
    const int64_t all_from = word_of(queries[N - 1].from + OF_WORD - 1),
                  all_to = std::max(word_of(queries[0].to), all_from);
    repeat<N>([&](auto r) EACH { left[r] = (const Left *)(scores + r * room); });
    const Left *inner[N];
    repeat<N>([&](auto r) EACH { inner[r] = left[r] + all_from * LEFT_OF_WORD; });
    by_columns<N>(width, [&](int64_t i, auto vectors) EACH {
        Sums<N, vectors, Cache> sums;
        const uint32_t *const right = cache.values_from(from) + i;
        const auto alone = [&](auto r, int64_t first, int64_t last) EACH {
            sums.template add_some<r>(left[r], right, first, last, width, queries[r].from - from, queries[r].to - from);
        };
        repeat<N>([&](auto r) EACH { alone(r, word_of(queries[r].from), all_from); });
        sums.add(inner, right + all_from * width, all_to - all_from, width, LANES, keys);
        repeat<N>([&](auto r) EACH { alone(r, all_to, word_of(queries[r].to + OF_WORD - 1)); });
        repeat<N>([&](auto r) EACH {
            repeat<vectors>([&](auto v) EACH { store(queries[r].out + i + v * LANES, sums.at(r, v) * factor[r]); });
        });
        keys = {};
    });
}

#ifdef AMX
// ------------------------------------------------------------------------------------------------------ by tiles

constexpr int64_t POSITIONS =
    2 * amx::SIDE; // of the values that two tiles multiply; also elements of keys that they do
constexpr int64_t SOME =
    8 * POSITIONS; // of the values that are multiplied for all their elements before others are read

struct alignas(64) Tile {
    float at[LANES][LANES];
};

struct TileRoom {
    std::vector<BFloat> queries;  // [32, width]
    std::vector<uint32_t> values; // of 32 positions, where a query does not see all: [16, width]
    std::vector<float> sums;      // [32, width]
    Tile products[2];

    void reserve(int64_t width) {
        queries.resize(MOST_QUERIES * width), values.resize(POSITIONS / 2 * width), sums.resize(MOST_QUERIES * width);
    }
};

// n queries over the keys [from, end), whose scores lie `stride` floats apart.
struct OnTiles {
    const HeadCache<BFloat> &cache;
    TileRoom &room;
    int64_t n, from, end, stride, width = cache.width, tall = (n + amx::SIDE - 1) / amx::SIDE;

    // Products of queries and keys up to `to`.
    void score(const Query *queries, int64_t to, float *scores, Ahead &ahead) const {
        for (int64_t r = 0; r < n; r++)
            for (int64_t i = 0; i < width; i += LANES) store(&room.queries[r * width] + i, load(queries[r].q + i));
        const char *const left[] = {(char *)&room.queries[0], (char *)(&room.queries[0] + amx::SIDE * width)};
        for (int64_t s = from; s < to; s += POSITIONS) {
            const int64_t block = s / BLOCK, wide = s + BLOCK < to ? 2 : 1;
            const char *const right[] = {(char *)cache.keys_from(block), (char *)cache.keys_from(block + wide - 1)};
            char *out[4];
            for (int64_t t = 0; t < tall * wide; t++) {
                float *const there = scores + t / wide * amx::SIDE * stride + s - from + t % wide * BLOCK;
                out[t] = n == 1 ? (char *)&room.products[t] : (char *)there;
            }
            amx::product<false>(tall, wide, left, n == 1 ? 0 : 2 * width, right, amx::ROW, amx::TILE, width / POSITIONS,
                                out, n == 1 ? amx::ROW : 4 * stride, false, &ahead);
            for (int64_t t = 0; n == 1 && t < wide; t++)
                store(scores + s - from + t * BLOCK, load(room.products[t].at[0]));
        }
    }

    // Σ weight · value over the keys in [first, last); weights: [n, stride] floats, in bf16 in the first half of each
    // row. False: not computed, because some values are no numbers, and a query may not see them.
    bool weigh(const Query *queries, const Lanes *factor, const float *weights, int64_t first, int64_t last,
               Ahead &ahead) const {
        const int64_t all_from = (queries[n - 1].from + POSITIONS - 1) / POSITIONS * POSITIONS;
        const int64_t all_to = queries[0].to / POSITIONS * POSITIONS;
        for (int64_t s = from, many; s < end; s += many) {
            const bool all_see = s >= all_from && s < all_to;
            many = all_see ? std::min(all_to - s, SOME) : POSITIONS;
            const uint32_t *values = cache.values_from(s);
            if (!all_see) {
                if (!copy(s, first, last) && n > 1) return false;
                values = room.values.data();
            }
            const BFloat *const of_first = (const BFloat *)weights + s - from;
            const char *const left[] = {(char *)of_first, (char *)(of_first + 2 * amx::SIDE * stride)};
            for (int64_t i = 0; i < width; i += 2 * amx::SIDE) {
                const char *const right[] = {(char *)(values + i), (char *)(values + i + amx::SIDE)};
                float *const sums = &room.sums[i];
                char *out[4];
                for (int64_t t = 0; t < 2 * tall; t++)
                    out[t] = (char *)(sums + t / 2 * amx::SIDE * width + t % 2 * amx::SIDE);
                amx::product<false>(tall, 2, left, n == 1 ? 0 : 4 * stride, right, 4 * width, amx::SIDE * 4 * width,
                                    many / POSITIONS, out, 4 * width, s > from, &ahead);
            }
        }
        for (int64_t r = 0; r < n; r++)
            for (int64_t i = 0; i < width; i += LANES)
                store(queries[r].out + i, load(&room.sums[r * width + i]) * factor[r]);
        return true;
    }

    // The values of 32 positions, those outside [first, last) as 0; whether all are numbers.
    bool copy(int64_t s, int64_t first, int64_t last) const {
        const __m512i exponent = _mm512_set1_epi16(0x7f80);
        __mmask32 not_numbers = 0;
        for (int64_t pair = 0; pair < POSITIONS / 2; pair++) {
            const int64_t at = s + 2 * pair;
            const bool one = at >= first && at < last, two = at + 1 >= first && at + 1 < last;
            const __m512i seen = _mm512_set1_epi32((one ? 0xffff : 0) | (two ? 0xffff0000 : 0));
            for (int64_t i = 0; i < width; i += LANES) {
                __m512i words = _mm512_setzero_si512();
                if (one || two) words = _mm512_and_si512(_mm512_loadu_si512(cache.values_from(at) + i), seen);
                not_numbers |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(words, exponent), exponent);
                _mm512_storeu_si512(&room.values[pair * width + i], words);
            }
        }
        return !not_numbers;
    }
};
#endif

// What a thread computes attention in, over keys of up to so many positions.
struct AttentionRoom {
    int64_t n_scores; // of a query
    Buffer scores;
#ifdef AMX
    TileRoom tiles;
#endif

    explicit AttentionRoom(int64_t n_positions)
        : n_scores(((n_positions / LANES + 3) | 1) * LANES) {} // odd: rows do not share cache sets

    float *rows(int64_t n) {
        if ((int64_t)scores.size() < n * n_scores / LANES) scores.resize(n * n_scores / LANES);
        return (float *)scores.data();
    }
};

// How many queries are best computed together.
template<class Cache> int64_t queries_at_once([[maybe_unused]] int64_t width) {
#ifdef AMX
    if (std::is_same_v<Cache, BFloat> && amx::granted && width % POSITIONS == 0) return MOST_QUERIES;
#endif
    return QUERIES;
}

#ifdef AMX
inline void attend_by_tiles(const Query *queries, int64_t n, float scale, const HeadCache<BFloat> &cache,
                            AttentionRoom &room, const BFloat *next) {
    const int64_t from = queries[0].from / POSITIONS * POSITIONS, to = queries[n - 1].to, stride = room.n_scores;
    const int64_t end = (to + POSITIONS - 1) / POSITIONS * POSITIONS;
    room.tiles.reserve(cache.width);
    Ahead values = lines_of(next ? cache.values : nullptr, from, to, cache.width, 32);
    Ahead keys = lines_of(next, from, to, cache.width, 32);
    float *scores = room.rows(n == 1 ? 1 : (n + amx::SIDE - 1) / amx::SIDE * amx::SIDE);
    const OnTiles on_tiles{cache, room.tiles, n, from, end, stride};
    on_tiles.score(queries, to, scores, values);
    Lanes factor[MOST_QUERIES];
    for (int64_t r = 0; r < n; r++) factor[r] = softmax(queries[r], scale, cache, scores + r * stride, from, end);
    if (on_tiles.weigh(queries, factor, scores, queries[0].from, to, keys)) return;
    for (int64_t r = 0; r < n; r++)
        OnTiles{cache, room.tiles, 1, from, end, stride}.weigh(queries + r, factor + r, scores + r * stride,
                                                               queries[r].from, queries[r].to, keys);
}
#endif

// Up to `queries_at_once` queries of one text, in the order of their positions, over the keys and values that are kept.
// next: keys that come after these; null: nothing is far.
template<class Cache>
void attend(const Query *queries, int64_t n, float scale, const HeadCache<Cache> &cache, AttentionRoom &room,
            const Cache *next) {
#ifdef AMX
    if constexpr (std::is_same_v<Cache, BFloat>)
        if (queries_at_once<Cache>(cache.width) == MOST_QUERIES)
            return attend_by_tiles(queries, n, scale, cache, room, next);
#endif
    float *scores = room.rows(n);
    const auto run = [&](auto some) {
        for (; n >= some; n -= some, queries += some)
            attend_by_vectors<some>(queries, scale, cache, scores, room.n_scores, next);
    };
    if constexpr (QUERIES >= 8) run(std::integral_constant<int, 8>{});
    if constexpr (QUERIES >= 4) run(std::integral_constant<int, 4>{});
    run(std::integral_constant<int, 2>{});
    run(std::integral_constant<int, 1>{});
}

} // namespace
