"""Alternately train a prompt enhancer and the diffusion model that draws its prompts.

    python scripts/two_players.py --seeds 1 2 3 --rounds 2 --out docs/results/two_players \\
        [--enhancer-config config/vlm.py:tiny_enhancer] [--diffusion-config config/grpo.py:tiny_ocr]

In each round, the enhancer is trained on images of the current diffusion model. It then rewrites
the training requests, and the diffusion model is trained on the rewritten prompts; its images are
scored against the users' prompts. The table has the held-out score of all four combinations:
neither, the enhancer, the diffusion LoRA, and both. Repeat the command to resume.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from compare_utils import format_range, make_directories, run_comparison, write_results

from flow_grpo.config.error_reporting import ScriptParser
from flow_grpo.errors import UserError
from flow_grpo.report.console import markdown_table
from flow_grpo.rewards.scorers.ocr import OcrScorer
from flow_grpo.rewards.text.response_format import extract_prompt

SCRIPTS = Path(__file__).parent
TARGET = "target"  # column with the prompt that images of a rewritten prompt are scored against
SCORE = "drawn:ocr"
COMBINATIONS = ("neither", "enhancer", "diffusion LoRA", "both")


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


def train_enhancer(
    args: argparse.Namespace, folder: Path, seed: int, previous: Path | None
) -> Path:
    """Train the enhancer of a round with the previous diffusion LoRA; return its directory."""
    name = folder.name + "-enhancer"
    model = folder.parent / name / "checkpoints/latest/model"
    if not model.exists():
        options = [f"--config={args.enhancer_config}", f"--config.seed={seed}"]
        options += [f"--config.logdir={folder.parent}", f"--config.run_name={name}"]
        options += [f"--config.num_epochs={args.enhancer_epochs}"]
        options += [
            f"--config.{each}={args.enhancer_epochs}" for each in ("eval_freq", "save_freq")
        ]
        if previous is not None:
            options += [f"--config.pretrained.model={previous}-enhancer/checkpoints/latest/model"]
            options += [f"--config.draw.lora={previous}-diffusion"]
        run("train_vlm.py", *options)
    return model


def train_diffusion(
    args: argparse.Namespace, folder: Path, seed: int, prompts: Path, previous: Path | None
) -> Path:
    """Train the diffusion LoRA of a round on rewritten prompts; return its run directory."""
    run_folder = Path(f"{folder}-diffusion")
    if not (run_folder / "checkpoints/latest").exists():
        options = [f"--config={args.diffusion_config}", f"--config.seed={seed}"]
        options += [f"--config.logdir={folder.parent}", f"--config.run_name={run_folder.name}"]
        options += [f"--config.num_epochs={args.diffusion_epochs}", f"--config.dataset={prompts}"]
        options += [
            f"--config.{each}={args.diffusion_epochs}" for each in ("eval_freq", "save_freq")
        ]
        options += [f"--config.custom_rewards={{'request': '{__file__}:OcrOfRequest'}}"]
        options += ["--config.reward_fn={'request': 1.0}", "--config.eval_prompts=1"]
        if previous is not None:
            options += [f"--config.train.lora_path={previous}-diffusion/checkpoints/latest/lora"]
        run("train.py", *options)
    return run_folder


def rewrite(model: Path, data: Path, out: Path) -> Path:
    """Rewrite the requests of a dataset greedily and write them as a dataset of prompts."""
    if not (out / "test.jsonl").exists():
        for split in ("train", "test"):
            lines = (data / f"{split}.jsonl").read_text("utf-8").splitlines()
            rows = [json.loads(line) for line in lines]
            prompts = generate(model, [row["question"] for row in rows])
            written = [
                {"prompt": prompt, TARGET: row["prompt"]}
                for prompt, row in zip(prompts, rows, strict=True)
                if prompt
            ]
            out.mkdir(parents=True, exist_ok=True)
            text = "".join(json.dumps(row) + "\n" for row in written)
            (out / f"{split}.jsonl").write_text(text, "utf-8")
    return out


def generate(model: Path, requests: list[str], batch_size: int = 64) -> list[str]:
    """Return the greedy rewrites of requests; a rewrite may be empty."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left", trust_remote_code=False)
    network = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False)
    network.to("cuda" if torch.cuda.is_available() else "cpu")
    prompts = []
    for start in range(0, len(requests), batch_size):
        chats = [[{"role": "user", "content": each}] for each in requests[start:][:batch_size]]
        texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")
        inputs = {k: v.to(network.device) for k, v in inputs.items() if k != "token_type_ids"}
        with torch.inference_mode():
            tokens = network.generate(**inputs, do_sample=False)
        responses = tokens[:, inputs["input_ids"].shape[1] :]
        prompts += map(extract_prompt, tokenizer.batch_decode(responses, skip_special_tokens=True))
    return prompts


def evaluate(args: argparse.Namespace, folder: Path, model: Path, lora: Path) -> list[float]:
    """Return the held-out scores of the combinations, in the order of COMBINATIONS."""
    scores = {}
    for name, options in (("frozen", []), ("trained", [f"--config.draw.lora={lora}"])):
        out = folder / f"eval-{name}"
        config = [f"--config={args.enhancer_config}", f"--checkpoint=base,{model}", f"--out={out}"]
        run("evaluate.py", *config, *options)
        rows = map(json.loads, (out / "samples.jsonl").read_text("utf-8").splitlines())
        by_model: dict[str, list[float]] = {}
        for row in rows:
            by_model.setdefault(row["checkpoint"], []).append(row["scores"][SCORE])
        scores[name] = [fmean(each) for each in by_model.values()]  # base first
    return [scores[name][trained] for name in ("frozen", "trained") for trained in (0, 1)]


def play(args: argparse.Namespace, seed: int) -> list[float]:
    """Alternately train both models with one seed; return the scores of the combinations."""
    previous = None
    for number in range(1, args.rounds + 1):
        folder = args.logdir.resolve() / f"seed{seed}-round{number}"
        model = train_enhancer(args, folder, seed, previous)
        prompts = rewrite(model, args.data, folder / "prompts")
        lora = train_diffusion(args, folder, seed, prompts, previous)
        previous = folder
    return evaluate(args, folder, model, lora)


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
    parser.add_argument("--out", type=Path, default=Path("docs/results/two_players"))
    parser.add_argument("--logdir", type=Path, default=Path("logs/two_players"))
    return parser.parse_args()


def compare() -> None:
    """Train all seeds and write the table."""
    args = parse_args()
    make_directories(args.out.parent, args.logdir)
    scores = [play(args, seed) for seed in args.seeds]
    rows = [
        [name, *(f"{each[i]:.3f}" for each in scores), format_range([each[i] for each in scores])]
        for i, name in enumerate(COMBINATIONS)
    ]
    head = ["trained", *(f"seed {seed}" for seed in args.seeds), "mean"]
    write_results(args.out, markdown_table([head, *rows]))


if __name__ == "__main__":
    run_comparison(compare)
