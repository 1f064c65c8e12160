"""Answers on the disk: samples.jsonl with question, picture, answer and rewards."""

from collections.abc import Sequence

from PIL import Image

from flow_grpo.data.questions import Question
from flow_grpo.data.videos import choose_frames, read_frames
from flow_grpo.pictures import read_picture
from flow_grpo.run.distributed import on_all_or_none
from flow_grpo.run.session import BaseSession, write_samples

MOST = 512  # pixels of a side: they are there to be looked at
FRAMES = 4  # of a video


def write_answers(
    session: BaseSession,
    kind: str,
    epoch: int,
    questions: Sequence[Question],
    answers: Sequence[str],
    **columns: Sequence,
) -> None:
    """Write sampled responses. Call it on all processes; only the main process writes."""
    shown = questions if session.accelerator.is_main_process else []
    pictures = on_all_or_none(session.accelerator, lambda: [_picture(each) for each in shown])
    write_samples(
        session,
        kind,
        epoch,
        pictures,
        prompt=[question.text for question in questions],
        answer=list(answers),
        truth=[str(question.answer) for question in questions],
        **columns,
    )


def _picture(question: Question) -> Image.Image | None:
    """All pictures of a question side by side, and some frames of its videos; None where there are
    none."""
    pictures = [read_picture(source, question.where) for source in question.images]
    for video in question.videos:
        clip = choose_frames(video, question.where, rate=0, most=FRAMES)
        pictures += read_frames(video, clip, question.where)
    if not pictures:
        return None
    for picture in pictures:
        picture.thumbnail((MOST, MOST))
    sheet = Image.new("RGB", (sum(p.width for p in pictures), max(p.height for p in pictures)))
    left = 0
    for picture in pictures:
        sheet.paste(picture, (left, 0))
        left += picture.width
    return sheet
