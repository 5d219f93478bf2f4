"""What a fit costs, predicted from sizes alone, and what follows: how many heads, how long.

Predictions decide, and never a clock, so that the same data and seed give the same model on every
machine.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int

from keyhole._array import thread_count
from keyhole.attention.activations import SOFTMAX
from keyhole.attention.learned import LearnedHeads
from keyhole.spec import AUTO, LayerSpec
from keyhole.training import TrainingSet

AUTO_HEADS = 512
"""Heads of ``n_heads="auto"`` where the exact kernel is not cheaper, and a fit takes at most
`AUTO_SECONDS`.
"""

AUTO_SECONDS = 120.0
"""Predicted seconds of one core that a fit with automatic heads may take: else their number is
halved, and again.
"""

MIN_AUTO_HEADS = 32
"""The number of automatic heads is not halved below this."""

DRAFTS_COST = 2.0
"""What the drafts of all candidates with fixed features may cost together, in units of T, the
predicted time of the final fit."""

DRAFTS_SECONDS = 0.3
"""Predicted seconds of one core that these drafts may cost in any case."""

CHOICE_COST = 4.0
"""What choosing may cost in all, expensive candidates apart, in units of T."""

SCREENING_COST = 2.0
"""What it may cost to find out whether an expensive candidate is worth its full fit, in T. With
drafts and the final fit, 3 T together, a default fit then takes less than twice the time."""

SCREENING_SECONDS = 0.2
"""Predicted seconds of one core that it may cost in any case: less than drafts may."""

EXPENSIVE_COST = 10.0
EXPENSIVE_SECONDS = 30.0
"""What the full fits of an expensive candidate may cost: so many T, or so many predicted seconds of
one core."""

LONG_FIT_SECONDS = 60.0
"""Predicted seconds above which a fit says so beforehand."""


def fit_seconds(n: int, n_tokens: int, dim: int, n_heads: float, *, has_query: bool) -> float:
    """Seconds of one core that a fit takes, predicted from sizes alone.

    ``n_heads=math.inf`` stands for the exact kernel.

    Measured at d = 4 … 400 on one core (Zen 4): pairs of keys take 2.2 + 0.075 D ns, entries of W
    that are drawn 30 ns, features 0.1 ns an operation, products of matrices a fifth of that, a path
    of penalties n³/4 ns, and 6 ms all else.
    """
    # all terms are in nanoseconds
    width = dim + 1
    overhead = 6e6
    path = 0.25 * float(n) ** 3

    # the exact kernel: all pairs of keys, of which symmetry spares a half, then n × n matrices
    if math.isinf(n_heads):
        pairs = n_tokens**2 / 2 * (2.2 + 0.075 * width)
        return 1e-9 * (pairs + path + overhead)

    # M heads: without a query only one row of W is ever used, and drawn
    p = n_heads * width
    if has_query:
        entries = width**2
    else:
        entries = width
    features = n_heads * (30 * entries + 0.1 * (2 * n * entries + 4 * n_tokens * width))

    # the smaller of the Gram matrices: ΦΦᵀ, n × n, or ΦᵀΦ, p × p
    if p >= n:
        solve = 0.02 * n**2 * p + path
    else:
        solve = 0.06 * n * p**2 + 0.5 * p**3
    return 1e-9 * (overhead + features + solve)


def newton_seconds(n: int, dim: int, n_heads: float, n_outputs: int) -> float:
    """Seconds of one core that the Newton steps of a logistic last layer take, beside features.

    Measured like `fit_seconds`: a path of some ten penalties takes about thirty steps and as many
    leverages for each output. A step is a Cholesky factorisation of the n × n matrix, and a few
    passes over it; or a sum of n products of p features, and a factorisation of p × p.
    """
    p = n_heads * (dim + 1)
    if p >= n:
        of_output = 0.3 * float(n) ** 3 + 150.0 * float(n) ** 2
    else:
        of_output = 1.0 * n * p**2 + 0.3 * p**3
    return 1e-9 * n_outputs * of_output


def step_seconds(
    n: int, keys_per_set: float, dim: int, query_dim: int, n_heads: int, hops: int
) -> float:
    """Seconds of one core that one step of a descent on a head distribution takes.

    ``n`` samples of one step, ``n_heads`` heads. Measured like `fit_seconds`, on stories of 10 keys
    and 60 coordinates (600 samples and one hop 25 ms, 346 samples and three hops 9 ms).
    """
    # the Gram matrix and its gradient, the inverse and its products, in nanoseconds
    width = dim + 1
    p = n_heads * width
    solve = 0.06 * float(n) ** 3 + 0.04 * float(n) ** 2 * p

    # scores and averages of keys, forwards and backwards; products with matrices D_H × D, which are
    # drawn anew and moved
    query_width = query_dim + (hops - 1) * dim + 1
    features = 0.3 * n * keys_per_set * p + 0.05 * n * p * query_width
    matrices = 20.0 * p * query_width
    return 1e-9 * (1e6 + solve + features + matrices)


@dataclass(frozen=True)
class ChoiceBudget:
    """What choosing may cost, in predicted seconds of one core.

    Attributes
    ----------
    final_fit : float
        T, what the final fit takes with the settings that are tried first.
    """

    final_fit: float

    @property
    def drafts(self) -> float:
        """For the drafts of all candidates with fixed features, judged by leave-one-out."""
        return max(DRAFTS_SECONDS, DRAFTS_COST * self.final_fit)

    @property
    def choosing(self) -> float:
        """For these drafts and all cheap fitted candidates together."""
        return max(DRAFTS_SECONDS, CHOICE_COST * self.final_fit)

    @property
    def screening(self) -> float:
        """For the first look at an expensive candidate."""
        return max(SCREENING_SECONDS, SCREENING_COST * self.final_fit)

    @property
    def expensive(self) -> float:
        """For the full fits of one expensive candidate, where its screening has gained."""
        return max(EXPENSIVE_SECONDS, EXPENSIVE_COST * self.final_fit)


def keys_seen(token_counts: Int[np.ndarray, " n"], query: str) -> int:
    """Keys of all samples together; where every key is a query in turn, of all written-out sets."""
    counts = token_counts.astype(float)
    if query == "each":
        counts = counts**2
    return int(counts.sum())


def choose_n_heads(spec: LayerSpec, samples: Any, rows: Int[np.ndarray, " r"]) -> float:
    """The number of heads: as asked, or infinitely many, or M.

    The exact kernel is taken where it exists and is predicted to be cheaper.

    M is `AUTO_HEADS`, halved until all direct fits without a device are predicted to take
    `AUTO_SECONDS` at most, or M is `MIN_AUTO_HEADS`: learned heads take one more fit for each part
    that they hold out. Only the samples ``rows`` cost time.
    """
    if not isinstance(spec.n_heads, str):
        return spec.n_heads
    has_query = samples.sets.query is not None or spec.query != "given"
    n_tokens = keys_seen(samples.token_counts[rows], spec.query)
    n_fits = 1
    if isinstance(spec.heads, LearnedHeads):
        n_fits += spec.heads.n_held_out_parts(len(rows))

    def seconds(n_heads: float) -> float:
        one_fit = fit_seconds(len(rows), n_tokens, samples.dim, n_heads, has_query=has_query)
        return n_fits * one_fit

    # few enough heads for all fits within AUTO_SECONDS; "cg" and devices have costs of their own
    n_heads = AUTO_HEADS
    may_halve = spec.solver != "cg" and spec.device is None
    while may_halve and n_heads > MIN_AUTO_HEADS and seconds(n_heads) > AUTO_SECONDS:
        n_heads //= 2

    # infinitely many heads, where they are the cheaper ones
    if can_be_exact(spec) and seconds(math.inf) <= seconds(n_heads):
        return math.inf
    return n_heads


def can_be_exact(spec: LayerSpec) -> bool:
    """Whether a layer can have infinitely many heads: its kernel is known, and fits in memory.

    An activation that is left open counts as the first that is tried, which has a kernel.
    """
    return has_kernel(spec.heads) and spec.activation != SOFTMAX and spec.solver != "cg"


def has_kernel(heads: Any) -> bool:
    """Whether infinitely many heads of a distribution have an exact kernel.

    ``heads=None`` stands for Gaussian heads, which have one.
    """
    if heads is None:
        return True
    is_learned = hasattr(heads, "fit")
    draws_strengths = getattr(heads, "strength_range", None) is not None
    if is_learned or draws_strengths:
        return False
    return hasattr(heads, "moments") or hasattr(heads, "components")


def warn_if_long(spec: LayerSpec, data: TrainingSet) -> None:
    """Say so before a fit that will take long."""
    assert spec.n_heads != AUTO
    assert not isinstance(spec.n_heads, str)
    if spec.device is not None:
        return
    n_tokens = keys_seen(data.samples.token_counts, spec.query)
    core_seconds = fit_seconds(len(data), n_tokens, data.samples.dim, spec.n_heads, has_query=True)
    seconds = core_seconds / thread_count()
    if seconds <= LONG_FIT_SECONDS:
        return
    if spec.is_exact:
        kind = "the exact kernel of infinitely many heads"
        remedy = "a finite `n_heads`"
    else:
        kind = f"{spec.n_heads} heads"
        remedy = "fewer heads, a fixed alpha"
    warnings.warn(
        f"this fit will take about {seconds:.0f} s: {kind} on {len(data)} samples of {n_tokens} "
        f"keys in all. For less, use {remedy}, fewer samples, or a GPU.",
        stacklevel=4,
    )
