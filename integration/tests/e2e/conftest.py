"""A tiny run to start from the command line, in this process or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from integration_support.forked_commands import ForkedCommand
from integration_support.short_runs import without_pictures, write_words
from pcomm.core.cli import main
from pcomm.core.testing.programs import Programs
from pcomm.integration.commands import train as train_module
from pcomm.integration.commands import train_resilient
from pcomm.integration.llm import engine_on_ranks

CONFIG = """
[model]
layers = 2
width = 32
heads = 4
kv_heads = 2
mlp_width = 64

[train]
steps = 6
sequence_length = 32
global_batch_tokens = 256
learning_rate = 1e-2
warmup_steps = 2
eval_every = 2
eval_tokens = 512

[data]
path = ["{text}"]
vocabulary = 320

[checkpoint]
every = 2

[sample]
prompt = "word"
max_tokens = 8
"""


# What ranks of commands import late, and what the first one draws with: a second for each rank.
_OF_RANKS = (
    *train_module._OF_EVERY_RANK,
    *train_resilient.OF_EVERY_RANK,
    *engine_on_ranks._PRELOADED,
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "torch.utils.tensorboard",
)


@pytest.fixture(scope="session", autouse=True)
def _imported_once() -> Iterator[None]:
    """The server from which ranks of this process come imports for all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "_OF_EVERY_RANK", _OF_RANKS)
        patch.setattr(train_resilient, "OF_EVERY_RANK", _OF_RANKS)
        patch.setattr(engine_on_ranks, "_PRELOADED", _OF_RANKS)
        yield


@pytest.fixture(scope="session")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of six steps on text that is easy to learn."""
    folder = tmp_path_factory.mktemp("tiny")
    file = folder / "tiny.toml"
    file.write_text(CONFIG.format(text=write_words(folder / "text", documents=40)))
    return file


@pytest.fixture(scope="session")
def train(config_file: Path) -> Callable[..., int]:
    """`train(out, *words)`: `pcomm train` in this process, which has loaded torch already.

    Alone it draws no picture; the first of several ranks does.
    """

    def run(out: Path, *words: str) -> int:
        with without_pictures():
            return main(["train", "--config", str(config_file), "--out", str(out), *words])

    return run


@pytest.fixture(scope="module")
def started() -> Iterator[Programs]:
    """The programs that the tests of a file have started."""
    with Programs() as programs:
        yield programs


@pytest.fixture(autouse=True)
def _nothing_trains_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails, or is interrupted, ends what it has started, with all of its ranks."""
    yield
    if "started" in request.fixturenames:
        request.getfixturevalue("started").stop()


@pytest.fixture(scope="module")
def start(started: Programs) -> Callable[..., subprocess.Popen[str]]:
    """`start(*words)`: a command in a session of its own, ended with the test that started it.

    The first word `pcomm` stands for the installed script, and `python` for this interpreter.
    """
    programs = {"pcomm": Path(sysconfig.get_path("scripts"), "pcomm"), "python": sys.executable}
    # One thread each: ranks that spin for a core they do not get take minutes.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(program: str, *words: object, **options: Any) -> subprocess.Popen[str]:
        return started.start(programs.get(program, program), *words, env=environment, **options)

    return run


@pytest.fixture
def fork() -> Iterator[Callable[..., ForkedCommand]]:
    """`fork(*words)`: what `start("pcomm", *words)` gives, without the seconds of its imports."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:

        def run(*words: object, **options: Any) -> ForkedCommand:
            command = ForkedCommand(*words, env=environment, preload=_OF_RANKS, **options)
            stack.callback(command.close)
            return command

        yield run
