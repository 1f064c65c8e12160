"""Context length of language models."""

from transformers import PretrainedConfig


def context_length(config: PretrainedConfig) -> tuple[int, str]:
    """Return the maximum number of tokens in a row (0 if unknown), and its description in errors.

    With longrope, if one row of a forward pass exceeds the original context, the rotary frequencies
    of all rows change. Results would then depend on the other rows of a batch.

    Args:
        config: Config of the language model.
    """
    positions = getattr(config, "max_position_embeddings", 0)
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings", positions)
    if rope.get("rope_type") == "longrope" and original < positions:
        name = f"the {original} tokens beyond which longrope changes the model's rotary frequencies"
        return original, name
    return positions, f"the model's context length of {positions}"
