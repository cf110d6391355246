// Products of activation rows with a weight matrix of any kind.

#pragma once

#include "result.h"

namespace [[gnu::visibility("hidden")]] kernels {

// Computes the products of all activation rows with this thread's share of the weight rows. Converts x as this kind of
// weights needs.
void product(const Matrix &m, Rows &x, const Result &to, const Team &team);

// Returns the largest number of rows in a panel of this kind of weights; 0: they are stored row by row.
int64_t widest_panel(int64_t kind);

} // namespace kernels
