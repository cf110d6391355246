// Products of activation rows with a weight matrix of any kind.

#pragma once

#include "result.h"

namespace [[gnu::visibility("hidden")]] kernels {

// The products of all activation rows with this thread's share of the weight rows. Prepares x for this kind of weights.
void product(const Matrix &m, Rows &x, const Result &to, const Team &team);

// The most rows of a panel of a kind of weights; 0: they lie row by row.
int64_t widest_panel(int64_t kind);

} // namespace kernels
