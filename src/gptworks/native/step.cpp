// One decode step of a GPT on a CPU, for a few tokens of one or several texts. Built by library.py, called by backend.py.
//
//     tokens ─► embed ─► layers × ( norm ─► q k v │ attend │ out ─► + │ norm ─► MLP │ down ─► + │ ) norm ─► head ─► logits
//
// All threads walk the whole step together; a bar is a point where they wait for one another. At batch 1 a step is bound
// by reading every weight once, so a matrix is divided by rows: each thread streams its own and multiplies them with all
// activations, while the little work between (norms, rounding) is done by every thread for itself rather than waited for.
//
// What a token gets never depends on its neighbours in the batch: each (weight row, activation row) has accumulators of
// its own, filled in one order by one expression, whatever the number of rows. Nothing here may be built with -ffast-math.

#include "lanes.h"
#include "products.h"
#include "threads.h"

namespace {

// ------------------------------------------------------------------------------ what backend.py hands over (ctypes)

struct Norm {
    const float *weight, *bias;  // weight null: no norm here; bias may be null
};

struct Layer {
    Norm norm1, norm2, query_norm, key_norm;
    Matrix query, key, value, out, gate, up, down;  // gate.weight null: the MLP has none
    void *keys;                                     // [slots, groups, capacity, d_head]
    float *key_scales;                              // int8: [slots, groups, capacity rounded up to 16]
    void *values;
    float *value_scales;
    int64_t window;                                 // keys a query sees, its own included
    int64_t rotates;                                // whether positions turn queries and keys
};

struct Model {
    int64_t d_model, n_heads, n_groups, d_head, d_ff, d_rotary, capacity, n_layers;
    int64_t activation, layer_norm, parallel, cache_kind;
    float eps, scale, embedding_scale, residual_scale, logit_scale;
    Matrix embedding, head;
    const float *position;    // [capacity, d_model], or null
    const float *cos, *sin;   // [capacity, d_rotary / 2], or null
    Norm norm;
    const Layer *layers;
};

struct Batch {
    int64_t n_rows, n_texts, n_wanted;
    const int64_t *tokens, *slots, *positions;  // of each row
    const int64_t *wanted;                      // rows that want logits
    float *logits;                              // [n_wanted, vocabulary]
    float *features;                            // [n_wanted, d_model], what the head reads; or null: not asked for
};

// ------------------------------------------------------------------------------------------- between the products

void normalize(const Norm &norm, bool layer_norm, float eps, int64_t width, const float *x, float *out) {
    Lanes total = {}, square = {};
    float mean = 0;
    if (layer_norm) {
        for (int64_t i = 0; i < width; i += LANES) total += load(x + i);
        mean = sum(total) / width;
    }
    for (int64_t i = 0; i < width; i += LANES) {
        const Lanes centred = load(x + i) - mean;
        square += centred * centred;
    }
    const float factor = 1 / std::sqrt(sum(square) / width + eps);
    for (int64_t i = 0; i < width; i += LANES) {
        Lanes y = (load(x + i) - mean) * factor * load(norm.weight + i);
        if (norm.bias) y += load(norm.bias + i);
        store(out + i, y);
    }
}

void embed(const Model &m, int64_t token, int64_t position, float *out) {
    const Matrix &e = m.embedding;
    for (int64_t i = 0; i < m.d_model; i++) {
        const int64_t at = token * e.k + i;
        float x = 0;
        switch (e.kind) {
        case FP32: x = ((const float *)e.weight)[at]; break;
        case BF16: x = ((const BFloat *)e.weight)[at]; break;
        case FP16: x = ((const Half *)e.weight)[at]; break;
        case INT8: x = ((const int8_t *)e.weight)[at] * ((const float *)e.scale)[token]; break;
        case INT4: {
            const uint8_t byte = ((const uint8_t *)e.weight)[at / 32 * 16 + i % 16];
            x = ((i % 32 < 16 ? byte & 15 : byte >> 4) - 8) * ((const Half *)e.scale)[at / 32];
        }
        }
        x *= m.embedding_scale;
        out[i] = m.position ? x + m.position[position * m.d_model + i] : x;
    }
}

// Turns each pair (i, i + R/2) of the first R elements of a head.
void rotate(const Model &m, int64_t position, float *x) {
    const int64_t half = m.d_rotary / 2;
    const float *cos = m.cos + position * half, *sin = m.sin + position * half;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

void prepare_head(const Model &m, const Layer &layer, const Norm &norm, int64_t position, float *x) {
    if (norm.weight) normalize(norm, false, m.eps, m.d_head, x, x);
    if (layer.rotates) rotate(m, position, x);
}

constexpr int64_t QUERIES = MANY_REGISTERS ? 4 : 1;  // that read keys and values together

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
INLINE void score(const Query *queries, const Cache *const (&key)[TILE], int64_t width, Lanes (&total)[N][TILE]) {
    for (int64_t i = 0; i < width; i += LANES) {
        Lanes q[N];
        repeat<N>([&](auto r) EACH { q[r] = load(queries[r].q + i); });
        repeat<TILE>([&](auto j) EACH {
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
INLINE void score(const Query *queries, const BFloat *const (&key)[TILE], int64_t width, Lanes (&total)[N][TILE]) {
    const auto add = [&](int64_t i, const auto &load_pairs) EACH {
        __m512i q[N];
        repeat<N>([&](auto r) EACH { q[r] = load_pairs((const BFloat *)queries[r].q + i); });
        repeat<TILE>([&](auto j) EACH {
            const __m512i elements = load_pairs(key[j] + i);
            repeat<N>([&](auto r) EACH { total[r][j] = add_pairs(total[r][j], elements, q[r]); });
        });
    };
    int64_t i = 0;
    for (; i + 2 * LANES <= width; i += 2 * LANES) add(i, [](const BFloat *p) EACH { return _mm512_loadu_si512(p); });
    if (i < width) add(i, [](const BFloat *p) EACH { return _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i *)p)); });
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
            const __m512i lower = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
            const __m512i upper = _mm512_add_epi32(lower, _mm512_set1_epi32(8));
            repeat<2>([&](auto half) EACH {
                const __m512 a = (__m512)(total[r][2 * half] * factor[r]), b = (__m512)(total[r][2 * half + 1] * factor[r]);
                store(out + 2 * LANES * half, (Lanes)_mm512_permutex2var_ps(a, lower, b));
                store(out + 2 * LANES * half + LANES, (Lanes)_mm512_permutex2var_ps(a, upper, b));
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

template <class Cache> struct HeadCache {
    static constexpr bool SCALED = std::is_same_v<Cache, int8_t>;  // a value is = integer · scale of its vector
    int64_t width;
    Cache *keys, *values;                                  // [capacity, d_head]
    float *key_scales = nullptr, *value_scales = nullptr;  // [capacity]

    HeadCache(const Model &m, const Layer &layer, int64_t slot, int64_t group) : width(m.d_head) {
        const int64_t head = slot * m.n_groups + group, at = head * m.capacity * width;
        keys = (Cache *)layer.keys + at, values = (Cache *)layer.values + at;
        const int64_t scales_at = head * ((m.capacity + LANES - 1) / LANES * LANES);
        if constexpr (SCALED) key_scales = layer.key_scales + scales_at, value_scales = layer.value_scales + scales_at;
    }

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

// N queries of one text, in the order of their positions, over its keys and values [capacity, d_head]. They read the
// keys together. scores: [N, room], room for `to` and 32 more. next: keys that come after these; null: nothing is far.
template <int N, class Cache>
void attend(const Model &m, const Query *queries, const HeadCache<Cache> &cache, float *scores, int64_t room,
            const Cache *next) {
    const int64_t width = m.d_head, to = queries[N - 1].to;
    const int64_t from = queries[0].from / LANES * LANES;  // so that a key's lane follows from its position alone
    const int64_t end = from + (to - from + LANES - 1) / LANES * LANES;
    if constexpr (ROUNDED<Cache>)
        for (int r = 0; r < N; r++)
            for (int64_t i = 0; i < width; i += LANES) store((BFloat *)queries[r].q + i, load(queries[r].q + i));
    for (int64_t s = from; s < end; s += TILE) {
        Lanes total[N][TILE] = {};
        const Cache *key[TILE];
        repeat<TILE>([&](auto j) EACH { key[j] = cache.keys + std::min(s + j, to - 1) * width; });
        fetch(next ? cache.values + s * width : next, TILE, width);
        score<N>(queries, key, width, total);
        repeat<N>([&](auto r) EACH {
            Quad four = sums(total[r]) * m.scale, scale;
            if constexpr (HeadCache<Cache>::SCALED) {
                std::memcpy(&scale, cache.key_scales + s, sizeof scale);
                four *= scale;
            }
            std::memcpy(scores + r * room + s - from, &four, sizeof four);
        });
    }
    Lanes factor[N];
    for (int r = 0; r < N; r++) {
        float *own = scores + r * room;
        std::fill(own, own + queries[r].from - from, -INFINITY);
        std::fill(own + queries[r].to - from, own + end - from, -INFINITY);
        Lanes top = load(own), total = {};
        for (int64_t s = LANES; s < end - from; s += LANES) top = larger(top, load(own + s));
        float largest = -INFINITY;
        for (int i = 0; i < LANES; i++) largest = std::max(largest, top[i]);
        for (int64_t s = 0; s < end - from; s += LANES) {
            const Lanes score = load(own + s), e = choose(score == -INFINITY, Lanes{}, exponential(score - largest));
            total += e;
            if constexpr (HeadCache<Cache>::SCALED)
                store(own + s, e * load(cache.value_scales + from + s));
            else if constexpr (ROUNDED<Cache>)
                store((BFloat *)own + s, e);
            else
                store(own + s, e);
        }
        factor[r] = all(1 / sum(total));
    }
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES, next = nullptr)
        weigh<N, 4>(queries, factor, scores, room, cache.values, from, width, i, next);
    for (; i < width; i += LANES, next = nullptr)
        weigh<N, 1>(queries, factor, scores, room, cache.values, from, width, i, next);
}


// A row's new key and value of one head, into the cache. qkv: queries, keys, values of all heads.
template <class Cache>
void remember(const Model &m, const Layer &layer, const Batch &b, int64_t row, int64_t group, float *qkv) {
    const int64_t width = m.d_head, position = b.positions[row];
    float *k = qkv + (m.n_heads + group) * width, *v = k + m.n_groups * width;
    prepare_head(m, layer, layer.key_norm, position, k);
    HeadCache<Cache>(m, layer, b.slots[row], group).keep(position, k, v);
}

// A thread takes whole (rows of a text, key/value head) pairs: their queries, some at a time, over the keys they see.
// Later rows see more keys, so threads take turns.
template <class Cache>
void attend(const Model &m, const Layer &layer, const Batch &b, float *qkv, int64_t stride, float *out,
            int64_t out_stride, Buffer &scores, const Team &team) {
    const int64_t width = m.d_head, heads = m.n_heads / m.n_groups, room = scores.size() / QUERIES * LANES;
    const bool alone = b.n_rows == b.n_texts;  // no row's keys are another one's to see
    for (int64_t task = team.thread; task < b.n_rows * m.n_groups && !alone; task += team.n_threads) {
        const int64_t row = task / m.n_groups;
        remember<Cache>(m, layer, b, row, task % m.n_groups, qkv + row * stride);
    }
    if (!alone) team.wait();
    int64_t task = 0;
    for (int64_t row = 0, end; row < b.n_rows; row = end) {
        for (end = row + 1; end < std::min(row + QUERIES, b.n_rows) && b.slots[end] == b.slots[row];) end++;
        for (int64_t group = 0; group < m.n_groups; group++, task++) {
            if (task % team.n_threads != team.thread) continue;
            const HeadCache<Cache> cache(m, layer, b.slots[row], group);
            const Cache *next = nullptr;  // this thread's next keys, where a head has few queries
            if (alone) next = cache.keys + team.n_threads * m.capacity * width;
            Query queries[QUERIES];
            int64_t n = 0;
            for (int64_t r = row; r < end; r++) {
                if (alone) remember<Cache>(m, layer, b, r, group, qkv + r * stride);
                for (int64_t head = group * heads; head < (group + 1) * heads; head++) {
                    const int64_t position = b.positions[r];
                    float *q = qkv + r * stride + head * width;
                    prepare_head(m, layer, layer.query_norm, position, q);
                    queries[n++] = {q, out + r * out_stride + head * width,
                                    std::max<int64_t>(0, position + 1 - layer.window), position + 1};
                    if (n < QUERIES && !(r + 1 == end && head + 1 == (group + 1) * heads)) continue;
                    float *own = (float *)scores.data();
                    switch (std::exchange(n, 0)) {
                    case 1: attend<1>(m, queries, cache, own, room, next); break;
                    case 2: attend<2>(m, queries, cache, own, room, next); break;
                    case 3: attend<3>(m, queries, cache, own, room, next); break;
                    default: attend<4>(m, queries, cache, own, room, next);
                    }
                }
            }
        }
    }
}

// ----------------------------------------------------------------------------------------------------------- the step

struct Shared {  // what all threads write to, each its part
    int64_t n, d_model, d_qkv, d_heads, d_ff;  // strides
    Buffer x, qkv, attended, inner, gate;

    struct Common {  // rows that all threads prepare together, where they are many
        Buffer x;
        Rounded rounded;
    };
    Common norm1, norm2, last;
    Rounded of_attended, of_inner;

    Shared(const Model &m, const Batch &b)
        : n(b.n_rows), d_model(padded(m.d_model)), d_qkv(padded((m.n_heads + 2 * m.n_groups) * m.d_head)),
          d_heads(padded(m.n_heads * m.d_head)), d_ff(padded(m.d_ff)), x(n * d_model / LANES), qkv(n * d_qkv / LANES),
          attended(n * d_heads / LANES), inner(n * d_ff / LANES), gate(m.layers->gate.weight ? n * d_ff / LANES : 0) {
        for (const auto &[of, rows] : {std::pair(&norm1, n), std::pair(&norm2, n), std::pair(&last, b.n_wanted)})
            if (rows >= DIVIDED) of->x.resize(rows * d_model / LANES), of->rounded.make_room(rows, d_model);
        if (n >= DIVIDED) of_attended.make_room(n, d_heads), of_inner.make_room(n, d_ff);
    }
};

float *data(Buffer &buffer) { return (float *)buffer.data(); }

// The norm of some rows of the residual stream: in memory of this thread's own, or divided among the threads.
struct Normalized {
    Buffer own;
    Rows rows;

    Normalized(int64_t n, int64_t stride, Shared::Common &common)
        : own(n < DIVIDED ? n * stride / LANES : 0),
          rows(n, stride, data(n < DIVIDED ? own : common.x), n < DIVIDED ? nullptr : &common.rounded) {}

    Rows &of(const Model &m, const Norm &norm, float *x, const Team &team, const int64_t *wanted = nullptr) {
        const auto [from, to] = rows.share(team);
        for (int64_t r = from; r < to; r++)
            normalize(norm, m.layer_norm, m.eps, m.d_model, x + (wanted ? wanted[r] : r) * rows.stride,
                      rows.x + r * rows.stride);
        rows.prepared = rows.common ? Rows::NEW : FP32;
        return rows;
    }
};

void mlp(const Model &m, const Layer &layer, Rows &in, Shared &s, const Team &team) {
    float *inner = data(s.inner), *gate = data(s.gate);
    const bool gated = layer.gate.weight;
    if (gated) product(layer.gate, in, gate, s.d_ff, 1, false, team);
    const auto [from, to] = product(layer.up, in, inner, s.d_ff, 1, false, team);
    for (int64_t row = 0; row < s.n; row++)
        for (int64_t i = row * s.d_ff + from; i < row * s.d_ff + to; i += LANES) {
            const Lanes up = load(inner + i);
            store(inner + i, gated ? activate(load(gate + i), m.activation) * up : activate(up, m.activation));
        }
}

void step(const Model &m, const Batch &b, Shared &s, const Team &team) {
#ifdef AMX
    const amx::Registers registers;
#endif
    float *x = data(s.x), *qkv = data(s.qkv);
    const int64_t d_query = m.n_heads * m.d_head, d_key = m.n_groups * m.d_head;
    Normalized norm1(s.n, s.d_model, s.norm1), norm2(s.n, s.d_model, s.norm2), last(b.n_wanted, s.d_model, s.last);
    Buffer scores(QUERIES * (m.capacity / LANES + 2));
    const bool divided = s.n >= DIVIDED;
    Rows attended(s.n, s.d_heads, data(s.attended), divided ? &s.of_attended : nullptr);
    Rows inner(s.n, s.d_ff, data(s.inner), divided ? &s.of_inner : nullptr);

    for (int64_t row = team.thread; row < s.n; row += team.n_threads)
        embed(m, b.tokens[row], b.positions[row], x + row * s.d_model);
    team.wait();
    for (const Layer *layer = m.layers; layer < m.layers + m.n_layers; layer++) {
        Rows &in = norm1.of(m, layer->norm1, x, team);
        if (m.parallel) norm2.of(m, layer->norm2, x, team);  // before `out` adds to x
        product(layer->query, in, qkv, s.d_qkv, 1, false, team);
        product(layer->key, in, qkv + d_query, s.d_qkv, 1, false, team);
        product(layer->value, in, qkv + d_query + d_key, s.d_qkv, 1, false, team);
        team.wait();
        const auto attend_in = m.cache_kind == INT8 ? attend<int8_t> : m.cache_kind == BF16 ? attend<BFloat> : attend<float>;
        attend_in(m, *layer, b, qkv, s.d_qkv, data(s.attended), s.d_heads, scores, team);
        team.wait();
        attended.prepared = inner.prepared = FP32;
        product(layer->out, attended, x, s.d_model, m.residual_scale, true, team);
        if (!m.parallel) {
            team.wait();
            norm2.of(m, layer->norm2, x, team);
        }
        mlp(m, *layer, norm2.rows, s, team);
        team.wait();
        product(layer->down, inner, x, s.d_model, m.residual_scale, true, team);
        team.wait();
    }
    if (!b.n_wanted) return;
    last.of(m, m.norm, x, team, b.wanted);
    last.rows.prepare(m.head.kind, team);
    if (b.features && team.thread == 0)
        for (int64_t r = 0; r < b.n_wanted; r++)
            std::copy_n(last.rows.x + r * s.d_model, m.d_model, b.features + r * m.d_model);
    product(m.head, last.rows, b.logits, m.head.n, m.logit_scale, false, team);
}

}  // namespace

// ---------------------------------------------------------------------------------------------------- what is called

// Takes AMX from now on, if the system grants it and it computes what it should; whether it does.
extern "C" int gptworks_take_amx() {
#ifdef AMX
    if (amx::ask()) {
        amx::granted = true;
        amx::granted = amx::computes_rightly();
    }
    return amx::granted;
#else
    return 0;
#endif
}

// What this library was built with: bit 1 vectors of 64 bytes, 2 of 32; 3 products of integers, 4 of bf16.
extern "C" int gptworks_built_with() {
    int bits = REGISTER == 64 ? 2 : REGISTER == 32 ? 4 : 0;
#ifdef INTEGER_PRODUCTS
    bits |= 8;
#endif
#ifdef BF16_PRODUCTS
    bits |= 16;
#endif
    return bits;
}

extern "C" void gptworks_step(const Model *model, const Batch *batch, int n_threads) {
    Shared shared(*model, *batch);
    parallel(n_threads, [&](const Team &team) { step(*model, *batch, shared, team); });
}
