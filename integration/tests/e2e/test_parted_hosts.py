"""`pcomm train --resilient` on two hosts that reach the store, and not each other any more."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from core_bench.rated_network import obstacle
from core_support.hosts import on_host
from ntp_support.broken_hosts import hosts_of
from pcomm.core.testing.programs import PATIENCE_S, scaled_s, wait_until

PROGRAM = Path(__file__).with_name("held_train.py")
STORE, RANKS, STEPS, HELD_AT = 2, 4, 6, 3
KEYS = ("parallel.dp=2", "parallel.tp=2", "train.schedule=constant", f"train.steps={STEPS}")


@pytest.mark.soak
def test_one_of_two_parted_hosts_goes_on_to_the_end_and_the_other_commits_nothing(
    started, config_file, tmp_path
):
    if reason := obstacle():
        pytest.skip(f"no hosts of their own here: {reason}")
    out, logs = tmp_path / "run", [tmp_path / f"log-{rank}" for rank in range(RANKS)]
    overrides = [word for item in KEYS for word in ("--set", item)]
    words = ["train", "--resilient", "--config", config_file, "--out", out, *overrides]
    unset = ("GLOO_SOCKET_IFNAME", "RANK", "WORLD_SIZE", "LOCAL_RANK", "PCOMM_STORE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}

    def told() -> str:
        return "\n".join(f"{log.name}:\n{log.read_text()}" for log in logs)

    with hosts_of(STORE + 1, store_on=STORE) as hosts:
        ranks = []
        for rank, log in enumerate(logs):
            store = f"10.77.0.{STORE + 1}:{hosts.port}"
            own = ["--store", store, "--rank", rank, "--ranks", RANKS]
            # Two ranks on each host.
            place = on_host(hosts.network, rank // 2, tmp_path)
            command = [*place, sys.executable, PROGRAM, tmp_path, scaled_s(1.0), *words, *own]
            with log.open("w") as file:
                env = {**environment, "OMP_NUM_THREADS": "1"}
                ranks.append(started.start(*command, env=env, stdout=file, stderr=file))

        def all_are_held() -> bool:
            assert all(process.poll() is None for process in ranks), told()
            return all((tmp_path / f"held-{rank}").exists() for rank in range(RANKS))

        wait_until(all_are_held, f"{RANKS} ranks at the step")
        hosts.cut(1, 0)
        (tmp_path / "go").touch()
        for process in ranks:
            process.communicate(timeout=scaled_s(PATIENCE_S))
    # 75: the others went on without this rank. Which side goes on is for them to agree.
    codes = [process.returncode for process in ranks]
    assert codes in ([0, 0, 75, 75], [75, 75, 0, 0]), told()
    left = [rank for rank, code in enumerate(codes) if code == 0]
    committed = [
        [int(line) for line in (tmp_path / f"committed-{rank}").read_text().split()]
        for rank in range(RANKS)
    ]
    for rank, steps in enumerate(committed):
        assert steps == list(range(1, (STEPS if rank in left else HELD_AT) + 1)), told()
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    seen = [(row["step"], row["ranks"]) for row in rows if "loss" in row]
    counts = [RANKS] * HELD_AT + [len(left)] * (STEPS - HELD_AT)
    assert seen == list(zip(range(1, STEPS + 1), counts, strict=True))
