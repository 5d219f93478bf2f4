"""What a fitted model attends to: the weights of its hops on the rows of every sample."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole.attention.features import attention_weights
from keyhole.attention.heads import HeadDraw
from keyhole.data.tokens import weights_of_hop
from keyhole.fit.member import Member

N_DRAWN = 256
"""Heads that stand for infinitely many."""


def weights_of_hops(samples: Any, member: Member) -> list[list[Float[np.ndarray, "p k"]]]:
    """For every hop, the weights (patterns, keys) of each sample; the last hop is the random heads.

    The plain version of that hop is the mean over heads of `keyhole.textbook.attention_weights`.
    """
    tokens = member.embedding.rule
    heads = member.settings.heads
    weights = []

    # learned hops: each sees queries that the hops before it have extended
    for number, hop in enumerate(tokens.hops):
        before = replace(tokens, hops=tokens.hops[:number])
        weights.append(weights_of_hop(before.apply(samples).sets, hop))

    # random heads: the mean weight of the heads around each mean of their distribution
    ready = tokens.apply(samples)
    sets = ready.sets
    if tokens.query == "each":  # one set for each key as query
        sets = ready.written_out().sets

    # infinitely many heads are represented by a draw of some
    drawn = member.embedding.draw
    if drawn is None:
        drawn = HeadDraw(heads, N_DRAWN, sets.dim, 0, sets.query_dim)
    n_means = len(getattr(heads, "means_", (None,)))
    weights.append(
        attention_weights(
            sets,
            drawn,
            member.settings.activation,
            min(n_means, drawn.n_heads),
        )
    )

    # the keys of all sets stand one after the other: one array (patterns, keys) for each set
    weights_of_sets = []
    for of_hop in weights:
        parts = np.split(of_hop, sets.offsets[1:-1])
        weights_of_sets.append([part.T for part in parts])
    return weights_of_sets
