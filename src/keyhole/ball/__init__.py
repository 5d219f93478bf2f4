"""Convex losses over the norm ball. Nothing here knows of sets or heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keyhole._lazy import lazy_names

_MODULES = {
    "NormBall": "projection",
    "LOSSES": "losses",
    "BallSetup": "norm_ball",
    "Solution": "norm_ball",
}
__all__ = list(_MODULES)

if TYPE_CHECKING:
    from keyhole.ball.losses import LOSSES as LOSSES
    from keyhole.ball.norm_ball import BallSetup as BallSetup
    from keyhole.ball.norm_ball import Solution as Solution
    from keyhole.ball.projection import NormBall as NormBall

__getattr__, __dir__ = lazy_names("keyhole.ball", _MODULES)
