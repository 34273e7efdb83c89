"""Made-up results of `potluck bench engine`, which meet every bar unless told otherwise."""

from potluck.bench.report import BusyCoreFigures, Contest, EngineReport, LargeFigures, ThreadFigures


def figures(decode: float = 200.0, q4_k: float = 11.5, theirs: bool = True) -> ThreadFigures:
    def against(ours: float, llama: float) -> Contest:
        return Contest((ours, ours * 9, ours / 9), (llama, llama * 9, llama / 9) if theirs else ())

    def large(ours: float) -> LargeFigures:
        return LargeFigures(decode=against(ours, 10.0), bytes_per_token=800_000_000, read_bandwidth=(12e9,))

    return ThreadFigures(
        decode=against(decode, 100.0),
        prefill=against(300.0, 100.0),
        deep_decode=against(140.0, 100.0),
        one_step_s=(0.010, 0.5, 0.001),
        verify_step_s=(0.015, 0.5, 0.001),
        one_session=(100.0,),
        all_sessions=(400.0,),
        large={"Q4_0": large(13.0), "Q4_K": large(q4_k)},
    )


def report(threads: dict[int, ThreadFigures] | None = None, two_threads: float = 60.0) -> EngineReport:
    busy = BusyCoreFigures(
        one_thread=(50.0,),
        two_threads=(two_threads,),
        one_thread_started_beside=(50.0,),
        two_threads_started_beside=(70.0,),
    )
    return EngineReport(
        model="tiny",
        file="/tmp/tiny.gguf",
        rounds=3,
        processor="a processor",
        cores=2,
        kernels="avx2",
        other_load=0.0,
        threads=threads or {1: figures(q4_k=12.5), 2: figures(decode=180.0)},
        busy_core=busy,
    )
