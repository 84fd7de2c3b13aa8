"""``router: repair``: routers of a merge of mixtures, solved for what each source's router does with texts of
its domain (HARC, arXiv 2606.03391).

In a merge it is a word, which stands for two merges: one with its routers merged as other tensors, and one
that takes the first and replaces them. The second can be written too, for a merge that is there already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import PlainSerializer, PlainValidator, ValidationInfo

from raymerge.documents.fields import Fault
from raymerge.documents.grammar import Grammar, accepts, filled
from raymerge.recipes.entry import (
    Entry,
    ModelReference,
    Reference,
    Text,
    plain_word_or_reference,
    word_or_reference,
)

REPAIR: Final = "repair"
_WORDS = ("merge", "base", REPAIR)


class RepairDomain(Entry):
    shape: ClassVar[str] = "a map like {model: PATH, texts: [FILE]}"

    model: Reference
    """A model that the merge was made of, with its own routers."""
    texts: tuple[Text, ...]
    """Files of what it is good at."""

    grammar: ClassVar[Grammar] = filled("texts")

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        if data.get("texts") in ([], ()):
            yield Fault(("texts",), "the list is empty.", "Name files of text.")


class RouterRepair(Entry):
    shape: ClassVar[str] = "a map like {repair: [{model: PATH, texts: [FILE]}]}"

    repair: tuple[RepairDomain, ...]

    grammar: ClassVar[Grammar] = filled(REPAIR)

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        if data.get(REPAIR) in ([], ()):
            yield Fault((REPAIR,), "the list is empty.", "Name the models that were merged.")


_word_or_reference = word_or_reference(*_WORDS)


@accepts({})
def _read_router(value: object, info: ValidationInfo) -> str | ModelReference | RouterRepair:
    if isinstance(value, RouterRepair):
        return value
    if isinstance(value, Mapping) and REPAIR in value:
        return RouterRepair.model_validate(value, context=info.context)
    return _word_or_reference(value, info)


_plain_word = plain_word_or_reference(*_WORDS)


def _plain_router(value: str | ModelReference | RouterRepair) -> object:
    if isinstance(value, RouterRepair):
        return value.model_dump(mode="json", exclude_defaults=True)
    return _plain_word(value)


RouterSource: TypeAlias = Annotated[
    Literal["merge", "base", "repair"] | Reference | RouterRepair,
    PlainValidator(_read_router),
    PlainSerializer(_plain_router),
]


def repair_faults(data: Mapping[str, Any]) -> Iterable[Fault]:
    """Of a merge, as read."""
    if data.get("router") != REPAIR:
        return
    for key in ("slices", "modules", "align"):
        if data.get(key):
            what = (
                f"'router: repair' is for merges of whole models, experts in one order, and here is '{key}'."
            )
            yield Fault((key,), what, f"Remove '{key}', or write 'router: merge'.")
    if _field(data.get("calibrate"), "texts"):
        return
    for index, entry in enumerate(data.get("models") or ()):
        if not _field(entry, "texts") and _field(entry, "model") != data.get("base_model"):
            what = "'router: repair' runs texts of what each model is good at, and this one has none."
            yield Fault(
                ("models", index), what, "Add texts: [FILE] beside 'model', or calibrate: {texts: [FILE]}."
            )


def _field(entry: object, name: str) -> object:
    """Of an entry as written, or of one made in Python."""
    return entry.get(name) if isinstance(entry, Mapping) else getattr(entry, name, None)
