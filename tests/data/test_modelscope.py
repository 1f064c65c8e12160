"""Models and datasets of ModelScope; local directories replace downloads."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import small_vlm
from user_errors import raises_user_error

from flow_grpo.data import questions
from flow_grpo.data.hub import download_revision
from flow_grpo.data.mixing import parse_sources
from flow_grpo.data.prompts import load_prompts
from flow_grpo.hub_access import check_hub_access
from flow_grpo.modelscope_hub import _download, local_model
from flow_grpo.vlm.models import find_family, load_processors


@pytest.fixture
def downloads(tmp_path, monkeypatch):
    """Return the directory of each repository by name, and the list of download requests."""
    requests = []

    def snapshot_download(model_id: str, revision: str = "master") -> str:
        requests.append((model_id, revision))
        if not (tmp_path / model_id).exists():
            raise OSError(f"{model_id} not found\nsecond line")
        return str(tmp_path / model_id)

    def dataset_snapshot_download(
        dataset_id: str, revision: str = "master", allow_file_pattern: list[str] | None = None
    ) -> str:
        requests.append(allow_file_pattern)
        return snapshot_download(dataset_id, revision)

    for name in ("modelscope", "modelscope.hub", "modelscope.hub.snapshot_download"):
        module = ModuleType(name)
        module.__path__, module.__spec__ = [], ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    module.snapshot_download = snapshot_download
    module.dataset_snapshot_download = dataset_snapshot_download
    _download.cache_clear()
    yield tmp_path, requests
    _download.cache_clear()


def test_a_model_is_downloaded_once_and_then_local(downloads):
    folder, requests = downloads
    small_vlm.save(folder / "own/vlm")
    assert find_family("modelscope:own/vlm").names["qwen3_vl"] == "Qwen3-VL"
    _, image_processor = load_processors("modelscope:own/vlm")
    assert image_processor.patch_size == 8
    assert requests == [("own/vlm", "master")]
    assert local_model("modelscope:own/vlm@v1") == str(folder / "own/vlm")
    assert download_revision("modelscope:own/vlm", "v2") == str(folder / "own/vlm")
    assert requests[1:] == [("own/vlm", "v1"), ("own/vlm", "v2")]
    assert local_model("own/vlm") == "own/vlm"


def test_datasets_are_downloaded_and_mixed(downloads):
    folder, requests = downloads
    (folder / "own").mkdir()
    small_vlm.write_data(folder / "own/data")
    assert len(questions.load_split("modelscope:own/data", "train")) == 8
    patterns, request = requests
    assert {"*.jsonl", "*.png"} <= {*patterns}
    assert request == ("own/data", "master")
    (folder / "own/prompts").mkdir()
    (folder / "own/prompts/test.txt").write_text("a cat\n")
    assert [each.prompt for each in load_prompts("modelscope:own/prompts", "test")] == ["a cat"]
    sources = parse_sources("modelscope:own/data:0.75,other:0.25")
    assert [(each.path, each.name, float(each.share)) for each in sources] == [
        ("modelscope:own/data", "data", 0.75),
        ("other", "other", 0.25),
    ]
    assert [each.path for each in parse_sources("modelscope:own/data@v1")] == [
        "modelscope:own/data@v1"
    ]


def test_errors_are_one_line(downloads, monkeypatch):
    with raises_user_error("own/none not found", field="pretrained.model"):
        local_model("modelscope:own/none")
    with raises_user_error("modelscope:owner/name", field="dataset"):
        check_hub_access("dataset", "modelscope:nothing")
    monkeypatch.delitem(sys.modules, "modelscope")
    with raises_user_error("pip install modelscope", field="pretrained.model"):
        check_hub_access("pretrained.model", "modelscope:own/vlm")
