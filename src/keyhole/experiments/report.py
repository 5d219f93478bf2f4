"""What the theory says of one target, before any data: complexity, spectrum, learning curve, bounds, sizes needed.

`run` gives a nested dictionary with stable keys, ready for JSON; what cannot be computed is None there, with the
reason under "unavailable".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from keyhole import theory
from keyhole.notation import Notation, parse_target
from keyhole.report import Chart, Series
from keyhole.theory import Spectrum, pair_powers

Row = dict[str, Any]

MODELS = {"attention": ("attention",), "mlp": ("mlp",), "both": ("attention", "mlp")}


@dataclass(frozen=True)
class Config:
    """One question to the theory."""

    target: str
    dim: int = 16
    n_keys: int = 16
    samples: tuple[int, ...] = (100, 1000, 10_000, 100_000)
    n_heads: float = math.inf
    ridge: float = 1e-5
    noise: float = 0.0
    model: str = "both"
    error: float | None = None
    """Squared error for the samples and heads needed; a tenth of Var f* if not given."""
    delta: float = 0.05
    constant: float = 1.0
    levels: int = 8

    def describe(self) -> str:
        """Return the settings in a line."""
        heads = "∞" if math.isinf(self.n_heads) else f"{self.n_heads:g}"
        return (
            f"d = {self.dim}, N = {self.n_keys}, M = {heads}, ridge λ = {self.ridge:g}, noise variance {self.noise:g}"
        )


class _Sheet:
    """Answers by name; a question the theory refuses leaves None and the reason."""

    def __init__(self) -> None:
        self.unavailable: dict[str, str] = {}

    def ask(self, name: str, question: Callable[[], Any]) -> Any:
        try:
            with np.errstate(all="ignore"):
                return question()
        except (ValueError, OverflowError, ArithmeticError) as error:
            self.unavailable[name] = str(error) or type(error).__name__
            return None


def run(config: Config) -> dict[str, Any]:
    """Ask the theory everything; see the module's text for the form of the answer."""
    read = parse_target(config.target, config.dim)
    sheet, target = _Sheet(), read.target
    moments = sheet.ask("variance", lambda: _moments(pair_powers(target), config.n_keys))
    spread = None if moments is None else moments["variance"]
    error = config.error if config.error is not None else (0.1 * spread if spread else None)
    models = MODELS[config.model]
    norms = sheet.ask("coefficient_norms", target.coefficient_norms) or {}
    report = {
        "target": {"notation": config.target, "expanded": read.text, **(moments or _NO_MOMENTS)},
        "settings": _settings(config, error),
        "coefficient_norms": [
            {"query_degree": r, "key_degree": s, "squared_norm": value} for (r, s), value in norms.items()
        ],
        "complexity": _complexity(sheet, read, config, error),
        "spectrum": {model: _levels(sheet, read, config, model) for model in models},
        "learning_curve": {model: _curve(sheet, read, config, model) for model in models},
        "risk_bound": _bounds(sheet, read, config),
        "needed": _needed(sheet, read, config, error, models),
        "unavailable": sheet.unavailable,
    }
    return dict(_plain(report))


_NO_MOMENTS = {"squared_mean": None, "variance": None}


def _moments(powers: np.ndarray, n_keys: int) -> dict[str, float]:
    varying = float(powers[1:, 0].sum() + powers[:, 1:].sum() / n_keys)
    return {"squared_mean": float(powers[0, 0]), "variance": varying}


def _settings(config: Config, error: float | None) -> dict[str, Any]:
    return {
        "dim": config.dim,
        "n_keys": config.n_keys,
        "n_heads": config.n_heads,
        "ridge": config.ridge,
        "noise": config.noise,
        "error": error,
        "delta": config.delta,
    }


def _complexity(sheet: _Sheet, read: Notation, config: Config, error: float | None) -> dict[str, Any]:
    target = read.target

    def biased() -> dict[str, float]:
        if error is None:
            raise ValueError("the target has no variance to take a share of. Pass an error.")
        bound = theory.biased_norm_bound(target, error)
        return {"squared_norm": bound.norm, "error": bound.error, "mean": bound.mean}

    return {
        "paper_complexity": sheet.ask("paper_complexity", lambda: theory.paper_complexity(target)),
        "rkhs_norm_bound": sheet.ask("rkhs_norm_bound", lambda: theory.rkhs_norm_bound(target)),
        "rkhs_norm": sheet.ask("rkhs_norm", lambda: theory.rkhs_norm(target)),
        "biased_norm_bound": sheet.ask("biased_norm_bound", biased),
        "mlp_norm": sheet.ask("mlp_norm", lambda: theory.mlp_norm(target, config.n_keys)),
    }


def _levels(sheet: _Sheet, read: Notation, config: Config, model: str) -> dict[str, Any] | None:
    """The largest levels of the spectrum; for attention with the share of the target in each."""

    def question() -> dict[str, Any]:
        degree = 4 if model == "mlp" else max(4, *pair_powers(read.target).shape)
        find = theory.attention_spectrum if model == "attention" else theory.mlp_spectrum
        spectrum = find(config.dim, config.n_keys, degree)
        shares = _shares(spectrum, read, config) if model == "attention" else {}
        return {
            "trace": spectrum.trace,
            "levels": [
                {
                    "degrees": [int(part) for part in spectrum.degrees[i] if model == "attention" or part],
                    "eigenvalue": float(spectrum.eigenvalues[i]),
                    "multiplicity": float(spectrum.multiplicities[i]),
                    "target_power": shares.get(i),
                }
                for i in range(min(config.levels, len(spectrum.eigenvalues)))
            ],
        }

    answer: dict[str, Any] | None = sheet.ask(f"spectrum.{model}", question)
    return answer


def _shares(spectrum: Spectrum, read: Notation, config: Config) -> dict[int, float]:
    """The target's power in every level of the attention kernel."""
    powers = pair_powers(read.target).copy()
    powers[:, 1:] /= config.n_keys
    rows, columns = powers.shape
    return {i: float(powers[r, s]) if r < rows and s < columns else 0.0 for i, (r, s) in enumerate(spectrum.degrees)}


def _curve(sheet: _Sheet, read: Notation, config: Config, model: str) -> list[Row]:
    return [_curve_row(sheet, read, config, model, n) for n in config.samples]


def _curve_row(sheet: _Sheet, read: Notation, config: Config, model: str, n: int) -> Row:
    here = f"learning_curve.{model}.{n}"

    def at_best_ridge() -> theory.BestRidge:
        return theory.best_ridge_curve(read.target, n, config.n_keys, config.noise, config.n_heads, model)

    best: theory.BestRidge | None = sheet.ask(f"{here}.best_ridge", at_best_ridge)
    return {
        "n": n,
        "error": sheet.ask(here, lambda: float(_error(read, config, n, model))),
        "best_ridge": None if best is None else float(best.ridge),
        "error_at_best_ridge": None if best is None else float(best.error),
    }


def _error(read: Notation, config: Config, n: Any, model: str) -> Any:
    return theory.learning_curve(read.target, n, config.n_keys, config.ridge, config.noise, config.n_heads, model)


def _bounds(sheet: _Sheet, read: Notation, config: Config) -> list[Row]:
    """The paper's bound, and the one without hidden constants, for every number of samples."""

    def paper(n: int) -> theory.RiskBound:
        if math.isinf(config.n_heads):
            raise ValueError("the paper's bound grows with log(dM): it needs finitely many heads. Pass --heads.")
        return theory.risk_bound(read.target, n, config.n_heads, config.delta, config.constant)

    def kernel(n: int) -> theory.RiskBound:
        return theory.kernel_risk_bound(read.target, n, config.n_keys, config.delta)

    rows = [_bound_row(sheet, kind, n) for n in config.samples for kind in (paper, kernel)]
    return [row for row in rows if row is not None]


def _bound_row(sheet: _Sheet, kind: Callable[[int], theory.RiskBound], n: int) -> Row | None:
    bound: theory.RiskBound | None = sheet.ask(f"risk_bound.{kind.__name__}", lambda: kind(n))
    if bound is None:
        return None
    terms = {"approximation": bound.approximation, "estimation": bound.estimation, "total": bound.total}
    return {"kind": kind.__name__, "n": n, **terms, "constant": bound.constant, "statement": bound.statement}


def _needed(
    sheet: _Sheet, read: Notation, config: Config, error: float | None, models: Sequence[str]
) -> dict[str, Any]:
    def asked() -> float:
        if error is None:
            raise ValueError("the target has no variance to take a tenth of. Pass --error.")
        return error

    def samples_of(model: str) -> int:
        return theory.samples_needed(read.target, config.n_keys, asked(), model, config.noise, config.n_heads)

    samples = {model: sheet.ask(f"needed.samples.{model}", partial(samples_of, model)) for model in models}
    both = samples.get("attention") and samples.get("mlp")
    return {
        "error": error,
        "samples": samples,
        "mlp_to_attention": samples["mlp"] / samples["attention"] if both else None,
        "heads_bound": sheet.ask(
            "needed.heads_bound",
            lambda: theory.heads_needed(read.target, asked(), config.delta, config.constant),
        ),
        "heads_predicted": sheet.ask(
            "needed.heads_predicted",
            lambda: theory.heads_predicted(read.target, config.n_keys, asked()),
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


def curve_rows(config: Config, points: int = 30) -> list[Row]:
    """Predicted test errors between the fewest and the most samples asked for: what `plot` draws."""
    read = parse_target(config.target, config.dim)
    sizes = np.unique(np.geomspace(min(config.samples), max(config.samples), points).round().astype(np.int64))
    rows = []
    for model in MODELS[config.model]:
        with np.errstate(all="ignore"):
            errors = _error(read, config, sizes, model)
        rows += [
            {"target": read.text, "model": model, "n": int(n), "error": float(error)}
            for n, error in zip(sizes, errors, strict=True)
        ]
    return rows


def plot(rows: Sequence[Row], config: Config, folder: Path) -> list[Path]:
    """Draw the curves, and write the rows beside them."""
    from keyhole.report.html import write_chart

    series = [
        Series(model, [row["n"] for row in own], [row["error"] for row in own], look="line", role=model)
        for model in MODELS[config.model]
        for own in [[row for row in rows if row["model"] == model]]
    ]
    title = f"{rows[0]['target']}: {config.describe()}"
    labels = ("training sets n", "predicted test error")
    return write_chart(Chart("theory", title, *labels, series, rows, x_log=True, y_log=True), folder)
