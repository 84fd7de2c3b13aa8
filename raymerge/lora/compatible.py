"""Whether adapters can be merged with one another, and by which method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raymerge.checkpoints.adapters import Adapter, Factor
from raymerge.errors import Problem
from raymerge.methods import Method

ADDITIVE = ("linear", "task_arithmetic")
"""Methods whose result is a sum of the sources, each times a number."""
COMBINING = (*ADDITIVE, "ties", "dare_linear", "dare_ties")
"""Methods that merge adapters."""


def check_adapters(adapters: Sequence[Adapter], method: Method, *, concatenates: bool) -> list[Problem]:
    """Everything that keeps these adapters from being merged."""
    problems = [*_method_problems(adapters, method, concatenates=concatenates)]
    problems.extend(_misfits(adapters))
    for adapter in adapters:
        problems.extend(_unmergeable(adapter, method))
    problems.extend(_replacements(adapters, method))
    return problems


def _method_problems(adapters: Sequence[Adapter], method: Method, *, concatenates: bool) -> Iterator[Problem]:
    if len(adapters) < 2:
        what = f"{len(adapters)} adapter{' is' if len(adapters) == 1 else 's are'} given."
        yield Problem("models", what, "A merge of adapters needs two or more.")
    elif not any(adapter.factors for adapter in adapters):
        what = "no adapter has factors."
        yield Problem("models", what, "Merge the models themselves.")
    if method.name not in COMBINING:
        what = f"{method.name} does not merge adapters."
        yield Problem("merge_method", what, f"Take one of {', '.join(COMBINING)}.")
    elif concatenates and method.name not in ADDITIVE:
        what = f"{method.name} changes single elements, which factors side by side cannot say."
        yield Problem("adapter.combine", what, "Write 'combine: svd', or take merge_method linear.")


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


def _replacements(adapters: Sequence[Adapter], method: Method) -> Iterator[Problem]:
    """Tensors saved whole: the model's own are not known here, so all must have them and be averaged."""
    names = dict.fromkeys(name for adapter in adapters for name in adapter.replaced)
    for name in names:
        found = [adapter.replaced.get(name) for adapter in adapters]
        lacking = [a.name for a, tensor in zip(adapters, found, strict=True) if tensor is None]
        shapes = {tensor.shape for tensor in found if tensor is not None}
        if lacking:
            what = f"holds no {name}, which others hold whole, and what it is in the model is not known here."
            yield Problem(lacking[0], what, "Merge the models with their adapters instead (MODEL+ADAPTER).")
        elif len(shapes) > 1:
            what = f"{name} has the shapes {', '.join(str(list(shape)) for shape in sorted(shapes))}."
            yield Problem(name, what, "Merge adapters of one vocabulary only.")
        elif method.name != "linear":
            what = f"{name} is saved whole, which {method.name} cannot merge without the model."
            yield Problem("merge_method", what, "Take linear, or merge the models with their adapters.")
        elif any(tensor is not None and not tensor.dtype.is_mergeable for tensor in found):
            what = f"{name} does not hold plain numbers."
            yield Problem(name, what, "Save the adapters with it in a float dtype.")
