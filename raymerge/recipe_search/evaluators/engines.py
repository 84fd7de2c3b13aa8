"""Inference servers whose weights are replaced over HTTP while they run."""

from __future__ import annotations

import json
import pickle
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from raymerge.errors import IncompleteError
from raymerge.recipe_search.evaluators.evaluator import EvaluationError

if TYPE_CHECKING:
    import torch

_SHOWN_BODY = 500
_CHUNK_NBYTES = 128 << 20
_WINDOWS = 8
"""Prompts of a request."""


class RefusedError(EvaluationError):
    """A server answered with an error."""

    def __init__(self, what: str, status: int) -> None:
        super().__init__(what)
        self.status = status


class UnreachableError(IncompleteError):
    """A server gives no answer, whatever the candidate."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}. What is evaluated is kept: once it serves again, the same command goes on."
        )


class ServerApi:
    """JSON over HTTP with one server, without proxies. Calls raise EvaluationError for its answers, and
    UnreachableError where it gives none."""

    def __init__(self, url: str, timeout: float) -> None:
        """``timeout``: seconds, of each call."""
        self.url, self.timeout = url.rstrip("/"), timeout
        self._opener = build_opener(ProxyHandler({}))

    def get(self, path: str) -> Any:
        return self._answer(Request(self.url + path))

    def post(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        content = json.dumps(body or {}).encode()
        headers = {"Content-Type": "application/json"}
        return self._answer(Request(self.url + path, content, headers, method="POST"))

    def _answer(self, request: Request) -> Any:
        where = request.full_url
        try:
            with self._opener.open(request, timeout=self.timeout) as answer:
                content = answer.read()
            return json.loads(content) if content else {}
        except HTTPError as error:
            with error:
                body = error.read(_SHOWN_BODY).decode("utf-8", "replace").strip()
            raise RefusedError(
                f"{where} answered {error.code}: {body or error.reason}", error.code
            ) from error
        except TimeoutError as error:
            raise UnreachableError(f"{where} did not answer within {self.timeout:g} s") from error
        except URLError as error:
            raise UnreachableError(f"{where} cannot be reached: {error.reason}") from error
        except (OSError, HTTPException) as error:
            raise UnreachableError(f"{where} gave no whole answer: {error!r}") from error
        except ValueError as error:
            raise EvaluationError(f"{where} answered something else than JSON") from error

    def model(self) -> str:
        """What the server calls its model."""
        models = self.get("/v1/models")
        try:
            return str(models["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise EvaluationError(f"{self.url}/v1/models names no model") from error

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[float]]:
        """Of the tokens of each prompt but the first, given those before them."""
        model = self.model()
        for first in range(0, len(prompts), _WINDOWS):
            some = [list(each) for each in prompts[first : first + _WINDOWS]]
            # Not every version takes a request for no token beyond the prompt.
            asked = {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
            answer = self.post("/v1/completions", {"model": model, "prompt": some, **asked})
            yield from self._judged(some, answer)

    def _judged(self, prompts: Sequence[list[int]], answer: Any) -> Iterator[list[float]]:
        try:
            choices = sorted(answer["choices"], key=lambda each: int(each["index"]))
            given = [choice["logprobs"]["token_logprobs"] for choice in choices]
            for prompt, own in zip(prompts, given, strict=True):
                judged = [float(each) for each in own[1 : len(prompt)]]
                if len(judged) < len(prompt) - 1:
                    raise ValueError
                yield judged
        except (KeyError, TypeError, ValueError) as error:
            what = "gave no log-probabilities of the prompt's tokens"
            raise EvaluationError(f"{self.url}/v1/completions {what}") from error


class Engine(Protocol):
    """One kind of server. What raises leaves weights of two candidates mixed; the next call replaces all."""

    def load_directory(self, directory: Path) -> None:
        """Serve this checkpoint, which the server sees at the same path. Raises as ``ServerApi``."""

    def load_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Serve these tensors. Raises as ``ServerApi``; what the iterable raises."""


class VllmEngine:
    """``reload_weights`` in all workers, by the endpoints that there are with VLLM_SERVER_DEV_MODE=1."""

    def __init__(self, api: ServerApi) -> None:
        self._api = api

    def load_directory(self, directory: Path) -> None:
        # Caches of what the weights before computed are cleared with it.
        self._post("/pause?mode=wait")
        try:
            arguments = {"weights_path": str(directory)}
            call = {"method": "reload_weights", "kwargs": arguments, "timeout": self._api.timeout}
            self._post("/collective_rpc", call)
        except BaseException:
            with suppress(EvaluationError, UnreachableError):
                self._post("/resume")
            raise
        self._post("/resume")

    def load_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise NotImplementedError  # settings refuse it

    def _post(self, path: str, body: Mapping[str, object] | None = None) -> None:
        try:
            self._api.post(path, body)
        except RefusedError as error:
            if error.status != 404:
                raise
            remedy = "start vLLM with VLLM_SERVER_DEV_MODE=1"
            raise EvaluationError(f"{self._api.url} has no {path.partition('?')[0]}: {remedy}") from error


class SglangEngine:
    def __init__(self, api: ServerApi) -> None:
        self._api = api

    def load_directory(self, directory: Path) -> None:
        self._post("/update_weights_from_disk", {"model_path": str(directory)})

    def load_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        ranks = self._num_ranks()
        for chunk in _chunks(tensors):
            # Plain pickles, which hold the numbers: SGLang's own hold where they are in shared memory.
            content = b64encode(pickle.dumps(chunk)).decode()
            chunk.clear()
            self._post("/update_weights_from_tensor", {"serialized_named_tensors": [content] * ranks})

    def _post(self, path: str, body: Mapping[str, object]) -> None:
        answer = self._api.post(path, {**body, "flush_cache": True})
        if not (isinstance(answer, dict) and answer.get("success")):
            raise EvaluationError(f"{self._api.url}{path} failed: {str(answer)[:_SHOWN_BODY]}")

    def _num_ranks(self) -> int:
        """Of tensor parallelism: each takes its own copy."""
        try:
            facts = self._api.get("/server_info")
        except RefusedError as error:
            if error.status != 404:
                raise
            facts = self._api.get("/get_server_info")  # its name in older versions
        try:
            return int(facts["tp_size"])
        except (KeyError, TypeError, ValueError) as error:
            raise EvaluationError(f"{self._api.url}/server_info does not tell tp_size") from error


def _chunks(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    chunk: list[tuple[str, torch.Tensor]] = []
    nbytes = 0
    for name, tensor in tensors:
        if chunk and nbytes + tensor.nbytes > _CHUNK_NBYTES:
            yield chunk
            chunk, nbytes = [], 0
        chunk.append((name, tensor))
        nbytes += tensor.nbytes
    if chunk:
        yield chunk


ENGINES: Mapping[str, Callable[[ServerApi], Engine]] = {"vllm": VllmEngine, "sglang": SglangEngine}
