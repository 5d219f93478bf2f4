"""`to_torch`: a module with the outputs of its model, whatever the padding."""

import numpy as np
import pytest
from exported import CONFIGURATIONS, QUICK, Configuration, layer, outputs_of, padded

import keyhole as kh
from keyhole.registry import ACTIVATIONS, POOLINGS

torch = pytest.importorskip("torch")

SLOW = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CONFIGURATIONS
]


@pytest.fixture
def sets():
    return Configuration(query=3).samples(40, 6, seed=0)


@pytest.fixture
def model(sets):
    return kh.AttentionRegressor(**layer(random_state=0)).fit(sets, sets.query[:, 0])


def tensors(samples):
    return {name: torch.tensor(values) for name, values in padded(samples).items()}


@pytest.mark.filterwarnings("ignore::keyhole.estimators.attention.ClippedWarning")
@pytest.mark.parametrize("name", SLOW)
def test_a_module_has_the_outputs_of_its_model(name):
    configuration = CONFIGURATIONS[name]
    model = configuration.fitted()
    module = model.to_torch()
    batches = configuration.new_samples()
    spread = outputs_of(model, batches[0]).std()
    for samples in batches:
        with torch.no_grad():
            outputs = module(**tensors(samples)).numpy()
            np.testing.assert_allclose(
                outputs, outputs_of(model, samples), rtol=0, atol=1e-9 * spread
            )
            if hasattr(model, "predict_proba"):
                probabilities = module.predict_proba(**tensors(samples)).numpy()
                np.testing.assert_allclose(
                    probabilities, model.predict_proba(samples), rtol=0, atol=1e-9
                )


def test_every_activation_and_pooling_is_tried():
    tried = [configuration.parameters for configuration in CONFIGURATIONS.values()]
    assert {parameters.get("activation") for parameters in tried} >= set(ACTIVATIONS)
    assert {parameters.get("pooling") for parameters in tried} >= set(POOLINGS)


def test_rows_beyond_the_training_range_are_clipped_in_the_module_too():
    configuration = Configuration()
    model = configuration.fitted()
    samples = configuration.samples(10, 6, seed=5)
    far = kh.SetBatch([100 * keys.tokens for keys in samples])
    with pytest.warns(kh.estimators.attention.ClippedWarning):
        expected = model.predict(far)
    outputs = model.to_torch()(**tensors(far)).detach().numpy()
    np.testing.assert_allclose(outputs, expected, rtol=1e-9, atol=1e-9)


def test_heads_and_values_can_be_trained(model, sets):
    module = model.to_torch()
    module(**tensors(sets)).square().sum().backward()
    for parameter in (module.embeddings[0].heads, module.members[0].coef):
        assert bool(parameter.grad.abs().max() > 0)


@pytest.mark.parametrize("settings", [{}, {"n_heads": kh.Landmarks(20)}, {"mlp": "only"}])
def test_the_kernel_of_heads_around_a_mean_is_refused_with_a_number_of_heads(sets, settings):
    heads = kh.GaussianHeads(mean=1.0)
    parameters = layer(n_heads=np.inf, heads=heads, random_state=0) | settings
    model = kh.AttentionRegressor(**parameters).fit(sets, sets.query[:, 0])
    with pytest.raises(ValueError, match=r"the layer '.*' of this model .* n_heads=\d+"):
        model.to_torch()


def test_what_is_no_attention_model_is_refused(sets):
    from keyhole.export import to_torch

    features = kh.AttentionFeatures(4, random_state=0).fit(sets)
    with pytest.raises(TypeError, match="takes a fitted AttentionRegressor or"):
        to_torch(features)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"keys": torch.zeros(2, 3)}, r"`keys` must have shape \(n, N, 3\)"),
        ({"mask": torch.ones(40, 5)}, "`mask` must be bool"),
        ({"query": None}, "`query` was there when the estimator was fitted"),
        ({"query": torch.zeros(40, 2)}, "`query` must have 3 columns"),
        ({"extras": torch.zeros(40, 2)}, "`extras` was not there"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(model, sets, change, words):
    with pytest.raises(ValueError, match=words):
        model.to_torch()(**tensors(sets) | change)


def test_a_sample_without_keys_is_refused(model, sets):
    inputs = tensors(sets)
    inputs["mask"][4] = False
    with pytest.raises(ValueError, match="`mask` has none for sample 4"):
        model.to_torch()(**inputs)
