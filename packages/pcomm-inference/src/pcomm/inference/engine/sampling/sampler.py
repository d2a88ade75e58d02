"""The next token of every request of a step, in one pass over all rows."""

# Shape suffixes: L rows of logits, R some of them, V vocabulary, C candidates of a row.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pcomm.core.errors import ConfigError, PcommError
from pcomm.inference.engine.request import TokenLogprobs
from pcomm.inference.engine.sampling.grammar_masks import mask_by_grammar
from pcomm.inference.engine.sampling.largest import place_of_largest
from pcomm.inference.engine.sampling.logit_edits import edit_logits, edits
from pcomm.inference.engine.sampling.logprobs import token_logprobs
from pcomm.inference.engine.sampling.not_finite import not_finite
from pcomm.inference.engine.sampling.sampling_params import SamplingParams
from pcomm.inference.engine.sampling.sampling_row import SamplingRow
from pcomm.inference.engine.sampling.token_filters import filter_tokens, filters
from pcomm.inference.engine.sampling.token_noise import TokenNoise

__all__ = ["Sampled", "Sampler"]

# Temperatures beyond these give what these give, and are no numbers of fp32, or not with a logit of
# minus infinity.
_COLDEST, _HOTTEST = 1e-30, 1e30
# On a CPU, a draw takes rows of together so many logits at a time: what lies between its dozen
# passes stays in the cache, which makes large vocabularies several times faster.
_CACHED_LOGITS = 2**18

# In place of a token id, for a row that has none.
_NO_TOKEN = -1

_Draw = Callable[[Tensor, Sequence[SamplingParams], Tensor], Tensor]


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
        self._vocabulary = vocabulary
        self._noise = TokenNoise(vocabulary, device)

    @torch.inference_mode()
    def sample(self, logits_LV: Tensor, rows: Sequence[SamplingRow]) -> Sampled:
        """One token for each row. Local.

        A row whose largest logit is NaN or infinite, also for settings that exclude every token,
        has an error and no token; other rows are not disturbed.

        Args:
            logits_LV: Logits of any floating-point dtype; not changed. Those of fp64 are rounded to
                fp32 first, so that a row does not depend on the settings of others.
            rows: Settings and history of each row, in the order of the logits.

        Raises:
            ConfigError: The shape of the logits is not that of the rows.
        """
        if tuple(logits_LV.shape) != (len(rows), self._vocabulary):
            raise ConfigError(
                "Sampler.sample",
                found=f"logits of shape {list(logits_LV.shape)}",
                why=f"{len(rows)} rows and a vocabulary of {self._vocabulary} were given.",
                fix="Let Model.step return one row for each entry of batch.logits_rows.",
            )
        if not rows:
            return Sampled([], [])
        if logits_LV.dtype == torch.float64:
            logits_LV = logits_LV.float()
        edited_LV = logits_LV
        if any(row.grammar is not None or edits(row.params) for row in rows):
            edited_LV = logits_LV.to(torch.float32, copy=True).contiguous()
            edit_logits(edited_LV, rows)
            mask_by_grammar(edited_LV, rows)
        token_ids = self._choose(edited_LV, rows).tolist()
        errors = {
            n: _no_token(logits_LV[n], edited_LV[n])
            for n, token_id in enumerate(token_ids)
            if token_id < 0
        }
        return Sampled(token_ids, _logprobs(logits_LV, token_ids, rows), errors)

    def _choose(self, logits_LV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """int64 `[L]`, the token of each row; -1 where the largest logit is not finite."""
        groups: list[list[int]] = [[], [], []]
        for number, row in enumerate(rows):
            params = row.params
            groups[0 if params.temperature == 0 else 1 + filters(params)].append(number)
        ways = (_likeliest, self._draw_from_all, self._draw_from_some)
        for numbers, way in zip(groups, ways, strict=True):
            if len(numbers) == len(rows):
                return way(logits_LV, rows)
        chosen_L = torch.empty(len(rows), dtype=torch.int64, device=logits_LV.device)
        for numbers, way in zip(groups, ways, strict=True):
            if numbers:
                index = torch.tensor(numbers, device=logits_LV.device)
                chosen_L[index] = way(logits_LV[index], [rows[number] for number in numbers])
        return chosen_L

    def _draw_from_all(self, logits_RV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        def draw(logits_RV: Tensor, params: Sequence[SamplingParams], keys_R: Tensor) -> Tensor:
            largest_R1 = logits_RV.amax(-1, keepdim=True)
            below_RV = _below(logits_RV, largest_R1, params)
            chosen_R1 = place_of_largest(self._noise.gumbel(keys_R).add_(below_RV))
            return _where_finite(chosen_R1, largest_R1)

        return self._in_blocks(draw, logits_RV, rows)

    def _draw_from_some(self, logits_RV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        def draw(logits_RV: Tensor, params: Sequence[SamplingParams], keys_R: Tensor) -> Tensor:
            largest_R1 = logits_RV.amax(-1, keepdim=True)
            ids_RC, below_RC = filter_tokens(_below(logits_RV, largest_R1, params), params)
            noise_RC = self._noise.gumbel(keys_R, ids_RC)
            best_R1 = place_of_largest(noise_RC.add_(below_RC))
            return _where_finite(ids_RC.gather(1, best_R1), largest_R1)

        return self._in_blocks(draw, logits_RV, rows)

    def _in_blocks(self, draw: _Draw, logits_RV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        params = [row.params for row in rows]
        keys_R = self._noise.keys([one.seed for one in params], [row.position for row in rows])
        size = len(rows)
        if logits_RV.device.type == "cpu":
            size = max(_CACHED_LOGITS // self._vocabulary, 1)
        blocks = [slice(begin, begin + size) for begin in range(0, len(rows), size)]
        return torch.cat([draw(logits_RV[b], params[b], keys_R[b]) for b in blocks])


def _likeliest(logits_RV: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    # Of logits with a NaN, the NaN is the largest to torch.
    chosen_R1 = place_of_largest(logits_RV)
    return _where_finite(chosen_R1, logits_RV.gather(1, chosen_R1))


def _where_finite(ids_R1: Tensor, largest_R1: Tensor) -> Tensor:
    # In the tensor that goes to the host anyway: no second wait for the device.
    return torch.where(largest_R1.abs() < torch.inf, ids_R1, _NO_TOKEN)[:, 0]


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


def _below(logits_RV: Tensor, largest_R1: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    # The largest becomes 0, and stays 0 however small the temperature is.
    divisors = [min(max(one.temperature, _COLDEST), _HOTTEST) for one in params]
    below_RV = logits_RV.float() - largest_R1
    if any(divisor != 1 for divisor in divisors):
        below_RV /= torch.tensor(divisors, device=logits_RV.device)[:, None]
    return below_RV


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
