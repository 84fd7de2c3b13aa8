"""The ``tokenizer`` block: which vocabulary the output has, and where each added token's row comes from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import PlainSerializer, PlainValidator, ValidationInfo

from raymerge.documents.faults import Fault, FaultError, show
from raymerge.documents.fields import between, by, read_switch
from raymerge.recipes.entry import (
    Entry,
    Reference,
    Text,
    plain_word_or_reference,
    reading_of,
    word_or_reference,
)
from raymerge.recipes.reference import ModelReference, plain_reference, read_reference

_KINDS = ("zero", "model_token")


class ZeroRow(Entry):
    """A row of zeros."""

    kind: Literal["zero"]
    """Always ``zero``."""


class TokenRow(Entry):
    """The row of one token of one source; by its text or by its number."""

    shape: ClassVar[str] = "a map like {kind: model_token, model: PATH, token: TEXT}"

    kind: Literal["model_token"]
    """Always ``model_token``."""
    model: Reference
    """The source that has the token."""
    token: Text | None = None
    """The token's text."""
    token_id: Annotated[int, by(between(0))] | None = None
    """The token's number."""

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        given = [key for key in ("token", "token_id") if data.get(key) is not None]
        if len(given) != 1:
            what = (
                "a model_token is named both by 'token' and by 'token_id'."
                if given
                else ("the model_token is not named.")
            )
            yield Fault((), what, "Give exactly one of 'token' and 'token_id'.")


def _read_row(value: object, info: ValidationInfo) -> ModelReference | ZeroRow | TokenRow:
    if isinstance(value, (ZeroRow, TokenRow)):
        return value
    if not isinstance(value, Mapping) or "kind" not in value:
        return read_reference(value, reading_of(info.context).exists)
    if value["kind"] not in _KINDS:
        raise FaultError(
            Fault(("kind",), f"{show(value['kind'])} is not known.", "Write zero or model_token.")
        )
    row = ZeroRow if value["kind"] == "zero" else TokenRow
    return row.model_validate(value, context=info.context)


def _plain_row(row: ModelReference | ZeroRow | TokenRow) -> object:
    if isinstance(row, ModelReference):
        return plain_reference(row)
    return row.model_dump(mode="json", exclude_none=True)


TokenizerSource: TypeAlias = Annotated[
    Literal["union", "base"] | ModelReference,
    PlainValidator(word_or_reference("union", "base")),
    PlainSerializer(plain_word_or_reference),
]
RowSource: TypeAlias = Annotated[
    ModelReference | ZeroRow | TokenRow, PlainValidator(_read_row), PlainSerializer(_plain_row)
]


class TokenEntry(Entry):
    """What one token's row of the embedding is made of."""

    shape: ClassVar[str] = "a map like {source: PATH, force: true}"

    source: RowSource | None = None
    """A source that has the token, a row of zeros, or another token's row; None for the default."""
    force: Annotated[bool, by(read_switch)] = False
    """Whether sources that have the token take this row too."""


class Tokenizer(Entry):
    """The output's vocabulary."""

    shape: ClassVar[str] = "a map like {source: union}"

    source: TokenizerSource = "union"
    """``union`` of all vocabularies, the ``base``'s, or that of one source."""
    tokens: Mapping[str, TokenEntry] = {}
    """Rows by token, in the order in which missing tokens are added."""
    pad_to_multiple_of: Annotated[int, by(between(1))] | None = None
    """Rows of the embedding are rounded up to a multiple of this."""
