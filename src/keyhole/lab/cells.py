"""The unit of work of `keyhole reproduce`: a pure function of its settings and its seed.

A cell is a frozen record of settings. ``cell.rows()`` draws sets, fits and measures, and gives one
row for each fit: what was fitted, and what it came to. Fits that share a draw and a factorisation
are one cell. A figure is made of the rows of its cells, and of nothing else.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole.attention.features import attention_features
from keyhole.attention.heads import GaussianHeads, sample_mlp_weights
from keyhole.attention.kernels import attention_kernel, mlp_kernel
from keyhole.attention.mlp import mlp_features
from keyhole.data.sets import SetBatch
from keyhole.solve.cholesky import fit_gram
from keyhole.solve.problem import RidgeProblem
from keyhole.solve.spectral import Spectrum
from keyhole.theory.harmonics import pair_powers
from keyhole.theory.notation import parse_target
from keyhole.theory.targets import Polynomial, sphere_sets

Row = dict[str, Any]
"""What was fitted, and what came out: texts, numbers and None, so that JSON can hold it."""

DISTRIBUTIONS = {"attention": GaussianHeads(), "biased": GaussianHeads(mean=1.0)}
"""Head distributions of the models; "mlp" is a two-layer network on the flattened set."""

HEADS_DRAWN = 80
"""`FixedCell` draws its heads again until this many have been drawn: the luck of few heads is
averaged out."""


class Cell(ABC):
    """What `keyhole.lab.run.compute` takes: a frozen dataclass of settings."""

    @property
    @abstractmethod
    def cost(self) -> float:
        """Seconds on one core, roughly: the expensive ones start first."""

    @abstractmethod
    def rows(self) -> list[Row]:
        """Draw, fit and measure."""


# ---------------------------------------------------------------- targets and draws


@lru_cache(maxsize=256)
def read_target(text: str, dim: int) -> Polynomial:
    """The polynomial of a notation."""
    return parse_target(text, dim).target


def target_variance(target: Polynomial, n_keys: int) -> float:
    """Var f* under the sphere distribution.

    >>> from keyhole.theory.targets import TokenPower
    >>> round(target_variance(TokenPower(1, dim=8), n_keys=4), 6)    # 1/(dN)
    0.03125
    """
    powers = pair_powers(target)
    return float(powers[1:, 0].sum() + powers[:, 1:].sum() / n_keys)


@dataclass(frozen=True)
class Draw:
    """The sets of one repetition, and the seeds of its heads and of its noise."""

    train: SetBatch
    test: SetBatch
    head_seed: int
    noise_seed: int

    @classmethod
    def of(
        cls, dim: int, n_keys: int, n_train: int, n_test: int, seed: int, repetition: int
    ) -> Draw:
        """One draw for all models, so that they are compared on the same sets."""
        words = [seed, dim, n_keys, repetition]
        train, test, heads, noise = np.random.SeedSequence(words).generate_state(4).tolist()
        return cls(
            train=sphere_sets(n_train, n_keys, dim, train),
            test=sphere_sets(n_test, n_keys, dim, test),
            head_seed=heads,
            noise_seed=noise,
        )


@dataclass(frozen=True)
class Labels:
    """What is wrong with the labels, in units of Var f* and of its root."""

    noise: float = 0.0
    """The variance of the noise."""
    outliers: float = 0.0
    """The share of the labels that are off by ± ``outlier_size`` standard deviations."""
    outlier_size: float = 0.0

    def of(self, target: Polynomial, sets: SetBatch, n_keys: int, seed: int) -> np.ndarray:
        """f* on the sets, with noise and outliers."""
        y = target(sets)
        rng = np.random.default_rng(seed)
        noise = rng.standard_normal(len(y))
        signs = rng.choice([-1.0, 1.0], size=len(y))
        is_outlier = rng.random(len(y)) < self.outliers
        jumps = np.where(is_outlier, self.outlier_size * signs, 0.0)
        scale = math.sqrt(target_variance(target, n_keys))
        return np.asarray(y + scale * (math.sqrt(self.noise) * noise + jumps))


# ---------------------------------------------------------------- ridge on kernels


def kernels(
    model: str, train: SetBatch, test: SetBatch, n_heads: tuple[int | None, ...], seed: int
) -> Iterator[tuple[int | None, Float[np.ndarray, "n n"], Float[np.ndarray, "test n"]]]:
    """Yield M, the kernel among training sets, and that of test against training sets.

    M = None is the exact kernel of infinitely many heads. Heads are nested: the first M of one
    draw. An MLP has as many hidden units as these heads have values, M(d+1).
    """
    if None in n_heads:
        yield None, *exact_kernels(model, train, test)
    finite = [m for m in n_heads if m is not None]
    if not finite:
        return

    # the features of the most heads; those of fewer are their first columns, scaled anew
    most = max(finite)
    width = train.dim + 1
    if model == "mlp":
        weights = sample_mlp_weights(most * width, int(train.lengths[0]), train.dim, seed)
        features = mlp_features(train, weights)
        of_test = mlp_features(test, weights)
    else:
        heads = DISTRIBUTIONS[model].sample(most, train.dim, seed)
        features = attention_features(train, heads)
        of_test = attention_features(test, heads)
    for m in finite:
        first = features[:, : m * width]
        yield m, (most / m) * (first @ first.T), (most / m) * (of_test[:, : m * width] @ first.T)


def exact_kernels(
    model: str, train: SetBatch, test: SetBatch, heads: GaussianHeads | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The kernel of infinitely many heads among training sets, and of test against these."""
    if model == "mlp":
        return mlp_kernel(train), mlp_kernel(test, train)
    distribution = heads or DISTRIBUTIONS[model]
    return (
        attention_kernel(train, heads=distribution),
        attention_kernel(test, train, heads=distribution),
    )


def ridge_path(
    gram: Float[np.ndarray, "n n"],
    cross: Float[np.ndarray, "test n"],
    y: Float[np.ndarray, "n t"],
    truth: Float[np.ndarray, "test t"],
) -> list[dict[str, float]]:
    """Fit every target at every penalty from one factorisation; an outcome for each target.

    Errors are mean squares over the variance of the target on the test sets, with the penalty that
    leave-one-out chooses, and what leave-one-out says of its choice.
    """
    spectrum = Spectrum.of_gram(gram.copy(), RidgeProblem.of(y))
    alphas = spectrum.grid()
    loo = np.square(spectrum.leave_one_out(alphas)).mean(axis=1)
    errors = np.empty_like(loo)
    for i, alpha in enumerate(alphas):
        coef, intercept = spectrum.solution(float(alpha))
        errors[i] = np.mean(np.square(cross @ coef + intercept - truth), axis=0)
    variance = truth.var(axis=0)
    chosen = np.argmin(loo, axis=0)
    return [
        {
            "error": float(errors[chosen[t], t] / variance[t]),
            "alpha": float(alphas[chosen[t]]),
            "loo": float(loo[chosen[t], t] / variance[t]),
        }
        for t in range(y.shape[1])
    ]


# ---------------------------------------------------------------- cells


@dataclass(frozen=True)
class RidgeCell(Cell):
    """Ridge on one draw: every target, number of heads and size, penalties by leave-one-out."""

    model: str
    targets: tuple[str, ...]
    """In the notation of `keyhole.theory.notation`."""
    dim: int
    n_keys: int
    heads: tuple[int | None, ...]
    """None for infinitely many."""
    sizes: tuple[int, ...]
    """The first n sets of the draw of the largest."""
    n_test: int
    seed: int
    repetition: int
    labels: Labels = Labels()

    @property
    def cost(self) -> float:
        """See `Cell`."""
        most = max(self.sizes)
        total = 0.0
        for heads in self.heads:
            # seconds for an entry of the kernel, then of the factorisations
            if heads is not None:
                per_entry = 1e-10 * heads * (self.dim + 1)
            elif self.model == "mlp":
                per_entry = 2e-8
            else:
                factor = 3 if self.model == "biased" else 1
                per_entry = 1e-10 * factor * self.n_keys**2 * (self.dim + 4)
            total += per_entry * most * (most / 2 + self.n_test)
            total += sum(1e-10 * n**3 + 1e-3 for n in self.sizes)
        return total

    def rows(self) -> list[Row]:
        """See `Cell`."""
        most = max(self.sizes)
        draw = Draw.of(self.dim, self.n_keys, most, self.n_test, self.seed, self.repetition)
        polynomials = [read_target(text, self.dim) for text in self.targets]
        labels = [
            self.labels.of(target, draw.train, self.n_keys, draw.noise_seed)
            for target in polynomials
        ]
        y = np.stack(labels, axis=1)
        truth = np.stack([target(draw.test) for target in polynomials], axis=1)

        rows = []
        for heads, gram, cross in kernels(
            self.model, draw.train, draw.test, self.heads, draw.head_seed
        ):
            for n in self.sizes:
                outcomes = ridge_path(gram[:n, :n], cross[:, :n], y[:n], truth)
                for target, outcome in zip(self.targets, outcomes, strict=True):
                    rows.append(
                        {
                            "model": self.model,
                            "target": target,
                            "d": self.dim,
                            "N": self.n_keys,
                            "M": heads,
                            "n": n,
                            "most": most,
                            "repetition": self.repetition,
                            "outliers": self.labels.outliers,
                            **outcome,
                        }
                    )
        return rows


@dataclass(frozen=True)
class FixedCell(Cell):
    """What the theory describes, on one draw: no intercept, α = nλ, the mean square of the error.

    Every target, penalty, noise and size of one model with one number of heads; the mean over
    several draws of the heads where these are few.
    """

    model: str
    targets: tuple[str, ...]
    dim: int
    n_keys: int
    heads: int | None
    sizes: tuple[int, ...]
    ridges: tuple[float, ...]
    noises: tuple[float, ...]
    n_test: int
    seed: int
    repetition: int
    mean: float = 1.0
    """c of the mean c·I of biased heads."""

    @property
    def cost(self) -> float:
        """See `Cell`."""
        most = max(self.sizes)
        fits = sum(5e-11 * n**3 + 5e-3 for n in self.sizes) * len(self.ridges)
        if self.heads is None:
            return fits + 2e-9 * most * (most + self.n_test) * self.n_keys**2 / 10
        return fits * self._n_draws

    @property
    def _n_draws(self) -> int:
        if self.heads is None:
            return 1
        return max(1, round(HEADS_DRAWN / self.heads))

    def rows(self) -> list[Row]:
        """See `Cell`."""
        most = max(self.sizes)
        draw = Draw.of(self.dim, self.n_keys, most, self.n_test, self.seed, self.repetition)
        polynomials = [read_target(text, self.dim) for text in self.targets]

        # an output for every target and noise
        labels = []
        truths = []
        for target in polynomials:
            truth = target(draw.test)
            for noise in self.noises:
                of_train = Labels(noise).of(target, draw.train, self.n_keys, draw.noise_seed)
                labels.append(of_train)
                truths.append(truth)
        y = np.stack(labels, axis=1)
        truth = np.stack(truths, axis=1)

        # the mean square of every output, at every penalty and size
        if self.heads is None:
            errors = self._kernel_errors(draw, y, truth)
        else:
            errors = self._layer_errors(draw, y, truth)
        rows = []
        for (n, ridge), squares in errors.items():
            by_output = np.reshape(squares, (len(self.targets), len(self.noises)))
            for target_text, of_target in zip(self.targets, by_output.tolist(), strict=True):
                for noise, square in zip(self.noises, of_target, strict=True):
                    rows.append(
                        {
                            "model": self.model,
                            "target": target_text,
                            "d": self.dim,
                            "N": self.n_keys,
                            "M": self.heads,
                            "n": n,
                            "ridge": ridge,
                            "noise": noise,
                            "repetition": self.repetition,
                            "mean_square": square,
                        }
                    )
        return rows

    def _kernel_errors(
        self, draw: Draw, y: np.ndarray, truth: np.ndarray
    ) -> dict[tuple[int, float], np.ndarray]:
        """Infinitely many heads: the exact kernel, once for all sizes and penalties."""
        distribution = GaussianHeads(mean=self.mean) if self.model == "biased" else None
        gram, cross = exact_kernels(self.model, draw.train, draw.test, distribution)
        errors = {}
        for n in self.sizes:
            for ridge in self.ridges:
                problem = RidgeProblem.of(y[:n], [n * ridge], fit_intercept=False)
                fit = fit_gram(gram[:n, :n].copy(), problem)
                predicted = cross[:, :n] @ fit.coef
                errors[n, ridge] = np.mean(np.square(predicted - truth), axis=0)
        return errors

    def _layer_errors(
        self, draw: Draw, y: np.ndarray, truth: np.ndarray
    ) -> dict[tuple[int, float], np.ndarray]:
        """M heads: the estimator, for several draws of the heads."""
        from keyhole.estimators.attention import AttentionRegressor

        errors: dict[tuple[int, float], np.ndarray] = {}
        for number in range(self._n_draws):
            for n in self.sizes:
                for ridge in self.ridges:
                    model = AttentionRegressor(
                        self.heads or 1,
                        heads=GaussianHeads(mean=self.mean if self.model == "biased" else 0.0),
                        alpha=n * ridge,
                        fit_intercept=False,
                        activation="relu",
                        pooling="mean",
                        scaling="none",
                        query="given",
                        random_state=draw.head_seed + number,
                    )
                    predicted = model.fit(draw.train[:n], y[:n]).predict(draw.test)
                    squares = np.mean(np.square(predicted.reshape(truth.shape) - truth), axis=0)
                    errors[n, ridge] = errors.get((n, ridge), 0.0) + squares / self._n_draws
        return errors


@dataclass(frozen=True)
class BallCell(Cell):
    """The learner of the theorems on one draw: a convex loss over a norm ball."""

    loss: str
    """"absolute" or "huber"."""
    target: str
    dim: int
    n_keys: int
    n_heads: int
    n_samples: int
    most_samples: int
    """The first ``n_samples`` sets of so many, which other learners see too."""
    n_test: int
    seed: int
    repetition: int
    labels: Labels

    @property
    def cost(self) -> float:
        """See `Cell`."""
        per_number = 6e-5 if self.loss == "absolute" else 9e-6
        return per_number * self.n_samples * self.n_heads * (self.dim + 1)

    def rows(self) -> list[Row]:
        """See `Cell`."""
        from keyhole.estimators.norm_ball import NormBallRegressor, NormBallWarning

        draw = Draw.of(
            self.dim, self.n_keys, self.most_samples, self.n_test, self.seed, self.repetition
        )
        target = read_target(self.target, self.dim)
        truth = target(draw.test)
        y = self.labels.of(target, draw.train, self.n_keys, draw.noise_seed)[: self.n_samples]
        # the Huber loss bends at 1: labels in units of f*
        scale = math.sqrt(target_variance(target, self.n_keys))
        model = NormBallRegressor(
            self.n_heads,
            heads=DISTRIBUTIONS["attention"],
            loss=self.loss,  # type: ignore[arg-type]
            tol=0.01,
            random_state=draw.head_seed,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NormBallWarning)  # the gap it stopped at is in the row
            model.fit(draw.train[: self.n_samples], y / scale)
        squares = np.square(model.predict(draw.test) * scale - truth)
        return [
            {
                "model": self.loss,
                "target": self.target,
                "d": self.dim,
                "N": self.n_keys,
                "M": self.n_heads,
                "n": self.n_samples,
                "repetition": self.repetition,
                "outliers": self.labels.outliers,
                "error": float(np.mean(squares) / np.var(truth)),
                "gap": float(model.duality_gap_),
            }
        ]
