"""Hypothesis strategies for what may come in at an edge: any message of a protobuf type, whole or damaged."""

from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

_BITS = {
    FieldDescriptor.TYPE_INT32: 32,
    FieldDescriptor.TYPE_SINT32: 32,
    FieldDescriptor.TYPE_SFIXED32: 32,
    FieldDescriptor.TYPE_ENUM: 32,
    FieldDescriptor.TYPE_INT64: 64,
    FieldDescriptor.TYPE_SINT64: 64,
    FieldDescriptor.TYPE_SFIXED64: 64,
}
_UNSIGNED_BITS = {
    FieldDescriptor.TYPE_UINT32: 32,
    FieldDescriptor.TYPE_FIXED32: 32,
    FieldDescriptor.TYPE_UINT64: 64,
    FieldDescriptor.TYPE_FIXED64: 64,
}
_TEXTS = ("", "a", "<think>", '{"a": 1}', "[]", "[" * 2000, "\0\ud7ff\U0010ffff", "x" * 300)
_FEW = 4


def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    """Mostly what is likely to mean something."""
    return st.integers(max(low, -1), 8) | st.sampled_from((low, high)) | st.integers(low, high)


_PACKED = st.lists(_integers(-(1 << 31), (1 << 31) - 1), max_size=_FEW).map(
    lambda values: b"".join(value.to_bytes(4, "little", signed=True) for value in values)
)
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    **{kind: _integers(-(1 << bits - 1), (1 << bits - 1) - 1) for kind, bits in _BITS.items()},
    **{kind: _integers(0, (1 << bits) - 1) for kind, bits in _UNSIGNED_BITS.items()},
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_FLOAT: st.floats(width=32) | st.floats(0, 1, width=32),
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_STRING: st.sampled_from(_TEXTS) | st.text(max_size=8),
    FieldDescriptor.TYPE_BYTES: _PACKED | st.binary(max_size=9),
}


def messages(kind: type[Message], *bases: Message) -> st.SearchStrategy[bytes]:
    """Serialized messages of this type with anything in their fields: made from nothing, or of one of `bases`."""
    return st.builds(_serialized, st.sampled_from((kind(), *bases)), _message(kind.DESCRIPTOR, 0))


def damaged(whole: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Such bytes cut off, with some of them replaced, or any bytes at all."""
    changes = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=_FEW)
    return st.binary(max_size=40) | st.builds(_damage, whole, changes, st.none() | st.integers(0, 1 << 10))


Fill = Callable[[Message], None]


def _serialized(base: Message, fill: Fill) -> bytes:
    message = type(base)()
    message.CopyFrom(base)
    fill(message)
    return message.SerializeToString()


def _damage(data: bytes, changes: list[tuple[int, int]], end: int | None) -> bytes:
    changed = bytearray(data[:end])
    for at, value in changes if changed else ():
        changed[at % len(changed)] = value
    return bytes(changed)


def _message(descriptor: Descriptor, depth: int) -> st.SearchStrategy[Fill]:
    fields = [field for field in descriptor.fields if depth < _FEW or field.message_type is None]
    if not fields:
        return st.just(lambda message: None)
    one = st.sampled_from(fields).flatmap(lambda field: _field(field, depth))
    return st.lists(one, max_size=8).map(lambda fills: lambda message: [fill(message) for fill in fills] and None)


def _field(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Fill]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        if any(part.message_type is not None for part in field.message_type.fields):
            return st.just(lambda message: None)  # only where others define them
        key, value = (_SCALARS[part.type] for part in field.message_type.fields)
        return st.tuples(key, value).map(lambda pair: lambda message: getattr(message, field.name).__setitem__(*pair))
    if field.message_type is not None:
        inner = _message(field.message_type, depth + 1)
        if field.is_repeated:
            return st.lists(inner, max_size=3).map(lambda fills: lambda message: _fill_all(message, field.name, fills))
        return inner.map(lambda fill: lambda message: _fill(getattr(message, field.name), fill))
    values = _SCALARS[field.type]
    if field.is_repeated:
        return st.lists(values, max_size=_FEW).map(
            lambda items: lambda message: getattr(message, field.name).extend(items)
        )
    return values.map(lambda value: lambda message: setattr(message, field.name, value))


def _fill(message: Message, fill: Fill) -> None:
    message.SetInParent()
    fill(message)


def _fill_all(message: Message, name: str, fills: list[Fill]) -> None:
    """Changes those that are there, then adds further ones."""
    items = getattr(message, name)
    for index, fill in enumerate(fills):
        fill(items[index] if index < len(items) else items.add())
