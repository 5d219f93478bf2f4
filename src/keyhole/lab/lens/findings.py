"""What a look found, and what follows from it in plain words.

Rules that know nothing of any one data set.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from keyhole._files import write_whole

Says = Literal["yes", "perhaps", "no", "not tested"]


@dataclass(frozen=True)
class LensConfig:
    """Settings of a look: ``kind`` is "regression" or "classification"."""

    kind: str
    budget: float = 60.0  # seconds for everything, predicted from sizes
    n_heads: int = 256  # heads of the finite layers
    activation: str = "relu"
    pooling: str = "mean"
    max_samples: int = 2000  # samples used at most
    steps: int = 100  # most steps of a learned head distribution; 0 learns none
    seed: int = 0


@dataclass(eq=False)
class Measured:
    """Held-out losses of a learner, by the number of samples it was given, fold by fold.

    ``family`` is "constant", "pooled" or "attention"; ``heads`` what the heads are drawn from, for
    attention. Besides all samples that it was given, a learner has losses on as many as others have
    that were given fewer.
    """

    name: str
    family: str
    role: str
    distribution: Any = None
    heads: float = math.nan
    seconds: float = 0.0  # predicted
    at: dict[int, dict[int, Float[np.ndarray, " r"]]] = field(default_factory=dict, repr=False)

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
        return float(np.concatenate(list(self.losses.values())).mean()) if self.losses else math.nan

    @property
    def uncertainty(self) -> float:
        """Standard error of `error`: over samples, or over folds where that is larger."""
        return standard_error(list(self.losses.values())) if self.losses else math.nan


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
        return (
            self.gain / self.error
            if self.error > 0
            else math.copysign(math.inf, self.gain)
            if self.gain
            else 0.0
        )

    @property
    def share(self) -> float:
        """The gain as a share of the error it is a gain on."""
        return self.gain / self.base if self.base > 0 else 0.0

    @property
    def better(self) -> float:
        """The error that is left, on the samples that both learners have."""
        return self.base - self.gain


def standard_error(parts: list[Float[np.ndarray, " _"]]) -> float:
    """Of the mean of all entries.

    From their spread, or from that of the parts' means if they are three or more.
    """
    joined = np.concatenate(parts)
    single = float(joined.std(ddof=1) / np.sqrt(len(joined))) if len(joined) > 1 else math.inf
    if len(parts) < 3:
        return single
    means = np.array([part.mean() for part in parts])
    return max(single, float(means.std(ddof=1) / np.sqrt(len(parts))))


def difference(worse: Measured, better: Measured) -> Difference:
    """Error of ``worse`` less error of ``better``.

    Paired over the most samples, and the folds, that both have.
    """
    size = max((s for s in worse.at if s in better.at), default=0)
    pairs = [
        (losses, better.at[size][k])
        for k, losses in worse.at.get(size, {}).items()
        if k in better.at[size]
    ]
    if not pairs:
        return Difference(0.0, math.inf, math.nan)
    parts = [one - other for one, other in pairs]
    base = float(np.concatenate([one for one, _ in pairs]).mean())
    return Difference(float(np.concatenate(parts).mean()), standard_error(parts), base, size)


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

    ``table`` has a row per learner, best first; ``answers`` one per question ("attention", "query",
    "data", "heads"), each with what it ``says`` ("yes", "perhaps", "no" or "not tested"), a
    ``sentence``, and the numbers behind it.
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
        found = [m for m in self.learners if m.family == family and m.losses]
        return min(found, key=self.error_of, default=None)

    @property
    def table(self) -> list[dict[str, Any]]:
        """One row per learner, best first.

        Its error and standard error in per cent, and what it was given.
        """
        order = sorted((m for m in self.learners if m.losses), key=self.error_of)
        return [
            {
                "learner": m.name,
                "error, %": 100 * m.error,
                "±": 100 * m.uncertainty,
                "sets": m.size,
                "folds": len(m.losses),
                "predicted seconds": round(m.seconds, 2),
            }
            for m in order
        ]

    def as_data(self) -> dict[str, Any]:
        """Everything, as plain data for JSON."""
        answers = self.answers.items()
        curves = [(c, forecast(c, self.config.seed)) for c in self.curves]
        return {
            "data": self.description,
            "task": self.config.kind,
            "settings": self.settings,
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
        return "\n".join([f"{self.description or 'the data'}: {self.measure}", *rows, *answers])

    def error_of(self, m: Measured) -> float:
        """The error of a learner on all samples.

        Where it lacks some, by how it compares with the first on its own.
        """
        first = self.learners[0]
        return first.error - difference(first, m).gain


BEYOND_DOUBT = 3.0
"""Standard errors from which a difference counts: not two, because the best of several is compared
with the best of several others."""
POSSIBLE = 1.5  # standard errors from which it may be there
WORTH_IT = 0.03  # share of an error below which a gain is not worth mentioning, however certain


def judge(gain: Difference) -> Says:
    """A gain is there if it is beyond doubt and worth having.

    It may be if it is halfway beyond doubt.
    """
    if gain.z > BEYOND_DOUBT and gain.share > WORTH_IT:
        return "yes"
    return "perhaps" if gain.z > POSSIBLE and gain.share > WORTH_IT else "no"


def answer_all(found: Findings) -> dict[str, LensAnswer]:
    """The four answers."""
    rules = {
        "attention": attention_pays,
        "query": query_matters,
        "data": more_data,
        "heads": more_heads,
    }
    return {name: rule(found) for name, rule in rules.items()}


def percent(value: float) -> str:
    """A share in per cent, as a person writes it.

    >>> [percent(x) for x in (0.8231, 0.0266, 0.00649, -0.1, 1e-7, math.nan)]
    ['82 %', '2.7 %', '0.65 %', '−10.0 %', '0 %', '–']
    """
    size = abs(100 * value)
    if not math.isfinite(value) or size < 0.005:
        return "0 %" if math.isfinite(value) else "–"
    return f"{'−' if value < 0 else ''}{size:.{0 if size >= 30 else 1 if size >= 1 else 2}f} %"


def with_error(m: Measured) -> str:
    """An error with its standard error."""
    return f"{percent(m.error)} ± {percent(m.uncertainty)}"


def attention_pays(found: Findings) -> LensAnswer:
    """Whether the best attention layer beats the best learner on pooled input."""
    question = "Does attention pay?"
    pooled, attention = found.best("pooled"), found.best("attention")
    if pooled is None or attention is None:
        why = (
            "The budget is too small for both attention and a learner on pooled input: give it "
            "more seconds."
        )
        return LensAnswer(question, "not tested", why)
    gain = difference(pooled, attention)
    nothing = nothing_learned(found)
    says: Says = "no" if nothing else at_most(learned(found), judge(gain))
    numbers = {
        f"best attention ({attention.name})": with_error(attention),
        f"best on pooled input ({pooled.name})": with_error(pooled),
        "difference, paired": f"{percent(gain.gain)} ± {percent(gain.error)}",
    }
    fewer = (
        f" on the {gain.size} sets that both were given" if pooled.size != attention.size else ""
    )
    ahead = (
        f"{attention.name} leaves {percent(gain.better)}, {pooled.name} {percent(gain.base)}{fewer}"
    )
    doubt = (
        f"{abs(gain.z):.1f} standard errors apart" if math.isfinite(gain.z) else "without exception"
    )
    if nothing:
        return LensAnswer(question, says, nothing, numbers)
    back = judge(difference(attention, pooled))
    lead = "the pooled learner is better" if back == "yes" else "no difference beyond doubt"
    words = {
        "yes": f"Yes. {ahead}: {percent(gain.share)} of the error gone, {doubt}.",
        "perhaps": f"Perhaps. {ahead}, {doubt}: more sets would tell.",
        "no": (
            f"No. {ahead}: {lead}. Which keys go together does not matter here, or {found.n_train} "
            "sets are too few to learn it."
        ),
    }
    return LensAnswer(question, says, words[says], numbers)


def learned(found: Findings) -> Says:
    """Whether any learner beats a constant guess."""
    constant = found.best("constant")
    if constant is None:
        return "not tested"
    heard = {
        judge(difference(constant, m))
        for m in found.learners
        if m.family != "constant" and m.losses
    }
    return "yes" if "yes" in heard else "perhaps" if "perhaps" in heard else "no"


def at_most(limit: Says, says: Says) -> Says:
    """An answer, or perhaps where it is uncertain that anything is learned at all."""
    return "perhaps" if limit == "perhaps" and says == "yes" else says


def nothing_learned(found: Findings) -> str:
    """A sentence if no learner beats a constant guess, else nothing."""
    constant = found.best("constant")
    learners = [m for m in found.learners if m.family != "constant" and m.losses]
    if constant is None or not learners or learned(found) != "no":
        return ""
    best = min(learners, key=found.error_of)
    return (
        f"No. Nothing is learned here: {best.name}, the best, leaves "
        f"{percent(found.error_of(best))}, a constant guess {percent(constant.error)}."
    )


def query_matters(found: Findings) -> LensAnswer:
    """Whether taking the query away, or giving each set another's, costs anything."""
    question = "Does the query matter?"
    by_role = {m.role: m for m in found.query if m.losses}
    whole = by_role.get("with")
    if whole is None or len(by_role) < 2:
        words = found.why_not("query", "There is no query in this data.")
        made = by_role.get("made")
        if made is not None and (plain := by_role.get("without")) is not None:
            gain = difference(plain, made)
            helps = {"yes": "helps", "perhaps": "may help"}.get(judge(gain), "does not help")
            words = (
                "The data has no query. One made from the set itself, the mean of its keys, "
                f"{helps}: {percent(gain.better)} against {percent(gain.base)}."
            )
        return LensAnswer(question, "not tested", words)
    others = [m for role, m in by_role.items() if role in ("without", "shuffled")]
    numbers = {m.name: with_error(m) for m in (whole, *others)}
    # the better of the two stand-ins: noise in a shuffled query harms too, and is no sign of a
    # query that matters
    rival = min(others, key=lambda m: m.error)
    gain = difference(rival, whole)
    nothing = nothing_learned(found)
    if nothing:
        return LensAnswer(question, "no", nothing, numbers)
    says = at_most(learned(found), judge(gain))
    instead = "without" if rival.role == "without" else "with that of another set"
    compared = f"{percent(gain.better)} with it, {percent(gain.base)} {instead}"
    words = f"No sign of it. The error is {compared}: the keys alone do as well."
    if says != "no":
        words = f"{says.capitalize()}. The error is {compared}, {gain.z:.1f} standard errors apart."
    return LensAnswer(question, says, words, numbers)


SLOPE, SLOPE_SPREAD = (
    -0.3,
    0.5,
)  # what is believed of the first slope of a curve, log error per doubling
DAMPING = 0.8  # share of a slope that is left a doubling later
ROUGHNESS = 0.2  # standard deviation of what else happens to a slope within a doubling
COVERAGE = 0.9
"""The numbers above were chosen once, so that intervals hold as often as they say, on tables that
come with scikit-learn, made-up targets, and other cuts of the data that `benchmarks/lens_honest.py`
counts on."""
MIN_POINTS = 3  # of a curve that a forecast is made from


@dataclass(frozen=True)
class Forecast:
    """The error that the same look would show with twice the sets.

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
        return "yes" if self.high < self.now else "perhaps"


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
    now, levels = float(losses[-1].mean()), losses.mean(axis=1)
    counts = bool(np.isin(losses[-1], (0.0, 1.0)).all())
    half = 0.5 / n if counts else 0.0  # of a sample, where none was wrong
    levels = np.maximum(levels, half or max(1e-12 * levels.max(), 1e-150))
    doublings = np.log2(np.asarray(curve.sizes) / curve.sizes[-1])
    trend = damped_trend(np.append(doublings, 1.0))
    prior = np.array([25.0, SLOPE_SPREAD**2, *np.full(points, ROUGHNESS**2)])
    noise = (np.cov(losses) + half) / n / np.outer(levels, levels) + 1e-8 * np.eye(points)
    seen, gain = trend[:-1], trend[-1] - trend[-2]
    weights = np.linalg.solve((seen * prior) @ seen.T + noise, (seen * prior) @ gain)
    expected = gain[1] * SLOPE + weights @ (np.log(levels / levels[0]) - seen[:, 1] * SLOPE)
    spread = math.sqrt(max(0.0, float((gain * prior) @ gain - weights @ ((seen * prior) @ gain))))
    rng = np.random.default_rng(seed)
    factor = np.exp(expected + spread * rng.standard_normal(n_draws))
    moved = losses[-1] - losses[int(np.argmin(np.abs(doublings + 1.0)))]  # by the last doubling
    old = now * factor + np.std(moved, ddof=1) / math.sqrt(n) * rng.standard_normal(n_draws)
    if counts:
        level = rng.beta(n * now + 0.5, n * (1 - now) + 0.5, n_draws)
        new = rng.binomial(n, np.minimum(level * factor, 1.0)) / n
    else:
        relative = float(np.std(losses[-1], ddof=1)) / math.sqrt(n) / levels[-1]
        new = now * factor * np.exp(relative * math.sqrt(2.0) * rng.standard_normal(n_draws))
    tail = (1 - COVERAGE) / 2
    low, middle, high = np.quantile(np.maximum((old + new) / 2, 0.0), (tail, 0.5, 1 - tail))
    return Forecast(2 * curve.sizes[-1], now, float(low), float(middle), float(high))


def damped_trend(x: Float[np.ndarray, " k"]) -> Float[np.ndarray, "k p"]:
    """What the parts of a trend add up to at every x.

    The first level, the first slope, and the shocks to the slope after each step.

    >>> damped_trend(np.array([0.0, 1.0, 2.0]))[:, :2]
    array([[1. , 0. ],
           [1. , 1. ],
           [1. , 1.8]])
    """
    found = np.zeros((len(x), len(x) + 1))
    found[:, 0] = 1.0
    slope = np.eye(len(x) + 1)[1]
    for k, step in enumerate(np.diff(x), start=1):
        found[k] = found[k - 1] + step * slope
        slope = DAMPING**step * slope
        slope[k + 1] = math.sqrt(step)
    return found


def more_data(found: Findings) -> LensAnswer:
    """Whether twice the samples would lower the error.

    By the learning curve of the best attention.
    """
    question = "Would more data help?"
    curve = next((c for c in found.curves if c.role != "pooled"), None)
    ahead = None if curve is None else forecast(curve, found.config.seed)
    if curve is None or ahead is None:
        return LensAnswer(
            question,
            "not tested",
            found.why_not("learning curve", "There are too few sets to tell."),
        )
    numbers = {
        f"error at n = {k}": percent(float(x.mean()))
        for k, x in zip(curve.sizes, curve.losses, strict=True)
    }
    interval = f"{percent(ahead.low)} to {percent(ahead.high)}"
    numbers[f"forecast for n = {ahead.n_train}"] = (
        f"{percent(ahead.middle)}, nine times in ten {interval}"
    )
    nothing = nothing_learned(found)
    says = at_most(learned(found), ahead.says)
    words = {
        "yes": f"Yes. The error of {curve.name} is still falling:",
        "perhaps": f"Perhaps. The error of {curve.name} may fall:",
        "no": f"Little. The curve of {curve.name} is nearly flat:",
    }[says]
    if nothing and says != "no":
        says, words = "perhaps", "Perhaps. Nothing is learned yet;"
    expected = (
        f"{percent(ahead.now)} with {curve.sizes[-1]} sets to train on, {interval} expected with "
        "twice as many."
    )
    return LensAnswer(question, says, f"{words} {expected}", numbers)


def more_heads(found: Findings) -> LensAnswer:
    """Whether infinitely many heads, or the most tried, beat the number in use."""
    question = "Would more heads help?"
    used = next((m for m in found.heads if m.heads == found.config.n_heads and m.losses), None)
    larger = [m for m in found.heads if m.heads > found.config.n_heads and m.losses]
    if used is None or not larger:
        why = found.why_not(
            "number of heads", "There was no attention layer to vary the number of heads of."
        )
        return LensAnswer(question, "not tested", why)
    most = max(larger, key=lambda m: m.heads)
    gain = difference(used, most)
    says = judge(gain)
    many = "infinitely many heads" if math.isinf(most.heads) else f"{most.heads:.0f} heads"
    compared = f"{used.heads:.0f} heads leave {percent(gain.base)}, {many} {percent(gain.better)}"
    numbers = {
        f"{'∞' if math.isinf(m.heads) else int(m.heads)} heads": with_error(m)
        for m in found.heads
        if m.losses
    }
    words = f"No sign of it. {compared}: as far as these sets tell, {_enough(found)} would do."
    if says != "no":
        words = f"{says.capitalize()}. {compared}, {gain.z:.1f} standard errors apart."
    return LensAnswer(question, says, words, numbers)


def _enough(found: Findings) -> str:
    """The smallest number of heads that the most heads do not beat."""
    ordered = sorted((m for m in found.heads if m.losses), key=lambda m: m.heads)
    for m in ordered:
        if m.heads <= found.config.n_heads and judge(difference(m, ordered[-1])) == "no":
            return f"{m.heads:.0f}"
    return f"{found.config.n_heads}"
