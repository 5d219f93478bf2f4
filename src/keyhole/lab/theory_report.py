"""What the theory says of one target, before any data.

Complexity, spectrum, learning curve, bounds, sizes needed.

`run` gives a nested dictionary with stable keys, ready for JSON; what cannot be computed is None
there, with the reason under "unavailable".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from keyhole import theory
from keyhole.attention.heads import GaussianHeads
from keyhole.lab.jobs import target_variance
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
    error: float | None = (
        None  # squared error for the samples and heads needed; a tenth of Var f* if not given
    )
    delta: float = 0.05
    constant: float = 1.0
    levels: int = 8
    time_limit: float = 5.0  # seconds that one question about the target may take, by estimate
    bias: float = 0.0  # the mean c of the attention heads, a multiple of the identity

    def distribution(self, model: str = "attention") -> GaussianHeads | None:
        """The head distribution of a model; None for zero mean and for the MLP."""
        return GaussianHeads(mean=self.bias) if self.bias and model == "attention" else None

    def describe(self) -> str:
        """Return the settings in a line."""
        heads = "∞" if math.isinf(self.n_heads) else f"{self.n_heads:g}"
        heads += f", mean c = {self.bias:g}" if self.bias else ""
        return (
            f"d = {self.dim}, N = {self.n_keys}, M = {heads}, ridge λ = {self.ridge:g}, noise "
            f"variance {self.noise:g}"
        )


@dataclass
class _Sheet:
    """A target and its settings.

    A question that the theory refuses is answered by None, and the reason is kept.
    """

    config: TheoryQuestion
    read: Notation
    error: float | None = None
    unavailable: dict[str, str] = field(default_factory=dict)

    def ask(self, name: str, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            with (
                np.errstate(all="ignore"),
                limits(seconds=self.config.time_limit, remedy="raise --time-limit"),
            ):
                return question(*arguments)
        except (ValueError, OverflowError, ArithmeticError) as error:
            self.unavailable[name] = str(error) or type(error).__name__
            return None

    def needed_error(self) -> float:
        if self.error is None:
            raise ValueError("the target has no variance to take a tenth of. Pass --error.")
        return self.error


def run(config: TheoryQuestion) -> dict[str, Any]:
    """Ask the theory everything; see the module's text for the form of the answer."""
    sheet = _Sheet(config, parse_target(config.target, config.dim))
    _check_cost(sheet.read, config.time_limit)
    target = sheet.read.target
    powers = sheet.ask("variance", pair_powers, target)
    variance = None if powers is None else target_variance(target, config.n_keys)
    moments = {
        "squared_mean": None if powers is None else float(powers[0, 0]),
        "variance": variance,
    }
    sheet.error = config.error or (0.1 * variance if variance else None)
    biased = sheet.ask(
        "biased_norm_bound",
        _biased_norm,
        sheet,
    )
    norms = sheet.ask("coefficient_norms", target.coefficient_norms) or {}
    settings = ("dim", "n_keys", "n_heads", "ridge", "noise", "error", "delta", "bias")
    models = MODELS[config.model]
    report = {
        "target": {"notation": config.target, "expanded": sheet.read.text, **moments},
        "settings": {name: getattr(config, name) for name in settings} | {"error": sheet.error},
        "coefficient_norms": [
            {"query_degree": r, "key_degree": s, "squared_norm": value}
            for (r, s), value in norms.items()
        ],
        "complexity": {
            "paper_complexity": sheet.ask("paper_complexity", theory.paper_complexity, target),
            "rkhs_norm_bound": sheet.ask("rkhs_norm_bound", theory.rkhs_norm_bound, target),
            "rkhs_norm": sheet.ask("rkhs_norm", theory.rkhs_norm, target, config.distribution()),
            "biased_norm_bound": biased
            and {"squared_norm": biased.norm, "error": biased.error, "mean": biased.mean},
            "mlp_norm": sheet.ask("mlp_norm", theory.mlp_norm, target, config.n_keys),
        },
        "spectrum": {
            model: sheet.ask(f"spectrum.{model}", _levels, sheet, model) for model in models
        },
        "learning_curve": {
            model: [_curve_row(sheet, model, n) for n in config.samples] for model in models
        },
        "risk_bound": [
            row
            for n in config.samples
            for kind in ("paper", "kernel")
            if (row := sheet.ask(f"risk_bound.{kind}", _bound_row, sheet, kind, n)) is not None
        ],
        "needed": _needed(sheet, models),
        "unavailable": sheet.unavailable,
    }
    return dict(_plain(report))


def _biased_norm(sheet: _Sheet) -> BiasedNorm:
    target, config = sheet.read.target, sheet.config
    if (seconds := biased_norm_seconds(target)) > config.time_limit:
        raise ValueError(
            f"it takes about {seconds:,.0f} s, and {config.time_limit:g} s are allowed. Lower the "
            "target's powers, or raise --time-limit."
        )
    return theory.biased_norm_bound(target, sheet.needed_error(), config.bias or 1.0)


def _check_cost(read: Notation, limit: float) -> None:
    seconds = pair_powers_seconds(read.target)
    if seconds > limit:
        raise ValueError(
            "the harmonic parts of a target must be within reach: multiplied out this one has "
            f"{len(read.target.terms)} terms, which take about {seconds:,.0f} s, and {limit:g} s "
            "are allowed. Lower its powers, or raise --time-limit."
        )


def _levels(sheet: _Sheet, model: str) -> dict[str, Any]:
    """The largest levels of the spectrum, irreps (a, b) for biased heads.

    For attention with the target's powers.
    """
    config, target, attention = sheet.config, sheet.read.target, model == "attention"
    degree = max(4, *(part + 1 for part in target.degrees)) if attention else 4
    powers: Any = None
    if attention:
        spectrum, powers = target_levels(
            target, config.n_keys, bias_of(config.distribution(), config.dim), degree
        )
    else:
        spectrum = theory.mlp_spectrum(config.dim, config.n_keys, degree)
    levels = [
        {
            "degrees": [int(part) for part in degrees if attention or part],
            "eigenvalue": float(spectrum.eigenvalues[i]),
            "multiplicity": float(spectrum.multiplicities[i]),
            "target_power": None if powers is None else float(powers[i]),
        }
        for i, degrees in enumerate(spectrum.degrees[: config.levels].tolist())
    ]
    return {"trace": spectrum.trace, "levels": levels}


def _curve_row(sheet: _Sheet, model: str, n: int) -> dict[str, Any]:
    config, target, name = sheet.config, sheet.read.target, f"learning_curve.{model}.{n}"
    rest = (config.noise, config.n_heads, model, config.distribution(model))
    best = sheet.ask(f"{name}.best_ridge", theory.best_ridge_curve, target, n, config.n_keys, *rest)
    error = sheet.ask(name, theory.learning_curve, target, n, config.n_keys, config.ridge, *rest)
    return {
        "n": n,
        "error": None if error is None else float(error),
        "best_ridge": None if best is None else float(best.ridge),
        "error_at_best_ridge": None if best is None else float(best.error),
    }


def _bound_row(sheet: _Sheet, kind: str, n: int) -> dict[str, Any]:
    """The paper's bound, or the one without hidden constants."""
    config, target = sheet.config, sheet.read.target
    if kind == "kernel":
        found = theory.kernel_risk_bound(
            target, n, config.n_keys, config.delta, config.distribution()
        )
    elif math.isinf(config.n_heads):
        raise ValueError(
            "the paper's bound grows with log(dM): it needs finitely many heads. Pass --n-heads."
        )
    else:
        found = theory.risk_bound(target, n, config.n_heads, config.delta, config.constant)
    names = ("approximation", "estimation", "total", "constant", "statement")
    return {"kind": kind, "n": n, **{name: getattr(found, name) for name in names}}


def _needed(sheet: _Sheet, models: Sequence[str]) -> dict[str, Any]:
    config, target = sheet.config, sheet.read.target

    def samples_of(model: str) -> int:
        rest = (model, config.noise, config.n_heads, config.distribution(model))
        return theory.samples_needed(target, config.n_keys, sheet.needed_error(), *rest)

    samples = {model: sheet.ask(f"needed.samples.{model}", samples_of, model) for model in models}
    both = samples.get("attention") and samples.get("mlp")
    return {
        "error": sheet.error,
        "samples": samples,
        "mlp_to_attention": samples["mlp"] / samples["attention"] if both else None,
        "heads_bound": sheet.ask(
            "needed.heads_bound",
            lambda: theory.heads_needed(
                target, sheet.needed_error(), config.delta, config.constant
            ),
        ),
        "heads_predicted": sheet.ask(
            "needed.heads_predicted",
            lambda: theory.heads_predicted(
                target, config.n_keys, sheet.needed_error(), heads=config.distribution()
            ),
        ),
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
    complexity, needed, bounds = report["complexity"], report["needed"], report["risk_bound"]
    biased = complexity["biased_norm_bound"] or {}
    near = f", of a function within {number(biased['error'])}" if biased else ""
    norms = {
        "paper's B(f*)": complexity["paper_complexity"],
        "bound with named constants": complexity["rkhs_norm_bound"],
        "exact, sphere distribution": complexity["rkhs_norm"],
        f"bound for biased heads{near}": biased.get("squared_norm"),
        "MLP, exact": complexity["mlp_norm"],
    }
    found = [
        Table("norms", "coefficient norms", _renamed(report["coefficient_norms"], _NORMS)),
        Table(
            "complexity",
            "squared norms",
            [{"complexity": name, "": value} for name, value in norms.items()],
        ),
    ]
    for model, spectrum in report["spectrum"].items():
        if spectrum is not None:
            title = f"spectrum of {model}, largest levels; trace {number(spectrum['trace'])}"
            rows = _renamed(spectrum["levels"], _LEVELS if model == "attention" else _MLP_LEVELS)
            rows = [{**row, "degrees": str(tuple(row["degrees"]))} for row in rows]
            found.append(Table(f"spectrum-{model}", title, rows))
    for model, rows in report["learning_curve"].items():
        title = f"predicted test error of {model} (noise included)"
        found.append(Table(f"curve-{model}", title, _renamed(rows, _CURVE)))
    if bounds:
        statements = dict.fromkeys(f"{row['kind']}: {row['statement']}" for row in bounds)
        rows = _renamed(bounds, _BOUND)
        found.append(Table("bounds", "excess risk is at most", rows, note="\n".join(statements)))
    sizes = {f"samples, {model}, predicted": value for model, value in needed["samples"].items()}
    if needed["mlp_to_attention"] is not None:
        sizes["samples of the MLP over attention's"] = needed["mlp_to_attention"]
    sizes["heads, predicted (any number of samples)"] = needed["heads_predicted"]
    sizes["heads, paper's bound"] = needed["heads_bound"]
    title = f"needed for a squared error of {number(needed['error'])}"
    return [
        *found,
        Table("needed", title, [{"of": name, "number": value} for name, value in sizes.items()]),
    ]


_NORMS = {"query_degree": "degree in x_0", "key_degree": "in x_i", "squared_norm": "|f_rs|²"}
_MLP_LEVELS = {"degrees": "degrees", "eigenvalue": "eigenvalue", "multiplicity": "multiplicity"}
_LEVELS = {**_MLP_LEVELS, "target_power": "power of the target"}
_CURVE = {
    "n": "n",
    "error": "error",
    "error_at_best_ridge": "at the best ridge",
    "best_ridge": "that ridge",
}
_BOUND = {"kind": "bound"} | {
    name: name for name in ("n", "approximation", "estimation", "total", "constant")
}


def _renamed(rows: Sequence[dict[str, Any]], names: dict[str, str]) -> list[dict[str, Any]]:
    return [{words: row[name] for name, words in names.items()} for row in rows]


def curve_rows(config: TheoryQuestion, points: int = 30) -> list[dict[str, Any]]:
    """Predicted test errors between the fewest and the most samples asked for.

    What `plot` draws.
    """
    read = parse_target(config.target, config.dim)
    sizes = np.unique(
        np.geomspace(min(config.samples), max(config.samples), points).round().astype(np.int64)
    )
    rows = []
    for model in MODELS[config.model]:
        rest = (config.ridge, config.noise, config.n_heads, model, config.distribution(model))
        with np.errstate(all="ignore"):
            errors = theory.learning_curve(read.target, sizes, config.n_keys, *rest)
        points_of = zip(sizes.tolist(), errors.tolist(), strict=True)
        rows += [
            {"target": read.text, "model": model, "n": n, "error": error} for n, error in points_of
        ]
    return rows


def plot(rows: Sequence[dict[str, Any]], config: TheoryQuestion, folder: Path) -> list[Path]:
    """Draw the curves, and write the rows beside them."""
    from keyhole.lab.report.html import write_chart

    series = []
    for model in MODELS[config.model]:
        own = [row for row in rows if row["model"] == model]
        points = [row["n"] for row in own], [row["error"] for row in own]
        series.append(Series(model, *points, look="line", role=model))
    title = f"{rows[0]['target']}: {config.describe()}"
    labels = ("training sets n", "predicted test error")
    return write_chart(
        Chart("theory", title, *labels, series, rows, x_log=True, y_log=True), folder
    )
