// See entry.h.

#include "entry.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

using namespace kernels;

namespace {

thread_local Failure last; // the last failure of this thread's calls

} // namespace

void kernels::fail(Code code, const char *format, ...) {
    Failure failure;
    failure.code = code;
    va_list values;
    va_start(values, format);
    std::vsnprintf(failure.text, sizeof failure.text, format, values);
    va_end(values);
#ifdef __cpp_exceptions
    throw failure;
#else // the trap ends the call; the caller reads the text as after a returned code
    last = failure;
    __builtin_trap();
#endif
}

#ifdef __cpp_exceptions
Failure kernels::caught() noexcept {
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

int kernels::failed() noexcept {
    last = caught();
    return last.code;
}
#endif

Text Text::of(int64_t kind, const int64_t *sizes, int64_t n) {
    Text out;
    size_t at = std::snprintf(out.text, sizeof out.text, "%s [", kind < N_KINDS ? KINDS[kind] : "?");
    for (int64_t i = 0; i < n && at < sizeof out.text; i++)
        at += std::snprintf(out.text + at, sizeof out.text - at, i ? ", %" PRId64 : "%" PRId64, sizes[i]);
    if (at < sizeof out.text) std::snprintf(out.text + at, sizeof out.text - at, "]");
    return out;
}

const Tensor &kernels::sound(const char *name, const Tensor *x) {
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

const Tensor &kernels::shaped(const char *name, const Tensor *given, int64_t kind,
                              std::initializer_list<int64_t> sizes) {
    const Tensor &x = sound(name, given);
    const bool right = x.kind == kind && x.n_dimensions == (int64_t)sizes.size() &&
                       std::memcmp(x.sizes, sizes.begin(), sizes.size() * sizeof(int64_t)) == 0;
    if (!right)
        fail(REFUSED, "%s is %s and must be %s", name, Text::of(x).text,
             Text::of(kind, sizes.begin(), sizes.size()).text);
    return x;
}

bool kernels::is_contiguous(const Tensor &x, int64_t from) {
    int64_t apart = 1;
    for (int64_t i = x.n_dimensions - 1; i >= from; apart *= x.sizes[i--])
        if (x.sizes[i] != 1 && x.strides[i] != apart && x.n_elements()) return false;
    return true;
}

const Tensor &kernels::contiguous(const char *name, const Tensor &x, int64_t from) {
    if (!is_contiguous(x, from)) fail(REFUSED, "%s %s must be contiguous", name, Text::of(x).text);
    return x;
}

const Tensor &kernels::laid_out(const char *name, const Tensor *given, int64_t kind,
                                std::initializer_list<int64_t> sizes) {
    return contiguous(name, shaped(name, given, kind, sizes));
}

bool kernels::is_exchanged(const Tensor &x) {
    if (x.n_dimensions != 4) return false;
    Tensor y = x;
    y.sizes[1] = x.sizes[2], y.sizes[2] = x.sizes[1], y.strides[1] = x.strides[2], y.strides[2] = x.strides[1];
    return is_contiguous(y);
}

const Tensor &kernels::dense(const char *name, const Tensor *given) {
    const Tensor &x = sound(name, given);
    if (!is_contiguous(x) && !is_exchanged(x))
        fail(REFUSED, "%s %s must be contiguous, or stored with its middle dimensions exchanged", name,
             Text::of(x).text);
    return x;
}

const Tensor &kernels::apart(const char *name, const Tensor &x) {
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

const Tensor &kernels::like(const char *name, const Tensor *given, const Tensor &x) {
    const Tensor &y = sound(name, given);
    bool right = y.n_dimensions == x.n_dimensions;
    for (int64_t i = 0; right && i < x.n_dimensions; i++)
        right = y.sizes[i] == x.sizes[i] && (y.sizes[i] == 1 || y.strides[i] == x.strides[i] || !x.n_elements());
    if (!right)
        fail(REFUSED, "%s is %s and must have the shape and layout of %s", name, Text::of(y).text, Text::of(x).text);
    return y;
}

const Tensor &kernels::same(const char *name, const Tensor *given, const Tensor &x) {
    const Tensor &y = like(name, given, x);
    if (y.kind != x.kind) fail(REFUSED, "%s is %s and must be %s", name, KINDS[y.kind], KINDS[x.kind]);
    return y;
}

int64_t kernels::within(const char *name, int64_t x, int64_t least, int64_t most) {
    if (x < least || x > most)
        fail(REFUSED, "%s is %" PRId64 " and must be from %" PRId64 " to %" PRId64, name, x, least, most);
    return x;
}

// Returns the text of this thread's last error.
extern "C" const char *gptworks_error() noexcept { return last.text; }
