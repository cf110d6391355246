// See cached_attention.h.

#include "cached_attention.h"
#include "functions.h"
#include "tile.h"

using namespace kernels;

namespace {

// Returns the cache lines of vectors [from, to) of keys or values, to be prefetched; none if `vectors` is null.
template<class Cache> Ahead lines_of(const Cache *vectors, int64_t from, int64_t to, int64_t width, int64_t at_once) {
    if (!vectors) return {};
    return {(const char *)(vectors + from * width), (const char *)(vectors + to * width), at_once};
}

// A bf16 cache is multiplied as it is, two numbers at a time; queries and weights are then rounded to bf16 as well.
#ifdef BF16_PRODUCTS
template<class Cache> constexpr bool ROUNDED = std::is_same_v<Cache, BFloat>;
template<class Cache> using Policy = std::conditional_t<ROUNDED<Cache>, Pairs, Widened<Cache>>;
#else
template<class Cache> constexpr bool ROUNDED = false;
template<class Cache> using Policy = Widened<Cache>;
#endif
template<class Cache> using Left = typename Policy<Cache>::Left;

// ---------------------------------------------------------------------------------------------------- by vectors

// Writes the products of N rows with 16 · VECTORS columns to the columns of `out` from `at` on, or adds them if `adds`.
// The right factor's words are `apart` apart, and its vectors `vectors_apart`.
template<class Cache, int N, int VECTORS>
[[gnu::noinline]] void multiply(const Left<Cache> *const (&left)[N], const uint32_t *right, int64_t n, int64_t apart,
                                int64_t vectors_apart, float *const (&out)[N], int64_t at, bool adds, Ahead &ahead) {
    Tile<Policy<Cache>, N, VECTORS * PARTS> tile;
    const auto each_vector = [&](const auto &f) EACH {
        repeat<N>([&](auto r) EACH { repeat<VECTORS>([&](auto v) EACH { f(r, v); }); });
    };
    if (adds) each_vector([&](auto r, auto v) EACH { tile.set(r, v, load(out[r] + at + v * LANES)); });
    Ahead lines = ahead; // in registers
    tile.add([&](auto r, int64_t word, int e) EACH { return left[r][word * Policy<Cache>::UNITS + e]; }, right, n,
             apart, vectors_apart, &lines);
    ahead = lines;
    each_vector([&](auto r, auto v) EACH { store(out[r] + at + v * LANES, tile.at(r, v)); });
}

// Adds the products of words [first, end) of one row, but only of their elements in [from, to).
template<class Cache>
void add_some(const Left<Cache> *left, const uint32_t *right, int64_t first, int64_t end, int64_t width, int64_t from,
              int64_t to, float *out) {
    constexpr int64_t OF_WORD = HeadCache<Cache>::OF_WORD;
    for (int64_t word = first; word < end; word++)
        for (int64_t i = 0; i < width; i += IN_REGISTER) {
            const auto sees = [&](int64_t e) EACH { return word * OF_WORD + e >= from && word * OF_WORD + e < to; };
            const Words words = words_at(right + word * width + i);
            Floats sum;
            std::memcpy(&sum, out + i, sizeof sum);
            if constexpr (ROUNDED<Cache>) {
                if (sees(0) || sees(1))
                    sum = Policy<Cache>::add(sum, words & ((sees(0) ? 0xffff : 0) | (sees(1) ? 0xffff0000 : 0)),
                                             left[word]);
            } else
                repeat<OF_WORD>([&](auto e) EACH {
                    if (sees(e))
                        sum = Policy<Cache>::add(sum, Policy<Cache>::right(words, e), left[word * OF_WORD + e]);
                });
            std::memcpy(out + i, &sum, sizeof sum);
        }
}

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

// Turns the products of a query with keys [from, end) into weights that are not yet normalized; returns the factor that
// normalizes their sums. Where products are in bf16, weights are stored as bf16 in the first half of the row.
template<class Cache>
Lanes softmax(const Query &query, float scale, const HeadCache<Cache> &cache, float *scores, int64_t from,
              int64_t end) {
    std::fill(scores, scores + query.from - from, -INFINITY);
    std::fill(scores + query.to - from, scores + end - from, -INFINITY);
    const auto score = [&](int64_t s) EACH {
        const Lanes product = load(scores + s);
        if constexpr (HeadCache<Cache>::SCALED) // scales of unseen keys may be anything
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
        if (query.weights) store(query.weights + from + s, e);
        if constexpr (HeadCache<Cache>::SCALED)
            store(scores + s, choose(x == -INFINITY, Lanes{}, e * load(cache.value_scales + from + s)));
        else if constexpr (ROUNDED<Cache>)
            store((BFloat *)scores + s, e);
        else
            store(scores + s, e);
    }
    const Lanes factor = all(1 / sum(total));
    if (query.weights)
        for (int64_t s = from; s < end; s += LANES) store(query.weights + s, load(query.weights + s) * factor);
    return factor;
}

// Computes attention of N queries. scores: [N, room]. next: the keys to prefetch, or null.
template<int N, class Cache>
void attend_by_vectors(const Query *queries, float scale, const HeadCache<Cache> &cache, float *scores, int64_t room,
                       const Cache *next) {
    constexpr int64_t OF_WORD = HeadCache<Cache>::OF_WORD;
    const int64_t width = cache.width, n_words = width / OF_WORD, to = queries[N - 1].to;
    const int64_t from = queries[0].from / BLOCK * BLOCK, end = (to + BLOCK - 1) / BLOCK * BLOCK;
    if constexpr (ROUNDED<Cache>)
        for (int r = 0; r < N; r++)
            for (int64_t i = 0; i < width; i += LANES) store((BFloat *)queries[r].q + i, load(queries[r].q + i));
    const Left<Cache> *left[N];
    float *out[N];
    for (int r = 0; r < N; r++) left[r] = (const Left<Cache> *)queries[r].q, out[r] = scores + r * room;
    Ahead values = lines_of(next ? cache.values : nullptr, from, to, width, 4);
    Ahead keys = lines_of(next, from, to, width, width / LANES);
    by_columns<N>(end - from, [&](int64_t i, auto vectors) EACH {
        multiply<Cache, N, vectors>(left, cache.keys_from((from + i) / BLOCK), n_words, BLOCK, n_words * BLOCK, out, i,
                                    false, values);
    });
    Lanes factor[N];
    for (int r = 0; r < N; r++) factor[r] = softmax(queries[r], scale, cache, scores + r * room, from, end);

    // Words of which every query sees all positions. `add_some` adds the words before and after these.
    const auto word_of = [&](int64_t position) EACH { return (position - from) / OF_WORD; };
    const int64_t all_from = word_of(queries[N - 1].from + OF_WORD - 1),
                  all_to = std::max(word_of(queries[0].to), all_from);
    const uint32_t *const right = cache.values_from(from);
    const Left<Cache> *inner[N];
    for (int r = 0; r < N; r++) {
        left[r] = (const Left<Cache> *)out[r], inner[r] = left[r] + all_from * Policy<Cache>::UNITS;
        out[r] = queries[r].out;
        std::fill_n(out[r], width, 0.0f);
        add_some<Cache>(left[r], right, word_of(queries[r].from), all_from, width, queries[r].from - from,
                        queries[r].to - from, out[r]);
    }
    by_columns<N>(width, [&](int64_t i, auto vectors) EACH {
        multiply<Cache, N, vectors>(inner, right + all_from * width + i, all_to - all_from, width, LANES, out, i, true,
                                    keys);
        keys = {};
    });
    for (int r = 0; r < N; r++) {
        add_some<Cache>(left[r], right, all_to, word_of(queries[r].to + OF_WORD - 1), width, queries[r].from - from,
                        queries[r].to - from, out[r]);
        for (int64_t i = 0; i < width; i += LANES) store(out[r] + i, load(out[r] + i) * factor[r]);
    }
}

#ifdef AMX
// ------------------------------------------------------------------------------------------------------ by tiles

// n queries over the keys [from, end). Their rows of scores are `stride` floats apart.
struct OnTiles {
    const HeadCache<BFloat> &cache;
    TileRoom &room;
    int64_t n, from, end, stride, width = cache.width, tall = (n + amx::SIDE - 1) / amx::SIDE;

    // Writes the products of the queries and the keys before `to` to `scores`.
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

    // Writes Σ weight · value over the keys in [first, last) to the queries' outputs. weights: [n, stride] floats; the
    // first half of each row holds the weights in bf16. Returns false, without results, if a value that some query may
    // not see is infinite or NaN.
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

    // Copies the values of 32 positions, with 0 outside [first, last). Returns whether all are finite.
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

#ifdef AMX
void attend_by_tiles(const Query *queries, int64_t n, float scale, const HeadCache<BFloat> &cache, AttentionRoom &room,
                     const BFloat *next) {
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

} // namespace

template<class Cache>
void kernels::attend(const Query *queries, int64_t n, float scale, const HeadCache<Cache> &cache, AttentionRoom &room,
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

#define FOR(Cache)                                                                                                     \
    template void kernels::attend(const Query *, int64_t, float, const HeadCache<Cache> &, AttentionRoom &,            \
                                  const Cache *);
FOR(float)
FOR(BFloat)
FOR(int8_t)
