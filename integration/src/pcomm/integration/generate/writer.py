"""A trained run, loaded on one process to write text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pcomm.core.errors import ConfigError
from pcomm.integration.checkpoint.checksums import check_files
from pcomm.integration.checkpoint.folders import newest
from pcomm.integration.checkpoint.reader import check_index, read
from pcomm.integration.checkpoint.state import model_shard_views
from pcomm.integration.config import Config, ParallelConfig, Resolved
from pcomm.integration.config_file import load_config
from pcomm.integration.config_rules import validate
from pcomm.integration.data.tokenizer import BytePairTokenizer, load_tokenizer
from pcomm.integration.generate.sampling import sample
from pcomm.integration.models.language_model import LanguageModel

__all__ = ["Text", "Writer"]


@dataclass(frozen=True)
class Text:
    """What was written.

    Args:
        prompt: The text that is continued.
        text: The text that was added.
        num_tokens: Number of tokens that were added.
        finish_reason: `"end"` of the document, or `"length"`.
    """

    prompt: str
    text: str
    num_tokens: int
    finish_reason: str


class Writer:
    """The newest weights of a run and its tokenizer, on one process.

    Args:
        model: The whole model.
        tokenizer: The run's.
        step: Optimizer steps the weights have seen.
    """

    def __init__(self, model: LanguageModel, tokenizer: BytePairTokenizer, step: int) -> None:
        self.model, self.tokenizer, self.step = model, tokenizer, step

    @classmethod
    def load(cls, run_dir: Path, *, device: torch.device | str = "cpu") -> Writer:
        """The run in `run_dir`, whatever number of ranks trained it. Local.

        Raises:
            ConfigError: The folder holds no run, the run has no checkpoint yet, or its files do not
                belong together.
        """
        checkpoint = newest(run_dir) if run_dir.is_dir() else None
        if checkpoint is None:
            raise ConfigError(
                f"generate: {run_dir}",
                found="no checkpoint" if run_dir.is_dir() else "no such folder",
                why="Text is written with the weights of a run that has been saved.",
                fix="Give the --out folder of a `pcomm train` that has reached a checkpoint.",
            )
        config = _on_one_rank(load_config(run_dir / "config.toml"))
        model = LanguageModel(config.model, config.data.vocabulary, device=device)
        check_index(checkpoint)
        check_files(checkpoint)
        read(checkpoint, model_shard_views(model))
        return cls(model.eval(), load_tokenizer(run_dir / "tokenizer.json"), checkpoint.step)

    def write(self, prompt: str, *, max_tokens: int, temperature: float, seed: int) -> Text:
        """Continue `prompt`. Local; equal arguments give equal text.

        Args:
            prompt: Any text; without any, the text begins a document.
            max_tokens: Most tokens to add.
            temperature: 0 takes the likeliest token each time.
            seed: Seed of the draws.
        """
        added = list(self._tokens(prompt, max_tokens, temperature, seed))
        ends = bool(added) and added[-1] == self.tokenizer.end_id
        kept = added[:-1] if ends else added
        reason = "end" if ends else "length"
        return Text(prompt, self.tokenizer.decode(kept), len(added), reason)

    @torch.inference_mode()
    def _tokens(self, prompt: str, limit: int, temperature: float, seed: int) -> Iterator[int]:
        device = next(self.model.parameters()).device
        generator = torch.Generator(device).manual_seed(seed)
        # Documents follow one another in training, each behind the end of the one before; but
        # every segment is read alone, so the end mark is the only start that was never context.
        fed = self.tokenizer.encode(prompt) or [self.tokenizer.end_id]
        cache = self.model.new_cache(len(fed) + limit)
        for _ in range(limit):
            tokens_T = torch.tensor(fed, device=device)
            logits_1V = self.model.extend(tokens_T, cache, num_logits=1)
            token = sample(logits_1V[0], temperature, generator)
            yield token
            if token == self.tokenizer.end_id:
                return
            fed = [token]


def _on_one_rank(config: Config) -> Resolved:
    return validate(replace(config, parallel=ParallelConfig()), 1)
