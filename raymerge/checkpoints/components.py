"""Weights of a repository beside the model's own: in directories below it, or in files at the top that its
index does not name.

Their tensors are named by their directory and their own name, such as ``2_Dense/linear.weight``; those of
files at the top have the model's names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from raymerge.checkpoints.files import PICKLES, SAFETENSORS, LeftOut, WeightNames, check_index, weights_of
from raymerge.checkpoints.header import MODEL_STEM, FileHeader, read_header
from raymerge.checkpoints.json_files import load_json, read_bounded
from raymerge.checkpoints.pickles import read_pickled
from raymerge.errors import CheckpointError, Problem, shortlist
from raymerge.storage.store import FileInfo, ReadStore

SENTENCE_MODULES = "modules.json"
"""Names the modules of a model of Sentence Transformers, the transformer among them or not."""
PIPELINE = "model_index.json"
"""Names the models of a diffusion pipeline."""
_NUMBERED = re.compile(r"(.+)-[0-9]{5,6}-of-[0-9]{5,6}")
_ENDING, _INDEX_ENDING = ".safetensors", ".safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Component:
    file: str
    """Key of its file, or of its numbered files, up to number and ending."""
    is_single: bool
    names: frozenset[str]
    """Of its tensors, with the directory."""

    @property
    def directory(self) -> str:
        """Ends in a slash; "" for files at the top."""
        return directory_of(self.file)

    @property
    def stem(self) -> str:
        """What its files in an output are called before number and ending, whatever they are read from."""
        stem = self.file.removeprefix(self.directory)
        return MODEL_STEM if stem == PICKLES.stem else stem


@dataclass(frozen=True, slots=True)
class ReadComponents:
    components: tuple[Component, ...] = ()
    headers: tuple[FileHeader, ...] = ()
    """With whole names of tensors."""
    keys: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def directory_of(key: str) -> str:
    return key[: key.rfind("/") + 1]


def component_files(left_out: Iterable[LeftOut], *, pickled: bool) -> Mapping[str, Sequence[str]]:
    """Keys of weights that no rule leaves out, by the ``Component.file`` that they belong to."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for each in left_out:
        name = None if each.rule is not None else _component_file(each.key, pickled=pickled)
        if name is not None:
            by_file[name].append(each.key)
    return by_file


def _component_file(key: str, *, pickled: bool) -> str | None:
    directory, name = directory_of(key), key.rpartition("/")[2]
    if name.endswith(_INDEX_ENDING):
        return key.removesuffix(_INDEX_ENDING)
    if pickled and directory and (PICKLES.are_in([name])):
        return f"{directory}{PICKLES.stem}"
    if not name.endswith(_ENDING):
        return None
    stem = name.removesuffix(_ENDING)
    match = _NUMBERED.fullmatch(stem)
    return f"{directory}{stem if match is None else match[1]}"


def read_components(
    store: ReadStore,
    files: Sequence[FileInfo],
    left_out: Sequence[LeftOut],
    *,
    own: Collection[str],
    pickled: bool,
) -> ReadComponents:
    """Read the headers of all weights that no rule leaves out; ``own`` are the names of the model's tensors.

    Raises CheckpointError: one is broken or incomplete, or two tensors have one name; with every problem."""
    present = {info.key: info for info in files}
    problems: list[Problem] = []
    components: list[Component] = []
    headers: list[FileHeader] = []
    keys: set[str] = set()
    notes: list[str] = []
    for file, each in component_files(left_out, pickled=pickled).items():
        infos = {key.rpartition("/")[2]: present[key] for key in each if key in present}
        if not infos:
            continue
        try:
            read, own_notes = _read_component(store, file, infos)
        except CheckpointError as error:
            problems += error.problems
            continue
        names = frozenset(tensor.name for header in read for tensor in header.tensors)
        components.append(Component(file, is_single=len(read) == 1, names=names))
        headers += read
        keys.update(info.key for info in infos.values())
        notes += own_notes
    problems += _repeated(store, components, own)
    if problems:
        raise CheckpointError(problems)
    return ReadComponents(tuple(components), tuple(headers), frozenset(keys), tuple(notes))


def _read_component(
    store: ReadStore, file: str, infos: Mapping[str, FileInfo]
) -> tuple[list[FileHeader], Iterator[str]]:
    directory, stem = directory_of(file), file.rpartition("/")[2]
    is_pickled = not any(name.endswith((_ENDING, _INDEX_ENDING)) for name in infos)
    kind = PICKLES if is_pickled else WeightNames(stem, SAFETENSORS.endings, SAFETENSORS.kind)
    index = weights_of(store, infos, kind, directory)
    problems, headers, notes = list(index.problems), list[FileHeader](), list(index.notes)
    for name in index.keys:
        info = infos[name]
        if is_pickled:
            header, own = read_pickled(store, info)
            notes += own
        else:
            header = read_header(store, info.key, info.nbytes, info.version)
        headers.append(header)
    if not problems:
        problems, more = check_index(index, headers, store.location(directory or "."))
        notes += more
    if problems:
        raise CheckpointError(problems)
    return [_named(each, directory) for each in headers], (f"{file}: {note}" for note in notes)


def _named(header: FileHeader, directory: str) -> FileHeader:
    if not directory:
        return header
    return replace(
        header, tensors=tuple(each._replace(name=f"{directory}{each.name}") for each in header.tensors)
    )


def _repeated(store: ReadStore, components: Sequence[Component], own: Collection[str]) -> Iterator[Problem]:
    names = frozenset(own)
    for each in components:
        if both := sorted(each.names & names):
            what = f"holds tensors that other weights beside it hold too: {shortlist(both)}."
            remedy = (
                "Nothing says which of them count: move the file that is no part of the model into a "
                "directory whose name begins with a dot, which is left out."
            )
            yield Problem(store.location(f"{each.file}{_ENDING}"), what, remedy)
        names |= each.names


def is_collection(keys: Collection[str]) -> bool:
    """Whether files at the top say that the model lies in directories below them."""
    return SENTENCE_MODULES in keys or PIPELINE in keys


def needs_no_config(store: ReadStore, files: Mapping[str, FileInfo]) -> bool:
    """Whether the weights at the top are embeddings alone, which Sentence Transformers load without one."""
    info = files.get(SENTENCE_MODULES)
    if info is None:
        return False
    try:
        modules = load_json(read_bounded(store, info.key, info.nbytes))
    except (ValueError, RecursionError):
        return False
    listed = modules if isinstance(modules, list) else []
    at_top = [each for each in listed if isinstance(each, dict) and each.get("path") == ""]
    return bool(at_top) and all(str(each.get("type")).endswith(".StaticEmbedding") for each in at_top)
