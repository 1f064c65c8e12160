"""Score a model or a checkpoint on a prompt set.

    python scripts/evaluate.py --config config/grpo.py:tiny_ocr --out eval/base
    python scripts/evaluate.py --config ... --checkpoint logs/RUN/checkpoints/checkpoint-24 \
        --out eval/trained

Model, prompts, rewards, sizes and steps come from the config. Every prompt has a noise of its
own, so batch size and number of processes do not change the result. Writes results.json and
grid.png; of videos that shows the middle frames, and the folder clips has each as a GIF.
"""

import json
import logging
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict

from flow_grpo.errors import RewardOutage, UserError
from flow_grpo.rewards import close_scorers
from flow_grpo.run import cli
from flow_grpo.run.accelerator import build_accelerator
from flow_grpo.run.check import check, check_eval_judges
from flow_grpo.run.checkpoint import weights_in
from flow_grpo.run.grid import save_grid
from flow_grpo.run.outage import describe_outage
from flow_grpo.run.prompts import build_test_prompts
from flow_grpo.run.session import (
    build_adapter,
    build_dynamics,
    build_rewards,
    eval_weights,
    image_size,
)
from flow_grpo.sampling.rollout import Denoiser
from flow_grpo.training.evaluation import evaluate

logger = logging.getLogger("flow_grpo")
CHECKPOINT = flags.DEFINE_string(
    "checkpoint", "", "A run (its newest checkpoint), a checkpoint (its EMA) or a folder in one."
)
OUT = flags.DEFINE_string("out", None, "New folder for results.json and grid.png.", required=True)


def main(config: ConfigDict) -> None:
    check(config)
    out = Path(OUT.value)
    if out.exists():
        raise UserError(f"{out} already exists; choose another --out or remove it")
    weights = weights_in(Path(CHECKPOINT.value)) if CHECKPOINT.value else None
    accelerator = build_accelerator(config)
    prompts = build_test_prompts(config)
    [reward] = build_rewards(config, accelerator, eval_weights(config))
    check_eval_judges(reward.judges)
    reward.check([p.prompt for p in prompts])
    adapter = build_adapter(config, accelerator)
    if weights is not None:
        adapter.load_weights(weights)
    module = accelerator.prepare_model(adapter.transformer, evaluation_mode=True)
    dynamics = build_dynamics(config, adapter, config.sample.eval_num_steps)
    result = evaluate(
        Denoiser(adapter, module, dynamics),
        reward,
        prompts,
        accelerator=accelerator,
        size=image_size(config),
        batch_size=config.sample.test_batch_size,
        seed=config.seed,
        keep_images=config.log_images,
    )
    close_scorers(reward)
    if accelerator.is_main_process:
        out.mkdir(parents=True)
        report = {
            "model": config.pretrained.model,
            "weights": str(weights or ""),
            "dataset": config.dataset,
            "prompts": len(prompts),
            "steps": config.sample.eval_num_steps,
            "guidance_scale": config.sample.guidance_scale,
            "seed": config.seed,
            "means": result.means(),
            "failed": result.failed(),
            "scores": [
                {"prompt": p.prompt, **{k: result.score(k, i) for k in result.scores}}
                for i, p in enumerate(prompts)
            ],
        }
        (out / "results.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if result.images:
            captions = [p.prompt for p in prompts[: len(result.images)]]
            save_grid(out, result.images, captions)
        means = "  ".join(f"{name} {value:.4f}" for name, value in result.means().items())
        logger.info("%d prompts  %s", len(prompts), means)
        logger.info("wrote %s", out)
    outage = describe_outage(accelerator, reward, result.scores, config.max_failed_fraction)
    if outage:
        raise RewardOutage(f"{outage}; wrote {out}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    cli.run(main)
