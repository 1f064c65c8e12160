"""The script of docs/migrating.md converts our LoRA to the format of Flow-GRPO."""

import re
import runpy

import torch
from peft import PeftModel
from policies import make_policy
from runner import ROOT

from flow_grpo.diffusion.models import ModelAdapter, load_adapter


def velocity(adapter: ModelAdapter, module: torch.nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(2, *adapter.latent_shape(32, 32), generator=generator)
    with torch.no_grad():
        return adapter.velocity(module, noise, 500.0, adapter.encode(["a", "b"], None), 1.0)


def test_the_converted_lora_computes_the_same_velocity(tiny_sd3, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ours = load_adapter(str(tiny_sd3), max_sequence_length=8)
    base = velocity(ours, ours.transformer)
    policy = make_policy(ours, rank=4, alpha=12)
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    policy.save(tmp_path / "CHECKPOINT", prefix="ema_")
    [script] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/migrating.md").read_text(), re.S)
    (tmp_path / "convert.py").write_text(script.replace("MODEL", str(tiny_sd3)), encoding="utf-8")
    runpy.run_path(str(tmp_path / "convert.py"))
    converted = load_adapter(str(tiny_sd3), max_sequence_length=8)
    module = PeftModel.from_pretrained(converted.transformer, str(tmp_path / "OUT")).eval()
    trained = velocity(ours, policy.module)
    torch.testing.assert_close(velocity(converted, module), trained)
    assert not torch.allclose(trained, base)
