"""Limits of a JSON schema, checked before it is compiled: some short ones take minutes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal

from pcomm.core.errors import ConfigError

__all__ = ["LARGEST_MULTIPLE", "LONGEST_SCHEMA", "check_schema", "check_schema_length"]

LONGEST_SCHEMA = 64 * 1024
"""Most bytes of the text of a schema."""

LARGEST_MULTIPLE = 10_000
"""Largest common multiple of all `multipleOf` of a schema, in units of their last decimal digit."""


def check_schema_length(text: str) -> None:
    """Refuse the text of a schema that is too long. Local.

    Raises:
        ConfigError: It has more than `LONGEST_SCHEMA` bytes.
    """
    if (length := len(text.encode("utf-8", "surrogatepass"))) > LONGEST_SCHEMA:
        raise ConfigError(
            "SamplingParams: json_schema",
            found=f"{length} bytes",
            why="The time and the memory to compile a schema grow with it.",
            fix=f"Give a schema of at most {LONGEST_SCHEMA} bytes.",
        )


def check_schema(schema: object) -> None:
    """Refuse a schema whose numbers need too large an automaton. Local.

    A number is matched by an automaton with a state for each remainder. `allOf`, `$ref` and the
    other ways to combine schemas multiply those states, at most to the common multiple of all
    `multipleOf`; so one limit on that multiple bounds the compilation, whatever is combined.

    Args:
        schema: The schema, as `json.loads` gives it.

    Raises:
        ConfigError: The common multiple is above `LARGEST_MULTIPLE`.
    """
    multiples = sorted(set(_multiples(schema)))
    # The decimal digits count, as in llguidance: 99.991 has 99,991 remainders of 0.001.
    places = max((-int(one.as_tuple().exponent) for one in multiples), default=0)
    common = 1
    for one in multiples:
        common = math.lcm(common, int(one.scaleb(max(places, 0))))
        if common > LARGEST_MULTIPLE:
            raise ConfigError(
                "SamplingParams: json_schema",
                found=f"multipleOf {', '.join(f'{float(each):.10g}' for each in multiples[-5:])}",
                why="Each remainder is a state of the grammar, and several multipleOf multiply "
                "their states.",
                fix="Give multipleOf whose least common multiple, in units of the last decimal "
                f"digit, is at most {LARGEST_MULTIPLE}.",
            )


def _multiples(schema: object) -> Iterator[Decimal]:
    """The size of every number named `multipleOf`, at any depth; 0 is left to the compiler."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting.extend(part)
        elif isinstance(part, dict):
            waiting.extend(part.values())
            value = part.get("multipleOf")
            if not isinstance(value, int | float):
                continue
            number = abs(Decimal(repr(value + 0)).normalize())
            if number and number.is_finite():
                yield number
