"""Connections to object stores with this machine's credentials, and their errors in plain words."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from raymerge.errors import CheckpointError, OptionError, Problem, UnreadableError
from raymerge.storage.addresses import Place, StoreOptions, shown
from raymerge.storage.retry import changed
from raymerge.storage.store import FileInfo

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client
    from obstore.store import RetryConfig

_EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure"}
_CHAINS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the files in ~/.aws, SSO, a web identity, and the "
    "role of the container or machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, the files of gcloud, and the service account of the machine",
    "az": "the AZURE_STORAGE_* variables, a workload identity, and the managed identity of the machine",
}
_VARIABLES = {
    "s3": "the variables AWS_*",
    "gs": "the variables GOOGLE_*",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and the other variables AZURE_*",
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
_NAMED_URL = re.compile(r"https?://\S+")
_URL_VARIABLES = {
    "s3": ("AWS_",),
    "gs": ("GOOGLE_", "GCE_METADATA_"),
    "az": ("AZURE_", "AZURITE_", "IDENTITY_", "MSI_"),
}
"""Prefixes of environment variables that name servers to each client, credential servers included."""
_CREDENTIAL_HOSTS = {
    "s3": (),
    "gs": ("accounts.google.com", "oauth2.googleapis.com", "metadata.google.internal", "169.254.169.254"),
    "az": ("login.microsoftonline.com", "169.254.169.254"),
}
"""Other hosts that give credentials to each client; on S3 boto3 does that."""


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
        directories.
        """
        import obstore

        prefix = f"{self.prefix}/" if self.prefix else ""
        for page in obstore.list(self.store, prefix=prefix or None, chunk_size=_PAGE):
            for found in page:
                if found["path"].startswith(prefix):
                    yield file_info(found["path"].removeprefix(prefix), found)


def file_info(key: str, found: Mapping[str, Any]) -> FileInfo:
    # Listings of buckets that keep versions do not tell them, so that the tag alone is the version here.
    version = str(found.get("e_tag") or f"W/{found['last_modified'].timestamp()}")
    if not version.startswith(('"', "W/")):
        # Azure's listings leave out the quotes that its answers have, and that it asks for.
        version = f'"{version}"'
    return FileInfo(key, int(found["size"]), version)


def object_client(
    address: Place,
    *,
    read_seconds: float = READ_SECONDS,
    retries: int = _RETRIES,
    whole_seconds: float = _WHOLE_SECONDS,
) -> ObjectClient:
    """A connection to the bucket of an address; sends nothing yet.

    Args:
        read_seconds: how long the server may be silent before a request fails.
        retries: retries by the client itself.
        whole_seconds: limit of one request.

    Raises:
        OptionError: the client package is not installed, or it does not know an option.
        CheckpointError: no credentials.
    """
    try:
        from obstore.exceptions import BaseError
    except ImportError as error:
        raise OptionError(_missing(address, "obstore")) from error
    try:
        return ObjectClient(_client(address, read_seconds, retries, whole_seconds), address.prefix)
    except BaseError as error:
        said = str(error).partition("\n")[0]
        what = f"the client of the store does not take its settings: {said}."
        remedy = f"Check storage: in the profile, and {_VARIABLES[address.scheme]} in the environment."
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
    not exist. A proxy of the user decides instead.
    """
    url = urlsplit(_server_url(kind, address, config))
    host = url.hostname or ""
    proxies = getproxies()
    has_proxy = url.scheme in proxies or "all" in proxies
    prefix = _URL_VARIABLES[address.scheme][0]
    if f"{prefix}PROXY_URL" in os.environ or (has_proxy and not proxy_bypass(host)):
        return {}
    hosts = {host, *_CREDENTIAL_HOSTS[address.scheme], *_environment_hosts(address.scheme)}
    return {"proxy_url": f"http://{NOWHERE}", "proxy_excludes": ",".join(sorted(hosts))}


def _server_url(kind: Any, address: Place, config: Mapping[str, Any]) -> str:
    """The server address that a client derives from settings and environment; "" if there is none.

    The client shows it only in errors, so it is made to fail without a request.
    """
    import obstore
    from obstore.exceptions import BaseError

    no_way: dict[str, Any] = {"proxy_url": f"http://{NOWHERE}", "proxy_excludes": "", "skip_signature": True}
    if address.scheme == "s3":
        # Where the environment has one of them, the client wants both.
        no_way |= {"access_key_id": "none", "secret_access_key": "none"}
    client = kind(address.bucket, config={**config, **no_way}, retry_config={"max_retries": 0})
    try:
        obstore.head(client, "x")
    except BaseError as error:
        named = _NAMED_URL.search(str(error))
        return named.group() if named is not None else ""
    return ""


def _environment_hosts(scheme: str) -> Iterator[str]:
    for name, value in os.environ.items():
        if name.startswith(_URL_VARIABLES[scheme]):
            text = value if "://" in value else f"//{value}" if name.startswith("GCE_METADATA_") else ""
            with suppress(ValueError):
                if host := urlsplit(text).hostname:
                    yield host


def _duration(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"


def chain_of(scheme: str) -> str:
    return _CHAINS[scheme]


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


def no_credentials(address: Place, said: str = "") -> Problem:
    told = f" ({said})" if said else ""
    what = f"there are no credentials{told}. Asked were {chain_of(address.scheme)}."
    remedy = "Give them there, or set anonymous: true in storage: for a bucket that anybody may read."
    return Problem(shown(str(address)), what, remedy)


def _missing(address: Place, package: str) -> Problem:
    extra = _EXTRAS[address.scheme]
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
_SERVERS = {
    "s3": "the endpoint and region in storage:",
    "gs": "GOOGLE_BASE_URL where that is set",
    "az": "the account that AZURE_STORAGE_ACCOUNT_NAME names",
}
_ALLOWING = {"s3": "AWS_ALLOW_HTTP", "gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}


@contextmanager
def asking(place: Place, location: str) -> Iterator[None]:
    """Translate errors of an object store.

    Raises:
        OSError: transient, with an errno that ``RetryPolicy`` knows; or the object is gone.
        CheckpointError: permanent: a changed object, no such bucket, or credentials refused or missing.
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
    """The server's message without the client's additions: ``503 SlowDown``; or the client's own."""
    # Behind the first empty line the client shows its inner state.
    text = str(error).partition("\n\n")[0]
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is not None:
        return f"{status.group(1)} {code.group(1)}" if code is not None else f"status {status.group(1)}"
    reason = _REASON.search(text)
    return (reason["reason"] if reason else text[:200]).strip()


def lacks_credentials(error: Exception) -> bool:
    """Whether an error of the client means that it got no credentials."""
    text = str(error).partition("\n\n")[0]
    found = _STATUS.search(text)
    status = found.group(1) if found is not None else ""
    return bool(_GIVERS.search(text)) and status[:1] != "5" and status not in _TRIED_AGAIN


def _meant(error: Exception, place: Place, location: str) -> Exception:
    if _REDIRECTED.search(str(error)):
        return CheckpointError(_redirected(place))
    text = str(error).partition("\n\n")[0]
    found = _STATUS.search(text)
    status = found.group(1) if found is not None else ""
    if lacks_credentials(error):
        return UnreadableError(no_credentials(place, told(error)))
    if _NO_BUCKET.search(text):
        return CheckpointError(_no_bucket(place))
    if _NO_UPLOAD in text:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), location)
    if status in _REFUSED or type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        return UnreadableError(_denied(place, location, told(error)))
    is_region = place.scheme == "s3" and status in _OTHER_REGION
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


def _no_bucket(place: Place) -> Problem:
    what = f"there is no bucket '{place.bucket}'{_at(place)}."
    return Problem(shown(str(place)), what, f"Check its name, and {_SERVERS[place.scheme]}.")


def _at(place: Place) -> str:
    return f" at {place.options.endpoint}" if place.scheme == "s3" and place.options.endpoint else ""


def _without_tls(place: Place) -> Problem:
    what = "the address of its server is none that may be asked: it is no URL, or one without TLS."
    variable = _ALLOWING[place.scheme]
    remedy = f"Take https://, or allow it: allow_http: true in storage:, or {variable}=true."
    return Problem(shown(str(place)), what, remedy)


def _denied(place: Place, location: str, said: str) -> Problem:
    if place.options.anonymous:
        what = f"may not be read by everybody: the server says {said}."
        return Problem(location, what, "Take anonymous out of storage:, and give credentials.")
    chain = chain_of(place.scheme)
    what = f"may not be read with the credentials of this machine: the server says {said}."
    remedy = f"Looked for were {chain}. Give credentials there that may list and read it."
    return Problem(location, what, remedy)


def _elsewhere(place: Place) -> Problem:
    what = f"the bucket '{place.bucket}' is in another region than the one that was asked."
    return Problem(shown(str(place)), what, "Set its region in storage:, or AWS_REGION.")


def _redirected(place: Place) -> Problem:
    what = f"the server{_at(place)} sends requests on to another host, which is given no credentials."
    remedy = f"Name the server that has it: {_SERVERS[place.scheme]}."
    return Problem(shown(str(place)), what, remedy)
