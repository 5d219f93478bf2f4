"""What the page of `keyhole explore` shows: blocks to draw, and the lines that compute them.

A view is a function of the settings and of what is measured. Every number of the theory on it is an
`Ask`, which is both answered here and written out as a line of Python.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np

from keyhole.attention.features import attention_features
from keyhole.attention.heads import GaussianHeads
from keyhole.lab.explore.fits import (
    REPETITIONS,
    MeasuredLayer,
    MeasuredPoint,
    MeasuredTask,
    Results,
    Run,
    runs_of,
)
from keyhole.lab.explore.state import ExploreState, spaced
from keyhole.lab.report.document import Chart, HeatMap, Look, Row, Series, Table, bars
from keyhole.lab.report.html import number
from keyhole.lab.theory_answers import (
    REFUSALS,
    OutOfTimeError,
    Question,
    read_notation,
    reason_of,
    time_limit,
)
from keyhole.theory.conditional import SampleSpectrum
from keyhole.theory.targets import sphere_sets
from keyhole.theory.tasks import TASKS

MEANS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)
"""Means of the heads that are compared."""
ANGLES = (0.0, 0.25, 0.5, 0.75, 1.0)
PICK_REPETITIONS = 4
"""At a place of the surface, and for each mean of the heads."""
LEAST_RIDGE = 1e-9
"""Of a layer that is fitted: a smaller penalty is lost in rounding."""
MATTERS = 1.1
"""Heads have stopped to matter where the error is below this many times that of infinitely many."""
TASK_SIZES = (50, 100, 200, 400)
TASK_REPETITIONS = 3
TASK_LEVEL = 0.1
"""A task is learned where the error is at most so much Var y above its floor."""
LEAST_DRAWN = 1e-4
"""Errors below are drawn there: several learners are exact to rounding."""


# ---- what is asked of the theory -----------------------------------------------------------------

Kind = Literal["curve", "samples", "heads", "paper bound", "kernel bound"]


@dataclass(frozen=True)
class Ask:
    """A number or a curve that a view asks the theory for, and how it is drawn.

    ``error`` is what samples and heads are to reach. ``over`` divides a curve where its target is
    not that of the page.
    """

    name: str
    kind: Kind
    question: Question
    error: float = 0.0
    over: float | None = None
    role: str = ""
    look: Look = "line"

    def expression(self, samples: str) -> str:
        """As Python, by the names that `View.begin` defines."""
        question = self.question
        heads = []
        if question.mean:
            heads.append(f"heads=kh.GaussianHeads(mean={question.mean!r})")
        if question.activation != "relu":
            heads.append(f"activation={question.activation!r}")
        n_keys = f"n_keys={question.n_keys}"
        if self.kind in ("paper bound", "kernel bound"):  # samples enter as 1/√n
            call = f"kernel_risk_bound(target, 1, {n_keys})"
            if self.kind == "paper bound":
                call = f"risk_bound(target, 1, {question.n_heads})"
            bound = f"(bound := kh.theory.{call})"
            return f"{bound}.approximation + bound.estimation / np.sqrt({samples})"
        if self.kind == "heads":
            parts = ["target", n_keys, "error=variance / 10", *heads]
            return f"kh.theory.heads_predicted({', '.join(parts)})"
        model = [] if question.model == "attention" else [f"model={question.model!r}"]
        if self.kind == "samples":
            parts = ["target", n_keys, "error=variance / 10", "noise=noise", *model, *heads]
            return f"kh.theory.samples_needed({', '.join(parts)})"
        n_heads = []
        if math.isfinite(question.n_heads):
            n_heads.append(f"n_heads={question.n_heads}")
        ridge = f"ridge={question.ridge!r}"
        parts = ["target", samples, n_keys, ridge, "noise=noise", *n_heads, *model, *heads]
        curve = f"kh.theory.learning_curve({', '.join(parts)})"
        return curve if self.over is None else f"{curve} / variance"

    def numbers(self, samples: tuple[int, ...]) -> np.ndarray:
        """What the theory says: a number for each of the samples, or one for all."""
        if self.kind == "curve":
            curve = self.question.curve(samples)
            return curve if self.over is None else curve / self.over
        if self.kind == "samples":
            return np.array([self.question.samples_needed(self.error)])
        if self.kind == "heads":
            return np.array([self.question.heads_predicted(self.error)])
        bound = self.question.bound(self.kind.removesuffix(" bound"), 1)
        return np.asarray(bound.approximation + bound.estimation / np.sqrt(samples))


@lru_cache(maxsize=1024)
def answered(ask: Ask, samples: tuple[int, ...]) -> tuple[tuple[float, ...], str]:
    """The numbers of an ask, for the sizes that the theory speaks of, and why not for more."""
    refusal = ""
    while samples:
        try:
            return tuple(ask.numbers(samples).tolist()), refusal
        except OutOfTimeError:
            raise  # which is no answer, and not to be remembered
        except REFUSALS as error:
            refusal = reason_of(error)
        # most refusals are of the largest sizes: leave out a quarter, and give up at four
        if len(samples) <= 4:
            break
        samples = samples[: 3 * len(samples) // 4]
    return (), refusal


@dataclass
class View:
    """A view: what is drawn, what is to be said, and the lines that compute it."""

    title: str
    end: float = math.inf
    """When the answers of the theory have to be there, by the monotonic clock."""
    blocks: list[Chart | HeatMap | Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    """Notes on what was left out because time was up."""
    lines: list[str] = field(default_factory=list)

    def begin(self, state: ExploreState, samples: Iterable[int], *imports: str) -> None:
        """The lines that come first."""
        self.lines += [
            "import math",
            "import numpy as np",
            "import keyhole as kh",
            "from keyhole.theory.harmonics import target_variance",
            *imports,
            "from keyhole.theory.notation import parse_target",
            "",
            f"n = {list(samples)}",
            "shown = {}",
            *_target_lines(state.question, state.noise),
        ]

    def within(self, name: str, answer: Callable[[], Any]) -> Any:
        """What ``answer`` returns; None where the theory refuses or time is up, with a note."""
        left = self.end - time.monotonic()
        try:
            if left <= 0:
                raise OutOfTimeError("the time was up before it was asked. Look again.")
            with time_limit(left), np.errstate(all="ignore"):
                return answer()
        except OutOfTimeError as error:
            self.late.append(f"{name}: {error}")
            return None
        except REFUSALS as error:
            self.note(f"{name}: {reason_of(error)}")
            return None

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)

    def ask(
        self, state: ExploreState, asks: Iterable[Ask], samples: tuple[int, ...]
    ) -> dict[str, Series]:
        """What the theory says, as series by their names; the lines for it are added."""
        # heads with a mean come last: they may take all the time there is
        asks = list(asks)
        answers = {}
        for ask in sorted(asks, key=lambda ask: ask.question.mean != 0):
            answers[ask] = self.within(ask.name, partial(answered, ask, samples))

        self.begin(state, samples)
        series = {}
        target = state.target  # that the lines have defined last
        for ask in asks:
            numbers, refusal = answers[ask] or ((), "")
            if refusal:
                self.note(f"{ask.name}: {refusal}")
            if not numbers:
                continue

            # the lines; the theory may have spoken of the first sizes only
            if ask.question.target != target:
                target = ask.question.target
                self.lines += _target_lines(ask.question, state.noise)
            n_sizes = len(numbers)
            sizes = "n" if n_sizes == len(samples) else f"n[:{n_sizes}]"
            self.lines.append(f"shown[{ask.name!r}] = {ask.expression(sizes)}")
            series[ask.name] = Series(
                name=ask.name, x=samples[:n_sizes], y=numbers, look=ask.look, role=ask.role
            )
        return series


def _target_lines(question: Question, noise: float) -> list[str]:
    """The lines that define a target, its variance, and the variance of the noise."""
    return [
        f"target = parse_target({question.target!r}, dim={question.dim}).target",
        f"variance = target_variance(target, n_keys={question.n_keys})",
        f"noise = {noise!r} * variance",
    ]


# ---- what is measured ----------------------------------------------------------------------------


def measured_curves(state: ExploreState) -> dict[Any, tuple[str, list[Run]]]:
    """Role and runs of what measuring a view asks for.

    By name in the curves, by place on the surface, by mean, by task and learner.
    """
    if state.view == "tasks":
        return _task_curves(state.tasks)
    if state.activation != "relu":  # layers are fitted with ReLU
        return {}

    def runs(
        repetitions: dict[int, int], model: str, n_heads: int | None, mean: float
    ) -> list[Run]:
        layer = MeasuredLayer(
            model=model,
            target=state.text,
            dim=state.dim,
            n_keys=state.n_keys,
            n_heads=n_heads,
            mean=mean,
            ridge=state.ridge,
            noise=state.noise,
        )
        return runs_of(layer, repetitions, state.n_keys)

    if state.view == "surface":
        return {
            (n, m): ("attention", runs({n: PICK_REPETITIONS}, "attention", m, 0.0))
            for n, m in state.picks
        }
    if state.view == "heads" and state.dim > 1:
        at_n = {state.n_samples: PICK_REPETITIONS}
        return {c: ("biased", runs(at_n, "attention", None, c)) for c in MEANS}
    if state.view != "curves":
        return {}

    # the curves: attention of infinitely and finitely many heads, biased heads, MLP
    by_name = {
        "attention, ∞ heads, measured": (
            "attention",
            runs(REPETITIONS, "attention", None, 0.0),
        ),
        f"attention, {state.n_heads} heads, measured": (
            "attention",
            runs(REPETITIONS, "attention", state.n_heads, 0.0),
        ),
    }
    if state.bias and state.dim > 1:
        name = f"biased, c = {state.bias:g}, ∞ heads, measured"
        by_name[name] = ("biased", runs(REPETITIONS, "attention", None, state.bias))
    by_name["MLP, ∞ wide, measured"] = ("mlp", runs(REPETITIONS, "mlp", None, 0.0))
    return by_name


def _task_curves(tasks: Sequence[str]) -> dict[Any, tuple[str, list[Run]]]:
    """Learners in closed form on tasks of the literature."""
    from keyhole.lab.task_learners import CLOSED_FORM, is_defined

    roles = {"relu": "attention", "relu-biased": "biased"}  # the colours of the other views
    repetitions = dict.fromkeys(TASK_SIZES, TASK_REPETITIONS)
    by_name = {}
    for task in tasks:
        for learner in CLOSED_FORM:
            if is_defined(learner, task):
                runs = runs_of(MeasuredTask(task, learner), repetitions)
                by_name[task, learner] = (roles.get(learner, learner), runs)
    return by_name


def runs_of_view(state: ExploreState) -> list[Run]:
    """All runs that measuring a view asks for, in the order in which they are fitted.

    First repetitions of all curves come first, so that points appear everywhere.
    """
    runs = [run for _, curve in measured_curves(state).values() for run in curve]
    return sorted(runs, key=lambda run: run.repetition)


def refusal_to_measure(state: ExploreState) -> str:
    """Why a view cannot be measured; empty where it can."""
    is_measured = state.view in ("curves", "surface", "heads", "tasks")
    if not is_measured or (state.view == "heads" and state.dim < 2):
        return "there is nothing to measure here"
    if state.view == "tasks":  # whose learners choose their penalties
        return ""
    if state.activation != "relu":
        return "layers are fitted with relu here: choose it to measure"
    if state.view == "surface" and not state.picks:
        return "click places on the surface first"
    if state.ridge < LEAST_RIDGE:
        return f"fits need a penalty λ of {LEAST_RIDGE:g} at least"
    if not runs_of_view(state):
        return "these sets have too many keys to be fitted here: lower n or N"
    return ""


def _drawn_points(
    name: str,
    role: str,
    points: Sequence[MeasuredPoint],
    noise: float,
    x: Sequence[float] | None = None,
) -> Series | None:
    """Points with error bars, at n or at other places; None where there are none."""
    if not points:
        return None
    places = [float(point.n) for point in points] if x is None else list(x)
    series = bars(
        name,
        places,
        [point.error + noise for point in points],
        [point.standard_error for point in points],
        role=role,
        hover=[f"{point.repetitions} repetitions" for point in points],
        floor=noise,
    )
    return _apart(series)


def _apart(series: Series) -> Series:
    """The points with missing values between them: no line joins what is measured apart."""

    def interleaved(values: Sequence[Any], between: Any) -> list[Any]:
        return [entry for value in values for entry in (value, between)][:-1]

    return replace(
        series,
        x=interleaved(series.x, math.nan),
        y=interleaved(series.y, math.nan),
        low=interleaved(series.low or (), math.nan),
        high=interleaved(series.high or (), math.nan),
        hover=interleaved(series.hover or (), ""),
    )


def _tolerance(state: ExploreState) -> str:
    """How far points and curves may be apart: theory is asymptotic in the eigenfunctions."""
    tolerance = 0.20 if state.dim < 8 else 0.12
    return (
        "Points are means over repetitions, bars one standard error; the curves are not fitted to "
        f"them. Most settings of d = {state.dim} are predicted within {tolerance:.0%}, "
        "those of few heads worse."
    )


# ---- the views -----------------------------------------------------------------------------------


def _log_chart(
    name: str, title: str, x_label: str, y_label: str, series: Sequence[Series], **more: Any
) -> Chart:
    """A chart with logarithmic axes."""
    return Chart(
        name=name,
        title=title,
        x_label=x_label,
        y_label=y_label,
        series=series,
        x_log=True,
        y_log=True,
        **more,
    )


def curves(state: ExploreState, results: Results, view: View) -> None:
    """Learning curves, with measured points on them."""
    noise = state.noise_variance

    # what the theory predicts, and its bounds
    predicted = list(view.ask(state, _curve_asks(state), state.sizes).values())
    predicted += _drawn_curve(view, state)

    # what is measured
    measured = []
    for name, (role, runs) in measured_curves(state).items():
        points = _drawn_points(name, role, results.points(runs), noise)
        if points is not None:
            measured.append(points)

    # curves and points on one chart, without the bounds
    marks = {"Var f*": state.variance + noise}
    if noise:
        marks["noise"] = noise
    chart = _log_chart(
        "curves",
        state.describe(),
        "training sets n",
        "test error, noise included",
        [*(series for series in predicted if series.look != "thin"), *measured],
        marks=marks,
        note=_tolerance(state),
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
    bounds = _log_chart(
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


def _curve_asks(state: ExploreState) -> list[Ask]:
    """Curves of attention, biased heads and MLP, of infinite and finite width; and two bounds."""

    def pair(role: str, name: str, question: Question, unit: str, width: int) -> list[Ask]:
        finite = replace(question, n_heads=state.n_heads)
        return [
            Ask(f"{name}, ∞ {unit}", "curve", question, role=role),
            Ask(f"{name}, {width} {unit}", "curve", finite, role=role, look="dashed"),
        ]

    zero_mean = state.question
    asks = pair("attention", "attention", zero_mean, "heads", state.n_heads)
    # an MLP with as many features as the attention layer
    of_mlp = zero_mean.to("mlp")
    of_mlp_pair = pair("mlp", "MLP", of_mlp, "wide", state.n_heads * (state.dim + 1))
    if state.bias:
        biased = replace(zero_mean, mean=state.bias)
        asks += pair("biased", f"biased, c = {state.bias:g}", biased, "heads", state.n_heads)
    asks += of_mlp_pair
    # the bounds are for ReLU
    if state.activation != "relu":
        return asks
    few_heads = replace(zero_mean, n_heads=state.n_heads)
    kernel_bound = Ask(
        "bound, ∞ heads (1-Lipschitz loss)", "kernel bound", zero_mean, role="oracle", look="thin"
    )
    paper_bound = Ask(
        f"the paper's bound, {state.n_heads} heads, constant 1",
        "paper bound",
        few_heads,
        role="ridge",
        look="thin",
    )
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


def needs(state: ExploreState, results: Results, view: View) -> None:
    """Samples and heads that suffice for a tenth of Var f*."""
    tenth = state.variance / 10
    zero_mean = state.question
    asks = [Ask("samples, attention, ∞ heads", "samples", zero_mean, tenth)]
    if state.bias:
        biased = replace(zero_mean, mean=state.bias)
        asks.append(Ask(f"samples, biased, c = {state.bias:g}", "samples", biased, tenth))
    of_mlp = zero_mean.to("mlp")
    asks.append(Ask("samples, MLP, ∞ wide", "samples", of_mlp, tenth))
    asks.append(Ask("heads, any number of samples", "heads", zero_mean, tenth))

    # one number each, so one "size" is asked for
    series_by_name = view.ask(state, asks, (0,))
    rows: list[Row] = [
        {"to have a tenth of Var f* left": name, "number": series.y[0]}
        for name, series in series_by_name.items()
    ]
    view.blocks = [Table("needs", "What suffices, with the best penalty", rows)]


def surface(state: ExploreState, results: Results, view: View) -> None:
    """The error over samples and heads, and the line beyond which more heads do not help."""
    sizes = spaced(10, state.most_samples, 13)
    heads = spaced(1, 2000, 12)

    # a row of the surface per number of heads, the last for infinitely many; where the theory
    # refuses the largest sizes of a row, the surface ends before them
    asks = [_of_heads(state, m) for m in (*heads, math.inf)]
    curves_by_heads = view.ask(state, asks, sizes).values()
    n_sizes = min((len(series.y) for series in curves_by_heads), default=0)
    if len(curves_by_heads) < len(asks) or n_sizes == 0:
        return
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


def _of_heads(state: ExploreState, n_heads: float) -> Ask:
    """The learning curve of so many zero-mean heads."""
    count = "∞" if n_heads == math.inf else n_heads
    return Ask(f"{count} heads", "curve", replace(state.question, n_heads=n_heads))


def _picked_points(
    state: ExploreState, results: Results, sizes: tuple[int, ...], heads: tuple[int, ...]
) -> list[tuple[float, float, str]]:
    """Column, row and words of each place of the surface that is measured."""
    places = []
    for (n_samples, n_heads), (_, runs) in measured_curves(state).items():
        for point in results.points(runs):
            # places between rows and columns, by ratio
            x = float(np.interp(math.log(n_samples), np.log(sizes), range(len(sizes))))
            y = float(np.interp(math.log(n_heads), np.log(heads), range(len(heads))))
            numbers, _ = answered(_of_heads(state, n_heads), (n_samples,))
            predicted = numbers[0] if numbers else None
            words = (
                f"n = {n_samples}, M = {n_heads}: "
                f"measured {number(point.error + state.noise_variance)} ± "
                f"{number(point.standard_error, 2)}, predicted {number(predicted)}"
            )
            places.append((x, y, words))
    return places


def spectrum(state: ExploreState, results: Results, view: View) -> None:
    """Levels of both head distributions, where the target sits in them, and what is learned."""
    view.begin(state, state.sizes, "from keyhole.theory.curves import TheoryLayer, Learner")
    distributions = {"zero-mean heads": 0.0}
    if state.bias:
        distributions[f"biased heads, c = {state.bias:g}"] = state.bias
    levels = []
    learned = []
    tables = []
    for name, mean in distributions.items():
        question = replace(state.question, mean=mean)
        answer = view.within(name, partial(_spectral, question, state.sizes))
        if answer is None:
            continue
        gammas, shares, all_rows = answer
        gamma = gammas[state.sizes.index(state.chosen)]
        rows = [
            {**row, "learned": row["eigenvalue"] / (row["eigenvalue"] + gamma)} for row in all_rows
        ]

        # the line
        arguments = [str(state.n_keys)]
        if mean:
            arguments.append(f"heads=kh.GaussianHeads(mean={mean!r})")
        if state.activation != "relu":
            arguments.append(f"activation={state.activation!r}")
        learner_line = f"Learner(target, TheoryLayer({', '.join(arguments)}), math.inf)"
        view.lines.append(f"shown[{name!r}] = {learner_line}.learned(n, {state.ridge!r}, noise)[1]")

        # the charts: the share that is learned, and each level at the rank of its first
        # eigenfunction
        role = "biased" if mean else "attention"
        learned.append(Series(name, state.sizes, shares, look="line", role=role))
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
    levels_chart = _log_chart(
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


@lru_cache(maxsize=64)
def _spectral(
    question: Question, sizes: tuple[int, ...]
) -> tuple[list[float], list[float], list[dict[str, Any]]]:
    """γ and the share that is learned at every n, and the levels as rows of a table."""
    gammas, shares = question.learned(sizes)
    _, levels = question.levels()
    total = max(sum(level["target_power"] for level in levels), 1e-300)
    rows = [
        {
            "degrees": str(tuple(level["degrees"])),
            "eigenvalue": level["eigenvalue"],
            "eigenfunctions": int(level["multiplicity"]),
            "of the target": level["target_power"] / total,
        }
        for level in levels
    ]
    return gammas.tolist(), shares.tolist(), rows


def heads(state: ExploreState, results: Results, view: View) -> None:
    """The error against the strength of the mean, at three numbers of samples."""
    if state.dim < 2:
        view.note("there is no mean to speak of in one dimension: choose d of 2 at least.")
        return

    # a tenth of n, n, and ten times n
    fewer = max(2, state.n_samples // 10)
    more = min(10 * state.n_samples, 10**7)
    samples = tuple(sorted({fewer, state.n_samples, more}))
    asks = {c: Ask(f"c = {c:g}", "curve", replace(state.question, mean=c)) for c in MEANS}
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
    points_of_means = {}
    for c, (_, runs) in measured_curves(state).items():
        for point in results.points(runs):
            points_of_means[c] = point
    measured = _drawn_points(
        f"measured, n = {state.n_samples:,}",
        "biased",
        list(points_of_means.values()),
        state.noise_variance,
        x=list(points_of_means),
    )
    if measured is not None:
        series.append(measured)
    chart = Chart(
        name="heads",
        title=state.describe(),
        x_label="mean c of the heads, times the identity",
        y_label="test error, noise included",
        series=series,
        y_log=True,
        note=_tolerance(state),
    )
    view.blocks = [chart, Table("strengths", f"n = {state.n_samples:,}", rows)]


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


def rotation(state: ExploreState, results: Results, view: View) -> None:
    """The correlation turned away from the identity, for zero-mean and biased heads."""
    powers = {"corr * token": 1, "corr^2 * token": 2, "corr^3 * token": 3}
    power = powers.get(state.text)
    if power is None or state.dim < 2:
        view.note(
            "rotation needs d of 2 at least and a target corr^q * token, q up to 3: choose the "
            "family correlation."
        )
        return

    # every angle for every head distribution; higher powers take seconds each, so fewer angles
    distributions = {"zero-mean heads": 0.0}
    if state.bias:
        distributions[f"biased heads, c = {state.bias:g}"] = state.bias
    asks: dict[tuple[str, float], Ask] = {}
    for angle in ANGLES if power == 1 else ANGLES[::2]:
        target = f"rotated({angle:g})^{power} * token" if angle else state.text
        turned = replace(state, target=target)
        for name, mean in distributions.items():
            asks[name, angle] = Ask(
                name=f"{name}, γ = {angle:g}",
                kind="curve",
                question=replace(turned.question, mean=mean),
                over=turned.variance,
            )
    series_by_name = view.ask(state, asks.values(), (state.n_samples,))

    # a curve over the angles per head distribution
    series = []
    for name, mean in distributions.items():
        errors = {}
        for (owner, angle), ask in asks.items():
            at_angle = series_by_name.get(ask.name)
            if owner == name and at_angle is not None:
                errors[angle] = at_angle.y[0]
        role = "biased" if mean else "attention"
        series.append(Series(name, list(errors), list(errors.values()), look="line", role=role))
    chart = Chart(
        name="rotation",
        title=f"<x_0, S x_i> instead of <x_0, x_i>, n = {state.n_samples:,}",
        x_label="γ: S = (1−γ) I + γ P, P a random rotation",
        y_label="test error over Var f*",
        series=series,
        y_log=True,
    )
    view.blocks = [chart]


def tasks(state: ExploreState, results: Results, view: View) -> None:
    """Learning curves of tasks of the literature, measured for learners in closed form."""
    from keyhole.lab.task_learners import NAMES

    view.lines = ["import keyhole as kh", "", "shown = {}"]
    curves_of_tasks = measured_curves(state)
    for name in state.tasks:
        task = TASKS[name]
        series = []
        for (owner, learner), (role, runs) in curves_of_tasks.items():
            points = [] if owner != name else results.points(runs)
            if points:
                series.append(_task_series(NAMES[learner], role, points))
        chart = _log_chart(
            f"task-{name}",
            f"{name}: {task.formula}",
            "training sets n",
            "test error over Var y",
            series,
            marks={"learned": task.floor + TASK_LEVEL},
            note=f"{task.finding} ({task.source})",
        )
        view.blocks.append(chart)
        view.lines.append(f"X, y = kh.targets.{task!r}.draw(400, seed=0)")
        if not series:
            view.note(f"{name}: nothing is measured yet. Press measure.")


def _task_series(name: str, role: str, points: Sequence[MeasuredPoint]) -> Series:
    """The curve of a learner; errors too small to be drawn stand at the lower end."""
    return bars(
        name,
        [float(point.n) for point in points],
        [max(point.error, LEAST_DRAWN) for point in points],
        [point.standard_error for point in points],
        role=role,
        floor=LEAST_DRAWN,
    )


TITLES: dict[str, tuple[str, Callable[[ExploreState, Results, View], None]]] = {
    "curves": ("Learning curves", curves),
    "needs": ("What suffices", needs),
    "surface": ("Samples and heads", surface),
    "spectrum": ("Spectrum", spectrum),
    "heads": ("The head distribution", heads),
    "rotation": ("Rotation", rotation),
    "tasks": ("Tasks of the literature", tasks),
}


def show(state: ExploreState, results: Results, seconds: float = math.inf) -> View:
    """The view of a state, with what is measured, and what the theory says within some seconds."""
    title, fill = TITLES[state.view]
    view = View(title, end=time.monotonic() + seconds)
    fill(state, results, view)
    return view
