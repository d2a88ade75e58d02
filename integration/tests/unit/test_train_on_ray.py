"""What the driver of `--launcher ray` asks of Ray, told by a script of what becomes of its actors.

`tests/e2e/test_train_on_ray.py` has the real one.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pcomm.core.cli import main
from pcomm.core.errors import ConfigError
from pcomm.core.process import RankPlace, RankReport
from pcomm.integration.commands.train_on_ray import launch_on_ray
from pcomm.integration.config.sections import Config
from pcomm.integration.train.loop import Outcome
from pcomm.ntp import StoreLostError

REFUSED = ConfigError("train.steps", found="0", why="It is none.", fix="Set it.")
DONE = Outcome(5, 1.5, is_interrupted=False)
STOPPED = Outcome(3, None, is_interrupted=True)
FINISHED, SAVED = (RankReport(0, 0, "finished", outcome) for outcome in (DONE, STOPPED))
NEVER = RankReport(0, 0, "asked to stop before it began")
FAILED = RankReport(0, 0, "failed: ConfigError", error=REFUSED)


class FakeActor:
    """An actor that does nothing: what its calls come to is in the script."""

    def __init__(self, ray: FakeRay, kind: str, options: dict[str, Any]) -> None:
        self.ray, self.kind, self.options = ray, kind, options
        self.node_name = next(ray.nodes) if kind == "RankActor" else "head"
        self.stops = 0
        self.place: RankPlace | None = None
        ray.actors.append(self)

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *words: self._call(method, *words))

    def _call(self, method: str, *words: Any) -> Any:
        if method == "open":
            return ["10.0.0.1", 29500]
        if method == "node":
            return self.node_name
        if method == "stop":
            self.stops += 1
        elif method == "run":
            self.place = words[0]
            return f"rank {self.place.rank} of store {self.ray.stores}"
        else:
            self.ray.stores += 1
        return f"store {self.ray.stores}"


class FakeRay(ModuleType):
    """The few names of Ray that are used.

    Args:
        script: What each `wait` finds: reports by rank, "lost" for the store, "signal" for Ctrl-C,
            or "silence".
    """

    def __init__(self, script: Sequence[Any]) -> None:
        super().__init__("ray")
        self.script = iter(script)
        self.nodes: Iterator[str] = iter("babc" * 12)
        self.actors: list[FakeActor] = []
        self.killed: list[FakeActor] = []
        self.stores, self.is_connected = 0, False
        self.exceptions = SimpleNamespace(RayError=RuntimeError)

    def init(self, address: str) -> None:
        assert address == "auto"
        self.is_connected = True

    def shutdown(self) -> None:
        self.is_connected = False

    def get_runtime_context(self) -> SimpleNamespace:
        return SimpleNamespace(get_node_id=lambda: "head")

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 3.0}

    def remote(self, kind: type) -> SimpleNamespace:
        def options(**given: Any) -> SimpleNamespace:
            return SimpleNamespace(remote=lambda *_: FakeActor(self, kind.__name__, given))

        return SimpleNamespace(options=options)

    def wait(self, calls: list[str], timeout: float) -> tuple[list[str], list[str]]:
        held, *running = calls
        now = next(self.script)
        if now == "signal":
            raise KeyboardInterrupt
        if now == "silence":
            return [], calls
        if now == "lost":
            return [held], running
        self.reports = {call: now[rank] for rank, call in self._ranks(running) if rank in now}
        return list(self.reports), []

    def get(self, call: Any) -> Any:
        return self.reports.pop(call) if isinstance(call, str) and call in self.reports else call

    def kill(self, actor: FakeActor) -> None:
        self.killed.append(actor)

    reports: dict[str, RankReport] = {}  # noqa: RUF012

    def _ranks(self, calls: list[str]) -> list[tuple[int, str]]:
        return [(int(call.split()[1]), call) for call in calls]


ALL = dict.fromkeys(range(4), FINISHED)


@pytest.fixture
def play(monkeypatch, tmp_path):
    """`play(script)` runs four ranks through a script; all of its actors are killed then."""

    def run(script: Sequence[Any]) -> tuple[FakeRay, Outcome | type[BaseException]]:
        ray = FakeRay(script)
        chosen = ModuleType("ray.util.scheduling_strategies")
        chosen.NodeAffinitySchedulingStrategy = lambda node, soft: (node, soft)
        for name, module in (
            ("ray", ray),
            ("ray.util", ModuleType("ray.util")),
            (chosen.__name__, chosen),
        ):
            monkeypatch.setitem(sys.modules, name, module)
        # What the ranks would have left.
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
        try:
            result = launch_on_ray(Config(), tmp_path / "run", 4, must_restart=False)
        except (Exception, KeyboardInterrupt) as error:
            result = type(error)
        assert Counter(map(id, ray.killed)) == Counter(map(id, ray.actors))
        assert not ray.is_connected
        assert next(ray.script, "over") == "over"
        return ray, result

    return run


@pytest.mark.parametrize(
    ("script", "stores", "expected"),
    [
        ([ALL], 1, DONE),
        # Before and after others have ended, and at the same look.
        (["lost", {0: FINISHED}, "lost", ALL], 3, DONE),
        (["lost"] * 9 + [ALL], 10, DONE),
        (["lost"] * 10, 10, StoreLostError),
        # One that did not end well does not count beside one that did.
        ([{2: FAILED}, {0: FINISHED, 1: FINISHED, 3: FINISHED}], 1, DONE),
        ([dict.fromkeys(range(4), FAILED)], 1, ConfigError),
        (["signal", dict.fromkeys(range(4), SAVED)], 1, STOPPED),
        (["signal", {0: SAVED, 1: NEVER, 2: SAVED, 3: SAVED}], 1, STOPPED),
        (["signal", dict.fromkeys(range(4), NEVER)], 1, KeyboardInterrupt),
        (["signal", "silence", "signal"], 1, KeyboardInterrupt),
        (["signal", {1: SAVED}, "lost"], 1, KeyboardInterrupt),
    ],
)
def test_what_becomes_of_a_run(play, script, stores, expected):
    ray, result = play(script)
    assert result == expected
    assert ray.stores == stores
    assert len(ray.actors) == stores * 5


def test_what_is_asked_of_ray(play, caplog):
    ray, _ = play(["silence", {3: FINISHED}, "signal", "silence", dict.fromkeys(range(3), SAVED)])
    # Such a cluster may grow.
    assert "4 ranks for 3 CPUs" in caplog.text
    store, *ranks = ray.actors
    # On the driver's own node, and never restarted: it would be empty.
    assert store.options == {"num_cpus": 0, "scheduling_strategy": ("head", False)}
    for actor in ranks:
        assert actor.options["max_restarts"] == actor.options["max_task_retries"] == -1
        assert actor.options["scheduling_strategy"] == "SPREAD"
        assert "lifetime" not in actor.options
    places = {actor.place.rank: actor for actor in ranks}
    # The ranks of a node are neighbours.
    assert [places[rank].node_name for rank in range(4)] == ["a", "b", "b", "c"]
    assert {actor.place.address for actor in ranks} == {"10.0.0.1:29500"}
    # At each look, as Ray may have started one again; not one that has ended.
    assert [places[rank].stops for rank in range(4)] == [2, 2, 2, 0]


def test_what_is_refused(monkeypatch, tmp_path, capsys):
    words = ["train", "--out", str(tmp_path / "run"), "--launcher", "ray", "--ranks", "2"]
    resilient = [*words, "--resilient"]
    for options in (words, [*resilient, "--store", "localhost:1"], [*resilient, "--rank", "0"]):
        assert main(options) == 2
        assert "--launcher ray with --store or --rank, or without" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)
    # A store of another job has no say.
    monkeypatch.setenv("PCOMM_STORE", "localhost:1")
    assert main(resilient) == 2
    assert "'./integration[ray]'` on every node" in capsys.readouterr().err
    ray = FakeRay([])
    monkeypatch.setattr(ray, "init", lambda address: (_ for _ in ()).throw(ConnectionError("none")))
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert main(resilient) == 2
    assert "Start this command on a node of the cluster" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
