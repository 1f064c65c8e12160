"""FSDP2 on CPUs, which torch offers and accelerate does not: everything else is accelerate's."""

from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from runner import ROOT

FILE = ROOT / "scripts/accelerate_configs/fsdp2.yaml"


def shard_on_cpu() -> None:
    """From now on, an Accelerator of several processes is as our file for FSDP2 asks."""
    begin, sharded = AcceleratorState.__init__, plugin()

    def begin_sharded(state: AcceleratorState, *args, **kwargs) -> None:
        begin(state, *args, **kwargs)
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, sharded

    AcceleratorState.__init__ = begin_sharded


def plugin() -> FullyShardedDataParallelPlugin:
    asked = load_config_from_file(str(FILE)).fsdp_config
    return FullyShardedDataParallelPlugin(
        fsdp_version=asked["fsdp_version"],
        auto_wrap_policy=asked["fsdp_auto_wrap_policy"],
        transformer_cls_names_to_wrap=[asked["fsdp_transformer_layer_cls_to_wrap"]],
        reshard_after_forward=asked["fsdp_reshard_after_forward"],
        state_dict_type=asked["fsdp_state_dict_type"],
        cpu_offload=asked["fsdp_offload_params"],
        activation_checkpointing=asked["fsdp_activation_checkpointing"],
        cpu_ram_efficient_loading=asked["fsdp_cpu_ram_efficient_loading"],
    )
