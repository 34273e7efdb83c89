"""`potluck ask`: one question, one streamed answer. Loading and generating are the worker's; this prints."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.console import JsonOption, harmless, make_progress, notice, print_json, require_utf8
from potluck.cli.models import open_store
from potluck.cli.node_options import MOST_THREADS, refuse_idle
from potluck.core.errors import BadRequest, ModelNotFound
from potluck.core.sampling_params import SamplingParams
from potluck.weights.catalogue import DEFAULT_MODEL_ID

if TYPE_CHECKING:
    from potluck.weights.store import ModelEntry, ModelStore
    from potluck.worker.local_model import LocalModel, Timing

_LONGEST_QUESTION = 1 << 20  # characters


def ask(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to ask; - reads it from standard input.")],
    model: Annotated[str | None, typer.Option("--model", "-m", help="A model of `potluck models`.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message before the question.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens with this share.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same text.")] = 0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="At most this many tokens.")] = 512,
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", min=1, max=MOST_THREADS, help="Default: all cores.")
    ] = None,
    via: Annotated[str | None, typer.Option("--via", help="ADDR,ADDR,…: shards on other machines, spares too.")] = None,
    ring: Annotated[bool, typer.Option(help="Let the last shard feed the first directly.")] = True,
    codec: Annotated[
        str | None, typer.Option("--activation-dtype", help="auto (fp32 here), fp32, fp16 or int8 between shards.")
    ] = None,
    own_layers: Annotated[
        str | None,
        typer.Option(
            "--own-layers", help="With --via, what this machine computes itself: 0-4, 25-output, 0-4,25-output."
        ),
    ] = None,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            "--dist-prefill-chunk", min=1, max=4096, help="With --via: tokens of the prompt at a time, at most (128)."
        ),
    ] = None,
    prefill_window: Annotated[
        int | None,
        typer.Option(
            "--dist-prefill-window", min=1, max=32, help="With --via: chunks that may be on their way (shards + 2)."
        ),
    ] = None,
    here: Annotated[bool, typer.Option("--here", help="On this machine alone, even where its node runs.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Ask one question and stream the answer: of this machine's swarm where its node runs, else on this machine alone."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed).check()
    require_utf8(model or "", "--model")
    messages = [{"role": "system", "content": require_utf8(system, "--system")}] if system else []
    messages.append({"role": "user", "content": _question(question)})
    if via is not None:
        from potluck.cli.ask_via import RemoteQuestion, ask_via

        refuse_idle({"--here": here}, "--via asks other machines")
        question_there = RemoteQuestion(
            via.split(","), model, messages, params, max_tokens, ring, codec, as_json, own_layers, threads, prefill_chunk,
            prefill_window,
        )  # fmt: skip
        return ask_via(question_there)
    idle = {
        "--own-layers": own_layers is not None, "--no-ring": not ring, "--activation-dtype": codec is not None,
        "--dist-prefill-chunk": prefill_chunk, "--dist-prefill-window": prefill_window,
    }  # fmt: skip
    refuse_idle(idle, "shards on other machines are used with --via only")
    if not here and _runs_a_node():
        from potluck.cli.ask_swarm import ask_swarm

        return ask_swarm(messages, model, params, max_tokens, as_json)
    store = open_store()
    entry = find_model(store, model)
    loaded = _load(store, entry, threads)
    try:
        _answer(loaded, entry.id, loaded.encode_chat(messages), params, max_tokens, as_json)
    finally:
        loaded.close()
    return None


def _runs_a_node() -> bool:
    from potluck.node.identity_file import own_run_file

    running = own_run_file().read()
    return running is not None and bool(running.api)


def _question(text: str) -> str:
    if text == "-":
        try:
            text = sys.stdin.read(_LONGEST_QUESTION + 1)
        except UnicodeDecodeError:
            raise BadRequest("the question is not UTF-8 text") from None
    if not text.strip():
        raise BadRequest('there is no question; try: potluck ask "What is a potluck?"')
    if len(text) > _LONGEST_QUESTION:
        raise BadRequest(f"the question is longer than {_LONGEST_QUESTION} characters")
    return require_utf8(text, "the question")


def find_model(store: "ModelStore", model: str | None) -> "ModelEntry":
    """The model of that name, or the default one, or the only one."""
    if model is not None:
        return store.find(model)
    entries = store.list()
    default = [entry for entry in entries if entry.id == DEFAULT_MODEL_ID]
    if not entries:
        raise ModelNotFound(f"there is no model yet; type: potluck pull {DEFAULT_MODEL_ID}")
    return default[0] if default else entries[0]


def find_or_pull(store: "ModelStore", model: str | None, as_json: bool) -> "ModelEntry":
    """As `find_model`; where there is no model at all, the default one is brought."""
    if model is None and not store.list():
        from potluck.weights.pull import Puller

        progress = make_progress(as_json)
        try:
            notice(f"no model here yet: pulling {DEFAULT_MODEL_ID}")
            Puller(store, progress).pull(DEFAULT_MODEL_ID)
        finally:
            progress.finish()
    return find_model(store, model)


def _load(store: "ModelStore", entry: "ModelEntry", threads: int | None) -> "LocalModel":
    from potluck.worker.local_model import LocalModel

    return LocalModel(
        store.open(entry.id),
        source=entry.weights_sha256,
        cache_folder=store.packed_folder(entry.id),
        threads=threads,
        notice=notice,
    )


def _answer(
    model: "LocalModel", model_id: str, prompt: list[int], params: SamplingParams, max_tokens: int, as_json: bool
) -> None:
    parts: list[str] = []
    reason: str | None = None
    for piece in model.generate(prompt, params, max_tokens):
        parts.append(piece.text)
        reason = piece.finish_reason
        if not as_json:
            print(harmless(piece.text), end="", flush=True)
    assert model.timing is not None
    if as_json:
        return print_json(_report(model_id, "".join(parts), reason, model.timing))
    print(flush=True)
    notice(_summary(model, model.timing))


def _summary(model: "LocalModel", timing: "Timing") -> str:
    threads = model.engine.settings.threads
    return (
        f"[{timing.generated_tokens} tokens, {timing.tokens_per_s:.0f} tokens/s, first after "
        f"{timing.first_token_s * 1000:.0f} ms, {threads} thread{'s' if threads > 1 else ''}, {model.engine.processor}]"
    )


def _report(model_id: str, text: str, reason: str | None, timing: "Timing") -> dict[str, object]:
    return {
        "model": model_id,
        "text": text,
        "finish_reason": reason,
        "prompt_tokens": timing.prompt_tokens,
        "completion_tokens": timing.generated_tokens,
        "first_token_ms": round(timing.first_token_s * 1000, 1),
        "tokens_per_s": round(timing.tokens_per_s, 1),
    }
