"""Sound messages of each kind: what they are changed into comes further than what is made from nothing."""

import numpy as np
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from shared.logit_rules import LogitRules
from shared.pb import core_pb2, peer_pb2, worker_pb2
from shared.pb import generation_pb2 as pb
from shared.types import Admission, IntArray, RowSampling, StepPlan, TokenMask
from shared.wire import pack, plan_to_pb


def ints(*values: int) -> IntArray:
    """int32"""
    return np.array(values, dtype=np.int32)


# A frontend's, for a vocabulary of 8 tokens. Handles of a link count from 1.

_SAMPLING = core_pb2.SequenceSampling(temperature=0.7, top_k=3, top_p=0.9, seed=1, logprobs=1, prompt_logprobs=1)
_SUBMITS = [
    core_pb2.Submit(
        handle=handle, request_id=str(handle), prompt=pack(ints(1, 2, 3)), max_tokens=4, stop_token_ids=stop
    )
    for handle, stop in ((1, b""), (2, pack(ints(0))))
]
_SUBMITS[1].sampling.CopyFrom(_SAMPLING)
_CONSTRAINED = core_pb2.Submit(handle=3, request_id="3", prompt=pack(ints(1, 2)), max_tokens=4, constrained=True)
FRONTEND_MESSAGES = (
    *(core_pb2.FrontendMessage(submit=submit) for submit in (*_SUBMITS, _CONSTRAINED)),
    core_pb2.FrontendMessage(mask_ready=core_pb2.MaskReady(handle=3, allowed=b"\x3f")),
    core_pb2.FrontendMessage(cancel=core_pb2.Cancel(handle=1)),
    core_pb2.FrontendMessage(abort_by_id=core_pb2.AbortById(question=1, request_id="2")),
    core_pb2.FrontendMessage(watch_cache=core_pb2.WatchCache(watch=True)),
    core_pb2.FrontendMessage(waiting=core_pb2.Waiting(requests=2)),
)

# The core's, to a frontend whose second sample has logprobs of 2 tokens for each of its own and of its prompt.

_ENTRY = bytes(24)
CORE_MESSAGES = (
    core_pb2.CoreMessage(
        tokens=core_pb2.TokenBatch(
            started=[core_pb2.Started(handle=1), core_pb2.Started(handle=2)],
            handles=pack(ints(1, 2)),
            token_ids=pack(ints(300, 301)),
            logprob_sizes=pack(ints(0, len(_ENTRY))),
            logprobs=_ENTRY,
            prompt_logprobs=[core_pb2.PromptLogprobs(handle=2, entries=2 * _ENTRY)],
            requeued=[core_pb2.Requeued(handle=1, cause=core_pb2.REQUEUE_CAUSE_PREEMPTED)],
        )
    ),
    core_pb2.CoreMessage(tokens=core_pb2.TokenBatch(ended=[core_pb2.Ended(handle=1, stop_token_id=5)])),
    core_pb2.CoreMessage(
        tokens=core_pb2.TokenBatch(ended=[core_pb2.Ended(handle=2, failure=core_pb2.Failure(code=8))])
    ),
    core_pb2.CoreMessage(cache_news=core_pb2.CacheNews(changes=[core_pb2.CacheChange(block=1, token_ids=bytes(8))])),
)

# A scheduler's to a worker with 8 blocks of 16 tokens. Slot 0 decodes already; step 3 is next.

_RULES = LogitRules(bad_words=((5, 6), (7,)), bias=((8, 1.0),), repetition_penalty=1.2)
_PROMPT = ints(*range(1, 6))


def _admission(slot: int, sampling: RowSampling) -> Admission:
    return Admission(slot, 5, 0, 5, ints(), sampling, prompt_logprobs_from=1)


FIRST_PLAN = StepPlan(
    1,
    1,
    admitted=(_admission(0, RowSampling(temperature=0.0)),),
    grown=ints(0, 0).reshape(1, 2),
    rows=ints(0, 5, 5).reshape(1, 3),
    token_ids=_PROMPT,
)
DECODE_PLAN = StepPlan(1, 2, rows=ints(0, 1, 0).reshape(1, 3))
_MIXED_PLAN = StepPlan(
    1,
    3,
    admitted=(_admission(1, RowSampling(seed=3, rules=_RULES, logprobs=2, prompt_logprobs=2, min_tokens=1)),),
    grown=ints(1, 1).reshape(1, 2),
    rows=ints(0, 1, 0, 1, 5, 5).reshape(2, 3),
    token_ids=_PROMPT,
    masks=(TokenMask(0, b"\xff" * 256),),
    zeroed=ints(1),
)
_LATER_PLAN = StepPlan(1, 3, rows=ints(0, 1, 0).reshape(1, 3))
PLANS = tuple(plan_to_pb(plan, 1) for plan in (_MIXED_PLAN, _LATER_PLAN))

DESCRIPTION = worker_pb2.DescribeResponse(
    fingerprint="f",
    block_size=16,
    num_blocks=8,
    max_model_length=64,
    vocabulary_size=300,
    eos_token_ids=[1],
    tensor_parallel_size=1,
    max_num_seqs=4,
    max_num_batched_tokens=64,
)

PEER = peer_pb2.PeerState(scheduler=9, leading=True, serving=True, candidate=True, term=3)

# Clients'.

_FULL = pb.SamplingParams(
    temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3, presence_penalty=0.5, logit_bias={3: 1.0}, bad_words=["a"]
)
REQUESTS = (
    pb.GenerateRequest(text="a b", sampling=_FULL, stopping=pb.StoppingParams(max_tokens=3, min_tokens=1, stop=["c"])),
    pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1, 2, 3]), n=2, output=pb.OutputParams(logprobs=2, prompt_logprobs=1)
    ),
    pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]), output_token_ids=pb.TokenIds(ids=[3])),
    pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="a")], tools_json=['{"name": "f"}']),
        constraint=pb.Constraint(tool_choice=pb.ToolChoice(function="f")),
    ),
    pb.GenerateRequest(
        text="a", constraint=pb.Constraint(structural_tag='{"structures": [], "triggers": ["a"]}'), priority=1
    ),
)
GATEWAY_REQUESTS = (
    vllm.GenerateRequest(
        request_id="a",
        tokenized=vllm.TokenizedInput(input_ids=[1, 2, 3]),
        sampling_params=vllm.SamplingParams(temperature=0.5, top_p=0.9, max_tokens=3, n=2, logprobs=1),
    ),
    vllm.GenerateRequest(text="a", sampling_params=vllm.SamplingParams(top_p=1.0, regex="a", logit_bias={3: 1.0})),
)

# A server's.

_USAGE = pb.Usage(prompt_tokens=1, completion_tokens=1)
RESPONSES = tuple(
    pb.GenerateResponse(
        index=index,
        text="a",
        token_ids=[5],
        finish=pb.Finish(reason=pb.FINISH_REASON_STOP, token_id=5) if last else None,
        usage=_USAGE if last else None,
    )
    for index in (0, 1)
    for last in (False, True)
)
