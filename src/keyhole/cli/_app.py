"""The application that the commands join, and what they share."""

from __future__ import annotations

import errno
import math
import os
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from typer.core import TyperGroup

from keyhole._files import behind_links
from keyhole.cli._output import echo, printable, refuse
from keyhole.registry import ACTIVATIONS, POOLINGS, QUERIES, SCALINGS

if TYPE_CHECKING:
    from keyhole.data.layout import Dataset, TableOptions

MAX_COUNT = 2**31 - 1
"""Bound of whole numbers on the command line that have no smaller one of their own."""
MAX_SEED = 2**63 - 1
INTERRUPTED = 130
"""Exit code of a command that Ctrl-C has ended: 128 + 2, the number of the signal."""
# newer versions of typer bring a click of their own
UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


@contextmanager
def _escaped_usage() -> Iterator[None]:
    """Errors of the command line quote arguments without their control characters."""
    try:
        yield
    except UsageError as error:
        error.message = printable(error.message)
        raise


def _explain_file_error(error: OSError) -> str:
    """What went wrong with a file, and what to do about it, in sentences.

    keyhole's own errors have no number and say all of it. Those of the system are a few words.
    """
    if error.errno is None and str(error).endswith("."):
        return str(error)
    name = ""
    if error.filename is not None:
        name = f"{str(error.filename)!r:.200}: "
    reason = (error.strerror or str(error)).removesuffix(".")
    if isinstance(error, FileNotFoundError):
        advice = "Check the name and the folder."
    else:
        advice = "Check the name, that the disk has room, and that you may write there."
    return f"a file could not be read or written: {name}{reason}. {advice}"


def _explain_memory_error(error: MemoryError) -> str:
    """What took the memory, and what to do about it.

    keyhole's own errors say all of it. Those of libraries are a few words, or none.
    """
    words = str(error).removesuffix(".")
    if error.__cause__ is not None:
        return str(error)
    if words:
        words = f": {words}"
    return f"memory ran out{words}. Use fewer samples or smaller settings, or close other programs."


class _Sentences(TyperGroup):
    """Ends every command with a sentence, be it the disk, a name, the terminal or Ctrl-C."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        # an encoding that knows no β shows its number
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        try:
            return super().main(*arguments, **options)
        except SystemExit as end:
            # typer turns an interrupt, wherever it came, into an exit without a word; a command
            # that has more to say of it has caught it before
            if isinstance(getattr(end.__context__, "__cause__", None), KeyboardInterrupt):
                echo("interrupted.", err=True)
            raise

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with _escaped_usage():
            return super().make_context(*arguments, **options)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for argument in args:
            if not argument.isascii() and any("\ud800" <= c <= "\udfff" for c in argument):
                echo(
                    f"error: names must be text in UTF-8: got {argument!r:.200}. Rename the file "
                    "or folder.",
                    err=True,
                )
                ctx.exit(2)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _escaped_usage():
                return super().invoke(ctx)
        except OSError as error:
            if error.errno == errno.EPIPE:  # whoever read our output has seen enough
                raise
            refuse(_explain_file_error(error))
        except MemoryError as error:
            refuse(_explain_memory_error(error))
        except (ValueError, ImportError) as error:
            refuse(str(error))
        except sqlite3.Error as error:
            refuse(
                f"the store of finished cells could not be read or written: {error}. Check that "
                "the disk has room and that you may write there, or choose another folder with "
                "--out."
            )


app = typer.Typer(
    cls=_Sentences,
    help=(
        "scikit-learn estimators for variable-size sets, by one attention layer with frozen random "
        "heads."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # plain help: Rich would take "[default: …]" in a help text for markup and drop it
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)
    ] = False,
) -> None:
    if version:
        import keyhole

        echo(f"keyhole {keyhole.__version__}")
        raise typer.Exit


def answer_or_exit(question: Callable[[], Any]) -> Any:
    """The answer, or a message and exit code 2.

    The latter where the question is refused with a ValueError.
    """
    try:
        return question()
    except ValueError as error:
        refuse(str(error))


def check_output(path: Path, inputs: Iterable[Path]) -> None:
    """Refuse a place where no file can be written, or where one is read.

    Before any work is done.
    """
    # the name: of an ordinary file, or of none, and of nothing that is read
    try:
        if path.is_dir():
            refuse(f"the output must name a file: {path} is a folder. Add a file name to it.")
        if path.exists() and not path.is_file():
            refuse(
                f"the output must be a file: {path} is not an ordinary file. Choose another name."
            )
        files_read = [file for source in inputs for file in _files(source)]
        if path.exists() and any(path.samefile(file) for file in files_read):
            refuse(
                f"the output must not be one of the files that are read: {path} is. Choose another "
                "name."
            )
        folder = next(p for p in behind_links(path).absolute().parents if p.exists())
    except OSError as error:
        refuse(f"{path.name[:50]!r} … cannot be written: {error.strerror}. Choose another name.")

    # the folder, or the nearest above that is there: one that takes files
    problem = ""
    if not folder.is_dir():
        problem = "Not a directory"
    elif not os.access(folder, os.W_OK):
        problem = "it may not be written"
    if problem:
        refuse(
            f"a file is written into a folder: {folder} cannot take one ({problem}). Choose "
            "another place."
        )


def _files(path: Path) -> list[Path]:
    """A file, or the Parquet files of a folder.

    None where it cannot be looked at, which who reads it will say.
    """
    try:
        if path.is_dir():
            return list(path.glob("*.parquet"))
        if path.exists():
            return [path]
    except OSError:
        pass
    return []


def check_folder(folder: Path, *, overwrite: bool = True) -> None:
    """Refuse, before any work, a report that cannot be drawn or written.

    Or whose place is taken by another one.
    """
    from keyhole.lab.report.html import check_lab

    check_lab("drawing charts")
    # the folder need not be there yet: the nearest above it that is must be one to write into
    above = folder
    while not os.path.lexists(above) and above != above.parent:
        above = above.parent
    if not above.is_dir():
        refuse(f"--out must be a folder: {above} is a file. Choose another name.")
    if not os.access(above, os.W_OK | os.X_OK):
        refuse(f"--out must be a folder that can be written: {above} cannot. Choose another one.")
    # a report of another run is not lost by a slip
    if not overwrite and os.path.lexists(folder / "report.html"):
        refuse(
            f"a report is not replaced unless asked: {folder} has one. Choose another folder, or "
            "add --overwrite."
        )


_AUTO = "By default several are tried and combined."
HEADS = {
    "zero-mean": "drawn at random around zero",
    "biased": "drawn around the identity: rows like the query score high",
    "learned": "drawn around matrices that are learned from the training sets",
}
"""Settings of --heads: what the query-key matrices, which score rows, are drawn from."""


def _choices(values: Mapping[str, Any]) -> str:
    """Values and their words, for the help of an option.

    >>> _choices({"none": "rows as they are"})
    'none (rows as they are)'
    """
    words = {name: getattr(value, "help", value) for name, value in values.items()}
    return ", ".join(f"{name} ({text})" for name, text in words.items())


KEYS_HELP = (
    "Columns that are the coordinates of a key, separated by commas [default: the column keys, or "
    "all columns that no other option names]."
)
QUERY_HELP = (
    "Columns that are the query, separated by commas [default: the column query, or rows whose "
    "column role says query]."
)
EXTRAS_HELP = (
    "Columns of sample-level features, separated by commas: numbers that belong to the sample and "
    "to no key, such as a user's mean rating [default: the column extras]."
)
TARGET_HELP = "Column to predict [default: target, label, class or y]."
SET_HELP = (
    "Column that says which set a row belongs to, in tables with one row per token [default: set, "
    "bag, id, …]."
)
TOKENS_HELP = (
    "A second table with one row per token, if the first has one row per sample. The column that "
    "names the set joins them."
)
Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA",
        help=(
            "A table of sets (Parquet, Arrow, CSV, npz), a .ts file or a folder of them, or the "
            "name digits."
        ),
    ),
]
Tokens = Annotated[str | None, typer.Option(help=TOKENS_HELP)]
Keys = Annotated[str | None, typer.Option(help=KEYS_HELP)]
Query = Annotated[str | None, typer.Option(help=QUERY_HELP)]
Target = Annotated[str | None, typer.Option(help=TARGET_HELP)]
Extras = Annotated[str | None, typer.Option(help=EXTRAS_HELP)]
SetId = Annotated[str | None, typer.Option("--set", help=SET_HELP)]
Missing = Annotated[
    str,
    typer.Option(
        help=(
            "What to do with missing values: error, drop (leave out such tokens), or impute (fill "
            "in the mean, or for text a category of its own)."
        )
    ),
]
MISSING_HELP = (
    "What to do with missing values: error, drop (leave out such tokens; a set without tokens gets "
    "one of zeros), or impute [default: as the model was fitted]."
)
MissingAsFitted = Annotated[str | None, typer.Option(help=MISSING_HELP)]
Groups = Annotated[
    str | None,
    typer.Option(help="Column of groups, such as patients: each is held out as a whole."),
]
Time = Annotated[
    str | None,
    typer.Option(help="Column of dates or numbers: the newest samples are kept for testing."),
]
ReferenceDate = Annotated[
    str | None,
    typer.Option(
        help=(
            "Column with the date of each sample. Other dates then become days before it, "
            "instead of days after the first date of the table."
        )
    ),
]
Split = Annotated[
    str | None, typer.Option(help="Column that says train or test (or 0 or 1) for every sample.")
]
Dim = Annotated[
    int | None,
    typer.Option(
        help="Number of coordinates of a key, if one list column holds all keys of a set in a row.",
        min=1,
        max=MAX_COUNT,
    ),
]
NHeads = Annotated[str, typer.Option(help="Number of heads, or inf for the exact kernel, or auto.")]
Heads = Annotated[
    str,
    typer.Option(
        help=(
            "What the query-key matrices, which score rows, are drawn from: "
            f"{_choices(HEADS)}. {_AUTO}"
        )
    ),
]
Alpha = Annotated[
    str,
    typer.Option(
        help="Ridge penalty α, the larger the smoother: a number, or loo for leave-one-out."
    ),
]
Activation = Annotated[
    str,
    typer.Option(help=f"How scores become weights: {_choices(ACTIVATIONS)}. {_AUTO}"),
]
Pooling = Annotated[
    str,
    typer.Option(help=(f"How the rows of a set are put together: {_choices(POOLINGS)}. {_AUTO}")),
]
Scaling = Annotated[
    str,
    typer.Option(help=f"What is done to rows first: {_choices(SCALINGS)}. {_AUTO}"),
]
MakeQuery = Annotated[
    str,
    typer.Option(help=f"What rows are compared with: {_choices(QUERIES)}. {_AUTO}"),
]
Task = Annotated[str, typer.Option(help="What to fit: auto, regression or classification.")]


def read_data(data: str, tokens: str | None, options: TableOptions) -> Dataset:
    """The data, or a message and exit code 2."""
    from keyhole.data.datasets import load_data

    dataset = load_data(data, tokens=tokens, options=options)
    if dataset.target is None:
        refuse(
            f"{data} must have a target to learn: no column target, label, class or y. Name it "
            "with --target."
        )
    return dataset


def task_of(target: np.ndarray, task: str) -> str:
    """The task: as named, or by the target.

    Classification where it is text, yes or no, or a few whole numbers.
    """
    from keyhole.estimators.classes import TASKS, likely_task

    if task not in TASKS:
        refuse(f"--task must be one of {', '.join(TASKS)}: got {task!r}.")
    if task == "regression" and target.dtype.kind == "U":
        refuse(
            "--task regression needs a target of numbers: this one holds text such as "
            f"{target[0]!r:.40}."
        )
    if task == "auto":
        return likely_task(target)
    return task


def read_n_heads(text: str) -> float:
    """A number of heads, or infinity."""
    digits = text.strip()
    if digits.lower() in ("inf", "∞"):
        return math.inf
    # nine digits are enough, and Python itself refuses to read endless numbers
    is_short_number = digits.isdecimal() and len(digits) <= 9
    if not is_short_number or int(digits) < 1:
        refuse(f"--n-heads must be a whole number of at least 1, or inf: got {text!r:.40}.")
    return int(digits)
