"""How code in src reads, in numbers: a thermometer, not a goal.

    python benchmarks/readability.py [FOLDER]

One row per subpackage, and one for all of FOLDER (src/keyhole unless given). Counts are per 1,000
lines of code. Lines of code are neither blank, nor comments, nor part of a docstring.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "keyhole"
LONGEST = 100
"""Columns of a line."""


@dataclass
class Counts:
    """What was counted in some files."""

    code_lines: int = 0
    comment_lines: int = 0
    filled_lines: int = 0
    """All lines that are not blank, docstrings included."""
    long_lines: int = 0
    tuple_assignments: int = 0
    conditionals: int = 0
    constructor_arguments: int = 0
    any_arguments: int = 0
    """Arguments of the constructors of public classes that are annotated as Any."""
    unpacked_dicts: int = 0
    """Dictionaries passed as ** in a call."""
    type_ignores: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        total = Counts()
        for field in fields(self):
            setattr(total, field.name, getattr(self, field.name) + getattr(other, field.name))
        return total


def docstring_lines(tree: ast.Module) -> set[int]:
    """The numbers of the lines that docstrings take."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    numbers: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, documented) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            numbers.update(range(first.lineno, first.end_lineno + 1))
    return numbers


def public_constructors(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    """`__init__` of every class that a public class of the same file is, or may inherit it from."""
    inherited = {
        base.id
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        for base in node.bases
        if isinstance(base, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        if node.name.startswith("_") and node.name not in inherited:
            continue
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                yield item


def count(text: str) -> Counts:
    """Count one file."""
    tree = ast.parse(text)
    counts = Counts()

    # lines
    docstrings = docstring_lines(tree)
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped:
            continue
        counts.filled_lines += 1
        counts.long_lines += len(line) > LONGEST
        counts.type_ignores += "# type: ignore" in line
        if number in docstrings:
            continue
        if stripped.startswith("#"):
            counts.comment_lines += 1
        else:
            counts.code_lines += 1

    # expressions
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            both_tuples = isinstance(node.targets[0], ast.Tuple) and isinstance(
                node.value,
                ast.Tuple,
            )
            counts.tuple_assignments += both_tuples
        elif isinstance(node, ast.IfExp):
            counts.conditionals += 1
        elif isinstance(node, ast.Call):
            counts.unpacked_dicts += sum(keyword.arg is None for keyword in node.keywords)

    # constructors
    for constructor in public_constructors(tree):
        arguments = [*constructor.args.args[1:], *constructor.args.kwonlyargs]
        counts.constructor_arguments += len(arguments)
        for argument in arguments:
            is_any = isinstance(argument.annotation, ast.Name) and argument.annotation.id == "Any"
            counts.any_arguments += is_any
    return counts


HEADER = (
    "subpackage", "code", "tuple =", "if-else", "comments", f"> {LONGEST} col.", "Any in __init__",
    "** calls", "type: ignore",
)  # fmt: skip


def row(name: str, counts: Counts) -> tuple[str, ...]:
    """One line of the table."""
    per_thousand = 1000 / max(counts.code_lines, 1)
    share_long = 100 * counts.long_lines / max(counts.filled_lines, 1)
    return (
        name,
        f"{counts.code_lines}",
        f"{counts.tuple_assignments * per_thousand:.1f}",
        f"{counts.conditionals * per_thousand:.1f}",
        f"{counts.comment_lines * per_thousand:.1f}",
        f"{share_long:.1f} %",
        f"{counts.any_arguments} of {counts.constructor_arguments}",
        f"{counts.unpacked_dicts}",
        f"{counts.type_ignores}",
    )


def table(source: Path) -> str:
    """The counts of every subpackage (or module beside them), and of all."""
    parts: dict[str, Counts] = {}
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source).parts[0].removesuffix(".py")
        parts[name] = parts.get(name, Counts()) + count(path.read_text(encoding="utf-8"))
    rows = [row(name, counts) for name, counts in sorted(parts.items())]
    rows.append(row("all", sum(parts.values(), Counts())))
    widths = [max(len(line[i]) for line in [HEADER, *rows]) for i in range(len(HEADER))]
    lines = []
    for line in [HEADER, *rows]:
        numbers = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        lines.append("  ".join([line[0].ljust(widths[0]), *numbers]))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE))
