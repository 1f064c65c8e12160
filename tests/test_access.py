"""Failures to read from the hub are one-line errors after a single request.

A local server simulates the hub.
"""

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants
from runner import run_with_import_times
from user_errors import raises_user_error

from flow_grpo import hub_access
from flow_grpo.data.hub import download_dataset, download_revision, read_hub
from flow_grpo.data.prompts import PromptLayout
from flow_grpo.diffusion.export import _pipeline_folder
from flow_grpo.diffusion.models import find_adapter
from flow_grpo.errors import UserError
from flow_grpo.hub_access import check_hub_access, hub_error_message
from flow_grpo.rewards.loading import find_file, load_image_processor, load_tokenizer
from flow_grpo.training.lora_files import resolve_lora_path
from flow_grpo.training.weight_sources import locate_weights
from flow_grpo.vlm.models import find_family

NAME = "owner/model-one"
SUBJECT = "^{}='owner/model-one' "
DENIED = SUBJECT + r".*\b{}\b.*`hf auth login"
ABSENT = SUBJECT + r".*\b(model|dataset)\b.*owner/name"
UNREACHABLE = SUBJECT + r".*http://127.*: {}\); .*HF_ENDPOINT.*hf download owner/model-one"
NO_RESPONSE, DISCONNECT = 0, -1  # instead of a status


class Hub(ThreadingHTTPServer):
    """Server that answers every request with the same status and error code."""

    daemon_threads = True

    def __init__(self) -> None:
        self.status, self.code, self.requests = 200, "", []
        self.shutting_down = threading.Event()
        super().__init__(("127.0.0.1", 0), Response)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Response(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        if self.server.status in (NO_RESPONSE, DISCONNECT):
            self.server.shutting_down.wait(0 if self.server.status == DISCONNECT else None)
            return
        self.send_response(self.server.status)
        self.send_header("X-Error-Code", self.server.code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    server = Hub()
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_access, "TIMEOUT_SECONDS", 0.5)
    hub_access._probe_hub.cache_clear()
    yield server
    server.shutting_down.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, "GatedRepo", DENIED.format("model", 401)),
        (403, "GatedRepo", DENIED.format("model", 403)),
        (401, "", DENIED.format("model", 401)),
        (403, "", DENIED.format("model", 403)),
        (404, "RepoNotFound", ABSENT.format("model")),
        (401, "RepoNotFound", ABSENT.format("model")),  # the response without a login
        (404, "", ABSENT.format("model")),
        (404, "RevisionNotFound", SUBJECT.format("model") + ".*revision"),
        (503, "", UNREACHABLE.format("model", "status 503")),
        (NO_RESPONSE, "", UNREACHABLE.format("model", ".*timed out")),
        (DISCONNECT, "", UNREACHABLE.format("model", ".*disconnected.*")),
    ],
)
def test_each_failure_has_its_message_after_one_request(hub, status, code, message):
    hub.status, hub.code = status, code
    with pytest.raises(UserError, match=message) as error:
        check_hub_access("model", NAME)
    assert "\n" not in str(error.value)
    assert hub.requests == ["HEAD /owner/model-one/resolve/main/config.json"]


def test_a_refused_connection_is_reported(hub, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/{{repo_id}}/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        with pytest.raises(UserError, match=UNREACHABLE.format("model", ".*refused")):
            check_hub_access("model", NAME)


def test_a_similar_name_is_suggested(hub):
    hub.status, hub.code = 404, "RepoNotFound"
    with raises_user_error("owner/model-1"):
        check_hub_access("model", NAME, known=["owner/model-1", "other/thing"])
    with raises_user_error("stabilityai/stable-diffusion-3.5-medium"):
        find_adapter("stabilityai/stable-diffusion-3.5-mediun")
    with raises_user_error("Qwen/Qwen3-VL-4B-Instruct"):
        find_family("Qwen/Qwen3-VL-4B-Instuct")


def test_local_cached_and_readable_names_are_accepted(hub, tmp_path, monkeypatch):
    hub.status, hub.code = 404, "EntryNotFound"  # only the file is missing
    check_hub_access("model", NAME)
    check_hub_access("model", NAME)
    assert len(hub.requests) == 1
    hub.code = "RepoNotFound"
    (tmp_path / "hub/models--owner--cached/snapshots/1").mkdir(parents=True)
    (tmp_path / "owner/folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("owner/cached", "owner/folder", "no-name", "a/b/c"):
        check_hub_access("model", name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check_hub_access("model", "owner/other")
    assert len(hub.requests) == 1


LOADERS = {
    "pretrained.model": [find_adapter, find_family, lambda name: download_revision(name, "v2")],
    "model": [
        lambda name: load_tokenizer(name, option="model", tokens=1),
        lambda name: load_image_processor(name, option="model"),
        lambda name: find_file(name, ("a.pt",), option="model", kind="a checkpoint"),
    ],
    "dataset": [
        lambda name: download_dataset(name, ["*"]),
        lambda name: read_hub(name, "train", PromptLayout()),
    ],
    "train.lora_path": [resolve_lora_path],
    "--checkpoint": [locate_weights, lambda name: locate_weights(f"{name}/a.safetensors")],
    "--model": [lambda name: _pipeline_folder(name, "main")],
}


@pytest.mark.parametrize(
    ("option", "load"), [(option, load) for option, loads in LOADERS.items() for load in loads]
)
def test_every_loader_sends_one_request(hub, option, load):
    hub.status, hub.code = 403, "GatedRepo"
    with pytest.raises(UserError, match=DENIED.format(option, 403)):
        load(NAME)
    assert len(hub.requests) == 1


def test_an_error_of_a_library_has_the_same_message(hub):
    """A library reaches the hub when only some files are cached."""
    hub.status, hub.code = 403, "GatedRepo"
    with raises_user_error() as caught:
        check_hub_access("model", NAME)
    wrapped = OSError("You are trying to access a gated repo.")
    wrapped.__context__ = caught.value.__cause__
    assert hub_error_message(wrapped, "model", NAME) == str(caught.value)
    assert hub_error_message(OSError("the disk is full"), "model", NAME) == ""


@pytest.mark.parametrize(
    ("script", "config"),
    [
        ("train", "config/grpo.py:general_ocr_flux_1gpu"),
        ("train_vlm", "config/vlm.py:qwen3_vl_4b_geometry3k"),
    ],
)
def test_a_run_fails_before_torch_is_imported(hub, tmp_path, script, config):
    hub.status, hub.code = 401, "GatedRepo"
    online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    account = {"HF_HOME": str(tmp_path), "HF_TOKEN": ""}
    code, message, imported = run_with_import_times(
        f"scripts/{script}.py", "--config", config, **online, **account
    )
    assert code == 2
    assert message.startswith("error: pretrained.model='")
    assert "401" in message
    assert "hf auth login" in message
    assert "\n" not in message
    assert "torch" not in imported
