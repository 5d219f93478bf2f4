"""Fitted models for other libraries: a torch module, an ONNX graph.

`constants` has what both are made of, as plain arrays. torch and onnx are imported when they are
needed, and a message says what to install where they are not there.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def to_torch(model: Any) -> Any:
    """The layer of a fitted estimator as a ``torch.nn.Module``: see `keyhole.export.torch_module`.

    It has the outputs of the estimator, to rounding, and parameters that can be trained.
    """
    _require("torch", "to_torch", "gpu")
    from keyhole.export import torch_module

    return torch_module.to_torch(model)


def to_onnx(model: Any) -> Any:
    """The layer of a fitted estimator as an ``onnx.ModelProto``: see `keyhole.export.onnx_graph`.

    Its inputs are ``keys``, ``mask`` and, where the estimator was fitted to them, ``query`` and
    ``extras``; its outputs ``prediction``, or ``label``, ``scores`` and ``probabilities``.
    """
    _require("onnx", "to_onnx", "onnx")
    from keyhole.export import onnx_graph

    return onnx_graph.to_onnx(model)


def save_onnx(model: Any, path: str | Path, *, overwrite: bool = False) -> Any:
    """Write `to_onnx` of a fitted estimator to a file that ends in .onnx, and return it."""
    _require("onnx", "save_onnx", "onnx")
    from keyhole.export import onnx_graph

    return onnx_graph.save_onnx(model, path, overwrite=overwrite)


def _require(package: str, purpose: str, extra: str) -> None:
    """Raise where a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ImportError(
            f"{purpose} needs the package {package}, which is not installed: "
            f"pip install 'keyhole-ml[{extra}]', or in a clone pip install '.[{extra}]'."
        )
