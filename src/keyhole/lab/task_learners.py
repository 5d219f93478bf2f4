"""What learns the tasks of the literature: eleven learners on nested draws of a task.

A cell names a task (`keyhole.theory.tasks`), a model of `keyhole.lab.cells.TASK_MODELS`, a number
of samples and a repetition. Every learner sees the same samples, and none sees the test sets
before its error is measured: penalties and head distributions are chosen by leave-one-out,
networks stop by a part of the training samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Protocol

import numpy as np
from jaxtyping import Float

from keyhole.attention.activations import Activation
from keyhole.attention.features import attention_features, mlp_features
from keyhole.attention.heads import GaussianHeads, sample_mlp_weights
from keyhole.attention.kernels import mlp_kernel
from keyhole.data.sets import SetBatch
from keyhole.lab.cells import Cell, Values
from keyhole.lab.factorised import FactorisedGram
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
    def of(cls, cell: Cell) -> TaskDraw:
        """One draw for all learners, so that they are compared on the same sets."""
        words = [cell.seed, cell.repetition, *cell.target.encode()]
        train_seed, test_seed, fit_seed = (
            int(word) for word in np.random.SeedSequence(words).generate_state(3)
        )
        task = find_task(cell.target)
        train, y = task.draw(cell.most_samples, train_seed)
        test, truth = task.draw(cell.n_test, test_seed)
        return cls(train=train, y=y, test=test, truth=truth, fit_seed=fit_seed)

    def error(self, predictions: Float[np.ndarray, " test"]) -> float:
        """Mean squared error on the test sets as a share of Var y."""
        return float(np.mean(np.square(predictions - self.truth)) / np.var(self.truth))


class TaskLearner(Protocol):
    """Anything that is fitted to the first n samples of a draw, for several n."""

    def outcomes(
        self, draw: TaskDraw, sizes: Sequence[int], n_heads: int
    ) -> Iterator[tuple[int, Values]]:
        """The values of a cell, its error among them, for every n."""


# ---------------------------------------------------------------- closed form: frozen heads


@dataclass(frozen=True)
class HeadSetting:
    """Heads that are drawn once: W has the mean c·I and entries of the standard deviation scale."""

    activation: Activation
    mean: float = 0.0
    scale: float = 0.5

    def features(self, batch: SetBatch, n_heads: int, seed: int) -> Float[np.ndarray, "n p"]:
        """Features of M heads; the seed names the draw."""
        distribution = GaussianHeads(mean=self.mean, scale=self.scale)
        heads = distribution.sample(n_heads, batch.dim, seed)
        return attention_features(batch, heads, self.activation)


@dataclass(frozen=True)
class FrozenHeads:
    """Ridge on features of frozen heads; of several settings leave-one-out chooses one."""

    settings: tuple[HeadSetting, ...]

    def distinct_settings(self, batch: SetBatch) -> tuple[HeadSetting, ...]:
        """The settings that differ on these sets: without a query a mean c·I does nothing."""
        if batch.query is not None:
            return self.settings
        by_noise = {(s.activation, s.scale): s for s in reversed(self.settings)}
        return tuple(reversed(by_noise.values()))

    def outcomes(
        self, draw: TaskDraw, sizes: Sequence[int], n_heads: int
    ) -> Iterator[tuple[int, Values]]:
        """See `TaskLearner`."""
        # Gram matrices of all training sets, which smaller n take the corner of
        kernels = []
        for setting in self.distinct_settings(draw.train):
            features = setting.features(draw.train, n_heads, draw.fit_seed)
            of_test = setting.features(draw.test, n_heads, draw.fit_seed)
            kernels.append((features @ features.T, of_test @ features.T))

        # for every n, the setting with the least leave-one-out error
        for n in sizes:
            fits = []
            for gram, cross in kernels:
                factorised = FactorisedGram.of(np.asfortranarray(gram[:n, :n]))
                fits.append(factorised.outcome(draw.y[:n], cross[:, :n], draw.truth))
            best = min(range(len(fits)), key=lambda k: fits[k]["loo"])
            yield n, {**fits[best], "setting": float(best)}

    def predicted(
        self, task: SetTask, sizes: Sequence[int], n_heads: int, n_sets: int, seed: int
    ) -> dict[int, float]:
        """What theory predicts for every n: the error at the best ridge of the best setting.

        From ``n_sets`` fresh sets, by `kh.theory.conditional_curve`, as a share of Var y.
        """
        batch, y = task.draw(n_sets, seed)
        curves = []
        for setting in self.distinct_settings(batch):
            features = setting.features(batch, n_heads, seed)
            centred = features - features.mean(axis=0)
            unit = float(np.mean(np.square(centred).sum(axis=1)))
            ridges = unit * RIDGES[:, None]
            errors = conditional_curve(features, y, np.array(sizes), ridges, fit_intercept=True)
            curves.append(errors.min(axis=0))
        best = np.min(curves, axis=0) / np.var(y)
        return {n: float(error) for n, error in zip(sizes, best, strict=True)}


@dataclass(frozen=True)
class FlattenedNetwork:
    """Ridge on infinitely many random features of the flattened input: no notion of a key."""

    def outcomes(
        self, draw: TaskDraw, sizes: Sequence[int], n_heads: int
    ) -> Iterator[tuple[int, Values]]:
        """See `TaskLearner`."""
        gram = mlp_kernel(draw.train)
        cross = mlp_kernel(draw.test, draw.train)
        for n in sizes:
            factorised = FactorisedGram.of(np.asfortranarray(gram[:n, :n]))
            yield n, factorised.outcome(draw.y[:n], cross[:, :n], draw.truth)


@dataclass(frozen=True)
class PooledStatistics:
    """Ridge on mean, spread and extremes of every coordinate of the keys, and the query."""

    def outcomes(
        self, draw: TaskDraw, sizes: Sequence[int], n_heads: int
    ) -> Iterator[tuple[int, Values]]:
        """See `TaskLearner`."""
        features = pooled_statistics(draw.train)
        of_test = pooled_statistics(draw.test)
        for n in sizes:
            # units of the training samples; a column that does not vary stays as it is
            spread = features[:n].std(axis=0)
            unit = np.where(spread > 0, spread, 1.0)
            scaled = features[:n] / unit
            factorised = FactorisedGram.of(np.asfortranarray(scaled @ scaled.T))
            cross = (of_test / unit) @ scaled.T
            yield n, factorised.outcome(draw.y[:n], cross, draw.truth)


def pooled_statistics(batch: SetBatch) -> Float[np.ndarray, "n p"]:
    """Mean, standard deviation, largest and smallest of every coordinate of the keys, and query."""
    keys = batch.tokens.reshape(len(batch), -1, batch.dim)
    columns = [keys.mean(axis=1), keys.std(axis=1), keys.max(axis=1), keys.min(axis=1)]
    if batch.query is not None:
        columns.append(batch.query)
    return np.concatenate(columns, axis=1)


# ---------------------------------------------------------------- learned attention


@dataclass(frozen=True)
class LearnedAttention:
    """Softmax heads whose distribution is learned, of one hop or of several."""

    hops: int

    def outcomes(
        self, draw: TaskDraw, sizes: Sequence[int], n_heads: int
    ) -> Iterator[tuple[int, Values]]:
        """See `TaskLearner`."""
        # the estimators are imported where they are used: they bring scikit-learn along
        from keyhole.attention.learned import LearnedHeads
        from keyhole.estimators.attention import AttentionRegressor

        for n in sizes:
            model = AttentionRegressor(
                n_heads,
                heads=LearnedHeads(hops=self.hops),
                activation="softmax",
                pooling="mean",
                scaling="none",
                query="given",
                random_state=draw.fit_seed % 2**31,
            )
            model.fit(draw.train[:n], draw.y[:n])
            yield n, {"error": draw.error(model.predict(draw.test))}


@dataclass(frozen=True)
class TrainedNetwork:
    """A network of torch, trained by gradient descent: "deep-sets" or "attention"."""

    kind: str

    def outcomes(
        self, draw: TaskDraw, sizes: Sequence[int], n_heads: int
    ) -> Iterator[tuple[int, Values]]:
        """See `TaskLearner`."""
        from keyhole.lab.trained_networks import fit_network

        for n in sizes:
            predict = fit_network(self.kind, draw.train[:n], draw.y[:n], draw.fit_seed % 2**31)
            yield n, {"error": draw.error(predict(draw.test))}


LEARNERS: dict[str, TaskLearner] = {
    "relu": FrozenHeads((HeadSetting("relu"),)),
    "relu-biased": FrozenHeads(tuple(HeadSetting("relu", mean=c) for c in (1.0, 3.0, 10.0))),
    "softmax": FrozenHeads((HeadSetting("softmax"), HeadSetting("softmax", scale=3.0))),
    "softmax-biased": FrozenHeads(tuple(HeadSetting("softmax", mean=c) for c in (1.0, 3.0, 10.0))),
    "softmax-sharp": FrozenHeads((HeadSetting("softmax", mean=10.0),)),
    "linear": FrozenHeads((HeadSetting("linear"), HeadSetting("linear", mean=3.0))),
    "learned": LearnedAttention(hops=1),
    "two-hops": LearnedAttention(hops=2),
    "mlp": FlattenedNetwork(),
    "pooled": PooledStatistics(),
    "deep-sets": TrainedNetwork("deep-sets"),
    "trained": TrainedNetwork("attention"),
}
"""The learners by the model of a cell."""

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
"""The learners as a reader sees them."""

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


def is_defined(model: str, task: str) -> bool:
    """Whether a learner differs from the others on a task."""
    return model not in NEEDS_QUERY or has_query(task)


# ---------------------------------------------------------------- cells


def compute_tasks(cells: list[Cell]) -> Iterator[tuple[Cell, Values]]:
    """Compute cells of one task, one learner and one repetition, smallest n first."""
    first = cells[0]
    if first.learner == "sensitivity":
        for cell in cells:
            yield cell, {"sensitivity": _sensitivity(cell)}
        return
    sizes = [cell.n_samples for cell in cells]
    if first.learner == "task-theory":
        learner = LEARNERS[first.model]
        assert isinstance(learner, FrozenHeads)  # `PREDICTED` has no others
        task = find_task(first.target)
        n_heads = first.n_heads or 1
        # a seed of no repetition's own
        seed = int(np.random.SeedSequence([first.seed, 2**31]).generate_state(1)[0])
        predicted = learner.predicted(task, sizes, n_heads, first.n_test, seed)
        for cell in cells:
            yield cell, {"error": predicted[cell.n_samples]}
        return
    draw = TaskDraw.of(first)
    outcomes = LEARNERS[first.model].outcomes(draw, sizes, first.n_heads or 1)
    for cell, (_, values) in zip(cells, outcomes, strict=True):
        yield cell, values


def _sensitivity(cell: Cell) -> float:
    """The word sensitivity of a feature map, for the N and the d of a cell."""
    seed = int(np.random.SeedSequence([cell.seed, cell.repetition]).generate_state(1)[0])
    n_heads = cell.n_heads or 1

    def flattened(batch: SetBatch) -> np.ndarray:
        return mlp_features(batch, sample_mlp_weights(FLAT_WIDTH, cell.n_keys, cell.dim, seed))

    def attention(batch: SetBatch) -> np.ndarray:
        # heads with the mean 3·I stand for biased ones
        mean = 3.0 if cell.model.endswith("-biased") else 0.0
        activation: Activation = "relu" if cell.model.startswith("relu") else "softmax"
        features = HeadSetting(activation, mean).features(batch, n_heads, seed)
        # the constant coordinate of softmax features is 1 whatever the keys: it is left out
        by_head = features.reshape(len(batch), n_heads, cell.dim + 1)
        return by_head[:, :, : cell.dim].reshape(len(batch), n_heads * cell.dim)

    features = flattened if cell.model == "mlp" else attention
    return word_sensitivity(features, cell.n_keys, cell.dim, cell.n_test, seed)


def task_cost(cell: Cell) -> float:
    """Seconds on one core, roughly."""
    n = cell.n_samples
    if cell.learner == "sensitivity":
        return 0.1 + 1e-3 * cell.n_keys
    if cell.learner == "task-theory":
        # one eigendecomposition of all sets serves all n: it is counted with each alike
        return 0.02 + len(_settings(cell.model)) * 1e-10 * cell.n_test**3
    if cell.model in ("learned", "two-hops"):
        return 1.0 + 3e-3 * n
    if cell.model in NEEDS_TORCH:
        return 1.5
    # features and their Gram matrix, then a factorisation for each setting
    gram = n * (n + 2 * cell.n_test) * (cell.n_heads or 1) * cell.dim / 2e10
    return 0.02 + len(_settings(cell.model)) * (gram + 8 * n**3 / 3 / 1.5e10)


def _settings(model: str) -> Sequence[HeadSetting | None]:
    """The settings that a learner tries; one that is not of frozen heads has one."""
    learner = LEARNERS[model]
    if isinstance(learner, FrozenHeads):
        return learner.settings
    return [None]
