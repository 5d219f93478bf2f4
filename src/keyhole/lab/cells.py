"""The unit of work of `keyhole reproduce`: one learner on one target at one size, and the key its result is kept under.

A cell knows nothing of figures: two figures that ask for the same cell share its result. Its numbers are a function
of its fields alone, to the last bit (one BLAS thread, fixed blocks), whatever else is computed beside it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

Values = dict[str, float]  # what a cell comes to, by name; every number is finite

ARITHMETIC = {"ridge": 1, "fixed": 1, "absolute": 2, "huber": 2}
"""Version of the computation behind each learner, part of every key.

Raise it whenever a change anywhere (features, kernels, solvers, draws) moves the numbers of a cell. It is written by
hand and not a hash of sources, because a docstring would then throw away an hour of work; so that nobody forgets,
`tests/units/test_cells.py` pins the numbers of a few cells and names this table when they move.
"""

LEARNERS = tuple(ARITHMETIC)
MODELS = ("attention", "biased", "mlp")


@dataclass(frozen=True)
class Cell:
    """One learner on one target at one size; the first ``n_samples`` sets of a draw of ``most_samples``."""

    model: str  # "attention" (heads of mean zero), "biased" (of mean W_0) or "mlp" (width M(d+1))
    target: str  # in the notation of `keyhole.theory.notation`
    dim: int
    n_keys: int
    n_heads: int | None  # None for infinitely many
    n_samples: int
    most_samples: int  # cells that share it share features, Gram matrix and factorisation
    n_test: int
    seed: int
    repetition: int  # with the seed it names the draw of sets, heads and noise
    learner: str = "ridge"
    """"ridge" with its penalty chosen by leave-one-out; "fixed", ridge with the penalty ``ridge`` and no intercept;
    "absolute" or "huber", the constrained learner of the theorems with that loss."""
    noise: float = 0.0  # variance of the noise in the labels, as a share of Var f*
    outliers: float = 0.0  # share of the labels that are off by ± ``outlier_size`` standard deviations of f*
    outlier_size: float = 0.0
    ridge: float | None = None  # λ of the learner "fixed", α = nλ; None for the others, which choose theirs
    mean: float = 1.0  # c of W_0 = c·I, for biased heads of the learner "fixed"

    def __post_init__(self) -> None:
        if self.learner not in LEARNERS or self.model not in MODELS:
            raise ValueError(
                f"a cell's learner must be one of {', '.join(LEARNERS)} and its model one of {', '.join(MODELS)}: got "
                f"{self.learner!r} and {self.model!r}."
            )
        if not 2 <= self.n_samples <= self.most_samples:
            raise ValueError(
                f"a cell needs between 2 and `most_samples` = {self.most_samples} samples, because it takes the first "
                f"of that draw: got n_samples = {self.n_samples}."
            )
        if (self.learner == "fixed") != (self.ridge is not None):
            raise ValueError(f"`ridge` belongs to the learner fixed: got {self.learner!r} with ridge = {self.ridge}.")
        if self.mean != 1.0 and (self.learner, self.model) != ("fixed", "biased"):
            raise ValueError(f"`mean` belongs to biased heads of the learner fixed: got {self.learner}, {self.model}.")
        if self.learner == "fixed" and self.model == "mlp" and self.n_heads is not None:
            raise ValueError("the learner fixed knows the MLP of infinite width only: n_heads must be None.")

    @property
    def config(self) -> str:
        """The fields as canonical JSON: sorted names, no spaces, shortest exact numbers.

        A mean of 1 is left out: cells in stores had no other before there was a field for it.
        """
        return canonical({name: value for name, value in asdict(self).items() if (name, value) != ("mean", 1.0)})

    @property
    def key(self) -> str:
        """SHA-256 of the configuration and of the version of the arithmetic behind it."""
        text = f"{self.learner}/{ARITHMETIC[self.learner]}\n{self.config}"
        return hashlib.sha256(text.encode()).hexdigest()


def canonical(fields: dict[str, Any]) -> str:
    """JSON in which equal contents are equal text; infinities and NaN are refused.

    >>> canonical({"b": 1, "a": 0.5})
    '{"a":0.5,"b":1}'
    """
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
