"""A checkpoint in a directory: its config, tensors, files and companions, all checked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from raymerge.checkpoints.components import (
    Component,
    ReadComponents,
    is_collection,
    needs_no_config,
    read_components,
)
from raymerge.checkpoints.dcp.chunked import ChunkedTensors, read_chunked
from raymerge.checkpoints.dcp.layout import is_chunked
from raymerge.checkpoints.files import (
    PICKLES,
    SAFETENSORS,
    LeftOut,
    check_index,
    describe_no_weights,
    find_weights,
    linked_directories,
    sort_files,
    stray_links,
)
from raymerge.checkpoints.header import FileHeader, StoredTensor, TensorSpec, header_digest, read_header
from raymerge.checkpoints.json_files import attempt, load_json, read_bounded, read_object
from raymerge.checkpoints.pickles import read_pickled
from raymerge.checkpoints.quantisation.detect import HF_QUANT_CONFIG, QuantisedWeights
from raymerge.checkpoints.quantisation.encoding import QuantisedWeight
from raymerge.checkpoints.quantisation.int4 import read_shapes
from raymerge.checkpoints.quantisation.modelopt import as_table
from raymerge.dtypes import DType
from raymerge.errors import CheckpointError, Problem, shortlist
from raymerge.storage.addresses import chunked_place, is_remote, parent_and_name, shown
from raymerge.storage.file_rules import TRAINING
from raymerge.storage.hub import unfetched_files
from raymerge.storage.open import open_store
from raymerge.storage.retry import RetryPolicy
from raymerge.storage.store import NO_FILES, FileInfo, ReadStore, num_readers

CONFIG_FILE = "config.json"
_QUANTISATION_TABLES = ("quantization_config", "compression_config")

_Named = TypeVar("_Named", StoredTensor, TensorSpec)
_RECORD_FILE = "raymerge/plan/manifest.json"
# What a merge by raymerge leaves of its plan in the checkpoint that it made.
_MEND = "Mend the file, or copy it again from the place the weights come from."
_COMPARE_NBYTES = 4 * 2**20
# At most 18 digits at a time: Python refuses to read a number of thousands, and a name may hold one.
_DIGITS = re.compile(r"([0-9]{1,18})")
_EXPERTS = ".experts."


@dataclass(frozen=True, slots=True)
class WeightFile:
    key: str
    nbytes: int
    header_digest: str
    version: str


def weight_file(header: FileHeader) -> WeightFile:
    return WeightFile(header.key, header.nbytes, header.digest, header.version)


def planned_file(key: str, nbytes: int, header: bytes) -> WeightFile:
    """A file that is not made yet, from all of it that is before its data."""
    return WeightFile(key, nbytes, header_digest(header), "")


@dataclass(frozen=True, slots=True)
class Holding:
    """Files that a plan reads from: those of a model, of an adapter, or of a stage's result."""

    name: str
    root: str
    tensors: Mapping[str, StoredTensor]
    files: tuple[WeightFile, ...]

    @property
    def place(self) -> str:
        """What is opened to read its tensors."""
        return self.root

    def open(
        self, *, retry_policy: RetryPolicy | None = None, expected: Mapping[str, FileInfo] = NO_FILES
    ) -> ReadStore:
        """The store that its tensors are read from; arguments are those of ``open_store``."""
        return open_store(self.place, retry_policy=retry_policy, expected=expected)

    @property
    def left(self) -> Mapping[str, int]:
        """Bytes of what its files hold beside tensors of a model, by name."""
        return {}

    @property
    def assembled_nbytes(self) -> int:
        """Of tensors that are stored in chunks."""
        return 0

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        """Every tensor as it lies in its file, by name."""
        return self.tensors

    @property
    def has_parts(self) -> bool:
        """Whether some of its tensors consist of several stored ones."""
        return False

    def parts(self, name: str) -> tuple[str, ...]:
        return (name,)

    def whole(self, stored: str) -> str:
        """Name of the tensor that a stored one is, or belongs to."""
        return stored


@dataclass(frozen=True, slots=True)
class Unwritten:
    """A checkpoint that is planned but not made yet: what is known beside its config and headers."""

    companions_root: str
    """Directory of the model whose companions are copied."""
    written: Mapping[str, bytes]
    """Companions that are written instead of copied, by key."""
    twins: frozenset[tuple[str, str]]
    """Pairs of names of tensors that will be equal bytes; nothing is known of other pairs."""


@dataclass(frozen=True, slots=True)
class Checkpoint(Holding):
    """Files and headers of one model, without tensor data."""

    config: Mapping[str, Any]
    companions: tuple[str, ...]
    """Files other than weights that are copied (tokenizer, code, licence)."""
    notes: tuple[str, ...]
    left_out: tuple[LeftOut, ...] = ()
    """Files neither read nor copied, with their rules; includes weights without a rule."""
    unwritten: Unwritten | None = None
    """Replaces the files of a checkpoint that does not exist yet."""
    is_single_file: bool = False
    """Whether it is one file rather than a directory; files beside it are not part of it."""
    packs: QuantisedWeights | None = None
    """Its quantised tensors, if ``tensors`` has each of them as one tensor of numbers; then what is stored is
    ``as_stored``."""
    as_stored: Mapping[str, StoredTensor] | None = None
    contents: str = ""
    """Digest of all file contents, for an intermediate of a chain of merges, which is reproducible; "" where
    only file versions are known."""

    shapes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Stored shapes of packed integers by tensor name, as far as read; empty where there are only headers."""
    hf_quant_config: Mapping[str, Any] = field(default_factory=dict)
    """What ModelOpt's file beside the config holds; {} without one. Its table is in ``config`` too, if that
    has none of its own."""
    chunks: ChunkedTensors | None = None
    """What else is known of it where its tensors are in chunks."""
    components: tuple[Component, ...] = ()
    """Which of ``tensors`` lie beside the model's own weights, and where."""
    opener: Callable[[], ReadStore] | None = None
    """Opens what its tensors are read from where that is no place: a merge that is not written, or tensors in
    memory. ``root`` then has all its other files."""

    def open(
        self, *, retry_policy: RetryPolicy | None = None, expected: Mapping[str, FileInfo] = NO_FILES
    ) -> ReadStore:
        if self.opener is not None:
            return self.opener()
        return super(Checkpoint, self).open(retry_policy=retry_policy, expected=expected)

    @property
    def place(self) -> str:
        return self.root if self.chunks is None else chunked_place(self.root)

    @property
    def left(self) -> Mapping[str, int]:
        return {} if self.chunks is None else self.chunks.left

    @property
    def assembled_nbytes(self) -> int:
        return 0 if self.chunks is None else self.chunks.assembled_nbytes

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        return self.tensors if self.as_stored is None else self.as_stored

    @property
    def packed(self) -> Mapping[str, QuantisedWeight]:
        """The tensors of numbers that are stored as codes with scales."""
        return {} if self.packs is None else self.packs.tensors

    @property
    def has_parts(self) -> bool:
        return bool(self.packed)

    def parts(self, name: str) -> tuple[str, ...]:
        packed = None if self.packs is None else self.packs.tensors.get(name)
        return (name,) if packed is None else packed.stored

    def whole(self, stored: str) -> str:
        return stored if self.packs is None else self.packs.members.get(stored, stored)

    @property
    def is_raw(self) -> bool:
        """Whether it has no config."""
        return not self.config

    @property
    def directories(self) -> tuple[str, ...]:
        """Those that components lie in, each with a slash at its end: what names of their tensors begin
        with."""
        return tuple(dict.fromkeys(each.directory for each in self.components if each.directory))

    @property
    def model_tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors that its config is of: without those in directories below it."""
        below = self.directories
        if not below:
            return self.tensors
        return {name: tensor for name, tensor in self.tensors.items() if not name.startswith(below)}


def files_at(store: ReadStore) -> Sequence[FileInfo]:
    """All files at a place; raises CheckpointError: no such directory, or nothing at a remote address."""
    files = store.files()
    if not files and store.is_far:
        where = store.location(".")
        raise CheckpointError(Problem(where, "there is nothing at this place.", "Check the address."))
    return files


def open_checkpoint(
    root: Path | str,
    name: str,
    *,
    pickled: bool = False,
    needs_weights: bool = True,
    with_components: bool = True,
    opener: Callable[[], ReadStore] | None = None,
) -> Checkpoint:
    """Read the config, index and headers in ``root``; with ``pickled`` also of pickled weights.

    Without ``needs_weights`` a directory may have none. Without ``with_components`` weights beside the
    model's own are not read, and left out without a rule. ``opener``: opens what has the weights, and all
    that is in ``root`` too, where a config may be absent; None: they lie there.

    Raises CheckpointError: with every problem of this checkpoint at once."""
    problems: list[Problem] = []
    with open_store(str(root)) if opener is None else opener() as store:
        files = files_at(store)
        weights, beside, companions, left_out = _read_headers(
            store, files, problems, pickled=pickled, is_needed=needs_weights, with_components=with_components
        )
        headers = (*weights.headers, *beside.headers)
        config = attempt(
            problems, lambda: _read_config(store, files, pickled=pickled, may_lack=opener is not None)
        )
        hf_quant_config = attempt(problems, lambda: _read_hf_quant_config(store, files)) or {}
        tensors = in_natural_order(tensor for header in headers for tensor in header.tensors)
        shapes = attempt(problems, lambda: read_shapes(store, tensors))
    if not is_remote(str(root)):
        problems += stray_links(Path(root), companions)
        left_out += tuple(linked_directories(Path(root)))
    if problems or config is None or shapes is None:
        raise CheckpointError(problems)
    return Checkpoint(
        name=name,
        root=str(root),
        config=_with_table(config, hf_quant_config),
        tensors=tensors,
        files=tuple(map(weight_file, headers)),
        companions=companions,
        notes=(*weights.notes, *beside.notes),
        left_out=left_out,
        shapes=shapes,
        hf_quant_config=hf_quant_config,
        chunks=weights.chunks,
        components=beside.components,
        opener=opener,
    )


class _Weights(NamedTuple):
    headers: tuple[FileHeader, ...]
    notes: tuple[str, ...]
    index_keys: tuple[str, ...] = ()
    """The key of the index, if any."""
    chunks: ChunkedTensors | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        return (*(header.key for header in self.headers), *self.index_keys)


_Files = tuple[_Weights, ReadComponents, tuple[str, ...], tuple[LeftOut, ...]]


def _read_headers(
    store: ReadStore,
    files: Sequence[FileInfo],
    problems: list[Problem],
    *,
    pickled: bool,
    is_needed: bool,
    with_components: bool,
) -> _Files:
    """The model's own weights, those beside it, the companions, and all other files; faults are added to
    ``problems``."""
    is_at_top = not (with_components and is_collection({info.key for info in files}))
    weights = attempt(
        problems, lambda: _read_weights(store, files, pickled=pickled, is_needed=is_needed and is_at_top)
    ) or _Weights((), ())
    sidecars = () if weights.chunks is None else weights.chunks.sidecars
    others = unfetched_files(store.location("."), files)
    companions, left_out = _beside({CONFIG_FILE, *weights.keys}, files, others, sidecars)
    beside = ReadComponents()
    if with_components and weights.chunks is None and not problems:
        own = [tensor.name for header in weights.headers for tensor in header.tensors]
        beside = (
            attempt(problems, lambda: read_components(store, files, left_out, own=own, pickled=pickled))
            or ReadComponents()
        )
    if is_needed and not (weights.headers or beside.headers or problems):
        problems.append(describe_no_weights([info.key for info in files], store.location(".")))
    return weights, beside, companions, tuple(each for each in left_out if each.key not in beside.keys)


def _read_weights(store: ReadStore, files: Sequence[FileInfo], *, pickled: bool, is_needed: bool) -> _Weights:
    if has_only_chunks(files, pickled=pickled):
        chunks = read_chunked(store, files)
        return _Weights(chunks.headers, chunks.notes, chunks=chunks)
    if not is_needed and not _has_weights(files, pickled=pickled):
        return _Weights((), ())
    return _read_files(store, files, pickled=pickled)


def _beside(
    read: Collection[str], files: Sequence[FileInfo], unfetched: Sequence[FileInfo], sidecars: Sequence[str]
) -> tuple[tuple[str, ...], tuple[LeftOut, ...]]:
    """The companions, and the files that are neither read nor copied."""
    present = {info.key: info.nbytes for info in files}
    sizes = present | {info.key: info.nbytes for info in unfetched}
    beside, left_out = sort_files(sizes, {*read, *sidecars})
    training = tuple(LeftOut(key, present[key], TRAINING.name, is_weights=False) for key in sidecars)
    return tuple(key for key in beside if key in present), left_out + training


def open_tensor_file(path: Path | str, name: str, *, pickled: bool = False) -> Checkpoint:
    """A single file of tensors as a checkpoint without config and companions.

    Raises CheckpointError: with every problem of this file."""
    # A local one stays relative to where it was said.
    root, key = (
        parent_and_name(str(path)) if is_remote(str(path)) else (str(Path(path).parent), Path(path).name)
    )
    with open_store(root) as store:
        info = store.info(key)
        if info is None:
            raise CheckpointError(Problem(shown(str(path)), "there is no such file.", "Check the path."))
        header, notes = (read_pickled if pickled else read_safetensors)(store, info)
    return Checkpoint(
        name=name,
        root=root,
        config={},
        tensors=in_natural_order(header.tensors),
        files=(weight_file(header),),
        companions=(),
        notes=notes,
        is_single_file=True,
    )


def main_dtype(checkpoint: Checkpoint) -> DType:
    """The float dtype of most of the model's bytes, FP8 excluded; of all of a checkpoint that has no weights
    but in directories.

    Raises CheckpointError: no tensor has a dtype for arithmetic."""
    main = _main(checkpoint.model_tensors or checkpoint.tensors)
    if main is None:
        stored = (
            ", ".join(sorted({tensor.dtype.value for tensor in checkpoint.tensors.values()})) or "nothing"
        )
        what = f"no tensor is of F16, BF16, F32 or F64; there is {stored}."
        where = shown(checkpoint.root) if checkpoint.opener is None else checkpoint.name
        raise CheckpointError(Problem(where, what, "Take a checkpoint with unquantised weights."))
    return main


def main_dtypes(checkpoint: Checkpoint) -> Mapping[str, DType]:
    """As ``main_dtype``, and the same of each of its ``directories`` that has numbers; "" is the model."""
    mains = {"": main_dtype(checkpoint)}
    for directory in checkpoint.directories:
        own = {name: each for name, each in checkpoint.tensors.items() if name.startswith(directory)}
        if (main := _main(own)) is not None:
            mains[directory] = main
    return mains


def _main(tensors: Mapping[str, StoredTensor]) -> DType | None:
    sizes: Counter[DType] = Counter()
    for tensor in tensors.values():
        if tensor.dtype.is_mergeable:
            sizes[tensor.dtype] += tensor.nbytes
    # The name decides between equals, so that the answer hangs on nothing else.
    return max(sizes, key=lambda dtype: (sizes[dtype], dtype.value), default=None)


def natural_key(name: str) -> tuple[tuple[str | int, ...], str]:
    """Sort key by which ``layers.2`` comes before ``layers.10``."""
    return _pieces(name), name


def _pieces(text: str) -> tuple[str | int, ...]:
    """Texts and numbers in turns, so that like is compared with like."""
    pieces: list[str | int] = list(_DIGITS.split(text))
    pieces[1::2] = map(int, pieces[1::2])
    return tuple(pieces)


def in_natural_order(tensors: Iterable[_Named]) -> dict[str, _Named]:
    """Tensors by name, in the order of ``natural_key``."""
    pieces = cache(_pieces)

    def key(tensor: _Named) -> tuple[tuple[str | int, ...], tuple[str | int, ...], str]:
        # All experts of a block have one beginning, and those of all blocks the same ends.
        block, experts, end = tensor.name.partition(_EXPERTS)
        return pieces(block + experts), pieces(end), tensor.name

    return {tensor.name: tensor for tensor in sorted(tensors, key=key)}


def has_same_layout(first: Mapping[str, _Named], second: Mapping[str, StoredTensor | TensorSpec]) -> bool:
    """Whether both have tensors of the same names, dtypes and shapes, wherever they lie."""
    return first.keys() == second.keys() and all(
        (one.dtype, one.shape) == (second[name].dtype, second[name].shape) for name, one in first.items()
    )


def same_bytes(checkpoint: Checkpoint, a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two tensors of a checkpoint have equal dtype, shape and bytes; reads in pieces."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if checkpoint.unwritten is not None:
        return (a.name, b.name) in checkpoint.unwritten.twins
    with checkpoint.open() as store:
        for done in range(0, a.nbytes, _COMPARE_NBYTES):
            nbytes = min(_COMPARE_NBYTES, a.nbytes - done)
            if store.read(a.key, a.offset + done, nbytes) != store.read(b.key, b.offset + done, nbytes):
                return False
    return True


def _read_files(store: ReadStore, files: Sequence[FileInfo], *, pickled: bool) -> _Weights:
    """Reads of headers overlap, for slow disks."""
    index = find_weights(store, files, pickled=pickled)
    problems = list(index.problems)
    is_pickled = index.names is PICKLES

    def read(info: FileInfo) -> tuple[FileHeader, tuple[str, ...]] | CheckpointError:
        try:
            return (read_pickled if is_pickled else read_safetensors)(store, info)
        except CheckpointError as error:
            return error

    keys = frozenset(index.keys)
    # One after the other where they are pickled: torch keeps global state while it reads one.
    with ThreadPoolExecutor(max_workers=1 if is_pickled else num_readers(store)) as pool:
        results = list(pool.map(read, [info for info in files if info.key in keys]))
    for error in results:
        problems += error.problems if isinstance(error, CheckpointError) else ()
    read_files = [each for each in results if not isinstance(each, CheckpointError)]
    headers = tuple(header for header, _ in read_files)
    notes = [note for _, own in read_files for note in own]
    if not problems:
        problems, more = check_index(index, headers, store.location("."))
        notes += more
    if problems:
        raise CheckpointError(problems)
    if is_chunked(info.key for info in files):
        notes.append(
            f"chunks of a training checkpoint beside {shortlist(index.keys)} are not read; if they are the "
            "model that is meant, keep them in a directory of their own."
        )
    index_keys = () if index.weight_map is None else (index.names.index,)
    return _Weights(headers, (*index.notes, *notes), index_keys)


def read_safetensors(store: ReadStore, info: FileInfo) -> tuple[FileHeader, tuple[str, ...]]:
    return read_header(store, info.key, info.nbytes, info.version), ()


def _read_config(
    store: ReadStore, files: Sequence[FileInfo], *, pickled: bool, may_lack: bool
) -> dict[str, Any]:
    where = store.location(CONFIG_FILE)
    info = next((info for info in files if info.key == CONFIG_FILE), None)
    if info is None:
        # Without weights this is no model, which is said already; that it lacks a config too is no news.
        # A training checkpoint has its tensors alone.
        if may_lack or not _has_weights(files, pickled=pickled) or _is_raw_result(store, files):
            return {}
        if needs_no_config(store, {info.key: info for info in files}):
            return {}
        what = "is missing: it says what architecture the weights are of."
        raise CheckpointError(Problem(where, what, "Copy it from the place the weights come from."))
    # Not strict: transformers writes ``Infinity``, and takes the last of equal keys.
    config = read_object(read_bounded(store, CONFIG_FILE, info.nbytes), where, _MEND)
    if not config:
        remedy = "Take config.json from the place the weights come from."
        raise CheckpointError(Problem(where, "is not a JSON object with at least one field.", remedy))
    return config


def _read_hf_quant_config(store: ReadStore, files: Sequence[FileInfo]) -> dict[str, Any]:
    info = next((info for info in files if info.key == HF_QUANT_CONFIG), None)
    if info is None:
        return {}
    where = store.location(HF_QUANT_CONFIG)
    return read_object(read_bounded(store, HF_QUANT_CONFIG, info.nbytes), where, _MEND)


def _with_table(config: dict[str, Any], hf_quant_config: Mapping[str, Any]) -> dict[str, Any]:
    """The config, with the table of ModelOpt's file if it has no table of quantisation."""
    sections = (config, *(each for each in config.values() if isinstance(each, Mapping)))
    has_table = any(section.get(key) for section in sections for key in _QUANTISATION_TABLES)
    table = {} if has_table or not config else as_table(hf_quant_config)
    return {**config, _QUANTISATION_TABLES[0]: table} if table else config


def has_only_chunks(files: Sequence[FileInfo], *, pickled: bool) -> bool:
    """Whether these are a training checkpoint in chunks, without other weights that would be read."""
    return not _has_weights(files, pickled=pickled) and is_chunked(info.key for info in files)


def _has_weights(files: Sequence[FileInfo], *, pickled: bool) -> bool:
    kinds = (SAFETENSORS, PICKLES) if pickled else (SAFETENSORS,)
    return any(kind.are_in(info.key for info in files) for kind in kinds)


def _is_raw_result(store: ReadStore, files: Sequence[FileInfo]) -> bool:
    """Whether raymerge wrote these files without a config on purpose."""
    info = next((info for info in files if info.key == _RECORD_FILE), None)
    if info is None:
        return False
    try:
        manifest = load_json(read_bounded(store, info.key, info.nbytes))
    except (ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("config") == {}


def as_numbers(checkpoint: Checkpoint, packed: QuantisedWeights) -> Checkpoint:
    """The checkpoint with each quantised tensor as one: its shape in numbers, its codes' place.

    Raises CheckpointError: codes, scales and config do not fit together; with every problem."""
    if packed.faults:
        raise CheckpointError(packed.faults)
    stored = checkpoint.tensors
    if not packed.members:
        return replace(checkpoint, packs=packed, as_stored=stored)
    tensors = {name: tensor for name, tensor in stored.items() if name not in packed.members}
    for name, each in packed.tensors.items():
        codes, dtype = stored[each.codes], each.quant_spec.format.element_dtype
        tensors[name] = StoredTensor(
            name, dtype, each.quant_spec.logical_shape, codes.key, codes.offset, codes.nbytes
        )
    ordered = in_natural_order(tensors.values())
    return replace(checkpoint, tensors=ordered, packs=packed, as_stored=stored)
