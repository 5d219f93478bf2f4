"""What the settings of an estimator may be, each value in a few words.

The help of commands and what they say of a fit are made from these tables.
"""

from __future__ import annotations

AUTO = "With auto, leave-one-out on the training samples chooses"

ACTIVATIONS = {
    "relu": "each row weighs its score where that is positive",
    "softmax": "the weights of the rows of a set sum to one",
    "linear": "each row weighs its score",
    "square": "each row weighs the square of its score",
    "step": "each row of positive score weighs the same",
    "exp": "each row weighs the exponential of its score",
}
"""Settings of ``activation``: how scores become weights."""

POOLINGS = {
    "mean": "the mean over rows",
    "mean+size": "the mean over rows, and how many they are",
    "mean+statistics": "the mean over rows, and statistics of each column",
    "sum": "the sum over rows, for targets that grow with the set",
}
"""Settings of ``pooling``: how the rows of a set are put together."""

SCALINGS = {
    "none": "rows as they are",
    "sphere": "each row divided by its length",
    "standard": "each column centred and divided by its spread",
}
"""Settings of ``scaling``: what is done to rows first."""

QUERIES = {
    "given": "the query of the set, or a constant where it has none",
    "mean": "the mean of its rows",
    "each": "each row in turn",
}
"""Settings of ``query``: what scores compare a row with."""

HEADS = {
    "zero-mean": "drawn at random around zero",
    "biased": "drawn around the identity: rows like the query score high",
    "identity": "drawn around a multiple of the identity that is chosen",
    "learned": "drawn around matrices that are learned from the training sets",
}
"""Settings of ``--heads``: what the query-key matrices, which score rows, are drawn from."""


def choices(values: dict[str, str]) -> str:
    """Values and their words, for the help of an option.

    >>> choices(SCALINGS)
    'none (rows as they are), sphere (each row divided by its length), ...'
    """
    return ", ".join(f"{value} ({words})" for value, words in values.items())
