"""llama.cpp through xllamacpp, asked with token ids: greedy continuations, and the probabilities of a given text."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import xllamacpp


class Candidate(NamedTuple):
    token: int
    log_probability: float


class Generated(NamedTuple):
    """A token that llama.cpp produced, and its likeliest ones at that place."""

    token: int
    log_probability: float
    likeliest: list[Candidate]


class LlamaCpp:
    """One model in one slot. A single thread: with more, it waits in circles wherever another program is busy."""

    def __init__(self, path: Path, context: int = 2048) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = context
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.n_parallel = 1
        params.warmup = False
        params.verbosity = 0
        self._server = xllamacpp.Server(params)

    def greedy(self, prompt: list[int], count: int, candidates: int = 3) -> list[Generated]:
        """For text in ASCII only: tokens that are parts of a character are left out of what its server tells."""
        generated = self._complete(prompt, count, candidates, {"temperature": 0})
        assert len(generated) == count
        return generated

    def log_probabilities(self, tokens: list[int]) -> list[float]:
        """Of every token but the first, given those before it.

        Its server tells probabilities of generated tokens only, so a grammar of token ids lets it generate exactly this
        text; what it tells are the probabilities before the grammar.
        """
        grammar = "root ::= " + " ".join(f"<[{token}]>" for token in tokens[1:])
        generated = self._complete(tokens[:1], len(tokens) - 1, 1, {"temperature": 0, "grammar": grammar})
        assert [one.token for one in generated] == tokens[1:]
        return [one.log_probability for one in generated]

    def _complete(self, prompt: list[int], count: int, candidates: int, more: dict[str, Any]) -> list[Generated]:
        request = {"prompt": prompt, "n_predict": count, "max_tokens": count, "n_probs": candidates, "ignore_eos": True}
        answer = self._server.handle_completions({**request, "cache_prompt": False, "stream": False, **more})
        answer = json.loads(answer) if isinstance(answer, str) else answer
        return [_generated(entry) for entry in answer["choices"][0]["logprobs"]["content"]]


def _generated(entry: dict[str, Any]) -> Generated:
    likeliest = [Candidate(one["id"], one["logprob"]) for one in entry["top_logprobs"]]
    return Generated(entry["id"], entry["logprob"], likeliest)
