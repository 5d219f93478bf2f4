"""keyhole: one attention layer with frozen random heads, and its theory as code.

The layer is fitted in closed form.
"""

from __future__ import annotations

from keyhole._lazy import lazy_names

# a type checker takes it for true; `typing` itself would take longer to load than all of this
TYPE_CHECKING = False

__version__ = "0.2.0"

# name → module that defines it, imported on first use
_MODULES = {
    "SetBatch": "data.sets",
    "SetGroups": "data.sets",
    "concatenate": "data.sets",
    "read_table": "data.reader",
    "read_bags": "data.bag_files",
    "GaussianHeads": "attention.heads",
    "LearnedHeads": "attention.learned",
    "Landmarks": "fit.settings",
    "attention_features": "attention.features",
    "mlp_features": "attention.mlp",
    "attention_kernel": "attention.kernels",
    "mlp_kernel": "attention.kernels",
    "AttentionRegressor": "estimators.attention",
    "AttentionClassifier": "estimators.attention",
    "AttentionFeatures": "estimators.features",
    "NormBallRegressor": "estimators.norm_ball",
    "NormBallClassifier": "estimators.norm_ball",
    "ridge": "solve.ridge",
    "lens": "lab.lens",
    "save": "state",
    "load": "state",
}
_SUBMODULES = {
    "textbook": "textbook",
    "data": "data",
    "tokens": "data.tokens",
    "datasets": "data.datasets",
    "attention": "attention",
    "estimators": "estimators",
    "distributed": "distributed",
    "theory": "theory",
    "targets": "theory.targets",
}

__all__ = ["__version__", *_MODULES, *_SUBMODULES]

if TYPE_CHECKING:  # what `__getattr__` will find, for type checkers and editors
    from keyhole import attention as attention
    from keyhole import data as data
    from keyhole import distributed as distributed
    from keyhole import estimators as estimators
    from keyhole import textbook as textbook
    from keyhole import theory as theory
    from keyhole.attention.features import attention_features as attention_features
    from keyhole.attention.heads import GaussianHeads as GaussianHeads
    from keyhole.attention.kernels import attention_kernel as attention_kernel
    from keyhole.attention.kernels import mlp_kernel as mlp_kernel
    from keyhole.attention.learned import LearnedHeads as LearnedHeads
    from keyhole.attention.mlp import mlp_features as mlp_features
    from keyhole.data import datasets as datasets
    from keyhole.data import tokens as tokens
    from keyhole.data.bag_files import read_bags as read_bags
    from keyhole.data.reader import read_table as read_table
    from keyhole.data.sets import SetBatch as SetBatch
    from keyhole.data.sets import SetGroups as SetGroups
    from keyhole.data.sets import concatenate as concatenate
    from keyhole.estimators import AttentionClassifier as AttentionClassifier
    from keyhole.estimators import AttentionFeatures as AttentionFeatures
    from keyhole.estimators import AttentionRegressor as AttentionRegressor
    from keyhole.estimators import NormBallClassifier as NormBallClassifier
    from keyhole.estimators import NormBallRegressor as NormBallRegressor
    from keyhole.fit.settings import Landmarks as Landmarks
    from keyhole.lab.lens import lens as lens
    from keyhole.solve.ridge import ridge as ridge
    from keyhole.state import load as load
    from keyhole.state import save as save
    from keyhole.theory import targets as targets


__getattr__, _lazy_dir = lazy_names("keyhole", _MODULES, _SUBMODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *_lazy_dir()})
