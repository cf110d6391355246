// How Python calls the kernels: with tensors that say what they are, and threads that may fail.
//
// Every function that the library exports is `extern "C" int gptworks_NAME(…) noexcept { return guarded([&] { … }); }`:
// it checks all arguments before it reads or writes tensors, throws a Failure if it refuses one, and returns a code;
// gptworks_error() has the text. entries.py has the same signatures, structures and numbers, and compares them when it
// loads the library.

#pragma once

#include <cinttypes>
#include <cstdint>
#include <initializer_list>

namespace [[gnu::visibility("hidden")]] kernels {

enum Code : int { DONE, REFUSED, OUT_OF_RANGE, NO_MEMORY, FAILED };

// What is thrown: of fixed size, so that it gets from any thread to the caller without an allocation.
struct Failure {
    Code code = DONE;
    char text[240] = {};
};

[[noreturn, gnu::format(printf, 2, 3)]] void fail(Code code, const char *format, ...);

// The exception that is being handled.
Failure caught() noexcept;

// The code of the exception that is being handled, whose text gptworks_error() has from now on.
int failed() noexcept;

template<class F> int guarded(const F &work) noexcept {
#ifndef __cpp_exceptions // as in WebAssembly: `fail` ends the call, see entry.cpp
    work();
    return DONE;
#else
    try {
        work();
        return DONE;
    } catch (...) {
        return failed();
    }
#endif
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

    static Text of(int64_t kind, const int64_t *sizes, int64_t n);
    static Text of(const Tensor &x) { return of(x.kind, x.sizes, x.n_dimensions); }
};

// Refuses a missing tensor, and one with an impossible dtype, size, stride or address, so that nothing computed from it
// overflows.
const Tensor &sound(const char *name, const Tensor *x);

// Refuses a tensor of another dtype or shape.
const Tensor &shaped(const char *name, const Tensor *given, int64_t kind, std::initializer_list<int64_t> sizes);

// Whether elements lie one after the other, in order, from some dimension on. Strides of a single element are nothing.
bool is_contiguous(const Tensor &x, int64_t from = 0);

const Tensor &contiguous(const char *name, const Tensor &x, int64_t from = 0);

// Refuses a tensor that is not contiguous, or has another dtype or shape.
const Tensor &laid_out(const char *name, const Tensor *given, int64_t kind, std::initializer_list<int64_t> sizes);

// Whether x has four dimensions and is contiguous with the middle two exchanged.
bool is_exchanged(const Tensor &x);

const Tensor &dense(const char *name, const Tensor *given);

// Refuses an output in which two elements share memory.
const Tensor &apart(const char *name, const Tensor &x);

// Refuses a tensor whose shape or layout differs from x's.
const Tensor &like(const char *name, const Tensor *given, const Tensor &x);

// The same; the dtype must equal x's too.
const Tensor &same(const char *name, const Tensor *given, const Tensor &x);

// ------------------------------------------------------------------------------------------------------- numbers

int64_t within(const char *name, int64_t x, int64_t least, int64_t most);

// More threads are never of use, and some systems end a process that asks for more than they grant.
inline int64_t threads(int64_t n) { return within("n_threads", n, 1, MOST) < MOST_THREADS ? n : MOST_THREADS; }

} // namespace kernels
