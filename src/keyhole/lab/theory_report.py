"""What the theory says of one target, before any data.

Complexity, spectrum, learning curve, bounds, sizes needed.

`run` gives a nested dictionary with stable keys, ready for JSON; what cannot be computed is None
there, with the reason under "unavailable".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from keyhole import theory
from keyhole.attention.activations import POINTWISE
from keyhole.attention.heads import GaussianHeads
from keyhole.lab.cells import target_variance
from keyhole.lab.report.document import Chart, Series, Table
from keyhole.lab.report.html import number
from keyhole.theory.biased import BiasedNorm, biased_norm_seconds
from keyhole.theory.blocks import bias_of
from keyhole.theory.curves import target_levels
from keyhole.theory.harmonics import pair_powers, pair_powers_seconds
from keyhole.theory.limits import limits
from keyhole.theory.notation import Notation, parse_target

MODELS = {"attention": ("attention",), "mlp": ("mlp",), "both": ("attention", "mlp")}


@dataclass(frozen=True)
class TheoryQuestion:
    """One question to the theory."""

    target: str
    dim: int = 16
    n_keys: int = 16
    samples: tuple[int, ...] = (100, 1000, 10_000, 100_000)
    n_heads: float = math.inf
    ridge: float = 1e-5
    noise: float = 0.0
    model: str = "both"
    # squared error for the samples and heads needed; a tenth of Var f* if not given
    error: float | None = None
    delta: float = 0.05
    constant: float = 1.0
    levels: int = 8
    time_limit: float = 5.0  # seconds that one question about the target may take, by estimate
    bias: float = 0.0  # the mean c of the attention heads, a multiple of the identity
    activation: str = "relu"  # of the attention heads
    query: bool = True
    fit_intercept: bool = False

    def distribution(self, model: str = "attention") -> GaussianHeads | None:
        """The head distribution of a model; None for zero mean and for the MLP."""
        if model != "attention" or not self.bias:
            return None
        return GaussianHeads(mean=self.bias)

    def describe(self) -> str:
        """Return the settings in a line."""
        heads = "∞" if math.isinf(self.n_heads) else f"{self.n_heads:g}"
        if self.bias:
            heads += f", mean c = {self.bias:g}"
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

    def activation_of(self, model: str) -> str:
        """The activation of a model; the MLP has ReLU units."""
        return self.activation if model == "attention" else "relu"


@dataclass
class _Sheet:
    """A target and its settings.

    A question that the theory refuses is answered by None, and the reason is kept.
    """

    config: TheoryQuestion
    read: Notation
    error: float | None = None
    unavailable: dict[str, str] = field(default_factory=dict)

    def ask(self, name: str, question: Callable[[], Any]) -> Any:
        """What the theory says; None where it refuses, with the reason under the name."""
        try:
            with (
                np.errstate(all="ignore"),
                limits(seconds=self.config.time_limit, remedy="raise --time-limit"),
            ):
                return question()
        except (ValueError, OverflowError, ArithmeticError) as error:
            self.unavailable[name] = str(error) or type(error).__name__
            return None

    def needed_error(self) -> float:
        """The error at which samples and heads are counted; a ValueError where there is none."""
        if self.error is None:
            raise ValueError("the target has no variance to take a tenth of. Pass --error.")
        return self.error


def run(config: TheoryQuestion) -> dict[str, Any]:
    """Ask the theory everything; see the module's text for the form of the answer."""
    sheet = _Sheet(config, parse_target(config.target, config.dim))
    _check_cost(sheet.read, config.time_limit)
    target = sheet.read.target
    models = MODELS[config.model]

    # mean and variance of the target, and the error at which samples and heads are counted
    powers = sheet.ask("variance", lambda: pair_powers(target))
    squared_mean = None
    variance = None
    if powers is not None:
        squared_mean = float(powers[0, 0])
        variance = target_variance(target, config.n_keys)
    if config.error:
        sheet.error = config.error
    elif variance:
        sheet.error = 0.1 * variance

    # the questions, in the order in which refusals are listed
    complexity: dict[str, Any] = {}
    biased_norm_bound = _biased_norm_bound(sheet)
    coefficient_norms = sheet.ask("coefficient_norms", target.coefficient_norms) or {}
    complexity["paper_complexity"] = sheet.ask(
        "paper_complexity", lambda: theory.paper_complexity(target)
    )
    complexity["rkhs_norm_bound"] = sheet.ask(
        "rkhs_norm_bound", lambda: theory.rkhs_norm_bound(target)
    )
    complexity["rkhs_norm"] = sheet.ask("rkhs_norm", lambda: _relu_norm(sheet))
    complexity["biased_norm_bound"] = biased_norm_bound
    complexity["mlp_norm"] = sheet.ask("mlp_norm", lambda: theory.mlp_norm(target, config.n_keys))
    report = {
        "target": {
            "notation": config.target,
            "expanded": sheet.read.text,
            "squared_mean": squared_mean,
            "variance": variance,
        },
        "settings": {
            "dim": config.dim,
            "n_keys": config.n_keys,
            "n_heads": config.n_heads,
            "ridge": config.ridge,
            "noise": config.noise,
            "error": sheet.error,
            "delta": config.delta,
            "bias": config.bias,
            "activation": config.activation,
            "query": config.query,
            "fit_intercept": config.fit_intercept,
        },
        "coefficient_norms": [
            {"query_degree": r, "key_degree": s, "squared_norm": squared_norm}
            for (r, s), squared_norm in coefficient_norms.items()
        ],
        "complexity": complexity,
        "spectrum": {model: _spectrum(sheet, model) for model in models},
        "learning_curve": {
            model: [_curve_row(sheet, model, n) for n in config.samples] for model in models
        },
        "risk_bound": _bound_rows(sheet),
        "needed": _needed(sheet, models),
        "unavailable": sheet.unavailable,
    }
    return dict(_plain(report))


def _relu_norm(sheet: _Sheet) -> float:
    """The exact norm, which exists for ReLU heads on sets with a query."""
    config = sheet.config
    if config.activation != "relu" or not config.query:
        raise ValueError("norms are those of ReLU heads on sets with a query.")
    return theory.rkhs_norm(sheet.read.target, config.distribution())


def _biased_norm_bound(sheet: _Sheet) -> dict[str, Any] | None:
    """The norm of a function near the target, for heads with a mean."""
    bound = sheet.ask("biased_norm_bound", lambda: _biased_norm(sheet))
    if bound is None:
        return None
    return {"squared_norm": bound.norm, "error": bound.error, "mean": bound.mean}


def _biased_norm(sheet: _Sheet) -> BiasedNorm:
    """The bound itself; a ValueError where it would take too long."""
    target = sheet.read.target
    config = sheet.config
    seconds = biased_norm_seconds(target)
    if seconds > config.time_limit:
        raise ValueError(
            f"it takes about {seconds:,.0f} s, and {config.time_limit:g} s are allowed. Lower the "
            "target's powers, or raise --time-limit."
        )
    return theory.biased_norm_bound(target, sheet.needed_error(), config.bias or 1.0)


def _check_cost(read: Notation, limit: float) -> None:
    """Raise a ValueError where the harmonic parts of the target would take too long."""
    seconds = pair_powers_seconds(read.target)
    if seconds > limit:
        raise ValueError(
            "the harmonic parts of a target must be within reach: multiplied out this one has "
            f"{len(read.target.terms)} terms, which take about {seconds:,.0f} s, and {limit:g} s "
            "are allowed. Lower its powers, or raise --time-limit."
        )


def _spectrum(sheet: _Sheet, model: str) -> dict[str, Any] | None:
    """The spectrum of a model; None where the theory refuses."""
    if model == "attention":
        spectrum: dict[str, Any] | None = sheet.ask(
            "spectrum.attention", lambda: _attention_levels(sheet)
        )
    else:
        spectrum = sheet.ask("spectrum.mlp", lambda: _mlp_levels(sheet))
    return spectrum


def _attention_levels(sheet: _Sheet) -> dict[str, Any]:
    """The largest levels of attention, irreps (a, b) for biased heads, with the target's powers."""
    config = sheet.config
    target = sheet.read.target
    degree = max(4, *(part + 1 for part in target.degrees))
    bias = bias_of(config.distribution(), config.dim, config.activation)
    spectrum, powers = target_levels(
        target, config.n_keys, bias, degree, config.query, config.fit_intercept
    )
    levels = [
        {
            "degrees": [int(part) for part in degrees],
            "eigenvalue": float(spectrum.eigenvalues[i]),
            "multiplicity": float(spectrum.multiplicities[i]),
            "target_power": float(powers[i]),
        }
        for i, degrees in enumerate(spectrum.degrees[: config.levels].tolist())
    ]
    return {"trace": spectrum.trace, "levels": levels}


def _mlp_levels(sheet: _Sheet) -> dict[str, Any]:
    """The largest levels of the MLP; tokens in which a level is constant are not listed."""
    config = sheet.config
    spectrum = theory.mlp_spectrum(config.dim, config.n_keys, 4)
    levels = [
        {
            "degrees": [int(part) for part in degrees if part],
            "eigenvalue": float(spectrum.eigenvalues[i]),
            "multiplicity": float(spectrum.multiplicities[i]),
            "target_power": None,
        }
        for i, degrees in enumerate(spectrum.degrees[: config.levels].tolist())
    ]
    return {"trace": spectrum.trace, "levels": levels}


def _curve_row(sheet: _Sheet, model: str, n: int) -> dict[str, Any]:
    """The predicted error at one n, with the penalty of the question and with the best one."""
    config = sheet.config
    target = sheet.read.target
    distribution = config.distribution(model)
    name = f"learning_curve.{model}.{n}"
    best = sheet.ask(
        f"{name}.best_ridge",
        lambda: theory.best_ridge_curve(
            target,
            n,
            config.n_keys,
            noise=config.noise,
            n_heads=config.n_heads,
            model=model,
            heads=distribution,
            activation=config.activation_of(model),
            query=config.query,
            fit_intercept=config.fit_intercept,
        ),
    )
    error = sheet.ask(
        name,
        lambda: theory.learning_curve(
            target,
            n,
            config.n_keys,
            config.ridge,
            noise=config.noise,
            n_heads=config.n_heads,
            model=model,
            heads=distribution,
            activation=config.activation_of(model),
            query=config.query,
            fit_intercept=config.fit_intercept,
        ),
    )
    return {
        "n": n,
        "error": None if error is None else float(error),
        "best_ridge": None if best is None else float(best.ridge),
        "error_at_best_ridge": None if best is None else float(best.error),
    }


def _bound_rows(sheet: _Sheet) -> list[dict[str, Any]]:
    """Both bounds at every n, where they exist."""
    rows = []
    for n in sheet.config.samples:
        for kind in ("paper", "kernel"):
            row = sheet.ask(f"risk_bound.{kind}", partial(_bound_row, sheet, kind, n))
            if row is not None:
                rows.append(row)
    return rows


def _bound_row(sheet: _Sheet, kind: str, n: int) -> dict[str, Any]:
    """The paper's bound, or the one without hidden constants."""
    config = sheet.config
    target = sheet.read.target
    if kind == "kernel":
        _relu_norm(sheet)  # the radius of the ball: refused for other activations
        bound = theory.kernel_risk_bound(
            target, n, config.n_keys, config.delta, config.distribution()
        )
    elif math.isinf(config.n_heads):
        raise ValueError(
            "the paper's bound grows with log(dM): it needs finitely many heads. Pass --n-heads."
        )
    else:
        bound = theory.risk_bound(target, n, config.n_heads, config.delta, config.constant)
    return {
        "kind": kind,
        "n": n,
        "approximation": bound.approximation,
        "estimation": bound.estimation,
        "total": bound.total,
        "constant": bound.constant,
        "statement": bound.statement,
    }


def _needed(sheet: _Sheet, models: Sequence[str]) -> dict[str, Any]:
    """Samples and heads that the error of the sheet needs."""
    config = sheet.config
    target = sheet.read.target

    def samples_of(model: str) -> int:
        return theory.samples_needed(
            target,
            config.n_keys,
            sheet.needed_error(),
            model=model,
            noise=config.noise,
            n_heads=config.n_heads,
            heads=config.distribution(model),
            activation=config.activation_of(model),
            query=config.query,
            fit_intercept=config.fit_intercept,
        )

    def heads_bound() -> Any:
        return theory.heads_needed(target, sheet.needed_error(), config.delta, config.constant)

    def heads_predicted() -> int:
        return theory.heads_predicted(
            target,
            config.n_keys,
            sheet.needed_error(),
            heads=config.distribution(),
            activation=config.activation,
        )

    samples = {}
    for model in models:
        samples[model] = sheet.ask(f"needed.samples.{model}", partial(samples_of, model))
    ratio = None
    if samples.get("attention") and samples.get("mlp"):
        ratio = samples["mlp"] / samples["attention"]
    return {
        "error": sheet.error,
        "samples": samples,
        "mlp_to_attention": ratio,
        "heads_bound": sheet.ask("needed.heads_bound", heads_bound),
        "heads_predicted": sheet.ask("needed.heads_predicted", heads_predicted),
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


def tables(report: dict[str, Any]) -> list[Table]:
    """The answer as tables to be read."""
    # norms
    norm_rows = _renamed(report["coefficient_norms"], _NORMS)
    blocks = [
        Table("norms", "coefficient norms", norm_rows),
        Table("complexity", "squared norms", _complexity_rows(report["complexity"])),
    ]

    # spectra
    for model, spectrum in report["spectrum"].items():
        if spectrum is None:
            continue
        names = _LEVELS if model == "attention" else _MLP_LEVELS
        rows = _renamed(spectrum["levels"], names)
        for row in rows:
            row["degrees"] = str(tuple(row["degrees"]))
        title = f"spectrum of {model}, largest levels; trace {number(spectrum['trace'])}"
        blocks.append(Table(f"spectrum-{model}", title, rows))

    # learning curves and bounds
    for model, curve in report["learning_curve"].items():
        title = f"predicted test error of {model} (noise included)"
        blocks.append(Table(f"curve-{model}", title, _renamed(curve, _CURVE)))
    bounds = report["risk_bound"]
    if bounds:
        statements = dict.fromkeys(f"{row['kind']}: {row['statement']}" for row in bounds)
        rows = _renamed(bounds, _BOUND)
        blocks.append(Table("bounds", "excess risk is at most", rows, note="\n".join(statements)))

    # what suffices
    needed = report["needed"]
    sizes = {f"samples, {model}, predicted": count for model, count in needed["samples"].items()}
    if needed["mlp_to_attention"] is not None:
        sizes["samples of the MLP over attention's"] = needed["mlp_to_attention"]
    sizes["heads, predicted (any number of samples)"] = needed["heads_predicted"]
    sizes["heads, paper's bound"] = needed["heads_bound"]
    title = f"needed for a squared error of {number(needed['error'])}"
    size_rows = [{"of": name, "number": size} for name, size in sizes.items()]
    blocks.append(Table("needed", title, size_rows))
    return blocks


_NORMS = {"query_degree": "degree in x_0", "key_degree": "in x_i", "squared_norm": "|f_rs|²"}
_MLP_LEVELS = {"degrees": "degrees", "eigenvalue": "eigenvalue", "multiplicity": "multiplicity"}
_LEVELS = {**_MLP_LEVELS, "target_power": "power of the target"}
_CURVE = {
    "n": "n",
    "error": "error",
    "error_at_best_ridge": "at the best ridge",
    "best_ridge": "that ridge",
}


def _complexity_rows(complexity: dict[str, Any]) -> list[dict[str, Any]]:
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


_BOUND = {
    "kind": "bound",
    "n": "n",
    "approximation": "approximation",
    "estimation": "estimation",
    "total": "total",
    "constant": "constant",
}


def _renamed(rows: Sequence[dict[str, Any]], names: dict[str, str]) -> list[dict[str, Any]]:
    """The named fields of every row, under the headings that a reader sees."""
    return [{heading: row[name] for name, heading in names.items()} for row in rows]


def activation_rows(config: TheoryQuestion) -> list[dict[str, Any]]:
    """Which activation for which target: the predicted error of each at equal n, best ridge.

    The target of the question may be several with semicolons between them. Errors are shares of
    Var f* with the label noise taken off, for zero-mean heads and, where the question has one, for
    its mean c. An error that the theory refuses is None. The column "best" names the activation
    with the smallest error of a row, all that come within a tenth of it included.
    """
    means = [0.0, config.bias] if config.bias else [0.0]
    rows = []
    for n in config.samples:
        for text, mean in product(config.target.split(";"), means):
            read = parse_target(text, config.dim)
            errors = {name: _activation_error(config, read, n, mean, name) for name in POINTWISE}
            answered = {name: error for name, error in errors.items() if error is not None}
            smallest = min(answered.values(), default=0.0)
            best = [name for name, error in answered.items() if error <= 1.1 * smallest + 1e-12]
            row = {"n": n, "target": read.text, "c": mean, **errors, "best": ", ".join(best)}
            rows.append(row)
    return rows


def _activation_error(
    config: TheoryQuestion, read: Notation, n: int, mean: float, activation: str
) -> float | None:
    """The predicted error of one activation over Var f*, or None where the theory refuses."""
    variance = target_variance(read.target, config.n_keys)
    if variance == 0.0:
        raise ValueError(f"{read.text} has no variance, so that no error can be a share of it.")
    sheet = _Sheet(config, read)
    best = sheet.ask(
        activation,
        lambda: theory.best_ridge_curve(
            read.target,
            n,
            config.n_keys,
            noise=config.noise,
            n_heads=config.n_heads,
            heads=GaussianHeads(mean=mean),
            activation=activation,
            query=config.query,
            fit_intercept=config.fit_intercept,
        ),
    )
    if best is None:
        return None
    return max(float(best.error) - config.noise, 0.0) / variance


def curve_rows(config: TheoryQuestion, points: int = 30) -> list[dict[str, Any]]:
    """Predicted test errors between the fewest and the most samples asked for.

    What `plot` draws.
    """
    read = parse_target(config.target, config.dim)
    spaced = np.geomspace(min(config.samples), max(config.samples), points)
    sizes = np.unique(spaced.round().astype(np.int64))
    rows = []
    for model in MODELS[config.model]:
        with np.errstate(all="ignore"):
            errors = theory.learning_curve(
                read.target,
                sizes,
                config.n_keys,
                config.ridge,
                noise=config.noise,
                n_heads=config.n_heads,
                model=model,
                heads=config.distribution(model),
                activation=config.activation_of(model),
                query=config.query,
                fit_intercept=config.fit_intercept,
            )
        for n, error in zip(sizes.tolist(), errors.tolist(), strict=True):
            rows.append({"target": read.text, "model": model, "n": n, "error": error})
    return rows


def plot(rows: Sequence[dict[str, Any]], config: TheoryQuestion, folder: Path) -> list[Path]:
    """Draw the curves, and write the rows beside them."""
    from keyhole.lab.report.html import write_chart

    series = []
    for model in MODELS[config.model]:
        model_rows = [row for row in rows if row["model"] == model]
        series.append(
            Series(
                name=model,
                x=[row["n"] for row in model_rows],
                y=[row["error"] for row in model_rows],
                look="line",
                role=model,
            )
        )
    chart = Chart(
        name="theory",
        title=f"{rows[0]['target']}: {config.describe()}",
        x_label="training sets n",
        y_label="predicted test error",
        series=series,
        rows=rows,
        x_log=True,
        y_log=True,
    )
    return write_chart(chart, folder)
