"""The processes that answer, with uvicorn's way to start them, to replace those that die, and to take signals."""

from __future__ import annotations

import logging

from uvicorn import Config
from uvicorn.supervisors.multiprocess import Multiprocess, Process

from openai_frontend.acceptor import Acceptor

logger = logging.getLogger(__name__)


class Workers(Multiprocess):
    """At SIGHUP each worker is replaced by one that reads its settings, keys and certificate again. uvicorn waits for
    the end of each old one before it turns to the next, and hears of nothing meanwhile; these end beside each other.
    """

    def __init__(self, config: Config, acceptor: Acceptor) -> None:
        super().__init__(config, sockets=[acceptor.door])
        self._acceptor = acceptor
        self._replaced: list[Process] = []  # that finish what they have

    def restart_all(self) -> None:
        for index, old in enumerate(self.processes):
            new = Process(self.config, self.sockets)
            new.start()
            if not new.wait_until_ready(self.config.timeout_worker_healthcheck, self.should_exit):
                new.kill()
                new.join()
                logger.error("worker %s did not start; worker %s and those after it stay", new.pid, old.pid)
                return
            self.processes[index] = new
            self._replaced.append(old)
            old.terminate()

    def keep_subprocess_alive(self) -> None:
        self._replaced = [old for old in self._replaced if old.process.is_alive()]
        super().keep_subprocess_alive()

    def terminate_all(self) -> None:
        self._acceptor.ending = True
        super().terminate_all()

    def join_all(self) -> None:
        super().join_all()
        for old in self._replaced:
            old.join()
