"""What object stores refuse, in words; and what of it may go well when it is tried again."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from raymerge.errors import CheckpointError, OptionError, Problem, UnreadableError
from raymerge.storage.addresses import parse_place, shown
from raymerge.storage.objects.client import NOWHERE, chain_of, no_credentials
from raymerge.storage.refusals import changed

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([\w.]{1,60})</Code>")
_REASON = re.compile(r" - (?P<reason>[^<\n]{1,200})")
_REFUSED = frozenset({"401", "403"})
_TRIED_AGAIN = frozenset({"408", "429"})
_REDIRECTED = re.compile(rf"\b{re.escape(NOWHERE)}\b")
_OTHER_REGION = frozenset({"301", "307"})
_OF_CREDENTIALS = re.compile(r"credential|sso|token has expired|metadata", re.IGNORECASE)
_GIVERS = re.compile(r"performing token request|//169\.254\.|//metadata\.")
"""Words about a request to whoever gives credentials, rather than to the store."""
_URL = re.compile(r"https?://\S+")
_NO_BUCKET = re.compile(r"<Code>(NoSuchBucket|ContainerNotFound)</Code>")
_NO_UPLOAD = "<Code>InvalidBlockList</Code>"
"""What Azure says of the end of an upload that it has no longer, or that has come to its end already."""
_SERVERS = {
    "s3": "the endpoint and region in storage:",
    "gs": "GOOGLE_BASE_URL where that is set",
    "az": "the account that AZURE_STORAGE_ACCOUNT_NAME names",
}
"""What says which server is asked."""
_ALLOWING = {"s3": "AWS_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}


@contextmanager
def asking(place: str, location: str) -> Iterator[None]:
    """Says of what an object store refuses what it means.

    Args:
        place: the place that is asked, with its options.

    Raises:
        OSError: what may be tried again, with a number that ``RetryPolicy`` knows; or the object is gone.
        CheckpointError: what will not change by itself: the object is another, there is no such bucket, the
            credentials do not do, or nobody gives any.
        OptionError: the server may not be asked without TLS.
    """
    from obstore.exceptions import BaseError, PreconditionError

    try:
        yield
    except PreconditionError as error:
        raise CheckpointError(changed(location)) from error
    except FileNotFoundError as error:
        if _NO_BUCKET.search(str(error)):
            raise CheckpointError(_no_bucket(place)) from error
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), location) from error
    except BaseError as error:
        raise _meant(error, place, location) from error
    except OSError as error:
        # What the client's streams end with is of no kind of its own, and has no number.
        if error.errno is not None:
            raise
        raise _meant(error, place, location) from error


def told(error: Exception) -> str:
    """What a server said, without what the client adds to it: ``503 SlowDown``, or the client's own words."""
    # Behind the first empty line the client shows its inner state.
    text = str(error).partition("\n\n")[0]
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is not None:
        return f"{status.group(1)} {code.group(1)}" if code is not None else f"status {status.group(1)}"
    reason = _REASON.search(text)
    return (reason["reason"] if reason else text[:200]).strip()


def lacks_credentials(error: Exception) -> bool:
    """Whether nobody gives this machine credentials, as far as what the client says tells it."""
    text = str(error).partition("\n\n")[0]
    found = _STATUS.search(text)
    status = found.group(1) if found is not None else ""
    return bool(_GIVERS.search(text)) and status[:1] != "5" and status not in _TRIED_AGAIN


def _meant(error: Exception, place: str, location: str) -> Exception:
    if _REDIRECTED.search(str(error)):
        return CheckpointError(_redirected(place))
    text = str(error).partition("\n\n")[0]
    found = _STATUS.search(text)
    status = found.group(1) if found is not None else ""
    if lacks_credentials(error):
        return UnreadableError(no_credentials(parse_place(place), told(error)))
    if _NO_BUCKET.search(text):
        return CheckpointError(_no_bucket(place))
    if _NO_UPLOAD in text:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), location)
    if status in _REFUSED or type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        return UnreadableError(_denied(place, location, told(error)))
    is_region = parse_place(place).scheme == "s3" and status in _OTHER_REGION
    if is_region or "AuthorizationHeaderMalformed" in text or "configured region" in text:
        return CheckpointError(_elsewhere(place))
    if status.startswith("3"):
        return CheckpointError(_redirected(place))
    # Addresses hold what the user has called things.
    if not status and _OF_CREDENTIALS.search(_URL.sub("", text)):
        return UnreadableError(_denied(place, location, told(error)))
    if status.startswith("4") and status not in _TRIED_AGAIN:
        what = f"cannot be read: the server says {told(error)}."
        return UnreadableError(Problem(location, what, "Check the place and the options in storage:."))
    if "builder error" in text:
        return OptionError(_without_tls(place))
    if not status and "error sending request" in text:
        return OSError(errno.EHOSTUNREACH, f"the server cannot be reached{_at(place)}")
    if not status and "timed out" in text:
        return OSError(errno.ETIMEDOUT, "the server did not answer in time")
    return OSError(errno.EIO if status else errno.ECONNRESET, told(error))


def _no_bucket(place: str) -> Problem:
    address = parse_place(place)
    what = f"there is no bucket '{address.bucket}'{_at(place)}."
    return Problem(shown(place), what, f"Check its name, and {_SERVERS[address.scheme]}.")


def _at(place: str) -> str:
    """Which server is asked, as far as the user's options say it."""
    address = parse_place(place)
    return f" at {address.options.endpoint}" if address.scheme == "s3" and address.options.endpoint else ""


def _without_tls(place: str) -> Problem:
    what = "the address of its server is none that may be asked: it is no URL, or one without TLS."
    variable = _ALLOWING[parse_place(place).scheme]
    remedy = f"Take https://, or allow it: allow_http: true in storage:, or {variable}=true."
    return Problem(shown(place), what, remedy)


def _denied(place: str, location: str, said: str) -> Problem:
    address = parse_place(place)
    if address.options.anonymous:
        what = f"may not be read by everybody: the server says {said}."
        return Problem(location, what, "Take anonymous out of storage:, and give credentials.")
    chain = chain_of(address.scheme)
    what = f"may not be read with the credentials of this machine: the server says {said}."
    remedy = f"Looked for were {chain}. Give credentials there that may list and read it."
    return Problem(location, what, remedy)


def _elsewhere(place: str) -> Problem:
    what = f"the bucket '{parse_place(place).bucket}' is in another region than the one that was asked."
    return Problem(shown(place), what, "Set its region in storage:, or AWS_REGION.")


def _redirected(place: str) -> Problem:
    what = f"the server{_at(place)} sends requests on to another host, which is given no credentials."
    remedy = f"Name the server that has it: {_SERVERS[parse_place(place).scheme]}."
    return Problem(shown(place), what, remedy)
