"""All that commands print goes through here: nothing from a file commands the terminal."""

from __future__ import annotations

import json
import re
import sys
import traceback
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from keyhole.lab.report.document import Row

# formatting characters that words and emoji are written with, and that do no harm
JOINERS = "\u200c\u200d"
# Unicode categories of control, formatting, surrogates and ends of lines
_CONTROLS = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in _CONTROLS and character not in JOINERS


def printable(text: str) -> str:
    r"""A text with its control characters spelled out: one line stays one line.

    >>> printable("a column \x1b[31m named\nso")
    'a column \\x1b[31m named\\nso'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_spelled_out(c) if _is_control(c) else c for c in text)


def _spelled_out(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def echo(text: str, *, err: bool = False) -> None:
    """Print a line, to standard output or to standard error."""
    typer.echo(printable(text), err=err)


def say(console: Console, text: str) -> None:
    """Print a line as it stands: a bracket is a bracket, and no word is coloured or broken."""
    console.print(Text(printable(text)), soft_wrap=True)


def refuse(message: str) -> NoReturn:
    """End with the message alone: a slip in the input is no reason for a traceback.

    A message may have several lines, one of which points at a character of another.
    """
    for line in f"error: {message}".split("\n"):
        echo(line, err=True)
    raise typer.Exit(2)


def echo_json(data: Any, indent: int | None = 2) -> None:
    """Print JSON that any terminal can show; what is escaped in it reads back as it was."""
    has_all_characters = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    text = json.dumps(data, indent=indent, allow_nan=False, ensure_ascii=not has_all_characters)
    # only texts can hold such characters, and JSON reads them back from their numbers
    typer.echo(re.sub(r"[^\x20-\x7e\n]", _json_character, text))


def _json_character(match: re.Match[str]) -> str:
    character = match[0]
    return json.dumps(character)[1:-1] if _is_control(character) else character


def show_table(console: Console, title: str, rows: Sequence[Row]) -> None:
    """Print rows as a table: text as it stands, numbers flush right."""
    from keyhole.lab.report.html import is_numeric, number

    table = Table(title=Text(printable(title)), title_justify="left")
    for name in rows[0] if rows else ():
        is_number = is_numeric([row[name] for row in rows])
        table.add_column(Text(printable(name)), justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*(Text(printable(number(value))) for value in row.values()))
    console.print(table)


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning of Python's as one line, instead of `warnings.showwarning`."""
    echo(f"warning: {message}", err=True)


def show_traceback(error: Exception) -> None:
    """Print an error that nobody expected as Python does, with its texts escaped."""
    for part in traceback.format_exception(error):
        for line in part.rstrip("\n").split("\n"):
            echo(line, err=True)
