"""Ridge regression with exact leave-one-out. Nothing here knows of sets or heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keyhole._lazy import lazy_names

_MODULES = {
    "RidgeProblem": "problem",
    "RidgeFit": "problem",
    "ridge_gram": "gram",
    "ridge_rows": "design",
    "ridge_cg": "iterative",
}
__all__ = list(_MODULES)

if TYPE_CHECKING:
    from keyhole.ridge.design import ridge_rows as ridge_rows
    from keyhole.ridge.gram import ridge_gram as ridge_gram
    from keyhole.ridge.iterative import ridge_cg as ridge_cg
    from keyhole.ridge.problem import RidgeFit as RidgeFit
    from keyhole.ridge.problem import RidgeProblem as RidgeProblem

__getattr__, __dir__ = lazy_names("keyhole.ridge", _MODULES)
