"""``router`` and ``align``: how a merge of mixtures of experts treats routers, and the order of experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, PlainSerializer, PlainValidator

from raymerge.documents.entry import by
from raymerge.documents.faults import Fault, FaultError, show
from raymerge.documents.fields import read_switch
from raymerge.documents.suggest import did_you_mean
from raymerge.recipes.entry import Entry, plain_word_or_reference, word_or_reference
from raymerge.recipes.reference import ModelReference

RouterSource: TypeAlias = Annotated[
    Literal["merge", "base"] | ModelReference,
    PlainValidator(word_or_reference("merge", "base")),
    PlainSerializer(plain_word_or_reference),
]

_WORDS = ("experts", "none")
_MAP = "a map like {experts: true, neurons: false}"


class Align(Entry):
    """What of independently trained sources is brought into the base's order before they are merged."""

    shape: ClassVar[str] = _MAP

    experts: Annotated[bool, by(read_switch)] = True
    """Whether the experts of a layer are matched, together with their router rows; always so."""
    neurons: Annotated[bool, by(read_switch)] = True
    """Whether the neurons inside each pair of experts are matched too."""

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        """Neurons have a counterpart only where their expert has one."""
        if data.get("experts") is False:
            what = "'experts' is false, and neurons are matched within matched experts only."
            yield Fault(("experts",), what, "Remove it, or write 'align: none'.")


def _read_align(value: object) -> object:
    """``experts`` and ``none`` as what they stand for; a map as it is."""
    if value == "experts":
        return {}
    if value is False or value == "none":
        return None
    if isinstance(value, (Mapping, Align)):
        return value
    remedy = f"{did_you_mean(str(value), _WORDS)} Write experts, none, or {_MAP}."
    raise FaultError(Fault((), f"{show(value)} is not known here.", remedy.lstrip()))


Alignment: TypeAlias = Annotated[Align | None, BeforeValidator(_read_align)]
