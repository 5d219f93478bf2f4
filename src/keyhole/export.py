"""Fitted models for other libraries: a torch module, and an ONNX graph, which is its export.

torch and onnx are imported when they are needed, and a message says what to install where they are
not there. What has no form in a graph is refused before any work, by `check_exportable`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from sklearn.base import is_classifier
from sklearn.utils.validation import check_is_fitted

from keyhole._checks import check_choice
from keyhole._files import write_whole
from keyhole.attention.features import attention_features
from keyhole.attention.heads import HeadDraw
from keyhole.estimators.attention import AttentionModel
from keyhole.fit.member import Member

OPSET = 20

MAX_SAMPLES_TO_JUDGE = 400
MOST_HEADS = 8192
SHARE_OF_ERROR = 0.25
"""Heads are enough where what they change is at most this share of the error of a prediction: the
squared error grows by a sixteenth."""


def to_torch(model: Any) -> Any:
    """The forward pass of a fitted estimator as a ``torch.nn.Module``, on padded sets.

    See `keyhole.torch_module.AttentionModule`. Its outputs are those of the estimator to rounding.
    """
    _require("to_torch", "gpu", "torch")
    check_exportable(model, "to_torch")
    from keyhole.torch_module import AttentionModule

    return AttentionModule(
        model.combination_,
        dim=int(model.n_features_in_),
        query_dim=int(model.n_query_features_in_),
        n_extras=int(model.n_extras_in_),
        has_groups=bool(model.has_set_groups_),
        single_output=model._has_one_output(),
        classifies=is_classifier(model),
    )


def to_onnx(model: Any, *, dtype: str = "float32") -> Any:
    """The forward pass of a fitted estimator as an ``onnx.ModelProto``.

    Inputs are ``keys`` (n, N, d), ``mask`` (n, N) and, where the estimator was fitted to them,
    ``query`` (n, d_q) and ``extras`` (n, c). For samples of several sets keys, mask and query have
    a second axis of sets. The sizes n, N and that axis may be any. Outputs are ``prediction``, or
    ``scores`` and ``probabilities``; the metadata of the graph name the classes.

    Parameters
    ----------
    model : AttentionRegressor or AttentionClassifier
    dtype : "float32" or "float64"
        Of numbers in the graph.
    """
    _require("to_onnx", "onnx", "torch", "onnx", "onnxscript")
    check_choice(dtype, "dtype", ("float32", "float64"))
    import torch

    module = _Outputs.of(to_torch(model)).to(getattr(torch, dtype)).eval()
    inputs = _example_inputs(model, getattr(torch, dtype))

    # all sizes but numbers of coordinates are open
    n = torch.export.Dim("n")
    sets = torch.export.Dim("S")
    keys = torch.export.Dim("N")
    axes = {0: n, 1: sets, 2: keys} if model.has_set_groups_ else {0: n, 1: keys}
    shapes: dict[str, dict[int, Any]] = {"keys": axes, "mask": axes}
    if "query" in inputs:
        shapes["query"] = {0: n, 1: sets} if model.has_set_groups_ else {0: n}
    if "extras" in inputs:
        shapes["extras"] = {0: n}
    names = ["scores", "probabilities"] if is_classifier(model) else ["prediction"]
    with _quiet():
        program = torch.onnx.export(
            module,
            kwargs=inputs,
            input_names=list(inputs),
            output_names=names,
            dynamic_shapes=shapes,
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    document = program.model_proto
    document.producer_name = "keyhole"
    if is_classifier(model):
        entry = document.metadata_props.add()
        entry.key = "classes"
        entry.value = json.dumps(model.classes_.tolist())
    return document


def save_onnx(
    model: Any, path: str | Path, *, dtype: str = "float32", overwrite: bool = False
) -> Any:
    """Write `to_onnx` of a fitted estimator to a file that ends in .onnx, and return it."""
    path = Path(path)
    if path.suffix != ".onnx":
        raise ValueError(f"`path` must end in .onnx: got {path.name!r}.")
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"a file is not replaced unless asked: {path.name!r} exists. Choose another name, or "
            "pass overwrite=True."
        )
    document = to_onnx(model, dtype=dtype)
    write_whole(document.SerializeToString(), path, overwrite=overwrite)
    return document


def sizes_of_inputs(document: Any) -> dict[str, list[str]]:
    """The axes of every input of a graph: the name of an open one, or its length."""
    return {
        node.name: [
            axis.dim_param or str(axis.dim_value) for axis in node.type.tensor_type.shape.dim
        ]
        for node in document.graph.input
    }


class _Outputs:
    """What a graph returns of a module; made where torch is there."""

    @staticmethod
    def of(module: Any) -> Any:
        import torch

        class Outputs(torch.nn.Module):
            """Predictions, or scores and probabilities, from one forward pass."""

            def __init__(self) -> None:
                super().__init__()
                self.module = module

            def forward(self, keys: Any, mask: Any, query: Any = None, extras: Any = None) -> Any:
                scores = self.module.scores(keys, mask, query, extras)
                predicted = scores[:, 0] if self.module.single_output else scores
                if not self.module.classifies:
                    return predicted
                return predicted, self.module.probabilities_of(scores)

        return Outputs()


def _example_inputs(model: Any, dtype: Any) -> dict[str, Any]:
    """Inputs of sizes that are no numbers of coordinates, by which the module is traced."""
    import torch

    sizes = (3, 2, 5) if model.has_set_groups_ else (3, 5)
    inputs = {
        "keys": torch.ones((*sizes, model.n_features_in_), dtype=dtype),
        "mask": torch.ones(sizes, dtype=torch.bool),
    }
    if model.n_query_features_in_:
        inputs["query"] = torch.ones((*sizes[:-1], model.n_query_features_in_), dtype=dtype)
    if model.n_extras_in_:
        inputs["extras"] = torch.ones((sizes[0], model.n_extras_in_), dtype=dtype)
    return inputs


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporter says of packages and names of axes that are not there."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# ---- what has no form in a graph -----------------------------------------------------------------


def check_exportable(model: Any, purpose: str) -> None:
    """Raise for what only keyhole can compute: kernels of heads around a mean, other estimators.

    The moment of such heads is an integral over the bivariate normal distribution, for which torch
    and ONNX have no operator.
    """
    if not isinstance(model, AttentionModel):
        raise TypeError(
            f"{purpose} takes a fitted AttentionRegressor or AttentionClassifier: got "
            f"{type(model).__name__}."
        )
    check_is_fitted(model)
    combination = model._solved().combination_
    refused = [member for member in combination.members if not _is_exportable(member)]
    if not refused:
        return
    member = refused[0]
    n_heads = heads_that_do(member)
    remedy = f"Fit with n_heads={n_heads} (--n-heads {n_heads}), which predicts nearly the same."
    if n_heads is None:
        remedy = (
            f"{MOST_HEADS} heads are not enough to predict the same within {SHARE_OF_ERROR:.0%} of "
            f"its error. Fit with n_heads={MOST_HEADS} (--n-heads {MOST_HEADS}), and compare."
        )
    raise ValueError(
        f"{purpose} takes finitely many heads, or infinitely many around zero: the layer "
        f"{member.name!r} of this model has infinitely many of {member.embedding.heads!r:.80}, "
        f"whose kernel has no form in torch or ONNX. {remedy}"
    )


def _is_exportable(member: Member) -> bool:
    """Whether features are of finitely many heads, or the kernel is of heads of mean zero."""
    from keyhole.fit.embedding import Embedding

    embedding: Embedding = member.embedding
    uses_kernel = embedding.settings.has_heads and embedding.draw is None
    if not uses_kernel:
        return True
    heads: Any = embedding.heads
    if hasattr(heads, "components") or not hasattr(heads, "moments"):
        return False
    samples = embedding.train
    mean, _ = heads.moments(samples.dim, samples.query_dim)
    return mean is None


def heads_that_do(member: Member) -> int | None:
    """The least power of two of heads that predict as infinitely many do; None if none does.

    Half of at most 400 training samples are fitted with infinitely and with finitely many heads,
    and predict the others. Their outputs are known from the fit: y = f(x) + α a.
    """
    embedding = member.embedding
    step = -(-len(embedding.train) // MAX_SAMPLES_TO_JUDGE)
    samples = embedding.train[slice(None, None, step)]
    if len(samples) < 4 or not hasattr(embedding.heads, "sample"):
        return 512
    y = member.predict_prepared(samples)
    if member.is_linear and not embedding.is_finite:
        y = y + member.alpha * member.coef[::step]
    twin = embedding.cross(samples)[:, ::step]
    alpha = max(member.alpha, 1e-10 * float(np.trace(twin)) / len(samples))
    exact = _predictions_of_half(twin, y, alpha)
    error = np.sqrt(np.mean((exact - y[1::2]) ** 2))

    # draws nest: the Gram matrix of twice as many heads is a sum of two
    plain = samples.with_extras(None)
    draw = HeadDraw(embedding.heads, MOST_HEADS, samples.dim, 0, samples.query_dim)
    of_extras = 0.0 if samples.extras is None else samples.extras @ samples.extras.T
    gram = np.zeros((len(samples), len(samples)))
    start = 0
    n_heads = 16
    while n_heads <= MOST_HEADS:
        for first in range(start, n_heads, 64):
            last = min(first + 64, n_heads)
            heads = draw.block(first, last)
            features = attention_features(plain, heads, embedding.settings.activation)
            # they carry one over the root of the number of heads in this call
            gram += (last - first) * (features @ features.T)
        finite = _predictions_of_half(gram / n_heads + of_extras, y, alpha)
        if np.sqrt(np.mean((finite - exact) ** 2)) <= SHARE_OF_ERROR * error:
            return n_heads
        start = n_heads
        n_heads *= 2
    return None


def _predictions_of_half(
    K: Float[np.ndarray, "n n"], y: Float[np.ndarray, "n t"], alpha: float
) -> Float[np.ndarray, "_ t"]:
    """Odd samples predicted by ridge on the even ones, with an intercept."""
    fitted = K[::2, ::2]
    n = len(fitted)
    system = np.ones((n + 1, n + 1))
    system[:n, :n] = fitted + alpha * np.eye(n)
    system[n, n] = 0.0
    right_hand_side = np.vstack([y[::2], np.zeros((1, y.shape[1]))])
    solution = np.linalg.lstsq(system, right_hand_side, rcond=None)[0]
    return np.asarray(K[1::2, ::2] @ solution[:n] + solution[n])


def _require(purpose: str, extra: str, *packages: str) -> None:
    """Raise where a package is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ImportError(
                f"{purpose} needs the package {package}, which is not installed: "
                f"pip install 'keyhole-ml[{extra}]', or in a clone pip install '.[{extra}]'."
            )
