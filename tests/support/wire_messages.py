"""Messages for tests of the wire and the links."""

from typing import Any

import msgspec

from potluck.core.grammar import Grammar
from potluck.core.sampling_params import SamplingParams
from potluck.wire.messages import Close, Describe, Message, Open, Sampler, Stage, Step, Wiring
from potluck.wire.spent import add_spent


def session_id(number: int) -> bytes:
    """16 bytes; different numbers below 2**32 give different streams."""
    return number.to_bytes(4, "little") + b"session-body"


def step(session: int = 1, position: int = 0) -> Step:
    return Step(
        session=session_id(session),
        epoch=3,
        position=position,
        count=1,
        layer=15,
        codec="fp32",
        chooses=True,
        spent=add_spent(b"", 7, 1),
    )


def close(session: int = 1) -> Close:
    return Close(session=session_id(session))


def describe(nonce: int = 1) -> Describe:
    return Describe(nonce=nonce)


def opening(session: int = 1, history: int = 4) -> Open:
    """An Open whose sampler knows `history` tokens."""
    sampler = Sampler(
        params=SamplingParams(temperature=0.5, seed=7, logit_bias={3: 1.5}),
        choice=0,
        prompt_length=history,
        history=tuple(100_000 + number % 1000 for number in range(history)),
        eos=(2,),
        limit=history + 100,
        grammar=Grammar("regex", "[a-z]+"),
        prompt_logprobs=3,
    )
    return Open(
        session=session_id(session),
        epoch=0,
        model="model",
        weights_sha256="0" * 64,
        arithmetic=1,
        stage=Stage(start=0, stop=15, has_embedding=True),
        positions=history + 100,
        wiring=Wiring(previous=None, next=None, ring=None, ring_from=None, forward_from=0, stages=1),
        sampler=sampler,
    )


def one_of_every_message() -> list[Message]:
    """The plainest message of each type that there is."""
    kinds = msgspec.inspect.type_info(Message)
    assert isinstance(kinds, msgspec.inspect.UnionType)
    return [_plainest(kind) for kind in kinds.types]


def _plainest(kind: msgspec.inspect.Type) -> Any:
    match kind:
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            return cls(**{field.name: _plainest(field.type) for field in fields if field.required})
        case msgspec.inspect.UnionType(types=types):
            return None if any(isinstance(each, msgspec.inspect.NoneType) for each in types) else _plainest(types[0])
        case msgspec.inspect.LiteralType(values=values):
            return values[0]
        case msgspec.inspect.BytesType(min_length=length):
            return bytes(length or 0)
        case msgspec.inspect.StrType():
            return "x"
        case msgspec.inspect.IntType(ge=least):
            return least or 0
        case msgspec.inspect.FloatType():
            return 0.0
        case msgspec.inspect.BoolType():
            return False
        case msgspec.inspect.VarTupleType() | msgspec.inspect.TupleType():
            return ()
    raise AssertionError(f"no example of {kind}")


def session_of(message: Message) -> bytes:
    session = getattr(message, "session", b"")
    assert isinstance(session, bytes)
    return session
