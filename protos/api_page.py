"""Writes docs/api.md from the comments of the public protocol. protos/generate.py runs it with the stubs."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

PUBLIC = "tandem/v1/generation.proto"
MESSAGES, ENUMS, SERVICES = 4, 5, 6
"""Numbers of FileDescriptorProto's fields: comments are found by paths of such numbers and indices."""
FIELDS = VALUES = METHODS = 2
ONEOFS = 8
_Path = tuple[int, ...]


def api_page(descriptors: Path) -> str:
    """Markdown; `descriptors` is a file that `protoc --include_source_info --descriptor_set_out` wrote."""
    files = FileDescriptorSet.FromString(descriptors.read_bytes()).file
    (public,) = (file for file in files if file.name == PUBLIC)
    return "\n".join([*Page(public).lines(), ""])


class Page:
    """The page of one file."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        locations = file.source_code_info.location
        self._comments = {tuple(place.path): " ".join(place.leading_comments.split()) for place in locations}

    def lines(self) -> Iterator[str]:
        """Services, then messages and enumerations in the order of the file."""
        yield "# The API"
        yield ""
        yield f"Generated from the comments of [{PUBLIC}](../protos/{PUBLIC}) by protos/generate.py; do not edit."
        yield "How to call it from Python: [client.md](client.md). Any other language: generate stubs from the file."
        for index, service in enumerate(self._file.service):
            yield from self._service((SERVICES, index), service)
        for index, message in enumerate(self._file.message_type):
            yield from self._message((MESSAGES, index), message)
        for index, enum in enumerate(self._file.enum_type):
            yield from self._enum((ENUMS, index), enum)

    def _service(self, path: _Path, service: ServiceDescriptorProto) -> Iterator[str]:
        yield from self._heading(path, f"{self._file.package}.{service.name}")
        rows = []
        for index, method in enumerate(service.method):
            answer = ("stream of " if method.server_streaming else "") + _link(method.output_type)
            rows.append((f"`{method.name}`", _link(method.input_type), answer, self._comments[*path, METHODS, index]))
        yield from _table(("call", "request", "answer", ""), rows)

    def _message(self, path: _Path, message: DescriptorProto) -> Iterator[str]:
        yield from self._heading(path, message.name)
        rows = []
        for index, field in enumerate(message.field):
            text = self._comments[*path, FIELDS, index]
            if field.HasField("oneof_index") and not field.proto3_optional:
                group = self._comments[*path, ONEOFS, field.oneof_index]
                text += f" *One of `{message.oneof_decl[field.oneof_index].name}`: {group}*"
            rows.append((f"`{field.name}`", _type(field, message), str(field.number), text))
        if rows:
            yield from _table(("field", "type", "number", ""), rows)

    def _enum(self, path: _Path, enum: EnumDescriptorProto) -> Iterator[str]:
        yield from self._heading(path, enum.name)
        values = [
            (f"`{value.name}`", str(value.number), self._comments[*path, VALUES, index])
            for index, value in enumerate(enum.value)
        ]
        yield from _table(("value", "number", ""), values)

    def _heading(self, path: _Path, name: str) -> Iterator[str]:
        yield from ("", f"## {name}", "", self._comments[path], "")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield _row(columns)
    yield _row(["---"] * len(columns))
    for row in rows:
        yield _row([cell.replace("|", "\\|") for cell in row])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    """As the .proto file has it."""
    for entry in message.nested_type:
        if entry.options.map_entry and field.type_name.endswith(f".{message.name}.{entry.name}"):
            key, value = (_type(part, entry) for part in entry.field)
            return f"map<{key}, {value}>"
    name = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    kind = _link(field.type_name) if field.type_name else name
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {kind}"
    return f"optional {kind}" if field.proto3_optional else kind


def _link(type_name: str) -> str:
    name = type_name.rpartition(".")[2]
    return f"[{name}](#{name.lower()})"
