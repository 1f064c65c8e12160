"""Server processes, each started once per module, with a reward that obeys its prompts."""

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_process import Server

OBEDIENT = """
    import asyncio, ctypes, os, re, threading, time
    from pathlib import Path
    from flow_grpo.errors import UserError

    def obey(images, prompts, metadata):
        '''The score is the prompt's length, unless the prompt is an order.'''
        for prompt in prompts:
            order, _, argument = prompt.partition(" ")
            if order == "wait":
                Path(argument + ".started").touch()
                while not Path(argument).exists():
                    time.sleep(0.01)
            if order == "raise":
                raise ValueError(argument)
            if order == "exit":
                raise SystemExit(3)
            if order == "crash":
                os._exit(7)
            if order == "segfault":
                ctypes.string_at(0)
            if order == "spin":  # in C, without releasing the GIL
                Path(argument + ".started").touch()
                re.match("(a|a)*$", "a" * 1000 + "b")
        for entry in metadata:
            if "raise" in entry:
                raise ValueError(entry["raise"])
        if prompts == ["twice"]:
            return [1.0, 1.0]
        special = {"nan": float("nan"), "none": None, "infinite": float("inf")}
        scores = [special.get(prompt, len(prompt)) for prompt in prompts]
        return scores, {"images_in_call": [len(images)] * len(images)}

    def wrong_count(images, prompts, metadata):
        return [1.0] * (len(images) + 1)

    async def later(images, prompts, metadata):
        await asyncio.sleep(0.01)
        return [0.25] * len(images)

    def pixels(images, prompts, metadata):
        '''The first pixel's channels, as extras.'''
        firsts = [image.getpixel((0, 0)) for image in images]
        extras = {name: [f[i] for f in firsts] for i, name in enumerate("rgb")}
        return [float(image.mode == "RGB") for image in images], extras

    class Unusable:
        def __call__(self, images, prompts, metadata):
            raise UserError("the weights are gone")

    class SlowToStart:
        def __init__(self, until):
            self.until = Path(until)
        def __call__(self, images, prompts, metadata):
            while not self.until.exists():
                time.sleep(0.01)
            return [1.0] * len(images)

    class Clinging:
        '''Neither its thread nor its close() ever ends.'''
        def __init__(self):
            threading.Thread(target=threading.Event().wait).start()
        def __call__(self, images, prompts, metadata):
            return [1.0] * len(images)
        def close(self):
            threading.Event().wait()

    class Fragile:
        '''Cannot be built while there is a file.'''
        def __init__(self, unless):
            if Path(unless).exists():
                raise OSError("no space left on the card")
        def __call__(self, images, prompts, metadata):
            return obey(images, prompts, metadata)

    class Crowd:
        def __init__(self, workers=1):
            self.workers = workers
        def __call__(self, images, prompts, metadata):
            return [self.workers] * len(images)
"""


@pytest.fixture(scope="session")
def stub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "obedient.py").write_text(textwrap.dedent(OBEDIENT))
    return folder


@pytest.fixture(scope="module")
def start(stub_folder: Path) -> Iterator[Callable[..., Server]]:
    """Return a function that starts a server, which runs until the end of the module."""
    servers: list[Server] = []

    def start(rewards: str, *arguments: str, wait: bool = True, **environment: str) -> Server:
        custom = ("--custom", "obey=obedient:obey") if "obey" in rewards else ()
        server = Server(rewards, *custom, *arguments, path=stub_folder, **environment)
        servers.append(server)
        if wait:
            server.wait_until_ready()
        return server

    yield start
    for server in servers:
        server.kill()
