// How Python calls the kernels: tensors with their dtypes and shapes, and errors as return codes.
//
// Every function that the library exports is `extern "C" int gptworks_NAME(…) noexcept { return guarded([&] { … }); }`:
// it checks all arguments before it reads or writes tensors, throws a Failure if it refuses one, and returns a code.
// gptworks_error() returns the error's text. entries.py has the same signatures, structures and numbers; when a library
// is loaded, entries.py compares the result of gptworks_layout().

#pragma once

#include <cinttypes>
#include <cstdint>
#include <initializer_list>

namespace [[gnu::visibility("hidden")]] kernels {

enum Code : int { DONE, REFUSED, OUT_OF_RANGE, NO_MEMORY, FAILED };

// The exception that `fail` throws. Its size is fixed, so that any thread can pass it to the caller without allocation.
struct Failure {
    Code code = DONE;
    char text[240] = {};
};

[[noreturn, gnu::format(printf, 2, 3)]] void fail(Code code, const char *format, ...);

// Returns the exception that is being handled, as a Failure.
Failure caught() noexcept;

// Returns the code of the exception that is being handled, and keeps its text for gptworks_error().
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
constexpr int64_t MOST = int64_t(1) << 40; // largest size, stride or number of elements, far from overflow
constexpr int64_t MOST_THREADS = 1024;

struct [[gnu::visibility("default")]] Tensor { // not hidden, since exported functions take it
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

// A dtype and shape as text, such as "float32 [2, 3]", without an allocation.
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

// Whether the dimensions from `from` on are contiguous. Strides of dimensions of size 1 do not matter.
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

// Refuses what `like` refuses, and another dtype than x's.
const Tensor &same(const char *name, const Tensor *given, const Tensor &x);

// ------------------------------------------------------------------------------------------------------- numbers

int64_t within(const char *name, int64_t x, int64_t least, int64_t most);

// Returns n, or MOST_THREADS if n is larger: more threads are of no use, and some systems would end the process.
inline int64_t threads(int64_t n) { return within("n_threads", n, 1, MOST) < MOST_THREADS ? n : MOST_THREADS; }

} // namespace kernels
