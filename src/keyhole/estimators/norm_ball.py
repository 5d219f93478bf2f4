"""The learner of the paper's theorems: a convex loss is minimised over a norm ball of values.

The plain version of what is minimised, and of the norms that are bounded, is
`keyhole.textbook.norm_ball_objective` and `keyhole.textbook.norms`. docs/explanation/defaults.md
compares it with ridge, and says how radii are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float
from scipy.special import log_softmax
from sklearn.base import ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils._param_validation import HasMethods, Interval, StrOptions
from sklearn.utils.metaestimators import available_if

from keyhole.attention.activations import ACTIVATIONS, Activation
from keyhole.attention.heads import HeadDistribution, HeadDraw
from keyhole.ball.norm_ball import SolverWarning, warn_if_short
from keyhole.ball_layer import (
    BallFit,
    BallSettings,
    Theory,
    candidate_balls,
    fit_ball_layer,
    tabulate,
)
from keyhole.choose import choose
from keyhole.data.tokens import QUERIES, SCALINGS
from keyhole.estimators.base import (
    LESS_FOR_A_BALL,
    SetModel,
    explained_memory_errors,
    memory_budget,
    without_output_axis,
)
from keyhole.estimators.classes import (
    WeightedClasses,
    classes_with_weight,
    number_labels,
    one_vs_rest,
    without_weightless,
)
from keyhole.estimators.validation import (
    as_distribution,
    as_dtype,
    as_finite_n_heads,
    as_outputs,
    as_seed,
    as_sets,
    as_weights,
)
from keyhole.layer import learn_tokens
from keyhole.spec import LayerSpec
from keyhole.training import TrainingSet


class NormBallWarning(SolverWarning, ConvergenceWarning):
    """The solver stopped before the duality gap was below the tolerance.

    It is a ConvergenceWarning too, for filters that know scikit-learn's.
    """


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
        "scaling": [StrOptions({*SCALINGS, "auto"})],
        "query": [StrOptions({*QUERIES, "auto"})],
    }

    def _fit_ball(self, data: TrainingSet, loss: str) -> BallFit:
        """Choose the token rule as ridge would, then minimise the loss over the ball."""
        # the parameters, as the specification of ridge fits, settings of the solver, and radii
        spec = self._spec()
        theory = Theory(self.complexity, self.delta, self.constant, int(spec.n_heads))
        settings = BallSettings(
            loss=loss,
            fit_intercept=spec.fit_intercept,
            tol=float(self.tol),
            max_iter=int(self.max_iter),
            n_folds=int(self.n_folds),
        )
        balls = candidate_balls(self.group_radius, self.ball_radius, theory)

        with explained_memory_errors("fit", data.samples, spec.n_heads, LESS_FOR_A_BALL):
            # tokens and extras are scaled as asked, or as suits ridge best
            chosen = choose(spec, data).spec
            self.tokens_ = learn_tokens(chosen, data)
            ready = data.with_samples(self.tokens_.apply(data.samples))

            # the heads, drawn as for ridge, and the values in the ball
            assert chosen.heads is not None
            drawn = HeadDraw(
                chosen.heads,
                int(spec.n_heads),
                ready.samples.dim,
                spec.seed,
                ready.samples.query_dim,
            )
            fit = fit_ball_layer(
                ready,
                drawn,
                balls,
                settings,
                activation=spec.activation,
                dtype=spec.dtype,
                memory_budget=spec.memory_budget,
            )

        # a fit that stopped early is stored, and says so
        self._store_fit(fit, chosen.heads)
        warn_if_short(
            fit.solution,
            settings.tol,
            settings.max_iter,
            spec.dtype,
            stacklevel=3,
            who=type(self).__name__,
            category=NormBallWarning,
        )
        return fit

    def _spec(self) -> LayerSpec:
        """The specification of the ridge fits that token rules are compared by."""
        n_heads = as_finite_n_heads(
            self.n_heads,
            "the norm ball: it bounds the values of each head. Use a large number, or "
            "kh.AttentionRegressor(n_heads=math.inf) for the exact kernel.",
        )
        if isinstance(self, ClassifierMixin):
            criterion = "log_loss"
        else:
            criterion = "squared_error"
        return LayerSpec(
            heads=as_distribution(self.heads),
            n_heads=n_heads,
            activation=self.activation,
            pooling="mean",
            scaling=self.scaling,
            query=self.query,
            keys="all",
            fit_intercept=bool(self.fit_intercept),
            criterion=criterion,
            seed=as_seed(self.random_state),
            dtype=as_dtype(self.dtype),
            solver="direct",
            memory_budget=memory_budget(),
        )

    def _store_fit(self, fit: BallFit, heads: HeadDistribution) -> None:
        """Fitted attributes that every fit has."""
        self.heads_ = heads
        self.layer_ = fit.layer
        self.active_heads_ = fit.layer.active
        self.values_ = without_output_axis(fit.values, fit.values.shape[2] == 1)
        self.group_radius_, self.ball_radius_ = fit.radii
        self.objective_ = fit.objective
        self.duality_gap_ = fit.gap
        self.n_iter_ = fit.solution.n_iter
        self.cv_results_ = tabulate(fit.trials)


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
        Folds of cross-validation. Samples are sorted by y and dealt in turn, so folds are balanced.
    tol : float
        Stop when the duality gap is below tol times the loss (or 1e-3 of the best constant's, if
        larger).
    max_iter : int
        Most iterations.
    dtype : "float64" or "float32"
        Precision of features and iterations. Gaps are computed in float64.
    scaling : "none", "sphere", "standard" or "auto"
        What is done to tokens first, as for `AttentionRegressor`; "auto" takes the one of least
        leave-one-out loss of ridge fits to 128 to 500 samples. The paper's bounds are for tokens as
        they come, which is the default.
    query : "given", "mean", "each" or "auto"
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
    layer_ : FiniteLayer
        What predicts: the active heads, and their values.
    tokens_ : TokenRule
        Scaling and query used.
    n_features_in_ : int
        Token dimension d.

    Notes
    -----
    ``X`` as for `AttentionRegressor`. An iteration costs 4·n·q flops for q columns at hand. The
    features are kept if they fit half of scikit-learn's ``working_memory``, and otherwise computed
    anew, block by block of heads, whenever needed. If the solver stops early it warns with a
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
        scaling: Literal["none", "sphere", "standard", "auto"] = "none",
        query: Literal["given", "mean", "each", "auto"] = "given",
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
        fit = self._fit_ball(data, self.loss)

        # an axis of outputs where y had one, even for one output
        if self.single_output_:
            self.intercept_: Any = float(fit.layer.intercept[0])
        else:
            self.intercept_ = fit.layer.intercept
            self.values_ = fit.values
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
        Folds of cross-validation. The only sample of a class is never held out.
    tol : float
        Duality gap at which the solver stops, as a share of the objective.
    max_iter : int
        Most iterations.
    dtype : "float64" or "float32"
        Precision of the features.
    scaling : "none", "sphere", "standard" or "auto"
        What is done to tokens first.
    query : "given", "mean", "each" or "auto"
        Where the query of a set comes from.

    Attributes
    ----------
    classes_ : array (classes,)
        The labels of y, sorted. A class whose samples all have weight 0 keeps its place: its score
        is −1, its probability 0, and it is never predicted. All else is as without those samples.
    class_has_weight_ : bool array (classes,)
        Which classes have a sample of positive weight.
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
    layer_ : FiniteLayer
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
        scaling: Literal["none", "sphere", "standard", "auto"] = "none",
        query: Literal["given", "mean", "each", "auto"] = "given",
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
        # labels, and the classes that have weight: only these are fitted
        self._validate_params()
        samples = as_sets(self, X, reset=True).numpy()
        weights = as_weights(sample_weight, samples)
        self.classes_, labels = number_labels(self, y, samples)
        self.class_has_weight_ = classes_with_weight(self.classes_, labels, weights)
        weighted = WeightedClasses(self.class_has_weight_, first_of_two=0.0)

        # two classes have one output; several have one each, 0 and 1 where the loss is multinomial
        outputs = one_vs_rest(weighted.numbers(labels), weighted.count)
        loss: str = self.loss
        if weighted.count > 2 and loss == "logistic":
            outputs = (outputs > 0).astype(np.float64)
            loss = "multinomial"
        fit = self._fit_ball(TrainingSet(samples, outputs, weights), loss)
        self.loss_ = self.loss

        # one output for every class, those without weight too
        self.layer_ = weighted.of_layer(fit.layer)
        values = weighted.of_all_classes(fit.values, without_weight=0.0)
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
        return without_weightless(scores, getattr(self, "class_has_weight_", None))
