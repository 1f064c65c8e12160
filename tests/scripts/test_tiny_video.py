"""The small video model: its data, its pipeline and its pretraining."""

import json
from itertools import product

import pytest
import torch
from diffusers import LTX2Pipeline
from runner import ROOT
from tiny_video import pretrain, prompts
from tiny_video.model import TEXT_LENGTH, build_pipeline
from tiny_video.prompts import COLOURS, COUNTS, DIRECTIONS, VERBS, Task, split_tasks
from tiny_video.videos import FRAMES, SAMPLE_RATE, SIZE, render, sound_of

from flow_grpo.audio import Audio
from flow_grpo.rewards.frames import to_pil
from flow_grpo.rewards.protocol import AUDIO
from flow_grpo.rewards.scorers.moving_shape import MovingShape

DATA = ROOT / "dataset" / "moving_shapes"


def test_the_script_reproduces_the_shipped_prompts(tmp_path, capsys):
    command = ["--out", str(tmp_path / "made")]
    prompts.main(command)
    for name in ("train_metadata.jsonl", "test_metadata.jsonl"):
        assert (tmp_path / "made" / name).read_bytes() == (DATA / name).read_bytes()
    with pytest.raises(SystemExit):
        prompts.main(command)
    assert "already exists" in capsys.readouterr().err


def all_tasks() -> list[Task]:
    return [Task(*parts) for parts in product(COLOURS, DIRECTIONS, COUNTS, VERBS)]


def test_train_and_test_prompts_differ_in_meaning():
    train, test = split_tasks().values()
    assert {*train, *test} == {*all_tasks()}
    assert len(train + test) == len({task.text for task in train + test}) == 216
    meanings = [{(t.color, t.direction, t.beeps) for t in split} for split in (train, test)]
    assert not set.intersection(*meanings)
    reward = MovingShape()
    assert all(reward.skip_reason(task.text, task.row()) is None for task in train + test)


def test_training_videos_and_sounds_score_1_for_their_own_task_only():
    tasks = all_tasks()[::7]
    generator = torch.Generator().manual_seed(3)
    videos, waves = render(tasks, generator), sound_of(tasks, generator)
    assert videos.shape == (len(tasks), 3, FRAMES, SIZE, SIZE)
    sounds = [Audio(wave[None].numpy(), SAMPLE_RATE) for wave in waves]
    rows = [{**task.row(), AUDIO: sound} for task, sound in zip(tasks, sounds, strict=True)]
    frames = to_pil(videos.transpose(1, 2))
    scores, _ = MovingShape()(frames, [""] * len(rows), rows)
    assert set(scores) == {1.0}
    others = [{**row, **other.row()} for row, other in zip(rows[1:], tasks, strict=False)]
    scores, _ = MovingShape()(frames[1:], [""] * len(others), others)
    assert set(scores) == {0.0}


def test_prompts_are_tokenized_by_words_and_fit():
    tokenizer = build_pipeline(heads=1, head_width=16, layers=1, vae_width=8, seed=0).tokenizer
    texts = [task.text for task in all_tasks()]
    tokens = [tokenizer.convert_ids_to_tokens(ids) for ids in tokenizer(texts).input_ids]
    assert max(map(len, tokens)) <= TEXT_LENGTH
    assert tokens[0][-2:] == ["▁beeps", "▁once"]
    assert tokens[0][1:5] == ["a", "▁red", "▁circle", "▁moves"]
    assert "<unk>" not in {token for row in tokens for token in row}
    decoded = tokenizer.batch_decode(tokenizer(texts).input_ids, skip_special_tokens=True)
    assert decoded == texts


@pytest.mark.slow
def test_pretraining_writes_a_pipeline_with_its_card(tmp_path, capsys):
    folder = tmp_path / "model"
    pretrain.main(["--toy", "--out", str(folder)])
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    card = folder.joinpath("README.md").read_text()
    assert all(f"| {name} | {value:.2f} |" in card for name, value in done["scores"].items())
    assert str(folder) not in card
    assert folder.joinpath("samples.png").is_file()
    log = json.loads(folder.joinpath("training.json").read_text())
    assert {name: rows[-1]["step"] + 1 for name, rows in log.items()} == dict.fromkeys(
        ("video_vae", "audio_vae", "vocoder", "flow"), 2
    )
    statistics = LTX2Pipeline.from_pretrained(folder).vae.latents_std
    assert (statistics != 1).all()
    with pytest.raises(SystemExit):
        pretrain.main(["--toy", "--wrong-beeps=2", "--out", str(tmp_path / "other")])
    assert "--wrong-beeps=2" in capsys.readouterr().err
