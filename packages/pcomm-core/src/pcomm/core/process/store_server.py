"""`pcomm store`: the store of a job in a process of its own, which outlives the ranks."""

from __future__ import annotations

import argparse
import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING

from pcomm.core.errors import ConfigError

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["StoreCommand", "command", "open_store"]

# As torch has it.
_BACKLOG = 2048
_LOOK_S = 0.5


def open_store(host: str, port: int) -> dist.TCPStore:
    """A store that listens at one address of this machine, until it is deleted. Local.

    Torch's own listens on all networks, whichever host it is given.

    Args:
        host: Name or address; `0.0.0.0` or `::` for all networks of this machine.
        port: Port; 0 for any that is free, which `port` of the store tells.

    Raises:
        ConfigError: The address is not one of this machine, or is in use.
    """
    import torch.distributed as dist

    try:
        if not 0 <= port < 2**16:
            # The system may take the lower 16 bits of it for the port.
            raise OverflowError(f"{port} is no port")
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"a store at {host}:{port}",
            found=str(error),
            why="It listens there for the ranks of one job.",
            fix="Give a host that is a name or address of this machine, and a free port from 1 to "
            "65535: two jobs have two stores.",
        ) from error
    bound = listening.getsockname()
    return dist.TCPStore(
        _reached_at(bound[0]),
        bound[1],
        is_master=True,
        wait_for_workers=False,
        # From here on it is torch's.
        master_listen_fd=listening.detach(),
    )


def _reached_at(address: str) -> str:
    """An address at which this process reaches a socket of its own."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if not found.is_unspecified:
        return address
    return "::1" if found.version == 6 else "127.0.0.1"


class StoreCommand:
    """Keeps the store of one job until SIGTERM or Ctrl-C."""

    name = "store"
    help = (
        "Keep the store in which the ranks of one job meet that other launchers start and restart "
        "(`pcomm train --resilient --store HOST:PORT`). It asks for no password: let no other "
        "network reach it."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """`--port` and `--host`."""
        parser.add_argument(
            "--port",
            type=int,
            required=True,
            metavar="P",
            help="port at which it listens; 0: any that is free",
        )
        parser.add_argument(
            "--host",
            default="127.0.0.1",
            metavar="ADDRESS",
            help="name or address of this machine at which it listens; 0.0.0.0: on all networks",
        )
        parser.add_argument(
            "--with-parent",
            action="store_true",
            help="end when the process that started it has ended, even by SIGKILL: a batch script "
            "that is gone leaves no store behind (default: only by a signal)",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Print the address in one line, and wait for the signal.

        Returns:
            0 after SIGTERM or Ctrl-C, or after the parent with `--with-parent`.
        """
        parent = os.getppid()
        # Before torch starts threads, which take over what is blocked.
        ends = {signal.SIGTERM, signal.SIGINT}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)
        try:
            store = open_store(arguments.host, arguments.port)
            host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
            print(f"store at {host}:{store.port}, without a password", flush=True)
            if arguments.with_parent:
                threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
            number = signal.sigwait(ends)
            print(f"the store ends by {signal.Signals(number).name}", file=sys.stderr)
            del store
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return 0


def _end_after(parent: int) -> None:
    """Send SIGTERM to this process once its parent is another one."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)


command = StoreCommand()
