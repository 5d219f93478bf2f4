"""Imports point one way, heavy packages stay in their rooms, and `import keyhole` stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import keyhole

SOURCE = Path(__file__).parents[2] / "src" / "keyhole"

# a room may import rooms of a strictly lower level, and its own
LEVEL = {
    "_lazy": 0,
    "_checks": 0,
    "_array": 0,
    "_files": 0,
    "_compiled": 0,
    "textbook": 0,
    "registry": 0,
    "_tensors": 1,
    "data": 2,
    "solve": 3,
    "attention": 4,
    "theory": 5,
    "fit": 5,
    "estimators": 6,
    "distributed": 7,
    "_model_file": 7,
    "state": 8,
    "torch_module": 8,
    "export": 9,
    "lab": 10,
    "cli": 11,
    "__main__": 12,
}
# methods that are shortcuts to what stands above them, and import it when they are called
SHORTCUTS = {("estimators", "export.to_torch")}
# package → the rooms that may import it
HOME = {
    "sklearn": {"estimators", "fit", "data", "lab", "distributed", "export"},
    "matplotlib": {"lab"},
    "numba": {"attention", "data", "_compiled"},
    "llvmlite": {"attention"},
    "typer": {"cli"},
    "rich": {"cli", "lab"},
    "plotly": {"lab"},
    "starlette": {"lab"},
    "uvicorn": {"lab"},
    "anyio": {"lab"},
    "safetensors": {"lab", "_model_file", "data"},
    "h5py": {"data"},
    "pyarrow": {"data", "lab"},
    "narwhals": {"data"},
    "torch": {"attention", "solve", "fit", "data", "_tensors", "torch_module", "export", "lab"},
    "onnx": {"export"},
    "triton": {"attention"},
    "dask": {"distributed", "estimators"},
    "distributed": {"distributed", "estimators"},
}
# what a room must not know, though it stands lower; theory may ask a head distribution for its
# parameters
BLIND = {
    "solve": {"data", "_tensors"},
    "theory": {"attention.features", "attention.kernels", "attention.learned"},
}


def edges(text: str) -> list[str]:
    """Full names of the modules that a piece of source imports, wherever it does so."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def place(name: str) -> str:
    """Where a name of ours lives, without the package: what `keyhole` itself offers is found in its
    room.
    """
    first, _, rest = name.removeprefix("keyhole.").partition(".")
    home = {**keyhole._MODULES, **keyhole._SUBMODULES}.get(first, first)
    return f"{home}.{rest}" if rest else home


def forbidden(room: str, text: str) -> list[str]:
    bad = []
    for name in edges(text):
        package = name.split(".")[0]
        if package in HOME and room not in HOME[package]:
            bad.append(f"{room} → {package}")
        if name == "keyhole" and room != "cli":  # the command line stands above all rooms
            bad.append(f"{room} → keyhole as a whole, which hides what is meant")
        elif package == "keyhole" and name not in ("keyhole", "keyhole.__version__"):
            other = place(name)
            top = other.split(".")[0]
            blind = any(f"{other}.".startswith(f"{unseen}.") for unseen in BLIND.get(room, ()))
            if (room, other) in SHORTCUTS:
                continue
            if top != room and (top not in LEVEL or LEVEL[top] >= LEVEL[room] or blind):
                bad.append(f"{room} → {other}")
    return bad


def rooms() -> list[tuple[str, Path]]:
    return [
        (path.relative_to(SOURCE).parts[0].removesuffix(".py"), path)
        for path in sorted(SOURCE.rglob("*.py"))
        if path != SOURCE / "__init__.py"
    ]


def test_levels_are_whole_numbers():
    assert all(isinstance(level, int) for level in LEVEL.values())


@pytest.mark.parametrize(
    ("room", "path"), rooms(), ids=lambda v: v if isinstance(v, str) else v.stem
)
def test_imports_point_one_way(room, path):
    assert room in LEVEL, f"say where the room {room!r} stands in LEVEL"
    bad = forbidden(room, path.read_text())
    assert bad == []


@pytest.mark.parametrize(
    ("room", "text"),
    [
        ("data", "from keyhole.attention.heads import GaussianHeads"),
        ("data", "from keyhole import GaussianHeads"),
        ("solve", "def f():\n    from keyhole.data.sets import SetBatch"),
        ("solve", "from keyhole import SetBatch"),
        ("solve", "from keyhole.attention import kernels"),
        ("attention", "import keyhole.estimators"),
        ("attention", "import keyhole as kh"),
        ("attention", "from keyhole.fit.member import Member"),
        ("fit", "import numba"),
        ("fit", "from keyhole.estimators.base import SetModel"),
        ("estimators", "def f():\n    import torch"),
        ("estimators", "import matplotlib.pyplot as plt"),
        ("theory", "from keyhole.attention import kernels"),
        ("theory", "from keyhole import attention_kernel"),
        ("fit", "from distributed import Client"),
        ("cli", "import pyarrow.parquet as pq"),
        ("data", "from keyhole.fit.streams import Stream"),
    ],
)
def test_a_forbidden_edge_is_seen(room, text):
    assert forbidden(room, text)


@pytest.mark.parametrize("name", keyhole.__all__)
def test_every_public_name_is_there(name):
    assert getattr(keyhole, name) is not None


def test_import_is_light_and_complete():
    code = (
        "import sys, keyhole as kh\n"
        "heavy = {'sklearn', 'numba', 'matplotlib', 'torch', 'dask', 'distributed', 'pyarrow', "
        "'typer'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "for name in set(kh.__all__) - {'lens', 'save', 'load', 'distributed'}: getattr(kh, name)\n"
        "assert not {'torch', 'dask', 'distributed'} & set(sys.modules)\n"
        "assert set(kh.__all__) <= set(dir(kh))\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_torch_and_dask_may_be_missing():
    code = (
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in ('torch', 'triton', 'dask', 'distributed'): raise "
        "ImportError(name)\n"
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


@pytest.mark.parametrize("name", ["attention", "estimators", "data"])
def test_a_subpackage_has_what_it_promises(name):
    package = getattr(keyhole, name)
    assert package.__all__
    for promised in package.__all__:
        assert getattr(package, promised) is not None
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = package.nothing
