"""Predictions of thirty explicit settings, to compare two versions of the code.

    python benchmarks/guards.py --save before.npz       # with the old code
    python benchmarks/guards.py --compare before.npz    # with the new code: the largest difference

Every configuration is one layer at a given penalty, so that nothing is chosen. What is compared is
predictions, contributions and leave-one-out predictions, each in units of the spread of
predictions.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import keyhole as kh


@dataclass(frozen=True)
class Configuration:
    """Explicit settings of an estimator, and what its samples have."""

    name: str
    params: dict[str, Any]
    with_query: bool = True
    with_extras: bool = False
    with_weights: bool = False
    with_groups: bool = False
    of_several_sets: bool = False
    classifies: bool = False
    base: dict[str, Any] = field(
        default_factory=lambda: {
            "heads": kh.GaussianHeads(),
            "n_heads": 64,
            "activation": "relu",
            "pooling": "mean",
            "scaling": "standard",
            "query": "given",
            "alpha": 0.1,
            "random_state": 0,
        }
    )

    def estimator(self) -> Any:
        kind = kh.AttentionClassifier if self.classifies else kh.AttentionRegressor
        params = {**self.base, **self.params}
        if self.classifies:
            params.setdefault("loss", "squared_error")
        return kind(**params)


def configurations() -> list[Configuration]:
    rows = [
        Configuration(f"{name}, 64 heads", {"activation": name})
        for name in ("relu", "linear", "square", "step", "softmax")
    ]
    rows += [
        Configuration(f"{name}, exact", {"activation": name, "n_heads": math.inf})
        for name in ("relu", "linear", "square", "step", "exp")
    ]
    mean = kh.GaussianHeads(mean=1.0)
    rows += [
        Configuration("mean 1, 64 heads", {"heads": mean}),
        Configuration("mean 1, exact", {"heads": mean, "n_heads": math.inf}),
        Configuration("mean 1, softmax", {"heads": mean, "activation": "softmax"}),
        Configuration("scale 2, softmax", {"heads": kh.GaussianHeads(scale=2.0)}),
    ]
    rows += [
        Configuration(f"pooling {name}", {"pooling": name})
        for name in ("sum", "mean+size", "mean+statistics")
    ]
    rows += [Configuration(f"scaling {name}", {"scaling": name}) for name in ("none", "sphere")]
    rows += [
        Configuration("no query", {}, with_query=False),
        Configuration("no query, exact", {"n_heads": math.inf}, with_query=False),
        Configuration("query mean", {"query": "mean"}, with_query=False),
        Configuration("query each", {"query": "each", "n_heads": 16}, with_query=False),
        Configuration("extras", {}, with_extras=True),
        Configuration("extras, exact", {"n_heads": math.inf}, with_extras=True),
        Configuration("weights", {}, with_weights=True),
        Configuration("groups", {}, with_groups=True),
        Configuration("few heads", {"n_heads": 4}),
        Configuration("few heads, groups, weights", {"n_heads": 4}, with_weights=True),
        Configuration("samples of several sets", {}, with_query=False, of_several_sets=True),
        Configuration("classes", {}, classifies=True),
        Configuration("classes, log-loss", {"loss": "log_loss"}, classifies=True),
        Configuration("no intercept", {"fit_intercept": False}),
    ]
    return rows


def samples_of(row: Configuration) -> tuple[Any, Any, dict[str, Any]]:
    """160 samples, their outputs and the arguments of a fit."""
    rng = np.random.default_rng(7)
    n = 160
    lengths = rng.integers(1, 9, 2 * n)
    keys = [rng.normal(size=(length, 4)) * [1, 2, 0.5, 1] + [0, 3, 0, 0] for length in lengths]
    query = rng.normal(size=(n, 4)) if row.with_query else None
    extras = rng.normal(size=(n, 3)) if row.with_extras else None
    if row.of_several_sets:
        sets = kh.SetGroups(kh.SetBatch(keys), np.full(n, 2))
    else:
        sets = kh.SetBatch(keys[:n], query=query, extras=extras)
    y = np.array([keys[i][:, 0].mean() + np.abs(keys[i][:, 1]).max() for i in range(n)])
    y += 0.1 * rng.normal(size=n)
    if row.classifies:
        y = np.digitize(y, np.quantile(y, [0.4, 0.7]))
    options: dict[str, Any] = {}
    if row.with_weights:
        options["sample_weight"] = rng.uniform(0.2, 3.0, n)
    if row.with_groups:
        options["groups"] = rng.integers(0, 40, n)
    return sets, y, options


def outputs_of(row: Configuration) -> dict[str, np.ndarray]:
    """What a fit to the first 120 samples says of all."""
    sets, y, options = samples_of(row)
    train = np.arange(120)
    model = row.estimator().fit(
        sets[train], y[train], **{name: value[train] for name, value in options.items()}
    )
    predict = model.decision_function if row.classifies else model.predict
    left_out = model.loo_decision_ if row.classifies else model.loo_predictions_
    return {
        "predictions": np.asarray(predict(sets)),
        "contributions": np.concatenate(model.contributions(sets)),
        "left out": np.asarray(left_out),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save")
    parser.add_argument("--compare")
    args = parser.parse_args()
    found = {}
    for row in configurations():
        for what, values in outputs_of(row).items():
            found[f"{row.name}: {what}"] = values
    if args.save:
        np.savez(args.save, **found)
        print(f"saved {len(found)} arrays of {len(configurations())} configurations")
    if args.compare:
        before = np.load(args.compare, allow_pickle=False)
        worst = 0.0
        for name, values in found.items():
            reference = before[name]
            difference = np.abs(values - reference).max() / reference.std()
            worst = max(worst, difference)
            if difference > 1e-8:
                print(f"{difference:9.1e}  {name}")
        print(f"largest difference {worst:.1e} of the spread, in {len(found)} arrays")


if __name__ == "__main__":
    main()
