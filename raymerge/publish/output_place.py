"""What lies at an output's place, and what of it may be deleted with a checkpoint: what its record lists;
without a record, files of the usual names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import xxhash

from raymerge.checkpoints.files import MODEL_CARD, PICKLES, RECORD_DIRECTORY, SAFETENSORS
from raymerge.checkpoints.json_files import load_json
from raymerge.checkpoints.source import CONFIG_FILE, Holding
from raymerge.checkpoints.tokenizer import MORE_TEMPLATES
from raymerge.errors import OptionError, Problem, TargetError
from raymerge.options import RunOptions
from raymerge.publish.record import JOURNAL
from raymerge.storage.addresses import is_remote, parent_and_name, parse_place, shown, with_options

INSIDE = "lies inside"
_ELSEWHERE = "Choose another -o, outside the sources."


def place_of(output: Path | str, options: RunOptions) -> Path | str:
    """A path, or another place's address with its options; raises OptionError for a bad address."""
    text = str(output)
    return with_options(text, options.storage) if is_remote(text) else Path(parse_place(text).text)


def check_apart(output: Path | str, held: Sequence[Holding], alone: Collection[str] = ()) -> None:
    """Raises TargetError for an output over, in or around a source, which it would destroy or join;
    ``alone`` are roots of sources that are one file."""
    place = str(output)
    for source in held:
        verb = relation(place, source.root)
        # The directory of a single file is no checkpoint, and may hold anything beside it.
        if verb is not None and not (source.root in alone and verb == INSIDE):
            what = f"the output place {verb} the source {source.name}."
            raise TargetError(Problem(shown(place), what, _ELSEWHERE))


def relation(place: str, other: str) -> str | None:
    """How a place stands to another one, as a verb between the two; None where neither is in the other."""
    own, root = _parts(place), _parts(other)
    if own == root:
        return "is"
    if _lies_in(root, own):
        return "holds"
    return INSIDE if _lies_in(own, root) else None


def check_printable(place: str) -> None:
    if not place.isprintable():
        what = "the name holds characters that cannot be written."
        raise TargetError(Problem(ascii(shown(place)), what, "Choose another -o."))


def _parts(place: str) -> tuple[str, ...]:
    address = parse_place(place)
    if is_remote(place):
        return address.scheme, *address.text.split("/")
    return "file", *Path(os.path.realpath(address.text)).parts


def _lies_in(inner: tuple[str, ...], outer: tuple[str, ...]) -> bool:
    return len(inner) > len(outer) and inner[: len(outer)] == outer


_MOST_NAME = 64
"""Characters of an output's name that tell people what a directory is of; the digest tells them apart."""


def steps_directory(output: Path | str, steps: str | None = None) -> Path:
    """The directory of one output's intermediate results, below ``steps`` if the user names that; the same
    command finds it again. Beside a place in an object store there is none."""
    if steps is not None:
        name = re.sub(r"[^A-Za-z0-9._-]", "_", Path(_identity(output)).name)[-_MOST_NAME:]
        digest = xxhash.xxh3_128_hexdigest(_identity(output).encode("utf-8", "surrogateescape"))
        return Path(os.path.realpath(os.path.expanduser(steps))) / f"{name}-{digest[:16]}"
    if is_remote(str(output)):
        return Path(os.devnull) / "steps"
    return steps_beside(Path(os.path.realpath(output)))


def steps_beside(output: Path) -> Path:
    return output.parent / f".{output.name}.raymerge.steps"


def sweep_steps(place: Path | str, steps: str | None = None) -> Path:
    """The directory of the intermediate results of a sweep whose outputs lie below a place: among them, as
    nothing may be writable around it. As ``steps_directory`` otherwise."""
    if steps is not None or is_remote(str(place)):
        return steps_directory(place, steps)
    return Path(os.path.realpath(place)) / ".raymerge.steps"


def kept_directories(output: Path | str, steps: str | None = None) -> tuple[Path, ...]:
    """Where intermediate results of an output may be kept: for it alone, or for the sweep that it is of."""
    own = steps_directory(output, steps)
    try:
        return own, sweep_steps(parent_and_name(str(output))[0], steps)
    except OptionError:
        return (own,)


def _identity(output: Path | str) -> str:
    if not is_remote(str(output)):
        return os.path.realpath(output)
    address = parse_place(str(output))
    # Two servers may each have a bucket of one name.
    server = address.options.endpoint or ""
    return f"{server}|{address.scheme}://{address.text}"


MANIFEST = f"{RECORD_DIRECTORY}/plan/manifest.json"
"""Key of what says whose the place is."""
_LEFT = frozenset({f"{RECORD_DIRECTORY}/stop.json", f"{RECORD_DIRECTORY}/{JOURNAL}"})
"""What a run may leave that came no further."""
_RECORDED = ("plan", "ledger", "stages")

_USUAL_NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model*", "spiece.model", "sentencepiece*.model", "*.tiktoken", "tekken.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.json", "*.jinja"),
    *("generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("video_preprocessor_config.json", "quantization_config.json", "quantize_config.json"),
    *("hf_quant_config.json", "modules.json", "sentence_bert_config.json", "configuration.json"),
    *("config_sentence_transformers.json", "spk_dict.pt", "training_args.bin", "trainer_state.json"),
    *("all_results.json", "train_results.json", "eval_results.json"),
    *("configuration_*.py", "modeling_*.py", "tokenization_*.py", "processing_*.py"),
    *("image_processing_*.py", "video_processing_*.py", "feature_extraction_*.py"),
    *("LICENSE*", "LICENCE*", "NOTICE", "NOTICE.*", "USE_POLICY*", ".gitattributes"),
)
"""Names of files that publishers and trainers put beside the weights of a checkpoint."""


@dataclass(frozen=True, slots=True)
class RecordedFiles:
    """Files beside the weights that belong to a checkpoint, as its record says."""

    keys: frozenset[str] = frozenset()
    is_complete: bool = False


def is_empty(keys: Collection[str]) -> bool:
    return _LEFT.issuperset(keys)


def is_checkpoint(keys: Collection[str], manifest: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is there, or an unfinished run: one with the plan's manifest in its record.

    ``keys`` need not name the files in directories."""
    names = [key for key in keys if "/" not in key]
    has_weights = SAFETENSORS.are_in(names) or PICKLES.are_in(names)
    return "digest" in manifest or (CONFIG_FILE in keys and has_weights)


def no_checkpoint(where: str, keys: Collection[str], thing: str = "checkpoint") -> Problem:
    example = min(keys, key=lambda key: (key == CONFIG_FILE or _is_usual(key), key))
    what = f"there are {len(keys)} other files here, such as {example}."
    return Problem(where, what, f"Choose another -o: no {thing} is there to replace.")


def no_part(where: str, key: str, thing: str = "checkpoint") -> Problem:
    what = f"files here are no part of the {thing}, such as {key}."
    remedy = f"Choose another -o, or move them elsewhere: --replace deletes a {thing} alone."
    return Problem(where, what, remedy)


def foreign_files(
    keys: Iterable[str], recorded: Callable[[], RecordedFiles], *, is_recorded: bool
) -> Iterator[str]:
    """Files that are no part of the checkpoint there, so that they must not be deleted with it.

    A checkpoint is its weights, index, config and card, its record, its chat templates, and what the record
    lists; where no record lists everything, also files of the usual names at the top. ``recorded`` reads what
    the record lists; it is called at most once."""
    listed: RecordedFiles | None = None
    for key in keys:
        if _is_part(key, is_recorded=is_recorded):
            continue
        if listed is None:
            listed = recorded() if is_recorded else RecordedFiles()
        if key not in listed.keys and (listed.is_complete or not _is_usual(key)):
            yield key


def recorded_files(conditions: Mapping[str, Any] | None, provenance: bytes) -> RecordedFiles:
    given = ((conditions or {}).get(key) for key in ("companions", "layout"))
    listed = [each for files in given if isinstance(files, list) for each in files]
    copied = {each[0] for each in listed if isinstance(each, list) and each and isinstance(each[0], str)}
    try:
        files = load_json(provenance).get("files")
    except (ValueError, AttributeError, RecursionError):
        files = None
    is_complete = isinstance(files, dict)
    return RecordedFiles(frozenset({*copied, *(files if is_complete else ())}), is_complete)


def keys_below(root: Path) -> Iterator[str]:
    """Every file below a directory, hidden ones included; for a link to a directory its name with a slash."""
    for folder, directories, files in os.walk(root):
        directories.sort()
        before = "" if folder == str(root) else Path(folder).relative_to(root).as_posix() + "/"
        yield from (f"{before}{name}/" for name in directories if os.path.islink(os.path.join(folder, name)))
        yield from (f"{before}{name}" for name in sorted(files))


def _is_part(key: str, *, is_recorded: bool) -> bool:
    directory, *others = key.split("/")
    if not others:
        is_pickled = not is_recorded and PICKLES.are_in([key])
        return key in (CONFIG_FILE, MODEL_CARD) or SAFETENSORS.are_in([key]) or is_pickled
    if directory == MORE_TEMPLATES:
        return len(others) == 1
    is_record = directory == RECORD_DIRECTORY and (len(others) == 1 or others[0] in _RECORDED)
    return (is_record and is_recorded) or key in _LEFT


def _is_usual(key: str) -> bool:
    return "/" not in key and any(fnmatchcase(key, pattern) for pattern in _USUAL_NAMES)
