"""Solving for the values of a layer: v and b, in closed form or by Newton steps.

Prepared samples, heads and a ridge problem become a layer with its leave-one-out predictions.

Finitely many heads are solved through their features: primal (p × p) if there are fewer features
than samples, dual (n × n) otherwise, by conjugate gradients if neither matrix fits the memory.
Infinitely many heads are solved through their exact kernel. `solve_values` picks the route; every
route gives the same numbers. Values of least log-loss take the same routes, but for conjugate
gradients: each of their Newton steps is a weighted ridge fit (logistic/). A device makes those
of the dual and of the kernel route.

The plain version is in `keyhole.textbook` (docs/explanation/textbook.md): `features` or `kernel`,
then `ridge`, then v = Φᵀa. docs/howto/out_of_core.md says which route costs what.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import blas_threads_for, block_size, blocks
from keyhole.attention.backends import Backend, backend_for
from keyhole.attention.features import attention_features
from keyhole.attention.heads import HeadDistribution, HeadDraw
from keyhole.logistic.design import logistic_rows
from keyhole.logistic.problem import LogisticProblem
from keyhole.ridge.design import ridge_rows
from keyhole.ridge.problem import UNSTEADY, RidgeFit, RidgeProblem, RoundingWarning, steadiness
from keyhole.solvers.layers import FiniteLayer, KernelLayer, Layer
from keyhole.spec import LayerSpec
from keyhole.training import SolvedSamples, TrainingSet


@dataclass(frozen=True)
class LayerFit:
    """The values of a layer, and how they predict the samples they leave out.

    Attributes
    ----------
    layer : FiniteLayer or KernelLayer
    ridge : RidgeFit
        Penalties, their errors, and what those errors are. NaN for a single sample, which leaves
        nothing to fit.
    predictions : array (n, t)
        For each sample given, the prediction of a fit without it (or without its group); NaN for
        one that was not left out. Empty if nobody went over the samples again.
    route : str
        "primal", "dual", "kernel" or "cg".
    samples : SolvedSamples or None
        What was solved for; None where samples came in batches.
    centre : array (p,) or None
        What the dual route took off the features of every sample: the dual coefficients and the
        intercept of ``ridge`` are about it, and new samples are to be compared with it taken off.
    """

    layer: Layer
    ridge: RidgeFit
    predictions: Float[np.ndarray, "n t"] = field(repr=False)
    route: str
    samples: SolvedSamples | None = field(default=None, repr=False)
    centre: Float[np.ndarray, " p"] | None = field(default=None, repr=False)

    def judged_rows(self) -> Int[np.ndarray, " k"]:
        """The samples with weight that were left out; where there are groups, one of each.

        Samples of a group are left out together, and tell one thing. Which of them stands for its
        group is drawn at random, always the same.
        """
        assert self.samples is not None
        data = self.samples.data
        rows = self.samples.rows[data.positive_rows]
        is_left_out = np.isfinite(self.predictions[rows]).all(axis=1)
        if data.groups is None:
            return rows[is_left_out]

        groups = data.groups[data.positive_rows][is_left_out]
        rows = rows[is_left_out]
        order = np.random.default_rng(0).permutation(len(rows))
        _, first = np.unique(groups[order], return_index=True)
        return np.sort(rows[order[first]])

    def in_units(self, exponent: int) -> LayerFit:
        """The fit to outputs 2^exponent times as large."""
        return replace(
            self,
            layer=self.layer.in_units(exponent),
            ridge=self.ridge.in_units(exponent),
            predictions=np.ldexp(self.predictions, exponent),
        )


@dataclass(frozen=True)
class ValueProblem:
    """What a route is given: samples, heads, and the ridge problem of their outputs.

    ``heads`` are drawn, or are the distribution of infinitely many. ``logistic`` is there where the
    log-loss is minimised, and takes the place of the ridge problem.
    """

    samples: SolvedSamples
    heads: HeadDraw | HeadDistribution
    ridge: RidgeProblem
    spec: LayerSpec
    keep_factor: bool = False
    logistic: LogisticProblem | None = None

    @property
    def batch(self) -> Any:
        """The samples themselves."""
        return self.samples.data.samples

    def with_samples(self, samples: Any) -> ValueProblem:
        """The same problem with the same samples in another place."""
        data = self.samples.data.with_samples(samples)
        return replace(self, samples=replace(self.samples, data=data))

    @property
    def extras(self) -> Float[np.ndarray, "n c"]:
        """Sample-level features, scaled; perhaps none of them."""
        return extras_or_none(self.batch)

    def finite_layer(self, values: Float[np.ndarray, "p t"], intercept: np.ndarray) -> FiniteLayer:
        """The layer of these values: those of all heads, then those of the extras."""
        assert isinstance(self.heads, HeadDraw)
        width = self.heads.dim + 1
        n_features = self.heads.n_heads * width
        return FiniteLayer(
            heads=self.heads,
            values=values[:n_features].reshape(self.heads.n_heads, width, -1),
            intercept=intercept,
            activation=self.spec.activation,
            dtype=self.spec.dtype,
            device=self.spec.device,
            extras_values=_values_of_extras(values[n_features:]),
        )

    def kernel_layer(self, ridge: RidgeFit) -> KernelLayer:
        """The layer of infinitely many heads with these dual coefficients."""
        assert not isinstance(self.heads, HeadDraw)
        # samples of weight 0 have dual coefficient 0: predictions need not compare with them
        rows = self.samples.data.positive_rows
        sets = self.batch
        if len(rows) < len(self.batch):
            sets = self.batch[rows]

        # the linear kernel of the extras is finite: its part is kept as values, Zᵀa
        extras_values = _values_of_extras(self.extras.T @ ridge.coef)
        if extras_values is not None:
            sets = sets.with_extras(None)
        return KernelLayer(
            distribution=self.heads,
            sets=sets,
            dual=ridge.coef[rows],
            intercept=ridge.intercept,
            activation=self.spec.activation,
            device=self.spec.device,
            dtype=self.spec.dtype,
            extras_values=extras_values,
        )


def solve_values(
    spec: LayerSpec,
    data: TrainingSet,
    heads: HeadDraw | HeadDistribution,
    *,
    draft: bool = False,
    keep_factor: bool = False,
) -> LayerFit:
    """Solve for the values of M heads, or of infinitely many.

    The penalty is chosen by the error on the samples that are left out. The plain version, at one
    penalty, is `keyhole.textbook.ridge`.

    Parameters
    ----------
    spec : LayerSpec
        Of it, activation, alphas, fit_intercept, criterion, dtype, device, solver and memory_budget
        are used.
    data : TrainingSet
        Samples that are prepared: tokens scaled, queries made, pooling set. Extras are further
        features, as they are.
    heads : HeadDraw or head distribution
        M heads; or the distribution of infinitely many, whose exact kernel is used.
    draft : bool
        Whether the fit only serves to be compared with others: its automatic grid of penalties is
        coarse.
    keep_factor : bool
        Whether ``ridge`` keeps its factorisation, on the host.

    Notes
    -----
    Primal O(np² + p³), dual O(n²p + n³), kernel O(tokens² + n³); features are made once if they fit
    the budget, otherwise block by block, three times in primal and twice in dual form.
    """
    # what conjugate gradients cannot do
    is_finite = isinstance(heads, HeadDraw)
    if spec.solver == "cg" and not is_finite:
        raise ValueError(
            "solver='cg' is for finitely many heads: `n_heads` is infinite. Use solver='direct'."
        )
    if spec.solver == "cg" and spec.is_logistic:
        raise ValueError(
            "solver='cg' is for loss='squared_error': Newton steps of the log-loss factorise a "
            "matrix each. Use solver='direct', or loss='squared_error'."
        )
    backend = backend_for(spec.device)
    data = data.with_samples(backend.placed(data.samples))
    if spec.solver == "cg" and data.groups is not None:
        return _leave_groups_out_then_solve_by_gradients(spec, data, heads, draft)

    # conjugate gradients where they are asked for, or where no Gram matrix fits the memory
    n_features = count_features(heads, data.samples)
    may_switch = spec.solver == "auto" and is_finite
    is_too_large = may_switch and exceeds_memory(len(data), n_features, spec.dtype)
    gradients_apply = backend.solves_by_rows and data.groups is None
    use_gradients = gradients_apply and (spec.solver == "cg" or is_too_large)
    if spec.is_logistic and is_too_large:
        raise ValueError(
            f"loss='log_loss' takes the smaller of two Gram matrices, and with {len(data)} "
            f"samples and {n_features} features neither fits the memory. Use fewer heads, "
            "fewer samples, or loss='squared_error', which needs neither."
        )

    samples = SolvedSamples.of(data)
    has_choice = spec.alphas is None or len(spec.alphas) > 1
    if not use_gradients and samples.n_weighted < 2 and has_choice:
        raise ValueError(
            "leave-one-out needs at least two samples: got 1 sample (samples of weight 0 do not "
            "count). Give more samples, or one fixed number as `alpha`."
        )

    # pose the ridge problem
    ridge_problem = RidgeProblem.of(
        samples.data.outputs,
        spec.alphas,
        fit_intercept=spec.fit_intercept,
        weights=samples.data.weights,
        groups=samples.data.groups,
        criterion=spec.criterion,
        draft=draft,
    )
    logistic_problem = None
    if spec.is_logistic:
        logistic_problem = LogisticProblem.of(
            samples.data.outputs,
            spec.alphas,
            fit_intercept=spec.fit_intercept,
            weights=samples.data.weights,
            groups=samples.data.groups,
            draft=draft,
        )
    problem = ValueProblem(
        samples=samples,
        heads=heads,
        ridge=ridge_problem,
        spec=spec,
        keep_factor=keep_factor,
        logistic=logistic_problem,
    )
    if use_gradients:
        from keyhole.solvers.gradients import solve_by_gradients

        return solve_by_gradients(problem)

    # the direct routes: by the exact kernel, or by the smaller Gram matrix of the features; whole
    # groups are left out by the n × n matrix only
    is_smaller = is_finite and data.groups is None and n_features < len(samples)
    layer: Layer
    centre: Float[np.ndarray, " p"] | None = None
    with blas_threads_for(n_features if is_smaller else len(samples)):
        if not is_finite:
            route = "kernel"
            layer, ridge = solve_kernel(problem, backend)
        else:
            # a device that is too small for n × n matrices hands the problem back to the host
            backend = backend.with_room_for(len(samples))
            if spec.is_logistic and is_smaller:
                # the p × p matrices of these Newton steps are made on the host
                backend = backend_for(None)
            if not spec.is_logistic:
                problem = replace(problem, spec=replace(spec, device=backend.device))
            if is_smaller and backend.solves_by_rows:
                route = "primal"
                layer, ridge = solve_primal(problem.with_samples(problem.batch.numpy()))
            else:
                route = "dual"
                problem = problem.with_samples(backend.placed(problem.batch))
                layer, ridge, centre = solve_dual(problem, backend)

    # a warning once: drafts are fitted again, and a fit with its factor was made before
    if not draft and not keep_factor:
        _warn_of_rounding(ridge, spec.dtype)

    # a single sample, left out, leaves nothing to fit: its errors are not known
    if samples.n_weighted < 2:
        unknown = np.full(ridge.errors.shape, np.nan)
        ridge = replace(ridge, errors=unknown)
        if ridge.log_losses is not None:
            ridge = replace(ridge, log_losses=unknown)
    predictions = _left_out_predictions(data, samples, layer, ridge, spec.memory_budget)
    return LayerFit(
        layer=layer,
        ridge=ridge,
        predictions=predictions,
        route=route,
        samples=samples,
        centre=centre,
    )


def _warn_of_rounding(ridge: RidgeFit, dtype: str) -> None:
    """Say so if rounding shows in predictions.

    It does where the user gives a penalty that is tiny beside the kernel.
    """
    assert ridge.moved is not None
    share = float(ridge.moved[ridge.best])
    allowed = max(UNSTEADY, 100 * steadiness(float(np.finfo(dtype).eps)))
    if share > allowed:
        warnings.warn(
            f"alpha = {ridge.alpha:.3g} is so small beside the kernel of the samples that rounding "
            f"moves predictions by about {share:.1e} of the spread of y: predictions in a batch "
            "and one by one differ by as much. Use alpha='loo', a larger number, or "
            "scaling='standard' if tokens are far from zero.",
            RoundingWarning,
            stacklevel=2,
        )


def _left_out_predictions(
    data: TrainingSet, samples: SolvedSamples, layer: Layer, ridge: RidgeFit, memory_budget: int
) -> Float[np.ndarray, "n t"]:
    """Leave-one-out predictions, y − e, of the samples as they were given."""
    assert ridge.left_out is not None
    predictions = np.full(data.outputs.shape, np.nan)
    if samples.n_weighted > 1:
        predictions[samples.rows] = samples.data.outputs - ridge.left_out

    # a sample of weight 0 had no part in the fit: the layer itself is the fit without it
    unsolved = samples.unsolved_rows
    if len(unsolved) > 0:
        predictions[unsolved] = layer.predict(data.samples[unsolved], memory_budget=memory_budget)
    return predictions


def _leave_groups_out_then_solve_by_gradients(
    spec: LayerSpec, data: TrainingSet, heads: HeadDraw | HeadDistribution, draft: bool
) -> LayerFit:
    """Choose the penalty by a direct fit that leaves groups out, then solve by gradients.

    Errors and leave-one-out predictions are those of the direct fit.
    """
    judged = solve_values(replace(spec, solver="direct"), data, heads, draft=draft)
    chosen = replace(spec, alphas=np.array([judged.ridge.alpha]), classifies=False)
    final = solve_values(chosen, replace(data, groups=None), heads, draft=draft)
    ridge = replace(judged.ridge, residual=final.ridge.residual, n_iter=final.ridge.n_iter)
    return replace(final, ridge=ridge, predictions=judged.predictions)


def solve_primal(problem: ValueProblem) -> tuple[FiniteLayer, RidgeFit]:
    """Sum ΦᵀΦ over rows, then pass over the rows again for leave-one-out.

    v solves (ΦᵀΦ + αI) v = Φᵀy for centred Φ and y, the same v as in `solve_dual`.
    """
    heads = problem.heads
    assert isinstance(heads, HeadDraw)
    spec = problem.spec
    batch = problem.batch
    n = len(batch)
    extras = problem.extras.astype(spec.dtype)
    row_bytes = count_features(heads, batch) * np.dtype(spec.dtype).itemsize

    def features_of(part: Any, extras_of_part: np.ndarray) -> np.ndarray:
        return beside(
            attention_features(part, heads, spec.activation, dtype=spec.dtype), extras_of_part
        )

    # all features at once if they fit the budget, else block by block of samples
    all_features = None
    if n * row_bytes <= spec.memory_budget:
        all_features = features_of(batch, extras)
    # the solver makes a few temporaries of the size of a block
    rows_per_block = block_size(6 * row_bytes, spec.memory_budget)

    def row_blocks() -> Iterator[np.ndarray]:
        for rows in blocks(n, rows_per_block):
            if all_features is not None:
                yield all_features[rows]
            else:
                yield features_of(batch[rows], extras[rows])

    if problem.logistic is not None:
        ridge = logistic_rows(row_blocks, problem.logistic)
    else:
        ridge = ridge_rows(row_blocks, problem.ridge, keep_factor=problem.keep_factor)
    return problem.finite_layer(ridge.coef, ridge.intercept), ridge


def solve_dual(
    problem: ValueProblem, backend: Backend
) -> tuple[FiniteLayer, RidgeFit, Float[np.ndarray, " p"] | None]:
    """Sum K = ΦΦᵀ over blocks of heads, solve for a, then v = Φᵀa over the blocks again.

    The layer, the ridge fit, and the centre that was taken off every feature, if any was. The plain
    version is the first five lines of `keyhole.textbook`: `features`, then `ridge`.

    With an intercept a constant may be taken from every feature. It is the mean over all samples of
    positive weight, for two reasons. The rounding of products is then in proportion to what varies:
    on attention features in float32 (n = 2000, p = 17000) the error of ΦΦᵀ falls from 0.42 to 0.25
    units of rounding of λ_max. And the diagonal of K, by which `RidgeFit.moved` is measured, is the
    same whatever the order of the samples. About the mean of every fifth sample it differed by 20 %
    between two orders, and other penalties were allowed.
    """
    assert isinstance(problem.heads, HeadDraw)
    spec = problem.spec
    batch = problem.batch
    heads = problem.heads.seen_by(query=batch.has_query).stored(spec.memory_budget // 4)

    # the samples whose mean feature is taken off; drafts need no such care, and sums in float64
    # neither
    centred_rows = None
    is_final = problem.ridge.fit_intercept and not problem.ridge.draft
    if is_final and not backend.sums_in_float64:
        centred_rows = problem.samples.data.positive_rows

    # K = ΦΦᵀ, of which leaving groups out, and Newton steps, read both triangles
    products = backend.products(
        batch,
        heads,
        spec.activation,
        dtype=spec.dtype,
        memory_budget=spec.memory_budget,
        centred_rows=centred_rows,
    )
    reads_both = problem.ridge.groups is not None or problem.logistic is not None
    gram = products.gram(problem.extras, both_triangles=reads_both)
    if problem.logistic is not None:
        ridge = backend.logistic(gram, problem.logistic, rounding=products.rounding)
    else:
        ridge = backend.ridge(
            gram,
            problem.ridge,
            rounding=products.rounding,
            overwrite_gram=True,
            keep_factor=problem.keep_factor,
            memory_budget=spec.memory_budget,
        )

    # v = Φᵀa, and <v, φ − centre> + b = <v, φ> + (b − <v, centre>)
    values = products.values(ridge.coef)
    intercept = ridge.intercept
    if products.centre is not None:
        intercept = intercept - products.centre @ values
    all_values = np.concatenate([values, problem.extras.T @ ridge.coef])
    return problem.finite_layer(all_values, intercept), ridge, products.centre


def solve_kernel(problem: ValueProblem, backend: Backend) -> tuple[KernelLayer, RidgeFit]:
    """Ridge on the exact kernel of infinitely many heads, plus the linear kernel of the extras.

    The plain version is `keyhole.textbook.kernel`, then `keyhole.textbook.ridge`.
    """
    assert not isinstance(problem.heads, HeadDraw)
    spec = problem.spec
    gram = backend.kernel_gram(
        problem.batch,
        problem.extras,
        problem.heads,
        spec.activation,
        dtype=spec.dtype,
        memory_budget=spec.memory_budget,
    )
    if problem.logistic is not None:
        rounding = backend.kernel_rounding(spec.dtype)
        ridge = backend.logistic(gram, problem.logistic, rounding=rounding)
    else:
        ridge = backend.ridge(
            gram,
            problem.ridge,
            rounding=backend.kernel_rounding(spec.dtype),
            overwrite_gram=True,
            keep_factor=problem.keep_factor,
            memory_budget=spec.memory_budget,
        )
    return problem.kernel_layer(ridge), ridge


def count_features(heads: HeadDraw | HeadDistribution, samples: Any) -> int:
    """p: M·D for M heads, and one for each sample-level feature."""
    n_extras = extras_or_none(samples).shape[1]
    if isinstance(heads, HeadDraw):
        return heads.n_heads * (heads.dim + 1) + n_extras
    return n_extras


def extras_or_none(samples: Any) -> Float[np.ndarray, "n c"]:
    """The sample-level features of samples, as an array without columns where there are none."""
    if samples.extras is None:
        return np.zeros((len(samples), 0))
    return np.asarray(samples.extras)


def _values_of_extras(values: Float[np.ndarray, "c t"]) -> Float[np.ndarray, "c t"] | None:
    """The coefficients of the extras, None where there are no extras."""
    if len(values) == 0:
        return None
    return np.ascontiguousarray(values)


def beside(
    features: Float[np.ndarray, "n p"], extras: Float[np.ndarray, "n c"]
) -> Float[np.ndarray, "n q"]:
    """Features and extras side by side; the features themselves where there are no extras."""
    if extras.shape[1] == 0:
        return features
    return np.concatenate([features, extras], axis=1, dtype=features.dtype)


def exceeds_memory(n: int, n_features: int, dtype: str) -> bool:
    """Whether the smaller of both Gram matrices, n × n or p × p, outgrows this machine's memory.

    What its factorisation takes counts too.
    """
    if not hasattr(os, "sysconf"):
        return False
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # matrices at a time: p × p ones are decomposed into eigenvectors, n × n ones in place
    is_primal = n_features < n
    if is_primal:
        copies = 4.0
    else:
        copies = 1.5
    needed = copies * min(n, n_features) ** 2 * np.dtype(dtype).itemsize
    return bool(needed > 0.8 * memory)
