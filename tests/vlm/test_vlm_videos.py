"""Questions about videos: frame selection, and agreement of sampling, training and transformers."""

import json
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import small_vlm
import torch
import vlm_runs
from PIL import Image
from torch import Tensor, nn
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata
from user_errors import raises_user_error

from flow_grpo.data.questions import Question, QuestionLayout
from flow_grpo.data.rows import read_file
from flow_grpo.data.seeding import sample_generators
from flow_grpo.data.videos import Video, check_videos, read_frames, select_frames
from flow_grpo.vlm.packing import Response, concat_vision_inputs, pack_responses
from flow_grpo.vlm.policy import VlmPolicy
from flow_grpo.vlm.prompts import EncodedPrompt
from flow_grpo.vlm.sampling import Sampler
from flow_grpo.vlm.vllm_engine import reject_videos

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
SECONDS, FPS = 3, 10  # of the test video
WHERE = "data.jsonl:3"


def bright_frames() -> list[np.ndarray]:
    """Return frames of increasing brightness, (H, W, 3) each."""
    return [np.full((32, 48, 3), 8 * i, np.uint8) for i in range(SECONDS * FPS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Write a video as MP4, as GIF and as single frames, and an image."""
    folder = tmp_path_factory.mktemp("videos")
    video = cv2.VideoWriter(str(folder / "a.mp4"), cv2.VideoWriter_fourcc(*"mp4v"), FPS, (48, 32))
    for i, pixels in enumerate(bright_frames()):
        video.write(pixels)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    video.release()
    first, *rest = map(Image.fromarray, bright_frames())
    first.save(folder / "a.gif", save_all=True, append_images=rest, duration=1000 / FPS)
    small_vlm.random_image(7).save(folder / "still.png")
    return folder


def decode_all(path: Path) -> list[np.ndarray]:
    """Decode every frame of a video with OpenCV, each (H, W, 3) in RGB."""
    capture, decoded = cv2.VideoCapture(str(path)), []
    while (frame := capture.read()[1]) is not None:
        decoded.append(frame[..., ::-1])
    capture.release()
    return decoded


def frames(folder: Path, count: int = SECONDS * FPS, fps: float = FPS) -> Video:
    return Video(tuple(folder / f"{i}.png" for i in range(count)), fps)


def video_questions(folder: Path) -> list[Question]:
    """Return a question with a video, a text-only one, and one with videos and an image."""
    video, still = Video(folder / "a.mp4"), folder / "still.png"
    mixed = "<video> or <image>, then <video>?"
    return [
        Question("What is it?", (), "1", {}, WHERE, "", (video,)),
        Question("1+1?", (), "2", {}, WHERE),
        Question(mixed, (still,), "3", {}, WHERE, "", (frames(folder, 5, 1), video)),
    ]


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "frames"])
def test_frames_are_selected_by_rate_or_by_count(folder, name):
    video = frames(folder) if name == "frames" else Video(folder / name)
    # pixels of a lossy codec depend on its build, so decode with the same one
    decoded = decode_all(folder / name) if name == "a.mp4" else bright_frames()
    expected = {(2, 32): range(0, 30, 5), (2, 4): (0, 7, 15, 22), (0, 10): range(0, 30, 3)}
    for (rate, most), indices in expected.items():
        clip = select_frames(video, WHERE, rate, most)
        assert clip.indices == tuple(indices)
        assert clip.seconds == pytest.approx([i / FPS for i in indices])
        assert clip.spacing == pytest.approx(SECONDS / len(indices))
        shown = [np.asarray(frame) for frame in read_frames(video, clip, WHERE)]
        np.testing.assert_array_equal(shown, [decoded[i] for i in indices])


def test_short_videos_have_one_frame_or_an_even_number(folder):
    for count, indices in {1: (0,), 2: (0, 1), 3: (0, 1), 5: (0, 1, 2, 3)}.items():
        clip = select_frames(frames(folder, count, fps=1), WHERE, 2.0, 32)
        assert len(clip.indices) == len(indices)


def split(prompt: EncodedPrompt) -> tuple[Tensor, dict[str, Tensor]]:
    """Return token ids and vision arguments as the processor of transformers would.

    There, videos have a separate placeholder.
    """
    ids, extra = prompt.ids.clone(), {}
    kinds = [float(own["seconds_per_grid"]) > 0 for own in prompt.vision_inputs]
    counts = [int(own["image_grid_thw"].prod()) // 4 for own in prompt.vision_inputs]
    of_video = torch.tensor(kinds).repeat_interleave(torch.tensor(counts))
    ids[ids == small_vlm.IMAGE] = torch.where(of_video, small_vlm.VIDEO, small_vlm.IMAGE)
    for video, names in {
        False: ("pixel_values", "image_grid_thw"),
        True: ("pixel_values_videos", "video_grid_thw"),
    }.items():
        own = concat_vision_inputs(
            [own for own, kind in zip(prompt.vision_inputs, kinds, strict=True) if kind == video]
        )
        if own:
            extra |= dict(zip(names, (own["pixel_values"], own["image_grid_thw"]), strict=True))
            if video:
                extra["second_per_grid_ts"] = own["seconds_per_grid"]
    return ids, extra


@torch.no_grad()
def stock(model: nn.Module, prompt: EncodedPrompt, tokens: Tensor) -> Tensor:
    """Return the log-probabilities of a response by the forward pass of transformers.

    Prompt and response are separate passes, as in generation: in a single pass, Qwen2.5-VL would
    compute positions for text after a video that are before the video's end.
    """
    ids, extra = split(prompt) if prompt.vision_inputs else (prompt.ids, {})
    kinds = (ids == small_vlm.IMAGE).int() + 2 * (ids == small_vlm.VIDEO).int()
    if model.config.model_type != "qwen2_5_vl":
        extra.pop("second_per_grid_ts", None)  # unsupported argument
    model.model.rope_deltas = None  # cached from the previous prompt
    read = model(input_ids=ids[None], mm_token_type_ids=kinds[None], **extra, use_cache=True)
    generated = model(input_ids=tokens[None, :-1], past_key_values=read.past_key_values)
    logits = torch.cat([read.logits[0, -1:], generated.logits[0]])
    logits[:, [small_vlm.START, small_vlm.END, small_vlm.IMAGE, small_vlm.VIDEO]] = -torch.inf
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_training_and_transformers_agree_on_videos(folder, family):
    model = small_vlm.build(family)
    encoder, policy = small_vlm.encoder(model), VlmPolicy(model, processors=[], use_lora=False)
    questions = video_questions(folder)
    prompts = [encoder.encode(question) for question in questions]
    assert [encoder.prompt_length(question) for question in questions] == [len(p) for p in prompts]
    sampler = Sampler(policy.network, max_new_tokens=8, stop=[small_vlm.EOS], pad=small_vlm.PAD)
    rows = [0, 0, 1, 2, 2]
    sampled = sampler.sample(prompts, rows, sample_generators(0, 0, rows))
    shares = policy.network.family.shares_prompt
    responses = [
        Response(row if shares else i, prompts[row], tokens)
        for i, (row, tokens) in enumerate(zip(rows, sampled.tokens, strict=True))
    ]
    batch = pack_responses(responses, small_vlm.PAD)
    assert len(batch.inputs.images["image_grid_thw"]) == 3  # the repeated video is encoded once
    trained = policy.forward_tokens_no_grad(batch)["log_probs"]
    for i, row in enumerate(rows):
        own = trained[i][batch.mask[i]]
        assert (own - sampled.log_probs[i]).abs().max() < 2e-6
        assert (own - stock(model, prompts[row], sampled.tokens[i])).abs().max() < 2e-6


def test_patches_and_timestamps_equal_those_of_transformers(folder):
    """Frames need no resizing, which requires torchvision in transformers."""
    encoder, video = small_vlm.encoder(small_vlm.build("qwen2_5_vl")), frames(folder, 5, 2)
    prompt = encoder.encode(Question("?", (), "1", {}, WHERE, "", (video,)))
    pixels = torch.tensor(np.stack(bright_frames()[:4])).permute(0, 3, 1, 2)[None] / 127.5 - 1
    sizes = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
    patches, *grid = Qwen3VLVideoProcessor.patchify(None, pixels, **sizes)
    [inputs] = prompt.vision_inputs
    assert inputs["image_grid_thw"].tolist() == [grid]
    torch.testing.assert_close(inputs["pixel_values"], patches[0], rtol=0, atol=1e-6)
    clip = select_frames(video, WHERE, 2.0, 32)
    metadata = VideoMetadata(clip.total, clip.fps, frames_indices=list(clip.indices))
    assert float(inputs["seconds_per_grid"]) == pytest.approx(2 / metadata.sampled_fps)


def test_timestamps_in_prompts_equal_those_of_transformers(folder):
    """Qwen3-VL replaces the placeholder of a video in the rendered template."""
    encoder = small_vlm.encoder(small_vlm.build("qwen3_vl"))
    video = frames(folder, 5, 2)
    prompt = encoder.encode(Question("?", (), "1", {}, WHERE, "", (video,)))
    clip = select_frames(video, WHERE, 2.0, 32)
    theirs = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        **{"video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>"},
        vision_end_token="<|vision_end|>",
    )
    theirs._calculate_timestamps = lambda *own: Qwen3VLProcessor._calculate_timestamps(theirs, *own)
    metadata = SimpleNamespace(fps=clip.fps, frames_indices=list(clip.indices))
    inputs = {
        "video_grid_thw": prompt.vision_inputs[0]["image_grid_thw"],
        "video_metadata": [metadata],
    }
    written = Qwen3VLProcessor.replace_video_token(theirs, inputs, 0)
    expected = f"<|im_start|><|vision_start|>{written}<|vision_end|>?<|im_end|><|im_start|>"
    assert encoder.tokenizer.decode(split(prompt)[0]) == expected


def test_a_run_trains_on_videos(folder, tmp_path):
    rows = [
        {"problem": "<video>What?", "videos": ["a.mp4"], "answer": "1"},
        {"problem": "What?", "videos": [["0.png", "9.png"]], "fps": 1, "answer": "2"},
        {"problem": "<image>What?", "images": ["still.png"], "videos": [], "answer": "3"},
        {"problem": "What?", "answer": "4"},
    ]
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows]), encoding="utf-8")
    fields = {"pretrained.model": str(small_vlm.save(tmp_path / "model", "qwen2_5_vl"))}
    fields |= {"dataset": str(data), "logdir": str(tmp_path), "num_epochs": 1, "video_frames": 4}
    session = vlm_runs.run(**fields)
    assert vlm_runs.read_metrics(session)[-1]["train/first_update_ratio_dev"] <= 1e-5
    video = next(question for question in session.questions if question.videos)
    assert int(
        session.rollout_engine.encoder.encode(video).vision_inputs[0]["image_grid_thw"][0, 0]
    ) in (1, 2)


def test_videos_are_rejected_for_a_model_without_video_support(folder):
    encoder = small_vlm.encoder(small_vlm.build("internvl"))
    with raises_user_error("video", field=WHERE):
        encoder.prompt_length(video_questions(folder)[0])


def test_videos_are_rejected_with_vllm(folder):
    with raises_user_error("sample.engine='vllm'", field=WHERE):
        reject_videos(video_questions(folder))


def test_error_about_a_long_video_suggests_fewer_frames(folder):
    encoder = small_vlm.encoder(small_vlm.build())
    with raises_user_error("max_prompt_length=20", "--config.video_frames"):
        encoder.check_prompt_lengths(video_questions(folder), limit=20)


def bad(folder: Path, kind: str) -> Video:
    whole = (folder / "a.mp4").read_bytes()
    files = {
        "list.mp4": b"#EXTM3U\nhttp://example.com/a.mp4\n",
        "empty.mp4": b"",
        "cut.mp4": whole[: len(whole) // 2],
        "cut.gif": (folder / "a.gif").read_bytes()[:30],
    }
    if kind in files:
        (folder / kind).write_bytes(files[kind])
        return Video(folder / kind)
    unlike = (folder / "0.png", folder / "large.png")
    Image.new("RGB", (96, 64)).save(unlike[1])
    return {"bytes": Video(whole), "unlike": Video(unlike)}[kind]


@pytest.mark.parametrize(
    ("kind", "shown"),
    {
        "list.mp4": ["list.mp4", "MKV"],
        "empty.mp4": ["empty.mp4", "MKV"],
        "cut.mp4": ["cut.mp4"],
        "cut.gif": ["cut.gif"],
        "bytes": ["bytes"],
        "unlike": ["48 x 32", "96 x 64"],
    }.items(),
)
def test_an_unreadable_video_is_rejected_at_the_start(folder, kind, shown):
    row = Question("?", (), "1", {}, WHERE, "", (bad(folder, kind),))
    with raises_user_error(*shown) as caught:
        check_videos([row], small_vlm.process_info(), 2.0, 32)
    assert str(caught.value).startswith(WHERE)


def test_rows_name_videos_in_the_layout_of_easyr1(folder):
    row = {"problem": "<video>Why?", "images": [], "videos": ["a.mp4"], "answer": "1"}
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    [question] = read_file(path, QuestionLayout())
    assert question.videos == (Video(folder / "a.mp4"),)
    assert "videos" not in question.metadata
