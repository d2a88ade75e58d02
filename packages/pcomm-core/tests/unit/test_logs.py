"""Logging: silent until a command asks, rank 0 speaks, the root logger stays as it was."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pcomm.core.process import logs


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    logger = logging.getLogger("pcomm")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


def test_rank_0_writes_levels_from_the_one_asked_and_others_warnings_only() -> None:
    root, logger = logging.getLogger(), logging.getLogger("pcomm.core.groups.open_groups")
    theirs, before = logging.NullHandler(), (list(root.handlers), root.level)
    logging.getLogger("pcomm").addHandler(theirs)
    first, second = io.StringIO(), io.StringIO()
    logs.configure("info", 0, stream=first)
    logger.debug("quiet")
    logger.info("opened %d", 3)
    assert first.getvalue() == "INFO rank 0 pcomm.core.groups.open_groups: opened 3\n"
    # A second call replaces the first.
    logs.configure("debug", 5, stream=second)
    logger.info("the same on every rank")
    logger.warning("only here")
    assert second.getvalue() == "WARNING rank 5 pcomm.core.groups.open_groups: only here\n"
    assert "only here" not in first.getvalue()
    # What the program had stays, and so does the root logger.
    assert theirs in logging.getLogger("pcomm").handlers
    assert (list(root.handlers), root.level) == before


def test_without_a_stream_it_follows_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("info", 0)
    logging.getLogger("pcomm").info("hello")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "INFO rank 0 pcomm: hello" in captured.err


def test_importing_every_module_configures_nothing() -> None:
    # In a process of its own, because pytest has attached handlers to this one. Modules are
    # imported for the first time there, and torch before them: what torch does is its own.
    program = """
import importlib, logging, pkgutil, torch, torch.distributed
root = logging.getLogger()
before = list(root.handlers), root.level
import pcomm.core
names = [m.name for m in pkgutil.walk_packages(pcomm.core.__path__, "pcomm.core.")]
for name in names:
    if not name.startswith("pcomm.core.testing"):
        importlib.import_module(name)
assert "pcomm.core.cli" in names and "pcomm.core.doctor.checks" in names, names
assert (list(root.handlers), root.level) == before, root.handlers
ours = logging.getLogger("pcomm")
assert (ours.handlers, ours.level, ours.propagate) == ([], logging.NOTSET, True), ours.handlers
"""
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == ""
