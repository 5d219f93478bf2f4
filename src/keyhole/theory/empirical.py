"""Learning curves from a sample: for laws, inputs and targets whose spectrum has no closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole._checks import check_count, check_finite, check_float_array, check_number, check_seed
from keyhole.theory.curves import check_features, check_samples, implicit_ridge, predicted_error
from keyhole.theory.problem import Problem


@dataclass(frozen=True, eq=False)
class EmpiricalCurve:
    """A predicted test error with the sampling error of the prediction.

    Attributes
    ----------
    n_samples, error, standard_error : arrays of one shape
        ``standard_error`` is the spread of the prediction over samples like the one given, by random halves.
    """

    n_samples: Float[np.ndarray, "*shape"]
    error: Float[np.ndarray, "*shape"]
    standard_error: Float[np.ndarray, "*shape"]


def empirical_curve(
    gram: Any,
    y: Any,
    n_samples: Any,
    ridge: float | int,
    noise: float | int = 0.0,
    n_features: float | int = math.inf,
    n_halves: int = 8,
    seed: int = 0,
) -> EmpiricalCurve:
    """Predict test errors from a Gram matrix and target values, whatever the law of inputs and heads.

    The eigenvalues of gram/m stand for the kernel's, the squared projections of y on the eigenvectors, over
    m, for the target's powers. The same prediction from random halves of the sample shows how far it can be
    trusted: the variance of a statistic over samples of m is, to first order, the mean squared deviation of
    its half-sample values from its full-sample value.

    Parameters
    ----------
    gram : array (m, m)
        Kernel matrix of m samples.
    y : array (m,)
        Target values without noise; what noise they carry is taken for target.
    n_samples : int or array
        Numbers of training samples n to predict for, at most m: a sample of m says nothing about finer
        eigenvalues.
    ridge, noise : float
        λ and σ², as in :func:`learning_curve`.
    n_features : int or math.inf
        Scalar random features k; M (d+1) for M heads.
    n_halves : int
        Random halves for the standard error.
    seed : int
        Names the halves.

    Notes
    -----
    Beware of the bias: eigenvalues of a sample are spread out compared to the kernel's, and the power in
    its smallest eigenvectors is overstated. With n ≤ m/4 it is of the order of ten percent. Cost: one
    eigendecomposition of order m and ``n_halves`` of order m/2.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((400, 20))
    >>> curve = empirical_curve(x @ x.T, x[:, 0], [10, 40], ridge=0.01)
    >>> curve.error.shape, bool((curve.standard_error > 0).all())
    ((2,), True)
    """
    gram, y = _check_sample(gram, y)
    samples = check_samples(n_samples)
    m = len(y)
    if samples.max() > m:
        raise ValueError(
            f"`n_samples` must not exceed the {m} samples of `gram`, whose eigenvalues are all we know: "
            f"got {samples.max():g}. Pass a larger Gram matrix."
        )
    settings = (
        check_number(ridge, "ridge", minimum=0.0),
        check_number(noise, "noise", minimum=0.0),
        check_features(n_features, "n_features"),
    )
    n_halves = check_count(n_halves, "n_halves", minimum=2)
    rng = np.random.default_rng(check_seed(seed))
    full = _curve(gram, y, samples.ravel(), *settings)
    deviations = []
    for _ in range(n_halves):
        half = rng.permutation(m)[: m // 2]
        deviations.append(_curve(gram[np.ix_(half, half)], y[half], samples.ravel(), *settings) - full)
    spread = np.sqrt(np.mean(np.square(deviations), axis=0))
    return EmpiricalCurve(samples, full.reshape(samples.shape), spread.reshape(samples.shape))


def _curve(
    gram: np.ndarray, y: np.ndarray, samples: np.ndarray, ridge: float, noise: float, features: float
) -> np.ndarray:
    m = len(y)
    values, vectors = np.linalg.eigh(gram / m)
    # rounding leaves eigenvalues of the order of ε λ_max, of either sign, where there should be zeros
    values = np.where(values > m * np.finfo(float).eps * values[-1], values, 0.0)
    problem = Problem(values, np.ones(m), np.square(vectors.T @ y) / m)
    errors = []
    for n in samples:
        gamma = implicit_ridge(problem, float(n), features, ridge)
        errors.append(predicted_error(problem, float(n), features, gamma, noise))
    return np.array(errors)


def _check_sample(gram: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    gram = check_float_array(gram, "gram").astype(np.float64)
    y = check_float_array(y, "y").astype(np.float64)
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or y.shape != gram.shape[:1]:
        raise ValueError(
            f"`gram` must be (m, m) and `y` (m,), one value per sample: got {gram.shape} and {y.shape}."
        )
    if len(y) < 4:
        raise ValueError(f"`gram` must hold at least 4 samples, so that it can be halved: got {len(y)}.")
    check_finite(gram, "gram")
    check_finite(y, "y")
    asymmetry = float(np.abs(gram - gram.T).max())
    if asymmetry > 1e-8 * float(np.abs(gram).max()):
        raise ValueError(
            f"`gram` must be symmetric: entries differ from their mirror images by up to {asymmetry:.1e}. "
            "Pass the kernel of a batch with itself, or (gram + gram.T) / 2."
        )
    return gram, y
