"""What the frontend is told at start."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from triton_omni.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error")
_AT_LEAST_ONE = ("workers", "max_body_bytes", "max_media_bytes", "max_speech_characters")
_AT_LEAST_ZERO = ("requests_per_minute", "max_concurrent_requests", "drain_s", "audio_id_lifetime_s")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """``triton_url`` is tritonserver's gRPC address (host:port). ``model_name`` is what clients write in ``model``;
    empty: the name of the checkpoint's directory. ``stall_timeout_s`` bounds the wait for the next piece of an answer;
    it is longer than omni_bls's own time-out, and only notices a server that has died.

    ``api_keys``: empty, and everybody may ask. ``requests_per_minute`` and ``max_concurrent_requests`` hold for each
    key (each client address when there are no keys) in each worker; 0: no limit.

    ``allowed_media_domains``: hosts that media are fetched from; empty: nothing is fetched.
    ``allowed_local_media_path``: the directory that ``file:`` URLs may name; empty: none. ``audio_id_lifetime_s``: how
    long an answer can be named by its audio's id.

    ``speech_system_prompt``: the system message of chats that ask for speech and bring none, and the instructions that
    realtime sessions begin with; empty: none.

    Raises: ConfigError naming the option.
    """

    checkpoint: Path
    triton_url: str = "127.0.0.1:8001"
    host: str = "127.0.0.1"
    port: int = 9000
    model_name: str = ""
    max_body_bytes: int = 64 * 2**20
    max_media_bytes: int = 32 * 2**20
    stall_timeout_s: float = 660.0
    drain_s: float = 10.0
    log_level: str = "info"
    triton_metrics_url: str = ""
    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    protect_metrics: bool = False
    requests_per_minute: int = 0
    max_concurrent_requests: int = 0
    max_speech_characters: int = 4096
    cors_origins: tuple[str, ...] = ()
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    workers: int = 1
    allowed_media_domains: tuple[str, ...] = ()
    allowed_local_media_path: str = ""
    media_fetch_timeout_s: float = 10.0
    audio_id_lifetime_s: int = 3600
    speech_system_prompt: str = ""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_words()
        self._check_tls()

    def _check_numbers(self) -> None:
        for names, least in ((_AT_LEAST_ONE, 1), (_AT_LEAST_ZERO, 0)):
            for name in names:
                if not (value := getattr(self, name)) >= least:
                    raise ConfigError(f"must be at least {least}, got {value}", field=name)
        for name in ("stall_timeout_s", "media_fetch_timeout_s"):
            if not (value := getattr(self, name)) > 0:
                raise ConfigError(f"must be above 0, got {value:g}", field=name)
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"must be a port from 0 to 65535, got {self.port}", field="port")

    def _check_words(self) -> None:
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"must be one of {', '.join(LOG_LEVELS)}, got {self.log_level!r}", field="log_level")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"must hold origins as browsers name them (https://app.example) or *, got {origin!r}",
                    field="cors_origins",
                )

    def _check_tls(self) -> None:
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            missing = "ssl_keyfile" if self.ssl_certfile else "ssl_certfile"
            raise ConfigError("is missing: TLS needs a certificate and its key", field=missing)
        for name in ("ssl_certfile", "ssl_keyfile"):
            if (path := getattr(self, name)) and not Path(path).is_file():
                raise ConfigError(f"{path} is no file", field=name)

    @property
    def served_model(self) -> str:
        return self.model_name or self.checkpoint.resolve().name
