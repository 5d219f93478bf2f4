"""Names of a package that are imported on first use.

`import keyhole` then costs no more than NumPy.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # `typing` would take longer to load than all of this
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, str], submodules: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for a package.

    Parameters
    ----------
    package : str
        Its full name.
    modules : mapping
        Name → module of the package that defines it.
    submodules : mapping, optional
        Name → module that is meant itself.
    """
    submodules = submodules or {}

    def get(name: str) -> Any:
        if name in modules:
            return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        if name in submodules:
            return importlib.import_module(f"{package}.{submodules[name]}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*modules, *submodules})

    return get, names
