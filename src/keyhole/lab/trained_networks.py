"""Networks that are trained by gradient descent, to compare the tasks' learners with.

"attention" is the layer of keyhole with softmax weights in which everything is trained: query-key
matrices W_m and values v_m. "deep-sets" is a network for each key, a mean over the keys, and a
network after it. Both need torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from keyhole.data.sets import SetBatch

if TYPE_CHECKING:
    import torch

N_HEADS = 8  # of the attention network
WIDTH = 64  # of the layers of DeepSets
BATCH = 64  # samples of a step
STEPS = 3000  # at most
CHECK_STEPS = 50  # between two looks at the held-out samples
PATIENCE = 12  # looks without a better error, then it stops
HELD_OUT = 0.2  # of the training samples, to stop by
LEARNING_RATE = {"attention": 0.02, "deep-sets": 0.003}

Predict = Callable[[SetBatch], Float[np.ndarray, " n"]]


def fit_network(kind: str, batch: SetBatch, y: Float[np.ndarray, " n"], seed: int) -> Predict:
    """Train a network on n sets of equally many keys; what comes back predicts others.

    Adam on the mean squared error, halved learning rate where the held-out error stalls, and the
    weights that were best on the held-out fifth of the samples.
    """
    import torch

    # labels with mean 0 and variance 1, coordinates of the size 1
    centre = float(np.mean(y))
    spread = float(np.std(y)) or 1.0
    unit = float(np.sqrt(np.mean(np.square(batch.tokens)))) or 1.0
    keys, query = _tensors(batch, unit)
    labels = torch.tensor((y - centre) / spread)

    # the last fifth is held out: samples are in random order
    n_train = max(1, round((1 - HELD_OUT) * len(y)))
    generator = torch.Generator().manual_seed(seed)
    network = _network(kind, keys.shape[2], query.shape[1], generator)
    optimiser = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE[kind])
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimiser, factor=0.5, patience=4)

    # steps on random samples; keep the weights with the least held-out error
    best_error = float("inf")
    best_weights = _copy(network)
    looks_since_best = 0
    for step in range(1, STEPS + 1):
        chosen = torch.randint(n_train, (min(BATCH, n_train),), generator=generator)
        loss = torch.mean((network(keys[chosen], query[chosen]) - labels[chosen]) ** 2)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        if step % CHECK_STEPS != 0:
            continue
        with torch.no_grad():
            residuals = network(keys[n_train:], query[n_train:]) - labels[n_train:]
        error = float(torch.mean(residuals**2))
        schedule.step(error)
        looks_since_best += 1
        if error < best_error:
            best_error = error
            best_weights = _copy(network)
            looks_since_best = 0
        if looks_since_best > PATIENCE:
            break
    network.load_state_dict(best_weights)

    def predict(other: SetBatch) -> np.ndarray:
        with torch.no_grad():
            outputs = network(*_tensors(other, unit)).numpy()
        return np.asarray(centre + spread * outputs)

    return predict


def _tensors(batch: SetBatch, unit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (n, N, d+1) and query (n, d+1), each with the coordinate 1 appended."""
    import torch

    keys = batch.tokens.reshape(len(batch), -1, batch.dim) / unit
    query = np.zeros((len(batch), 0)) if batch.query is None else batch.query / unit
    keys = np.concatenate([keys, np.ones((*keys.shape[:2], 1))], axis=2)
    query = np.concatenate([query, np.ones((len(batch), 1))], axis=1)
    return torch.tensor(keys), torch.tensor(query)


def _copy(network: Any) -> dict[str, torch.Tensor]:
    """The weights of a network as they are."""
    return {name: weights.clone() for name, weights in network.state_dict().items()}


def _network(kind: str, key_dim: int, query_dim: int, generator: torch.Generator) -> Any:
    """A network with initial weights from a generator, in float64."""
    import torch
    from torch import nn

    def normal(*shape: int, scale: float) -> nn.Parameter:
        return nn.Parameter(scale * torch.randn(*shape, generator=generator, dtype=torch.float64))

    class Attention(nn.Module):
        """f(x) = Σ_m <v_m, Σ_i softmax_i(x~_0ᵀ W_m x~_i) x~_i>."""

        def __init__(self) -> None:
            super().__init__()
            self.matrices = normal(N_HEADS, query_dim, key_dim, scale=query_dim**-0.5)
            self.values = normal(N_HEADS, key_dim, scale=(N_HEADS * key_dim) ** -0.5)

        def forward(self, keys: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
            scores = torch.einsum("nq,mqd,nkd->nmk", query, self.matrices, keys)
            weights = torch.softmax(scores, dim=2)
            return torch.einsum("nmk,nkd,md->n", weights, keys, self.values)

    class DeepSets(nn.Module):
        """f(x) = ρ(x_0, (1/N) Σ_i φ(x_0, x_i)), φ and ρ networks with one hidden layer."""

        def __init__(self) -> None:
            super().__init__()
            inputs = key_dim + query_dim
            self.first = normal(inputs, WIDTH, scale=(2 / inputs) ** 0.5)
            self.second = normal(WIDTH, WIDTH, scale=(2 / WIDTH) ** 0.5)
            joined = WIDTH + query_dim
            self.third = normal(joined, WIDTH, scale=(2 / joined) ** 0.5)
            self.last = normal(WIDTH, scale=WIDTH**-0.5)

        def forward(self, keys: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
            of_each_key = query[:, None, :].expand(-1, keys.shape[1], -1)
            hidden = torch.relu(torch.cat([keys, of_each_key], dim=2) @ self.first)
            pooled = torch.relu(hidden @ self.second).mean(dim=1)
            return torch.relu(torch.cat([pooled, query], dim=1) @ self.third) @ self.last

    networks = {"attention": Attention, "deep-sets": DeepSets}
    if kind not in networks:
        raise ValueError(f"a network must be one of {', '.join(networks)}: got {kind!r}.")
    return networks[kind]()
