"""What is published contains no paths, names, addresses or secrets of this machine."""

import getpass
import socket

import pytest

from flow_grpo.config.paths import ROOT
from flow_grpo.report.redaction import redact, redact_text

TOKEN = "hf_" + "aB3" * 10
PRIVATE = [
    (f"--token {TOKEN} --x=1", "--token <secret> --x=1"),
    ("WANDB_API_KEY=0123456789abcdef python a.py", "WANDB_API_KEY=<secret> python a.py"),
    ("--config.dataset=/data/private/set", "--config.dataset=.../set"),
    ("'/data/private/set'", "'.../set'"),
    ("see /data/private/set.", "see .../set."),
    (r"C:\Users\me\set", ".../set"),
    ("~/secret/model", ".../model"),
    ("http://10.0.0.7:18085/score", "<url>"),
    ("s3://bucket/key", "<url>"),
    ("https://me:pass@huggingface.co/a", "<url>"),
    ("host: gpu7.lab.example:29500", "host: <address>"),
    ("10.1.2.3", "<address>"),
    ("mail jo.doe@lab.example now", "mail <email> now"),
]
PUBLIC = [
    "https://huggingface.co/owner/name",
    "dataset/ocr:0.5,dataset/scenes:0.5",
    "stabilityai/stable-diffusion-3.5-medium",
    "config/grpo.py:tiny_awm",
    "<think>1/2 and/or \\frac{1}{2}\\pi</think> in \\boxed{3/4}",
    "arXiv 2509.25050, torch 2.11.0+cpu at 12:30",
    'a sign that says "A/B"',
    "--config.sample.max_new_tokens=1024",
]


@pytest.mark.parametrize(("text", "shown"), PRIVATE)
def test_private_parts_are_removed(text, shown):
    assert redact_text(text) == shown


@pytest.mark.parametrize("text", PUBLIC)
def test_other_text_is_unchanged(text):
    assert redact_text(text) == text


def test_paths_in_the_library_and_in_working_directories_become_relative(tmp_path):
    assert redact_text(f"--config {ROOT}/config/grpo.py") == "--config config/grpo.py"
    assert redact_text(f"{tmp_path}/data/words", [tmp_path]) == "data/words"
    assert redact_text(str(tmp_path), [tmp_path]) == f".../{tmp_path.name}"


def test_user_and_host_names_are_removed(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "jdoe")
    monkeypatch.setattr(socket, "gethostname", lambda: "gpubox.lab")
    assert redact_text("run jdoe-1 on gpubox, not jdoes") == "run <user>-1 on <host>, not jdoes"


def test_configs_are_redacted_at_any_depth():
    config = {
        "reward_servers": {"ocr": "http://host:18085", "clip": ""},
        "custom_rewards": {"mine": "/home/jo/my code/rewards.py:score"},
        "options": [{"api_key": "abc", "path": "/a/b/c"}, 3, None, True],
        "sample": {"max_new_tokens": 16},
    }
    assert redact(config) == {
        "reward_servers": {"ocr": "<url>", "clip": ""},
        "custom_rewards": {"mine": ".../rewards.py:score"},
        "options": [{"api_key": "<secret>", "path": ".../c"}, 3, None, True],
        "sample": {"max_new_tokens": 16},
    }
