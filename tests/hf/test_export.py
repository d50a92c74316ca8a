"""A folder with the code in it loads where ``megatron_exo`` is not, and says the same."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_exo.hf import ExoFormerForCausalLM
from megatron_exo.hf.export import AUTO_MAP, CODE_FILES, write_code_and_config
from tests.hf.models import SIZES, SOME, TIED, hf_model, tokens
from tests.plain_reference import PlainSizes

STRANGER = """
import json, sys
sys.modules["megatron_exo"] = None
sys.modules["megatron"] = None
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
for line in sys.stdin:
    folder, prompt = json.loads(line)
    prompt = torch.tensor(prompt)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    base = AutoModel.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    settings = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, pad_token_id=0)
    text = model.generate(prompt, **settings).tolist()
    model.save_pretrained(folder + "-again")
    again = AutoModelForCausalLM.from_pretrained(folder + "-again", trust_remote_code=True)
    assert again.generate(prompt, **settings).tolist() == text
    print(json.dumps({"config": type(config).__name__, "base": type(base).__name__, "model": type(model).__name__,
                      "module": type(model).__module__, "text": text}))
"""
"""Reads lines of a folder and a prompt, and answers each with a line."""


def export(model: ExoFormerForCausalLM, folder: Path) -> None:
    """As a converter does: the code and the configuration from here, the weights by its own hand."""
    folder.mkdir()
    write_code_and_config(model.config, folder)
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def run(program: str, *, cwd: Path, text: str = "") -> subprocess.CompletedProcess[str]:
    """Python in another folder, without this repository on its path, offline; ``text`` is its standard input."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd / "home"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=cwd,
        env=environment,
        input=text,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    "models",
    [
        {"dynamic-e-exoformer": SIZES},
        pytest.param({"internal-qg": TIED} | dict.fromkeys(SOME, SIZES), marks=pytest.mark.slow),
    ],
    ids=["dynamic-e-exoformer", "others"],
)
def test_a_moved_folder_says_the_same_to_a_stranger(models: dict[str, PlainSizes], tmp_path: Path) -> None:
    prompt, ours, lines = tokens(2, 5), [], []
    (tmp_path / "elsewhere").mkdir()
    for name, sizes in models.items():
        ours.append(hf_model(name, sizes))
        export(ours[-1], tmp_path / name)
        shutil.move(tmp_path / name, tmp_path / "elsewhere" / name)
        lines.append(json.dumps([str(tmp_path / "elsewhere" / name), prompt.tolist()]))
    result = run(STRANGER, cwd=tmp_path, text="\n".join(lines))
    assert result.returncode == 0, result.stderr
    answers = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    for model, said in zip(ours, answers, strict=True):
        assert (said["config"], said["base"], said["model"]) == (
            "ExoFormerConfig",
            "ExoFormerModel",
            "ExoFormerForCausalLM",
        )
        assert said["module"].startswith("transformers_modules.")
        settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        assert said["text"] == model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings).tolist()


def test_a_saved_model_has_its_code_beside_it(tmp_path: Path) -> None:
    """Also one that was loaded from an exported folder, trained on and saved."""
    export(hf_model("e-exoformer"), tmp_path / "exported")
    model = ExoFormerForCausalLM.from_pretrained(tmp_path / "exported")
    model.save_pretrained(tmp_path / "again")
    for folder in ("exported", "again"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["auto_map"] == AUTO_MAP
        assert config["architectures"] == ["ExoFormerForCausalLM"]
        assert config["model_type"] == "exoformer"
        for file in CODE_FILES:
            assert (tmp_path / folder / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("file", CODE_FILES, ids=lambda file: file.name)
def test_the_code_imports_only_torch_and_transformers(file: Path) -> None:
    allowed = {"torch", "transformers"} | sys.stdlib_module_names
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        if isinstance(node, ast.ImportFrom):
            is_ours = node.level == 1 and node.module == "configuration_exoformer"
            assert is_ours or (node.level == 0 and str(node.module).split(".")[0] in allowed)


def test_without_transformers_one_line_says_what_to_install(tmp_path: Path) -> None:
    program = """
import sys
sys.modules["transformers"] = None
from megatron_exo.errors import one_line_errors
with one_line_errors():
    import megatron_exo.hf
"""
    result = run(program, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("error: transformers is not installed")
    assert "pip install 'megatron-exo[hf]'" in result.stderr
    assert len(result.stderr.splitlines()) == 1
