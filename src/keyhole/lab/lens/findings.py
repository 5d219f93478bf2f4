"""What a look found, and what follows from it in plain words: rules that know nothing of any one data set."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

Says = Literal["yes", "perhaps", "no", "not tested"]


@dataclass(frozen=True)
class LensConfig:
    """Settings of a look: ``kind`` is "regression" or "classification"."""

    kind: str
    budget: float = 60.0  # seconds for everything
    n_heads: int = 256  # heads of the finite layers
    activation: str = "relu"
    pooling: str = "mean"
    max_samples: int = 2000  # samples used at most
    steps: int = 100  # most steps of a learned law; 0 learns none
    reserve: float = 0.0  # seconds of the budget kept for the report
    seed: int = 0


@dataclass(eq=False)
class Measured:
    """Held-out losses of a learner, fold by fold.

    ``family`` is "constant", "pooled" or "attention"; ``law`` what the heads are drawn from, for attention.
    """

    name: str
    family: str
    role: str
    law: Any = None
    heads: float = math.nan
    seconds: float = 0.0
    losses: dict[int, Float[np.ndarray, " r"]] = field(default_factory=dict, repr=False)
    alpha: float = math.nan

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

    @property
    def z(self) -> float:
        """The gain in standard errors."""
        return self.gain / self.error if self.error > 0 else math.copysign(math.inf, self.gain) if self.gain else 0.0

    @property
    def share(self) -> float:
        """The gain as a share of the error it is a gain on."""
        return self.gain / self.base if self.base > 0 else 0.0

    @property
    def better(self) -> float:
        """The error that is left, on the samples that both learners have."""
        return self.base - self.gain


def standard_error(parts: list[Float[np.ndarray, " _"]]) -> float:
    """Of the mean of all entries: from their spread, or from that of the parts' means if they are three or more."""
    joined = np.concatenate(parts)
    single = float(joined.std(ddof=1) / np.sqrt(len(joined))) if len(joined) > 1 else math.inf
    if len(parts) < 3:
        return single
    means = np.array([part.mean() for part in parts])
    return max(single, float(means.std(ddof=1) / np.sqrt(len(parts))))


def difference(worse: Measured, better: Measured) -> Difference:
    """Error of ``worse`` less error of ``better``, paired over the folds that both have."""
    common = [k for k in worse.losses if k in better.losses]
    if not common:
        return Difference(0.0, math.inf, math.nan)
    parts = [worse.losses[k] - better.losses[k] for k in common]
    base = float(np.concatenate([worse.losses[k] for k in common]).mean())
    return Difference(float(np.concatenate(parts).mean()), standard_error(parts), base)


@dataclass(frozen=True)
class Answer:
    """A question, what the data says, in a word and in a sentence, and the numbers behind it."""

    question: str
    says: Says
    sentence: str
    numbers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HeldOutCurve:
    """Held-out error against the number of training samples, on the same held-out samples throughout."""

    name: str
    role: str
    sizes: tuple[int, ...]
    losses: tuple[Float[np.ndarray, " r"], ...] = field(repr=False)


@dataclass(frozen=True, eq=False)
class TargetLoading:
    """Eigenvalues of a centred Gram matrix over n, and the share of the target's power in each direction."""

    name: str
    role: str
    eigenvalues: Float[np.ndarray, " k"] = field(repr=False)
    power: Float[np.ndarray, " k"] = field(repr=False)


@dataclass(eq=False)
class Findings:
    """Everything that was measured, and the answers."""

    config: LensConfig
    description: str
    n_given: int
    n_used: int
    n_train: int
    n_folds: int
    settings: str = ""
    learners: list[Measured] = field(default_factory=list)
    query: list[Measured] = field(default_factory=list)
    heads: list[Measured] = field(default_factory=list)
    curves: list[HeldOutCurve] = field(default_factory=list)
    spectra: list[TargetLoading] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    answers: dict[str, Answer] = field(default_factory=dict)
    seconds: float = 0.0
    law: Any = None
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

    def error_of(self, m: Measured) -> float:
        """The error of a learner over all folds; where it lacks some, by how it compares with the first on its own."""
        first = self.learners[0]
        return first.error - difference(first, m).gain


BEYOND_DOUBT = 3.0
"""Standard errors from which a difference counts: not two, because the best of several is compared with the best of
several others."""
POSSIBLE = 1.5  # standard errors from which it may be there
WORTH_IT = 0.03  # share of an error below which a gain is not worth mentioning, however certain


def judge(gain: Difference) -> Says:
    """A gain is there if it is beyond doubt and worth having; it may be if it is halfway beyond doubt."""
    if gain.z > BEYOND_DOUBT and gain.share > WORTH_IT:
        return "yes"
    return "perhaps" if gain.z > POSSIBLE and gain.share > WORTH_IT else "no"


def answer_all(found: Findings) -> dict[str, Answer]:
    """The four answers."""
    rules = {"attention": attention_pays, "query": query_matters, "data": more_data, "heads": more_heads}
    return {name: rule(found) for name, rule in rules.items()}


def percent(value: float) -> str:
    """A share in per cent, to a sensible number of digits."""
    return "–" if not math.isfinite(value) else f"{100 * value:.3g} %" if value >= 0.001 else f"{100 * value:.1g} %"


def with_error(m: Measured) -> str:
    """An error with its standard error."""
    return f"{percent(m.error)} ± {percent(m.uncertainty)}"


def attention_pays(found: Findings) -> Answer:
    """Whether the best attention layer beats the best learner on pooled input."""
    question = "Does attention pay?"
    pooled, attention = found.best("pooled"), found.best("attention")
    if pooled is None or attention is None:
        return Answer(question, "not tested", "Too little time to fit both attention and a learner on pooled input.")
    gain = difference(pooled, attention)
    nothing = nothing_learned(found)
    says: Says = "no" if nothing else at_most(learned(found), judge(gain))
    numbers = {
        f"best attention ({attention.name})": with_error(attention),
        f"best on pooled input ({pooled.name})": with_error(pooled),
        "difference, paired": f"{percent(gain.gain)} ± {percent(gain.error)}".replace("– ±", "0 ±"),
    }
    ahead = f"{attention.name} leaves {percent(gain.better)}, {pooled.name} {percent(gain.base)}"
    doubt = f"{abs(gain.z):.1f} standard errors apart" if math.isfinite(gain.z) else "without exception"
    if nothing:
        return Answer(question, says, nothing, numbers)
    back = judge(difference(attention, pooled))
    lead = "the pooled learner is better" if back == "yes" else "no difference beyond doubt"
    words = {
        "yes": f"Yes. {ahead}: {percent(gain.share)} of the error gone, {doubt}.",
        "perhaps": f"Perhaps. {ahead}, {doubt}: more sets would tell.",
        "no": f"No. {ahead}: {lead}. Which keys go together does not matter here, or {found.n_train} sets are too few "
        "to learn it.",
    }
    return Answer(question, says, words[says], numbers)


def learned(found: Findings) -> Says:
    """Whether any learner beats a constant guess."""
    constant = found.best("constant")
    if constant is None:
        return "not tested"
    heard = {judge(difference(constant, m)) for m in found.learners if m.family != "constant" and m.losses}
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
        f"No. Nothing is learned here: {best.name}, the best, leaves {percent(found.error_of(best))}, a constant guess "
        f"{percent(constant.error)}."
    )


def query_matters(found: Findings) -> Answer:
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
                f"The data has no query. One made from the set itself, the mean of its keys, {helps}: "
                f"{percent(gain.better)} against {percent(gain.base)}."
            )
        return Answer(question, "not tested", words)
    others = [m for role, m in by_role.items() if role in ("without", "shuffled")]
    numbers = {m.name: with_error(m) for m in (whole, *others)}
    # the better of the two stand-ins: noise in a shuffled query harms too, and is no sign of a query that matters
    rival = min(others, key=lambda m: m.error)
    gain = difference(rival, whole)
    nothing = nothing_learned(found)
    if nothing:
        return Answer(question, "no", nothing, numbers)
    says = at_most(learned(found), judge(gain))
    instead = "without" if rival.role == "without" else "with that of another set"
    compared = f"{percent(gain.better)} with it, {percent(gain.base)} {instead}"
    words = f"No sign of it. The error is {compared}: the keys alone do as well."
    if says != "no":
        words = f"{says.capitalize()}. The error is {compared}, {gain.z:.1f} standard errors apart."
    return Answer(question, says, words, numbers)


def extrapolate(curve: HeldOutCurve, seed: int = 0, n_draws: int = 400) -> tuple[float, float, float, float]:
    """The gain of doubling the data, its standard error, and the error now and after it.

    An error that falls like a floor plus a power of n has gains that shrink by a common factor r from doubling to
    doubling. The last two doublings tell r; a floor is not negative, so r is no more than the last ratio of errors. The
    next gain is r times the last one. Standard error by bootstrap over held-out samples.
    """
    losses = np.stack(curve.losses)
    rng = np.random.default_rng(seed)
    draws = [_next_gain(losses[:, rng.integers(0, losses.shape[1], losses.shape[1])]) for _ in range(n_draws)]
    gain, now = _next_gain(losses), float(losses[-1].mean())
    return gain, float(np.std(draws)), now, now - gain


def _next_gain(losses: np.ndarray) -> float:
    errors = losses.mean(axis=1)
    last = float(errors[-2] - errors[-1])
    ratio = 0.5
    if len(errors) > 2:
        before = float(errors[-3] - errors[-2])
        ratio = float(np.clip(last / before, 0.2, 1.0)) if before > 0 and last > 0 else 0.5
    if errors[-2] > 0:
        ratio = min(ratio, float(errors[-1] / errors[-2]))
    return ratio * last


def more_data(found: Findings) -> Answer:
    """Whether twice the samples would lower the error, by the learning curve of the best attention."""
    question = "Would more data help?"
    curve = next((c for c in found.curves if c.role != "pooled"), None)
    if curve is None or len(curve.sizes) < 2:
        why = found.why_not("learning curve", "There was no time for a learning curve.")
        return Answer(question, "not tested", why)
    gain, error, now, later = extrapolate(curve, found.config.seed)
    forecast_gain = Difference(gain, error, now)
    says = judge(forecast_gain)
    # a forecast is uncertain by nature: it takes a flat curve to say no
    if says == "no" and forecast_gain.share > WORTH_IT and forecast_gain.z > 0.5:
        says = "perhaps"
    n = curve.sizes[-1]
    numbers = {f"error at n = {k}": percent(float(x.mean())) for k, x in zip(curve.sizes, curve.losses, strict=True)}
    numbers[f"extrapolated to n = {2 * n}"] = f"{percent(max(later, 0.0))} ± {percent(error)}"
    forecast = f"from {percent(now)} at {n} sets to about {percent(max(later, 0.0))} ± {percent(error)} at {2 * n}"
    words = {
        "yes": f"Yes. The error of {curve.name} is still falling: {forecast}.",
        "perhaps": f"Perhaps. The curve of {curve.name} points {forecast}.",
        "no": f"Little. The curve of {curve.name} is nearly flat: {forecast}.",
    }
    return Answer(question, says, words[says], numbers)


def more_heads(found: Findings) -> Answer:
    """Whether infinitely many heads, or the most tried, beat the number in use."""
    question = "Would more heads help?"
    used = next((m for m in found.heads if m.heads == found.config.n_heads and m.losses), None)
    larger = [m for m in found.heads if m.heads > found.config.n_heads and m.losses]
    if used is None or not larger:
        why = found.why_not("heads", "There was no time to vary the number of heads.")
        return Answer(question, "not tested", why)
    most = max(larger, key=lambda m: m.heads)
    gain = difference(used, most)
    says = judge(gain)
    many = "infinitely many heads" if math.isinf(most.heads) else f"{most.heads:.0f} heads"
    compared = f"{used.heads:.0f} heads leave {percent(gain.base)}, {many} {percent(gain.better)}"
    numbers = {f"{'∞' if math.isinf(m.heads) else int(m.heads)} heads": with_error(m) for m in found.heads if m.losses}
    words = f"No. {compared}: {_enough(found)} are enough."
    if says != "no":
        words = f"{says.capitalize()}. {compared}, {gain.z:.1f} standard errors apart."
    return Answer(question, says, words, numbers)


def _enough(found: Findings) -> str:
    """The smallest number of heads that the most heads do not beat."""
    ordered = sorted((m for m in found.heads if m.losses), key=lambda m: m.heads)
    for m in ordered:
        if m.heads <= found.config.n_heads and judge(difference(m, ordered[-1])) == "no":
            return f"{m.heads:.0f}"
    return f"{found.config.n_heads}"
