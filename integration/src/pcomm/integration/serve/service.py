"""One model behind HTTP, and the settings it is served with."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request as HttpRequest
from fastapi import Response
from fastapi.responses import JSONResponse

from pcomm.core.errors import ClosedError, ConfigError, PcommError, UnsupportedError
from pcomm.inference import Request, SamplingParams
from pcomm.inference.engine import EngineStats
from pcomm.inference.sampling import GrammarCompiler
from pcomm.integration.huggingface.chat_template import check_variables
from pcomm.integration.llm import LLM
from pcomm.integration.serve.api_error import ApiError, unavailable
from pcomm.integration.serve.grammar_pool import GrammarPool
from pcomm.integration.serve.output_streams import (
    EventStream,
    OutputStreams,
    unless_gone,
    whole_answer,
)
from pcomm.integration.serve.prometheus import Metrics, ServerState
from pcomm.integration.serve.request_bodies import (
    MOST_CHOICES,
    ChatRequest,
    CompletionRequest,
    RequestFields,
)
from pcomm.integration.serve.response_bodies import (
    ChatReply,
    CompletionReply,
    PromptEcho,
    Reply,
    TokenTexts,
    Usage,
)
from pcomm.integration.serve.sampling import (
    chat_params,
    check_model,
    check_prompt_ids,
    completion_params,
    request_grammar,
    room_for,
)
from pcomm.integration.serve.step_loop import StepLoop
from pcomm.integration.serve.tools.call_format import call_format
from pcomm.integration.serve.tools.tool_use import ToolUse, plain_messages, portable

__all__ = ["ServeSettings", "Service"]

# How long a scrape of the metrics waits for a step, before it shows the numbers of the last one.
_STATS_S = 2.0


class Service:
    """The model, its step loop and the streams of its clients; used in one event loop.

    Args:
        llm: The model; nothing else may use it until the service is stopped.
        settings: Limits of the server, and its name and key for clients.
        clock: Seconds that only grow, for `health`.

    Attributes:
        is_draining: Whether the requests under way are the last ones.
        under_way: Number of HTTP requests that have no answer yet.
    """

    def __init__(
        self, llm: LLM, settings: ServeSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings, self._llm = settings, llm
        self.is_draining, self.under_way = False, 0
        self.metrics = Metrics(settings.model_name, self._state)
        self.streams = OutputStreams(settings.max_unread_tokens)
        self.loop = StepLoop(
            llm.engine,
            self.streams.deliver,
            observer=self.metrics,
            clock=clock,
            restarts=settings.restarts,
            restart_pause_s=settings.restart_pause_s,
        )
        self._call_format = call_format(llm.loaded.chat_template.tool_source, settings.tool_format)
        self._texts = TokenTexts(llm.loaded.tokenizer.to_json())
        self.grammars = GrammarPool(
            GrammarCompiler(llm.loaded.tokenizer, llm.loaded.vocabulary),
            max_compiling=settings.max_compiling,
            max_waiting=settings.max_waiting_grammars,
            limit_s=settings.grammar_limit_s,
        )

    async def start(self) -> None:
        """Start the step loop; called in the event loop that serves."""
        await self.grammars.load()
        self.streams.bind(self.loop)
        self.loop.start()

    def drain(self) -> None:
        """Take no more requests; those under way go on."""
        self.is_draining = True

    def refusal(self) -> ApiError | None:
        """The answer to a request that comes now and cannot be taken; None if it can."""
        if self.is_draining:
            self.metrics.refused(is_draining=True)
            message = "This server is being stopped. Send the request again, to another one."
            # The connection is of no more use: a balancer makes its next one elsewhere.
            return unavailable(message, Connection="close")
        if self._failure():
            self.metrics.refused(is_draining=False)
            return unavailable("The model of this server has failed. Send the request again later.")
        return None

    async def stop(self) -> None:
        """End all requests and the step loop."""
        self.drain()
        self.end_requests()
        await asyncio.to_thread(self.loop.close, self.settings.shutdown_s)

    def end_requests(self) -> None:
        """Tell every client that the server stops, and free the memory of its requests."""
        error = ClosedError(
            "the request",
            found="a server that is being stopped",
            why="It did not end within the limit for that.",
            fix="Send it again once the server is back.",
        )
        self.grammars.fail_all(error)
        self.streams.fail_all(error)

    async def complete(self, body: CompletionRequest, http: HttpRequest) -> Response:
        """Answer `/v1/completions`."""
        check_model(body, self.settings.model_name)
        prompts = body.prompts()
        self._check_texts(len(prompts), body)
        grammar = request_grammar(body)
        work = asyncio.to_thread(self._encode, prompts)
        ids = await unless_gone(http.receive, work)
        defaults = self._llm.defaults
        rooms = [self._room(one, "prompt") for one in ids]
        params = [completion_params(body, room, grammar, defaults) for room in rooms]
        answer_id = f"cmpl-{uuid.uuid4().hex}"
        echoes = self._echoes(prompts, ids, body) if body.echo else []
        envelope = self._envelope(body, sum(map(len, params)), body.logprobs is not None)
        reply = CompletionReply(answer_id, echoes=echoes, **envelope)
        usage = Usage([len(one) for one in ids], has_text=body.max_tokens != 0)
        return await self._answer(answer_id, ids, params, body, reply, usage, grammar.param, http)

    async def chat(self, body: ChatRequest, http: HttpRequest) -> Response:
        """Answer `/v1/chat/completions`."""
        check_model(body, self.settings.model_name)
        self._check_texts(1, body)
        loaded = self._llm.loaded
        tools = ToolUse(body, self._call_format)
        grammar = request_grammar(body, tools)
        given = body.chat_template_kwargs or {}
        _check_given(given)
        messages = plain_messages(body.messages)
        variables = {**self.settings.chat_template_kwargs, **given}
        work = asyncio.to_thread(loaded.chat_ids, messages, tools.descriptions, variables)
        try:
            ids = await unless_gone(http.receive, work)
        except ConfigError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_value") from error
        room, defaults = self._room(ids, "messages"), self._llm.defaults
        params = chat_params(body, room, grammar, loaded.chat_stop, defaults)
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        envelope = self._envelope(body, len(params), bool(body.logprobs))
        reply, usage = ChatReply(answer_id, reader=tools.reader, **envelope), Usage([len(ids)])
        return await self._answer(
            answer_id, [ids], [params], body, reply, usage, grammar.param, http
        )

    async def metrics_text(self) -> bytes:
        """The metrics; those of the last scrape of the engine while a step does not return."""
        try:
            asked = asyncio.wrap_future(self.loop.call(self.engine_stats))
            return self.metrics.text(await asyncio.wait_for(asked, _STATS_S))
        except (TimeoutError, PcommError):
            if self._failure():
                self.metrics.forget_engine()
            return self.metrics.text(None)

    def engine_stats(self) -> EngineStats:
        """State of the engine; called by the thread of the step loop alone."""
        return self._llm.stats()

    @property
    def implementation(self) -> str:
        """What computes the model, see `LLM.implementation`."""
        return self._llm.implementation

    def health(self) -> tuple[bool, str]:
        """Whether requests are answered, and why not."""
        if failure := self._failure():
            return False, failure
        if not self.loop.is_alive:
            return False, "the step loop does not run"
        if (busy_s := self.loop.busy_s) > self.settings.step_limit_s:
            return False, f"a step has not returned for {busy_s:.0f} s"
        return True, "ok"

    def readiness(self) -> tuple[bool, str]:
        """Whether requests are taken, and why not."""
        return (False, "draining") if self.is_draining else self.health()

    def _failure(self) -> str:
        """What the loop has failed with, or will when it looks."""
        return self.loop.reason or self._llm.failure

    def _state(self) -> ServerState:
        is_ready, _ = self.readiness()
        return ServerState(is_ready, self.is_draining, self.under_way, self.loop.num_restarts)

    async def _answer(
        self,
        answer_id: str,
        prompts: Sequence[Sequence[int]],
        params: Sequence[Sequence[SamplingParams]],
        body: RequestFields,
        reply: Reply,
        usage: Usage,
        grammar_param: str | None,
        http: HttpRequest,
    ) -> Response:
        pairs = [
            (tuple(ids), one) for ids, each in zip(prompts, params, strict=True) for one in each
        ]
        # All texts of one HTTP request have the same grammar.
        try:
            grammar = await unless_gone(http.receive, self.grammars.compile(pairs[0][1]))
        except (ConfigError, UnsupportedError) as error:
            raise ApiError(400, str(error), param=grammar_param, code="invalid_value") from error
        requests = [
            Request(f"{answer_id}-{place}", ids, one, grammar=grammar)
            for place, (ids, one) in enumerate(pairs)
        ]
        # For the access log.
        http.state.usage, http.state.request_id = usage, answer_id
        stream = self.streams.open(requests)
        try:
            await unless_gone(http.receive, stream.submit())
            if not body.stream:
                work = whole_answer(stream, reply, usage, len(requests))
                answer = JSONResponse(await unless_gone(http.receive, work))
                stream.close()
                return answer
        except BaseException:
            stream.close()
            raise
        # From here on it belongs to the answer.
        return EventStream(
            stream,
            reply,
            usage,
            has_usage=_wants_usage(body),
            write_timeout_s=self.settings.write_timeout_s,
        )

    def _check_texts(self, num_prompts: int, body: RequestFields) -> None:
        # All texts of a request enter the queue together, so that more never find room.
        most = min(MOST_CHOICES, self._llm.max_queued)
        if num_prompts * (body.n or 1) > most:
            raise ApiError(
                400,
                f"At most {most} texts are written for one request: prompts times n.",
                param="n",
                code="invalid_value",
            )

    def _encode(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        loaded, ids = self._llm.loaded, list[list[int]]()
        for prompt in prompts:
            if isinstance(prompt, str):
                try:
                    ids.append(loaded.prompt_ids(prompt))
                except ConfigError as error:
                    raise ApiError(400, str(error), param="prompt", code="invalid_value") from error
            else:
                check_prompt_ids(prompt, loaded.vocabulary)
                ids.append(prompt)
        return ids

    def _echoes(
        self, prompts: Sequence[str | list[int]], ids: Sequence[list[int]], body: CompletionRequest
    ) -> list[PromptEcho]:
        """What stands before each text: its prompt as it was sent, or the text of its ids."""
        decode = self._llm.loaded.tokenizer.decode
        return [
            PromptEcho(text, tokens, is_alone=body.max_tokens == 0)
            for prompt, tokens in zip(prompts, ids, strict=True)
            for text in [prompt if isinstance(prompt, str) else decode(tokens)] * (body.n or 1)
        ]

    def _room(self, prompt: Sequence[int], param: str) -> int:
        return room_for(prompt, self._llm.max_model_len, param)

    def _envelope(self, body: RequestFields, num_texts: int, has_logprobs: bool) -> dict[str, Any]:
        return {
            "model": self.settings.model_name,
            "texts": self._texts,
            "num_texts": num_texts,
            "has_usage": _wants_usage(body),
            "has_logprobs": has_logprobs,
        }


def _check_given(variables: Mapping[str, Any]) -> None:
    param = "chat_template_kwargs"
    portable(variables, param)
    try:
        check_variables(variables)
    except ConfigError as error:
        raise ApiError(400, str(error), param=param, code="invalid_value") from error


def _wants_usage(body: RequestFields) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Limits of a server.

    Attributes:
        model_name: Name that clients give as `model`.
        api_key: Key that clients show for `/v1`, of printable ASCII; None for none.
        max_body_bytes: Most bytes of the body of a request.
        max_unread_tokens: Most tokens of a request that wait for a client which does not read.
        write_timeout_s: Seconds that such a client may leave one part unread.
        max_compiling: Most grammars that are compiled at once.
        max_waiting_grammars: Most others that wait for that; more are 429.
        grammar_limit_s: Seconds after which a request is refused whose grammar is not compiled.
        step_limit_s: Seconds after which a step that has not returned makes `/health` fail.
        shutdown_s: Seconds that running requests have to end after SIGTERM.
        restarts: How often the ranks of a model are started again after one has died; 0 for never.
        restart_pause_s: Seconds before the second restart; each further one waits twice as long.
        tool_format: How the model writes calls of functions, a key of `CALL_FORMATS`; None for
            what its chat template says.
        chat_template_kwargs: Variables for the chat template; those of a request go before them.
    """

    model_name: str
    api_key: str | None = None
    max_body_bytes: int = 4 * 1024 * 1024
    max_unread_tokens: int = 4096
    write_timeout_s: float = 60.0
    max_compiling: int = 2
    max_waiting_grammars: int = 64
    grammar_limit_s: float = 60.0
    step_limit_s: float = 60.0
    shutdown_s: float = 30.0
    restarts: int = 0
    restart_pause_s: float = 1.0
    tool_format: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_variables(self.chat_template_kwargs)
        # Before the model is loaded, so that a name which means nothing is found at once.
        call_format("", self.tool_format)
        for name in (
            "max_body_bytes",
            "max_unread_tokens",
            "write_timeout_s",
            "max_compiling",
            "max_waiting_grammars",
            "grammar_limit_s",
            "step_limit_s",
            "shutdown_s",
            "restart_pause_s",
        ):
            # Written so that NaN, which compares as false, is refused.
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"ServeSettings: {name}",
                    found=f"{getattr(self, name)!r}",
                    why="It is a limit, and nothing would pass it.",
                    fix="Give a number above 0.",
                )
        if self.restarts < 0:
            raise ConfigError(
                "ServeSettings: restarts",
                found=f"{self.restarts!r}",
                why="It is how often ranks are started again.",
                fix="Give 0 or more.",
            )
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError(
                "ServeSettings: api_key",
                found="an empty key",
                why="Any client could show it.",
                fix="Give a key, or None for a server that asks for none.",
            )
        # A header has no other characters that each client and server read alike.
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError(
                "ServeSettings: api_key",
                found="a key with characters outside printable ASCII",
                why="Clients send the key in an HTTP header, where such characters do not arrive "
                "as they are.",
                fix="Give a key of letters, digits and signs of ASCII.",
            )
