"""Text that is easy to learn, as tokens, for every file of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_support.short_runs import prepare_words


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tokens, and with their text in `text`; no test writes there."""
    return prepare_words(tmp_path_factory.mktemp("run"))
