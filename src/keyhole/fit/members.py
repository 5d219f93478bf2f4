"""The list of layers that default settings try, in the order in which they are tried.

Each entry has one line that says what it is for. What is tried of it depends on what the samples
have (a query, sample-level features), on the settings that were given, and on the cost of each
entry in operations, against an allowance for each sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from keyhole.attention.heads import GaussianHeads
from keyhole.attention.hops import Ages
from keyhole.attention.learned import LearnedHeads
from keyhole.fit.settings import Landmarks, LayerSettings
from keyhole.registry import ACTIVATIONS, POINTWISE, POOLINGS

ALLOWANCE = 3e8
"""Operations an entry may cost for each sample: some 5 s for a thousand samples on one core."""

ALLOWANCE_TO_LEARN = 4e12
"""Operations learned heads may cost in all, about a minute of one core: a step uses at most 600
samples, however many there are."""

LEAST_SAMPLES_TO_COMBINE = 8
"""Samples below which one layer is fitted: leave-one-out cannot compare many."""

LEAST_SAMPLES_TO_LEARN = 300
"""Samples from which on heads are learned."""

LEARNING_STEPS = 1000.0
"""Steps of learned heads, all starts and folds together, in units of one of a single hop: 2,800 at
most, a third of which are common."""

MOST_EXACT = 1000
"""Samples up to which the exact kernel is used where it is affordable."""

N_HEADS = 128
"""Heads at least, where there are finitely many."""

MOST_FEATURES = 1024
"""Features of heads at most, where their number is automatic."""

LANDMARKS = 640
"""Landmarks, where heads would converge slowly: under a query, and in many dimensions."""

SUMMED_FEATURES = 640
"""Features of one layer of a fit in batches, where its heads are automatic.

Some layers side by side then have few enough for sums of p × p numbers.
"""

MOST_SUMMED_FEATURES = 2500
"""Features of all layers of a fit in batches side by side: matrices of that order are summed, and
decomposed in seconds. One layer by itself may have more."""

FEWEST_HEADS = 8
"""Heads that a layer of a fit in batches has even if they have more than `SUMMED_FEATURES`."""

FEWEST_LANDMARKS = 80
"""Landmarks below which a layer of a fit in batches has heads instead."""

SECOND_WIDTH = 1.0
"""τ of second kernels."""


@dataclass(frozen=True)
class Shape:
    """What is known of the samples before anything is fitted."""

    n_samples: int
    n_keys: int
    dim: int
    query_dim: int
    has_query: bool
    n_extras: int
    makes_queries: bool = True
    on_device: bool = False
    is_plain: bool = True
    """Whether every sample is one set."""
    has_ages: bool = False
    in_batches: bool = False

    @classmethod
    def of(cls, samples: Any) -> Shape:
        """The shape of some samples."""
        may_learn = samples.is_plain and len(samples) >= LEAST_SAMPLES_TO_LEARN
        return cls(
            n_samples=len(samples),
            n_keys=int(samples.token_counts.sum()),
            dim=samples.dim,
            query_dim=samples.query_dim,
            has_query=samples.sets.query is not None,
            n_extras=0 if samples.extras is None else samples.extras.shape[1],
            makes_queries=not samples.has_own_queries,
            on_device=samples.device is not None,
            is_plain=samples.is_plain,
            has_ages=may_learn and Ages.of(samples.sets) is not None,
        )

    @property
    def keys_per_sample(self) -> float:
        """Keys of a sample on average."""
        return self.n_keys / max(1, self.n_samples)


@dataclass(frozen=True)
class Entry:
    """A layer of the list, what it is for, and whether its pooled vector gets a second kernel."""

    settings: LayerSettings
    purpose: str
    second_kernel: bool = False


def entries_for(shape: Shape) -> list[Entry]:
    """The list for samples of some shape, before any setting is taken into account."""
    size = math.sqrt(shape.dim)
    layer = LayerSettings()
    entries = [
        Entry(
            replace(layer, name="ReLU mean"),
            "the paper's layer: averages of functions of one row",
            second_kernel=True,
        ),
        Entry(
            replace(layer, name="statistics", pooling="statistics", scaling="none"),
            "extremes, spreads, quantiles and the number of rows",
            second_kernel=True,
        ),
        Entry(
            replace(layer, name="ReLU sum", pooling="sum"),
            "targets that grow with the set",
            second_kernel=True,
        ),
        Entry(
            replace(layer, name="ReLU mean, unit rows", scaling="sphere"),
            "rows whose direction counts and not their length",
        ),
        Entry(
            replace(layer, name="ReLU mean, raw rows", scaling="none"),
            "coordinates whose units mean something",
        ),
    ]
    if shape.n_extras:
        entries.insert(
            0,
            Entry(
                replace(layer, name="sample-level features", pooling="extras", scaling="none"),
                "what the sample-level features say alone",
                second_kernel=True,
            ),
        )
    if shape.has_query:
        entries += [
            Entry(
                replace(layer, name=f"ReLU mean, mean {mean:g}", heads=GaussianHeads(mean=mean)),
                "rows that are like the query",
            )
            for mean in (1.0, 3.0, 10.0)
        ]
        entries += [
            Entry(
                replace(
                    layer,
                    name=f"softmax, mean {mean:g}",
                    heads=GaussianHeads(mean=mean),
                    activation="softmax",
                ),
                "the rows most like the query",
            )
            for mean in (3.0, 10.0, 30.0)
        ]
        entries.append(
            Entry(
                replace(
                    layer,
                    name="softmax, drawn strengths",
                    heads=GaussianHeads(mean=(0.3, 20.0), scale=0.1),
                    activation="softmax",
                ),
                "rows like the query in some coordinates, which differ between heads",
                second_kernel=True,
            )
        )
    else:
        entries += [
            Entry(
                replace(
                    layer,
                    name=f"softmax, scale {factor:g}",
                    heads=GaussianHeads(scale=factor * size),
                    activation="softmax",
                ),
                "a few rows that stand out",
                second_kernel=factor == 4.0,
            )
            for factor in (1.0, 4.0)
        ]
        if shape.makes_queries:
            entries += [
                Entry(
                    replace(layer, name="mean as query", query="mean"),
                    "rows beside the mean of their set",
                ),
                Entry(
                    replace(layer, name="mean as query, unit rows", query="mean", scaling="sphere"),
                    "the same for directions",
                ),
                Entry(
                    replace(layer, name="each as query", query="each"),
                    "pairs of rows",
                ),
            ]
    if shape.n_samples >= LEAST_SAMPLES_TO_LEARN and shape.is_plain:
        entries.append(
            Entry(
                replace(learned_layer(shape), name="learned heads"),
                "rows that are found by directions the data decide",
            )
        )
    return entries


def learned_layer(shape: Shape) -> LayerSettings:
    """The layer that learned heads suit: one row among many, and ages that are left as they are."""
    return LayerSettings(
        heads=LearnedHeads(),
        n_heads=float(N_HEADS),
        activation="softmax" if shape.has_query else "relu",
        scaling="none" if shape.has_ages else "standard",
    )


@dataclass(frozen=True)
class Given:
    """Settings that the user gave; None is automatic."""

    heads: Any = None
    n_heads: Any = None
    activation: str | None = None
    pooling: str | None = None
    scaling: str | None = None
    query: str | None = None
    mlp: str = "auto"
    mlp_width: float | None = None

    @property
    def is_complete(self) -> bool:
        """Whether one layer is described, so that nothing is combined."""
        settings = (self.heads, self.activation, self.pooling, self.scaling, self.query)
        return self.learns_heads or all(setting is not None for setting in settings)

    @property
    def learns_heads(self) -> bool:
        """Whether the heads that were given have to be fitted first: not in several layers."""
        return hasattr(self.heads, "fit")


@dataclass(frozen=True)
class Plan:
    """The layers to try, and the names of those that would cost too much."""

    layers: tuple[LayerSettings, ...]
    left_out: tuple[str, ...] = ()


def plan_layers(given: Given, shape: Shape) -> Plan:
    """The layers that settings and samples ask for; those with one embedding are neighbours."""
    if given.is_complete or shape.n_samples < LEAST_SAMPLES_TO_COMBINE:
        return Plan(layers=(explicit_layer(given, shape),))
    layers: list[LayerSettings] = []
    left_out: list[str] = []
    for entry in entries_for(shape):
        settings = _restricted(entry.settings, given)
        if settings is None:
            continue
        settings = replace(settings, n_heads=_n_heads(settings, given, shape), clips=True)
        allowance = ALLOWANCE_TO_LEARN if settings.learns_heads else ALLOWANCE * shape.n_samples
        if operations(settings, shape) > allowance:
            left_out.append(settings.name)
            continue
        for layer in _readouts(settings, entry, given):
            # settings that were given may make two entries one
            if replace(layer, name="") not in [replace(other, name="") for other in layers]:
                layers.append(layer)
    if not layers:
        return Plan(layers=(explicit_layer(given, shape),), left_out=tuple(left_out))
    return Plan(layers=tuple(layers), left_out=tuple(left_out))


def explicit_layer(given: Given, shape: Shape) -> LayerSettings:
    """The one layer that settings describe; what is left open is as in the first entry."""
    settings = learned_layer(shape) if given.learns_heads else LayerSettings()
    for name in ("heads", "activation", "pooling", "scaling", "query"):
        value = getattr(given, name)
        if value is not None:
            settings = replace(settings, **{name: value})
    width = None
    if given.mlp == "only":
        width = SECOND_WIDTH if given.mlp_width is None else given.mlp_width
    return replace(
        settings, n_heads=_n_heads(settings, given, shape), mlp_width=width, name="layer"
    )


def _restricted(settings: LayerSettings, given: Given) -> LayerSettings | None:
    """An entry with the settings that were given, None where it has others."""
    if not settings.has_heads:
        # statistics and sample-level features have no heads that could be as asked for
        asks_for_heads = given.heads is not None or given.activation is not None
        has_other_pooling = given.pooling is not None and given.pooling != settings.pooling
        if asks_for_heads or has_other_pooling:
            return None
    elif given.pooling is not None and not POOLINGS[given.pooling].has_heads:
        return None
    if settings.learns_heads and not _can_learn(given):
        return None
    if given.heads is not None:
        if settings.heads != GaussianHeads():
            return None
        settings = replace(settings, heads=given.heads)
    elif given.n_heads is not None and settings.learns_heads and not _is_finite(given.n_heads):
        return None
    for name in ("activation", "pooling", "query"):
        value = getattr(given, name)
        if value is None:
            continue
        default = getattr(LayerSettings(), name)
        own = getattr(settings, name)
        if own not in (value, default):
            return None
        settings = replace(settings, **{name: value})
    if given.scaling is not None:
        if settings.scaling != given.scaling and settings.has_heads:
            if settings.scaling != LayerSettings().scaling:
                return None
            settings = replace(settings, scaling=given.scaling)
    # the kernel of infinitely many heads, and landmarks of it, are known of some activations only
    needs_kernel = given.n_heads is not None and not _is_finite(given.n_heads)
    if needs_kernel and settings.has_heads and settings.activation not in POINTWISE:
        return None
    return settings


def _can_learn(given: Given) -> bool:
    """Whether heads can be learned under the settings that were given."""
    has_slope = given.activation is None or ACTIVATIONS[given.activation].slope is not None
    return has_slope and given.pooling in (None, "mean") and given.query != "each"


def _readouts(settings: LayerSettings, entry: Entry, given: Given) -> list[LayerSettings]:
    """The entry with a linear readout, a second kernel, or both."""
    width = SECOND_WIDTH if given.mlp_width is None else given.mlp_width
    linear = settings
    gaussian = replace(settings, mlp_width=width, name=f"{settings.name}, then MLP")
    if given.mlp == "only":
        return [gaussian]
    if given.mlp == "none" or not entry.second_kernel:
        return [linear]
    return [linear, gaussian]


def _is_finite(n_heads: Any) -> bool:
    """Whether heads are drawn: a number that is not infinite."""
    return not isinstance(n_heads, Landmarks) and not math.isinf(n_heads)


def _n_heads(settings: LayerSettings, given: Given, shape: Shape) -> float | Landmarks:
    """How many heads: as given, else infinitely many if affordable, else heads or landmarks."""
    if given.n_heads is not None:
        chosen: float | Landmarks = given.n_heads
        return chosen
    if not settings.has_heads:
        return math.inf
    has_moment = ACTIVATIONS[settings.activation].has_moment
    has_kernel = has_moment and hasattr(settings.heads, "moments")
    if isinstance(settings.heads, GaussianHeads) and settings.heads.strength_range is not None:
        has_kernel = False
    if shape.in_batches:
        return _n_heads_in_batches(settings, shape, has_kernel=has_kernel)
    n_heads = min(512, max(N_HEADS, MOST_FEATURES // (shape.dim + 1)))
    if not has_kernel or settings.learns_heads:
        return float(min(n_heads, 512)) if not settings.learns_heads else float(N_HEADS)
    exact = replace(settings, n_heads=math.inf)
    is_affordable = operations(exact, shape) <= ALLOWANCE * shape.n_samples
    if shape.n_samples <= MOST_EXACT and is_affordable:
        return math.inf
    has_few_features = N_HEADS * (shape.dim + 1) <= MOST_FEATURES
    if has_few_features and not shape.has_query and settings.query == "given":
        return float(n_heads)
    landmarks = replace(settings, n_heads=Landmarks(LANDMARKS))
    if operations(landmarks, shape) <= ALLOWANCE * shape.n_samples:
        return Landmarks(LANDMARKS)
    return float(N_HEADS)


def _n_heads_in_batches(
    settings: LayerSettings, shape: Shape, *, has_kernel: bool
) -> float | Landmarks:
    """Heads or landmarks of some hundred features; under a query and in many dimensions landmarks.

    Where landmarks take too long there are as many heads as have that many features, in many
    dimensions eight or what there is room for.
    """
    n_heads = SUMMED_FEATURES // (shape.dim + 1)
    heads_converge = n_heads >= FEWEST_LANDMARKS and not shape.has_query
    if has_kernel and not (heads_converge and settings.query == "given"):
        count = LANDMARKS
        while count >= FEWEST_LANDMARKS:
            landmarks = replace(settings, n_heads=Landmarks(count))
            if operations(landmarks, shape) <= ALLOWANCE * shape.n_samples:
                return Landmarks(count)
            count //= 2
    room = MOST_SUMMED_FEATURES // (shape.dim + 1)
    return float(max(n_heads, min(FEWEST_HEADS, room), 1))


def operations(settings: LayerSettings, shape: Shape) -> float:
    """Multiplications and additions of a fit: its kernel or features, and its ridge."""
    n = shape.n_samples
    width = shape.dim + 1
    n_keys = shape.n_keys
    n_queries = float(n_keys if settings.query == "each" else n)
    pairs_per_key = shape.keys_per_sample if settings.query == "each" else 1.0
    pair_cost = 2.0 * width + 40.0
    if not settings.has_heads:
        n_features = 12.0 * shape.dim + shape.n_extras
        return 50.0 * n_keys * shape.dim + _ridge_operations(n, n_features)
    if settings.is_exact:
        return 0.5 * (n_keys * pairs_per_key) ** 2 * pair_cost + 9.0 * float(n) ** 3
    if isinstance(settings.n_heads, Landmarks):
        count = min(settings.n_heads.count, n)
        of_landmarks = count * shape.keys_per_sample * pairs_per_key
        return n_keys * pairs_per_key * of_landmarks * pair_cost + _ridge_operations(n, count)
    n_heads = float(settings.n_heads)
    query_width = shape.query_dim + 1 if settings.query == "given" else width
    projections = 0.0
    if shape.has_query or settings.query != "given":
        projections = 2.0 * n_queries * n_heads * query_width * width
    features = 4.0 * n_keys * pairs_per_key * n_heads * width + projections
    if settings.learns_heads:
        return LEARNING_STEPS * _step_operations(shape) + 6.0 * features
    return features + _ridge_operations(n, n_heads * width)


def _step_operations(shape: Shape) -> float:
    """One step of learned heads, of one hop: features, their Gram matrix and its gradient."""
    n = min(float(shape.n_samples), 600.0)
    width = shape.dim + 1.0
    keys = n * min(shape.keys_per_sample, 256.0)
    n_features = max(8.0 * width, n)
    projections = n * shape.query_dim * n_features if shape.has_query else 0.0
    return 12.0 * keys * n_features + 4.0 * projections + 4.0 * n**2 * n_features + 5.0 * n**3


def _ridge_operations(n: int, n_features: float) -> float:
    """Ridge at all penalties in the smaller of both dimensions."""
    smaller = min(float(n), n_features)
    return 2.0 * n * n_features * smaller + 9.0 * smaller**3
