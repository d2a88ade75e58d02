"""The store in which members of a gloo communicator find each other, with a limit on its waits."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

__all__ = ["ConnectingStore"]


class ConnectingStore(dist.Store):
    """Passes every call on to `store`; until `lift`, no wait is longer than `limit_s` seconds.

    Gloo waits in the store for the address of each member, as long as an operation may take: half
    an hour unless the group says otherwise. A shorter limit of the communicator itself would stay
    with its sends and receives, which torch offers no way to change.

    A communicator refers to this object without keeping it alive, so its owner does.

    Args:
        store: Store that the members share.
        limit_s: Longest wait, in seconds.

    Attributes:
        timed_out_s: Seconds of a wait that ended without its keys; None if there was none.
    """

    def __init__(self, store: dist.Store, limit_s: float) -> None:
        super().__init__()
        self._store, self._limit_s = store, limit_s
        self.timed_out_s: float | None = None

    def lift(self) -> None:
        """Let waits be as long as their caller says. Local."""
        self._limit_s = float("inf")

    # Torch calls these by name and place. It gives values as bytes.

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until the keys are there."""
        if timeout is None:
            return self._store.wait(keys)
        limit_s = min(self._limit_s, timeout.total_seconds())
        try:
            return self._store.wait(keys, timedelta(seconds=limit_s))
        except RuntimeError:
            self.timed_out_s = limit_s
            raise

    def set(self, key: str, value: str) -> None:
        """Pass on."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Pass on."""
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        """Pass on."""
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Pass on."""
        return self._store.check(keys)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Pass on."""
        return self._store.compare_set(key, expected_value, desired_value)

    def deleteKey(self, key: str) -> bool:
        """Pass on."""
        return self._store.delete_key(key)

    def getNumKeys(self) -> int:
        """Pass on."""
        return self._store.num_keys()
