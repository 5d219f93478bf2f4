"""Metadata routing, set_output, names of columns, HTML: what scikit-learn's tools expect."""

import numpy as np
import pandas as pd
import pytest
import sklearn
from paper import paper_classifier, paper_regressor
from sklearn.ensemble import StackingRegressor
from sklearn.linear_model import Ridge
from sklearn.model_selection import GroupKFold, cross_validate
from sklearn.multioutput import ClassifierChain
from sklearn.pipeline import make_pipeline

import keyhole as kh


@pytest.fixture
def ragged(seed):
    rng = np.random.default_rng([34, seed])
    return kh.SetBatch([rng.normal(size=(rng.integers(1, 5), 2)) for _ in range(30)])


@pytest.fixture
def y(ragged):
    starts = ragged.offsets[:-1]
    return np.add.reduceat(ragged.tokens[:, 0], starts) / ragged.lengths


@pytest.fixture
def frame(seed):
    values = np.random.default_rng([35, seed]).normal(size=(30, 3))
    return pd.DataFrame(values, columns=["width", "height", "depth"])


def test_weights_and_groups_are_routed(ragged, y):
    weights = np.linspace(0.5, 2.0, 30)
    groups = np.arange(30) % 5
    model = paper_regressor(5, random_state=0)
    with sklearn.config_context(enable_metadata_routing=True):
        routed = model.set_fit_request(sample_weight=True, groups=True)
        routed.set_score_request(sample_weight=True)
        result = cross_validate(
            routed,
            ragged,
            y,
            cv=GroupKFold(3),
            params={"sample_weight": weights, "groups": groups},
            return_estimator=True,
            return_indices=True,
        )
    for fitted, rows in zip(result["estimator"], result["indices"]["train"], strict=True):
        by_hand = paper_regressor(5, random_state=0).fit(
            ragged[rows], y[rows], weights[rows], groups=groups[rows]
        )
        np.testing.assert_allclose(fitted.values_, by_hand.values_)


def test_pipelines_route_to_what_follows_the_features(ragged, y):
    weights = np.linspace(0.5, 2.0, 30)
    with sklearn.config_context(enable_metadata_routing=True):
        ridge = Ridge().set_fit_request(sample_weight=True)
        pipeline = make_pipeline(kh.AttentionFeatures(5, random_state=0), ridge)
        pipeline.fit(ragged, y, sample_weight=weights)
    features = kh.AttentionFeatures(5, random_state=0).fit_transform(ragged)
    expected = Ridge().fit(features, y, weights)
    np.testing.assert_allclose(pipeline[-1].coef_, expected.coef_)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_features_come_as_a_data_frame(ragged, library):
    pytest.importorskip(library)
    transformer = kh.AttentionFeatures(2, random_state=0).set_output(transform=library)
    table = transformer.fit_transform(ragged)
    assert type(table).__module__.startswith(library)
    assert list(table.columns) == [f"attentionfeatures{i}" for i in range(6)]
    assert list(transformer.get_feature_names_out()) == list(table.columns)


def test_names_of_columns_are_kept_and_compared(frame):
    for model in (
        paper_regressor(3, alpha=0.1).fit(frame, frame["width"]),
        paper_classifier(3, alpha=0.1).fit(frame, frame["width"] > 0),
        kh.AttentionFeatures(3).fit(frame),
    ):
        assert model.feature_names_in_.tolist() == ["width", "height", "depth"]
        use = model.transform if hasattr(model, "transform") else model.predict
        with pytest.raises(ValueError, match="feature names"):
            use(frame[["height", "width", "depth"]])


@pytest.mark.parametrize(
    "model",
    [
        kh.AttentionRegressor(pooling="statistics"),
        kh.AttentionClassifier(pooling="statistics"),
        kh.AttentionFeatures(7),
    ],
)
def test_a_notebook_shows_the_parameters(model, frame):
    assert "n_heads" in model._repr_html_()
    target = frame["width"]
    if isinstance(model, kh.AttentionClassifier):
        target = target > 0
    shown = model.fit(frame, target)._repr_html_()
    assert type(model).__name__ in shown
    assert "fitted" in shown.lower()


def test_what_puts_predictions_beside_columns_needs_a_table(ragged, y, frame):
    """Documented in docs/howto/tune.md: sets have no columns, tables have."""
    base = [("attention", paper_regressor(3, alpha=0.1, random_state=0))]
    stacked = StackingRegressor(base, Ridge(), passthrough=True, cv=3)
    with pytest.raises((TypeError, ValueError)):
        stacked.fit(ragged, y)
    StackingRegressor(base, Ridge(), cv=3).fit(ragged, y).predict(ragged)
    stacked.fit(frame.to_numpy(), frame["width"].to_numpy())

    labels = np.stack([y > np.median(y), ragged.lengths > 2], axis=1).astype(int)
    chain = ClassifierChain(paper_classifier(3, alpha=0.1, random_state=0))
    with pytest.raises((TypeError, ValueError)):
        chain.fit(ragged, labels)
    table = frame.to_numpy()
    chain.fit(table, (table[:, :2] > 0).astype(int))
