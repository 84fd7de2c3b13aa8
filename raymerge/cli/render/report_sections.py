"""What a report shows below its first screen: a figure or a table for each question."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from markupsafe import Markup

from raymerge.cli.render.figures import Line, Scale, heat_map, image, lines, number
from raymerge.cli.render.html_pieces import Cell, as_details, as_figure, as_matrix, as_panels, as_table, bar
from raymerge.cli.render.screen import printable
from raymerge.units import format_size
from raymerge.verifier.measurements import Floats, Measurements, Report, RouterRows
from raymerge.verifier.observations import changes_of, is_matrix, short_names

_EXTREME = 50
_MOST = 10
"""Panels of one kind; numbers of others are in tables."""
_COLUMNS = 768
"""Columns of the images of experts, of all parents together."""
_COLOURS = 8
_CONFLICTS = Scale(0, 0.6)


@dataclass(frozen=True, slots=True)
class Section:
    id: str
    title: str
    text: str
    body: Markup


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A report with the sums that several figures show; rows with NaN are left out."""

    report: Report
    measured: Measurements
    whole: Measurements
    """Of all matrices: one row, or none."""
    roles: Measurements
    layers: Measurements
    """By layer and role, of the stack with the most numbers."""
    stack: str
    names: tuple[str, ...]

    @property
    def labels(self) -> list[str]:
        """Number and name; B and its name, of two models that are compared."""
        return [f"{number} {printable(name)}" for number, name in zip(self.numbers, self.names, strict=True)]

    @property
    def numbers(self) -> list[str]:
        return ["B"] if self.report.kind == "diff" else [str(k + 1) for k in range(len(self.names))]

    @property
    def has_base(self) -> bool:
        return self.report.base is not None

    @property
    def is_merged(self) -> bool:
        return bool(len(self.whole) and self.whole.merged[0] > 0)

    @property
    def measure(self) -> str:
        return "relative change" if self.has_base else "relative distance"

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Of parents, those in most conflict first."""
        if not len(self.whole):
            return []
        conflict = np.nan_to_num(self.whole.pair_conflict[0])
        return sorted(combinations(range(len(self.names)), 2), key=lambda pair: -float(conflict[pair]))

    def changes(self, measured: Measurements) -> Floats:
        """Of the parents, by the measure: ``[n, P]``."""
        return changes_of(measured, has_base=self.has_base)


def make_subject(report: Report) -> Subject:
    measured = report.measurements.finite()
    matrices = measured.matching(is_matrix)
    by_layer = measured.grouped("stack", "layer", "role").matching(lambda each: each.layer >= 0)
    stacks = by_layer.grouped("stack")
    stack = stacks.labels[int(stacks.elements.argmax())].stack if len(stacks) else ""
    return Subject(
        report, measured, (matrices if len(matrices) else measured).grouped(), measured.grouped("role"),
        by_layer.matching(lambda each: each.stack == stack), stack, short_names(report.parents),
    )  # fmt: skip


def colour_of(k: int) -> str:
    """The class of a parent's colour."""
    return f"p{k % _COLOURS + 1}"


def short_count(count: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


_MOVED = (
    "Norm of what a parent adds to the base, by the base's norm. A layer far above the others is damaged, "
    "or was trained apart."
)
_APART = (
    "Distance of a parent from the nearest other one, by the norm of the weights; with a base, this would "
    "show what each of them changed."
)


def _depth(subject: Subject) -> Iterator[Section]:
    by_layer = subject.layers.matching(is_matrix).grouped("layer")
    layers, values = _in_order(by_layer, subject.changes(by_layer))
    if len(layers) > 1 and np.isfinite(values).any():
        title = f"{subject.measure.capitalize()} of the matrices of each layer, on a scale of logarithms"
        drawn = lines(_lines(subject, values), layers, title=title, is_log=True)
        heading = "How far the parents moved" if subject.has_base else "How far the parents are apart"
        heading = "How far B is from A" if subject.report.kind == "diff" else heading
        text = _MOVED if subject.has_base else _APART
        yield Section("depth", heading, text, as_figure(title, drawn))


def _lines(subject: Subject, values: Floats) -> list[Line]:
    return [Line(label, values[:, k], colour_of(k)) for k, label in enumerate(subject.labels)]


def _in_order(by_layer: Measurements, values: Floats) -> tuple[list[int], Floats]:
    order = sorted(range(len(by_layer)), key=lambda row: by_layer.labels[row].layer)
    return [by_layer.labels[row].layer for row in order], values[order]


def _by_role(subject: Subject) -> Iterator[Section]:
    roles = subject.roles
    counts = Counter(label.role for label in subject.measured.labels)
    rows = [
        [label.role, str(counts[label.role]), short_count(size), *map(number, changes)]
        for label, size, changes in zip(roles.labels, roles.elements, subject.changes(roles), strict=True)
    ]
    headers = ["role", "tensors", "numbers", *subject.labels]
    text = f"{subject.measure.capitalize()} of each parent"
    if subject.has_base and subject.pairs:
        headers.append("conflict")
        rows = [[*row, number(conflict)] for row, conflict in zip(rows, roles.conflict, strict=True)]
        text += ", and weighted sign conflict of all"
    if rows:
        table = as_table(headers, rows, numbers=range(1, len(headers)), has_row_headers=True)
        yield Section("roles", "By role", f"{text}.", table)


def _agreement(subject: Subject) -> Iterator[Section]:
    if not subject.pairs:
        return
    whole, labels = subject.whole, subject.labels
    text = "Of whole models. Unrelated changes have a cosine of 0, a conflict of 0.29, an overlap of 0.11."
    matrices = [
        as_matrix("Cosine of their changes", labels, whole.cosines[0], Scale(-1, 1, is_diverging=True)),
        as_matrix("Weighted sign conflict", labels, whole.pair_conflict[0], _CONFLICTS),
        as_matrix("Overlap of the largest changes", labels, whole.overlaps[0], Scale(0, 1)),
    ]
    if not subject.has_base:
        text = "Of whole models. Fine-tunes of one base are near 1, models that were trained apart near 0."
        matrices = [as_matrix("Cosine of their weights", labels, whole.cosines[0], Scale(0, 2))]
    body = Markup('<div class="side">{}</div>').format(Markup("").join(matrices))
    yield Section("agreement", "How the parents agree", text, body)


def _conflicts(subject: Subject) -> Iterator[Section]:
    if not (subject.has_base and subject.pairs and len(subject.layers)):
        return
    conflict, labels = subject.layers.pair_conflict, subject.labels
    titles = {(j, k): f"{labels[j]} and {labels[k]}" for j, k in subject.pairs[:_MOST]}
    panels = [_map(subject, conflict[:, j, k], _CONFLICTS, title) for (j, k), title in titles.items()]
    if len(subject.names) > 2:
        panels.insert(0, _map(subject, subject.layers.conflict, _CONFLICTS, "All parents together"))
    text = (
        "0: changes agree wherever they are large; 1: they cancel. Two unrelated changes of one size have "
        "0.29; above it they work against each other."
    )
    body = as_panels(panels, _CONFLICTS, "weighted sign conflict")
    yield Section("conflict", "Where changes cancel each other", text, body)


def _maps(subject: Subject) -> Iterator[Section]:
    changes = subject.changes(subject.layers)
    if len(subject.layers) and np.isfinite(changes).any():
        scale = Scale.of_sizes(changes, is_log=True)
        panels = [
            _map(subject, changes[:, k], scale, label) for k, label in enumerate(subject.labels[:_MOST])
        ]
        title = f"{subject.measure.capitalize()} by layer and role"
        text = "One scale of logarithms for all parents. Point at a cell for its number."
        yield Section("maps", title, text, as_panels(panels, scale, subject.measure))


def _map(subject: Subject, values: Floats, scale: Scale, title: str) -> Markup:
    """Of values of the subject's layers."""
    labels = subject.layers.labels
    roles = list(dict.fromkeys(label.role for label in labels))
    layers = sorted({label.layer for label in labels})
    grid = np.full((len(roles), len(layers)), np.nan)
    at_role, at_layer = ({each: i for i, each in enumerate(axis)} for axis in (roles, layers))
    for label, value in zip(labels, values, strict=True):
        grid[at_role[label.role], at_layer[label.layer]] = value
    return as_figure(title, heat_map(grid, roles, layers, scale, title=title))


def _shares(subject: Subject) -> Iterator[Section]:
    if not (subject.has_base and subject.is_merged):
        return
    by_layer = subject.layers.grouped("layer")
    layers, values = _in_order(by_layer, by_layer.shares)
    title = "Share of each parent's change that is in the result, by layer"
    drawn = [as_figure(title, lines(_lines(subject, values), layers, title=title))] if len(layers) > 1 else []
    roles = zip(subject.roles.labels, subject.roles.shares, strict=True)
    rows = [
        *([label.role, *map(number, shares)] for label, shares in roles),
        ["whole model", *map(number, subject.whole.shares[0])],
        ["cosine with the result", *map(number, subject.whole.merged_cosines[0])],
    ]
    table = as_table(["role", *subject.labels], rows, numbers=range(1, len(rows[0])), has_row_headers=True)
    text = (
        "1: the result has all of what the parent changed; 0: nothing of it. What parents changed alike "
        "counts for each of them."
    )
    yield Section("shares", "What each parent has in the result", text, Markup("").join([*drawn, table]))


def _experts(subject: Subject) -> Iterator[Section]:
    rows = subject.measured.matching(lambda each: each.expert >= 0 and each.stack == subject.stack)
    experts = rows.grouped("layer", "expert")
    changes = subject.changes(experts)
    if not np.isfinite(changes).any():
        return
    layers = sorted({label.layer for label in experts.labels})
    at = {layer: i for i, layer in enumerate(layers)}
    count = max(label.expert for label in experts.labels) + 1
    grid = np.full((len(subject.names), len(layers), count), np.nan)
    grid[:, [at[each.layer] for each in experts.labels], [each.expert for each in experts.labels]] = changes.T
    most = max(64, _COLUMNS // len(subject.names))
    binned = _binned(grid, most)
    scale = Scale.of_sizes(binned, is_log=True)
    panels = [
        as_figure(label, image(binned[k], layers, scale, title=label, num_columns=count))
        for k, label in enumerate(subject.labels[:_MOST])
    ]
    each = "" if count <= most else f" A column is the largest of {-(-count // most)} experts."
    text = f"{subject.measure.capitalize()} of each expert, a row a layer.{each}"
    yield Section("experts", "Experts", text, as_panels(panels, scale, subject.measure))


def _binned(grid: Floats, most: int) -> Floats:
    """``[..., at most so many]``: the largest of each few columns."""
    size = -(-grid.shape[-1] // most)
    padding = [(0, 0)] * (grid.ndim - 1) + [(0, -grid.shape[-1] % size)]
    groups = np.pad(grid, padding, constant_values=np.nan).reshape(*grid.shape[:-1], -1, size)
    largest = np.where(np.isfinite(groups), groups, -np.inf).max(-1)
    return np.asarray(np.where(np.isfinite(largest), largest, np.nan))


def _routers(subject: Subject) -> Iterator[Section]:
    pairs = defaultdict[tuple[int, int], list[RouterRows]](list)
    for each in sorted(subject.report.routers, key=lambda router: router.layer):
        pairs[each.first, each.second].append(each)
    ordered = sorted(pairs, key=lambda pair: (pair[1] >= 0, pair))
    panels = [_router_panel(subject, pair, pairs[pair]) for pair in ordered[:_MOST]]
    text = (
        "Cosine of each expert's row in two routers, a row a layer. Where rows are alike only at other "
        "places, the experts are in another order: align them."
    )
    if panels:
        yield Section("routers", "Routers", text, as_panels(panels, Scale(0, 1), "cosine"))


def _router_panel(subject: Subject, pair: tuple[int, int], routers: Sequence[RouterRows]) -> Markup:
    first, second = ("the base" if k < 0 else subject.labels[k] for k in pair)
    count = max(len(each.own) for each in routers)
    grid = np.full((len(routers), count), np.nan)
    for row, each in enumerate(routers):
        grid[row, : len(each.own)] = each.own
    elsewhere = [sum(place != row for row, place in enumerate(each.nearest)) for each in routers]
    total = sum(len(each.own) for each in routers)
    title = f"{first} against {second}: {sum(elsewhere)} of {total} rows are nearest to another expert's"
    layers = [each.layer for each in routers]
    drawn = image(_binned(grid, _COLUMNS // 2), layers, Scale(0, 1), title=title, num_columns=count)
    rows = [
        [
            str(each.layer), number(float(np.mean(each.own))), number(min(each.own)),
            number(float(np.mean(each.nearest_cosines))), f"{moved} of {len(each.own)}",
        ]
        for each, moved in zip(routers, elsewhere, strict=True)
    ]  # fmt: skip
    headers = ["layer", "own, mean", "own, least", "nearest, mean", "nearest is another"]
    return as_figure(title, drawn) + as_details("By layer", as_table(headers, rows, numbers=range(5)))


def _encodings(subject: Subject) -> Iterator[Section]:
    measured = subject.measured
    encoded = measured.where(measured.encoding_errors[:, 1] > 0).grouped("stored_as", "role")
    errors = encoded.encoding_error
    rows = [
        [label.stored_as or "plain", label.role, short_count(size), f"{error:.2%}", bar(error / errors.max())]
        for label, size, error in zip(encoded.labels, encoded.elements, errors, strict=True)
    ]
    if rows:
        table = as_table(["format", "role", "numbers", "error", ""], rows, numbers=(2, 3))
        text = "Norm of what encoding changed, by the norm of the merged numbers."
        yield Section("encoding", "What the encoding lost", text, table)


def _bytes(subject: Subject) -> Iterator[Section]:
    sizes = subject.report.nbytes_by_use or {}
    total = max(1, sum(sizes.values()))
    rows = [
        [printable(use), format_size(size), f"{size / total:.1%}", bar(size / total)]
        for use, size in sorted(sizes.items(), key=lambda item: -item[1])
    ]
    if rows and subject.report.kind != "diff":
        table = as_table(["", "bytes", "part", ""], rows, numbers=(1, 2), has_row_headers=True)
        yield Section("bytes", "What became of the sources' bytes", "", table)


def _speeds(subject: Subject) -> Iterator[Section]:
    speeds = subject.report.speeds
    longest = max((each.seconds for each in speeds), default=0) or 1
    rows = [
        [
            printable(each.stage), format_size(each.read_bytes), format_size(each.written_bytes),
            f"{each.seconds:.1f} s", _rate(each.read_bytes + each.written_bytes, each.seconds),
            bar(each.seconds / longest),
        ]
        for each in speeds
    ]  # fmt: skip
    if rows:
        headers = ["stage", "read", "written", "time", "speed", ""]
        table = as_table(headers, rows, numbers=(1, 2, 3, 4), has_row_headers=True)
        yield Section("speed", "Speed", "Seconds are those of all workers together.", table)


def _rate(nbytes: int, seconds: float) -> str:
    return f"{format_size(round(nbytes / seconds))}/s" if nbytes and seconds else number(np.nan)


def _extremes(subject: Subject) -> Iterator[Section]:
    measured = subject.measured.matching(is_matrix)
    changes = subject.changes(measured)
    most = np.nan_to_num(changes).max(1, initial=0)
    rows: list[list[Cell]] = [
        [
            Markup("<code>{}</code>").format(printable(measured.labels[row].part)), measured.labels[row].role,
            *map(number, changes[row]), number(float(measured.largest[row].max())),
        ]
        for row in np.argsort(-most, kind="stable")[:_EXTREME]
        if most[row] > 0
    ]  # fmt: skip
    if rows:
        headers = ["tensor", "role", *subject.labels, "largest |d|"]
        table = as_table(headers, rows, numbers=range(2, len(headers)))
        title = "The tensors that changed most" if subject.has_base else "The tensors furthest apart"
        text = f"{subject.measure.capitalize()} of each parent."
        yield Section("extremes", title, text, as_details(f"Show {len(rows)}", table))


def _skipped(subject: Subject) -> Iterator[Section]:
    rows = [
        [printable(reason), str(count)] for reason, count in (subject.report.skipped or {}).items() if count
    ]
    if rows:
        table = as_table(["reason", "parts of tensors"], rows, numbers=(1,), has_row_headers=True)
        yield Section("skipped", "What was not measured", "", table)


SECTIONS = (
    _depth, _by_role, _agreement, _conflicts, _maps, _shares, _experts, _routers, _encodings, _bytes, _speeds,
    _extremes, _skipped,
)  # fmt: skip
