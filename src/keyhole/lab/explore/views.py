"""What the page of `keyhole explore` shows.

A state in its address, blocks to draw, and the lines that compute them.

Every number of the theory on the page is an `Ask`, which is both called here and written out as a
line of Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any
from urllib.parse import urlencode

import numpy as np

from keyhole import theory
from keyhole.attention.heads import GaussianHeads
from keyhole.lab.cells import Cell
from keyhole.lab.explore.background import Background
from keyhole.lab.figures.prediction import PRESETS, tolerance
from keyhole.lab.jobs import target_variance
from keyhole.lab.measured import CellSweep, Curve, Results, apart, log_chart
from keyhole.lab.report.document import Chart, HeatMap, Look, Row, Series, Table, bars
from keyhole.lab.report.html import number
from keyhole.theory.blocks import bias_of
from keyhole.theory.curves import Learner, target_levels
from keyhole.theory.harmonics import pair_powers_seconds
from keyhole.theory.limits import limits
from keyhole.theory.notation import parse_target
from keyhole.theory.spectrum import MAX_BIASED_DEGREE
from keyhole.theory.targets import Polynomial, Term

QUICK = PRESETS["quick"]
"""Its sizes are measured, and those between: the same cells, so that what `keyhole reproduce` found
appears at once.
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
PICK_REPETITIONS = 4
MATTERS = 1.1
"""Heads have stopped to matter where the error is below this many times that of infinitely many."""

_RANGES: dict[str, tuple[str, float, float]] = {
    "d": ("dim", 1, 512),
    "N": ("n_keys", 1, 1024),
    "n": ("n_samples", 2, 10**7),
    "M": ("n_heads", 1, 10**5),
    "c": ("bias", 0.0, 4.0),
    "ridge": ("ridge", 0.0, 100.0),
    "noise": ("noise", 0.0, 100.0),
    "top": ("most_samples", 100, 10**7),
}
"""Name in the address: the field it sets, and the ends of its range."""
_ADDRESS = {
    "view": "view",
    "target": "target",
    **{name: found[0] for name, found in _RANGES.items()},
    "picks": "picks",
}


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
    picks: tuple[tuple[int, int], ...] = ()  # (n, M) to be measured on the surface

    @classmethod
    def read(cls, query: Mapping[str, str]) -> ExploreState:
        """The state of an address, every field of it checked."""
        fields: dict[str, Any] = {}
        for name, text in query.items():
            if name not in _ADDRESS:
                raise ValueError(
                    f"the address knows {', '.join(_ADDRESS)}: got {name!r:.40}. Leave it out."
                )
            value: Any = _picks(text) if name == "picks" else text
            if name in _RANGES:
                field_name, low, high = _RANGES[name]
                value = _number(name, text, type(getattr(cls, field_name)), low, high)
            fields[_ADDRESS[name]] = value
        state = cls(**fields)
        if state.view not in (*VIEWS, "data"):
            raise ValueError(f"a view must be one of {', '.join(VIEWS)}: got {state.view!r:.40}.")
        read = read_notation(state.target, state.dim)
        seconds = pair_powers_seconds(read.target)
        if seconds > TARGET_SECONDS:
            raise ValueError(
                "a target on this page must be quick: multiplied out this one has "
                f"{len(read.target.terms)} terms, which take about {seconds:,.0f} s. Lower its "
                "powers, or ask `keyhole theory --time-limit`."
            )
        _check_variance(state)
        return state

    @property
    def address(self) -> str:
        """The query string that reads back to this state; what has its default is left out."""
        usual, picks = vars(ExploreState()), ",".join(f"{n}x{m}" for n, m in self.picks)
        own = {
            name: value for name, f in _ADDRESS.items() if (value := getattr(self, f)) != usual[f]
        }
        return urlencode(own | ({"picks": picks} if picks else {}))

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
    def settings(self) -> dict[str, Any]:
        """What every learning curve of this state is asked with."""
        return {"n_keys": self.n_keys, "ridge": self.ridge, "noise": self.noise_variance}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of samples of a curve."""
        return _spaced(10, self.most_samples, 33, self.chosen)

    @property
    def chosen(self) -> int:
        """The n that is looked at, where curves have it."""
        return min(self.n_samples, self.most_samples)

    @property
    def distributions(self) -> dict[str, tuple[str, dict[str, float]]]:
        """Roles and options of the head distributions that are compared, by name."""
        distributions: dict[str, tuple[str, dict[str, float]]] = {
            "zero-mean heads": ("attention", {})
        }
        if self.bias:
            distributions[f"biased heads, c = {self.bias:g}"] = ("biased", {"heads": self.bias})
        return distributions

    def describe(self) -> str:
        """The settings in a line."""
        return (
            f"f* = {self.text}, d = {self.dim}, N = {self.n_keys}, M = {self.n_heads}, c = "
            f"{self.bias:g}, λ = {self.ridge:g}, noise {self.noise:g} Var f*"
        )


read_notation = lru_cache(maxsize=64)(parse_target)  # a rotation in 512 dimensions takes 2 MB


@lru_cache(maxsize=256)
def _variance(target: str, dim: int, n_keys: int) -> float:
    return target_variance(read_notation(target, dim).target, n_keys)


def _check_variance(state: ExploreState) -> None:
    """Raise a ValueError where there is nothing to learn, or where numbers leave floating point."""
    polynomial = read_notation(state.target, state.dim).target
    largest = max((abs(term.coefficient) for term in polynomial.terms), default=1.0)
    # the square of 1e300 overflows, and 1e300 * corr varies: ask for that of corr
    scale = 1.0 if COEFFICIENTS[0] <= largest <= COEFFICIENTS[1] else largest
    terms = [Term(term.coefficient / scale, term.powers) for term in polynomial.terms]
    with np.errstate(all="ignore"):
        scaled_variance = target_variance(Polynomial(state.dim, terms), state.n_keys)
    if scaled_variance == 0:
        raise ValueError(
            f"a target on this page must vary: {state.text} has no variance: nothing is to be "
            "learned."
        )
    # compare exponents, which do not overflow
    exponent = math.nan
    if 0 < scaled_variance < math.inf:
        exponent = math.log10(scaled_variance) + 2 * math.log10(scale)
    low, high = (math.log10(end) for end in VARIANCES)
    if not low <= exponent <= high:
        size = "is not finite" if math.isnan(exponent) else f"is about 1e{exponent:+.0f}"
        raise ValueError(
            f"a target on this page must have a variance from {VARIANCES[0]:g} to "
            f"{VARIANCES[1]:g}: that of {state.text} {size}. Scale the target, which changes no "
            "share that is learned."
        )


def _spaced(low: int, high: int, count: int, *more: int) -> tuple[int, ...]:
    """Whole numbers at equal ratios, and some more."""
    return tuple(int(n) for n in np.unique([*np.geomspace(low, high, count).round(), *more]))


def _number(name: str, text: str, kind: type, low: float, high: float) -> Any:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high or (kind is int and value != int(value)):
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name} must be {what} from {low:g} to {high:g}: got {text!r:.40}.")
    return kind(value)


def _picks(text: str) -> tuple[tuple[int, int], ...]:
    pairs = []
    for part in text.split(",") if text else ():
        n, _, heads = part.partition("x")
        pairs.append(
            (_number("n of a pick", n, int, 2, 4000), _number("M of a pick", heads, int, 1, 4096))
        )
    if len(pairs) > MOST_PICKS:
        raise ValueError(
            f"at most {MOST_PICKS} places of the surface are measured: got {len(pairs)}. Remove "
            "some."
        )
    return tuple(pairs)


# ---- what is asked of the theory -----------------------------------------------------------------


class Ask:
    """One question to `kh.theory` about the target of a state, and the expression that asks it."""

    def __init__(
        self,
        name: str,
        function: str,
        options: Mapping[str, Any],
        role: str = "",
        look: Look = "line",
        state: ExploreState | None = None,
    ) -> None:
        self.name, self.function, self.options, self.role, self.look = (
            name,
            function,
            dict(options),
            role,
            look,
        )
        self.other = state  # of another target: then the answer is over its variance

    def expression(self, samples: str) -> str:
        """As Python."""
        options = ", ".join(
            f"{name}={self._written(name, value)}" for name, value in self.options.items()
        )
        if self.function.endswith("bound"):  # samples enter as 1/√n
            bound = f"(bound := kh.theory.{self.function}(target, 1, {options}))"
            return f"{bound}.approximation + bound.estimation / np.sqrt({samples})"
        numbers = "" if "error" in self.options else f"{samples}, "
        return (
            f"kh.theory.{self.function}(target, "
            f"{numbers}{options}){' / variance' if self.other else ''}"
        )

    def _written(self, name: str, value: Any) -> str:
        if name == "error":
            return "variance / 10 + noise" if "noise" in self.options else "variance / 10"
        named = {"heads": f"kh.GaussianHeads(mean={value!r})", "noise": "noise"}
        return named.get(name, "math.inf" if value == math.inf else repr(value))

    def question(self, state: ExploreState, samples: tuple[int, ...]) -> tuple[Any, ...]:
        """All that the answer depends on."""
        state = self.other or state
        over = state.variance if self.other else 1.0
        return self.function, tuple(self.options.items()), state.target, state.dim, samples, over


@lru_cache(maxsize=1024)
def answered(
    function: str,
    options: tuple[tuple[str, Any], ...],
    target: str,
    dim: int,
    samples: tuple[int, ...],
    over: float,
) -> tuple[tuple[float, ...], str]:
    """The numbers of a question, for the sizes that the theory speaks of.

    And why not for more.
    """
    has_mean = bool(dict(options).get("heads"))
    seconds = STEP_SECONDS if has_mean else QUICK_SECONDS
    polynomial = read_notation(target, dim).target
    refusal = ""
    with np.errstate(all="ignore"), limits(seconds=seconds, memory=STEP_MEMORY):
        while samples:
            try:
                numbers = _numbers(function, dict(options), polynomial, samples, over)
                return tuple(numbers.tolist()), refusal
            except (ValueError, ArithmeticError) as error:
                refusal = str(error)
                # most refusals are of the largest sizes
                samples = samples[: 3 * len(samples) // 4] if len(samples) > 4 else ()
    return (), refusal


def _numbers(
    function: str,
    options: dict[str, Any],
    target: Polynomial,
    samples: tuple[int, ...],
    over: float,
) -> np.ndarray:
    """What `kh.theory` says, a number for each of the samples or one for all."""
    question = getattr(theory, function)
    if "heads" in options:
        options = {**options, "heads": GaussianHeads(mean=options["heads"])}
    if "error" in options:
        return np.array([question(target, **options)])
    if function.endswith("bound"):
        bound = question(target, 1, **options)
        return np.asarray(bound.approximation + bound.estimation / np.sqrt(samples))
    return np.asarray(question(target, samples, **options) / over)


answer_by: ContextVar[float] = ContextVar("answer_by", default=math.inf)
"""When an answer has to be there, by the monotonic clock: what is not known by then is left out for
now.
"""
MEANWHILE = "is being computed, which takes seconds where the blocks of a mean are new."
background = Background()
"""Where questions about heads with a mean are answered while a page waits."""


def _soon(
    function: Callable[..., Any], question: tuple[Any, ...], subject: tuple[str, int]
) -> Any | None:
    """``function(*question)`` about heads with a mean.

    None where it is not known by `answer_by`.
    """
    deadline = answer_by.get()
    if deadline == math.inf:
        return function(*question)
    return background.ask(
        key=(function.__name__, question),
        subject=subject,
        work=partial(function, *question),
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

    def begin(self, state: ExploreState, samples: Iterable[int], *more: str) -> None:
        """The lines that come first."""
        imports = ["import math", "import numpy as np", "import keyhole as kh"]
        imports += ["from keyhole.lab.jobs import target_variance", *more]
        self.lines += [
            *imports,
            "from keyhole.theory.notation import parse_target",
            "",
            f"n = {list(samples)}",
        ]
        self.lines += ["shown = {}", *_target_lines(state)]

    def ask(
        self, state: ExploreState, asks: Iterable[Ask], samples: tuple[int, ...]
    ) -> dict[str, Series]:
        """What the theory says, as series by their names; the lines for it are added."""
        self.begin(state, samples)
        series, target = {}, state.target
        for ask in asks:
            found, why = self._answer(ask, state, samples)
            if why and (note := f"{ask.name}: {why}") not in self.notes:
                self.notes.append(note)
            if not found:
                continue
            if ask.other and ask.other.target != target:
                target = ask.other.target
                self.lines += _target_lines(ask.other)
            sizes = "n" if len(found) == len(samples) else f"n[:{len(found)}]"
            self.lines.append(f"shown[{ask.name!r}] = {ask.expression(sizes)}")
            series[ask.name] = Series(
                ask.name, samples[: len(found)], found, look=ask.look, role=ask.role
            )
        return series

    @staticmethod
    def _answer(
        ask: Ask, state: ExploreState, samples: tuple[int, ...]
    ) -> tuple[tuple[float, ...], str]:
        """The numbers that answer a question, and what has to be said of them."""
        question = ask.question(state, samples)
        has_mean = bool(ask.options.get("heads"))
        if not has_mean:
            return answered(*question)
        target_state = ask.other or state
        answer = _soon(answered, question, subject=(target_state.target, target_state.dim))
        return ((), MEANWHILE) if answer is None else answer


def _target_lines(state: ExploreState) -> list[str]:
    return [
        f"target = parse_target({state.target!r}, dim={state.dim}).target",
        f"variance = target_variance(target, n_keys={state.n_keys})",
        f"noise = {state.noise!r} * variance",
    ]


# ---- the views -----------------------------------------------------------------------------------


def curves(state: ExploreState, results: Results) -> View:
    """Learning curves, with measured points on them."""
    answer, noise = View("Learning curves"), state.noise_variance
    kinds: dict[str, tuple[str, dict[str, Any], str, int]] = {
        "attention": ("attention", {}, "heads", state.n_heads)
    }
    if state.bias:
        kinds["biased"] = (
            f"biased, c = {state.bias:g}",
            {"heads": state.bias},
            "heads",
            state.n_heads,
        )
    kinds["mlp"] = ("MLP", {"model": "mlp"}, "wide", state.n_heads * (state.dim + 1))
    asks = [
        Ask(
            f"{name}, {size} {unit}",
            "learning_curve",
            {**state.settings, "n_heads": heads, **options},
            role,
            "line" if size == "∞" else "dashed",
        )
        for role, (name, options, unit, width) in kinds.items()
        for size, heads in (("∞", math.inf), (width, state.n_heads))
    ]
    heads = {"n_heads": state.n_heads}
    asks += [
        Ask(
            "bound, ∞ heads (1-Lipschitz loss)",
            "kernel_risk_bound",
            {"n_keys": state.n_keys},
            "oracle",
            "thin",
        ),
        Ask(
            f"the paper's bound, {state.n_heads} heads, constant 1",
            "risk_bound",
            heads,
            "ridge",
            "thin",
        ),
    ]
    predicted = answer.ask(state, asks, state.sizes).values()
    points = [
        _points(name, role, _known(sweep, results), noise)
        for name, (role, sweep) in sweeps(state).items()
    ]
    marks = {"Var f*": state.variance + noise} | ({"noise": noise} if noise else {})
    chart = log_chart(
        "curves",
        state.describe(),
        "training sets n",
        "test error, noise included",
        [*(series for series in predicted if series.look != "thin"), *filter(None, points)],
        marks=marks,
        note=_deviation(state),
    )
    at = {s.name: (s, s.y[list(s.x).index(state.chosen)]) for s in predicted if state.chosen in s.x}
    rows: list[Row] = [
        {
            "at this n": name,
            "error": error,
            "over Var f*": None if s.look == "thin" else error / state.variance,
        }
        for name, (s, error) in at.items()
    ]
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
    answer.blocks = [chart, Table("at", f"n = {state.chosen:,}", rows), bounds]
    return answer


def _deviation(state: ExploreState) -> str:
    return (
        "Points are means over repetitions, bars one standard error; the curves are not fitted to "
        f"them. Most settings of d = {state.dim} are predicted within {tolerance(state.dim):.0%}, "
        "those of few heads worse."
    )


def needs(state: ExploreState, results: Results) -> View:
    """Samples and heads that suffice for a tenth of Var f*."""
    answer, noise, left = View("What suffices"), state.noise_variance, state.variance / 10
    goal: dict[str, Any] = {"n_keys": state.n_keys, "error": left + noise, "noise": noise}
    biased = (
        {f"samples, biased, c = {state.bias:g}": {**goal, "heads": state.bias}}
        if state.bias
        else {}
    )
    samples = {
        "samples, attention, ∞ heads": goal,
        **biased,
        "samples, MLP, ∞ wide": {**goal, "model": "mlp"},
    }
    asks = [Ask(name, "samples_needed", options) for name, options in samples.items()]
    asks.append(
        Ask(
            "heads, any number of samples",
            "heads_predicted",
            {"n_keys": state.n_keys, "error": left},
        )
    )
    found = answer.ask(state, asks, (0,))
    rows: list[Row] = [
        {"to have a tenth of Var f* left": name, "number": series.y[0]}
        for name, series in found.items()
    ]
    answer.blocks = [Table("needs", "What suffices, with the best penalty", rows)]
    return answer


def surface(state: ExploreState, results: Results) -> View:
    """The error over samples and heads, and the line beyond which more heads do not help."""
    answer, noise = View("Samples and heads"), state.noise_variance
    sizes, heads = _spaced(10, state.most_samples, 13), _spaced(1, 2000, 12)
    names = [*(f"{m:,}" for m in heads), "∞"]
    asks = [_of_heads(state, m) for m in (*heads, math.inf)]
    rows_of = answer.ask(state, asks, sizes).values()
    n = min((len(series.y) for series in rows_of), default=0)
    if len(rows_of) < len(asks) or n == 0:
        return answer
    values = np.array([series.y[:n] for series in rows_of])
    enough = values[:-1] <= MATTERS * values[-1]
    line = [float(np.argmax(column)) - 0.5 if column.any() else None for column in enough.T]
    points: list[tuple[float, float, str]] = []
    for (size, m), (_, sweep) in sweeps(state).items():
        curve = _known(sweep, results)
        if np.isfinite(curve.runs).sum() < 2:
            continue
        told, _ = answered(*_of_heads(state, m).question(state, (size,)))
        x, y = (
            np.interp(math.log(k), np.log(ks), range(len(ks)))
            for k, ks in ((size, sizes[:n]), (m, heads))
        )
        found = f"measured {number(curve.mean[0] + noise)} ± {number(curve.error[0], 2)}"
        words = f"n = {size}, M = {m}: {found}, predicted {number(next(iter(told), None))}"
        points.append((float(x), float(y), words))
    share = values / state.variance
    with np.errstate(divide="ignore"):
        colours = np.log10(share).tolist()
    answer.blocks = [
        HeatMap(
            "surface",
            f"{state.describe()}: test error over Var f*, logarithmic colours",
            "training sets n",
            "heads M",
            [f"{size:,}" for size in sizes[:n]],
            names,
            colours,
            rows=[
                {
                    "n": size,
                    "M": name,
                    "error": float(values[i, k]),
                    "over Var f*": float(share[i, k]),
                }
                for i, name in enumerate(names)
                for k, size in enumerate(sizes[:n])
            ],
            note=(
                f"Below the line heads have stopped to matter: the error is at most {MATTERS:g} "
                "times that of infinitely many. Click a place to measure there."
            ),
            words=[[number(v, 2) for v in row] for row in share.tolist()],
            line=line,
            points=points,
        ),
        *(
            [Table("picked", "Measured", [{"place": text} for *_, text in points])]
            if points
            else ()
        ),
    ]
    return answer


def _of_heads(state: ExploreState, heads: float) -> Ask:
    return Ask(
        f"{'∞' if heads == math.inf else heads} heads",
        "learning_curve",
        {**state.settings, "n_heads": heads},
    )


def spectrum(state: ExploreState, results: Results) -> View:
    """Levels of both head distributions, and where the target sits in them.

    And what is learned at n.
    """
    answer = View("Spectrum")
    answer.begin(state, state.sizes, "from keyhole.theory.curves import Learner")
    levels, learned, tables = [], [], []
    for name, (role, options) in state.distributions.items():
        mean = options.get("heads", 0.0)
        question = (
            state.target,
            state.dim,
            state.n_keys,
            mean,
            state.sizes,
            state.chosen,
            state.ridge,
            state.noise,
        )
        if mean:
            spectral = _soon(_spectral_answer, question, subject=(state.target, state.dim))
        else:
            spectral = _spectral_answer(*question)
        if spectral is None:
            answer.notes.append(f"{name}: {MEANWHILE}")
            continue
        if spectral.refusal:
            answer.notes.append(f"{name}: {spectral.refusal}")
            continue
        # the lines
        written = f", heads=kh.GaussianHeads(mean={mean!r})" if mean else ""
        learner_line = f"Learner(target, {state.n_keys}, 'attention', math.inf{written})"
        answer.lines.append(
            f"shown[{name!r}] = {learner_line}.learned(n, {state.ridge!r}, noise)[1]"
        )
        # the charts
        rows = spectral.rows
        learned.append(Series(name, state.sizes, spectral.learned, look="line", role=role))
        counts = np.array([row["eigenfunctions"] for row in rows])
        hover = [
            f"degrees {row['degrees']}: {row['eigenfunctions']:,} eigenfunctions, "
            f"{row['of the target']:.1%} of the target, {row['learned']:.0%} learned at n = "
            f"{state.chosen:,}"
            for row in rows
        ]
        values = [row["eigenvalue"] for row in rows]
        ranks = (np.cumsum(counts) - counts + 1).tolist()
        levels.append(Series(name, ranks, values, role=role, hover=hover))
        # the table: the largest levels, and those that hold a part of the target
        loaded = [row for k, row in enumerate(rows) if k < 8 or row["of the target"] > 1e-3][:24]
        kind = "Young diagrams (a, b) of the rotations" if mean else "degrees in query and keys"
        title = f"{name}: where the target sits, and what is learned at n = {state.chosen:,}"
        note = f"Levels by {kind}, largest eigenvalue first."
        tables.append(Table(f"levels-{role}", title, loaded, note=note))
    chart = log_chart(
        "levels", "Levels of the kernel", "rank of their first eigenfunction", "eigenvalue", levels
    )
    parts = Chart(
        "learned",
        "Share of the target that is learned",
        "training sets n",
        "Σ c² λ/(λ+γ) / Σ c²",
        learned,
        x_log=True,
        marks={"all": 1.0},
    )
    answer.blocks = [chart, *tables, parts]
    return answer


@dataclass(frozen=True)
class _Spectral:
    """Levels of a kernel with the target in them, and the share of it that is learned at each n."""

    rows: list[dict[str, Any]]
    learned: tuple[float, ...]
    refusal: str = ""  # why there are none


@lru_cache(maxsize=64)
def _spectral_answer(
    target: str,
    dim: int,
    n_keys: int,
    mean: float,
    sizes: tuple[int, ...],
    chosen: int,
    ridge: float,
    noise: float,
) -> _Spectral:
    """What the view of the spectrum shows of heads with a mean, or of zero-mean heads."""
    polynomial = read_notation(target, dim).target
    distribution = GaussianHeads(mean=mean) if mean else None
    noise_variance = noise * _variance(target, dim, n_keys)
    seconds = STEP_SECONDS if mean else QUICK_SECONDS
    try:
        with np.errstate(all="ignore"), limits(seconds=seconds, memory=STEP_MEMORY):
            learner = Learner(polynomial, n_keys, "attention", math.inf, distribution)
            gammas, shares = learner.learned(sizes, ridge, noise_variance)
            gamma = float(gammas[sizes.index(chosen)])
            rows = _level_rows(polynomial, n_keys, distribution, gamma)
    except (ValueError, ArithmeticError) as error:
        return _Spectral(rows=[], learned=(), refusal=str(error))
    return _Spectral(rows=rows, learned=tuple(shares.tolist()))


_target_levels = lru_cache(maxsize=64)(target_levels)


def _level_rows(
    target: Polynomial,
    n_keys: int,
    distribution: GaussianHeads | None,
    gamma: float,
) -> list[dict[str, Any]]:
    """Levels up to above the target's degree.

    With the part of the target in each and the part that is learned.
    """
    degree = max(4, max(target.degrees) + 1)
    if distribution is not None:
        degree = min(degree, MAX_BIASED_DEGREE)
    found, powers = _target_levels(target, n_keys, bias_of(distribution, target.dim), degree)
    columns = (
        found.degrees.tolist(),
        found.eigenvalues.tolist(),
        found.multiplicities.tolist(),
        powers.tolist(),
    )
    total = max(float(powers.sum()), 1e-300)
    return [
        {
            "degrees": str(tuple(degrees)),
            "eigenvalue": value,
            "eigenfunctions": int(count),
            "of the target": power / total,
            "learned": value / (value + gamma),
        }
        for degrees, value, count, power in zip(*columns, strict=True)
    ]


def heads(state: ExploreState, results: Results) -> View:
    """The error against the strength of the mean, at three numbers of samples."""
    answer = View("The head distribution")
    if state.dim < 2:
        answer.notes.append(
            "there is no mean to speak of in one dimension: choose d of 2 at least."
        )
        return answer
    samples = tuple(
        sorted({max(2, state.n_samples // 10), state.n_samples, min(10 * state.n_samples, 10**7)})
    )
    asks = {c: Ask(f"c = {c:g}", "learning_curve", {**state.settings, "heads": c}) for c in MEANS}
    found = answer.ask(state, asks.values(), samples)
    series, rows = [], []
    for k, (n, role) in enumerate(zip(samples, ("mlp", "kernel", "ball"), strict=False)):
        errors = {
            c: s.y[k] for c, ask in asks.items() if (s := found.get(ask.name)) and len(s.y) > k
        }
        series.append(
            Series(f"n = {n:,}", list(errors), list(errors.values()), look="line", role=role)
        )
        if n == state.n_samples and (zero := errors.get(0.0)):
            rows = [{"mean c": c, "error": error, "over that of c = 0": error / zero,
                     "the mean": "" if c == 0 else "helps" if error < zero else "is a handicap"}
                    for c, error in errors.items()]  # fmt: skip
    runs = [_known(sweep, results).runs for _, sweep in sweeps(state).values()]
    if runs[0].size:
        measured, name = (
            Curve(np.array(MEANS), np.hstack(runs)),
            f"measured, n = {state.n_samples:,}",
        )
        series += filter(None, [_points(name, "biased", measured, state.noise_variance)])
    answer.blocks = [
        Chart(
            "heads",
            state.describe(),
            "mean c of the heads, times the identity",
            "test error, noise included",
            series,
            y_log=True,
            note=_deviation(state),
        ),
        Table("strengths", f"n = {state.n_samples:,}", rows),
    ]
    return answer


def rotation(state: ExploreState, results: Results) -> View:
    """The correlation turned away from the identity, for zero-mean and biased heads."""
    answer = View("Rotation")
    powers = {f"corr^{power} * token".replace("^1 ", " "): power for power in (1, 2, 3)}
    power = powers.get(state.text)
    if power is None or state.dim < 2:
        answer.notes.append(
            "rotation needs d of 2 at least and a target corr^q * token, q up to 3: choose the "
            "family correlation."
        )
        return answer
    asks: dict[tuple[str, float], Ask] = {}
    for angle in ANGLES if power == 1 else ANGLES[::2]:  # higher powers take seconds each
        turned = replace(
            state, target=f"rotated({angle:g})^{power} * token" if angle else state.text
        )
        for name, (_, options) in state.distributions.items():
            of_angle = f"{name}, γ = {angle:g}"
            asks[name, angle] = Ask(
                of_angle, "learning_curve", {**turned.settings, **options}, state=turned
            )
    found = answer.ask(state, asks.values(), (state.n_samples,))
    series = []
    for distribution, (role, _) in state.distributions.items():
        errors = {
            angle: found[ask.name].y[0]
            for (name, angle), ask in asks.items()
            if name == distribution and ask.name in found
        }
        series.append(
            Series(distribution, list(errors), list(errors.values()), look="line", role=role)
        )
    answer.blocks = [
        Chart(
            "rotation",
            f"<x_0, S x_i> in the place of <x_0, x_i>, n = {state.n_samples:,}",
            "γ: S = (1−γ) I + γ P, P a random rotation",
            "test error over Var f*",
            series,
            y_log=True,
        )
    ]
    return answer


VIEWS: dict[str, Callable[[ExploreState, Results], View]] = {
    view.__name__: view for view in (curves, needs, surface, spectrum, heads, rotation)
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

    def swept(
        model: str, heads: int | None, sizes: tuple[Any, ...], mean: float = 1.0
    ) -> tuple[str, CellSweep]:
        options = (state.dim, state.n_keys, state.text, heads, state.ridge, state.noise, mean)
        parts = [config.sweep(model, *options) for config in sizes]
        x = sorted({n for part in parts for n in part.x})
        return model, CellSweep(tuple(x), tuple(run for part in parts for run in part.runs))

    def at(n: int) -> tuple[Any, ...]:
        return (replace(QUICK, sizes=(n,), repetitions=(PICK_REPETITIONS,)),)

    if state.view == "surface":
        return {(n, m): swept("attention", m, at(n)) for n, m in state.picks}
    if state.view == "heads" and state.dim > 1:
        own = at(state.n_samples)
        return {
            c: swept("biased", None, own, c) if c else swept("attention", None, own) for c in MEANS
        }
    if state.view != "curves":
        return {}
    both, name = (QUICK, BETWEEN), f"attention, {state.n_heads} heads, measured"
    found = {
        "attention, ∞ heads, measured": swept("attention", None, both),
        name: swept("attention", state.n_heads, both),
    }
    if state.bias and state.dim > 1:
        found[f"biased, c = {state.bias:g}, ∞ heads, measured"] = swept(
            "biased", None, both, state.bias
        )
    return found | {"MLP, ∞ wide, measured": swept("mlp", None, both)}


def cells_of(state: ExploreState) -> list[Cell]:
    """What measuring this view asks for."""
    return [cell for _, sweep in sweeps(state).values() for cell in sweep.cells]


def _known(sweep: CellSweep, results: Results) -> Curve:
    """Means over the repetitions that are finished."""
    places = {n: i for i, n in enumerate(sweep.x)}
    table = np.full((len(sweep.runs), len(sweep.x)), np.nan)
    for row, run in zip(table, sweep.runs, strict=True):
        for cell in run:
            row[places[cell.n_samples]] = results.get(cell, {}).get("mean_square", math.nan)
    return Curve(np.array(sweep.x, dtype=np.float64), table)


def _points(name: str, role: str, curve: Curve, noise: float) -> Series | None:
    """Points with error bars where two repetitions at least are finished; None where nowhere."""
    counts = np.isfinite(curve.runs).sum(axis=0)
    known = counts > 1
    if not known.any():
        return None
    x, y, error = curve.x[known], curve.mean[known] + noise, curve.error[known]
    hover = [f"{count} repetitions" for count in counts[known]]
    return apart(bars(name, x.tolist(), y.tolist(), error.tolist(), role, hover, floor=noise))
