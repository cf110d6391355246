// How the sums of a product become results.

#pragma once

#include "functions.h"
#include "matrix.h"

namespace [[gnu::visibility("hidden")]] kernels {

// Where the results of sums are stored, and how they are computed: out = (sum · scale + bias) · times, plus the
// previous out if `add`. With an activation, then out = activation(out); with a gate too, out = activation(gate) · out.
struct Result {
    float *out;
    int64_t stride;
    float times = 1;
    bool add = false;
    int64_t activation = NO_FUNCTION;
    const float *gate = nullptr;

    // Applies the activation to these rows and columns, which are complete and still in a cache.
    void finish(int64_t row_from, int64_t row_to, int64_t from, int64_t end) const {
        if (activation == NO_FUNCTION) return;
        for (int64_t row = row_from; row < row_to; row++)
            for (int64_t i = row * stride + from; i < row * stride + end; i += LANES) {
                const Lanes x = load(out + i);
                store(out + i, gate ? activate(load(gate + i), activation) * x : activate(x, activation));
            }
    }
};

// Up to 16 columns of a result.
struct Columns {
    int64_t first, width;
    Lanes scale = all(1), bias = {};

    Columns(const Matrix &m, int64_t first, int64_t end) : first(first), width(std::min(LANES, end - first)) {
        if (m.kind == INT8) copy(&scale, (const float *)m.scale + first);
        if (m.bias) copy(&bias, m.bias + first);
    }
    INLINE void put(Lanes sum, int64_t row, const Result &to) const {
        float *at = to.out + row * to.stride + first;
        Lanes before = {};
        if (to.add) copy(&before, at);
        const Lanes value = (sum * scale + bias) * to.times + before;
        copy(at, &value);
    }
    INLINE void copy(void *to, const void *from) const {
        if (width == LANES)
            std::memcpy(to, from, sizeof(Lanes));
        else
            std::memcpy(to, from, width * sizeof(float));
    }
};

// Writes the results of rows [from, to) and columns [first, end). sum(r, v): the sums of the r-th of these rows and the
// v-th 16 columns.
template<class F>
INLINE void put(const Matrix &m, const Result &result, int64_t first, int64_t end, int64_t from, int64_t to,
                const F &sum) {
    for (int64_t v = 0; first + v * LANES < end; v++) {
        const Columns columns(m, first + v * LANES, end);
        for (int64_t row = from; row < to; row++) columns.put(sum(row - from, v), row, result);
    }
}

// Does the same as `put` for up to ROWS rows and 16 · VECTORS columns, whose sums stay in registers.
template<int ROWS, int VECTORS, class F>
INLINE void put_each(const Matrix &m, const Result &result, int64_t first, int64_t end, int64_t from, int64_t to,
                     const F &sum) {
    repeat<VECTORS>([&](auto v) EACH {
        if (first + v * LANES >= end) return;
        const Columns columns(m, first + v * LANES, end);
        repeat<ROWS>([&](auto r) EACH {
            if (from + r < to) columns.put(sum(r, v), from + r, result);
        });
    });
}

} // namespace kernels
