"""Mixture-of-experts models on a real GPU: transformers' tokens and logits, graphs equal to eager steps."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

from bench.work import SHAPES
from tandem.tiny import MOE
from tests.gpu.test_gpu_worker import KINDS, make_planner, prompt_of
from tests.worker.model_folder import write_moe_model
from worker_svc.runner.kernel_runner import KernelRunner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_greedy_tokens_of_the_tiny_model_are_transformers() -> None:
    planner = make_planner(MOE)
    prompt = prompt_of(90, vocabulary=1500)
    planner.admit(0, prompt)
    tokens = planner.generate(0, 48, chunk=40)
    model = Qwen3MoeForCausalLM.from_pretrained(MOE, dtype=torch.float32).cuda()
    expected = model.generate(torch.tensor([prompt]).cuda(), max_new_tokens=48, do_sample=False, eos_token_id=None)
    assert tokens == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("rows", [1, 9])
def test_logits_of_two_layers_of_30b_a3b_are_within_the_noise_of_bfloat16(tmp_path: Path, rows: int) -> None:
    """Both compute in bfloat16, so each is compared with float32. Other rows decode beside the one that is compared.

    By position, and the median of them: where rounding makes a router take another expert, a position is far off.
    """
    torch.manual_seed(0)
    shape = {**SHAPES["qwen3-30b-a3b"], "num_hidden_layers": 2, "vocab_size": 5000, "eos_token_id": 0}
    with torch.device("cuda"):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).bfloat16()
        model.model.rotary_emb = Qwen3MoeRotaryEmbedding(model.config)  # its frequencies were rounded, too
    model.save_pretrained(tmp_path)
    prompt = prompt_of(200, vocabulary=5000)
    with torch.inference_mode():
        ids = torch.tensor([prompt]).cuda()
        theirs = model(ids).logits[0, 191:199].float()
        exact = model.float()(ids).logits[0, 191:199]
    del model
    planner = make_planner(tmp_path, dtype="bfloat16")
    assert isinstance(planner.runner, KernelRunner)
    for slot in range(1, rows):
        planner.admit(slot, prompt_of(20, slot, 5000))
        planner.step([(slot, 20)])
    ours = []
    planner.admit(0, prompt[:192])
    for position in range(191, 199):  # one mixed step, then decode steps that are fed what the prompt says
        planner.runner._state.slots.last_tokens[0] = prompt[position]
        plan, _ = planner.plan([(slot, planner.remaining(slot)) for slot in range(rows)])
        planner.runner.step(plan).to_host()
        ours.append(planner.runner._kernels.logits[0, :5000].float().clone())  # they are padded
    distances = [(logits - exact).norm(dim=-1) / exact.norm(dim=-1) for logits in (torch.stack(ours), theirs)]
    error, their_error = (float(distance.median()) for distance in distances)
    print(f"relative error {error:.4f}, of transformers {their_error:.4f}")
    assert error < 1.3 * their_error


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("top_k", [1, 4])
def test_graphs_give_what_eager_steps_give(tmp_path: Path, dtype: str, top_k: int) -> None:
    """Sequences of all kinds, prompts in chunks beside decode rows; then ever fewer rows, down to one."""
    folder = write_moe_model(
        tmp_path, head_dim=64, num_experts=16, num_experts_per_tok=top_k, norm_topk_prob=True, mlp_only_layers=[0]
    )
    outputs = []
    for eager in (False, True):
        planner = make_planner(folder, dtype=dtype, enforce_eager=eager)
        for slot in range(12):
            planner.admit(slot, prompt_of(11 + 7 * slot, slot), KINDS[slot % 3])
            planner.step([(other, min(9, planner.remaining(other))) for other in range(slot + 1)])
        for turn in range(36):
            planner.step([(slot, min(9, planner.remaining(slot))) for slot in range(12 - max(turn - 24, 0))])
        outputs.append([planner.sequences[slot].tokens for slot in range(12)])
    assert outputs[0] == outputs[1]
