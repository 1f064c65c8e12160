"""Enable FSDP2 on CPUs, which torch supports but accelerate does not."""

from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from runner import ROOT

FILE = ROOT / "scripts/accelerate_configs/fsdp2.yaml"


def shard_on_cpu(block: str = "") -> None:
    """Patch accelerate so that each new `Accelerator` uses our FSDP2 config.

    `block` is the class of the transformer blocks, by default that of SD3.
    """
    original, plugin = AcceleratorState.__init__, load_plugin()
    if block:
        plugin.transformer_cls_names_to_wrap = [block]

    def init_sharded(state: AcceleratorState, *args, **kwargs) -> None:
        original(state, *args, **kwargs)
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin

    AcceleratorState.__init__ = init_sharded


def load_plugin() -> FullyShardedDataParallelPlugin:
    """Return the FSDP2 plugin that our accelerate config file describes."""
    config = load_config_from_file(str(FILE)).fsdp_config
    return FullyShardedDataParallelPlugin(
        fsdp_version=config["fsdp_version"],
        auto_wrap_policy=config["fsdp_auto_wrap_policy"],
        transformer_cls_names_to_wrap=[config["fsdp_transformer_layer_cls_to_wrap"]],
        reshard_after_forward=config["fsdp_reshard_after_forward"],
        state_dict_type=config["fsdp_state_dict_type"],
        cpu_offload=config["fsdp_offload_params"],
        activation_checkpointing=config["fsdp_activation_checkpointing"],
        cpu_ram_efficient_loading=config["fsdp_cpu_ram_efficient_loading"],
    )
