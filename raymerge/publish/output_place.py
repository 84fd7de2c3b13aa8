"""Where an output goes: a directory, or a place in an object store; and that it is not where a source is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from raymerge.errors import OptionError, Problem, TargetError
from raymerge.merge_plan.tables import Plan
from raymerge.options import RunOptions
from raymerge.planner.inputs.source import Source, holdings
from raymerge.publish.staging import Staging
from raymerge.publish.stop_request import StopRequest
from raymerge.storage.addresses import is_object_place, is_remote, parse_place, shown, with_options

INSIDE = "lies inside"
"""How a place stands to one that holds it."""
_ELSEWHERE = "Choose another -o, outside the sources."


def place_of(output: Path | str, options: RunOptions) -> Path | str:
    """The output place that a user means: a path, or the address of another place with its options.

    Raises:
        OptionError: the address says no place.
    """
    text = str(output)
    return with_options(text, options.storage) if is_remote(text) else Path(parse_place(text).text)


def staging_of(output: Path | str, plan: Plan, options: RunOptions) -> Staging:
    """What a checkpoint grows in until it is published.

    Raises:
        TargetError: the place has a name that cannot be written down.
        OptionError: nothing can be written to such a place, or what writes there is not installed.
        CheckpointError: there are no credentials for it.
    """
    place = str(output)
    if not is_remote(place):
        if options.scratch is not None:
            what = "a shard is written to a directory at once, and waits nowhere until it is uploaded."
            raise OptionError(Problem("--scratch", what, "Leave it out, or give an object store as -o."))
        return Staging(_real(Path(place)), plan)
    _check_printable(place)
    if not is_object_place(place):
        what = "nothing can be written there."
        raise OptionError(
            Problem(shown(place), what, "Give a directory, or an s3://, gs:// or az:// place as -o.")
        )
    address = parse_place(place)
    if address.options.kms_key is not None and address.scheme != "s3":
        what = f"it is a key of AWS, and nothing at {shown(place)} would be encrypted with it."
        raise OptionError(Problem("storage: kms_key", what, "Take it out, or give an s3:// place as -o."))
    from raymerge.publish.remote_staging import RemoteStaging

    return RemoteStaging(place, plan, scratch=options.scratch)


def stop_request_of(output: Path | str, options: RunOptions) -> StopRequest:
    """Where others may ask the run that makes an output to stop.

    Raises:
        OptionError: what speaks to its store is not installed.
        CheckpointError: there are no credentials for it.
    """
    if not is_object_place(str(output)):
        return StopRequest.beside(Path(output))
    return StopRequest.in_store(with_options(str(output), options.storage))


def check_apart(output: Path | str, sources: Sequence[Source]) -> None:
    """An output over a source would destroy it; one inside a source would become part of it.

    Raises:
        TargetError: it would.
    """
    alone = {each.checkpoint.root for each in sources if each.checkpoint.is_single_file}
    place = str(output)
    for source in holdings(sources):
        found = relation(place, source.root)
        # The directory of a single file is no checkpoint, and may hold anything beside it.
        if found is not None and not (source.root in alone and found == INSIDE):
            what = f"the output place {found} the source {source.name}."
            raise TargetError(Problem(shown(place), what, _ELSEWHERE))


def relation(place: str, other: str) -> str | None:
    """How a place stands to another one, as a verb between the two; None where neither is in the other."""
    own, root = _parts(place), _parts(other)
    if own == root:
        return "is"
    if _lies_in(root, own):
        return "holds"
    return INSIDE if _lies_in(own, root) else None


def _real(output: Path) -> Path:
    """The output place without links, under a name that can be written down."""
    real = os.path.realpath(output)
    _check_printable(real)
    return Path(real)


def _check_printable(place: str) -> None:
    if not place.isprintable():
        what = "the name holds characters that cannot be written."
        raise TargetError(Problem(ascii(shown(place)), what, "Choose another -o."))


def _parts(place: str) -> tuple[str, ...]:
    """A place as the names on the way to it: of the kind of store, and of what holds what."""
    address = parse_place(place)
    if is_remote(place):
        return address.scheme, *address.text.split("/")
    return "file", *Path(os.path.realpath(address.text)).parts


def _lies_in(inner: tuple[str, ...], outer: tuple[str, ...]) -> bool:
    return len(inner) > len(outer) and inner[: len(outer)] == outer
