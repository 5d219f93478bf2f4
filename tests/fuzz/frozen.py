"""Fitted models stay as they were fitted: parameters, arrays, pickles and files change nothing.

A twin is fitted to the same numbers in arrays of its own and left alone. Between fit and use the
model has its parameters set, the arrays it was given overwritten, and is copied, pickled and saved;
what it then predicts is what the twin predicts.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import samples as draw
import sklearn
from cases import Case, Format, after_reading
from samples import DifferenceError, Samples
from sklearn.base import clone

import keyhole as kh

PARAMETERS: dict[str, tuple[Any, ...]] = {
    "n_heads": (1, 4, 700, "inf", "auto"),
    "heads": ("gaussian", "biased", "query-key", "auto"),
    "alpha": ("loo", "fixed", "several"),
    "activation": (*draw.ACTIVATIONS, "auto"),
    "fit_intercept": (True, False),
    "random_state": (0, 12345, None),
    "dtype": ("float64", "float32"),
    "pooling": ("mean", "mean+size", "sum", "auto"),
    "scaling": ("none", "sphere", "standard", "auto"),
    "query": ("given", "mean", "each", "auto"),
    "solver": ("auto", "direct", "cg"),
    "extras_scale": ("loo", 0.1, 30.0),
    "criterion": ("squared_error", "log_loss"),
}
"""What parameters may be set to after a fit."""

STEPS = {"use": 10, "set": 6, "overwrite": 3, "pickle": 2, "copy": 1, "clone": 1, "save": 2}
STEPS |= {"memory": 1, "threads": 2, "refit": 1}
"""What may happen to a fitted model, and how often each is drawn."""

ESTIMATORS = {"attention": 32, "batches": 6, "features": 4, "ball": 1}
"""What is fitted, and how often each is drawn: over the norm ball a fit takes ten times as long."""

ARRAYS = ("tokens", "query", "extras", "y", "weights", "groups")

REGRESSION_USES = (
    "predict",
    "predict_interval",
    "adaptive interval",
    "predict_std",
    "novelty",
    "contributions",
    "extras_contributions",
    "hop_weights",
    "coordinate_importance",
)
CLASSIFICATION_USES = (
    "decision_function",
    "predict_proba",
    "predict_set",
    "predict_std",
    "novelty",
    "contributions",
    "extras_contributions",
    "hop_weights",
    "coordinate_importance",
)
BALL_REGRESSION_USES = ("predict", "contributions")
BALL_CLASSIFICATION_USES = ("decision_function", "predict_proba", "contributions")

STEEP = ("novelty", "predict_set")
"""Uses that count: a number next to a limit may fall on either side, by rounding alone."""


# ---------------------------------------------------------------- the cases


def frozen_base(rng: Random) -> dict[str, Any]:
    settings = draw.draw_settings(
        rng,
        n_heads=(2, 3, 8, 16, "inf", "inf"),
        scaling=("none", "sphere", "standard", "auto"),
        query=("given", "given", "mean", "each", "auto"),
        heads=("gaussian", "biased", "query-key", "auto"),
    )
    settings["n"] = rng.choice((8, 12, 20))
    settings["groups"] = rng.random() < 0.25
    settings["estimator"] = rng.choices(list(ESTIMATORS), list(ESTIMATORS.values()))[0]
    if settings["estimator"] == "ball":
        settings |= {"n": 8, "n_heads": 2, "dim": 2}
    return {"settings": draw.settle(settings), "steps": []}


def uses_of(settings: dict[str, Any]) -> tuple[str, ...]:
    """What can be asked of the estimator of some settings."""
    if settings["estimator"] == "features":
        return ("transform",)
    if settings["estimator"] == "ball":
        if draw.is_classification(settings):
            return BALL_CLASSIFICATION_USES
        return BALL_REGRESSION_USES
    return CLASSIFICATION_USES if draw.is_classification(settings) else REGRESSION_USES


def frozen_mutate(rng: Random, state: dict[str, Any]) -> dict[str, Any]:
    """Append a step."""
    step: dict[str, Any] = {"do": rng.choices(list(STEPS), list(STEPS.values()))[0]}
    match step["do"]:
        case "use" | "memory" | "threads":
            step["use"] = rng.choice(uses_of(state["settings"]))
        case "set":
            step["name"] = rng.choice(list(PARAMETERS))
            step["value"] = rng.choice(PARAMETERS[step["name"]])
        case "overwrite":
            step["array"] = rng.choice(ARRAYS)
        case "refit":
            step["part"] = rng.getrandbits(20)
    return {**state, "steps": [*state["steps"], step]}


def frozen_finish(rng: Random, state: dict[str, Any]) -> Case:
    # the last step is a use: without one nothing would be seen
    last = {"do": "use", "use": rng.choice(uses_of(state["settings"]))}
    return Case("fitted model", "fitted model", {}, {**state, "steps": [*state["steps"], last]})


FROZEN = Format(
    share=3.5,
    base=frozen_base,
    mutate=frozen_mutate,
    finish=frozen_finish,
    fewest=2,
    most=8,
    simpler=draw.simpler_settings,
)


# ---------------------------------------------------------------- the run


def draw_groups(settings: dict[str, Any], part: int) -> np.ndarray | None:
    if not settings["groups"]:
        return None
    groups = np.random.default_rng([settings["seed"], part, 1]).integers(0, 4, size=settings["n"])
    groups[:3] = [0, 1, 2]
    return groups


@dataclass
class Fitted:
    """A model that things happen to, and a twin that is left alone."""

    settings: dict[str, Any]
    folder: Path
    model: Any = None
    twin: Any = None
    samples: Samples | None = None
    other_blocks: bool = False
    """Whether the model ran with other blocks of memory: sums are then rounded otherwise."""
    files: int = 0
    expected: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.new = draw.draw_samples(self.settings, 5, 2**20).sets
        self.fit(draw.make_estimator(self.settings), 0)

    def fit(self, model: Any, part: int) -> None:
        """Fit the model, and a twin of the same parameters to samples of its own."""
        self.samples = draw.draw_samples(self.settings, self.settings["n"], part)
        groups = draw_groups(self.settings, part)
        if groups is not None:
            self.samples.arrays["groups"] = groups
        own = draw.draw_samples(self.settings, self.settings["n"], part)
        self.twin = self.fitted(clone(model), own, draw_groups(self.settings, part))
        self.model = self.fitted(model, self.samples, groups)
        self.expected = {}

    def fitted(self, model: Any, samples: Samples, groups: np.ndarray | None) -> Any:
        match self.settings["estimator"]:
            case "attention":
                weights = samples.weights
                return model.fit(samples.sets, samples.y, sample_weight=weights, groups=groups)
            case "batches":
                half = len(samples) // 2
                parts = [samples.rows(slice(None, half)), samples.rows(slice(half, None))]
                batches = [(part.sets, part.y, part.weights) for part in parts]
                return model.fit_batches(batches)
            case "features":
                return model.fit(samples.sets)
            case _:
                return model.fit(samples.sets, samples.y)

    def run(self, step: dict[str, Any]) -> None:
        """Take one step."""
        match step["do"]:
            case "use":
                self.use(step["use"])
            case "memory":
                # temporaries of a few kilobytes: everything goes in many blocks
                with sklearn.config_context(working_memory=2e-3):
                    self.use(step["use"], other_blocks=True)
            case "threads":
                self.use_in_threads(step["use"])
            case "set":
                self.set_parameter(step["name"], step["value"])
            case "overwrite":
                draw.overwrite(self.samples, step["array"])
            case "pickle":
                with after_reading():
                    self.model = pickle.loads(pickle.dumps(self.model))
            case "copy":
                with after_reading():
                    self.model = draw.copied(self.model)
            case "clone":
                self.check_clone()
            case "save":
                self.save()
            case "refit":
                self.refit(step["part"])

    def set_parameter(self, name: str, value: Any) -> None:
        """Set a parameter that the estimator has; nothing that was fitted may change."""
        settings = {**draw.PLAIN, "seed": 0, name: value}
        match name:
            case "heads":
                name, value = "heads", draw.head_distribution(settings)
            case "alpha":
                value = draw.alpha_of(settings)
            case "n_heads":
                value = draw.n_heads_of(settings)
        if name not in self.model.get_params(deep=False):
            return
        # only what the estimator takes: features need a finite number of heads, for example
        try:
            clone(self.model).set_params(**{name: value})._validate_params()
        except ValueError:
            return
        self.model.set_params(**{name: value})

    def check_clone(self) -> None:
        """A clone has the parameters, and nothing that was fitted."""
        with after_reading():
            other = clone(self.model)
        if hasattr(other, "n_features_in_"):
            raise DifferenceError("a clone is fitted")

    def save(self) -> None:
        """Go on with what a file holds."""
        self.files += 1
        path = self.folder / f"model {self.files}.keyhole"
        with after_reading():
            kh.save(self.model, path)
            self.model = kh.load(path)

    def refit(self, part: int) -> None:
        """Another fit of the same object: nothing of the first one is left."""
        model = self.model
        parameters = model.get_params(deep=False)
        if parameters.get("random_state", 0) is None:
            model.set_params(random_state=5)
        # conjugate gradients are as exact as their residual; so many heads take long where p x p
        # matrices are made of them
        takes_long = parameters["n_heads"] == 700 and self.settings["estimator"] != "attention"
        if takes_long or parameters.get("solver") == "cg":
            return
        # parameters that were set may not go together with the samples: a clone tells
        samples = draw.draw_samples(self.settings, self.settings["n"], part)
        groups = draw_groups(self.settings, part)
        _, refusal = draw.attempt(lambda: self.fitted(clone(model), samples, groups))
        if refusal is None:
            with after_reading():
                self.fit(model, part)

    # ---- uses

    def wanted(self, name: str) -> tuple[Any, BaseException | None]:
        """What the twin says, or how it refuses; asked once."""
        if name not in self.expected:
            self.expected[name] = draw.attempt(lambda: use(self.twin, name, self.new))
        return self.expected[name]

    def use(self, name: str, *, other_blocks: bool = False) -> None:
        self.other_blocks = self.other_blocks or other_blocks
        wanted, refusal = self.wanted(name)
        got, other_refusal = draw.attempt(lambda: use(self.model, name, self.new))
        if refusal is None and other_refusal is not None:
            raise DifferenceError(f"{name} of a fitted model is refused later: {other_refusal}")
        if refusal is not None and other_refusal is None:
            raise DifferenceError(f"{name} of a fitted model is given later, not first: {refusal}")
        if refusal is None:
            self.compare(name, got, wanted)

    def use_in_threads(self, name: str) -> None:
        wanted, refusal = self.wanted(name)
        if refusal is not None:
            return
        for got in draw.in_threads(lambda: use(self.model, name, self.new), 4):
            self.compare(name, got, wanted)

    def compare(self, name: str, got: np.ndarray, wanted: np.ndarray) -> None:
        scale = 0.0
        share = 1e-9
        if self.other_blocks:
            if name in STEEP:
                return
            scale = float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0))
            share = 1e-6
            if hasattr(self.twin, "selection_"):
                scale = max(scale, draw.scale_of(self.samples.y))
                share = 100 * draw.share_allowed(self.twin)
        draw.compare(f"{name} of fit and later", got, wanted, scale=scale, share=share)


def use(model: Any, name: str, new: Any) -> np.ndarray:
    """What a model says, as one vector."""
    uses: dict[str, Callable[[], Any]] = {
        "adaptive interval": lambda: model.predict_interval(new, width="adaptive"),
        "coordinate_importance": lambda: importance(model),
    }
    values = uses[name]() if name in uses else getattr(model, name)(new)
    return flat(values)


def importance(model: Any) -> list[np.ndarray]:
    found = model.coordinate_importance(n_repeats=1)
    return [found.within, found.across, np.array([found.baseline])]


def flat(values: Any) -> np.ndarray:
    """All numbers of nested lists of arrays, one after the other."""
    if isinstance(values, (list, tuple)):
        parts = [flat(value) for value in values]
        return np.concatenate(parts) if parts else np.zeros(0)
    return np.asarray(values, dtype=float).ravel()


def read_frozen(folder: Path, options: dict[str, Any]) -> None:
    """Run a sequence."""
    fitted = Fitted(settings=options["settings"], folder=folder)
    for step in options["steps"]:
        fitted.run(step)
