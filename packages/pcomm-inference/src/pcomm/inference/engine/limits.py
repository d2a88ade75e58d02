"""Sizes of an engine, and the models, sizes and requests that it refuses."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from pcomm.core.errors import ConfigError
from pcomm.inference.engine.request import Request
from pcomm.inference.model import KVSpec, LayerSpec, StateSpec
from pcomm.inference.sampling.params import check_token_ids

__all__ = ["INVARIANT_CHUNK", "EngineSettings", "check_eos_ids", "check_model", "check_request"]

INVARIANT_CHUNK = 256
"""Tokens by which a prompt is computed where no other request may move the end of a chunk."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Sizes of pools, steps and queues; the arguments of `Engine` of the same names."""

    vocabulary: int
    max_model_len: int
    block_size: int
    num_blocks: int
    num_state_slots: int
    max_batch_tokens: int
    max_requests: int
    max_queued: int
    speculative_tokens: int
    prefix_cache: bool = True
    batch_invariant: bool = False

    def check(self, specs: Sequence[LayerSpec]) -> None:
        """Refuse declarations and numbers that no engine can run with.

        Args:
            specs: Declarations of the model, one for each layer.

        Raises:
            ConfigError: A declaration cannot be allocated; a value is no integer, or is too small.
        """
        _check_memory_specs(specs)
        sizes = {name: value for name, value in vars(self).items() if name not in _SWITCHES}
        least = dict.fromkeys(sizes, 1) | {"max_model_len": 2, "speculative_tokens": 0}
        least["num_blocks"] = int(any(isinstance(spec, KVSpec) for spec in specs))
        least["num_state_slots"] = int(any(isinstance(spec, StateSpec) for spec in specs))
        for name, value in sizes.items():
            if not _is_int(value, least[name]):
                raise ConfigError(
                    f"Engine: {name}",
                    found=f"{value!r}",
                    why=f"{name} is an integer of at least {least[name]}, or nothing could run.",
                    fix=f"Give {name} as such a number.",
                )
        for name in _SWITCHES:
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(
                    f"Engine: {name}",
                    found=f"{value!r}",
                    why=f"{name} is on or off.",
                    fix="Give True or False.",
                )
        if self.batch_invariant:
            self._check_batch_invariant()

    def _check_batch_invariant(self) -> None:
        """Refuse numbers by which the tokens of a request share products that depend on others."""
        least = INVARIANT_CHUNK + self.max_requests - 1
        if self.speculative_tokens:
            found, why, fix = (
                f"speculative_tokens={self.speculative_tokens}",
                "Drafts are computed together with the token before them, in other sums.",
                "Leave one of the two out.",
            )
        elif self.max_batch_tokens < least:
            found, why, fix = (
                f"max_batch_tokens={self.max_batch_tokens} and max_requests={self.max_requests}",
                f"A prompt is computed by {INVARIANT_CHUNK} tokens, beside one of each other text.",
                f"Give max_batch_tokens of at least {least}, or a smaller max_requests.",
            )
        else:
            return
        raise ConfigError("Engine: batch_invariant=True", found=found, why=why, fix=fix)


_SWITCHES = ("prefix_cache", "batch_invariant")


def check_model(model: object) -> None:
    """Refuse an object without the two methods of a `Model`. Local.

    Args:
        model: Object that an engine was made with.

    Raises:
        ConfigError: It has no `memory_specs()` or no `step()`, or is a class.
    """
    methods = ("memory_specs", "step")
    missing = [name for name in methods if not callable(getattr(model, name, None))]
    if isinstance(model, type):
        found = f"the class {model.__name__}"
    elif missing:
        found = f"a {type(model).__name__} without {' and '.join(f'{n}()' for n in missing)}"
    else:
        return
    raise ConfigError(
        "Engine: model",
        found=found,
        why="A model says by memory_specs() what each layer keeps of a request, and computes the "
        "tokens of a step by step(batch, memory).",
        fix="Give an object with both methods; the README of pcomm-inference begins with one.",
    )


def check_eos_ids(eos_ids: object) -> tuple[int, ...]:
    """The ids as a tuple. Local.

    Args:
        eos_ids: Token ids that an engine was made with.

    Raises:
        ConfigError: They are no sequence of ints.
    """
    found = f"{eos_ids!r}"
    if isinstance(eos_ids, Iterable):
        ids = tuple(eos_ids)
        wrong = [token for token in ids if not _is_int(token)]
        if not wrong:
            return ids
        found = f"{wrong[0]!r} of type {type(wrong[0]).__name__} in it"
    raise ConfigError(
        "Engine: eos_ids",
        found=found,
        why="A model may end a text by several tokens, so their ids come as a sequence of ints.",
        fix="Give a tuple, (2,) for one id.",
    )


def _check_memory_specs(specs: object) -> None:
    """Refuse what no pool can be allocated from; the message names the layer."""
    if not isinstance(specs, Sequence) or isinstance(specs, str | bytes):
        raise ConfigError(
            "Engine: memory_specs",
            found=f"a {type(specs).__name__}",
            why="The engine allocates the memory of each layer from its entry.",
            fix="Return a list with a KVSpec, a StateSpec or None for each layer.",
        )
    for number, spec in enumerate(specs):
        if isinstance(spec, KVSpec):
            problem = _problem_of_kv(spec)
        elif isinstance(spec, StateSpec):
            problem = _problem_of_state(spec)
        elif spec is None:
            problem = None
        else:
            problem = (
                f"a {type(spec).__name__}",
                "The engine has pools for keys and values, and for states.",
                "Return a KVSpec, a StateSpec or None for each layer.",
            )
        if problem is not None:
            found, why, fix = problem
            asked = f"Engine: layer {number} of memory_specs"
            raise ConfigError(asked, found=found, why=why, fix=fix)


# What was found, why it cannot work, what to do.
_Problem = tuple[str, str, str]


def _problem_of_kv(spec: KVSpec) -> _Problem | None:
    for name in ("heads", "head_dim", "value_dim"):
        size = getattr(spec, name)
        if not _is_int(size, 1) and not (name == "value_dim" and size is None):
            return (
                f"{name} = {size!r} in its KVSpec",
                "The pool of keys and values has a dimension of that size.",
                f"Give {name} as an integer of at least 1, or None for a layer that keeps nothing.",
            )
    if spec.window is not None and not _is_int(spec.window, 1):
        return (
            f"window = {spec.window!r} in its KVSpec",
            "A window is a number of keys, and a token sees its own.",
            "Give window as an integer of at least 1, or None for a layer that sees all tokens.",
        )
    if not isinstance(spec.dtype, torch.dtype):
        return _no_dtype("KVSpec.dtype", spec.dtype)
    if not spec.dtype.is_floating_point:
        return (
            f"KVSpec.dtype = {spec.dtype}",
            "Keys and values are floating-point numbers; another dtype would cut them off.",
            "Give the dtype of the activations, torch.bfloat16 for example.",
        )
    return None


def _problem_of_state(spec: StateSpec) -> _Problem | None:
    for field in ("shapes", "dtypes"):
        if not isinstance(mapping := getattr(spec, field), Mapping):
            return (
                f"{field} of its StateSpec is a {type(mapping).__name__}",
                "Tensors of a state have names, by which the layer reads and writes them.",
                f"Give {field} as a dict with an entry for each tensor.",
            )
    for name in {**spec.shapes, **spec.dtypes}:
        for has, lacks, given in (("shape", "dtype", spec.dtypes), ("dtype", "shape", spec.shapes)):
            if name not in given:
                return (
                    f"tensor {name!r} has a {has} and no {lacks}",
                    "The pool of a state is allocated from both.",
                    f"Add {lacks}s[{name!r}] to its StateSpec.",
                )
        shape, dtype = spec.shapes[name], spec.dtypes[name]
        is_sizes = isinstance(shape, Sequence) and not isinstance(shape, str | bytes)
        if not is_sizes or not all(_is_int(size, 0) for size in shape):
            return (
                f"shape {shape!r} of tensor {name!r}",
                "The pool of a state has these dimensions behind that of its slots.",
                "Give the shape as a tuple of integers of at least 0.",
            )
        if not isinstance(dtype, torch.dtype):
            return _no_dtype(f"dtypes[{name!r}]", dtype)
    return None


def _no_dtype(name: str, dtype: object) -> _Problem:
    fix = "Give a torch.dtype, torch.bfloat16 for example."
    return f"{name} = {dtype!r}", "Pools are tensors of torch.", fix


def check_request(
    request: Request,
    *,
    known: Container[str],
    vocabulary: int,
    max_model_len: int,
    has_tokenizer: bool,
) -> None:
    """Refuse a request that this engine can never serve.

    Args:
        request: New request.
        known: Names of the requests under way.
        vocabulary: Number of token ids.
        max_model_len: Most tokens of prompt and text together.
        has_tokenizer: True if the engine turns tokens into text.

    Raises:
        ConfigError: A field has another type, the name is in use, the prompt is empty, has other
            token ids or leaves no room for a token, or text is needed without a tokenizer.
    """
    asked = f"Engine.add: request {request.request_id!r}"
    prompt, params = request.prompt, request.params
    if not isinstance(request.request_id, str):
        raise ConfigError(
            asked,
            found=f"a request_id of type {type(request.request_id).__name__}",
            why="Outputs and abort() find a request by its name, which is a str.",
            fix="Give a str, for example str(number).",
        )
    if not _is_int(request.priority):
        raise ConfigError(
            asked,
            found=f"priority {request.priority!r}",
            why="Requests wait in the order of their priorities, which are ints.",
            fix="Give an int, smaller for what comes first; 0 is the default.",
        )
    no_ids = [token for token in prompt if not _is_int(token)]
    if no_ids:
        raise ConfigError(
            asked,
            found=f"{no_ids[0]!r} of type {type(no_ids[0]).__name__} in the prompt",
            why="A prompt is a sequence of token ids, which are ints.",
            fix="Encode a text with the model's tokenizer, and turn a tensor by its tolist().",
        )
    if request.request_id in known:
        raise ConfigError(
            asked,
            found="a request of this name that is under way",
            why="Outputs and abort() find a request by its name.",
            fix="Give each request another request_id until the first has finished.",
        )
    if not prompt:
        raise ConfigError(
            asked,
            found="an empty prompt",
            why="The first token to write needs the logits of a token before it.",
            fix="Begin the prompt with the model's token for the begin of a text.",
        )
    wrong = [token for token in prompt if not 0 <= token < vocabulary]
    if wrong:
        raise ConfigError(
            asked,
            found=f"token ids {wrong[:5]} in the prompt and a vocabulary of {vocabulary}",
            why="A token id outside the vocabulary stands for no token of this model.",
            fix=f"Encode the prompt with the model's tokenizer: ids from 0 to {vocabulary - 1}.",
        )
    if len(prompt) >= max_model_len:
        raise ConfigError(
            asked,
            found=f"a prompt of {len(prompt)} tokens, and max_model_len is {max_model_len}",
            why="Prompt and text together have at most max_model_len tokens.",
            fix=f"Shorten the prompt to at most {max_model_len - 1} tokens, or raise the limit.",
        )
    grammars = ("json_schema", "regex", "grammar")
    needs_text = [n for n in ("stop", *grammars) if getattr(params, n)]
    if needs_text and not has_tokenizer:
        raise ConfigError(
            asked,
            found=f"{needs_text[0]}, and an engine without a tokenizer",
            why="Stop strings and grammars are matched on text.",
            fix="Give Engine(tokenizer=...), or end the text by stop_token_ids.",
        )
    check_token_ids(params, vocabulary)


def _is_int(value: object, least: int | None = None) -> bool:
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return least is None or value >= least
