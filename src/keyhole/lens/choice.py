"""Before the look: how tokens are scaled, how strong a bias is, what things cost. On a small part of the samples."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int

from keyhole.activations import SOFTMAX
from keyhole.groups import SetGroups
from keyhole.heads import GaussianHeads
from keyhole.lens.findings import LensConfig
from keyhole.lens.learners import Gram, head_gram, held_out_losses, kernel_gram
from keyhole.lens.problem import LensProblem
from keyhole.solvers import ridge_gram_path
from keyhole.tokens import SCALINGS, TokenRule

MOST = 300
"""Samples that choices are made on."""
MOST_TOKENS = 8000
SIZES = (2000, 1500, 1200, 1000, 800, 600, 500, 400, 300, 200, 150, 100)
"""Numbers of samples to fall back to."""
STRENGTHS = (1.0, 3.0, 10.0)
PILOT_HEADS = 64


@dataclass
class Costs:
    """Seconds of the steps, measured on a small part and scaled up."""

    pair: float = 0.0
    """Of the kernel of zero-mean heads, per pair of tokens."""
    biased_pair: float = 0.0
    token_head: float = 0.0
    """Of features, per token, head and coordinate."""
    solve: float = 0.0
    """Of a ridge path, per n²."""
    notes: list[str] = field(default_factory=list)

    def kernel(self, tokens: float, biased: bool = False) -> float:
        """A Gram matrix of infinitely many heads."""
        return (self.biased_pair if biased else self.pair) * tokens**2

    def heads(self, tokens: float, n: int, n_heads: int, width: int) -> float:
        """Features of M heads and their Gram matrix."""
        return self.token_head * tokens * n_heads * width + 2e-11 * n * n * n_heads * width

    def fit(self, n: int) -> float:
        """One ridge path with leave-one-out."""
        return max(self.solve * n**2, 2e-10 * n**3) + 0.01


@dataclass(frozen=True, eq=False)
class Preparation:
    """What the small part spoke for."""

    rule: TokenRule
    strength: float | None
    """Of the identity for biased heads; None where there is no query to resemble."""
    costs: Costs


def make_choice(problem: LensProblem, config: LensConfig) -> Preparation:
    """Scaling (and a query made of the keys) by leave-one-out of zero-mean heads; then the strength of a bias."""
    rows = _few(problem, config.seed)
    sets, columns = problem.sets[rows], problem.columns[rows]
    queries = ("given",) if problem.has_query or isinstance(sets, SetGroups) else ("given", "mean")
    costs = Costs()
    found: list[tuple[float, TokenRule]] = []
    for scaling in SCALINGS:
        for query in queries:
            rule = TokenRule.learn(sets, scaling, query, config.pooling)
            gram = _pilot(rule.apply(sets), GaussianHeads(), config)
            found.append((_loo(gram, columns), rule))
    _, rule = min(found, key=lambda pair: pair[0])
    strength = None
    if problem.has_query or rule.query != "given":
        ready = rule.apply(sets)
        grams = [head_gram(ready, GaussianHeads(c), PILOT_HEADS, config.activation, config.seed) for c in STRENGTHS]
        errors = [_loo(gram, columns) for gram in grams]
        strength = STRENGTHS[int(np.argmin(errors))]
    _measure(costs, problem, rows, rule, config)
    return Preparation(rule, strength, costs)


def _few(problem: LensProblem, seed: int) -> Int[np.ndarray, " r"]:
    """Rows of the training part of the first fold, few enough to be quick."""
    train = problem.folds[0][0]
    lengths = problem.tokens / len(problem)
    count = int(min(len(train), MOST, max(20, MOST_TOKENS / lengths)))
    return np.asarray(train[:count])


def _pilot(ready: Any, law: Any, config: LensConfig) -> Gram:
    if config.activation == SOFTMAX:
        return head_gram(ready, law, PILOT_HEADS, config.activation, config.seed)
    return kernel_gram(ready, law, config.activation)


def _loo(gram: Gram, columns: np.ndarray) -> float:
    path = ridge_gram_path(gram.matrix, columns, rounding=gram.rounding, overwrite_gram=True)
    return float(path.loo_mse[path.best])


def _measure(costs: Costs, problem: LensProblem, rows: np.ndarray, rule: TokenRule, config: LensConfig) -> None:
    """Time each kind of step once more, now that everything is compiled."""
    sets = problem.sets[rows]
    ready = rule.apply(sets)
    tokens = problem.tokens * len(rows) / len(problem)
    began = time.perf_counter()
    gram = head_gram(ready, GaussianHeads(), PILOT_HEADS, config.activation, config.seed)
    costs.token_head = (time.perf_counter() - began) / (tokens * PILOT_HEADS * (ready.dim + 1))
    if config.activation != SOFTMAX:
        began = time.perf_counter()
        gram = kernel_gram(ready, GaussianHeads(), config.activation)
        costs.pair = (time.perf_counter() - began) / tokens**2
        few = max(2, len(rows) // 6)  # around a mean a pair can cost thirty times as much
        kernel_gram(ready[:1], GaussianHeads(1.0), config.activation)
        began = time.perf_counter()
        kernel_gram(ready[:few], GaussianHeads(1.0), config.activation)
        costs.biased_pair = (time.perf_counter() - began) / (tokens * few / len(rows)) ** 2
    part = LensProblem(sets, problem.columns[rows], None, ())
    half = np.arange(len(rows))
    began = time.perf_counter()
    held_out_losses(gram, part, half, half[:1])
    costs.solve = (time.perf_counter() - began) / len(rows) ** 2


def affordable(problem: LensProblem, choice: Preparation, config: LensConfig, spent: float) -> tuple[int, int]:
    """Samples and folds whose fits take about three fifths of what is left; the rest is for learning a law."""
    n, biased = len(problem), choice.strength is not None
    left = 0.6 * (config.budget - config.reserve - spent)
    width = problem.batch.dim + 1
    for size in [n, *(s for s in SIZES if s < n)]:
        tokens = problem.tokens * size / n
        kernels = choice.costs.kernel(tokens) * (3 if problem.has_query else 2)
        kernels += choice.costs.heads(tokens, size, config.n_heads, width) * (2 + 2 * biased)
        for folds in (5, 3):
            fits = (7 + biased) * folds + 12
            if kernels + fits * choice.costs.fit(int(0.8 * size)) < left:
                return size, folds
    return min(n, SIZES[-1]), 2
