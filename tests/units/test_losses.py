"""Values at points worked out by hand, and what the losses refuse."""

import math

import numpy as np
import pytest

from keyhole.solve.ball import LOSSES


def column(*numbers):
    return np.array(numbers, dtype=float)[:, None]


@pytest.mark.parametrize(
    ("name", "y", "z", "value", "gradient"),
    [
        ("absolute", [1, 1, 1], [3, 1, 0.5], [2, 0, 0.5], [1, 0, -1]),
        ("huber", [0, 0, 0], [0.5, 1, -3], [0.125, 0.5, 2.5], [0.5, 1, -1]),
        ("squared", [1, 1], [3, 0], [2, 0.5], [2, -1]),
        ("hinge", [1, 1, -1, -1], [0, 2, 0, -3], [1, 0, 1, 0], [-1, 0, 1, 0]),
        ("logistic", [1, -1], [0, 0], [math.log(2)] * 2, [-0.5, 0.5]),
    ],
)
def test_values_by_hand(name, y, z, value, gradient):
    loss = LOSSES[name]
    assert loss.value(column(*y), column(*z)) == pytest.approx(value)
    assert loss.gradient(column(*y), column(*z))[:, 0] == pytest.approx(gradient)


def test_multinomial_with_two_classes_is_logistic(rng):
    labels = rng.choice([-1.0, 1.0], 30)
    margin = rng.standard_normal(30)
    one_hot = np.column_stack([labels > 0, labels < 0]).astype(float)
    z = np.column_stack([margin, np.zeros(30)])
    assert LOSSES["multinomial"].value(one_hot, z) == pytest.approx(
        LOSSES["logistic"].value(labels[:, None], margin[:, None])
    )


@pytest.mark.parametrize("name", ["logistic", "multinomial"])
def test_no_overflow_far_out(name):
    if name == "multinomial":
        y = np.array([[1.0, 0.0]])
        z = np.array([[-1e4, 1e4]])
    else:
        y = np.array([[1.0]])
        z = np.array([[-2e4]])
    assert LOSSES[name].value(y, z) == pytest.approx([2e4])
    assert np.isfinite(LOSSES[name].gradient(y, z)).all()
    assert LOSSES[name].value(y, -z) == pytest.approx([0.0])


def test_outputs_are_summed(rng):
    y = rng.standard_normal((5, 3))
    z = rng.standard_normal((5, 3))
    for name in ("absolute", "huber", "squared"):
        loss = LOSSES[name]
        one_by_one = sum(loss.value(y[:, k : k + 1], z[:, k : k + 1]) for k in range(3))
        assert loss.value(y, z) == pytest.approx(one_by_one)


@pytest.mark.parametrize(
    ("name", "y", "edge", "outward"),
    [
        ("absolute", [3.0], [1.0], [1.0]),
        ("absolute", [3.0], [-1.0], [-1.0]),
        ("huber", [3.0], [1.0], [1.0]),
        ("huber", [3.0], [-1.0], [-1.0]),
        ("hinge", [1.0], [0.0], [1.0]),
        ("hinge", [1.0], [-1.0], [-1.0]),
        ("logistic", [1.0], [0.0], [1.0]),
        ("logistic", [1.0], [-1.0], [-1.0]),
        ("logistic", [-1.0], [1.0], [1.0]),
        ("multinomial", [1.0, 0.0], [0.0, 0.0], [1.0, -1.0]),
        ("multinomial", [1.0, 0.0], [-1.0, 1.0], [-1.0, 1.0]),
        ("multinomial", [0.5, 0.5], [0.0, 0.0], [1.0, 1.0]),
        ("multinomial", [0.5, 0.5], [0.0, 0.0], [-1.0, -1.0]),
    ],
)
def test_a_conjugate_is_infinite_outside_its_domain_but_not_for_rounding(name, y, edge, outward):
    """At the edge it is continuous from within; 1e-12 beyond is rounding, more is not."""
    y = np.array([y])
    edge = np.array([edge])
    outward = np.array([outward])

    def conjugate_at(step):
        return float(LOSSES[name].conjugate(y, edge + step * outward)[0])

    just_inside = conjugate_at(-1e-9)
    if name == "multinomial" and y.max() == 0.5:
        # these directions leave the simplex both ways: no point is inside, and −H(½, ½) the value
        just_inside = -math.log(2)
    assert conjugate_at(0.0) == pytest.approx(just_inside, abs=1e-6)
    assert conjugate_at(5e-13) == pytest.approx(conjugate_at(0.0), abs=1e-9)
    assert conjugate_at(5e-12) == math.inf


def test_the_conjugate_of_one_output_outside_is_that_of_all():
    y = np.zeros((2, 2))
    dual = np.array([[0.5, 2.0], [0.5, 0.5]])
    for name, inside in (("absolute", 0.0), ("huber", 0.25)):
        conjugate = LOSSES[name].conjugate(y, dual)
        assert conjugate[0] == math.inf
        assert conjugate[1] == pytest.approx(inside)
