"""Rollout engine that samples with vLLM in the training process.

Every rank has its own engine on its GPU, or several ranks share one with tensor parallelism. The
engine sleeps during training; the current weights are sent to it when it wakes. vLLM is imported
lazily, because most runs do not use it.
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

from flow_grpo.data.questions import Question
from flow_grpo.errors import UserError, first_line
from flow_grpo.images import read_image
from flow_grpo.modelscope_hub import local_model
from flow_grpo.perf.lora import cast_stochastic
from flow_grpo.perf.quantization import QuantizedLinear
from flow_grpo.training.distributed import gather_parameters, to_full_tensor
from flow_grpo.vlm.expert_layout import (
    check_expert_files,
    check_experts_convertible,
    published_weights,
)
from flow_grpo.vlm.models import build_meta_model, find_family
from flow_grpo.vlm.prompts import EncodedPrompt
from flow_grpo.vlm.rollout import GenerationBatch, RolloutEngine, Sample

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
# Level 1 would keep the weights in host memory, but they are sent again anyway.
SLEEP_LEVEL = 2
VllmRequest = tuple[dict[str, Any], int | None]  # a request and its seed (None for greedy)
ENVIRONMENT_VARIABLES = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # training uses the same CPU cores
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def check_vllm_platform(device: torch.device) -> None:
    """Reject a vLLM that was built for another device; make vLLM run in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are passed within the process
    for name, value in ENVIRONMENT_VARIABLES.items():
        os.environ.setdefault(name, value)
    from vllm.platforms import current_platform

    if current_platform.device_type != device.type:
        raise UserError(
            f"is installed for {current_platform.device_type or 'no device'}, but the run is on "
            f"{device.type}",
            field="sample.engine",
            value="vllm",
            hint=f"install vLLM's build for {device.type}, or use sample.engine='transformers'",
        )


def check_vllm_support(source: str, revision: str, tensor_parallel: int = 1) -> None:
    """Raise a UserError for a model that vLLM cannot sample for.

    That is the case if its family is excluded (`Family.vllm`), or if vLLM cannot load its experts
    or shard its attention heads over `tensor_parallel` ranks.
    """
    source = local_model(source, revision)
    family = find_family(source, revision)
    if not family.vllm:
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
        raise UserError(
            f"does not support {family.names[config.model_type]} (pretrained.model={source!r})",
            field="sample.engine",
            value="vllm",
            hint="use sample.engine='transformers' (docs/vlm/generation.md has the reason)",
        )
    config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    if any("expert" in name for name in config.get_text_config().to_dict()):
        meta_model = build_meta_model(source, revision)
        check_experts_convertible(meta_model, source)
        check_expert_files(meta_model, source)
    heads = config.get_text_config().num_attention_heads
    if heads % tensor_parallel:
        raise UserError(
            f"must divide the {heads} attention heads of pretrained.model={source!r}",
            field="sample.vllm_tensor_parallel",
            value=tensor_parallel,
        )


def reject_videos(questions: Iterable[Question]) -> None:
    """Reject questions with videos, which this engine does not support."""
    for question in questions:
        if question.videos:
            raise UserError(
                "has a video, which sample.engine='vllm' does not support",
                field=question.where,
                hint="use sample.engine='transformers'",
            )


@dataclass(kw_only=True)
class VllmEngine(RolloutEngine):
    """Samples with vLLM, whose log-probabilities are close to the policy's but not equal."""

    engine: Any  # vllm.LLM
    supports_sleep: bool  # on GPUs only
    tensor_parallel: int = 1  # number of ranks that share the engine

    exact_log_probs = False

    @contextmanager
    def generation_mode(self) -> Iterator[None]:
        """Wake vLLM up with the current weights; on exit, serve peers until all are done."""
        if self.supports_sleep:
            torch.cuda.empty_cache()  # releases memory that the engine needs
            self.engine.wake_up(["weights"])
        self._send_weights()
        if self.supports_sleep:
            self.engine.wake_up(["kv_cache"])
        try:
            yield
        except UserError:  # other ranks still generate and need this one
            self._serve_peers()
            raise
        else:
            self._serve_peers()
        finally:
            if self.supports_sleep:
                self.engine.sleep(level=SLEEP_LEVEL)

    def _send_weights(self) -> None:
        """Copy the current weights, with LoRA merged, to vLLM and drop its caches."""
        model = self.policy.network.model
        weights = {"weights_iterator": published_weights(model, iter_merged_weights(model))}
        self.engine.collective_rpc("reload_weights", kwargs=weights)
        self.engine.apply_model(
            partial(repair_after_reload, self.encoder.family.vllm_scratch_buffers)
        )
        # drop what was computed with the previous weights
        self.engine.reset_prefix_cache()
        self.engine.llm_engine.reset_encoder_cache()

    def build_request(self, prompt: EncodedPrompt) -> dict[str, Any]:
        """Return the vLLM request of a prompt, with images resized as in training.

        vLLM repeats the placeholders of images itself.
        """
        encoder, images = self.encoder, []
        for source, vision_inputs in zip(prompt.sources, prompt.vision_inputs, strict=True):
            # resize here as in training, so that vLLM, which resizes differently, does not
            size = encoder.family.resized_size(encoder.image_processor, vision_inputs)
            resample = Image.Resampling(int(encoder.image_processor.resample))
            images.append(read_image(source).resize(size, resample))
        media = {"multi_modal_data": {"image": images}} if images else {}
        return {"prompt_token_ids": encoder.collapse_image_tokens(prompt), **media}

    def generate(
        self,
        prompts: dict[int, EncodedPrompt],
        rows: list[int],
        generators: list[torch.Generator] | None = None,
    ) -> list[Sample]:
        """Sample with vLLM; see `RolloutEngine.generate`. Each generator gives one seed."""
        # drawn from the generator, so that the next turn of an episode has another seed
        seeds = [None] * len(rows) if generators is None else list(map(draw_seed, generators))
        requests = {row: self.build_request(prompts[row]) for row in dict.fromkeys(rows)}
        outputs = self._generate([(requests[r], seed) for r, seed in zip(rows, seeds, strict=True)])
        return [
            self._sample(row, prompts[row], output)
            for row, output in zip(rows, outputs, strict=True)
        ]

    def _generate(self, requests: list[VllmRequest] | None) -> list[Any] | None:
        """Generate with vLLM, together with the ranks that share the engine.

        All of them have to call it the same number of times; each generates for all requests.

        Args:
            requests: Requests of this rank; None if it has no more.

        Returns:
            Outputs for `requests`; None if no rank has requests.
        """
        from vllm import SamplingParams

        gathered, rank = self._gather_requests(requests)
        if all(each is None for each in gathered):
            return None
        parts = [each or [] for each in gathered]
        prompts, seeds = zip(*chain(*parts), strict=True)
        params = [SamplingParams(**self.sampling_params(seed)) for seed in seeds]
        outputs = self.engine.generate(list(prompts), params, use_tqdm=False)
        start = sum(map(len, parts[:rank]))
        return outputs[start : start + len(parts[rank])]

    def _gather_requests(
        self, requests: list[VllmRequest] | None
    ) -> tuple[list[list[VllmRequest] | None], int]:
        """Return the requests of all ranks that share the engine, and this rank's index."""
        if self.tensor_parallel == 1:
            return [requests], 0
        from vllm.distributed.parallel_state import get_tp_group

        group, gathered = get_tp_group(), [None] * self.tensor_parallel
        torch.distributed.all_gather_object(gathered, requests, group.cpu_group)
        return gathered, group.rank_in_group

    def _serve_peers(self) -> None:
        """Keep generating until all ranks are done: they need this rank's shard of the weights."""
        while self.tensor_parallel > 1 and self._generate(None) is not None:
            pass

    def sampling_params(self, seed: int | None) -> dict[str, Any]:
        """Return the arguments of vLLM's SamplingParams; greedy without a seed."""
        return {
            "temperature": 0.0 if seed is None else self.policy.network.temperature,
            "seed": seed,
            "max_tokens": self.max_new_tokens,
            "stop_token_ids": list(self.stop),
            "ignore_eos": True,  # only the stop tokens above
            "logit_bias": dict.fromkeys(self.policy.network.banned_token_ids, float("-inf")),
            "logprobs": 0,  # of the sampled token only
            "detokenize": False,
        }

    def _sample(self, row: int, prompt: EncodedPrompt, output: Any) -> Sample:
        """Return vLLM's output as a sample; reject another tokenization of the prompt."""
        if list(output.prompt_token_ids) != prompt.ids.tolist():
            found, expected = len(output.prompt_token_ids), len(prompt)
            difference = f"{found} and {expected} tokens"
            if found == expected:
                difference = "equal length, different ids"
            raise UserError(
                f"tokenizes a prompt differently from training ({difference})",
                field="sample.engine",
                value="vllm",
                hint="use sample.engine='transformers' with this model",
            )
        (chosen,) = output.outputs
        tokens = list(chosen.token_ids)
        log_probs = [
            step[token].logprob for step, token in zip(chosen.logprobs, tokens, strict=True)
        ]
        ended = chosen.finish_reason == "stop"
        text = self.encoder.decode(tokens)
        return Sample(row, torch.tensor(tokens), torch.tensor(log_probs), ended, text)

    def generate_batches(self, batches: Iterable[GenerationBatch]) -> Iterator[list[Sample]]:
        return (self.generate(*batch) for batch in batches)


def draw_seed(generator: torch.Generator) -> int:
    """Draw a seed for vLLM."""
    return int(torch.randint(2**63 - 1, (), generator=generator))


@torch.no_grad()
def iter_merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights under their names without LoRA, with LoRA merged and dequantized.

    Weights are produced one at a time, so that there is never a second copy of the model.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, lora.LoraLayer)}
    for name, weight in model.named_parameters():
        owner, _, kind = name.rpartition(".")
        base, module = owner.removesuffix(".base_layer"), model.get_submodule(owner)
        quantized = isinstance(module, QuantizedLinear)
        if "lora_" in name or (quantized and kind not in ("weight", "bias")):
            continue
        if quantized and kind == "weight":
            weight = module.dequantize()
        if base in layers and kind == "weight":
            with gather_parameters(layers[base].parameters(), fixed=True):
                value = _merge_lora_delta(layers[base], weight)
        else:
            with gather_parameters([weight], fixed=True):
                value = to_full_tensor(weight)
        yield f"{base}.{kind}", value


def _merge_lora_delta(layer: lora.LoraLayer, weight: Tensor) -> Tensor:
    """Return `weight` plus the active LoRA, stochastically rounded to its dtype."""
    total = to_full_tensor(weight).to(torch.promote_types(weight.dtype, torch.float32))
    for adapter in layer.active_adapters:
        total += to_full_tensor(layer.get_delta_weight(adapter))
    return cast_stochastic(total, weight.dtype)


def repair_after_reload(scratch: str, model: nn.Module) -> None:
    """Restore state in vLLM's model that `reload_weights` does not.

    Args:
        scratch: Attribute with a list of tensors that have to be 0 for prompts without images, or
            "". They are neither weights nor buffers, so their values are undefined after a sleep.
        model: vLLM's model.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        for buffer in (getattr(module, scratch, None) if scratch else None) or ():
            buffer.zero_()
        # A head tied to the embedding is not loaded, but on a CPU it has a packed copy.
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
        # Experts are packed for the CPU on the first load but not on reload
        # (vLLM 0.32.0, fused_moe/unquantized_fused_moe_method.py, lines 187 to 205).
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and module.w13_weight.device.type == "cpu":
            kernel.fused_experts.process_weights_after_loading(module)


def build_vllm_engine(
    engine: RolloutEngine,
    *,
    source: str,
    revision: str,
    device: torch.device,
    dtype: torch.dtype,
    num_processes: int,
    longest_prompt: int,
    max_images: int,
    memory: float,
    tensor_parallel: int = 1,
    seed: int,
) -> VllmEngine:
    """Build a vLLM engine with the settings of a transformers engine; collective.

    Args:
        engine: The engine to replace.
        source: Value of `pretrained.model`.
        revision: Revision on the hub.
        device: Device of this rank.
        dtype: Dtype of vLLM's weights.
        num_processes: World size.
        longest_prompt: Maximum number of prompt tokens.
        max_images: Maximum number of images in a prompt.
        memory: Fraction of the GPU's memory for weights and cache.
        tensor_parallel: Number of consecutive ranks that share an engine.
        seed: The run's seed.
    """
    check_vllm_platform(device)
    from vllm import LLM

    on_gpu = device.type != "cpu"
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    with write_engine_files(source, revision, engine) as folder, _vllm_start_errors(memory):
        llm = LLM(
            folder,
            trust_remote_code=False,
            dtype=dtype,
            seed=seed,
            max_model_len=longest_prompt + engine.max_new_tokens,
            gpu_memory_utilization=memory,
            tensor_parallel_size=tensor_parallel,
            # join the existing processes; otherwise all of them would use the first GPU
            distributed_executor_backend="external_launcher" if num_processes > 1 else None,
            enable_sleep_mode=on_gpu,
            enforce_eager=not on_gpu,
            # on a CPU, chunked prefill does not respect the seeds of requests
            enable_chunked_prefill=on_gpu,
            limit_mm_per_prompt={"image": max(1, max_images), "video": 0},
            logprobs_mode="processed_logprobs",  # after temperature and banned tokens
            generation_config="vllm",  # ignore the model's own top-p
        )
    torch.set_num_threads(threads)  # vLLM changes these for the whole process
    torch.set_float32_matmul_precision(precision)
    if on_gpu:
        llm.sleep(level=SLEEP_LEVEL)
    return VllmEngine(
        policy=engine.policy,
        encoder=engine.encoder,
        max_new_tokens=engine.max_new_tokens,
        stop=engine.stop,
        engine=llm,
        supports_sleep=on_gpu,
        tensor_parallel=tensor_parallel,
    )


@contextmanager
def _vllm_start_errors(memory: float) -> Iterator[None]:
    """Turn vLLM's ValueError at start, nearly always about memory, into a UserError."""
    try:
        yield
    except ValueError as error:
        raise UserError(
            f"vLLM failed to start: {first_line(error)}",
            hint=f"if this is about memory, change sample.vllm_memory={memory}",
        ) from error


def write_engine_files(source: str, revision: str, engine: RolloutEngine) -> TemporaryDirectory:
    """Write a model directory for vLLM with the tokenizer and image processor used in training."""
    root = Path(source)
    if not root.is_dir():
        root = Path(snapshot_download(source, revision=revision, allow_patterns=WEIGHT_FILES))
    files = TemporaryDirectory(prefix="flow-grpo-vllm-")
    folder = Path(files.name)
    for pattern in WEIGHT_FILES:
        for path in root.glob(pattern):
            (folder / path.name).symlink_to(path.resolve())
    encoder = engine.encoder
    for part in (engine.policy.network.model.config, encoder.tokenizer, encoder.image_processor):
        if part is not None:
            part.save_pretrained(folder)
    # vLLM needs this file even without videos
    (folder / "video_preprocessor_config.json").write_text("{}", encoding="utf-8")
    return files
