"""The tokenizer of a directory, and the tokens that end a text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import tokenizers

from pcomm.core.errors import ConfigError
from pcomm.integration.huggingface.chat_template import special_tokens
from pcomm.integration.huggingface.directory import CONFIG, ModelDirectory

__all__ = [
    "GENERATION",
    "SETTINGS",
    "TOKENIZER",
    "DirectoryTokenizer",
    "end_ids",
    "read_tokenizer",
    "vocabulary_json",
]


TOKENIZER = "tokenizer.json"
"""The file of the tokenizer."""

SETTINGS = "tokenizer_config.json"
"""The file that names its special tokens."""

GENERATION = "generation_config.json"
"""The file that says how text is written, and where it ends."""


# Without blanks and letters of other scripts, for which a vocabulary has an alphabet of its own.
_MARK = re.compile("<[!-~]*>")


class DirectoryTokenizer:
    """Text to token ids and back, as transformers' tokenizer of the directory does it.

    Args:
        tokenizer: Content of `tokenizer.json`.
        eos_ids: Ids that end a text.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, eos_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        """The tokenizer itself, for incremental decoding."""
        self.eos_ids = tuple(eos_ids)
        """Ids that end a text: those of `generation_config.json`, `config.json` or the tokenizer,
        the first of these that says one."""

    @property
    def num_ids(self) -> int:
        """Number of ids in use; a model may have more."""
        return int(self.tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """Token ids of a text alone, such as a rendered chat template, which has all marks. Local.

        The names of special tokens in the text become these tokens.
        """
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a text and of what the model wants around it, such as a first token. Local.

        The ids are those of `tokenizer(text)` in transformers.
        """
        return list(self.tokenizer.encode(text, add_special_tokens=True).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; special tokens give none. Local."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def to_json(self) -> str:
        """The vocabulary as `tokenizer.json`, see `vocabulary_json`. Local."""
        return vocabulary_json(self.tokenizer.to_str())


def vocabulary_json(tokenizer_json: str) -> str:
    """The content of a `tokenizer.json` without the expressions that cut a text into words. Local.

    Grammars need the bytes of each token alone, and their library cannot compile each expression.
    It takes each added token in angle brackets for a special one, which is no text; those of them
    that give text, such as `<tool_call>`, are words of the vocabulary here.

    Args:
        tokenizer_json: The whole content.
    """
    content = json.loads(tokenizer_json)
    step = content.get("pre_tokenizer") or {}
    kept = [one for one in step.get("pretokenizers", [step]) if one and one["type"] != "Split"]
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": kept} if kept else None
    added = content.get("added_tokens") or []
    words = [one for one in added if not one["special"] and _MARK.fullmatch(one["content"])]
    if content["model"].get("type") == "BPE" and words:
        content["model"]["vocab"] |= {one["content"]: one["id"] for one in words}
        content["added_tokens"] = [one for one in added if one not in words]
    return json.dumps(content)


def read_tokenizer(directory: ModelDirectory) -> DirectoryTokenizer:
    """The tokenizer of a directory. Local; nothing but `tokenizer.json` and settings are read.

    Raises:
        ConfigError: There is none, or it is damaged.
    """
    text = directory.text(TOKENIZER)
    if text is None:
        raise ConfigError(
            f"model directory {directory.folder}",
            found=f"no {TOKENIZER}",
            why="Without it no text becomes token ids, and no token ids become text. Tokenizers "
            "of other files, such as tokenizer.model, are programs of their packages.",
            fix="Save it with transformers: `AutoTokenizer.from_pretrained(DIR)"
            ".save_pretrained(DIR)`.",
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception for a text that it cannot parse
        raise ConfigError(
            f"model directory {directory.folder}",
            found=f"{TOKENIZER}: {error}",
            why="The file is no tokenizer, is damaged, or was cut off.",
            fix=f"Copy {TOKENIZER} again from where the directory came from.",
        ) from error
    # A file keeps how its last text was cut and padded; prompts are neither.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return DirectoryTokenizer(tokenizer, end_ids(directory, tokenizer))


def end_ids(
    directory: ModelDirectory, tokenizer: tokenizers.Tokenizer | None = None
) -> tuple[int, ...]:
    """Ids that end a text; none if the directory names none. Local.

    Args:
        directory: The directory.
        tokenizer: Tokenizer of the directory, which is asked where no file says an id.

    Raises:
        ConfigError: A file is damaged.
    """
    for name in (GENERATION, CONFIG):
        given = directory.json(name).get("eos_token_id")
        if given is not None:
            return _checked(directory, name, given)
    text = special_tokens(directory.json(SETTINGS)).get("eos_token")
    found = tokenizer.token_to_id(text) if tokenizer is not None and text is not None else None
    return () if found is None else (found,)


def _checked(directory: ModelDirectory, name: str, given: Any) -> tuple[int, ...]:
    ids = given if isinstance(given, list) else [given]
    if not ids or any(type(one) is not int or one < 0 for one in ids):
        raise ConfigError(
            f"model directory {directory.folder}",
            found=f"{name}: eos_token_id = {given!r:.100}",
            why="It is the id of the token that ends a text, or a list of ids.",
            fix=f"Copy {name} again from where the directory came from.",
        )
    return tuple(dict.fromkeys(ids))
