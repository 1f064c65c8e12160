"""Check whether a task can run here: weights, data, packages, GPUs and disk space.

All problems are returned at once, each with a fix.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from flow_grpo.config.paths import check_dataset_available, resolve_path
from flow_grpo.data.mixing import parse_sources
from flow_grpo.errors import UserError
from flow_grpo.hub_access import RepoType, cached_repos, check_hub_access, is_offline
from flow_grpo.training.tasks import Task

GIB = 2**30
MODULES = {  # modules that a reward imports, and the extra that installs them
    "ocr": (("rapidocr", "onnxruntime", "Levenshtein"), "ocr"),
    "geneval": (("cv2", "scipy"), "geneval"),
    "math_answer": (("math_verify",), "vlm"),
}
DATASETS = (("datasets", "pyarrow"), "data")  # of datasets on the hub
DOWNLOAD = "hf download {}{}"


@dataclass(frozen=True)
class Problem:
    """A missing requirement of a task, and how to fix it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}" if self.remedy else self.what


@dataclass(frozen=True)
class Needs:
    """What a training run reads, from its config."""

    model: str
    dataset: str
    rewards: tuple[str, ...]


def find_problems(task: Task, needs: Iterable[Needs], gpus: int, out: Path) -> list[Problem]:
    """Return all missing requirements of a task.

    Args:
        task: The task.
        needs: What each of its runs reads.
        gpus: Number of GPUs to use; 0 for a task that runs on a CPU.
        out: Directory of the runs, which may not exist yet.
    """
    needs = list(needs)
    models = dict.fromkeys(each.model for each in needs)
    datasets = dict.fromkeys(each.dataset for each in needs)
    problems = [
        *(p for each in models for p in _check_repo("pretrained.model", each, "model")),
        *(p for each in task.reward_weights for p in _check_repo("weights", each, "model")),
        *(p for each in datasets for p in _check_dataset(each)),
        *_check_packages({name for n in needs for name in n.rewards}),
        *_check_gpus(gpus, task.gpu_memory_gib),
        *_check_disk(out, task.run_gib, task.models),
    ]
    return list(dict.fromkeys(problems))


def _check_repo(field: str, name: str, kind: RepoType) -> Iterator[Problem]:
    """Check that a local path exists, or that a repository is cached or can be read."""
    if os.path.exists(resolve_path(name)) or name in cached_repos(kind):
        return
    repo_type = " --repo-type dataset" if kind == "dataset" else ""
    if is_offline():
        yield Problem(
            f"{name} is not in the cache, and HF_HUB_OFFLINE is set",
            f"with network access run: {DOWNLOAD.format(name, repo_type)}",
        )
        return
    try:
        file = "model_index.json" if kind == "model" else "README.md"
        check_hub_access(field, name, kind=kind, file=file)
    except UserError as error:
        yield Problem(str(error), "")


def _check_dataset(dataset: str) -> Iterator[Problem]:
    """Check each part of a mixture."""
    try:
        sources = [source.path for source in parse_sources(dataset)]
    except UserError as error:
        yield Problem(str(error), "")
        return
    for path in sources:
        try:
            check_dataset_available(path)
        except UserError as error:
            yield Problem(str(error), "")
            continue
        if not os.path.exists(resolve_path(path)):
            missing = [name for name in DATASETS[0] if find_spec(name) is None]
            if missing:
                yield Problem(
                    f"datasets on the hub need {', '.join(missing)}",
                    f"pip install -e '.[{DATASETS[1]}]'",
                )
            yield from _check_repo("dataset", path, "dataset")


def _check_packages(rewards: set[str]) -> Iterator[Problem]:
    """Yield a problem for each reward whose packages are not installed."""
    for reward in sorted(rewards & MODULES.keys()):
        modules, extra = MODULES[reward]
        if missing := [name for name in modules if find_spec(name) is None]:
            yield Problem(
                f"the reward {reward} needs {', '.join(missing)}", f"pip install -e '.[{extra}]'"
            )


def _check_gpus(gpus: int, memory_gib: float) -> Iterator[Problem]:
    """Check number and memory of the GPUs; torch is imported only for a task that needs them."""
    if not gpus:
        return
    import torch

    found = torch.cuda.device_count()
    if found < gpus:
        hint = f"pass --gpus {found}" if found else "use a machine with GPUs, or try --small"
        yield Problem(f"{gpus} GPUs are needed, but only {found} are available", hint)
    for index in range(min(found, gpus)):
        total = torch.cuda.mem_get_info(index)[1] / GIB
        if total < memory_gib:
            yield Problem(
                f"GPU {index} has {total:.0f} GiB, but {memory_gib:g} GiB are needed",
                "reduce memory with options after --, see docs/memory.md",
            )


def _check_disk(out: Path, run_gib: float, models: Mapping[str, float]) -> Iterator[Problem]:
    """Check the disks of the output and of the hub's cache, which may be one disk."""
    from huggingface_hub import constants

    cached = cached_repos("model")
    download = sum(gib for name, gib in models.items() if name not in cached)
    needed: dict[int, float] = {}
    folders: dict[int, Path] = {}
    for folder, gib in ((out, run_gib), (Path(constants.HF_HUB_CACHE), download)):
        absolute = folder.absolute()
        existing = next(p for p in (absolute, *absolute.parents) if p.exists())
        device = existing.stat().st_dev
        needed[device] = needed.get(device, 0.0) + gib
        folders.setdefault(device, existing)
    for device, gib in needed.items():
        free = shutil.disk_usage(folders[device]).free / GIB
        if free < gib:
            yield Problem(
                f"{folders[device]} has {free:.0f} GiB of free disk space, but about {gib:.0f} GiB "
                "are needed",
                "free disk space, or set --out or HF_HOME to another disk",
            )
