"""Learning curves without training: the test error of ridge regression from eigenvalues and target powers.

Ridge α = nλ on n samples with k random features, noise variance σ², eigenvalues λ_i, target powers c_i². With
z(γ) = Σ λ_i/(λ_i+γ) and q(γ) = Σ (λ_i/(λ_i+γ))² the implicit ridge γ solves

    γ (1 − z/k) (1 − z/n) = λ,      z < min(n, k),

whose left side grows with γ, so there is one root. The test error, noise floor included, is

    n (k−q) / [(n−q)(k−q) − (z−q)²] · ( Σ_i c_i² [γ² + γ λ_i (z−q)/(k−q)] / (λ_i+γ)² + σ² ).

These are the equations of Simon, Karkada, Ghosh and Belkin (2023) with κ = γ (1 − z/k) eliminated and
differences of nearly equal numbers written as products; k → ∞ gives the kernel limit n/(n−q) · (Σ c_i²
γ²/(λ_i+γ)² + σ²).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.optimize import brentq

from keyhole._array import block_size, blocks
from keyhole._checks import check_count, check_finite, check_float_array, check_number
from keyhole.heads import GaussianHeads
from keyhole.targets.polynomial import Polynomial
from keyhole.theory.problem import EigenProblem, problems

RESOLVED, TOLERATED = 0.01, 0.1
"""Eigenvalues below RESOLVED · γ are lumped together, which moved predictions by 0.1 % where we looked. Where
the finest spectrum ends before, TOLERATED · γ is accepted (2 %); beyond that we refuse."""


def learning_curve(
    target: Polynomial,
    n_samples: Any,
    n_keys: int,
    ridge: float | int,
    noise: float | int = 0.0,
    n_heads: float | int = math.inf,
    model: str = "attention",
    law: GaussianHeads | None = None,
) -> Float[np.ndarray, "*shape"]:
    """Predicted test error E (f̂ − f*)² + σ² of ridge regression under the sphere law, before any training.

    Parameters
    ----------
    target : Polynomial
        The target f*.
    n_samples : int or array
        Training samples n.
    n_keys : int
        Keys per set, N.
    ridge : float
        λ, so that the penalty is α = nλ; 0 means interpolation.
    noise : float
        Variance σ² of the noise in the labels. It is part of the test error too.
    n_heads : int or math.inf
        M. Attention heads have k = M (d+1) scalar features; the MLP is given as many hidden units.
    model : "attention" or "mlp"
    law : GaussianHeads, optional
        The law of the heads, zero mean by default; a mean is a number c, or c·I with any corner on the constant
        coordinate, and d ≥ 2.

    Returns
    -------
    array like ``n_samples``

    Notes
    -----
    The theory is asymptotic in the number of eigenfunctions and treats eigenfunctions as if they were
    Gaussian; k = M (d+1) is what experiments support (a head gives d+1 correlated features). Eigenvalues
    that the sample cannot resolve enter by their sum. Cost: a root per
    entry of ``n_samples``, and the spectrum once: 0.3 s at most at d = 512, N = 4096.

    Examples
    --------
    >>> from keyhole.targets import Correlation
    >>> target = Correlation(q=1, dim=8)
    >>> learning_curve(target, [100, 1000, 10_000], n_keys=8, ridge=1e-4).round(6)
    array([0.002104, 0.001137, 0.000935])
    >>> learning_curve(target, [100, 1000, 10_000], n_keys=8, ridge=1e-4, law=GaussianHeads(mean=1.0)).round(6)
    array([0.001757, 0.000746, 0.000591])
    >>> learning_curve(Correlation(q=1, dim=512), 10**9, n_keys=4096, ridge=0.0) < 3e-11
    np.True_
    """
    samples = check_samples(n_samples)
    ridge = check_number(ridge, "ridge", minimum=0.0)
    noise = check_number(noise, "noise", minimum=0.0)
    features = feature_count(n_heads, target.dim)
    solver = Learner(target, n_keys, model, features, law)
    errors = [solver.error(n, ridge, noise) for n in samples.ravel()]
    return np.array(errors).reshape(samples.shape)


def learning_surface(
    target: Polynomial,
    n_samples: Sequence[int],
    n_heads: Sequence[float | int],
    n_keys: int,
    ridge: float | int,
    noise: float | int = 0.0,
    model: str = "attention",
    law: GaussianHeads | None = None,
) -> Float[np.ndarray, "n m"]:
    """Predicted test error over samples and heads: row i has n = n_samples[i], column j M = n_heads[j].

    Parameters and meaning are those of :func:`learning_curve`.

    Examples
    --------
    >>> import math
    >>> from keyhole.targets import TokenPower
    >>> target = TokenPower(p=2, dim=8)
    >>> learning_surface(target, [100, 1000], [10, 100, math.inf], n_keys=8, ridge=1e-4).round(6)
    array([[0.003788, 0.002062, 0.001898],
           [0.002075, 0.000565, 0.000348]])
    """
    columns = [learning_curve(target, n_samples, n_keys, ridge, noise, m, model, law) for m in n_heads]
    return np.stack(columns, axis=1)


@dataclass(frozen=True, eq=False)
class BestRidge:
    """The ridge that makes the predicted test error smallest, and that error.

    Attributes
    ----------
    n_samples, ridge, error : arrays of one shape
    """

    n_samples: Float[np.ndarray, "*shape"]
    ridge: Float[np.ndarray, "*shape"]
    error: Float[np.ndarray, "*shape"]


def best_ridge_curve(
    target: Polynomial,
    n_samples: Any,
    n_keys: int,
    noise: float | int = 0.0,
    n_heads: float | int = math.inf,
    model: str = "attention",
    law: GaussianHeads | None = None,
) -> BestRidge:
    """Predicted test error with the ridge chosen best for every number of samples.

    Parameters and meaning are those of :func:`learning_curve`.

    Examples
    --------
    >>> from keyhole.targets import TokenPower
    >>> best = best_ridge_curve(TokenPower(p=2, dim=8), [100, 1000], n_keys=8, noise=0.01)
    >>> best.error.round(5), bool(best.ridge[0] > best.ridge[1] > 0)
    (array([0.01304, 0.01128]), True)
    """
    samples = check_samples(n_samples)
    noise = check_number(noise, "noise", minimum=0.0)
    solver = Learner(target, n_keys, model, feature_count(n_heads, target.dim), law)
    found = [solver.best(n, noise) for n in samples.ravel()]
    ridge, error = (np.array(column).reshape(samples.shape) for column in zip(*found, strict=True))
    return BestRidge(samples, ridge, error)


@dataclass(frozen=True, eq=False)
class BestBias:
    """Which multiple of the identity serves a target best, and from where on it is a handicap.

    Attributes
    ----------
    n_samples, mean, error, unbiased, handicap : arrays of one shape
        ``mean`` is the best c, ``error`` its predicted test error, ``unbiased`` that of zero-mean heads. Means above
        ``handicap`` do worse than zero-mean heads: NaN where no mean that was tried does, 0 where all do.
    means : array (c,)
        The means tried, 0 first.
    errors : array (…, c)
        Predicted test errors, best ridge, for every number of samples and every mean.
    """

    n_samples: Float[np.ndarray, "*shape"]
    mean: Float[np.ndarray, "*shape"]
    error: Float[np.ndarray, "*shape"]
    unbiased: Float[np.ndarray, "*shape"]
    handicap: Float[np.ndarray, "*shape"]
    means: Float[np.ndarray, " c"]
    errors: Float[np.ndarray, "*shape c"]


def best_bias(
    target: Polynomial,
    n_samples: Any,
    n_keys: int,
    noise: float | int = 0.0,
    n_heads: float | int = math.inf,
    means: Sequence[float] = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0),
) -> BestBias:
    """The mean c of ``GaussianHeads(mean=c)`` with the smallest predicted test error, for every number of samples.

    Parameters
    ----------
    target, n_samples, n_keys, noise, n_heads
        As in :func:`best_ridge_curve`.
    means : sequence of float
        Means c to try beside 0, positive, in rising order. The optimum is flat: halfway between two of the
        default means the error is a few percent off its minimum.

    Notes
    -----
    Cost: blocks of every mean once, a second in all at d ≥ 16 and some ten below.

    Examples
    --------
    >>> from keyhole.targets import Correlation
    >>> best = best_bias(Correlation(q=2, dim=64), [1e4, 1e7], n_keys=16, means=(0.5, 1.0, 2.0))
    >>> best.mean, (best.error / best.unbiased).round(3)
    (array([2., 2.]), array([0.998, 0.034]))
    """
    samples = check_samples(n_samples)
    tried = np.array([0.0, *means], dtype=np.float64)
    if len(tried) < 2 or not np.all(np.diff(tried) > 0):
        raise ValueError(f"`means` must be positive and in rising order, at least one of them: got {tuple(means)}.")
    curves = [
        best_ridge_curve(target, samples, n_keys, noise, n_heads, law=GaussianHeads(mean=float(c))).error for c in tried
    ]
    errors = np.stack(curves, axis=-1)
    best = errors.argmin(axis=-1)
    handicap = [_crossing(tried, row) for row in errors.reshape(-1, len(tried))]
    return BestBias(
        samples, tried[best], errors.min(axis=-1), errors[..., 0], np.reshape(handicap, samples.shape), tried, errors
    )


def _crossing(means: Float[np.ndarray, " c"], errors: Float[np.ndarray, " c"]) -> float:
    """The mean beyond which errors stay above the first one, between two means by their logarithms; NaN if none."""
    excess = np.log(np.maximum(errors, 1e-300) / max(errors[0], 1e-300))
    not_worse = int(np.flatnonzero(excess <= 0.0)[-1])
    if not_worse == len(means) - 1:
        return math.nan
    low, high = excess[not_worse], excess[not_worse + 1]
    return float(means[not_worse] + (means[not_worse + 1] - means[not_worse]) * (-low / (high - low)))


def curve_from_spectrum(
    eigenvalues: Any,
    multiplicities: Any,
    powers: Any,
    n_samples: Any,
    ridge: float | int,
    noise: float | int = 0.0,
    n_features: float | int = math.inf,
    remainder: float | int = 0.0,
) -> Float[np.ndarray, "*shape"]:
    """Predicted test error for any spectrum: the formula of this module on plain arrays.

    Parameters
    ----------
    eigenvalues, multiplicities, powers : array (levels,)
        ``powers`` is the target's power summed over the eigenfunctions of a level.
    n_samples : int or array
    ridge, noise : float
        λ and σ².
    n_features : int or math.inf
        Scalar random features k.
    remainder : float
        Sum of eigenvalues too small to list.

    Returns
    -------
    array like ``n_samples``

    Examples
    --------
    >>> import numpy as np
    >>> one = np.ones(1)
    >>> curve_from_spectrum(one, 50 * one, one, [100], ridge=0.0, noise=1.0)    # least squares: n/(n−p) σ²
    array([2.])
    """
    problem = _checked_problem(eigenvalues, multiplicities, powers, remainder)
    samples = check_samples(n_samples)
    ridge = check_number(ridge, "ridge", minimum=0.0)
    noise = check_number(noise, "noise", minimum=0.0)
    features = check_features(n_features, "n_features")
    errors = []
    for n in samples.ravel():
        gamma = implicit_ridge(problem, n, features, ridge)
        errors.append(predicted_error(problem, n, features, gamma, noise))
    return np.array(errors).reshape(samples.shape)


def implicit_ridge(problem: EigenProblem, n: float, k: float, ridge: float) -> float:
    """The root γ of γ (1 − z/k)(1 − z/n) = λ with z(γ) < min(n, k); for λ = 0, where z = min(n, k)."""
    fewest, trace = min(n, k), problem.trace
    if trace == 0.0:
        return ridge
    floor = _saturation(problem, fewest)
    if ridge == 0.0:
        return floor

    def excess(log_gamma: float) -> float:
        gamma = math.exp(log_gamma)
        z, _ = problem.freedom(gamma)
        return math.log(max((1 - z / k) * (1 - z / n), 1e-300)) + log_gamma - math.log(ridge)

    # above, z ≤ min(n, k)/2, so that the product is at least a quarter
    top = max(2 * trace / fewest, 4 * ridge)
    low, high = math.log(max(floor, min(ridge, 1e-300))), math.log(top) + 1e-9
    if excess(low) >= 0.0:
        return math.exp(low)
    return math.exp(float(brentq(excess, low, high, xtol=1e-14, rtol=8.9e-16, maxiter=500)))


def _saturation(problem: EigenProblem, fewest: float) -> float:
    """The γ at which z(γ) = min(n, k); 0 where the kernel has no more eigenfunctions than that."""
    if problem.remainder == 0.0 and problem.freedom(0.0)[0] <= fewest:
        return 0.0

    def excess(log_gamma: float) -> float:
        return problem.freedom(math.exp(log_gamma))[0] / fewest - 1

    high = math.log(problem.trace / fewest) + 1e-9
    low = high - 1.0
    while excess(low) < 0:
        low -= 2 * (high - low)
        if low < -700:  # only rounding keeps z from n: the spectrum is used up
            return 0.0
    return math.exp(float(brentq(excess, low, high, xtol=1e-14, rtol=8.9e-16, maxiter=500)))


def predicted_error(problem: EigenProblem, n: float, k: float, gamma: float, noise: float) -> float:
    """Test error at implicit ridge γ; infinite where an error meets the interpolation peak n = k = q."""
    if gamma > 0.0:
        return float(predicted_errors(problem, n, k, np.array([gamma]), noise)[0])
    z, q = problem.freedom(0.0)
    bias = float(problem.powers[problem.eigenvalues == 0].sum())
    return float(_assembled(n, k, np.array([[z], [q], [bias], [0.0]]), noise)[0])


def predicted_errors(
    problem: EigenProblem, n: float, k: float, gammas: Float[np.ndarray, " g"], noise: float
) -> Float[np.ndarray, " g"]:
    """Test errors at positive implicit ridges; temporaries are (levels,) times a block of them."""
    sums = np.empty((4, len(gammas)))
    for block in blocks(len(gammas), block_size(8 * len(problem.eigenvalues), _BLOCK)):
        gamma = gammas[block, None]
        share = gamma / (problem.eigenvalues + gamma)
        learned = problem.eigenvalues / (problem.eigenvalues + gamma)
        sums[0, block] = learned @ problem.multiplicities + problem.remainder / gammas[block]
        sums[1, block] = np.square(learned) @ problem.multiplicities
        sums[2, block] = np.square(share) @ problem.powers
        sums[3, block] = (share * learned) @ problem.powers
    return _assembled(n, k, sums, noise)


_BLOCK = 2**25
"""Bytes of one temporary in predicted_errors."""


def _assembled(n: float, k: float, sums: Float[np.ndarray, "4 g"], noise: float) -> Float[np.ndarray, " g"]:
    """The formula of this module from its four sums: z, q, Σ c²(1−L)² and Σ c² L(1−L), L = λ/(λ+γ)."""
    z, q, bias, spread = sums
    excess = np.zeros_like(z)
    if not math.isinf(k):
        # finitely many features add to the bias, and take from the samples
        excess = np.divide(z - q, k - q, out=np.full_like(z, math.inf), where=k > q)
    signal = bias + noise + np.multiply(excess, spread, out=np.zeros_like(z), where=spread > 0)
    remaining = (n - q) - np.multiply(z - q, excess, out=np.zeros_like(z), where=z > q)
    error = np.divide(n * signal, remaining, out=np.full_like(z, math.inf), where=remaining > 1e-12 * n)
    return np.where(signal == 0.0, 0.0, error)


class Learner:
    """Learning curves of one target: finds a spectrum fine enough for each question."""

    def __init__(
        self, target: Polynomial, n_keys: int, model: str, features: float, law: GaussianHeads | None = None
    ) -> None:
        self.what = f"{target!r} with {n_keys} keys ({model if law is None else law})"
        self.features = features
        self._finer: Iterator[EigenProblem] = problems(target, n_keys, model, law)
        self.problem = next(self._finer)

    def error(self, n: float, ridge: float, noise: float) -> float:
        """Test error at a given ridge."""
        gamma = implicit_ridge(self.problem, n, self.features, ridge)
        while self._refined(n, gamma):
            gamma = implicit_ridge(self.problem, n, self.features, ridge)
        return predicted_error(self.problem, n, self.features, gamma, noise)

    def best(self, n: float, noise: float) -> tuple[float, float]:
        """(ridge, test error) at the best ridge."""
        floor = implicit_ridge(self.problem, n, self.features, 0.0)
        gamma = self._best_gamma(n, floor, noise)
        while self._refined(n, gamma):
            floor = implicit_ridge(self.problem, n, self.features, 0.0)
            gamma = self._best_gamma(n, floor, noise)
        z, _ = self.problem.freedom(gamma)
        ridge = 0.0 if gamma == floor else gamma * max(1 - z / self.features, 0.0) * max(1 - z / n, 0.0)
        return ridge, predicted_error(self.problem, n, self.features, gamma, noise)

    def _best_gamma(self, n: float, floor: float, noise: float) -> float:
        """Search γ = floor · e^x over a grid of x, then three times over a finer grid around the best."""
        base = max(floor, 1e-18 * self.problem.trace)
        span = math.log(10 * max(self.problem.trace / base, 1.0)) + 1.0
        lifts = np.concatenate([[0.0], np.geomspace(1e-6, span, 64)])
        for _ in range(4):
            gammas = base * np.exp(lifts)
            errors = predicted_errors(self.problem, n, self.features, gammas, noise)
            best = int(errors.argmin())
            lifts = np.linspace(lifts[max(best - 1, 0)], lifts[min(best + 1, len(lifts) - 1)], 17)
        if predicted_error(self.problem, n, self.features, floor, noise) <= errors[best]:
            return floor
        return float(gammas[best])

    def _refined(self, n: float, gamma: float) -> bool:
        """Take the next finer spectrum if γ asks for it; False where the one at hand will do."""
        beyond = self.problem.next_eigenvalue
        if beyond <= RESOLVED * gamma:
            return False
        finer = next(self._finer, None)
        if finer is not None:
            self.problem = finer
            return True
        if beyond <= TOLERATED * gamma:
            return False
        raise ValueError(
            f"{n:.3g} samples of {self.what} resolve eigenvalues down to about {TOLERATED * gamma:.1e}, and "
            f"the finest spectrum we keep stops at {beyond:.1e}. Ask for fewer samples or a larger ridge, or "
            "pass a longer spectrum to curve_from_spectrum."
        )


def feature_count(n_heads: float | int, dim: int) -> float:
    """Return k = M (d+1), the scalar features of M heads."""
    return check_features(n_heads, "n_heads") * (dim + 1)


def check_features(value: float | int, name: str) -> float:
    """Return a number of features or heads, math.inf included, as a float."""
    if isinstance(value, float) and math.isinf(value) and value > 0:
        return math.inf
    return float(check_count(value, name))


def check_samples(n_samples: Any) -> Float[np.ndarray, "*shape"]:
    """Return numbers of samples, at least one each, as a float array."""
    samples = check_float_array(n_samples, "n_samples").astype(np.float64)
    check_finite(samples, "n_samples")
    if samples.size == 0 or samples.min() < 1:
        raise ValueError(
            f"`n_samples` must hold numbers of at least 1: got {samples.min() if samples.size else 'none'}."
        )
    return samples


def _checked_problem(eigenvalues: Any, multiplicities: Any, powers: Any, remainder: float | int) -> EigenProblem:
    arrays = []
    for name, value in (("eigenvalues", eigenvalues), ("multiplicities", multiplicities), ("powers", powers)):
        array = np.atleast_1d(check_float_array(value, name).astype(np.float64))
        check_finite(array, name)
        if array.ndim != 1 or array.shape != np.shape(np.atleast_1d(eigenvalues)):
            raise ValueError(
                f"`eigenvalues`, `multiplicities` and `powers` must be vectors of one length: `{name}` has "
                f"shape {array.shape} and `eigenvalues` {np.shape(eigenvalues)}."
            )
        if array.min(initial=0.0) < 0:
            raise ValueError(f"`{name}` must not be negative: got {array.min():g} at level {array.argmin()}.")
        arrays.append(array)
    first, second, third = arrays
    return EigenProblem(first, second, third, check_number(remainder, "remainder", minimum=0.0))
