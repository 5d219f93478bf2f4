"""The learner of the paper's theorems: a convex loss is minimised over a norm ball of values.

The plain version of what is minimised, and of the norms that are bounded, is
`keyhole.textbook.norm_ball_objective` and `keyhole.textbook.norms`.
docs/explanation/ridge_or_norm_ball.md compares it with ridge, and says how radii are chosen.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float, Int
from scipy.special import log_softmax
from sklearn.base import ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils._param_validation import HasMethods, Interval, StrOptions
from sklearn.utils.metaestimators import available_if

from keyhole.attention.activations import Activation
from keyhole.attention.features import apply_values, attention_features, key_contributions
from keyhole.attention.heads import HeadDistribution, HeadDraw
from keyhole.data.sets import SampleBatch
from keyhole.data.tokens import TokenRule
from keyhole.estimators.base import SetModel, without_output_axis
from keyhole.estimators.classes import check_weighted_classes, number_labels, one_vs_rest
from keyhole.estimators.radii import Theory, candidate_paths, choose_ball, tabulate
from keyhole.estimators.validation import (
    as_distribution,
    as_dtype,
    as_finite_n_heads,
    as_outputs,
    as_seed,
    as_sets,
    as_weights,
)
from keyhole.fit.samples import TrainingSet
from keyhole.registry import ACTIVATIONS, QUERIES, SCALINGS
from keyhole.solve.ball import LOSSES, BallProblem, NormBall, Solution, minimise


class NormBallWarning(ConvergenceWarning):
    """The solver stopped before the duality gap was below the tolerance."""


class NormBallModel(SetModel):
    """What `NormBallRegressor` and `NormBallClassifier` share: settings, the fit, and outputs."""

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "n_heads": [Interval(Integral, 1, None, closed="left"), Real],
        "heads": [HasMethods("sample"), None],
        "group_radius": [
            StrOptions({"cv", "theory"}),
            Interval(Real, 0, None, closed="both"),
            "array-like",
        ],
        "ball_radius": [
            StrOptions({"matched", "cv", "theory"}),
            Interval(Real, 0, None, closed="both"),
            "array-like",
        ],
        "activation": [StrOptions(set(ACTIVATIONS))],
        "fit_intercept": ["boolean"],
        "random_state": ["random_state", np.random.Generator],
        "complexity": [Interval(Real, 0, None, closed="neither"), None],
        "delta": [Interval(Real, 0, 1, closed="neither")],
        "constant": [Interval(Real, 0, None, closed="neither")],
        "n_folds": [Interval(Integral, 2, None, closed="left")],
        "tol": [Interval(Real, 0, None, closed="neither")],
        "max_iter": [Interval(Integral, 1, None, closed="left")],
        "dtype": [StrOptions({"float64", "float32"}), type, np.dtype],
        "scaling": [StrOptions(set(SCALINGS))],
        "query": [StrOptions(set(QUERIES))],
    }

    def _fit_ball(self, data: TrainingSet, loss: str) -> Float[np.ndarray, "m e t"]:
        """The values of least loss in the ball."""
        n_heads = as_finite_n_heads(
            self.n_heads,
            "the norm ball: it bounds the values of each head. Use a large number, or "
            "kh.AttentionRegressor(n_heads=math.inf) for the exact kernel.",
        )
        theory = Theory(self.complexity, self.delta, self.constant, n_heads)
        paths = candidate_paths(self.group_radius, self.ball_radius, theory)

        # tokens and extras, scaled as asked; samples of weight 0 have no part in the fit
        if data.weights is not None:
            data = data[np.flatnonzero(data.weights > 0)]
        self.tokens_ = TokenRule.learn(
            data.samples,
            self.scaling,
            self.query,
            weights=data.weights,
            fit_intercept=bool(self.fit_intercept),
        )
        ready = self.tokens_.apply(data.samples)

        # the heads, and their features
        self.heads_ = as_distribution(self.heads)
        seed = as_seed(self.random_state)
        heads = HeadDraw(self.heads_, n_heads, ready.dim, seed, ready.query_dim)
        design = paper_features(ready, heads, self.activation, as_dtype(self.dtype))

        # the ball, and the values in it
        fit_intercept = bool(self.fit_intercept)
        centred = Centred.of(design, data.outputs, data.shares, loss, fit_intercept)
        problem = BallProblem(
            design=centred.design,
            targets=centred.targets,
            weights=data.shares,
            loss=LOSSES[loss],
            ball=NormBall(math.inf, math.inf),
            group_size=heads.dim + 1,
            fit_intercept=fit_intercept,
        )
        trials, ball, start = choose_ball(
            problem,
            paths,
            n_folds=self.n_folds,
            seed=seed,
            tol=self.tol,
            max_iter=self.max_iter,
        )
        solution = minimise(
            replace(problem, ball=ball), tol=self.tol, max_iter=self.max_iter, start=start
        )

        # a fit that stopped early is stored, and says so
        n_extras = 0 if ready.extras is None else ready.extras.shape[1]
        values = self._store_layer(solution, heads, centred, n_extras)
        self.group_radius_ = ball.group_radius
        self.ball_radius_ = ball.ball_radius
        self.objective_ = solution.objective
        self.duality_gap_ = solution.gap
        self.n_iter_ = solution.n_iter
        self.cv_results_ = tabulate(trials)
        if not solution.converged:
            warnings.warn(
                f"{type(self).__name__} stopped after {solution.n_iter} iterations at a relative "
                f"duality gap of {solution.relative_gap:.2e}, where `tol` asked for "
                f"{self.tol:.2e}: raise `max_iter`, or `tol` if that gap will do. Columns of very "
                "different size slow it down: bring the coordinates of tokens to a similar scale, "
                "for example with scaling='standard'.",
                NormBallWarning,
                stacklevel=3,
            )
        return values

    def _store_layer(
        self, solution: Solution, heads: HeadDraw, centred: Centred, n_extras: int
    ) -> Float[np.ndarray, "m e t"]:
        """Store the layer that predicts, which has active heads only; return the values of all.

        Extras were further columns, times √M.
        """
        n_of_heads = heads.n_heads * (heads.dim + 1)
        values = solution.values[:n_of_heads].reshape(heads.n_heads, heads.dim + 1, -1)
        extras_values = None
        if n_extras > 0:
            of_extras = solution.values[n_of_heads:][:n_extras]
            extras_values = math.sqrt(heads.n_heads) * of_extras
        active = np.flatnonzero(values.any(axis=(1, 2)))
        self.layer_ = BallLayer(
            heads=heads,
            active=active,
            values=values[active],
            intercept=centred.intercept(solution),
            activation=self.activation,
            dtype=as_dtype(self.dtype),
            extras_values=extras_values,
        )
        self.active_heads_ = active
        return values


@dataclass(frozen=True)
class BallLayer:
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

    def predict(self, samples: SampleBatch) -> Float[np.ndarray, "n t"]:
        """Return f on every sample. O(tokens · k · D)."""
        outputs = self._sum_over_heads(apply_values, samples, len(samples)) + self.intercept
        if self.extras_values is not None:
            outputs = outputs + samples.extras @ self.extras_values
        return outputs

    def contributions(self, samples: SampleBatch) -> Float[np.ndarray, "k t"]:
        """What every key adds to f, sample after sample."""
        n_keys = int(samples.unpooled.token_counts.sum())
        return self._sum_over_heads(key_contributions, samples, n_keys)

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
    ) -> Float[np.ndarray, "k t"]:
        """The outputs of the active heads; zeros where there is none."""
        if len(self.active) == 0:
            return np.zeros((n_rows, len(self.intercept)))
        outputs = outputs_of(
            samples.with_extras(None),
            self.drawn_heads(has_query=samples.has_query),
            # features of k heads carry a factor k^{-1/2}
            math.sqrt(len(self.active)) * self.values,
            self.activation,
            dtype=self.dtype,
        )
        return np.asarray(outputs, dtype=np.float64)


@dataclass(frozen=True)
class Centred:
    """Features and targets less their weighted means, where a free intercept makes up for them.

    Without an intercept nothing is taken off, and labels stay as they are.
    """

    design: Float[np.ndarray, "n p"] = field(repr=False)
    targets: Float[np.ndarray, "n t"] = field(repr=False)
    feature_means: Float[np.ndarray, " p"] = field(repr=False)
    origin: Float[np.ndarray, " t"]

    @classmethod
    def of(
        cls,
        design: Float[np.ndarray, "n p"],
        targets: Float[np.ndarray, "n t"],
        weights: Float[np.ndarray, " n"],
        loss: str,
        fit_intercept: bool,
    ) -> Centred:
        """The same features and targets, centred; ``design`` is written over."""
        feature_means = np.zeros(design.shape[1])
        origin = np.zeros(targets.shape[1])
        if fit_intercept:
            feature_means = weights @ design
            design -= feature_means
            if not LOSSES[loss].is_of_labels:
                origin = weights @ targets
        return cls(design, targets - origin, feature_means, origin)

    def intercept(self, solution: Solution) -> Float[np.ndarray, " t"]:
        """The intercept for features and targets as they were."""
        return solution.intercept + self.origin - self.feature_means @ solution.values


def paper_features(
    samples: SampleBatch, heads: HeadDraw, activation: str, dtype: str
) -> Float[np.ndarray, "n p"]:
    """The features of all heads without M^{-1/2}, then extras, in float64.

    Extras are further groups of columns, filled up with zeros, and times √M: in proportion to
    features they are what they are to ridge.
    """
    extras = samples.extras
    if extras is None:
        extras = np.zeros((len(samples), 0))
    n_missing = -extras.shape[1] % (heads.dim + 1)
    extras = np.pad(extras, ((0, 0), (0, n_missing)))
    features = attention_features(samples, heads, activation, dtype=dtype)
    design = np.concatenate([features, extras], axis=1, dtype=np.float64)
    design *= math.sqrt(heads.n_heads)
    return design


class NormBallRegressor(MultiOutputMixin, RegressorMixin, NormBallModel):
    """Regression on sets by one attention layer of frozen random heads, values in a norm ball.

    The paper's learner, in the paper's scaling: with φ_m(x) = (1/N) Σ_i σ(s_mi) x~_i (no M^{-1/2})
    and f(x) = Σ_m <v_m, φ_m(x)> + b, it minimises the mean loss of f over

        Σ_m |v_m| ≤ group_radius = K_1     and     (Σ_m |v_m|²)^{1/2} ≤ ball_radius = √(K_2/M),

    b being free. The bound on the sum of norms prunes: heads outside ``active_heads_`` have v_m =
    0, and predictions do not compute them.

    Parameters
    ----------
    n_heads : int
        M.
    heads : head distribution, optional
        ``kh.GaussianHeads()`` if None.
    loss : "huber", "absolute" or "squared"
        r²/2 up to |r| = 1 and |r| − 1/2 beyond; |r|; r²/2. One is meant in the units of y: scale y
        so that it is the size of a large residual. Summed over outputs.
    group_radius : "cv", "theory", number (math.inf allowed) or sequence of numbers
        K_1. "cv" doubles it until the cross-validated loss rises or stays the same twice, from half
        the least radius at which the training loss could be zero, whatever the scale of y. A
        sequence is chosen from by cross-validation. "theory" is c √B.
    ball_radius : "matched", "cv", "theory", number (math.inf allowed) or sequence of numbers
        √(K_2/M). "matched" is group_radius/√(δM), the ratio of the theory's radii. "cv" chooses
        among that ratio, no bound at all, and group_radius/√M, at which the group norm does not
        matter. "theory" is √(c B/(δ M)).
    activation : str
        "relu", "softmax", "linear", "square", "step" or "exp".
    fit_intercept : bool
        Whether f has an intercept b.
    random_state : int, RandomState, Generator or None
        An integer s means the heads ``heads.sample(n_heads, d, s)``.
    complexity : float, optional
        B of the target, for "theory": ``kh.theory.paper_complexity(target)``.
    delta : float
        δ of the theory's radii.
    constant : float
        c of the theory's radii.
    n_folds : int
        Folds of cross-validation, shuffled by ``random_state``.
    tol : float
        Stop when the duality gap is below tol times the loss (or times 1e-3 of the loss without
        heads, if that is larger).
    max_iter : int
        Most iterations.
    dtype : "float64" or "float32"
        Precision in which features are computed. The solver works in float64.
    scaling : "none", "sphere" or "standard"
        What is done to tokens first, as for `AttentionRegressor`; "auto" takes the one of least
        leave-one-out loss of ridge fits to 128 to 500 samples. The paper's bounds are for tokens as
        they come, which is the default.
    query : "given", "mean" or "each"
        As for `AttentionRegressor`, chosen likewise.

    Attributes
    ----------
    values_ : array (M, D) or (M, D, outputs)
        v; exactly zero for pruned heads.
    active_heads_ : array (k,) of int
        The m with v_m ≠ 0, in increasing order.
    intercept_ : float or array (outputs,)
        b.
    group_radius_ : float
        The group radius used.
    ball_radius_ : float
        The ball radius used.
    objective_ : float
        Mean loss on the training set.
    duality_gap_ : float
        The objective is at most so much above the minimum: certified, not estimated.
    n_iter_ : int
        Iterations of the last fit.
    cv_results_ : dict of arrays
        group_radius, ball_radius, mean_test_loss, fold_test_losses, mean_active_heads of the radii
        tried.
    heads_ : head distribution
        What the heads were drawn from.
    layer_ : PrunedLayer
        What predicts: the active heads, and their values.
    tokens_ : TokenRule
        Scaling and query used.
    n_features_in_ : int
        Token dimension d.

    Notes
    -----
    ``X`` as for `AttentionRegressor`. The features, an array (n, M·D) of float64, are in memory,
    and an iteration costs 4·n·M·D flops. If the solver stops early it warns with a
    ``ConvergenceWarning``.

    Examples
    --------
    >>> import keyhole as kh
    >>> target = kh.targets.TokenPower(2, dim=4)
    >>> train = kh.targets.sphere_sets(300, n_keys=6, dim=4, seed=0)
    >>> test = kh.targets.sphere_sets(300, n_keys=6, dim=4, seed=1)
    >>> model = kh.NormBallRegressor(n_heads=100, tol=0.03, random_state=0).fit(
    ...     train, target(train)
    ... )
    >>> bool(model.score(test, target(test)) > 0.95)
    True
    >>> model.values_.shape, len(model.active_heads_) < 100
    ((100, 5), True)
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **NormBallModel._parameter_constraints,
        "loss": [StrOptions({"huber", "absolute", "squared"})],
    }

    def __init__(
        self,
        n_heads: int = 512,
        heads: HeadDistribution | None = None,
        loss: Literal["huber", "absolute", "squared"] = "huber",
        group_radius: float | Sequence[float] | np.ndarray | Literal["cv", "theory"] = "cv",
        ball_radius: float
        | Sequence[float]
        | np.ndarray
        | Literal["matched", "cv", "theory"] = "matched",
        activation: Activation = "relu",
        fit_intercept: bool = True,
        random_state: int | np.random.RandomState | np.random.Generator | None = None,
        *,
        complexity: float | None = None,
        delta: float = 0.05,
        constant: float = 1.0,
        n_folds: int = 3,
        tol: float = 1e-3,
        max_iter: int = 20_000,
        dtype: Literal["float64", "float32"] | type | np.dtype = "float64",
        scaling: Literal["none", "sphere", "standard"] = "none",
        query: Literal["given", "mean", "each"] = "given",
    ) -> None:
        self.n_heads = n_heads
        self.heads = heads
        self.loss = loss
        self.group_radius = group_radius
        self.ball_radius = ball_radius
        self.activation = activation
        self.fit_intercept = fit_intercept
        self.random_state = random_state
        self.complexity = complexity
        self.delta = delta
        self.constant = constant
        self.n_folds = n_folds
        self.tol = tol
        self.max_iter = max_iter
        self.dtype = dtype
        self.scaling = scaling
        self.query = query

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> NormBallRegressor:
        """Fit the values. ``sample_weight`` weighs the loss of each sample."""
        self._validate_params()
        samples = as_sets(self, X, reset=True).numpy()
        outputs = as_outputs(self, y, samples)
        self.single_output_ = np.asarray(y).ndim == 1
        data = TrainingSet(samples, outputs, as_weights(sample_weight, samples))
        values = self._fit_ball(data, self.loss)

        # an axis of outputs where y had one, even for one output
        self.values_ = without_output_axis(values, self.single_output_)
        self.intercept_: Any = self.layer_.intercept
        if self.single_output_:
            self.intercept_ = float(self.layer_.intercept[0])
        return self

    def _has_one_output(self) -> bool:
        return self.single_output_

    def predict(self, X: Any) -> Float[np.ndarray, "n ..."]:
        """Return predictions, shape (n,) or (n, outputs) as ``y`` had."""
        outputs = self._layer_outputs(X)
        return without_output_axis(outputs, self.single_output_)


def _has_probabilities(model: NormBallClassifier) -> bool:
    """Whether the loss has probabilities; raise if not.

    The loss is that of the fit, or before a fit the parameter.
    """
    if getattr(model, "loss_", model.loss) == "hinge":
        raise AttributeError(
            "the hinge loss has no probabilities: use loss='logistic', or decision_function."
        )
    return True


class NormBallClassifier(ClassifierMixin, NormBallModel):
    """Classification of sets by one attention layer of frozen random heads, values in a norm ball.

    As `NormBallRegressor`, with a loss for labels. Several classes share the heads and the ball:
    the norm of a head is that of its values for all classes together, so a head is kept or pruned
    for all of them.

    Parameters
    ----------
    loss : "logistic" or "hinge"
        "logistic" is binary for two classes and multinomial for more; its probabilities are the
        model's own. "hinge" is summed over one-vs-rest targets for more than two classes.
    n_heads : int
        Number of heads M.
    heads : head distribution, optional
        ``kh.GaussianHeads()`` if None.
    group_radius : "cv", "theory", number or sequence of numbers
        K₁, the bound of Σ_m |v_m|; see `NormBallRegressor`.
    ball_radius : "matched", "cv", "theory", number or sequence of numbers
        √(K₂/M), the bound of (Σ_m |v_m|²)^{1/2}; see `NormBallRegressor`.
    activation : str
        "relu", "softmax", "linear", "square", "step" or "exp".
    fit_intercept : bool
        Whether scores have an intercept.
    random_state : int, RandomState, Generator or None
        Seed of the heads.
    complexity : float, optional
        B(f*) of the target, for radii "theory".
    delta : float
        δ of the theorem, for radii "theory" and "matched".
    constant : float
        The universal constant of the theorem, for radii "theory".
    n_folds : int
        Folds of cross-validation, stratified by class and shuffled by ``random_state``. The only
        sample of a class is never held out.
    tol : float
        Duality gap at which the solver stops, as a share of the objective.
    max_iter : int
        Most iterations.
    dtype : "float64" or "float32"
        Precision of the features.
    scaling : "none", "sphere" or "standard"
        What is done to tokens first.
    query : "given", "mean" or "each"
        Where the query of a set comes from.

    Attributes
    ----------
    classes_ : array (classes,)
        The labels of y, sorted. Each needs a sample of positive weight.
    loss_ : str
        The loss of the fit: another parameter takes effect with the next one.
    intercept_ : array (1,) or (classes,)
        b.
    values_ : array (M, D), or (M, D, classes) for more than two classes
        v; exactly zero for pruned heads.
    active_heads_ : array (k,) of int
        The m with v_m ≠ 0, in increasing order.
    group_radius_ : float
        The group radius used.
    ball_radius_ : float
        The ball radius used.
    objective_ : float
        Mean loss on the training set.
    duality_gap_ : float
        The objective is at most so much above the minimum.
    n_iter_ : int
        Iterations of the last fit.
    cv_results_ : dict of arrays
        What cross-validation found for each pair of radii; see `NormBallRegressor`.
    layer_ : PrunedLayer
        What predicts: the active heads, and their values.
    heads_ : head distribution
        What they were drawn from.
    tokens_ : TokenRule
        Scaling and query used.
    n_features_in_ : int
        Token dimension d.

    See Also
    --------
    NormBallRegressor : The same for numbers.
    AttentionClassifier : Ridge values: faster, with exact leave-one-out.

    Examples
    --------
    >>> import numpy as np
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(400, n_keys=5, dim=4, seed=0)
    >>> score = kh.targets.TokenPower(2, dim=4)(sets)
    >>> label = np.where(score > np.median(score), "wide", "narrow")
    >>> model = kh.NormBallClassifier(n_heads=50, tol=0.03, random_state=0).fit(
    ...     sets[:300], label[:300]
    ... )
    >>> bool(model.score(sets[300:], label[300:]) > 0.8)
    True
    >>> model.predict_proba(sets[300:]).shape
    (100, 2)
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        **NormBallModel._parameter_constraints,
        "loss": [StrOptions({"logistic", "hinge"})],
    }

    def __init__(
        self,
        n_heads: int = 512,
        heads: HeadDistribution | None = None,
        loss: Literal["logistic", "hinge"] = "logistic",
        group_radius: float | Sequence[float] | np.ndarray | Literal["cv", "theory"] = "cv",
        ball_radius: float
        | Sequence[float]
        | np.ndarray
        | Literal["matched", "cv", "theory"] = "matched",
        activation: Activation = "relu",
        fit_intercept: bool = True,
        random_state: int | np.random.RandomState | np.random.Generator | None = None,
        *,
        complexity: float | None = None,
        delta: float = 0.05,
        constant: float = 1.0,
        n_folds: int = 3,
        tol: float = 1e-3,
        max_iter: int = 20_000,
        dtype: Literal["float64", "float32"] | type | np.dtype = "float64",
        scaling: Literal["none", "sphere", "standard"] = "none",
        query: Literal["given", "mean", "each"] = "given",
    ) -> None:
        self.n_heads = n_heads
        self.heads = heads
        self.loss = loss
        self.group_radius = group_radius
        self.ball_radius = ball_radius
        self.activation = activation
        self.fit_intercept = fit_intercept
        self.random_state = random_state
        self.complexity = complexity
        self.delta = delta
        self.constant = constant
        self.n_folds = n_folds
        self.tol = tol
        self.max_iter = max_iter
        self.dtype = dtype
        self.scaling = scaling
        self.query = query

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> NormBallClassifier:
        """Fit the values. ``sample_weight`` weighs the loss of each sample."""
        self._validate_params()
        samples = as_sets(self, X, reset=True).numpy()
        weights = as_weights(sample_weight, samples)
        self.classes_, labels = number_labels(self, y, samples)
        check_weighted_classes(self.classes_, labels, weights)

        # two classes have one output; several have one each, 0 and 1 where the loss is multinomial
        outputs = one_vs_rest(labels, len(self.classes_))
        loss: str = self.loss
        if len(self.classes_) > 2 and loss == "logistic":
            outputs = (outputs > 0).astype(np.float64)
            loss = "multinomial"
        values = self._fit_ball(TrainingSet(samples, outputs, weights), loss)
        self.loss_ = self.loss

        self.values_ = without_output_axis(values, len(self.classes_) == 2)
        self.intercept_ = self.layer_.intercept
        return self

    def _has_one_output(self) -> bool:
        return len(self.classes_) == 2

    def decision_function(self, X: Any) -> Float[np.ndarray, "n ..."]:
        """Return scores: (n,) for two classes, positive for ``classes_[1]``.

        Otherwise (n, classes).
        """
        outputs = self._layer_outputs(X)
        return without_output_axis(outputs, self._has_one_output())

    def predict(self, X: Any) -> np.ndarray:
        """Return the label with the highest score."""
        winners = self._class_scores(X).argmax(axis=1)
        return np.asarray(self.classes_[winners])

    @available_if(_has_probabilities)
    def predict_proba(self, X: Any) -> Float[np.ndarray, "n c"]:
        """Return the model's own probabilities: logistic for two classes, softmax for more."""
        return np.asarray(np.exp(self.predict_log_proba(X)))

    @available_if(_has_probabilities)
    def predict_log_proba(self, X: Any) -> Float[np.ndarray, "n c"]:
        """Return the logarithms of `predict_proba`, without underflow."""
        return np.asarray(log_softmax(self._class_scores(X), axis=1))

    def _class_scores(self, X: Any) -> np.ndarray:
        """One column of scores per class; of two classes, 0 for the first and f for the second.

        softmax of (0, f) is the logistic function of f.
        """
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return np.stack([np.zeros_like(scores), scores], axis=1)
        return scores
