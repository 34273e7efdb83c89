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
├── OutOfDeviceMemory          out_of_device_memory   a GPU has no room for weights and KV cache
├── DeviceUnavailable          device_unavailable     there is no such GPU here, or no way to use it
├── ShardUnavailable           shard_unavailable      no shard covers some layers, or all that do are full
├── PipelineStalled            pipeline_stalled       no progress within the time allowed
├── ExperimentalDisabled       experimental_disabled  this node was told not to take part
├── ShardCorruption            shard_corruption       activations arrived that no sound shard sends
├── BadKeyFile                 bad_key_file           a node's key file cannot be read, or others can read it too
├── WireError                  wire_error
│   ├── ProtocolViolation      protocol_violation     the other side sent what the protocol does not allow
│   └── WireMisuse             wire_misuse            our own code asked for what the protocol cannot carry
├── LinkError                  link_error
│   ├── LinkClosed             link_closed            sending on a link that is closed
│   ├── LinkFull               link_full              more is queued for the other side than we are ready to hold
│   ├── DialFailed             dial_failed            nobody answers there, or not in time
│   ├── WrongPeer              wrong_peer             somebody else answers there
│   └── PeerRefused            peer_refused           the other side turned us away, and said why
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


class OutOfDeviceMemory(PotluckError):
    code = "out_of_device_memory"


class DeviceUnavailable(PotluckError):
    code = "device_unavailable"


class ShardUnavailable(PotluckError):
    code = "shard_unavailable"


class PipelineStalled(PotluckError):
    code = "pipeline_stalled"


class ExperimentalDisabled(PotluckError):
    code = "experimental_disabled"


class ShardCorruption(PotluckError):
    code = "shard_corruption"


class BadKeyFile(PotluckError):
    code = "bad_key_file"


class WireError(PotluckError):
    code = "wire_error"


class ProtocolViolation(WireError):
    """A remote fault. The connection that it came on cannot be used further; nothing of the input is quoted."""

    code = "protocol_violation"


class WireMisuse(WireError):
    """A local fault: a message or body that no peer would accept. The connection stays as it was."""

    code = "wire_misuse"


class LinkError(PotluckError):
    code = "link_error"


class LinkClosed(LinkError):
    code = "link_closed"


class LinkFull(LinkError):
    code = "link_full"


class DialFailed(LinkError):
    code = "dial_failed"


class WrongPeer(LinkError):
    code = "wrong_peer"


class PeerRefused(LinkError):
    """`reason` is what the other side said: text from elsewhere, at most 64 bytes, printable."""

    code = "peer_refused"

    def __init__(self, reason: str) -> None:
        super().__init__(f"refused by the other side: {reason}")
        self.reason = reason


class BenchmarkFailed(PotluckError):
    code = "benchmark_failed"
