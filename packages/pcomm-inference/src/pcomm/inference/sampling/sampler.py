"""One token for each row of logits, in one pass; a row of NaN or infinity gets an error instead."""

# Shape suffixes: L rows of logits, R some of them, V vocabulary, C candidates of a row, P parts of
# a row, W ids of a part.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from pcomm.core.errors import PcommError
from pcomm.inference.layers.residual_stream import has_triton
from pcomm.inference.sampling.filters import (
    candidates,
    edit_logits,
    filter_tokens,
    has_edits,
    has_filters,
    least_of_top,
    likeliest_first,
    mask_by_grammar,
)
from pcomm.inference.sampling.noise import TokenNoise
from pcomm.inference.sampling.params import SamplingParams, SamplingRow, TokenLogprobs
from pcomm.inference.upload import upload

__all__ = [
    "NotFiniteLogitsError",
    "Sampled",
    "Sampler",
    "not_finite",
    "place_of_largest",
    "token_logprobs",
]


# Temperatures beyond these give what these give, and are no numbers of fp32, or not with a logit of
# minus infinity.
_COLDEST, _HOTTEST = 1e-30, 1e30
# On a CPU, a draw takes rows of together so many logits at a time: what lies between its dozen
# passes stays in the cache, which makes large vocabularies several times faster.
_CACHED_LOGITS = 2**18
_Way = Callable[[Tensor, Sequence[SamplingRow]], Tensor]
# In place of a token id, for a row that has none.
_NO_TOKEN = -1


@dataclass(frozen=True)
class Sampled:
    """What was sampled for each row.

    Attributes:
        token_ids: The token of each row; -1 for a row that has none.
        logprobs: Log-probabilities of each row that asked for them and has a token, otherwise None.
        errors: Reasons why rows have no token, by the number of the row.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: Mapping[int, PcommError] = field(default_factory=dict)


class Sampler:
    """Chooses one token for each row of logits. Rows may have any mix of settings.

    A row gets the same token in every batch: noise is keyed by seed, position and token id, and
    sums on which a choice depends are those of integers. At temperature 0 that is the largest
    logit, and of equal ones the lowest id.

    Args:
        vocabulary: Number of logits of a row.
        device: Device of the logits.
    """

    def __init__(self, vocabulary: int, device: torch.device | str) -> None:
        self._vocabulary, self._device = vocabulary, torch.device(device)
        self._noise = TokenNoise(vocabulary, device)
        self._has_kernels = self._device.type != "cpu" and has_triton()

    @torch.inference_mode()
    def told(self, rows: Sequence[SamplingRow]) -> Sequence[Tensor]:
        """What kernels have to know of rows; nothing where torch chooses their tokens. Local.

        Args:
            rows: Settings and history of each row.

        Returns:
            int64 on the host, `[]` each: to be brought to the device for `sample`, in one copy with
            what else it is told.
        """
        if not (self._has_kernels and rows):
            return ()
        # Imported late: they import Triton.
        from pcomm.inference.sampling.draw_kernels import told_of_draws
        from pcomm.inference.sampling.edit_kernel import told_of_edits

        divisors = [_divisor(row.params) for row in rows]
        told = [told_of_draws(rows, divisors, self._vocabulary).flatten()]
        if any(has_edits(row.params) for row in rows):
            told.append(told_of_edits(rows, self._vocabulary))
        return told

    @torch.inference_mode()
    def sample(
        self,
        logits_LV: Tensor,
        rows: Sequence[SamplingRow],
        told: Sequence[Tensor] | None = None,
    ) -> Sampled:
        """One token for each row. Local.

        A row whose largest logit is NaN or infinite, also for settings that exclude every token,
        has an error and no token; other rows are not disturbed.

        Args:
            logits_LV: Logits of any floating-point dtype; not changed. Those of fp64 are rounded to
                fp32 first, so that a row does not depend on the settings of others.
            rows: Settings and history of each row, in the order of the logits.
            told: Tensors on the device, from `told` of these rows; None to bring them there now.
        """
        assert tuple(logits_LV.shape) == (len(rows), self._vocabulary), "one row of logits for each"
        if not rows:
            return Sampled([], [])
        if logits_LV.dtype == torch.float64:
            logits_LV = logits_LV.float()
        if told is None:
            told = upload(self.told(rows), self._device)
        edited_LV = logits_LV
        is_edited = any(has_edits(row.params) for row in rows)
        if is_edited or any(row.allowed_words is not None for row in rows):
            edited_LV = logits_LV.to(torch.float32, copy=True).contiguous()
            if is_edited and self._is_for_kernels(logits_LV):
                # Imported late: it imports Triton.
                from pcomm.inference.sampling import edit_kernel

                edit_kernel.edit(edited_LV, logits_LV, told[1])
            elif is_edited:
                edit_logits(edited_LV, rows)
            mask_by_grammar(edited_LV, rows)
        token_ids = self._choose(edited_LV, rows, told).tolist()
        errors = {
            n: _no_token(logits_LV[n], edited_LV[n])
            for n, token_id in enumerate(token_ids)
            if token_id < 0
        }
        return Sampled(token_ids, _logprobs(logits_LV, token_ids, rows), errors)

    def _is_for_kernels(self, logits_LV: Tensor) -> bool:
        if not self._has_kernels:
            return False
        from pcomm.inference.sampling.draw_kernels import takes_logits

        return takes_logits(logits_LV)

    def _choose(
        self, logits_LV: Tensor, rows: Sequence[SamplingRow], told: Sequence[Tensor]
    ) -> Tensor:
        """int64 `[L]`, the token of each row; -1 where the largest logit is not finite."""
        if self._is_for_kernels(logits_LV):
            from pcomm.inference.sampling.draw_kernels import choose

            return choose(logits_LV, told[0].view(6, -1), self._noise)
        groups: list[list[int]] = [[], [], []]
        for number, row in enumerate(rows):
            params = row.params
            groups[0 if params.temperature == 0 else 1 + has_filters(params)].append(number)
        draw = self._draw
        ways: tuple[_Way, ...]
        ways = (_likeliest, partial(draw, is_filtered=False), partial(draw, is_filtered=True))
        for numbers, way in zip(groups, ways, strict=True):
            if len(numbers) == len(rows):
                return way(logits_LV, rows)
        chosen_L = torch.empty(len(rows), dtype=torch.int64, device=logits_LV.device)
        for numbers, way in zip(groups, ways, strict=True):
            if numbers:
                index = torch.tensor(numbers, device=logits_LV.device)
                chosen_L[index] = way(logits_LV[index], [rows[number] for number in numbers])
        return chosen_L

    def _draw(self, logits_RV: Tensor, rows: Sequence[SamplingRow], *, is_filtered: bool) -> Tensor:
        params = [row.params for row in rows]
        keys_R = self._noise.keys([one.seed for one in params], [row.position for row in rows])
        size = len(rows)
        if logits_RV.device.type == "cpu":
            size = max(_CACHED_LOGITS // self._vocabulary, 1)
        blocks = [slice(begin, begin + size) for begin in range(0, len(rows), size)]
        drawn = [
            self._draw_block(logits_RV[b], params[b], keys_R[b], is_filtered=is_filtered)
            for b in blocks
        ]
        return torch.cat(drawn)

    def _draw_block(
        self,
        logits_RV: Tensor,
        params: Sequence[SamplingParams],
        keys_R: Tensor,
        *,
        is_filtered: bool,
    ) -> Tensor:
        largest_R1 = logits_RV.amax(-1, keepdim=True)
        below_RV = _below(logits_RV, largest_R1, params)
        if not is_filtered:
            chosen_R1 = place_of_largest(self._noise.gumbel(keys_R).add_(below_RV))
            return _where_finite(chosen_R1, largest_R1)
        ids_RC, below_RC = filter_tokens(below_RV, params)
        best_R1 = place_of_largest(self._noise.gumbel(keys_R, ids_RC).add_(below_RC))
        return _where_finite(ids_RC.gather(1, best_R1), largest_R1)


def _likeliest(logits_RV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    # Of logits with a NaN, the NaN is the largest to torch.
    chosen_R1 = place_of_largest(logits_RV)
    return _where_finite(chosen_R1, logits_RV.gather(1, chosen_R1))


def _where_finite(ids_R1: Tensor, largest_R1: Tensor) -> Tensor:
    # In the tensor that goes to the host anyway: no second wait for the device.
    return torch.where(largest_R1.abs() < torch.inf, ids_R1, _NO_TOKEN)[:, 0]


def _below(logits_RV: Tensor, largest_R1: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    # The largest becomes 0, and stays 0 however small the temperature is.
    divisors = [_divisor(one) for one in params]
    below_RV = logits_RV.float() - largest_R1
    if any(divisor != 1 for divisor in divisors):
        below_RV /= torch.tensor(divisors, device=logits_RV.device)[:, None]
    return below_RV


def _divisor(params: SamplingParams) -> float:
    if params.temperature == 0:
        return 1.0
    return min(max(params.temperature, _COLDEST), _HOTTEST)


def _no_token(logits_V: Tensor, edited_V: Tensor) -> PcommError:
    largest = float(logits_V.amax())
    if not math.isfinite(largest):
        return not_finite(largest)
    return PcommError(
        "Engine.step: logits of the model under the settings of a request",
        found=f"the logits of a row are not numbers: the largest is {float(edited_V.amax())}",
        why="No token can be chosen among them: settings or the grammar exclude every token.",
        fix="Ask for no min_tokens where every token ends the text.",
    )


def _logprobs(
    logits_LV: Tensor, token_ids: Sequence[int], rows: Sequence[SamplingRow]
) -> list[TokenLogprobs | None]:
    found: list[TokenLogprobs | None] = [None] * len(rows)
    numbers = [
        n for n, row in enumerate(rows) if row.params.logprobs is not None and token_ids[n] >= 0
    ]
    if numbers:
        asked = [rows[n].params.logprobs or 0 for n in numbers]
        logits_RV = logits_LV[torch.tensor(numbers, device=logits_LV.device)]
        chosen = [token_ids[n] for n in numbers]
        for number, logprobs in zip(numbers, token_logprobs(logits_RV, chosen, asked), strict=True):
            found[number] = logprobs
    return found


class NotFiniteLogitsError(PcommError):
    """The model gave logits that are no numbers; what it kept of the tokens may be none either."""


def not_finite(largest: float) -> NotFiniteLogitsError:
    """The error for a row of logits. Local.

    Args:
        largest: Largest logit of the row.
    """
    return NotFiniteLogitsError(
        "Engine.step: logits of the model",
        found=f"the logits of a row are not numbers: the largest is {largest}",
        why="No token can be chosen among them, and none has a probability. A model gives such "
        "logits when its weights or sums leave the range of its dtype.",
        fix="Check the weights, and load the model in bfloat16 or float32 rather than float16.",
    )


# Rows are taken in blocks of so many numbers, which bounds the memory that a long prompt needs.
_BLOCK = 2**24


def token_logprobs(
    logits_RV: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Log-probability of one token of each row, and those of the likeliest. Local.

    Args:
        logits_RV: Logits of any floating-point dtype, as the model gave them; not changed.
        token_ids: Token of each row: the one that was sampled, or the next one of a prompt.
        num_top: Number of likeliest tokens wanted of each row, may be 0.
    """
    rows = max(_BLOCK // logits_RV.shape[1], 1)
    found: list[TokenLogprobs] = []
    for begin in range(0, len(token_ids), rows):
        part = slice(begin, begin + rows)
        found += _of_block(logits_RV[part], token_ids[part], num_top[part])
    return found


def _of_block(
    logits_RV: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    logprobs_RV = torch.log_softmax(logits_RV.float(), -1)
    ids_R1 = torch.tensor(token_ids, device=logprobs_RV.device)[:, None]
    chosen = logprobs_RV.gather(1, ids_R1)[:, 0].tolist()
    most = max(num_top)
    if most == 0:
        return [TokenLogprobs(*pair, {}) for pair in zip(token_ids, chosen, strict=True)]
    least_R = least_of_top(logprobs_RV, [most] * len(token_ids))
    sorted_RC = likeliest_first(*candidates(logprobs_RV, least_R))
    top_ids, top = (found_RC[:, :most].tolist() for found_RC in sorted_RC)
    return [
        TokenLogprobs(token_id, logprob, dict(zip(ids[:number], values[:number], strict=True)))
        for token_id, logprob, ids, values, number in zip(
            token_ids, chosen, top_ids, top, num_top, strict=True
        )
    ]


# Ids of a part. torch's argmax on a CPU compares one number after another, in bf16 after a
# conversion of each; amax takes a vector at a time.
_PART = 256
# Numbers up to which one call of argmax takes less time than several of others.
_FEW = 1 << 13


def place_of_largest(numbers_RV: Tensor) -> Tensor:
    """What `numbers_RV.argmax(-1, keepdim=True)` gives, on a CPU in a fraction of the time. Local.

    Args:
        numbers_RV: Floating-point numbers.

    Returns:
        `[R, 1]`, int64: of equal numbers the first, and a NaN before every number.
    """
    num_parts, rest = divmod(numbers_RV.shape[-1], _PART)
    if numbers_RV.device.type != "cpu" or num_parts < 2 or numbers_RV.numel() <= _FEW:
        return numbers_RV.argmax(-1, keepdim=True)
    whole_RV = numbers_RV[:, : num_parts * _PART] if rest else numbers_RV
    parts_RPW: Tensor = whole_RV.unflatten(-1, (num_parts, _PART))
    part_R1 = parts_RPW.amax(-1).argmax(-1, keepdim=True)
    best_RW = parts_RPW.gather(1, part_R1[:, :, None].expand(-1, 1, _PART))[:, 0]
    place_R1: Tensor = part_R1 * _PART + best_RW.argmax(-1, keepdim=True)
    if not rest:
        return place_R1
    last_R1 = numbers_RV[:, -rest:].argmax(-1, keepdim=True) + num_parts * _PART
    found_R1, at_end_R1 = numbers_RV.gather(-1, place_R1), numbers_RV.gather(-1, last_R1)
    is_last_R1 = (at_end_R1 > found_R1) | (at_end_R1.isnan() & ~found_R1.isnan())
    return torch.where(is_last_R1, last_R1, place_R1)
