"""The radii of the norm ball: given, from theory, or a family of them to choose from."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole._checks import check_float_array, check_number

Pair = tuple[float, float]


@dataclass(frozen=True)
class Ray:
    """Norm balls that grow with one scale; a ball that does not grow is a pair of radii.

    Attributes
    ----------
    group, ball : float
        K_1 and R_2 at scale 1.
    group_grows, ball_grows : bool
        Which of them the scale multiplies.
    """

    group: float
    ball: float
    group_grows: bool = False
    ball_grows: bool = False

    @property
    def fixed(self) -> bool:
        """Whether this is a single pair of radii."""
        return not (self.group_grows or self.ball_grows)

    @property
    def unit(self) -> Pair:
        """The growing radii at scale 1; infinity for one that does not grow."""
        return (self.group if self.group_grows else math.inf, self.ball if self.ball_grows else math.inf)

    def in_units(self, exponent: int) -> Ray:
        """The same ball for outputs 2^exponent times as large; what grows finds its own scale."""
        group = self.group if self.group_grows else math.ldexp(self.group, exponent)
        return replace(self, group=group, ball=self.ball if self.ball_grows else math.ldexp(self.ball, exponent))

    def at(self, scale: float) -> Pair:
        """The radii at this scale."""
        return (
            self.group * scale if self.group_grows else self.group,
            self.ball * scale if self.ball_grows else self.ball,
        )


@dataclass(frozen=True)
class Theory:
    """K_1 = c √B and √(K_2/M) with K_2 = c B/δ: the radii of the paper's theorem.

    ``complexity`` is B; None if it is not known. The ratio of the two radii at c = 1, (δM)^{-1/2}, needs no B.
    """

    complexity: float | None
    delta: float
    constant: float
    n_heads: int

    @property
    def group_radius(self) -> float:
        """K_1 = c √B."""
        return self.constant * math.sqrt(self._known("group_radius"))

    @property
    def ball_radius(self) -> float:
        """√(c B/(δ M))."""
        return math.sqrt(self.constant * self._known("ball_radius") / (self.delta * self.n_heads))

    @property
    def ratio(self) -> float:
        """(δM)^{-1/2}."""
        return 1.0 / math.sqrt(self.delta * self.n_heads)

    def _known(self, name: str) -> float:
        if self.complexity is None:
            raise ValueError(
                f"`{name}='theory'` needs the complexity B of the target: `complexity` is None. Pass "
                "complexity=kh.theory.paper_complexity(target) for a known target, or let cross-validation "
                f"choose with {name}='cv'."
            )
        return self.complexity


def check_theory(complexity: Any, delta: Any, constant: Any, n_heads: int) -> Theory:
    """Return what the theory's radii are made of, checked."""
    if complexity is not None:
        complexity = check_number(complexity, "complexity", minimum=0.0, exclusive=True)
    delta = check_number(delta, "delta", minimum=0.0, exclusive=True)
    if delta >= 1.0:
        raise ValueError(f"`delta` must be a probability of failure, less than 1: got {delta:g}.")
    return Theory(complexity, delta, check_number(constant, "constant", minimum=0.0, exclusive=True), n_heads)


def candidate_balls(group_radius: Any, ball_radius: Any, theory: Theory) -> list[Ray]:
    """Return the balls that the two parameters of an estimator name, smallest first.

    "cv" for the group radius makes it grow. "matched" makes the ball radius follow it at the theory's ratio,
    and "cv" tries three shapes: the group norm alone, the theory's ratio, the ball alone.
    """
    groups = _as_radii(group_radius, "group_radius", ("cv", "theory"), theory)
    balls = _as_radii(ball_radius, "ball_radius", ("matched", "cv", "theory"), theory)
    rays: list[Ray] = []
    starts: list[float | None] = [None] if groups is None else [*groups]
    for group in starts:
        if balls is not None:
            rays += [_with_ball(group, ball) for ball in balls]
        elif group is not None and math.isinf(group):
            rays.append(_ball_alone(ball_radius))
        else:
            unit = 1.0 if group is None else group
            n_heads = theory.n_heads
            shapes = {"matched": [theory.ratio], "cv": [math.inf, theory.ratio, 1.0 / math.sqrt(n_heads)]}
            for ratio in shapes[ball_radius]:
                # zero times infinity is not a number, and a group radius of zero is all the bound one needs
                ball = math.inf if math.isinf(ratio) else unit * ratio
                rays.append(Ray(unit, ball, group is None, group is None))
    return sorted(rays, key=lambda ray: (ray.group, ray.ball))


def _with_ball(group: float | None, ball: float) -> Ray:
    if group is None:
        return Ray(1.0, ball, group_grows=True)
    if math.isinf(group) and math.isinf(ball):
        raise ValueError(
            "`group_radius` and `ball_radius` must not both be infinite: nothing would bound the values. Give "
            "one of them a number or 'cv', or use kh.AttentionRegressor with alpha=0."
        )
    return Ray(group, ball)


def _ball_alone(ball_radius: str) -> Ray:
    if ball_radius == "matched":
        raise ValueError(
            "`ball_radius='matched'` follows `group_radius`, which is infinite. Give `ball_radius` a number or 'cv'."
        )
    return Ray(math.inf, 1.0, ball_grows=True)


def _as_radii(radius: Any, name: str, words: tuple[str, ...], theory: Theory) -> list[float] | None:
    """The numbers that ``radius`` stands for; None for a word that stands for a family."""
    if isinstance(radius, str):
        if radius not in words:
            listed = ", ".join(repr(word) for word in words)
            raise ValueError(f"`{name}` must be a number, a sequence of numbers or one of {listed}: got {radius!r}.")
        return [float(getattr(theory, name))] if radius == "theory" else None
    if np.ndim(radius) == 0:
        return [_as_radius(radius, name)]
    radii = check_float_array(radius, name).astype(np.float64)
    if radii.ndim != 1 or len(radii) == 0:
        raise ValueError(f"`{name}` must be a non-empty sequence of numbers: got shape {radii.shape}.")
    return [_as_radius(float(value), f"{name}[{i}]") for i, value in enumerate(radii)]


def _as_radius(radius: Any, name: str) -> float:
    if isinstance(radius, (float, np.floating)) and radius == math.inf:
        return math.inf
    return check_number(radius, name, minimum=0.0)
