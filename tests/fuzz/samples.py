"""Small samples and estimators for sequences of calls, each drawn from a row of plain settings.

A row of settings is JSON: printed in a finding or kept in the corpus, it makes the same samples
and the same estimator again. All that the attack knows about the names of parameters and fitted
attributes of the estimators stands in this module.
"""

from __future__ import annotations

import copy
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
from cases import REFUSALS, Case, is_refusal

import keyhole as kh
from keyhole.ridge.design import PrincipalAxes

ACTIVATIONS = ("relu", "softmax", "linear", "square", "step", "exp")

PLAIN: dict[str, Any] = {
    "estimator": "attention",
    "task": "one",
    "dim": 2,
    "queries": "none",
    "container": "sets",
    "ragged": False,
    "extras": False,
    "weights": "none",
    "units": 1.0,
    "n_heads": 3,
    "heads": "gaussian",
    "activation": "relu",
    "fit_intercept": True,
    "dtype": "float64",
    "pooling": "mean",
    "scaling": "none",
    "query": "given",
    "alpha": "fixed",
    "criterion": "squared_error",
}
"""The plainest value of every setting: what a finding is reduced to where it still is one."""

CHOICES: dict[str, tuple[Any, ...]] = {
    "estimator": ("attention",),
    "task": ("one", "one", "two", "two classes", "three classes"),
    "dim": (1, 2, 2, 3),
    "queries": ("none", "same", "other", "paired"),
    "container": ("sets", "sets", "sets", "groups"),
    "ragged": (False, True),
    "extras": (False, False, True),
    "weights": ("none", "none", "positive", "zeros"),
    "units": (1.0, 1.0, 1.0, 1e-6, 1e5),
    "n_heads": (1, 2, 3, 5, 8),
    "heads": ("gaussian", "biased", "query-key"),
    "activation": ("relu", "relu", *ACTIVATIONS),
    "fit_intercept": (True, True, False),
    "dtype": ("float64", "float64", "float64", "float32"),
    "pooling": ("mean", "mean", "sum", "mean+size"),
    "scaling": ("none", "none", "sphere", "standard"),
    "query": ("given", "given", "mean", "each"),
    "alpha": ("loo", "loo", "fixed", "several"),
    "criterion": ("squared_error", "log_loss"),
}
"""What each setting is drawn from, by itself; repeated where it should be drawn more often.

``estimator`` is that of `fit`, of `fit_batches` ("batches"), `AttentionFeatures` or over the norm
ball. ``queries`` says whether sets have queries: of the dimension of the keys, of another one, or
of another one with the pairs of coordinates named that mean the same. ``units`` multiplies y.
"""

FIXED_ALPHA = 0.3
SEVERAL_ALPHAS = (0.1, 1.0, 10.0)
EXTRAS_SCALE = 1.5


class DifferenceError(AssertionError):
    """Two numbers that should be the same."""


# ---------------------------------------------------------------- settings


def draw_settings(rng: Random, **choices: Any) -> dict[str, Any]:
    """Draw every setting by itself, from ``choices`` where they are named there."""
    settings: dict[str, Any] = {"seed": rng.getrandbits(30)}
    for name, options in (CHOICES | choices).items():
        settings[name] = rng.choice(options)
    return settle(settings)


def settle(settings: dict[str, Any]) -> dict[str, Any]:
    """The nearest settings that go together: what estimators refuse on purpose is left out."""
    settings = dict(settings)
    if settings["container"] == "groups" and settings["query"] in ("mean", "each"):
        # samples of several sets have the queries of their sets
        settings["query"] = "given"
    if settings["n_heads"] == "inf":
        # kernels exist of Gaussian heads and of pointwise activations alone
        if settings["activation"] == "softmax":
            settings["activation"] = "relu"
        if settings["heads"] == "query-key":
            settings["heads"] = "gaussian"
        settings["dtype"] = "float64"
    if settings["estimator"] != "attention":
        settings["groups"] = False
        if settings["n_heads"] == "inf":
            settings["n_heads"] = 8
    if settings["estimator"] in ("features", "ball"):
        settings["container"] = "sets"
        if settings["activation"] == "auto":
            settings["activation"] = "relu"
        if settings["scaling"] == "auto":
            settings["scaling"] = "standard"
        if settings["query"] == "auto":
            settings["query"] = "mean"
    if settings["estimator"] == "ball":
        # the loss bends at 1, and y is meant to be of that size: else a fit takes minutes
        settings["units"] = 1.0
        settings["extras"] = False
        settings["weights"] = "none"
        if settings["task"] == "two":
            settings["task"] = "one"
    return settings


def simpler_settings(case: Case) -> Iterator[Case]:
    """The case with one setting at a time at its plainest value."""
    settings = case.options["settings"]
    for name, value in PLAIN.items():
        if name in settings and settings[name] != value:
            plainer = settle({**settings, name: value})
            yield replace(case, options={**case.options, "settings": plainer})


def is_classification(settings: dict[str, Any]) -> bool:
    return "classes" in settings["task"]


def class_names(settings: dict[str, Any]) -> np.ndarray:
    """All labels of a classification, in order."""
    count = 3 if settings["task"] == "three classes" else 2
    return np.array(["ash", "beech", "cedar"][:count])


# ---------------------------------------------------------------- samples


@dataclass(frozen=True)
class Samples:
    """What `fit` takes; ``arrays`` are those it was made from, which a caller may change."""

    sets: Any
    y: np.ndarray
    weights: np.ndarray | None
    arrays: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.y)

    @property
    def all_weights(self) -> np.ndarray:
        """One weight for each sample, ones if there are none."""
        return np.ones(len(self)) if self.weights is None else self.weights

    def rows(self, rows: Any) -> Samples:
        """Some of the samples, in arrays of their own."""
        weights = None if self.weights is None else self.weights[rows]
        return Samples(self.sets[rows], self.y[rows], weights, {})

    def independent(self) -> Samples:
        """The same samples, sharing no memory with these."""
        return self.rows(np.arange(len(self)))


def draw_samples(settings: dict[str, Any], n: int, part: int) -> Samples:
    """Draw n samples, the same for the same settings, n and ``part``."""
    rng = np.random.default_rng([settings["seed"], part])
    dim = settings["dim"]
    several_sets = settings["container"] == "groups"
    n_keys = int(rng.integers(1, 4))

    # features of the exponential and of squares grow fast: smaller tokens keep them moderate
    size = 0.5 if settings["activation"] in ("exp", "square") else 1.0
    counts = rng.integers(1, 4, size=n) if several_sets else np.ones(n, int)
    n_sets = int(counts.sum())
    arrays: dict[str, np.ndarray] = {}
    if settings["ragged"]:
        lengths = rng.integers(1, 5, size=n_sets)
        tokens = size * np.clip(rng.normal(0.2, 1.0, size=(int(lengths.sum()), dim)), -2.5, 2.5)
        keys: Any = np.split(tokens, np.cumsum(lengths)[:-1])
        arrays["tokens"] = tokens
        first = np.array([part_of_set[:, 0].mean() for part_of_set in keys])
    else:
        keys = size * np.clip(rng.normal(0.2, 1.0, size=(n_sets, n_keys, dim)), -2.5, 2.5)
        arrays["tokens"] = keys
        first = keys[:, :, 0].mean(axis=1)

    # queries, and numbers that depend on both query and keys
    query = None
    pairs = None
    value = first + 0.5 * np.square(first)
    if settings["queries"] != "none":
        query_dim = dim if settings["queries"] == "same" else dim + 1
        query = size * np.clip(rng.normal(size=(n_sets, query_dim)), -2.5, 2.5)
        arrays["query"] = query
        value = value + 2.0 * query[:, -1] * first
        if settings["queries"] == "paired":
            pairs = [(query_dim - 1, 0)]
    sets: Any = kh.SetBatch(keys, query, pairs=pairs)
    if several_sets:
        sets = kh.SetGroups(sets, counts)
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        value = np.add.reduceat(value, starts) / counts
    if settings["extras"]:
        arrays["extras"] = rng.normal(1.0, 2.0, size=(n, 2))
        value = value + 0.3 * arrays["extras"][:, 1]
        sets = sets.with_extras(arrays["extras"])

    arrays["y"] = draw_outputs(settings, value, rng)
    weights = draw_weights(settings, n, rng)
    if weights is not None:
        arrays["weights"] = weights
    return Samples(sets=sets, y=arrays["y"], weights=weights, arrays=arrays)


def draw_outputs(
    settings: dict[str, Any],
    value: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Outputs that follow a number of each sample, with noise enough that no fit is exact."""
    noisy = value + 0.5 * rng.normal(size=len(value))
    if settings["task"] == "one":
        return settings["units"] * (noisy + 1.0)
    if settings["task"] == "two":
        other = -2.0 * value + rng.normal(size=len(value))
        return settings["units"] * np.stack([noisy + 1.0, other], axis=1)
    names = class_names(settings)
    limits = [0.3] if len(names) == 2 else [-0.2, 0.8]
    labels = names[np.searchsorted(limits, noisy)]
    # every class occurs where there is room
    count = min(len(names), len(labels))
    labels[:count] = names[:count]
    return labels


def draw_weights(settings: dict[str, Any], n: int, rng: np.random.Generator) -> np.ndarray | None:
    if settings["weights"] == "none":
        return None
    weights = rng.integers(1, 9, size=n) / 4.0
    if settings["weights"] == "zeros":
        # the first few samples keep theirs: every class, and enough of them, is there to be fitted
        silent = rng.random(n) < 0.3
        silent[:4] = False
        weights[silent] = 0.0
    return weights


def joined(parts: list[Samples]) -> Samples:
    """Samples of several parts as one, with weights of one where a part has none."""
    from keyhole.data.sets import concatenate

    if len(parts) == 1:
        return parts[0]
    weights = None
    if any(part.weights is not None for part in parts):
        weights = np.concatenate([part.all_weights for part in parts])
    sets = concatenate([part.sets for part in parts])
    y = np.concatenate([part.y for part in parts])
    return Samples(sets=sets, y=y, weights=weights, arrays={})


def overwrite(samples: Samples, name: str | None = None) -> None:
    """Fill the arrays that samples were made from with other numbers: a caller may reuse them."""
    for key, array in samples.arrays.items():
        if name is not None and key != name:
            continue
        if array.dtype.kind == "U":
            array[:] = array[0]
        else:
            array[:] = 7.0


# ---------------------------------------------------------------- estimators


def head_distribution(settings: dict[str, Any]) -> Any:
    match settings["heads"]:
        case "gaussian":
            return kh.GaussianHeads()
        case "biased":
            return kh.GaussianHeads(mean=1.0)
        case "query-key":
            return kh.QueryKeyHeads(rank=2)
        case _:
            return None


def n_heads_of(settings: dict[str, Any]) -> Any:
    return math.inf if settings["n_heads"] == "inf" else settings["n_heads"]


def alpha_of(settings: dict[str, Any]) -> Any:
    return {"loo": "loo", "fixed": FIXED_ALPHA, "several": SEVERAL_ALPHAS}[settings["alpha"]]


def make_estimator(settings: dict[str, Any]) -> Any:
    """The estimator of some settings, not fitted."""
    parameters: dict[str, Any] = {
        "n_heads": n_heads_of(settings),
        "heads": head_distribution(settings),
        "activation": settings["activation"],
        "random_state": settings["seed"] % 1000,
        "scaling": settings["scaling"],
        "query": settings["query"],
    }
    if settings["estimator"] == "features":
        return kh.AttentionFeatures(**parameters, dtype=settings["dtype"])
    if settings["estimator"] == "ball":
        if is_classification(settings):
            return kh.NormBallClassifier(**parameters)
        return kh.NormBallRegressor(**parameters)

    # ridge, by `fit` or in batches
    parameters |= {
        "alpha": alpha_of(settings),
        "fit_intercept": settings["fit_intercept"],
        "dtype": settings["dtype"],
        "pooling": settings["pooling"],
        "extras_scale": EXTRAS_SCALE,
    }
    if is_classification(settings):
        return kh.AttentionClassifier(**parameters, criterion=settings["criterion"])
    return kh.AttentionRegressor(**parameters)


def scores(model: Any, sets: Any) -> np.ndarray:
    """Predictions of a regression, the decision function of a classification, or features."""
    if hasattr(model, "transform"):
        method = model.transform
    elif hasattr(model, "classes_"):
        method = model.decision_function
    else:
        method = model.predict
    return np.asarray(method(sets)).reshape(len(sets), -1)


def choices_of(model: Any) -> dict[str, Any]:
    """What a fit chose, or was told: all that decides features, apart from the random numbers."""
    return {
        "activation": model.layer_.activation,
        "pooling": model.tokens_.pooling,
        "scaling": model.tokens_.scaling,
        "query": model.tokens_.query,
        "heads": repr(model.heads_),
        "n_heads": model.n_heads_,
    }


def losses_of_rules(model: Any) -> dict[Any, float]:
    """The loss of every (activation, pooling, scaling, query) that was tried."""
    losses: dict[Any, float] = {}
    for candidate in model.candidates_:
        rule = candidate.activation, candidate.pooling, candidate.scaling, candidate.query
        losses.setdefault(rule, candidate.loss)
    return losses


def penalty_losses(model: Any) -> np.ndarray:
    """What the penalty was chosen by, one number for each candidate."""
    return np.asarray(model.selection_.scores)


# ---------------------------------------------------------------- tolerances


def condition(model: Any, alpha: float | None = None) -> float:
    """Largest eigenvalue of the Gram matrix over a penalty: what rounding is multiplied by."""
    alphas = np.asarray(model.selection_.alphas)
    if len(alphas) >= 10:
        # the automatic grid ends at ten times the largest eigenvalue
        return float(alphas.max() / 10 / (alpha or model.alpha_))
    return 1e6


def rounding(model: Any) -> float:
    """The unit of rounding of the Gram matrix of a model."""
    if model.dtype == "float32":
        return float(np.finfo(np.float32).eps)
    if math.isinf(model.n_heads_) and model.activation == "step":
        # the kernel of the step has a cusp at equal tokens: an error of eps becomes its root
        return 1.5e-8
    return float(np.finfo(np.float64).eps)


def share_allowed(model: Any, alpha: float | None = None) -> float:
    """By how much of the scale of y two ways to the same fit may differ."""
    return 1e-6 + 256 * rounding(model) * condition(model, alpha)


def are_as_good(model: Any, first: int, second: int) -> bool:
    """Whether two penalties of the grid of a model have the same loss within rounding."""
    losses = penalty_losses(model)[[first, second]]
    alpha = float(np.asarray(model.selection_.alphas)[[first, second]].min())
    share = share_allowed(model, alpha) + rounding_of_losses(model, alpha)
    return bool(abs(losses[0] - losses[1]) <= share * losses.max())


def rounding_of_losses(model: Any, alpha: float) -> float:
    """The share of a generalised error that may be rounding; 0 where the loss is another.

    It comes from sums, as a difference of numbers that may be far larger than it.
    """
    is_generalised = model.selection_.method == "gcv"
    if not is_generalised or model.selection_.criterion != "squared_error":
        return 0.0
    axes = PrincipalAxes.of(model.stream_.sums.moments)
    return float(axes.generalised_rounding(np.array([alpha])).max())


def scale_of(y: np.ndarray) -> float:
    """The size of outputs; that of ±1 for labels."""
    if y.dtype.kind == "U":
        return 1.0
    return float(np.abs(y).max())


def compare(what: str, got: Any, wanted: Any, *, scale: float, share: float) -> None:
    """Raise unless got and wanted differ by at most ``share`` of (scale + |wanted|) everywhere."""
    got = np.asarray(got, dtype=float).ravel()
    wanted = np.asarray(wanted, dtype=float).ravel()
    if got.shape != wanted.shape:
        raise DifferenceError(f"{what}: {len(got)} numbers against {len(wanted)}")
    with np.errstate(invalid="ignore"):
        excess = np.abs(got - wanted) - share * (scale + np.abs(wanted))
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted)) | (excess <= 0)
    if not same.all():
        worst = int(np.argmax(np.where(same, -np.inf, np.nan_to_num(excess, nan=np.inf))))
        raise DifferenceError(
            f"{what} differ by {abs(got[worst] - wanted[worst]):.3g}, "
            f"{np.sum(~same)} of {len(got)} numbers: "
            f"entry {worst} is {got[worst]:.10g} and should be {wanted[worst]:.10g} "
            f"(scale of y {scale:.3g}, allowed {share * (scale + abs(wanted[worst])):.2g})"
        )


# ---------------------------------------------------------------- errors and threads


def attempt(action: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """The result of a call, or the refusal it ended with; any other error is not caught.

    A refusal is an error of a kind that says so, with a sentence, that keyhole raised, or
    scikit-learn, which checks arrays for it.
    """
    try:
        return action(), None
    except REFUSALS as error:
        if is_refusal(error, packages=("keyhole", "sklearn")):
            return None, error
        raise


def in_threads(action: Callable[[], Any], count: int) -> list[Any]:
    """Results of a call from several threads that begin together; raise if one of them fails."""
    barrier = threading.Barrier(count)
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def work(place: int) -> None:
        barrier.wait()
        try:
            results[place] = action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(count)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns as often as they can
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        kinds = sorted({type(error).__name__ for error in errors})
        raise DifferenceError(
            f"{len(errors)} of {count} threads raised {', '.join(kinds)}: {str(errors[0])[:200]}"
        ) from errors[0]
    return results


def copied(value: Any) -> Any:
    return copy.deepcopy(value)


def warm() -> None:
    """Compile the loops of every activation and precision once, before children are forked."""
    warnings.simplefilter("ignore")
    for activation in ACTIVATIONS:
        for n_heads, dtype in ((2, "float64"), (2, "float32"), (40, "float64"), ("inf", "float64")):
            for queries in ("none", "same"):
                settings = PLAIN | {"seed": 1, "activation": activation, "dtype": dtype}
                settings = settle(settings | {"n_heads": n_heads, "queries": queries})
                samples = draw_samples(settings, 12, 0)
                model = make_estimator(settings).fit(samples.sets, samples.y)
                scores(model, samples.sets)
                model.contributions(samples.sets)
                model.predict_interval(samples.sets)
