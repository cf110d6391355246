// One decode step of a GPT on a CPU, for a few tokens of one or several texts. Built by library.py, called by backend.py.
//
//     tokens ─► embed ─► layers × ( norm ─► q k v │ attend │ out ─► + │ norm ─► MLP │ down ─► + │ ) norm ─► head ─► logits
//
// All threads walk the whole step together; a bar is a point where they wait for one another. At batch 1 a step is bound
// by reading every weight once, so a matrix is divided by rows: each thread streams its own and multiplies them with all
// activations, while the little work between (norms, rounding) is done by every thread for itself rather than waited for.
//
// What a token gets never depends on its neighbours in the batch: each (weight row, activation row) has accumulators of
// its own, filled in one order by one expression, whatever the number of rows. Nothing here may be built with -ffast-math.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __AVX2__
#include <immintrin.h>
#endif
#ifdef __ARM_NEON
#include <arm_neon.h>
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define INTEGER_PRODUCTS
#endif
#ifdef __AVX512BF16__
#define BF16_PRODUCTS
#endif

#define INLINE inline __attribute__((always_inline))
#define EACH __attribute__((always_inline))

namespace {

// ------------------------------------------------------------------------------ what backend.py hands over (ctypes)

enum Kind : int64_t { FP32, BF16, FP16, INT8, INT4 };
enum Activation : int64_t { GELU, GELU_TANH, RELU2, SWIGLU, GEGLU };

struct Matrix {  // [n, k], row by row; see quantize/formats.py for the kinds
    const void *weight, *scale;
    const float *bias;
    int64_t n, k, kind;
};

struct Norm {
    const float *weight, *bias;  // weight null: no norm here; bias may be null
};

struct Layer {
    Norm norm1, norm2, query_norm, key_norm;
    Matrix query, key, value, out, gate, up, down;  // gate.weight null: the MLP has none
    void *keys;                                     // [slots, groups, capacity, d_head]
    float *key_scales;                              // int8: [slots, groups, capacity rounded up to 16]
    void *values;
    float *value_scales;
    int64_t window;                                 // keys a query sees, its own included
    int64_t rotates;                                // whether positions turn queries and keys
};

struct Model {
    int64_t d_model, n_heads, n_groups, d_head, d_ff, d_rotary, capacity, n_layers;
    int64_t activation, layer_norm, parallel, cache_kind;
    float eps, scale, embedding_scale, residual_scale, logit_scale;
    Matrix embedding, head;
    const float *position;    // [capacity, d_model], or null
    const float *cos, *sin;   // [capacity, d_rotary / 2], or null
    Norm norm;
    const Layer *layers;
};

struct Batch {
    int64_t n_rows, n_texts, n_wanted;
    const int64_t *tokens, *slots, *positions;  // of each row
    const int64_t *wanted;                      // rows that want logits
    float *logits;                              // [n_wanted, vocabulary]
};

// ------------------------------------------------------------------------------------------------ vectors of 16 lanes

constexpr int64_t LANES = 16;
constexpr int64_t TILE = 4;            // weight rows multiplied at once: enough chains to hide an FMA's latency
constexpr int64_t UNIT = 16;           // weight rows that one thread takes at once: a cache line of results
constexpr int64_t CHUNK = 128;         // activations are padded with zeros to a multiple of this
constexpr int64_t FAR = 20480;         // bytes ahead that memory is asked for the second cache,
constexpr int64_t NEAR = 2048;         // and this one for the first
constexpr int64_t CACHED = 512 << 10;  // bytes of activations that a core's second cache keeps while weights pass

// Calls f(0) … f(N − 1), written out: accumulators whose index the compiler knows stay in registers.
template <int... I, class F> INLINE void each(std::integer_sequence<int, I...>, const F &f) {
    (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F> INLINE void repeat(const F &f) { each(std::make_integer_sequence<int, N>{}, f); }

typedef float Quad __attribute__((vector_size(16)));
typedef int8_t Bytes __attribute__((vector_size(16)));

// The bytes of a vector register, and how many there are: what decides how much a product keeps in them.
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

#ifdef __AVX512F__
typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t IntLanes __attribute__((vector_size(64)));

inline Lanes all(float x) { return Lanes{} + x; }
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
// Where a register is shorter, 16 lanes are several registers. A vector type of 64 bytes would do, but the compiler keeps
// one that no register holds in memory: products ran at an eighth of their speed.
constexpr int PARTS = 64 / REGISTER;

template <class T> struct Vector {
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

template <class To, class F> INLINE To by_part(const F &f) {
    To out;
    repeat<PARTS>([&](auto i) EACH { out.part[i] = f(i); });
    return out;
}
#define OPERATOR(op)                                                                                                   \
    template <class T> INLINE Vector<T> operator op(Vector<T> a, Vector<T> b) {                                        \
        return by_part<Vector<T>>([&](auto i) EACH { return a.part[i] op b.part[i]; });                                \
    }                                                                                                                  \
    template <class T> INLINE Vector<T> operator op(Vector<T> a, T b) {                                                \
        return by_part<Vector<T>>([&](auto i) EACH { return a.part[i] op b; });                                        \
    }                                                                                                                  \
    template <class T> INLINE Vector<T> operator op(T a, Vector<T> b) {                                                \
        return by_part<Vector<T>>([&](auto i) EACH { return a op b.part[i]; });                                        \
    }
OPERATOR(+) OPERATOR(-) OPERATOR(*) OPERATOR(/) OPERATOR(<<) OPERATOR(>>) OPERATOR(&)
#undef OPERATOR
template <class T> INLINE Vector<T> &operator+=(Vector<T> &a, Vector<T> b) { return a = a + b; }
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
COMPARISON(<) COMPARISON(>) COMPARISON(==) COMPARISON(!=)
#undef COMPARISON

INLINE Lanes all(float x) {
    return by_part<Lanes>([&](auto) EACH { return Lanes::Part{} + x; });
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

typedef std::vector<Lanes> Buffer;     // aligned, zeroed

// A first argument that is no number stays none: what is computed from it has to show it.
INLINE Lanes larger(Lanes a, Lanes b) { return choose(b > a, b, a); }
INLINE Lanes smaller(Lanes a, Lanes b) { return choose(b < a, b, a); }
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
    return by_part<Lanes>([&](auto i) EACH {
        return (Lanes::Part)vshll_n_u16(vld1_u16((const uint16_t *)(p + 4 * i)), 16);
    });
#else
    float wide[LANES];
    for (int i = 0; i < LANES; i++) wide[i] = p[i];
    return load(wide);
#endif
}
inline void store(BFloat *p, Lanes x) {  // rounded to the nearest bf16, to even; what is no number stays none
    const IntLanes bits = bits_of(x), odd = (bits >> 16) & 1;
    const IntLanes rounded = bits_of(choose(x == x, lanes_of(bits + 0x7fff + odd), all(NAN))) >> 16;
    for (int i = 0; i < LANES; i++) p[i].bits = (uint16_t)rounded[i];
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
        if (finite) x *= 0x1p112f;  // moves the exponent's bias from 15 to 127, subnormal numbers included
        return bits & 0x8000 ? -x : x;
    }
};
inline Lanes load(const Half *p) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__) && defined(__F16C__)
    return by_part<Lanes>([&](auto i) EACH {
        return (Lanes::Part)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8 * i)));
    });
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

// The sums of four vectors' lanes.
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

// e^x by x = n·ln 2 + r and the first terms of the series in r, |r| ≤ 0.35; within 2 units in the last place.
INLINE Lanes exponential(Lanes x) {
    x = smaller(larger(x, all(-87.0f)), all(88.0f));
    const float magic = 0x1.8p23f;  // adding it rounds to a whole number, in the low bits
    const Lanes shifted = x * 1.44269504f + magic, n = shifted - magic;
    const Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
    Lanes y = r * (1 / 5040.0f) + 1 / 720.0f;
    y = y * r + 1 / 120.0f;
    y = y * r + 1 / 24.0f;
    y = y * r + 1 / 6.0f;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    const IntLanes power = (bits_of(shifted) - 0x4b400000 + 127) << 23;
    return y * lanes_of(power);
}

INLINE Lanes sigmoid(Lanes x) { return 1.0f / (1.0f + exponential(-x)); }

INLINE Lanes gelu(Lanes x) {  // erf by Abramowitz & Stegun 7.1.26, within 1.5e-7
    const Lanes z = magnitude(x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * z);
    Lanes y = 1.061405429f * t - 1.453152027f;
    y = y * t + 1.421413741f;
    y = y * t - 0.284496736f;
    y = y * t + 0.254829592f;
    const Lanes tail = 0.5f * y * t * exponential(-z * z);  // of the normal distribution, beyond |x|
    return x * choose(x < 0.0f, tail, 1.0f - tail);
}

INLINE Lanes activate(Lanes x, int64_t activation) {
    switch (activation) {
    case GELU_TANH: return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));  // (1 + tanh u) / 2 = σ(2u)
    case RELU2: x = larger(x, Lanes{}); return x * x;
    case SWIGLU: return x * sigmoid(x);
    default: return gelu(x);
    }
}

// ------------------------------------------------------------------------------------------------------------ threads

// Where all threads wait for the last. OpenMP's own barrier spins for milliseconds, which on a busy machine keeps the very
// thread that is waited for from running; this one yields after some 30 µs.
struct Barrier {
    alignas(64) std::atomic<int64_t> arrived{0};
    alignas(64) std::atomic<int64_t> turn{0};

    void wait(int64_t n_threads) {
        const int64_t mine = turn.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == n_threads - 1) {
            arrived.store(0, std::memory_order_relaxed);
            turn.store(mine + 1, std::memory_order_release);
            return;
        }
        for (int tries = 0; turn.load(std::memory_order_acquire) == mine; tries++) {
            if (tries > 2000) std::this_thread::yield();
#if defined(__x86_64__)
            else __builtin_ia32_pause();
#endif
        }
    }
};

struct Team {
    int64_t thread, n_threads;
    Barrier *barrier;

    std::pair<int64_t, int64_t> share(int64_t n) const {
        return {n * thread / n_threads, n * (thread + 1) / n_threads};
    }
    void wait() const {
        if (n_threads > 1) barrier->wait(n_threads);
    }
};

int64_t padded(int64_t n) { return (n + CHUNK - 1) / CHUNK * CHUNK; }

// ----------------------------------------------------------------------------------------------------------- products

// Activations [n, stride], and what they are made into for a kind of weights, where the processor multiplies it:
// * bf16 for bf16 (AVX512_BF16);
// * for int8 and int4 (AVX512_VNNI) fixed point of 16 bits with one scale a row, as two planes of signed bytes,
//   x ≈ scale · (256 · high + low): finer than bf16, and sums of products are exact.
struct Rows {
    int64_t n, stride;
    float *x;
    int64_t prepared = FP32;
    std::vector<int8_t> bytes;      // [n, 2 · stride]: bf16; or low, then high
    std::vector<IntLanes> offsets;  // int4: for each 128 activations, what its weights' offset of 8 adds
    std::vector<float> scale;
    std::vector<int64_t> total;     // int8: sum of a row

    Rows(int64_t n, int64_t stride, float *x) : n(n), stride(stride), x(x) {}
    const int8_t *low(int64_t row) const { return &bytes[2 * row * stride]; }
    const int8_t *high(int64_t row) const { return low(row) + stride; }
    int64_t row_bytes() const { return (bytes.empty() ? 4 : 2) * stride; }

    void prepare(int64_t kind) {
        if (kind == prepared) return;
        prepared = kind;
#ifdef BF16_PRODUCTS
        if (kind == BF16) {
            bytes.resize(2 * n * stride);
            for (int64_t i = 0; i < n * stride; i += LANES)
                _mm256_storeu_si256((__m256i *)&bytes[2 * i], (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + i)));
        }
#endif
#ifdef INTEGER_PRODUCTS
        if (kind == INT8 || kind == INT4) {
            bytes.resize(2 * n * stride);
            offsets.resize(n * stride / CHUNK);
            scale.resize(n);
            total.resize(n);
            for (int64_t row = 0; row < n; row++) round(row);
        }
#endif
    }

#ifdef INTEGER_PRODUCTS
    void round(int64_t row) {
        const float *from = x + row * stride;
        __m512i top = _mm512_setzero_si512();  // compared as integers: what is no number lies above all that are
        for (int64_t i = 0; i < stride; i += LANES)
            top = _mm512_max_epi32(top, (__m512i)magnitude(load(from + i)));
        const int32_t top_bits = _mm512_reduce_max_epi32(top);
        float largest;
        std::memcpy(&largest, &top_bits, sizeof largest);
        largest = std::max(largest, 1e-30f);
        scale[row] = top_bits < 0x7f800000 ? largest / 32639 : NAN;  // 127 · 256 + 127: high stays a signed byte
        const __m512 factor = _mm512_set1_ps(32639 / largest);
        __m512i running = _mm512_setzero_si512();
        int8_t *const lows = &bytes[2 * row * stride], *const highs = lows + stride;
        for (int64_t i = 0; i < stride; i += LANES) {
            const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(from + i), factor));
            const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(whole, 24), 24);
            const __m512i high = _mm512_srai_epi32(_mm512_sub_epi32(whole, low), 8);
            running = _mm512_add_epi32(running, whole);
            const int64_t to = prepared == INT4 ? place(i) : i;
            _mm_storeu_si128((__m128i *)(lows + to), _mm512_cvtepi32_epi8(low));
            _mm_storeu_si128((__m128i *)(highs + to), _mm512_cvtepi32_epi8(high));
        }
        total[row] = _mm512_reduce_add_epi32(running);
        if (prepared != INT4) return;
        const __m512i eight = _mm512_set1_epi8(8);
        for (int64_t i = 0; i < stride; i += CHUNK) {
            const IntLanes low = dot(dot(IntLanes{}, eight, lows + i), eight, lows + i + CHUNK / 2);
            const IntLanes high = dot(dot(IntLanes{}, eight, highs + i), eight, highs + i + CHUNK / 2);
            offsets[(row * stride + i) / CHUNK] = -(low + (high << 8));
        }
    }

    // Where the 16 activations from i on stand for int4: of 128, first those that meet low nibbles, then the others.
    static int64_t place(int64_t i) { return i / CHUNK * CHUNK + i % 32 / 16 * (CHUNK / 2) + i % CHUNK / 32 * 16; }

    static IntLanes dot(IntLanes sum, __m512i unsigned_bytes, const int8_t *signed_bytes) {
        return (IntLanes)_mm512_dpbusd_epi32((__m512i)sum, unsigned_bytes, _mm512_loadu_si512(signed_bytes));
    }
#endif
};

// A tile is contiguous, and memory is fastest when asked for in order: so it is prefetched in order, though its four rows
// are read side by side. Without, this ran at a third of the memory's speed; with the far one alone, 10% slower.
// The first cache is for one row's weights; many rows' activations need it themselves.
template <int N> INLINE void prefetch(const void *at, int64_t line) {
    __builtin_prefetch((const char *)at + 64 * line + FAR, 0, 2);
    if (N == 1) __builtin_prefetch((const char *)at + 64 * line + NEAR, 0, 3);
}

// Each kind of weights has a Tile: sums<N>(first, step, row, out) multiplies four weight rows, first, first + step …,
// with N activation rows from `row` on; out[r][j] is the sum for weight row j.
template <class Weight> struct FloatTile {
    static constexpr bool WIDENS = !std::is_same_v<Weight, float>;
    // Activation rows whose accumulators stay in registers. Other weights are made float32 first where rows are short.
    static constexpr int64_t AT_ONCE = WIDENS && !MANY_REGISTERS ? 1 : REGISTERS >= 32 ? 6 : 3;
    const Weight *weight;
    int64_t k;
    const Rows &x;

    void widen_row(int64_t row, float *out) const {
        for (int64_t i = 0; i < k; i += LANES) store(out + i, load(weight + row * k + i));
    }

    template <int N> INLINE void sums_of(int64_t first, int64_t step, int64_t row, Quad *out) const {
        Lanes total[N][TILE] = {};
        const Weight *w = weight + first * k;
        const float *in = x.x + row * x.stride;
#ifndef __AVX512F__
        if constexpr (N > 1) {  // one register of each 16 lanes at a time, so that the accumulators fit
            static_assert(!WIDENS);
            typedef Lanes::Part Part;
            repeat<PARTS>([&](auto part) EACH {
                const auto at = [&](const float *p) EACH {
                    Part x;
                    std::memcpy(&x, p + part * (REGISTER / 4), sizeof x);
                    return x;
                };
                Part sum[N][TILE] = {};
                for (int64_t i = 0; i < k; i += LANES) {
                    Part activation[N];
                    repeat<N>([&](auto r) EACH { activation[r] = at(in + r * x.stride + i); });
                    repeat<TILE>([&](auto j) EACH {
                        const Part weights = at(w + j * step * k + i);
                        repeat<N>([&](auto r) EACH { sum[r][j] += weights * activation[r]; });
                    });
                }
                repeat<N>([&](auto r) EACH { repeat<TILE>([&](auto j) EACH { total[r][j].part[part] = sum[r][j]; }); });
            });
            repeat<N>([&](auto r) EACH { out[r] = sums(total[r]); });
            return;
        }
#endif
        for (int64_t i = 0; i < k; i += LANES) {
            Lanes activation[N];
            repeat<N>([&](auto r) EACH { activation[r] = load(in + r * x.stride + i); });
            repeat<TILE>([&](auto j) EACH {
                if (i * sizeof(Weight) % 64 == 0) prefetch<N>(w + TILE * i, j);
                const Lanes row_of_weights = load(w + j * step * k + i);
                repeat<N>([&](auto r) EACH { total[r][j] += row_of_weights * activation[r]; });
            });
        }
        repeat<N>([&](auto r) EACH { out[r] = sums(total[r]); });
    }
};

#ifdef BF16_PRODUCTS
struct BFloatTile {
    static constexpr int64_t AT_ONCE = 4;
    static constexpr bool WIDENS = false;
    const BFloat *weight;
    int64_t k;
    const Rows &x;

    template <int N> INLINE void sums_of(int64_t first, int64_t step, int64_t row, Quad *out) const {
        Lanes total[N][TILE] = {};
        const BFloat *w = weight + first * k;
        const int8_t *in = x.low(row);
        for (int64_t i = 0; i < k; i += 2 * LANES) {
            __m512bh row_of_weights[TILE];
            repeat<TILE>([&](auto j) EACH {
                prefetch<N>(w + TILE * i, j);
                row_of_weights[j] = (__m512bh)_mm512_loadu_si512(w + j * step * k + i);
            });
            repeat<N>([&](auto r) EACH {
                const __m512bh activation = (__m512bh)_mm512_loadu_si512(in + 2 * (r * x.stride + i));
                repeat<TILE>([&](auto j) EACH {
                    total[r][j] = (Lanes)_mm512_dpbf16_ps((__m512)total[r][j], row_of_weights[j], activation);
                });
            });
        }
        repeat<N>([&](auto r) EACH { out[r] = sums(total[r]); });
    }
};
#else
typedef FloatTile<BFloat> BFloatTile;
#endif

#ifdef INTEGER_PRODUCTS
INLINE __m256i whole_sums(const IntLanes (&v)[TILE]) {
    const __m512i a = (__m512i)v[0], b = (__m512i)v[1], c = (__m512i)v[2], d = (__m512i)v[3];
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    const __m512i abcd = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m256i two = _mm256_add_epi32(_mm512_castsi512_si256(abcd), _mm512_extracti64x4_epi64(abcd, 1));
    return _mm256_cvtepi32_epi64(_mm_add_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1)));
}

// The product wants one side unsigned: weights + 128, whose share is 128 · the sum of the row's activations.
struct Int8Tile {
    static constexpr int64_t AT_ONCE = 3;
    static constexpr bool WIDENS = false;
    const int8_t *weight;
    int64_t k;
    const Rows &x;

    template <int N> INLINE void sums_of(int64_t first, int64_t step, int64_t row, Quad *out) const {
        IntLanes low[N][TILE] = {}, high[N][TILE] = {};
        const int8_t *w = weight + first * k;
        const __m512i flip = _mm512_set1_epi8(-128);
        for (int64_t i = 0; i < k; i += 64)
            repeat<TILE>([&](auto j) EACH {
                prefetch<N>(w + TILE * i, j);
                const __m512i row_of_weights = _mm512_xor_si512(_mm512_loadu_si512(w + j * step * k + i), flip);
                repeat<N>([&](auto r) EACH {
                    low[r][j] = Rows::dot(low[r][j], row_of_weights, x.low(row + r) + i);
                    high[r][j] = Rows::dot(high[r][j], row_of_weights, x.high(row + r) + i);
                });
            });
        repeat<N>([&](auto r) EACH {
            const __m256i both = _mm256_add_epi64(whole_sums(low[r]), _mm256_slli_epi64(whole_sums(high[r]), 8));
            const __m256i exact = _mm256_sub_epi64(both, _mm256_set1_epi64x(128 * x.total[row + r]));
            out[r] = (Quad)_mm256_cvtepi64_ps(exact) * x.scale[row + r];
        });
    }
};

// 128 weights at a time, four groups: the lanes of a quarter belong to one group and take its scale.
struct Int4Tile {
    static constexpr int64_t AT_ONCE = 4;
    static constexpr bool WIDENS = false;
    const uint8_t *weight;
    const Half *scale;
    int64_t k;
    const Rows &x;

    template <int N> INLINE void sums_of(int64_t first, int64_t step, int64_t row, Quad *out) const {
        Lanes total[N][TILE] = {};
        const uint8_t *w = weight + first * k / 2;
        const Half *s = scale + first * k / 32;
        const __m512i nibble = _mm512_set1_epi8(15);
        const __m512i spread = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
        for (int64_t i = 0; i < k; i += CHUNK)
            repeat<TILE>([&](auto j) EACH {
                prefetch<N>(w + TILE * i / 2, j);
                const __m512i pairs = _mm512_loadu_si512(w + j * step * k / 2 + i / 2);
                const __m512i first_ones = _mm512_and_si512(pairs, nibble);
                const __m512i second_ones = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), nibble);
                const __m128 four = _mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)(s + j * step * k / 32 + i / 32)));
                const Lanes scales = (Lanes)_mm512_permutexvar_ps(spread, _mm512_castps128_ps512(four));
                repeat<N>([&](auto r) EACH {
                    const int8_t *lows = x.low(row + r) + i, *highs = x.high(row + r) + i;
                    const IntLanes offset = x.offsets[((row + r) * x.stride + i) / CHUNK];
                    const IntLanes low = Rows::dot(Rows::dot(offset, first_ones, lows), second_ones, lows + CHUNK / 2);
                    const IntLanes high =
                        Rows::dot(Rows::dot(IntLanes{}, first_ones, highs), second_ones, highs + CHUNK / 2);
                    total[r][j] += __builtin_convertvector(low + (high << 8), Lanes) * scales;
                });
            });
        repeat<N>([&](auto r) EACH { out[r] = sums(total[r]) * x.scale[row + r]; });
    }
};
#else
typedef FloatTile<int8_t> Int8Tile;

struct Int4Tile {  // in float32
    static constexpr int64_t AT_ONCE = MANY_REGISTERS ? 3 : 1;
    static constexpr bool WIDENS = true;
    const uint8_t *weight;
    const Half *scale;
    int64_t k;
    const Rows &x;

    template <int N> INLINE void sums_of(int64_t first, int64_t step, int64_t row, Quad *out) const {
        Lanes total[N][TILE] = {};
        const float *in = x.x + row * x.stride;
        for (int64_t i = 0; i < k; i += 32)
            repeat<TILE>([&](auto j) EACH {
                if (i % CHUNK == 0) prefetch<N>(weight + (first * k + TILE * i) / 2, j);
                const auto [low, high] = group(((first + j * step) * k + i) / 32);
                const Lanes both[2] = {low, high};
                repeat<2>([&](auto half) EACH {
                    repeat<N>([&](auto r) EACH {
                        total[r][j] += both[half] * load(in + r * x.stride + i + half * LANES);
                    });
                });
            });
        repeat<N>([&](auto r) EACH { out[r] = sums(total[r]); });
    }

    // The 32 values of a group.
    INLINE std::pair<Lanes, Lanes> group(int64_t at) const {
        typedef uint8_t Pairs __attribute__((vector_size(16)));
        Pairs pairs;
        std::memcpy(&pairs, weight + 16 * at, sizeof pairs);
        const float factor = scale[at];
        return {widen((Bytes)(pairs & 15) - 8) * factor, widen((Bytes)(pairs >> 4) - 8) * factor};
    }

    void widen_row(int64_t row, float *out) const {
        for (int64_t i = 0; i < k; i += 32) {
            const auto [low, high] = group((row * k + i) / 32);
            store(out + i, low);
            store(out + i + LANES, high);
        }
    }
};
#endif

// Rows from … end of the matrix with activations first_row … last_row; see product.
template <class Tile>
void tiles(const Tile &tile, const Matrix &m, int64_t first_row, int64_t last_row, int64_t from, int64_t end, float *out,
           int64_t stride, float times, bool add) {
    thread_local std::vector<float> wide;  // four weight rows, made float32 once where many activation rows meet them
    const bool widens = Tile::WIDENS && last_row - first_row > Tile::AT_ONCE;
    if (widens) wide.resize(TILE * m.k);
    for (int64_t n = from, count; n < end; n += count) {
        count = end - n < TILE ? 1 : TILE;  // the last few one by one, as a tile of the same row
        const int64_t step = count / TILE, bytes = count * sizeof(float);
        Quad scale = Quad{} + 1.0f, bias = {};
        if (m.kind == INT8) std::memcpy(&scale, (const float *)m.scale + n, bytes);
        if (m.bias) std::memcpy(&bias, m.bias + n, bytes);
        const auto multiply = [&](const auto &tile, int64_t first) {
            constexpr int64_t AT_ONCE = std::decay_t<decltype(tile)>::AT_ONCE;
            for (int64_t row = first_row, rows; row < last_row; row += rows) {
                Quad four[AT_ONCE];
                rows = std::min(AT_ONCE, last_row - row);
                if (rows == AT_ONCE)
                    tile.template sums_of<AT_ONCE>(first, step, row, four);
                else if (rows == 1)
                    tile.template sums_of<1>(first, step, row, four);
                else if (rows == 2)
                    tile.template sums_of<std::min<int64_t>(2, AT_ONCE)>(first, step, row, four);
                else
                    tile.template sums_of<std::min<int64_t>(3, AT_ONCE)>(first, step, row, four), rows = 3;
                for (int64_t r = 0; r < rows; r++) {
                    float *to = out + (row + r) * stride + n;
                    Quad before = {};
                    if (add) std::memcpy(&before, to, bytes);
                    const Quad value = (four[r] * scale + bias) * times + before;
                    std::memcpy(to, &value, bytes);
                }
            }
        };
        if constexpr (Tile::WIDENS)
            if (widens) {
                for (int64_t j = 0; j < count; j++) tile.widen_row(n + j, &wide[j * m.k]);
                multiply(FloatTile<float>{wide.data(), m.k, tile.x}, 0);
                continue;
            }
        multiply(tile, n);
    }
}

// out[r][n] = (x[r] · weight[n] + bias[n]) · times, added to what is there if `add`; this thread's share of the n, which
// it returns. Prepares x for this kind of weights.
std::pair<int64_t, int64_t> product(const Matrix &m, Rows &x, float *out, int64_t stride, float times, bool add,
                                    const Team &team) {
    x.prepare(m.kind);
    const auto [first, last] = team.share((m.n + UNIT - 1) / UNIT);
    const int64_t from = first * UNIT, end = std::min(last * UNIT, m.n);
    const auto run = [&, from = from, end = end](const auto &tile) {
        const int64_t at_once = std::max<int64_t>(CACHED / x.row_bytes() / tile.AT_ONCE, 1) * tile.AT_ONCE;
        for (int64_t row = 0; row < x.n; row += at_once)
            tiles(tile, m, row, std::min(row + at_once, x.n), from, end, out, stride, times, add);
    };
    switch (m.kind) {
    case FP32: run(FloatTile<float>{(const float *)m.weight, m.k, x}); break;
    case BF16: run(BFloatTile{(const BFloat *)m.weight, m.k, x}); break;
    case FP16: run(FloatTile<Half>{(const Half *)m.weight, m.k, x}); break;
    case INT8: run(Int8Tile{(const int8_t *)m.weight, m.k, x}); break;
    case INT4: run(Int4Tile{(const uint8_t *)m.weight, (const Half *)m.scale, m.k, x}); break;
    }
    return {from, end};
}

// ------------------------------------------------------------------------------------------- between the products

void normalize(const Norm &norm, bool layer_norm, float eps, int64_t width, const float *x, float *out) {
    Lanes total = {}, square = {};
    float mean = 0;
    if (layer_norm) {
        for (int64_t i = 0; i < width; i += LANES) total += load(x + i);
        mean = sum(total) / width;
    }
    for (int64_t i = 0; i < width; i += LANES) {
        const Lanes centred = load(x + i) - mean;
        square += centred * centred;
    }
    const float factor = 1 / std::sqrt(sum(square) / width + eps);
    for (int64_t i = 0; i < width; i += LANES) {
        Lanes y = (load(x + i) - mean) * factor * load(norm.weight + i);
        if (norm.bias) y += load(norm.bias + i);
        store(out + i, y);
    }
}

void embed(const Model &m, int64_t token, int64_t position, float *out) {
    const Matrix &e = m.embedding;
    for (int64_t i = 0; i < m.d_model; i++) {
        const int64_t at = token * e.k + i;
        float x = 0;
        switch (e.kind) {
        case FP32: x = ((const float *)e.weight)[at]; break;
        case BF16: x = ((const BFloat *)e.weight)[at]; break;
        case FP16: x = ((const Half *)e.weight)[at]; break;
        case INT8: x = ((const int8_t *)e.weight)[at] * ((const float *)e.scale)[token]; break;
        case INT4: {
            const uint8_t byte = ((const uint8_t *)e.weight)[at / 32 * 16 + i % 16];
            x = ((i % 32 < 16 ? byte & 15 : byte >> 4) - 8) * ((const Half *)e.scale)[at / 32];
        }
        }
        x *= m.embedding_scale;
        out[i] = m.position ? x + m.position[position * m.d_model + i] : x;
    }
}

// Turns each pair (i, i + R/2) of the first R elements of a head.
void rotate(const Model &m, int64_t position, float *x) {
    const int64_t half = m.d_rotary / 2;
    const float *cos = m.cos + position * half, *sin = m.sin + position * half;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

void prepare_head(const Model &m, const Layer &layer, const Norm &norm, int64_t position, float *x) {
    if (norm.weight) normalize(norm, false, m.eps, m.d_head, x, x);
    if (layer.rotates) rotate(m, position, x);
}

constexpr int64_t QUERIES = MANY_REGISTERS ? 4 : 1;  // that read keys and values together

// A query of one head, the first and the last + 1 key that it sees, and where its output goes.
struct Query {
    float *q, *out;
    int64_t from, to;
};

// Σ weight[s] · values[s] for the keys from … to of N queries, WIDE vectors from element i on.
template <int N, int WIDE, class Cache>
void weigh(const Query *queries, const Lanes *factor, const float *scores, int64_t room, const Cache *values,
           int64_t from, int64_t to, int64_t width, int64_t i) {
    Lanes total[N][WIDE] = {};
    for (int64_t s = from; s < to; s++)
        repeat<WIDE>([&](auto v) EACH {
            const Lanes value = load(values + s * width + i + v * LANES);
            repeat<N>([&](auto r) EACH { total[r][v] += scores[r * room + s - from] * value; });
        });
    repeat<N>([&](auto r) EACH {
        repeat<WIDE>([&](auto v) EACH { store(queries[r].out + i + v * LANES, total[r][v] * factor[r]); });
    });
}

template <class Cache> struct HeadCache {
    static constexpr bool SCALED = std::is_same_v<Cache, int8_t>;  // a value is = integer · scale of its vector
    int64_t width;
    Cache *keys, *values;                                  // [capacity, d_head]
    float *key_scales = nullptr, *value_scales = nullptr;  // [capacity]

    HeadCache(const Model &m, const Layer &layer, int64_t slot, int64_t group) : width(m.d_head) {
        const int64_t head = slot * m.n_groups + group, at = head * m.capacity * width;
        keys = (Cache *)layer.keys + at, values = (Cache *)layer.values + at;
        const int64_t scales_at = head * ((m.capacity + LANES - 1) / LANES * LANES);
        if constexpr (SCALED) key_scales = layer.key_scales + scales_at, value_scales = layer.value_scales + scales_at;
    }

    void keep(int64_t position, const float *key, const float *value) const {
        keep(key, keys + position * width, key_scales + (SCALED ? position : 0));
        keep(value, values + position * width, value_scales + (SCALED ? position : 0));
    }

    void keep(const float *from, Cache *to, float *scale) const {
        if constexpr (SCALED) {
            float largest = 0;
            bool finite = true;
            for (int64_t i = 0; i < width; i++) {
                largest = std::max(largest, std::abs(from[i]));
                finite &= std::isfinite(from[i]);
            }
            *scale = finite ? largest / 127 : NAN;  // so that all values of the vector are none
            for (int64_t i = 0; i < width; i++)
                to[i] = finite && largest ? (Cache)std::lrint(from[i] / *scale) : (Cache)!finite;
        } else {
            for (int64_t i = 0; i < width; i += LANES) store(to + i, load(from + i));
        }
    }
};

// N queries of one text, in the order of their positions, over its keys and values [capacity, d_head]. They read the
// keys together, those that one of them does not see with weight 0. scores: [N, room], room for `to` and 32 more.
template <int N, class Cache>
void attend(const Model &m, const Query *queries, const HeadCache<Cache> &cache, float *scores, int64_t room) {
    const int64_t width = m.d_head, to = queries[N - 1].to;
    const int64_t from = queries[0].from / LANES * LANES;  // so that a key's lane follows from its position alone
    const int64_t end = from + (to - from + LANES - 1) / LANES * LANES;
    for (int64_t s = from; s < end; s += TILE) {
        Lanes total[N][TILE] = {};
        const Cache *key[TILE];
        repeat<TILE>([&](auto j) EACH { key[j] = cache.keys + std::min(s + j, to - 1) * width; });
        for (int64_t i = 0; i < width; i += LANES) {
            Lanes q[N];
            repeat<N>([&](auto r) EACH { q[r] = load(queries[r].q + i); });
            repeat<TILE>([&](auto j) EACH {
                const Lanes elements = load(key[j] + i);
                repeat<N>([&](auto r) EACH { total[r][j] += q[r] * elements; });
            });
        }
        repeat<N>([&](auto r) EACH {
            Quad four = sums(total[r]) * m.scale, scale;
            if constexpr (HeadCache<Cache>::SCALED) {
                std::memcpy(&scale, cache.key_scales + s, sizeof scale);
                four *= scale;
            }
            std::memcpy(scores + r * room + s - from, &four, sizeof four);
        });
    }
    Lanes factor[N];
    for (int r = 0; r < N; r++) {
        float *own = scores + r * room;
        std::fill(own, own + queries[r].from - from, -INFINITY);
        std::fill(own + queries[r].to - from, own + end - from, -INFINITY);
        Lanes top = load(own), total = {};
        for (int64_t s = LANES; s < end - from; s += LANES) top = larger(top, load(own + s));
        float largest = -INFINITY;
        for (int i = 0; i < LANES; i++) largest = std::max(largest, top[i]);
        for (int64_t s = 0; s < end - from; s += LANES) {
            const Lanes score = load(own + s), e = choose(score == -INFINITY, Lanes{}, exponential(score - largest));
            total += e;
            if constexpr (HeadCache<Cache>::SCALED)
                store(own + s, e * load(cache.value_scales + from + s));
            else
                store(own + s, e);
        }
        factor[r] = all(1 / sum(total));
    }
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES) weigh<N, 4>(queries, factor, scores, room, cache.values, from, to, width, i);
    for (; i < width; i += LANES) weigh<N, 1>(queries, factor, scores, room, cache.values, from, to, width, i);
}


// A row's new key and value of one head, into the cache. qkv: queries, keys, values of all heads.
template <class Cache>
void remember(const Model &m, const Layer &layer, const Batch &b, int64_t row, int64_t group, float *qkv) {
    const int64_t width = m.d_head, position = b.positions[row];
    float *k = qkv + (m.n_heads + group) * width, *v = k + m.n_groups * width;
    prepare_head(m, layer, layer.key_norm, position, k);
    HeadCache<Cache>(m, layer, b.slots[row], group).keep(position, k, v);
}

// A thread takes whole (rows of a text, key/value head) pairs: their queries, some at a time, over the keys they see.
// Later rows see more keys, so threads take turns.
template <class Cache>
void attend(const Model &m, const Layer &layer, const Batch &b, float *qkv, int64_t stride, float *out,
            int64_t out_stride, Buffer &scores, const Team &team) {
    const int64_t width = m.d_head, heads = m.n_heads / m.n_groups, room = scores.size() / QUERIES * LANES;
    const bool alone = b.n_rows == b.n_texts;  // no row's keys are another one's to see
    for (int64_t task = team.thread; task < b.n_rows * m.n_groups && !alone; task += team.n_threads) {
        const int64_t row = task / m.n_groups;
        remember<Cache>(m, layer, b, row, task % m.n_groups, qkv + row * stride);
    }
    if (!alone) team.wait();
    int64_t task = 0;
    for (int64_t row = 0, end; row < b.n_rows; row = end) {
        for (end = row + 1; end < std::min(row + QUERIES, b.n_rows) && b.slots[end] == b.slots[row];) end++;
        for (int64_t group = 0; group < m.n_groups; group++, task++) {
            if (task % team.n_threads != team.thread) continue;
            const HeadCache<Cache> cache(m, layer, b.slots[row], group);
            Query queries[QUERIES];
            int64_t n = 0;
            for (int64_t r = row; r < end; r++) {
                if (alone) remember<Cache>(m, layer, b, r, group, qkv + r * stride);
                for (int64_t head = group * heads; head < (group + 1) * heads; head++) {
                    const int64_t position = b.positions[r];
                    float *q = qkv + r * stride + head * width;
                    prepare_head(m, layer, layer.query_norm, position, q);
                    queries[n++] = {q, out + r * out_stride + head * width,
                                    std::max<int64_t>(0, position + 1 - layer.window), position + 1};
                    if (n < QUERIES && !(r + 1 == end && head + 1 == (group + 1) * heads)) continue;
                    float *own = (float *)scores.data();
                    switch (std::exchange(n, 0)) {
                    case 1: attend<1>(m, queries, cache, own, room); break;
                    case 2: attend<2>(m, queries, cache, own, room); break;
                    case 3: attend<3>(m, queries, cache, own, room); break;
                    default: attend<4>(m, queries, cache, own, room);
                    }
                }
            }
        }
    }
}

// ----------------------------------------------------------------------------------------------------------- the step

struct Shared {  // what all threads write to, each its part
    int64_t n, d_model, d_qkv, d_heads, d_ff;  // strides
    Buffer x, qkv, attended, inner, gate;

    Shared(const Model &m, int64_t n)
        : n(n), d_model(padded(m.d_model)), d_qkv(padded((m.n_heads + 2 * m.n_groups) * m.d_head)),
          d_heads(padded(m.n_heads * m.d_head)), d_ff(padded(m.d_ff)), x(n * d_model / LANES), qkv(n * d_qkv / LANES),
          attended(n * d_heads / LANES), inner(n * d_ff / LANES), gate(m.layers->gate.weight ? n * d_ff / LANES : 0) {}
};

float *data(Buffer &buffer) { return (float *)buffer.data(); }

// The norm of some rows of the residual stream, in memory of this thread's own.
struct Normalized {
    Buffer buffer;
    Rows rows;

    Normalized(int64_t n, int64_t stride) : buffer(n * stride / LANES), rows(n, stride, data(buffer)) {}
    Rows &of(const Model &m, const Norm &norm, float *x, const int64_t *wanted = nullptr) {
        for (int64_t r = 0; r < rows.n; r++)
            normalize(norm, m.layer_norm, m.eps, m.d_model, x + (wanted ? wanted[r] : r) * rows.stride,
                      rows.x + r * rows.stride);
        rows.prepared = FP32;
        return rows;
    }
};

void mlp(const Model &m, const Layer &layer, Rows &in, Shared &s, const Team &team) {
    float *inner = data(s.inner), *gate = data(s.gate);
    const bool gated = layer.gate.weight;
    if (gated) product(layer.gate, in, gate, s.d_ff, 1, false, team);
    const auto [from, to] = product(layer.up, in, inner, s.d_ff, 1, false, team);
    for (int64_t row = 0; row < s.n; row++)
        for (int64_t i = row * s.d_ff + from; i < row * s.d_ff + to; i += LANES) {
            const Lanes up = load(inner + i);
            store(inner + i, gated ? activate(load(gate + i), m.activation) * up : activate(up, m.activation));
        }
}

void step(const Model &m, const Batch &b, Shared &s, const Team &team) {
    float *x = data(s.x), *qkv = data(s.qkv);
    const int64_t d_query = m.n_heads * m.d_head, d_key = m.n_groups * m.d_head;
    Normalized norm1(s.n, s.d_model), norm2(s.n, s.d_model);
    Buffer scores(QUERIES * (m.capacity / LANES + 2));
    Rows attended(s.n, s.d_heads, data(s.attended)), inner(s.n, s.d_ff, data(s.inner));

    for (int64_t row = team.thread; row < s.n; row += team.n_threads)
        embed(m, b.tokens[row], b.positions[row], x + row * s.d_model);
    team.wait();
    for (const Layer *layer = m.layers; layer < m.layers + m.n_layers; layer++) {
        Rows &in = norm1.of(m, layer->norm1, x);
        if (m.parallel) norm2.of(m, layer->norm2, x);  // before `out` adds to x
        product(layer->query, in, qkv, s.d_qkv, 1, false, team);
        product(layer->key, in, qkv + d_query, s.d_qkv, 1, false, team);
        product(layer->value, in, qkv + d_query + d_key, s.d_qkv, 1, false, team);
        team.wait();
        const auto attend_in = m.cache_kind == INT8 ? attend<int8_t> : m.cache_kind == BF16 ? attend<BFloat> : attend<float>;
        attend_in(m, *layer, b, qkv, s.d_qkv, data(s.attended), s.d_heads, scores, team);
        team.wait();
        attended.prepared = inner.prepared = FP32;
        product(layer->out, attended, x, s.d_model, m.residual_scale, true, team);
        if (!m.parallel) {
            team.wait();
            norm2.of(m, layer->norm2, x);
        }
        mlp(m, *layer, norm2.rows, s, team);
        team.wait();
        product(layer->down, inner, x, s.d_model, m.residual_scale, true, team);
        team.wait();
    }
    if (!b.n_wanted) return;
    Normalized last(b.n_wanted, s.d_model);
    product(m.head, last.of(m, m.norm, x, b.wanted), b.logits, m.head.n, m.logit_scale, false, team);
}

template <class F> void parallel(int n_threads, const F &work) {
    Barrier barrier;
#ifdef _OPENMP
#pragma omp parallel num_threads(n_threads)
    work(Team{omp_get_thread_num(), omp_get_num_threads(), &barrier});
#else
    (void)n_threads;
    work(Team{0, 1, &barrier});
#endif
}

}  // namespace

// ---------------------------------------------------------------------------------------------------- what is called

// What this library was built with: bit 0 threads; 1 vectors of 64 bytes, 2 of 32; 3 products of integers, 4 of bf16.
extern "C" int gptworks_built_with() {
    int bits = REGISTER == 64 ? 2 : REGISTER == 32 ? 4 : 0;
#ifdef _OPENMP
    bits |= 1;
#endif
#ifdef INTEGER_PRODUCTS
    bits |= 8;
#endif
#ifdef BF16_PRODUCTS
    bits |= 16;
#endif
    return bits;
}

extern "C" void gptworks_step(const Model *model, const Batch *batch, int n_threads) {
    Shared shared(*model, batch->n_rows);
    parallel(n_threads, [&](const Team &team) { step(*model, *batch, shared, team); });
}
