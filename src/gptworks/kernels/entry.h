// How Python calls the kernels: with tensors that say what they are, and threads that may fail.
//
// Every function that the library exports is `extern "C" int gptworks_NAME(…) noexcept { return guarded([&] { … }); }`:
// it checks all that it is given before it reads or writes, throws what it refuses, and returns a code;
// gptworks_error() has the text. entries.py has the same signatures, structures and numbers, and compares them when it
// loads the library.

#pragma once

#include <cinttypes>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <new>

namespace [[gnu::visibility("hidden")]] kernels {

enum Code : int { DONE, REFUSED, OUT_OF_RANGE, NO_MEMORY, FAILED };

// What is thrown, in one piece, so that it goes from any thread to the caller without memory.
struct Failure {
    Code code = DONE;
    char text[240] = {};
};

inline thread_local Failure last; // of this thread's calls, in whichever source

[[noreturn, gnu::format(printf, 2, 3), gnu::cold]] inline void fail(Code code, const char *format, ...) {
    Failure failure;
    failure.code = code;
    va_list values;
    va_start(values, format);
    std::vsnprintf(failure.text, sizeof failure.text, format, values);
    va_end(values);
    throw failure;
}

// The exception that is being handled.
inline Failure caught() noexcept {
    Failure failure;
    try {
        throw;
    } catch (const Failure &it) {
        return it;
    } catch (const std::bad_alloc &) {
        failure.code = NO_MEMORY;
    } catch (const std::exception &it) {
        failure.code = FAILED;
        std::snprintf(failure.text, sizeof failure.text, "%s", it.what());
    } catch (...) {
        failure.code = FAILED;
    }
    return failure;
}

template<class F> int guarded(const F &work) noexcept {
    try {
        work();
        return DONE;
    } catch (...) {
        last = caught();
        return last.code;
    }
}

// -------------------------------------------------------------------------------------------------------- tensors

enum Kind : int64_t { FP32, BF16, FP16, INT8, INT4, INT64 }; // INT4: two in a byte
constexpr const char *KINDS[] = {"float32", "bfloat16", "float16", "int8", "uint8", "int64"};
constexpr int64_t N_KINDS = sizeof KINDS / sizeof *KINDS;

constexpr int64_t bytes_of(int64_t kind) { // of an element
    return kind == FP32 ? 4 : kind == BF16 || kind == FP16 ? 2 : kind == INT64 ? 8 : 1;
}

constexpr int64_t MOST_DIMENSIONS = 5;
constexpr int64_t MOST = int64_t(1) << 40; // of a size or a stride: products of two or three stay far from overflow
constexpr int64_t MOST_THREADS = 1024;

struct [[gnu::visibility("default")]] Tensor { // of exported functions: hidden, it would hide them
    char *data;
    int64_t kind, n_dimensions, sizes[MOST_DIMENSIONS], strides[MOST_DIMENSIONS]; // strides: in elements

    int64_t size(int64_t i) const { return sizes[i < 0 ? n_dimensions + i : i]; }
    int64_t stride(int64_t i) const { return strides[i < 0 ? n_dimensions + i : i]; }
    int64_t n_elements() const {
        int64_t n = 1;
        for (int64_t i = 0; i < n_dimensions; i++) n *= sizes[i];
        return n;
    }
    template<class T> T *as() const { return (T *)data; }
};

// "float32 [2, 3]", in a buffer that the caller has.
struct Text {
    char text[96];

    static Text of(int64_t kind, const int64_t *sizes, int64_t n) {
        Text out;
        size_t at = std::snprintf(out.text, sizeof out.text, "%s [", kind < N_KINDS ? KINDS[kind] : "?");
        for (int64_t i = 0; i < n && at < sizeof out.text; i++)
            at += std::snprintf(out.text + at, sizeof out.text - at, i ? ", %" PRId64 : "%" PRId64, sizes[i]);
        if (at < sizeof out.text) std::snprintf(out.text + at, sizeof out.text - at, "]");
        return out;
    }
    static Text of(const Tensor &x) { return of(x.kind, x.sizes, x.n_dimensions); }
};

// Refuses a tensor that cannot be one: then nothing about it overflows.
inline const Tensor &sound(const char *name, const Tensor *x) {
    if (!x) fail(REFUSED, "%s is missing", name);
    bool right = x->kind >= 0 && x->kind < N_KINDS && x->n_dimensions >= 0 && x->n_dimensions <= MOST_DIMENSIONS;
    int64_t n = 1, last = 0;
    for (int64_t i = 0; right && i < x->n_dimensions; i++) {
        right = x->sizes[i] >= 0 && x->sizes[i] <= MOST && x->strides[i] >= 0 && x->strides[i] <= MOST &&
                !__builtin_mul_overflow(n, x->sizes[i], &n) && n <= MOST;
        int64_t far = 0;
        right = right && !__builtin_mul_overflow(x->sizes[i], x->strides[i], &far) &&
                !__builtin_add_overflow(last, far, &last) && last <= MOST;
    }
    if (!right)
        fail(REFUSED, "%s is no tensor that the kernels can read: a size, a stride or its dtype is out of bounds",
             name);
    if (n && (!x->data || (uintptr_t)x->data % bytes_of(x->kind)))
        fail(REFUSED, "%s has no memory, or begins amid an element", name);
    return *x;
}

// Refuses a tensor of another dtype or shape.
inline const Tensor &shaped(const char *name, const Tensor *given, int64_t kind, std::initializer_list<int64_t> sizes) {
    const Tensor &x = sound(name, given);
    const bool right = x.kind == kind && x.n_dimensions == (int64_t)sizes.size() &&
                       std::memcmp(x.sizes, sizes.begin(), sizes.size() * sizeof(int64_t)) == 0;
    if (!right)
        fail(REFUSED, "%s is %s and must be %s", name, Text::of(x).text,
             Text::of(kind, sizes.begin(), sizes.size()).text);
    return x;
}

// Whether elements lie one after the other, in order, from some dimension on. Strides of a single element are nothing.
inline bool is_contiguous(const Tensor &x, int64_t from = 0) {
    int64_t apart = 1;
    for (int64_t i = x.n_dimensions - 1; i >= from; apart *= x.sizes[i--])
        if (x.sizes[i] != 1 && x.strides[i] != apart && x.n_elements()) return false;
    return true;
}

inline const Tensor &contiguous(const char *name, const Tensor &x, int64_t from = 0) {
    if (!is_contiguous(x, from)) fail(REFUSED, "%s %s must be contiguous", name, Text::of(x).text);
    return x;
}

// Contiguous, of a dtype and shape.
inline const Tensor &laid_out(const char *name, const Tensor *given, int64_t kind,
                              std::initializer_list<int64_t> sizes) {
    return contiguous(name, shaped(name, given, kind, sizes));
}

// Whether x fills its memory: as it is, or with its middle dimensions exchanged.
inline bool is_exchanged(const Tensor &x) {
    if (x.n_dimensions != 4) return false;
    Tensor y = x;
    y.sizes[1] = x.sizes[2], y.sizes[2] = x.sizes[1], y.strides[1] = x.strides[2], y.strides[2] = x.strides[1];
    return is_contiguous(y);
}

inline const Tensor &dense(const char *name, const Tensor *given) {
    const Tensor &x = sound(name, given);
    if (!is_contiguous(x) && !is_exchanged(x))
        fail(REFUSED, "%s %s must be contiguous, or stored with its middle dimensions exchanged", name,
             Text::of(x).text);
    return x;
}

// What is written to: no two elements in one place.
inline const Tensor &apart(const char *name, const Tensor &x) {
    bool done[MOST_DIMENSIONS] = {};
    for (int64_t turn = 0, last = 0; turn < x.n_dimensions && x.n_elements(); turn++) {
        int64_t next = -1; // the dimension with the smallest stride
        for (int64_t i = 0; i < x.n_dimensions; i++)
            if (!done[i] && (next < 0 || x.strides[i] < x.strides[next])) next = i;
        done[next] = true;
        if (x.sizes[next] == 1) continue;
        if (x.strides[next] <= last) fail(REFUSED, "elements of %s %s overlap", name, Text::of(x).text);
        last += (x.sizes[next] - 1) * x.strides[next];
    }
    return x;
}

// Of x's shape, its elements in the same places.
inline const Tensor &like(const char *name, const Tensor *given, const Tensor &x) {
    const Tensor &y = sound(name, given);
    bool right = y.n_dimensions == x.n_dimensions;
    for (int64_t i = 0; right && i < x.n_dimensions; i++)
        right = y.sizes[i] == x.sizes[i] && (y.sizes[i] == 1 || y.strides[i] == x.strides[i] || !x.n_elements());
    if (!right)
        fail(REFUSED, "%s is %s and must have the shape and layout of %s", name, Text::of(y).text, Text::of(x).text);
    return y;
}

// The same, of the same dtype.
inline const Tensor &same(const char *name, const Tensor *given, const Tensor &x) {
    const Tensor &y = like(name, given, x);
    if (y.kind != x.kind) fail(REFUSED, "%s is %s and must be %s", name, KINDS[y.kind], KINDS[x.kind]);
    return y;
}

// ------------------------------------------------------------------------------------------------------- numbers

inline int64_t within(const char *name, int64_t x, int64_t least, int64_t most) {
    if (x < least || x > most)
        fail(REFUSED, "%s is %" PRId64 " and must be from %" PRId64 " to %" PRId64, name, x, least, most);
    return x;
}

// More are never of use, and some systems end the process where there are more than they grant.
inline int64_t threads(int64_t n) { return within("n_threads", n, 1, MOST) < MOST_THREADS ? n : MOST_THREADS; }

} // namespace kernels
