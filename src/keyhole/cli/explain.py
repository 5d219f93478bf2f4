"""`keyhole explain`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from keyhole.cli._app import (
    MissingAsFitted,
    Tokens,
    Unknown,
    answer_or_exit,
    app,
    check_folder,
    refuse_error,
)
from keyhole.cli._output import echo, refuse


@app.command()
def explain(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model written by kh.save or keyhole fit.")
    ],
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="Data in the form that the model was fitted to.")
    ],
    tokens: Tokens = None,
    *,
    chosen: Annotated[
        str, typer.Option("--set", help="Which set: its id, or its number, from 0 on.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the page.")] = Path("out/explain"),
    coverage: Annotated[
        float, typer.Option(help="Share of outcomes that the interval should contain.")
    ] = 0.9,
    missing: MissingAsFitted = None,
    unknown: Unknown = "error",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the page in OUT.")
    ] = False,
) -> None:
    """Explain one prediction.

    Writes a page that shows what each key adds to the prediction, the query, the interval and the
    novelty.
    """
    check_folder(out, overwrite=overwrite)
    from keyhole.data.datasets import holds_series, load_data
    from keyhole.data.reader import SUFFIXES
    from keyhole.lab.explain import explanation
    from keyhole.lab.report.html import write_report
    from keyhole.state import read_model

    try:
        saved = read_model(model)
        if not hasattr(saved.estimator, "contributions"):
            refuse(
                f"{model} must predict to be explained: it holds a "
                f"{type(saved.estimator).__name__}."
            )
        # a table is read as the one the model was fitted to
        path = Path(data)
        is_table = path.suffix.lower() in SUFFIXES or (path.is_dir() and not holds_series(path))
        if is_table:
            dataset = saved.schema.read(path, tokens=tokens, missing=missing, unknown=unknown)
        else:
            dataset = load_data(data)
    except (ValueError, OSError) as error:
        refuse_error(error)

    # names that are positions in a list say nothing of what they are, and are not compared
    has_positions = any("[" in name for name in dataset.names)
    names = () if has_positions else dataset.names
    row = _row(chosen, dataset.ids, len(dataset))
    answer_or_exit(lambda: saved.schema.check(dataset.sets, names))
    truth = None if dataset.target is None else dataset.target[row]

    # the page
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the page itself names the plain jackknife
        report = answer_or_exit(
            lambda: explanation(
                model=saved.estimator,
                sample=dataset.sets[row : row + 1],
                name=f"set {chosen}",
                names=saved.schema.names,
                truth=truth,
                coverage=coverage,
            )
        )
    echo(report.lead)
    echo(f"wrote {write_report(report, out)[0]} and the charts beside it")


def _row(chosen: str, ids: np.ndarray | None, n: int) -> int:
    """The place of the set that was named, by its id where sets have one."""
    if ids is not None:
        names = [str(name) for name in ids.tolist()]
        if chosen not in names:
            refuse(
                f"--set must name a set of the data: {chosen!r} is none of {', '.join(names[:5])} "
                f"… ({n} in all)."
            )
        return names.index(chosen)
    # Python itself refuses to read endless numbers
    is_short_number = chosen.isdecimal() and len(chosen) <= 18
    if not is_short_number or int(chosen) >= n:
        refuse(f"--set must be the number of a set, from 0 to {n - 1}: got {chosen!r:.40}.")
    return int(chosen)
