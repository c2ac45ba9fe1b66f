"""Makes the golden payloads of the context coder, one for each effort and one of runs, and what they decode to. Run by hand, once.

    PYTHONPATH=tests python tests/golden/make_context.py

As with the other golden files, released payloads are never made again.
"""

import hashlib
import json
from pathlib import Path
from typing import get_args

from support.context_planes import golden_planes, sparse

from shrinkpoint.entropy.context import Effort, encode_plane

HERE = Path(__file__).parent / "context"


def main() -> None:
    plane, sides = golden_planes()
    planes = dict.fromkeys(get_args(Effort), plane) | {"runs": sparse(plane)}
    for name, levels in planes.items():
        path = HERE / f"v1_{name}.bin"
        if path.exists():
            raise SystemExit(
                f"{path} exists: golden files are made once; delete it only before its first release"
            )
        effort = "fast" if name == "runs" else name
        path.write_bytes(encode_plane(levels, 31, columns=120, sides=sides, effort=effort))
    told = {name: hashlib.sha256(levels.tobytes()).hexdigest() for name, levels in planes.items()}
    (HERE / "v1.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
