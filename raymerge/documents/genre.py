"""What sort of text a user wrote: how messages speak of it."""

from __future__ import annotations

from dataclasses import dataclass

from raymerge.errors import UserError


@dataclass(frozen=True, slots=True)
class Genre:
    """A sort of text."""

    noun: str
    """What messages call it, like ``recipe``."""
    opening: str
    """How its first key is written, like ``merge_method: ...``."""
    error: type[UserError]
    """What is raised for one that is wrong."""
    about_secrets: str
    """Why none may stand in it and what to do with one, a sentence or more."""
