"""Reports across processes: torch's warm cache, TORCH_LOGS, TORCH_TRACE."""
import itertools
import json
import re

import pytest

MODEL = """
import json, sys, torch, fa_inductor
from torch._dynamo.utils import counters

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = (t.view(2, -1, 4, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = torch.softmax(q @ k.transpose(-2, -1) * 8 ** -0.5, -1)
        return weights @ v, weights if "weights" in sys.argv else None

fa_inductor.options.backend = "reference"
fa_inductor.enable()
model = Model()
x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(1))
out, _ = torch.compile(model)(x)
out.sum().backward()
report = fa_inductor.report()
print(json.dumps({
    "hits": counters["aot_autograd"]["autograd_cache_hit"], "close": bool(torch.allclose(out, model(x)[0], atol=1e-6)),
    "report": json.loads(report.to_json()), "text": str(report)}))
"""
"""With ``weights`` as an argument, the model returns its attention weights, which is a reason to leave it alone."""


def last_json(done):
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture
def run(python, tmp_path):
    """Run the model above, as a file of its own, in a fresh process."""
    (tmp_path / "encoder.py").write_text(MODEL)
    return lambda *arguments, **environment: python("import encoder", *arguments, **environment)


def test_a_second_process_with_a_warm_cache_has_the_same_report(run, tmp_path):
    cache = tmp_path / "cache"
    cold, warm = (last_json(run(TORCHINDUCTOR_CACHE_DIR=str(cache))) for _ in range(2))
    assert (cold["hits"], warm["hits"]) == (0, 1), "the second process compiled again, which proves nothing"
    assert cold["close"] and warm["close"]
    assert cold["report"]["rewritten"] == cold["report"]["found"] == 1
    (cold_graph,), (warm_graph,) = cold["report"]["graphs"], warm["report"]["graphs"]
    assert (cold_graph.pop("from_cache"), warm_graph.pop("from_cache")) == (False, True)
    assert cold_graph == warm_graph
    assert "from the compile cache" in warm["text"]

    for path in (cache / "fa_inductor").glob("*.json"):
        path.write_bytes(b"damaged")
    lost = last_json(run(TORCHINDUCTOR_CACHE_DIR=str(cache)))
    assert lost["hits"] == 1
    block = lost["report"]["graphs"][0]["blocks"][0]
    assert block["outcome"] == "rewritten" and "gone" in block["note"]
    assert block["words"] == cold_graph["blocks"][0]["words"] != ""


def test_a_graph_without_any_rewritten_block_has_its_report_too(run, tmp_path):
    cold, warm = (last_json(run("weights", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))) for _ in range(2))
    assert (cold["hits"], warm["hits"]) == (0, 1)
    assert (cold["report"]["rewritten"], cold["report"]["found"]) == (0, 1)
    (cold_graph,), (warm_graph,) = cold["report"]["graphs"], warm["report"]["graphs"]
    assert warm_graph["from_cache"] and warm_graph["blocks"] == cold_graph["blocks"]


def test_torch_logs_and_torch_trace(run, tmp_path):
    log = run(TORCH_LOGS="+fa_inductor", TORCH_TRACE=str(tmp_path / "trace"), TORCHINDUCTOR_FORCE_DISABLE_CACHES="1").stderr
    assert re.search(r"graph [0-9a-f]{8}: 1 of 1 attention blocks rewritten", log)
    assert re.search(r"graph [0-9a-f]{8}: 1 x rewritten .*encoder\.py:13 forward", log), log

    lines = "\n".join(p.read_text() for p in (tmp_path / "trace").glob("*.log")).splitlines()
    (at,) = [i for i, line in enumerate(lines) if '"name": "fa_inductor_report"' in line]
    payload = itertools.takewhile(lambda line: line.startswith("\t"), lines[at + 1:])
    assert json.loads("".join(payload))["blocks"][0]["outcome"] == "rewritten"


def test_torch_logs_at_info_level_and_by_submodule(run):
    """torch imports the module that the variable names while torch itself is still being imported."""
    log = run(TORCH_LOGS="fa_inductor.hook", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1").stderr
    assert "1 of 1 attention blocks rewritten" in log and "1 x rewritten" not in log
