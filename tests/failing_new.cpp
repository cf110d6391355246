// To be preloaded: has an allocation by the native kernels fail. Those of other libraries are as ever.

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

static std::atomic<long> left{-1};

// The n-th allocation from now on fails, and every later one; −1: none.
extern "C" int fail_after(int n) { return (int)left.exchange(n); }

static bool fails(const void *caller) {
    if (left.load() < 0) return false;
    Dl_info info;
    if (!dladdr(caller, &info) || !info.dli_fname || !std::strstr(info.dli_fname, "kernels-")) return false;
    for (long now = left.load(); now > 0;)
        if (left.compare_exchange_weak(now, now - 1)) return false;
    return left.load() == 0;
}

static void *given(void *at) {
    if (!at) throw std::bad_alloc();
    return at;
}

void *operator new(std::size_t n) {
    if (fails(__builtin_return_address(0))) throw std::bad_alloc();
    return given(std::malloc(n ? n : 1));
}
void *operator new[](std::size_t n) {
    if (fails(__builtin_return_address(0))) throw std::bad_alloc();
    return given(std::malloc(n ? n : 1));
}
void *operator new(std::size_t n, std::align_val_t a) {
    if (fails(__builtin_return_address(0))) throw std::bad_alloc();
    return given(std::aligned_alloc((std::size_t)a, (n + (std::size_t)a - 1) / (std::size_t)a * (std::size_t)a));
}
void *operator new[](std::size_t n, std::align_val_t a) {
    if (fails(__builtin_return_address(0))) throw std::bad_alloc();
    return given(std::aligned_alloc((std::size_t)a, (n + (std::size_t)a - 1) / (std::size_t)a * (std::size_t)a));
}
void operator delete(void *p) noexcept { std::free(p); }
void operator delete[](void *p) noexcept { std::free(p); }
void operator delete(void *p, std::size_t) noexcept { std::free(p); }
void operator delete[](void *p, std::size_t) noexcept { std::free(p); }
void operator delete(void *p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void *p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void *p, std::size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void *p, std::size_t, std::align_val_t) noexcept { std::free(p); }
