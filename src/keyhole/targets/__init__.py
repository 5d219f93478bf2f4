"""Target functions (1/N) Σ_i F(x_0, x_i), their coefficients, and the sphere law they are studied under."""

from __future__ import annotations

from keyhole.targets.families import Correlation, QueryPower, RotatedCorrelation, TokenPower
from keyhole.targets.polynomial import Polynomial, monomial
from keyhole.targets.sphere import fixed_free_rotation, sphere_sets

__all__ = [
    "Correlation",
    "Polynomial",
    "QueryPower",
    "RotatedCorrelation",
    "TokenPower",
    "fixed_free_rotation",
    "monomial",
    "sphere_sets",
]
