"""Automatic choices: what a fit chooses depends on its samples, and not on how they are written.

The same problem is posed twice and fitted twice with everything automatic. Between the two, keys
change places, or y has other units.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import samples as draw
from cases import Case, Format, after_reading
from samples import DifferenceError, Samples

import keyhole as kh

CHANGES = ("keys", "units", "shift", "weights")
"""What may differ between the two ways to write a problem down."""

SMALL, LARGE = (10, 12, 16, 24, 40), (140, 170)
"""Numbers of samples. Beyond 128, choices may be made by fits to a part of them."""


# ---------------------------------------------------------------- the cases


def choice_base(rng: Random) -> dict[str, Any]:
    settings = draw.draw_settings(
        rng,
        heads=("auto", "auto", "gaussian"),
        n_heads=(2, 4, 8, 16, 16, "inf", "auto"),
        scaling=("auto", "auto", "standard"),
        query=("auto",),
        alpha=("loo",),
        dtype=("float64",),
        container=("sets", "sets", "sets", "sets", "groups"),
        activation=("auto", "auto", "auto", "relu", "softmax", *draw.ACTIVATIONS),
        pooling=("auto", "auto", "mean", "mean+size", "sum"),
    )
    settings["n"] = rng.choice(LARGE if rng.random() < 0.3 else SMALL)
    settings["groups"] = rng.random() < 0.2
    settings["stretch"] = 1.0
    if settings["activation"] not in ("exp", "square"):
        # one coordinate in units of its own; features of these would be beyond float64
        settings["stretch"] = rng.choice((1.0, 1.0, 1000.0))
    return {"settings": settings, "steps": []}


def choice_mutate(rng: Random, state: dict[str, Any]) -> dict[str, Any]:
    """Append one more change."""
    step = {"change": rng.choice(CHANGES), "part": rng.getrandbits(20)}
    return {**state, "steps": [*state["steps"], step]}


def choice_finish(rng: Random, state: dict[str, Any]) -> Case:
    return Case("choices", "choices", {}, state)


CHOICE = Format(
    share=4.5,
    base=choice_base,
    mutate=choice_mutate,
    finish=choice_finish,
    most=3,
    simpler=draw.simpler_settings,
)


# ---------------------------------------------------------------- two ways to pose a problem


@dataclass(frozen=True)
class Posed:
    """A problem as it is written down; outputs are (y − shift) / units of the plain problem.

    ``names`` says which sample of the plain problem each row is, −1 for a row of weight 0.
    """

    samples: Samples
    groups: np.ndarray | None
    names: np.ndarray
    units: float = 1.0
    shift: float = 0.0

    def rows(self, rows: np.ndarray) -> Posed:
        groups = None if self.groups is None else self.groups[rows]
        names = self.names[rows]
        return replace(self, samples=self.samples.rows(rows), groups=groups, names=names)

    @property
    def weights(self) -> np.ndarray:
        """One weight for each sample, ones if there are none."""
        return self.samples.all_weights

    def with_weights(self, weights: np.ndarray) -> Posed:
        return replace(self, samples=replace(self.samples, weights=weights))

    def with_y(self, y: np.ndarray) -> Posed:
        return replace(self, samples=replace(self.samples, y=y))


def change(
    left: Posed,
    right: Posed,
    step: dict[str, Any],
    settings: dict[str, Any],
) -> tuple[Posed, Posed]:
    """Both problems after one more change, which makes them differ in writing alone."""
    rng = np.random.default_rng(step["part"])
    n = len(right.samples)
    is_number = not draw.is_classification(settings)
    match step["change"]:
        case "order":
            right = right.rows(rng.permutation(n))
        case "keys":
            sets = with_shuffled_keys(right.samples.sets, rng)
            right = replace(right, samples=replace(right.samples, sets=sets))
        case "duplicates":
            # the last count is that of rows of weight 0
            counts = np.append(rng.choice([1, 1, 2, 3], size=settings["n"]), 1)
            left = left.with_weights(left.weights * counts[left.names])
            right = right.rows(np.repeat(np.arange(n), counts[right.names]))
        case "silent rows":
            left = with_silent_rows(left, settings, rng)
        case "units" if is_number:
            factor = float(rng.choice([2.0**-40, 2.0**30, 1e-3, 7.0, 1e12, 1e-120, 1e120]))
            right = replace(right.with_y(right.samples.y * factor), units=right.units * factor)
            right = replace(right, shift=right.shift * factor)
        case "shift" if is_number and settings["fit_intercept"]:
            shift = 10.0 * right.units * settings["units"]
            right = replace(right.with_y(right.samples.y + shift), shift=right.shift + shift)
        case "weights" if is_number or settings["criterion"] == "squared_error":
            # a temperature, and so the log-loss, follows the number of samples
            right = right.with_weights(right.weights * float(rng.choice([0.25, 8.0])))
    return left, right


def with_shuffled_keys(sets: Any, rng: np.random.Generator) -> Any:
    """The same samples, the keys of each set in another order."""
    plain = sets.sets
    owner = np.repeat(np.arange(len(plain)), plain.lengths)
    order = np.lexsort((rng.random(len(owner)), owner))
    keys = np.split(plain.tokens[order], plain.offsets[1:-1])
    shuffled = kh.SetBatch(keys, plain.query, plain.extras, pairs=plain.pairs)
    return sets.with_sets(shuffled)


def with_silent_rows(posed: Posed, settings: dict[str, Any], rng: np.random.Generator) -> Posed:
    """The problem with rows of weight 0 in between, of other sets and outputs."""
    n = len(posed.samples)
    count = int(rng.integers(1, 4))
    more = draw.draw_samples(settings, count, int(rng.integers(2**20)))
    y = more.y
    if not draw.is_classification(settings):
        y = y * posed.units + posed.shift
    elif rng.random() < 0.2:
        # a class that no sample of positive weight has: of probability 0
        y = np.full(count, "oak")
    more = replace(more, y=y, weights=np.zeros(count))
    whole = draw.joined([replace(posed.samples, weights=posed.weights), more])
    groups = None
    if posed.groups is not None:
        groups = np.concatenate([posed.groups, rng.integers(0, 3, size=count)])
    names = np.concatenate([posed.names, np.full(count, -1)])
    order = rng.permutation(n + count)
    return replace(posed, samples=whole, groups=groups, names=names).rows(order)


# ---------------------------------------------------------------- the comparison


def pose(settings: dict[str, Any]) -> Posed:
    """The problem of some settings."""
    n = settings["n"]
    samples = draw.draw_samples(settings, n, 0)
    if settings["stretch"] != 1.0:
        # one coordinate in units of its own
        stretched = stretch(samples.sets, settings["stretch"])
        samples = replace(samples, sets=stretched)
    groups = None
    if settings["groups"]:
        groups = np.random.default_rng(settings["seed"]).integers(0, max(3, n // 3), size=n)
        groups[:3] = [0, 1, 2]
    return Posed(samples=samples, groups=groups, names=np.arange(n))


def stretch(sets: Any, factor: float) -> Any:
    """The same samples with the first coordinate of their keys multiplied."""
    plain = sets.sets
    tokens = plain.tokens.copy()
    tokens[:, 0] *= factor
    keys = np.split(tokens, plain.offsets[1:-1])
    return sets.with_sets(kh.SetBatch(keys, plain.query, plain.extras, pairs=plain.pairs))


def fit(settings: dict[str, Any], posed: Posed) -> Any:
    samples = posed.samples
    model = draw.make_estimator(settings)
    return model.fit(samples.sets, samples.y, sample_weight=samples.weights, groups=posed.groups)


def read_choices(folder: Path, options: dict[str, Any]) -> None:
    """Fit both problems, and compare what was chosen and what is predicted."""
    settings = options["settings"]
    left = right = pose(settings)
    for step in options["steps"]:
        left, right = change(left, right, step, settings)
    with_left, refusal = draw.attempt(lambda: fit(settings, left))
    with_right, other_refusal = draw.attempt(lambda: fit(settings, right))
    if (refusal is None) != (other_refusal is None):
        words = refusal or other_refusal
        raise DifferenceError(f"one of two ways to write a problem down is refused: {words}")
    if refusal is not None:
        raise refusal
    with after_reading():
        compare_models(settings, left, right, with_left, with_right)


def compare_models(
    settings: dict[str, Any],
    left: Posed,
    right: Posed,
    with_left: Any,
    with_right: Any,
) -> None:
    if differ_in_choices(with_left, with_right) or differ_in_penalty(with_left, with_right):
        return  # as good as each other within rounding
    new = draw.draw_samples(settings, 6, 2**20).sets
    if settings["stretch"] != 1.0:
        new = stretch(new, settings["stretch"])
    share = draw.share_allowed(with_left)
    if hasattr(with_left, "classes_") and len(with_left.classes_) != len(with_right.classes_):
        compare_classes(with_left, with_right, new, share)
        return
    unit = right.units / left.units
    wanted = draw.scores(with_left, new) * unit + right.shift - left.shift * unit
    got = draw.scores(with_right, new)
    scale = draw.scale_of(right.samples.y)
    draw.compare("predictions of two writings", got, wanted, scale=scale, share=share)


def compare_classes(with_left: Any, with_right: Any, new: Any, share: float) -> None:
    """A class without weight, which only the left writing has, is never likely.

    The scores of the others are the same. Probabilities are not, if the unit of weights is another:
    a temperature follows the number of samples.
    """
    has_weight = np.isin(with_left.classes_, with_right.classes_)
    assert not with_left.predict_proba(new)[:, ~has_weight].any()
    got = draw.scores(with_left, new)[:, has_weight]
    wanted = draw.scores(with_right, new)
    if wanted.shape[1] == 1:
        got = got[:, 1:]  # of two classes, the score of the second
    draw.compare("scores of two writings", got, wanted, scale=1.0, share=share)


def differ_in_choices(with_left: Any, with_right: Any) -> bool:
    """Whether other choices were made that are as good within rounding; raise if they are not."""
    left, right = draw.choices_of(with_left), draw.choices_of(with_right)
    if left == right:
        return False
    names = [name for name in left if left[name] != right[name]]
    losses = draw.losses_of_rules(with_left)
    rules = [
        (choice["activation"], choice["pooling"], choice["scaling"], choice["query"])
        for choice in (left, right)
    ]
    if rules[0] != rules[1] and all(rule in losses for rule in rules):
        one, other = losses[rules[0]], losses[rules[1]]
        if abs(one - other) <= 1e-6 * max(one, other):
            return True
    words = "; ".join(f"{name} {left[name]} against {right[name]}" for name in names)
    raise DifferenceError(
        f"choices of two writings differ: {words}; losses {shown(losses)} "
        f"against {shown(draw.losses_of_rules(with_right))}"
    )


def shown(losses: dict[Any, float]) -> str:
    return ", ".join(f"{'/'.join(rule)} {loss:.6g}" for rule, loss in losses.items())


def differ_in_penalty(with_left: Any, with_right: Any) -> bool:
    """Whether another penalty was chosen that is as good within rounding; raise if it is not."""
    models = (with_left, with_right)
    places = [int(np.flatnonzero(model.selection_.alphas == model.alpha_)[0]) for model in models]
    if places[0] == places[1]:
        return False
    if draw.are_as_good(with_left, places[0], places[1]):
        return True
    one, other = draw.penalty_losses(with_left)[places]
    raise DifferenceError(
        f"penalties of two writings differ: {with_left.alpha_:.4g} of loss {one:.6g} against "
        f"{with_right.alpha_:.4g} of loss {other:.6g}"
    )
