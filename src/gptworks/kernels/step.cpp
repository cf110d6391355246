// One step of a GPT on a CPU, for some tokens of one or several texts. Built by build.py, called by the native backend
// (infer/backends/native.py).
//
//     tokens ─► embed ─► layers × ( norm ─► q k v │ attend │ out ─► + │ norm ─► MLP │ down ─► + │ ) norm ─► head ─►
//     logits
//
// All threads compute the whole step together; at each bar they wait for one another. At batch 1, reading every weight
// once limits the speed, so threads divide a matrix by rows: each thread reads its own rows and multiplies them by all
// activations. The little work between products (norms, rounding) is repeated by every thread, so that none waits for
// it; with many rows (MANY), threads share this work.
//
// A token's results never depend on its neighbors in the batch: each pair of a weight row and an activation row has its
// own accumulators, which one expression fills in one order, whatever the number of rows. Nothing here may be built
// with -ffast-math.

#include <cstdio>

#include "functions.h"
#include "products.h"
#include "step.h"
#include "threads.h"

using namespace kernels;

void kernels::normalize(const Norm &norm, bool layer_norm, float eps, int64_t width, const float *x, float *out) {
    Lanes total = {};
    float mean = 0;
    if (layer_norm) {
        for (int64_t i = 0; i < width; i += LANES) total += load(x + i);
        mean = sum(total) / width;
    }
    const float factor = scale_to_one([&](int64_t i) EACH { return load(x + i); }, mean, width, eps);
    for (int64_t i = 0; i < width; i += LANES) {
        Lanes y = (load(x + i) - mean) * factor * load(norm.weight + i);
        if (norm.bias) y += load(norm.bias + i);
        store(out + i, y);
    }
}

void kernels::read_row(const Matrix &m, int64_t which, int64_t n, float *out) {
    const Matrix::Row row = m.row(which);
    const auto number = [&](auto type, int64_t i) EACH { // the row's i-th number, of this type
        constexpr int64_t OF_WORD = 4 / sizeof type;
        return ((const decltype(type) *)(row.words + i / OF_WORD * row.apart))[i % OF_WORD];
    };
    for (int64_t i = 0; i < n; i++) switch (m.kind) {
        case FP32:
            out[i] = number(float(), i);
            break;
        case BF16:
            out[i] = number(BFloat(), i);
            break;
        case FP16:
            out[i] = number(Half(), i);
            break;
        case INT8:
            out[i] = number(int8_t(), i) * ((const float *)m.scale)[which];
            break;
        case INT4: {
            const uint8_t byte = number(uint8_t(), i / GROUPED * (GROUPED / 2) + i % (GROUPED / 2));
            out[i] = ((i % GROUPED < GROUPED / 2 ? byte & 15 : byte >> 4) - 8) * row.scales[i / GROUPED * row.apart];
        }
        }
}

namespace {

// ------------------------------------------------------------------------------------------- between the products

// Returns the row of m.pairs for a token and its predecessor, as model/lab/embeddings.py does. Stores the token.
int64_t pair(const Model &m, const Batch &b, int64_t row) {
    const int64_t token = b.tokens[row], position = b.positions[row], n = m.pairs.n;
    int32_t *history = m.history + b.slots[row] * m.capacity;
    history[position] = token;
    if (!position) return n - 1;
    const bool here = row && b.slots[row - 1] == b.slots[row]; // then another thread may still be storing it
    return ((36313 * token) ^ (27191 * (here ? b.tokens[row - 1] : history[position - 1]))) % (n - 1);
}

void embed(const Model &m, const Batch &b, int64_t row, float *of_pair, float *out) {
    read_row(m.embedding, b.tokens[row], m.d_model, out);
    if (m.pairs.weight) read_row(m.pairs, pair(m, b, row), m.d_model, of_pair);
    for (int64_t i = 0; i < m.d_model; i++) {
        float x = out[i] * m.embedding_scale;
        if (m.pairs.weight) x += of_pair[i] * m.pairs_scale;
        out[i] = m.position ? x + m.position[b.positions[row] * m.d_model + i] : x;
    }
}

// Rotates each pair (i, i + R/2) of the first R elements of a head.
void rotate(const Model &m, int64_t rotates, int64_t position, float *x) {
    const int64_t half = m.d_rotary / 2;
    const float *cos = (rotates == 1 ? m.cos : m.window_cos) + position * half;
    const float *sin = (rotates == 1 ? m.sin : m.window_sin) + position * half;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

void prepare_head(const Model &m, const Layer &layer, const Norm &norm, int64_t position, float *x) {
    if (norm.weight) normalize(norm, false, m.eps, m.d_head, x, x);
    if (layer.rotates) rotate(m, layer.rotates, position, x);
}

// Returns the cache of a key/value head of one text.
template<class Cache> HeadCache<Cache> head_cache(const Model &m, const Layer &layer, int64_t slot, int64_t group) {
    const int64_t first = (slot * m.n_groups + group) * m.room(), at = first * m.d_head;
    HeadCache<Cache> cache{m.d_head, (Cache *)layer.keys + at, (Cache *)layer.values + at};
    if constexpr (HeadCache<Cache>::SCALED)
        cache.key_scales = layer.key_scales + first, cache.value_scales = layer.value_scales + first;
    return cache;
}

// Stores a row's new key and value of one head in the cache. qkv: queries, keys and values of all heads.
template<class Cache>
void remember(const Model &m, const Layer &layer, const Batch &b, int64_t row, int64_t group, float *qkv) {
    const int64_t width = m.d_head, position = b.positions[row];
    float *k = qkv + (m.n_heads + group) * width, *v = k + m.n_groups * width;
    prepare_head(m, layer, layer.key_norm, position, k);
    head_cache<Cache>(m, layer, b.slots[row], group).keep(position, k, v);
}

// Rows [first, end) of one text. One thread computes a head's queries of these rows.
struct RowGroup {
    int64_t first, end;
};

// Divides all rows into groups of up to `at_once` rows.
std::vector<RowGroup> row_groups(const Batch &b, int64_t at_once) {
    std::vector<RowGroup> groups;
    for (int64_t row = 0, end; row < b.n_rows; row = end) {
        for (end = row + 1; end < std::min(row + at_once, b.n_rows) && b.slots[end] == b.slots[row];) end++;
        groups.push_back({row, end});
    }
    return groups;
}

// A task is one group of rows for one key/value head. Later rows see more keys, so tasks are dealt to threads in turn.
template<class Cache>
void attention(const Model &m, const Layer &layer, const Batch &b, float *qkv, int64_t stride, float *out,
               int64_t out_stride, AttentionRoom &room, const Team &team) {
    const int64_t width = m.d_head, heads = m.n_heads / m.n_groups, at_once = queries_at_once<Cache>(width);
    const bool alone = b.n_rows == b.n_texts; // no row sees another row's new key
    if (!alone) {
        for (int64_t task = team.thread; task < b.n_rows * m.n_groups; task += team.n_threads) {
            const int64_t row = task / m.n_groups;
            remember<Cache>(m, layer, b, row, task % m.n_groups, qkv + row * stride);
        }
        team.wait();
    }
    const auto rows = row_groups(b, at_once == QUERIES ? QUERIES : std::max<int64_t>(1, at_once / heads));
    const int64_t n_groups = rows.size();
    for (int64_t task = team.thread; task < n_groups * m.n_groups; task += team.n_threads) {
        // If a text has many rows, consecutive tasks read the same head, whose keys and values are in caches.
        const int64_t group = alone ? task % m.n_groups : task / n_groups;
        const auto [first, end] = rows[alone ? task / m.n_groups : task % n_groups];
        const HeadCache<Cache> cache = head_cache<Cache>(m, layer, b.slots[first], group);
        const Cache *next = nullptr; // this thread's next keys, if each text has one row
        if (alone) next = cache.keys + team.n_threads * m.room() * width;
        Query queries[MOST_QUERIES];
        int64_t n = 0;
        for (int64_t r = first; r < end; r++) {
            if (alone) remember<Cache>(m, layer, b, r, group, qkv + r * stride);
            for (int64_t head = group * heads; head < (group + 1) * heads; head++) {
                const int64_t position = b.positions[r];
                float *q = qkv + r * stride + head * width;
                prepare_head(m, layer, layer.query_norm, position, q);
                float *weights = nullptr;
                if (const Watched *w = b.watched)
                    weights = w->attention + (((&layer - m.layers) * m.n_heads + head) * b.n_rows + r) * w->n_keys;
                queries[n++] = {q, out + r * out_stride + head * width,
                                std::max<int64_t>(0, position + 1 - layer.window), position + 1, weights};
                if (n == at_once || (r + 1 == end && head + 1 == (group + 1) * heads))
                    attend(queries, std::exchange(n, 0), m.scale, cache, room, next);
            }
        }
    }
}

// ----------------------------------------------------------------------------------------------------------- the step

struct Shared {                               // memory to which each thread writes its part
    int64_t n, d_model, d_qkv, d_heads, d_ff; // strides
    Buffer x, qkv, attended, inner, gate, added;

    struct Common { // rows that all threads prepare together, if there are many
        Buffer x;
        Rounded rounded;
    };
    Common norm1, norm2, last;
    Rounded of_attended, of_inner;

    Shared(const Model &m, const Batch &b)
        : n(b.n_rows), d_model(padded(m.d_model)), d_qkv(padded((m.n_heads + 2 * m.n_groups) * m.d_head)),
          d_heads(padded(m.n_heads * m.d_head)), d_ff(padded(m.d_ff)), x(n * d_model / LANES), qkv(n * d_qkv / LANES),
          attended(n * d_heads / LANES), inner(n * d_ff / LANES), gate(m.layers->gate.weight ? n * d_ff / LANES : 0),
          added(m.layers->norm1_after.weight ? n * d_model / LANES : 0) {
        for (const auto &[of, rows] : {std::pair(&norm1, n), std::pair(&norm2, n), std::pair(&last, b.n_wanted)})
            if (rows >= MANY) of->x.resize(rows * d_model / LANES), of->rounded.make_room(rows, d_model);
        if (n >= MANY) of_attended.make_room(n, d_heads), of_inner.make_room(n, d_ff);
    }
};

float *data(Buffer &buffer) { return (float *)buffer.data(); }

// The norm of some rows of the residual stream: each thread computes all rows in its own memory, or a share of them.
struct Normalized {
    Buffer own;
    Rows rows;

    Normalized(int64_t n, int64_t stride, Shared::Common &common)
        : own(n < MANY ? n * stride / LANES : 0),
          rows(n, stride, data(n < MANY ? own : common.x), n < MANY ? nullptr : &common.rounded) {}

    Rows &of(const Model &m, const Norm &norm, float *x, const Team &team, const int64_t *wanted = nullptr) {
        const auto [from, to] = rows.share(team);
        for (int64_t r = from; r < to; r++)
            normalize(norm, m.layer_norm, m.eps, m.d_model, x + (wanted ? wanted[r] : r) * rows.stride,
                      rows.x + r * rows.stride);
        rows.made = rows.common ? Rows::NEW : Rows::NOTHING;
        return rows;
    }
};

// Copies this thread's rows of `from` to the i-th part of a member of `Watched`.
[[gnu::noinline]] void write_down(const Batch &b, float *Watched::*what, int64_t i, const float *from, int64_t stride,
                                  int64_t width, const Team &team) {
    for (int64_t row = team.thread; row < b.n_rows; row += team.n_threads)
        std::copy_n(from + row * stride, width, b.watched->*what + (i * b.n_rows + row) * width);
}

void step(const Model &m, const Batch &b, Shared &s, const Team &team) {
#ifdef AMX
    const amx::Registers registers;
#endif
    float *x = data(s.x), *qkv = data(s.qkv);
    const int64_t d_query = m.n_heads * m.d_head, d_key = m.n_groups * m.d_head;
    Normalized norm1(s.n, s.d_model, s.norm1), norm2(s.n, s.d_model, s.norm2), last(b.n_wanted, s.d_model, s.last);
    AttentionRoom room(*std::max_element(b.positions, b.positions + s.n) + 1);
    const bool divided = s.n >= MANY;
    Rows attended(s.n, s.d_heads, data(s.attended), divided ? &s.of_attended : nullptr);
    Rows inner(s.n, s.d_ff, data(s.inner), divided ? &s.of_inner : nullptr);

    const auto watch = [&](float *Watched::*what, int64_t i, const float *from, int64_t stride, int64_t width) {
        if (b.watched) write_down(b, what, i, from, stride, width, team);
    };

    Buffer of_pair(m.pairs.weight ? m.d_model / LANES : 0);
    // Adds a product of rows to the residual stream. A norm, if there is one, normalizes the product first.
    const auto add = [&](const Matrix &matrix, const Norm &norm, Rows &rows) {
        if (!norm.weight) return product(matrix, rows, {x, s.d_model, m.residual_scale, true}, team);
        float *added = data(s.added);
        product(matrix, rows, {added, s.d_model}, team);
        team.wait();
        for (int64_t row = team.thread; row < s.n; row += team.n_threads) {
            float *from = added + row * s.d_model, *to = x + row * s.d_model;
            normalize(norm, m.layer_norm, m.eps, m.d_model, from, from);
            for (int64_t i = 0; i < m.d_model; i += LANES)
                store(to + i, load(to + i) + load(from + i) * m.residual_scale);
        }
    };

    for (int64_t row = team.thread; row < s.n; row += team.n_threads)
        embed(m, b, row, data(of_pair), x + row * s.d_model);
    team.wait();
    watch(&Watched::stream, 0, x, s.d_model, m.d_model);
    for (const Layer *layer = m.layers; layer < m.layers + m.n_layers; layer++) {
        Rows &in = norm1.of(m, layer->norm1, x, team);
        if (m.parallel) norm2.of(m, layer->norm2, x, team); // before `out` adds to x
        product(layer->query, in, {qkv, s.d_qkv}, team);
        product(layer->key, in, {qkv + d_query, s.d_qkv}, team);
        product(layer->value, in, {qkv + d_query + d_key, s.d_qkv}, team);
        team.wait();
        const auto attention_in = m.cache_kind == INT8   ? attention<int8_t>
                                  : m.cache_kind == BF16 ? attention<BFloat>
                                                         : attention<float>;
        attention_in(m, *layer, b, qkv, s.d_qkv, data(s.attended), s.d_heads, room, team);
        team.wait();
        const int64_t i = layer - m.layers;
        watch(&Watched::mixed, i, data(s.attended), s.d_heads, d_query);
        attended.made = inner.made = Rows::NOTHING;
        add(layer->out, layer->norm1_after, attended);
        if (!m.parallel || b.watched) team.wait();
        watch(&Watched::stream, 2 * i + 1, x, s.d_model, m.d_model);
        if (!m.parallel) norm2.of(m, layer->norm2, x, team);
        const float *gate = layer->gate.weight ? data(s.gate) : nullptr;
        if (gate) product(layer->gate, norm2.rows, {data(s.gate), s.d_ff}, team);
        product(layer->up, norm2.rows, {inner.x, s.d_ff, 1, false, m.activation, gate}, team);
        team.wait();
        watch(&Watched::neurons, i, inner.x, s.d_ff, m.d_ff);
        add(layer->down, layer->norm2_after, inner);
        team.wait();
        watch(&Watched::stream, 2 * i + 2, x, s.d_model, m.d_model);
    }
    if (!b.n_wanted) return;
    last.of(m, m.norm, x, team, b.wanted);
    last.rows.prepare(m.head.kind, team);
    if (b.features && team.thread == 0)
        for (int64_t r = 0; r < b.n_wanted; r++)
            std::copy_n(last.rows.x + r * s.d_model, m.d_model, b.features + r * m.d_model);
    if (b.logits) product(m.head, last.rows, {b.logits, m.head.n, m.logit_scale}, team);
}

} // namespace

void kernels::step(const Model &m, const Batch &b, int64_t n_threads) {
    Shared shared(m, b);
    parallel(n_threads, [&](const Team &team) { ::step(m, b, shared, team); });
}

namespace {

void logits(const Model &m, const float *features, int64_t n, float *out, int64_t n_threads) {
    const int64_t width = m.d_model, stride = padded(width);
    Buffer x(n * stride / LANES);
    for (int64_t row = 0; row < n; row++) std::copy_n(features + row * width, width, data(x) + row * stride);
    Rounded common;
    if (n >= MANY) common.make_room(n, stride);
    parallel(n_threads, [&](const Team &team) {
#ifdef AMX
        const amx::Registers registers;
#endif
        Rows rows(n, stride, data(x), n >= MANY ? &common : nullptr);
        product(m.head, rows, {out, m.head.n}, team);
    });
}

// --------------------------------------------------------------------------------------------------- what is refused

constexpr int64_t MOST_WIDTH = 1 << 24; // of a model's dimensions: products of two stay far from overflow

void expect_bytes(const char *name, const void *at, int64_t bytes, int64_t due) {
    if (!at || bytes < due) fail(REFUSED, "%s has %" PRId64 " bytes and must have %" PRId64, name, at ? bytes : 0, due);
}

void check(const char *name, const Matrix &m, int64_t rows, int64_t columns) {
    within(name, m.kind, FP32, INT4);
    const bool fits = m.n == rows && m.k >= columns && m.k <= padded(columns);
    if (!fits || (m.kind == INT4 ? m.k % GROUPED : m.row_bytes() % 64))
        fail(REFUSED, "%s is [%" PRId64 ", %" PRId64 "] and must be [%" PRId64 ", %" PRId64 "], with whole lines", name,
             m.n, m.k, rows, columns);
    const int64_t widest = widest_panel(m.kind), in_memory = m.panel ? (m.n + LANES - 1) / LANES * LANES : m.n;
    if (widest ? m.panel < LANES || m.panel > widest || m.panel % LANES : m.panel != 0)
        fail(REFUSED, "%s has panels of %" PRId64 " rows, of at most %" PRId64, name, m.panel, widest);
    expect_bytes(name, m.weight, m.weight_bytes, in_memory * m.row_bytes());
    if (m.kind == INT8) expect_bytes(name, m.scale, m.scale_bytes, 4 * m.n);
    if (m.kind == INT4) expect_bytes(name, m.scale, m.scale_bytes, 2 * in_memory * (m.k / GROUPED));
    if (m.bias) expect_bytes(name, m.bias, m.bias_bytes, 4 * m.n);
}

void check(const char *name, const Norm &norm, int64_t width, bool may_miss) {
    if ((norm.weight || !may_miss) && (!norm.weight || norm.width != width))
        fail(REFUSED, "%s has %" PRId64 " weights and must have %" PRId64, name, norm.weight ? norm.width : 0, width);
}

void check_head(const Model &m) {
    within("d_model", m.d_model, LANES, MOST_WIDTH), within("vocabulary", m.embedding.n, 1, MOST_WIDTH);
    check("head", m.head, m.embedding.n, m.d_model);
}

} // namespace

void kernels::check_model(const Model &m) {
    const std::pair<const char *, int64_t> positive[] = {
        {"n_heads", m.n_heads}, {"n_groups", m.n_groups}, {"d_head", m.d_head},     {"d_ff", m.d_ff},
        {"n_slots", m.n_slots}, {"capacity", m.capacity}, {"n_layers", m.n_layers},
    };
    for (const auto &[name, value] : positive) within(name, value, 1, MOST_WIDTH);
    check_head(m);
    if (m.d_model % LANES || m.d_head % LANES || m.d_ff % LANES || m.n_heads % m.n_groups)
        fail(REFUSED,
             "d_model %" PRId64 ", d_head %" PRId64 " and d_ff %" PRId64
             " must be multiples of 16, and n_heads %" PRId64 " one of n_groups %" PRId64,
             m.d_model, m.d_head, m.d_ff, m.n_heads, m.n_groups);
    within("activation", m.activation, 0, N_FUNCTIONS - 1), within("layer_norm", m.layer_norm, 0, 1);
    within("parallel", m.parallel, 0, 1), within("d_rotary", m.d_rotary, 0, m.d_head);
    if (m.cache_kind != FP32 && m.cache_kind != BF16 && m.cache_kind != INT8)
        fail(REFUSED, "cache_kind is %" PRId64 " and must be float32, bfloat16 or int8", m.cache_kind);
    check("embedding", m.embedding, m.embedding.n, m.d_model);
    if (m.position) expect_bytes("position", m.position, m.position_bytes, 4 * m.capacity * m.d_model);
    if (m.pairs.weight) {
        check("pairs", m.pairs, within("pairs", m.pairs.n, 2, MOST_WIDTH), m.d_model);
        expect_bytes("history", m.history, m.history_bytes, 4 * m.n_slots * m.capacity);
    }
    check("norm", m.norm, m.d_model, false);
    if (!m.layers) fail(REFUSED, "layers are missing");
    const int64_t d_query = m.n_heads * m.d_head, d_key = m.n_groups * m.d_head;
    within("n_heads times d_head", d_query, 1, MOST_WIDTH);
    int64_t n_scales = 0, n_cached = 0;
    if (__builtin_mul_overflow(m.n_slots * m.n_groups, m.room(), &n_scales) || n_scales > MOST ||
        __builtin_mul_overflow(n_scales, m.d_head * bytes_of(m.cache_kind), &n_cached))
        fail(REFUSED, "n_slots %" PRId64 " times capacity %" PRId64 " is too much", m.n_slots, m.capacity);
    for (const Layer *layer = m.layers; layer < m.layers + m.n_layers; layer++) {
        check("norm1", layer->norm1, m.d_model, false), check("norm2", layer->norm2, m.d_model, false);
        for (const Norm *norm : {&layer->norm1_after, &layer->norm2_after}) {
            check("norm_after", *norm, m.d_model, true);
            if (!norm->weight != !m.layers->norm1_after.weight)
                fail(REFUSED, "some layers have norms after attention and MLP and others have none");
        }
        check("query_norm", layer->query_norm, m.d_head, true), check("key_norm", layer->key_norm, m.d_head, true);
        check("query", layer->query, d_query, m.d_model), check("key", layer->key, d_key, m.d_model);
        check("value", layer->value, d_key, m.d_model), check("out", layer->out, m.d_model, d_query);
        check("up", layer->up, m.d_ff, m.d_model), check("down", layer->down, m.d_model, m.d_ff);
        if (!layer->gate.weight != !m.layers->gate.weight)
            fail(REFUSED, "some layers have a gate and others have none");
        if (layer->gate.weight) check("gate", layer->gate, m.d_ff, m.d_model);
        expect_bytes("keys", layer->keys, layer->cache_bytes, n_cached);
        expect_bytes("values", layer->values, layer->cache_bytes, n_cached);
        if (m.cache_kind == INT8) {
            expect_bytes("key_scales", layer->key_scales, layer->scale_bytes, 4 * n_scales);
            expect_bytes("value_scales", layer->value_scales, layer->scale_bytes, 4 * n_scales);
        }
        within("window", layer->window, 1, MOST);
        if (const int64_t rotates = within("rotates", layer->rotates, 0, 2)) {
            const int64_t due = 4 * m.capacity * (m.d_rotary / 2);
            expect_bytes("cos", rotates == 1 ? m.cos : m.window_cos, m.rotary_bytes, due);
            expect_bytes("sin", rotates == 1 ? m.sin : m.window_sin, m.rotary_bytes, due);
        }
    }
}

namespace {

const int64_t *numbers(const char *name, const Tensor *x, int64_t n, int64_t end) {
    const int64_t *values = laid_out(name, x, INT64, {n}).as<const int64_t>();
    for (int64_t i = 0; i < n; i++)
        if (values[i] < 0 || values[i] >= end)
            fail(OUT_OF_RANGE, "%s has %" PRId64 " and must be from 0 to %" PRId64, name, values[i], end - 1);
    return values;
}

// Checks that the rows of a text are adjacent and their positions consecutive; returns the number of texts.
int64_t n_texts_of(const Batch &b, int64_t n_slots) {
    std::vector<bool> seen(n_slots);
    int64_t n = 0;
    for (int64_t row = 0; row < b.n_rows; row++) {
        const int64_t slot = b.slots[row];
        if (row && slot == b.slots[row - 1]) {
            if (b.positions[row] != b.positions[row - 1] + 1)
                fail(REFUSED, "positions of slot %" PRId64 " do not follow one another", slot);
            continue;
        }
        if (seen[slot]) fail(REFUSED, "rows of slot %" PRId64 " do not follow one another", slot);
        seen[slot] = true, n++;
    }
    return n;
}

} // namespace

Batch kernels::checked_rows(const Model &m, const Tensor *tokens, const Tensor *slots, const Tensor *positions) {
    Batch b{};
    b.n_rows = sound("tokens", tokens).n_elements();
    within("rows", b.n_rows, 1, MOST_WIDTH);
    b.tokens = numbers("tokens", tokens, b.n_rows, m.embedding.n);
    b.slots = numbers("slots", slots, b.n_rows, m.n_slots);
    b.positions = numbers("positions", positions, b.n_rows, m.capacity);
    b.n_texts = n_texts_of(b, m.n_slots);
    return b;
}

// ---------------------------------------------------------------------------------------------------- what is called

// Returns the sizes of structures, and the names of dtypes and activations in the order of their numbers.
extern "C" const char *gptworks_layout() noexcept {
    static char text[512];
    size_t at = std::snprintf(text, sizeof text, "Tensor %zu, Matrix %zu, Norm %zu, Layer %zu, Model %zu; kinds",
                              sizeof(Tensor), sizeof(Matrix), sizeof(Norm), sizeof(Layer), sizeof(Model));
    for (const char *name : KINDS) at += std::snprintf(text + at, sizeof text - at, " %s", name);
    at += std::snprintf(text + at, sizeof text - at, "; functions");
    for (const char *name : FUNCTIONS) at += std::snprintf(text + at, sizeof text - at, " %s", name);
    return text;
}

// Uses AMX from now on if the system permits AMX and AMX computes correctly; returns whether AMX is used.
extern "C" int gptworks_take_amx() noexcept {
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

// Returns what this library was built with. Bit 1: vectors of 64 bytes; bit 2: of 32 bytes; bit 3: products of bytes;
// bit 4: of bf16; bit 5: of 16-bit integers.
extern "C" int gptworks_built_with() noexcept {
    int bits = REGISTER == 64 ? 2 : REGISTER == 32 ? 4 : 0;
#ifdef INTEGER_PRODUCTS
    bits |= 8;
#endif
#ifdef WIDE_INTEGER_PRODUCTS
    bits |= 32;
#endif
#ifdef BF16_PRODUCTS
    bits |= 16;
#endif
    return bits;
}

// Returns the largest number of rows in a panel of this kind of weights; 0: they are stored row by row.
extern "C" int64_t gptworks_widest_panel(int64_t kind) noexcept { return widest_panel(kind); }

// Computes one step. tokens, slots, positions: int64 [rows]. wanted: int64 [n], the rows whose results are wanted.
// logits: float32 [n, vocabulary]; features, the head's inputs: float32 [n, d_model]. Each may be null.
extern "C" int gptworks_step(const Model *model, const Tensor *tokens, const Tensor *slots, const Tensor *positions,
                             const Tensor *wanted, const Tensor *logits, const Tensor *features,
                             int64_t n_threads) noexcept {
    return guarded([=] {
        if (!model) fail(REFUSED, "the model is missing");
        check_model(*model);
        Batch b = checked_rows(*model, tokens, slots, positions);
        b.n_wanted = within("wanted", sound("wanted", wanted).n_elements(), 0, b.n_rows);
        b.wanted = numbers("wanted", wanted, b.n_wanted, b.n_rows);
        b.logits = logits ? laid_out("logits", logits, FP32, {b.n_wanted, model->head.n}).as<float>() : nullptr;
        b.features =
            features ? laid_out("features", features, FP32, {b.n_wanted, model->d_model}).as<float>() : nullptr;
        step(*model, b, threads(n_threads));
    });
}

// Computes float32 logits [n, vocabulary] of float32 features [n, d_model], which already include the logits' scale.
extern "C" int gptworks_logits(const Model *model, const Tensor *features, const Tensor *out,
                               int64_t n_threads) noexcept {
    return guarded([=] {
        if (!model) fail(REFUSED, "the model is missing");
        check_head(*model);
        const int64_t n = sound("features", features).n_dimensions ? features->sizes[0] : 0;
        laid_out("features", features, FP32, {n, model->d_model}), laid_out("logits", out, FP32, {n, model->head.n});
        logits(*model, features->as<const float>(), n, out->as<float>(), threads(n_threads));
    });
}
