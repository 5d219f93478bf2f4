"""Sets out of what people have: images, text, molecules, bags, series."""

from keyhole.datasets.babi_files import load_babi
from keyhole.datasets.bags import load_bags
from keyhole.datasets.digits import load_digits_sets
from keyhole.datasets.molecules import load_molecules, molecule_sets
from keyhole.datasets.named import NAMES, load_data
from keyhole.datasets.series import load_uea
from keyhole.tables import Dataset, read_table

__all__ = [
    "NAMES",
    "Dataset",
    "load_babi",
    "load_bags",
    "load_data",
    "load_digits_sets",
    "load_molecules",
    "load_uea",
    "molecule_sets",
    "read_table",
]
