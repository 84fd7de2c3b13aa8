"""Texts that models are run on, for what data says about experts, layers and weights."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from raymerge.documents.fields import between, by, choice_of
from raymerge.recipes.entry import Entry, Text

DEFAULT_TOKENS = 65536


class Calibrate(Entry):
    shape: ClassVar[str] = "a map like {texts: [calibration.txt]}"

    texts: tuple[Text, ...] = ()
    """Files of text or of conversations (``.jsonl``); not needed where every model has its own."""
    tokens: Annotated[int, by(between(1))] = DEFAULT_TOKENS
    """Most tokens of each file."""
    length: Annotated[int, by(between(2))] | None = None
    """Tokens of a window; None for 512, or what the model reads at once if that is less."""
    model: Annotated[Literal["source", "merged"], by(choice_of("source", "merged"))] = "source"
    """Whose activations: each ``source``'s own, or those of what is ``merged`` up to each layer."""
