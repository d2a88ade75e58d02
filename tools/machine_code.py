"""What the machine code of a kernel says: its loops, loads on their way, divisions and products.

The text is nvdisasm's, of a kernel of Triton for Hopper or Blackwell. What is counted is what one
thread has asked of global memory and not yet waited for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["Instruction", "Reading", "instructions", "loops", "most_in_flight", "read_code"]

_LABEL = re.compile(r"^(\.L\w+|\$\S+):")
_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_NAMED = re.compile(r"`\((\S+?)\)")
_REGISTER = re.compile(r"\bR(\d+)(\.64)?\b")
# Memory to registers; those that a switch sums (LDGMC) too. And memory to shared memory.
_LOADS, _COPY = frozenset(("LDG", "LD", "LDGMC")), "LDGSTS"
_BULK = ("UTMALDG", "UBLKCP")
_PRODUCTS = re.compile(r"(?:H|I|Q|D|O)G?MMA|UTC\w*MMA")
_CLOCK = re.compile(r"SR_\w*(?:TIMER|CLOCK)")


@dataclass(frozen=True)
class Instruction:
    """An instruction of the kernel.

    Attributes:
        name: With its modifiers, `LDG.E.128`.
        operands: All of them as text.
        guard: Predicate under which it is executed, empty where it always is.
        target: Place of the instruction that it may go to, None where it goes to the next one.
    """

    name: str
    operands: str
    guard: str = ""
    target: int | None = None

    @property
    def kind(self) -> str:
        """The name without modifiers."""
        return self.name.partition(".")[0]

    @property
    def width(self) -> int:
        """Bytes that a thread loads by it."""
        summed = re.search(r"\.B?F(16|32)x(\d)", self.name)
        if summed:
            return int(summed[1]) * int(summed[2]) // 8
        narrow = re.search(r"\.[US](8|16)\b", self.name)
        wide = re.search(r"\.(64|128|256)\b", self.name)
        return int((narrow or wide or ["", "32"])[1]) // 8

    def registers(self) -> set[int]:
        """Numbers of the registers that it reads or writes."""
        of_data = 1
        if _PRODUCTS.fullmatch(self.kind) or self.width == 16:
            of_data = 4
        elif self.width >= 8:
            of_data = self.width // 4
        found: set[int] = set()
        for place, part in enumerate(re.split(r"[\[\]]", self.operands)):
            for number, pair in _REGISTER.findall(part):
                own = 2 if pair else 1 if place % 2 else of_data
                found.update(range(int(number), int(number) + own))
        return found


def instructions(text: str) -> list[Instruction]:
    """The instructions of the kernel, without the subroutines that stand behind it."""
    places: dict[str, int] = {}
    lines: list[re.Match[str]] = []
    for line in text.splitlines():
        label = _LABEL.match(line)
        if label and label[1].startswith("$"):
            break
        if label:
            places[label[1]] = len(lines)
        found = _LINE.search(line)
        if found:
            lines.append(found)
    made = []
    for guard, name, operands in (line.groups(default="") for line in lines):
        jump = _NAMED.search(operands) if name.startswith(("BRA", "WARPSYNC")) else None
        made.append(Instruction(name, operands, guard, places[jump[1]] if jump else None))
    return made


def loops(code: Sequence[Instruction]) -> list[list[int]]:
    """Places of the instructions of each loop, in their order.

    A jump back is one only to what each way to it has passed: compilers put rare pieces last.
    """
    ways = [_next(code, place) for place in range(len(code))]
    before: list[list[int]] = [[] for _ in code]
    for place, after in enumerate(ways):
        for one in after:
            before[one].append(place)
    # As bits: what each way from the begin to an instruction passes. Nothing leads to -1.
    passed = [1] + [-1] * (len(code) - 1)
    is_changed = True
    while is_changed:
        is_changed = False
        for place in range(1, len(code)):
            common = -1
            for one in before[place]:
                common &= passed[one]
            if common != -1 and common | 1 << place != passed[place]:
                passed[place] = common | 1 << place
                is_changed = True
    found: dict[int, set[int]] = {}
    for place, after in enumerate(ways):
        for head in after:
            if passed[place] == -1 or not passed[place] >> head & 1:
                continue
            body = found.setdefault(head, {head})
            waiting = [place]
            while waiting:
                one = waiting.pop()
                if one not in body:
                    body.add(one)
                    waiting += before[one]
    return [sorted(body) for body in found.values()]


def _next(code: Sequence[Instruction], place: int) -> list[int]:
    one = code[place]
    ends = one.kind in ("EXIT", "RET", "BRA") and not one.guard
    # A jump under a condition may have that among its operands.
    if one.kind == "BRA" and not one.operands.lstrip().startswith("`"):
        ends = False
    after = [] if one.target is None else [one.target]
    if not ends and place + 1 < len(code):
        after.append(place + 1)
    return [place for place in after if place < len(code)]


def most_in_flight(before: Iterable[Instruction], body: Iterable[Instruction]) -> Counter[int]:
    """Loads by their width in bytes, where most bytes are on their way in the body.

    Loads come in the order in which they were asked for. One is waited for where its register is
    named, and a copy to shared memory where its group is. No branch is taken.

    Args:
        before: What a thread executes first.
        body: What is counted.
    """
    pending: list[tuple[set[int], int]] = []
    groups: list[Counter[int]] = [Counter()]
    most: Counter[int] = Counter()
    for is_counted, part in ((False, before), (True, body)):
        for one in part:
            named = one.registers()
            waited = [place for place, (own, _) in enumerate(pending) if own & named]
            if waited:
                del pending[: waited[-1] + 1]
            if one.kind == "LDGDEPBAR":
                groups.append(Counter())
            elif one.name == "DEPBAR.LE" and one.operands.startswith("SB0,"):
                left = int(one.operands.split(",")[1], 16)
                groups = groups[-left - 1 :]
            elif one.kind == _COPY:
                groups[-1][one.width] += 1
            elif one.kind in _LOADS:
                pending.append((_written(one), one.width))
            elif one.kind in _BULK:
                raise ValueError(f"{one.name} does not say how many bytes it copies")
            if is_counted:
                now = Counter(width for _, width in pending)
                for group in groups:
                    now += group
                most = max(most, now, key=num_bytes)
    return most


def num_bytes(loads: Counter[int]) -> int:
    """Bytes of loads by their width."""
    return sum(width * number for width, number in loads.items())


def _written(load: Instruction) -> set[int]:
    first = _REGISTER.search(load.operands)
    if first is None:
        return set()
    return set(range(int(first[1]), int(first[1]) + max(1, load.width // 4)))


@dataclass(frozen=True)
class Reading:
    """What was read.

    Attributes:
        loads: Loads on their way by their width in bytes, in the loop that loads most at a time, or
            in the whole kernel where none loads.
        in_loop: Whether there is such a loop.
        divisions: What is divided in loops: "fp32", "int64".
        products: Instructions of tensor cores: "HGMMA".
    """

    loads: Counter[int] = field(default_factory=Counter)
    in_loop: bool = False
    divisions: tuple[str, ...] = ()
    products: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of a thread on their way."""
        return num_bytes(self.loads)


def read_code(text: str) -> Reading:
    """Read a kernel as nvdisasm prints it."""
    code = instructions(text)
    found = loops(code)
    waits = _waits(code, found)
    hot = _hot_loop(code, [[place for place in loop if place not in waits] for loop in found])
    if hot is None:
        loads = most_in_flight([], (one for place, one in enumerate(code) if place not in waits))
    else:
        body = [code[place] for place in hot]
        # The second time it has what it leaves on the way to itself.
        loads = most_in_flight([*code[: hot[0]], *body], body)
    repeated = {place for loop in found for place in loop}
    divisions = {_divided(code[place]) for place in repeated} - {""}
    products = {one.kind for one in code if _PRODUCTS.fullmatch(one.kind)}
    return Reading(loads, hot is not None, tuple(sorted(divisions)), tuple(sorted(products)))


def _waits(code: Sequence[Instruction], found: Sequence[Sequence[int]]) -> set[int]:
    """Places in loops that ask for the same again until another rank has written, or time is up."""
    timed = [set(loop) for loop in found if any(_CLOCK.search(code[n].operands) for n in loop)]
    inner = [one for one in timed if not any(two < one for two in timed)]
    return {place for loop in inner for place in loop}


def _hot_loop(code: Sequence[Instruction], found: Sequence[Sequence[int]]) -> Sequence[int] | None:
    """The loop that loads most, of those within which no other one loads."""

    def loaded(loop: Sequence[int]) -> int:
        return sum(code[n].width for n in loop if code[n].kind in {*_LOADS, _COPY})

    loading = [loop for loop in found if loaded(loop)]
    inner = [one for one in loading if not any(set(two) < set(one) for two in loading)]
    return max(inner, key=loaded, default=None)


def _divided(one: Instruction) -> str:
    """What an instruction is part of a division of; empty for others."""
    if one.kind == "CALL":
        called = re.search(r"_(?:div|rem)\w*?_([fsu])(\d+)", one.operands)
        return f"{'fp' if called[1] == 'f' else 'int'}{called[2]}" if called else ""
    # An estimate of the inverse of an integer.
    return "int32" if re.fullmatch(r"I2F(\.\w+)*\.RP", one.name) else ""
