"""The ``adapter`` block: the adapter that a merge of adapters writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from raymerge.documents.entry import by
from raymerge.documents.faults import Fault, FaultError
from raymerge.documents.fields import between, choice_of, read_number
from raymerge.recipes.entry import Entry


def _energy(value: object) -> float:
    energy = read_number(value)
    if not 0 < energy <= 1:
        what = f"{energy} is not a share of the energy."
        raise FaultError(Fault((), what, "Write a number above 0 and up to 1, like 0.99."))
    return energy


class AdapterOutput(Entry):
    """How the merged change of each matrix becomes two factors again."""

    shape: ClassVar[str] = "a map like {rank: 16}"

    rank: Annotated[int, by(between(1))] | None = None
    """Largest rank of a matrix; None for the largest that the sources have."""
    combine: Annotated[Literal["svd", "concatenate"], by(choice_of("svd", "concatenate"))] = "svd"
    """``svd``: the best factors of that rank; ``concatenate``: the sources' own side by side, which is exact
    and adds up their ranks."""
    energy: Annotated[float, by(_energy)] | None = None
    """Share of the squared singular values that is enough, so that ranks may be smaller; None for all."""

    @classmethod
    def rules(cls, data: Mapping[str, Any]) -> Iterable[Fault]:
        """Concatenated factors are not cut."""
        if data.get("combine") != "concatenate":
            return
        for key in ("rank", "energy"):
            if data.get(key) is not None:
                what = f"'{key}' limits the rank, which 'combine: concatenate' does not do."
                yield Fault((key,), what, f"Remove '{key}', or write 'combine: svd'.")
