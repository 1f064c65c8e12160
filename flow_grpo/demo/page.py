"""The page of the demo: every text is shown as text, no files are taken but the pictures that a
model starts from, and nothing is asked of any other server. Whoever imports this has set what
gradio reads from the environment."""

import html
import random
import uuid
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from flow_grpo.demo.gallery import SMALL
from flow_grpo.demo.limits import MOST_SEED
from flow_grpo.demo.painter import Drawn, Painter
from flow_grpo.demo.uploads import MOST_BYTES, BoundedUploads, Keeper
from flow_grpo.draw.session import eval_guidance
from flow_grpo.errors import UserError
from flow_grpo.pictures import Picture
from flow_grpo.show.grid import save_sample
from flow_grpo.show.serving import OnlyOurs

QUEUE = 8  # who comes when as many wait is told so
MOST_BOXES = 4  # for pictures to start from
EXAMPLES = 4
FIELDS = 5  # that come before the pictures
FONTS = ["system-ui", "sans-serif"]  # of the reader's machine
CSS = """
.gradio-container {max-width: 1000px !important; margin: 0 auto !important}
footer {display: none !important}
.drawn button, .upload-container, .image-frame, .image-frame img {width: 100% !important}
.image-frame img {height: auto !important; object-fit: contain !important}
.small img, td img {image-rendering: pixelated; object-fit: contain !important}
.scores textarea {font-variant-numeric: tabular-nums}
"""


def build_page(painter: Painter, folder: Path) -> gr.Blocks:
    """`folder` is where gradio keeps files and serves them from."""
    config, limits = painter.config, painter.limits
    boxes = min(MOST_BOXES, limits.pictures[-1])
    small = ["small"] if painter.size.width < SMALL else []

    @told
    def draw(*values: Any) -> list[Any]:
        wish = limits.wish(*values[:FIELDS], *map(keeper.read, values[FIELDS:]))
        if painter.run and wish.weights is None:
            raise UserError("no trained weights are chosen; choose some")
        drawn = painter.draw(wish)
        place = folder / uuid.uuid4().hex
        place.mkdir()
        keeper.tidy()
        return [part for number, each in enumerate(drawn) for part in _shown(each, place, number)]

    @told
    def refresh() -> Any:
        return gr.Dropdown(choices=list(painter.weights()))

    def another() -> int:
        return random.randint(0, MOST_SEED)

    title = _title(painter)
    with gr.Blocks(title=title, analytics_enabled=False, fill_width=True) as page:
        gr.Markdown("## Before and after training" if painter.run else "## Before training")
        prompt = gr.Textbox(label="Prompt", lines=1, max_lines=6)
        with gr.Row():
            weights = gr.Dropdown(
                list(painter.weights()),
                value=painter.newest,
                label="Trained weights",
                min_width=190,
                visible=painter.run is not None,
            )
            steps = gr.Slider(
                *(limits.fewest_steps, limits.most_steps, config.sample.eval_num_steps),
                step=1,
                label="Steps",
                min_width=190,
            )
            guidance = gr.Slider(
                *(0, limits.most_guidance, eval_guidance(config)),
                step=0.1,
                label="Guidance",
                min_width=190,
            )
            seed = gr.Number(config.seed, precision=0, label="Seed", min_width=140)
        with gr.Row():
            button = gr.Button("Draw", variant="primary")
            other = gr.Button("Other seed")
        outputs, pictures = [], []
        with gr.Row():
            for number in range(boxes):
                with gr.Column(min_width=190):
                    gr.Markdown("### Source" if number == 0 else f"### Source {number + 1}")
                    pictures.append(_upload(small))
            for heading in ["Base", "Trained"] if painter.run else ["Base"]:
                with gr.Column(min_width=190):
                    gr.Markdown(f"### {heading}")
                    outputs += [_picture(heading, small), _scores(painter)]
        if examples := [
            [each.prompt, *_copies(each.images[:boxes], folder, f"example-{number}", boxes)]
            for number, each in enumerate(painter.prompts[:EXAMPLES])
        ]:
            gr.Examples(examples, [prompt, *pictures], label="Test prompts")
        # not preprocessed: whatever was posted is told in our words
        drawing = {
            "fn": draw,
            "inputs": [prompt, weights, steps, guidance, seed, *pictures],
            "outputs": outputs,
            "preprocess": False,
            "concurrency_id": "model",
            "concurrency_limit": 1,
        }
        gr.on([button.click, prompt.submit], **drawing, api_name="draw")
        private = {"api_visibility": "private"}
        other.click(another, None, seed, **private).then(**drawing, **private)
        page.load(refresh, None, weights, **private)
    keeper = Keeper(folder)  # now that gradio's copies of the examples are there
    return page.queue(max_size=QUEUE, api_open=False)


def serve(page: gr.Blocks, folder: Path, host: str, port: int, *, uploads: bool = False) -> str:
    """Until it is closed; returns its address."""
    theme = gr.themes.Default(primary_hue="blue", font=FONTS, font_mono=FONTS)
    try:
        page.launch(
            server_name=host,
            server_port=port,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            ssr_mode=False,
            mcp_server=False,
            pwa=False,
            enable_monitoring=False,
            run_history=False,
            footer_links=[],
            max_file_size=MOST_BYTES if uploads else 1,
            app_kwargs={
                "middleware": [
                    Middleware(OnlyOurs, served_at=host),
                    Middleware(BoundedUploads, keeper=Keeper(folder)),
                ]
            },
            theme=theme,
            css=CSS,
        )
    except OSError as error:  # it was free when we asked
        raise UserError(f"port {port} was taken meanwhile; choose another with --port") from error
    return page.local_url


def told(call: Callable) -> Callable:
    """A mistake as one sentence on the page, which would take it as HTML."""

    @wraps(call)
    def calling(*args: Any) -> Any:
        try:
            return call(*args)
        except UserError as error:
            raise gr.Error(html.escape(str(error)), print_exception=False) from error

    return calling


def _shown(drawn: Drawn, place: Path, number: int) -> tuple[str, str]:
    name = save_sample(drawn.sample, place, str(number))["file"]
    return str(place / name), "\n".join(drawn.scores)


def _copies(pictures: Sequence[Picture], folder: Path, name: str, boxes: int) -> list[str | None]:
    """The pictures of a test prompt, for gradio to show; None for each box that stays empty."""
    files = [folder / f"{name}-{place}.png" for place in range(len(pictures))]
    for file, picture in zip(files, pictures, strict=True):
        file.write_bytes(picture if isinstance(picture, bytes) else picture.read_bytes())
    return [*map(str, files), *[None] * (boxes - len(files))]


def _upload(classes: list[str]) -> gr.Image:
    return gr.Image(
        label="Source",
        show_label=False,
        type="filepath",
        sources=["upload", "clipboard"],
        buttons=[],
        elem_classes=["source", *classes],
    )


def _picture(heading: str, classes: list[str]) -> gr.Image:
    return gr.Image(
        label=heading,
        show_label=False,
        type="filepath",
        interactive=False,
        buttons=[],
        elem_classes=["drawn", *classes],
    )


def _scores(painter: Painter) -> gr.Textbox:
    return gr.Textbox(
        label="Rewards",
        interactive=False,
        lines=max(1, len(painter.reward.weights)) if painter.reward else 1,
        visible=painter.reward is not None,
        elem_classes=["scores"],
    )


def _title(painter: Painter) -> str:
    return f"{painter.run.resolve().name} · flow_grpo" if painter.run else "flow_grpo"
