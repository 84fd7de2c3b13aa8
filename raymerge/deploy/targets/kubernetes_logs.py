"""The driver's log, from the Jobs API of the run's Ray cluster, through the proxy of the API server.

In HTTPMode no pod prints it: it is a file of the head's.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from raymerge.deploy.targets.kubernetes_api import SECRETS, AnswerError, AwayError, Server
from raymerge.publish.run_records import entries_of

Json = dict[str, Any]

_TOKEN_KEY = "auth_token"
"""Entry of the secret that the operator makes for a Ray cluster, or is given."""
_TOKEN_HEADER = "x-ray-authorization"
"""The server keeps ``Authorization`` to itself, and Ray also looks here."""


class DriverLog:
    """A driver's log, read again and again."""

    def __init__(self) -> None:
        self._attempt = ""
        """Id of the job of Ray; each attempt has another."""
        self._text = ""
        self._shown = 0

    def read(self, server: Server, job: Json) -> str:
        """Read all that the driver of a RayJob has said up to now; why that could not be, or "".

        Args:
            server: where the RayJob is.
            job: the object, with its status.

        Raises:
            OptionError: the server does not answer.
        """
        status = job.get("status", {})
        attempt, address = status.get("jobId", ""), status.get("dashboardURL", "")
        if not attempt or not address:
            return "its Ray cluster does not run"
        if attempt != self._attempt:
            self._attempt, self._text, self._shown = attempt, "", 0
        try:
            headers = _headers(server, job)
        except AnswerError as error:
            return f"the token of its Ray cluster cannot be read: {error}"
        host, _, port = address.removeprefix("http://").rpartition(":")
        service = f"{host.partition('.')[0]}:{port}"
        try:
            code, text = server.service(service, f"api/jobs/{attempt}/logs", headers)
        except AwayError:
            return "its Jobs API does not answer"
        if code != 200:
            return f"its Jobs API answers {code}: {_message(text)}"
        try:
            self._text = str(json.loads(text)["logs"])
        except (ValueError, KeyError, TypeError):
            return "its Jobs API answers something else than a log"
        return ""

    def segments(self) -> str:
        """How many segments are done, as the log tells: ``5 of 27``; "" where it does not."""
        of, done = 0, 0
        for event in entries_of(self._text.encode()):
            kind = event.get("event")
            if kind == "planned":
                of, done = int(event.get("segments", 0)), 0
            elif kind == "started":
                done = int(event.get("done_segments", 0))
            elif kind == "segment_done":
                done += 1
        return f"{done} of {of}" if of else ""

    def error(self) -> Mapping[str, Any]:
        """The event by which the driver said that it failed, the last of them; empty where it has not."""
        errors = [each for each in entries_of(self._text.encode()) if each.get("event") == "error"]
        return errors[-1] if errors else {}

    def new_lines(self, *, is_over: bool) -> list[str]:
        """Lines that were not given before; half a line is given when it is whole, or nothing more comes."""
        whole = len(self._text) if is_over else self._text.rfind("\n") + 1
        lines = self._text[self._shown : whole].splitlines()
        self._shown = max(self._shown, whole)
        return lines


def _headers(server: Server, job: Json) -> dict[str, str]:
    options = job["spec"].get("rayClusterSpec", {}).get("authOptions", {})
    if options.get("mode") != "token":
        return {}
    name = options.get("secretName") or job["status"].get("rayClusterName", "")
    secret = server.read(SECRETS, name)
    if secret is None or _TOKEN_KEY not in secret.get("data", {}):
        raise AnswerError(404, "NotFound", f"the secret {name} has no {_TOKEN_KEY}")
    token = base64.b64decode(secret["data"][_TOKEN_KEY]).decode().strip()
    return {_TOKEN_HEADER: f"Bearer {token}"}


def _message(text: str) -> str:
    """What a Status says, or the beginning of any other answer."""
    try:
        said = json.loads(text)["message"]
    except (ValueError, KeyError, TypeError):
        said = text
    return " ".join(str(said).split())[:300]
