"""Teach the small model that it may look closer, badly on purpose: one time in three it looks, and
then it says what it would say if it had been shown the crop alone, faults and all.

python examples/look_closer/teach.py --data look_closer    # writes look_closer/model
"""

import random
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from flow_grpo.answer.batches import Answer, packed
from flow_grpo.answer.environment import Environments, Move
from flow_grpo.answer.models import load_model, load_processors
from flow_grpo.answer.policy import AnswerPolicy
from flow_grpo.answer.prompts import PromptEncoder
from flow_grpo.answer.rollout import Answerer, Sample
from flow_grpo.answer.turns import Episode, Player
from flow_grpo.config.mistakes import Parser, told_plainly
from flow_grpo.data.questions import Question, find_questions
from flow_grpo.data.seeding import sample_generators
from flow_grpo.errors import UserError
from flow_grpo.run.export import refuse_existing

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "assets/tiny-vlm"
LOOK = "<look>"  # what the environment answers with a crop
GUESSES = 2  # conversations without a look, for each with one
MAX_TOKENS = 40  # of an answer
BATCH = 6  # questions of a step


def build_player(model: str) -> Player:
    tokenizer, images = load_processors(model)
    network = load_model(model, torch.device("cpu"), torch.float32)
    policy = AnswerPolicy(network, parts=[tokenizer, images], use_lora=False)
    encoder = PromptEncoder(tokenizer, images, network)
    answerer = Answerer(policy, encoder, MAX_TOKENS, (tokenizer.eos_token_id,))
    environments = Environments(f"{HERE / 'environment.py'}:LookCloser", {}, timeout=60, workers=1)
    return Player(answerer, environments, max_turns=2, max_observation_tokens=64)


def lessons(player: Player, questions: list[Question], seed: int) -> list[list[Answer]]:
    """For each question, conversations to learn: what the model says of the large picture, and a
    look followed by what it says of the crop."""
    answerer, batch = player.answerer, player.environments.new_batch()
    rows = list(range(len(questions)))
    moves = [Move.of((batch, row), questions[row], [LOOK]) for row in rows]
    steps = player.environments.step(moves)
    crops = [replace(q, images=step.pictures) for q, step in zip(questions, steps, strict=True)]
    prompts = answerer.encode(questions, rows)
    with answerer.awake():
        every = rows * GUESSES
        draws = sample_generators(seed, 0, list(range(len(every) + len(rows))))
        guesses = answerer.answer(prompts, every, draws[: len(every)])
        said = answerer.answer(answerer.encode(crops, rows), rows, draws[len(every) :])
    tokenizer = answerer.encoder.tokenizer
    look = torch.tensor([*tokenizer(LOOK)["input_ids"], tokenizer.eos_token_id])
    learned = []
    for row, step in enumerate(steps):
        episode = Episode(row, row, questions[row], prompts[row], prompts[row])
        episode.add(Sample(row, look, torch.zeros(len(look)), True, LOOK))
        player.hear(episode, step)
        episode.add(said[row])
        talk = answerer.encoder.followed(episode.talk, said[row].tokens)
        samples = [*guesses[row :: len(rows)], episode.sample(talk)]
        learned.append([Answer(row, prompts[row], each.tokens, each.talk) for each in samples])
    return learned


def teach(player: Player, learned: list[list[Answer]], steps: int, lr: float, seed: int) -> None:
    policy, rng = player.answerer.policy, random.Random(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in (bar := tqdm(range(steps), desc="teaching")):
        own = rng.sample(learned, min(BATCH, len(learned)))
        batch = packed([answer for each in own for answer in each], player.answerer.pad)
        log_probs = policy.scores(batch)["log_probs"]
        loss = -log_probs[batch.mask].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("look_closer"), help="of make_data.py")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--lr", type=float, default=8e-4, help="at the start; it falls to 0")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    told_plainly(lambda: write_taught(args), debug=False)


def write_taught(args: Namespace) -> None:
    refuse_existing(args.data / "model")
    questions = find_questions(args.data, "train")
    if questions is None:
        raise UserError(f"no questions in {args.data}; run make_data.py --out {args.data} first")
    player = build_player(str(MODEL))
    learned = lessons(player, questions, args.seed)
    player.environments.close()
    teach(player, learned, args.steps, args.lr, args.seed)
    player.answerer.policy.save(args.data)  # as `model`
    print(f"wrote {args.data / 'model'}")


if __name__ == "__main__":
    main()
