"""A process of streaming clients for benchmarks: `python -m bench.streaming_client STREAMS OUTPUT ENDPOINT ...`.

Opens the streams over one connection to each endpoint, reads them to their ends and writes what it saw to OUTPUT:
`gaps` (seconds between two messages of a stream, all streams) and `tokens` (all tokens received).
"""

import asyncio
import sys
import time
from itertools import cycle, islice

import numpy as np
import uvloop

from shared.pb import generation_pb2 as pb
from shared.pb import generation_pb2_grpc
from shared.rpc import make_channel


async def main(streams: int, output: str, endpoints: list[str]) -> None:
    """Returns when every stream has ended."""
    channels = [make_channel(endpoint) for endpoint in endpoints]
    stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in channels]
    gaps: list[float] = []
    tokens = await asyncio.gather(*(_read(stub, gaps) for stub in islice(cycle(stubs), streams)))
    np.savez(output, gaps=np.array(gaps), tokens=np.array(sum(tokens)))
    for channel in channels:
        await channel.close()


async def _read(stub: "generation_pb2_grpc.GenerationServiceAsyncStub", gaps: list[float]) -> int:
    tokens, previous = 0, None
    async for response in stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]))):
        now = time.perf_counter()
        if previous is not None:
            gaps.append(now - previous)
        previous = now
        tokens += len(response.token_ids)
    return tokens


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
