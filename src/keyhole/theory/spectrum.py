"""Exact spectrum of the attention kernel under the sphere distribution."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int
from scipy.special import roots_jacobi

from keyhole._checks import check_count, check_number
from keyhole.attention.heads import GaussianHeads
from keyhole.theory.blocks import FINITE_RANK, Bias, bias_of, biased_blocks
from keyhole.theory.harmonics import harmonic_count
from keyhole.theory.moments import harmonic_ratios, log_moment
from keyhole.theory.pairs import key_eigenvalues, mean_of_two_keys, pair_eigenvalues

MAX_BIASED_DEGREE = 16
"""The highest degree of the blocks of heads with a mean: a few seconds on one core."""


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Levels of a kernel: distinct eigenvalues with their multiplicities, largest first.

    Attributes
    ----------
    eigenvalues : array (levels,)
    multiplicities : array (levels,)
        Exact integers where a float holds them, the nearest float beyond 2^53.
    degrees : int array (levels, …)
        What the eigenfunctions of a level are: for attention (k, l), the degree in the query and in
        the keys. For the MLP the degrees of its tokens in falling order, zeros at the end.
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
        """The part of the trace beyond the listed levels, or zero if that is only rounding."""
        rest = self.trace - float(self.eigenvalues @ self.multiplicities)
        if rest <= 1e-14 * self.trace:
            return 0.0
        return rest

    def __repr__(self) -> str:
        return (
            f"Spectrum({len(self.eigenvalues)} levels from {self.eigenvalues[0]:.4g} down to "
            f"{self.eigenvalues[-1]:.4g}, trace {self.trace:.4g} of which {self.remainder:.2g} "
            "beyond them)"
        )


def attention_spectrum(
    dim: int,
    n_keys: int,
    max_degree: int | None = None,
    heads: GaussianHeads | None = None,
    tolerance: float | int = 1e-4,
    activation: str = "relu",
    query: bool = True,
) -> Spectrum:
    """Eigenvalues of the attention kernel under the sphere distribution.

    Zero-mean heads: λ_k0 = μ_k0 with N_k eigenfunctions Y_k(x_0), and λ_kl = μ_kl / N for l ≥ 1
    with N_k N_l eigenfunctions Y_k(x_0) N^{−1/2} Σ_i Y_l(x_i); μ_kl from :func:`pair_eigenvalues`.
    Heads with a mean c·I: the eigenvalues of the blocks of :mod:`keyhole.theory.blocks`, one block
    per irrep (a, b) of O(d).

    Parameters
    ----------
    dim, n_keys : int
        d and N.
    max_degree : int, optional
        List the levels with degrees k, l ≤ max_degree in query and key. By default the smallest of
        4, 8, 16, … 1024 (4 … 16 for heads with a mean) for which the listed levels hold all but
        ``tolerance`` of the trace. The trace converges slowly (like degree^{−3/2} when d is large),
        because K has a cusp on its diagonal; what is left is ``remainder``, known exactly.
    heads : GaussianHeads, optional
        The head distribution; its mean is a number, or c·I with any corner on the constant
        coordinate.
    tolerance : float
        Share of the trace that may be left over when ``max_degree`` is None.
    activation : "relu", "linear", "square", "step" or "exp"
        σ, the function of the score. Linear and square have finitely many eigenvalues.
    query : bool
        Whether the sets have a query. Without one the levels are (0, l).

    Returns
    -------
    Spectrum
        ``degrees`` has shape (levels, 2): rows (k, l), or the irreps (a, b) for heads with a mean.
        Levels whose eigenvalue is zero are left out.

    Notes
    -----
    Cost: O(max_degree³), with a mean O(max_degree⁶), kept for other numbers of keys. Levels without
    eigenfunctions (d = 1, degree above one) are left out. Eigenvalues of heads with a mean are
    those of K between the listed functions, so they are never too large, and what they lack is in
    the remainder.

    Examples
    --------
    >>> spectrum = attention_spectrum(dim=8, n_keys=8)
    >>> spectrum.degrees[:5].tolist(), spectrum.eigenvalues[:3].round(6).tolist()
    ([[0, 0], [1, 0], [0, 1], [1, 1], [0, 2]], [0.237284, 0.010545, 0.004735])
    >>> round(spectrum.trace, 4)
    0.4123
    >>> biased = attention_spectrum(dim=6, n_keys=4, heads=GaussianHeads(mean=1.0), max_degree=6)
    >>> biased.degrees[:5].tolist(), biased.eigenvalues[:3].round(6).tolist()
    ([[0, 0], [1, 0], [1, 0], [0, 0], [2, 0]], [0.278665, 0.021098, 0.010433])
    """
    dim = check_count(dim, "dim")
    n_keys = check_count(n_keys, "n_keys")
    bias = bias_of(heads, dim, activation)

    # the levels up to a given degree
    if max_degree is not None:
        degree = check_count(max_degree, "max_degree", minimum=0)
        if bias and degree > MAX_BIASED_DEGREE:
            raise ValueError(
                f"`max_degree` is at most {MAX_BIASED_DEGREE} for heads with a mean: got {degree}. "
                "What lies beyond the listed levels is `remainder`."
            )
        return _positive_levels(attention_levels(dim, n_keys, bias, degree, query))

    # or ever more levels, until enough of the trace is in them
    tolerance = check_number(tolerance, "tolerance", minimum=0.0, exclusive=True)
    for degree in degree_ladder(bias):
        spectrum = attention_levels(dim, n_keys, bias, degree, query)
        if spectrum.remainder <= tolerance * spectrum.trace:
            return _positive_levels(spectrum)
    raise ValueError(
        f"degree {degree} leaves {spectrum.remainder / spectrum.trace:.2e} of the trace, and "
        f"`tolerance` is {tolerance:.1e}. Raise it, or choose `max_degree` and use `remainder`."
    )


def _positive_levels(spectrum: Spectrum) -> Spectrum:
    """The spectrum without levels whose eigenvalue is zero."""
    is_positive = spectrum.eigenvalues > 0.0
    return replace(
        spectrum,
        eigenvalues=spectrum.eigenvalues[is_positive],
        multiplicities=spectrum.multiplicities[is_positive],
        degrees=spectrum.degrees[is_positive],
    )


def degree_ladder(bias: Bias, lowest: int = 0) -> Iterator[int]:
    """The degrees at which ever finer spectra are computed, from ``lowest`` on."""
    if bias:
        ladder: tuple[int, ...] = (4, 6, 8, 12, MAX_BIASED_DEGREE)
    else:
        ladder = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
    first = min(lowest, ladder[-1])
    return (degree for degree in ladder if degree >= first)


def attention_levels(
    dim: int,
    n_keys: int,
    bias: Bias,
    max_degree: int,
    query: bool = True,
    centred: bool = False,
) -> Spectrum:
    """All levels with degrees up to ``max_degree`` in query and key.

    A centred kernel has no level of constants: an intercept learns them.
    """
    if not query:
        return _queryless_levels(dim, n_keys, bias, max_degree, centred)
    if bias:
        spectrum, _ = biased_levels(dim, n_keys, bias, max_degree, {}, centred)
        return spectrum

    # λ_k0 = μ_k0, and λ_kl = μ_kl / N for l ≥ 1
    table = bias.gain * pair_eigenvalues(dim, max_degree, bias.activation)
    table[:, 1:] /= n_keys

    return sorted_levels(
        table,
        multiplicity_table(dim, max_degree),
        trace=mean_diagonal(dim, n_keys, bias),
        centred=centred,
    )


def _queryless_levels(
    dim: int, n_keys: int, bias: Bias, max_degree: int, centred: bool
) -> Spectrum:
    """The levels (0, l) of sets without a query.

    The constant query is zero on the coordinates of the tokens, so that a mean c·I on them does not
    change any score.
    """
    if bias.corner:
        raise ValueError(
            "`heads` must have no mean on the constant coordinate for the spectrum of sets without "
            f"a query: its corner is {bias.corner:g} in units of twice its scale. Use "
            "kh.theory.conditional_curve on features of such sets."
        )
    table = bias.gain * key_eigenvalues(dim, max_degree, bias.activation)[None, :]
    table[:, 1:] /= n_keys
    without_mean = replace(bias, slope=0.0)
    return sorted_levels(
        table,
        multiplicity_table(dim, max_degree),
        trace=mean_diagonal(dim, n_keys, without_mean),
        centred=centred,
    )


def sorted_levels(
    table: Float[np.ndarray, "k l"],
    harmonics: Float[np.ndarray, " degrees"],
    trace: float,
    centred: bool,
) -> Spectrum:
    """Levels (k, l) with eigenvalues from a table, the largest first.

    Degrees without harmonics have no level.
    """
    counts = np.outer(harmonics[: len(table)], harmonics)
    degrees = np.argwhere(counts)
    if centred:
        trace -= table[0, 0]
        degrees = degrees[degrees.any(axis=1)]
    order = np.argsort(-table[tuple(degrees.T)], kind="stable")
    degrees = degrees[order]
    k, l = degrees.T  # noqa: E741 (the paper's letters)
    return Spectrum(
        eigenvalues=table[k, l],
        multiplicities=harmonics[k] * harmonics[l],
        degrees=degrees,
        trace=trace,
    )


def biased_levels(
    dim: int,
    n_keys: int,
    bias: Bias,
    max_degree: int,
    vectors: dict[tuple[int, int], Float[np.ndarray, "states v"]],
    centred: bool = False,
) -> tuple[Spectrum, Float[np.ndarray, " levels"]]:
    """All levels of the blocks, and the power of a target in each.

    The target is given by its vectors in the blocks. A centred kernel has no constant function.
    """
    trace = mean_diagonal(dim, n_keys, bias)

    # the levels of every block, one block after the other
    block_values = []
    block_powers = []
    block_dimensions = []
    block_labels = []
    for block in biased_blocks(dim, bias.unit, max_degree).listed:
        block_vectors = vectors.get(block.label)
        if centred and block.label == (0, 0):
            is_constant = block.is_constant
            trace -= bias.gain * float(np.square(block.factor[:, is_constant]).sum())
            if block_vectors is not None:
                block_vectors = block_vectors[~is_constant]
            block = block.without_constant()
        level_values, level_powers = block.levels(n_keys, block_vectors)
        block_values.append(level_values)
        block_powers.append(level_powers)
        block_dimensions.append(np.full(len(level_values), float(block.dimension)))
        block_labels.append(np.tile(block.label, (len(level_values), 1)))

    # an activation of finite rank has eigenvalues of zero, which rounding has moved
    values = np.concatenate(block_values)
    if bias.activation.has_finite_rank:
        is_rounding = values < FINITE_RANK * bias.unit.largest_diagonal
        values = np.where(is_rounding, 0.0, values)

    # the largest eigenvalue first
    order = np.argsort(-values, kind="stable")
    spectrum = Spectrum(
        eigenvalues=bias.gain * values[order],
        multiplicities=np.concatenate(block_dimensions)[order],
        degrees=np.concatenate(block_labels)[order],
        trace=trace,
    )
    return spectrum, np.concatenate(block_powers)[order]


def multiplicity_table(dim: int, max_degree: int) -> Float[np.ndarray, " k"]:
    """N_0, …, N_K as floats whose squares do not overflow.

    An error names the degree where they would.
    """
    counts = []
    for degree in range(max_degree + 1):
        count = harmonic_count(dim, degree)
        if count > 10**150:
            raise ValueError(
                f"`max_degree` must keep multiplicities within floating point: in dimension {dim} "
                f"the number of harmonics of degree {degree} has {math.log10(count):.0f} digits. "
                f"Stop below {degree}."
            )
        counts.append(float(count))
    return np.array(counts)


def attention_trace(
    dim: int,
    n_keys: int,
    heads: GaussianHeads | None = None,
    activation: str = "relu",
    query: bool = True,
) -> float:
    """E K(x, x) under the sphere distribution.

    Zero-mean heads: 2κ(1)/N + (1 − 1/N) ∫ κ((1+t)/2) (1+t) τ(dt), the integral being
    2 Σ_n a_n j_{n+1}. Heads with a mean, with m = cu + c_0: (1/N) E 2σ(m+z)² + (1 − 1/N) 2 Σ_k
    (1/k!) Σ_q g_{k+1}(q) N_q (∫ h_k(m) P_q dτ)². Sets without a query have the trace of zero-mean
    heads.

    Examples
    --------
    >>> (
    ...     round(attention_trace(dim=8, n_keys=8), 6),
    ...     round(attention_trace(6, 4, GaussianHeads(mean=1.0)), 6),
    ...     round(attention_trace(dim=8, n_keys=8, activation="step"), 6),
    ... )
    (0.412321, 0.568796, 0.429082)
    """
    dim = check_count(dim, "dim")
    n_keys = check_count(n_keys, "n_keys")
    bias = bias_of(heads, dim, activation)
    if query:
        return mean_diagonal(dim, n_keys, bias)
    return attention_levels(dim, n_keys, bias, max_degree=0, query=False).trace


def mean_diagonal(dim: int, n_keys: int, bias: Bias) -> float:
    """E K(x, x): of N² pairs of keys, N are a key with itself and the rest two different keys."""
    if bias:
        same_key, two_keys = _biased_diagonals(dim, bias.unit)
    else:
        same_key = 2 * bias.activation.at_one
        two_keys = mean_of_two_keys(dim, bias.activation)
    return bias.gain * (same_key / n_keys + (1 - 1 / n_keys) * two_keys)


@lru_cache(maxsize=256)
def _biased_diagonals(dim: int, bias: Bias) -> tuple[float, float]:
    """The mean of a pair's kernel with itself, and of two keys of one query.

    The series of the second falls like a power of k for ReLU, k^{−2−d/2}, and for step; beyond the
    last term that power law continues it.
    """
    # the series is slower in low dimension: h_k²/k! falls like k^{−tail_power}, and the moment
    # j_{k+1} like k^{−(d−1)/2}; beyond K terms the power law leaves an error of order K^{−decay}
    decay = bias.activation.tail_power + (dim - 1) / 2
    if math.isfinite(decay):
        most_terms = round(min(max(_TAIL_ERROR ** (-1 / decay), 400), 2000))
    else:
        most_terms = 2000
    most_degrees = 200 if dim < 8 else 80
    last_term = _last_term(dim, bias, most_terms)

    # quadrature over u = <x_0, x_i>: h_k is nearly a polynomial of degree ``highest``, and a
    # quadrature with n nodes is exact to degree 2n − 1. The number of nodes is rounded up to a
    # multiple of 40, so that most means share the nodes in the cache
    highest = min(most_degrees, 40 + int(2 * abs(bias.slope) * math.sqrt(last_term)))
    n_nodes = 40 * math.ceil((highest + 20) / 40)
    u, weights = _correlation_nodes(dim, n_nodes)
    scores = bias.slope * u + bias.corner
    same_key = 2 * float(weights @ bias.activation.second_moment(scores))

    # N_q^{1/2} ∫ h_k(m) P_q dτ/√k!, by (q, k). Without a corner h_k is even or odd, and half of the
    # integrals are zero
    first_even = bias.activation.first_even_order
    if bias.corner == 0 and first_even is not None:
        integrals = _half_integrals(dim, bias, highest, last_term, n_nodes, first_even)
    else:
        zonal = orthonormal_zonal(dim, highest, u)
        moments = bias.activation.moments(scores, last_term + 1)
        integrals = zonal @ (moments * weights).T

    # 2 Σ_k Σ_q g_{k+1}(q) times the squares of these, and the rest of the series
    order = np.arange(1.0, last_term + 2.0)
    ratios = harmonic_ratios(order, dim, highest)
    squares = np.einsum("qk,qk,qk->k", ratios, integrals, integrals)
    terms = 2 * np.exp(log_moment(order, dim)) * squares
    rest = 0.0
    if math.isfinite(decay):
        rest = float(terms[-2:].mean()) * last_term / (decay - 1)
    return same_key, float(terms.sum()) + rest


def _half_integrals(
    dim: int, bias: Bias, highest: int, last_term: int, n_nodes: int, first_even: int
) -> Float[np.ndarray, "q k"]:
    """N_q^{1/2} ∫ h_k(cu) P_q dτ/√k! of an activation whose h_k are even and odd, without a corner.

    From ``first_even`` on h_k is even or odd in u, as P_q is: half of the integrals are zero, and
    half of the nodes give the others.
    """
    u, weights = _correlation_nodes(dim, n_nodes)
    integrals = np.zeros((highest + 1, last_term + 1))

    # the first terms are neither even nor odd
    first_moments = bias.activation.moments(bias.slope * u, first_even)
    zonal = orthonormal_zonal(dim, highest, u)
    integrals[:, :first_even] = zonal @ (first_moments * weights).T

    # nodes come in pairs ±u, of which the positive are the second half
    is_positive = slice(n_nodes // 2, None)
    moments = bias.activation.moments(bias.slope * u[is_positive], last_term + 1)
    weighted_zonal = 2 * weights[is_positive] * zonal[:, is_positive]
    for parity in (0, 1):
        terms = slice(first_even + parity, None, 2)
        integrals[parity::2, terms] = weighted_zonal[parity::2] @ moments[terms].T
    return integrals


_TAIL_ERROR = 1e-14
"""The error that the power law beyond the last term may leave, where 2000 terms are enough."""

_NEGLIGIBLE = 1e-18
"""The share of sup K(x, x) that the terms left out of a series may have."""


def _last_term(dim: int, bias: Bias, most_terms: int) -> int:
    """The first k after which the terms of `_biased_diagonals` do not matter, if there is one.

    The sum over q is at most E h_k²/k! because g_{k+1}(q) ≤ j_{k+1}, so that the terms after k add
    at most 2 Σ_{i>k} j_{i+1} sup h_i²/i!.
    """
    order = np.arange(most_terms + 1.0)
    largest_mean = abs(bias.slope) + abs(bias.corner)
    bounds = bias.activation.term_bounds(order, largest_mean)
    bounds = 2 * bounds * np.exp(log_moment(order + 1, dim))
    from_term_on = np.cumsum(bounds[::-1])[::-1]
    matters = from_term_on > _NEGLIGIBLE * bias.largest_diagonal
    # the bounds hold from k = 3 on
    return max(int(np.count_nonzero(matters)) - 1, 3)


@lru_cache(maxsize=256)
def _correlation_nodes(
    dim: int, n_nodes: int
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Quadrature for the distribution of u = <x_0, x_i>."""
    u, weights = roots_jacobi(n_nodes, (dim - 3) / 2, (dim - 3) / 2)
    weights = weights / weights.sum()
    # both are shared by all callers through the cache
    u.flags.writeable = False
    weights.flags.writeable = False
    return u, weights


def orthonormal_zonal(
    dim: int, max_degree: int, u: Float[np.ndarray, " n"]
) -> Float[np.ndarray, "q n"]:
    """N_q^{1/2} P_q(u) for q ≤ max_degree, by the recurrence that J is in the block (0, 0)."""
    # the entry of J between q−1 and q; the formula is 0/0 at q = 1 in dimension 2
    q = np.arange(1.0, max_degree + 1)
    squares = q * (q + dim - 3) / ((2 * q + dim - 2) * np.maximum(2 * q + dim - 4, 1))
    steps = np.sqrt(np.where(q == 1, 1 / dim, squares))

    # u f_q = J_{q,q+1} f_{q+1} + J_{q−1,q} f_{q−1}, f_0 = 1
    values = np.ones((max_degree + 1, len(u)))
    if max_degree >= 1:
        values[1] = u / steps[0]
    for i in range(1, max_degree):
        values[i + 1] = (u * values[i] - steps[i - 1] * values[i - 1]) / steps[i]
    return values
