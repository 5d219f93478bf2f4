"""Risk bounds with their terms apart and their constants printed, and their inverses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from scipy.special import ndtr

from keyhole._checks import check_count, check_number
from keyhole.targets.families import Correlation, QueryPower, TokenPower
from keyhole.targets.polynomial import Polynomial
from keyhole.theory.biased import biased_norm_bound
from keyhole.theory.complexity import mlp_norm, paper_complexity, rkhs_norm
from keyhole.theory.curves import Learner, feature_count
from keyhole.theory.harmonics import pair_powers
from keyhole.theory.problem import problem_trace

MOST_SAMPLES = 1e18
"""Where the search for a number of samples or heads gives up."""


@dataclass(frozen=True)
class RiskBound:
    """An upper bound on the excess risk, term by term.

    Attributes
    ----------
    approximation : float
        What finitely many heads cost.
    estimation : float
        What finitely many samples cost.
    constant : float
        The universal constant both were multiplied with.
    statement : str
        What is bounded, under which conditions.
    """

    approximation: float
    estimation: float
    constant: float
    statement: str

    @property
    def total(self) -> float:
        """The sum of the two terms."""
        return self.approximation + self.estimation

    def __str__(self) -> str:
        return (
            f"excess risk ≤ {self.total:.4g} = approximation {self.approximation:.4g} + estimation "
            f"{self.estimation:.4g}, with constant {self.constant:g} ({self.statement})"
        )


def risk_bound(
    target: Polynomial,
    n_samples: float | int,
    n_heads: float | int,
    delta: float | int = 0.05,
    constant: float | int = 1.0,
) -> RiskBound:
    """The paper's excess risk of its learner: √B [√(log(dM)/n) + √((d² + log M)/(δM))].

    It holds with probability 1 − δ for the empirical risk minimiser of a 1-Lipschitz convex loss over the
    paper's ball with K_1 ≍ √B, K_2 ≍ B/δ, up to a universal constant that the paper leaves unnamed;
    ``constant`` stands for it, and every printed bound shows it.

    Parameters
    ----------
    target : Polynomial
    n_samples, n_heads : int
        n and M; math.inf makes the term it belongs to vanish.
    delta : float
        Probability of failure, in (0, 1).
    constant : float
        The universal constant.

    Examples
    --------
    >>> from keyhole.targets import TokenPower
    >>> bound = risk_bound(TokenPower(p=1, dim=8), n_samples=10_000, n_heads=1000)
    >>> print(bound)
    excess risk ≤ 2.442 = approximation 2.382 + estimation 0.05996, with constant 1 (probability 0.95,
    constrained learner of Fu et al., B = 4)
    """
    n = _check_size(n_samples, "n_samples")
    heads = _check_size(n_heads, "n_heads")
    delta, constant = _check_delta(delta), check_number(constant, "constant", minimum=0.0, exclusive=True)
    complexity = paper_complexity(target)
    approximation = math.sqrt(_head_error(complexity, target.dim, heads, delta))
    estimation = 0.0 if math.isinf(n) else math.sqrt(complexity * max(math.log(target.dim * heads), 0.0) / n)
    statement = f"probability {1 - delta:g}, constrained learner of Fu et al., B = {complexity:.4g}"
    return RiskBound(constant * approximation, constant * estimation, constant, statement)


def approximation_bound(
    target: Polynomial, n_heads: float | int, delta: float | int = 0.05, constant: float | int = 1.0
) -> float:
    """The paper's squared approximation error of M heads: (d² + log M) B / (δM), times its constant.

    Examples
    --------
    >>> from keyhole.targets import TokenPower
    >>> round(approximation_bound(TokenPower(p=1, dim=8), n_heads=10_000), 4)
    0.5857
    """
    heads, delta = _check_size(n_heads, "n_heads"), _check_delta(delta)
    constant = check_number(constant, "constant", minimum=0.0, exclusive=True)
    return constant * _head_error(paper_complexity(target), target.dim, heads, delta)


def _head_error(complexity: float, dim: int, heads: float, delta: float) -> float:
    return 0.0 if math.isinf(heads) else (dim**2 + math.log(heads)) * complexity / (delta * heads)


def kernel_risk_bound(target: Polynomial, n_samples: float | int, n_keys: int, delta: float | int = 0.05) -> RiskBound:
    """An excess-risk bound without hidden constants, in the limit of many heads.

    Let ℓ(·, y) be 1-Lipschitz and let f̂ minimise the mean loss over n i.i.d. samples of the sphere law
    (labels of any law) within the ball |f|_H ≤ R, R² = :func:`rkhs_norm` of f*. Then with probability at
    least 1 − δ

        E ℓ(f̂) − E ℓ(f*) ≤ R (2 √(E K(x,x)) + √(8 log(1/δ))) / √n.

    Symmetrisation and Talagrand's contraction bound the mean of the supremum by twice the Rademacher
    average of the ball, R √(E K(x,x)/n); McDiarmid's inequality adds the rest, since K(x,x) ≤ 1 keeps |f −
    f*| ≤ 2R.

    Examples
    --------
    >>> from keyhole.targets import TokenPower
    >>> print(kernel_risk_bound(TokenPower(p=1, dim=8), n_samples=10_000, n_keys=8))
    excess risk ≤ 0.1123 = approximation 0 + estimation 0.1123, with constant 1 (probability 0.95, 1-Lipschitz
    loss, ball of squared RKHS norm 3.3, no hidden constant)
    """
    n, delta = _check_size(n_samples, "n_samples"), _check_delta(delta)
    norm = rkhs_norm(target)
    factor = rademacher_factor(problem_trace(target.dim, n_keys, "attention"), 1.0, delta)
    statement = f"probability {1 - delta:g}, 1-Lipschitz loss, ball of squared RKHS norm {norm:.4g}, no hidden constant"
    return RiskBound(0.0, math.sqrt(norm / n) * factor, 1.0, statement)


def rademacher_factor(mean_diagonal: float, largest_diagonal: float, delta: float) -> float:
    """2 √(E K(x,x)) + √(8 sup K(x,x) log(1/δ)): the excess risk of a ball of norm R is R/√n times this."""
    return 2 * math.sqrt(mean_diagonal) + math.sqrt(8 * largest_diagonal * math.log(1 / delta))


def samples_needed(
    target: Polynomial,
    n_keys: int,
    error: float | int,
    model: str = "attention",
    noise: float | int = 0.0,
    n_heads: float | int = math.inf,
) -> int:
    """The number of samples at which the predicted excess test error E (f̂ − f*)² falls to ``error``.

    The prediction is that of :func:`best_ridge_curve`, less the noise floor.

    Parameters
    ----------
    target : Polynomial
    n_keys : int
        N.
    error : float
        Squared error wanted, noise floor not counted.
    model : "attention" or "mlp"
    noise : float
        Variance of the noise in the labels.
    n_heads : int or math.inf
        M; the MLP gets M (d+1) hidden units.

    Examples
    --------
    >>> from keyhole.targets import TokenPower
    >>> target = TokenPower(p=2, dim=8)
    >>> [samples_needed(target, n_keys=8, error=1e-4, model=model) for model in ("attention", "mlp")]
    [430, 5322]
    """
    error = check_number(error, "error", minimum=0.0, exclusive=True)
    noise = check_number(noise, "noise", minimum=0.0)
    learner = Learner(target, n_keys, model, feature_count(n_heads, target.dim))

    def enough(n: float) -> bool:
        return learner.best(n, noise)[1] - noise <= error

    return _smallest(enough, f"samples for an error of {error:g} with {n_heads:g} heads")


def heads_needed(target: Polynomial, error: float | int, delta: float | int = 0.05, constant: float | int = 1.0) -> int:
    """The number of heads M at which the paper's squared approximation error falls to ``error``.

    It inverts :func:`approximation_bound`, constant and all: safe, and far above what
    :func:`heads_predicted` finds.

    Examples
    --------
    >>> from keyhole.targets import TokenPower
    >>> heads_needed(TokenPower(p=1, dim=8), error=0.1)
    60002
    """
    error = check_number(error, "error", minimum=0.0, exclusive=True)

    def enough(heads: float) -> bool:
        return approximation_bound(target, heads, delta, constant) <= error

    return _smallest(enough, f"heads for an approximation error of {error:g}")


def heads_predicted(target: Polynomial, n_keys: int, error: float | int, n_samples: float | int = MOST_SAMPLES) -> int:
    """The number of heads at which the predicted error, best ridge and no noise, falls to ``error``.

    With the default number of samples this is the approximation error of M random heads under the sphere law:
    a prediction of :func:`learning_curve`, not a bound.

    Examples
    --------
    >>> from keyhole.targets import TokenPower
    >>> heads_predicted(TokenPower(p=1, dim=8), n_keys=8, error=1e-4)
    58
    """
    error = check_number(error, "error", minimum=0.0, exclusive=True)
    n = _check_size(n_samples, "n_samples")

    def enough(heads: float) -> bool:
        learner = Learner(target, n_keys, "attention", heads * (target.dim + 1))
        return learner.best(n, 0.0)[1] <= error

    return _smallest(enough, f"heads for an error of {error:g} from {n:.3g} samples")


def _smallest(enough: Callable[[float], bool], what: str) -> int:
    """The smallest whole number that is enough, for a condition that stays true once it is."""
    high = 1
    while not enough(float(high)):
        high *= 2
        if high > MOST_SAMPLES:
            raise ValueError(
                f"there is no number of {what} up to {MOST_SAMPLES:.0e}: the error levels off above it. "
                "Allow a larger error, or more heads."
            )
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(float(middle)) else (middle, high)
    return high


@dataclass(frozen=True)
class SampleComplexity:
    """One row of :func:`sample_complexity_table`.

    Attributes
    ----------
    target : Polynomial
    n_keys : int
    attention, mlp : float
        Samples at which the predicted test error is the given share of Var f*; NaN beyond 10^18.
    attention_norm, biased_norm, mlp_norm : float
        Squared RKHS norms: exact for the first and the last, for biased heads the bound at that error.
    attention_bound, biased_bound, mlp_bound : float
        Samples at which the explicit bound of a ball of that norm falls to the same share (root of it,
        since the loss is Lipschitz): R²/error · factor².
    """

    target: Polynomial
    n_keys: int
    attention: float
    mlp: float
    attention_norm: float
    biased_norm: float
    mlp_norm: float
    attention_bound: float
    biased_bound: float
    mlp_bound: float


BIASED_LARGEST = 2 * (2 * float(ndtr(1.0)) + math.exp(-0.5) / math.sqrt(2 * math.pi))
"""sup K(x,x) for heads of mean W_0 and unit tokens: 2 E[ReLU(1+z)²] = 2 (2Φ(1) + φ(1))."""


def sample_complexity_table(
    dims: Iterable[int] = (8, 64, 512),
    n_keys: Iterable[int] = (8, 64),
    powers: Iterable[int] = (1, 2, 3),
    share: float | int = 0.1,
    delta: float | int = 0.05,
) -> list[SampleComplexity]:
    """Samples that attention, biased attention and the MLP need, over families, dimensions, keys and powers.

    Parameters
    ----------
    dims, n_keys, powers : iterables of int
        d, N, and the p of ``QueryPower`` and ``TokenPower``, the q of ``Correlation``.
    share : float
        The error asked for, as a share of the variance of f*(x).
    delta : float
        Probability of failure of the bounds.

    Examples
    --------
    >>> row = sample_complexity_table(dims=[16], n_keys=[16], powers=[2])[-1]
    >>> row.target
    Correlation(q=2, dim=16)
    >>> row.attention < row.mlp, row.biased_norm < row.attention_norm < row.mlp_norm
    (True, True)
    """
    share, delta = check_number(share, "share", minimum=0.0, exclusive=True), _check_delta(delta)
    keys = [check_count(n, "n_keys") for n in n_keys]
    rows: list[SampleComplexity] = []
    for dim in dims:
        for power in powers:
            for target in (QueryPower(power, dim), TokenPower(power, dim), Correlation(power, dim)):
                rows.extend(_table_row(target, n, share, delta) for n in keys)
    return rows


def _table_row(target: Polynomial, n_keys: int, share: float, delta: float) -> SampleComplexity:
    powers = pair_powers(target)
    power = float(powers[1:, 0].sum() + powers[:, 1:].sum() / n_keys)
    if power <= 1e-12 * powers.sum():
        raise ValueError(
            f"{target!r} is constant under the sphere law, so it has no variance to reach a share of. "
            "Leave out dimension one with even powers, and power zero."
        )
    norms = rkhs_norm(target), biased_norm_bound(target, share * power).norm, mlp_norm(target, n_keys)
    # the mean diagonal of the biased kernel is at most E 2 ReLU(μ+z)² = 1 + 1/d
    diagonals = (
        (problem_trace(target.dim, n_keys, "attention"), 1.0),
        (1 + 1 / target.dim, BIASED_LARGEST),
        (0.5, 0.5),
    )
    of_attention, of_biased, of_mlp = (
        norm / (share * power) * rademacher_factor(*diagonal, delta) ** 2
        for norm, diagonal in zip(norms, diagonals, strict=True)
    )
    attention, mlp = (_predicted(target, n_keys, share * power, model) for model in ("attention", "mlp"))
    return SampleComplexity(target, n_keys, attention, mlp, *norms, of_attention, of_biased, of_mlp)


def _predicted(target: Polynomial, n_keys: int, error: float, model: str) -> float:
    try:
        return float(samples_needed(target, n_keys, error, model))
    except ValueError:
        return math.nan


def _check_size(value: float | int, name: str) -> float:
    if isinstance(value, float) and math.isinf(value) and value > 0:
        return math.inf
    return check_number(value, name, minimum=1.0)


def _check_delta(delta: float | int) -> float:
    delta = check_number(delta, "delta", minimum=0.0, exclusive=True)
    if delta >= 1:
        raise ValueError(f"`delta` is a probability of failure and must be below 1: got {delta:g}.")
    return delta
