"""Renamed members of plugin classes, by the class that defines them: {old name: new name}.

A custom class that still overrides an old name would silently fall back to the default of the new
one, so it is rejected instead.
"""

from flow_grpo.errors import UserError

RENAMED_MEMBERS = {
    "Algorithm": {
        "adapt": "update_kl_weight",
        "cut": "clip_credit",
        "fixed": "needed_velocities",
        "fixed_velocities": "no_grad_velocities",
        "hold": "add_regularization",
        "holds": "applies_anchors",
        "is_held": "is_regularized",
        "keeps_means": "records_step_means",
        "keeps_old": "keeps_old_policy",
        "levels": "sample_noise_levels",
        "most_guidance": "max_guidance",
        "own_credit": "overrides_credit",
        "prepared": "iter_prepared",
        "samples_with_old": "samples_with_old_policy",
        "shares_noise": "shares_group_noise",
        "start": "initial_loras",
        "trust": "trust_radius",
        "whole_groups": "needs_whole_groups",
    },
    "ModelAdapter": {
        "can_replay": "supports_cuda_graphs",
        "encode_ahead": "precompute_embeddings",
        "encode_one": "encode_single",
        "encode_picture": "encode_image_latents",
        "encodes_pictures": "encodes_images",
        "finish": "finalize_latents",
        "masks_sources": "masks_source_images",
        "masks_texts": "masks_prompt_padding",
        "network": "select_transformer",
        "own_scheduler": "copy_scheduler",
        "prepared": "precompute",
        "replayed": "uses_cuda_graphs",
        "scale_at": "guidance_at",
        "scaled": "to_vae_latents",
        "siblings": "shared_inputs",
        "source": "load_source_image",
        "sources": "num_source_images",
        "speed_up": "apply_optimizations",
        "tokens": "num_image_tokens",
        "unguided": "guidance_threshold",
        "unscaled": "from_vae_latents",
        "unused": "unused_modules",
    },
    "Family": {
        "banned": "banned_token_ids",
        "blank": "blank_image",
        "cache": "new_cache",
        "count_frames": "count_video_tokens",
        "count_tokens": "count_image_tokens",
        "image_loader": "vision_processor_class",
        "load_images": "load_vision_processor",
        "looking": "vision_arguments",
        "mask": "attention_mask",
        "positions": "compute_positions",
        "see": "preprocess_images",
        "size_of": "resized_size",
        "tokens_of": "num_image_tokens",
        "tokens_of_video": "num_video_tokens",
        "tower_layers": "vision_lora_layers",
        "vllm_scratch": "vllm_scratch_buffers",
        "watch": "preprocess_video",
        "written": "complete_chat",
    },
    "FluxAdapter": {"run": "run_transformer"},
    "WanAdapter": {"clip_tokens": "video_tokens"},
    "QwenImageEditAdapter": {"seen": "to_encoder_image"},
    "QwenImage21Adapter": {
        "prefix": "encode_text_prefix",
        "run": "run_transformer",
        "stored": "to_kv_cache",
    },
    "QwenVL": {"placeholders": "tokens_per_placeholder"},
    "VlmLoss": {
        "along": "default_settings",
        "read": "from_settings",
        "trust": "clip_range",
        "widest_clip": "max_clip_range",
    },
}


def check_renamed_members(field: str, cls: type, base: type) -> None:
    """Reject a custom class that defines a member under its old name.

    Args:
        field: The setting that names the class.
        cls: The custom class.
        base: The plugin base class; its own members and those of its parents are not inspected.
    """
    renamed = dict(RENAMED_MEMBERS.get(base.__name__, {}))
    for parent in cls.__mro__:
        if parent.__module__.startswith("flow_grpo."):
            renamed |= RENAMED_MEMBERS.get(parent.__name__, {})
    for parent in cls.__mro__:
        if parent.__module__.startswith("flow_grpo."):
            break
        for old in renamed.keys() & vars(parent).keys():
            raise UserError(
                f"defines {old!r}, which is now called {renamed[old]!r}",
                field=field,
                hint="rename it; flow_grpo/config/renamed_members.py lists all",
            )
