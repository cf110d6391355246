"""The polynomials with which Muon orthogonalizes: each iteration maps every singular value x to a x + b x³ + c x⁵."""

from typing import Literal

Polynomial = tuple[float, float, float]
"""The coefficients a, b and c of a x + b x³ + c x⁵."""

JORDAN: Polynomial = (3.4445, -4.7750, 2.0315)
"""The polynomial of every iteration with `jordan`, chosen for its steep slope at zero: five iterations map [0.01, 1] to
[0.68, 1.13] (Jordan et al., 2024, "Muon: An optimizer for hidden layers in neural networks")."""

POLAR_EXPRESS: tuple[Polynomial, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""The polynomials of the iterations with `polar_express`; the last is also used in all later iterations. Each is the
closest to 1 on the interval to which the earlier ones map [0.001, 1] (Amsel et al., 2025, "The Polar Express", arXiv
2505.16932, implementation 1)."""

SAFETY = 1.01
"""Divisor of the argument of each polynomial in `POLAR_EXPRESS` except the last; the first polynomial's argument is
divided twice. Otherwise, a singular value that rounding moves above the interval would grow (the same paper, on finite
precision)."""


def polynomials(kind: Literal["jordan", "polar_express"], n_iterations: int) -> tuple[Polynomial, ...]:
    """Return the polynomial of each of `n_iterations` iterations."""
    if kind == "jordan":
        return (JORDAN,) * n_iterations
    *varied, limit = POLAR_EXPRESS
    safe = [_of_divided(polynomial, SAFETY) for polynomial in varied]
    safe[0] = _of_divided(safe[0], SAFETY)  # a rounded Frobenius norm may be below the largest singular value
    return tuple(safe[:n_iterations]) + (limit,) * (n_iterations - len(safe))


def _of_divided(polynomial: Polynomial, divisor: float) -> Polynomial:
    """Return the coefficients of p(x / divisor) as a polynomial of x."""
    a, b, c = polynomial
    return a / divisor, b / divisor**3, c / divisor**5
