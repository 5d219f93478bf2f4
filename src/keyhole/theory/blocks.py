"""Exact spectrum of biased heads, W = c·W_0 + noise, under the sphere distribution.

One small matrix per irrep of O(d).

With u = <x_0, x_i>, s = <x_0, x'_0>, t = <x_i, x'_j> and h_k(m) = E[σ^(k)(m + z)] the kernel of a
pair is

    Σ_k (1/k!) 4^{−k} (1+s)^k (1+t)^{k+1} h_k(cu + c_0) h_k(cu' + c_0),

c_0 being the corner of the mean. It commutes with rotations of query and key together, so it splits
over the irreps of O(d) with Young diagrams of at most two rows (a, b). Each occurs at most once
among the products of harmonics of degree p in the query and q in the key, for p+q = a+b+2r, |p−q| ≤
a−b: these |p,q> are the basis of the block (a, b). There u is the symmetric matrix J of
:func:`correlation_matrix`, (1+s)^k (1+t)^{k+1} is diagonal, and

    A_ab = 2 Σ_k (1/k!) h_k(cJ + c_0) diag(g_k(p) g_{k+1}(q)) h_k(cJ + c_0),
    g_n(p) = j_n Π_{i<p} (n−i)/(n+i+d−1).

A set averages over its keys: with D = 1 on |a, 0> and 1/N elsewhere the eigenvalues of K are those
of D^{1/2} A_ab D^{1/2}, each dim(a, b) times.

Everything is kept as a factor, A = R^T R: squares of singular values of R are small eigenvalues to
full accuracy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int
from scipy.fft import dct
from scipy.linalg import solve_triangular
from scipy.linalg.lapack import dpocon, dpotrf
from scipy.sparse import csr_array
from scipy.special import gammaln, ndtr
from threadpoolctl import threadpool_limits

from keyhole._array import block_size, blocks
from keyhole.attention.heads import GaussianHeads
from keyhole.theory.biased import hermite_moments
from keyhole.theory.harmonics import gegenbauer, harmonic_count, power_moment
from keyhole.theory.limits import check_cost, check_limits
from keyhole.theory.moments import harmonic_ratios, log_moment, pair_eigenvalues
from keyhole.theory.targets import PAIR, QUERY, Polynomial, Term, crossed_joinings, monomial

ACCURACY = 1e-2
"""What the series of a block may leave out, against the eigenvalues (D+1, 0) and (0, D+1) of
zero-mean heads.
"""

SHOWS = 3e-15
"""Where the rounding of numbers near one may show: blocks that must be more accurate are made more
carefully.
"""

LARGEST_MEAN = 8.0
"""In units of twice the scale: beyond it h_k(cu) turns so fast in u that blocks take minutes."""

MOST_TERMS, MOST_DEGREES = 6000, 400
"""Terms of the series in k, and the degree of the polynomials that stand for h_k(cu)."""


@dataclass(frozen=True)
class Bias:
    """A mean c·W_0 with the corner c_0, in units of twice the scale.

    ``gain`` = (2·scale)² multiplies the kernel.
    """

    slope: float = 0.0
    corner: float = 0.0
    gain: float = 1.0

    def __bool__(self) -> bool:
        return self.slope != 0.0 or self.corner != 0.0

    @property
    def unit(self) -> Bias:
        """The same without the gain."""
        return replace(self, gain=1.0)

    @property
    def largest_diagonal(self) -> float:
        """sup K(x, x) on unit tokens: 2 E[σ(m+z)²] at the largest mean score m."""
        return self.gain * float(second_moment(np.array([abs(self.slope) + self.corner]))[0])


def bias_of(heads: object, dim: int) -> Bias:
    """The bias of a head distribution.

    Or an error that says which head distributions have a closed spectrum.
    """
    if heads is None:
        return Bias()
    if not isinstance(heads, GaussianHeads):
        raise ValueError(
            "`heads` must be kh.GaussianHeads(mean=c, scale=…) for an exact spectrum: got "
            f"{heads!r}. For other head distributions use kh.theory.empirical_curve on a Gram "
            "matrix of samples."
        )
    mean, scale = heads.moments(dim)
    if mean is None:
        return Bias(gain=(2 * scale) ** 2)
    slope, corner = float(mean[0, 0]), float(mean[-1, -1])
    known = slope * np.eye(dim + 1)
    known[-1, -1] = corner
    if not np.array_equal(mean, known):
        off = np.unravel_index(int(np.abs(mean - known).argmax()), mean.shape)
        raise ValueError(
            "`heads` must have a mean c·I on the coordinates of the tokens and any number on the "
            f"constant one for an exact spectrum: its entry {tuple(int(i) for i in off)} is "
            f"{mean[off]:g}, not {known[off]:g}. For other means use kh.theory.empirical_curve on "
            "a Gram matrix of samples."
        )
    if dim < 2:
        raise ValueError(
            "`heads` has a mean, and its exact spectrum needs tokens of dimension 2 or more: got "
            "dim 1."
        )
    bias = Bias(slope / (2 * scale), corner / (2 * scale), (2 * scale) ** 2)
    if max(abs(bias.slope), abs(bias.corner)) > LARGEST_MEAN:
        raise ValueError(
            f"`heads` must have a mean of at most {LARGEST_MEAN:g} times twice its scale for an "
            f"exact spectrum: its mean is {slope:g}, its corner {corner:g}, its scale {scale:g}. "
            "Beyond, use kh.theory.empirical_curve."
        )
    return bias


def second_moment(m: Float[np.ndarray, " q"]) -> Float[np.ndarray, " q"]:
    """2 E[ReLU(m+z)²] = 2 [(1+m²) Φ(m) + m φ(m)]: the kernel of a unit pair with itself."""
    return np.asarray(2 * ((1 + m * m) * ndtr(m) + m * np.exp(-m * m / 2) / math.sqrt(2 * math.pi)))


def irrep_dimension(dim: int, a: int, b: int) -> int:
    """Number of dimensions of the irrep (a, b) of O(d), exactly; for d = 2, of the momenta ±a.

    >>> [irrep_dimension(dim=6, a=a, b=b) for a, b in ((0, 0), (1, 0), (2, 0), (1, 1))]
    [1, 6, 20, 15]
    """
    if dim == 2:
        return 1 if a == 0 else 2
    if b == 0:
        return harmonic_count(dim, a)
    if dim == 3:
        return 2 * a + 1
    upper = (a - b + 1) * (a + b + dim - 3) * (2 * a + dim - 2) * (2 * b + dim - 4)
    upper *= math.factorial(a + dim - 4) * math.factorial(b + dim - 5)
    lower = (
        math.factorial(a + 1)
        * math.factorial(b)
        * math.factorial(dim - 2)
        * math.factorial(dim - 4)
    )
    return upper // lower


def block_labels(dim: int, degree: int) -> list[tuple[int, int]]:
    """All irreps (a, b) with a state p, q ≤ degree; in dimension 2 the momenta (m, 0)."""
    rows = {2: 0, 3: min(1, degree)}.get(dim, degree)
    return [(a, b) for b in range(rows + 1) for a in range(b, 2 * degree - b + 1)]


def block_states(dim: int, a: int, b: int, degree: int) -> Int[np.ndarray, "states 2"]:
    """The states (p, q), p, q ≤ degree, of the block (a, b).

    In dimension 2 signed, with p + q = a.
    """
    grid = np.arange(-degree if dim == 2 else 0, degree + 1)
    p, q = (x.ravel() for x in np.meshgrid(grid, grid, indexing="ij"))
    above, apart = p + q - a - b, np.abs(p - q)
    inside = above == 0 if dim == 2 else (above >= 0) & (above % 2 == 0) & (apart <= a - b)
    return np.stack([p[inside], q[inside]], axis=1)


def correlation_matrix(dim: int, a: int, b: int, states: Int[np.ndarray, "states 2"]) -> csr_array:
    """Multiplication by u = <x_0, x_i> in the block (a, b), between the given states.

    With P = p+(d−2)/2, Q = q+(d−2)/2, A = a+(d−2)/2, B = b+(d−4)/2, F(z) = (z²−(A+B)²)(z²−(A−B)²)

        <p+1,q+1|u|p,q>² = F(P+Q+1)/(64 P(P+1)Q(Q+1)),
        <p+1,q−1|u|p,q>² = F(P−Q+1)/(64 P(P+1)Q(Q−1)),

    entries positive. In dimension 2 it is half the sum of the shifts (p, q) → (p±1, q∓1).

    >>> # E u² = 1/3
    >>> correlation_matrix(3, 0, 0, block_states(3, 0, 0, degree=1)).toarray().round(6)
    array([[0.     , 0.57735],
           [0.57735, 0.     ]])
    """
    low, wide = states.min(initial=0), int(states.max(initial=0)) + 2
    place = np.full((wide - low + 1, wide - low + 1), -1)
    p, q = states.T
    place[p - low, q - low] = np.arange(len(states))
    rows, columns, values = [], [], []
    for step in (1, -1):
        to = np.where(q + step >= low, place[p + 1 - low, np.maximum(q + step, low) - low], -1)
        there = to >= 0
        rows.append(np.flatnonzero(there))
        columns.append(to[there])
        values.append(_correlation_entries(dim, a, b, p[there], q[there], step))
    i, j, v = (np.concatenate(part) for part in (rows, columns, values))
    size = (len(states), len(states))
    return csr_array(
        (np.concatenate([v, v]), (np.concatenate([i, j]), np.concatenate([j, i]))), shape=size
    )


def _correlation_entries(
    dim: int, a: int, b: int, p: np.ndarray, q: np.ndarray, step: int
) -> np.ndarray:
    """<p+1, q+step| u |p, q>."""
    if dim == 2:
        return np.full(len(p), 0.5 if step < 0 else 0.0)
    half = (dim - 2) / 2
    P, Q, total, apart = p + half, q + half, a + b + dim - 3, a - b + 1
    z = P + step * Q + 1
    # factors and not squares: z and A ± B are whole or half numbers, so that nothing cancels
    squares = (
        (z - total) * (z + total) * (z - apart) * (z + apart) / (64 * P * (P + 1) * Q * (Q + step))
    )
    return np.asarray(np.sqrt(np.maximum(squares, 0.0)))


def correlation_norm(dim: int, degree: int) -> float:
    """A bound on |<f, u f>|/<f, f> over all pair functions of degrees p, q ≤ degree.

    It follows from the sums of J's rows.
    """
    if dim == 2:
        return 1.0
    p = q = float(degree)
    half = (dim - 2) / 2
    smallest = (half * (half + 1)) ** 2
    z = p + q + dim - 1
    up = (z**2 - (dim - 3) ** 2) * z**2 / (64 * smallest)
    side = (p + q + dim - 3) ** 2 * (p + q + 1) ** 2 / (64 * smallest)
    return min(1.0, 2 * math.sqrt(up) + 2 * math.sqrt(side))


@dataclass(frozen=True, eq=False)
class _Series:
    """h_k(cu + c_0)/√k! = Σ_m coefficients[k, m] T_m(u/reach) for k = 0 … K.

    And the weights 2 j_k j_{k+1}.
    """

    coefficients: Float[np.ndarray, "k m"]
    weights: Float[np.ndarray, " k"]
    reach: float

    def tails(self, degree: int) -> Float[np.ndarray, " k"]:
        """Σ_{m > degree} |coefficients|: how far h_k is from polynomials of that degree."""
        return np.asarray(np.abs(self.coefficients[:, degree + 1 :]).sum(axis=1))


def _series(dim: int, bias: Bias, reach: float, allowed: float) -> _Series:
    """The series in k and in polynomials of u, cut where what is left is below ``allowed``.

    Terms beyond K are positive and add at most 2 Σ_{k>K} sup h_k²/k! · j_k j_{k+1} to the norm of a
    block, where h_k²/k! ≤ (2/πn)^{1/2} / (2π k (k−1)), n = k−2 ≥ 1, by the amplitude of Hermite
    functions at 0. Polynomials of higher degree change singular values by at most the root of 2 Σ_k
    (Σ_m |η_km|)² j_k j_{k+1}, m over what is left out: this is kept below a thousandth of √allowed.
    """
    order = np.arange(MOST_TERMS + 1.0)
    weights = 2 * np.exp(log_moment(order, dim) + log_moment(order + 1, dim))
    envelope = np.sqrt(2 / (math.pi * np.maximum(order - 2, 1.0)))
    terms = weights * envelope / (2 * math.pi * np.maximum(order * (order - 1), 1.0))
    left = np.concatenate([np.cumsum(terms[::-1])[::-1][1:], [0.0]])
    last = min(max(int(np.argmax(left <= allowed)), 2), MOST_TERMS)
    waves = abs(bias.slope) * reach * math.sqrt(last)
    nodes = min(2 * math.ceil(40 + 2 * waves), 2 * MOST_DEGREES)
    angles = math.pi * (np.arange(nodes) + 0.5) / nodes
    moments = hermite_moments(bias.slope * reach * np.cos(angles) + bias.corner, last + 1)
    coefficients = dct(moments, type=2, axis=1) / nodes
    coefficients[:, 0] /= 2
    if allowed < SHOWS:
        coefficients = _refined_coefficients(coefficients, bias, reach)
    weights = weights[: last + 1]
    sizes = np.cumsum(np.abs(coefficients)[:, ::-1], axis=1)[:, ::-1]
    enough = np.flatnonzero(weights @ sizes**2 <= 1e-6 * allowed)
    stop = int(enough[0]) if len(enough) else nodes
    return _Series(coefficients[:, :stop], weights, reach)


def _refined_coefficients(
    coefficients: Float[np.ndarray, "k m"], bias: Bias, reach: float
) -> Float[np.ndarray, "k m"]:
    """The same with small coefficients to full relative accuracy.

    There Taylor's series at c_0 has no cancellation.

    The coefficient of T_m is Σ_j 2^{1−j} C(j, (j−m)/2) h_{k+j}(c_0) (c·reach)^j / (j! √k!) over j =
    m, m+2, …
    """
    terms, degrees = coefficients.shape
    k, m = np.arange(terms)[:, None], np.arange(degrees)
    moments = hermite_moments(np.array([bias.corner]), terms + degrees + 80)[:, 0]
    total, size = np.zeros_like(coefficients), np.zeros_like(coefficients)
    for i in range(40):
        j = m + 2 * i
        log = gammaln(k + j + 1) / 2 - gammaln(k + 1) / 2 - gammaln(i + 1) - gammaln(m + i + 1)
        term = 2 * moments[k + j] * np.exp(log + j * math.log(abs(bias.slope) * reach / 2 + 1e-300))
        total += term
        size += np.abs(term)
    total = np.where(m == 0, total / 2, total) * (np.sign(bias.slope) if bias.slope else 1.0) ** m
    better = (size < 1e3 * np.abs(total)) & (np.abs(term) < 1e-17 * size)
    return np.where(better, total, coefficients)


@dataclass(frozen=True, eq=False)
class Block:
    """One irrep: its states (p, q), the dimension of the irrep, and a factor of A = R^T R."""

    label: tuple[int, int]
    states: Int[np.ndarray, "states 2"]
    dimension: int
    factor: Float[np.ndarray, "rows states"]

    def key_scale(self, n_keys: int) -> Float[np.ndarray, " states"]:
        """D^{1/2}: 1 on functions of the query alone, N^{−1/2} elsewhere."""
        return np.where(self.states[:, 1] == 0, 1.0, 1 / math.sqrt(n_keys))

    def levels(
        self, n_keys: int, vectors: Float[np.ndarray, "states v"] | None = None
    ) -> tuple[Float[np.ndarray, " states"], Float[np.ndarray, " states"]]:
        """Eigenvalues of D^{1/2} A D^{1/2}, and powers along its eigenvectors.

        The powers are those of D^{1/2} times the vectors.
        """
        scale = self.key_scale(n_keys)
        if vectors is None:
            values = np.linalg.svd(self.factor * scale, compute_uv=False)
            return np.square(values), np.zeros(len(values))
        _, values, right = np.linalg.svd(self.factor * scale)
        return np.square(values), np.square(right @ (scale[:, None] * vectors)).sum(axis=1)

    def inverse_form(self, vectors: Float[np.ndarray, "states v"]) -> float:
        """tᵀ A⁻¹ t, summed over vectors.

        With the states scaled to unit diagonal, which takes the grading out of R.
        """
        scale = np.sqrt(np.square(self.factor).sum(axis=0))
        triangle = np.linalg.qr(self.factor / scale, mode="r")
        return float(
            np.square(solve_triangular(triangle, vectors / scale[:, None], trans="T")).sum()
        )


@dataclass(frozen=True, eq=False)
class Blocks:
    """All blocks with states p, q ≤ degree, and the largest diagonal entries beyond.

    Those entries of A are for q = 0, and for any other q.
    """

    listed: tuple[Block, ...]
    query_edge: float
    key_edge: float

    def edge(self, n_keys: int) -> float:
        """What the eigenvalues beyond the blocks begin with."""
        return max(self.query_edge, self.key_edge / n_keys)


@lru_cache(maxsize=64)
def biased_blocks(dim: int, bias: Bias, degree: int) -> Blocks:
    """All blocks with states p, q ≤ degree, without the gain."""
    edge = pair_eigenvalues(dim, degree + 1)
    allowed = ACCURACY * min(edge[degree + 1, 0], edge[0, degree + 1])
    # one degree more where b = 0: there are the largest entries beyond the listed states, for any
    # mean
    wanted = [(label, degree + (label[1] == 0)) for label in block_labels(dim, degree)]
    listed, edges = [], {True: 0.0, False: 0.0}
    # many small matrices: threads of BLAS would spend their time waiting, minutes of it where
    # others use the cores too
    with threadpool_limits(1, user_api="blas"):
        made = list(_made_blocks(dim, bias, wanted, allowed))
    for block in made:
        inside = np.abs(block.states).max(axis=1) <= degree
        sizes = np.square(block.factor[:, ~inside]).sum(axis=0)
        for of_query in edges:
            there = (block.states[~inside, 1] == 0) == of_query
            edges[of_query] = max(edges[of_query], sizes[there].max(initial=0.0))
        listed.append(replace(block, states=block.states[inside], factor=block.factor[:, inside]))
    return Blocks(tuple(listed), float(edges[True]), float(edges[False]))


@lru_cache(maxsize=256)
def single_block(dim: int, bias: Bias, label: tuple[int, int], degree: int) -> Block:
    """One block, accurate down to its smallest eigenvalues."""
    smallest = pair_eigenvalues(dim, degree)[degree, degree]
    with threadpool_limits(1, user_api="blas"):
        return next(_made_blocks(dim, bias, [(label, degree)], 0.1 * smallest))


def _made_blocks(
    dim: int, bias: Bias, wanted: list[tuple[tuple[int, int], int]], allowed: float
) -> Iterator[Block]:
    """Blocks with the given labels and highest degrees.

    What is left out of the series lowers an eigenvalue λ by at most ``allowed``, and what stands
    for h_k moves it by less than a hundredth of (allowed · λ)^{1/2}.
    """
    highest = max(degree for _, degree in wanted)
    series, top = _reach(dim, bias, highest, allowed)
    states = [block_states(dim, *label, top) for label, _ in wanted]
    pairs, places = np.unique(np.abs(np.concatenate(states)), axis=0, return_inverse=True)
    cost = _blocks_cost(dim, series, allowed, len(pairs), wanted, [len(some) for some in states])
    check_cost(
        seconds=cost.seconds,
        memory=cost.memory,
        step=(
            f"the spectrum of heads with mean {bias.slope:g} to degree {highest} in dimension {dim}"
        ),
    )
    roots = _state_roots(dim, series, pairs, allowed)
    ends = np.cumsum([len(some) for some in states])[:-1]
    for (label, degree), some, place in zip(
        wanted, states, np.split(places.ravel(), ends), strict=True
    ):
        check_limits()
        kept = np.flatnonzero(np.abs(some).max(axis=1) <= degree)
        tall = _columns(correlation_matrix(dim, *label, some) / series.reach, kept, roots[place])
        yield Block(label, some[kept], irrep_dimension(dim, *label), _root(tall, allowed))


@dataclass(frozen=True)
class _Cost:
    """What a step takes, roughly: seconds on one core, and bytes of its largest array."""

    seconds: float
    memory: float


def _blocks_cost(
    dim: int,
    series: _Series,
    allowed: float,
    n_pairs: int,
    wanted: list[tuple[tuple[int, int], int]],
    n_states: list[int],
) -> _Cost:
    """What `_made_blocks` takes once the series is known, from the sizes of its arrays.

    Measured on one core for 53 combinations of d = 2 … 512, c = 0.25 … 4 and degrees 4 … 16, and
    for single blocks to degree 40: what takes more than 0.5 s is right within a factor of three,
    but for single blocks in four dimensions or fewer, which the series itself makes up to five
    times as slow.
    """
    terms, polynomials = series.coefficients.shape
    rank = min(terms, polynomials)
    # `_state_roots`: for every pair (p, q) a scaled copy of the series, and its root
    scaled = 5e-9 * terms * polynomials
    if allowed < SHOWS:
        root = 2.5e-10 * terms * polynomials * rank  # reflections
    else:
        root = 4e-11 * polynomials**2 * (terms + 10 * polynomials)  # a product and its eigenvectors
    # `_columns`: in every block all states times the states that are kept
    products = 0
    for (label, degree), count in zip(wanted, n_states, strict=True):
        kept = len(block_states(dim, *label, degree))
        products += count * kept * polynomials * rank
    seconds = 1e-3 * len(wanted) + n_pairs * (scaled + root) + 1.5e-10 * products
    return _Cost(seconds=seconds, memory=8.0 * n_pairs * polynomials * rank)


def _reach(dim: int, bias: Bias, degree: int, allowed: float) -> tuple[_Series, int]:
    """The series, and the highest degree of states between the factors h_k(cJ) that does matter.

    States beyond it are reached by polynomials of degree m and more in u only, and lead back to a
    state within by those of still higher degree. What all of them add to a block, 2 Σ_k
    (Σ_i |η_ki|)² g_k(p) g_{k+1}(q) for i > m or more, by the degree of the state, is kept below
    ``allowed``. The bound is far from sharp.
    """
    margin, series = 0, None
    while True:
        check_limits()
        top = degree + margin
        reach = correlation_norm(dim, top)
        if series is None or reach > series.reach:
            series = _series(dim, bias, min(1.0, 1.2 * reach), allowed)
        order = np.arange(len(series.weights), dtype=np.float64)
        ratios = np.maximum(
            harmonic_ratios(order, dim, top + 1), harmonic_ratios(order + 1, dim, top + 1)
        )
        steps = [degree + 2 * margin + 1 - state for state in range(top + 2)]
        lost = sum(
            size @ series.tails(step) ** 2
            for size, step in zip(ratios * series.weights, steps, strict=True)
        )
        if lost <= allowed:
            return series, top
        margin += 1


def _state_roots(
    dim: int, series: _Series, pairs: Int[np.ndarray, "s 2"], allowed: float
) -> Float[np.ndarray, "s m r"]:
    """For every (p, q) a matrix L with L Lᵀ = Σ_k η_k η_kᵀ 2 g_k(p) g_{k+1}(q).

    The equation holds but for less than ``allowed``.
    """
    order, top = np.arange(len(series.weights), dtype=np.float64), int(pairs.max())
    query, key = harmonic_ratios(order, dim, top), harmonic_ratios(order + 1, dim, top)
    weighted = np.sqrt(series.weights)[:, None] * series.coefficients
    roots = np.empty((len(pairs), weighted.shape[1], min(weighted.shape)))
    for rows in blocks(len(pairs), block_size(8 * weighted.size, 2**26)):
        check_limits()
        p, q = pairs[rows].T
        scaled = np.sqrt(query[p] * key[q])[:, :, None] * weighted
        found = _root(scaled, allowed)[:, : roots.shape[2]]
        roots[rows] = found.swapaxes(1, 2)
    sizes = np.sqrt(np.square(roots).sum(axis=1)).max(axis=0)
    return roots[..., : max(int(np.count_nonzero(sizes > 1e-3 * math.sqrt(allowed))), 1)]


def _root(tall: Float[np.ndarray, "*batch n m"], allowed: float) -> Float[np.ndarray, "*batch r m"]:
    """R with RᵀR = tallᵀ tall, from the product itself, rows by falling length.

    For where rounding of the product cannot show.

    Otherwise the relative accuracy of every column, however small, has to be kept: by the product
    of columns of unit length, or by Householder's reflections where that is too near to singular.
    """
    if allowed < SHOWS:
        if tall.ndim == 2 and tall.shape[0] > tall.shape[1]:
            lengths = np.sqrt(np.square(tall).sum(axis=0)) + 1e-300
            unit = tall / lengths
            product = unit.T @ unit
            triangle, failed = dpotrf(product)
            if not failed and dpocon(triangle, np.abs(product).sum(axis=0).max())[0] > 1e-10:
                return np.asarray(triangle * lengths)
        return np.asarray(np.linalg.qr(tall, mode="r"))
    squares, vectors = np.linalg.eigh(tall.swapaxes(-1, -2) @ tall)
    roots = np.sqrt(np.maximum(squares, 0.0))[..., None] * vectors.swapaxes(-1, -2)
    return np.asarray(roots[..., ::-1, :])


def _columns(
    u: csr_array, kept: Int[np.ndarray, " kept"], roots: Float[np.ndarray, "s m r"]
) -> Float[np.ndarray, "sr kept"]:
    """Σ_m <s| T_m(u) |kept> L_mr for all s and r.

    A between the kept states is the product of this with itself.
    """
    powers = np.zeros((u.shape[0], roots.shape[1], len(kept)))
    powers[kept, 0, np.arange(len(kept))] = 1.0
    for m in range(1, roots.shape[1]):
        raised = u @ powers[:, m - 1]
        powers[:, m] = raised if m == 1 else 2 * raised - powers[:, m - 2]
    return np.asarray(roots.swapaxes(1, 2) @ powers).reshape(-1, len(kept))


def target_vectors(
    target: Polynomial, degree: int
) -> dict[tuple[int, int], Float[np.ndarray, "states v"]]:
    """Vectors of a target's pair function F in the blocks.

    On the states p, q ≤ degree ≥ its own degrees.

    Their squares and products are those of the parts of F in the members of the irrep. Terms u^q
    <β, x>^p have closed forms (:func:`_zonal_vectors`); any other F whose terms have one degree is
    taken apart by its contractions (:func:`_part_products`); one that mixes the two, or is too
    large for that, is a ValueError.
    """
    zonal = [_one_direction(term, target.dim) for term in target.terms]
    if None not in zonal:
        return _zonal_vectors([part for part in zonal if part is not None], target.dim, degree)
    return _contracted_vectors(target, degree)


@dataclass(frozen=True, eq=False)
class _Zonal:
    """c u^q <β, x>^p with a direction β of unit length, x the query or the key."""

    coefficient: float
    exponent: int
    of_query: bool
    direction: Float[np.ndarray, " d"]
    power: int


def _one_direction(term: Term, dim: int) -> _Zonal | None:
    """A term u^q <β, x>^p, or None if it is another."""
    exponent, of_query, direction, power = 0, False, np.eye(dim)[0], 0
    for factor, count in term.powers:
        if factor.kind == PAIR and factor.array is None:
            exponent = count
        elif factor.kind != PAIR and power == 0:
            assert factor.array is not None
            of_query, direction, power = factor.kind == QUERY, factor.array, count
        else:
            return None
    length = float(np.linalg.norm(direction))
    return _Zonal(term.coefficient * length**power, exponent, of_query, direction / length, power)


def _zonal_vectors(
    parts: list[_Zonal], dim: int, degree: int
) -> dict[tuple[int, int], Float[np.ndarray, "states v"]]:
    """Vectors of terms u^q <β, x>^p.

    J^q |0, l> times N_l^{1/2} ∫ t^p P_l dτ in (l, 0), or |l, 0> for x_0.

    Along directions β and γ such vectors belong to members of the irrep with the inner product
    P_l(cos(β, γ)).
    """
    found: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for part in parts:
        for l in range(part.power % 2, part.power + 1, 2):  # noqa: E741
            states = block_states(dim, l, 0, degree)
            u = correlation_matrix(dim, l, 0, states)
            size = math.sqrt(harmonic_count(dim, l)) * power_moment(part.power, l, dim)
            vector = (
                part.coefficient
                * size
                * (states == ((l, 0) if part.of_query else (0, l))).all(axis=1)
            )
            for _ in range(part.exponent):
                vector = u @ vector
            found.setdefault(l, []).append((vector, part.direction))
    vectors = {}
    for l, columns in found.items():  # noqa: E741
        directions = np.stack([direction for _, direction in columns])
        cosines = np.clip(directions @ directions.T, -1.0, 1.0)
        inner = np.array(
            [[gegenbauer(l, float(cosine), dim)[l] for cosine in row] for row in cosines]
        )
        vectors[l, 0] = np.stack([vector for vector, _ in columns], axis=1) @ _half(inner)
    return vectors


def _half(matrix: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    """H with H Hᵀ = matrix, what rounding has made negative left out."""
    squares, turn = np.linalg.eigh(matrix)
    return np.asarray(turn * np.sqrt(np.maximum(squares, 0.0)))


MOST_UNKNOWN = 400
"""Products of parts of a target that are solved for at most: degrees (5, 6)."""


@lru_cache(maxsize=64)
def _part_products(target: Polynomial) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
    """For every block the states that F has a part in.

    With the matrix of inner products of these parts.

    On polynomials of x and y in R^d, homogeneous of degrees R and S, the operators x·y (J), Δ_x and
    Δ_y (numbers (R−p)(R+p+d−2) and (S−q)(S+q+d−2)) and y·∂_x = [Δ_x, x·y]/2 are explicit in every
    block, and so is Fischer's product, which is diagonal (:func:`_fischer_length`). On the other
    hand [O F, O' F] for products O, O' of these operators is a sum over joinings of F with itself.
    Equated for O = (y·∂_x)^e Δ_x^i Δ_y^j (x·y)^n, e ≤ 1 and n ≤ min(r, s), they determine all inner
    products. The system is solved by least squares; a lower rank or a residual is refused.
    """
    r, s = target.degrees
    if any(term.degrees != (r, s) for term in target.terms) or target.dim < 3:
        raise ValueError(
            f"{target!r} has terms that are no product of a power of <x_0, x_i> and a power of one "
            "direction. For heads with a mean all its terms must then have the same degrees, in "
            "dimension 3 or more. Use kh.theory.empirical_curve on a Gram matrix."
        )
    unknown = {}
    for label in block_labels(target.dim, max(r, s)):
        states = block_states(target.dim, *label, max(r, s))
        there = (states <= (r, s)).all(axis=1) & ((states - (r, s)) % 2 == 0).all(axis=1)
        if there.any():
            unknown[label] = states[there]
    size = sum(len(states) * (len(states) + 1) // 2 for states in unknown.values())
    if size > MOST_UNKNOWN:
        raise ValueError(
            f"{target!r} has {size} products of parts in the blocks, and {MOST_UNKNOWN} are solved "
            "for at most. Lower its degree, or use kh.theory.empirical_curve on a Gram matrix."
        )
    check_cost(
        seconds=_part_products_seconds(target),
        memory=0.0,
        step=f"taking {target!r} apart for heads with a mean",
    )
    raised = [target]
    for _ in range(min(r, s)):
        raised.append(raised[-1].pairwise(monomial(target.dim, pairs=[(None, 1)])))
    want = {}
    for n, first in enumerate(raised):
        for k, second in enumerate(raised[n:], start=n):
            for place, value in _fischer_products(first, second).items():
                want[n, k, *place] = value
    rows = {key: np.zeros(size) for key in want}
    offset = 0
    for label, states in unknown.items():
        count = len(states) * (len(states) + 1) // 2
        check_limits()
        for key, row in _block_products(target, label, states, list(want)).items():
            rows[key][offset : offset + count] = row
        offset += count
    scale = {key: float(np.linalg.norm(row)) for key, row in rows.items()}
    used = [key for key in want if scale[key] > 0]
    design = np.array([rows[key] / scale[key] for key in used])
    values = np.array([want[key] / scale[key] for key in used])
    # the same again with columns of unit length: entries of high degree are small in every equation
    lengths = np.linalg.norm(design, axis=0)
    solution, _, rank, _ = np.linalg.lstsq(design / lengths, values, rcond=1e-10)
    missed = float(np.abs(design / lengths @ solution - values).max())
    if rank < size or missed > 1e-8 * float(np.abs(values).max(initial=1e-300)):
        raise ValueError(
            f"the parts of {target!r} in the blocks of heads with a mean are lost to rounding "
            f"(rank {rank} of {size}, residual {missed:.1e}). Use kh.theory.empirical_curve on a "
            "Gram matrix."
        )
    products, offset = {}, 0
    for label, states in unknown.items():
        upper = np.triu_indices(len(states))
        matrix = np.zeros((len(states), len(states)))
        matrix[upper] = (solution / lengths)[offset : offset + len(upper[0])]
        products[label] = states, matrix + np.triu(matrix, 1).T
        offset += len(upper[0])
    return products


@dataclass(frozen=True)
class _Shape:
    """What the cost of joining a term depends on: the powers of its factors."""

    correlation: int  # the power of <x_0, x_i>
    matrices: tuple[int, ...]  # the powers of other matrices
    vectors: tuple[int, ...]

    @classmethod
    def of(cls, term: Term) -> _Shape:
        correlation, matrices, vectors = 0, [], []
        for factor, power in term.powers:
            if factor.kind != PAIR:
                vectors.append(power)
            elif factor.array is None:
                correlation = power
            else:
                matrices.append(power)
        return cls(correlation, tuple(sorted(matrices)), tuple(sorted(vectors)))

    def pairs(self, raised: int) -> list[int]:
        """The powers of all matrices of the term times <x_0, x_i>^raised."""
        correlation = self.correlation + raised
        return [*self.matrices, correlation] if correlation else list(self.matrices)


def _part_products_seconds(target: Polynomial) -> float:
    """Seconds that `_part_products` takes, roughly, nearly all of them in `crossed_joinings`.

    It joins every two terms of F (x·y)^n and F (x·y)^k. The sizes of its sums follow from the
    powers in the terms alone. Measured on one core for 19 targets in dimensions 3, 8, 64 and 200:
    those above 0.2 s are right within a factor of three.
    """
    r, s = target.degrees
    shapes = Counter(_Shape.of(term) for term in target.terms)
    seconds = 0.0
    for n in range(min(r, s) + 1):
        # joints inside the first term, of key slots and of query slots
        joints = ((r + n) // 2 + 1) * ((s + n) // 2 + 1)
        for k in range(n, min(r, s) + 1, 2):
            for first, first_count in shapes.items():
                for second, second_count in shapes.items():
                    count = first_count * second_count
                    pairs = first.pairs(n) + second.pairs(k)
                    vectors = [*first.vectors, *second.vectors]
                    is_dense = bool(first.matrices or second.matrices)
                    seconds += count * _joining_seconds(
                        pairs, vectors, joints, target.dim, is_dense
                    )
    return seconds


def _joining_seconds(
    pairs: list[int],
    vectors: list[int],
    joints: int,
    dim: int,
    is_dense: bool,
) -> float:
    """Seconds of one sum over joinings.

    From the powers of the matrices and vectors in both terms.
    """
    # walks along chains and rings of matrices, d³ operations a step where matrices are multiplied
    walked = math.prod(power + 1 for power in pairs)
    rings = len(pairs) ** 2 * walked * joints**1.6
    chains = len(pairs) * len(vectors) * walked * joints**1.6
    walks = 8e-7 * (rings + chains)
    if is_dense:
        walks += 7e-12 * rings * dim**3
    # the exponential: every content m of a joining is made of a connected part c and the rest m − c
    ends = 1 + len(vectors) * (len(vectors) + 1) / 2
    contents = walked * math.prod(power + 1 for power in vectors)
    splits = contents * math.prod((power + 2) / 2 for power in pairs)
    return walks + 6e-7 * splits * joints + 2.5e-7 * contents * walked * ends


def _contracted_vectors(
    target: Polynomial, degree: int
) -> dict[tuple[int, int], Float[np.ndarray, "states v"]]:
    vectors = {}
    for label, (states, products) in _part_products(target).items():
        everywhere = block_states(target.dim, *label, degree)
        place = (everywhere[:, None, :] == states).all(axis=2)
        vectors[label] = place @ _half(products)
    return vectors


def _fischer_products(first: Polynomial, second: Polynomial) -> dict[tuple[int, int, int], float]:
    """[O f, O' g] for O = (y·∂_x)^e Δ_x^i Δ_y^j, by (e, i, j).

    O' is the one that ends in the same degrees.
    """
    (r, s), apart = first.degrees, (second.degrees[0] - first.degrees[0]) // 2
    if (second.degrees[0] - r) % 2:
        return {}
    sums = np.zeros((2, s // 2 + 1, r // 2 + 1))
    for one in first.terms:
        for other in second.terms:
            check_limits()
            sums += one.coefficient * other.coefficient * crossed_joinings(one, other, first.dim)
    found = {}
    for (j, i), plain in np.ndenumerate(sums[0]):
        # a set of i joints inside is 2^i i! times one power of the Laplacian, and joinings come
        # divided by r! s!
        log = sum(n * math.log(2) + math.lgamma(n + 1) for n in (i, j, i + apart, j + apart))
        weight = math.exp(log + math.lgamma(r + 1) + math.lgamma(s + 1))
        found[0, i, j] = weight * float(plain)
        if r > 2 * i:
            # y·∂_x moves one slot of each: the two that are joined, or one joint across each way
            found[1, i, j] = weight * ((r - 2 * i) * float(plain) + float(sums[1, j, i]))
    return found


def _block_products(
    target: Polynomial,
    label: tuple[int, int],
    states: Int[np.ndarray, "states 2"],
    wanted: list[tuple[int, int, int, int, int]],
) -> dict[tuple[int, int, int, int, int], Float[np.ndarray, " pairs"]]:
    """Coefficients of the products of parts in [O (x·y)^n f, O' (x·y)^k f].

    For wanted (n, k, e, i, j).
    """
    dim, (r, s) = target.dim, target.degrees
    around = block_states(dim, *label, max(r, s) + min(r, s) + 1)
    u = correlation_matrix(dim, *label, around).toarray()
    powers = [(around[:, None, :] == states).all(axis=2).astype(np.float64)]
    for _ in range(min(r, s)):
        powers.append(u @ powers[-1])
    p, q = around.T

    def laplace(degree: int, part: np.ndarray) -> np.ndarray:
        return np.asarray((degree - part) * (degree + part + dim - 2.0))

    def applied(n: int, e: int, i: int, j: int) -> tuple[np.ndarray, int, int]:
        vectors, query, key = powers[n], r + n, s + n
        for _ in range(i):
            vectors, query = laplace(query, p)[:, None] * vectors, query - 2
        for _ in range(j):
            vectors, key = laplace(key, q)[:, None] * vectors, key - 2
        if e:
            moved = laplace(query + 1, p)[:, None] * (u @ vectors) - u @ (
                laplace(query, p)[:, None] * vectors
            )
            vectors, query, key = moved / 2, query - 1, key + 1
        return vectors, query, key

    found = {}
    upper = np.triu_indices(len(states))
    for n, k, e, i, j in wanted:
        left, query, key = applied(n, e, i, j)
        right, _, _ = applied(k, e, i + (k - n) // 2, j + (k - n) // 2)
        lengths = np.array(
            [
                _fischer_length(query, a, dim) * _fischer_length(key, b, dim)
                for a, b in around.tolist()
            ]
        )
        form = left.T @ (lengths[:, None] * right)
        found[n, k, e, i, j] = np.where(
            upper[0] == upper[1], form[upper], form[upper] + form.T[upper]
        )
    return found


@lru_cache(maxsize=4096)
def _fischer_length(degree: int, part: int, dim: int) -> float:
    """[f, f] / E f² for f = |x|^{R−p} times a harmonic of degree p, on the sphere of R^d."""
    if part > degree or (degree - part) % 2:
        return 0.0
    inner = math.prod(
        2 * a * (2 * a + 2 * part + dim - 2) for a in range(1, (degree - part) // 2 + 1)
    )
    return float(inner * math.prod(dim + 2 * a for a in range(part)))
