"""A place in an object store, read by ranges with this machine's credentials; its errors in plain words."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from raymerge.errors import CheckpointError, OptionError, Problem, UnreadableError, first_line
from raymerge.storage.addresses import Place, StoreOptions, parse_place, shown
from raymerge.storage.remote import RangedStore
from raymerge.storage.retry import RetryPolicy, changed, reading
from raymerge.storage.store import NO_FILES, Buffer, FileInfo, is_listed

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ObjectStore as Client
    from obstore.store import RetryConfig


class _Scheme(NamedTuple):
    extra: str
    """Of the package, with the client."""
    chain: str
    """Where credentials are looked for, in words."""
    variables: str
    server: str
    allow_http: str
    url_prefixes: tuple[str, ...]
    """Of environment variables that name servers to the client, credential servers included."""
    credential_hosts: tuple[str, ...] = ()
    """Other hosts that give credentials to the client; on S3 boto3 does that."""


_SCHEMES: Mapping[str, _Scheme] = {
    "s3": _Scheme(
        "s3",
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the files in ~/.aws, SSO, a web identity, and the "
        "role of the container or machine",
        variables="the variables AWS_*",
        server="the endpoint and region in storage:",
        allow_http="AWS_ALLOW_HTTP",
        url_prefixes=("AWS_",),
    ),
    "gs": _Scheme(
        "gcs",
        "GOOGLE_APPLICATION_CREDENTIALS, the files of gcloud, and the service account of the machine",
        variables="the variables GOOGLE_*",
        server="GOOGLE_BASE_URL where that is set",
        allow_http="GOOGLE_ALLOW_HTTP",
        url_prefixes=("GOOGLE_", "GCE_METADATA_"),
        credential_hosts=(
            "accounts.google.com",
            "oauth2.googleapis.com",
            "metadata.google.internal",
            "169.254.169.254",
        ),
    ),
    "az": _Scheme(
        "azure",
        "the AZURE_STORAGE_* variables, a workload identity, and the managed identity of the machine",
        variables="AZURE_STORAGE_ACCOUNT_NAME and the other variables AZURE_*",
        server="the account that AZURE_STORAGE_ACCOUNT_NAME names",
        allow_http="AZURE_ALLOW_HTTP",
        url_prefixes=("AZURE_", "AZURITE_", "IDENTITY_", "MSI_"),
        credential_hosts=("login.microsoftonline.com", "169.254.169.254"),
    ),
}
READ_SECONDS = 30.0
"""How long a server may be silent before a request fails."""
_CONNECT_SECONDS = 10
_WHOLE_SECONDS = 600
_RETRIES = 3
"""Retries of the client itself; ``RetryPolicy`` retries on top."""
_RETRY_SECONDS = 60
_MOST_WAIT_SECONDS = 5
_PAGE = 1000
NOWHERE = "127.0.0.1:0"
"""Where no server can be: requests to unexpected hosts are sent there."""


@dataclass(frozen=True, slots=True)
class ObjectClient:
    store: Client = field(repr=False)
    """obstore's client of the bucket; its paths begin with ``prefix``. Thread-safe."""
    prefix: str
    """Path of the place in the bucket, without slashes at its ends; "" for the bucket itself."""

    def path(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    def listed(self) -> Iterator[FileInfo]:
        """Every object below the place, listed page by page; without placeholders that some tools leave for
        directories."""
        prefix = f"{self.prefix}/" if self.prefix else ""
        for page in self.store.list(prefix=prefix or None, chunk_size=_PAGE):
            for meta in page:
                if meta["path"].startswith(prefix):
                    yield file_info(meta["path"].removeprefix(prefix), meta)


def file_info(key: str, meta: Mapping[str, Any]) -> FileInfo:
    # Listings of buckets that keep versions do not tell them, so that the tag alone is the version here.
    version = str(meta.get("e_tag") or f"W/{meta['last_modified'].timestamp()}")
    if not version.startswith(('"', "W/")):
        # Azure's listings leave out the quotes that its answers have, and that it asks for.
        version = f'"{version}"'
    return FileInfo(key, int(meta["size"]), version)


def object_client(
    address: Place,
    *,
    read_seconds: float = READ_SECONDS,
    retries: int = _RETRIES,
    whole_seconds: float = _WHOLE_SECONDS,
) -> ObjectClient:
    """A connection to the bucket of an address; sends nothing yet. ``read_seconds``: how long the server may
    be silent before a request fails. ``retries``: retries by the client itself. ``whole_seconds``: limit of
    one request. Raises OptionError: the client package is not installed, or it does not know an option;
    CheckpointError: no credentials."""
    try:
        from obstore.exceptions import BaseError
    except ImportError as error:
        raise OptionError(_missing(address, "obstore")) from error
    try:
        return ObjectClient(_client(address, read_seconds, retries, whole_seconds), address.prefix)
    except BaseError as error:
        what = f"the client of the store does not take its settings: {first_line(error)}."
        remedy = (
            f"Check storage: in the profile, and {_SCHEMES[address.scheme].variables} in the environment."
        )
        raise OptionError(Problem(shown(str(address)), what, remedy)) from error


def _client(address: Place, read_seconds: float, retries: int, whole_seconds: float) -> Client:
    from obstore import store as stores

    # As settings of the store: options of the client would put aside what the environment says of it.
    config: Any = {
        "timeout": _duration(whole_seconds),
        "connect_timeout": _duration(min(_CONNECT_SECONDS, whole_seconds)),
        "read_timeout": _duration(read_seconds),
    }
    if address.options.allow_http:
        config["allow_http"] = "true"
    if address.options.anonymous:
        config["skip_signature"] = True
    retry: RetryConfig = {
        "max_retries": retries,
        "retry_timeout": timedelta(seconds=_RETRY_SECONDS),
        "backoff": {"max_backoff": timedelta(seconds=_MOST_WAIT_SECONDS)},
    }
    kind: Any = {"s3": stores.S3Store, "gs": stores.GCSStore, "az": stores.AzureStore}[address.scheme]
    given: dict[str, Any] = {"retry_config": retry}
    if address.scheme == "s3":
        own, given["credential_provider"] = _s3(address)
        config |= own
    client: Client = kind(address.bucket, config=config | _only_own_hosts(kind, address, config), **given)
    return client


def _only_own_hosts(kind: Any, address: Place, config: Mapping[str, Any]) -> dict[str, str]:
    """Settings that let a client speak only to its own server and to credential servers.

    The client follows redirects, which cannot be turned off. It would send another host the session token of
    S3 and, in the referring address, the signature of Azure. So all other hosts go through a proxy that does
    not exist. A proxy of the user decides instead."""
    url = urlsplit(_server_url(kind, address, config))
    host = url.hostname or ""
    proxies = getproxies()
    has_proxy = url.scheme in proxies or "all" in proxies
    scheme = _SCHEMES[address.scheme]
    prefix = scheme.url_prefixes[0]
    if f"{prefix}PROXY_URL" in os.environ or (has_proxy and not proxy_bypass(host)):
        return {}
    hosts = {host, *scheme.credential_hosts, *_environment_hosts(scheme.url_prefixes)}
    return {"proxy_url": f"http://{NOWHERE}", "proxy_excludes": ",".join(sorted(hosts))}


def _server_url(kind: Any, address: Place, config: Mapping[str, Any]) -> str:
    """The server address that a client derives from settings and environment; "" if there is none.

    The client shows it only in errors, so it is made to fail without a request."""
    from obstore.exceptions import BaseError

    no_way: dict[str, Any] = {"proxy_url": f"http://{NOWHERE}", "proxy_excludes": "", "skip_signature": True}
    if address.scheme == "s3":
        # Where the environment has one of them, the client wants both.
        no_way |= {"access_key_id": "none", "secret_access_key": "none"}
    client = kind(address.bucket, config={**config, **no_way}, retry_config={"max_retries": 0})
    try:
        client.head("x")
    except BaseError as error:
        named = _URL.search(str(error))
        return named.group() if named is not None else ""
    return ""


def _environment_hosts(prefixes: tuple[str, ...]) -> Iterator[str]:
    for name, value in os.environ.items():
        if name.startswith(prefixes):
            text = value if "://" in value else f"//{value}" if name.startswith("GCE_METADATA_") else ""
            with suppress(ValueError):
                if host := urlsplit(text).hostname:
                    yield host


def _duration(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"


def chain_of(scheme: str) -> str:
    return _SCHEMES[scheme].chain


def _s3(address: Place) -> tuple[dict[str, Any], Any]:
    options = address.options
    config = {"endpoint": options.endpoint, "region": options.region}
    given: dict[str, Any] = {name: value for name, value in config.items() if value is not None}
    if options.kms_key is not None:
        given |= {"server_side_encryption": "aws:kms", "sse_kms_key_id": options.kms_key}
    if options.requester_pays:
        given["request_payer"] = True
    provider = None if options.anonymous else _boto3_provider(address, options)
    return given, provider


def _boto3_provider(address: Place, options: StoreOptions) -> Any:
    """Credentials by boto3's chain, which knows more kinds than the client."""
    try:
        import boto3
        import botocore.exceptions
    except ImportError as error:
        raise OptionError(_missing(address, "boto3")) from error
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        session = boto3.Session(profile_name=options.profile, region_name=options.region)
        if session.get_credentials() is None:
            raise CheckpointError(no_credentials(address))
        return Boto3CredentialProvider(session)
    except botocore.exceptions.BotoCoreError as error:
        where, what = "storage: profile", f"AWS gives no credentials: {error}."
        remedy = "Check the profile and the files in ~/.aws of this machine."
        raise OptionError(Problem(where, what, remedy)) from error


def no_credentials(address: Place, message: str = "") -> Problem:
    reason = f" ({message})" if message else ""
    what = f"there are no credentials{reason}. Asked were {chain_of(address.scheme)}."
    remedy = "Give them there, or set anonymous: true in storage: for a bucket that anybody may read."
    return Problem(shown(str(address)), what, remedy)


def _missing(address: Place, package: str) -> Problem:
    extra = _SCHEMES[address.scheme].extra
    what = f"{package}, which reads {address.scheme}:// places, is not installed."
    return Problem(shown(str(address)), what, f"Run: pip install 'raymerge[{extra}]'")


_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([\w.]{1,60})</Code>")
_REASON = re.compile(r" - (?P<reason>[^<\n]{1,200})")
_REFUSED = frozenset({"401", "403"})
_TRIED_AGAIN = frozenset({"408", "429"})
_REDIRECTED = re.compile(rf"\b{re.escape(NOWHERE)}\b")
_OTHER_REGION = frozenset({"301", "307"})
_OF_CREDENTIALS = re.compile(r"credential|sso|token has expired|metadata", re.IGNORECASE)
_GIVERS = re.compile(r"performing token request|//169\.254\.|//metadata\.")
"""Messages about a request to a credential server rather than the store."""
_URL = re.compile(r"https?://\S+")
_NO_BUCKET = re.compile(r"<Code>(NoSuchBucket|ContainerNotFound)</Code>")
_NO_UPLOAD = "<Code>InvalidBlockList</Code>"
"""Azure's error at the end of an upload that is gone or already complete."""


@contextmanager
def asking(place: Place, location: str) -> Iterator[None]:
    """Translate errors of an object store. Raises OSError: transient, with an errno that ``RetryPolicy``
    knows; or the object is gone; CheckpointError: permanent: a changed object, no such bucket, or credentials
    refused or missing; OptionError: the server may not be asked without TLS."""
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


def server_message(error: Exception) -> str:
    """The server's message without the client's additions: ``503 SlowDown``; or the client's own."""
    text, status = _answer(error)
    if status:
        code = _CODE.search(text)
        return f"{status} {code.group(1)}" if code is not None else f"status {status}"
    reason = _REASON.search(text)
    return (reason["reason"] if reason else text[:200]).strip()


def lacks_credentials(error: Exception) -> bool:
    """Whether an error of the client means that it got no credentials."""
    text, status = _answer(error)
    return bool(_GIVERS.search(text)) and status[:1] != "5" and status not in _TRIED_AGAIN


def _answer(error: Exception) -> tuple[str, str]:
    """The text of an error of the client, and the status that the server answered; "" without an answer."""
    # Behind the first empty line the client shows its inner state.
    text = str(error).partition("\n\n")[0]
    answer = _STATUS.search(text)
    return text, answer.group(1) if answer is not None else ""


def _meant(error: Exception, place: Place, location: str) -> Exception:
    if _REDIRECTED.search(str(error)):
        return CheckpointError(_redirected(place))
    (text, status), message = _answer(error), server_message(error)
    if lacks_credentials(error):
        return UnreadableError(no_credentials(place, message))
    if _NO_BUCKET.search(text):
        return CheckpointError(_no_bucket(place))
    if _NO_UPLOAD in text:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), location)
    if status in _REFUSED or type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        return UnreadableError(_denied(place, location, message))
    is_region = place.scheme == "s3" and status in _OTHER_REGION
    if is_region or "AuthorizationHeaderMalformed" in text or "configured region" in text:
        return CheckpointError(_elsewhere(place))
    if status.startswith("3"):
        return CheckpointError(_redirected(place))
    # Addresses hold what the user has called things.
    if not status and _OF_CREDENTIALS.search(_URL.sub("", text)):
        return UnreadableError(_denied(place, location, message))
    if status.startswith("4") and status not in _TRIED_AGAIN:
        what = f"cannot be read: the server says {message}."
        return UnreadableError(Problem(location, what, "Check the place and the options in storage:."))
    if "builder error" in text:
        return OptionError(_without_tls(place))
    if not status and "error sending request" in text:
        return OSError(errno.EHOSTUNREACH, f"the server cannot be reached{_at(place)}")
    if not status and "timed out" in text:
        return OSError(errno.ETIMEDOUT, "the server did not answer in time")
    return OSError(errno.EIO if status else errno.ECONNRESET, message)


def _no_bucket(place: Place) -> Problem:
    what = f"there is no bucket '{place.bucket}'{_at(place)}."
    return Problem(shown(str(place)), what, f"Check its name, and {_SCHEMES[place.scheme].server}.")


def _at(place: Place) -> str:
    return f" at {place.options.endpoint}" if place.scheme == "s3" and place.options.endpoint else ""


def _without_tls(place: Place) -> Problem:
    what = "the address of its server is none that may be asked: it is no URL, or one without TLS."
    variable = _SCHEMES[place.scheme].allow_http
    remedy = f"Take https://, or allow it: allow_http: true in storage:, or {variable}=true."
    return Problem(shown(str(place)), what, remedy)


def _denied(place: Place, location: str, message: str) -> Problem:
    if place.options.anonymous:
        what = f"may not be read by everybody: the server says {message}."
        return Problem(location, what, "Take anonymous out of storage:, and give credentials.")
    chain = chain_of(place.scheme)
    what = f"may not be read with the credentials of this machine: the server says {message}."
    remedy = f"Looked for were {chain}. Give credentials there that may list and read it."
    return Problem(location, what, remedy)


def _elsewhere(place: Place) -> Problem:
    what = f"the bucket '{place.bucket}' is in another region than the one that was asked."
    return Problem(shown(str(place)), what, "Set its region in storage:, or AWS_REGION.")


def _redirected(place: Place) -> Problem:
    what = f"the server{_at(place)} sends requests on to another host, which is given no credentials."
    remedy = f"Name the server that has it: {_SCHEMES[place.scheme].server}."
    return Problem(shown(str(place)), what, remedy)


_CHUNK_NBYTES = 256 << 10
"""Bytes of an answer that a request buffers before they go to the caller's memory."""
_FEW = 2
_MOST_FILES = 100_000


class ObjectStore(RangedStore):
    """Objects below a place. Thread-safe.

    Every read names the expected version, or the first one that this store saw. The server refuses another
    one, so bytes of two versions never mix."""

    def __init__(
        self,
        place: str,
        *,
        retry_policy: RetryPolicy | None = None,
        expected: Mapping[str, FileInfo] = NO_FILES,
    ) -> None:
        """Raises OptionError: the address is of no object store."""
        self._place = parse_place(place)
        super().__init__(str(self._place), retry_policy, expected)
        self._seen: dict[str, FileInfo] = {}
        self._client: ObjectClient | None = None

    def close(self) -> None:
        super().close()
        with self._lock:
            self._client = None

    def files(self) -> tuple[FileInfo, ...]:
        """Every object below the place, sorted by key, without those in hidden directories. Raises
        CheckpointError: the listing is refused, or has more objects than any model; TransientError: the
        server failed for too long."""
        client = self._connected()
        with reading(self._top, 0):
            infos = self._retry_policy.have(
                lambda: list(self._listed(client)), path=self._top, doing="listing"
            )
        self._seen.update((info.key, info) for info in infos)
        return tuple(sorted(infos, key=lambda info: info.key))

    def info(self, key: str) -> FileInfo | None:
        client, location = self._connected(), self.location(key)

        def head() -> FileInfo | None:
            try:
                with asking(self._place, location):
                    return file_info(key, client.store.head(client.path(key)))
            except FileNotFoundError:
                return None

        info = self._retry_policy.have(head, path=location, doing="looking")
        if info is not None:
            self._seen[key] = info
        return info

    def infos(self, keys: Collection[str]) -> dict[str, FileInfo | None]:
        if len(keys) <= _FEW:
            return {key: self.info(key) for key in keys}
        by_key = {info.key: info for info in self.files()}
        return {key: by_key.get(key) for key in keys}

    def _connected(self) -> ObjectClient:
        with self._lock:
            if self._client is None:
                self._client = object_client(self._place)
            return self._client

    def _current(self, key: str) -> FileInfo | None:
        return self._seen.get(key) or self.info(key)

    def _chunks(self, info: FileInfo, location: str, offset: int, nbytes: int) -> Iterator[Buffer]:
        client = self._connected()
        # A weak version cannot be asked for; it is compared with what the answer says.
        options: GetOptions = {"range": (offset, offset + nbytes)}
        if not info.version.startswith("W/"):
            options["if_match"] = info.version
        with asking(self._place, location):
            answer = client.store.get(client.path(info.key), options=options)
            if file_info(info.key, answer.meta) != info:
                raise CheckpointError(changed(location))
            for chunk in answer.stream(min_chunk_size=_CHUNK_NBYTES):
                yield memoryview(chunk)

    def _listed(self, client: ObjectClient) -> Iterator[FileInfo]:
        with asking(self._place, self._top):
            for number, info in enumerate(client.listed(), 1):
                if is_listed(info.key):
                    yield info
                if number > _MOST_FILES:
                    what = f"holds more than {_MOST_FILES} objects, which is no model."
                    raise CheckpointError(Problem(self._top, what, "Name the model's own directory."))
