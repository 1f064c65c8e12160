"""Tasks of `flow-grpo reproduce`: what is trained, what it needs, and how it is measured.

GPU memory is that of docs/tasks, measured on one H200 with random weights and computed for text
encoders and rewards. Download sizes are computed from the parameter counts in bf16. Neither was
checked with the released weights.
"""

from dataclasses import dataclass, field

LORA_RUN_GIB = 20  # samples, metrics and checkpoints; those of a LoRA are below 1 GiB
# Full fine-tuning of 3.75 B parameters: six checkpoints, each with 7 GiB of weights in bf16 and a
# state of three times that size.
FULL_3B_RUN_GIB = 6 * 4 * 7
PICKSCORE = ("yuvalkirstain/PickScore_v1", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K")
GENEVAL = ("facebook/mask2former-swin-small-coco-instance", "openai/clip-vit-large-patch14")


@dataclass(frozen=True)
class TrainingRun:
    """One training run of a task; the second run of a task starts from the model of the first."""

    name: str  # of the run directory
    preset: str
    overrides: tuple[str, ...] = ()
    vlm: bool = False

    @property
    def config(self) -> str:
        """Return the value of `--config`, without the suffix that selects the number of GPUs."""
        return f"config/{'vlm' if self.vlm else 'grpo'}.py:{self.preset}"

    @property
    def script(self) -> str:
        """Return the file name of the training script."""
        return "train_vlm.py" if self.vlm else "train.py"


@dataclass(frozen=True)
class Task:
    """A published experiment, or its counterpart on the small models."""

    title: str
    runs: tuple[TrainingRun, ...]
    benches: tuple[str, ...] = ()  # of `flow-grpo bench`
    models: dict[str, float] = field(default_factory=dict)  # hub id: GiB to download
    reward_weights: tuple[str, ...] = ()  # hub ids
    gpus: int = 0  # default; 0: runs on a CPU
    gpu_memory_gib: float = 0
    run_gib: float = 1  # disk space of the runs


def _small_images(name: str, preset: str, bench: str) -> Task:
    return Task(f"small counterpart of {name}", (TrainingRun("train", preset),), (bench,))


TASKS: dict[str, Task] = {
    "sd3_geneval": Task(
        "SD3.5-medium on GenEval (Flow-GRPO, arXiv 2505.05470)",
        (TrainingRun("train", "geneval_sd3", ("--config.eval_prompts=1000",)),),
        ("geneval",),
        {"stabilityai/stable-diffusion-3.5-medium": 14.8},
        GENEVAL,
        gpus=8,
        gpu_memory_gib=51.5,
        run_gib=LORA_RUN_GIB,
    ),
    "sd3_ocr": Task(
        "SD3.5-medium on text rendering (Flow-GRPO, arXiv 2505.05470)",
        (TrainingRun("train", "general_ocr_sd3"),),
        ("ocr",),
        {"stabilityai/stable-diffusion-3.5-medium": 14.8},
        gpus=8,
        gpu_memory_gib=38.5,
        run_gib=LORA_RUN_GIB,
    ),
    "sd3_pickscore": Task(
        "SD3.5-medium on PickScore (Flow-GRPO, arXiv 2505.05470)",
        (TrainingRun("train", "pickscore_sd3", ("--config.eval_prompts=1000",)),),
        ("drawbench",),
        {"stabilityai/stable-diffusion-3.5-medium": 14.8},
        PICKSCORE,
        gpus=8,
        gpu_memory_gib=42.5,
        run_gib=LORA_RUN_GIB,
    ),
    "flux_pickscore": Task(
        "FLUX.1-dev on PickScore (Flow-GRPO's repository)",
        (TrainingRun("train", "pickscore_flux", ("--config.eval_prompts=1000",)),),
        ("drawbench",),
        {"black-forest-labs/FLUX.1-dev": 31.1},
        PICKSCORE,
        gpus=8,
        gpu_memory_gib=67.6,
        run_gib=LORA_RUN_GIB,
    ),
    "qwen_image_ocr": Task(
        "Qwen-Image on text rendering",
        (TrainingRun("train", "general_ocr_qwen_image", ("--config.eval_prompts=256",)),),
        ("ocr",),
        {"Qwen/Qwen-Image": 52.8},
        gpus=8,
        gpu_memory_gib=67.8,
        run_gib=LORA_RUN_GIB,
    ),
    "qwen2_5_vl_geometry3k": Task(
        "Qwen2.5-VL-3B on geometry3k, all weights (EasyR1)",
        (TrainingRun("train", "qwen2_5_vl_3b_geometry3k", vlm=True),),
        ("geometry3k",),
        {"Qwen/Qwen2.5-VL-3B-Instruct": 7},
        gpus=8,
        gpu_memory_gib=65,
        run_gib=FULL_3B_RUN_GIB,
    ),
    "lmm_r1_two_stages": Task(
        "Qwen2.5-VL-3B on text mathematics, then on geometry3k (LMM-R1, arXiv 2503.07536)",
        (
            TrainingRun("text", "qwen2_5_vl_3b_text_math", vlm=True),
            TrainingRun(
                "images", "qwen2_5_vl_3b_geometry3k", ("--config.train.beta=0.001",), vlm=True
            ),
        ),
        ("geometry3k",),
        {"Qwen/Qwen2.5-VL-3B-Instruct": 7},
        gpus=8,
        gpu_memory_gib=65,
        run_gib=2 * FULL_3B_RUN_GIB + 7,
    ),
}
SMALL: dict[str, Task] = {
    "sd3_geneval": _small_images("sd3_geneval", "tiny_geneval", "tiny_scenes"),
    "sd3_ocr": _small_images("sd3_ocr", "tiny_ocr", "tiny_signs"),
    # no preference model is small enough
    "sd3_pickscore": _small_images("sd3_pickscore", "tiny_ocr", "tiny_signs"),
    "flux_pickscore": _small_images("flux_pickscore", "tiny_ocr", "tiny_signs"),
    "qwen_image_ocr": _small_images("qwen_image_ocr", "tiny_ocr", "tiny_signs"),
    "qwen2_5_vl_geometry3k": Task(
        "small counterpart of qwen2_5_vl_geometry3k",
        (TrainingRun("train", "tiny_vlm", vlm=True),),
        ("tiny_shapes_qa",),
    ),
    "lmm_r1_two_stages": Task(
        "small counterpart of lmm_r1_two_stages",
        (
            TrainingRun(
                "text",
                "tiny_vlm",
                (
                    "--config.dataset=dataset/sums",
                    "--config.eval_questions=0",
                    "--config.num_epochs=4",
                ),
                vlm=True,
            ),
            TrainingRun(
                "images",
                "tiny_vlm",
                ("--config.train.beta=0.01", "--config.num_epochs=8"),
                vlm=True,
            ),
        ),
        ("tiny_shapes_qa",),
    ),
}
