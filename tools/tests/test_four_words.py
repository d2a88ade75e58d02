"""The four words of core are used by the packages above it, and the documentation says where.

A product module is part of a wheel and neither core's own, nor a benchmark, nor a test tool.
"""

import ast
import re
from pathlib import Path

import pytest

from repository import ROOT, sources

PAGE = ROOT / "docs" / "concepts" / "layout-and-exchange.md"
# What stands for each word, and the fewest product modules that use it.
WORDS = {
    "Topology, Group": ({"Topology", "Group", "Groups", "open_groups"}, 8),
    "Layout": ({"Layout", "ParamLayout"}, 8),
    "Exchange": ({"Exchange", "SectionExchange", "RowMoves"}, 4),
    "identity": ({"IdentityCollectives"}, 2),
}


def product_modules() -> dict[str, Path]:
    """Sources by the names of their modules below `pcomm`, such as `gdn_cp.plan`."""
    found = {}
    for path in sources():
        parts = path.with_suffix("").parts
        below = parts[len(parts) - parts[::-1].index("pcomm") :]
        if below[0] != "core" and not {"bench", "testing"} & set(below):
            found[".".join(below)] = path
    return found


def imports_from_core(path: Path) -> set[str]:
    """Names that a module takes from core when it runs."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    return {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and str(node.module).startswith("pcomm.core")
        and id(node) not in for_types
        for alias in node.names
    }


def users(names: set[str]) -> set[str]:
    return {module for module, path in product_modules().items() if imports_from_core(path) & names}


@pytest.mark.parametrize("word", WORDS)
def test_a_word_has_users_outside_core(word):
    names, fewest = WORDS[word]
    assert len(users(names)) >= fewest


def test_the_page_names_every_user_of_exchange():
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith("| `Exchange` | `")]
    named = set(re.findall(r"`((?:gdn_cp|fsdp|integration|inference|ntp|nvls)\.[\w.]+)`", row))
    assert named == users(WORDS["Exchange"][0])


def test_all_to_all_is_called_by_exchanges_alone():
    """Numbers for the host may be sent in any way; tensors of a model move by an exchange.

    The references of pcomm-nvls are collectives themselves, whose sums are made in rank order.
    """
    callers = {
        module for module, path in product_modules().items() if ".all_to_all(" in path.read_text()
    }
    references = {module for module in callers if module.startswith("nvls.references.")}
    assert callers - references == {"integration.models.moe.dispatch"}
    dispatch = product_modules()["integration.models.moe.dispatch"].read_text()
    assert re.findall(r"\.all_to_all\((\w+)\)", dispatch) == ["counts_E"]
