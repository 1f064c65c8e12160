"""The OCR reward: what counts as a match, and that its worker processes survive what happens."""

import io
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from flow_grpo.errors import UserError
from flow_grpo.rewards import ocr
from flow_grpo.rewards.ocr import OcrScorer, ocr_score, quoted_text
from flow_grpo.rewards.pool import Failed, PoolClosed, WorkerPool

# PP-OCR takes a few of this font's Os for zeros (OIL, TOOL, ZOO): those words are left out.
# fmt: off
WORDS = [
    "CAT", "DOG", "SUN", "MAP", "BUS", "TEA", "CODE", "FISH",
    "LAMP", "ROAD", "MILK", "WIND", "JUMP", "KIWI", "APPLE", "BREAD",
    "CHAIR", "HOUSE", "LIGHT", "QUIET", "ZEBRA", "POWER", "MUSIC", "TRAIN",
    "ORANGE", "PLANET", "SILVER", "WINTER", "GARDEN", "BRIDGE", "YELLOW",
]
# fmt: on


def mono_bold(size: int) -> ImageFont.FreeTypeFont:
    import matplotlib

    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(str(fonts / "DejaVuSansMono-Bold.ttf"), size)


def sign(word: str, blur: float = 0.0) -> Image.Image:
    """A 32 x 96 sign with the word as large as fits, its colours chosen by the word."""
    rng = np.random.default_rng(list(word.encode()))
    paper, ink = rng.integers(0, 90, 3), rng.integers(180, 256, 3)
    image = Image.new("RGB", (96, 32), tuple(paper.tolist()))
    size = min(28, int(90 / (0.602 * len(word))))
    ImageDraw.Draw(image).text(
        (48, 16), word, font=mono_bold(size), fill=tuple(ink.tolist()), anchor="mm"
    )
    return image.filter(ImageFilter.GaussianBlur(blur)) if blur else image


def prompt(word: str) -> str:
    return f'a sign that says "{word}"'


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


# Text and score


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('a sign that says "HELLO"', "HELLO"),
        ('"Open" on the door and "24 Hours" below', "Open 24 Hours"),
        ("a sign that says “Héllo”", "Héllo"),
        ("ein Schild mit „Straße“ darauf", "Straße"),
        ('ein Schild mit „Straße" darauf', "Straße"),
        ("un panneau « Bonjour »", "Bonjour"),
        ("et skilt med »Velkommen«", "Velkommen"),
        ("en skylt med ”Hej”", "Hej"),
        ('“One”, "two" and «three»', "One two three"),
        ("it's a dog's 'life'", None),
        ('a 6" pipe', None),
        ('an empty "" and a blank " " pair', None),
        ("no quotes", None),
    ],
)
def test_the_target_is_what_stands_in_double_quotes(text: str, expected: str | None) -> None:
    assert quoted_text(text) == expected


@pytest.mark.parametrize(
    ("read", "target", "expected"),
    [
        ("HELLO", "hello", 1.0),
        ("H E L L O", "Hello", 1.0),
        ("the HELLO shop", "hello", 1.0),
        ("HELL", "HELLO", 0.8),
        ("HELPO", "HELLO", 0.8),
        ("HELO", "HELLO", 0.8),
        ("XYZ", "HELLO", 0.0),
        ("", "HELLO", 0.0),
        ("far too much text that is of no help", "HELLO", 0.0),
        ("open24hours", "Open 24 Hours", 1.0),
    ],
)
def test_the_score_is_the_share_of_the_target_that_was_read(
    read: str, target: str, expected: float
) -> None:
    assert ocr_score(read, target) == pytest.approx(expected)


ASCII = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12)


@given(read=st.text(max_size=12), target=st.text(min_size=1, max_size=12))
def test_the_score_is_1_exactly_when_the_target_is_contained(read: str, target: str) -> None:
    plain_target = "".join(target.lower().split())
    if not plain_target:
        with pytest.raises(ValueError, match="empty"):
            ocr_score(read, target)
        return
    score = ocr_score(read, target)
    assert 0.0 <= score <= 1.0
    assert (score == 1.0) == (plain_target in "".join(read.lower().split()))


@given(read=ASCII, target=ASCII.filter(str.strip), spaces=st.integers(0, 5))
def test_case_and_spaces_do_not_count(read: str, target: str, spaces: int) -> None:
    score = ocr_score(read, target)
    spread = (" " * spaces).join(read)
    assert ocr_score(read.swapcase(), target) == score
    assert ocr_score(read, target.swapcase()) == score
    assert ocr_score(spread, target) == score
    assert ocr_score(read, f" {target[:2]} {target[2:]} ") == score


@given(target=ASCII.filter(str.strip), before=ASCII, after=ASCII)
def test_text_around_the_target_does_not_lower_the_score(
    target: str, before: str, after: str
) -> None:
    assert ocr_score(before + target + after, target) == 1.0


# Mistakes of the user


def test_a_prompt_without_quoted_text_is_named_when_prompts_are_checked() -> None:
    scorer = OcrScorer()
    scorer.check_prompts([prompt("A"), "a sign that says “B”"])
    with pytest.raises(UserError, match=r"prompt 1 .*double quotes.*'a red circle'") as error:
        scorer.check_prompts([prompt("A"), "a red circle"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "tesseract"}, "'tesseract'.*rapidocr, paddleocr"),
        ({"mode": "lines"}, "'lines'.*auto, full, line"),
        ({"workers": 0}, "0.*1 or more"),
        ({"timeout": 0}, "more than 0"),
        ({"rec_model_dir": "models"}, "rec_model_dir is 'models'.*paddleocr"),
    ],
)
def test_a_wrong_option_is_told_at_once(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        OcrScorer(**options)


@pytest.mark.parametrize(("engine", "extra"), [("rapidocr", "ocr"), ("paddleocr", "paddleocr")])
def test_a_missing_package_names_its_pip_install(
    engine: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ocr, "find_spec", lambda name: None if name == engine else object())
    with pytest.raises(UserError, match=rf"needs {engine}: pip install flow_grpo\[{extra}\]"):
        OcrScorer(engine=engine)


def test_a_directory_that_is_no_paddle_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ocr, "find_spec", lambda name: object())
    with pytest.raises(UserError, match=r"rec_model_dir .*holds no inference\.yml"):
        OcrScorer(engine="paddleocr", rec_model_dir=str(tmp_path))


def test_local_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    assert ocr.default_workers() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert ocr.default_workers() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert ocr.default_workers() == 1


# Reading pictures


@pytest.fixture(scope="module")
def scorer() -> Iterator[OcrScorer]:
    with OcrScorer(workers=2) as scorer:
        score_words(scorer, WORDS)
        assert len(scorer.pool.pids()) == 2
        yield scorer


def score_words(scorer: OcrScorer, words: list[str], blur: float = 0.0) -> list[float]:
    images = [sign(word, blur) for word in words]
    return scorer(images, [prompt(word) for word in words], [{} for _ in words])


def test_clean_signs_score_exactly_1(scorer: OcrScorer) -> None:
    assert len(WORDS) >= 24
    missed = [w for w, s in zip(WORDS, score_words(scorer, WORDS), strict=True) if s != 1.0]
    assert missed == []


def test_the_wrong_word_does_not_score_1(scorer: OcrScorer) -> None:
    images = [sign(word) for word in WORDS]
    scores = scorer(images, [prompt(word) for word in WORDS[1:] + WORDS[:1]], [{}] * len(WORDS))
    assert max(scores) < 1.0
    assert np.mean(scores) < 0.3


def test_more_blur_never_scores_higher(scorer: OcrScorer) -> None:
    means = [np.mean(score_words(scorer, WORDS, blur)) for blur in (0.0, 2.0, 4.0, 5.0, 6.0, 8.0)]
    assert means == sorted(means, reverse=True)
    assert means[0] == 1.0
    assert means[-1] < 0.2


@pytest.mark.parametrize("size", [(96, 32), (256, 256)])
def test_blank_pictures_score_0(scorer: OcrScorer, size: tuple[int, int]) -> None:
    colours = ["black", "white", "grey", "red"]
    images = [Image.new("RGB", size, colour) for colour in colours]
    assert scorer(images, [prompt("CAT")] * 4, [{}] * 4) == [0.0] * 4


def test_text_is_found_in_a_large_picture(scorer: OcrScorer) -> None:
    image = Image.new("RGB", (512, 512), (230, 220, 200))
    draw = ImageDraw.Draw(image)
    draw.rectangle((20, 20, 120, 90), fill=(200, 60, 60))
    draw.text((90, 180), "Hello", font=mono_bold(80), fill=(20, 20, 60))
    draw.text((150, 330), "World", font=mono_bold(50), fill=(60, 20, 20))
    prompts = [
        'a poster with "hello"',
        "a poster with “WORLD” on it",
        'a poster, "Hello" above and "World" below',
        'a poster with "hollow"',
    ]
    exact, unicode_quotes, joined, wrong = scorer([image] * 4, prompts, [{}] * 4)
    assert (exact, unicode_quotes, joined) == (1.0, 1.0, 1.0)
    assert wrong < 1.0


def test_a_picture_scores_the_same_alone_and_in_a_batch(scorer: OcrScorer) -> None:
    images = [sign(word, blur) for word in WORDS[:8] for blur in (0.0, 5.0)]
    prompts = [prompt(word) for word in WORDS[:8] for _ in range(2)]
    together = scorer(images, prompts, [{}] * len(images))
    alone = [scorer([i], [p], [{}])[0] for i, p in zip(images, prompts, strict=True)]
    assert together == alone
    assert min(together) < 1.0


def test_other_image_modes_are_read_as_well(scorer: OcrScorer) -> None:
    image = sign("PLANET")
    images = [image.convert(mode) for mode in ("L", "RGBA", "P")]
    assert scorer(images, [prompt("Planet")] * 3, [{}] * 3) == [1.0] * 3


def test_small_signs_pass_at_20_per_second_or_more(scorer: OcrScorer) -> None:
    images, prompts = [sign(word) for word in WORDS] * 4, [prompt(word) for word in WORDS] * 4

    def pictures_per_second() -> float:
        start = time.perf_counter()
        scorer(images, prompts, [{}] * len(images))
        return len(images) / (time.perf_counter() - start)

    # The best of three, because the machine may be busy with something else for a while.
    rates = [pictures_per_second() for _ in range(3)]
    print(f"{max(rates):.0f} signs per second")
    assert max(rates) >= 20


def test_a_corrupt_picture_is_nan_and_the_others_are_scored(
    scorer: OcrScorer, caplog: pytest.LogCaptureFixture
) -> None:
    file = io.BytesIO()
    Image.effect_noise((96, 32), 50).save(file, "PNG")
    truncated = Image.open(io.BytesIO(file.getvalue()[:200]))
    empty = Image.new("RGB", (0, 32))
    images = [sign("CAT"), truncated, sign("DOG"), empty, sign("SUN")]
    scores = scorer(
        images,
        [prompt("CAT"), prompt("DOG"), prompt("DOG"), prompt("SUN"), prompt("SUN")],
        [{}] * 5,
    )
    assert np.isnan(scores).tolist() == [False, True, False, True, False]
    assert scores[::2] == [1.0, 1.0, 1.0]
    assert "picture 1 got no OCR score" in caplog.text


def test_a_prompt_without_quoted_text_is_nan(scorer: OcrScorer) -> None:
    scores = scorer([sign("CAT")] * 2, ["a cat", prompt("CAT")], [{}] * 2)
    assert math.isnan(scores[0])
    assert scores[1] == 1.0


def test_a_worker_killed_at_work_costs_no_score(scorer: OcrScorer) -> None:
    words = WORDS * 8
    before = scorer.pool.pids()
    with ThreadPoolExecutor(1) as thread:
        scores = thread.submit(score_words, scorer, words)
        time.sleep(0.3)
        assert not scores.done()
        os.kill(before[0], signal.SIGKILL)
        assert scores.result() == [1.0] * len(words)
    after = scorer.pool.pids()
    assert len(after) == 2
    assert before[0] not in after


def test_the_workers_run_without_torch(stub_path: None) -> None:
    with stub_pool("modules_after_rapidocr") as pool:
        [modules] = pool.map([""])
    assert "rapidocr" in modules
    assert "torch" not in modules


# The pool, with an engine that does what the job says

STUB = """
    import os, signal, sys, time
    from pathlib import Path

    def obey():
        def engine(job):
            order, _, argument = job.partition(" ")
            if order == "die":
                with open(argument, "a") as tries:
                    tries.write("x")
                os.kill(os.getpid(), signal.SIGKILL)
            if order == "die_once" and not Path(argument).exists():
                Path(argument).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if order == "hang":
                Path(argument).touch()
                time.sleep(1000)
            if order == "raise":
                raise ValueError(argument)
            return f"{len(argument)} read"
        return engine

    def modules_after_rapidocr():
        from flow_grpo.rewards.ocr_engines import rapidocr_reader
        rapidocr_reader("auto")
        return lambda job: list(sys.modules)

    def broken():
        raise FileNotFoundError("no such model")

    def die_at_start(times):
        starts = Path(__file__).with_name("starts")
        with starts.open("a") as file:
            file.write("x")
        if len(starts.read_text()) <= times:
            os._exit(3)
        return obey()
"""


@pytest.fixture
def stub_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stub_engine.py").write_text(textwrap.dedent(STUB))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


def stub_pool(
    engine: str = "obey", *, workers: int = 1, timeout: float = 30.0, **options: int
) -> WorkerPool:
    return WorkerPool(f"stub_engine:{engine}", options, workers=workers, timeout=timeout)


@pytest.mark.usefixtures("stub_path")
class TestPool:
    def test_starts_no_process_before_it_is_used(self) -> None:
        with stub_pool() as pool:
            assert pool.pids() == []
            assert pool.map([]) == []
            assert pool.pids() == []
            assert pool.map(["read x"]) == ["1 read"]
            assert len(pool.pids()) == 1

    def test_keeps_the_order_and_marks_what_failed(self) -> None:
        jobs = ["read " + "x" * n for n in range(40)]
        jobs[7] = "raise it is torn"
        with stub_pool(workers=2) as pool:
            results = pool.map(jobs)
        assert results[7] == Failed("ValueError: it is torn")
        del results[7]
        assert results == [f"{n} read" for n in range(40) if n != 7]

    def test_tries_a_job_again_after_its_worker_died(self, tmp_path: Path) -> None:
        marker = tmp_path / "tried"
        with stub_pool() as pool:
            pool.map(["read x"])
            before = pool.pids()
            results = pool.map([f"die_once {marker}"] + ["read x"] * 20)
            assert pool.pids() != before
        assert marker.exists()
        assert results == [f"{len(str(marker))} read"] + ["1 read"] * 20

    def test_fails_only_the_job_that_two_workers_died_on(self, tmp_path: Path) -> None:
        tries = tmp_path / "tries"
        jobs = ["read x"] * 20
        jobs[3] = f"die {tries}"
        with stub_pool(workers=2) as pool:
            results = pool.map(jobs)
            assert pool.map(["read xy"]) == ["2 read"]
        assert isinstance(results.pop(3), Failed)
        assert results == ["1 read"] * 19
        assert tries.read_text() == "xx"

    def test_replaces_a_worker_killed_while_idle(self) -> None:
        with stub_pool() as pool:
            for _ in range(3):
                assert pool.map(["read x"]) == ["1 read"]
                os.kill(pool.pids()[0], signal.SIGKILL)

    def test_fails_only_the_job_that_hangs(self, tmp_path: Path) -> None:
        jobs = ["read x"] * 20
        jobs[3] = f"hang {tmp_path / 'hanging'}"
        with stub_pool(timeout=2.0) as pool:
            pool.map(["read x"])
            start = time.monotonic()
            results = pool.map(jobs)
            assert 2.0 <= time.monotonic() - start < 15.0
        assert results.pop(3) == Failed("no answer within 2 s")
        assert results == ["1 read"] * 19

    def test_does_not_wait_for_a_stopped_worker_to_take_its_job(self) -> None:
        large = "read " + "x" * 10_000_000  # no pipe holds that
        with stub_pool(timeout=2.0) as pool:
            pool.map(["read x"])
            os.kill(pool.pids()[0], signal.SIGSTOP)
            assert pool.map([large]) == ["10000000 read"]

    def test_serves_several_threads(self) -> None:
        def call(n: int) -> list[str]:
            return pool.map([f"read {'x' * n}"] * 30)

        with stub_pool(workers=2) as pool, ThreadPoolExecutor(8) as threads:
            assert list(threads.map(call, range(8))) == [[f"{n} read"] * 30 for n in range(8)]

    def test_says_why_an_engine_cannot_be_set_up(self) -> None:
        with stub_pool("broken", workers=2) as pool:
            for _ in range(2):
                with pytest.raises(UserError, match="FileNotFoundError: no such model"):
                    pool.map(["read x"] * 20)

    def test_starts_a_worker_again_that_died_at_its_start(self, tmp_path: Path) -> None:
        with stub_pool("die_at_start", times=2) as pool:
            assert pool.map(["read x"]) == ["1 read"]
        assert (tmp_path / "starts").read_text() == "xxx"

    def test_gives_up_on_workers_that_never_start(self, tmp_path: Path) -> None:
        never = pytest.raises(UserError, match="3 worker processes")
        with stub_pool("die_at_start", times=99) as pool, never:
            pool.map(["read x"] * 20)
        assert (tmp_path / "starts").read_text() == "xxx"

    def test_closing_ends_its_processes_and_frees_who_waits(self, tmp_path: Path) -> None:
        pool = stub_pool()
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(pool.map, [f"hang {tmp_path / 'hanging'}"] * 20)
            wait_until((tmp_path / "hanging").exists)
            pids = pool.pids()
            start = time.monotonic()
            pool.close()
            assert time.monotonic() - start < 10.0
            with pytest.raises(PoolClosed):
                waiting.result(timeout=10)
        assert len(pids) == 1
        assert not is_running(pids[0])
        with pytest.raises(PoolClosed):
            pool.map(["read x"])

    @pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes in /proc")
    def test_workers_do_not_outlive_a_killed_parent(self, tmp_path: Path) -> None:
        # Without a `__main__` guard, and it would be slow if the workers imported it too.
        script = tmp_path / "trainer.py"
        script.write_text(
            textwrap.dedent(f"""
            import threading, time
            from flow_grpo.rewards.pool import WorkerPool

            pool = WorkerPool("stub_engine:obey", {{}}, workers=2, timeout=1000)
            jobs = ["hang {tmp_path / "a"}", "hang {tmp_path / "b"}"]
            threading.Thread(target=pool.map, args=(jobs,), daemon=True).start()
            while len(pool.pids()) < 2:
                time.sleep(0.01)
            print(*pool.pids(), flush=True)
            time.sleep(1000)
            """)
        )
        parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        wait_until(lambda: (tmp_path / "a").exists() and (tmp_path / "b").exists())
        assert [is_running(pid) for pid in pids] == [True, True]
        parent.kill()
        parent.communicate()
        wait_until(lambda: not any(is_running(pid) for pid in pids))


# PaddleOCR, where it is installed, with the weights of RapidOCR's wheel


def write_paddle_models(folder: Path) -> dict[str, str]:
    onnxruntime, yaml = pytest.importorskip("onnxruntime"), pytest.importorskip("yaml")
    import rapidocr

    weights = Path(rapidocr.__file__).parent / "models"
    recogniser = weights / "PP-OCRv6_rec_small.onnx"
    characters = onnxruntime.InferenceSession(recogniser).get_modelmeta().custom_metadata_map
    decode = {"DecodeImage": {"channel_first": False, "img_mode": "BGR"}}
    normalise = {"mean": [0.5] * 3, "std": [0.5] * 3, "scale": "1./255.", "order": "hwc"}
    transforms = {
        "det": [
            decode,
            {"DetResizeForTest": None},
            {"NormalizeImage": normalise},
            {"ToCHWImage": None},
        ],
        "rec": [decode, {"RecResizeImg": {"image_shape": [3, 48, 320]}}],
    }
    decoders = {
        "det": {"name": "DBPostProcess"},
        "rec": {
            "name": "CTCLabelDecode",
            "character_dict": characters["character"].splitlines(),
        },
    }
    for kind in ("det", "rec"):
        (folder / kind).mkdir()
        model = (weights / f"PP-OCRv6_{kind}_small.onnx").read_bytes()
        (folder / kind / "inference.onnx").write_bytes(model)
        settings = {
            "Global": {"model_name": f"PP-OCRv6_small_{kind}"},
            "PreProcess": {"transform_ops": transforms[kind]},
            "PostProcess": decoders[kind],
        }
        (folder / kind / "inference.yml").write_text(yaml.safe_dump(settings))
    return {f"{kind}_model_dir": str(folder / kind) for kind in ("det", "rec")}


@pytest.mark.slow
def test_paddleocr_reads_signs_and_large_pictures(tmp_path: Path) -> None:
    pytest.importorskip("paddleocr")
    poster = Image.new("RGB", (512, 512), "white")
    ImageDraw.Draw(poster).text((60, 200), "Hello", font=mono_bold(90), fill="black")
    images = [*map(sign, WORDS), poster, Image.new("RGB", (96, 32))]
    prompts = [*map(prompt, WORDS), prompt("hello"), prompt("CAT")]
    with OcrScorer(engine="paddleocr", workers=1, **write_paddle_models(tmp_path)) as scorer:
        scores = scorer(images, prompts, [{}] * len(images))
    assert scores == [1.0] * (len(WORDS) + 1) + [0.0]
