"""What the estimators share: their tags, the memory they may take, labels and their scores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from sklearn import get_config
from sklearn.base import BaseEstimator
from sklearn.utils import assert_all_finite
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from keyhole._checks import check_labels
from keyhole.data.sets import SampleBatch
from keyhole.estimators.inputs import as_heads, check_given, check_lengths
from keyhole.ridge import calibration


class SetEstimator(BaseEstimator):
    """An estimator whose samples are sets."""

    def _store_parameters(self, given: dict[str, Any]) -> None:
        """Keep the arguments of ``__init__``, its ``locals()``, as they are and under their names."""
        for name in self._get_param_names():
            setattr(self, name, given[name])

    def _snapshot(self) -> Any:
        """The model as it is now, for a method that only reads.

        Itself, unless samples may be added to it meanwhile: see `keyhole.estimators.streaming`.
        """
        return self

    def _check_parameters(self) -> None:
        """Raise for a parameter that no fit takes, whatever the samples; `fit` and `load` ask."""
        raise NotImplementedError

    def __sklearn_is_fitted__(self) -> bool:
        """Whether there was a fit. scikit-learn would go through all attributes, which other threads may add to."""
        return not {"layer_", "drawn_heads_", "_stream"}.isdisjoint(vars(self))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags


class KeyContributions:
    """What each key, and each column of extras, adds to a prediction: a layer is a sum over both."""

    layer_: Any

    def contributions(self, X: Any) -> list[Float[np.ndarray, "k ..."]]:
        """Return what each key adds to the prediction of its sample.

        With weights σ(s_mi)/N, f(x) = b + Σ_i c_i and c_i = (1/N) Σ_m M^{-1/2} σ(s_mi) <v_m, x~_i>; for softmax its
        weights stand in the place of σ(s_mi)/N. With infinitely many heads c_i is the prediction for the set of key i
        alone, with the same query and without b, divided by N. Together with ``intercept_`` and, where there are any,
        the sums of `extras_contributions`, they add up to `predict`, of a classifier to ``decision_function``.

        Returns
        -------
        list of n arrays (N_i,) or (N_i, outputs)
            In the order of the keys; of SetGroups, those of all sets of a sample. With ``query="each"`` the part of a
            key is summed over all queries.

        Notes
        -----
        A share or an effect? With ``pooling="sum"``, another activation than "softmax", a query that does not depend
        on the keys ("given") and no extras that count keys, c_i is exactly what removing key i takes away, whatever
        else is in the set, and hence its Shapley value. With ``pooling="mean"`` a removal also changes 1/N for the
        others; under softmax it changes their weights; with ``query="mean"`` or "each", and under a head distribution of several
        hops, it changes queries: there c_i is the key's share of this prediction, and not what would be missing
        without it. Neither says what causes y.

        Cost: for one output about that of `predict`, 2MD for a key and each further output; NumPy computes it wherever
        the model was fitted, in blocks of some 200,000 keys.

        Examples
        --------
        >>> import numpy as np
        >>> import keyhole as kh
        >>> sets = kh.targets.sphere_sets(200, n_keys=3, dim=4, seed=0)
        >>> y = kh.targets.TokenPower(2, dim=4)(sets)  # the mean of x² over the keys, x their first coordinate
        >>> model = kh.AttentionRegressor(100, random_state=0).fit(sets, y)
        >>> parts = model.contributions(sets)
        >>> bool(np.allclose([part.sum() + model.intercept_ for part in parts], model.predict(sets), atol=1e-12))
        True
        >>> x = sets.tokens[:, 0]
        >>> bool(np.corrcoef(np.concatenate(parts), x**2)[0, 1] > 0.9)  # what a key adds goes with its own x²
        True
        """
        model = self._snapshot()  # type: ignore[attr-defined]
        batch = model._ready(X)
        with explained_memory_errors("contributions", batch, None, LESS_FOR_A_PREDICTION):
            parts = model.layer_.contributions(batch, memory_budget=memory_budget())
        ends = np.cumsum(batch.unpooled.token_counts)
        return np.split(outputs(parts, model._has_one_output()), ends[:-1])

    def extras_contributions(self, X: Any) -> Float[np.ndarray, "n c ..."]:
        """Return what each column of extras adds to each prediction: (n, columns), or (n, columns, outputs).

        Coefficient times the column as it is scaled, so that a column at its training mean adds 0. Without extras
        there are no columns, and their sum is 0.

        Examples
        --------
        >>> import numpy as np
        >>> import keyhole as kh
        >>> sets = kh.SetBatch(np.ones((20, 2, 3)), extras=np.arange(20.0)[:, None])
        >>> model = kh.AttentionRegressor(random_state=0).fit(sets, 5 * np.arange(20.0))
        >>> model.extras_contributions(sets[[0, 19]]).round(1).ravel()
        array([-47.5,  47.5])
        """
        model = self._snapshot()  # type: ignore[attr-defined]
        batch = model._ready(X)
        values = model.layer_.extras_values
        if values is None:
            values = np.zeros((0, len(model.layer_.intercept)))
        columns = np.zeros((len(batch), 0)) if batch.extras is None else batch.extras
        return outputs(columns[:, :, None] * values, model._has_one_output())

    def _has_one_output(self) -> bool:
        """Whether predictions have no axis of outputs."""
        return len(self.classes_) == 2 if hasattr(self, "classes_") else bool(self._single)  # type: ignore[attr-defined]


SCORE_WITHOUT_WEIGHT = -1.0
"""Decision function of a class whose samples all have weight 0: what ridge predicts for a column of −1."""


@dataclass(frozen=True)
class ClassColumns:
    """The outputs of the classes that have weight, among all classes.

    A fit has one output for each class that has weight, or a single one for two of them. A class without weight is
    not part of it: its values are 0, its score is `SCORE_WITHOUT_WEIGHT`, its probability is 0.

    Attributes
    ----------
    has_weight : bool array (classes,)
    first : float
        What the score of the first of two classes is, in units of that of the second: −1 for ridge on ±1, 0 for the
        log-odds of the norm ball.
    """

    has_weight: Bool[np.ndarray, " c"]
    first: float

    @classmethod
    def of(
        cls,
        labels: Int[np.ndarray, " n"],
        weights: Float[np.ndarray, " n"] | None,
        n_classes: int,
        first: float,
    ) -> ClassColumns:
        """Those of samples with numbered labels."""
        counted = labels if weights is None else labels[weights > 0]
        return cls(has_weight=np.bincount(counted, minlength=n_classes) > 0, first=first)

    def numbers(self, labels: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Labels numbered among the classes that have weight; −1 for the others."""
        number = np.cumsum(self.has_weight) - 1
        return np.where(self.has_weight[labels], number[labels], -1)

    def of_all_classes(self, outputs: np.ndarray, without_weight: float) -> np.ndarray:
        """Outputs (…, t) of the fit as outputs (…, classes) of all classes."""
        if self.has_weight.all():
            return outputs
        if outputs.shape[-1] == 1:
            outputs = np.concatenate([self.first * outputs, outputs], axis=-1)
        expanded = np.full((*outputs.shape[:-1], len(self.has_weight)), without_weight)
        expanded[..., self.has_weight] = outputs
        return expanded

    def of_layer(self, layer: Any) -> Any:
        """A layer of all classes from the layer of the fit, of finitely or infinitely many heads."""
        changes = {}
        for name in ("values", "dual", "extras_values"):
            if getattr(layer, name, None) is not None:
                changes[name] = self.of_all_classes(getattr(layer, name), without_weight=0.0)
        intercept = self.of_all_classes(layer.intercept, without_weight=SCORE_WITHOUT_WEIGHT)
        return replace(layer, intercept=intercept, **changes)


class LabelScores:
    """Labels from a layer with one column of scores per class, or a single one for two classes."""

    classes_: np.ndarray

    def decision_function(self, X: Any) -> Float[np.ndarray, "n ..."]:
        """Return scores: (n,) for two classes, positive for ``classes_[1]``; otherwise (n, classes)."""
        scores = self._scores(X)  # type: ignore[attr-defined]
        return outputs(scores, len(self.classes_) == 2)

    def predict(self, X: Any) -> Any:
        """Return the label with the highest score."""
        winners = self._class_scores(X).argmax(axis=1)  # first: it says so if nothing was fitted
        return self.classes_[winners]

    def _class_scores(self, X: Any) -> np.ndarray:
        return self._without_weightless(class_scores(self.decision_function(X)))

    def _without_weightless(self, scores: Float[np.ndarray, "*m c"]) -> Float[np.ndarray, "*m c"]:
        """Scores of classes, −∞ for those whose samples all have weight 0: they are never predicted."""
        has_weight = getattr(self, "class_has_weight_", None)
        if has_weight is None or has_weight.all():
            return scores
        return np.where(has_weight, scores, -np.inf)

    def _encode(self, y: Any, batch: Any) -> Int[np.ndarray, " n"]:
        """Number the labels, sorted, as ``classes_``."""
        check_given(self, y)
        y = column_or_1d(y, warn=True)
        assert_all_finite(y, input_name="y", estimator_name=type(self).__name__)
        check_labels(y, "y", "class")
        check_classification_targets(y)
        check_lengths(batch, y, "y")
        self.classes_, labels = np.unique(y, return_inverse=True)
        return np.asarray(labels)

    def _class_columns(
        self, labels: Int[np.ndarray, " n"], weights: Float[np.ndarray, " n"] | None, first: float
    ) -> ClassColumns:
        """The classes that have weight; there must be two of them."""
        columns = ClassColumns.of(labels, weights, len(self.classes_), first)
        if columns.has_weight.sum() < 2:
            n_samples = len(labels) if weights is None else int((weights > 0).sum())
            of_weight = "" if weights is None else " of positive weight"
            raise ValueError(
                f"`y` must have at least two classes: got 1 class, '{self.classes_[columns.has_weight][0]}', in "
                f"{n_samples} samples{of_weight}. There is nothing to tell apart."
            )
        return columns


def class_scores(decision: np.ndarray) -> np.ndarray:
    """One column of scores per class, from a decision function."""
    return calibration.class_scores(decision.reshape(len(decision), -1))


def outputs(array: np.ndarray, single: bool) -> np.ndarray:
    """Drop the last axis, of outputs, if there is just one and nobody asked for the axis."""
    return array[..., 0] if single else array


def finite_heads(n_heads: Any, reason: str) -> int:
    """The number of heads; infinitely many are refused for a reason that ends in what to do."""
    count = as_heads(n_heads)
    if count is None:
        raise ValueError(f"`n_heads` must be finite for {reason}")
    return count


LESS_FOR_A_FIT = (
    "Use fewer samples or fewer heads, tokens of float32, solver='cg' with a number as `alpha`, or fit_batches, which "
    "holds p × p numbers whatever the number of samples is, p = M·(d + 1)."
)
LESS_FOR_A_BALL = "Use fewer samples, fewer heads or dtype='float32', or lower working_memory."
LESS_FOR_A_PREDICTION = "Go through the samples in parts, or lower working_memory."
LESS_FOR_REFITS = "They take a matrix of all pairs of training samples: fit fewer samples."
"""What takes less memory."""


@contextmanager
def explained_memory_errors(
    work: str, batch: SampleBatch, n_heads: float | None, remedy: str
) -> Iterator[None]:
    """Turn a MemoryError within into one that says what takes memory and what to do.

    ``n_heads`` are those of a fit, whose Gram matrix is named; None for work that has none.
    """
    try:
        yield
    except MemoryError as error:
        n = len(batch)
        tokens = int(batch.sets.tokens.nbytes)
        held = [f"copies of the tokens ({_in_words(tokens)} each)"]
        heads = ""
        if n_heads is not None:
            matrix = f"{n} × {n}"
            heads = " and infinitely many heads"
            if math.isfinite(n_heads):
                p = int(n_heads) * (batch.dim + 1)
                matrix += f" or {p} × {p}"
                heads = f" and {int(n_heads)} heads"
            held.insert(0, f"a Gram matrix of {matrix} numbers")
        budget = _in_words(memory_budget())
        raise MemoryError(
            f"memory ran out in {work}: {n} samples of {int(batch.token_counts.sum())} keys in all, of dimension "
            f"{batch.dim}{heads}. Beside blocks of scikit-learn's working_memory ({budget}) it holds "
            f"{' and '.join(held)}. {remedy}"
        ) from error


def _in_words(n_bytes: int) -> str:
    """A number of bytes in mebibytes, or gibibytes.

    >>> _in_words(2**26), _in_words(3 * 2**40)
    ('64 MiB', '3072 GiB')
    """
    return f"{n_bytes / 2**20:.0f} MiB" if n_bytes < 2**33 else f"{n_bytes / 2**30:.0f} GiB"


def memory_budget() -> int:
    """scikit-learn's ``working_memory``, in bytes: 1 GiB unless the user says otherwise."""
    return int(get_config()["working_memory"] * 2**20)
