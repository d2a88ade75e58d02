"""Which models of transformers run with which package: tests beside the committed outcomes.

The page docs/reference/works-with.md is made of `works_with.json`. Every run of the tests compares
some models of each package with it, the long form compares all of them, and with
RECORD_WORKS_WITH=1 in the environment what they find is written there instead.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pcomm.core.errors import PcommError

__all__ = ["check_outcome", "committed", "models", "outcome"]

T = TypeVar("T")

_FILE = Path(__file__).with_name("works_with.json")
# What the page says of an error whose first line has these words; the first that are found.
_REASONS = {
    r"attention of its own|no (call of )?attention by name": "attention that is not looked up by "
    "a name",
    r"\bindices\b": "attention to chosen tokens",
    r"position_bias": "a position bias",
    r"queries and keys of shapes": "more keys than tokens",
    r"a mask (of|that)": "a mask of its own",
    r"cache of its own": "a cache of its own",
    r"no position_ids|differ is '[^']*\.(embed_positions|position_embeddings)'": "positions that "
    "cannot be given",
    r"its logits are others|logits that are .* apart": "a layer that mixes tokens in a way that is "
    "not known",
    r"no tp_plan": "no tensor-parallel plan",
    r"beside it, which the plan leaves out": "parameters that the plan leaves out",
    r"experts.*columns beside it": "experts that the plan splits in another way",
}


def committed(package: str) -> Mapping[str, str]:
    """The outcome of each model with a package, as the page has it."""
    return _of(json.loads(_FILE.read_text()), package)


def models(package: str, names: Iterable[str], shown: Collection[str]) -> list[Any]:
    """Parameters of a test: some models in every run, and the others in the long form.

    A model that is known to end no test, or to end it otherwise than by an error of ours, is left
    out, with the outcome as the reason.
    """
    names, known = list(names), committed(package)
    assert set(shown) <= set(names), "these are not among the models"
    found = []
    for name in names:
        marks = [] if name in shown else [pytest.mark.soak]
        if known.get(name, "").startswith("failed: "):
            marks.append(pytest.mark.skip(reason=known[name]))
        found.append(pytest.param(name, marks=marks))
    return found


def outcome(build: Callable[[], T], run: Callable[[T], object]) -> str:
    """What becomes of one model.

    Args:
        build: Makes the model, and may give it to the package; an error that is not the package's
            means that there is no model.
        run: Compares. A difference is an error of the test, and never an outcome.
    """
    with warnings.catch_warnings():
        # Models of transformers warn of much that is no concern of these tests.
        warnings.simplefilter("ignore")
        try:
            model = build()
        except PcommError as error:
            return _refused(error)
        except Exception:
            return "not tried: no tiny model was found"
        try:
            run(model)
        except PcommError as error:
            return _refused(error)
    return "equal"


def _refused(error: PcommError) -> str:
    first = str(error).splitlines()[0]
    found = (words for pattern, words in _REASONS.items() if re.search(pattern, first))
    return f"refused: {next(found, first)}"


def check_outcome(package: str, name: str, found: str) -> None:
    """Compare what was found with the page, or put it there. On one rank.

    Args:
        package: Name of the distribution.
        name: The model.
        found: What `outcome` has returned.
    """
    if not os.environ.get("RECORD_WORKS_WITH"):
        expected = committed(package).get(name, "no such model")
        assert found == expected or expected == "not tried: for time", (name, found, expected)
        return
    import torch
    import transformers

    with _FILE.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        page = json.load(file)
        _of(page, package)[name] = found
        page["versions"] = {
            "transformers": transformers.__version__,
            "torch": torch.__version__.partition("+")[0],
            "date": date.today().isoformat(),
        }
        file.seek(0)
        file.write(json.dumps(page, indent=1) + "\n")
        file.truncate()


def _of(page: dict[str, Any], package: str) -> dict[str, str]:
    outcomes: dict[str, str] = next(
        feature["outcomes"] for feature in page["features"] if feature["name"] == package
    )
    return outcomes
