"""Every operation of a backend gives the numbers of the host's, and no module but
`attention.backends` asks what the device is.
"""

import ast
from pathlib import Path

import numpy as np
import pytest
from devices import DEVICE, as_array

import keyhole as kh
from keyhole.attention.activations import ACTIVATIONS
from keyhole.attention.backends import Backend, FeatureProducts, backend_for
from keyhole.attention.heads import HeadDraw
from keyhole.logistic import LogisticProblem
from keyhole.logistic.problem import SingularStepError
from keyhole.ridge.problem import RidgeProblem

SOURCE = Path(kh.__file__).parent
BUDGET = 2**24
HEADS = kh.GaussianHeads(mean=1.0)


@pytest.fixture
def sets(rng):
    keys = [rng.standard_normal((n_keys, 3)) for n_keys in rng.integers(1, 6, 20)]
    return kh.SetBatch(keys, query=rng.standard_normal((20, 3)))


POOLED = {
    "sets": lambda sets: sets,
    "sums": lambda sets: sets.pooled("sum"),
    "every key as a query": lambda sets: sets.pooled("mean", each=True),
    "sums over queries too": lambda sets: sets.pooled("sum", each=True),
    "groups": lambda sets: kh.SetGroups(sets, np.repeat([1, 2, 3], [6, 4, 2])),
    "sums of groups": lambda sets: POOLED["groups"](sets).pooled("sum"),
}
"""Samples of every kind, made of 20 sets."""


@pytest.fixture(params=POOLED)
def samples(sets, request):
    return POOLED[request.param](sets)


@pytest.fixture
def extras(rng):
    return rng.standard_normal((20, 2))


@pytest.fixture
def host():
    return backend_for(None)


@pytest.fixture(params=[DEVICE])
def device(request):
    """A device other than the host's NumPy; add that of a new backend here."""
    pytest.importorskip("torch", reason="devices are those of torch")
    return request.param


def draw(n_heads=9):
    return HeadDraw(HEADS, n_heads, 3, 0, 3)


def both(method, host, device, *arguments, **options):
    """The result of an operation on the host and on a device."""
    here = getattr(host, method)(*arguments, **options)
    there = getattr(backend_for(device), method)(*arguments, **options)
    return here, there


def test_a_backend_offers_every_operation(host, device):
    for backend in (host, backend_for(device)):
        assert isinstance(backend, Backend)
    assert host.device is None
    assert backend_for(device).device == device


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_features_agree(samples, host, device, activation, monkeypatch):
    # little memory, so that heads, sets and queries come in several blocks
    monkeypatch.setattr("keyhole.attention.torch_backend.MEMORY_BUDGET", 1000)
    there = backend_for(device).features(samples.to(device), draw(), activation, None)
    here = host.features(samples, draw(), activation, None)
    np.testing.assert_allclose(as_array(there), here, rtol=1e-10, atol=1e-12)


def test_kernels_agree(sets, host, device):
    mean, scale = HEADS.moments(3)
    moved = sets.to(device)
    here = host.kernel(sets, sets[:7], mean, scale, "relu", BUDGET)
    there = backend_for(device).kernel(moved, moved[:7], mean, scale, "relu", BUDGET)
    np.testing.assert_allclose(as_array(there), here, rtol=1e-10)


def test_kernels_of_pooled_samples_agree(samples, device):
    moved = samples.to(device)
    here = kh.attention_kernel(samples, samples[:7], HEADS)
    there = kh.attention_kernel(moved, moved[:7], HEADS)
    np.testing.assert_allclose(as_array(there), here, rtol=1e-10)
    np.testing.assert_allclose(
        as_array(kh.attention_kernel(moved, None, HEADS)),
        kh.attention_kernel(samples, None, HEADS),
        rtol=1e-10,
    )


def test_outputs_agree(samples, rng, host, device):
    values = rng.standard_normal((9, 4, 2))
    options = {"dtype": "float64", "memory_budget": BUDGET}
    here, there = both("outputs", host, device, samples, draw(), values, "relu", **options)
    np.testing.assert_allclose(there, here, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("n_outputs", [1, 3])
def test_contributions_agree(samples, rng, host, device, activation, n_outputs):
    values = rng.standard_normal((9, 4, n_outputs))
    here, there = both(
        "contributions",
        host,
        device,
        samples,
        draw(),
        values,
        activation,
        dtype="float64",
        memory_budget=5000,
    )
    np.testing.assert_allclose(there, here, rtol=1e-9, atol=1e-12)


def test_outputs_of_kernels_agree(samples, rng, host, device):
    dual = rng.standard_normal((7, 2))
    here, there = both(
        "kernel_outputs",
        host,
        device,
        samples,
        samples[:7],
        dual,
        HEADS,
        "relu",
        dtype="float64",
        memory_budget=BUDGET,
    )
    np.testing.assert_allclose(there, here, rtol=1e-10, atol=1e-12)


def test_products_with_features_agree(samples, rng, host, device):
    n = len(samples)
    extras = rng.standard_normal((n, 2))
    options = {
        "dtype": "float64",
        "memory_budget": BUDGET,
        "centred_rows": None,
    }
    here, there = both("products", host, device, samples, draw(), "relu", **options)
    assert isinstance(here, FeatureProducts)
    assert isinstance(there, FeatureProducts)
    gram = here.gram(extras, both_triangles=True)
    np.testing.assert_allclose(as_array(there.gram(extras, both_triangles=True)), gram, rtol=1e-10)
    dual = rng.standard_normal((n, 2))
    np.testing.assert_allclose(there.values(dual), here.values(dual), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("groups", [None, np.arange(20) // 2])
def test_ridge_on_a_kernel_agrees(sets, extras, rng, groups, host, device):
    problem = RidgeProblem.of(rng.standard_normal((20, 1)), [0.1, 1.0], groups=groups)
    fits = []
    for backend in (host, backend_for(device)):
        gram = backend.kernel_gram(
            sets, extras, HEADS, "relu", dtype="float64", memory_budget=BUDGET
        )
        fit = backend.ridge(
            gram,
            problem,
            rounding=backend.kernel_rounding("float64"),
            overwrite_gram=True,
            keep_factor=False,
            memory_budget=BUDGET,
        )
        fits.append(fit)
    here, there = fits
    np.testing.assert_allclose(there.coef, here.coef, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(there.left_out, here.left_out, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("fit_intercept", [True, False], ids=["intercept", "no intercept"])
@pytest.mark.parametrize("weighted", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize("groups", [None, np.arange(20) // 2], ids=["no groups", "groups"])
def test_logistic_regression_on_a_kernel_agrees(
    sets, extras, rng, groups, weighted, fit_intercept, host, device, monkeypatch
):
    # small tiles, so that a device factorises in several
    monkeypatch.setattr("keyhole.ridge.device.SIDE", 7)
    weights = None
    if weighted:
        weights = rng.uniform(0.2, 3.0, size=20)
    if weighted and groups is not None:
        weights[3] = 0.0  # predicted with the rest of its group
    problem = LogisticProblem.of(
        rng.standard_normal((20, 2)),
        [0.1, 1.0],
        fit_intercept=fit_intercept,
        weights=weights,
        groups=groups,
    )
    fits = []
    for backend in (host, backend_for(device)):
        gram = backend.kernel_gram(
            sets, extras, HEADS, "relu", dtype="float64", memory_budget=BUDGET
        )
        fits.append(backend.logistic(gram, problem, rounding=backend.kernel_rounding("float64")))
    here, there = fits
    assert there.alpha == here.alpha
    assert there.floor == pytest.approx(here.floor)
    np.testing.assert_allclose(there.coef, here.coef, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(there.intercept, here.intercept, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(there.left_out, here.left_out, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(there.log_losses, here.log_losses, rtol=1e-8)


def test_newton_steps_without_a_cholesky_factor_are_refused_alike(sets, extras, rng, host, device):
    """Minus a kernel stands for a kernel that rounding has made indefinite."""
    problem = LogisticProblem.of(rng.standard_normal((20, 1)), [0.01])
    for backend in (host, backend_for(device)):
        gram = backend.kernel_gram(
            sets, extras, HEADS, "relu", dtype="float64", memory_budget=BUDGET
        )
        with pytest.raises(SingularStepError, match="too small beside the kernel"):
            backend.logistic(-gram, problem, rounding=1e-16)


# --- the one place --------------------------------------------------------------------------------

ONE_PLACE = {"attention/backends.py"}
OTHER_QUESTIONS = {
    "data/sets.py": "a batch holds arrays or tensors, and says so",
    "costs.py": "the time of a fit is predicted for the host only",
    "training.py": "large arrays of the host are shared with a fit, tensors are not",
}


def device_branches(text):
    """Lines that compare something called ``device`` with None."""
    lines = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            subject = node.left
            name = getattr(subject, "attr", getattr(subject, "id", ""))
            if "device" in name:
                lines.append(node.lineno)
    return lines


def test_a_branch_on_the_device_is_seen():
    assert device_branches("if spec.device is not None:\n    pass") == [1]
    assert device_branches("\nx = 1 if on_device is None else 2") == [2]


def test_the_device_is_asked_about_in_one_place():
    branches = {
        str(path.relative_to(SOURCE)): lines
        for path in sorted(SOURCE.rglob("*.py"))
        if (lines := device_branches(path.read_text()))
    }
    assert set(branches) - ONE_PLACE - set(OTHER_QUESTIONS) == set(), branches
