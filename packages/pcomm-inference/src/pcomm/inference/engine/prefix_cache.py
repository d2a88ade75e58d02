"""What was computed of prompts and texts, as a tree that new requests begin from."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from pcomm.inference.engine.pools import BlockManager, StateSlots

__all__ = ["EvictionQueue", "PrefixCache", "PrefixHit", "extend_hashes"]


@dataclass(frozen=True)
class PrefixHit:
    """What the cache has of the tokens of a request.

    Attributes:
        num_tokens: Number of tokens that need not be computed.
        blocks: Blocks of those tokens.
        snapshot: State slot with a copy of the state behind them; 0 for none.
        num_known: Number of tokens up to where another request had the same ones, which is more
            than `num_tokens` where there is no snapshot.
    """

    num_tokens: int = 0
    blocks: tuple[int, ...] = ()
    snapshot: int = 0
    num_known: int = 0


class PrefixCache:
    """A tree of blocks by their chained hashes; nodes may have a snapshot of recurrent states.

    A request can begin at a node if all blocks up to it are there and, for a model with states, a
    snapshot at exactly that token. Blocks and snapshots stay in their pools, and are given up when
    requests need the place.

    Args:
        blocks: The pool of KV blocks.
        slots: The pool of state slots.
        block_size: Tokens of a block.
        bytes_per_block: Size of a block; 0 for a model without keys and values.
        bytes_per_slot: Size of a snapshot; 0 for a model without states.
    """

    def __init__(
        self,
        blocks: BlockManager,
        slots: StateSlots,
        *,
        block_size: int,
        bytes_per_block: int,
        bytes_per_slot: int,
    ) -> None:
        self._blocks = blocks
        self._slots = slots
        self._block_size = block_size
        self._bytes_per_block = bytes_per_block
        self._bytes_per_slot = bytes_per_slot
        self._nodes: dict[bytes, _Node] = {}
        self._of_block: dict[int, _Node] = {}
        self._idle_blocks = EvictionQueue(self._is_idle_leaf)
        self._snapshots = EvictionQueue(_has_snapshot)

    def find(self, hashes: Sequence[bytes]) -> PrefixHit:
        """The longest cached prefix of a request.

        Args:
            hashes: Hashes of the full blocks of the request that may come from the cache.
        """
        path: list[_Node] = []
        for digest in hashes:
            if (node := self._nodes.get(digest)) is None:
                break
            path.append(node)
        known = len(path) * self._block_size
        if self._bytes_per_slot:
            while path and not path[-1].snapshot:
                path.pop()
        if not path:
            return PrefixHit(num_known=known)
        blocks = tuple(node.block for node in path) if self._bytes_per_block else ()
        return PrefixHit(path[-1].num_tokens, blocks, path[-1].snapshot, known)

    def note_use(self, digest: bytes) -> None:
        """Note that a request begins from the node of a hash, so that its snapshot is kept."""
        if (node := self._nodes[digest]).snapshot:
            self._enter_snapshot(node)

    def publish_block(self, hashes: Sequence[bytes], number: int, block: int) -> bool:
        """Offer a block, once its keys and values are written.

        Args:
            hashes: Hash of the block before it, unless it is the first one, then its own.
            number: Number of blocks up to this one.
            block: The block.

        Returns:
            False if the cache does not have the block before it, so that it cannot keep this one.
        """
        parent = self._nodes.get(hashes[0]) if number > 1 else None
        if number > 1 and parent is None:
            return False
        if hashes[-1] not in self._nodes:
            node = self._add(hashes[-1], parent, number * self._block_size)
            node.block = block
            self._of_block[block] = node
            self._blocks.publish(block)
        return True

    def wants_snapshot(self, digest: bytes) -> bool:
        """Whether a snapshot behind the block of a hash would be new and could be found."""
        node = self._nodes.get(digest)
        return not node.snapshot if node else not self._bytes_per_block

    def publish_snapshot(self, hashes: Sequence[bytes], slot: int) -> None:
        """Take over a slot with a copy of the state behind the last of some hashes.

        Call it after `publish_block` of the same hashes, if `wants_snapshot` says so.
        """
        parent: _Node | None = None
        for number, digest in enumerate(hashes, start=1):
            node = self._nodes.get(digest)
            parent = node or self._add(digest, parent, number * self._block_size)
        assert parent is not None
        parent.snapshot = slot
        self._slots.to_cache()
        self._enter_snapshot(parent)

    def withdraw(self, hashes: Sequence[bytes]) -> None:
        """Forget the nodes of some hashes, from the last one up.

        Nodes with children stay; they are removed with their last child.
        """
        for digest in reversed(hashes):
            node = self._nodes.get(digest)
            if node is not None and node.children:
                return
            if node is not None:
                self._remove(node)

    def note_idle(self, block: int) -> None:
        """Note that no request refers to a published block any more."""
        node = self._of_block[block]
        node.idle_since = self._idle_blocks.use()
        self._enter_block(node)

    def free_blocks(self, count: int) -> None:
        """Give up `count` cached blocks; there have to be as many."""
        target = self._blocks.num_free + count
        while self._blocks.num_free < target:
            node = self._idle_blocks.pop()
            if node is None:
                # Blocks that are in use stand behind all idle ones: they leave the tree, too.
                idle = (n for n in self._nodes.values() if self._blocks.is_cached(n.block))
                node = next(idle)
            self._remove_with_all_below(node)

    def free_snapshot(self, *, keep: int = 0) -> bool:
        """Give up the snapshot that is worth least; False if there is none but `keep`."""
        kept: _Node | None = None
        node = self._snapshots.pop()
        if node is not None and node.snapshot == keep:
            kept, node = node, self._snapshots.pop()
        if kept is not None:
            self._enter_snapshot(kept)
        if node is None:
            return False
        self._drop_snapshot(node)
        return True

    def clear(self) -> None:
        """Forget everything."""
        for node in [n for n in self._nodes.values() if n.parent is None]:
            self._remove_with_all_below(node)

    def _add(self, digest: bytes, parent: _Node | None, num_tokens: int) -> _Node:
        node = self._nodes[digest] = _Node(digest, parent, num_tokens)
        if parent is not None:
            parent.children[digest] = node
        return node

    def _remove_with_all_below(self, node: _Node) -> None:
        found = [node]
        for above in found:
            found += above.children.values()
        # Children first.
        for below in reversed(found):
            if below.digest in self._nodes:
                self._remove(below)

    def _remove(self, node: _Node) -> None:
        """Take a node without children out of the tree, and parents that are of no use alone."""
        while True:
            del self._nodes[node.digest]
            if node.snapshot:
                self._slots.from_cache(node.snapshot)
                node.snapshot = 0
            if node.block:
                del self._of_block[node.block]
                self._blocks.unpublish(node.block)
                node.block = 0
            parent = node.parent
            if parent is None:
                return
            del parent.children[node.digest]
            if parent.block:
                self._enter_block(parent)
                return
            if parent.children or parent.snapshot:
                return
            node = parent

    def _drop_snapshot(self, node: _Node) -> None:
        self._slots.from_cache(node.snapshot)
        node.snapshot = 0
        if node.block:
            self._enter_block(node)
        elif not node.children:
            self._remove(node)

    def _enter_block(self, node: _Node) -> None:
        if not node.children and self._blocks.is_cached(node.block):
            worth = self._worth(node)
            node.serials[_BLOCK] = self._idle_blocks.put(node, worth, node.idle_since)

    def _enter_snapshot(self, node: _Node) -> None:
        worth, now = self._worth(node), self._snapshots.use()
        node.serials[_SNAPSHOT] = self._snapshots.put(node, worth, now)

    def _is_idle_leaf(self, node: _Node, serial: int) -> bool:
        is_newest = serial == node.serials[_BLOCK] and not node.children
        return is_newest and bool(node.block) and self._blocks.is_cached(node.block)

    def _worth(self, node: _Node) -> float:
        """Tokens that would be computed again without a leaf, for each byte that it occupies."""
        if not self._bytes_per_slot:
            return self._block_size / self._bytes_per_block
        if not node.snapshot:
            return 0.0
        before = node.parent
        while before is not None and not before.snapshot:
            before = before.parent
        saved = node.num_tokens - (before.num_tokens if before else 0)
        return saved / (self._bytes_per_slot + saved // self._block_size * self._bytes_per_block)


def _has_snapshot(node: _Node, serial: int) -> bool:
    return bool(node.snapshot) and serial == node.serials[_SNAPSHOT]


_BLOCK, _SNAPSHOT = 0, 1


@dataclass(slots=True, eq=False)
class _Node:
    """A block of tokens behind those of its parents.

    `serials` are the numbers of its newest entries in the two queues of what may be given up, and
    `idle_since` says when no request referred to its block any more.
    """

    digest: bytes
    parent: _Node | None
    num_tokens: int
    children: dict[bytes, _Node] = field(default_factory=dict)
    block: int = 0
    snapshot: int = 0
    serials: list[int] = field(default_factory=lambda: [0, 0])
    idle_since: Use = (0.0, 0)


def extend_hashes(hashes: list[bytes], tokens: array[int], *, block_size: int, count: int) -> None:
    """Append the hashes of full blocks until there are `count`.

    A hash takes in the one before it, so two requests with equal hashes have equal tokens up to
    there; 16 bytes of BLAKE2 have no collisions that could be found.

    Args:
        hashes: Hashes of the first blocks, extended in place.
        tokens: Tokens of the request, at least `count` blocks.
        block_size: Tokens of a block.
        count: Number of hashes that are wanted.
    """
    for number in range(len(hashes), count):
        before = hashes[-1] if hashes else b""
        content = tokens[number * block_size : (number + 1) * block_size].tobytes()
        hashes.append(blake2b(before + content, digest_size=16).digest())


Entry = TypeVar("Entry")
Use = tuple[float, int]
_LEAST_LENGTH = 64


class EvictionQueue(Generic[Entry]):
    """Entries by their credit, the least first (the rule GreedyDual-Size).

    The credit of an entry is its worth, saved work per byte, plus the credit of what was given up
    last before it was used last. Old entries so lose to new ones, the sooner the less they are
    worth; with equal worth it is the order of last use.

    Args:
        is_current: Function of an entry and a number; true if the entry may be given up and the
            number is that of its newest `put`.
    """

    def __init__(self, is_current: Callable[[Entry, int], bool]) -> None:
        self._is_current = is_current
        self._heap: list[tuple[float, int, int, Entry]] = []
        self._spent = 0.0
        self._uses = self._number = 0
        self._most = _LEAST_LENGTH

    def use(self) -> Use:
        """Note that something is used now; `put` takes the result, now or later."""
        self._uses += 1
        return self._spent, self._uses

    def put(self, entry: Entry, worth: float, last_use: Use) -> int:
        """Enter something, and return the number of this entry; older ones of it lapse.

        Args:
            entry: Thing that may be given up.
            worth: Saved work per byte.
            last_use: Result of `use` when it was used last.
        """
        self._number += 1
        credit, order = last_use
        heappush(self._heap, (credit + worth, order, self._number, entry))
        if len(self._heap) > self._most:
            # The new one is current only when its owner has noted the number.
            self._heap = [
                item
                for item in self._heap
                if item[2] == self._number or self._is_current(item[3], item[2])
            ]
            heapify(self._heap)
            self._most = max(_LEAST_LENGTH, 2 * len(self._heap))
        return self._number

    def pop(self) -> Entry | None:
        """Take out the entry of least credit; None if there is none."""
        while self._heap:
            credit, _, number, entry = heappop(self._heap)
            if self._is_current(entry, number):
                self._spent = max(self._spent, credit)
                return entry
        return None
