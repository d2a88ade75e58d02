"""`pcomm serve`: a model behind an API that clients of OpenAI's speak."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pcomm.core.cli import what_to_install
from pcomm.core.errors import ConfigError, PeerError, UnsupportedError
from pcomm.core.process import logs
from pcomm.integration.commands.llm_options import (
    add_llm_options,
    begin_loading,
    load_aloud,
    print_summary,
)

__all__ = ["ServeCommand", "command"]


class ServeCommand:
    """Serves a model over HTTP until SIGTERM or Ctrl-C."""

    name = "serve"
    help = "Serve a model over HTTP, with OpenAI's API and a page to chat."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """`DIR`, the address, limits, and how the model is loaded."""
        add_llm_options(parser)
        parser.add_argument(
            "--host",
            default="127.0.0.1",
            metavar="ADDRESS",
            help="where it listens; 0.0.0.0: on every network of this machine",
        )
        parser.add_argument(
            "--port", type=int, default=8000, metavar="P", help="its port; 0: any that is free"
        )
        parser.add_argument(
            "--model-name",
            metavar="NAME",
            help="what clients call it; default: the last part of DIR",
        )
        parser.add_argument(
            "--api-key-file",
            type=Path,
            metavar="FILE",
            help="its first line is the key that clients show; default: none is asked for",
        )
        parser.add_argument(
            "--max-requests", type=int, default=64, metavar="N", help="most that run at once"
        )
        parser.add_argument(
            "--max-queued",
            type=int,
            default=256,
            metavar="N",
            help="most that wait; more are told to come later",
        )
        parser.add_argument(
            "--max-body-mib", type=int, default=4, metavar="N", help="largest request, in MiB"
        )
        parser.add_argument(
            "--shutdown-s",
            type=float,
            default=30.0,
            metavar="S",
            help="seconds that running requests have to end after SIGTERM",
        )
        parser.add_argument(
            "--restart",
            type=int,
            default=0,
            metavar="N",
            help="with --ranks: start them again when one dies, N times at most; then the server "
            "ends with exit code 75",
        )
        parser.add_argument(
            "--step-limit-s",
            type=float,
            default=60.0,
            metavar="S",
            help="/health fails when a step takes longer",
        )
        parser.add_argument(
            "--access-log",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="a line for each request on stderr, without its text; default: on",
        )
        parser.add_argument(
            "--tool-format",
            metavar="NAME",
            help="how the model calls functions: hermes or llama3; default: as its template says",
        )
        parser.add_argument(
            "--default-chat-template-kwargs",
            metavar="JSON",
            help="variables for the chat template, such as '{\"enable_thinking\": false}'; "
            "default: none",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Load, print the addresses, serve, and say how much was written.

        Returns:
            0 after an end that was asked for; 75 (`EX_TEMPFAIL`) if the model has failed, such as
            by the death of a rank, so that whoever has started the server starts it again.
        """
        key = _key(arguments.api_key_file)
        variables = _variables(arguments.default_chat_template_kwargs)
        begin_loading(arguments)
        try:
            from pcomm.integration.serve.app import create_app
            from pcomm.integration.serve.server import bind, listen, serve
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] == "pcomm":
                raise
            raise UnsupportedError(
                "pcomm serve",
                found=f"no package {error.name}",
                why="The server stands on FastAPI, uvicorn and prometheus-client.",
                fix="In a checkout run `python3 -m pip install "
                f"{what_to_install('pcomm-integration', 'serve')}`.",
            ) from error
        from pcomm.integration.serve.service import ServeSettings

        settings = ServeSettings(
            model_name=arguments.model_name or arguments.model.resolve().name,
            api_key=key,
            max_body_bytes=arguments.max_body_mib * 2**20,
            step_limit_s=arguments.step_limit_s,
            shutdown_s=arguments.shutdown_s,
            restarts=_restarts(arguments),
            tool_format=arguments.tool_format,
            chat_template_kwargs=variables,
        )
        # Before the model, so that an address in use is found at once.
        bound = bind(arguments.host, arguments.port)
        limits = {"max_requests": arguments.max_requests, "max_queued": arguments.max_queued}
        with bound, ExitStack() as opened:
            try:
                llm = opened.enter_context(load_aloud(arguments, **limits))
            except PeerError as error:
                logs.tell_error(error)
                return os.EX_TEMPFAIL
            served = create_app(llm, settings)
            url = listen(bound)
            print(f'OpenAI API {url}/v1, model "{settings.model_name}"')
            print(f"chat page  {url}/", flush=True)
            asked = "" if key is None else f"Clients show the key of {arguments.api_key_file}. "
            print(f"{asked}Ctrl-C ends the server.", file=sys.stderr)
            serve(served, bound, access_log=sys.stderr if arguments.access_log else None)
            print_summary(llm, arguments)
            loop = served.service.loop
            if loop.is_lost or (llm.failure and not loop.is_restarting):
                reason = loop.reason or llm.failure
                print(f"pcomm serve: the model has failed: {reason}", file=sys.stderr)
                return os.EX_TEMPFAIL
        return 0


def _restarts(arguments: argparse.Namespace) -> int:
    restarts: int = arguments.restart
    if restarts and arguments.ranks == 1:
        raise ConfigError(
            f"pcomm serve --restart {restarts}",
            found="a model on one process, the server's own",
            why="Only ranks can be started again by the server.",
            fix="Give --ranks N as well; or let systemd or the like start the server again at exit "
            "code 75.",
        )
    return restarts


def _variables(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        found = f"no JSON: {error}"
    if isinstance(found, dict):
        return found
    raise ConfigError(
        "pcomm serve --default-chat-template-kwargs",
        found=f"{found!s:.200}",
        why="The variables of a template have names.",
        fix="Give a JSON object, such as '{\"enable_thinking\": false}'.",
    )


def _key(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"pcomm serve --api-key-file {file}",
            found=f"{error}",
            why="The key is read from a file, since all users of a machine see command lines.",
            fix="Write the key into a file that only you can read.",
        ) from error
    key = lines[0].strip() if lines else ""
    if not key:
        raise ConfigError(
            f"pcomm serve --api-key-file {file}",
            found="an empty first line",
            why="Any client could show such a key.",
            fix="Write the key into the first line.",
        )
    return key


command = ServeCommand()
