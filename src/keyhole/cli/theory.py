"""`keyhole theory`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from keyhole.cli._app import MAX_COUNT, answer_or_exit, app, check_folder, read_n_heads
from keyhole.cli._output import echo, echo_json, refuse, say, show_table
from keyhole.lab.report.html import number

if TYPE_CHECKING:
    from keyhole.lab.theory_answers import Question

_THEORY_HELP = """What the theory says about a target, before any data.

Prints how hard it is, and how many samples and heads it needs.

A target is a function of the query x_0 and one key x_i, averaged over the keys. Write it with
numbers, + - * / ^, brackets, and these names:

corr = <x_0, x_i>; token = <β, x_i>; query = <β, x_0>; rotated(gamma) = <x_0, S x_i>, where S =
(1−gamma) I + gamma P and P is a random rotation (rotated(gamma, seed) draws another one).

Examples: "token^2", "corr^3 * token", "rotated(0.5)^3 * token", "corr * token - 0.5 * query^2 + 1".
"""


@app.command(help=_THEORY_HELP)
def theory(
    target: Annotated[
        str, typer.Option(help='The target, for example "corr^3 * token".')
    ] = "corr * token",
    dim: Annotated[int, typer.Option(help="Token dimension d.", min=1, max=1_000_000)] = 16,
    keys: Annotated[int, typer.Option(help="Keys per set N.", min=1, max=MAX_COUNT)] = 16,
    samples: Annotated[
        str, typer.Option(help="Numbers of training sets n, separated by commas.")
    ] = "100,1000,10000,100000",
    n_heads: Annotated[
        str, typer.Option(help="Heads M, a number or inf; the MLP gets width M(d+1).")
    ] = "inf",
    ridge: Annotated[
        float, typer.Option(help="Ridge penalty per sample λ (alpha = nλ).", min=0.0)
    ] = 1e-5,
    noise: Annotated[
        float, typer.Option(help="Variance of the noise in the labels.", min=0.0)
    ] = 0.0,
    model: Annotated[str, typer.Option(help="attention, mlp or both.")] = "both",
    error: Annotated[
        float | None,
        typer.Option(
            help="Squared error that samples and heads are to reach [default: a tenth of Var f*]."
        ),
    ] = None,
    bias: Annotated[
        float, typer.Option(help="Mean c of the attention heads, times the identity.")
    ] = 0.0,
    activation: Annotated[
        str,
        typer.Option(help="Activation of the attention heads: relu, linear, square, step, exp."),
    ] = "relu",
    query: Annotated[bool, typer.Option(help="Whether the sets have a query.")] = True,
    intercept: Annotated[bool, typer.Option(help="Whether an intercept is fitted.")] = False,
    activations: Annotated[
        bool,
        typer.Option(
            "--activations",
            help="Compare all activations at the same n; separate several targets by semicolons.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Draw the predicted curves into this folder.")
    ] = None,
) -> None:
    """Print complexity, spectrum, learning curve, bounds and sizes needed."""
    from keyhole.lab.report.html import write_chart
    from keyhole.lab.theory_answers import (
        MODELS,
        Question,
        activation_rows,
        curve_chart,
        report,
    )
    from keyhole.theory.blocks import bias_of

    # refuse before any work
    if model not in MODELS:
        refuse(f"--model must be one of {', '.join(MODELS)}: got {model!r}.")
    if error is not None and not (error > 0 and math.isfinite(error)):
        refuse(f"--error must be a positive number: got {error:g}.")
    if out is not None:
        check_folder(out)
    sizes = _read_sizes(samples)
    question = Question(
        target=target,
        dim=dim,
        n_keys=keys,
        n_heads=read_n_heads(n_heads),
        ridge=ridge,
        noise=noise,
        mean=bias,
        activation=activation,
        query=query,
        fit_intercept=intercept,
    )
    answer_or_exit(lambda: bias_of(question.heads, dim, activation))
    if activations:
        rows = answer_or_exit(lambda: activation_rows(question, sizes))
        if as_json:
            echo_json(rows)
        else:
            _print_activations(rows, question, sizes)
        return

    # compute, print, draw
    answer = answer_or_exit(lambda: report(question, sizes, model, error))
    if as_json:
        echo_json(answer)
    else:
        _print_report(Console(), answer, question)
    if out is not None:
        chart = answer_or_exit(lambda: curve_chart(question, sizes, model))
        for path in write_chart(chart, out):
            echo(f"wrote {path}", err=as_json)


def _print_activations(
    rows: list[dict[str, Any]], question: Question, sizes: tuple[int, ...]
) -> None:
    """A table for every n: errors as shares of Var f*, at the best ridge."""
    console = Console()
    say(console, f"        {question.describe()}")
    for n in sizes:
        table = [_written(row) for row in rows if row["n"] == n]
        show_table(console, f"predicted error over Var f* at n = {n:,}, best ridge", table)


def _written(row: dict[str, Any]) -> dict[str, str]:
    """A row of the table of activations as text, without its n; a dash where theory refuses."""
    cells = {}
    for name, value in row.items():
        if isinstance(value, float):
            cells[name] = f"{value:.2g}"
        elif name != "n":
            cells[name] = str(value or "–")
    return cells


def _read_sizes(text: str) -> tuple[int, ...]:
    # numbers such as 1e5 are sizes too
    try:
        sizes = tuple(int(float(part)) for part in text.split(","))
    except (ValueError, OverflowError):
        sizes = ()
    if not sizes or min(sizes) < 1:
        refuse(
            "--samples must be numbers of at least 1 with commas between, as in 100,1000: got "
            f"{text!r}."
        )
    return sizes


def _print_report(console: Console, answer: dict[str, Any], question: Question) -> None:
    """The answer in three sentences, then the tables behind it."""
    from keyhole.lab.theory_answers import sentences, tables

    for sentence in sentences(answer):
        say(console, sentence)
    target = answer["target"]
    say(console, "")
    say(console, f"target  {target['expanded']}    (averaged over the keys)")
    say(console, f"        {question.describe()}; Var f* = {number(target['variance'])}")
    for table in tables(answer):
        show_table(console, table.title, table.rows)
        for line in table.note.splitlines():
            say(console, f"  {line}")
    for name, reason in answer["unavailable"].items():
        say(console, f"not available: {name}: {reason}")
