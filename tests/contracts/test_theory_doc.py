"""docs/reference/formulas.md names functions and property tests: both must exist, and every
public function must be named.
"""

import ast
import importlib
import re
from pathlib import Path

import pytest

from keyhole import theory

ROOT = Path(__file__).parents[2]
PAIR = re.compile(r"computed by\s+`([\w.]+)`,\s+tested by\s+`([\w/.]+)::(\w+)`")


def pairs(text):
    return PAIR.findall(text)


def find(name):
    """The object a dotted name stands for: the longest importable module, then attributes."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AttributeError(name)


def has_test(path, name):
    tree = ast.parse((ROOT / path).read_text())
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)


DOCUMENT = (ROOT / "docs" / "reference" / "formulas.md").read_text()


def test_the_document_has_statements():
    assert len(pairs(DOCUMENT)) > 20
    # a line that says "computed by" in any other form would escape the check
    assert len(re.findall(r"computed\s+by", DOCUMENT)) == len(pairs(DOCUMENT))


@pytest.mark.parametrize(("function", "path", "test"), sorted(set(pairs(DOCUMENT))))
def test_functions_and_tests_exist(function, path, test):
    assert callable(find(function))
    assert has_test(path, test)


def test_every_public_function_is_in_the_document():
    functions = {name for name in theory.__all__ if name[0].islower()}
    helpers = {
        "harmonic_count",
        "approximation_bound",
    }  # counted on by others, and a term of risk_bound
    named = {name.rsplit(".", 1)[1] for name, _, _ in pairs(DOCUMENT)}
    assert functions - helpers <= named


def test_a_wrong_name_is_noticed():
    """Broken twin."""
    with pytest.raises(AttributeError):
        find("keyhole.theory.no_such_function")
    assert not has_test("tests/properties/test_rkhs_norm.py", "test_no_such_test")
