"""Check the installation, GPUs, hub access and disk space; include the output in bug reports.

    python scripts/doctor.py

Each line that is not "ok" ends with the command that fixes it; the last line says whether training
can run. If it cannot, the exit code is 1.
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
from flow_grpo.config.error_reporting import ScriptParser, print_text
from flow_grpo.errors import first_line
from flow_grpo.hub_access import cached_repos

GIB = 2**30
HUB_TIMEOUT = 4.0  # seconds
LOGIN_HINT = "hf auth login, or set HF_TOKEN: gated models need it"
MIN_DISK_SPACE = 20 * GIB  # for a model and its checkpoints
FORMATS = {"bf16": (8, 0), "FP8": (8, 9)}  # lowest compute capability that supports each
# purpose of each extra in setup.py
EXTRAS = {
    "ocr": "reward ocr",
    "paddleocr": "reward ocr, engine paddleocr",
    "geneval": "reward geneval",
    "vlm": "reward math_answer",
    "data": ".parquet files, hub datasets",
    "server": "flow-grpo reward-server",
    "demo": "flow-grpo demo",
    "plot": "flow-grpo plot, compare",
    "video": "videos as MP4, not GIF",
    "deepspeed": "DeepSpeed",
    "adam8bit": "train.use_8bit_adam",
    "vllm": "sample.engine=vllm",
    "trackers": "log_with",
}


class Finding(NamedTuple):
    """One line of the output."""

    state: str  # "ok" or a one-word problem
    what: str  # what was checked
    found: str
    remedy: str = ""  # how to fix a problem


def packages(required: Iterable[str] | None = None) -> Iterator[Finding]:
    """Check each required package, then the packages of each extra."""
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
    """Compare requirements with the installed packages.

    Args:
        what: What needs them.
        requirements: Packages with their versions.
        lacking: State of the finding if one is missing.
    """
    found = {each: _version(each.name) for each in requirements}
    absent = [each for each, version in found.items() if version is None]
    old = [e for e, v in found.items() if v and not e.specifier.contains(v, prereleases=True)]
    wanted = " ".join(f"'{each.name}{each.specifier}'" for each in [*absent, *old])
    text = ", ".join(f"{each.name} {version or 'missing'}" for each, version in found.items())
    text = text.removeprefix(f"{what} ")
    state = lacking if absent else "untried" if old else "ok"
    return Finding(state, what, text, f"pip install {wanted}" if wanted else "")


def _version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpus() -> Iterator[Finding]:
    """Check that torch can use the GPUs of this machine, if there are any."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("broken", "torch", first_line(error), "pip install --force-reinstall torch")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        major, minor = torch.cuda.get_device_capability(index)
        formats = [name for name, minimum in FORMATS.items() if (major, minor) >= minimum]
        memory = f"{free / GIB:.0f} of {total / GIB:.0f} GiB free"
        model = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
        supported = " and ".join(formats) or "neither bf16 nor FP8"
        yield Finding("ok", f"GPU {index}", f"{model}, {memory}, {supported}")
    if not torch.cuda.device_count():
        idle = bool(shutil.which("nvidia-smi"))
        remedy = "https://pytorch.org/get-started has the build of torch for it" if idle else ""
        found = "present, but torch cannot use it" if idle else "none: only small models will run"
        yield Finding("unused" if idle else "ok", "GPU", found, remedy)


def hub() -> Iterator[Finding]:
    """Check that the hub responds and the token is valid, or offline that a token exists."""
    from huggingface_hub import constants, get_token

    token = get_token()
    found = _query_hub(constants.ENDPOINT, token) if not constants.HF_HUB_OFFLINE else None
    yield found or Finding("ok", "hub", "HF_HUB_OFFLINE is set: only the cache is used")
    if not found or found.state == "offline":
        if token:
            yield Finding("ok", "hub login", "token found")
        else:
            yield Finding("login", "hub login", "none", LOGIN_HINT)


def _query_hub(endpoint: str, token: str | None) -> Finding:
    """Return a finding: whether the hub responds, and accepts the token if there is one."""
    import requests

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        url = f"{endpoint}/api/whoami-v2"
        status = requests.get(url, headers=headers, timeout=HUB_TIMEOUT).status_code
    except requests.RequestException as error:
        reason = type(error).__name__
        remedy = "check the network and HF_ENDPOINT, or use local model directories"
        return Finding("offline", "hub", f"{endpoint} does not respond ({reason})", remedy)
    if status == 200:
        return Finding("ok", "hub", f"{endpoint}, logged in")
    if status in (401, 403):
        login = "the token was rejected" if token else "not logged in"
        return Finding("login", "hub", f"{endpoint}, {login}", LOGIN_HINT)
    return Finding("offline", "hub", f"{endpoint} returned {status}", "try again later")


def machine() -> Iterator[Finding]:
    """Describe Python, CPU and memory, and check the free disk space."""
    import psutil
    from huggingface_hub import constants

    yield Finding("ok", "Python", f"{platform.python_version()}, {platform.platform(terse=True)}")
    cores, memory = len(psutil.Process().cpu_affinity()), psutil.virtual_memory()
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    free = f"{memory.available / GIB:.0f} of {memory.total / GIB:.0f} GiB free"
    yield Finding("ok", "CPU", f"{cores} cores, OMP_NUM_THREADS {threads}, {free}")
    for what, folder in {"logs": Path("logs"), "hub cache": Path(constants.HF_HUB_CACHE)}.items():
        existing = next(p for p in [folder.absolute(), *folder.absolute().parents] if p.exists())
        free_bytes = shutil.disk_usage(existing).free
        name = str(folder).replace(str(Path.home()), "~")
        if what == "hub cache":
            name += f", {', '.join(cached_repos('model')) or 'no models'}"
        state, remedy = "ok", ""
        if free_bytes < MIN_DISK_SPACE:
            option = "--config.logdir" if what == "logs" else "HF_HUB_CACHE"
            state, remedy = "low", f"free disk space, or set {option} to another disk"
        yield Finding(state, what, f"{free_bytes / GIB:.0f} GiB free, {name}", remedy)


def table(findings: Iterable[Finding]) -> str:
    """Return the findings as aligned lines."""
    rows = [
        [each.state, each.what, each.found + (f"; {each.remedy}" if each.remedy else "")]
        for each in findings
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{s:{widths[0]}}  {w:{widths[1]}}  {f}" for s, w, f in rows)


def verdict(findings: Iterable[Finding]) -> str:
    """Summarize in one line whether training can run."""
    wrong = [each for each in findings if each.state != "ok"]
    if broken := [each.what for each in wrong if each.state == "broken"]:
        return f"training cannot run: fix {', '.join(broken)} first"
    items = "1 optional item is" if len(wrong) == 1 else f"{len(wrong)} optional items are"
    return f"training can run; {items} missing" + (": see the lines above" if wrong else "")


def main() -> None:
    """Print all findings and the verdict; exit with 1 if something is broken."""
    ScriptParser(description=__doc__.splitlines()[0]).parse_args()
    package = Finding("ok", "flow_grpo", __version__)
    findings = [package, *machine(), *gpus(), *hub(), *packages()]
    print_text(f"{table(findings)}\n\n{verdict(findings)}")
    sys.exit(any(each.state == "broken" for each in findings))


if __name__ == "__main__":
    main()
