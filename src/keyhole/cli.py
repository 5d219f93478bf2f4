"""The command line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    help="One attention layer with frozen random heads: closed-form learning on sets with a query.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
) -> None:
    if version:
        import keyhole

        typer.echo(f"keyhole {keyhole.__version__}")
        raise typer.Exit


@app.command()
def compare(
    out: Annotated[Path, typer.Option(help="Folder for the figure and the rows behind it.")] = Path("out/compare"),
    dim: Annotated[int, typer.Option(help="Token dimension d.", min=1)] = 16,
    keys: Annotated[int, typer.Option(help="Keys per set N.", min=1)] = 16,
    heads: Annotated[int, typer.Option(help="Heads M; the MLP gets width M(d+1).", min=1)] = 200,
    largest: Annotated[int, typer.Option(help="Largest number of training sets n.", min=32)] = 2048,
    repeats: Annotated[int, typer.Option(help="Independent repetitions behind each error bar.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Seed of everything.", min=0)] = 0,
) -> None:
    """Fit attention and an MLP, finite and infinite, on one target of each family; print and draw the comparison."""
    from keyhole.experiments import compare as experiment

    config = experiment.Config(dim, keys, heads, experiment.sizes_up_to(largest), repeats, seed=seed)
    console = Console()
    with console.status("starting …") as status:
        rows = experiment.run(config, progress=lambda text: status.update(text))
    files = [*experiment.write_rows(rows, out), *experiment.plot(rows, config, out)]
    console.print(_comparison_table(experiment.summarise(rows), config.sizes[-1]))
    console.print(f"{config.describe()}; relative test error, mean ± standard error over {config.repeats} repetitions.")
    for path in files:
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)


@app.command("norm-ball")
def norm_ball(
    out: Annotated[Path, typer.Option(help="Folder for the figure and the rows behind it.")] = Path("out/norm_ball"),
    heads: Annotated[int, typer.Option(help="Heads M.", min=1)] = 100,
    largest: Annotated[int, typer.Option(help="Largest number of training sets n.", min=32)] = 512,
    repeats: Annotated[int, typer.Option(help="Independent repetitions behind each error bar.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Seed of everything.", min=0)] = 0,
) -> None:
    """Fit ridge and the norm ball on the same target, with clean labels and with some wild ones; draw both."""
    from keyhole.experiments import norm_ball as experiment

    sizes = tuple(sorted({max(8, largest >> k) for k in range(4)}))
    config = experiment.Config(n_heads=heads, sizes=sizes, repeats=repeats, seed=seed)
    console = Console()
    with console.status("starting …") as status:
        rows = experiment.run(config, progress=lambda text: status.update(text))
    for path in [*experiment.write_rows(rows, out), *experiment.plot(rows, config, out)]:
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)


def _comparison_table(summary: dict[tuple[str, str], dict[str, str]], n: int) -> Table:
    table = Table(title=f"relative test error at n = {n}", title_justify="left")
    targets = list(dict.fromkeys(target for cells in summary.values() for target in cells))
    table.add_column("model")
    table.add_column("heads")
    for target in targets:
        table.add_column(target, justify="right")
    for (model, heads), cells in summary.items():
        table.add_row(model, heads, *(cells[target] for target in targets))
    return table


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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    out: Annotated[Path | None, typer.Option(help="Draw the predicted curves into this folder.")] = None,
) -> None:
    """Print complexity, spectrum, learning curve, bounds and sizes needed."""
    from keyhole.experiments import report as experiment

    if model not in experiment.MODELS:
        _refuse(f"--model must be one of {', '.join(experiment.MODELS)}: got {model!r}.")
    if error is not None and not (error > 0 and math.isfinite(error)):
        _refuse(f"--error must be a positive number: got {error:g}.")
    sizes, n_heads = _read_sizes(samples), _read_heads(heads)
    config = experiment.Config(target, dim, keys, sizes, n_heads, ridge, noise, model, error)
    report = _or_refuse(lambda: experiment.run(config))
    console = Console()
    if as_json:
        typer.echo(json.dumps(report, indent=2, allow_nan=False, ensure_ascii=False))
    else:
        _print_report(console, report, config.describe())
    if out is not None:
        rows = _or_refuse(lambda: experiment.curve_rows(config))
        for path in experiment.plot(rows, config, out):
            typer.echo(f"wrote {path}", err=as_json)


def _read_sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(float(part)) for part in text.split(","))
    except (ValueError, OverflowError):
        sizes = ()
    if not sizes or min(sizes) < 1:
        _refuse(f"--samples must be numbers of at least 1 with commas between, as in 100,1000: got {text!r}.")
    return sizes


def _read_heads(text: str) -> float:
    if text.strip().lower() in ("inf", "∞"):
        return math.inf
    if not text.strip().isdecimal() or int(text) < 1:
        _refuse(f"--heads must be a whole number of at least 1, or inf: got {text!r}.")
    return int(text)


def _or_refuse(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except ValueError as error:
        _refuse(str(error))


def _refuse(message: str) -> NoReturn:
    """End with the message alone: a slip in the input is no reason for a traceback."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


def _print_report(console: Console, report: dict[str, Any], settings: str) -> None:
    target, complexity, needed = report["target"], report["complexity"], report["needed"]
    console.print(f"target  {target['expanded']}    (averaged over the keys)", highlight=False, soft_wrap=True)
    console.print(f"        {settings}; Var f* = {_number(target['variance'])}", highlight=False)
    norms = Table("degree in x_0", "in x_i", "|f_rs|²", title="coefficient norms", title_justify="left")
    for row in report["coefficient_norms"]:
        norms.add_row(*(_number(row[key]) for key in ("query_degree", "key_degree", "squared_norm")))
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
    near = "" if biased is None else f", of a function within {_number(biased['error'])}"
    for name, value in (
        ("paper's B(f*)", complexity["paper_complexity"]),
        ("bound with named constants", complexity["rkhs_norm_bound"]),
        ("exact, sphere law", complexity["rkhs_norm"]),
        (f"bound for biased heads{near}", None if biased is None else biased["squared_norm"]),
        ("MLP, exact", complexity["mlp_norm"]),
    ):
        table.add_row(name, _number(value))
    return table


def _spectrum_table(model: str, spectrum: dict[str, Any]) -> Table:
    title = f"spectrum of {model}, largest levels; trace {_number(spectrum['trace'])}"
    table = Table("degrees", "eigenvalue", "multiplicity", title=title, title_justify="left")
    powers = model == "attention"
    if powers:
        table.add_column("power of the target")
    for level in spectrum["levels"]:
        cells = [str(tuple(level["degrees"])), _number(level["eigenvalue"]), _number(level["multiplicity"])]
        table.add_row(*cells, *([_number(level["target_power"])] if powers else []))
    return table


def _curve_table(curves: dict[str, Any]) -> Table:
    table = Table("n", title="predicted test error (noise included)", title_justify="left")
    for model in curves:
        for column in (f"{model}", "at the best ridge", "that ridge"):
            table.add_column(column, justify="right")
    for rows in zip(*curves.values(), strict=True):
        keys = ("error", "error_at_best_ridge", "best_ridge")
        table.add_row(f"{rows[0]['n']:,}", *(_number(row[key], 3) for row in rows for key in keys))
    return table


def _bound_table(bounds: list[dict[str, Any]]) -> Table:
    table = Table("bound", "n", title="excess risk is at most", title_justify="left")
    for column in ("approximation", "estimation", "total", "constant"):
        table.add_column(column, justify="right")
    for row in bounds:
        values = (_number(row[key]) for key in ("approximation", "estimation", "total", "constant"))
        table.add_row(row["kind"], f"{row['n']:,}", *values)
    return table


def _needed_table(needed: dict[str, Any]) -> Table:
    title = f"needed for a squared error of {_number(needed['error'])}"
    table = Table("", "", title=title, title_justify="left", show_header=False)
    for model, value in needed["samples"].items():
        table.add_row(f"samples, {model}, predicted", _number(value))
    if needed["mlp_to_attention"] is not None:
        table.add_row("samples of the MLP over attention's", _number(needed["mlp_to_attention"]))
    table.add_row("heads, predicted (any number of samples)", _number(needed["heads_predicted"]))
    table.add_row("heads, paper's bound", _number(needed["heads_bound"]))
    return table


def _number(value: Any, digits: int = 4) -> str:
    if value is None:
        return "–"
    if isinstance(value, int) and abs(value) < 10**9:
        return f"{value:,}"
    return value if isinstance(value, str) else f"{value:.{digits}g}"


@app.command()
def prediction(
    preset: Annotated[str, typer.Option(help="quick (seconds) or full (minutes).")] = "quick",
    out: Annotated[Path, typer.Option(help="Folder for tables, rows and figure.")] = Path("out/prediction"),
    seed: Annotated[int, typer.Option(help="Seed of everything.", min=0)] = 0,
    ratio: Annotated[
        bool, typer.Option(help="Also measure how many times more samples an MLP needs on f_{1,2}.")
    ] = True,
) -> None:
    """Fit models over a grid and hold their test errors against the predicted ones."""
    from dataclasses import replace

    from keyhole.experiments import prediction as experiment
    from keyhole.experiments import sample_ratio

    if preset not in experiment.PRESETS:
        _refuse(f"--preset must be one of {', '.join(experiment.PRESETS)}: got {preset!r}.")
    console = Console()
    ratios: list[dict[str, Any]] = []
    with console.status("starting …") as status:
        rows = experiment.run(replace(experiment.PRESETS[preset], seed=seed), status.update)
        if ratio:
            ratios = sample_ratio.run(replace(sample_ratio.PRESETS[preset], seed=seed), status.update)
    files = [*experiment.write_tables(rows, out), *experiment.plot(rows, out)]
    console.print(_text_table("predicted against measured test error", experiment.summarise(rows)))
    beyond = experiment.readable(experiment.outliers(rows))
    if beyond:
        console.print(_text_table("cells beyond their tolerance, worst first", beyond[:20]))
    if ratios:
        files += sample_ratio.write_tables(ratios, out)
        console.print(_text_table("samples needed on f_{1,2}", sample_ratio.readable(ratios)))
    for path in files:
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)


def _text_table(title: str, rows: list[dict[str, str]]) -> Table:
    table = Table(*rows[0], title=title, title_justify="left")
    for row in rows:
        table.add_row(*row.values())
    return table


def main() -> None:
    """Entry point of the `keyhole` command."""
    app()
