"""Every number at which code begins to do something else has tests on both sides of it."""

import ast
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from repository import PACKAGES, ROOT

TABLE = tomllib.loads((ROOT / "tools" / "thresholds.toml").read_text())
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
ARITHMETIC = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Tuple, ast.List, ast.Load)


def is_number(value: ast.expr) -> bool:
    """Numbers and what is computed from them alone; also several at once."""
    leaves = [node for node in ast.walk(value) if not isinstance(node, ARITHMETIC)]
    return bool(leaves) and all(
        isinstance(leaf, ast.Constant) and type(leaf.value) in (int, float) for leaf in leaves
    )


def assigned(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Names and values of an assignment, also of `a, b = 1, 2`."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        targets: list[ast.expr] = [node.target]
    elif isinstance(node, ast.Assign):
        targets = node.targets
    else:
        return
    for target in targets:
        value = node.value
        assert value is not None
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=True))
        else:
            pairs = [(target, value)]
        yield from ((t.id, v) for t, v in pairs if isinstance(t, ast.Name))


@cache
def statements(source: str) -> list[ast.stmt]:
    """What is at the top of a module."""
    return ast.parse(source).body


def numbers_in(source: str) -> list[str]:
    """Names at the top of a module that stand for numbers."""
    found = chain.from_iterable(map(assigned, statements(source)))
    return [name for name, value in found if is_number(value)]


def fields_in(source: str) -> list[str]:
    """`Class.field` of every field of a class that is a number by default."""
    classes = [node for node in statements(source) if isinstance(node, ast.ClassDef)]
    return [f"{c.name}.{name}" for c in classes for node in c.body for name, _ in assigned(node)]


def places(names_in: Callable[[str], list[str]]) -> set[str]:
    """`module.name` of what `names_in` finds in the modules of the packages."""
    found = set()
    for path in chain.from_iterable((p / "src").rglob("*.py") for p in PACKAGES):
        parts = path.with_suffix("").parts
        module = ".".join(parts[len(parts) - parts[::-1].index("src") :])
        found |= {f"{module}.{name}" for name in names_in(path.read_text())}
    return found


def test_numbers_are_found_however_they_are_written():
    source = """
A = 256 * 1024
B: Final = -1
C, D = 1 << 30, (1, 2.5)
TEXT, FLAG, NOTHING, OTHER = "7", True, None, A * 2
EMPTY = ()
def f():
    E = 5
"""
    assert numbers_in(source) == ["A", "B", "C", "D"]


def test_every_number_is_in_the_table_once():
    listed = [name for part in TABLE.values() for name in part]
    assert sorted(set(listed)) == sorted(listed), "a number is listed twice"
    found = places(numbers_in)
    assert len(found) > 60
    missing = sorted(found - set(listed))
    assert missing == [], "say in tools/thresholds.toml which tests stand on both sides of these"
    # Options of classes may be listed, too; they are not looked for.
    gone = set(listed) - found - places(fields_in)
    assert gone == set(), "these are in tools/thresholds.toml, and nowhere else"


@cache
def functions_in(path: str) -> list[str]:
    """Names of the functions at the top of a file."""
    body = ast.parse(Path(ROOT, path).read_text()).body
    return [node.name for node in body if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("name", TABLE["thresholds"])
def test_the_tests_of_a_threshold_are_there(name):
    tests = TABLE["thresholds"][name]
    assert tests
    for test in tests:
        path, _, function = test.partition("::")
        assert function in functions_in(path), test


def test_what_hangs_is_shown_by_its_ranks_before_pytest_ends_it():
    from pcomm.core import environment
    from pcomm.core.testing.programs import LONGEST_S

    assert environment.RANKS_TIMEOUT_S.default < LONGEST_S
    assert SETTINGS["timeout"] >= LONGEST_S + 60
