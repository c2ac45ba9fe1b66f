"""What saving takes of memory beside a training: python examples/benchmarks/memory.py (some minutes)

A GPT of the given size is trained for some AdamW steps on the source text of the standard library and saved three times, each scheme in a
process of its own. Given are, in sizes of the state (weights and both moments, fp32), how much more resident memory the process has than
the training had before: at most while a save is under way, and after it. ``blocked`` is how long training
waited for the snapshot. The evaluation is on the CPU, where its copy of the live weights counts too. Compiled coders and
libraries take the same memory whatever the size: they are loaded before, by saves of a small model, and given apart.

``--scratch FOLDER`` has a save put parts of it into a folder on a local disk (`Advanced.scratch_folder`).

``--resumed`` lets steps be tried from restored states, as the callbacks do: they need the whole state twice more for that moment.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import Peak, gpt_of, resident
from gpt import GPT, VOCABULARY, GPTConfig, build_optimizer, load_corpus, loss_on

import shrinkpoint

CASES = ("auto", "lossless", "inshrinkerator")
_BLOCK = 32
_SAVES = 3
_STEPS = 5


def measure(
    scheme: str, width: int, layers: int, vocabulary: int, resumed: bool, scratch: str | None
) -> dict[str, object]:
    """Train and save in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPTConfig(width=width, layers=layers, heads=8, block=_BLOCK, batch=1)
    model = gpt_of(config, vocabulary)
    optimizer = build_optimizer(model, config)[0]
    text, held_out = load_corpus(max_bytes=400_000)
    batches = [text[at : at + _BLOCK + 1].long()[None] for at in range(0, 40 * _BLOCK, _BLOCK)]
    evaluated = [held_out[: _BLOCK + 1].long()[None]]

    def train(steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            model.loss(batches[step % len(batches)]).backward()
            optimizer.step()

    train(_STEPS)
    loss_on(model, evaluated)
    gc.collect()
    alone = resident()
    load_coders(scheme)
    gc.collect()
    before = resident()
    peak = Peak()
    state = sum(3 * parameter.nbytes for parameter in model.parameters())
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = shrinkpoint.Checkpointer(
            folder,
            model,
            optimizer,
            scheme=scheme,
            advanced=shrinkpoint.Advanced(scratch_folder=scratch),
            evaluate=lambda: loss_on(model, evaluated),
            **({"train_loss": lambda i: model.loss(batches[i % len(batches)])} if resumed else {}),
        )
        checkpointer.resume()
        for number in range(1, _SAVES + 1):
            train(_STEPS)
            peak.reset()
            checkpointer.save(number * _STEPS, wait=True)
            gc.collect()
            report = checkpointer.reports()[-1]
            rows.append(
                {
                    "kind": report.kind,
                    "ratio": report.ratio,
                    "blocked": report.blocked_s,
                    "peak": (peak.bytes - before) / state,
                    "after": (resident() - before) / state,
                }
            )
        checkpointer.close()
    return {"state": state, "training": alone, "libraries": before - alone, "rows": rows}


def load_coders(scheme: str) -> None:
    """Make some saves of a small model."""
    config = GPTConfig(width=64, layers=2, heads=2, block=_BLOCK, batch=1)
    model = GPT(config)
    optimizer = build_optimizer(model, config)[0]
    batch = torch.randint(0, 256, (1, _BLOCK + 1))
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = shrinkpoint.Checkpointer(
            folder,
            model,
            optimizer,
            scheme=scheme,
            evaluate=lambda: loss_on(model, [batch]),
        )
        checkpointer.resume()
        for step in range(1, _SAVES + 1):
            optimizer.zero_grad()
            model.loss(batch).backward()
            optimizer.step()
            checkpointer.save(step, wait=True)
        checkpointer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12, help="12 of width 512 are 38 M parameters")
    parser.add_argument(
        "--vocabulary",
        type=int,
        default=VOCABULARY,
        help="GPT-2 has 50257 tokens and a width of 768: one tensor is then a third of the state",
    )
    parser.add_argument("--schemes", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--resumed", action="store_true", help="try steps from restored states")
    parser.add_argument("--scratch", metavar="FOLDER", help="as of Advanced.scratch_folder")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        sizes = options.width, options.layers, options.vocabulary
        print(json.dumps(measure(options.case, *sizes, options.resumed, options.scratch)))
        return
    print(f"{'scheme':15} {'save':6} {'ratio':>6} {'peak':>7} {'after':>7} {'blocked':>9}")
    for scheme in options.schemes:
        command = [sys.executable, __file__, "--case", scheme, "--layers", str(options.layers)]
        command += ["--width", str(options.width), "--vocabulary", str(options.vocabulary)]
        command += ["--resumed"] if options.resumed else []
        command += ["--scratch", options.scratch] if options.scratch else []
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for row in found["rows"]:
            print(
                f"{scheme:15} {row['kind']:6} {row['ratio']:6.1f} {row['peak']:6.2f}x {row['after']:6.2f}x"
                f" {1000 * row['blocked']:6.0f} ms",
                flush=True,
            )
    print(
        f"x: {found['state'] / 1e6:.0f} MB of state; the training had {found['training'] / 1e6:.0f} MB resident, coders and"
        f" libraries {found['libraries'] / 1e6:.0f} MB",
        flush=True,
    )


if __name__ == "__main__":
    main()
