"""A law that came out of a training set: a few means shared out among the heads, and Gaussian noise around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from keyhole._checks import check_count
from keyhole.heads import GaussianHeads, standard_normals


@dataclass(frozen=True)
class Step:
    """What a descent knew after so many steps; errors are in units of the variance of the target."""

    step: int
    loo_error: float
    held_out_error: float


@dataclass(frozen=True, eq=False)
class FittedHeads:
    """Heads W_m = means_[m mod K] + scale · diag(query_scales_) G_m diag(key_scales_) with standard normal G_m.

    Attributes
    ----------
    means_ : array (K, D, D)
        The means; head m has mean number m mod K.
    scale : float
        Standard deviation of the entries around them.
    query_scales_, key_scales_ : arrays (D,) or None
        What it is multiplied by for coordinate i of the query and j of the key; None means ones.
    chosen : str
        "zero-mean", "identity" or "learned": which law the training set spoke for.
    strength : float
        c of the c·W_0 that the means started from; the mean itself if ``chosen`` is "identity".
    steps : int
        Steps of the descent behind the means; 0 if nothing was learned.
    history : tuple of Step
        Held-out error along the descent.
    reason : str
        Why this law, in one sentence.

    Examples
    --------
    >>> import numpy as np
    >>> law = FittedHeads(np.zeros((2, 4, 4)), scale=0.5)
    >>> bool((law.sample(3, dim=3, seed=0) == GaussianHeads().sample(3, 3, seed=0)).all())
    True
    """

    means_: Float[np.ndarray, "k e e"] = field(repr=False)
    scale: float
    chosen: str = "learned"
    strength: float = 0.0
    steps: int = 0
    history: tuple[Step, ...] = field(default=(), repr=False)
    reason: str = field(default="", repr=False)
    query_scales_: Float[np.ndarray, " e"] | None = field(default=None, repr=False)
    key_scales_: Float[np.ndarray, " e"] | None = field(default=None, repr=False)

    def sample(self, n_heads: int, dim: int, seed: int, *, start: int = 0) -> Float[np.ndarray, "m e e"]:
        """Draw heads ``start … start + n_heads − 1`` of the sequence that ``seed`` names; D = dim + 1."""
        self._check_dim(dim)
        width = self.means_.shape[1]
        heads = standard_normals(n_heads, width * width, seed, start=start).reshape(n_heads, width, width)
        heads *= self.scale
        if self.query_scales_ is not None and self.key_scales_ is not None:
            heads *= np.outer(self.query_scales_, self.key_scales_)
        heads += self.means_[(start + np.arange(n_heads)) % len(self.means_)]
        return heads

    def components(self, dim: int) -> tuple[GaussianHeads, ...]:
        """The K Gaussian laws that the heads are shared out among; their kernels average to that of this law."""
        self._check_dim(dim)
        if self.query_scales_ is not None:
            raise ValueError(
                "the kernel of infinitely many heads is known for noise of one scale: this law has a scale for each "
                "coordinate. Use a finite `n_heads`, or LearnedHeads(covariance='none')."
            )
        return tuple(GaussianHeads(mean, self.scale) for mean in self.means_)

    def strongest_pairs(self, names: Sequence[str], count: int = 10, *, mean: int = 0) -> list[tuple[str, str, float]]:
        """The query and key coordinates that one mean pairs most strongly, by name.

        Parameters
        ----------
        names : sequence of d strings
            Names of the coordinates of a token. The appended one is called "1".
        count : int
            How many pairs.
        mean : int
            Which of the means.

        Returns
        -------
        list of (query name, key name, entry of W_0), largest size first

        Examples
        --------
        >>> import numpy as np
        >>> law = FittedHeads(np.array([[[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [0.0, -3.0, 0.0]]]), scale=0.25)
        >>> law.strongest_pairs(["who", "where"], count=2)
        [('1', 'where', -3.0), ('who', 'where', 2.0)]
        """
        matrix = self.means_[mean]
        labels = [*names, "1"]
        if len(labels) != len(matrix):
            raise ValueError(f"`names` must name the {len(matrix) - 1} coordinates of a token: got {len(names)} names.")
        order = np.argsort(-np.abs(matrix), axis=None, kind="stable")[: check_count(count, "count")]
        rows, columns = np.unravel_index(order, matrix.shape)
        return [(labels[i], labels[j], float(matrix[i, j])) for i, j in zip(rows, columns, strict=True)]

    def _check_dim(self, dim: int) -> None:
        width = self.means_.shape[1]
        if dim + 1 != width:
            raise ValueError(
                f"this law was fitted to tokens of dimension {width - 1}, and its heads are {width} × {width}: got "
                f"dim {dim}. Fit a law to these tokens."
            )
