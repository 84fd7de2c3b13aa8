"""Whether layers of different sources fit into one stack, which one config has to describe.

Layers of several kinds are common (dense and sparse, two types of attention), so no kind is known here. What
holds is this: some single source has layers of every kind that the stack has, tensor by tensor and shape by
shape; and what stands before and after the layers has the shapes of the source that gives the config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from raymerge.architectures import TiedPair
from raymerge.checkpoints.header import StoredTensor
from raymerge.dtypes import DType
from raymerge.planner.findings import Findings
from raymerge.planner.matching.align import End, PlacedTensors, counterpart
from raymerge.planner.matching.layer_map import Section

_Kind = frozenset[tuple[str, tuple[int, ...], DType | None]]
# Name within the layer, shape, and the dtype of codes that are not read: equal kinds are layers of one build.

_ONE_CONFIG = "one config has to describe all layers"
_REMEDY = "Stack models of one size and layout, and make one of them the base_model."


@dataclass(frozen=True, slots=True)
class _Stacked:
    """One source's layers."""

    placed: PlacedTensors
    own: Mapping[_Kind, int]
    """Each kind among all its layers, with the first layer of it."""
    used: Mapping[_Kind, int]
    """The same of the layers that the stack takes."""

    @property
    def name(self) -> str:
        return self.placed.source.name


def check_stacks(
    sections: Sequence[Section],
    placed: Mapping[tuple[str | None, int], PlacedTensors],
    *,
    donor: int,
    findings: Findings,
    by_token: bool = False,
) -> None:
    """Report every source whose slices do not fit those of the others, or the config of the donor.

    Args:
        sections: all of the recipe; those of whole models are passed over.
        placed: the tensors of each module and source.
        donor: index of the source that gives the config.
        findings: receives what does not fit, with the tensors and both shapes.
        by_token: whether rows of embedding and head are matched by token, so that they may be more or fewer.
    """
    for section in sections:
        if section.is_whole:
            continue
        leads = dict.fromkeys(span.lead.source for span in section.spans)
        parts = {index: placed[section.module, index] for index in (donor, *leads)}
        if parts[donor].stack is None:
            # That the config cannot be told of these layers is said elsewhere.
            del parts[donor]
        if len(parts) > 1:
            _check_layers(section, parts, donor, findings)
            _check_ends(section, parts, donor, findings, by_token=by_token)


def _check_layers(
    section: Section, parts: Mapping[int, PlacedTensors], donor: int, findings: Findings
) -> None:
    stacked = [_stacked(section, index, part) for index, part in parts.items()]
    reference = stacked[0]
    wanted = {kind for each in stacked for kind in each.used}
    wanted |= reference.own.keys() if donor in parts else set()
    fits = any(wanted <= each.own.keys() for each in stacked)
    for each in stacked:
        others = [other for other in stacked if other is not each]
        for kind, layer in each.used.items():
            whole = _whole_of(kind, each, others)
            if whole is not None:
                _report_hole(each, layer, whole - _suffixes(kind), findings)
            elif not fits and kind not in reference.own:
                _report_kind(each, layer, kind, reference, findings)


def _stacked(section: Section, index: int, part: PlacedTensors) -> _Stacked:
    taken = {
        span.lead.first_layer + offset
        for span in section.spans
        if span.lead.source == index
        for offset in range(span.num_layers or 0)
    }
    own: dict[_Kind, int] = {}
    used: dict[_Kind, int] = {}
    for layer, kind in enumerate(_kinds(part)):
        own.setdefault(kind, layer)
        if layer in taken:
            used.setdefault(kind, layer)
    return _Stacked(part, own, used)


def _kinds(part: PlacedTensors) -> Iterator[_Kind]:
    checkpoint = part.source.checkpoint
    found, tensors = part.by_place(), checkpoint.tensors
    # What is read as numbers is numbers, however each source stores them.
    numbers = checkpoint.packs.packed if checkpoint.packs is not None else {}
    for layer in range(part.num_layers):
        start = len(f"{part.prefix}.{layer}.")
        names = [name for name in found.get(layer, ()) if part.is_compared(name)]
        yield frozenset(
            (name[start:], tensors[name].shape, None if name in numbers else _codes(tensors[name]))
            for name in names
        )


def _codes(tensor: StoredTensor) -> DType | None:
    return None if tensor.dtype.is_mergeable else tensor.dtype


def _suffixes(kind: _Kind) -> frozenset[str]:
    return frozenset(suffix for suffix, _, _ in kind)


def _whole_of(kind: _Kind, own: _Stacked, others: Sequence[_Stacked]) -> frozenset[str] | None:
    """The tensors that a layer would have, had it not lost some; None where nothing is lost.

    Fewer tensors than in another layer of the same source are a kind of their own when a second source has
    such layers too, and a loss when none has.
    """
    mine = _suffixes(kind)
    if any(mine == _suffixes(each) for other in others for each in other.own):
        return None
    wholes = {_suffixes(each) for each in own.own}
    return min((each for each in wholes if mine < each), key=len, default=None)


def _report_hole(each: _Stacked, layer: int, lost: frozenset[str], findings: Findings) -> None:
    for suffix in sorted(lost):
        findings.tensor(
            ("hole", each.name),
            where=each.name,
            what="it lacks {count} tensors in single layers, which all others of its layers have",
            remedy="Use a complete checkpoint, or slices without those layers.",
            example=f"{each.placed.prefix}.{layer}.{suffix}",
        )


def _report_kind(each: _Stacked, layer: int, kind: _Kind, reference: _Stacked, findings: Findings) -> None:
    """Say how a layer differs from the most similar one of the reference."""
    mine = {suffix: (shape, codes) for suffix, shape, codes in kind}
    nearest = min(reference.own, key=lambda other: (len(mine.keys() ^ _suffixes(other)), len(kind ^ other)))
    theirs = {suffix: (shape, codes) for suffix, shape, codes in nearest}
    block = f"{each.placed.prefix}.{layer}"
    for suffix in sorted(mine.keys() & theirs.keys()):
        if mine[suffix] != theirs[suffix]:
            example = f"{block}.{suffix} is {_text(*mine[suffix])} here and {_text(*theirs[suffix])} there"
            _report_shape(each.name, reference.name, example, findings)
    for suffix in sorted(mine.keys() ^ theirs.keys()):
        findings.tensor(
            ("kind", each.name),
            where=each.name,
            what=f"its layers are made of other tensors than those of {reference.name}, and {_ONE_CONFIG}; "
            "{count} are only in one of the two",
            remedy=_REMEDY,
            example=f"{block}.{suffix} only {'here' if suffix in mine else 'there'}",
        )


def _report_shape(name: str, reference: str, example: str, findings: Findings) -> None:
    findings.tensor(
        ("stacked shape", name),
        where=name,
        what=f"{{count}} of its tensors have other shapes than in {reference}, and {_ONE_CONFIG}",
        remedy=_REMEDY,
        example=example,
    )


def _text(shape: tuple[int, ...], codes: DType | None) -> str:
    return f"{codes.value if codes is not None else ''}{list(shape)}"


def _check_ends(
    section: Section, parts: Mapping[int, PlacedTensors], donor: int, findings: Findings, *, by_token: bool
) -> None:
    """What stands before and after the layers, against the donor's, and by the names of the first source."""
    first, last = parts[section.spans[0].lead.source], parts[section.spans[-1].lead.source]
    giver = parts.get(donor)
    if giver is not None:
        _check_head(last, giver, findings, by_token=by_token)
        _check_end(first, giver, "before", findings, by_token=by_token)
        _check_end(last, giver, "after", findings, by_token=by_token)
    if last.prefix != first.prefix:
        _check_names(last, first, findings)


def _check_names(last: PlacedTensors, first: PlacedTensors, findings: Findings) -> None:
    """Every tensor after the layers needs a name by the first source's naming."""
    for name in last.by_place().get("after", ()):
        if not name.startswith(f"{last.prefix}.") and not _has_name(name, last, first):
            findings.tensor(
                ("names", last.source.name),
                where=last.source.name,
                what=f"its layers are called '{last.prefix}' and those of {first.source.name} "
                f"'{first.prefix}', and nothing there tells what {{count}} of its tensors would be called",
                remedy="Use checkpoints that were saved in the same way.",
                example=name,
            )


def _has_name(name: str, own: PlacedTensors, other: PlacedTensors) -> bool:
    pair = own.source.pair
    is_head = pair is not None and other.source.pair is not None and name == pair.head
    return is_head or counterpart(name, own, other) in other.source.checkpoint.tensors


def _check_end(
    lead: PlacedTensors, giver: PlacedTensors, end: End, findings: Findings, *, by_token: bool
) -> None:
    mine, theirs = _end(lead, end), _end(giver, end)
    called = {counterpart(name, lead, giver): tensor for name, tensor in mine.items()}
    for name in [*called, *(name for name in theirs if name not in called)]:
        here, there = called.get(name), theirs.get(name)
        if here is not None and there is not None:
            if not (by_token and _is_embedding(here, lead) and here.shape[1:] == there.shape[1:]):
                _compare(here, there, lead, giver, findings=findings)
            continue
        findings.tensor(
            ("ends", lead.source.name),
            where=lead.source.name,
            what=f"beside its layers it has other tensors than {giver.source.name}, which gives the config; "
            "{count} are only in one of the two",
            remedy="Use models of one architecture, saved in the same way.",
            example=f"{name} only {'here' if there is None else 'there'}",
        )


def _end(part: PlacedTensors, end: End) -> dict[str, StoredTensor]:
    """The tensors at an end but for the head, which may be the embedding."""
    names = part.by_place().get(end, ())
    pair, tensors = part.source.pair, part.source.checkpoint.tensors
    head = pair.head if pair is not None else None
    return {name: tensors[name] for name in names if name != head and part.is_compared(name)}


def _check_head(lead: PlacedTensors, giver: PlacedTensors, findings: Findings, *, by_token: bool) -> None:
    mine, theirs = lead.source.pair, giver.source.pair
    if mine is None or theirs is None:
        return
    here, there = _head(lead, mine), _head(giver, theirs)
    if not (by_token and here.shape[1:] == there.shape[1:]):
        _compare(here, there, lead, giver, findings=findings)


def _is_embedding(tensor: StoredTensor, part: PlacedTensors) -> bool:
    pair = part.source.pair
    return pair is not None and tensor.name == pair.embedding


def _head(part: PlacedTensors, pair: TiedPair) -> StoredTensor:
    tensors = part.source.checkpoint.tensors
    return tensors.get(pair.head) or tensors[pair.embedding]


def _compare(
    here: StoredTensor, there: StoredTensor, lead: PlacedTensors, giver: PlacedTensors, *, findings: Findings
) -> None:
    if here.shape != there.shape:
        example = f"{here.name} is {list(here.shape)} here and {list(there.shape)} there"
        _report_shape(lead.source.name, giver.source.name, example, findings)
