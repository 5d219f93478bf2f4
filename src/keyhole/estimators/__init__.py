"""The scikit-learn surface: check what was passed, call the mathematics, store what came out."""

from __future__ import annotations

from keyhole.estimators.attention import AttentionClassifier, AttentionRegressor
from keyhole.estimators.features import AttentionFeatures
from keyhole.estimators.norm_ball import NormBallClassifier, NormBallRegressor, NormBallWarning
from keyhole.estimators.uncertainty import PlainJackknifeWarning

__all__ = [
    "AttentionClassifier",
    "AttentionFeatures",
    "AttentionRegressor",
    "NormBallClassifier",
    "NormBallRegressor",
    "NormBallWarning",
    "PlainJackknifeWarning",
]
