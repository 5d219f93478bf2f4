"""Shapes are checked while testing; every test that draws takes its seed from here."""

import os
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from jaxtyping import install_import_hook

SOURCE = Path(__file__).parents[1] / "src" / "keyhole"
# the compiled loops take no annotations, and decorating them would hide them from numba
# compiled code is no Python function: numba and triton read its source
LEFT_OUT = ("__init__", "_tensors", "compiled", "torch_", "triton_", "dispatch", "device", "onnx_")
CHECKED = [
    ".".join(("keyhole", *path.relative_to(SOURCE).with_suffix("").parts))
    for path in sorted(SOURCE.rglob("*.py"))
    if not path.stem.startswith(LEFT_OUT)
]
try:
    import shapecheck  # noqa: F401
except ImportError:  # a machine with a GPU may have no beartype
    SHAPES_CHECKED = False
else:
    SHAPES_CHECKED = True
    install_import_hook(CHECKED, "shapecheck.checker")


def pytest_report_header() -> str | None:
    return None if SHAPES_CHECKED else "beartype is not installed: shapes are not checked"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=int(os.environ.get("KEYHOLE_TEST_SEED", "0")))


FIRST = (
    "test_sklearn.py",
    "test_report_in_browser.py",
    "test_report.py",
    "test_explore_in_browser.py",
)
"""Files that two processes begin with: loops are compiled for the first while the others need
none.
"""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Hypothesis draws from the seed of the suite too."""
    items.sort(
        key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST)
    )
    for item in items:
        test = getattr(item, "obj", None)
        if hypothesis.is_hypothesis_test(test):
            hypothesis.seed(int(config.getoption("--seed")))(test)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--seed"))


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)
