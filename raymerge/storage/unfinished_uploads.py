"""Multipart uploads that nobody will complete any more: found and aborted, on S3."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from raymerge.storage.addresses import Address
from raymerge.storage.object_client import ObjectClient

_CONNECT_SECONDS, _READ_SECONDS, _ATTEMPTS = 5, 10, 2
"""Nothing waits for this: what is not aborted now is when the next run begins."""
_SIGNED = timedelta(minutes=1)


def abort_uploads(address: Address, objects: ObjectClient, is_ours: Callable[[str], bool]) -> int:
    """Abort uploads below a place; how many there were.

    Without boto3, and for who may not list uploads, there are none: the bucket's lifecycle clears them away.

    Args:
        address: on S3.
        objects: what it is written with.
        is_ours: whether an upload to a key below the place may be aborted.
    """
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
        from obstore.exceptions import BaseError
    except ImportError:
        return 0
    done, prefix = 0, objects.path("")
    with suppress(BotoCoreError, ClientError, BaseError):
        client = _client(boto3, address, objects)
        pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=address.bucket, Prefix=prefix)
        for page in pages:
            # Some servers list more than what they were asked for.
            below = (each for each in page.get("Uploads", ()) if each["Key"].startswith(prefix))
            for each in (each for each in below if is_ours(each["Key"].removeprefix(prefix))):
                client.abort_multipart_upload(
                    Bucket=address.bucket, Key=each["Key"], UploadId=each["UploadId"]
                )
                done += 1
    return done


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
