"""Pretraining of the small text-to-image model at toy length on the CPU."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from runner import ROOT, run_script
from tiny.card import write_card
from tiny.flow import encode
from tiny.graphs import capture_cuda_graph
from tiny.images import Degradation
from tiny.loop import Learner, fit, learning_rate
from tiny.pool import byt5_ids
from tiny.pretrain import parse_args
from tiny.prompts import KEYWORDS
from untrained.small.sd3 import build as build_tiny_sd3


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    result = run_script("scripts/pretrain_tiny.py", "--toy", "--out", folder)
    assert result.returncode == 0, result.stderr
    return folder, result.stdout


@pytest.mark.parametrize("length", [8, 256])
def test_prompts_are_encoded_as_the_pipeline_does(length):
    pipeline = build_tiny_sd3(words=KEYWORDS, max_length=16)
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        getattr(pipeline, name).eval()
    prompts = ['a sign that says "MARKET"', "two red circles", ""]
    clip_ids = pipeline.tokenizer(prompts, padding="max_length", return_tensors="pt").input_ids
    t5_ids = torch.tensor([byt5_ids(prompt, length) for prompt in prompts])
    embeddings, pooled = encode(pipeline, clip_ids, t5_ids)
    wanted = pipeline.encode_prompt(
        prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=length
    )
    torch.testing.assert_close(embeddings, wanted[0])
    torch.testing.assert_close(pooled, wanted[2])
    embeddings.sum().backward()
    assert pipeline.text_encoder.text_model.embeddings.token_embedding.weight.grad is not None


def fit_parabola(*, steps: int, seconds: float) -> tuple[Learner, list[dict]]:
    weight = torch.nn.Parameter(torch.ones(4))
    learner = Learner([weight])

    def step(_: torch.Generator) -> torch.Tensor:
        learner.begin()
        loss = weight.square().mean()
        learner.update(loss)
        return loss.detach()

    run = capture_cuda_graph(step, torch.Generator())
    log = fit(learner, lambda _: run, steps=steps, seconds=seconds, peak_lr=0.1, name="parabola")
    return learner, log


def test_the_loss_decreases_and_the_average_follows_the_weights():
    learner, log = fit_parabola(steps=200, seconds=60)
    assert log[-1]["step"] == 199
    assert log[-1]["loss"] < 1e-2 * log[0]["loss"]
    learner.use_average()
    assert learner.parameters[0].abs().max() < 0.1


def test_training_stops_at_the_time_limit_with_learning_rate_0():
    learner, log = fit_parabola(steps=10**9, seconds=0.3)
    assert log[-1]["step"] < 10**9 - 1
    assert learner.lr.item() == 0


def test_the_learning_rate_warms_up_and_decays():
    rates = [learning_rate(progress / 100, peak=2.0) for progress in range(101)]
    assert rates[0] == 0
    assert max(rates) == pytest.approx(2.0)
    assert rates[-1] == pytest.approx(0)


def test_arguments_override_toy_values():
    args = parse_args(["--toy", "--steps", "5", "--out", "nowhere"])
    assert (args.steps, args.device, args.width) == (5, "cpu", 32)


@pytest.mark.slow
def test_the_script_writes_a_pipeline_that_diffusers_loads(made):
    folder, output = made
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder)
    image = pipeline(
        'a sign that says "HELLO"', height=32, width=96, num_inference_steps=2, guidance_scale=1.0
    ).images[0]
    assert image.size == (96, 32)
    assert pipeline.vae.config.scaling_factor != 1.0
    assert json.loads(output.splitlines()[-1])["out"] == str(folder)


@pytest.mark.slow
def test_the_directory_is_small_in_half_precision_and_has_a_card(made):
    from safetensors import safe_open

    folder, output = made
    weights = sorted(folder.rglob("*.safetensors"))
    assert len(weights) == 5
    for path in weights:
        with safe_open(path, "pt") as file:
            assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.float16}  # noqa: SIM118
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 16 * 2**20
    card = folder.joinpath("README.md").read_text()
    scores = json.loads(output.splitlines()[-1])["ocr"] or {}
    assert all(f"| {setting} | {value:.2f} |" in card for setting, value in scores.items())
    assert str(folder) not in card
    assert folder.joinpath("samples.png").is_file()
    log = json.loads(folder.joinpath("training.json").read_text())
    assert {name: entries[-1]["step"] for name, entries in log.items()} == {"vae": 3, "flow": 8}


def test_an_existing_directory_is_not_overwritten(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_args(["--toy", "--out", str(tmp_path)])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path} already exists" in line


def test_the_card_reproduces_the_shipped_text(tmp_path):
    sizes = {"transformer": 2.33, "vae": 0.66, "text_encoder": 0.44, "text_encoder_2": 0.44}
    write_card(
        tmp_path,
        degradation=Degradation(),
        scores={"guidance 1, 256 T5 tokens": 0.61},
        num_words=96,
        command="python scripts/pretrain_tiny.py --time-limit 420.0",
        minutes=6.1,
        device="NVIDIA H200",
        steps_done={"vae": 3173, "flow": 4002},
        parameters={
            name: round(1e6 * size) for name, size in (sizes | {"text_encoder_3": 0.69}).items()
        },
    )
    card = tmp_path.joinpath("README.md").read_text()
    shipped = (ROOT / "assets/tiny-sd3/README.md").read_text()
    assert card.partition("## Measured")[0] == shipped.partition("## Measured")[0]
    assert card.partition("## Limitations")[2] in shipped
