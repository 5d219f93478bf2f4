"""A fitted layer as a torch module: the same outputs, and parameters that can be trained on.

The steps are those at the head of `keyhole.export.constants`, for a whole batch of padded sets.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from keyhole.export.constants import LayerConstants, SelectionConstants
from keyhole.key_selection import TIE_RESOLUTION


def to_torch(model: Any) -> AttentionModule:
    """The layer of a fitted estimator as a module. See `AttentionModule`."""
    return AttentionModule(LayerConstants.of(model, "to_torch"))


class AttentionModule(nn.Module):
    """One attention layer with the parameters of a fitted estimator.

    ``module(keys, mask, query, extras)`` is ``predict`` of a regressor and ``decision_function`` of
    a classifier, up to rounding; `predict_proba` has the probabilities. Sets of different lengths
    are padded, and ``mask`` says which keys are there.

    Parameters of the module, in the notation of docs/explanation/textbook.md:

    ================= ==================== =========================================================
    ``W``             (M, D_q, D)          query-key matrices; without a query their last row alone
    ``v``             (M, D, t)            values, where features carry M^{-1/2}
    ``b``             (t,)                 intercept
    ``U.0``, ``U.1``… (P, D_h, D)          query-key matrices of the hops before the last
    ``extras_values`` (c, t)               coefficients of scaled sample-level features
    ``temperature``   ()                   c of softmax(c · scores)
    ================= ==================== =========================================================

    All of them can be trained, from where the closed-form solution left them. To keep the heads
    frozen, say ``module.W.requires_grad_(False)``. How tokens are scaled is stored in buffers.

    Examples
    --------
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(80, n_keys=4, dim=3, seed=0)
    >>> y = kh.targets.TokenPower(2, dim=3)(sets)
    >>> model = kh.AttentionRegressor(20, random_state=0).fit(sets, y)
    >>> module = model.to_torch()
    >>> keys = torch.tensor(sets.tokens.reshape(80, 4, 3))
    >>> outputs = module(keys, query=torch.tensor(sets.query))
    >>> bool(np.allclose(outputs.detach(), model.predict(sets)))
    True
    """

    # buffers
    centre: Tensor | None
    spread: Tensor | None
    query_centre: Tensor | None
    query_spread: Tensor | None
    extras_centre: Tensor | None
    extras_spread: Tensor | None
    class_has_weight: Tensor | None

    def __init__(self, constants: LayerConstants) -> None:
        super().__init__()
        dtype = torch.float64 if constants.dtype == "float64" else torch.float32

        def tensor(array: Any) -> Tensor:
            return torch.tensor(np.asarray(array, dtype=np.float64), dtype=dtype)

        # settings
        self.scaling = constants.scaling
        self.query_rule = constants.query
        self.pooling = constants.pooling
        self.activation = constants.activation
        self.dim = constants.dim
        self.query_dim = constants.query_dim
        self.n_extras = constants.n_extras
        self.has_constant_query = constants.has_constant_query
        self.single_output = constants.single_output
        self.classes = constants.classes
        self.first_of_two = constants.first_of_two
        self.scale = constants.scale

        # which keys are seen
        self.selector: KeySelector | None = None
        if constants.selection is not None:
            self.selector = KeySelector(constants.selection)

        # what is trained
        self.W = nn.Parameter(tensor(constants.W))
        self.v = nn.Parameter(tensor(constants.v))
        self.b = nn.Parameter(tensor(constants.b))
        self.U = nn.ParameterList([nn.Parameter(tensor(hop)) for hop in constants.hops])
        self.extras_values: nn.Parameter | None = None
        if constants.extras_values is not None:
            self.extras_values = nn.Parameter(tensor(constants.extras_values))
        self.temperature: nn.Parameter | None = None
        if constants.temperature is not None:
            self.temperature = nn.Parameter(tensor(constants.temperature))

        # what is kept: how tokens are scaled, and which classes have weight
        buffers = {
            "centre": constants.centre,
            "spread": constants.spread,
            "query_centre": constants.query_centre,
            "query_spread": constants.query_spread,
            "extras_centre": constants.extras_centre,
            "extras_spread": constants.extras_spread,
        }
        for name, array in buffers.items():
            self.register_buffer(name, None if array is None else tensor(array))
        has_weight = constants.class_has_weight
        self.register_buffer(
            "class_has_weight", None if has_weight is None else torch.tensor(np.array(has_weight))
        )

    def forward(
        self,
        keys: Tensor,
        mask: Tensor | None = None,
        query: Tensor | None = None,
        extras: Tensor | None = None,
    ) -> Tensor:
        """Outputs of a batch of sets: (n,), or (n, outputs) as the estimator has them.

        Parameters
        ----------
        keys : tensor (n, N, d)
            Padded to the longest set, with anything.
        mask : bool tensor (n, N), optional
            True where a key is there; by default everywhere.
        query : tensor (n, d_q), optional
            If the estimator was fitted to sets with a query, and uses it.
        extras : tensor (n, c), optional
            If it was fitted to sample-level features.
        """
        outputs = self._outputs(keys, mask, query, extras)
        if self.single_output:
            return outputs[:, 0]
        return outputs

    def predict_proba(
        self,
        keys: Tensor,
        mask: Tensor | None = None,
        query: Tensor | None = None,
        extras: Tensor | None = None,
    ) -> Tensor:
        """Probabilities of the classes, (n, classes), as those of the classifier."""
        if self.temperature is None:
            raise AttributeError(
                "probabilities are those of a classifier that has them: this module has scores "
                "only. Call it."
            )
        scores = self._outputs(keys, mask, query, extras)
        if scores.shape[1] == 1:
            scores = torch.cat([self.first_of_two * scores, scores], dim=1)
        if self.class_has_weight is not None:
            scores = scores.masked_fill(~self.class_has_weight, -math.inf)
        return torch.softmax(self.temperature * scores, dim=1)

    def _outputs(
        self, keys: Tensor, mask: Tensor | None, query: Tensor | None, extras: Tensor | None
    ) -> Tensor:
        """f of every sample, (n, t)."""
        if mask is None:
            mask = keys.new_ones(keys.shape[:2], dtype=torch.bool)
        self._check(keys, mask, query, extras)

        # 0. of large sets, the keys that matter most alone
        if self.selector is not None:
            mask = self.selector(keys, mask, query)

        # sample-level features that the pooling makes of the keys, after those that are given
        of_sets = self._set_features(keys, mask)
        if extras is None:
            extras = of_sets
        elif of_sets is not None:
            extras = torch.cat([extras, of_sets], dim=1)

        # 1. scaled tokens, each with a one appended; zeros where there is no key
        keys = keys.masked_fill(~mask[:, :, None], 0.0)
        keys = self._scaled(keys, self.centre, self.spread)
        keys = keys.masked_fill(~mask[:, :, None], 0.0)
        ones = keys.new_ones((*keys.shape[:2], 1))
        extended_keys = torch.cat([keys, ones], dim=2)  # n k e
        counts = mask.sum(dim=1).to(keys.dtype)  # n

        # 2. queries x~_0 of every set, (n, j, f): one, or every key in turn
        queries = self._queries(keys, extended_keys, counts, query)

        # 3. hops extend the query by what they find, rounded to float32 as the estimator does
        for U in self.U:
            scores = torch.einsum("nf,pfe,nke->npk", queries[:, 0], U, extended_keys)
            weights = _softmax(scores, mask[:, None])
            found = (weights @ keys).to(torch.float32).to(keys.dtype)  # n p d
            query_without_one = queries[:, 0, :-1]
            extended = [query_without_one, found.flatten(start_dim=1), ones[:, 0]]
            queries = torch.cat(extended, dim=1)[:, None]

        # 4. weights of keys in every head, (n, j, m, k)
        directions = torch.einsum("njf,mfe->njme", queries, self.W)
        scores = torch.einsum("njme,nke->njmk", directions, extended_keys)
        key_mask = mask[:, None, None]
        if self.activation == "softmax":
            weights = _softmax(scores, key_mask)
        else:
            weights = _sigma(self.activation, scores) / counts[:, None, None, None]
            weights = weights.masked_fill(~key_mask, 0.0)

        # 5. features φ of every query, pooled over queries; outputs
        phi = self.scale * torch.einsum("njmk,nke->njme", weights, extended_keys)
        if self.query_rule == "each":
            # keys that are not there are no queries
            phi = (phi * mask[:, :, None, None]).sum(dim=1)
            n_queries = counts
        else:
            phi = phi[:, 0]
            n_queries = torch.ones_like(counts)
        outputs = torch.einsum("nme,met->nt", phi, self.v)
        if self.pooling == "sum":
            outputs = outputs * counts[:, None]
        else:
            outputs = outputs / n_queries[:, None]
        outputs = outputs + self.b
        if self.extras_values is not None and extras is not None:
            assert self.extras_centre is not None
            assert self.extras_spread is not None
            z = (extras - self.extras_centre) / self.extras_spread
            outputs = outputs + z @ self.extras_values
        return outputs

    def _set_features(self, keys: Tensor, mask: Tensor) -> Tensor | None:
        """Size, or size and statistics, of the keys of each set; None for other poolings."""
        sizes = mask.sum(dim=1, keepdim=True).to(keys.dtype)  # n 1
        if self.pooling == "mean+size":
            return sizes
        if self.pooling != "mean+statistics":
            return None
        is_key = mask[:, :, None]
        mean = keys.masked_fill(~is_key, 0.0).sum(dim=1) / sizes
        deviations = (keys - mean[:, None]).masked_fill(~is_key, 0.0)
        spread = (deviations.square().sum(dim=1) / sizes).sqrt()
        least = keys.masked_fill(~is_key, math.inf).amin(dim=1)
        largest = keys.masked_fill(~is_key, -math.inf).amax(dim=1)
        return torch.cat([sizes, mean, spread, least, largest], dim=1)

    def _queries(
        self, keys: Tensor, extended_keys: Tensor, counts: Tensor, query: Tensor | None
    ) -> Tensor:
        """x~_0 of every set before any hop, (n, j, D_q)."""
        one = keys.new_ones((len(keys), 1))
        if self.query_rule == "each":
            return extended_keys
        if self.query_rule == "mean":
            means = keys.sum(dim=1) / counts[:, None]
            return torch.cat([means, one], dim=1)[:, None]
        if query is not None:
            query = self._scaled(query, self.query_centre, self.query_spread)
            return torch.cat([query, one], dim=1)[:, None]
        constant = math.sqrt(2.0) * one
        if self.has_constant_query:
            return constant[:, None]
        zeros = keys.new_zeros((len(keys), self.dim))
        return torch.cat([zeros, constant], dim=1)[:, None]

    def _scaled(self, tokens: Tensor, centre: Tensor | None, spread: Tensor | None) -> Tensor:
        """Tokens, or queries, after scaling; a token of zeros stays on no sphere."""
        if self.scaling == "standard" and centre is not None and spread is not None:
            return (tokens - centre) / spread
        if self.scaling == "sphere":
            return _on_sphere(tokens)
        return tokens

    def _check(
        self, keys: Tensor, mask: Tensor, query: Tensor | None, extras: Tensor | None
    ) -> None:
        """Raise unless there is what the estimator was fitted to, of the right shapes."""
        if keys.ndim != 3 or keys.shape[2] != self.dim:
            raise ValueError(
                f"`keys` must have shape (n, N, {self.dim}): got {tuple(keys.shape)}. Pad sets to "
                "the longest, and say with `mask` which keys are there."
            )
        if mask.dtype != torch.bool or mask.shape != keys.shape[:2]:
            raise ValueError(
                f"`mask` must be bool of shape {tuple(keys.shape[:2])}, True where a key is there: "
                f"got {mask.dtype} of shape {tuple(mask.shape)}."
            )
        # what follows reads values, which a compiled module has none of
        if torch.compiler.is_compiling():
            return
        if not bool(mask.any(dim=1).all()):
            first = int((~mask.any(dim=1)).nonzero()[0, 0])
            raise ValueError(
                f"every set must have at least one key: `mask` of set {first} has none."
            )
        inputs = (("query", query, self.query_dim), ("extras", extras, self.n_extras))
        for name, value, width in inputs:
            if width and (value is None or tuple(value.shape) != (len(keys), width)):
                shape = None if value is None else tuple(value.shape)
                raise ValueError(
                    f"`{name}` must have shape ({len(keys)}, {width}), as in fit: got {shape}."
                )
            if not width and value is not None and not self._ignores(name):
                raise ValueError(
                    f"the model was fitted without {name}: got some of shape {tuple(value.shape)}. "
                    f"Leave `{name}` out."
                )

    def _ignores(self, name: str) -> bool:
        """Whether an input that was there in fit has no effect: a query that keys replace."""
        return name == "query" and self.query_rule != "given"


class KeySelector(nn.Module):
    """Which keys of padded sets the layer sees; see `keyhole.export.constants.SelectionConstants`.

    Nothing of it is trained: a choice of keys has no gradient. It computes in float64 whatever the
    precision of the module, as the estimator does, so that both choose the same keys;
    ``module.float()`` makes it compute in float32.
    """

    W: Tensor
    v: Tensor
    centre: Tensor
    spread: Tensor
    query_centre: Tensor | None
    query_spread: Tensor | None

    def __init__(self, constants: SelectionConstants) -> None:
        super().__init__()
        self.n_keys = constants.n_keys
        buffers = {
            "W": constants.W,
            "v": constants.v,
            "centre": constants.centre,
            "spread": constants.spread,
            "query_centre": constants.query_centre,
            "query_spread": constants.query_spread,
        }
        for name, array in buffers.items():
            tensor = None
            if array is not None:
                tensor = torch.tensor(np.asarray(array, dtype=np.float64))
            self.register_buffer(name, tensor)

    @torch.no_grad()
    def forward(self, keys: Tensor, mask: Tensor, query: Tensor | None = None) -> Tensor:
        """The mask of the keys that are kept: (n, N)."""
        # tokens standardised and of length one, with a one appended
        is_key = mask[:, :, None]
        keys = keys.masked_fill(~is_key, 0.0).to(self.W.dtype)
        keys = _on_sphere((keys - self.centre) / self.spread)
        extended_keys = torch.cat([keys, keys.new_ones((*keys.shape[:2], 1))], dim=2)  # n k e
        one = keys.new_ones((len(keys), 1))
        if query is not None and self.query_centre is not None and self.query_spread is not None:
            query = _on_sphere((query.to(self.W.dtype) - self.query_centre) / self.query_spread)
            extended_query = torch.cat([query, one], dim=1)
        else:
            extended_query = math.sqrt(2.0) * one

        # what each key adds to each output, (n, k, t), up to a factor that a set has in common
        directions = torch.einsum("nf,mfe->nme", extended_query, self.W)
        scores = torch.einsum("nme,nke->nmk", directions, extended_keys).relu()
        of_values = torch.einsum("met,nke->nmkt", self.v, extended_keys)
        parts = torch.einsum("nmk,nmkt->nkt", scores, of_values).masked_fill(~is_key, 0.0)

        # how far each is from the mean of its set, in whole steps: rounding decides nothing
        counts = mask.sum(dim=1).to(keys.dtype)[:, None, None]
        means = parts.sum(dim=1, keepdim=True) / counts
        relevance = (parts - means).abs().amax(dim=2)
        largest = parts.abs().amax(dim=(1, 2))[:, None]
        unit = torch.where(largest > 0, largest, 1.0)
        steps = (relevance / unit / TIE_RESOLUTION).round().masked_fill(~mask, -1.0)

        # the keys that are farthest away; of equal ones the first, which topk does not promise
        order = steps.argsort(dim=1, descending=True, stable=True)
        strongest = order[:, : self.n_keys]
        kept = torch.zeros_like(mask).scatter(1, strongest, True)
        return kept & mask


def _on_sphere(tokens: Tensor) -> Tensor:
    """Tokens of length one; a token of zeros stays."""
    # the largest coordinate is divided out first, so that squares cannot overflow
    largest = tokens.abs().amax(dim=-1, keepdim=True)
    units = tokens / torch.where(largest > 0, largest, 1.0)
    squares = units.square().sum(dim=-1, keepdim=True)
    return units / torch.where(squares > 0, squares, 1.0).sqrt()


def _sigma(activation: str, scores: Tensor) -> Tensor:
    """σ of every score."""
    if activation == "relu":
        return scores.relu()
    if activation == "square":
        return scores.square()
    if activation == "step":
        return (scores > 0).to(scores.dtype)
    if activation == "exp":
        return scores.exp()
    return scores


def _softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Weights that sum to one over the keys that are there."""
    return torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
