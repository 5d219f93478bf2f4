"""What the fits of a lens take in seconds, predicted, and how a budget is shared among them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keyhole.attention.search import CHECKS, MIN_SAMPLES_FOR_ONE_SPLIT
from keyhole.costs import fit_seconds
from keyhole.lab.lens.fits import SUBSETS
from keyhole.lab.lens.problem import N_FOLDS

MOST_PER_STEP = 400  # samples that one step of a descent uses
CALL_SECONDS = 0.006  # that any layer takes, however small
CACHED_WIDTH = 1000  # width D from which a head, of D × D numbers, does not fit a core's cache


@dataclass(frozen=True)
class Costs:
    """Seconds of one core that steps take, predicted from sizes alone, whatever the machine.

    The constants were measured on one core (Zen 4), from 3 to 2,000 coordinates: there predictions
    are between 0.7 and 5 times the seconds that were taken. D = dim + 1 is the width of a head.
    """

    keys: float  # per sample
    dim: int
    activation: str
    grouped: bool = False
    n_folds: int = N_FOLDS
    has_query: bool = True  # without one, a head is a row of W rather than all D of them
    sets: float = 1.0  # per sample

    def tokens(self, n: int) -> float:
        """Scaling the tokens of n samples."""
        return 1e-9 * n * self.keys * (100 + 8 * self.dim)

    def features(self, n: int, heads: float) -> float:
        """Features of so many heads: drawing W, W times the query, scores and sums over keys."""
        width = self.dim + 1
        entries = width**2 if self.has_query else width
        draws = 30 * entries
        queries = 0.2 * n * self.sets * entries
        keys = 0.4 * n * self.keys * width
        out_of_cache = 1.5 if width > CACHED_WIDTH and self.has_query else 1.0
        return CALL_SECONDS + 1e-9 * heads * (out_of_cache * (draws + queries) + keys)

    def kernel(self, n: int, biased: bool = False) -> float:
        """The exact kernel: all pairs of keys; with a mean, 20 ns more each for a kink in σ."""
        pairs = (n * self.keys) ** 2 / 2
        kink = 20.0 if biased and self.activation in ("relu", "step") else 0.0
        return CALL_SECONDS + 1e-9 * pairs * (2.2 + 0.075 * (self.dim + 1) + kink)

    def product(self, n: int, width: float) -> float:
        """A Gram matrix of n rows of so many numbers."""
        return 2.5e-11 * n**2 * width

    def gram(self, n: int, heads: float, biased: bool = False) -> float:
        """A Gram matrix of so many heads, or of infinitely many, with the scaling of tokens."""
        if math.isinf(heads):
            return self.tokens(n) + self.kernel(n, biased)
        return self.tokens(n) + self.features(n, heads) + self.product(n, heads * (self.dim + 1))

    def pooled(self, n: int, *, statistics: bool = False, hidden: int = 0) -> float:
        """A Gram matrix of pooled numbers, or of so many hidden units on top of them."""
        per_coordinate = 5 if statistics else 2  # numbers of a sample, the query's among them
        width = per_coordinate * self.dim
        pooling = 1e-9 * (20 * n * width + 5 * n * self.keys * self.dim)
        if not hidden:
            return pooling + self.product(n, width)
        layer = 1e-9 * (15 * width * hidden + 0.04 * n * width * hidden)
        return pooling + layer + self.product(n, hidden)

    def fit(self, n: float) -> float:
        """A ridge path with leave-one-out.

        Leaving groups out needs eigenvectors, which take three times as long.
        """
        seconds = fit_seconds(math.ceil(n), 0, self.dim, math.inf, has_query=False)
        return 3 * seconds if self.grouped else seconds

    def folds(self, n: int) -> float:
        """A fit per fold of n samples.

        One seventh is added for the fits on half and on a quarter of the samples.
        """
        return 8 / 7 * self.n_folds * self.fit((1 - 1 / N_FOLDS) * n)

    def learn(self, n: int, steps: int) -> float:
        """A head distribution learned from n samples.

        A gradient is three passes through the features; a check of the held-out loss is one fit.
        """
        n_used = min(n, MOST_PER_STEP)
        n_heads = max(32, min(256, 2 * n_used // (self.dim + 1)))
        one_pass = self.gram(n_used, n_heads)
        descents = 2 if n >= MIN_SAMPLES_FOR_ONE_SPLIT else 6
        return one_pass * (9 + descents * (3 * steps + CHECKS))

    def curve(self, n: float) -> float:
        """The subsets of a learning curve."""
        return self.n_folds * sum(repeats * self.fit(n * share) for share, repeats in SUBSETS)


def share_out(
    budget: float, options: Mapping[str, Sequence[tuple[float, Any]]]
) -> dict[str, tuple[float, Any]]:
    """For each name the first of its options, (seconds, what it gets), that it can afford.

    In a first round the cheapest names come first. Each may take up to an equal share of what
    remains for the names not yet served: nobody has less because another is expensive. In a
    second round, in the same order, each may spend all that remains to exchange its option for a
    larger one. A name that can afford nothing is not in the result.

    >>> share_out(
    ...     10.0,
    ...     {"expensive": [(100.0, "all"), (7.0, "some")], "cheap": [(2.0, "all"), (1.0, "some")]},
    ... )
    {'cheap': (2.0, 'all'), 'expensive': (7.0, 'some')}
    """
    chosen: dict[str, tuple[float, Any]] = {}
    cheapest_first = sorted(options, key=lambda name: options[name][0][0])
    n_names = len(cheapest_first)
    first_round = range(n_names, 0, -1)  # names that share what remains
    second_round = [1] * n_names
    turns = [*cheapest_first, *cheapest_first]
    for name, n_sharing in zip(turns, [*first_round, *second_round], strict=True):
        spent = chosen[name][0] if name in chosen else 0.0
        limit = spent + budget / n_sharing
        for option in options[name]:
            if option[0] <= limit:
                if option[0] > spent:
                    chosen[name] = option
                    budget -= option[0] - spent
                break
    return chosen
