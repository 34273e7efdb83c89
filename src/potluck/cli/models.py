"""`potluck pull`, `potluck models`, `potluck remove`: the model store at the terminal. The store does the work."""

from collections.abc import Container
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.console import (
    JsonOption,
    format_table,
    make_progress,
    notice,
    one_line,
    print_json,
    require_utf8,
    shown_bytes,
    shown_count,
)

if TYPE_CHECKING:
    from potluck.weights.store import ModelEntry, ModelStore

_COLUMNS = ("ID", "FAMILY", "LAYERS", "PARAMETERS", "SIZE", "CONTEXT", "QUANTISATION")
_NUMBERS = (2, 3, 4, 5)


def open_store() -> "ModelStore":
    from potluck.core.paths import locate_folders
    from potluck.weights.store import ModelStore

    return ModelStore(locate_folders().models)


def pull(
    source: Annotated[
        str,
        typer.Argument(
            metavar="NAME|PATH|hf:REPO",
            help="A known name (smollm2-135m), a GGUF file or Hugging Face folder, "
            "or hf:OWNER/NAME, hf:OWNER/NAME:Q4_K_M, hf:OWNER/NAME/FILE.gguf.",
        ),
    ],
    name: Annotated[
        str | None, typer.Option("--name", help="The id that the model gets; by default from its name.")
    ] = None,
    link: Annotated[
        bool, typer.Option("--link", help="Hard-link a local file instead of copying it; do not write to it later.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Bring a model into the store; an interrupted pull goes on where it stopped."""
    from potluck.weights.pull import Puller

    require_utf8(source, "the model's name or path")
    progress = make_progress(as_json)
    try:
        pulled = Puller(open_store(), progress).pull(source, name, is_linked=link)
    finally:
        progress.finish()
    if as_json:
        return print_json({"model": pulled.entry, "is_new": pulled.is_new})
    state = "is ready" if pulled.is_new else "was here already"
    print(f"{pulled.entry.id} {state}: {describe(pulled.entry)}")
    print(f'try: potluck ask --model {pulled.entry.id} "..."')


def models(as_json: JsonOption = False) -> None:
    """List the models in the store."""
    store = open_store()
    entries, damaged = store.list(), store.damaged()
    if as_json:
        return print_json({"models": entries, "damaged": list(damaged), "folder": str(store.root)})
    if entries:
        print(listing(entries, damaged))
    elif not damaged:
        print("The store is empty; `potluck pull smollm2-135m` gets a small model (98 MB).")
    for name, fault in damaged.items():
        notice(f"{name} is damaged: {one_line(fault)}")
    return None


def remove(
    model_id: Annotated[str, typer.Argument(metavar="ID", help="As `potluck models` lists it.")],
    force: Annotated[bool, typer.Option("--force", help="Also where this machine's node is to serve it.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete a model from the store, and what is left of its unfinished pulls."""
    store = open_store()
    if not force:
        _require_unused(store, model_id)
    store.remove(model_id)
    if as_json:
        return print_json({"removed": model_id})
    print(f"{model_id} is removed")


def _require_unused(store: "ModelStore", model_id: str) -> None:
    """Raises BadRequest for a sound model of the swarm whose node runs from this home; a damaged one is of no use to it."""
    from potluck.core.errors import BadRequest
    from potluck.node.identity_file import own_key, own_run_file, own_swarm_file
    from potluck.trust.keeper import SwarmKeeper

    entries = {entry.id: entry for entry in store.list()}
    if model_id not in entries or own_run_file().read() is None or store.fault(model_id, is_opened=True) is not None:
        return
    served = {model.weights_sha256: model.subject for model in SwarmKeeper(own_key(), own_swarm_file()).roster.models()}
    if (name := served.get(entries[model_id].weights_sha256)) is not None:
        raise BadRequest(
            f"the node that runs from this home serves {name} with its swarm; type first: potluck withdraw {name} "
            "(the swarm serves it no longer) or potluck leave (this machine's node ends), or here: --force"
        )


def listing(entries: "tuple[ModelEntry, ...]", damaged: Container[str] = ()) -> str:
    rows = [
        (
            entry.id,
            entry.family,
            str(entry.layer_count) if entry.held is None else f"partial {entry.held} of {entry.layer_count}",
            shown_count(entry.parameter_count),
            "damaged" if entry.id in damaged else shown_bytes(entry.size_bytes),
            f"{entry.context_length:,}",
            entry.quantisation,
        )
        for entry in entries
    ]
    return format_table(_COLUMNS, rows, right=_NUMBERS)


def describe(entry: "ModelEntry") -> str:
    return (
        f"{entry.family}, {entry.layer_count} layers, {shown_count(entry.parameter_count)} parameters, "
        f"{entry.quantisation}, {shown_bytes(entry.size_bytes)}"
    )
