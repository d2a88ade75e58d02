"""Texts that the model writes while it trains, in whatever way its ranks share it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pcomm.core import Groups
from pcomm.integration.config.sections import Config, Resolved
from pcomm.integration.data.batches import IGNORE, Batch, padded
from pcomm.integration.data.inputs import DeviceBatch
from pcomm.integration.data.tokenizer import BytePairTokenizer
from pcomm.integration.files import atomic_write
from pcomm.integration.models.language_model import LanguageModel
from pcomm.integration.parallelize import ALL_RANKS, place_of, plan_sequences
from pcomm.integration.precision import autocast
from pcomm.ntp import NtpPlan

__all__ = ["SAMPLES", "continue_prompts", "prompts_of", "tell_samples", "write_samples"]

_log = logging.getLogger("pcomm.train")

SAMPLES = "samples.jsonl"


def prompts_of(config: Config) -> tuple[str, ...]:
    """Texts to continue, each once; none where no token is to be written. Local."""
    sample = config.sample
    wanted = (sample.prompt, *sample.prompts) if sample.max_tokens else ()
    return tuple(dict.fromkeys(text for text in wanted if text))


def continue_prompts(
    model: LanguageModel,
    groups: Groups,
    config: Resolved,
    tokenizer: BytePairTokenizer,
    plan: NtpPlan | None = None,
) -> dict[str, str]:
    """What the model writes behind each of `prompts_of`. Collective over all ranks.

    All tokens are computed again for each new one, by the forward that training has, so that every
    way to share a model can write. The first rank draws, from `train.seed` alone.

    Args:
        model: The model.
        groups: The groups of the run.
        config: The validated configuration.
        tokenizer: Tokenizer of the run.
        plan: Plan of the ranks in use, where it is not the one of the configuration.

    Returns:
        Text by prompt, the same on all ranks. It ends early where no number is finite.
    """
    sample, everyone = config.sample, groups[ALL_RANKS].collectives
    drawn = torch.Generator().manual_seed(config.train.seed)
    prompts = prompts_of(config)
    # A text without a begin starts like one behind the end of another.
    known = [tokenizer.encode(text) or list(tokenizer.eos_ids[:1]) for text in prompts]
    written: list[list[int]] = [[] for _ in prompts]
    open_ones = set(range(len(prompts)))
    for _ in range(sample.max_tokens):
        if not open_ones:
            break
        texts = [[*begin, *rest] for begin, rest in zip(known, written, strict=True)]
        logits_NV = _next_logits(model, groups, config, texts, plan).double().cpu()
        if everyone.rank or not logits_NV.isfinite().all():
            chosen_N = torch.full((len(texts),), 0 if everyone.rank else -1)
        elif sample.temperature == 0:
            chosen_N = logits_NV.argmax(-1)
        else:
            likely_NV = (logits_NV / sample.temperature).softmax(-1)
            chosen_N = torch.multinomial(likely_NV, 1, generator=drawn).flatten()
        # Ranks round in different ways, and all have to continue the same text.
        ids = everyone.all_reduce(chosen_N.to(model.device)).tolist()
        if min(ids) < 0:
            break
        open_ones -= {n for n in open_ones if ids[n] in tokenizer.eos_ids}
        for n in open_ones:
            written[n].append(ids[n])
    return {text: tokenizer.decode(ids) for text, ids in zip(prompts, written, strict=True)}


def _next_logits(
    model: LanguageModel,
    groups: Groups,
    config: Resolved,
    texts: Sequence[Sequence[int]],
    plan: NtpPlan | None,
) -> Tensor:
    """Logits `[N, V]` of the token behind each text, on all ranks."""
    parallel, cp, tp = config.parallel, groups["cp"], groups["tp"].collectives
    tokens = np.concatenate([np.array(text, np.int64) for text in texts])
    ends = [*accumulate(map(len, texts))]
    batch = Batch(tokens, np.full_like(tokens, IGNORE), (0, *ends), 0)
    # Of ranks that are missing only the plan knows, and of others only the configuration.
    even = parallel.cp * (parallel.tp if parallel.sequence else 1)
    whole = padded(batch, math.lcm(even, place_of(config, groups, plan).token_multiple))
    places_T = torch.full((len(whole.tokens),), -1)
    places_T[torch.tensor(ends) - 1] = torch.arange(len(ends))
    with torch.inference_mode(), autocast(config.train.dtype, model.device):
        sequences = plan_sequences(model, whole.cu_seqlens, cp, strategy=parallel.cp_strategy)
        inputs = DeviceBatch.of(whole, sequences, model.device)
        logits_tv = model(inputs.tokens, sequences)
        places_t = sequences.shard(places_T).to(model.device)
        own = places_t >= 0
        logits_Nv = logits_tv.new_zeros(len(ends), logits_tv.shape[1])
        logits_Nv[places_t[own]] = logits_tv[own]
        # Each text ends on one rank of cp.
        logits_Nv = cp.collectives.all_reduce(logits_Nv)
        return tp.all_gather(logits_Nv, dim=-1, sizes=model.vocabulary.sizes)


def write_samples(run_dir: Path, step: int, samples: Mapping[str, str]) -> None:
    """Add a row for each text to `samples.jsonl`: `step`, `prompt`, `text`. On one rank.

    Rows of this step and of later ones are those of an attempt before, and go.
    """
    path = run_dir / SAMPLES
    rows = [json.dumps({"step": step, "prompt": p, "text": t}) for p, t in samples.items()]
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] < step]
        with atomic_write(path) as file:
            file.write("".join(f"{line}\n" for line in (*kept, *rows)).encode())
    except (OSError, ValueError, KeyError, TypeError) as error:
        # The run is worth more than its samples.
        _log.warning("no samples of step %d in %s: %s", step, path, error)


def tell_samples(run_dir: Path, step: int, samples: Mapping[str, str]) -> None:
    """`write_samples`, and a line for each text. On one rank."""
    write_samples(run_dir, step, samples)
    for prompt, text in samples.items():
        _log.info("after step %d: %r continues %r", step, prompt, text)
