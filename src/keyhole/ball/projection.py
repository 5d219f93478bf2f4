"""The norm ball {Σ_m |v_m| ≤ K, |v| ≤ R}: its Euclidean projection and its support function.

Both are exact, depend on v only through the group norms a_m = |v_m|, and come down to one threshold
θ. The projection is x = s (a − θ)₊; when both constraints bind, θ solves
|(a − θ)₊|₁ / |(a − θ)₊|₂ = K/R. The support function is min_θ Kθ + R |(a − θ)₊|₂, whose stationary
point solves the same equation.

Everything is done on depths c = max a − a and on τ = max a − θ, the depth of the threshold below
the largest norm. Where k norms exceed the threshold the equation is quadratic in τ, and centred at
the mean of the k smallest c it reads

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
        """The largest <g, v> over the ball, and the norm below which a group of v is zero there."""
        return norm_ball_support(norms, self.group_radius, self.ball_radius)


def project_norm_ball(
    values: Float[np.ndarray, "m d"], group_radius: float, ball_radius: float
) -> Float[np.ndarray, "m d"]:
    """Return the point of {Σ_m |v_m| ≤ K, |v| ≤ R} nearest to ``values``, one group per row.

    K or R may be infinite. Groups below the threshold are exactly zero. Nothing is iterated: the
    number of groups above the threshold is found by sorting, and the threshold by a closed form, in
    float64 whatever the dtype. The radii are exceeded by rounding at most. O(m d + m log m).

    >>> values = np.array([[3.0, 4.0], [0.0, 1.0]])
    >>> project_norm_ball(values, group_radius=2.0, ball_radius=math.inf)
    array([[1.2, 1.6],
           [0. , 0. ]])
    """
    norms = group_norms(values)
    if not math.isfinite(float(norms.sum())):
        check_finite(norms, "values")
    projected_norms = project_norms(norms, group_radius, ball_radius)
    if projected_norms is norms:
        return values
    factor = np.divide(projected_norms, norms, out=np.zeros_like(norms), where=norms > 0)
    return values * factor[:, None].astype(values.dtype)


def group_norms(values: Float[np.ndarray, "m d"]) -> Float[np.ndarray, " m"]:
    """|v_m| of every row, summed in float64."""
    return np.sqrt(np.einsum("md,md->m", values, values, dtype=np.float64))


def project_norms(
    norms: Float[np.ndarray, " m"], group_radius: float, ball_radius: float
) -> Float[np.ndarray, " m"]:
    """Project the vector of group norms, a ≥ 0, onto {Σ x ≤ K, |x| ≤ R}; itself if it is inside.

    >>> project_norms(np.array([3.0, 2.0, 0.5]), 3.0, math.inf)  # only the sum binds: threshold 1
    array([2., 1., 0.])
    """
    total = float(norms.sum())
    length = float(np.linalg.norm(norms))
    if total <= group_radius and length <= ball_radius:
        return norms
    if group_radius == 0.0 or ball_radius == 0.0:
        return np.zeros_like(norms)

    # only |x| ≤ R binds: the point is scaled, and its sum is within K afterwards
    sum_holds_after_scaling = total * ball_radius <= group_radius * length
    if length > ball_radius and sum_holds_after_scaling:
        return norms * (ball_radius / length)

    # only Σ x ≤ K binds: soft thresholding
    top = float(norms.max())
    depth = top - norms
    above = np.maximum(_sum_depth(depth, group_radius) - depth, 0.0)

    # unless that point is too long: then both bind
    if np.linalg.norm(above) > ball_radius:
        reach = min(_ratio_depth(depth, group_radius / ball_radius), top)
        above_both = np.maximum(reach - depth, 0.0)
        # with exact ties rounding may leave nothing; the two candidates then agree but for rounding
        if above_both.any():
            above = above_both

    # the threshold is right to rounding; the scale makes the radii right to rounding as well
    scale = min(group_radius / float(above.sum()), ball_radius / float(np.linalg.norm(above)))
    return above * scale


def norm_ball_support(
    norms: Float[np.ndarray, " m"], group_radius: float, ball_radius: float
) -> tuple[float, float]:
    """Return max <g, v> over the norm ball from the group norms a_m = |g_m|, and its threshold θ.

    It is min over θ ≥ 0 of Kθ + R |(a − θ)₊|₂. Every θ bounds the maximum from above, so what is
    returned is never too small by more than the rounding of that one sum, however θ was found. The
    maximiser v has v_m = 0 wherever a_m < θ. One of K and R is finite, unless all norms are zero.

    >>> norm_ball_support(np.array([3.0, 4.0]), 1.0, math.inf)
    (4.0, 4.0)
    """
    top = float(norms.max(initial=0.0))
    if top == 0.0 or group_radius == 0.0 or ball_radius == 0.0:
        return 0.0, top

    # θ = 0: the sum does not bind, and the maximiser is g scaled to length R
    length = float(np.linalg.norm(norms))
    ratio = group_radius / ball_radius
    if float(norms.sum()) <= ratio * length:
        return ball_radius * length, 0.0

    # θ = max a: the length does not bind, and the maximiser lives on the largest groups
    depth = top - norms
    n_largest = np.count_nonzero(depth == 0.0)
    if ratio**2 <= n_largest:
        return group_radius * top, top

    # both bind
    reach = min(_ratio_depth(depth, ratio), top)
    threshold = top - reach
    rest = float(np.linalg.norm(np.maximum(reach - depth, 0.0)))
    return group_radius * threshold + ball_radius * rest, threshold


def _sum_depth(depth: Float[np.ndarray, " m"], radius: float) -> float:
    """The τ with Σ (τ − depth)₊ = radius > 0."""
    ordered = np.sort(depth)
    counts = np.arange(1, len(ordered) + 1)
    # τ if the first k depths were those below it: true for the largest k whose depth is below it
    candidates = (radius + np.cumsum(ordered)) / counts
    n_above = int(counts[ordered < candidates][-1])
    return float(radius / n_above + ordered[:n_above].mean())


def _ratio_depth(depth: Float[np.ndarray, " m"], ratio: float) -> float:
    """The τ with |(τ − depth)₊|₁ = ratio · |(τ − depth)₊|₂, where there is one; inf otherwise.

    The quotient of the two norms grows with τ, from √(number of zeros). So the number k of depths
    below τ is found by bisection over the sorted depths, each trial summed afresh; then the closed
    form of the module docstring holds.
    """
    ordered = np.sort(depth)

    # bisection for k; k > r², because |·|₁ ≤ √k |·|₂
    high = len(ordered)
    low = min(math.floor(ratio**2) + 1, high)
    while low < high:
        middle = (low + high) // 2
        part = ordered[middle] - ordered[:middle]
        if float(part.sum()) >= ratio * float(np.linalg.norm(part)):
            high = middle
        else:
            low = middle + 1

    # the closed form
    part = ordered[:low]
    centre = float(part.mean())
    spread = float(np.square(part - centre).sum())
    room = low * (low - ratio**2)
    if room <= 0.0:
        return math.inf
    return centre + ratio * math.sqrt(spread / room)
