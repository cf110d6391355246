// The operations between matrix products in training, forward and backward. Built by build.py, called by passes.py.
//
// Inputs and outputs are float32 or bf16; operations compute in float32. One thread computes each element, or each row,
// in one order. A sum over rows adds the sums of up to BLOCKS blocks of rows in one order, whatever the number of
// threads. So no result depends on the number of threads. NaN stays NaN.

#include <algorithm>

#include "functions.h"
#include "threads.h"

using namespace kernels;

namespace {

constexpr int64_t BLOCKS = 64;     // of rows, each with its own sum
constexpr int64_t GRAIN = 1 << 14; // elements for which a thread is worth waking
constexpr int64_t IGNORED = -100;  // a target that does not count, as in gptworks.config

// Calls f with a value of a tensor's type: float32 or bf16.
template<class F> void typed(const char *name, const Tensor &x, const F &f) {
    if (x.kind == FP32) return f(float{});
    if (x.kind == BF16) return f(BFloat{});
    fail(REFUSED, "%s is %s and must be float32 or bfloat16", name, KINDS[x.kind]);
}

int64_t threads_for(int64_t n_elements, int64_t n_threads) {
    return std::max<int64_t>(1, std::min(n_threads, n_elements / GRAIN));
}

// Calls f(i, n) for n elements from i on, up to 16 at a time.
template<class F> void over(int64_t n_elements, int64_t n_threads, const F &f) {
    parallel(threads_for(n_elements, n_threads), [&](const Team &team) {
        const auto [from, to] = team.share((n_elements + LANES - 1) / LANES);
        const int64_t whole = std::min(to, n_elements / LANES);
        for (int64_t i = from; i < whole; i++) f(i * LANES, LANES);
        if (whole < to) f(whole * LANES, n_elements - whole * LANES);
    });
}

// ----------------------------------------------------------------------------------------------------- activations

template<class F> void with_function(int64_t function, const F &f) {
    switch (within("function", function, 0, N_FUNCTIONS - 1)) {
    case GELU:
        return f(std::integral_constant<int64_t, GELU>{});
    case GELU_TANH:
        return f(std::integral_constant<int64_t, GELU_TANH>{});
    case RELU2:
        return f(std::integral_constant<int64_t, RELU2>{});
    default:
        return f(std::integral_constant<int64_t, SILU>{});
    }
}

// ----------------------------------------------------------------------------------------------------------- norms

// LayerNorm of rows [n_rows, width], or RMSNorm if `layer` is 0. The rows are x, or x + alpha · branch.
struct Norm {
    int64_t layer, n_rows, width, n_threads;
    float eps, alpha;
    const float *weight, *bias; // bias may be null
    float *mean, *scale;        // [n_rows]; mean is null where layer is 0
};

template<class X, class Y, class Out> void normalize(const Norm &m, const X *x, const Y *branch, X *stream, Out *out) {
    const int64_t width = m.width;
    parallel(threads_for(m.n_rows * width, m.n_threads), [&](const Team &team) {
        Buffer row((width + LANES - 1) / LANES);
        const auto [from, to] = team.share(m.n_rows);
        for (int64_t r = from; r < to; r++) {
            Lanes total = {};
            for (int64_t i = 0; i < width; i += LANES) {
                const int64_t n = width - i;
                Lanes v = read(x + r * width + i, n);
                if (branch) {
                    v = v + m.alpha * read(branch + r * width + i, n);
                    write(stream + r * width + i, v, n);
                }
                row[i / LANES] = v;
                total += v;
            }
            const float mean = m.layer ? sum(total) / width : 0;
            const float scale = scale_to_one([&](int64_t i) EACH { return row[i / LANES]; }, mean, width, m.eps);
            if (m.layer) m.mean[r] = mean;
            m.scale[r] = scale;
            for (int64_t i = 0; i < width; i += LANES) {
                const int64_t n = width - i;
                Lanes y = (row[i / LANES] - mean) * scale * read(m.weight + i, n);
                if (m.bias) y += read(m.bias + i, n);
                write(out + r * width + i, y, n);
            }
        }
    });
}

// d_stream: the other gradient of x + alpha · branch, or null. d_branch: null without a branch.
template<class X, class Y, class Out>
void normalize_backward(const Norm &m, const Out *d_out, const X *d_stream, const X *x, X *d_x, Y *d_branch,
                        float *d_weight, float *d_bias) {
    const int64_t width = m.width, n_lanes = (width + LANES - 1) / LANES;
    const int64_t n_blocks = std::min(BLOCKS, m.n_rows);
    Buffer weight_sums(n_blocks * n_lanes), bias_sums(d_bias ? n_blocks * n_lanes : 0);
    parallel(threads_for(m.n_rows * width, m.n_threads), [&](const Team &team) {
        Buffer normalized(n_lanes), weighted(n_lanes);
        const auto [from, to] = team.share(n_blocks);
        for (int64_t block = from; block < to; block++)
            for (int64_t r = m.n_rows * block / n_blocks; r < m.n_rows * (block + 1) / n_blocks; r++) {
                const float mean = m.layer ? m.mean[r] : 0, scale = m.scale[r];
                Lanes total = {}, along = {};
                for (int64_t i = 0, at = 0; i < width; i += LANES, at++) {
                    const int64_t n = width - i;
                    const Lanes g = read(d_out + r * width + i, n);
                    const Lanes v = first((read(x + r * width + i, n) - mean) * scale, n);
                    const Lanes w = g * read(m.weight + i, n);
                    weight_sums[block * n_lanes + at] += g * v;
                    if (d_bias) bias_sums[block * n_lanes + at] += g;
                    total += w;
                    along += w * v;
                    normalized[at] = v;
                    weighted[at] = w;
                }
                const float shift = m.layer ? sum(total) / width : 0, share = sum(along) / width;
                for (int64_t i = 0, at = 0; i < width; i += LANES, at++) {
                    const int64_t n = width - i;
                    Lanes d = (weighted[at] - shift - normalized[at] * share) * scale;
                    if (d_stream) d += read(d_stream + r * width + i, n);
                    write(d_x + r * width + i, d, n);
                    if (d_branch) write(d_branch + r * width + i, m.alpha * d, n);
                }
            }
    });
    for (int64_t i = 0, at = 0; i < width; i += LANES, at++) {
        Lanes weight = {}, bias = {};
        for (int64_t block = 0; block < n_blocks; block++) {
            weight += weight_sums[block * n_lanes + at];
            if (d_bias) bias += bias_sums[block * n_lanes + at];
        }
        write(d_weight + i, weight, width - i);
        if (d_bias) write(d_bias + i, bias, width - i);
    }
}

// -------------------------------------------------------------------------------------------------------- rotation

// Rotation of rows [outer][length][inner][width]. Pairs (i, i + half) turn by the angle of their position; elements
// behind the pairs stay. Cosines and sines are [length, half]. If `per_table` is not 0, they are [.., length, half],
// with one table for each `per_table` outer indices. `direction` −1 turns back.
struct Rotation {
    int64_t outer, length, inner, width, half, per_table, n_threads;
    float direction;
};

template<class T> void rotate(const Rotation &o, const T *x, const T *cos, const T *sin, T *out) {
    const int64_t n_positions = o.outer * o.length, rest = o.width - 2 * o.half;
    parallel(threads_for(n_positions * o.inner * o.width, o.n_threads), [&](const Team &team) {
        const auto [from, to] = team.share(n_positions);
        for (int64_t p = from; p < to; p++) {
            const int64_t table = o.per_table ? p / o.length / o.per_table : 0;
            const int64_t angle = (table * o.length + p % o.length) * o.half;
            for (int64_t row = p * o.inner; row < (p + 1) * o.inner; row++) {
                const T *a = x + row * o.width, *b = a + o.half;
                T *to_a = out + row * o.width, *to_b = to_a + o.half;
                for (int64_t i = 0; i < o.half; i += LANES) {
                    const int64_t n = o.half - i;
                    const Lanes c = read(cos + angle + i, n), s = read(sin + angle + i, n) * o.direction;
                    const Lanes first = read(a + i, n), second = read(b + i, n);
                    write(to_a + i, first * c - second * s, n);
                    write(to_b + i, second * c + first * s, n);
                }
                if (rest) std::memcpy((void *)(to_b + o.half), b + o.half, rest * sizeof(T));
            }
        }
    });
}

// --------------------------------------------------------------------------------------------------- cross-entropy

// Writes −log softmax(row)[target] of each row of logits [n_rows, width] to `nats`, 0 if the target is negative. With
// `gradient`, overwrites the row with softmax − one-hot, times its factor unless `factors` is null, or with 0 if the
// target is negative.
template<class T>
void cross_entropy(int64_t n_rows, int64_t width, int64_t n_threads, bool gradient, T *logits, const int64_t *targets,
                   const float *factors, float *nats) {
    parallel(threads_for(n_rows * width, n_threads), [&](const Team &team) {
        Buffer powers((width + LANES - 1) / LANES);
        const auto [from, to] = team.share(n_rows);
        for (int64_t r = from; r < to; r++) {
            T *row = logits + r * width;
            const int64_t target = targets[r];
            nats[r] = 0;
            if (target < 0) {
                if (gradient) std::memset((void *)row, 0, width * sizeof(T));
                continue;
            }
            Lanes lanes = all((float)row[0]);
            for (int64_t i = 0; i + LANES <= width; i += LANES) lanes = larger(load(row + i), lanes);
            float most = row[0];
            for (int i = 0; i < LANES; i++) most = std::max(most, lanes[i]);
            for (int64_t i = width / LANES * LANES; i < width; i++) most = std::max(most, (float)row[i]);
            Lanes total = {};
            for (int64_t i = 0, at = 0; i < width; i += LANES, at++) {
                const Lanes power = first(exponential(read(row + i, width - i) - most), width - i);
                powers[at] = power;
                total += power;
            }
            const float whole = sum(total);
            nats[r] = std::log(whole) + (most - (float)row[target]);
            if (!gradient) continue;
            const float factor = factors ? factors[r] : 1, scale = factor / whole;
            for (int64_t i = 0, at = 0; i < width; i += LANES, at++) write(row + i, powers[at] * scale, width - i);
            const float missing = (powers[target / LANES][target % LANES] / whole - 1) * factor;
            write(row + target, all(missing), 1);
        }
    });
}

} // namespace

// ---------------------------------------------------------------------------------------------------- what is called

// out = function(x), or function(x) · up if `up` is not null.
extern "C" int gptworks_activate(const Tensor *x, const Tensor *up, const Tensor *out, int64_t function,
                                 int64_t n_threads) noexcept {
    return guarded([=] {
        const int64_t n = dense("x", x).n_elements(), n_at_most = threads(n_threads);
        same("out", out, *x);
        if (up) same("up", up, *x);
        with_function(function, [&](auto f) {
            typed("x", *x, [&](auto type) {
                typedef decltype(type) T;
                const T *from = x->as<T>(), *factor = up ? up->as<T>() : nullptr;
                T *to = out->as<T>();
                over(n, n_at_most, [=](int64_t i, int64_t n) EACH {
                    Lanes y = point<f()>(read(from + i, n)).value;
                    if (factor) y = y * read(factor + i, n);
                    write(to + i, y, n);
                });
            });
        });
    });
}

extern "C" int gptworks_activate_backward(const Tensor *d_out, const Tensor *x, const Tensor *up, const Tensor *d_x,
                                          const Tensor *d_up, int64_t function, int64_t n_threads) noexcept {
    return guarded([=] {
        const int64_t n = dense("x", x).n_elements(), n_at_most = threads(n_threads);
        same("d_out", d_out, *x), same("d_x", d_x, *x);
        if (up || d_up) same("up", up, *x), same("d_up", d_up, *x);
        with_function(function, [&](auto f) {
            typed("x", *x, [&](auto type) {
                typedef decltype(type) T;
                const T *from = x->as<T>(), *slope = d_out->as<T>(), *factor = up ? up->as<T>() : nullptr;
                T *to = d_x->as<T>(), *to_factor = up ? d_up->as<T>() : nullptr;
                over(n, n_at_most, [=](int64_t i, int64_t n) EACH {
                    const Point p = point<f()>(read(from + i, n));
                    Lanes g = read(slope + i, n);
                    if (factor) {
                        write(to_factor + i, g * p.value, n);
                        g = g * read(factor + i, n);
                    }
                    write(to + i, g * p.slope, n);
                });
            });
        });
    });
}

// Returns the number of a tensor's rows. Refuses rows without elements.
static int64_t rows_of(const char *name, const Tensor *x) {
    if (dense(name, x).n_dimensions < 1 || x->size(-1) < 1)
        fail(REFUSED, "%s %s has no last dimension with elements", name, Text::of(*x).text);
    return x->n_elements() / x->size(-1);
}

// With a branch, stream = x + alpha · branch, and out = norm(stream). Without a branch, out = norm(x). The norm is
// LayerNorm if there is a mean, else RMSNorm. weight, bias [width] and mean, scale [rows] are float32, with rows in the
// order of x's memory.
extern "C" int gptworks_norm(const Tensor *x, const Tensor *branch, const Tensor *weight, const Tensor *bias,
                             const Tensor *stream, const Tensor *out, const Tensor *mean, const Tensor *scale,
                             float eps, float alpha, int64_t n_threads) noexcept {
    return guarded([=] {
        const int64_t n_rows = rows_of("x", x), width = x->size(-1);
        laid_out("weight", weight, FP32, {width}), laid_out("scale", scale, FP32, {n_rows}), like("out", out, *x);
        if (bias) laid_out("bias", bias, FP32, {width});
        if (mean) laid_out("mean", mean, FP32, {n_rows});
        if (branch || stream) like("branch", branch, *x), same("stream", stream, *x);
        const Norm m = {mean != nullptr,
                        n_rows,
                        width,
                        threads(n_threads),
                        eps,
                        alpha,
                        weight->as<float>(),
                        bias ? bias->as<float>() : nullptr,
                        mean ? mean->as<float>() : nullptr,
                        scale->as<float>()};
        typed("x", *x, [&](auto x_type) {
            typed("branch", branch ? *branch : *x, [&](auto branch_type) {
                typed("out", *out, [&](auto out_type) {
                    typedef decltype(x_type) X;
                    typedef decltype(branch_type) Y;
                    normalize(m, x->as<X>(), branch ? branch->as<Y>() : (const Y *)nullptr,
                              stream ? stream->as<X>() : nullptr, out->as<decltype(out_type)>());
                });
            });
        });
    });
}

// x: the norm's input. d_stream, mean, d_branch and d_bias may be null.
extern "C" int gptworks_norm_backward(const Tensor *d_out, const Tensor *d_stream, const Tensor *x,
                                      const Tensor *weight, const Tensor *mean, const Tensor *scale, const Tensor *d_x,
                                      const Tensor *d_branch, const Tensor *d_weight, const Tensor *d_bias, float alpha,
                                      int64_t n_threads) noexcept {
    return guarded([=] {
        const int64_t n_rows = rows_of("x", x), width = x->size(-1);
        laid_out("weight", weight, FP32, {width}), laid_out("scale", scale, FP32, {n_rows});
        laid_out("d_weight", d_weight, FP32, {width}), like("d_out", d_out, *x), same("d_x", d_x, *x);
        if (d_bias) laid_out("d_bias", d_bias, FP32, {width});
        if (mean) laid_out("mean", mean, FP32, {n_rows});
        if (d_stream) same("d_stream", d_stream, *x);
        if (d_branch) like("d_branch", d_branch, *x);
        const Norm m = {mean != nullptr,     n_rows,  width,
                        threads(n_threads),  0,       alpha,
                        weight->as<float>(), nullptr, mean ? mean->as<float>() : nullptr,
                        scale->as<float>()};
        typed("x", *x, [&](auto x_type) {
            typed("d_branch", d_branch ? *d_branch : *x, [&](auto branch_type) {
                typed("d_out", *d_out, [&](auto out_type) {
                    typedef decltype(x_type) X;
                    typedef decltype(branch_type) Y;
                    normalize_backward(m, d_out->as<const decltype(out_type)>(),
                                       d_stream ? d_stream->as<const X>() : nullptr, x->as<const X>(), d_x->as<X>(),
                                       d_branch ? d_branch->as<Y>() : nullptr, d_weight->as<float>(),
                                       d_bias ? d_bias->as<float>() : nullptr);
                });
            });
        });
    });
}

// out = x + alpha · branch.
extern "C" int gptworks_add(const Tensor *x, const Tensor *branch, const Tensor *out, float alpha,
                            int64_t n_threads) noexcept {
    return guarded([=] {
        const int64_t n = dense("x", x).n_elements(), n_at_most = threads(n_threads);
        like("branch", branch, *x), same("out", out, *x);
        typed("x", *x, [&](auto x_type) {
            typed("branch", *branch, [&](auto branch_type) {
                const auto *from = x->as<const decltype(x_type)>();
                const auto *added = branch->as<const decltype(branch_type)>();
                auto *to = out->as<decltype(x_type)>();
                over(n, n_at_most, [=](int64_t i, int64_t n) EACH {
                    write(to + i, read(from + i, n) + alpha * read(added + i, n), n);
                });
            });
        });
    });
}

// x, out: [.., T, D], or [B, H, T, D] stored as [B, T, H, D]. cos, sin: [T, R / 2], or [B, 1, T, R / 2] with R ≤ D.
// direction: 1, or −1 to turn back.
extern "C" int gptworks_rotate(const Tensor *x, const Tensor *cos, const Tensor *sin, const Tensor *out,
                               float direction, int64_t n_threads) noexcept {
    return guarded([=] {
        if (dense("x", x).n_dimensions < 2) fail(REFUSED, "x %s has no positions", Text::of(*x).text);
        const int64_t length = x->size(-2), width = x->size(-1),
                      half = sound("cos", cos).n_dimensions ? cos->size(-1) : 0;
        const bool of_each = cos->n_dimensions == 4, exchanged = !is_contiguous(*x);
        if (2 * half > width || (of_each && x->n_dimensions != 4))
            fail(REFUSED, "cos %s turns more than x %s has", Text::of(*cos).text, Text::of(*x).text);
        for (const auto &[name, table] : {std::pair("cos", cos), std::pair("sin", sin)})
            if (of_each)
                laid_out(name, table, x->kind, {x->sizes[0], 1, length, half});
            else
                laid_out(name, table, x->kind, {length, half});
        same("out", out, *x);
        if (direction != 1 && direction != -1) fail(REFUSED, "direction is %g and must be 1 or -1", (double)direction);
        const int64_t inner = exchanged ? x->sizes[1] : 1, each = length * inner * width;
        const int64_t outer = each ? x->n_elements() / each : 0, per_table = of_each ? x->sizes[1] / inner : 0;
        const Rotation rotation = {outer, length, inner, width, half, per_table, threads(n_threads), direction};
        typed("x", *x, [&](auto type) {
            typedef decltype(type) T;
            rotate(rotation, x->as<const T>(), cos->as<const T>(), sin->as<const T>(), out->as<T>());
        });
    });
}

// logits [n, width]; targets int64 [n], each a column or IGNORED; factors float32 [n] or null; nats float32 [n]. If
// `gradient` is not 0, the gradient overwrites the logits. See `cross_entropy` above.
extern "C" int gptworks_cross_entropy(const Tensor *logits, const Tensor *targets, const Tensor *factors,
                                      const Tensor *nats, int64_t gradient, int64_t n_threads) noexcept {
    return guarded([=] {
        contiguous("logits", sound("logits", logits));
        if (logits->n_dimensions != 2) fail(REFUSED, "logits %s must have rows and columns", Text::of(*logits).text);
        const int64_t n_rows = logits->sizes[0], width = logits->sizes[1];
        const int64_t *target = laid_out("targets", targets, INT64, {n_rows}).as<int64_t>();
        if (factors) laid_out("factors", factors, FP32, {n_rows});
        laid_out("nats", nats, FP32, {n_rows}), within("gradient", gradient, 0, 1);
        for (int64_t r = 0; r < n_rows; r++)
            if (target[r] != IGNORED && (target[r] < 0 || target[r] >= width))
                fail(OUT_OF_RANGE,
                     "target %" PRId64 " of row %" PRId64 ": there are %" PRId64 " logits, 0 to %" PRId64 "; %" PRId64
                     " is ignored",
                     target[r], r, width, width - 1, IGNORED);
        typed("logits", *logits, [&](auto type) {
            typedef decltype(type) T;
            cross_entropy(n_rows, width, threads(n_threads), gradient != 0, logits->as<T>(), target,
                          factors ? factors->as<const float>() : nullptr, nats->as<float>());
        });
    });
}
