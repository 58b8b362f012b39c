"""Reports across processes: torch's warm cache, TORCH_LOGS, TORCH_TRACE."""
import json
import re

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
        return torch.softmax(q @ k.transpose(-2, -1) * 8 ** -0.5, -1) @ v

fa_inductor.options.backend = "reference"
fa_inductor.enable()
model = Model()
x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(1))
out = torch.compile(model)(x)
out.sum().backward()
report = fa_inductor.report()
print(json.dumps({
    "hits": counters["aot_autograd"]["autograd_cache_hit"], "close": bool(torch.allclose(out, model(x), atol=1e-6)),
    "report": json.loads(report.to_json()), "text": str(report)}))
"""


def last_json(done):
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_a_second_process_with_a_warm_cache_has_the_same_report(python, tmp_path):
    cache = str(tmp_path / "cache")
    cold = last_json(python(MODEL, TORCHINDUCTOR_CACHE_DIR=cache))
    warm = last_json(python(MODEL, TORCHINDUCTOR_CACHE_DIR=cache))
    assert (cold["hits"], warm["hits"]) == (0, 1), "the second process compiled again, which proves nothing"
    assert cold["close"] and warm["close"]
    assert cold["report"]["rewritten"] == cold["report"]["found"] == 1
    (cold_graph,), (warm_graph,) = cold["report"]["graphs"], warm["report"]["graphs"]
    assert (cold_graph.pop("from_cache"), warm_graph.pop("from_cache")) == (False, True)
    assert cold_graph == warm_graph
    assert "from the compile cache" in warm["text"]


def test_a_graph_without_any_rewritten_block_has_its_report_too(python, tmp_path):
    cache = str(tmp_path / "cache")
    refused = MODEL.replace("return torch.softmax(", "return self.weights(").replace(
        "    def forward", """    def weights(self, scores):
        self.kept = torch.softmax(scores, -1)
        return self.kept

    def forward""").replace("self.weights(q @ k.transpose(-2, -1) * 8 ** -0.5, -1)", "self.weights(q @ k.transpose(-2, -1))")
    assert refused.count("self.weights") == 1
    cold, warm = (last_json(python(refused, TORCHINDUCTOR_CACHE_DIR=cache)) for _ in range(2))
    assert (cold["hits"], warm["hits"]) == (0, 1)
    assert (cold["report"]["rewritten"], cold["report"]["found"]) == (0, 1)
    (cold_graph,), (warm_graph,) = cold["report"]["graphs"], warm["report"]["graphs"]
    assert warm_graph["from_cache"] and warm_graph["blocks"] == cold_graph["blocks"]


def test_a_warm_cache_whose_reports_are_gone_still_names_the_block(python, tmp_path):
    cache = tmp_path / "cache"
    cold = last_json(python(MODEL, TORCHINDUCTOR_CACHE_DIR=str(cache)))
    for path in (cache / "fa_inductor").glob("*.json"):
        path.write_bytes(b"damaged")
    warm = last_json(python(MODEL, TORCHINDUCTOR_CACHE_DIR=str(cache)))
    assert warm["hits"] == 1
    block = warm["report"]["graphs"][0]["blocks"][0]
    assert block["outcome"] == "rewritten" and "gone" in block["note"]
    assert block["words"] == cold["report"]["graphs"][0]["blocks"][0]["words"] != ""


def test_torch_logs(python):
    debug = python(MODEL, TORCH_LOGS="+fa_inductor").stderr
    assert re.search(r"graph [0-9a-f]{8}: 1 of 1 attention blocks rewritten", debug)
    assert re.search(r"graph [0-9a-f]{8}: 1 x rewritten\b.*<string>:\d+ forward", debug)
    info = python(MODEL, TORCH_LOGS="fa_inductor").stderr
    assert "1 of 1 attention blocks rewritten" in info and "1 x rewritten" not in info
    assert "attention blocks rewritten" not in python(MODEL).stderr


def test_torch_logs_names_a_submodule(python):
    """torch imports the module while it is still being imported itself."""
    assert "1 of 1 attention blocks" in python(MODEL, TORCH_LOGS="+fa_inductor.hook").stderr


def test_torch_trace_has_the_report_as_an_artifact(python, tmp_path):
    python(MODEL, TORCH_TRACE=str(tmp_path / "trace"))
    lines = "\n".join(p.read_text() for p in (tmp_path / "trace").glob("*.log")).splitlines()
    (at,) = [i for i, line in enumerate(lines) if '"name": "fa_inductor_report"' in line]
    payload = []
    for line in lines[at + 1:]:
        if not line.startswith("\t"):
            break
        payload.append(line)
    assert json.loads("".join(payload))["blocks"][0]["outcome"] == "rewritten"
