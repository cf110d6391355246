// Vectors of 16 float32 lanes, the same on every processor, and basic operations on them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#ifdef __AVX2__
#pragma GCC diagnostic push
#if defined(__GNUC__) && !defined(__clang__) // GCC 12 warns of its own header (GCC bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif
#ifdef __ARM_NEON
#include <arm_neon.h>
#endif
#ifdef __wasm_simd128__
#include <wasm_simd128.h>
#endif
#if (defined(__AVX512VNNI__) && defined(__AVX512BW__)) || defined(__ARM_FEATURE_DOTPROD)
#define INTEGER_PRODUCTS // of 8 bits
#elif defined(__AVX2__) && defined(__F16C__) && defined(__FMA__) && (defined(__AVX512BW__) || !defined(__AVX512F__))
#define WIDE_INTEGER_PRODUCTS // of 16 bits
#elif defined(__wasm_simd128__)
#define WIDE_INTEGER_PRODUCTS
#endif
#ifdef __AVX512BF16__
#define BF16_PRODUCTS
#endif

#define INLINE inline __attribute__((always_inline))
#define EACH __attribute__((always_inline))

namespace [[gnu::visibility("hidden")]] kernels {

constexpr int64_t LANES = 16;

// Calls f(0) … f(N − 1), unrolled: accumulators whose index the compiler knows stay in registers.
template<int... I, class F> INLINE void each(std::integer_sequence<int, I...>, const F &f) {
    (f(std::integral_constant<int, I>{}), ...);
}
template<int N, class F> INLINE void repeat(const F &f) { each(std::make_integer_sequence<int, N>{}, f); }

// Calls f(0, …, N − 1) once.
template<int... I, class F> INLINE void with(std::integer_sequence<int, I...>, const F &f) {
    f(std::integral_constant<int, I>{}...);
}
template<int N, class F> INLINE void at_once(const F &f) { with(std::make_integer_sequence<int, N>{}, f); }

typedef float Quad __attribute__((vector_size(16)));
typedef int8_t Bytes __attribute__((vector_size(16)));

// Bytes of a vector register, and number of registers. They decide how many sums a product keeps in registers.
#if defined(__AVX512F__)
constexpr int64_t REGISTER = 64, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int64_t REGISTER = 32, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int64_t REGISTER = 16, REGISTERS = 32;
#else
constexpr int64_t REGISTER = 16, REGISTERS = 16;
#endif
constexpr bool MANY_REGISTERS = REGISTER * REGISTERS >= 2048;
constexpr bool FEW_REGISTERS = REGISTER * REGISTERS <= 256;
constexpr int PARTS = 64 / REGISTER; // registers that 16 lanes take

typedef float Floats __attribute__((vector_size(REGISTER)));
typedef int32_t Ints __attribute__((vector_size(REGISTER)));
typedef uint32_t Words __attribute__((vector_size(REGISTER)));

#ifdef __AVX512F__
typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t IntLanes __attribute__((vector_size(64)));

inline Lanes all(float x) { return x - Lanes{}; } // x − 0 takes no instruction; 0 + x would, because of −0
inline Lanes choose(IntLanes where, Lanes a, Lanes b) { return where ? a : b; }
inline IntLanes bits_of(Lanes x) { return (IntLanes)x; }
inline Lanes lanes_of(IntLanes bits) { return (Lanes)bits; }
inline Lanes load(const float *p) {
    Lanes x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
inline void store(float *p, Lanes x) { std::memcpy(p, &x, sizeof x); }
#else
// With shorter registers, 16 lanes take several registers. A vector type of 64 bytes would also work, but the compiler
// keeps vectors that no register holds in memory: products ran at an eighth of the speed.
template<class T> struct Vector {
    typedef T Part __attribute__((vector_size(REGISTER)));
    Part part[PARTS];

    T operator[](int i) const {
        T values[LANES];
        std::memcpy(values, part, sizeof values);
        return values[i];
    }
};
typedef Vector<float> Lanes;
typedef Vector<int32_t> IntLanes;

template<class To, class F> INLINE To by_part(const F &f) {
    To out;
    repeat<PARTS>([&](auto i) EACH { out.part[i] = f(i); });
    return out;
}
#define OPERATOR(op)                                                                                                   \
    template<class T> INLINE Vector<T> operator op(Vector<T> a, Vector<T> b) {                                         \
        return by_part<Vector<T>>([&](auto i) EACH { return a.part[i] op b.part[i]; });                                \
    }                                                                                                                  \
    template<class T> INLINE Vector<T> operator op(Vector<T> a, T b) {                                                 \
        return by_part<Vector<T>>([&](auto i) EACH { return a.part[i] op b; });                                        \
    }                                                                                                                  \
    template<class T> INLINE Vector<T> operator op(T a, Vector<T> b) {                                                 \
        return by_part<Vector<T>>([&](auto i) EACH { return a op b.part[i]; });                                        \
    }
OPERATOR(+)
OPERATOR(-)
OPERATOR(*)
OPERATOR(/)
OPERATOR(<<)
OPERATOR(>>)
OPERATOR(&)
OPERATOR(^)
#undef OPERATOR
template<class T> INLINE Vector<T> &operator+=(Vector<T> &a, Vector<T> b) { return a = a + b; }
INLINE Lanes operator-(Lanes a) {
    return by_part<Lanes>([&](auto i) EACH { return -a.part[i]; });
}
#define COMPARISON(op)                                                                                                 \
    INLINE IntLanes operator op(Lanes a, Lanes b) {                                                                    \
        return by_part<IntLanes>([&](auto i) EACH { return a.part[i] op b.part[i]; });                                 \
    }                                                                                                                  \
    INLINE IntLanes operator op(Lanes a, float b) {                                                                    \
        return by_part<IntLanes>([&](auto i) EACH { return a.part[i] op b; });                                         \
    }
COMPARISON(<)
COMPARISON(>)
COMPARISON(==)
COMPARISON(!=)
#undef COMPARISON

INLINE Lanes all(float x) {
    return by_part<Lanes>([&](auto) EACH { return x - Lanes::Part{}; });
}
INLINE Lanes choose(IntLanes where, Lanes a, Lanes b) {
    return by_part<Lanes>([&](auto i) EACH { return where.part[i] ? a.part[i] : b.part[i]; });
}
INLINE IntLanes bits_of(Lanes x) {
    return by_part<IntLanes>([&](auto i) EACH { return (IntLanes::Part)x.part[i]; });
}
INLINE Lanes lanes_of(IntLanes bits) {
    return by_part<Lanes>([&](auto i) EACH { return (Lanes::Part)bits.part[i]; });
}
INLINE Lanes load(const float *p) {
    return by_part<Lanes>([&](auto i) EACH {
        Lanes::Part part;
        std::memcpy(&part, p + i * (REGISTER / 4), sizeof part);
        return part;
    });
}
INLINE void store(float *p, Lanes x) {
    repeat<PARTS>([&](auto i) EACH { std::memcpy(p + i * (REGISTER / 4), &x.part[i], sizeof x.part[i]); });
}
#endif

typedef std::vector<Lanes> Buffer; // aligned, zeroed

// If the first argument is NaN, the result is NaN, so that NaN propagates.
#ifdef __AVX512F__
INLINE Lanes larger(Lanes a, Lanes b) { return (Lanes)_mm512_max_ps((__m512)b, (__m512)a); }
INLINE Lanes smaller(Lanes a, Lanes b) { return (Lanes)_mm512_min_ps((__m512)b, (__m512)a); }
#else
INLINE Lanes larger(Lanes a, Lanes b) { return choose(b > a, b, a); }
INLINE Lanes smaller(Lanes a, Lanes b) { return choose(b < a, b, a); }
#endif
INLINE int32_t bits_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
INLINE Lanes magnitude(Lanes x) { return lanes_of(bits_of(x) & 0x7fffffff); }

struct BFloat {
    uint16_t bits;

    operator float() const {
        const uint32_t wide = (uint32_t)bits << 16;
        float x;
        std::memcpy(&x, &wide, sizeof x);
        return x;
    }
};
inline Lanes load(const BFloat *p) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#elif defined(__AVX2__)
    return by_part<Lanes>([&](auto i) EACH {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p + 8 * i)));
        return (Lanes::Part)_mm256_slli_epi32(wide, 16);
    });
#elif defined(__ARM_NEON)
    return by_part<Lanes>([&](auto i)
                              EACH { return (Lanes::Part)vshll_n_u16(vld1_u16((const uint16_t *)(p + 4 * i)), 16); });
#elif defined(__wasm_simd128__)
    return by_part<Lanes>([&](auto i) EACH { return (Lanes::Part)wasm_i32x4_shl(wasm_u32x4_load16x4(p + 4 * i), 16); });
#else
    float wide[LANES];
    for (int i = 0; i < LANES; i++) wide[i] = p[i];
    return load(wide);
#endif
}
inline void store(BFloat *p, Lanes x) { // rounded to the nearest bf16, ties to even; NaN stays NaN
#ifdef BF16_PRODUCTS
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    const IntLanes bits = bits_of(x), odd = (bits >> 16) & 1;
    const IntLanes rounded = bits_of(choose(x == x, lanes_of(bits + 0x7fff + odd), all(NAN))) >> 16;
    for (int i = 0; i < LANES; i++) p[i].bits = (uint16_t)rounded[i];
#endif
}

INLINE Lanes widen(Bytes x) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)x));
#elif defined(__AVX2__)
    const __m128i both[2] = {(__m128i)x, _mm_srli_si128((__m128i)x, 8)};
    return by_part<Lanes>([&](auto i) EACH { return (Lanes::Part)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(both[i])); });
#elif defined(__ARM_NEON)
    const int16x8_t low = vmovl_s8(vget_low_s8((int8x16_t)x)), high = vmovl_s8(vget_high_s8((int8x16_t)x));
    const int32x4_t four[4] = {vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)),
                               vmovl_s16(vget_low_s16(high)), vmovl_s16(vget_high_s16(high))};
    return by_part<Lanes>([&](auto i) EACH { return (Lanes::Part)vcvtq_f32_s32(four[i]); });
#else
    float wide[LANES];
    for (int i = 0; i < LANES; i++) wide[i] = x[i];
    return load(wide);
#endif
}
inline Lanes load(const int8_t *p) {
    Bytes x;
    std::memcpy(&x, p, sizeof x);
    return widen(x);
}

struct Half {
    uint16_t bits;

    operator float() const {
        const bool finite = (bits & 0x7c00) != 0x7c00;
        const uint32_t wide = (uint32_t)(bits & 0x7fff) << 13 | (finite ? 0 : 0x7f800000);
        float x;
        std::memcpy(&x, &wide, sizeof x);
        if (finite) x *= 0x1p112f; // moves the exponent's bias from 15 to 127, subnormal numbers included
        return bits & 0x8000 ? -x : x;
    }
};
inline Lanes load(const Half *p) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__) && defined(__F16C__)
    return by_part<Lanes>(
        [&](auto i) EACH { return (Lanes::Part)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8 * i))); });
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return by_part<Lanes>([&](auto i) EACH {
        return (Lanes::Part)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)(p + 4 * i))));
    });
#else
    float wide[LANES];
    for (int i = 0; i < LANES; i++) wide[i] = p[i];
    return load(wide);
#endif
}

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define MASKS
INLINE __mmask16 lower(int64_t n) { return (__mmask16)((1u << n) - 1); } // the first n lanes
#endif

// Read or write the first n lanes, or all 16 if n is larger. Lanes that are not read are zero.
template<class T> INLINE Lanes read(const T *p, int64_t n) {
    if (n >= LANES) return load(p);
#ifdef MASKS
    if constexpr (sizeof(T) == 4) return (Lanes)_mm512_maskz_loadu_ps(lower(n), p);
    if constexpr (sizeof(T) == 2)
        return (Lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lower(n), p)), 16);
#endif
    T some[LANES] = {};
    for (int64_t i = 0; i < n; i++) some[i] = p[i];
    return load(some);
}
template<class T> INLINE void write(T *p, Lanes x, int64_t n) {
    if (n >= LANES) return store(p, x);
#ifdef MASKS
    if constexpr (sizeof(T) == 4) return _mm512_mask_storeu_ps(p, lower(n), (__m512)x);
#endif
    T some[LANES];
    store(some, x);
#ifdef MASKS
    return _mm256_mask_storeu_epi16(p, lower(n), _mm256_loadu_si256((const __m256i *)some));
#endif
    for (int64_t i = 0; i < n; i++) p[i] = some[i];
}
INLINE Lanes first(Lanes x, int64_t n) {
    if (n >= LANES) return x;
    float some[LANES];
    store(some, x);
    return read(some, n);
}

INLINE Lanes to_floats(IntLanes x) {
#ifdef __AVX512F__
    return __builtin_convertvector(x, Lanes);
#else
    return by_part<Lanes>([&](auto i) EACH { return __builtin_convertvector(x.part[i], Floats); });
#endif
}

#ifdef INTEGER_PRODUCTS
// Adds to `sums` the products of the words' four bytes with the four signed bytes of another word. With UNSIGNED_BYTES,
// as on x86, the words' bytes are read as unsigned: the caller adds 128 to signed bytes.
INLINE Ints add_bytes(Ints sums, Ints words, int32_t word) {
#ifdef __AVX512F__
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)words, _mm512_set1_epi32(word));
#else
    return (Ints)vdotq_s32((int32x4_t)sums, (int8x16_t)words, vreinterpretq_s8_s32(vdupq_n_s32(word)));
#endif
}
#ifdef __AVX512F__
constexpr bool UNSIGNED_BYTES = true;
#else
constexpr bool UNSIGNED_BYTES = false;
#endif
#endif

// Prefetches lines of memory that are read soon, in order, a few at each step.
struct Ahead {
    const char *at, *end;
    int64_t at_once;

    INLINE void fetch() {
        for (const char *const until = at + std::min<int64_t>(64 * at_once, end - at); at < until; at += 64)
            __builtin_prefetch(at, 0, 2);
    }
};

#ifdef __AVX512F__
// Transposes 16 × 16 words.
INLINE void transpose(__m512i (&x)[16]) {
    __m512i y[16];
    repeat<8>([&](auto i) EACH {
        y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    });
    repeat<4>([&](auto i) EACH { // then x[4 i + c] holds columns c, 4 + c, 8 + c and 12 + c of rows 4 i to 4 i + 3
        repeat<2>([&](auto j) EACH {
            x[4 * i + 2 * j] = _mm512_unpacklo_epi64(y[4 * i + j], y[4 * i + j + 2]);
            x[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(y[4 * i + j], y[4 * i + j + 2]);
        });
    });
    repeat<4>([&](auto c) EACH {
        repeat<2>([&](auto half) EACH {
            constexpr int EVEN = 0x88, ODD = 0xdd, PLACES = half ? ODD : EVEN;
            const __m512i low = _mm512_shuffle_i32x4(x[c], x[4 + c], PLACES);
            const __m512i high = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], PLACES);
            y[4 * half + c] = _mm512_shuffle_i32x4(low, high, EVEN);
            y[8 + 4 * half + c] = _mm512_shuffle_i32x4(low, high, ODD);
        });
    });
    repeat<16>([&](auto i) EACH { x[i] = y[i]; });
}
#endif

// Transposes ROWS × 16 words.
template<int64_t ROWS = LANES, class Word>
INLINE void transpose(const Word *from, int64_t from_stride, Word *to, int64_t to_stride) {
#ifdef __AVX512F__
    static_assert(ROWS == LANES);
    __m512i x[16];
    repeat<16>([&](auto i) EACH { x[i] = _mm512_loadu_si512(from + i * from_stride); });
    transpose(x);
    repeat<16>([&](auto i) EACH { _mm512_storeu_si512(to + i * to_stride, x[i]); });
#else
#ifdef __AVX2__
    if constexpr (ROWS == LANES) { // in quarters
        for (int64_t j = 0; j < LANES; j += 8)
            for (int64_t i = 0; i < LANES; i += 8) {
                __m256 x[8], y[8];
                repeat<8>([&](auto r)
                              EACH { x[r] = _mm256_loadu_ps((const float *)(from + (i + r) * from_stride + j)); });
                repeat<4>([&](auto r) EACH {
                    y[2 * r] = _mm256_unpacklo_ps(x[2 * r], x[2 * r + 1]);
                    y[2 * r + 1] = _mm256_unpackhi_ps(x[2 * r], x[2 * r + 1]);
                });
                repeat<4>([&](auto r) EACH {
                    constexpr int first = r / 2 * 4 + r % 2;
                    x[r / 2 * 4 + r % 2 * 2] = _mm256_shuffle_ps(y[first], y[first + 2], 0x44);
                    x[r / 2 * 4 + r % 2 * 2 + 1] = _mm256_shuffle_ps(y[first], y[first + 2], 0xee);
                });
                repeat<4>([&](auto r) EACH {
                    _mm256_storeu_ps((float *)(to + (j + r) * to_stride + i),
                                     _mm256_permute2f128_ps(x[r], x[4 + r], 0x20));
                    _mm256_storeu_ps((float *)(to + (j + 4 + r) * to_stride + i),
                                     _mm256_permute2f128_ps(x[r], x[4 + r], 0x31));
                });
            }
        return;
    }
#endif
    for (int64_t i = 0; i < ROWS; i++)
        for (int64_t j = 0; j < LANES; j++) to[j * to_stride + i] = from[i * from_stride + j];
#endif
}

// Returns the sum of each of four vectors' lanes. Lanes are added in pairs, then pairs of pairs, and so on; in PAIRED,
// paired lanes are neighbors.
#ifdef __AVX512F__
constexpr int PAIRED[LANES] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};
#else
constexpr int PAIRED[LANES] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
#endif
INLINE Quad sums(const Lanes (&v)[4]) {
    const Lanes a = v[0], b = v[1], c = v[2], d = v[3];
#ifdef __AVX512F__
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)a, (__m512)b), _mm512_unpackhi_ps((__m512)a, (__m512)b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)c, (__m512)d), _mm512_unpackhi_ps((__m512)c, (__m512)d));
    const __m512 abcd = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(abcd),
                                     _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(abcd), 1)));
    return (Quad)_mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1));
#else
    const auto one = [](Lanes v) EACH {
        float x[LANES];
        store(x, v);
        for (int gap = LANES / 2; gap; gap /= 2)
            for (int i = 0; i < gap; i++) x[i] += x[i + gap];
        return x[0];
    };
    return Quad{one(a), one(b), one(c), one(d)};
#endif
}

inline float sum(Lanes v) { return sums({v, Lanes{}, Lanes{}, Lanes{}})[0]; }

} // namespace kernels
