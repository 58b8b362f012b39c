"""The masks that transformers puts into real joint graphs, static and dynamic, fold to the atoms they mean."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from functorch.compile import make_boxed_func
from prove_support import Traced, evaluate, materialise, run
from torch import fx
from torch._inductor.compile_fx import compile_fx

from fa_inductor.kernels.record import Atom, Band, Chunk, Documents, KeyPadding
from fa_inductor.prove import AXES, AdditiveProof, Context, Evaluator, prove_additive

transformers = pytest.importorskip("transformers")
aten = torch.ops.aten
MIN = torch.finfo(torch.float32).min
BATCH, LENGTH = 2, 16

TINY: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16,
)
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "mistral": TINY | {"sliding_window": 4},
    "gemma2": TINY | {"sliding_window": 4},
    "gpt_oss": TINY | {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
    "llama4_text": TINY | {
        "num_hidden_layers": 1, "attention_chunk_size": 4, "intermediate_size_mlp": 32, "num_local_experts": 2,
    },
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0},
    "bert": {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    },
    "t5": {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2},
}


def masks_of(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """``(sum, mask)`` of every tensor that is added to attention scores right before their softmax."""
    found = []
    for node in graph.nodes:
        if node.target is not aten.add.Tensor or not isinstance(node.args[1], fx.Node):
            continue
        val, mask = node.meta["val"], node.args[1].meta.get("val")
        ends = ("amax", "_softmax", "cat")
        feeds_softmax = any(str(u.target).removeprefix("aten.").startswith(ends) for u in node.users)
        if val.ndim == 4 and isinstance(mask, torch.Tensor) and mask.ndim == 4 and feeds_softmax:
            if val.shape[-1] == val.shape[-2] and mask.shape[-1] == val.shape[-1]:
                found.append((node, node.args[1]))
    return found


def proofs_of(
    fn: Callable[..., Any], args: tuple[Any, ...], dynamic: bool
) -> list[tuple[AdditiveProof, tuple[Atom, ...]]]:
    """Compiles fn, proves each mask in the joint graph, and compares the atoms with the mask that ran."""
    graphs: list[tuple[fx.Graph, list[tuple[fx.Node, fx.Node]]]] = []
    inputs: list[list[Any]] = []

    def keep_copy(graph: fx.Graph) -> None:
        copy, mapping = fx.Graph(), {}
        copy.output(copy.graph_copy(graph, mapping))
        graphs.append((copy, [(mapping[m], mapping[s]) for s, m in masks_of(graph)]))

    def inner(gm: fx.GraphModule, example: Any, **_: Any) -> Any:
        def call(*xs: Any) -> Any:
            inputs.append(list(xs))
            return gm.forward(*xs)

        return make_boxed_func(call)

    def backend(gm: fx.GraphModule, example: Any) -> Any:
        return compile_fx(gm, example, inner_compile=inner)

    torch._dynamo.reset()
    with torch.no_grad(), inductor_config.patch(joint_custom_pre_pass=keep_copy):
        torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
    assert len(graphs) == 1 and len(inputs) == 1, "the model broke into several graphs"
    graph, masks = graphs[0]
    results = []
    for mask, total in masks:
        ev = Evaluator(Context(*total.meta["val"].shape))
        index = [0 if isinstance(n, int) and n == 1 else a for n, a in zip(mask.meta["val"].shape, AXES, strict=True)]
        proof = prove_additive(ev, mask, index)
        (eager,) = run(Traced(graph, mask, tuple(inputs[0]), ev, (0, 0, 0, 0)), [mask])
        sizes = (BATCH, eager.shape[1], LENGTH, LENGTH)
        traced = Traced(graph, mask, tuple(inputs[0]), ev, sizes)
        atoms, captures, ints = materialise(traced, proof)
        keep = evaluate(atoms, captures, ints, sizes)
        if proof.residual is None:
            assert torch.equal(keep, (eager == 0).expand(sizes))
        if proof.nonempty:
            assert keep.any(-1).all()
        results.append((proof, atoms))
    return results


def model_proofs(
    name: str, attention_mask: torch.Tensor | None, dynamic: bool, **kwargs: Any
) -> list[tuple[AdditiveProof, tuple[Atom, ...]]]:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **CONFIGS[name])
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(0, 64, (BATCH, LENGTH))
    extra: dict[str, Any] = {} if name == "bert" else {"use_cache": False}  # T5's own cache breaks the graph in torch 2.11
    if name == "t5":
        extra["decoder_input_ids"] = ids
    return proofs_of(lambda i, m: model(i, attention_mask=m, **extra, **kwargs)[0], (ids, attention_mask), dynamic)


LEFT_PADDED = torch.ones(BATCH, LENGTH, dtype=torch.int64)
LEFT_PADDED[1, :5] = 0
CAUSAL: tuple[Atom, ...] = (Band(None, 0),)
WINDOW: tuple[Atom, ...] = (Band(-3, 0),)
PAD: tuple[Atom, ...] = (KeyPadding(0),)

WITHOUT_MASK = {
    "llama": [CAUSAL, CAUSAL], "mistral": [WINDOW, WINDOW], "gemma2": [WINDOW, CAUSAL], "gpt_oss": [WINDOW, CAUSAL],
    "llama4_text": [(Band(None, 0), Chunk(4))], "gpt2": [CAUSAL],
}
WITH_MASK = {
    "llama": [CAUSAL + PAD] * 2, "mistral": [WINDOW + PAD] * 2, "gemma2": [WINDOW + PAD, CAUSAL + PAD],
    "llama4_text": [(*CAUSAL, *PAD, Documents(1, 2))], "gpt2": [CAUSAL + PAD], "bert": [PAD, PAD],
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", WITHOUT_MASK)
def test_without_attention_mask(name: str, dynamic: bool) -> None:
    results = model_proofs(name, None, dynamic)
    assert [atoms for _, atoms in results] == WITHOUT_MASK[name]
    for proof, _ in results:
        assert proof.fills == (MIN,) and proof.residual is None and proof.nonempty


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", WITH_MASK)
def test_with_attention_mask(name: str, dynamic: bool) -> None:
    """Left padding: rows of padded queries are empty, and nothing proves that they do not exist."""
    results = model_proofs(name, LEFT_PADDED, dynamic)
    assert [atoms for _, atoms in results] == WITH_MASK[name]
    for proof, _ in results:
        assert proof.fills == (MIN,) and proof.residual is None and not proof.nonempty


def test_t5_bias_and_decoder_mask() -> None:
    """The encoder's bucketed relative positions are a bias; the decoder's own mask is causal."""
    results = model_proofs("t5", None, False)
    assert any(atoms == CAUSAL for _, atoms in results) or any(p.residual is not None for p, _ in results)
    for proof, atoms in results:
        assert atoms in ((), CAUSAL)
        assert proof.nonempty


def test_packed_position_ids_become_documents() -> None:
    positions = torch.tensor([list(range(9)) + list(range(7)), list(range(16))])
    results = model_proofs("llama", None, False, position_ids=positions)
    for proof, atoms in results:
        assert any(isinstance(a, Documents) for a in atoms)
        assert proof.residual is None


def test_sliced_mask_of_older_transformers() -> None:
    """``attention_mask[:, :, :, : key.shape[-2]]`` of an expanded causal mask, then added."""
    def attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        n = q.shape[2]
        mask = torch.full((n, n), MIN).triu(1)[None, None].expand(q.shape[0], 1, n, n)
        scores = q @ k.transpose(2, 3) * 0.25 + mask[:, :, :, : k.shape[-2]]
        return torch.softmax(scores, -1)

    q = torch.randn(BATCH, 2, LENGTH, 8)
    for dynamic in (False, True):
        ((proof, atoms),) = proofs_of(attend, (q, q.clone()), dynamic)
        assert atoms == CAUSAL and proof.fills == (MIN,) and proof.nonempty
