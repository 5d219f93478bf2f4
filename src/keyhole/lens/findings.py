"""What a look found: settings, measurements sample by sample, answers."""

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
    budget: float = 60.0
    """Seconds for everything."""
    n_heads: int = 256
    """Heads of the finite layers."""
    activation: str = "relu"
    pooling: str = "mean"
    max_samples: int = 2000
    """Samples used at most."""
    steps: int = 100
    """Most steps of a learned law; 0 learns none."""
    reserve: float = 0.0
    """Seconds of the budget kept for the report."""
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
