"""States of the explorer: pages that a random state asks for are answered within a time limit each.

What a state is, and what has to hold of its page, stands in `explorer_states`. The attack adds
the limits on time and memory, and the number of states.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from random import Random
from typing import Any

from cases import Case, Format

IS_THERE = importlib.util.find_spec("explorer_states") is not None


def explorer_base(rng: Random) -> dict[str, Any]:
    return {"seed": rng.getrandbits(40)}


def explorer_mutate(rng: Random, state: dict[str, Any]) -> dict[str, Any]:
    return state


def explorer_finish(rng: Random, state: dict[str, Any]) -> Case:
    return Case("explorer", "explorer", {}, state)


EXPLORER = Format(
    share=0.5,
    base=explorer_base,
    mutate=explorer_mutate,
    finish=explorer_finish,
    fewest=0,
    most=0,
)


def warm() -> None:
    """Import the explorer before children are forked, which takes longer than most states."""
    if IS_THERE:
        importlib.import_module("explorer_states")


def read_explorer(folder: Path, options: dict[str, Any]) -> None:
    """One state of the explorer."""
    import explorer_states

    explorer_states.check_state(Random(options["seed"]))
