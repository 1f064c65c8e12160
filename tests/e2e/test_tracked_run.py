"""One short run that logs to all trackers at once, without a network; each is read back."""

import json
import re

import numpy as np
import pytest
import tracked
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
        "custom_rewards": "{'light+': 'light:score'}",
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


def read_back(name: str, folder) -> tracked.Tracked:
    run = folder / "logs/run"
    if name == "mlflow":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
            return tracked.mlflow(f"file://{folder}/mlruns", "flow_grpo")
    places = {"trackio": folder / "trackio", "tensorboard": run / "flow_grpo"}
    return getattr(tracked, name)(places.get(name, run))


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "swanlab", "trackio", "mlflow"])
def test_a_tracker_has_every_number_and_picture(run, name):
    folder, train, _ = run
    found = read_back(name, folder)
    for record in train.metrics():
        step = record.pop("step")
        for metric, value in record.items():
            if name == "mlflow":
                head, *rest = metric.split("/", 1)
                metric = "/".join([head, *(part.replace("/", ".") for part in rest)])
                metric = metric.replace("+", "_")
            if value is not None:
                assert found.scalars[metric][step] == pytest.approx(value, rel=1e-6), metric

    logged = pictures_by_file(folder / "logs/run/samples")
    assert {(kind, step) for kind, step in logged} == {("eval", 0), ("eval", 2), ("train", 2)}
    for (kind, step), samples in logged.items():
        seen = found.pictures[f"samples/{kind}"].get(step) or [
            found.pictures[f"samples/{kind}/{place:02d}"][step][0] for place in range(len(samples))
        ]
        assert len(seen) == len(samples) == 4
        for (picture, caption), (image, row) in zip(seen, samples, strict=True):
            assert_shows(picture, image)
            scores, _, prompt = caption.partition(" | ")
            assert prompt == EXPECTED[PROMPTS.index(row["prompt"])]
            told = {n: float(v) for n, v in (score.split(" ") for score in scores.split(", "))}
            assert told == pytest.approx({name: row[name] for name in told}, rel=0.06, abs=0.006)
            advantage = ["advantage"] if kind == "train" else []
            assert [*told] == ["jpeg_compressibility", "light+", "avg", *advantage]


def test_tensorboard_shows_prompts_as_text(run):
    texts = tracked.tensorboard_texts(run[0] / "logs/run/flow_grpo")
    assert {name for name, _ in texts} == {"samples/eval", "samples/train"}
    html = markdown_to_safe_html(texts["samples/eval", 0])
    assert "&lt;script&gt;alert" in html
    assert "![x](http://192.0.2.1/x.png)" in html
    assert "<script" not in html
    assert "<img" not in html


def pictures_by_file(samples) -> dict:
    """(kind, step): pictures and what samples.jsonl says of them."""
    found = {}
    for folder in samples.iterdir():
        kind, epoch = folder.name.split("-")
        rows = [json.loads(line) for line in (folder / "samples.jsonl").open()]
        found[kind, 2 * int(epoch)] = [(Image.open(folder / row["file"]), row) for row in rows]
    return found


def assert_shows(picture: Image.Image, image: Image.Image) -> None:
    """As it is, or larger with a frame of text, where the tracker has no captions."""
    if picture.size != image.size:
        zoom = 192 // image.width
        image = image.resize((192, zoom * image.height), Image.Resampling.NEAREST)
        top = 28  # of two lines of text
        picture = picture.crop((0, top, image.width, top + image.height))
    np.testing.assert_array_equal(np.asarray(picture), np.asarray(image))


def test_the_console_has_a_line_per_epoch_with_every_reward(run):
    _, train, done = run
    first, second = train.metrics()
    lines = [line for line in done.stdout.splitlines() if line.startswith("epoch ")]
    names = ["jpeg_compressibility", "light+", "avg"]
    for line, record, shown in [
        (lines[0], first, [f"eval/{n}" for n in names]),
        (lines[1], second, [*(f"reward/{n}" for n in names), *(f"eval/{n}" for n in names)]),
    ]:
        told = dict(re.findall(r"  ((?:reward|eval)/\S+) (\S+)", line))
        assert [*told] == shown
        values = {name: float(value) for name, value in told.items()}
        assert values == pytest.approx({name: record[name] for name in shown}, rel=1e-2)
    assert len(lines) == 2
    assert re.search(r"  [\d.]+ s \(.*sample \d+%.*\)$", lines[1])
