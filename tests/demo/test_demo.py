"""Parts of the demo: validation, generation, and rewards without a score."""

import io
import json
import os
import re
import socket
import sys
from argparse import Namespace
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import requests
from demo import LOCAL, check_port, show
from demo_run import CUSTOM, HOSTILE, REWARDS, make_trained_run
from families import FAMILIES, PROMPTS, STEPS, run_fields, save_prompts, save_small_pipeline
from ml_collections import ConfigDict
from PIL import Image
from user_errors import raises_user_error

from flow_grpo.demo.generator import DemoGenerator, find_checkpoints, list_weights
from flow_grpo.demo.limits import (
    MAX_GUIDANCE,
    MAX_PROMPT_LENGTH,
    MAX_STEPS,
    DemoLimits,
    GenerationRequest,
)
from flow_grpo.demo.uploads import MAX_FILE_BYTES, MAX_FOLDERS, UploadStore
from flow_grpo.diffusion.checkpoint_evaluation import evaluate_checkpoints
from flow_grpo.diffusion.config_checks import check_config
from flow_grpo.diffusion.config_loading import load_config_file, load_run_config
from flow_grpo.diffusion.fields import get_config
from flow_grpo.host_header import is_allowed_host
from flow_grpo.report.grid import save_sample_files

GOOD = {"prompt": "a sign", "weights": None, "steps": 2, "guidance": 1.0, "seed": 7}


@pytest.fixture(scope="module")
def run(tiny_sd3, tmp_path_factory) -> Path:
    return make_trained_run(tiny_sd3, tmp_path_factory.mktemp("logs") / "mine", steps=(8, 16))


@pytest.fixture(scope="module")
def generator(run):
    config = load_run_config(run, [])
    config.reward_fn, config.custom_rewards = ConfigDict(REWARDS), ConfigDict(CUSTOM)
    generator = DemoGenerator(config, run)
    yield generator
    generator.close()


def request(*images: bytes | None, takes: range = range(1), **values) -> GenerationRequest:
    return DemoLimits(2, 50, 20.0, takes).parse_request(*{**GOOD, **values}.values(), *images)


def png(width: int, height: int, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"prompt": "  "}, "empty"),
        ({"prompt": 3}, "3"),
        ({"prompt": None}, "None"),
        ({"prompt": "x" * 2001}, "2001 characters"),
        ({"prompt": "a \ud800"}, "surrogate"),
        ({"steps": 51}, "51"),
        ({"steps": 1e9}, "1000000000.0"),
        ({"steps": 1}, "1"),
        ({"steps": 2.5}, "2.5"),
        ({"steps": "4"}, "'4'"),
        ({"steps": True}, "True"),
        ({"steps": [4] * 99}, "[4, 4, 4, 4, 4, 4, ...]"),
        ({"guidance": 20.5}, "20.5"),
        ({"guidance": -1}, "-1"),
        ({"guidance": float("nan")}, "nan"),
        ({"guidance": 10**400}, "1000"),
        ({"guidance": None}, "None"),
        ({"seed": -1}, "-1"),
        ({"seed": float("inf")}, "inf"),
        ({"seed": {"a": 1}}, "{'a': 1}"),
    ],
)
def test_an_invalid_value_is_rejected_in_one_line(values, shown):
    [name] = values
    limits = {"steps": "from 2 to 50", "guidance": "from 0 to 20", "seed": "from 0 to 4294967295"}
    with raises_user_error(shown, limits.get(name, ""), field=name):
        request(**values)


PNG = png(48, 32)


@pytest.mark.parametrize(
    ("takes", "images", "shown"),
    [
        (range(1), [PNG], ["takes no ", "1 were given"]),
        (range(2), [PNG, PNG], ["at most 1 ", "2 were given"]),
        (range(1, 2), [None], ["needs a source image"]),
        (range(1, 2), [PNG[:60]], ["decoded"]),
        (range(1, 2), [b"a text"], ["decoded"]),
        (range(5), [PNG, png(10_000, 10_000, "1")], ["10000 x 10000 pixels"]),
    ],
)
def test_unsupported_source_images_are_rejected(takes, images, shown):
    with raises_user_error(*shown):
        request(*images, takes=takes)


def test_the_newest_uploads_are_kept_and_no_other_file_is_read(tmp_path):
    folder, secret = tmp_path / "files", tmp_path / "secret.png"
    (folder / "example").mkdir(parents=True)
    secret.write_bytes(PNG)
    store = UploadStore(folder)
    for number in range(MAX_FOLDERS + 3):
        (folder / str(number)).mkdir()
        os.utime(folder / str(number), (number, number))
    (folder / "9/a.png").write_bytes(PNG)
    store.remove_old_folders()
    names = {"example", *map(str, range(3, MAX_FOLDERS + 3))}
    assert {path.name for path in folder.iterdir()} == names
    assert store.read({"path": str(folder / "9/a.png")}) == PNG
    assert store.read(None) is None
    (folder / "9/link.png").symlink_to(secret)
    paths = [secret, folder / "../secret.png", folder / "9/link.png", folder / "9", "a\0", 3]
    for given in (*({"path": p if p == 3 else str(p)} for p in paths), {}, str(secret)):
        with raises_user_error("no longer exists"):
            store.read(given)


def test_valid_values_are_accepted():
    assert request(PNG, None, takes=range(3)).images == (PNG,)
    assert request(steps=50.0, seed=0, guidance=20) == GenerationRequest(
        "a sign", None, 50, 20.0, 0
    )
    long = "😀" * MAX_PROMPT_LENGTH
    assert request(prompt=f" {long}\n").prompt == long


def test_values_of_the_config_are_within_the_limits():
    config = get_config()
    assert DemoLimits.of(config.sample) == DemoLimits(2, MAX_STEPS, MAX_GUIDANCE)
    config.sample.eval_num_steps, config.sample.guidance_scale = 80, 25.0
    assert DemoLimits.of(config.sample) == DemoLimits(2, 80, 25.0)
    config.sample.eval_num_steps = 1
    assert DemoLimits.of(config.sample).min_steps == 1


def test_all_weights_of_a_run_are_listed(run):
    root = run / "checkpoints"
    assert list_weights(run) == {
        "step 16, EMA": root / "checkpoint-16/ema_lora",
        "step 16, LoRA": root / "checkpoint-16/lora",
        "step 8, EMA (best)": root / "checkpoint-8/ema_lora",
        "step 8, LoRA (best)": root / "checkpoint-8/lora",
    }


def test_checkpoints_are_found_by_name_step_or_path(run):
    root = run / "checkpoints"
    newest, best = (str(root / f"checkpoint-{step}/ema_lora") for step in (16, 8))
    assert find_checkpoints(run, ["latest", "8", "best", "16"]) == [newest, best]
    raw = str(root / "checkpoint-8/lora")
    assert find_checkpoints(run, [raw]) == find_checkpoints(None, [raw]) == [raw]
    with raises_user_error("'9'", "latest, best, 8, 16", field=str(run)):
        find_checkpoints(run, ["9"])


def test_a_run_is_loaded_with_its_training_config(run, tmp_path, monkeypatch, caplog):
    config = load_run_config(run, [])
    check_config(config)
    assert json.loads(config.to_json_best_effort()) == json.loads((run / "config.json").read_text())
    options = ["--config.seed=3", "--config.sample.eval_num_steps=5"]
    monkeypatch.setattr(sys, "argv", ["demo.py", "--config", "config/grpo.py:tiny_ocr", *options])
    changed = load_run_config(run, options)
    assert (changed.seed, changed.sample.eval_num_steps) == (3, 5)
    assert load_config_file("config/grpo.py:tiny_ocr", options[:1]).seed == 3
    # a config of another version: one field has been removed since, one added
    saved = json.loads((run / "config.json").read_text())
    saved["old_field"] = 1
    del saved["cuda_graphs"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    monkeypatch.setattr("flow_grpo.config.saved_config.log.propagate", True)
    assert load_run_config(tmp_path, []).cuda_graphs is True
    assert "old_field" in caplog.text
    with raises_user_error("sed", "seed"):
        load_run_config(run, ["--config.sed=3"])


def test_base_and_trained_differ_and_generation_is_deterministic(generator, run, tmp_path):
    trained = request(prompt='a "CAT"', weights="step 16, EMA")
    first, second = generator.generate(trained), generator.generate(trained)
    base, ema = (np.asarray(each.sample) for each in first)
    assert base.shape == (32, 32, 3)
    assert np.abs(base.astype(int) - ema).max() > 0
    for one, again in zip(first, second, strict=True):
        assert np.array_equal(np.asarray(one.sample), np.asarray(again.sample))
    others = [
        generator.generate(request(prompt='a "CAT"', weights="step 16, EMA", seed=8))[1],
        generator.generate(request(prompt='a "CAT"', weights="step 8, LoRA (best)"))[1],
    ]
    for other in others:
        assert not np.array_equal(np.asarray(other.sample), ema)
    [alone] = generator.generate(request(prompt='a "CAT"'))
    assert np.array_equal(np.asarray(alone.sample), base)


def test_the_demo_generates_the_same_images_as_an_evaluation(generator, run, tmp_path):
    """They agree for the first test prompt with the run's seed."""
    config = load_run_config(run, [])
    config.eval_prompts = 1
    trained = list_weights(run)["step 16, EMA"]
    found = evaluate_checkpoints(config, ["base", str(trained)], tmp_path / "out")
    first = generator.prompts[0].prompt
    drawn = generator.generate(
        request(prompt=first, weights="step 16, EMA", seed=config.seed, guidance=2.0)
    )
    for scored, each in zip(found, drawn, strict=True):
        off = np.asarray(scored.result.images[0]).astype(int) - np.asarray(each.sample)
        assert np.abs(off).max() <= 1


def test_the_base_includes_the_lora_of_its_config(generator, run, tmp_path):
    """The LoRA of `train.lora_path` is part of the policy before training."""
    lora = list_weights(run)["step 16, EMA"]
    config = load_run_config(run, [f"--config.train.lora_path={lora}"])
    config.eval_prompts = 1
    with_lora = DemoGenerator(config, None, rewards=False)
    asked = request(prompt=generator.prompts[0].prompt, seed=config.seed, guidance=2.0)
    [drawn] = with_lora.generate(asked)
    plain, trained = generator.generate(replace(asked, weights="step 16, EMA"))
    assert np.array_equal(np.asarray(drawn.sample), np.asarray(trained.sample))
    assert not np.array_equal(np.asarray(drawn.sample), np.asarray(plain.sample))
    [scored] = evaluate_checkpoints(config, ["base"], tmp_path / "out")
    off = np.asarray(scored.result.images[0]).astype(int) - np.asarray(trained.sample)
    assert np.abs(off).max() <= 1
    with raises_user_error(lora, "base"):
        evaluate_checkpoints(config, [str(lora)], tmp_path / "unused", lora_override=str(lora))
    missing = load_run_config(run, ["--config.train.lora_path=/missing"])
    for use in (
        lambda: DemoGenerator(missing, None, rewards=False),
        lambda: evaluate_checkpoints(missing, ["base"], tmp_path / "none"),
    ):
        with raises_user_error("train.lora_path='/missing'"):
            use()


def test_weights_without_a_run_can_be_chosen(generator, run):
    config, lora = load_run_config(run, []), list_weights(run)["step 16, EMA"]
    [file] = lora.glob("*.safetensors")
    both = DemoGenerator(
        config, None, rewards=False, checkpoints=[f"{file},{run}/checkpoints/best"]
    )
    assert both.weights() == [both.newest, "checkpoint-8"]
    [base, drawn] = both.generate(request(weights=both.newest))
    expected = generator.generate(request(weights="step 16, EMA"))
    for one, other in zip([base, drawn], expected, strict=True):
        assert np.array_equal(np.asarray(one.sample), np.asarray(other.sample))


def test_rewards_without_a_score_show_the_reason(generator):
    for each in generator.generate(request(prompt="no word", weights="step 8, EMA (best)")):
        broken, size, words, total = each.scores
        assert broken.startswith("broken  failed  (ValueError: at all")
        assert re.fullmatch(r"jpeg_compressibility  -[\d.]+", size)
        assert words == "words  -  (it has no word in double quotes)"
        assert total == "avg  failed"
    assert generator.generate(request(prompt='the word "ART"'))[0].scores[2] == "words  0.50"
    for _ in range(3):  # repeated failures stop a training run but not the demo
        assert generator.generate(request(prompt=HOSTILE))[0].scores[0].startswith("broken  failed")


def test_removed_and_unknown_weights_are_rejected(generator, run):
    for name in ("step 9, EMA", "../../etc", 3, {"a": 1}):
        with raises_user_error(repr(name)):
            generator.generate(request(weights=name))


DURATIONS = {"ltx2": 40, "hunyuan_video15": 40, "hunyuan_video15_i2v": 40}  # milliseconds per frame


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_family_generates(family, tmp_path):
    model = save_small_pipeline(family, tmp_path / "model")
    fields = run_fields(family, model, save_prompts(tmp_path / "prompts", family.num_sources))
    config = get_config()
    config.update_from_flattened_dict({**fields, "device": "cpu"})
    generator = DemoGenerator(config, None, rewards=False)
    first = generator.prompts[0]
    images = tuple(path.read_bytes() for path in first.images)
    asked = request(prompt=PROMPTS[0], guidance=family.guidance_scale, steps=STEPS)
    asked = replace(asked, images=images)
    [drawn] = generator.generate(asked)
    frames = drawn.sample if family.frames > 1 else [drawn.sample]
    assert [frame.size for frame in frames] == [(family.wide, 32)] * family.frames
    if family.frames > 1:
        name = save_sample_files(drawn.sample, tmp_path, "0", animated_image=True)["file"]
        assert Image.open(tmp_path / name).info["duration"] == DURATIONS.get(family.name, 60)
    assert drawn.scores == []
    assert generator.newest is None
    assert generator.limits.images == generator.adapter.num_source_images
    # reward metadata of a test prompt applies only together with its own images
    assert generator.find_prompt(asked) is first
    assert generator.find_prompt(replace(asked, images=(PNG,))).images == (PNG,)


def arguments(**values) -> Namespace:
    given = {"run": None, "config": None, "checkpoint": [], "host": LOCAL}
    given |= {"port": 0, "rewards": True}
    return Namespace(**{**given, **values})


def test_invalid_arguments_are_rejected_before_anything_loads(run, tmp_path, monkeypatch):
    with raises_user_error(run.with_name("mime"), "did you mean"):
        show(arguments(run=run.with_name("mime")), [])
    with raises_user_error(run.parent):
        show(arguments(run=run.parent), [])
    (tmp_path / "config.json").write_text((run / "config.json").read_text())
    with raises_user_error("checkpoints", field=str(tmp_path)):
        show(arguments(run=tmp_path), [])
    with socket.create_server((LOCAL, 0)) as taken:
        port = taken.getsockname()[1]
        with raises_user_error(port, "Address already in use"):
            show(arguments(run=run, port=port), [])
    for host, port in ((LOCAL, 70000), ("no.such.host.invalid", 0)):
        with raises_user_error(host):
            check_port(host, port)
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr("demo.find_spec", lambda name: None)
    with raises_user_error("pip install -e '.[demo]'"):
        show(arguments(run=run), [])


def test_an_invalid_reward_is_rejected_with_a_hint(run):
    config = load_run_config(run, [])
    config.custom_rewards = ConfigDict({"mine": "no_such_module:score"})
    config.reward_fn = ConfigDict({"mine": 1.0})
    with raises_user_error("no_such_module", "--no-rewards"):
        DemoGenerator(config, run)


def test_foreign_hosts_and_large_uploads_are_rejected(monkeypatch, tmp_path):
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    import gradio

    from flow_grpo.demo.page import serve

    with gradio.Blocks(analytics_enabled=False) as page:
        gradio.Markdown("here")
    try:
        url = urlsplit(serve(page, tmp_path, LOCAL, check_port(LOCAL, 0), uploads=True))
        for host, status in (("localhost", 200), ("evil.example", 403), ("", 403), ("[", 403)):
            connection = HTTPConnection(LOCAL, url.port, timeout=30)
            connection.request("GET", "/config", headers={"Host": host})
            assert connection.getresponse().status == status, host
        for size, status in ((100, 200), (MAX_FILE_BYTES + 1, 413), (MAX_FILE_BYTES + 2**20, 413)):
            file = {"files": ("a.png", b"x" * size)}
            address = f"{url.geturl()}gradio_api/upload"
            assert requests.post(address, files=file, timeout=60).status_code == status
        parts = iter([b"x"])  # chunked: no content length
        assert requests.post(address, data=parts, timeout=60).status_code == 413
    finally:
        page.close()


def test_an_uploaded_image_is_used_as_source(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "files"))
    from gradio_client import Client, handle_file
    from gradio_client.exceptions import AppError

    from flow_grpo.demo.page import build_page, serve

    family = next(each for each in FAMILIES if each.name == "flux_kontext")
    config, folder = get_config(), tmp_path / "files"
    dataset = save_prompts(tmp_path / "prompts", 1)
    fields = run_fields(family, save_small_pipeline(family, tmp_path / "model"), dataset)
    config.update_from_flattened_dict({**fields, "device": "cpu"})
    generator = DemoGenerator(config, None, rewards=False)
    for name, data in (("good", PNG), ("cut off", PNG[:60])):
        (tmp_path / f"{name}.png").write_bytes(data)
    folder.mkdir()
    page = build_page(generator, folder)
    try:
        url = serve(page, folder, LOCAL, check_port(LOCAL, 0), uploads=True)
        client = Client(url, verbose=False, analytics_enabled=False, download_files=tmp_path)

        def draw(image) -> bytes:
            values = ("a", None, STEPS, 1.0, 5, image)
            return Path(client.predict(*values, api_name="/draw")[0]).read_bytes()

        drawn = draw(handle_file(tmp_path / "good.png"))
        assert drawn != draw(None)
        with pytest.raises(AppError, match="decoded"):
            draw(handle_file(tmp_path / "cut off.png"))
    finally:
        page.close()


def test_a_server_for_other_machines_accepts_any_host_name():
    assert is_allowed_host("0.0.0.0", "my-machine.example:7860")
    assert is_allowed_host("127.0.0.2", "127.0.0.1:7860")
    assert is_allowed_host("::1", "[::1]:7860")
    assert not is_allowed_host("::1", "evil.example")
    assert not is_allowed_host("localhost", "localhost.evil.example:7860")
