"""The golden chains of single codecs: this library's own and the baselines'."""

import json
from pathlib import Path

import support.baseline_schemes  # noqa: F401 - their codecs are found

TESTS = Path(__file__).parents[1]
OWN = TESTS / "golden" / "each"
FOLDERS = (OWN, TESTS / "examples" / "baselines" / "golden")
EXPECTED = {folder: json.loads((folder / "v1.json").read_text()) for folder in FOLDERS}
CASES = {case: told for cases in EXPECTED.values() for case, told in cases.items()}
"""For each case the digests of its tensors by name, for each checkpoint of its chain."""


def chain_of(case: str) -> list[Path]:
    """The files of a case, the base first."""
    folder = next(folder for folder, cases in EXPECTED.items() if case in cases)
    return [folder / f"v1_{case}_{index}.shrink" for index in range(len(CASES[case]))]
