// The part of C++'s standard library that the decoding step uses, for WebAssembly, which has no standard library.
// build.py makes every <header> that the sources include read this file.

#pragma once

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#define PRId64 "lld"
#define NAN __builtin_nanf("")
#define INFINITY __builtin_inff()

void *operator new(size_t, void *at) noexcept;
inline void *operator new(size_t, void *at) noexcept { return at; }

namespace std {

using ::size_t;
typedef decltype(nullptr) nullptr_t;

// ------------------------------------------------------------------------------------------------------------ types

template<class T, T VALUE> struct integral_constant {
    static constexpr T value = VALUE;
    typedef T value_type;
    constexpr operator T() const { return VALUE; }
};
template<class A, class B> constexpr bool is_same_v = false;
template<class A> constexpr bool is_same_v<A, A> = true;
template<bool, class A, class B> struct conditional {
    typedef A type;
};
template<class A, class B> struct conditional<false, A, B> {
    typedef B type;
};
template<bool WHICH, class A, class B> using conditional_t = typename conditional<WHICH, A, B>::type;
template<class T> struct remove_reference {
    typedef T type;
};
template<class T> struct remove_reference<T &> {
    typedef T type;
};
template<class T> struct remove_reference<T &&> {
    typedef T type;
};
template<class T> constexpr typename remove_reference<T>::type &&move(T &&x) {
    return static_cast<typename remove_reference<T>::type &&>(x);
}

template<class T, T... I> struct integer_sequence {};
template<class T, T N> using make_integer_sequence = __make_integer_seq<integer_sequence, T, N>;

template<class T> class initializer_list { // with the layout that the compiler expects
    const T *first;
    size_t n;

public:
    constexpr initializer_list() : first(nullptr), n(0) {}
    constexpr size_t size() const { return n; }
    constexpr const T *begin() const { return first; }
    constexpr const T *end() const { return first + n; }
};

template<class A, class B> struct pair {
    A first;
    B second;
    constexpr pair(A a, B b) : first(a), second(b) {}
    template<class C, class D> constexpr pair(const pair<C, D> &other) : first(other.first), second(other.second) {}
};

// ------------------------------------------------------------------------------------------------------- algorithms

template<class T> constexpr const T &min(const T &a, const T &b) { return b < a ? b : a; }
template<class T> constexpr const T &max(const T &a, const T &b) { return a < b ? b : a; }
template<class T> constexpr const T &clamp(const T &x, const T &low, const T &high) { return min(max(x, low), high); }
template<class T, class U> T exchange(T &x, U &&to) {
    T old = move(x);
    x = to;
    return old;
}
template<class From, class N, class To> To copy_n(From from, N n, To to) {
    for (N i = 0; i < n; i++) to[i] = from[i];
    return to + n;
}
template<class At, class T> void fill(At at, At end, const T &x) {
    for (; at != end; ++at) *at = x;
}
template<class At, class N, class T> void fill_n(At at, N n, const T &x) {
    for (N i = 0; i < n; i++) at[i] = x;
}
template<class At> At max_element(At at, At end) {
    At found = at;
    for (; at != end; ++at)
        if (*found < *at) found = at;
    return found;
}

// ------------------------------------------------------------------------------------------------- numbers and memory

inline float sqrt(float x) { return __builtin_sqrtf(x); }
inline double sqrt(double x) { return __builtin_sqrt(x); }
inline float abs(float x) { return __builtin_fabsf(x); }
inline bool isnan(float x) { return x != x; }
inline bool isfinite(float x) { return __builtin_fabsf(x) < INFINITY; }
inline long lrint(float x) { return (long)__builtin_rintf(x); }

inline void *memcpy(void *to, const void *from, size_t n) { return __builtin_memcpy(to, from, n); }
inline int memcmp(const void *a, const void *b, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (((const unsigned char *)a)[i] != ((const unsigned char *)b)[i])
            return ((const unsigned char *)a)[i] < ((const unsigned char *)b)[i] ? -1 : 1;
    return 0;
}

template<class T> class vector { // of elements that can be copied byte by byte; new elements are zero
    T *first = nullptr;
    size_t n = 0, room = 0;

public:
    vector() {}
    explicit vector(size_t n) { resize(n); }
    vector(const vector &) = delete;
    vector(vector &&other) : first(exchange(other.first, nullptr)), n(other.n), room(other.room) {}
    ~vector() { operator delete(first); }

    void resize(size_t to) {
        if (to > room) reserve(to);
        if (to > n) __builtin_memset((void *)(first + n), 0, (to - n) * sizeof(T));
        n = to;
    }
    void reserve(size_t to) {
        if (to <= room) return;
        T *const old = first;
        first = (T *)operator new(to * sizeof(T));
        if (n) __builtin_memcpy((void *)first, old, n * sizeof(T));
        operator delete(old);
        room = to;
    }
    void push_back(const T &x) {
        if (n == room) reserve(n ? 2 * n : 8);
        first[n++] = x;
    }
    size_t size() const { return n; }
    T *data() { return first; }
    const T *data() const { return first; }
    T &operator[](size_t i) { return first[i]; }
    const T &operator[](size_t i) const { return first[i]; }
    T *begin() { return first; }
    T *end() { return first + n; }
};

template<class T> class unique_ptr;
template<class T> class unique_ptr<T[]> { // of elements without destructors
    T *at = nullptr;

public:
    unique_ptr() {}
    unique_ptr(const unique_ptr &) = delete;
    ~unique_ptr() { operator delete[](at); }
    void reset(T *to) {
        operator delete[](at);
        at = to;
    }
    T *get() const { return at; }
};

// ------------------------------------------------------------------------------------------------------------ threads

enum memory_order { memory_order_relaxed, memory_order_acquire, memory_order_release, memory_order_acq_rel };
template<class T> struct atomic { // WebAssembly has only sequentially consistent operations
    T x;
    atomic(T x = T()) : x(x) {}
    T load(memory_order = memory_order_relaxed) const { return __atomic_load_n(&x, __ATOMIC_SEQ_CST); }
    void store(T to, memory_order = memory_order_relaxed) { __atomic_store_n(&x, to, __ATOMIC_SEQ_CST); }
    T exchange(T to) { return __atomic_exchange_n(&x, to, __ATOMIC_SEQ_CST); }
    T fetch_add(T more, memory_order = memory_order_relaxed) { return __atomic_fetch_add(&x, more, __ATOMIC_SEQ_CST); }
};

int vsnprintf(char *to, size_t room, const char *format, va_list values);
int snprintf(char *to, size_t room, const char *format, ...);

} // namespace std
