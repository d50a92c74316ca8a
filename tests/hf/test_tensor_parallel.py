"""transformers' own tensor parallelism, with the plan in the configuration, computes what one process computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_exo.sizes import ModelSizes
from tests.hf.models import GROUPED, SIZES, hf_model, tokens

CASES: dict[str, ModelSizes] = {
    "base": SIZES,
    "e-exoformer-postnorm-vg": GROUPED,
    "h-exoformer": GROUPED,
    "dynamic-s-exoformer": SIZES,
    "dynamic-e-nuresformer": SIZES,
    "gated-qk-bias": GROUPED,
    "gated-embedding-residual": SIZES,
    "internal-qg": GROUPED,
}
SETTINGS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
PROGRAM = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
import megatron_exo.hf

dist.init_process_group("gloo")
root = Path(sys.argv[1])
ids, settings = torch.load(root / "inputs.pt")
results = {}
for folder in sorted(path for path in root.iterdir() if path.is_dir()):
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
    with torch.no_grad():
        logits = model(ids).logits
    text = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    shapes = {name: tuple(p.to_local().shape) for name, p in model.named_parameters() if hasattr(p, "to_local")}
    results[folder.name] = (logits, text, shapes)
torch.save(results, root / f"rank{dist.get_rank()}.pt")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_give_the_logits_and_the_text_of_one(tmp_path: Path) -> None:
    ids = tokens(2, 7)
    torch.save((ids, SETTINGS), tmp_path / "inputs.pt")
    (tmp_path / "program.py").write_text(PROGRAM)
    models = {name: hf_model(name, sizes) for name, sizes in CASES.items()}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*launch, str(tmp_path / "program.py"), str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        results = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        for name, model in models.items():
            logits, text, shapes = results[name]
            with torch.no_grad():
                torch.testing.assert_close(logits, model(ids).logits, rtol=1e-4, atol=2e-5)
            assert torch.equal(text, model.generate(ids, attention_mask=torch.ones_like(ids), **SETTINGS)), name
            config = model.config
            rows = config.num_key_value_heads * config.head_dim // 2
            assert shapes["model.layers.1.self_attn.k_proj.weight"] == (rows, config.hidden_size)
            cut_lambdas = {key for key in shapes if "lambda_" in key}
            assert bool(cut_lambdas) == (bool(config.pathways) and config.granularity != "scalar"), name
