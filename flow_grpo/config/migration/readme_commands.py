"""Command lines in the READMEs of other trainers, and their equivalents here.

`README_COMMANDS` lists every command line. `RECIPES` has the settings of the scripts that they
start, so that `flow-grpo migrate` works without a clone of that repository; options without a
counterpart are omitted.

READMEs: yifan123/flow_grpo@1f4ca40 and 9745241; leibniz-csi/mm_grpo@301f5c0, README.md and
examples/flowgrpo_trainer/**/README.md; verl-project/verl@13dd02f (pull request 5951),
examples/flowgrpo_trainer/README.md; TideDra/lmm-r1@f917f18; hiyouga/EasyR1@b44b311. The scripts are
of the same commits.
"""

from dataclasses import dataclass

FLOW_GRPO, MM_GRPO, PR_5951 = "Flow-GRPO", "MM-GRPO", "verl PR 5951"
LMM_R1, EASYR1 = "LMM-R1", "EasyR1"
RUNS, TRANSLATED, REPLACED = "runs as typed", "translated", "replaced"


@dataclass(frozen=True)
class ReadmeCommand:
    """A command line of a README.

    Attributes:
        project: Whose README.
        line: The command line.
        kind: RUNS: the same line works here. TRANSLATED: `flow-grpo migrate` prints ours.
            REPLACED: `answer` says what to do instead.
        answer: Our command or the reason why none is needed.
    """

    project: str
    line: str
    kind: str
    answer: str = ""


INSTALL = "pip install ."
OCR_READER = 'pip install ".[ocr]" (RapidOCR) or ".[paddleocr]"'
NOT_NEEDED = "not needed: included"
OWN_SERVER = "works in a separate environment; see docs/judges.md"
NO_RAY = "not needed: Ray is not used"
WANDB = "works; set --config.log_with=wandb"

_NODES = {  # of scripts/multi_node
    "sd3.sh": 4,
    "flux.sh": 4,
    "flux_kontext.sh": 4,
    "qwenimage.sh": 4,
    "qwenimage_edit.sh": 4,
    "sd3_grpo_guard.sh": 2,
}
_MULTI_NODE = [
    f"bash scripts/multi_node/{script} {rank}"
    for script, nodes in _NODES.items()
    for rank in range(nodes)
]
README_COMMANDS = (
    ReadmeCommand(
        FLOW_GRPO,
        "git clone https://github.com/yifan123/flow_grpo.git",
        REPLACED,
        "git clone this repository",
    ),
    ReadmeCommand(FLOW_GRPO, "cd flow_grpo", RUNS),
    ReadmeCommand(
        FLOW_GRPO, "conda create -n flow_grpo python=3.10.16", REPLACED, "bash scripts/venv.sh"
    ),
    ReadmeCommand(FLOW_GRPO, "pip install -e .", RUNS),
    *(
        ReadmeCommand(FLOW_GRPO, f"pip install {package}", REPLACED, OCR_READER)
        for package in ("paddlepaddle-gpu==2.6.2", "paddleocr==2.9.1", "python-Levenshtein")
    ),
    *(
        ReadmeCommand(FLOW_GRPO, line, REPLACED, OWN_SERVER)
        for line in (
            "conda create -n sglang python=3.10.16",
            "conda activate sglang",
            'pip install "sglang[all]"',
            "python -m sglang.launch_server --model-path CodeGoat24/UnifiedReward-7b-v1.5 "
            "--api-key flowgrpo --port 17140 --chat-template chatml-llava --enable-p2p-check "
            "--mem-fraction-static 0.85",
        )
    ),
    *(
        ReadmeCommand(FLOW_GRPO, f"pip install {package}", REPLACED, NOT_NEEDED)
        for package in (
            "image-reward",
            "git+https://github.com/openai/CLIP.git",
            "git+https://github.com/huggingface/diffusers.git",
        )
    ),
    *(
        ReadmeCommand(FLOW_GRPO, line, REPLACED, "Bagel is not supported")
        for line in (
            "pip install transformers==4.44.0",
            "pip install flash-attn==2.7.4.post1 --no-build-isolation",
            *(f"bash scripts/multi_node/bagel/main.sh {rank}" for rank in range(4)),
        )
    ),
    ReadmeCommand(
        FLOW_GRPO,
        "accelerate launch --config_file scripts/accelerate_configs/multi_gpu.yaml "
        "--num_processes=1 --main_process_port 29503 scripts/train_wan2_1.py "
        "--config config/grpo.py:general_ocr_wan2_1",
        RUNS,
    ),
    *(
        ReadmeCommand(FLOW_GRPO, f"bash scripts/single_node/{name}.sh", RUNS)
        for name in ("grpo", "grpo_flux", "dpo", "sft")
    ),
    *(
        ReadmeCommand(FLOW_GRPO, f"bash scripts/multi_node/{name}.sh", RUNS)
        for name in ("main", "main1", "main2", "main3")
    ),
    *(ReadmeCommand(FLOW_GRPO, line, RUNS) for line in _MULTI_NODE),
    ReadmeCommand(MM_GRPO, "pip install -r requirements.txt", REPLACED, INSTALL),
    ReadmeCommand(
        MM_GRPO,
        "git clone https://github.com/volcengine/verl.git && cd verl && pip install -e .",
        REPLACED,
        NOT_NEEDED,
    ),
    ReadmeCommand(
        MM_GRPO,
        "git clone https://github.com/leibniz-csi/mm_grpo.git && cd mm_grpo",
        REPLACED,
        "git clone this repository",
    ),
    ReadmeCommand(
        MM_GRPO,
        'pip install paddlepaddle "paddleocr>=3.0" python-Levenshtein',
        REPLACED,
        OCR_READER,
    ),
    ReadmeCommand(MM_GRPO, "bash examples/flowgrpo_trainer/run_sd3.sh", TRANSLATED),
    ReadmeCommand(MM_GRPO, "bash examples/flowgrpo_trainer/run_sd3_fast.sh", TRANSLATED),
    ReadmeCommand(
        MM_GRPO,
        'actor_rollout_ref.hybrid_engine=False actor_rollout_ref.rollout.mode="async"',
        TRANSLATED,
    ),
    ReadmeCommand(MM_GRPO, "actor_rollout_ref.rollout.with_reward=True", TRANSLATED),
    ReadmeCommand(
        MM_GRPO,
        'actor_rollout_ref.hybrid_engine=False actor_rollout_ref.rollout.mode="async" '
        'actor_rollout_ref.async_strategy="one-step-off"',
        TRANSLATED,
    ),
    ReadmeCommand(
        PR_5951,
        'pip install "vllm==0.18" "vllm-omni==0.18" python-Levenshtein',
        REPLACED,
        NOT_NEEDED,
    ),
    ReadmeCommand(
        PR_5951,
        "python3 examples/flowgrpo_trainer/data_process/qwenimage_ocr.py "
        "--local_dataset_path ~/dataset/ocr --local_save_dir ~/data/ocr",
        REPLACED,
        "not needed: --config.dataset=~/dataset/ocr reads train.txt and test.txt",
    ),
    ReadmeCommand(PR_5951, "bash examples/flowgrpo_trainer/run_qwen_image_ocr_lora.sh", TRANSLATED),
    ReadmeCommand(PR_5951, "export WANDB_API_KEY=<your_wandb_api_key>", REPLACED, WANDB),
    ReadmeCommand(
        PR_5951,
        'trainer.logger=\'["console", "wandb"]\' trainer.project_name=flow_grpo '
        "trainer.experiment_name=qwen_image_ocr_lora",
        TRANSLATED,
    ),
    ReadmeCommand(
        LMM_R1,
        "git clone https://github.com/TideDra/lmm-r1.git",
        REPLACED,
        "git clone this repository",
    ),
    ReadmeCommand(LMM_R1, "cd lmm-r1", REPLACED, "cd flow_grpo"),
    ReadmeCommand(LMM_R1, "pip install -e .[vllm]", REPLACED, 'pip install -e ".[vlm,data,vllm]"'),
    ReadmeCommand(LMM_R1, "pip install flash_attn --no-build-isolation", REPLACED, NOT_NEEDED),
    *(
        ReadmeCommand(LMM_R1, f"bash examples/scripts/lmm_r1/{name}.sh", TRANSLATED)
        for name in (
            "train_fre_text",
            "train_fre_multi",
            "train_mgt_geo",
            "train_mgt_percereas",
            "train_direct_rl_geo",
        )
    ),
    *(
        ReadmeCommand(
            EASYR1, line, REPLACED, "use the image of docs/docker.md, or bash scripts/venv.sh"
        )
        for line in (
            "docker pull hiyouga/verl:ngc-th2.8.0-cu12.9-vllm0.11.0",
            "docker run -it --ipc=host --gpus=all hiyouga/verl:ngc-th2.8.0-cu12.9-vllm0.11.0",
            "apptainer pull easyr1.sif docker://hiyouga/verl:ngc-th2.8.0-cu12.9-vllm0.11.0",
            "apptainer shell --nv --cleanenv --bind /mnt/your_dir:/mnt/your_dir easyr1.sif",
        )
    ),
    ReadmeCommand(
        EASYR1,
        "git clone https://github.com/hiyouga/EasyR1.git",
        REPLACED,
        "git clone this repository",
    ),
    ReadmeCommand(EASYR1, "cd EasyR1", REPLACED, "cd flow_grpo"),
    ReadmeCommand(EASYR1, "pip install -e .", RUNS),
    *(
        ReadmeCommand(EASYR1, f"bash examples/{name}.sh", TRANSLATED)
        for name in (
            "qwen2_5_vl_7b_geo3k_grpo",
            "qwen3_vl_4b_geo3k_grpo_lora",
            "qwen2_5_vl_7b_geo3k_swanlab",
            "baselines/qwen2_5_vl_3b_clevr",
            "baselines/qwen2_5_vl_3b_geoqa8k",
        )
    ),
    ReadmeCommand(
        EASYR1,
        "python3 scripts/model_merger.py --local_dir "
        "checkpoints/easy_r1/exp_name/global_step_1/actor",
        REPLACED,
        "not needed: checkpoints load with transformers; flow-grpo export merges a LoRA",
    ),
    ReadmeCommand(EASYR1, "export HF_ENDPOINT=https://hf-mirror.com", RUNS),
    *(
        ReadmeCommand(EASYR1, line, REPLACED, NO_RAY)
        for line in (
            "ray start --head --port=6379 --dashboard-host=0.0.0.0",
            "ray start --address=<head_node_ip>:6379",
            "ray status",
        )
    ),
)

_LMM_R1 = (
    "python -m openrlhf.cli.train_ppo_ray --actor_num_nodes 1 --actor_num_gpus_per_node 8 "
    "--train_batch_size 256 --rollout_batch_size 256 --temperature 1.0 --n_samples_per_prompt 16 "
    "--max_epochs 1 --num_episodes 2 --prompt_max_len 4096 --max_samples 100000 "
    "--generate_max_len 4096 --zero_stage 3 --bf16 --init_kl_coef 0.001 --input_key message "
    "--label_key answer --normalize_reward --lambd 1 --gamma 1 --gradient_checkpointing "
    "--save_steps 20 --load_checkpoint --remote_rm_url http://127.0.0.1:5000/get_reward "
)
_STARTED = "--pretrain ./models/Qwen2.5-VL-3B-Instruct "
_CONTINUED = "--pretrain ./checkpoints/lmm-r1-fre-text "
_GAE = "--advantage_estimator gae --actor_learning_rate 1e-6 "
_BASELINE = "--advantage_estimator reinforce_baseline "
_EASYR1 = (
    "python3 -m verl.trainer.main config=examples/config.yaml "
    "data.train_files={data}@train data.val_files={data}@test "
    "worker.actor.model.model_path=Qwen/{model}-Instruct trainer.experiment_name={name} "
    "trainer.n_gpus_per_node={gpus} "
)
_GEOMETRY = {"data": "hiyouga/geometry3k"}
_R1V = (
    "data.format_prompt=./examples/format_prompt/r1v.jinja "
    "worker.reward.reward_function=./examples/reward_function/r1v.py:compute_score"
)
_MM_GRPO = (
    "python3 -m gerl.trainer.main_flowgrpo algorithm.adv_estimator=flow_grpo "
    "data.train_files=~/dataset/ocr/train.txt data.val_files=~/dataset/ocr/test.txt "
    "data.train_batch_size=64 data.max_prompt_length=512 "
    "data.reward_fn='[\"paddle-ocr\"]' "
    "actor_rollout_ref.model.path=stabilityai/stable-diffusion-3.5-medium "
    "actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.lora_alpha=64 "
    "actor_rollout_ref.actor.optim.weight_decay=0.0001 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=32 "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 "
    "actor_rollout_ref.actor.fsdp_config.dtype=float16 actor_rollout_ref.rollout.n=16 "
    "actor_rollout_ref.actor.policy_loss.loss_mode=flow_grpo "
    'trainer.logger=\'["console", "wandb"]\' trainer.project_name=flow_grpo '
    "trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=100 trainer.test_freq=5 "
    "trainer.total_epochs=15 "
)
RECIPES = {
    "examples/flowgrpo_trainer/run_sd3.sh": f"{_MM_GRPO} data.val_max_samples=256 "
    "actor_rollout_ref.actor.optim.lr=3e-4 actor_rollout_ref.actor.use_kl_loss=True "
    "actor_rollout_ref.actor.kl_loss_coef=0.04 actor_rollout_ref.rollout.guidance_scale=4.5 "
    "actor_rollout_ref.rollout.noise_level=0.7 trainer.experiment_name=sd35_m_ocr",
    "examples/flowgrpo_trainer/run_sd3_fast.sh": f"{_MM_GRPO} data.val_max_samples=256 "
    "actor_rollout_ref.actor.optim.lr=1e-4 actor_rollout_ref.actor.use_kl_loss=False "
    "actor_rollout_ref.actor.kl_loss_coef=0 actor_rollout_ref.rollout.guidance_scale=1.0 "
    "actor_rollout_ref.rollout.noise_level=0.8 actor_rollout_ref.rollout.sde_type=cps "
    "actor_rollout_ref.rollout.sde_window_size=3 "
    "actor_rollout_ref.rollout.sde_window_range='[0,5]' trainer.experiment_name=sd35_m_ocr_fast",
    "examples/flowgrpo_trainer/run_qwen_image_ocr_lora.sh": (
        "python3 -m verl.trainer.main_flowgrpo algorithm.adv_estimator=flow_grpo "
        "data.train_files=~/data/ocr/train.parquet data.val_files=~/data/ocr/test.parquet "
        "data.train_batch_size=32 data.max_prompt_length=256 "
        "actor_rollout_ref.model.path=~/models/Qwen/Qwen-Image "
        "actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=128 "
        "actor_rollout_ref.actor.optim.lr=3e-4 actor_rollout_ref.actor.optim.weight_decay=0.0001 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=16 "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 "
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True "
        "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16 "
        "actor_rollout_ref.actor.diffusion_loss.loss_mode=flow_grpo "
        "actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.true_cfg_scale=4.0 "
        "actor_rollout_ref.rollout.max_sequence_length=256 "
        "actor_rollout_ref.rollout.algo.noise_level=1.2 "
        "actor_rollout_ref.rollout.algo.sde_type=sde "
        "actor_rollout_ref.rollout.algo.sde_window_size=2 "
        "actor_rollout_ref.rollout.algo.sde_window_range='[0,5]' "
        "actor_rollout_ref.rollout.val_kwargs.num_inference_steps=50 "
        "reward.custom_reward_function.name=compute_score_ocr "
        'trainer.logger=\'["console", "wandb"]\' trainer.project_name=flow_grpo '
        "trainer.experiment_name=qwen_image_ocr_lora trainer.log_val_generations=8 "
        "trainer.val_before_train=False trainer.n_gpus_per_node=4 trainer.nnodes=1 "
        "trainer.save_freq=30 trainer.test_freq=30 trainer.total_training_steps=300"
    ),
    "examples/scripts/lmm_r1/train_fre_text.sh": f"{_LMM_R1}{_STARTED}{_BASELINE}"
    "--actor_learning_rate 4e-7 --prompt_data ./data/deepscaler/deepscaler_message.jsonl "
    "--wandb_run_name lmm-r1-fre-text",
    "examples/scripts/lmm_r1/train_fre_multi.sh": f"{_LMM_R1}{_STARTED}{_BASELINE}"
    "--actor_learning_rate 1e-6 --prompt_data ./data/VerMulti/mathv60k_message.jsonl "
    "--wandb_run_name lmm-r1-fre-multi",
    "examples/scripts/lmm_r1/train_mgt_geo.sh": f"{_LMM_R1}{_CONTINUED}{_GAE}"
    "--prompt_data ./data/VerMulti/mathv_geo_message.jsonl --wandb_run_name lmm-r1-mgt-geo",
    "examples/scripts/lmm_r1/train_mgt_percereas.sh": f"{_LMM_R1}{_CONTINUED}{_BASELINE}"
    "--actor_learning_rate 4e-7 --prompt_data ./data/VerMulti/mathv60k_message.jsonl "
    "--wandb_run_name lmm-r1-mgt-percereason",
    "examples/scripts/lmm_r1/train_direct_rl_geo.sh": f"{_LMM_R1}{_STARTED}{_GAE}"
    "--prompt_data ./data/MathV360k/geo_split.jsonl --wandb_run_name lmm-r1-direct-rl-geo",
    "examples/qwen2_5_vl_7b_geo3k_grpo.sh": _EASYR1.format(
        **_GEOMETRY, model="Qwen2.5-VL-7B", name="qwen2_5_vl_7b_geo_grpo", gpus=8
    ),
    "examples/qwen3_vl_4b_geo3k_grpo_lora.sh": _EASYR1.format(
        **_GEOMETRY, model="Qwen3-VL-4B", name="qwen3_vl_4b_geo_grpo_lora", gpus=2
    )
    + "worker.actor.model.lora.rank=64 worker.actor.optim.lr=1e-5",
    "examples/qwen2_5_vl_7b_geo3k_swanlab.sh": _EASYR1.format(
        **_GEOMETRY, model="Qwen2.5-VL-7B", name="qwen2_5_vl_7b_geo_grpo", gpus=8
    )
    + "trainer.logger=[console,swanlab]",
    "examples/baselines/qwen2_5_vl_3b_clevr.sh": _EASYR1.format(
        data="BUAADreamer/clevr_count_70k",
        model="Qwen2.5-VL-3B",
        name="qwen2_5_vl_3b_clevr",
        gpus=2,
    )
    + _R1V,
    "examples/baselines/qwen2_5_vl_3b_geoqa8k.sh": _EASYR1.format(
        data="leonardPKU/GEOQA_8K_R1V",
        model="Qwen2.5-VL-3B",
        name="qwen2_5_vl_3b_geoqa8k",
        gpus=8,
    )
    + _R1V,
}
