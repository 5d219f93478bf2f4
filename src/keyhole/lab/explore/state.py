"""The settings of the page of `keyhole explore`, which its address holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import urlencode

import numpy as np

from keyhole.lab.theory_answers import OutOfTimeError, Question, read_notation, time_limit
from keyhole.registry import POINTWISE
from keyhole.theory.tasks import TASKS

VIEWS = ("curves", "needs", "surface", "spectrum", "heads", "rotation", "tasks")
TARGET_SECONDS = 2.0  # that the variance of a target may take
VARIANCES = (1e-100, 1e100)  # of a target: beyond, its curves leave floating point
MOST_PICKS = 12
MOST_TASKS = 4  # that are shown at a time


@dataclass(frozen=True)
class _Range:
    """A number in the address: the field of the state that it sets, its type and its ends."""

    field: str
    kind: type[int] | type[float]
    low: float
    high: float


_RANGES = {
    "d": _Range("dim", int, 1, 512),
    "N": _Range("n_keys", int, 1, 1024),
    "n": _Range("n_samples", int, 2, 10**7),
    "M": _Range("n_heads", int, 1, 10**5),
    "c": _Range("bias", float, 0.0, 4.0),
    "ridge": _Range("ridge", float, 0.0, 100.0),
    "noise": _Range("noise", float, 0.0, 100.0),
    "top": _Range("most_samples", int, 100, 10**7),
}
"""The numbers of a state, by their names in the address."""
_PICKED_SAMPLES = _Range("n", int, 2, 4000)
_PICKED_HEADS = _Range("M", int, 1, 4096)
_ADDRESS = ("view", "target", *_RANGES, "activation", "picks", "tasks")


@dataclass(frozen=True)
class ExploreState:
    """All that the page shows follows from this and what is measured; the address holds it."""

    view: str = "curves"
    target: str = "corr * token"
    dim: int = 8
    n_keys: int = 4
    n_samples: int = 400  # the n that is looked at
    n_heads: int = 20
    bias: float = 1.0  # the mean c of biased heads
    ridge: float = 1e-5
    noise: float = 0.0  # variance of the noise, as a share of Var f*
    most_samples: int = 10_000  # where curves and surface end
    activation: str = "relu"  # of the attention heads
    picks: tuple[tuple[int, int], ...] = ()  # (n, M) to be measured on the surface
    tasks: tuple[str, ...] = ("nearest-key",)  # of the literature, in their own view

    @classmethod
    def read(cls, query: Mapping[str, str]) -> ExploreState:
        """The state of an address, every field of it checked."""
        for name in query:
            if name not in _ADDRESS:
                raise ValueError(
                    f"the address knows {', '.join(_ADDRESS)}: got {name!r:.40}. Leave it out."
                )

        # what the address leaves out has its default
        numbers: dict[str, Any] = {}
        for name, value_range in _RANGES.items():
            if name in query:
                numbers[value_range.field] = _number(name, query[name], value_range)
        state = cls(
            view=query.get("view", cls.view),
            target=query.get("target", cls.target),
            activation=query.get("activation", cls.activation),
            picks=_picks(query.get("picks", "")),
            tasks=_tasks(query.get("tasks", ",".join(cls.tasks))),
            **numbers,
        )

        # a view and an activation that exist, and a target that varies
        if state.activation not in POINTWISE:
            raise ValueError(
                f"an activation must be one of {', '.join(POINTWISE)}: got "
                f"{state.activation!r:.40}."
            )
        if state.view not in VIEWS:
            raise ValueError(f"a view must be one of {', '.join(VIEWS)}: got {state.view!r:.40}.")
        low, high = VARIANCES
        if not low <= state.variance <= high:
            raise ValueError(
                f"a target on this page must vary, with a variance from {low:g} to {high:g}: that "
                f"of {state.text} is {state.variance:.3g}."
            )
        return state

    @property
    def address(self) -> str:
        """The query string that reads back to this state; what has its default is left out."""
        default = ExploreState()
        fields: dict[str, Any] = {}
        for name in _ADDRESS:
            field_name = _RANGES[name].field if name in _RANGES else name
            value = getattr(self, field_name)
            if value != getattr(default, field_name):
                fields[name] = value
        if self.picks:
            fields["picks"] = ",".join(f"{n}x{m}" for n, m in self.picks)
        if "tasks" in fields:
            fields["tasks"] = ",".join(self.tasks)
        return urlencode(fields)

    @property
    def text(self) -> str:
        """The target multiplied out."""
        return read_notation(self.target, self.dim).text

    @property
    def variance(self) -> float:
        """Var f*."""
        return _variance(self.target, self.dim, self.n_keys)

    @property
    def noise_variance(self) -> float:
        """σ²."""
        return self.noise * self.variance

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of samples of a curve."""
        return spaced(10, self.most_samples, 33, self.chosen)

    @property
    def chosen(self) -> int:
        """The n that is looked at, where curves have it."""
        return min(self.n_samples, self.most_samples)

    @property
    def question(self) -> Question:
        """What the theory is asked about zero-mean heads, infinitely many."""
        return Question(
            target=self.target,
            dim=self.dim,
            n_keys=self.n_keys,
            ridge=self.ridge,
            noise=self.noise_variance,
            activation=self.activation,
        )

    def describe(self) -> str:
        """The settings in a line."""
        words = (
            f"f* = {self.text}, d = {self.dim}, N = {self.n_keys}, M = {self.n_heads}, c = "
            f"{self.bias:g}, λ = {self.ridge:g}, noise {self.noise:g} Var f*"
        )
        if self.activation != "relu":
            words += f", {self.activation} scores"
        return words


@lru_cache(maxsize=256)
def _variance(target: str, dim: int, n_keys: int) -> float:
    """Var f*; not finite where it leaves floating point."""
    question = Question(target=target, dim=dim, n_keys=n_keys)
    try:
        with time_limit(TARGET_SECONDS), np.errstate(all="ignore"):
            return question.variance
    except OutOfTimeError:
        raise ValueError(
            f"a target on this page must be quick: its variance takes more than {TARGET_SECONDS:g} "
            "s. Lower its powers, or ask kh.theory in Python."
        ) from None


def spaced(low: int, high: int, count: int, *more: int) -> tuple[int, ...]:
    """Whole numbers at equal ratios, and some more."""
    return tuple(int(n) for n in np.unique([*np.geomspace(low, high, count).round(), *more]))


def _number(name: str, text: str, value_range: _Range) -> Any:
    """A number of the address, refused where it leaves its range."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    is_inside = value_range.low <= value <= value_range.high  # which NaN is not
    kind_words = "a number"
    if value_range.kind is int:
        is_inside = is_inside and value == int(value)
        kind_words = "a whole number"
    if not is_inside:
        raise ValueError(
            f"{name} must be {kind_words} from {value_range.low:g} to {value_range.high:g}: got "
            f"{text!r:.40}."
        )
    return value_range.kind(value)


def _picks(text: str) -> tuple[tuple[int, int], ...]:
    """Places of the surface, written as ``100x20,400x20`` for (n, M)."""
    if not text:
        return ()
    pairs = []
    for part in text.split(","):
        n_text, _, heads_text = part.partition("x")
        n_samples = _number("n of a pick", n_text, _PICKED_SAMPLES)
        n_heads = _number("M of a pick", heads_text, _PICKED_HEADS)
        pairs.append((n_samples, n_heads))
    if len(pairs) > MOST_PICKS:
        raise ValueError(
            f"at most {MOST_PICKS} places of the surface are measured: got {len(pairs)}. Remove "
            "some."
        )
    return tuple(pairs)


def _tasks(text: str) -> tuple[str, ...]:
    """Tasks of the literature by name, written as ``lookup,counting``."""
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in TASKS:
            raise ValueError(f"a task must be one of {', '.join(TASKS)}: got {name!r:.40}.")
    if len(names) > MOST_TASKS:
        raise ValueError(
            f"at most {MOST_TASKS} tasks are shown at a time: got {len(names)}. Remove some."
        )
    return names
