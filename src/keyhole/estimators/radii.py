"""Which norm balls the parameters of an estimator name, and which of them cross-validates best."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Int
from sklearn.model_selection import KFold, StratifiedKFold

from keyhole._checks import check_float_array, check_number
from keyhole.solve.ball import BallProblem, NormBall, Solution, group_norms, minimise

CHOOSING_TOL = 2e-2
"""Duality gap of fits that only serve to compare radii, as a share of the held-out loss. Radii
whose losses are so close count as equal.
"""

GROWTH = 2.0
"""From one radius of an automatic path to the next."""

PATIENCE = 2
"""Radii in a row with the same held-out loss after which a path ends; one with a larger loss ends
it at once.
"""

LONGEST_PATH = 30
"""Radii of an automatic path at most: a factor of 10^9."""


@dataclass(frozen=True)
class Theory:
    """K_1 = c √B and √(K_2/M) = √(c B/(δ M)): the radii of the paper's theorem.

    ``complexity`` is B; None if it is not known. The ratio of the two radii at c = 1, (δM)^{-1/2},
    needs no B.
    """

    complexity: float | None
    delta: float
    constant: float
    n_heads: int

    @property
    def ratio(self) -> float:
        """(δM)^{-1/2}."""
        return 1.0 / math.sqrt(self.delta * self.n_heads)

    def radius(self, name: str) -> float:
        """The group radius or the ball radius."""
        if self.complexity is None:
            raise ValueError(
                f"`{name}='theory'` needs the complexity B of the target: `complexity` is None. "
                "Pass complexity=kh.theory.paper_complexity(target) for a known target, or let "
                f"cross-validation choose with {name}='cv'."
            )
        if name == "group_radius":
            return self.constant * math.sqrt(self.complexity)
        return math.sqrt(self.constant * self.complexity / (self.delta * self.n_heads))


@dataclass(frozen=True)
class Radius:
    """One radius of a path of balls: a number, or a multiple of the scale of the path."""

    value: float
    grows: bool = False

    def at(self, scale: float) -> float:
        """The radius at this scale."""
        return self.value * scale if self.grows else self.value


@dataclass(frozen=True)
class BallPath:
    """Balls that grow with a scale; a single ball if neither radius grows."""

    group: Radius
    ball: Radius

    @property
    def grows(self) -> bool:
        """Whether this is more than one ball."""
        return self.group.grows or self.ball.grows

    def at(self, scale: float) -> NormBall:
        """The ball at this scale."""
        return NormBall(self.group.at(scale), self.ball.at(scale))

    def scales(self, problem: BallProblem) -> Iterator[float]:
        """Scales to try, growing from half the least one that could bring the loss to zero.

        By convexity the loss of a constant falls by at most the support function of the ball at its
        gradient: the least scale is their ratio, and follows the units of targets and features.
        """
        if not self.grows:
            yield 1.0
            return
        unit = NormBall(
            self.group.value if self.group.grows else math.inf,
            self.ball.value if self.ball.grows else math.inf,
        )
        constant = np.zeros_like(problem.targets) + problem.first_intercept()
        loss = problem.objective(constant)
        support = replace(problem, ball=unit).support(problem.slope(constant))
        scale = 1.0
        if loss > 0.0 and support > 0.0:
            scale = loss / support / GROWTH
        for _ in range(LONGEST_PATH):
            yield scale
            scale *= GROWTH


def candidate_paths(group_radius: Any, ball_radius: Any, theory: Theory) -> list[BallPath]:
    """Return the balls that the two parameters of an estimator name, smallest first.

    "cv" for the group radius makes it grow. "matched" makes the ball radius follow it at the
    theory's ratio, and "cv" tries three shapes: the ball alone, the theory's ratio, the group norm
    alone.
    """
    # the group radius: numbers, or one that grows
    if isinstance(group_radius, str) and group_radius == "cv":
        groups = [Radius(1.0, grows=True)]
    else:
        groups = [Radius(K) for K in _numbers(group_radius, "group_radius", theory)]

    # numbers for the ball: every pair
    is_shape = isinstance(ball_radius, str) and ball_radius in ("matched", "cv")
    if not is_shape:
        balls = [Radius(R) for R in _numbers(ball_radius, "ball_radius", theory)]
        paths = [BallPath(group, ball) for group in groups for ball in balls]
        if any(path.group.value == path.ball.value == math.inf for path in paths):
            raise ValueError(
                "`group_radius` and `ball_radius` must not both be infinite: nothing would bound "
                "the values. Give one of them a number, or use ridge regression, "
                "kh.AttentionRegressor."
            )
        return paths

    # a ball that follows the group radius, or grows alone
    ratios = [theory.ratio]
    if ball_radius == "cv":
        ratios = [1.0 / math.sqrt(theory.n_heads), theory.ratio, math.inf]
    paths = []
    for group in groups:
        if math.isfinite(group.value):
            paths += [BallPath(group, _times(group, ratio)) for ratio in ratios]
        elif ball_radius == "cv":
            paths.append(BallPath(group, Radius(1.0, grows=True)))
        else:
            raise ValueError(
                "`ball_radius='matched'` follows `group_radius`, which is infinite. Give "
                "`ball_radius` a number or 'cv'."
            )
    return paths


def _times(radius: Radius, ratio: float) -> Radius:
    """A multiple of a radius, which grows where that grows; no bound at all if the ratio is inf."""
    if math.isinf(ratio):
        return Radius(math.inf)
    return Radius(radius.value * ratio, radius.grows)


def _numbers(radius: Any, name: str, theory: Theory) -> list[float]:
    """The numbers that a parameter stands for, smallest first."""
    if isinstance(radius, str):
        if radius != "theory":
            raise ValueError(f"`{name}` must be a number, numbers or 'theory': got {radius!r}.")
        return [theory.radius(name)]
    numbers = check_float_array(radius, name).astype(np.float64)
    if numbers.ndim > 1 or numbers.size == 0:
        raise ValueError(
            f"`{name}` must be a non-empty sequence of numbers: got shape {numbers.shape}."
        )
    is_sequence = numbers.ndim == 1
    for i, number in enumerate(numbers.reshape(-1).tolist()):
        if number != math.inf:
            check_number(number, f"{name}[{i}]" if is_sequence else name, minimum=0.0)
    return sorted(numbers.reshape(-1).tolist())


@dataclass(frozen=True)
class Trial:
    """Cross-validation of one ball: the loss of each fold, and of all held-out samples together."""

    ball: NormBall
    fold_losses: tuple[float, ...]
    mean_loss: float
    n_active: float


def choose_ball(
    problem: BallProblem,
    paths: Sequence[BallPath],
    *,
    n_folds: int,
    seed: int,
    tol: float,
    max_iter: int,
) -> tuple[list[Trial], NormBall, Solution | None]:
    """Cross-validate every ball: all trials, the best ball, and a solution to start from.

    Where there is one ball only, nothing is fitted, and its losses are NaN.
    """
    if len(paths) == 1 and not paths[0].grows:
        ball = paths[0].at(1.0)
        return [Trial(ball, (), math.nan, math.nan)], ball, None

    folds = folds_of(problem, n_folds, seed)
    held_out_parts = [folds == k for k in range(int(folds.max()) + 1)]
    trials: list[Trial] = []
    best: Trial | None = None
    best_start: Solution | None = None
    for path in paths:
        # each fold starts from its own solution in the ball before
        starts: list[Solution | None] = [None] * len(held_out_parts)
        leader: Trial | None = None
        n_since_leader = 0
        for scale in path.scales(problem):
            solutions = [
                minimise(
                    without(problem, path.at(scale), held_out),
                    tol=max(tol, CHOOSING_TOL),
                    max_iter=max_iter,
                    start=start,
                    floor=0.0 if leader is None else leader.mean_loss,
                )
                for held_out, start in zip(held_out_parts, starts, strict=True)
            ]
            starts = list(solutions)
            trial = judged(problem, path.at(scale), held_out_parts, solutions)
            trials.append(trial)

            # the best of this path, and of all paths
            n_since_leader += 1
            if leader is None or trial.mean_loss < (1.0 - CHOOSING_TOL) * leader.mean_loss:
                leader = trial
                n_since_leader = 0
                if best is None or leader.mean_loss < best.mean_loss:
                    best = leader
                    best_start = solutions[0]

            # the path ends where the loss rises, or stays
            has_risen = trial.mean_loss > (1.0 + CHOOSING_TOL) * leader.mean_loss
            if has_risen or n_since_leader >= PATIENCE:
                break
    assert best is not None  # every path has a first scale
    return trials, best.ball, best_start


def folds_of(problem: BallProblem, n_folds: int, seed: int) -> Int[np.ndarray, " n"]:
    """The fold of each sample, with as many of each class in each fold as can be.

    The only sample of a class is in no fold (−1): a fit without it would not know the class.
    """
    n = len(problem.targets)
    if n < 2:
        raise ValueError(
            "cross-validation needs at least two samples: got 1 sample (samples of weight 0 do "
            "not count). Give more samples, or fixed numbers as `group_radius` and `ball_radius`."
        )
    folds = np.full(n, -1)
    seed = seed % 2**32  # NumPy's generator of scikit-learn takes no larger one
    if not problem.loss.is_of_labels:
        splitter = KFold(min(n_folds, n), shuffle=True, random_state=seed)
        for k, (_, held_out) in enumerate(splitter.split(folds)):
            folds[held_out] = k
        return folds

    _, labels, counts = np.unique(problem.targets, axis=0, return_inverse=True, return_counts=True)
    labels = labels.reshape(-1)
    if counts.max() < 2:
        raise ValueError(
            "cross-validation needs a class with at least two samples: every class has one. "
            "Give more samples, or fixed numbers as `group_radius` and `ball_radius`."
        )
    rows = np.flatnonzero(counts[labels] > 1)
    of_classes = StratifiedKFold(min(n_folds, counts.max()), shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        # a class with fewer samples than folds is spread over as many folds as it has samples
        warnings.filterwarnings("ignore", message="The least populated class")
        for k, (_, held_out) in enumerate(of_classes.split(rows, labels[rows])):
            folds[rows[held_out]] = k
    return folds


def without(problem: BallProblem, ball: NormBall, held_out: Bool[np.ndarray, " n"]) -> BallProblem:
    """The problem over another ball, in which held-out samples have weight 0."""
    weights = np.where(held_out, 0.0, problem.weights)
    return replace(problem, ball=ball, weights=weights / weights.sum())


def judged(
    problem: BallProblem,
    ball: NormBall,
    held_out_parts: Sequence[Bool[np.ndarray, " n"]],
    solutions: Sequence[Solution],
) -> Trial:
    """The held-out losses of the solutions of all folds."""
    losses = []
    fold_weights = []
    active_counts = []
    for held_out, solution in zip(held_out_parts, solutions, strict=True):
        predictions = problem.design[held_out] @ solution.values + solution.intercept
        loss = problem.loss.value(problem.targets[held_out], predictions)
        weights = problem.weights[held_out]
        losses.append(float(np.average(loss, weights=weights)))
        fold_weights.append(float(weights.sum()))
        active_counts.append(np.count_nonzero(group_norms(problem.grouped(solution.values))))
    return Trial(
        ball=ball,
        fold_losses=tuple(losses),
        mean_loss=float(np.average(losses, weights=fold_weights)),
        n_active=float(np.mean(active_counts)),
    )


def tabulate(trials: Sequence[Trial]) -> dict[str, np.ndarray]:
    """Trials as columns of a table."""
    return {
        "group_radius": np.array([trial.ball.group_radius for trial in trials]),
        "ball_radius": np.array([trial.ball.ball_radius for trial in trials]),
        "mean_test_loss": np.array([trial.mean_loss for trial in trials]),
        "fold_test_losses": np.array([trial.fold_losses for trial in trials]),
        "mean_active_heads": np.array([trial.n_active for trial in trials]),
    }
