"""One attention layer: activations, head distributions, features and kernels.

Features are of finitely many heads, kernels of infinitely many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keyhole._lazy import lazy_names

_MODULES = {
    "GaussianHeads": "heads",
    "HeadDistribution": "heads",
    "HeadDraw": "heads",
    "LearnedHeads": "learned",
    "attention_features": "features",
    "attention_weights": "features",
    "mlp_features": "mlp",
    "attention_kernel": "kernels",
    "mlp_kernel": "kernels",
    "gaussian_moment": "activations",
}
__all__ = list(_MODULES)

if TYPE_CHECKING:
    from keyhole.attention.activations import gaussian_moment as gaussian_moment
    from keyhole.attention.features import attention_features as attention_features
    from keyhole.attention.features import attention_weights as attention_weights
    from keyhole.attention.heads import GaussianHeads as GaussianHeads
    from keyhole.attention.heads import HeadDistribution as HeadDistribution
    from keyhole.attention.heads import HeadDraw as HeadDraw
    from keyhole.attention.kernels import attention_kernel as attention_kernel
    from keyhole.attention.kernels import mlp_kernel as mlp_kernel
    from keyhole.attention.learned import LearnedHeads as LearnedHeads
    from keyhole.attention.mlp import mlp_features as mlp_features

__getattr__, __dir__ = lazy_names("keyhole.attention", _MODULES)
