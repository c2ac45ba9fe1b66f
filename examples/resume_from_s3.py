"""Train with checkpoints in S3, get killed, start again: the same command continues from the bucket.

    python examples/resume_from_s3.py s3://bucket/prefix    # credentials and endpoint as every S3 tool finds them
    python examples/resume_from_s3.py                       # against a local S3 server that it starts (moto)

Needs `pip install "shrinkpoint[lightning,s3]"`, and "moto[server]" where no bucket is given.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpt import GPTConfig
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_gpt import train

from shrinkpoint.callbacks.lightning import CompressedCheckpoint
from shrinkpoint.config import Advanced

TINY = GPTConfig(width=64, layers=2, heads=2, block=64, warmup=10, steps=60)
EVERY, KILL_AT = 10, 37


class Announce(Callback):
    """Prints where training starts and every step after it, one line each."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        print("start", trainer.global_step, flush=True)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        print("step", trainer.global_step, flush=True)


def train_once(url: str) -> None:
    """The training script: nothing in it knows whether it is the first start."""
    # These steps take milliseconds, so they wait for a save that is under way instead of skipping the next one.
    checkpoints = CompressedCheckpoint(url, every_n_train_steps=EVERY, advanced=Advanced(busy="wait"))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    train(TINY, [checkpoints, Announce()], every=EVERY, seed=1, **quiet)


def run(url: str, kill_at: int | None) -> tuple[int, int]:
    """Start the training process; returns the step it started from and the last one it reached."""
    steps = []
    with subprocess.Popen(
        [sys.executable, __file__, "--train", url], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            for line in process.stdout or ():
                steps += [int(line.split()[1])] if line.startswith(("start ", "step ")) else []
                if steps and steps[-1] == kill_at:
                    process.kill()
        except BaseException:
            process.kill()  # Ctrl-C here must not leave the training running
            raise
    if process.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"training ended with code {process.returncode}; its messages are above")
    return steps[0], steps[-1]


@contextmanager
def local_server() -> Iterator[str]:
    """An S3 server in a thread of this process; yields the URL of a prefix in a new bucket."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # no line per request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    # The children inherit these; s3fs and boto3 both read them.
    keys = {
        "AWS_ACCESS_KEY_ID": "example",
        "AWS_SECRET_ACCESS_KEY": "example",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    os.environ.update(keys, AWS_ENDPOINT_URL=f"http://{host}:{port}")
    try:
        boto3.client("s3").create_bucket(Bucket="checkpoints")
        yield "s3://checkpoints/gpt"
    finally:
        server.stop()


def demonstrate(url: str) -> None:
    """Kill the training once, start it again, and say what happened."""
    print(f"training into {url}")
    first, last = run(url, kill_at=KILL_AT)
    print(f"started from step {first}; kill -9 after step {last}")
    first, last = run(url, kill_at=None)
    print(f"started again: resumed by itself from step {first}, finished at step {last}")
    if not 0 < first <= KILL_AT or last != TINY.steps:
        raise SystemExit("it did not resume: is there an older, finished run under this prefix?")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "url", nargs="?", help="s3://bucket/prefix, empty or new; without it a server is started"
    )
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train_once(options.url)
    elif options.url:
        demonstrate(options.url)
    else:
        with local_server() as url:
            demonstrate(url)


if __name__ == "__main__":
    main()
