"""One state of a model at a time: changes that happen whole or not at all, also between threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary


class ModelLocks:
    """One lock for each model that was ever changed.

    Locks are kept here and not in the models, so that a model can be pickled, copied and cloned
    like any other object, and each copy has a lock of its own.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all locks: a forked process has none of the threads that hold them."""
        self._locks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._guard = threading.Lock()

    def of(self, model: Any) -> Any:
        """The lock of a model. The thread that holds it may take it again."""
        with self._guard:
            lock = self._locks.get(model)
            if lock is None:
                lock = threading.RLock()
                self._locks[model] = lock
            return lock


LOCKS = ModelLocks()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=LOCKS.reset)


def lock_of(model: Any) -> Any:
    """The lock of a model, held while it is changed."""
    return LOCKS.of(model)


def twin_of(model: Any) -> Any:
    """A model with the same attributes, in a dictionary of its own."""
    twin = object.__new__(type(model))
    vars(twin).update(vars(model))
    return twin


@contextmanager
def change(model: Any) -> Iterator[Any]:
    """A twin to work on: what was done to its attributes is done to the model, if nothing failed.

    All of it appears in one assignment, so that neither a thread nor an interrupt sees a part of
    it. Whoever changes the same model waits meanwhile. Objects that attributes refer to must be
    replaced and not written into: the model has them too.

    >>> class Pair:
    ...     left, right = 1, 2
    >>> pair = Pair()
    >>> with change(pair) as draft:
    ...     draft.left, draft.right = 3, 4
    >>> pair.left, pair.right
    (3, 4)
    """
    with lock_of(model):
        before = dict(vars(model))
        draft = twin_of(model)
        yield draft
        after = dict(vars(draft))

        # only what the work changed: parameters may have been set while it was done
        state = dict(vars(model))
        for name in before.keys() - after.keys():
            state.pop(name, None)
        for name, value in after.items():
            if name not in before or before[name] is not value:
                state[name] = value
        model.__dict__ = state
