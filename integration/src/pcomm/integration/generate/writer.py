"""A model on one process, or on the ranks of a tensor-parallel group, to write text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pcomm.core import Group
from pcomm.core.errors import ConfigError
from pcomm.inference import Engine, Request, SamplingParams
from pcomm.inference.engine import EngineStats
from pcomm.integration.generate.stream import TextPart, stream
from pcomm.integration.llm.loading import LoadedModel, PromptTokenizer, load_model
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
    """A run or a Hugging Face directory, loaded to write one text at a time.

    Args:
        loaded: The model, or this rank's part of it, and its tokenizer.
        group: Ranks that share each layer, and then make the same calls; None for one process.
        batch_invariant: True to write with the bits of an `LLM` with `batch_invariant`.
    """

    def __init__(
        self, loaded: LoadedModel, *, group: Group | None = None, batch_invariant: bool = False
    ) -> None:
        self.loaded, self._group, self._is_batch_invariant = loaded, group, batch_invariant
        self._engine: Engine | None = None

    @property
    def model(self) -> LanguageModel:
        """The model, or this rank's part of it."""
        return self.loaded.model

    @property
    def tokenizer(self) -> PromptTokenizer:
        """Its tokenizer."""
        return self.loaded.tokenizer

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        group: Group | None = None,
        quantization: str | None = None,
        batch_invariant: bool = False,
    ) -> Writer:
        """The newest weights of a run, whatever number of ranks trained it, or a directory. Local.

        Args:
            path: Folder of a `pcomm train`, or a Hugging Face directory.
            dtype: Dtype of the weights; None for that of the directory, and fp32 for a run.
            device: Device of the model.
            group: Ranks that share each layer, and then make the same calls; None for one process.
            quantization: `int8` to keep the weights of linear layers as int8; None for `dtype`.
            batch_invariant: True to write with the bits of an `LLM` with `batch_invariant`.

        Raises:
            ConfigError: The folder holds no model, the run has no checkpoint yet, or its files do
                not belong together.
            UnsupportedError: The model of the directory is not supported.
        """
        loaded = load_model(
            path,
            dtype=dtype,
            device=device,
            group=group,
            quantization=quantization,
            batch_invariant=batch_invariant,
        )
        return cls(loaded, group=group, batch_invariant=batch_invariant)

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
            params: Settings of the draws, and limits. The text ends with the context of the model
                at the latest.

        Raises:
            ConfigError: A token id of the prompt is none of the model's, or the prompt leaves no
                room in its context.
        """
        ids = self.loaded.prompt_ids(prompt) if isinstance(prompt, str) else prompt
        if (room := self.loaded.max_tokens - len(ids)) < 1:
            raise ConfigError(
                "prompt",
                found=f"{len(ids)} tokens, and a context of {self.loaded.max_tokens}",
                why="The model was not made for texts that are longer.",
                fix="Shorten the prompt; `LLM(DIR, max_model_len=N)` reads more at your risk.",
            )
        params = replace(params, max_tokens=min(params.max_tokens, room))
        request = Request("text", tuple(ids), params)
        return stream(
            self.model,
            self.tokenizer,
            request,
            group=self._group,
            opened=self._opened,
            batch_invariant=self._is_batch_invariant,
        )

    def stats(self) -> EngineStats | None:
        """State of the engine that wrote last; None before the first text. Local.

        See `Engine.stats`: it measures the bandwidth of the memory.
        """
        return None if self._engine is None else self._engine.stats()

    def _opened(self, engine: Engine) -> None:
        self._engine = engine
