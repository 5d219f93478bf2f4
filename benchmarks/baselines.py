"""Baselines of the attention layer on real sets: pooled tables with classical learners, and small
networks in torch.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import LogisticRegression, RidgeClassifierCV, RidgeCV
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from keyhole.data.sets import SetGroups


def as_batch(X: Any) -> tuple[Any, np.ndarray]:
    """Sets, and the number of sets that each sample owns."""
    return (X.sets, X.counts) if isinstance(X, SetGroups) else (X, np.ones(len(X), dtype=int))


def segments(values: np.ndarray, offsets: np.ndarray, how: Any) -> np.ndarray:
    return how.reduceat(values, offsets[:-1], axis=0)


def pool(X: Any, kind: str, total: bool) -> np.ndarray:
    """A table with a row per sample: means (sums if ``total``) of keys, or also spread and
    extremes; then the query.
    """
    sets, counts = as_batch(X)
    lengths = sets.lengths[:, None]
    sums = segments(sets.tokens, sets.offsets, np.add)
    means = sums / lengths
    parts = [sums if total else means]
    if kind == "statistics":
        squares = segments(sets.tokens**2, sets.offsets, np.add) / lengths
        parts += [np.sqrt(np.maximum(squares - means**2, 0.0))]
        parts += [segments(sets.tokens, sets.offsets, how) for how in (np.minimum, np.maximum)]
    if sets.query is not None:
        parts.append(sets.query)
    table = np.concatenate(parts, axis=1)
    if isinstance(X, SetGroups):
        table = np.add.reduceat(table, X.offsets[:-1], axis=0)
        table = table if total else table / counts[:, None]
    return table


def boosted_trees(regression: bool, seed: int) -> Any:
    """LightGBM with 300 trees of at most 15 leaves and at least 5 samples a leaf.

    Its defaults ask for 20 samples a leaf, which a data set of 92 bags does not have.
    """
    import lightgbm

    kind = lightgbm.LGBMRegressor if regression else lightgbm.LGBMClassifier
    return kind(
        n_estimators=300,
        learning_rate=0.05,
        num_leaves=15,
        min_child_samples=5,
        random_state=seed,
        n_jobs=1,
        verbose=-1,
    )


class Pooled(BaseEstimator):
    """Pool, standardise, learn."""

    def __init__(self, learner: str, kind: str, regression: bool, seed: int) -> None:
        self.learner, self.kind, self.regression, self.seed = learner, kind, regression, seed

    def fit(self, X: Any, y: np.ndarray) -> Pooled:
        self.model_ = make_pipeline(StandardScaler(), self._learner(y))
        centre = y.mean() if self.regression else 0.0
        self.centre_ = centre
        self.model_.fit(pool(X, self.kind, self.regression), y - centre if self.regression else y)
        return self

    def _learner(self, y: np.ndarray) -> Any:
        """The learner of that name, with its grid."""
        if self.learner == "lightgbm":
            return boosted_trees(self.regression, self.seed)
        grid = np.geomspace(1e-4, 1e4, 17)
        if self.regression:
            if self.learner == "ridge":
                return RidgeCV(grid)
            search = {"alpha": [1e-4, 1e-2], "gamma": [0.003, 0.03]}
            return GridSearchCV(KernelRidge(kernel="rbf"), search, cv=3)
        if self.learner == "ridge":
            return RidgeClassifierCV(grid)
        smallest = int(np.bincount(np.unique(y, return_inverse=True)[1]).min())
        n_folds = max(2, min(3, smallest))
        if self.learner == "logistic":
            search = {"C": [0.01, 0.1, 1.0, 10.0]}
            return GridSearchCV(LogisticRegression(max_iter=500), search, cv=n_folds)
        search = {"C": [0.1, 1.0, 10.0, 100.0], "gamma": ["scale"]}
        return GridSearchCV(SVC(), search, cv=n_folds)

    def predict(self, X: Any) -> np.ndarray:
        found = self.model_.predict(pool(X, self.kind, self.regression))
        return found + self.centre_ if self.regression else found


class FourierMean(BaseEstimator):
    """Mean (sum for regression) of random Fourier features of standardised keys, with the query
    beside it; ridge.
    """

    def __init__(self, regression: bool, seed: int, width: int = 1000) -> None:
        self.regression, self.seed, self.width = regression, seed, width

    def _table(self, X: Any) -> np.ndarray:
        sets, _ = as_batch(X)
        keys = (sets.tokens - self.centre_) / self.spread_
        query = None if sets.query is None else (sets.query - self.centre_) / self.spread_
        if query is not None:
            keys = np.concatenate([keys, np.repeat(query, sets.lengths, axis=0)], axis=1)
        rng = np.random.default_rng(self.seed)
        weights = rng.standard_normal((keys.shape[1], self.width)) * self.gamma
        phase = rng.uniform(0, 2 * np.pi, self.width)
        table = np.empty((len(sets), self.width))
        for start in range(0, len(sets), 2000):
            stop = min(start + 2000, len(sets))
            rows = slice(sets.offsets[start], sets.offsets[stop])
            waves = np.cos(keys[rows] @ weights + phase)
            table[start:stop] = np.add.reduceat(
                waves, sets.offsets[start:stop] - sets.offsets[start], axis=0
            )
        if not self.regression:
            table /= sets.lengths[:, None]
        if isinstance(X, SetGroups):
            table = np.add.reduceat(table, X.offsets[:-1], axis=0)
        return table

    def fit(self, X: Any, y: np.ndarray) -> FourierMean:
        sets, _ = as_batch(X)
        self.centre_ = sets.tokens.mean(axis=0)
        spread = sets.tokens.std(axis=0)
        self.spread_ = np.where(spread > 0, spread, 1.0) * np.sqrt(sets.dim)
        grid = np.geomspace(1e-6, 1e2, 17)
        best = None
        for gamma in (0.5, 1.0, 2.0):
            self.gamma = gamma
            model = (RidgeCV if self.regression else RidgeClassifierCV)(
                grid, store_cv_results=False
            )
            model.fit(self._table(X), y)
            if best is None or model.best_score_ > best[0]:
                best = (model.best_score_, gamma, model)
        assert best is not None
        _, self.gamma, self.model_ = best
        return self

    def predict(self, X: Any) -> np.ndarray:
        return self.model_.predict(self._table(X))


def padded(X: Any, centre: np.ndarray, spread: np.ndarray) -> tuple[Any, Any, Any]:
    """Tokens (n, longest, d), mask and query as torch tensors."""
    import torch

    sets, _ = as_batch(X)
    longest = int(sets.lengths.max())
    tokens = np.zeros((len(sets), longest, sets.dim), dtype=np.float32)
    mask = np.arange(longest) < sets.lengths[:, None]
    tokens[mask] = (sets.tokens - centre) / spread
    query = (
        np.zeros((len(sets), sets.dim)) if sets.query is None else (sets.query - centre) / spread
    )
    return (
        torch.from_numpy(tokens),
        torch.from_numpy(mask),
        torch.from_numpy(query.astype(np.float32)),
    )


class Network(BaseEstimator):
    """DeepSets, attention MIL or a small Set Transformer: Adam, early stopping on 15 % of the
    training samples, a time limit.
    """

    def __init__(
        self, kind: str, regression: bool, seed: int, seconds: float = 60.0, epochs: int = 200
    ) -> None:
        self.kind, self.regression, self.seed, self.seconds, self.epochs = (
            kind,
            regression,
            seed,
            seconds,
            epochs,
        )

    def fit(self, X: Any, y: np.ndarray) -> Network:
        import torch

        torch.manual_seed(self.seed)
        sets, _ = as_batch(X)
        spread = sets.tokens.std(axis=0)
        self.centre_, self.spread_ = sets.tokens.mean(axis=0), np.where(spread > 1e-6, spread, 1.0)
        if self.regression:
            self.shift_, self.size_ = float(y.mean()), float(y.std())
            targets = torch.tensor((y - self.shift_) / self.size_, dtype=torch.float32)[:, None]
            loss, width = torch.nn.functional.mse_loss, 1
        else:
            self.classes_, codes = np.unique(y, return_inverse=True)
            targets, loss, width = (
                torch.tensor(codes),
                torch.nn.functional.cross_entropy,
                len(self.classes_),
            )
        self.net_ = _module(self.kind, sets.dim, width, self.regression)
        order = np.random.default_rng(self.seed).permutation(len(X))
        held, used = order[: max(1, int(0.15 * len(X)))], order[max(1, int(0.15 * len(X))) :]
        optimiser = torch.optim.Adam(self.net_.parameters(), lr=1e-3, weight_decay=1e-5)
        began, best, since, kept = time.perf_counter(), np.inf, 0, None
        rng = np.random.default_rng(self.seed)
        for _ in range(self.epochs):
            self.net_.train()
            shuffled = rng.permutation(used)
            for start in range(0, len(shuffled), 32):
                rows = shuffled[start : start + 32]
                optimiser.zero_grad()
                loss(self._forward(X, rows), targets[rows]).backward()
                optimiser.step()
            with torch.no_grad():
                self.net_.eval()
                now = float(loss(self._forward(X, held), targets[held]))
            since += 1
            if now < best:
                best, since, kept = (
                    now,
                    0,
                    {k: v.clone() for k, v in self.net_.state_dict().items()},
                )
            if since >= 20 or time.perf_counter() - began > self.seconds:
                break
        self.net_.load_state_dict(kept)
        return self

    def _forward(self, X: Any, rows: np.ndarray) -> Any:
        part = X[rows]
        _, counts = as_batch(part)
        return self.net_(*padded(part, self.centre_, self.spread_), counts)

    def predict(self, X: Any) -> np.ndarray:
        import torch

        self.net_.eval()
        with torch.no_grad():
            parts = [
                self._forward(X, np.arange(s, min(s + 256, len(X)))) for s in range(0, len(X), 256)
            ]
        scores = torch.cat(parts).numpy()
        if self.regression:
            return scores[:, 0] * self.size_ + self.shift_
        return self.classes_[scores.argmax(axis=1)]


class MemoryNetwork(BaseEstimator):
    """A memory network with three hops, adjacent weights and a linear start (Sukhbaatar et al.
    2015).

    Of ten restarts, trained side by side, that of least training error predicts; 20 dimensions, 100
    epochs, the rate halved every 25.

    Tokens hold words, their places and a column for each age, so that a linear embedding of them
    has the position and the time encoding of the paper; here with Adam, and without the noise of
    empty memories.
    """

    def __init__(
        self, seed: int, restarts: int = 10, epochs: int = 100, width: int = 20, hops: int = 3
    ) -> None:
        self.seed, self.restarts, self.epochs, self.width, self.hops = (
            seed,
            restarts,
            epochs,
            width,
            hops,
        )

    def fit(self, X: Any, y: np.ndarray) -> MemoryNetwork:
        import torch

        self.classes_, codes = np.unique(y, return_inverse=True)
        self.device_ = "cuda" if torch.cuda.is_available() else "cpu"
        keys, mask, query = self._tensors(X)
        targets = torch.tensor(codes, device=self.device_)
        g = torch.Generator().manual_seed(self.seed)
        shapes = [(self.restarts, X.dim, self.width)] * (self.hops + 1)
        shapes.append((self.restarts, self.width, len(self.classes_)))
        self.weights_ = [
            (0.1 * torch.randn(s, generator=g)).to(self.device_).requires_grad_() for s in shapes
        ]
        optimiser = torch.optim.Adam(self.weights_, lr=0.01)
        rng = np.random.default_rng(self.seed)
        for epoch in range(self.epochs):
            for group in optimiser.param_groups:
                group["lr"] = 0.01 * 0.5 ** (epoch // 25)
            order = torch.tensor(rng.permutation(len(X)), device=self.device_)
            for rows in order.split(32):
                optimiser.zero_grad()
                scores = self._scores(
                    keys[rows], mask[rows], query[rows], linear=epoch < self.epochs // 5
                )
                self._losses(scores, targets[rows]).sum().backward()
                torch.nn.utils.clip_grad_norm_(self.weights_, 40.0)
                optimiser.step()
        with torch.no_grad():
            parts = [
                self._scores(keys[r], mask[r], query[r]) for r in torch.arange(len(X)).split(128)
            ]
            self.best_ = int(self._losses(torch.cat(parts, dim=1), targets).argmin())
        return self

    def _tensors(self, X: Any) -> tuple[Any, Any, Any]:
        return tuple(part.to(self.device_) for part in padded(X, np.zeros(X.dim), np.ones(X.dim)))

    def _losses(self, scores: Any, targets: Any) -> Any:
        import torch

        each = torch.nn.functional.cross_entropy(
            scores.flatten(0, 1), targets.repeat(len(scores)), reduction="none"
        )
        return each.view(len(scores), -1).mean(1)

    def _scores(self, keys: Any, mask: Any, query: Any, linear: bool = False) -> Any:
        """(restarts, n, classes)."""
        import torch

        *embeddings, answer = self.weights_
        state = torch.einsum("nd,rde->rne", query, embeddings[0])
        memory = torch.einsum("nkd,rde->rnke", keys, embeddings[0])
        for embedding in embeddings[1:]:
            match = torch.einsum("rne,rnke->rnk", state, memory).masked_fill(
                ~mask, 0.0 if linear else -torch.inf
            )
            memory = torch.einsum("nkd,rde->rnke", keys, embedding)
            state = state + torch.einsum(
                "rnk,rnke->rne", match if linear else match.softmax(2), memory
            )
        return state @ answer

    def predict(self, X: Any) -> np.ndarray:
        import torch

        keys, mask, query = self._tensors(X)
        with torch.no_grad():
            parts = [
                self._scores(keys[r], mask[r], query[r])[self.best_]
                for r in torch.arange(len(X)).split(128)
            ]
        return self.classes_[torch.cat(parts).argmax(1).cpu().numpy()]


def _module(kind: str, dim: int, width: int, total: bool) -> Any:
    import torch
    from torch import nn

    class DeepSets(nn.Module):
        """ρ(pool φ([key, query]), query)."""

        def __init__(self) -> None:
            super().__init__()
            self.phi = nn.Sequential(
                nn.Linear(2 * dim, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()
            )
            self.rho = nn.Sequential(nn.Linear(128 + dim, 128), nn.ReLU(), nn.Linear(128, width))

        def forward(self, tokens: Any, mask: Any, query: Any, counts: np.ndarray) -> Any:
            both = torch.cat([tokens, query[:, None].expand_as(tokens)], dim=2)
            hidden = self.phi(both) * mask[:, :, None]
            pooled = hidden.sum(1) if total else hidden.sum(1) / mask.sum(1, keepdim=True)
            return _sum_owned(self.rho(torch.cat([pooled, query], dim=1)), counts)

    class SetTransformer(nn.Module):
        """The query as a token of its own, two blocks of self-attention, read out where the query
        stands.
        """

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(dim, 64)
            self.ask = nn.Linear(dim, 64)
            block = nn.TransformerEncoderLayer(
                64, 4, 128, dropout=0.0, batch_first=True, norm_first=True
            )
            self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
            self.read = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, width))

        def forward(self, tokens: Any, mask: Any, query: Any, counts: np.ndarray) -> Any:
            all_tokens = torch.cat([self.ask(query)[:, None], self.embed(tokens)], dim=1)
            real = torch.cat([torch.ones_like(mask[:, :1]), mask], dim=1)
            hidden = self.blocks(all_tokens, src_key_padding_mask=~real)
            rest = hidden[:, 1:] * mask[:, :, None]
            pooled = rest.sum(1) if total else rest.sum(1) / mask.sum(1, keepdim=True)
            return _sum_owned(self.read(torch.cat([hidden[:, 0], pooled], dim=1)), counts)

    class AttentionMIL(nn.Module):
        """Gated attention over instances (Ilse, Tomczak and Welling 2018): a learned weight for
        each key, the weighted mean of embedded keys, a linear classifier.
        """

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Sequential(nn.Linear(2 * dim, 128), nn.ReLU())
            self.gate = nn.Sequential(nn.Linear(128, 64), nn.Sigmoid())
            self.feature = nn.Sequential(nn.Linear(128, 64), nn.Tanh())
            self.score = nn.Linear(64, 1)
            self.read = nn.Linear(128 + dim, width)

        def forward(self, tokens: Any, mask: Any, query: Any, counts: np.ndarray) -> Any:
            both = torch.cat([tokens, query[:, None].expand_as(tokens)], dim=2)
            hidden = self.embed(both)
            scores = self.score(self.gate(hidden) * self.feature(hidden))[:, :, 0]
            weights = torch.softmax(scores.masked_fill(mask == 0, -torch.inf), dim=1)
            pooled = (weights[:, :, None] * hidden).sum(1)
            if total:
                pooled = pooled * mask.sum(1, keepdim=True)
            return _sum_owned(self.read(torch.cat([pooled, query], dim=1)), counts)

    modules = {"deepsets": DeepSets, "mil": AttentionMIL, "transformer": SetTransformer}
    return modules[kind]()


def _sum_owned(outputs: Any, counts: np.ndarray) -> Any:
    """Add up the outputs of the sets that one sample owns."""
    import torch

    if len(counts) == len(outputs):
        return outputs
    owner = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    return torch.zeros(len(counts), outputs.shape[1]).index_add(0, owner, outputs)
