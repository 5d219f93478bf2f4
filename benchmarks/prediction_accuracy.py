"""Predicted over measured test errors on random settings: how far theory can be trusted.

    PYTHONPATH=src python benchmarks/prediction_accuracy.py --out out/prediction_accuracy

Three kinds of settings, each drawn from a seed of its own (`--seed`), none chosen by hand:

* infinite: infinitely many ReLU heads, `learning_curve`, n from 50 to 3000;
* finite: 10 to 300 ReLU heads, `conditional_curve` on fresh sets, n from 50 to 3000;
* activations: infinitely many linear, square, step and exp heads, n from 400 to 3000.

A setting has d from 2 to 24 and N from 1 to 32 (both uniform in the logarithm), a target that is a
sum of one to three of corr^q * token, token^p, query^p with random coefficients and a constant in
every second one, heads of mean 0 (every second one) or up to 5 and scale 0.25, 0.5 or 1, a ridge
from 1e-6 to 1, noise in every third one, an intercept in every third one. A mean is at most 8 times
twice the scale, beyond which there is no spectrum. n and N are cut where a Gram matrix would hold
more than `PAIRS` pairs of keys. What theory refuses, for want of a fine enough spectrum or because
it would take more than `SPECTRUM_SECONDS`, is counted in the table.

The measured error is the exact leave-one-out error on n + 1 samples, whose mean is the test error
of n samples. Draws are repeated until its standard error is below 2 %, or `--budget` seconds of
processor time are used; a setting that stays above 2 % is listed apart and not counted.

`--formula` holds `learning_curve` against the finite heads too, from the rows that are there.

Rows are appended to rows.csv as they are finished, and a row that is there is not computed again:
interrupt and restart at will. The table is printed at the end and by `--table`.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

import keyhole as kh
from keyhole import theory
from keyhole.lab.cells import target_variance
from keyhole.theory.limits import CostError, limits
from keyhole.theory.targets import Polynomial

KINDS = ("infinite", "finite", "activations")
PAIRS = {"zero mean": 1.5e8, "with a mean": 2e7}
"""Pairs of keys in a Gram matrix, n² N²: what a core computes in a few seconds."""

MOST_FEATURES = 2000
SPECTRUM_SECONDS = 10.0
WANTED_ERROR = 0.02


@dataclass(frozen=True)
class Setting:
    """One random setting."""

    kind: str
    number: int
    activation: str
    dim: int
    n_keys: int
    target: str
    mean: float
    scale: float
    n_heads: float
    ridge: float
    noise: float
    fit_intercept: bool
    n_samples: int

    @property
    def heads(self) -> kh.GaussianHeads:
        """The head distribution."""
        return kh.GaussianHeads(mean=self.mean, scale=self.scale)

    def polynomial(self) -> Polynomial:
        """The target."""
        return theory_target(self.target, self.dim)


@dataclass(frozen=True)
class Row:
    """What was predicted and measured at a setting; a refusal has no numbers."""

    kind: str
    number: int
    setting: str
    predicted: float
    measured: float
    standard_error: float
    seconds: float
    refusal: str

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured


def theory_target(text: str, dim: int) -> Polynomial:
    """A target in the notation of `keyhole theory`."""
    from keyhole.theory.notation import parse_target

    return parse_target(text, dim).target


def draw_setting(kind: str, number: int, seed: int) -> Setting:
    """The setting of a number, which does not depend on the others."""
    rng = np.random.default_rng([seed, KINDS.index(kind), number])
    dim = log_uniform(rng, 2, 24)
    n_keys = log_uniform(rng, 1, 32)
    scale = float(rng.choice([0.25, 0.5, 1.0]))
    mean = 0.0
    if rng.uniform() < 0.5:
        mean = round(min(rng.uniform(0, 5), 8 * 2 * scale), 2)

    # n and N as large as the Gram matrix may cost, and heads as many as features may
    lowest = 400 if kind == "activations" else 50
    highest = 3000
    if kind != "finite":
        most_keys = math.sqrt(PAIRS["with a mean" if mean else "zero mean"])
        n_keys = min(n_keys, int(most_keys / lowest))
        highest = min(highest, int(most_keys / n_keys))
    n_samples = log_uniform(rng, lowest, highest)
    n_heads = math.inf
    if kind == "finite":
        n_heads = min(log_uniform(rng, 10, 300), MOST_FEATURES // (dim + 1))
    activation = "relu"
    if kind == "activations":
        activation = ("linear", "square", "step", "exp")[number % 4]
    target = draw_target(rng)
    noise = 0.0
    if rng.uniform() < 1 / 3:
        variance = target_variance(theory_target(target, dim), n_keys)
        noise = float(f"{0.1 * rng.uniform() * variance:.2g}")
    return Setting(
        kind=kind,
        number=number,
        activation=activation,
        dim=dim,
        n_keys=n_keys,
        target=target,
        mean=mean,
        scale=scale,
        n_heads=n_heads,
        ridge=float(f"{10 ** rng.uniform(-6, 0):.2g}"),
        noise=noise,
        fit_intercept=bool(rng.uniform() < 1 / 3),
        n_samples=n_samples,
    )


def log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    """A whole number between two, uniform in the logarithm."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


TERMS = ("corr * token", "corr^2 * token", "token", "token^2", "token^3", "query", "query^2")


def draw_target(rng: np.random.Generator) -> str:
    """A sum of one to three terms, with a constant in every second one."""
    terms = rng.choice(TERMS, size=rng.integers(1, 4), replace=False)
    parts = [f"{rng.uniform(0.3, 2):.2g} * {term}" for term in terms]
    if rng.uniform() < 0.5:
        parts.append(f"{rng.uniform(0.1, 2):.2g}")
    return " + ".join(parts)


def leave_one_out(gram: np.ndarray, y: np.ndarray, penalty: float, intercept: bool) -> np.ndarray:
    """y_i less the prediction of the fit without sample i, for all i."""
    inverse = np.linalg.inv(gram + penalty * np.eye(len(y)))
    if intercept:
        ones = inverse.sum(axis=1)
        inverse -= np.outer(ones, ones) / ones.sum()
    return np.asarray((inverse @ y) / np.diag(inverse))


def measure(
    setting: Setting, gram_of: Callable[[kh.SetBatch], np.ndarray], seed: int, budget: float
) -> tuple[float, float]:
    """The mean leave-one-out error on n + 1 samples, noise floor included, and its uncertainty."""
    target = setting.polynomial()
    n = setting.n_samples
    errors: list[float] = []
    start = time.process_time()
    while True:
        draw = np.random.default_rng([seed, setting.number, len(errors)])
        sets = kh.targets.sphere_sets(
            n + 1, setting.n_keys, setting.dim, seed=int(draw.integers(2**31))
        )
        clean = target(sets)
        y = clean + math.sqrt(setting.noise) * draw.standard_normal(n + 1)
        residuals = leave_one_out(gram_of(sets), y, n * setting.ridge, setting.fit_intercept)
        predictions = y - residuals
        errors.append(float(np.mean((predictions - clean) ** 2)) + setting.noise)
        used = time.process_time() - start
        if len(errors) < 4:
            continue
        mean = float(np.mean(errors))
        standard_error = float(np.std(errors, ddof=1)) / math.sqrt(len(errors))
        if standard_error < 0.8 * WANTED_ERROR * mean or used > budget:
            return mean, standard_error


def computed(setting: Setting, seed: int, budget: float) -> Row:
    """Predict and measure one setting."""
    start = time.process_time()
    predicted = measured = standard_error = math.nan
    refusal = ""
    try:
        if setting.kind == "finite":
            predicted, gram_of = conditional_prediction(setting, seed)
        else:
            predicted, gram_of = formula_prediction(setting)
        measured, standard_error = measure(setting, gram_of, seed, budget)
    except CostError as error:
        refusal = f"cost: {error}"
    except ValueError as error:
        refusal = str(error)
    return Row(
        kind=setting.kind,
        number=setting.number,
        setting=repr(setting),
        predicted=predicted,
        measured=measured,
        standard_error=standard_error,
        seconds=round(time.process_time() - start, 2),
        refusal=refusal,
    )


def formula_prediction(setting: Setting) -> tuple[float, Callable[[kh.SetBatch], np.ndarray]]:
    """The error by `learning_curve`, and the kernel of its layer."""
    with limits(seconds=SPECTRUM_SECONDS):
        predicted = theory.learning_curve(
            setting.polynomial(),
            setting.n_samples,
            setting.n_keys,
            setting.ridge,
            noise=setting.noise,
            heads=setting.heads,
            activation=setting.activation,
            fit_intercept=setting.fit_intercept,
        )

    def gram_of(sets: kh.SetBatch) -> np.ndarray:
        return kh.attention_kernel(sets, heads=setting.heads, activation=setting.activation)

    return float(predicted), gram_of


def conditional_prediction(
    setting: Setting, seed: int
) -> tuple[float, Callable[[kh.SetBatch], np.ndarray]]:
    """The error by `conditional_curve` on fresh sets, and the Gram matrix of the same heads."""
    drawn_heads = setting.heads.sample(int(setting.n_heads), setting.dim, seed=setting.number)

    def features_of(sets: kh.SetBatch) -> np.ndarray:
        return kh.attention_features(sets, drawn_heads, setting.activation)

    fresh = kh.targets.sphere_sets(
        max(4000, 2 * setting.n_samples), setting.n_keys, setting.dim, seed=10**6 + setting.number
    )
    predicted = theory.conditional_curve(
        features_of(fresh),
        setting.polynomial()(fresh),
        setting.n_samples,
        setting.ridge,
        noise=setting.noise,
        fit_intercept=setting.fit_intercept,
    )

    def gram_of(sets: kh.SetBatch) -> np.ndarray:
        features = features_of(sets)
        return features @ features.T

    return float(predicted), gram_of


def read_rows(path: Path) -> list[Row]:
    """Rows that are there already."""
    if not path.exists():
        return []
    rows = []
    with path.open(newline="") as file:
        for record in csv.DictReader(file):
            rows.append(
                Row(
                    kind=record["kind"],
                    number=int(record["number"]),
                    setting=record["setting"],
                    predicted=float(record["predicted"]),
                    measured=float(record["measured"]),
                    standard_error=float(record["standard_error"]),
                    seconds=float(record["seconds"]),
                    refusal=record["refusal"],
                )
            )
    return rows


def append_row(path: Path, row: Row) -> None:
    """Add one row, with a header where the file is new."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        if is_new:
            writer.writeheader()
        writer.writerow(asdict(row))


GOALS = {
    "infinite": (0.04, 0.95, 0.15),
    "finite": (0.06, 0.95, 0.20),
    "activations": (math.inf, 0.90, 0.12),
}
"""For every kind: the median deviation, and the share that is to be within a deviation."""


def print_table(rows: list[Row]) -> None:
    """Deviations of each kind, and the settings that are furthest off."""
    print("| kind | settings | median deviation | goal | within | goal | refused | unmeasured |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in KINDS:
        of_kind = [row for row in rows if row.kind == kind]
        answered = [row for row in of_kind if not row.refusal]
        certain = [row for row in answered if row.standard_error <= WANTED_ERROR * row.measured]
        if not certain:
            continue
        deviations = np.array([abs(row.ratio - 1) for row in certain])
        median_goal, share_goal, width = GOALS[kind]
        goal = f"{median_goal:.0%}" if math.isfinite(median_goal) else "–"
        within = float(np.mean(deviations <= width))
        cells = [
            kind,
            f"{len(certain)}",
            f"{np.median(deviations):.1%}",
            goal,
            f"{within:.0%} within {width:.0%}",
            f"{share_goal:.0%}",
            f"{len(of_kind) - len(answered)}",
            f"{len(answered) - len(certain)}",
        ]
        print(f"| {' | '.join(cells)} |")
    print("\nFurthest off:")
    certain = [
        row for row in rows if not row.refusal and row.standard_error <= WANTED_ERROR * row.measured
    ]
    for row in sorted(certain, key=lambda row: -abs(math.log(row.ratio)))[:12]:
        print(f"{row.ratio:.3f} ± {row.standard_error / row.measured:.3f}  {row.setting}")
    for row in rows:
        if row.refusal:
            print(f"refused: {row.setting}: {row.refusal}")


def print_formula(rows: list[Row], seed: int) -> None:
    """How far `learning_curve`, which averages over heads, is off at the finite settings."""
    ratios = []
    for row in rows:
        if row.kind != "finite" or row.refusal:
            continue
        setting = draw_setting("finite", row.number, seed)
        try:
            with limits(seconds=SPECTRUM_SECONDS):
                predicted = theory.learning_curve(
                    setting.polynomial(),
                    setting.n_samples,
                    setting.n_keys,
                    setting.ridge,
                    noise=setting.noise,
                    n_heads=setting.n_heads,
                    heads=setting.heads,
                    fit_intercept=setting.fit_intercept,
                )
        except ValueError:
            continue
        ratios.append(float(predicted) / row.measured)
    deviations = np.abs(np.array(ratios) - 1)
    low, high = np.quantile(ratios, [0.05, 0.95])
    print(
        f"learning_curve at {len(ratios)} finite settings: median deviation "
        f"{np.median(deviations):.1%}, {np.mean(deviations <= 0.2):.0%} within 20%, 5 … 95 % of "
        f"predicted/measured {low:.2f} … {high:.2f}, smallest {min(ratios):.2f}"
    )


def main() -> None:
    """Compute what is missing, kind by kind in turn, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/prediction_accuracy"))
    parser.add_argument("--settings", type=int, default=60, help="settings of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=6.0, help="seconds to measure a setting")
    parser.add_argument("--formula", action="store_true", help="learning_curve for finite heads")
    parser.add_argument("--table", action="store_true", help="print what is there, compute nothing")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "rows.csv"
    rows = read_rows(path)
    is_done = {(row.kind, row.number) for row in rows}
    for number in range(arguments.settings):
        for kind in arguments.kinds.split(","):
            if arguments.table or arguments.formula or (kind, number) in is_done:
                continue
            setting = draw_setting(kind, number, arguments.seed)
            row = computed(setting, arguments.seed, arguments.budget)
            append_row(path, row)
            rows.append(row)
            print(f"{row.ratio:.3f} {row.seconds:5.1f} s {row.setting} {row.refusal}", flush=True)
    print_table(rows)
    if arguments.formula:
        print_formula(rows, arguments.seed)


if __name__ == "__main__":
    main()
