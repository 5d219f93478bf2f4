"""Score sets with a file of `keyhole export`: NumPy and onnxruntime, no keyhole.

    keyhole export model.keyhole model.onnx
    python score_onnx.py model.onnx sets.npz

The npz file has ``X``, the keys of all sets one after the other, (tokens, d), and
``ptr``, where each set begins, (n + 1); ``query`` (n, d_q) and ``extras`` (n, c) where
the model takes them.
"""

import sys

import numpy as np
import onnxruntime


def padded(X: np.ndarray, ptr: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys (n, N, d), padded to the longest set, and which are there, (n, N)."""
    lengths = np.diff(ptr)
    mask = np.arange(lengths.max()) < lengths[:, None]
    keys = np.zeros((*mask.shape, X.shape[1]), X.dtype)
    keys[mask] = X
    return keys, mask


def score(path: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All outputs of a model by their names, for sets as the npz file has them."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    keys, mask = padded(arrays["X"], arrays["ptr"])
    available = {**arrays, "keys": keys, "mask": mask}
    inputs = {}
    for node in session.get_inputs():
        values = available[node.name]
        if node.type == "tensor(double)":
            values = values.astype(np.float64)
        elif node.type == "tensor(float)":
            values = values.astype(np.float32)
        inputs[node.name] = values
    names = [node.name for node in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


if __name__ == "__main__":
    with np.load(sys.argv[2]) as file:
        outputs = score(sys.argv[1], dict(file))
    for name, values in outputs.items():
        print(name, values[:5])
