"""Which stored tensors of a checkpoint's mixture-of-experts blocks hold what of each expert.

A tensor either belongs to one expert, whose number is in its name, or has an equal share for each expert, one
behind the other: fused matrices, codes and scales of quantised ones, router rows, router biases. Dropping or
moving an expert needs to know no more."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from raymerge.architectures.roles import EXPERT_NUMBER, Stack, TensorInfo, canonical_block, fused_layout
from raymerge.architectures.rules import Role, config_int
from raymerge.checkpoints.header import StoredTensor
from raymerge.errors import Findings
from raymerge.planner.inputs.quantised import quantised_tensors
from raymerge.planner.inputs.sources import Source
from raymerge.planner.matching.logical import LogicalTensors
from raymerge.planner.outputs.routing_tables import is_routing_table

_ROUTER_PARTS = (Role.ROUTER, Role.ROUTER_BIAS)
_SHARED_PARTS = (Role.SHARED_EXPERT, Role.SHARED_EXPERT_GATE)


@dataclass(frozen=True, slots=True)
class Stacked:
    tensor: StoredTensor
    part: Role
    share: tuple[int, ...]
    is_flattened: bool = False
    first: int = 0

    def name(self, expert: int) -> str:  # noqa: ARG002 - as ``Numbered.name``, where it makes a difference
        return self.tensor.name

    def start(self, expert: int) -> int:
        return expert * prod(self.share)

    def shape(self, num_experts: int) -> tuple[int, ...]:
        whole = self.tensor.shape
        if self.is_flattened:
            return (num_experts * self.share[0], *whole[1:])
        axis = len(whole) - len(self.share) - 1
        return (*whole[:axis], num_experts, *whole[axis + 1 :])


@dataclass(frozen=True, slots=True)
class Numbered:
    before: str
    after: str
    tensors: Mapping[int, StoredTensor]
    """By expert, in order. Some may be absent, where codes and plain numbers are mixed."""
    part: Role = Role.EXPERT

    @property
    def first(self) -> int:
        return next(iter(self.tensors))

    @property
    def share(self) -> tuple[int, ...]:
        return self.tensors[self.first].shape

    def name(self, expert: int) -> str:
        return f"{self.before}{expert}{self.after}"

    def start(self, expert: int) -> int:  # noqa: ARG002 - as ``Stacked.start``
        return 0

    def shape(self, num_experts: int) -> tuple[int, ...]:  # noqa: ARG002 - as ``Stacked.shape``
        return self.share


Kind: TypeAlias = Stacked | Numbered
"""How one kind of tensor (a projection, a scale, router rows) is stored for all experts of a block."""


@dataclass(frozen=True, slots=True)
class ExpertBlock:
    path: str
    canonical: str
    layer: int
    """Multi-token-prediction layers are numbered after all others."""
    name_layer: int
    is_mtp: bool
    num_experts: int
    stacked: tuple[Stacked, ...]
    numbered: tuple[Numbered, ...]
    routers: tuple[str, ...]
    shared: tuple[str, ...]
    tables: tuple[StoredTensor, ...] = ()
    """Of numbers of experts by token."""

    @property
    def has_selection_bias(self) -> bool:
        return any(each.part is Role.ROUTER_BIAS for each in self.stacked)

    def names(self) -> Iterator[str]:
        yield from (each.tensor.name for each in self.stacked)
        for each in self.numbered:
            yield from (tensor.name for tensor in each.tensors.values())


def expert_blocks(
    source: Source, logical: LogicalTensors, num_experts: int, findings: Findings
) -> tuple[ExpertBlock, ...]:
    """The blocks of text layers, and of those that predict further tokens unless the config has a number of
    experts for these alone."""
    main = source.layer_stack(None)
    has_own_mtp = config_int(source.checkpoint.config, source.rules.sizes["mtp_experts"]) is not None
    quantised = quantised_tensors(source.checkpoint)
    findings.extend(quantised.faults)
    codes = quantised.members.keys() | quantised.unknown.keys()
    members: dict[str, list[tuple[StoredTensor, TensorInfo]]] = {}
    for name, info in logical.infos.items():
        is_apart = has_own_mtp and info.role is Role.MTP
        if info.block is not None and main is not None and _is_text(info, main) and not is_apart:
            members.setdefault(info.block, []).append((source.checkpoint.tensors[name], info))
    blocks = [
        _block(source, path, own, num_experts, codes, findings)
        for path, own in members.items()
        if any(info.part is Role.EXPERT for _, info in own)
    ]
    return tuple(sorted(blocks, key=lambda block: block.layer))


def _is_text(info: TensorInfo, main: Stack) -> bool:
    return info.layer is not None and (info.stack == main.prefix or info.role is Role.MTP)


def _block(
    source: Source,
    path: str,
    members: Sequence[tuple[StoredTensor, TensorInfo]],
    num_experts: int,
    codes: Collection[str],
    findings: Findings,
) -> ExpertBlock:
    experts = [(tensor, info) for tensor, info in members if info.part is Role.EXPERT]
    scoring = [(tensor, info.part) for tensor, info in members if info.part in _ROUTER_PARTS]
    tables = [each for each, part in scoring if is_routing_table(each, part) and each.name not in codes]
    routers = [(tensor, part) for tensor, part in scoring if tensor not in tables]
    fused = [tensor for tensor, info in experts if info.expert is None]
    stacked = [
        *(_stacked_experts(source, tensor, num_experts, findings) for tensor in fused),
        *(_stacked_router(tensor, part, num_experts) for tensor, part in routers),
    ]
    info, main = experts[0][1], source.layer_stack(None)
    layer = info.layer or 0
    is_apart = main is not None and main.prefix and not path.startswith(f"{main.prefix}.")
    block = ExpertBlock(
        path=path,
        canonical=canonical_block(path, source.rules),
        layer=layer + (main.num_layers if main is not None and is_apart else 0),
        name_layer=layer,
        is_mtp=info.role is Role.MTP,
        num_experts=num_experts,
        stacked=tuple(each for each in stacked if each is not None),
        numbered=_numbered([(tensor, own) for tensor, own in experts if own.expert is not None]),
        routers=tuple(tensor.name for tensor, _ in scoring),
        shared=tuple(tensor.name for tensor, own in members if own.part in _SHARED_PARTS),
        tables=tuple(tables),
    )
    _check_numbers(source, block, codes, findings)
    _check_routers(source, block, [tensor for tensor, _ in routers], findings)
    return block


def _stacked_experts(
    source: Source, tensor: StoredTensor, num_experts: int, findings: Findings
) -> Stacked | None:
    shape = tensor.shape
    layout = fused_layout(tensor.name, shape, source.checkpoint.config, source.rules)
    if layout is not None and layout.kind in ("rows", "rows_transposed") and shape[0] % num_experts == 0:
        return Stacked(tensor, Role.EXPERT, (shape[0] // num_experts, *shape[1:]), True)
    if len(shape) > 1 and shape[0] == num_experts:
        return Stacked(tensor, Role.EXPERT, shape[1:])
    findings.tensor(
        source.name,
        f"{{count}} tensors of experts are not {num_experts} equal shares, one for each expert that "
        "the config counts",
        "Use a checkpoint as its family publishes it, with experts one by one or stacked.",
        example=f"{tensor.name} {list(shape)}",
    )
    return None


def _stacked_router(tensor: StoredTensor, part: Role, num_experts: int) -> Stacked | None:
    """A router's matrix ``[experts, hidden]`` or its biases, ``[experts]`` or ``[1, experts]``; or None."""
    if tensor.shape[:1] == (num_experts,):
        return Stacked(tensor, part, tensor.shape[1:])
    if part is Role.ROUTER_BIAS and tensor.shape == (1, num_experts):
        return Stacked(tensor, part, ())
    return None


def _numbered(members: Sequence[tuple[StoredTensor, TensorInfo]]) -> tuple[Numbered, ...]:
    kinds: dict[tuple[str, str], dict[int, StoredTensor]] = {}
    for tensor, info in members:
        number = EXPERT_NUMBER.search(tensor.name)
        if number is not None and info.expert is not None:
            key = tensor.name[: number.start(1)], tensor.name[number.end(1) :]
            kinds.setdefault(key, {})[info.expert] = tensor
    return tuple(Numbered(before, after, tensors) for (before, after), tensors in kinds.items())


def _check_numbers(source: Source, block: ExpertBlock, codes: Collection[str], findings: Findings) -> None:
    modules: dict[tuple[str, str], list[Numbered]] = {}
    for each in block.numbered:
        modules.setdefault((each.before, each.after.rpartition(".")[0]), []).append(each)
    for kinds in modules.values():
        for each, absent in _absent(kinds, block.num_experts, codes):
            findings.tensor(
                source.name,
                f"the config counts {block.num_experts} experts, and {{count}} kinds of tensors are "
                "stored for others",
                "Use a complete checkpoint.",
                example=f"{each.name(absent[0])}",
            )


def _absent(
    kinds: Sequence[Numbered], num_experts: int, codes: Collection[str]
) -> Iterator[tuple[Numbered, Sequence[int]]]:
    """Kinds of tensors of one module that are stored for other experts than they should be.

    Some experts may be quantised and others not. All experts of either sort have the same tensors."""
    experts = set(range(num_experts))
    stored = {expert for kind in kinds for expert in kind.tensors}
    coded = {e for kind in kinds for e, tensor in kind.tensors.items() if tensor.name in codes} & experts
    for kind in kinds:
        alike = [sort for sort in (coded, experts - coded) if not sort.isdisjoint(kind.tensors)]
        missing = (experts - stored).union(*alike) - kind.tensors.keys()
        strange = [*sorted(missing), *sorted(kind.tensors.keys() - experts)]
        if strange:
            yield kind, strange


def _check_routers(
    source: Source, block: ExpertBlock, routers: Sequence[StoredTensor], findings: Findings
) -> None:
    taken = {each.tensor.name for each in block.stacked}
    rows = [each for each in block.stacked if each.part is Role.ROUTER and len(each.tensor.shape) == 2]
    strange = [
        each
        for each in routers
        if each.name not in taken and (not each.dtype.is_mergeable or block.num_experts in each.shape[1:])
    ]
    if not rows and not strange:
        strange = list(routers)
    for tensor in strange:
        findings.tensor(
            source.name,
            f"{{count}} tensors of routers do not have a row for each of {block.num_experts} experts, "
            "so that raymerge cannot tell what becomes of them",
            "The experts of such a checkpoint cannot be changed.",
            example=f"{tensor.name} {tensor.dtype.value}{list(tensor.shape)}",
        )
    if not rows and not routers:
        findings.tensor(
            source.name,
            "{count} layers have experts and no router",
            "Use a complete checkpoint.",
            example=block.path,
        )
