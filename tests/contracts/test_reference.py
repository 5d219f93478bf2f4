"""The reference is whole: public names, attributes of fitted models, and help texts."""

import inspect
import math
import re
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from sklearn.base import BaseEstimator

import keyhole as kh

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

# modules whose `__all__` is the promise of what stays
PUBLIC = ("keyhole", "data", "attention", "estimators", "theory")
# modules of functions for users, of which some serve keyhole itself
CHOSEN = {
    "keyhole.data.tokens": "drop_missing windows with_ages with_shared with_similarity with_size "
    "with_statistics",
    "keyhole.data.datasets": "load_babi load_bags load_data load_digits_sets load_molecules "
    "load_uea babi_tokens make_bags",
    "keyhole.theory.targets": "sphere_sets QueryPower TokenPower Correlation RotatedCorrelation "
    "monomial Polynomial",
    "keyhole.theory.tasks": "SetTask AbsoluteAverage CorrelationPower SimilarityWeightedMean "
    "NearestKey SingleLocation SparseSelection SparseTokenClasses InContextRegression Lookup "
    "Counting Majority Maximum PairsOfKeys TwoHops PositionAndMeaning word_sensitivity",
    "keyhole.distributed": "fit_dask predict_dask",
    "keyhole.state": "save load read_model SavedModel",
    "keyhole.export": "to_torch to_onnx save_onnx",
    "keyhole.lab.displays": "LeftOutDisplay ReliabilityDisplay CoverageDisplay",
    "keyhole.textbook": "draw_heads extend attention_weights features kernel stack arc_cosine "
    "relu_moment ridge_inverse ridge logistic predict contributions jackknife_interval "
    "norm_ball_objective norms",
}
ALIASES = {"keyhole.tokens": "data.tokens", "keyhole.datasets": "data.datasets"} | {
    "keyhole.targets": "theory.targets"
}


def documented_names() -> set[str]:
    """Full names of what the reference lists in its tables of contents."""
    names = set()
    for page in REFERENCE.glob("*.rst"):
        module = ""
        for line in page.read_text().splitlines():
            if line.startswith(".. currentmodule::"):
                module = line.split()[-1]
            entry = re.fullmatch(r"(?:   |\.\. data:: )([A-Za-z_][\w.]*)", line)
            if entry:
                names.add(f"{module}.{entry[1]}")
    return names


def resolve(name: str):
    """The object that a full name of the reference stands for."""
    for alias, real in ALIASES.items():
        name = re.sub(rf"^{re.escape(alias)}\.", f"keyhole.{real}.", name)
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found = import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


def documented_objects() -> list:
    """What the reference documents; names that are not there fail a test of their own."""
    found = []
    for name in sorted(documented_names()):
        try:
            found.append(resolve(name))
        except (AttributeError, ImportError):
            continue
    return found


def public_names() -> list[str]:
    names = []
    for module in PUBLIC:
        path = module if module == "keyhole" else f"keyhole.{module}"
        found = import_module(path)
        names += [f"{path}.{name}" for name in found.__all__ if name != "__version__"]
    for module, chosen in CHOSEN.items():
        names += [f"{module}.{name}" for name in chosen.split()]
    return names


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_is_in_the_reference(name):
    found = resolve(name)
    if not inspect.ismodule(found):
        assert any(found is other for other in documented_objects())


@pytest.mark.parametrize("name", sorted(documented_names()))
def test_every_name_of_the_reference_is_there(name):
    assert resolve(name) is not None


def test_new_functions_for_users_are_noticed():
    """A function of tokens or data sets that examples import belongs into the reference."""
    documented = documented_names()
    for alias in ("tokens", "datasets", "targets"):
        pattern = rf"kh\.{alias}\.(\w+)"
        pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.py"), ROOT / "README.md"]
        for page in pages:
            for name in re.findall(pattern, page.read_text()):
                assert f"keyhole.{alias}.{name}" in documented, f"{page.name}: kh.{alias}.{name}"


# ------------------------------------------------------------------------------------------------
# attributes


def entries(text: str, section: str) -> list[str]:
    """Names in a section of a docstring in NumPy's format."""
    lines = inspect.cleandoc(text).splitlines()
    start = next(
        (i for i, line in enumerate(lines[:-1]) if line == section and set(lines[i + 1]) == {"-"}),
        None,
    )
    if start is None:
        return []
    names = []
    for line, following in zip(lines[start + 2 :], [*lines[start + 3 :], ""], strict=True):
        if following and set(following) == {"-"}:
            break
        if line and not line.startswith(" "):
            names += [name.strip() for name in line.split(" : ")[0].split(",")]
    return names


@pytest.fixture(scope="module")
def fits():
    """Fitted estimators of every kind, by their class."""
    sets = kh.targets.sphere_sets(40, n_keys=3, dim=2, seed=0)
    y = kh.targets.TokenPower(2, dim=2)(sets)
    labels = y > np.median(y)
    settings = {"scaling": "none", "query": "given", "random_state": 0}
    plain = {**settings, "activation": "relu", "pooling": "mean", "heads": kh.GaussianHeads()}
    fitted = []
    for estimator, target in ((kh.AttentionRegressor, y), (kh.AttentionClassifier, labels)):
        fitted.append(estimator(4, **plain).fit(sets, target))
        fitted.append(estimator(math.inf, **plain).fit(sets, target))
        fitted.append(estimator(pooling="statistics", random_state=0).fit(sets, target))
    ball = {"group_radius": 1.0, "ball_radius": 1.0, "tol": 0.1, "random_state": 0}
    fitted.append(kh.NormBallRegressor(4, **ball).fit(sets, y))
    fitted.append(kh.NormBallClassifier(4, **ball).fit(sets, labels))
    fitted.append(kh.AttentionFeatures(4, random_state=0).fit(sets))
    return fitted


ESTIMATORS = [
    found
    for found in documented_objects()
    if inspect.isclass(found) and issubclass(found, BaseEstimator)
]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: estimator.__name__)
def test_every_attribute_shown_exists_on_a_fitted_model(estimator, fits):
    own = [model for model in fits if type(model) is estimator]
    shown = entries(estimator.__doc__, "Attributes")
    assert shown
    for name in shown:
        assert any(hasattr(model, name) for model in own), name


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda estimator: estimator.__name__)
def test_every_parameter_is_described_once_and_alone(estimator):
    parameters = list(inspect.signature(estimator).parameters)
    assert sorted(entries(estimator.__doc__, "Parameters")) == sorted(parameters)


def test_a_made_up_attribute_is_noticed(fits):
    text = """Summary.

    Attributes
    ----------
    alpha_ : float
        The penalty.
    never_there_ : int
        Nothing.

    Notes
    -----
    """
    names = entries(text, "Attributes")
    assert names == ["alpha_", "never_there_"]
    assert not any(hasattr(model, "never_there_") for model in fits)


# ------------------------------------------------------------------------------------------------
# help texts


def holes(text: str) -> list[str]:
    """Places where a help text has lost words: a space before a full stop, or empty brackets."""
    return re.findall(r"\w+ [.,;](?:\s|$)|\(\s*\)|\[\s*\]", text)


def test_no_help_text_has_a_hole():
    from commands import help_texts

    texts = help_texts()
    assert {"keyhole", "fit", "predict", "lens", "theory"} <= set(texts)
    for name, text in texts.items():
        assert not holes(text), name
        assert "..." not in text.replace("]...", "]"), f"{name}: a summary is cut off"


def test_defaults_of_help_texts_are_printed():
    from commands import help_texts

    text = " ".join(help_texts()["fit"].split())
    assert "Column to predict [default: target, label, class or y]." in text


def test_a_hole_is_noticed():
    assert holes("Column to predict .") == ["predict ."]
    assert holes("Folder for the report [].") == ["[]"]
    assert not holes("Heads M: a number, inf for the exact kernel, or auto.")
