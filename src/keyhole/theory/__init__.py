"""The theory as code: complexity, spectrum, learning curves, bounds.

Integers and formulas, never data.
"""

from __future__ import annotations

from keyhole.theory.biased import BiasedNorm, biased_norm_bound
from keyhole.theory.bounds import (
    RiskBound,
    approximation_bound,
    heads_needed,
    heads_predicted,
    kernel_risk_bound,
    risk_bound,
    samples_needed,
)
from keyhole.theory.complexity import (
    kernel_coefficient,
    mlp_norm,
    paper_complexity,
    rkhs_norm,
    rkhs_norm_bound,
)
from keyhole.theory.conditional import conditional_curve
from keyhole.theory.curves import (
    BestBias,
    BestRidge,
    EmpiricalCurve,
    best_bias,
    best_ridge_curve,
    curve_from_spectrum,
    empirical_curve,
    learning_curve,
    learning_surface,
)
from keyhole.theory.harmonics import harmonic_count, pair_powers
from keyhole.theory.mlp import mlp_spectrum
from keyhole.theory.pairs import pair_eigenvalues
from keyhole.theory.spectrum import Spectrum, attention_spectrum, attention_trace

__all__ = [
    "BestBias",
    "BestRidge",
    "BiasedNorm",
    "EmpiricalCurve",
    "RiskBound",
    "Spectrum",
    "approximation_bound",
    "attention_spectrum",
    "attention_trace",
    "best_bias",
    "best_ridge_curve",
    "biased_norm_bound",
    "conditional_curve",
    "curve_from_spectrum",
    "empirical_curve",
    "harmonic_count",
    "heads_needed",
    "heads_predicted",
    "kernel_coefficient",
    "kernel_risk_bound",
    "learning_curve",
    "learning_surface",
    "mlp_norm",
    "mlp_spectrum",
    "pair_eigenvalues",
    "pair_powers",
    "paper_complexity",
    "risk_bound",
    "rkhs_norm",
    "rkhs_norm_bound",
    "samples_needed",
]
