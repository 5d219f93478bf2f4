"""What theory says beside measured points: errors at the best penalty, and samples needed."""

from __future__ import annotations

import math
from functools import lru_cache

from keyhole.attention.heads import GaussianHeads
from keyhole.lab.cells import DISTRIBUTIONS, read_target, target_variance
from keyhole.theory.bounds import samples_needed
from keyhole.theory.curves import best_ridge_curve


@lru_cache(maxsize=16384)
def predicted_error(
    target: str,
    dim: int,
    n_keys: int,
    n: float,
    heads: float,
    model: str = "attention",
    noise: float = 0.0,
) -> float | None:
    """Test error over Var f* at the best ridge, label noise of ``noise`` Var f* taken off.

    None where the finest spectrum that is kept is not fine enough for so many samples.
    """
    polynomial = read_target(target, dim)
    variance = target_variance(polynomial, n_keys)
    kind, distribution = _theory_of(model)
    try:
        best = best_ridge_curve(
            polynomial,
            n,
            n_keys,
            noise=noise * variance,
            n_heads=heads,
            model=kind,
            heads=distribution,
        )
    except ValueError:
        return None
    return float(best.error) / variance - noise


@lru_cache(maxsize=4096)
def predicted_samples(
    target: str, dim: int, n_keys: int, level: float, model: str, heads: float = math.inf
) -> int | None:
    """Samples predicted to reach a share of Var f*.

    None where theory finds none or keeps no spectrum fine enough.
    """
    polynomial = read_target(target, dim)
    error = level * target_variance(polynomial, n_keys)
    kind, distribution = _theory_of(model)
    try:
        return samples_needed(
            polynomial, n_keys, error, model=kind, n_heads=heads, heads=distribution
        )
    except ValueError:
        return None


def _theory_of(model: str) -> tuple[str, GaussianHeads | None]:
    """A model as the theory names it, and its head distribution."""
    if model == "mlp":
        return "mlp", None
    return "attention", DISTRIBUTIONS[model]
