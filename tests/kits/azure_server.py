"""A strict fake of Azure Blob Storage, as far as its REST API of 2023-11-03 is used, and of its tokens.

After learn.microsoft.com/rest/api/storageservices: authorize-with-shared-key (every signature is computed
anew), put-blob (drops the blocks that were not committed), put-block (ids of one length), put-block-list (ids
that are not among those not committed: 400 InvalidBlockList; all others are dropped), get-blob,
get-blob-properties, list-blobs (tags without quotes there, with quotes in headers, as Azure/Azurite issue 361
and fsspec/adlfs issue 461 tell of the service; blocks alone are no blob), blob-batch (256 requests at most,
each with its own signature), specifying-conditional-headers (``If-None-Match: *`` where there is one: 409
BlobAlreadyExists; ``If-Match`` of another: 412 ConditionNotMet). Each write gets a new tag. After
learn.microsoft.com/entra/identity/managed-identities-azure-resources: tokens for ``metadata: true``.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Mapping
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from kits.cloud_server import BUCKET, Answer, CloudServer, RefusedError, Request, Stored, StrangeError

ACCOUNT = "testaccount"
_KEY = base64.b64encode(b"the key of the test's own account").decode()
_TOKEN = "eyJ0.token-of-the-test"
_AT_ONCE = 256
_SIGNED = (
    *("content-encoding", "content-language", "content-length", "content-md5", "content-type", "date"),
    *("if-modified-since", "if-match", "if-none-match", "if-unmodified-since", "range"),
)
_USUAL = frozenset({"date", "x-ms-version"})


class AzureServer(CloudServer):
    attribute = "x-ms-meta-"
    scheme = "az"
    secret = _KEY

    def __init__(self) -> None:
        super().__init__()
        self._blocks: dict[str, dict[str, bytes]] = {}

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
            "AZURE_ALLOW_HTTP": "true",
        }

    def uploads(self) -> list[str]:
        return list(self._blocks)

    def forget_uploads(self) -> None:
        self._blocks.clear()

    def answer(self, request: Request) -> Answer:
        if request.target == "/msi/token":
            return self._token(request)
        self._check_allowed(request)
        if request.target.split("/")[1] != BUCKET:
            raise RefusedError(404, "ContainerNotFound")
        match request.method, bool(request.key), request.query.get("comp"):
            case "GET", False, "list":
                return self._listed(request)
            case "POST", False, "batch":
                return self._batch(request)
            case (("GET" | "HEAD"), True, None):
                return self._read(request)
            case "PUT", True, None:
                return self._put(request)
            case "PUT", True, "block":
                return self._put_block(request)
            case "PUT", True, "blocklist":
                return self._put_list(request)
        raise StrangeError("no such request")

    def _token(self, request: Request) -> Answer:
        if request.headers.get("metadata") != "true" or "api-version" not in request.query:
            raise StrangeError("a token that is asked for otherwise")
        said = {
            "access_token": _TOKEN,
            "expires_on": str(int(time.time()) + 3600),
            "resource": request.query.get("resource", ""),
            "token_type": "Bearer",
        }
        return Answer(200, {"Content-Type": "application/json"}, json.dumps(said).encode())

    def _check_allowed(self, request: Request) -> None:
        if request.headers.get("x-ms-version") != "2023-11-03":
            raise StrangeError("another version of the API")
        given = request.headers.get("authorization")
        if given is None and self.is_public and request.method in ("GET", "HEAD"):
            return
        if given is None:
            raise RefusedError(401, "NoAuthenticationInformation")
        if given not in (f"Bearer {_TOKEN}", f"SharedKey {ACCOUNT}:{_signature(request)}"):
            raise RefusedError(403, "AuthenticationFailed")

    def _found(self, request: Request) -> Stored:
        if request.key not in self.objects:
            raise RefusedError(404, "BlobNotFound")
        return self.objects[request.key]

    def _read(self, request: Request) -> Answer:
        self.check_known(request, _USUAL | {"range", "if-match"}, frozenset())
        found = self._found(request)
        # Without quotes it is no entity tag.
        if request.headers.get("if-match", found.tag) != found.tag:
            raise RefusedError(412, "ConditionNotMet")
        return self.given(request, found, {"x-ms-blob-type": "BlockBlob"})

    def _put(self, request: Request) -> Answer:
        self.check_known(request, _USUAL | {"x-ms-blob-type", "if-match", "if-none-match"}, frozenset())
        if request.headers.get("x-ms-blob-type") != "BlockBlob":
            raise StrangeError("a blob of another type")
        there = self.objects.get(request.key)
        if request.headers.get("if-none-match") not in (None, "*"):
            raise StrangeError("If-None-Match of a tag")
        if "if-none-match" in request.headers and there is not None:
            raise RefusedError(409, "BlobAlreadyExists")
        wanted = request.headers.get("if-match")
        if wanted is not None and (there is None or there.tag != wanted):
            raise RefusedError(412, "ConditionNotMet")
        self._blocks.pop(request.key, None)
        return self._made(request, request.body)

    def _put_block(self, request: Request) -> Answer:
        self.check_known(request, _USUAL, frozenset({"comp", "blockid"}))
        blocks = self._blocks.setdefault(request.key, {})
        number = request.query["blockid"]
        base64.b64decode(number, validate=True)
        if any(len(each) != len(number) for each in blocks):
            raise RefusedError(400, "InvalidBlobOrBlock")
        blocks[number] = request.body
        return Answer(201)

    def _put_list(self, request: Request) -> Answer:
        self.check_known(request, _USUAL, frozenset({"comp"}))
        root = ElementTree.fromstring(request.body)
        if root.tag != "BlockList" or {each.tag for each in root} != {"Uncommitted"}:
            raise StrangeError("a list of other blocks")
        blocks = self._blocks.get(request.key, {})
        listed = [each.text or "" for each in root]
        if not set(listed) <= set(blocks):
            raise RefusedError(400, "InvalidBlockList")
        del self._blocks[request.key]
        return self._made(request, b"".join(blocks[each] for each in listed))

    def _made(self, request: Request, data: bytes) -> Answer:
        made = self.store(request.key, data, self.attributes_of(request), tag="")
        return Answer(201, {"ETag": made.tag, "Last-Modified": "Fri, 02 Jan 2026 03:04:05 GMT"})

    def _listed(self, request: Request) -> Answer:
        known = frozenset({"restype", "comp", "prefix", "marker", "maxresults"})
        self.check_known(request, _USUAL, known)
        if request.query.get("restype") != "container":
            raise StrangeError("a listing of another kind")
        after, prefix = request.query.get("marker", ""), request.query.get("prefix", "")
        keys = [key for key in sorted(self.objects) if key.startswith(prefix) and key > after]
        shown = keys[: min(self.page, int(request.query.get("maxresults", "5000")))]
        lines = "".join(
            f"<Blob><Name>{escape(key)}</Name><Properties>"
            "<Last-Modified>Fri, 02 Jan 2026 03:04:05 GMT</Last-Modified>"
            f"<Etag>{self.objects[key].tag.strip(chr(34))}</Etag>"
            f"<Content-Length>{len(self.objects[key].data)}</Content-Length>"
            "<Content-Type>application/octet-stream</Content-Type><BlobType>BlockBlob</BlobType>"
            "</Properties><OrMetadata /></Blob>"
            for key in shown
        )
        marker = f"<NextMarker>{escape(shown[-1])}</NextMarker>" if shown != keys else "<NextMarker />"
        said = f'<?xml version="1.0"?><EnumerationResults><Blobs>{lines}</Blobs>{marker}</EnumerationResults>'
        return Answer(200, {"Content-Type": "application/xml"}, said.encode())

    def _batch(self, request: Request) -> Answer:
        self.check_known(request, _USUAL | {"content-type"}, frozenset({"restype", "comp"}))
        kind, _, boundary = request.headers["content-type"].partition("; boundary=")
        parts = request.body.split(f"--{boundary}".encode())
        if kind != "multipart/mixed" or parts[0] or parts[-1] != b"--\r\n" or len(parts) - 2 > _AT_ONCE:
            raise StrangeError("a batch of another form")
        said = b"".join(self._one_of_batch(part) for part in parts[1:-1])
        headers = {"Content-Type": "multipart/mixed; boundary=batchresponse_1"}
        return Answer(202, headers, said + b"--batchresponse_1--")

    def _one_of_batch(self, part: bytes) -> bytes:
        own, _, inner = part.decode().strip("\r\n").partition("\r\n\r\n")
        line, _, rest = inner.partition("\r\n")
        method, target, _ = line.split(" ")
        number = _headers(own)["content-id"]
        url = urlsplit(target)
        key = unquote(url.path).removeprefix(f"/{BUCKET}/")
        request = Request(method, url.path, key, dict(parse_qsl(url.query)), _headers(rest))
        self.check_known(request, _USUAL, frozenset())
        self._check_allowed(request)
        if method != "DELETE":
            raise StrangeError("a batch of other requests")
        there = self.objects.pop(key, None)
        status = "404 The specified blob does not exist." if there is None else "202 Accepted"
        head = f"--batchresponse_1\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
        return f"{head}HTTP/1.1 {status}\r\nx-ms-version: 2023-11-03\r\n\r\n\r\n".encode()


def _headers(text: str) -> Mapping[str, str]:
    pairs = (line.partition(":") for line in text.split("\r\n") if line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _signature(request: Request) -> str:
    values = {**request.headers, "date": request.headers.get("date", "")}
    if values.get("content-length") == "0":
        values["content-length"] = ""
    if "x-ms-date" in values:
        values["date"] = ""
    own = sorted((name, text) for name, text in values.items() if name.startswith("x-ms-"))
    lines = [request.method, *(values.get(name, "") for name in _SIGNED), *(f"{n}:{t}" for n, t in own)]
    resource = f"/{ACCOUNT}{request.target}"
    resource += "".join(f"\n{name.lower()}:{text}" for name, text in sorted(request.query.items()))
    text = "\n".join([*lines, resource])
    digest = hmac.new(base64.b64decode(_KEY), text.encode(), hashlib.sha256).digest()
    return base64.b64encode(digest).decode()
