"""What speaks for a prediction and what against it: contributions as displays show them.

Contributions compare a prediction with what is left of it, such as the intercept. That is the
answer
to no set anybody has, and where one label is rare its score is far below zero: the key of largest
contribution then often argues against the label that was predicted. Displays therefore

- give every key an equal share of what is left, c_i + b/N, which for one layer with
  ``pooling="mean"`` and a given query is f({x_i})/N; and
- take the side of the label that was predicted, so that positive numbers speak for it.

With extras they add up to the prediction: to f(x) of a regressor, to ±decision_function of two
labels, and of more labels to the lead of the one that was predicted over the one that came second.

A column of a table has an effect instead: how much lower the same number would be if the column had
its training mean in every row of the set. Effects of columns do not add up to the prediction: two
columns that only say something together both have the whole effect.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from keyhole.data.schema import Schema
from keyhole.data.tokens import SetStatistics
from keyhole.estimators.classes import scores_per_class

_POSITION = re.compile(r"\[\d+\]$")
NOVEL = 0.99
"""Novelty above which a sample is named. By construction one in a hundred ordinary samples is as
far out, so that a single one proves no extrapolation.
"""


@dataclass(frozen=True)
class Evidence:
    """What every key and every sample-level feature says about one output of some samples.

    Attributes
    ----------
    keys : list of n arrays (N_i,)
        In the order of the keys; the intercept is shared equally among them.
    extras : array (n, features)
    labels : array (n,) or None
        Of a classifier, the labels that were predicted: positive numbers speak for them.
    others : array (n,) or None
        The labels that negative numbers speak for: the other one of two, the second best of more.
    directions : array (n, t)
        What the t outputs are weighed by for the number that all this adds up to.
    """

    keys: list[Float[np.ndarray, " _"]]
    extras: Float[np.ndarray, "n c"]
    directions: Float[np.ndarray, "n t"] = field(repr=False)
    labels: np.ndarray | None = None
    others: np.ndarray | None = None


def evidence_of_predictions(model: Any, X: Any) -> list[Evidence]:
    """One `Evidence` for each output of a regressor; of a classifier one for the labels predicted.

    Examples
    --------
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(100, n_keys=4, dim=3, seed=0)
    >>> size = kh.targets.TokenPower(2, dim=3)(sets)
    >>> model = kh.AttentionClassifier(50, random_state=0).fit(sets, size > 0.3)
    >>> (evidence,) = evidence_of_predictions(model, sets[:2])
    >>> totals = [part.sum() for part in evidence.keys]
    >>> bool(np.allclose(totals, np.abs(model.decision_function(sets[:2]))))
    True
    """
    # contributions (N_i, t) of keys and (n, c, t) of extras, always with an axis of outputs
    parts, rest = model.contributions(X, return_rest=True)
    rest = rest.reshape(len(parts), -1)
    n_outputs = rest.shape[1]
    of_extras = _extras_contributions(model, X, n_outputs)
    rest = rest - of_extras.sum(axis=1)
    of_keys = []
    for part, left in zip(parts, rest, strict=True):
        of_keys.append(part.reshape(len(part), n_outputs) + left / len(part))

    # numbers: every output as it is
    if not hasattr(model, "classes_"):
        unit_vectors = np.eye(n_outputs)
        return [
            Evidence(
                keys=[part[:, j] for part in of_keys],
                extras=of_extras[:, :, j],
                directions=np.tile(unit_vectors[j], (len(of_keys), 1)),
            )
            for j in range(n_outputs)
        ]

    # labels: the one predicted, and the one it is compared with
    scores = scores_per_class(model.decision_function(X))
    best = scores.argmax(axis=1)
    rows = np.arange(len(scores))
    scores[rows, best] = -np.inf
    second = scores.argmax(axis=1)

    # the difference of their outputs; two labels share one, which is the score of the second label
    directions = np.zeros((len(scores), n_outputs))
    if n_outputs == 1:
        directions[:, 0] = np.where(best == 1, 1.0, -1.0)
    else:
        directions[rows, best] = 1.0
        directions[rows, second] = -1.0
    return [
        Evidence(
            keys=[part @ direction for part, direction in zip(of_keys, directions, strict=True)],
            extras=np.einsum("nct,nt->nc", of_extras, directions),
            directions=directions,
            labels=model.classes_[best],
            others=model.classes_[second],
        )
    ]


def _extras_contributions(model: Any, X: Any, n_outputs: int) -> Float[np.ndarray, "n c t"]:
    """What each sample-level feature adds; nothing where a second kernel has no parts of them.

    What they add together is then shared among the rows, as the intercept is.
    """
    try:
        extras = model.extras_contributions(X)
    except ValueError:
        return np.zeros((len(X), model.n_extras_in_, n_outputs))
    return np.reshape(extras, (*extras.shape[:2], n_outputs))


@dataclass(frozen=True)
class TableColumn:
    """A column of a table, and the coordinates it became.

    Attributes
    ----------
    name : str
    of : "rows", "query" or "sample"
        What has it: the rows of a set, its query, or the sample, as sample-level features (extras).
    coordinates : slice
        Among those of the keys, the query or the extras.
    """

    name: str
    of: Literal["rows", "query", "sample"]
    coordinates: slice


def table_columns(schema: Schema, samples: Any) -> list[TableColumn]:
    """The columns that samples were read from; without a table one for each coordinate.

    Examples
    --------
    >>> from keyhole.data.schema import Coding
    >>> import keyhole as kh
    >>> codings = (Coding("colour", "one-hot", ("blue", "red")),)
    >>> schema = Schema(3, False, ("price", "colour=blue", "colour=red"), codings=codings)
    >>> for column in table_columns(schema, kh.SetBatch([[[9.5, 0.0, 1.0]]])):
    ...     print(column.name, column.of, column.coordinates)
    price rows slice(0, 1, None)
    colour rows slice(1, 3, None)
    """
    # the names of all coordinates, by what has them
    sets = samples.sets
    names_of: dict[Literal["rows", "query", "sample"], list[str]] = {}
    names_of["rows"] = _as_many(schema.names, sets.dim, "x")
    if sets.query is not None:
        names_of["query"] = _as_many(schema.names_of("query"), sets.query.shape[1], "query")
    if samples.extras is not None:
        names_of["sample"] = _as_many(schema.names_of("extras"), samples.extras.shape[1], "extra")

    # neighbours that come from one column: of text, or of lists, such as keys[0] and keys[1]
    column_of = {name: coding.column for coding in schema.codings for name in coding.names}
    columns = []
    for of, names in names_of.items():
        start = 0
        for name, group in groupby(column_of.get(name, _POSITION.sub("", name)) for name in names):
            stop = start + len(list(group))
            columns.append(TableColumn(name=name, of=of, coordinates=slice(start, stop)))
            start = stop
    return columns


def _as_many(names: Sequence[str], count: int, otherwise: str) -> list[str]:
    """Names of so many coordinates: those given, that of a column of lists, or plain numbers."""
    if len(names) == count:
        return list(names)
    if len(names) == 1:
        return list(names) * count
    return [f"{otherwise}{j}" for j in range(count)]


def effects_of_columns(
    model: Any, X: Any, columns: Sequence[TableColumn], evidence_of_outputs: Sequence[Evidence]
) -> list[Float[np.ndarray, "n c"]] | None:
    """For each output, how much lower each sample's number would be with a column at its mean.

    The mean is that over the training sets of the mean of their rows. None where the model has no
    training samples (``kh.save(…, keep="predict")``, or a fit in batches).

    Examples
    --------
    >>> import keyhole as kh
    >>> sets = kh.SetBatch(np.random.default_rng(0).normal(size=(200, 3, 2)))
    >>> first = np.add.reduceat(sets.tokens[:, 0], sets.offsets[:-1])
    >>> model = kh.AttentionRegressor(100, random_state=0).fit(sets, first)
    >>> columns = table_columns(Schema(2, False, ("a", "b")), sets)
    >>> evidence = evidence_of_predictions(model, sets[:1])
    >>> [effects] = effects_of_columns(model, sets[:1], columns, evidence)
    >>> bool(abs(effects[0, 0]) > 10 * abs(effects[0, 1]))
    True
    """
    training = getattr(model, "_training", None)
    if training is None:
        return None
    means = _training_means(training.samples.numpy())
    usual = _outputs(model, X)
    effects = [np.empty((len(usual), len(columns))) for _ in evidence_of_outputs]
    for c, column in enumerate(columns):
        differences = usual - _outputs(model, _at_mean(X, column, means[column.of]))
        for effect, evidence in zip(effects, evidence_of_outputs, strict=True):
            effect[:, c] = (differences * evidence.directions).sum(axis=1)
    return effects


def _outputs(model: Any, X: Any) -> Float[np.ndarray, "n t"]:
    """What contributions add up to: predictions of numbers, scores of labels."""
    if hasattr(model, "classes_"):
        return np.reshape(model.decision_function(X), (len(X), -1))
    return np.reshape(model.predict(X), (len(X), -1))


def _training_means(samples: Any) -> dict[str, Float[np.ndarray, " _"]]:
    """The mean row of the training sets, their mean query and their mean sample-level features."""
    means = {"rows": SetStatistics.of(samples).mean.mean(axis=0)}
    if samples.sets.query is not None:
        means["query"] = np.mean(samples.sets.query, axis=0, dtype=np.float64)
    if samples.extras is not None:
        means["sample"] = np.mean(samples.extras, axis=0, dtype=np.float64)
    return means


def _at_mean(samples: Any, column: TableColumn, mean: Float[np.ndarray, " _"]) -> Any:
    """The same samples with one column at its mean."""

    def changed(numbers: Float[np.ndarray, "r _"]) -> Float[np.ndarray, "r _"]:
        numbers = numbers.copy()
        numbers[:, column.coordinates] = mean[column.coordinates]
        return numbers

    def unchanged(numbers: Float[np.ndarray, "r _"]) -> Float[np.ndarray, "r _"]:
        return numbers

    if column.of == "sample":
        return samples.with_extras(changed(samples.extras))
    if column.of == "rows":
        sets = samples.sets.mapped(changed, unchanged)
    else:
        sets = samples.sets.mapped(unchanged, changed)
    return samples.with_sets(sets)
