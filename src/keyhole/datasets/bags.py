"""Multiple-instance learning: bags of instances in CSV, as the field passes them around."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.datasets.archives import read_texts
from keyhole.sets import SetBatch
from keyhole.tables import Dataset


def load_bags(path: Any, *, bag: str | int = 0, label: str | int = -1, skip: Any = ()) -> Dataset:
    r"""Read bags from a file with one instance per line: a column names its bag, another gives its label.

    A bag is positive if one of its instances is: its label is the largest of theirs. That is the rule of the field,
    and the same as their common label where they agree.

    Parameters
    ----------
    path : str or Path
        Comma separated, with or without a line of names.
    bag, label : str or int
        Column by name or by position; negative positions count from the end. UCI's musk (clean1.data) has the bag
        first, then the name of a conformation, and the class last: ``load_bags(path, skip=[1])``.
    skip : sequence of str or int
        Columns that are neither.

    Returns
    -------
    Dataset
        Bags in the order in which they first appear.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "bags.csv")
    ...     _ = file.write_text("a,1,2,0\na,3,4,1\nb,5,6,0\n")
    ...     data = load_bags(file)
    >>> data.sets.lengths, data.target
    (array([2, 1]), array([1, 0]))
    """
    path = Path(path)
    text = next(iter(read_texts(path, lambda name: True).values()), "")
    try:
        rows = [row for row in csv.reader(io.StringIO(text, newline="")) if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise ValueError(f"a file of bags is comma separated: {path.name!r} is not ({error}). Is it damaged?") from None
    if not rows:
        raise ValueError(f"a file of bags has a line per instance: {path.name!r} has none.")
    header = None if _has_number(rows[0]) else [cell.strip() for cell in rows[0]]
    if header is not None:
        rows = rows[1:]
    width = len(rows[0]) if rows else 0
    for k, row in enumerate(rows):
        if len(row) != width or width < 3:
            raise ValueError(
                f"every line has a bag, a label and at least one number: line {k + 1 + (header is not None)} of "
                f"{path.name!r} has {len(row)} cells, the first has {width}."
            )
    if not rows:
        raise ValueError(f"a file of bags has a line per instance: {path.name!r} has none below its names.")
    bag_at, label_at = _place(bag, header, width, "bag"), _place(label, header, width, "label")
    used = {bag_at, label_at, *(_place(s, header, width, "skip") for s in skip)}
    columns = [j for j in range(width) if j not in used]
    if bag_at == label_at or not columns:
        raise ValueError("bag and label must be different columns, and one must be left for the instances.")
    names = tuple(header[j] if header else f"x{j}" for j in columns)
    tokens = np.array([[_number(row[j], k, names[i]) for i, j in enumerate(columns)] for k, row in enumerate(rows)])
    owner: dict[str, list[int]] = {}
    for k, row in enumerate(rows):
        owner.setdefault(row[bag_at].strip(), []).append(k)
    labels = _labels([row[label_at].strip().rstrip(".") for row in rows])
    target = np.array([labels[members].max() if labels.dtype.kind != "U" else max(labels[members].tolist())
                       for members in owner.values()])  # fmt: skip
    words = f"{path.name}: {len(owner)} bags of {len(rows)} instances"
    return Dataset(SetBatch([tokens[members] for members in owner.values()]), target, names, words, "label")


def _has_number(row: list[str]) -> bool:
    return any(_is_number(cell) for cell in row)


def _is_number(cell: str) -> bool:
    try:
        float(cell.strip().rstrip("."))
    except ValueError:
        return False
    return True


def _place(column: str | int, header: list[str] | None, width: int, option: str) -> int:
    if isinstance(column, str):
        if header is None or column not in header:
            found = "no line of names" if header is None else ", ".join(map(repr, header[:30]))
            raise ValueError(f"`{option}` must name a column: got {column!r}, the file has {found}.")
        return header.index(column)
    if not -width <= column < width:
        raise ValueError(f"`{option}` must be the position of a column: got {column} of {width} columns.")
    return column % width


def _number(cell: str, row: int, name: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = float("nan")
    if not np.isfinite(value):
        raise ValueError(
            f"instances are numbers: column {name!r} of instance {row} is {cell!r:.40}. Leave the column out with "
            "`skip`, or fill it in."
        )
    return value


def _labels(cells: list[str]) -> np.ndarray:
    """Whole numbers where all labels are, else text."""
    if all(_is_number(cell) and float(cell).is_integer() for cell in cells):
        return np.array([int(float(cell)) for cell in cells])
    if not all(cells):
        raise ValueError(f"every instance has a label: instance {cells.index('')} has none.")
    return np.array(cells, dtype=np.str_)
