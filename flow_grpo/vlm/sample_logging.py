"""Write sampled responses to samples.jsonl, with question, images and rewards."""

from collections.abc import Sequence

from PIL import Image

from flow_grpo.data.questions import Question
from flow_grpo.data.videos import read_frames, select_frames
from flow_grpo.images import read_image
from flow_grpo.training.distributed import raise_on_all_ranks
from flow_grpo.training.session import BaseSession, write_samples

MAX_SIDE = 512  # pixels; logged images are previews
MAX_FRAMES = 4  # per video


def write_response_samples(
    session: BaseSession,
    kind: str,
    epoch: int,
    questions: Sequence[Question],
    responses: Sequence[str],
    **columns: Sequence,
) -> None:
    """Log responses on the main process; call it on all processes."""
    logged = questions if session.accelerator.is_main_process else []
    images = raise_on_all_ranks(
        session.accelerator, lambda: _sample_images(session, logged, responses)
    )
    write_samples(
        session,
        kind,
        epoch,
        images,
        prompt=[question.text for question in questions],
        answer=list(responses),
        truth=[str(question.answer) for question in questions],
        **columns,
    )


def _sample_images(
    session: BaseSession, questions: Sequence[Question], responses: Sequence[str]
) -> list[Image.Image | None]:
    """Return the images of the questions, or else those drawn from the responses."""
    sheets = [_contact_sheet(each) for each in questions]
    rewards = {**session.reward.scorers, **session.eval_reward.scorers}
    preview = next((p for each in rewards.values() if (p := each.preview) is not None), None)
    if preview is None or any(sheets) or not questions:
        return sheets
    images = preview(list(responses), [question.text for question in questions])
    return [image and _thumbnail(image) for image in images]


def _thumbnail(image: Image.Image) -> Image.Image:
    """Return a copy of at most MAX_SIDE pixels per side."""
    image = image.copy()
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    return image


def _contact_sheet(question: Question) -> Image.Image | None:
    """Return the images and some video frames of a question side by side, or None."""
    images = [read_image(source, question.where) for source in question.images]
    for video in question.videos:
        clip = select_frames(video, question.where, rate=0, max_frames=MAX_FRAMES)
        images += read_frames(video, clip, question.where)
    if not images:
        return None
    for image in images:
        image.thumbnail((MAX_SIDE, MAX_SIDE))
    sheet = Image.new("RGB", (sum(p.width for p in images), max(p.height for p in images)))
    left = 0
    for image in images:
        sheet.paste(image, (left, 0))
        left += image.width
    return sheet
