"""keyhole: one attention layer with frozen random heads, fitted in closed form, and its theory as code."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name → module that defines it. Loaded on first use, so that `import keyhole` costs no more than NumPy.
_HOME = {
    "SetBatch": "sets",
    "GaussianHeads": "heads",
    "QueryKeyHeads": "heads",
    "attention_features": "features",
    "mlp_features": "features",
    "attention_kernel": "kernels",
    "mlp_kernel": "kernels",
    "AttentionRegressor": "estimators",
    "AttentionClassifier": "estimators",
    "AttentionFeatures": "estimators",
}
_ROOMS = ("activations", "estimators", "features", "heads", "kernels", "sets", "solvers", "targets")

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from keyhole import activations, estimators, features, heads, kernels, sets, solvers, targets
    from keyhole.estimators import AttentionClassifier, AttentionFeatures, AttentionRegressor
    from keyhole.features import attention_features, mlp_features
    from keyhole.heads import GaussianHeads, QueryKeyHeads
    from keyhole.kernels import attention_kernel, mlp_kernel
    from keyhole.sets import SetBatch


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"keyhole.{_HOME[name]}"), name)
    if name in _ROOMS:
        return importlib.import_module(f"keyhole.{name}")
    raise AttributeError(f"module 'keyhole' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_ROOMS})
