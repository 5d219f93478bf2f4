"""What was learned about the columns of a table: enough to read another table in the same way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from keyhole.data.sets import SetBatch, SetGroups

if TYPE_CHECKING:
    from keyhole.data.layout import Dataset

CODINGS = ("number", "date", "age", "one-hot", "hashed")
MOST_CATEGORIES = 32
"""Different texts of a column up to which each has a coordinate of its own; more share `HASHED` of
them.
"""
HASHED = 32


@dataclass(frozen=True)
class Coding:
    """How a column becomes numbers.

    Attributes
    ----------
    column : str
    kind : "number", "date", "age", "one-hot" or "hashed"
        A date becomes days after ``start``, or its age, the days before the reference date of its
        sample; a text a one among zeros, or a sign at a place that its hash names.
    categories : tuple of str
        Those of "one-hot", sorted; "" stands for a missing value, where the table had any.
    start : float
        First day of the table, counted from 1970.
    fill : float or None
        What is put instead of a missing value: the mean over the rows of the table. Of an age
        that is the mean over the tokens that samples have.

    Examples
    --------
    >>> Coding("colour", "one-hot", ("blue", "red")).names
    ('colour=blue', 'colour=red')
    """

    column: str
    kind: str
    categories: tuple[str, ...] = ()
    start: float = 0.0
    fill: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its coordinates."""
        if self.kind == "one-hot":
            return tuple(f"{self.column}={category}" for category in self.categories)
        if self.kind == "hashed":
            return tuple(f"{self.column}#{j}" for j in range(HASHED))
        if self.kind == "age":
            return (f"{self.column} (age)",)
        return (self.column,)

    def as_list(self) -> list[Any]:
        """As JSON holds it."""
        return [self.column, self.kind, list(self.categories), self.start, self.fill]

    @classmethod
    def of_list(cls, stored: Any) -> Coding:
        """From JSON that anybody may have written.

        Raises ValueError, TypeError or KeyError where it is none.
        """
        column, kind, categories, start, fill = stored
        # the kinds of things
        are_texts = isinstance(categories, list) and all(isinstance(c, str) for c in categories)
        if not isinstance(column, str) or kind not in CODINGS or not are_texts:
            raise ValueError(f"a coding {str(stored)[:60]!r} of a column")
        # categories, of one-hot codings alone
        is_one_hot = kind == "one-hot"
        if is_one_hot != bool(categories) or len(set(categories)) != len(categories):
            raise ValueError(
                f"a coding of column {column!r:.40} whose categories are none, or are there twice"
            )
        if len(categories) > MOST_CATEGORIES + 1:
            raise ValueError(f"{len(categories)} categories of column {column!r:.40}")
        # finite numbers; what fills in missing values may be absent
        numbers = [start]
        if fill is not None:
            numbers.append(fill)
        for number in numbers:
            if not isinstance(number, float) or not math.isfinite(number):
                raise ValueError(
                    f"a coding of column {column!r:.40} with {number!r:.40}, which is no number"
                )
        return cls(column=column, kind=kind, categories=tuple(categories), start=start, fill=fill)


def names_of_coordinates(columns: Sequence[str], codings: Sequence[Coding]) -> tuple[str, ...]:
    """Names of the coordinates that columns become, in their order."""
    coding_of = {coding.column: coding for coding in codings}
    names: list[str] = []
    for column in columns:
        if column in coding_of:
            names.extend(coding_of[column].names)
        else:
            names.append(column)
    return tuple(names)


@dataclass(frozen=True)
class Schema:
    """The input of a model, and how its table was read.

    Dimension and names of tokens, and whether sets have a query.

    `read_table` makes one, ``kh.save(model, path, schema=data.schema)`` stores it with the model,
    and `keyhole.state.read_model` returns it.

    Attributes
    ----------
    dim : int
        Coordinates of a key.
    has_query : bool
    names : tuple of str
        Names of the coordinates of a key.
    target : str
    columns : tuple of (str, value)
        The options of `read_table`, each a name, a tuple of names, or a number.
    codings : tuple of Coding
        How columns that are no plain numbers become such.

    Examples
    --------
    >>> schema = Schema(2, False, ("x", "y"))
    >>> schema.check(SetBatch([[[0.0, 1.0]]]), ("y", "x"))
    Traceback (most recent call last):
        ...
    ValueError: coordinates must be those the model was fitted to, in their order: ...
    """

    dim: int
    has_query: bool
    names: tuple[str, ...] = ()
    target: str = ""
    columns: tuple[tuple[str, Any], ...] = ()
    codings: tuple[Coding, ...] = field(default=(), repr=False)

    def read(
        self,
        source: Any,
        *,
        tokens: Any = None,
        unknown: str = "error",
        missing: str | None = None,
    ) -> Dataset:
        """Read another table as the one this schema was learned from; its target may be absent.

        Parameters
        ----------
        source, tokens : path, or table of pandas, polars or Arrow
            As in `read_table`.
        unknown : "error" or "ignore"
            What a category that was not in the table of before is: refused, by its name and row, or
            none of those that were.
        missing : "error", "drop", "impute" or None
            What to do about a missing value, and about a sample without tokens; None is as the
            table of before was read. "error" refuses both. "drop" drops a token that has a missing
            value; a sample that has no tokens, or none left, gets one token of zeros: every number
            0, the first date, no category. Such a sample is scored as the set of that one token,
            which a model that was fitted to samples like it knows; of another it is an
            extrapolation (see `AttentionRegressor.novelty`). "impute" fills in missing values as in
            the table of before, and refuses samples without tokens.

        Examples
        --------
        >>> import pandas as pd
        >>> import keyhole as kh
        >>> old = pd.DataFrame(
        ...     {"set": [1, 1, 2], "colour": ["red", "blue", "red"], "y": [0.0, 0.0, 1.0]}
        ... )
        >>> schema = kh.read_table(old).schema
        >>> schema.read(pd.DataFrame({"set": [7], "colour": ["blue"]})).sets.tokens
        array([[1., 0.]], dtype=float32)
        >>> schema.read(pd.DataFrame({"set": [7], "colour": ["mauve"]}))
        Traceback (most recent call last):
            ...
        keyhole.data.columns.SchemaError: column 'colour' must hold categories ...
        """
        from keyhole.data.reader import ParquetSets

        data = ParquetSets(
            source, tokens=tokens, schema=self, unknown=unknown, missing=missing
        ).whole()
        self.check(data.sets, data.names)
        return data

    def names_of(self, role: Literal["query", "extras"]) -> tuple[str, ...]:
        """Names of the coordinates of the query, or of the sample-level features.

        A column of lists has one name for all its coordinates; without a table there are none.
        """
        columns = dict(self.columns).get(role)
        if columns is not None:
            return names_of_coordinates(columns, self.codings)
        if role == "query" and self.has_query:
            # a row among those of the keys is the query
            return self.names
        return ()

    def check(self, sets: SetBatch | SetGroups, names: Any = ()) -> None:
        """Raise unless ``sets`` are like the training sets.

        In dimension, queries and (where both have any) names.
        """
        batch = sets.sets
        names_of_fit = ", ".join(self.names[:20])
        if batch.dim != self.dim:
            remedy = "Read the table as it was read to fit."
            if self.names:
                remedy = f"They were {names_of_fit}."
            raise ValueError(
                f"tokens must have the {self.dim} coordinates the model was fitted to: got "
                f"{batch.dim}. {remedy}"
            )
        # queries: there, or not, as in training
        has_query = batch.query is not None
        if self.has_query and not has_query:
            raise ValueError(
                "the model was fitted to sets with a query: got sets without. Read both the same "
                "way."
            )
        if has_query and not self.has_query:
            raise ValueError(
                "the model was fitted to sets without a query: got sets with. Read both the same "
                "way."
            )
        # names, as far as both have any: columns in another order would go unnoticed
        for i, (name_of_fit, name) in enumerate(zip(self.names, names, strict=False)):
            if name_of_fit != name:
                raise ValueError(
                    "coordinates must be those the model was fitted to, in their order: coordinate "
                    f"{i} was {name_of_fit!r} and is {name!r}. Choose the columns "
                    f"{names_of_fit} as keys."
                )
