"""Compiled inner loops. The only rooms that import numba; imported on first use, so that `import keyhole` is quick.

Loops are serial and release the GIL: `_array.run_threads` spreads tiles of work over threads.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def announce_compilation(loop: Any) -> None:
    """Say on standard error that a loop is about to be compiled, if neither this process nor the disk has it yet.

    Compiling takes seconds, once per machine; a line is kinder than silence.
    """
    if loop.signatures:
        return
    name = loop.__qualname__.replace("<", "").replace(">", "")  # as numba names its files
    cached = Path(loop.stats.cache_path).glob(f"*.{name}-*.nbi")
    if not any(cached):
        print(  # noqa: T201
            f"keyhole: compiling its inner loops ({loop.__module__.rpartition('.')[2]}), once on this machine …",
            file=sys.stderr,
            flush=True,
        )
