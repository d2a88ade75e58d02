"""A whole model of transformers, unchanged, over context-parallel ranks.

`context_parallel` finds what moves tokens in a model: calls of attention by name, and mixers whose
recurrence this package has. Within `batch` these run by a plan, everything else runs as it is on
this rank's tokens, and the loss is that of all ranks.
"""

# B rows of S tokens, T tokens of all sequences with their padding, t of them on this rank

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, count, pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from pcomm.core.errors import ConfigError, LayoutError, UnsupportedError
from pcomm.gdn_cp.arguments import GroupLike, pack_of, place_in
from pcomm.gdn_cp.plan import Plan, make_plan
from pcomm.gdn_cp.specs import Spec
from pcomm.gdn_cp.strategies.choice import Link
from pcomm.gdn_cp.strategies.strategy import StrategyName
from pcomm.gdn_cp.token_layout import LayoutName
from pcomm.gdn_cp.transformers.attention_sockets import AttentionSockets
from pcomm.gdn_cp.transformers.recurrent_sockets import recurrent_sockets
from pcomm.gdn_cp.transformers.self_check import (
    BackwardsPlan,
    plan_alone,
    refuse_difference,
    traced,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ContextParallel", "context_parallel"]

_NUMBERS = count()
_NO_LABEL = -100
_NUM_TOKENS = 24


def context_parallel(
    model: PreTrainedModel,
    group: GroupLike,
    *,
    strategy: Literal["auto"] | StrategyName = "auto",
    layout: LayoutName = "zigzag",
    link: Link | None = None,
    check: bool = True,
) -> ContextParallel:
    """Prepare a model of transformers to share the tokens of its sequences with other ranks.

        cp = context_parallel(model, mesh)
        with cp.batch(input_ids, labels=labels) as local:
            model(**local).loss.backward()

    Local, unless the model's own forward is collective; every rank of the group calls it. The model
    runs a text of 24 tokens a few times and is unchanged afterwards.

    Args:
        model: A model of transformers for one stream of tokens: attention goes through its
            `AttentionInterface`, and its other mixers are Gated DeltaNet or Mamba-2. On each rank
            it is whole, or sharded by something that gathers it when it runs.
        group: The context-parallel group: a `Group`, torch's `ProcessGroup` or a `DeviceMesh` of
            one dimension.
        strategy: A strategy of `make_plan`. Attention takes `heads`, or `gather` where its heads do
            not divide. With `gather` it takes that, and with `heads` nothing else.
        layout: The argument of `make_plan`.
        link: The argument of `make_plan`.
        check: False to leave away the comparison with the model's own forward.

    Raises:
        ConfigError: This is no such model, `group` is no group, or attention or a mixer is
            replaced already.
        UnsupportedError: transformers is not installed, or a module mixes tokens in a way that is
            not known; it is named. Nothing has changed then.

    Source:
        `AttentionInterface`, `AttentionMaskInterface` and `PreTrainedModel.loss_function` of
        transformers 5.23.
    """
    return ContextParallel(model, group, strategy=strategy, layout=layout, link=link, check=check)


class ContextParallel:
    """A model whose sequences are shared by ranks within `batch`; see `context_parallel`.

    Attributes:
        size: Number of ranks.
        plans: The plan of the recurrent mixers and that of attention in the current batch, or in
            the last one; without those that the model does not have.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        group: GroupLike,
        *,
        strategy: Literal["auto"] | StrategyName,
        layout: LayoutName,
        link: Link | None,
        check: bool,
    ) -> None:
        _check_kind(model)
        place = place_in(group)
        self.model, self.size, self.rank = model, place.size, place.rank
        self._group: GroupLike = place.group or place.collectives or (place.rank, place.size)
        self._collectives = place.collectives
        self._options: dict[str, Any] = {"layout": layout, "link": link}
        self._strategy = strategy
        self._parameters = inspect.signature(model.forward).parameters
        self._attention = AttentionSockets(model, f"pcomm_cp_{next(_NUMBERS)}")
        self._mixers = recurrent_sockets(model)
        self.plans: tuple[Plan, ...] = ()
        self._is_running = False
        self._check_unplugged()
        self._find(check)
        # A plan of no tokens, so that arguments which cannot be are refused here.
        self._make_plans((0, 0), self._specs())

    @contextmanager
    def batch(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,
        cu_seqlens: Sequence[int] | None = None,
        num_items_in_batch: int | Tensor | None = None,
        verify: bool = False,
        **by_token: Tensor,
    ) -> Iterator[dict[str, Any]]:
        """Within, the model computes this rank's tokens of a batch that all ranks have.

        Every rank enters with the same arguments; forward, and backward where it computes layers
        again, happen within. Sequences are padded at their ends to what the layout needs. The loss
        of the model is that of the whole batch on every rank, and gradients of parameters are this
        rank's part: their sum over the ranks is the gradient. Whatever averages them instead, as
        DDP and FSDP do, wants `loss * size`.

        Args:
            input_ids: `[B, S]`, one sequence a row; or `[1, T]` or `[T]` with `cu_seqlens`.
            labels: Shaped as `input_ids`; not shifted, and -100 where there is none.
            cu_seqlens: Offsets of sequences that lie side by side, integers of the host.
            num_items_in_batch: Number of labels that the loss is divided by, for a batch of
                several parts; by default those of this batch.
            verify: True for the ranks to compare their plans first, as in `make_plan`.
            by_token: Other arguments of the model with an entry for each token along their second
                dimension, or their first for `[T]`; padded with zeros. In one row, position ids of
                a sequence follow each other: for transformers a jump begins another sequence.

        Yields:
            The arguments of the model: `[1, t]` each, with `position_ids`, and labels shifted.

        Raises:
            ConfigError: A batch within a batch, or attention or a mixer that is replaced by now;
                labels for a model whose loss is not a sum over them by its `loss_function`. In
                backward: it computes layers again, and the batch has ended.
            LayoutError: Offsets or shapes that do not fit, or heads that do not divide.
            UnsupportedError: A padding mask; sequences beyond the length up to which rotary
                embeddings depend on a token's position only.
            DivergenceError: With `verify`: the ranks made different plans.
        """
        self._check_unplugged()
        self._check_options(labels, by_token)
        offsets = _offsets_of(input_ids, cu_seqlens)
        self._check_positions(max((b - a for a, b in pairwise(offsets)), default=0))
        padded, source = self._padded(offsets)
        tensors = {"input_ids": input_ids, **by_token}
        fills: dict[str, int] = {"input_ids": self._padding_id()}
        if labels is not None:
            tensors["labels"] = _shifted(labels.reshape(1, -1), offsets)
            fills["labels"] = _NO_LABEL
            if num_items_in_batch is None:
                num_items_in_batch = (tensors["labels"] != _NO_LABEL).sum()
        is_row = input_ids.dim() == 1
        flat = {
            name: _one_row(name, x, offsets[-1], is_row=is_row and name != "labels")
            for name, x in tensors.items()
        }
        if "position_ids" in flat and (is_row or len(input_ids) == 1):
            _check_steps(flat["position_ids"], offsets)
        plans = self._make_plans(padded, self._specs(), verify=verify)
        own = source[plans[0].tokens.of_rank(self.rank)]
        local: dict[str, Any] = {n: _taken(x, own, fills.get(n, 0)) for n, x in flat.items()}
        if "position_ids" in self._parameters:
            local.setdefault("position_ids", plans[0].positions(input_ids.device)[None])
        if self._takes("use_cache"):
            local["use_cache"] = False
        self.plans = plans
        with (
            self._plugged(lambda spec: next(p for p in plans if spec in p.specs)),
            self._with_loss(self._loss_of(self.model.loss_function, num_items_in_batch)),
            self._refusing_late_backward(),
        ):
            yield local

    def sum_gradients(self) -> None:
        """Add up the gradients of the model's parameters over the ranks. Collective."""
        if self._collectives is None or self.size == 1:
            return
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self._collectives.all_reduce(grad)

    def describe(self) -> str:
        """The strategy of each mixer in the last batch, and why."""
        return "\n".join(plan.describe() for plan in self.plans)

    # -- what the model has -------------------------------------------------------------------

    def _find(self, check: bool) -> None:
        """Run a short text to find what moves, and compare it with the model's own forward."""
        model, training = self.model, [m for m in self.model.modules() if m.training]
        device = next(model.parameters()).device
        tokens = torch.arange(1, 1 + _NUM_TOKENS, device=device)
        embeddings: Any = model.get_input_embeddings()
        tokens = (tokens * 7 % embeddings.weight.shape[0])[None]
        places = torch.arange(_NUM_TOKENS, device=device)[None]

        def alone(spec: Spec) -> Plan:
            return plan_alone(spec, _NUM_TOKENS)

        def backwards(spec: Spec) -> Any:
            return BackwardsPlan(spec, _NUM_TOKENS)

        model.train(False)
        try:
            with torch.no_grad():
                with traced(model, _NUM_TOKENS) as wanted:
                    own = self._forward(tokens, None)
                with traced(model, _NUM_TOKENS) as found, self._plugged(alone, is_finding=True):
                    logits = self._forward(tokens, places)
                if not self._specs():
                    raise self._refused("no attention by name, and no mixer that is known")
                if check:
                    refuse_difference(model, wanted, found, (own, logits), "with its sockets")
                    with (
                        traced(model, _NUM_TOKENS, is_backwards=True) as turned,
                        self._plugged(backwards),
                    ):
                        logits = self._forward(tokens.flip(1), places.flip(1)).flip(1)
                    refuse_difference(
                        model, wanted, turned, (own, logits), "with tokens in another order"
                    )
                self._has_loss = self._sums_loss(tokens, places)
        finally:
            for module in training:
                module.training = True

    def _sums_loss(self, tokens: Tensor, places: Tensor) -> bool:
        """Whether the model's loss of shifted labels is a sum over them, over a number of items."""
        if "labels" not in self._parameters:
            return False
        # The label of the second token alone: a loss that shifts once more has none.
        labels = torch.full_like(tokens, _NO_LABEL)
        labels[0, 1] = tokens[0, 1]
        wanted = self._forward(tokens, None, name="loss", labels=labels)
        with self._with_loss(self._loss_of(self.model.loss_function, 2, is_whole=True)):
            shifted = _shifted(labels, (0, _NUM_TOKENS))
            found = 2 * self._forward(tokens, places, name="loss", labels=shifted)
        return bool(torch.isclose(found.float(), wanted.float(), rtol=1e-2))

    def _takes(self, name: str) -> bool:
        kinds = {parameter.kind for parameter in self._parameters.values()}
        return name in self._parameters or inspect.Parameter.VAR_KEYWORD in kinds

    def _forward(
        self, tokens: Tensor, places: Tensor | None, name: str = "logits", **others: Any
    ) -> Tensor:
        """`[1, n, ...]`: logits, or the hidden states of a model without a head; or the loss."""
        if self._takes("use_cache"):
            others["use_cache"] = False
        if places is not None and "position_ids" in self._parameters:
            others["position_ids"] = places
        output = self.model(input_ids=tokens, **others)
        found: Tensor = output[name] if name in output else output[0]
        return found

    def _specs(self) -> tuple[Spec, ...]:
        return (*self._attention.specs, *(m.spec for m in self._mixers if m.spec is not None))

    def _make_plans(
        self, offsets: tuple[int, ...], specs: Sequence[Spec], *, verify: bool = False
    ) -> tuple[Plan, ...]:
        """The plan of the recurrent mixers, and that of attention, which never sends states."""
        options: dict[str, Any] = {**self._options, "verify": verify}
        if not specs:
            return ()
        element_bytes = next(self.model.parameters()).dtype.itemsize
        widths = {mixer.hidden_dim for mixer in self._mixers}
        options |= {"element_bytes": element_bytes}
        recurrent = tuple(dict.fromkeys(spec for spec in specs if spec.state is not None))
        others = tuple(spec for spec in specs if spec.state is None)
        plans = []
        if recurrent:
            hidden_dim = widths.pop() if len(widths) == 1 else None
            plans.append(
                make_plan(
                    offsets,
                    self._group,
                    recurrent,
                    strategy=self._strategy,
                    hidden_dim=hidden_dim,
                    **options,
                )
            )
        if others:
            # Without a state, `state` is `heads`, or `gather` where they do not divide.
            exact = "state" if self._strategy in ("auto", "docs") else self._strategy
            plans.append(make_plan(offsets, self._group, others, strategy=exact, **options))
        return tuple(plans)

    # -- what is replaced within a batch ------------------------------------------------------

    @contextmanager
    def _plugged(
        self, plan_of: Callable[[Spec], Any], *, is_finding: bool = False
    ) -> Iterator[None]:
        self._is_running = True
        self._attention.plug(plan_of, is_finding=is_finding)
        for mixer in self._mixers:
            mixer.plug(plan_of)
        try:
            yield
        finally:
            for mixer in self._mixers:
                mixer.unplug()
            self._attention.unplug()
            self._is_running = False

    @contextmanager
    def _with_loss(self, loss: Callable[..., Tensor]) -> Iterator[None]:
        former = self.model.__dict__.get("_loss_function")
        self.model.loss_function = loss
        try:
            yield
        finally:
            del self.model.__dict__["_loss_function"]
            if former is not None:
                self.model.loss_function = former

    @contextmanager
    def _refusing_late_backward(self) -> Iterator[None]:
        """Have a backward that computes layers again raise once this batch has ended."""
        modules = self.model.modules() if self.model.training else ()
        if not any(getattr(module, "gradient_checkpointing", False) for module in modules):
            yield
            return
        is_open = [True]

        def check(grad: Tensor) -> None:
            if not is_open[0]:
                raise ConfigError(
                    f"context_parallel: backward of {type(self.model).__name__}",
                    found="layers that are computed again, after their batch has ended",
                    why="Their attention would see the tokens of this rank alone.",
                    fix="Call backward within `with cp.batch(...)`.",
                )

        def watch(module: nn.Module, args: Any, output: Any) -> None:
            values = output.values() if isinstance(output, dict) else output
            for value in values:
                if isinstance(value, Tensor) and value.requires_grad:
                    value.register_hook(check)

        handle = self.model.register_forward_hook(watch)
        try:
            yield
        finally:
            handle.remove()
            is_open[0] = False

    def _loss_of(
        self,
        compute: Callable[..., Tensor],
        num_items: int | Tensor | None,
        *,
        is_whole: bool = False,
    ) -> Callable[..., Tensor]:
        """The model's loss, of labels that are shifted already, summed over the ranks."""

        def loss(logits: Tensor, labels: Tensor, *args: Any, **asked: Any) -> Tensor:
            asked |= {"num_items_in_batch": num_items, "shift_labels": labels}
            part = compute(logits, labels, *args, **asked)
            if is_whole or self._collectives is None or self.size == 1:
                return part
            whole = self._collectives.all_reduce(part.detach().reshape(1))[0]
            # The value of all ranks, and the gradient of this one.
            return part + (whole - part.detach())

        return loss

    # -- arguments ----------------------------------------------------------------------------

    def _padded(self, offsets: tuple[int, ...]) -> tuple[tuple[int, ...], Tensor]:
        """Offsets with padding, and the place in the batch of each token, -1 for padding."""
        lengths = [b - a for a, b in pairwise(offsets)]
        longer = list(lengths)
        if self.size > 1 and self._options["layout"] == "zigzag":
            longer = [n + -n % (2 * self.size) for n in lengths]
        elif self.size > 1:
            longer[-1] += -offsets[-1] % self.size
        padded = tuple(accumulate(longer, initial=0))
        source = torch.full((padded[-1],), -1)
        for first, place, length in zip(offsets, padded, lengths, strict=False):
            source[place : place + length] = torch.arange(first, first + length)
        return padded, source

    def _padding_id(self) -> int:
        config = self.model.config.get_text_config()
        found = getattr(config, "pad_token_id", None)
        return found if isinstance(found, int) and found >= 0 else 0

    def _check_unplugged(self) -> None:
        """Refuse a model in which something else, or a batch, is plugged in."""
        name = next(
            (mixer.name for mixer in self._mixers if "forward" in mixer.module.__dict__), None
        )
        configs = self._attention._configs().values()
        if self._is_running or any(str(former).startswith("pcomm_cp_") for _, former in configs):
            found = "a batch within a batch"
        elif name is not None:
            found = f"the forward of {name} is replaced"
        else:
            return
        raise ConfigError(
            f"context_parallel: {type(self.model).__name__}",
            found=found,
            why="A batch puts the attention and the mixers of the model over ranks, and restores "
            "them at its end.",
            fix="Leave the other batch first, or take off what replaces the forward.",
        )

    def _check_options(self, labels: Tensor | None, by_token: dict[str, Tensor]) -> None:
        if "attention_mask" in by_token:
            raise UnsupportedError(
                "context_parallel: attention_mask",
                found="a mask of a batch with padding",
                why="Padding between sequences would travel, and be computed.",
                fix="Pass sequences without padding side by side, with their cu_seqlens.",
            )
        if labels is None:
            return
        config = self.model.config
        if getattr(config.get_text_config(), "output_router_logits", False):
            found = "output_router_logits=True, a loss of the balance of experts"
        elif not self._has_loss:
            found = "labels, and a loss that is no sum of its loss_function over shift_labels, "
            found += "divided by num_items_in_batch"
        else:
            return
        raise ConfigError(
            f"context_parallel: {type(self.model).__name__}",
            found=found,
            why="Of such a loss a rank has not the tokens of the others.",
            fix="Leave labels away and compute the loss from the logits of this rank's tokens; set "
            "output_router_logits=False.",
        )

    def _check_positions(self, longest: int) -> None:
        """Refuse sequences whose rotary embeddings depend on the longest one of a rank."""
        for module in self.model.modules():
            kinds = getattr(module, "rope_type", None)
            kinds = list(kinds.values()) if isinstance(kinds, dict) else [kinds]
            if not {"dynamic", "longrope"}.intersection(k for k in kinds if isinstance(k, str)):
                continue
            config: Any = getattr(module, "config", self.model.config)
            limit = getattr(config, "original_max_position_embeddings", None)
            limit = limit or getattr(module, "original_max_seq_len", config.max_position_embeddings)
            if longest > limit:
                raise UnsupportedError(
                    f"context_parallel: rotary embeddings {kinds}",
                    found=f"a sequence of {longest} tokens",
                    why=f"Beyond {limit} they depend on the longest sequence that a rank sees.",
                    fix="Use shorter sequences, or rotary embeddings of another type.",
                )

    def _refused(self, found: str) -> UnsupportedError:
        return UnsupportedError(
            f"context_parallel: {type(self.model).__name__}",
            found=found,
            why="Ranks exchange what attention and recurrences take.",
            fix="Call the operations of a plan in a forward of your own.",
        )


def _check_kind(model: nn.Module) -> None:
    try:
        from transformers import PreTrainedModel
    except ImportError as error:
        raise UnsupportedError(
            "context_parallel",
            found=f"no transformers ({error})",
            why="It splits the sequences of models of transformers.",
            fix="python3 -m pip install 'transformers>=5.23'",
        ) from error
    if isinstance(model, PreTrainedModel) and not model.config.is_encoder_decoder:
        return
    is_other = not isinstance(model, PreTrainedModel)
    raise ConfigError(
        f"context_parallel: {type(model).__name__}",
        found="no model of transformers" if is_other else "an encoder and a decoder",
        why="Attention is found through the interfaces of transformers, and tokens are those of "
        "one text.",
        fix="Pass the model itself and not a wrapper of it, or call the operations of a plan in "
        "layers of your own.",
    )


def _offsets_of(input_ids: Tensor, cu_seqlens: Sequence[int] | None) -> tuple[int, ...]:
    """The sequences of a batch in one row."""
    num_tokens = input_ids.numel()
    if cu_seqlens is None:
        length = input_ids.shape[-1]
        return tuple(range(0, num_tokens + 1, length)) if length else (0, 0)
    return pack_of(cu_seqlens, 1, "contiguous", num_tokens).cu_seqlens


def _one_row(name: str, x: Tensor, num_tokens: int, *, is_row: bool) -> Tensor:
    """`[T, ...]` of `[B, S, ...]`, or of `[T, ...]` if `is_row`."""
    flat = x if is_row or x.dim() < 2 else x.flatten(0, 1)
    if len(flat) != num_tokens:
        raise LayoutError(
            f"context_parallel: {name}",
            found=f"shape {tuple(x.shape)}",
            why=f"input_ids have {num_tokens} tokens, and so has everything that is split.",
            fix="Pass tensors with the rows and tokens of input_ids.",
        )
    return flat


def _check_steps(positions_T: Tensor, offsets: tuple[int, ...]) -> None:
    """Refuse positions of one row that jump where no sequence begins."""
    jumps = positions_T.diff() != 1
    begins = [first - 1 for first in offsets[1:-1] if 0 < first < offsets[-1]]
    jumps[begins] = False
    if bool(jumps.any()):
        place = int(jumps.nonzero()[0]) + 1
        raise LayoutError(
            "context_parallel: position_ids",
            found=f"{int(positions_T[place])} at token {place}, behind "
            f"{int(positions_T[place - 1])}, where no sequence begins",
            why="In one row transformers takes a jump for the beginning of another sequence, and "
            "ranks know sequences by cu_seqlens.",
            fix="Pass cu_seqlens with the offsets of all sequences.",
        )


def _shifted(labels: Tensor, offsets: tuple[int, ...]) -> Tensor:
    """The label of each token's successor; none for the last token of a sequence."""
    if labels.shape[1] != offsets[-1]:
        return labels
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=_NO_LABEL)
    last = [last - 1 for first, last in pairwise(offsets) if last > first]
    shifted[:, last] = _NO_LABEL
    return shifted


def _taken(x_T: Tensor, own: Tensor, fill: int) -> Tensor:
    """`[1, t, ...]`: this rank's tokens, and `fill` where there is none."""
    own = own.to(x_T.device)
    taken = x_T[own.clamp(min=0)]
    is_none = (own < 0).view(-1, *[1] * (x_T.dim() - 1))
    return taken.masked_fill(is_none, fill)[None]
