"""What the page of `keyhole explore` shows.

A state in its address, blocks to draw, and the lines that compute them.

Every number of the theory on the page is an `Ask`, which is both called here and written out as a
line of Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode

import numpy as np

from keyhole import theory
from keyhole.attention.activations import POINTWISE
from keyhole.attention.features import attention_features
from keyhole.attention.heads import GaussianHeads
from keyhole.lab.cells import Cell
from keyhole.lab.explore.background import Background
from keyhole.lab.figures import tasks as task_figure
from keyhole.lab.figures.prediction import PRESETS, Config, tolerance
from keyhole.lab.figures.task_findings import LEVEL
from keyhole.lab.jobs import target_variance
from keyhole.lab.measured import CellSweep, Curve, Results, apart, log_chart
from keyhole.lab.report.document import Chart, HeatMap, Look, Row, Series, Table, bars
from keyhole.lab.report.html import number
from keyhole.lab.task_learners import NAMES, find_task
from keyhole.theory.blocks import bias_of
from keyhole.theory.conditional import SampleSpectrum
from keyhole.theory.curves import Learner, TheoryLayer, target_levels
from keyhole.theory.harmonics import pair_powers_seconds
from keyhole.theory.limits import limits
from keyhole.theory.notation import parse_target
from keyhole.theory.spectrum import MAX_BIASED_DEGREE
from keyhole.theory.targets import Polynomial, Term, sphere_sets
from keyhole.theory.tasks import TASKS

QUICK = PRESETS["quick"]
"""Its sizes are measured, and those between: the same cells, so that what `keyhole reproduce` has
measured appears at once.
"""
BETWEEN = replace(QUICK, sizes=(25, 50, 200, 800), repetitions=(8, 8, 4, 2))
MEANS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)
ANGLES = (0.0, 0.25, 0.5, 0.75, 1.0)
TARGET_SECONDS = 2.0  # that the harmonic parts of a typed target may take, by estimate
STEP_SECONDS = 8.0  # that one step of a question about heads with a mean may take, by estimate
QUICK_SECONDS = 1.0  # that other questions take at most; five times that ends them
STEP_MEMORY = 2**29  # bytes of such a step
VARIANCES = 1e-100, 1e100  # of a target: beyond, its curves leave floating point
COEFFICIENTS = 1e-50, 1e50  # of a target: beyond, its variance is computed in other units
MOST_PICKS = 12
MOST_TASKS = 4  # that are chosen at a time
PICK_REPETITIONS = 4
MATTERS = 1.1
"""Heads have stopped to matter where the error is below this many times that of infinitely many."""


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
_ADDRESS = ("view", "target", *_RANGES, "activation", "picks", "tasks")


@dataclass(frozen=True)
class ComparedHeads:
    """A head distribution that a view compares: the role of its curves, and its mean.

    The mean is None for zero-mean heads, which the theory takes where it is told nothing.
    """

    role: str
    mean: float | None


@dataclass(frozen=True)
class ExploreState:
    """All that the page shows follows from this and the store; the address holds it."""

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
        def read_number(name: str) -> Any:
            value_range = _RANGES[name]
            if name not in query:
                return getattr(cls, value_range.field)
            return _number(name, query[name], value_range)

        state = cls(
            view=query.get("view", cls.view),
            target=query.get("target", cls.target),
            dim=read_number("d"),
            n_keys=read_number("N"),
            n_samples=read_number("n"),
            n_heads=read_number("M"),
            bias=read_number("c"),
            ridge=read_number("ridge"),
            noise=read_number("noise"),
            most_samples=read_number("top"),
            activation=query.get("activation", cls.activation),
            picks=_picks(query.get("picks", "")),
            tasks=_tasks(query.get("tasks", ",".join(cls.tasks))),
        )

        # a view and an activation that exist, and a target that is quick and varies
        if state.activation not in POINTWISE:
            raise ValueError(
                f"an activation must be one of {', '.join(POINTWISE)}: got "
                f"{state.activation!r:.40}."
            )
        if state.view not in (*VIEWS, "data"):
            raise ValueError(f"a view must be one of {', '.join(VIEWS)}: got {state.view!r:.40}.")
        polynomial = read_notation(state.target, state.dim).target
        seconds = pair_powers_seconds(polynomial)
        if seconds > TARGET_SECONDS:
            raise ValueError(
                "a target on this page must be quick: multiplied out this one has "
                f"{len(polynomial.terms)} terms, which take about {seconds:,.0f} s. Lower its "
                "powers, or ask `keyhole theory --time-limit`."
            )
        _check_variance(state)
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
        """The target multiplied out, as cells name it."""
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
        return _spaced(10, self.most_samples, 33, self.chosen)

    @property
    def chosen(self) -> int:
        """The n that is looked at, where curves have it."""
        return min(self.n_samples, self.most_samples)

    @property
    def arguments(self) -> Arguments:
        """What the theory is told for every learning curve of this state."""
        return Arguments(
            n_keys=self.n_keys,
            ridge=self.ridge,
            noise=self.noise_variance,
            activation=self.named_activation,
        )

    @property
    def named_activation(self) -> str | None:
        """The activation where it is not ReLU, which the theory takes where it is told nothing."""
        return None if self.activation == "relu" else self.activation

    @property
    def distributions(self) -> dict[str, ComparedHeads]:
        """The head distributions that are compared, by name."""
        distributions = {"zero-mean heads": ComparedHeads(role="attention", mean=None)}
        if self.bias:
            name = f"biased heads, c = {self.bias:g}"
            distributions[name] = ComparedHeads(role="biased", mean=self.bias)
        return distributions

    def describe(self) -> str:
        """The settings in a line."""
        return (
            f"f* = {self.text}, d = {self.dim}, N = {self.n_keys}, M = {self.n_heads}, c = "
            f"{self.bias:g}, λ = {self.ridge:g}, noise {self.noise:g} Var f*"
            + ("" if self.activation == "relu" else f", {self.activation} scores")
        )


read_notation = lru_cache(maxsize=64)(parse_target)  # a rotation in 512 dimensions takes 2 MB


@lru_cache(maxsize=256)
def _variance(target: str, dim: int, n_keys: int) -> float:
    return target_variance(read_notation(target, dim).target, n_keys)


def _check_variance(state: ExploreState) -> None:
    """Raise a ValueError where there is nothing to learn, or where numbers leave floating point."""
    # the square of 1e300 overflows, and 1e300 * corr varies: compute the variance of corr
    polynomial = read_notation(state.target, state.dim).target
    largest = max((abs(term.coefficient) for term in polynomial.terms), default=1.0)
    scale = largest
    if COEFFICIENTS[0] <= largest <= COEFFICIENTS[1]:
        scale = 1.0
    terms = [Term(term.coefficient / scale, term.powers) for term in polynomial.terms]
    with np.errstate(all="ignore"):
        scaled_variance = target_variance(Polynomial(state.dim, terms), state.n_keys)
    if scaled_variance == 0:
        raise ValueError(
            f"a target on this page must vary: {state.text} has no variance: nothing is to be "
            "learned."
        )

    # compare exponents, which do not overflow
    if 0 < scaled_variance < math.inf:
        exponent = math.log10(scaled_variance) + 2 * math.log10(scale)
        size = f"is about 1e{exponent:+.0f}"
    else:
        exponent = math.nan
        size = "is not finite"
    low, high = (math.log10(end) for end in VARIANCES)
    if not low <= exponent <= high:
        raise ValueError(
            f"a target on this page must have a variance from {VARIANCES[0]:g} to "
            f"{VARIANCES[1]:g}: that of {state.text} {size}. Scale the target, which changes no "
            "share that is learned."
        )


def _spaced(low: int, high: int, count: int, *more: int) -> tuple[int, ...]:
    """Whole numbers at equal ratios, and some more."""
    return tuple(int(n) for n in np.unique([*np.geomspace(low, high, count).round(), *more]))


def _number(name: str, text: str, value_range: _Range) -> Any:
    """A number of the address, refused where it leaves its range."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    is_inside = value_range.low <= value <= value_range.high  # which NaN is not
    if value_range.kind is int:
        is_inside = is_inside and value == int(value)
        kind_words = "a whole number"
    else:
        kind_words = "a number"
    if not is_inside:
        raise ValueError(
            f"{name} must be {kind_words} from {value_range.low:g} to {value_range.high:g}: got "
            f"{text!r:.40}."
        )
    return value_range.kind(value)


_PICKED_SAMPLES = _Range("n", int, 2, 4000)


_PICKED_HEADS = _Range("M", int, 1, 4096)


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


# ---- what is asked of the theory -----------------------------------------------------------------


Function = Literal[
    "learning_curve", "samples_needed", "heads_predicted", "risk_bound", "kernel_risk_bound"
]


@dataclass(frozen=True)
class Arguments:
    """Arguments of a function of `kh.theory`; None leaves one to its default."""

    n_keys: int | None = None
    error: float | None = None
    ridge: float | None = None
    noise: float | None = None
    n_heads: float | None = None
    mean: float | None = None  # c: the heads are GaussianHeads(mean=c)
    model: str | None = None
    activation: str | None = None

    @property
    def distribution(self) -> GaussianHeads | None:
        """The head distribution that the theory is told, if any."""
        if self.mean is None:
            return None
        return GaussianHeads(mean=self.mean)

    def expression(self) -> str:
        """As Python, by the names that `_target_lines` defines."""
        parts = []
        if self.n_keys is not None:
            parts.append(f"n_keys={self.n_keys!r}")
        if self.error is not None:
            # the only error that is asked for is a tenth of Var f*, over the noise if there may be
            error = "variance / 10" if self.noise is None else "variance / 10 + noise"
            parts.append(f"error={error}")
        if self.ridge is not None:
            parts.append(f"ridge={self.ridge!r}")
        if self.noise is not None:
            parts.append("noise=noise")
        if self.n_heads is not None:
            n_heads = "math.inf" if self.n_heads == math.inf else repr(self.n_heads)
            parts.append(f"n_heads={n_heads}")
        if self.mean is not None:
            parts.append(f"heads=kh.GaussianHeads(mean={self.mean!r})")
        if self.model is not None:
            parts.append(f"model={self.model!r}")
        if self.activation is not None:
            parts.append(f"activation={self.activation!r}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Question:
    """All that an answer of the theory depends on; equal questions have equal answers."""

    function: Function
    arguments: Arguments
    target: str
    dim: int
    samples: tuple[int, ...]
    over: float = 1.0
    """What learning curves are divided by."""


@dataclass(frozen=True)
class Ask:
    """A number or a curve that a view asks `kh.theory` for, and how it is drawn.

    Parameters
    ----------
    name : str
        Of the curve.
    function : str
        Of `kh.theory`.
    arguments : Arguments
        What it is told, besides the target and the samples.
    role, look : str
        How the curve is drawn.
    other : ExploreState, optional
        Where the target is not that of the page: then the answer is over its variance.
    """

    name: str
    function: Function
    arguments: Arguments
    role: str = ""
    look: Look = "line"
    other: ExploreState | None = None

    def expression(self, samples: str) -> str:
        """As Python."""
        arguments = self.arguments.expression()
        if self.function in ("risk_bound", "kernel_risk_bound"):  # samples enter as 1/√n
            bound = f"(bound := kh.theory.{self.function}(target, 1, {arguments}))"
            return f"{bound}.approximation + bound.estimation / np.sqrt({samples})"
        if self.function in ("samples_needed", "heads_predicted"):
            return f"kh.theory.{self.function}(target, {arguments})"
        curve = f"kh.theory.learning_curve(target, {samples}, {arguments})"
        if self.other is not None:
            return f"{curve} / variance"
        return curve

    def question(self, state: ExploreState, samples: tuple[int, ...]) -> Question:
        """The same for the target of a state and for these numbers of samples."""
        over = 1.0
        if self.other is not None:
            state = self.other
            over = state.variance
        return Question(
            function=self.function,
            arguments=self.arguments,
            target=state.target,
            dim=state.dim,
            samples=samples,
            over=over,
        )


@lru_cache(maxsize=1024)
def answered(question: Question) -> tuple[tuple[float, ...], str]:
    """The numbers of a question, for the sizes that the theory speaks of.

    And why not for more.
    """
    seconds = STEP_SECONDS if question.arguments.mean else QUICK_SECONDS
    polynomial = read_notation(question.target, question.dim).target
    samples = question.samples
    refusal = ""
    with np.errstate(all="ignore"), limits(seconds=seconds, memory=STEP_MEMORY):
        while samples:
            try:
                numbers = _numbers(replace(question, samples=samples), polynomial)
                return tuple(numbers.tolist()), refusal
            except (ValueError, ArithmeticError) as error:
                refusal = str(error)
            # most refusals are of the largest sizes: leave out a quarter, and give up at four
            if len(samples) <= 4:
                break
            samples = samples[: 3 * len(samples) // 4]
    return (), refusal


def _numbers(question: Question, target: Polynomial) -> np.ndarray:
    """What `kh.theory` says, a number for each of the samples or one for all."""
    arguments = question.arguments
    distribution = arguments.distribution
    model = "attention" if arguments.model is None else arguments.model
    noise = 0.0 if arguments.noise is None else arguments.noise
    activation = "relu" if arguments.activation is None else arguments.activation
    if question.function == "learning_curve":
        n_heads = math.inf if arguments.n_heads is None else arguments.n_heads
        curve = theory.learning_curve(
            target,
            question.samples,
            n_keys=_given(arguments.n_keys),
            ridge=_given(arguments.ridge),
            noise=noise,
            n_heads=n_heads,
            model=model,
            heads=distribution,
            activation=activation,
        )
        return np.asarray(curve / question.over)
    if question.function == "samples_needed":
        n_samples = theory.samples_needed(
            target,
            n_keys=_given(arguments.n_keys),
            error=_given(arguments.error),
            noise=noise,
            model=model,
            heads=distribution,
            activation=activation,
        )
        return np.array([n_samples])
    if question.function == "heads_predicted":
        heads_needed = theory.heads_predicted(
            target,
            n_keys=_given(arguments.n_keys),
            error=_given(arguments.error),
            activation=activation,
        )
        return np.array([heads_needed])
    # bounds have a part without samples and one in 1/√n
    if question.function == "risk_bound":
        bound = theory.risk_bound(target, 1, n_heads=_given(arguments.n_heads))
    else:
        bound = theory.kernel_risk_bound(target, 1, n_keys=_given(arguments.n_keys))
    return np.asarray(bound.approximation + bound.estimation / np.sqrt(question.samples))


answer_by: ContextVar[float] = ContextVar("answer_by", default=math.inf)
"""When an answer has to be there, by the monotonic clock: what is not known by then is left out for
now.
"""
MEANWHILE = "is being computed, which takes seconds where the blocks of a mean are new."
background = Background()
"""Where questions about heads with a mean are answered while a page waits."""


Number = TypeVar("Number", int, float)


def _given(argument: Number | None) -> Number:
    """An argument that its function needs, so that a view has to give it."""
    assert argument is not None
    return argument


def _soon(
    function: Callable[[Any], Any], question: Hashable, subject: tuple[str, int]
) -> Any | None:
    """``function(question)`` about heads with a mean.

    None where it is not known by `answer_by`.
    """
    deadline = answer_by.get()
    if deadline == math.inf:
        return function(question)
    return background.ask(
        key=(function.__name__, question),
        subject=subject,
        work=partial(function, question),
        deadline=deadline,
    )


@dataclass
class View:
    """A view: what is drawn, what is to be said, and the lines that compute it."""

    title: str
    blocks: list[Chart | HeatMap | Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @property
    def pending(self) -> bool:
        """Whether something is still being computed, so that it pays to ask again."""
        return any(note.endswith(MEANWHILE) for note in self.notes)

    def begin(self, state: ExploreState, samples: Iterable[int], *imports: str) -> None:
        """The lines that come first."""
        self.lines += [
            "import math",
            "import numpy as np",
            "import keyhole as kh",
            "from keyhole.lab.jobs import target_variance",
            *imports,
            "from keyhole.theory.notation import parse_target",
            "",
            f"n = {list(samples)}",
            "shown = {}",
            *_target_lines(state),
        ]

    def ask(
        self, state: ExploreState, asks: Iterable[Ask], samples: tuple[int, ...]
    ) -> dict[str, Series]:
        """What the theory says, as series by their names; the lines for it are added."""
        self.begin(state, samples)
        series = {}
        target = state.target  # that the lines have defined last
        for ask in asks:
            numbers, reason = self._answer(ask, state, samples)

            # say what is missing, once
            note = f"{ask.name}: {reason}"
            if reason and note not in self.notes:
                self.notes.append(note)
            if not numbers:
                continue

            # the lines; the theory may have spoken of the first sizes only
            if ask.other is not None and ask.other.target != target:
                target = ask.other.target
                self.lines += _target_lines(ask.other)
            n_sizes = len(numbers)
            sizes = "n" if n_sizes == len(samples) else f"n[:{n_sizes}]"
            self.lines.append(f"shown[{ask.name!r}] = {ask.expression(sizes)}")
            series[ask.name] = Series(
                name=ask.name, x=samples[:n_sizes], y=numbers, look=ask.look, role=ask.role
            )
        return series

    @staticmethod
    def _answer(
        ask: Ask, state: ExploreState, samples: tuple[int, ...]
    ) -> tuple[tuple[float, ...], str]:
        """The numbers that answer a question, and what has to be said of them."""
        question = ask.question(state, samples)
        if not ask.arguments.mean:
            return answered(question)
        answer = _soon(answered, question, subject=(question.target, question.dim))
        if answer is None:
            return (), MEANWHILE
        numbers, reason = answer
        return numbers, reason


def _target_lines(state: ExploreState) -> list[str]:
    """The lines that define the target, its variance, and the variance of the noise."""
    return [
        f"target = parse_target({state.target!r}, dim={state.dim}).target",
        f"variance = target_variance(target, n_keys={state.n_keys})",
        f"noise = {state.noise!r} * variance",
    ]


# ---- the views -----------------------------------------------------------------------------------


def curves(state: ExploreState, results: Results) -> View:
    """Learning curves, with measured points on them."""
    view = View("Learning curves")
    noise = state.noise_variance

    # what the theory predicts, and its bounds
    predicted = list(view.ask(state, _curve_asks(state), state.sizes).values())
    predicted += _drawn_curve(view, state)

    # what is measured
    measured = []
    for name, (role, sweep) in sweeps(state).items():
        points = _points(name, role, _finished(sweep, results), noise)
        if points is not None:
            measured.append(points)

    # curves and points on one chart, without the bounds
    marks = {"Var f*": state.variance + noise}
    if noise:
        marks["noise"] = noise
    chart = log_chart(
        "curves",
        state.describe(),
        "training sets n",
        "test error, noise included",
        [*(series for series in predicted if series.look != "thin"), *measured],
        marks=marks,
        note=_deviation(state),
    )

    # the numbers at the n that is looked at; a bound is no share of the variance
    rows: list[Row] = []
    for series in predicted:
        if state.chosen not in series.x:
            continue
        error = series.y[list(series.x).index(state.chosen)]
        share = None if series.look == "thin" else error / state.variance
        rows.append({"at this n": series.name, "error": error, "over Var f*": share})

    # the bounds are far above the curves: a chart of their own
    bounds = log_chart(
        "bounds",
        "The bounds beside the truth",
        "training sets n",
        "excess risk",
        [series for series in predicted if series.look == "thin" or series.role == "attention"],
        note=(
            "The bounds are on the excess risk of the learners in the theorems, for a 1-Lipschitz "
            "loss; the curves are squared errors of ridge regression."
        ),
    )
    view.blocks = [chart, Table("at", f"n = {state.chosen:,}", rows), bounds]
    return view


def _curve_asks(state: ExploreState) -> list[Ask]:
    """Curves of attention, biased heads and MLP, of infinite and finite width; and two bounds."""

    def pair(role: str, name: str, arguments: Arguments, unit: str, width: int) -> list[Ask]:
        infinite = Ask(
            name=f"{name}, ∞ {unit}",
            function="learning_curve",
            arguments=replace(arguments, n_heads=math.inf),
            role=role,
            look="line",
        )
        finite = Ask(
            name=f"{name}, {width} {unit}",
            function="learning_curve",
            arguments=replace(arguments, n_heads=state.n_heads),
            role=role,
            look="dashed",
        )
        return [infinite, finite]

    asks = pair("attention", "attention", state.arguments, "heads", state.n_heads)
    if state.bias:
        with_mean = replace(state.arguments, mean=state.bias)
        asks += pair("biased", f"biased, c = {state.bias:g}", with_mean, "heads", state.n_heads)
    # an MLP with as many features as the attention layer
    mlp_width = state.n_heads * (state.dim + 1)
    of_mlp = replace(state.arguments, model="mlp", activation=None)
    asks += pair("mlp", "MLP", of_mlp, "wide", mlp_width)
    kernel_bound = Ask(
        name="bound, ∞ heads (1-Lipschitz loss)",
        function="kernel_risk_bound",
        arguments=Arguments(n_keys=state.n_keys),
        role="oracle",
        look="thin",
    )
    paper_bound = Ask(
        name=f"the paper's bound, {state.n_heads} heads, constant 1",
        function="risk_bound",
        arguments=Arguments(n_heads=state.n_heads),
        role="ridge",
        look="thin",
    )
    # the bounds are for ReLU
    if state.named_activation is not None:
        return asks
    return [*asks, kernel_bound, paper_bound]


FEW_FEATURES = 200
"""Layers with at most this many features are predicted from heads that are drawn, too."""

DRAWN_SETS = 1000
"""Sets without labels that such a prediction uses."""

MOST_DRAWN_NUMBERS = 2**20
"""Coordinates of all tokens of these sets, above which there is no such prediction: one million
takes 8 MB and some 25 ms."""


def _drawn_curve(view: View, state: ExploreState) -> list[Series]:
    """The learning curve of zero-mean heads as drawn: nothing where they, or tokens, are many."""
    many_features = state.n_heads * (state.dim + 1) > FEW_FEATURES
    many_numbers = DRAWN_SETS * (1 + state.n_keys) * state.dim > MOST_DRAWN_NUMBERS
    if many_features or many_numbers:
        return []
    name = f"attention, {state.n_heads} heads as drawn"
    sizes = [n for n in state.sizes[::4] if n <= DRAWN_SETS]
    spectrum = _drawn_spectrum(
        state.target, state.dim, state.n_keys, state.n_heads, state.activation
    )
    errors = [spectrum.test_error(n, state.ridge, state.noise_variance) for n in sizes]
    sets_line = f"sets = kh.targets.sphere_sets({DRAWN_SETS}, {state.n_keys}, {state.dim}, seed=0)"
    heads_line = f"heads = kh.GaussianHeads().sample({state.n_heads}, {state.dim}, seed=0)"
    features = f"kh.attention_features(sets, heads, {state.activation!r})"
    view.lines += [
        sets_line,
        heads_line,
        f"shown[{name!r}] = kh.theory.conditional_curve("
        f"{features}, target(sets), {sizes!r}, ridge={state.ridge!r}, noise=noise)",
    ]
    return [Series(name, sizes, errors, look="dashed", role="kernel")]


@lru_cache(maxsize=64)
def _drawn_spectrum(
    target: str, dim: int, n_keys: int, n_heads: int, activation: str
) -> SampleSpectrum:
    """What sets without labels tell of heads that were drawn."""
    sets = sphere_sets(DRAWN_SETS, n_keys, dim, seed=0)
    heads = GaussianHeads().sample(n_heads, dim, seed=0)
    features = attention_features(sets, heads, activation)
    y = read_notation(target, dim).target(sets)
    return SampleSpectrum.of(features, y, fit_intercept=False)


def _deviation(state: ExploreState) -> str:
    """How far points and curves may be apart."""
    return (
        "Points are means over repetitions, bars one standard error; the curves are not fitted to "
        f"them. Most settings of d = {state.dim} are predicted within {tolerance(state.dim):.0%}, "
        "those of few heads worse."
    )


def needs(state: ExploreState, results: Results) -> View:
    """Samples and heads that suffice for a tenth of Var f*."""
    view = View("What suffices")
    noise = state.noise_variance
    tenth = state.variance / 10

    # samples are counted with the noise, heads without samples or noise
    activation = state.named_activation
    goal = Arguments(n_keys=state.n_keys, error=tenth + noise, noise=noise, activation=activation)
    asks = [Ask("samples, attention, ∞ heads", "samples_needed", goal)]
    if state.bias:
        name = f"samples, biased, c = {state.bias:g}"
        asks.append(Ask(name, "samples_needed", replace(goal, mean=state.bias)))
    of_mlp = replace(goal, model="mlp", activation=None)
    asks.append(Ask("samples, MLP, ∞ wide", "samples_needed", of_mlp))
    heads_goal = Arguments(n_keys=state.n_keys, error=tenth, activation=activation)
    asks.append(Ask("heads, any number of samples", "heads_predicted", heads_goal))

    # one number each, so one "size" is asked for
    series_by_name = view.ask(state, asks, (0,))
    rows: list[Row] = [
        {"to have a tenth of Var f* left": name, "number": series.y[0]}
        for name, series in series_by_name.items()
    ]
    view.blocks = [Table("needs", "What suffices, with the best penalty", rows)]
    return view


def surface(state: ExploreState, results: Results) -> View:
    """The error over samples and heads, and the line beyond which more heads do not help."""
    view = View("Samples and heads")
    sizes = _spaced(10, state.most_samples, 13)
    heads = _spaced(1, 2000, 12)

    # a row of the surface per number of heads, the last for infinitely many; where the theory
    # refuses the largest sizes of a row, the surface ends before them
    asks = [_of_heads(state, m) for m in (*heads, math.inf)]
    curves_by_heads = view.ask(state, asks, sizes).values()
    n_sizes = min((len(series.y) for series in curves_by_heads), default=0)
    if len(curves_by_heads) < len(asks) or n_sizes == 0:
        return view
    sizes = sizes[:n_sizes]
    errors = np.array([series.y[:n_sizes] for series in curves_by_heads])

    # the line runs below the first row that is as good as infinitely many heads
    suffices = errors[:-1] <= MATTERS * errors[-1]
    line: list[float | None] = []
    for suffices_at_size in suffices.T:
        if suffices_at_size.any():
            line.append(float(np.argmax(suffices_at_size)) - 0.5)
        else:
            line.append(None)

    # colours are logarithmic, words are numbers
    share = errors / state.variance
    with np.errstate(divide="ignore"):
        colours = np.log10(share).tolist()
    names = [*(f"{m:,}" for m in heads), "∞"]
    rows: list[Row] = [
        {"n": size, "M": name, "error": float(errors[i, k]), "over Var f*": float(share[i, k])}
        for i, name in enumerate(names)
        for k, size in enumerate(sizes)
    ]
    points = _picked_points(state, results, sizes, heads)
    surface_map = HeatMap(
        name="surface",
        title=f"{state.describe()}: test error over Var f*, logarithmic colours",
        x_label="training sets n",
        y_label="heads M",
        columns=[f"{size:,}" for size in sizes],
        index=names,
        values=colours,
        rows=rows,
        note=(
            f"Below the line heads have stopped to matter: the error is at most {MATTERS:g} "
            "times that of infinitely many. Click a place to measure there."
        ),
        words=[[number(v, 2) for v in row] for row in share.tolist()],
        line=line,
        points=points,
    )
    view.blocks = [surface_map]
    if points:
        view.blocks.append(Table("picked", "Measured", [{"place": text} for *_, text in points]))
    return view


def _picked_points(
    state: ExploreState, results: Results, sizes: tuple[int, ...], heads: tuple[int, ...]
) -> list[tuple[float, float, str]]:
    """Column, row and words of each place of the surface that is measured at least twice."""
    points = []
    for (n_samples, n_heads), (_, sweep) in sweeps(state).items():
        curve = _finished(sweep, results)
        if np.isfinite(curve.runs).sum() < 2:
            continue
        # places between rows and columns, by ratio
        x = float(np.interp(math.log(n_samples), np.log(sizes), range(len(sizes))))
        y = float(np.interp(math.log(n_heads), np.log(heads), range(len(heads))))
        numbers, _ = answered(_of_heads(state, n_heads).question(state, (n_samples,)))
        predicted = numbers[0] if numbers else None
        words = (
            f"n = {n_samples}, M = {n_heads}: "
            f"measured {number(curve.mean[0] + state.noise_variance)} ± "
            f"{number(curve.error[0], 2)}, predicted {number(predicted)}"
        )
        points.append((x, y, words))
    return points


def _of_heads(state: ExploreState, n_heads: float) -> Ask:
    """The learning curve of so many zero-mean heads."""
    count = "∞" if n_heads == math.inf else n_heads
    return Ask(f"{count} heads", "learning_curve", replace(state.arguments, n_heads=n_heads))


def spectrum(state: ExploreState, results: Results) -> View:
    """Levels of both head distributions, and where the target sits in them.

    And what is learned at n.
    """
    view = View("Spectrum")
    view.begin(state, state.sizes, "from keyhole.theory.curves import TheoryLayer, Learner")
    levels = []
    learned = []
    tables = []
    for name, distribution in state.distributions.items():
        mean = 0.0 if distribution.mean is None else distribution.mean
        question = _SpectralQuestion(
            target=state.target,
            dim=state.dim,
            n_keys=state.n_keys,
            mean=mean,
            sizes=state.sizes,
            chosen=state.chosen,
            ridge=state.ridge,
            noise=state.noise,
            activation=state.activation,
        )
        if mean:
            spectral = _soon(_spectral_answer, question, subject=(state.target, state.dim))
        else:
            spectral = _spectral_answer(question)
        if spectral is None:
            view.notes.append(f"{name}: {MEANWHILE}")
            continue
        if spectral.refusal:
            view.notes.append(f"{name}: {spectral.refusal}")
            continue

        # the lines
        layer_arguments = [str(state.n_keys)]
        if mean:
            layer_arguments.append(f"heads=kh.GaussianHeads(mean={mean!r})")
        if state.named_activation is not None:
            layer_arguments.append(f"activation={state.activation!r}")
        learner_line = f"Learner(target, TheoryLayer({', '.join(layer_arguments)}), math.inf)"
        view.lines.append(f"shown[{name!r}] = {learner_line}.learned(n, {state.ridge!r}, noise)[1]")

        # the charts: the share that is learned, and each level at the rank of its first
        # eigenfunction
        role = distribution.role
        rows = spectral.rows
        learned.append(Series(name, state.sizes, spectral.learned, look="line", role=role))
        counts = np.array([row["eigenfunctions"] for row in rows])
        ranks = (np.cumsum(counts) - counts + 1).tolist()
        hover = [
            f"degrees {row['degrees']}: {row['eigenfunctions']:,} eigenfunctions, "
            f"{row['of the target']:.1%} of the target, {row['learned']:.0%} learned at n = "
            f"{state.chosen:,}"
            for row in rows
        ]
        eigenvalues = [row["eigenvalue"] for row in rows]
        levels.append(Series(name, ranks, eigenvalues, role=role, hover=hover))

        # the table: the largest levels, and those that hold a part of the target
        shown_rows = [row for k, row in enumerate(rows) if k < 8 or row["of the target"] > 1e-3]
        kind = "Young diagrams (a, b) of the rotations" if mean else "degrees in query and keys"
        tables.append(
            Table(
                name=f"levels-{role}",
                title=f"{name}: where the target sits, and what is learned at n = {state.chosen:,}",
                rows=shown_rows[:24],
                note=f"Levels by {kind}, largest eigenvalue first.",
            )
        )
    levels_chart = log_chart(
        "levels", "Levels of the kernel", "rank of their first eigenfunction", "eigenvalue", levels
    )
    learned_chart = Chart(
        name="learned",
        title="Share of the target that is learned",
        x_label="training sets n",
        y_label="Σ c² λ/(λ+γ) / Σ c²",
        series=learned,
        x_log=True,
        marks={"all": 1.0},
    )
    view.blocks = [levels_chart, *tables, learned_chart]
    return view


@dataclass(frozen=True)
class _Spectral:
    """Levels of a kernel with the target in them, and the share of it that is learned at each n."""

    rows: list[dict[str, Any]]
    learned: tuple[float, ...]
    refusal: str = ""  # why there are none


@dataclass(frozen=True)
class _SpectralQuestion:
    """All that the spectrum of a head distribution, and what is learned of it, depends on."""

    target: str
    dim: int
    n_keys: int
    mean: float
    sizes: tuple[int, ...]
    chosen: int
    ridge: float
    noise: float
    activation: str = "relu"


@lru_cache(maxsize=64)
def _spectral_answer(question: _SpectralQuestion) -> _Spectral:
    """What the view of the spectrum shows of heads with a mean, or of zero-mean heads."""
    polynomial = read_notation(question.target, question.dim).target
    noise_variance = question.noise * _variance(question.target, question.dim, question.n_keys)
    if question.mean:
        distribution = GaussianHeads(mean=question.mean)
        seconds = STEP_SECONDS
    else:
        distribution = None
        seconds = QUICK_SECONDS
    try:
        with np.errstate(all="ignore"), limits(seconds=seconds, memory=STEP_MEMORY):
            layer = TheoryLayer(question.n_keys, heads=distribution, activation=question.activation)
            learner = Learner(polynomial, layer, math.inf)
            gammas, shares = learner.learned(question.sizes, question.ridge, noise_variance)
            gamma = float(gammas[question.sizes.index(question.chosen)])
            rows = _level_rows(polynomial, layer, gamma)
    except (ValueError, ArithmeticError) as error:
        return _Spectral(rows=[], learned=(), refusal=str(error))
    return _Spectral(rows=rows, learned=tuple(shares.tolist()))


_target_levels = lru_cache(maxsize=64)(target_levels)


def _level_rows(
    target: Polynomial,
    layer: TheoryLayer,
    gamma: float,
) -> list[dict[str, Any]]:
    """Levels up to above the target's degree.

    With the part of the target in each and the part λ/(λ+γ) of it that is learned.
    """
    degree = max(4, max(target.degrees) + 1)
    if layer.heads is not None:
        degree = min(degree, MAX_BIASED_DEGREE)
    bias = bias_of(layer.heads, target.dim, layer.activation)
    levels, powers = _target_levels(target, layer.n_keys, bias, degree)
    total = max(float(powers.sum()), 1e-300)
    rows = []
    for degrees, eigenvalue, multiplicity, power in zip(
        levels.degrees.tolist(),
        levels.eigenvalues.tolist(),
        levels.multiplicities.tolist(),
        powers.tolist(),
        strict=True,
    ):
        rows.append(
            {
                "degrees": str(tuple(degrees)),
                "eigenvalue": eigenvalue,
                "eigenfunctions": int(multiplicity),
                "of the target": power / total,
                "learned": eigenvalue / (eigenvalue + gamma),
            }
        )
    return rows


def heads(state: ExploreState, results: Results) -> View:
    """The error against the strength of the mean, at three numbers of samples."""
    view = View("The head distribution")
    if state.dim < 2:
        view.notes.append("there is no mean to speak of in one dimension: choose d of 2 at least.")
        return view

    # a tenth of n, n, and ten times n
    fewer = max(2, state.n_samples // 10)
    more = min(10 * state.n_samples, 10**7)
    samples = tuple(sorted({fewer, state.n_samples, more}))
    asks = {c: Ask(f"c = {c:g}", "learning_curve", replace(state.arguments, mean=c)) for c in MEANS}
    series_by_name = view.ask(state, asks.values(), samples)

    # from a curve per mean to a curve per number of samples
    series = []
    rows: list[Row] = []
    for k, (n, role) in enumerate(zip(samples, ("mlp", "kernel", "ball"), strict=False)):
        errors = {}
        for c, ask in asks.items():
            of_mean = series_by_name.get(ask.name)
            if of_mean is not None and len(of_mean.y) > k:
                errors[c] = of_mean.y[k]
        series.append(
            Series(f"n = {n:,}", list(errors), list(errors.values()), look="line", role=role)
        )
        if n == state.n_samples:
            rows = _strengths(errors)

    # the means that are measured, at the n that is looked at
    runs = [_finished(sweep, results).runs for _, sweep in sweeps(state).values()]
    if runs and runs[0].size:
        measured = Curve(np.array(MEANS), np.hstack(runs))
        name = f"measured, n = {state.n_samples:,}"
        points = _points(name, "biased", measured, state.noise_variance)
        if points is not None:
            series.append(points)
    chart = Chart(
        name="heads",
        title=state.describe(),
        x_label="mean c of the heads, times the identity",
        y_label="test error, noise included",
        series=series,
        y_log=True,
        note=_deviation(state),
    )
    view.blocks = [chart, Table("strengths", f"n = {state.n_samples:,}", rows)]
    return view


def _strengths(errors: Mapping[float, float]) -> list[Row]:
    """The error of every mean beside that of zero-mean heads; nothing where that is not known."""
    error_without = errors.get(0.0)
    if not error_without:
        return []
    rows: list[Row] = []
    for c, error in errors.items():
        if c == 0:
            effect = ""
        elif error < error_without:
            effect = "helps"
        else:
            effect = "is a handicap"
        rows.append(
            {
                "mean c": c,
                "error": error,
                "over that of c = 0": error / error_without,
                "the mean": effect,
            }
        )
    return rows


def rotation(state: ExploreState, results: Results) -> View:
    """The correlation turned away from the identity, for zero-mean and biased heads."""
    view = View("Rotation")
    powers = {"corr * token": 1, "corr^2 * token": 2, "corr^3 * token": 3}
    power = powers.get(state.text)
    if power is None or state.dim < 2:
        view.notes.append(
            "rotation needs d of 2 at least and a target corr^q * token, q up to 3: choose the "
            "family correlation."
        )
        return view

    # every angle for every head distribution; higher powers take seconds each, so fewer angles
    angles = ANGLES if power == 1 else ANGLES[::2]
    asks: dict[tuple[str, float], Ask] = {}
    for angle in angles:
        target = f"rotated({angle:g})^{power} * token" if angle else state.text
        turned = replace(state, target=target)
        for name, distribution in state.distributions.items():
            asks[name, angle] = Ask(
                name=f"{name}, γ = {angle:g}",
                function="learning_curve",
                arguments=replace(turned.arguments, mean=distribution.mean),
                other=turned,
            )
    series_by_name = view.ask(state, asks.values(), (state.n_samples,))

    # a curve over the angles per head distribution
    series = []
    for name, distribution in state.distributions.items():
        errors = {}
        for angle in angles:
            at_angle = series_by_name.get(asks[name, angle].name)
            if at_angle is not None:
                errors[angle] = at_angle.y[0]
        series.append(
            Series(name, list(errors), list(errors.values()), look="line", role=distribution.role)
        )
    chart = Chart(
        name="rotation",
        title=f"<x_0, S x_i> instead of <x_0, x_i>, n = {state.n_samples:,}",
        x_label="γ: S = (1−γ) I + γ P, P a random rotation",
        y_label="test error over Var f*",
        series=series,
        y_log=True,
    )
    view.blocks = [chart]
    return view


def tasks(state: ExploreState, results: Results) -> View:
    """Learning curves of tasks of the literature, measured for learners in closed form.

    The cells are those of the quick preset of `keyhole reproduce tasks`, so that what that
    command has measured appears at once.
    """
    view = View("Tasks of the literature")
    config = _task_config(state)
    view.lines = ["import keyhole as kh", "", "shown = {}"]
    for name in state.tasks:
        task = find_task(name)
        series = []
        for learner in config.learners_of(name):
            role = task_figure.ROLES.get(learner, learner)
            measured = _finished(config.sweep(name, learner), results, "error")
            # the sizes with two finished repetitions, which have error bars
            has_spread = np.isfinite(measured.runs).sum(axis=0) > 1
            if has_spread.any():
                curve = Curve(measured.x[has_spread], measured.runs[:, has_spread])
                series.append(task_figure.drawable(curve.series(NAMES[learner], role)))
        chart = log_chart(
            f"task-{name}",
            f"{name}: {task.formula}",
            "training sets n",
            "test error over Var y",
            series,
            marks={"learned": task.floor + LEVEL},
            note=f"{task.finding} ({task.source})",
        )
        view.blocks.append(chart)
        view.lines.append(f"X, y = kh.targets.{task!r}.draw(400, seed=0)")
        if not series:
            view.notes.append(f"{name}: nothing is measured yet. Press measure.")
    return view


def _task_config(state: ExploreState) -> task_figure.Config:
    """The quick preset with the tasks of a state, without predictions, which take seconds."""
    return replace(task_figure.PRESETS["quick"], tasks=state.tasks, predicted=())


VIEWS: dict[str, Callable[[ExploreState, Results], View]] = {
    view.__name__: view for view in (curves, needs, surface, spectrum, heads, rotation, tasks)
}


def show(state: ExploreState, results: Results) -> View:
    """The view of a state, with what is measured of it."""
    if state.view not in VIEWS:
        raise ValueError(
            "your data are shown when a table is dropped: they are not in the address."
        )
    return VIEWS[state.view](state, results)


# ---- what is measured ----------------------------------------------------------------------------


@lru_cache(maxsize=256)
def sweeps(state: ExploreState) -> dict[Any, tuple[str, CellSweep]]:
    """Role and cells of what measuring a view asks for.

    By name in the curves, by place on the surface, by mean.
    """

    def sweep(
        model: str, n_heads: int | None, configs: Sequence[Config], mean: float = 1.0
    ) -> tuple[str, CellSweep]:
        """The sizes of several configurations in one sweep."""
        parts = [
            config.sweep(
                model=model,
                dim=state.dim,
                n_keys=state.n_keys,
                target=state.text,
                heads=n_heads,
                ridge=state.ridge,
                noise=state.noise,
                mean=mean,
            )
            for config in configs
        ]
        x = sorted({n for part in parts for n in part.x})
        runs = tuple(run for part in parts for run in part.runs)
        return model, CellSweep(tuple(x), runs)

    def at(n: int) -> list[Config]:
        """A few repetitions at one number of samples."""
        return [replace(QUICK, sizes=(n,), repetitions=(PICK_REPETITIONS,))]

    # cells are fitted with ReLU
    if state.named_activation is not None:
        return {}
    if state.view == "surface":
        return {(n, m): sweep("attention", m, at(n)) for n, m in state.picks}
    if state.view == "heads" and state.dim > 1:
        at_state = at(state.n_samples)
        by_mean = {}
        for c in MEANS:
            if c == 0:
                by_mean[c] = sweep("attention", None, at_state)
            else:
                by_mean[c] = sweep("biased", None, at_state, c)
        return by_mean
    if state.view != "curves":
        return {}

    # the curves: attention of infinitely and finitely many heads, biased heads, MLP
    both = [QUICK, BETWEEN]
    by_name = {
        "attention, ∞ heads, measured": sweep("attention", None, both),
        f"attention, {state.n_heads} heads, measured": sweep("attention", state.n_heads, both),
    }
    if state.bias and state.dim > 1:
        name = f"biased, c = {state.bias:g}, ∞ heads, measured"
        by_name[name] = sweep("biased", None, both, state.bias)
    by_name["MLP, ∞ wide, measured"] = sweep("mlp", None, both)
    return by_name


def cells_of(state: ExploreState) -> list[Cell]:
    """What measuring this view asks for."""
    if state.view == "tasks":
        return task_figure.cells(_task_config(state))
    return [cell for _, sweep in sweeps(state).values() for cell in sweep.cells]


def _finished(sweep: CellSweep, results: Results, name: str = "mean_square") -> Curve:
    """The errors of the repetitions that are finished, NaN instead of others.

    ``name`` is that of the error among the values of a cell.
    """
    column_of = {n: i for i, n in enumerate(sweep.x)}
    table = np.full((len(sweep.runs), len(sweep.x)), np.nan)
    for row, run in zip(table, sweep.runs, strict=True):
        for cell in run:
            row[column_of[cell.n_samples]] = results.get(cell, {}).get(name, math.nan)
    return Curve(np.array(sweep.x, dtype=np.float64), table)


def _points(name: str, role: str, curve: Curve, noise: float) -> Series | None:
    """Points with error bars where two repetitions at least are finished; None where nowhere."""
    counts = np.isfinite(curve.runs).sum(axis=0)
    has_spread = counts > 1
    if not has_spread.any():
        return None
    points = bars(
        name,
        curve.x[has_spread].tolist(),
        (curve.mean[has_spread] + noise).tolist(),
        curve.error[has_spread].tolist(),
        role=role,
        hover=[f"{count} repetitions" for count in counts[has_spread]],
        floor=noise,
    )
    return apart(points)
