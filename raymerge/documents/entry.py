"""A map in a document: known keys only, and all that is wrong with it at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    PlainValidator,
    ValidationError,
    model_validator,
)

from raymerge.documents.faults import Fault, FaultError, faults_of, kind, show
from raymerge.documents.suggest import closest, did_you_mean


class MapEntry(BaseModel):
    """A map in a document. Frozen; a key that is not a field is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    shape: ClassVar[str] = "a map of keys to values"
    """How such a map is written, for one who wrote something else."""
    advice: ClassVar[Mapping[str, str]] = {}
    """Keys that are no fields but are met in the wild, and what to do about each."""
    hint: ClassVar[str] = ""
    """What is said of an unknown key that is like none of the known ones."""

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        """Faults that lie between keys. ``data`` is as the user wrote it: nothing in it is checked yet."""
        del data
        return ()

    @model_validator(mode="wrap")
    @classmethod
    def _collect(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping):
            what = f"{show(data)} is {kind(data)} where a map belongs."
            raise FaultError(Fault((), what, f"Write {cls.shape}."))
        faults = [cls._unknown(str(key)) for key in data if key not in cls.model_fields]
        faults += cls.rules(data)
        given = {key: data[key] for key in data if key in cls.model_fields and data[key] is not None}
        try:
            entry = handler(given)
        except ValidationError as error:
            # What lies between keys says more of a place than what reads the value there.
            said = {fault.path for fault in faults}
            rest = (fault for fault in faults_of(error) if fault.path not in said)
            raise FaultError([*faults, *rest]) from None
        if faults:
            raise FaultError(faults)
        return entry

    @classmethod
    def _unknown(cls, key: str) -> Fault:
        known = tuple(cls.model_fields)
        match = closest(key, (*known, *cls.advice))
        what = f"unknown key '{key}'."
        if match is None:
            return Fault((key,), what, f"{cls.hint}Keys known here: {', '.join(known)}.", is_key=True)
        guess = "" if match == key else did_you_mean(key, (match,))
        meant = match if match in known else None
        return Fault((key,), what, f"{guess} {cls.advice.get(match, '')}".strip(), meant, is_key=True)


def by(reader: Callable[[object], Any]) -> PlainValidator:
    """Read a field by ``reader`` alone, without pydantic's own coercions."""
    return PlainValidator(reader)
