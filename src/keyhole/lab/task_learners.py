"""What learns the tasks of the literature: eleven learners on nested draws of a task.

Every learner sees the same samples, and none sees the test sets before its error is measured:
penalties and head distributions are chosen by leave-one-out, networks stop by a part of the
training samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole.attention.activations import Activation
from keyhole.attention.features import attention_features
from keyhole.attention.heads import GaussianHeads, sample_mlp_weights
from keyhole.attention.kernels import mlp_kernel
from keyhole.attention.mlp import mlp_features
from keyhole.data.sets import SetBatch
from keyhole.lab.cells import Cell, Row, ridge_path
from keyhole.theory.conditional import conditional_curve
from keyhole.theory.tasks import TASKS, PositionAndMeaning, SetTask, word_sensitivity

PARTS = {
    "position-only": PositionAndMeaning(share=0.0),
    "meaning-only": PositionAndMeaning(share=1.0),
}
"""The two halves of the task "position", measured to tell which of them is learned first."""

RIDGES = np.geomspace(1e-9, 1.0, 19)
"""Ridges λ among which a prediction is the least, in units of the mean squared norm of features."""

FLAT_WIDTH = 1000
"""Random features of the flattened input whose word sensitivity is measured."""

NAMES = {
    "relu": "ReLU",
    "relu-biased": "ReLU, biased",
    "softmax": "softmax",
    "softmax-biased": "softmax, biased",
    "softmax-sharp": "softmax, mean 10",
    "linear": "linear",
    "learned": "learned heads",
    "two-hops": "two hops",
    "mlp": "MLP, flattened",
    "pooled": "pooled statistics",
    "deep-sets": "DeepSets",
    "trained": "trained attention",
}
"""Learners by the names a reader sees."""


def find_task(name: str) -> SetTask:
    """The task of a cell."""
    if name in PARTS:
        return PARTS[name]
    if name not in TASKS:
        raise ValueError(f"a task must be one of {', '.join(TASKS)}: got {name!r}.")
    return TASKS[name]


@dataclass(frozen=True)
class TaskDraw:
    """The sets of one repetition of a task."""

    train: SetBatch
    y: Float[np.ndarray, " n"]
    test: SetBatch
    truth: Float[np.ndarray, " test"]
    fit_seed: int
    """Names what a learner draws: heads, initial weights, the order of samples."""

    @classmethod
    def of(cls, name: str, n_train: int, n_test: int, seed: int, repetition: int) -> TaskDraw:
        """One draw for all learners, so that they are compared on the same sets."""
        words = [seed, repetition, *name.encode()]
        train_seed, test_seed, fit_seed = np.random.SeedSequence(words).generate_state(3).tolist()
        task = find_task(name)
        train, y = task.draw(n_train, train_seed)
        test, truth = task.draw(n_test, test_seed)
        return cls(train=train, y=y, test=test, truth=truth, fit_seed=fit_seed)

    def error(self, predictions: Float[np.ndarray, " test"]) -> float:
        """Mean squared error on the test sets as a share of Var y."""
        return float(np.mean(np.square(predictions - self.truth)) / np.var(self.truth))


Learner = Callable[[TaskDraw, Sequence[int], int], list[float]]
"""Errors after fits to the first n samples of a draw, for several n, with M heads."""


# ---------------------------------------------------------------- frozen heads


@dataclass(frozen=True)
class HeadSetting:
    """Heads that are drawn once: W has the mean c·I and entries of the standard deviation scale."""

    activation: Activation
    mean: float = 0.0
    scale: float = 0.5

    def regressor(self, n_heads: int, seed: int) -> Any:
        """The estimator with such heads; its penalty is chosen by leave-one-out."""
        from keyhole.estimators.attention import AttentionRegressor

        return AttentionRegressor(
            n_heads,
            heads=GaussianHeads(mean=self.mean, scale=self.scale),
            activation=self.activation,
            pooling="mean",
            scaling="none",
            query="given",
            random_state=seed,
        )

    def features(self, batch: SetBatch, n_heads: int, seed: int) -> Float[np.ndarray, "n p"]:
        """Features of M heads; the seed names the draw."""
        heads = GaussianHeads(mean=self.mean, scale=self.scale).sample(n_heads, batch.dim, seed)
        return attention_features(batch, heads, self.activation)


FROZEN = {
    "relu": (HeadSetting("relu"),),
    "relu-biased": tuple(HeadSetting("relu", mean=c) for c in (1.0, 3.0, 10.0)),
    "softmax": (HeadSetting("softmax"), HeadSetting("softmax", scale=3.0)),
    "softmax-biased": tuple(HeadSetting("softmax", mean=c) for c in (1.0, 3.0, 10.0)),
    "softmax-sharp": (HeadSetting("softmax", mean=10.0),),
    "linear": (HeadSetting("linear"), HeadSetting("linear", mean=3.0)),
}
"""The settings of frozen heads; of several leave-one-out chooses one."""


def distinct_settings(learner: str, batch: SetBatch) -> list[HeadSetting]:
    """The settings that differ on these sets: without a query a mean c·I does nothing."""
    if batch.query is not None:
        return list(FROZEN[learner])
    by_noise: dict[tuple[str, float], HeadSetting] = {}
    for setting in FROZEN[learner]:
        by_noise.setdefault((setting.activation, setting.scale), setting)
    return list(by_noise.values())


def frozen_heads(learner: str) -> Learner:
    """The estimator; for every n the setting with the least leave-one-out error."""

    def errors(draw: TaskDraw, sizes: Sequence[int], n_heads: int) -> list[float]:
        least = []
        for n in sizes:
            fits = [
                setting.regressor(n_heads, draw.fit_seed).fit(draw.train[:n], draw.y[:n])
                for setting in distinct_settings(learner, draw.train)
            ]
            best = min(fits, key=lambda model: model.loo_error_)
            least.append(draw.error(best.predict(draw.test)))
        return least

    return errors


# ---------------------------------------------------------------- the other learners


def flattened_network(draw: TaskDraw, sizes: Sequence[int], n_heads: int) -> list[float]:
    """Ridge on infinitely many random features of the flattened input: no notion of a key."""
    gram = mlp_kernel(draw.train)
    cross = mlp_kernel(draw.test, draw.train)
    return [_path_error(draw, gram[:n, :n], cross[:, :n]) for n in sizes]


def pooled_statistics(draw: TaskDraw, sizes: Sequence[int], n_heads: int) -> list[float]:
    """Ridge on mean, spread and extremes of every coordinate of the keys, and the query."""
    features = _statistics(draw.train)
    of_test = _statistics(draw.test)
    errors = []
    for n in sizes:
        # units of the training samples; a column that does not vary stays as it is
        spread = features[:n].std(axis=0)
        unit = np.where(spread > 0, spread, 1.0)
        scaled = features[:n] / unit
        errors.append(_path_error(draw, scaled @ scaled.T, (of_test / unit) @ scaled.T))
    return errors


def _path_error(draw: TaskDraw, gram: np.ndarray, cross: np.ndarray) -> float:
    """The error of ridge on a Gram matrix of the first samples."""
    [outcome] = ridge_path(gram, cross, draw.y[: len(gram), None], draw.truth[:, None])
    return outcome["error"]


def _statistics(batch: SetBatch) -> Float[np.ndarray, "n p"]:
    """Mean, standard deviation, largest and smallest of every coordinate of the keys, and query."""
    keys = batch.tokens.reshape(len(batch), -1, batch.dim)
    columns = [keys.mean(axis=1), keys.std(axis=1), keys.max(axis=1), keys.min(axis=1)]
    if batch.query is not None:
        columns.append(batch.query)
    return np.concatenate(columns, axis=1)


def learned_heads(hops: int) -> Learner:
    """Softmax heads whose distribution is learned, of one hop or of several."""

    def errors(draw: TaskDraw, sizes: Sequence[int], n_heads: int) -> list[float]:
        from keyhole.attention.learned import LearnedHeads
        from keyhole.estimators.attention import AttentionRegressor

        of_sizes = []
        for n in sizes:
            model = AttentionRegressor(
                n_heads,
                heads=LearnedHeads(hops=hops),
                activation="softmax",
                pooling="mean",
                scaling="none",
                query="given",
                random_state=draw.fit_seed % 2**31,
            )
            model.fit(draw.train[:n], draw.y[:n])
            of_sizes.append(draw.error(model.predict(draw.test)))
        return of_sizes

    return errors


def trained_network(kind: str) -> Learner:
    """A network of torch, trained by gradient descent: "deep-sets" or "attention"."""

    def errors(draw: TaskDraw, sizes: Sequence[int], n_heads: int) -> list[float]:
        from keyhole.lab.trained_networks import fit_network

        of_sizes = []
        for n in sizes:
            predict = fit_network(kind, draw.train[:n], draw.y[:n], draw.fit_seed % 2**31)
            of_sizes.append(draw.error(predict(draw.test)))
        return of_sizes

    return errors


LEARNERS: dict[str, Learner] = {
    **{name: frozen_heads(name) for name in FROZEN},
    "learned": learned_heads(hops=1),
    "two-hops": learned_heads(hops=2),
    "mlp": flattened_network,
    "pooled": pooled_statistics,
    "deep-sets": trained_network("deep-sets"),
    "trained": trained_network("attention"),
}

CLOSED_FORM = ("relu", "relu-biased", "softmax", "softmax-biased", "linear", "mlp", "pooled")
"""Learners without any descent."""

PREDICTED = ("relu", "relu-biased", "softmax", "softmax-biased", "linear")
"""Learners whose error theory predicts: frozen heads."""

NEEDS_QUERY = ("relu-biased", "softmax-biased", "two-hops")
"""Learners that are another learner where a task has no query: a mean c·I multiplies the query,
and a second hop is asked by it."""

NEEDS_TORCH = ("deep-sets", "trained")


def has_torch() -> bool:
    """Whether networks can be trained here."""
    return find_spec("torch") is not None


@lru_cache(maxsize=32)
def has_query(task: str) -> bool:
    """Whether the sets of a task have a query."""
    batch, _ = find_task(task).draw(1, seed=0)
    return batch.query is not None


def is_defined(learner: str, task: str) -> bool:
    """Whether a learner differs from the others on a task."""
    return learner not in NEEDS_QUERY or has_query(task)


# ---------------------------------------------------------------- cells


@dataclass(frozen=True)
class TaskCell(Cell):
    """One learner on one task in one repetition, at several numbers of samples."""

    task: str
    learner: str
    sizes: tuple[int, ...]
    most_samples: int
    """The first n sets of so many, which other learners see too."""
    n_heads: int
    n_test: int
    seed: int
    repetition: int

    @property
    def cost(self) -> float:
        """See `keyhole.lab.cells.Cell`."""
        if self.learner in ("learned", "two-hops"):
            return sum(1.0 + 3e-3 * n for n in self.sizes)
        if self.learner in NEEDS_TORCH:
            return 1.5 * len(self.sizes)
        return 0.02 * len(self.sizes) * len(FROZEN.get(self.learner, [0]))

    def rows(self) -> list[Row]:
        """See `keyhole.lab.cells.Cell`."""
        draw = TaskDraw.of(self.task, self.most_samples, self.n_test, self.seed, self.repetition)
        errors = LEARNERS[self.learner](draw, self.sizes, self.n_heads)
        return [
            {
                "task": self.task,
                "learner": self.learner,
                "n": n,
                "repetition": self.repetition,
                "error": error,
            }
            for n, error in zip(self.sizes, errors, strict=True)
        ]


@dataclass(frozen=True)
class TaskTheoryCell(Cell):
    """What theory predicts for frozen heads on a task: the error at the best ridge and setting.

    From fresh sets, by `kh.theory.conditional_curve`, as a share of Var y.
    """

    task: str
    learner: str
    sizes: tuple[int, ...]
    n_heads: int
    n_sets: int
    seed: int

    @property
    def cost(self) -> float:
        """See `keyhole.lab.cells.Cell`."""
        return 1e-10 * self.n_sets**3 * len(FROZEN[self.learner])

    def rows(self) -> list[Row]:
        """See `keyhole.lab.cells.Cell`."""
        # a seed of no repetition's own
        seed = int(np.random.SeedSequence([self.seed, 2**31]).generate_state(1)[0])
        batch, y = find_task(self.task).draw(self.n_sets, seed)
        curves = []
        for setting in distinct_settings(self.learner, batch):
            features = setting.features(batch, self.n_heads, seed)
            centred = features - features.mean(axis=0)
            unit = float(np.mean(np.square(centred).sum(axis=1)))
            ridges = unit * RIDGES[:, None]
            sizes = np.array(self.sizes)
            errors = conditional_curve(features, y, sizes, ridges, fit_intercept=True)
            curves.append(errors.min(axis=0))
        best = np.min(curves, axis=0) / np.var(y)
        return [
            {"task": self.task, "learner": self.learner, "n": n, "predicted": float(error)}
            for n, error in zip(self.sizes, best, strict=True)
        ]


@dataclass(frozen=True)
class SensitivityCell(Cell):
    """The word sensitivity of a feature map: its largest relative change when one key changes."""

    features: str
    """"mlp", or a learner with frozen heads."""
    dim: int
    n_keys: int
    n_heads: int
    n_sets: int
    seed: int
    repetition: int

    @property
    def cost(self) -> float:
        """See `keyhole.lab.cells.Cell`."""
        return 0.1 + 1e-3 * self.n_keys

    def rows(self) -> list[Row]:
        """See `keyhole.lab.cells.Cell`."""
        seed = int(np.random.SeedSequence([self.seed, self.repetition]).generate_state(1)[0])

        def flattened(batch: SetBatch) -> np.ndarray:
            return mlp_features(batch, sample_mlp_weights(FLAT_WIDTH, self.n_keys, self.dim, seed))

        def attention(batch: SetBatch) -> np.ndarray:
            # heads with the mean 3·I stand for biased ones
            mean = 3.0 if self.features.endswith("-biased") else 0.0
            activation: Activation = "relu" if self.features.startswith("relu") else "softmax"
            features = HeadSetting(activation, mean).features(batch, self.n_heads, seed)
            # the constant coordinate of softmax features is 1 whatever the keys: it is left out
            by_head = features.reshape(len(batch), self.n_heads, self.dim + 1)
            return by_head[:, :, : self.dim].reshape(len(batch), self.n_heads * self.dim)

        feature_map = flattened if self.features == "mlp" else attention
        return [
            {
                "features": self.features,
                "N": self.n_keys,
                "repetition": self.repetition,
                "sensitivity": word_sensitivity(
                    feature_map, self.n_keys, self.dim, self.n_sets, seed
                ),
            }
        ]
