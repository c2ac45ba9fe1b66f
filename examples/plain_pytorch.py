"""A hand-written PyTorch loop with compressed checkpoints. The lines that were added for them are marked `# +`.

    python examples/plain_pytorch.py [FOLDER or s3://bucket/prefix]

Kill it whenever you like and start it again: it continues from the newest sound checkpoint, with the same batches,
because the batches are drawn from torch's generator, whose state is part of the checkpoint.
"""

from __future__ import annotations

import argparse

import torch
from gpt import GPT, GPTConfig, build_optimizer, load_corpus, loss_on, val_batches
from torch import nn

import shrinkpoint  # +


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", nargs="?", default="plain-run")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--tiny", action="store_true", help="a model that trains in seconds")
    parser.add_argument(
        "--busy", default="skip", help="when a save is due while one is written: skip it, or wait"
    )
    parser.add_argument(
        "--step-log-url",
        help="with exact checkpoints, and a log of every step in this folder (docs/resuming.md)",
    )
    options = parser.parse_args()
    logged = {"scheme": "lossless", "step_log": shrinkpoint.StepLog(url=options.step_log_url)}

    size = {"width": 64, "layers": 2, "heads": 2, "block": 64} if options.tiny else {}
    config = GPTConfig(steps=options.steps, **size)
    torch.manual_seed(1)
    train_text, val_text = load_corpus()
    held_out = val_batches(val_text, config)
    model = GPT(config)
    optimizer, schedule = build_optimizer(model, config)

    checkpointer = shrinkpoint.Checkpointer(  # +
        options.url, model, optimizer, schedule=schedule, every=options.every, evaluate=lambda: loss_on(model, held_out), advanced=shrinkpoint.Advanced(busy=options.busy), **logged if options.step_log_url else {},  # +
    )  # +  # fmt: skip
    start = checkpointer.resume()  # +
    print("start", start, flush=True)
    for step in range(start, config.steps):
        begin = torch.randint(len(train_text) - config.block - 1, (config.batch, 1))
        batch = train_text[begin + torch.arange(config.block + 1)].long()
        loss = model.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        checkpointer.step(step + 1)  # +
        print("step", step + 1, f"loss {loss.item():.4f}", flush=True)
    checkpointer.close()  # +
    print(f"validation loss {loss_on(model, held_out):.4f}")
    for report in checkpointer.reports():
        print(f"step {report.step}: {report.kind}, {report.bytes} bytes, {report.ratio:.0f} times smaller")


if __name__ == "__main__":
    main()
