"""`LLM`: a model loaded once, then asked with `generate`, `stream` and `chat`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from pcomm.core import Group
from pcomm.core.errors import ClosedError, ConfigError
from pcomm.inference import Request, RequestOutput, SamplingParams
from pcomm.inference.engine import EngineStats, QueueFullError
from pcomm.integration.llm.engine_on_ranks import EngineOnRanks
from pcomm.integration.llm.engine_size import EngineOptions, agreed_bytes
from pcomm.integration.llm.foreign_model import (
    LoadedForeign,
    adopt,
    check_plain,
    load_for_engine,
    load_text_for_engine,
)
from pcomm.integration.llm.generation_defaults import generation_defaults, warn_unmet
from pcomm.integration.llm.loading import LoadedModel, LoadedText
from pcomm.integration.llm.open_requests import Delta, Generation, OpenRequests, StepEngine, joined
from pcomm.integration.llm.weight_form import device_of, dtype_of, weight_form

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["LLM", "checked", "settings_of"]

Prompt = str | Sequence[int]
"""Text, or token ids."""


class LLM:
    """A model, its tokenizer and an engine; a context manager.

    Everything happens in the caller's thread: the engine makes a step while the caller waits for a
    text or for the next part of one. Several `stream`s of one `LLM` may be read in turn; each step
    continues all of them. For many threads or clients there is `pcomm serve`: a call while another
    thread is within one is an `UnsupportedError`.

    Ctrl-C ends the text that is read, and the other streams lose nothing. An exception from the
    handler of another signal does the same, unless it comes while the outputs of a step are given
    to the streams: one output may then be given twice.

    With `ranks` the model is shared by as many processes of this machine, which are started here
    and end with `close`. The texts are those of one rank up to rounding: sums over a row are sums
    of each rank's shard of it, so that bf16 texts may differ where two tokens are nearly as
    likely. With int8 the weights differ, too: each rank has scales for its shard of a row. A rank
    that dies is a `PeerError` of the call that needs it, and `failure` says so at once. With
    `group` the program has its ranks already: each makes an `LLM` with the same arguments, and the
    same calls in the same order.

    Args:
        path: A run of `pcomm train`, or a Hugging Face directory: of a family that pcomm has, or of
            any other causal language model, which then runs by transformers and takes neither
            ranks, `quantization` nor `batch_invariant`.
        model: Causal language model of transformers in memory, in the place of `path`. Nothing of
            it is copied; it is in evaluation mode until `close`, and its weights may change between
            steps.
        tokenizer: Fast tokenizer of `model`, of transformers.
        ranks: Number of processes that share each layer; 1 for this process alone.
        group: Tensor-parallel group of this process, whose ranks share each layer; None for none.
        dtype: Dtype of the weights: `float32`, `bfloat16`, `float16`, or `auto` for that of the
            directory and fp32 for a run.
        quantization: `int8` to keep the weights of linear layers as int8 with a scale for each
            output, which decodes one to four texts at once faster on a CPU; None for `dtype`.
        device: Device of the model, such as `cpu` or `cuda:0`; with `ranks`, `cpu` or `cuda`. A
            `model` stays where it is.
        max_model_len: Most tokens of a prompt and its text together; None for what the model was
            made for.
        memory_bytes: Bytes for keys, values and states of all requests, on all ranks together; None
            for a share of what is free.
        block_size: Tokens of a KV block.
        max_batch_tokens: Most tokens of a step.
        max_requests: Most requests that run at once.
        max_queued: Most requests that wait; `generate` takes any number of prompts all the same.
        prefix_cache: True to keep what was computed of prompts for those that begin alike.
        speculative_tokens: Most tokens that a step guesses from the text so far.
        batch_invariant: True for log-probabilities of a request that have the same bits whatever
            else is computed: products in blocks of at most 32 rows where their sums depend on the
            number of rows, prompts by 256 tokens, no prefix cache, no drafts. On a CPU in bf16 or
            fp32, on one rank or two, without experts.
        generation_config: `auto` for the defaults of sampling that the model's
            `generation_config.json` has, for calls without `params`; `none` for those of
            `SamplingParams`. What pcomm does not have of it is named in one warning. Tokens that
            end a text are read from it in either case.

    Attributes:
        path: Folder of the model; None for one that was in memory.
        implementation: `pcomm` for a model of its own families, or `transformers`.
        loaded: The tokenizer and limits of the model, and, where it is on this process, the model.
        engine: The engine, for a program that makes the steps itself.
        dtype: Dtype of the weights, but for linear layers with `quantization`.
        max_model_len: Most tokens of a prompt and its text together.
        max_queued: Most requests that wait.
        defaults: Defaults of sampling that `generation_config` has chosen.

    Raises:
        ConfigError: The folder holds no model, a value cannot be used, so many ranks cannot share
            the model, which is found before a process is started, or the engine would not write
            what the forward of a model of transformers says.
        UnsupportedError: The model of the directory is not supported, or not with these arguments.
        PeerError: A rank ended while it loaded the model.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        ranks: int = 1,
        group: Group | None = None,
        dtype: str | torch.dtype = "auto",
        quantization: str | None = None,
        device: str | torch.device = "cpu",
        max_model_len: int | None = None,
        memory_bytes: int | None = None,
        block_size: int = 16,
        max_batch_tokens: int = 2048,
        max_requests: int = 64,
        max_queued: int = 256,
        prefix_cache: bool = True,
        speculative_tokens: int = 0,
        batch_invariant: bool = False,
        generation_config: str | None = "auto",
    ) -> None:
        numbers = {
            "ranks": ranks,
            "max_model_len": max_model_len,
            "memory_bytes": memory_bytes,
            "block_size": block_size,
            "max_requests": max_requests,
        }
        _check_numbers(numbers)
        _check_ranks(ranks, group)
        place, weights = device_of(device), dtype_of(dtype)
        num_ranks = ranks if group is None else group.size
        self.max_queued = max_queued
        self._on_ranks: EngineOnRanks | None = None
        loaded: LoadedText
        here: LoadedModel | LoadedForeign | None = None
        if path is None or model is not None or tokenizer is not None:
            _check_in_memory(path, model, tokenizer, weights, place)
            check_plain("LLM(model=...)", num_ranks, quantization, batch_invariant)
            folder = None
            loaded = here = adopt(model, tokenizer)
            place = here.model.device
        else:
            # Refused here rather than on a rank.
            weight_form(quantization, place, batch_invariant=batch_invariant, ranks=ranks)
            folder = Path(path)
            if ranks == 1:
                here = load_for_engine(
                    folder,
                    dtype=weights,
                    device=place,
                    group=group,
                    quantization=quantization,
                    batch_invariant=batch_invariant,
                    most_rows=max_requests * (1 + speculative_tokens),
                )
            loaded = here or load_text_for_engine(folder, ranks=ranks)
        self.path, self.loaded, self.dtype = folder, loaded, weights or loaded.dtype
        self.defaults = generation_defaults(generation_config, loaded.generation)
        warn_unmet(loaded.name, self.defaults)
        self._foreign = here.model if isinstance(here, LoadedForeign) else None
        self.implementation = "pcomm" if self._foreign is None else "transformers"
        self.max_model_len = max_model_len or self.loaded.max_tokens
        options = EngineOptions(
            max_model_len=self.max_model_len,
            block_size=block_size,
            max_batch_tokens=max_batch_tokens,
            max_requests=max_requests,
            max_queued=max_queued,
            prefix_cache=prefix_cache,
            speculative_tokens=speculative_tokens,
            batch_invariant=batch_invariant,
        )
        self.engine: StepEngine
        if here is not None:
            self.engine = self._engine_here(here, options, place, memory_bytes, group)
        else:
            assert folder is not None, "a model in memory is on this process"
            self.engine = self._on_ranks = EngineOnRanks(
                folder,
                ranks=ranks,
                dtype=weights,
                quantization=quantization,
                device=place,
                memory_bytes=memory_bytes,
                options=options,
            )
        self._open = OpenRequests(self.engine)
        self._num_requests = 0
        self._is_closed = False

    def _engine_here(
        self,
        loaded: LoadedModel | LoadedForeign,
        options: EngineOptions,
        place: torch.device,
        memory_bytes: int | None,
        group: Group | None,
    ) -> StepEngine:
        """An engine of this process; where there can be none, the model is given back."""
        try:
            return options.engine(loaded, agreed_bytes(place, memory_bytes, group), group)
        except BaseException:
            self._give_back()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Generation]:
        """Continue prompts together. Local.

        Args:
            prompts: One prompt or many, each a text or token ids.
            params: Settings for all, or one for each; `get_default_sampling_params()` if absent.

        Returns:
            A text for each prompt, in their order. One whose computation failed has
            `finish_reason` `error` and the exception as `error`; the others are complete.

        Raises:
            ConfigError: A prompt or a setting cannot be used; then none is continued.
        """
        self._check_open("generate")
        many = _as_many(prompts)
        each = settings_of(params, len(many), self.get_default_sampling_params())
        ids = [self._ids(prompt) for prompt in many]
        outputs: list[list[RequestOutput]] = [[] for _ in many]
        waiting = deque(
            (place, self._request(prompt, settings))
            for place, (prompt, settings) in enumerate(zip(ids, each, strict=True))
        )
        places: dict[str, int] = {}
        try:
            while waiting or places:
                while waiting:
                    place, request = waiting[0]
                    # Before it is added, so that an interrupt finds it here.
                    places[request.request_id] = place
                    try:
                        self._open.add(request)
                    except QueueFullError:
                        del places[request.request_id]
                        break
                    waiting.popleft()
                self._open.step(list(places))
                for name in list(places):
                    found = self._open.outputs_of(name)
                    outputs[places[name]].extend(found or ())
                    if found is None or any(output.finish_reason for output in found):
                        self._open.forget(name)
                        del places[name]
                    else:
                        found.clear()
        finally:
            for name in places:
                self._open.forget(name)
        return [joined(prompt, parts) for prompt, parts in zip(ids, outputs, strict=True)]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> Iterator[Delta]:
        """Continue one prompt part by part, while it is written. Local.

        The request begins with the first part that is read, and ends with the iterator, whether
        that is read to its end, closed or dropped.

        Args:
            prompt: Text or token ids.
            params: Settings; `get_default_sampling_params()` if absent.
            request_id: Name for `abort`, unique among the texts under way; None for none.

        Raises:
            ConfigError: The prompt or a setting cannot be used.
            Exception: That which the model, the grammar or the tokenizer raised for this text.
        """
        self._check_open("stream")
        settings = checked(params, self.get_default_sampling_params())
        request = self._request(self._ids(prompt), settings, request_id)
        return self._deltas(request)

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Generation:
        """The answer to a conversation. Local.

        Args:
            messages: Mappings with `role` and `content`, the oldest first; arguments of calls in
                `tool_calls` are mappings, as templates read them.
            params: Settings; `get_default_sampling_params()` if absent.
            tools: Descriptions of functions as the OpenAI API has them, which the template shows to
                the model. Calls of them stay part of the text.
            chat_template_kwargs: Variables of the template, such as `enable_thinking`.

        Raises:
            ConfigError: The template of the model refuses the messages, or they are too long.
            Exception: That which the model, the grammar or the tokenizer raised for this text.
        """
        prompt, settings = self.chat_prompt(
            messages, params, tools=tools, chat_template_kwargs=chat_template_kwargs
        )
        (answer,) = self.generate([prompt], settings)
        if answer.error is not None:
            raise answer.error
        return answer

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, object]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], SamplingParams]:
        """Token ids of a conversation, and settings that end the answer where it ends. Local.

        Args:
            messages: Messages as for `chat`.
            params: Settings as for `chat`.
            tools: Functions as for `chat`.
            chat_template_kwargs: Variables as for `chat`.

        Raises:
            ConfigError: The template of the model refuses the messages, or they are none.
        """
        _check_messages(messages)
        plain = [dict(message) for message in messages]
        ids = self.loaded.chat_ids(plain, tools, chat_template_kwargs)
        settings = checked(params, self.get_default_sampling_params())
        return ids, with_stop(settings, self.loaded.chat_stop)

    def get_default_sampling_params(self) -> SamplingParams:
        """Settings of a call without `params`: those of the model, see `generation_config`. Local.

        `dataclasses.replace` changes a field of them.
        """
        return self.defaults.params({})

    def abort(self, request_id: str) -> bool:
        """End a text that `stream` writes; its memory is free after the call. Local.

        Returns:
            False if there is none of this name.
        """
        return self._open.abort(request_id)

    @property
    def failure(self) -> str:
        """The reason why no text can be written any more, such as a rank that died. Local.

        Empty while all is well, and always for a model on this process. May be read by any thread.
        """
        return self._on_ranks.failure if self._on_ranks is not None else ""

    def stats(self) -> EngineStats:
        """Counters, use of memory and speed, see `Engine.stats`; those of one rank. Local."""
        return self._open.stats()

    def close(self) -> None:
        """End all texts and free the memory of requests; a second call does nothing.

        A model that was in memory is as it was before.
        """
        self._is_closed = True
        self._open.close()
        self._give_back()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _give_back(self) -> None:
        if self._foreign is not None:
            self._foreign.close()

    def _deltas(self, request: Request) -> Iterator[Delta]:
        name = request.request_id
        self._open.add(request)
        try:
            while (mine := self._open.outputs_of(name)) is not None:
                self._check_open("stream")
                if not mine:
                    self._open.step([name])
                    continue
                output = mine.popleft()
                if output.error is not None:
                    raise output.error
                yield Delta(output.text, output.token_ids, output.logprobs, output.finish_reason)
                if output.finish_reason:
                    return
        finally:
            self._open.forget(name)

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.loaded.prompt_ids(prompt))
        if not _is_list(prompt):
            raise _no_prompt(prompt)
        return tuple(prompt)

    def _request(
        self, prompt: tuple[int, ...], params: SamplingParams, name: str | None = None
    ) -> Request:
        self._num_requests += 1
        return Request(name or f"text {self._num_requests}", prompt, params)

    def _check_open(self, method: str) -> None:
        if self._is_closed:
            raise ClosedError(
                f"LLM.{method}",
                found="a closed LLM",
                why="close() has freed its memory.",
                fix="Make a new LLM.",
            )


def _check_in_memory(
    path: object, model: object, tokenizer: object, dtype: torch.dtype | None, device: torch.device
) -> None:
    """Refuse arguments that say two things of where the model is, or nothing. Local."""
    given = {"path": path, "model": model, "tokenizer": tokenizer}
    present = " and ".join(name for name, value in given.items() if value is not None)
    if path is not None or model is None:
        raise ConfigError(
            "LLM: path, model, tokenizer",
            found=present or "none of them",
            why="A folder has its tokenizer with it, and a model in memory is given with one.",
            fix="Give the path of a folder, or `model=` and `tokenizer=`.",
        )
    if isinstance(model, str | Path):
        raise ConfigError(
            f"LLM(model={str(model)!r})",
            found="a path in place of a model of transformers",
            why="`model` is a model in memory. A folder is the first argument; the name of a model "
            "on a hub is none, since nothing is downloaded.",
            fix=f"Write LLM({str(model)!r}).",
        )
    own = getattr(model, "device", None)
    if dtype is not None or (device.type != "cpu" and device != own):
        raise ConfigError(
            "LLM(model=...)",
            found=f"dtype={dtype}" if dtype is not None else f"device={device}, and {own}",
            why="A model in memory stays as it is.",
            fix="Leave it out, or move the model yourself: `model.to(...)`.",
        )


def _as_many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if not _is_list(prompts):
        raise _no_prompt(prompts)
    if isinstance(prompts, str) or (prompts and all(isinstance(one, int) for one in prompts)):
        return [prompts]  # type: ignore[list-item]  # told apart by their first elements
    return list(prompts)  # type: ignore[arg-type]


def _is_list(found: object) -> bool:
    return isinstance(found, Sequence) and not isinstance(found, bytes)


def _no_prompt(found: object) -> ConfigError:
    return ConfigError(
        "LLM: prompt",
        found=f"{found!r:.100}, a {type(found).__name__}",
        why="A prompt is a text, or a list of token ids.",
        fix="Give a string, a list of integers such as `array.tolist()`, or a list of prompts.",
    )


def settings_of(
    params: SamplingParams | Sequence[SamplingParams] | None,
    number: int,
    default: SamplingParams,
) -> list[SamplingParams]:
    """Settings for each of `number` prompts. Local.

    Args:
        params: Settings for all, one for each, or None.
        number: Number of prompts.
        default: Settings for None.

    Raises:
        ConfigError: There are settings for another number of prompts, or they are something else.
    """
    if not isinstance(params, list | tuple):
        return [checked(params, default)] * number
    if len(params) != number:
        raise ConfigError(
            "LLM.generate: params",
            found=f"{len(params)} settings for {number} prompts",
            why="Each prompt is continued with one of them.",
            fix="Give one SamplingParams for all prompts, or one for each.",
        )
    return [checked(one, default) for one in params]


def checked(params: object, default: SamplingParams) -> SamplingParams:
    """`params`, or `default` for None. Local.

    Raises:
        ConfigError: It is something else.
    """
    if params is None or isinstance(params, SamplingParams):
        return params or default
    raise ConfigError(
        "LLM: params",
        found=f"{params!r:.100}, a {type(params).__name__}",
        why="Settings are checked together, when a SamplingParams is made of them.",
        fix="Give for example `SamplingParams(max_tokens=3)` of pcomm.inference.",
    )


def with_stop(params: SamplingParams, stop: tuple[str, ...]) -> SamplingParams:
    """`params` with more strings that end the text. Local."""
    more = tuple(text for text in stop if text not in params.stop)
    return replace(params, stop=params.stop + more) if more else params


def _check_messages(messages: object) -> None:
    """Refuse what is no conversation, as the server does."""
    found, listed = messages, isinstance(messages, list | tuple) and bool(messages)
    for place, one in enumerate(messages if isinstance(messages, list | tuple) else ()):
        is_message = isinstance(one, Mapping) and isinstance(one.get("role"), str)
        content = one.get("content") if is_message else None
        if not is_message or not isinstance(content, str | list | None):
            found, listed = f"message {place}: {one!r}", False
            break
    if not listed:
        raise ConfigError(
            "LLM.chat: messages",
            found=f"{found!s:.100}" if found else f"{found!r}",
            why="A conversation is a list of messages, each with `role` and `content`.",
            fix='Give for example `[{"role": "user", "content": "Hello"}]`.',
        )


def _check_ranks(ranks: int, group: Group | None) -> None:
    if group is not None and ranks != 1:
        raise ConfigError(
            "LLM: ranks and group",
            found=f"ranks={ranks}, and a group of {group.size}",
            why="Either the ranks of a group share the model, or some that are started here.",
            fix="Leave one of them out.",
        )


def _check_numbers(numbers: Mapping[str, object]) -> None:
    for name, value in numbers.items():
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(
                f"LLM: {name}",
                found=f"{value!r}",
                why=f"{name} is an integer of at least 1.",
                fix=f"Give {name} as such a number, or leave it out.",
            )
