import gc
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import hub_offline  # noqa: F401
import hypothesis
import pytest
import torch
from runner import Runner
from sessions import short_config
from untrained.small.sd3 import build as build_tiny_sd3

from flow_grpo.diffusion.models import load_adapter
from flow_grpo.diffusion.session import Session, build_session
from flow_grpo.report.video_files import find_encoder

torch.set_num_threads(1)  # tests run in two processes, and their tensors are small
# no deadline: a loaded machine must not fail a test
hypothesis.settings.register_profile("patient", deadline=None, max_examples=50)
if hypothesis.settings.get_current_profile_name() == "default":  # scripts/mutants.py sets another
    hypothesis.settings.load_profile("patient")
# paddleocr needs a separate environment, created by .ci/run; gpu needs a GPU, see docs/scaling.md
collect_ignore = ["paddleocr", "gpu"]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Run the slowest files first, and all tests of a model family in sequence.

    Each family is then built once. pytest groups tests by parameter index instead, and some tests
    are parametrized with a subset of the families.
    """

    def family(item) -> str:
        return str(item.callspec.params.get("family", "")) if hasattr(item, "callspec") else ""

    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: ("e2e" not in item.path.parts, item.path not in slow))
    indices = [i for i, item in enumerate(items) if item.path.name == "test_families.py"]
    for i, item in zip(indices, sorted((items[i] for i in indices), key=family), strict=True):
        items[i] = item


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Exclude modules and test items from garbage collection, and collect less often.

    Otherwise each full collection takes half a second.
    """
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@pytest.fixture(autouse=True)
def propagate_logs_once(monkeypatch):
    """Let `caplog` receive each record once, through the root logger.

    An earlier test may have configured our logger and disabled its propagation.
    """
    monkeypatch.setattr(logging.getLogger("flow_grpo"), "propagate", True)


@pytest.fixture(scope="session")
def tiny_sd3(tmp_path_factory) -> Path:
    """Directory of a randomly initialized SD3 pipeline with all three text encoders."""
    folder = tmp_path_factory.mktemp("models") / "tiny-sd3"
    build_tiny_sd3(seed=0).save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(tiny_sd3):
    return load_adapter(str(tiny_sd3), max_sequence_length=8)


@pytest.fixture(scope="session")
def prompt_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    for split in ("train", "test"):
        lines = [f"{split} prompt number {i}" for i in range(8)]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def short_runs(tiny_sd3, prompt_folder) -> dict:
    """Config fields of short runs with the random SD3 pipeline."""
    return dict(
        pretrained__model=tiny_sd3,
        dataset=prompt_folder,
        resolution=32,
        max_sequence_length=8,
        num_epochs=1,
        sample__num_steps=3,
        sample__eval_num_steps=3,
        sample__train_batch_size=4,
        sample__num_image_per_prompt=4,
        sample__num_batches_per_epoch=2,
        train__batch_size=4,
        train__gradient_accumulation_steps=1,
    )


@pytest.fixture
def train(short_runs, tmp_path) -> Runner:
    return Runner(tmp_path / "logs", **short_runs)


@pytest.fixture
def run(tmp_path) -> Runner:
    """Runner that changes no field of a preset but the run directory."""
    return Runner(tmp_path / "logs")


@pytest.fixture(autouse=True)
def without_video_encoder(monkeypatch) -> Iterator[None]:
    """The result does not depend on whether PyAV, an optional dependency, is installed."""
    monkeypatch.setitem(sys.modules, "av", None)
    find_encoder.cache_clear()
    yield
    find_encoder.cache_clear()


@pytest.fixture
def make_session(tmp_path):
    """Factory of sessions in this process; its keyword arguments are dotted config fields."""
    sessions = []

    def make(**fields) -> Session:
        config = short_config(tmp_path, f"run-{len(sessions)}", **fields)
        sessions.append(build_session(config))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()
