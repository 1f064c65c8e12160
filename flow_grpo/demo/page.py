"""Gradio page of the demo.

User input is never rendered as HTML, only source images can be uploaded, and no other server is
contacted. Set the environment variables that gradio reads before importing this module.
"""

import html
import random
import uuid
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from flow_grpo.demo.gallery import MIN_SMOOTH_WIDTH
from flow_grpo.demo.generator import DemoGenerator, GeneratedSample
from flow_grpo.demo.limits import MAX_SEED
from flow_grpo.demo.uploads import MAX_FILE_BYTES, UploadLimitMiddleware, UploadStore
from flow_grpo.diffusion.builders import get_eval_guidance_scale
from flow_grpo.errors import UserError
from flow_grpo.images import ImageSource
from flow_grpo.report.grid import save_sample_files
from flow_grpo.report.server import HostCheckMiddleware
from flow_grpo.rewards import WeightedReward

MAX_QUEUE = 8  # waiting requests; further ones are rejected
MAX_IMAGE_INPUTS = 4  # source images
NUM_EXAMPLES = 4
NUM_FIELDS = 5  # inputs before the source images
FONTS = ["system-ui", "sans-serif"]  # local fonts
CSS = """
.gradio-container {max-width: 1000px !important; margin: 0 auto !important}
footer {display: none !important}
.drawn button, .upload-container, .image-frame, .image-frame img {width: 100% !important}
.image-frame img {height: auto !important; object-fit: contain !important}
.small img, td img {image-rendering: pixelated; object-fit: contain !important}
.scores textarea {font-variant-numeric: tabular-nums}
"""


def build_page(generator: DemoGenerator, folder: Path) -> gr.Blocks:
    """Build the demo page; gradio stores and serves files in `folder`."""
    config, limits = generator.config, generator.limits
    num_sources = min(MAX_IMAGE_INPUTS, limits.images[-1])
    small = ["small"] if generator.size.width < MIN_SMOOTH_WIDTH else []

    @show_user_errors
    def draw(*values: Any) -> list[Any]:
        """Generate the samples for the values of the form, and return the values of the outputs."""
        request = limits.parse_request(*values[:NUM_FIELDS], *map(store.read, values[NUM_FIELDS:]))
        if generator.has_candidates and request.weights is None:
            raise UserError("no trained weights are selected", hint="select a checkpoint")
        samples = generator.generate(request)
        target = folder / uuid.uuid4().hex
        target.mkdir()
        store.remove_old_folders()
        outputs = [_save_output(each, target, number) for number, each in enumerate(samples)]
        return [part for output in outputs for part in output]

    @show_user_errors
    def refresh() -> Any:
        return gr.Dropdown(choices=generator.weights())

    def random_seed() -> int:
        return random.randint(0, MAX_SEED)

    title = f"{generator.run.resolve().name} · flow_grpo" if generator.run else "flow_grpo"
    with gr.Blocks(title=title, analytics_enabled=False, fill_width=True) as page:
        compares = generator.has_candidates
        gr.Markdown("## Before and after training" if compares else "## Before training")
        prompt = gr.Textbox(label="Prompt", lines=1, max_lines=6)
        with gr.Row():
            weights = gr.Dropdown(
                generator.weights(),
                value=generator.newest,
                label="Trained weights",
                min_width=190,
                visible=compares,
            )
            steps = gr.Slider(
                limits.min_steps,
                limits.max_steps,
                config.sample.eval_num_steps,
                step=1,
                label="Steps",
                min_width=190,
            )
            guidance = gr.Slider(
                0,
                limits.max_guidance,
                get_eval_guidance_scale(config.sample),
                step=0.1,
                label="Guidance",
                min_width=190,
            )
            seed = gr.Number(config.seed, precision=0, label="Seed", min_width=140)
        with gr.Row():
            button = gr.Button("Generate", variant="primary")
            other = gr.Button("Random seed")
        outputs, sources = [], []
        with gr.Row():
            for number in range(num_sources):
                with gr.Column(min_width=190):
                    gr.Markdown("### Source" if number == 0 else f"### Source {number + 1}")
                    uploads = ["upload", "clipboard"]
                    sources.append(_image("Source", "source", *small, sources=uploads))
            for heading in ["Base", "Trained"] if compares else ["Base"]:
                with gr.Column(min_width=190):
                    gr.Markdown(f"### {heading}")
                    outputs.append(_image(heading, "drawn", *small, interactive=False))
                    outputs.append(_score_box(generator.reward))
        if examples := [
            [each.prompt, *_copy_images(each.images, folder, f"example-{number}", num_sources)]
            for number, each in enumerate(generator.prompts[:NUM_EXAMPLES])
        ]:
            gr.Examples(examples, [prompt, *sources], label="Test prompts")
        # not preprocessed, so that invalid values get our own messages
        generation = {
            "fn": draw,
            "inputs": [prompt, weights, steps, guidance, seed, *sources],
            "outputs": outputs,
            "preprocess": False,
            "concurrency_id": "model",
            "concurrency_limit": 1,
        }
        gr.on([button.click, prompt.submit], **generation, api_name="draw")
        private = {"api_visibility": "private"}
        other.click(random_seed, None, seed, **private).then(**generation, **private)
        page.load(refresh, None, weights, **private)
    store = UploadStore(folder)  # after gradio has copied the examples
    return page.queue(max_size=MAX_QUEUE, api_open=False)


def serve(page: gr.Blocks, folder: Path, host: str, port: int, *, uploads: bool = False) -> str:
    """Serve the page in the background and return its URL.

    Raises:
        UserError: If the port is in use.
    """
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
            max_file_size=MAX_FILE_BYTES if uploads else 1,
            app_kwargs={
                "middleware": [
                    Middleware(HostCheckMiddleware, served_at=host),
                    Middleware(UploadLimitMiddleware, store=UploadStore(folder)),
                ]
            },
            theme=theme,
            css=CSS,
        )
    except OSError as error:  # the port was free when it was checked
        raise UserError(
            "is in use", field="port", value=port, hint="choose another --port"
        ) from error
    return page.local_url


def show_user_errors(call: Callable) -> Callable:
    """Wrap an event handler so that a UserError is shown on the page, escaped for HTML."""

    @wraps(call)
    def wrapper(*args: Any) -> Any:
        """Call the handler; raise `gr.Error` in place of a UserError."""
        try:
            return call(*args)
        except UserError as error:
            raise gr.Error(html.escape(str(error)), print_exception=False) from error

    return wrapper


def _save_output(generated: GeneratedSample, folder: Path, number: int) -> tuple[str, str]:
    """Save a sample and return its path and its scores, one per line."""
    sample = generated.sample  # shown by an image component
    name = save_sample_files(sample, folder, str(number), animated_image=True)["file"]
    return str(folder / name), "\n".join(generated.scores)


def _copy_images(
    images: Sequence[ImageSource], folder: Path, name: str, num_inputs: int
) -> list[str | None]:
    """Copy the images of a test prompt for gradio; None for each input that stays empty."""
    paths: list[str | None] = [None] * num_inputs
    for index, image in enumerate(images[:num_inputs]):
        file = folder / f"{name}-{index}.png"
        file.write_bytes(image if isinstance(image, bytes) else image.read_bytes())
        paths[index] = str(file)
    return paths


def _image(label: str, *classes: str, **options: Any) -> gr.Image:
    """Build an image component without buttons, with these CSS classes."""
    return gr.Image(
        label=label,
        show_label=False,
        type="filepath",
        buttons=[],
        elem_classes=list(classes),
        **options,
    )


def _score_box(reward: WeightedReward | None) -> gr.Textbox:
    """Build the text box of the scores, hidden without rewards."""
    return gr.Textbox(
        label="Rewards",
        interactive=False,
        lines=max(1, len(reward.weights)) if reward else 1,
        visible=reward is not None,
        elem_classes=["scores"],
    )
