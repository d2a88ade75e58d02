"""Hosts of their own on one machine: a network, a name, and an /etc/hosts for each rank."""

from __future__ import annotations

from pathlib import Path

from core_bench.rated_network import RatedNetwork

__all__ = ["ADDRESS", "on_host"]

ADDRESS = "10.77.0.1"
"""Address of host 0, the same from every host."""

# Debian's /etc/hosts gives the name of a host to loopback.
_AS_HOST = """\
hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"
"""


def on_host(network: RatedNetwork, number: int, folder: Path) -> list[str]:
    """Words to put before a command, so that it runs on the host of that number.

    Args:
        network: Its namespace `number` is the host's network.
        number: The host, from 0.
        folder: Folder for the host's /etc/hosts.
    """
    hosts = folder / f"hosts{number}"
    hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 host{number}\n")
    inside = ["nsenter", f"--net=/run/netns/{network.namespaces[number]}"]
    inside += ["unshare", "--mount", "--uts", "sh", "-c", _AS_HOST, "sh", f"host{number}"]
    return [*inside, str(hosts)]
