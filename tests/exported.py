"""Configurations that exports are tried with: samples of every kind, and settings by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import keyhole as kh
from keyhole.attention.heads import FittedHeads

N_TRAIN = 60
DIM = 3

SIZES_OF_NEW = ((33, 14), (1, 4), (7, 30))
"""Samples, and keys at most, of batches to predict: unlike those that a graph is traced with."""


@dataclass(frozen=True)
class Configuration:
    """Samples and the parameters of an estimator.

    ``query`` and ``extras`` are numbers of their coordinates, 0 where there are none.
    """

    query: int = 0
    extras: int = 0
    has_groups: bool = False
    target: str = "number"
    parameters: dict[str, Any] = field(default_factory=dict)

    def samples(self, n: int, most_keys: int, seed: int) -> Any:
        """Ragged sets, or groups of one to three of them."""
        rng = np.random.default_rng(seed)
        keys = [rng.normal(size=(rng.integers(1, most_keys), DIM)) for _ in range(n)]
        query = rng.normal(size=(n, self.query)) if self.query else None
        counts = np.ones(n, int)
        if self.has_groups:
            counts = np.tile([1, 3, 2], n)[: max(1, n // 2)]
            counts = counts[np.cumsum(counts) <= n]
            counts[-1] += n - counts.sum()
        extras = rng.normal(size=(len(counts), self.extras)) if self.extras else None
        if self.has_groups:
            return kh.SetGroups(kh.SetBatch(keys, query), counts, extras)
        return kh.SetBatch(keys, query, extras)

    def fitted(self) -> Any:
        """An estimator fitted to samples whose target depends on all that they have."""
        samples = self.samples(N_TRAIN, 9, seed=0)
        ends = samples.sets.offsets[samples.set_offsets]
        y = np.add.reduceat(np.abs(samples.sets.tokens[:, 0]), ends[:-1]) / np.diff(ends)
        if self.query:
            y = y + np.maximum(samples.sets.query[samples.set_offsets[:-1], 0], 0)
        if self.extras:
            y = y + samples.extras[:, 0]
        parameters = {"random_state": 0} | self.parameters
        if self.target == "number":
            return kh.AttentionRegressor(**parameters).fit(samples, y)
        if self.target == "two numbers":
            return kh.AttentionRegressor(**parameters).fit(samples, np.stack([y, -(y**2)], axis=1))
        n_classes = {"two labels": 2, "three labels": 3}[self.target]
        cuts = np.quantile(y, np.arange(1, n_classes) / n_classes)
        labels = np.array(["low", "middle", "high"])[np.digitize(y, cuts)]
        return kh.AttentionClassifier(**parameters).fit(samples, labels)

    def new_samples(self) -> list[Any]:
        """Batches of other sizes than that of the training samples."""
        return [
            self.samples(n, most_keys, seed=1 + i) for i, (n, most_keys) in enumerate(SIZES_OF_NEW)
        ]


def layer(**settings: Any) -> dict[str, Any]:
    """Parameters of one layer: that of the paper, with tokens standardised, but for `settings`."""
    paper = {
        "n_heads": 16,
        "heads": kh.GaussianHeads(),
        "activation": "relu",
        "pooling": "mean",
        "scaling": "standard",
        "query": "given",
        "mlp": "none",
    }
    return paper | settings


def hopping_heads() -> FittedHeads:
    """Heads around two means, behind one hop of two patterns."""
    rng = np.random.default_rng(3)
    hops = (rng.normal(size=(2, DIM + 1, DIM + 1)),)
    return FittedHeads(rng.normal(size=(2, 3 * DIM + 1, DIM + 1)), scale=0.5, hops_=hops)


def configurations() -> dict[str, Configuration]:
    """All of them, by name."""
    inputs: dict[str, dict[str, Any]] = {
        "plain": {},
        "query": {"query": DIM},
        "query of its own, extras": {"query": 2, "extras": 2},
        "groups": {"query": DIM, "has_groups": True},
        "groups, extras": {"has_groups": True, "extras": 2},
    }
    found: dict[str, Configuration] = {}

    def add(name: str, of: str, *, target: str = "number", **settings: Any) -> None:
        parameters = layer(**settings)
        found[f"{name}; {of}"] = Configuration(**inputs[of], target=target, parameters=parameters)

    infinite = math.inf
    for activation in ("relu", "linear", "square", "step", "exp", "softmax"):
        for of in ("plain", "query", "groups"):
            add(f"{activation}, 16 heads", of, activation=activation)
            if activation != "softmax":
                add(f"{activation}, exact", of, activation=activation, n_heads=infinite)
        if activation != "softmax":
            add(
                f"{activation}, exact, then MLP",
                "query",
                activation=activation,
                n_heads=infinite,
                mlp="only",
            )
    for pooling in ("mean", "sum", "mean+size", "mean+statistics"):
        for of in ("query of its own, extras", "groups, extras"):
            add(f"{pooling}, 16 heads", of, pooling=pooling)
            add(f"{pooling}, exact", of, pooling=pooling, n_heads=infinite)
    for of in ("plain", "query of its own, extras", "groups, extras"):
        for mlp in ("none", "only"):
            add(f"statistics, MLP {mlp}", of, pooling="statistics", scaling="none", mlp=mlp)
            if of != "plain":
                add(f"extras, MLP {mlp}", of, pooling="extras", scaling="none", mlp=mlp)
    for query in ("mean", "each"):
        for pooling in ("mean", "sum"):
            add(f"query {query}, {pooling}", "plain", query=query, pooling=pooling)
            add(f"query {query}, softmax, {pooling}", "plain", query=query, activation="softmax")
        add(f"query {query}, exact", "plain", query=query, n_heads=infinite)
        add(f"query {query}, exact, then MLP", "plain", query=query, n_heads=infinite, mlp="only")
    for scaling in ("none", "sphere"):
        for of in ("plain", "query", "query of its own, extras"):
            add(f"scaling {scaling}, 16 heads", of, scaling=scaling)
            add(f"scaling {scaling}, exact", of, scaling=scaling, n_heads=infinite)
    for of in ("query", "query of its own, extras", "groups"):
        add("around a mean", of, heads=kh.GaussianHeads(mean=1.0))
        add("landmarks", of, n_heads=kh.Landmarks(20))
        add("landmarks, then MLP", of, n_heads=kh.Landmarks(20), mlp="only")
        add("16 heads, then MLP", of, mlp="only")
    strengths = kh.GaussianHeads(mean=(0.3, 20.0), scale=0.1)
    add("drawn strengths", "query", heads=strengths, activation="softmax")
    add("two hops", "query", heads=hopping_heads())
    add("two hops, no query", "plain", heads=hopping_heads())
    add("labels", "query", target="two labels")
    add("labels by squares", "query", target="two labels", loss="squared_error")
    add("three labels", "groups, extras", target="three labels")

    # default settings: combinations, clipped
    for of in ("plain", "groups, extras"):
        for target in ("number", "two numbers", "two labels", "three labels"):
            name = f"default, {target}; {of}"
            found[name] = Configuration(**inputs[of], target=target)
    name = "default, 32 heads; query of its own, extras"
    found[name] = Configuration(**inputs["query of its own, extras"], parameters={"n_heads": 32})
    return found


CONFIGURATIONS = configurations()

QUICK = (
    "relu, 16 heads; plain",
    "relu, exact; groups",
    "exp, exact, then MLP; query",
    "two hops; query",
    "default, three labels; groups, extras",
)
"""Those that are tried in every run; the others belong to ``make test-slow``."""


def outputs_of(model: Any, samples: Any) -> np.ndarray:
    """What a module or a graph is compared with."""
    if hasattr(model, "decision_function"):
        return model.decision_function(samples)
    return model.predict(samples)


def padded(samples: Any) -> dict[str, np.ndarray]:
    """Inputs of a module or a graph: samples padded with numbers that must not matter."""
    sets = samples.sets
    is_key = np.arange(sets.lengths.max()) < sets.lengths[:, None]
    keys = np.full((*is_key.shape, sets.dim), 7.7)
    keys[is_key] = sets.tokens
    inputs = {"keys": keys, "mask": is_key}
    if sets.query is not None:
        inputs["query"] = np.asarray(sets.query)
    if isinstance(samples, kh.SetGroups):
        is_set = np.arange(samples.counts.max()) < samples.counts[:, None]
        for name, values in inputs.items():
            wide = np.zeros((*is_set.shape, *values.shape[1:]), values.dtype)
            if name != "mask":
                wide += 3.3
            wide[is_set] = values
            inputs[name] = wide
    if samples.extras is not None:
        inputs["extras"] = samples.extras
    return inputs
