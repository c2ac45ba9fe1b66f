"""Makes the golden chain: a base and two deltas that use every codec, and what they decode to. Run by hand, once.

    python tests/golden/make_codecs.py

As with the other golden files, a released chain is never made again.
"""

import hashlib
import json
from pathlib import Path

import torch

from shrinkpoint.coding.encode import encode_state
from shrinkpoint.coding.selective import decode_chain, in_memory
from shrinkpoint.container.writer import write_container
from shrinkpoint.schemes.inshrinkerator.scheme import Inshrinkerator, InshrinkeratorOptions, Weights
from shrinkpoint.schemes.inshrinkerator.space import Configuration
from shrinkpoint.state.dtypes import tensor_to_bytes
from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.training import TrainingState

HERE = Path(__file__).parent / "codecs"

# Bins change along the chain, and so does the coder of the levels; the last one prunes by magnitude.
RECIPES = (
    (16, 0.0, 0.01, "sensitivity", "rans"),
    (8, 0.1, 0.005, "sensitivity", "rans"),
    (12, 0.2, 0.0005, "magnitude", "rle-huffman"),
)


def expected(state: TrainingState) -> dict[str, str]:
    """SHA-256 of every tensor's bytes, by name."""
    return {name: hashlib.sha256(tensor_to_bytes(t).data).hexdigest() for name, t in state.tensors.items()}


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(70, 40), torch.nn.Linear(40, 60), torch.nn.LayerNorm(60), torch.nn.Linear(60, 50)
    )
    model[3].to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    describe = describe_training(model, [optimizer], model_path=("model",), optimizers_path=("optimizers",))
    reference, parent, written, told = None, None, [], []
    for step, (bins, prune, protect, metric, coder) in enumerate(RECIPES):
        for _ in range(3):
            hidden = model[2](model[1](model[0](torch.randint(0, 60, (32,)))))
            optimizer.zero_grad()
            model[3](hidden.to(torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
        extra = {
            "complex": torch.view_as_complex(torch.arange(12.0).reshape(6, 2) + step),
            "nan": torch.tensor([step, float("nan")]),
            "squares": torch.arange(5000.0) ** 2 * (1 + step / 1000),  # large enough for an exact difference
        }
        live = {"model": model.state_dict(), "optimizers": [optimizer.state_dict()], "extra": extra}
        state = TrainingState.capture(live, describe)
        options = InshrinkeratorOptions(coder=coder, min_elements=1000)
        configuration = Configuration(
            bins=bins, prune=prune, protect=protect, metric=metric, embedding_bins=16
        )
        scheme = Inshrinkerator(options, Weights(state, options), configuration)
        encoded = encode_state(
            state, scheme, step=step, reference=reference, parent=parent, provenance={"golden": 1}
        )
        reference, parent = encoded.reference, encoded.checkpoint.state_digest
        written.append(write_container(encoded.checkpoint))
        told.append(expected(decode_chain([*map(in_memory, written)]).state))
    for step, data in enumerate(written):
        path = HERE / f"v1_{step}.shrink"
        if path.exists():
            raise SystemExit(
                f"{path} exists: golden files are made once; delete it only before its first release"
            )
        path.write_bytes(data)
    (HERE / "v1.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
