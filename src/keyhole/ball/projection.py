"""The norm ball {Σ_m |v_m| ≤ K} ∩ {|v| ≤ R}: its Euclidean projection and its support function, both exact.

Both depend on v only through the group norms a_m = |v_m|, and both come down to one threshold. The projection
is x = s (a − θ)₊; when both constraints bind, θ solves |(a − θ)₊|₁ / |(a − θ)₊|₂ = K/R. The support function
is min_θ Kθ + R |(a − θ)₊|₂, whose stationary point solves the same equation.

Everything is done on c = max a − a and τ = max a − θ, the depth of the threshold below the largest norm.
Where k norms exceed the threshold the equation is quadratic in τ, and centred at the mean of the k smallest c
it reads

    τ = mean(c) + r √(V / (k (k − r²))),    V = Σ (c − mean(c))²,  r = K/R,

which loses no digits to cancellation however close the norms are to each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from keyhole._checks import check_finite


@dataclass(frozen=True)
class NormBall:
    """{Σ_m |v_m| ≤ group_radius, |v| ≤ ball_radius}."""

    group_radius: float
    ball_radius: float

    def project(self, values: Float[np.ndarray, "m d"]) -> Float[np.ndarray, "m d"]:
        """The nearest point of the ball."""
        return project_norm_ball(values, self.group_radius, self.ball_radius)

    def support(self, norms: Float[np.ndarray, " m"]) -> tuple[float, float]:
        """The largest <g, v> over the ball, and the length below which a group of g is zero in the maximiser."""
        return norm_ball_support(norms, self.group_radius, self.ball_radius)


def project_norm_ball(
    values: Float[np.ndarray, "m d"], group_radius: float, ball_radius: float
) -> Float[np.ndarray, "m d"]:
    """The point of {Σ_m |v_m| ≤ K, |v| ≤ R} nearest to ``values``, one group per row; K or R may be infinite.

    Groups below the threshold are exactly zero. Not iterative: the number of surviving groups is found by sorting, the
    threshold by a closed form, in float64 whatever the dtype; the radii are exceeded by rounding at most. O(m d + m log
    m).

    >>> project_norm_ball(np.array([[3.0, 4.0], [0.0, 1.0]]), group_radius=2.0, ball_radius=math.inf)
    array([[1.2, 1.6],
           [0. , 0. ]])
    """
    norms = group_norms(values)
    if not math.isfinite(float(norms.sum())):
        check_finite(norms, "values")
    shrunk = project_norms(norms, group_radius, ball_radius)
    if shrunk is norms:
        return values
    factor = np.divide(shrunk, norms, out=np.zeros_like(norms), where=norms > 0)
    return values * factor[:, None].astype(values.dtype)


def group_norms(values: Float[np.ndarray, "m d"]) -> Float[np.ndarray, " m"]:
    """|v_m| of every row, summed in float64."""
    return np.sqrt(np.einsum("md,md->m", values, values, dtype=np.float64))


def project_norms(norms: Float[np.ndarray, " m"], group_radius: float, ball_radius: float) -> Float[np.ndarray, " m"]:
    """Project the vector of group norms, a ≥ 0, onto {Σ x ≤ K, |x| ≤ R}; ``norms`` itself if it is inside.

    >>> project_norms(np.array([3.0, 2.0, 0.5]), 3.0, math.inf)      # only the sum binds: threshold 1
    array([2., 1., 0.])
    """
    total, length = float(norms.sum()), float(np.linalg.norm(norms))
    if total <= group_radius and length <= ball_radius:
        return norms
    if group_radius == 0.0 or ball_radius == 0.0:
        return np.zeros_like(norms)
    if length > ball_radius and total * ball_radius <= group_radius * length:
        return norms * (ball_radius / length)
    top = float(norms.max())
    depth = top - norms
    kept = np.maximum(_sum_depth(depth, group_radius) - depth, 0.0)
    if np.linalg.norm(kept) > ball_radius:
        both = np.maximum(min(_ratio_depth(depth, group_radius / ball_radius), top) - depth, 0.0)
        kept = both if both.any() else kept  # exact ties: the two candidates agree but for rounding
    # the threshold is right to rounding; the scale makes the radii right to rounding as well
    scale = min(group_radius / float(kept.sum()), ball_radius / float(np.linalg.norm(kept)))
    return kept * scale


def norm_ball_support(norms: Float[np.ndarray, " m"], group_radius: float, ball_radius: float) -> tuple[float, float]:
    """The support function max <g, v> of the norm ball from the group norms a_m = |g_m|, and its threshold θ.

    It is min over θ ≥ 0 of Kθ + R |(a − θ)₊|₂. Every θ bounds the maximum from above, so what is returned is never too
    small by more than the rounding of that one sum, however θ was found. The maximiser v has v_m = 0 wherever a_m < θ.
    One of K and R is finite, unless all norms are zero.

    >>> norm_ball_support(np.array([3.0, 4.0]), 1.0, math.inf)
    (4.0, 4.0)
    """
    top = float(norms.max(initial=0.0))
    if top == 0.0 or group_radius == 0.0 or ball_radius == 0.0:
        return 0.0, top
    length = float(np.linalg.norm(norms))
    ratio = group_radius / ball_radius
    if float(norms.sum()) <= ratio * length:
        return ball_radius * length, 0.0
    depth = top - norms
    if ratio**2 <= np.count_nonzero(depth == 0.0):
        return group_radius * top, top
    reach = min(_ratio_depth(depth, ratio), top)
    rest = float(np.linalg.norm(np.maximum(reach - depth, 0.0)))
    return group_radius * (top - reach) + ball_radius * rest, top - reach


def _sum_depth(depth: Float[np.ndarray, " m"], radius: float) -> float:
    """The τ with Σ (τ − depth)₊ = radius > 0."""
    ordered = np.sort(depth)
    count = np.arange(1, len(ordered) + 1)
    tau = (radius + np.cumsum(ordered)) / count
    kept = int(count[ordered < tau][-1])
    return float(radius / kept + ordered[:kept].mean())


def _ratio_depth(depth: Float[np.ndarray, " m"], ratio: float) -> float:
    """The τ with |(τ − depth)₊|₁ = ratio · |(τ − depth)₊|₂, where there is one.

    The quotient of the two norms grows with τ, from √(number of zeros), so the number k of depths below τ is
    found by bisection over the sorted depths, each trial summed afresh; then the closed form of the module
    docstring holds.
    """
    ordered = np.sort(depth)
    low, high = math.floor(ratio**2) + 1, len(ordered)  # k > r², because |·|₁ ≤ √k |·|₂
    low = min(low, high)
    while low < high:
        middle = (low + high) // 2
        part = ordered[middle] - ordered[:middle]
        if float(part.sum()) >= ratio * float(np.linalg.norm(part)):
            high = middle
        else:
            low = middle + 1
    part = ordered[:low]
    centre = float(part.mean())
    spread = float(np.square(part - centre).sum())
    room = low * (low - ratio**2)
    return centre + ratio * math.sqrt(spread / room) if room > 0.0 else math.inf
