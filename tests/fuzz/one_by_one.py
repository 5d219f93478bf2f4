"""Prediction in a batch against one by one: what stands beside a sample does not matter.

Over all activations, finite heads and the exact kernel, scalings, queries and poolings. And the
contributions of keys and extras add up to the prediction.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import samples as draw
from cases import Case, Format, after_reading
from samples import Samples

from keyhole.data.sets import concatenate

SHARE = {"float64": 1e-8, "float32": 1e-5}
"""What a prediction may depend on its batch, of the scale of y; float32 has seven digits."""


# ---------------------------------------------------------------- the cases


def batch_base(rng: Random) -> dict[str, Any]:
    settings = draw.draw_settings(
        rng,
        n_heads=(2, 8, 16, 64, "inf", "inf", "inf"),
        activation=(*draw.ACTIVATIONS, "auto"),
        pooling=("mean", "mean", "sum", "mean+size", "auto"),
        scaling=("none", "none", "sphere", "standard", "auto"),
        query=("given", "given", "mean", "each", "auto"),
        heads=("gaussian", "gaussian", "biased", "query-key", "auto"),
        alpha=("loo", "loo", "loo", "fixed", "several"),
        dim=(1, 2, 2, 3, 5),
        estimator=(*("attention",) * 24, "features", "features", "ball"),
    )
    settings["n"] = rng.choice((8, 20, 40, 60))
    settings["noise"] = rng.choice((True, False))
    if settings["estimator"] == "ball":
        # a fit over the norm ball takes ten times as long
        settings |= {"n": 8, "n_heads": 2, "dim": 2}
    return {"settings": settings}


def batch_mutate(rng: Random, state: dict[str, Any]) -> dict[str, Any]:
    return state


def batch_finish(rng: Random, state: dict[str, Any]) -> Case:
    return Case("one by one", "one by one", {}, state)


BATCH = Format(
    share=3.0,
    base=batch_base,
    mutate=batch_mutate,
    finish=batch_finish,
    fewest=0,
    most=0,
    simpler=draw.simpler_settings,
)


# ---------------------------------------------------------------- the comparison


def pose(settings: dict[str, Any]) -> Samples:
    """Samples of some settings; without noise a fit may be exact, and its penalty tiny."""
    samples = draw.draw_samples(settings, settings["n"], 0)
    if settings["noise"] or draw.is_classification(settings):
        return samples
    sets = samples.sets.sets
    sums = np.add.reduceat(sets.tokens.sum(axis=1), sets.offsets[:-1]) / sets.lengths
    values = np.add.reduceat(sums, samples.sets.set_offsets[:-1])
    y = settings["units"] * values
    if settings["task"] == "two":
        y = np.stack([y, 1.0 - y], axis=1)
    return Samples(sets=samples.sets, y=y, weights=samples.weights, arrays={})


def read_one_by_one(folder: Path, options: dict[str, Any]) -> None:
    settings = options["settings"]
    samples = pose(settings)
    model = draw.make_estimator(settings)
    if settings["estimator"] == "attention":
        model.fit(samples.sets, samples.y, sample_weight=samples.weights)
    else:
        model.fit(samples.sets, samples.y)
    scale = draw.scale_of(samples.y)
    share = SHARE[settings["dtype"]]
    new = draw.draw_samples(settings, 7, 2**20).sets
    with after_reading():
        together = draw.scores(model, new)
        alone = np.concatenate([draw.scores(model, new[[i]]) for i in range(len(new))])
        name = "predictions in a batch and one by one"
        draw.compare(name, together, alone, scale=scale, share=share)
        among = draw.scores(model, concatenate([new, samples.sets]))[: len(new)]
        draw.compare("predictions in two batches", among, together, scale=scale, share=share)
        if settings["estimator"] != "features":
            parts = sum_of_contributions(model, new)
            name = "predictions and sums of contributions"
            draw.compare(name, parts, together, scale=scale, share=share)


def sum_of_contributions(model: Any, new: Any) -> np.ndarray:
    """The intercept, and what keys and extras add to it, as columns."""
    keys = [part.sum(axis=0) for part in model.contributions(new)]
    total = np.asarray(keys).reshape(len(new), -1)
    if hasattr(model, "extras_contributions"):
        extras = model.extras_contributions(new)
        total = total + extras.sum(axis=1).reshape(len(new), -1)
    return total + np.asarray(model.intercept_)
