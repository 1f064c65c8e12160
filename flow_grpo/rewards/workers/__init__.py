"""Daemon threads and an event loop for scorers, which never delay the exit of the trainer.

The threads of `concurrent.futures` would, while a scorer hangs.
"""

import asyncio
import functools
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any

CLOSE_TIMEOUT = 1.0  # seconds


def run_in_thread(call: Callable[[], Any]) -> Future:
    """Run `call` in a new thread."""
    future: Future = Future()
    threading.Thread(target=_run, args=(call, future), daemon=True).start()
    return future


class SerialThread:
    """A thread, started by the first call, that runs calls in order."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable, Future] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], Any]) -> Future:
        """Run `call` after those submitted before it."""
        future: Future = Future()
        self._calls.put((call, future))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, daemon=True)
                self._thread.start()
        return future

    def close(self) -> None:
        """End the thread after its pending calls; abandon it if it hangs."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._calls.put(None)
            thread.join(CLOSE_TIMEOUT)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            _run(*call)


def map_in_threads(call: Callable[[Any], Any], items: Iterable[Any], threads: int) -> list[Any]:
    """Return `[call(item) for item in items]`, computed by up to `threads` threads."""
    items = list(items)
    results: list[Any] = [None] * len(items)
    numbered = iter(enumerate(items))
    lock = threading.Lock()

    def work() -> None:
        """Process items until none is left."""
        while True:
            with lock:
                number, item = next(numbered, (None, None))
            if number is None:
                return
            results[number] = call(item)

    workers = [run_in_thread(work) for _ in range(min(threads, len(items)))]
    for worker in workers:
        worker.result()
    return results


def _run(call: Callable[[], Any], future: Future) -> None:
    """Store the result or the exception of `call` in `future`."""
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


_event_loop_lock = threading.Lock()


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine from a synchronous caller and return its result.

    It always runs on the same event loop, because HTTP clients are bound to theirs.
    """
    with _event_loop_lock:
        loop = _event_loop()
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()
