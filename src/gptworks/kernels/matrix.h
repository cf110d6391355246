// A weight matrix, and activation rows in the form in which they are multiplied by it.

#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <type_traits>

#include "amx.h"
#include "lanes.h"
#include "threads.h"

namespace [[gnu::visibility("hidden")]] kernels {

constexpr int64_t GROUPED = 32; // elements of a row that share a scale in int4

struct Matrix { // [n, k]; see quantize/formats.py for the kinds, panels.py for panels
    const void *weight, *scale;
    const float *bias;
    int64_t n, k, kind;
    int64_t panel;                                 // weight rows of a panel; 0: stored row by row
    int64_t weight_bytes, scale_bytes, bias_bytes; // sizes of the buffers

    int64_t row_bytes() const { return kind == FP32 ? 4 * k : kind == INT8 ? k : kind == INT4 ? k / 2 : 2 * k; }
    int64_t n_words() const { return row_bytes() / 4; }

    // The panel that begins with this row, and its number of vectors of 16 rows. The last panel may have fewer.
    const uint32_t *panel_from(int64_t row) const { return (const uint32_t *)weight + row * n_words(); }
    int64_t vectors_from(int64_t row) const { return (std::min(panel, n - row) + LANES - 1) / LANES; }

    // The int4 scales of the panel that begins with this row: for each group, one scale per row.
    const Half *scales_from(int64_t row) const { return (const Half *)scale + row * (k / GROUPED); }

    // A row's words of four bytes and, for int4, the scales of its groups. `apart` is the stride of words and of
    // scales.
    struct Row {
        const uint32_t *words;
        const Half *scales;
        int64_t apart;
    };
    Row row(int64_t row) const {
        const int64_t first = panel ? row / panel * panel : row, at = row - first;
        return {panel_from(first) + at, kind == INT4 ? scales_from(first) + at : nullptr,
                panel ? vectors_from(first) * LANES : 1};
    }
};

constexpr int64_t CHUNK = 128; // activations are padded with zeros to a multiple of this
constexpr int64_t MANY = 32;   // rows from which threads share norms and rounding, and float32 is laid out in panels
constexpr int64_t FEW = 3;     // most rows that vectors multiply by int8; AMX multiplies more, with the same bits
constexpr int64_t PANEL_ROWS = REGISTER == 64 ? 8 : FEW_REGISTERS ? 2 : 6; // see panels.h
constexpr int64_t GROUP = REGISTER == 64 ? LANES : PANEL_ROWS;             // activation rows that are laid out together
constexpr int64_t TILE_ROWS = 16;                                          // rows of an AMX tile

inline int64_t padded(int64_t n) { return (n + CHUNK - 1) / CHUNK * CHUNK; }

// Returns low + 256 · high + offset.
INLINE Lanes joined(IntLanes low, IntLanes high, int64_t offset) {
    int32_t lows[LANES], highs[LANES];
    float out[LANES];
    std::memcpy(lows, &low, sizeof lows), std::memcpy(highs, &high, sizeof highs);
    for (int64_t i = 0; i < LANES; i++)
        out[i] = (float)(lows[i] + 256.0 * highs[i] + (double)offset); // only the last step rounds
    return load(out);
}

#ifdef BF16_PRODUCTS
constexpr bool ROUNDS_TO_BF16 = true;
#else
constexpr bool ROUNDS_TO_BF16 = false;
#endif

// Returns the kind into which activations are converted for weights of this kind.
inline int64_t met_by(int64_t kind) {
    if (kind == BF16) return kind;
#if defined(INTEGER_PRODUCTS) || defined(WIDE_INTEGER_PRODUCTS)
    if (kind == INT8 || kind == INT4) return kind;
#endif
    return FP32;
}

// Activations [n, stride], converted for the kind of the weights:
// * bf16 for bf16 (AVX512_BF16; elsewhere they stay float32);
// * for int8 and int4 (AVX512_VNNI, ARM's dot products) fixed point of 16 bits with one scale a row, as two planes of
// signed bytes,
//   x ≈ scale · (256 · high + low): finer than bf16, and sums of products are exact;
// * for int8 and int4 (AVX2 alone, WebAssembly) the same fixed point, as integers of 16 bits.
struct Rounded {
    Buffer bytes;                 // [n, pitch]: bf16, or 16-bit integers, or all low bytes and then all high bytes
    std::vector<int32_t> offsets; // int4: for each group, −8 · the activations' sum, for the weights' offset of 8
    std::vector<float> scale;
    std::vector<int64_t> total;        // int8: each row's sum
    std::unique_ptr<Lanes[]> laid_out; // for each GROUP rows: floats [stride][GROUP]

    // Bytes from a row to the next: a cache line more than a row has, because caches keep few rows that are a power of
    // two apart.
    static int64_t pitch(int64_t stride) { return 2 * stride + 64; }

    void make_room(int64_t n, int64_t stride) {
        bytes.resize((n + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS * pitch(stride) / sizeof(Lanes));
        offsets.resize(n * stride / GROUPED);
        scale.resize(n);
        total.resize(n);
        if (n >= MANY) laid_out.reset(new Lanes[(n + GROUP - 1) / GROUP * GROUP * 4 * stride / sizeof(Lanes)]);
    }
};

// Activations [n, stride] as floats, and converted for products. With few rows, each thread has its own floats and
// converted rows. With many rows, all threads use the same floats and the same memory for the converted rows
// (`common`), and each thread converts a share.
struct Rows {
    static constexpr int64_t NOTHING = -1; // nothing is converted yet
    static constexpr int64_t NEW = -2;     // as NOTHING, while other threads may still write floats
    int64_t n, stride, pitch = Rounded::pitch(stride);
    float *x;
    int64_t made = NOTHING; // the kind into which the floats are converted
    Rounded own, *common;
    const int8_t *bytes = nullptr; // the rounded rows, found once for all loops

    Rows(int64_t n, int64_t stride, float *x, Rounded *common = nullptr) : n(n), stride(stride), x(x), common(common) {}
    Rounded &rounded() { return common ? *common : own; }
    const Rounded &rounded() const { return common ? *common : own; }
    const int8_t *low(int64_t row) const { return bytes + row * pitch; }
    const int8_t *high(int64_t row) const { return low(row) + stride; }
    const uint32_t *plane(int64_t row, int64_t i) const { return (const uint32_t *)(low(row) + i * stride); }
    float scale(int64_t row) const { return rounded().scale[row]; }
    const int32_t *offsets(int64_t row) const { return &rounded().offsets[row * stride / GROUPED]; }
    int64_t row_bytes() const { return (made == FP32 ? 4 : 2) * stride; }

    // Whether the rows are multiplied by AMX; whether they are laid out for float32 panels.
#ifdef AMX
    bool on_tiles() const { return amx::granted && (made == BF16 || (made == INT8 && n > FEW)); }
#endif
    bool in_panels() const { return common && made == FP32; }

    // The laid-out group of rows that begins with this row.
    float *group(int64_t row) const { return (float *)rounded().laid_out.get() + row * stride; }

    // The rows that this thread writes.
    std::pair<int64_t, int64_t> share(const Team &team) const {
        if (!common) return {0, n};
        const auto [first, last] = team.share((n + GROUP - 1) / GROUP);
        return {first * GROUP, std::min(last * GROUP, n)};
    }

    void prepare(int64_t kind, const Team &team) {
        kind = met_by(kind);
        if (kind == made) return;
        if (common && made >= 0) team.wait(); // until no thread reads the earlier conversion
        made = kind;
        const auto [from, to] = share(team);
        round(from, to);
        if (in_panels())
            for (int64_t row = from; row < to; row += GROUP) lay_out(row);
        if (common) team.wait();
    }

    void round([[maybe_unused]] int64_t from, [[maybe_unused]] int64_t to) {
        if (made == FP32 || (made == BF16 && !ROUNDS_TO_BF16)) return;
        if (!common) own.make_room(n, stride);
        bytes = (const int8_t *)rounded().bytes.data();
#ifdef BF16_PRODUCTS
        if (made == BF16)
            for (int64_t row = from; row < to; row++)
                for (int64_t i = 0; i < stride; i += LANES) store((BFloat *)low(row) + i, load(x + row * stride + i));
#endif
#if defined(INTEGER_PRODUCTS) || defined(WIDE_INTEGER_PRODUCTS)
        if (made == INT8 || made == INT4)
            for (int64_t row = from; row < to; row++) round(row);
#endif
    }

    // Lays out a group of rows word by word: first the words for the first lane of vectors, then the words for the
    // second lane, and so on.
    void lay_out(int64_t row) {
        const int64_t apart = stride / LANES * GROUP;
        alignas(64) float last[GROUP][LANES] = {}; // rows behind the last row count as 0
        const float *from = x + row * stride;
        float *to = group(row);
        for (int64_t i = 0; i < stride; i += LANES, to += GROUP)
            if (row + GROUP <= n) {
                transpose<GROUP>(from + i, stride, to, apart);
            } else {
                for (int64_t r = 0; r < n - row; r++) std::memcpy(last[r], from + r * stride + i, sizeof last[r]);
                transpose<GROUP>(last[0], LANES, to, apart);
            }
    }

    // Returns the factor that scales a row's largest magnitude to `most`; sets the row's scale.
    float to_integers(int64_t row, float most) {
        int32_t top = 0; // compared as integers: NaN is above all numbers
        for (int64_t i = 0; i < stride; i++) top = std::max(top, bits_of(x[row * stride + i]) & 0x7fffffff);
        float largest;
        std::memcpy(&largest, &top, sizeof largest);
        largest = std::max(largest, 1e-30f);
        rounded().scale[row] = top < 0x7f800000 ? largest / most : NAN;
        return most / largest;
    }

#ifdef WIDE_INTEGER_PRODUCTS
    // A row's integers. Each four are in this order: first, third, second, fourth.
    const int16_t *wide(int64_t row) const { return (const int16_t *)low(row); }

    void round(int64_t row) {
        const float *from = x + row * stride;
        const float factor = to_integers(row, 32767);
        int16_t *const to = (int16_t *)low(row);
#ifdef __wasm_simd128__
        const auto four = [&](int64_t i) EACH {
            return wasm_i32x4_trunc_sat_f32x4(wasm_f32x4_nearest(wasm_f32x4_mul(wasm_v128_load(from + i), // to even
                                                                                wasm_f32x4_splat(factor))));
        };
        for (int64_t i = 0; i < stride; i += 8) {
            const v128_t eight = wasm_i16x8_narrow_i32x4(four(i), four(i + 4));
            wasm_v128_store(to + i, wasm_i16x8_shuffle(eight, eight, 0, 2, 1, 3, 4, 6, 5, 7));
        }
#else
        const __m256 factors = _mm256_set1_ps(factor);
        const auto eight = [&](int64_t i)
                               EACH { return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from + i), factors)); };
        for (int64_t i = 0; i < stride; i += 16) {
            const __m256i halves = _mm256_packs_epi32(eight(i), eight(i + 8)); // four of each, in turns
            const __m256i sixteen = _mm256_permute4x64_epi64(halves, 0xd8);
            _mm256_storeu_si256((__m256i *)(to + i),
                                _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(sixteen, 0xd8), 0xd8));
        }
#endif
        if (made != INT4) return;
        for (int64_t i = 0; i < stride; i += GROUPED) {
            int32_t sum = 0;
            for (int64_t at = i; at < i + GROUPED; at++) sum += to[at];
            rounded().offsets[(row * stride + i) / GROUPED] = -8 * sum;
        }
    }
#endif

#ifdef INTEGER_PRODUCTS
    void round(int64_t row) {
        const float *from = x + row * stride;
        const float factor = to_integers(row, 127 * 256 + 127); // high stays a signed byte
        const float magic = 0x1.8p23f;                          // adding this rounds to a whole number, in the low bits
        Rounded &out = rounded();
        int8_t *const lows = (int8_t *)low(row), *const highs = lows + stride;
        int64_t total = 0;
        for (int64_t i = 0; i < stride; i += GROUPED) {
            uint32_t of_group = 0; // overflows if the row is not finite; its scale is NaN then
            for (int64_t at = i; at < i + GROUPED; at++) {
                const int32_t whole = bits_of(from[at] * factor + magic) - 0x4b400000;
                lows[at] = (int8_t)whole;
                highs[at] = (int8_t)((whole - (int8_t)whole) >> 8);
                of_group += whole;
            }
            if (made == INT4) out.offsets[(row * stride + i) / GROUPED] = (int32_t)(-8 * of_group);
            total += (int32_t)of_group;
        }
        out.total[row] = total;
    }
#endif
};

} // namespace kernels
