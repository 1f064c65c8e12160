"""What cannot be had from the hub is told in one line, after one request: it cannot be reached, we
may not read it, or there is none of that name. A server on this machine stands for the hub."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants
from runner import run_light

from flow_grpo import access
from flow_grpo.access import check_access, refusal
from flow_grpo.answer.models import find_family
from flow_grpo.data.hub import download_data, download_revision
from flow_grpo.data.rows import read_hub
from flow_grpo.draw.export import _pipeline_folder
from flow_grpo.draw.models import find_adapter
from flow_grpo.errors import UserError
from flow_grpo.rewards.loading import find_file, load_image_processor, load_tokenizer
from flow_grpo.run.adapters import downloaded

NAME = "owner/model-one"
DENIED = (
    r"^{}='owner/model-one': the hub answers {}, .*; ask for access on .*, then run `hf auth login"
)
ABSENT = r"^{}='owner/model-one' is no folder here, and the hub has no such \w+; "
UNREACHABLE = (
    r"^{}='owner/model-one' is not in the cache, and the hub cannot be reached \(.*: {}\); "
)
HANGS, HANGS_UP = 0, -1  # in place of a status


class Hub(ThreadingHTTPServer):
    """Answers every request with a status, and perhaps a code."""

    daemon_threads = True

    def __init__(self) -> None:
        self.status, self.code, self.asked = 200, "", []
        self.ended = threading.Event()
        super().__init__(("127.0.0.1", 0), Answer)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        if self.server.status in (HANGS, HANGS_UP):
            self.server.ended.wait(0 if self.server.status == HANGS_UP else None)
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
    monkeypatch.setattr(access, "SECONDS", 0.5)
    access._ask.cache_clear()
    yield server
    server.ended.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (401, "GatedRepo", DENIED.format("model", 401)),
        (403, "GatedRepo", DENIED.format("model", 403)),
        (401, "", DENIED.format("model", 401)),
        (403, "", DENIED.format("model", 403)),
        (404, "RepoNotFound", ABSENT.format("model")),
        (401, "RepoNotFound", ABSENT.format("model")),  # so without a login
        (404, "", ABSENT.format("model")),
        (404, "RevisionNotFound", "^model='owner/model-one' is on the hub without that revision"),
        (503, "", UNREACHABLE.format("model", "it answers 503")),
        (HANGS, "", UNREACHABLE.format("model", ".*timed out")),
        (HANGS_UP, "", UNREACHABLE.format("model", ".*disconnected.*")),
    ],
)
def test_each_failure_is_told_by_itself_after_one_request(hub, status, code, told):
    hub.status, hub.code = status, code
    with pytest.raises(UserError, match=told) as error:
        check_access("model", NAME)
    assert "\n" not in str(error.value)
    assert hub.asked == ["HEAD /owner/model-one/resolve/main/config.json"]


def test_a_port_where_nobody_listens(hub, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/{{repo_id}}/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
        with pytest.raises(UserError, match=UNREACHABLE.format("model", ".*refused")):
            check_access("model", NAME)


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one(hub):
    hub.status, hub.code = 404, "RepoNotFound"
    with pytest.raises(UserError, match=r"did you mean owner/model-1\? A private one needs"):
        check_access("model", NAME, known=["owner/model-1", "other/thing"])
    with pytest.raises(UserError, match=r"did you mean stabilityai/stable-diffusion-3\.5-medium\?"):
        find_adapter("stabilityai/stable-diffusion-3.5-mediun")
    with pytest.raises(UserError, match=r"did you mean Qwen/Qwen3-VL-4B-Instruct\?"):
        find_family("Qwen/Qwen3-VL-4B-Instuct")


def test_what_is_here_or_can_be_had_is_not_refused(hub, tmp_path, monkeypatch):
    hub.status, hub.code = 404, "EntryNotFound"  # of the file alone
    check_access("model", NAME)
    check_access("model", NAME)
    assert len(hub.asked) == 1
    hub.code = "RepoNotFound"
    (tmp_path / "hub/models--owner--cached/snapshots/1").mkdir(parents=True)
    (tmp_path / "owner/folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("owner/cached", "owner/folder", "no-name", "a/b/c"):
        check_access("model", name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    check_access("model", "owner/other")
    assert len(hub.asked) == 1


LOADERS = {
    "pretrained.model": [find_adapter, find_family, lambda name: download_revision(name, "v2")],
    "model": [
        lambda name: load_tokenizer(name, option="model", tokens=1),
        lambda name: load_image_processor(name, option="model"),
        lambda name: find_file(name, ("a.pt",), option="model", kind="a checkpoint"),
    ],
    "dataset": [lambda name: download_data(name, ["*"]), lambda n: read_hub(n, "train", "prompt")],
    "train.lora_path": [downloaded],
    "--model": [lambda name: _pipeline_folder(name, "main")],
}


@pytest.mark.parametrize(
    ("option", "load"), [(option, load) for option, loads in LOADERS.items() for load in loads]
)
def test_whatever_is_loaded_is_asked_for_once(hub, option, load):
    hub.status, hub.code = 403, "GatedRepo"
    with pytest.raises(UserError, match=DENIED.format(option, 403)):
        load(NAME)
    assert len(hub.asked) == 1


def test_a_librarys_own_error_is_told_the_same_way(hub):
    """A file of the cache is there, and the rest is not."""
    hub.status, hub.code = 403, "GatedRepo"
    with pytest.raises(UserError) as told:
        check_access("model", NAME)
    wrapped = OSError("You are trying to access a gated repo.")
    wrapped.__context__ = told.value.__cause__
    assert refusal(wrapped, "model", NAME) == str(told.value)
    assert refusal(OSError("the disk is full"), "model", NAME) == ""


@pytest.mark.parametrize(
    ("script", "config"),
    [
        ("train", "config/grpo.py:general_ocr_flux_1gpu"),
        ("train_vlm", "config/vlm.py:qwen3_vl_4b_geometry3k"),
    ],
)
def test_a_run_tells_it_before_torch_is_imported(hub, tmp_path, script, config):
    hub.status, hub.code = 401, "GatedRepo"
    online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    places = {"HF_HOME": str(tmp_path), "HF_TOKEN": ""}
    code, told, imported = run_light(f"scripts/{script}.py", "--config", config, **online, **places)
    assert code == 2
    assert told.startswith("error: pretrained.model='")
    assert "the hub answers 401, you are not logged in; ask for access on" in told
    assert "\n" not in told
    assert "torch" not in imported
