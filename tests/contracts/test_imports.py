"""Imports point one way, heavy packages stay in their rooms, and `import keyhole` stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "keyhole"

# a room may import rooms of a strictly lower level, and its own
LEVEL = {
    "_checks": 0,
    "_array": 0,
    "_files": 0,
    "_fused": 1,
    "_torch": 1,
    "sets": 2,
    "_duplicates": 2.5,
    "sources": 3,
    "activations": 3,
    "groups": 3,
    "tables": 3.2,
    "datasets": 3.5,
    "heads": 4,
    "tokens": 4,
    "targets": 4,
    "notation": 5,
    "theory": 5,
    "features": 5,
    "kernels": 5,
    "solvers": 5,
    "pooled_kernels": 5.5,
    "learned": 6,
    "layer": 6,
    "checkpoints": 6,
    "device": 6.5,
    "streaming": 6.5,
    "large_layer": 6.5,
    "estimators": 7,
    "plotting": 7,
    "persistence": 7.5,
    "distributed": 8,
    "report": 8,
    "lens": 9,
    "experiments": 9,
    "cli": 10,
}
# package → the rooms that may import it
HOME = {
    "sklearn": {"estimators", "datasets"},
    "matplotlib": {"plotting"},
    "numba": {"_fused"},
    "typer": {"cli"},
    "rich": {"cli", "experiments"},
    "plotly": {"report"},
    "safetensors": {"checkpoints", "persistence"},
    "pyarrow": {"tables", "sources", "experiments"},
    "torch": {"_torch"},
    "triton": {"_torch"},
    "dask": {"distributed"},
    "distributed": {"distributed"},
}
BLIND = {"solvers": {"sets", "heads", "features", "kernels"}, "theory": {"sets", "kernels", "features", "estimators"}}


def edges(text: str) -> list[str]:
    """Full names of the modules that a piece of source imports, wherever it does so."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def forbidden(room: str, text: str) -> list[str]:
    bad = []
    for name in edges(text):
        package, *rest = name.split(".")
        if package in HOME and room not in HOME[package]:
            bad.append(f"{room} → {package}")
        if package == "keyhole" and rest and rest[0] in LEVEL:
            other = rest[0]
            if other != room and (LEVEL[other] >= LEVEL[room] or other in BLIND.get(room, ())):
                bad.append(f"{room} → {other}")
    return bad


def rooms() -> list[tuple[str, Path]]:
    return [
        (path.relative_to(SOURCE).parts[0].removesuffix(".py"), path)
        for path in sorted(SOURCE.rglob("*.py"))
        if path != SOURCE / "__init__.py"
    ]


@pytest.mark.parametrize(("room", "path"), rooms(), ids=lambda v: v if isinstance(v, str) else v.stem)
def test_imports_point_one_way(room, path):
    assert room in LEVEL, f"say where the room {room!r} stands in LEVEL"
    assert forbidden(room, path.read_text()) == []


@pytest.mark.parametrize(
    ("room", "text"),
    [
        ("sets", "from keyhole.heads import GaussianHeads"),
        ("solvers", "def f():\n    from keyhole.sets import SetBatch"),
        ("features", "import keyhole.estimators"),
        ("features", "import numba"),
        ("kernels", "def f():\n    import torch"),
        ("experiments", "import matplotlib.pyplot as plt"),
        ("theory", "from keyhole import kernels"),
        ("estimators", "from distributed import Client"),
        ("cli", "import pyarrow.parquet as pq"),
        ("sources", "from keyhole.streaming import merge"),
    ],
)
def test_a_forbidden_edge_is_seen(room, text):
    assert forbidden(room, text)


def test_import_is_light_and_complete():
    code = (
        "import sys, keyhole as kh\n"
        "heavy = {'sklearn', 'numba', 'matplotlib', 'torch', 'dask', 'distributed', 'pyarrow', 'typer'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "for name in kh.__all__: getattr(kh, name)\n"
        "assert not {'torch', 'dask', 'distributed'} & set(sys.modules)\n"
        "assert set(kh.__all__) <= set(dir(kh))\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_torch_and_dask_may_be_missing():
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in ('torch', 'triton', 'dask', 'distributed'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Missing())\n"
        "import numpy as np, keyhole as kh\n"
        "batch = kh.targets.sphere_sets(20, 3, 2, seed=0)\n"
        "model = kh.AttentionRegressor(3, random_state=0).partial_fit(batch, batch.query[:, 0])\n"
        "assert np.isfinite(model.predict(batch)).all()\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error():
    import keyhole

    with pytest.raises(AttributeError, match="no attribute 'AttentionRegresor'"):
        keyhole.AttentionRegresor  # noqa: B018
