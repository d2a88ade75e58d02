"""`pcomm train --resilient --launcher ray`: a Ray cluster runs the ranks and their store.

The driver, which is this command, starts an actor that keeps the store, and an actor for each rank.
Ray starts the actor of a rank again on another node when its own is gone, with `run` as it was
called; the rank then joins the others by itself. A store that is lost ends the attempt, and the
driver begins another one at a new store. No actor is detached: all of them end with the driver.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pcomm.core import environment
from pcomm.core.cli import what_to_install
from pcomm.core.errors import ConfigError, PcommError, UnsupportedError
from pcomm.core.process import RankPlace, RankReport, ResilientRanks, logs, open_store
from pcomm.integration.commands.train_resilient import (
    OF_EVERY_RANK,
    exit_code_of,
    outcome_of,
    prepare_launch,
    resilient_rank,
)
from pcomm.integration.metrics.picture import draw_loss
from pcomm.integration.train.interrupt import terminate_as_interrupt
from pcomm.ntp import StoreLostError
from pcomm.ntp.job import TRY_AGAIN

if TYPE_CHECKING:
    from pcomm.integration.config.sections import Config
    from pcomm.integration.train.loop import Outcome

__all__ = ["RankActor", "StoreActor", "launch_on_ray"]

_log = logging.getLogger("pcomm.train")

# Seconds between two looks at ranks that were asked to stop: one that Ray has started again
# meanwhile has not heard of it.
_LOOK_S = 5.0


def launch_on_ray(
    config: Config,
    run_dir: Path,
    ranks: int,
    *,
    must_restart: bool,
    output: logs.LogOutput | None = None,
    most_stores: int = 10,
) -> Outcome:
    """Run all ranks on the Ray cluster that this host belongs to, until the run ends.

    Ctrl-C and SIGTERM are passed on to the ranks, which save and end; a second one ends them.

    Args:
        config: The configuration as the user wrote it.
        run_dir: Folder of the run, which all nodes share; made if absent.
        ranks: Number of ranks, spare ones included; each asks Ray for one CPU.
        must_restart: True to remove the checkpoints and metrics that are there.
        output: Form and file of the ranks' messages; None for text on stderr.
        most_stores: Number of stores, one after the other, that the run may lose.

    Raises:
        UnsupportedError: Ray is not installed.
        ConfigError: There is no cluster, or the run cannot begin.
        StoreLostError: The last store was lost, too.
        PcommError: No rank has come to its end.
        KeyboardInterrupt: There was nothing to save, or a second request to stop.
    """
    ray = _connected()
    try:
        # Ray has set a handler of its own.
        with terminate_as_interrupt():
            # The same folder on all nodes, from whichever directory.
            run_dir = run_dir.resolve()
            prepare_launch(config, run_dir, ranks, must_restart=must_restart)
            for number in range(1, most_stores + 1):
                reports = _attempt(ray, ranks, (config, run_dir, output))
                if reports is not None:
                    outcome = outcome_of(reports, run_dir)
                    draw_loss(run_dir)
                    return outcome
                _log.warning("store %d of at most %d is lost, with all ranks", number, most_stores)
    finally:
        ray.shutdown()
    raise StoreLostError(
        "pcomm train --launcher ray",
        found=f"{most_stores} stores that were lost one after the other",
        why="The ranks meet in a store on the node of this command, and all end when it is gone.",
        fix="Look in Ray's logs for what ends it, such as too little memory on this node; the same "
        "command goes on from the newest checkpoint.",
    )


def _connected() -> Any:
    """The module of Ray, connected to a cluster that runs."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "pcomm train --launcher ray",
            found=f"no package {error.name}",
            why="Ray starts the ranks, and starts them again on other nodes.",
            fix="In a checkout run `python3 -m pip install "
            f"{what_to_install('pcomm-integration', 'ray')}` on every node.",
        ) from error
    try:
        ray.init(address="auto")
    except ConnectionError as error:
        raise ConfigError(
            "pcomm train --launcher ray",
            found=str(error).splitlines()[0],
            why="The ranks are actors of a Ray cluster that is there before them.",
            fix="Start this command on a node of the cluster (`ray start`), by `ray job submit`, "
            "or with RAY_ADDRESS.",
        ) from error
    return ray


def _attempt(ray: Any, ranks: int, of_run: tuple[object, ...]) -> dict[int, RankReport] | None:
    """How the ranks have ended at one store; None where the store is lost before them."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Where the driver's end would end the job anyway.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    store = ray.remote(StoreActor).options(num_cpus=0, scheduling_strategy=here).remote()
    # A resilient run trains on CPUs, so none of a node's GPUs is taken from others.
    rank_actor = ray.remote(RankActor).options(
        num_cpus=1,
        max_restarts=-1,
        max_task_retries=-1,
        # One for `run`, one for `stop`.
        max_concurrency=2,
        scheduling_strategy="SPREAD",
    )
    cpus = int(ray.cluster_resources().get("CPU", 0))
    if cpus < ranks:
        _log.warning("%d ranks for %d CPUs: the run waits until the cluster grows", ranks, cpus)
    variables = {name: text for name, text in os.environ.items() if name.startswith("PCOMM_")}
    actors = [rank_actor.remote(os.getcwd(), variables) for _ in range(ranks)]
    try:
        try:
            host, port = ray.get(store.open.remote())
            nodes = ray.get([actor.node.remote() for actor in actors])
        except ray.exceptions.RayError as error:
            raise ConfigError(
                "pcomm train --launcher ray",
                found=f"{type(error).__name__}: {error}",
                why="Ray could not start an actor of the run.",
                fix="Install the same versions of Python, Ray and pcomm on all nodes.",
            ) from error
        _log.info("%d ranks on %d nodes, store at %s:%d", ranks, len(set(nodes)), host, port)
        # Ranks of a node are neighbours, such as those of a tensor-parallel group.
        by_node = [
            actor for _, actor in sorted(zip(nodes, actors, strict=True), key=lambda x: x[0])
        ]
        calls = {
            actor.run.remote(RankPlace(rank, ranks, host, port), *of_run): (rank, actor)
            for rank, actor in enumerate(by_node)
        }
        return _follow(ray, store.hold.remote(), calls)
    finally:
        for actor in [*actors, store]:
            ray.kill(actor)


def _follow(ray: Any, held: Any, calls: dict[Any, tuple[int, Any]]) -> dict[int, RankReport] | None:
    """How the ranks have ended, as `_attempt`; a request to stop is passed on to them.

    Args:
        ray: The module of Ray.
        held: Reference of a call that ends when the store does.
        calls: References of the calls of the ranks, each with the rank and its actor.
    """
    reports: dict[int, RankReport] = {}
    is_asked = False
    while calls:
        try:
            done, _ = ray.wait([held, *calls], timeout=_LOOK_S)
            for call in calls.keys() & set(done):
                reports[calls[call][0]] = ray.get(call)
                del calls[call]
            if held in done:
                break
        except KeyboardInterrupt:
            if is_asked:
                raise
            is_asked = True
            _log.warning("the ranks are asked to save and to end")
        if is_asked:
            for _, actor in calls.values():
                actor.stop.remote()
    if is_asked and (calls or not any(report.has_finished for report in reports.values())):
        raise KeyboardInterrupt
    return None if calls else reports


class StoreActor:
    """An actor that keeps the store of a job for as long as it lives."""

    def open(self) -> tuple[str, int]:
        """Open the store at the node's address in the cluster; returns host and port."""
        import ray

        host = str(ray.util.get_node_ip_address())
        self._store = open_store(host, 0)
        return host, self._store.port

    def hold(self) -> None:
        """Never return: the caller gets an error when the store is gone."""
        threading.Event().wait()


class RankActor:
    """An actor that starts the process of a rank, and starts it again when it has died.

    The process is below the actor and ends with it. So a signal can ask it to save; and SIGTERM,
    which a node that goes away sends to its actors, ends one rank and not the run.

    Args:
        folder: Directory of the driver, which relative paths begin at where the node has it.
        variables: Environment variables of the driver.
    """

    def __init__(self, folder: str, variables: dict[str, str]) -> None:
        os.environ.update(variables)
        with suppress(OSError):
            os.chdir(folder)
        self._changed = threading.Lock()
        self._processes: ResilientRanks | None = None
        self._is_stopped = False

    def node(self) -> str:
        """The node that Ray has chosen."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def run(
        self, place: RankPlace, config: Config, run_dir: Path, output: logs.LogOutput | None
    ) -> RankReport:
        """Run the rank until it need not start again; as `resilient_rank`, but for the return.

        Returns:
            How its last process has ended.
        """
        logs.configure(environment.log_level(), place.rank, size=place.size, output=output)
        # For the process alone; the store beside it is not used.
        with ResilientRanks(1, preload=OF_EVERY_RANK, imports_main=False) as processes:
            while True:
                with self._changed:
                    if self._is_stopped:
                        return RankReport(place.rank, 0, "asked to stop before it began")
                    if self._processes is None:
                        processes.start(_rank_process, (place, config, run_dir, output))
                        self._processes = processes
                    else:
                        processes.join_again(0)
                report = processes.wait()[0]
                if _is_final(report):
                    return report
                _log.warning("rank %d: %s; it is started again", place.rank, report.reason)

    def stop(self) -> None:
        """Ask the rank to save and to end; again does nothing."""
        with self._changed:
            if not self._is_stopped and self._processes is not None:
                self._processes.kill(0, signal.SIGINT)
            self._is_stopped = True


def _rank_process(
    _: RankPlace, place: RankPlace, config: Config, run_dir: Path, output: logs.LogOutput | None
) -> Outcome | None:
    """The process of a rank, which finds the others in the store of the cluster."""
    return resilient_rank(place, config, run_dir, output)


def _is_final(report: RankReport) -> bool:
    """Whether a rank need not start again: as a launcher knows it from the exit code."""
    if isinstance(report.error, PcommError):
        return exit_code_of(report.error) != TRY_AGAIN
    # The latter where another process has its rank.
    return report.has_finished or report.reason == "exit code 2"
