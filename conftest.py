"""How pytest-xdist shares the tests among its processes, where they are several."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep each file in one process, and all files whose tests run on ranks in the same one.

    Fixtures of a file are made once, and so are ranks, which need both cores of a small machine
    when they compute; while they wait for each other, the other process has work for them.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    on_ranks = {item.path for item in items if "rank_pool" in getattr(item, "fixturenames", ())}
    for item in items:
        group = "ranks" if item.path in on_ranks else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
