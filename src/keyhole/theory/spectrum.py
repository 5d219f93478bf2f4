"""Exact spectrum of the attention kernel under the sphere law."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from keyhole._checks import check_count, check_number
from keyhole.theory.harmonics import harmonic_count
from keyhole.theory.moments import log_gamma_ratio, series_coefficients, tail_nodes

MAX_DEGREE = 1024
"""The highest degree an adaptive spectrum goes to."""


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Levels of a kernel: distinct eigenvalues with their multiplicities, largest first.

    Attributes
    ----------
    eigenvalues : array (levels,)
    multiplicities : array (levels,)
        Exact integers where a float holds them, the nearest float beyond 2^53.
    degrees : int array (levels, …)
        What the eigenfunctions of a level are: for attention (k, l), the degree in the query and in the
        keys; for the MLP the degrees of its tokens in falling order, zeros at the end.
    trace : float
        E K(x, x): the sum of all eigenvalues, those beyond the listed levels included.
    """

    eigenvalues: Float[np.ndarray, " levels"]
    multiplicities: Float[np.ndarray, " levels"]
    degrees: Int[np.ndarray, "levels parts"]
    trace: float

    def __post_init__(self) -> None:
        for array in (self.eigenvalues, self.multiplicities, self.degrees):
            array.flags.writeable = False

    @property
    def remainder(self) -> float:
        """The part of the trace beyond the listed levels; zero where it is no more than rounding."""
        rest = self.trace - float(self.eigenvalues @ self.multiplicities)
        return rest if rest > 1e-14 * self.trace else 0.0

    def __repr__(self) -> str:
        return (
            f"Spectrum({len(self.eigenvalues)} levels from {self.eigenvalues[0]:.4g} down to "
            f"{self.eigenvalues[-1]:.4g}, trace {self.trace:.4g} of which {self.remainder:.2g} beyond them)"
        )


def attention_spectrum(dim: int, n_keys: int, max_degree: int | None = None, tolerance: float | int = 1e-4) -> Spectrum:
    """Eigenvalues of the attention kernel (ReLU, zero-mean heads) under the sphere law.

    λ_k0 = μ_k0 with N_k eigenfunctions Y_k(x_0), and λ_kl = μ_kl / N for l ≥ 1 with N_k N_l eigenfunctions
    Y_k(x_0) N^{−1/2} Σ_i Y_l(x_i); μ_kl from :func:`pair_eigenvalues`.

    Parameters
    ----------
    dim, n_keys : int
        d and N.
    max_degree : int, optional
        List the levels with k, l ≤ max_degree. By default the smallest of 4, 8, 16, … 1024 for which the
        listed levels hold all but ``tolerance`` of the trace. The trace converges slowly (like
        degree^{−3/2} when d is large), because K has a cusp on its diagonal; what is left is ``remainder``,
        known exactly.
    tolerance : float
        Share of the trace that may be left over when ``max_degree`` is None.

    Returns
    -------
    Spectrum
        ``degrees`` has shape (levels, 2), rows (k, l).

    Notes
    -----
    Cost: O(max_degree³). Levels without eigenfunctions (d = 1, degree above one) are left out.

    Examples
    --------
    >>> spectrum = attention_spectrum(dim=8, n_keys=8)
    >>> spectrum.degrees[:5].tolist(), spectrum.eigenvalues[:3].round(6).tolist()
    ([[0, 0], [1, 0], [0, 1], [1, 1], [0, 2]], [0.237284, 0.010545, 0.004735])
    >>> round(spectrum.trace, 4)
    0.4123
    """
    dim, n_keys = check_count(dim, "dim"), check_count(n_keys, "n_keys")
    if max_degree is not None:
        return _attention_levels(dim, n_keys, check_count(max_degree, "max_degree", minimum=0))
    tolerance = check_number(tolerance, "tolerance", minimum=0.0, exclusive=True)
    degree = 4
    while True:
        spectrum = _attention_levels(dim, n_keys, degree)
        if spectrum.remainder <= tolerance * spectrum.trace:
            return spectrum
        if degree >= MAX_DEGREE:
            raise ValueError(
                f"degree {degree} leaves {spectrum.remainder / spectrum.trace:.2e} of the trace, and "
                f"`tolerance` is {tolerance:.1e}. Raise it, or choose `max_degree` and use `remainder`."
            )
        degree *= 2


def _attention_levels(dim: int, n_keys: int, max_degree: int) -> Spectrum:
    counts = multiplicity_table(dim, max_degree)
    values = pair_eigenvalues(dim, max_degree)
    values[:, 1:] /= n_keys
    k, l = np.nonzero(np.outer(counts, counts))  # noqa: E741 (the paper's letters)
    order = np.argsort(-values[k, l], kind="stable")
    k, l = k[order], l[order]  # noqa: E741
    return Spectrum(values[k, l], counts[k] * counts[l], np.stack([k, l], axis=1), attention_trace(dim, n_keys))


def multiplicity_table(dim: int, max_degree: int) -> Float[np.ndarray, " k"]:
    """N_0, …, N_K as floats whose squares do not overflow; an error names the degree where they would."""
    counts = []
    for degree in range(max_degree + 1):
        count = harmonic_count(dim, degree)
        if count > 10**150:
            raise ValueError(
                f"`max_degree` must keep multiplicities within floating point: in dimension {dim} the number "
                f"of harmonics of degree {degree} has {math.log10(count):.0f} digits. Stop below {degree}."
            )
        counts.append(float(count))
    return np.array(counts)


def pair_eigenvalues(dim: int, max_degree: int) -> Float[np.ndarray, "k l"]:
    """μ_kl = ∫∫ κ((1+s)(1+t)/4) (1+t) P_k(s) P_l(t) τ(ds) τ(dt), for k, l ≤ K.

    By Rodrigues' formula ∫ ((1+s)/2)^n P_k(s) τ(ds) = j_n r_k(n), with j_n = Π_{i<n} (d−1+2i)/(2(d−1+i)) and
    r_k(n) = Π_{i<k} (n−i)/(n+i+d−1), so that with κ = Σ a_n ρ^n

        μ_kl = 2 Σ_n a_n j_n j_{n+1} r_k(n) r_l(n+1).

    Every term is positive, so every eigenvalue has full relative accuracy at any d and degree. The terms
    fall like n^{−d−3/2} only; beyond 10 K the sum over n is done as an integral with end corrections.

    Examples
    --------
    >>> pair_eigenvalues(dim=8, max_degree=1).round(6)
    array([[0.237284, 0.03788 ],
           [0.010545, 0.002486]])
    """
    if dim == 1:
        return _pair_eigenvalues_on_the_line(max_degree)
    order, weight = _series_nodes(2 * (5 * max_degree + 2 * dim + 100))
    weight = 2 * weight * np.exp(log_moment(order, dim) + log_moment(order + 1, dim))
    return np.asarray((harmonic_ratios(order, dim, max_degree) * weight) @ harmonic_ratios(order + 1, dim, max_degree).T)


def _series_nodes(start: int) -> tuple[np.ndarray, np.ndarray]:
    """Orders n and weights w with Σ_n a_n f(n) = Σ w f(n): single terms up to ``start``, then an integral."""
    tail, tail_weight = tail_nodes(start)
    order = np.concatenate([[0.0, 1.0], np.arange(2.0, start, 2.0), tail])
    weight = np.ones(len(order))
    weight[-len(tail) :] = tail_weight
    return order, weight * series_coefficients(order)


def log_moment(order: np.ndarray, dim: int) -> np.ndarray:
    """The logarithm of ∫ ((1+s)/2)^n τ(ds): the moments of a Beta(h, h) variable, h = (d−1)/2."""
    h = (dim - 1) / 2
    at_zero = log_gamma_ratio(np.array([h]), h)
    return np.asarray(log_gamma_ratio(order + h, h) - at_zero)


def harmonic_ratios(order: np.ndarray, dim: int, max_degree: int) -> np.ndarray:
    """r_k(n) for k = 0 … K, shape (K+1, nodes)."""
    ratios = np.empty((max_degree + 1, len(order)))
    ratios[0] = 1.0
    for i in range(max_degree):
        ratios[i + 1] = ratios[i] * (np.maximum(order - i, 0.0) / (order + i + dim - 1))
    return ratios


def _pair_eigenvalues_on_the_line(max_degree: int) -> np.ndarray:
    """Dimension one: tokens are ±1, the pair kernel is 1 at (1, 1), 1/π at (−1, 1) and 0 at t = −1."""
    of_query = (1.0 + (-1.0) ** np.arange(max_degree + 1) / math.pi) / 4
    return np.tile(of_query[:, None], (1, max_degree + 1))


def attention_trace(dim: int, n_keys: int) -> float:
    """E K(x, x) = 1/N + (1 − 1/N) ∫ κ((1+t)/2) (1+t) τ(dt) under the sphere law.

    The integral is 2 Σ_n a_n j_{n+1}: positive terms, summed like :func:`pair_eigenvalues`.

    Examples
    --------
    >>> round(attention_trace(dim=8, n_keys=8), 6)
    0.412321
    """
    if dim == 1:
        between = 0.5
    else:
        order, weight = _series_nodes(2 * (2 * dim + 100))
        between = float(2 * np.sum(weight * np.exp(log_moment(order + 1, dim))))
    return 1 / n_keys + (1 - 1 / n_keys) * between
