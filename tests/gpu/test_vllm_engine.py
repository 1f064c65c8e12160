"""Answers of vLLM, of three families: with pictures, with LoRA, before and after its weights
change; and episodes in an environment.

    python -m pytest -q --noconftest tests/gpu/test_vllm_engine.py

where vLLM is installed, for a GPU or for a CPU.
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

from flow_grpo.answer.batches import packed
from flow_grpo.answer.environment import Environments
from flow_grpo.answer.models import load_model
from flow_grpo.answer.policy import AnswerPolicy
from flow_grpo.answer.rollout import Answerer, Rollout, Sample
from flow_grpo.answer.turns import Player
from flow_grpo.answer.vllm_engine import VllmAnswerer, build_answerer
from flow_grpo.data.seeding import sample_generators

pytest.importorskip("vllm")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, for each of two engines

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
# of a log-probability, mean and largest
NEAR = (0.05, 1.0) if ON_GPU else (1e-4, 1e-3)
NEW_TOKENS, ANSWERS = 12, 16
TURNS, OBSERVED = 3, 60
FIRST_LORA = 1  # a seed
LOOKER = f"{Path(__file__).parents[1] / 'environments.py'}:Looker"


class Setup:
    """A network with LoRA that does something, and the engine that samples for it."""

    def __init__(self, folder: Path, family: str, parallel: int = 1) -> None:
        self.family = family
        source = str(small_vlm.save(folder / "model", family, wide=True))
        model = load_model(source, DEVICE, DTYPE)
        self.policy = AnswerPolicy(
            model,
            parts=[],
            rank=4,
            freeze_vision=False,
            temperature=0.8,
            compute_dtype=torch.bfloat16 if ON_GPU else None,
        )
        data = folder / "data"
        self.questions = [*small_vlm.questions(data), small_vlm.odd_question(data)]
        self.ours = Answerer(self.policy, small_vlm.encoder(model), NEW_TOKENS, (small_vlm.EOS,))
        self.vllm: VllmAnswerer = build_answerer(
            self.ours,
            source=source,
            revision="main",
            device=DEVICE,
            dtype=DTYPE,
            num_processes=parallel,
            longest_prompt=96 + (TURNS - 1) * (NEW_TOKENS + OBSERVED),
            pictures=2 + TURNS,
            memory=0.1,
            parallel=parallel,
            seed=0,
        )
        self.rows = [row for row in range(len(self.questions)) for _ in range(ANSWERS)]
        self.prompts = self.vllm.encode(self.questions, self.rows)

    def change_lora(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.policy.model.named_parameters():
            if "lora_B" in name:
                weight.data = 0.1 * torch.randn(weight.shape, generator=generator).to(weight)

    def sample(self, index: list[int], epoch: int = 0) -> list[Sample]:
        rows = [self.rows[i] for i in index]
        return self.vllm.answer(self.prompts, rows, sample_generators(7, epoch, index))

    @torch.no_grad()
    def log_probs(self, sample: Sample) -> Tensor:
        """Of training."""
        rollout = Rollout(None, None, [], samples={0: sample}, prompts=self.prompts)
        batch = packed([rollout.answer(0)], self.ours.pad).to(DEVICE)
        return self.policy.network(batch)["log_probs"][0].cpu()

    def deviations(self, samples: list[Sample]) -> Tensor:
        return torch.cat([(s.log_probs - self.log_probs(s)).abs() for s in samples])


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe"])
def setup(request, tmp_path_factory):
    return Setup(tmp_path_factory.mktemp(request.param), request.param)


def test_it_samples_from_the_weights_that_are_trained(setup):
    every, told = list(range(len(setup.rows))), []
    for seed in (FIRST_LORA, 2):  # the second time it has slept
        setup.change_lora(seed)
        with setup.vllm.awake():
            samples = setup.sample(every)
        off = setup.deviations(samples)
        assert off.mean() <= NEAR[0]
        assert off.max() <= NEAR[1]
        told.append(samples)
    # and the weights do matter, or the test would not see them
    assert setup.deviations(told[0]).mean() > 10 * off.mean()


def test_a_sample_is_the_same_in_any_batch(setup):
    every = list(range(len(setup.rows)))
    with setup.vllm.awake():
        together = setup.sample(every)
        alone = [setup.sample([i])[0] for i in every[::8]]
        later = setup.sample(every, epoch=1)
    same = [
        torch.equal(together[i].tokens, one.tokens)
        for i, one in zip(every[::8], alone, strict=True)
    ]
    assert all(same) if not ON_GPU else sum(same) >= len(same) / 2  # rounding decides now and then
    assert any(not torch.equal(a.tokens, b.tokens) for a, b in zip(together, later, strict=True))
    assert len({tuple(s.tokens.tolist()) for s in together[:ANSWERS]}) > 1


def test_answers_end_as_ours_do_and_have_no_picture_tokens(setup):
    with setup.vllm.awake():
        samples = setup.sample(list(range(len(setup.rows))), epoch=2)
    banned = set(setup.policy.network.banned)
    assert len(banned) == 4
    for sample in samples:
        tokens = sample.tokens.tolist()
        assert not banned & set(tokens)
        assert sample.ended == (tokens[-1] == small_vlm.EOS)
        assert small_vlm.EOS not in tokens[:-1]
        assert sample.ended or len(tokens) == NEW_TOKENS
    assert any(s.ended for s in samples)
    assert any(not s.ended for s in samples)


def test_greedy_answers_are_ours(setup):
    rows = list(range(len(setup.questions)))
    with setup.vllm.awake():
        theirs = setup.vllm.answer(setup.prompts, rows)
    with setup.ours.awake():
        ours = setup.ours.answer(setup.prompts, rows)
    if not ON_GPU:
        assert [s.tokens.tolist() for s in theirs] == [s.tokens.tolist() for s in ours]
        assert [s.text for s in theirs] == [s.text for s in ours]
    assert all(len(s.tokens) == len(s.log_probs) for s in theirs)


@pytest.fixture(scope="module")
def looker():
    environments = Environments(LOOKER, {}, timeout=60, workers=1)
    yield environments
    environments.close()


def test_episodes_go_on_from_the_tokens_as_they_were_sampled(setup, looker):
    player = Player(setup.vllm, looker, TURNS, OBSERVED)
    index = list(range(len(setup.rows)))
    with setup.vllm.awake():
        samples = player.play(
            setup.questions, setup.prompts, setup.rows, sample_generators(7, 3, index)
        )
    off = setup.deviations(samples)  # of all turns, as training reads the whole conversation
    assert off.mean() <= NEAR[0]
    assert off.max() <= NEAR[1]
    for sample in samples:
        assert sample.talk.ids[sample.talk.sampled].tolist() == sample.tokens.tolist()
    assert {len(s.played.said) for s in samples} == {1, 2, 3}
    assert sum(len(s.talk.seen) for s in samples) > 10
    again = [s.played.said for s in samples if len(s.played.said) > 1]
    assert sum(said[0] == said[1] for said in again) < len(again) / 4  # no seed is used twice


def test_greedy_episodes_are_ours_token_by_token(setup, looker):
    rows, talks = list(range(len(setup.questions))), []
    for answerer in (setup.vllm, setup.ours):
        with answerer.awake():
            player = Player(answerer, looker, TURNS, OBSERVED)
            talks.append([s.talk for s in player.play(setup.questions, setup.prompts, rows)])
    if not ON_GPU:
        for theirs, ours in zip(*talks, strict=True):
            for name in ("ids", "positions", "sampled"):
                assert torch.equal(getattr(theirs, name), getattr(ours, name))
            assert len(theirs.seen) == len(ours.seen)
        assert any(len(talk.seen) > 1 for talk in talks[0])


@pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="has no second GPU")
def test_two_processes_share_one_engine_however_often_each_asks(setup, tmp_path):
    """Also if one of them stops at a mistake, and the other goes on."""
    script = Path(__file__).with_name("vllm_in_parallel.py")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [sys.executable, *launch, str(script), setup.family, str(tmp_path)]
    subprocess.run(command, check=True, timeout=300)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert (len(first), len(second)) == (len(setup.rows) // 2, 8)
    setup.change_lora(FIRST_LORA)
    index = [int(i) for i in (*first, *second)]
    with setup.vllm.awake():
        alone = [sample.tokens.tolist() for sample in setup.sample(index)]
    same = [a == b for a, b in zip(alone, [*first.values(), *second.values()], strict=True)]
    assert all(same) if not ON_GPU else sum(same) >= len(same) / 2  # rounding decides now and then
