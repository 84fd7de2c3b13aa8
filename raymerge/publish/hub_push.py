"""A published checkpoint as one commit of a repository on the Hub.

Pushed is what loaders read, with the model card. The record of the run stays where it is: it has the paths of
the sources, and the card names recipe, parents and plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from raymerge.checkpoints.files import MODEL_CARD, RECORD_DIRECTORY
from raymerge.errors import (
    CheckpointError,
    IncompleteError,
    OptionError,
    Problem,
    VerificationError,
    first_line,
    shortlist,
)
from raymerge.publish.finish import plan_in, read_record
from raymerge.storage.addresses import is_remote, shown
from raymerge.storage.hub import HubPlace, HubStore, is_barred, is_hub_name, meaning
from raymerge.storage.local.store import LocalStore
from raymerge.storage.store import FileInfo
from raymerge.verifier.structure import PROVENANCE_FILE, verify_structure

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")

_LOG_IN = "Log in with 'hf auth login', or set HF_TOKEN to a token that may write there."
_CHANGED = frozenset({409, 412})
_FULL_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class PushTarget:
    repository: str
    is_public: bool = False
    replaces: bool = False
    """Whether other content of the repository gives way, in the same commit."""


@dataclass(frozen=True, slots=True)
class Pushed:
    repository: str
    url: str
    commit: str
    is_new: bool
    """False where all of it was there already."""
    files: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Content:
    """What a repository holds."""

    commit: str
    is_private: bool
    files: tuple[FileInfo, ...]
    card: str

    @property
    def keys(self) -> tuple[str, ...]:
        """What somebody put there: the Hub itself makes a ``.gitattributes``."""
        return tuple(file.key for file in self.files if not file.key.startswith("."))


def check_push(target: PushTarget) -> None:
    """What hinders a push, as far as it is known before there is a checkpoint. Raises UserError: the name, no
    token or one that is not accepted, no network allowed, or a repository with other content;
    IncompleteError: the Hub does not answer."""
    where = target.repository
    if not is_hub_name(where) or "/" not in where:
        what = "is not the name of a repository."
        raise OptionError(Problem(f"--push {where}", what, "Write ORG/NAME, like my-name/my-merge."))
    if is_barred():
        what = "the Hub may not be asked (HF_HUB_OFFLINE is set)."
        raise OptionError(Problem(where, what, "Unset it for a push."))
    from huggingface_hub import get_token

    if get_token() is None:
        raise OptionError(Problem(where, "there is no token for the Hub.", _LOG_IN))
    _ask(lambda: _api().whoami(), where)
    content = _content(where)
    if content is not None:
        _check_content(content, target, None)


def push_checkpoint(directory: Path | str, target: PushTarget, *, shows_bars: bool = False) -> Pushed:
    """Verify what raymerge published in a directory, and push it as one commit.

    ``shows_bars``: whether the Hub's client shows its progress. Raises as ``check_push``; CheckpointError or
    VerificationError for the directory; IncompleteError: the upload broke off, and the same call goes on."""
    root = _directory(directory)
    with LocalStore(root) as store:
        record = read_record(store, PROVENANCE_FILE)
        files = [each for each in store.files() if _is_pushed(each.key)]
    verify_structure(root).require()
    check_push(target)
    try:
        with _progress_bars(shows_bars):
            return _push(root, files, target, str(record["plan"]))
    except IncompleteError as error:
        text = f"{error} The checkpoint is whole at {root}; what is left is the push. "
        raise IncompleteError(f"{text}The same command goes on.") from error


def _directory(place: Path | str) -> Path:
    if is_remote(str(place)):
        what = "is no directory of this machine, from which files could be pushed."
        raise OptionError(Problem(shown(str(place)), what, "Copy it to one, and push that."))
    root = Path(place)
    if not root.is_dir():
        what = "there is no such directory."
        raise CheckpointError(Problem(str(root), what, "Name one in which raymerge published a merge."))
    return root


def _is_pushed(key: str) -> bool:
    return not key.startswith((f"{RECORD_DIRECTORY}/", "."))


def _push(root: Path, files: Sequence[FileInfo], target: PushTarget, plan: str) -> Pushed:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    api, where = _api(), target.repository
    _ask(lambda: api.create_repo(where, private=not target.is_public, exist_ok=True), where)
    content = _content(where)
    if content is None:
        raise IncompleteError(f"{where}: the Hub does not show the repository that it made.")
    _check_content(content, target, plan)
    # The card of the same plan may have been edited there.
    is_ours = plan_in(content.card) == plan and not target.replaces
    added = [each for each in files if not (is_ours and each.key == MODEL_CARD)]
    gone = set() if is_ours else {*content.keys} - {each.key for each in files}
    operations: list[Any] = [CommitOperationAdd(each.key, root / each.key) for each in added]
    operations += [CommitOperationDelete(key) for key in sorted(gone)]
    message = f"Merge by raymerge, plan {plan}"
    made = _ask(
        lambda: api.create_commit(
            where, operations=operations, commit_message=message, parent_commit=content.commit
        ),
        where,
    )
    _check_pushed(HubPlace(where, str(made.oid)), files)
    nbytes = sum(each.nbytes for each in files)
    url = f"{api.endpoint}/{where}"
    return Pushed(where, url, str(made.oid), made.oid != content.commit, len(files), nbytes)


def _api() -> HfApi:
    from huggingface_hub import HfApi, constants

    return HfApi(endpoint=constants.ENDPOINT, library_name="raymerge")


def _content(repository: str) -> _Content | None:
    """None where there is no such repository."""
    from huggingface_hub.errors import RepositoryNotFoundError

    def ask() -> Any:
        try:
            return _api().model_info(repository)
        except RepositoryNotFoundError:
            return None

    info = _ask(ask, repository)
    if info is None:
        return None
    commit = str(info.sha or "")
    if _FULL_COMMIT.fullmatch(commit) is None:
        return _Content("", bool(info.private), (), "")
    with HubStore(HubPlace(repository, commit)) as store:
        files = {each.key: each for each in store.files()}
        card = files.get(MODEL_CARD)
        text = "" if card is None else store.read(MODEL_CARD, 0, card.nbytes).decode(errors="replace")
    return _Content(commit, bool(info.private), tuple(files.values()), text)


def _check_content(content: _Content, target: PushTarget, plan: str | None) -> None:
    """``plan``: the digest of what is pushed, once it is known."""
    where = target.repository
    if content.is_private is target.is_public:
        there, asked = ("private", "public") if content.is_private else ("public", "private")
        what = f"the repository is {there}, and what is pushed is to be {asked}."
        remedy = "Leave out --public" if target.is_public else "Give --public"
        raise OptionError(Problem(where, what, f"{remedy}, or change that in its settings."))
    if target.replaces or not content.keys:
        return
    planned = plan_in(content.card)
    if planned is None:
        what = f"the repository holds what raymerge did not push, such as {content.keys[0]}."
    elif plan not in (None, planned):
        what = f"the repository holds a merge of another plan, {planned}; this one is of {plan}."
    else:
        return
    remedy = "Name another repository, or give --replace: a commit takes their place."
    raise OptionError(Problem(where, what, remedy))


def _check_pushed(place: HubPlace, files: Sequence[FileInfo]) -> None:
    """Raises VerificationError: the Hub left something out, as by a ``.gitignore`` of the repository."""
    with HubStore(place) as store:
        keys = {each.key for each in store.files()}
    if missing := [each.key for each in files if each.key not in keys]:
        what = f"the commit lacks what was pushed: {shortlist(missing)}."
        remedy = "Remove the .gitignore of the repository if it has one, and push again."
        raise VerificationError(Problem(str(place), what, remedy))


def _ask(request: Callable[[], T], where: str) -> T:
    """Raises OptionError: the Hub refuses it; IncompleteError: it may work later."""
    try:
        return request()
    except Exception as error:  # the client raises a dozen unrelated kinds, also those of its HTTP library
        raise _refused(error, where) from error


def _refused(error: Exception, where: str) -> Exception:
    cause = error
    while type(cause) is RuntimeError and isinstance(cause.__cause__, Exception):
        cause = cause.__cause__  # The client tells so which file it was at.
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if status == 401:
        return OptionError(Problem(where, "the Hub does not accept the token (401).", _LOG_IN))
    if status == 403:
        return OptionError(Problem(where, "the token may not write there (403).", _LOG_IN))
    if status in _CHANGED:
        return IncompleteError(f"{where}: the repository was changed meanwhile ({status}).")
    if isinstance(cause, ValueError):
        what = f"the Hub refuses it: {first_line(cause)}."
        return OptionError(Problem(where, what, "Correct what it names, and push again."))
    meant = meaning(cause, where)
    if isinstance(meant, CheckpointError) and status is not None:
        return meant
    failed = f"the Hub's client failed with {type(cause).__name__}"
    return IncompleteError(f"{where}: {meant.strerror if isinstance(meant, OSError) else failed}.")


@contextmanager
def _progress_bars(are_shown: bool) -> Iterator[None]:
    from huggingface_hub import utils

    client: Any = utils
    if are_shown or client.are_progress_bars_disabled():
        yield
        return
    client.disable_progress_bars()
    try:
        yield
    finally:
        client.enable_progress_bars()
