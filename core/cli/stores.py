"""``shrinkpoint stores``: the several stores of a run, what they lack, and writing it again."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from shrinkpoint.cli.output import bytes_text, counted, table
from shrinkpoint.cli.runs import Answer, keys_of, open_run
from shrinkpoint.errors import ConfigError
from shrinkpoint.runtime.progress import waiting_for
from shrinkpoint.store.striped.heal import Healed, Survey, survey
from shrinkpoint.store.striped.heal import heal as heal_objects
from shrinkpoint.store.urls import split_urls, url_text


def stores(
    urls: Annotated[
        list[str],
        typer.Argument(
            metavar="URL...", help="The run's stores in their order, apart or with commas between them."
        ),
    ],
    heal: Annotated[
        bool,
        typer.Option(
            "--heal", help="Read all, and write again what is missing or damaged; a blank store joins."
        ),
    ] = False,
    replace: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N=URL", help="With --heal: an empty place instead of store N, from 1; repeatable."
        ),
    ] = None,
) -> Answer:
    """Show the stores of a run: the newest checkpoint and what is missing on each, and how many may still be lost.

    With --heal what is missing is written again; the run may be saved to meanwhile. Exits with 1 where something is amiss.
    """
    if replace and not heal:
        raise ConfigError("--replace puts a new store in the place of another: give --heal too")
    given = _replaced([str(one) for url in urls for one in split_urls(url)], replace or ())
    if len(given) < 2:
        raise ConfigError(f"{given[0]} is one store: give all of the run's stores, as in A B C or A,B,C")
    run = open_run(url_text(given))
    manifests, objects = run.manifests(), run.stores
    assert objects is not None
    needed = keys_of(run, manifests)
    if not heal:
        found = survey(objects, manifests, needed)
        amiss = bool(found.unrestorable) or any(state.problem for state in found.stores)
        return Answer({"url": run.display} | asdict(found), _of_survey(found), amiss)
    with waiting_for("healing") as waiting:
        healed = heal_objects(
            objects, needed, lambda done, of, key: waiting.say(f"healing, {done} of {of} objects")
        )
    more = [f"from now on, give {run.display}"] if replace else []
    return Answer({"url": run.display} | asdict(healed), [*_of_healed(healed), *more], bool(healed.lost))


def _replaced(urls: list[str], pairs: Sequence[str]) -> list[str]:
    for pair in pairs:
        number, equals, url = pair.partition("=")
        if not equals or not url or not number.isdecimal() or not 1 <= int(number) <= len(urls):
            raise ConfigError(
                f"--replace {pair!r} must be N=URL with the number of a store, 1 to {len(urls)}, as in 2=s3://c/run-7"
            )
        urls[int(number) - 1] = url
    return urls


def _of_survey(found: Survey) -> Iterator[str | Table]:
    rows = [
        {
            "store": state.number,
            "url": state.shown,
            "newest step": None if state.last_step is None else f"{state.last_step} (seq {state.last_seq})",
            "records missing": state.records_missing if state.problem is None else None,
            "shards missing": state.shards_missing,
            "shards present": None if state.problem else f"{state.files} ({bytes_text(state.bytes)})",
            "state": state.problem or "ok",
        }
        for state in found.stores
    ]
    yield from table(rows, left=("url", "state"))
    for key in found.unrestorable:
        yield f"LOST {key}: too few shards are left in the stores that answer"
    spare = counted(found.redundancy, "store") if found.redundancy else "no further store"
    yield f"{spare} may be lost now; parity {found.parity}"
    if found.redundancy < found.parity:
        yield (
            "`shrinkpoint stores --heal` writes what is missing, where all stores answer or are replaced (--replace N=URL)"
        )


def _of_healed(healed: Healed) -> Iterator[str]:
    for number in healed.joined:
        yield f"store {number} was blank and belongs to the run now"
    leftovers = f"; {healed.orphans} leftovers of interrupted saves are left alone" if healed.orphans else ""
    wrote = f"{counted(healed.records, 'record')} and {counted(healed.shards, 'shard')}"
    yield f"wrote what was missing: {wrote}; repaired {healed.repaired} that were damaged{leftovers}"
    if healed.outdated:
        steps = ", ".join(map(str, healed.outdated))
        yield (
            f"checkpoints of steps {steps} were removed while a store was away that still lists them: the next collection"
            " removes them there"
        )
    for key, why in healed.lost.items():
        yield f"LOST {key}: {why}"
