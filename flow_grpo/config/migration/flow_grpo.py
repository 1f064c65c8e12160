"""Settings and commands of Flow-GRPO, mapped to ours.

Read from github.com/yifan123/flow_grpo at ac4c86e and github.com/zhtmike/flow_grpo (a fork) at
9745241: config/base.py, grpo.py, grpo_guard.py, dpo.py, sft.py; scripts/train_*.py;
scripts/single_node and scripts/multi_node. Most settings have the same name here.
"""

from flow_grpo.config.migration.counterparts import DIFFUSION, Project, none, to

RENAMED_FIELDS = {  # Flow-GRPO's name: ours
    "save_dir": "logdir",
    "resume_from": "resume",
    "activation_checkpointing": "train.gradient_checkpointing",
    "fsdp_optimizer_offload": "train.offload_optimizer",
    "sample.batch_size": "sample.train_batch_size",
    "sample.mini_num_image_per_prompt": "sample.train_batch_size",
    "sample.train_num_steps": "sample.sde_window_size",
    "train.algorithm": "algorithm",
    "train.clip_range_lt": "train.clip_range_low",
    "train.clip_range_gt": "train.clip_range_high",
}
UNSUPPORTED_FIELDS = {  # Flow-GRPO's name: what to do instead
    "debug": "omit it; --debug shows the traceback of an error",
    "diffusion_loss": "omit it; --config.algorithm=sft trains a flow-matching loss",
    "per_prompt_stat_tracking": "omit it: advantages always compare samples of one prompt",
    "prompt_fn_kwargs": "omit it: prompts are read from the files of dataset",
    "sample.deterministic": (
        "omit it: steps outside sample.sde_window_size are deterministic, as are all steps of "
        "algorithm=nft or awm"
    ),
    "sample.kl_reward": "omit it: train.beta is the weight of the KL, in the loss",
    "sample.sample_time_per_prompt": "omit it and multiply sample.num_image_per_prompt by it",
    "train.ref_update_step": (
        "omit it: --config.anchors.reset_epochs=20 resets the reference to the policy every 20 "
        "epochs, and rollouts always use the policy"
    ),
    "train.sft": (
        "omit it: --config.anchors.data=FOLDER also trains on your images, with the weight "
        "anchors.data_weight; --config.algorithm=sft trains on the best sample of each group"
    ),
    "train.sft_batch_size": "omit it: train.batch_size applies to every algorithm",
    "train.timestep_shift": "omit it: the model's scheduler defines the shift",
}
PROMPT_FNS = {"general_ocr": "text", "geneval": "metadata"}
RENAMED_REWARDS = {  # Flow-GRPO's name: ours, and its options
    "video_ocr": ("ocr", {"frames": "mean of 4"}),
    "image_similarity": ("keep_source", {"model": "openai/clip-vit-large-patch14"}),
}
RENAMED_PRESETS = {
    "general_ocr_wan2_1": "wan_ocr",
    "pickscore_qwenimage": "pickscore_qwen_image",
}
# Scripts and config files of Flow-GRPO and ddpo-pytorch, with the setting that selects the method.
SCRIPTS = {
    "train_sd3.py": {},
    "train_sd3_fast.py": {},
    "train_flux.py": {},
    "train_flux_fast.py": {},
    "train_flux_kontext.py": {},
    "train_qwenimage.py": {},
    "train_qwenimage_edit.py": {},
    "train_wan2_1.py": {},
    "train_sd3_GRPO_Guard.py": {"algorithm": "grpo_guard"},
    "train_sd3_dpo.py": {"algorithm": "dpo"},
    "train_sd3_sft.py": {"algorithm": "sft"},
    "train_sd3_rwr.py": {"algorithm": "rwr"},
}
UNSUPPORTED_SCRIPTS = {"train_bagel.py": "Bagel is not supported"}

FLOW_GRPO = Project(
    name="Flow-GRPO",
    source="yifan123/flow_grpo@ac4c86e config/base.py; zhtmike/flow_grpo@9745241 config/*.py",
    trainer=DIFFUSION,
    keys={
        **{theirs: to(ours) for theirs, ours in RENAMED_FIELDS.items()},
        **{theirs: none(note) for theirs, note in UNSUPPORTED_FIELDS.items()},
    },
    programs=(*SCRIPTS, *UNSUPPORTED_SCRIPTS),
)
