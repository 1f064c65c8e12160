"""The prompt cache and offloading: less memory and work, the same numbers."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from torch import nn
from user_errors import raises_user_error

from flow_grpo.diffusion.models import load_adapter
from flow_grpo.diffusion.models.prompt_cache import PromptCache, fingerprint
from flow_grpo.diffusion.models.sd3 import SD3Adapter

TEXTS = ["a red sign", 'it says "HELLO"', "", "Ünïcode ✓", "a", "a very long prompt " * 5]


@pytest.fixture(scope="module")
def pipeline(tiny_sd3):
    return StableDiffusion3Pipeline.from_pretrained(tiny_sd3)


@pytest.fixture
def cached(tiny_sd3, tmp_path):
    return lambda **options: load_adapter(
        str(tiny_sd3), **{"max_sequence_length": 8, "prompt_cache": str(tmp_path), **options}
    )


@pytest.fixture
def encoded(monkeypatch) -> list[list[str]]:
    """Record the prompts of every call of the encoders."""
    calls = []
    encode_prompt = StableDiffusion3Pipeline.encode_prompt

    def counted(self, **kwargs):
        calls.append(kwargs["prompt"])
        return encode_prompt(self, **kwargs)

    monkeypatch.setattr(StableDiffusion3Pipeline, "encode_prompt", counted)
    return calls


def by_text(adapter: SD3Adapter, texts: list[str], negative: list[str] | None = None) -> dict:
    batch = adapter.encode(texts, negative)
    rows = [*batch.positive, *([] if negative is None else batch.negative)]
    every = [*texts, *(negative or [])]
    return {
        t: (batch.inputs["embeds"][i], batch.inputs["pooled"][i])
        for t, i in zip(every, rows, strict=True)
    }


def assert_same(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for text in left:
        for a, b in zip(left[text], right[text], strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), text


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_are_those_of_the_encoders_in_any_batch(tiny_sd3, tmp_path, dtype):
    """In float32 the last bits of a batch of two differ from those of two batches of one."""
    options = dict(max_sequence_length=8, dtype=dtype)
    plain = load_adapter(str(tiny_sd3), **options)
    expected = {}
    for text in TEXTS:
        expected |= by_text(plain, [text])
    batches = [
        [(TEXTS, None)],
        [(TEXTS[::-1], None)],
        [(TEXTS[:2], ["", ""]), (TEXTS[1:4], [TEXTS[5]] * 3), (TEXTS[4:], TEXTS[:2])],
        [([text], None) for text in TEXTS],
    ]
    for i, met in enumerate(batches):
        for _run in ("computed", "read"):
            adapter = load_adapter(str(tiny_sd3), prompt_cache=str(tmp_path / str(i)), **options)
            seen = {}
            for texts, negative in met:
                seen |= by_text(adapter, texts, negative)
            seen |= by_text(adapter, TEXTS)  # from memory
            assert_same(seen, {text: expected[text] for text in seen})


def test_each_prompt_is_encoded_once_across_runs(cached, encoded, tmp_path):
    first = cached()
    before = by_text(first, ["a", "b"], ["", ""])
    by_text(first, ["b", "a"], ["c", ""])
    assert encoded == [["a"], ["b"], [""], ["c"]]
    assert len(files(tmp_path)) == 4
    second = cached()
    assert_same(by_text(second, ["a", "b"], ["", ""]), before)
    assert len(encoded) == 4
    for path in files(tmp_path):
        path.unlink()
    by_text(second, ["a", "b"], ["", ""])  # in memory
    assert len(encoded) == 4


def test_without_a_directory_each_prompt_is_encoded_once_and_nothing_is_written(
    adapter, encoded, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    adapter.encode(["a", "b"], None)
    adapter.encode(["b", "a"], None)
    assert encoded == [["a"], ["b"]]
    assert files(tmp_path) == []


def test_the_same_model_in_another_directory_has_the_same_keys(pipeline, cached, tmp_path):
    pipeline.save_pretrained(tmp_path / "copy")
    moved = load_adapter(
        str(tmp_path / "copy"), max_sequence_length=8, prompt_cache=str(tmp_path / "cache")
    )
    adapter = cached()
    assert moved._cache.key("a") == adapter._cache.key("a")
    adapter.encode(TEXTS, None)  # tokenizers keep how they were last used
    assert adapter._open_cache().key("a") == moved._cache.key("a")


def test_whatever_changes_an_embedding_changes_its_key(pipeline, tmp_path):
    def key(text="a", change=lambda pipeline: None, **options):
        changed = copy.deepcopy(pipeline)
        change(changed)
        options = {"max_sequence_length": 8, **options}
        return SD3Adapter(changed, prompt_cache=tmp_path, **options)._cache.key(text)

    def one_weight(pipeline):
        weight = pipeline.text_encoder_3.shared.weight.data
        weight[201, 7] = torch.nextafter(weight[201, 7], torch.tensor(9.0))

    def rows_in_other_order(pipeline):
        weight = pipeline.text_encoder.text_model.encoder.layers[0].mlp.fc1.weight.data
        weight.copy_(weight.flip(0))

    def no_t5(pipeline):
        pipeline.text_encoder_3 = pipeline.tokenizer_3 = None

    def another_word(pipeline):
        pipeline.tokenizer.add_tokens(["red"])

    def other_activation(pipeline):
        pipeline.text_encoder_2.config.hidden_act = "gelu"

    def other_vae(pipeline):
        pipeline.vae.decoder.conv_in.weight.data += 1

    keys = [
        key(),
        key(text="b"),
        key(text=""),
        key(text="a "),
        key(max_sequence_length=9),
        key(dtype=torch.bfloat16),
        *(key(change=c) for c in (one_weight, rows_in_other_order, no_t5)),
        *(key(change=c) for c in (another_word, other_activation)),
    ]
    assert len(set(keys)) == len(keys)
    assert key(change=other_vae) == keys[0]


@pytest.mark.parametrize(
    "version",
    ["flow_grpo.diffusion.models.prompt_cache.ENCODING_VERSION", "transformers.__version__"],
)
def test_embeddings_of_other_versions_are_not_read(cached, monkeypatch, version):
    adapter = cached()
    monkeypatch.setattr(version, "another")
    assert adapter._open_cache().key("a") != adapter._cache.key("a")


def test_the_fingerprint_depends_on_every_value():
    module = nn.Linear(37, 41)
    before = fingerprint(module)
    assert fingerprint(copy.deepcopy(module)) == before
    for i in range(0, 37 * 41, 97):
        changed = copy.deepcopy(module)
        changed.weight.data.view(-1)[i] += 1e-3
        assert fingerprint(changed) != before


def test_a_lora_on_the_text_encoders_changes_the_keys(cached, monkeypatch, tmp_path):
    adapter = cached()
    before = adapter._cache.key("a")

    def load(transformer, folder, pipeline):
        pipeline.text_encoder.text_projection.weight.data += 1

    monkeypatch.setattr("flow_grpo.diffusion.models.base.attach_lora", load)
    adapter.load_lora(tmp_path)
    assert adapter._cache.key("a") != before


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "zeros", "other", "text"])
def test_a_damaged_file_is_replaced_with_a_warning(cached, encoded, tmp_path, caplog, damage):
    expected = by_text(cached(), ["a", "b"])
    path, other = cached()._cache.path("a"), cached()._cache.path("b")
    good = path.read_bytes()
    middle = len(good) // 2
    path.write_bytes(
        {
            "empty": b"",
            "cut": good[:-1],
            "flipped": good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :],
            "zeros": good[:middle] + bytes(len(good) - middle),
            "other": other.read_bytes()[:middle] + good[middle:],
            "text": b"not a safetensors file",
        }[damage]
    )
    encoded.clear()
    assert_same(by_text(cached(), ["a", "b"]), expected)
    assert encoded == [["a"]]
    assert f"{path} is damaged" in caplog.text
    assert path.read_bytes() == good
    caplog.clear()
    assert_same(by_text(cached(), ["a", "b"]), expected)
    assert encoded == [["a"]]
    assert not caplog.text


def test_flipped_bytes_are_detected_and_do_not_stop_a_run(tmp_path):
    cache = PromptCache(tmp_path, "model")
    kept = cache.add("a", {"embeds": torch.arange(6.0).view(1, 2, 3), "pooled": torch.ones(1, 4)})
    path = cache.path("a")
    good = path.read_bytes()
    for i in range(len(good)):
        path.write_bytes(good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :])
        for found in PromptCache(tmp_path, "model").find(["a"]).values():
            assert found.keys() == kept.keys(), i
            assert all(torch.equal(found[name], kept[name]) for name in kept), i


def test_concurrent_writers_and_readers_see_complete_files(tmp_path, caplog):
    texts = [f"prompt {i}" for i in range(4)]
    values = {t: {"embeds": torch.full((1, 64, 512), i)} for i, t in enumerate(texts)}
    start = threading.Barrier(8)

    def work(_):
        start.wait()
        for _ in range(25):
            cache = PromptCache(tmp_path, "model")  # another process, as far as the disk knows
            for text, found in cache.find(texts).items():
                assert torch.equal(found["embeds"], values[text]["embeds"][0])
            for text in texts:
                cache.add(text, values[text])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not caplog.text
    assert files(tmp_path) == sorted(PromptCache(tmp_path, "model").path(t) for t in texts)
    assert set(PromptCache(tmp_path, "model").find(texts)) == set(texts)


@pytest.mark.parametrize("limit", [{"in_memory": 2}, {"max_bytes": 2 * 16 + 15}])
def test_memory_holds_the_most_recently_used_prompts(tmp_path, limit):
    cache = PromptCache(tmp_path, "model", **limit)
    for text in ("a", "b", "b"):
        cache.add(text, {"embeds": torch.zeros(1, 2, 2)})
    cache.find(["a"])
    cache.add("c", {"embeds": torch.zeros(1, 2, 2)})
    for path in files(tmp_path):
        path.unlink()
    assert set(cache.find(["a", "b", "c"])) == {"a", "c"}


def test_a_batch_larger_than_the_memory_cache_is_complete(cached):
    adapter = cached()
    adapter._cache = PromptCache(adapter.prompt_cache, "model", in_memory=1)
    assert by_text(adapter, TEXTS).keys() == set(TEXTS)


def test_a_full_disk_is_logged_once_and_does_not_stop_a_run(cached, encoded, monkeypatch, caplog):
    def full(self, data):
        raise OSError(28, "No space left on device")

    adapter = cached()
    monkeypatch.setattr(Path, "write_bytes", full)
    first = by_text(adapter, ["a", "b"])
    assert_same(by_text(adapter, ["a", "b"]), first)
    assert encoded == [["a"], ["b"]]
    assert caplog.text.count("No space left") == 1
    assert files(adapter.prompt_cache) == []


def test_a_cache_that_cannot_be_a_directory_is_rejected(tiny_sd3, tmp_path):
    (tmp_path / "file").touch()
    with raises_user_error(field="prompt_cache", value=str(tmp_path / "file")):
        load_adapter(str(tiny_sd3), prompt_cache=str(tmp_path / "file"))


class Places:
    """Where modules were last sent. "cpu:0" plays the GPU: a device that is not called "cpu"."""

    def __init__(self, monkeypatch) -> None:
        self.of: dict[int, str] = {}
        self.moves = 0
        to = nn.Module.to

        def recorded(module, *args, **kwargs):
            place = next((a for a in args if isinstance(a, torch.device)), None)
            if place is not None:
                self.of[id(module)] = str(place)
                self.moves += 1
            return to(module, *args, **kwargs)

        monkeypatch.setattr(nn.Module, "to", recorded)

    def __call__(self, pipeline: StableDiffusion3Pipeline) -> dict[str, str]:
        names = ("text_encoder", "text_encoder_2", "text_encoder_3", "vae", "transformer")
        return {name: self.of[id(getattr(pipeline, name))] for name in names}


IDLE = dict.fromkeys(("text_encoder", "text_encoder_2", "text_encoder_3", "vae"), "cpu")
IDLE["transformer"] = "cpu:0"
ENCODING = {**dict.fromkeys(IDLE, "cpu:0"), "vae": "cpu"}
DECODING = {**IDLE, "vae": "cpu:0"}


@pytest.fixture
def places(monkeypatch) -> Places:
    return Places(monkeypatch)


def test_encoders_and_vae_are_on_the_device_only_while_used(tiny_sd3, places, monkeypatch):
    adapter = load_adapter(str(tiny_sd3), device="cpu:0", max_sequence_length=8, offload_idle=True)
    pipeline, during = adapter.pipeline, []
    encode_prompt, decode = pipeline.encode_prompt, pipeline.vae.decode
    for owner, name, call in (
        (pipeline, "encode_prompt", encode_prompt),
        (pipeline.vae, "decode", decode),
    ):

        def watched(*args, call=call, **kwargs):
            during.append(places(pipeline))
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)
    assert places(pipeline) == IDLE
    conditioning = adapter.encode(["a", "b"], None)
    assert places(pipeline) == IDLE
    images = adapter.decode(torch.ones(1, *adapter.latent_shape(32, 32)))
    assert places(pipeline) == IDLE
    assert during == [ENCODING, ENCODING, DECODING]  # a text at a time

    plain = load_adapter(str(tiny_sd3), max_sequence_length=8)
    assert torch.equal(
        conditioning.inputs["embeds"], plain.encode(["a", "b"], None).inputs["embeds"]
    )
    assert torch.equal(images, plain.decode(torch.ones(1, *plain.latent_shape(32, 32))))


def test_encoders_are_offloaded_when_encoding_fails(tiny_sd3, places, monkeypatch):
    adapter = load_adapter(str(tiny_sd3), device="cpu:0", offload_idle=True)

    def fail(**kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(adapter.pipeline, "encode_prompt", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        adapter.encode(["a"], None)
    assert places(adapter.pipeline) == IDLE


def test_encoders_move_once_for_new_prompts_and_never_for_cached_ones(cached, places, encoded):
    adapter = cached(device="cpu:0", offload_idle=True)
    before = places.moves
    adapter.encode(["a", "b"], [""] * 2)
    assert len(encoded) == 3
    assert places.moves - before == 6  # three encoders, there and back
    again = cached(device="cpu:0", offload_idle=True)
    before = places.moves
    adapter.encode(["a", "b"], [""] * 2)
    again.encode(["b"], [""])
    assert places.moves == before


@pytest.mark.parametrize(("device", "offload"), [("cpu", True), ("cpu:0", False)])
def test_nothing_is_offloaded_on_the_cpu_or_without_the_option(tiny_sd3, places, device, offload):
    adapter = load_adapter(
        str(tiny_sd3), device=device, max_sequence_length=8, offload_idle=offload
    )
    assert set(places(adapter.pipeline).values()) == {device}
    before = places.moves
    adapter.encode(["a"], None)
    adapter.decode(torch.ones(1, *adapter.latent_shape(32, 32)))
    assert places.moves == before
