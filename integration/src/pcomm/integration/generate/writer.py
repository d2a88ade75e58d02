"""A trained run, loaded on one process to write text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pcomm.core.errors import ConfigError
from pcomm.inference import Request, SamplingParams
from pcomm.integration.checkpoint.checksums import check_files
from pcomm.integration.checkpoint.folders import newest
from pcomm.integration.checkpoint.reader import check_index, read
from pcomm.integration.checkpoint.state import model_shard_views
from pcomm.integration.config import Config, ParallelConfig, Resolved
from pcomm.integration.config_file import load_config
from pcomm.integration.config_rules import validate
from pcomm.integration.data.tokenizer import BytePairTokenizer, load_tokenizer
from pcomm.integration.generate.stream import TextPart, stream
from pcomm.integration.models.language_model import LanguageModel

__all__ = ["Text", "Writer"]


@dataclass(frozen=True)
class Text:
    """What was written.

    Args:
        prompt: The text that is continued.
        text: The text that was added.
        num_tokens: Number of tokens that were added.
        finish_reason: `"stop"` at the end of the document or at a stop string, or `"length"`.
        token_ids: The tokens that were added; the end of the document, if it came, is the last.
    """

    prompt: str
    text: str
    num_tokens: int
    finish_reason: str
    token_ids: tuple[int, ...]


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

    def write(self, prompt: str | Sequence[int], params: SamplingParams) -> Text:
        """Continue `prompt`. Local; equal arguments give equal text.

        Args:
            prompt: Any text, or token ids; without any, the text begins a document.
            params: Settings of the draws, and limits.

        Raises:
            ConfigError: A token id of the prompt is none of the model's.
        """
        parts = list(self.stream(prompt, params))
        tokens = tuple(token for part in parts for token in part.token_ids)
        text = "".join(part.text for part in parts)
        reason = parts[-1].finish_reason or "length"
        return Text(self.text_of(prompt), text, len(tokens), reason, tokens)

    def text_of(self, prompt: str | Sequence[int]) -> str:
        """The text of a prompt that may be token ids."""
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)

    def stream(self, prompt: str | Sequence[int], params: SamplingParams) -> Iterator[TextPart]:
        """Continue `prompt` part by part, while it is written. Local.

        Args:
            prompt: Any text, or token ids; without any, the text begins a document.
            params: Settings of the draws, and limits.

        Raises:
            ConfigError: A token id of the prompt is none of the model's.
        """
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        # Documents follow one another in training, each behind the end of the one before; but
        # every segment is read alone, so the end mark is the only start that was never context.
        begin = tuple(ids) or (self.tokenizer.end_id,)
        return stream(self.model, self.tokenizer, Request("text", begin, params))


def _on_one_rank(config: Config) -> Resolved:
    return validate(replace(config, parallel=ParallelConfig()), 1)
