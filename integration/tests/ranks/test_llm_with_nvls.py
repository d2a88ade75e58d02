"""Engines whose collectives are those of pcomm-nvls, emulated: the tokens of torch.distributed."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch

from integration_support.short_runs import tiny_run
from pcomm.core import Topology, connect, open_groups
from pcomm.core.errors import ConfigError, UnsupportedError
from pcomm.core.testing import ranks
from pcomm.inference import SamplingParams
from pcomm.integration.llm import LLM, engine_on_ranks, rank_engine
from pcomm.integration.llm.rank_engine import GROUP
from pcomm.integration.llm.rank_engine import installed_collectives as installed

OPTIONS: dict[str, Any] = {"max_model_len": 96, "memory_bytes": 2**21, "max_requests": 3}
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
PROMPTS = ["word1 word2 word3", "word3"]
# Two sums a layer of mixer and MLP, embedding and logits: for each of three steps.
LAUNCHES = 3 * 8
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with every mixer."""
    keys = ("model.layers=3", "model.kv_heads=2", "model.mamba_groups=2")
    return tiny_run(tmp_path_factory.mktemp("run"), "GMA", *keys)


@ranks(2)
def test_tokens_are_those_of_torch_distributed(rank, run):
    from nvls_support.emulation import emulate

    emulate()
    from pcomm.nvls._nvls_collectives import nvls_collectives

    make, topology, options = nvls_collectives(1 << 16), Topology({"tp": 2}), dict(OPTIONS)
    with (
        connect(),
        open_groups(topology, ["tp"]) as plain,
        open_groups(topology, ["tp"], collectives=make) as ours,
    ):
        made: Any = ours["tp"].collectives
        before = made.workspace.num_launches
        with LLM(run, group=plain["tp"], **options) as llm:
            expected = llm.generate(PROMPTS, GREEDY)
        assert made.workspace.num_launches == before
        with LLM(run, group=ours["tp"], **options) as llm:
            found = llm.generate(PROMPTS, GREEDY)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        assert made.workspace.num_launches - before >= LAUNCHES


# The package of this checkout, as if it were installed, and counted.
INSTALLED = """
import json, os
from importlib.metadata import EntryPoint, EntryPoints
# The server that forks ranks may have imported the kernels already, without the interpreter.
from nvls_support.emulation import emulate
emulate()
from pcomm.integration.llm import rank_engine
from pcomm.nvls.workspace.workspace import Workspace
point = EntryPoint("nvls", "pcomm.nvls._nvls_collectives:nvls_collectives", "pcomm.collectives")
rank_engine.entry_points = lambda group: EntryPoints([point]).select(group=group)
close = Workspace.close

def counted(self):
    with open(os.path.join(folder, f"{self.group.rank}.json"), "w") as file:
        json.dump(self.num_launches, file)
    close(self)

Workspace.close = counted
rank_engine.serve_engine(*arguments)
"""


class Installed:
    """`serve_engine` with the package installed; tests cannot be imported by ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        names = f"{{'arguments': arguments, 'folder': {str(self.folder)!r}}}"
        return eval, (f"lambda *arguments: exec({INSTALLED!r}, {names})",)

    def __call__(self) -> None: ...


def test_ranks_of_an_llm_take_what_is_installed(run, tmp_path, monkeypatch):
    with LLM(run, **OPTIONS) as alone:
        expected = alone.generate(PROMPTS, GREEDY)
    monkeypatch.setattr(engine_on_ranks, "serve_engine", Installed(tmp_path))
    with LLM(run, ranks=2, **OPTIONS) as llm:
        found = llm.generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    counts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert counts[0] == counts[1] >= LAUNCHES


def test_on_a_cpu_nothing_is_looked_for_and_nothing_is_imported(monkeypatch):
    found: list[EntryPoint] = []
    asked: list[str] = []

    def entry_points(group: str) -> EntryPoints:
        asked.append(group)
        return EntryPoints(found).select(group=group)

    monkeypatch.setattr(rank_engine, "entry_points", entry_points)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert installed(CPU) is None
    assert asked == []
    assert installed(GPU) is None
    assert asked == [GROUP]
    found += [EntryPoint("nvls", "nowhere.at:all", GROUP)] * 2
    with pytest.raises(UnsupportedError, match="No module named 'nowhere'"):
        installed(GPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UnsupportedError, match="'nvls' of an engine"):
        installed(CPU)
    found.append(EntryPoint("other", "builtins:dict", GROUP))
    with pytest.raises(ConfigError, match="nvls, other are installed"):
        installed(CPU)
    del found[:2]
    assert installed(CPU) == {}
