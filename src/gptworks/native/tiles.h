// Products of activation rows with a weight matrix on AMX tiles.

#pragma once

#include "result.h"

#ifdef AMX
namespace {

constexpr int64_t TILES_BYTES = 1 << 20;  // of activations that a core's second cache keeps while weights pass

// Activation rows from … to with weight rows first … end; see product. Weights are read as they lie: 16 rows are a column of
// tiles, and what comes after them is asked for in order meanwhile.
template <bool INTEGERS>
void tiles_of_amx(const Matrix &m, const Rows &x, int64_t row_from, int64_t row_to, int64_t from, int64_t end, const Result &to) {
    constexpr int64_t SIDE = amx::SIDE;
    const int64_t row_bytes = m.row_bytes(), steps = row_bytes / amx::ROW;
    const int64_t at_once = INTEGERS ? SIDE : 2 * SIDE;  // activation rows: two tiles, or the two planes of one
    const int64_t n_steps = (row_to - row_from + at_once - 1) / at_once * steps;
    thread_local Buffer last_rows;  // followed by zeros
    alignas(64) float results[4][SIDE][SIDE], turned[SIDE][SIDE];
    char *const c[] = {(char *)results[0], (char *)results[1], (char *)results[2], (char *)results[3]};
    for (int64_t n = from, count; n < end; n += count) {
        count = end - n >= 2 * SIDE ? 2 * SIDE : std::min(SIDE, end - n);
        const bool two = count > SIDE;
        const char *weights = (const char *)m.weight + n * row_bytes, *const after = weights + count * row_bytes;
        if (count < SIDE) {
            last_rows.assign(SIDE * row_bytes / sizeof(Lanes), Lanes{});
            std::memcpy(last_rows.data(), weights, count * row_bytes);
            weights = (const char *)last_rows.data();
        }
        const Columns columns[] = {{m, n, end}, {m, std::min(n + SIDE, end), end}};
        const int64_t lines = std::min(2 * SIDE, end - n - count) * row_bytes / 64;
        Ahead ahead{after, after + 64 * lines, (lines + n_steps - 1) / n_steps};
        for (int64_t row = row_from; row < row_to; row += at_once) {
            const bool one = !INTEGERS && row_to - row <= SIDE;
            const char *const b[] = {(char *)x.words(row), one ? nullptr : (char *)(INTEGERS ? x.words(row, 1) : x.words(row + SIDE))};
            const auto run = [&](auto rows, auto columns) EACH {
                amx::product<INTEGERS, rows, columns>(weights, row_bytes, b, amx::ROW, amx::TILE, steps, c, amx::ROW, false, &ahead);
            };
            typedef std::integral_constant<int, 1> One;
            typedef std::integral_constant<int, 2> Two;
            if (two)
                one ? run(Two{}, One{}) : run(Two{}, Two{});
            else
                one ? run(One{}, One{}) : run(One{}, Two{});
            for (int64_t i = 0; i < (two ? 2 : 1); i++)
                for (int64_t j = 0; j < (INTEGERS || one ? 1 : 2); j++) {
                    float(*sums)[SIDE] = results[i * (one ? 1 : 2) + j];
                    if (INTEGERS)
                        for (int64_t r = 0; r < SIDE; r++)
                            store(sums[r], joined(bits_of(load(sums[r])), bits_of(load(results[2 * i + 1][r])), 0));
                    turn(sums[0], SIDE, turned[0], SIDE);
                    for (int64_t r = row + j * SIDE; r < std::min(row_to, row + (j + 1) * SIDE); r++) {
                        const Lanes sum = load(turned[r % SIDE]);
                        columns[i].put(INTEGERS ? sum * x.scale(r) : sum, r, to);
                    }
                }
        }
        to.finish(row_from, row_to, n, n + count);
    }
}

}  // namespace
#endif
