// Matrix tiles of 16 rows of 64 bytes: Intel's AMX, on Linux. The library checks at run time whether the processor has
// AMX, so that one library serves processors with and without it.
//
//     c[16][16] += a[16][words] · b[words][16]     a word: two bf16 or four 8-bit elements along the sum
//
// Intel's manual (volume 2, TDPBF16PS and TDPBSSD): bf16 products are summed in float32, and subnormal numbers count as
// 0. Within a product of two tiles, even and odd places have separate sums. Bytes are summed exactly, in 32 bits.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "lanes.h"

#if defined(BF16_PRODUCTS) && defined(INTEGER_PRODUCTS) && defined(__linux__) && __has_include(<amxtileintrin.h>)
#define AMX
#include <sys/syscall.h>
#include <unistd.h>

namespace [[gnu::visibility("hidden")]] kernels {
namespace amx {

constexpr int64_t SIDE = 16;         // rows of a tile, and words of a row
constexpr int64_t ROW = 64;          // bytes of a row
constexpr int64_t TILE = SIDE * ROW; // bytes

inline bool granted = false; // whether the system permits AMX and `computes_rightly`

// Asks the system to permit tiles in all threads of this process; returns whether it does.
inline bool ask() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18; // arch_prctl's ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

// Configures this thread's tiles, all of full size, while the object exists.
struct Registers {
    Registers() {
        if (!granted) return;
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, none[14] = {};
            uint16_t row_bytes[16] = {ROW, ROW, ROW, ROW, ROW, ROW, ROW, ROW};
            uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
        } shapes;
        asm volatile("ldtilecfg %0" : : "m"(shapes));
    }
    ~Registers() {
        if (granted) asm volatile("tilerelease");
    }
    Registers(const Registers &) = delete;
};

template<int C> INLINE void zero() { asm volatile("tilezero %%tmm%c0" : : "i"(C)); }
template<int C> INLINE void load(const void *from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(C), "r"(from), "r"(stride) : "memory");
}
template<int C> INLINE void store(void *to, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(C), "r"(to), "r"(stride) : "memory");
}
template<bool INTEGERS, int C, int A, int B> INLINE void multiply() {
    if constexpr (INTEGERS)
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
    else
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

// Multiplies one or two rows of tiles by one or two columns of tiles over some steps, and stores the sums. Tile (i, j)
// is a's i-th row times b's j-th column, plus what is stored there if `add`. Each step
// advances 64 bytes in a and b_step bytes in b.
template<bool INTEGERS, int ROWS, int COLUMNS>
INLINE void product(const char *const *a, int64_t a_stride, const char *const *b, int64_t b_stride, int64_t b_step,
                    int64_t steps, char *const *c, int64_t c_stride, bool add, Ahead *ahead) {
    static_assert(ROWS <= 2 && COLUMNS <= 2);
    repeat<ROWS * COLUMNS>([&](auto t) EACH { add ? load<t>(c[t], c_stride) : zero<t>(); });
    for (int64_t step = 0; step < steps; step++) {
        repeat<ROWS>([&](auto i) EACH { load<4 + i>(a[i] + step * ROW, a_stride); });
        repeat<COLUMNS>([&](auto j) EACH { load<6 + j>(b[j] + step * b_step, b_stride); });
        repeat<ROWS>([&](auto i) EACH {
            repeat<COLUMNS>([&](auto j) EACH { multiply<INTEGERS, i * COLUMNS + j, 4 + i, 6 + j>(); });
        });
        if (ahead) ahead->fetch();
    }
    repeat<ROWS * COLUMNS>([&](auto t) EACH { store<t>(c[t], c_stride); });
}

template<bool INTEGERS, class... Rest> INLINE void product(int64_t rows, int64_t columns, const Rest &...rest) {
    if (rows == 1)
        columns == 1 ? product<INTEGERS, 1, 1>(rest...) : product<INTEGERS, 1, 2>(rest...);
    else
        columns == 1 ? product<INTEGERS, 2, 1>(rest...) : product<INTEGERS, 2, 2>(rest...);
}

// Whether tiles compute correctly. The test uses small whole numbers, whose products are exact in any order.
inline bool computes_rightly() {
    struct alignas(64) Four {
        int32_t c[2][2][SIDE][SIDE];
        char a[2 * SIDE][2 * ROW], b[2][2][SIDE][ROW]; // b: [column][step][word]
    };
    const auto number = [](int64_t row, int64_t place) {
        return (int32_t)((row * 37 + place * 11 + row * place) % 15 - 7);
    };
    const Registers registers;
    for (const bool integers : {false, true}) {
        Four x;
        const int64_t each = integers ? 4 : 2, places = 2 * SIDE * each;
        const auto put = [&](char *word, int64_t place, int32_t value) {
            if (integers) {
                word[place] = (char)value;
                return;
            }
            const float wide = (float)value;
            std::memcpy(word + 2 * place, (const char *)&wide + 2, 2);
        };
        for (int64_t row = 0; row < 2 * SIDE; row++)
            for (int64_t i = 0; i < places; i++) {
                put(x.a[row] + i / each * 4, i % each, number(row, i));
                put(x.b[row / SIDE][i / each / SIDE][i / each % SIDE] + row % SIDE * 4, i % each,
                    number(row + 5, 3 * i));
            }
        const char *const a[] = {x.a[0], x.a[SIDE]}, *const b[] = {(char *)x.b[0], (char *)x.b[1]};
        char *const c[] = {(char *)x.c[0][0], (char *)x.c[0][1], (char *)x.c[1][0], (char *)x.c[1][1]};
        for (const bool add : {false, true})
            if (integers)
                product<true, 2, 2>(a, 2 * ROW, b, ROW, TILE, 2, c, ROW, add, nullptr);
            else
                product<false, 2, 2>(a, 2 * ROW, b, ROW, TILE, 2, c, ROW, add, nullptr);
        for (int64_t m = 0; m < 2 * SIDE; m++)
            for (int64_t n = 0; n < 2 * SIDE; n++) {
                int32_t sum = 0, found = x.c[m / SIDE][n / SIDE][m % SIDE][n % SIDE];
                for (int64_t i = 0; i < places; i++) sum += 2 * number(m, i) * number(n + 5, 3 * i);
                float wide;
                std::memcpy(&wide, &found, sizeof wide);
                if (integers ? found != sum : wide != (float)sum) return false;
            }
    }
    return true;
}

} // namespace amx
} // namespace kernels
#endif
