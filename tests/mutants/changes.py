"""What may be changed in a source file, one operator, constant or statement at a time.

Left alone, because a change there is no wrong number: text (docstrings, messages, f-strings, `__repr__`, and what a
block that ends in `raise` names for its message), annotations, decorators, imports, `assert`, which only tells a type
checker what is true anyway, `raise NotImplementedError`, which only names what others answer, numbers below 1e-8,
guards against rounding of which half or twice is as good a guard, and whole numbers above 64, which are sizes, limits
and numbers of nodes. `<` does not become `<=` between real numbers, where only a tie to the last bit could tell the two
apart. And whatever `equivalent.toml` names by rule.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPERATORS: dict[type, tuple[type, ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.MatMult: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.BitXor: (ast.BitAnd,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
TWINS = [
    ("min", "max"),
    ("minimum", "maximum"),
    ("argmin", "argmax"),
    ("any", "all"),
    ("floor", "ceil"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
    ("sin", "cos"),
    ("mean", "sum"),
    ("log", "log1p"),
    ("exp", "expm1"),
]
CALLED = {old: new for pair in TWINS for old, new in (pair, pair[::-1])}
CALLED_AWAY = {"abs", "sqrt", "square", "sorted", "copy"}  # f(x) becomes x
TIES = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
REAL = {  # names of real numbers
    "alpha", "alphas", "floor", "error", "errors", "gain", "doubt", "gap", "rho", "tol", "tolerance", "objective",
    "lower_bound", "group_radius", "ball_radius", "gamma", "gammas", "ridge", "rounding",
}  # fmt: skip
DROPPED = (ast.AugAssign, ast.Expr, ast.Raise, ast.Delete)
BARE = (ast.Constant, ast.Yield, ast.YieldFrom)  # docstrings, and what makes a generator
LEFT_ALONE = {"annotation", "returns", "decorator_list", "type_params"}  # fields of nodes


@dataclass(frozen=True)
class Site:
    """One place of a syntax tree, and what may stand there instead."""

    parent: ast.AST
    field: str
    index: int | None
    node: ast.AST
    options: tuple[ast.AST, ...]
    statement: ast.stmt
    scope: tuple[str, ...]
    names: frozenset[str]  # what the value is assigned or passed to: a variable, an argument, or a function as "f()"

    def put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


@dataclass(frozen=True)
class Mutant:
    """One change of one file. `function`, `line` and `change` name it wherever its file may move."""

    path: Path
    site: int
    option: int
    function: str
    line: str
    change: str
    lines: tuple[int, ...]
    statement: tuple[int, ...]  # the lines of the statement around it; of a default, those of its function
    names: tuple[str, ...]  # who mentions one of these uses what was changed
    on_import: bool  # changes a constant, a class or a default: what is computed once, on import

    def tree(self) -> ast.Module:
        """Return the changed file; line numbers are those of the file."""
        tree = ast.parse(self.path.read_text())
        site = list(sites(tree))[self.site]
        new = site.options[self.option]
        site.put(ast.copy_location(new, site.node))
        return ast.fix_missing_locations(tree)

    def place(self, root: Path) -> str:
        return f"{self.path.relative_to(root)}:{self.lines[0]}"


def mutants_of(path: Path, ignored_names: set[str]) -> Iterator[list[Mutant]]:
    """Return the mutants of a file, those of one place together.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "half.py"
    >>> _ = path.write_text("def half(x):\\n    return x / 2\\n")
    >>> [[mutant.change for mutant in place] for place in mutants_of(path, set())]
    [['x / 2 → x * 2'], ['2 → 3', '2 → 1', '2 → 4']]
    >>> print(ast.unparse(next(mutants_of(path, set()))[0].tree()))
    def half(x):
        return x * 2
    """
    text = path.read_text()
    lines = text.splitlines()
    for number, site in enumerate(sites(ast.parse(text))):
        if site.names & ignored_names:
            continue
        place: Any = site.node
        statement: Any = site.statement
        functions = [part for part in site.scope if part]
        on_import = site.scope[-1:] != ("",)
        compound = isinstance(statement, (ast.If, ast.While, ast.For, ast.With, ast.Try))
        yield [
            Mutant(
                path=path,
                site=number,
                option=option,
                function=".".join(functions) or "<module>",
                line=lines[place.lineno - 1].strip(),
                change=f"{_in_words(place)} → {_in_words(new)}",
                lines=tuple(range(place.lineno, getattr(place, "test", place).end_lineno + 1)),
                statement=tuple(range(statement.lineno, (place if compound else statement).end_lineno + 1)),
                names=(*functions[-1:], *(sorted(_targets(statement)) if on_import else ())),
                on_import=on_import,
            )
            for option, new in enumerate(site.options)
        ]


def _in_words(node: Any) -> str:
    # of `if` and `while` the question alone: their bodies say nothing about the change
    return ast.unparse(node.test if isinstance(node, (ast.If, ast.While)) else node)


def sites(tree: ast.Module) -> Iterator[Site]:
    """Walk over a file in a fixed order, and return what may be changed in it."""
    for index, statement in enumerate(tree.body):
        yield from _visit(tree, "body", index, statement, statement, (), frozenset())


def _visit(
    parent: ast.AST,
    field: str,
    index: int | None,
    node: ast.AST,
    statement: ast.stmt,
    scope: tuple[str, ...],
    names: frozenset[str],
) -> Iterator[Site]:
    # `scope` is the chain of classes and functions; it ends in "" inside the body of a function
    if isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert)) or _is_for_type_checkers(node):
        return
    if getattr(node, "name", "") in ("__repr__", "__str__"):
        return
    if isinstance(node, ast.stmt):
        statement = node
        names = frozenset(_targets(node))
    called = getattr(node, "func", None)
    if isinstance(called, (ast.Name, ast.Attribute)):
        names |= {f"{called.id if isinstance(called, ast.Name) else called.attr}()"}
    options = tuple(_options(node, in_function=scope[-1:] == ("",)))
    if options:
        yield Site(parent, field, index, node, options, statement, scope, names)
    if isinstance(node, ast.Raise):
        return
    for name, value in ast.iter_fields(node):
        if name in LEFT_ALONE or (isinstance(node, ast.Call) and name == "func" and isinstance(value, ast.Name)):
            continue
        inner = scope
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            inner = (*scope, node.name)
            if isinstance(node, ast.FunctionDef) and name == "body":
                inner = (*inner, "")
        children = value if isinstance(value, list) else [value]
        for i, child in enumerate(children):
            if isinstance(child, ast.AST) and not (
                isinstance(child, ast.Assign) and isinstance(children[-1], ast.Raise)
            ):
                given = names
                if isinstance(child, ast.keyword) and child.arg:
                    given = names | {child.arg}
                elif isinstance(node, ast.Dict) and name == "values" and isinstance(node.keys[i], ast.Constant):
                    given = names | {str(node.keys[i].value)}  # options, passed on with `**`
                elif isinstance(node, ast.arguments) and name in ("defaults", "kw_defaults"):
                    given = frozenset({_argument(node, name, i)})
                place = i if isinstance(value, list) else None
                yield from _visit(node, name, place, child, statement, inner, given)


def _argument(arguments: ast.arguments, name: str, index: int) -> str:
    if name == "kw_defaults":
        return arguments.kwonlyargs[index].arg
    plain = arguments.posonlyargs + arguments.args
    return plain[len(plain) - len(arguments.defaults) + index].arg


def _targets(node: ast.AST) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}


def _is_for_type_checkers(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        return "__all__" in _targets(node)
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _options(node: ast.AST, in_function: bool) -> Iterator[ast.AST]:
    if isinstance(node, DROPPED) and not _says_nothing(node):
        yield ast.Pass()
    if isinstance(node, ast.Assign) and any(isinstance(t, (ast.Subscript, ast.Attribute)) for t in node.targets):
        yield ast.Pass()
    if isinstance(node, (ast.BinOp, ast.AugAssign, ast.BoolOp)) and not _is_text(node):
        # outside functions `|` is mostly the or of types
        if in_function or not isinstance(getattr(node, "op", None), ast.BitOr):
            yield from (_with(node, op=new()) for new in OPERATORS[type(node.op)])
    elif isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            sides = [node.left, *node.comparators][i : i + 2]
            for new in OPERATORS[type(operator)]:
                if TIES.get(type(operator)) is not new or not _are_real(sides):
                    yield _with(node, ops=[*node.ops[:i], new(), *node.ops[i + 1 :]])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node.operand
    elif isinstance(node, ast.Constant):
        yield from (ast.Constant(value) for value in _values(node.value))
    elif isinstance(node, ast.Break):
        yield ast.Continue()
    elif isinstance(node, ast.Continue):
        yield ast.Break()
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        if isinstance(node.test, (ast.Name, ast.Attribute, ast.Call)):  # others are changed themselves
            yield _with(node, test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Call):
        yield from _calls(node)


def _are_real(sides: list[ast.expr]) -> bool:
    """Whether real numbers are compared, other than with zero: one has a fraction in it, or the name of one."""
    leaves = [leaf for side in sides for leaf in ast.walk(side)]
    numbers = [leaf.value for leaf in leaves if isinstance(leaf, ast.Constant)]
    names = {getattr(leaf, "id", getattr(leaf, "attr", "")) for leaf in leaves}
    fraction = any(isinstance(number, float) for number in numbers) or any(isinstance(leaf, ast.Div) for leaf in leaves)
    with_zero = any(isinstance(side, ast.Constant) and not side.value for side in sides)
    return (fraction or bool(names & REAL)) and not with_zero


def _says_nothing(node: Any) -> bool:
    if isinstance(node, ast.Raise):
        return isinstance(node.exc, ast.Name) and node.exc.id == "NotImplementedError"
    return isinstance(node, ast.Expr) and isinstance(node.value, BARE)


def _is_text(node: ast.AST) -> bool:
    sides = [getattr(node, name, None) for name in ("left", "right", "value")]
    return any(isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str) for side in sides)


def _calls(node: ast.Call) -> Iterator[ast.AST]:
    function: Any = node.func
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    if name in CALLED:
        new = copy.copy(function)
        setattr(new, "id" if isinstance(function, ast.Name) else "attr", CALLED[name])
        yield _with(node, func=new)
    if name in CALLED_AWAY and len(node.args) == 1 and not node.keywords:
        yield node.args[0]


def _values(value: object) -> Iterator[object]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int) and value <= 64:
        yield from (value + 1, value - 1)
        if value > 1:
            yield value * 2
    elif isinstance(value, float) and not 0 < value < 1e-8:
        yield from (value * 2, value / 2) if value else (1.0,)


def _with(node: Any, **fields: object) -> Any:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new
