"""Attention of pictures and texts together, as diffusers names its projections."""

OF_IMAGE = ("to_q", "to_k", "to_v")  # they have one input
OF_TEXT = ("add_q_proj", "add_k_proj", "add_v_proj")
TARGETS = [f"attn.{name}" for name in (*OF_IMAGE, "to_out.0", *OF_TEXT, "to_add_out")]
SIBLINGS = {"attn": (OF_IMAGE, OF_TEXT)}


def mlp_targets(*names: str) -> list[str]:
    return [f"{name}.{layer}" for name in names for layer in ("net.0.proj", "net.2")]
