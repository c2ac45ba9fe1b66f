"""Train a small GPT-2 with Hugging Face's Trainer and compressed checkpoints. Kill it whenever you like, start it again.

    python examples/huggingface.py                       # checkpoints into ./hf-run
    python examples/huggingface.py s3://bucket/hf-run    # or into a bucket (pip install "shrinkpoint[s3]")

The second start finds the newest sound checkpoint by itself and continues mid-epoch with the same batches. Nothing is
downloaded: the model is made from a configuration, and the text is the source of the Python standard library.
"""

from __future__ import annotations

import argparse

import torch
from gpt import load_corpus
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from shrinkpoint.callbacks.transformers import CompressedCheckpoint

BLOCK = 64


class Windows(Dataset):  # type: ignore[type-arg]
    """Non-overlapping windows of bytes, as a causal language model wants them."""

    def __init__(self, text: Tensor) -> None:
        self.windows = text[: len(text) // BLOCK * BLOCK].view(-1, BLOCK).long()

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def main(kind: type[Trainer] = Trainer) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", nargs="?", default="hf-run", help="where checkpoints go: a folder or s3://...")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps in total")
    parser.add_argument("--every", type=int, default=50, help="save and evaluate after so many steps")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(1)
    set_seed(options.seed)
    train_text, val_text = load_corpus(max_bytes=2_000_000)
    config = GPT2Config(
        vocab_size=256, bos_token_id=None, eos_token_id=None, n_positions=BLOCK,
        n_embd=64, n_layer=2, n_head=2, use_cache=False,
    )  # fmt: skip
    arguments = TrainingArguments(
        output_dir="hf-output",
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        max_steps=options.steps,
        save_steps=options.every,  # asks for checkpoints as ever; the callback saves them in its own way
        eval_strategy="steps",
        eval_steps=options.every,
        logging_steps=options.every,
        seed=options.seed,
        use_cpu=True,
        report_to=[],
    )
    trainer = kind(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Windows(train_text),
        eval_dataset=Windows(val_text[: 64 * BLOCK]),
        callbacks=[CompressedCheckpoint(options.url, max_degradation=0.01)],
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"step {trainer.state.global_step}: validation loss {loss:.4f}")
        print(f"checkpoints: shrinkpoint ls {options.url}")


if __name__ == "__main__":
    main()
