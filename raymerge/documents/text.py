"""The text of a file that a user wrote."""

from __future__ import annotations

from pathlib import Path

from raymerge.documents.genre import Genre
from raymerge.documents.yaml_text import spot
from raymerge.errors import Problem, UserError

MAX_TEXT_BYTES = 4 * 2**20
"""Bytes of such a text."""


def read_file(name: str, genre: Genre) -> str:
    """The text of a file, which messages call by the name under which the user gave it.

    Raises:
        UserError: of the genre's kind: there is no such file, it cannot be read, is too large or not UTF-8.
    """
    noun = genre.noun
    try:
        with Path(name).open("rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
    except FileNotFoundError:
        raise genre.error(Problem(name, "there is no such file.", f"Check the path of the {noun}.")) from None
    except OSError as error:
        reason = f"the {noun} cannot be read ({error.strerror})."
        raise genre.error(Problem(name, reason, "Give the path of a readable YAML file.")) from error
    if len(content) > MAX_TEXT_BYTES:
        raise _too_large(name, genre)
    return _decode(content, name, genre)


def check_length(text: str, name: str, genre: Genre) -> None:
    """Refuse a text of more than ``MAX_TEXT_BYTES``.

    Raises:
        UserError: of the genre's kind.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
        raise _too_large(name, genre)


def _decode(content: bytes, name: str, genre: Genre) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        mark = (before.count(b"\n") + 1, len(before) - before.rfind(b"\n"))
        what = f"the byte 0x{content[error.start]:02x} is not UTF-8."
        raise genre.error(Problem(spot(name, mark), what, f"Save the {genre.noun} as UTF-8.")) from None


def _too_large(name: str, genre: Genre) -> UserError:
    what = f"the {genre.noun} has more than {MAX_TEXT_BYTES} bytes."
    return genre.error(Problem(name, what, f"Give the {genre.noun}, not a file of weights."))
