"""Convex problems on matrices. Nothing here knows of sets or heads."""

from keyhole.solvers.grams import AccumulatedGram, accumulate_gram, mirror_lower
from keyhole.solvers.moments import DesignMoments
from keyhole.solvers.penalties import default_alphas, numerical_floor, select_alpha
from keyhole.solvers.principal import PrincipalAxes
from keyhole.solvers.ridge import RidgePath, RidgeSolution
from keyhole.solvers.ridge_cholesky import ridge_gram_fixed
from keyhole.solvers.ridge_design import (
    DesignStatistics,
    accumulate_design,
    ridge_design_path,
    ridge_statistics_path,
)
from keyhole.solvers.ridge_gram import ridge_gram_path

__all__ = [
    "AccumulatedGram",
    "DesignMoments",
    "DesignStatistics",
    "PrincipalAxes",
    "RidgePath",
    "RidgeSolution",
    "accumulate_design",
    "accumulate_gram",
    "default_alphas",
    "mirror_lower",
    "numerical_floor",
    "ridge_design_path",
    "ridge_gram_fixed",
    "ridge_gram_path",
    "ridge_statistics_path",
    "select_alpha",
]
