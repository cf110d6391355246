// Attention of new tokens over the cached keys and values: in float32, in bf16, or in int8 with one scale per vector.
//
// In both products, the keys or values are the right factor. They are stored in words of four bytes, whose elements are
// summed over:
//
//     scores[query][key]  = Σ query[word] · keys[word][key]          a word: neighbouring elements of a key
//     out[query][element] = Σ weight[word] · values[word][element]   a word: one element of neighbouring values
//
// A query's result never depends on the queries that are computed with it. Each query has its own sums, which are added
// in the order of the words. A value that a query does not see cannot change its sums, not even a NaN.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "lanes.h"

namespace [[gnu::visibility("hidden")]] kernels {

constexpr int64_t BLOCK = LANES; // positions whose keys are stored together
// Numbers of queries that read keys and values together: with vectors, and at most with AMX tiles.
constexpr int64_t QUERIES = MANY_REGISTERS ? 8 : FEW_REGISTERS ? 2 : 4, MOST_QUERIES = 32;

// A query of one head, the address of its output, and the range [from, to) of keys that it sees. `weights`, unless
// null, receives its probability of the key at each position, up to a multiple of 32 positions.
struct Query {
    float *q, *out;
    int64_t from, to;
    float *weights = nullptr;
};

// ------------------------------------------------------------------------------------------------ what is kept

// A key/value head of one text, in blocks of 16 positions. Keys: in each block, the first words of its 16 keys, then
// their second words, and so on. Values: a word has one element of OF_WORD consecutive positions.
template<class Cache> struct HeadCache {
    static constexpr bool SCALED = std::is_same_v<Cache, int8_t>; // an element is an integer times its vector's scale
    static constexpr int64_t OF_WORD = 4 / sizeof(Cache);
    int64_t width;                                        // d_head
    Cache *keys;                                          // [blocks, width / OF_WORD, 16, OF_WORD]
    Cache *values;                                        // [positions / OF_WORD, width, OF_WORD]
    float *key_scales = nullptr, *value_scales = nullptr; // [positions]

    // The words of a block's keys, and of the values from a position on, which is a multiple of OF_WORD.
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

    // Returns the scale of a vector's integers; NaN if an element is not finite, so that the vector is read as NaN.
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

// ------------------------------------------------------------------------------------------------ what is computed

#ifdef AMX
// Positions of values, or elements of keys, that a product of two tiles sums over.
constexpr int64_t POSITIONS = 2 * amx::SIDE;
// Positions whose values are multiplied completely before any other values are read.
constexpr int64_t SOME = 8 * POSITIONS;

struct alignas(64) Square {
    float at[LANES][LANES];
};

struct TileRoom {
    std::vector<BFloat> queries;  // [32, width]
    std::vector<uint32_t> values; // of 32 positions, where a query does not see all: [16, width]
    std::vector<float> sums;      // [32, width]
    Square products[2];

    void reserve(int64_t width) {
        queries.resize(MOST_QUERIES * width), values.resize(POSITIONS / 2 * width), sums.resize(MOST_QUERIES * width);
    }
};
#endif

// The memory in which a thread computes attention over up to `n_positions` keys.
struct AttentionRoom {
    int64_t n_scores; // floats of a query's scores
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

// Returns the best number of queries to compute together.
template<class Cache> int64_t queries_at_once([[maybe_unused]] int64_t width) {
#ifdef AMX
    if (std::is_same_v<Cache, BFloat> && amx::granted && width % POSITIONS == 0) return MOST_QUERIES;
#endif
    return QUERIES;
}

// Computes attention of up to `queries_at_once` queries of one text, in the order of their positions, over its cached
// keys and values. next: the keys that this thread reads next, to be prefetched; null: nothing is prefetched.
template<class Cache>
void attend(const Query *queries, int64_t n, float scale, const HeadCache<Cache> &cache, AttentionRoom &room,
            const Cache *next);

} // namespace kernels
