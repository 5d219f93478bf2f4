"""The layer f(x) = Σ_m <v_m, φ_m(x)> + b: samples + heads + ridge → a layer that predicts.

Finitely many heads are fitted through their features (primal if there are fewer columns than samples, dual otherwise,
by conjugate gradients if neither matrix fits the memory), infinitely many through their kernel; both also on a device.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import MEMORY_BUDGET, block_size, blocks, narrowed, unit_exponent
from keyhole.attention.features import (
    apply_values,
    attention_features,
    feature_blocks,
    key_contributions,
    written_blocks,
)
from keyhole.attention.heads import DRAWN_BYTES, HeadDistribution, HeadDraw
from keyhole.attention.kernels import attention_kernel, tensor_kernel
from keyhole.data.sets import PooledSets, SampleBatch, SetBatch, first_occurrences
from keyhole.ridge.calibration import PathLosses
from keyhole.ridge.design import ridge_rows
from keyhole.ridge.gram import ridge_gram
from keyhole.ridge.iterative import Preconditioner, ResidualWarning, ridge_cg
from keyhole.ridge.matrices import add_outer, mirror_lower
from keyhole.ridge.problem import EPS, UNSTEADY, RidgeFit, RidgeProblem, RoundingWarning, steadiness

MIN_SAMPLES_TO_CENTRE_BY = 32
"""Samples at least, or a sixteenth of all, whose mean feature stands for that of all while rounding is at stake."""

MAX_PRECONDITIONER_RANK = 2000
"""Columns of the preconditioner, if memory and the size of the problem allow."""

IN_CACHE = 2**25
"""Bytes of a block of features that is made, then gone through twice."""

PRODUCTS_PER_PASS = 8
"""Operations of the preconditioner's products for each operation of one pass over the features: products run several
times as fast, and at n = 2400, M = 1500 iterations fell from 12 (at 2) to 7, and the time by a half."""

HELD_OUT = 10
"""One distinct sample in so many is held out to choose a penalty."""

TOLERANCE = {"float64": 1e-8, "float32": 1e-6}
"""Relative residual asked for: what products of that precision can reach, and more than predictions need."""


def _finite(predictions: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "n t"]:
    """Return predictions, all of them numbers; raise if one has outgrown float64."""
    wrong = np.flatnonzero(~np.isfinite(predictions).all(axis=1))
    if len(wrong):
        raise ValueError(
            f"predictions must be finite: that of sample {wrong[0]} is {predictions[wrong[0]]} ({len(wrong)} in all). "
            "Its tokens, or the values of the model, are too large for float64. Scale the tokens, or fit anew."
        )
    return predictions


def of_extras(layer: Any, batch: SampleBatch) -> Any:
    """What the extras of samples, scaled as they were in the fit, add to the outputs of a layer; 0 without."""
    return 0.0 if layer.extras_values is None else batch.extras @ layer.extras_values


@dataclass(frozen=True)
class FiniteLayer:
    """A layer of M heads, regenerated from their seed as needed.

    Attributes
    ----------
    heads : HeadDraw
    values : array (M, D, t)
        v, in the scaling where φ carries M^{-1/2}.
    intercept : array (t,)
    activation, dtype : str
    device : str or None
        Where features are computed; None is NumPy.
    """

    heads: HeadDraw
    values: Float[np.ndarray, "m e t"] = field(repr=False)
    intercept: Float[np.ndarray, " t"]
    activation: str
    dtype: str
    device: str | None = None
    extras_values: Float[np.ndarray, "c t"] | None = field(default=None, repr=False)

    def predict(
        self, batch: SetBatch | PooledSets, *, memory_budget: int = MEMORY_BUDGET
    ) -> Float[np.ndarray, "n t"]:
        """Return f on every set of ``batch``. O(tokens · M · D) and no temporary beyond the budget."""
        if self.device is not None:
            return self._predict_on_device(plain_sets(batch), memory_budget) + of_extras(
                self, batch
            )
        # values have the units of y, which may be beyond the range of float32
        units = unit_exponent(self.values, axis=(0, 1))
        values = np.ldexp(self.values, -units)
        scores = apply_values(
            batch,
            self.heads,
            values,
            self.activation,
            dtype=self.dtype,
            memory_budget=memory_budget,
        )
        with np.errstate(over="ignore"):
            return _finite(
                np.ldexp(scores.astype(np.float64), units) + self.intercept + of_extras(self, batch)
            )

    def _predict_on_device(self, batch: SetBatch, memory_budget: int) -> Float[np.ndarray, "n t"]:
        """The same in blocks of sets."""
        from keyhole._tensors import as_array, to_device

        values = to_device(self.values.reshape(-1, self.values.shape[2]), str(self.device))
        scores = np.empty((len(batch), values.shape[1]))
        for rows in blocks(len(batch), block_size(16 * len(values), memory_budget)):
            part = batch[rows].numpy().astype(self.dtype).to(str(self.device))
            scores[rows] = as_array(
                attention_features(part, self.heads, self.activation).to(values.dtype) @ values
            )
        return np.asarray(scores + self.intercept)

    def contributions(
        self, batch: SampleBatch, *, memory_budget: int = MEMORY_BUDGET
    ) -> Float[np.ndarray, "k t"]:
        """What every key adds to f, sample after sample; by NumPy."""
        units = unit_exponent(self.values, axis=(0, 1))
        options: dict[str, Any] = {"dtype": self.dtype, "memory_budget": memory_budget}
        return np.ldexp(
            key_contributions(
                batch, self.heads, np.ldexp(self.values, -units), self.activation, **options
            ),
            units,
        )

    def in_units(self, exponent: int) -> FiniteLayer:
        """The layer of outputs 2^exponent times as large."""
        extras = None if self.extras_values is None else np.ldexp(self.extras_values, exponent)
        values, intercept = np.ldexp(self.values, exponent), np.ldexp(self.intercept, exponent)
        return replace(self, values=values, intercept=intercept, extras_values=extras)


@dataclass(frozen=True)
class KernelLayer:
    """A layer of infinitely many heads: f(x) = Σ_i dual_i K(x, x_i) + b.

    Attributes
    ----------
    heads : HeadDistribution
    sets : SetBatch or PooledSets
        The n training samples.
    dual : array (n, t)
    intercept : array (t,)
    activation : str
    device : str or None
        Where the kernel is evaluated, in ``dtype``; None is NumPy, in float64 always.
    dtype : str
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
        self, batch: SetBatch | PooledSets, *, memory_budget: int = MEMORY_BUDGET
    ) -> Float[np.ndarray, "n t"]:
        """Return f on every set of ``batch``, in blocks of rows of the kernel."""
        if self.device is not None:
            return self._predict_on_device(plain_sets(batch), memory_budget) + of_extras(
                self, batch
            )
        scores = np.empty((len(batch), self.dual.shape[1]))
        for rows in blocks(len(batch), block_size(8 * len(self.sets), memory_budget)):
            kernel = attention_kernel(
                batch[rows],
                self.sets,
                self.distribution,
                self.activation,
                memory_budget=memory_budget,
            )
            scores[rows] = kernel @ self.dual
        return _finite(scores + self.intercept + of_extras(self, batch))

    def _predict_on_device(self, batch: SetBatch, memory_budget: int) -> Float[np.ndarray, "n t"]:
        from keyhole._tensors import as_array, to_device

        sets = plain_sets(self.sets).astype(self.dtype).to(str(self.device))
        dual = to_device(self.dual, str(self.device))
        scores = np.empty((len(batch), self.dual.shape[1]))
        for rows in blocks(len(batch), block_size(16 * len(sets), memory_budget)):
            part = batch[rows].numpy().astype(self.dtype).to(str(self.device))
            kernel = attention_kernel(
                part, sets, self.distribution, self.activation, memory_budget=memory_budget
            )
            scores[rows] = as_array(kernel.to(dual.dtype) @ dual)
        return np.asarray(scores + self.intercept)

    def contributions(
        self, batch: SampleBatch, *, memory_budget: int = MEMORY_BUDGET
    ) -> Float[np.ndarray, "k t"]:
        """What every key adds to f, sample after sample; by NumPy.

        K of a set is the mean of K over its keys, each as a set of its own with the same query.
        """
        parts = []
        for _, written in written_blocks(batch, 8 * self.dual.shape[1]):
            keys, lengths = written.sets.single_keys(), written.sets.lengths
            out = np.empty((len(keys), self.dual.shape[1]))
            for rows in blocks(len(keys), block_size(8 * len(self.sets), memory_budget)):
                # keys as columns: what is done once for a row and a column is then done for a training set, not a key
                kernel = attention_kernel(
                    self.sets,
                    keys[rows],
                    self.distribution,
                    self.activation,
                    memory_budget=memory_budget,
                )
                out[rows] = kernel.T @ self.dual
            parts.append(written.of_keys(out / np.repeat(lengths, lengths)[:, None]))
        return np.concatenate(parts)

    def in_units(self, exponent: int) -> KernelLayer:
        """The layer of outputs 2^exponent times as large."""
        extras = None if self.extras_values is None else np.ldexp(self.extras_values, exponent)
        dual, intercept = np.ldexp(self.dual, exponent), np.ldexp(self.intercept, exponent)
        return replace(self, dual=dual, intercept=intercept, extras_values=extras)


@dataclass(frozen=True)
class LayerFit:
    """A fitted layer and what is known of the samples it left out.

    Attributes
    ----------
    layer : FiniteLayer or KernelLayer
    ridge : RidgeFit
        Penalties, their errors, and what those errors are. NaN for a single sample, which leaves nothing to fit.
    predictions : array (n, t)
        For each sample given, the prediction of a fit without it and its copies (or its group); NaN for one that was
        not left out. Empty if nobody went over the samples again.
    route : str
        "primal", "dual", "kernel" or "cg".
    samples : Samples or None
        What was fitted; None where samples came in batches.
    """

    layer: FiniteLayer | KernelLayer
    ridge: RidgeFit
    predictions: Float[np.ndarray, "n t"] = field(repr=False)
    route: str
    samples: Samples | None = field(default=None, repr=False)

    def judged(self) -> Int[np.ndarray, " k"]:
        """One of the samples given for every distinct one, or every group, that was left out: those to rank by.

        Samples left out together tell one thing. Of a group that one is drawn at random, always the same, and by its
        rank wherever the samples stood.
        """
        assert self.samples is not None
        known = np.flatnonzero(
            np.isfinite(self.predictions).all(axis=1) & (self.samples.owner >= 0)
        )
        owner, w = self.samples.owner[known], self.samples.weights
        known, owner = (known, owner) if w is None else (known[w[owner] > 0], owner[w[owner] > 0])
        if self.samples.groups is not None:
            if self.samples.ranks is None:
                order = np.random.default_rng(0).permutation(len(known))
            else:
                order = np.argsort(self.samples.ranks[owner], kind="stable")
            known, owner = known[order], self.samples.groups[owner[order]]
        return np.sort(known[np.unique(owner, return_index=True)[1]])

    def in_units(self, exponent: int) -> LayerFit:
        """The fit to outputs 2^exponent times as large."""
        layer, ridge = self.layer.in_units(exponent), self.ridge.in_units(exponent)
        return replace(
            self, layer=layer, ridge=ridge, predictions=np.ldexp(self.predictions, exponent)
        )


@dataclass(frozen=True)
class Samples:
    """Distinct samples of positive weight, and which of them each sample given is.

    Where there are groups, also the samples of weight 0 that have a sibling of positive weight: they are predicted by
    the fit without their group.

    Attributes
    ----------
    batch : SetBatch or PooledSets
        Of the kind that was given.
    columns : array (n', t)
    weights : array (n',) or None
        Joint weight of all copies; None if every one is 1.
    owner : array (n,)
        Position of each sample given among these; −1 for one of weight 0 that no copy or sibling brings in.
    groups : array (n',) or None
        Samples of one number are left out together.
    ranks : array (n',) or None
        The place of each in a random order that does not depend on the order in which samples were given.
    """

    batch: Any
    columns: Float[np.ndarray, "k t"]
    weights: Float[np.ndarray, " k"] | None
    owner: Int[np.ndarray, " n"]
    groups: Int[np.ndarray, " k"] | None = None
    ranks: Int[np.ndarray, " k"] | None = None

    @property
    def weighed(self) -> Int[np.ndarray, " w"]:
        """Positions of the samples of positive weight."""
        return np.arange(len(self.batch)) if self.weights is None else np.flatnonzero(self.weights)

    def drawn(self, seed: int) -> Int[np.ndarray, " w"]:
        """Positions of the samples of positive weight in random order: by rank, or by place if there are no ranks."""
        rows = self.weighed
        if self.ranks is not None:
            rows = rows[np.argsort(self.ranks[rows], kind="stable")]
        return np.random.default_rng(seed).permutation(rows)

    def with_ranks(self, ranks: Int[np.ndarray, " n"] | None) -> Samples:
        """The same samples with the ranks of those that were given: the least of its duplicates' for each."""
        if ranks is None:
            return self
        known = self.owner >= 0
        least = np.full(len(self.columns), np.iinfo(np.int64).max)
        np.minimum.at(least, self.owner[known], ranks[known])
        return replace(self, ranks=least)


def distinct_samples(
    batch: SetBatch | PooledSets,
    columns: Float[np.ndarray, "n t"],
    weights: Float[np.ndarray, " n"] | None,
    groups: Int[np.ndarray, " n"] | None = None,
) -> Samples:
    """Join exact duplicates, so that repeating a sample is the same as weighting it, and drop what has no weight then.

    Where there are groups, duplicates are joined within their group only, and a sample of weight 0 is kept if its
    group has weight: it is predicted by the fit without its group.
    """
    first = first_occurrences(batch, columns)
    if groups is not None:
        pairs = np.stack([first, groups], axis=1)
        _, position, member = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
        first = position[member.reshape(-1)]

    given = np.ones(len(batch)) if weights is None else weights
    joint = np.bincount(first, weights=given, minlength=len(batch))
    is_kept = joint > 0
    if groups is not None:
        is_first = first == np.arange(len(batch))
        is_kept = is_first & np.isin(groups, groups[joint > 0])
    rows = np.flatnonzero(is_kept)
    place = np.full(len(batch), -1)
    place[rows] = np.arange(len(rows))
    owner = place[first]

    joint = joint[rows]
    shared = None if (joint == 1.0).all() else joint
    # an output of weight 0 may be missing (NaN)
    outputs = np.where(joint[:, None] > 0, columns[rows], 0.0)
    if len(rows) < len(batch):
        batch = batch[rows]
    return Samples(batch, outputs, shared, owner, None if groups is None else groups[rows])


@dataclass(frozen=True)
class _Task:
    """What to fit: samples, heads (or their head distribution, for infinitely many), and the ridge problem of their outputs."""

    samples: Samples
    heads: HeadDraw | HeadDistribution
    problem: RidgeProblem
    activation: str
    dtype: str
    device: str | None
    memory_budget: int
    keep_factor: bool = False

    def layer(self, values: np.ndarray, intercept: np.ndarray) -> FiniteLayer:
        """The layer of these values (p, t), those of extras last."""
        assert isinstance(self.heads, HeadDraw)
        shape = (self.heads.n_heads, self.heads.dim + 1, values.shape[1])
        p = shape[0] * shape[1]
        options = (self.activation, self.dtype, self.device)
        return FiniteLayer(
            self.heads, values[:p].reshape(shape), intercept, *options, self.of_extras(values[p:])
        )

    @property
    def extras(self) -> Float[np.ndarray, "n c"]:
        """Columns of the samples themselves, none of them perhaps."""
        extras = self.samples.batch.extras
        return np.zeros((len(self.samples.batch), 0)) if extras is None else extras

    def of_extras(self, values: Float[np.ndarray, "c t"]) -> Float[np.ndarray, "c t"] | None:
        """The values of extras, None where there are none."""
        return np.ascontiguousarray(values) if len(values) else None


def fit_layer(
    batch: SetBatch | PooledSets,
    columns: Float[np.ndarray, "n t"],
    heads: HeadDraw | HeadDistribution,
    penalties: Float[np.ndarray, " a"] | None = None,
    *,
    activation: str = "relu",
    fit_intercept: bool = True,
    weights: Float[np.ndarray, " n"] | None = None,
    groups: Int[np.ndarray, " n"] | None = None,
    ranks: Int[np.ndarray, " n"] | None = None,
    dtype: str = "float64",
    device: str | None = None,
    solver: str = "auto",
    criterion: str = "squared_error",
    draft: bool = False,
    hold_out: bool = False,
    keep_factor: bool = False,
    memory_budget: int = MEMORY_BUDGET,
) -> LayerFit:
    """Fit the values of M heads, or of infinitely many, by ridge with a penalty chosen on what it leaves out.

    Parameters
    ----------
    batch, columns : n samples, and their outputs (n, t)
        Extras of the samples are further columns of the features, as they are.
    heads : HeadDraw or head distribution
        M heads; or the head distribution of infinitely many, whose exact kernel is used.
    penalties : array (a,), optional
        Chosen from by leave-one-out; an automatic grid if None; one alone is used as it is.
    weights : array (n,), optional
        Not negative.
    groups : array (n,), optional
        Samples of one number are left out together; the penalty is chosen with an eigendecomposition then.
    ranks : array (n,), optional
        The place of each sample in an order of their own, by which samples are drawn: those that are held out then do
        not depend on the order in which samples are given. See `DistinctSamples.ranks`.
    dtype : "float64" or "float32"
        Precision of features and Gram matrix. Kernels are float64, but for those of a device.
    device : str, optional
        Where torch computes features, kernel and factorisation (in float64).
    solver : "auto", "direct" or "cg"
        "cg" is conjugate gradients; "auto" only if the smaller Gram matrix exceeds the memory.
    criterion : "squared_error" or "log_loss"
        What penalties are chosen by, on whatever is left out; the log-loss is that of calibrated scores of classes.
    draft : bool
        Whether the fit only serves to be compared with others: its automatic grid of penalties is coarse.
    hold_out : bool
        Whether conjugate gradients predict a tenth of the samples, held out, even if there is nothing to choose.
    keep_factor : bool
        Whether ``ridge`` keeps its factorisation, on the host.
    memory_budget : int
        Bound in bytes on any temporary but the Gram matrix, n × n or p × p with p = M·D.

    Notes
    -----
    Primal O(np² + p³), dual O(n²p + n³), kernel O(tokens² + n³); features are made once if they fit the budget,
    otherwise block by block, three times in primal and twice in dual form.
    """
    finite = isinstance(heads, HeadDraw)
    if solver == "cg" and not finite:
        raise ValueError(
            "solver='cg' is for finitely many heads: `n_heads` is infinite. Use solver='direct'."
        )
    if device is not None:
        batch = plain_sets(batch).numpy()
    n_columns = heads.n_heads * (heads.dim + 1) if isinstance(heads, HeadDraw) else 0
    n_columns += 0 if batch.extras is None else batch.extras.shape[1]
    large = solver == "cg" or (
        solver == "auto" and finite and exceeds_memory(len(batch), n_columns, dtype)
    )
    options: dict[str, Any] = {
        "activation": activation,
        "dtype": dtype,
        "memory_budget": memory_budget,
    }
    if (
        groups is not None and solver == "cg"
    ):  # groups are left out by a direct fit; conjugate gradients fit anew
        options |= {
            "fit_intercept": fit_intercept,
            "weights": weights,
            "criterion": criterion,
            "draft": draft,
        }
        judged = fit_layer(
            batch,
            columns,
            heads,
            penalties,
            groups=groups,
            device=device,
            solver="direct",
            **options,
        )
        chosen = np.array([judged.ridge.alpha])
        final = fit_layer(
            batch, columns, heads, chosen, ranks=ranks, device=device, solver=solver, **options
        )
        ridge = replace(judged.ridge, residual=final.ridge.residual, n_iter=final.ridge.n_iter)
        return replace(final, ridge=ridge, predictions=judged.predictions)
    samples = distinct_samples(batch, columns, weights, groups).with_ranks(ranks)
    gradients = large and device is None and groups is None
    if not gradients and len(samples.weighed) < 2 and (penalties is None or len(penalties) > 1):
        raise ValueError(
            "leave-one-out needs at least two samples: got 1 sample (copies and samples of weight 0 do not "
            "count). Give more samples, or one fixed number as `alpha`."
        )
    given: dict[str, Any] = {
        "fit_intercept": fit_intercept,
        "weights": samples.weights,
        "groups": samples.groups,
    }
    problem = RidgeProblem.of(samples.columns, penalties, criterion=criterion, draft=draft, **given)
    task = _Task(samples, heads, problem, device=device, keep_factor=keep_factor, **options)
    if gradients:
        return _fit_by_gradients(task, hold_out)
    layer: FiniteLayer | KernelLayer
    if not finite:
        layer, ridge = _fit_kernel(task)
    elif device is not None:
        layer, ridge = _fit_dual_on_device(task)
    elif groups is None and n_columns < len(samples.batch):
        layer, ridge = _fit_primal(task)
    else:
        layer, ridge = _fit_dual(task)
    route = "kernel" if not finite else "primal" if ridge.route == "design" else "dual"
    if not draft and not keep_factor:  # those are fitted again, or were before
        _warn_of_rounding(ridge, dtype)
    # hand what was left out back to the samples as they were given
    assert ridge.left_out is not None
    predictions = np.full(columns.shape, np.nan)
    known = samples.owner >= 0
    if len(samples.weighed) > 1:
        predictions[known] = (samples.columns - ridge.left_out)[samples.owner[known]]
    else:
        unknown = np.full(ridge.errors.shape, np.nan)
        ridge = replace(
            ridge, errors=unknown, log_losses=None if ridge.log_losses is None else unknown
        )
    if not known.all():  # a sample of weight 0, without copies and siblings, is left out already
        predictions[~known] = layer.predict(batch[~known], memory_budget=memory_budget)
    return LayerFit(layer, ridge, predictions, route, samples)


def _warn_of_rounding(ridge: RidgeFit, dtype: str) -> None:
    """Say so if rounding shows in predictions: a penalty that was asked for may be as small as it likes."""
    assert ridge.moved is not None
    share = float(ridge.moved[ridge.best])
    allowed = max(UNSTEADY, 100 * steadiness(float(np.finfo(dtype).eps)))
    if share > allowed:
        warnings.warn(
            f"alpha = {ridge.alpha:.3g} is so small beside the kernel of the samples that rounding moves predictions "
            f"by about {share:.1e} of the spread of y: predictions in a batch and one by one differ by as much. Use "
            "alpha='loo', a larger number, or scaling='standard' if tokens are far from zero.",
            RoundingWarning,
            stacklevel=2,
        )


def beside(
    features: Float[np.ndarray, "n p"], extras: Float[np.ndarray, "n c"]
) -> Float[np.ndarray, "n q"]:
    """Features and extras side by side; the features themselves where there are no extras."""
    return (
        np.concatenate([features, extras], axis=1, dtype=features.dtype)
        if extras.shape[1]
        else features
    )


MAX_SAMPLES_FOR_EXTRAS = 500
"""Samples that the scale of extras is chosen by: one Gram matrix of so many serves every scale."""

EXTRAS_SCALES = (0.1, 1.0, 10.0, 100.0)
"""Scales tried, in units in which extras vary as much as the features of sets do."""


def extras_unit(spread: float, size: float, extras: float) -> float:
    """The scale at which extras vary as much as features, from sums of squares; 1 where one of them does not vary."""
    return math.sqrt(spread / extras) if spread > 1e-12 * size and extras > 0 else 1.0


def choose_extras_scale(
    batch: SetBatch | PooledSets,
    columns: Float[np.ndarray, "n t"],
    heads: HeadDraw | HeadDistribution,
    penalties: Float[np.ndarray, " a"] | None,
    *,
    activation: str,
    fit_intercept: bool,
    weights: Float[np.ndarray, " n"] | None,
    groups: Int[np.ndarray, " n"] | None,
    ranks: Int[np.ndarray, " n"] | None = None,
    memory_budget: int = MEMORY_BUDGET,
    **_: Any,
) -> float:
    """The scale of least leave-one-out squared error for extras that are standardised: K + scale²·ZZᵀ.

    K is that of at most `MAX_SAMPLES_FOR_EXTRAS` samples, and made once; each scale then has a path of penalties, the
    ones given if these are all samples.
    """
    samples = distinct_samples(batch, columns, weights, groups).with_ranks(ranks)
    rows = np.sort(samples.drawn(seed=0)[:MAX_SAMPLES_FOR_EXTRAS])
    if len(rows) < 2:
        return 1.0
    part = samples.batch[rows].numpy()
    options: dict[str, Any] = {"fit_intercept": fit_intercept}
    options |= {
        n: None if a is None else a[rows]
        for n, a in (("weights", samples.weights), ("groups", samples.groups))
    }
    whole = len(rows) == len(samples.weighed)
    problem = RidgeProblem.of(samples.columns[rows], penalties if whole else None, **options)
    if isinstance(heads, HeadDraw):
        most = min(heads.n_heads, block_size(8 * len(rows) * (heads.dim + 1), memory_budget // 4))
        few = HeadDraw(heads.distribution, most, heads.dim, heads.seed, heads.query_dim)
        features = attention_features(part, few, activation)
        gram = features @ features.T
    else:
        gram = attention_kernel(part, None, heads, activation, memory_budget=memory_budget)
    extras = part.extras
    linear = extras @ extras.T
    spread = (
        float(np.trace(gram) - gram.sum() / len(gram)) if fit_intercept else float(np.trace(gram))
    )
    unit = extras_unit(spread, float(np.trace(gram)), float(np.trace(linear)))
    fits = [ridge_gram(gram + (r * unit) ** 2 * linear, problem) for r in EXTRAS_SCALES]
    return unit * EXTRAS_SCALES[int(np.argmin([fit.error for fit in fits]))]


def _fit_primal(task: _Task) -> tuple[FiniteLayer, RidgeFit]:
    """Sum ΦᵀΦ over rows, then pass over the rows again for leave-one-out."""
    batch, heads, n = task.samples.batch, task.heads, len(task.samples.batch)
    assert isinstance(heads, HeadDraw)
    extras = task.extras.astype(task.dtype)
    row_bytes = (heads.n_heads * (heads.dim + 1) + extras.shape[1]) * np.dtype(task.dtype).itemsize
    # the solver makes a few temporaries of the size of a block
    size = block_size(6 * row_bytes, task.memory_budget)
    whole = None
    if n * row_bytes <= task.memory_budget:
        whole = beside(attention_features(batch, heads, task.activation, dtype=task.dtype), extras)

    def row_blocks() -> Iterator[np.ndarray]:
        for rows in blocks(n, size):
            if whole is not None:
                yield whole[rows]
            else:
                yield beside(
                    attention_features(batch[rows], heads, task.activation, dtype=task.dtype),
                    extras[rows],
                )

    ridge = ridge_rows(row_blocks, task.problem, keep_factor=task.keep_factor)
    return task.layer(ridge.coef, ridge.intercept), ridge


def _fit_dual(task: _Task) -> tuple[FiniteLayer, RidgeFit]:
    """Sum ΦΦᵀ over blocks of heads, solve, then v = Φᵀa over the blocks again."""
    assert isinstance(task.heads, HeadDraw)
    batch, budget = task.samples.batch, task.memory_budget
    n, width = len(batch), task.heads.dim + 1
    heads = task.heads.seen_by(query=batch.has_query).stored(budget // 4)
    # new samples are compared with those of a factor that is kept as they are
    about_mean = task.problem.fit_intercept and not (task.problem.draft or task.keep_factor)
    centre = mean_feature(heads, task) if about_mean else None
    # all features in one block if they fit; blocks of half the budget are as fast, and leave the rest to the solver
    fits = n * heads.n_heads * width * np.dtype(task.dtype).itemsize <= 0.9 * budget
    options: dict[str, Any] = {
        "dtype": task.dtype,
        "memory_budget": budget if fits else budget // 2,
    }

    def made() -> Iterator[tuple[slice, np.ndarray]]:
        return feature_blocks(
            batch, heads, task.activation, centre=centre, reuse_buffer=True, **options
        )

    gram, kept = np.zeros((n, n), task.dtype, order="F"), []
    for part, block in made():
        if part == slice(0, heads.n_heads):
            kept.append((part, block))
        add_outer(gram, block)
    if task.extras.shape[1]:
        add_outer(gram, np.asfortranarray(task.extras.astype(task.dtype)))
    if task.problem.groups is not None:
        mirror_lower(gram)
    ridge = ridge_gram(
        gram, task.problem, overwrite_gram=True, keep_factor=task.keep_factor, memory_budget=budget
    )
    values = np.empty((heads.n_heads * width, ridge.coef.shape[1]))
    narrow, units = narrowed(ridge.coef, task.dtype)
    for part, block in kept or made():
        values[part.start * width : part.stop * width] = block.T @ narrow
    values = np.ldexp(values, units)
    intercept = ridge.intercept if centre is None else ridge.intercept - centre @ values
    return task.layer(np.concatenate([values, task.extras.T @ ridge.coef]), intercept), ridge


def mean_feature(heads: HeadDraw, task: _Task) -> Float[np.ndarray, " p"]:
    """The mean feature of a few samples that have weight, as it is in the precision of the features.

    With an intercept any constant may be taken from a column of Φ. This one is nearly the true mean, and keeps the
    rounding of products in proportion to what varies without a pass over Φ: on attention features in float32
    (n = 2000, p = 17000) the error of ΦΦᵀ falls from 1.4 to 0.15 units of rounding of λ_max.
    """
    rows = task.samples.weighed
    p = heads.n_heads * (heads.dim + 1)
    many = min(len(rows) // 16, block_size(8 * p, task.memory_budget // 4))
    step = max(1, len(rows) // max(MIN_SAMPLES_TO_CENTRE_BY, many))
    few = task.samples.batch[rows[::step]]
    centre = attention_features(few, heads, task.activation, dtype=task.dtype).mean(
        axis=0, dtype=np.float64
    )
    return np.asarray(centre.astype(task.dtype).astype(np.float64))


def _fit_kernel(task: _Task) -> tuple[KernelLayer, RidgeFit]:
    """Ridge on the exact kernel, on a device if there is one: the kernel in its dtype, the factorisation in float64."""
    samples, distribution = task.samples, task.heads
    assert not isinstance(distribution, HeadDraw)
    options: dict[str, Any] = {"memory_budget": task.memory_budget}
    if task.device is None:
        gram = attention_kernel(samples.batch, None, distribution, task.activation, **options)
        for rows in blocks(
            len(gram) if task.extras.shape[1] else 0, block_size(8 * len(gram), task.memory_budget)
        ):
            gram[rows] += task.extras[rows] @ task.extras.T
        ridge = ridge_gram(
            gram, task.problem, overwrite_gram=True, keep_factor=task.keep_factor, **options
        )
    else:
        sets = samples.batch.astype(task.dtype).to(task.device)
        gram = tensor_kernel(sets, distribution, task.activation, "float64", task.memory_budget)
        _add_extras_on_device(gram, task)
        ridge = _ridge_on_device(gram, task, float(np.finfo(task.dtype).eps))
    kept = samples.weighed
    sets = samples.batch if len(kept) == len(samples.batch) else samples.batch[kept]
    values = task.of_extras(task.extras.T @ ridge.coef)
    sets = sets if values is None else sets.with_extras(None)  # their part is in the values
    outputs = (ridge.coef[kept], ridge.intercept, task.activation, task.device, task.dtype, values)
    return KernelLayer(distribution, sets, *outputs), ridge


def _add_extras_on_device(gram: Any, task: _Task) -> None:
    """Add the linear kernel of the extras to a float64 Gram matrix on a device."""
    from keyhole._tensors import to_device

    if task.extras.shape[1]:
        extras = to_device(np.ascontiguousarray(task.extras), str(gram.device))
        gram.addmm_(extras, extras.T)


def _fit_dual_on_device(task: _Task) -> tuple[FiniteLayer, RidgeFit]:
    """ΦΦᵀ summed in float64 on a device, then v = Φᵀa; on the host if n × n matrices do not fit the device."""
    from keyhole._tensors import as_array, astype, free_bytes, to_device, zeros

    assert isinstance(task.heads, HeadDraw)
    heads, device = task.heads.seen_by(query=task.samples.batch.has_query), str(task.device)
    n, width = len(task.samples.batch), heads.dim + 1
    if 3 * 8 * n * n > free_bytes(device):
        host = replace(task, device=None)
        return _fit_primal(host) if heads.n_heads * width < n else _fit_dual(host)
    sets = task.samples.batch.astype(task.dtype).to(device)

    def made() -> Iterator[tuple[slice, Any]]:
        budget = max(task.memory_budget, free_bytes(device) // 8)
        for part in blocks(heads.n_heads, block_size(16 * n * width, budget)):
            block = astype(
                attention_features(sets, heads.block(part.start, part.stop), task.activation),
                "float64",
            )
            # M^{-1/2} is that of all heads
            yield part, block.mul_(((part.stop - part.start) / heads.n_heads) ** 0.5)

    gram, kept = zeros(n, n, device), []
    for part, block in made():
        if part == slice(0, heads.n_heads):
            kept.append((part, block))
        gram.addmm_(block, block.T)
    _add_extras_on_device(gram, task)
    ridge = _ridge_on_device(gram, task, EPS)
    dual = to_device(ridge.coef, device)
    values = np.empty((heads.n_heads, width, dual.shape[1]))
    for part, block in kept or made():
        values[part] = as_array(block.T @ dual).reshape(-1, width, dual.shape[1])
    every = np.concatenate([values.reshape(-1, dual.shape[1]), task.extras.T @ ridge.coef])
    return task.layer(every, ridge.intercept), ridge


def _ridge_on_device(gram: Any, task: _Task, rounding: float) -> RidgeFit:
    """Ridge on a float64 Gram matrix on a device, which is overwritten; groups are left out on the host."""
    from keyhole._tensors import as_array, free_bytes
    from keyhole.ridge.device import ridge_device

    if task.problem.groups is not None:
        options: dict[str, Any] = {"overwrite_gram": True, "memory_budget": task.memory_budget}
        return ridge_gram(as_array(gram), task.problem, rounding=rounding, **options)
    room = 8 * gram.shape[0] ** 2 <= free_bytes(str(gram.device))
    options = {"room_for_a_copy": room, "memory_budget": task.memory_budget}
    return ridge_device(gram, task.problem, rounding=rounding, **options)


def exceeds_memory(n: int, p: int, dtype: str) -> bool:
    """Whether the smaller of the n × n and p × p Gram matrices, and a factorisation, outgrow this machine's memory."""
    memory = (
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if hasattr(os, "sysconf")
        else math.inf
    )
    copies = 4 if p < n else 1.5
    return copies * min(n, p) ** 2 * np.dtype(dtype).itemsize > 0.8 * memory


@dataclass(frozen=True)
class HeadDesign:
    """The features of M heads as a design that is multiplied with, block by block of heads, and never stored."""

    batch: SetBatch | PooledSets
    heads: HeadDraw
    activation: str
    dtype: str
    memory_budget: int
    centre: Float[np.ndarray, " p"] | None = None

    @property
    def extras(self) -> Float[np.ndarray, "n c"]:
        """The last columns of the design, in its precision; none of them perhaps."""
        extras = self.batch.extras
        return (
            np.zeros((len(self.batch), 0), self.dtype)
            if extras is None
            else extras.astype(self.dtype)
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(n, p)."""
        return len(self.batch), self.heads.n_heads * (self.heads.dim + 1) + self.extras.shape[1]

    def column_blocks(self, heads: HeadDraw | None = None) -> Iterator[tuple[slice, np.ndarray]]:
        """Columns and features of a block of heads at a time, overwritten by the next."""
        heads = self.heads if heads is None else heads
        width = heads.dim + 1
        # at least 16 heads, so that a block of few samples is not all overhead
        row = len(self.batch) * width * np.dtype(self.dtype).itemsize
        entries = heads.seen_by(query=self.batch.has_query).entries
        budget = min(self.memory_budget, max(IN_CACHE, 16 * (row + DRAWN_BYTES * entries)))
        options: dict[str, Any] = {
            "dtype": self.dtype,
            "memory_budget": budget,
            "reuse_buffer": True,
        }
        # the centre is that of all heads; of fewer, scaled by their own number, it is larger
        centre = self.centre
        if centre is not None and heads is not self.heads:
            centre = centre[: heads.n_heads * width] * math.sqrt(self.heads.n_heads / heads.n_heads)
        for part, block in feature_blocks(
            self.batch, heads, self.activation, centre=centre, **options
        ):
            yield slice(part.start * width, part.stop * width), block
        extras = self.extras
        if extras.shape[1]:
            first = heads.n_heads * width
            yield slice(first, first + extras.shape[1]), extras

    def gram_product(self, dual: Float[np.ndarray, "n c"]) -> Float[np.ndarray, "n c"]:
        """ΦΦᵀ a in one pass: every block is made once and used twice."""
        total, (narrow, units) = np.zeros(dual.shape), narrowed(dual, self.dtype)
        for _, block in self.column_blocks():
            total += block @ (block.T @ narrow)
        return np.ldexp(total, units)

    def rmatvec(self, dual: Float[np.ndarray, "n c"]) -> Float[np.ndarray, "p c"]:
        """Φᵀ a."""
        result, (narrow, units) = (
            np.empty((self.shape[1], dual.shape[1])),
            narrowed(dual, self.dtype),
        )
        for columns, block in self.column_blocks():
            result[columns] = block.T @ narrow
        return np.ldexp(result, units)

    def matvec(self, values: Float[np.ndarray, "p c"]) -> Float[np.ndarray, "n c"]:
        """Φ v."""
        options: dict[str, Any] = {"dtype": self.dtype, "memory_budget": self.memory_budget}
        extras = self.extras
        p = len(values) - extras.shape[1]
        outputs = apply_values(
            self.batch, self.heads, values[:p], self.activation, **options
        ).astype(np.float64)
        outputs += extras @ values[p:]
        return outputs if self.centre is None else outputs - self.centre @ values[:p]

    def preconditioner(
        self, weights: Float[np.ndarray, " n"] | None, *, primal: bool
    ) -> Preconditioner:
        """Nyström on some samples and the first heads in dual form, the features of some samples in primal form."""
        n, p = self.shape
        size = p if primal else n
        rank = min(
            MAX_PRECONDITIONER_RANK,
            max(1, min(n, p) // 3),
            max(1, self.memory_budget // (2 * size * np.dtype(self.dtype).itemsize)),
        )
        roots = np.ones(n) if weights is None else np.sqrt(weights)
        chosen = np.sort(np.random.default_rng(0).choice(n, rank, replace=False))
        if primal:
            features = attention_features(
                self.batch[chosen], self.heads, self.activation, dtype=self.dtype
            )
            factor = beside(features, self.extras[chosen])
            factor *= (roots[chosen] * math.sqrt(n / rank))[:, None].astype(factor.dtype)
            if self.centre is not None:
                factor -= factor.mean(axis=0)
            return Preconditioner.of_factor(np.ascontiguousarray(factor.T))
        columns = self._gram_columns(chosen)
        square = columns[chosen].astype(np.float64)
        columns *= roots[:, None].astype(columns.dtype)
        if self.centre is not None:
            columns -= np.outer(roots, roots @ columns / (roots @ roots)).astype(columns.dtype)
        return Preconditioner.of_columns(columns, (square + square.T) / 2)

    def _gram_columns(self, chosen: Int[np.ndarray, " r"]) -> Float[np.ndarray, "n r"]:
        """ΦΦ_Sᵀ of as many of the heads as take about the time of two passes: it stands for that of all."""
        lengths = self.batch.token_counts
        width = self.heads.dim + 1
        entries = self.heads.seen_by(query=self.batch.has_query).entries
        pass_cost = self.heads.n_heads * (2 * entries + 4 * width * float(lengths.mean()))
        few = int(
            min(
                self.heads.n_heads,
                max(64, PRODUCTS_PER_PASS * pass_cost / (2 * width * len(chosen))),
            )
        )
        heads = HeadDraw(
            self.heads.distribution, few, self.heads.dim, self.heads.seed, self.heads.query_dim
        )
        columns = np.zeros((len(self.batch), len(chosen)), self.dtype)
        for _, block in self.column_blocks(heads):
            columns += block @ block[chosen].T
        return columns


def _fit_by_gradients(task: _Task, hold_out: bool) -> LayerFit:
    """Fit by preconditioned conjugate gradients.

    One penalty is used as it is. Among several the one of least error on a tenth of the samples, held out, is used;
    leave-one-out would need a matrix that there is no room for, and there is no automatic grid for the same reason.
    n M (2D² + 4DN) + 4np operations an iteration; memory for the preconditioner, some blocks of features and a few
    vectors.
    """
    penalties, samples = task.problem.alphas, task.samples
    if penalties is None:
        raise ValueError(
            "alpha='loo' needs an n × n or a p × p matrix, and conjugate gradients make neither. Give `alpha` as a "
            "number, or as a few numbers to choose from on a tenth of the samples that is held out; a fit with fewer "
            "heads can say which: the penalty means the same at every number of heads."
        )
    errors, best = np.full(len(penalties), np.nan), 0
    losses = errors.copy() if task.problem.criterion == "log_loss" else None
    predictions = np.full((len(samples.owner), samples.columns.shape[1]), np.nan)
    if len(penalties) > 1 or hold_out:
        order = samples.drawn(seed=1)
        held, rest = np.sort(order[::HELD_OUT]), np.setdiff1d(order, order[::HELD_OUT])
        if len(rest) == 0:
            raise ValueError(
                "holding out a tenth needs at least two samples: got 1. Give one number as `alpha`."
            )
        layers, _ = _solve_by_gradients(task, rest, penalties)
        outputs = layers.predict(samples.batch[held], memory_budget=task.memory_budget)
        guesses = np.split(outputs, len(penalties), axis=1)
        w = task.problem.weights[held]
        errors = np.array(
            [w @ np.square(samples.columns[held] - g).mean(axis=1) / w.sum() for g in guesses]
        )
        if losses is not None:
            judged = PathLosses(samples.columns[held], w, len(penalties))
            judged.put(slice(None), slice(None), samples.columns[held] - np.array(guesses))
            losses = judged.losses()
        best = int(np.argmin(errors if losses is None else losses))
        place = np.full(len(samples.batch), -1)
        place[held] = np.arange(len(held))
        seen = (samples.owner >= 0) & (place[samples.owner] >= 0)
        predictions[seen] = guesses[best][place[samples.owner[seen]]]
    layer, ridge = _solve_by_gradients(task, None, penalties[best : best + 1])
    if ridge.residual > TOLERANCE[task.dtype]:
        warnings.warn(
            f"conjugate gradients ended at a relative residual of {ridge.residual:.1e} after {ridge.n_iter} "
            f"iterations, {TOLERANCE[task.dtype]:.0e} was asked for: fitted values may be off by that share of the "
            "standard deviation of y. A larger alpha, or dtype='float64', is solved further.",
            ResidualWarning,
            stacklevel=2,
        )
    return LayerFit(
        layer,
        replace(ridge, alphas=penalties, errors=errors, best=best, log_losses=losses),
        predictions,
        "cg",
        samples,
    )


def _solve_by_gradients(
    task: _Task, rows: Int[np.ndarray, " r"] | None, penalties: Float[np.ndarray, " a"]
) -> tuple[FiniteLayer, RidgeFit]:
    """Fit some samples: a layer whose outputs are those of all penalties, one after the other, and the first fit."""
    problem, heads = task.problem, task.heads
    assert isinstance(heads, HeadDraw)
    own = slice(None) if rows is None else rows
    batch, weights = task.samples.batch[own], problem.weights[own]
    options: dict[str, Any] = {"fit_intercept": problem.fit_intercept, "weights": weights}
    problem = RidgeProblem.of(problem.y[own], penalties, **options)
    centre = mean_feature(heads, task) if problem.fit_intercept else None
    design = HeadDesign(batch, heads, task.activation, task.dtype, task.memory_budget, centre)
    primal = design.shape[1] < len(batch)
    preconditioner = design.preconditioner(weights, primal=primal)
    fits = ridge_cg(design, problem, preconditioner, primal=primal, tol=TOLERANCE[task.dtype])
    values, intercept = (
        np.hstack([fit.coef for fit in fits]),
        np.concatenate([fit.intercept for fit in fits]),
    )
    p = heads.n_heads * (heads.dim + 1)
    return task.layer(
        values, intercept if centre is None else intercept - centre @ values[:p]
    ), fits[0]


def pick_device(device: Any, batch: SetBatch) -> str | None:
    """The device asked for, that of the batch for None, or the first GPU if there is one for "auto"."""
    if device is None:
        return batch.device
    from keyhole._tensors import check_device, gpu_or_none

    return gpu_or_none() if device == "auto" else str(check_device(device))


def plain_sets(batch: SetBatch | PooledSets) -> SetBatch:
    """Return the batch if every sample is one set, the mean over its keys; devices know no other pooling."""
    if not batch.is_plain:
        raise ValueError(
            "a device takes one set per sample and the mean over its keys: pooling='sum', query='each' and SetGroups "
            "are computed by NumPy. Leave `device` out."
        )
    return batch.sets
