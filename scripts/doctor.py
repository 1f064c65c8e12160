"""What is installed and what is missing, GPU, hub, disk: what an issue report should hold.

    python scripts/doctor.py

Each line that is not "ok" ends with the command that mends it; the last line says whether training
can run. If not, the exit code is 1.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from flow_grpo import __version__
from flow_grpo.access import cached
from flow_grpo.config.mistakes import Parser, say
from flow_grpo.errors import first_line

GIB = 2**30
SECONDS = 4.0  # for the hub to answer
LOGIN = "hf auth login, or set HF_TOKEN: gated models need it"
ROOM = 20 * GIB  # of a disk: less will not hold a model and its checkpoints
FORMATS = {"bf16": (8, 0), "FP8": (8, 9)}  # the oldest GPUs that compute in them
# what the packages of each extra of setup.py are for
EXTRAS = {
    "ocr": "reward ocr",
    "paddleocr": "reward ocr, engine paddleocr",
    "geneval": "reward geneval",
    "vlm": "reward math_answer",
    "data": ".parquet, data sets of the hub",
    "server": "flow-grpo reward-server",
    "demo": "flow-grpo demo",
    "plot": "flow-grpo plot, compare",
    "deepspeed": "DeepSpeed",
    "adam8bit": "train.use_8bit_adam",
    "vllm": "sample.engine=vllm",
    "trackers": "log_with",
}


class Finding(NamedTuple):
    state: str  # "ok", or what is wrong in a word
    what: str
    found: str
    remedy: str = ""


def packages(required: Iterable[str] | None = None) -> Iterator[Finding]:
    """What flow_grpo needs, each on its own, then what its extras need."""
    try:
        required = importlib.metadata.requires("flow_grpo") if required is None else required
    except importlib.metadata.PackageNotFoundError:
        yield Finding("missing", "flow_grpo", "not installed", "pip install -e .")
        return
    extras: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, required):
        extra = re.search(r"extra == ['\"](\w+)", str(requirement.marker or ""))
        extras.setdefault(extra[1] if extra else "", []).append(requirement)
    for requirement in extras.pop("", []):
        yield _finding(requirement.name, [requirement], lacking="broken")
    for extra, what in EXTRAS.items():
        if extra == "trackers":
            for each in extras.get(extra, []):
                yield _finding(f"{what}={each.name.removesuffix('-skinny')}", [each])
        else:
            yield _finding(what, extras.get(extra, []))


def _finding(what: str, requirements: list[Requirement], lacking: str = "missing") -> Finding:
    found = {each: _version(each.name) for each in requirements}
    absent = [each for each, version in found.items() if version is None]
    old = [e for e, v in found.items() if v and not e.specifier.contains(v, prereleases=True)]
    wanted = " ".join(f"'{each.name}{each.specifier}'" for each in [*absent, *old])
    text = ", ".join(f"{each.name} {version or 'missing'}" for each, version in found.items())
    text = text.removeprefix(f"{what} ")
    state = lacking if absent else "untried" if old else "ok"
    return Finding(state, what, text, f"pip install {wanted}" if wanted else "")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpus() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("broken", "torch", first_line(error), "pip install --force-reinstall torch")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        able = torch.cuda.get_device_capability(index)
        formats = [name for name, least in FORMATS.items() if able >= least]
        memory = f"{free / GIB:.0f} of {total / GIB:.0f} GiB free"
        kind = f"{torch.cuda.get_device_name(index)}, compute capability {able[0]}.{able[1]}"
        computes = " and ".join(formats) or "neither bf16 nor FP8"
        yield Finding("ok", f"GPU {index}", f"{kind}, {memory}, {computes}")
    if not torch.cuda.device_count():
        idle = bool(shutil.which("nvidia-smi"))
        remedy = "https://pytorch.org/get-started has the build of torch for it" if idle else ""
        found = "one is there, and torch cannot use it" if idle else "none: small models alone"
        yield Finding("unused" if idle else "ok", "GPU", found, remedy)


def hub() -> Iterator[Finding]:
    """Whether it answers, and knows us; if it does not answer, whether there is a login."""
    from huggingface_hub import constants, get_token

    token = get_token()
    found = _ask_hub(constants.ENDPOINT, token) if not constants.HF_HUB_OFFLINE else None
    yield found or Finding("ok", "hub", "HF_HUB_OFFLINE is set: the cache alone is used")
    if not found or found.state == "offline":
        known = ("ok", "hub login", "there is a token") if token else ("login", "hub login", "none")
        yield Finding(*known, "" if token else LOGIN)


def _ask_hub(endpoint: str, token: str | None) -> Finding:
    import requests

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        url = f"{endpoint}/api/whoami-v2"
        status = requests.get(url, headers=headers, timeout=SECONDS).status_code
    except requests.RequestException as error:
        why = type(error).__name__
        remedy = "check the network and HF_ENDPOINT, or name models by their folders"
        return Finding("offline", "hub", f"{endpoint} does not answer ({why})", remedy)
    if status == 200:
        return Finding("ok", "hub", f"{endpoint}, logged in")
    if status in (401, 403):
        known = "your token is refused" if token else "not logged in"
        return Finding("login", "hub", f"{endpoint}, {known}", LOGIN)
    return Finding("offline", "hub", f"{endpoint} answers {status}", "try again later")


def machine() -> Iterator[Finding]:
    import psutil
    from huggingface_hub import constants

    yield Finding("ok", "Python", f"{platform.python_version()}, {platform.platform(terse=True)}")
    cores, memory = len(psutil.Process().cpu_affinity()), psutil.virtual_memory()
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    free = f"{memory.available / GIB:.0f} of {memory.total / GIB:.0f} GiB free"
    yield Finding("ok", "CPU", f"{cores} cores, OMP_NUM_THREADS {threads}, {free}")
    for what, folder in {"logs": Path("logs"), "hub cache": Path(constants.HF_HUB_CACHE)}.items():
        there = next(p for p in [folder.absolute(), *folder.absolute().parents] if p.exists())
        left = shutil.disk_usage(there).free
        held = f", {', '.join(cached('model')) or 'no models'}" if what == "hub cache" else ""
        name = str(folder).replace(str(Path.home()), "~") + held
        low, move = left < ROOM, "--config.logdir" if what == "logs" else "HF_HUB_CACHE"
        remedy = f"make room, or set {move} to another disk" if low else ""
        yield Finding("low" if low else "ok", what, f"{left / GIB:.0f} GiB free, {name}", remedy)


def table(findings: Iterable[Finding]) -> str:
    rows = [
        [each.state, each.what, each.found + (f"; {each.remedy}" if each.remedy else "")]
        for each in findings
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{s:{widths[0]}}  {w:{widths[1]}}  {f}" for s, w, f in rows)


def verdict(findings: Iterable[Finding]) -> str:
    """Whether training can run, in a line."""
    wrong = [each for each in findings if each.state != "ok"]
    if broken := [each.what for each in wrong if each.state == "broken"]:
        return f"training cannot run: mend {', '.join(broken)} first"
    things = "1 optional thing is" if len(wrong) == 1 else f"{len(wrong)} optional things are"
    return f"training can run; {things} missing" + (": see what is not ok" if wrong else "")


def main() -> None:
    Parser(description=__doc__.splitlines()[0]).parse_args()
    own = Finding("ok", "flow_grpo", __version__)
    findings = [own, *machine(), *gpus(), *hub(), *packages()]
    say(f"{table(findings)}\n\n{verdict(findings)}")
    sys.exit(any(each.state == "broken" for each in findings))


if __name__ == "__main__":
    main()
