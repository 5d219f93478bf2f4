"""keyhole: one attention layer with frozen random heads, fitted in closed form, and its theory as code."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name → module that defines it. Loaded on first use, so that `import keyhole` costs no more than NumPy.
_HOME = {
    "SetBatch": "sets",
    "SetGroups": "groups",
    "GaussianHeads": "heads",
    "QueryKeyHeads": "heads",
    "IdentityHeads": "learned",
    "LearnedHeads": "learned",
    "attention_features": "features",
    "mlp_features": "features",
    "attention_kernel": "kernels",
    "mlp_kernel": "kernels",
    "AttentionRegressor": "estimators",
    "AttentionClassifier": "estimators",
    "AttentionFeatures": "estimators",
    "NormBallRegressor": "estimators",
    "NormBallClassifier": "estimators",
    "save": "persistence",
    "load": "persistence",
}
_ROOMS = (
    "activations",
    "datasets",
    "distributed",
    "estimators",
    "features",
    "heads",
    "kernels",
    "learned",
    "persistence",
    "sets",
    "solvers",
    "sources",
    "tables",
    "targets",
    "theory",
    "tokens",
)

__all__ = ["__version__", *_HOME, *_ROOMS]

if TYPE_CHECKING:  # what `__getattr__` will find, for type checkers and editors
    from keyhole import activations as activations
    from keyhole import datasets as datasets
    from keyhole import distributed as distributed
    from keyhole import estimators as estimators
    from keyhole import features as features
    from keyhole import heads as heads
    from keyhole import kernels as kernels
    from keyhole import learned as learned
    from keyhole import persistence as persistence
    from keyhole import sets as sets
    from keyhole import solvers as solvers
    from keyhole import sources as sources
    from keyhole import tables as tables
    from keyhole import targets as targets
    from keyhole import theory as theory
    from keyhole import tokens as tokens
    from keyhole.estimators import AttentionClassifier as AttentionClassifier
    from keyhole.estimators import AttentionFeatures as AttentionFeatures
    from keyhole.estimators import AttentionRegressor as AttentionRegressor
    from keyhole.estimators import NormBallClassifier as NormBallClassifier
    from keyhole.estimators import NormBallRegressor as NormBallRegressor
    from keyhole.features import attention_features as attention_features
    from keyhole.features import mlp_features as mlp_features
    from keyhole.groups import SetGroups as SetGroups
    from keyhole.heads import GaussianHeads as GaussianHeads
    from keyhole.heads import QueryKeyHeads as QueryKeyHeads
    from keyhole.kernels import attention_kernel as attention_kernel
    from keyhole.kernels import mlp_kernel as mlp_kernel
    from keyhole.learned import IdentityHeads as IdentityHeads
    from keyhole.learned import LearnedHeads as LearnedHeads
    from keyhole.persistence import load as load
    from keyhole.persistence import save as save
    from keyhole.sets import SetBatch as SetBatch


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"keyhole.{_HOME[name]}"), name)
    if name in _ROOMS:
        return importlib.import_module(f"keyhole.{name}")
    raise AttributeError(f"module 'keyhole' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
