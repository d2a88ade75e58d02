"""Models of transformers, with the best that they have for one process on a CPU."""

# Shape suffixes: B texts, T tokens.

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pcomm.core.errors import UnsupportedError

__all__ = ["Generated", "TheirDecoding", "TheirModel", "check_transformers"]


def check_transformers(benchmark: str) -> None:
    """Find out before anything is measured.

    Args:
        benchmark: Its name, for the error.

    Raises:
        UnsupportedError: transformers is not installed.
    """
    if find_spec("transformers") is None:
        raise UnsupportedError(
            f"pcomm bench {benchmark}",
            found="transformers is not installed",
            why="It makes the models, and is what pcomm is compared with; nothing else needs it.",
            fix="Run `python3 -m pip install transformers`.",
        )


@dataclass(frozen=True)
class Generated:
    """What one call of `generate` has written.

    Args:
        tokens: New tokens of each text.
        first_us: Microseconds until the first token of all texts.
        step_us: Mean microseconds of each later step; 0 if there is none.
        all_us: Microseconds of the whole call.
    """

    tokens: list[list[int]]
    first_us: float
    step_us: float
    all_us: float


class TheirModel:
    """A directory, read by transformers in the dtype of its weights, with torch's attention.

    Args:
        directory: A Hugging Face directory.
    """

    def __init__(self, directory: Path) -> None:
        import transformers

        build: Any = transformers.AutoModelForCausalLM.from_pretrained
        self.model = build(directory, dtype="auto", local_files_only=True).eval()
        # Texts go on for as long as is asked, without a look for their end.
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, *, is_static: bool = False
    ) -> Generated:
        """Continue prompts of one length together, each with its likeliest tokens.

        Args:
            prompts: Token ids of each prompt.
            num_tokens: Number of tokens to write.
            is_static: True for keys and values in tensors of full length from the start, which
                torch need not copy to extend them.
        """
        tokens_BT = torch.tensor(prompts)
        clock = _Clock()
        cache = {"cache_implementation": "static", "disable_compile": True} if is_static else {}
        start = time.perf_counter()
        with torch.inference_mode():
            found_BT: Tensor = self.model.generate(
                tokens_BT,
                attention_mask=torch.ones_like(tokens_BT),
                max_new_tokens=num_tokens,
                do_sample=False,
                use_cache=True,
                stopping_criteria=[clock],
                **cache,
            )
        end = time.perf_counter()
        first, last, steps = clock.times[0], clock.times[-1], len(clock.times) - 1
        return Generated(
            found_BT[:, tokens_BT.shape[1] :].tolist(),
            (first - start) * 1e6,
            (last - first) * 1e6 / steps if steps else 0.0,
            (end - start) * 1e6,
        )

    def decoding(
        self,
        prompt: Sequence[int],
        *,
        static_length: int | None = None,
        chunk: int | None = None,
    ) -> TheirDecoding:
        """One text whose prompt is computed.

        Args:
            prompt: Token ids.
            static_length: Most tokens of the text, for keys and values in tensors of that length;
                None for those that grow.
            chunk: Tokens of the prompt that are computed together; None for all. In torch their
                recurrent layers take memory that grows faster than the prompt.
        """
        found = TheirDecoding(self.model, static_length)
        for start in range(0, len(prompt), chunk or len(prompt)):
            found.read(prompt[start : start + chunk] if chunk else prompt)
        return found


class TheirDecoding:
    """One text of transformers, token by token, by calls of the model with its cache.

    Args:
        model: The model.
        static_length: Length of keys and values as for `TheirModel.decoding`.

    Attributes:
        tokens: Tokens that were written.
    """

    def __init__(self, model: Any, static_length: int | None) -> None:
        import transformers

        self._model, self._num_seen = model, 0
        # Models without attention have another name for it.
        parameters = inspect.signature(model.forward).parameters
        self._cache_word = "cache_params" if "cache_params" in parameters else "past_key_values"
        if static_length is None:
            self._cache: Any = transformers.DynamicCache(config=model.config)
        else:
            self._cache = transformers.StaticCache(config=model.config, max_cache_len=static_length)
        self.tokens: list[int] = []

    def read(self, tokens: Sequence[int]) -> None:
        """Compute more tokens of the prompt; the likeliest next one is the first of the text."""
        self.tokens.clear()
        self._compute(tokens)

    def step_us(self) -> float:
        """Write the likeliest next token; returns the microseconds of the model alone."""
        return self._compute(self.tokens[-1:])

    @torch.inference_mode()
    def _compute(self, tokens: Sequence[int]) -> float:
        tokens_1T = torch.tensor([tokens])
        more = {self._cache_word: self._cache} | self._places(len(tokens))
        start = time.perf_counter()
        logits = self._model(tokens_1T, use_cache=True, logits_to_keep=1, **more).logits
        taken_us = (time.perf_counter() - start) * 1e6
        self.tokens.append(int(logits[0, -1].argmax()))
        return taken_us

    def _places(self, length: int) -> dict[str, Any]:
        """Arguments without which a Qwen3-Next with recurrent layers alone raises an error.

        It asks its cache for the number of tokens, which only attention layers know, for positions
        and masks; neither has an effect there, and with both given it does not ask.
        """
        config = self._model.config
        if config.model_type != "qwen3_next" or "full_attention" in config.layer_types:
            return {}
        first = self._num_seen
        self._num_seen += length
        places = torch.arange(first, first + length).unsqueeze(0)
        return {"position_ids": places, "attention_mask": {"linear_attention": None}}


class _Clock:
    """A stopping criterion that stops nothing: it is called after each token of `generate`."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)
