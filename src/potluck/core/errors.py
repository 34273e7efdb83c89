"""The one error tree. Every error carries the code that the API and the wire use; no I/O, no formatting for terminals.

PotluckError
├── BadRequest                 bad_request            the caller asked for something that cannot be
│   └── ContextLengthExceeded  context_length_exceeded
├── BadModelFile               bad_model_file         a model file lies, is cut short or is not supported; names file and field
│   ├── UnknownArchitecture    unknown_architecture
│   └── UnknownFormat          unknown_format         a tensor format we cannot compute with
├── BadTemplate                bad_template           a chat template that does not parse, misbehaves or takes too long
├── WeightsMismatch            weights_mismatch       bytes differ from the manifest
├── ModelNotFound              model_not_found
├── DownloadFailed             download_failed
├── OutOfKvMemory              kv_budget_exceeded     the KV budget has no room left
└── BenchmarkFailed            benchmark_failed       a benchmark cannot run here, or its figures would not be fair
"""


class PotluckError(Exception):
    """Base of all errors that we raise on purpose; `code` is stable, the message is for people."""

    code = "internal_error"


class BadRequest(PotluckError):
    code = "bad_request"


class ContextLengthExceeded(BadRequest):
    code = "context_length_exceeded"


class BadModelFile(PotluckError):
    """A model file that cannot be trusted or understood. Always says which file and which field."""

    code = "bad_model_file"

    def __init__(self, file: object, field: str, problem: str) -> None:
        super().__init__(f"{file}: {field}: {problem}")
        self.file = str(file)
        self.field = field
        self.problem = problem


class UnknownArchitecture(BadModelFile):
    code = "unknown_architecture"


class UnknownFormat(BadModelFile):
    code = "unknown_format"


class BadTemplate(PotluckError):
    code = "bad_template"


class WeightsMismatch(PotluckError):
    code = "weights_mismatch"


class ModelNotFound(PotluckError):
    code = "model_not_found"


class DownloadFailed(PotluckError):
    code = "download_failed"


class OutOfKvMemory(PotluckError):
    code = "kv_budget_exceeded"


class BenchmarkFailed(PotluckError):
    code = "benchmark_failed"
