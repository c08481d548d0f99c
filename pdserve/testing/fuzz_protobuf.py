"""Messages that nobody would send: made from the descriptors of a type, or of a good message that is altered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pdserve.testing.fuzz_values import damaged, odd_bytes, odd_float, odd_int, odd_text

M = TypeVar("M", bound=Message)

_I32, _I64, _U32, _U64 = (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1), (0, 2**32 - 1), (0, 2**64 - 1)
_FD: Final = FieldDescriptor
_SCALARS: Final[Mapping[int, Callable[[Random], Any]]] = {
    **{kind: lambda rng: odd_int(rng, *_I32) for kind in (_FD.TYPE_INT32, _FD.TYPE_SINT32, _FD.TYPE_SFIXED32)},
    **{kind: lambda rng: odd_int(rng, *_I64) for kind in (_FD.TYPE_INT64, _FD.TYPE_SINT64, _FD.TYPE_SFIXED64)},
    **{kind: lambda rng: odd_int(rng, *_U32) for kind in (_FD.TYPE_UINT32, _FD.TYPE_FIXED32)},
    **{kind: lambda rng: odd_int(rng, *_U64) for kind in (_FD.TYPE_UINT64, _FD.TYPE_FIXED64)},
    # Python takes numbers that a float cannot hold for an error.
    _FD.TYPE_FLOAT: lambda rng: max(-3e38, min(3e38, odd_float(rng))),
    _FD.TYPE_DOUBLE: odd_float,
    _FD.TYPE_BOOL: lambda rng: rng.random() < 0.5,
    _FD.TYPE_STRING: odd_text,
    _FD.TYPE_BYTES: odd_bytes,
    # Open: numbers without a name are kept.
    _FD.TYPE_ENUM: lambda rng: odd_int(rng, *_I32) if rng.random() < 0.3 else rng.randrange(8),
}
_MAX_DEPTH: Final = 5
_MANY: Final = 60


class MessageFuzzer:
    """Draws from one source."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def anything(self, kind: type[M]) -> M:
        """A message of this type with some of its fields."""
        message = kind()
        self._fill(message, _MAX_DEPTH)
        return message

    def altered(self, message: M) -> M:
        """A copy of which one to three fields, at any depth, are others."""
        copy = type(message)()
        copy.CopyFrom(message)
        for _ in range(self._rng.randint(1, 3)):
            self._alter(copy, _MAX_DEPTH)
        return copy

    def likely(self, samples: Sequence[M]) -> M:
        """One of `samples`, mostly altered, or anything of the same type."""
        sample = self._rng.choice(samples)
        match self._rng.randrange(10):
            case 0:
                return self.anything(type(sample))
            case 1:
                return sample
            case _:
                return self.altered(sample)

    def wire(self, message: Message) -> bytes:
        """As it is sent; now and then damaged on its way."""
        data = message.SerializeToString()
        return damaged(data, self._rng) if self._rng.random() < 0.15 else data

    def _fill(self, message: Message, depth: int) -> None:
        descriptor: Any = message.DESCRIPTOR
        chosen = {oneof.name: self._rng.choice(oneof.fields).name for oneof in descriptor.oneofs}
        for field in descriptor.fields:
            oneof = field.containing_oneof
            is_wanted = self._rng.random() < 0.6 if oneof is None else chosen[oneof.name] == field.name
            # A oneof of one member is how a field is optional.
            if is_wanted and (oneof is None or len(oneof.fields) > 1 or self._rng.random() < 0.6):
                self._set(message, field, depth)

    def _alter(self, message: Any, depth: int) -> None:
        fields = message.DESCRIPTOR.fields
        if not fields:
            return
        # What is there says more than what is not.
        present: list[FieldDescriptor] = [found for found, _ in message.ListFields()]
        field: FieldDescriptor = (
            self._rng.choice(present) if present and self._rng.random() < 0.8 else self._rng.choice(fields)
        )
        if self._rng.random() < 0.1:
            message.ClearField(field.name)
        elif field.is_repeated and not _is_map(field) and getattr(message, field.name):
            self._alter_some(getattr(message, field.name), field, depth)
        elif field.type == _FD.TYPE_MESSAGE and not field.is_repeated and depth > 0 and self._rng.random() < 0.85:
            self._alter(getattr(message, field.name), depth - 1)
        else:
            self._set(message, field, depth)

    def _alter_some(self, values: Any, field: FieldDescriptor, depth: int) -> None:
        place = self._rng.randrange(len(values))
        match self._rng.randrange(4):
            case 0:
                del values[place]
            case 1:
                values.extend([values[place]] * self._rng.choice((1, 2, _MANY)))
            case _ if field.type == _FD.TYPE_MESSAGE:
                self._alter(values[place], depth - 1)
            case _:
                values[place] = _SCALARS[field.type](self._rng)

    def _set(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        number = self._rng.choice((0, 1, 1, 2, 3, _MANY)) if field.is_repeated else 1
        if _is_map(field):
            self._set_map(getattr(message, field.name), field, min(number, 3), depth)
        elif field.type == _FD.TYPE_MESSAGE:
            for _ in range(min(number, 3) if depth > 0 else 0):
                inner = getattr(message, field.name)
                inner = inner.add() if field.is_repeated else inner
                inner.SetInParent()
                self._fill(inner, depth - 1)
        elif field.is_repeated:
            getattr(message, field.name).extend(_SCALARS[field.type](self._rng) for _ in range(number))
        else:
            setattr(message, field.name, _SCALARS[field.type](self._rng))

    def _set_map(self, entries: Any, field: FieldDescriptor, number: int, depth: int) -> None:
        assert field.message_type is not None, "a map"
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        for _ in range(number):
            name = _SCALARS[key.type](self._rng)
            if value.type != _FD.TYPE_MESSAGE:
                entries[name] = _SCALARS[value.type](self._rng)
            elif depth > 0:
                self._fill(entries[name], depth - 1)


def _is_map(field: FieldDescriptor) -> bool:
    kind = field.message_type
    return kind is not None and kind.GetOptions().map_entry
