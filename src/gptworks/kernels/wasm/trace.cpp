// What a page shows of a text's computation: intermediate values of a step, the logit lens, and the contribution of
// each part of the model to a token's logit.

#include "../products.h"
#include "../step.h"
#include "../threads.h"

#include <cmath>

using namespace kernels;

namespace {

// Memory for rows [n, k] of a product, with a padded stride.
struct Padded {
    int64_t n, stride;
    Buffer x;
    Rounded common;

    Padded(int64_t n, int64_t k) : n(n), stride(padded(k)), x(n * stride / LANES) {
        if (n >= MANY) common.make_room(n, stride);
    }
    float *row(int64_t i) { return (float *)x.data() + i * stride; }
    Rows rows() { return {n, stride, row(0), n >= MANY ? &common : nullptr}; } // each thread needs its own
};

// Writes the logits of n rows of the residual stream to `out`.
void lens(const Model &m, const float *stream, int64_t n, float *out, int64_t n_threads) {
    Padded features(n, m.d_model);
    for (int64_t i = 0; i < n; i++)
        normalize(m.norm, m.layer_norm, m.eps, m.d_model, stream + i * m.d_model, features.row(i));
    parallel(n_threads, [&](const Team &team) {
        Rows rows = features.rows();
        product(m.head, rows, {out, m.head.n, m.logit_scale}, team);
    });
}

double dot(const float *a, const double *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// Computes how much a part of row x adds along a direction after a norm. The norm's divisor is fixed at that of x, so
// that the norm is a linear map. A norm without a weight is skipped.
struct Reader {
    std::vector<double> direction;
    double constant = 0; // what the norm's bias adds

    template<class Number>
    Reader(const Model &m, const Norm &norm, const float *x, const Number *after, double scale) : direction(m.d_model) {
        for (int64_t i = 0; i < m.d_model; i++) direction[i] = scale * after[i];
        if (!norm.weight) return;
        double mean = 0, square = 0, middle = 0;
        for (int64_t i = 0; m.layer_norm && i < m.d_model; i++) mean += x[i];
        mean /= m.d_model;
        for (int64_t i = 0; i < m.d_model; i++) square += (x[i] - mean) * (x[i] - mean);
        const double factor = 1 / std::sqrt(square / m.d_model + m.eps);
        for (int64_t i = 0; i < m.d_model; i++) {
            if (norm.bias) constant += norm.bias[i] * direction[i];
            middle += direction[i] *= factor * norm.weight[i];
        }
        for (int64_t i = 0; m.layer_norm && i < m.d_model; i++) direction[i] -= middle / m.d_model;
    }
    float of(const float *part) const { return dot(part, &direction[0], direction.size()); }
};

// Writes the parts to `out` in the order of gptworks_parts. stream: [2 n_layers + 1, d_model]. mixed: [n_layers,
// n_heads * d_head].
void parts(const Model &m, int64_t token, int64_t position, int64_t of, const float *stream, const float *mixed,
           float *out, const Team &team) {
    const int64_t width = m.d_model, d_query = m.n_heads * m.d_head;
    std::vector<float> part(width);
    read_row(m.head, of, width, &part[0]);
    const Reader logit(m, m.norm, stream + 2 * m.n_layers * width, &part[0], m.logit_scale);
    read_row(m.embedding, token, width, &part[0]);
    const float embedding = logit.of(&part[0]) * m.embedding_scale;
    const float place = m.position ? logit.of(m.position + position * width) : NAN;
    *out++ = embedding;
    *out++ = m.pairs.weight ? logit.of(stream) - embedding - (m.position ? place : 0) : NAN; // the rest of the input
    *out++ = place;
    Padded alone(m.n_heads + 1, d_query), given(m.n_heads + 1, width); // a head's output in each row; 0 in the last
    for (const Layer *layer = m.layers; layer < m.layers + m.n_layers; layer++, stream += 2 * width, mixed += d_query) {
        for (int64_t i = 0; i < m.n_heads; i++)
            std::copy_n(mixed + i * m.d_head, m.d_head, alone.row(i) + i * m.d_head);
        Rows rows = alone.rows();
        product(layer->out, rows, {given.row(0), given.stride}, team);
        for (int64_t i = 0; i < width; i++) {
            part[i] = given.row(m.n_heads)[i]; // the bias and all heads
            for (int64_t head = 0; head < m.n_heads; head++) part[i] += given.row(head)[i] - given.row(m.n_heads)[i];
        }
        const Norm &after = layer->norm1_after;
        const Reader reads(m, after, &part[0], &logit.direction[0], m.residual_scale);
        const float bias = reads.of(given.row(m.n_heads));
        for (int64_t i = 0; i < m.n_heads; i++) *out++ = reads.of(given.row(i)) - bias;
        *out++ = layer->out.bias || after.bias ? bias + reads.constant : NAN;
        for (int64_t i = 0; i < width; i++) part[i] = stream[2 * width + i] - stream[width + i];
        *out++ = logit.of(&part[0]);
    }
    *out++ = m.norm.bias ? logit.constant : NAN;
}

const Model &checked(const Model *model) {
    if (!model) fail(REFUSED, "the model is missing");
    check_model(*model);
    return *model;
}

} // namespace

// Computes a step for the rows, and writes the intermediate values that `Watched` describes. tokens, slots, positions:
// int64 [rows]. The other tensors are float32. attention: [n_layers, n_heads, rows, keys], keys a multiple of 32.
extern "C" int gptworks_watch(const Model *model, const Tensor *tokens, const Tensor *slots, const Tensor *positions,
                              const Tensor *stream, const Tensor *attention, const Tensor *mixed, const Tensor *neurons,
                              int64_t n_threads) noexcept {
    return guarded([=] {
        const Model &m = checked(model);
        Batch b = checked_rows(m, tokens, slots, positions);
        const int64_t n = b.n_rows, n_keys = sound("attention", attention).size(-1);
        if (n_keys % 32) fail(REFUSED, "attention has %" PRId64 " keys and must have a multiple of 32", n_keys);
        for (int64_t row = 0; row < n; row++) within("position", b.positions[row], 0, n_keys - 1);
        const Watched watched{
            laid_out("stream", stream, FP32, {2 * m.n_layers + 1, n, m.d_model}).as<float>(),
            laid_out("attention", attention, FP32, {m.n_layers, m.n_heads, n, n_keys}).as<float>(),
            laid_out("mixed", mixed, FP32, {m.n_layers, n, m.n_heads * m.d_head}).as<float>(),
            laid_out("neurons", neurons, FP32, {m.n_layers, n, m.d_ff}).as<float>(),
            n_keys,
        };
        std::fill_n(watched.attention, attention->n_elements(), 0.0f);
        b.watched = &watched;
        step(m, b, threads(n_threads));
    });
}

// Computes the logits [n, vocabulary] of rows [n, d_model] of the residual stream, by the final norm and the head.
extern "C" int gptworks_lens(const Model *model, const Tensor *stream, const Tensor *out, int64_t n_threads) noexcept {
    return guarded([=] {
        const Model &m = checked(model);
        const int64_t n = sound("stream", stream).n_dimensions ? stream->sizes[0] : 0;
        laid_out("stream", stream, FP32, {n, m.d_model}), laid_out("logits", out, FP32, {n, m.head.n});
        lens(m, stream->as<const float>(), n, out->as<float>(), threads(n_threads));
    });
}

// Computes what each part adds to the logit of token `of` after `token` at `position`, with the final norm's divisor
// held fixed. stream [2 n_layers + 1, d_model] and mixed [n_layers, n_heads * d_head] are this token's values from
// gptworks_watch. out: [4 + n_layers * (n_heads + 2)], in this order: the embedding, the pair of tokens, the position;
// for each layer, its heads, their projection's bias and the MLP; the final norm's bias. Missing parts are NaN.
extern "C" int gptworks_parts(const Model *model, int64_t token, int64_t position, int64_t of, const Tensor *stream,
                              const Tensor *mixed, const Tensor *out) noexcept {
    return guarded([=] {
        const Model &m = checked(model);
        within("token", token, 0, m.embedding.n - 1), within("of", of, 0, m.head.n - 1);
        within("position", position, 0, m.capacity - 1);
        laid_out("stream", stream, FP32, {2 * m.n_layers + 1, m.d_model});
        laid_out("mixed", mixed, FP32, {m.n_layers, m.n_heads * m.d_head});
        laid_out("parts", out, FP32, {4 + m.n_layers * (m.n_heads + 2)});
        parallel(1, [&](const Team &team) {
            parts(m, token, position, of, stream->as<const float>(), mixed->as<const float>(), out->as<float>(), team);
        });
    });
}
