"""Video files, and a run whose model generates videos."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from plot import plot_images
from train import train as train_run

from flow_grpo.audio import Audio
from flow_grpo.report.grid import save_image_grid
from flow_grpo.report.thumbnails import encode_thumbnails
from flow_grpo.report.video_files import save_video
from flow_grpo.rewards.frames import Video, to_pil
from flow_grpo.training.trackers import save_samples


def make_videos(count: int, frames: int) -> list[list[Image.Image]]:
    """Return videos of a red bar that moves by two pixels per frame; each has its own grey."""
    pixels = torch.zeros(count, frames, 3, 16, 24)
    for i in range(count):
        for frame in range(frames):
            pixels[i, frame] = (1 + i) / 8
            pixels[i, frame, 0, :, 2 * frame : 2 * frame + 2] = 1.0
    return to_pil(pixels)


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB")).astype(int)


def frames_in(path: Path) -> list[np.ndarray]:
    with Image.open(path) as gif:
        frames = []
        for index in range(gif.n_frames):
            gif.seek(index)
            frames.append(pixels(gif))
        return frames


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_video_is_saved_as_an_animated_gif_and_its_middle_frame(tmp_path):
    videos = make_videos(2, 9)
    save_samples(tmp_path, videos, prompt=["a", "b"], avg=[0.5, float("nan")])
    assert records(tmp_path) == [
        {"file": "0000.gif", "still": "0000.png", "prompt": "a", "avg": 0.5},
        {"file": "0001.gif", "still": "0001.png", "prompt": "b", "avg": None},
    ]
    for i, video in enumerate(videos):
        read = frames_in(tmp_path / f"{i:04d}.gif")
        assert len(read) == 9
        for shown, frame in zip(read, video, strict=True):
            assert np.abs(shown - pixels(frame)).max() <= 8  # a GIF has few colours
        assert np.array_equal(pixels(Image.open(tmp_path / f"{i:04d}.png")), pixels(video[4]))
    with Image.open(tmp_path / "0000.gif") as gif:
        assert gif.info["duration"] == 60
        assert gif.info["loop"] == 0  # repeat forever


def test_an_mp4_is_shown_by_its_middle_frame_where_it_cannot_be_decoded(tmp_path):
    [video] = make_videos(1, 5)
    (tmp_path / "0000.mp4").write_bytes(b"of another machine")
    video[2].save(tmp_path / "0000.png")
    files = {0: [tmp_path / "0000.mp4", tmp_path / "0001.mp4"]}
    [[shown, missing]] = encode_thumbnails(files, 1e6, 1).values()
    assert missing is None
    assert shown.startswith("data:image/webp;base64,")
    with Image.open(io.BytesIO(base64.b64decode(shown.partition(",")[2]))) as image:
        assert np.abs(pixels(image) - pixels(video[2])).mean() <= 16


def test_a_gif_can_be_chosen_where_only_images_are_shown(tmp_path):
    [video] = make_videos(1, 3)
    assert save_video(video, tmp_path, "a", animated_image=True) == "a.gif"
    assert save_video(video, tmp_path, "b") == "b.gif"
    assert (tmp_path / "a.gif").read_bytes() == (tmp_path / "b.gif").read_bytes()


def test_without_an_encoder_videos_with_sound_become_gif_and_wav(tmp_path, caplog):
    """The message is logged once, regardless of the number of videos."""
    caplog.set_level("INFO", "flow_grpo")
    sound = Audio(np.sin(np.arange(800, dtype=np.float32))[None], 8000)
    videos = [Video(frames, fps=24, audio=sound) for frames in make_videos(2, 5)]
    save_samples(tmp_path, videos, prompt=["a", "b"])
    for name, record in zip(("0000", "0001"), records(tmp_path), strict=True):
        assert (record["file"], record["audio"]) == (f"{name}.gif", f"{name}.wav")
        assert len(frames_in(tmp_path / record["file"])) == 5
        read = Audio.from_wav((tmp_path / record["audio"]).read_bytes())
        np.testing.assert_allclose(read.waveform, sound.waveform, atol=1e-4)
    [message] = caplog.messages
    assert message == "videos are saved as GIF; for MP4 run: pip install -e '.[video]'"


def test_a_video_of_one_frame_is_saved_as_an_image(tmp_path):
    [[image]] = make_videos(1, 1)
    for folder, sample in ((tmp_path / "video", [image]), (tmp_path / "image", image)):
        save_samples(folder, [sample], prompt=["a"])
        assert records(folder) == [{"file": "0000.png", "prompt": "a"}]
        assert sorted(p.name for p in folder.iterdir()) == ["0000.png", "samples.jsonl"]
    assert np.array_equal(*(pixels(Image.open(p)) for p in sorted(tmp_path.rglob("0000.png"))))


def test_the_grid_shows_the_middle_frames(tmp_path):
    videos = make_videos(2, 5)
    stills = tmp_path / "stills"
    stills.mkdir()
    save_image_grid(tmp_path, videos, ["a", "b"])
    save_image_grid(stills, [video[2] for video in videos], ["a", "b"])
    assert np.array_equal(*(pixels(Image.open(f / "grid.png")) for f in (tmp_path, stills)))


def test_a_run_of_a_video_model_scores_and_saves_videos(make_session, tmp_path):
    steps = {"sample.eval_num_steps": 2}
    session = make_session(num_epochs=1, eval_prompts=3, log_images=2, eval_freq=1, **steps)
    decode = session.adapter.decode
    # an image model whose outputs become videos by panning
    session.adapter.decode = lambda latents: torch.stack(
        [decode(latents).roll(8 * frame, dims=-1) for frame in range(5)], dim=1
    )
    train_run(session)
    [before, after] = [
        json.loads(line) for line in (session.folder / "metrics.jsonl").read_text().splitlines()
    ]
    for name in ("reward/jpeg_compressibility", "eval/avg", "reward/diversity"):
        assert after[name] is not None
    assert before["eval/failed"] == after["reward/failed"] == 0
    for name in ("eval-00000", "eval-00001", "train-00001"):
        folder = session.folder / "samples" / name
        assert [r["file"] for r in records(folder)] == ["0000.gif", "0001.gif"]
        for record in records(folder):
            assert len(frames_in(folder / record["file"])) == 5
    out = tmp_path / "both.png"
    evaluations = [session.folder / "samples" / f"eval-0000{i}" for i in range(2)]
    plot_images(evaluations, 2, out)
    assert Image.open(out).mode == "RGB"


@pytest.mark.parametrize("count", [0, 2])
def test_images_and_videos_become_pil_images(count):
    assert to_pil(torch.zeros(count, 3, 4, 6)) == [Image.new("RGB", (6, 4))] * count
    assert to_pil(torch.zeros(count, 5, 3, 4, 6)) == [[Image.new("RGB", (6, 4))] * 5] * count
