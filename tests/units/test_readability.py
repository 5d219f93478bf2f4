"""`benchmarks/readability.py` counts what it says."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "readability.py"

SAMPLE = '''"""A docstring
of two lines."""

# a comment
class Public:
    """Not code."""

    def __init__(self, a: Any, b: int, *, c: Any = None) -> None:
        a, b = b, a  # a comment at the end of a line is no comment line
        self.total = a if c else b
        super().__init__(**vars(c))  # type: ignore


class _Private:
    def __init__(self, a: Any) -> None:
        pass


first, second = divmod(7, 2)
long = "%s"
''' % ("x" * 100)


@pytest.fixture
def readability():
    spec = importlib.util.spec_from_file_location("readability", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_file_is_counted(readability):
    counts = readability.count(SAMPLE)
    assert (counts.code_lines, counts.comment_lines, counts.filled_lines) == (10, 1, 14)
    assert (counts.tuple_assignments, counts.conditionals, counts.long_lines) == (1, 1, 1)
    assert (counts.any_arguments, counts.constructor_arguments) == (2, 3)
    assert (counts.unpacked_dicts, counts.type_ignores) == (1, 1)


def test_the_table_adds_up(readability, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file.py").write_text(SAMPLE)
    header, one, two, both = readability.table(tmp_path).splitlines()
    assert header.split()[0] == "subpackage"
    assert one.split()[1:] == two.split()[1:]
    assert both.split()[:4] == ["all", "20", "100.0", "100.0"]  # 2 per 20 lines
