"""Whether adapters can be merged with one another, and by which method."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from raymerge.checkpoints.adapters import Adapter, Factor
from raymerge.errors import Problem
from raymerge.methods import Method

ADDITIVE = ("linear", "task_arithmetic")
"""Methods whose result is a sum of the sources, each times a number."""
Where: TypeAlias = Callable[..., str]
"""Names the place of a recipe's field, given as the steps to it."""
COMBINING = (*ADDITIVE, "ties", "dare_linear", "dare_ties")
"""Methods that merge adapters."""


def field_path(*path: str | int) -> str:
    """``adapter.combine``: the place of a field where there is no recipe's text."""
    return ".".join(map(str, path))


def check_adapters(
    adapters: Sequence[Adapter], method: Method, *, concatenates: bool, where: Where = field_path
) -> list[Problem]:
    """Everything that keeps these adapters from being merged.

    Args:
        adapters: what shall be merged.
        method: by which method.
        concatenates: whether factors are laid side by side.
        where: names the places of a recipe's fields.
    """
    problems = [*_too_few(adapters, where("models"))]
    problems.extend(_method_problems(method, where, concatenates=concatenates))
    problems.extend(_misfits(adapters))
    for adapter in adapters:
        problems.extend(_unmergeable(adapter, method))
    problems.extend(_lacking(adapters))
    problems.extend(_replacements(adapters, method, where("merge_method")))
    return problems


def _too_few(adapters: Sequence[Adapter], place: str) -> Iterator[Problem]:
    if len(adapters) < 2:
        what = f"{len(adapters)} adapter{' is' if len(adapters) == 1 else 's are'} given."
        yield Problem(place, what, "A merge of adapters needs two or more.")
    elif not any(adapter.factors for adapter in adapters):
        yield Problem(place, "no adapter has factors.", "Merge the models themselves.")


def _method_problems(method: Method, where: Where, *, concatenates: bool) -> Iterator[Problem]:
    if method.name not in COMBINING:
        what = f"{method.name} does not merge adapters."
        yield Problem(where("merge_method"), what, f"Take one of {', '.join(COMBINING)}.")
    elif concatenates and method.name not in ADDITIVE:
        what = f"{method.name} changes single elements, which factors side by side cannot say."
        remedy = "Write 'combine: svd', or take merge_method linear."
        yield Problem(where("adapter", "combine"), what, remedy)


def _misfits(adapters: Sequence[Adapter]) -> Iterator[Problem]:
    first: dict[str, tuple[str, Factor]] = {}
    for adapter in adapters:
        if adapter.config.fan_in_fan_out != adapters[0].config.fan_in_fan_out:
            what = f"fan_in_fan_out is {adapter.config.fan_in_fan_out}, unlike in {adapters[0].name}."
            yield Problem(adapter.name, what, "Merge adapters of one model only.")
        for module, factor in adapter.factors.items():
            name, known = first.setdefault(module, (adapter.name, factor))
            if _sides(known) != _sides(factor):
                what = f"module {module} has {_sides(factor)}, but {_sides(known)} in {name}."
                yield Problem(adapter.name, what, "Merge adapters of one model only.")


def _sides(factor: Factor) -> str:
    """What must agree between factors of one module, as a phrase."""
    return f"{factor.kind} factors of {factor.up.shape[0]} x {factor.down.shape[1]}"


def _unmergeable(adapter: Adapter, method: Method) -> Iterator[Problem]:
    dora = [factor.module for factor in adapter.factors.values() if factor.magnitude is not None]
    if dora:
        what = f"has DoRA's magnitudes ({dora[0]}, ...): its change hangs on the model's own weights."
        remedy = "Merge it into its model, and merge the models."
        yield Problem(adapter.name, what, remedy)
    biased = [factor.module for factor in adapter.factors.values() if factor.up_bias is not None]
    if biased and method.name not in ADDITIVE:
        what = f"changes the bias of {biased[0]}, which {method.name} does not merge."
        yield Problem(adapter.name, what, f"Take one of {', '.join(ADDITIVE)}.")


def _lacking(adapters: Sequence[Adapter]) -> Iterator[Problem]:
    """Tensors that only some save whole: in the others they are the model's own, which is not known here."""
    names = dict.fromkeys(name for adapter in adapters for name in adapter.replaced)
    for adapter in {adapter.name: adapter for adapter in adapters}.values():
        lacking = [name for name in names if name not in adapter.replaced]
        if lacking:
            they_are = "it is" if len(lacking) == 1 else "they are"
            what = f"holds no {_listed(lacking)}, which others hold whole, and what {they_are} in the model"
            remedy = "Merge the models with their adapters instead (MODEL+ADAPTER), "
            remedy += "or extract with --embeddings skip --rest skip."
            yield Problem(adapter.name, f"{what} is not known here.", remedy)


def _replacements(adapters: Sequence[Adapter], method: Method, place: str) -> Iterator[Problem]:
    """Tensors that all save whole can be averaged; what else a method does needs the model's own."""
    names = dict.fromkeys(name for adapter in adapters for name in adapter.replaced)
    whole: list[str] = []
    for name in names:
        found = [adapter.replaced[name] for adapter in adapters if name in adapter.replaced]
        shapes = {tensor.shape for tensor in found}
        if len(found) < len(adapters):
            continue
        if len(shapes) > 1:
            what = f"{name} has the shapes {', '.join(str(list(shape)) for shape in sorted(shapes))}."
            yield Problem(name, what, "Merge adapters of one vocabulary only.")
        elif method.name != "linear":
            whole.append(name)
        elif any(not tensor.dtype.is_mergeable for tensor in found):
            what = f"{name} does not hold plain numbers."
            yield Problem(name, what, "Save the adapters with it in a float dtype.")
    if whole:
        is_or_are = "is" if len(whole) == 1 else "are"
        what = f"{_listed(whole)} {is_or_are} saved whole: {method.name} cannot merge that without the model."
        yield Problem(place, what, "Take linear, or merge the models with their adapters.")


def _listed(names: Sequence[str]) -> str:
    """The one name, or the first and how many there are."""
    return names[0] if len(names) == 1 else f"{names[0]}, ... ({len(names)} tensors)"
