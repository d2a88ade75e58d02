"""One replica group of a torchft job; `beside_torchft.py` starts several, with torchft's Python.

Prints a line for each attempt at a step: seconds on the monotonic clock, the step, 1 if it was
committed, and the number of replica groups that took part. Written against torchft-nightly
2026.10.26, after the loop of its example train_ddp.py.
"""

from __future__ import annotations

import argparse
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, ProcessGroupGloo


def main() -> None:
    """Train until the process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--collective-timeout", type=float, required=True)
    parser.add_argument("--heartbeat", type=float, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    arguments = parser.parse_args()
    if arguments.host != "localhost":
        # An address is a name that resolves everywhere.
        socket.sethostname(arguments.host)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = arguments.width
    blocks = [
        nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
        )
        for _ in range(arguments.layers)
    ]
    model = nn.Sequential(*blocks)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": plain.state_dict()}

    store = dist.TCPStore(arguments.host, 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=arguments.timeout)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=arguments.collective_timeout)),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        timeout=limit,
        quorum_timeout=limit,
        connect_timeout=limit,
        rank=0,
        world_size=1,
        store_addr=arguments.host,
        store_port=store.port,
        lighthouse_addr=arguments.lighthouse,
        replica_id=f"replica_{arguments.replica}",
        hostname=arguments.host,
        heartbeat_interval=timedelta(seconds=arguments.heartbeat),
    )
    wrapped = DistributedDataParallel(manager, model)
    random = torch.Generator().manual_seed(arguments.replica)
    while True:
        batch = torch.randn(arguments.rows, width, generator=random)
        # These two calls of the manager are what torchft.Optimizer does, which hides the answer.
        manager.start_quorum()
        plain.zero_grad()
        wrapped(batch).square().mean().backward()
        is_committed = manager.should_commit()
        if is_committed:
            plain.step()
        found = (time.monotonic(), manager.current_step(), int(is_committed))
        print(*found, manager.num_participants(), flush=True)


if __name__ == "__main__":
    main()
