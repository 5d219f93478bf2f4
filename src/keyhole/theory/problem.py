"""A learning problem in the eigenbasis of its kernel: eigenvalues, target powers, and what lies beyond them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float

from keyhole._checks import check_choice, check_count
from keyhole.targets.polynomial import Polynomial
from keyhole.theory.harmonics import pair_powers
from keyhole.theory.mlp import MAX_TOTAL_DEGREE, TRACE, mlp_eigenvalue, mlp_level_powers, mlp_levels, mlp_spectrum
from keyhole.theory.spectrum import MAX_DEGREE, attention_spectrum, attention_trace, pair_eigenvalues

MODELS = ("attention", "mlp")


@dataclass(frozen=True)
class Problem:
    """Levels of a kernel with the power of a target in each.

    Attributes
    ----------
    eigenvalues, multiplicities, powers : array (levels,)
        ``powers`` is the total over the eigenfunctions of a level.
    remainder : float
        Sum of the eigenvalues beyond the listed levels. None of them is resolved by the sample, so each adds its
        λ/γ to the degrees of freedom: together they act like a ridge of n λ = remainder.
    next_eigenvalue : float
        The largest eigenvalue beyond the listed levels: the approximation asks that it be small against γ.
    """

    eigenvalues: Float[np.ndarray, " levels"]
    multiplicities: Float[np.ndarray, " levels"]
    powers: Float[np.ndarray, " levels"]
    remainder: float = 0.0
    next_eigenvalue: float = 0.0

    @property
    def trace(self) -> float:
        """Sum of all eigenvalues."""
        return float(self.eigenvalues @ self.multiplicities) + self.remainder

    @property
    def power(self) -> float:
        """E f*², the error of predicting zero."""
        return float(self.powers.sum())

    def freedom(self, gamma: float) -> tuple[float, float]:
        """z = Σ λ/(λ+γ), with the remainder's share, and q = Σ (λ/(λ+γ))²."""
        if gamma == 0.0:
            count = float(self.multiplicities[self.eigenvalues > 0].sum())
            return count, count
        learned = self.eigenvalues / (self.eigenvalues + gamma)
        weighted = self.multiplicities * learned
        return float(weighted.sum()) + self.remainder / gamma, float(weighted @ learned)


def check_model(model: str) -> str:
    """Return ``model`` if it is one whose spectrum we know."""
    return check_choice(model, "model", MODELS)


def problems(target: Polynomial, n_keys: int, model: str) -> Iterator[Problem]:
    """Yield ever finer descriptions of learning ``target`` from sets of N keys under the sphere law."""
    check_model(model)
    n_keys = check_count(n_keys, "n_keys")
    if model == "mlp":
        lowest = sum(pair_powers(target).shape) - 2
        for degree in range(max(lowest, 2), max(lowest, MAX_TOTAL_DEGREE - 2) + 1):
            yield _mlp_problem(target, n_keys, degree)
        return
    degree = max(4, *(size - 1 for size in pair_powers(target).shape))
    while degree <= max(MAX_DEGREE, 2 * max(pair_powers(target).shape)):
        yield _attention_problem(target, n_keys, degree)
        degree *= 2


@lru_cache(maxsize=32)
def _attention_problem(target: Polynomial, n_keys: int, degree: int) -> Problem:
    spectrum = attention_spectrum(target.dim, n_keys, degree)
    powers = np.zeros((degree + 1, degree + 1))
    known = pair_powers(target)
    powers[: known.shape[0], : known.shape[1]] = known
    powers[:, 1:] /= n_keys
    k, l = spectrum.degrees.T  # noqa: E741
    beyond = 0.0
    if target.dim > 1:
        edge = pair_eigenvalues(target.dim, degree + 1)
        beyond = max(edge[-1, 0], edge[0, -1] / n_keys)
    return Problem(spectrum.eigenvalues, spectrum.multiplicities, powers[k, l], spectrum.remainder, beyond)


@lru_cache(maxsize=32)
def _mlp_problem(target: Polynomial, n_keys: int, degree: int) -> Problem:
    spectrum = mlp_spectrum(target.dim, n_keys, degree)
    shares = mlp_level_powers(pair_powers(target), n_keys)
    rows = [tuple(int(part) for part in row if part) for row in spectrum.degrees]
    powers = np.array([shares.get(row, 0.0) for row in rows])
    further = mlp_levels(target.dim, n_keys, degree + 2)[len(rows) :]
    beyond = max((mlp_eigenvalue(target.dim, n_keys, parts) for parts in further), default=0.0)
    return Problem(spectrum.eigenvalues, spectrum.multiplicities, powers, spectrum.remainder, beyond)


def problem_trace(dim: int, n_keys: int, model: str) -> float:
    """E K(x, x) of the model's kernel under the sphere law."""
    return TRACE if check_model(model) == "mlp" else attention_trace(dim, n_keys)
