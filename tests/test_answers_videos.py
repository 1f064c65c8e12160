"""Questions about videos: which frames are shown, and that sampling, training and transformers
agree on them."""

import json
from pathlib import Path
from types import SimpleNamespace

import answer_runs
import cv2
import numpy as np
import pytest
import small_vlm
import torch
from PIL import Image
from torch import Tensor, nn
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from flow_grpo.answer.batches import Answer, joined, packed
from flow_grpo.answer.policy import AnswerPolicy
from flow_grpo.answer.prompts import EncodedPrompt
from flow_grpo.answer.sampling import Sampler
from flow_grpo.answer.vllm_engine import refuse_videos
from flow_grpo.data.questions import Question, read_questions
from flow_grpo.data.seeding import sample_generators
from flow_grpo.data.videos import Video, check_videos, choose_frames, read_frames
from flow_grpo.errors import UserError

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
SECONDS, FPS = 3, 10  # of the film
WHERE = "data.jsonl:3"


def shades() -> list[np.ndarray]:
    """One for each frame, brighter and brighter."""
    return [np.full((32, 48, 3), 8 * i, np.uint8) for i in range(SECONDS * FPS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A film, the same that moves, and as pictures."""
    folder = tmp_path_factory.mktemp("videos")
    film = cv2.VideoWriter(str(folder / "a.mp4"), cv2.VideoWriter_fourcc(*"mp4v"), FPS, (48, 32))
    for i, pixels in enumerate(shades()):
        film.write(pixels)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    film.release()
    first, *rest = map(Image.fromarray, shades())
    first.save(folder / "a.gif", save_all=True, append_images=rest, duration=1000 / FPS)
    small_vlm.picture(7).save(folder / "still.png")
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


def asked(folder: Path) -> list[Question]:
    """About a film, about nothing, and about frames, a picture and the film between words."""
    film, still = Video(folder / "a.mp4"), folder / "still.png"
    mixed = "<video> or <image>, then <video>?"
    return [
        Question("What is it?", (), "1", {}, WHERE, "", (film,)),
        Question("1+1?", (), "2", {}, WHERE),
        Question(mixed, (still,), "3", {}, WHERE, "", (frames(folder, 5, 1), film)),
    ]


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "frames"])
def test_frames_are_chosen_by_rate_or_by_count(folder, name):
    video = frames(folder) if name == "frames" else Video(folder / name)
    # a lossy codec's values depend on its build: compare with this machine's own decoding
    decoded = decode_all(folder / name) if name == "a.mp4" else shades()
    expected = {(2, 32): range(0, 30, 5), (2, 4): (0, 7, 15, 22), (0, 10): range(0, 30, 3)}
    for (rate, most), places in expected.items():
        clip = choose_frames(video, WHERE, rate, most)
        assert clip.places == tuple(places)
        assert clip.seconds == pytest.approx([place / FPS for place in places])
        assert clip.spacing == pytest.approx(SECONDS / len(places))
        shown = [np.asarray(frame) for frame in read_frames(video, clip, WHERE)]
        np.testing.assert_array_equal(shown, [decoded[place] for place in places])


def test_short_videos_have_a_frame_or_an_even_number(folder):
    for count, places in {1: (0,), 2: (0, 1), 3: (0, 1), 5: (0, 1, 2, 3)}.items():
        clip = choose_frames(frames(folder, count, fps=1), WHERE, 2.0, 32)
        assert len(clip.places) == len(places)


def split(prompt: EncodedPrompt) -> tuple[Tensor, dict[str, Tensor]]:
    """Token ids and arguments as transformers' own processor would give them: a video has another
    placeholder than a picture."""
    ids, extra = prompt.ids.clone(), {}
    kinds = [float(own["moment"]) > 0 for own in prompt.seen]
    counts = [int(own["image_grid_thw"].prod()) // 4 for own in prompt.seen]
    of_video = torch.tensor(kinds).repeat_interleave(torch.tensor(counts))
    ids[ids == small_vlm.IMAGE] = torch.where(of_video, small_vlm.VIDEO, small_vlm.IMAGE)
    for film, names in {
        False: ("pixel_values", "image_grid_thw"),
        True: ("pixel_values_videos", "video_grid_thw"),
    }.items():
        own = joined([seen for seen, kind in zip(prompt.seen, kinds, strict=True) if kind == film])
        if own:
            extra |= dict(zip(names, (own["pixel_values"], own["image_grid_thw"]), strict=True))
            if film:
                extra["second_per_grid_ts"] = own["moment"]
    return ids, extra


@torch.no_grad()
def stock(model: nn.Module, prompt: EncodedPrompt, tokens: Tensor) -> Tensor:
    """Log-probabilities of an answer, by the model's own forward with its own positions: of the
    prompt, and then of the answer as when it generates. In one go, text after a video of
    Qwen2.5-VL's would be told to come before its end."""
    ids, extra = split(prompt) if prompt.seen else (prompt.ids, {})
    kinds = (ids == small_vlm.IMAGE).int() + 2 * (ids == small_vlm.VIDEO).int()
    if model.config.model_type != "qwen2_5_vl":
        extra.pop("second_per_grid_ts", None)  # it has no such argument
    model.model.rope_deltas = None  # of the prompt before
    read = model(input_ids=ids[None], mm_token_type_ids=kinds[None], **extra, use_cache=True)
    said = model(input_ids=tokens[None, :-1], past_key_values=read.past_key_values)
    logits = torch.cat([read.logits[0, -1:], said.logits[0]])
    logits[:, [small_vlm.START, small_vlm.END, small_vlm.IMAGE, small_vlm.VIDEO]] = -torch.inf
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_training_and_transformers_agree_on_videos(folder, family):
    model = small_vlm.build(family)
    encoder, policy = small_vlm.encoder(model), AnswerPolicy(model, parts=[], use_lora=False)
    questions = asked(folder)
    prompts = [encoder.encode(question) for question in questions]
    assert [encoder.length(question) for question in questions] == [len(p) for p in prompts]
    sampler = Sampler(policy.network, max_new_tokens=8, stop=[small_vlm.EOS], pad=small_vlm.PAD)
    rows = [0, 0, 1, 2, 2]
    sampled = sampler.sample(prompts, rows, sample_generators(0, 0, rows))
    shares = policy.network.family.shares_prompt
    answers = [
        Answer(row if shares else i, prompts[row], tokens)
        for i, (row, tokens) in enumerate(zip(rows, sampled.tokens, strict=True))
    ]
    batch = packed(answers, small_vlm.PAD)
    assert len(batch.inputs.pictures["image_grid_thw"]) == 3  # the film is seen once
    trained = policy.fixed_scores(batch)["log_probs"]
    for i, row in enumerate(rows):
        own = trained[i][batch.mask[i]]
        assert (own - sampled.log_probs[i]).abs().max() < 2e-6
        assert (own - stock(model, prompts[row], sampled.tokens[i])).abs().max() < 2e-6


def test_patches_and_their_seconds_are_those_of_transformers(folder):
    """Of frames that need no resizing; its own resizing needs torchvision."""
    encoder, video = small_vlm.encoder(small_vlm.build("qwen2_5_vl")), frames(folder, 5, 2)
    prompt = encoder.encode(Question("?", (), "1", {}, WHERE, "", (video,)))
    pixels = torch.tensor(np.stack(shades()[:4])).permute(0, 3, 1, 2)[None] / 127.5 - 1
    sizes = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
    patches, *grid = Qwen3VLVideoProcessor.patchify(None, pixels, **sizes)
    [seen] = prompt.seen
    assert seen["image_grid_thw"].tolist() == [grid]
    torch.testing.assert_close(seen["pixel_values"], patches[0], rtol=0, atol=1e-6)
    clip = choose_frames(video, WHERE, 2.0, 32)
    told = VideoMetadata(clip.total, clip.fps, frames_indices=list(clip.places))
    assert float(seen["moment"]) == pytest.approx(2 / told.sampled_fps)


def test_times_are_written_as_transformers_write_them(folder):
    """Of Qwen3-VL: in a prompt, the placeholder between the template's marks is replaced."""
    encoder = small_vlm.encoder(small_vlm.build("qwen3_vl"))
    video = frames(folder, 5, 2)
    prompt = encoder.encode(Question("?", (), "1", {}, WHERE, "", (video,)))
    clip = choose_frames(video, WHERE, 2.0, 32)
    theirs = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
        **{"video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>"},
        vision_end_token="<|vision_end|>",
    )
    theirs._calculate_timestamps = lambda *own: Qwen3VLProcessor._calculate_timestamps(theirs, *own)
    told = SimpleNamespace(fps=clip.fps, frames_indices=list(clip.places))
    inputs = {"video_grid_thw": prompt.seen[0]["image_grid_thw"], "video_metadata": [told]}
    written = Qwen3VLProcessor.replace_video_token(theirs, inputs, 0)
    expected = f"<|im_start|><|vision_start|>{written}<|vision_end|>?<|im_end|><|im_start|>"
    assert encoder.tokenizer.decode(split(prompt)[0]) == expected


def test_a_run_is_shown_the_videos_of_its_rows(folder, tmp_path):
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
    session = answer_runs.run(**fields)
    line = json.loads((session.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["train/first_update_ratio_dev"] <= 1e-5
    film = next(question for question in session.questions if question.videos)
    assert int(session.answerer.encoder.encode(film).seen[0]["image_grid_thw"][0, 0]) in (1, 2)


def test_a_model_that_is_shown_no_videos_says_so(folder):
    encoder = small_vlm.encoder(small_vlm.build("internvl"))
    with pytest.raises(UserError, match=f"{WHERE}: asks about a video, and this model is shown no"):
        encoder.length(asked(folder)[0])


def test_videos_are_refused_with_vllm(folder):
    with pytest.raises(UserError, match=f"{WHERE}: asks about a video, and sample.engine='vllm'"):
        refuse_videos(asked(folder))


def test_a_video_that_is_too_long_says_how_to_show_less_of_it(folder):
    encoder = small_vlm.encoder(small_vlm.build())
    with pytest.raises(UserError, match=r"leave it out, lower --config.video_frames or"):
        encoder.check_lengths(asked(folder), most=20)


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
    ("kind", "told"),
    {
        "list.mp4": "is no MP4 or MOV, WebM or MKV, AVI, GIF or WEBP file; save it as one",
        "empty.mp4": "is no MP4",
        "cut.mp4": "is the file whole",
        "cut.gif": "cannot be decoded",
        "bytes": "is not read from bytes; save it, and give its path",
        "unlike": "frames of a video have 48 x 32 and 96 x 64 pixels; make all the same",
    }.items(),
)
def test_a_bad_video_is_named_at_the_start(folder, kind, told):
    row = Question("?", (), "1", {}, WHERE, "", (bad(folder, kind),))
    with pytest.raises(UserError) as error:
        check_videos([row], small_vlm.process(), 2.0, 32)
    assert str(error.value).startswith(f"{WHERE}: ")
    assert told in str(error.value)


def test_rows_name_videos_in_the_layout_of_easyr1(folder):
    row = {"problem": "<video>Why?", "images": [], "videos": ["a.mp4"], "answer": "1"}
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    [question] = read_questions(path)
    assert question.videos == (Video(folder / "a.mp4"),)
    assert "videos" not in question.metadata
