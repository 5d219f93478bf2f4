"""Molecules as groups of neighbourhoods: each atom is the query in turn, all atoms are its keys."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._checks import check_count
from keyhole.datasets.archives import read_texts
from keyhole.groups import SetGroups
from keyhole.sets import SetBatch
from keyhole.tables import Dataset
from keyhole.tables.arrays import NpzFile

_TABLE = (
    "H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr "
    "Rb Sr Y Zr Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe"
)
SYMBOLS = _TABLE.split()
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"


def load_molecules(path: Any, *, n_radial: int = 12) -> Dataset:
    r"""Read molecules from npz or xyz: sets of neighbours, grouped by molecule.

    Parameters
    ----------
    path : str or Path
        npz with ``X`` (atoms, 4), nuclear charge and position in Ångström, ``ptr`` (molecules + 1) and ``y``; or an xyz
        file with one molecule after the other, whose comment lines give the energy, alone or as ``energy=…``; or
        a folder or archive of xyz files, with the energies in their comments or in a text file beside them of lines
        "name energy".
    n_radial : int
        Bumps of the radial basis, evenly spread from 0.8 to 6 Å.

    Returns
    -------
    Dataset
        ``sets`` is a SetGroups of one set per atom. Energies are extensive: fit them with ``pooling="sum"``.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> water = "3\nenergy=-1.5\nO 0 0 0\nH 0.76 0.59 0\nH -0.76 0.59 0\n"
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "water.xyz")
    ...     _ = file.write_text(water)
    ...     data = load_molecules(file, n_radial=4)
    >>> len(data), data.sets.counts, data.target
    (1, array([3]), array([-1.5]))
    """
    path = Path(path)
    if path.suffix.lower() == ".npz":
        charges, positions, ptr, energy = _read_npz(path)
    else:
        charges, positions, ptr, energy = _read_xyz(path)
    elements = np.unique(charges)
    sets = molecule_sets(charges, positions, ptr, elements=elements, n_radial=n_radial)
    symbols = [_symbol(int(z)) for z in elements]
    names = (*symbols, *(f"{s} at {r:.2g} Å" for s in symbols for r in _centres(n_radial)))
    words = f"{path.name}: {len(sets)} molecules of {np.diff(ptr).min()}–{np.diff(ptr).max()} atoms"
    return Dataset(sets, energy, names, words, "energy")


def molecule_sets(
    charges: Int[np.ndarray, " a"],
    positions: Float[np.ndarray, "a 3"],
    ptr: Int[np.ndarray, " p"],
    *,
    elements: Sequence[int] | np.ndarray | None = None,
    n_radial: int = 12,
) -> SetGroups:
    """The neighbourhoods of all atoms, grouped by molecule.

    For each atom one set: the query is its element, one-hot; the keys are all atoms of the molecule, itself included,
    each with its element, one-hot, and its element times a radial basis of the distance, so that heads can tell a
    hydrogen nearby from an oxygen far away.

    Parameters
    ----------
    charges, positions : arrays (atoms,), (atoms, 3)
    ptr : array (molecules + 1,)
        Molecule i owns atoms ptr[i] to ptr[i+1].
    elements : sequence of int, optional
        Nuclear charges to tell apart; those that occur if not given.
    n_radial : int

    Returns
    -------
    SetGroups
        Tokens have dimension E·(1 + n_radial) for E elements, in float32.
    """
    kinds = np.unique(charges) if elements is None else np.asarray(elements)
    unknown = ~np.isin(charges, kinds)
    if unknown.any():
        i = int(unknown.argmax())
        raise ValueError(
            f"`elements` must name all that occur: atom {i} has charge {charges[i]}, not in {kinds.tolist()}."
        )
    hot = (charges[:, None] == kinds).astype(np.float32)
    centres = _centres(check_count(n_radial, "n_radial", minimum=2))
    keys, queries = [], []
    for a, b in itertools.pairwise(ptr):
        apart = np.linalg.norm(positions[a:b, None] - positions[None, a:b], axis=2)
        radial = np.exp(-0.5 * np.square((apart[:, :, None] - centres) / (centres[1] - centres[0]))).astype(np.float32)
        for i in range(b - a):
            pairs = (hot[a:b, :, None] * radial[i][:, None, :]).reshape(b - a, -1)
            keys.append(np.concatenate([hot[a:b], pairs], axis=1))
            queries.append(np.concatenate([hot[a + i], np.zeros(pairs.shape[1], np.float32)]))
    return SetGroups(SetBatch(keys, np.array(queries)), np.diff(ptr))


def _centres(n_radial: int) -> Float[np.ndarray, " r"]:
    return np.linspace(0.8, 6.0, n_radial)


def _symbol(charge: int) -> str:
    return SYMBOLS[charge - 1] if 1 <= charge <= len(SYMBOLS) else f"Z{charge}"


def _read_npz(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    file = NpzFile(path)
    for name in ("X", "ptr"):
        if name not in file.names:
            raise ValueError(f"molecules need arrays 'X' and 'ptr': {path.name!r} has {', '.join(file.names[:20])}.")
    atoms, ptr = file["X"], file["ptr"]
    if atoms.ndim != 2 or atoms.shape[1] != 4 or atoms.dtype.kind not in "fiu" or not np.isfinite(atoms).all():
        raise ValueError(
            f"'X' must hold charge and position of each atom, (atoms, 4): got {atoms.dtype}, {atoms.shape}."
        )
    if ptr.ndim != 1 or ptr.dtype.kind not in "iu" or len(ptr) < 2:
        raise ValueError(f"'ptr' must be a vector of integers: got {ptr.dtype} of shape {ptr.shape}.")
    ptr = ptr.astype(np.int64)
    if ptr[0] != 0 or ptr[-1] != len(atoms) or (np.diff(ptr) < 1).any():
        raise ValueError(f"'ptr' must rise from 0 to the {len(atoms)} atoms: it goes from {ptr[0]} to {ptr[-1]}.")
    charges = np.rint(atoms[:, 0]).astype(np.int64)
    if charges.min() < 1 or charges.max() > 118:
        raise ValueError(f"nuclear charges lie between 1 and 118: got {charges.min()} to {charges.max()}.")
    energy = file["y"].astype(np.float64) if "y" in file.names else None
    if energy is not None and (energy.shape != (len(ptr) - 1,) or not np.isfinite(energy).all()):
        raise ValueError(f"'y' must have one number per molecule: got shape {energy.shape} for {len(ptr) - 1}.")
    return charges, atoms[:, 1:].astype(np.float64), ptr, energy


def _read_xyz(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    texts = read_texts(path, lambda name: name.endswith((".xyz", ".txt")))
    frames = [frame for name in sorted(texts) if name.endswith(".xyz") for frame in parse_xyz(texts[name], name)]
    if not frames:
        raise ValueError(f"molecules are read from .npz and .xyz files: {path.name!r} has none.")
    charges = np.concatenate([f[0] for f in frames])
    positions = np.concatenate([f[1] for f in frames])
    ptr = np.cumsum([0, *(len(f[0]) for f in frames)])
    energy: list[float | None] = [f[2] for f in frames]
    if any(e is None for e in energy):
        known = _energies(texts)
        energy = [known.get(f[3]) if e is None else e for f, e in zip(frames, energy, strict=True)]
    missing = [f[3] for f, e in zip(frames, energy, strict=True) if e is None]
    if missing and len(missing) < len(frames):
        raise ValueError(f"all molecules must have an energy, or none: {missing[0]!r} has none, {len(missing)} in all.")
    return charges, positions, ptr, None if missing else np.array(energy, dtype=np.float64)


def _energies(texts: dict[str, str]) -> dict[str, float]:
    """Lines "name energy" of text files: by the name without folder and suffix."""
    found = {}
    for name, text in texts.items():
        if name.endswith(".txt"):
            for line in text.splitlines():
                match = re.match(rf"\s*(\S+)\s+({_NUMBER})(?:\s|$)", line)
                if match:
                    found[match[1].rpartition("/")[2].removesuffix(".xyz")] = float(match[2])
    return found


def parse_xyz(text: str, name: str) -> list[tuple[np.ndarray, np.ndarray, float | None, str]]:
    """Frames of an xyz file: charges, positions, energy if the comment has one, and the name of the molecule."""
    lines, frames, row = text.splitlines(), [], 0
    stem = name.rpartition("/")[2].removesuffix(".xyz")
    while row < len(lines):
        if not lines[row].strip():
            row += 1
            continue
        count = lines[row].strip()
        if not count.isdecimal() or not 1 <= int(count[:9]) <= len(lines) - row - 2 or len(count) > 9:
            raise ValueError(
                f"a molecule in an xyz file begins with its number of atoms, a comment and as many lines: line "
                f"{row + 1} of {stem!r:.60} is {lines[row]!r:.40}, with {len(lines) - row - 1} lines left."
            )
        body = lines[row + 2 : row + 2 + int(count)]
        atoms = [_atom(line, row + 3 + k, stem) for k, line in enumerate(body)]
        charges, positions = np.array([a[0] for a in atoms]), np.array([a[1:] for a in atoms])
        frames.append((charges, positions, _energy(lines[row + 1]), stem))
        row += 2 + int(count)
    return frames


def _atom(line: str, row: int, stem: str) -> tuple[int, float, float, float]:
    parts = line.split()
    try:
        charge = int(parts[0]) if parts[0].isdecimal() else SYMBOLS.index(parts[0].capitalize()) + 1
        x, y, z = (float(part) for part in parts[1:4])
    except (ValueError, IndexError):
        raise ValueError(
            f"an atom is an element and three numbers: line {row} of {stem!r:.60} is {line!r:.60}."
        ) from None
    if not np.isfinite([x, y, z]).all() or not 1 <= charge <= 118:
        raise ValueError(f"an atom has an element and a finite position: line {row} of {stem!r:.60} is {line!r:.60}.")
    return charge, x, y, z


def _energy(comment: str) -> float | None:
    match = re.search(rf"(?i)energy\s*=\s*['\"]?({_NUMBER})", comment) or re.fullmatch(rf"\s*({_NUMBER})\s*", comment)
    value = None if match is None else float(match[1])
    return value if value is not None and np.isfinite(value) else None
