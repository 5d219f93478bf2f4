"""Designs: the n × p matrix Φ of a linear model, in memory or streamed by blocks of groups.

The p columns form groups of ``group_size`` consecutive columns each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import MEMORY_BUDGET, block_size, blocks

CACHE_BYTES = 2**22
"""Columns are converted to another precision 4 MiB at a time, to stay in the cache."""


@runtime_checkable
class Design(Protocol):
    """A linear map from values (p, t) to predictions (n, t); products are float64."""

    @property
    def shape(self) -> tuple[int, int]:
        """(n, p)."""

    def matvec(self, values: Float[np.ndarray, "p t"]) -> Float[np.ndarray, "n t"]:
        """Φ v."""

    def rmatvec(self, residuals: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "p t"]:
        """Φᵀ r."""


@runtime_checkable
class SelectableDesign(Design, Protocol):
    """A design that can hand out the columns of some groups.

    The solver iterates on these and visits the other columns only to check a solution.
    """

    def take(self, groups: Int[np.ndarray, " k"]) -> Float[np.ndarray, "n q"]:
        """The columns of ``groups``, side by side."""


class DenseDesign:
    """An (n, p) array whose columns form p/group_size groups.

    float32 arrays are multiplied in float64, a block of rows at a time: the products are those of
    the given numbers, and no temporary outgrows ``memory_budget``.
    """

    def __init__(
        self,
        array: Float[np.ndarray, "n p"],
        group_size: int,
        memory_budget: int = MEMORY_BUDGET,
    ) -> None:
        self.array = array
        self.group_size = group_size
        self.memory_budget = memory_budget

    @property
    def shape(self) -> tuple[int, int]:
        """(n, p)."""
        return len(self.array), self.array.shape[1]

    def matvec(self, values: Float[np.ndarray, "p t"]) -> Float[np.ndarray, "n t"]:
        """Φ v in float64."""
        if self.array.dtype == np.float64:
            return self.array @ values
        return np.concatenate([block @ values for _, block in self._row_blocks()])

    def rmatvec(self, residuals: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "p t"]:
        """Φᵀ r in float64."""
        if self.array.dtype == np.float64:
            return self.array.T @ residuals
        total = np.zeros((self.shape[1], residuals.shape[1]))
        for rows, block in self._row_blocks():
            total += block.T @ residuals[rows]
        return total

    def take(self, groups: Int[np.ndarray, " k"]) -> Float[np.ndarray, "n q"]:
        """The columns of ``groups``, side by side, copied."""
        columns = groups[:, None] * self.group_size + np.arange(self.group_size)
        return self.array[:, columns.ravel()]

    def _row_blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Blocks of rows in float64."""
        row_bytes = 8 * self.shape[1]
        size = block_size(row_bytes, min(self.memory_budget, CACHE_BYTES))
        for rows in blocks(self.shape[0], size):
            yield rows, self.array[rows].astype(np.float64)


class StreamedDesign:
    """A design that is computed again for every product, a block of groups at a time.

    Its memory is that of one block, in float64. ``columns`` takes groups (k,) to an array
    (n, k · group_size): their columns, float32 or float64.
    """

    def __init__(
        self,
        columns: Callable[[Int[np.ndarray, " k"]], Float[np.ndarray, "n q"]],
        n_rows: int,
        n_groups: int,
        group_size: int,
        memory_budget: int = MEMORY_BUDGET,
    ) -> None:
        self.columns = columns
        self.n_rows = n_rows
        self.n_groups = n_groups
        self.group_size = group_size
        self._groups_per_block = block_size(8 * n_rows * group_size, memory_budget)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, p)."""
        return self.n_rows, self.n_groups * self.group_size

    def matvec(self, values: Float[np.ndarray, "p t"]) -> Float[np.ndarray, "n t"]:
        """Φ v in float64; groups whose values are zero are not computed."""
        n_outputs = values.shape[1]
        grouped = values.reshape(self.n_groups, -1)
        active = np.flatnonzero(grouped.any(axis=1))
        total = np.zeros((self.n_rows, n_outputs))
        for part in blocks(len(active), self._groups_per_block):
            groups = active[part]
            total += self._float64_columns(groups) @ grouped[groups].reshape(-1, n_outputs)
        return total

    def rmatvec(self, residuals: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "p t"]:
        """Φᵀ r in float64."""
        result = np.empty((self.shape[1], residuals.shape[1]))
        for part in blocks(self.n_groups, self._groups_per_block):
            groups = np.arange(part.start, part.stop)
            rows = slice(part.start * self.group_size, part.stop * self.group_size)
            result[rows] = self._float64_columns(groups).T @ residuals
        return result

    def take(self, groups: Int[np.ndarray, " k"]) -> Float[np.ndarray, "n q"]:
        """The columns of ``groups``."""
        return self.columns(groups)

    def _float64_columns(self, groups: Int[np.ndarray, " k"]) -> Float[np.ndarray, "n q"]:
        return self.columns(groups).astype(np.float64, copy=False)


class ColumnBuffer:
    """Memory for one copy of some columns, reused by every later copy.

    So there is never a second copy beside the first, and no fresh memory to touch.
    """

    def __init__(self, dtype: np.dtype) -> None:
        self._store = np.empty(0, dtype)

    def fill(
        self, design: SelectableDesign, groups: Int[np.ndarray, " k"], group_size: int
    ) -> WorkingColumns:
        """Copy the columns of ``groups``, side by side, over what the last call returned."""
        n = design.shape[0]
        width = len(groups) * group_size
        if self._store.size < n * width:
            self._store = np.empty(n * width, self._store.dtype)
        copy = self._store[: n * width].reshape(n, width)
        for part in blocks(len(groups), block_size(8 * n * group_size, CACHE_BYTES)):
            columns = slice(part.start * group_size, part.stop * group_size)
            copy[:, columns] = design.take(groups[part])
        return WorkingColumns(copy)


class WorkingColumns:
    """Columns for the inner iterations: products in the array's precision, results in float64."""

    def __init__(self, array: Float[np.ndarray, "n q"]) -> None:
        self.array = array

    @property
    def shape(self) -> tuple[int, int]:
        """(n, q)."""
        return len(self.array), self.array.shape[1]

    def matvec(self, values: Float[np.ndarray, "q t"]) -> Float[np.ndarray, "n t"]:
        """Φ v."""
        product = self.array @ values.astype(self.array.dtype, copy=False)
        return product.astype(np.float64, copy=False)

    def rmatvec(self, residuals: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "q t"]:
        """Φᵀ r."""
        product = self.array.T @ residuals.astype(self.array.dtype, copy=False)
        return product.astype(np.float64, copy=False)
