"""The application that the commands join, and what they share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape
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


def or_refuse(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except ValueError as error:
        refuse(str(error))


def refuse(message: str) -> NoReturn:
    """End with the message alone: a slip in the input is no reason for a traceback."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


def check_output(path: Path, inputs: Iterable[Path]) -> None:
    """Refuse a place where no file can be written, or where one is read, before any work is done."""
    try:
        str(path).encode()
        if path.is_dir():
            refuse(f"the output must name a file: {path} is a folder. Add a file name to it.")
        if path.exists() and not path.is_file():
            refuse(f"the output must be a file: {path} is not an ordinary file. Choose another name.")
        if path.exists() and any(path.samefile(file) for source in inputs for file in _files(source)):
            refuse(f"the output must not be one of the files that are read: {path} is. Choose another name.")
        folder = next(p for p in path.absolute().parents if p.exists())
    except UnicodeEncodeError:
        refuse(f"names of files must be text in UTF-8: got {path.name!r}. Choose another.")
    except OSError as error:
        refuse(f"{path.name[:50]!r} … cannot be written: {error.strerror}. Choose another name.")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        problem = "it may not be written" if folder.is_dir() else "Not a directory"
        refuse(f"a file is written into a folder: {folder} cannot take one ({problem}). Choose another place.")


def _files(path: Path) -> list[Path]:
    """A file, or the Parquet files of a folder; none where it cannot be looked at, which who reads it will say."""
    try:
        return list(path.glob("*.parquet")) if path.is_dir() else [path] if path.exists() else []
    except OSError:
        return []


def number(value: Any, digits: int = 4) -> str:
    if value is None:
        return "–"
    if isinstance(value, int) and abs(value) < 10**9:
        return f"{value:,}"
    return value if isinstance(value, str) else f"{value:.{digits}g}"


def text_table(title: str, rows: list[dict[str, str]]) -> Table:
    table = Table(*rows[0], title=title, title_justify="left")
    for row in rows:
        table.add_row(*(escape(str(value)) for value in row.values()))  # a bracket is a bracket
    return table
