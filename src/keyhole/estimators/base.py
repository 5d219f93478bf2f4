"""What all estimators share: samples that are sets, prepared samples, contributions, and labels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from jaxtyping import Float
from sklearn import get_config
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from keyhole.attention.backends import backend_for
from keyhole.data.sets import SampleBatch
from keyhole.data.tokens import TokenRule
from keyhole.estimators.validation import as_samples
from keyhole.key_selection import KeySelection


class SetModel(BaseEstimator):
    """A fitted layer behind a scikit-learn surface: it prepares samples and predicts.

    Subclasses set ``tokens_`` (what is done to tokens first) and ``layer_`` (what predicts) in
    ``fit``, ``key_selection_`` where the layer sees some keys of each set only, and say by
    `_has_one_output` whether predictions have an axis of outputs.
    """

    tokens_: TokenRule
    layer_: Any
    key_selection_: KeySelection | None = None

    def __sklearn_is_fitted__(self) -> bool:
        """Whether there was a fit.

        scikit-learn would go through all attributes, which other threads may add to meanwhile.
        """
        return not {"layer_", "drawn_heads_", "stream_"}.isdisjoint(vars(self))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags

    def _has_one_output(self) -> bool:
        """Whether predictions have no axis of outputs."""
        raise NotImplementedError

    def _snapshot(self) -> Any:
        """The model as it is now, for a method that only reads: itself, unless batches may come."""
        return self

    def _prepared(self, X: Any) -> Any:
        """Samples as the layer takes them.

        They are checked and brought to where it is computed, and keys that the layer does not see
        are dropped; then the token rule scales tokens, makes queries and sets the pooling.
        """
        check_is_fitted(self)
        samples = backend_for(self.layer_.device).placed(as_samples(self, X, reset=False))
        with explained_memory_errors("predict", samples, None, LESS_FOR_A_PREDICTION):
            if self.key_selection_ is not None:
                samples = self.key_selection_.apply(samples)
            return self.tokens_.apply(samples)

    def _layer_outputs(self, X: Any) -> Float[np.ndarray, "n t"]:
        """f of every sample, all outputs."""
        samples = self._prepared(X)
        with explained_memory_errors("predict", samples, None, LESS_FOR_A_PREDICTION):
            return np.asarray(self.layer_.predict(samples, memory_budget=memory_budget()))

    def contributions(self, X: Any) -> list[Float[np.ndarray, "k ..."]]:
        """Return what each key adds to the prediction of its sample.

        The plain version is `keyhole.textbook.contributions`;
        docs/explanation/contributions_and_intervals.md says how to read them.

        The prediction is f(x) = b + Σ_i c_i, where key i adds c_i = (1/N) Σ_m M^{-1/2} σ(s_mi)
        <v_m, x~_i>. Under softmax, its weights replace σ(s_mi)/N. With infinitely many heads c_i is
        the prediction, without b, for the set of key i alone and the same query, divided by N. The
        c_i, ``intercept_`` and the sums of `extras_contributions` add up to `predict`, for a
        classifier to ``decision_function``.

        Returns
        -------
        list of n arrays (N_i,) or (N_i, outputs)
            In the order of the keys; of SetGroups, those of all sets of a sample. With
            ``query="each"`` the part of a key is summed over all queries. A key that a selection of
            keys has dropped adds 0.

        Notes
        -----
        Is c_i what the prediction would lose without key i? It is under four conditions, and then
        c_i is also the Shapley value of the key. They are ``pooling="sum"``, another activation
        than "softmax", a query that does not depend on the keys ("given"), and no extras that count
        keys. Otherwise c_i is the share of the key in this prediction. With ``pooling="mean"``
        removing a key also changes 1/N for the others, and under softmax their weights. With
        ``query="mean"`` or "each", and with several hops, it changes queries. Contributions do not
        say what causes y.

        For one output this takes about as long as `predict`. Each further output takes 2MD
        operations for each key. A device computes it for sets of 64 keys and more and finitely many
        heads, NumPy for all others.

        Examples
        --------
        >>> import numpy as np
        >>> import keyhole as kh
        >>> sets = kh.targets.sphere_sets(200, n_keys=3, dim=4, seed=0)
        >>> # the mean of x² over the keys, x their first coordinate
        >>> y = kh.targets.TokenPower(2, dim=4)(sets)
        >>> model = kh.AttentionRegressor(100, random_state=0).fit(sets, y)
        >>> parts = model.contributions(sets)
        >>> totals = [part.sum() + model.intercept_ for part in parts]
        >>> bool(np.allclose(totals, model.predict(sets), atol=1e-12))
        True
        >>> x = sets.tokens[:, 0]
        >>> # what a key adds goes with its own x²
        >>> bool(np.corrcoef(np.concatenate(parts), x**2)[0, 1] > 0.9)
        True
        """
        model = self._snapshot()
        check_is_fitted(model)
        given = backend_for(model.layer_.device).placed(as_samples(model, X, reset=False))
        with explained_memory_errors("contributions", given, None, LESS_FOR_A_PREDICTION):
            # the keys that the layer sees
            is_kept = np.ones(given.sets.n_tokens, bool)
            seen = given
            if model.key_selection_ is not None:
                is_kept = model.key_selection_.kept_keys(given)
                seen = given.with_sets(given.sets.with_kept_keys(is_kept))

            # what each of them adds; the others add nothing
            seen_parts = model.layer_.contributions(
                model.tokens_.apply(seen), memory_budget=memory_budget()
            )
            parts = np.zeros((len(is_kept), seen_parts.shape[1]))
            parts[is_kept] = seen_parts
        if model._has_one_output():
            parts = parts[:, 0]

        # one array per sample; the keys of all samples stand one after the other
        ends = np.cumsum(given.token_counts)
        return np.split(parts, ends[:-1])

    def extras_contributions(self, X: Any) -> Float[np.ndarray, "n c ..."]:
        """Return what each sample-level feature adds: (n, features) or (n, features, outputs).

        It is the coefficient times the feature as it is scaled, so that a feature at its training
        mean adds 0. Without extras the array has no columns.

        Examples
        --------
        >>> import numpy as np
        >>> import keyhole as kh
        >>> sets = kh.SetBatch(np.ones((20, 2, 3)), extras=np.arange(20.0)[:, None])
        >>> model = kh.AttentionRegressor(random_state=0).fit(sets, 5 * np.arange(20.0))
        >>> model.extras_contributions(sets[[0, 19]]).round(1).ravel()
        array([-47.5,  47.5])
        """
        model = self._snapshot()
        samples = model._prepared(X)
        values = model.layer_.extras_values
        if values is None:
            extras = np.zeros((len(samples), 0))
            values = np.zeros((0, len(model.layer_.intercept)))
        else:
            extras = samples.extras
        parts = extras[:, :, None] * values
        return without_output_axis(parts, model._has_one_output())

    def to_torch(self) -> Any:
        """Return the fitted layer as a ``torch.nn.Module``, with the same outputs to rounding.

        ``module(keys, mask, query, extras)`` takes padded sets; `keyhole.export.torch_module` names
        its parameters, all of which can be trained (docs/howto/deploy.md). It takes torch, and
        finitely many heads.
        """
        from keyhole.export import to_torch

        check_is_fitted(self)
        return to_torch(self._snapshot())


LESS_FOR_A_FIT = (
    "Use fewer samples or fewer heads, tokens of float32, solver='cg' with a number as `alpha`, or "
    "fit_batches, which holds p × p numbers whatever the number of samples is, p = M·(d + 1)."
)
LESS_FOR_A_BALL = "Use fewer samples or fewer heads."
LESS_FOR_A_PREDICTION = "Go through the samples in parts, or lower working_memory."
LESS_FOR_REFITS = "They take a matrix of all pairs of training samples: fit fewer samples."
"""What takes less memory."""


@contextmanager
def explained_memory_errors(
    work: str, batch: SampleBatch, n_heads: float | str | None, remedy: str
) -> Iterator[None]:
    """Turn a MemoryError within into one that says what takes memory and what to do.

    ``n_heads`` are those of a fit, whose Gram matrix is named; None for work that has none.
    """
    try:
        yield
    except MemoryError as error:
        # what any work holds
        n = len(batch)
        tokens = int(batch.sets.tokens.nbytes)
        held = [f"copies of the tokens ({_in_words(tokens)} each)"]

        # what a fit holds: an n × n matrix, or p × p where there are p features
        heads = ""
        if n_heads is not None:
            matrix = f"{n} × {n}"
            if isinstance(n_heads, str):
                heads = " and heads whose number is automatic"
            elif math.isinf(n_heads):
                heads = " and infinitely many heads"
            else:
                p = int(n_heads) * (batch.dim + 1)
                matrix += f" or {p} × {p}"
                heads = f" and {int(n_heads)} heads"
            held.insert(0, f"a Gram matrix of {matrix} numbers")
        budget = _in_words(memory_budget())
        raise MemoryError(
            f"memory ran out in {work}: {n} samples of {int(batch.token_counts.sum())} keys in "
            f"all, of dimension {batch.dim}{heads}. Beside blocks of scikit-learn's working_memory "
            f"({budget}) it holds {' and '.join(held)}. {remedy}"
        ) from error


@contextmanager
def explained_memory_errors_of_sums(n_features: int) -> Iterator[None]:
    """Turn a MemoryError within a fit in batches into one that says what its sums take.

    ``n_features`` are p = M·(d + 1).
    """
    try:
        yield
    except MemoryError as error:
        raise MemoryError(
            "memory ran out in a fit in batches. Beside blocks of scikit-learn's working_memory "
            f"({_in_words(memory_budget())}) and the batch that is added it holds four p × p "
            f"matrices ({_in_words(4 * 8 * n_features**2)}), p = {n_features} features. Use fewer "
            "heads, smaller batches, or lower working_memory."
        ) from error


def _in_words(n_bytes: int) -> str:
    """A number of bytes in mebibytes, or gibibytes.

    >>> _in_words(2**26), _in_words(3 * 2**40)
    ('64 MiB', '3072 GiB')
    """
    if n_bytes < 2**33:
        return f"{n_bytes / 2**20:.0f} MiB"
    return f"{n_bytes / 2**30:.0f} GiB"


MIN_MEMORY_BUDGET = 2**14
"""Bytes below which blocks cost more in calls than they save in memory."""


def memory_budget() -> int:
    """scikit-learn's ``working_memory``, in bytes: 1 GiB unless the user says otherwise."""
    return max(MIN_MEMORY_BUDGET, int(get_config()["working_memory"] * 2**20))


def without_output_axis(array: np.ndarray, single: bool) -> np.ndarray:
    """Drop the last axis, of outputs, if there is just one and y had no axis for it."""
    if single:
        return array[..., 0]
    return array
