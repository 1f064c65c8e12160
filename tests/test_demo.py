"""The demo's parts: what it refuses, what it draws, what it says of rewards that have no score."""

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
from demo import LOCAL, find_port, show
from families import FAMILIES, PROMPTS, STEPS, run_fields, save_prompts, save_small
from ml_collections import ConfigDict
from PIL import Image
from shown import CUSTOM, HOSTILE, REWARDS, make_run

from flow_grpo.demo.limits import MOST_GUIDANCE, MOST_STEPS, PROMPT_LENGTH, DemoLimits, Wish
from flow_grpo.demo.painter import Painter, find_checkpoints, list_weights
from flow_grpo.demo.uploads import KEPT, MOST_BYTES, Keeper
from flow_grpo.draw.check import check
from flow_grpo.draw.compare import evaluate_all
from flow_grpo.draw.fields import get_config
from flow_grpo.draw.saved import config_of_file, config_of_run
from flow_grpo.errors import UserError
from flow_grpo.hosts import is_allowed_host

GOOD = {"prompt": "a sign", "weights": None, "steps": 2, "guidance": 1.0, "seed": 7}


@pytest.fixture(scope="module")
def run(tiny_sd3, tmp_path_factory) -> Path:
    return make_run(tiny_sd3, tmp_path_factory.mktemp("logs") / "mine", steps=(8, 16))


@pytest.fixture(scope="module")
def painter(run):
    config = config_of_run(run, [])
    config.reward_fn, config.custom_rewards = ConfigDict(REWARDS), ConfigDict(CUSTOM)
    painter = Painter(config, run)
    yield painter
    painter.close()


def wish(*pictures: bytes | None, takes: range = range(1), **values) -> Wish:
    return DemoLimits(2, 50, 20.0, takes).wish(*{**GOOD, **values}.values(), *pictures)


def png(width: int, height: int, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"prompt": "  "}, "the prompt is empty; write what to draw"),
        ({"prompt": 3}, "the prompt is 3; it must be a text"),
        ({"prompt": None}, "the prompt is None; it must be a text"),
        ({"prompt": "x" * 2001}, "the prompt has 2001 characters; at most 2000 are drawn"),
        ({"prompt": "a \ud800"}, "the prompt has half a character in it; write it whole"),
        ({"steps": 51}, "steps is 51; it must be a whole number from 2 to 50"),
        ({"steps": 1e9}, "steps is 1000000000.0; it must be a whole number from 2 to 50"),
        ({"steps": 1}, "steps is 1; it must be a whole number from 2 to 50"),
        ({"steps": 2.5}, "steps is 2.5; it must be a whole number from 2 to 50"),
        ({"steps": "4"}, "steps is '4'; it must be a whole number from 2 to 50"),
        ({"steps": True}, "steps is True; it must be a whole number from 2 to 50"),
        ({"steps": [4] * 99}, "steps is [4, 4, 4, 4, 4, 4, ...]; it must be a whole number"),
        ({"guidance": 20.5}, "guidance is 20.5; it must be a number from 0 to 20"),
        ({"guidance": -1}, "guidance is -1; it must be a number from 0 to 20"),
        ({"guidance": float("nan")}, "guidance is nan; it must be a number from 0 to 20"),
        ({"guidance": 10**400}, "guidance is 1000"),
        ({"guidance": None}, "guidance is None; it must be a number from 0 to 20"),
        ({"seed": -1}, "seed is -1; it must be a whole number from 0 to 4294967295"),
        ({"seed": float("inf")}, "seed is inf; it must be a whole number from 0 to 4294967295"),
        ({"seed": {"a": 1}}, "seed is {'a': 1}; it must be a whole number from 0 to 4294967295"),
    ],
)
def test_what_is_not_allowed_is_told_in_a_sentence(values, told):
    with pytest.raises(UserError) as error:
        wish(**values)
    assert str(error.value).startswith(told)
    assert "\n" not in str(error.value)


PNG = png(48, 32)


@pytest.mark.parametrize(
    ("takes", "pictures", "told"),
    [
        (range(1), [PNG], "the model takes none, and 1 picture came; leave some out"),
        (range(2), [PNG, PNG], "the model takes 1 at most, and 2 pictures came; leave some out"),
        (range(1, 2), [None], "the model starts from a picture; upload one"),
        (range(1, 2), [PNG[:60]], "the picture cannot be decoded ("),
        (range(1, 2), [b"a text"], "the picture cannot be decoded (it is no whole PNG, JPEG"),
        (range(5), [PNG, png(10_000, 10_000, "1")], "the picture has 10000 x 10000 pixels; at"),
    ],
)
def test_pictures_are_held_to_what_the_model_takes(takes, pictures, told):
    with pytest.raises(UserError) as error:
        wish(*pictures, takes=takes)
    assert str(error.value).startswith(told)
    assert "\n" not in str(error.value)


def test_of_uploads_the_newest_stay_and_no_other_file_is_read(tmp_path):
    folder, secret = tmp_path / "files", tmp_path / "secret.png"
    (folder / "example").mkdir(parents=True)
    secret.write_bytes(PNG)
    keeper = Keeper(folder)
    for number in range(KEPT + 3):
        (folder / str(number)).mkdir()
        os.utime(folder / str(number), (number, number))
    (folder / "9/a.png").write_bytes(PNG)
    keeper.tidy()
    names = {"example", *map(str, range(3, KEPT + 3))}
    assert {path.name for path in folder.iterdir()} == names
    assert keeper.read({"path": str(folder / "9/a.png")}) == PNG
    assert keeper.read(None) is None
    (folder / "9/link.png").symlink_to(secret)
    paths = [secret, folder / "../secret.png", folder / "9/link.png", folder / "9", "a\0", 3]
    for given in (*({"path": p if p == 3 else str(p)} for p in paths), {}, str(secret)):
        with pytest.raises(UserError, match="not here any more; upload it again"):
            keeper.read(given)


def test_what_is_allowed_is_taken_as_it_is():
    assert wish(PNG, None, takes=range(3)).pictures == (PNG,)
    assert wish(steps=50.0, seed=0, guidance=20) == Wish("a sign", None, 50, 20.0, 0)
    long = "😀" * PROMPT_LENGTH
    assert wish(prompt=f" {long}\n").prompt == long


def test_what_the_config_asks_for_is_within_the_limits():
    config = get_config()
    assert DemoLimits.of(config) == DemoLimits(2, MOST_STEPS, MOST_GUIDANCE)
    config.sample.eval_num_steps, config.sample.guidance_scale = 80, 25.0
    assert DemoLimits.of(config) == DemoLimits(2, 80, 25.0)
    config.sample.eval_num_steps = 1
    assert DemoLimits.of(config).fewest_steps == 1


def test_the_picker_has_all_weights_of_the_run(run):
    root = run / "checkpoints"
    assert list_weights(run) == {
        "step 16, EMA": root / "checkpoint-16/ema_lora",
        "step 16, LoRA": root / "checkpoint-16/lora",
        "step 8, EMA (best)": root / "checkpoint-8/ema_lora",
        "step 8, LoRA (best)": root / "checkpoint-8/lora",
    }


def test_checkpoints_are_found_by_name_step_or_path(run):
    newest, best = (run / f"checkpoints/checkpoint-{step}/ema_lora" for step in (16, 8))
    assert find_checkpoints(run, ["latest", "8", "best", "16"]) == [newest, best]
    assert find_checkpoints(run, [str(best.with_name("lora"))]) == [best.with_name("lora")]
    with pytest.raises(UserError, match=r"has no checkpoint '9'; it has latest, best, 8, 16$"):
        find_checkpoints(run, ["9"])


def test_a_runs_config_is_the_one_it_was_trained_with(run, tmp_path, monkeypatch, caplog):
    config = config_of_run(run, [])
    check(config)
    assert json.loads(config.to_json_best_effort()) == json.loads((run / "config.json").read_text())
    options = ["--config.seed=3", "--config.sample.eval_num_steps=5"]
    monkeypatch.setattr(sys, "argv", ["demo.py", "--config", "config/grpo.py:tiny_ocr", *options])
    changed = config_of_run(run, options)
    assert (changed.seed, changed.sample.eval_num_steps) == (3, 5)
    assert config_of_file("config/grpo.py:tiny_ocr", options[:1]).seed == 3
    # of another version: a field that is gone, and one that was not there yet
    saved = json.loads((run / "config.json").read_text())
    saved["old_field"] = 1
    del saved["cuda_graphs"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    monkeypatch.setattr("flow_grpo.config.saved.log.propagate", True)
    assert config_of_run(tmp_path, []).cuda_graphs is True
    assert "old_field" in caplog.text
    with pytest.raises(UserError, match="unknown config key 'sed'; did you mean seed"):
        config_of_run(run, ["--config.sed=3"])


def test_base_and_trained_differ_and_the_same_wish_draws_the_same(painter, run, tmp_path):
    trained = wish(prompt='a "CAT"', weights="step 16, EMA")
    first, second = painter.draw(trained), painter.draw(trained)
    base, ema = (np.asarray(each.sample) for each in first)
    assert base.shape == (32, 32, 3)
    assert np.abs(base.astype(int) - ema).max() > 0
    for one, again in zip(first, second, strict=True):
        assert np.array_equal(np.asarray(one.sample), np.asarray(again.sample))
    others = [
        painter.draw(wish(prompt='a "CAT"', weights="step 16, EMA", seed=8))[1],
        painter.draw(wish(prompt='a "CAT"', weights="step 8, LoRA (best)"))[1],
    ]
    for other in others:
        assert not np.array_equal(np.asarray(other.sample), ema)
    [alone] = painter.draw(wish(prompt='a "CAT"'))
    assert np.array_equal(np.asarray(alone.sample), base)


def test_it_draws_what_an_evaluation_draws(painter, run, tmp_path):
    """The first test prompt, with the run's seed."""
    config = config_of_run(run, [])
    config.eval_prompts = 1
    trained = list_weights(run)["step 16, EMA"]
    found = evaluate_all(config, ["base", str(trained)], tmp_path / "out")
    first = painter.prompts[0].prompt
    drawn = painter.draw(wish(prompt=first, weights="step 16, EMA", seed=config.seed, guidance=2.0))
    for scored, each in zip(found, drawn, strict=True):
        off = np.asarray(scored.result.images[0]).astype(int) - np.asarray(each.sample)
        assert np.abs(off).max() <= 1


def test_the_base_is_drawn_and_evaluated_with_its_lora(painter, run, tmp_path):
    """`train.lora_path` of the config: what training would start from."""
    lora = list_weights(run)["step 16, EMA"]
    config = config_of_run(run, [f"--config.train.lora_path={lora}"])
    config.eval_prompts = 1
    with_lora = Painter(config, None, rewards=False)
    asked = wish(prompt=painter.prompts[0].prompt, seed=config.seed, guidance=2.0)
    [drawn] = with_lora.draw(asked)
    plain, trained = painter.draw(replace(asked, weights="step 16, EMA"))
    assert np.array_equal(np.asarray(drawn.sample), np.asarray(trained.sample))
    assert not np.array_equal(np.asarray(drawn.sample), np.asarray(plain.sample))
    [scored] = evaluate_all(config, ["base"], tmp_path / "out")
    off = np.asarray(scored.result.images[0]).astype(int) - np.asarray(trained.sample)
    assert np.abs(off).max() <= 1
    with pytest.raises(UserError, match=rf"lora_path='{lora}' has no effect.*add 'base'"):
        evaluate_all(config, [str(lora)], tmp_path / "unused", lora_given=str(lora))
    missing = config_of_run(run, ["--config.train.lora_path=/missing"])
    for use in (
        lambda: Painter(missing, None, rewards=False),
        lambda: evaluate_all(missing, ["base"], tmp_path / "none"),
    ):
        with pytest.raises(UserError, match=r"train\.lora_path='/missing'"):
            use()


def test_rewards_say_why_they_have_no_score(painter):
    for each in painter.draw(wish(prompt="no word", weights="step 8, EMA (best)")):
        broken, size, words, total = each.scores
        assert broken.startswith("broken  failed  (ValueError: at all")
        assert re.fullmatch(r"jpeg_compressibility  -[\d.]+", size)
        assert words == "words  -  (it has no word in double quotes)"
        assert total == "avg  failed"
    assert painter.draw(wish(prompt='the word "ART"'))[0].scores[2] == "words  0.50"
    for _ in range(3):  # a reward that fails time after time ends a run, but not the demo
        assert painter.draw(wish(prompt=HOSTILE))[0].scores[0].startswith("broken  failed")


def test_weights_that_are_gone_or_made_up_are_told(painter, run):
    for name in ("step 9, EMA", "../../etc", 3, {"a": 1}):
        with pytest.raises(UserError, match="no such checkpoint any more; reload the page"):
            painter.draw(wish(weights=name))


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_family_draws(family, tmp_path):
    model = save_small(family, tmp_path / "model")
    fields = run_fields(family, model, save_prompts(tmp_path / "prompts", family.sources))
    config = get_config()
    config.update_from_flattened_dict({**fields, "device": "cpu"})
    painter = Painter(config, None, rewards=False)
    first = painter.prompts[0]
    pictures = tuple(path.read_bytes() for path in first.images)
    asked = wish(prompt=PROMPTS[0], guidance=family.guided, steps=STEPS)
    asked = replace(asked, pictures=pictures)
    [drawn] = painter.draw(asked)
    frames = drawn.sample if family.frames > 1 else [drawn.sample]
    assert [frame.size for frame in frames] == [(family.wide, 32)] * family.frames
    assert drawn.scores == []
    assert painter.newest is None
    assert painter.limits.pictures == painter.adapter.sources
    # what rewards know of a test prompt holds for it with its own pictures alone
    assert painter.prompt_of(asked) is first
    assert painter.prompt_of(replace(asked, pictures=(PNG,))).images == (PNG,)


def arguments(**values) -> Namespace:
    given = {"run": None, "config": None, "host": LOCAL, "port": 0, "rewards": True}
    return Namespace(**{**given, **values})


def test_mistakes_are_told_before_anything_loads(run, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"no run at .*: there is no such folder; did you mean .*"):
        show(arguments(run=run.with_name("mime")), [])
    with pytest.raises(UserError, match="is not a run: it has no config"):
        show(arguments(run=run.parent), [])
    (tmp_path / "config.json").write_text((run / "config.json").read_text())
    with pytest.raises(UserError, match="has no checkpoints yet"):
        show(arguments(run=tmp_path), [])
    with socket.create_server((LOCAL, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"--port {port}: Address already in use; --port 0"):
            show(arguments(run=run, port=port), [])
    for host, port in ((LOCAL, 70000), ("no.such.host.invalid", 0)):
        with pytest.raises(UserError, match="cannot listen on --host"):
            find_port(host, port)
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr("demo.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"the demo needs gradio: pip install -e '.\[demo\]'"):
        show(arguments(run=run), [])


def test_a_reward_that_cannot_be_built_has_a_way_out(run):
    config = config_of_run(run, [])
    config.custom_rewards = ConfigDict({"mine": "no_such_module:score"})
    config.reward_fn = ConfigDict({"mine": 1.0})
    with pytest.raises(UserError, match=r"; --no-rewards draws without$"):
        Painter(config, run)


def test_the_page_answers_this_machine_alone_and_takes_small_pictures(monkeypatch, tmp_path):
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    import gradio

    from flow_grpo.demo.page import serve

    with gradio.Blocks(analytics_enabled=False) as page:
        gradio.Markdown("here")
    try:
        url = urlsplit(serve(page, tmp_path, LOCAL, find_port(LOCAL, 0), uploads=True))
        for host, status in (("localhost", 200), ("evil.example", 403), ("", 403), ("[", 403)):
            connection = HTTPConnection(LOCAL, url.port, timeout=30)
            connection.request("GET", "/config", headers={"Host": host})
            assert connection.getresponse().status == status, host
        for size, status in ((100, 200), (MOST_BYTES + 1, 413), (MOST_BYTES + 2**20, 413)):
            file = {"files": ("a.png", b"x" * size)}
            address = f"{url.geturl()}gradio_api/upload"
            assert requests.post(address, files=file, timeout=60).status_code == status
        parts = iter([b"x"])  # of any length
        assert requests.post(address, data=parts, timeout=60).status_code == 413
    finally:
        page.close()


def test_an_uploaded_picture_is_drawn_from(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "files"))
    from gradio_client import Client, handle_file
    from gradio_client.exceptions import AppError

    from flow_grpo.demo.page import build_page, serve

    family = next(each for each in FAMILIES if each.name == "flux_kontext")
    config, folder = get_config(), tmp_path / "files"
    dataset = save_prompts(tmp_path / "prompts", 1)
    fields = run_fields(family, save_small(family, tmp_path / "model"), dataset)
    config.update_from_flattened_dict({**fields, "device": "cpu"})
    painter = Painter(config, None, rewards=False)
    for name, data in (("good", PNG), ("cut off", PNG[:60])):
        (tmp_path / f"{name}.png").write_bytes(data)
    folder.mkdir()
    page = build_page(painter, folder)
    try:
        url = serve(page, folder, LOCAL, find_port(LOCAL, 0), uploads=True)
        client = Client(url, verbose=False, analytics_enabled=False, download_files=tmp_path)

        def draw(picture) -> bytes:
            values = ("a", None, STEPS, 1.0, 5, picture)
            return Path(client.predict(*values, api_name="/draw")[0]).read_bytes()

        drawn = draw(handle_file(tmp_path / "good.png"))
        assert drawn != draw(None)
        with pytest.raises(AppError, match=r"^the picture cannot be decoded .*; is the file whole"):
            draw(handle_file(tmp_path / "cut off.png"))
    finally:
        page.close()


def test_a_server_for_other_machines_answers_any_name():
    assert is_allowed_host("0.0.0.0", "my-machine.example:7860")
    assert is_allowed_host("127.0.0.2", "127.0.0.1:7860")
    assert is_allowed_host("::1", "[::1]:7860")
    assert not is_allowed_host("::1", "evil.example")
    assert not is_allowed_host("localhost", "localhost.evil.example:7860")
