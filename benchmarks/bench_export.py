"""Exports against `predict` on random configurations: the largest difference.

    python benchmarks/bench_export.py --configurations 200

fits small models of every activation, scaling, query, pooling, loss, number of hops, kind of
outputs and precision, drawn at random, with and without queries and extras, on sets of 1 to 6 keys.
Half of the models outside the norm ball select 1 to 4 keys of each set. The torch module, the ONNX
graph under onnxruntime and the plain steps of `keyhole.export.constants` are compared with the
estimator. Differences are in units of the largest output, those of probabilities as they are.
"""

import argparse
import warnings
from typing import Any

import numpy as np
import onnxruntime
import torch

import keyhole as kh
from keyhole.attention.heads import FittedHeads
from keyhole.export import to_onnx
from keyhole.export.constants import LayerConstants, predict_with

N_SAMPLES = 30
MODELS = {
    "numbers": kh.AttentionRegressor,
    "two outputs": kh.AttentionRegressor,
    "two labels": kh.AttentionClassifier,
    "three labels": kh.AttentionClassifier,
    "numbers in a ball": kh.NormBallRegressor,
    "labels in a ball": kh.NormBallClassifier,
}


def choice(rng: np.random.Generator, *values: Any) -> Any:
    return values[rng.integers(len(values))]


def random_samples(rng: np.random.Generator) -> kh.SetBatch:
    """Ragged sets, with or without queries (of any dimension) and extras."""
    dim = int(rng.integers(1, 5))
    query_dim = choice(rng, 0, dim, dim, 2)
    keys = [rng.normal(size=(rng.integers(1, 7), dim)) for _ in range(N_SAMPLES)]
    query = rng.normal(size=(N_SAMPLES, query_dim)) if query_dim else None
    extras = choice(rng, None, rng.normal(size=(N_SAMPLES, 2)))
    return kh.SetBatch(keys, query, extras)


def random_heads(rng: np.random.Generator, sets: kh.SetBatch, query: str, n_hops: int) -> Any:
    """A head distribution; with hops, learned heads whose matrices are drawn at random."""
    if n_hops == 0:
        return choice(rng, kh.GaussianHeads(scale=0.3), kh.QueryKeyHeads(2))
    width = sets.dim
    if query == "given":
        width = sets.query_dim
    n_patterns = int(rng.integers(1, 3))
    hops = []
    for _ in range(n_hops):
        hops.append(rng.normal(size=(n_patterns, width + 1, sets.dim + 1)))
        width += n_patterns * sets.dim
    means = 0.3 * rng.normal(size=(2, width + 1, sets.dim + 1))
    return FittedHeads(means, 0.3, hops_=tuple(hops))


def random_target(rng: np.random.Generator, kind: str) -> np.ndarray:
    values = rng.normal(size=N_SAMPLES)
    if kind == "two outputs":
        return np.stack([values, values**2], axis=1)
    if "numbers" in kind:
        return values
    cuts = [-0.5, 0.5] if kind == "three labels" else [0.0]
    return np.array(["a", "b", "c"])[np.digitize(values, cuts)]


def random_model(rng: np.random.Generator, sets: kh.SetBatch, number: int) -> tuple[Any, str]:
    """A fitted model, and its configuration in words."""
    kind = choice(rng, *MODELS)
    in_ball = kind.endswith("ball")
    n_hops = 0 if in_ball else choice(rng, 0, 0, 0, 1, 2)
    query = choice(rng, "given", "mean") if n_hops else choice(rng, "given", "mean", "each")
    settings = {
        "activation": choice(rng, "relu", "softmax", "linear", "square", "step", "exp"),
        "scaling": choice(rng, "none", "sphere", "standard"),
        "query": query,
        "dtype": choice(rng, "float64", "float64", "float32"),
    }
    pooling = choice(rng, "mean", "sum", "mean+size", "mean+statistics")
    n_keys = choice(rng, 1, 2, 3, 4)
    keys = choice(rng, "all", n_keys)
    if MODELS[kind] is kh.AttentionClassifier:
        settings["loss"] = choice(rng, "squared_error", "log_loss")
    n_heads = int(rng.integers(1, 20))
    heads = random_heads(rng, sets, query, n_hops)
    if in_ball:
        # the norm ball sees all keys
        keys = "all"
        radii = {"group_radius": 1.0, "ball_radius": 1.0}
        model = MODELS[kind](n_heads, heads, random_state=number, **radii, **settings)
    else:
        # kernels of exp may be so large that a fixed penalty is rounding to Newton's steps
        alpha = "loo" if settings.get("loss") == "log_loss" else 0.1
        model = MODELS[kind](
            n_heads,
            heads,
            alpha,
            random_state=number,
            pooling=pooling,
            keys=keys,
            **settings,
        )
    words = f"{number}: {kind}, {n_hops} hops, {pooling}, {', '.join(settings.values())}"
    words = f"{words}, keys={keys}"
    return model.fit(sets, random_target(rng, kind)), words


def differences(model: Any, sets: kh.SetBatch) -> dict[str, float]:
    """The largest difference of each export from the estimator."""
    constants = LayerConstants.of(model, "bench_export")
    expected = model.predict(sets)
    if hasattr(model, "classes_"):
        expected = model.decision_function(sets)
    size = np.abs(expected).max()

    # padded with NaN, which no export may look at
    mask = np.arange(sets.lengths.max()) < sets.lengths[:, None]
    keys = np.full((*mask.shape, sets.dim), np.nan)
    keys[mask] = sets.tokens
    inputs = {"keys": keys.astype(model.dtype), "mask": mask}
    if constants.query_dim:
        inputs["query"] = sets.query.astype(model.dtype)
    if constants.n_extras:
        inputs["extras"] = sets.extras.astype(model.dtype)

    # plain steps, sample by sample
    plain = []
    for i in range(len(sets)):
        query = sets.query[i] if constants.query_dim else None
        extras = sets.extras[i] if constants.n_extras else None
        plain.append(predict_with(constants, sets[i].tokens, query, extras))

    # torch and ONNX
    module = model.to_torch()
    tensors = {name: torch.tensor(array) for name, array in inputs.items()}
    session = onnxruntime.InferenceSession(
        to_onnx(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [node.name for node in session.get_outputs()]
    outputs = dict(zip(names, session.run(names, inputs), strict=True))
    scores = outputs.get("prediction", outputs.get("scores"))
    with torch.no_grad():
        found = {
            "plain": np.abs(np.reshape(plain, expected.shape) - expected).max() / size,
            "torch": np.abs(module(**tensors).numpy() - expected).max() / size,
            "ONNX": np.abs(scores - expected).max() / size,
        }
        if "probabilities" in outputs:
            probabilities = model.predict_proba(sets)
            of_torch = module.predict_proba(**tensors).numpy()
            of_onnx = outputs["probabilities"]
            found["torch"] = max(found["torch"], np.abs(of_torch - probabilities).max())
            found["ONNX"] = max(found["ONNX"], np.abs(of_onnx - probabilities).max())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configurations", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of small samples
    onnxruntime.set_default_logger_severity(3)
    rng = np.random.default_rng(arguments.seed)
    worst: dict[tuple[str, str], tuple[float, str]] = {}
    n_selecting = 0
    for number in range(arguments.configurations):
        sets = random_samples(rng)
        model, words = random_model(rng, sets, number)
        n_selecting += getattr(model, "key_selection_", None) is not None
        for export, difference in differences(model, sets).items():
            key = (export, model.dtype)
            worst[key] = max(worst.get(key, (0.0, "")), (float(difference), words))
    print(
        f"{arguments.configurations} configurations, {n_selecting} with a selection of keys; "
        "largest difference from the estimator:"
    )
    for (export, dtype), (difference, words) in sorted(worst.items()):
        print(f"{export:6s} {dtype}  {difference:.1e}   {words}")


if __name__ == "__main__":
    main()
