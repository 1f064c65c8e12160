"""Training of every model family with LoRA and with all weights, including the vision tower.

What is saved is loaded by transformers and PEFT.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import small_vlm
import torch
import vlm_runs
from peft import PeftModel
from runner import run_script
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BatchFeature,
    CohereConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MiniCPMV4_6ImageProcessorPil,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.minicpmv4_7.processing_minicpmv4_7 import MiniCPMV4_7Processor
from untrained.small.components import seeded
from user_errors import raises_user_error

from flow_grpo.data.questions import Question
from flow_grpo.data.seeding import sample_generators
from flow_grpo.images import read_image
from flow_grpo.training.export import ExportSource
from flow_grpo.vlm import export as vlm_export
from flow_grpo.vlm.builders import max_prompt_tokens
from flow_grpo.vlm.models import check_gpu_memory, get_family, load_model, load_processors
from flow_grpo.vlm.network import PolicyModel
from flow_grpo.vlm.packing import (
    Response,
    concat_vision_inputs,
    left_pad_prompts,
    pack_responses,
)
from flow_grpo.vlm.policy import VlmPolicy
from flow_grpo.vlm.prompts import PromptEncoder
from flow_grpo.vlm.reward_models.session import max_conversation_tokens
from flow_grpo.vlm.rollout import Sample
from flow_grpo.vlm.session import VlmSession

pytestmark = pytest.mark.slow  # all together
ROWS = [0, 0, 1, 1, 2, 2]  # questions with no, one and two images
PIXELS = {
    "": {},
    "smaller": {"max_pixels": 1024},
    "larger": {"min_pixels": 128 * 128, "max_pixels": 256 * 256},
}
MINICPMV = ("minicpmv4_6", "minicpmv4_7")
CPU = torch.device("cpu")
LAYERS = (nn.Linear, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Runs:
    start: Path
    lora: VlmSession
    full: VlmSession


@pytest.fixture(scope="module", params=[f for f in small_vlm.FAMILIES if f != "minicpmv4_6"])
def runs(request, tmp_path_factory) -> Runs:
    """Train one epoch with LoRA and one with all weights, from the published layout."""
    family, folder = request.param, tmp_path_factory.mktemp(request.param)
    save = small_vlm.save_as_published if family in small_vlm.OLD_LAYOUT else small_vlm.save
    start = save(folder / "model", family)
    fields = {"pretrained.model": str(start), "dataset": str(small_vlm.write_data(folder / "data"))}
    fields |= {"logdir": str(folder), "num_epochs": 1, "train.freeze_vision": False}
    # lora_B starts at 0, so LoRA needs larger and more steps
    steps = {"train.learning_rate": 1e-2, "train.num_inner_epochs": 2, "train.recompute_old": True}
    lora = vlm_runs.run(**fields, run_name="lora", **steps)
    full = vlm_runs.run(**fields, run_name="full", use_lora=False)
    return Runs(start, lora, full)


def load(folder: Path) -> nn.Module:
    return AutoModelForImageTextToText.from_pretrained(folder)


def export(session: VlmSession) -> Path:
    out = session.folder / "exported"
    if not out.exists():
        source = ExportSource.find(session.folder)
        vlm_export.export(source, source.trained_model()[0], out)
    return out


def sample_responses(session: VlmSession) -> list[Sample]:
    prompts = session.rollout_engine.encode(session.questions, ROWS)
    generators = sample_generators(1, 2, list(range(len(ROWS))))
    with session.rollout_engine.generation_mode():
        return session.rollout_engine.generate(prompts, ROWS, generators)


def trained_log_probs(session: VlmSession, samples: list[Sample]) -> list[Tensor]:
    prompts = session.rollout_engine.encode(session.questions, ROWS)
    shares = session.policy.network.family.shares_prompt
    numbers = [s.row if shares else i for i, s in enumerate(samples)]
    responses = [
        Response(n, prompts[s.row], s.tokens) for n, s in zip(numbers, samples, strict=True)
    ]
    batch = pack_responses(responses, session.rollout_engine.pad)
    found = session.policy.forward_tokens_no_grad(batch)["log_probs"]
    return [row[mask] for row, mask in zip(found, batch.mask, strict=True)]


@torch.no_grad()
def stock_logits(model: nn.Module, session: VlmSession, sample: Sample) -> Tensor:
    """Return the logits of a response by the forward pass of transformers, without padding."""
    question, encoder = session.questions[sample.row], session.rollout_engine.encoder
    prompt = encoder.encode(question)
    ids, extra = (
        torch.cat([prompt.ids, sample.tokens])[None],
        concat_vision_inputs(prompt.vision_inputs),
    )
    if (
        extra.pop("seconds_per_grid", None) is not None
    ):  # of Qwen's, whose positions are of three axes
        extra["mm_token_type_ids"] = (ids == small_vlm.IMAGE).int()
    extra.pop("tiles", None)  # InternVL computes them
    if model.config.model_type == "gemma3":  # its images attend to themselves in both directions
        extra["token_type_ids"] = (ids == small_vlm.IMAGE).int()
    if model.config.model_type in MINICPMV and question.images:
        images = [read_image(source) for source in question.images]
        inputs = encoder.image_processor(images, return_tensors="pt")
        extra = {name: inputs[name] for name in ("pixel_values", "target_sizes")}
        if model.config.model_type == "minicpmv4_7":
            extra["mm_token_type_ids"] = (ids == small_vlm.IMAGE).int()
    return model.eval()(input_ids=ids, **extra).logits[0, len(prompt) - 1 : -1]


def max_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def assert_agreement(session: VlmSession, model: nn.Module, tolerance: float) -> None:
    """Assert that log-probabilities agree between sampling, training, batch sizes and `model`."""
    samples, banned = sample_responses(session), session.policy.network.banned_token_ids
    mixed, theirs = trained_log_probs(session, samples), []
    for sample in samples:
        logits = stock_logits(model, session, sample)
        logits[:, banned] = -torch.inf
        theirs.append(logits.log_softmax(-1).gather(-1, sample.tokens[:, None])[:, 0])
    assert max_difference(mixed, [s.log_probs for s in samples]) < tolerance
    assert max_difference(mixed, [trained_log_probs(session, [s])[0] for s in samples]) < tolerance
    assert max_difference(mixed, theirs) < tolerance


@contextmanager
def in_float64(session: VlmSession) -> Iterator[None]:
    """Run the session in float64 and restore float32 exactly afterwards."""
    network, model = session.policy.network.double(), session.policy.model
    original = model.config._experts_implementation
    model.set_experts_implementation("eager")  # the default does not support float64
    with vlm_runs.in_float64():
        yield
    model.set_experts_implementation(original)
    network.float()


def assert_same_model(
    one: nn.Module, other: nn.Module, session: VlmSession, tolerance: float
) -> None:
    for sample in sample_responses(session):
        ours, theirs = (stock_logits(model, session, sample) for model in (one, other))
        assert (ours - theirs).abs().max() <= tolerance


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_first_update_is_on_policy(runs, kind):
    line = vlm_runs.read_metrics(getattr(runs, kind))[-1]
    # exactly 0 if old log-probabilities are recomputed
    assert line["train/first_update_ratio_dev"] <= (0 if kind == "lora" else 1e-5)
    assert line["train/grad_norm"] > 0


def test_a_whole_group_of_training_samples_is_logged(runs):
    path = runs.lora.folder / "samples/train-00001/samples.jsonl"
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    assert [row["group"] for row in rows] == [0] * 4
    assert len({(row["prompt"], row["truth"]) for row in rows}) == 1


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_sampling_training_and_transformers_agree_on_trained_weights(runs, kind):
    session = getattr(runs, kind)
    assert_agreement(session, session.policy.model, tolerance=2e-6)
    with in_float64(session):  # the difference is due to rounding
        assert_agreement(session, session.policy.model, tolerance=1e-10)


def test_transformers_loads_trained_weights(runs):
    session = runs.full
    saved = session.folder / "checkpoints/latest/model"
    loaded, trained = load(saved), dict(session.policy.model.named_parameters())
    start = dict(load(runs.start).named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, trained[name]), name
        assert not torch.equal(parameter, start[name]), name  # including the vision tower
    assert_same_model(loaded, session.policy.model, session, tolerance=0)
    assert_same_model(load(export(session)), loaded, session, tolerance=0)
    for folder in (saved, export(session)):  # training can start from either
        template = small_vlm.chat_template(loaded.config.model_type)
        assert load_processors(str(folder))[0].chat_template == template


def test_peft_loads_the_lora_and_the_export_is_merged(runs):
    session, start = runs.lora, load(runs.start)
    loaded = PeftModel.from_pretrained(load(runs.start), session.folder / "checkpoints/latest/lora")
    assert_same_model(loaded, session.policy.model, session, tolerance=1e-6)
    merged = load(export(session))
    assert_same_model(merged, loaded, session, tolerance=1e-5)
    sample = sample_responses(session)[-1]
    both = [stock_logits(model, session, sample) for model in (merged, start)]
    assert max_difference(*([each] for each in both)) > 1e-3  # training had an effect


def test_lora_trains_every_layer_of_the_tower(runs):
    start, merged = load(runs.start), load(export(runs.lora))
    before, after = (dict(get_family(m).tower.named_modules()) for m in (start, merged))
    layers = [name for name, module in before.items() if isinstance(module, LAYERS)]
    assert len(layers) >= 11
    unchanged = [n for n in layers if torch.equal(before[n].weight, after[n].weight)]
    assert not unchanged


@pytest.mark.parametrize("runs", ["qwen2_5_vl"], indirect=True)
def test_export_script_writes_the_same_files(runs, tmp_path):
    folder, out = runs.lora.folder, tmp_path / "out"
    done = run_script("scripts/export.py", "--checkpoint", folder, "--out", out)
    assert done.returncode == 0, done.stderr
    files = [(path / "model.safetensors").read_bytes() for path in (out, export(runs.lora))]
    assert files[0] == files[1]


def test_images_are_resized_to_the_pixel_limits(runs, tmp_path):
    """Without limits in the config, those of the image processor apply."""
    path = tmp_path / "large.png"
    small_vlm.random_image(0, 128, 192).save(path)
    question, model = Question("How many?", (path,)), runs.full.policy.model
    if model.config.model_type == "gemma3":  # all images have the same size
        for own in (PIXELS["smaller"], PIXELS["larger"]):
            with raises_user_error("set m", field=next(iter(own))):
                load_processors(str(runs.start), **own)
        return
    limits = PIXELS
    tokens = {"": 12, "smaller": 2, "larger": 96}
    if model.config.model_type in MINICPMV:
        with raises_user_error("set min_pixels=0", field="min_pixels", value=7):
            load_processors(str(runs.start), min_pixels=7)
        limits = {"": {}, "one": {"max_pixels": 2047}, "two": {"max_pixels": 2048}}
        # a thumbnail with 2 x 4 slices, alone, and with 1 x 2 slices
        tokens = {"": 4 * 9, "one": 4, "two": 4 * 3}
    if model.config.model_type == "internvl":  # 3 x 2, 2 x 2 or 15 x 10 tiles and a thumbnail
        tokens = {"": 4 * 7, "smaller": 4 * 5, "larger": 4 * 151}
    for kind, count in tokens.items():
        encoder = PromptEncoder(*load_processors(str(runs.start), **limits[kind]), model)
        prompt = encoder.encode(question)
        assert (prompt.ids == small_vlm.IMAGE).sum() == count
        assert encoder.prompt_length(question) == len(prompt)


def test_minicpmv_4_6_is_trained(tmp_path, caplog):
    """Its positions differ from those of 4.7, and published weights may include MTP weights."""
    start = small_vlm.save(tmp_path / "model", "minicpmv4_6")
    path = start / "model.safetensors"
    weights = {**load_file(path), "mtp.fc.weight": torch.zeros(2, 2)}
    save_file(weights, path, metadata={"format": "pt"})
    data = small_vlm.write_data(tmp_path / "data")
    fields = {"pretrained.model": str(start), "dataset": str(data), "logdir": str(tmp_path)}
    fields |= {"num_epochs": 1, "train.freeze_vision": False, "train.recompute_old": True}
    caplog.set_level("INFO", "flow_grpo")
    session = vlm_runs.run(**fields, **{"train.learning_rate": 1e-2})
    assert caplog.text.count("1 of its tensors") == 1
    line = vlm_runs.read_metrics(session)[-1]
    assert line["train/first_update_ratio_dev"] == 0
    assert line["train/grad_norm"] > 0
    for model in (session.policy.model, load(export(session))):
        assert_agreement(session, model, tolerance=2e-6)
    with in_float64(session):
        assert_agreement(session, session.policy.model, tolerance=1e-10)


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ([(128, 192), (16, 16), (48, 48)], {}),
        ([(333, 100)], {"max_slice_nums": 4, "use_image_id": False}),
        ([(3, 600), (64, 64)], {"slice_mode": False}),
        ([(50, 70), (20, 30)], {"downsample_mode": "4x"}),
    ],
)
def test_slices_of_minicpmv_are_those_of_its_processor(sizes, settings):
    model = small_vlm.build("minicpmv4_7")
    encoder = small_vlm.encoder(model)
    processor = encoder.image_processor
    for name, value in settings.items():
        setattr(processor, name, value)
    model.config.downsample_mode = processor.downsample_mode
    encoder = PromptEncoder(encoder.tokenizer, processor, model)
    images = [small_vlm.random_image(i, *size) for i, size in enumerate(sizes)]
    sources = tuple(small_vlm.encode_image(image) for image in images)
    question = Question("".join(f"{i}<image>" for i in range(len(images))), sources)
    prompt, inputs = encoder.encode(question), processor(images, return_tensors="pt")
    text = f"<|im_start|>{minicpmv_text(processor, inputs, len(images))}<|im_end|><|im_start|>"
    assert encoder.tokenizer.decode(prompt.ids) == text
    assert encoder.prompt_length(question) == len(prompt)
    network, kinds = PolicyModel(model).eval(), (prompt.ids == small_vlm.IMAGE).int()
    with torch.no_grad():
        ours = network.hidden_states(left_pad_prompts([prompt], small_vlm.PAD))
        extra = {name: inputs[name] for name in ("pixel_values", "target_sizes")}
        stock = model.model(prompt.ids[None], mm_token_type_ids=kinds[None], **extra)
    assert (ours - stock.last_hidden_state).abs().max() < 1e-5
    # the marker of a thumbnail is text in a response
    written = encoder.encode_response("a<image><slice>", "row 1", small_vlm.EOS).tolist()
    assert not {small_vlm.START, small_vlm.SLICE_START}.intersection(written)


@pytest.mark.parametrize("family", MINICPMV)
def test_markers_of_minicpmv_are_tokens_that_are_never_sampled(family):
    model, tokenizer = small_vlm.build(family), small_vlm.build_tokenizer(family)
    policy = VlmPolicy(model, processors=[tokenizer], use_lora=False, with_reference=True)
    markers = ["<image>", "</image>", *small_vlm.MINICPMV_MARKERS, "<|image_pad|>", "<|video_pad|>"]
    banned = tokenizer.convert_tokens_to_ids(markers)
    for network in (policy.network, policy._frozen_reference):
        assert network.banned_token_ids == sorted(banned)
    others = small_vlm.build_tokenizer("qwen3_vl")
    with raises_user_error("must encode <image> as ", field="tokenizer of "):
        PromptEncoder(others, small_vlm.build_image_processor(family), model)
    model.config.slice_end_id = small_vlm.SLICE_START
    with raises_user_error("must encode </slice> as the token", "slice_end_id"):
        small_vlm.encoder(model)


def minicpmv_text(processor: MiniCPMV4_6ImageProcessorPil, inputs: BatchFeature, count: int) -> str:
    """Return the text of `count` numbered images by the methods of transformers' processor."""
    markers = [*small_vlm.IMAGE_TOKENS["minicpmv4_7"], *small_vlm.MINICPMV_MARKERS]
    names = ["image_start", "image_end", "image", "slice_start", "slice_end"]
    names += ["image_id_start", "image_id_end"]
    own = {f"{name}_token": token for name, token in zip(names, markers, strict=True)}
    stock = SimpleNamespace(**own, video_token="", slice_mode=processor.slice_mode)
    divisor = 4 if processor.downsample_mode == "4x" else 16
    replace_token = partial(
        MiniCPMV4_7Processor.replace_image_token, stock, inputs, image_token_divisor=divisor
    )
    texts = [replace_token(image_idx=i) for i in range(count)]
    if processor.use_image_id:
        text = stock.image_token * count
        texts = MiniCPMV4_7Processor._prepend_local_ids(stock, [text], texts, stock.image_token)
    return "".join(f"{i}{text}" for i, text in enumerate(texts))


TEXT_CONFIGS = {
    "qwen2": Qwen2Config(**small_vlm.TEXT),
    "qwen3": Qwen3Config(**small_vlm.TEXT, tie_word_embeddings=True),
    "llama": LlamaConfig(**small_vlm.TEXT),  # Llama 3; distilled R1 is this or qwen2
    "phi3": Phi3Config(**small_vlm.TEXT),  # has other layer names
    "gemma3": Gemma3TextConfig(**small_vlm.GEMMA3_TEXT),
}


def save_text_model(
    folder: Path, config: PretrainedConfig, template: str = small_vlm.TEMPLATE
) -> Path:
    with seeded(0):
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    tokenizer = small_vlm.build_tokenizer()
    tokenizer.chat_template = template
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", TEXT_CONFIGS)
def test_text_only_models_are_trained(tmp_path, kind):
    """Sampling, training and transformers agree after an epoch, also on exported weights."""
    start = save_text_model(tmp_path / "model", TEXT_CONFIGS[kind])
    fields = {"pretrained.model": str(start), "num_epochs": 1, "logdir": str(tmp_path)}
    fields |= {"train.beta": 0.1, "train.freeze_vision": False, "use_lora": kind != "qwen2"}
    fields |= {"dataset": str(small_vlm.write_text_data(tmp_path / "data"))}
    session = vlm_runs.run(**fields)
    line = vlm_runs.read_metrics(session)[-1]
    assert line["train/first_update_ratio_dev"] <= 1e-5
    assert line["train/grad_norm"] > 0
    for model in (session.policy.model, AutoModelForCausalLM.from_pretrained(export(session))):
        assert_agreement(session, model, tolerance=2e-6)
    with in_float64(session):
        assert_agreement(session, session.policy.model, tolerance=1e-10)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(vocab_size=small_vlm.VOCABULARY, n_embd=32, n_head=4, n_layer=1), "lm_head"),
        (MistralConfig(**small_vlm.TEXT, sliding_window=8), "sliding_window=8"),
        (CohereConfig(**{**small_vlm.TEXT, "logit_scale": 4.0}), "log-probabilities differ"),
    ],
)
def test_unsupported_language_models_are_rejected(tmp_path, config, message):
    start = save_text_model(tmp_path / "model", config)
    fields = {
        "pretrained.model": str(start),
        "dataset": str(small_vlm.write_text_data(tmp_path / "data")),
    }
    with raises_user_error(message, "pretrained.model", "custom_models"):
        vlm_runs.run(**fields, logdir=str(tmp_path))


def test_longrope_models_are_limited_to_their_original_context():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = Phi3Config(**small_vlm.TEXT, rope_parameters=rope, original_max_position_embeddings=64)
    with seeded(0):
        model = AutoModelForCausalLM.from_config(config)
        ids = torch.randint(20, 90, (1, 65))
    with torch.no_grad():  # one token more changes the probabilities of all
        short, long = (model.eval()(input_ids=ids[:, :n]).logits[:, 1:64] for n in (64, 65))
    assert (short - long).abs().max() > 1e-3
    fields = {"sample.max_new_tokens": 60}
    assert max_prompt_tokens(vlm_runs.make_config(**fields), model) == 4
    with raises_user_error("the 64 tokens", field="max_prompt_length", value=5):
        max_prompt_tokens(vlm_runs.make_config(**fields, max_prompt_length=5), model)
    # a reward model has no response to sample
    assert max_conversation_tokens(vlm_runs.make_config(), model) == 64
    assert max_conversation_tokens(vlm_runs.make_config(max_prompt_length=9), model) == 9
    with raises_user_error("the 64 tokens", field="max_prompt_length", value=65):
        max_conversation_tokens(vlm_runs.make_config(max_prompt_length=65), model)


def test_images_are_rejected_for_a_text_only_model(tmp_path):
    start = save_text_model(tmp_path / "model", TEXT_CONFIGS["qwen3"])
    data = small_vlm.write_data(tmp_path / "data")
    with raises_user_error(f"pretrained.model={str(start)!r}", "image_key=none"):
        vlm_runs.run(**{"pretrained.model": str(start)}, dataset=str(data), logdir=str(tmp_path))


def test_think_tag_opened_by_the_template_is_part_of_the_response(tmp_path):
    """As in distilled R1 models, whose template accepts only text contents."""
    template = "{% for m in messages %}{{ m['content'] | trim }}{% endfor %}<think>\n"
    start = save_text_model(tmp_path / "model", TEXT_CONFIGS["llama"], template)
    encoder = PromptEncoder(
        *load_processors(str(start)), load_model(str(start), CPU, torch.float32)
    )
    prompt = encoder.encode(Question("1+1?", ()))
    assert encoder.tokenizer.decode(prompt.ids) == "1+1?<think>"
    response = encoder.tokenizer("2</think>2", add_special_tokens=False)["input_ids"]
    assert encoder.decode(response) == "<think>2</think>2"


@pytest.mark.parametrize("family", small_vlm.FAMILIES)
def test_a_model_beyond_a_gpus_memory_is_rejected_before_loading(tmp_path, family):
    source = str(small_vlm.save(tmp_path, family))
    hints = {"bf16": "--config.pretrained.base_precision=nf4", "nf4": "a smaller model"}
    for precision, hint in hints.items():
        model = load_model(source, CPU, torch.bfloat16, base_precision=precision)
        size = sum(parameter.nbytes for parameter in model.parameters())
        check_gpu_memory(source, size, torch.bfloat16, base_precision=precision)
        with raises_user_error(" GB", hint, field="pretrained.model", value=source):
            check_gpu_memory(source, size - 1, torch.bfloat16, base_precision=precision)
