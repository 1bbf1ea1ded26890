"""From VllmEngine's Generate requests to Tandem's. What can't be honoured is refused by name, never passed over."""

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from scheduler_svc.frontend.bounds import within
from shared.errors import InvalidRequest
from shared.logprobs import MOST_LOGPROBS
from shared.pb import generation_pb2 as pb

_REQUEST_FIELDS = frozenset({"request_id", "tokenized", "text", "sampling_params", "stream"})
_SAMPLING_FIELDS = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "seed", "n", "logit_bias", "logprobs", "prompt_logprobs"}
    | {"frequency_penalty", "presence_penalty", "repetition_penalty"}
    | {"max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"}
    | {"skip_special_tokens", "include_stop_str_in_output"}
    | {"json_schema", "json_object", "regex", "grammar", "structural_tag", "choice"}
    | {"spaces_between_special_tokens"}  # the caller makes text of the ids that it gets
    | {"grammar_from_first_token"}
)
_MASK = (1 << 64) - 1


def to_generate_request(request: vllm.GenerateRequest) -> pb.GenerateRequest:
    """Raises InvalidRequest for a field that this server does not know; values are checked with Tandem's own."""
    _check_fields(request, _REQUEST_FIELDS)
    _check_fields(request.sampling_params, _SAMPLING_FIELDS)
    converted = pb.GenerateRequest(request_id=request.request_id, n=request.sampling_params.n)
    match request.WhichOneof("input"):
        case "tokenized":
            converted.token_ids.ids.extend(request.tokenized.input_ids)
        case "text":
            converted.text = request.text
    converted.sampling.CopyFrom(_sampling(request.sampling_params))
    converted.stopping.CopyFrom(_stopping(request.sampling_params))
    converted.output.CopyFrom(_output(request.sampling_params))
    if (constraint := _constraint(request.sampling_params)) is not None:
        converted.constraint.CopyFrom(constraint)
    return converted


def _check_fields(message: vllm.GenerateRequest | vllm.SamplingParams, known: frozenset[str]) -> None:
    for field, _ in message.ListFields():
        if field.name not in known:
            raise InvalidRequest(field.name, "is not supported by this server")


def _sampling(params: vllm.SamplingParams) -> pb.SamplingParams:
    """The gateway has applied the model's defaults, which GetModelInfo told it: what is unset now is neutral."""
    sampling = pb.SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_k=params.top_k,
        top_p=params.top_p or 1.0,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
        logit_bias=params.logit_bias,
    )
    if params.HasField("seed"):
        sampling.seed = params.seed & _MASK
    return sampling


def _stopping(params: vllm.SamplingParams) -> pb.StoppingParams:
    stopping = pb.StoppingParams(
        min_tokens=params.min_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
    )
    if params.HasField("max_tokens"):
        stopping.max_tokens = params.max_tokens
    return stopping


def _constraint(params: vllm.SamplingParams) -> pb.Constraint | None:
    kind = params.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == "choice":
        constraint = pb.Constraint(choice=pb.Choice(choices=params.choice.choices))
    else:
        constraint = pb.Constraint(**{kind: getattr(params, kind)})
    constraint.enable_in_reasoning = params.grammar_from_first_token
    return constraint


def _output(params: vllm.SamplingParams) -> pb.OutputParams:
    output = pb.OutputParams(
        skip_special_tokens=params.skip_special_tokens,
        include_stop_str_in_output=params.include_stop_str_in_output,
    )
    for name in ("logprobs", "prompt_logprobs"):
        if params.HasField(name):
            within(name, getattr(params, name), 0, MOST_LOGPROBS)  # -1 asks for all
            setattr(output, name, getattr(params, name))
    return output
