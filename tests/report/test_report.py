"""The report of a run: its data, its images and its server."""

import base64
import hashlib
import http.client
import io
import json
import logging
import re
import socket
import sys
import threading
from contextlib import contextmanager
from dataclasses import asdict

import numpy as np
import pytest
import report
from PIL import Image
from report_runs import make_run, noise_images

from flow_grpo.errors import UserError
from flow_grpo.report import page
from flow_grpo.report import server as report_server
from flow_grpo.report.grid import format_score
from flow_grpo.report.health import CHECKS, run_checks
from flow_grpo.report.run_reader import read_sample_records
from flow_grpo.report.server import build_server
from flow_grpo.report.thumbnails import encode_thumbnails, thin_epochs
from flow_grpo.rewards.failure import NotApplicable
from flow_grpo.training.trackers import save_samples

HOSTILE = "</script><script>window.hacked=1</script><!-- \" ' & 🦊 \u2028 @@DATA@@"


def call(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, arguments)])
    report.main()


def data_of(text: str) -> dict:
    """Return the data embedded in a page."""
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])


def test_500_epochs_of_16_prompts_stay_under_15_mb(tmp_path):
    """With images of noise, which cannot be compressed."""
    run = make_run(tmp_path / "run", epochs=500, prompts=16, edge=100, metrics=50, grain=60)
    page.write_report([run], run / "report.html")
    assert 3e6 < (run / "report.html").stat().st_size < 15e6
    data = data_of((run / "report.html").read_text("utf-8"))["runs"][0]
    assert len(data["epochs"]) == len(data["metrics"]["eval/m49"]) == 501
    for kind, of in (("eval", 501), ("train", 500)):
        assert data[kind]["of"] == of
        assert 5 <= len(data[kind]["epochs"]) <= 42
        assert data[kind]["epochs"][-1] == 500
        assert all(len(own) == 16 for own in data[kind]["samples"])
        assert all(
            s["image"].startswith("data:image/webp;base64,") for s in data[kind]["samples"][0]
        )
    assert data["eval"]["epochs"][0] == 0


def test_epochs_are_thinned_evenly_and_stably():
    assert thin_epochs([0, 1, 2], 3) == [0, 1, 2]
    assert thin_epochs([*range(0, 100, 5)], 6) == [0, 20, 40, 60, 80, 95]
    assert thin_epochs([*range(0, 100, 5)], 6, keep=[35]) == [0, 20, 35, 40, 60, 80, 95]
    before, after = thin_epochs([*range(30)], 8), thin_epochs([*range(31)], 8)
    assert before[:-1] == after[:-1]


def test_for_a_small_budget_images_become_smaller_then_fewer(tmp_path):
    files = {}
    for epoch in range(6):
        save_samples(tmp_path / str(epoch), noise_images(2, 300, epoch), prompt=["a", "b"])
        files[epoch] = sorted((tmp_path / str(epoch)).glob("*.png"))
    for budget, edges, epochs in ((1e6, {256}, 6), (60_000, {192, 128, 96}, 6), (10_000, {96}, 2)):
        found = encode_thumbnails(files, budget, 40)
        uris = [uri for own in found.values() for uri in own]
        assert sum(map(len, uris)) <= budget
        sizes = {max(open_uri(uri).size) for uri in uris}
        assert len(sizes) == 1
        assert sizes <= edges
        assert len(found) == epochs
        assert list(found)[-1] == 5


def open_uri(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


def test_small_images_are_not_enlarged_and_videos_are_animated(tmp_path):
    clip = [Image.new("RGB", (64, 48), (20 * i, 0, 0)) for i in range(12)]
    save_samples(tmp_path, [Image.new("RGB", (30, 20)), clip], prompt=["a", "b"])
    [[still, moving]] = encode_thumbnails(
        {0: [s.image for s in read_sample_records(tmp_path, 9)]}, 1e6, 40
    ).values()
    assert open_uri(still).size == (30, 20)
    assert open_uri(moving).size == (64, 48)
    assert open_uri(moving).n_frames == 10


def test_damaged_and_huge_images_are_skipped(tmp_path):
    video = noise_images(4, 16)
    save_samples(tmp_path, [video], prompt=["a"])
    whole = (tmp_path / "0000.gif").read_bytes()
    cut = [tmp_path / f"{size}.gif" for size in range(0, len(whole), len(whole) // 20)]
    for path in cut:
        path.write_bytes(whole[: int(path.stem)])
    giant = tmp_path / "giant.bmp"
    small = io.BytesIO()
    Image.new("RGB", (1, 1)).save(small, "BMP")
    edges = (30_000).to_bytes(4, "little") * 2
    giant.write_bytes(small.getvalue()[:18] + edges + small.getvalue()[26:])
    [found] = encode_thumbnails({0: [*cut, giant, tmp_path / "0000.gif"]}, 1e6, 40).values()
    assert found[0] is found[-2] is None
    assert found[-1] is not None


def test_an_active_run_is_shown_as_far_as_it_is_written(tmp_path):
    run = make_run(tmp_path / "run", epochs=2, prompts=2, last='\n{"epoch": 3, "ev')
    (run / "samples/eval-00001/samples.jsonl").unlink()  # not to change the others, its links
    (run / "samples/eval-00001/samples.jsonl").write_text(
        '{"file": "0000.png", "prompt": "a"}\n{"fi'
    )
    (run / "samples/eval-00002/0001.png").unlink()
    (run / "samples/eval-00002/0001.png").write_bytes(b"\x89PNG\r\n")
    (run / "config.json").unlink()
    data = page.build_report_data([run])["runs"][0]
    assert data["epochs"] == [0, 1, 2]
    assert [len(own) for own in data["eval"]["samples"]] == [2, 1, 2]
    assert ["image" in sample for sample in data["eval"]["samples"][2]] == [True, False]


def test_a_failed_score_differs_from_one_that_was_not_requested(tmp_path):
    scores = {"ocr": [0.5, NotApplicable()], "clip": np.array([np.nan, -np.inf])}
    columns = {"truth": ["7", "8"], **scores, "group": np.array([3, 4])}
    save_samples(tmp_path, noise_images(2, 8), prompt=["a", "b"], **columns)
    first, second = read_sample_records(tmp_path, 9)
    assert (first.scores, first.group) == ({"ocr": 0.5, "clip": None}, 3)
    assert (first.truth, first.answer) == ("7", None)
    assert (second.scores, second.group) == ({}, 4)
    assert [format_score(s) for s in (0.5, None, np.nan, NotApplicable(), -np.inf)] == [
        *("0.50", "failed", "failed", "-", "-")
    ]


def test_source_images_are_embedded_once(tmp_path):
    run = make_run(tmp_path / "run", epochs=1, prompts=1)
    first, second = noise_images(2, 24, seed=5)
    for epoch in (2, 3):
        folder = run / f"samples/eval-{epoch:05d}"
        save_samples(folder, noise_images(3, 24), [[first], [first, second], []], prompt=["a"] * 3)
    assert sorted(path.name for path in folder.glob("source*")) == [
        *("source-0000.png", "source-0001.png")
    ]
    with (folder / "samples.jsonl").open("a") as file:
        for names in (["../../../secret.png"], "source-0000.png", [None, "no.png"]):
            file.write(json.dumps({"file": "0000.png", "sources": names}) + "\n")
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    data = page.build_report_data([run])["runs"][0]["eval"]
    assert len(data["sources"]) == 2
    for own in data["samples"][-2:]:
        assert [sample.get("sources") for sample in own[:3]] == [[0], [0, 1], None]
    assert [sample.get("sources") for sample in own[3:]] == [None] * 3
    assert not [name for sample in own for name in sample["scores"]]


def test_text_of_a_run_stays_text(tmp_path):
    run = make_run(tmp_path / "<b>&run", epochs=1, prompts=1)
    save_samples(
        run / "samples/eval-00001",
        noise_images(1, 8),
        prompt=[HOSTILE],
        answer=[HOSTILE],
        truth=[HOSTILE],
    )
    (run / "config.json").write_text(json.dumps({"seed": float("inf"), "name": HOSTILE}))
    text = page.render_page(page.build_report_data([run]))
    [block] = re.findall(r'id="data">(.*?)</script>', text, re.S)
    assert "<" not in block
    data = json.loads(block, parse_constant=pytest.fail)["runs"][0]
    assert data["eval"]["texts"] == [HOSTILE]
    assert data["eval"]["samples"][1][0]["answer"] == HOSTILE
    assert data["eval"]["samples"][1][0]["truth"] == HOSTILE
    assert len(page.truncate("long " * 9999)) == page.MAX_RESPONSE_LENGTH + 1
    assert data["config"] == {"seed": "Infinity", "name": HOSTILE}
    assert "<title>&lt;b&gt;&amp;run</title>" in text
    assert text.count("<script") == text.count("</script") == 2


def test_only_the_pages_own_script_runs_and_it_makes_no_request(tmp_path):
    run = make_run(tmp_path / "run", epochs=1, prompts=1)
    text = page.render_page(page.build_report_data([run]))
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)[1]
    assert policy.startswith("default-src 'none'; img-src data:; ")
    assert "unsafe" not in policy
    assert "connect-src" not in policy
    for tag in ("style", "script"):
        own = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.S)[1]
        digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"(?:src|href)=\"(?!data:)", text)
    assert "connect-src 'self'" in page.render_page(page.build_report_data([run]), version="1")


def test_a_file_name_that_leads_out_of_the_directory_is_not_shown(tmp_path):
    run = make_run(tmp_path / "run", epochs=1, prompts=1)
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    rows = [{"file": str(tmp_path / "secret.png"), "prompt": "a"}]
    (run / "samples/eval-00001/samples.jsonl").unlink()
    (run / "samples/eval-00001/samples.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert "image" not in page.build_report_data([run])["runs"][0]["eval"]["samples"][1][0]


def test_a_link_out_of_the_run_directory_is_not_read(tmp_path, caplog):
    run = make_run(tmp_path / "run", epochs=3, prompts=1)
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    (tmp_path / "secret.json").write_text('{"token": "secret"}')
    (run / "config.json").unlink()
    (run / "config.json").symlink_to("../secret.json")
    sample_path = "samples/eval-{:05d}/0000.png".format
    for epoch, target in ((1, tmp_path / "secret.png"), (2, run / sample_path(0))):
        (run / sample_path(epoch)).unlink()
        (run / sample_path(epoch)).symlink_to(target)
    (run / "samples/train-00003").rename(tmp_path / "elsewhere")
    (run / "samples/train-00003").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(run)
    with caplog.at_level(logging.WARNING):
        data = page.build_report_data([tmp_path / "link"])["runs"][0]
    assert ["image" in own[0] for own in data["eval"]["samples"]] == [True, False, True, True]
    assert data["train"]["epochs"] == [1, 2]
    assert data["config"] == {}
    assert "eval-00001/0000.png is not shown" in caplog.text
    assert "samples/train-00003 is not shown" in caplog.text


def test_the_page_has_the_health_of_a_run(tmp_path):
    run = make_run(tmp_path / "run", epochs=1, prompts=1)
    health = page.build_report_data([run])["runs"][0]["health"]
    assert health["findings"] == []
    assert {*health["passed"], *health["not_applicable"]} == {*CHECKS}
    rows = [{"epoch": 1, "step": 1, "train/ratio_mean": 2.0, "train/clip_range": 0.1}]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    findings = page.build_report_data([run])["runs"][0]["health"]["findings"]
    assert findings == [asdict(finding) for finding in run_checks(rows)]
    assert findings[0]["epoch"] == 1


def test_a_report_is_written_to_the_first_run_or_to_out(tmp_path, monkeypatch, capsys):
    runs = [make_run(tmp_path / name, epochs=1, prompts=1) for name in ("one", "two")]
    call(monkeypatch, *runs)
    assert capsys.readouterr().out == f"wrote {runs[0] / 'report.html'}\n"
    assert [run["name"] for run in data_of((runs[0] / "report.html").read_text())["runs"]] == [
        "one",
        "two",
    ]
    call(monkeypatch, runs[1], "--out", tmp_path / "new/a.html")
    assert (tmp_path / "new/a.html").is_file()
    assert not [*tmp_path.rglob(".*")]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["no/run"], "no/run "),
        (["EMPTY"], "EMPTY/metrics.jsonl "),
        (["STARTED"], "STARTED has no metrics"),
        (["RUN", "RUN"], "twice"),
        (["RUN", "--out", "RUN/metrics.jsonl/a.html"], "RUN/metrics.jsonl/a.html"),
        (["RUN", "--out", "."], ". is a directory"),
        (["ODD"], "ODD/metrics.jsonl:1 "),
        (["DEEP"], "DEEP/metrics.jsonl:1 "),
        (["TEXT"], "TEXT/metrics.jsonl:1 has eval/avg='high'"),
        (["HUGE"], "HUGE/metrics.jsonl:1 has eval/avg=1000"),
        (["x" * 5000], "too long"),
        (["RUN", "--out", "RUN/" + "x" * 5000], "too long"),
        (["RUN\udcff"], r"\udcff"),
        (["RUN", "--watch", "--out", "a.html"], "--out"),
        (["RUN", "--watch", "--port", "99999"], "--port"),
        (["RUN", "--watch", "--host", "192.0.2.1"], "192.0.2.1:8700"),
    ],
)
def test_invalid_arguments_are_reported_in_one_line(
    tmp_path, monkeypatch, capsys, arguments, shown
):
    make_run(tmp_path / "RUN", epochs=1, prompts=1)
    lines = {"DEEP": "[" * 100_000, "TEXT": '{"epoch": 1, "eval/avg": "high"}'}
    lines |= {"HUGE": f'{{"epoch": 1, "eval/avg": 1{"0" * 400}}}'}
    for name in ("EMPTY", "STARTED", "ODD", *lines):
        (tmp_path / name).mkdir()
    for name, line in lines.items():
        (tmp_path / name / "metrics.jsonl").write_text(f'{line}\n{{"epoch": 2}}\n')
    (tmp_path / "STARTED/metrics.jsonl").write_text("")
    (tmp_path / "ODD/metrics.jsonl").write_text('["eval/avg"]\n{"epoch": 1}\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, *arguments)
    assert end.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert shown in line
    assert not [*tmp_path.rglob("*.html")]


def test_a_failing_report_does_not_change_how_a_run_ends(tmp_path, caplog):
    def taken_over() -> None:
        raise UserError("it was taken over")

    run = make_run(tmp_path / "run", epochs=1, prompts=1)
    (tmp_path / "new").mkdir()
    with caplog.at_level(logging.INFO):
        page.write_final_report(tmp_path / "new", lambda: None)
        assert not caplog.messages
        page.write_final_report(run, taken_over)
        [message] = caplog.messages
        assert "it was taken over" in message
    assert not [*tmp_path.rglob("*.html")]
    page.write_final_report(run, lambda: None)
    assert (run / "report.html").is_file()


@pytest.fixture
def served(tmp_path):
    with serving_run(tmp_path) as found:
        yield found


@contextmanager
def serving_run(folder):
    run = make_run(folder / "run", epochs=1, prompts=1)
    server = build_server([run], "127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield run, server.server_port
    finally:
        server.shutdown()
        server.server_close()


def ask(port: int, path: str, host: str = "localhost", method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, headers={"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_a_live_page_polls_for_new_data(served):
    run, port = served
    status, text = ask(port, "/")
    version = re.search(r'data-version="(\w+)"', text)[1]
    assert status == 200
    assert ask(port, f"/data.json?have={version}") == (204, "")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "step": 2, "eval/avg": 0.5}\n')
    status, text = ask(port, f"/data.json?have={version}")
    assert status == 200
    assert json.loads(text)["runs"][0]["epochs"] == [0, 1, 2]
    (run / "metrics.jsonl").unlink()
    assert ask(port, "/data.json")[0] == 200  # the previous data


def test_the_server_serves_no_file_and_no_other_host(served):
    _, port = served
    for path in (
        "/metrics.jsonl",
        "/config.json",
        "/../config.json",
        "/samples/eval-00000/0000.png",
    ):
        assert ask(port, path)[0] == 404
    for host in ("evil.example", f"evil.example:{port}", ""):
        assert ask(port, "/data.json", host)[0] == 403
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"):
        assert ask(port, "/data.json", host)[0] == 200
    assert ask(port, "/", "[")[0] == 403
    assert ask(port, "http://[")[0] == 400
    assert ask(port, "/", method="POST")[0] == 501


def test_a_silent_client_is_disconnected(tmp_path, monkeypatch):
    monkeypatch.setattr(report_server, "CLIENT_TIMEOUT", 0.05)
    with serving_run(tmp_path) as (_, port), connected(port) as silent:
        assert silent.recv(1) == b""  # after 30 seconds it would be an error


def test_clients_above_the_limit_are_disconnected(tmp_path, monkeypatch):
    monkeypatch.setattr(report_server, "MAX_CLIENTS", 3)
    with serving_run(tmp_path) as (_, port):
        silent = [connected(port) for _ in range(3)]
        with connected(port) as late:
            assert late.recv(1) == b""
        for each in silent:
            each.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
            with each, each.makefile("rb") as answer:
                assert answer.read().startswith(b"HTTP/1.0 200")


def test_a_client_without_a_thread_takes_no_slot(tmp_path, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(report_server, "MAX_CLIENTS", 1)
    with serving_run(tmp_path) as (_, port):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with connected(port) as unlucky:
                assert unlucky.recv(1) == b""
        assert ask(port, "/")[0] == 200


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)
