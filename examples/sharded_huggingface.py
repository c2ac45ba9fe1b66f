"""Hugging Face's Trainer with FSDP2, saved from all ranks and continued on any number of them.

    torchrun --nproc-per-node 2 examples/sharded_huggingface.py runs/sharded-hf --steps 60
    torchrun --nproc-per-node 3 examples/sharded_huggingface.py runs/sharded-hf --steps 100   # goes on at step 60
    shrinkpoint export runs/sharded-hf model.safetensors                                      # one process

On GPUs `accelerate launch --use_fsdp --fsdp_version 2 examples/huggingface.py` shards as well. accelerate refuses processors,
for which this subclass sets up the same.
"""

import huggingface
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import Trainer


class Sharded(Trainer):  # type: ignore[misc]
    layer = "GPT2Block"

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.distributed_type, self.is_fsdp_enabled = DistributedType.FSDP, True
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[self.layer],
            cpu_ram_efficient_loading=False,
        )


if __name__ == "__main__":
    huggingface.main(Sharded)
