"""Learning curves from a sample: for laws, inputs and targets whose spectrum has no closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole._checks import check_count, check_finite, check_float_array, check_number, check_seed
from keyhole.theory.curves import check_features, check_samples, implicit_ridge, predicted_error
from keyhole.theory.problem import EigenProblem


@dataclass(frozen=True, eq=False)
class EmpiricalCurve:
    """A predicted test error with the sampling error of the prediction.

    Attributes
    ----------
    n_samples, error, bias, standard_error : arrays of one shape
        ``error`` is the prediction, from which ``bias`` has been removed: how far the plain formula on the
        sample's spectrum is off, estimated from halves. ``standard_error`` is the spread of ``error`` over
        samples like the one given.
    """

    n_samples: Float[np.ndarray, "*shape"]
    error: Float[np.ndarray, "*shape"]
    bias: Float[np.ndarray, "*shape"]
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
    m, for the target's powers. A sample's spectrum is more spread out than the kernel's, so the plain
    formula has a bias, of order 1/m. Halves of the sample have twice of it: their mean less the full value
    estimates it, and it is removed. The spread of the halves is the standard error, for the same reason
    that makes a half of the sample vary around the whole as the whole varies around the truth.

    Parameters
    ----------
    gram : array (m, m)
        Kernel matrix of m samples.
    y : array (m,)
        Target values without noise; what noise they carry is taken for target.
    n_samples : int or array
        Numbers of training samples n to predict for, at most m/4.
    ridge, noise : float
        λ and σ², as in :func:`learning_curve`.
    n_features : int or math.inf
        Scalar random features k; M (d+1) for M heads.
    n_halves : int
        Halves for bias and standard error; they come in complementary pairs, so this is even.
    seed : int
        Names the halves.

    Notes
    -----
    Measured against the exact curve (m = 800, d = 8 and 4, N = 4, λ = 0, 1e-4 and 1e-3, n up to m/4, twelve
    samples each): the mean is off by three percent at most, where the plain formula is up to 24 percent
    low; the standard error is 0.5 to 1.2 times the true spread. For n > m/4 it is too small, hence the
    limit. Cost: one eigendecomposition of order m and ``n_halves`` of order m/2.

    Examples
    --------
    >>> import numpy as np
    >>> from keyhole.theory import curve_from_spectrum
    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((400, 20))
    >>> curve = empirical_curve(x @ x.T, x[:, 0], [10, 40], ridge=0.01)
    >>> exact = curve_from_spectrum([1.0], [20], [1.0], [10, 40], ridge=0.01)
    >>> bool((abs(curve.error - exact) < 3 * curve.standard_error).all())
    True
    """
    gram, y = _check_sample(gram, y)
    samples = check_samples(n_samples)
    m = len(y)
    if samples.max() > m / 4:
        raise ValueError(
            f"`n_samples` must be at most a quarter of the {m} samples of `gram`: got "
            f"{samples.max():g}, about which their spectrum says too little. Pass a Gram matrix of "
            f"{4 * math.ceil(samples.max())} samples."
        )
    settings = (
        check_number(ridge, "ridge", minimum=0.0),
        check_number(noise, "noise", minimum=0.0),
        check_features(n_features, "n_features"),
    )
    n_halves = check_count(n_halves, "n_halves", minimum=2)
    rng = np.random.default_rng(check_seed(seed))
    full = _curve(gram, y, samples.ravel(), *settings)
    halves = []
    for _ in range((n_halves + 1) // 2):
        order = rng.permutation(m)
        for half in (order[: m // 2], order[m // 2 :]):
            halves.append(_curve(gram[np.ix_(half, half)], y[half], samples.ravel(), *settings))
    bias = np.mean(halves, axis=0) - full
    # a test error is never below its noise floor
    error = np.maximum(full - bias, settings[1])
    spread = np.std(halves, axis=0, ddof=1)
    return EmpiricalCurve(samples, *(column.reshape(samples.shape) for column in (error, bias, spread)))


def _curve(
    gram: np.ndarray, y: np.ndarray, samples: np.ndarray, ridge: float, noise: float, features: float
) -> np.ndarray:
    m = len(y)
    values, vectors = np.linalg.eigh(gram / m)
    # rounding leaves eigenvalues of the order of ε λ_max, of either sign, where there should be zeros
    values = np.where(values > m * np.finfo(float).eps * values[-1], values, 0.0)
    problem = EigenProblem(values, np.ones(m), np.square(vectors.T @ y) / m)
    errors = []
    for n in samples:
        gamma = implicit_ridge(problem, float(n), features, ridge)
        errors.append(predicted_error(problem, float(n), features, gamma, noise))
    return np.array(errors)


def _check_sample(gram: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    gram = check_float_array(gram, "gram").astype(np.float64)
    y = check_float_array(y, "y").astype(np.float64)
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1] or y.shape != gram.shape[:1]:
        raise ValueError(f"`gram` must be (m, m) and `y` (m,), one value per sample: got {gram.shape} and {y.shape}.")
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
