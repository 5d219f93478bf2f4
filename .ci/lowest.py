"""Print pins of the lowest versions that pyproject.toml allows.

    make test CONSTRAINTS=out/lowest.txt

Only what users install is pinned. What tests need besides is as new as these versions allow.
"""

import re
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))

for requirement in PROJECT["project"]["dependencies"]:
    match = re.fullmatch(r"([\w-]+)>=([\w.]+)", requirement)
    if match is None:
        raise SystemExit(f"a requirement must say NAME>=VERSION, the lowest: got {requirement!r}.")
    name, lowest = match.groups()
    print(f"{name}=={lowest}")
