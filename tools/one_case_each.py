"""A plugin of pytest: one case of each test, and few examples of those that hypothesis makes.

`nox -s oldest` and `newest` run some files with it, and `nox -s isolated` the tests of an installed
wheel, of which it takes one of each file: importing the file needs nearly all that the wheel must
bring. The session `tests` runs every case.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# Chosen by `--hypothesis-profile`; a test that sets a number of its own keeps it.
settings.register_profile(
    "one_case_each", deadline=None, max_examples=5, suppress_health_check=[HealthCheck.too_slow]
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--only-in` and `--one-of-each-file`: what is run of the files that are imported."""
    parser.addoption(
        "--only-in", action="append", default=[], metavar="PATH", help="run no tests elsewhere"
    )
    parser.addoption(
        "--one-of-each-file",
        action="append",
        default=[],
        metavar="PATH",
        help="run the first test of each file there, and one case of each test elsewhere",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect all but the first case of each test, or file, and what lies elsewhere."""
    places = tuple(config.getoption("--only-in")) or ("",)
    by_file = tuple(config.getoption("--one-of-each-file"))
    first: dict[str, pytest.Item] = {}
    for item in items:
        if item.nodeid.startswith(places):
            end = "::" if item.nodeid.startswith(by_file) else "["
            first.setdefault(item.nodeid.partition(end)[0], item)
    kept = set(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]
