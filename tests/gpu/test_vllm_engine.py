"""vLLM samples from the policy's weights: with images, LoRA and multi-turn episodes.

    python -m pytest -q --noconftest tests/gpu/test_vllm_engine.py

where vLLM is installed, on a GPU or a CPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_vlm
import torch
from torch import Tensor

from flow_grpo.data.seeding import sample_generators
from flow_grpo.vlm.environment import EnvironmentPool
from flow_grpo.vlm.models import load_model
from flow_grpo.vlm.multi_turn import EpisodeRunner
from flow_grpo.vlm.packing import pack_responses
from flow_grpo.vlm.policy import VlmPolicy
from flow_grpo.vlm.rollout import Rollout, RolloutEngine, Sample
from flow_grpo.vlm.vllm_engine import VllmEngine, build_vllm_engine

pytest.importorskip("vllm")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB per engine; there are two

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
# mean and largest deviation of a log-probability
MAX_DEVIATION = (0.05, 1.0) if ON_GPU else (1e-4, 1e-3)
NEW_TOKENS, RESPONSES = 12, 16
TURNS, OBSERVED = 3, 60
FIRST_LORA = 1  # a seed
CROP_ENVIRONMENT = f"{Path(__file__).parents[1] / 'support/environments.py'}:CropEnvironment"


class Setup:
    """A policy with nonzero LoRA and the engines that sample from it."""

    def __init__(self, folder: Path, family: str, parallel: int = 1) -> None:
        self.family = family
        source = str(small_vlm.save(folder / "model", family, wide=True))
        model = load_model(source, DEVICE, DTYPE)
        self.policy = VlmPolicy(
            model,
            processors=[],
            rank=4,
            freeze_vision=False,
            temperature=0.8,
            compute_dtype=torch.bfloat16 if ON_GPU else None,
        )
        data = folder / "data"
        self.questions = [*small_vlm.questions(data), small_vlm.resized_image_question(data)]
        self.ours = RolloutEngine(
            self.policy, small_vlm.encoder(model), NEW_TOKENS, (small_vlm.EOS,)
        )
        self.vllm: VllmEngine = build_vllm_engine(
            self.ours,
            source=source,
            revision="main",
            device=DEVICE,
            dtype=DTYPE,
            num_processes=parallel,
            longest_prompt=96 + (TURNS - 1) * (NEW_TOKENS + OBSERVED),
            max_images=2 + TURNS,
            memory=0.1,
            tensor_parallel=parallel,
            seed=0,
        )
        self.rows = [row for row in range(len(self.questions)) for _ in range(RESPONSES)]
        self.prompts = self.vllm.encode(self.questions, self.rows)

    def change_lora(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.policy.model.named_parameters():
            if "lora_B" in name:
                weight.data = 0.1 * torch.randn(weight.shape, generator=generator).to(weight)

    def sample(self, index: list[int], epoch: int = 0) -> list[Sample]:
        rows = [self.rows[i] for i in index]
        return self.vllm.generate(self.prompts, rows, sample_generators(7, epoch, index))

    @torch.no_grad()
    def log_probs(self, sample: Sample) -> Tensor:
        """Return the log-probabilities of a response as computed in training."""
        rollout = Rollout(None, None, [], samples={0: sample}, prompts=self.prompts)
        batch = pack_responses([rollout.response(0)], self.ours.pad).to(DEVICE)
        return self.policy.network(batch)["log_probs"][0].cpu()

    def deviations(self, samples: list[Sample]) -> Tensor:
        return torch.cat([(s.log_probs - self.log_probs(s)).abs() for s in samples])


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe"])
def setup(request, tmp_path_factory):
    return Setup(tmp_path_factory.mktemp(request.param), request.param)


def test_it_samples_from_the_current_weights(setup):
    every, sampled = list(range(len(setup.rows))), []
    for seed in (FIRST_LORA, 2):  # the engine sleeps in between
        setup.change_lora(seed)
        with setup.vllm.generation_mode():
            samples = setup.sample(every)
        off = setup.deviations(samples)
        assert off.mean() <= MAX_DEVIATION[0]
        assert off.max() <= MAX_DEVIATION[1]
        sampled.append(samples)
    # samples of other weights deviate
    assert setup.deviations(sampled[0]).mean() > 10 * off.mean()


def test_a_sample_does_not_depend_on_its_batch(setup):
    every = list(range(len(setup.rows)))
    with setup.vllm.generation_mode():
        together = setup.sample(every)
        alone = [setup.sample([i])[0] for i in every[::8]]
        later = setup.sample(every, epoch=1)
    same = [
        torch.equal(together[i].tokens, one.tokens)
        for i, one in zip(every[::8], alone, strict=True)
    ]
    assert all(same) if not ON_GPU else sum(same) >= len(same) / 2  # rounding may change a token
    assert any(not torch.equal(a.tokens, b.tokens) for a, b in zip(together, later, strict=True))
    assert len({tuple(s.tokens.tolist()) for s in together[:RESPONSES]}) > 1


def test_responses_end_with_eos_and_have_no_image_tokens(setup):
    with setup.vllm.generation_mode():
        samples = setup.sample(list(range(len(setup.rows))), epoch=2)
    banned = set(setup.policy.network.banned_token_ids)
    assert len(banned) == 4
    for sample in samples:
        tokens = sample.tokens.tolist()
        assert not banned & set(tokens)
        assert sample.ended == (tokens[-1] == small_vlm.EOS)
        assert small_vlm.EOS not in tokens[:-1]
        assert sample.ended or len(tokens) == NEW_TOKENS
    assert any(s.ended for s in samples)
    assert any(not s.ended for s in samples)


def test_greedy_responses_equal_those_of_our_engine(setup):
    rows = list(range(len(setup.questions)))
    with setup.vllm.generation_mode():
        theirs = setup.vllm.generate(setup.prompts, rows)
    with setup.ours.generation_mode():
        ours = setup.ours.generate(setup.prompts, rows)
    if not ON_GPU:
        assert [s.tokens.tolist() for s in theirs] == [s.tokens.tolist() for s in ours]
        assert [s.text for s in theirs] == [s.text for s in ours]
    assert all(len(s.tokens) == len(s.log_probs) for s in theirs)


@pytest.fixture(scope="module")
def looker():
    environments = EnvironmentPool(CROP_ENVIRONMENT, {}, timeout=60, workers=1)
    yield environments
    environments.close()


def test_episodes_continue_from_the_sampled_tokens(setup, looker):
    episode_runner = EpisodeRunner(setup.vllm, looker, TURNS, OBSERVED)
    index = list(range(len(setup.rows)))
    with setup.vllm.generation_mode():
        samples = episode_runner.run(
            setup.questions, setup.prompts, setup.rows, sample_generators(7, 3, index)
        )
    off = setup.deviations(samples)  # of all turns: training evaluates the whole conversation
    assert off.mean() <= MAX_DEVIATION[0]
    assert off.max() <= MAX_DEVIATION[1]
    for sample in samples:
        assert (
            sample.conversation.ids[sample.conversation.sampled].tolist() == sample.tokens.tolist()
        )
    assert {len(s.episode.responses) for s in samples} == {1, 2, 3}
    assert sum(len(s.conversation.vision_inputs) for s in samples) > 10
    again = [s.episode.responses for s in samples if len(s.episode.responses) > 1]
    assert sum(turns[0] == turns[1] for turns in again) < len(again) / 4  # other seeds


def test_greedy_episodes_equal_those_of_our_engine(setup, looker):
    rows, conversations = list(range(len(setup.questions))), []
    for rollout_engine in (setup.vllm, setup.ours):
        with rollout_engine.generation_mode():
            episode_runner = EpisodeRunner(rollout_engine, looker, TURNS, OBSERVED)
            conversations.append(
                [s.conversation for s in episode_runner.run(setup.questions, setup.prompts, rows)]
            )
    if not ON_GPU:
        for theirs, ours in zip(*conversations, strict=True):
            for name in ("ids", "positions", "sampled"):
                assert torch.equal(getattr(theirs, name), getattr(ours, name))
            assert len(theirs.vision_inputs) == len(ours.vision_inputs)
        assert any(len(conversation.vision_inputs) > 1 for conversation in conversations[0])


@pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="has no second GPU")
def test_two_ranks_share_one_engine_with_different_numbers_of_requests(setup, tmp_path):
    """Also if one of them stops with an error and the other continues."""
    script = Path(__file__).with_name("vllm_two_ranks.py")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [sys.executable, *launch, str(script), setup.family, str(tmp_path)]
    subprocess.run(command, check=True, timeout=300)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert (len(first), len(second)) == (len(setup.rows) // 2, 8)
    setup.change_lora(FIRST_LORA)
    index = [int(i) for i in (*first, *second)]
    with setup.vllm.generation_mode():
        alone = [sample.tokens.tolist() for sample in setup.sample(index)]
    same = [a == b for a, b in zip(alone, [*first.values(), *second.values()], strict=True)]
    assert all(same) if not ON_GPU else sum(same) >= len(same) / 2  # rounding may change a token
