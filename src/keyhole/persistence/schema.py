"""What the sets were that a model was fitted to: checked again when it predicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keyhole.groups import SetGroups
from keyhole.sets import SetBatch


@dataclass(frozen=True)
class Schema:
    """The input of a model.

    Attributes
    ----------
    dim : int
        Token dimension d.
    has_query : bool
        Whether sets come with a query.
    names : tuple of str
        Names of the d coordinates of a token; empty if they have none.
    target : str
        Name of the target; empty if it has none.
    columns : tuple of (str, str)
        How a table was read, as (option, column) pairs: what ``keyhole fit`` was told.

    Examples
    --------
    >>> import numpy as np
    >>> schema = Schema(2, False, ("x", "y"))
    >>> schema.check(SetBatch(np.zeros((5, 3, 2))), ("x", "y"))
    >>> schema.check(SetBatch(np.zeros((5, 3, 2))), ("y", "x"))
    Traceback (most recent call last):
        ...
    ValueError: coordinates must be those the model was fitted to, in their order: coordinate 0 was 'x' and is 'y'. ...
    """

    dim: int
    has_query: bool
    names: tuple[str, ...] = ()
    target: str = ""
    columns: tuple[tuple[str, str], ...] = ()

    def check(self, sets: SetBatch | SetGroups, names: Any = ()) -> None:
        """Raise unless ``sets`` have the dimension, queries and (where both have any) names of the training sets."""
        batch = sets.sets if isinstance(sets, SetGroups) else sets
        if batch.dim != self.dim:
            raise ValueError(
                f"tokens must have the {self.dim} coordinates the model was fitted to: got {batch.dim}. "
                + (
                    f"They were {', '.join(self.names[:20])}."
                    if self.names
                    else "Read the table as it was read to fit."
                )
            )
        if (batch.query is not None) != self.has_query:
            had, given = ("with", "without") if self.has_query else ("without", "with")
            raise ValueError(f"the model was fitted to sets {had} a query: got sets {given}. Read both the same way.")
        for i, (was, name) in enumerate(zip(self.names, names, strict=False)):
            if was != name:
                raise ValueError(
                    f"coordinates must be those the model was fitted to, in their order: coordinate {i} was {was!r} "
                    f"and is {name!r}. Choose the columns {', '.join(self.names[:20])} as keys."
                )
