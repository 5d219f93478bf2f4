"""Compiled inner loops: what all modules of numba share.

Imported on first use, so that `import keyhole` is quick.

Loops are serial and release the GIL: `_array.run_threads` spreads tiles of work over threads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

_SAID: set[str] = set()
"""Lines that were said in this process: once is enough."""

_ANNOUNCED: set[int] = set()
"""Loops that have run in this process, or are about to, by their identity."""


def cached_njit(**options: Any) -> Callable[[Any], Any]:
    """numba's ``njit(cache=True)``, also where no cache can be written.

    It then compiles in memory, and says so once.
    """
    from numba import njit

    def compile_later(function: Any) -> Any:
        loop = njit(**options)(function)
        try:
            loop.enable_caching()
        except RuntimeError as error:  # neither the package nor the home can be written
            _say_in_memory(str(error))
            return loop
        for step in ("load_overload", "save_overload"):
            setattr(loop._cache, step, _or_in_memory(getattr(loop._cache, step)))
        return loop

    return compile_later


def _or_in_memory(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step of numba's cache that does not turn into a failed fit.

    A full disk, or a file of somebody else's, would do that.
    """

    @wraps(step)
    def forgiving(*arguments: Any) -> Any:
        try:
            return step(*arguments)
        except OSError as error:
            _say_in_memory(str(error))
            return None

    return forgiving


def _say_in_memory(reason: str) -> None:
    if "in memory" not in _SAID:
        _SAID.add("in memory")
        _say(
            "compiling its inner loops in memory, in every process anew: their cache cannot be "
            f"used ({reason}). Set NUMBA_CACHE_DIR to a folder that can be written."
        )


def announce_compilation(loop: Any) -> None:
    """Say on standard error that a loop is about to be compiled.

    If neither this process nor the disk has it yet.

    Compiling takes seconds, once per machine; a line is kinder than silence.
    """
    # numba takes longer to say which signatures it has than some loops run
    if id(loop) in _ANNOUNCED:
        return
    _ANNOUNCED.add(id(loop))
    if loop.signatures or loop.stats.cache_path is None:  # without a cache there was a line already
        return
    name = loop.__qualname__.replace("<", "").replace(">", "")  # as numba names its files
    cached = Path(loop.stats.cache_path).glob(f"*.{name}-*.nbi")
    if not any(cached):
        _say(
            f"compiling its inner loops ({loop.__module__.rpartition('.')[2]}), once on this "
            "machine …"
        )


def _say(words: str) -> None:
    print(f"keyhole: {words}", file=sys.stderr, flush=True)  # noqa: T201
