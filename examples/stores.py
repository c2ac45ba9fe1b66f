"""Train with checkpoints in three stores, lose one of them in the middle, get killed, start again, heal, and lose another one.

    python examples/stores.py                        # three folders in stores-run/; takes one of them away itself
    python examples/stores.py --train URL URL URL    # your own stores: train alone, and start it again whenever you like

Credentials and endpoints of buckets go through ``--storage-options``, in JSON: one object for all stores but folders, or a list
with one for each, and null for a folder.

    python examples/stores.py --train s3://bucket/run /mnt/a/run /mnt/b/run --storage-options '{"endpoint_url": "https://..."}'

Any store may go away at any moment: training goes on, and the same command continues from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, GPTConfig, build_optimizer, load_corpus, loss_on, val_batches
from torch import nn

import shrinkpoint

TINY = GPTConfig(width=64, layers=2, heads=2, block=64, warmup=10, steps=60)
EVERY = 10


def train(urls: list[str], storage_options: Any = None) -> None:
    """The training script: nothing in it knows whether it is the first start, or which stores are there."""
    torch.manual_seed(1)
    train_text, val_text = load_corpus()
    held_out = val_batches(val_text, TINY)
    model = GPT(TINY)
    optimizer, schedule = build_optimizer(model, TINY)

    checkpointer = shrinkpoint.Checkpointer(
        shrinkpoint.Stores(urls, parity=1), model, optimizer, schedule=schedule, every=EVERY,
        evaluate=lambda: loss_on(model, held_out), storage_options=storage_options,
        advanced=shrinkpoint.Advanced(busy="wait"),
    )  # fmt: skip
    start, shown = checkpointer.resume(), 0
    print("start", start, flush=True)
    for step in range(start, TINY.steps):
        begin = torch.randint(len(train_text) - TINY.block - 1, (TINY.batch, 1))
        loss = model.loss(train_text[begin + torch.arange(TINY.block + 1)].long())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        checkpointer.step(step + 1)
        print("step", step + 1, flush=True)
        for report in checkpointer.reports()[shown:]:
            shown += 1
            print(f"saved step {report.step}; stores that may be lost now: {report.redundancy}", flush=True)
    checkpointer.close()
    print(f"done; validation loss {loss_on(model, held_out):.4f}", flush=True)


def act_out(folder: Path) -> None:
    """Three folders stand for three buckets; this takes one away, kills the training, starts it again, and heals."""
    shutil.rmtree(folder, ignore_errors=True)
    urls = [str(folder / name) for name in ("bucket-a", "bucket-b", "disk-c")]
    command = [sys.executable, __file__, "--train", *urls]

    saved = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print("  ", line, end="", flush=True)
                saved += line.startswith("saved step")
                if line.startswith("saved step") and saved == 1:
                    print(f"--- {urls[1]} is lost, with everything in it", flush=True)
                    shutil.rmtree(urls[1], ignore_errors=True)  # a save may be writing to it
                elif line.endswith("may be lost now: 0\n"):
                    print("--- kill -9", flush=True)
                    process.kill()
        except BaseException:
            process.kill()  # Ctrl-C here must not leave the training running
            raise
    if process.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"training ended with code {process.returncode}; its messages are above")
    print("--- the same command again", flush=True)
    subprocess.run(command, check=True)

    shown = " ".join(urls)
    for words in (["stores"], ["stores", "--heal"], ["stores"]):
        print(f"--- shrinkpoint {' '.join(words)} {shown}", flush=True)
        subprocess.run([Path(sys.executable).with_name("shrinkpoint"), *words, *urls], check=False)

    print(f"--- {urls[0]} is lost too; the same command finds everything in the others", flush=True)
    shutil.rmtree(urls[0])
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("urls", nargs="*", metavar="URL")
    parser.add_argument("--train", action="store_true", help="train with these stores, and nothing else")
    parser.add_argument("--storage-options", type=json.loads, metavar="JSON", help="with --train: of buckets")
    parser.add_argument("--folder", type=Path, default=Path("stores-run"))
    options = parser.parse_args()
    if options.train:
        train(options.urls, options.storage_options)
    else:
        act_out(options.folder.absolute())


if __name__ == "__main__":
    main()
