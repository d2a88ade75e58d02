"""`pcomm train --dry-run`: what a run needs, on one screen, or the error that would end it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from pcomm.core.errors import ConfigError, PcommError
from pcomm.integration.checkpoint.folders import check_files, newest
from pcomm.integration.config.model_rules import mixers
from pcomm.integration.config.rules import validate, validate_resilient
from pcomm.integration.config.sections import Config, Dtype, Resolved
from pcomm.integration.data.batches import TrainBatches
from pcomm.integration.data.preparation import Prepared, open_prepared, prepare
from pcomm.integration.data.readers import COMPRESSED, SourceFile, open_bytes
from pcomm.integration.data.sources import find_files
from pcomm.integration.data.token_cache import TokenCorpus
from pcomm.integration.data.tokenizer import load_tokenizer
from pcomm.integration.forecast.counted_step import CountedStep, count_step
from pcomm.integration.forecast.machine import (
    Machine,
    StepTime,
    measured_machine,
    predict_step,
    read_cluster,
)
from pcomm.integration.forecast.replay import Replay
from pcomm.integration.forecast.resilient_step import ResilientStep, count_resilient_step
from pcomm.integration.huggingface.tokenizer import TOKENIZER
from pcomm.integration.huggingface.weights import check_first_weights
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.train.compiled_blocks import check_compiler
from pcomm.integration.train.loop import describe_mixture
from pcomm.integration.train.optimizers import ParameterKinds
from pcomm.integration.train.run_folder import check_resumable, hold_folder, prepare_folder
from pcomm.integration.train.run_state import Progress, chosen_dtype
from pcomm.integration.train.trainer import check_batch_memory, largest_memory

__all__ = [
    "DryRun",
    "dry_run",
    "duration_text",
    "parameters_by_kind",
    "size_text",
    "synthetic_batches",
]

_GIB = 2**30
# Up to so many bytes of text are tokenised, as the run would do; more would take minutes.
_TOKENISED_BYTES = 2**25
# Of text that is not tokenised: bytes of a token, and rows of a document.
_BYTES_PER_TOKEN, _ROWS_PER_DOCUMENT = 3.5, 8
# Seconds of the processor for timing operations here.
_REPLAY_S = 20.0
# Bytes of an fp32 number, of which a checkpoint has the parameter and the averages.
_FLOAT = 4


@dataclass(frozen=True)
class DryRun:
    """What a run needs; as text it fits on a screen.

    Args:
        config: The configuration on this number of ranks.
        parameters: Parameters of the whole model, by kind.
        text: Documents and tokens, in words.
        train_tokens: Tokens of the train split, perhaps estimated.
        step: The counted step of rank 0.
        time: Predicted time of that step.
        machine: Machine for which the time was predicted.
        resilient: Step of a resilient run, with the losses that it survives; None for another run.
        num_spares: Number of ranks beyond the grid, which wait.
    """

    config: Resolved
    parameters: dict[str, int]
    text: str
    train_tokens: float
    step: CountedStep
    time: StepTime
    machine: Machine
    resilient: ResilientStep | None = None
    num_spares: int = 0

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the tensors of one checkpoint."""
        # Muon keeps its momentum alone, AdamW two averages.
        model = LanguageModel(self.config.model, self.config.data.vocabulary, device="meta")
        is_muon = self.config.train.optimizer == "muon"
        muons = ParameterKinds.of(model).matrices if is_muon else {}
        return sum(
            _FLOAT * (2 if name in muons else 3) * parameter.numel()
            for name, parameter in model.named_parameters()
        )

    def __str__(self) -> str:
        """All of it, to be read."""
        rows = [*self._run(), *self._memory(), *self._traffic()]
        rows += [*self._survival(), *self._duration()]
        return "\n".join(f"{name:<12}{words}" for name, words in rows)

    def _run(self) -> Iterator[tuple[str, str]]:
        model, parallel, train = self.config.model, self.config.parallel, self.config.train
        total, tokens = sum(self.parameters.values()), train.steps * train.global_batch_tokens
        kinds = ", ".join(f"{name} {count:,}" for name, count in self.parameters.items())
        yield "dry run", "no rank is started, and nothing is written"
        blocks = f"{model.layers} x {model.pattern}" if len(mixers(model)) > 16 else mixers(model)
        yield "model", f"{total:,} parameters in blocks {blocks}"
        yield "", kinds
        first, *sources = self.text.split("\n")
        yield "text", first
        yield from (("", source) for source in sources)
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
            + f"; {self._sharing()}; each step {max(1, num_micro)} micro-batch(es) of "
            f"{train.micro_batch_tokens:,} tokens",
        )
        if self.num_spares:
            yield "", f"and {self.num_spares} spare, which wait without a model"

    def _sharing(self) -> str:
        parallel = self.config.parallel
        found = f"parallel.data = {parallel.data!r}"
        if self.resilient is None:
            return f"{found} over {parallel.shard_ranks}"
        if parallel.data == "replicate":
            return found
        return f"{found}, {parallel.copies} of each part of the optimizer"

    def _memory(self) -> Iterator[tuple[str, str]]:
        memory, keep = self.step.memory, self.config.checkpoint.keep
        yield "memory", "of a rank when it holds most"
        yield "", f"{size_text(memory.weights)} weights"
        yield "", f"{size_text(memory.optimizer)} optimizer"
        later = f", {size_text(memory.all_gradients)} at the end of backward"
        yield "", f"{size_text(memory.gradients)} gradients{later}"
        yield (
            "",
            f"{size_text(memory.activations)} activations, gathered weights, what is in flight",
        )
        yield (
            "",
            f"{size_text(memory.peak)} together, of {self.machine.memory_gib:.1f} GiB; Python, "
            "torch and what the allocator keeps come to it",
        )
        copies = "all are kept" if keep == "all" else f"the newest {keep} are kept"
        yield "checkpoint", f"{size_text(self.checkpoint_bytes)}, and {copies}"

    def _traffic(self) -> Iterator[tuple[str, str]]:
        counts = (self.resilient or self.step).sent()
        sent = [f"{key} {size_text(count)}" for key, count in counts.items() if count]
        yield "sent", "by a rank in a step: " + (", ".join(sent) or "nothing")

    def _survival(self) -> Iterator[tuple[str, str]]:
        if self.resilient is None:
            return
        survival, every = self.resilient.survival, self.config.checkpoint.every
        kept = f"{survival.kept.rstrip(',')}: no step is lost" if survival.kept else "no death"
        yield "survives", kept
        back = "the beginning" if every == "end" else f"a checkpoint, at most {every} steps"
        yield "goes back", f"to {back}: after {survival.lost}"
        yield "ends", "with the store, and when no replica has a rank left"
        yield (
            "hosts",
            f"{self.resilient.num_hosts} of {self.machine.ranks_per_host} ranks each; each part of "
            f"the state is on at least {survival.ranks} rank(s) of {survival.hosts} host(s)",
        )

    def _duration(self) -> Iterator[tuple[str, str]]:
        time, machine, train = self.time, self.machine, self.config.train
        rate = train.global_batch_tokens / time.seconds
        yield (
            "step",
            f"about {duration_text(time.seconds)}, of which {duration_text(time.computing_s)} "
            f"computing: {rate:,.0f} tokens/s; {train.steps} steps "
            f"{duration_text(time.seconds * train.steps)} without evaluation",
        )
        for number, line in enumerate(machine.assumptions(train.dtype)):
            yield "" if number else "assumed", line


def dry_run(
    config: Config,
    run_dir: Path | None,
    num_ranks: int,
    *,
    must_restart: bool = False,
    cluster: Path | None = None,
    is_resilient: bool = False,
) -> DryRun:
    """What a run of `config` needs. Local: one process on the CPU, without ranks.

    Args:
        config: The configuration, after `start_config`.
        run_dir: Folder of the run, which stays as it is; None for one that is not there yet.
        num_ranks: Ranks of the run.
        must_restart: True if checkpoints in the folder do not count.
        cluster: File that describes the machines; None for this one, which is measured.
        is_resilient: True for a run that goes on without ranks that die.

    Raises:
        PcommError: The run would end with this error before its first step, or the file cannot be
            used. Of the weights of `model.from` names, shapes and dtypes are compared, and no
            number is read; of more than 32 MiB of text no token is made.
    """
    machine = None if cluster is None else read_cluster(cluster)
    is_new = must_restart or run_dir is None
    folder = run_dir or Path()
    if machine is not None and config.train.dtype == "auto" and (is_new or newest(folder) is None):
        dtype: Dtype = "bf16" if machine.bf16_tflops > machine.fp32_tflops else "fp32"
    else:
        dtype, _ = chosen_dtype(config, folder, torch.device("cpu"), is_new=is_new)
    rules = validate_resilient if is_resilient else validate
    resolved = rules(replace(config, train=replace(config.train, dtype=dtype)), num_ranks)
    memory = largest_memory(torch.device("cpu"))
    check_batch_memory(resolved, memory if machine is None else machine.memory_bytes)
    if resolved.train.compile and machine is None and not torch.cuda.is_available():
        # Of other machines it is not known what they have.
        check_compiler(torch.device("cpu"))
    if run_dir is not None:
        if not must_restart:
            check_resumable(resolved, run_dir)
        with _as_it_was(run_dir), hold_folder(run_dir):
            pass
    kept = None if is_new else newest(folder)
    with _prepared(resolved, folder, keeps_tokenizer=kept is not None) as prepared:
        if prepared is None:
            text, tokens, corpus = _estimated_text(resolved)
        else:
            train, held_out = prepared.train, prepared.held_out
            text = (
                f"{train.num_documents:,} documents with {train.num_tokens:,} tokens, and "
                f"{held_out.num_documents:,} held out with {held_out.num_tokens:,}"
            )
            tokens, corpus = float(train.num_tokens), train
        if resolved.model.from_ and kept is None:
            check_first_weights(resolved, Path(resolved.model.from_))
        if kept is not None:
            check_resumable(resolved, folder, prepared.fingerprint if prepared else None)
            Progress.resumed(kept, resolved.train)
            check_files(kept)
        batches = _batches(resolved, corpus)
        if corpus is not None:
            epochs = batches.epochs(resolved.train.steps)
            text = "\n".join([text, *describe_mixture(resolved, corpus, epochs)])
        per_host = num_ranks if machine is None else machine.ranks_per_host
        resilient = count_resilient_step(resolved, batches, per_host) if is_resilient else None
        step = count_step(resolved, batches) if resilient is None else resilient.step
    replay = None
    if machine is None:
        machine, replay = (
            measured_machine(num_ranks, resolved.model.width),
            Replay(num_ranks, _REPLAY_S),
        )
    parallel = resolved.parallel
    used = parallel.dp * parallel.cp * parallel.tp if is_resilient else num_ranks
    time = predict_step(step, machine, used, replay)
    kinds = parameters_by_kind(resolved)
    return DryRun(resolved, kinds, text, tokens, step, time, machine, resilient, num_ranks - used)


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
        weights=config.data.weights if corpus.source_documents else (),
    )


@contextmanager
def _prepared(
    config: Resolved, run_dir: Path, *, keeps_tokenizer: bool
) -> Iterator[Prepared | None]:
    """The tokens that the run would have; None where there is too much text to make them now.

    They are made in a folder of their own, as the run makes them, with the tokenizer of the run
    that goes on; or taken from those that an earlier run has kept. None are kept.
    """
    if _text_bytes(find_files(config.data)) > _TOKENISED_BYTES:
        try:
            found = open_prepared(run_dir) if keeps_tokenizer else None
        except ConfigError:  # damaged, and so made anew by the run
            found = None
        yield found
        return
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="pcomm-dry-run-")))
        try:
            if keeps_tokenizer:
                load_tokenizer(run_dir / TOKENIZER)
                shutil.copy(run_dir / TOKENIZER, folder / TOKENIZER)
                prepared = prepare(config.data, folder, keep_tokenizer=True, shares=False)
            else:
                prepare_folder(config, folder, must_restart=True, shares=False)
                prepared = open_prepared(folder)
        except PcommError as error:
            # As the run would say it, of its own folder.
            parts = (error.asked, error.found, error.why, error.fix)
            asked, was, why, fix = (one.replace(str(folder), str(run_dir)) for one in parts)
            raise type(error)(asked, found=was, why=why, fix=fix) from error
        yield prepared


def _estimated_text(config: Resolved) -> tuple[str, float, None]:
    files = find_files(config.data)
    size = _text_bytes(files)
    tokens = size * (1 - config.data.held_out) / _BYTES_PER_TOKEN
    is_packed = any(file.path.suffix in COMPRESSED for file in files)
    about = "at least" if is_packed else "about"
    return (
        f"{len(files)} files of {size_text(size)}, not read: {about} {tokens:,.0f} tokens, if each "
        f"stands for {_BYTES_PER_TOKEN} bytes and documents have {_ROWS_PER_DOCUMENT} rows",
        tokens,
        None,
    )


def _text_bytes(files: Iterable[SourceFile]) -> int:
    """Bytes of files; one that cannot be opened is refused as the start refuses it."""
    total = 0
    for file in files:
        with open_bytes(file.path) as content:
            total += os.fstat(content.fileno()).st_size
    return total


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


def size_text(num_bytes: float) -> str:
    """A number of bytes, to be read. Local."""
    unit, name = (_GIB, "GiB") if num_bytes >= _GIB else (2**20, "MiB")
    return f"{num_bytes / unit:.1f} {name}"


def duration_text(seconds: float) -> str:
    """A time, to be read. Local."""
    for unit, name in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds * 1e3:.0f} ms"
