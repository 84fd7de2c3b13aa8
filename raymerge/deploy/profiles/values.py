"""Values of a profile: sizes, Kubernetes names, environments. Readers raise ``FaultError``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Annotated, Any, TypeAlias

from raymerge.documents.fields import (
    Fault,
    FaultError,
    FieldPath,
    between,
    by,
    kind,
    read_switch,
    read_text,
    refusal,
    show,
)
from raymerge.storage.addresses import is_path, shown
from raymerge.units import parse_size

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME = re.compile(
    r"(?i)token(?!izer)|passw|pass(_|$)|secret|credential|key(_|$)|sas(_|$)|connection_?string|signature"
)
_FILE_NAME = re.compile(r"(?i).*_(file|path|dir)|GOOGLE_APPLICATION_CREDENTIALS")
"""Variables with the path of a secret, which is no secret."""
_FACTORS = {
    "m": Decimal("0.001"), "": Decimal(1), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9),
    "T": Decimal(10**12), "P": Decimal(10**15), "Ki": Decimal(2**10), "Mi": Decimal(2**20),
    "Gi": Decimal(2**30), "Ti": Decimal(2**40), "Pi": Decimal(2**50),
}  # fmt: skip
_MOST_SUBDOMAIN = 253
_AFFINITIES = ("nodeAffinity", "podAffinity", "podAntiAffinity")
_AFFINITY_RULES = (
    "requiredDuringSchedulingIgnoredDuringExecution",
    "preferredDuringSchedulingIgnoredDuringExecution",
)


def read_bytes(value: object) -> int:
    try:
        size = parse_size(value) if isinstance(value, (int, str)) else 0
    except ValueError as error:
        raise refusal(f"{show(value)} is not a size.", "Write it like 8GiB.") from error
    if size < 1:
        raise refusal(f"{show(value)} holds nothing.", "Write a size like 8GiB.")
    return size


def read_quantity(value: object) -> str:
    """A positive amount as Kubernetes writes it: ``8``, ``500m``, ``16Gi``."""
    text = str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value
    if not isinstance(text, str) or _QUANTITY.fullmatch(text) is None:
        remedy = "Write it as Kubernetes does: 4 or 500m for processors, 16Gi for memory."
        raise refusal(f"{show(value)} is not an amount.", remedy)
    if amount(text) <= 0:
        raise refusal(f"{show(value)} is nothing.", "Write more than 0.")
    return text


def read_memory_quantity(value: object) -> str:
    """Bytes as Kubernetes writes them; less than a mebibyte is a forgotten unit."""
    text = read_quantity(value)
    if amount(text) < 2**20:
        what = f"{show(value)} means {amount(text)} bytes."
        raise refusal(what, f"Write it with its unit, like {text.rstrip('m')}Gi.")
    return text


def amount(quantity: str) -> Decimal:
    match = _QUANTITY.fullmatch(quantity)
    assert match is not None
    return Decimal(match.group(1)) * _FACTORS[match.group(2) or ""]


def read_label(value: object) -> str:
    """An RFC 1123 label, as of a namespace or volume."""
    return _matching(value, _LABEL, "small letters, digits and dashes, at most 63 of them")


def read_object_name(value: object) -> str:
    """A name of a Kubernetes object: labels joined by dots, at most 253 characters."""
    name = _matching(value, _SUBDOMAIN, "small letters, digits, dashes and dots")
    if len(name) > _MOST_SUBDOMAIN:
        raise refusal(f"{show(name)} has more than {_MOST_SUBDOMAIN} characters.", "Shorten it.")
    return name


def read_resource_name(value: object) -> str:
    text = read_text(value)
    if "/" not in text or not _is_qualified(text):
        what = f"{show(value)} is not the name of a resource."
        raise refusal(what, "Write it like nvidia.com/gpu.")
    return text


def read_labels(value: object) -> Mapping[str, str]:
    def check(key: str, text: str) -> Fault | None:
        if not _is_qualified(key):
            return Fault((key,), f"'{key}' cannot be the key of a label.", "Write it like example.com/team.")
        if text and _QUALIFIED.fullmatch(text) is None:
            allowed = "at most 63 letters, digits, dashes, underscores and dots"
            return Fault((key,), f"{show(text)} cannot be the value of a label.", f"Write {allowed}.")
        return None

    return _texts(value, check)


def read_annotations(value: object) -> Mapping[str, str]:
    def check(key: str, _: str) -> Fault | None:
        if _is_qualified(key):
            return None
        return Fault(
            (key,), f"'{key}' cannot be the key of an annotation.", "Write it like example.com/team."
        )

    return _texts(value, check)


def read_environment(value: object) -> Mapping[str, str]:
    """Environment variables; names of secrets are refused."""

    def check(name: str, _: str) -> Fault | None:
        if _VARIABLE.fullmatch(name) is None:
            what = f"'{name}' cannot be the name of a variable."
            return Fault((name,), what, "Write letters, digits and underscores.")
        if _SECRET_NAME.search(name) and not _FILE_NAME.fullmatch(name):
            what = f"'{name}' is a secret by its name, and a profile is sent about for all to read."
            remedy = "Take it out: name a secret in 'env_from_secrets', or set it on the cluster's nodes."
            return Fault((name,), what, remedy)
        return None

    return _texts(value, check)


def read_header_sources(value: object) -> Mapping[str, str]:
    """Request headers, each with the environment variable that holds its value."""

    def check(header: str, name: str) -> Fault | None:
        if re.fullmatch(r"[A-Za-z0-9-]+", header) is None:
            return Fault((header,), f"'{header}' cannot be a header.", "Write it like Authorization.")
        if _VARIABLE.fullmatch(name) is None:
            # Not shown: this may be the secret itself.
            what = "what stands here is not the name of an environment variable."
            return Fault((header,), what, "Write the variable's name; its value is read when it is needed.")
        return None

    return _texts(value, check)


def read_absolute(value: object) -> str:
    text = read_text(value)
    if not text.startswith("/") or ".." in text.split("/") or text.strip("/") == "" or ":" in text:
        what = f"{show(value)} is not an absolute path below /."
        raise refusal(what, "Write it like /mnt/models.")
    return "/" + "/".join(step for step in text.split("/") if step not in ("", "."))


def read_sub_path(value: object) -> str:
    text = read_text(value)
    steps = [step for step in text.split("/") if step not in ("", ".")]
    if text.startswith("/") or ".." in steps or not steps:
        what = f"{show(value)} is not a path within a volume."
        raise refusal(what, "Write it like teams/merging.")
    return "/".join(steps)


def read_affinity(value: object) -> Mapping[str, Any]:
    """The affinity of a pod in Kubernetes' own form; only Kubernetes checks it."""
    if not isinstance(value, Mapping) or not value:
        what = f"{show(value)} is no affinity; expected a map."
        raise refusal(what, f"Write at least one of: {', '.join(_AFFINITIES)}.")
    faults = []
    for key, rules in value.items():
        if key not in _AFFINITIES:
            what = f"'{key}' is no kind of affinity."
            faults.append(Fault((str(key),), what, f"Write one of: {', '.join(_AFFINITIES)}."))
        elif not isinstance(rules, Mapping) or not rules or set(rules) - set(_AFFINITY_RULES):
            what = f"{show(rules)} are no rules of an affinity."
            remedy = f"Write {' or '.join(_AFFINITY_RULES)}, as a pod has them."
            faults.append(Fault((key,), what, remedy))
    if faults:
        raise FaultError(faults)
    return dict(value)


def read_place(value: object) -> str:
    text = read_text(value)
    if not text.strip():
        raise refusal("an empty text is no place.", "Write a directory or s3://bucket/dir.")
    return text


def read_directory(value: object) -> str:
    text = read_text(value)
    if not text.strip() or not is_path(text):
        what = f"{show(shown(text))} is no path of a directory."
        raise refusal(what, "Write a path, like /mnt/scratch.")
    return text


def _matching(value: object, pattern: re.Pattern[str], allowed: str) -> str:
    text = read_text(value)
    if pattern.fullmatch(text) is None:
        raise refusal(f"{show(value)} cannot be a name on Kubernetes.", f"Write {allowed}.")
    return text


def _is_qualified(key: str) -> bool:
    prefix, slash, name = key.rpartition("/")
    if slash and (_SUBDOMAIN.fullmatch(prefix) is None or len(prefix) > _MOST_SUBDOMAIN):
        return False
    return _QUALIFIED.fullmatch(name) is not None


def _texts(value: object, check: Callable[[str, str], Fault | None]) -> Mapping[str, str]:
    if not isinstance(value, Mapping):
        raise refusal(f"{show(value)} is {kind(value)}; expected a map.", "Write it as {name: value}.")
    faults = []
    for key, text in value.items():
        place: FieldPath = (key,)
        if not isinstance(text, str):
            what = f"{show(text)} is {kind(text)}; expected a text."
            faults.append(Fault(place, what, "Put it in quotes."))
        elif "\0" in text:
            faults.append(Fault(place, "it holds the character U+0000.", "Remove it."))
        elif fault := check(str(key), text):
            faults.append(fault)
    if faults:
        raise FaultError(faults)
    return dict(value)


Bytes: TypeAlias = Annotated[int, by(read_bytes)]
Quantity: TypeAlias = Annotated[str, by(read_quantity)]
MemoryQuantity: TypeAlias = Annotated[str, by(read_memory_quantity)]
Label: TypeAlias = Annotated[str, by(read_label)]
ObjectName: TypeAlias = Annotated[str, by(read_object_name)]
ResourceName: TypeAlias = Annotated[str, by(read_resource_name)]
Labels: TypeAlias = Annotated[Mapping[str, str], by(read_labels)]
Annotations: TypeAlias = Annotated[Mapping[str, str], by(read_annotations)]
Environment: TypeAlias = Annotated[Mapping[str, str], by(read_environment)]
AbsolutePath: TypeAlias = Annotated[str, by(read_absolute)]
SubPath: TypeAlias = Annotated[str, by(read_sub_path)]
Affinity: TypeAlias = Annotated[Mapping[str, Any], by(read_affinity)]
Directory: TypeAlias = Annotated[str, by(read_directory)]
Place: TypeAlias = Annotated[str, by(read_place)]
Text: TypeAlias = Annotated[str, by(read_text)]
Switch: TypeAlias = Annotated[bool, by(read_switch)]
Count: TypeAlias = Annotated[int, by(between(0))]
Positive: TypeAlias = Annotated[int, by(between(1))]
