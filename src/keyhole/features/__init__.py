"""Finite heads: the features φ of one attention layer, and of the MLP baseline on the flattened input."""

from keyhole.features.attention import apply_values, attention_features, feature_blocks
from keyhole.features.mlp import mlp_features
from keyhole.features.pooled import pooled_feature_blocks, pooled_features, pooled_pullback, pooled_values
from keyhole.features.pullback import attention_pullback

__all__ = [
    "apply_values",
    "attention_features",
    "attention_pullback",
    "feature_blocks",
    "mlp_features",
    "pooled_feature_blocks",
    "pooled_features",
    "pooled_pullback",
    "pooled_values",
]
