"""From the closed form to gradient descent: what training the heads gains.

`model.to_torch()` is a module whose parameters are those of the fit. Its values are at
the minimum already, so that only the query-key matrices W (and the values with them)
can gain anything. Few heads gain much; many heads gain little, because some of them
are good by chance.

    python examples/finetune.py            # or with another number of steps: 300
"""

import sys

import numpy as np
import torch

import keyhole as kh

DIM = 6
N_KEYS = 8
N_STEPS = 300


def data(n: int, seed: int) -> tuple[kh.SetBatch, np.ndarray]:
    """The mean of (<β, x_i>)³ over keys, with noise of a fifth of its spread."""
    sets = kh.targets.sphere_sets(n, n_keys=N_KEYS, dim=DIM, seed=seed)
    signal = kh.targets.TokenPower(3, dim=DIM)(sets)
    noise = np.random.default_rng(seed).standard_normal(n)
    return sets, signal + 0.2 * signal.std() * noise


def tensors(sets: kh.SetBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (n, N, d) and queries (n, d)."""
    return torch.tensor(sets.tokens.reshape(-1, N_KEYS, DIM)), torch.tensor(sets.query)


def r2(predicted: np.ndarray, y: np.ndarray) -> float:
    return 1 - np.mean((predicted - y) ** 2) / np.var(y)


def gain(n_heads: int, n: int = 1000, n_steps: int = N_STEPS) -> tuple[float, float]:
    """R² on new samples of the closed form, and after training from there."""
    sets, y = data(n, seed=0)
    new_sets, new_y = data(1000, seed=1)
    model = kh.AttentionRegressor(
        n_heads,
        kh.GaussianHeads(),
        activation="relu",
        pooling="mean",
        scaling="none",
        query="given",
        random_state=0,
    ).fit(sets, y)
    module = model.to_torch()

    # a fifth is held out, to stop where it is predicted best
    keys, query = tensors(sets)
    outcome = torch.tensor(y)
    n_train = 4 * n // 5
    optimiser = torch.optim.Adam(module.parameters(), lr=0.01)
    penalty = float(model.alpha_) / n
    best = (float("inf"), module.state_dict())
    for _ in range(n_steps):
        optimiser.zero_grad()
        residuals = module(keys[:n_train], query=query[:n_train]) - outcome[:n_train]
        size = module.members[0].coef.square().sum()
        loss = residuals.square().mean() + penalty * size
        loss.backward()
        optimiser.step()
        with torch.no_grad():
            held_out = module(keys[n_train:], query=query[n_train:]) - outcome[n_train:]
            error = float(held_out.square().mean())
        if error < best[0]:
            best = (
                error,
                {name: value.clone() for name, value in module.state_dict().items()},
            )
    module.load_state_dict(best[1])

    new_keys, new_query = tensors(new_sets)
    with torch.no_grad():
        after = module(new_keys, query=new_query).numpy()
    return r2(model.predict(new_sets), new_y), r2(after, new_y)


def main(n_steps: int = N_STEPS) -> None:
    print("heads  R² of the closed form  R² after training")
    for n_heads in (4, 16, 64, 256):
        before, after = gain(n_heads, n_steps=n_steps)
        print(f"{n_heads:5d}  {before:21.3f}  {after:17.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
