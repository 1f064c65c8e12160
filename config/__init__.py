import flow_grpo  # noqa: F401  it quiets transformers, which must not be imported before
