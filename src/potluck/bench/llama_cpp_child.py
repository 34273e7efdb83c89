"""The process that llama.cpp runs in: one JSON request a line on stdin, one JSON answer a line on stdout.

Started by `potluck.bench.llama_cpp`, whose messages it speaks; nothing else imports it, nor `xllamacpp`.
"""

import os
import sys
import time
from typing import IO, Any

import msgspec

from potluck.bench.llama_cpp import Complete, Completed, Describe, Description, Failed, Load, Loaded, Request


class _Holder:
    """The one model of this process, once it is loaded."""

    def __init__(self) -> None:
        import xllamacpp

        self._library: Any = xllamacpp
        self._server: Any = None

    def answer(self, request: Request) -> msgspec.Struct:
        match request:
            case Describe():
                version = getattr(self._library, "__version__", "unknown")
                return Description(str(version), self._library.get_system_info())
            case Load():
                return self._load(request)
            case Complete():
                return self._complete(request)

    def _load(self, request: Load) -> Loaded:
        # All else stays as llama.cpp has it; n_gpu_layers = 0, for one, costs it 5 % even where there is no GPU.
        params = self._library.CommonParams()
        params.model.path = request.path
        params.n_ctx = request.context
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request.threads
        params.n_parallel = 1
        params.verbosity = 0
        self._server = self._library.Server(params)
        return Loaded(params.cpuparams.n_threads, params.cpuparams_batch.n_threads)

    def _complete(self, request: Complete) -> Completed:
        wall, processor = time.perf_counter(), time.process_time()
        answer = self._server.handle_completions(_completion(request))
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        timings = answer["timings"]
        return Completed(
            cached_tokens=timings["cache_n"],
            prompt_tokens=timings["prompt_n"],
            prompt_s=timings["prompt_ms"] / 1e3,
            predicted_tokens=timings["predicted_n"],
            predicted_s=timings["predicted_ms"] / 1e3,
            wall_s=wall,
            processor_s=processor,
        )


def _completion(request: Complete) -> dict[str, object]:
    return {
        "prompt": list(request.prompt),
        "n_predict": request.count,
        "max_tokens": request.count,
        # Greedy by the cheapest road: one sampler instead of the usual chain of eight.
        "samplers": ["top_k"],
        "top_k": 1,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": request.keeps_prompt,
        "stream": False,
    }


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    decoder = msgspec.json.Decoder(Request)
    holder: _Holder | None = None
    for line in requests:
        try:
            holder = holder or _Holder()
            answer: msgspec.Struct = holder.answer(decoder.decode(line))
        except Exception as error:
            answer = Failed(f"{type(error).__name__}: {error}")
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()


def main() -> None:
    # llama.cpp prints to stdout as it likes; the answers go through a copy that it does not know.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)
    answers.flush()
    os._exit(0)  # the parent has gone or has what it wanted; tearing llama.cpp down would only take time


if __name__ == "__main__":
    main()
