"""`load_data`: what a user writes on the command line, as sets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from keyhole.datasets.digits import load_digits_sets
from keyhole.datasets.molecules import load_molecules
from keyhole.datasets.series import load_uea
from keyhole.tables import SUFFIXES, Dataset, read_table

NAMES: dict[str, Callable[[], Dataset]] = {"digits": load_digits_sets}
"""Data that comes with keyhole's own dependencies."""


def load_data(data: str, **columns: Any) -> Dataset:
    """Read data by a name that comes with keyhole, or from a file whose suffix says what it is.

    Parameters
    ----------
    data : str
        "digits", or a path: a table as `read_table` takes it, time series (.ts), molecules (.xyz).
    **columns
        keys, query, target, set_id, missing for tables.

    Examples
    --------
    >>> load_data("digits")
    Dataset(1797 sets: scikit-learn's digits, 8 × 8 pixels, those with some ink)
    """
    given = {name: value for name, value in columns.items() if value is not None}
    path = Path(data)
    suffix = path.suffix.lower()
    if data in NAMES and not path.exists():
        loader: Callable[[], Dataset] = NAMES[data]
    elif suffix in SUFFIXES:
        return read_table(path, **given)
    elif suffix == ".ts":
        loader = lambda: load_uea(path)  # noqa: E731
    elif suffix == ".xyz":
        loader = lambda: load_molecules(path)  # noqa: E731
    elif not path.exists():
        raise FileNotFoundError(f"{data!r} is neither a file nor data that comes with keyhole ({', '.join(NAMES)}).")
    else:
        raise ValueError(
            f"data is read by its suffix, one of {', '.join((*SUFFIXES, '.ts', '.xyz'))}: got {path.name!r}."
        )
    chosen = sorted(set(given) - {"missing"})
    if chosen:
        raise ValueError(f"only tables have columns to choose: {data!r} takes no {', '.join(chosen)}.")
    return loader()
