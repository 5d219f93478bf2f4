"""Learning curves predicted from the spectrum of a sample, for heads whose exact spectrum is not known.

The biased kernel has no closed-form eigenvalues, but those of a Gram matrix of m sets come near them, and the same
formula as in `keyhole.theory` turns them into test errors. `keyhole.theory.empirical_curve` does this for one target
and one ridge; here one decomposition serves all targets and the best ridge is taken, because that is what
leave-one-out finds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from keyhole.experiments.cells import Values
from keyhole.experiments.nested_ridge import LAWS
from keyhole.kernels import attention_kernel, mlp_kernel
from keyhole.sets import SetBatch
from keyhole.theory.curves import implicit_ridge, predicted_errors
from keyhole.theory.problem import EigenProblem

N_HALVES = 4
"""Halves of the sample that tell bias and spread, in complementary pairs."""


@dataclass(frozen=True)
class SampleSpectrum:
    """Eigenpairs of K/m for a sample and for halves of it: (rows, eigenvalues, eigenvectors), the whole first."""

    parts: tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]

    @classmethod
    def of(cls, model: str, sets: SetBatch) -> SampleSpectrum:
        """Decompose the exact kernel of some sets. About 9m³ operations, and half as many again for the halves."""
        gram = mlp_kernel(sets) if model == "mlp" else attention_kernel(sets, law=LAWS[model])
        m = len(sets)
        rng = np.random.default_rng(0)
        rows = [np.arange(m)]
        for _ in range(N_HALVES // 2):
            order = rng.permutation(m)
            rows += [np.sort(order[: m // 2]), np.sort(order[m // 2 :])]
        return cls(tuple(_decompose(gram, part) for part in rows))

    def best_error(self, y: Float[np.ndarray, " m"], n: int, n_features: float) -> Values:
        """Predicted relative test error of n samples at the best ridge, and its standard error.

        What halving the sample adds to the prediction is taken off once: an empirical spectrum has a bias of order
        1/m, so that a half has twice that of the whole. Good for n up to m/4.
        """
        spread = float(np.var(y))
        errors = [_best(values, vectors, y[rows], n, n_features) / spread for rows, values, vectors in self.parts]
        bias = float(np.mean(errors[1:])) - errors[0]
        return {"error": max(errors[0] - bias, 0.0), "standard_error": float(np.std(errors[1:], ddof=1))}


def _decompose(gram: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    m = len(rows)
    values, vectors = np.linalg.eigh(gram[np.ix_(rows, rows)] / m)
    # rounding leaves eigenvalues of the order of ε λ_max, of either sign, where there should be zeros
    return rows, np.where(values > m * np.finfo(float).eps * values[-1], values, 0.0), vectors


def _best(values: np.ndarray, vectors: np.ndarray, y: np.ndarray, n: int, features: float) -> float:
    problem = EigenProblem(values, np.ones(len(values)), np.square(vectors.T @ y) / len(y))
    floor = implicit_ridge(problem, float(n), features, 0.0)
    base = max(floor, 1e-18 * problem.trace)
    lifts = np.concatenate([[1e-9], np.geomspace(1e-4, math.log(10 * problem.trace / base) + 1.0, 200)])
    return float(predicted_errors(problem, float(n), features, base * np.exp(lifts), 0.0).min())
