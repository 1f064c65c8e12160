"""Measure time and memory of VLM training, with a published model size and random weights.

    python scripts/benchmark_vlm.py --shape qwen2.5-vl-3b --answers 64 --group 8 --new_tokens 512
    python scripts/benchmark_vlm.py --lengths 16 1024 --batches 8 [--separate]    # varying lengths

Prints one line of JSON: seconds per response and GiB of sampling and of training, and the fraction
of the memory bandwidth that sampling achieves, relative to reading weights and cache with every
slot in use to the end.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import starmap
from typing import TypeVar

import torch
from kernel_profile import profile_call
from untrained.vlm import SHAPES, build

from flow_grpo.config.error_reporting import ScriptParser
from flow_grpo.config.fields import BASE_PRECISIONS, UNQUANTIZED
from flow_grpo.data.seeding import sample_generators
from flow_grpo.perf.quantization import quantize_linears
from flow_grpo.training.metrics import synchronized_time
from flow_grpo.vlm.attention import flex_attention_supported
from flow_grpo.vlm.losses.base import UpdateCounts, token_weights
from flow_grpo.vlm.losses.clip import ClipLoss
from flow_grpo.vlm.models import get_family
from flow_grpo.vlm.packing import PackedBatch, Response, micro_batches, pack_responses
from flow_grpo.vlm.policy import VlmPolicy
from flow_grpo.vlm.prompts import EncodedPrompt
from flow_grpo.vlm.sampling import PendingBatch, PromptBatch, SampledTokens, Sampler

T = TypeVar("T")


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = ScriptParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-vl-3b")
    parser.add_argument("--answers", type=int, default=64, help="responses sampled together")
    parser.add_argument("--group", type=int, default=8, help="responses per question")
    parser.add_argument("--text_tokens", type=int, default=128, help="text tokens per question")
    parser.add_argument("--side", type=int, default=448, help="side of the square image in pixels")
    parser.add_argument("--new_tokens", type=int, default=512, help="tokens per response")
    parser.add_argument(
        "--lengths", type=int, nargs=2, help="minimum and maximum response length instead"
    )
    parser.add_argument("--batches", type=int, default=1, help="number of batches")
    parser.add_argument(
        "--separate", action="store_true", help="finish each batch before starting the next"
    )
    parser.add_argument("--budget", type=int, default=16384, help="tokens per micro-batch")
    parser.add_argument("--full", action="store_true", help="train all weights instead of LoRA")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--flex", action="store_true", help="train with flex attention")
    parser.add_argument(
        "--profile", action="store_true", help="also record GPU time by kernel class"
    )
    parser.add_argument("--compile", action="store_true", help="compile the decoder layers")
    parser.add_argument(
        "--base_precision",
        choices=BASE_PRECISIONS,
        default=UNQUANTIZED,
        help="precision of frozen weights; nf4 with LoRA is QLoRA",
    )
    parser.add_argument(
        "--bandwidth", type=float, default=4.8e12, help="memory bandwidth in bytes/s (H200)"
    )
    args = parser.parse_args()
    if args.full and args.base_precision != UNQUANTIZED:
        parser.error(f"--base_precision={args.base_precision} needs frozen weights; remove --full")
    if args.profile and not torch.cuda.is_available():
        parser.error("--profile needs a GPU")
    if args.answers % args.group:
        parser.error(f"--answers={args.answers} must be a multiple of --group={args.group}")
    return args


def main() -> None:
    """Time sampling and an update of a VLM with random weights, and print the results."""
    args = parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    half = device.type == "cuda"
    model = build(args.shape, device, torch.bfloat16 if half else torch.float32)
    weights = sum(p.numel() for p in model.parameters())
    quantize_linears([model.model], args.base_precision, device)
    model_bytes = sum(p.nbytes for p in model.parameters())
    flex = half and args.flex and flex_attention_supported(model, device, torch.bfloat16)
    policy = VlmPolicy(
        model,
        processors=[],
        use_lora=not args.full,
        gradient_checkpointing=args.gradient_checkpointing,
        compute_dtype=torch.bfloat16 if half else None,
        flex_attention=flex,
        compiled=half and args.compile,
    )
    count = args.answers * args.batches
    rows = [i // args.group for i in range(count)]
    prompts = [make_prompt(model, args.text_tokens, args.side, i) for i in range(rows[-1] + 1)]
    sampler_call = sampling_call(policy, prompts, rows, args)
    sampled, sampling = measure_call(device, sampler_call)
    lengths = [len(tokens) for tokens in sampled.tokens]
    profiles = {"sampling": profile_call(device, sampler_call)} if args.profile else {}
    del sampler_call  # frees its cache
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=half)
    update_call = partial(update, policy, optimizer, prompts, rows, sampled, args.budget)
    _, training = measure_call(device, update_call)
    if args.profile:
        profiles["training"] = profile_call(device, update_call)
    bytes_read = decoding_bytes(model, model_bytes, args.answers, lengths, len(prompts[0]))
    print(
        json.dumps(
            {
                "date": datetime.now(UTC).strftime("%Y-%m-%d"),
                "command": shlex.join(["python", *sys.argv]),
                "device": torch.cuda.get_device_name() if half else "CPU",
                **{name: version(name) for name in ("torch", "transformers", "peft")},
                "shape": args.shape,
                "parameters": weights,
                "prompt_tokens": len(prompts[0]),
                "answers": count,
                "tokens": [min(lengths), sum(lengths) / count, max(lengths)],
                "base_precision": args.base_precision,
                "flex_attention": flex,
                "compiled": half and args.compile,
                "sampling_s_per_answer": sampling["seconds"] / count,
                "sampling_tokens_per_s": sum(lengths) / sampling["seconds"],
                "sampling_gib": sampling["gib"],
                "recording_s": max(0.0, sampling["first"] - sampling["seconds"]),
                "training_s_per_answer": training["seconds"] / count,
                "training_gib": training["gib"],
                "compiling_s": max(0.0, training["first"] - training["seconds"]),
                "share_of_bandwidth": bytes_read / args.bandwidth / sampling["seconds"],
                "ratio_dev_max": ratio_deviation(policy, prompts, rows, sampled, args.budget),
                **({"profile": profiles} if profiles else {}),
            }
        )
    )


def make_prompt(model: torch.nn.Module, text_tokens: int, side: int, seed: int) -> EncodedPrompt:
    """Return a prompt of a noise image and random text tokens."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    vision = config.vision_config
    unit = vision.patch_size * vision.spatial_merge_size
    count = side // unit * vision.spatial_merge_size  # patches of a side
    grids = torch.tensor([[1, count, count]])
    values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    text = torch.randint(10, 1000, (text_tokens,), generator=generator)
    image_tokens = [config.image_token_id] * (count**2 // vision.spatial_merge_size**2)
    image = [config.vision_start_token_id, *image_tokens, config.vision_end_token_id]
    ids = torch.cat([torch.tensor(image), text])
    pixels = torch.randn(count**2, values, generator=generator)
    vision_inputs = (
        {"pixel_values": pixels, "image_grid_thw": grids, "seconds_per_grid": torch.zeros(1)},
    )
    positions = get_family(model).compute_positions(ids, vision_inputs)
    return EncodedPrompt(ids, positions, int(positions.max()) + 1, vision_inputs, (seed,))


class FixedLengthSampler(Sampler):
    """Sampler that ends each response at a predetermined length.

    A uniform draw of almost 1 selects the last token of the vocabulary, which is the stop token.
    """

    lengths: list[int]  # of the responses that are not yet started

    def _prefill(self, prompts, rows, generators) -> PendingBatch:
        """Also clamp the draws and set that of each response's last token to almost 1."""
        batch = super()._prefill(prompts, rows, generators)
        batch.draws.clamp_(max=0.999)
        for draws in batch.draws:
            draws[self.lengths.pop(0) - 1] = 1 - 2**-53
        return batch


def sampling_call(
    policy: VlmPolicy, prompts: list[EncodedPrompt], rows: list[int], args: argparse.Namespace
) -> Callable[[], SampledTokens]:
    """Return a function that samples one response per row.

    Args:
        policy: The policy.
        prompts: The prompts.
        rows: Index of the prompt of each response.
        args: The command line, which has the lengths and the batch size.
    """
    shortest, longest = args.lengths or (args.new_tokens, args.new_tokens)
    last = policy.model.config.get_text_config().vocab_size - 1
    sampler = FixedLengthSampler(policy.network, max_new_tokens=longest, stop=[last], pad=0)
    drawn = torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, longest + 1, (len(rows),), generator=drawn).tolist()

    def requests() -> Iterator[PromptBatch]:
        """Yield the batches of `args.answers` responses."""
        for start in range(0, len(rows), args.answers):
            own = rows[start : start + args.answers]
            numbers = list(range(start, start + len(own)))
            generators = sample_generators(0, 0, numbers)
            yield prompts[own[0] : own[-1] + 1], [row - own[0] for row in own], generators

    def call() -> SampledTokens:
        """Sample all batches, one after the other with --separate."""
        sampler.lengths = list(lengths)
        separate = starmap(sampler.sample, requests())
        parts = list(separate if args.separate else sampler.sample_stream(requests()))
        tokens = [own for part in parts for own in part.tokens]
        return SampledTokens(tokens, [own for part in parts for own in part.log_probs], [])

    return call


def update(
    policy: VlmPolicy,
    optimizer: torch.optim.Optimizer,
    prompts: list[EncodedPrompt],
    rows: list[int],
    sampled: SampledTokens,
    budget: int,
) -> None:
    """Take one optimizer step on all responses, with advantages of 1.

    As in the first update of an epoch, old log-probabilities are the new ones, detached.
    """
    responses, longest = as_responses(prompts, rows, sampled), max(map(len, sampled.tokens))
    counts = UpdateCounts(
        tokens=float(sum(map(len, sampled.tokens))), responses=float(len(responses))
    )
    clip = ClipLoss(clip_low=0.2, clip_high=0.2, dual_clip=0.0)
    for batch in packed_batches(policy, responses, budget):
        scores = policy.forward_tokens(batch)["log_probs"]
        advantages = torch.ones(len(scores), 1, device=scores.device)
        loss = clip.per_token(scores, scores.detach(), advantages, batch.mask).loss
        (loss * token_weights("token", batch.mask, counts, longest)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def ratio_deviation(
    policy: VlmPolicy,
    prompts: list[EncodedPrompt],
    rows: list[int],
    sampled: SampledTokens,
    budget: int,
) -> float:
    """Return max |ratio - 1| of log-probabilities with gradients and recomputed without."""
    deviations = []
    for batch in packed_batches(policy, as_responses(prompts, rows, sampled), budget):
        old = policy.forward_tokens_no_grad(batch)["log_probs"]
        new = policy.forward_tokens(batch)["log_probs"].detach()
        deviations.append(((new - old).exp() - 1).abs().max().item())
    return max(deviations)


def as_responses(
    prompts: list[EncodedPrompt], rows: list[int], sampled: SampledTokens
) -> list[Response]:
    """Return the sampled responses with their prompts."""
    return [Response(r, prompts[r], t) for r, t in zip(rows, sampled.tokens, strict=True)]


def packed_batches(
    policy: VlmPolicy, responses: list[Response], budget: int
) -> Iterator[PackedBatch]:
    """Yield micro-batches of up to `budget` tokens on the device of the policy."""
    device = next(policy.network.parameters()).device
    one_row = policy.network.packs_one_row
    for part in micro_batches(responses, budget, one_row=one_row):
        yield pack_responses(responses[part], 0, one_row=one_row).to(device)


def decoding_bytes(
    model: torch.nn.Module, model_bytes: int, slots: int, lengths: list[int], prompt: int
) -> float:
    """Return a lower bound on the bytes read in sampling: language model weights and cache.

    Args:
        model: The model.
        model_bytes: Size of all its weights; those of the vision tower are subtracted.
        slots: Responses that are decoded together.
        lengths: Tokens of each response.
        prompt: Tokens of a prompt.
    """
    text, size = model.config.text_config, model.dtype.itemsize
    tower = sum(p.nbytes for p in model.model.visual.parameters())
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    per_token = 2 * text.num_hidden_layers * text.num_key_value_heads * head * size
    cached = sum(n * prompt + n**2 / 2 for n in lengths)  # cached tokens read, over all steps
    return sum(lengths) / slots * (model_bytes - tower) + cached * per_token


def measure_call(device: torch.device, call: Callable[[], T]) -> tuple[T, dict[str, float]]:
    """Call a function twice and measure it.

    Returns:
        The result, and the seconds of the first call, which also compiles and captures graphs, the
        seconds of the second one, and its peak GPU memory in GiB.
    """
    elapsed = []
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = synchronized_time(device)
        result = call()
        elapsed.append(synchronized_time(device) - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return result, {"first": elapsed[0], "seconds": elapsed[1], "gib": peak}


if __name__ == "__main__":
    main()
