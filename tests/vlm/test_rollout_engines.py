"""Other rollout engines: the requests and weights they receive, and importance weights.

tests/gpu/test_vllm_engine.py runs vLLM itself, where it is installed.
"""

import itertools
import logging
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import small_vlm
import torch
import train_vlm
import vlm_runs
from accelerate import Accelerator
from peft import PeftModel
from safetensors import safe_open
from user_errors import raises_user_error

from flow_grpo.data.questions import Question
from flow_grpo.data.seeding import sample_generators
from flow_grpo.perf.quantization import quantize_linears
from flow_grpo.training.policy import ADAPTER_NAME
from flow_grpo.vlm import config_checks
from flow_grpo.vlm.dry_run import VlmDryRun
from flow_grpo.vlm.engine_choice import choose_engine
from flow_grpo.vlm.fields import VLM_SPEC
from flow_grpo.vlm.losses.base import UpdateCounts, importance_weights, token_weights
from flow_grpo.vlm.losses.clip import ClipLoss
from flow_grpo.vlm.objective import Objective
from flow_grpo.vlm.packing import concat_vision_inputs
from flow_grpo.vlm.plan import build_plan
from flow_grpo.vlm.policy import VlmPolicy
from flow_grpo.vlm.prompts import EncodedPrompt
from flow_grpo.vlm.rollout import RolloutEngine
from flow_grpo.vlm.session import VlmSession, build_session
from flow_grpo.vlm.vllm_engine import (
    VllmEngine,
    check_vllm_support,
    draw_seed,
    iter_merged_weights,
    write_engine_files,
)

FAMILIES = ("qwen3_vl", "qwen2_5_vl")


# --- importance weights --------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [0.0, 1.2, 100.0])
def test_importance_weights_correct_the_gradient_unless_capped(cap):
    """The weighted mean over the engine's responses is the mean over the policy's responses.

    All responses of two tokens from a vocabulary of three are enumerated.
    """
    logits = torch.tensor([[0.2, -0.4, 0.7], [0.5, 0.1, -0.9]], dtype=torch.float64)
    logits.requires_grad_()
    engine = torch.tensor([[0.0, 0.1, 0.4], [-0.3, 0.2, 0.0]], dtype=torch.float64).log_softmax(-1)
    reward = torch.tensor([1.0, 0.3, -0.5], dtype=torch.float64)
    mask, estimate, expected = torch.ones(1, 2, dtype=torch.bool), 0.0, 0.0
    counts = UpdateCounts(tokens=2.0, responses=1.0)
    for response in itertools.product(range(3), repeat=2):
        chosen = torch.tensor(response)
        new = logits.log_softmax(-1).gather(1, chosen[:, None]).T  # (1, 2)
        theirs = engine.gather(1, chosen[:, None]).T
        advantages = reward[chosen][None]  # a separate advantage per token
        loss = ClipLoss(0.2, 0.2, dual_clip=0.0).per_token(new, new.detach(), advantages, mask).loss
        weights = token_weights("token", mask, counts, 2)
        (plain,) = torch.autograd.grad((loss * weights).sum(), logits, retain_graph=True)
        weighted = loss * weights * importance_weights(new, theirs, cap)
        (corrected,) = torch.autograd.grad(weighted.sum(), logits)
        estimate = estimate + theirs.sum().exp() * corrected
        expected = expected + new.detach().sum().exp() * plain
    error = (estimate - expected).abs().max()
    assert error < 1e-12 if cap == 100.0 else error > 1e-3


# --- runs with an engine whose log-probabilities differ -------------------------------------------


class OtherTemperature(RolloutEngine):
    """An engine that samples at another temperature and reports its true log-probabilities."""

    exact_log_probs: ClassVar[bool] = False
    factor: ClassVar[float] = 1.5
    modes: ClassVar[list[bool]] = []

    @contextmanager
    def generation_mode(self):
        self.modes.append(True)
        with super().generation_mode():
            yield
        self.modes.append(False)

    def generate_batches(self, batches):
        assert self.modes[-1]
        network, own = self.policy.network, self.policy.network.temperature
        network.temperature = own * self.factor
        try:
            yield from list(super().generate_batches(batches))
        finally:
            network.temperature = own


class SameTemperature(OtherTemperature):
    factor: ClassVar[float] = 1.0


def session_with(kind: type[RolloutEngine], folder: Path, **fields) -> VlmSession:
    model, data = small_vlm.save(folder / "model"), small_vlm.write_data(folder / "data")
    paths = {
        "pretrained.model": str(model),
        "dataset": str(data),
        "logdir": str(folder / "logs"),
    }
    session = build_session(vlm_runs.make_config(**paths, num_epochs=1, **fields))
    own = session.rollout_engine
    session.rollout_engine = kind(own.policy, own.encoder, own.max_new_tokens, own.stop)
    return session


def run_with(kind: type[RolloutEngine], folder: Path, **fields) -> tuple[list[dict], list]:
    """Return the metrics, and the arguments and result of each call of the loss."""
    session = session_with(kind, folder, **fields)
    calls, original = [], Objective.loss

    def watched(objective, batch, scores, fixed, counts):
        loss = original(objective, batch, scores, fixed, counts)
        calls.append((objective, batch, scores, [replace(f) for f in fixed], counts, loss))
        return loss

    Objective.loss = watched
    try:
        train_vlm.train(session)
    finally:
        Objective.loss = original
        session.close()
    return vlm_runs.read_metrics(session), calls


@pytest.fixture(scope="module")
def other_temperature(tmp_path_factory):
    OtherTemperature.modes.clear()
    fields = {"sample.group_size": 8, "train.updates_per_epoch": 1, "train.beta": 0.1}
    return run_with(OtherTemperature, tmp_path_factory.mktemp("other_temperature"), **fields)


def test_differences_of_the_engine_are_logged_and_weighted(other_temperature):
    (_, line), calls = other_temperature
    assert line["answer/engine_dev"] > 0.1
    assert line["answer/engine_dev_max"] > 3 * line["answer/engine_dev"]
    # old log-probabilities are recomputed, as with train.recompute_old
    assert line["train/first_update_ratio_dev"] == 0
    # the expected weight is 1, apart from sampling noise and the cap of 2
    assert line["train/importance"] == pytest.approx(1, abs=0.15)
    weights = torch.cat([fixed.importance for *_, every, _, _ in calls for fixed in every])
    assert weights.max() == 2
    assert line["train/importance"] == pytest.approx(weights.mean().item(), abs=1e-5)


def test_importance_weights_apply_to_the_policy_loss_but_not_to_the_kl(other_temperature):
    objective, batch, scores, fixed, counts, loss = other_temperature[1][0]
    ones = [replace(own, importance=torch.ones_like(own.old_log_probs)) for own in fixed]
    # the policy still equals the reference, so move the reference
    moved = [replace(own, reference_log_probs=own.reference_log_probs - 0.3) for own in fixed]
    loss = objective.loss(batch, scores, moved, counts)
    importance = torch.cat([own.importance for own in fixed])
    assert torch.equal(loss.columns["importance"], importance)
    plain = objective.loss(batch, scores, ones, counts)
    kl, policy = loss.columns["kl"], loss.columns["policy_loss"]
    assert kl.min() > 0.01
    assert torch.allclose(policy, plain.columns["policy_loss"] * importance, atol=1e-6)
    assert torch.allclose(loss.per_sample, policy + 0.1 * kl, atol=1e-6)


def test_engine_is_in_generation_mode_only_while_sampling(other_temperature):
    # evaluation, rollout, evaluation
    assert OtherTemperature.modes == [True, False] * 3


def test_an_inexact_engine_with_equal_log_probs_changes_nothing(tmp_path):
    lines, calls = run_with(SameTemperature, tmp_path / "same")
    assert lines[-1]["answer/engine_dev_max"] <= 1e-5
    weights = torch.cat([fixed.importance for *_, every, _, _ in calls for fixed in every])
    assert torch.allclose(weights, torch.ones_like(weights), atol=1e-5)
    ours, _ = run_with(RolloutEngine, tmp_path / "ours", **{"train.recompute_old": True})
    assert "answer/engine_dev" not in ours[-1]
    assert "train/importance" not in ours[-1]
    for name in ("train/loss", "train/grad_norm", "reward/avg"):
        assert lines[-1][name] == pytest.approx(ours[-1][name], rel=1e-3, abs=1e-6)


def test_dry_run_uses_the_rollout_engine(tmp_path):
    session = session_with(OtherTemperature, tmp_path)
    steps = (
        train_vlm.sample_epoch,
        train_vlm.compute_rollout_log_probs,
        train_vlm.assign_advantages,
        train_vlm.compute_old_log_probs,
    )
    loop = VlmDryRun(*steps, train_vlm.train_epoch, train_vlm.run_evaluation)
    try:
        measured, *_ = loop.measure(session, tmp_path / "out")
    finally:
        session.close()
    assert measured.train > 0


# --- vLLM ----------------------------------------------------------------------------------------


def policy_with_lora(family: str, dtype: torch.dtype = torch.float32) -> VlmPolicy:
    model = small_vlm.build(family).to(dtype)
    return with_lora(VlmPolicy(model, processors=[], rank=4, freeze_vision=False))


def with_lora(policy: VlmPolicy) -> VlmPolicy:
    """Randomize the LoRA, which has no effect initially."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in policy.model.named_parameters():
        if "lora_B" in name:
            weight.data = 0.1 * torch.randn(weight.shape, generator=generator)
    return policy


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_weights_equal_those_of_peft(family, tmp_path):
    policy = policy_with_lora(family)
    policy.save(tmp_path)
    sent = dict(iter_merged_weights(policy.model))
    stock = small_vlm.build(family)
    before = {name: weight.clone() for name, weight in stock.named_parameters()}
    merged = PeftModel.from_pretrained(stock, tmp_path / "lora").merge_and_unload()
    expected = dict(merged.named_parameters())
    assert sent.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.allclose(sent[name], weight, atol=1e-6), name
    moved = [name for name, weight in before.items() if not torch.equal(weight, sent[name])]
    layers = [
        name for name, _ in policy.model.named_parameters() if f"lora_A.{ADAPTER_NAME}" in name
    ]
    assert len(moved) == len(layers) > 0
    for name, weight in policy.model.named_parameters():  # the model itself is unchanged
        if "lora_" not in name:
            assert torch.equal(weight, before[name.replace(".base_layer", "")]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_without_lora_are_passed_through(family, tmp_path):
    model = small_vlm.build(family)
    policy = VlmPolicy(model, processors=[], use_lora=False)
    sent = dict(iter_merged_weights(policy.model))
    assert all(torch.equal(sent[name], weight) for name, weight in model.named_parameters())
    stock = small_vlm.build(family, seed=1)
    missing, unexpected = stock.load_state_dict(sent, strict=False)
    assert not unexpected
    assert missing in ([], ["lm_head.weight"])  # tied to the embedding
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert len(file.keys()) == len(sent)
        if family == "qwen3_vl":  # Qwen2.5-VL files have older names; vLLM accepts both
            assert set(file.keys()) == set(sent)


@torch.no_grad()
@pytest.mark.parametrize(("precision", "near"), [("nf4", 1e-4), ("fp8", 0.5)])
def test_quantized_weights_are_dequantized(precision, near):
    """FP8 also rounds the inputs, which vLLM does not."""
    model, stock = small_vlm.build("qwen3_vl", wide=True), small_vlm.build("qwen3_vl", wide=True)
    ids = torch.tensor([[small_vlm.BOS, *range(40, 60)]])
    quantize_linears([model.model], precision, torch.device("cpu"))
    policy = with_lora(VlmPolicy(model, processors=[], rank=4))
    sent = dict(iter_merged_weights(policy.model))
    assert sent.keys() == dict(stock.named_parameters()).keys()
    before = stock(input_ids=ids).logits
    stock.load_state_dict(sent, strict=False)
    error = [policy.model(input_ids=ids).logits - x for x in (stock(input_ids=ids).logits, before)]
    assert error[0].abs().max() < near < error[1].abs().max()


@torch.no_grad()
def test_stochastic_rounding_preserves_small_lora_updates():
    policy = policy_with_lora("qwen3_vl", torch.bfloat16)
    name = "model.language_model.layers.0.self_attn.q_proj"
    layer = policy.model.get_submodule(name)
    layer.lora_B[ADAPTER_NAME].weight *= 1e-5
    before, added = layer.base_layer.weight, layer.get_delta_weight(ADAPTER_NAME).float()
    sent = dict(iter_merged_weights(policy.model))[f"{name}.weight"]
    assert sent.dtype == torch.bfloat16
    nearest = (before.float() + added).bfloat16()
    assert (nearest != before).float().mean() < 0.01
    moved = sent.float() - before.float()
    assert (moved != 0).sum() > 2 * (nearest != before).sum()
    assert (moved[moved != 0].sign() == added[moved != 0].sign()).all()


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> tuple[VllmEngine, list[Question]]:
    """A VllmEngine without vLLM."""
    folder = tmp_path_factory.mktemp("engine")
    policy = policy_with_lora("qwen3_vl")
    policy.network.temperature = 0.7
    encoder = small_vlm.encoder(policy.model)
    rollout_engine = VllmEngine(policy, encoder, 10, (2, 9), engine=None, supports_sleep=False)
    questions = small_vlm.questions(folder / "data")
    return rollout_engine, [*questions, small_vlm.resized_image_question(folder / "data")]


def test_requests_have_one_placeholder_per_image(engine):
    rollout_engine, questions = engine
    prompts = rollout_engine.encode(questions, [0, 1, 2, 3, 1])
    assert list(prompts) == [0, 1, 2, 3]
    for row, count in enumerate([0, 1, 2, 1]):
        prompt, request = prompts[row], rollout_engine.build_request(prompts[row])
        ids = request["prompt_token_ids"]
        assert ids.count(small_vlm.IMAGE) == count
        assert ids == rollout_engine.encoder.token_ids(questions[row])
        images = request.get("multi_modal_data", {"image": []})["image"]
        assert len(images) == count
        if count:  # resized already: preprocessing again changes nothing
            preprocessed = concat_vision_inputs(prompt.vision_inputs)
            sizes = [
                (8 * width, 8 * height)
                for _, height, width in preprocessed["image_grid_thw"].tolist()
            ]
            assert [image.size for image in images] == sizes
            again = rollout_engine.encoder.image_processor(images=images, return_tensors="pt")
            assert all(torch.equal(again[name], preprocessed[name]) for name in again)


def test_sampling_params_have_distinct_seeds_and_ban_image_tokens(engine):
    rollout_engine, _ = engine
    generators = sample_generators(42, 3, [0, 1, 2, 3])
    seeds = [draw_seed(g) for g in generators]
    assert len({*seeds, *map(draw_seed, generators)}) == 8  # the next turn has another seed
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds[2:] == list(map(draw_seed, sample_generators(42, 3, [2, 3])))
    settings = rollout_engine.sampling_params(seeds[0])
    assert (settings["seed"], settings["temperature"]) == (seeds[0], 0.7)
    assert (settings["max_tokens"], settings["stop_token_ids"]) == (10, [2, 9])
    banned = [small_vlm.IMAGE, small_vlm.VIDEO, small_vlm.START, small_vlm.END]
    assert settings["logit_bias"] == dict.fromkeys(banned, float("-inf"))
    assert rollout_engine.sampling_params(None)["temperature"] == 0


def test_processed_log_probs_of_vllm_are_those_of_the_policy(engine):
    """vLLM adds the bias, divides by the temperature and normalizes (v1/sample/sampler.py)."""
    rollout_engine, _ = engine
    network = rollout_engine.policy.network
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    settings = rollout_engine.sampling_params(1)
    logits = network.model.lm_head(hidden)
    for token, bias in settings["logit_bias"].items():
        logits[:, token] += bias
    expected = (logits / settings["temperature"]).log_softmax(-1, dtype=torch.float32)
    torch.testing.assert_close(network.log_probs(hidden), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fails", [False, True])
def test_the_engine_gets_the_weights_before_it_allocates_its_cache(engine, fails):
    """Sleep level 2 discards the weights, so they are sent after each wake-up."""
    calls = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return self if name == "llm_engine" else partial(self.record, name)

        def record(self, name: str, *args: Any, **settings: Any) -> None:
            if name == "collective_rpc":
                args = (*args, len({name for name, _ in settings["kwargs"]["weights_iterator"]}))
            calls.append((name, *args, *([settings["level"]] if "level" in settings else [])))

    rollout_engine = replace(engine[0], engine=Recorder(), supports_sleep=True)
    expected = pytest.raises(ZeroDivisionError) if fails else nullcontext()
    with expected, rollout_engine.generation_mode():
        calls.append("sample")
        if fails:
            raise ZeroDivisionError
    weights = len([*small_vlm.build().named_parameters()])
    assert calls[:2] == [("wake_up", ["weights"]), ("collective_rpc", "reload_weights", weights)]
    assert [call[0] for call in calls[2:5]] == [
        "apply_model",
        "reset_prefix_cache",
        "reset_encoder_cache",
    ]
    assert calls[5:] == [("wake_up", ["kv_cache"]), "sample", ("sleep", 2)]


def vllm_output(prompt: list[int], tokens: list[int], reason: str) -> SimpleNamespace:
    """Return an object like vLLM's RequestOutput."""
    steps = [{token: SimpleNamespace(logprob=-0.5 * i)} for i, token in enumerate(tokens)]
    out = SimpleNamespace(token_ids=tokens, logprobs=steps, finish_reason=reason)
    return SimpleNamespace(prompt_token_ids=prompt, outputs=[out])


def test_outputs_are_converted_and_another_prompt_is_rejected(engine):
    rollout_engine, _ = engine
    prompt = EncodedPrompt(torch.tensor([1, 40, 41]), torch.zeros(3, 3), 3)
    sample = rollout_engine._sample(7, prompt, vllm_output([1, 40, 41], [50, 51, 2], "stop"))
    assert (sample.row, sample.tokens.tolist(), sample.ended) == (7, [50, 51, 2], True)
    assert sample.log_probs.tolist() == [0, -0.5, -1]
    assert sample.text == rollout_engine.encoder.decode([50, 51])
    assert not rollout_engine._sample(7, prompt, vllm_output([1, 40, 41], [50], "length")).ended
    with raises_user_error("2 ", "3 tokens", field="sample.engine", value="vllm"):
        rollout_engine._sample(7, prompt, vllm_output([1, 40], [50], "length"))


def test_engine_files_link_to_the_weights(engine, tmp_path):
    rollout_engine, _ = engine
    source = small_vlm.save(tmp_path / "model")
    before = {path: path.read_bytes() for path in source.iterdir()}
    with write_engine_files(str(source), "main", rollout_engine) as folder:
        links = [path for path in Path(folder).iterdir() if path.is_symlink()]
        assert [path.name for path in links] == ["model.safetensors"]
        names = {path.name for path in Path(folder).iterdir()}
        assert {"config.json", "tokenizer.json", "video_preprocessor_config.json"} <= names
    assert {path: path.read_bytes() for path in source.iterdir()} == before


@pytest.mark.parametrize(
    ("installed", "fields", "shown"),
    [
        (False, {}, ["sample.engine='vllm'", "pip install -e '.[vllm]'"]),
        (True, {"sample.temperature": 2.5}, ["sample.temperature=2.5", "0.01", "2.0"]),
        (True, {"sample.vllm_memory": 1.5}, ["sample.vllm_memory=1.5", "1"]),
        (True, {"sample.vllm_memory": 0.0}, ["sample.vllm_memory=0.0", "0"]),
        (
            True,
            {"sample.vllm_tensor_parallel": 2, "sample.engine": "transformers"},
            ["sample.vllm_tensor_parallel=2", "sample.engine='transformers'"],
        ),
        (True, {"train.importance_cap": -1.0}, ["train.importance_cap=-1.0", "0"]),
        (True, {"sample.engine": "vlm"}, ["sample.engine='vlm'", "transformers", "vllm"]),
    ],
)
def test_invalid_vllm_settings_are_rejected(installed, fields, shown, monkeypatch):
    monkeypatch.setattr(config_checks, "find_spec", lambda name: installed or None)
    with raises_user_error(*shown):
        config_checks.check_config(vlm_runs.make_config(**{"sample.engine": "vllm", **fields}))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("internvl", "InternVL"), ("glm4v", "GLM-4.1V"), ("gemma3", "Gemma 3")),
        ("minicpmv4_7", "MiniCPM-V 4.7"),
    ],
)
def test_a_family_that_vllm_preprocesses_differently_is_rejected_before_loading(
    tmp_path, family, name
):
    start = small_vlm.save(tmp_path, family)
    with raises_user_error(name, str(start), field="sample.engine", value="vllm"):
        check_vllm_support(str(start), "main")


def test_an_invalid_tensor_parallel_size_is_rejected_before_loading(tmp_path, monkeypatch):
    source = str(small_vlm.save(tmp_path))
    check_vllm_support(source, "main", 2)
    with raises_user_error("4 attention heads", field="sample.vllm_tensor_parallel", value=3):
        check_vllm_support(source, "main", 3)
    fields = {"sample.engine": "vllm", "sample.vllm_tensor_parallel": 2}
    config = VLM_SPEC.check(vlm_runs.make_config(**fields))
    with raises_user_error("(1)", field="sample.vllm_tensor_parallel", value=2):
        build_plan(config.sample, config.train, 1)
    build_plan(config.sample, config.train, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # on each of four nodes
    with raises_user_error("(1)", field="sample.vllm_tensor_parallel", value=2):
        build_plan(config.sample, config.train, 4)


@pytest.mark.parametrize(
    ("built_for", "fields", "engine", "shown"),
    [
        ("cpu", {}, "vllm", "it is installed"),
        ("cpu", {"sample.engine": "transformers"}, "transformers", ""),
        (None, {}, "transformers", "needs the vLLM package"),
        ("", {}, "transformers", "cannot be used"),
        ("cuda", {}, "transformers", "is installed for cuda"),
        ("cpu", {"sample.temperature": 2.5}, "transformers", "sample.temperature=2.5"),
        ("cpu", {"sample.vllm_tensor_parallel": 3}, "transformers", "4 attention heads"),
        ("cpu", {"pretrained.model": "internvl"}, "transformers", "InternVL"),
        ("cpu", {"dataset": "videos"}, "transformers", "film.jsonl:1 has a video"),
    ],
)
def test_auto_uses_vllm_if_it_is_installed_and_supports_the_run(
    built_for, fields, engine, shown, tmp_path, monkeypatch, caplog
):
    """`built_for`: device of the installed vLLM; None if there is none, "" if it is broken."""
    installed = None if built_for is None else True
    monkeypatch.setattr(config_checks, "find_spec", lambda name: installed)
    platforms = SimpleNamespace(current_platform=SimpleNamespace(device_type=built_for))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=platforms))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms if built_for else None)
    fields = {"sample.engine": "auto", **fields}
    source = small_vlm.save(tmp_path, fields.pop("pretrained.model", "qwen3_vl"))
    videos = ("film.mp4",) if fields.pop("dataset", "") else ()
    questions = [Question("What?", videos=videos, where="film.jsonl:1")]
    config = vlm_runs.make_config(**{"pretrained.model": str(source), **fields})
    checked = config_checks.check_config(config)
    caplog.set_level(logging.INFO)
    chosen = choose_engine(checked, questions, Accelerator(cpu=True))
    assert chosen.sample.engine == engine
    messages = [record.getMessage() for record in caplog.records]
    lines = [message for message in messages if message.startswith("rollout engine")]
    if fields["sample.engine"] != "auto":
        assert not lines
        return
    [line] = lines
    assert f"{engine}, because" in line
    assert shown in line
    assert "use sample.engine='transformers'" not in line  # a hint for those who require vLLM


def test_auto_checks_the_temperature_of_an_evaluation_and_survives_a_broken_import(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(config_checks, "find_spec", lambda name: True)
    platforms = SimpleNamespace(current_platform=SimpleNamespace(device_type="cpu"))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=platforms))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    source = small_vlm.save(tmp_path, "qwen3_vl")
    fields = {"sample.engine": "auto", "pretrained.model": str(source)}
    config = config_checks.check_config(vlm_runs.make_config(**fields))
    choose = partial(choose_engine, config, [Question("What?")], Accelerator(cpu=True))
    assert choose(temperature=None).sample.engine == "vllm"
    assert choose(temperature=2.5).sample.engine == "transformers"

    class Broken:
        @property
        def current_platform(self) -> None:
            raise RuntimeError("no kernel image\nis available")

    caplog.set_level(logging.INFO)
    monkeypatch.setitem(sys.modules, "vllm.platforms", Broken())
    assert choose().sample.engine == "transformers"
    assert "cannot be used: no kernel image" in caplog.text
