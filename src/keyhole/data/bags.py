"""Synthetic bags of many keys, a few of which decide the label: what a pathology slide is like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from keyhole._checks import check_choice, check_count, check_number, check_seed
from keyhole.data import arrays
from keyhole.data.sets import SetBatch


@dataclass(frozen=True)
class SyntheticBags:
    """What `make_bags` draws: bags, their labels, and which of their keys are the reason.

    Attributes
    ----------
    sets : SetBatch
        n bags of keys without a query.
    target : array (n,) of int
        1 for a bag that has signal keys, else 0.
    is_signal : list of n arrays (N_i,) of bool
        Which keys of a bag are signal keys; none of a bag of label 0.
    coordinates : list of n arrays (N_i, 2)
        Where each key lies in its bag: column and row of a square grid, as patches of a slide.
    types : list of n arrays (N_i,) of int
        The tissue type of each key; ``n_types`` for a signal key.
    names : tuple of str
        A name for every bag.
    """

    sets: SetBatch
    target: Int[np.ndarray, " n"] = field(repr=False)
    is_signal: list[Bool[np.ndarray, " _"]] = field(repr=False)
    coordinates: list[Float[np.ndarray, "_ 2"]] = field(repr=False)
    types: list[Int[np.ndarray, " _"]] = field(repr=False)
    names: tuple[str, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.target)


def make_bags(
    n_bags: int,
    n_keys: int | Sequence[int],
    dim: int,
    share: float = 0.01,
    *,
    n_types: int = 40,
    concentration: float = 0.5,
    positive: float = 0.5,
    separation: float = 1.0,
    noise: float = 1.0,
    dtype: str = "float32",
    random_state: int = 0,
) -> SyntheticBags:
    """Draw bags in which a small share of the keys decides the label.

    Every bag is a mixture of tissue types: its proportions are drawn from a Dirichlet distribution,
    and a key is the centre of its type plus Gaussian noise. In bags of label 1 a share of the keys
    is drawn around one more centre, the signal. The keys of a bag lie on a square grid, types in
    bands and signal keys next to each other.

    Parameters
    ----------
    n_bags : int
    n_keys : int, or pair of int
        Keys of every bag; or the least and the largest number, each number being as likely.
    dim : int
        Coordinates of a key.
    share : float
        Share of signal keys in a bag of label 1; at least one key is.
    n_types : int
        Tissue types.
    concentration : float
        Of the Dirichlet distribution: a small number gives bags of few types, a large one bags that
        are alike.
    positive : float
        Share of bags of label 1.
    separation : float
        Distance of the signal centre from a tissue centre, in units of the mean distance between
        tissue centres. The signal is easy to tell from tissue at 1, and hard at 0.1.
    noise : float
        Standard deviation of each coordinate of a key about its centre; coordinates of centres have
        the standard deviation 1.
    dtype : "float32" or "float64"
    random_state : int
        Of everything that is drawn. Bags to train and bags to test are parts of one draw, because
        another draw has other tissue types.

    Examples
    --------
    >>> bags = make_bags(6, (20, 30), dim=4, share=0.2)
    >>> bags.sets
    SetBatch(6 sets, 22–29 keys each (146 in all), dim 4, no query, float32)
    >>> bags.target.tolist()
    [0, 0, 0, 1, 1, 1]
    >>> [int(is_signal.sum()) for is_signal in bags.is_signal]
    [0, 0, 0, 4, 6, 5]
    """
    # the arguments
    n_bags = check_count(n_bags, "n_bags")
    least, most = _key_range(n_keys)
    dim = check_count(dim, "dim")
    n_types = check_count(n_types, "n_types")
    share = _check_share(share, "share")
    positive = _check_share(positive, "positive")
    concentration = check_number(concentration, "concentration", minimum=1e-3)
    separation = check_number(separation, "separation", minimum=0.0)
    noise = check_number(noise, "noise", minimum=0.0)
    number: Any = np.dtype(check_choice(dtype, "dtype", ("float32", "float64")))
    rng = np.random.default_rng(check_seed(random_state, "random_state"))

    # centres of the tissue types; two of them are √(2d) apart on average, and the signal is one of
    # them moved by a multiple of that
    centres = rng.standard_normal((n_types + 1, dim))
    direction = rng.standard_normal(dim)
    direction *= math.sqrt(2 * dim) / np.linalg.norm(direction)
    centres[n_types] = centres[0] + separation * direction

    # labels in random order, and the size of every bag
    n_positive = round(positive * n_bags)
    target = rng.permutation((np.arange(n_bags) < n_positive).astype(np.int64))
    lengths = rng.integers(least, most + 1, n_bags)

    # the type of every key, and where it lies
    types = []
    coordinates = []
    is_signal = []
    for label, length in zip(target, lengths, strict=True):
        proportions = rng.dirichlet(np.full(n_types, concentration))
        n_signal = max(1, round(share * length)) if label else 0
        types_of_bag, coordinates_of_bag = _laid_out(rng, proportions, int(length), n_signal)
        types.append(types_of_bag)
        coordinates.append(coordinates_of_bag)
        is_signal.append(types_of_bag == n_types)

    # the keys, written to their place in one array: noise, and the centre of their type
    offsets = arrays.offsets_of(lengths)
    tokens = np.empty((int(offsets[-1]), dim), number)
    typed_centres = centres.astype(number)
    for start, types_of_bag in zip(offsets[:-1], types, strict=True):
        keys = tokens[start : start + len(types_of_bag)]
        keys[:] = rng.standard_normal(keys.shape, number)
        keys *= noise
        keys += typed_centres[types_of_bag]
    return SyntheticBags(
        sets=SetBatch.from_flat(tokens, lengths),
        target=target,
        is_signal=is_signal,
        coordinates=coordinates,
        types=types,
        names=tuple(f"bag {i}" for i in range(n_bags)),
    )


def _laid_out(
    rng: np.random.Generator, proportions: Float[np.ndarray, " c"], n_keys: int, n_signal: int
) -> tuple[Int[np.ndarray, " k"], Float[np.ndarray, "k 2"]]:
    """The type of every key of a bag and its place on the grid, in random order.

    Types fill the grid in bands, and signal keys, whose type comes after all others, are those
    nearest to a random point.
    """
    # the places of a square grid
    side = math.ceil(math.sqrt(n_keys))
    places = np.stack([np.arange(n_keys) % side, np.arange(n_keys) // side], axis=1)

    # tissue: a wave over the grid, whose levels the types fill in turn
    angle = rng.uniform(0, 2 * np.pi)
    phase = rng.uniform(0, 2 * np.pi, 2)
    along = (places @ np.array([np.cos(angle), np.sin(angle)])) / side
    level = along + 0.15 * np.sin(2 * np.pi * places / side + phase).sum(axis=1)
    types = np.empty(n_keys, np.int64)
    types[np.argsort(level)] = np.sort(rng.choice(len(proportions), n_keys, p=proportions))

    # signal
    centre = rng.uniform(0, side, 2)
    nearest = np.argsort(np.square(places - centre).sum(axis=1), kind="stable")
    types[nearest[:n_signal]] = len(proportions)

    # the order of keys says nothing
    order = rng.permutation(n_keys)
    return types[order], places[order].astype(np.float64)


def _key_range(n_keys: Any) -> tuple[int, int]:
    """The least and the largest number of keys."""
    if not isinstance(n_keys, (tuple, list)):
        count = check_count(n_keys, "n_keys")
        return count, count
    if len(n_keys) != 2:
        raise ValueError(
            f"`n_keys` must be a number, or a pair (least, most): got {len(n_keys)} numbers."
        )
    least = check_count(n_keys[0], "n_keys[0]")
    most = check_count(n_keys[1], "n_keys[1]")
    if least > most:
        raise ValueError(f"`n_keys` must be a pair (least, most): got ({least}, {most}).")
    return least, most


def _check_share(value: Any, name: str) -> float:
    """A number from 0 to 1."""
    number = check_number(value, name, minimum=0.0)
    if number > 1:
        raise ValueError(f"`{name}` must be a share, from 0 to 1: got {number:g}.")
    return number
