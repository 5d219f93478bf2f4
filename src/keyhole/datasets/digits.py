"""scikit-learn's digits as sets of pixels."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from keyhole._checks import check_choice
from keyhole.sets import SetBatch
from keyhole.tables import Dataset


def load_digits_sets(position: str = "bumps") -> Dataset:
    """The 1797 handwritten digits that scikit-learn brings along, each as the set of its inked pixels.

    A key is a pixel with some ink: where it is and how dark. Blank pixels are left out, which loses nothing, because
    a pixel that is not in the set is blank. There is no query.

    Parameters
    ----------
    position : "bumps" or "plain"
        How row and column are written: as eight bumps each, exp(−(row − k)²/2) for k = 0 … 7, of length one, so that
        neighbouring rows are alike; or as the two plain numbers from −1 to 1. Then comes the ink, from 0 to 1.

    Returns
    -------
    Dataset
        1797 sets of 16 to 42 pixels, labels 0 to 9.

    Examples
    --------
    >>> load_digits_sets().sets
    SetBatch(1797 sets, 16–42 keys each (58736 in all), dim 17, no query, float64)
    """
    from sklearn.datasets import load_digits

    check_choice(position, "position", ("bumps", "plain"))
    images, labels = load_digits(return_X_y=True)
    keys = [pixel_set(image.reshape(8, 8) / 16.0, position) for image in images]
    names: tuple[str, ...] = ("row", "column", "ink")
    if position == "bumps":
        names = (*(f"row {k}" for k in range(8)), *(f"column {k}" for k in range(8)), "ink")
    description = "scikit-learn's digits, 8 × 8 pixels, those with some ink"
    return Dataset(SetBatch(keys), labels.astype(np.int64), names, description, "digit")


def pixel_set(image: Float[np.ndarray, "h w"], position: str = "bumps") -> Float[np.ndarray, "k d"]:
    """The inked pixels of one image: position and ink.

    Examples
    --------
    >>> pixel_set(np.array([[0.0, 1.0], [0.5, 0.0]]), "plain")
    array([[-1. ,  1. ,  1. ],
           [ 1. , -1. ,  0.5]])
    """
    rows, columns = np.nonzero(image)
    ink = image[rows, columns][:, None]
    height, width = image.shape
    if position == "plain":
        centre = np.array([height - 1, width - 1]) / 2
        return np.concatenate([(np.stack([rows, columns], axis=1) - centre) / np.maximum(centre, 0.5), ink], axis=1)
    return np.concatenate([_bumps(height)[rows], _bumps(width)[columns], ink], axis=1)


def _bumps(size: int) -> Float[np.ndarray, "s s"]:
    bump = np.exp(-0.5 * np.square(np.arange(size)[:, None] - np.arange(size)))
    return np.asarray(bump / np.linalg.norm(bump, axis=1, keepdims=True))
