"""Files that options of `pcomm plan` name."""

from __future__ import annotations

from pathlib import Path

from pcomm.core.errors import ConfigError

__all__ = ["text_of"]


def text_of(path: Path, option: str, content: str) -> str:
    """The text of a file.

    Args:
        path: Path of the file.
        option: Name of the option with its dashes, for the error.
        content: Content of the file, for the error.

    Raises:
        ConfigError: The file cannot be read, or is no text.
    """
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"pcomm plan {option} {path}",
            found=f"{type(error).__name__}: {error}",
            why=f"The file has {content}.",
            fix="Give the path of a JSON file that can be read.",
        ) from error
