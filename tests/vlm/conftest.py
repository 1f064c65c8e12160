"""Fixtures of the VLM tests."""

import pytest
import small_vlm


@pytest.fixture(scope="module")
def model_and_data(tmp_path_factory) -> dict[str, str]:
    """Save a small model and a small data set; return the settings that name them."""
    folder = tmp_path_factory.mktemp("model_and_data")
    model, data = small_vlm.save(folder / "model"), small_vlm.write_data(folder / "data")
    return {"pretrained.model": str(model), "dataset": str(data)}
