"""What else is attacked beside files: sequences of calls, and what has to come of them.

Each kind is a module with the functions that draw a case, as those of a format are drawn, and a
reader that runs it. A case holds no files but the settings and steps of the sequence, as JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import choices
import frozen
import one_by_one
import samples
import streams
from cases import Format

SEQUENCES: dict[str, Format] = {
    "stream": streams.STREAM,
    "choices": choices.CHOICE,
    "fitted model": frozen.FROZEN,
    "one by one": one_by_one.BATCH,
}
READERS: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    "stream": streams.read_stream,
    "choices": choices.read_choices,
    "fitted model": frozen.read_frozen,
    "one by one": one_by_one.read_one_by_one,
}

WRITES: dict[str, tuple[str, ...]] = {
    "stream": ("model ",),
    "fitted model": ("model ",),
}
"""What a sequence may write, by the beginning of its name."""

LOADS_PICKLES = ("stream", "fitted model")
"""Sequences that load pickles, of models they made themselves."""


def warm() -> None:
    """Compile what sequences need, before children are forked."""
    samples.warm()
