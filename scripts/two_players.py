"""Alternately train a prompt enhancer and the diffusion model that draws its prompts.

    python scripts/two_players.py --seeds 1 2 3 --rounds 2 --out two_players \\
        [--enhancer-config config/vlm.py:tiny_enhancer] [--diffusion-config config/grpo.py:tiny_ocr]

In each round, the enhancer is trained on images of the current diffusion model. It then rewrites
the training requests, and the diffusion model is trained on the rewritten prompts; its images are
scored against the users' prompts. The table contains the held-out scores of all four combinations:
neither, the enhancer, the diffusion LoRA, and both. OUT.png shows images of the first seed. To
resume an interrupted run, repeat the command.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from compare_utils import format_range, make_directories, run_comparison, write_results

from flow_grpo.atomic_io import write_text_atomic
from flow_grpo.config.error_reporting import ScriptParser
from flow_grpo.config.saved_config import load_run_config
from flow_grpo.data.questions import Question, load_split
from flow_grpo.errors import UserError
from flow_grpo.hub_access import DEFAULT_REVISION
from flow_grpo.report.console import markdown_table
from flow_grpo.report.grid import comparison_grid, format_score
from flow_grpo.report.run_reader import read_metrics
from flow_grpo.rewards import TOTAL
from flow_grpo.rewards.draw_settings import DrawSettings, draw_settings
from flow_grpo.rewards.drawn_names import drawn_names
from flow_grpo.rewards.scorers.ocr import OcrScorer
from flow_grpo.rewards.text.response_format import extract_prompt
from flow_grpo.untrusted_files import read_json
from flow_grpo.vlm.config_checks import check_config
from flow_grpo.vlm.fields import VLM_SPEC, VlmConfig
from flow_grpo.vlm.questions import question_layout

SCRIPTS = Path(__file__).resolve().parent
TARGET = "target"  # column with the prompt that images of a rewritten prompt are scored against
COMBINATIONS = ("neither", "enhancer", "diffusion LoRA", "both")
SPLITS = ("train", "test")
SEEDS_PER_ROUND = 1000


class Players(NamedTuple):
    """Directories with the weights of both models after a round."""

    enhancer: Path
    lora: Path


class OcrOfRequest(OcrScorer):
    """OCR reward that scores images of rewritten prompts against the column `target`."""

    def __call__(self, images, prompts, metadata):
        return super().__call__(images, [row[TARGET] for row in metadata], metadata)

    def skip_reason(self, prompt, metadata):
        return super().skip_reason(metadata.get(TARGET, ""), metadata)


def run(script: str, *arguments: str) -> None:
    """Run a script of this repository; raise a UserError if it fails."""
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    if code := subprocess.call(command):
        raise UserError(f"failed with exit code {code}", field=" ".join(command[1:]))


def train(script: str, config: str, folder: Path, epochs: int, **fields: Any) -> Path:
    """Train a run unless it is finished, and return the directory of its weights.

    Args:
        script: The training script.
        config: Its config file.
        folder: Directory of the run; an interrupted run is resumed.
        epochs: Number of epochs; the run is evaluated before the first and after the last one.
        fields: Config fields, with `__` instead of each dot.
    """
    from flow_grpo.training.checkpoint import find_weights  # imports torch

    if not is_finished(folder, epochs):
        fields |= {"logdir": folder.parent, "run_name": folder.name, "resume": "auto"}
        fields |= dict.fromkeys(("num_epochs", "eval_freq", "save_freq"), epochs)
        options = [f"--config.{k.replace('__', '.')}={v}" for k, v in fields.items()]
        run(script, f"--config={config}", *options)
    return find_weights(folder)


def is_finished(folder: Path, epochs: int) -> bool:
    """Return whether a run completed all epochs; interrupted runs may have checkpoints, too."""
    rows = read_metrics(folder) if (folder / "metrics.jsonl").is_file() else []
    return bool(rows) and rows[-1]["epoch"] >= epochs


def train_round(
    args: argparse.Namespace, folder: Path, seed: int, before: Players | None
) -> Players:
    """Train both models once and return their weights.

    Args:
        args: Arguments of the command.
        folder: Directory of the rewritten prompts; its name is the prefix of both run names.
        seed: Seed of both runs.
        before: Weights of the previous round, which both models continue from, or None.
    """
    own = {"pretrained__model": before.enhancer, "draw__lora": before.lora} if before else {}
    enhancer = train(
        "train_vlm.py",
        args.enhancer_config,
        Path(f"{folder}-enhancer"),
        args.enhancer_epochs,
        dataset=args.data,
        seed=seed,
        **own,
    )
    lora = train(
        "train.py",
        args.diffusion_config,
        Path(f"{folder}-diffusion"),
        args.diffusion_epochs,
        dataset=rewrite(Path(f"{folder}-enhancer"), enhancer, args.data, folder / "prompts"),
        seed=seed,
        custom_rewards={"request": f"{Path(__file__).resolve()}:OcrOfRequest"},
        reward_fn={"request": 1.0},
        eval_prompts=1,
        **({"train__lora_path": before.lora} if before else {}),
    )
    return Players(enhancer, lora)


def rewrite(run: Path, weights: Path, data: Path, out: Path) -> Path:
    """Rewrite the requests of a dataset greedily and write them as a dataset of prompts.

    Args:
        run: Directory of the enhancer's run, whose settings apply.
        weights: Weights of the enhancer.
        data: Dataset of requests.
        out: Dataset to write, unless it is complete.
    """
    if not (out / f"{SPLITS[-1]}.jsonl").exists():
        out.mkdir(parents=True, exist_ok=True)
        config = trained_config(run, weights)
        for split in SPLITS:
            questions = load_requests(config, data, split)
            prompts = generate(config, questions)
            written = [
                {"prompt": prompt, TARGET: question.metadata["prompt"]}
                for prompt, question in zip(prompts, questions, strict=True)
                if prompt
            ]
            text = "".join(json.dumps(row) + "\n" for row in written)
            write_text_atomic(out / f"{split}.jsonl", text)
    return out


def trained_config(run: Path, weights: Path) -> VlmConfig:
    """Return the settings of an enhancer's run, with its trained weights as the model."""
    config = check_config(load_run_config(run, VLM_SPEC))
    pretrained = replace(config.pretrained, model=str(weights), revision=DEFAULT_REVISION)
    return replace(config, pretrained=pretrained)


def load_requests(config: VlmConfig, data: Path, split: str) -> list[Question]:
    """Load the requests of a split as the enhancer's training does.

    Raises:
        UserError: If a row has images, or no prompt to score the images against.
    """
    questions = load_split(data, split, question_layout(config))
    for question in questions:
        if question.shown:
            raise UserError("has images, which this script does not support", field=question.where)
        if not isinstance(question.metadata.get("prompt"), str):
            raise UserError('has no text in the column "prompt"', field=question.where)
    return questions


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def generate(config: VlmConfig, requests: list[Question], batch_size: int = 64) -> list[str]:
    """Return the greedy rewrites of requests; a rewrite may be empty.

    The chats are built as in training, with its system prompt, question format and template.
    """
    import torch

    from flow_grpo.training.builder import DTYPES
    from flow_grpo.vlm.builders import build_encoder, load_checked_processors
    from flow_grpo.vlm.models import load_model

    processors = load_checked_processors(config, requests)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = load_model(config.pretrained.model, device, DTYPES[config.mixed_precision])
    encoder = build_encoder(config, processors, network)
    prompts = []
    for start in range(0, len(requests), batch_size):
        chats = [encoder.encode(each).ids.tolist() for each in requests[start:][:batch_size]]
        inputs = encoder.tokenizer.pad(
            {"input_ids": chats}, padding_side="left", return_tensors="pt"
        ).to(device)
        with torch.inference_mode():
            tokens = network.generate(
                **inputs, do_sample=False, max_new_tokens=config.sample.max_new_tokens
            )
        responses = tokens[:, inputs["input_ids"].shape[1] :]
        texts = encoder.tokenizer.batch_decode(responses, skip_special_tokens=True)
        prompts += map(extract_prompt, texts)
    return prompts


def evaluate(args: argparse.Namespace, folder: Path, players: Players) -> list[float]:
    """Return the held-out scores of the combinations, in the order of COMBINATIONS."""
    scores = []
    for name, lora in (("frozen", ""), ("trained", players.lora)):
        out = folder / f"eval-{name}"
        run(
            "evaluate.py",
            f"--config={args.enhancer_config}",
            f"--checkpoint=base,{players.enhancer}",
            f"--out={out}",
            f"--config.dataset={args.data}",
            f"--config.draw.lora={lora}",
        )
        candidates = json.loads((out / "results.json").read_text("utf-8"))["candidates"]
        scores += [each["scores"][TOTAL]["mean"] for each in candidates]  # base first
    return scores


def save_pictures(folder: Path, players: Players, out: Path, count: int = 8) -> None:
    """Save a grid with images of held-out requests, with one column per combination.

    Args:
        folder: Directory of the round, with the evaluations of its players.
        players: Weights of the round.
        out: PNG file to write.
        count: Number of requests, which are evenly spaced.
    """
    import torch

    from flow_grpo.diffusion.renderer import DiffusionRenderer  # imports torch
    from flow_grpo.rewards.drawn import DrawnImages

    config = json.loads(Path(f"{folder}-enhancer/config.json").read_text("utf-8"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    columns, captions = {}, {}
    for name, lora in (("frozen", ""), ("trained", players.lora)):
        settings = drawing_settings(config, str(lora))
        drawn = DrawnImages(settings, DiffusionRenderer(settings, settings.device or device))
        rows = read_rows(folder / f"eval-{name}/samples.jsonl")
        half = len(rows) // 2  # the initial enhancer first
        for part in rows[:half], rows[half:]:
            shown = part[:: max(1, half // count)][:count]
            requests = [row["prompt"] for row in shown]
            prompts = [extract_prompt(row["answer"]) for row in shown]
            heading = COMBINATIONS[len(columns)]
            columns[heading] = drawn.draw(prompts, requests)[:: settings.images]
            captions[heading] = [
                [prompt, format_score(row["scores"][TOTAL])]
                for prompt, row in zip(prompts, shown, strict=True)
            ]
    comparison_grid(columns, requests, captions).save(out)


def drawing_settings(config: Mapping[str, Any], lora: str) -> DrawSettings:
    """Return the settings that an enhancer's images are drawn with.

    Args:
        config: Config of the enhancer.
        lora: Weights to load into the diffusion model; empty for none.

    Raises:
        UserError: If no reward draws, or the diffusion model is missing.
    """
    weights = config["eval_reward_fn"] or config["reward_fn"]
    drawn = [name for name in drawn_names(weights) if not config["reward_servers"].get(name)]
    if not drawn:
        raise UserError("has no reward drawn:NAME in this process", field="--enhancer-config")
    draw = DrawSettings(**{**config["draw"], "lora": lora})
    return draw_settings(drawn[0], draw, config["reward_options"].get(drawn[0], {}))


def play(args: argparse.Namespace, seed: int) -> tuple[Path, Players]:
    """Alternately train both models with one seed.

    Returns:
        The directory of the last round, and its weights.
    """
    players = None
    for number in range(args.rounds):
        folder = args.logdir / f"seed{seed}-round{number + 1}"
        # each round uses another order of the requests and different noise
        players = train_round(args, folder, seed + SEEDS_PER_ROUND * number, players)
    return folder, players


def parse_args() -> argparse.Namespace:
    """Return the arguments."""
    parser = ScriptParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--enhancer-epochs", type=int, default=6, help="per round")
    parser.add_argument("--diffusion-epochs", type=int, default=3, help="per round")
    parser.add_argument("--enhancer-config", default="config/vlm.py:tiny_enhancer")
    parser.add_argument("--diffusion-config", default="config/grpo.py:tiny_ocr")
    requests = "requests with the columns question and prompt"
    parser.add_argument("--data", type=Path, default=Path("dataset/sign_requests"), help=requests)
    parser.add_argument("--out", type=Path, default=Path("two_players"))
    parser.add_argument("--logdir", type=Path, default=Path("logs/two_players"))
    args = parser.parse_args()
    for name in ("rounds", "enhancer_epochs", "diffusion_epochs"):
        if getattr(args, name) < 1:
            option = f"--{name.replace('_', '-')}"
            raise UserError("must be at least 1", field=option, value=getattr(args, name))
    for split in SPLITS:
        if not (args.data / f"{split}.jsonl").is_file():
            rule = f"has no file {split}.jsonl"
            raise UserError(rule, field="--data", value=str(args.data))
    check_enhancer(args.enhancer_config, args.data)
    args.logdir = args.logdir.resolve()
    return args


def check_enhancer(path: str, data: Path) -> None:
    """Reject an enhancer that this script cannot train, and requests that it cannot rewrite."""
    from flow_grpo.diffusion.config_loading import load_config_file  # slow import

    config = load_config_file(path, [], VLM_SPEC)
    if config.use_lora:
        raise UserError(
            "trains a LoRA (use_lora=True), but this script needs complete weights",
            field="--enhancer-config",
            value=path,
            hint="set use_lora=False in the config file",
        )
    drawing_settings(config.to_dict(), lora="")
    for split in SPLITS:
        load_requests(check_config(config), data, split)


def check_same_settings(args: argparse.Namespace) -> None:
    """Record the settings of the runs in --logdir; reject runs with other settings."""
    names = ("enhancer_epochs", "diffusion_epochs", "enhancer_config", "diffusion_config", "data")
    wanted = {name: str(getattr(args, name)) for name in names}
    path = args.logdir / "settings.json"
    if not path.exists():
        if any(args.logdir.glob("seed*-round*")):
            raise UserError(
                "has runs, but no settings.json",
                field="--logdir",
                value=str(args.logdir),
                hint="choose another directory",
            )
        write_text_atomic(path, json.dumps(wanted, indent=1) + "\n")
    for name, old in read_json(path).items():
        if old != wanted.get(name):
            raise UserError(
                f"differs from {old}, which the runs in {args.logdir} used",
                field=f"--{name.replace('_', '-')}",
                value=wanted.get(name),
                hint="choose another --logdir",
            )


def compare() -> None:
    """Train all seeds and write the table."""
    args = parse_args()
    make_directories(args.out.parent, args.logdir)
    check_same_settings(args)
    played, scores = [], []
    for seed in args.seeds:
        played.append(play(args, seed))
        scores.append(evaluate(args, *played[-1]))
    rows = [
        [name, *(f"{each[i]:.3f}" for each in scores), format_range([each[i] for each in scores])]
        for i, name in enumerate(COMBINATIONS)
    ]
    head = ["trained", *(f"seed {seed}" for seed in args.seeds), "mean"]
    write_results(args.out, markdown_table([head, *rows]))
    save_pictures(*played[0], Path(f"{args.out}.png"))


if __name__ == "__main__":
    run_comparison(compare)
