"""What the Hub refuses, in words; and which of its failures another attempt may mend."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

from raymerge.errors import CheckpointError, Problem, UnreadableError

_LOG_IN = "Log in with 'hf auth login' or set HF_TOKEN, on every machine that reads it."
_ACCESS = f"Ask for access on its page. {_LOG_IN}"
_REFUSALS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "OfflineModeIsEnabled": (
            "it is not whole in the Hub's local cache, and the Hub may not be asked (HF_HUB_OFFLINE is set).",
            "Unset HF_HUB_OFFLINE, or fetch it first with 'hf download'.",
        ),
        "GatedRepoError": ("the Hub gives it only to those who were granted access.", _ACCESS),
        "DisabledRepoError": ("the Hub has disabled this repository.", "Take another model."),
        "RepositoryNotFoundError": (
            "the Hub has no such repository, or it is private.",
            f"Check the name. If it is private: {_LOG_IN[0].lower()}{_LOG_IN[1:]}",
        ),
        "RevisionNotFoundError": (
            "the repository has no such revision.",
            "Check the branch, tag or commit behind the '@'.",
        ),
        "EntryNotFoundError": ("the repository has no such file at this revision.", "Check the address."),
        "FileMetadataError": (
            "what answered does not speak as the Hub does.",
            "Check HF_ENDPOINT, and the proxy if there is one.",
        ),
    }
)
"""What a failure means and what to do, by the name of its class, which is that in all versions."""
_LOST = frozenset({"NetworkError", "RemoteProtocolError", "TimeoutException"})
"""Failures of the connection, in the HTTP library of the client, whichever that is."""
_BUSY = frozenset({408, 425, 429})
_MOST_LETTERS = 120

_Result = TypeVar("_Result")


def asked(request: Callable[[], _Result], where: str) -> _Result:
    """The result of a request to the Hub.

    Raises:
        OSError: with a number of ``patience.TRANSIENT``: another attempt may do.
        UnreadableError: the Hub refuses it, or this machine may not ask.
        CheckpointError: the answer makes no sense.
    """
    try:
        return request()
    except CheckpointError:
        raise
    except Exception as error:  # the client raises a dozen unrelated kinds, also those of its HTTP library
        raise _meaning(error, where) from error


def refusal(status: int, where: str) -> OSError | CheckpointError:
    """What a status means that is no success."""
    if status >= 500 or status in _BUSY:
        return OSError(errno.EAGAIN, f"the server answered {status}")
    if status == 401:
        return UnreadableError(Problem(where, "the Hub does not accept who asks (401).", _LOG_IN))
    if status == 403:
        return UnreadableError(Problem(where, "the Hub forbids to read it (403).", _ACCESS))
    if status == 404:
        what, remedy = _REFUSALS["EntryNotFoundError"]
        return UnreadableError(Problem(where, what, remedy))
    what = f"the Hub answered with the status {status}."
    return CheckpointError(
        Problem(where, what, "Check the address, HF_ENDPOINT and the proxy if there is one.")
    )


def _meaning(error: Exception, where: str) -> OSError | CheckpointError:
    names = [kind.__name__ for kind in type(error).__mro__]
    for name in names:
        if name in _REFUSALS:
            return UnreadableError(Problem(where, *_REFUSALS[name]))
    if _LOST.intersection(names):
        number = errno.ETIMEDOUT if "TimeoutException" in names else errno.ECONNRESET
        return OSError(number, f"{type(error).__name__}: {_first_line(error)}")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return refusal(status, where)
    # Its text may hold a signed address.
    what = f"the Hub's client failed with {type(error).__name__}."
    return CheckpointError(Problem(where, what, "Check HF_ENDPOINT, and the proxy if there is one."))


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:_MOST_LETTERS] if text else "no answer"
