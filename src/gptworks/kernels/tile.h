// The inner loop of matrix products. A tile of sums stays in registers during the loop over the summed dimension. Its
// size is some rows of the left factor times some registers of the right factor's columns:
//
//     sum[row][column] += left[row][word] · right[word][column]     a word: four bytes of the right factor
//
// A policy defines the multiplication:
//     UNITS            number of the left factor's units for one word: one for each element, or one for all
//     Left             type of a unit, which has ELEMENTS elements
//     right(words, e)  the part of a register of words that is multiplied by the e-th unit
//     add(sum, right, left)  returns sum + right · left
//
// Each sum adds its products in the order of the words, and of the units in a word. Its bits depend on nothing else.

#pragma once

#include "lanes.h"

namespace [[gnu::visibility("hidden")]] kernels {

constexpr int64_t IN_REGISTER = REGISTER / 4; // words of a register

INLINE Words words_at(const uint32_t *p) {
    Words words;
    std::memcpy(&words, p, sizeof words);
    return words;
}

template<class Policy, int ROWS, int COLUMNS> struct Tile { // COLUMNS: registers
    typename Policy::Sum sum[ROWS][COLUMNS] = {};

    // Adds the products of n words, STEP at a time; STEP must divide n. left(row, word, e): the e-th unit of a row's
    // word. The right factor's words are `apart` apart, and its vectors of 16 columns `vectors_apart`.
    template<int STEP = 1, class Left>
    INLINE void add(const Left &left, const uint32_t *right, int64_t n, int64_t apart, int64_t vectors_apart = LANES,
                    Ahead *ahead = nullptr) {
        for (int64_t first = 0; first < n; first += STEP) {
            if (ahead) ahead->fetch();
            const auto next = [&](int64_t word) EACH {
                add_word(left, word, right, vectors_apart);
                right += apart;
            };
            repeat<STEP>([&](auto step) EACH { next(first + step); });
        }
    }

    template<class Left>
    INLINE void add_word(const Left &left, int64_t word, const uint32_t *right, int64_t vectors_apart) {
        const auto of_right = [&](int column, int e) EACH {
            return Policy::right(words_at(right + column / PARTS * vectors_apart + column % PARTS * IN_REGISTER), e);
        };
        repeat<Policy::UNITS>([&](auto e) EACH {
            if constexpr (ROWS * COLUMNS + COLUMNS < REGISTERS)
                at_once<COLUMNS>([&](auto... column) EACH {
                    const typename Policy::Right x[] = {of_right(column, e)...};
                    repeat<ROWS>([&](auto row) EACH {
                        const typename Policy::Left unit = left(row, word, e);
                        ((sum[row][column] = Policy::add(sum[row][column], x[column], unit)), ...);
                    });
                });
            else // one register of the right factor at a time: the sums need the other registers
                repeat<COLUMNS>([&](auto column) EACH {
                    const typename Policy::Right x = of_right(column, e);
                    at_once<ROWS>([&](auto... row) EACH {
                        ((sum[row][column] = Policy::add(sum[row][column], x, left(row, word, e))), ...);
                    });
                });
        });
    }

    // The sums of 16 columns of a row.
    INLINE Lanes at(int row, int vector) const {
        Lanes x;
        std::memcpy(&x, &sum[row][vector * PARTS], sizeof x);
        return x;
    }
    INLINE void set(int row, int vector, Lanes x) { std::memcpy(&sum[row][vector * PARTS], &x, sizeof x); }
};

// Policy for float32 elements, and for narrower ones widened to float32.
template<class T> struct Widened {
    typedef Floats Sum, Right;
    typedef float Left;
    static constexpr int UNITS = 4 / sizeof(T), ELEMENTS = 1;
    static INLINE Floats right(Words words, int e) {
        if constexpr (sizeof(T) == 4)
            return (Floats)words;
        else if constexpr (sizeof(T) == 2)
            return (Floats)(e ? words & 0xffff0000 : words << 16);
        else
            return __builtin_convertvector((Ints)(words << (24 - 8 * e)) >> 24, Floats);
    }
    static INLINE Floats add(Floats sum, Floats right, float left) { return sum + right * left; }
};

#ifdef BF16_PRODUCTS
// Policy for bf16: two elements at a time.
struct Pairs {
    typedef Floats Sum;
    typedef Words Right;
    typedef uint32_t Left;
    static constexpr int UNITS = 1, ELEMENTS = 2;
    static INLINE Words right(Words words, int) { return words; }
    static INLINE Floats add(Floats sum, Words right, uint32_t left) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)right, (__m512bh)_mm512_set1_epi32(left));
    }
};
#endif

#ifdef INTEGER_PRODUCTS
// Policy for int8: four signed bytes at a time, by one plane of an activation's bytes. x86 reads weights as unsigned
// bytes, so 128 is added to them.
struct Quads {
    typedef Ints Sum, Right;
    typedef uint32_t Left;
    static constexpr int UNITS = 1;
    static INLINE Ints right(Words words, int) { return (Ints)(UNSIGNED_BYTES ? words ^ 0x80808080 : words); }
    static INLINE Ints add(Ints sum, Ints right, uint32_t left) { return add_bytes(sum, right, left); }
};

// Policy for int4: the low nibbles of four bytes, then their high nibbles.
struct Nibbles {
    typedef Ints Sum, Right;
    typedef uint32_t Left;
    static constexpr int UNITS = 2;
    static INLINE Ints right(Words words, int e) { return (Ints)(words >> 4 * e & 0x0f0f0f0f); }
    static INLINE Ints add(Ints sum, Ints right, uint32_t left) { return add_bytes(sum, right, left); }
};
#endif

#ifdef WIDE_INTEGER_PRODUCTS
// Policy for products of 16-bit integers. A unit takes the first and third byte of a word, or the second and fourth.
// With NIBBLES, units take the low nibbles of these bytes first, then the high nibbles.
template<bool NIBBLES> struct Wide {
    typedef Ints Sum;
    typedef int16_t Right __attribute__((vector_size(REGISTER)));
    typedef int32_t Left;
    static constexpr int UNITS = NIBBLES ? 4 : 2;
    static INLINE Right right(Words words, int e) {
        if (NIBBLES) return (Right)(words >> (e % 2 * 8 + e / 2 * 4) & 0x000f000f);
        return (Right)(e ? words : (Words)((Right)words << 8)) >> 8;
    }
    static INLINE Ints add(Ints sum, Right right, int32_t left) {
#ifdef __AVX512BW__
        return sum + (Ints)_mm512_madd_epi16((__m512i)right, _mm512_set1_epi32(left));
#elif defined(__wasm_simd128__)
        return sum + (Ints)wasm_i32x4_dot_i16x8((v128_t)right, wasm_i32x4_splat(left));
#else
        sum += (Ints)_mm256_madd_epi16((__m256i)right, _mm256_set1_epi32(left));
        asm("" : "+x"(sum)); // stops GCC from reordering additions, which needs more registers
        return sum;
#endif
    }
};
#endif

} // namespace kernels
