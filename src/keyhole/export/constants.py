"""Everything that a prediction depends on, as plain arrays, and the prediction from it in NumPy.

With the notation of `keyhole.textbook`, for one sample of N keys:

    0. of large sets only some keys are seen (`SelectionConstants`);
    1. tokens are scaled, as ``scaling`` says;
    2. the query is the one given; [0; √2] without one; the mean of the keys; or each key in turn;
    3. hop after hop the query is extended by what each pattern p finds, rounded to float32:
       o_p = Σ_i softmax_i(x~_0ᵀ U_p x~_i) x_i;
    4. s_mi = x~_0ᵀ W_m x~_i, weights are σ(s_mi)/N or softmax_i(s_mi), times N if features are
       summed and not averaged;
    5. f(x) = b + M^{-1/2} Σ_m <v_m, Σ_i weight_mi x~_i> + <extras_values, scaled extras>;
       with each key as the query in turn, the mean (or sum) of that over queries. The extras end
       in N under pooling="mean+size"; and under "mean+statistics" in N, then the mean, the standard
       deviation, the least and the largest value of every coordinate of the keys as they are given;
    6. probabilities are softmax(c · scores).

`predict_with` does these steps in plain NumPy, sample by sample: it is what
docs/howto/deploy.md shows, and what tests compare the torch module and the ONNX graph with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from keyhole.attention.features import feature_blocks
from keyhole.attention.heads import HeadDraw
from keyhole.attention.kernels import attention_kernel
from keyhole.data.tokens import ADDS_FEATURES, TokenRule
from keyhole.key_selection import strongest_keys
from keyhole.solvers.layers import FiniteLayer, KernelLayer, PrunedLayer

SIGMA: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda s: np.maximum(s, 0.0),
    "linear": lambda s: s,
    "square": np.square,
    "step": lambda s: (s > 0).astype(s.dtype),
    "exp": np.exp,
}
"""σ of one score; "softmax" is none, because it takes all scores of a set."""
SCALINGS = ("none", "sphere", "standard")
QUERIES = ("given", "mean", "each")
POOLINGS = ("mean", "mean+size", "mean+statistics", "sum")


@dataclass(frozen=True)
class SelectionConstants:
    """What decides which keys of a set the layer sees.

    Tokens become (x − centre) / spread, then have length one. What key i adds to output t of the
    scoring layer is c_it = M^{-1/2} (1/N) Σ_m ReLU(x~_0ᵀ W_m x~_i) <v_mt, x~_i>. The ``n_keys``
    keys are kept whose largest |c_it − mean of the set| over the outputs is largest; this is
    counted in whole steps of `keyhole.key_selection.TIE_RESOLUTION` times the largest |c_it| of the
    set, and of keys with equally many steps the first are kept. All of it is done in float64,
    whatever the precision of the layer.

    Attributes
    ----------
    n_keys : int
    W : array (M, D_q, D)
        Without a query their last row alone.
    v : array (M, D, t)
    centre, spread : arrays (d,)
    query_centre, query_spread : arrays (d_q,) or None
    """

    n_keys: int
    W: Float[np.ndarray, "m f e"] = field(repr=False)
    v: Float[np.ndarray, "m e t"] = field(repr=False)
    centre: Float[np.ndarray, " d"] = field(repr=False)
    spread: Float[np.ndarray, " d"] = field(repr=False)
    query_centre: Float[np.ndarray, " q"] | None = field(default=None, repr=False)
    query_spread: Float[np.ndarray, " q"] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, model: Any) -> SelectionConstants | None:
        """Those of a fitted estimator; None where the layer sees every key."""
        selection = getattr(model, "key_selection_", None)
        if selection is None:
            return None
        W, v = _heads_and_values(selection.layer, last_rows=not model.has_query_)
        rule = selection.standard
        query_centre = None
        query_spread = None
        if model.has_query_:
            query_centre = rule.centre if rule.query_centre is None else rule.query_centre
            query_spread = rule.spread if rule.query_spread is None else rule.query_spread
        return cls(
            n_keys=selection.n_keys,
            W=W,
            v=v,
            centre=rule.centre,
            spread=rule.spread,
            query_centre=query_centre,
            query_spread=query_spread,
        )

    @property
    def uses_query(self) -> bool:
        """Whether keys are judged in view of the query of their set."""
        return self.query_centre is not None


@dataclass(frozen=True)
class LayerConstants:
    """The constants of a fitted layer of finitely many heads.

    Attributes
    ----------
    scaling, query, pooling, activation : str
        As the estimator used them.
    dtype : "float64" or "float32"
    dim, query_dim, n_extras : int
        Of keys, of the queries that are passed (0: none), and sample-level features. A query that
        the layer does not use is passed where keys are selected by it.
    centre, spread : arrays (d,) or None
        For scaling="standard": x becomes (x − centre)/spread.
    query_centre, query_spread : arrays (d_q,) or None
        The same for queries.
    extras_centre, extras_spread, extras_values : arrays (c,), (c,), (c, t), or None
    hops : tuple of arrays (P, D_h, D)
        U_p of every hop but the last.
    W : array (M, D_q, D)
        Query-key matrices. Where the query is the constant [0; √2] only their last row, (M, 1, D).
    v : array (M, D, t)
        Values, in the scaling where φ carries M^{-1/2}.
    b : array (t,)
        Intercept.
    single_output : bool
        Whether predictions have no axis of outputs.
    classes : array (classes,) or None
        The labels of a classifier.
    class_has_weight : bool array (classes,) or None
        A class without weight has probability 0.
    temperature : float or None
        c of softmax(c · scores); None where there are no probabilities.
    first_of_two : float
        The score of the first of two labels, in units of that of the second.
    """

    scaling: str
    query: str
    pooling: str
    activation: str
    dtype: str
    dim: int
    query_dim: int
    n_extras: int
    W: Float[np.ndarray, "m f e"] = field(repr=False)
    v: Float[np.ndarray, "m e t"] = field(repr=False)
    b: Float[np.ndarray, " t"] = field(repr=False)
    single_output: bool
    centre: Float[np.ndarray, " d"] | None = field(default=None, repr=False)
    spread: Float[np.ndarray, " d"] | None = field(default=None, repr=False)
    query_centre: Float[np.ndarray, " q"] | None = field(default=None, repr=False)
    query_spread: Float[np.ndarray, " q"] | None = field(default=None, repr=False)
    extras_centre: Float[np.ndarray, " c"] | None = field(default=None, repr=False)
    extras_spread: Float[np.ndarray, " c"] | None = field(default=None, repr=False)
    extras_values: Float[np.ndarray, "c t"] | None = field(default=None, repr=False)
    hops: tuple[Float[np.ndarray, "p _ e"], ...] = field(default=(), repr=False)
    classes: np.ndarray | None = field(default=None, repr=False)
    class_has_weight: Bool[np.ndarray, " l"] | None = field(default=None, repr=False)
    temperature: float | None = None
    first_of_two: float = -1.0
    selection: SelectionConstants | None = None

    @classmethod
    def of(cls, model: Any, purpose: str) -> LayerConstants:
        """Those of a fitted estimator; ``purpose`` names in messages what they are for.

        Raises ValueError for infinitely many heads, and for what only a later version knows.
        """
        layer = getattr(model, "layer_", None)
        if layer is None:
            raise TypeError(
                f"{purpose} takes a fitted regressor or classifier: this "
                f"{type(model).__name__} has no layer that predicts."
            )
        if getattr(model, "has_set_groups_", False):
            raise ValueError(
                f"{purpose} takes samples of one set each, and this model was fitted to samples of "
                "several sets (SetGroups). Predict with keyhole; or fit to samples of one set, "
                "which hold the keys of all sets of a sample."
            )
        if isinstance(layer, KernelLayer):
            raise ValueError(_message_of_infinitely_many(model, layer, purpose))
        rule: TokenRule = model.tokens_
        _check_supported(rule, layer.activation, purpose)

        # query-key matrices and values; the constant query [0; √2] meets the last rows alone
        has_constant_query = _has_constant_query(model, rule)
        W, v = _heads_and_values(layer, last_rows=has_constant_query)

        # queries of the kind of the keys are scaled as these are
        query_dim = 0
        query_centre = None
        query_spread = None
        selection = SelectionConstants.of(model)
        layer_uses_query = bool(model.has_query_) and rule.query == "given"
        selection_uses_query = selection is not None and selection.uses_query
        if layer_uses_query or selection_uses_query:
            query_dim = int(model.n_query_features_in_)
        if layer_uses_query:
            query_centre = rule.centre if rule.query_centre is None else rule.query_centre
            query_spread = rule.spread if rule.query_spread is None else rule.query_spread

        # sample-level features that no rule scales are taken as they are
        extras_centre = rule.extras_centre
        extras_spread = rule.extras_spread
        if layer.extras_values is not None and extras_centre is None:
            extras_centre = np.zeros(len(layer.extras_values))
            extras_spread = np.ones(len(layer.extras_values))

        classes = getattr(model, "classes_", None)
        return cls(
            scaling=rule.scaling,
            query=rule.query,
            pooling=rule.pooling,
            activation=layer.activation,
            dtype=layer.dtype,
            dim=int(model.n_features_in_),
            query_dim=query_dim,
            n_extras=int(getattr(model, "n_extras_in_", 0)),
            W=W,
            v=v,
            b=np.asarray(layer.intercept),
            single_output=_has_one_output(model),
            centre=rule.centre,
            spread=rule.spread,
            query_centre=query_centre,
            query_spread=query_spread,
            extras_centre=extras_centre,
            extras_spread=extras_spread,
            extras_values=layer.extras_values,
            hops=tuple(rule.hops),
            classes=classes,
            class_has_weight=getattr(model, "class_has_weight_", None),
            temperature=_temperature(model),
            first_of_two=0.0 if isinstance(layer, PrunedLayer) else -1.0,
            selection=selection,
        )

    @property
    def has_constant_query(self) -> bool:
        """Whether every set has the query [0; √2], of which W has the last row."""
        return self.query == "given" and self.query_dim == 0 and not self.hops

    @property
    def scale(self) -> float:
        """M^{-1/2}."""
        return 1.0 / math.sqrt(len(self.W))


def _has_constant_query(model: Any, rule: TokenRule) -> bool:
    """Whether sets have no query, none is made of keys, and no hop extends it."""
    return not model.has_query_ and rule.query == "given" and not rule.hops


def _has_one_output(model: Any) -> bool:
    """Whether predictions have no axis of outputs."""
    classes = getattr(model, "classes_", None)
    if classes is not None:
        return len(classes) == 2
    return bool(model.single_output_)


def _temperature(model: Any) -> float | None:
    """c of softmax(c · scores): fitted, 1 for the logistic loss, None where there is none."""
    if getattr(model, "classes_", None) is None or not hasattr(model, "predict_proba"):
        return None
    return float(getattr(model, "temperature_", 1.0))


def _check_supported(rule: TokenRule, activation: str, purpose: str) -> None:
    """Raise for settings that the steps above do not have."""
    settings = (
        ("scaling", rule.scaling, SCALINGS),
        ("query", rule.query, QUERIES),
        ("pooling", rule.pooling, POOLINGS),
        ("activation", activation, (*SIGMA, "softmax")),
    )
    for name, value, known in settings:
        if value not in known:
            raise ValueError(
                f"{purpose} takes {name} of {', '.join(map(repr, known))}: this model has "
                f"{value!r}. Fit with one of these."
            )


def _heads_and_values(
    layer: FiniteLayer | PrunedLayer, *, last_rows: bool
) -> tuple[Float[np.ndarray, "m f e"], Float[np.ndarray, "m e t"]]:
    """W and v of a layer; of a pruned one its active heads, v in the scaling of all others."""
    heads = layer.heads.seen_by(query=not last_rows)
    if isinstance(layer, FiniteLayer):
        return np.asarray(heads.block(0, heads.n_heads)), layer.values
    n_active = len(layer.active)
    if n_active == 0:
        # a head of zeros stands for none
        no_head = np.zeros((1, heads.rows, heads.dim + 1))
        return no_head, np.zeros((1, heads.dim + 1, len(layer.intercept)))
    return layer.drawn_heads(has_query=not last_rows), math.sqrt(n_active) * layer.values


# ---- infinitely many heads -----------------------------------------------------------------------

MAX_SAMPLES_TO_JUDGE = 400
MOST_HEADS = 8192
SHARE_OF_ERROR = 0.25
"""Heads are enough where what they change is at most this share of the error of a prediction: the
squared error grows by a sixteenth."""


def _message_of_infinitely_many(model: Any, layer: KernelLayer, purpose: str) -> str:
    """Why a kernel cannot be exported, and how many heads would do in its place."""
    n_heads = heads_that_do(layer, float(model.alpha_))
    reason = (
        f"{purpose} takes finitely many heads: this model has infinitely many, the exact kernel "
        f"of its {len(layer.sets)} training sets."
    )
    if n_heads is None:
        return (
            f"{reason} {MOST_HEADS} heads are not enough to predict the same within "
            f"{SHARE_OF_ERROR:.0%} of its error. Fit with n_heads={MOST_HEADS} (--n-heads "
            f"{MOST_HEADS}), and compare loo_error_."
        )
    return (
        f"{reason} Fit with n_heads={n_heads} (--n-heads {n_heads}): half of its training sets, "
        "predicted from the other half, then come out the same within "
        f"{SHARE_OF_ERROR:.0%} of their error."
    )


def heads_that_do(layer: KernelLayer, alpha: float) -> int | None:
    """The least power of two of heads that predict as infinitely many do; None if none does.

    Some training sets are fitted with infinitely and with finitely many heads, and predict some
    others. Their outputs are known from the fit: y = f(x) + α a. Of f and y the part of
    sample-level features is left out: it does not depend on heads, and training sets are stored
    without them.
    """
    layer = replace(layer, extras_values=None)

    # every other one of at most 400 training sets is fitted, the others are predicted
    step = -(-len(layer.sets) // MAX_SAMPLES_TO_JUDGE)
    rows = np.arange(0, len(layer.sets), step)
    if len(rows) < 4:
        return 512
    samples = layer.sets[rows]
    y = layer.predict(samples) + alpha * layer.dual[rows]
    exact = _predictions_of_half(
        attention_kernel(samples, samples, layer.distribution, layer.activation), y, alpha
    )
    error = np.sqrt(np.mean((exact - y[1::2]) ** 2))

    # draws nest: the Gram matrix of twice as many heads is a sum of two
    gram = np.zeros((len(rows), len(rows)))
    n_heads = 16
    start = 0
    draw = HeadDraw(
        layer.distribution, MOST_HEADS, samples.dim, seed=0, query_dim=samples.query_dim
    )
    while n_heads <= MOST_HEADS:
        for _, features in feature_blocks(
            samples, draw.block(start, n_heads), layer.activation, memory_budget=2**27
        ):
            # they carry one over the root of the number of heads in this call
            gram += (n_heads - start) * (features @ features.T)
        finite = _predictions_of_half(gram / n_heads, y, alpha)
        if np.sqrt(np.mean((finite - exact) ** 2)) <= SHARE_OF_ERROR * error:
            return n_heads
        start = n_heads
        n_heads *= 2
    return None


def _predictions_of_half(
    K: Float[np.ndarray, "n n"], y: Float[np.ndarray, "n t"], alpha: float
) -> Float[np.ndarray, "_ t"]:
    """Odd samples predicted by ridge on the even ones, with an intercept: `textbook.ridge`."""
    fitted = K[::2, ::2]
    n = len(fitted)
    system = np.ones((n + 1, n + 1))
    system[:n, :n] = fitted + max(alpha, 1e-10 * np.trace(fitted) / n) * np.eye(n)
    system[n, n] = 0.0
    right_hand_side = np.vstack([y[::2], np.zeros((1, y.shape[1]))])
    solution = np.linalg.lstsq(system, right_hand_side, rcond=None)[0]
    return np.asarray(K[1::2, ::2] @ solution[:n] + solution[n])


# ---- the prediction, in plain NumPy --------------------------------------------------------------


def _kept_keys(
    selection: SelectionConstants,
    keys: Float[np.ndarray, "k d"],
    query: Float[np.ndarray, " q"] | None,
) -> Bool[np.ndarray, " k"]:
    """Which keys of one set are kept."""
    # tokens standardised and of length one, with a one appended
    keys = _scaled("standard", keys, selection.centre, selection.spread)
    keys = _scaled("sphere", keys, None, None)
    extended_keys = np.hstack([keys, np.ones((len(keys), 1))])
    extended_query = np.array([math.sqrt(2.0)])
    if query is not None:
        query = _scaled("standard", query[None], selection.query_centre, selection.query_spread)
        extended_query = np.append(_scaled("sphere", query, None, None)[0], 1.0)

    # what each key adds to each output; the keys that differ most from the mean are kept
    scores = np.einsum("f,mfe,ke->mk", extended_query, selection.W, extended_keys)
    parts = np.einsum("mk,met,ke->kt", np.maximum(scores, 0.0), selection.v, extended_keys)
    parts = parts / (len(keys) * math.sqrt(len(selection.W)))
    return strongest_keys(parts, np.array([0, len(keys)]), selection.n_keys)


def predict_with(
    constants: LayerConstants,
    keys: Float[np.ndarray, "k d"],
    query: Float[np.ndarray, " q"] | None = None,
    extras: Float[np.ndarray, " c"] | None = None,
) -> Float[np.ndarray, " t"]:
    """Predict one sample from the constants, in plain NumPy."""
    # 0. the keys that are seen
    if constants.selection is not None:
        keys = keys[_kept_keys(constants.selection, keys, query)]

    # 1. scaled tokens, each with a one appended
    if constants.pooling in ADDS_FEATURES:
        given = np.zeros(0) if extras is None else extras
        extras = np.concatenate([given, _set_features(constants.pooling, keys)])
    keys = _scaled(constants.scaling, keys, constants.centre, constants.spread)
    if query is not None and constants.query == "given":
        query = _scaled(
            constants.scaling, query[None], constants.query_centre, constants.query_spread
        )[0]
    extended_keys = np.hstack([keys, np.ones((len(keys), 1))])

    # 2. the query, or all of them
    if constants.query == "each":
        queries = extended_keys
    elif constants.query == "mean":
        queries = np.append(keys.mean(axis=0), 1.0)[None]
    elif query is not None:
        queries = np.append(query, 1.0)[None]
    elif constants.has_constant_query:
        queries = np.array([[math.sqrt(2.0)]])
    else:  # a hop replaces it by [0; o; 1]
        queries = np.append(np.zeros(constants.dim), math.sqrt(2.0))[None]

    # 3. hops
    for U in constants.hops:
        scores = np.einsum("d,pde,ie->pi", queries[0], U, extended_keys)
        found = (_softmax(scores) @ keys).astype(np.float32)
        queries = np.concatenate([queries[0, :-1], found.ravel(), [1.0]])[None]

    # 4. weights of the keys in every head, 5. outputs, for every query
    outputs = np.zeros(len(constants.b))
    n_keys = len(keys)
    for x_0 in queries:
        scores = np.einsum("d,mde,ie->mi", x_0, constants.W, extended_keys)
        if constants.activation == "softmax":
            weights = _softmax(scores)
        else:
            weights = SIGMA[constants.activation](scores) / n_keys
        phi = weights @ extended_keys * constants.scale
        outputs += np.einsum("me,met->t", phi, constants.v)
    if constants.pooling == "sum":
        outputs *= n_keys
    else:
        outputs /= len(queries)
    outputs += constants.b
    if constants.extras_values is not None and extras is not None:
        z = (extras - constants.extras_centre) / constants.extras_spread
        outputs += z @ constants.extras_values
    return outputs


def _set_features(pooling: str, keys: Float[np.ndarray, "k d"]) -> Float[np.ndarray, " c"]:
    """The sample-level features that a pooling makes of the keys of a set."""
    size = np.array([float(len(keys))])
    if pooling == "mean+size":
        return size
    return np.concatenate(
        [size, keys.mean(axis=0), keys.std(axis=0), keys.min(axis=0), keys.max(axis=0)]
    )


def _scaled(
    scaling: str, tokens: Float[np.ndarray, "k d"], centre: Any, spread: Any
) -> Float[np.ndarray, "k d"]:
    """Tokens after scaling; a token of zeros stays on no sphere."""
    if scaling == "standard":
        return np.asarray((tokens - centre) / spread)
    if scaling == "sphere":
        lengths = np.linalg.norm(tokens, axis=1, keepdims=True)
        return np.asarray(tokens / np.where(lengths > 0, lengths, 1.0))
    return tokens


def _softmax(scores: Float[np.ndarray, "m k"]) -> Float[np.ndarray, "m k"]:
    """Weights that sum to one over the keys."""
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))
