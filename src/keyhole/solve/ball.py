"""The learner of the paper's theorems: a convex loss is minimised over a norm ball of values.

    min over v, b of  Σ_i w_i ℓ(y_i, Φ_i v + b)   subject to   Σ_m |v_m| ≤ K  and  |v| ≤ R

with Σ w = 1. Group m owns ``group_size`` consecutive columns of Φ; with several outputs its norm is
that of the whole block. The intercept b is free. `minimise` is the way in. It takes projected
gradient steps with momentum (FISTA), and stops by the dual problem

    max over a of  D(a) = −Σ_i w_i ℓ*(y_i, a_i) − max over the ball of <Φᵀ(w a), u>

where Σ_i w_i a_i = 0 if b is free: D(a) is at most the minimum, for every such a. The plain version
of the objective is `keyhole.textbook.norm_ball_objective`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float
from scipy.special import entr, expit, logsumexp, softmax

from keyhole._checks import check_finite

Samples = Float[np.ndarray, "n t"]
PerSample = Float[np.ndarray, " n"]
Outputs = Float[np.ndarray, " t"]


# ---- losses --------------------------------------------------------------------------------------

DOMAIN_SLACK = 1e-12
"""How far rounding may put a point outside the domain of a conjugate, which is inf beyond that."""


@dataclass(frozen=True)
class Loss:
    """A convex loss ℓ(y, z) of a prediction z, summed over outputs.

    Attributes
    ----------
    value : (y, z) → (n,)
        ℓ(y, z) of each sample.
    gradient : (y, z) → (n, t)
        The gradient in z; at a kink, zero.
    conjugate : (y, a) → (n,)
        ℓ*(y, a) = max_z <a, z> − ℓ(y, z) of each sample; inf outside its domain.
    balance : (y, a, w) → (n, t)
        A point near a with Σ_i w_i a_i = 0, in the domain of the conjugate too.
    smoothness : float
        The Lipschitz constant of the gradient; inf for a loss with kinks.
    slopes : y → two arrays (n, t), or None
        Of a loss with kinks: its slope left of z = y, and right of it.
    is_of_labels : bool
        Whether targets are labels: ±1, or one-hot rows for "multinomial".
    """

    name: str
    value: Callable[[Samples, Samples], PerSample] = field(repr=False)
    gradient: Callable[[Samples, Samples], Samples] = field(repr=False)
    conjugate: Callable[[Samples, Samples], PerSample] = field(repr=False)
    balance: Callable[[Samples, Samples, PerSample], Samples] = field(repr=False)
    smoothness: float
    slopes: Callable[[Samples], tuple[Samples, Samples]] | None = field(default=None, repr=False)
    is_of_labels: bool = False


def shrink_heavier_sign(y: Samples, dual: Samples, weights: PerSample) -> Samples:
    """Shrink the heavier sign of each output until both weigh the same.

    Zero is in the domain of every conjugate, because the losses are bounded below.
    """
    upper = weights @ np.maximum(dual, 0.0)
    lower = weights @ np.maximum(-dual, 0.0)
    lighter = np.minimum(upper, lower)
    up = np.divide(lighter, upper, out=np.zeros_like(upper), where=upper > 0)
    down = np.divide(lighter, lower, out=np.zeros_like(lower), where=lower > 0)
    return np.where(dual > 0, dual * up, dual * down)


def mix_with_constant(y: Samples, dual: Samples, weights: PerSample) -> Samples:
    """Mix q = dual + y with a constant distribution, until q has the class weights of y.

    With share s of a distribution c the mean of q becomes (1 − s) q̄ + s c. That is π, the mean of
    y, for some c ≥ 0 as soon as s ≥ 1 − π_k/q̄_k in every class k. The smallest such s is taken.
    """
    # q on the simplex, whatever rounding did to the dual point
    q = np.maximum(dual + y, 0.0)
    q /= q.sum(axis=1, keepdims=True)

    # the smallest share that every class allows
    class_weights = weights @ y
    mean = weights @ q
    ratio = np.divide(class_weights, mean, out=np.ones_like(mean), where=mean > 0)
    share = min(float((1.0 - ratio).max()), 1.0)

    # s·c is what π has beyond (1 − s) q̄
    constant = np.maximum(class_weights - (1.0 - share) * mean, 0.0)
    missing = float(constant.sum())
    if share <= 0.0 or missing == 0.0:
        return q - y
    return (1.0 - share) * q + (share / missing) * constant - y


def clipped_loss(
    name: str,
    slopes: Callable[[Samples], tuple[Samples, Samples]],
    width: float,
    *,
    is_of_labels: bool = False,
) -> Loss:
    """ℓ(y, z) = max of a (z − y) − width a²/2 over the a between two slopes, which depend on y.

    It is quadratic near z = y and linear beyond; with width 0 it has a kink there.
    """

    def gradient(y: Samples, z: Samples) -> Samples:
        low, high = slopes(y)
        if width == 0.0:
            return np.where(z > y, high, np.where(z < y, low, 0.0))
        return np.clip((z - y) / width, low, high)

    def value(y: Samples, z: Samples) -> PerSample:
        a = gradient(y, z)
        return np.asarray((a * (z - y - 0.5 * width * a)).sum(axis=1))

    def conjugate(y: Samples, a: Samples) -> PerSample:
        low, high = slopes(y)
        is_outside = np.maximum(low - a, a - high) > DOMAIN_SLACK
        return sum_unless(is_outside, a * (y + 0.5 * width * a))

    has_kinks = width == 0.0
    return Loss(
        name=name,
        value=value,
        gradient=gradient,
        conjugate=conjugate,
        balance=shrink_heavier_sign,
        smoothness=math.inf if has_kinks else 1.0 / width,
        slopes=slopes if has_kinks else None,
        is_of_labels=is_of_labels,
    )


def smoothed(loss: Loss, width: float, centre: Samples) -> Loss:
    """A loss with kinks made smooth: its conjugate becomes ℓ*(y, a) + width (a − centre)²/2.

    It lies below ℓ, by at most width (a − centre)²/2 with a the gradient of ℓ. Where ``centre`` is
    a dual solution nothing is lost: the smoothed problem has the solutions of the original one.
    """
    slopes = loss.slopes
    if slopes is None:
        raise ValueError(f"only losses with kinks are made smooth: got {loss.name!r}.")

    def gradient(y: Samples, z: Samples) -> Samples:
        low, high = slopes(y)
        return np.clip(centre + (z - y) / width, low, high)

    def value(y: Samples, z: Samples) -> PerSample:
        a = gradient(y, z)
        return np.asarray((a * (z - y) - 0.5 * width * np.square(a - centre)).sum(axis=1))

    def conjugate(y: Samples, a: Samples) -> PerSample:
        return loss.conjugate(y, a) + 0.5 * width * np.square(a - centre).sum(axis=1)

    return Loss(
        name=f"smoothed {loss.name}",
        value=value,
        gradient=gradient,
        conjugate=conjugate,
        balance=loss.balance,
        smoothness=1.0 / width,
    )


def sum_unless(is_outside: np.ndarray, values: np.ndarray) -> PerSample:
    """``values`` summed over outputs; inf for samples that are outside in any of them."""
    return np.where(is_outside.any(axis=1), math.inf, values.sum(axis=1))


def slopes_of_absolute(y: Samples) -> tuple[Samples, Samples]:
    """−1 and 1."""
    return np.full_like(y, -1.0), np.ones_like(y)


def slopes_of_hinge(y: Samples) -> tuple[Samples, Samples]:
    """−1 and 0 for the label 1, 0 and 1 for the label −1."""
    return np.minimum(-y, 0.0), np.maximum(-y, 0.0)


def slopes_of_squared(y: Samples) -> tuple[Samples, Samples]:
    """Unbounded."""
    return np.full_like(y, -math.inf), np.full_like(y, math.inf)


def logistic_value(y: Samples, z: Samples) -> PerSample:
    """log(1 + exp(−y z)), without overflow."""
    return np.asarray(np.logaddexp(0.0, -y * z).sum(axis=1))


def logistic_gradient(y: Samples, z: Samples) -> Samples:
    """−y / (1 + exp(y z))."""
    return np.asarray(-y * expit(-y * z))


def logistic_conjugate(y: Samples, a: Samples) -> PerSample:
    """−H(q), the binary entropy of q = −y a in [0, 1], with a minus sign."""
    q = -y * a
    is_outside = np.maximum(-q, q - 1.0) > DOMAIN_SLACK
    inside = np.clip(q, 0.0, 1.0)
    return sum_unless(is_outside, -entr(inside) - entr(1.0 - inside))


def multinomial_value(y: Samples, z: Samples) -> PerSample:
    """log Σ_k exp z_k − <y, z>."""
    return np.asarray(logsumexp(z, axis=1) - np.sum(y * z, axis=1))


def multinomial_gradient(y: Samples, z: Samples) -> Samples:
    """softmax(z) − y."""
    return np.asarray(softmax(z, axis=1) - y)


def multinomial_conjugate(y: Samples, a: Samples) -> PerSample:
    """−H(q), the entropy of q = a + y on the simplex, with a minus sign."""
    q = a + y
    misses_one = np.abs(q.sum(axis=1, keepdims=True) - 1.0) > DOMAIN_SLACK * q.shape[1]
    is_outside = (q < -DOMAIN_SLACK) | misses_one
    return sum_unless(is_outside, -entr(np.maximum(q, 0.0)))


LOSSES: dict[str, Loss] = {
    # |r|, r = z − y
    "absolute": clipped_loss("absolute", slopes_of_absolute, width=0.0),
    # r²/2 up to |r| = 1, then |r| − 1/2
    "huber": clipped_loss("huber", slopes_of_absolute, width=1.0),
    # r²/2: half of scikit-learn's squared error
    "squared": clipped_loss("squared", slopes_of_squared, width=1.0),
    # max(0, 1 − y z) for labels y = ±1: the kink is at z = y, because y² = 1
    "hinge": clipped_loss("hinge", slopes_of_hinge, width=0.0, is_of_labels=True),
    # log(1 + exp(−y z)) for labels y = ±1
    "logistic": Loss(
        name="logistic",
        value=logistic_value,
        gradient=logistic_gradient,
        conjugate=logistic_conjugate,
        balance=shrink_heavier_sign,
        smoothness=0.25,
        is_of_labels=True,
    ),
    # −log of the probability of y, one-hot labels of t classes; the Hessian diag(q) − qqᵀ of a
    # softmax q has eigenvalues of at most 1/2
    "multinomial": Loss(
        name="multinomial",
        value=multinomial_value,
        gradient=multinomial_gradient,
        conjugate=multinomial_conjugate,
        balance=mix_with_constant,
        smoothness=0.5,
        is_of_labels=True,
    ),
}


# ---- the ball ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NormBall:
    """{Σ_m |v_m| ≤ group_radius, |v| ≤ ball_radius}; either radius may be infinite.

    Both methods are exact and depend on v only through the group norms a_m = |v_m|. Both come down
    to one threshold θ, found by sorting and a closed form: see `ratio_threshold`.
    """

    group_radius: float
    ball_radius: float

    def project(self, values: Float[np.ndarray, "m d"]) -> Float[np.ndarray, "m d"]:
        """The nearest point of the ball, one group per row. O(m d + m log m).

        Groups below the threshold are exactly zero; the radii are exceeded by rounding at most.

        >>> NormBall(group_radius=2.0, ball_radius=math.inf).project(np.array([[3, 4], [0, 1.0]]))
        array([[1.2, 1.6],
               [0. , 0. ]])
        """
        norms = group_norms(values)
        check_finite(norms, "values")
        projected = self.project_norms(norms)
        if projected is norms:
            return values
        factor = np.divide(projected, norms, out=np.zeros_like(norms), where=norms > 0)
        return values * factor[:, None]

    def project_norms(self, norms: Float[np.ndarray, " m"]) -> Float[np.ndarray, " m"]:
        """The nearest x ≥ 0 to the group norms with Σ x ≤ K and |x| ≤ R.

        >>> NormBall(3.0, math.inf).project_norms(np.array([3.0, 2.0, 0.5]))  # threshold 1
        array([2., 1., 0.])
        """
        K = self.group_radius
        R = self.ball_radius
        total = float(norms.sum())
        length = float(np.linalg.norm(norms))
        if total <= K and length <= R:
            return norms
        if K == 0.0 or R == 0.0:
            return np.zeros_like(norms)

        # only |x| ≤ R binds: the point is scaled, and its sum is within K afterwards
        if length > R and total * R <= K * length:
            return norms * (R / length)

        # only Σ x ≤ K binds: soft thresholding. Unless that point is too long: then both bind
        above = np.maximum(norms - sum_threshold(norms, K), 0.0)
        if np.linalg.norm(above) > R:
            above_both = np.maximum(norms - ratio_threshold(norms, K / R), 0.0)
            # with exact ties rounding may leave nothing; both candidates then agree
            if above_both.any():
                above = above_both

        # the threshold is right to rounding; the scale makes the radii right to rounding as well
        scale = min(K / float(above.sum()), R / float(np.linalg.norm(above)))
        return above * scale

    def support(self, norms: Float[np.ndarray, " m"]) -> float:
        """The largest <g, v> over the ball, from the group norms of g.

        It is min over θ ≥ 0 of Kθ + R |(a − θ)₊|. Every θ bounds the maximum from above, so the
        result is too small by rounding at most, however θ was found.

        >>> NormBall(group_radius=1.0, ball_radius=math.inf).support(np.array([3.0, 4.0]))
        4.0
        """
        K = self.group_radius
        R = self.ball_radius
        top = float(norms.max(initial=0.0))
        if top == 0.0 or K == 0.0 or R == 0.0:
            return 0.0

        # θ = 0: the sum does not bind
        length = float(np.linalg.norm(norms))
        if float(norms.sum()) * R <= K * length:
            return float(R * length)

        # θ = max a: the length does not bind
        n_largest = int(np.count_nonzero(norms == top))
        if n_largest * R**2 >= K**2:
            return float(K * top)

        # both bind
        threshold = ratio_threshold(norms, K / R)
        rest = float(np.linalg.norm(np.maximum(norms - threshold, 0.0)))
        return float(K * threshold + R * rest)


def group_norms(values: Float[np.ndarray, "m d"]) -> Float[np.ndarray, " m"]:
    """|v_m| of every row."""
    return np.asarray(np.sqrt(np.einsum("md,md->m", values, values)))


def sum_threshold(norms: Float[np.ndarray, " m"], radius: float) -> float:
    """The θ with Σ (a − θ)₊ = radius > 0."""
    top = float(norms.max())
    depth = np.sort(top - norms)
    counts = np.arange(1, len(depth) + 1)
    # top − θ if the first k depths were those above the threshold: true for the largest k whose
    # depth is less
    candidates = (radius + np.cumsum(depth)) / counts
    last = np.flatnonzero(depth < candidates)[-1]
    return top - float(candidates[last])


def ratio_threshold(norms: Float[np.ndarray, " m"], ratio: float) -> float:
    """The θ ≥ 0 with Σ (a − θ)₊ = ratio · |(a − θ)₊|; 0 where there is none.

    In depths c = max a − a and τ = max a − θ the equation is quadratic where k norms exceed the
    threshold. Centred at the mean of the k smallest c it reads

        τ = mean(c) + r √(V / (k (k − r²))),    V = Σ (c − mean(c))²,

    which loses no digits to cancellation however close the norms are to each other.
    """
    top = float(norms.max())
    depth = np.sort(top - norms)
    counts = np.arange(1, len(depth) + 1)

    # τ for every k; there is none unless k > r², since the sum is at most √k times the length
    means = np.cumsum(depth) / counts
    spreads = np.maximum(np.cumsum(np.square(depth)) - counts * np.square(means), 0.0)
    rooms = counts * (counts - ratio**2)
    has_root = rooms > 0.0
    roots = np.full(len(depth), math.inf)
    roots[has_root] = means[has_root] + ratio * np.sqrt(spreads[has_root] / rooms[has_root])

    # the quotient of sum and length grows with τ: the first root that leaves the next depth out
    next_depths = np.append(depth[1:], math.inf)
    fits = roots <= next_depths
    tau = float(roots[np.argmax(fits)])
    return max(top - tau, 0.0)


# ---- the problem ---------------------------------------------------------------------------------

ROUNDING = 64 * float(np.finfo(np.float64).eps)
"""Added to every gap, times the size of the terms it is the difference of: it stays a bound."""


@dataclass(frozen=True)
class BallProblem:
    """The mean loss on targets (n, t), with weights (n,) of sum one, over a ball of values (p, t).

    Iterations are fewest where the columns of ``design`` have weighted mean zero.
    """

    design: Float[np.ndarray, "n p"] = field(repr=False)
    targets: Samples = field(repr=False)
    weights: PerSample = field(repr=False)
    loss: Loss
    ball: NormBall
    group_size: int
    fit_intercept: bool

    def grouped(self, values: Float[np.ndarray, "p t"]) -> Float[np.ndarray, "m e"]:
        """Values with one row per group, all outputs of a group side by side."""
        return values.reshape(values.shape[0] // self.group_size, -1)

    def project(self, values: Float[np.ndarray, "p t"]) -> Float[np.ndarray, "p t"]:
        """The nearest values in the ball."""
        return self.ball.project(self.grouped(values)).reshape(values.shape)

    def first_intercept(self) -> Outputs:
        """An intercept to start from: the mean of real targets, zeros for labels."""
        if self.loss.is_of_labels or not self.fit_intercept:
            return np.zeros(self.targets.shape[1])
        return self.weights @ self.targets

    def objective(self, predictions: Samples) -> float:
        """Σ_i w_i ℓ(y_i, z_i)."""
        return float(self.weights @ self.loss.value(self.targets, predictions))

    def slope(self, predictions: Samples) -> Samples:
        """The gradient of the loss at each prediction."""
        return self.loss.gradient(self.targets, predictions)

    def feasible(self, dual: Samples) -> Samples:
        """``dual`` made to satisfy Σ_i w_i a_i = 0 if an intercept is free."""
        if not self.fit_intercept:
            return dual
        return self.loss.balance(self.targets, dual, self.weights)

    def conjugate(self, dual: Samples) -> float:
        """Σ_i w_i ℓ*(y_i, a_i)."""
        return float(self.weights @ self.loss.conjugate(self.targets, dual))

    def support(self, dual: Samples) -> float:
        """max over the ball of <Φᵀ(w a), u>: one product with Φᵀ."""
        gradient = self.design.T @ (self.weights[:, None] * dual)
        return self.ball.support(group_norms(self.grouped(gradient)))

    def rounding(self, predictions: Samples, dual: Samples) -> float:
        """What rounding may have taken off the gap: 64 units of all terms that cancel in it."""
        sizes = np.abs(dual) * (np.abs(predictions) + np.abs(self.targets))
        terms = self.objective(predictions) + float(self.weights @ sizes.sum(axis=1))
        return ROUNDING * terms

    def largest_eigenvalue(self, n_steps: int = 20) -> float:
        """That of Φᵀ W Φ, from below, by power iteration."""
        n_features = self.design.shape[1]
        vector = np.random.default_rng(0).standard_normal(size=(n_features,))
        vector /= np.linalg.norm(vector)
        eigenvalue = 1.0
        for _ in range(n_steps):
            vector = self.design.T @ (self.weights * (self.design @ vector))
            eigenvalue = float(np.linalg.norm(vector))
            if eigenvalue == 0.0:
                return 1.0
            vector /= eigenvalue
        return eigenvalue


# ---- FISTA ---------------------------------------------------------------------------------------

CHECK_EVERY = 10
"""Iterations between two checks of the gap, each of which costs a product with Φᵀ."""

RELAX = 0.95
"""The curvature L falls to this share per iteration: a failed test costs one product, a short step
many.
"""

FIRST_WIDTH = 0.3
"""First smoothing width, in units of the loss at the start: the scale of the residuals."""

NARROWER = 0.3
"""The width shrinks by this factor when a move of the centre left more than this share of the gap.
"""

OBJECTIVE_FLOOR = 1e-3
"""Gaps are relative to the objective, or to this share of the loss at the start if larger."""


@dataclass(frozen=True)
class Iterate:
    """Values, the intercept, and the predictions Φv + b."""

    values: Float[np.ndarray, "p t"] = field(repr=False)
    intercept: Outputs
    predictions: Samples = field(repr=False)

    def beyond(self, before: Iterate, push: float) -> Iterate:
        """The point ``push`` times the way from ``before`` to here further on."""
        return Iterate(
            values=self.values + push * (self.values - before.values),
            intercept=self.intercept + push * (self.intercept - before.intercept),
            predictions=self.predictions + push * (self.predictions - before.predictions),
        )


class Descent:
    """Projected gradient with momentum on a smooth loss, one iteration per `advance`.

    Steps are 1/(L λ) for values and 1/L for the intercept, with λ the largest eigenvalue of ΦᵀWΦ:
    where columns have mean zero, both have the curvature of the loss then. L follows what is met
    on the way: a step is accepted if <∇F(new) − ∇F(old), new − old> ≤ L |new − old|². Momentum is
    dropped when it points uphill (O'Donoghue and Candès). Cost of an iteration: one product with
    Φ, one with Φᵀ, and a projection.
    """

    def __init__(
        self, problem: BallProblem, eigenvalue: float, curvature: float, start: Iterate
    ) -> None:
        self.problem = problem
        self.eigenvalue = eigenvalue
        self.curvature = curvature
        self.point = start
        self._before = start
        self._momentum = 1.0

    def advance(self) -> None:
        """One iteration."""
        # extrapolate, and step from there
        momentum = 0.5 * (1.0 + math.sqrt(1.0 + 4.0 * self._momentum**2))
        ahead = self.point.beyond(self._before, (self._momentum - 1.0) / momentum)
        new = self._step(ahead)

        # momentum that the step turned against is dropped
        if self._product(ahead, new, new, self.point) > 0.0:
            momentum = 1.0
        self._before = self.point
        self.point = new
        self._momentum = momentum

    def _step(self, ahead: Iterate) -> Iterate:
        """The projected gradient step from ``ahead`` with the largest step that passes the test."""
        problem = self.problem
        weights = problem.weights[:, None]
        slope = problem.slope(ahead.predictions)
        gradient = problem.design.T @ (weights * slope)
        intercept_gradient = np.zeros_like(ahead.intercept)
        if problem.fit_intercept:
            intercept_gradient = problem.weights @ slope

        while True:
            # the step
            target = ahead.values - gradient / (self.curvature * self.eigenvalue)
            values = problem.project(target)
            intercept = ahead.intercept - intercept_gradient / self.curvature
            predictions = problem.design @ values + intercept
            new = Iterate(values, intercept, predictions)

            # the curvature along it, and what rounding of the products alone could add to it
            slope_change = weights * (problem.slope(predictions) - slope)
            bend = float(np.vdot(slope_change, predictions - ahead.predictions))
            allowance = ROUNDING * float(np.linalg.norm(slope_change) * np.linalg.norm(predictions))
            move = self._product(new, ahead, new, ahead)
            if move == 0.0 or bend <= self.curvature * move + allowance:
                # try a longer step next, unless rounding decided the test and it says nothing
                if bend > allowance:
                    self.curvature *= RELAX
                return new
            self.curvature = max(2.0 * self.curvature, 1.1 * bend / move)

    def _product(self, a: Iterate, b: Iterate, c: Iterate, d: Iterate) -> float:
        """<a − b, c − d> in the metric of the steps."""
        of_values = float(np.vdot(a.values - b.values, c.values - d.values))
        of_intercepts = float(np.vdot(a.intercept - b.intercept, c.intercept - d.intercept))
        return self.eigenvalue * of_values + of_intercepts


@dataclass(frozen=True)
class Solution:
    """The best values and intercept that were found, and the dual point that bounds the minimum.

    ``gap`` is at least the objective less the minimum. ``relative_gap`` is the gap over the scale
    it was compared with: the objective, or the floor if larger.
    """

    values: Float[np.ndarray, "p t"] = field(repr=False)
    intercept: Outputs
    dual: Samples = field(repr=False)
    objective: float
    gap: float
    relative_gap: float
    n_iter: int
    converged: bool


def minimise(
    problem: BallProblem,
    *,
    tol: float,
    max_iter: int,
    start: Solution | None = None,
    floor: float = 0.0,
) -> Solution:
    """Minimise until gap ≤ tol · max(objective, floor, 1e-3 · loss at v = 0), or is mere rounding.

    A loss with kinks is smoothed around a dual point, and the centre moves to the dual point found
    whenever the smoothed problem is solved as well as the centre is known: the proximal point
    method on the dual. ``start`` is the solution of a similar problem.

    >>> rng = np.random.default_rng(0)
    >>> features = rng.standard_normal((100, 20 * 3))  # 20 groups of 3
    >>> problem = BallProblem(
    ...     design=features,
    ...     targets=features[:, :3] @ [[1.0], [-2.0], [2.0]] + 5.0,
    ...     weights=np.full(100, 0.01),
    ...     loss=LOSSES["huber"],
    ...     ball=NormBall(group_radius=2.0, ball_radius=math.inf),
    ...     group_size=3,
    ...     fit_intercept=True,
    ... )
    >>> solution = minimise(problem, tol=1e-6, max_iter=20_000)
    >>> solution.values[:3, 0].round(2), int((solution.values != 0).sum())
    (array([ 0.73, -1.38,  1.25]), 3)
    >>> solution.intercept.round(1)
    array([5.])
    """
    # the first point and its loss
    design = problem.design
    values = np.zeros((design.shape[1], problem.targets.shape[1]))
    intercept = problem.first_intercept()
    loss_at_zero = problem.objective(np.zeros_like(problem.targets) + intercept)
    floor = max(floor, OBJECTIVE_FLOOR * loss_at_zero)
    dual = np.zeros_like(problem.targets)
    if start is not None:
        values = problem.project(start.values)
        intercept = start.intercept
        dual = start.dual
    point = Iterate(values, intercept, design @ values + intercept)

    # a smooth problem to descend on
    has_kinks = problem.loss.slopes is not None
    width = FIRST_WIDTH * max(loss_at_zero, float(np.finfo(np.float64).tiny))
    gap_at_last_move = math.inf
    smooth = problem
    if has_kinks:
        smooth = replace(problem, loss=smoothed(problem.loss, width, dual))
    eigenvalue = problem.largest_eigenvalue()
    descent = Descent(smooth, eigenvalue, smooth.loss.smoothness, point)

    best_objective = math.inf
    best_bound = -math.inf
    best_point = point
    n_iter = 0
    while True:
        # the gap between the best primal and the best dual point so far
        point = descent.point
        new_dual = smooth.feasible(smooth.slope(point.predictions))
        support = problem.support(new_dual)
        objective = problem.objective(point.predictions)
        rounding = problem.rounding(point.predictions, new_dual)
        bound = -problem.conjugate(new_dual) - support - rounding
        if objective < best_objective:
            best_objective = objective
            best_point = point
        if bound > best_bound:
            best_bound = bound
            dual = new_dual
        gap = max(best_objective - best_bound, 0.0)
        scale = max(best_objective, floor)
        converged = gap <= max(tol * scale, 2.0 * rounding)
        if converged or n_iter >= max_iter:
            break

        # move the centre once the smoothed problem is solved to what smoothing costs
        if has_kinks:
            shift = smooth.conjugate(new_dual) - problem.conjugate(new_dual)
            smoothed_gap = (
                smooth.objective(point.predictions) + smooth.conjugate(new_dual) + support
            )
            if smoothed_gap <= 2.0 * shift:
                curvature = descent.curvature
                if gap > NARROWER * gap_at_last_move:
                    width *= NARROWER
                    curvature /= NARROWER
                gap_at_last_move = gap
                smooth = replace(problem, loss=smoothed(problem.loss, width, new_dual))
                descent = Descent(smooth, eigenvalue, curvature, point)

        for _ in range(min(CHECK_EVERY, max_iter - n_iter)):
            descent.advance()
            n_iter += 1

    relative_gap = 0.0
    if gap > 0.0:
        relative_gap = gap / scale if scale > 0.0 else math.inf
    return Solution(
        values=best_point.values,
        intercept=best_point.intercept,
        dual=dual,
        objective=best_objective,
        gap=gap,
        relative_gap=relative_gap,
        n_iter=n_iter,
        converged=converged,
    )
