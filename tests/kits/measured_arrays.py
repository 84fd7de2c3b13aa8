"""Measurements of a merge by plain numpy in float64, from whole arrays."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from raymerge.verifier.measurements import ARRAYS, SKETCH, Floats, Label, Measurements, RouterRows

Arrays = Mapping[str, NDArray[np.floating]]
ROLES = {
    r"\.experts\.\d+\.": "expert", r"\.gate\.weight": "router", "norm": "norm", "embed": "embedding",
    "lm_head": "head", "self_attn": "attention", "mlp": "mlp",
}  # fmt: skip


def label_of(name: str, *, method: str = "linear") -> Label:
    """For names such as those of Llama and Qwen's mixtures."""
    layer = re.match(r"(.*layers)\.(\d+)\.", name)
    expert = re.search(r"experts\.(\d+)\.", name)
    role = next((role for pattern, role in ROLES.items() if re.search(pattern, name)), "other")
    stack, number = (layer[1], int(layer[2])) if layer else ("", -1)
    return Label(name, name, stack, number, role, int(expert[1]) if expert else -1, method)


def measure(
    parents: Sequence[Arrays], base: Arrays | None = None, merged: Arrays | None = None,
    *, label: Callable[[str], Label] = label_of,
) -> Measurements:  # fmt: skip
    """A row a name, in the order of the base or else of the parents; who lacks a name has no part in it."""
    names = dict.fromkeys(name for each in ([base] if base is not None else parents) for name in each)
    rows = [_row(label(name), parents, base, merged) for name in names]
    arrays = {name: np.concatenate([getattr(each, name) for each in rows]) for name in ARRAYS}
    return Measurements(tuple(each.labels[0] for each in rows), **arrays)


def _row(label: Label, parents: Sequence[Arrays], base: Arrays | None, merged: Arrays | None) -> Measurements:
    name = label.tensor
    here = [name in each for each in parents]
    like = np.asarray(next(each[name] for each in ([base] if base is not None else parents) if name in each))
    zero = np.zeros(like.size)
    b = np.asarray(base[name], dtype=np.float64).ravel() if base is not None else zero
    weights = [np.asarray(each.get(name, zero), dtype=np.float64).ravel() for each in parents]
    d = np.array([t - b if is_here else zero for t, is_here in zip(weights, here, strict=True)])
    m = np.asarray(merged[name], dtype=np.float64).ravel() - b if merged is not None else zero
    step = np.where(b != 0, 2.0 ** (np.floor(np.log2(np.where(b != 0, np.abs(b), 1))) - 7), 0)
    part = np.array(here, dtype=np.float64)
    both = part * part[:, None]
    projection = np.random.default_rng(like.size).standard_normal((SKETCH, like.size))
    values: dict[str, Floats] = {
        "elements": np.array(float(like.size)), "sampled": np.array(float(like.size)),
        "present": part * like.size, "base": part * (b @ b), "gram": d @ d.T,
        "magnitudes": np.abs(d).sum(1), "magnitude_of_sum": np.abs(d.sum(0)).sum(),
        "pair_magnitudes": np.abs(d[:, None] + d[None]).sum(-1) * both,
        "zeros": (d == 0).sum(1) * part,
        "invisible": ((d != 0) & (np.abs(d) < step)).sum(1) * part,
        "largest": np.abs(d).max(1), "overlap": _overlaps(np.abs(d)) * like.size * both,
        "shared": both * like.size, "shared_squares": both * (d * d).sum(1)[:, None],
        "shared_magnitudes": both * np.abs(d).sum(1)[:, None],
        "merged": np.asarray(m @ m), "merged_squares": part * (m @ m), "merged_dots": d @ m,
        "encoding_errors": np.zeros(2), "variance": np.array(0.0),
        "sketches": np.array([projection @ each for each in (*weights, b)]),
    }  # fmt: skip
    return Measurements((label,), **{name: np.asarray(value)[None] for name, value in values.items()})


def _overlaps(sizes: Floats) -> Floats:
    """Jaccard index of the fifths with the largest sizes; of equal ones the first count, 0 never."""
    count = max(1, sizes.shape[1] // 5)
    chosen = [{i for i in np.argsort(-row, kind="stable")[:count].tolist() if row[i]} for row in sizes]
    return np.array([[len(one & other) / max(1, len(one | other)) for other in chosen] for one in chosen])


def router_rows(name: str, layer: int, models: Mapping[int, Arrays]) -> list[RouterRows]:
    """Of each two models by index; -1 is the base, which comes second."""
    pairs = [(j, k) for j in models for k in models if j >= 0 and (k > j or k < 0)]
    return [_compared(name, layer, j, k, models[j][name], models[k][name]) for j, k in pairs]


def _compared(
    name: str, layer: int, first: int, second: int, a: NDArray[np.floating], b: NDArray[np.floating]
) -> RouterRows:
    cosines = _unit(a) @ _unit(b).T
    own, nearest, best = np.diagonal(cosines), cosines.argmax(1), cosines.max(1)
    return RouterRows(
        name, layer, first, second, tuple(own.tolist()), tuple(nearest.tolist()), tuple(best.tolist())
    )


def _unit(rows: NDArray[np.floating]) -> Floats:
    exact = np.asarray(rows, dtype=np.float64)
    return np.asarray(exact / np.linalg.norm(exact, axis=1, keepdims=True))
