"""Time and memory of training a model that answers: a published size, with random weights.

    python scripts/benchmark_vlm.py --shape qwen2.5-vl-3b --answers 64 --group 8 --new_tokens 512
    python scripts/benchmark_vlm.py --lengths 16 1024 --batches 8 [--separate]    of unlike lengths

Prints one line of JSON: seconds per answer and GiB of sampling and of training, and how near
sampling comes to the time that reading weights and cache takes at the memory's bandwidth, with
every slot in use to the end.
"""

import json
import time
from collections.abc import Iterator
from itertools import starmap

import torch
from torch.nn.utils.rnn import pad_sequence
from untrained.answering import SHAPES, build

from flow_grpo.answer.attention import compiles
from flow_grpo.answer.batches import Answer, micro_batches, packed
from flow_grpo.answer.losses.base import Counts, token_weights
from flow_grpo.answer.losses.clip import Clip
from flow_grpo.answer.models import family_of
from flow_grpo.answer.policy import AnswerPolicy
from flow_grpo.answer.prompts import EncodedPrompt
from flow_grpo.answer.sampling import Asked, Batch, Sampled, Sampler
from flow_grpo.config.fields import FULL, PRECISIONS
from flow_grpo.config.mistakes import Parser
from flow_grpo.data.seeding import sample_generators
from flow_grpo.speed.low_bits import to_low_bits


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-vl-3b")
    parser.add_argument("--answers", type=int, default=64, help="sampled together")
    parser.add_argument("--group", type=int, default=8, help="answers to a question")
    parser.add_argument("--text_tokens", type=int, default=128, help="of a question")
    parser.add_argument("--side", type=int, default=448, help="pixels of its square picture")
    parser.add_argument("--new_tokens", type=int, default=512, help="of an answer")
    parser.add_argument(
        "--lengths", type=int, nargs=2, help="answers have from so many to so many tokens instead"
    )
    parser.add_argument("--batches", type=int, default=1, help="of so many answers")
    parser.add_argument("--separate", action="store_true", help="each waits for the one before")
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--full", action="store_true", help="train all weights, not LoRA")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--flex", action="store_true", help="train with flex attention")
    precision = "of frozen weights; nf4 with LoRA is QLoRA"
    parser.add_argument("--base_precision", choices=PRECISIONS, default=FULL, help=precision)
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="bytes a second; H200")
    args = parser.parse_args()
    if args.full and args.base_precision != FULL:
        frozen = f"--base_precision={args.base_precision} is of frozen weights"
        parser.error(f"{frozen}: leave out --full")
    if args.answers % args.group:
        parser.error(f"--answers={args.answers} must be a multiple of --group={args.group}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = device.type == "cuda"
    model = build(args.shape, device, torch.bfloat16 if half else torch.float32)
    weights = sum(p.numel() for p in model.parameters())
    to_low_bits([model.model], args.base_precision, device)
    held = sum(p.nbytes for p in model.parameters())
    flex = half and args.flex and compiles(model, device, torch.bfloat16)
    policy = AnswerPolicy(
        model,
        parts=[],
        use_lora=not args.full,
        gradient_checkpointing=args.gradient_checkpointing,
        compute_dtype=torch.bfloat16 if half else None,
        flex_attention=flex,
    )
    count = args.answers * args.batches
    rows = [i // args.group for i in range(count)]
    prompts = [make_prompt(model, args.text_tokens, args.side, i) for i in range(rows[-1] + 1)]
    sampled, sampling = sample(policy, prompts, rows, args)
    lengths = [len(tokens) for tokens in sampled.tokens]
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=half)
    _, training = measured(device, lambda: update(policy, optimizer, prompts, rows, sampled, args))
    bytes_read = decoding_bytes(model, held, args.answers, lengths, len(prompts[0]))
    print(
        json.dumps(
            {
                "shape": args.shape,
                "parameters": weights,
                "prompt_tokens": len(prompts[0]),
                "answers": count,
                "tokens": [min(lengths), sum(lengths) / count, max(lengths)],
                "base_precision": args.base_precision,
                "flex_attention": flex,
                "sampling_s_per_answer": sampling["seconds"] / count,
                "sampling_tokens_per_s": sum(lengths) / sampling["seconds"],
                "sampling_gib": sampling["gib"],
                "recording_s": max(0.0, sampling["first"] - sampling["seconds"]),
                "training_s_per_answer": training["seconds"] / count,
                "training_gib": training["gib"],
                "compiling_s": max(0.0, training["first"] - training["seconds"]),
                "share_of_bandwidth": bytes_read / args.bandwidth / sampling["seconds"],
            }
        )
    )


def make_prompt(model: torch.nn.Module, text_tokens: int, side: int, seed: int) -> EncodedPrompt:
    """A picture of noise and random words."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    vision = config.vision_config
    unit = vision.patch_size * vision.spatial_merge_size
    count = side // unit * vision.spatial_merge_size  # patches of a side
    grids = torch.tensor([[1, count, count]])
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    words = torch.randint(10, 1000, (text_tokens,), generator=generator)
    tokens = count**2 // vision.spatial_merge_size**2
    marks = [config.vision_start_token_id, *[config.image_token_id] * tokens]
    ids = torch.cat([torch.tensor([*marks, config.vision_end_token_id]), words])
    pixels = torch.randn(count**2, values, generator=generator)
    seen = ({"pixel_values": pixels, "image_grid_thw": grids, "moment": torch.zeros(1)},)
    positions = family_of(model).positions(ids, seen)
    return EncodedPrompt(ids, positions, int(positions.max()) + 1, seen, (seed,))


class OfLengths(Sampler):
    """Its answers end where they are told to: a draw of almost 1 there chooses the last token of
    the vocabulary, at which they end."""

    lengths: list[int]

    def _read(self, prompts, rows, generators) -> Batch:
        batch = super()._read(prompts, rows, generators)
        batch.draws.clamp_(max=0.999)
        for draws in batch.draws:
            draws[self.lengths.pop(0) - 1] = 1 - 2**-53
        return batch


def sample(
    policy: AnswerPolicy, prompts: list[EncodedPrompt], rows: list[int], args
) -> tuple[Sampled, dict[str, float]]:
    shortest, longest = args.lengths or (args.new_tokens, args.new_tokens)
    last = policy.model.config.get_text_config().vocab_size - 1
    sampler = OfLengths(policy.network, max_new_tokens=longest, stop=[last], pad=0)
    drawn = torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, longest + 1, (len(rows),), generator=drawn).tolist()

    def asked() -> Iterator[Asked]:
        for start in range(0, len(rows), args.answers):
            own = rows[start : start + args.answers]
            numbers = list(range(start, start + len(own)))
            generators = sample_generators(0, 0, numbers)
            yield prompts[own[0] : own[-1] + 1], [row - own[0] for row in own], generators

    def call() -> Sampled:
        sampler.lengths = list(lengths)
        separate = starmap(sampler.sample, asked())
        every = list(separate if args.separate else sampler.stream(asked()))
        tokens = [own for part in every for own in part.tokens]
        return Sampled(tokens, [own for part in every for own in part.log_probs], [])

    return measured(sampler.device, call)


def update(policy, optimizer, prompts, rows, sampled: Sampled, args) -> None:
    device = next(policy.network.parameters()).device
    answers = [Answer(r, prompts[r], t) for r, t in zip(rows, sampled.tokens, strict=True)]
    most = max(len(tokens) for tokens in sampled.tokens)
    tokens = sum(len(tokens) for tokens in sampled.tokens)
    counts = Counts(tokens=float(tokens), answers=float(len(answers)))
    for part in micro_batches(answers, args.budget):
        batch = packed(answers[part], 0).to(device)
        old = pad_sequence(sampled.log_probs[part], batch_first=True).to(device)
        advantages = torch.ones(len(old), 1, device=device)
        scores = policy.scores(batch)["log_probs"]
        clip = Clip(clip_low=0.2, clip_high=0.2, dual_clip=0.0)
        loss = clip.per_token(scores, old, advantages, batch.mask).loss
        (loss * token_weights("token", batch.mask, counts, most)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def decoding_bytes(
    model: torch.nn.Module, held: int, slots: int, lengths: list[int], prompt: int
) -> float:
    """What all steps of sampling read at least: the language model's weights, of the bytes `held`,
    and the cache."""
    text, size = model.config.text_config, model.dtype.itemsize
    tower = sum(p.nbytes for p in model.model.visual.parameters())
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    per_token = 2 * text.num_hidden_layers * text.num_key_value_heads * head * size
    seen = sum(n * prompt + n**2 / 2 for n in lengths)  # tokens of the cache, over all steps
    return sum(lengths) / slots * (held - tower) + seen * per_token


def measured(device: torch.device, call):
    """The second time: the first one warms up and records graphs."""
    spent = []
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        result = call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return result, {"first": spent[0], "seconds": spent[1], "gib": peak}


if __name__ == "__main__":
    main()
