"""The text of a document with scalars replaced and keys taken out; all else stays as it was written."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping

from yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode, SequenceNode

from raymerge.documents.fields import FieldPath
from raymerge.documents.positions import Part

_PROPERTIES = re.compile(r"(?:[&!]\S*\s+)*")
_ANCHOR = re.compile(r"&\S+\s+")
_SAFE = re.compile(r"[A-Za-z0-9_.+-][A-Za-z0-9_./+-]*")
"""Plain scalars that mean the same in every place of a document."""


def node_at(part: Part, path: FieldPath) -> Node | None:
    """None where there is none, or where it comes from a ``<<``."""
    node: Node | None = part.root
    for step in path:
        if isinstance(node, MappingNode):
            node = next((value for key, value in node.value if key.value == step), None)
        elif isinstance(node, SequenceNode) and isinstance(step, int) and step < len(node.value):
            node = node.value[step]
        else:
            return None
    return node


def scalar_at(part: Part, path: FieldPath) -> str | None:
    """The scalar at a path as it can stand anywhere in a document; None where there is none."""
    node = node_at(part, path)
    if not isinstance(node, ScalarNode):
        return None
    is_safe = node.style is None and _SAFE.fullmatch(node.value) is not None
    return node.value if is_safe else json.dumps(node.value)


def edited(part: Part, replaced: Mapping[str, str], removed: Collection[str]) -> str:
    """The text of ``part`` with scalars whose whole value is a key of ``replaced`` written as the text there,
    and without the top-level keys ``removed``."""
    values = (node for node in _scalar_values(part.root) if node.value in replaced)
    nodes: dict[Node, str] = {node: replaced[node.value] for node in values}
    return _applied(part, nodes, removed)


def edited_at(part: Part, replaced: Mapping[FieldPath, str], removed: Collection[str]) -> str:
    """As ``edited``, with the values at these paths replaced; what has an alias of one changes with it."""
    nodes = {node: text for path, text in replaced.items() if (node := node_at(part, path)) is not None}
    return _applied(part, nodes, removed)


def _applied(part: Part, replaced: Mapping[Node, str], removed: Collection[str]) -> str:
    cuts = list(_cuts(part, removed))
    changes = {**_replacements(part, replaced), **dict.fromkeys(cuts, "")}
    text, start = part.text, part.start
    for first, last in sorted(changes, reverse=True):
        if any(low <= first and last <= high and (low, high) != (first, last) for low, high in cuts):
            continue
        text = text[: first - start] + changes[first, last] + text[last - start :]
    return text


def _replacements(part: Part, replaced: Mapping[Node, str]) -> dict[tuple[int, int], str]:
    changes: dict[tuple[int, int], str] = {}
    for node, text in replaced.items():
        first, last = node.start_mark.index, _end(node)
        properties = _PROPERTIES.match(part.text[first - part.start : last - part.start])
        anchor = _ANCHOR.search(properties[0]) if properties is not None else None
        changes[first, last] = f"{anchor[0] if anchor is not None else ''}{text}"
    return changes


def _scalar_values(root: Node) -> Iterator[ScalarNode]:
    """Every scalar that is no key, once."""
    seen, left = set[int](), [root]
    while left:
        node = left.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, ScalarNode):
            yield node
        elif isinstance(node, MappingNode):
            left += (value for _, value in node.value)
        elif isinstance(node, SequenceNode):
            left += node.value


def _cuts(part: Part, removed: Collection[str]) -> Iterator[tuple[int, int]]:
    root = part.root
    assert isinstance(root, MappingNode)
    gone = [key.value in removed for key, _ in root.value]
    for index, (key, value) in enumerate(root.value):
        if not gone[index]:
            continue
        first, last = key.start_mark.index, max(key.end_mark.index, _end(value))
        if not root.flow_style:
            yield _whole_lines(part, first, last)
        elif not all(gone[index:]):
            yield first, root.value[index + 1][0].start_mark.index
        else:
            yield _end(root.value[index - 1][1]) if index else first, last


def _whole_lines(part: Part, first: int, last: int) -> tuple[int, int]:
    begin = part.text.rfind("\n", 0, first - part.start) + 1
    newline = part.text.find("\n", max(last - part.start - 1, 0))
    return begin + part.start, part.start + (len(part.text) if newline < 0 else newline + 1)


def _end(node: Node) -> int:
    """Behind the last character: a block ends where the next one begins, comments between them included."""
    if not isinstance(node, CollectionNode) or node.flow_style or not node.value:
        return node.end_mark.index
    last = node.value[-1]
    return _end(last[1] if isinstance(last, tuple) else last) or node.end_mark.index
