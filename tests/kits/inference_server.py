"""Stand-ins of inference servers: what vLLM and SGLang publish of the API that replaces weights, and refuse
otherwise. They compute with the weights that they were given."""

from __future__ import annotations

import io
import json
import pickle
import threading
from base64 import b64decode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

MODEL = "served"
_SCORING = {"model", "prompt", "max_tokens", "temperature", "echo", "logprobs"}


class RefusalError(Exception):
    def __init__(self, status: int, content: object) -> None:
        super().__init__(content)
        self.status, self.content = status, content


def stored(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


class SafeUnpickler(pickle.Unpickler):
    """Of SGLang: only what lies in these modules."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] not in ("torch", "collections", "builtins"):
            raise pickle.UnpicklingError(f"Blocked unsafe class loading ({module}.{name})")
        return super().find_class(module, name)


class StandIn:
    def __init__(self, directory: Path) -> None:
        self.tensors = stored(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.calls: list[str] = []
        self.failures: dict[int, str] = {}
        """What is answered to calls that replace weights, by their number, after a part was replaced."""
        self.updates = 0
        self.url = ""
        self._lock = threading.Lock()

    def answer(self, method: str, path: str, body: Mapping[str, Any]) -> object:
        with self._lock:
            self.calls.append(path)
            if (method, path) == ("GET", "/v1/models"):
                return {"object": "list", "data": [{"id": MODEL, "object": "model"}]}
            if (method, path) == ("POST", "/v1/completions"):
                return self.complete(body)
            return self.control(method, path, body)

    def control(self, method: str, path: str, body: Mapping[str, Any]) -> object:
        raise NotImplementedError

    def complete(self, body: Mapping[str, Any]) -> object:
        if set(body) != _SCORING or body["model"] != MODEL or body["echo"] is not True:
            raise RefusalError(400, {"error": {"message": f"unexpected {sorted(body)}"}})
        choices = [
            {"index": at, "logprobs": {"token_logprobs": self._logprobs(prompt)}}
            for at, prompt in enumerate(body["prompt"])
        ]
        return {"object": "text_completion", "choices": choices[::-1]}

    def _logprobs(self, prompt: list[int]) -> list[float | None]:
        limit = self.model.config.max_position_embeddings
        if len(prompt) + 1 > limit:
            raise RefusalError(400, {"error": {"message": f"maximum context length is {limit} tokens"}})
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        judged = logits[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        return [None, *judged.tolist(), -1.0]

    def replace(self, tensors: Mapping[str, torch.Tensor]) -> None:
        number = self.updates
        self.updates += 1
        parameters = dict(self.model.named_parameters())
        for at, (name, tensor) in enumerate(tensors.items()):
            own = self.tensors.get(name)
            if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
                raise ValueError(f"{name} does not fit")
            if number in self.failures and at == len(tensors) // 2:
                raise ValueError(self.failures[number])
            self.tensors[name] = tensor
            parameters[name].data.copy_(tensor)

    def replace_by(self, directory: str) -> None:
        tensors = stored(Path(directory))
        if not Path(directory).is_absolute() or set(tensors) != set(self.tensors):
            raise ValueError(f"{directory} has no whole checkpoint")
        self.replace(tensors)


class VllmStandIn(StandIn):
    is_paused = False

    def control(self, method: str, path: str, body: Mapping[str, Any]) -> object:
        if (method, path) == ("POST", "/pause?mode=wait") and not self.is_paused:
            self.is_paused = True
            return {"status": "paused"}
        if (method, path) == ("POST", "/resume") and self.is_paused:
            self.is_paused = False
            return {"status": "resumed"}
        if (method, path) == ("POST", "/collective_rpc") and self.is_paused:
            if set(body) != {"method", "kwargs", "timeout"} or body["method"] != "reload_weights":
                raise RefusalError(400, {"detail": f"unexpected {sorted(body)}"})
            if set(body["kwargs"]) != {"weights_path"}:
                raise RefusalError(400, {"detail": f"unexpected {sorted(body['kwargs'])}"})
            try:
                self.replace_by(body["kwargs"]["weights_path"])
            except ValueError as error:
                raise RefusalError(500, {"error": {"message": str(error)}}) from error
            return {"results": [None]}
        raise RefusalError(404, {"detail": "Not Found"})

    def complete(self, body: Mapping[str, Any]) -> object:
        if self.is_paused:
            raise RefusalError(503, {"error": {"message": "paused"}})
        return super().complete(body)


class SglangStandIn(StandIn):
    num_ranks = 2

    def control(self, method: str, path: str, body: Mapping[str, Any]) -> object:
        if (method, path) == ("GET", "/get_server_info"):
            return {"tp_size": self.num_ranks, "version": "0.5"}
        try:
            if (method, path) == ("POST", "/update_weights_from_disk"):
                self._check(body, "model_path")
                self.replace_by(body["model_path"])
            elif (method, path) == ("POST", "/update_weights_from_tensor"):
                self._check(body, "serialized_named_tensors")
                self.replace(self._unpickled(body["serialized_named_tensors"]))
            else:
                raise RefusalError(404, {"detail": "Not Found"})
        except (ValueError, pickle.UnpicklingError) as error:
            raise RefusalError(400, {"success": False, "message": str(error)}) from error
        return {"success": True, "message": "Success"}

    def _check(self, body: Mapping[str, Any], key: str) -> None:
        if set(body) != {key, "flush_cache"} or body["flush_cache"] is not True:
            raise RefusalError(422, {"detail": f"unexpected {sorted(body)}"})

    def _unpickled(self, payloads: list[str]) -> dict[str, torch.Tensor]:
        if len(payloads) != self.num_ranks:
            raise ValueError(f"{len(payloads)} payloads of {self.num_ranks} ranks")
        of_rank = [SafeUnpickler(io.BytesIO(b64decode(each, validate=True))).load() for each in payloads]
        return dict(of_rank[-1])


@contextmanager
def served(server: StandIn) -> Iterator[StandIn]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._respond({})

        def do_POST(self) -> None:
            self._respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _respond(self, body: Mapping[str, Any]) -> None:
            try:
                status, content = 200, server.answer(self.command, self.path, body)
            except RefusalError as refusal:
                status, content = refusal.status, refusal.content
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    server.url = f"http://127.0.0.1:{http.server_port}"
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
