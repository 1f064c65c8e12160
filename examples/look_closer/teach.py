"""Teach the small model to use the tool sometimes, as a starting point for training.

    python examples/look_closer/teach.py --data look_closer    # writes look_closer/model

The model is fine-tuned on its own samples: in one of three conversations it looks, then responds as
it would to the crop, including its mistakes.
"""

import random
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from flow_grpo.config.error_reporting import ScriptParser, exit_on_user_error
from flow_grpo.data.questions import Question, find_questions
from flow_grpo.data.seeding import sample_generators
from flow_grpo.errors import UserError
from flow_grpo.training.export import reject_existing
from flow_grpo.vlm.environment import EnvironmentPool, StepRequest
from flow_grpo.vlm.models import load_model, load_processors
from flow_grpo.vlm.multi_turn import Episode, EpisodeRunner
from flow_grpo.vlm.packing import Response, pack_responses
from flow_grpo.vlm.policy import VlmPolicy
from flow_grpo.vlm.prompts import PromptEncoder
from flow_grpo.vlm.rollout import RolloutEngine, Sample

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "assets/tiny-vlm"
LOOK = "<look>"  # the tool call of environment.py
GUESSES = 2  # conversations without a tool call, for each one with it
MAX_TOKENS = 40  # per response
BATCH = 6  # questions per step


def build_episode_runner(model: str) -> EpisodeRunner:
    tokenizer, image_processor = load_processors(model)
    network = load_model(model, torch.device("cpu"), torch.float32)
    policy = VlmPolicy(network, processors=[tokenizer, image_processor], use_lora=False)
    encoder = PromptEncoder(tokenizer, image_processor, network)
    rollout_engine = RolloutEngine(policy, encoder, MAX_TOKENS, (tokenizer.eos_token_id,))
    environments = EnvironmentPool(
        f"{HERE / 'environment.py'}:LookCloser", {}, timeout=60, workers=1
    )
    return EpisodeRunner(rollout_engine, environments, max_turns=2, max_observation_tokens=64)


def sample_conversations(
    episode_runner: EpisodeRunner, questions: list[Question], seed: int
) -> list[list[Response]]:
    """Return conversations to learn per question.

    These are `GUESSES` responses to the large image, and a tool call followed by a response to the
    crop.
    """
    rollout_engine = episode_runner.rollout_engine
    batch = episode_runner.environments.next_batch_id()
    rows = list(range(len(questions)))
    requests = [StepRequest.from_question((batch, row), questions[row], [LOOK]) for row in rows]
    steps = episode_runner.environments.step(requests)
    crops = [replace(q, images=step.images) for q, step in zip(questions, steps, strict=True)]
    prompts = rollout_engine.encode(questions, rows)
    with rollout_engine.generation_mode():
        guess_rows = rows * GUESSES
        generators = sample_generators(seed, 0, list(range(len(guess_rows) + len(rows))))
        guesses = rollout_engine.generate(prompts, guess_rows, generators[: len(guess_rows)])
        responses = rollout_engine.generate(
            rollout_engine.encode(crops, rows), rows, generators[len(guess_rows) :]
        )
    tokenizer = rollout_engine.encoder.tokenizer
    look = torch.tensor([*tokenizer(LOOK)["input_ids"], tokenizer.eos_token_id])
    conversations = []
    for row, step in enumerate(steps):
        episode = Episode(row, row, questions[row], prompts[row], prompts[row])
        episode.add_response(Sample(row, look, torch.zeros(len(look)), True, LOOK))
        episode_runner.apply_step(episode, step)
        episode.add_response(responses[row])
        conversation = rollout_engine.encoder.append_tokens(
            episode.conversation, responses[row].tokens
        )
        samples = [*guesses[row :: len(rows)], episode.to_sample(conversation)]
        conversations.append(
            [Response(row, prompts[row], each.tokens, each.conversation) for each in samples]
        )
    return conversations


def teach(
    episode_runner: EpisodeRunner,
    conversations: list[list[Response]],
    steps: int,
    lr: float,
    seed: int,
) -> None:
    """Fine-tune the policy on the conversations with maximum likelihood."""
    policy, rng = episode_runner.rollout_engine.policy, random.Random(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in (bar := tqdm(range(steps), desc="teaching")):
        chosen = rng.sample(conversations, min(BATCH, len(conversations)))
        responses = [response for group in chosen for response in group]
        batch = pack_responses(responses, episode_runner.rollout_engine.pad)
        log_probs = policy.forward_tokens(batch)["log_probs"]
        loss = -log_probs[batch.mask].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")


def main() -> None:
    parser = ScriptParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, default=Path("look_closer"), help="output directory of make_data.py"
    )
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument(
        "--lr", type=float, default=8e-4, help="initial learning rate; it decays to 0"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    exit_on_user_error(lambda: run(args), debug=False)


def run(args: Namespace) -> None:
    reject_existing(args.data / "model")
    questions = find_questions(args.data, "train")
    if questions is None:
        raise UserError(
            "has no questions", field=args.data, hint=f"run make_data.py --out {args.data} first"
        )
    episode_runner = build_episode_runner(str(MODEL))
    conversations = sample_conversations(episode_runner, questions, args.seed)
    episode_runner.environments.close()
    teach(episode_runner, conversations, args.steps, args.lr, args.seed)
    episode_runner.rollout_engine.policy.save(args.data)  # writes `model`
    print(f"wrote {args.data / 'model'}")


if __name__ == "__main__":
    main()
