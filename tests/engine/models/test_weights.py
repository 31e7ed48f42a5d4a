from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.models.errors import ModelError
from headrace.engine.models.weights import LoadedModel, load_model, resolve_device, resolve_dtype
from support.decoders import Driver, load_quietly, prompt, saved_model


def test_progress_rises_to_one_and_names_the_layers(tmp_path: Path) -> None:
    told: list[tuple[float, str]] = []
    load_model(
        saved_model("llama", tmp_path),
        dtype="fp32",
        device="cpu",
        progress=lambda fraction, what: told.append((fraction, what)),
    )
    fractions = [fraction for fraction, _ in told]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert [what for _, what in told if what.startswith("layer")] == [
        "layer 1",
        "layer 2",
        "layer 3",
    ]


def test_revision_is_of_the_content_not_the_place(tmp_path: Path) -> None:
    first = saved_model("llama", tmp_path / "a")
    twin = saved_model("llama", tmp_path / "b")
    other = saved_model("llama-mha", tmp_path / "c")
    revisions = [load_quietly(folder).revision for folder in (first, twin, other)]
    assert revisions[0] == revisions[1] != revisions[2]
    weights = twin / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 0x40
    weights.write_bytes(content)
    assert load_quietly(twin).revision != revisions[0]


def test_other_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"model\.bin is neither"):
        load_quietly(tmp_path / "model.bin")
    with pytest.raises(ModelError, match="no such file"):
        load_quietly(tmp_path / "absent.gguf")


def test_dtype_and_device() -> None:
    assert resolve_device("cpu") == "cpu"
    assert resolve_dtype("bf16", "cpu") == "bf16"
    assert resolve_dtype("auto", "cuda") == "bf16"
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert resolve_dtype("auto", "cpu") == ("bf16" if native else "fp32")
    with pytest.raises(ModelError, match="fp16"):
        resolve_dtype("fp16", "cpu")
    with pytest.raises(ModelError, match="tpu"):
        resolve_device("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to be had")
def test_cuda_without_cuda_is_refused() -> None:
    with pytest.raises(ModelError, match="no usable CUDA device"):
        resolve_device("cuda")


@pytest.fixture(scope="module")
def smol_path() -> Path:
    from headrace.engine.models.store import resolve

    path = resolve("smollm2-135m-instruct").path
    assert path is not None, "run `make model` first"
    return path


@pytest.fixture(scope="module")
def smol(smol_path: Path) -> LoadedModel:
    return load_quietly(smol_path)


@pytest.fixture(scope="module")
def smol_reference(smol_path: Path) -> Any:
    """transformers' own reading of the file; it takes a while. `from_pretrained` would do the same
    steps, but insists on the accelerate package."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(str(smol_path.parent), gguf_file=smol_path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    read = load_gguf_checkpoint(str(smol_path), return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    assert config.tie_word_embeddings
    return model.eval()


@pytest.mark.model
def test_smollm2_is_what_it_says(smol: LoadedModel) -> None:
    assert smol.parameters == 134_515_008
    assert (smol.config.architecture, smol.config.context_length) == ("llama", 8192)
    assert smol.config.eos_token_ids == (2,)
    assert smol.config.eos_token == "<|im_end|>"


@pytest.mark.model
@pytest.mark.parametrize("length", [1, 17, 130])
def test_smollm2_logits_equal_the_reference(
    smol: LoadedModel, smol_reference: Any, length: int
) -> None:
    """A Q or K row out of place would change every one of them."""
    tokens = [token * 300 for token in prompt(length)]
    with torch.no_grad():
        wanted = smol_reference(torch.tensor([tokens])).logits[0]
    driver = Driver(smol)
    sequence = driver.sequence(tokens[:1])
    for position in range(1, length + 1):
        if position in (1, 2, 16, 64, length):
            sequence.tokens = tokens[:position]
            driver.step(driver.chunk(sequence))
            ours = driver.greedy.seen[sequence.id, position]
            torch.testing.assert_close(ours, wanted[position - 1], rtol=1e-4, atol=1e-3)
            assert int(ours.argmax()) == int(wanted[position - 1].argmax())


@pytest.mark.model
def test_smollm2_in_a_crowd_is_the_same_to_the_last_bit(smol: LoadedModel) -> None:
    """Real widths: a prompt in chunks among decodes, against the same prompt alone."""
    tokens = [token * 300 for token in prompt(150, seed=1)]
    driver = Driver(smol, num_blocks=200)
    alone = driver.sequence(tokens)
    driver.generate(alone, 4)
    crowd = [driver.sequence([token * 300 for token in prompt(9, seed)]) for seed in range(9)]
    subject = driver.sequence(tokens)
    while subject.num_output < 4:
        driver.step(*(driver.chunk(sequence, 61) for sequence in (*crowd, subject)))
    assert subject.tokens == alone.tokens
    for known in range(150, 154):
        seen = driver.greedy.seen
        assert torch.equal(seen[subject.id, known], seen[alone.id, known])
