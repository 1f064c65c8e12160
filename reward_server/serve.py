"""Run the app under uvicorn: sockets, signals, and the order in which things start and end."""

import functools
import ipaddress
import logging
import os
import socket
import threading
from types import FrameType

import uvicorn

from flow_grpo.errors import UserError
from flow_grpo.rewards.calling import in_background
from reward_server.app import create_app
from reward_server.connection import Connection
from reward_server.memory import return_large_blocks
from reward_server.service import Service

log = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE = 75  # seconds; trainers come back after an update
STRAGGLERS = 10  # seconds for what is not accepted yet, like half a body, at the end
KILL_TIMEOUT = 1.0  # seconds for the processes of scorers to go, when there is no more time
UNFINISHED = 1  # exit code


def bind(host: str, port: int, *, public: bool) -> socket.socket:
    """A socket that does not listen yet. Only with `public` may others than this machine reach it.

    Before the scorers are built: a port that is taken should not be told after minutes.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or "0.0.0.0", port, type=socket.SOCK_STREAM
        )[0]
    except OSError as error:
        raise UserError(f"--host {host!r} cannot be resolved ({error.strerror})") from error
    if not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback and not public:
        raise UserError(
            f"--host {host} can be reached from other machines, which needs a token: put one in "
            "an environment variable and name it with --token-env"
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from error
    return listener


def serve(
    service: Service,
    listener: socket.socket,
    *,
    token: str | None = None,
    workers: int | None = None,
    grace: float = 20.0,
    client_timeout: float = 20.0,
) -> None:
    """Serve until a signal comes and all that was accepted is answered, or a second one comes.

    `grace` seconds after the first signal the process ends, whatever it still does.
    """
    host, port = listener.getsockname()[:2]
    try:
        listener.listen(BACKLOG)
    except OSError as error:  # another process bound it meanwhile, and listens
        raise _cannot_listen(host, port, error) from error
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    return_large_blocks()
    config = uvicorn.Config(
        create_app(service, token=token, served_at=host),
        http=functools.partial(
            Connection,
            max_connections=service.limits.max_connections,
            timeout=client_timeout,
        ),
        backlog=BACKLOG,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=STRAGGLERS,
    )
    banner = f"serving {', '.join(service.desks)} on {url}"
    server = _Server(config, service, banner, workers, grace)
    server.run(sockets=[listener])
    if server.failure:
        raise server.failure
    if server.force_exit:
        raise KeyboardInterrupt


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        banner: str,
        workers: int | None,
        grace: float,
    ) -> None:
        super().__init__(config)
        self.failure: BaseException | None = None
        self._service = service
        self._banner = banner
        self._workers = workers
        self._grace = grace

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._banner, flush=True)
        self._warm_up = in_background(lambda: self._service.warm_up(self._workers))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal: take nothing new, and go once all is answered. The second: go."""
        if self._service.stopping:
            self.should_exit = self.force_exit = True
        else:
            # A thread: whatever hangs then, in a scorer or at the end of the interpreter, it can
            # still leave.
            last = threading.Timer(self._grace, self._leave)
            last.daemon = True
            last.start()
        self._service.stop()

    def _leave(self) -> None:
        log.error("not done %g s after the signal (--grace); it ends now", self._grace)
        self._service.kill(KILL_TIMEOUT)
        os._exit(UNFINISHED)

    async def on_tick(self, counter: int) -> bool:
        if self._warm_up.done() and not self._service.stopping:
            self.failure = self._warm_up.exception()
        if self.failure or (self._service.stopping and self._service.idle):
            self._service.stop()
            self.should_exit = True
        self._service.fail_overdue()
        for connection in list(self.server_state.connections):
            connection.close_if_slow()
        return await super().on_tick(counter)


def _cannot_listen(host: str, port: int, error: OSError) -> UserError:
    return UserError(
        f"cannot listen on {host}, port {port} ({error.strerror}); choose another --port, or 0 "
        "for any that is free"
    )
