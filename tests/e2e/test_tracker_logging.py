"""A short run logs to all trackers offline, and the logs of each are read back."""

import json
import re

import numpy as np
import pytest
import tracker_logs
from PIL import Image
from runner import Runner
from tensorboard.plugin_util import markdown_to_safe_html

SCRIPT = '<script>alert("1")</script><img src=x onerror=alert(2)> ![x](http://192.0.2.1/x.png)'
PROMPTS = [f"{SCRIPT} | 'quoted' `code`", "😀 ünï 日本\n  two lines", "long " * 400, "plain"]
EXPECTED = [" ".join(prompt.split()) for prompt in PROMPTS]
ALL = "wandb, tensorboard,swanlab,trackio,mlflow"


@pytest.fixture(scope="module")
def run(tmp_path_factory, short_runs):
    folder = tmp_path_factory.mktemp("tracked")
    prompts = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(prompts)
    fields = {
        **short_runs,
        "dataset": folder,
        "eval_freq": 1,
        "log_with": ALL,
        "log_images": 4,
        "reward_fn": "{'light+': 1.0, 'jpeg_compressibility': 0.5}",
        "custom_rewards": "{'light+': 'brightness_reward:score'}",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("SWANLAB_MODE", "offline")
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patch.setenv("MLFLOW_TRACKING_URI", f"file://{folder}/mlruns")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        train = Runner(folder / "logs", **fields)
        done = train()
        assert done.returncode == 0, done.stderr
    return folder, train, done


def read_back(name: str, folder) -> tracker_logs.TrackerLog:
    run = folder / "logs/run"
    if name == "mlflow":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
            return tracker_logs.mlflow(f"file://{folder}/mlruns", "flow_grpo")
    folders = {"trackio": folder / "trackio", "tensorboard": run / "flow_grpo"}
    return getattr(tracker_logs, name)(folders.get(name, run))


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "swanlab", "trackio", "mlflow"])
def test_a_tracker_has_every_metric_and_image(run, name):
    folder, train, _ = run
    log = read_back(name, folder)
    for record in train.metrics():
        step = record.pop("step")
        for metric, value in record.items():
            if name == "mlflow":
                head, *rest = metric.split("/", 1)
                metric = "/".join([head, *(part.replace("/", ".") for part in rest)])
                metric = metric.replace("+", "_")
            if value is not None:
                assert log.scalars[metric][step] == pytest.approx(value, rel=1e-6), metric

    logged = images_by_step(folder / "logs/run/samples")
    assert {(kind, step) for kind, step in logged} == {("eval", 0), ("eval", 2), ("train", 2)}
    for (kind, step), samples in logged.items():
        seen = log.images[f"samples/{kind}"].get(step) or [
            log.images[f"samples/{kind}/{index:02d}"][step][0] for index in range(len(samples))
        ]
        assert len(seen) == len(samples) == 4
        for (logged_image, caption), (image, row) in zip(seen, samples, strict=True):
            assert_same_image(logged_image, image)
            scores, _, prompt = caption.partition(" | ")
            assert prompt == EXPECTED[PROMPTS.index(row["prompt"])]
            values = {n: float(v) for n, v in (score.split(" ") for score in scores.split(", "))}
            assert values == pytest.approx(
                {name: row[name] for name in values}, rel=0.06, abs=0.006
            )
            advantage = ["advantage"] if kind == "train" else []
            assert [*values] == ["jpeg_compressibility", "light+", "avg", *advantage]


def test_tensorboard_shows_prompts_as_text(run):
    texts = tracker_logs.tensorboard_texts(run[0] / "logs/run/flow_grpo")
    assert {name for name, _ in texts} == {"samples/eval", "samples/train"}
    html = markdown_to_safe_html(texts["samples/eval", 0])
    assert "&lt;script&gt;alert" in html
    assert "![x](http://192.0.2.1/x.png)" in html
    assert "<script" not in html
    assert "<img" not in html


def images_by_step(samples) -> dict:
    """Return images and their rows of samples.jsonl by (kind, step)."""
    images = {}
    for folder in samples.iterdir():
        kind, epoch = folder.name.split("-")
        rows = [json.loads(line) for line in (folder / "samples.jsonl").open()]
        images[kind, 2 * int(epoch)] = [(Image.open(folder / row["file"]), row) for row in rows]
    return images


def assert_same_image(logged: Image.Image, image: Image.Image) -> None:
    """Compare a logged image, which has a text margin if the tracker supports no captions."""
    if logged.size != image.size:
        zoom = 192 // image.width
        image = image.resize((192, zoom * image.height), Image.Resampling.NEAREST)
        top = 28  # height of two lines of text
        logged = logged.crop((0, top, image.width, top + image.height))
    np.testing.assert_array_equal(np.asarray(logged), np.asarray(image))


def test_the_console_has_a_line_per_epoch_with_every_reward(run):
    _, train, done = run
    first, second = train.metrics()
    lines = [line for line in done.stdout.splitlines() if line.startswith("epoch ")]
    names = ["jpeg_compressibility", "light+", "avg"]
    for line, record, shown in [
        (lines[0], first, [f"eval/{n}" for n in names]),
        (lines[1], second, [*(f"reward/{n}" for n in names), *(f"eval/{n}" for n in names)]),
    ]:
        printed = dict(re.findall(r"  ((?:reward|eval)/\S+) (\S+)", line))
        assert [*printed] == shown
        values = {name: float(value) for name, value in printed.items()}
        assert values == pytest.approx({name: record[name] for name in shown}, rel=1e-2)
    assert len(lines) == 2
    assert re.search(r"  [\d.]+ s \(.*sample \d+%.*\)$", lines[1])
