"""Serve the application with uvicorn: sockets, signals, start-up and graceful shutdown."""

import functools
import ipaddress
import logging
import os
import socket
import threading
from types import FrameType

import uvicorn

from flow_grpo.errors import UserError
from flow_grpo.rewards.workers import run_in_thread
from reward_server.app import create_app
from reward_server.connection import LimitedHttpProtocol
from reward_server.memory import configure_malloc_trim
from reward_server.service import Service

log = logging.getLogger(__name__)

BACKLOG = 2048
KEEP_ALIVE = 75  # seconds; trainers send the next requests after an update
SHUTDOWN_TIMEOUT = 10  # seconds for requests that are not accepted yet, such as half a body
KILL_TIMEOUT = 1.0  # seconds for processes of scorers to exit once the grace period is over
EXIT_UNFINISHED = 1  # exit code


def bind_socket(host: str, port: int, *, public: bool) -> socket.socket:
    """Bind a socket without listening, so that a port in use fails before scorers are built.

    Args:
        host: Host name or address.
        port: Port; 0 for any free one.
        public: Whether addresses other than loopback are allowed.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host or "0.0.0.0", port, type=socket.SOCK_STREAM
        )[0]
    except OSError as error:
        rule = f"cannot be resolved ({error.strerror})"
        raise UserError(rule, field="--host", value=host) from error
    if not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback and not public:
        raise UserError(
            "is reachable from other machines and needs a token",
            field="--host",
            value=host,
            hint="set an environment variable to one and name it with --token-env",
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _listen_error(host, port, error) from error
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
    """Serve until a signal arrives and accepted requests are done, or until a second signal.

    Args:
        service: The rewards.
        listener: Bound socket.
        token: Token that clients must send, if any.
        workers: Worker processes of scorers that have some, for the warm-up.
        grace: Seconds from the first signal to a forced exit.
        client_timeout: Seconds without progress after which a client is disconnected.
    """
    host, port = listener.getsockname()[:2]
    try:
        listener.listen(BACKLOG)
    except OSError as error:  # another process listens on it by now
        raise _listen_error(host, port, error) from error
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    configure_malloc_trim()
    config = uvicorn.Config(
        create_app(service, token=token, served_at=host),
        http=functools.partial(
            LimitedHttpProtocol,
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
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT,
    )
    banner = f"serving {', '.join(service.served_rewards)} on {url}"
    server = _RewardServer(config, service, banner, workers, grace)
    server.run(sockets=[listener])
    if server.failure:
        raise server.failure
    if server.force_exit:
        raise KeyboardInterrupt


class _RewardServer(uvicorn.Server):
    """Uvicorn server that warms up the rewards after its start and drains before its exit."""

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
        self._warm_up = run_in_thread(lambda: self._service.warm_up(self._workers))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on the first signal and exit on the second."""
        if self._service.stopping:
            self.should_exit = self.force_exit = True
        else:
            # A thread can still exit if a scorer or the interpreter's shutdown hangs.
            timer = threading.Timer(self._grace, self._force_exit)
            timer.daemon = True
            timer.start()
        self._service.stop()

    def _force_exit(self) -> None:
        log.error("shutdown incomplete %g s after the signal (--grace); exiting", self._grace)
        self._service.kill(KILL_TIMEOUT)
        os._exit(EXIT_UNFINISHED)

    async def on_tick(self, counter: int) -> bool:
        """Run the periodic checks; return whether to exit, also after a failed warm-up."""
        if self._warm_up.done() and not self._service.stopping:
            self.failure = self._warm_up.exception()
        if self.failure or (self._service.stopping and self._service.idle):
            self._service.stop()
            self.should_exit = True
        self._service.fail_overdue()
        for connection in list(self.server_state.connections):
            connection.close_if_slow()
        return await super().on_tick(counter)


def _listen_error(host: str, port: int, error: OSError) -> UserError:
    """Return the UserError for a port that cannot be bound."""
    return UserError(
        f"on {host} cannot be used ({error.strerror})",
        field="--port",
        value=port,
        hint="choose another, or 0 for any free one",
    )
