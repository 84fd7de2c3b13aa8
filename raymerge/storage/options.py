"""How an object store is reached, as far as the user says it: plain data that goes wherever a run goes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from urllib.parse import urlsplit

from raymerge.errors import OptionError, Problem

_NAME = re.compile(r"[!-~]+")
_TRUTHS: Mapping[str, bool] = {"true": True, "false": False}


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Where the servers of object stores are. There are no credentials in it, and there is no room for any.

    What is not given here comes from the standard environment variables and files of each store, on each
    machine anew.
    """

    region: str | None = None
    """Region of the buckets on S3."""
    endpoint: str | None = None
    """Address of a server that speaks S3, where it is not that of AWS: ``https://minio.example:9000``. Other
    stores are not asked there: that server would be shown their credentials."""
    anonymous: bool = False
    """Whether requests are not signed, for buckets that anybody may read."""
    profile: str | None = None
    """Name of a profile in the AWS configuration of each machine."""
    allow_http: bool = False
    """Whether a server may be spoken to without TLS."""
    kms_key: str | None = None
    """Key of AWS KMS, by its id, alias or ARN, that objects on S3 are encrypted with when they are written;
    None for what the bucket does by itself."""
    requester_pays: bool = False
    """Whether the account of the credentials pays for requests on S3, as some buckets ask for."""

    def __post_init__(self) -> None:
        for name, value in (("region", self.region), ("kms_key", self.kms_key)):
            if value is not None and _NAME.fullmatch(value) is None:
                what = "is empty, or holds spaces or other characters that no such name has."
                remedy = "Write it in printable ASCII, or leave it out."
                raise OptionError(Problem(f"storage: {name}", what, remedy))
        if self.requester_pays and self.anonymous:
            what = "nobody can pay for requests that are not signed."
            raise OptionError(Problem("storage: requester_pays", what, "Take anonymous out, or this."))
        if self.endpoint is None:
            return
        parts = urlsplit(self.endpoint)
        where = "storage: endpoint"
        if parts.scheme not in ("http", "https") or not parts.hostname:
            what = "is not the address of a server, such as https://minio.example:9000."
            raise OptionError(Problem(where, what, "Write http:// or https:// and the server's name."))
        if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
            what = "holds a user, a password or a query."
            remedy = "Take it out: credentials come from the environment of each machine."
            raise OptionError(Problem(where, what, remedy))
        if parts.scheme == "http" and not self.allow_http:
            what = f"{self.endpoint} is spoken to without TLS, which is not allowed."
            raise OptionError(Problem(where, what, "Take https://, or set allow_http: true in storage:."))


NO_OPTIONS = StoreOptions()
"""Everything as the environment has it."""


def options_as_text(options: StoreOptions) -> dict[str, str]:
    """Every option that is not as usual, as text by name."""
    pairs = ((each.name, getattr(options, each.name), each.default) for each in fields(StoreOptions))
    return {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value, usual in pairs
        if value != usual
    }


def options_from_text(texts: Mapping[str, str]) -> StoreOptions:
    """The options that ``options_as_text`` gave.

    Raises:
        OptionError: a name that is no option, or a value that is none of its values. It does not repeat the
            value, which may be a secret.
    """
    known = {each.name: each.default for each in fields(StoreOptions)}
    problems = [
        Problem(f"'{name}' in an address", f"is not one of {', '.join(known)}.", "Take it out.")
        for name in texts
        if name not in known
    ]
    problems += [
        Problem(f"'{name}' in an address", "is neither true nor false.", "Write true or false.")
        for name, text in texts.items()
        if isinstance(known.get(name), bool) and text not in _TRUTHS
    ]
    if problems:
        raise OptionError(problems)
    values = {name: _TRUTHS[text] if isinstance(known[name], bool) else text for name, text in texts.items()}
    return StoreOptions(**values)  # type: ignore[arg-type]
