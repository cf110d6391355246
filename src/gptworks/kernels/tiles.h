// Products of activation rows with weight rows in panels on AMX tiles.

#pragma once

#include "result.h"

#ifdef AMX
using namespace kernels;

namespace {

// Multiplies this thread's share of a bf16 or int8 matrix in panels by all activation rows; see `product`. In memory,
// 16 activation rows already form a tile, and so do 16 words of a panel for one vector. Rows behind the last row are
// computed too, from whatever memory holds there, and dropped.
template<bool INTEGERS> void panels_on_tiles(const Matrix &m, const Rows &x, const Result &to, const Team &team) {
    constexpr int64_t SIDE = amx::SIDE, AT_ONCE = INTEGERS ? SIDE : 2 * SIDE; // two tiles, or the two planes of one
    const int64_t steps = m.n_words() / SIDE, passes = (x.n + AT_ONCE - 1) / AT_ONCE;
    const auto [first_panel, last_panel] = team.share((m.n + m.panel - 1) / m.panel);
    const int64_t end = std::min(last_panel * m.panel, m.n);
    alignas(64) float sums[4][SIDE][SIDE];
    char *const c[] = {(char *)sums[0], (char *)sums[1], (char *)sums[2], (char *)sums[3]};
    for (int64_t first = first_panel * m.panel; first < end; first += m.panel) {
        const int64_t vectors = m.vectors_from(first), stride = vectors * amx::ROW, bytes = stride * m.n_words();
        const char *const panel = (const char *)m.panel_from(first), *const b[] = {panel, panel + amx::ROW};
        Ahead ahead{panel + bytes, panel + (first + m.panel < end ? 2 : 1) * bytes,
                    (vectors * SIDE + passes - 1) / passes};
        for (int64_t row = 0; row < x.n; row += AT_ONCE) {
            const bool tall = INTEGERS || x.n - row > SIDE;
            const char *const a[] = {(char *)x.low(row),
                                     INTEGERS ? (char *)x.high(row) : (char *)x.low(row + (tall ? SIDE : 0))};
            amx::product<INTEGERS>(tall ? 2 : 1, vectors, a, x.pitch, b, stride, SIDE * stride, steps, c, amx::ROW,
                                   false, &ahead);
            put(m, to, first, std::min(first + m.panel, end), row, std::min(row + AT_ONCE, x.n),
                [&](int64_t r, int64_t v) EACH {
                    const int64_t tile = r / SIDE * vectors + v;
                    const Lanes sum = load(sums[tile][r % SIDE]);
                    if constexpr (INTEGERS) {
                        const Lanes high = load(sums[tile + vectors][r % SIDE]);
                        return joined(bits_of(sum), bits_of(high), 0) * x.scale(row + r);
                    }
                    return sum;
                });
        }
        to.finish(0, x.n, first, std::min(first + m.panel, end));
    }
}

} // namespace
#endif
