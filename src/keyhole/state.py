"""`save` and `load`: a fitted estimator as a flat dictionary of arrays and one JSON of settings.

A model is first made a tree (`state_of`): options, embeddings, members, their combination, training
samples and batches, each an entry of plain values. Members that share an embedding name its number.
`SCHEMA` says what may stand where; whatever a file holds is compared with it before anything is
built. Heads are stored as their distribution and a seed.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from keyhole import __version__
from keyhole._checks import check_choice
from keyhole._model_file import (
    HEADS,
    Arrays,
    damaged,
    flattened,
    read_container,
    restored,
    write_container,
)
from keyhole.attention.heads import DrawnHeads, GaussianHeads, HeadDraw
from keyhole.data.schema import Coding, Schema
from keyhole.data.sets import PooledSets, SampleBatch, SetBatch, SetGroups
from keyhole.data.tokens import TokenRule
from keyhole.estimators import norm_ball
from keyhole.estimators.attention import AttentionClassifier, AttentionModel, AttentionRegressor
from keyhole.estimators.features import AttentionFeatures
from keyhole.estimators.report import MemberRow, MemberTable, params_of
from keyhole.fit.combine import Combination
from keyhole.fit.embedding import Embedding
from keyhole.fit.member import Member
from keyhole.fit.samples import TrainingSet
from keyhole.fit.second_kernel import SecondKernel
from keyhole.fit.settings import FitOptions, Landmarks, LayerSettings
from keyhole.fit.streams import Recipe, Stream
from keyhole.registry import ACTIVATIONS, POOLINGS, QUERIES, SCALINGS
from keyhole.solve.cholesky import InverseFactor
from keyhole.solve.matrices import on_host
from keyhole.solve.problem import RidgeFit, RidgeProblem
from keyhole.solve.spectral import CoordinateFactor
from keyhole.solve.sums import Sums

Tree = dict[str, Any]

ESTIMATORS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        AttentionRegressor,
        AttentionClassifier,
        AttentionFeatures,
        norm_ball.NormBallRegressor,
        norm_ball.NormBallClassifier,
    )
}

BUILT = {
    "combination_", "stream_", "members_", "layer_", "tokens_", "heads_", "drawn_heads_",
    "n_heads_", "alpha_", "selection_", "loo_error_", "intercept_", "values_", "dual_coef_",
    "temperature_", "loo_predictions_", "active_heads_",
}  # fmt: skip
"""Fitted attributes that are made of other parts of a file."""

OF_SAMPLES = {"held_out_predictions_", "loo_decision_"}
"""Fitted attributes of the size of the training set, which no prediction needs."""

ATTRIBUTE = re.compile(r"[a-z][a-z0-9_]{0,60}_")

UNREADABLE = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
)
"""What building an estimator from a file may raise."""

MOST_TRIED = 4_000_000
"""Features that are computed to try what was loaded."""


# ---- what a file may hold ------------------------------------------------------------------------

SAMPLES = {
    "tokens": "float[k D]",
    "offsets": "int[o]",
    "query": "float[s f]?",
    "extras": "float[m c]?",
    "set_offsets": "int[g]?",
    "pooling": ("mean", "sum"),
    "each": "flag",
    "is_pooled": "flag",
    "pairs": "free",
}
RULE = {
    "scaling": tuple(SCALINGS),
    "query": tuple(QUERIES),
    "pooling": tuple(POOLINGS),
    "extras_scale": "number",
    "centre": "float[D]?",
    "spread": "float[D]?",
    "query_centre": "float[Q]?",
    "query_spread": "float[Q]?",
    "extras_centre": "float[c]?",
    "extras_spread": "float[c]?",
    "low": "float[D]?",
    "high": "float[D]?",
    "query_low": "float[Q]?",
    "query_high": "float[Q]?",
}
LAYER = {
    "heads": "heads",
    "n_heads": "free",
    "activation": tuple(ACTIVATIONS),
    "pooling": tuple(POOLINGS),
    "scaling": tuple(SCALINGS),
    "query": tuple(QUERIES),
    "mlp_width": "number?",
    "clips": "flag",
    "name": "text",
}
EMBEDDING = {
    "settings": LAYER,
    "rule": RULE,
    "train": SAMPLES,
    "landmarks": SAMPLES,
    "whitening": "float[q r]?",
}
FACTOR = {
    "kind": ("coordinates", "inverse"),
    "alpha": "number",
    "basis": "float[q r]?",
    "scaled": "float[N r]?",
    "gains": "float[r]?",
    "inverse": "float[N N]?",
    "raised": "number",
    "centre": "float[q]",
    "mean_square": "number?",
    "is_whitened": "flag",
    "responses": "float[N 1]?",
    "weights": "float[N]?",
}
MEMBER = {
    "embedding": "count",
    "name": "text",
    "mlp_width": "number?",
    "loss": "text",
    "compares_features": "flag",
    "learned_note": "text",
    "coef": "float[q T]",
    "intercept": "float[T]",
    "held_out": "any[n T]?",
    "path": {
        "alphas": "float[a]",
        "errors": "any[a]",
        "scores": "any[a]",
        "best": "count",
        "selection": "text",
        "is_log_loss": "flag",
    },
    "second": {
        "width": "number",
        "bandwidth": "number",
        "norms": "float[m]",
        "centres": "float[m p]?",
        "whitening": "float[m r]?",
    },
    "factors": [FACTOR],
}
TRAINING = {
    "samples": SAMPLES,
    "outputs": "float[N T]",
    "weights": "float[N]?",
    "groups": "int[N]?",
}
ATTENTION = {
    "options": {
        "alphas": "float[a]?",
        "fit_intercept": "flag",
        "seed": "count",
        "dtype": ("float64", "float32"),
        "classifies": "flag",
        "loss": "text",
    },
    "embeddings": [EMBEDDING],
    "members": [MEMBER],
    "combination": {
        "weights": "float[C]",
        "intercept": "float[T]",
        "held_out": "any[n T]?",
        "temperature": "number?",
        "n_tried": "count",
        "n_samples": "count",
    },
    "rows": [
        {
            "member": "count?",
            "settings": LAYER,
            "loss": "number",
            "alpha": "number",
            "note": "text",
        }
    ],
    "training": TRAINING,
    "stream": {
        "scales": "float[C]?",
        "count": "count",
        "sums": {
            "gram": "float[p p]",
            "cross": "float[p T]",
            "squares": "float[T]",
            "means": "float[p]",
            "y_mean": "float[T]",
            "weight": "number",
            "count": "count",
        },
    },
}
DRAW = {
    "heads": "heads",
    "n_heads": "count",
    "dim": "count",
    "query_dim": "count",
    "seed": "count",
    "rule": RULE,
}
BALL = {
    "active": "int[k]",
    "values": "float[k e T]",
    "intercept": "float[T]",
    "activation": tuple(ACTIVATIONS),
    "dtype": ("float64", "float32"),
    "extras_values": "float[c T]?",
}
SCHEMA = {
    "keyhole": "text",
    "estimator": tuple(ESTIMATORS),
    "heads_were_drawn": "flag",
    "parameters": "free",
    "fitted": "free",
    "schema": {"names": "free", "target": "text", "columns": "free", "codings": "free"},
    "attention": ATTENTION,
    "draw": DRAW,
    "ball": BALL,
}
"""What may stand where, and in what form. A text names a kind of value, "?" where it may be absent.
A tuple has its possible values, a list the rule for each of several. A dictionary may be absent as
a whole. Arrays have the lengths of their axes in brackets: a capital is one number in the whole
file, a small letter one in the record around it. "float" is finite, "any" need not be."""

_ARRAY = re.compile(r"(float|int|bool|any)\[([^\]]*)\](\??)")
_KINDS = {"float": "f", "any": "f", "int": "i", "bool": "b"}


def check_tree(
    value: Any, rule: Any, place: str, wide: dict[str, int], own: dict[str, int]
) -> None:
    """Raise ValueError unless a tree is as the schema says. `wide` and `own` are lengths so far."""
    if isinstance(rule, dict):
        if value is None:
            return
        if not isinstance(value, dict) or set(value) != set(rule):
            names = set(value) if isinstance(value, dict) else set()
            odd = ", ".join(sorted(names ^ set(rule)))
            raise ValueError(f"{place or 'the description'} with other entries ({odd:.100})")
        for name, item in value.items():
            inner = own if name == "path" else {}
            is_leaf = not isinstance(rule[name], (dict, list))
            lengths = own if is_leaf else inner
            check_tree(item, rule[name], f"{place}.{name}" if place else name, wide, lengths)
        return
    if isinstance(rule, list):
        if not isinstance(value, list):
            raise ValueError(f"{place} that is no list")
        for i, item in enumerate(value):
            check_tree(item, rule[0], f"{place}.{i}", wide, {})
        return
    if isinstance(rule, tuple):
        if value not in rule:
            raise ValueError(f"{place} {value!r:.40}, which is none of {', '.join(rule)}")
        return
    array_rule = _ARRAY.fullmatch(rule)
    if array_rule is None:
        _check_value(value, rule, place)
    elif value is not None or not array_rule[3]:
        _check_array(value, array_rule[1], array_rule[2].split(), place, wide, own)


def _check_value(value: Any, rule: str, place: str) -> None:
    """A number, a text, or another single value."""
    if rule == "free" or (value is None and rule.endswith("?")):
        return
    match rule.removesuffix("?"):
        case "text":
            fits = isinstance(value, str)
        case "flag":
            fits = type(value) is bool
        case "count":
            fits = type(value) is int and value >= 0
        case "number":
            fits = type(value) in (int, float)
        case "heads":
            fits = type(value) in HEADS.values() and not hasattr(value, "fit")
        case _:
            raise ValueError(f"no rule for {rule!r}")
    if not fits:
        raise ValueError(f"{place} that is no {rule.removesuffix('?')}: {value!r:.60}")


def _check_array(
    value: Any, kind: str, axes: list[str], place: str, wide: dict[str, int], own: dict[str, int]
) -> None:
    """An array, its type, its shape against those of others, and its numbers."""
    if not isinstance(value, np.ndarray) or value.dtype.kind != _KINDS[kind]:
        raise ValueError(f"{place} that is no array of type {kind}")
    if value.ndim != len(axes):
        raise ValueError(f"{place} with {value.ndim} axes instead of {len(axes)}")
    for axis, length in zip(axes, value.shape, strict=True):
        lengths = wide if axis.isupper() else own
        known = int(axis) if axis.isdigit() else lengths.setdefault(axis, length)
        if length != known:
            raise ValueError(f"{place} of shape {value.shape}, where {known} was expected")
    if kind == "float" and not np.isfinite(value).all():
        raise ValueError(f"{place} with numbers that are not finite")


# ---- the tree of a fitted estimator --------------------------------------------------------------


def state_of(estimator: Any, keep: str = "all", schema: Schema | None = None) -> Tree:
    """A fitted estimator as a tree of plain values and arrays; see `save`."""
    if schema is None:
        names = tuple(str(name) for name in getattr(estimator, "feature_names_in_", ()))
        schema = Schema(int(estimator.n_features_in_), bool(estimator.has_query_), names)
    if isinstance(estimator, AttentionModel):
        estimator._solved()
    left_out = BUILT if keep == "all" else BUILT | OF_SAMPLES
    fitted = {
        name: value
        for name, value in vars(estimator).items()
        if ATTRIBUTE.fullmatch(name) and name not in left_out
    }
    parameters, heads_were_drawn = _parameters(estimator)
    tree: Tree = {
        "keyhole": __version__,
        "estimator": type(estimator).__name__,
        "heads_were_drawn": heads_were_drawn,
        "parameters": parameters,
        "fitted": fitted,
        "schema": {
            "names": list(schema.names),
            "target": schema.target,
            "columns": [list(pair) for pair in schema.columns],
            "codings": [coding.as_list() for coding in schema.codings],
        },
        "attention": None,
        "draw": None,
        "ball": None,
    }
    if isinstance(estimator, AttentionModel):
        tree["attention"] = _attention_tree(estimator, keep)
    elif isinstance(estimator, AttentionFeatures):
        tree["draw"] = _draw_tree(estimator.drawn_heads_, estimator.tokens_, estimator)
    else:
        layer = estimator.layer_
        tree["draw"] = _draw_tree(layer.heads, estimator.tokens_, estimator)
        tree["ball"] = {name: getattr(layer, name) for name in BALL}
    return tree


def _parameters(estimator: Any) -> tuple[Tree, bool]:
    """The parameters, and whether `heads` are of another kind than ours: then those drawn stay."""
    parameters = dict(estimator.get_params(deep=False))
    seed = parameters["random_state"]
    if not isinstance(seed, (int, np.integer, type(None))):
        # a generator is stored as the seed that was drawn from it
        if isinstance(estimator, AttentionModel):
            seed = estimator.combination_.members[0].embedding.options.seed
        else:
            draw = getattr(estimator, "drawn_heads_", None) or estimator.layer_.heads
            seed = draw.seed
        parameters["random_state"] = seed
    if "device" in parameters:
        parameters["device"] = None
    if not isinstance(parameters["dtype"], str):
        parameters["dtype"] = np.dtype(parameters["dtype"]).name
    heads = parameters["heads"]
    heads_were_drawn = heads is not None and type(heads) not in HEADS.values()
    if heads_were_drawn:
        parameters["heads"] = None
    return parameters, heads_were_drawn


def _attention_tree(model: Any, keep: str) -> Tree:
    """Options, embeddings, members and their combination; samples and sums for "all"."""
    combination: Combination = model.combination_
    stream: Stream | None = vars(model).get("stream_")
    training: TrainingSet | None = model._training
    if keep == "predict":
        stream = None
        training = None
    elif stream is not None and stream.first is not None:
        training = stream.first
    options = combination.members[0].embedding.options

    # every embedding once; its training samples follow from those of the model where it keeps them
    embeddings: list[Embedding] = []
    members: list[Tree] = []
    for member in combination.members:
        numbers = [i for i, known in enumerate(embeddings) if known is member.embedding]
        if not numbers:
            embeddings.append(member.embedding)
            numbers = [len(embeddings) - 1]
        members.append(_member_tree(member, numbers[0], keep, training))
    embedding_trees: list[Tree] = []
    for number, embedding in enumerate(embeddings):
        readers = [
            member
            for member, tree in zip(combination.members, members, strict=True)
            if tree["embedding"] == number
        ]
        embedding_trees.append(_embedding_tree(embedding, readers, training is not None))

    rows: list[Tree] = []
    names_of_kept = [member.name for member in combination.members]
    for row in model.members_:
        is_kept = row.weight != 0 or row.values is not None
        heads, _ = _savable_heads(row.heads, None)
        rows.append(
            {
                "member": names_of_kept.index(row.name) if is_kept else None,
                "settings": _settings_tree(_settings_of_row(row), heads),
                "loss": float(row.loss),
                "alpha": float(row.alpha),
                "note": row.note,
            }
        )
    return {
        "options": {
            "alphas": options.alphas,
            "fit_intercept": options.fit_intercept,
            "seed": options.seed,
            "dtype": options.dtype,
            "classifies": options.classifies,
            "loss": options.loss,
        },
        "embeddings": embedding_trees,
        "members": members,
        "combination": {
            "weights": combination.weights,
            "intercept": combination.intercept,
            "held_out": combination.held_out if keep == "all" else None,
            "temperature": combination.temperature,
            "n_tried": combination.n_tried,
            "n_samples": len(combination.held_out),
        },
        "rows": rows,
        "training": None if training is None else _training_tree(training),
        "stream": None if stream is None else _stream_tree(stream),
    }


def _settings_of_row(row: MemberRow) -> LayerSettings:
    """The settings of a row of the table of members."""
    params = row.params
    names = ("heads", "n_heads", "activation", "pooling", "scaling", "query", "mlp_width")
    return LayerSettings(**{name: params[name] for name in names}, name=row.name)


def _settings_tree(settings: LayerSettings, heads: Any) -> Tree:
    """The settings of a layer, with heads that a file can hold."""
    return {name: getattr(settings, name) for name in LAYER} | {"heads": heads}


def _savable_heads(heads: Any, draw: HeadDraw | None, *, query: bool = True) -> tuple[Any, bool]:
    """Heads that a file can hold, and whether they are those that were drawn.

    Of another distribution than ours those drawn are stored, or its moments where the kernel of
    infinitely many is used.
    """
    if type(heads) in HEADS.values():
        return heads, False
    if draw is not None:
        drawn = np.asarray(draw.seen_by(query=query).block(0, draw.n_heads))
        hops = tuple(getattr(heads, "hops_", ()))
        return DrawnHeads(drawn, repr(heads)[:200], hops), True
    return GaussianHeads(), False


def _embedding_tree(embedding: Embedding, readers: Sequence[Member], has_training: bool) -> Tree:
    """One embedding: settings, token rule, heads, and training samples that readouts compare."""
    train = embedding.train.numpy()
    heads, _ = _savable_heads(embedding.heads, embedding.draw, query=train.has_query)
    uses_kernel = embedding.settings.has_heads and embedding.draw is None
    if uses_kernel and type(embedding.heads) not in HEADS.values():
        heads = _gaussian_twin(embedding)
    # readouts that compare with training samples need them; all others the shape alone
    are_compared = any(
        not member.embedding.is_finite
        or (member.second is not None and not member.second.has_centres)
        for member in readers
    )
    if not are_compared:
        train = train[:0]
    elif not embedding.settings.has_heads:
        # of statistics and sample-level features alone, no keys are compared
        train = train.with_sets(_without_keys(train.sets))
    return {
        "settings": _settings_tree(embedding.settings, heads),
        "rule": _rule_tree(embedding.rule),
        "train": None if has_training else _samples_tree(train),
        "landmarks": None if embedding.landmarks is None else _samples_tree(embedding.landmarks),
        "whitening": embedding.whitening,
    }


def _gaussian_twin(embedding: Embedding) -> GaussianHeads:
    """Gaussian heads of the moments of another distribution, which is all that its kernel needs."""
    heads: Any = embedding.heads
    if not hasattr(heads, "moments") or hasattr(heads, "components"):
        raise ValueError(
            f"a model file holds the kernel of Gaussian heads: {heads!r:.80} has no one mean and "
            "scale. Fit with a finite n_heads, or pickle the model."
        )
    samples = embedding.train
    dims = (samples.dim,) if samples.query_dim == samples.dim else (samples.dim, samples.query_dim)
    mean, scale = heads.moments(*dims)
    return GaussianHeads(0.0 if mean is None else mean, scale)


def _without_keys(sets: SetBatch) -> SetBatch:
    """As many sets of no keys."""
    tokens = np.zeros((0, sets.dim), sets.dtype)
    offsets = np.zeros(len(sets) + 1, int)
    return SetBatch._from_flat(tokens, offsets, sets.query, sets.extras, sets.pairs)


def _rule_tree(rule: TokenRule) -> Tree:
    """A token rule; its hops are those of the heads."""
    return {name: getattr(rule, name) for name in RULE} | {"extras_scale": float(rule.extras_scale)}


def _samples_tree(samples: SampleBatch) -> Tree:
    """Samples of one set each, or of several, with what is pooled how."""
    samples = samples.numpy()
    if len(samples) == 0:
        samples = samples.with_sets(_without_keys(samples.sets))
    if samples.sets.is_on_disk:
        raise ValueError(
            "a model file holds arrays: the keys of its training samples are files of their own, "
            f"{samples.sets.nbytes:,} bytes in all. Fit sets that are in memory, or save a model "
            "of drawn heads (n_heads=256, mlp='none') with keep='predict': it needs no sample."
        )
    base = samples.unpooled
    sets = base.sets
    return {
        "tokens": sets.tokens,
        "offsets": sets.offsets,
        "query": sets.query,
        "extras": base.extras,
        "set_offsets": base.set_offsets if isinstance(base, SetGroups) else None,
        "pooling": getattr(samples, "pooling", "mean"),
        "each": bool(getattr(samples, "each", False)),
        "is_pooled": isinstance(samples, PooledSets),
        "pairs": sets.pairs,
    }


def _training_tree(data: TrainingSet) -> Tree:
    """Samples with outputs, weights and groups."""
    return {
        "samples": _samples_tree(data.samples),
        "outputs": data.outputs,
        "weights": data.weights,
        "groups": data.groups,
    }


def _member_tree(member: Member, number: int, keep: str, training: TrainingSet | None) -> Tree:
    """One member: its readout, the path of its penalties, and its factors for "all"."""
    second = None
    if member.second is not None:
        second = {
            "width": float(member.second.width),
            "bandwidth": float(member.second.bandwidth),
            "norms": on_host(member.second.norms),
            "centres": member.second.centres,
            "whitening": member.second.whitening,
        }
    factors: Sequence[Any] = ()
    if keep == "all" and training is not None:
        factors = member.factors
    ridge = member.ridge
    return {
        "embedding": number,
        "name": member.name,
        "mlp_width": member.settings.mlp_width,
        "loss": member.loss,
        "compares_features": member.compares_features,
        "learned_note": member.learned_note,
        "coef": on_host(member.coef),
        "intercept": on_host(member.intercept),
        "held_out": member.held_out if keep == "all" else None,
        "path": {
            "alphas": ridge.alphas,
            "errors": ridge.errors,
            "scores": ridge.scores,
            "best": int(ridge.best),
            "selection": ridge.selection,
            "is_log_loss": bool(ridge.is_log_loss),
        },
        "second": second,
        "factors": [_factor_tree(factor, member.loss) for factor in factors],
    }


def _factor_tree(factor: Any, loss: str) -> Tree:
    """A factor; of a Newton step with its working responses and weights."""
    tree: Tree = dict.fromkeys(FACTOR)
    tree["kind"] = "inverse" if isinstance(factor, InverseFactor) else "coordinates"
    tree["is_whitened"] = bool(getattr(factor, "is_whitened", False))
    tree["alpha"] = float(factor.alpha)
    tree["mean_square"] = None if factor.mean_square is None else float(factor.mean_square)
    tree["raised"] = float(getattr(factor, "raised", 0.0))
    for name in ("basis", "scaled", "gains", "inverse", "centre"):
        value = getattr(factor, name, None)
        tree[name] = None if value is None else on_host(value)
    if loss != "squared_error":
        tree["responses"] = factor.problem.y
        tree["weights"] = factor.problem.weights
    return tree


def _stream_tree(stream: Stream) -> Tree:
    """Sums of batches; without any the batches themselves are the training samples."""
    if stream.recipe is None or stream.sums is None:
        return {"scales": None, "count": stream.count, "sums": None}
    sums = stream.sums
    arrays = {
        name: on_host(getattr(sums, name))
        for name in ("gram", "cross", "squares", "means", "y_mean")
    }
    return {
        "scales": stream.recipe.scales,
        "count": stream.count,
        "sums": arrays | {"weight": float(sums.weight), "count": int(sums.count)},
    }


def _draw_tree(draw: HeadDraw, rule: TokenRule, estimator: Any) -> Tree:
    """Heads that were drawn, and the token rule before them."""
    has_query = bool(estimator.has_query_) or rule.query != "given" or bool(rule.hops)
    heads, _ = _savable_heads(draw.distribution, draw, query=has_query)
    return {
        "heads": heads,
        "n_heads": draw.n_heads,
        "dim": draw.dim,
        "query_dim": draw.query_dim,
        "seed": draw.seed,
        "rule": _rule_tree(rule),
    }


# ---- and back ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedModel:
    """What a file holds: a fitted estimator and the schema of its input."""

    estimator: Any
    schema: Schema


def estimator_of(tree: Tree) -> SavedModel:
    """The estimator that a tree describes, and the schema of its input.

    Raises one of `UNREADABLE` where the tree is none of ours.
    """
    fitted = tree["fitted"]
    lengths = {"D": fitted["n_features_in_"]}
    if fitted["has_query_"]:
        lengths["Q"] = fitted["n_query_features_in_"]
    check_tree(tree, SCHEMA, "", lengths, {})
    estimator = ESTIMATORS[tree["estimator"]](**tree["parameters"])
    for name, value in fitted.items():
        if not ATTRIBUTE.fullmatch(name) or name in BUILT or hasattr(type(estimator), name):
            raise ValueError(f"a fitted attribute {name!r:.60}")
        setattr(estimator, name, value)
    _check_input(estimator)
    if isinstance(estimator, AttentionModel):
        if tree["attention"] is None:
            raise ValueError("no members")
        _attach_members(estimator, tree["attention"])
        if tree["heads_were_drawn"]:
            estimator.heads = estimator.combination_.members[0].settings.heads
    else:
        if tree["draw"] is None:
            raise ValueError("no heads")
        _attach_draw(estimator, tree["draw"], tree["ball"])
        if tree["heads_were_drawn"]:
            estimator.heads = estimator.heads_
    estimator._validate_params()
    _try(estimator)
    described = tree["schema"]
    schema = Schema(
        estimator.n_features_in_,
        estimator.has_query_,
        tuple(str(name) for name in described["names"]),
        described["target"],
        tuple((str(option), value) for option, value in described["columns"]),
        tuple(Coding.of_list(coding) for coding in described["codings"]),
    )
    return SavedModel(estimator=estimator, schema=schema)


def _check_input(estimator: Any) -> None:
    """What samples are like: dimensions, queries, sample-level features, labels."""
    for name in ("n_features_in_", "n_query_features_in_", "n_extras_in_"):
        _check_value(vars(estimator)[name], "count", name)
    for name in ("has_query_", "has_set_groups_"):
        _check_value(vars(estimator)[name], "flag", name)
    if estimator.n_features_in_ < 1:
        raise ValueError("tokens of dimension 0")
    if hasattr(type(estimator), "decision_function"):
        labels = vars(estimator)["classes_"]
        if not isinstance(labels, np.ndarray) or labels.ndim != 1 or len(labels) < 2:
            raise ValueError("no labels to choose from")
        if labels.tolist() != sorted(set(labels.tolist())):
            raise ValueError("labels that are not sorted, or not all different")
    elif hasattr(type(estimator), "predict"):
        _check_value(vars(estimator)["single_output_"], "flag", "single_output_")


def _attach_members(model: Any, tree: Tree) -> None:
    """Members, their combination, and all attributes that follow from them."""
    options = FitOptions(**tree["options"])
    training = None
    if tree["training"] is not None:
        training = _training_of(tree["training"])
    embeddings = [_embedding_of(part, options, training) for part in tree["embeddings"]]
    members = tuple(_member_of(part, embeddings, options, training) for part in tree["members"])
    if not members:
        raise ValueError("no members")
    parts = tree["combination"]
    held_out = parts["held_out"]
    n_outputs = len(parts["intercept"])
    if len(parts["weights"]) != len(members):
        raise ValueError(f"{len(parts['weights'])} weights for {len(members)} members")
    if held_out is None:
        # how many there were, and nothing of them
        held_out = np.broadcast_to(np.nan, (parts["n_samples"], n_outputs))
    n_outputs_needed = n_outputs
    if hasattr(model, "classes_"):
        n_outputs_needed = 1 if len(model.classes_) == 2 else len(model.classes_)
    elif model.single_output_:
        n_outputs_needed = 1
    if n_outputs != n_outputs_needed:
        raise ValueError(f"{n_outputs} outputs instead of {n_outputs_needed}")
    combination = Combination(
        members=members,
        weights=parts["weights"],
        intercept=parts["intercept"],
        held_out=held_out,
        temperature=parts["temperature"],
        tried=members,
        n_tried=max(parts["n_tried"], len(members)),
    )
    model.combination_ = combination
    model.members_ = _table_of(tree["rows"], combination)
    if combination.is_single:
        model._store_layer(members[0], held_out)
        if hasattr(model, "classes_"):
            model.temperature_ = combination.temperature
        elif "held_out_predictions_" in vars(model):
            model.loo_predictions_ = model.held_out_predictions_

    # samples of the leave-one-out fits, and batches to go on with
    model._training = training
    if tree["stream"] is not None and training is not None:
        model.stream_ = _stream_of(tree["stream"], training, combination, options)
        if model.stream_.recipe is not None:
            model._training = None
            model.selection_ = members[0].ridge


def _embedding_of(tree: Tree, options: FitOptions, training: TrainingSet | None) -> Embedding:
    """An embedding; its training samples are prepared anew where the model keeps them."""
    settings = _settings_of(tree["settings"])
    rule = _rule_of(tree["rule"], settings.heads)
    if training is not None:
        train = rule.apply(training.samples)
    elif tree["train"] is not None:
        train = _samples_of(tree["train"])
    else:
        raise ValueError("an embedding without samples")
    embedding = Embedding(
        settings=settings, options=options, rule=rule, heads=settings.heads, train=train
    )
    if not settings.has_heads:
        return embedding
    if settings.has_landmarks:
        embedding.landmarks = _samples_of(tree["landmarks"])
        embedding.whitening = tree["whitening"]
        if embedding.whitening is None or len(embedding.landmarks) != len(embedding.whitening):
            raise ValueError("landmarks that do not fit their whitening")
    elif not settings.is_exact:
        embedding.draw = HeadDraw(
            settings.heads, _count_of(settings), train.dim, options.seed, train.query_dim
        )
    return embedding


def _settings_of(tree: Tree) -> LayerSettings:
    """The settings of a layer."""
    n_heads = tree["n_heads"]
    is_number = type(n_heads) in (int, float) and n_heads >= 1
    if not is_number and not isinstance(n_heads, Landmarks):
        raise ValueError(f"{n_heads!r:.40} heads")
    return LayerSettings(**tree)


def _count_of(settings: LayerSettings) -> int:
    """The number of heads that are drawn."""
    assert not isinstance(settings.n_heads, Landmarks)
    return int(settings.n_heads)


def _rule_of(tree: Tree, heads: Any) -> TokenRule:
    """A token rule, with the hops of its heads."""
    return replace(TokenRule(**tree), hops=tuple(getattr(heads, "hops_", ())))


def _samples_of(tree: Tree) -> Any:
    """Samples, their offsets checked."""
    n_tokens = len(tree["tokens"])
    offsets = _checked_offsets(tree["offsets"], n_tokens)
    set_offsets = tree["set_offsets"]
    extras = tree["extras"]
    n_sets = len(offsets) - 1
    n_samples = n_sets
    if set_offsets is not None:
        set_offsets = _checked_offsets(set_offsets, n_sets)
        n_samples = len(set_offsets) - 1
    if tree["query"] is not None and len(tree["query"]) != n_sets:
        raise ValueError(f"{len(tree['query'])} queries of {n_sets} sets")
    if extras is not None and len(extras) != n_samples:
        raise ValueError(f"extras of {len(extras)} samples instead of {n_samples}")
    of_sets = extras if set_offsets is None else None
    samples: Any = SetBatch._from_flat(
        tree["tokens"], offsets, tree["query"], of_sets, tree["pairs"]
    )
    if set_offsets is not None:
        samples = SetGroups._of(samples, set_offsets, extras)
    if tree["is_pooled"]:
        return PooledSets(samples, tree["pooling"], tree["each"])
    return samples


def _checked_offsets(offsets: np.ndarray, length: int) -> np.ndarray:
    """Where each begins, from 0 to the length of what they share out."""
    is_rising = bool((np.diff(offsets) >= 0).all())
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != length or not is_rising:
        raise ValueError(f"offsets that do not share out {length} rows")
    return offsets


def _training_of(tree: Tree) -> TrainingSet:
    """Samples with outputs, weights and groups."""
    data = TrainingSet(
        samples=_samples_of(tree["samples"]),
        outputs=tree["outputs"],
        weights=tree["weights"],
        groups=tree["groups"],
    )
    if len(data.samples) != len(data):
        raise ValueError(f"{len(data.samples)} training samples with {len(data)} outputs")
    return data


def _member_of(
    tree: Tree, embeddings: Sequence[Embedding], options: FitOptions, training: TrainingSet | None
) -> Member:
    """A member, its parts compared with its embedding."""
    embedding = embeddings[tree["embedding"]]
    settings = replace(embedding.settings, mlp_width=tree["mlp_width"], name=tree["name"])
    second = None
    if tree["second"] is not None:
        second = SecondKernel(**tree["second"], embedding=embedding)
    n_rows = len(embedding.train)
    if second is not None and second.whitening is not None:
        n_rows = second.whitening.shape[1]
    elif second is None and embedding.is_finite:
        n_rows = embedding.n_features
    if len(tree["coef"]) != n_rows:
        raise ValueError(f"{len(tree['coef'])} coefficients instead of {n_rows}")
    held_out = tree["held_out"]
    left_out = None
    if held_out is None:
        held_out = np.zeros((0, len(tree["intercept"])))
    elif training is not None and len(held_out) == len(training):
        left_out = training.outputs - held_out
    path = tree["path"]
    if path["best"] >= len(path["alphas"]):
        raise ValueError("a penalty that was not tried")
    ridge = RidgeFit(**path, coef=tree["coef"], intercept=tree["intercept"], left_out=left_out)
    factors: tuple[Any, ...] = ()
    if training is not None:
        factors = tuple(_factor_of(part, options, training) for part in tree["factors"])
    return Member(
        settings=settings,
        embedding=embedding,
        ridge=ridge if len(factors) != 1 else replace(ridge, factor=factors[0]),
        coef=tree["coef"],
        intercept=tree["intercept"],
        held_out=held_out,
        loss=tree["loss"],
        second=second,
        compares_features=tree["compares_features"],
        factors=factors,
        learned_note=tree["learned_note"],
    )


def _factor_of(tree: Tree, options: FitOptions, training: TrainingSet) -> Any:
    """A factor, with the problem that it solves."""
    outputs = training.outputs if tree["responses"] is None else tree["responses"]
    weights = training.weights if tree["weights"] is None else tree["weights"]
    problem = RidgeProblem.of(
        outputs,
        [tree["alpha"]],
        fit_intercept=options.fit_intercept,
        weights=weights,
        groups=training.groups,
    )
    if tree["kind"] == "inverse":
        return InverseFactor(
            alpha=tree["alpha"],
            problem=problem,
            inverse=tree["inverse"],
            centre=tree["centre"],
            mean_square=tree["mean_square"],
            raised=tree["raised"],
        )
    return CoordinateFactor(
        alpha=tree["alpha"],
        problem=problem,
        basis=tree["basis"],
        centre=tree["centre"],
        scaled=tree["scaled"],
        gains=tree["gains"],
        mean_square=tree["mean_square"],
        is_whitened=tree["is_whitened"],
    )


def _table_of(trees: Sequence[Tree], combination: Combination) -> MemberTable:
    """The table of all members that were tried."""
    rows = []
    for tree in trees:
        settings = _settings_of(tree["settings"])
        weight = 0.0
        values = None
        if tree["member"] is not None:
            member = combination.members[tree["member"]]
            settings = member.settings
            weight = float(combination.weights[tree["member"]])
            values = member.coef
        rows.append(
            MemberRow(
                name=settings.name,
                weight=weight,
                loss=tree["loss"],
                alpha=tree["alpha"],
                n_heads=settings.n_heads,
                heads=settings.heads,
                values=values,
                params=params_of(settings),
                note=tree["note"],
            )
        )
    return MemberTable(rows)


def _stream_of(
    tree: Tree, training: TrainingSet, combination: Combination, options: FitOptions
) -> Stream:
    """Batches to go on with: sums, or the few samples so far."""
    if tree["sums"] is None:
        return Stream(count=tree["count"], pending=(training,))
    parts = tree["sums"]
    sums = Sums(
        **parts | {"gram": np.asfortranarray(parts["gram"])}, fit_intercept=options.fit_intercept
    )
    recipe = Recipe(
        members=combination.members,
        scales=tree["scales"],
        options=options,
        n_outputs=training.outputs.shape[1],
    )
    if sum(recipe.widths) != len(sums.means) or len(recipe.scales) != len(recipe.members):
        raise ValueError("sums that do not fit the members")
    return Stream(first=training, recipe=recipe, sums=sums, count=tree["count"])


def _attach_draw(estimator: Any, tree: Tree, ball: Tree | None) -> None:
    """Heads and token rule of an estimator with features alone, or with values in a norm ball."""
    heads = tree["heads"]
    draw = HeadDraw(heads, tree["n_heads"], tree["dim"], tree["seed"], tree["query_dim"])
    estimator.tokens_ = _rule_of(tree["rule"], heads)
    estimator.heads_ = heads
    if isinstance(estimator, AttentionFeatures):
        estimator.drawn_heads_ = draw
        return
    if ball is None:
        raise ValueError("no values")
    active = ball["active"]
    is_rising = bool((np.diff(active) > 0).all())
    is_inside = len(active) == 0 or 0 <= active[0] <= active[-1] < draw.n_heads
    if not is_rising or not is_inside or ball["values"].shape[1] != draw.dim + 1:
        raise ValueError("values of heads that there are none of")
    estimator.layer_ = norm_ball.BallLayer(heads=draw, **ball)
    estimator.active_heads_ = active
    values = np.zeros((draw.n_heads, *ball["values"].shape[1:]))
    values[active] = ball["values"]
    single = estimator._has_one_output()
    estimator.values_ = values[..., 0] if single else values
    estimator.intercept_ = ball["intercept"]
    if single and not hasattr(estimator, "classes_"):
        estimator.intercept_ = float(ball["intercept"][0])


def _try(estimator: Any) -> None:
    """Predict one sample of zeros: what does not fit together says so."""
    n_features = getattr(estimator, "drawn_heads_", None)
    if n_features is not None and n_features.n_heads * n_features.entries > MOST_TRIED:
        return
    query = None
    if estimator.has_query_:
        query = np.zeros((1, estimator.n_query_features_in_))
    extras = None
    if estimator.n_extras_in_:
        extras = np.zeros((1, estimator.n_extras_in_))
    sample: Any = SetBatch(np.zeros((1, 1, estimator.n_features_in_)), query=query)
    if estimator.has_set_groups_:
        sample = SetGroups(sample, [1], extras)
    elif extras is not None:
        sample = sample.with_extras(extras)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if hasattr(estimator, "predict"):
            estimator.predict(sample)
        else:
            estimator.transform(sample)


# ---- files ---------------------------------------------------------------------------------------


def save(
    estimator: Any,
    path: Any,
    *,
    keep: str = "all",
    schema: Schema | None = None,
    overwrite: bool = False,
) -> None:
    """Save a fitted estimator as one file: arrays as safetensors, all else as JSON in its header.

    Parameters
    ----------
    estimator : a fitted estimator of keyhole
    path : str or Path
        The file appears whole or not at all.
    keep : "all" or "predict"
        "all" keeps what later calls need: training samples and factors, for intervals, novelty and
        importance; of a model fitted in batches its sums, so that ``partial_fit`` continues exactly
        where it stopped. "predict" leaves these out, and leave-one-out predictions. A model loaded
        from such a file predicts, has intervals of the plain jackknife only, and cannot continue
        with ``partial_fit``. Kernels of infinitely many heads need their training sets always.
    schema : Schema, optional
        What `read_table` learned about columns (``data.schema``), to read tables the same way when
        they are predicted; made from the estimator if not given.
    overwrite : bool
        Whether a file of that name may be replaced.

    Notes
    -----
    Heads are stored as their distribution and a seed, not as matrices; of a distribution that is
    not keyhole's those that were drawn are stored. A model fitted on a device is loaded as one that
    predicts by NumPy, with the same numbers up to rounding. A generator given as ``random_state``
    is stored as the seed that was drawn from it. What could not be loaded again is not written.

    Examples
    --------
    >>> import tempfile
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(60, n_keys=4, dim=3, seed=0)
    >>> model = kh.AttentionRegressor(20, random_state=0).fit(
    ...     sets, kh.targets.TokenPower(2, dim=3)(sets)
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kh.save(model, f"{folder}/model.keyhole")
    ...     same = kh.load(f"{folder}/model.keyhole")
    >>> bool((same.predict(sets) == model.predict(sets)).all())
    True
    """
    kind = type(estimator).__name__
    path = Path(path)
    check_choice(keep, "keep", ("all", "predict"))
    if ESTIMATORS.get(kind) is not type(estimator):
        raise TypeError(
            f"`estimator` must be one of keyhole's, {', '.join(ESTIMATORS)}: got {kind}."
        )
    if not hasattr(estimator, "n_features_in_"):
        raise ValueError(
            f"`estimator` must be fitted before it is saved: this {kind} is not. Call fit first."
        )
    if path.is_dir():
        raise ValueError(
            f"`path` must name a file: {path.name!r} is a folder. Add a file name, such as "
            "model.keyhole."
        )
    tree = state_of(estimator, keep, schema)
    arrays: Arrays = {}
    try:
        document = flattened(tree, "", arrays)
        estimator_of(restored(document, "", arrays))
    except UNREADABLE as error:
        raise ValueError(
            f"a model is saved only if it can be loaded again: this {kind} has {_words(error)}. "
            "Were fitted attributes changed? Fit it anew."
        ) from None
    write_container(path, document, arrays, overwrite=overwrite)


def load(path: Any, *, return_schema: bool = False) -> Any:
    """Load an estimator that `save` wrote; its predictions are the same to the last bit.

    Parameters
    ----------
    path : str or Path
    return_schema : bool
        Whether to return (estimator, schema): ``schema.read(table)`` makes sets of a table as the
        training table was read.

    Raises
    ------
    ValueError
        If the file is not a complete and unchanged model file of a version we know. Nothing in it
        is executed.
    """
    saved = read_model(path)
    if return_schema:
        return saved.estimator, saved.schema
    return saved.estimator


def read_model(path: Any) -> SavedModel:
    """Load an estimator together with the schema of its input. See `load`."""
    path = Path(path)
    document, arrays = read_container(path)
    try:
        return estimator_of(restored(document, "", arrays))
    except UNREADABLE as error:
        raise damaged(
            path, "a model file describes an estimator that this keyhole knows", _words(error)
        ) from None


def _words(error: BaseException) -> str:
    """An error in words that follow "it has"; a KeyError names what is missing."""
    words = f"no {error}" if isinstance(error, KeyError) else str(error)
    return words[:300]
