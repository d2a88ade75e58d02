"""`pcomm plan --model`: the fastest layout of a training run, before there are ranks."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pcomm.core.errors import ConfigError

if TYPE_CHECKING:
    from pcomm.integration.config.sections import Config
    from pcomm.integration.forecast.layouts import CountedLayout, Ranking
    from pcomm.integration.forecast.machine import Machine

__all__ = ["mode"]

# Rows of the table; `--json` has all.
_ROWS = 12


class LayoutMode:
    """Ranks the layouts of a training run; a mode of the command of pcomm-ntp."""

    name = "model"
    help = "the fastest layout of a training run"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """`--model`, `--gpus`, `--cluster`, `--set`, `--seconds`; `--json` is there already."""
        group = parser.add_argument_group("the fastest layout of a training run")
        group.add_argument(
            "--model",
            type=Path,
            metavar="CONFIG.toml|HF_DIR",
            help="a configuration of `pcomm train`, or a Hugging Face directory, of which "
            "config.json alone is read",
        )
        group.add_argument("--gpus", type=int, metavar="N", help="number of ranks")
        group.add_argument(
            "--cluster",
            type=Path,
            metavar="FILE",
            help="a TOML file of what a rank computes and sends, as for `pcomm train --dry-run`; "
            "without it this machine is measured",
        )
        group.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="SECTION.KEY=VALUE",
            help="change one key of the configuration, such as train.global_batch_tokens=524288; "
            "may be given several times",
        )
        group.add_argument(
            "--resilient",
            action="store_true",
            help="layouts of `pcomm train --resilient`, with what they survive",
        )
        group.add_argument(
            "--seconds",
            type=float,
            default=30.0,
            metavar="S",
            help="begin no other layout after so long (%(default)g)",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the layouts, the fastest first, and what was left out."""
        _check(arguments)
        config = _config(arguments.model, arguments.set)
        # Imported late: until here a mistake is reported without waiting for torch.
        from pcomm.integration.config.model_rules import resolve_model
        from pcomm.integration.forecast.layouts import rank_layouts
        from pcomm.integration.forecast.machine import measured_machine, read_cluster
        from pcomm.integration.forecast.replay import Replay

        replay = None
        if arguments.cluster is not None:
            machine = read_cluster(arguments.cluster)
        else:
            machine = measured_machine(arguments.gpus, resolve_model(config.model).width)
            replay = Replay(arguments.gpus, arguments.seconds / 2)
        with _Progress() as progress:
            ranking = rank_layouts(
                config,
                arguments.gpus,
                machine,
                replay=replay,
                limit_s=arguments.seconds,
                progress=progress.tell,
                is_resilient=arguments.resilient,
            )
        if arguments.json:
            print(json.dumps(_document(ranking, machine, config, arguments.resilient), indent=2))
        else:
            print("\n".join(_lines(ranking, machine, config, arguments)))
        return 0


def _check(arguments: argparse.Namespace) -> None:
    if arguments.gpus is None or arguments.gpus < 1:
        raise ConfigError(
            "pcomm plan --model",
            found="no --gpus" if arguments.gpus is None else f"--gpus {arguments.gpus}",
            why="The ranks of a run share its work, one on each GPU.",
            fix="Give --gpus N, the number of GPUs of all hosts together.",
        )


def _config(path: Path, overrides: list[str]) -> Config:
    """The run of a TOML file, or the usual run of the model of a directory."""
    from pcomm.integration.config.toml import given_keys, load_config
    from pcomm.integration.huggingface.model_from import start_config

    if path.is_dir():
        file, overrides = None, [f"model.from={json.dumps(str(path))}", *overrides]
    else:
        file = path
    config = load_config(file, overrides=overrides)
    given = given_keys(file, overrides)
    return start_config(config, Path(), is_new=True, given=given, has_weights=False)


# Where nobody looks on, what is done is told so often: in a log a line for each layout is too many.
_TELL_S = 10.0


class _Progress:
    """What is done, on stderr: one line that is written over, or in a log one now and then."""

    def __init__(self) -> None:
        self._is_seen, self._line = sys.stderr.isatty(), "comparing layouts"
        self._is_over = threading.Event()
        self._teller = threading.Thread(target=self._tell_again, daemon=True)

    def __enter__(self) -> Self:
        if not self._is_seen:
            self._teller.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_seen:
            self.tell("")
            return
        self._is_over.set()
        self._teller.join()

    def tell(self, line: str) -> None:
        """This is done now."""
        self._line = line
        if self._is_seen:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    def _tell_again(self) -> None:
        start = time.monotonic()
        while not self._is_over.wait(_TELL_S):
            passed = time.monotonic() - start
            print(f"{self._line}, after {passed:.0f} s", file=sys.stderr, flush=True)


def _lines(
    ranking: Ranking, machine: Machine, config: Config, arguments: argparse.Namespace
) -> list[str]:
    from pcomm.integration.forecast.dry_run import duration_text, size_text
    from pcomm.integration.forecast.layouts import settings_of, words_of

    layouts, is_resilient = ranking.layouts, arguments.resilient
    words = [words_of(one.config, is_resilient=is_resilient) for one in layouts[:_ROWS]]
    width = max(map(len, words))
    found = [
        f"{len(layouts)} layout(s) of {arguments.gpus} ranks, predicted by counting a step each; "
        "none is started",
        f"{'layout':<{width}}  {'step':>9}  {'tokens/s':>9}  {'memory':>9}  {'sent a step':>11}"
        + (f"  {'optimizer':>9}  {'weights sent':>12}  survives" if is_resilient else ""),
    ]
    for one, layout in zip(layouts, words, strict=False):
        sent, step_s = sum(one.step.sent().values()), one.time.seconds
        tokens = one.config.train.global_batch_tokens / step_s
        found.append(
            f"{layout:<{width}}  {duration_text(step_s):>9}  {tokens:>9,.0f}  "
            f"{size_text(one.step.memory.peak):>9}  {size_text(sent):>11}"
            + _copies(one)
            + ("" if one.fits else "  does not fit")
        )
    if len(layouts) > _ROWS:
        found.append(f"and {len(layouts) - _ROWS} slower ones, which --json has")
    found += [f"left out: {words}" for words in _left_out(ranking, arguments.seconds)]
    found.append(
        f"a rank has {machine.memory_gib:.1f} GiB; Python, torch and what the allocator "
        "keeps come to what is counted"
    )
    found += [f"assumed: {line}" for line in machine.assumptions(layouts[0].config.train.dtype)]
    if layouts[0].fits:
        sets = " ".join(
            f"--set {shlex.quote(word)}"
            for word in settings_of(layouts[0].config, config, is_resilient=is_resilient)
        )
        what = (
            f"--set model.from={shlex.quote(json.dumps(str(arguments.model)))}"
            if arguments.model.is_dir()
            else f"--config {shlex.quote(str(arguments.model))}"
        )
        given = " ".join(f"--set {shlex.quote(word)}" for word in arguments.set)
        where = (
            "" if arguments.cluster is None else f"--cluster {shlex.quote(str(arguments.cluster))}"
        )
        command = "pcomm train --dry-run" + " --resilient" * is_resilient
        line = (command, what, given, sets, f"--ranks {arguments.gpus}", where)
        found.append("next: " + " ".join(word for word in line if word))
    return found


def _copies(one: CountedLayout) -> str:
    """Columns of a resilient run: what copies take and send, and what is survived."""
    from pcomm.integration.forecast.dry_run import size_text

    if one.resilient is None:
        return ""
    kept = one.resilient.survival.kept.rstrip(",") or "not each death"
    sent = size_text(one.resilient.weight_bytes)
    return f"  {size_text(one.step.memory.optimizer):>9}  {sent:>12}  {kept}"


def _left_out(ranking: Ranking, limit_s: float) -> list[str]:
    found = [f"{count} that are refused for {what}" for what, count in ranking.refused.items()]
    if ranking.too_large:
        found.append(f"{ranking.too_large} whose parameters alone do not fit")
    if ranking.slower:
        found.append(
            f"{ranking.slower} whose products and sums alone take longer than the best step"
        )
    if ranking.not_reached:
        found.append(
            f"{ranking.not_reached} that were not counted in {limit_s:g} s; give more --seconds"
        )
    return found


def _document(
    ranking: Ranking, machine: Machine, config: Config, is_resilient: bool
) -> dict[str, Any]:
    from pcomm.integration.forecast.layouts import settings_of

    return {
        "layouts": [
            _entry(one, settings_of(one.config, config, is_resilient=is_resilient))
            for one in ranking.layouts
        ],
        "left_out": {
            "refused": dict(ranking.refused),
            "parameters_do_not_fit": ranking.too_large,
            "slower_by_arithmetic": ranking.slower,
            "not_reached": ranking.not_reached,
        },
        "cluster": asdict(machine),
    }


def _entry(one: CountedLayout, settings: list[str]) -> dict[str, Any]:
    parallel, train, memory = one.config.parallel, one.config.train, one.step.memory
    keys = ("dp", "tp", "cp", "ep", "data", "shard_ranks", "zero")
    return {
        **{key: getattr(parallel, key) for key in keys},
        "micro_batch_tokens": train.micro_batch_tokens,
        "recompute": train.recompute,
        "step_s": one.time.seconds,
        "computing_s": one.time.computing_s,
        "tokens_per_s": train.global_batch_tokens / one.time.seconds,
        "memory_bytes": memory.peak,
        "memory": asdict(memory),
        "fits": one.fits,
        "sent_bytes": one.step.sent(),
        "set": settings,
        **_resilience(one),
    }


def _resilience(one: CountedLayout) -> dict[str, Any]:
    if one.resilient is None:
        return {}
    return {
        "copies": one.config.parallel.copies,
        "weight_bytes": one.resilient.weight_bytes,
        "survival": asdict(one.resilient.survival),
    }


mode = LayoutMode()
