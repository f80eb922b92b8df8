"""Triton's model control, for the process that started the server and nobody else."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
import uuid

from triton_omni.errors import ConfigError

HEADER = "omni-control-key"
_POLL_S = 0.1


class ModelControl:
    """Loads and unloads the models of one server, with a key that is made for it."""

    def __init__(self) -> None:
        self._key = uuid.uuid4().hex

    def server_arguments(self) -> list[str]:
        """Who may load models may run any code in them: hence the key."""
        return [
            "--model-control-mode=explicit",
            "--load-model=*",
            f"--http-restricted-api=model-repository:{HEADER}={self._key}",
            f"--grpc-restricted-protocol=model-repository:{HEADER}={self._key}",
        ]

    def load(self, http_url: str, model: str, timeout_s: float | None = None) -> None:
        """Have a model's directory read again, and return when that has been done. Where only the instance groups have
        changed, Triton starts and ends the instances that are new and gone, and leaves the others alone.

        Raises: ConfigError with Triton's reason, the model then goes on as it was; or when ``timeout_s`` passes.
        """
        self._ask(http_url, model, f"models/{model}/load", timeout_s)

    def unload(self, http_url: str, model: str, timeout_s: float) -> None:
        """Take a model out, and return when its processes have ended and their memory is free.

        Raises: ConfigError with Triton's reason, or when ``timeout_s`` passes.
        """
        self._ask(http_url, model, f"models/{model}/unload")
        deadline = time.monotonic() + timeout_s
        while any(
            one["name"] == model and (one.get("state"), one.get("reason")) != ("UNAVAILABLE", "unloaded")
            for one in json.loads(self._ask(http_url, model, "index"))
        ):
            if time.monotonic() > deadline:
                raise ConfigError(f"was not unloaded after {timeout_s:g} s", field=f"model {model}")
            time.sleep(_POLL_S)  # Triton has no event for it

    def _ask(self, http_url: str, model: str, path: str, timeout_s: float | None = None) -> bytes:
        """Triton's answer. Raises ConfigError with its reason."""
        url = f"{http_url}/v2/repository/{path}"
        request = urllib.request.Request(url, b"{}", {HEADER: self._key}, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                answer: bytes = response.read()
                return answer
        except urllib.error.HTTPError as error:
            reason = error.read().decode(errors="replace")
        except OSError as error:
            reason = str(error)
        raise ConfigError(f"Triton does not do it ({path}): {reason}", field=f"model {model}")
