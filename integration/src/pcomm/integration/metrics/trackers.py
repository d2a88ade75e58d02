"""TensorBoard and Weights & Biases: a run goes on without them, whatever they meet."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from pcomm.integration.config.sections import Config
from pcomm.integration.config.toml import to_dict
from pcomm.integration.files import atomic_write
from pcomm.integration.metrics.rows import Row, tagged

__all__ = ["TrackerSink", "open_tensorboard", "open_wandb"]

_log = logging.getLogger("pcomm.train")

# Where a run keeps the id under which it goes on, beside what the client writes.
_ID = "run-id"
# Seconds that a server may take: ranks wait for the first one when it begins, and when it ends.
_INIT_S, _LOGIN_S, _FINISH_S = 20.0, 30.0, 60.0


class TrackerSink:
    """Rows as tagged numbers for another program; the first error of it is told, and its last.

    Args:
        name: What the program is called.
        log: Function of the numbers of a row by their tags, and of the step.
        finish: Function that writes or sends what is pending, and closes.
    """

    def __init__(
        self,
        name: str,
        log: Callable[[dict[str, float], int], object],
        finish: Callable[[], object],
    ) -> None:
        self._name, self._log, self._finish = name, log, finish
        self._has_failed = False

    def write(self, row: Row) -> None:
        """Give every number but the step, at that step."""
        if not self._has_failed:
            self._attempt(lambda: self._log(tagged(row), int(row["step"])))

    def close(self) -> None:
        """Write what is pending, and close."""
        self._attempt(self._finish)

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        # Code of others, which may meet a full disk or a network: the run is worth more.
        except Exception as error:
            if not self._has_failed:
                _log.warning(
                    "%s gets no more rows (%s: %s); metrics.jsonl has every row",
                    self._name,
                    type(error).__name__,
                    error,
                )
            self._has_failed = True


def open_tensorboard(folder: Path, *, keep_through: int | None = None) -> TrackerSink | None:
    """A sink that writes event files to `folder`, or None where TensorBoard is not installed.

    Args:
        folder: Folder of the event files, which is made if it is absent.
        keep_through: Step after which a resumed run hides the rows of an earlier attempt; None
            for a run that begins.
    """
    if importlib.util.find_spec("tensorboard") is None:
        return None
    module = _imported("torch.utils.tensorboard", "TensorBoard")
    if module is None:
        return None
    purge_step = None if keep_through is None else keep_through + 1
    writer = module.SummaryWriter(str(folder), purge_step=purge_step)

    def log(numbers: dict[str, float], step: int) -> None:
        for tag, value in numbers.items():
            writer.add_scalar(tag, value, step)

    return TrackerSink("TensorBoard", log, writer.close)


def open_wandb(
    run_dir: Path, config: Config, *, keep_through: int | None = None
) -> TrackerSink | None:
    """A sink of `metrics.wandb`; None where that is "none", or the client cannot be used.

    Where the server refuses, or does not answer, rows are kept for `wandb sync`.

    Args:
        run_dir: Folder of the run; the client writes to `wandb` in it.
        config: Configuration, which is sent with the run.
        keep_through: A resumed run goes on under the id of the run before; None begins a new one.
    """
    mode = config.metrics.wandb
    if mode == "none":
        return None
    wandb = _imported("wandb", "Weights & Biases")
    if wandb is None:
        return None
    run_id = _run_id(run_dir / "wandb" / _ID, is_new=keep_through is None)

    def begin(mode: str) -> Any:
        return wandb.init(
            project=config.metrics.wandb_project,
            name=run_dir.resolve().name,
            id=run_id,
            # Offline the client has no run to ask for; the id alone joins the parts.
            resume="allow" if mode == "online" else None,
            dir=str(run_dir),
            config=to_dict(config),
            mode=mode,
            settings=wandb.Settings(
                console="off",
                quiet=True,
                init_timeout=_INIT_S,
                login_timeout=_LOGIN_S,
                finish_timeout=_FINISH_S,
            ),
        )

    run = None
    for one in dict.fromkeys((mode, "offline")):
        try:
            run = begin(one)
            break
        # Its own errors, and those of its server's host name, disk or version.
        except Exception as error:
            _log.warning(
                "Weights & Biases, %s: %s: %s", one, type(error).__name__, str(error).strip()
            )
    if run is None:
        _log.warning("Weights & Biases gets no rows; metrics.jsonl has every row")
        return None
    place = run.url or f"offline; send it with `wandb sync {Path(run.dir).parent}`"
    _log.info("Weights & Biases: run %s in project %s, %s", run_id, run.project, place)
    # An axis of its own: numbers of steps that are repeated after a resume are not refused.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")

    def log(numbers: dict[str, float], step: int) -> None:
        run.log({"step": step, **numbers})

    # One that the caller of the run is handling is not an error of the run.
    outer = sys.exc_info()[1]

    def finish() -> None:
        # Called while an error leaves the run, which then is shown as failed.
        run.finish(exit_code=int(sys.exc_info()[1] not in (None, outer)))

    return TrackerSink("Weights & Biases", log, finish)


def _imported(module: str, name: str) -> ModuleType | None:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        hint = "" if module != "wandb" else " Run `python3 -m pip install wandb` to have it."
        _log.warning(
            "%s cannot be imported (%s); metrics.jsonl has every row.%s", name, error, hint
        )
        return None


def _run_id(path: Path, *, is_new: bool) -> str:
    """The id of a run that goes on, else a new one, which is kept."""
    if not is_new and path.exists() and (kept := path.read_text(encoding="utf-8").strip()):
        return kept
    made = uuid.uuid4().hex[:8]
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(made.encode())
    return made
