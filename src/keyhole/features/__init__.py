"""Finite heads: the features φ of one attention layer, and of the MLP baseline on the flattened input."""

from keyhole.features.attention import apply_values, attention_features, feature_blocks
from keyhole.features.mlp import mlp_features

__all__ = ["apply_values", "attention_features", "feature_blocks", "mlp_features"]
