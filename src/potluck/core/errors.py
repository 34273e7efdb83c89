"""The one error tree. Every error carries the code that the API and the wire use; no I/O, no formatting for terminals.

PotluckError
├── BadRequest                 bad_request            the caller asked for something that cannot be
│   ├── ContextLengthExceeded  context_length_exceeded
│   ├── BadGrammar             bad_grammar            a schema, expression or grammar that no answer can be held to
│   └── UnsupportedParameter   unsupported_parameter  would change the output, and cannot be honoured here
├── AccessDenied               access_denied          whoever asks may not, or not from there
│   ├── InvalidApiKey          invalid_api_key
│   ├── ForbiddenHost          forbidden_host         the request names a host that this server is not
│   └── ForbiddenOrigin        forbidden_origin       a page of another site asks
├── RequestTooLarge            request_too_large      a body over the limit
├── RequestTooSlow             request_timeout        a body that does not arrive in time
├── RouteNotFound              not_found
├── MethodNotAllowed           method_not_allowed
├── NotOffered                 not_offered            an address that other servers have and this one does not
├── QueueFull                  queue_full             more requests wait than may
│   └── Overloaded             overloaded             waited too long for a turn, or memory for requests is used up
├── ResumeImpossible           resume_impossible      an answer that cannot be taken up again where its reader left it
├── GenerationAborted          (the frame's own)      a generation that ended early, with the code that its head gave
├── NodeFailed                 (the node's own)       a node that was started beside this one ended instead
├── BadModelFile               bad_model_file         a model file lies, is cut short or is not supported; names file and field
│   ├── UnknownArchitecture    unknown_architecture
│   └── UnknownFormat          unknown_format         a tensor format we cannot compute with
├── BadTemplate                bad_template           a chat template that does not parse, misbehaves or takes too long
├── WeightsMismatch            weights_mismatch       bytes differ from the manifest
├── ModelNotFound              model_not_found
├── DownloadFailed             download_failed
├── WeightsMissing             weights_missing        layers that a partial model does not hold
├── WeightsUnavailable         weights_unavailable    no peer (and nobody outside) gave some chunks of a model
├── OutOfKvMemory              kv_budget_exceeded     the KV budget has no room left
├── OutOfDeviceMemory          out_of_device_memory   a GPU has no room for weights and KV cache
├── DeviceUnavailable          device_unavailable     there is no such GPU here, or no way to use it
├── ShardUnavailable           shard_unavailable      no shard covers some layers, or all that do are full
│   └── ShardsFull             shard_unavailable      … the latter
├── PlacementImpossible        placement_impossible   the nodes together cannot hold a model; says how many bytes are missing
├── PipelineStalled            pipeline_stalled       no progress within the time allowed
├── ExperimentalDisabled       experimental_disabled  this node was told not to take part
├── ShardCorruption            shard_corruption       activations arrived that no sound shard sends
├── BadKeyFile                 bad_key_file           a node's key file cannot be read, or others can read it too
├── BadSwarmFile               bad_swarm_file         a swarm's file is damaged, in use or open to others; names the file
├── BadInvite                  bad_invite             an invite that was altered, cut short or is none
├── NotEntitled                not_entitled           this node may not do that in its swarm
├── RecordRefused              record_refused         a membership record or an advert that counts for nothing; `reason` says why
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
    """`param` names the field that is wrong, where it is one."""

    code = "bad_request"

    def __init__(self, message: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthExceeded(BadRequest):
    code = "context_length_exceeded"


class BadGrammar(BadRequest):
    code = "bad_grammar"


class UnsupportedParameter(BadRequest):
    code = "unsupported_parameter"


class AccessDenied(PotluckError):
    code = "access_denied"


class InvalidApiKey(AccessDenied):
    code = "invalid_api_key"


class ForbiddenHost(AccessDenied):
    code = "forbidden_host"


class ForbiddenOrigin(AccessDenied):
    code = "forbidden_origin"


class RequestTooLarge(PotluckError):
    code = "request_too_large"


class RequestTooSlow(PotluckError):
    code = "request_timeout"


class RouteNotFound(PotluckError):
    code = "not_found"


class MethodNotAllowed(PotluckError):
    """`allowed`: the methods that the address does know."""

    code = "method_not_allowed"

    def __init__(self, message: str = "", allowed: str = "") -> None:
        super().__init__(message)
        self.allowed = allowed


class NotOffered(PotluckError):
    """An address that other servers have and this one does not."""

    code = "not_offered"


class QueueFull(PotluckError):
    """`retry_after_s`: when a turn is likely to be free."""

    code = "queue_full"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(QueueFull):
    code = "overloaded"


class ResumeImpossible(PotluckError):
    """Whoever asks has to begin anew: what was delivered cannot be made again, or belongs to another request."""

    code = "resume_impossible"


class GenerationAborted(PotluckError):
    """The end of a generation that could not go on; `code` is what its last frame said.

    `resume`: the event after which its reader may take it up again, as a Last-Event-ID.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.resume: str | None = None


class NodeFailed(PotluckError):
    """A node that another command started; `code` is what it ended with."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"a node did not start: {message}")
        self.code = code


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
    param = "model"


class DownloadFailed(PotluckError):
    code = "download_failed"


class WeightsMissing(PotluckError):
    code = "weights_missing"


class WeightsUnavailable(PotluckError):
    code = "weights_unavailable"


class OutOfKvMemory(PotluckError):
    code = "kv_budget_exceeded"


class OutOfDeviceMemory(PotluckError):
    code = "out_of_device_memory"


class DeviceUnavailable(PotluckError):
    code = "device_unavailable"


class ShardUnavailable(PotluckError):
    code = "shard_unavailable"


class ShardsFull(ShardUnavailable):
    """Some layers are held, but only by shards that have all the streams they take: worth waiting for a little."""


class PlacementImpossible(PotluckError):
    """`missing_bytes` more memory, brought by a newcomer or added where most is lacking, would do. `constraints` are in the way:
    "memory", and each other one that would be enough to lift alone ("trust", "pins", "layer caps", "shard limit")."""

    code = "placement_impossible"

    def __init__(self, message: str, missing_bytes: int, constraints: tuple[str, ...]) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes
        self.constraints = constraints


class PipelineStalled(PotluckError):
    code = "pipeline_stalled"


class ExperimentalDisabled(PotluckError):
    code = "experimental_disabled"


class ShardCorruption(PotluckError):
    code = "shard_corruption"


class BadKeyFile(PotluckError):
    code = "bad_key_file"


class BadSwarmFile(PotluckError):
    code = "bad_swarm_file"


class BadInvite(PotluckError):
    code = "bad_invite"


class NotEntitled(PotluckError):
    code = "not_entitled"


class RecordRefused(PotluckError):
    """A membership record or an advert. `reason` is short and stable: the name of a counter."""

    code = "record_refused"

    def __init__(self, reason: str, message: str | None = None) -> None:
        super().__init__(message or f"membership record refused: {reason}")
        self.reason = reason


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
