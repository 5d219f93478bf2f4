"""Exact spectrum of biased heads, W = c·W_0 + noise, under the sphere law: one small matrix per irrep of O(d).

With u = <x_0, x_i>, s = <x_0, x'_0>, t = <x_i, x'_j> and h_k(m) = E[σ^(k)(m + z)] the kernel of a pair is

    Σ_k (1/k!) 4^{−k} (1+s)^k (1+t)^{k+1} h_k(cu + c_0) h_k(cu' + c_0),

c_0 being the corner of the mean. It commutes with rotations of query and key together, so it splits over the
irreps of O(d) with Young diagrams of at most two rows (a, b). Each occurs at most once among the products of
harmonics of degree p in the query and q in the key, for p+q = a+b+2r, |p−q| ≤ a−b: these |p,q> are the basis of the
block (a, b). There u is the symmetric matrix J of :func:`correlation_matrix`, (1+s)^k (1+t)^{k+1} is diagonal, and

    A_ab = 2 Σ_k (1/k!) h_k(cJ + c_0) diag(g_k(p) g_{k+1}(q)) h_k(cJ + c_0),   g_n(p) = j_n Π_{i<p} (n−i)/(n+i+d−1).

A set averages over its keys: with D = 1 on |a, 0> and 1/N elsewhere the eigenvalues of K are those of
D^{1/2} A_ab D^{1/2}, each dim(a, b) times.

Everything is kept as a factor, A = R^T R: squares of singular values of R are small eigenvalues to full accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int
from scipy.fft import dct
from scipy.linalg import solve_triangular
from scipy.sparse import csr_array
from scipy.special import ndtr

from keyhole._array import block_size, blocks
from keyhole.attention.heads import GaussianHeads
from keyhole.theory.biased import hermite_moments
from keyhole.theory.harmonics import gegenbauer, harmonic_count, power_moment
from keyhole.theory.moments import harmonic_ratios, log_moment, pair_eigenvalues
from keyhole.theory.targets import KEY, PAIR, QUERY, Polynomial, Term

ACCURACY = 1e-2
"""Error of a block, in operator norm, against the eigenvalues (D+1, 0) and (0, D+1) of zero-mean heads."""

ROUNDING = 1e-16
"""Of numbers near one."""

MOST_TERMS, MOST_DEGREES = 6000, 400
"""Terms of the series in k, and the degree of the polynomials that stand for h_k(cu)."""


@dataclass(frozen=True)
class Bias:
    """A mean c·W_0 with the corner c_0, in units of twice the scale; ``gain`` = (2·scale)² multiplies the kernel."""

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


def bias_of(law: object, dim: int) -> Bias:
    """The bias of a law of heads, or an error that says which laws have a closed spectrum."""
    if law is None:
        return Bias()
    if not isinstance(law, GaussianHeads):
        raise ValueError(
            f"`law` must be kh.GaussianHeads(mean=c, scale=…) for an exact spectrum: got {law!r}. For other laws use "
            "kh.theory.empirical_curve on a Gram matrix of samples."
        )
    mean, scale = law.moments(dim)
    if mean is None:
        return Bias(gain=(2 * scale) ** 2)
    slope, corner = float(mean[0, 0]), float(mean[-1, -1])
    known = slope * np.eye(dim + 1)
    known[-1, -1] = corner
    if not np.array_equal(mean, known):
        off = np.unravel_index(int(np.abs(mean - known).argmax()), mean.shape)
        raise ValueError(
            "`law` must have a mean c·I on the coordinates of the tokens and any number on the constant one for an "
            f"exact spectrum: its entry {tuple(int(i) for i in off)} is {mean[off]:g}, not {known[off]:g}. For other "
            "means use kh.theory.empirical_curve on a Gram matrix of samples."
        )
    if dim < 2:
        raise ValueError("`law` has a mean, and its exact spectrum needs tokens of dimension 2 or more: got dim 1.")
    return Bias(slope / (2 * scale), corner / (2 * scale), (2 * scale) ** 2)


def second_moment(m: Float[np.ndarray, " q"]) -> Float[np.ndarray, " q"]:
    """2 E[ReLU(m+z)²] = 2 [(1+m²) Φ(m) + m φ(m)]: the kernel of a unit pair with itself."""
    return np.asarray(2 * ((1 + m * m) * ndtr(m) + m * np.exp(-m * m / 2) / math.sqrt(2 * math.pi)))


def irrep_dimension(dim: int, a: int, b: int) -> int:
    """Number of dimensions of the irrep (a, b) of O(d), exactly; for d = 2, of the momenta ±a.

    Examples
    --------
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
    lower = math.factorial(a + 1) * math.factorial(b) * math.factorial(dim - 2) * math.factorial(dim - 4)
    return upper // lower


def block_labels(dim: int, degree: int) -> list[tuple[int, int]]:
    """All irreps (a, b) with a state p, q ≤ degree; in dimension 2 the momenta (m, 0)."""
    rows = {2: 0, 3: min(1, degree)}.get(dim, degree)
    return [(a, b) for b in range(rows + 1) for a in range(b, 2 * degree - b + 1)]


def block_states(dim: int, a: int, b: int, degree: int) -> Int[np.ndarray, "states 2"]:
    """The states (p, q), p, q ≤ degree, of the block (a, b); in dimension 2 signed, with p + q = a."""
    grid = np.arange(-degree if dim == 2 else 0, degree + 1)
    p, q = (x.ravel() for x in np.meshgrid(grid, grid, indexing="ij"))
    above, apart = p + q - a - b, np.abs(p - q)
    inside = above == 0 if dim == 2 else (above >= 0) & (above % 2 == 0) & (apart <= a - b)
    return np.stack([p[inside], q[inside]], axis=1)


def correlation_matrix(dim: int, a: int, b: int, states: Int[np.ndarray, "states 2"]) -> csr_array:
    """Multiplication by u = <x_0, x_i> in the block (a, b), between the given states.

    With P = p+(d−2)/2, Q = q+(d−2)/2, A = a+(d−2)/2, B = b+(d−4)/2, F(z) = (z²−(A+B)²)(z²−(A−B)²)

        <p+1,q+1|u|p,q>² = F(P+Q+1)/(64 P(P+1)Q(Q+1)),    <p+1,q−1|u|p,q>² = F(P−Q+1)/(64 P(P+1)Q(Q−1)),

    entries positive. In dimension 2 it is half the sum of the shifts (p, q) → (p±1, q∓1).

    Examples
    --------
    >>> correlation_matrix(3, 0, 0, block_states(3, 0, 0, degree=1)).toarray().round(6)    # E u² = 1/3
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
    return csr_array((np.concatenate([v, v]), (np.concatenate([i, j]), np.concatenate([j, i]))), shape=size)


def _correlation_entries(dim: int, a: int, b: int, p: np.ndarray, q: np.ndarray, step: int) -> np.ndarray:
    """<p+1, q+step| u |p, q>."""
    if dim == 2:
        return np.full(len(p), 0.5 if step < 0 else 0.0)
    half = (dim - 2) / 2
    P, Q, total, apart = p + half, q + half, a + b + dim - 3, a - b + 1
    z = P + step * Q + 1
    # factors and not squares: z and A ± B are whole or half numbers, so that nothing cancels
    squares = (z - total) * (z + total) * (z - apart) * (z + apart) / (64 * P * (P + 1) * Q * (Q + step))
    return np.asarray(np.sqrt(np.maximum(squares, 0.0)))


def correlation_norm(dim: int, degree: int) -> float:
    """A bound on |<f, u f>|/<f, f> over all pair functions of degrees p, q ≤ degree, from the sums of J's rows."""
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
    """h_k(cu + c_0)/√k! = Σ_m coefficients[k, m] T_m(u/reach) for k = 0 … K, and the weights 2 j_k j_{k+1}."""

    coefficients: Float[np.ndarray, "k m"]
    weights: Float[np.ndarray, " k"]
    reach: float

    def tails(self, degree: int) -> Float[np.ndarray, " k"]:
        """Σ_{m > degree} |coefficients|: how far h_k is from polynomials of that degree."""
        return np.asarray(np.abs(self.coefficients[:, degree + 1 :]).sum(axis=1))


def _series(dim: int, bias: Bias, reach: float, allowed: float) -> _Series:
    """The series in k and in polynomials of u, cut where what is left is below ``allowed``.

    Terms beyond K are positive and add at most 2 Σ_{k>K} sup h_k²/k! · j_k j_{k+1} to the norm of a block, where by
    Cramér's inequality and, beyond n = k−2 > m², by the amplitude of Hermite functions h_k²/k! ≤ min(1.19,
    0.96 n^{−1/2}) / (2π k (k−1)). Polynomials of higher degree change singular values by at most the root of
    2 Σ_k (Σ_m |η_km|)² j_k j_{k+1}, m over what is left out: this is kept below a thousandth of √allowed.
    """
    order = np.arange(MOST_TERMS + 1.0)
    weights = 2 * np.exp(log_moment(order, dim) + log_moment(order + 1, dim))
    n, largest = np.maximum(order - 2, 1.0), abs(bias.slope) * reach + abs(bias.corner)
    envelope = np.where(n > largest**2, np.minimum(1.19, 0.96 / np.sqrt(n)), 1.19)
    terms = weights * envelope / (2 * math.pi * np.maximum(order * (order - 1), 1.0))
    left = np.concatenate([np.cumsum(terms[::-1])[::-1][1:], [0.0]])
    last = min(max(int(np.argmax(left <= allowed)), 2), MOST_TERMS)
    waves = abs(bias.slope) * reach * math.sqrt(last)
    nodes = min(2 * math.ceil(40 + 2 * waves), 2 * MOST_DEGREES)
    angles = math.pi * (np.arange(nodes) + 0.5) / nodes
    moments = hermite_moments(bias.slope * reach * np.cos(angles) + bias.corner, last + 1)
    coefficients = dct(moments, type=2, axis=1) / nodes
    coefficients[:, 0] /= 2
    weights = weights[: last + 1]
    sizes = np.cumsum(np.abs(coefficients)[:, ::-1], axis=1)[:, ::-1]
    enough = np.flatnonzero(weights @ sizes**2 <= max(1e-6 * allowed, ROUNDING**2))
    stop = int(enough[0]) if len(enough) else nodes
    return _Series(coefficients[:, :stop], weights, reach)


@dataclass(frozen=True, eq=False)
class Block:
    """One irrep: its states (p, q), the dimension of the irrep, and a factor of A = R^T R."""

    label: tuple[int, int]
    states: Int[np.ndarray, "states 2"]
    dimension: int
    factor: Float[np.ndarray, "states states"]

    def key_scale(self, n_keys: int) -> Float[np.ndarray, " states"]:
        """D^{1/2}: 1 on functions of the query alone, N^{−1/2} elsewhere."""
        return np.where(self.states[:, 1] == 0, 1.0, 1 / math.sqrt(n_keys))

    def levels(
        self, n_keys: int, vectors: Float[np.ndarray, "states v"] | None = None
    ) -> tuple[Float[np.ndarray, " states"], Float[np.ndarray, " states"]]:
        """Eigenvalues of D^{1/2} A D^{1/2}, and the power of D^{1/2} times the vectors along its eigenvectors."""
        scale = self.key_scale(n_keys)
        if vectors is None:
            values = np.linalg.svd(self.factor * scale, compute_uv=False)
            return np.square(values), np.zeros(len(values))
        _, values, right = np.linalg.svd(self.factor * scale)
        return np.square(values), np.square(right @ (scale[:, None] * vectors)).sum(axis=1)

    def inverse_form(self, vectors: Float[np.ndarray, "states v"]) -> float:
        """tᵀ A⁻¹ t, summed over vectors: with the states scaled to unit diagonal, which takes the grading out of R."""
        scale = np.sqrt(np.square(self.factor).sum(axis=0))
        triangle = np.linalg.qr(self.factor / scale, mode="r")
        return float(np.square(solve_triangular(triangle, vectors / scale[:, None], trans="T")).sum())


@lru_cache(maxsize=64)
def biased_blocks(dim: int, bias: Bias, degree: int) -> tuple[Block, ...]:
    """All blocks with states p, q ≤ degree, without the gain; the last one begins beyond them: (degree+1, 0)."""
    edge = pair_eigenvalues(dim, degree + 1)
    allowed = ACCURACY * min(edge[degree + 1, 0], edge[0, degree + 1])
    labels = [(label, degree) for label in block_labels(dim, degree)]
    return tuple(_made_blocks(dim, bias, [*labels, ((degree + 1, 0), degree + 1)], allowed))


@lru_cache(maxsize=256)
def single_block(dim: int, bias: Bias, label: tuple[int, int], degree: int) -> Block:
    """One block, accurate down to its smallest eigenvalues."""
    smallest = pair_eigenvalues(dim, degree)[degree, degree]
    return next(_made_blocks(dim, bias, [(label, degree)], 0.1 * smallest))


def _made_blocks(dim: int, bias: Bias, wanted: list[tuple[tuple[int, int], int]], allowed: float) -> Iterator[Block]:
    """Blocks with the given labels and highest degrees, each wrong by at most ``allowed`` in operator norm."""
    series, top = _reach(dim, bias, max(degree for _, degree in wanted), allowed)
    states = [block_states(dim, *label, top) for label, _ in wanted]
    pairs, places = np.unique(np.abs(np.concatenate(states)), axis=0, return_inverse=True)
    roots = _state_roots(dim, series, pairs, allowed)
    ends = np.cumsum([len(some) for some in states])[:-1]
    for (label, degree), some, place in zip(wanted, states, np.split(places.ravel(), ends), strict=True):
        kept = np.flatnonzero(np.abs(some).max(axis=1) <= degree)
        tall = _columns(correlation_matrix(dim, *label, some) / series.reach, kept, roots[place])
        yield Block(label, some[kept], irrep_dimension(dim, *label), _root(tall, allowed))


def _reach(dim: int, bias: Bias, degree: int, allowed: float) -> tuple[_Series, int]:
    """The series, and the highest degree of states between the factors h_k(cJ) that does matter.

    States beyond it are reached by polynomials of degree m and more in u only, so that leaving them out takes
    at most 2 Σ_k (Σ_{i>m} |η_ki|)² g_k(p) g_{k+1}(q) from the norm of a block.
    """
    margin, series = 0, None
    while True:
        top = degree + margin
        reach = correlation_norm(dim, top)
        if series is None or reach > series.reach:
            series = _series(dim, bias, min(1.0, 1.2 * reach), allowed)
        order = np.arange(len(series.weights), dtype=np.float64)
        query, key = harmonic_ratios(order, dim, top + 1)[-1], harmonic_ratios(order + 1, dim, top + 1)[-1]
        lost = max(float(series.tails(margin) ** 2 * series.weights @ ratio) for ratio in (query, key))
        if lost <= allowed:
            return series, top
        margin += 1


def _state_roots(
    dim: int, series: _Series, pairs: Int[np.ndarray, "s 2"], allowed: float
) -> Float[np.ndarray, "s m r"]:
    """For every (p, q) a matrix L with L Lᵀ = Σ_k η_k η_kᵀ 2 g_k(p) g_{k+1}(q), but for less than ``allowed``."""
    order, top = np.arange(len(series.weights), dtype=np.float64), int(pairs.max())
    query, key = harmonic_ratios(order, dim, top), harmonic_ratios(order + 1, dim, top)
    weighted = np.sqrt(series.weights)[:, None] * series.coefficients
    roots = np.zeros((len(pairs), weighted.shape[1], min(weighted.shape)))
    for rows in blocks(len(pairs), block_size(8 * weighted.size, 2**26)):
        p, q = pairs[rows].T
        scaled = np.sqrt(query[p] * key[q])[:, :, None] * weighted
        found = _root(scaled, allowed)[:, : roots.shape[2]]
        roots[rows] = found.swapaxes(1, 2)
    sizes = np.sqrt(np.square(roots).sum(axis=1)).max(axis=0)
    return roots[..., : max(int(np.count_nonzero(sizes > 1e-3 * math.sqrt(allowed))), 1)]


def _root(tall: Float[np.ndarray, "*batch n m"], allowed: float) -> Float[np.ndarray, "*batch r m"]:
    """R with RᵀR = tallᵀ tall, rows by falling length: from the product itself where rounding may show in it."""
    if allowed < 1e3 * ROUNDING:
        _, values, right = np.linalg.svd(np.linalg.qr(tall, mode="r"), full_matrices=False)
        return np.asarray(values[..., None] * right)
    squares, vectors = np.linalg.eigh(tall.swapaxes(-1, -2) @ tall)
    roots = np.sqrt(np.maximum(squares, 0.0))[..., None] * vectors.swapaxes(-1, -2)
    return np.asarray(roots[..., ::-1, :])


def _columns(
    u: csr_array, kept: Int[np.ndarray, " kept"], roots: Float[np.ndarray, "s m r"]
) -> Float[np.ndarray, "sr kept"]:
    """Σ_m <s| T_m(u) |kept> L_mr for all s and r: A between the kept states is the product of this with itself."""
    current = np.zeros((u.shape[0], len(kept)))
    current[kept, np.arange(len(kept))] = 1.0
    powers, before = [current], current
    for m in range(1, roots.shape[1]):
        before, current = current, u @ current if m == 1 else 2 * (u @ current) - before
        powers.append(current)
    return np.asarray((np.stack(powers, axis=2) @ roots).transpose(0, 2, 1).reshape(-1, len(kept)))


def beyond_the_blocks(made: tuple[Block, ...], n_keys: int) -> float:
    """The larger of the diagonal entries (D+1, 0) and (0, D+1)/N: what the eigenvalues beyond the blocks begin with."""
    last = made[-1]
    squares = np.square(last.factor * last.key_scale(n_keys)).sum(axis=0)
    return float(squares[(last.states == 0).any(axis=1)].max())


def target_vectors(target: Polynomial, degree: int) -> dict[tuple[int, int], Float[np.ndarray, "states v"]]:
    """Vectors of a target's pair function F in the blocks, on the states p, q ≤ degree ≥ its own degrees.

    u^q <β, x_i>^p is J^q |0, l> times N_l^{1/2} ∫ t^p P_l dτ in the blocks (l, 0), l = p, p−2, …, and u^q <β, x_0>^p
    the same from |l, 0>. Along directions β and γ such vectors belong to members of the irrep with the inner product
    P_l(cos(β, γ)); they are returned as columns along orthogonal members, so that squares add up.
    """
    found: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for term in target.terms:
        exponent, kind, direction, power = _one_direction(term, target)
        length = float(np.linalg.norm(direction)) if power else 1.0
        for l in range(power % 2, power + 1, 2):  # noqa: E741
            states = block_states(target.dim, l, 0, degree)
            u = correlation_matrix(target.dim, l, 0, states)
            start = (l, 0) if kind == QUERY else (0, l)
            size = math.sqrt(harmonic_count(target.dim, l)) * power_moment(power, l, target.dim)
            vector = term.coefficient * length**power * size * (states == start).all(axis=1)
            for _ in range(exponent):
                vector = u @ vector
            found.setdefault(l, []).append((vector, direction / length))
    vectors = {}
    for l, parts in found.items():  # noqa: E741
        directions = np.stack([direction for _, direction in parts])
        cosines = np.clip(directions @ directions.T, -1.0, 1.0)
        inner = np.array([[gegenbauer(l, float(cosine), target.dim)[l] for cosine in row] for row in cosines])
        squares, turn = np.linalg.eigh(inner)
        members = turn * np.sqrt(np.maximum(squares, 0.0))
        vectors[l, 0] = np.stack([vector for vector, _ in parts], axis=1) @ members
    return vectors


def _one_direction(term: Term, target: Polynomial) -> tuple[int, str, np.ndarray, int]:
    """(q, kind, β, p) of a term u^q <β, x>^p, or an error that says what is known."""
    exponent, kind, direction, power = 0, KEY, np.eye(target.dim)[0], 0
    for factor, count in term.powers:
        if factor.kind == PAIR and factor.array is None:
            exponent = count
        elif factor.kind != PAIR and power == 0:
            assert factor.array is not None
            kind, direction, power = factor.kind, factor.array, count
        else:
            raise ValueError(
                f"{target!r} has a term that is no product of a power of <x_0, x_i> and a power of one direction, and "
                "only those have a closed form for heads with a mean. Use kh.theory.empirical_curve on a Gram matrix."
            )
    return exponent, kind, direction, power
