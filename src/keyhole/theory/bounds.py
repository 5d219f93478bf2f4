"""Risk bounds with their terms apart and their constants printed, and their inverses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from keyhole._checks import check_number
from keyhole.attention.heads import GaussianHeads
from keyhole.theory.blocks import bias_of
from keyhole.theory.complexity import paper_complexity, rkhs_norm
from keyhole.theory.curves import Learner, TheoryLayer, check_features
from keyhole.theory.spectrum import attention_trace
from keyhole.theory.targets import Polynomial

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

    It holds with probability 1 − δ for the empirical risk minimiser of a 1-Lipschitz convex loss
    over the paper's ball with K_1 ≍ √B, K_2 ≍ B/δ, up to a universal constant that the paper leaves
    unnamed; ``constant`` stands for it, and every printed bound shows it.

    Parameters
    ----------
    target : Polynomial
    n_samples, n_heads : int
        n and M. With n = math.inf the estimation term vanishes. With M = math.inf the approximation
        term does, but the estimation term grows with log M and is infinite: the paper's bound is
        for finitely many heads, and :func:`kernel_risk_bound` for infinitely many.
    delta : float
        Probability of failure, in (0, 1).
    constant : float
        The universal constant.

    Examples
    --------
    >>> from keyhole.theory.targets import TokenPower
    >>> bound = risk_bound(TokenPower(p=1, dim=8), n_samples=10_000, n_heads=1000)
    >>> print(bound)  # doctest: +ELLIPSIS
    excess risk ≤ 2.442 = approximation 2.382 + estimation 0.05996, with constant 1 (...
    """
    n = _check_size(n_samples, "n_samples")
    head_count = _check_size(n_heads, "n_heads")
    delta = _check_delta(delta)
    constant = check_number(constant, "constant", minimum=0.0, exclusive=True)
    complexity = paper_complexity(target)

    # √(B (d² + log M)/(δM)), and √(B log(dM)/n)
    approximation = math.sqrt(_head_error(complexity, target.dim, head_count, delta))
    if math.isinf(n):
        estimation = 0.0
    else:
        log_size = max(math.log(target.dim * head_count), 0.0)
        estimation = math.sqrt(complexity * log_size / n)
    return RiskBound(
        approximation=constant * approximation,
        estimation=constant * estimation,
        constant=constant,
        statement=(
            f"probability {1 - delta:g}, constrained learner of Fu et al., B = {complexity:.4g}"
        ),
    )


def approximation_bound(
    target: Polynomial, n_heads: float | int, delta: float | int = 0.05, constant: float | int = 1.0
) -> float:
    """The paper's squared approximation error of M heads: (d² + log M) B / (δM) times its constant.

    Examples
    --------
    >>> from keyhole.theory.targets import TokenPower
    >>> round(approximation_bound(TokenPower(p=1, dim=8), n_heads=10_000), 4)
    0.5857
    """
    head_count = _check_size(n_heads, "n_heads")
    delta = _check_delta(delta)
    constant = check_number(constant, "constant", minimum=0.0, exclusive=True)
    return constant * _head_error(paper_complexity(target), target.dim, head_count, delta)


def _head_error(complexity: float, dim: int, head_count: float, delta: float) -> float:
    """(d² + log M) B / (δM), which is 0 for infinitely many heads."""
    if math.isinf(head_count):
        return 0.0
    return (dim**2 + math.log(head_count)) * complexity / (delta * head_count)


def kernel_risk_bound(
    target: Polynomial,
    n_samples: float | int,
    n_keys: int,
    delta: float | int = 0.05,
    heads: GaussianHeads | None = None,
) -> RiskBound:
    """An excess-risk bound without hidden constants, in the limit of many heads.

    Let ℓ(·, y) be 1-Lipschitz and let f̂ minimise the mean loss over n i.i.d. samples of the sphere
    distribution (labels of any distribution) within the ball |f|_H ≤ R, R² = :func:`rkhs_norm`
    of f*. Then with probability at least 1 − δ

        E ℓ(f̂) − E ℓ(f*) ≤ R (2 √(E K(x,x)) + √(8 S log(1/δ))) / √n,    S = sup K(x,x).

    Symmetrisation and Talagrand's contraction bound the mean of the supremum by twice the
    Rademacher average of the ball, R √(E K(x,x)/n); McDiarmid's inequality adds the rest, since
    |f − f*| ≤ 2R√S. S is 1 for zero-mean heads, and 2 E[σ(m+z)²] at the largest mean score m for
    others.

    Examples
    --------
    >>> from keyhole.theory.targets import TokenPower
    >>> bound = kernel_risk_bound(TokenPower(p=1, dim=8), n_samples=10_000, n_keys=8)
    >>> print(bound)  # doctest: +ELLIPSIS
    excess risk ≤ 0.1123 = approximation 0 + estimation 0.1123, with constant 1 (...
    """
    n = _check_size(n_samples, "n_samples")
    delta = _check_delta(delta)
    squared_norm = rkhs_norm(target, heads)

    # the Rademacher average of the ball, and the deviation from the mean by McDiarmid's inequality
    rademacher = 2 * math.sqrt(attention_trace(target.dim, n_keys, heads))
    largest_diagonal = bias_of(heads, target.dim).largest_diagonal
    deviation = math.sqrt(8 * largest_diagonal * math.log(1 / delta))
    return RiskBound(
        approximation=0.0,
        estimation=math.sqrt(squared_norm / n) * (rademacher + deviation),
        constant=1.0,
        statement=(
            f"probability {1 - delta:g}, 1-Lipschitz loss, ball of squared RKHS norm "
            f"{squared_norm:.4g}, no hidden constant"
        ),
    )


def samples_needed(
    target: Polynomial,
    n_keys: int,
    error: float | int,
    model: str = "attention",
    noise: float | int = 0.0,
    n_heads: float | int = math.inf,
    heads: GaussianHeads | None = None,
    activation: str = "relu",
    query: bool = True,
    fit_intercept: bool = False,
) -> int:
    """The number of samples at which the predicted excess error E (f̂ − f*)² falls to ``error``.

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
    heads, activation, query, fit_intercept
        As in :func:`learning_curve`.

    Examples
    --------
    >>> from keyhole.theory.targets import TokenPower
    >>> target = TokenPower(p=2, dim=8)
    >>> [
    ...     samples_needed(target, n_keys=8, error=1e-4, model=model)
    ...     for model in ("attention", "mlp")
    ... ]
    [430, 5322]
    """
    error = check_number(error, "error", minimum=0.0, exclusive=True)
    noise = check_number(noise, "noise", minimum=0.0)
    layer = TheoryLayer(n_keys, model, heads, activation, query, fit_intercept)
    learner = Learner(target, layer, check_features(n_heads, "n_heads"))

    def is_enough(n: float) -> bool:
        # an intercept takes one sample
        if fit_intercept and n < 2:
            return False
        _, test_error = learner.best(n, noise)
        return test_error - noise <= error

    return _smallest(is_enough, f"samples for an error of {error:g} with {n_heads:g} heads")


def heads_needed(
    target: Polynomial, error: float | int, delta: float | int = 0.05, constant: float | int = 1.0
) -> int:
    """The number of heads M at which the paper's squared approximation error falls to ``error``.

    It inverts :func:`approximation_bound`, constant and all. The paper leaves its constant unnamed,
    so that with ``constant=1`` this is an order of magnitude and no guarantee. It is far above what
    :func:`heads_predicted` finds.

    Examples
    --------
    >>> from keyhole.theory.targets import TokenPower
    >>> heads_needed(TokenPower(p=1, dim=8), error=0.1)
    60002
    """
    error = check_number(error, "error", minimum=0.0, exclusive=True)

    def is_enough(head_count: float) -> bool:
        return approximation_bound(target, head_count, delta, constant) <= error

    return _smallest(is_enough, f"heads for an approximation error of {error:g}")


def heads_predicted(
    target: Polynomial,
    n_keys: int,
    error: float | int,
    n_samples: float | int = MOST_SAMPLES,
    heads: GaussianHeads | None = None,
    activation: str = "relu",
) -> int:
    """The number of heads at which the predicted error, best ridge and no noise, is ``error``.

    With the default number of samples this is the approximation error of M random heads under the
    sphere distribution: a prediction of :func:`learning_curve`, not a bound.

    Examples
    --------
    >>> from keyhole.theory.targets import TokenPower
    >>> heads_predicted(TokenPower(p=1, dim=8), n_keys=8, error=1e-4)
    58
    """
    error = check_number(error, "error", minimum=0.0, exclusive=True)
    n = _check_size(n_samples, "n_samples")

    def is_enough(head_count: float) -> bool:
        learner = Learner(
            target, TheoryLayer(n_keys, heads=heads, activation=activation), head_count
        )
        _, test_error = learner.best(n, noise=0.0)
        return test_error <= error

    return _smallest(is_enough, f"heads for an error of {error:g} from {n:.3g} samples")


def _smallest(is_enough: Callable[[float], bool], what: str) -> int:
    """The smallest whole number that is enough, for a condition that stays true once it is."""
    # double until it is enough
    high = 1
    while not is_enough(float(high)):
        high *= 2
        if high > MOST_SAMPLES:
            raise ValueError(
                f"there is no number of {what} up to {MOST_SAMPLES:.0e}: the error levels off "
                "above it. Allow a larger error, or more heads."
            )

    # halve the interval: ``low`` is not enough, ``high`` is
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(float(middle)):
            high = middle
        else:
            low = middle
    return high


def _check_size(value: float | int, name: str) -> float:
    """A number of samples or heads, at least 1, math.inf included."""
    if isinstance(value, float) and math.isinf(value) and value > 0:
        return math.inf
    return check_number(value, name, minimum=1.0)


def _check_delta(delta: float | int) -> float:
    """A probability strictly between 0 and 1."""
    delta = check_number(delta, "delta", minimum=0.0, exclusive=True)
    if delta >= 1:
        raise ValueError(f"`delta` is a probability of failure and must be below 1: got {delta:g}.")
    return delta
