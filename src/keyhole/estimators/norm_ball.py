"""The paper's own learner: a convex loss minimised over a norm ball of values, for regression and classification."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import log_softmax
from sklearn import get_config
from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import assert_all_finite
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d

from keyhole._checks import check_choice, check_count, check_number
from keyhole.estimators._ball_fit import BallFit, BallProblem, fit_ball_layer, tabulate
from keyhole.estimators._input import (
    as_columns,
    as_heads,
    as_law,
    as_seed,
    as_sets,
    as_weights,
    check_given,
    check_layer_options,
    check_lengths,
)
from keyhole.estimators._radii import candidate_balls, check_theory
from keyhole.heads import HeadDraw
from keyhole.sets import SetBatch
from keyhole.solvers.norm_ball import SolverWarning


class NormBallWarning(SolverWarning, ConvergenceWarning):
    """The solver stopped before the gap was as small as asked; scikit-learn's filters see a ConvergenceWarning."""


class _NormBallModel(BaseEstimator):
    """What regression and classification share: parameters, the fit of columns, and scores."""

    def __init__(
        self,
        n_heads: Any = 512,
        law: Any = None,
        loss: Any = "huber",
        group_radius: Any = "cv",
        ball_radius: Any = "matched",
        activation: Any = "relu",
        fit_intercept: Any = True,
        random_state: Any = None,
        *,
        complexity: Any = None,
        delta: Any = 0.05,
        constant: Any = 1.0,
        n_folds: Any = 3,
        tol: Any = 1e-3,
        max_iter: Any = 20_000,
        dtype: Any = "float64",
    ) -> None:
        self.n_heads = n_heads
        self.law = law
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

    def _fit_columns(self, batch: SetBatch, columns: np.ndarray, weights: np.ndarray | None, loss: str) -> BallFit:
        activation, dtype = check_layer_options(self.activation, self.dtype)
        n_heads = _finite_heads(self.n_heads)
        theory = check_theory(self.complexity, self.delta, self.constant, n_heads)
        balls = candidate_balls(self.group_radius, self.ball_radius, theory)
        problem = self._problem(loss)
        heads = HeadDraw(as_law(self.law), n_heads, batch.dim, as_seed(self.random_state))
        options: dict[str, Any] = {"activation": activation, "weights": weights, "dtype": dtype}
        fit = fit_ball_layer(batch, columns, heads, balls, problem, memory_budget=_memory_budget(), **options)
        self._store(fit)
        self._warn_if_short(fit, problem)
        return fit

    def _problem(self, loss: str) -> BallProblem:
        return BallProblem(
            loss,
            bool(self.fit_intercept),
            check_number(self.tol, "tol", minimum=0.0, exclusive=True),
            check_count(self.max_iter, "max_iter"),
            check_count(self.n_folds, "n_folds", minimum=2),
        )

    def _store(self, fit: BallFit) -> None:
        self.layer_ = fit.layer
        self.heads_ = fit.layer.heads
        self.values_ = fit.fit.values
        self.active_heads_ = fit.layer.active
        self.group_radius_, self.ball_radius_ = fit.radii
        self.objective_ = fit.fit.objective
        self.duality_gap_ = fit.fit.duality_gap
        self.n_iter_ = fit.fit.n_iter
        self.cv_results_ = tabulate(fit.trials)

    def _warn_if_short(self, fit: BallFit, problem: BallProblem) -> None:
        if fit.fit.converged:
            return
        remedy = "raise `max_iter`, or `tol` if that gap will do"
        if fit.fit.n_iter < problem.max_iter:
            remedy = "rounding has the last word here: raise `tol`"
            if self.dtype != "float64":
                remedy += ", or use dtype='float64'"
        warnings.warn(
            f"{type(self).__name__} stopped after {fit.fit.n_iter} iterations at a relative duality gap of "
            f"{fit.relative_gap:.2e}, where `tol` asked for {problem.tol:.2e}: {remedy}.",
            NormBallWarning,
            stacklevel=4,
        )

    def _scores(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        batch = as_sets(self, X, reset=False).numpy()
        return self.layer_.predict(batch, memory_budget=_memory_budget())

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags


class NormBallRegressor(MultiOutputMixin, RegressorMixin, _NormBallModel):
    """Regression on sets with a query, by one attention layer with frozen random heads and values in a norm ball.

    The paper's learner, in the paper's scaling: with φ_m(x) = (1/N) Σ_i σ(s_mi) x~_i (no M^{-1/2}) and
    f(x) = Σ_m <v_m, φ_m(x)> + b, it minimises the mean loss of f over

        Σ_m |v_m| ≤ group_radius = K_1     and     (Σ_m |v_m|²)^{1/2} ≤ ball_radius = √(K_2/M),

    b being free. The bound on the sum of norms prunes: heads outside ``active_heads_`` have v_m = 0, and
    predictions do not compute them.

    Parameters
    ----------
    n_heads : int
        M.
    law : law of the heads, optional
        ``kh.GaussianHeads()`` if None.
    loss : "huber", "absolute" or "squared"
        r²/2 up to |r| = 1 and |r| − 1/2 beyond; |r|; r²/2. One is meant in the units of y: scale y so that it
        is the size of a large residual. Summed over outputs.
    group_radius : "cv", "theory", number (math.inf allowed) or sequence of numbers
        K_1. "cv" doubles it until the cross-validated loss rises or stays the same twice, from half the least
        radius at which the training loss could be zero, whatever the scale of y. A sequence is chosen from by
        cross-validation. "theory" is c √B.
    ball_radius : "matched", "cv", "theory", number (math.inf allowed) or sequence of numbers
        √(K_2/M). "matched" is group_radius/√(δM), the ratio of the theory's radii. "cv" chooses among that
        ratio, no bound at all, and group_radius/√M, at which the group norm no longer matters. "theory" is
        √(c B/(δ M)).
    activation : str
        "relu", "softmax", "linear", "square", "step" or "exp".
    fit_intercept : bool
    random_state : int, RandomState, Generator or None
        An integer s means the heads ``law.sample(n_heads, d, s)``.
    complexity : float, optional
        B of the target, for "theory": ``kh.theory.paper_complexity(target)``.
    delta, constant : float
        δ and c of the theory's radii.
    n_folds : int
        Folds of cross-validation. Samples are sorted by y and dealt in turn, so folds are balanced and do not
        depend on the order of the samples; exact copies stay together.
    tol : float
        Stop when the duality gap is below tol times the loss (or 1e-3 of the best constant's, if larger).
    max_iter : int
    dtype : "float64" or "float32"
        Precision of features and iterations. Gaps are computed in float64.

    Attributes
    ----------
    values_ : array (M, D) or (M, D, outputs)
        v; exactly zero for pruned heads.
    active_heads_ : array (k,) of int
        The m with v_m ≠ 0, in increasing order.
    intercept_ : float or array (outputs,)
    group_radius_, ball_radius_ : float
        The radii used.
    objective_ : float
        Mean loss on the training set.
    duality_gap_ : float
        The objective is at most so much above the minimum: certified, not estimated.
    n_iter_ : int
        Iterations of the last fit.
    cv_results_ : dict of arrays
        group_radius, ball_radius, mean_test_loss, fold_test_losses, mean_active_heads of the radii tried.
    heads_ : HeadDraw
        All heads; ``heads_.block(0, M)`` draws them.
    n_features_in_ : int
        Token dimension d.

    Notes
    -----
    ``X`` as for `AttentionRegressor`. An iteration costs 4·n·q flops for q columns at hand; the features are
    kept if they fit half of scikit-learn's ``working_memory``, and otherwise computed anew, block by block of
    heads, whenever needed. If the solver stops early it warns with a ``ConvergenceWarning``.

    Examples
    --------
    >>> import keyhole as kh
    >>> target = kh.targets.TokenPower(2, dim=4)
    >>> train = kh.targets.sphere_sets(300, n_keys=6, dim=4, seed=0)
    >>> test = kh.targets.sphere_sets(300, n_keys=6, dim=4, seed=1)
    >>> model = kh.NormBallRegressor(n_heads=100, random_state=0).fit(train, target(train))
    >>> bool(model.score(test, target(test)) > 0.95)
    True
    >>> model.values_.shape, len(model.active_heads_) < 100
    ((100, 5), True)
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> NormBallRegressor:
        """Fit the values. ``sample_weight`` weighs the loss of each sample."""
        loss = check_choice(self.loss, "loss", ("huber", "absolute", "squared"))
        batch = as_sets(self, X, reset=True).numpy()
        columns = as_columns(self, y, batch)
        fit = self._fit_columns(batch, columns, as_weights(sample_weight, batch), loss)
        self._single = np.asarray(y).ndim == 1
        self.intercept_ = float(fit.layer.intercept[0]) if self._single else fit.layer.intercept
        if not self._single and columns.shape[1] == 1:
            self.values_ = self.values_[:, :, None]
        return self

    def predict(self, X: Any) -> Float[np.ndarray, "n ..."]:
        """Return predictions, shape (n,) or (n, outputs) as ``y`` had."""
        scores = self._scores(X)
        return scores[:, 0] if self._single else scores


def _has_probabilities(model: NormBallClassifier) -> bool:
    if model.loss == "hinge":
        raise AttributeError("the hinge loss has no probabilities: use loss='logistic', or decision_function.")
    return True


class NormBallClassifier(ClassifierMixin, _NormBallModel):
    """Classification of sets with a query, by one attention layer with frozen random heads and values in a norm ball.

    As `NormBallRegressor`, with a loss for labels. Several classes share the heads and the ball: the norm of a
    head is that of its values for all classes together, so a head is kept or pruned for all of them.

    Parameters
    ----------
    loss : "logistic" or "hinge"
        "logistic" is binary for two classes and multinomial for more; its probabilities are the model's own.
        "hinge" is summed over one-against-the-rest columns for more than two classes.
    n_heads, law, group_radius, ball_radius, activation, fit_intercept, random_state
        As for `NormBallRegressor`.
    complexity, delta, constant, n_folds, tol, max_iter, dtype
        As for `NormBallRegressor`. The only sample of a class is never held out by cross-validation.

    Attributes
    ----------
    classes_ : array (classes,)
        The labels that carry weight, sorted.
    intercept_ : array (1,) or (classes,)
    values_ : array (M, D), or (M, D, classes) for more than two classes
    active_heads_, group_radius_, ball_radius_, objective_, duality_gap_, n_iter_, cv_results_, heads_, n_features_in_
        As for `NormBallRegressor`.

    Examples
    --------
    >>> import numpy as np
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(400, n_keys=5, dim=4, seed=0)
    >>> score = kh.targets.TokenPower(2, dim=4)(sets)
    >>> label = np.where(score > np.median(score), "wide", "narrow")
    >>> model = kh.NormBallClassifier(n_heads=50, random_state=0).fit(sets[:300], label[:300])
    >>> bool(model.score(sets[300:], label[300:]) > 0.8)
    True
    >>> model.predict_proba(sets[300:]).shape
    (100, 2)
    """

    def __init__(
        self,
        n_heads: Any = 512,
        law: Any = None,
        loss: Any = "logistic",
        group_radius: Any = "cv",
        ball_radius: Any = "matched",
        activation: Any = "relu",
        fit_intercept: Any = True,
        random_state: Any = None,
        *,
        complexity: Any = None,
        delta: Any = 0.05,
        constant: Any = 1.0,
        n_folds: Any = 3,
        tol: Any = 1e-3,
        max_iter: Any = 20_000,
        dtype: Any = "float64",
    ) -> None:
        super().__init__(
            n_heads,
            law,
            loss,
            group_radius,
            ball_radius,
            activation,
            fit_intercept,
            random_state,
            complexity=complexity,
            delta=delta,
            constant=constant,
            n_folds=n_folds,
            tol=tol,
            max_iter=max_iter,
            dtype=dtype,
        )

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> NormBallClassifier:
        """Fit the values. ``sample_weight`` weighs the loss of each sample."""
        loss = check_choice(self.loss, "loss", ("logistic", "hinge"))
        batch = as_sets(self, X, reset=True).numpy()
        weights = as_weights(sample_weight, batch)
        labels = self._encode(y, batch, weights)
        columns = labels[:, None] == np.arange(len(self.classes_))
        if len(self.classes_) == 2:
            fit = self._fit_columns(batch, np.where(columns[:, 1:], 1.0, -1.0), weights, loss)
        elif loss == "hinge":
            fit = self._fit_columns(batch, np.where(columns, 1.0, -1.0), weights, loss)
        else:
            fit = self._fit_columns(batch, columns.astype(np.float64), weights, "multinomial")
        self.intercept_ = fit.layer.intercept
        return self

    def _encode(self, y: Any, batch: SetBatch, weights: np.ndarray | None) -> np.ndarray:
        """Number the labels; those without weight, which nothing can be learned of, are −1."""
        check_given(self, y)
        y = column_or_1d(y, warn=True)
        assert_all_finite(y, input_name="y", estimator_name=type(self).__name__)
        check_classification_targets(y)
        check_lengths(batch, y, "y")
        counted = y if weights is None else y[weights > 0]
        self.classes_ = np.unique(counted)
        if len(self.classes_) < 2:
            raise ValueError(
                f"`y` must have at least two classes: got 1 class, '{self.classes_[0]}', in {len(counted)} samples "
                "of positive weight. There is nothing to tell apart."
            )
        places = np.searchsorted(self.classes_, y).clip(max=len(self.classes_) - 1)
        return np.where(self.classes_[places] == y, places, -1)

    def decision_function(self, X: Any) -> Float[np.ndarray, "n ..."]:
        """Return scores: (n,) for two classes, positive for ``classes_[1]``; otherwise (n, classes)."""
        scores = self._scores(X)
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict(self, X: Any) -> Any:
        """Return the label with the highest score."""
        winners = self._class_scores(X).argmax(axis=1)
        return self.classes_[winners]

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Float[np.ndarray, "n c"]:
        """Return the model's own probabilities: logistic for two classes, softmax for more."""
        return np.asarray(np.exp(self.predict_log_proba(X)))

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def predict_log_proba(self, X: Any) -> Float[np.ndarray, "n c"]:
        """Return the logarithms of `predict_proba`, without underflow."""
        return np.asarray(log_softmax(self._class_scores(X), axis=1))

    def _class_scores(self, X: Any) -> np.ndarray:
        """One column of scores per class."""
        decision = self.decision_function(X)
        return np.stack([np.zeros_like(decision), decision], axis=1) if decision.ndim == 1 else decision


def _finite_heads(n_heads: Any) -> int:
    count = as_heads(n_heads)
    if count is None:
        raise ValueError(
            "`n_heads` must be finite for the norm ball: it bounds the values of each head. Use a large number, or "
            "kh.AttentionRegressor(n_heads=math.inf) for the exact kernel."
        )
    return count


def _memory_budget() -> int:
    """scikit-learn's ``working_memory``, in bytes: 1 GiB unless the user says otherwise."""
    return int(get_config()["working_memory"] * 2**20)
