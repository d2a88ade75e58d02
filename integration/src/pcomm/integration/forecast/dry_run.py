"""`pcomm train --dry-run`: what a run needs, on one screen, or the error that would end it."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pcomm.integration.checkpoint.folders import newest
from pcomm.integration.config.model_rules import mixers
from pcomm.integration.config.rules import validate
from pcomm.integration.config.sections import Config, Resolved
from pcomm.integration.data.batches import TrainBatches
from pcomm.integration.data.preparation import Prepared, open_prepared
from pcomm.integration.data.sources import find_files
from pcomm.integration.data.token_cache import TokenCorpus
from pcomm.integration.forecast.counted_step import CountedStep, count_step
from pcomm.integration.forecast.machine import (
    Machine,
    StepTime,
    measured_machine,
    predict_step,
    read_cluster,
)
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.train.run_folder import check_resumable, hold_folder, prepare_folder
from pcomm.integration.train.trainer import check_batch_memory, largest_memory

__all__ = ["DryRun", "dry_run", "parameters_by_kind", "synthetic_batches"]

_GIB = 2**30
# Up to so many bytes of text are tokenised, as the run would do; more would take minutes.
_TOKENISED_BYTES = 2**25
# Of text that is not tokenised: bytes of a token, and rows of a document.
_BYTES_PER_TOKEN, _ROWS_PER_DOCUMENT = 3.5, 8
# AdamW's two averages and the parameter itself, in fp32.
_SAVED_BYTES = 12


@dataclass(frozen=True)
class DryRun:
    """What a run needs; as text it fits on a screen.

    Args:
        config: The configuration on this number of ranks.
        parameters: Parameters of the whole model, by kind.
        text: Documents and tokens, in words.
        train_tokens: Tokens of the train split, perhaps estimated.
        step: The counted step of rank 0.
        time: Its time.
        machine: What the time was predicted for.
    """

    config: Resolved
    parameters: dict[str, int]
    text: str
    train_tokens: float
    step: CountedStep
    time: StepTime
    machine: Machine

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the tensors of one checkpoint."""
        return _SAVED_BYTES * sum(self.parameters.values())

    def __str__(self) -> str:
        """All of it, to be read."""
        rows = [*self._run(), *self._memory(), *self._traffic(), *self._duration()]
        return "\n".join(f"{name:<12}{words}" for name, words in rows)

    def _run(self) -> Iterator[tuple[str, str]]:
        model, parallel, train = self.config.model, self.config.parallel, self.config.train
        total, tokens = sum(self.parameters.values()), train.steps * train.global_batch_tokens
        kinds = ", ".join(f"{name} {count:,}" for name, count in self.parameters.items())
        yield "dry run", "no rank is started, and nothing is written"
        blocks = f"{model.layers} x {model.pattern}" if len(mixers(model)) > 16 else mixers(model)
        yield "model", f"{total:,} parameters in blocks {blocks}"
        yield "", kinds
        yield "text", self.text
        yield (
            "training",
            f"{train.steps} steps of {train.global_batch_tokens:,} tokens, {tokens:,} in all: "
            f"{tokens / max(1.0, self.train_tokens):.2f} epochs; {train.dtype}",
        )
        num_micro = train.global_batch_tokens // (parallel.dp * train.micro_batch_tokens)
        yield (
            "ranks",
            f"dp {parallel.dp} x cp {parallel.cp} x tp {parallel.tp}"
            + (f", experts over {parallel.ep}" if parallel.ep > 1 else "")
            + f"; parallel.data = {parallel.data!r} over {parallel.shard_ranks}; each step "
            f"{max(1, num_micro)} micro-batch(es) of {train.micro_batch_tokens:,} tokens",
        )

    def _memory(self) -> Iterator[tuple[str, str]]:
        memory, keep = self.step.memory, self.config.checkpoint.keep
        yield "memory", "of a rank when it holds most"
        yield "", f"{_size(memory.weights)} weights"
        yield "", f"{_size(memory.optimizer)} optimizer"
        later = f", {_size(memory.all_gradients)} at the end of backward"
        yield "", f"{_size(memory.gradients)} gradients{later}"
        yield "", f"{_size(memory.activations)} activations, gathered weights, what is in flight"
        yield (
            "",
            f"{_size(memory.peak)} together, of {self.machine.memory_gib:.1f} GiB; Python, torch "
            "and what the allocator keeps come to it",
        )
        copies = "all are kept" if keep == "all" else f"the newest {keep} are kept"
        yield "checkpoint", f"{_size(self.checkpoint_bytes)}, and {copies}"

    def _traffic(self) -> Iterator[tuple[str, str]]:
        sent = [f"{key} {_size(count)}" for key, count in self.step.sent().items() if count]
        yield "sent", "by a rank in a step: " + (", ".join(sent) or "nothing")

    def _duration(self) -> Iterator[tuple[str, str]]:
        time, machine, train = self.time, self.machine, self.config.train
        rate = train.global_batch_tokens / time.seconds
        yield (
            "step",
            f"about {_duration(time.seconds)}, of which {_duration(time.computing_s)} computing: "
            f"{rate:,.0f} tokens/s; {train.steps} steps {_duration(time.seconds * train.steps)} "
            "without evaluation",
        )
        tflops = machine.bf16_tflops if train.dtype == "bf16" else machine.fp32_tflops
        yield (
            "assumed",
            f"{machine.name or 'the cluster'}: {tflops:.3g} TFLOP/s in {train.dtype}, "
            f"{machine.memory_gb_per_s:.3g} GB/s of memory, "
            f"{machine.operation_us:.1f} us an operation;",
        )
        yield (
            "",
            f"{machine.link_gb_per_s:.3g} GB/s and {machine.link_us:.0f} us between ranks of a "
            f"host, {machine.network_gb_per_s:.3g} GB/s and {machine.network_us:.0f} us between "
            "hosts",
        )


def dry_run(
    config: Config,
    run_dir: Path,
    num_ranks: int,
    *,
    must_restart: bool = False,
    cluster: Path | None = None,
) -> DryRun:
    """What a run of `config` needs. Local: one process on the CPU, without ranks.

    Args:
        config: The configuration, after `start_config`.
        run_dir: Folder of the run; it stays as it is.
        num_ranks: Ranks of the run.
        must_restart: True if checkpoints in the folder do not count.
        cluster: File that describes the machines; None for this one, which is measured.

    Raises:
        PcommError: The run would end with this error before its first step, or the file cannot be
            used. Weights of `model.from` and checksums of a checkpoint are not read, nor text of
            more than 32 MiB.
    """
    machine = None if cluster is None else read_cluster(cluster)
    resolved = validate(config, num_ranks)
    memory = largest_memory(torch.device("cpu"))
    check_batch_memory(resolved, memory if machine is None else int(machine.memory_gib * _GIB))
    if not must_restart:
        check_resumable(resolved, run_dir)
    with _as_it_was(run_dir), hold_folder(run_dir):
        pass
    with _prepared(resolved, run_dir, must_restart=must_restart) as prepared:
        if prepared is None:
            text, tokens, corpus = _estimated_text(resolved)
        else:
            train, held_out = prepared.train, prepared.held_out
            text = (
                f"{train.num_documents:,} documents with {train.num_tokens:,} tokens, and "
                f"{held_out.num_documents:,} held out with {held_out.num_tokens:,}"
            )
            tokens, corpus = float(train.num_tokens), train
        step = count_step(resolved, _batches(resolved, corpus))
    machine = machine or measured_machine(num_ranks, resolved.model.width)
    time = predict_step(step, machine, num_ranks)
    return DryRun(resolved, parameters_by_kind(resolved), text, tokens, step, time, machine)


def parameters_by_kind(config: Resolved) -> dict[str, int]:
    """Parameters of the whole model by what they are part of; tied ones count once. Local."""
    found: Counter[str] = Counter()
    model = LanguageModel(config.model, config.data.vocabulary, device="meta")
    for name, parameter in model.named_parameters():
        path = name.split(".")
        module = model.get_submodule(".".join(path[:3])) if path[0] == "blocks" else None
        is_norm = path[0] == "norm" or (module is not None and path[2].endswith("norm"))
        kind = "norms" if is_norm else path[0] if module is None else type(module).__name__
        if "experts" in path:
            kind = "experts"
        found[kind] += parameter.numel()
    return dict(found)


def synthetic_batches(config: Resolved) -> TrainBatches:
    """Batches for counting where there is no text: documents of eight rows. Local."""
    train = config.train
    length = _ROWS_PER_DOCUMENT * train.sequence_length
    # Two steps are counted; pages of zeros that are not touched take no memory.
    documents = 2 * train.global_batch_tokens // length + 2
    tokens = np.zeros(documents * length, np.uint32)
    offsets = np.arange(documents + 1, dtype=np.int64) * length
    sizes = np.ones(config.data.vocabulary, np.int32)
    return _batches(config, TokenCorpus(tokens, offsets, sizes, 0))


def _batches(config: Resolved, corpus: TokenCorpus | None) -> TrainBatches:
    train = config.train
    if corpus is None:
        return synthetic_batches(config)
    return TrainBatches(
        corpus,
        seed=train.seed,
        sequence_length=train.sequence_length,
        global_batch_tokens=train.global_batch_tokens,
        micro_batch_tokens=train.micro_batch_tokens,
    )


@contextmanager
def _prepared(config: Resolved, run_dir: Path, *, must_restart: bool) -> Iterator[Prepared | None]:
    """The tokens that the run would have; None where there is too much text to make them now."""
    if newest(run_dir) is not None and not must_restart:
        yield open_prepared(run_dir)
        return
    if sum(file.path.stat().st_size for file in find_files(config.data)) > _TOKENISED_BYTES:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="pcomm-dry-run-") as folder:
        prepare_folder(config, Path(folder), must_restart=True)
        yield open_prepared(Path(folder))


def _estimated_text(config: Resolved) -> tuple[str, float, None]:
    files = find_files(config.data)
    size = sum(file.path.stat().st_size for file in files)
    tokens = size * (1 - config.data.held_out) / _BYTES_PER_TOKEN
    return (
        f"{len(files)} files of {_size(size)}, not read: about {tokens:,.0f} tokens, if each "
        f"stands for {_BYTES_PER_TOKEN} bytes and documents have {_ROWS_PER_DOCUMENT} rows",
        tokens,
        None,
    )


@contextmanager
def _as_it_was(run_dir: Path) -> Iterator[None]:
    """Remove folders above the run's that are made within."""
    missing = [folder for folder in run_dir.parents if not folder.exists()]
    try:
        yield
    finally:
        for folder in missing:
            if folder.exists():
                folder.rmdir()


def _size(num_bytes: float) -> str:
    unit, name = (_GIB, "GiB") if num_bytes >= _GIB else (2**20, "MiB")
    return f"{num_bytes / unit:.1f} {name}"


def _duration(seconds: float) -> str:
    for unit, name in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds * 1e3:.0f} ms"
