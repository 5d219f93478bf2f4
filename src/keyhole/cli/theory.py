"""`keyhole theory`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from keyhole.cli._app import app, check_folder, echo_json, number, or_refuse, refuse

_THEORY_HELP = """What the theory says of a target before any data: how hard, how many samples, how many heads.

A target is a function of the query x_0 and one key x_i, averaged over the keys. It is written with

corr = <x_0, x_i>; token = <β, x_i>; query = <β, x_0>; rotated(gamma) = <x_0, S x_i> with S = (1−gamma) I + gamma P,
P a random rotation (rotated(gamma, seed) for another one); numbers; + - * / ^ and brackets.

Examples: "token^2", "corr^3 * token", "rotated(0.5)^3 * token", "corr * token - 0.5 * query^2 + 1".
"""


@app.command(help=_THEORY_HELP)
def theory(
    target: Annotated[str, typer.Option(help='The target, for example "corr^3 * token".')] = "corr * token",
    dim: Annotated[int, typer.Option(help="Token dimension d.", min=1, max=1_000_000)] = 16,
    keys: Annotated[int, typer.Option(help="Keys per set N.", min=1)] = 16,
    samples: Annotated[str, typer.Option(help="Numbers of training sets n, with commas.")] = "100,1000,10000,100000",
    heads: Annotated[str, typer.Option(help="Heads M, a number or inf; the MLP gets width M(d+1).")] = "inf",
    ridge: Annotated[float, typer.Option(help="Ridge λ (alpha = nλ).", min=0.0)] = 1e-5,
    noise: Annotated[float, typer.Option(help="Variance of the noise in the labels.", min=0.0)] = 0.0,
    model: Annotated[str, typer.Option(help="attention, mlp or both.")] = "both",
    error: Annotated[
        float | None, typer.Option(help="Squared error for the sizes needed [default: a tenth of Var f*].")
    ] = None,
    time_limit: Annotated[
        float, typer.Option(help="Seconds that multiplying out the target may take, by estimate.", min=0.0)
    ] = 20.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    out: Annotated[Path | None, typer.Option(help="Draw the predicted curves into this folder.")] = None,
) -> None:
    """Print complexity, spectrum, learning curve, bounds and sizes needed."""
    from keyhole.experiments import report as experiment

    if model not in experiment.MODELS:
        refuse(f"--model must be one of {', '.join(experiment.MODELS)}: got {model!r}.")
    if error is not None and not (error > 0 and math.isfinite(error)):
        refuse(f"--error must be a positive number: got {error:g}.")
    if out is not None:
        check_folder(out)
    sizes, n_heads = _read_sizes(samples), _read_heads(heads)
    config = experiment.Config(target, dim, keys, sizes, n_heads, ridge, noise, model, error, time_limit=time_limit)
    report = or_refuse(lambda: experiment.run(config))
    console = Console()
    if as_json:
        echo_json(report)
    else:
        _print_report(console, report, config.describe())
    if out is not None:
        rows = or_refuse(lambda: experiment.curve_rows(config))
        for path in experiment.plot(rows, config, out):
            typer.echo(f"wrote {path}", err=as_json)


def _read_sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(float(part)) for part in text.split(","))
    except (ValueError, OverflowError):
        sizes = ()
    if not sizes or min(sizes) < 1:
        refuse(f"--samples must be numbers of at least 1 with commas between, as in 100,1000: got {text!r}.")
    return sizes


def _read_heads(text: str) -> float:
    if text.strip().lower() in ("inf", "∞"):
        return math.inf
    if not text.strip().isdecimal() or int(text) < 1:
        refuse(f"--heads must be a whole number of at least 1, or inf: got {text!r}.")
    return int(text)


def _print_report(console: Console, report: dict[str, Any], settings: str) -> None:
    target, complexity, needed = report["target"], report["complexity"], report["needed"]
    console.print(f"target  {target['expanded']}    (averaged over the keys)", highlight=False, soft_wrap=True)
    console.print(f"        {settings}; Var f* = {number(target['variance'])}", highlight=False)
    norms = Table("degree in x_0", "in x_i", "|f_rs|²", title="coefficient norms", title_justify="left")
    for row in report["coefficient_norms"]:
        norms.add_row(*(number(row[key]) for key in ("query_degree", "key_degree", "squared_norm")))
    console.print(norms)
    console.print(_complexity_table(complexity))
    for model, spectrum in report["spectrum"].items():
        if spectrum is not None:
            console.print(_spectrum_table(model, spectrum))
    console.print(_curve_table(report["learning_curve"]))
    if report["risk_bound"]:
        console.print(_bound_table(report["risk_bound"]))
        for statement in dict.fromkeys(f"{r['kind']}: {r['statement']}" for r in report["risk_bound"]):
            console.print(f"  {statement}", highlight=False, soft_wrap=True)
    console.print(_needed_table(needed))
    for name, reason in report["unavailable"].items():
        console.print(f"not available: {name}: {reason}", highlight=False, soft_wrap=True)


def _complexity_table(complexity: dict[str, Any]) -> Table:
    table = Table("complexity", "", title="squared norms", title_justify="left")
    biased = complexity["biased_norm_bound"]
    near = "" if biased is None else f", of a function within {number(biased['error'])}"
    for name, value in (
        ("paper's B(f*)", complexity["paper_complexity"]),
        ("bound with named constants", complexity["rkhs_norm_bound"]),
        ("exact, sphere law", complexity["rkhs_norm"]),
        (f"bound for biased heads{near}", None if biased is None else biased["squared_norm"]),
        ("MLP, exact", complexity["mlp_norm"]),
    ):
        table.add_row(name, number(value))
    return table


def _spectrum_table(model: str, spectrum: dict[str, Any]) -> Table:
    title = f"spectrum of {model}, largest levels; trace {number(spectrum['trace'])}"
    table = Table("degrees", "eigenvalue", "multiplicity", title=title, title_justify="left")
    powers = model == "attention"
    if powers:
        table.add_column("power of the target")
    for level in spectrum["levels"]:
        cells = [str(tuple(level["degrees"])), number(level["eigenvalue"]), number(level["multiplicity"])]
        table.add_row(*cells, *([number(level["target_power"])] if powers else []))
    return table


def _curve_table(curves: dict[str, Any]) -> Table:
    table = Table("n", title="predicted test error (noise included)", title_justify="left")
    for model in curves:
        for column in (f"{model}", "at the best ridge", "that ridge"):
            table.add_column(column, justify="right")
    for rows in zip(*curves.values(), strict=True):
        keys = ("error", "error_at_best_ridge", "best_ridge")
        table.add_row(f"{rows[0]['n']:,}", *(number(row[key], 3) for row in rows for key in keys))
    return table


def _bound_table(bounds: list[dict[str, Any]]) -> Table:
    table = Table("bound", "n", title="excess risk is at most", title_justify="left")
    for column in ("approximation", "estimation", "total", "constant"):
        table.add_column(column, justify="right")
    for row in bounds:
        values = (number(row[key]) for key in ("approximation", "estimation", "total", "constant"))
        table.add_row(row["kind"], f"{row['n']:,}", *values)
    return table


def _needed_table(needed: dict[str, Any]) -> Table:
    title = f"needed for a squared error of {number(needed['error'])}"
    table = Table("", "", title=title, title_justify="left", show_header=False)
    for model, value in needed["samples"].items():
        table.add_row(f"samples, {model}, predicted", number(value))
    if needed["mlp_to_attention"] is not None:
        table.add_row("samples of the MLP over attention's", number(needed["mlp_to_attention"]))
    table.add_row("heads, predicted (any number of samples)", number(needed["heads_predicted"]))
    table.add_row("heads, paper's bound", number(needed["heads_bound"]))
    return table
