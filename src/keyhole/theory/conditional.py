"""Learning curves of features that are at hand: these heads, any activation, any tokens.

:mod:`keyhole.theory.curves` averages over random heads and treats their features as Gaussian.
With few heads that is wrong by up to a factor of four. Here the heads are given: m sets were drawn,
their features φ in R^p are known, and so is the target on them. Ridge regression on n fresh samples
then follows the kernel formula of that module, with the eigenvalues λ_i of S = E φφᵀ and the
target's powers c_i² on them. The part of the target that the features cannot express is noise σ²:

    γ (1 − z/n) = λ,   z = Σ λ_i/(λ_i+γ),   q = Σ (λ_i/(λ_i+γ))²,
    test error = n/(n−q) · T(γ),   T(γ) = Σ c_i² (γ/(λ_i+γ))² + σ².

None of these is known exactly. The eigenvalues of Ŝ = (1/m) Σ φφᵀ are more spread out than those
of S, and its eigenvectors fit the target too well. Both errors are those of a ridge regression on
the m sets, which obeys the same formula with m instead of n. So they can be taken out. Write
ẑ, q̂ for the sums over the eigenvalues of Ŝ at γ̂, and ê for the mean squared residual on the m sets
of ridge regression with the ridge γ̂. Then

    γ = γ̂ / (1 − ẑ/m),   z = ẑ,   z − q = (ẑ − q̂)(m − ẑ)/(m − 2ẑ + q̂),
    T = (1 − q/m) · ê / (1 − ẑ/m)²,

where the last line is generalised cross-validation, m/(m−q) · T = ê/(1 − ẑ/m)², solved for T. At
n = m the predicted test error is that of generalised cross-validation. An intercept is a feature
that costs no penalty: features and target are centred, and z, q, ẑ and q̂ are larger by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.optimize import brentq

from keyhole._checks import check_finite, check_float_array, check_number
from keyhole.theory.curves import check_samples


def conditional_curve(
    features: Any,
    y: Any,
    n_samples: Any,
    ridge: Any,
    noise: float | int = 0.0,
    fit_intercept: bool = False,
) -> Float[np.ndarray, "*shape"]:
    """Predicted test error of ridge regression on *these* features, from sets that were drawn.

    Any activation, softmax included, any head distribution, learned heads included, and any
    distribution of the tokens: only the features of m sets and the target on them are used.

    Parameters
    ----------
    features : array (m, p)
        Features of m sets, as :func:`keyhole.attention_features` returns them.
    y : array (m,)
        The target on these sets. Noise in it counts as a part of the target that the features
        cannot express, so that labelled samples will do; leave ``noise`` at 0 then.
    n_samples : int or array
        Training samples n. Beyond m the prediction extrapolates; it is refused where the m sets do
        not show the small eigenvalues that n samples resolve.
    ridge : float or array
        λ, so that the penalty is α = nλ; 0 means interpolation, or least squares for p < n. An
        array is broadcast with ``n_samples``: all of them share one eigendecomposition.
    noise : float
        Variance σ² of noise in the labels that is not in ``y``. It is part of the test error too.
    fit_intercept : bool
        Whether the learner has an intercept without a penalty, as the estimators have by default.

    Returns
    -------
    array of the common shape of ``n_samples`` and ``ridge``
        E (f̂ − y)² + σ² on fresh samples.

    See Also
    --------
    keyhole.theory.learning_curve : a formula that needs no sets; for the sphere distribution, and
        heads in the hundreds or infinitely many.

    Notes
    -----
    Cost: one eigendecomposition of order min(m, p). Take m at least 2n, and at least 2000: the
    prediction varies from draw to draw of the sets as a mean over m squared errors does.

    Examples
    --------
    >>> import keyhole as kh
    >>> target = kh.targets.QueryPower(p=1, dim=3)
    >>> heads = kh.GaussianHeads().sample(50, dim=3, seed=0)
    >>> sets = kh.targets.sphere_sets(4000, n_keys=32, dim=3, seed=1)
    >>> features = kh.attention_features(sets, heads)
    >>> conditional_curve(features, target(sets), [100, 700], ridge=0.0024).round(5)
    array([0.0035 , 0.00299])
    """
    features, y = _check_sets(features, y)
    samples = check_samples(n_samples)
    ridges = _check_ridges(ridge)
    noise = check_number(noise, "noise", minimum=0.0)
    spectrum = SampleSpectrum.of(features, y, bool(fit_intercept))
    pairs = np.broadcast(samples, ridges)
    errors = [spectrum.test_error(float(n), float(single), noise) for n, single in pairs]
    return np.array(errors).reshape(pairs.shape)


@dataclass(frozen=True, eq=False)
class SampleSpectrum:
    """What the formulas need of m sets.

    Attributes
    ----------
    eigenvalues : array (r,)
        The positive eigenvalues of Ŝ.
    powers : array (r,)
        Mean squares of the target's components along the eigenvectors of Ŝ.
    residual : float
        Mean square of the rest of the target.
    n_sets : int
        m.
    n_constants : int
        1 with an intercept, which is learned without a penalty, else 0.
    """

    eigenvalues: Float[np.ndarray, " r"]
    powers: Float[np.ndarray, " r"]
    residual: float
    n_sets: int
    n_constants: int

    @classmethod
    def of(
        cls, features: Float[np.ndarray, "m p"], y: Float[np.ndarray, " m"], fit_intercept: bool
    ) -> SampleSpectrum:
        """The spectrum of m sets; with an intercept, of their features less the mean."""
        if fit_intercept:
            features = features - features.mean(axis=0)
            y = y - y.mean()
        m, p = features.shape

        # Ŝ and the Gram matrix have the same positive eigenvalues: take the smaller of the two
        if p <= m:
            eigenvalues, vectors = np.linalg.eigh(features.T @ features / m)
        else:
            eigenvalues, vectors = np.linalg.eigh(features @ features.T / m)
        rounding = max(m, p) * np.finfo(float).eps * max(float(eigenvalues[-1]), 0.0)
        is_positive = eigenvalues > rounding
        eigenvalues = eigenvalues[is_positive]
        vectors = vectors[:, is_positive]

        # the target's components along the eigenvectors, in the space of the m sets, and the rest
        if p <= m:
            directions = vectors / np.sqrt(m * eigenvalues)
            components = directions.T @ (features.T @ y)
            rest = y - features @ (directions @ components)
        else:
            components = vectors.T @ y
            rest = y - vectors @ components
        return cls(
            eigenvalues=eigenvalues,
            powers=np.square(components) / m,
            residual=float(rest @ rest) / m,
            n_sets=m,
            n_constants=int(fit_intercept),
        )

    def freedom(self, gamma: float) -> _Freedom:
        """Sums over the m sets at γ̂.

        They are added up from positive numbers: ẑ may be so near to m that a difference is lost.
        """
        learned = self.eigenvalues / (self.eigenvalues + gamma)
        unlearned = gamma / (self.eigenvalues + gamma)
        n_never_learned = self.n_sets - len(self.eigenvalues) - self.n_constants
        return _Freedom(
            learned=float(learned.sum()) + self.n_constants,
            half_learned=float(learned @ unlearned),
            unlearned=float(unlearned.sum()) + n_never_learned,
            unlearned_twice=float(unlearned @ unlearned) + n_never_learned,
        )

    def test_error(self, n: float, ridge: float, noise: float) -> float:
        """The predicted test error of n samples."""
        m = self.n_sets
        gamma = self.sample_ridge(n, ridge)
        freedom = self.freedom(gamma)

        # the mean squared residual on the m sets, of ridge regression with the ridge γ̂
        unlearned = gamma / (self.eigenvalues + gamma)
        training_error = float(np.square(unlearned) @ self.powers) + self.residual

        # without the bias of a sample: q, and what the features leave of the target, T
        q = freedom.learned
        if freedom.half_learned > 0.0:
            q -= freedom.half_learned * freedom.unlearned / freedom.unlearned_twice
        left = (1 - q / m) * training_error / (freedom.unlearned / m) ** 2

        # n samples; none are left at the interpolation peak
        signal = left + noise
        if signal == 0.0:
            return 0.0
        if n - q <= 1e-12 * n:
            return math.inf
        return n / (n - q) * signal

    def sample_ridge(self, n: float, ridge: float) -> float:
        """γ̂ with γ̂ (1 − ẑ/n)/(1 − ẑ/m) = λ.

        The left side grows with γ̂, for n above and below m.
        """
        m = self.n_sets
        rank = len(self.eigenvalues) + self.n_constants
        self._check_reach(n, ridge)
        if len(self.eigenvalues) == 0:
            return ridge
        if ridge == 0.0 and rank <= n:
            return 0.0

        def excess(log_gamma: float) -> float:
            """The logarithm of the left side less that of λ; for λ = 0 it is 1 − ẑ/n."""
            freedom = self.freedom(math.exp(log_gamma))
            share_left = 1 - freedom.learned / n
            if ridge == 0.0:
                return share_left
            if share_left <= 0.0:
                return -1000.0  # γ̂ is too small
            log_left_side = log_gamma + math.log(share_left) - math.log(freedom.unlearned / m)
            return log_left_side - math.log(ridge)

        # from an upper end at which little is learned go down until γ̂ is too small
        trace = float(self.eigenvalues.sum())
        high = math.log(4 * trace / min(n, m) + 4 * ridge)
        while excess(high) < 0.0:
            high += 1.0
        low = high - 2.0
        while excess(low) > 0.0:
            low -= 2 * (high - low)
        return math.exp(float(brentq(excess, low, high, xtol=1e-13)))

    def _check_reach(self, n: float, ridge: float) -> None:
        """Refuse more samples than m sets can speak for.

        Features whose rank is below m show all their eigenvalues. If not, then γ̂ → 0 leads to
        γ = m / Σ 1/λ̂ at the least, and for n > m to the ridge γ (1 − m/n).
        """
        m = self.n_sets
        rank = len(self.eigenvalues) + self.n_constants
        if rank < m or n < m:
            return
        smallest_gamma = m / float(np.sum(1 / self.eigenvalues))
        smallest_ridge = smallest_gamma * (1 - m / n)
        if ridge > 2 * smallest_ridge:
            return
        raise ValueError(
            f"`features` has {m} sets, whose spectrum does not show the small eigenvalues that "
            f"{n:g} samples resolve at ridge {ridge:g}. Pass the features of more than "
            f"{math.ceil(n)} sets, or a ridge above {2 * smallest_ridge:.2g}."
        )


@dataclass(frozen=True)
class _Freedom:
    """Sums over m sets of L = λ̂/(λ̂+γ̂): Σ L = ẑ, Σ L (1−L), Σ (1−L) and Σ (1−L)²."""

    learned: float
    half_learned: float
    unlearned: float
    unlearned_twice: float


def _check_ridges(ridge: Any) -> np.ndarray:
    """One ridge λ or an array of them, none negative."""
    if np.ndim(ridge) == 0:
        return np.array(check_number(ridge, "ridge", minimum=0.0))
    ridges = check_float_array(ridge, "ridge").astype(np.float64)
    check_finite(ridges, "ridge")
    if (ridges < 0).any():
        raise ValueError(f"`ridge` must not be negative: got {float(ridges.min()):g} in the array.")
    return ridges


def _check_sets(features: Any, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Features (m, p) and targets (m,) of the same sets, as finite float64 arrays."""
    features = check_float_array(features, "features").astype(np.float64)
    y = check_float_array(y, "y").astype(np.float64)
    if features.ndim != 2 or y.shape != features.shape[:1]:
        raise ValueError(
            "`features` must be (m, p) and `y` (m,), one row and one value per set: got "
            f"{features.shape} and {y.shape}."
        )
    if len(y) < 4 or features.shape[1] < 1:
        raise ValueError(
            "`features` must hold at least 4 sets and 1 feature: got an array of shape "
            f"{features.shape}."
        )
    check_finite(features, "features")
    check_finite(y, "y")
    return features, y
