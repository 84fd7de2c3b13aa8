"""A strict fake of Google Cloud Storage, as far as its XML API is used, and of the metadata server's tokens.

After cloud.google.com/storage/docs/xml-api: put-object-upload, get-object-download, head-object,
delete-object (404 where there is none), get-bucket-list (``list-type=2``), post-object-multipart,
put-object-multipart, post-object-complete (no preconditions; parts of 5 MiB but the last, by storage/quotas;
the tag is not that of an MD5 hash), delete-multipart. After storage/docs/request-preconditions:
``x-goog-if-generation-match``, 0 for no object, else 412. After storage/docs/hashes-etags: the tag of an
object that is put by one request is its MD5 hash, so that equal bytes have equal tags; the generation is
another with each write. After compute/docs/metadata: tokens for who sends ``Metadata-Flavor: Google``.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from kits.cloud_server import BUCKET, Answer, CloudServer, RefusedError, Request, Stored, StrangeError

_MATCH = "x-goog-if-generation-match"
_TOKEN_PATH = "/computeMetadata/v1/instance/service-accounts/default/token"


@dataclass(slots=True)
class _Begun:
    key: str
    attributes: dict[str, str]
    parts: dict[int, bytes] = field(default_factory=dict)


class GoogleServer(CloudServer):
    attribute = "x-goog-meta-"
    scheme = "gs"
    secret = "ya29.token-of-the-test"

    def __init__(self) -> None:
        super().__init__()
        self._begun: dict[str, _Begun] = {}
        self._numbers = 0

    @property
    def environment(self) -> dict[str, str]:
        return {"GOOGLE_BASE_URL": self.endpoint, "GOOGLE_BEARER_TOKEN": self.secret}

    def uploads(self) -> list[str]:
        return [each.key for each in self._begun.values()]

    def forget_uploads(self) -> None:
        self._begun.clear()

    def answer(self, request: Request) -> Answer:
        if request.target == _TOKEN_PATH:
            return self._token(request)
        self._check_allowed(request)
        match request.method, bool(request.key), frozenset(request.query):
            case "GET", False, _:
                return self._listed(request)
            case (("GET" | "HEAD"), True, _):
                return self._read(request)
            case "PUT", True, names if not names:
                return self._put(request)
            case "DELETE", True, names if not names:
                self.check_known(request, frozenset(), frozenset())
                self._found(request)
                del self.objects[request.key]
                return Answer(204)
            case "POST", True, names if names == {"uploads"}:
                return self._begin(request)
            case (("PUT" | "POST" | "DELETE"), True, names) if "uploadId" in names:
                return self._upload(request)
        raise StrangeError("no such request")

    def _token(self, request: Request) -> Answer:
        if request.headers.get("metadata-flavor") != "Google":
            raise StrangeError("without Metadata-Flavor")
        said = {"access_token": self.secret, "expires_in": 3599, "token_type": "Bearer"}
        return Answer(200, {"Content-Type": "application/json"}, json.dumps(said).encode())

    def _check_allowed(self, request: Request) -> None:
        given = request.headers.get("authorization")
        if given is None and not (self.is_public and request.method in ("GET", "HEAD")):
            raise RefusedError(403, "AccessDenied")
        if given not in (None, f"Bearer {self.secret}"):
            raise RefusedError(401, "AuthenticationRequired")
        if request.target.split("/")[1] != BUCKET:
            raise RefusedError(404, "NoSuchBucket")

    def _found(self, request: Request) -> Stored:
        if request.key not in self.objects:
            raise RefusedError(404, "NoSuchKey")
        return self.objects[request.key]

    def _read(self, request: Request) -> Answer:
        self.check_known(request, frozenset({"range", "if-match"}), frozenset())
        found = self._found(request)
        if request.headers.get("if-match", found.tag) != found.tag:
            raise RefusedError(412, "PreconditionFailed")
        return self.given(request, found, {"x-goog-generation": str(found.generation)})

    def _put(self, request: Request) -> Answer:
        self.check_known(request, frozenset({"content-type", _MATCH}), frozenset())
        there = self.objects.get(request.key)
        wanted = request.headers.get(_MATCH)
        if wanted is not None and int(wanted) != (there.generation if there else 0):
            raise RefusedError(412, "PreconditionFailed")
        tag = _tag(request.body)
        made = self.store(request.key, request.body, self.attributes_of(request), tag=tag)
        return Answer(200, {"ETag": made.tag, "x-goog-generation": str(made.generation)})

    def _listed(self, request: Request) -> Answer:
        known = frozenset({"list-type", "prefix", "continuation-token", "max-keys"})
        self.check_known(request, frozenset(), known)
        if request.query.get("list-type") != "2":
            raise StrangeError("a listing of another kind")
        after, prefix = request.query.get("continuation-token", ""), request.query.get("prefix", "")
        keys = [key for key in sorted(self.objects) if key.startswith(prefix) and key > after]
        shown = keys[: min(self.page, int(request.query.get("max-keys", "1000")))]
        lines = "".join(
            f"<Contents><Key>{escape(key)}</Key><Generation>{self.objects[key].generation}</Generation>"
            f"<LastModified>2026-01-02T03:04:05.678Z</LastModified><ETag>{self.objects[key].tag}</ETag>"
            f"<Size>{len(self.objects[key].data)}</Size></Contents>"
            for key in shown
        )
        more = f"<NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>" if shown != keys else ""
        truth = str(shown != keys).lower()
        return _xml(
            f"<ListBucketResult xmlns='http://doc.s3.amazonaws.com/2006-03-01'><Name>{BUCKET}</Name>"
            f"<KeyCount>{len(shown)}</KeyCount><IsTruncated>{truth}</IsTruncated>{more}{lines}"
            "</ListBucketResult>"
        )

    def _begin(self, request: Request) -> Answer:
        self.check_known(request, frozenset({"content-type"}), frozenset({"uploads"}))
        self._numbers += 1
        number = f"upload-{self._numbers}"
        self._begun[number] = _Begun(request.key, self.attributes_of(request))
        return _xml(
            f"<InitiateMultipartUploadResult><Bucket>{BUCKET}</Bucket><Key>{escape(request.key)}</Key>"
            f"<UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
        )

    def _upload(self, request: Request) -> Answer:
        self.check_known(request, frozenset({"content-type"}), frozenset({"uploadId", "partNumber"}))
        number = request.query["uploadId"]
        begun = self._begun.get(number)
        if begun is None or begun.key != request.key:
            raise RefusedError(404, "NoSuchUpload")
        if request.method == "DELETE":
            del self._begun[number]
            return Answer(204)
        if request.method == "PUT":
            begun.parts[int(request.query["partNumber"])] = request.body
            return Answer(200, {"ETag": _tag(request.body)})
        data = self._joined(begun, request.body)
        del self._begun[number]
        made = self.store(request.key, data, begun.attributes, tag="")
        said = (
            f"<CompleteMultipartUploadResult><Bucket>{BUCKET}</Bucket><Key>{escape(request.key)}</Key>"
            f"<ETag>{made.tag}</ETag></CompleteMultipartUploadResult>"
        )
        return _xml(said, {"x-goog-generation": str(made.generation)})

    def _joined(self, begun: _Begun, body: bytes) -> bytes:
        root = ElementTree.fromstring(body)
        if root.tag != "CompleteMultipartUpload":
            raise StrangeError(f"a list that begins with {root.tag}")
        listed = [(int(each.findtext("PartNumber", "0")), each.findtext("ETag")) for each in root]
        parts = [begun.parts.get(number) for number, _ in listed]
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts) or [tag for _, tag in listed] != [_tag(part) for part in whole]:
            raise RefusedError(400, "InvalidPart")
        if [number for number, _ in listed] != sorted(number for number, _ in listed):
            raise RefusedError(400, "InvalidPartOrder")
        if any(len(part) < self.smallest_part for part in whole[:-1]):
            raise RefusedError(400, "EntityTooSmall")
        return b"".join(whole)


def _tag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def _xml(text: str, headers: dict[str, str] | None = None) -> Answer:
    said = f'<?xml version="1.0" encoding="UTF-8"?>{text}'
    return Answer(200, {"Content-Type": "application/xml", **(headers or {})}, said.encode())
