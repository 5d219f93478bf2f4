"""BLAS and LAPACK on blocks of a larger array, in place.

SciPy's wrappers copy an array that is not contiguous, and a block of a matrix never is. The same routines, called
through the addresses that SciPy publishes for compiled code, take the distance between columns as an argument instead.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.linalg import cython_blas, cython_lapack

Block = Float[np.ndarray, "_ _"]


@cache
def _routine(name: str) -> Any:
    """The Fortran routine ``name``, every argument by reference. Calls release the GIL."""
    table = cython_blas.__pyx_capi__ if name in cython_blas.__pyx_capi__ else cython_lapack.__pyx_capi__
    capsule, api = table[name], ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    address = api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule))
    return ctypes.CFUNCTYPE(None)(address)


def _call(name: str, dtype: np.dtype[Any], *arguments: Any) -> None:
    """Call s``name`` or d``name``; str, int, float and arrays in Fortran order become references."""
    prefix, real = ("d", ctypes.c_double) if dtype == np.float64 else ("s", ctypes.c_float)
    references: list[Any] = []
    for argument in arguments:
        if isinstance(argument, str):
            references.append(ctypes.c_char_p(argument.encode()))
        elif isinstance(argument, int):
            references.append(ctypes.byref(ctypes.c_int(argument)))
        elif isinstance(argument, float):
            references.append(ctypes.byref(real(argument)))
        elif isinstance(argument, np.ndarray):
            references.append(ctypes.c_void_p(argument.ctypes.data))
        else:
            references.append(ctypes.byref(argument))
    _routine(prefix + name)(*references)


def _lead(block: Block) -> int:
    """Distance between columns; rows must be adjacent."""
    rows, columns = block.shape
    if rows > 1 and block.strides[0] != block.itemsize:
        raise ValueError(f"a block must be in Fortran order: its rows are {block.strides[0]} bytes apart.")
    return max(1, rows, block.strides[1] // block.itemsize if columns > 1 else rows)


def multiply_add(total: Block, a: Block, b: Block, *, scale: float = 1.0, keep: float = 1.0, trans: str = "NN") -> None:
    """total ← keep · total + scale · op(a) op(b), with op transposing where ``trans`` says T."""
    m, n = total.shape
    k = a.shape[1] if trans[0] == "N" else a.shape[0]
    sizes = (m, n, k, scale, a, _lead(a), b, _lead(b), keep, total, _lead(total))
    _call("gemm", total.dtype, trans[0], trans[1], *sizes)


def multiply_symmetric(total: Block, a: Block, b: Block) -> None:
    """total ← total + a b for a symmetric matrix of which the lower triangle is read."""
    m, n = b.shape
    _call("symm", total.dtype, "L", "L", m, n, 1.0, a, _lead(a), b, _lead(b), 1.0, total, _lead(total))


def solve_factored(factor: Block, targets: Block) -> None:
    """targets ← (L Lᵀ)⁻¹ targets for a lower triangular factor L; the upper triangle is not read."""
    info = ctypes.c_int(0)
    sizes = (len(factor), targets.shape[1], factor, _lead(factor), targets, _lead(targets))
    _call("potrs", factor.dtype, "L", *sizes, info)
