"""Exact spectrum of biased heads, W = c·W_0 + noise, under the sphere distribution.

One small matrix per irrep of O(d).

With u = <x_0, x_i>, s = <x_0, x'_0>, t = <x_i, x'_j> and h_k(m) = E[σ^(k)(m + z)] of the activation
(:mod:`keyhole.theory.activations`) the kernel of a pair is

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
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.fft import dct
from scipy.linalg import solve_triangular
from scipy.linalg.lapack import dpocon, dpotrf, dpstrf
from scipy.sparse import csr_array, eye_array
from scipy.special import gammaln

from keyhole._array import block_size, one_blas_thread
from keyhole._array import blocks as row_slices
from keyhole.attention.heads import GaussianHeads
from keyhole.theory.activations import RELU, ScoreActivation, score_activation
from keyhole.theory.harmonics import gegenbauer, harmonic_count, power_moment
from keyhole.theory.moments import harmonic_ratios, log_moment
from keyhole.theory.pairs import pair_eigenvalues
from keyhole.theory.targets import PAIR, QUERY, Polynomial, Term, crossed_joinings, monomial

ACCURACY = 1e-2
"""What the series of a block may leave out, against the eigenvalues (D+1, 0) and (0, D+1) of
zero-mean heads.
"""

ROUNDING = 3e-15
"""What rounding may change in an eigenvalue of a block.

The quick way sums squares and cosines of numbers near one, each of which is rounded by about 1e-16.
Where the series may leave out less than this, rounding would be the larger error. Then small
coefficients come from Taylor's series (`_refined_coefficients`), and roots from the terms
themselves instead of sums of their squares (`_reflected_roots`, `_root`).
"""

FEW_ROWS = 4
"""A matrix with at most this many rows per column is not squared before its root is taken (`_root`
and `_state_roots`): that would hardly be quicker."""

SMALL_DEGREE = 5
"""Blocks up to this degree are not halved."""

FINITE_RANK = 1e-12
"""Where the activation has finite rank, eigenvalues below this share of sup K(x, x) are rounding
and count as zero.
"""

LARGEST_MEAN = 8.0
"""In units of twice the scale: beyond it h_k(cu) turns so fast in u that blocks take minutes."""

MOST_TERMS = 6000
"""Terms of the series in k."""

MOST_NODES = 800
"""Chebyshev nodes from which the polynomials that stand for h_k(cu) are computed."""


@dataclass(frozen=True)
class Bias:
    """A mean c·W_0 with the corner c_0, in units of twice the scale.

    ``activation`` acts on scores whose noise has unit variance, and ``gain`` multiplies the kernel:
    (2·scale)² for ReLU.
    """

    slope: float = 0.0
    corner: float = 0.0
    gain: float = 1.0
    activation: ScoreActivation = RELU

    def __bool__(self) -> bool:
        return self.slope != 0.0 or self.corner != 0.0

    @property
    def unit(self) -> Bias:
        """The same without the gain."""
        return replace(self, gain=1.0)

    @property
    def largest_diagonal(self) -> float:
        """sup K(x, x) on unit tokens: 2 E[σ(m+z)²] at the largest or smallest mean score m."""
        ends = np.array([self.corner + abs(self.slope), self.corner - abs(self.slope)])
        return 2 * self.gain * float(self.activation.second_moment(ends).max())


def bias_of(heads: object, dim: int, activation: str = "relu") -> Bias:
    """The bias of a head distribution, with the activation of its scores.

    Any other head distribution than Gaussian heads with mean c·I and a corner is a ValueError.
    """
    if heads is None:
        heads = GaussianHeads()
    if not isinstance(heads, GaussianHeads):
        raise ValueError(
            "`heads` must be kh.GaussianHeads(mean=c, scale=…) for an exact spectrum: got "
            f"{heads!r}. For other head distributions use kh.theory.empirical_curve on a Gram "
            "matrix of samples."
        )
    mean, scale = heads.moments(dim)
    unit_activation, gain = score_activation(activation, spread=2 * scale)
    if mean is None:
        return Bias(gain=gain, activation=unit_activation)

    # the mean must be c·I with any corner
    slope = float(mean[0, 0])
    corner = float(mean[-1, -1])
    closed_form = slope * np.eye(dim + 1)
    closed_form[-1, -1] = corner
    if not np.array_equal(mean, closed_form):
        worst = np.unravel_index(int(np.abs(mean - closed_form).argmax()), mean.shape)
        entry = tuple(int(i) for i in worst)
        raise ValueError(
            "`heads` must have a mean c·I on the coordinates of the tokens and any number on the "
            f"constant one for an exact spectrum: its entry {entry} is "
            f"{mean[worst]:g}, not {closed_form[worst]:g}. For other means use "
            "kh.theory.empirical_curve on a Gram matrix of samples."
        )
    if dim < 2:
        raise ValueError(
            "`heads` has a mean, and its exact spectrum needs tokens of dimension 2 or more: got "
            "dim 1."
        )

    # in units of twice the scale, in which the noise of a score has unit variance
    bias = Bias(
        slope=slope / (2 * scale),
        corner=corner / (2 * scale),
        gain=gain,
        activation=unit_activation,
    )
    if max(abs(bias.slope), abs(bias.corner)) > LARGEST_MEAN:
        raise ValueError(
            f"`heads` must have a mean of at most {LARGEST_MEAN:g} times twice its scale for an "
            f"exact spectrum: its mean is {slope:g}, its corner {corner:g}, its scale {scale:g}. "
            "Beyond, use kh.theory.empirical_curve."
        )
    return bias


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
    # Weyl's formula for two rows
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
    if dim == 2:
        largest_b = 0
    elif dim == 3:
        largest_b = min(1, degree)
    else:
        largest_b = degree
    return [(a, b) for b in range(largest_b + 1) for a in range(b, 2 * degree - b + 1)]


def block_states(dim: int, a: int, b: int, degree: int) -> Int[np.ndarray, "states 2"]:
    """The states (p, q), p, q ≤ degree, of the block (a, b).

    They have p+q = a+b+2r and |p−q| ≤ a−b. In dimension 2 p and q are signed, with p + q = a.
    """
    return _block_states(dim == 2, a, b, degree)


@lru_cache(maxsize=2048)
def _block_states(is_planar: bool, a: int, b: int, degree: int) -> Int[np.ndarray, "states 2"]:
    """The same for all dimensions above 2."""
    if is_planar:
        grid = np.arange(-degree, degree + 1)
    else:
        grid = np.arange(degree + 1)
    p_grid, q_grid = np.meshgrid(grid, grid, indexing="ij")
    p = p_grid.ravel()
    q = q_grid.ravel()
    above = p + q - a - b
    if is_planar:
        is_state = above == 0
    else:
        is_state = (above >= 0) & (above % 2 == 0) & (np.abs(p - q) <= a - b)
    states = np.stack([p[is_state], q[is_state]], axis=1)
    states.flags.writeable = False
    return states


def correlation_matrix(
    dim: int,
    a: int | Int[np.ndarray, " states"],
    b: int | Int[np.ndarray, " states"],
    states: Int[np.ndarray, "states 2"],
) -> csr_array:
    """Multiplication by u = <x_0, x_i> in the block (a, b), between the given states.

    For states of several blocks a and b are arrays: the label of the block of every state.

    With P = p+(d−2)/2, Q = q+(d−2)/2, A = a+(d−2)/2, B = b+(d−4)/2, F(z) = (z²−(A+B)²)(z²−(A−B)²)

        <p+1,q+1|u|p,q>² = F(P+Q+1)/(64 P(P+1)Q(Q+1)),
        <p+1,q−1|u|p,q>² = F(P−Q+1)/(64 P(P+1)Q(Q−1)),

    entries positive. In dimension 2 it is half the sum of the shifts (p, q) → (p±1, q∓1).

    >>> # E u² = 1/3
    >>> correlation_matrix(3, 0, 0, block_states(3, 0, 0, degree=1)).toarray().round(6)
    array([[0.     , 0.57735],
           [0.57735, 0.     ]])
    """
    # a table from (a, b, p, q) to the number of the state; −1 where there is no such state
    a = np.broadcast_to(a, len(states))
    b = np.broadcast_to(b, len(states))
    p, q = states.T
    lowest = states.min(initial=0)
    size = int(states.max(initial=0)) - lowest + 3
    a_number = a - a.min(initial=2**31)
    b_number = b - b.min(initial=2**31)
    n_labels = (a_number.max(initial=0) + 1, b_number.max(initial=0) + 1)
    numbers = np.full((*n_labels, size, size), -1)
    numbers[a_number, b_number, p - lowest, q - lowest] = np.arange(len(states))

    # u leads from (p, q) to (p+1, q+1) and to (p+1, q−1), where these are states
    sources = []
    destinations = []
    entries = []
    for step in (1, -1):
        next_q = np.maximum(q + step, lowest)
        next_state = numbers[a_number, b_number, p + 1 - lowest, next_q - lowest]
        exists = (q + step >= lowest) & (next_state >= 0)
        sources.append(np.flatnonzero(exists))
        destinations.append(next_state[exists])
        entries.append(_correlation_entries(dim, a[exists], b[exists], p[exists], q[exists], step))

    # the way back has the same entries: J is symmetric
    rows = np.concatenate([*sources, *destinations])
    columns = np.concatenate([*destinations, *sources])
    values = np.concatenate([*entries, *entries])
    return csr_array((values, (rows, columns)), shape=(len(states), len(states)))


def _correlation_entries(
    dim: int, a: np.ndarray, b: np.ndarray, p: np.ndarray, q: np.ndarray, step: int
) -> np.ndarray:
    """<p+1, q+step| u |p, q>."""
    if dim == 2:
        # half a shift (p+1, q−1), and none to (p+1, q+1)
        entry = 0.5 if step < 0 else 0.0
        return np.full(len(p), entry)
    half = (dim - 2) / 2
    P = p + half
    Q = q + half
    total = a + b + dim - 3  # A + B
    apart = a - b + 1  # A − B
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
    # the numerators of the squared entries at their largest, p = q = degree, over the denominator
    # at its smallest, p = q = 0
    p = float(degree)
    q = float(degree)
    half = (dim - 2) / 2
    smallest = (half * (half + 1)) ** 2
    z = p + q + dim - 1
    up = (z**2 - (dim - 3) ** 2) * z**2 / (64 * smallest)
    side = (p + q + dim - 3) ** 2 * (p + q + 1) ** 2 / (64 * smallest)
    # a row has two entries of either kind
    return min(1.0, 2 * math.sqrt(up) + 2 * math.sqrt(side))


@dataclass(frozen=True, eq=False)
class _Series:
    """h_k(cu + c_0)/√k! = Σ_m coefficients[k, m] T_m(u/reach) for k = 0 … K.

    ``weights`` are 2 j_k j_{k+1}. Formulas below write η_km for ``coefficients[k, m]``, and η_k for
    its row k.
    """

    coefficients: Float[np.ndarray, "k m"]
    weights: Float[np.ndarray, " k"]
    reach: float


def _series(dim: int, bias: Bias, reach: float, allowed: float) -> _Series:
    """The series in k and in polynomials of u, cut where what is left is below ``allowed``.

    The series in k ends at MOST_TERMS at the latest. In two dimensions, from degree 40 or so on,
    what is left can be a few times ``allowed`` there.

    Terms beyond K are positive and add at most 2 Σ_{k>K} sup h_k²/k! · j_k j_{k+1} to the norm of a
    block. For ReLU h_k²/k! ≤ (2/πn)^{1/2} / (2π k (k−1)), n = k−2 ≥ 1, by the amplitude of Hermite
    functions at 0. Polynomials of higher degree change singular values by at most the root of 2 Σ_k
    (Σ_m |η_km|)² j_k j_{k+1}, m over what is left out: this is kept below a thousandth of √allowed.
    """
    # the last term K: the first whose successors add at most ``allowed``; the bounds on terms hold
    # for k ≥ 3 only, so that K is 2 at least
    order = np.arange(MOST_TERMS + 1.0)
    weights = _term_weights(dim)
    largest_mean = abs(bias.slope) * reach + abs(bias.corner)
    term_bounds = weights * bias.activation.term_bounds(order, largest_mean)
    from_term_on = np.cumsum(term_bounds[::-1])[::-1]
    after_term = np.concatenate([from_term_on[1:], [0.0]])
    last = min(max(int(np.argmax(after_term <= allowed)), 2), MOST_TERMS)
    weights = weights[: last + 1]

    # Chebyshev coefficients from values at Chebyshev nodes. h_k turns like cos(√k m), so that
    # polynomials to a degree of about |c| · reach · √k matter: four nodes for each, and 80 more
    oscillation_degree = abs(bias.slope) * reach * math.sqrt(last)
    n_nodes = min(2 * math.ceil(40 + 2 * oscillation_degree), MOST_NODES)
    angles = math.pi * (np.arange(n_nodes) + 0.5) / n_nodes
    scores = bias.slope * reach * np.cos(angles) + bias.corner
    moments = bias.activation.moments(scores, last + 1)
    coefficients = dct(moments, type=2, axis=1) / n_nodes
    coefficients[:, 0] /= 2
    if allowed < ROUNDING:
        coefficients = _refined_coefficients(coefficients, bias, reach)

    # drop the highest degrees that together do not matter, but never all: T_0 stays even where
    # scores are so negative that the whole series is small
    tail_sizes = np.cumsum(np.abs(coefficients)[:, ::-1], axis=1)[:, ::-1]
    small_enough = np.flatnonzero(weights @ tail_sizes**2 <= 1e-6 * allowed)
    if len(small_enough):
        n_degrees = max(int(small_enough[0]), 1)
    else:
        n_degrees = n_nodes
    return _Series(coefficients=coefficients[:, :n_degrees], weights=weights, reach=reach)


@lru_cache(maxsize=256)
def _term_weights(dim: int) -> Float[np.ndarray, " k"]:
    """2 j_k j_{k+1} of all terms that there may be; j_{k+1} = j_k (d−1+2k) / (2(d−1+k))."""
    order = np.arange(MOST_TERMS + 1.0)
    ratio = (dim - 1 + 2 * order) / (2 * (dim - 1 + order))
    weights = 2 * ratio * np.exp(2 * log_moment(order, dim))
    weights.flags.writeable = False
    return np.asarray(weights)


def _refined_coefficients(
    coefficients: Float[np.ndarray, "k m"], bias: Bias, reach: float
) -> Float[np.ndarray, "k m"]:
    """The same with small coefficients to full relative accuracy.

    Small coefficients are taken from Taylor's series at c_0, which has no cancellation there.

    The coefficient of T_m is Σ_j 2^{1−j} C(j, (j−m)/2) h_{k+j}(c_0) (c·reach)^j / (j! √k!) over j =
    m, m+2, …
    """
    n_terms, n_degrees = coefficients.shape
    k = np.arange(n_terms)[:, None]
    m = np.arange(n_degrees)
    corner = np.array([bias.corner])
    n_taylor_terms = 40
    n_moments = n_terms + n_degrees + 2 * n_taylor_terms
    moments = bias.activation.moments(corner, n_moments)[:, 0]

    # Taylor's series for |c|, with factorials in logarithms: with j = m + 2i a term has
    # C(j, i) / j! = 1 / (i! (m+i)!)
    log_factorials = gammaln(np.arange(n_moments) + 1.0)
    log_half_slope = math.log(abs(bias.slope) * reach / 2 + 1e-300)
    total = np.zeros_like(coefficients)
    size = np.zeros_like(coefficients)
    for i in range(n_taylor_terms):
        j = m + 2 * i
        log = (log_factorials[k + j] - log_factorials[k]) / 2
        log -= log_factorials[i] + log_factorials[m + i] - j * log_half_slope
        term = 2 * moments[k + j] * np.exp(log)
        total += term
        size += np.abs(term)

    # T_0 counts half, and a negative c turns the sign of odd degrees
    total = np.where(m == 0, total / 2, total)
    if bias.slope < 0:
        total = total * (-1.0) ** m

    # only where little has cancelled and the last term was negligible. A series of zeros is zero,
    # such as that of odd m where h_k is even: rounding must not stand in its place
    has_no_cancellation = size <= 1e3 * np.abs(total)
    has_converged = np.abs(term) <= 1e-17 * size
    return np.where(has_no_cancellation & has_converged, total, coefficients)


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
        components = right @ (scale[:, None] * vectors)
        return np.square(values), np.square(components).sum(axis=1)

    @property
    def is_constant(self) -> Bool[np.ndarray, " states"]:
        """Which state is the constant function, |0,0> of the block (0, 0)."""
        if self.label != (0, 0):
            return np.zeros(len(self.states), dtype=bool)
        return np.asarray((self.states == 0).all(axis=1))

    def without_constant(self) -> Block:
        """The same block of the kernel less its mean: what an intercept leaves to the values."""
        is_kept = ~self.is_constant
        return replace(self, states=self.states[is_kept], factor=self.factor[:, is_kept])

    def inverse_form(self, vectors: Float[np.ndarray, "states v"]) -> float:
        """tᵀ A⁻¹ t, summed over vectors t.

        The states are scaled to unit diagonal, which takes the grading out of R.
        """
        scale = np.sqrt(np.square(self.factor).sum(axis=0))
        triangle = np.linalg.qr(self.factor / scale, mode="r")
        solution = solve_triangular(triangle, vectors / scale[:, None], trans="T")
        return float(np.square(solution).sum())


@dataclass(frozen=True, eq=False)
class Blocks:
    """All blocks with states p, q ≤ degree, and the largest diagonal entries of A beyond.

    ``query_edge`` is the largest of those with q = 0, ``key_edge`` of all others.
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
    edge = pair_eigenvalues(dim, degree + 1, bias.activation)
    allowed = ACCURACY * min(edge[degree + 1, 0], edge[0, degree + 1])
    if bias.activation.has_finite_rank:
        # nothing lies beyond, and eigenvalues below FINITE_RANK of the largest are rounding
        allowed = ACCURACY * FINITE_RANK * bias.largest_diagonal
    else:
        allowed *= _shrinkage(bias)

    # one degree more where b = 0: there are the largest entries beyond the listed states, for any
    # mean
    block_sizes = []
    for label in block_labels(dim, degree):
        highest = degree + 1 if label[1] == 0 else degree
        block_sizes.append((label, highest))

    # many small matrices: threads of BLAS would spend their time waiting, minutes of it where
    # others use the cores too
    with one_blas_thread():
        wider_blocks = list(_computed_blocks(dim, bias, block_sizes, allowed, keep_smallest=False))

    # split every block into the listed states and those beyond, of which only the largest diagonal
    # entry is needed
    listed = []
    query_edge = 0.0
    key_edge = 0.0
    for block in wider_blocks:
        is_listed = np.abs(block.states).max(axis=1) <= degree
        diagonal_beyond = np.square(block.factor[:, ~is_listed]).sum(axis=0)
        of_query = block.states[~is_listed, 1] == 0
        query_edge = max(query_edge, float(diagonal_beyond[of_query].max(initial=0.0)))
        key_edge = max(key_edge, float(diagonal_beyond[~of_query].max(initial=0.0)))
        listed_block = replace(
            block,
            states=block.states[is_listed],
            factor=block.factor[:, is_listed],
        )
        listed.append(listed_block)
    return Blocks(listed=tuple(listed), query_edge=query_edge, key_edge=key_edge)


def _shrinkage(bias: Bias) -> float:
    """sup K(x, x) over that of zero-mean heads, or 1 if that is larger.

    A strongly negative corner makes nearly all scores negative, where ReLU is zero. All eigenvalues
    are then smaller by about this factor or more, and what a series leaves out shrinks with them.
    """
    zero_mean = Bias(activation=bias.activation)
    return min(1.0, bias.unit.largest_diagonal / zero_mean.largest_diagonal)


@lru_cache(maxsize=256)
def single_block(dim: int, bias: Bias, label: tuple[int, int], degree: int) -> Block:
    """One block for `Block.inverse_form`, which divides by its smallest eigenvalues.

    The series leaves out a tenth at most of the smallest eigenvalue of zero-mean heads, or still
    less where a negative corner makes all eigenvalues smaller. A positive corner makes those of
    high degree smaller and others larger: ``keep_smallest`` keeps the rounding of the large ones
    out of the small ones.
    """
    smallest = pair_eigenvalues(dim, degree, bias.activation)[degree, degree]
    allowed = 0.1 * smallest * _shrinkage(bias)
    with one_blas_thread():
        return next(_computed_blocks(dim, bias, [(label, degree)], allowed, keep_smallest=True))


def _computed_blocks(
    dim: int,
    bias: Bias,
    block_sizes: list[tuple[tuple[int, int], int]],
    allowed: float,
    keep_smallest: bool,
) -> Iterator[Block]:
    """Blocks with the given labels and highest degrees.

    An eigenvalue λ is wrong by at most ``allowed`` and a hundredth of (allowed · λ)^{1/2}. The
    first, because terms and states that are left out would add a positive matrix of at most that
    norm. The second, because polynomials stand for h_k in the factor: they move its singular value
    λ^{1/2} by less than half a hundredth of allowed^{1/2}.

    ``keep_smallest``: no rounding of the size of large eigenvalues in small ones (`_root`).
    """
    # states between the two factors h_k(cJ) go up to a higher degree than the states listed
    highest = max(degree for _, degree in block_sizes)
    series, top = _truncation(dim, bias, highest, allowed)

    # blocks that mix even and odd p, and the others as their two halves; where states are few,
    # halves cost more than they save
    is_small = highest <= SMALL_DEGREE or series.coefficients.shape[1] == 1
    mixing = [size for size in block_sizes if is_small or _mixes_parities(bias, size[0])]
    halved = [size for size in block_sizes if size not in mixing]
    plans = []
    for sizes, step in ((mixing, 1), (halved, 2)):
        if sizes:
            plans.append(_Plan.of(dim, sizes, step, top))

    for plan in plans:
        yield from _planned_blocks(dim, bias, plan, series, highest, allowed, keep_smallest)


def _mixes_parities(bias: Bias, label: tuple[int, int]) -> bool:
    """Whether a block couples states of even and of odd p.

    u leads from even to odd p and back. Without a corner h_k is even or odd from k = first_even on,
    so that h_k(cu) … h_k(cu) leads back to the same parity. The terms before have weights g_k(p)
    g_{k+1}(q), which are zero but for p < first_even and q ≤ first_even, and a + b ≤ p + q.
    """
    first_even = bias.activation.first_even_order
    if bias.corner or first_even is None:
        return True
    return sum(label) <= 2 * first_even - 1


@dataclass(frozen=True, eq=False)
class _Plan:
    """Blocks that are computed alike.

    With step 1 a block has all of its listed states at once. With step 2 it has those of even and
    of odd p one after the other: a state of the same parity is then reached by polynomials of even
    degree in u alone, and the other states by those of odd degree. To degree 12 that takes two
    thirds of the time, to degree 16 half of it.
    """

    step: int
    block_sizes: list[tuple[tuple[int, int], int]]
    states_of_blocks: list[Int[np.ndarray, "_ 2"]]
    n_listed: list[int]  # listed states of every block
    degree_pairs: Int[np.ndarray, "pairs 2"]  # the distinct (|p|, |q|) of all states

    @classmethod
    def of(
        cls, dim: int, block_sizes: list[tuple[tuple[int, int], int]], step: int, top: int
    ) -> _Plan:
        """A plan for these labels and degrees, with states in between up to ``top``."""
        states_of_blocks = [block_states(dim, a, b, top) for (a, b), _ in block_sizes]

        # blocks share the matrices of their states (p, q): each is computed once
        p, q = np.abs(np.concatenate(states_of_blocks)).T
        is_pair = np.zeros((top + 1, top + 1), dtype=bool)
        is_pair[p, q] = True
        return cls(
            step=step,
            block_sizes=block_sizes,
            states_of_blocks=states_of_blocks,
            n_listed=[len(block_states(dim, a, b, degree)) for (a, b), degree in block_sizes],
            degree_pairs=np.argwhere(is_pair),
        )

    @property
    def n_states(self) -> list[int]:
        """How many states every block has."""
        return [len(states) for states in self.states_of_blocks]


def _planned_blocks(
    dim: int,
    bias: Bias,
    plan: _Plan,
    series: _Series,
    highest: int,
    allowed: float,
    keep_smallest: bool,
) -> Iterator[Block]:
    """The blocks of a plan, a few of them at a time."""
    first_even = bias.activation.first_even_order or 0
    shells = _state_roots(dim, series, plan.degree_pairs, plan.step, first_even, highest, allowed)
    n_polynomials = shells[0].roots.shape[2]
    for group in _block_groups(plan.n_states, plan.n_listed, n_polynomials):
        block_sizes = plan.block_sizes[group]
        factors = _block_factors(
            dim,
            block_sizes,
            plan.states_of_blocks[group],
            shells,
            series.reach,
            allowed,
            keep_smallest,
        )
        for (label, degree), factor in zip(block_sizes, factors, strict=True):
            a, b = label
            yield Block(
                label=label,
                states=block_states(dim, a, b, degree),
                dimension=irrep_dimension(dim, a, b),
                factor=factor,
            )


GROUPED_NUMBERS = 2**19
"""Numbers in the polynomials of u of a group of blocks: 4 MiB. Larger blocks are alone."""


def _block_groups(n_states: list[int], n_listed: list[int], n_degrees: int) -> Iterator[slice]:
    """Neighbouring blocks that are computed together, because every step has a fixed cost."""
    first = 0
    group_states = 0
    group_listed = 0
    for block, (states, listed) in enumerate(zip(n_states, n_listed, strict=True)):
        group_states += states
        group_listed = max(group_listed, listed)
        if block > first and group_states * group_listed * n_degrees > GROUPED_NUMBERS:
            yield slice(first, block)
            first = block
            group_states = states
            group_listed = listed
    yield slice(first, len(n_states))


def _truncation(dim: int, bias: Bias, degree: int, allowed: float) -> tuple[_Series, int]:
    """Where the sums of a block end: the series, and the highest degree of states between h_k(cJ).

    States beyond it are reached by polynomials of degree m and more in u only, and lead back to a
    state within by those of still higher degree. What all of them add to a block, 2 Σ_k
    (Σ_i |η_ki|)² g_k(p) g_{k+1}(q) for i > m or more, by the degree of the state, is kept below
    ``allowed``. The bound is far from sharp.
    """
    series = None
    margin = 0
    while True:
        top = degree + margin

        # the series must cover all values that u takes between these states; the reach grows with
        # the degree, and a fifth more saves computing the series anew for each
        reach = correlation_norm(dim, top)
        if series is None or reach > series.reach:
            series = _series(dim, bias, min(1.0, 1.2 * reach), allowed)
            losses = _losses(dim, series, degree)

        # the bound on what the states beyond ``top`` would add. A path of steps of u from a listed
        # state through degree top+1 to a state of degree t takes at least (top+1 − degree) +
        # (top+1 − t) steps, one more than ``longest_within``; degree top+1 stands for all beyond,
        # whose weights are smaller. Polynomials of a higher degree than the series has are zero
        state_degrees = np.arange(top + 2)
        longest_within = degree + 2 * margin + 1 - state_degrees
        is_in_series = longest_within < losses.shape[1]
        if losses[state_degrees[is_in_series], longest_within[is_in_series]].sum() <= allowed:
            return series, top
        margin += 1


def _losses(dim: int, series: _Series, degree: int) -> Float[np.ndarray, "states m"]:
    """2 Σ_k (Σ_{i>m} |η_ki|)² g_k(p) g_{k+1}(q), by the degree of the state and by m.

    The states go up to the highest degree that `_truncation` can ask for: polynomials of the
    series lead no further.
    """
    n_terms, n_degrees = series.coefficients.shape
    highest = degree + n_degrees + 1
    order = np.arange(n_terms, dtype=np.float64)
    query_ratios = harmonic_ratios(order, dim, highest)
    key_ratios = harmonic_ratios(order + 1, dim, highest)
    # a state of degree t has p = t or q = t, and the other ratio is at most one
    weights = np.maximum(query_ratios, key_ratios) * series.weights

    # what is left of each h_k beyond the degree m
    sizes = np.abs(series.coefficients)
    from_degree_on = np.cumsum(sizes[:, ::-1], axis=1)[:, ::-1]
    tails = np.zeros_like(sizes)
    tails[:, :-1] = from_degree_on[:, 1:]
    return np.asarray(weights @ np.square(tails))


SHELL = 8
"""Width of a shell in degrees: shell n holds the states that lie 8n to 8n+7 degrees beyond the
listed ones. That makes few shells, and few rows and columns in the roots of each.
"""


@dataclass(frozen=True, eq=False)
class _Shell:
    """Roots of the states (p, q) in one band of distances from the listed states.

    The first band contains the listed states themselves.

    ``roots[parity, numbers[p, q]]`` is L with L Lᵀ = Σ_k η_k η_kᵀ 2 g_k(p) g_{k+1}(q), over the
    polynomials T_m with m = step · i + parity and i ≥ first. Those of lower degree do not lead from
    the listed states to the shell.
    """

    numbers: Int[np.ndarray, "p q"]
    first: int
    roots: Float[np.ndarray, "parity s i r"]


def _state_roots(
    dim: int,
    series: _Series,
    degree_pairs: Int[np.ndarray, "s 2"],
    step: int,
    first_even: int,
    listed_degree: int,
    allowed: float,
) -> list[_Shell]:
    """The roots of all states (p, q), shell by shell.

    With step 1 there is one root for each, with step 2 one for polynomials of even degree and one
    for those of odd degree. A root is exact but for less than ``allowed``.
    """
    n_polynomials = math.ceil(series.coefficients.shape[1] / step)
    highest = int(degree_pairs.max())
    distance = np.maximum(degree_pairs.max(axis=1) - listed_degree, 0)
    parts = [_terms_of_parity(series, first_even, step, parity) for parity in range(step)]
    # where rounding of squares cannot show, roots are taken of sums of squares
    n_terms, n_degrees = parts[0].weighted.shape
    uses_sums_of_squares = allowed >= ROUNDING and n_terms > FEW_ROWS * n_degrees
    if uses_sums_of_squares:
        squares_of_parts = [_squares(part) for part in parts]

    shells = []
    for shell in range(int(distance.max()) // SHELL + 1):
        members = degree_pairs[distance // SHELL == shell]
        first = min(shell * SHELL // step, n_polynomials - 1)
        numbers = np.full((highest + 1, highest + 1), -1)
        numbers[tuple(members.T)] = np.arange(len(members))
        if uses_sums_of_squares:
            roots_by_parity = [
                _roots_of_sums(dim, squares, members, first, allowed)
                for squares in squares_of_parts
            ]
        else:
            roots_by_parity = [_reflected_roots(dim, part, members, first) for part in parts]
        roots_by_parity = [_without_short_columns(roots, allowed) for roots in roots_by_parity]

        # roots of one parity have fewer columns: columns of zeros make them equal
        n_columns = max(roots.shape[2] for roots in roots_by_parity)
        roots = np.zeros((step, len(members), n_polynomials - first, n_columns))
        for parity, part_roots in enumerate(roots_by_parity):
            _, n_rows, n_part_columns = part_roots.shape
            roots[parity, :, :n_rows, :n_part_columns] = part_roots
        shells.append(_Shell(numbers=numbers, first=first, roots=roots))
    return shells


@dataclass(frozen=True, eq=False)
class _Terms:
    """Terms of the series with polynomials of one parity: orders k, and η_k √(2 j_k j_{k+1})."""

    order: Float[np.ndarray, " k"]
    weighted: Float[np.ndarray, "k i"]


def _terms_of_parity(series: _Series, first_even: int, step: int, parity: int) -> _Terms:
    """The terms with polynomials of one parity, or all of them where the step is 1."""
    weighted = np.sqrt(series.weights)[:, None] * series.coefficients
    order = np.arange(len(weighted), dtype=np.float64)
    if step == 1:
        return _Terms(order=order, weighted=weighted)

    # h_k is even for k = first_even, first_even + 2, … and odd in between. Orders below first_even
    # may have neither parity, but blocks are halved only where these have no weight
    # (`_mixes_parities`)
    start = (first_even + parity) % 2
    return _Terms(order=order[start::2], weighted=weighted[start::2, parity::2])


SINGLE_TERMS = 128
"""Orders k below have their own squares, those above are interpolated."""

INTERPOLATION_NODES = 48
"""Nodes in (k+1)^{−1/2}, with which g_k(p) g_{k+1}(q) over j_k j_{k+1} are right to 1.5e-14 for
K ≤ 1500 and to 1.2e-13 for K ≤ 6000, for all d and p, q ≤ 300."""


@dataclass(frozen=True, eq=False)
class _Squares:
    """Orders n and matrices S_n that stand for the squares of all terms.

    With r_k(p) = g_k(p)/j_k, Σ_n r_n(p) r_{n+1}(q) S_n = Σ_k η_k η_kᵀ 2 g_k(p) g_{k+1}(q). There
    are fewer orders n than k, and 2 j_k j_{k+1} is in the matrices.
    """

    order: Float[np.ndarray, " n"]
    matrices: Float[np.ndarray, "n i i"]


def _squares(terms: _Terms) -> _Squares:
    """The squares of the first terms, and of all others a few weighted sums.

    The weights g_k(p) g_{k+1}(q) over j_k j_{k+1} are smooth in k: they are interpolated between
    Chebyshev's nodes in (k+1)^{−1/2}. In two dimensions there are up to 6000 terms, 176 then.
    """
    # a few more terms than nodes: all have squares of their own
    is_single = terms.order < SINGLE_TERMS
    others = terms.weighted[~is_single]
    if len(others) <= 2 * INTERPOLATION_NODES:
        squares = terms.weighted[:, :, None] * terms.weighted[:, None, :]
        return _Squares(order=terms.order, matrices=squares)
    single = terms.weighted[is_single]
    squares = single[:, :, None] * single[:, None, :]

    # Lagrange's polynomials of the nodes at every order
    places = 1 / np.sqrt(terms.order[~is_single] + 1)
    middle = (places[0] + places[-1]) / 2
    half_width = (places[0] - places[-1]) / 2
    angles = math.pi * (np.arange(INTERPOLATION_NODES) + 0.5) / INTERPOLATION_NODES
    degrees = np.arange(INTERPOLATION_NODES)[:, None]
    angles_of_orders = np.arccos(np.clip((places - middle) / half_width, -1.0, 1.0))
    chebyshev_at_orders = np.cos(degrees * angles_of_orders)
    # T_0 counts half, as in the discrete orthogonality of Chebyshev's polynomials
    chebyshev_at_orders[0] /= 2
    lagrange = (2 / INTERPOLATION_NODES) * np.cos(degrees * angles).T @ chebyshev_at_orders

    # every node has the squares of all orders, weighted by its polynomial
    sums = np.stack([(others.T * weights) @ others for weights in lagrange])
    node_orders = 1 / np.square(middle + half_width * np.cos(angles)) - 1
    return _Squares(
        order=np.concatenate([terms.order[is_single], node_orders]),
        matrices=np.concatenate([squares, sums]),
    )


def _roots_of_sums(
    dim: int, squares: _Squares, degree_pairs: Int[np.ndarray, "s 2"], first: int, allowed: float
) -> Float[np.ndarray, "s i r"]:
    """A matrix L for every (p, q), with L Lᵀ = Σ_k η_k η_kᵀ 2 g_k(p) g_{k+1}(q)."""
    # g_k(p) and g_{k+1}(q) over j_k and j_{k+1}, which are in the squares
    highest = int(degree_pairs.max())
    query_ratios = harmonic_ratios(squares.order, dim, highest)
    key_ratios = harmonic_ratios(squares.order + 1, dim, highest)
    matrices = squares.matrices[:, first:, first:]
    n_degrees = matrices.shape[1]
    flat_matrices = matrices.reshape(len(matrices), -1)

    # all sums at once, as one product of matrices, some pairs at a time
    roots = np.empty((len(degree_pairs), n_degrees, n_degrees))
    for rows in row_slices(len(degree_pairs), block_size(16 * n_degrees**2, 2**26)):
        p, q = degree_pairs[rows].T
        sums = (query_ratios[p] * key_ratios[q]) @ flat_matrices
        sums = sums.reshape(-1, n_degrees, n_degrees)
        roots[rows] = _pivoted_roots(sums, 1e-6 * allowed).swapaxes(1, 2)
    return roots


def _reflected_roots(
    dim: int, terms: _Terms, degree_pairs: Int[np.ndarray, "s 2"], first: int
) -> Float[np.ndarray, "s i r"]:
    """L as in `_roots_of_sums`, but from Householder's reflections of the terms themselves.

    No squares are summed, so that every row of L is right relative to its own length.
    """
    highest = int(degree_pairs.max())
    query_ratios = harmonic_ratios(terms.order, dim, highest)
    key_ratios = harmonic_ratios(terms.order + 1, dim, highest)
    weighted = terms.weighted[:, first:]
    roots = np.empty((len(degree_pairs), weighted.shape[1], min(weighted.shape)))
    for rows in row_slices(len(degree_pairs), block_size(8 * weighted.size, 2**26)):
        p, q = degree_pairs[rows].T
        scaled = np.sqrt(query_ratios[p] * key_ratios[q])[:, :, None] * weighted
        roots[rows] = np.asarray(np.linalg.qr(scaled, mode="r")).swapaxes(1, 2)
    return roots


def _without_short_columns(
    roots: Float[np.ndarray, "s i r"], allowed: float
) -> Float[np.ndarray, "s i kept"]:
    """The roots without the last columns, which are too short to matter in every root."""
    lengths = np.sqrt(np.square(roots).sum(axis=1)).max(axis=0)
    matters = np.flatnonzero(lengths > 1e-3 * math.sqrt(allowed))
    n_columns = int(matters.max(initial=0)) + 1
    return roots[..., :n_columns]


def _pivoted_roots(
    squares: Float[np.ndarray, "s n n"], negligible: float
) -> Float[np.ndarray, "s n n"]:
    """R with RᵀR = square, by Cholesky's method with the largest remaining diagonal entry first.

    It ends once that entry is at most ``negligible``, or no larger than its rounding error; later
    rows are zero. It takes a tenth of the time that eigenvectors would.
    """
    n_squares, n_columns, _ = squares.shape
    diagonals = squares.diagonal(axis1=1, axis2=2)
    rounding_errors = n_columns * np.finfo(float).eps * diagonals.max(axis=1, initial=0.0)
    limits = np.maximum(negligible, rounding_errors)
    triangles = np.empty_like(squares)
    pivots = np.empty((n_squares, n_columns), dtype=int)
    ranks = np.empty(n_squares, dtype=int)
    for i in range(n_squares):
        triangles[i], pivots[i], ranks[i], _ = dpstrf(squares[i], tol=limits[i])

    # LAPACK leaves old numbers below the diagonal and in the rows beyond the rank: zeros instead.
    # It has permuted the columns: back to their places
    row_numbers = np.arange(n_columns)[:, None]
    is_upper = row_numbers <= np.arange(n_columns)
    is_root = is_upper & (row_numbers < ranks[:, None, None])
    roots = np.empty_like(squares)
    np.put_along_axis(roots, pivots[:, None, :] - 1, np.where(is_root, triangles, 0.0), axis=2)
    return roots


def _root(
    tall: Float[np.ndarray, "n m"], allowed: float, keep_smallest: bool
) -> Float[np.ndarray, "r m"]:
    """R with RᵀR = tallᵀ tall.

    A tall matrix may be squared where a rounding error of 1e-16 of the largest eigenvalue does not
    matter in the others. Otherwise, or with ``keep_smallest``, every column keeps its relative
    accuracy, however short it is: by Cholesky's factor of the product of columns of unit length, or
    by Householder's reflections. These are quicker where there are few rows, and necessary where
    that product is too near to singular.
    """
    n_rows, n_columns = tall.shape
    is_tall = n_rows > FEW_ROWS * n_columns
    if is_tall and allowed >= ROUNDING and not keep_smallest:
        return _pivoted_roots((tall.T @ tall)[None], negligible=0.0)[0]

    if n_rows > n_columns:
        lengths = np.sqrt(np.square(tall).sum(axis=0)) + 1e-300
        unit = tall / lengths
        product = unit.T @ unit
        triangle, failed = dpotrf(product)
        if not failed:
            one_norm = np.abs(product).sum(axis=0).max(initial=0.0)
            inverse_condition = dpocon(triangle, one_norm)[0]
            if inverse_condition > 1e-10:
                return np.asarray(triangle * lengths)
    return np.asarray(np.linalg.qr(tall, mode="r"))


def _block_factors(
    dim: int,
    block_sizes: list[tuple[tuple[int, int], int]],
    states_of_blocks: list[Int[np.ndarray, "_ 2"]],
    shells: list[_Shell],
    reach: float,
    allowed: float,
    keep_smallest: bool,
) -> list[Float[np.ndarray, "_ _"]]:
    """R with RᵀR = A for every block, over its listed states.

    A between listed states is the product with itself of the tall factor Σ_m <s| T_m(u) |listed>
    L_mr over all s and r. If blocks are halved, this is done for listed states of even and of odd
    p, which A does not couple.
    """
    # all states of all blocks: one shell after the other, and in each one block after the other
    states = np.concatenate(states_of_blocks)
    block_numbers = np.repeat(np.arange(len(block_sizes)), [len(s) for s in states_of_blocks])
    shell_numbers = _shell_table(shells)[tuple(np.abs(states).T)]
    by_shell = np.argsort(shell_numbers, kind="stable")
    states = states[by_shell]
    block_numbers = block_numbers[by_shell]
    shell_bounds = np.searchsorted(shell_numbers[by_shell], np.arange(len(shells) + 1))

    # column j holds the j-th listed state of every block: u does not couple blocks, so that they
    # share columns. Those of even p come first, then those of odd p
    step = len(shells[0].roots)
    state_parities = states[:, 0] % step
    degrees = np.array([degree for _, degree in block_sizes])
    is_listed = np.abs(states).max(axis=1) <= degrees[block_numbers]
    n_columns = np.array(
        [
            np.bincount(
                block_numbers[is_listed & (state_parities == column_parity)], minlength=len(degrees)
            )
            for column_parity in range(step)
        ]
    )
    first_columns = np.concatenate([[0], np.cumsum(n_columns.max(axis=1))])

    # T_m(u) between all states and the columns
    columns = np.zeros((len(states), first_columns[-1]))
    for column_parity in range(step):
        listed = np.flatnonzero(is_listed & (state_parities == column_parity))
        places = np.concatenate([np.arange(count) for count in n_columns[column_parity]])
        columns[listed, first_columns[column_parity] + places] = 1.0
    labels = np.array([label for label, _ in block_sizes])[block_numbers]
    u = correlation_matrix(dim, labels[:, 0], labels[:, 1], states) / reach
    n_polynomials = shells[0].roots.shape[2]
    if step == 1:
        polynomials = _chebyshev(u, columns, n_polynomials)
    else:
        polynomials = _half_chebyshev(u, columns, n_polynomials)

    # the tall factors of the blocks, for the columns of one parity, and their roots
    factors = [np.zeros((count, count)) for count in n_columns.sum(axis=0)]
    for column_parity in range(step):
        tall_factors: list[list[np.ndarray]] = [[] for _ in block_sizes]
        of_parity = slice(first_columns[column_parity], first_columns[column_parity + 1])
        for number, shell in enumerate(shells):
            in_shell = slice(shell_bounds[number], shell_bounds[number + 1])
            p, q = np.abs(states[in_shell]).T
            # polynomials of even degree join states of equal parity, those of odd degree states of
            # different parity
            degree_parities = (state_parities[in_shell] + column_parity) % step
            roots = shell.roots[degree_parities, shell.numbers[p, q]]
            polynomials_at_shell = polynomials[shell.first :, in_shell, of_parity].swapaxes(0, 1)
            products = roots.swapaxes(1, 2) @ polynomials_at_shell
            bounds = np.searchsorted(block_numbers[in_shell], np.arange(len(block_sizes) + 1))
            for block, count in enumerate(n_columns[column_parity]):
                rows = products[bounds[block] : bounds[block + 1], :, :count]
                tall_factors[block].append(rows.reshape(rows.shape[0] * rows.shape[1], count))
        for block, parts in enumerate(tall_factors):
            if n_columns[column_parity, block] == 0:
                continue
            root = _root(np.concatenate(parts), allowed, keep_smallest)
            # listed states are all in the first shell, in the order of `block_states`; R may have
            # fewer rows than columns, and the other rows stay zero
            parities_of_listed = state_parities[is_listed & (block_numbers == block)]
            places = np.flatnonzero(parities_of_listed == column_parity)
            factors[block][np.ix_(places[: len(root)], places)] = root
    return factors


def _shell_table(shells: list[_Shell]) -> Int[np.ndarray, "p q"]:
    """The number of the shell of every state (p, q)."""
    table = np.zeros_like(shells[0].numbers)
    for number, shell in enumerate(shells):
        table[shell.numbers >= 0] = number
    return table


def _chebyshev(
    u: csr_array, columns: Float[np.ndarray, "s c"], n_polynomials: int
) -> Float[np.ndarray, "m s c"]:
    """T_m(u) applied to the columns: T_0 = 1, T_1 = u and T_m = 2u T_{m−1} − T_{m−2}."""
    polynomials = np.empty((n_polynomials, *columns.shape))
    polynomials[0] = columns
    if n_polynomials > 1:
        polynomials[1] = u @ columns
    twice_u = 2 * u
    for m in range(2, n_polynomials):
        np.subtract(twice_u @ polynomials[m - 1], polynomials[m - 2], out=polynomials[m])
    return polynomials


def _half_chebyshev(
    u: csr_array, columns: Float[np.ndarray, "s c"], n_polynomials: int
) -> Float[np.ndarray, "i s c"]:
    """T_{2i}(u) + T_{2i+1}(u) applied to the columns.

    The one is zero where the other is not: u leads from even to odd p and back. Both follow from
    T_{m+2} = 2 T_2(u) T_m − T_{m−2}.
    """
    polynomials = np.empty((n_polynomials, *columns.shape))
    first = u @ columns
    polynomials[0] = columns + first
    second_of_u = 2 * (u @ u) - eye_array(u.shape[0], format="csr")
    if n_polynomials > 1:
        # T_2, and T_3 = 2 T_2 T_1 − T_1
        polynomials[1] = second_of_u @ (columns + 2 * first) - first
    twice_second = 2 * second_of_u
    for i in range(2, n_polynomials):
        np.subtract(twice_second @ polynomials[i - 1], polynomials[i - 2], out=polynomials[i])
    return polynomials


def target_vectors(
    target: Polynomial, degree: int
) -> dict[tuple[int, int], Float[np.ndarray, "states v"]]:
    """Vectors of a target's pair function F in the blocks, on the states p, q ≤ degree.

    The degree is at least the degrees of F. The squares and products of the vectors are those of
    the parts of F in the members of the irrep. Terms u^q <β, x>^p have closed forms
    (:func:`_zonal_vectors`). Any other F whose terms have one degree is taken apart by its
    contractions (:func:`_part_products`). One that mixes the two, or is too large for that, is a
    ValueError.
    """
    zonal_terms = []
    for term in target.terms:
        zonal_term = _zonal_term(term, target.dim)
        if zonal_term is None:
            return _contracted_vectors(target, degree)
        zonal_terms.append(zonal_term)
    return _zonal_vectors(zonal_terms, target.dim, degree)


@dataclass(frozen=True, eq=False)
class _Zonal:
    """c u^q <β, x>^p with a direction β of unit length, x the query or the key."""

    coefficient: float
    exponent: int
    of_query: bool
    direction: Float[np.ndarray, " d"]
    power: int


def _zonal_term(term: Term, dim: int) -> _Zonal | None:
    """A term u^q <β, x>^p, or None if the term has another form."""
    exponent = 0
    of_query = False
    direction = np.eye(dim)[0]
    power = 0
    for factor, count in term.powers:
        is_correlation = factor.kind == PAIR and factor.array is None
        is_first_direction = factor.kind != PAIR and power == 0
        if is_correlation:
            exponent = count
        elif is_first_direction:
            assert factor.array is not None
            of_query = factor.kind == QUERY
            direction = factor.array
            power = count
        else:
            return None
    length = float(np.linalg.norm(direction))
    return _Zonal(
        coefficient=term.coefficient * length**power,
        exponent=exponent,
        of_query=of_query,
        direction=direction / length,
        power=power,
    )


def _zonal_vectors(
    terms: list[_Zonal], dim: int, degree: int
) -> dict[tuple[int, int], Float[np.ndarray, "states v"]]:
    """Vectors of terms u^q <β, x>^p.

    In the block (l, 0) the vector is N_l^{1/2} ∫ t^p P_l dτ times J^q |0, l> for a direction of the
    key, and times J^q |l, 0> for a direction of the query.

    Along directions β and γ such vectors belong to members of the irrep with the inner product
    P_l(cos(β, γ)).
    """
    # the vectors of every term, by l, with their directions
    vectors_of: dict[int, list[np.ndarray]] = {}
    directions_of: dict[int, list[np.ndarray]] = {}
    for term in terms:
        for l in range(term.power % 2, term.power + 1, 2):  # noqa: E741
            states = block_states(dim, l, 0, degree)
            u = correlation_matrix(dim, l, 0, states)
            if term.of_query:
                start = (l, 0)
            else:
                start = (0, l)
            size = math.sqrt(harmonic_count(dim, l)) * power_moment(term.power, l, dim)
            vector = term.coefficient * size * (states == start).all(axis=1)
            for _ in range(term.exponent):
                vector = u @ vector
            vectors_of.setdefault(l, []).append(vector)
            directions_of.setdefault(l, []).append(term.direction)

    # a root of the inner products of the members makes vectors along orthonormal members
    block_vectors = {}
    for l, vectors in vectors_of.items():  # noqa: E741
        directions = np.stack(directions_of[l])
        cosines = np.clip(directions @ directions.T, -1.0, 1.0)
        products = [[gegenbauer(l, float(cosine), dim)[l] for cosine in row] for row in cosines]
        block_vectors[l, 0] = np.stack(vectors, axis=1) @ _half(np.array(products))
    return block_vectors


def _half(matrix: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    """H with H Hᵀ = matrix; eigenvalues that rounding has made negative count as zero."""
    eigenvalues, vectors = np.linalg.eigh(matrix)
    return np.asarray(vectors * np.sqrt(np.maximum(eigenvalues, 0.0)))


MOST_UNKNOWN = 400
"""Products of parts of a target that are solved for at most: degrees (5, 6)."""


@lru_cache(maxsize=64)
def _part_products(target: Polynomial) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
    """For every block the states that F has a part in, and the inner products of these parts.

    On polynomials of x and y in R^d, homogeneous of degrees R and S, the operators x·y (J), Δ_x and
    Δ_y (numbers (R−p)(R+p+d−2) and (S−q)(S+q+d−2)) and y·∂_x = [Δ_x, x·y]/2 are explicit in every
    block, and so is Fischer's product, which is diagonal (:func:`_fischer_length`). On the other
    hand [O F, O' F] for products O, O' of these operators is a sum over joinings of F with itself.
    Equated for O = (y·∂_x)^e Δ_x^i Δ_y^j (x·y)^n, e ≤ 1 and n ≤ min(r, s), they determine all inner
    products. The system is solved by least squares; a lower rank or a residual is refused.
    """
    # refuse what has no solution, or takes too long
    r, s = target.degrees
    is_homogeneous = all(term.degrees == (r, s) for term in target.terms)
    if not is_homogeneous or target.dim < 3:
        raise ValueError(
            f"{target!r} has terms that are no product of a power of <x_0, x_i> and a power of one "
            "direction. For heads with a mean all its terms must then have the same degrees, in "
            "dimension 3 or more. Use kh.theory.empirical_curve on a Gram matrix."
        )
    part_states = _part_states(target)
    n_unknowns = sum(_triangle_size(states) for states in part_states.values())
    if n_unknowns > MOST_UNKNOWN:
        raise ValueError(
            f"{target!r} has {n_unknowns} products of parts in the blocks, and {MOST_UNKNOWN} are "
            "solved for at most. Lower its degree, or use kh.theory.empirical_curve on a Gram "
            "matrix."
        )

    # the left-hand sides [O F, O' F], from joinings; an equation is named (n, k, e, i, j)
    raised = [target]
    for _ in range(min(r, s)):
        raised.append(raised[-1].pairwise(monomial(target.dim, pairs=[(None, 1)])))
    fischer_products = {}
    for n, first in enumerate(raised):
        for k, second in enumerate(raised[n:], start=n):
            for (e, i, j), value in _fischer_products(first, second).items():
                fischer_products[n, k, e, i, j] = value

    # the coefficients of the unknowns in every equation, block by block
    equations = list(fischer_products)
    rows = {equation: np.zeros(n_unknowns) for equation in equations}
    offset = 0
    for label, states in part_states.items():
        end = offset + _triangle_size(states)
        for equation, row in _block_products(target, label, states, equations).items():
            rows[equation][offset:end] = row
        offset = end

    # equations of unit length; those without a coefficient say nothing
    row_lengths = {equation: float(np.linalg.norm(row)) for equation, row in rows.items()}
    used = [equation for equation in equations if row_lengths[equation] > 0]
    design = np.array([rows[equation] / row_lengths[equation] for equation in used])
    values = np.array([fischer_products[equation] / row_lengths[equation] for equation in used])

    # columns of unit length too: unknowns of high degree are small in every equation
    column_lengths = np.linalg.norm(design, axis=0)
    design = design / column_lengths
    solution, _, rank, _ = np.linalg.lstsq(design, values, rcond=1e-10)
    residual = float(np.abs(design @ solution - values).max())
    largest_value = float(np.abs(values).max(initial=1e-300))
    if rank < n_unknowns or residual > 1e-8 * largest_value:
        raise ValueError(
            f"the parts of {target!r} in the blocks of heads with a mean are lost to rounding "
            f"(rank {rank} of {n_unknowns}, residual {residual:.1e}). Use "
            "kh.theory.empirical_curve on a Gram matrix."
        )

    # the solution lists the upper triangles of the blocks' matrices, one after the other
    unknowns = solution / column_lengths
    products = {}
    offset = 0
    for label, states in part_states.items():
        end = offset + _triangle_size(states)
        matrix = np.zeros((len(states), len(states)))
        matrix[np.triu_indices(len(states))] = unknowns[offset:end]
        products[label] = (states, matrix + np.triu(matrix, 1).T)
        offset = end
    return products


def _part_states(target: Polynomial) -> dict[tuple[int, int], Int[np.ndarray, "states 2"]]:
    """The states in which a homogeneous F has a part: degrees p ≤ r, q ≤ s of the same parity."""
    r, s = target.degrees
    part_states = {}
    for a, b in block_labels(target.dim, max(r, s)):
        states = block_states(target.dim, a, b, max(r, s))
        is_low = (states <= (r, s)).all(axis=1)
        has_parity = ((states - (r, s)) % 2 == 0).all(axis=1)
        has_part = is_low & has_parity
        if has_part.any():
            part_states[a, b] = states[has_part]
    return part_states


def _triangle_size(states: Int[np.ndarray, "states 2"]) -> int:
    """Entries of the upper triangle of a symmetric matrix over the states."""
    return len(states) * (len(states) + 1) // 2


def _contracted_vectors(
    target: Polynomial, degree: int
) -> dict[tuple[int, int], Float[np.ndarray, "states v"]]:
    """Vectors of a homogeneous F, from the inner products of its parts."""
    vectors = {}
    for (a, b), (part_states, products) in _part_products(target).items():
        # a matrix of zeros and ones that places the parts among all states of the block
        states = block_states(target.dim, a, b, degree)
        placement = (states[:, None, :] == part_states).all(axis=2)
        vectors[a, b] = placement @ _half(products)
    return vectors


def _fischer_products(first: Polynomial, second: Polynomial) -> dict[tuple[int, int, int], float]:
    """[O f, O' g] for O = (y·∂_x)^e Δ_x^i Δ_y^j, by (e, i, j).

    O' is the one that ends in the same degrees.
    """
    # polynomials of different parity have no common part
    r, s = first.degrees
    if (second.degrees[0] - r) % 2:
        return {}
    # Laplacians that g needs more of than f
    surplus = (second.degrees[0] - r) // 2

    # joinings of every term of f with every term of g, without and with joints across
    sums = np.zeros((2, s // 2 + 1, r // 2 + 1))
    for one in first.terms:
        for other in second.terms:
            sums += one.coefficient * other.coefficient * crossed_joinings(one, other, first.dim)
    plain_sums, crossed_sums = sums

    products = {}
    for (j, i), plain in np.ndenumerate(plain_sums):
        # a set of i joints inside is 2^i i! times one power of the Laplacian, and joinings come
        # divided by r! s!
        log_weight = 0.0
        for n in (i, j, i + surplus, j + surplus):
            log_weight += n * math.log(2) + math.lgamma(n + 1)
        weight = math.exp(log_weight + math.lgamma(r + 1) + math.lgamma(s + 1))
        products[0, i, j] = weight * float(plain)
        if r > 2 * i:
            # y·∂_x moves one slot of each: the two that are joined, or one joint across each way
            moved = (r - 2 * i) * float(plain) + float(crossed_sums[j, i])
            products[1, i, j] = weight * moved
    return products


def _block_products(
    target: Polynomial,
    label: tuple[int, int],
    states: Int[np.ndarray, "states 2"],
    equations: list[tuple[int, int, int, int, int]],
) -> dict[tuple[int, int, int, int, int], Float[np.ndarray, " pairs"]]:
    """Coefficients of the products of parts in [O (x·y)^n f, O' (x·y)^k f].

    An equation is named (n, k, e, i, j); O = (y·∂_x)^e Δ_x^i Δ_y^j.
    """
    dim = target.dim
    r, s = target.degrees
    a, b = label

    # the operators lead to states of higher degree than those of the parts
    all_states = block_states(dim, a, b, max(r, s) + min(r, s) + 1)
    p, q = all_states.T
    u = correlation_matrix(dim, a, b, all_states).toarray()

    # (x·y)^n applied to every part
    powers = [(all_states[:, None, :] == states).all(axis=2).astype(np.float64)]
    for _ in range(min(r, s)):
        powers.append(u @ powers[-1])

    def laplace(degree: int, part: np.ndarray) -> np.ndarray:
        """The numbers by which Δ multiplies the states, one row each."""
        return np.asarray((degree - part) * (degree + part + dim - 2.0))[:, None]

    def applied(n: int, e: int, i: int, j: int) -> tuple[np.ndarray, int, int]:
        """(y·∂_x)^e Δ_x^i Δ_y^j (x·y)^n of every part, and the degrees in x and y that remain."""
        vectors = powers[n]
        query_degree = r + n
        key_degree = s + n
        for _ in range(i):
            vectors = laplace(query_degree, p) * vectors
            query_degree -= 2
        for _ in range(j):
            vectors = laplace(key_degree, q) * vectors
            key_degree -= 2
        if e:
            # y·∂_x = [Δ_x, x·y]/2
            raised_first = laplace(query_degree + 1, p) * (u @ vectors)
            raised_last = u @ (laplace(query_degree, p) * vectors)
            vectors = (raised_first - raised_last) / 2
            query_degree -= 1
            key_degree += 1
        return vectors, query_degree, key_degree

    rows = {}
    row_numbers, column_numbers = np.triu_indices(len(states))
    for n, k, e, i, j in equations:
        # both sides end in the same degrees, so the second has (k−n)/2 Laplacians more of each
        surplus = (k - n) // 2
        first, query_degree, key_degree = applied(n, e, i, j)
        second, _, _ = applied(k, e, i + surplus, j + surplus)

        # Fischer's product is diagonal in the states
        lengths = np.array(
            [
                _fischer_length(query_degree, p_state, dim)
                * _fischer_length(key_degree, q_state, dim)
                for p_state, q_state in all_states.tolist()
            ]
        )
        form = first.T @ (lengths[:, None] * second)

        # a product of two different parts occurs twice, above and below the diagonal
        above = form[row_numbers, column_numbers]
        below = form[column_numbers, row_numbers]
        rows[n, k, e, i, j] = np.where(row_numbers == column_numbers, above, above + below)
    return rows


@lru_cache(maxsize=4096)
def _fischer_length(degree: int, part: int, dim: int) -> float:
    """[f, f] / E f² for f = |x|^{R−p} times a harmonic of degree p, on the sphere of R^d."""
    if part > degree or (degree - part) % 2:
        return 0.0
    inner = math.prod(
        2 * a * (2 * a + 2 * part + dim - 2) for a in range(1, (degree - part) // 2 + 1)
    )
    return float(inner * math.prod(dim + 2 * a for a in range(part)))
