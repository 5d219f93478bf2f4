"""One attention layer with frozen random heads, fitted in closed form: regression and classification."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import log_softmax, softmax
from sklearn.base import ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from keyhole._checks import check_choice, check_flag
from keyhole.attention.features import attention_weights
from keyhole.attention.heads import HeadDraw
from keyhole.attention.learned import MAX_HEADS_TO_JUDGE
from keyhole.data.sets import POOLINGS, DistinctSamples, SetBatch, SetGroups
from keyhole.data.tokens import QUERIES, SCALINGS, weights_of_hop
from keyhole.estimators.base import (
    LESS_FOR_A_FIT,
    LESS_FOR_A_PREDICTION,
    SCORE_WITHOUT_WEIGHT,
    KeyContributions,
    LabelScores,
    SetEstimator,
    class_scores,
    explained_memory_errors,
    memory_budget,
    outputs,
)
from keyhole.estimators.inputs import (
    LayerPlan,
    as_columns,
    as_distribution,
    as_extras_scale,
    as_groups,
    as_heads,
    as_penalties,
    as_samples,
    as_seed,
    as_weights,
    cheaper_heads,
    check_class_weight,
    check_layer_options,
    check_random_state,
    class_weights,
    fit_sets,
)
from keyhole.estimators.intervals import (
    ClassificationSets,
    LeftOutFits,
    RegressionIntervals,
    TrainingSamples,
)
from keyhole.estimators.streaming import (
    StreamedClassifier,
    StreamedRegressor,
    forget_stream,
    store_log_losses,
)
from keyhole.layer import KernelLayer, LayerFit, pick_device
from keyhole.ridge.calibration import fit_temperature

CRITERIA = ("squared_error", "log_loss")
SOLVERS = ("auto", "direct", "cg")


class _AttentionModel(LeftOutFits, KeyContributions, SetEstimator):
    """What regression and classification share: parameters, the fit of columns, and scores."""

    def __init__(
        self,
        n_heads: Any = "auto",
        heads: Any = None,
        alpha: Any = "loo",
        activation: Any = "relu",
        fit_intercept: Any = True,
        random_state: Any = None,
        *,
        dtype: Any = "float64",
        pooling: Any = "mean",
        scaling: Any = "auto",
        query: Any = "auto",
        device: Any = None,
        solver: Any = "auto",
        extras_scale: Any = "loo",
    ) -> None:
        self._store_parameters(locals())

    def _check_parameters(self) -> None:
        """Raise for a parameter that no fit takes, whatever the samples."""
        check_layer_options(self.activation, self.dtype)
        check_flag(self.fit_intercept, "fit_intercept")
        check_choice(self.pooling, "pooling", POOLINGS)
        check_choice(self.scaling, "scaling", (*SCALINGS, "auto"))
        check_choice(self.query, "query", (*QUERIES, "auto"))
        check_choice(self.solver, "solver", SOLVERS)
        check_random_state(self.random_state)
        as_penalties(self.alpha)
        as_extras_scale(self.extras_scale)
        if self.heads is not None:
            as_distribution(self.heads)
        if not (isinstance(self.n_heads, str) and self.n_heads == "auto"):
            as_heads(self.n_heads)
        if (
            self.device is not None
            and not isinstance(self.device, str)
            and not hasattr(self.device, "type")
        ):
            raise TypeError(
                f"`device` must be the name of a device, such as 'cuda', or None: got {self.device!r:.60}."
            )

    def _fit_columns(
        self,
        batch: SetBatch | SetGroups,
        columns: np.ndarray,
        weights: np.ndarray | None,
        groups: Any,
    ) -> LayerFit:
        forget_stream(self)
        self._check_parameters()
        activation, dtype = check_layer_options(self.activation, self.dtype)
        options: dict[str, Any] = {
            "activation": activation,
            "fit_intercept": bool(self.fit_intercept),
            "weights": weights,
            "groups": as_groups(groups, batch, weights),
            "dtype": dtype,
            "device": pick_device(self.device, batch.sets),
            "solver": check_choice(self.solver, "solver", SOLVERS),
            "hold_out": isinstance(self, ClassifierMixin),
            "criterion": check_choice(
                getattr(self, "criterion", "squared_error"), "criterion", CRITERIA
            ),
            "memory_budget": memory_budget(),
        }
        distribution = None if self.heads is None else as_distribution(self.heads)
        penalties, seed = as_penalties(self.alpha), as_seed(self.random_state)
        # duplicates and samples of weight 0 cost a fit nothing, and have no say in what is automatic
        distinct = None
        if isinstance(self.n_heads, str) and self.n_heads == "auto":
            distinct = DistinctSamples.of(batch.numpy(), columns, weights, options["groups"])
            n_heads = cheaper_heads(batch, distribution, self.query, options, distinct)
        else:
            n_heads = as_heads(self.n_heads)
        extras_scale = as_extras_scale(self.extras_scale)
        plan = LayerPlan(n_heads, distribution, penalties, seed, options, extras_scale, distinct)
        with explained_memory_errors(
            "fit", batch, math.inf if n_heads is None else n_heads, LESS_FOR_A_FIT
        ):
            fitted = fit_sets(batch, columns, plan, self.scaling, self.query, self.pooling)
        fit, ridge = fitted.fit, fitted.fit.ridge
        self.heads_, self.n_heads_ = fitted.distribution, math.inf if n_heads is None else n_heads
        self.tokens_ = fitted.rule
        self.scaling_errors_ = fitted.tried
        layer = fit.layer
        if isinstance(layer, KernelLayer):
            # a kernel compares with the training sets for ever, and what was given may be changed later
            layer = replace(layer, sets=layer.sets[np.arange(len(layer.sets))])
        self.layer_ = layer
        self.alpha_ = ridge.alpha
        self.alphas_ = ridge.alphas
        self.solver_ = fit.route
        self.selection_ = "loo" if ridge.selection == "groups" else ridge.selection
        setattr(self, f"{self.selection_}_errors_", ridge.errors)
        setattr(self, f"{self.selection_}_error_", ridge.error)
        store_log_losses(self, ridge)
        if fit.route == "cg":
            self.residual_, self.n_iter_ = ridge.residual, ridge.n_iter
        self._keep_training(
            TrainingSamples(batch, columns, weights, options["groups"], options["fit_intercept"])
        )
        return fit

    def _ready(self, X: Any) -> Any:
        check_is_fitted(self)
        batch = as_samples(self, X, reset=False).numpy()
        with explained_memory_errors("predict", batch, None, LESS_FOR_A_PREDICTION):
            return self.tokens_.apply(batch)

    def _scores(self, X: Any) -> np.ndarray:
        model = self._snapshot()
        batch = model._ready(X)  # first: it says so if nothing was fitted
        with explained_memory_errors("predict", batch, None, LESS_FOR_A_PREDICTION):
            return np.asarray(model.layer_.predict(batch, memory_budget=memory_budget()))

    def hop_weights(self, X: Any) -> list[list[Float[np.ndarray, "p k"]]]:
        """Return how much each hop of the model weighs each key: for answers that show their evidence.

        Parameters
        ----------
        X : samples as `fit` takes them
            For SetGroups, all their sets one after the other.

        Returns
        -------
        list, one entry per hop, of n arrays (patterns, N_i)
            Hop h < H has softmax weights, a row for each of its patterns. The last hop is that of the random heads:
            a row for each mean of the head distribution, the mean weight of the heads around it (of 256 heads drawn from the head distribution if
            there are infinitely many). A head distribution of one hop has that alone.

        Examples
        --------
        >>> import keyhole as kh
        >>> sets = kh.targets.sphere_sets(80, n_keys=3, dim=2, seed=0)
        >>> model = kh.AttentionRegressor(32, kh.GaussianHeads(), "loo", "softmax", random_state=0)
        >>> (last,) = model.fit(sets, kh.targets.TokenPower(2, dim=2)(sets)).hop_weights(sets[:2])
        >>> [weights.shape for weights in last], bool(abs(last[0].sum() - 1) < 1e-12)
        ([(1, 3), (1, 3)], True)
        """
        model = self._snapshot()
        check_is_fitted(model)
        batch = as_samples(model, X, reset=False).numpy()
        rule = model.tokens_
        found = []
        for number, hop in enumerate(rule.hops):
            sets = replace(rule, hops=rule.hops[:number]).apply(batch).sets
            found.append(weights_of_hop(sets, hop))
        ready = rule.apply(batch)
        sets = ready.written_out().sets if rule.query == "each" else ready.sets
        heads = getattr(model.layer_, "heads", None)
        if heads is None:
            heads = HeadDraw(model.heads_, MAX_HEADS_TO_JUDGE, sets.dim, 0, sets.query_dim)
        n_means = len(getattr(model.heads_, "means_", (None,)))
        options = model.layer_.activation, min(n_means, heads.n_heads)
        found.append(attention_weights(sets, heads, *options, memory_budget=memory_budget()))
        return [[part.T for part in np.split(weights, sets.offsets[1:-1])] for weights in found]


class AttentionRegressor(
    StreamedRegressor, RegressionIntervals, MultiOutputMixin, RegressorMixin, _AttentionModel
):
    """Regression on sets with a query, by one attention layer with frozen random heads and ridge values.

    The layer is f(x) = Σ_m <v_m, φ_m(x)> + b with features φ_m of M random heads; v minimises
    Σ_i (y_i − f(x_i))² + α|v|², the intercept b being free. Primal if M·(d+1) < n, dual otherwise, the exact
    kernel if ``n_heads=math.inf``; the same numbers by all three. Without settings everything is chosen on the training
    set; the paper's layer is ``n_heads=512, heads=kh.GaussianHeads(), scaling="none", query="given"``.

    Parameters
    ----------
    n_heads : int, math.inf or "auto"
        M, or infinity for the exact kernel of infinitely many heads. "auto" is the exact kernel where it is predicted,
        from the sizes of the training set alone, to take less time than 512 heads, and 512 heads where it is not; half
        as many, and again, where a fit is predicted to take more than 120 s of one core. In batches, as many as make
        2048 columns, 512 at most.
    heads : head distribution, optional
        ``kh.GaussianHeads(mean=1.0)`` favours targets that depend on <x_0, x_i>. None is ``kh.GaussianHeads()``, or a
        multiple of the identity as its mean where there is a query and the left-out loss is lower beyond doubt; under
        softmax also heads that draw a multiple for each coordinate, ``kh.GaussianHeads((0.3, 20.0), 0.1)``.
    alpha : "loo", number or sequence of numbers
        Ridge penalty; "loo" chooses from an automatic grid, a sequence from itself, both by exact leave-one-out.
    activation : str
        "relu" (weights ReLU(s)/N), "softmax" (softmax over the set), "linear", "square", "step" or "exp".
    fit_intercept : bool
    random_state : int, RandomState, Generator or None
        An integer s means the heads ``heads.sample(n_heads, d, s)``.
    dtype : "float64" or "float32"
        Precision of the features and their Gram matrix. Kernels are always float64, but for those of a device.
    pooling : "mean" or "sum"
        Whether features are averaged over keys (and queries, and sets of a sample) or added up, for targets that
        grow with the set.
    scaling : "none", "sphere", "standard" or "auto"
        What is done to tokens first, learned on the training sets: each to length one; or every coordinate centred
        and divided by √d times its standard deviation; "auto" takes the one of least leave-one-out loss, on 128 to
        500 samples, so that choosing takes about as long as one fit.
    query : "given", "mean", "each" or "auto"
        The query of each set, or the constant one; the mean of its keys; each key in turn, features pooled over
        queries. "auto" tries "given" and "mean" on sets without a query. In batches all that is automatic is settled
        on the first 1024 samples, or on fewer if values are asked for before that, and kept.
    device : None, "auto", "cuda", "cuda:1", … or "cpu"
        Where torch fits and predicts (docs/gpu.md); "auto" is the first GPU, if any. None follows ``X``: torch where it
        holds tensors, NumPy otherwise. Fitted attributes and predictions are NumPy arrays always.
    solver : "auto", "direct" or "cg"
        "direct" factorises the smaller of the n × n and p × p Gram matrices, p = M·(d+1). "cg" makes neither: it is
        preconditioned conjugate gradients over heads that are drawn anew in each iteration, for a fixed ``alpha`` or
        a few to choose from on a tenth of the samples. "auto" is "cg" only if the matrix exceeds the memory.
    extras_scale : "loo" or number
        For samples with extras z: features become [φ; s·z~], kernels K + s²·<z~, z~'>, z~ being z less its training
        mean and divided by its standard deviation (without an intercept, divided by its root mean square). s is this
        number, or the one of least leave-one-out squared error among four, on at most 500 samples; in batches by
        generalised cross-validation. ``tokens_.extras_scale`` is s, ``layer_.extras_values`` are the coefficients.

    Attributes
    ----------
    heads_ : head distribution
        ``heads``, or what it became on the training set if it is one that learns, such as ``kh.LearnedHeads()``.
    tokens_ : TokenRule
        Scaling, query and pooling used.
    scaling_errors_ : dict
        Leave-one-out loss of every (scaling, query) tried; empty if there was nothing to choose.
    n_heads_ : int or math.inf
        Heads used; infinity for the exact kernel.
    alpha_ : float
        The penalty used.
    loo_error_ : float
        Leave-one-out mean squared error at ``alpha_``.
    alphas_, loo_errors_ : arrays
        The penalties tried and the error of each; infinite where rounding makes it meaningless.
    loo_predictions_ : array (n,) or (n, outputs)
        Prediction for each training sample by the model fitted without it and without its exact copies.
    left_out_errors_ : array (k, outputs)
        Sizes of left-out errors of up to 2048 samples, one of each group and of copies, each output's in order: what
        `predict_interval` is made of where there are no leave-one-out fits. Few or none after "cg".
    intercept_ : float or array (outputs,)
    values_ : array (M, D) or (M, D, outputs)
        v, for finite heads.
    drawn_heads_ : HeadDraw
        The heads, for finite heads; ``drawn_heads_.block(0, M)`` draws them.
    dual_coef_ : array (n', outputs)
        For infinite heads: f(x) = Σ_i dual_coef_i K(x, x_i) + b over the n' distinct training sets.
    solver_ : str
        "primal", "dual", "kernel" or "cg".
    residual_, n_iter_ : float and int
        After "cg": a certificate, and iterations. Fitted values are off, in root mean square, by at most that share
        of the standard deviation of y; a ``ResidualWarning`` says so if it is more than 1e-8 (float32: 1e-6).
    selection_ : str
        What ``alpha_`` was chosen by: "loo", or "gcv" (generalised cross-validation) after a fit in batches that
        were gone through once, or "holdout" after "cg"; then ``gcv_error_`` and ``gcv_errors_``, or
        ``holdout_error_`` and ``holdout_errors_``, stand in the place of the ``loo_`` ones.
    n_features_in_, n_query_features_in_, n_extras_in_ : int
        Token dimension d, that of queries (0 without), and columns of extras.

    Notes
    -----
    ``X`` is a SetBatch, or tokens as ``SetBatch.from_tokens`` takes them, or an (n, d) table of one key per set; or
    SetGroups, samples of several sets whose features are pooled.
    Exact copies of a sample (same keys in any order, same query, same y) count as one sample of their joint weight,
    so leave-one-out leaves all of them out.
    Blocks of features and of kernels stay within scikit-learn's ``working_memory`` setting (1 GiB). The n × n or p × p
    Gram matrix comes on top, and so do copies of the tokens, which grow with the input: one at least, four where tokens
    are standardised, up to nine of float32 tokens. Batches (`fit_batches`) keep them small.
    A fit keeps a copy of its training samples for `predict_interval` and the like, unless their factor, n × n or n × p
    numbers, would exceed ``working_memory``.

    Examples
    --------
    >>> import keyhole as kh
    >>> target = kh.targets.TokenPower(2, dim=4)
    >>> train = kh.targets.sphere_sets(300, n_keys=6, dim=4, seed=0)
    >>> test = kh.targets.sphere_sets(300, n_keys=6, dim=4, seed=1)
    >>> model = kh.AttentionRegressor(n_heads=100, random_state=0).fit(train, target(train))
    >>> bool(model.score(test, target(test)) > 0.97)
    True
    >>> model.solver_, model.values_.shape
    ('dual', (100, 5))
    """

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, *, groups: Any = None
    ) -> AttentionRegressor:
        """Fit the values. ``sample_weight`` weighs the squared error of each sample.

        ``groups``, one label per sample, names siblings that leave-one-out should leave out together: questions
        about one story, measurements of one patient. Penalty, scaling and head distribution are then chosen by the error on whole
        groups left out, and ``loo_error_`` and ``loo_predictions_`` are theirs.
        """
        batch = as_samples(self, X, reset=True)
        columns = as_columns(self, y, batch)
        fit = self._fit_columns(batch, columns, as_weights(sample_weight, batch), groups)
        self._store(fit, single=np.asarray(y).ndim == 1)
        rows = fit.judged()
        self._keep_errors(np.abs(columns - fit.predictions)[rows])
        return self

    def _store(self, fit: LayerFit, *, single: bool) -> None:
        self._single = single
        if self.selection_ == "loo":
            self.loo_predictions_ = outputs(fit.predictions, single)
        self.intercept_ = float(fit.layer.intercept[0]) if single else fit.layer.intercept
        _store_coefficients(self, single)

    def predict(self, X: Any) -> Float[np.ndarray, "n ..."]:
        """Return predictions, shape (n,) or (n, outputs) as ``y`` had."""
        model = self._snapshot()
        return outputs(model._scores(X), model._single)


class AttentionClassifier(
    StreamedClassifier, ClassificationSets, LabelScores, ClassifierMixin, _AttentionModel
):
    """Classification of sets with a query, by one attention layer with frozen random heads and ridge values.

    Ridge on ±1 columns, one per class (a single one for two classes), as scikit-learn's ``RidgeClassifier`` does;
    probabilities are softmax(c · scores) with the temperature c fitted to the leave-one-out scores.

    Parameters
    ----------
    n_heads, heads, alpha, activation, fit_intercept, random_state, dtype, pooling, scaling, query, device, solver
        As for `AttentionRegressor`.
    class_weight : None, "balanced" or dict
        Weight of the samples of each class; "balanced" gives every class that has weight the same total weight.
    criterion : "log_loss" or "squared_error"
        What the penalty, and all else that is automatic, is chosen by: the log-loss of the calibrated left-out
        scores, or the squared error of the ±1 columns. Fits in batches have the log-loss of the samples they keep for
        calibration. `IdentityHeads` and `LearnedHeads` are fitted by the squared error, whose gradient is exact, in
        either case: head distributions know nothing of classes.

    Attributes
    ----------
    classes_ : array (classes,)
        The labels of y, sorted. One whose samples all have weight 0 keeps its place: its score is −1, its probability
        0, and it is never predicted. All else is as without those samples.
    class_has_weight_ : bool array (classes,)
        Which labels have a sample of positive weight.
    loo_error_ : float
        Leave-one-out mean squared error of the ±1 columns at ``alpha_``.
    loo_decision_ : array (n,) or (n, classes)
        Leave-one-out decision function of the training samples.
    temperature_ : float
        c.
    left_out_errors_ : array (k, 1)
        One less the left-out probability of the right label, of up to 2048 samples, in order.
    log_loss_, log_losses_ : float and array (a,)
        With ``criterion="log_loss"``: mean log-loss of left-out samples at ``alpha_``, and at every penalty tried, each
        at the temperature that suits it. Left out is what ``selection_`` says: one sample or group ("loo"), or a tenth
        ("holdout"); after a fit in batches, one of some 2000 samples.
    alpha_, alphas_, loo_errors_, intercept_, values_, drawn_heads_, dual_coef_, solver_, n_features_in_, heads_, tokens_
        As for `AttentionRegressor`; outputs are the columns.

    Examples
    --------
    >>> import numpy as np
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(400, n_keys=5, dim=4, seed=0)
    >>> score = kh.targets.TokenPower(2, dim=4)(sets)
    >>> label = np.where(score > np.median(score), "wide", "narrow")
    >>> model = kh.AttentionClassifier(n_heads=100, random_state=0).fit(sets[:300], label[:300])
    >>> bool(model.score(sets[300:], label[300:]) > 0.8)
    True
    >>> model.predict_proba(sets[300:]).shape
    (100, 2)
    """

    def __init__(
        self,
        n_heads: Any = "auto",
        heads: Any = None,
        alpha: Any = "loo",
        activation: Any = "relu",
        fit_intercept: Any = True,
        random_state: Any = None,
        *,
        dtype: Any = "float64",
        pooling: Any = "mean",
        scaling: Any = "auto",
        query: Any = "auto",
        device: Any = None,
        solver: Any = "auto",
        extras_scale: Any = "loo",
        class_weight: Any = None,
        criterion: Any = "log_loss",
    ) -> None:
        self._store_parameters(locals())

    def _check_parameters(self) -> None:
        """Raise for a parameter that no fit takes, whatever the samples."""
        super()._check_parameters()
        check_choice(self.criterion, "criterion", CRITERIA)
        check_class_weight(self.class_weight)

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, *, groups: Any = None
    ) -> AttentionClassifier:
        """Fit the values and the temperature; ``sample_weight`` and ``groups`` as for `AttentionRegressor.fit`."""
        batch = as_samples(self, X, reset=True)
        labels = self._encode(y, batch)
        check_class_weight(self.class_weight)
        weights = class_weights(
            self.class_weight, self.classes_[labels], as_weights(sample_weight, batch)
        )
        # ±1 columns of the classes that have weight: one per class, or a single one for two
        classes = self._class_columns(labels, weights, first=-1.0)
        numbers = classes.numbers(labels)
        columns = np.where(numbers[:, None] == np.arange(classes.has_weight.sum()), 1.0, -1.0)
        if columns.shape[1] == 2:
            columns = columns[:, 1:]
        fit = self._fit_columns(batch, columns, weights, groups)
        # the temperature of scores that were left out
        was_left_out = numbers >= 0
        if self.selection_ != "loo":
            was_left_out &= np.isfinite(fit.predictions[:, 0])
        left_out_weights = None if weights is None else weights[was_left_out]
        left_out_scores = class_scores(fit.predictions[was_left_out])
        self.temperature_ = fit_temperature(
            left_out_scores, numbers[was_left_out], left_out_weights
        )
        rows = fit.judged()
        self._keep_label_errors(fit.predictions[rows], columns[rows])
        # one output for every class, those without weight too
        self.class_has_weight_ = classes.has_weight
        self.layer_ = classes.of_layer(self.layer_)
        if "_training" in vars(self):
            all_columns = classes.of_all_classes(columns, without_weight=SCORE_WITHOUT_WEIGHT)
            self._training = replace(self._training, columns=all_columns)
        single = len(self.classes_) == 2
        if self.selection_ == "loo":
            decision = classes.of_all_classes(fit.predictions, without_weight=SCORE_WITHOUT_WEIGHT)
            self.loo_decision_ = outputs(decision, single)
        self.intercept_ = self.layer_.intercept
        _store_coefficients(self, single)
        return self

    def predict_proba(self, X: Any) -> Float[np.ndarray, "n c"]:
        """Return probabilities, calibrated on the leave-one-out scores."""
        model = self._snapshot()
        return np.asarray(softmax(model._class_scores(X) * model.temperature_, axis=1))

    def predict_log_proba(self, X: Any) -> Float[np.ndarray, "n c"]:
        """Return the logarithms of `predict_proba`, without underflow."""
        model = self._snapshot()
        return np.asarray(log_softmax(model._class_scores(X) * model.temperature_, axis=1))


def _store_coefficients(model: _AttentionModel, single: bool) -> None:
    """The parts of the layer under names of their own."""
    layer = model.layer_
    if isinstance(layer, KernelLayer):
        model.dual_coef_ = outputs(layer.dual, single)
    else:
        model.values_ = outputs(layer.values, single)
        model.drawn_heads_ = layer.heads
