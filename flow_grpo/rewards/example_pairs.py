"""Three pairs of a good and a bad sample for each kind of reward, generated in code.

They show within a minute whether a reward is wired correctly: the model is loaded, the template and
the preprocessing are right, and better samples get higher scores. They do not measure how good a
reward is; `flow-grpo rewards agree` does, on a preference set.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from flow_grpo.audio import Audio
from flow_grpo.rewards.frames import Sample
from flow_grpo.rewards.protocol import AUDIO, SOURCE

SIDE = 256  # pixels, of images
FRAMES = 12  # of videos
SAMPLE_RATE = 48_000
NOISE = 60.0  # standard deviation of the noise of bad images, in levels of 255
COLORS = {"red": "#db1a1f", "green": "#1f9e38", "blue": "#1f47db", "yellow": "#f2e01f"}
GREY = "#b0b0b0"
WORDS = ("LIGHT", "GARDEN", "MUSIC")


@dataclass(frozen=True)
class ExamplePair:
    """A prompt with a good and a bad sample.

    Args:
        prompt: Prompt, question or instruction.
        good: The image, video or response that should get the higher score.
        bad: The one that should get the lower score.
        metadata: Metadata of both.
        good_metadata: Further metadata of the good sample, such as its sound.
        bad_metadata: Further metadata of the bad sample.
    """

    prompt: str
    good: Sample | str
    bad: Sample | str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    good_metadata: Mapping[str, Any] = field(default_factory=dict)
    bad_metadata: Mapping[str, Any] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """Return the metadata rows of the good and the bad sample."""
        return [{**self.metadata, **each} for each in (self.good_metadata, self.bad_metadata)]


def draw_shape(
    shape: str,
    color: str,
    *,
    center: tuple[float, float] = (0.5, 0.5),
    background: str = "white",
    onto: Image.Image | None = None,
    side: int = SIDE,
) -> Image.Image:
    """Draw a circle, square, triangle or stop sign at `center`; its size is 0.4 of the side."""
    image = onto.copy() if onto else Image.new("RGB", (side, side), background)
    x, y = (round(c * image.width) for c in center)
    radius = round(0.2 * image.width)
    box = (x - radius, y - radius, x + radius, y + radius)
    draw = ImageDraw.Draw(image)
    fill = COLORS.get(color, color)
    if shape == "circle":
        draw.ellipse(box, fill)
    elif shape == "square":
        draw.rectangle(box, fill)
    elif shape == "triangle":
        draw.polygon([(x, box[1]), (box[2], box[3]), (box[0], box[3])], fill)
    elif shape == "stop sign":
        draw.regular_polygon((x, y, radius), 8, 22.5, fill, "white")
        font = ImageFont.load_default(round(0.6 * radius))
        draw.text((x, y), "STOP", "white", font, anchor="mm")
    else:
        raise ValueError(f"unknown shape {shape!r}")
    return image


def draw_sign(word: str) -> Image.Image:
    """Draw a dark word on a white sign."""
    image = Image.new("RGB", (2 * SIDE, SIDE), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((8, 8, 2 * SIDE - 9, SIDE - 9), outline="#303030", width=4)
    draw.text((SIDE, SIDE / 2), word, "#101010", ImageFont.load_default(90), anchor="mm")
    return image


def degrade(image: Image.Image, seed: int = 0) -> Image.Image:
    """Blur an image and add noise."""
    blurred = np.asarray(image.filter(ImageFilter.GaussianBlur(3)), np.float32)
    noise = np.random.default_rng(seed).normal(0, NOISE, blurred.shape)
    return Image.fromarray(np.clip(blurred + noise, 0, 255).astype(np.uint8))


SCENES = (("circle", "red", "white"), ("square", "blue", "#f5e6c8"), ("triangle", "green", "black"))


def alignment_pairs() -> list[ExamplePair]:
    """Return crisp images of the prompt against degraded images of another shape and colour."""
    pairs = []
    for number, (shape, color, ground) in enumerate(SCENES):
        other_shape, other_color, other_ground = SCENES[number - 1]
        name = {"#f5e6c8": "beige"}.get(ground, ground)
        pairs.append(
            ExamplePair(
                f"a {color} {shape} on a {name} background",
                draw_shape(shape, color, background=ground),
                degrade(draw_shape(other_shape, other_color, background=other_ground), number),
            )
        )
    return pairs


def question_pairs() -> list[ExamplePair]:
    """Return the pairs of `alignment_pairs` with questions about them, as GenEval 2 has them."""
    return [
        ExamplePair(
            pair.prompt,
            pair.good,
            pair.bad,
            {
                "vqa_list": [
                    [f"How many {shape}s are in the image?", "one"],
                    [f"Is the {shape} {color}?", "Yes"],
                    [f"Are there any {shape}s in the image?", "Yes"],
                ],
                "skills": ["count", "attribute", "object"],
            },
        )
        for pair, (shape, color, _) in zip(alignment_pairs(), SCENES, strict=True)
    ]


def quality_pairs() -> list[ExamplePair]:
    """Return crisp against degraded versions of the same image."""
    return [
        ExamplePair(pair.prompt, pair.good, degrade(pair.good, number))
        for number, pair in enumerate(alignment_pairs())
    ]


def noise_pairs() -> list[ExamplePair]:
    """Return detailed (noisy) against plain images."""
    return [ExamplePair(pair.prompt, pair.bad, pair.good) for pair in quality_pairs()]


def sign_pairs() -> list[ExamplePair]:
    """Return signs with the quoted word against signs with another word."""
    return [
        ExamplePair(
            f'a white sign that says "{word}"', draw_sign(word), draw_sign(WORDS[number - 1])
        )
        for number, word in enumerate(WORDS)
    ]


def object_pairs(shape: str) -> list[ExamplePair]:
    """Return images with one, two and red objects against images with fewer or of another color.

    Args:
        shape: "stop sign", which detectors of COCO's classes know, or another shape.
    """
    blank = Image.new("RGB", (SIDE, SIDE), GREY)
    left = draw_shape(shape, "red", center=(0.25, 0.5), onto=blank)
    both = draw_shape(shape, "red", center=(0.75, 0.5), onto=left)
    return [
        ExamplePair(
            f"a photo of a {shape}",
            draw_shape(shape, "red", onto=blank),
            blank,
            {"tag": "single_object", "include": [{"class": shape, "count": 1}]},
        ),
        ExamplePair(
            f"a photo of two {shape}s",
            both,
            left,
            {"tag": "counting", "include": [{"class": shape, "count": 2}]},
        ),
        ExamplePair(
            f"a photo of a red {shape}",
            draw_shape(shape, "red", onto=blank),
            draw_shape(shape, "blue", onto=blank),
            {"tag": "colors", "include": [{"class": shape, "count": 1, "color": "red"}]},
        ),
    ]


def edit_pairs() -> list[ExamplePair]:
    """Return edits that follow the instruction against noisy images of something else."""
    blank = Image.new("RGB", (SIDE, SIDE), "white")
    pairs = []
    for number, (old, new) in enumerate((("red", "blue"), ("green", "yellow"), ("blue", "red"))):
        kept = draw_shape("square", "green", center=(0.75, 0.7), onto=blank)
        source = draw_shape("circle", old, center=(0.3, 0.3), onto=kept)
        edited = draw_shape("circle", new, center=(0.3, 0.3), onto=kept)
        other = degrade(draw_shape("triangle", old, background="black"), number)
        pairs.append(ExamplePair(f"make the {old} circle {new}", edited, other, {SOURCE: source}))
    return pairs


def draw_video(
    shape: str, color: str, path: list[tuple[float, float]], background: str = GREY, side: int = 64
) -> list[Image.Image]:
    """Draw a shape that moves along a path of positions, one per frame."""
    return [draw_shape(shape, color, center=c, background=background, side=side) for c in path]


def straight(start: float, end: float, frames: int = FRAMES) -> list[tuple[float, float]]:
    """Return positions at a constant speed from left to right."""
    return [(float(x), 0.5) for x in np.linspace(start, end, frames)]


def motion_pairs() -> list[ExamplePair]:
    """Return moving against static shapes."""
    return [
        ExamplePair(
            f"a {color} {shape} moves to the right",
            draw_video(shape, color, straight(0.3, 0.7)),
            draw_video(shape, color, straight(0.5, 0.5)),
        )
        for shape, color, _ in SCENES
    ]


def smoothness_pairs() -> list[ExamplePair]:
    """Return shapes of constant speed against shapes that move back and forth."""
    jitter = [(0.4 + 0.1 * (frame % 2), 0.5) for frame in range(FRAMES)]
    return [
        ExamplePair(
            f"a {color} {shape} moves to the right",
            draw_video(shape, color, straight(0.3, 0.7)),
            draw_video(shape, color, jitter),
        )
        for shape, color, _ in SCENES
    ]


def flicker_pairs() -> list[ExamplePair]:
    """Return videos of constant against alternating brightness."""
    pairs = []
    for shape, color, _ in SCENES:
        steady = draw_video(shape, color, straight(0.5, 0.5))
        black = Image.new("RGB", steady[0].size)
        flickering = [Image.blend(f, black, 0.3 * (i % 2)) for i, f in enumerate(steady)]
        pairs.append(ExamplePair(f"a {color} {shape}", steady, flickering))
    return pairs


def video_pairs() -> list[ExamplePair]:
    """Return smooth, crisp videos of the prompt against noisy, jerky videos of another shape."""
    pairs = []
    rng = np.random.default_rng(0)
    for number, (shape, color, _) in enumerate(SCENES):
        other_shape, other_color, _ = SCENES[number - 1]
        jumps = [(float(x), float(y)) for x, y in rng.uniform(0.2, 0.8, (FRAMES, 2))]
        bad = draw_video(other_shape, other_color, jumps, side=SIDE)
        pairs.append(
            ExamplePair(
                f"a {color} {shape} moves slowly to the right",
                draw_video(shape, color, straight(0.3, 0.7), "white", SIDE),
                [degrade(frame, i) for i, frame in enumerate(bad)],
            )
        )
    return pairs


def moving_shape_pairs() -> list[ExamplePair]:
    """Return shapes that move as requested against shapes that move the other way."""
    pairs = []
    for beeps, (shape, color, _) in enumerate(SCENES, 1):
        row = {"shape": shape, "color": color, "direction": "right", "beeps": beeps}
        pairs.append(
            ExamplePair(
                f"a {color} {shape} moves right and beeps {beeps} times",
                draw_video(shape, color, straight(0.3, 0.7)),
                draw_video(shape, color, straight(0.7, 0.3)),
                {**row, AUDIO: beep_audio(beeps)},
            )
        )
    return pairs


def tone(level: float, frequency: float = 440.0, seconds: float = 1.0) -> np.ndarray:
    """Return a sine of amplitude `level`, float32, (1, samples)."""
    time = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    return (level * np.sin(2 * np.pi * frequency * time)).astype(np.float32)[None]


def beep_audio(beeps: int) -> Audio:
    """Return beeps of 0.1 s, separated by pauses of 0.2 s."""
    pause = np.zeros((1, round(0.2 * SAMPLE_RATE)), np.float32)
    parts = [pause] + [tone(0.5, seconds=0.1), pause] * beeps
    return Audio(np.concatenate(parts, axis=1), SAMPLE_RATE)


def _sound_pairs(sounds: list[tuple[str, np.ndarray, np.ndarray]]) -> list[ExamplePair]:
    """Return pairs with equal frames and different sounds, from prompts and two waveforms."""
    frames = draw_video("circle", "red", straight(0.5, 0.5))
    return [
        ExamplePair(
            prompt,
            frames,
            frames,
            good_metadata={AUDIO: Audio(good, SAMPLE_RATE)},
            bad_metadata={AUDIO: Audio(bad, SAMPLE_RATE)},
        )
        for prompt, good, bad in sounds
    ]


def loudness_pairs() -> list[ExamplePair]:
    """Return loud against quiet tones."""
    return _sound_pairs([("a loud tone", tone(0.3, f), tone(0.01, f)) for f in (220, 440, 880)])


def silence_pairs() -> list[ExamplePair]:
    """Return silence against tones."""
    return _sound_pairs([("silence", tone(0.0), tone(0.3, f)) for f in (220, 440, 880)])


def sound_pairs() -> list[ExamplePair]:
    """Return sounds of the prompt against other sounds."""
    hiss = np.random.default_rng(0).normal(0, 0.1, (1, SAMPLE_RATE)).astype(np.float32)
    beeps = np.concatenate([beep_audio(3).waveform] * 2, axis=1)[:, :SAMPLE_RATE]
    return _sound_pairs(
        [
            ("static noise, white noise", hiss, tone(0.3)),
            ("a pure sine tone", tone(0.3), hiss),
            ("an alarm beeps several times", beeps, hiss),
        ]
    )


def sync_pairs() -> list[ExamplePair]:
    """Return sounds that start when a shape jumps, at 24 frames per second, against later ones."""
    pairs = []
    for jump, late in ((3, 8), (5, 9), (7, 11)):
        path = [(0.3, 0.5)] * jump + [(0.7, 0.5)] * (FRAMES - jump)
        waves = [tone(0.3) * (np.arange(SAMPLE_RATE) >= f / 24 * SAMPLE_RATE) for f in (jump, late)]
        good, bad = ({AUDIO: Audio(wave.astype(np.float32), SAMPLE_RATE)} for wave in waves)
        video = draw_video("circle", "red", path)
        prompt = "a red circle jumps and beeps"
        pairs.append(ExamplePair(prompt, video, video, good_metadata=good, bad_metadata=bad))
    return pairs


def _response_pairs(answers: list[tuple[str, str, str, Any]]) -> list[ExamplePair]:
    """Return pairs of responses, from questions, good and bad responses, and ground truths."""
    return [ExamplePair(q, good, bad, {"answer": truth}) for q, good, bad, truth in answers]


def math_pairs() -> list[ExamplePair]:
    r"""Return right against wrong final answers in \boxed."""
    return _response_pairs(
        [
            ("What is 2 + 3?", r"2 + 3 = \boxed{5}", r"2 + 3 = \boxed{6}", "5"),
            ("What is 1 / 2?", r"It is \boxed{\frac{1}{2}}.", r"It is \boxed{2}.", "0.5"),
            ("Expand (x+1)^2.", r"\boxed{x^2+2x+1}", r"\boxed{x^2+1}", "(x+1)^2"),
        ]
    )


def choice_pairs() -> list[ExamplePair]:
    """Return the right against a wrong letter."""
    return _response_pairs(
        [(f"Choose {right}.", f"The answer is {right}.", "D", right) for right in "ABC"]
    )


def format_pairs() -> list[ExamplePair]:
    """Return responses in the format of `answer_format` (tags and box) against plain ones."""
    good = r"<think>2 + {0} is {1}.</think><answer>\boxed{{{1}}}</answer>"
    return _response_pairs(
        [(f"What is 2 + {n}?", good.format(n, 2 + n), f"It is {2 + n}.", n) for n in (1, 2, 3)]
    )


def overlong_pairs() -> list[ExamplePair]:
    """Return responses within the limit against responses that reach it."""
    return [
        ExamplePair(
            "What is 2 + 3?",
            "5",
            "5" * 100,
            {"max_new_tokens": limit, "answer": "5"},
            {"answer_tokens": 1},
            {"answer_tokens": limit},
        )
        for limit in (100, 200, 400)
    ]


def prompt_length_pairs() -> list[ExamplePair]:
    """Return pairs of a short and a too long rewritten prompt."""
    return [
        ExamplePair("draw a dog", "a photo of a dog", "a very long prompt " * count)
        for count in (20, 50, 100)
    ]


def prompt_similarity_pairs() -> list[ExamplePair]:
    """Return rewritten prompts that keep the request, paired with others."""
    return _response_pairs(
        [
            ("a dog in the snow", "a photo of a dog in the snow, 4k", "a cat on a sofa", ""),
            ("two red circles", "two red circles on white paper", "three blue squares", ""),
            ("sign DOG crisp", "a crisp sign that says DOG", "a crisp photo of a car", ""),
        ]
    )


def environment_pairs() -> list[ExamplePair]:
    """Return episodes with a reward against episodes without."""
    return [
        ExamplePair(
            "play",
            "done",
            "lost",
            good_metadata={"environment": {"reward": reward}},
            bad_metadata={"environment": {"reward": 0.0}},
        )
        for reward in (0.5, 1.0, 2.0)
    ]


def answer_pairs() -> list[ExamplePair]:
    """Return helpful against useless responses."""
    return _response_pairs(
        [
            ("What is the capital of France?", "The capital of France is Paris.", "qx zz", "Paris"),
            ("What is 2 + 3?", "2 + 3 = 5.", "I hate you.", "5"),
            ("Name a fruit.", "An apple is a fruit.", "No. No. No. No.", "apple"),
        ]
    )


EXAMPLES: dict[str, Callable[[], list[ExamplePair]]] = {
    "alignment": alignment_pairs,
    "answer": answer_pairs,
    "answer_format": format_pairs,
    "choice": choice_pairs,
    "edit": edit_pairs,
    "environment": environment_pairs,
    "flicker": flicker_pairs,
    "loudness": loudness_pairs,
    "math_answer": math_pairs,
    "motion": motion_pairs,
    "moving_shape": moving_shape_pairs,
    "noise": noise_pairs,
    "none": list,  # scored by people
    "object": lambda: object_pairs("stop sign"),
    "overlong": overlong_pairs,
    "prompt_length": prompt_length_pairs,
    "prompt_similarity": prompt_similarity_pairs,
    "quality": quality_pairs,
    "questions": question_pairs,
    "shape": lambda: object_pairs("circle"),
    "sign": sign_pairs,
    "silence": silence_pairs,
    "smoothness": smoothness_pairs,
    "sound": sound_pairs,
    "sync": sync_pairs,
    "video": video_pairs,
}


def example_pairs(kind: str, options: Mapping[str, Any]) -> list[ExamplePair]:
    """Return the pairs of a kind; GenEval's shape detector, an option, needs other objects."""
    if kind == "object" and options.get("detector") == "shapes":
        kind = "shape"
    return EXAMPLES[kind]()
