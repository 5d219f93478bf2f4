"""A learning problem in the eigenbasis of its kernel: eigenvalues, target powers, and what lies beyond."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float

from keyhole._checks import check_choice, check_count
from keyhole.heads import GaussianHeads
from keyhole.targets.polynomial import Polynomial
from keyhole.theory.blocks import Bias, beyond_the_blocks, bias_of, biased_blocks, target_vectors
from keyhole.theory.harmonics import pair_powers
from keyhole.theory.mlp import highest_total_degree, mlp_eigenvalue, mlp_level_powers, mlp_levels, mlp_spectrum
from keyhole.theory.moments import pair_eigenvalues
from keyhole.theory.spectrum import MAX_BIASED_DEGREE, Spectrum, attention_levels, degree_ladder, mean_diagonal


@dataclass(frozen=True, eq=False)
class EigenProblem:
    """Levels of a kernel with the power of a target in each.

    Attributes
    ----------
    eigenvalues, multiplicities, powers : array (levels,)
        ``powers`` is the total over the eigenfunctions of a level.
    remainder : float
        Sum of the eigenvalues beyond the listed levels. None of them is resolved by the sample, so each
        adds its λ/γ to the degrees of freedom: together they act like a ridge of n λ = remainder.
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
        """Degrees of freedom: z = Σ λ/(λ+γ), with the remainder's share, and q = Σ (λ/(λ+γ))²."""
        if gamma == 0.0:
            count = float(self.multiplicities[self.eigenvalues > 0].sum())
            return count, count
        learned = self.eigenvalues / (self.eigenvalues + gamma)
        weighted = self.multiplicities * learned
        return float(weighted.sum()) + self.remainder / gamma, float(weighted @ learned)


def problems(target: Polynomial, n_keys: int, model: str, law: GaussianHeads | None = None) -> Iterator[EigenProblem]:
    """Yield ever finer descriptions of learning ``target`` from sets of N keys under the sphere law."""
    check_choice(model, "model", ("attention", "mlp"))
    n_keys = check_count(n_keys, "n_keys")
    if model == "mlp":
        if law is not None:
            raise ValueError(f'`law` is the law of attention heads, and `model` is "mlp": leave out {law!r}.')
        for degree in range(2, highest_total_degree(target.dim, n_keys) - 1):
            yield _mlp_problem(target, n_keys, degree)
        return
    bias = bias_of(law, target.dim)
    if bias and max(target.degrees) > MAX_BIASED_DEGREE:
        raise ValueError(
            f"{target!r} has degree {max(target.degrees)} in query or key, and the blocks of heads with a mean end at "
            f"{MAX_BIASED_DEGREE}. Lower the degree, or use zero-mean heads."
        )
    make = _biased_problem if bias else _attention_problem
    for degree in degree_ladder(bias, max(target.degrees) if bias else 0):
        yield make(target, n_keys, bias, degree)


@lru_cache(maxsize=32)
def _biased_problem(target: Polynomial, n_keys: int, bias: Bias, degree: int) -> EigenProblem:
    vectors = target_vectors(target, degree)
    blocks = biased_blocks(target.dim, bias.unit, degree)
    parts = [(block.dimension, *block.levels(n_keys, vectors.get(block.label))) for block in blocks[:-1]]
    values = bias.gain * np.concatenate([found for _, found, _ in parts])
    counts = np.concatenate([np.full(len(found), float(dimension)) for dimension, found, _ in parts])
    rest = mean_diagonal(target.dim, n_keys, bias) - float(values @ counts)
    edge = bias.gain * beyond_the_blocks(blocks, n_keys)
    return EigenProblem(values, counts, np.concatenate([power for _, _, power in parts]), max(rest, 0.0), edge)


@lru_cache(maxsize=32)
def _attention_problem(target: Polynomial, n_keys: int, bias: Bias, degree: int) -> EigenProblem:
    spectrum = attention_levels(target.dim, n_keys, bias, degree)
    known = pair_powers(target).copy()
    known[:, 1:] /= n_keys
    values = bias.gain * pair_eigenvalues(target.dim, max(degree + 1, *(size - 1 for size in known.shape)))
    values[:, 1:] /= n_keys
    edge = max(values[degree + 1, 0], values[0, degree + 1]) if target.dim > 1 else 0.0
    k, l = spectrum.degrees.T  # noqa: E741
    listed = np.zeros((degree + 1, degree + 1))
    rows, columns = min(degree + 1, known.shape[0]), min(degree + 1, known.shape[1])
    listed[:rows, :columns] = known[:rows, :columns]
    known[:rows, :columns] = 0.0
    return _with_powers(spectrum, listed[k, l], values[known.nonzero()], known[known.nonzero()], edge)


@lru_cache(maxsize=32)
def _mlp_problem(target: Polynomial, n_keys: int, degree: int) -> EigenProblem:
    spectrum = mlp_spectrum(target.dim, n_keys, degree)
    shares = mlp_level_powers(pair_powers(target), n_keys)
    levels = [tuple(int(part) for part in row if part) for row in spectrum.degrees]
    powers = np.array([shares.pop(level, 0.0) for level in levels])
    values = np.array([mlp_eigenvalue(target.dim, n_keys, level) for level in shares])
    further = mlp_levels(target.dim, n_keys, degree + 2)[len(levels) :]
    edge = max((mlp_eigenvalue(target.dim, n_keys, parts) for parts in further), default=0.0)
    return _with_powers(spectrum, powers, values, np.array(list(shares.values())), edge)


def _with_powers(
    spectrum: Spectrum, powers: np.ndarray, beyond: np.ndarray, beyond_powers: np.ndarray, edge: float
) -> EigenProblem:
    """The listed levels with their powers, then the unlisted ones in which the target has power.

    The latter get multiplicity zero: their eigenvalues are in the remainder already.
    """
    return EigenProblem(
        np.concatenate([spectrum.eigenvalues, beyond]),
        np.concatenate([spectrum.multiplicities, np.zeros(len(beyond))]),
        np.concatenate([powers, beyond_powers]),
        spectrum.remainder,
        float(edge),
    )
