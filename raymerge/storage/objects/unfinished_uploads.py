"""Multipart uploads that nobody will complete any more: found and aborted, on S3."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from raymerge.storage.addresses import Address
from raymerge.storage.objects.client import ObjectClient

_CONNECT_SECONDS, _READ_SECONDS, _ATTEMPTS = 5, 10, 2
"""Of one request; ``Patience`` goes on from there."""
_SIGNED = timedelta(minutes=1)
_FOR_A_MOMENT = frozenset({429, 500, 502, 503, 504})


def abort_uploads(address: Address, objects: ObjectClient, is_ours: Callable[[str], bool]) -> int:
    """Abort uploads below a place; how many there were.

    Without boto3, and for who may not list uploads, there are none: the bucket's lifecycle clears them away.

    Args:
        address: on S3.
        objects: what it is written with.
        is_ours: whether an upload to a key below the place may be aborted.

    Raises:
        OSError: the server failed for a moment; those that are left are to be aborted by another call.
    """
    try:
        import boto3
    except ImportError:
        return 0
    done, prefix = 0, objects.path("")
    payer = {"RequestPayer": "requester"} if address.options.requester_pays else {}
    with _unless_refused():
        client = _client(boto3, address, objects)
        listing = client.get_paginator("list_multipart_uploads")
        for page in listing.paginate(Bucket=address.bucket, Prefix=prefix, **payer):
            # Some servers list more than what they were asked for.
            below = (each for each in page.get("Uploads", ()) if each["Key"].startswith(prefix))
            for each in (each for each in below if is_ours(each["Key"].removeprefix(prefix))):
                # Its own process may have ended it since it was listed.
                with _unless_refused():
                    client.abort_multipart_upload(
                        Bucket=address.bucket, Key=each["Key"], UploadId=each["UploadId"], **payer
                    )
                    done += 1
    return done


@contextmanager
def _unless_refused() -> Iterator[None]:
    """Goes on behind what is refused for good; raises OSError where the server fails for a moment."""
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError, SSLError
    from obstore.exceptions import BaseError

    try:
        yield
    except SSLError:
        # It knows other authorities than the client that writes.
        return
    except HTTPClientError as error:
        raise OSError(errno.ECONNRESET, str(error)) from error
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] in _FOR_A_MOMENT:
            raise OSError(errno.EIO, str(error)) from error
    except (BotoCoreError, BaseError):
        # There are no credentials of boto3's, or it does not speak to such a server.
        return


def _client(boto3: Any, address: Address, objects: ObjectClient) -> Any:
    """A client of the server that the place is written to, whatever said which one that is."""
    import obstore
    from botocore.config import Config
    from obstore.store import S3Store

    assert isinstance(objects.store, S3Store)
    # What a client has made of options and environment, it shows in the addresses alone that it signs.
    signed = urlsplit(obstore.sign(objects.store, "GET", "x", _SIGNED))
    path, is_virtual = unquote(signed.path).removesuffix("/x"), True
    if path.endswith(f"/{address.bucket}"):
        path, is_virtual = path.removesuffix(f"/{address.bucket}"), False
    server = signed.netloc.removeprefix(f"{address.bucket}.") if is_virtual else signed.netloc
    region = parse_qs(signed.query)["X-Amz-Credential"][0].split("/")[-3]
    session = boto3.Session(profile_name=address.options.profile, region_name=region)
    config = Config(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=_READ_SECONDS,
        retries={"total_max_attempts": _ATTEMPTS},
        s3={"addressing_style": "virtual" if is_virtual else "path"},
    )
    return session.client("s3", endpoint_url=f"{signed.scheme}://{server}{path}", config=config)
