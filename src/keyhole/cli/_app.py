"""The application that the commands join, and what they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape
from rich.table import Table

from keyhole.report.document import Row

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


def answer_or_exit(question: Callable[[], Any]) -> Any:
    """The answer; or, where the question is refused with a ValueError, its message and exit code 2."""
    try:
        return question()
    except ValueError as error:
        refuse(str(error))


def refuse(message: str) -> NoReturn:
    """End with the message alone: a slip in the input is no reason for a traceback."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


def require_lab(what: str) -> None:
    """End with one line where the packages that draw are not installed; called before any long work."""
    from keyhole.report.html import check_lab

    try:
        check_lab(what)
    except ImportError as error:
        refuse(str(error))


def text_table(title: str, rows: Sequence[Row]) -> Table:
    """Rows as a table: text as it stands, numbers flush right."""
    from keyhole.report.words import is_numeric, number

    table = Table(title=title, title_justify="left")
    for name in rows[0] if rows else ():
        table.add_column(name, justify="right" if is_numeric([row[name] for row in rows]) else "left")
    for row in rows:
        table.add_row(*(escape(number(value)) for value in row.values()))  # a bracket is a bracket
    return table
