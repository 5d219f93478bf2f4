"""Logistic regression with approximate leave-one-out. Nothing here knows of sets or heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keyhole._lazy import lazy_names

_MODULES = {
    "LogisticProblem": "problem",
    "logistic_gram": "gram",
    "logistic_rows": "design",
}
__all__ = list(_MODULES)

if TYPE_CHECKING:
    from keyhole.logistic.design import logistic_rows as logistic_rows
    from keyhole.logistic.gram import logistic_gram as logistic_gram
    from keyhole.logistic.problem import LogisticProblem as LogisticProblem

__getattr__, __dir__ = lazy_names("keyhole.logistic", _MODULES)
