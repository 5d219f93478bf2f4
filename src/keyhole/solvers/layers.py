"""Fitted layers f(x) = Σ_m <v_m, φ_m(x)> + b of finitely or infinitely many heads.

The plain versions are `keyhole.textbook.predict` and `keyhole.textbook.contributions`; with
infinitely many heads f(x) = b + Σ_j a_j K(x, x_j), K being `keyhole.textbook.kernel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import MEMORY_BUDGET, block_size, blocks, unit_exponent
from keyhole.attention.backends import backend_for
from keyhole.attention.features import apply_values, key_contributions, written_blocks
from keyhole.attention.heads import HeadDistribution, HeadDraw
from keyhole.attention.kernels import attention_kernel
from keyhole.data.sets import PooledSets, SampleBatch, SetBatch

LONG_SET = 64
"""Keys of a set, on average, from which on a device computes contributions."""


@dataclass(frozen=True)
class FiniteLayer:
    """A layer of M heads, regenerated from their seed as needed.

    Attributes
    ----------
    heads : HeadDraw
        The drawn query-key matrices.
    values : array (M, D, t)
        v, in the scaling where φ carries M^{-1/2}.
    intercept : array (t,)
    activation, dtype : str
    device : str or None
        Where features are computed; None is NumPy.
    extras_values : array (c, t) or None
        Coefficients of the scaled sample-level features.
    """

    heads: HeadDraw
    values: Float[np.ndarray, "m e t"] = field(repr=False)
    intercept: Float[np.ndarray, " t"]
    activation: str
    dtype: str
    device: str | None = None
    extras_values: Float[np.ndarray, "c t"] | None = field(default=None, repr=False)

    def predict(
        self, samples: SampleBatch, *, memory_budget: int = MEMORY_BUDGET
    ) -> Float[np.ndarray, "n t"]:
        """Return f on every sample. O(tokens · M · D) and no temporary beyond the budget."""
        outputs = backend_for(self.device).outputs(
            samples,
            self.heads,
            self.values,
            self.activation,
            dtype=self.dtype,
            memory_budget=memory_budget,
        )
        with np.errstate(over="ignore"):  # what overflows is reported below
            outputs = outputs + self.intercept + extras_outputs(self, samples)
        return check_finite_predictions(outputs)

    def contributions(
        self, samples: SampleBatch, *, memory_budget: int = MEMORY_BUDGET
    ) -> Float[np.ndarray, "k t"]:
        """What every key adds to f, sample after sample."""
        # values have the units of y, which may be beyond the range of float32: contract them in
        # units of their own
        exponents = unit_exponent(self.values, axis=(0, 1))
        # short sets are too little work for a device, one after the other
        sets = samples.sets
        has_long_sets = sets.n_tokens >= LONG_SET * len(sets)
        backend = backend_for(self.device if has_long_sets else None)
        parts = backend.contributions(
            backend.placed(samples),
            self.heads,
            np.ldexp(self.values, -exponents),
            self.activation,
            dtype=self.dtype,
            memory_budget=memory_budget,
        )
        return np.ldexp(parts, exponents)

    def in_units(self, exponent: int) -> FiniteLayer:
        """The layer of outputs 2^exponent times as large."""
        return replace(
            self,
            values=np.ldexp(self.values, exponent),
            intercept=np.ldexp(self.intercept, exponent),
            extras_values=_scaled_or_none(self.extras_values, exponent),
        )


@dataclass(frozen=True)
class KernelLayer:
    """A layer of infinitely many heads: f(x) = Σ_i dual_i K(x, x_i) + b.

    Attributes
    ----------
    distribution : head distribution
        Of the infinitely many heads.
    sets : SetBatch or PooledSets
        The n training samples.
    dual : array (n, t)
    intercept : array (t,)
    activation : str
    device : str or None
        Where the kernel is evaluated, in ``dtype``; None is NumPy, in float64 always.
    dtype : str
    extras_values : array (c, t) or None
        Coefficients of the scaled sample-level features.
    """

    distribution: HeadDistribution
    sets: SetBatch | PooledSets
    dual: Float[np.ndarray, "n t"] = field(repr=False)
    intercept: Float[np.ndarray, " t"]
    activation: str
    device: str | None = None
    dtype: str = "float64"
    extras_values: Float[np.ndarray, "c t"] | None = field(default=None, repr=False)

    def predict(
        self, samples: SampleBatch, *, memory_budget: int = MEMORY_BUDGET
    ) -> Float[np.ndarray, "n t"]:
        """Return f on every sample, in blocks of rows of the kernel."""
        outputs = backend_for(self.device).kernel_outputs(
            samples,
            self.sets,
            self.dual,
            self.distribution,
            self.activation,
            dtype=self.dtype,
            memory_budget=memory_budget,
        )
        with np.errstate(over="ignore"):
            outputs = outputs + self.intercept + extras_outputs(self, samples)
        return check_finite_predictions(outputs)

    def contributions(
        self, samples: SampleBatch, *, memory_budget: int = MEMORY_BUDGET
    ) -> Float[np.ndarray, "k t"]:
        """What every key adds to f, sample after sample; by NumPy.

        K of a set is the mean of K over its keys, each as a set of its own with the same query.
        """
        samples = samples.numpy()
        training_sets = self.sets.numpy()

        # blocks of samples, whose keys are made sets of one key each
        parts = []
        for _, written in written_blocks(samples, 8 * self.dual.shape[1]):
            keys = written.sets.single_keys()
            lengths = written.sets.lengths
            outputs = np.empty((len(keys), self.dual.shape[1]))
            for rows in blocks(len(keys), block_size(8 * len(training_sets), memory_budget)):
                # keys stand in the columns of the kernel, so that what is done once per row is done
                # per training set
                kernel = attention_kernel(
                    training_sets,
                    keys[rows],
                    self.distribution,
                    self.activation,
                    memory_budget=memory_budget,
                )
                outputs[rows] = kernel.T @ self.dual

            # each is divided by the number of keys of its set, and summed over queries
            outputs /= np.repeat(lengths, lengths)[:, None]
            parts.append(written.of_keys(outputs))
        return np.concatenate(parts)

    def in_units(self, exponent: int) -> KernelLayer:
        """The layer of outputs 2^exponent times as large."""
        return replace(
            self,
            dual=np.ldexp(self.dual, exponent),
            intercept=np.ldexp(self.intercept, exponent),
            extras_values=_scaled_or_none(self.extras_values, exponent),
        )


Layer = FiniteLayer | KernelLayer


@dataclass(frozen=True)
class PrunedLayer:
    """A layer of values in a norm ball, of which only the active heads are ever drawn.

    Attributes
    ----------
    heads : HeadDraw
        All M heads.
    active : array (k,)
        Which of them have v_m ≠ 0, in increasing order.
    values : array (k, D, t)
        v of these, in the paper's scaling: φ has no M^{-1/2}.
    intercept : array (t,)
    activation, dtype : str
    extras_values : array (c, t) or None
        Coefficients of the scaled sample-level features.
    """

    heads: HeadDraw
    active: Int[np.ndarray, " k"] = field(repr=False)
    values: Float[np.ndarray, "k e t"] = field(repr=False)
    intercept: Float[np.ndarray, " t"]
    activation: str
    dtype: str
    extras_values: Float[np.ndarray, "c t"] | None = field(default=None, repr=False)
    device: ClassVar[None] = None  # always by NumPy

    def predict(
        self, samples: SampleBatch, *, memory_budget: int = MEMORY_BUDGET
    ) -> Float[np.ndarray, "n t"]:
        """Return f on every sample. O(tokens · k · D)."""
        outputs = self._sum_over_heads(apply_values, samples, len(samples), memory_budget)
        outputs = outputs + self.intercept + extras_outputs(self, samples)
        return check_finite_predictions(outputs)

    def contributions(
        self, samples: SampleBatch, *, memory_budget: int = MEMORY_BUDGET
    ) -> Float[np.ndarray, "k t"]:
        """What every key adds to f, sample after sample."""
        n_keys = int(samples.unpooled.token_counts.sum())
        return self._sum_over_heads(key_contributions, samples, n_keys, memory_budget)

    def drawn_heads(self, *, has_query: bool) -> Float[np.ndarray, "k f e"]:
        """The active heads, as sets with a query see them, or sets without one."""
        heads = self.heads.seen_by(query=has_query)
        runs = np.split(self.active, np.flatnonzero(np.diff(self.active) != 1) + 1)
        return np.concatenate([heads.block(int(run[0]), int(run[-1]) + 1) for run in runs])

    def _sum_over_heads(
        self,
        outputs_of: Callable[..., np.ndarray],
        samples: SampleBatch,
        n_rows: int,
        memory_budget: int,
    ) -> Float[np.ndarray, "k t"]:
        """The outputs of the active heads; zeros where there is none."""
        if len(self.active) == 0:
            return np.zeros((n_rows, len(self.intercept)))
        outputs = outputs_of(
            samples,
            self.drawn_heads(has_query=samples.has_query),
            # features of k heads carry a factor k^{-1/2}
            math.sqrt(len(self.active)) * self.values,
            self.activation,
            dtype=self.dtype,
            memory_budget=memory_budget,
        )
        return np.asarray(outputs, dtype=np.float64)


def extras_outputs(layer: Any, samples: SampleBatch) -> Any:
    """What the scaled sample-level features add to the outputs of a layer; 0 where it has none."""
    if layer.extras_values is None:
        return 0.0
    return samples.extras @ layer.extras_values


def check_finite_predictions(predictions: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "n t"]:
    """Return predictions, all of them numbers; raise if one has outgrown float64."""
    not_finite = np.flatnonzero(~np.isfinite(predictions).all(axis=1))
    if len(not_finite):
        first = not_finite[0]
        raise ValueError(
            f"predictions must be finite: that of sample {first} is {predictions[first]} "
            f"({len(not_finite)} in all). Its tokens, or the values of the model, are too large "
            "for float64. Scale the tokens, or fit anew."
        )
    return np.asarray(predictions)


def _scaled_or_none(array: np.ndarray | None, exponent: int) -> np.ndarray | None:
    """2^exponent times an array that may not be there."""
    if array is None:
        return None
    return np.ldexp(array, exponent)
