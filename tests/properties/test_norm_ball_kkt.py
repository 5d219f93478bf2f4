"""A solution over the norm ball satisfies the Karush–Kuhn–Tucker conditions, as far as it reports.

With a the dual point, g = Φᵀ(w a) and z = Φv + b, the duality gap is a sum of two terms ≥ 0:

    gap = Σ_i w_i [ℓ(z_i) + ℓ*(a_i) − a_i z_i]  +  [max over the ball of <g, u> + <g, v>]

so the reported gap is the unit in which everything else is tested; no reference solution is used.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from balls import fit_norm_ball

from keyhole.solve.ball import LOSSES, NormBall, group_norms

SIZE = 9
TOL = {"absolute": 1e-4, "hinge": 1e-5}


def problem(name, rng, n=300, n_groups=200):
    design = rng.standard_normal((n, n_groups * SIZE)) / 3.0
    truth = np.zeros(n_groups * SIZE)
    truth[: 8 * SIZE] = rng.standard_normal(8 * SIZE)
    signal = design @ truth
    signal = signal / signal.std() + 0.5 * rng.standard_normal(n) + 1.0
    if name in ("logistic", "hinge"):
        return design, np.where(signal > 1.0, 1.0, -1.0)
    if name == "multinomial":
        return design, np.eye(3)[np.digitize(signal, [0.5, 1.5])]
    return design, signal


def terms(loss, design, targets, weights, fit, radii):
    """The two terms of the gap, from the primal and the dual point alone."""
    y = targets.reshape(len(targets), -1)
    values = fit.values.reshape(design.shape[1], -1)
    dual = fit.dual.reshape(y.shape)
    z = design @ values + fit.intercept
    gradient = design.T @ (weights[:, None] * dual)
    scores = group_norms(gradient.reshape(len(fit.values), -1))
    of_loss = weights @ (loss.value(y, z) + loss.conjugate(y, dual) - np.sum(dual * z, axis=1))
    support = NormBall(*radii).support(scores)
    of_ball = support + float(np.vdot(gradient, values))
    return float(of_loss), float(of_ball), gradient


@pytest.mark.parametrize("radii", [(4.0, 1.0), (3.0, math.inf), (math.inf, 0.8)])
@pytest.mark.parametrize("name", LOSSES)
def test_conditions_hold_to_the_reported_gap(name, radii, rng):
    loss = LOSSES[name]
    design, targets = problem(name, rng)
    weights = rng.dirichlet(np.full(len(targets), 5.0))
    fit = fit_norm_ball(
        design,
        targets,
        group_size=SIZE,
        group_radius=radii[0],
        ball_radius=radii[1],
        loss=name,
        sample_weight=weights,
        tol=TOL.get(name, 1e-7),
    )
    of_loss, of_ball, gradient = terms(loss, design, targets, weights, fit, radii)
    rounding = 1e-12 * max(1.0, fit.objective)

    # dual feasibility: the free intercept balances the dual point
    assert np.abs(weights @ fit.dual).max() <= 1e-14
    # complementary slackness, twice: both terms are nonnegative and add up to the gap
    assert of_loss >= -rounding
    assert of_ball >= -rounding
    assert of_loss + of_ball == pytest.approx(fit.duality_gap, abs=rounding)
    # stationarity: v = P(v − g). The residual r = v − u, u = P(v − g), satisfies
    # |r|² ≤ <g, v − u> ≤ the second term
    values = fit.values.reshape(len(fit.values), -1)
    target = values - gradient.reshape(values.shape)
    residual = values - NormBall(*radii).project(target)
    assert np.vdot(residual, residual) <= of_ball + rounding
    # a smooth loss: the dual point is its gradient, within |a − ∇ℓ|² ≤ 2 · smoothness · first term
    if math.isfinite(loss.smoothness):
        y = targets.reshape(len(targets), -1)
        predictions = design @ fit.values.reshape(design.shape[1], -1) + fit.intercept
        slope = loss.gradient(y, predictions)
        off = weights @ np.sum((fit.dual.reshape(y.shape) - slope) ** 2, axis=1)
        assert off <= 2 * loss.smoothness * of_loss + rounding

    # broken variants: a point that is not a solution, and a gap that was not earned
    shifted = values + 0.1 * values.std() * rng.standard_normal(values.shape)
    worse = NormBall(*radii).project(shifted)
    assert float(np.vdot(gradient, worse - values)) > 10 * rounding
    shrunk = replace(fit, values=0.9 * fit.values)
    of_loss, of_ball, _ = terms(loss, design, targets, weights, shrunk, radii)
    assert of_loss + of_ball > 10 * (fit.duality_gap + rounding)


def test_multipliers_of_both_constraints(rng):
    """−g_m = λ v_m/|v_m| + μ v_m on active groups, |g_m| ≤ λ on the others, with λ, μ ≥ 0."""
    design, targets = problem("huber", rng)
    fit = fit_norm_ball(
        design,
        targets,
        group_size=SIZE,
        group_radius=4.0,
        ball_radius=1.0,
        tol=1e-11,
    )
    gradient = (design.T @ (fit.dual / len(targets))).reshape(fit.values.shape)
    lengths = group_norms(fit.values)
    scores = group_norms(gradient)
    active = fit.active
    # |g_m| = λ + μ |v_m| on active groups: both multipliers by least squares
    unknowns = np.column_stack([lengths[active], np.ones(active.sum())])
    mu, lam = np.linalg.lstsq(unknowns, scores[active], rcond=None)[0]
    assert lam > 0
    assert mu > 0
    assert 0 < active.sum() < len(active)
    assert lengths.sum() == pytest.approx(4.0, rel=1e-12)
    assert np.linalg.norm(lengths) == pytest.approx(1.0, rel=1e-12)
    # errors of the gradient are of the order of the root of the gap
    spectral_norm = np.linalg.norm(design, 2) / math.sqrt(len(targets))
    unit = math.sqrt(2 * fit.duality_gap) * spectral_norm
    pull = gradient + (lam / np.maximum(lengths, 1e-300) + mu)[:, None] * fit.values
    assert group_norms(pull[active]).max() <= 5 * unit
    assert scores[~active].max() <= lam + 5 * unit
    # a broken variant: with the multiplier of the ball left out, the active groups do not line up
    bare = gradient + (scores[active].mean() / np.maximum(lengths, 1e-300))[:, None] * fit.values
    assert group_norms(bare[active]).max() > 50 * unit
