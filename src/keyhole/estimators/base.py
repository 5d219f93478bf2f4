"""What estimators of one fixed layer share: samples that are sets, and contributions."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float
from sklearn import get_config
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from keyhole.data.tokens import TokenRule
from keyhole.estimators.validation import as_samples

MIN_MEMORY_BUDGET = 2**14
"""Bytes below which blocks cost more in calls than they save in memory."""


class SetModel(BaseEstimator):
    """A fitted layer behind a scikit-learn surface: it prepares samples and predicts.

    Subclasses set ``tokens_`` (what is done to tokens first) and ``layer_`` (what predicts) in
    ``fit``, and say by `_has_one_output` whether predictions have an axis of outputs.
    """

    tokens_: TokenRule
    layer_: Any

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags

    def _has_one_output(self) -> bool:
        """Whether predictions have no axis of outputs."""
        raise NotImplementedError

    def _prepared(self, X: Any) -> Any:
        """Samples as the layer takes them, checked."""
        check_is_fitted(self)
        samples = as_samples(self, X, reset=False).numpy()
        return self.tokens_.apply(samples)

    def _layer_outputs(self, X: Any) -> Float[np.ndarray, "n t"]:
        """f of every sample, all outputs."""
        prepared = self._prepared(X)
        return np.asarray(self.layer_.predict(prepared))

    def contributions(self, X: Any, *, return_rest: bool = False) -> Any:
        """Return what each row adds to the prediction of its sample.

        They add up to the prediction less what is left: the intercept, and what sample-level
        features add (``return_rest``).

        Returns
        -------
        list of n arrays (N_i,) or (N_i, outputs)
            In the order of the rows.
        array (n,) or (n, outputs)
            With ``return_rest``.
        """
        check_is_fitted(self)
        given = as_samples(self, X, reset=False).numpy()
        parts = self.layer_.contributions(self.tokens_.apply(given))
        single = self._has_one_output()
        ends = np.cumsum(given.token_counts)
        per_sample = np.split(without_output_axis(parts, single), ends[:-1])
        if not return_rest:
            return per_sample
        of_extras = self.extras_contributions(X)
        rest = np.reshape(self.layer_.intercept, (1, -1)) + np.reshape(
            of_extras.sum(axis=1), (len(given), -1)
        )
        return per_sample, without_output_axis(rest, single)

    def extras_contributions(self, X: Any) -> Float[np.ndarray, "n c ..."]:
        """Return what each sample-level feature adds: (n, features) or (n, features, outputs)."""
        prepared = self._prepared(X)
        values = self.layer_.extras_values
        if values is None:
            parts = np.zeros((len(prepared), 0, len(self.layer_.intercept)))
        else:
            parts = prepared.extras[:, :, None] * values
        return without_output_axis(parts, self._has_one_output())


def memory_budget() -> int:
    """scikit-learn's ``working_memory``, in bytes: 1 GiB unless the user says otherwise."""
    return max(MIN_MEMORY_BUDGET, int(get_config()["working_memory"] * 2**20))


def without_output_axis(array: np.ndarray, single: bool) -> np.ndarray:
    """Drop the last axis, of outputs, if there is just one and y had no axis for it."""
    if single:
        return array[..., 0]
    return array
