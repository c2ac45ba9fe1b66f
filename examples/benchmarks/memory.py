"""What saving takes of memory beside a training: python examples/benchmarks/memory.py (some minutes)

A GPT of the given size is trained for some AdamW steps on the source text of the standard library and saved three times, each scheme in a
process of its own. Given are, in sizes of the state (weights and both moments, fp32), how much more resident memory the process has than
the training had before: at most while a save is under way, and after it. ``blocked`` is how long training
waited for the snapshot. The evaluation is on the CPU, where its copy of the live weights counts too. Compiled coders and
libraries take the same memory whatever the size: they are loaded before, by saves of a small model, and given apart.

12 layers of width 512 are 38 M parameters. GPT-2 has a ``--vocabulary`` of 50257 and a width of 768: one tensor is then a third of the state.
``--scratch FOLDER`` measures it once more with a folder on a local disk for parts of it (`Advanced.scratch_folder`).
``--resumed`` lets steps be tried from restored states, as the callbacks do: they need the whole state twice more for that moment.
"""

import gc
import json
import subprocess
import sys
import tempfile
from itertools import product
from typing import Any

import torch
from common import gpt_of, parsed, reset_peak, resident, show
from gpt import VOCABULARY, GPTConfig, build_optimizer, load_corpus, loss_on

import shrinkpoint

CASES = ["auto", "lossless", "inshrinkerator"]
_BLOCK, _SAVES, _STEPS = 32, 3, 5


def train_and_save(
    scheme: str, config: GPTConfig, vocabulary: int, resumed: bool, scratch: str | None
) -> dict[str, Any]:
    """Train in this process; what memory its saves took."""
    torch.manual_seed(0)
    model = gpt_of(config, vocabulary)
    optimizer = build_optimizer(model, config)[0]
    text, held_out = load_corpus(max_bytes=400_000)
    batches = [text[at : at + _BLOCK + 1].long()[None] for at in range(0, 40 * _BLOCK, _BLOCK)]
    evaluated = [held_out[: _BLOCK + 1].long()[None]]

    def train() -> None:
        for step in range(_STEPS):
            optimizer.zero_grad()
            model.loss(batches[step % len(batches)]).backward()
            optimizer.step()

    train()
    loss_on(model, evaluated)
    gc.collect()
    before = resident()
    state = sum(3 * parameter.nbytes for parameter in model.parameters())
    rows: list[dict[str, Any]] = []
    more = {"train_loss": lambda i: model.loss(batches[i % len(batches)])} if resumed else {}
    advanced = shrinkpoint.Advanced(scratch_folder=scratch)
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = shrinkpoint.Checkpointer(
            folder,
            model,
            optimizer,
            scheme=scheme,
            advanced=advanced,
            evaluate=lambda: loss_on(model, evaluated),
            **more,
        )
        checkpointer.resume()
        for number in range(1, _SAVES + 1):
            train()
            reset_peak()
            checkpointer.save(number * _STEPS, wait=True)
            gc.collect()
            report, peak = checkpointer.reports()[-1], resident("VmHWM")
            told = {"kind": report.kind, "ratio": report.ratio, "blocked": report.blocked_s}
            rows.append(told | {"peak": (peak - before) / state, "after": (resident() - before) / state})
        checkpointer.close()
    return {"state": state, "training": before, "rows": rows}


def measure(options: Any) -> dict[str, Any]:
    """Of one scheme, in this process."""
    torch.set_num_threads(1)
    small = GPTConfig(width=64, layers=2, heads=2, block=_BLOCK, batch=1)
    config = GPTConfig(width=options.width, layers=options.layers, heads=8, block=_BLOCK, batch=1)
    gc.collect()
    alone = resident()
    train_and_save(options.case, small, VOCABULARY, False, None)
    gc.collect()
    libraries = resident() - alone
    found = train_and_save(options.case, config, options.vocabulary, options.resumed, options.scratch)
    return found | {"libraries": libraries}


def main() -> None:
    sizes = {"width": 512, "layers": 12, "vocabulary": VOCABULARY}
    options = parsed(__doc__, **sizes, schemes=CASES, resumed=False, scratch=None, case="")
    if options.case:
        print(json.dumps(measure(options)))
        return
    rows = []
    for scheme, scratch in product(options.schemes, dict.fromkeys((None, options.scratch))):
        command = [sys.executable, __file__, "--case", scheme]
        command += [text for name in sizes for text in (f"--{name}", str(getattr(options, name)))]
        command += ["--resumed"] if options.resumed else []
        command += ["--scratch", scratch] if scratch else []
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        for row in found["rows"]:
            numbers = (
                f"{row['ratio']:.1f}",
                f"{row['peak']:.2f}x",
                f"{row['after']:.2f}x",
                f"{1000 * row['blocked']:.0f}",
            )
            rows.append([f"{scheme}, scratch folder" if scratch else scheme, row["kind"], *numbers])
            print(*rows[-1], flush=True)
    megabytes = (f"{found[name] / 1e6:.0f} MB" for name in ("state", "training", "libraries"))
    title = "x: {} of state; the training had {} resident, coders and libraries {}".format(*megabytes)
    show("scheme | save | ratio | peak | after | blocked, ms", rows, title)


if __name__ == "__main__":
    main()
