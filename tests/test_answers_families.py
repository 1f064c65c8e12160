"""Every family of models through the whole loop: all weights or LoRA, the vision tower trained,
and what is left on the disk loaded by the libraries it was written for."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import answer_runs
import pytest
import small_vlm
import torch
from peft import PeftModel
from runner import run_script
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CohereConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from untrained.small.parts import seeded

from flow_grpo.answer import export as vlm_export
from flow_grpo.answer.batches import Answer, joined, packed
from flow_grpo.answer.models import check_room, family_of, load_model, load_processors
from flow_grpo.answer.prompts import PromptEncoder
from flow_grpo.answer.rollout import Sample
from flow_grpo.answer.session import VlmSession
from flow_grpo.data.questions import Question
from flow_grpo.data.seeding import sample_generators
from flow_grpo.errors import UserError
from flow_grpo.run.export import Source

ROWS = [0, 0, 1, 1, 2, 2]  # questions without pictures, with one and with two
PIXELS = {
    "": {},
    "smaller": {"max_pixels": 1024},
    "larger": {"min_pixels": 128 * 128, "max_pixels": 256 * 256},
}
CPU = torch.device("cpu")
LAYERS = (nn.Linear, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Runs:
    start: Path
    lora: VlmSession
    full: VlmSession


@pytest.fixture(scope="module", params=small_vlm.FAMILIES)
def runs(request, tmp_path_factory) -> Runs:
    """An epoch each, from the layout in which the family is published."""
    family, folder = request.param, tmp_path_factory.mktemp(request.param)
    save = small_vlm.save_as_published if family in small_vlm.OLDER else small_vlm.save
    start = save(folder / "model", family)
    fields = {"pretrained.model": str(start), "dataset": str(small_vlm.small_data(folder / "data"))}
    fields |= {"logdir": str(folder), "num_epochs": 1, "train.freeze_vision": False}
    # larger steps for LoRA, whose first ones do nothing: one half of each product starts at 0
    steps = {"train.learning_rate": 1e-2, "train.num_inner_epochs": 2, "train.recompute_old": True}
    lora = answer_runs.run(**fields, run_name="lora", **steps)
    full = answer_runs.run(**fields, run_name="full", use_lora=False)
    return Runs(start, lora, full)


def load(folder: Path) -> nn.Module:
    return AutoModelForImageTextToText.from_pretrained(folder)


def export(session: VlmSession) -> Path:
    out = session.folder / "exported"
    if not out.exists():
        source = Source.find(session.folder)
        vlm_export.export(source, source.trained_model()[0], out)
    return out


def answers(session: VlmSession) -> list[Sample]:
    prompts = session.answerer.encode(session.questions, ROWS)
    generators = sample_generators(1, 2, list(range(len(ROWS))))
    with session.answerer.awake():
        return session.answerer.answer(prompts, ROWS, generators)


def trained_log_probs(session: VlmSession, samples: list[Sample]) -> list[Tensor]:
    prompts = session.answerer.encode(session.questions, ROWS)
    shares = session.policy.network.family.shares_prompt
    numbers = [s.row if shares else i for i, s in enumerate(samples)]
    rows = [Answer(n, prompts[s.row], s.tokens) for n, s in zip(numbers, samples, strict=True)]
    batch = packed(rows, session.answerer.pad)
    found = session.policy.fixed_scores(batch)["log_probs"]
    return [row[there] for row, there in zip(found, batch.mask, strict=True)]


@torch.no_grad()
def stock_logits(model: nn.Module, session: VlmSession, sample: Sample) -> Tensor:
    """Of the answer's tokens, by the model's own forward: unpadded, with its own positions."""
    prompt = session.answerer.encoder.encode(session.questions[sample.row])
    ids, extra = torch.cat([prompt.ids, sample.tokens])[None], joined(prompt.seen)
    if extra.pop("moment", None) is not None:  # of Qwen's, whose positions are of three axes
        extra["mm_token_type_ids"] = (ids == small_vlm.IMAGE).int()
    extra.pop("tiles", None)  # InternVL counts them by itself
    return model.eval()(input_ids=ids, **extra).logits[0, len(prompt) - 1 : -1]


def furthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def assert_agreement(session: VlmSession, model: nn.Module, most: float) -> None:
    """Of tokens as they were sampled, as they are trained, in a mixed batch and alone, and by the
    `model` as transformers runs it."""
    samples, banned = answers(session), session.policy.network.banned
    mixed, theirs = trained_log_probs(session, samples), []
    for sample in samples:
        logits = stock_logits(model, session, sample)
        logits[:, banned] = -torch.inf
        theirs.append(logits.log_softmax(-1).gather(-1, sample.tokens[:, None])[:, 0])
    assert furthest(mixed, [s.log_probs for s in samples]) < most
    assert furthest(mixed, [trained_log_probs(session, [s])[0] for s in samples]) < most
    assert furthest(mixed, theirs) < most


@contextmanager
def exactly(session: VlmSession) -> Iterator[None]:
    """The session in float64; float32 is back to the last bit afterwards."""
    network, model = session.policy.network.double(), session.policy.model
    usual = model.config._experts_implementation
    model.set_experts_implementation("eager")  # the faster one knows no float64
    with answer_runs.exactly():
        yield
    model.set_experts_implementation(usual)
    network.float()


def assert_same_model(one: nn.Module, other: nn.Module, session: VlmSession, most: float) -> None:
    for sample in answers(session):
        ours, theirs = (stock_logits(model, session, sample) for model in (one, other))
        assert (ours - theirs).abs().max() <= most


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_first_update_is_on_policy(runs, kind):
    lines = (getattr(runs, kind).folder / "metrics.jsonl").read_text().splitlines()
    line = json.loads(lines[-1])
    # exactly, where old log-probabilities are computed again
    assert line["train/first_update_ratio_dev"] <= (0 if kind == "lora" else 1e-5)
    assert line["train/grad_norm"] > 0


def test_a_whole_group_of_training_answers_is_kept_to_be_looked_at(runs):
    path = runs.lora.folder / "samples/train-00001/samples.jsonl"
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    assert [row["group"] for row in rows] == [0] * 4
    assert len({(row["prompt"], row["truth"]) for row in rows}) == 1


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_sampling_training_and_the_model_itself_agree(runs, kind):
    """On trained weights."""
    session = getattr(runs, kind)
    assert_agreement(session, session.policy.model, most=2e-6)
    with exactly(session):  # it was rounding alone
        assert_agreement(session, session.policy.model, most=1e-10)


def test_transformers_load_what_was_trained(runs):
    session = runs.full
    saved = session.folder / "checkpoints/latest/model"
    loaded, trained = load(saved), dict(session.policy.model.named_parameters())
    start = dict(load(runs.start).named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, trained[name]), name
        assert not torch.equal(parameter, start[name]), name  # the tower too
    assert_same_model(loaded, session.policy.model, session, most=0)
    assert_same_model(load(export(session)), loaded, session, most=0)
    for folder in (saved, export(session)):  # training can start from either
        template = small_vlm.template_of(loaded.config.model_type)
        assert load_processors(str(folder))[0].chat_template == template


def test_peft_loads_the_lora_and_the_export_is_merged(runs):
    session, start = runs.lora, load(runs.start)
    loaded = PeftModel.from_pretrained(load(runs.start), session.folder / "checkpoints/latest/lora")
    assert_same_model(loaded, session.policy.model, session, most=1e-6)
    merged = load(export(session))
    assert_same_model(merged, loaded, session, most=1e-5)
    sample = answers(session)[-1]
    both = [stock_logits(model, session, sample) for model in (merged, start)]
    assert furthest(*([each] for each in both)) > 1e-3  # else nothing was trained


def test_lora_trains_every_layer_of_the_tower(runs):
    start, merged = load(runs.start), load(export(runs.lora))
    before, after = (dict(family_of(m).tower.named_modules()) for m in (start, merged))
    layers = [name for name, module in before.items() if isinstance(module, LAYERS)]
    assert len(layers) >= 11
    still = [name for name in layers if torch.equal(before[name].weight, after[name].weight)]
    assert not still


@pytest.mark.parametrize("runs", ["qwen2_5_vl"], indirect=True)
def test_the_script_exports_the_same(runs, tmp_path):
    folder, out = runs.lora.folder, tmp_path / "out"
    done = run_script("scripts/export.py", "--checkpoint", folder, "--out", out)
    assert done.returncode == 0, done.stderr
    files = [(path / "model.safetensors").read_bytes() for path in (out, export(runs.lora))]
    assert files[0] == files[1]


def test_pictures_are_resized_as_the_run_says(runs, tmp_path):
    """By the limits of its image processor where it says nothing."""
    path = tmp_path / "large.png"
    small_vlm.picture(0, 128, 192).save(path)
    question, model = Question("How many?", (path,)), runs.full.policy.model
    tokens = {"": 12, "smaller": 2, "larger": 96}
    if model.config.model_type == "internvl":  # as 3 x 2, 2 x 2 or 15 x 10 tiles, and one of all
        tokens = {"": 4 * 7, "smaller": 4 * 5, "larger": 4 * 151}
    for limits, count in tokens.items():
        encoder = PromptEncoder(*load_processors(str(runs.start), **PIXELS[limits]), model)
        prompt = encoder.encode(question)
        assert (prompt.ids == small_vlm.IMAGE).sum() == count
        assert encoder.length(question) == len(prompt)


READERS = {
    "qwen2": Qwen2Config(**small_vlm.TEXT),
    "qwen3": Qwen3Config(**small_vlm.TEXT, tie_word_embeddings=True),
    "llama": LlamaConfig(**small_vlm.TEXT),  # Llama 3; distilled R1 is this or qwen2
    "phi3": Phi3Config(**small_vlm.TEXT),  # whose layers have other names
}


def save_reader(folder: Path, config: PretrainedConfig, template: str = small_vlm.TEMPLATE) -> Path:
    with seeded(0):
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    tokenizer = small_vlm.build_tokenizer()
    tokenizer.chat_template = template
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", READERS)
def test_a_language_model_without_eyes_trains_as_any_other(tmp_path, kind):
    """Sampling, training and transformers agree, first and after an epoch; transformers loads what
    was trained."""
    start = save_reader(tmp_path / "model", READERS[kind])
    fields = {"pretrained.model": str(start), "num_epochs": 1, "logdir": str(tmp_path)}
    fields |= {"train.beta": 0.1, "train.freeze_vision": False, "use_lora": kind != "qwen2"}
    fields |= {"dataset": str(small_vlm.sums(tmp_path / "data"))}
    session = answer_runs.run(**fields)
    line = json.loads((session.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["train/first_update_ratio_dev"] <= 1e-5
    assert line["train/grad_norm"] > 0
    for model in (session.policy.model, AutoModelForCausalLM.from_pretrained(export(session))):
        assert_agreement(session, model, most=2e-6)
    with exactly(session):
        assert_agreement(session, session.policy.model, most=1e-10)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(vocab_size=small_vlm.VOCABULARY, n_embd=32, n_head=4, n_layer=1), "no .model"),
        (MistralConfig(**small_vlm.TEXT, sliding_window=8), "with sliding_window=8"),
        (CohereConfig(**{**small_vlm.TEXT, "logit_scale": 4.0}), "log-probabilities are off by"),
    ],
)
def test_a_language_model_that_would_be_trained_wrongly_is_refused(tmp_path, config, message):
    start = save_reader(tmp_path / "model", config)
    fields = {"pretrained.model": str(start), "dataset": str(small_vlm.sums(tmp_path / "data"))}
    with pytest.raises(UserError, match=message):
        answer_runs.run(**fields, logdir=str(tmp_path))


def test_pictures_are_refused_by_a_model_without_eyes(tmp_path):
    start = save_reader(tmp_path / "model", READERS["qwen3"])
    data = small_vlm.small_data(tmp_path / "data")
    with pytest.raises(UserError, match=r"has images or videos, .* is a language model"):
        answer_runs.run(**{"pretrained.model": str(start)}, dataset=str(data), logdir=str(tmp_path))


def test_a_tag_that_the_template_opens_is_part_of_the_answer(tmp_path):
    """As that of distilled R1, which takes texts for contents too."""
    template = "{% for m in messages %}{{ m['content'] | trim }}{% endfor %}<think>\n"
    start = save_reader(tmp_path / "model", READERS["llama"], template)
    encoder = PromptEncoder(
        *load_processors(str(start)), load_model(str(start), CPU, torch.float32)
    )
    prompt = encoder.encode(Question("1+1?", ()))
    assert encoder.tokenizer.decode(prompt.ids) == "1+1?<think>"
    said = encoder.tokenizer("2</think>2", add_special_tokens=False)["input_ids"]
    assert encoder.decode(said) == "<think>2</think>2"


@pytest.mark.parametrize("family", small_vlm.FAMILIES)
def test_a_model_beyond_a_gpus_memory_is_told_before_it_loads(tmp_path, family):
    source = str(small_vlm.save(tmp_path, family))
    outs = {"bf16": "--config.pretrained.base_precision=nf4, ", "nf4": "a smaller model, or GPUs"}
    for precision, out in outs.items():
        model = load_model(source, CPU, torch.bfloat16, base_precision=precision)
        size = sum(parameter.nbytes for parameter in model.parameters())
        check_room(source, size, torch.bfloat16, base_precision=precision)
        with pytest.raises(UserError, match=f" GB of weights, and a GPU.*; use {out}"):
            check_room(source, size - 1, torch.bfloat16, base_precision=precision)
