"""`to_torch`: the outputs of the estimator, from parameters that can be trained."""

import copy

import numpy as np
import pytest
from exports import (
    FINITE,
    assert_close,
    finite_model,
    padded,
    scores_of,
    selecting_model,
)
from paper import paper_classifier, paper_regressor
from sklearn.exceptions import NotFittedError

import keyhole as kh
from keyhole.export.constants import LayerConstants, predict_with

torch = pytest.importorskip("torch")


def module_inputs(module, sets):
    """Tensors of what a module takes."""
    dtype = module.v.dtype
    keys, mask = padded(sets)
    query = extras = None
    if module.query_dim:
        query = torch.tensor(np.array(sets.query), dtype=dtype)
    if module.n_extras:
        extras = torch.tensor(np.array(sets.extras), dtype=dtype)
    return torch.tensor(keys, dtype=dtype), torch.tensor(mask), query, extras


@pytest.mark.parametrize("name", FINITE)
def test_a_module_has_the_outputs_of_its_model(name):
    model, sets = finite_model(name)
    module = model.to_torch()
    outputs = module(*module_inputs(module, sets)).detach().numpy()
    # hops round what they find to float32: a last bit there may differ
    tolerance = 1e-12
    if model.dtype == "float32":
        tolerance = 1e-5
    elif len(module.U):
        tolerance = 1e-6
    assert_close(outputs, scores_of(model, sets), tolerance)
    if hasattr(model, "predict_proba"):
        probabilities = module.predict_proba(*module_inputs(module, sets)).detach().numpy()
        assert_close(probabilities, model.predict_proba(sets), 10 * tolerance)


@pytest.mark.parametrize("name", FINITE)
def test_the_plain_steps_give_the_outputs_of_the_model(name):
    model, sets = finite_model(name)
    constants = LayerConstants.of(model, "a test")
    outputs = []
    for i in range(len(sets)):
        query = sets.query[i] if constants.query_dim else None
        extras = sets.extras[i] if constants.n_extras else None
        outputs.append(predict_with(constants, sets[i].tokens, query, extras))
    tolerance = 1e-5 if model.dtype == "float32" else 1e-6 if constants.hops else 1e-12
    expected = scores_of(model, sets)
    assert_close(np.reshape(outputs, expected.shape), expected, tolerance)


@pytest.fixture
def ragged(seed):
    rng = np.random.default_rng([31, seed])
    keys = [rng.normal(size=(rng.integers(1, 6), 3)) for _ in range(40)]
    return kh.SetBatch(keys, rng.normal(size=(40, 3)), rng.normal(size=(40, 2)))


@pytest.mark.parametrize("pooling", ["mean", "mean+size", "mean+statistics", "sum"])
@pytest.mark.parametrize("query", ["given", "mean", "each"])
@pytest.mark.parametrize(
    ("activation", "scaling"),
    [("relu", "standard"), ("softmax", "sphere"), ("step", "none"), ("exp", "sphere")],
)
def test_every_setting_comes_along(ragged, activation, scaling, query, pooling):
    y = ragged.query[:, 0] + ragged.extras[:, 0]
    model = kh.AttentionRegressor(
        5,
        kh.GaussianHeads(),
        0.1,
        activation,
        random_state=0,
        scaling=scaling,
        query=query,
        pooling=pooling,
        extras_scale=1.0,
    ).fit(ragged, y)
    module = model.to_torch()
    outputs = module(*module_inputs(module, ragged)).detach().numpy()
    assert_close(outputs, model.predict(ragged), 1e-11)


@pytest.mark.parametrize("n_keys", [1, 3, 20])
@pytest.mark.parametrize("query", ["given", "mean", "each"])
def test_selected_keys_come_along(ragged, query, n_keys):
    """In the module and in the plain steps; of two keys that are equally relevant, the first."""
    model = selecting_model(ragged, n_keys, query=query, pooling="mean+statistics")
    expected = model.predict(ragged)
    module = model.to_torch()
    outputs = module(*module_inputs(module, ragged)).detach().numpy()
    assert_close(outputs, expected, 1e-11)
    constants = LayerConstants.of(model, "a test")
    for i in range(len(ragged)):
        plain = predict_with(constants, ragged[i].tokens, ragged.query[i], ragged.extras[i])
        assert_close(plain, expected[i], 1e-9)


def test_equally_relevant_keys_are_kept_in_their_order(seed):
    """Keys of one coordinate are ±1 to the scoring layer: most are equally relevant."""
    rng = np.random.default_rng([36, seed])
    sets = kh.SetBatch([rng.normal(size=(rng.integers(1, 60), 1)) for _ in range(40)])
    model = selecting_model(sets, 4)
    module = model.to_torch()
    outputs = module(*module_inputs(module, sets)).detach().numpy()
    assert_close(outputs, model.predict(sets), 1e-11)


def test_a_query_that_only_the_selection_uses_must_be_passed(ragged):
    model = selecting_model(ragged, 2, query="mean")
    module = model.to_torch()
    keys, mask, _, extras = module_inputs(module, ragged)
    with pytest.raises(ValueError, match=r"`query` must have shape \(40, 3\)"):
        module(keys, mask, None, extras)


def test_ridge_has_left_the_gradient_of_the_values_at_zero(ragged):
    """∂/∂v (Σ_i (y_i − f(x_i))² + α|v|²) = 0 at the closed-form solution, and no other v."""
    y = ragged.query[:, 0]
    model = paper_regressor(4, alpha=0.3, random_state=0, extras_scale=1.0).fit(ragged, y)
    module = model.to_torch()

    def gradient():
        module.zero_grad()
        residuals = module(*module_inputs(module, ragged)) - torch.tensor(np.array(y))
        (residuals.square().sum() + 0.3 * module.v.square().sum()).backward()
        return float(module.v.grad.abs().max())

    assert gradient() < 1e-8
    with torch.no_grad():
        module.v += 0.01
    assert gradient() > 1e-3
    assert float(module.W.grad.abs().max()) > 1e-6, "heads can be trained"


def test_parameters_are_named_as_in_the_docs():
    hops = finite_model("classifier with hops")[0].to_torch()
    names = {name for name, _ in hops.named_parameters()}
    assert {"W", "v", "b", "U.0", "temperature"} <= names
    extras = finite_model("extras")[0].to_torch()
    assert "extras_values" in dict(extras.named_parameters())


def test_float32_modules_and_state_dicts(ragged):
    model = paper_regressor(4, alpha=0.3, random_state=0, dtype="float32", extras_scale=1.0)
    module = model.fit(ragged, ragged.query[:, 0]).to_torch()
    assert module.v.dtype == torch.float32
    other = clone_with_zeros(module)
    other.load_state_dict(module.state_dict())
    inputs = module_inputs(module, ragged)
    assert torch.equal(other(*inputs), module(*inputs))


def clone_with_zeros(module):
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    return other


def test_what_does_not_fit_is_refused_in_words(ragged):
    labels = ragged.query[:, 0] > 0
    model = paper_classifier(4, alpha=0.3, random_state=0, extras_scale=1.0).fit(ragged, labels)
    module = model.to_torch()
    keys, mask, query, extras = module_inputs(module, ragged)
    cases = [
        ((keys[..., :2], mask, query, extras), r"`keys` must have shape \(n, N, 3\)"),
        ((keys, mask[:, :1], query, extras), r"`mask` must be bool of shape"),
        ((keys, torch.zeros_like(mask), query, extras), r"`mask` of set 0 has none"),
        ((keys, mask, None, extras), r"`query` must have shape \(40, 3\)"),
        ((keys, mask, query, None), r"`extras` must have shape \(40, 2\)"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            module(*arguments)
    plain = paper_regressor(4, alpha=0.3).fit(ragged.tokens, ragged.tokens[:, 0]).to_torch()
    with pytest.raises(ValueError, match="fitted without query"):
        plain(keys, mask, query)
    with pytest.raises(AttributeError, match="scores only"):
        plain.predict_proba(keys, mask)
    with pytest.raises(NotFittedError):
        kh.AttentionRegressor().to_torch()


def test_infinitely_many_heads_say_how_many_would_do(seed):
    sets = kh.targets.sphere_sets(120, n_keys=4, dim=3, seed=seed)
    noise = np.random.default_rng(seed).standard_normal(120)
    y = kh.targets.TokenPower(2, dim=3)(sets) + 0.05 * noise
    exact = paper_regressor(float("inf"), alpha=0.05).fit(sets, y)
    with pytest.raises(ValueError, match=r"exact kernel of its 120 .*Fit with n_heads=\d+") as info:
        exact.to_torch()
    n_heads = int(str(info.value).split("--n-heads ")[1].split(")")[0])
    finite = paper_regressor(n_heads, alpha=0.05, random_state=1).fit(sets, y)
    new = kh.targets.sphere_sets(200, n_keys=4, dim=3, seed=seed + 1000)
    difference = np.sqrt(np.mean((finite.predict(new) - exact.predict(new)) ** 2))
    assert difference < np.sqrt(exact.loo_error_)


@pytest.mark.parametrize("pooling", ["mean", "sum", "mean+size", "mean+statistics"])
@pytest.mark.parametrize("query", ["given", "mean", "each"])
def test_whatever_the_exact_kernel_has_beside_it(ragged, query, pooling):
    """Training sets are stored without their sample-level features, which heads do not touch."""
    settings = {"scaling": "standard", "query": query, "pooling": pooling}
    exact = kh.AttentionRegressor(float("inf"), kh.GaussianHeads(), 0.1, "relu", **settings)
    exact.fit(ragged, ragged.query[:, 0])
    with pytest.raises(ValueError, match=r"exact kernel of its 40 .*Fit with n_heads=\d+"):
        exact.to_torch()


@pytest.mark.parametrize("n_heads", [4, float("inf")])
def test_samples_of_several_sets_are_refused_with_a_remedy(seed, tmp_path, n_heads):
    """Infinitely many heads too: finitely many of them would not help."""
    rng = np.random.default_rng(seed)
    groups = kh.SetGroups(kh.SetBatch(rng.normal(size=(40, 3, 2))), np.full(20, 2))
    model = paper_regressor(n_heads, random_state=0).fit(groups, rng.normal(size=20))
    kh.save(model, tmp_path / "model.keyhole")
    for exported in (model, kh.load(tmp_path / "model.keyhole")):
        with pytest.raises(ValueError, match=r"one set each.*SetGroups.*Predict with keyhole"):
            exported.to_torch()
    # fitted again to samples of one set each, it is exported
    model.set_params(n_heads=4)
    assert model.fit(groups.sets, rng.normal(size=40)).to_torch() is not None
