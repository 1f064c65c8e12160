"""The documentation: links, tables, the site, and the arguments of every command on its pages.

Commands are checked without running them; test_walkthrough.py, test_notebook.py and the quickstart
run some.
"""

import argparse
import importlib.util
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
from absl import flags
from ml_collections import ConfigDict, config_flags
from runner import ROOT

from flow_grpo.config.command import COPY, LOOPS, list_commands
from flow_grpo.config.command_line import expand_shorthand
from flow_grpo.diffusion import config_checks as diffusion_checks
from flow_grpo.diffusion import presets as diffusion_presets
from flow_grpo.diffusion.fields import DIFFUSION_SPEC
from flow_grpo.diffusion.plan import BatchPlan
from flow_grpo.vlm import config_checks as vlm_checks
from flow_grpo.vlm import presets as vlm_presets
from reward_server import arguments as server_arguments

sys.path.insert(0, str(ROOT / "docs"))
import make_benchmarks
import make_quality_benchmarks
import make_results
import make_tasks

GLOBS = (
    "*.md",
    "docs/**/*.md",
    "assets/*/README.md",
    "dataset/README.md",
    "reward_server/README.md",
)
PAGES = sorted(str(p.relative_to(ROOT)) for pattern in GLOBS for p in ROOT.glob(pattern))
TASKS = sorted((ROOT / "docs/tasks").glob("*.md"))


def anchors(page: Path) -> set[str]:
    """Return the anchors that Git forges derive from the headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_resolve(name):
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("folder", ["docs", "docs/methods"])
def test_the_index_has_every_page(folder):
    index = (ROOT / folder / "README.md").read_text("utf-8")
    for page in (ROOT / folder).glob("*.md"):
        assert page.name == "README.md" or f"]({page.name}" in index, page.name


@pytest.mark.parametrize("name", [name for name in PAGES if name != "CHANGELOG.md"])
def test_a_page_has_at_most_300_lines(name):
    assert len((ROOT / name).read_text("utf-8").splitlines()) <= 300


def test_the_navigation_has_four_parts():
    text = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    parts = re.findall(r"^  - ([\w ]+):", text, re.M)
    assert parts == ["Home", "Get started", "Guides", "Reference", "Background"]


def test_the_page_of_the_command_line_has_every_command():
    text = (ROOT / "docs/cli.md").read_text("utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| .+ \| `flow-grpo ([\w-]+) ?.*` \|$", text, re.M)
    assert all(name == example for name, example in rows)
    assert sorted(name for name, _ in rows) == sorted([*list_commands(), COPY])


@pytest.mark.parametrize("name", PAGES)
def test_numbers_have_a_leading_zero(name):
    assert re.findall(r"(?<![\w.])\.\d+", (ROOT / name).read_text("utf-8")) == []


def test_the_site_has_every_page_and_no_dead_link(tmp_path):
    """The strict build also checks links to anchors and images."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "docs/tasks/sd3_ocr/index.html").is_file()
    assert "before_after" in (tmp_path / "index.html").read_text("utf-8")
    assert (tmp_path / "search/search_index.json").stat().st_size > 100_000


# --- tables and hours ------------------------------------------------------------------------


@pytest.mark.parametrize("name", make_benchmarks.PAGES)
def test_benchmark_tables_are_up_to_date(name):
    """If not: python docs/make_benchmarks.py"""
    text = (ROOT / "docs" / name).read_text("utf-8")
    assert "<!-- table " in text
    assert make_benchmarks.page(text) == text


@pytest.mark.parametrize("name", make_results.PAGES)
def test_result_tables_are_up_to_date(name):
    """If not: python docs/make_results.py"""
    text = (ROOT / "docs/results" / name).read_text("utf-8")
    assert "<!-- runs " in text
    assert make_results.page(text) == text


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_hours_are_up_to_date(path):
    """If not: python docs/make_tasks.py"""
    text = path.read_text("utf-8")
    assert make_tasks.page(text, make_tasks.read_measurements()) == text


def measured(**settings) -> make_tasks.Line:
    found = {
        **{"model": "sd3.5-medium", "size": "512x512", "weights": "LoRA r 32", "compile": True},
        **{"memory_gib": None, "gradient_checkpointing": False},
        **{"guidance": 4.5, "guidance_gradient": "both", "beta": 0.04, "steps": 5, "batch": 9},
        **settings,
    }
    return {
        **{"date": "2026-01-01", "file": "some.jsonl", "full_s_per_sample": {}, "peak_gib": 30.0},
        "device": "GPU",
        **{"sampling_s_per_image": {"median": 0.1}, "trained_step_s_per_sample": {"median": 0.03}},
        "settings": found,
    }


def test_hours_of_a_run_in_closed_form():
    config = make_tasks.config_of("general_ocr_sd3", 8, {})
    line = measured()
    # 10 steps of 0.02 s, 9 trained ones of 0.03 s; 48 x 24 samples are 144 for each of 8 GPUs
    assert make_tasks.sample_seconds(line, config) == pytest.approx((0.2, 0.27))
    assert make_tasks.epoch_seconds(line, config, 8) == pytest.approx(144 * 0.47)
    # 1,000 prompts of 40 steps; before the first epoch, and after 30 and 60
    assert make_tasks.count_tests(config) == 1000  # of dataset/ocr_full
    assert make_tasks.evaluation_seconds(line, config, 8, 1000) == pytest.approx(100)
    hours = make_tasks.hours(line, config, 8, 60, 1000)
    assert hours == pytest.approx((60 * 144 * 0.47 + 300) / 3600)


def test_long_durations_are_also_given_in_days():
    assert make_tasks.duration(17.4) == "17 h"
    assert make_tasks.duration(134) == "134 h (5.6 days)"


def test_hours_use_the_test_prompts_of_the_command_on_the_page():
    config = make_tasks.config_of("geneval_sd3", 8, {})
    assert make_tasks.count_tests(config, 5000) == 5000
    with pytest.raises(ValueError, match="tests=N"):
        make_tasks.count_tests(config)
    config.eval_prompts = 1000
    assert make_tasks.count_tests(config, 5000) == 1000


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_commands_evaluate_as_many_prompts_as_the_hours_assume(path):
    """The commands of "Do this" have the `eval_prompts` of the page's tables, or none."""
    text = path.read_text("utf-8")
    counted = {*re.findall(r"<!-- hours .*?eval_prompts=(\d+)", text)}
    tables = re.findall(r"<!-- hours (.*?) -->", text)
    assert len(counted) <= 1
    assert not counted or all("eval_prompts" in table for table in tables)
    commands = re.findall(r"(?m)^ +((?:bash|python|torchrun) (?:.*\\\n)*.*)", text)
    runs = [each for each in commands if "run_name" in each]
    assert bool(runs) == bool(tables)
    for each in runs:
        assert {*re.findall(r"eval_prompts=(\d+)", each)} == counted, each
    written = re.search(r"make_prompts.py coco \S+ --size (\d+)", text)
    if written:
        assert f"tests={int(written[1]) // 10} " in tables[0]


def test_a_page_states_the_memory_of_each_gpu_and_how_to_measure_it():
    line = {**measured(), "peak_gib": 30.2}
    line["settings"]["batch"] = 9
    config = make_tasks.config_of("general_ocr_sd3", 8, {})
    lines = make_tasks.advice("general_ocr_sd3", config, 8, line, " --config.height=64")
    assert re.findall(r"[\d.]+(?= GiB)", "\n".join(lines)) == ["40.6", "30.2", "10.4"]
    assert lines[-2].endswith(" --config.height=64 --dry_run")
    assert lines[-1].endswith("general_ocr_sd3 --config.height=64 --dry_run --world_size=8")
    lines = make_tasks.advice("general_ocr_sd3", config, 1, line, "", reward_gib=4)
    assert re.findall(r"[\d.]+(?= GiB)", "\n".join(lines)) == ["44.6", "30.2", "4", "10.4"]
    assert not any("--world_size" in each for each in lines)
    config.sample.train_batch_size = 4
    lines = make_tasks.advice("general_ocr_sd3", config, 8, line, "")
    assert "at batch 9 (the preset has 4)" in lines[1]


def test_hours_of_a_vlm_run_in_closed_form():
    config = make_tasks.config_of("qwen2_5_vl_3b_geometry3k", 8, {})
    line = {"shape": "", "sampling_s_per_answer": 0.1, "training_s_per_answer": 0.2}
    assert make_tasks.epoch_seconds(line, config, 8) == pytest.approx(512 * 5 / 8 * 0.3)
    assert make_tasks.evaluation_seconds(line, config, 8, 1000) == pytest.approx(12.5)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "flux.1-dev"},
        {"size": "1024x1024"},
        {"guidance": 1.0},
        {"guidance_gradient": "conditional"},
        {"beta": 0.0},
        {"weights": "LoRA r 64"},
        {"compile": False},
        {"precision": "no"},
        {"sharded": True},
        {"memory_gib": 24.0},
        {"gradient_checkpointing": True},
        {"algorithm": "nft"},
    ],
)
def test_a_measurement_with_other_settings_is_not_used(other):
    config = make_tasks.config_of("general_ocr_sd3", 1, {})
    old, new = measured(), measured() | {"peak_gib": 31.0}
    assert make_tasks.newest([old, new, measured(**other)], config) is new
    assert make_tasks.newest([measured(**other)], config) is None
    assert "not measured" in make_tasks.table("general_ocr_sd3", [1], [1], {}, [])


# --- commands --------------------------------------------------------------------------------

PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:python|\.venv/bin/python|bash|flow-grpo|torchrun|sbatch|pip|hf) "
)
CONFIGS = {"config/grpo.py": diffusion_presets, "config/vlm.py": vlm_presets}
EXAMPLES = (
    "--config.save_dir",  # an error message
    "algorithm=positive",  # the example algorithm of its page
    *("my_config.py", "mine.py", "make_csv.py"),  # test_walkthrough.py
    *("grpo.sh", "scripts/train_sd3"),  # scripts of Flow-GRPO
    "engine=vllm",  # not installed in the test environment
)

CREATED = ("pretrained.model=words", "lora_path=logs/")  # created by an earlier command of the page


def shell_commands(text: str) -> list[str]:
    """Return the commands of a page, in code blocks and inline."""
    text = re.sub(r" *\\\n *", " ", text)
    blocks = re.findall(r"^(?: {4,}|\$ )(?:\$ )?(.+)$", text, re.M)
    fences = re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.S)
    lines = [*blocks, *(line for fence in fences for line in fence.splitlines())]
    return [line for line in [*lines, *re.findall(r"`([^`\n]+)`", text)] if PROGRAM.match(line)]


def extras() -> set[str]:
    setup = (ROOT / "setup.py").read_text("utf-8").partition("extras_require")[2]
    return set(re.findall(r'^ {8}"(\w+)": ', setup, re.M))


def get_config(path: str, script: str) -> ConfigDict:
    file, _, preset = path.partition(":")
    if path == "..." or preset == "PRESET":
        file, preset = ("vlm", "tiny_vlm") if "vlm" in script else ("grpo", "tiny_ocr")
        file = f"config/{file}.py"
    if file == "config/base.py":  # all fields at their defaults
        return DIFFUSION_SPEC.get_config()
    return CONFIGS[file].get_config(preset)


def check_config(script: str, path: str, options: list[str], monkeypatch) -> None:
    """Check that the config fields exist and that their values are valid and compatible."""
    config, values = get_config(path, script), flags.FlagValues()
    options = [
        o for o in options if o != "--config..." and not any(value in o for value in CREATED)
    ]
    if any("path/to/" in o for o in options if re.match("--config.custom_[alm]", o)):
        options = []  # a custom class that does not exist may add fields and values
    options = [expand_shorthand(option) for option in options]
    monkeypatch.setattr(sys, "argv", [script, *options])  # ml_collections reads sys.argv
    config_flags.DEFINE_config_dict("config", config, flag_values=values)
    values(sys.argv)
    # these scripts are for both trainers
    if "vlm" in script or (script in ("evaluate", "plan") and "vlm.py" in path):
        vlm_checks.check_config(values.config)
        return
    settings = diffusion_checks.check_config(values.config)
    if settings.is_offline:  # its batches depend on the data
        return
    numbers = {f.name: f.metadata["config"] for f in fields(BatchPlan) if "config" in f.metadata}
    found = {name: getattr(getattr(settings, s), f) for name, (s, f) in split(numbers).items()}
    processes = re.search(r"_(\d+)gpu$", path)
    BatchPlan(num_processes=int(processes[1]) if processes else 1, **found)


def split(names: dict[str, str]) -> dict[str, list[str]]:
    return {name: field.split(".") for name, field in names.items()}


class Parsed(Exception):
    """Raised once the command line is parsed, to end the script."""


def check_options(path: Path, arguments: list[str], monkeypatch) -> None:
    """Check options with the script's own parser."""

    def parse(self, args=None, namespace=None):
        original(self, args, namespace)
        raise Parsed

    original = argparse.ArgumentParser.parse_known_args
    spec = importlib.util.spec_from_file_location(f"of_docs_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
        patch.setattr(sys, "argv", [str(path), *arguments])
        spec.loader.exec_module(module)
        with pytest.raises(Parsed):
            getattr(module, "parse_args", getattr(module, "main", None))()


def check_script(path: Path, arguments: list[str], monkeypatch) -> None:
    """Check the options and config fields of a Python script."""
    assert path.is_file(), path
    source = path.read_text("utf-8")
    if "Parser(" in source and path.parent.name != "gpu":
        check_options(path, [a for a in arguments if not a.startswith("--config.")], monkeypatch)
    if "Parser(" in source or "command_line" not in source:
        return
    source += (ROOT / "flow_grpo/config/command_line.py").read_text("utf-8")
    if "import benchmark as" in source:  # its options are options of this script
        source += (ROOT / "scripts/benchmark.py").read_text("utf-8")
    known = {"help", *re.findall(r'\bDEFINE_\w+\(\s*"(\w+)"', source)}
    names = {a.removeprefix("--").partition("=")[0] for a in arguments if a.startswith("--")}
    assert {name for name in names if not name.startswith("config.")} <= known
    default = "config/grpo.py:benchmark_sd3" if path.stem == "benchmark" else "..."
    config = arguments[arguments.index("--config") + 1] if "--config" in arguments else default
    options = [a for a in arguments if a.startswith("--config.")]
    if config not in CONFIGS:  # all fields at their defaults
        check_config(path.stem, config, options, monkeypatch)


def check_shell(path: str, arguments: list[str], monkeypatch) -> None:
    """Check the arguments of a shell script, which starts a Python script."""
    assert (ROOT / path).is_file(), path
    options = [a for a in arguments if a.startswith("--config.")]
    if "single_node" in path:
        config = arguments[0] if ".py" in arguments[0] else f"config/grpo.py:{arguments[0]}"
        config = "..." if arguments[0] == "PRESET" else config
        check_config("train_vlm" if "vlm" in config else "train", config, options, monkeypatch)
    elif path.endswith("quickstart.sh"):
        preset = arguments[0] if arguments and not arguments[0].startswith("-") else "tiny_awm"
        preset = {"edit": "tiny_edit"}.get(preset, preset)
        config = "vlm.py:tiny_vlm" if preset == "vlm" else f"grpo.py:{preset}"
        check_config(config, f"config/{config}", options, monkeypatch)
    elif "--config" in arguments:  # several nodes
        script = next((a for a in arguments if a.endswith(".py")), "scripts/train.py")
        check_script(ROOT / script, arguments[arguments.index("--config") :], monkeypatch)
    assert all((ROOT / a).exists() for a in arguments if a.startswith("tests/"))


def check_command(line: str, monkeypatch) -> None:
    words = shlex.split(line.replace("[--", "--").replace("] --", " --").rstrip("]"), comments=True)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    words = words[: words.index("&&") if "&&" in words else None]
    # "..." stands for a config or for other arguments
    words = [w for before, w in pairwise(["", *words]) if w != "..." or before == "--config"]
    program, *rest = words
    if program == "pip":
        groups = re.findall(r"\.\[([\w,]+)\]", line)
        assert {name for each in groups for name in each.split(",")} <= extras(), line
    elif program == "hf":
        assert rest[0] in ("auth", "download", "upload"), line
    elif program == "flow-grpo":
        if rest[0] == COPY:
            assert rest[1] in LOOPS, line
        elif not rest[0].startswith("-"):
            check_script(list_commands()[rest[0]], rest[1:], monkeypatch)
    elif program in ("bash", "sbatch"):
        check_shell(rest[0], rest[1:], monkeypatch)
    elif rest[:2] == ["-m", "reward_server"]:
        server_arguments.parse_args(rest[2:])
    else:
        scripts = [n for n, word in enumerate(rest) if word.endswith(".py")]
        last = scripts[-1] if scripts else None
        assert last is not None or rest[0] == "-m", line
        if last is not None:
            check_script(ROOT / rest[last], rest[last + 1 :], monkeypatch)


# Commands of earlier versions, and of other projects (tests/scripts/test_migrate.py).
FOREIGN = ("CHANGELOG.md", "docs/migrating/readmes.md")


@pytest.mark.parametrize("name", [name for name in PAGES if name not in FOREIGN])
def test_commands_have_valid_arguments(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    for line in shell_commands((ROOT / name).read_text("utf-8")):
        if any(example in line for example in EXAMPLES):
            continue
        try:
            check_command(line, monkeypatch)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{line}\n{error!r}")


def test_the_tables_of_benchmark_protocols_are_up_to_date():
    """If not: python docs/make_quality_benchmarks.py"""
    text = make_quality_benchmarks.PAGE.read_text("utf-8")
    assert text.count("<!-- protocols ") == text.count("<!-- end -->") >= 3
    assert make_quality_benchmarks.page(text) == text
