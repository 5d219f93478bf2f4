"""What the page of `keyhole explore` shows: a state in its address, blocks to draw, and the lines that compute them.

Every number of the theory on the page is an `Ask`, which is both called here and written out as a line of Python.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any
from urllib.parse import urlencode

import numpy as np

from keyhole import theory
from keyhole.attention.heads import GaussianHeads
from keyhole.lab.cells import Cell
from keyhole.lab.figures.prediction import PRESETS, tolerance
from keyhole.lab.jobs import read_target, target_variance
from keyhole.lab.measured import CellSweep, Curve, Results, apart, log_chart
from keyhole.lab.report.document import Chart, HeatMap, Row, Series, Table, bars
from keyhole.lab.report.html import number
from keyhole.theory.blocks import bias_of
from keyhole.theory.curves import Learner, feature_count, implicit_ridges, target_levels
from keyhole.theory.harmonics import pair_powers_seconds
from keyhole.theory.notation import parse_target
from keyhole.theory.spectrum import MAX_BIASED_DEGREE

QUICK = PRESETS["quick"]
"""Its sizes are measured, and those between: the same cells, so that what `keyhole reproduce` found appears at once."""
BETWEEN = replace(QUICK, sizes=(25, 50, 200, 800), repetitions=(8, 8, 4, 2))
MEANS = (0.25, 0.5, 1.0, 1.5, 2.0)
ANGLES = (0.0, 0.25, 0.5, 0.75, 1.0)
TARGET_SECONDS = 2.0  # that the harmonic parts of a typed target may take, by estimate
MOST_PICKS = 12
PICK_REPETITIONS = 4
MATTERS = 1.1
"""Heads have stopped to matter where the error is below this many times that of infinitely many."""

VIEWS = ("curves", "needs", "surface", "spectrum", "law", "rotation")

_NUMBERS: dict[str, tuple[str, type, float, float]] = {
    "d": ("dim", int, 1, 512),
    "N": ("n_keys", int, 1, 1024),
    "n": ("n_samples", int, 2, 10**7),
    "M": ("n_heads", int, 1, 10**5),
    "c": ("bias", float, 0.0, 4.0),
    "ridge": ("ridge", float, 0.0, 100.0),
    "noise": ("noise", float, 0.0, 100.0),
    "top": ("most_samples", int, 100, 10**7),
}
"""Name in the address: the field it sets, its type, and the ends of its range."""


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
            if name in _NUMBERS:
                field_name, kind, low, high = _NUMBERS[name]
                fields[field_name] = _number(name, text, kind, low, high)
            elif name == "picks":
                fields[name] = _picks(text)
            elif name in ("view", "target"):
                fields[name] = text
            else:
                known = ", ".join(("view", "target", *_NUMBERS, "picks"))
                raise ValueError(f"the address knows {known}: got {name!r:.40}. Leave it out.")
        state = cls(**fields)
        if state.view not in (*VIEWS, "data"):
            raise ValueError(f"a view must be one of {', '.join(VIEWS)}: got {state.view!r:.40}.")
        read = read_notation(state.target, state.dim)
        seconds = pair_powers_seconds(read.target)
        if seconds > TARGET_SECONDS:
            raise ValueError(
                f"a target on this page must be quick: multiplied out this one has {len(read.target.terms)} terms, "
                f"which take about {seconds:,.0f} s. Lower its powers, or ask `keyhole theory --time-limit`."
            )
        return state

    @property
    def address(self) -> str:
        """The query string that reads back to this state; what has its default is left out."""
        pairs: dict[str, Any] = {"view": self.view, "target": self.target}
        pairs |= {name: getattr(self, field_name) for name, (field_name, *_) in _NUMBERS.items()}
        pairs["picks"] = ",".join(f"{n}x{m}" for n, m in self.picks)
        usual = {"view": "curves", "target": ExploreState.target, "picks": ""}
        usual |= {name: getattr(ExploreState, field_name) for name, (field_name, *_) in _NUMBERS.items()}
        return urlencode({name: value for name, value in pairs.items() if value != usual[name]})

    @property
    def text(self) -> str:
        """The target multiplied out, as cells name it."""
        return read_notation(self.target, self.dim).text

    @property
    def variance(self) -> float:
        """Var f*."""
        return _variance(self.target, self.dim, self.n_keys)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of samples of a curve."""
        grid = np.geomspace(10, self.most_samples, 33).round().astype(np.int64)
        return tuple(int(n) for n in np.unique([*grid, min(self.n_samples, self.most_samples)]))

    def describe(self) -> str:
        """The settings in a line."""
        return (
            f"f* = {self.text}, d = {self.dim}, N = {self.n_keys}, M = {self.n_heads}, c = {self.bias:g}, "
            f"λ = {self.ridge:g}, noise {self.noise:g} Var f*"
        )


read_notation = lru_cache(maxsize=256)(parse_target)


@lru_cache(maxsize=256)
def _variance(target: str, dim: int, n_keys: int) -> float:
    return target_variance(read_target(target, dim), n_keys)


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
        pairs.append((_number("n of a pick", n, int, 2, 4000), _number("M of a pick", heads, int, 1, 4096)))
    if len(pairs) > MOST_PICKS:
        raise ValueError(f"at most {MOST_PICKS} places of the surface are measured: got {len(pairs)}. Remove some.")
    return tuple(pairs)


@dataclass(frozen=True)
class Ask:
    """One question to `kh.theory` about a target, and the expression that asks it."""

    name: str
    function: str
    options: tuple[tuple[str, Any], ...]
    role: str = ""
    look: str = "line"

    def expression(self, samples: str = "n") -> str:
        """As Python."""
        options = ", ".join(f"{name}={_written(value)}" for name, value in self.options)
        if self.function.endswith("bound"):  # samples enter as 1/√n
            bound = f"(bound := kh.theory.{self.function}(target, 1, {options}))"
            return f"{bound}.approximation + bound.estimation / np.sqrt({samples})"
        return f"kh.theory.{self.function}(target, {samples}, {options})"


class _Mean(float):
    """The mean of a law of heads: a law itself has no hash to be remembered by."""

    def __repr__(self) -> str:
        return f"kh.GaussianHeads(mean={float(self)!r})"


class _Noise(float):
    """The variance of the noise, which the lines call by its name."""

    def __repr__(self) -> str:
        return "noise"


def _written(value: Any) -> str:
    return "math.inf" if value == math.inf else repr(value)


def _law(mean: _Mean | None) -> GaussianHeads | None:
    return None if mean is None else GaussianHeads(mean=float(mean))


def _meant(options: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    return {name: _law(v) if isinstance(v, _Mean) else v for name, v in options}


@lru_cache(maxsize=1024)
def answered(ask: Ask, target: str, dim: int, samples: tuple[int, ...]) -> tuple[tuple[float, ...], str]:
    """The numbers of an `Ask`, for as many of the sizes as the theory speaks of, and why not for more."""
    polynomial, options, why = read_target(target, dim), _meant(ask.options), ""
    while samples:
        try:
            with np.errstate(all="ignore"):
                if ask.function.endswith("bound"):
                    bound = getattr(theory, ask.function)(polynomial, 1, **options)
                    found = bound.approximation + bound.estimation / np.sqrt(samples)
                else:
                    found = getattr(theory, ask.function)(polynomial, samples, **options)
            return tuple(found.tolist()), why
        except (ValueError, ArithmeticError) as error:
            # most refusals are of the largest sizes
            why, samples = str(error), samples[: 3 * len(samples) // 4] if len(samples) > 4 else ()
    return (), why


answer_by: ContextVar[float] = ContextVar("answer_by", default=math.inf)
"""When an answer has to be there, by the monotonic clock: what is not known by then is left out for now."""
MOST_MEANWHILE = 8
MEANWHILE = "is being computed, which takes seconds where the blocks of a mean are new."
_threads = ThreadPoolExecutor(2, thread_name_prefix="theory")
_meanwhile: dict[Any, Future[tuple[tuple[float, ...], str]]] = {}


def _soon(*question: Any) -> tuple[tuple[float, ...], str]:
    """As `answered`; heads with a mean are given until `answer_by`."""
    ask, end = question[0], answer_by.get()
    if end == math.inf or not any(isinstance(value, _Mean) and value for _, value in ask.options):
        return answered(*question)
    future = _meanwhile.get(question)
    if future is None:
        if len(_meanwhile) >= MOST_MEANWHILE:
            return (), MEANWHILE
        future = _meanwhile[question] = _threads.submit(answered, *question)
        future.add_done_callback(lambda _: _meanwhile.pop(question, None))
    try:
        return future.result(timeout=max(0.0, end - time.monotonic()))
    except TimeoutError:
        return (), MEANWHILE


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

    def note(self, text: str) -> None:
        """Say something once."""
        if text and text not in self.notes:
            self.notes.append(text)


def _preamble(state: ExploreState, samples: Iterable[int], more: Iterable[str] = ()) -> list[str]:
    return [
        "import math",
        "import numpy as np",
        "import keyhole as kh",
        "from keyhole.lab.jobs import target_variance",
        *more,
        "from keyhole.theory.notation import parse_target",
        "",
        f"target = parse_target({state.target!r}, dim={state.dim}).target",
        f"noise = {state.noise!r} * target_variance(target, n_keys={state.n_keys})",
        f"n = {list(samples)}",
    ]


def _curve_asks(state: ExploreState) -> list[Ask]:
    """The curves of the first view, infinitely many heads before M of them."""
    noise = state.noise * state.variance
    base = (("n_keys", state.n_keys), ("ridge", state.ridge), ("noise", _Noise(noise)))
    many, few = (("n_heads", math.inf),), (("n_heads", state.n_heads),)
    law = (("law", _Mean(state.bias)),) if state.bias else ()
    width = state.n_heads * (state.dim + 1)
    kinds: list[tuple[str, str, Any, str, str]] = [
        ("attention", "attention", (), "∞ heads", f"{state.n_heads} heads"),
        ("mlp", "MLP", (("model", "mlp"),), "∞ wide", f"{width} wide"),
    ]
    if law:
        kinds.insert(1, ("biased", f"biased, c = {state.bias:g}", law, "∞ heads", f"{state.n_heads} heads"))
    asks = []
    for role, name, options, infinite, finite in kinds:
        asks.append(Ask(f"{name}, {infinite}", "learning_curve", (*base, *many, *options), role))
        asks.append(Ask(f"{name}, {finite}", "learning_curve", (*base, *few, *options), role, "dashed"))
    bounds = [
        Ask("bound, ∞ heads (1-Lipschitz loss)", "kernel_risk_bound", (("n_keys", state.n_keys),), "oracle", "thin"),
        Ask(f"the paper's bound, {state.n_heads} heads, constant 1", "risk_bound", few, "ridge", "thin"),
    ]
    return [*asks, *bounds]


def _ask_all(state: ExploreState, answer: View, asks: list[Ask], samples: tuple[int, ...]) -> list[Series]:
    """Series of what the theory says, and the lines for them."""
    series = []
    answer.lines += [*_preamble(state, samples), "shown = {"]
    for ask in asks:
        found, why = _soon(ask, state.target, state.dim, samples)
        if why:
            answer.note(f"{ask.name}: {why}")
        if found:
            sizes = "n" if len(found) == len(samples) else f"n[:{len(found)}]"
            answer.lines.append(f"    {ask.name!r}: {ask.expression(sizes)},")
            series.append(Series(ask.name, samples[: len(found)], found, look=ask.look, role=ask.role))  # type: ignore[arg-type]
    answer.lines.append("}")
    return series


def curves(state: ExploreState, results: Results) -> View:
    """Learning curves, with measured points on them."""
    answer = View("Learning curves")
    samples = state.sizes
    predicted = _ask_all(state, answer, _curve_asks(state), samples)
    noise = state.noise * state.variance
    measured = [
        series
        for name, (role, sweep) in sweeps(state).items()
        if (series := _points(name, role, _known(sweep, results), noise)) is not None
    ]
    marks = {"Var f*": state.variance + noise} | ({"noise": noise} if noise else {})
    chart = log_chart(
        "curves", state.describe(), "training sets n", "test error, noise included",
        [*(series for series in predicted if series.look != "thin"), *measured], marks=marks, note=_deviation(state),
    )  # fmt: skip
    chosen = min(state.n_samples, state.most_samples)
    rows: list[Row] = []
    for series in predicted:
        if chosen in series.x:
            error = series.y[list(series.x).index(chosen)]
            bound = series.look == "thin"
            rows.append(
                {"at this n": series.name, "error": error, "over Var f*": None if bound else error / state.variance}
            )
    bounds = log_chart(
        "bounds", "The bounds beside the truth", "training sets n", "excess risk", [
            series for series in predicted if series.look == "thin" or series.role == "attention"
        ],
        note="The bounds are on the excess risk of the learners in the theorems, for a 1-Lipschitz loss; the curves "
        "are squared errors of ridge regression.",
    )  # fmt: skip
    answer.blocks = [chart, Table("at", f"n = {chosen:,}", rows), bounds]
    return answer


def _deviation(state: ExploreState) -> str:
    return (
        "Points are means over repetitions, bars one standard error; the curves are not fitted to them. Most settings "
        f"of d = {state.dim} are predicted within {tolerance(state.dim):.0%}, those of few heads worse."
    )


def needs(state: ExploreState, results: Results) -> View:
    """Samples and heads that suffice for a tenth of Var f*."""
    answer = View("What suffices")
    error = state.variance / 10
    noise = state.noise * state.variance
    answer.lines = [*_preamble(state, []), f"error = target_variance(target, n_keys={state.n_keys}) / 10", "shown = {"]
    kinds: list[tuple[str, str, dict[str, Any]]] = [
        ("samples, attention, ∞ heads", "samples_needed", {"noise": _Noise(noise)}),
        ("samples, MLP, ∞ wide", "samples_needed", {"noise": _Noise(noise), "model": "mlp"}),
        ("heads, any number of samples", "heads_predicted", {}),
    ]
    if state.bias:
        kinds.insert(
            1,
            (
                f"samples, biased, c = {state.bias:g}",
                "samples_needed",
                {"noise": _Noise(noise), "law": _Mean(state.bias)},
            ),
        )
    rows: list[Row] = []
    goal = error + noise
    for name, function, options in kinds:
        if "samples" in function:
            goal_text, wanted = "error + noise", goal
        else:
            goal_text, wanted = "error", error
        try:
            with np.errstate(all="ignore"):
                target = read_target(state.target, state.dim)
                found = getattr(theory, function)(target, state.n_keys, wanted, **_meant(options.items()))
        except (ValueError, ArithmeticError) as refusal:
            answer.note(f"{name}: {refusal}")
            continue
        written = "".join(f", {option}={_written(value)}" for option, value in options.items())
        answer.lines.append(f"    {name!r}: kh.theory.{function}(target, {state.n_keys}, {goal_text}{written}),")
        rows.append({"to have a tenth of Var f* left": name, "number": found})
    answer.lines.append("}")
    answer.blocks = [Table("needs", "What suffices, with the best penalty", rows)]
    return answer


def surface(state: ExploreState, results: Results) -> View:
    """The error over samples and heads, and the line beyond which more heads do not help."""
    answer = View("Samples and heads")
    sizes = tuple(int(n) for n in np.unique(np.geomspace(10, state.most_samples, 13).round()))
    heads = tuple(int(m) for m in np.unique(np.geomspace(1, 2000, 12).round()))
    noise = state.noise * state.variance
    base = (("n_keys", state.n_keys), ("ridge", state.ridge), ("noise", _Noise(noise)))
    asks = [Ask(f"{m} heads" if m < math.inf else "∞ heads", "learning_curve", (*base, ("n_heads", m)))
            for m in (*heads, math.inf)]  # fmt: skip
    rows_of = _ask_all(state, answer, asks, sizes)
    n = min((len(series.y) for series in rows_of), default=0)
    if len(rows_of) < len(asks) or n == 0:
        return answer
    values = np.array([series.y[:n] for series in rows_of])
    enough = values[:-1] <= MATTERS * values[-1]
    line = [float(np.argmax(column)) - 0.5 if column.any() else None for column in enough.T]
    points = []
    for (size, m), curve in _picked(state, results).items():
        told, found = _predicted(state, size, m), (curve.mean[0] + noise, curve.error[0])
        where = (float(np.interp(math.log(size), np.log(sizes[:n]), range(n))),
                 float(np.interp(math.log(m), np.log(heads), range(len(heads)))))  # fmt: skip
        points.append((*where, f"n = {size}, M = {m}: measured {number(found[0])} ± {number(found[1], 2)}, "
                       f"predicted {number(told)}"))  # fmt: skip
    names = [f"{m:,}" for m in heads] + ["∞"]
    share = values / state.variance
    answer.blocks = [
        HeatMap(
            "surface", f"{state.describe()}: test error over Var f*, logarithmic colours", "training sets n", "heads M",
            [f"{size:,}" for size in sizes[:n]], names, np.log10(share).tolist(),
            rows=[{"n": size, "M": name, "error": float(values[i, k]), "over Var f*": float(share[i, k])}
                  for i, name in enumerate(names) for k, size in enumerate(sizes[:n])],
            note=f"Below the line heads have stopped to matter: the error is at most {MATTERS:g} times that of "
            "infinitely many. Click a place to measure there.",
            words=[[number(v, 2) for v in row] for row in share.tolist()], line=line, points=points,
        )
    ]  # fmt: skip
    if points:
        answer.blocks.append(Table("picked", "Measured", [{"place": text} for *_, text in points]))
    return answer


def _predicted(state: ExploreState, n: int, heads: int) -> float:
    noise = state.noise * state.variance
    return float(
        theory.learning_curve(read_target(state.target, state.dim), n, state.n_keys, state.ridge, noise, heads)
    )


def spectrum(state: ExploreState, results: Results) -> View:
    """Levels of both laws, where the target sits in them, and what is learned at n."""
    answer = View("Spectrum")
    samples = state.sizes
    answer.lines = _preamble(
        state, samples, ["from keyhole.theory.curves import Learner, feature_count, implicit_ridges"]
    )
    answer.lines += [
        f"noise, ridge, features = float(noise), {state.ridge!r}, feature_count(math.inf, {state.dim})",
        "shown = {}",
    ]
    target, noise = read_target(state.target, state.dim), state.noise * state.variance
    features = feature_count(math.inf, state.dim)
    levels, learned, tables = [], [], []
    laws: list[tuple[str, str, _Mean | None]] = [("zero-mean heads", "attention", None)]
    if state.bias:
        laws.append((f"biased heads, c = {state.bias:g}", "biased", _Mean(state.bias)))
    for name, role, law in laws:
        try:
            with np.errstate(all="ignore"):
                learner = Learner(target, state.n_keys, "attention", features, _law(law))
                learner.errors(np.array(samples, dtype=np.float64), state.ridge, noise)
                problem = learner.problem
                gammas = implicit_ridges(problem, np.array(samples, dtype=np.float64), learner.features, state.ridge)
        except (ValueError, ArithmeticError) as error:
            answer.note(f"{name}: {error}")
            continue
        written = "" if law is None else f", {_written(law)}"
        answer.lines += [
            f"learner = Learner(target, {state.n_keys}, 'attention', features{written})",
            "learner.errors(np.array(n, dtype=float), ridge, noise)  # takes a spectrum that is fine enough",
            "problem = learner.problem",
            "gammas = implicit_ridges(problem, np.array(n, dtype=float), features, ridge)",
            "fraction = problem.eigenvalues / (problem.eigenvalues + gammas[:, None])",
            f"shown[{name!r}] = fraction @ problem.powers / problem.powers.sum()",
        ]
        fraction = problem.eigenvalues / (problem.eigenvalues + gammas[:, None])
        share = fraction @ problem.powers / problem.powers.sum()
        learned.append(Series(name, samples, share.tolist(), look="line", role=role))
        chosen = min(state.n_samples, state.most_samples)
        rows = _level_rows(state, law, float(gammas[samples.index(chosen)]))
        counts = np.array([row["eigenfunctions"] for row in rows])
        hover = [f"degrees {row['degrees']}: {row['eigenfunctions']:,} eigenfunctions, {row['of the target']:.1%} of "
                 f"the target, {row['learned']:.0%} learned at n = {chosen:,}" for row in rows]  # fmt: skip
        values = [row["eigenvalue"] for row in rows]
        levels.append(Series(name, (np.cumsum(counts) - counts + 1).tolist(), values, role=role, hover=hover))
        loaded = [row for k, row in enumerate(rows) if k < 8 or row["of the target"] > 1e-3][:24]
        kind = "degrees in query and keys" if law is None else "Young diagrams (a, b) of the rotations"
        title = f"{name}: where the target sits, and what is learned at n = {chosen:,}"
        tables.append(Table(f"levels-{role}", title, loaded, note=f"Levels by {kind}, largest eigenvalue first."))
    chart = log_chart("levels", "Levels of the kernel", "rank of their first eigenfunction", "eigenvalue", levels)
    parts = Chart("learned", "Share of the target that is learned", "training sets n", "Σ c² λ/(λ+γ) / Σ c²", learned,
                  x_log=True, marks={"all": 1.0})  # fmt: skip
    answer.blocks = [chart, *tables, parts]
    return answer


_target_levels = lru_cache(maxsize=64)(target_levels)


def _level_rows(state: ExploreState, law: _Mean | None, gamma: float) -> list[dict[str, Any]]:
    """Levels up to above the target's degree, with the part of the target in each and the part that is learned."""
    target = read_target(state.target, state.dim)
    degree = max(4, max(target.degrees) + 1)
    bias = bias_of(_law(law), state.dim)
    found, powers = _target_levels(target, state.n_keys, bias, min(degree, MAX_BIASED_DEGREE) if law else degree)
    total = max(float(powers.sum()), 1e-300)
    return [
        {
            "degrees": str(tuple(degrees)),
            "eigenvalue": value,
            "eigenfunctions": int(count),
            "of the target": power / total,
            "learned": value / (value + gamma),
        }
        for degrees, value, count, power in zip(
            found.degrees.tolist(), found.eigenvalues.tolist(), found.multiplicities, powers.tolist(), strict=True
        )
    ]


def law(state: ExploreState, results: Results) -> View:
    """The error against the strength of the mean, at three numbers of samples."""
    answer = View("The law of the heads")
    if state.dim < 2:
        answer.note("there is no mean to speak of in one dimension: choose d of 2 at least.")
        return answer
    samples = tuple(sorted({max(2, state.n_samples // 10), state.n_samples, min(10 * state.n_samples, 10**7)}))
    noise = state.noise * state.variance
    base = (("n_keys", state.n_keys), ("ridge", state.ridge), ("noise", _Noise(noise)))
    asks = [Ask(f"c = {c:g}", "learning_curve", (*base, ("law", _Mean(c)))) for c in (0.0, *MEANS)]
    found = _ask_all(state, answer, asks, samples)
    series, roles, rows = [], ("mlp", "kernel", "ball"), []
    for k, n in enumerate(samples):
        pairs = [(float(s.name[4:]), s.y[k]) for s in found if len(s.y) > k]
        x, y = [c for c, _ in pairs], [error for _, error in pairs]
        series.append(Series(f"n = {n:,}", x, y, look="line", role=roles[k]))
        if n == state.n_samples and pairs:
            zero = pairs[0][1]
            rows = [{"mean c": c, "error": error, "over that of c = 0": error / zero,
                     "the mean": "" if c == 0 else "helps" if error < zero else "is a handicap"}
                    for c, error in pairs]  # fmt: skip
    for c, (role, sweep) in _law_sweeps(state).items():
        curve = _known(sweep, results)
        if not curve.runs.size:
            continue
        points = _points(f"measured, n = {state.n_samples:,}", role, Curve(np.array([c]), curve.runs), noise)
        if points is not None:
            series.append(points)
    answer.blocks = [
        Chart("law", state.describe(), "mean c of the heads, times the identity", "test error, noise included", series,
              y_log=True, note=_deviation(state)),
        Table("strengths", f"n = {state.n_samples:,}", rows),
    ]  # fmt: skip
    return answer


def rotation(state: ExploreState, results: Results) -> View:
    """The correlation turned away from the identity, for zero-mean and biased heads."""
    answer = View("Rotation")
    powers = {f"corr^{power} * token".replace("^1 ", " "): power for power in (1, 2, 3)}
    power = powers.get(state.text)
    if power is None or state.dim < 2:
        answer.note(
            "rotation needs d of 2 at least and a target corr^q * token, q up to 3: choose the family correlation."
        )
        return answer
    answer.lines = [
        *_preamble(state, [state.n_samples]),
        "",
        "def error(text, **law):",
        f"    target = parse_target(text, dim={state.dim}).target",
        f"    variance = target_variance(target, n_keys={state.n_keys})",
        f"    noise = {state.noise!r} * variance",
        f"    settings = {{'n_keys': {state.n_keys}, 'ridge': {state.ridge!r}, 'noise': noise}}",
        "    return kh.theory.learning_curve(target, n, **settings, **law)[0] / variance",
        "",
        "shown = {",
    ]
    series = []
    laws: list[tuple[str, str, Any]] = [("zero-mean heads", "attention", ())]
    if state.bias:
        laws.append((f"biased heads, c = {state.bias:g}", "biased", (("law", _Mean(state.bias)),)))
    for name, role, law in laws:
        x, y = [], []
        for angle in ANGLES if power == 1 else ANGLES[::2]:  # higher powers take seconds each
            text = f"rotated({angle:g})^{power} * token" if angle else state.text
            variance = _variance(text, state.dim, state.n_keys)
            base = (("n_keys", state.n_keys), ("ridge", state.ridge), ("noise", _Noise(state.noise * variance)))
            found, why = _soon(Ask(name, "learning_curve", (*base, *law)), text, state.dim, (state.n_samples,))
            answer.note(why and f"{name}, γ = {angle:g}: {why}")
            if found:
                x.append(angle)
                y.append(found[0] / variance)
                written = "".join(f", law={value!r}" for _, value in law)
                answer.lines.append(f"    ({name!r}, {angle!r}): error({text!r}{written}),")
        series.append(Series(name, x, y, look="line", role=role))
    answer.lines.append("}")
    answer.blocks = [
        Chart("rotation", f"<x_0, S x_i> in the place of <x_0, x_i>, n = {state.n_samples:,}",
              "γ: S = (1−γ) I + γ P, P a random rotation", "test error over Var f*", series, y_log=True)
    ]  # fmt: skip
    return answer


VIEW_OF: dict[str, Callable[[ExploreState, Results], View]] = {
    "curves": curves, "needs": needs, "surface": surface, "spectrum": spectrum, "law": law, "rotation": rotation,
}  # fmt: skip


# ---- what is measured ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def sweeps(state: ExploreState) -> dict[str, tuple[str, CellSweep]]:
    """The cells behind the points of the curves, by name: biased heads where c = 1, the MLP of infinite width."""
    models: list[tuple[str, str, int | None]] = [
        ("attention, ∞ heads, measured", "attention", None),
        (f"attention, {state.n_heads} heads, measured", "attention", state.n_heads),
        ("MLP, ∞ wide, measured", "mlp", None),
    ]
    if state.bias == 1.0 and state.dim > 1:
        models.insert(2, ("biased, c = 1, ∞ heads, measured", "biased", None))
    rest = (state.ridge, state.noise)
    found = {}
    for name, model, heads in models:
        parts = [c.sweep(model, state.dim, state.n_keys, state.text, heads, *rest) for c in (QUICK, BETWEEN)]
        found[name] = (model, _joined(parts))
    return found


def _joined(parts: list[CellSweep]) -> CellSweep:
    """Sweeps over different sizes as runs of their own, each cell at its place."""
    x = sorted({n for part in parts for n in part.x})
    return CellSweep(tuple(x), tuple(run for part in parts for run in part.runs))


def _law_sweeps(state: ExploreState) -> dict[float, tuple[str, CellSweep]]:
    config = replace(QUICK, sizes=(state.n_samples,), repetitions=(PICK_REPETITIONS,))
    make = partial(config.sweep, dim=state.dim, n_keys=state.n_keys, target=state.text, heads=None)
    pairs = ((0.0, "attention"), (1.0, "biased")) if state.dim > 1 else ()
    return {c: (model, make(model, ridge=state.ridge, noise=state.noise)) for c, model in pairs}


def _picked(state: ExploreState, results: Results) -> dict[tuple[int, int], Curve]:
    found = {pick: _known(sweep, results) for pick, sweep in _pick_sweeps(state).items()}
    return {pick: curve for pick, curve in found.items() if np.isfinite(curve.runs).sum() > 1}


def _pick_sweeps(state: ExploreState) -> dict[tuple[int, int], CellSweep]:
    rest = (state.ridge, state.noise)
    return {
        (n, m): replace(QUICK, sizes=(n,), repetitions=(PICK_REPETITIONS,)).sweep(
            "attention", state.dim, state.n_keys, state.text, m, *rest
        )
        for n, m in state.picks
    }


def cells_of(state: ExploreState) -> list[Cell]:
    """What measuring this view asks for."""
    found: Iterable[CellSweep] = ()
    if state.view == "curves":
        found = [sweep for _, sweep in sweeps(state).values()]
    elif state.view == "surface":
        found = _pick_sweeps(state).values()
    elif state.view == "law":
        found = [sweep for _, sweep in _law_sweeps(state).values()]
    return [cell for sweep in found for cell in sweep.cells]


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
