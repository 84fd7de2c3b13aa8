"""YAML text to plain data with source positions, secrets in it refused; and plain data to YAML text.

Only maps, lists, texts, numbers, booleans and null: no tags, no code, and a bound on the expansion of
aliases."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import yaml
from yaml import Mark
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from raymerge.documents.fields import DocumentKind, Fault, FieldPath
from raymerge.errors import Problem, UserError

MAX_NODES = 10_000
MAX_DEPTH = 64
"""Nesting in one document; an alias that contains itself exceeds any such bound."""
MAX_DOCUMENTS = 100

_NUMBER = re.compile("0|[1-9][0-9]*")
_PLACE = re.compile(r"(.+?):([0-9]+):([0-9]+)(?=$|: )")
_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = frozenset(f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str", "map", "seq"))
_MERGE_TAG = f"{_TAG}merge"
_DATE_TAG = f"{_TAG}timestamp"


@dataclass(frozen=True, slots=True)
class Places:
    name: str
    marks: Mapping[FieldPath, tuple[int, int]] = field(default_factory=dict)
    """Line and column, from 1, of each key and list item; empty without a text."""
    renamed: Mapping[FieldPath, str] = field(default_factory=dict)
    """Keys that are read under another name than written: by the path as read, below parents as written."""
    left_out: frozenset[FieldPath] = frozenset()
    """List items that are not read: those behind them have smaller numbers than in the text."""

    def as_written(self, path: FieldPath) -> FieldPath:
        written: FieldPath = ()
        for step in path:
            if isinstance(step, int):
                gone = sorted(int(each[-1]) for each in self.left_out if each[:-1] == written)
                for number in gone:
                    step += number <= step
            written = (*written, self.renamed.get((*written, step), step))
        return written

    def mark(self, path: FieldPath) -> tuple[int, int]:
        """Line and column of ``path`` or its nearest known parent; ``(0, 0)`` without a text."""
        path = self.as_written(path)
        while path and path not in self.marks:
            path = path[:-1]
        return self.marks.get(path, (0, 0))

    def at(self, path: FieldPath) -> str:
        """``recipe.yml:7:18``, or ``recipe: models[0].parameters.weight`` without a text."""
        if self.marks:
            return spot(self.name, self.mark(path))
        written = self.as_written(path)
        steps = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in written)
        return f"{self.name}: {steps.removeprefix('.')}" if steps else self.name

    def problems(self, faults: list[Fault]) -> list[Problem]:
        ordered = sorted(faults, key=lambda fault: self.mark(fault.path))
        return [Problem(self.at(fault.path), self._named(fault), fault.remedy) for fault in ordered]

    def _named(self, fault: Fault) -> str:
        """The fault with its key in front, if neither its position nor its text has the key."""
        key = fault.path[-1] if fault.path else None
        if not self.marks or not isinstance(key, str):
            return fault.what
        named = f"'{key}'" in fault.what or fault.what.startswith(f"{key} ")
        return fault.what if named else f"{key}: {fault.what}"


@dataclass(frozen=True, slots=True)
class Part:
    """One YAML document of a file, composed but not read."""

    root: Node
    text: str
    mark: tuple[int, int]
    start: int
    """Where the text begins in the file, in characters."""


@dataclass(frozen=True, slots=True)
class Located:
    data: Mapping[str, object]
    places: Places
    faults: tuple[Fault, ...]
    """YAML faults that did not prevent reading: a repeated key, a tag."""
    anchored: frozenset[str] = frozenset()
    """Top-level keys that contain an anchor used below another key."""


def spot(name: str, mark: tuple[int, int]) -> str:
    return f"{name}:{mark[0]}:{mark[1]}"


def in_order(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Distinct problems by line and column, then those without, in their order."""
    places = {problem: _PLACE.match(problem.where) for problem in problems}
    files = list(dict.fromkeys(place[1] for place in places.values() if place))

    def position(problem: Problem) -> tuple[int, int, int]:
        place = places[problem]
        return (files.index(place[1]), int(place[2]), int(place[3])) if place else (len(files), 0, 0)

    return tuple(sorted(places, key=position))


def split_documents(text: str, name: str, kind: DocumentKind) -> tuple[Part, ...]:
    if len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
        raise _too_large(name, kind)
    check_text(text, name, kind)
    composed = [(mark, root) for mark, root in _compose(text, name, kind) if root.tag != f"{_TAG}null"]
    if not composed:
        raise kind.error(Problem(f"{name}:1:1", f"the {kind.noun} is empty.", _start(kind)))
    # What stands before the first document, a comment mostly, belongs to it; an empty one to the one before.
    starts = [0, *(mark.index for mark, _ in composed[1:])]
    places = [(1, 1), *(_line_column(mark) for mark, _ in composed[1:])]
    pieces = [text[start:end] for start, end in pairwise([*starts, len(text)])]
    return tuple(
        Part(root, piece, place, start)
        for (_, root), piece, place, start in zip(composed, pieces, places, starts, strict=True)
    )


def read_document(part: Part, name: str, kind: DocumentKind) -> Located:
    root = part.root
    if not isinstance(root, MappingNode) or root.tag not in _PLAIN_TAGS:
        what = f"a {kind.noun} is a map of keys to values."
        raise kind.error(Problem(spot(name, _mark(root)), what, _start(kind)))
    walk = _Walk(name, part.mark, kind)
    data = walk.mapping(root, (), 0)
    return Located(data, Places(name, walk.marks), tuple(walk.faults), _anchored(root))


def _anchored(root: MappingNode) -> frozenset[str]:
    first: dict[int, Node] = {}
    anchored: set[str] = set()
    for key, value in root.value:
        # Of those that share a node the first has the anchor, and the others have aliases of it.
        for number in _nodes(value):
            holder = first.setdefault(number, key)
            if holder is not key and isinstance(holder, ScalarNode):
                anchored.add(holder.value)
    return frozenset(anchored)


def _nodes(root: Node) -> set[int]:
    """Identities of a node and all below it. By aliases they lie deeper than texts may nest."""
    seen, left = set[int](), [root]
    while left:
        node = left.pop()
        if id(node) not in seen:
            seen.add(id(node))
            is_map = isinstance(node, MappingNode)
            left += chain(*node.value) if is_map else node.value if isinstance(node, SequenceNode) else ()
    return seen


class _Walk:
    """One pass over the node graph that follows aliases and counts nodes."""

    def __init__(self, name: str, start: tuple[int, int], kind: DocumentKind) -> None:
        self.name = name
        self.kind = kind
        self.marks: dict[FieldPath, tuple[int, int]] = {(): start}
        self.faults: list[Fault] = []
        self._num_nodes = 0
        self._scalars = yaml.SafeLoader("")

    def value(self, node: Node, path: FieldPath, depth: int) -> object:
        self._count(node, depth)
        if node.tag not in _PLAIN_TAGS and node.tag != _DATE_TAG:
            what = f"the tag {node.tag} has no meaning in a {self.kind.noun}."
            self.faults.append(Fault(path, what, "Remove it."))
            return None
        if isinstance(node, MappingNode):
            return self.mapping(node, path, depth)
        if isinstance(node, SequenceNode):
            return [self._entry((*path, i), (item, item), depth) for i, item in enumerate(node.value)]
        return self._scalar(node, path)

    def mapping(self, node: MappingNode, path: FieldPath, depth: int) -> dict[str, object]:
        """Own keys before those of ``<<``, as precedence requires."""
        own: dict[str, object] = {}
        for key, value in self._own_pairs(node, path):
            if key in own:
                self._repeated(key, path, value[0])
                continue
            own[key] = self._entry((*path, key), value, depth)
        for key, value in self._merged_pairs(node, path, depth):
            if key not in own:
                own[key] = self._entry((*path, key), value, depth)
        return own

    def _entry(self, path: FieldPath, pair: tuple[Node, Node], depth: int) -> object:
        self.marks[path] = _mark(pair[0])
        return self.value(pair[1], path, depth + 1)

    def _own_pairs(self, node: MappingNode, path: FieldPath) -> Iterator[tuple[str, tuple[Node, Node]]]:
        for key, value in node.value:
            if key.tag == _MERGE_TAG:
                continue
            if isinstance(key, ScalarNode) and _is_key(key):
                yield key.value, (key, value)
            else:
                self._bad_key(key, path)

    def _merged_pairs(
        self, node: MappingNode, path: FieldPath, depth: int
    ) -> Iterator[tuple[str, tuple[Node, Node]]]:
        for key, value in node.value:
            if key.tag != _MERGE_TAG:
                continue
            for source in value.value if isinstance(value, SequenceNode) else [value]:
                self._count(source, depth)
                if isinstance(source, MappingNode):
                    for name, pair in self._own_pairs(source, path):
                        self._count(pair[0], depth)
                        yield name, pair
                    yield from self._merged_pairs(source, path, depth + 1)
                else:
                    remedy = "Give it an alias of one: <<: *name."
                    self.faults.append(Fault(path, "'<<' takes a map.", remedy))

    def _scalar(self, node: Node, path: FieldPath) -> object:
        if node.tag == _DATE_TAG:
            # YAML reads 2024-01-31 as a date; who writes it means a name or a revision.
            return str(node.value)
        try:
            value: object = self._scalars.construct_object(node)
        except (ValueError, KeyError, IndexError):
            self.faults.append(Fault(path, f"'{node.value[:40]}' cannot be read.", "Put it in quotes."))
            return None
        if isinstance(value, str) and not _is_text(value):
            self.faults.append(Fault(path, f"{ascii(value)[:40]} holds half a character.", "Write it out."))
            return None
        return value

    def _bad_key(self, key: Node, path: FieldPath) -> None:
        shown = ascii(key.value) if isinstance(key, ScalarNode) else "a list or map"
        # No value of a map has a number for its step, so the place in the text may stand for a bad key.
        place = (*path, key.start_mark.index)
        self.marks[place] = _mark(key)
        self.faults.append(Fault(place, f"the key {shown} is not a text.", "Put it in quotes."))

    def _repeated(self, key: str, path: FieldPath, again: Node) -> None:
        first = self.marks[(*path, key)]
        place = (*path, key, again.start_mark.index)
        self.marks[place] = _mark(again)
        what = f"the key '{key}' was given before, on line {first[0]}."
        self.faults.append(Fault(place, what, "Remove one of the two."))

    def _count(self, node: Node, depth: int) -> None:
        self._num_nodes += 1
        if depth > MAX_DEPTH:
            what = f"the {self.kind.noun} is nested more than {MAX_DEPTH} levels deep here."
            raise self._error(node, what, "Remove the alias that holds itself, or the nesting.")
        if self._num_nodes > MAX_NODES:
            what = f"the {self.kind.noun} has more than {MAX_NODES} values once its aliases are expanded."
            raise self._error(node, what, "Use fewer aliases of large maps.")

    def _error(self, node: Node, what: str, remedy: str) -> UserError:
        return self.kind.error(Problem(spot(self.name, _mark(node)), what, remedy))


class _Loader(yaml.SafeLoader):
    """Stops composing before nested brackets exhaust the stack."""

    depth = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        self.depth += 1
        if self.depth > 2 * MAX_DEPTH:
            what = f"more than {2 * MAX_DEPTH} levels inside one another"
            raise yaml.composer.ComposerError(None, None, what, self.get_mark())
        node: Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _compose(text: str, name: str, kind: DocumentKind) -> list[tuple[Mark, Node]]:
    documents: list[tuple[Mark, Node]] = []
    try:
        loader = _Loader(text)
        while loader.check_node():
            mark: Mark = loader.peek_event().start_mark  # type: ignore[no-untyped-call]
            if len(documents) == MAX_DOCUMENTS:
                what = f"the file has more than {MAX_DOCUMENTS} YAML documents."
                raise kind.error(Problem(spot(name, _line_column(mark)), what, "Use several files."))
            root = loader.get_node()
            if root is not None:
                documents.append((mark, root))
    except yaml.reader.ReaderError as error:
        what = f"the character U+{ord(text[error.position]):04X} may not stand in YAML."
        place = spot(name, _position(text[: error.position]))
        raise kind.error(Problem(place, what, "Remove it.")) from None
    except yaml.MarkedYAMLError as error:
        raise _not_yaml(name, error, kind) from None
    return documents


def _not_yaml(name: str, error: yaml.MarkedYAMLError, kind: DocumentKind) -> UserError:
    mark = error.problem_mark or error.context_mark
    place = spot(name, (1, 1) if mark is None else _line_column(mark))
    problem = error.problem or "it ends too early"
    if "'\\t'" in problem:
        return kind.error(Problem(place, "a tab stands here.", "Indent with spaces: YAML allows no tabs."))
    if error.context and "alias" in error.context:
        return kind.error(Problem(place, "'*' starts an alias here.", 'Put it in quotes: filter: "*".'))
    context = f" ({error.context})" if error.context else ""
    what = f"this is not YAML: {problem}{context}."
    return kind.error(Problem(place, what, "Check the indentation, colons, brackets and quotes before it."))


def _mark(node: Node) -> tuple[int, int]:
    return _line_column(node.start_mark)


def _line_column(mark: Mark) -> tuple[int, int]:
    return mark.line + 1, mark.column + 1


def _position(before: str) -> tuple[int, int]:
    """Line and column, from 1, of what stands behind a text."""
    return before.count("\n") + 1, len(before) - before.rfind("\n")


def _start(kind: DocumentKind) -> str:
    return f"Start with '{kind.opening}'."


def _is_key(key: ScalarNode) -> bool:
    """Whether it is a printable text, or a number, such as a layer, in its canonical spelling."""
    if key.tag == f"{_TAG}int":
        return _NUMBER.fullmatch(key.value) is not None
    return key.tag == f"{_TAG}str" and _is_text(key.value)


def _is_text(value: str) -> bool:
    """Whether it can be encoded; an escape may give half a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


MAX_TEXT_BYTES = 4 * 2**20


def read_file(name: str, kind: DocumentKind) -> str:
    noun = kind.noun
    try:
        with Path(name).open("rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
    except FileNotFoundError:
        raise kind.error(Problem(name, "there is no such file.", f"Check the path of the {noun}.")) from None
    except OSError as error:
        reason = f"the {noun} cannot be read ({error.strerror})."
        raise kind.error(Problem(name, reason, "Give the path of a readable YAML file.")) from error
    if len(content) > MAX_TEXT_BYTES:
        raise _too_large(name, kind)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        place = spot(name, _position(content[: error.start].decode("latin-1")))
        what = f"the byte 0x{content[error.start]:02x} is not UTF-8."
        raise kind.error(Problem(place, what, f"Save the {noun} as UTF-8.")) from None


def _too_large(name: str, kind: DocumentKind) -> UserError:
    what = f"the {kind.noun} has more than {MAX_TEXT_BYTES} bytes."
    return kind.error(Problem(name, what, f"Give the {kind.noun}, not a file of weights."))


_SECRETS = {
    "a token of the Hugging Face Hub": re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{30,}"),
    "an access key of AWS": re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "a token of GitHub": re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,})"),
    "a token of GitLab": re.compile(r"\bglpat-[A-Za-z0-9_-]{20,}"),
    "a secret of Google": re.compile(
        r"\b(?:GOCSPX-[A-Za-z0-9_-]{20,}|AIza[A-Za-z0-9_-]{35}|ya29\.[A-Za-z0-9_-]{20,})"
    ),
    "a key of a model's service": re.compile(
        r"\bsk-(?:(?:proj|svcacct|admin|ant|or|lf)-[A-Za-z0-9_-]{20,}|[A-Za-z0-9]{32,})"
    ),
    "a token of Slack": re.compile(r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}"),
    "a token of a package registry": re.compile(r"\b(?:npm_[A-Za-z0-9]{36}|pypi-[A-Za-z0-9_-]{50,})"),
    "a signed token (JWT)": re.compile(r"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "a signature in an address": re.compile(
        r"[?&](?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|AWSAccessKeyId|Signature|sig)=[^\s&]{8}",
        re.IGNORECASE,
    ),
    "a user or password in an address": re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s/@'\"]{1,300}@"),
    "a key or token with its name": re.compile(
        # In variables, connection strings, YAML and JSON; $NAME and <name> stand for a value and are none.
        r"(?:access[_-]?key|account[_-]?key|api[_-]?key|secret[_-]?key|shared[_-]?access[_-]?key"
        r"|(?:access|api|auth|bearer|github|gitlab|hf|hub|refresh|session)[_-]?token)"
        r"['\"]?\s{0,3}[=:]\s{0,3}['\"]?(?=[^\s'\"]{0,80}[0-9])[A-Za-z0-9+/_.=-]{16}",
        re.IGNORECASE,
    ),
    "a password": re.compile(
        r"(?:password|passwd|client[_-]?secret|\bsecret)['\"]?\s{0,3}[=:]\s{0,3}['\"]?"
        r"(?=[^\s'\"]{0,80}[0-9])[^\s'\"$<{\[]{6}",
        re.IGNORECASE,
    ),
}


def check_text(text: str, name: str, kind: DocumentKind) -> None:
    """Refuse a text with a secret, comments included. The message does not repeat it."""
    problems = [
        Problem(spot(name, _position(text[: match.start()])), f"{what} stands here.", kind.about_secrets)
        for what, pattern in _SECRETS.items()
        for match in pattern.finditer(text)
    ]
    if problems:
        raise kind.error(problems)


def secrets_in(value: Any, kind: DocumentKind, path: FieldPath = ()) -> Iterator[Fault]:
    """Secrets in the values of a document, also if the text escapes them."""
    if isinstance(value, str):
        held = [what for what, pattern in _SECRETS.items() if pattern.search(value)]
        yield from (Fault(path, f"{what} stands here.", kind.about_secrets) for what in held)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from secrets_in(key, kind, path)
            own = (*path, key)
            faults = list(secrets_in(inner, kind, own))
            if isinstance(inner, str) and not faults:
                # Some are known only by the name before them.
                faults = list(secrets_in(f"{key}={inner}", kind, own))
            yield from faults
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from secrets_in(inner, kind, (*path, index))


class YamlDumper(yaml.SafeDumper):
    """Writes every string so that it is read as it was."""

    def text(self, text: str) -> yaml.ScalarNode:
        # In single quotes PyYAML folds these line breaks into spaces.
        style = '"' if set(text) & set("\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


YamlDumper.add_representer(str, YamlDumper.text)


def yaml_text(data: object) -> str:
    return str(yaml.dump(data, Dumper=YamlDumper, sort_keys=False, allow_unicode=True))
