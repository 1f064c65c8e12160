"""Invalid input is a one-line error with exit code 2, and nothing is written."""

import json
import os
import shutil

import pytest
from peft import LoraConfig, get_peft_model
from untrained.small.sd3 import build as build_tiny_sd3


def assert_rejected(train, done, *shown):
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    for each in shown:
        assert each in lines[0]
    assert not train.logdir.exists()


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        (
            {"sample__num_image_per_prompt": 3},
            "8 samples per epoch = sample.train_batch_size=4 x sample.num_batches_per_epoch=2",
        ),
        (
            {"sample__num_batches_per_epoch": 9},
            ("8 training prompts", "needs 9 ", "--config.sample.num_batches_per_epoch=8"),
        ),
        ({"train__cfg": False}, ("train.cfg=False ", "sample.guidance_scale=4.5")),
        ({"height": 33}, "height=33 must be a multiple of 8"),
        ({"pretrained__model": "assets/tiny"}, "pretrained.model='assets/tiny' does not exist"),
        ({"sample__sde_window_size": 9}, "sde_window_range=(0, 5) must lie within (0, 2)"),
        ({"train__ema_decay": 7.0}, "train.ema_decay=7.0 must be at least 0 and below 1"),
        ({"train__learning_rate": "nan"}, "train.learning_rate=nan must be a finite number"),
        ({"seed": 2**64}, "seed=18446744073709551616 must be at most 18446744073709551615"),
        ({"max_failed_fraction": -0.1}, "max_failed_fraction=-0.1 must be at least 0"),
        (
            {"reward_servers__jpeg_compressibility": "host:18085"},
            "reward_servers.jpeg_compressibility='host:18085' ",
        ),
        (
            {"reward_options": "{'jpeg_compressibility': {'frames': 'lst'}}"},
            "reward_options.jpeg_compressibility.frames='lst' must be 'first', 'middle', 'mean of",
        ),
        (
            {"train__keep_best_worst": 2},
            ("train.keep_best_worst=2 ", "sample.num_image_per_prompt=4 ", "use 8 "),
        ),
        (
            {"algorithm": "opd", "opd__teachers": "{'signs': 'a/b/c'}"},
            "has no teacher for prompt set 'dataset0'",
        ),
        ({"train__kl_type": "k3"}, "grpo.kl_type='k3' must be one of 'flow_grpo'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_invalid_value_is_rejected(train, overrides, shown):
    shown = (shown,) if isinstance(shown, str) else shown
    assert_rejected(train, train(**overrides), *shown)


def test_an_unsupported_pipeline_is_rejected(train, tiny_sd3, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(tiny_sd3, folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["_class_name"] = "StableDiffusionXLPipeline"
    (folder / "model_index.json").write_text(json.dumps(index))
    message = "is a StableDiffusionXLPipeline; supported are"
    assert_rejected(train, train(pretrained__model=folder), message)
    (folder / "model_index.json").unlink()
    assert_rejected(train, train(pretrained__model=folder), "it has no model_index.json")


def test_an_existing_run_is_not_modified(train):
    run = train.logdir / "run"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("precious\n")
    done = train()
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {run} already exists")
    assert f"--resume {run}" in done.stderr
    assert [p.name for p in run.iterdir()] == ["metrics.jsonl"]
    assert (run / "metrics.jsonl").read_text() == "precious\n"


def test_a_reward_with_the_wrong_number_of_scores_is_rejected(train, tmp_path, monkeypatch):
    (tmp_path / "short_reward.py").write_text(
        "def score(images, prompts, metadata): return [1.0] * (len(images) - 1)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = train(reward_fn="{'short': 1.0}", custom_rewards="{'short': 'short_reward:score'}")
    assert_rejected(train, done, "it returned scores of shape (1,) for 2 images")
    assert "reward 'short' " in done.stderr


def test_an_unreachable_reward_server_is_rejected(train):
    done = train(reward_servers__jpeg_compressibility="http://127.0.0.1:9")
    assert_rejected(train, done, "reward_servers.jpeg_compressibility='http://127.0.0.1:9' ")
    assert "python -m reward_server --rewards jpeg_compressibility" in done.stderr


def test_a_model_with_damaged_or_missing_weights_is_rejected(train, tiny_sd3, tmp_path):
    folder = tmp_path / "half"
    shutil.copytree(tiny_sd3, folder)
    cut = folder / "text_encoder/model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-9])
    assert_rejected(train, train(pretrained__model=folder), f"{cut} is damaged")
    shutil.rmtree(folder / "transformer")
    assert_rejected(
        train, train(pretrained__model=folder), f"pretrained.model='{folder}' cannot be loaded"
    )


def test_a_lora_of_another_model_is_rejected(train, tmp_path):
    """The LoRA is in PEFT's format, for which diffusers would only warn and ignore the weights."""
    wrapped = get_peft_model(
        build_tiny_sd3(layers=3).transformer, LoraConfig(target_modules=["attn.to_q"])
    )
    folder = tmp_path / "checkpoint-4/lora"
    wrapped.save_pretrained(folder)
    message = "adapter_model.safetensors does not fit this model: 2 of its 6 tensors"
    assert_rejected(train, train(train__lora_path=folder), message)
    out = f"--out={tmp_path / 'out'}"
    done = train(out, f"--checkpoint={folder.parent}", script="scripts/evaluate.py")
    assert_rejected(train, done, message)


def test_a_config_of_another_trainer_is_rejected(run, tmp_path):
    config = tmp_path / "theirs.py"
    config.write_text(
        "from ml_collections import ConfigDict\n"
        "def get_config(name):\n"
        "    train = {'batch_size': 4, 'beta': 0.04, 'learning_rate': 3e-4, 'lora_path': None}\n"
        "    sample = {'num_steps': 10, 'batch_size': 8}\n"
        "    return ConfigDict({'logdir': 'logs', 'run_name': '', 'save_dir': 'logs/ocr',\n"
        "        'seed': 42, 'allow_tf32': True, 'train': train, 'sample': sample})\n"
    )
    done = run(config=f"{config}:general_ocr_sd3")
    assert_rejected(run, done, "unknown settings: sample.batch_size (it is called sample.train_b")
    assert f"save_dir (omit it: it is called logdir here, which is '{run.logdir}')" in done.stderr
    assert "train_batch_size = 8; start from a preset, such as flow_grpo.diffusion" in done.stderr


def test_debug_shows_the_traceback(train):
    done = train("--debug", dataset="no/such/folder")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "UserError: dataset='no/such/folder'" in done.stderr
