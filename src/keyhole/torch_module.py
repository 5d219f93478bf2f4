"""The forward pass of a fitted combination as a torch module on padded sets.

The steps are those of `keyhole.fit`: prepare tokens, features or kernel rows of every embedding,
the readout of every member, their weighted sum. Sets of a sample stand in an axis of their own, s.
Where every key is the query in turn, that axis goes over the queries. In comments b counts samples,
s sets, k keys, e = d + 1 coordinates, m heads, n training samples and t all of their keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from keyhole.data.sets import SampleBatch
from keyhole.data.statistics import QUANTILES
from keyhole.data.tokens import TokenRule
from keyhole.fit.combine import Combination
from keyhole.fit.embedding import Embedding
from keyhole.fit.member import Member
from keyhole.registry import ACTIVATIONS, POOLINGS
from keyhole.solve.matrices import on_host

FAR = 1e30
"""Stands for infinity where padding must lose against every number, also in float32."""


def as_tensor(array: Any) -> Tensor:
    """An array in float64."""
    return torch.tensor(np.asarray(array, dtype=np.float64))


class Arrays(nn.Module):
    """Arrays by name, some of which may be absent: buffers of a module."""

    def __init__(self, **arrays: Any) -> None:
        super().__init__()
        for name, array in arrays.items():
            self.register_buffer(name, None if array is None else as_tensor(array))

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


@dataclass
class Padded:
    """Prepared samples.

    Attributes
    ----------
    keys : tensor (b, s, k, e)
        Scaled, a one appended; zeros where there is no key.
    mask : bool tensor (b, s, k)
    query : tensor (b, s, f)
        With its one appended; without a query [√2] alone.
    lengths : tensor (b, s)
        Keys of each set, at least 1.
    shares : tensor (b, s)
        What each set counts; 0 where there is none.
    extras : tensor (b, c) or None
        Scaled.
    """

    keys: Tensor
    mask: Tensor
    query: Tensor
    lengths: Tensor
    shares: Tensor
    extras: Tensor | None

    @property
    def key_shares(self) -> Tensor:
        """What each key counts in a mean over keys and the pooling of sets, (b, s, k)."""
        return (self.shares / self.lengths)[:, :, None] * self.mask


class PrepareModule(nn.Module):
    """A token rule: clipping, scaling, queries, hops, sample-level features made of the keys."""

    def __init__(self, rule: TokenRule) -> None:
        super().__init__()
        self.scaling = rule.scaling
        self.query = rule.query
        self.is_sum = POOLINGS[rule.pooling].is_sum
        self.adds = POOLINGS[rule.pooling].adds
        names = (
            "centre",
            "spread",
            "query_centre",
            "query_spread",
            "extras_centre",
            "extras_spread",
            "low",
            "high",
            "query_low",
            "query_high",
        )
        self.rule = Arrays(**{name: getattr(rule, name) for name in names})
        self.hops = nn.ParameterList([nn.Parameter(as_tensor(hop)) for hop in rule.hops])

    def forward(
        self, keys: Tensor, mask: Tensor, query: Tensor | None, extras: Tensor | None
    ) -> Padded:
        """Samples as the heads see them, from keys (b, s, k, d) as they were given."""
        rule = self.rule
        here = mask[..., None]
        given = torch.where(here, keys, torch.zeros_like(keys))
        if rule.low is not None:
            keys = torch.clamp(given, rule.low, rule.high)
        else:
            keys = given
        extras = self._with_set_features(given, keys, mask, extras)
        if extras is not None and rule.extras_centre is not None:
            extras = (extras - rule.extras_centre) / rule.extras_spread

        # scaled keys with a one appended
        keys = self._scaled(keys, rule.centre, rule.spread)
        keys = torch.where(here, keys, torch.zeros_like(keys))
        extended = torch.cat([keys, mask[..., None].to(keys.dtype)], -1)
        counts = mask.sum(-1)
        lengths = counts.clamp(min=1).to(keys.dtype)
        is_set = (counts > 0).to(keys.dtype)

        # queries: those given, the means of the keys, a constant one, or every key in turn
        if self.query == "each":
            keys_of_set = extended[:, 0]
            n_keys = keys_of_set.shape[1]
            is_set = mask[:, 0].to(keys.dtype)
            lengths = lengths.expand(-1, n_keys)
            return Padded(
                keys=extended.expand(-1, n_keys, -1, -1),
                mask=mask.expand(-1, n_keys, -1) & mask[:, 0, :, None],
                query=keys_of_set,
                lengths=lengths,
                shares=self._shares(is_set, lengths),
                extras=extras,
            )
        one = torch.ones_like(extended[:, :, 0, :1])
        if self.query == "mean":
            of_sets = torch.cat([keys.sum(2) / lengths[..., None], one], -1)
        elif self.query != "given":
            raise ValueError(f"query {self.query!r} has no form in a torch module.")
        elif query is not None:
            of_sets = torch.cat([self._scaled_query(query), one], -1)
        elif len(self.hops) > 0:
            zeros = torch.zeros_like(keys[:, :, 0])
            of_sets = torch.cat([zeros, math.sqrt(2.0) * one], -1)
        else:
            of_sets = math.sqrt(2.0) * one
        for hop in self.hops:
            # what is found is rounded to float32, as the token rule does
            scores = torch.einsum("bsf,pfe,bske->bspk", of_sets, hop, extended)
            weights = softmax_of(scores, mask[:, :, None])
            found = (weights @ keys).to(torch.float32).to(keys.dtype)
            of_sets = torch.cat([of_sets[..., :-1], found.flatten(start_dim=2), one], -1)
        return Padded(
            keys=extended,
            mask=mask,
            query=of_sets,
            lengths=lengths,
            shares=self._shares(is_set, lengths),
            extras=extras,
        )

    def _shares(self, is_set: Tensor, lengths: Tensor) -> Tensor:
        """c of every set: one over their number, or the number of keys where these are added up."""
        if self.is_sum:
            return is_set * lengths
        return is_set / is_set.sum(-1, keepdim=True)

    def _scaled(self, tokens: Tensor, centre: Any, spread: Any) -> Tensor:
        """Tokens, or queries, after scaling; a token of zeros stays on no sphere."""
        if self.scaling == "none":
            return tokens
        if self.scaling == "standard":
            return (tokens - centre) / spread
        if self.scaling != "sphere":
            raise ValueError(f"scaling {self.scaling!r} has no form in a torch module.")
        sizes = tokens.abs().amax(-1, keepdim=True)
        tokens = tokens / torch.where(sizes > 0, sizes, torch.ones_like(sizes))
        squares = (tokens * tokens).sum(-1, keepdim=True)
        return tokens / torch.sqrt(torch.where(squares > 0, squares, torch.ones_like(squares)))

    def _scaled_query(self, query: Tensor) -> Tensor:
        """Given queries, clipped and scaled; those of the kind of the keys as these are."""
        rule = self.rule
        if rule.low is not None:
            low = rule.low if rule.query_low is None else rule.query_low
            high = rule.high if rule.query_high is None else rule.query_high
            query = torch.clamp(query, low, high)
        if rule.query_centre is not None:
            return self._scaled(query, rule.query_centre, rule.query_spread)
        return self._scaled(query, rule.centre, rule.spread)

    def _with_set_features(
        self, given: Tensor, clipped: Tensor, mask: Tensor, extras: Tensor | None
    ) -> Tensor | None:
        """Sample-level features with those that the pooling makes of the keys."""
        if not self.adds:
            return extras
        mask = mask.flatten(1)
        if self.adds == "size":
            columns = mask.sum(-1, keepdim=True).to(given.dtype)
        elif self.adds == "statistics":
            columns = statistics(given.flatten(1, 2), mask)
        elif self.adds == "quantiles":
            columns = quantiles(clipped.flatten(1, 2), mask)
        else:
            raise ValueError(f"what pooling adds, {self.adds!r}, has no form in a torch module.")
        return columns if extras is None else torch.cat([extras, columns], -1)


def softmax_of(scores: Tensor, mask: Tensor) -> Tensor:
    """Weights that add up to one over the keys that are there."""
    return torch.softmax(torch.where(mask, scores, torch.full_like(scores, -FAR)), -1)


def mean_and_deviation(keys: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number, mean and standard deviation of the keys (b, k, d) of each sample."""
    counts = mask.sum(-1, keepdim=True).to(keys.dtype)
    here = mask[..., None]
    mean = torch.where(here, keys, torch.zeros_like(keys)).sum(1) / counts
    gaps = torch.where(here, keys - mean[:, None], torch.zeros_like(keys))
    return counts, mean, torch.sqrt((gaps * gaps).sum(1) / counts)


def statistics(keys: Tensor, mask: Tensor) -> Tensor:
    """As `tokens.with_statistics`: number, mean, deviation, least and largest value."""
    counts, mean, deviation = mean_and_deviation(keys, mask)
    here = mask[..., None]
    least = torch.where(here, keys, torch.full_like(keys, FAR)).amin(1)
    largest = torch.where(here, keys, torch.full_like(keys, -FAR)).amax(1)
    return torch.cat([counts, mean, deviation, least, largest], -1)


def quantiles(keys: Tensor, mask: Tensor) -> Tensor:
    """As `data.statistics.set_statistics`; padding is sorted behind all keys."""
    counts, mean, deviation = mean_and_deviation(keys, mask)
    numbers = mask.sum(-1)
    ordered = torch.where(mask[..., None], keys, torch.full_like(keys, FAR)).sort(dim=1).values

    def at(place: Tensor) -> Tensor:
        index = place.clamp(min=0)[:, None, None].expand(-1, 1, keys.shape[2])
        return ordered.gather(1, index)[:, 0]

    last = numbers - 1
    second = torch.minimum(torch.ones_like(last), last)
    parts = [mean, deviation, at(0 * last), at(second), at(last), at(last - 1)]
    for q in QUANTILES:
        place = q * last.to(keys.dtype)
        low = place.floor()
        low_index = low.to(torch.int64)
        share = (place - low)[:, None]
        upper = at(torch.minimum(low_index + 1, last))
        parts.append((1 - share) * at(low_index) + share * upper)
    return torch.cat([*parts, counts], -1)


class KernelModule(nn.Module):
    """The kernel of infinitely many heads of mean zero with stored samples."""

    owner: Tensor
    owner_set: Tensor

    def __init__(self, samples: SampleBatch, activation: str, scale: float) -> None:
        super().__init__()
        self.activation = activation
        self.scale = scale
        written = samples.with_extras(None).numpy().written_out()
        sets = written.sets
        lengths = sets.lengths
        n_sets_of_each = np.diff(written.offsets)
        owner_set = np.repeat(np.arange(len(sets)), lengths)
        owner = np.repeat(np.repeat(np.arange(len(n_sets_of_each)), n_sets_of_each), lengths)
        self.n = len(n_sets_of_each)
        self.stored = Arrays(
            keys=sets.extended_keys(),  # (t, e)
            query=sets.seen_query(),
            weights=(written.coefficients / lengths)[owner_set],
        )
        self.register_buffer("owner_set", torch.tensor(owner_set))
        self.register_buffer("owner", torch.tensor(owner))

    def rows(self, x: Padded) -> Tensor:
        """K(x, x_j), (b, n)."""
        keys = self.stored.keys
        query = self.stored.query
        lengths = lengths_of(keys)  # (t,)
        query_lengths = lengths_of(query)
        dots = x.keys @ keys.T  # (b, s, k, t)
        cosines = dots / (lengths_of(x.keys)[..., None] * lengths)
        of_queries = (x.query @ query.T) / (lengths_of(x.query)[..., None] * query_lengths)
        correlation = of_queries[..., self.owner_set][:, :, None] * cosines
        deviation = self.scale * query_lengths[self.owner_set] * lengths
        pairs = self._moment(correlation, self._deviations(x)[..., None], deviation) * dots
        of_keys = (x.key_shares[..., None] * pairs).sum((1, 2)) * self.stored.weights  # (b, t)
        zeros = torch.zeros_like(of_keys[:, :1]).expand(-1, self.n)
        return zeros.index_add(1, self.owner, of_keys)

    def own(self, x: Padded) -> Tensor:
        """K(x, x), (b,): all pairs of the keys of each sample."""
        keys = x.keys.flatten(1, 2)  # (b, p, e)
        norms = lengths_of(x.keys).flatten(1)
        query = x.query / lengths_of(x.query)[..., None]
        query = query[:, :, None].expand(-1, -1, x.keys.shape[2], -1).flatten(1, 2)
        shares = x.key_shares.flatten(1)
        dots = keys @ keys.transpose(1, 2)
        cosines = dots / (norms[:, :, None] * norms[:, None, :])
        correlation = (query @ query.transpose(1, 2)) * cosines
        # a key with itself: exactly 1, near which the moment of a step is infinitely steep
        places = torch.cumsum(torch.ones_like(norms[0]), 0)
        is_same = places[:, None] == places
        correlation = torch.where(is_same, torch.ones_like(correlation), correlation)
        deviations = self._deviations(x).flatten(1)
        moments = self._moment(correlation, deviations[:, :, None], deviations[:, None, :])
        return (shares[:, None, :] @ (moments * dots) @ shares[:, :, None])[:, 0, 0]

    def _deviations(self, x: Padded) -> Tensor:
        """τ of the score of every key, (b, s, k)."""
        return self.scale * lengths_of(x.query)[..., None] * lengths_of(x.keys)

    def _moment(self, correlation: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """E σ(u)σ(v) of scores of mean zero; see `attention.activations.gaussian_moment`."""
        rho = correlation.clamp(-1.0, 1.0)
        product = left * right
        match self.activation:
            case "relu":
                root = torch.sqrt((1 - rho) * (1 + rho))
                return product * (root + (math.pi - torch.acos(rho)) * rho) / (2 * math.pi)
            case "linear":
                return product * rho
            case "square":
                return (product * product) * (1 + 2 * rho * rho)
            case "step":
                return 0.25 + torch.asin(rho) / (2 * math.pi)
            case "exp":
                return torch.exp((left * left + right * right) / 2 + product * rho)
        raise ValueError(f"the kernel of {self.activation!r} has no form in a torch module.")


def lengths_of(vectors: Tensor) -> Tensor:
    """Lengths of vectors, 1 of those that stand for nothing."""
    lengths = torch.linalg.vector_norm(vectors, dim=-1)
    return torch.where(lengths > 0, lengths, torch.ones_like(lengths))


class EmbeddingModule(nn.Module):
    """Features of samples, or the kernel with the training samples."""

    def __init__(self, embedding: Embedding, *, is_compared: bool) -> None:
        super().__init__()
        settings = embedding.settings
        self.prepare = PrepareModule(embedding.rule)
        self.activation = ACTIVATIONS[settings.activation]
        self.is_finite = embedding.is_finite
        self.heads: nn.Parameter | None = None
        self.kernel: KernelModule | None = None
        train = embedding.train
        if embedding.draw is not None:
            draw = embedding.draw.seen_by(query=train.has_query)
            self.heads = nn.Parameter(as_tensor(draw.block(0, draw.n_heads)))
        elif settings.has_heads:
            samples = train if embedding.landmarks is None else embedding.landmarks
            _, scale = moments_of(embedding)
            self.kernel = KernelModule(samples, settings.activation, scale)
        compared = None
        if is_compared:
            compared = train.extras
            if self.is_finite:
                compared = on_host(embedding.features(train))
        self.arrays = Arrays(whitening=embedding.whitening, compared=compared)

    def features(self, x: Padded) -> Tensor:
        """φ(x), sample-level features last, (b, p)."""
        parts = []
        if self.heads is not None:
            directions = torch.einsum("bsf,mfe->bsme", x.query, self.heads)
            scores = directions @ x.keys.transpose(2, 3)  # (b, s, m, k)
            mask = x.mask[:, :, None]
            if self.activation.is_pointwise:
                weights = self.activation.value(torch, scores) / x.lengths[:, :, None, None]
            else:
                lowest = torch.full_like(scores, -FAR)
                weights = self.activation.value(torch, torch.where(mask, scores, lowest))
            weights = torch.where(mask, weights, torch.zeros_like(weights))
            of_sets = (weights @ x.keys) / math.sqrt(self.heads.shape[0])  # (b, s, m, e)
            parts.append((x.shares[..., None, None] * of_sets).sum(1).flatten(1))
        elif self.kernel is not None:
            parts.append(self.kernel.rows(x) @ self.arrays.whitening)
        if x.extras is not None:
            parts.append(x.extras)
        return torch.cat(parts, -1)

    def rows(self, x: Padded) -> Tensor:
        """⟨μ, μ_j⟩ with the training samples, (b, n)."""
        if self.is_finite:
            return self.features(x) @ self.arrays.compared.T
        assert self.kernel is not None
        rows = self.kernel.rows(x)
        if x.extras is not None:
            rows = rows + x.extras @ self.arrays.compared.T
        return rows

    def own(self, x: Padded) -> Tensor:
        """|μ|², (b,)."""
        if self.is_finite:
            return self.features(x).square().sum(-1)
        assert self.kernel is not None
        own = self.kernel.own(x)
        if x.extras is not None:
            own = own + x.extras.square().sum(-1)
        return own


def moments_of(embedding: Embedding) -> tuple[Any, float]:
    """Mean and scale of the heads of an exact kernel."""
    samples = embedding.train
    heads: Any = embedding.heads
    if samples.query_dim == samples.dim:
        mean, scale = heads.moments(samples.dim)
    else:
        mean, scale = heads.moments(samples.dim, samples.query_dim)
    return mean, float(scale)


class MemberModule(nn.Module):
    """The readout of one member: its outputs from its embedding."""

    def __init__(self, member: Member, number: int) -> None:
        super().__init__()
        self.number = number
        self.bandwidth = 0.0
        norms = centres = whitening = None
        if member.second is not None:
            self.bandwidth = float(member.second.bandwidth)
            norms = member.second.norms
            centres = member.second.centres
            whitening = member.second.whitening
        self.arrays = Arrays(norms=norms, centres=centres, whitening=whitening)
        self.coef = nn.Parameter(as_tensor(member.coef))
        self.intercept = nn.Parameter(as_tensor(member.intercept))

    def forward(self, embedding: EmbeddingModule, x: Padded) -> Tensor:
        """f of every sample, (b, t)."""
        if self.bandwidth == 0.0:
            compared = embedding.features(x) if embedding.is_finite else embedding.rows(x)
            return compared @ self.coef + self.intercept
        if self.arrays.centres is not None:
            rows = embedding.features(x) @ self.arrays.centres.T
        else:
            rows = embedding.rows(x)
        squares = embedding.own(x)[:, None] + self.arrays.norms - 2.0 * rows
        compared = torch.exp(-squares.clamp(min=0.0) / self.bandwidth)
        if self.arrays.whitening is not None:
            compared = compared @ self.arrays.whitening
        return compared @ self.coef + self.intercept


class AttentionModule(nn.Module):
    """A fitted combination of attention layers, in float64; ``module.float()`` makes it float32.

    ``module(keys, mask, query, extras)`` is ``predict`` of a regressor and ``decision_function`` of
    a classifier; `predict_proba` has the probabilities. Sets of different lengths are padded, and
    ``mask`` says which keys are there. Heads, values and intercepts are parameters, which can be
    trained from where the closed form left them; all else is in buffers.

    Examples
    --------
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(80, n_keys=4, dim=3, seed=0)
    >>> y = kh.targets.TokenPower(2, dim=3)(sets)
    >>> model = kh.AttentionRegressor(20, kh.GaussianHeads(), random_state=0).fit(sets, y)
    >>> keys = torch.tensor(sets.tokens.reshape(80, 4, 3))
    >>> outputs = model.to_torch()(keys, query=torch.tensor(sets.query))
    >>> bool(np.allclose(outputs.detach(), model.predict(sets)))
    True
    """

    def __init__(
        self,
        combination: Combination,
        *,
        dim: int,
        query_dim: int,
        n_extras: int,
        has_groups: bool,
        single_output: bool,
        classifies: bool,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.query_dim = query_dim
        self.n_extras = n_extras
        self.has_groups = has_groups
        self.single_output = single_output
        self.classifies = classifies
        self.temperature = combination.temperature
        embeddings: list[Embedding] = []
        members = []
        for member in combination.members:
            numbers = [i for i, known in enumerate(embeddings) if known is member.embedding]
            if not numbers:
                embeddings.append(member.embedding)
                numbers = [len(embeddings) - 1]
            members.append(MemberModule(member, numbers[0]))
        are_compared = {
            id(member.embedding)
            for member in combination.members
            if not member.embedding.is_finite
            or (member.second is not None and not member.second.has_centres)
        }
        self.members = nn.ModuleList(members)
        self.embeddings = nn.ModuleList(
            [EmbeddingModule(e, is_compared=id(e) in are_compared) for e in embeddings]
        )
        self.weights = nn.Parameter(as_tensor(combination.weights))
        self.intercept = nn.Parameter(as_tensor(combination.intercept))

    def forward(
        self,
        keys: Tensor,
        mask: Tensor | None = None,
        query: Tensor | None = None,
        extras: Tensor | None = None,
    ) -> Tensor:
        """Outputs of a batch of samples: (n,), or (n, outputs) as the estimator has them.

        Parameters
        ----------
        keys : tensor (n, N, d), for samples of several sets (n, S, N, d)
            Padded with anything.
        mask : bool tensor (n, N) or (n, S, N), optional
            True where a key is there; by default everywhere.
        query : tensor (n, d_q) or (n, S, d_q), optional
            If the estimator was fitted to sets with a query.
        extras : tensor (n, c), optional
            If it was fitted to sample-level features.
        """
        outputs = self.scores(keys, mask, query, extras)
        return outputs[:, 0] if self.single_output else outputs

    def predict_proba(
        self,
        keys: Tensor,
        mask: Tensor | None = None,
        query: Tensor | None = None,
        extras: Tensor | None = None,
    ) -> Tensor:
        """Probabilities of the classes, (n, classes), as those of the classifier."""
        return self.probabilities_of(self.scores(keys, mask, query, extras))

    def probabilities_of(self, scores: Tensor) -> Tensor:
        """Probabilities of the classes, from the scores of all outputs."""
        if not self.classifies:
            raise AttributeError("probabilities are those of a classifier: call the module.")
        if scores.shape[1] == 1 and self.temperature is not None:
            scores = torch.cat([-scores, scores], -1)
        elif scores.shape[1] == 1:
            scores = torch.cat([torch.zeros_like(scores), scores], -1)
        if self.temperature is not None:
            scores = self.temperature * scores
        return torch.softmax(scores, -1)

    def scores(
        self, keys: Tensor, mask: Tensor | None, query: Tensor | None, extras: Tensor | None
    ) -> Tensor:
        """f of every sample, (n, t)."""
        if mask is None:
            mask = torch.ones_like(keys[..., 0], dtype=torch.bool)
        self._check(keys, mask, query, extras)
        if not self.has_groups:
            # one set in an axis of sets
            keys = keys[:, None]
            mask = mask[:, None]
            query = None if query is None else query[:, None]
        total: Tensor = self.intercept
        embeddings: Any = self.embeddings
        members: Any = self.members
        prepared = [embedding.prepare(keys, mask, query, extras) for embedding in embeddings]
        for i, member in enumerate(members):
            embedding = embeddings[member.number]
            total = total + self.weights[i] * member(embedding, prepared[member.number])
        return total

    def _check(
        self, keys: Tensor, mask: Tensor, query: Tensor | None, extras: Tensor | None
    ) -> None:
        """Raise unless there is what the estimator was fitted to, of the right shapes."""
        axes = "n, S, N" if self.has_groups else "n, N"
        n_axes = 4 if self.has_groups else 3
        if keys.ndim != n_axes or keys.shape[-1] != self.dim:
            raise ValueError(
                f"`keys` must have shape ({axes}, {self.dim}): got {tuple(keys.shape)}. Pad sets "
                "to the longest, and say with `mask` which keys are there."
            )
        if mask.dtype != torch.bool or mask.shape != keys.shape[:-1]:
            raise ValueError(
                f"`mask` must be bool of shape ({axes}), True where a key is there: got "
                f"{mask.dtype} of shape {tuple(mask.shape)}."
            )
        for name, value, size in (
            ("query", query, self.query_dim),
            ("extras", extras, self.n_extras),
        ):
            if (value is not None) != (size > 0):
                there = "was" if size else "was not"
                raise ValueError(
                    f"`{name}` {there} there when the estimator was fitted, and must be so here."
                )
            if value is not None and value.shape[-1] != size:
                raise ValueError(
                    f"`{name}` must have {size} columns: got shape {tuple(value.shape)}."
                )
        # what follows reads values, which a compiled or exported module has none of
        if torch.compiler.is_compiling():
            return
        has_keys = mask.flatten(1).any(1)
        if not bool(has_keys.all()):
            first = int((~has_keys).nonzero()[0, 0])
            raise ValueError(
                f"every sample must have at least one key: `mask` has none for sample {first}."
            )
