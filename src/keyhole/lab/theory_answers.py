"""What the theory says of one target, before any data.

`keyhole theory` and the page of `keyhole explore` ask these functions. A `Question` names a target,
a layer and a learner; its methods are the answers. `report` asks everything about a target: a
nested dictionary with stable keys, ready for JSON; what cannot be computed is None there, with the
reason under "unavailable". `sentences` puts the answer first, in three sentences.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole import theory
from keyhole._checks import check_number
from keyhole.attention.heads import GaussianHeads
from keyhole.lab.report.document import Chart, Row, Series, Table
from keyhole.lab.report.html import number
from keyhole.registry import POINTWISE
from keyhole.theory.blocks import bias_of
from keyhole.theory.curves import Learner, TheoryLayer, target_levels
from keyhole.theory.harmonics import pair_powers, target_variance
from keyhole.theory.notation import Notation, parse_target
from keyhole.theory.spectrum import MAX_BIASED_DEGREE
from keyhole.theory.targets import Polynomial

MODELS = {"attention": ("attention",), "mlp": ("mlp",), "both": ("attention", "mlp")}
"""What --model may be, and the models that are asked then."""

REFUSALS = (ValueError, ArithmeticError, MemoryError)
"""What the theory raises where it has no answer."""

QUESTION_SECONDS = 5.0
"""That one question of a report may take."""

LATER_SECONDS = 0.5
"""The same once a question has taken longer: others about the same target mostly do so too."""

SHARE = 0.1
"""Samples and heads are counted that leave this share of Var f*."""

N_LEVELS = 8
"""Levels of a spectrum that a report lists."""

read_notation = lru_cache(maxsize=64)(parse_target)
"""`parse_target`, remembered: a rotation in 512 dimensions takes 2 MB."""


class OutOfTimeError(ValueError):
    """A question that takes longer than it may."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise an `OutOfTimeError` in what is computed within, once it has taken so many seconds.

    The alarm of the operating system ends it wherever it is, so that nothing has to be estimated
    before. It rings in the main thread of a program; in other threads, and on Windows, which has no
    alarm, nothing is limited.
    """
    is_limited = math.isfinite(seconds) and hasattr(signal, "setitimer")
    if not is_limited or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(signal_number: int, frame: object) -> None:
        raise OutOfTimeError(
            f"it takes more than {seconds:.2g} s. Lower the powers of the target, the "
            "mean c or the number of samples, or ask kh.theory in Python, which has no limit."
        )

    previous = signal.signal(signal.SIGALRM, ring)
    # an alarm after no time at all would be no alarm
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def reason_of(error: BaseException) -> str:
    """Why the theory refuses, in words."""
    if isinstance(error, MemoryError):
        return "it needs more memory than there is. Lower d, the powers of the target or the mean."
    return str(error) or type(error).__name__


# ---- one question --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """One target, one layer and one learner; the methods are what the theory says of them.

    ``mean`` is c of the attention heads, a multiple of the identity; ``noise`` the variance of the
    noise in the labels.
    """

    target: str
    dim: int = 16
    n_keys: int = 16
    n_heads: float = math.inf
    ridge: float = 1e-5
    noise: float = 0.0
    model: str = "attention"
    mean: float = 0.0
    activation: str = "relu"
    query: bool = True
    fit_intercept: bool = False

    def __post_init__(self) -> None:
        check_number(self.ridge, "ridge", minimum=0.0)
        check_number(self.noise, "noise", minimum=0.0)

    @property
    def notation(self) -> Notation:
        """The target, read."""
        return read_notation(self.target, self.dim)

    @property
    def polynomial(self) -> Polynomial:
        """f* before the average over the keys."""
        return self.notation.target

    @property
    def variance(self) -> float:
        """Var f*."""
        return target_variance(self.polynomial, self.n_keys)

    @property
    def heads(self) -> GaussianHeads | None:
        """The head distribution; None for zero mean."""
        return GaussianHeads(mean=self.mean) if self.mean else None

    @property
    def learner(self) -> Learner:
        """What the theory makes of target and layer."""
        layer = TheoryLayer(
            n_keys=self.n_keys,
            model=self.model,
            heads=self.heads,
            activation=self.activation,
            query=self.query,
            fit_intercept=self.fit_intercept,
        )
        return Learner(self.polynomial, layer, self.n_heads)

    def to(self, model: str) -> Question:
        """The same question to a model; the MLP has ReLU units and no head distribution."""
        if model == "mlp":
            return replace(self, model="mlp", mean=0.0, activation="relu")
        return self

    def describe(self) -> str:
        """The settings in a line."""
        heads = "∞" if math.isinf(self.n_heads) else f"{self.n_heads:g}"
        if self.mean:
            heads += f", mean c = {self.mean:g}"
        words = [
            f"d = {self.dim}, N = {self.n_keys}, M = {heads}, ridge λ = {self.ridge:g}, noise "
            f"variance {self.noise:g}"
        ]
        if self.activation != "relu":
            words.append(f"{self.activation} scores")
        if not self.query:
            words.append("no query")
        if self.fit_intercept:
            words.append("intercept")
        return ", ".join(words)

    def curve(self, samples: Sequence[int]) -> Float[np.ndarray, " sizes"]:
        """The predicted test error at every n, noise included."""
        with np.errstate(all="ignore"):
            return self.learner.errors(np.array(samples, dtype=np.float64), self.ridge, self.noise)

    def best_ridge(self, n: int) -> tuple[float, float]:
        """The penalty with the least predicted error at one n, and that error."""
        with np.errstate(all="ignore"):
            return self.learner.best(float(n), self.noise)

    def samples_needed(self, error: float | None) -> int:
        """Samples that bring the error there, with the best penalty."""
        error = _given(error)
        with np.errstate(all="ignore"):
            return theory.samples_needed(
                self.polynomial,
                self.n_keys,
                error,
                model=self.model,
                noise=self.noise,
                n_heads=self.n_heads,
                heads=self.heads,
                activation=self.activation,
                query=self.query,
                fit_intercept=self.fit_intercept,
            )

    def heads_predicted(self, error: float | None) -> int:
        """Heads that bring the error there, with any number of samples."""
        error = _given(error)
        with np.errstate(all="ignore"):
            return theory.heads_predicted(
                self.polynomial, self.n_keys, error, heads=self.heads, activation=self.activation
            )

    def rkhs_norm(self) -> float:
        """The exact norm, which exists for ReLU heads on sets with a query."""
        if self.activation != "relu" or not self.query:
            raise ValueError("norms are those of ReLU heads on sets with a query.")
        with np.errstate(all="ignore"):
            return theory.rkhs_norm(self.polynomial, self.heads)

    def bound(self, kind: str, n: int) -> theory.RiskBound:
        """The bound of the paper, or the one without hidden constants ("kernel")."""
        if kind == "kernel":
            self.rkhs_norm()  # the radius of the ball: refused for other activations
            return theory.kernel_risk_bound(self.polynomial, n, self.n_keys, heads=self.heads)
        if math.isinf(self.n_heads):
            raise ValueError(
                "the paper's bound grows with log(dM): it needs finitely many heads. Pass "
                "--n-heads."
            )
        return theory.risk_bound(self.polynomial, n, self.n_heads)

    def learned(self, samples: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """γ of the theory, and the share of the target that is learned, at every n."""
        with np.errstate(all="ignore"):
            return self.learner.learned(samples, self.ridge, self.noise)

    def levels(self) -> tuple[float, list[dict[str, Any]]]:
        """The trace of the kernel and its levels, largest first, with the target's power in each.

        Of heads with a mean a level is an irrep (a, b). Of the MLP tokens in which a level is
        constant are not listed, and the target's power is None.
        """
        if self.model == "mlp":
            spectrum = theory.mlp_spectrum(self.dim, self.n_keys, 4)
            powers: list[float | None] = [None] * len(spectrum.eigenvalues)
        else:
            degree = max(4, *(part + 1 for part in self.polynomial.degrees))
            if self.mean:
                degree = min(degree, MAX_BIASED_DEGREE)
            bias = bias_of(self.heads, self.dim, self.activation)
            with np.errstate(all="ignore"):
                spectrum, shares = target_levels(
                    self.polynomial, self.n_keys, bias, degree, self.query, self.fit_intercept
                )
            powers = shares.tolist()
        rows = []
        for i, degrees in enumerate(spectrum.degrees.tolist()):
            if self.model == "mlp":
                degrees = [part for part in degrees if part]
            rows.append(
                {
                    "degrees": degrees,
                    "eigenvalue": float(spectrum.eigenvalues[i]),
                    "multiplicity": float(spectrum.multiplicities[i]),
                    "target_power": powers[i],
                }
            )
        return spectrum.trace, rows


# ---- everything about a target -------------------------------------------------------------------


@dataclass
class _Sheet:
    """The answers to many questions: None for what the theory refuses, and the reason is kept."""

    seconds: float = field(default_factory=lambda: QUESTION_SECONDS)
    unavailable: dict[str, str] = field(default_factory=dict)

    def ask(self, name: str, answer: Callable[[], Any]) -> Any:
        """What the theory says; None where it refuses, with the reason under the name."""
        try:
            with time_limit(self.seconds):
                return answer()
        except OutOfTimeError as error:
            self.seconds = LATER_SECONDS
            self.unavailable[name] = str(error)
            return None
        except REFUSALS as error:
            self.unavailable[name] = reason_of(error)
            return None


def report(
    question: Question,
    samples: Sequence[int],
    model: str = "both",
    error: float | None = None,
) -> dict[str, Any]:
    """Ask the theory everything; see the module's text for the form of the answer.

    ``error`` is the squared error that samples and heads are to reach; a tenth of Var f* if it is
    None.
    """
    sheet = _Sheet()
    questions = {name: question.to(name) for name in MODELS[model]}
    target = question.polynomial

    # mean and variance of the target; where they take too long, so does all the rest
    squared_mean = None
    variance = None
    try:
        with time_limit(QUESTION_SECONDS), np.errstate(all="ignore"):
            squared_mean = float(pair_powers(target)[0, 0])
            variance = question.variance
    except OutOfTimeError as reason:
        raise ValueError(f"the harmonic parts of the target are out of reach: {reason}") from None
    except REFUSALS as reason:
        sheet.unavailable["variance"] = reason_of(reason)
    if error is None and variance:
        error = SHARE * variance

    complexity = _complexity(question, error, sheet)
    curves: dict[str, list[dict[str, Any]]] = {}
    spectra: dict[str, dict[str, Any] | None] = {}
    for name, of_model in questions.items():
        levels = sheet.ask(f"spectrum.{name}", of_model.levels)
        spectra[name] = None
        if levels is not None:
            spectra[name] = {"trace": levels[0], "levels": levels[1][:N_LEVELS]}
        curves[name] = [_curve_row(of_model, n, sheet) for n in samples]
    norms = sheet.ask("coefficient_norms", target.coefficient_norms) or {}
    answer = {
        "target": {
            "notation": question.target,
            "expanded": question.notation.text,
            "squared_mean": squared_mean,
            "variance": variance,
        },
        "settings": {
            "dim": question.dim,
            "n_keys": question.n_keys,
            "n_heads": question.n_heads,
            "ridge": question.ridge,
            "noise": question.noise,
            "error": error,
            "delta": 0.05,
            "bias": question.mean,
            "activation": question.activation,
            "query": question.query,
            "fit_intercept": question.fit_intercept,
        },
        "coefficient_norms": [
            {"query_degree": r, "key_degree": s, "squared_norm": squared_norm}
            for (r, s), squared_norm in norms.items()
        ],
        "complexity": complexity,
        "spectrum": spectra,
        "learning_curve": curves,
        "risk_bound": _bound_rows(question, samples, sheet),
        "needed": _needed(question, questions, error, sheet),
        "unavailable": sheet.unavailable,
    }
    return dict(_plain(answer))


def _complexity(question: Question, error: float | None, sheet: _Sheet) -> dict[str, Any]:
    """The squared norms of the target."""
    target = question.polynomial

    def biased() -> dict[str, float]:
        """The norm of a function near the target, for heads with a mean."""
        bound = theory.biased_norm_bound(target, _given(error), question.mean or 1.0)
        return {"squared_norm": bound.norm, "error": bound.error, "mean": bound.mean}

    return {
        "paper_complexity": sheet.ask("paper_complexity", lambda: theory.paper_complexity(target)),
        "rkhs_norm_bound": sheet.ask("rkhs_norm_bound", lambda: theory.rkhs_norm_bound(target)),
        "rkhs_norm": sheet.ask("rkhs_norm", question.rkhs_norm),
        "biased_norm_bound": sheet.ask("biased_norm_bound", biased),
        "mlp_norm": sheet.ask("mlp_norm", lambda: theory.mlp_norm(target, question.n_keys)),
    }


def _given(error: float | None) -> float:
    """The error at which samples and heads are counted; a ValueError where there is none."""
    if error is None:
        raise ValueError("the target has no variance to take a tenth of. Pass --error.")
    return error


def _curve_row(question: Question, n: int, sheet: _Sheet) -> dict[str, Any]:
    """The predicted error at one n, with the penalty of the question and with the best one."""
    name = f"learning_curve.{question.model}.{n}"
    best = sheet.ask(f"{name}.best_ridge", partial(question.best_ridge, n)) or (None, None)
    error = sheet.ask(name, lambda: float(question.curve([n])[0]))
    return {
        "n": n,
        "error": error,
        "best_ridge": best[0],
        "error_at_best_ridge": best[1],
    }


def _bound_rows(question: Question, samples: Sequence[int], sheet: _Sheet) -> list[dict[str, Any]]:
    """Both bounds at every n, where they exist."""
    rows = []
    for n, kind in product(samples, ("paper", "kernel")):
        bound = sheet.ask(f"risk_bound.{kind}", partial(question.bound, kind, n))
        if bound is None:
            continue
        rows.append(
            {
                "kind": kind,
                "n": n,
                "approximation": bound.approximation,
                "estimation": bound.estimation,
                "total": bound.total,
                "constant": bound.constant,
                "statement": bound.statement,
            }
        )
    return rows


def _needed(
    question: Question, questions: dict[str, Question], error: float | None, sheet: _Sheet
) -> dict[str, Any]:
    """Samples and heads that an error needs."""
    samples = {}
    for name, of_model in questions.items():
        samples[name] = sheet.ask(
            f"needed.samples.{name}",
            partial(of_model.samples_needed, error),
        )
    ratio = None
    if samples.get("attention") and samples.get("mlp"):
        ratio = samples["mlp"] / samples["attention"]
    heads_bound = sheet.ask(
        "needed.heads_bound", lambda: theory.heads_needed(question.polynomial, _given(error))
    )
    heads_predicted = sheet.ask("needed.heads_predicted", partial(question.heads_predicted, error))
    return {
        "error": error,
        "samples": samples,
        "mlp_to_attention": ratio,
        "heads_bound": heads_bound,
        "heads_predicted": heads_predicted,
    }


def _plain(value: Any) -> Any:
    """Numbers that JSON can hold: infinity becomes the word "inf", NaN becomes None."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "inf" if value > 0 else None
    return value


# ---- to be read ----------------------------------------------------------------------------------


def sentences(answer: dict[str, Any]) -> list[str]:
    """The answer of `report` in three sentences: samples, errors at the sizes asked for, heads."""
    target = answer["target"]
    variance = target["variance"]
    if not variance:
        return [
            f"{target['expanded']} is constant or too large for floating point, so that there is "
            "nothing to learn."
        ]
    error = answer["needed"]["error"]
    goal = f"{100 * error / variance:.3g} % of Var f*"
    return [
        _samples_sentence(answer, goal),
        _errors_sentence(answer, variance),
        _heads_sentence(answer, goal),
    ]


def _samples_sentence(answer: dict[str, Any], goal: str) -> str:
    """How many samples reach the goal, and how many an MLP needs."""
    n_heads = answer["settings"]["n_heads"]
    width = "infinitely many" if n_heads == "inf" else f"{n_heads:,}"
    names = {
        "attention": f"one attention layer of {width} heads",
        "mlp": "an MLP on the flattened keys",
    }
    parts = []
    for model, count in answer["needed"]["samples"].items():
        if count is None:
            parts.append(f"{names[model]} needs a number of samples that is not known (see below)")
        else:
            parts.append(f"{names[model]} needs {_rounded(count)} samples")
    sentence = f"To come down to {goal} in test error, {' and '.join(parts)}"
    ratio = answer["needed"]["mlp_to_attention"]
    if ratio is not None:
        sentence += f", {_rounded(ratio)} times as many"
    return f"{sentence}."


def _errors_sentence(answer: dict[str, Any], variance: float) -> str:
    """The errors at the sizes asked for, as shares of the variance."""
    parts = []
    for model, rows in answer["learning_curve"].items():
        shares = [
            f"{_percent(row['error_at_best_ridge'] / variance)} at n = {row['n']:,}"
            for row in rows
            if row["error_at_best_ridge"] is not None
        ]
        if shares:
            owner = "attention" if model == "attention" else "the MLP"
            parts.append(f"{owner} leaves {', '.join(shares)}")
    if not parts:
        return "No test error is predicted at these sizes (see below)."
    return f"Of Var f*, with the best penalty, {'; '.join(parts)}."


def _heads_sentence(answer: dict[str, Any], goal: str) -> str:
    """How many heads reach the goal."""
    count = answer["needed"]["heads_predicted"]
    if count is None:
        return "How many random heads it needs is not known (see below)."
    return (
        f"About {_rounded(count)} random heads are enough for {goal} if there are samples in "
        "plenty; fewer cannot come as low."
    )


def _rounded(count: float) -> str:
    """A number to three digits, which is more than a prediction knows.

    >>> _rounded(37_712_345), _rounded(8.3567)
    ('37,700,000', '8.4')
    """
    if count < 10 and count != int(count):
        return f"{count:.1f}"
    whole = round(count)
    return f"{round(whole, -max(0, len(str(whole)) - 3)):,}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share > 0.1 else f"{100 * share:.2g} %"


_NORMS = {"query_degree": "degree in x_0", "key_degree": "in x_i", "squared_norm": "|f_rs|²"}
_MLP_LEVELS = {"degrees": "degrees", "eigenvalue": "eigenvalue", "multiplicity": "multiplicity"}
_LEVELS = {**_MLP_LEVELS, "target_power": "power of the target"}
_CURVE = {
    "n": "n",
    "error": "error",
    "error_at_best_ridge": "at the best ridge",
    "best_ridge": "that ridge",
}
_BOUND = {
    "kind": "bound",
    "n": "n",
    "approximation": "approximation",
    "estimation": "estimation",
    "total": "total",
    "constant": "constant",
}


def tables(answer: dict[str, Any]) -> list[Table]:
    """The answer of `report` as tables."""
    # norms
    blocks = [
        Table("norms", "coefficient norms", _renamed(answer["coefficient_norms"], _NORMS)),
        Table("complexity", "squared norms", _complexity_rows(answer["complexity"])),
    ]

    # spectra
    for model, spectrum in answer["spectrum"].items():
        if spectrum is None:
            continue
        rows = _renamed(spectrum["levels"], _LEVELS if model == "attention" else _MLP_LEVELS)
        for row in rows:
            row["degrees"] = str(tuple(row["degrees"]))
        title = f"spectrum of {model}, largest levels; trace {number(spectrum['trace'])}"
        blocks.append(Table(f"spectrum-{model}", title, rows))

    # learning curves and bounds
    for model, curve in answer["learning_curve"].items():
        title = f"predicted test error of {model} (noise included)"
        blocks.append(Table(f"curve-{model}", title, _renamed(curve, _CURVE)))
    bounds = answer["risk_bound"]
    if bounds:
        statements = dict.fromkeys(f"{row['kind']}: {row['statement']}" for row in bounds)
        rows = _renamed(bounds, _BOUND)
        blocks.append(Table("bounds", "excess risk is at most", rows, note="\n".join(statements)))

    # what suffices
    needed = answer["needed"]
    sizes = {f"samples, {model}, predicted": count for model, count in needed["samples"].items()}
    if needed["mlp_to_attention"] is not None:
        sizes["samples of the MLP over attention's"] = needed["mlp_to_attention"]
    sizes["heads, predicted (any number of samples)"] = needed["heads_predicted"]
    sizes["heads, paper's bound"] = needed["heads_bound"]
    title = f"needed for a squared error of {number(needed['error'])}"
    size_rows = [{"of": name, "number": size} for name, size in sizes.items()]
    blocks.append(Table("needed", title, size_rows))
    return blocks


def _complexity_rows(complexity: dict[str, Any]) -> list[Row]:
    """The squared norms by the names a reader sees."""
    biased = complexity["biased_norm_bound"]
    biased_name = "bound for biased heads"
    biased_value = None
    if biased:
        biased_name += f", of a function within {number(biased['error'])}"
        biased_value = biased["squared_norm"]
    norms = {
        "paper's B(f*)": complexity["paper_complexity"],
        "bound with named constants": complexity["rkhs_norm_bound"],
        "exact, sphere distribution": complexity["rkhs_norm"],
        biased_name: biased_value,
        "MLP, exact": complexity["mlp_norm"],
    }
    return [{"complexity": name, "": value} for name, value in norms.items()]


def _renamed(rows: Sequence[dict[str, Any]], names: dict[str, str]) -> list[dict[str, Any]]:
    """The named fields of every row, under the headings that a reader sees."""
    return [{heading: row[name] for name, heading in names.items()} for row in rows]


def activation_rows(question: Question, samples: Sequence[int]) -> list[dict[str, Any]]:
    """Which activation for which target: the predicted error of each at equal n, best ridge.

    The target of the question may be several with semicolons between them. Errors are shares of
    Var f* with the label noise taken off, for zero-mean heads and, where the question has one, for
    its mean c. An error that the theory refuses is None. The column "best" names the activation
    with the smallest error of a row, all that come within a tenth of it included.
    """
    sheet = _Sheet()
    means = [0.0, question.mean] if question.mean else [0.0]
    rows = []
    for n, text, mean in product(samples, question.target.split(";"), means):
        of_target = replace(question, target=text, mean=mean)
        variance = of_target.variance
        if variance == 0.0:
            raise ValueError(
                f"{of_target.notation.text} has no variance, so that no error can be a share of it."
            )
        errors: dict[str, float | None] = {}
        for name in POINTWISE:
            asked = replace(of_target, activation=name)
            best = sheet.ask(name, partial(asked.best_ridge, n))
            errors[name] = None
            if best is not None:
                errors[name] = max(best[1] - question.noise, 0.0) / variance
        answered = {name: error for name, error in errors.items() if error is not None}
        smallest = min(answered.values(), default=0.0)
        winners = [name for name, error in answered.items() if error <= 1.1 * smallest + 1e-12]
        text = of_target.notation.text
        rows.append({"n": n, "target": text, "c": mean, **errors, "best": ", ".join(winners)})
    return rows


def curve_chart(
    question: Question, samples: Sequence[int], model: str = "both", points: int = 30
) -> Chart:
    """Predicted test errors between the fewest and the most samples asked for."""
    spaced = np.geomspace(min(samples), max(samples), points)
    sizes = np.unique(spaced.round().astype(np.int64)).tolist()
    text = question.notation.text
    series = []
    rows: list[Row] = []
    for name in MODELS[model]:
        errors = question.to(name).curve(sizes).tolist()
        series.append(Series(name=name, x=sizes, y=errors, look="line", role=name))
        for n, error in zip(sizes, errors, strict=True):
            rows.append({"target": text, "model": name, "n": n, "error": error})
    return Chart(
        name="theory",
        title=f"{text}: {question.describe()}",
        x_label="training sets n",
        y_label="predicted test error",
        series=series,
        rows=rows,
        x_log=True,
        y_log=True,
    )
