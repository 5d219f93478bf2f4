"""σ, the function of the score that weighs a key, together with its Gaussian moment E[σ(u)σ(v)]."""

from __future__ import annotations

from keyhole._checks import check_choice

POINTWISE = ("relu", "linear", "square", "step", "exp")
"""Activations of one score: the weight of key i is σ(s_i)/N. Their order is their code in the compiled loops."""

SOFTMAX = "softmax"
"""The weighting softmax_i(s_i), which sums to one over the set. No closed-form kernel."""


def check_activation(name: str) -> str:
    """Return ``name`` if it is an activation we know."""
    return check_choice(name, "activation", (*POINTWISE, SOFTMAX))
