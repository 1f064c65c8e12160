"""docs/migrating.md has a script that turns our LoRA into what Flow-GRPO loads."""

import re

import torch
from peft import PeftModel
from policies import policy_of
from runner import ROOT

from flow_grpo.draw.models import ModelAdapter, load_adapter


def velocity(adapter: ModelAdapter, module: torch.nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(2, *adapter.latent_shape(32, 32), generator=generator)
    with torch.no_grad():
        return adapter.velocity(module, noise, 500.0, adapter.encode(["a", "b"], None), 1.0)


def test_our_lora_computes_the_same_in_flow_grpos_format(tiny_sd3, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ours = load_adapter(str(tiny_sd3), max_sequence_length=8)
    plain = velocity(ours, ours.transformer)
    policy = policy_of(ours, rank=4, alpha=12)
    generator = torch.Generator().manual_seed(0)
    for parameter in policy.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    policy.save(tmp_path / "CHECKPOINT", prefix="ema_")
    [script] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/migrating.md").read_text(), re.S)
    exec(compile(script.replace("MODEL", str(tiny_sd3)), "migrating.md", "exec"), {})
    theirs = load_adapter(str(tiny_sd3), max_sequence_length=8)
    module = PeftModel.from_pretrained(theirs.transformer, str(tmp_path / "OUT")).eval()
    trained = velocity(ours, policy.module)
    torch.testing.assert_close(velocity(theirs, module), trained)
    assert not torch.allclose(trained, plain)
