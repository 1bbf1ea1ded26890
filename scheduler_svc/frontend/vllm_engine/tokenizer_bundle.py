"""The files that a gateway needs to make token ids of chats, as one zip archive."""

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from smg_grpc_proto.generated import common_pb2 as common

CHUNK_BYTES = 1 << 20
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
)


def bundle(folder: Path) -> bytes:
    """The archive of a model folder. Takes the time of compressing some megabytes."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as files:
        for name in _FILES:
            if (folder / name).is_file():
                files.write(folder / name, name)
    return archive.getvalue()


def chunks(archive: bytes) -> Iterator[common.GetTokenizerChunk]:
    """The archive in pieces; the last one has its SHA-256."""
    for start in range(0, len(archive), CHUNK_BYTES):
        chunk = common.GetTokenizerChunk(data=archive[start : start + CHUNK_BYTES])
        if start + CHUNK_BYTES >= len(archive):
            chunk.sha256 = hashlib.sha256(archive).hexdigest()
        yield chunk
