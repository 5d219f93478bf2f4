"""What a lens measured, and the answers that follow from it in plain words.

The rules depend on no particular data set.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from keyhole._files import write_whole
from keyhole.estimators.scores import ClassMeasures

Says = Literal["yes", "perhaps", "no", "not tested"]


@dataclass(frozen=True)
class LensConfig:
    """Settings of a lens: ``kind`` is "regression" or "classification"."""

    kind: str
    budget: float = 60.0  # seconds for everything, predicted from sizes
    n_heads: int = 256  # heads of the finite layers
    activation: str = "auto"
    pooling: str = "auto"
    max_samples: int = 2000  # samples used at most
    steps: int = 100  # most steps of a learned head distribution; 0 learns none
    seed: int = 0


@dataclass(eq=False)
class Measured:
    """Held-out losses of a learner, by the number of samples it was given, fold by fold.

    ``family`` is "constant", "pooled" or "attention". ``distribution`` is what the heads of
    attention are drawn from, by fold if it was learned; ``heads`` is their number. A learner also
    has losses on the smaller numbers of samples that other learners were given.
    """

    name: str
    family: str
    role: str
    distribution: Any = None
    heads: float = math.nan
    seconds: float = 0.0  # predicted
    line: str = ""  # the estimator that fits it, as Python to copy; none where keyhole has none
    at: dict[int, dict[int, Float[np.ndarray, " r"]]] = field(default_factory=dict, repr=False)
    # of classes: AUC, log-loss and held-out samples of each fold, of all samples it was given
    class_measures: dict[int, tuple[ClassMeasures, int]] = field(default_factory=dict, repr=False)

    def mean_measure(self, name: Literal["auc", "log_loss"]) -> float:
        """A measure of classes, the mean over folds by their held-out samples; NaN without any."""
        values = []
        counts = []
        for measures, count in self.class_measures.values():
            value = getattr(measures, name)
            if math.isfinite(value):
                values.append(value)
                counts.append(count)
        if not values:
            return math.nan
        return float(np.average(values, weights=counts))

    @property
    def size(self) -> int:
        """Samples that it was given."""
        return max(self.at, default=0)

    @property
    def losses(self) -> dict[int, Float[np.ndarray, " r"]]:
        """Losses of the folds of all samples that it was given."""
        return self.at.get(self.size, {})

    @property
    def error(self) -> float:
        """Mean loss over all held-out samples."""
        if not self.losses:
            return math.nan
        return float(np.concatenate(list(self.losses.values())).mean())

    @property
    def uncertainty(self) -> float:
        """Standard error of `error`: over samples, or over folds where that is larger."""
        if not self.losses:
            return math.nan
        return standard_error(list(self.losses.values()))


@dataclass(frozen=True)
class Difference:
    """How much lower one learner's error is than another's, on the same samples."""

    gain: float
    error: float
    base: float
    size: int = 0  # samples that both were given

    @property
    def z(self) -> float:
        """The gain in standard errors."""
        if self.error > 0:
            return self.gain / self.error
        if self.gain:
            return math.copysign(math.inf, self.gain)
        return 0.0

    @property
    def share(self) -> float:
        """The gain as a share of the error it is a gain on."""
        return self.gain / self.base if self.base > 0 else 0.0

    @property
    def better(self) -> float:
        """The error that is left, on the samples that both learners have."""
        return self.base - self.gain


def standard_error(parts: list[Float[np.ndarray, " _"]]) -> float:
    """Standard error of the mean of all entries.

    From the spread of the entries; or, if there are three parts or more, from the spread of the
    parts' means where that is larger.
    """
    joined = np.concatenate(parts)
    if len(joined) > 1:
        over_entries = float(joined.std(ddof=1) / np.sqrt(len(joined)))
    else:
        over_entries = math.inf
    if len(parts) < 3:
        return over_entries
    means = np.array([part.mean() for part in parts])
    over_parts = float(means.std(ddof=1) / np.sqrt(len(parts)))
    return max(over_entries, over_parts)


def difference(worse: Measured, better: Measured) -> Difference:
    """Error of ``worse`` minus error of ``better``, paired sample by sample.

    Over the largest number of samples, and the folds, that both have.
    """
    size = max((s for s in worse.at if s in better.at), default=0)
    folds = [k for k in worse.at.get(size, {}) if k in better.at[size]]
    if not folds:
        return Difference(gain=0.0, error=math.inf, base=math.nan)
    worse_losses = [worse.at[size][k] for k in folds]
    gains = [worse.at[size][k] - better.at[size][k] for k in folds]
    return Difference(
        gain=float(np.concatenate(gains).mean()),
        error=standard_error(gains),
        base=float(np.concatenate(worse_losses).mean()),
        size=size,
    )


@dataclass(frozen=True)
class LensAnswer:
    """A question, what the data says, in a word and in a sentence, and the numbers behind it."""

    question: str
    says: Says
    sentence: str
    numbers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HeldOutCurve:
    """Held-out error against the number of training samples.

    On the same held-out samples throughout.
    """

    name: str
    role: str
    sizes: tuple[int, ...]
    losses: tuple[Float[np.ndarray, " r"], ...] = field(repr=False)
    predicted: tuple[float, ...] = ()
    """What theory says at these sizes, from the Gram matrix; nothing for classes and groups."""


@dataclass(frozen=True, eq=False)
class TargetLoading:
    """Eigenvalues of a centred Gram matrix over n, and the target's power.

    The power is given as its share in each direction.
    """

    name: str
    role: str
    eigenvalues: Float[np.ndarray, " k"] = field(repr=False)
    power: Float[np.ndarray, " k"] = field(repr=False)


@dataclass(frozen=True, eq=False)
class TakenApart:
    """A held-out sample, what was said of it, and what each of its keys added to that."""

    row: int  # of the data
    right: bool  # the class that won is its own; of a regression, one of those predicted best
    truth: str
    said: str
    keys: Float[np.ndarray, "k d"] = field(repr=False)
    parts: Float[np.ndarray, " k"] = field(repr=False)
    """Of the score of the class that was said, or of a regression in units of the target."""


@dataclass(eq=False)
class Findings:
    """Everything that was measured, and the answers: print it, or ``save`` it as a report.

    ``table`` has a row per learner, best first. ``answers`` has one answer per question:
    "attention", "query", "data" and "heads". An answer ``says`` "yes", "perhaps", "no" or "not
    tested", and has a ``sentence`` and the numbers behind it.
    """

    config: LensConfig
    description: str
    n_given: int
    n_used: int = 0
    n_train: int = 0
    settings: str = ""
    learners: list[Measured] = field(default_factory=list)
    query: list[Measured] = field(default_factory=list)
    heads: list[Measured] = field(default_factory=list)
    curves: list[HeldOutCurve] = field(default_factory=list)
    spectra: list[TargetLoading] = field(default_factory=list)
    examples: list[TakenApart] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    answers: dict[str, LensAnswer] = field(default_factory=dict)
    cost: float = 0.0  # seconds, predicted
    distribution: Any = None
    names: tuple[str, ...] = ()

    @property
    def measure(self) -> str:
        """What an error is."""
        if self.config.kind == "regression":
            return "share of the target's variance left over"
        return "share of sets put into the wrong class"

    def why_not(self, what: str, otherwise: str) -> str:
        """Why something was not measured."""
        return next((reason for reason in self.skipped if what in reason), otherwise)

    def best(self, family: str) -> Measured | None:
        """The learner of a family with the lowest error."""
        members = [m for m in self.learners if m.family == family and m.losses]
        return min(members, key=self.error_of, default=None)

    @property
    def recommended(self) -> Measured:
        """The learner of the lowest error: the first row of the table."""
        return min((m for m in self.learners if m.losses), key=self.error_of)

    @property
    def recommendation(self) -> str:
        """What to start from: the learner of the lowest error, its error, and its line to copy."""
        best = self.recommended
        row = f"the best row, {best.name} ({with_error(best)})"
        if best.family == "constant":
            return f"{row}: nothing is learned here, so no settings are recommended."
        if best.family == "pooled":
            return f"{row}: no attention. Make a table of pooled rows, and use scikit-learn."
        return f"{row}: {best.line}"

    @property
    def table(self) -> list[dict[str, Any]]:
        """One row per learner, best first.

        Its error and standard error in per cent, R² or AUC and log-loss, and what it was given.
        AUC and log-loss are means over folds; of more than two classes the AUC is the mean over
        classes, one against the rest.
        """
        rows = []
        for m in sorted((m for m in self.learners if m.losses), key=self.error_of):
            row: dict[str, Any] = {
                "learner": m.name,
                "error, %": 100 * m.error,
                "±": 100 * m.uncertainty,
            }
            if self.config.kind == "regression":
                row["R²"] = 1 - m.error
            else:
                row["AUC"] = m.mean_measure("auc")
                row["log-loss"] = m.mean_measure("log_loss")
            row["sets"] = m.size
            row["folds"] = len(m.losses)
            row["predicted seconds"] = round(m.seconds, 2)
            rows.append(row)
        return rows

    def as_data(self) -> dict[str, Any]:
        """Everything, as plain data for JSON."""
        answers = self.answers.items()
        curves = [(c, forecast(c, self.config.seed)) for c in self.curves]
        return {
            "data": self.description,
            "task": self.config.kind,
            "settings": self.settings,
            "recommendation": self.recommendation,
            "error": self.measure,
            "learners": self.table,
            "answers": {
                name: {"says": a.says, "sentence": a.sentence, "numbers": a.numbers}
                for name, a in answers
            },
            "learning_curves": [
                {
                    "learner": c.name,
                    "n": list(c.sizes),
                    "error": [float(x.mean()) for x in c.losses],
                    "predicted": list(c.predicted),
                    "forecast": None if ahead is None else asdict(ahead),
                }
                for c, ahead in curves
            ],
            "heads": [
                {"heads": m.heads if m.heads < math.inf else "inf", "error": m.error}
                for m in self.heads
            ],
            "skipped": self.skipped,
            "predicted_seconds": self.cost,
        }

    def save(self, folder: str | Path, *, overwrite: bool = False) -> list[Path]:
        """Write ``report.html`` with its charts, and ``lens.json``, into a folder.

        The page comes first.
        """
        from keyhole.lab.lens.page import report_of
        from keyhole.lab.report.html import as_json, check_lab, write_report

        folder = Path(folder)
        check_lab()
        if not overwrite and (folder / "report.html").exists():
            raise FileExistsError(
                f"a report is not replaced unless asked: {folder} has one. Pass overwrite=True."
            )
        files = write_report(report_of(self), folder)
        return [*files, write_whole(as_json(self.as_data()).encode(), folder / "lens.json")]

    def __str__(self) -> str:
        rows = [
            f"{percent(row['error, %'] / 100):>7} ± {percent(row['±'] / 100):6}  {row['learner']}"
            for row in self.table
        ]
        answers = [f"{a.question} {a.sentence}" for a in self.answers.values()]
        lines = [f"{self.description or 'the data'}: {self.measure}", *rows, *answers]
        lines.append(f"Start from {self.recommendation}")
        return "\n".join(lines)

    def error_of(self, m: Measured) -> float:
        """The error of a learner, estimated for all samples.

        A learner that was given fewer samples is compared with the first learner on these.
        """
        first = self.learners[0]
        return first.error - difference(first, m).gain


CERTAIN = 3.0
"""Standard errors from which a difference counts: not two, because the best of several is compared
with the best of several others."""
POSSIBLE = 1.5  # standard errors from which there may be a difference
WORTH_IT = 0.03  # share of an error below which a gain is not worth mentioning, however certain


def judge(gain: Difference) -> Says:
    """Whether there is a gain of more than 3 % of the error.

    "yes" by more than 3 standard errors, "perhaps" by more than 1.5.
    """
    if not gain.share > WORTH_IT:
        return "no"
    if gain.z > CERTAIN:
        return "yes"
    if gain.z > POSSIBLE:
        return "perhaps"
    return "no"


def answer_all(findings: Findings) -> dict[str, LensAnswer]:
    """The four answers."""
    rules = {
        "attention": attention_pays,
        "query": query_matters,
        "data": more_data,
        "heads": more_heads,
    }
    return {name: rule(findings) for name, rule in rules.items()}


def percent(value: float) -> str:
    """A share in per cent, as a person writes it.

    >>> [percent(x) for x in (0.8231, 0.0266, 0.00649, -0.1, 1e-7, math.nan)]
    ['82 %', '2.7 %', '0.65 %', '−10.0 %', '0 %', '–']
    """
    if not math.isfinite(value):
        return "–"
    size = abs(100 * value)
    if size < 0.005:
        return "0 %"
    if size >= 30:
        digits = 0
    elif size >= 1:
        digits = 1
    else:
        digits = 2
    sign = "−" if value < 0 else ""
    return f"{sign}{size:.{digits}f} %"


def with_error(m: Measured) -> str:
    """An error with its standard error."""
    return f"{percent(m.error)} ± {percent(m.uncertainty)}"


def attention_pays(findings: Findings) -> LensAnswer:
    """Whether the best attention layer beats the best learner on pooled input."""
    question = "Does attention pay?"
    pooled = findings.best("pooled")
    attention = findings.best("attention")
    if pooled is None or attention is None:
        why = (
            "The budget is too small for both attention and a learner on pooled input: give it "
            "more seconds."
        )
        return LensAnswer(question, "not tested", why)
    gain = difference(pooled, attention)
    numbers = {
        f"best attention ({attention.name})": with_error(attention),
        f"best on pooled input ({pooled.name})": with_error(pooled),
        "difference, paired": f"{percent(gain.gain)} ± {percent(gain.error)}",
    }
    nothing = nothing_learned(findings)
    if nothing:
        return LensAnswer(question, "no", nothing, numbers)

    # the comparison in words
    compared = f"{attention.name} leaves {percent(gain.better)}, {pooled.name} {percent(gain.base)}"
    if pooled.size != attention.size:
        compared += f" on the {gain.size} sets that both were given"
    if math.isfinite(gain.z):
        distance = f"{abs(gain.z):.1f} standard errors apart"
    else:
        distance = "without exception"

    # the answer
    says = at_most(learned(findings), judge(gain))
    if says == "yes":
        sentence = f"Yes. {compared}: {percent(gain.share)} of the error gone, {distance}."
    elif says == "perhaps":
        sentence = f"Perhaps. {compared}, {distance}: more sets would tell."
    else:
        lead = f"no difference of more than {CERTAIN:g} standard errors"
        if judge(difference(attention, pooled)) == "yes":
            lead = "the pooled learner is better"
        sentence = (
            f"No. {compared}: {lead}. Which keys go together does not matter here, or "
            f"{findings.n_train} sets are too few to learn it."
        )
    return LensAnswer(question, says, sentence, numbers)


def learned(findings: Findings) -> Says:
    """Whether any learner beats a constant guess."""
    constant = findings.best("constant")
    if constant is None:
        return "not tested"
    verdicts = {
        judge(difference(constant, m))
        for m in findings.learners
        if m.family != "constant" and m.losses
    }
    if "yes" in verdicts:
        return "yes"
    if "perhaps" in verdicts:
        return "perhaps"
    return "no"


def at_most(limit: Says, says: Says) -> Says:
    """An answer, or perhaps where it is uncertain that anything is learned at all."""
    return "perhaps" if limit == "perhaps" and says == "yes" else says


def nothing_learned(findings: Findings) -> str:
    """A sentence if no learner beats a constant guess, else nothing."""
    constant = findings.best("constant")
    learners = [m for m in findings.learners if m.family != "constant" and m.losses]
    if constant is None or not learners or learned(findings) != "no":
        return ""
    best = min(learners, key=findings.error_of)
    return (
        f"No. Nothing is learned here: {best.name}, the best, leaves "
        f"{percent(findings.error_of(best))}, a constant guess {percent(constant.error)}."
    )


def query_matters(findings: Findings) -> LensAnswer:
    """Whether taking the query away, or giving each set another's, costs anything."""
    question = "Does the query matter?"
    by_role = {m.role: m for m in findings.query if m.losses}
    with_query = by_role.get("with")
    if with_query is None or len(by_role) < 2:
        return LensAnswer(question, "not tested", _about_mean_query(findings))
    others = [m for role, m in by_role.items() if role in ("without", "shuffled")]
    numbers = {m.name: with_error(m) for m in (with_query, *others)}
    nothing = nothing_learned(findings)
    if nothing:
        return LensAnswer(question, "no", nothing, numbers)

    # the better of the two baselines: noise in a shuffled query harms too, and is no sign of a
    # query that matters
    baseline = min(others, key=lambda m: m.error)
    gain = difference(baseline, with_query)
    says = at_most(learned(findings), judge(gain))
    instead = "without" if baseline.role == "without" else "with that of another set"
    compared = f"{percent(gain.better)} with it, {percent(gain.base)} {instead}"
    if says == "no":
        words = f"No sign of it. The error is {compared}: the keys alone do as well."
    else:
        words = f"{says.capitalize()}. The error is {compared}, {gain.z:.1f} standard errors apart."
    return LensAnswer(question, says, words, numbers)


def _about_mean_query(findings: Findings) -> str:
    """Where the data has no query: whether the mean of the keys helps as one."""
    by_role = {m.role: m for m in findings.query if m.losses}
    without = by_role.get("without")
    with_mean = by_role.get("made")
    if without is None or with_mean is None:
        return findings.why_not("query", "There is no query in this data.")
    gain = difference(without, with_mean)
    helps = {"yes": "helps", "perhaps": "may help"}.get(judge(gain), "does not help")
    return (
        "The data has no query. One made from the set itself, the mean of its keys, "
        f"{helps}: {percent(gain.better)} against {percent(gain.base)}."
    )


SLOPE = -0.3  # prior mean of the first slope of a curve, log error per doubling
SLOPE_SPREAD = 0.5  # prior standard deviation of that slope
DAMPING = 0.8  # share of a slope that is left a doubling later
ROUGHNESS = 0.2  # standard deviation of what else happens to a slope within a doubling
COVERAGE = 0.9
"""The numbers above were chosen once, so that intervals hold as often as they say, on tables that
come with scikit-learn, made-up targets, and other cuts of the data that `benchmarks/lens_honest.py`
counts on."""
MIN_POINTS = 3  # of a curve that a forecast is made from


@dataclass(frozen=True)
class Forecast:
    """The error that the same lens would show with twice the sets.

    Its median and an interval of 90 %.
    """

    n_train: int  # twice that of the curve's end
    now: float
    low: float
    middle: float
    high: float

    @property
    def says(self) -> Says:
        """Yes if the interval is below today's error by enough.

        All of it is below, and half of it by more than is worth a mention.
        """
        if self.middle >= (1 - WORTH_IT) * self.now:
            return "no"
        if self.high < self.now:
            return "yes"
        return "perhaps"


def forecast(curve: HeldOutCurve, seed: int = 0, n_draws: int = 4000) -> Forecast | None:
    """What twice the sets would show, from a curve of three points or more; None from fewer.

    The logarithm of the error is a damped trend over doublings, a slope that decays and wanders,
    and everything is Gaussian, so that the gain of the next doubling has a distribution in closed
    form. Points of a curve are means over the same samples: their covariance is known, and how hard
    the samples are cancels from the gain. Of those who count at the end, half are the samples at
    hand, which the gain moves together with the noise of such a difference, and half are new, as
    hard as chance has them.
    """
    losses = np.stack(curve.losses)
    points, n = losses.shape
    if points < MIN_POINTS:
        return None

    # levels of the curve; where losses are counts, no level is below half a wrong sample
    now = float(losses[-1].mean())
    levels = losses.mean(axis=1)
    are_counts = bool(np.isin(losses[-1], (0.0, 1.0)).all())
    half_count = 0.5 / n if are_counts else 0.0
    smallest_level = half_count or max(1e-12 * levels.max(), 1e-150)
    levels = np.maximum(levels, smallest_level)

    # the Gaussian model of log errors: prior over level, slope and shocks, noise of the points
    doublings = np.log2(np.asarray(curve.sizes) / curve.sizes[-1])
    trend = damped_trend(np.append(doublings, 1.0))
    prior = np.array([25.0, SLOPE_SPREAD**2, *np.full(points, ROUGHNESS**2)])
    relative_covariance = (np.cov(losses) + half_count) / n / np.outer(levels, levels)
    noise = relative_covariance + 1e-8 * np.eye(points)

    # the gain of the next doubling, given the points
    observed = trend[:-1]
    gain = trend[-1] - trend[-2]
    covariance = (observed * prior) @ gain
    weights = np.linalg.solve((observed * prior) @ observed.T + noise, covariance)
    surprise = np.log(levels / levels[0]) - observed[:, 1] * SLOPE
    expected = gain[1] * SLOPE + weights @ surprise
    variance = float((gain * prior) @ gain - weights @ covariance)
    spread = math.sqrt(max(0.0, variance))
    rng = np.random.default_rng(seed)
    factor = np.exp(expected + spread * rng.standard_normal(n_draws))

    # the half that are the samples at hand: noise as in the difference of the last doubling
    one_doubling_before = int(np.argmin(np.abs(doublings + 1.0)))
    change = losses[-1] - losses[one_doubling_before]
    change_error = np.std(change, ddof=1) / math.sqrt(n)
    old = now * factor + change_error * rng.standard_normal(n_draws)

    # the half that are new samples, as hard as chance has them
    if are_counts:
        level = rng.beta(n * now + 0.5, n * (1 - now) + 0.5, n_draws)
        new = rng.binomial(n, np.minimum(level * factor, 1.0)) / n
    else:
        relative = float(np.std(losses[-1], ddof=1)) / math.sqrt(n) / levels[-1]
        new = now * factor * np.exp(relative * math.sqrt(2.0) * rng.standard_normal(n_draws))

    tail = (1 - COVERAGE) / 2
    errors = np.maximum((old + new) / 2, 0.0)
    low, middle, high = np.quantile(errors, (tail, 0.5, 1 - tail))
    return Forecast(
        n_train=2 * curve.sizes[-1],
        now=now,
        low=float(low),
        middle=float(middle),
        high=float(high),
    )


def damped_trend(x: Float[np.ndarray, " k"]) -> Float[np.ndarray, "k p"]:
    """What the parts of a trend add up to at every x.

    The first level, the first slope, and the shocks to the slope after each step.

    >>> damped_trend(np.array([0.0, 1.0, 2.0]))[:, :2]
    array([[1. , 0. ],
           [1. , 1. ],
           [1. , 1.8]])
    """
    trend = np.zeros((len(x), len(x) + 1))
    trend[:, 0] = 1.0
    slope = np.eye(len(x) + 1)[1]
    for k, step in enumerate(np.diff(x), start=1):
        trend[k] = trend[k - 1] + step * slope
        # the slope decays over the step, and then receives a shock of variance ``step``
        slope = DAMPING**step * slope
        slope[k + 1] = math.sqrt(step)
    return trend


def more_data(findings: Findings) -> LensAnswer:
    """Whether twice the samples would lower the error.

    By the learning curve of the best attention.
    """
    question = "Would more data help?"
    curve = next((c for c in findings.curves if c.role != "pooled"), None)
    ahead = None if curve is None else forecast(curve, findings.config.seed)
    if curve is None or ahead is None:
        return LensAnswer(
            question,
            "not tested",
            findings.why_not("learning curve", "There are too few sets to tell."),
        )
    numbers = {
        f"error at n = {k}": percent(float(x.mean()))
        for k, x in zip(curve.sizes, curve.losses, strict=True)
    }
    interval = f"{percent(ahead.low)} to {percent(ahead.high)}"
    numbers[f"forecast for n = {ahead.n_train}"] = (
        f"{percent(ahead.middle)}, nine times in ten {interval}"
    )
    nothing = nothing_learned(findings)
    says = at_most(learned(findings), ahead.says)
    words = {
        "yes": f"Yes. The error of {curve.name} is still falling:",
        "perhaps": f"Perhaps. The error of {curve.name} may fall:",
        "no": f"Little. The curve of {curve.name} is nearly flat:",
    }[says]
    if nothing and says != "no":
        says = "perhaps"
        words = "Perhaps. Nothing is learned yet;"
    expected = (
        f"{percent(ahead.now)} with {curve.sizes[-1]} sets to train on, {interval} expected with "
        "twice as many."
    )
    return LensAnswer(question, says, f"{words} {expected}", numbers)


def more_heads(findings: Findings) -> LensAnswer:
    """Whether infinitely many heads, or the most tried, beat the number in use."""
    question = "Would more heads help?"
    used = next(
        (m for m in findings.heads if m.heads == findings.config.n_heads and m.losses), None
    )
    larger = [m for m in findings.heads if m.heads > findings.config.n_heads and m.losses]
    if used is None or not larger:
        why = findings.why_not(
            "number of heads", "There was no attention layer to vary the number of heads of."
        )
        return LensAnswer(question, "not tested", why)
    largest = max(larger, key=lambda m: m.heads)
    gain = difference(used, largest)
    says = judge(gain)
    if math.isinf(largest.heads):
        more = "infinitely many heads"
    else:
        more = f"{largest.heads:.0f} heads"
    compared = f"{used.heads:.0f} heads leave {percent(gain.base)}, {more} {percent(gain.better)}"
    numbers = {}
    for m in findings.heads:
        if m.losses:
            count = "∞" if math.isinf(m.heads) else int(m.heads)
            numbers[f"{count} heads"] = with_error(m)
    if says == "no":
        words = (
            f"No sign of it. {compared}: as far as these sets tell, {_enough(findings)} would do."
        )
    else:
        words = f"{says.capitalize()}. {compared}, {gain.z:.1f} standard errors apart."
    return LensAnswer(question, says, words, numbers)


def _enough(findings: Findings) -> str:
    """The smallest number of heads that the most heads do not beat."""
    ordered = sorted((m for m in findings.heads if m.losses), key=lambda m: m.heads)
    for m in ordered:
        if m.heads <= findings.config.n_heads and judge(difference(m, ordered[-1])) == "no":
            return f"{m.heads:.0f}"
    return f"{findings.config.n_heads}"
