"""Answers sampled by vLLM, in the process that trains, with the weights that are trained.

Every process has an engine of its own, on its own GPU, or several share one, each with a part of
the weights (tensor parallel). It sleeps while the weights are trained, and is sent them when it
wakes. vLLM is imported where it is used: most runs do without.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import snapshot_download
from peft.tuners import lora
from PIL import Image
from torch import Tensor, nn
from transformers import AutoConfig

from flow_grpo.answer.expert_layout import check_convertible, check_files, published_weights
from flow_grpo.answer.models import empty_model, find_family
from flow_grpo.answer.prompts import EncodedPrompt
from flow_grpo.answer.rollout import Answerer, Sample, ToAnswer
from flow_grpo.data.questions import Question
from flow_grpo.errors import UserError, first_line
from flow_grpo.pictures import read_picture
from flow_grpo.run.distributed import gathered, whole
from flow_grpo.speed.lora import narrowed
from flow_grpo.speed.low_bits import LowBitLinear

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
# Level 1 keeps the weights in main memory; they are sent anew anyway.
SLEEP_LEVEL = 2
Asked = tuple[dict[str, Any], int | None]  # a request and its seed, None for the greedy answer
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # of a CPU: training uses these cores too
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def check_platform(device: torch.device) -> None:
    """Refuse a vLLM that was built for another device, before anything is loaded."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are sent within the process
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm.platforms import current_platform

    if current_platform.device_type != device.type:
        raise UserError(
            f"sample.engine='vllm' is installed for {current_platform.device_type or 'no device'} "
            f"and the run is on {device.type}; install vLLM's build for {device.type}, or use "
            "sample.engine='transformers'"
        )


def check_family(source: str, revision: str, parallel: int = 1) -> None:
    """Refuse a model whose pictures vLLM would read in another way than training does, and one
    that cannot be divided among so many processes."""
    family = find_family(source, revision)
    if not family.vllm:
        (name,) = family.names.values()
        raise UserError(
            f"sample.engine='vllm' does not go with {name} (pretrained.model={source!r}), whose "
            "pictures vLLM cuts by itself; use sample.engine='transformers'"
        )
    config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    if any("expert" in name for name in config.get_text_config().to_dict()):
        empty = empty_model(source, revision)
        check_convertible(empty, source)
        check_files(empty, source)
    heads = config.get_text_config().num_attention_heads
    if heads % parallel:
        raise UserError(
            f"sample.vllm_tensor_parallel={parallel} must divide the {heads} attention heads of "
            f"pretrained.model={source!r}"
        )


def refuse_videos(questions: Iterable[Question]) -> None:
    for question in questions:
        if question.videos:
            raise UserError(
                f"{question.where}: asks about a video, and sample.engine='vllm' is shown none; "
                "use sample.engine='transformers'"
            )


@dataclass(kw_only=True)
class VllmAnswerer(Answerer):
    """The engine's log-probabilities are near those of the network, and not the same."""

    engine: Any  # vllm.LLM
    sleeps: bool  # what has memory of its own can give it back
    parallel: int = 1  # processes that share the engine

    exact = False

    @contextmanager
    def awake(self) -> Iterator[None]:
        if self.sleeps:
            torch.cuda.empty_cache()  # what training has left goes to the engine
            self.engine.wake_up(["weights"])
        self._send_weights()
        if self.sleeps:
            self.engine.wake_up(["kv_cache"])
        try:
            yield
        except UserError:  # which the others do not know of yet
            self._help_others()
            raise
        else:
            self._help_others()
        finally:
            if self.sleeps:
                self.engine.sleep(level=SLEEP_LEVEL)

    def _send_weights(self) -> None:
        model = self.policy.network.model
        weights = {"weights_iterator": published_weights(model, named_weights(model))}
        self.engine.collective_rpc("reload_weights", kwargs=weights)
        self.engine.apply_model(partial(mend, self.encoder.family.vllm_scratch))
        # what was computed with other weights
        self.engine.reset_prefix_cache()
        self.engine.llm_engine.reset_encoder_cache()

    def request(self, prompt: EncodedPrompt) -> dict[str, Any]:
        """A prompt as vLLM takes it, which repeats the placeholders of pictures by itself."""
        encoder, pictures = self.encoder, []
        for source, seen in zip(prompt.sources, prompt.seen, strict=True):
            # Of the size that it ends up with, so that vLLM, which resizes in another way, has
            # nothing to resize.
            size = encoder.family.size_of(encoder.images, seen)
            how = Image.Resampling(int(encoder.images.resample))
            pictures.append(read_picture(source).resize(size, how))
        shown = {"multi_modal_data": {"image": pictures}} if pictures else {}
        return {"prompt_token_ids": encoder.marked_once(prompt), **shown}

    def answer(
        self,
        prompts: dict[int, EncodedPrompt],
        rows: list[int],
        generators: list[torch.Generator] | None = None,
    ) -> list[Sample]:
        # drawn, so that the next answer of an episode has another one
        seeds = [None] * len(rows) if generators is None else list(map(drawn, generators))
        requests = {row: self.request(prompts[row]) for row in dict.fromkeys(rows)}
        outputs = self._generate([(requests[r], seed) for r, seed in zip(rows, seeds, strict=True)])
        return [
            self._sample(row, prompts[row], output)
            for row, output in zip(rows, outputs, strict=True)
        ]

    def _generate(self, own: list[Asked] | None) -> list[Any] | None:
        """What vLLM gives for these. Processes that share it ask together, in one order for all, as
        often as any of them has something to ask; None says that this one has nothing more, and is
        returned when nobody has."""
        from vllm import SamplingParams

        everyone, place = self._exchanged(own)
        if all(asked is None for asked in everyone):
            return None
        parts = [asked or [] for asked in everyone]
        requests, seeds = zip(*chain(*parts), strict=True)
        params = [SamplingParams(**self.settings(seed)) for seed in seeds]
        outputs = self.engine.generate(list(requests), params, use_tqdm=False)
        start = sum(map(len, parts[:place]))
        return outputs[start : start + len(parts[place])]

    def _exchanged(self, own: list[Asked] | None) -> tuple[list[list[Asked] | None], int]:
        """What all processes that share the engine ask, and which of them this one is."""
        if self.parallel == 1:
            return [own], 0
        from vllm.distributed.parallel_state import get_tp_group

        group, everyone = get_tp_group(), [None] * self.parallel
        torch.distributed.all_gather_object(everyone, own, group.cpu_group)
        return everyone, group.rank_in_group

    def _help_others(self) -> None:
        """Until nobody asks any more: they cannot sample without this process's weights."""
        while self.parallel > 1 and self._generate(None) is not None:
            pass

    def settings(self, seed: int | None) -> dict[str, Any]:
        """How vLLM samples: with a seed, or the greedy answer without one."""
        return {
            "temperature": 0.0 if seed is None else self.policy.network.temperature,
            "seed": seed,
            "max_tokens": self.max_new_tokens,
            "stop_token_ids": list(self.stop),
            "ignore_eos": True,  # no end tokens but these
            "logit_bias": dict.fromkeys(self.policy.network.banned, float("-inf")),
            "logprobs": 0,  # of the token that was chosen
            "detokenize": False,
        }

    def _sample(self, row: int, prompt: EncodedPrompt, output: Any) -> Sample:
        if list(output.prompt_token_ids) != prompt.ids.tolist():
            raise UserError(
                f"vLLM reads {len(output.prompt_token_ids)} tokens in a prompt where training "
                f"reads {len(prompt)}, or others; use sample.engine='transformers' with this model"
            )
        (chosen,) = output.outputs
        tokens = list(chosen.token_ids)
        log_probs = [
            step[token].logprob for step, token in zip(chosen.logprobs, tokens, strict=True)
        ]
        ended = chosen.finish_reason == "stop"
        text = self.encoder.decode(tokens)
        return Sample(row, torch.tensor(tokens), torch.tensor(log_probs), ended, text)

    def answers(self, batches: Iterable[ToAnswer]) -> Iterator[list[Sample]]:
        return (self.answer(*asked) for asked in batches)


def drawn(generator: torch.Generator) -> int:
    """A seed for vLLM."""
    return int(torch.randint(2**63 - 1, (), generator=generator))


@torch.no_grad()
def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All weights under the names that the model has without LoRA, and LoRA added to them; those in
    few bits as what they stand for. One at a time, so that there is no second model."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, lora.LoraLayer)}
    for name, weight in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        base, holder = owner.removesuffix(".base_layer"), model.get_submodule(owner)
        low = isinstance(holder, LowBitLinear)
        if "lora_" in name or (low and kind not in ("weight", "bias")):
            continue
        if low and kind == "weight":
            weight = holder.widened()
        if base in layers and kind == "weight":
            with gathered(layers[base].parameters(), fixed=True):
                value = _with_lora(layers[base], weight)
        else:
            with gathered([weight], fixed=True):
                value = whole(weight)
        yield f"{base}.{kind}", value


def _with_lora(layer: lora.LoraLayer, weight: Tensor) -> Tensor:
    total = whole(weight).to(torch.promote_types(weight.dtype, torch.float32))
    for adapter in layer.active_adapters:
        total += whole(layer.get_delta_weight(adapter))
    return narrowed(total, weight.dtype)


def mend(scratch: str, model: nn.Module) -> None:
    """What vLLM's own reloading of weights leaves behind. `scratch` names lists of tensors that are
    0 where there is no picture: neither weights nor buffers, so after a sleep they hold anything.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        for sums in (getattr(module, scratch, None) if scratch else None) or ():
            sums.zero_()
        # A head that is tied to the embedding is not loaded, and on a CPU it has a packed copy.
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        # Experts are packed for the CPU on the first load, but not on reload
        # (vLLM 0.32.0, fused_moe/unquantized_fused_moe_method.py, lines 187 to 205).
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and module.w13_weight.device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(module)


def build_answerer(
    ours: Answerer,
    *,
    source: str,
    revision: str,
    device: torch.device,
    dtype: torch.dtype,
    num_processes: int,
    longest_prompt: int,
    pictures: int,
    memory: float,
    parallel: int = 1,
    seed: int,
) -> VllmAnswerer:
    """An engine that answers as `ours` does. All processes build theirs at the same time.

    `pictures`: the most that a prompt has; `memory`: share of the GPU's, for weights and cache;
    `parallel`: processes, by their numbers next to each other, that share an engine.
    """
    check_platform(device)
    from vllm import LLM

    on_gpu = device.type != "cpu"
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    with engine_files(source, revision, ours) as folder, _explained(memory):
        engine = LLM(
            folder,
            trust_remote_code=False,
            dtype=dtype,
            seed=seed,
            max_model_len=longest_prompt + ours.max_new_tokens,
            gpu_memory_utilization=memory,
            tensor_parallel_size=parallel,
            # it joins the processes that there are; without it they would all take the first GPU
            distributed_executor_backend="external_launcher" if num_processes > 1 else None,
            enable_sleep_mode=on_gpu,
            enforce_eager=not on_gpu,
            # on a CPU, half of a prompt is more than seeds of requests survive
            enable_chunked_prefill=on_gpu,
            limit_mm_per_prompt={"image": max(1, pictures), "video": 0},
            logprobs_mode="processed_logprobs",  # after temperature and bans
            generation_config="vllm",  # no top-p of the model's own
        )
    torch.set_num_threads(threads)  # it takes these for the whole process
    torch.set_float32_matmul_precision(precision)
    if on_gpu:
        engine.sleep(level=SLEEP_LEVEL)
    known = {name: getattr(ours, name) for name in ("policy", "encoder", "max_new_tokens", "stop")}
    return VllmAnswerer(**known, engine=engine, sleeps=on_gpu, parallel=parallel)


@contextmanager
def _explained(memory: float) -> Iterator[None]:
    try:
        yield
    except ValueError as error:  # nearly always of memory
        raise UserError(
            f"vLLM does not start with sample.vllm_memory={memory}: {first_line(error)}"
        ) from error


def engine_files(source: str, revision: str, ours: Answerer) -> TemporaryDirectory:
    """A folder with the model's weights, and tokenizer and image processor as training has them."""
    root = Path(source)
    if not root.is_dir():
        root = Path(snapshot_download(source, revision=revision, allow_patterns=WEIGHT_FILES))
    files = TemporaryDirectory(prefix="flow-grpo-vllm-")
    folder = Path(files.name)
    for pattern in WEIGHT_FILES:
        for path in root.glob(pattern):
            (folder / path.name).symlink_to(path.resolve())
    encoder = ours.encoder
    for part in (ours.policy.network.model.config, encoder.tokenizer, encoder.images):
        if part is not None:
            part.save_pretrained(folder)
    # asked for by vLLM, though nothing is a video
    (folder / "video_preprocessor_config.json").write_text("{}", encoding="utf-8")
    return files
