"""What must be set before ray is imported, and how an embedded Ray is started. Imported by the Ray pool alone."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from types import ModuleType

_OBJECT_STORE_BYTES = 200 << 20
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_SCHEDULER_EVENTS": "0",
    "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def import_ray(*, embedded: bool) -> ModuleType:
    """Import ray with quiet logs, no usage statistics, and token authentication for an embedded cluster.

    Ray reads its token when it is first imported, so it is chosen before; a token that the user set is kept.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if embedded and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        if "RAY_AUTH_TOKEN_PATH" not in os.environ:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray

    module: ModuleType = ray
    return module


class RayConnection:
    """A connection to Ray: an embedded cluster of our own, or one that runs already."""

    def __init__(self, address: str | None, *, num_cpus: int | None = None) -> None:
        """
        Args:
            address: of a running cluster; None starts an embedded one, which ends with ``close``.
            num_cpus: CPU slots of an embedded cluster, for more workers than cores.
        """
        self._address = address
        self._num_cpus = num_cpus
        self._temporary = ""
        self._owner = False
        self.ray = import_ray(embedded=address is None)

    def open(self) -> None:
        """Connect; where this process is connected already, that connection is used and left open."""
        if self.ray.is_initialized():
            return
        self._owner = True
        if self._address is not None:
            self.ray.init(self._address, log_to_driver=False, logging_level="ERROR")
            return
        # A short path: Ray's socket names below it must stay under 108 bytes.
        self._temporary = tempfile.mkdtemp(prefix="raymerge-", dir="/tmp" if os.path.isdir("/tmp") else None)
        self.ray.init(
            address="local",
            num_cpus=self._num_cpus,
            _temp_dir=self._temporary,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=_OBJECT_STORE_BYTES,
        )

    def close(self) -> None:
        """Disconnect, and end the cluster if it is ours."""
        if self._owner:
            self.ray.shutdown()
            self._owner = False
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = ""
