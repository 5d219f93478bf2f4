"""Multivariate time series in the UEA archive's ``.ts`` format: every time step is a key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole.datasets.archives import read_texts
from keyhole.sets import SetBatch
from keyhole.tables import Dataset


def load_uea(path: Any, *, time: bool = True) -> Dataset:
    r"""Read time series from a ``.ts`` file: sets of time steps, of any lengths.

    Parameters
    ----------
    path : str or Path
        One file; or an archive or folder with a file ``…_TRAIN.ts`` and a file ``…_TEST.ts``, which become the split.
    time : bool
        Whether a token says when it was: a last coordinate from 0, the first step, to 1, the last. Without it a
        series is a bag of values.

    Returns
    -------
    Dataset
        Steps with a missing value ("?" or NaN) are left out. Labels are text, or numbers where the file has
        ``@targetLabel``.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> text = "@univariate false\n@classLabel true a b\n@data\n1,2,3:4,5,6:a\n7,8:9,?:b\n"
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "tiny.ts")
    ...     _ = file.write_text(text)
    ...     data = load_uea(file)
    >>> data.sets.lengths, data.target.tolist()
    (array([3, 1]), ['a', 'b'])
    """
    path = Path(path)
    texts = read_texts(path, lambda name: name.lower().endswith(".ts"))
    if not texts:
        raise ValueError(f"time series are read from .ts files: {path.name!r} has none.")
    if len(texts) > 2 or (len(texts) == 2 and not all(n.upper().endswith(("_TRAIN.TS", "_TEST.TS")) for n in texts)):
        found = ", ".join(repr(n) for n in sorted(texts)[:8])
        raise ValueError(f"one file, or one …_TRAIN.ts and one …_TEST.ts: {path.name!r} has {found}. Name one of them.")
    ordered = sorted(texts, key=lambda n: n.upper().endswith("_TEST.TS"))
    parts = [parse_ts(texts[name], name, time=time) for name in ordered]
    series = [s for part in parts for s in part[0]]
    dims = {s.shape[1] for s in series}
    if len(dims) > 1:
        raise ValueError(f"all series must have as many dimensions: found {sorted(d - time for d in dims)}.")
    dim = dims.pop() - time
    split = np.concatenate([np.full(len(part[0]), k) for k, part in enumerate(parts)]) if len(parts) == 2 else None
    targets = [part[1] for part in parts if part[1] is not None]
    target = np.concatenate(targets) if len(targets) == len(parts) else None
    names = (*(f"dimension {j}" for j in range(dim)), *(("time",) if time else ()))
    words = f"{path.name}: {len(series)} series of {min(map(len, series))}–{max(map(len, series))} steps"
    return Dataset(SetBatch(series), target, names, words, "label", split)


def parse_ts(text: str, name: str, *, time: bool) -> tuple[list[Float[np.ndarray, "k d"]], np.ndarray | None]:
    """Series and labels of one file."""
    head, labelled, numeric, lines = True, False, False, []
    for row, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if not head:
            lines.append((row, line))
            continue
        key, _, value = line.lower().partition(" ")
        if key == "@data":
            head = False
        elif key in ("@classlabel", "@targetlabel"):
            labelled = value.split(" ")[0].strip() == "true"
            numeric = key == "@targetlabel"
        elif key == "@timestamps" and value.strip() == "true":
            raise ValueError(
                f"series must be without time stamps: {name!r:.80} has them. Convert it to evenly spaced ones."
            )
        elif not line.startswith("@"):
            break
    if head or not lines:
        raise ValueError(f"a .ts file has lines that begin with @, then @data, then series: {name!r:.80} has not.")
    series, labels = [], []
    for row, line in lines:
        fields = line.split(":")
        if labelled:
            labels.append(fields.pop().strip())
        series.append(_series(fields, row, name, time))
    return series, _labels(labels, numeric, name) if labelled else None


def _series(fields: list[str], row: int, name: str, time: bool) -> Float[np.ndarray, "k d"]:
    def number(cell: str) -> float:
        return float("nan") if cell.strip() in ("?", "") else float(cell)

    try:
        columns = [[number(cell) for cell in field.split(",")] for field in fields]
    except ValueError as error:
        raise ValueError(
            f"a series is numbers with commas, dimensions parted by colons: line {row} of {name!r:.60} is not "
            f"({str(error)[:60]})."
        ) from None
    lengths = {len(column) for column in columns}
    if len(lengths) != 1:
        raise ValueError(
            f"the dimensions of a series must be equally long, and there must be one: those on line "
            f"{row} of {name!r:.60} have {', '.join(str(n) for n in sorted(lengths)) or 'no'} steps."
        )
    values = np.array(columns).T
    if time:
        steps = np.linspace(0.0, 1.0, len(values)) if len(values) > 1 else np.zeros(1)
        values = np.concatenate([values, steps[:, None]], axis=1)
    if np.isinf(values).any():
        raise ValueError(f"a series must be finite: that on line {row} of {name!r:.60} is not.")
    kept = values[~np.isnan(values).any(axis=1)]
    return kept if len(kept) else np.zeros((1, values.shape[1]))


def _labels(labels: list[str], numeric: bool, name: str) -> np.ndarray:
    if not numeric:
        return np.array(labels, dtype=np.str_)
    try:
        values = np.array([float(label) for label in labels])
    except ValueError as error:
        raise ValueError(f"targets must be numbers: {name!r:.80} has others ({str(error)[:60]}).") from None
    if not np.isfinite(values).all():
        raise ValueError(f"targets must be finite: those of {name!r:.80} are not.")
    return values
