"""Makes the golden payloads of the context coder, one for each effort, one of runs and one of a dithered plane, and what they decode to. Run by hand, once.

    PYTHONPATH=tests python tests/golden/make_context.py

As with the other golden files, released payloads are never made again.
"""

import hashlib
import json
from pathlib import Path
from typing import get_args

from support.context_planes import golden_dithered_plane, golden_planes, sparse

from shrinkpoint.entropy.contexts.coder import Effort, encode_plane

HERE = Path(__file__).parent / "context"


def main() -> None:
    plane, sides = golden_planes()
    planes = dict.fromkeys(get_args(Effort), plane) | {"runs": sparse(plane)}
    planes = {name: (levels, 31, sides) for name, levels in planes.items()}
    dithered, told = golden_dithered_plane()
    planes["dithered"] = dithered, 5, [told]
    for name, (levels, alphabet, given) in planes.items():
        path = HERE / f"v1_{name}.bin"
        if path.exists():
            print(f"{path} exists: golden files are made once; delete it only before its first release")
            continue
        effort = {"runs": "fast", "dithered": "default"}.get(name, name)
        path.write_bytes(encode_plane(levels, alphabet, columns=120, sides=given, effort=effort))
    digests = {name: hashlib.sha256(levels.tobytes()).hexdigest() for name, (levels, _, _) in planes.items()}
    (HERE / "v1.json").write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    main()
