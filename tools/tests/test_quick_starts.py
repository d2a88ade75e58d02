"""Runs the quick starts of the page on serving as they are shown, with smaller models."""

from __future__ import annotations

import argparse
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from code_blocks import CodeBlock, code_blocks
from integration_support.live_server import LiveServer
from pcomm.core.cli import main
from pcomm.integration.commands.llm_options import llm_options
from pcomm.integration.commands.serve import ServeCommand
from pcomm.integration.llm import LLM
from repository import ROOT
from shell_words import commands

PAGE = (ROOT / "docs" / "how-to" / "serve-a-model.md").read_text()
# Text between a heading of the third level and the next heading.
SECTIONS = dict(re.findall(r"^### (.+)\n((?:(?!#{2,3} ).*\n)*)", PAGE, re.MULTILINE))
# Given after what the page shows, so that a training takes a second. The vocabulary is the one that
# is shown: how many tokens a text has decides what the prefix cache finds.
SMALLER = (
    "model.layers=4",
    "model.width=32",
    "model.heads=4",
    "model.mlp_width=64",
    "model.init_std=0.3",
    "train.steps=2",
    "train.global_batch_tokens=256",
    "train.warmup_steps=1",
    "train.eval_every='none'",
    "checkpoint.every='end'",
    "sample.prompt=''",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory that looks like a checkout, and has a part of what users' runs learn."""
    (tmp_path / "integration").symlink_to(ROOT / "integration")
    (tmp_path / "text").mkdir()
    for path in Path(sysconfig.get_path("stdlib")).glob("s*.py"):
        (tmp_path / "text" / f"{path.stem}.txt").write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    # For matrices this small, several threads only wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


def blocks(section: str, language: str) -> Iterator[CodeBlock]:
    return (block for block in code_blocks(section) if block.language == language)


def execute(text: str) -> None:
    """Run the code of a page, in names of its own."""
    exec(compile(text, "a block of the page", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("title", SECTIONS)
def test_a_quick_start_trains_writes_serves_and_is_answered(title, folder, capsys):
    train, generate, serve = (
        words for block in blocks(SECTIONS[title], "bash") for words in commands(block.text)
    )
    assert [words[:2] for words in (train, generate, serve)] == [
        ["pcomm", "train"],
        ["pcomm", "generate"],
        ["pcomm", "serve"],
    ]
    smaller = [*SMALLER, f"data.path=['{folder}/text/*.txt']"]
    assert main([*train[1:], *(word for key in smaller for word in ("--set", key))]) == 0
    capsys.readouterr()
    assert main(generate[1:]) == 0
    written = capsys.readouterr().out
    prompt = generate[generate.index("--prompt") + 1]
    assert written.startswith(prompt)
    assert len(written) > len(prompt) + 1

    client, alone = (block.text for block in blocks(SECTIONS[title], "python"))
    execute(alone)
    printed = capsys.readouterr().out
    assert printed.strip()
    if cached := [int(number) for number in re.findall(r"from the cache: (\d+)", printed)]:
        # The page says that only the first of the prompts is computed, and to what it is rounded.
        assert cached[0] == 0
        assert min(cached[1:]) > 0
        assert [number % 64 for number in cached] == [0] * len(cached)
    assert bool(cached) == ("cached_tokens" in alone)

    parser = argparse.ArgumentParser()
    ServeCommand().add_arguments(parser)
    told = parser.parse_args(serve[2:])
    address = f"http://{told.host}:{told.port}/v1"
    assert address in client
    limits = {"max_requests": told.max_requests, "max_queued": told.max_queued}
    with (
        LLM(**llm_options(told), **limits) as llm,
        LiveServer(llm, model_name=told.model.resolve().name) as server,
    ):
        execute(client.replace(address, f"{server.url}/v1"))
    assert capsys.readouterr().out.strip()


def test_readmes_continue_prompts_with_the_run_that_they_have_made_before(folder, capsys):
    smaller = [*SMALLER, f"data.path=['{folder}/text/*.txt']"]
    command = ["train", "--config", "integration/configs/quickstart.toml", "--out"]
    run = "runs/quickstart"
    assert main([*command, run, *(word for key in smaller for word in ("--set", key))]) == 0
    for name in ("README.md", "integration/README.md"):
        page = (ROOT / name).read_text()
        texts = (block.text for block in blocks(page, "python"))
        (alone,) = (text for text in texts if re.findall(r'LLM\("(.+?)"', text) == [run])
        capsys.readouterr()
        execute(alone)
        assert capsys.readouterr().out.strip(), name


def test_there_is_a_quick_start_for_each_kind_of_model():
    shown = re.findall(r"^pcomm train --config integration/configs/(\w+)\.toml", PAGE, re.MULTILINE)
    assert shown == ["quickstart", "mamba", "hybrid"]
    assert len(SECTIONS) == len(shown)
